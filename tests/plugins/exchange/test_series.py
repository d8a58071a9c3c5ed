"""Events of runs for MLflow, TensorBoard and Prometheus: every number of the log once, and no name of a stranger's gets far."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mlhpc.plugins.exchange.series import RunSeries, convert_to_safe_name, read_series
from mlhpc.suite.log.mllog import EVAL_ERROR
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, edit, insert, our_run, our_runs, write

FORMS = ("tensorboard", "prometheus")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return our_runs(tmp_path / "runs", 3)


def only(path: Path) -> RunSeries:
    (run,) = read_series([path])
    return run


def events(path: Path, key: str) -> list[dict[str, object]]:
    found = (json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines())
    return [event for event in found if event["key"] == key]


def test_the_series_have_every_value_of_the_log(runs: Path) -> None:
    log = runs / "result_0.txt"
    run = only(log)
    points = run.series[EVAL_ERROR]
    assert [(point.value, point.time_ms) for point in points] == [
        (event["value"], event["time_ms"]) for event in events(log, EVAL_ERROR)
    ]
    assert [point.step for point in points] == [1, 2, 3, 4, 5]
    assert len(run.series["train/samples_per_second"]) == len(events(log, "tracked_stats"))
    assert len(run.series["step_phase_seconds/data_wait"]) == len(events(log, "step_phases"))


HOSTILE = (
    "../../../etc/passwd",
    "/etc/passwd",
    "a/b/../../c",
    "..",
    ".",
    "",
    "a\nb",
    "x" * 5000,
    "\0",
    "ü—ß",
    "-rf",
    ".hidden",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_clean_name_is_one_part_of_a_path(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", convert_to_safe_name(name))


@pytest.mark.parametrize("form", ["mlflow", "tensorboard"])
def test_names_in_a_log_lead_nowhere(tmp_path: Path, form: str) -> None:
    pytest.importorskip(form)
    lines = our_run()
    for name in HOSTILE:
        lines = insert(Line("tracked_stats", {name: 1.0}, lines[-1].time_ms, {"epoch_num": 1}), "run_stop")(lines)
        lines = insert(Line(name or "empty", "x", lines[0].time_ms), "run_start")(lines)
    lines = edit("submission_benchmark", value="../../../evil")(lines)
    write(tmp_path / "in" / "result_0.txt", lines)
    before = set(tmp_path.rglob("*"))
    done = export(form, tmp_path / "in", "-o", tmp_path / "out" / "here")
    assert done.returncode == 0, done.stderr
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in new)
    assert all(path.is_relative_to(tmp_path / "out" / "here") for path in new if path.is_file())


def export(form: str, *words: object) -> CompletedProcess[str]:
    return mlhpc("report", *words, "--form", form)


def test_tensorboard_reads_every_point(runs: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    assert export("tensorboard", runs, "-o", tmp_path / "board").returncode == 0
    for name in ("result_0", "result_1", "result_2"):
        found = accumulator.EventAccumulator(str(tmp_path / "board" / "runs" / name)).Reload()
        run = only(runs / f"{name}.txt")
        assert set(found.Tags()["tensors"]) == run.series.keys()
        for key, points in run.series.items():
            events = [
                (each.step, each.wall_time, tensor_util.make_ndarray(each.tensor_proto)) for each in found.Tensors(key)
            ]
            assert events == [
                (point.step, point.time_ms / 1e3, pytest.approx(point.value, rel=1e-6)) for point in points
            ]


def test_mlflow_reads_every_point(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert export("mlflow", runs, "-o", tmp_path / "store").returncode == 0
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("cosmoflow-smoke")
    by_name = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert by_name.keys() == {f"runs/result_{number}" for number in range(3)}
    for name, found in by_name.items():
        run = only(runs.parent / f"{name}.txt")
        assert found.info.status == "FINISHED"
        assert found.data.params["global_batch_size"].isdigit()
        assert found.data.metrics.keys() == run.series.keys()
        history = client.get_metric_history(found.info.run_id, EVAL_ERROR)
        assert [(each.step, each.timestamp, each.value) for each in history] == list(run.series[EVAL_ERROR])
    again = export("mlflow", runs, "-o", tmp_path / "store")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "was exported before" in again.stderr


def test_a_run_is_exported_once(runs: Path, tmp_path: Path) -> None:
    words = (runs, "-o", tmp_path / "board")
    assert export("tensorboard", *words).returncode == 0
    files = {path: path.read_bytes() for path in (tmp_path / "board").rglob("*") if path.is_file()}
    again = export("tensorboard", *words)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "exists already" in again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "board").rglob("*") if path.is_file()} == files


def samples(text: str) -> dict[tuple[str, str], float]:
    """What Prometheus' own parser reads: the value by metric and run."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(text)
    return {(each.name, each.labels["run"]): each.value for family in families for each in family.samples}


def test_prometheus_has_the_last_values_of_each_run(runs: Path, tmp_path: Path) -> None:
    text = export("prometheus", runs).stdout
    found = samples(text)
    for number in range(3):
        run = only(runs / f"result_{number}.txt")
        last = run.series[EVAL_ERROR][-1].value
        assert found["mlhpc_run_eval_error", f"runs/result_{number}"] == last
        assert found["mlhpc_run_target_reached", f"runs/result_{number}"] == 1.0
        assert found["mlhpc_run_time_to_train_seconds", f"runs/result_{number}"] == run.record.time_to_train_s
    assert export("prometheus", runs, "-o", tmp_path / "runs.prom").returncode == 0
    assert samples((tmp_path / "runs.prom").read_text()) == found


def test_labels_are_escaped(tmp_path: Path) -> None:
    write(tmp_path / "result_0.txt", edit("submission_platform", value='a"b\\c\nd{}')(our_run()))
    text = export("prometheus", tmp_path).stdout
    assert r'system="a\"b\\c?d{}"' in text
    assert samples(text)


BAD = (
    {"value": "no number"},
    {"value": None},
    {"value": [1]},
    {"value": {"a": {}}},
    {"value": float("1e999") if False else 1e308},
    {"metadata": {"epoch_num": "x"}},
    {"metadata": {"epoch_num": -4}},
    {"metadata": {"epoch_num": 1e300}},
    {"time_ms": -1e18},
    {"time_ms": 1e300},
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["eval_error", "tracked_stats", "step_phases"])
def test_damaged_events_cost_only_themselves(tmp_path: Path, form: str, key: str) -> None:
    for index, changes in enumerate(BAD):
        write(tmp_path / "in" / f"result_{index}.txt", edit(key, 0, **changes)(our_run(seed=index + 1)))
    (tmp_path / "in" / "result_90.txt").write_bytes(b"\xff\xfe\x00 nothing")
    (tmp_path / "in" / "result_91.txt").write_bytes(b"")
    done = export(form, tmp_path / "in", "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_without_logs_is_one_line(tmp_path: Path, form: str) -> None:
    done = export(form, tmp_path, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()
