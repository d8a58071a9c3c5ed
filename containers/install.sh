#!/bin/sh
# Installs mlhpc in /opt/mlhpc of an image, with the versions of constraints.txt. Dockerfile and mlhpc.def both run it, in a checkout.
# TORCH_INDEX: where torch is taken from; its CPU build has an index of its own. EXTRAS: parts of mlhpc (pyproject.toml).
set -eu
python3 -m venv /opt/mlhpc
# shellcheck disable=SC2086  # no index is no word
/opt/mlhpc/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
/opt/mlhpc/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS:-run,mpi,open-catalyst,openfold-data,analysis,parquet,official,tune,fleet,nvml,export}]"
