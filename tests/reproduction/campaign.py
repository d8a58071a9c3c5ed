"""Reproduces one package again and again: untouched, where nothing may be alarmed, and with one thing changed, which must be named.

    python -m tests.reproduction.campaign --untouched 50 -o benchmarks/results/DATE-reproduction.txt

The package is of one epoch of `moe_lm smoke`, with a narrow model, on one rank. All commands run from clones of this checkout's last commit
(PYTHONPATH), so that a drift of the suite's own files is one of a clone. An alarm is a level that is not reproduced, or any
difference that is named. A drift is found if the first difference of reproduction.json is of its kind and names it.
"""

# ruff: noqa: E501  one drift a line reads best as a table
from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlhpc.suite.package.build import write_package_manifest
from mlhpc.suite.package.reproduction.judge import LevelOutcome, Reproduction, read_reproduction

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("max_epochs=1", "hyperparameters.width=16", "hyperparameters.moe.hidden=16", "submission.division=open")
SETTINGS = tuple(word for text in (*SMALL, "submission.org=ACME") for word in ("--set", text))
SEED = "7"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
Edit = Callable[[dict[str, Any]], object]


@dataclass
class Stage:
    """What a campaign works with: a clone of the suite, a data set, a run, its package and a folder for attempts."""

    root: Path
    clone: Path = field(init=False)
    data: Path = field(init=False)
    package: Path = field(init=False)
    again: Path = field(init=False)

    def __post_init__(self) -> None:
        self.clone, self.data, self.package = self.root / "suite", self.root / "data", self.root / "ACME"
        self.again = self.root / "again"

    def make(self) -> None:
        """Clone, generate, run twice (the second run is what forged packages are compared with), package."""
        clone(self.clone)
        self.call("data", "generate", "moe_lm", "--size", "smoke", "-o", self.data)
        words = ("run", "moe_lm", "--size", "smoke", "--seed", SEED, *SETTINGS, "--set", f"data={self.data}", "-o")
        for run in (self.root / "run", self.again):
            self.call(*words, run, codes=(0, 1))
        self.call("package", self.root / "run", "--system", "bed", "--submitter", "ACME", "-o", self.package)

    def call(
        self,
        *words: object,
        environ: Mapping[str, str] | None = None,
        codes: Sequence[int] = (0,),
        prefix: Sequence[str] = (),
    ) -> None:
        """One command of the clone, or of another tree that ``environ`` names."""
        here = {"PYTHONPATH": str(self.clone)} | ENVIRONMENT | dict(environ or {})
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        command = [*prefix, sys.executable, "-P", "-m", "mlhpc", *map(str, words)]
        done = subprocess.run(command, env=base | here, capture_output=True, text=True, cwd=self.root, check=False)
        if done.returncode not in codes:
            raise RuntimeError(f"{words}: exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")

    def reproduce(self, name: str, attempt: Attempt) -> Reproduction:
        """One reproduction, in a folder of its own."""
        out = self.root / "out" / name
        words = ["reproduce", attempt.package or self.package, "-o", out, *attempt.words]
        self.call(*words, environ=attempt.environ, codes=(0, 1), prefix=attempt.prefix)
        return read_reproduction(out / "reproduction.json")


@dataclass
class Attempt:
    """How a package is reproduced: options, variables, another package, a program before the command."""

    words: Sequence[object] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    package: Path | None = None
    prefix: Sequence[str] = ()


@dataclass(frozen=True)
class Drift:
    """One change, the kind of cause that must be named first, and a pattern of its name."""

    name: str
    kind: str
    what: str
    apply: Callable[[Stage, Path], Attempt]


def clone(to: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--local", str(ROOT), str(to)], check=True)


def run_with(stage: Stage, *words: object, **environ: str) -> Attempt:
    return Attempt(("--run", "--level", "2", "--data", stage.data, *words), environ)


def damaged_data(
    damage: Callable[[Path], object], shard: str = "train/shard_00000.h5"
) -> Callable[[Stage, Path], Attempt]:
    def apply(stage: Stage, folder: Path) -> Attempt:
        shutil.copytree(stage.data, folder / "data")
        damage(folder / "data" / shard)
        return Attempt(("--run", "--level", "2", "--data", folder / "data"))

    return apply


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_data(stage: Stage, folder: Path) -> Attempt:
    stage.call("data", "generate", "moe_lm", "--size", "smoke", "--seed", "1", "-o", folder / "data")
    return Attempt(("--run", "--level", "2", "--data", folder / "data"))


def forged(name: str, edit: Edit) -> Callable[[Stage, Path], Attempt]:
    """A package in which a document of the provenance says something else, with a new manifest."""

    def apply(stage: Stage, folder: Path) -> Attempt:
        package = folder / "ACME"
        shutil.copytree(stage.package, package)
        path = next(package.glob(f"benchmarks/*/implementations/*/*/*/provenance/run_0/{name}"))
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))
        write_package_manifest(package)
        return Attempt(("--with", stage.again, "--data", stage.data), package=package)

    return apply


def broken(pattern: str, damage: Callable[[Path], object], *, sealed: bool = False) -> Callable[[Stage, Path], Attempt]:
    """A package with a file lost or altered; ``sealed``: with a new manifest over it."""

    def apply(stage: Stage, folder: Path) -> Attempt:
        package = folder / "ACME"
        shutil.copytree(stage.package, package)
        damage(next(package.glob(pattern)))
        if sealed:
            write_package_manifest(package)
        return Attempt(("--with", stage.again, "--data", stage.data), package=package)

    return apply


def changed_tree(
    path: str, change: tuple[str, str], *, commit: bool = False, git: bool = True
) -> Callable[[Stage, Path], Attempt]:
    """A suite with one file changed: uncommitted, committed, or without a repository."""

    def apply(stage: Stage, folder: Path) -> Attempt:
        tree = folder / "suite"
        clone(tree)
        text = (tree / path).read_text()
        assert change[0] in text, path
        (tree / path).write_text(text.replace(*change, 1))
        if commit:
            mine = ("-c", "user.name=a", "-c", "user.email=a@b.c")
            subprocess.run(["git", "-C", str(tree), *mine, "commit", "-qam", "change"], check=True)
        if not git:
            shutil.rmtree(tree / ".git")
        return run_with(stage, PYTHONPATH=str(tree))

    return apply


def other_distribution(name: str, *, version: str | None = None) -> Callable[[Stage, Path], Attempt]:
    """Another version of a distribution, or other files of the same, as the environment's metadata have it."""

    def apply(stage: Stage, folder: Path) -> Attempt:
        from importlib.metadata import distribution

        found = distribution(name)
        real = version or found.version
        info = folder / "site" / f"{name}-{real}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {real}\n")
        (info / "RECORD").write_text((found.read_text("RECORD") or "").replace("sha256=", "sha256=X"))
        return run_with(stage, PYTHONPATH=f"{folder / 'site'}:{stage.clone}")

    return apply


def other_run(*settings: str) -> Callable[[Stage, Path], Attempt]:
    def apply(stage: Stage, folder: Path) -> Attempt:
        sets = [word for text in (f"data={stage.data}", *settings) for word in ("--set", text)]
        words = ("run", "moe_lm", "--size", "smoke", "--seed", SEED, *SETTINGS, *sets, "-o", folder / "run")
        stage.call(*words, codes=(0, 1))
        return Attempt(("--with", folder / "run", "--data", stage.data))

    return apply


def told(document: dict[str, Any], *keys: str, value: object) -> None:
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


def drop(name: str) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        document["distributions"] = [item for item in document["distributions"] if item["name"] != name]

    return edit


SMOKE = "workloads/moe_lm/config/smoke.yaml"
LOG, FACTS = "results/*/*/*/result_0.txt", "facts/*.json"
BESIDE = "benchmarks/*/implementations/*/*/*/provenance/run_0"
DRIFTS = (
    Drift("one bit of the training data", "data", "train/shard_00000", damaged_data(flip)),
    Drift("one bit of the validation data", "data", "validation/", damaged_data(flip, "validation/shard_00000.h5")),
    Drift("a shard lost", "data", "train/shard_00000", damaged_data(Path.unlink)),
    Drift("a shard cut short", "data", "train/", damaged_data(lambda path: os.truncate(path, 1000))),
    Drift("data of another seed", "data", "seed of the data", other_data),
    Drift("a log lost", "lost file", "result_0.txt", broken(LOG, Path.unlink)),
    Drift("facts lost", "lost file", "facts/", broken(f"{BESIDE}/{FACTS}", Path.unlink)),
    Drift("a log altered", "altered file", "result_0.txt", broken(LOG, lambda path: path.write_bytes(path.read_bytes() + b"\n"))),
    Drift(
        "config.yaml altered, manifest renewed", "altered file", "config.yaml",
        broken(f"{BESIDE}/config.yaml", lambda path: path.write_text(path.read_text().replace("max_epochs: 1", "max_epochs: 2")), sealed=True),
    ),
    Drift(
        "result.json altered, manifest renewed", "altered file", "result.json",
        broken("benchmarks/*/implementations/*/*/*/result.json", lambda path: path.write_text(re.sub(r'"time_s": \d', '"time_s": 9', path.read_text(), count=1)), sealed=True),
    ),
    Drift("learning rate", "configuration", "hyperparameters.learning_rate", other_run("hyperparameters.learning_rate=0.003")),
    Drift("batch size", "configuration", "global_batch_size", other_run("global_batch_size=8")),
    Drift("precision", "configuration", "precision", other_run("precision=bfloat16")),
    Drift("a default in the settings of the size", "changed default", "hyperparameters.learning_rate", changed_tree(SMOKE, ("0.004", "0.0041"))),
    Drift(
        "a new default of the suite", "changed default", "label_smoothing",
        changed_tree("suite/config.py", ("    compile: bool = False\n", "    compile: bool = False\n    label_smoothing: float = 0.1\n")),
    ),
    Drift("another seed", "seed", "seed", lambda stage, _: run_with(stage, "--seed", "8")),
    Drift("two ranks", "ranks", "number of ranks", lambda stage, _: run_with(stage, "--ranks", "2")),
    Drift(
        "uncommitted changes", "uncommitted changes", "suite/training/loop.py",
        changed_tree("suite/training/loop.py", ("from __future__", "# a try\nfrom __future__")),
    ),
    Drift("another commit", "commit", "commit", changed_tree("suite/training/loop.py", ("from __future__", "# a try\nfrom __future__"), commit=True)),
    Drift(
        "a file of the workload, no repository", "suite files", "workloads/moe_lm/model.py",
        changed_tree("workloads/moe_lm/model.py", ("from __future__", "# a try\nfrom __future__"), git=False),
    ),
    Drift("torch patch version", "torch", "torch", other_distribution("torch", version="2.13.1+cpu")),
    Drift("numpy version", "package", "numpy", other_distribution("numpy", version="2.0.1")),
    Drift("numpy built anew", "package", "numpy .*: other files", other_distribution("numpy")),
    Drift("scipy absent", "package", "scipy", forged("environment.json", drop("scipy"))),
    Drift("Python version", "python", "Python", forged("environment.json", lambda d: told(d, "python", value="CPython 3.11.2"))),
    Drift("OMP_NUM_THREADS", "threads", "OMP_NUM_THREADS", lambda stage, _: run_with(stage, OMP_NUM_THREADS="2")),
    Drift("OMP_PROC_BIND", "threads", "OMP_PROC_BIND", lambda stage, _: run_with(stage, OMP_PROC_BIND="true")),
    Drift("one CPU of two", "threads", "CPUs", lambda stage, _: Attempt(run_with(stage).words, prefix=("taskset", "-c", "0"))),
    Drift("instructions of the processor", "environment variable", "ATEN_CPU", lambda stage, _: run_with(stage, ATEN_CPU_CAPABILITY="default")),
    Drift("allocator", "environment variable", "MALLOC_ARENA_MAX", lambda stage, _: run_with(stage, MALLOC_ARENA_MAX="1")),
    Drift("library path", "library", "LD_LIBRARY_PATH", lambda stage, _: run_with(stage, LD_LIBRARY_PATH="/usr/local/none")),
    Drift("processor", "processor", "processor", forged(FACTS, lambda d: told(d, "cpu", "model", value="Intel Xeon 6980P"))),
    Drift("vector instructions", "processor", "vector", forged(FACTS, lambda d: told(d, "cpu", "simd", value=["avx2"]))),
    Drift("libc", "library", "libc", forged(FACTS, lambda d: told(d, "software", "libc", value="glibc 2.17"))),
    Drift("kernel", "kernel", "kernel", forged(FACTS, lambda d: told(d, "software", "kernel", value="5.14.0"))),
    Drift("clock source", "firmware and clock", "clock source", forged(FACTS, lambda d: told(d, "software", "clock_source", value="hpet"))),
    Drift("locale", "locale", "LC_ALL|locale", lambda stage, _: run_with(stage, LC_ALL="de_DE.UTF-8")),
    Drift("time zone", "time zone", "TZ|time zone", lambda stage, _: run_with(stage, TZ="Asia/Tokyo")),
)  # fmt: skip


def judge(drift: Drift, document: Reproduction) -> tuple[bool, str]:
    """True if the drift is the first difference; and what was said."""
    (result,) = document.results
    causes = [
        level.cause
        for level in result.levels
        if level.cause is not None and level.verdict == LevelOutcome.NOT_REPRODUCED
    ]
    first = causes[0] if causes else next(iter(result.differences), None)
    worst = next(
        (f"level {each.level} {each.verdict}" for each in result.levels if each.verdict != LevelOutcome.REPRODUCED),
        "all reproduced",
    )
    if first is None:
        return False, f"nothing named; {worst}"
    named = first.kind == drift.kind and re.search(drift.what, first.what) is not None
    return named, f"{first.kind}: {first.what}: {first.was} / {first.now}; {worst}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--untouched", type=int, default=50)
    parser.add_argument("--only", default="", help="drifts whose name matches this pattern")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines: list[str] = []
    wrong = 0

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)
        if options.output:
            options.output.write_text("\n".join(lines) + "\n")

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    with tempfile.TemporaryDirectory(prefix="reproduction-") as name:
        stage = Stage(Path(name))
        stage.make()
        commit = subprocess.run(
            ["git", "-C", str(stage.clone), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        say(
            f"python -m tests.reproduction.campaign, {time.strftime('%Y-%m-%d %H:%M')} UTC, {cpu}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {commit.stdout.strip()}"
        )
        drifts = [drift for drift in DRIFTS if re.search(options.only, drift.name)]
        for number, drift in enumerate(drifts):
            folder = stage.root / f"drift_{number}"
            folder.mkdir()
            found, text = judge(drift, stage.reproduce(f"drift_{number}", drift.apply(stage, folder)))
            wrong += not found
            say(f"{'named' if found else 'MISSED':6}  {drift.name:42}  {text}")
            shutil.rmtree(folder)
        alarms = 0
        for number in range(options.untouched):
            (result,) = stage.reproduce(
                f"untouched_{number}", Attempt(("--run", "--level", "3", "--data", stage.data))
            ).results
            bad = [
                f"level {each.level} {each.verdict}"
                for each in result.levels
                if each.verdict != LevelOutcome.REPRODUCED
            ]
            bad += [f"{each.kind}: {each.what}: {each.was} / {each.now}" for each in result.differences]
            alarms += bool(bad)
            if bad:
                say(f"ALARM   untouched {number}: {'; '.join(bad)}")
            equal = result.levels[2].compared.get("equal_bits")
            if equal != 20:
                say(f"note    untouched {number}: {equal} of 20 losses equal bit for bit")
        say(
            f"{len(drifts) - wrong} of {len(drifts)} drifts named first; {alarms} alarms in {options.untouched} untouched reproductions"
        )
    return 1 if wrong or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
