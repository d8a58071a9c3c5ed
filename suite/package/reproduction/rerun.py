"""Reproduces one result with the installed suite: data, runs, paired runs. Judges each level by the outcome.

Every run is `mlhpc run` of this suite with the package's configuration. Nothing of the package is executed.

Runs a command of this suite within limits of time and memory. A stranger's configuration may ask for anything.

Judges level 1, the data: compares a data set on disk with the manifest of the package's logs. Reads only.

Reads the configuration of a package's run as data, without settings that act on this machine.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from msgspec import ValidationError, structs

from mlhpc.suite.compliance.rebuild import find_epochs_to_target
from mlhpc.suite.compliance.ruleset import Benchmark, read_ruleset, summarise_for_benchmark
from mlhpc.suite.config import ChoiceSettings, RunConfig, choose_default_data_root, load_config, resolve_config
from mlhpc.suite.data.manifest import MANIFEST_NAME, Manifest, check_shard, compute_fingerprint, read_manifest
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import YamlSource, convert, convert_to_plain_data
from mlhpc.suite.errors import NO_MEMORY, InputError
from mlhpc.suite.files import make_folder, read_bytes, render_bytes, render_duration, write_file_atomically
from mlhpc.suite.launch.local import MEMORY_RAN_OUT, make_suite_command
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.machine.probes.collect import collect_facts
from mlhpc.suite.package.reproduction import judge
from mlhpc.suite.package.reproduction.judge import (
    CONFIGURATION,
    DATA,
    DEFAULT,
    OPERATIONAL,
    Difference,
    LevelOutcome,
    LevelVerdict,
    compare_configs,
    compare_run_facts,
    group_by_cause,
    make_level_verdict,
)
from mlhpc.suite.package.reproduction.original import Original
from mlhpc.suite.package.reproduction.run_facts import RunFacts, collect_facts_of_this_machine, read_run_facts
from mlhpc.suite.processes import make_parent_death_hook
from mlhpc.suite.world import World

LIMIT_FACTOR = 10.0  # a run may take this multiple of the package's longest run
SHORTEST_S, LONGEST_S = 600.0, 7200.0  # bounds of that limit; --limit-minutes sets any other
MEMORY_SHARE = 0.8  # of the free memory, for all ranks together
GRACE_S = 60.0  # between SIGTERM and SIGKILL; `mlhpc run` gives its ranks 30 s to save
TAIL_BYTES = 2**16  # bytes at the end of a command's output that are read
# Threads cannot be made at a limit of private memory. Signal 9 alone says nothing: a person may have sent it.
_NO_MEMORY = re.compile(rf"{NO_MEMORY.pattern}|{MEMORY_RAN_OUT}|Thread creation failed")


@dataclass(frozen=True)
class RunLimits:
    """Limits of a command: seconds, the source of that number, and bytes of private memory per process."""

    seconds: float
    source: str
    memory: int | None


@dataclass(frozen=True)
class CommandResult:
    """The end of a command: exit code and last printed line. ``over`` names the limit that ended it, or is None."""

    code: int
    last: str
    over: str | None = None


def find_run_limits(
    records: Iterable[RunRecord], ranks: int, free: int | None, stated_s: float | None = None
) -> RunLimits:
    """Return the limits of a run here. Its time is ``stated_s``, or a multiple of the package's longest run.

    Each rank has its share of ``free`` bytes. A log may state any time, so the multiple has a ceiling.
    """
    memory = None if free is None else max(1, int(free * MEMORY_SHARE) // ranks)
    if stated_s is not None:
        return RunLimits(stated_s, "--limit-minutes", memory)
    took = max((_sum_run_seconds(record) for record in records), default=0.0)
    seconds = min(LONGEST_S, max(SHORTEST_S, LIMIT_FACTOR * took))
    return RunLimits(
        seconds, f"the package's longest run took {render_duration(took)}; --limit-minutes N sets it", memory
    )


def run_limited(
    words: Sequence[str], log: Path, bounds: RunLimits | None = None, ranks: Path | None = None
) -> CommandResult:
    """Run ``mlhpc WORDS`` with its output in ``log``, a new file. At its time limit it gets SIGTERM, then SIGKILL.

    It also ends with this process. ``ranks`` is the file with the output of its ranks. The memory limit is for the
    writable private memory of each process (RLIMIT_DATA).
    """
    make_folder(log.parent)
    over, memory = None, None if bounds is None else _limit_memory(bounds.memory)
    # x: the log of an earlier attempt is never overwritten.
    with log.open("xb") as file:
        process = subprocess.Popen(
            make_suite_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_make_child_setup(memory, make_parent_death_hook(os.getpid())),
        )
        with process:
            # First the time limit, then the time to save after SIGTERM.
            for limit_s, end in ((bounds.seconds if bounds else None, process.terminate), (GRACE_S, process.kill)):
                try:
                    process.wait(limit_s)
                    break
                except subprocess.TimeoutExpired:
                    assert bounds is not None
                    over = f"it was ended after {render_duration(bounds.seconds)} ({bounds.source})"
                    end()
    text = _read_tail(log) + ("" if ranks is None else _read_tail(ranks))
    if over is None and process.returncode and memory is not None and _NO_MEMORY.search(text):
        over = f"it needed more memory than the {render_bytes(memory)} that each rank may use here"
    # Lines that begin with the output folder are the summary that a run prints last.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(str(words[-1]))]
    last = (lines[-1] if lines else "no output").removeprefix("mlhpc: ").removeprefix(f"{words[-1]} trial 0: ")
    return CommandResult(process.returncode, last[:300], over)


def _sum_run_seconds(record: RunRecord) -> float:
    """Compute the seconds from init_start to run_stop, as far as the log has them."""
    seconds = record.init_s or 0.0
    if record.run_start_s and record.run_stop_s:
        seconds += max(0.0, record.run_stop_s - record.run_start_s)
    return seconds


def _limit_memory(memory: int | None) -> int | None:
    """Return the bytes to allow a process: no more than this process may use itself."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    return memory if memory is None or most == resource.RLIM_INFINITY else min(memory, most)


def _make_child_setup(memory: int | None, ask: Callable[[], None] | None) -> Callable[[], None]:
    """Return the function that the new process calls before it becomes the command."""

    def prepare() -> None:
        if ask is not None:
            ask()
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    return prepare


def _read_tail(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode("utf-8", "replace")


CONVERTED = ("converted", "public")  # names of generators that read files of others instead of making data


def judge_data(logged: str, kept: Mapping[str, Any], root: Path, how: str) -> LevelVerdict:
    """Compare a data set with the manifest's sha256 in the logs, and read every byte of it.

    ``how`` is regenerated or verified. ``kept`` is the manifest in the package. It shows which seed, shard or attribute
    differs first.
    """
    try:
        manifest = read_manifest(root)
    except (InputError, OSError) as error:
        return make_level_verdict(1, LevelOutcome.INCONCLUSIVE, f"the data cannot be read: {error}")
    compared = {"manifest_sha256": logged, "found_sha256": manifest.sha256, "bytes": manifest.bytes, "how": how}
    if manifest.sha256 != logged:
        cause = _name_difference(parse_kept(kept, logged), manifest)
        why = f"{cause.what} of the data set: {cause.was} in the package, {cause.now} here ({how})"
        return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, why, cause, compared)
    # An equal manifest says nothing about the files: each one is read.
    for entry in manifest.shards:
        problem = check_shard(root, entry, deep=True)
        if problem is not None:
            short = problem.removeprefix(f"{root / entry.file}: ")
            cause = Difference(kind=DATA, what=entry.file, was=f"sha256 {entry.sha256[:12]}", now=short[:120])
            return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, f"{entry.file}: {short}", cause, compared)
    why = f"{how}: {len(manifest.shards)} shards, {manifest.bytes} bytes, all sha256 equal"
    return make_level_verdict(1, LevelOutcome.REPRODUCED, why, compared=compared)


def parse_kept(kept: Mapping[str, Any], logged: str) -> Manifest | None:
    """Parse the manifest in a package. None if it is not the one that the logs name."""
    try:
        manifest = convert(dict(kept), Manifest)
    except ValidationError:
        return None
    return manifest if manifest.sha256 == logged else None


def explain_not_regenerated(manifest: Manifest | None) -> str | None:
    """Return why the data cannot be made again, as far as the manifest tells. None if they can."""
    if manifest is not None and manifest.generator.get("name") in CONVERTED:
        return "the data were converted from files of others; --data ROOT verifies a copy"
    return None


def _name_difference(was: Manifest | None, now: Manifest) -> Difference:
    """Name the first difference of two data sets, causes before consequences: settings, generator, shards."""
    if was is None:
        return Difference(kind=DATA, what="manifest", was="another sha256", now=now.sha256[:12])
    for what, one, other in (("size", was.size, now.size), ("seed", was.seed, now.seed)):
        if one != other:
            return Difference(kind=DATA, what=f"{what} of the data", was=str(one), now=str(other))
    for key in sorted({*was.generator, *now.generator}):
        recipe_was, recipe_now = was.generator.get(key), now.generator.get(key)
        if recipe_was != recipe_now:
            what = f"generator's {key}"[:100]
            return Difference(kind=DATA, what=what, was=str(recipe_was)[:80], now=str(recipe_now)[:80])
    theirs = {entry.file: f"sha256 {entry.sha256[:12]}" for entry in was.shards}
    ours = {entry.file: f"sha256 {entry.sha256[:12]}" for entry in now.shards}
    for file in sorted({*theirs, *ours}):
        if theirs.get(file) != ours.get(file):
            return Difference(kind=DATA, what=file, was=theirs.get(file, "none"), now=ours.get(file, "none"))
    return Difference(kind=DATA, what="attributes", was="those of the package", now="others")


MAX_BYTES = 2**18  # bytes of a config.yaml; those of the shipped workloads have 2,000
MAX_DEPTH = 12  # mappings and lists inside each other
MOST_THREADS = 64
SUBMISSION = "submission"  # the submitter and the division: names only, which act on nothing
_REFUSED_SETTINGS = {
    "cache_drop_command": "a command of a package is never run",
    "data": "the data are those of this machine",
    "staging": "a package does not say where this machine writes",
}


def read_package_config(descriptor: Descriptor, path: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """Read a package's config.yaml for the installed workload. Also returns why some settings are not followed.

    InputError if the file has anchors, or is larger or deeper than a run writes it. InputError also if the installed
    suite refuses a value.
    """
    source = read_plain_yaml(path)
    left_out = []
    # Places, commands and supervision of the package's machine must not act on this one.
    for key in sorted((OPERATIONAL - {SUBMISSION}) & source.data.keys()):
        value = source.data.pop(key)
        if key in _REFUSED_SETTINGS and value not in (None, {}, {"overlap": False}):
            left_out.append(f"{key}: {_REFUSED_SETTINGS[key]}")
    threads = source.data.get("loader_threads")
    if isinstance(threads, int) and threads > MOST_THREADS:
        source.data["loader_threads"] = MOST_THREADS
        left_out.append(f"loader_threads: at most {MOST_THREADS}")
    return resolve_config(descriptor, source), tuple(left_out)


def read_plain_yaml(path: Path) -> YamlSource:
    """Read a small YAML mapping without anchors: nested anchors can expand a small file beyond all memory."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link, which is not followed; expected a file of the package")
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: not UTF-8 text") from None
    depth = 0
    try:
        # Events expand no alias, so a small file stays small.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise InputError(f"{path}{_find_line(event)}: an anchor or alias; a run's config.yaml has none")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InputError(f"{path}{_find_line(event)}: nested more than {MAX_DEPTH} deep")
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    return YamlSource.read(path)


def _find_line(event: yaml.Event) -> str:
    return f":{event.start_mark.line + 1}" if event.start_mark is not None else ""


def make_changed_config(descriptor: Descriptor, original: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """Return the original with ``overrides``. Without overrides, return the installed suite's own of the size."""
    if not overrides:
        return resolve_config(descriptor, YamlSource.read(descriptor.folder / "config" / f"{original.size}.yaml"))
    data: dict[str, Any] = convert_to_plain_data(original, without_none=True)
    return resolve_config(descriptor, YamlSource(Path("the configuration of the package"), data, {}), overrides)


def render_config(config: RunConfig) -> str:
    """Render the configuration as a YAML file that `mlhpc run --config` reads."""
    return yaml.safe_dump(convert_to_plain_data(config, without_none=True), sort_keys=False)


ORDERS = ("AB", "BA")  # of a pair: it changes from pair to pair
MAX_GENERATED_BYTES = 16 * 2**30  # bytes of a data set that is made anew without being asked for
MAX_NAMED_SETTINGS = 5  # settings that the reason of a verdict names
_OVERRIDE = re.compile(r"[\w.]+=.*", re.DOTALL)


@dataclass(frozen=True)
class UnfinishedRun:
    """A new run that did not finish: outcome, reason, and the facts that it logged until then."""

    verdict: LevelOutcome
    why: str
    facts: RunFacts | None = None


@dataclass
class Rerun:
    """The attempt to reproduce one result, in ``folder``.

    ``beside`` is an existing run folder to compare with, instead of a new run. ``limit_s`` limits the time of a run;
    the default is a multiple of the package's longest run.
    """

    original: Original
    folder: Path
    ranks: int | None = None
    seed: int | None = None
    given_data: Path | None = None
    beside: Path | None = None
    may_run: bool = False
    left_out: tuple[str, ...] = ()
    made: list[RunFacts] = field(default_factory=list)  # new runs, in order
    limit_s: float | None = None
    failed: UnfinishedRun | None = None  # the new run that came to no end
    data_cause: Difference | None = None

    @property
    def against(self) -> str | None:
        """The thing that the package was compared with, in words."""
        if self.beside is not None:
            return f"the run {self.beside.name}"
        return "the new run" if self.made or (self.failed and self.failed.facts) else "this machine"

    @cached_property
    def was(self) -> RunFacts:
        """The facts of the first run of the package."""
        return self.original.run_facts(self.original.records[0])

    @cached_property
    def config(self) -> RunConfig:
        """The package's configuration as it is run here. InputError if the installed suite cannot run it.

        The options that its first run measured as fastest are not measured again. They change the arithmetic.
        """
        config, self.left_out = read_package_config(self._descriptor, self.original.folders[0] / "config.yaml")
        return _pin_choices(config, self.was)

    def judge_data(self) -> LevelVerdict:
        """Judge level 1: compare the given or the regenerated data with the manifest that the logs name."""
        logged = self.was.run.data_manifest
        if logged is None:
            return make_level_verdict(1, LevelOutcome.CANNOT, "the log names no data manifest")
        if self.original.info.get("loop") is not None:
            return self._judge_own_data(logged)
        manifest = parse_kept(self.original.data_manifest, logged)
        if self.given_data is not None:
            found = judge_data(logged, self.original.data_manifest, self.given_data, "verified")
        elif self.beside is not None:
            return self._judge_beside(logged)
        else:
            # 0 is what `mlhpc data generate` takes without --seed.
            seed = manifest.seed if manifest is not None else 0
            why = explain_not_regenerated(manifest) or self._make_data(seed)
            if why is not None:
                return make_level_verdict(1, LevelOutcome.INCONCLUSIVE, why)
            found = self._with_own_copy(judge_data(logged, self.original.data_manifest, self._data, "regenerated"))
        self.data_cause = found.cause
        return found

    def _with_own_copy(self, found: LevelVerdict) -> LevelVerdict:
        """Mention in the verdict on regenerated data that the data set at the usual place here differs."""
        logged, kept = self.was.run.data_manifest, self.original.data_manifest
        root = choose_default_data_root(self._descriptor.name, str(self._benchmark.size))
        if logged is None or not (root / MANIFEST_NAME).is_file():
            return found
        own = judge_data(logged, kept, root, "verified")
        if own.verdict == LevelOutcome.REPRODUCED:
            return found
        what = own.reason if own.cause is None else f"{own.cause.what}: {own.cause.now}"
        why = f"{found.reason}; those in {root} differ ({what}) and were not used: --data {root} compares them"
        return structs.replace(found, reason=why, compared=found.compared | {"own_copy": own.reason})

    def cannot_run(self) -> str | None:
        """Return why the configuration cannot be run on this machine. None if it can."""
        if self.beside is not None or not self.may_run:
            return None
        try:
            _ = self.config
        except InputError as error:
            return f"the installed suite refuses the configuration: {error}"
        if (self.was.run.nodes or 1) > 1 and self.ranks is None:
            why = f"the run had {self.was.run.nodes} nodes, and this command starts ranks on one"
            return f"{why}; --ranks N runs it here, --with RUN compares with a run of mlhpc submit"
        wanted, cores = self._ranks, find_usable_resources().cores
        # A stranger's log may claim any number of ranks; a person who states --ranks may oversubscribe further.
        if wanted > 64 * cores or (self.ranks is None and wanted > cores * 4):
            return f"the run had {wanted} ranks, this machine has {cores} cores; --ranks N runs it with fewer"
        return None

    def judge_numerics(self) -> LevelVerdict:
        """Judge level 2: compare the losses of the first steps and the evaluations of one run."""
        now = self._now(0)
        ended = now if isinstance(now, UnfinishedRun) else None
        facts = now.facts if isinstance(now, UnfinishedRun) else now
        if ended is not None and (facts is None or not facts.run.first_losses):
            return make_level_verdict(2, ended.verdict, ended.why, self._cause())
        assert facts is not None
        was, run = self._was_with(facts.run.seed).run, facts.run
        precision = str((self.was.run.config or {}).get("precision"))
        logged, losses = was.first_losses, run.first_losses
        if ended is not None:  # within its first steps the run may have ended: compare those that it has
            logged = logged[: len(losses)]
        found = judge.judge_losses(logged, losses, precision, self._cause())
        theirs, ours = ([each.value for each in side.evals] for side in (was, run))
        found = judge.judge_evaluations(found, theirs, ours, precision, self._cause())
        if ended is not None and len(logged) < len(was.first_losses) and found.verdict != LevelOutcome.NOT_REPRODUCED:
            return make_level_verdict(2, ended.verdict, f"{found.reason}, but {ended.why}", found.cause, found.compared)
        return self._with_settings(found)

    def judge_convergence(self, runs: int) -> LevelVerdict:
        """Judge level 3: compare the epochs to the target of some runs."""
        benchmark = self._benchmark
        count = len(self._beside_runs) if self.beside is not None else runs
        for number in range(count):
            now = self._now(number)
            if isinstance(now, UnfinishedRun):
                return make_level_verdict(3, now.verdict, now.why, self._cause())
        # Reference points hold for one batch size.
        batch = self.original.records[0].global_batch_size or 0
        apart = benchmark.card.between_evals(batch) if benchmark.card else 1.0
        found = judge.judge_epochs(
            {record.seed or 0: find_epochs_to_target(record, benchmark) for record in self.original.records},
            {made.run.seed or 0: find_epochs_to_target(made.run, benchmark) for made in self.made},
            benchmark.reference_points.get(batch, ()),
            apart,
            "samples" if benchmark.epoch_counts_samples else "epochs",
            self._cause(),
        )
        return self._with_settings(found)

    def judge_time(self, overrides: Sequence[str], pairs: int, margin: float) -> LevelVerdict:
        """Judge level 4: run original and changed configuration in pairs, and test if their times are equivalent."""
        changed = make_changed_config(self._descriptor, self.config, tuple(overrides))
        one, other = (convert_to_plain_data(each) for each in (self.config, changed))
        cause = next(iter(group_by_cause([*compare_configs(one, other, CONFIGURATION)])), None)
        times: dict[str, list[float]] = {"A": [], "B": []}
        for pair in range(pairs):
            found = {}
            # The order alternates, so that a drift of the machine does not favour one side.
            for side in ORDERS[pair % len(ORDERS)]:
                config = self.config if side == "A" else changed
                made = self._start(config, self.folder / f"pair_{pair}_{side}", self._seed(pair))
                if isinstance(made, UnfinishedRun):
                    what = "original" if side == "A" else "changed"
                    return make_level_verdict(4, made.verdict, f"the {what} configuration: {made.why}", cause)
                found[side] = made.run.time_to_train_s
            # A pair counts only if both runs reached the target.
            if None not in found.values():
                for side, seconds in found.items():
                    times[side].append(seconds or 0.0)
        return judge.judge_times(times["A"], times["B"], margin, cause)

    def differences(self) -> tuple[Difference, ...]:
        """List the differences from the package, the likeliest cause first."""
        now = self._facts_now() or collect_facts_of_this_machine(collect_facts(os.environ))
        workload = self._descriptor.name if self.original.descriptor else None
        found = list(compare_run_facts(self.was, now, workload=workload))
        if self.beside is None:
            # A new run has the package's settings, so another value is a default of the installed suite.
            found = [structs.replace(each, kind=DEFAULT) if each.kind == CONFIGURATION else each for each in found]
        found += self._changed_defaults({each.what for each in found})
        return group_by_cause(([self.data_cause] if self.data_cause else []) + found)

    def settings(self) -> tuple[Difference, ...]:
        """List the settings in which the compared run differs from the package's run of its seed."""
        now = self._facts_now()
        if now is None or now.run.config is None:
            return ()
        was = self._was_with(now.run.seed).run.config
        kind = DEFAULT if self.beside is None else CONFIGURATION
        return () if was is None else tuple(compare_configs(was, now.run.config, kind))

    def _with_settings(self, found: LevelVerdict) -> LevelVerdict:
        """Return the verdict of a level. What agrees between runs of other settings is inconclusive."""
        now = self._facts_now()
        if found.verdict != LevelOutcome.REPRODUCED or now is None:
            return found
        if self.was.run.config is None or now.run.config is None:
            which = "package's" if self.was.run.config is None else "new"
            why = f"{found.reason}; the log of the {which} run has no run_config, so settings cannot be compared"
            return make_level_verdict(found.level, LevelOutcome.INCONCLUSIVE, why, found.cause, found.compared)
        settings = self.settings()
        if not settings:
            return found
        names = [each.what for each in settings]
        more = f" and {len(names) - MAX_NAMED_SETTINGS} more" if len(names) > MAX_NAMED_SETTINGS else ""
        why = f"{found.reason}; settings differ that this cannot show: {', '.join(names[:MAX_NAMED_SETTINGS])}{more}"
        return make_level_verdict(
            found.level, LevelOutcome.INCONCLUSIVE, why, settings[0], found.compared | {"settings": names}
        )

    def _facts_now(self) -> RunFacts | None:
        """Return the facts of the run that is compared with the package. None if there is none, or it logged none."""
        if self.beside is not None:
            return self._beside_runs[0] if self._beside_runs else None
        if self.made:
            return self.made[0]
        return self.failed.facts if self.failed is not None else None

    def _was_with(self, seed: int | None) -> RunFacts:
        """Return the facts of the package's run with a seed, else those of its first run."""
        every = map(self.original.run_facts, self.original.records)
        return next((facts for facts in every if facts.run.seed == seed), self.was)

    def _cause(self) -> Difference | None:
        return next(iter(self.differences()), None)

    @property
    def _descriptor(self) -> Descriptor:
        assert self.original.descriptor is not None
        return self.original.descriptor

    @property
    def _benchmark(self) -> Benchmark:
        assert self.original.benchmark is not None
        return self.original.benchmark

    @property
    def _data(self) -> Path:
        return self.given_data if self.given_data is not None else self.folder / "data"

    @property
    def _ranks(self) -> int:
        return self.ranks or self.was.run.ranks or 1

    def _seed(self, number: int) -> int:
        """Return the seed of a new run: that of the package's run of this number, else a larger unused one."""
        seeds = [record.seed for record in self.original.records if record.seed is not None] or [0]
        if self.seed is not None:
            return self.seed + number
        return seeds[number] if number < len(seeds) else max(seeds) + 1 + number - len(seeds)

    def _now(self, number: int) -> RunFacts | UnfinishedRun:
        """Return a run to compare with, and make it if necessary; or how it ended."""
        while len(self.made) <= number:
            if self.failed is not None:
                return self.failed
            if self.beside is not None:
                if not self._beside_runs:
                    return UnfinishedRun(LevelOutcome.NOT_REPRODUCED, f"{self.beside}: no result_*.txt of a run")
                self.made.append(self._beside_runs[len(self.made)])
                continue
            count = len(self.made)
            seed = self._seed(count)
            made = self._start(_pin_choices(self.config, self._was_with(seed)), self.folder / f"run_{count}", seed)
            if isinstance(made, UnfinishedRun):
                self.failed = made
                return made
            self.made.append(made)
        return self.made[number]

    @cached_property
    def _beside_runs(self) -> list[RunFacts]:
        """The runs of the folder that was given, those with seeds of the package first."""
        assert self.beside is not None
        found = [self._read(path, self.beside) for path in RunFolder(self.beside).results()]
        seeds = [record.seed for record in self.original.records]
        return sorted(found, key=lambda each: each.run.seed not in seeds)

    def _read(self, path: Path, folder: Path) -> RunFacts:
        log = read_events(path, steps=False)
        record = summarise_for_benchmark(
            log, read_ruleset(str(summarise_log(log).ruleset or self.original.records[0].ruleset))
        )[0]
        return read_run_facts(record, folder)

    @cached_property
    def _bounds(self) -> RunLimits:
        return find_run_limits(self.original.records, self._ranks, find_usable_resources().memory_free, self.limit_s)

    def _start(self, config: RunConfig, folder: Path, seed: int) -> RunFacts | UnfinishedRun:
        """Run a configuration once, within the limits; return the run, or how it ended."""
        # Next to the run folder, which `mlhpc run` makes new.
        settings = folder.with_suffix(".yaml")
        write_file_atomically(settings, render_config(structs.replace(config, data=self._data.absolute())))
        words = ("run", config.workload, "--config", str(settings), "--ranks", str(self._ranks), "--runs", "1")
        done = run_limited(
            (*words, "--seed", str(seed), "-o", str(folder)),
            folder.with_suffix(".log"),
            self._bounds,
            RunFolder(folder).output(0),
        )
        logs = RunFolder(folder).results()
        if done.over is not None:
            # Its first losses may be enough to judge level 2.
            facts = self._read(logs[0], folder) if logs else None
            return UnfinishedRun(LevelOutcome.INCONCLUSIVE, f"the run did not come to its end: {done.over}", facts)
        if not logs or done.code not in (0, 1):  # 1: the run missed its target, which level 3 judges
            return UnfinishedRun(LevelOutcome.NOT_REPRODUCED, f"the run failed with exit code {done.code}: {done.last}")
        made = self._read(logs[0], folder)
        ended = made.run.run_stop_s is None
        return UnfinishedRun(LevelOutcome.NOT_REPRODUCED, f"the run ended early: {done.last}") if ended else made

    def _make_data(self, seed: int) -> str | None:
        """Make the data set in the output folder. Returns why it could not be made, or None."""
        name, size = self._descriptor.name, str(self._benchmark.size)
        needed = self._descriptor.card().size(size).data_bytes
        make_folder(self.folder)
        make = f"make them with `mlhpc data generate {name} --size {size} --seed {seed}` and give --data"
        if needed > MAX_GENERATED_BYTES:
            return f"the data have {render_bytes(needed)}: {make}"
        if needed > shutil.disk_usage(self.folder).free:
            return f"the data have {render_bytes(needed)}, more than is free in {self.folder}: {make}"
        words = ("data", "generate", name, "--size", size, "--seed", str(seed), "-o", str(self._data))
        done = run_limited(words, self.folder / "data.log")
        return None if done.code == 0 else f"the data cannot be made: {done.last}"

    def _judge_own_data(self, logged: str) -> LevelVerdict:
        """Judge the data of a person's own loop: only a copy of them can be compared."""
        if self.given_data is None:
            return make_level_verdict(
                1, LevelOutcome.CANNOT, "the data are the submitter's own; --data compares a copy"
            )
        found, read = compute_fingerprint(self.given_data, World.create())
        compared = {"manifest_sha256": logged, "found_sha256": found, "bytes": read.bytes}
        if found == logged:
            return make_level_verdict(
                1, LevelOutcome.REPRODUCED, f"verified: {read.files} files, equal sha256", compared=compared
            )
        cause = Difference(kind="data", what="sha256 of the data", was=logged[:12], now=found[:12])
        return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, "the data have another sha256", cause, compared)

    def _judge_beside(self, logged: str) -> LevelVerdict:
        """Judge the data of an existing run, which compared them with its manifest before it began."""
        if not self._beside_runs:
            return make_level_verdict(1, LevelOutcome.INCONCLUSIVE, f"{self.beside}: no result_*.txt of a run")
        record = self._beside_runs[0].run
        assert record.path is not None
        checked = read_events(record.path, steps=False).first(mllog.DATA_VERIFIED)
        compared = {"manifest_sha256": logged, "found_sha256": record.data_manifest, "how": "by the run"}
        if record.data_manifest != logged:
            cause = Difference(kind="data", what="data manifest", was=logged[:12], now=str(record.data_manifest)[:12])
            self.data_cause = cause
            return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, "the run read other data", cause, compared)
        if checked is None or checked.value is None:
            return make_level_verdict(
                1, LevelOutcome.INCONCLUSIVE, "the run did not verify its data; --data does", compared=compared
            )
        return make_level_verdict(
            1, LevelOutcome.REPRODUCED, "the run verified data with this manifest", compared=compared
        )

    def _changed_defaults(self, known: set[str]) -> list[Difference]:
        """List the defaults of the size that have changed in the installed suite. The command's --set still apply."""
        command = self.original.info.get("command")
        if self.original.descriptor is None or not isinstance(command, list) or "--config" in command:
            return []
        sets = [str(b) for a, b in pairwise(command) if a == "--set" and _OVERRIDE.fullmatch(str(b))]
        try:
            ours = convert_to_plain_data(load_config(self._descriptor, str(self._benchmark.size), sets))
            theirs = self.was.run.config or {}
        # The properties of the installed workload assert that it has this size.
        except (InputError, AssertionError):
            return []
        return [each for each in compare_configs(theirs, ours, DEFAULT) if each.what not in known]


def _pin_choices(config: RunConfig, was: RunFacts) -> RunConfig:
    """Return the configuration with the choices of a run. If it logged none, fixed rules choose."""
    return structs.replace(config, choices=ChoiceSettings(measure=False, pinned=dict(was.run.choices)))
