"""Events of runs for MLflow, TensorBoard and Prometheus: every number of the log once, and no name of a stranger's gets far."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest
import yaml

from suite.log.export.series import RunSeries, clean, read_series
from suite.log.mllog import EVAL_ERROR
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, edit, insert, our_run, our_runs, write

FORMS = ("mlflow", "tensorboard", "prometheus")


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
    assert [point.step for point in points] == [1, 2, 3]
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
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", clean(name))


@pytest.mark.parametrize("form", ["mlflow", "tensorboard"])
def test_names_in_a_log_lead_nowhere(tmp_path: Path, form: str) -> None:
    lines = our_run()
    for name in HOSTILE:
        lines = insert(Line("tracked_stats", {name: 1.0}, lines[-1].time_ms, {"epoch_num": 1}), "run_stop")(lines)
        lines = insert(Line(name or "empty", "x", lines[0].time_ms), "run_start")(lines)
    lines = edit("submission_benchmark", value="../../../evil")(lines)
    write(tmp_path / "in" / "result_0.txt", lines)
    before = set(tmp_path.rglob("*"))
    done = mlhpc("export", form, tmp_path / "in", "-o", tmp_path / "out" / "here")
    assert done.returncode == 0, done.stderr
    new = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in new)
    assert all(path.is_relative_to(tmp_path / "out" / "here") for path in new if path.is_file())


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protobuf message, read by the rules of its encoding."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            yield field, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield field, message[place : place + size]
        place += size


def records(content: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file, their checksums compared."""

    def masked(data: bytes) -> int:
        crc = google_crc32c.value(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    place = 0
    while place < len(content):
        head = content[place : place + 8]
        (size,) = struct.unpack("<Q", head)
        assert struct.unpack("<I", content[place + 8 : place + 12])[0] == masked(head)
        body = content[place + 12 : place + 12 + size]
        assert struct.unpack("<I", content[place + 12 + size : place + 16 + size])[0] == masked(body)
        yield body
        place += 16 + size


def test_a_tensorboard_file_has_every_point(runs: Path, tmp_path: Path) -> None:
    assert mlhpc("export", "tensorboard", runs, "-o", tmp_path / "board").returncode == 0
    files = sorted((tmp_path / "board").rglob("events.out.tfevents.*"))
    assert len(files) == 3
    first, *rest = records(files[0].read_bytes())
    assert dict(fields(first))[3] == b"brain.Event:2"
    found: dict[str, list[tuple[int, float]]] = {}
    for message in rest:
        event = dict(fields(message))
        value = dict(fields(dict(fields(event[5]))[1]))  # type: ignore[arg-type]
        assert isinstance(value[1], bytes)
        assert isinstance(value[2], bytes)
        found.setdefault(value[1].decode(), []).append((int(event[2]), struct.unpack("<f", value[2])[0]))  # type: ignore[arg-type]
    run = only(runs / "result_0.txt")
    assert found.keys() == run.series.keys()
    for name, points in run.series.items():
        assert found[name] == [(point.step, pytest.approx(point.value, rel=1e-6)) for point in points]


def test_a_file_store_has_a_run_for_each_log(runs: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert mlhpc("export", "mlflow", runs, "-o", store).returncode == 0
    (experiment,) = store.iterdir()
    assert yaml.safe_load((experiment / "meta.yaml").read_text())["name"] == "cosmoflow-smoke"
    folders = [path for path in experiment.iterdir() if path.is_dir()]
    assert len(folders) == 3
    for folder in folders:
        meta = yaml.safe_load((folder / "meta.yaml").read_text())
        assert (meta["run_id"], meta["status"], meta["user_id"]) == (folder.name, 3, "")
        points = [line.split() for line in (folder / "metrics" / EVAL_ERROR).read_text().splitlines()]
        assert [int(step) for _, _, step in points] == [1, 2, 3]
        assert (folder / "params" / "global_batch_size").read_text().isdigit()


def test_a_run_is_exported_once(runs: Path, tmp_path: Path) -> None:
    for form in ("mlflow", "tensorboard"):
        words = ("export", form, runs, "-o", tmp_path / form)
        assert mlhpc(*words).returncode == 0
        files = {path: path.read_bytes() for path in (tmp_path / form).rglob("*") if path.is_file()}
        again = mlhpc(*words)
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert "exists already" in again.stderr
        assert {path: path.read_bytes() for path in (tmp_path / form).rglob("*") if path.is_file()} == files


SAMPLE = re.compile(r'(mlhpc_run_[a-z0-9_A-Z]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.e+-]+)')


def test_prometheus_text_has_the_last_values_by_metric(runs: Path) -> None:
    text = mlhpc("export", "prometheus", runs).stdout
    assert text.endswith("\n")
    metric, seen = "", []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            metric = line.split()[2]
            seen.append(metric)
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {metric} gauge"
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == metric, "samples of a metric stand together"
    assert len(seen) == len(set(seen))
    last = only(runs / "result_2.txt").series[EVAL_ERROR][-1].value
    assert f'run="runs/result_2"}} {last!r}' in text


def test_labels_are_escaped(tmp_path: Path) -> None:
    write(tmp_path / "result_0.txt", edit("submission_platform", value='a"b\\c\nd{}')(our_run()))
    text = mlhpc("export", "prometheus", tmp_path).stdout
    assert r'system="a\"b\\c?d{}"' in text
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


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
    done = mlhpc("export", form, tmp_path / "in", "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_without_logs_is_one_line(tmp_path: Path, form: str) -> None:
    done = mlhpc("export", form, tmp_path, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()
