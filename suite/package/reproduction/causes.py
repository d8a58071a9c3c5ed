"""Names what differs between two runs, the likeliest cause first: pure functions of what they tell.

The order is that in which a cause comes before what follows from it: other data, another configuration, other code, other
libraries, another machine. Facts that differ between any two runs (times, free memory, names of hosts, numbers of jobs) are not
compared, nor is what cannot change a number of a run (other workloads' files, tools for tests).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from suite import REDACTED
from suite.files import brief
from suite.log.origin.installed import normal
from suite.machine.facts import UNKNOWN, Facts
from suite.package.reproduction.document import Difference
from suite.package.reproduction.told import Told

LOST, ALTERED, DATA = "lost file", "altered file", "data"
CONFIGURATION, DEFAULT, SEED, RANKS = "configuration", "changed default", "seed", "ranks"
CHANGES, COMMIT, VERSION, FILES = "uncommitted changes", "commit", "suite version", "suite files"
TORCH, PACKAGE, PYTHON, THREADS = "torch", "package", "python", "threads"
CHOICE = "measured choice"
DEVICE, PROCESSOR, LIBRARY, VARIABLE = "device", "processor", "library", "environment variable"
KERNEL, CLOCK, LOCALE, TIME_ZONE, OTHER = "kernel", "firmware and clock", "locale", "time zone", "other package"
ORDER = (
    *(LOST, ALTERED, DATA, CONFIGURATION, DEFAULT, SEED, RANKS, CHANGES, COMMIT, VERSION, FILES),
    *(
        TORCH,
        PACKAGE,
        PYTHON,
        CHOICE,
        THREADS,
        DEVICE,
        PROCESSOR,
        LIBRARY,
        VARIABLE,
        KERNEL,
        CLOCK,
        OTHER,
        LOCALE,
        TIME_ZONE,
    ),
)
# Of the configuration: where things are and how a run is looked after. None changes a loss: of the choices that a machine makes,
# those that were made are compared.
OPERATIONAL = frozenset(
    {"data", "staging", "checkpoint", "watchdog", "cache_drop_command", "submission", "verify_data", "choices"}
)
# Distributions that take part in the arithmetic or the data, and those that come with them
_COMPUTES = re.compile(
    "torch|triton|nvidia-.*|numpy|scipy|h5py|mpi4py|mpich|openmpi|impi-rt|google-crc32c|ase|matscipy|lmdb|intel-.*|mkl.*"
)
_THREADS = re.compile("(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS)_.*")
_LOCALE = re.compile("LANG|LANGUAGE|LC_[A-Z]+")
_LIBRARY = re.compile("LD_.*")
_MISSING = "none"


def rank(differences: Iterator[Difference] | list[Difference]) -> tuple[Difference, ...]:
    """Put differences into the order of causes; those of one kind stay in theirs."""
    return tuple(sorted(differences, key=lambda each: ORDER.index(each.kind)))


def compare_told(was: Told, now: Told, *, workload: str | None) -> tuple[Difference, ...]:
    """List what two runs, or a run and a machine, tell differently, the likeliest cause first.

    What one of them does not tell is no difference.
    """
    found = [
        *_compare_config(was.config, now.config),
        *_pair(SEED, "seed", was.seed, now.seed),
        *_pair(RANKS, "number of ranks", was.ranks, now.ranks),
        *_pair(RANKS, "number of nodes", was.nodes, now.nodes),
        *_pair(DATA, "data manifest", was.data_manifest, now.data_manifest),
        *_compare_code(was, now, workload),
        *_compare_environment(was, now),
        *_compare_choices(was.choices, now.choices),
    ]
    if was.facts is not None and now.facts is not None:
        found += compare_facts(was.facts, now.facts, running=now.config is not None)
    for kind, what, key in ((DEVICE, "device", "device"), (THREADS, "threads per rank", "threads_per_rank")):
        found += _pair(kind, what, was.about.get(key), now.about.get(key))
    return rank(found)


def compare_facts(was: Facts, now: Facts, *, running: bool = True) -> list[Difference]:
    """List what two nodes tell differently, variables first: OMP_PROC_BIND changes the CPUs that a run may use.

    Not ``running``: ``now`` is a machine before a launcher has set its variables.
    """
    found = []
    names = {*was.tuning, *now.tuning} if running else {*now.tuning}
    for name in sorted(names):
        one, other = was.tuning.get(name), now.tuning.get(name)
        if one != other and REDACTED not in f"{one}{other}":
            found.append(Difference(kind=_kind(name), what=name, was=_shown(one), now=_shown(other)))
    found += [difference for kind, what, get in _FACTS for difference in _pair(kind, what, get(was), get(now))]
    return found


def _kind(name: str) -> str:
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


def _pair(kind: str, what: str, was: object, now: object) -> Iterator[Difference]:
    """The difference of two values, if both are known."""
    if was != now and not {was, now} & {None, UNKNOWN, f"{UNKNOWN} {UNKNOWN}"} and REDACTED not in f"{was}{now}":
        yield Difference(kind=kind, what=what, was=_shown(was), now=_shown(now))


def _compare_config(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[Difference]:
    if was is not None and now is not None:
        yield from compare_configs(was, now, CONFIGURATION)


def compare_configs(was: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> Iterator[Difference]:
    """List the settings that differ, by their dotted names; those that change no number are left out."""
    one, other = (_flat({key: value for key, value in each.items() if key not in OPERATIONAL}) for each in (was, now))
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Difference(kind=kind, what=name, was=_shown(one.get(name)), now=_shown(other.get(name)))


def _compare_choices(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """The choices that two runs made otherwise; one that only one of them made follows from its configuration or machine."""
    for name in sorted({*was} & {*now}):
        yield from _pair(CHOICE, name, was[name], now[name])


def _flat(values: Mapping[str, Any], above: str = "", depth: int = 0) -> dict[str, Any]:
    """The leaves by dotted name. None is what a setting has that is not given; a list counts as one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and depth < 8:
            found |= _flat(value, f"{name}.", depth + 1)
        elif value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _compare_code(was: Told, now: Told, workload: str | None) -> Iterator[Difference]:
    """What differs of the suite's code. A commit, or changes, without effect on the files that a run uses, is no difference."""
    yield from _pair(VERSION, "suite version", was.suite_version, now.suite_version)
    one, other = (_used(each.sources, workload) for each in (was, now))
    files = sorted(name for name in {*one, *other} if one.get(name) != other.get(name)) if one and other else []
    if one and other and not files:
        return
    if was.git is not None and now.git is not None:
        if was.git.get("diff_sha256") != now.git.get("diff_sha256"):
            yield Difference(kind=CHANGES, what=_changed(was, now, files), was=_changes(was), now=_changes(now))
        yield from _pair(COMMIT, "commit", str(was.git.get("commit"))[:12], str(now.git.get("commit"))[:12])
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        name = files[0]
        yield Difference(kind=FILES, what=name + more, was=_shown(one.get(name), 12), now=_shown(other.get(name), 12))


def _changed(was: Told, now: Told, files: list[str]) -> str:
    """The files that only one of two sets of uncommitted changes has, or has otherwise."""
    one, other = (
        dict(re.findall(r"(?ms)^diff --git a/(\S+) (.*?)(?=^diff --git |\Z)", each.changes)) for each in (was, now)
    )
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    used = [name for name in names if name in files] or names
    return ", ".join(used[:3]) + (f" and {len(used) - 3} more" if len(used) > 3 else "") or "uncommitted changes"


def _changes(told: Told) -> str:
    return _shown((told.git or {}).get("diff_sha256"), 12)


def _used(files: Mapping[str, str], workload: str | None) -> dict[str, str]:
    """The files that a run of a workload may use: not those of the analysis, of the commands, or of another workload."""
    inside = re.compile(
        rf"suite/(?!commands/|compliance/|package/|cli/|launch/).*|workloads/(?:__init__\.py|moe/.*|{re.escape(workload or '')}/.*)"
    )
    return {name: sha256 for name, sha256 in files.items() if inside.fullmatch(name)}


def _compare_environment(was: Told, now: Told) -> Iterator[Difference]:
    if was.environment is None or now.environment is None:
        return
    yield from _pair(PYTHON, "Python", was.environment.python, now.environment.python)
    one, other = was.environment.by_name(), now.environment.by_name()
    for name in sorted({*one, *other} - {normal("mlhpc")}):
        a, b = one.get(name), other.get(name)
        computes = _COMPUTES.fullmatch(name) is not None
        kind = TORCH if name == "torch" else PACKAGE if computes else OTHER
        if a is None or b is None:
            if computes:
                yield Difference(
                    kind=kind, what=name, was=a.version if a else _MISSING, now=b.version if b else _MISSING
                )
        elif a.version != b.version:
            yield Difference(kind=kind, what=name, was=a.version, now=b.version)
        elif computes and None not in (a.record_sha256, b.record_sha256) and a.record_sha256 != b.record_sha256:
            was_files, now_files = _shown(a.record_sha256, 12), _shown(b.record_sha256, 12)
            yield Difference(
                kind=kind, what=f"{name} {a.version}: other files", was=f"files {was_files}", now=f"files {now_files}"
            )


def _shown(value: object, longest: int = 80) -> str:
    if value is None:
        return _MISSING
    return value[:longest] if isinstance(value, str) else brief(value, longest=longest)
