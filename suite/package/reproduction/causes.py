"""Lists the differences between two runs, the likeliest cause first. Pure functions of their `RunFacts`.

A cause comes before its consequences: other data, another configuration, other code, other libraries, another machine.
Facts that differ between any two runs are not compared: times, free memory, host names, job numbers. Nor are facts that
cannot change a number of a run: other workloads' files, tools for tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import structs

from mlhpc.suite import REDACTED
from mlhpc.suite.files import render_repr
from mlhpc.suite.log.origin.installed import InstalledPackage, convert_distribution_name
from mlhpc.suite.machine.facts import UNKNOWN, Facts
from mlhpc.suite.package.reproduction.document import Difference
from mlhpc.suite.package.reproduction.run_facts import RunFacts

LOST, ALTERED, DATA = "lost file", "altered file", "data"
CONFIGURATION, DEFAULT, SEED, RANKS = "configuration", "changed default", "seed", "ranks"
CHANGES, COMMIT, VERSION, FILES = "uncommitted changes", "commit", "suite version", "suite files"
TORCH, PACKAGE, PYTHON, THREADS = "torch", "package", "python", "threads"
CHOICE = "measured choice"
DEVICE, PROCESSOR, LIBRARY, VARIABLE = "device", "processor", "library", "environment variable"
KERNEL, CLOCK, LOCALE, TIME_ZONE, OTHER = "kernel", "firmware and clock", "locale", "time zone", "other package"
ORDER = (
    *(LOST, ALTERED, DATA, CONFIGURATION, DEFAULT, SEED, RANKS, CHANGES, COMMIT, VERSION, FILES),
    *(TORCH, PACKAGE, PYTHON, CHOICE, THREADS, DEVICE, PROCESSOR, LIBRARY, VARIABLE),
    *(KERNEL, CLOCK, OTHER, LOCALE, TIME_ZONE),
)
# Settings of places and of the supervision of a run, which change no loss. ``choices`` says only how a machine chooses;
# the choices that it made are compared.
OPERATIONAL = frozenset(
    {"data", "staging", "checkpoint", "watchdog", "cache_drop_command", "submission", "verify_data", "choices"}
)
# Distributions that take part in the arithmetic or the data, and those that come with them
_NUMERIC_PACKAGES = re.compile(
    "torch|triton|nvidia-.*|numpy|scipy|h5py|mpi4py|mpich|openmpi|impi-rt|google-crc32c|ase|matscipy|lmdb|intel-.*"
    "|mkl.*"
)
_THREADS = re.compile("(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS)_.*")
_LOCALE = re.compile("LANG|LANGUAGE|LC_[A-Z]+")
_LIBRARY = re.compile("LD_.*")
_MISSING = "none"


def group_by_cause(differences: Iterator[Difference] | list[Difference]) -> tuple[Difference, ...]:
    """Sort differences by cause. Differences of one kind keep their order."""
    return tuple(sorted(differences, key=lambda each: ORDER.index(each.kind)))


def compare_run_facts(was: RunFacts, now: RunFacts, *, workload: str | None) -> tuple[Difference, ...]:
    """List the differences between two runs, or a run and a machine, the likeliest cause first.

    A fact that only one of them has is no difference.
    """
    found = [
        *(
            compare_configs(was.config, now.config, CONFIGURATION)
            if was.config is not None and now.config is not None
            else ()
        ),
        *_compare_values(SEED, "seed", was.seed, now.seed),
        *_compare_values(RANKS, "number of ranks", was.ranks, now.ranks),
        *_compare_values(RANKS, "number of nodes", was.nodes, now.nodes),
        *_compare_values(DATA, "data manifest", was.data_manifest, now.data_manifest),
        *_compare_code(was, now, workload),
        *_compare_environment(was, now),
    ]
    for name in sorted({*was.choices} & {*now.choices}):  # a choice of one run only follows from its configuration
        found += _compare_values(CHOICE, name, was.choices[name], now.choices[name])
    if was.facts is not None and now.facts is not None:
        found += compare_facts(was.facts, now.facts, running=now.config is not None)
    for kind, what, key in ((DEVICE, "device", "device"), (THREADS, "threads per rank", "threads_per_rank")):
        found += _compare_values(kind, what, was.about.get(key), now.about.get(key))
    return group_by_cause(found)


def compare_facts(was: Facts, now: Facts, *, running: bool = True) -> list[Difference]:
    """List the differences between two nodes, variables first: OMP_PROC_BIND changes the CPUs that a run may use.

    Without ``running``, ``now`` is a machine on which no launcher has set variables yet.
    """
    found = []
    names = {*was.tuning, *now.tuning} if running else {*now.tuning}
    for name in sorted(names):
        one, other = was.tuning.get(name), now.tuning.get(name)
        if one != other and REDACTED not in f"{one}{other}":
            found.append(
                Difference(kind=_choose_kind(name), what=name, was=_render_value(one), now=_render_value(other))
            )
    found += [
        difference for kind, what, get in _FACTS for difference in _compare_values(kind, what, get(was), get(now))
    ]
    return found


def _choose_kind(name: str) -> str:
    if name == "TZ":
        return TIME_ZONE
    kinds = ((_THREADS, THREADS), (_LOCALE, LOCALE), (_LIBRARY, LIBRARY))
    return next((kind for pattern, kind in kinds if pattern.fullmatch(name)), VARIABLE)


_FACTS: tuple[tuple[str, str, Callable[[Facts], object]], ...] = (
    (PROCESSOR, "processor", lambda facts: facts.cpu.model),
    (PROCESSOR, "architecture", lambda facts: facts.cpu.architecture),
    (PROCESSOR, "vector instructions", lambda facts: " ".join(facts.cpu.simd)),
    (PROCESSOR, "cores", lambda facts: facts.cpu.cores),
    (THREADS, "CPUs that the run may use", lambda facts: facts.limits.cpus_allowed),
    (THREADS, "CPU quota", lambda facts: facts.limits.cpu_quota),
    (DEVICE, "accelerators", lambda facts: ", ".join(f"{each.model} ({each.driver})" for each in facts.accelerators)),
    (LIBRARY, "libc", lambda facts: facts.software.libc),
    (LIBRARY, "loader", lambda facts: facts.software.loader),
    (LIBRARY, "preloaded libraries", lambda facts: facts.software.preloaded),
    (LIBRARY, "MPI", lambda facts: facts.software.mpi),
    (LIBRARY, "modules", lambda facts: " ".join(facts.software.modules)),
    (KERNEL, "operating system", lambda facts: facts.software.operating_system),
    (KERNEL, "kernel", lambda facts: facts.software.kernel),
    (KERNEL, "container", lambda facts: facts.software.container),
    (KERNEL, "huge pages", lambda facts: facts.memory.transparent_hugepages),
    (CLOCK, "firmware", lambda facts: f"{facts.firmware.bios_vendor} {facts.firmware.bios_version}"),
    (CLOCK, "clock source", lambda facts: facts.software.clock_source),
    (CLOCK, "governor", lambda facts: facts.cpu.governor),
    (CLOCK, "boost", lambda facts: facts.cpu.boost),
    (CLOCK, "threads per core", lambda facts: facts.cpu.smt),
    (LOCALE, "locale", lambda facts: facts.software.locale),
    (TIME_ZONE, "time zone", lambda facts: facts.software.time_zone),
)


def _compare_values(kind: str, what: str, was: object, now: object) -> Iterator[Difference]:
    """Yield the difference of two values, if both are known."""
    unknown = {was, now} & {None, UNKNOWN, f"{UNKNOWN} {UNKNOWN}"}
    if was != now and not unknown and REDACTED not in f"{was}{now}":
        yield Difference(kind=kind, what=what, was=_render_value(was), now=_render_value(now))


def compare_configs(was: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> Iterator[Difference]:
    """List the settings that differ, by their dotted names, except settings that change no number."""
    one, other = (
        _list_leaves({key: value for key, value in each.items() if key not in OPERATIONAL}) for each in (was, now)
    )
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Difference(kind=kind, what=name, was=_render_value(one.get(name)), now=_render_value(other.get(name)))


def _list_leaves(values: Mapping[str, Any], above: str = "", depth: int = 0) -> dict[str, Any]:
    """Return the leaves by dotted name. A setting of None counts as absent, a list as one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and depth < 8:  # a stranger's file may be nested without end
            found |= _list_leaves(value, f"{name}.", depth + 1)
        elif value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _compare_code(was: RunFacts, now: RunFacts, workload: str | None) -> Iterator[Difference]:
    """Compare the suite's code. A commit or a change without effect on the files of a run is no difference."""
    yield from _compare_values(VERSION, "suite version", was.suite_version, now.suite_version)
    one, other = _select_used(was.sources, workload), _select_used(now.sources, workload)
    # Without digests of both sides only commits and diffs can be compared.
    files = _list_differing(one, other) if one and other else []
    if one and other and not files:
        return
    if was.git is not None and now.git is not None:
        diffs = was.git.get("diff_sha256"), now.git.get("diff_sha256")
        if diffs[0] != diffs[1]:
            what = _describe_change(was.changes, now.changes, files)
            yield Difference(kind=CHANGES, what=what, was=_render_value(diffs[0], 12), now=_render_value(diffs[1], 12))
        yield from _compare_values(COMMIT, "commit", str(was.git.get("commit"))[:12], str(now.git.get("commit"))[:12])
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        name = files[0]
        yield Difference(
            kind=FILES, what=name + more, was=_render_value(one.get(name), 12), now=_render_value(other.get(name), 12)
        )


def _list_differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*was, *now} if was.get(name) != now.get(name))


def _describe_change(was: str, now: str, files: list[str]) -> str:
    """Name the files in which two diffs differ, first the files that a run uses."""
    by_file = re.compile(r"(?ms)^diff --git a/(\S+) (.*?)(?=^diff --git |\Z)")
    names = _list_differing(dict(by_file.findall(was)), dict(by_file.findall(now)))
    used = [name for name in names if name in files] or names
    return ", ".join(used[:3]) + (f" and {len(used) - 3} more" if len(used) > 3 else "") or "uncommitted changes"


def _select_used(files: Mapping[str, str], workload: str | None) -> dict[str, str]:
    """Select the files that a run of a workload may use: no analysis, no commands, no other workload."""
    suite = r"suite/(?!commands/|compliance/|package/|cli/|launch/).*"
    inside = re.compile(rf"{suite}|workloads/(?:__init__\.py|moe/.*|{re.escape(workload or '')}/.*)")
    return {name: sha256 for name, sha256 in files.items() if inside.fullmatch(name)}


def _compare_environment(was: RunFacts, now: RunFacts) -> Iterator[Difference]:
    if was.environment is None or now.environment is None:
        return
    yield from _compare_values(PYTHON, "Python", was.environment.python, now.environment.python)
    one, other = was.environment.by_name(), now.environment.by_name()
    for name in sorted({*one, *other} - {convert_distribution_name("mlhpc")}):
        yield from _compare_distributions(name, one.get(name), other.get(name))


def _compare_distributions(
    name: str, was: InstalledPackage | None, now: InstalledPackage | None
) -> Iterator[Difference]:
    """Compare one distribution in two environments. A missing one matters only if it takes part in a run."""
    computes = _NUMERIC_PACKAGES.fullmatch(name) is not None
    kind = PACKAGE if computes else OTHER
    if name == "torch":
        kind = TORCH
    versions = was.version if was else _MISSING, now.version if now else _MISSING
    if versions[0] != versions[1]:
        if computes or _MISSING not in versions:
            yield Difference(kind=kind, what=name, was=versions[0], now=versions[1])
    elif computes and was is not None and now is not None:
        # Two builds of one version differ in their files, such as torch for CPUs and for CUDA.
        for found in _compare_values(kind, f"{name} {was.version}: other files", was.record_sha256, now.record_sha256):
            yield structs.replace(found, was=f"files {found.was[:12]}", now=f"files {found.now[:12]}")


def _render_value(value: object, longest: int = 80) -> str:
    if value is None:
        return _MISSING
    return value[:longest] if isinstance(value, str) else render_repr(value, longest=longest)
