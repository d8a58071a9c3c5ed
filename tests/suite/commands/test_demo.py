"""`mlhpc demo`: whatever fails, the rest goes on, the report is made, and every failure is named there and at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlhpc.suite.commands.demo import BATCHES, STEPS, StepResult, _execute, add_outcome, demo
from mlhpc.suite.machine.probes.processor import VARIABLE
from tests.fixtures.zoo import machine


class Steps:
    """Steps that leave what the real ones leave, with the exit codes that a test gives; ``ran`` are the command lines."""

    def __init__(self, root: Path, codes: Mapping[str, int]) -> None:
        self.root, self.codes = root, codes
        self.ran: list[list[str]] = []

    def __call__(self, command: list[str], limit_s: float | None) -> tuple[int, str]:
        words = command[command.index("mlhpc") + 1 :]
        self.ran.append(words)
        code = self.codes.get(words[0], 0)
        if words[0] in {"run", "package", "ceilings", "report"} and (code == 0 or (words[0], code) == ("run", 1)):
            target = Path(words[words.index("-o") + 1])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir(exist_ok=True) if words[0] != "ceilings" else target.write_text("{}")
        return code, f"{words[0]} went wrong" if code else ""

    def command(self, name: str) -> list[str]:
        return next(words for words in self.ran if words[0] == name)


def follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: Mapping[str, int], *words: str
) -> tuple[Result, Steps]:
    steps = Steps(tmp_path / "out", codes)
    monkeypatch.setattr("mlhpc.suite.commands.demo._execute", steps)
    done = CliRunner().invoke(demo, [*words, "--size", "smoke", "-o", str(steps.root)])
    return done, steps


def test_a_demo_without_failures_ends_with_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, steps = follow(tmp_path, monkeypatch, {})
    assert (done.exit_code, "failed:" in done.output) == (0, False)
    package = str(steps.root / "submissions" / "demo")
    report = [package, "-o", str(steps.root / "report"), str(steps.root / STEPS)]
    assert steps.command("report") == ["report", *report]
    assert all(step["reason"] == "" for step in json.loads((steps.root / STEPS).read_text())["steps"])


@pytest.mark.parametrize("code", [1, 2, 70, -9, 124])
@pytest.mark.parametrize("name", ["check", "score", "ceilings"])
def test_a_side_step_that_fails_is_named_and_the_rest_goes_on(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, steps = follow(tmp_path, monkeypatch, {name: code}, "cosmoflow")
    assert done.exit_code == 1
    assert [words[0] for words in steps.ran] == ["data", "run", "package", "check", "score", "ceilings", "report"]
    (line,) = [line for line in done.output.splitlines() if line.startswith("  failed:")]
    said = "stopped after 2 min" if (name, code) == ("ceilings", 124) else f"{name} went wrong"
    assert line == f"  failed: `mlhpc {name}` ({name}): {said}"
    reasons = {step["title"]: step["reason"] for step in json.loads((steps.root / STEPS).read_text())["steps"]}
    assert [title for title, reason in reasons.items() if reason] == [name]
    assert ("ceilings.json" in " ".join(steps.command("report"))) == (name != "ceilings")


def test_without_a_package_the_report_is_made_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, steps = follow(tmp_path, monkeypatch, {"run": 1, "package": 2})
    assert done.exit_code == 1
    for name in ("check", "score", "report"):
        assert steps.command(name)[1:3] == [str(steps.root / f"run-{name}") for name in BATCHES]
    assert done.output.count("  failed:") == 4


def test_two_results_differ_in_one_setting_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = follow(tmp_path, monkeypatch, {})
    assert [words[0] for words in steps.ran] == ["data", "run", "run", "package", "package", "check", "score", "report"]
    one, other = ([*words] for words in steps.ran if words[0] == "run")
    differing = [pair for pair in zip(one, other, strict=True) if len(set(pair)) == 2]
    folders = tuple(str(steps.root / f"run-{name}") for name in BATCHES)
    assert differing == [folders, tuple(BATCHES.values())]
    assert [words[words.index("--system") + 1] for words in steps.ran if "--system" in words] == [*BATCHES]


def test_one_workload_that_fails_leaves_the_others_their_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path / "out", {})
    monkeypatch.setattr(
        "mlhpc.suite.commands.demo._execute",
        lambda command, limit_s: (2, "no data") if "deepcam" in command else steps(command, limit_s),
    )
    done = CliRunner().invoke(demo, ["all", "--size", "smoke", "--runs", "1", "-o", str(steps.root)])
    assert done.exit_code == 1
    assert str(steps.root / "run-deepcam") not in steps.command("package")
    assert str(steps.root / "run-cosmoflow") in steps.command("package")
    assert steps.command("report")


def test_a_demo_without_any_run_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, steps = follow(tmp_path, monkeypatch, {"data": 1, "run": 2}, "cosmoflow")
    assert done.exit_code == 1
    assert [words[0] for words in steps.ran] == ["data", "run", "ceilings"]
    assert "failed: `mlhpc report` (report): left out: no earlier step left what it reads" in done.output


def test_an_interrupt_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, steps = follow(tmp_path, monkeypatch, {"run": 130})
    assert (done.exit_code, [words[0] for words in steps.ran]) == (130, ["data", "run"])


def test_the_last_line_of_an_error_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out'); print('first', file=sys.stderr); print('mlhpc: no room', file=sys.stderr); sys.exit(3)"
    assert _execute([sys.executable, "-c", program], None) == (3, "no room")
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out\n", "first\nmlhpc: no room\n")
    assert _execute([sys.executable, "-c", "pass"], 60.0) == (0, "")


@pytest.mark.parametrize("accepted", [True, False])
def test_a_run_that_missed_its_target_fails_the_demo_only_if_the_checker_refuses(accepted: bool) -> None:
    ran = StepResult("runs", "mlhpc run", 1, 1.0, "run 3 missed its target")
    judged = StepResult("check", "mlhpc check", 0 if accepted else 1, 1.0, "" if accepted else "NOT compliant")
    failed = [each.command for each in add_outcome(add_outcome([], ran), judged) if each.reason]
    assert failed == ([] if accepted else ["mlhpc run", "mlhpc check"])


def test_a_step_that_hangs_is_stopped() -> None:
    assert _execute([sys.executable, "-c", "import time; time.sleep(3600)"], 0.5)[0] == 124


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["xeon_300mib_vm", "epyc_9684x_1152mib", "container_cgroup_v1"])
def test_the_whole_demo_on_machines_that_are_not_here(name: str, tmp_path: Path) -> None:
    """They have what made it fail once: caches that are no power of two, very large ones, none that are described."""
    root = machine(name).lay_out(tmp_path / "machine")
    environment = os.environ | {VARIABLE: str(root), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "demo", "moe_lm", "--size", "smoke", "--runs", "1", "-o", "out"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert "Traceback" not in done.stdout + done.stderr
    failed = [line.split("`")[1] for line in done.stdout.splitlines() if line.startswith("  failed:")]
    assert failed == ["mlhpc check", "mlhpc score"], done.stdout + done.stderr  # one run is too few for a score
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "step &#39;score&#39; (mlhpc score)" in page
    assert "simulated machine" in page
    ceilings = json.loads((tmp_path / "out" / "ceilings.json").read_text())
    assert ceilings["simulated"]
    assert ceilings["duration_s"] <= 60
    assert {roof["name"] for roof in ceilings["roofs"]} >= {"gemm"}
