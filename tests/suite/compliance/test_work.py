"""The work of a sample is computed anew from the settings that a package keeps, where the run had the code that is installed."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.workload import Work, load_workload
from tests.fixtures.reproduction import left_by_run, package_of

OURS = load_descriptor("cosmoflow")
FIELDS = [name for name in Work.__dataclass_fields__ if name != "all_reduce_bytes_per_step"]  # which parameters decide
TOKEN = ":::MLLOG "


def work(precision: str) -> dict[str, Any]:
    config = load_config(OURS, "smoke", [f"precision={precision}"])
    return asdict(load_workload(OURS)(config).work()) | {"sample_bytes": OURS.card().size("smoke").sample_bytes}


def problems(folder: Path, stated: dict[str, Any], *, same: bool) -> list[str]:
    """What rule statements-agree says of the work, or the precision, of a package whose runs state this work."""
    files = {
        f"workloads/cosmoflow/{name}": hashlib.sha256((OURS.folder / name).read_bytes()).hexdigest()
        for name in ("card.yaml", "model.py")
    }
    run = left_by_run(folder / "run", files=files if same else files | {"workloads/cosmoflow/model.py": "c" * 64})
    simple = OURS.card().size("smoke").baselines
    assert simple is not None
    due: dict[str, dict[str, Any]] = {
        "work_per_sample": {"value": stated},
        "baseline": {"value": simple.metrics(), "metadata": {"oracle": simple.metrics(oracle=True)}},
    }
    for path in run.glob("result_*.txt"):
        events = [json.loads(line.partition(TOKEN)[2]) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{TOKEN}{json.dumps(each | due.get(each['key'], {}))}\n" for each in events))
    found = check([package_of(run, folder)]).findings
    texts = [item.message for item in found if item.rule == "statements-agree" and item.severity == "error"]
    return [text for text in texts if text.startswith(("work_per_sample", "precision"))]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ["", *FIELDS])
def test_the_work_is_that_of_the_code_and_the_settings(tmp_path: Path, name: str) -> None:
    stated = work("float32")
    due = dict(stated)
    if name:
        stated[name] = stated[name] * 1.01 + 1
    found = problems(tmp_path, stated, same=True)
    assert [text.partition(":")[0] for text in found] == [f"work_per_sample.{name}"] * 5 * bool(name)
    assert not name or f"{due[name]!r} by the card and code" in found[0]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(
    ("precision", "factor"), [("float32", 1), ("bfloat16", 1), ("float32", 1.01), ("bfloat16", 1.01)]
)
def test_other_code_has_other_work_but_not_that_of_another_precision(
    tmp_path: Path, precision: str, factor: float, same: bool
) -> None:
    stated = {key: value * (factor if key == "forward_bytes" else 1) for key, value in work(precision).items()}
    found = problems(tmp_path, stated, same=same)
    assert bool(found) == (precision != "float32" if factor == 1 else same)
