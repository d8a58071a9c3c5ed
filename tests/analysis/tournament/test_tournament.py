"""`mlhpc tournament`: from a new folder to a ranking, and what a forger may try. Runs are logs written by the test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.page.tournaments import is_ranking, read_rankings
from analysis.tournament.finals import run_finals
from analysis.tournament.race import Turn
from analysis.tournament.ranking import read_ranking
from analysis.tournament.runner import run_command
from suite.data.lock import locked
from suite.errors import InputError
from tests.analysis.tournament.conftest import Contest, Make, make_contest
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Lines, edit

THREE = {"quick": 1.0, "middle": 1.4, "slow": 1.5}
LARGE_ERROR = ("--error", "0.4", "--blocks", "12")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Contest:
    """A tournament that is over, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_contest(tmp_path_factory.mktemp("once"), patch, THREE, *LARGE_ERROR)
        made.run()
    return made


@pytest.fixture
def played(once: Contest, tmp_path: Path) -> Contest:
    """A tournament that is over, to be damaged."""
    shutil.copytree(once.root, tmp_path / "contest")
    return Contest(tmp_path / "contest", once.epoch_s)


def test_the_fastest_entry_wins_and_the_ranking_says_by_how_much(played: Contest) -> None:
    code, document = played.rank()
    assert (code, document["winner"], document["findings"]) == (0, "quick", [])
    assert "quick wins; the chance that the best entry was dropped is at most 40 %" in document["verdict"]
    first, *others = document["entries"]
    assert (first["entry"], first["state"], first["ratio_to_leader"]) == ("quick", "winner", None)
    assert {each["entry"] for each in others} == {"middle", "slow"}
    assert all(each["state"] == "dropped" and each["ratio_to_leader"]["value"] > 1.2 for each in others)
    shown = mlhpc("tournament", "rank", played.root)
    assert shown.returncode == 0
    assert "quick wins" in shown.stdout
    assert shown.stdout.count("dropped after") == 2


def test_equal_entries_have_no_winner(contest: Make) -> None:
    made = contest({"a": 1.0, "b": 1.0}, "--blocks", "5")
    made.run()
    code, document = made.rank()
    assert (code, document["winner"], document["over"]) == (0, None, True)
    assert document["verdict"] == "no winner: 5 blocks cannot tell a, b apart at an error of 5 %"


def test_a_failing_entry_loses_and_its_runs_count(contest: Make) -> None:
    made = contest({"sound": 2.0, "broken": float("inf")}, *LARGE_ERROR)
    made.run()
    _, document = made.rank()
    last = document["entries"][-1]
    assert (document["winner"], last["entry"], last["finished"]) == ("sound", "broken", 0)
    assert last["runs"] == document["blocks"]


def test_a_tournament_that_was_killed_goes_on_and_ends_the_same(contest: Make, tmp_path: Path) -> None:
    made = contest(THREE, *LARGE_ERROR, stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert "not over: 1 of at most 12 blocks" in made.rank()[1]["verdict"]
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
    _, document = made.rank()
    assert document["findings"] == []
    assert next(each for each in document["entries"] if each["entry"] == "a")["finished"] == document["blocks"] - 1


def test_two_processes_never_run_one_tournament(contest: Make) -> None:
    made = contest(THREE, *LARGE_ERROR)
    with locked(made.tournament.lock, "tournament"), pytest.raises(InputError, match="is in use by process"):
        made.run()
    assert not (made.root / "runs").exists()


def test_the_command_of_a_run_states_what_is_the_same_for_all(contest: Make) -> None:
    made = contest({"a": 1.0, "b": 1.0}, "--ranks", "2")
    command = run_command(made.tournament, Turn(3, "b"))
    text = " ".join(command)
    assert f"run cosmoflow --config {made.root}/entries/b/config.yaml --ranks 2 --runs 1 --seed 10" in text
    assert '--set submission.platform="bed"' in text


def test_the_price_adds_a_cost(played: Contest) -> None:
    _, document = played.rank("--price", "bed=2 USD/h")
    assert document["objectives"] == ["time to train, s", "cost, USD"]
    refused = mlhpc("tournament", "rank", played.root, "--price", "other=2 USD/h")
    assert refused.returncode == 2
    assert "other" in refused.stderr


def _log(contest: Contest, block: int = 2, entry: str = "slow") -> Path:
    return contest.folder(block, entry).result(0)


def _edited(contest: Contest) -> None:
    path = _log(contest)
    text = path.read_text()
    assert '"status": "success"' in text
    path.write_text(text.replace('"status": "success"', '"status":  "success"'))


def _gone(contest: Contest) -> None:
    shutil.rmtree(_log(contest).parent)


def _copy(contest: Contest) -> None:
    shutil.copytree(contest.folder(1, "slow").root, contest.folder(9, "slow").root)


def _second_log(contest: Contest) -> None:
    shutil.copy(_log(contest), _log(contest).with_name("result_1.txt"))


def _other_config(contest: Contest) -> None:
    entry = contest.root / "entries" / "slow" / "entry.yaml"
    entry.write_text(entry.read_text().replace("dropout=0.02", "dropout=0.02 "))


def _linked(contest: Contest) -> None:
    path = _log(contest)
    moved = contest.root / "elsewhere.txt"
    path.rename(moved)
    path.symlink_to(moved)


def _note_changed(contest: Contest) -> None:
    path = contest.root / "journal" / "000004.json"
    path.write_text(
        path.read_text().replace("}", ' ,"exit_code": 0}')
        if "exit_code" not in path.read_text()
        else path.read_text() + " "
    )


def _note_gone(contest: Contest) -> None:
    (contest.root / "journal" / "000004.json").unlink()


def _late_entry(contest: Contest) -> None:
    shutil.copytree(contest.root / "entries" / "slow", contest.root / "entries" / "late")
    config = contest.root / "entries" / "late" / "entry.yaml"
    config.write_text(config.read_text().replace("name: slow", "name: late"))


def _more_blocks(contest: Contest) -> None:
    path = contest.root / "tournament.yaml"
    path.write_text(path.read_text().replace("blocks: 12", "blocks: 13"))


@pytest.mark.parametrize(
    ("forge", "rule"),
    [
        (_edited, "log-unchanged"),
        (_gone, "log-unchanged"),
        (_copy, "runs-as-started"),
        (_second_log, "runs-as-started"),
        (_other_config, "as-it-began"),
        (_linked, "links-none"),
        (_note_changed, "journal-whole"),
        (_note_gone, "journal-whole"),
        (_late_entry, "as-it-began"),
        (_more_blocks, "as-it-began"),
    ],
)
def test_a_forged_folder_has_no_verdict(played: Contest, forge: Callable[[Contest], None], rule: str) -> None:
    assert played.rules() == set()
    forge(played)
    assert rule in played.rules()
    assert played.rank()[1]["winner"] is None


@pytest.mark.parametrize(
    ("key", "change", "rule"),
    [
        ("seed", {"value": 999}, "run-as-stated"),
        ("benchmark_size", {"value": "mini"}, "run-as-stated"),
        ("number_of_ranks", {"value": 4}, "run-as-stated"),
        ("submission_platform", {"value": "another bed"}, "run-as-stated"),
        ("submission_benchmark", {"value": "deepcam"}, "run-as-stated"),
        ("suite_version", {"value": "9.9"}, "same-machine"),
        ("data_manifest", {"value": "f" * 64}, "same-machine"),
        ("run_start", {"add_ms": -2_500_000}, "one-at-a-time"),
        ("eval_error", {"value": "none"}, "*"),
    ],
)
def test_a_run_made_otherwise_is_named(contest: Make, key: str, change: dict[str, Any], rule: str) -> None:
    """The journal of these is whole: whoever ran the tournament ran something else."""
    made = contest(THREE, *LARGE_ERROR)
    made.mutate[Turn(2, "middle")] = edit(key, **change)
    made.run()
    found = made.rank()[1]["findings"]
    assert any(each["where"].endswith("block_002/middle") for each in found)
    assert rule == "*" or rule in {each["rule"] for each in found}


def test_a_run_of_another_configuration_or_machine_is_named(contest: Make) -> None:
    made = contest(THREE, *LARGE_ERROR)
    made.mutate[Turn(1, "slow")] = lambda lines: edit(
        "run_config", value=next(line for line in lines if line.key == "run_config").value | {"max_epochs": 3}
    )(lines)
    made.facts[Turn(3, "quick")] = {"cpu": {"model": "Model S", "cores": 64}}
    made.run()
    findings = {each["rule"]: each["message"] for each in made.rank()[1]["findings"]}
    assert "max_epochs is 3, not " in findings["run-as-entered"]
    assert "processor: 'Model S', there 'Model T'" in findings["same-machine"]


def test_a_copied_run_is_named(contest: Make) -> None:
    """The evaluations and durations of block 1 under the seed of block 2, begun later."""
    made = contest({"a": 1.0, "b": 2.0}, *LARGE_ERROR)
    kept: list[Lines] = []

    def again(lines: Lines) -> Lines:
        later = lines[0].time_ms - kept[0][0].time_ms
        seed = next(line for line in lines if line.key == "seed")
        moved = [replace(line, time_ms=line.time_ms + later) for line in kept[0]]
        return edit("seed", value=seed.value)(moved)

    made.mutate[Turn(1, "a")] = lambda lines: (kept.append(lines), lines)[1]
    made.mutate[Turn(2, "a")] = again
    made.run()
    findings = made.rank()[1]["findings"]
    assert {each["rule"] for each in findings} == {"run-repeated"}
    assert "block_002/a" in findings[0]["where"]
    assert "block_001/a" in findings[0]["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("../out",), "expected 1 to 40 letters"),
        ((".hidden",), "expected 1 to 40 letters"),
        (("a/b",), "expected 1 to 40 letters"),
        (("twin", "--set", "hyperparameters.dropout=0.01"), "has the same configuration as 'middle'"),
        (("QUICK", "--set", "hyperparameters.dropout=0.3"), "there is an entry 'quick' already"),
        (("mini", "--size", "mini"), "size is 'mini'; this tournament is of cosmoflow smoke"),
        (("elsewhere", "--set", "data=/tmp"), "data is the same for all entries"),
        (("dropper", "--set", "cache_drop_command=rm -rf /"), "cache_drop_command is the same for all entries"),
        (("stager", "--set", "staging.directory=/tmp/x"), "staging is the same for all entries"),
        (("odd", "--set", "hyperparameters.droput=0.3"), "droput"),
    ],
)
def test_what_nobody_can_enter(contest: Make, words: tuple[str, ...], message: str) -> None:
    made = contest(THREE)
    done = mlhpc("tournament", "enter", made.root, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (made.root / "entries").iterdir()) == sorted(THREE)
    assert not (made.root.parent / "out").exists()


def test_nobody_enters_once_a_run_was_started(played: Contest) -> None:
    done = mlhpc("tournament", "enter", played.root, "late", "--set", "hyperparameters.dropout=0.4")
    assert done.returncode == 2
    assert "nobody can enter any more" in done.stderr


def test_tuning_runs_are_stated_and_bounded(contest: Make, tmp_path: Path) -> None:
    made = contest({"a": 1.0, "b": 1.0}, "--tuning-runs", "1")
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result_0.txt").write_text(name)
        runs += ["--tuning", tmp_path / name]
    words = ("tournament", "enter", made.root, "tuned", "--set", "hyperparameters.dropout=0.3")
    done = mlhpc(*words, *runs)
    assert (done.returncode, "2 tuning runs; every entry of this tournament has 1" in done.stderr) == (2, True)
    assert mlhpc(*words, *runs[:2]).returncode == 0
    assert yaml.safe_load((made.root / "entries" / "tuned" / "entry.yaml").read_text())["tuning"][0]["run"] == "first"


def test_the_configuration_of_a_package_is_entered_as_data(contest: Make, tmp_path: Path) -> None:
    made = contest({"a": 1.0, "b": 1.0})
    shown = yaml.safe_load((made.root / "entries" / "a" / "config.yaml").read_text())
    package = tmp_path / "ACME"
    place = package / "benchmarks" / "cosmoflow" / "implementations" / "x" / "provenance" / "run_0"
    place.mkdir(parents=True)
    shown["hyperparameters"]["dropout"] = 0.33
    shown |= {"cache_drop_command": "touch /tmp/D_hostile", "data": "/etc", "submission": {"org": "ACME"}}
    (place / "config.yaml").write_text(yaml.safe_dump(shown))
    done = mlhpc("tournament", "enter", made.root, "theirs", "--package", package)
    assert done.returncode == 0, done.stderr
    entered = yaml.safe_load((made.root / "entries" / "theirs" / "config.yaml").read_text())
    assert entered["hyperparameters"]["dropout"] == 0.33
    assert "cache_drop_command" not in entered
    assert "data" not in entered
    shown["hyperparameters"]["dropout"] = 0.34
    (place.parent / "run_1").mkdir()
    (place.parent / "run_1" / "config.yaml").write_text(yaml.safe_dump(shown))
    done = mlhpc("tournament", "enter", made.root, "both", "--package", package)
    assert (done.returncode, "different configurations in" in done.stderr) == (2, True)
    assert mlhpc("tournament", "enter", made.root, "none", "--package", tmp_path / "contest").returncode == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tournament.yaml", "version: 2\n", "version 2; this suite reads 1"),
        ("tournament.yaml", "version: 1\nworkload: cosmoflow\n", "missing keys"),
        ("tournament.yaml", "- 1\n", "expected a mapping"),
        ("tournament.yaml", "version: 1\nversion: 1\n", "is given twice"),
        ("entries/quick/entry.yaml", "version: 1\nname: other\n", "missing key"),
        ("entries/quick/config.yaml", "workload: cosmoflow\nsize: mini\n", "config.yaml"),
        ("entries/quick/config.yaml", "!!python/object/apply:os.system ['touch /tmp/D_hostile']", "not valid YAML"),
        ("journal/000001.json", "{", "expected JSON"),
        ("journal/000001.json", '{"version": 7}', "version 1, found 7"),
    ],
)
def test_a_damaged_file_is_one_line(played: Contest, name: str, text: str, message: str) -> None:
    (played.root / name).write_text(text)
    done = mlhpc("tournament", "rank", played.root)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path("/tmp/D_hostile").exists()


def test_a_linked_entry_is_refused(contest: Make, tmp_path: Path) -> None:
    made = contest(THREE)
    (made.root / "entries" / "link").symlink_to(made.root / "entries" / "quick")
    done = mlhpc("tournament", "rank", made.root)
    assert (done.returncode, "is a symbolic link" in done.stderr) == (2, True)


def test_an_earlier_folder_is_never_written_into(contest: Make) -> None:
    made = contest(THREE)
    done = mlhpc("tournament", "new", made.root, "cosmoflow", "--size", "smoke", "--system", "bed")
    assert (done.returncode, "exists already" in done.stderr) == (2, True)
    other = mlhpc("tournament", "run", made.root.parent / "nowhere")
    assert (other.returncode, "no tournament here" in other.stderr) == (2, True)


def test_without_data_nothing_is_started(contest: Make) -> None:
    made = contest(THREE)
    shutil.rmtree(made.root.parent / "data")
    with pytest.raises(InputError, match="no data set here"):
        made.run()
    assert not made.tournament.journal.exists()


def test_the_written_ranking_is_that_of_the_output(played: Contest, tmp_path: Path) -> None:
    code, document = played.rank("-o", str(tmp_path / "ranking.json"))
    assert code == 0
    assert json.loads((tmp_path / "ranking.json").read_text()) == document


def test_finalists_are_packaged_and_reproduced_by_commands(played: Contest, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def execute(command: Sequence[str]) -> tuple[int, str]:
        words = list(command)[list(command).index("suite") + 1 :]
        commands.append(words)
        if words[0] == "reproduce":
            folder = Path(words[words.index("-o") + 1])
            folder.mkdir(parents=True)
            (folder / "reproduction.json").write_text('{"version": 1, "reproduced": true}')
        return 0, ""

    ranking = read_ranking(played.root)
    (final,) = run_finals(ranking, 4, tmp_path / "finals", execute)
    assert (final.entry, final.reproduced) == ("quick", True)
    package, reproduce = commands
    assert package[0] == "package"
    assert sum("/quick" in word for word in package[1 : package.index("--system")]) == len(ranking.race.blocks)
    assert reproduce[:5] == ["reproduce", str(tmp_path / "finals" / "quick" / "ACME"), "--run", "--level", "4"]
    with pytest.raises(InputError, match="exists already"):
        run_finals(ranking, 4, tmp_path / "finals", execute)
    (failed,) = run_finals(ranking, 3, tmp_path / "again", lambda command: (2, "no such command"))
    assert (failed.reproduced, failed.reason) == (None, "no such command")


def test_there_are_no_finals_before_the_end_nor_with_findings(contest: Make, played: Contest, tmp_path: Path) -> None:
    _gone(played)
    done = mlhpc("tournament", "finals", played.root, "-o", tmp_path / "finals")
    assert (done.returncode, "no verdict" in done.stderr, (tmp_path / "finals").exists()) == (2, True, False)


def test_a_report_has_a_section_with_the_ranking(played: Contest, tmp_path: Path) -> None:
    path = tmp_path / "ranking.json"
    assert played.rank("-o", str(path))[0] == 0
    assert is_ranking(path)
    (section,) = read_rankings([path])
    assert section.title == "contest: cosmoflow smoke on bed"
    assert "quick wins" in section.verdict
    assert section.table.body.count("<tr") == 3
    data = json.loads(path.read_text())
    data["entries"][0]["entry"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(data))
    assert "<script>" not in read_rankings([path])[0].table.body
    path.write_text(json.dumps(data | {"entries": 3}))
    with pytest.raises(InputError, match="entries"):
        read_rankings([path])
