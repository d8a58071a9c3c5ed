# `make demo` and `make test` are all a new machine needs: each makes its own environment in .venv first.
# Everything pip honours works here, e.g. PIP_INDEX_URL, PIP_NO_INDEX=1 PIP_FIND_LINKS=wheelhouse (CONTRIBUTING.md, "Offline").
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
EXTRAS := run,mpi,open-catalyst,openfold-data,analysis,parquet,fleet,nvml,export,official,tune,numerics,offload,docs,test
BUILD := setuptools>=77
# A worker takes whole files of tests: session fixtures (a Slurm cluster, a data set) are made once. The longest files go first
# (tests/conftest.py). Four workers on two cores: many tests wait for processes that they started.
PYTEST := -m pytest -n 4 --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.ready

# Compiled modules are kept, whatever the caller's environment says: hundreds of processes load them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-reference test-matrix lint docs env wheelhouse slurm clean

demo: $(READY)
	@$(PY) -m mlhpc demo $(ARGS)

test: $(READY) slurm
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" OMP_NUM_THREADS=1 $(PY) $(PYTEST) -m "not long" $(ARGS)

# What takes minutes: convergence from five fresh seeds, fuzzing, full matrices. Results are kept in benchmarks/results/.
test-long: $(READY) slurm
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" OMP_NUM_THREADS=1 $(PY) -m pytest -m long --timeout 3600 $(ARGS)

# Our code beside the public reference codes: MLHPC_REFERENCES names a folder of their clones (CONTRIBUTING.md).
test-reference: $(READY)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/reference --timeout 1200 $(ARGS)

# Other Pythons (those found on PATH), and the oldest and newest allowed version of each dependency.
test-matrix: $(READY)
	@$(PY) benchmarks/matrix.py $(ARGS)

lint: $(READY)
	@$(PY) -m ruff check . && $(PY) -m mypy

# The pages of docs/ as a site with search, in site/. The variable silences what mkdocs-material says about its successor.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q && echo "mlhpc: site/index.html"

env: $(READY)

$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"mlhpc needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]} (choose one: make PYTHON=/path/to/python3.11)")'
	@echo "mlhpc: making the environment $(VENV) (once; pinned in constraints.txt)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $(READY)

# All that the environment is made of, as wheels, for a machine without internet (CONTRIBUTING.md, "Offline install"). setuptools is
# what builds mlhpc: pip wants it from the same folder.
wheelhouse:
	@$(PYTHON) -m venv $@/.pip
	@$@/.pip/bin/python -m pip wheel -q --disable-pip-version-check -c constraints.txt -w $@ ".[$(EXTRAS)]" "$(BUILD)"
	@rm -rf $@/.pip
	@echo "mlhpc: $$(ls $@ | wc -l) wheels in $@/"

# The tests with a real Slurm and Grid Engine need Debian's packages. They are installed only by root and only when asked for. Grid
# Engine's would start daemons: policy-rc.d forbids it, and nothing is configured, because each session of tests makes its own cell.
slurm:
	@if [ "$$MLHPC_INSTALL_SLURM" = 1 ] && [ "$$(id -u)" = 0 ] && ! { command -v slurmctld && command -v sge_qmaster; } >/dev/null; then \
	  echo "mlhpc: installing slurm-wlm, munge and gridengine (MLHPC_INSTALL_SLURM=1)"; \
	  for name in common client exec master; do echo "gridengine-$$name shared/gridengineconfig boolean false"; done | debconf-set-selections; \
	  policy=/usr/sbin/policy-rc.d; [ -e $$policy ] || { printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; mine=1; }; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    slurm-wlm munge gridengine-master gridengine-exec gridengine-client >/dev/null; \
	  code=$$?; [ -z "$$mine" ] || rm $$policy; exit $$code; \
	fi

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
