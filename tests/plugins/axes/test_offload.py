"""`mlhpc plan --offload`: the break-even of a published machine, closed forms, and one line for what cannot be said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlhpc.plugins.axes.offload import Rates, predict_offload
from mlhpc.plugins.axes.predict import Cost
from mlhpc.plugins.axes.step_time import Estimate
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import ExpertLayer
from tests.fixtures.cli import mlhpc


def ceilings(folder: Path, *roofs: dict[str, Any]) -> Path:
    file = folder / "ceilings.json"
    device = {"type": "cuda", "name": "GH200"}
    head = {"version": 1, "kind": "ceilings", "system": "GH200", "date": "2026-11-29T00:00:00Z", "ranks": 1, "nodes": 1}
    file.write_text(json.dumps(head | {"device": device, "roofs": [{"n": 1} | roof for roof in roofs]}))
    return file


def roof(resource: str, name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"resource": resource, "name": name, "value": value, "unit": "B/s"} | more


COMPUTE = roof("compute", "gemm", 989e12, unit="FLOP/s", dtype="bfloat16")
LINK = roof("host_link", "host_to_device", 450e9), roof("host_link", "device_to_host", 450e9)


def test_the_published_ratio_of_a_gh200_comes_out_of_its_two_rates(tmp_path: Path) -> None:
    """Megatron-LM issue 6491: T_gemm / T_load = M * 450 / 989e3 for M tokens."""
    file = ceilings(tmp_path, COMPUTE, *LINK)
    words = (
        "plan",
        "moe_lm",
        "--size",
        "mini",
        "--set",
        "precision=bfloat16",
        "--ceilings",
        str(file),
        "--offload",
        "host",
    )
    done = mlhpc(*words, "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["offload"]
    assert found["break_even_tokens"]["value"] * 450 / 989e3 == pytest.approx(1, rel=0.01)
    layer = found["layers"][0]
    assert layer["layer"]["tokens"] == 8 * 128 * 2 / 8  # of a batch, by top-k, over the experts
    text = mlhpc(*words).stdout
    assert "blocks.1.ffn" in text
    assert found["verdict"] in text


def rates(load: float = 100.0, store: float = 1e9, flops: float = 1000.0) -> Rates:
    spans = (Estimate(value, value, value) for value in (flops, load, store))
    return Rates("host", *spans, weight_bytes=4, source="made up")


def cost(layers: int, tokens: float, flops: float) -> Cost:
    experts = tuple(ExpertLayer(f"layer {n}", 2, 10, tokens) for n in range(layers))
    held = layers * 20 * 4
    return Cost(
        "", "data=1", 1, 1, held, held, 0, 2 * held, 0, held, 0, 0, 0, flops, 0.0, (), experts=experts
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("load", [1.0, 1000.0])
def test_the_wait_is_what_loading_takes_beyond_computing(load: float, parts: int) -> None:
    layers, flops = 4, 2400.0 * parts
    found = predict_offload(rates(load), cost(layers, 10, flops), parts)
    forward, weights = 2400.0 / 3 / layers / 1000.0, 2 * 10 * 4 / load
    exposed = layers * (max(0.0, weights - forward) + max(0.0, weights - 2 * forward)) + min(weights, forward)
    assert found.update_s == pytest.approx(layers * 4 * weights)  # a weight, a gradient and two moments
    assert found.wait_s == pytest.approx(parts * exposed + found.update_s)
    assert found.compute_s == pytest.approx(flops / 1000.0)
    assert 0 < found.wait_share < 1


def test_measured_steps_replace_rates_and_waits() -> None:
    idle = [([0.1, 0.3], [0.2, 0.6], 9.0), ([0.1, 0.1], [0.2, 0.2], 9.0), ([0.5, 0.5], [1.0, 1.0], 9.0)]
    computing = [([0.0, 0.1], [0.3, 0.0], 0.7), ([0.0, 0.3], [0.1, 0.0], 0.5), ([0.0, 0.2], [0.2, 0.0], 0.6)]
    found = predict_offload(rates(), cost(2, 10, 2400.0), 3).use_waits(idle, computing, 3)
    held = 2 * 2 * 10
    assert asdict(found.rates.load) == pytest.approx(
        {"low": held * 4 / 1.0, "value": held * 4 / 0.4, "high": held * 4 / 0.2}
    )
    assert found.rates.store.value == pytest.approx(held * 4 / 0.8)
    assert [each.wait_s for each in found.layers] == pytest.approx([0.2, 0.2])
    assert found.update_s == pytest.approx(0.6)
    assert found.wait_s == pytest.approx(3 * (0.2 + 0.2) + 0.6)


def test_a_cache_that_holds_all_has_a_rate_too() -> None:
    nothing = ([0.0, 0.0], [0.0, 0.0], 0.0)
    found = predict_offload(rates(), cost(2, 10, 2400.0), 1).use_waits([nothing], [nothing], 1)
    assert found.wait_s == 0
    assert found.verdict.startswith("pays")


@pytest.mark.parametrize(("tokens", "word"), [(10, "does not pay"), (19.5, "may pay"), (1e3, "pays")])
def test_the_verdict_is_the_break_even_s(tokens: float, word: str) -> None:
    made = rates()
    around = Rates("host", made.flops, Estimate(99, 100, 105), made.store, 4, "made up")
    assert around.break_even_tokens.value == pytest.approx(4 * 1000 / (2 * 100))
    assert predict_offload(around, cost(2, tokens, 1e3), 1).verdict.startswith(word)


def test_slow_writes_of_gradients_need_more_tokens() -> None:
    assert rates(store=10.0).break_even_tokens.value == pytest.approx(4 * 1000 / (4 * 10))


def test_nothing_to_move_is_one_line() -> None:
    with pytest.raises(InputError, match="has none"):
        predict_offload(rates(), cost(0, 1, 1.0), 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--offload", "host"), "--ceilings ceilings.json"),
        (("--offload", "host", "--ceilings", "FILE"), "--offload file"),
        (("--offload", "file", "--ceilings", "FILE"), "no storage_read cold"),
        (("--offload", "host", "--ceilings", "FILE", "--sweep", "--ranks", "2"), "--mesh in place of --sweep"),
        (("--offload", "host", "--ceilings", "FILE", "--measure"), "give --offload file"),
        (("--offload", "file", "--ceilings", "DISK", "--measure"), "hyperparameters.moe.offload.tier=file"),
    ],
)
def test_what_cannot_be_said_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    disk = (roof("storage_read", "/", 1e9, mode="cold"), roof("storage_write", "/", 1e9)) if "DISK" in words else ()
    file = ceilings(tmp_path, COMPUTE, *disk)
    done = mlhpc(
        "plan",
        "moe_lm",
        "--size",
        "mini",
        "--set",
        "precision=bfloat16",
        *(str(file) if word in ("FILE", "DISK") else word for word in words),
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
