"""Each drift of what a run tells is the first that is named; what cannot change a number is not named at all."""

# ruff: noqa: E501  one case a line reads best as a table
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from mlhpc.suite.documents import convert, convert_to_plain_data
from mlhpc.suite.log import record
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.machine.facts import Accelerator, Facts
from mlhpc.suite.package.reproduction.judge import ORDER, compare_run_facts
from mlhpc.suite.package.reproduction.run_facts import RunFacts
from tests.fixtures.reproduction import ENVIRONMENT, FILES, LOSSES
from tests.fixtures.runs import node

CONFIG = {
    "workload": "cosmoflow",
    "global_batch_size": 8,
    "data": "here",
    "hyperparameters": {"lr": 0.1, "names": ["a"]},
}
FACTS = node(
    software={
        "libc": "glibc 2.36", "mpi": "MPICH 5.0", "kernel": "6.1", "time_zone": "UTC", "locale": "C",
        "loader": "ld-linux",
    },
    tuning={"OMP_NUM_THREADS": "1", "LC_ALL": "C", "SOME_TOKEN": "REDACTED"}, limits={"cpus_allowed": 2},
)  # fmt: skip
LOGGED = RunRecord(
    config=CONFIG, device="cpu", threads_per_rank=1, seed=7, ranks=2, nodes=1, data_manifest="0" * 64,
    first_losses=LOSSES, suite_version="1.0.0", choices={"experts": "loop, bmm to 1.5", "memory-format": "contiguous"},
)  # fmt: skip
WAS = RunFacts(
    LOGGED,
    git={"commit": "abc", "dirty": False},
    sources=FILES,
    environment=ENVIRONMENT,
    facts=FACTS,
)


def first(now: RunFacts, was: RunFacts = WAS) -> tuple[str, str] | None:
    found = compare_run_facts(was, now, workload="cosmoflow")
    return (found[0].kind, found[0].what) if found else None


def log(was: RunFacts = WAS, **changed: Any) -> RunFacts:
    return replace(was, run=replace(LOGGED, **changed))


def facts(**parts: Mapping[str, Any] | tuple[Any, ...]) -> RunFacts:
    document = convert_to_plain_data(FACTS)
    for name, values in parts.items():
        document[name] = document[name] | values if isinstance(values, Mapping) else values
    return replace(WAS, facts=convert(document, Facts))


def environment(**versions: str | None) -> RunFacts:
    kept = [
        structs.replace(item, version=versions.get(item.name, item.version))
        for item in ENVIRONMENT.distributions
        if versions.get(item.name, "") is not None
    ]
    return replace(WAS, environment=structs.replace(ENVIRONMENT, distributions=tuple(kept)))


def rebuilt(name: str) -> RunFacts:
    kept = [
        structs.replace(item, record_sha256="e" * 64) if item.name == name else item
        for item in ENVIRONMENT.distributions
    ]
    return replace(WAS, environment=structs.replace(ENVIRONMENT, distributions=tuple(kept)))


def files(**changed: str) -> Mapping[str, str]:
    return {**FILES, **{name.replace("__", "/") + ".py": digest for name, digest in changed.items()}}


DIFF = "diff --git a/suite/training/loop.py b/suite/training/loop.py\n--- a\n+++ b\n"
OTHER_LOOP = files(suite__training__loop="9" * 64)
DRIFTS: dict[str, tuple[RunFacts, tuple[str, str]]] = {
    "a data set": (log(data_manifest="1" * 64), ("data", "data manifest")),
    "a setting": (log(config=CONFIG | {"global_batch_size": 16}), ("configuration", "global_batch_size")),
    "a hyperparameter": (
        log(config=CONFIG | {"hyperparameters": {"lr": 0.2, "names": ["a"]}}), ("configuration", "hyperparameters.lr"),
    ),
    "a new setting": (log(config=CONFIG | {"smoothing": 0.1}), ("configuration", "smoothing")),
    "the seed": (log(seed=8), ("seed", "seed")),
    "ranks": (log(ranks=4), ("ranks", "number of ranks")),
    "nodes": (log(nodes=2), ("ranks", "number of nodes")),
    "changes": (replace(WAS, git={"commit": "abc", "dirty": True, "diff_sha256": "f"}, changes=DIFF,
                        sources=OTHER_LOOP), ("uncommitted changes", "suite/training/loop.py")),
    "the commit": (replace(WAS, git={"commit": "def", "dirty": False}, sources=OTHER_LOOP), ("commit", "commit")),
    "the version": (log(suite_version="1.0.1"), ("suite version", "suite version")),
    "a file": (replace(WAS, git=None, sources=OTHER_LOOP), ("suite files", "suite/training/loop.py")),
    "a file of the workload": (
        replace(WAS, git=None, sources=files(workloads__cosmoflow__model="9" * 64)), ("suite files", "workloads/cosmoflow/model.py"),
    ),
    "torch": (environment(torch="2.13.1"), ("torch", "torch")),
    "numpy": (environment(numpy="2.4.1"), ("package", "numpy")),
    "no numpy": (environment(numpy=None), ("package", "numpy")),
    "numpy's files": (rebuilt("numpy"), ("package", "numpy 2.4.0: other files")),
    "pytest": (environment(pytest="9.1.0"), ("other package", "pytest")),
    "Python": (replace(WAS, environment=structs.replace(ENVIRONMENT, python="CPython 3.12.0")), ("python", "Python")),
    "threads": (facts(tuning={"OMP_NUM_THREADS": "2"}), ("threads", "OMP_NUM_THREADS")),
    "a variable": (facts(tuning={"NCCL_ALGO": "Ring"}), ("environment variable", "NCCL_ALGO")),
    "a path": (facts(tuning={"LD_LIBRARY_PATH": "/x"}), ("library", "LD_LIBRARY_PATH")),
    "a variable that binds": (
        facts(tuning={"OMP_PROC_BIND": "true"}, limits={"cpus_allowed": 1}), ("threads", "OMP_PROC_BIND"),
    ),
    "CPUs": (facts(limits={"cpus_allowed": 1}), ("threads", "CPUs that the run may use")),
    "a measured choice": (log(choices=LOGGED.choices | {"experts": "grouped_mm"}), ("measured choice", "experts")),
    "a measured choice, of another processor": (
        log(facts(cpu={"model": "Model U"}), choices={"experts": "onednn"}), ("measured choice", "experts"),
    ),
    "the device": (log(device="cuda"), ("device", "device")),
    "a GPU": (facts(accelerators=(convert_to_plain_data(Accelerator(vendor="NVIDIA", model="H100")),)), ("device", "accelerators")),
    "the processor": (facts(cpu={"model": "Model U"}), ("processor", "processor")),
    "instructions": (facts(cpu={"simd": ("avx2",)}), ("processor", "vector instructions")),
    "libc": (facts(software={"libc": "glibc 2.39"}), ("library", "libc")),
    "MPI": (facts(software={"mpi": "Open MPI 5"}), ("library", "MPI")),
    "the kernel": (facts(software={"kernel": "6.2"}), ("kernel", "kernel")),
    "the locale": (facts(tuning={"LC_ALL": "de_DE"}), ("locale", "LC_ALL")),
    "the time zone": (facts(software={"time_zone": "Asia/Tokyo"}), ("time zone", "time zone")),
}  # fmt: skip


@pytest.mark.parametrize("name", DRIFTS)
def test_a_drift_is_named_first(name: str) -> None:
    now, expected = DRIFTS[name]
    assert first(now) == expected


HARMLESS: dict[str, Callable[[], RunFacts]] = {
    "nothing": lambda: WAS,
    "another place of the data": lambda: log(config=CONFIG | {"data": "there"}),
    "another checkpoint interval": lambda: log(config=CONFIG | {"checkpoint": {"interval_s": 1.0}}),
    "other losses": lambda: log(first_losses=(1.0,)),
    "a file of the commands": lambda: replace(WAS, sources=files(suite__commands__run="9" * 64)),
    "changes of the docs": lambda: replace(WAS, git={"commit": "abc", "dirty": True, "diff_sha256": "f"}),
    "a commit that changes no file of a run": lambda: replace(WAS, git={"commit": "def", "dirty": False}),
    "a host's name": lambda: replace(WAS, facts=structs.replace(FACTS, node="b", hostname="b")),
    "free space": lambda: facts(file_systems=({"purpose": "data", "path": "/d", "free_gib": 1.0},)),
    "pytest's files": lambda: rebuilt("pytest"),
    "choices that were not made": lambda: log(choices={}),
    "a choice of another shape": lambda: log(choices=LOGGED.choices | {"experts-2": "loop"}),
    "whether choices are measured": lambda: log(config=CONFIG | {"choices": {"measure": False}}),
    "a secret": lambda: facts(tuning={"SOME_TOKEN": "another"}),
    "a kernel that is not known": lambda: facts(software={"kernel": "unknown"}),
    "no facts": lambda: replace(WAS, facts=None),
    "no environment": lambda: replace(WAS, environment=None),
    "a log alone": lambda: RunFacts(RunRecord(seed=7)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_number_is_not_named(name: str) -> None:
    assert first(HARMLESS[name]()) is None


def test_of_two_drifts_the_likelier_cause_is_first() -> None:
    now = log(replace(environment(torch="2.13.1"), facts=facts(cpu={"model": "Model U"}).facts), seed=8)
    assert [each.kind for each in compare_run_facts(WAS, now, workload="cosmoflow")] == ["seed", "torch", "processor"]
    assert len(set(ORDER)) == len(ORDER)
    assert {fact.cause[0] for fact in record.FACTS.values() if fact.cause is not None} <= set(ORDER)


def test_a_machine_on_which_nothing_ran_is_not_held_against_the_launchers_variables() -> None:
    unset = replace(log(config=None), facts=structs.replace(FACTS, tuning={"TZ": "UTC"}))
    found = compare_run_facts(WAS, unset, workload="cosmoflow")
    assert [each.what for each in found] == ["TZ"]
