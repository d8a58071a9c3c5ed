"""What the checker exchanges: texts of rules, JSON with its schema, waivers, reference points, files for CI systems."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from jsonschema import ValidationError, validate

from mlhpc.suite.compliance.all_rules import RULES
from mlhpc.suite.compliance.check import Verdict, check
from mlhpc.suite.compliance.exchange import figures_of_merit
from mlhpc.suite.compliance.exchange.review_files import add_waivers, read_reference_points, read_waivers
from mlhpc.suite.compliance.output import explain_rule, read_rule_texts, render_json, render_junit, render_rules_page
from mlhpc.suite.compliance.rules.base import OURS, RULES_PAGE, Finding, Waiver
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.errors import InputError
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import edit, hpc_run, write
from tests.fixtures.package_mutations import example, strong

ROOT = Path(__file__).resolve().parents[3]

# Rules and their texts


def test_texts_of_rules_are_sentences() -> None:
    assert read_rule_texts().keys() <= RULES.keys()
    for rule, text in read_rule_texts().items():
        assert text.why.endswith("."), rule
        assert text.mend.endswith("."), rule


def test_every_severity_and_every_text_is_of_a_rule() -> None:
    for name in list_rulesets():
        assert read_ruleset(name).data.severity.keys() <= RULES.keys(), "a severity of no rule"


def test_the_page_has_a_place_for_every_finding_to_link_to() -> None:
    headings = re.findall(r"^### (.*)$", render_rules_page(), re.MULTILINE)
    assert sorted(headings) == sorted(RULES)


def test_a_rule_is_explained_with_source_severities_thresholds_and_how_to_mend() -> None:
    text = explain_rule("init-limit")
    assert "source: training_rules.adoc 11 (Run Results)" in text
    assert "init minutes in 0.7.0, " in text
    assert ": closed 30 minutes, open 240 minutes" in text
    assert "to mend: " in text
    assert "published rules: " in text
    assert "why: " in explain_rule("clock-jump")
    assert RULES["clock-jump"].source == OURS
    assert "cosmoflow 10, deepcam 5" in explain_rule("run-count")
    assert "rcp confidence in mlhpc-1.0: one-sided t test at 0.999" in explain_rule("rcp-speed")


def test_the_command_lists_and_explains_rules() -> None:
    listed = mlhpc("check", "--list-rules").stdout
    assert all(re.search(rf"^  {rule} ", listed, re.MULTILINE) for rule in RULES)
    assert mlhpc("check", "--explain", "seed-distinct").stdout.startswith("seed-distinct (the runs of a result)")
    unknown = mlhpc("check", "--explain", "seeds")
    assert unknown.returncode == 2
    assert "unknown rule 'seeds'; mlhpc check --list-rules prints all" in unknown.stderr


# A verdict for machines


def spoilt(tmp_path: Path) -> Path:
    """A package with errors, warnings and a name that is not UTF-8."""
    package = example(tmp_path)
    log = strong(package) / "result_1.txt"
    log.write_bytes(log.read_bytes().replace(b'"seed", "value": 2', b'"seed", "value": 1') + b":::MLLOG {x\n")
    Path(os.fsdecode(bytes(strong(package)) + b"/note\xff <&>.md")).write_text("")
    return package


def test_json_is_what_the_schema_says(tmp_path: Path) -> None:
    verdict = check([spoilt(tmp_path)])
    document = json.loads(render_json(verdict))
    assert document["compliant"] is False
    assert {item["help"] for item in document["findings"]} == {f"{RULES_PAGE}#{item.rule}" for item in verdict.findings}
    named = [item for item in document["findings"] if "\udcff" not in item["file"]]
    schema = json.loads((Path(figures_of_merit.__file__).parent / "verdict.schema.json").read_text())
    validate(document | {"findings": named}, schema)
    for broken in ({"version": 2}, {"compliant": None}, {"more": 1}, {"findings": [{"rule": "x"}]}):
        with pytest.raises(ValidationError):
            validate(document | {"findings": named} | broken, schema)


def test_each_error_links_to_its_rule(tmp_path: Path) -> None:
    verdict = check([spoilt(tmp_path)])
    text = render_junit(verdict)
    for finding in verdict.counted("error"):
        assert f"({RULES_PAGE}#{finding.rule})" in text


# What fails, and what is waived


def test_fail_on_warning(tmp_path: Path) -> None:
    package = example(tmp_path)
    system = min((package / "systems").glob("*.json"))
    fine = mlhpc("check", package, "--fail-on", "warning")
    warned = bool(check([package]).counted("warning"))
    assert fine.returncode == warned
    system.write_text(json.dumps(json.loads(system.read_text()) | {"cooling": ""}))
    (package / "manifest.sha256").unlink()
    verdict = check([package], "3.0.0")
    assert verdict.counted("warning")
    arguments = ("check", package, "--ruleset", "3.0.0")
    assert mlhpc(*arguments, "--fail-on", "warning").returncode == 1
    assert mlhpc(*arguments).returncode == (0 if verdict.compliant else 1)


def waiver_file(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"waivers": list(entries)}))
    return path


ENTRY = {"rule": "seed-distinct", "path": "result_1.txt", "reason": "a test", "who": "the chair"}


def test_a_waived_error_is_shown_with_reason_and_name_and_does_not_count(tmp_path: Path) -> None:
    package = example(tmp_path / "a")
    log = strong(package) / "result_1.txt"
    log.write_bytes(log.read_bytes().replace(b'"seed", "value": 2', b'"seed", "value": 1'))
    bare = check([package])
    rules = {finding.rule for finding in bare.counted("error")}
    assert "seed-distinct" in rules
    entries = [
        {**ENTRY, "rule": rule, "path": "ACME*" if rule == "run-count" else "*"} for rule in rules - {"seed-distinct"}
    ]
    given = waiver_file(tmp_path / "waivers.yaml", ENTRY, *entries)
    done = mlhpc("check", package, "--waive", given)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^waived .*seed-distinct .*\[waived by the chair: a test\]$", done.stdout, re.MULTILINE)
    assert re.search(r"^compliant: .*findings? waived", done.stdout, re.MULTILINE)
    document = json.loads(mlhpc("check", package, "--waive", given, "--format", "json").stdout)
    assert document["compliant"] is True
    assert {"reason": "a test", "who": "the chair"} in [item["waived"] for item in document["findings"]]
    junit = ElementTree.fromstring(mlhpc("check", package, "--waive", given, "--format", "junit").stdout)
    assert junit.get("failures") == "0"


FOUND = Finding("rcp-speed", "error", "/x/ACME/results/bed/strong/cosmoflow", None, "too fast")


@pytest.mark.parametrize(
    ("rule", "path", "covers"),
    [
        ("rcp-speed", "cosmoflow", True),
        ("rcp-speed", "strong/cosmoflow", True),
        ("rcp-speed", "ACME/results/*/strong/cosmo*", True),
        ("rcp-speed", "/x/ACME/results/bed/strong/cosmoflow", True),
        ("rcp-speed", "*", True),
        ("rcp-speed", "weak/cosmoflow", False),
        ("rcp-speed", "osmoflow", False),
        ("rcp-speed", "ACME/results", False),
        ("rcp-speed", "ACME/*", False),
        ("rcp-speed", "/y/x/ACME/results/bed/strong/cosmoflow", False),
        ("rcp-slower", "cosmoflow", False),
    ],
)
def test_a_waiver_covers_one_rule_at_one_place(rule: str, path: str, covers: bool) -> None:
    verdict = Verdict(("3.0.0",), 1, 1, (FOUND,))
    waived = add_waivers(verdict, (Waiver(rule, path, "why", "who"),))
    assert waived.compliant is covers
    assert [finding.rule for finding in waived.counted("info")] == ([] if covers else ["waiver-unused"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rule": "seeds"}, "unknown rule 'seeds'"),
        ({"path": ""}, "path"),
        ({"reason": " "}, "reason"),
        ({"who": ""}, "who"),
        ({"until": "2027"}, "unknown key"),
        ({"who": None}, "who"),
    ],
)
def test_a_waiver_without_reason_or_name_is_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_waivers(waiver_file(tmp_path / "w.yaml", ENTRY | entry), [])


def test_a_package_cannot_bring_its_own_waivers(tmp_path: Path) -> None:
    package = example(tmp_path)
    given = waiver_file(package / "waivers.yaml", ENTRY)
    done = mlhpc("check", package, "--waive", given)
    assert done.returncode == 2
    assert "so its submitter may have written it" in done.stderr
    (tmp_path / "link.yaml").symlink_to(given)
    assert mlhpc("check", package, "--waive", tmp_path / "link.yaml").returncode == 2


# Reference points from a file


def runs(folder: Path, batch: int, epochs: int) -> Path:
    for number in range(5):
        lines = edit("global_batch_size", value=batch)(
            hpc_run("deepcam", epochs=epochs + number % 2, seed=number + 1, start_ms=1_600_000_000_000 + number * 10**8)
        )
        write(folder / f"result_{number}.txt", lines)
    return folder


def official(path: Path, batch: int, epochs: list[int]) -> Path:
    path.write_text(json.dumps({"deepcam_ref": {"Benchmark": "deepcam", "BS": batch, "Epochs to converge": epochs}}))
    return path


def group_rules(folder: Path, path: Path | None) -> set[str]:
    given = read_reference_points(path) if path else None
    verdict = check([folder], "3.0.0", given)
    return {finding.rule for finding in verdict.findings if finding.rule.startswith("rcp")}


def test_reference_points_from_a_file_are_used_and_named(tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", batch=4096, epochs=8)
    assert group_rules(folder, None) == {"rcp-above"}
    honest = official(tmp_path / "same.json", 4096, [8] * 5 + [9] * 5)
    assert "rcp-above" not in group_rules(folder, honest)
    assert "rcp-given" in group_rules(folder, honest)
    assert "rcp-speed" in group_rules(folder, official(tmp_path / "slow.json", 4096, [40] * 5 + [41] * 5))
    assert "rcp-above" in group_rules(folder, official(tmp_path / "few.json", 4096, [8] * 9))
    assert group_rules(folder, official(tmp_path / "below.json", 3000, [8] * 10)) == {"rcp-above", "rcp-given"}
    between = group_rules(folder, official(tmp_path / "above.json", 8192, [8] * 10))  # interpolated
    assert "rcp-given" in between
    assert "rcp-above" not in between


def test_reference_points_of_the_ruleset_are_never_replaced(tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", batch=1024, epochs=3)
    assert "rcp-speed" in group_rules(folder, None)
    assert group_rules(folder, official(tmp_path / "fast.json", 1024, [3] * 20)) == group_rules(folder, None)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"a": 1}', '{"a": {"Benchmark": "deepcam", "BS": 0, "Epochs to converge": [1]}}',
     '{"a": {"Benchmark": "deepcam", "BS": 1, "Epochs to converge": [NaN]}}',
     '{"a": {"Benchmark": "deepcam", "BS": 1, "Epochs to converge": []}}',
     '{"a": {"Benchmark": 3, "BS": 1, "Epochs to converge": [1]}}', '{"points": []}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_holds_no_reference_points_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rcp.json"
    path.write_text(content)
    done = mlhpc("check", tmp_path, "--rcp", path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mlhpc: {path}: ")
    assert done.stderr.count("\n") == 1


def test_our_own_reference_files_are_read() -> None:
    path = next((ROOT / "workloads" / "cosmoflow" / "rcp").glob("smoke.json"))
    given = read_reference_points(path)
    assert {(name, size) for name, size, _ in given.points} == {("cosmoflow", "smoke")}


# Files for CI systems


def steps(path: Path) -> list[str]:
    """The shell commands of a workflow file that call mlhpc."""
    data = yaml.safe_load(path.read_text())
    lines: list[str] = []

    def visit(node: object) -> None:
        if isinstance(node, dict):
            lines.extend(node["run"].splitlines() if isinstance(node.get("run"), str) else ())
            lines.extend(node["script"] if isinstance(node.get("script"), list) else ())
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(data)
    return [line for line in lines if line.startswith("mlhpc ")]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_the_workflow_files_run(tmp_path: Path, name: str) -> None:
    package = example(tmp_path / "submissions")
    commands = steps(ROOT / "docs" / "ci" / name)
    assert commands
    environment = {**os.environ, "PACKAGES": str(package), "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    for damage, code in ((None, 0), ("bad", 1)):
        if damage:
            (strong(package) / "result_0.txt").write_text("")
        for command in commands:
            done = subprocess.run(
                ["bash", "-e", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == (0 if "|| test" in command else code), done.stdout + done.stderr
    for written in tmp_path.glob("mlhpc*"):
        assert ElementTree.fromstring(written.read_text()) is not None


def test_the_hook_for_pre_commit_names_a_command_that_exists() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    words = shlex.split(hook["entry"])
    assert words[:2] == ["mlhpc", "check"]
    assert mlhpc(*words[1:], "--help").returncode == 0
    for path, taken in (
        ("ACME/results/bed/strong/x/result_0.txt", True),
        ("systems/bed.json", True),
        ("README.md", False),
    ):
        assert bool(re.search(hook["files"], path)) is taken


def test_a_batch_of_4000_digits_in_a_file_of_points_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rcp.json"
    entry = '{"a": {"Benchmark": "cosmoflow", "BS": %s, "Epochs to converge": [1, 2, 3]}}'
    path.write_text(entry % ("9" * 4000))
    with pytest.raises(InputError) as caught:
        read_reference_points(path)
    assert len(str(caught.value)) < 400 + len(str(path))
    path.write_text(entry % "64")
    assert read_reference_points(path).points == {("cosmoflow", None, 64): (1.0, 2.0, 3.0)}
