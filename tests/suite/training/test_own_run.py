"""`mlhpc.Run` without an example: what its log holds, what it refuses, and that the checker finds what an own loop did wrong."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import mlhpc
from mlhpc.suite.compliance.check import check
from mlhpc.suite.descriptor import use_cards
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import Log, read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.training.devices import InterruptedTrialError
from tests.fixtures.cli import mlhpc as command
from tests.fixtures.warm import warm_python

SIZE = {
    **{"description": "tests", "metric": "eval_accuracy", "metric_name": "accuracy", "threshold": 0.9, "direction": "max"},
    **{"required_runs": 3, "train_samples": 40, "eval_samples": 7, "model_parameters": 6, "sample_bytes": 8},
    **{"forward_flops_per_sample": 12.0, "training_flops_per_sample": 36.0},
}  # fmt: skip
STEPS = 4


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return write_card(tmp_path / "card.yaml")


def write_card(path: Path, **changes: Any) -> Path:
    head = {
        "version": 1,
        "workload": "own",
        "mlperf_name": "own",
        "title": "Own",
        "domain": "tests",
        "reference": "none",
    }
    path.write_text(yaml.safe_dump(head | {"sizes": {"smoke": SIZE | changes}}))
    return path


def make_run(
    card: Path, *, hyperparameters: Any = None, samples: Path | str | None = None, **changes: Any
) -> mlhpc.Run:
    """A run in the folder ``runs`` beside the card; data are the card itself."""
    trial, seed = changes.pop("trial", None), changes.pop("seed", None)
    config = {"size": "smoke", "global_batch_size": 10, "max_epochs": 5, "hyperparameters": hyperparameters or {}}
    return mlhpc.Run(card, config | changes, data=samples or card, output=card.parent / "runs", trial=trial, seed=seed)


def train(run: mlhpc.Run, values: Iterable[float], *, steps: int = STEPS, losses: bool = True, rows: int = 40) -> None:
    """An own loop that trains nothing and evaluates to these values."""
    run.start(parameters=6, train_samples=rows, eval_samples=7)
    for value in values:
        run.epoch()
        for step in range(steps):
            time.sleep(0.001)
            run.step(1.0 / (step + 1) if losses else None)
        if run.evaluation(value):
            break


def run_once(card: Path, values: Iterable[float] = (0.5, 0.95), **options: Any) -> Log:
    own = {name: options.pop(name) for name in ("steps", "losses", "rows") if name in options}
    with make_run(card, **options) as run:
        train(run, values, **own)
    return read_events(RunFolder(run.folder).result(run.trial))


def rules_of(card: Path) -> dict[str, str]:
    """The rules that find something in the runs beside the card, with their severity; not that they are few, nor their company."""
    with use_cards([card]):
        found = {finding.rule: finding.severity for finding in check([card.parent / "runs"]).findings}
    return {
        rule: severity for rule, severity in found.items() if rule not in ("run-count", "rcp-missing", "other-work")
    }


def values(log: Log, key: str) -> list[Any]:
    return [event.value for event in log.events if event.key == key]


def test_three_runs_of_an_own_loop_are_a_score_without_an_error(card: Path) -> None:
    logs = [run_once(card, (0.5 + trial / 100, 0.95 + trial / 100)) for trial in range(3)]  # equal ones would be copies
    assert rules_of(card) == {}
    done = command("score", card.parent / "runs", "--card", card)
    assert done.returncode == 0, done.stdout
    assert len({values(log, "seed")[0] for log in logs}) == 3
    assert [values(log, "run_mode") for log in logs] == [["strong"]] * 3
    folder = RunFolder(card.parent / "runs")
    assert [folder.exit_code(trial).read_text() for trial in range(3)] == ["0\n"] * 3
    assert folder.card_path.read_bytes() == card.read_bytes()
    assert not folder.lock(0).exists()
    assert command("status", folder.root, "--card", card).stdout.count("finished") == 3


def test_the_log_states_the_loop_the_data_and_the_hyperparameters(card: Path) -> None:
    log = run_once(card, hyperparameters={"opt_name": "sgd", "opt_base_learning_rate": 0.5}, precision="bfloat16")
    config = next(event for event in log.events if event.key == "run_config")
    assert config.metadata["loop"] == "own"
    assert config.value["precision"] == "bfloat16"
    assert not {"loader_threads", "compile", "checkpoint", "staging"} & config.value.keys()
    line = f"{hashlib.sha256(card.read_bytes()).hexdigest()}  card.yaml\n"
    assert values(log, "data_manifest") == [hashlib.sha256(line.encode()).hexdigest()]
    assert values(log, "opt_base_learning_rate") == [0.5]
    assert values(log, "work_per_sample") == []
    assert [len(nodes) for nodes in values(log, "other_work")] == [1]


class Counted:
    """A clock that goes on only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_the_phases_are_those_of_the_loop(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, computing and updating take different times, and each is found where it belongs."""
    clock = Counted()
    monkeypatch.setattr("mlhpc.suite.training.records.make_device_clock", lambda device: clock)
    model = nn.Linear(5, 1)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            clock.now += 0.001
            super().step()

    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on torch calls hooks for the step of SGD too
    optimizer = Slow(model.parameters(), lr=0.1)

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            clock.now += 0.002
            yield torch.ones(10, 5)

    with make_run(card, window_steps=3) as run:
        run.start(model, optimizer, train_samples=40, eval_samples=7)
        run.epoch()
        for x in run.batches(loader()):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            clock.now += 0.006
            optimizer.step()
            clock.now += 0.004
            run.step(loss)
        clock.now += 5.0  # the evaluation
        time.sleep(0.2)
        assert run.evaluation(0.95)
    log = read_events(RunFolder(run.folder).result(0))
    windows = [event for event in log.events if event.key == "step_phases"]
    assert [(each.metadata["first_step"], each.metadata["steps"]) for each in windows] == [(0, 3), (3, 1)]
    assert all(isinstance(each.metadata["loss"], float) for each in windows)
    (total,) = values(log, "rank_phases")
    expected = {"data_wait": 0.002, "forward_backward": 0.006, "optimizer": 0.001, "other": 0.004, "step": 0.013}
    assert {name: total[name] for name in expected} == pytest.approx({n: STEPS * s for n, s in expected.items()})
    (stop,) = (event for event in log.events if event.key == "eval_stop")
    late = STEPS * 0.013 + 0.001  # the device ends its last step so much later, and times are whole milliseconds
    assert stop.metadata["duration_s"] >= 0.2 - late
    assert not optimizer._optimizer_step_pre_hooks, "hooks of a run end with it"


HONEST: dict[str, dict[str, Any]] = {
    "no loss": {"losses": False},
    "not measured": {"instrumentation": False},
    "not measured, no loss": {"instrumentation": False, "losses": False},
    "a window a step": {"window_steps": 1},
    "windows that end with the epoch": {"window_steps": STEPS},
    "a last batch that is not full": {"global_batch_size": 12, "steps": 4},
    "a last batch that is left out": {"global_batch_size": 12, "steps": 3},
    "accumulated gradients": {"gradient_accumulation_steps": 2},
    "target in the first epoch": {"values": (0.99,)},
    "target in the last epoch": {"values": (0.1, 0.2, 0.3, 0.4, 0.9)},
    "a stated checksum": {"samples": hashlib.sha256(b"data").hexdigest()},
    "a watchdog": {"watchdog": {"silence_s": 600.0}},
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", HONEST)
def test_an_honest_loop_is_found_honest(case: str, card: Path) -> None:
    log = run_once(card, **HONEST[case])
    found = rules_of(card)
    assert found == ({"data-verified": "warning"} if case == "a stated checksum" else {})
    assert not log.problems
    times = [event.time_ms for event in log.events]
    assert times == sorted(times)


class LateDevice:
    """The clock of a device that ends its work a while after the host has issued it, as a GPU does."""

    LATE_S = 0.3

    def __init__(self) -> None:
        self._first = True

    def stamp(self) -> float:
        late, self._first = (0.0 if self._first else self.LATE_S), False
        return time.perf_counter() + late

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_an_evaluation_begins_when_the_device_has_done_the_last_step(
    card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LateDevice()
    monkeypatch.setattr("mlhpc.suite.training.records.make_device_clock", lambda device: clock)
    with make_run(card) as run:
        run.start(parameters=6, train_samples=40, eval_samples=7)
        clock._first = True  # the block begins when the device is idle
        run.epoch()
        for _ in range(STEPS):
            run.step(1.0)
        time.sleep(0.5)
        assert run.evaluation(0.95)
    log = read_events(RunFolder(run.folder).result(0))
    times = {event.key: event.time_ms for event in log.events}
    (rate,) = values(log, "tracked_stats")
    assert times["eval_start"] - times["epoch_start"] >= 299
    assert times["eval_stop"] - times["eval_start"] >= 199
    assert rate["throughput"] <= 40 / 0.3
    assert rules_of(card) == {}


def test_blocks_of_steps_are_counted_as_the_card_says(tmp_path: Path) -> None:
    card = write_card(tmp_path / "card.yaml", eval_every_steps=3)
    log = run_once(card, (0.1, 0.2, 0.95), steps=3)
    assert [e.metadata["epoch_num"] for e in log.events if e.key == "epoch_start"] == [30, 60, 90]
    assert rules_of(card) == {}


def test_a_metric_in_per_cent_is_said_to_be_one(card: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once(card, (95.0,))
    said = capsys.readouterr()
    assert "the metric seems to be in per cent, and the target is a share" in said.out + said.err
    run_once(card, (1.0, 0.5))
    assert "per cent" not in capsys.readouterr().out


def test_staging_is_logged_before_the_run_and_does_not_count(card: Path) -> None:
    with make_run(card) as run:
        with run.staging():
            time.sleep(0.05)
        train(run, [0.95])
    log = read_events(RunFolder(run.folder).result(0))
    keys = [event.key for event in log.events]
    assert keys.index("staging_start") < keys.index("staging_stop") < keys.index("init_stop") < keys.index("run_start")
    assert rules_of(card) == {}
    record = summarise_log(log)
    assert record.time_with_staging_s is not None
    assert record.time_to_train_s is not None
    assert record.time_with_staging_s - record.time_to_train_s >= 0.049


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few steps": ({"steps": 3}, "samples-agree"),
    "too many steps": ({"steps": 5}, "samples-agree"),
    "fewer samples than the card": ({"rows": 30, "steps": 3}, "key-value"),
    "the target is missed": ({"values": (0.1, 0.2)}, "target-missed"),
    "an accuracy above 1": ({"values": (1.5,)}, "target-missed"),
    "an accuracy that is no number": ({"values": (math.nan,)}, "run-aborted"),
    "a placeholder": ({"submission": {"org": "PLACEHOLDER"}}, "placeholder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_loop_that_does_wrong_is_found(case: str, card: Path) -> None:
    options, rule = WRONG[case]
    run_once(card, **options)
    assert rule in rules_of(card)


def edited(log: Path, old: str, new: str) -> None:
    text = log.read_text()
    assert old in text
    log.write_text(text.replace(old, new, 1))


FORGED = {
    "a last batch of the harness's loop": ('"loop": "own", ', "", "samples-agree"),
    "more samples than were trained on": ('"samples_count": 40', '"samples_count": 480', "samples-agree"),
    "a better value": ('"value": 0.95', '"value": 0.96', "metric-agrees"),
    "another batch size": ('"global_batch_size": 12', '"global_batch_size": 10', "config-agrees"),
    "another model": ('"key": "model_parameters", "value": 6', '"key": "model_parameters", "value": 7', "key-value"),
    "a resumed run": ('"first_block": 1', '"first_block": 2', "resumed"),
    "no data": ('"key": "data_manifest"', '"key": "data_manifesto"', "key-missing"),
    "a simulated machine": ('"simulated_machine": false', '"simulated_machine": true', "config-agrees"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_log_of_an_own_loop_is_found(case: str, card: Path) -> None:
    run_once(card, (0.95,), global_batch_size=12, steps=4)
    assert rules_of(card) == {}
    old, new, rule = FORGED[case]
    edited(card.parent / "runs" / "result_0.txt", old, new)
    assert rule in rules_of(card)


def stop_of(card: Path, trial: int = 0) -> dict[str, Any]:
    log = read_events(card.parent / "runs" / f"result_{trial}.txt")
    return dict(next(event.metadata for event in log.events if event.key == "run_stop"))


def test_an_error_in_the_loop_ends_the_log_as_aborted_and_reaches_the_caller(card: Path) -> None:
    with pytest.raises(ZeroDivisionError), make_run(card) as run:
        train(run, (0.1 / number for number in (2, 1, 0)))
    assert stop_of(card)["status"] == "aborted"
    assert stop_of(card)["reason"].startswith("ZeroDivisionError: ")
    assert RunFolder(run.folder).exit_code(0).read_text() == "1\n"
    assert "run-aborted" in rules_of(card)
    assert run_once(card).events, "the folder and its lock are free again"


def test_an_error_before_the_run_begins_leaves_no_run(card: Path) -> None:
    with pytest.raises(InputError, match="model has 7 parameters, the card says 6"), make_run(card) as run:
        run.start(parameters=7, train_samples=40, eval_samples=7)
    log = read_events(RunFolder(run.folder).result(0))
    assert not values(log, "run_start")
    assert not values(log, "run_stop")


def test_sigterm_ends_the_log_and_the_programs_own_handler_stays(card: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL

    def values_until_the_signal() -> Iterator[float]:
        yield 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with pytest.raises(InterruptedTrialError), make_run(card) as run:
        train(run, values_until_the_signal())
    assert stop_of(card)["reason"] == "InterruptedTrialError: stopped by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_loop_that_ends_too_early_or_exits_says_so(card: Path) -> None:
    run_once(card, (0.1,))
    assert stop_of(card)["reason"] == "the loop ended before the target was reached"
    with pytest.raises(SystemExit), make_run(card) as run:
        train(run, (sys.exit(0) for _ in range(1)))
    assert stop_of(card, 1)["status"] == "aborted"


def test_the_run_ends_at_the_target_and_no_step_comes_after(card: Path) -> None:
    with make_run(card) as run:
        train(run, [0.95])
        assert (run.over, run.reached) == (True, True)
        time.sleep(0.05)
        for call in (run.epoch, run.step, lambda: run.evaluation(0.99), lambda: list(run.batches([1]))):
            with pytest.raises(InputError, match="the run is over"):
                call()
    keys = [event.key for event in read_events(RunFolder(run.folder).result(0)).events]
    assert keys[-2:] == ["run_stop", "goodput"]


def test_calls_out_of_order_are_refused_with_the_order(card: Path) -> None:
    with make_run(card) as run:
        for call in (run.epoch, run.step, lambda: run.evaluation(0.1)):
            with pytest.raises(InputError, match=r"call run\.start\(\) first"):
                call()
        run.start(parameters=6, train_samples=40, eval_samples=7)
        with pytest.raises(InputError, match="has begun already"):
            run.start(parameters=6, train_samples=40, eval_samples=7)
        for call in (run.step, lambda: run.evaluation(0.1)):
            with pytest.raises(InputError, match=r"call run\.epoch\(\)"):
                call()
        run.epoch()
        with pytest.raises(InputError, match=r"ended without a step; call run\.step"):
            run.evaluation(0.1)
    with pytest.raises(InputError, match="has been used for a run"), run:
        pass


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key of the harness's loop": ({"loader_threads": 4}, "key 'loader_threads' steers only the loop of mlhpc run"),
    "staging of the harness's loop": (
        {"staging": {"directory": "/tmp"}},
        "key 'staging' steers only the loop of mlhpc run",
    ),
    "an unknown key": ({"epochs": 4}, "unknown key 'epochs'"),
    "an unknown size": ({"size": "huge"}, "unknown size 'huge'; sizes: smoke"),
    "no batch": ({"global_batch_size": 0}, "global_batch_size = 0"),
    "an event as hyperparameter": ({"hyperparameters": {"eval_accuracy": 0.99}}, "the log has an event of this name"),
    "the seed as hyperparameter": ({"hyperparameters": {"seed": 1}}, "the log has an event of this name"),
    "the end as hyperparameter": ({"hyperparameters": {"run_stop": 1}}, "the log has an event of this name"),
    "another workload": ({"workload": "cosmoflow"}, "workload is 'cosmoflow'; expected 'own'"),
    "data that are not there": ({"samples": "nowhere"}, "nowhere: no data found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_run_is_refused_before_a_log_is_made(case: str, card: Path) -> None:
    options, expected = REFUSED[case]
    with pytest.raises(InputError, match=expected.replace("(", r"\(")), make_run(card, **options):
        pass
    assert not list(card.parent.glob("runs/result_*.txt"))
    assert not list(card.parent.glob("runs/*.lock"))


def test_a_run_without_with_and_an_argument_that_is_no_number_are_named(card: Path) -> None:
    bare = make_run(card)
    for call in (lambda: bare.start(parameters=6, train_samples=40, eval_samples=7), bare.epoch, lambda: bare.seed):
        with pytest.raises(InputError, match="is used with `with`"):
            call()
    assert not hasattr(bare, "nonsense")
    with make_run(card) as run:
        run.start(parameters=6, train_samples=40, eval_samples=7)
        run.epoch()
        with pytest.raises(InputError, match=r"loss has the shape \(3,\)"):
            run.step(torch.ones(3))
        run.step(torch.ones(1))
        with pytest.raises(InputError, match=r"value has the shape \(2,\); expected one number"):
            run.evaluation(torch.ones(2))
        with pytest.raises(InputError, match="recall is str"):
            run.evaluation(0.5, recall="high")


def test_what_the_checker_would_refuse_is_said_when_the_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, expected in (("adamw", 1), ("sgd", 0)):
        (tmp_path / name).mkdir()
        card = write_card(tmp_path / name / "card.yaml", constraints={"opt_name": {"one_of": ["sgd"]}})
        with make_run(card, hyperparameters={"opt_name": name}, submission={"org": "ACME"}):
            told = capsys.readouterr().out
        assert told.count("run 0: note: the checker would refuse this result: opt_name = 'adamw'") == expected
        assert told.count("would refuse") == expected


def test_a_card_that_is_not_there_is_drafted_and_the_next_run_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own_task.yaml"
    (tmp_path / "data").write_text("data")

    def run(**hyperparameters: Any) -> mlhpc.Run:
        made = make_run(path, samples=tmp_path / "data", hyperparameters=hyperparameters)
        with made:
            train(made, (0.5, 0.7, 0.6, 0.8, 0.75))
        return made

    assert run(opt_name="sgd").over
    assert "drafted from this run" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    drafted = yaml.safe_load(path.read_text())
    size = drafted["sizes"]["smoke"]
    assert (drafted["workload"], size["metric"], size["direction"], size["threshold"]) == (
        "own_task",
        "eval_accuracy",
        "max",
        0.8,
    )
    assert (size["train_samples"], size["eval_samples"], size["model_parameters"]) == (40, 7, 6)
    assert size["constraints"]["opt_name"] == {"one_of": ["sgd"]}
    assert run(opt_name="sgd").reached
    loaded = mlhpc.load(tmp_path / "runs")
    assert loaded.to_pandas()["benchmark"].tolist() == ["own_task"]
    assert loaded.runs["target"].tolist() == [0.8]
    with pytest.raises(InputError, match="did you mean 'own_task.yaml'"):
        make_run(tmp_path / "own_tusk.yaml")


def test_an_unknown_benchmark_and_a_config_that_is_none_are_refused(card: Path) -> None:
    with pytest.raises(InputError, match="unknown workload 'nobody'"):
        mlhpc.Run("nobody", {}, data=card)
    with pytest.raises(InputError, match="expected a dict or the path"):
        mlhpc.Run(card, "smoke", data=card)


def test_runs_of_another_configuration_card_or_trial_never_share_a_folder(card: Path, tmp_path: Path) -> None:
    run_once(card)
    with pytest.raises(InputError, match="global_batch_size = 10, not 20"), make_run(card, global_batch_size=20):
        pass
    with pytest.raises(InputError, match="exists already"), make_run(card, trial=0):
        pass
    write_card(card, threshold=0.5)
    with pytest.raises(InputError, match="holds runs for the card .* not 0.5"), make_run(card):
        pass
    assert len(list(card.parent.glob("runs/result_*.txt"))) == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(InputError, match=r"has files but no run\.json"),
        mlhpc.Run(
            card, {"size": "smoke", "global_batch_size": 10, "max_epochs": 5}, data=card, output=tmp_path / "full"
        ),
    ):
        pass
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_the_same_trial_is_not_run_twice_at_once(card: Path) -> None:
    with make_run(card, trial=0), pytest.raises(InputError, match="in use by"), make_run(card, trial=0):
        pass


def test_an_installed_benchmark_can_be_run_by_an_own_loop(tmp_path: Path) -> None:
    """Its card judges the run as it judges the harness's own."""
    data = tmp_path / "data"
    data.write_bytes(b"universes")
    config = {"size": "smoke", "global_batch_size": 500, "max_epochs": 2}
    with mlhpc.Run("cosmoflow", config, data=data, output=tmp_path / "run") as run:
        run.start(parameters=59612, train_samples=2000, eval_samples=1000)
        run.epoch()
        for _ in range(6):
            run.step()
        assert run.evaluation(0.3)
    found = {finding.rule: finding.message for finding in check([tmp_path / "run"]).findings}
    assert "opt_name" in found.pop("key-missing"), "the card asks for hyperparameters that this loop did not state"
    assert "run-count" in found


def test_a_folder_of_data_has_the_checksum_that_sha256sum_says(tmp_path: Path) -> None:
    from mlhpc.suite.data.manifest import compute_fingerprint
    from mlhpc.suite.world import World

    root = tmp_path / "data"
    for name in ("b/2", "a", "b/10", "é", "B"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 1000)
    words = r"find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    said = subprocess.run(["bash", "-c", words], cwd=root, capture_output=True, text=True, check=True).stdout
    digest, read = compute_fingerprint(root, World.create())
    assert digest == said.split()[0]
    assert (read.files, read.bytes) == (5, sum(path.stat().st_size for path in root.rglob("*") if path.is_file()))
    (root / "a").write_bytes(b"changed")
    assert compute_fingerprint(root, World.create())[0] != digest


RANKS = """
import sys
import time
import mlhpc
card, folder, *cases = sys.argv[1:]
config = {"size": "smoke", "global_batch_size": 10, "max_epochs": 5}
for case in cases:
    with mlhpc.Run(card, config, data=card, output=folder) as run:
        run.start(parameters=6, train_samples=40, eval_samples=7)
        if case == "apart" and run.rank == 0:
            time.sleep(1)  # as to save something
        run.epoch()
        for step in range(4):
            if case == "apart" and run.rank == 1 and step == 3:
                time.sleep(1)
            run.step(float(run.rank))
        if case == "fails" and run.rank == 1:
            raise RuntimeError("a fault of rank 1")
        run.evaluation({"first": 0.95 if run.rank == 0 else None, "apart": 0.95}.get(case, 0.95 - 0.2 * run.rank))
"""


def on_two_ranks(card: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    words = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *warm_python(), "-c", RANKS]
    folder = str(card.parent / "runs")
    return subprocess.run([*words, str(card), folder, *cases], capture_output=True, text=True, timeout=300)


def test_two_ranks_write_one_log_and_must_agree_on_the_value(card: Path) -> None:
    done = on_two_ranks(card, "first", "differ")
    assert done.returncode != 0
    log = read_events(card.parent / "runs" / "result_0.txt")
    assert values(log, "number_of_ranks") == [2]
    (window,) = [event.metadata["loss"] for event in log.events if event.key == "step_phases"]
    assert window == 0.5, "the mean over ranks"
    assert "rank 0 gives 0.95, rank 1 0.75" in stop_of(card, 1)["reason"]
    (card.parent / "runs" / "result_1.txt").unlink()
    assert rules_of(card) == {}


def test_ranks_that_begin_or_end_an_epoch_apart_are_in_one_epoch(card: Path) -> None:
    """The steps of rank 1 outlasted the epoch, which the checker takes for a wrong log."""
    done = on_two_ranks(card, "apart")
    assert done.returncode == 0, done.stderr
    assert rules_of(card) == {}
    log = read_events(card.parent / "runs" / "result_0.txt")
    (stats,) = values(log, "rank_stats")
    assert stats["step_s"]["min"] < 1.0, "nobody waits for rank 0 in a step"
    assert stats["step_s"]["max"] >= 1.0
    times = {event.key: event.time_ms for event in log.events}
    assert times["eval_start"] - times["epoch_start"] >= 1000


def test_an_error_of_one_rank_ends_all_ranks(card: Path) -> None:
    done = on_two_ranks(card, "fails")
    assert done.returncode != 0
    assert "a fault of rank 1" in done.stderr
    log = read_events(card.parent / "runs" / "result_0.txt")
    assert values(log, "run_start")
    assert not values(log, "target_accuracy_reached")


def test_a_value_beside_the_target_has_the_digits_that_tell_them_apart(
    card: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.9000 (target 0.9) was printed of a run that went on, and the checker said "best 0.9; the target is >= 0.9"."""
    run_once(card, values=(0.899961, 0.8999997))
    (first, second) = (line for line in capfd.readouterr().out.splitlines() if "(target 0.9)" in line)
    assert "epoch 1: accuracy 0.89996 (target 0.9)" in first
    assert "epoch 2: accuracy 0.8999997 (target 0.9)" in second
    done = command("check", str(card.parent / "runs"), "--card", str(card), "--format", "text")
    assert "best eval_accuracy is 0.8999997; the target is eval_accuracy >= 0.9" in done.stdout


NO_COUNTS = {"model_parameters": 0, "forward_flops_per_sample": 0, "training_flops_per_sample": 0, "sample_bytes": 0}


def train_model(run: mlhpc.Run, model: nn.Module | None = None, sample: tuple[int, ...] = (5,)) -> None:
    """A linear layer with 6 parameters on 40 samples, or another model."""
    torch.manual_seed(0)
    model = model or nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.start(model, optimizer, train_samples=40, eval_samples=7)
    for value in (0.5, 0.95):
        run.epoch()
        for batch in run.batches([torch.randn(10, *sample)] * 4):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
        if run.evaluation(value):
            break


def test_a_card_without_counts_gets_the_lines_to_paste_and_its_folder_is_used_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card, data = write_card(tmp_path / "card.yaml", **NO_COUNTS), tmp_path / "data"
    data.write_bytes(bytes(47 * 8))
    with (
        pytest.raises(InputError, match="field model_parameters is 0; put the lines above"),
        make_run(card, samples=data) as run,
    ):
        train_model(run)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("    ")]
    counted = {line.split(":")[0].strip(): float(line.split(":")[1]) for line in lines}
    # Forward a product of 5 multiply-adds a sample; backward as much again, for the weights only.
    assert counted == {
        **{"model_parameters": 6, "forward_flops_per_sample": 10, "training_flops_per_sample": 20, "sample_bytes": 8}
    }
    write_card(card, **counted | {"model_parameters": 6, "sample_bytes": 8})
    with make_run(card, samples=data) as run:
        train_model(run)
    assert run.reached
    assert run.trial == 0
    assert len(RunFolder(run.folder).failed()) == 1
    assert capfd.readouterr().out.count("counted here") == 0


def test_flops_alone_are_counted_while_the_run_goes_on(card: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_card(card, training_flops_per_sample=0)
    with make_run(card) as run:
        train_model(run)
    assert run.reached
    assert "    training_flops_per_sample: 20\n" in capfd.readouterr().out


def test_a_grouped_convolution_counts_its_own_channels_alone(card: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Depthwise, 64 channels of 8 x 8: torch's FlopCounterMode counts the weight gradient 64 times."""
    write_card(card, model_parameters=64 * 9, training_flops_per_sample=0)
    with make_run(card) as run:
        train_model(run, nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), (64, 8, 8))
    forward = 2 * 64 * 9 * 8 * 8
    assert f"    training_flops_per_sample: {2 * forward}\n" in capfd.readouterr().out, "nothing asks for the input's"


def test_a_framework_without_a_model_gets_the_parameters_it_stated(
    card: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_card(card, model_parameters=0)
    with pytest.raises(InputError, match="put the lines above"), make_run(card) as run:
        train(run, (0.95,))
    assert "    model_parameters: 6\n" in capfd.readouterr().out


def test_a_folder_in_which_nothing_began_takes_another_card_and_program(card: Path) -> None:
    with pytest.raises(InputError, match="model has 7 parameters"), make_run(card) as run:
        run.start(parameters=7, train_samples=40, eval_samples=7)
    write_card(card, model_parameters=7, threshold=0.8)
    with make_run(card, max_epochs=3) as run:
        run.start(parameters=7, train_samples=40, eval_samples=7)
        run.epoch()
        [run.step() for _ in range(STEPS)]
        run.evaluation(0.85)
    assert run.trial == 0
    folder = RunFolder(run.folder)
    assert folder.card_path.read_bytes() == card.read_bytes()
    assert [path.name for path in folder.failed()] == ["failed_0_1.txt"]
    write_card(card, model_parameters=7, threshold=0.7)
    with pytest.raises(InputError) as caught, make_run(card, max_epochs=3):
        pass
    kept = f"holds runs for the card {folder.card_path}, which differs from {card} (threshold = 0.8, not 0.7); "
    assert kept in str(caught.value)


def test_status_knows_the_target_of_an_own_loop_without_being_given_its_card(card: Path) -> None:
    run_once(card)
    (row,) = [line for line in command("status", card.parent / "runs").stdout.splitlines() if "finished" in line]
    assert " 0.9 " in row
