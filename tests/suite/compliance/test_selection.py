"""Nobody chooses the rules he is judged by: the folder above a package gives the round, and a log may name mlhpc-* only."""

from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import Verdict, check
from tests.fixtures.logs import Line, Lines, Mutation, drop, edit, hpc_run, insert, our_run, our_runs, results
from tests.fixtures.systems import hpc_package

YEAR_2021_MS = 1_612_000_000_000
WITHOUT = ("opt_name", "number_of_nodes", "opt_learning_rate_decay_factor")


def rules(verdict: Verdict, severity: str = "error") -> set[str]:
    return {finding.rule for finding in verdict.findings if finding.severity == severity}


def naming(name: object) -> Mutation:
    return insert(Line("ruleset", name), "seed")


@pytest.mark.parametrize(
    "name", ["0.7.0", "1.0.0", "2.0.0", "mlhpc-1.0", "mlhpc-9.9", "training-5.0", "", 7, ["3.0.0"]]
)
def test_a_log_in_a_rounds_folder_does_not_choose_another_ruleset(tmp_path: Path, name: object) -> None:
    verdict = check([hpc_package(tmp_path / "hpc_results_v3.0", change=naming(name)).parent])
    assert verdict.rulesets == ("3.0.0",)
    assert "ruleset-agrees" in rules(verdict)


@pytest.mark.parametrize("name", ["0.7.0", "1.0.0", "2.0.0", "training-5.0"])
def test_a_log_elsewhere_does_not_choose_a_round(tmp_path: Path, name: str) -> None:
    verdict = check([hpc_package(tmp_path, change=naming(name))])
    assert verdict.rulesets == ("3.0.0",)
    assert "ruleset-agrees" in rules(verdict)
    assert "ruleset-assumed" in rules(verdict, "info")


@pytest.mark.parametrize("where", ["hpc_results_v3.0", "submissions"])
def test_required_keys_cannot_be_left_out_under_an_older_ruleset(tmp_path: Path, where: str) -> None:
    """Compliant once, as a package of v0.7."""

    def change(lines: Lines) -> Lines:
        return naming("0.7.0")(drop(*WITHOUT)(lines))

    assert {"key-missing", "ruleset-agrees"} <= rules(check([hpc_package(tmp_path / where, change=change)]))


@pytest.mark.parametrize("system", ["v0.7", "hpc_results_v0.7", "cluster_v1.0"])
@pytest.mark.parametrize("where", ["hpc_results_v3.0", "submissions"])
def test_the_name_of_a_system_chooses_no_ruleset(tmp_path: Path, system: str, where: str) -> None:
    folder = hpc_package(tmp_path / where, system=system, change=drop(*WITHOUT))
    for path in (folder.parent, folder, folder / "results", next(folder.rglob("result_0.txt"))):
        verdict = check([path])
        assert verdict.rulesets == ("3.0.0",), path
        assert "key-missing" in rules(verdict), path


def test_the_submitters_name_chooses_no_ruleset(tmp_path: Path) -> None:
    folder = hpc_package(tmp_path, change=drop(*WITHOUT))
    assert check([folder.rename(tmp_path / "v0.7")]).rulesets == ("3.0.0",)


@pytest.mark.parametrize("where", ["hpc_results_v3.0", "submissions"])
def test_a_time_stamp_chooses_no_ruleset(tmp_path: Path, where: str) -> None:
    verdict = check([hpc_package(tmp_path / where, start_ms=YEAR_2021_MS, change=drop(*WITHOUT))])
    assert verdict.rulesets == ("3.0.0",)
    assert "key-missing" in rules(verdict)


def test_a_folder_of_an_older_round_inside_a_submission_is_an_error(tmp_path: Path) -> None:
    folder = hpc_package(tmp_path / "hpc_results_v3.0" / "ACME" / "hpc_results_v0.7", change=drop(*WITHOUT))
    assert "round-agrees" in rules(check([tmp_path / "hpc_results_v3.0"]))
    assert "round-agrees" in rules(check([tmp_path / "hpc_results_v3.0" / "ACME"]))
    # Whoever checks it by its own path has chosen it.
    assert "round-agrees" not in rules(check([folder]))


def test_a_package_inside_a_package_has_no_round_of_its_own(tmp_path: Path) -> None:
    outer = hpc_package(tmp_path)
    hpc_package(outer / "v0.7", change=drop(*WITHOUT))
    assert "round-agrees" in rules(check([outer]))
    assert "round-agrees" in rules(check([tmp_path]))


def test_rounds_side_by_side_and_software_above_them_are_no_disagreement(tmp_path: Path) -> None:
    for name in ("hpc_results_v1.0", "hpc_results_v3.0"):
        hpc_package(tmp_path / "app" / "v2.0" / "rounds" / name, change=drop("staging_start", "staging_stop"))
    verdict = check([tmp_path / "app" / "v2.0" / "rounds"])
    assert verdict.rulesets == ("1.0.0", "3.0.0")
    assert "round-agrees" not in rules(verdict)


@pytest.mark.parametrize("name", ["hpc_results_v1.0", "v1.0", "mlperf-hpc-results-v1.0"])
def test_the_folder_above_a_package_gives_its_round(tmp_path: Path, name: str) -> None:
    folder = hpc_package(tmp_path / name, change=drop("staging_start", "staging_stop"))
    for path in (tmp_path, folder, folder / "results", next(folder.rglob("result_0.txt"))):
        verdict = check([path])
        assert verdict.rulesets == ("1.0.0",), path
        assert not rules(verdict, "info") & {"ruleset-assumed"}, path
    (scored,) = check([folder]).results
    assert scored.valid


@pytest.mark.parametrize(
    "name", ["app-v1.0", "cluster_v0.7", "results", "v1", "hpc_results_v1.0.zip", "hpc_results_v1.0-old"]
)
def test_other_folders_above_a_package_give_no_round(tmp_path: Path, name: str) -> None:
    verdict = check([hpc_package(tmp_path / name)])
    assert verdict.rulesets == ("3.0.0",)
    (note,) = (finding for finding in verdict.findings if finding.rule == "ruleset-assumed")
    assert note.severity == "info"
    assert "judged by 3.0.0, the newest round" in note.message


def test_a_round_without_a_ruleset_is_named_in_the_note(tmp_path: Path) -> None:
    verdict = check([hpc_package(tmp_path / "hpc_results_v4.0")])
    assert "no ruleset of round v4.0" in next(f.message for f in verdict.findings if f.rule == "ruleset-assumed")


def test_whoever_checks_may_choose(tmp_path: Path) -> None:
    folder = hpc_package(tmp_path / "hpc_results_v3.0", change=drop("staging_start", "staging_stop"))
    assert check([folder], "1.0.0").rulesets == ("1.0.0",)
    assert not rules(check([folder], "1.0.0")) & {"ruleset-agrees", "ruleset-assumed", "round-agrees"}


def test_our_logs_are_judged_by_the_ruleset_they_name_wherever_they_lie(tmp_path: Path) -> None:
    for path in (our_runs(tmp_path / "runs"), our_runs(tmp_path / "app-v1.0" / "runs")):
        verdict = check([path])
        assert verdict.rulesets == ("mlhpc-1.0",)
        assert verdict.compliant


@pytest.mark.parametrize("name", ["mlhpc-9.9", "0.7.0", "3.0.0", "x"])
def test_our_log_with_another_ruleset_is_an_error(tmp_path: Path, name: str) -> None:
    runs = results(tmp_path / "runs", 5, lambda n: edit("ruleset", value=name)(our_run(seed=n)))
    assert rules(check([runs])) & {"key-value", "ruleset-agrees"}


def test_a_log_that_was_cut_before_it_names_its_ruleset_does_not_decide(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs")
    whole = (runs / "result_0.txt").read_bytes()
    (runs / "result_0.txt").write_bytes(whole[: whole.index(b'"key": "ruleset"') - 200])
    assert check([runs]).rulesets == ("mlhpc-1.0",)


def test_folders_of_logs_are_judged_each_by_its_own(tmp_path: Path) -> None:
    our_runs(tmp_path / "a")
    results(tmp_path / "b", 10, lambda n: hpc_run(seed=n + 1, start_ms=YEAR_2021_MS + n * 10**6, epoch_s=5 + 0.01 * n))
    verdict = check([tmp_path])
    assert verdict.rulesets == ("3.0.0", "mlhpc-1.0")
    assert verdict.compliant, verdict.findings
