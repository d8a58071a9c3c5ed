"""Kills processes of real runs at random moments, continues the runs, and checks that nothing was lost but a little work.

    python -m tests.faults.campaign --kills 200 --during-checkpoints 50 --slurm 20 --grid-engine 20 -o DATE-faults.txt
    python -m tests.faults.campaign --plan pipeline --plan tensor --kills 40 --slurm 0 --grid-engine 0 --warm

A chain is one trial of CosmoFlow `smoke` on two local ranks, on the two nodes of a real Slurm, or on a real Grid Engine of this
machine; with --plan it is one epoch of a workload's shipped parallel plan on two local ranks. Its processes (a rank, the launcher,
mpiexec, its proxy, the relay of its output; srun, a slurmstepd, a slurmd, a shepherd, an execd, the job script) are killed several
times, with SIGKILL or SIGTERM, then it is continued to the end. After each kill: every process of the run ends, every log parses,
`mlhpc status` says what is true, and the next attempt continues no further back than the last checkpoint may be. At the end the
losses of all steps equal those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Log, read_events
from tests.fixtures.warm import warm_python

RANKS = 2
CHAIN = 6  # kills of one trial
INTERVAL_S = 1.0  # between two checkpoints of these runs; the default is 600
AGREED_S = 1.0  # ranks agree about once a second whether a checkpoint is due
STEP_S = 0.1  # how long a step takes, about
START_S = 4.0  # from the start of a run to run_start, about
VICTIMS = ("rank", "launcher", "mpiexec", "proxy", "relay")
SURVIVED = ("proxy", "relay")  # a run goes on to its end without them, so that a chain has one, the last
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
EVERY_STEP = (f"checkpoint.interval_s={INTERVAL_S}", "window_steps=1", "submission.division=open")  # a loss per step
SETTINGS = (*EVERY_STEP, "hyperparameters.dropout=0.2")  # so that random states matter
PLANS = {  # the workload whose shipped plan it is
    "pipeline": "moe_lm",
    "sharded": "moe_lm",
    "experts": "moe_lm",
    "tensor": "moe_lm",
    "spatial": "cosmoflow",
}
# In the environment of a run whose checkpoints take long enough to be hit: fsync takes a fifth of a second
SLOW_DISK = (
    "import os, time\n_fsync = os.fsync\ndef fsync(fd):\n    time.sleep(0.2)\n    _fsync(fd)\nos.fsync = fsync\n"
)


@dataclass(frozen=True)
class Kill:
    """What is killed, with which signal, and when: ``moment`` is a part of the time of the phase."""

    victim: str
    signal: int
    phase: str  # start, run or checkpoint
    moment: float


@dataclass
class Outcome:
    """One kill and what was seen after it."""

    kill: Kill
    hit: str  # the phase that the process really was in
    lost_s: float | None = None  # training time that the next attempt has to repeat
    problems: list[str] = field(default_factory=list)
    recovery: Mapping[str, float | None] = field(
        default_factory=dict
    )  # seconds by phase, as the next attempt logged them

    def sentences(self) -> list[str]:
        """What was killed, how and when, before each problem."""
        what = f"{self.kill.victim} {signal.Signals(self.kill.signal).name} {self.hit}"
        return [f"{what}: {problem}" for problem in self.problems]


class Attempt(Protocol):
    """What runs: a process or a job."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        ...


class Chain:
    """One trial that is killed and continued."""

    victims: tuple[str, ...] = VICTIMS
    end_s = 60.0  # so long after its last event all processes of a killed run have ended

    def __init__(
        self,
        root: Path,
        data: Path,
        seed: int,
        environment: dict[str, str],
        plan: str | None = None,
        *,
        warm: bool = False,
    ) -> None:
        self.root, self.data, self.seed, self.environment, self.plan = root, data, seed, environment, plan
        self.python = warm_python() if warm else [sys.executable]
        self.replace = False
        self.struck = 0  # the process that got the last signal
        self.whole = 0  # steps of the undisturbed run
        self.part = 1.0  # of the steps that are left, where the next kill comes at the latest

    def start(self) -> Attempt:
        """Start the run, or continue it."""
        words = [*self.python, "-P", "-m", "mlhpc", "run", find_workload(self.plan)]
        settings = SETTINGS
        if self.plan is not None:
            settings = (*EVERY_STEP, f"plan={self.plan}", "max_epochs=1", "global_batch_size=64")
        if (self.root / "run.json").exists():
            words += ["--output", str(self.root), "--resume", *(["--replace-failed"] if self.replace else [])]
        else:
            words += ["--size", "smoke", "--ranks", str(RANKS), "--runs", "1", "--seed", str(self.seed)]
            words += ["--output", str(self.root), *(w for s in (f"data={self.data}", *settings) for w in ("--set", s))]
        self.replace = False
        with (self.root.parent / f"{self.root.name}.out").open("ab") as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def logs(self) -> list[Path]:
        """The logs of all attempts, oldest first. The run may move one aside while it is looked at."""
        found = []
        for path in self.root.glob("*_0*.txt"):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def current(self) -> Path | None:
        """The log that is written now, or was last."""
        logs = self.logs()
        return logs[-1] if logs else None

    def written(self) -> int:
        """The bytes that the run has logged."""
        return sum(path.stat().st_size for path in self.logs() if path.exists())

    def begun(self, since: Sequence[Path]) -> bool:
        """True if an attempt whose log is not in ``since`` has reached run_start."""
        for path in self.logs():
            with suppress(FileNotFoundError):
                if path not in since and b'"run_start"' in path.read_bytes():
                    return True
        return False

    def trained(self) -> int:
        """The steps that all attempts have logged, repeated ones too."""
        count = 0
        for path in self.logs():
            with suppress(FileNotFoundError):
                count += path.read_bytes().count(b'"step_phases"')
        return count

    def trained_whole(self) -> bool:
        """True if an attempt trained to the end: to its target, or, under a plan, for all its epochs."""
        stops = [stop for path in self.logs() if (stop := read_events(path).first(mllog.RUN_STOP)) is not None]
        return any(
            stop.metadata.get("status") == "success"
            or str(stop.metadata.get("reason")).startswith("target not reached")
            for stop in stops
        )

    def done(self, earlier: Sequence[Path]) -> float:
        """The part of the training that earlier attempts have logged, at most."""
        return len(set().union(*(steps(path) for path in earlier if path.exists()))) / max(1, self.whole)

    def processes(self) -> dict[str, list[int]]:
        """The living processes of the run by kind."""
        found: dict[str, list[int]] = {name: [] for name in VICTIMS}
        running = dict(commands())
        needle = str(self.root)
        mpiexec = set()
        for pid, words in running.items():
            if not any(needle in word for word in words):
                continue
            program = Path(words[0]).name
            if program.startswith("mpiexec"):
                found["mpiexec"].append(pid)
                mpiexec.add(pid)
            elif "--trial" in words:
                found["rank"].append(pid)
            elif any("relay" in word for word in words):
                found["relay"].append(pid)
            elif "run" in words:
                found["launcher"].append(pid)
        for pid, words in running.items():
            if "hydra_pmi_proxy" in words[0] and parent_of(pid) in mpiexec:
                found["proxy"].append(pid)
        return found

    def alive(self) -> list[int]:
        """Every living process of the run."""
        return [pid for pids in self.processes().values() for pid in pids]

    def strike(self, victim: int, number: int) -> None:
        """Send a signal to a process."""
        self.struck = victim
        os.kill(victim, number)

    def repair(self) -> None:
        """Start again what does not belong to the run."""


def find_workload(plan: str | None) -> str:
    """Find the workload whose plan it is; without one CosmoFlow."""
    return "cosmoflow" if plan is None else PLANS[plan]


def commands() -> Iterator[tuple[int, list[str]]]:
    """The living processes of this machine: process id and command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[0]:
            yield int(entry.name), words


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def strike(chain: Chain, kill: Kill, chance: random.Random) -> Outcome | None:
    """Start the run, kill, wait for the end and check. None if the run ended before the kill."""
    earlier = chain.logs()
    process = chain.start()
    try:
        if not _await(chain, kill, process, earlier, chance):
            process.wait()
            return None
        while not (victims := chain.processes()[kill.victim]):  # not started yet
            if process.poll() is not None:
                return None
            time.sleep(0.02)
        hit = _phase(chain, earlier)
        chain.strike(chance.choice(victims), kill.signal)
        outcome = Outcome(kill, hit)
        chain.repair()
    except ProcessLookupError:
        process.wait()
        return None
    written, deadline = -1, 0.0
    while chain.alive() and (chain.written() > written or time.monotonic() < deadline):
        if chain.written() > written:  # without its proxy, or its relay, a run goes on to its end
            written, deadline = chain.written(), time.monotonic() + chain.end_s
        process.poll()
        time.sleep(0.05)
    stayed, left = chain.processes(), chain.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        kinds = ", ".join(f"{len(pids)} {victim}" for victim, pids in stayed.items() if set(pids) & set(left))
        outcome.problems.append(f"left {chain.end_s:g} s after the last event: {kinds}")
    process.wait()
    outcome.problems += check_folder(chain)
    return outcome


def _await(chain: Chain, kill: Kill, process: Attempt, earlier: Sequence[Path], chance: random.Random) -> bool:
    """Wait for the moment of a kill. False if the run ended before."""
    begin = time.monotonic()
    if kill.phase == "start":
        while time.monotonic() - begin < kill.moment * START_S:
            time.sleep(0.02)
        return process.poll() is None
    while not chain.begun(earlier):
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    if kill.phase == "run":  # at a step, because nobody knows how fast a busy machine will be
        done = chain.done(earlier)
        wanted = chain.trained() + kill.moment * chain.part * max(0.1, 1.0 - done) * chain.whole
        while chain.trained() < wanted:
            if process.poll() is not None:
                return False
            time.sleep(0.02)
        time.sleep(chance.random() * STEP_S)
        return process.poll() is None
    skip = int(kill.moment * 2)  # not always the first checkpoint of the attempt
    seen: set[str] = set()
    while process.poll() is None:
        unfinished = _folders(chain)
        if unfinished - seen:
            seen |= unfinished
            if len(seen) > skip:
                time.sleep((kill.moment * 2) % 1 * 0.5)
                return process.poll() is None
        time.sleep(0.005)
    return False


def _folders(chain: Chain) -> set[str]:
    return {path.name for path in (chain.root / "checkpoint").glob("trial_*.*") if path.is_dir()}


def _phase(chain: Chain, earlier: Sequence[Path]) -> str:
    if not chain.begun(earlier):
        return "before run_start"
    tokens = {name.split(".")[1] for name in _folders(chain)}
    whole = (chain.root / "checkpoint" / "trial_0.pt").exists()
    return "during a checkpoint" if len(tokens) > whole else "in the run"


def check_folder(chain: Chain) -> list[str]:
    """What is wrong with a run folder whose processes have ended."""
    problems = []
    if not (chain.root / "run.json").exists():
        return []  # killed before the run had a folder: the same command starts it
    for path in chain.logs():
        log = read_events(path)
        problems += [f"{path.name}:{problem.line}: {problem.message}" for problem in log.problems]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mlhpc", "status", str(chain.root), "--format", "json"],
        env=chain.environment,  # which Slurm to ask: a job that was cancelled leaves no exit code in the folder
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return [*problems, f"status ended with {done.returncode}: {done.stderr.strip()}"]
    rows = json.loads(done.stdout)
    if len(rows) != 1:
        return [*problems, f"status has {len(rows)} rows"]
    state = rows[0]["state"]
    logs = [read_events(path) for path in chain.logs() if not path.name.startswith("failed")]
    expected = ("finished",) if any(map(_succeeded, logs)) else ("killed", "aborted", "incomplete")
    if state not in expected:
        problems.append(f"status says {state!r}, expected {' or '.join(expected)}")
    return problems


def _succeeded(log: Log) -> bool:
    stop = log.first(mllog.RUN_STOP)
    return stop is not None and stop.metadata.get("status") == "success"


def steps(path: Path) -> dict[tuple[int, int], tuple[float, float]]:
    """The loss and the time (seconds) of each step of a log, by epoch and step."""
    return {
        (event.metadata["epoch_num"], event.metadata["first_step"]): (event.metadata["loss"], event.time_ms / 1000)
        for event in read_events(path).every("step_phases")
    }


def training_s(found: Mapping[tuple[int, int], tuple[float, float]]) -> float:
    """Seconds from the first of these steps to the last."""
    times = [time_s for _, time_s in found.values()]
    return max(times) - min(times)


def lost_work(before: Path, after: Path) -> float | None:
    """Seconds of training of one attempt that the next one repeats. None if they have no step in common."""
    old, new = steps(before), steps(after)
    repeated = sorted(set(old) & set(new))
    return max(old[step][1] for step in repeated) - old[repeated[0]][1] if repeated else 0.0 if new else None


def run_chain(
    chain: Chain,
    kills: Sequence[Kill],
    reference: dict[tuple[int, int], tuple[float, float]],
    chance: random.Random,
) -> list[Outcome]:
    """Kill a trial several times, continue it to the end, and compare its losses with the undisturbed run's."""
    outcomes: list[Outcome] = []
    chain.whole = len(reference)
    for number, kill in enumerate(kills):
        chain.part = min(1.0, 2.0 / (len(kills) - number + 1))
        logs = chain.logs() if chain.root.exists() else []
        outcome = strike(chain, kill, chance)
        if outcome is None:
            if chain.trained_whole():
                break
            continue
        outcomes.append(outcome)
        _account(chain, outcomes, logs)
        checkpointed = (chain.root / "checkpoint" / "trial_0.pt").exists()
        chain.replace = not checkpointed and any(
            b'"run_start"' in path.read_bytes() for path in chain.logs() if not path.name.startswith("failed")
        )
        if chain.trained_whole():
            break
    for _ in range(3):
        if chain.trained_whole():
            break
        process = chain.start()
        code = process.wait()
        if outcomes and code != 0 and not (chain.plan is not None and chain.trained_whole()):
            outcomes[-1].problems.append(f"the continuation ended with exit code {code}")
            chain.replace = True
    if outcomes:
        outcomes[-1].problems += check_losses(chain, reference)
    return outcomes


def _account(chain: Chain, outcomes: list[Outcome], earlier: Sequence[Path]) -> None:
    """Note how much work the attempt that was just killed had to repeat of the one before."""
    new = [path for path in chain.logs() if path not in earlier and b'"run_start"' in path.read_bytes()]
    old = [
        path
        for path in earlier
        if path.exists() and path.name.startswith("res") and b'"run_start"' in path.read_bytes()
    ]
    if new and old and len(outcomes) > 1 and "resumed" in new[-1].name:
        outcomes[-2].lost_s = lost_work(old[-1], new[-1])
        found = [event.value for event in read_events(new[-1]).events if event.key == "recovery"]
        outcomes[-2].recovery = found[0] if found else {}


def check_losses(chain: Chain, reference: dict[tuple[int, int], tuple[float, float]]) -> list[str]:
    """What differs between the losses of a trial's logs and those of the undisturbed run."""
    problems = []
    if not chain.trained_whole():
        return ["the trial could not be finished"]
    seen: set[tuple[int, int]] = set()
    for path in chain.logs():
        for step, (loss, _) in steps(path).items():
            seen.add(step)
            if step not in reference or loss != reference[step][0]:
                problems.append(
                    f"{path.name}: loss of epoch {step[0]} step {step[1]} is {loss!r}, not {reference.get(step)!r}"
                )
    if missing := set(reference) - seen:
        problems.append(f"{len(missing)} steps are in no log, the first {min(missing)}")
    return problems[:3]


def plan(kills: int, during_checkpoints: int, chance: random.Random, victims: Sequence[str] = VICTIMS) -> list[Kill]:
    """Draw the kills: victims and signals in turn, moments at random; a quarter of the others before run_start."""
    drawn = []
    for index in range(kills):
        phase = "checkpoint" if index < during_checkpoints else "start" if index % 4 == 0 else "run"
        victim, number = victims[index % len(victims)], SIGNALS[index // len(victims) % 2]
        drawn.append(Kill(victim, number, phase, chance.random()))
    chance.shuffle(drawn)
    return drawn


Keep = Callable[[Sequence[Outcome]], None]


def campaign(
    root: Path,
    kills: int,
    during_checkpoints: int,
    seed: int,
    limit_s: float = math.inf,
    keep: Keep | None = None,
    *,
    parallel: str | None = None,
    warm: bool = False,
    patience: float = 1.0,
) -> list[Outcome]:
    """Run local chains until as many kills as asked for have hit a living process.

    ``parallel`` is one of PLANS. ``warm``: the launcher and the ranks are forks of a Python that has loaded torch.
    """
    data = make_data(root, find_workload(parallel))
    slow = root / "slow_disk"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    calm_environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def chain(number: int, batch: Sequence[Kill]) -> Chain:
        slowed = {"PYTHONPATH": str(slow)} if any(kill.phase == "checkpoint" for kill in batch) else {}
        made = Chain(root / f"chain{number}", data, seed, calm_environment | slowed, parallel, warm=warm)
        made.end_s = patience * Chain.end_s
        return made

    chance = random.Random(seed)
    return run_chains(chain, plan(kills, during_checkpoints, chance), chance, limit_s, keep)


def make_data(root: Path, workload: str = "cosmoflow") -> Path:
    """Make the data set of the runs."""
    words = ["data", "generate", workload, "--size", "smoke", "-o", str(root / "data")]
    subprocess.run([sys.executable, "-P", "-m", "mlhpc", *words], check=True, capture_output=True)
    return root / "data"


def run_chains(
    make: Callable[[int, Sequence[Kill]], Chain],
    kills: Sequence[Kill],
    chance: random.Random,
    limit_s: float = math.inf,
    keep: Keep | None = None,
) -> list[Outcome]:
    """Run a trial undisturbed, then chains, until all kills have hit a living process or the time is over.

    ``keep`` is called with all outcomes after each chain.
    """
    calm = make(0, ())
    begin = time.monotonic()
    code = calm.start().wait()
    assert code == 0 or (calm.plan is not None and calm.trained_whole()), (
        f"the undisturbed run ended with {code}: see {calm.root}"
    )
    reference = steps(calm.root / "result_0.txt")
    train_s = training_s(reference)
    whole_s = time.monotonic() - begin
    print(f"undisturbed: {whole_s:.1f} s, of which training {train_s:.1f} s, {len(reference)} steps", flush=True)
    outcomes: list[Outcome] = []
    waiting, number = list(kills), 0
    while waiting and time.monotonic() - begin < limit_s:
        number += 1
        ending = [kill for kill in waiting if kill.victim not in SURVIVED]
        last = [kill for kill in waiting if kill.victim in SURVIVED]
        batch = [*ending[: CHAIN - bool(last)], *last[:1]]
        rest = [*ending[CHAIN - bool(last) :], *last[1:]]
        chain = make(number, batch)
        made = run_chain(chain, batch, reference, chance)
        struck = [outcome.kill for outcome in made]
        waiting = [kill for kill in batch if kill not in struck] + rest
        outcomes += made
        bad = "".join(f"; {words}" for outcome in made for words in outcome.sentences())
        print(f"chain {number}: {len(made)} kills, {len(outcomes)} of {len(kills)}{bad}", flush=True)
        if keep is not None:
            keep(outcomes)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """The counts by victim, signal and phase, the work that was lost, and every problem."""
    counts = Counter((o.kill.victim, signal.Signals(o.kill.signal).name, o.hit) for o in outcomes)
    failed = Counter((o.kill.victim, signal.Signals(o.kill.signal).name, o.hit) for o in outcomes if o.problems)
    lines = ["| killed | signal | when | kills | with a problem |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(key)} | {count} | {failed[key]} |" for key, count in sorted(counts.items())]
    lost = sorted(o.lost_s for o in outcomes if o.lost_s is not None)
    lines.append(f"\n{len(outcomes)} kills, {sum(1 for o in outcomes if o.problems)} with a problem.")
    if lost:
        lines.append(
            f"Training repeated after a kill: n = {len(lost)}, median {lost[len(lost) // 2]:.2f} s, most {lost[-1]:.2f} s; "
            f"checkpoints every {INTERVAL_S:g} s, ranks agree every {AGREED_S:g} s."
        )
    recovered = [outcome.recovery for outcome in outcomes if outcome.recovery]
    if recovered:
        lines += ["", "| phase of a recovery | n | median s | most s |", "| --- | --- | --- | --- |"]
        for name in recovered[0]:
            seconds = sorted(value for each in recovered if (value := each[name]) is not None)
            if seconds:
                median = seconds[len(seconds) // 2]
                lines.append(f"| {name.removesuffix('_s')} | {len(seconds)} | {median:.2f} | {seconds[-1]:.2f} |")
        lines.append("")
    lines += [f"- {words}" for outcome in outcomes for words in outcome.sentences()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--during-checkpoints", type=int, default=50)
    parser.add_argument("--slurm", type=int, default=20, help="kills on the two-node Slurm; 0: none")
    parser.add_argument("--preempt", type=int, default=0, help="preemptions on the two-node Slurm")
    parser.add_argument("--grid-engine", type=int, default=20, help="kills on Grid Engine; 0: none")
    parser.add_argument(
        "--plan", action="append", choices=PLANS, default=[], help="local kills under this plan; again for another one"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="times longer until a silent run is a problem, an idle job cancelled",
    )
    parser.add_argument("--warm", action="store_true", help="processes are forks of a Python that has loaded torch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of the local kills: then the table of those made"
    )
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    tables: dict[str, str] = {}
    outcomes: list[Outcome] = []

    def keep(where: str, made: Sequence[Outcome]) -> None:
        tables[where] = f"seed {options.seed}; {where}\n\n{table(made)}"
        if options.output is not None:
            options.output.write_text("\n".join(tables.values()))

    for parallel in (options.plan or [None]) if options.kills else ():
        with tempfile.TemporaryDirectory(prefix="mlhpc-faults-") as scratch:
            where = f"local, {RANKS} ranks" + (f", plan {parallel} of {PLANS[parallel]}" if parallel else "")
            outcomes += campaign(
                *(Path(scratch), options.kills, options.during_checkpoints, options.seed, options.minutes * 60),
                partial(keep, where), parallel=parallel, warm=options.warm, patience=options.patience,
            )  # fmt: skip
    for kills, where in (
        (options.slurm, "Slurm, two nodes"),
        (options.preempt, "Slurm, two nodes, preempted by a job of a higher tier"),
        (options.grid_engine, "Grid Engine, one node"),
    ):
        if kills:
            from tests.faults.scheduled import campaign as run_scheduled

            with tempfile.TemporaryDirectory(prefix="mlhpc-faults-") as scratch:
                kept = partial(keep, where)
                outcomes += run_scheduled(
                    *(Path(scratch), kills, options.seed, kept),
                    grid_engine=where.startswith("Grid"),
                    preempted=where.endswith("tier"),
                    patience=options.patience,
                )
    print("\n".join(tables.values()))
    sys.exit(1 if any(outcome.problems for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
