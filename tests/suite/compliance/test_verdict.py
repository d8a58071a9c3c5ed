"""Every door asks one verdict: what `compare` refuses, no score, page or index ranks."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from mlhpc.analysis.results.index import Weights, Workload, compute_index
from mlhpc.analysis.study import Study, mark_not_ranked, read_study
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.verdict import assess
from mlhpc.suite.descriptor import list_installed_cards
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import START_MS, Line, edit, insert, our_run, results

DAY_MS = 86_400_000


class Made(NamedTuple):
    """A small result: how slow it is, other programs' share of the CPUs in its runs, and what else is wrong with it."""

    factor: float = 1.0
    others: tuple[float, ...] = ()
    sessions: int = 1
    count: int = 5
    edited: bool = False

    @property
    def compliant(self) -> bool:
        return self.count == 5 and not self.edited

    @property
    def disturbed(self) -> bool:
        return max(self.others, default=0.0) > 0.05


MADE = {
    "quick": Made(),
    "again": Made(1.0004),
    "slow": Made(1.5),
    "a little busy": Made(others=(0.04,) * 5),
    "busy": Made(1.5, others=(0.87,) * 5),
    "busy once": Made(others=(0.02, 0.068, 0.02, 0.02, 0.02)),
    "edited": Made(1.5, edited=True),
    "few": Made(count=3),
    "two sessions": Made(1.5, sessions=2),
    "busy and edited": Made(others=(0.5,) * 5, edited=True),
}
PAIRS = [(a, b) for a, b in itertools.product(("quick", "slow", "busy", "edited", "two sessions"), MADE) if a != b]


def write_result(folder: Path, made: Made, number: int) -> Path:
    def run(n: int) -> list[Line]:
        epoch_s = (2 + 0.05 * (1, 2, 4, 0, 3)[n]) * made.factor
        day = 2 * DAY_MS * (made.sessions * n // made.count)
        # A machine that is 8 % slower in its second session
        epoch_s *= 1.08 if day else 1.0
        start_ms = START_MS + 10**8 * number + n * 10**5 + day
        lines = our_run(seed=100 * number + n, start_ms=start_ms, epoch_s=epoch_s)
        lines = edit("submission_platform", value=folder.name)(lines)
        config = next(line.value for line in lines if line.key == "run_config")
        config["submission"]["platform"] = folder.name
        if made.others:
            begin, end = (next(x.time_ms for x in lines if x.key == key) for key in ("run_start", "run_stop"))
            seconds = (end - begin) / 1e3
            other_s = 2 * seconds * made.others[n]
            use = {"node": 0, "cpus": 2, "own_s": 2 * seconds - other_s, "other_s": other_s, "stolen_s": 0.0}
            about = {"seconds": seconds, "nodes": 1, "absent": {}}
            lines = insert(Line("other_work", [use], metadata=about), before="run_stop")(lines)
        return edit("dropout", value=7)(lines) if made.edited and n == 2 else lines

    return results(folder, made.count, run)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("doors")
    return {name: write_result(root / name, made, number) for number, (name, made) in enumerate(MADE.items())}


@pytest.fixture(scope="module")
def study(folders: dict[str, Path]) -> Study:
    read = read_study(list(folders.values()), list_installed_cards(), judging=True)
    return mark_not_ranked(read, [check([path]) for path in folders.values()])


def expect_code(a: Made, b: Made) -> ExitCode:
    if not (a.compliant and b.compliant):
        return ExitCode.NO_SCORE
    # Two sessions that differ by 8 % leave 18 % open, and not 50 %
    if a.disturbed or b.disturbed or abs(a.factor - b.factor) < 0.1:
        return ExitCode.INCONCLUSIVE
    return ExitCode.FINDINGS if b.factor > a.factor else ExitCode.OK


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda name: name)
def test_compare_ranks_only_what_every_door_ranks(folders: dict[str, Path], study: Study, a: str, b: str) -> None:
    done = mlhpc("compare", folders[a], folders[b])
    assert done.returncode == expect_code(MADE[a], MADE[b]), done.stdout
    ranked = set(study.ranked["system"])
    if not {a, b} <= ranked:
        assert done.returncode in {ExitCode.NO_SCORE, ExitCode.INCONCLUSIVE}
    for side, name in (("A", a), ("B", b)):
        assert (f"{side} is NOT compliant (" in done.stdout) != MADE[name].compliant
        assert (f"{side}: other programs used " in done.stdout) == (MADE[name].disturbed and "few" not in (a, b))


def test_busy_results_are_compared_when_asked(folders: dict[str, Path]) -> None:
    asked = mlhpc("compare", folders["quick"], folders["busy"], "--busy")
    assert asked.returncode == ExitCode.FINDINGS
    assert "other programs used 87 % of the CPUs during 5 of 5 runs" in asked.stdout.replace("up to ", "")
    # Equal work beside other programs takes longer, and as many CPU seconds
    both = mlhpc("compare", folders["busy once"], folders["busy"]).stdout
    assert re.search(r"B takes 0\.\d+ times the CPU seconds of A \[", both)


@pytest.mark.parametrize("name", MADE)
def test_score_says_what_compare_says(folders: dict[str, Path], name: str) -> None:
    done, made = mlhpc("score", folders[name]), MADE[name]
    assert ("not ranked: other programs used" in done.stdout) == made.disturbed
    assert (done.returncode == ExitCode.OK) == made.compliant
    assert ("by the spread of 5 runs in 2 sessions" in done.stdout) == (made.sessions == 2)


def test_page_and_index_rank_what_compare_ranks(study: Study, folders: dict[str, Path]) -> None:
    (verdicts,) = ([assess(result) for path in folders.values() for result in check([path]).results],)
    expected = {each.system for each in verdicts if not each.not_compliant and not each.disturbed}
    assert set(study.ranked["system"]) == expected == {"quick", "again", "slow", "a little busy", "two sessions"}
    assert {row["system"] for _, _, rows in study.tasks() for row in rows.to_dict("records")} == expected
    weights = Weights(1, (Workload("cosmoflow", "smoke"),))
    index = compute_index(study.ranked, study.runs, weights, "quick")
    assert {each.system for each in index.systems} == expected
    with pytest.raises(InputError, match="no system with a score"):
        compute_index(study.ranked, study.runs, weights, "edited")


def test_a_busy_result_is_ranked_when_asked(study: Study, folders: dict[str, Path]) -> None:
    asked = mark_not_ranked(study, [check([path]) for path in folders.values()], busy=True)
    assert set(study.ranked["system"]) | {"busy", "busy once"} == set(asked.ranked["system"])
