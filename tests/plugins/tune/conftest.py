"""A contest of CosmoFlow smoke whose runs are logs, written without running; and a tiny data set for searches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlhpc.plugins.tune.contest import Contest, Runner, read_contest, run_contest
from mlhpc.plugins.tune.race import Race, Turn
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World
from tests.analysis.conftest import cards as cards
from tests.analysis.conftest import run_folder as run_folder
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import COSMOFLOW, START_MS, Lines, edit, our_run, write
from tests.fixtures.once import made_once
from tests.workloads.tiny import TINY, make


@dataclass
class Played:
    """A contest's folder and what its runs will take: seconds of an epoch by entry, before noise. Infinite: misses the target."""

    root: Path
    epoch_s: Mapping[str, float]
    mutate: dict[Turn, Callable[[Lines], Lines]] = field(default_factory=dict)
    noise: float = 0.02
    stop_after: int | None = None
    ran: list[Turn] = field(default_factory=list)

    @property
    def contest(self) -> Contest:
        return read_contest(self.root)

    def folder(self, block: int, entry: str) -> RunFolder:
        return self.contest.run(Turn(block, entry))

    def ran_in(self, block: int) -> list[str]:
        """The entries of a block in the order of their runs, from the journal."""
        return [noted.entry for noted in self.contest.read_journal().runs if noted.block == block]

    def run(self) -> tuple[Race | None, int]:
        return run_contest(self.root, lambda result: self.ran.append(result.turn))

    def show(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = mlhpc("ab", "runs", "show", self.root, "--format", "json", *words)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    def rules(self) -> set[str]:
        """The rules of the findings."""
        code, document = self.show()
        assert code == bool(document["findings"])
        return {finding["rule"] for finding in document["findings"]}

    def execute(self, runner: Runner, command: Sequence[str]) -> tuple[int, str]:
        """Stand in for the process: write what a run leaves."""
        words = dict(pairwise(command))
        root, seed = Path(words["--output"]), int(words["--seed"])
        turn = Turn(int(root.parent.name.removeprefix("block_")), root.name)
        contest = runner.contest
        config = contest.entries[turn.entry]
        chance = random.Random(f"{turn}")
        seconds = self.epoch_s[turn.entry]
        fails = seconds == float("inf")
        stated = json.loads(json.dumps(config.logged(), default=str))
        hyper = {key: value for key, value in stated["hyperparameters"].items() if key in COSMOFLOW}
        lines = our_run(
            seed=seed,
            hyperparameters=hyper | {"global_batch_size": config.global_batch_size},
            ranks=1,
            staging_s=None,
            start_ms=START_MS + 1_000_000 * len(runner.journal.runs),
            epoch_s=2.0 if fails else seconds * (1.0 + self.noise * chance.random()),
            values=tuple(v * (1 + 0.01 * random.Random(seed).random()) for v in (0.42, 0.39, 0.38 if fails else 0.35)),
        )
        logged = stated | {
            "instrumentation": False,
            "submission": {"org": "ACME", "platform": contest.settings.system},
        }
        lines = edit("run_config", value=logged)(lines)
        lines = edit("submission_platform", value=contest.settings.system)(lines)
        write(root / "result_0.txt", self.mutate.get(turn, lambda same: same)(lines))
        (root / "run.json").write_text("{}")
        if self.stop_after is not None and len(runner.journal.runs) >= self.stop_after:
            self.stop_after = None
            raise KeyboardInterrupt
        return int(fails), ""


Make = Callable[..., Played]


def make_contest(
    folder: Path, patch: pytest.MonkeyPatch, epoch_s: Mapping[str, float], *options: object, **given: Any
) -> Played:
    """Make a contest: entries by name with their seconds of an epoch; ``options`` of `mlhpc ab runs new`."""
    made = Played(folder / "contest", epoch_s, **given)
    data = folder / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}")
    words = ("cosmoflow", "--size", "smoke", "--system", "bed", "--seed", 7, "--data", data)
    assert mlhpc("ab", "runs", "new", made.root, *words, *options).returncode == 0
    for number, name in enumerate(epoch_s):
        done = mlhpc("ab", "runs", "enter", made.root, name, "--set", f"hyperparameters.dropout={number / 100}")
        assert done.returncode == 0, done.stderr
    patch.setattr(Runner, "_execute", lambda runner, command: made.execute(runner, command))
    return made


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A maker of contests in the folder of the test."""
    return partial(make_contest, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of seconds, as ``--set`` takes them: SwinV2-MoE on a tiny data set."""
    alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    data = made_once(tmp_path_factory, "tune_data", lambda folder: make("swinv2_moe", folder / "data", alone)) / "data"
    found = [*TINY["swinv2_moe"].overrides(read_manifest(data).attributes), f"data={data}", "global_batch_size=20"]
    return [*found, "submission.division=open", "device=cpu"]
