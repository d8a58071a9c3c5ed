"""`mlhpc ab runs`: from a new folder to a ranking, and what a forger may try. Runs are logs written by the test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.sources.readers import read_file
from mlhpc.plugins.tune.contest import run_command
from mlhpc.plugins.tune.race import Turn
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import InputError
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import edit
from tests.plugins.tune.conftest import Make, Played, make_contest

THREE = {"quick": 1.0, "middle": 1.4, "slow": 1.5}
LARGE_ERROR = ("--error", "40%", "--blocks", "12")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A contest that is over, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_contest(tmp_path_factory.mktemp("once"), patch, THREE, *LARGE_ERROR)
        made.run()
    return made


@pytest.fixture
def played(once: Played, tmp_path: Path) -> Played:
    """A contest that is over, to be damaged."""
    shutil.copytree(once.root, tmp_path / "contest")
    return Played(tmp_path / "contest", once.epoch_s)


def test_the_fastest_entry_wins_and_the_ranking_says_by_how_much(played: Played) -> None:
    code, document = played.show()
    assert (code, document["winner"], document["findings"]) == (0, "quick", [])
    assert "quick wins; the chance that the best entry was dropped is at most 40 %" in document["verdict"]
    first, *others = document["entries"]
    assert (first["entry"], first["verdict"], first["ratio_to_leader"]) == ("quick", "faster", None)
    assert {each["entry"] for each in others} == {"middle", "slow"}
    assert all(each["verdict"] == "slower" and each["ratio_to_leader"]["value"] > 1.2 for each in others)
    shown = mlhpc("ab", "runs", "show", played.root)
    assert shown.returncode == 0
    assert "quick wins" in shown.stdout
    assert shown.stdout.count("dropped after") == 2


def test_equal_entries_have_no_winner(contest: Make) -> None:
    made = contest({"a": 1.0, "b": 1.0}, "--blocks", "5")
    made.run()
    code, document = made.show()
    assert (code, document["winner"], document["over"]) == (0, None, True)
    assert document["verdict"] == "no winner: a, b are inconclusive after 5 blocks at an error of 5 %"


def test_a_failing_entry_loses_and_its_runs_count(contest: Make) -> None:
    made = contest({"sound": 2.0, "broken": float("inf")}, *LARGE_ERROR)
    made.run()
    _, document = made.show()
    last = document["entries"][-1]
    assert (document["winner"], last["entry"], last["finished"]) == ("sound", "broken", 0)
    assert last["runs"] == document["blocks"]


def test_the_score_by_the_rules_stands_beside_the_verdict(played: Played) -> None:
    _, document = played.show()
    first, *others = document["entries"]
    assert document["by_score"] == ""
    assert first["score_to_leader"] is None
    assert all(each["score"] > first["score"] and each["score_to_leader"] > 1.2 for each in others)


def slow_in(made: Played, entry: str, blocks: tuple[str, ...], factor: float) -> None:
    """Make the runs of an entry in some blocks take ``factor`` times as long; infinite: they miss the target."""
    execute, usual = made.execute, made.epoch_s

    def changed(runner: Any, command: Any) -> tuple[int, str]:
        tail = any(f"{block}/{entry}" in " ".join(command) for block in blocks)
        made.epoch_s = {**usual, entry: usual[entry] * factor} if tail else usual
        return execute(runner, command)

    made.execute = changed  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (12.0, "the MLPerf score differs: it puts even (0."),
        (float("inf"), "puts even before often; often has no score, because several of its runs did not finish"),
    ],
)
def test_a_winner_of_most_blocks_with_the_worse_score_is_named(contest: Make, factor: float, words: str) -> None:
    made = contest({"often": 1.0, "even": 1.4}, "--error", "20%", "--blocks", "20")
    slow_in(made, "often", ("block_001", "block_002"), factor)
    made.run()
    _, document = made.show()
    assert document["winner"] == "often"
    assert words in document["by_score"]
    shown = mlhpc("ab", "runs", "show", made.root).stdout
    assert document["by_score"] in shown


def test_a_contest_that_was_killed_goes_on_and_ends_the_same(contest: Make, tmp_path: Path) -> None:
    made = contest(THREE, *LARGE_ERROR, stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert "not over: 1 of at most 12 blocks" in made.show()[1]["verdict"]
    race, count = made.run()
    assert race is not None
    assert race.winner == "quick"
    assert len(set(made.ran)) == len(made.ran) == count + 4
    assert made.rules() == set()


def test_a_run_without_a_log_counts_as_one_that_did_not_finish(contest: Make) -> None:
    made = contest({"a": 1.0, "b": 1.5}, *LARGE_ERROR)
    execute = made.execute

    def lost(runner: Any, command: Any) -> tuple[int, str]:
        return (1, "") if "block_001/a" in " ".join(command) else execute(runner, command)

    made.execute = lost  # type: ignore[method-assign]
    made.run()
    _, document = made.show()
    assert document["findings"] == []
    assert next(each for each in document["entries"] if each["entry"] == "a")["finished"] == document["blocks"] - 1


def test_two_processes_never_run_one_contest(contest: Make) -> None:
    made = contest(THREE, *LARGE_ERROR)
    with create_lock(made.root / "contest.lock", "contest"), pytest.raises(InputError, match="is in use by process"):
        made.run()
    assert not (made.root / "runs").exists()


def test_the_command_of_a_run_states_what_is_the_same_for_all(contest: Make) -> None:
    made = contest({"a": 1.0, "b": 1.0}, "--ranks", "2")
    command = run_command(made.contest, Turn(3, "b"))
    text = " ".join(command)
    assert f"run cosmoflow --config {made.root}/entries/b.yaml --ranks 2 --runs 1 --seed 10" in text
    assert '--set submission.platform="bed"' in text


def _log(contest: Played, block: int = 2, entry: str = "slow") -> Path:
    return contest.folder(block, entry).result(0)


def _edited(contest: Played) -> None:
    path = _log(contest)
    text = path.read_text()
    assert '"status": "success"' in text
    path.write_text(text.replace('"status": "success"', '"status":  "success"'))


def _gone(contest: Played) -> None:
    shutil.rmtree(_log(contest).parent)


def _copy(contest: Played) -> None:
    shutil.copytree(contest.folder(1, "slow").root, contest.folder(9, "slow").root)


def _second_log(contest: Played) -> None:
    shutil.copy(_log(contest), _log(contest).with_name("result_1.txt"))


def _other_config(contest: Played) -> None:
    entry = contest.root / "entries" / "slow.yaml"
    entry.write_text(entry.read_text().replace("dropout: 0.02", "dropout: 0.021"))


def _linked(contest: Played) -> None:
    path = _log(contest)
    moved = contest.root / "elsewhere.txt"
    path.rename(moved)
    path.symlink_to(moved)


def _noted(contest: Played, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = contest.root / "journal.json"
    journal = json.loads(path.read_text())
    change(journal["runs"])
    path.write_text(json.dumps(journal))


def _run_forgotten(contest: Played) -> None:
    """A lost run is taken out of the journal and the folder."""
    _noted(contest, lambda runs: runs.pop(3))
    shutil.rmtree(contest.folder(2, contest.ran_in(2)[0]).root)


def _digest_changed(contest: Played) -> None:
    _noted(contest, lambda runs: runs[4].update(log_sha256="0" * 64))


def _late_entry(contest: Played) -> None:
    text = (contest.root / "entries" / "slow.yaml").read_text()
    (contest.root / "entries" / "late.yaml").write_text(text)


def _more_blocks(contest: Played) -> None:
    path = contest.root / "contest.yaml"
    path.write_text(path.read_text().replace("blocks: 12", "blocks: 13"))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("forge", "rule"),
    [
        (_edited, "log-unchanged"),
        (_gone, "log-unchanged"),
        (_copy, "runs-as-started"),
        (_second_log, "runs-as-started"),
        (_other_config, "as-it-began"),
        (_linked, "log-unchanged"),
        (_digest_changed, "log-unchanged"),
        (_run_forgotten, "turns-as-drawn"),
        (_late_entry, "as-it-began"),
        (_more_blocks, "as-it-began"),
    ],
)
def test_a_forged_folder_has_no_verdict(played: Played, forge: Callable[[Played], None], rule: str) -> None:
    assert played.rules() == set()
    forge(played)
    assert rule in played.rules()
    assert played.show()[1]["winner"] is None


@pytest.mark.parametrize(
    ("key", "change", "rule"),
    [
        ("suite_version", {"value": "9.9"}, "same-for-all"),
        ("data_manifest", {"value": "f" * 64}, "same-for-all"),
        ("eval_error", {"value": "none"}, "*"),
    ],
)
def test_a_run_made_otherwise_is_named(contest: Make, key: str, change: dict[str, Any], rule: str) -> None:
    """The journal of these is whole: whoever ran the contest ran something else."""
    made = contest(THREE, *LARGE_ERROR)
    made.mutate[Turn(2, "middle")] = edit(key, **change)
    made.run()
    found = made.show()[1]["findings"]
    assert any(each["where"].endswith("block_002/middle") for each in found)
    assert rule == "*" or rule in {each["rule"] for each in found}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("../out",), "expected 1 to 40 letters"),
        ((".hidden",), "expected 1 to 40 letters"),
        (("a/b",), "expected 1 to 40 letters"),
        (("twin", "--set", "hyperparameters.dropout=0.01"), "has the same configuration as entry 'middle'"),
        (("QUICK", "--set", "hyperparameters.dropout=0.3"), "the contest has an entry 'quick' already"),
        (("mini", "--size", "mini"), "field size is 'mini'; expected 'smoke'"),
        (("elsewhere", "--set", "data=/tmp"), "field data must be the same for all entries"),
        (
            ("dropper", "--set", "cache_drop_command=rm -rf /"),
            "field cache_drop_command must be the same for all entries",
        ),
        (("stager", "--set", "staging.directory=/tmp/x"), "field staging must be the same for all entries"),
        (("odd", "--set", "hyperparameters.droput=0.3"), "droput"),
    ],
)
def test_what_nobody_can_enter(contest: Make, words: tuple[str, ...], message: str) -> None:
    made = contest(THREE)
    done = mlhpc("ab", "runs", "enter", made.root, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.stem for path in (made.root / "entries").iterdir()) == sorted(THREE)
    assert not (made.root.parent / "out").exists()


def test_nobody_enters_once_a_run_was_started(played: Played) -> None:
    done = mlhpc("ab", "runs", "enter", played.root, "late", "--set", "hyperparameters.dropout=0.4")
    assert done.returncode == 2
    assert "so no entry can be added" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("contest.yaml", "version: 2\n", "version"),
        ("contest.yaml", "version: 1\nworkload: cosmoflow\n", "missing keys"),
        ("contest.yaml", "- 1\n", "expected a mapping"),
        ("contest.yaml", "version: 1\nversion: 1\n", "is given twice"),
        ("entries/quick.yaml", "workload: cosmoflow\nsize: mini\n", "quick.yaml"),
        ("entries/quick.yaml", "!!python/object/apply:os.system ['touch /tmp/D_hostile']", "not valid YAML"),
        ("journal.json", "{", "not valid YAML"),
        ("journal.json", '{"version": 7}', "version"),
    ],
)
def test_a_damaged_file_is_one_line(played: Played, name: str, text: str, message: str) -> None:
    (played.root / name).write_text(text)
    done = mlhpc("ab", "runs", "show", played.root)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path("/tmp/D_hostile").exists()


def test_a_linked_entry_is_refused(contest: Make, tmp_path: Path) -> None:
    made = contest(THREE)
    (made.root / "entries" / "link.yaml").symlink_to(made.root / "entries" / "quick.yaml")
    done = mlhpc("ab", "runs", "show", made.root)
    assert (done.returncode, "is a symbolic link" in done.stderr) == (2, True)


def test_an_earlier_folder_is_never_written_into(contest: Make) -> None:
    made = contest(THREE)
    done = mlhpc("ab", "runs", "new", made.root, "cosmoflow", "--size", "smoke", "--system", "bed")
    assert (done.returncode, "exists already" in done.stderr) == (2, True)
    other = mlhpc("ab", "runs", "run", made.root.parent / "nowhere")
    assert (other.returncode, "no contest here" in other.stderr) == (2, True)


def test_without_data_nothing_is_started(contest: Make) -> None:
    made = contest(THREE)
    shutil.rmtree(made.root.parent / "data")
    with pytest.raises(InputError, match="no data set here"):
        made.run()
    assert not (made.root / "journal.json").exists()


def test_the_written_ranking_is_that_of_the_output(played: Played, tmp_path: Path) -> None:
    code, document = played.show("-o", str(tmp_path / "ranking.json"))
    assert code == 0
    assert json.loads((tmp_path / "ranking.json").read_text()) == document


def test_a_report_has_a_figure_with_the_ranking(played: Played, tmp_path: Path, run_folder: Any) -> None:
    path = tmp_path / "ranking.json"
    assert played.show("-o", str(path))[0] == 0
    data = json.loads(path.read_text())
    data["entries"][0]["entry"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(data))
    done = mlhpc("report", run_folder(tmp_path / "runs"), path, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out" / "report.json").read_text())["figures"]
    (figure,) = (each for each in figures if each["name"] == "contests")
    assert figure["answer"].startswith("contest, cosmoflow smoke on bed: quick wins; ")
    assert len(figure["table"]) == 3
    assert "<script>alert" not in (tmp_path / "out" / "report.html").read_text()
    path.write_text(json.dumps(data | {"entries": 3}))
    with pytest.raises(InputError, match="entries"):
        read_file(path)
