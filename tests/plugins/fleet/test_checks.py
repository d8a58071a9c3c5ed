"""Wrong results are found: every flipped bit above the bound, in products, sums and files; healthy ones never."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.plugins.fleet.benches import Bench, judge_check
from mlhpc.plugins.fleet.checks import (
    check_product,
    compute_product_bound,
    make_convolution_check,
    make_product_check,
    make_repeat_check,
    make_storage_check,
    make_sum_check,
)
from mlhpc.plugins.fleet.samples import group_by_metric
from mlhpc.plugins.fleet.slow_nodes import judge, merge_verdicts
from mlhpc.suite.machine.facts import Sample, Severity, render_samples
from tests.fixtures.cli import mlhpc

CPU = torch.device("cpu")
ORDER = 96


def flip(value: Tensor, chance: random.Random, bit: int | None = None) -> float:
    """Flip one bit of one element. Returns by how much the value changes."""
    flat = value.view(-1)
    place, bit = chance.randrange(flat.numel()), chance.randrange(32) if bit is None else bit
    before = float(flat[place])
    flat.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return abs(float(flat[place]) - before)


def test_healthy_results_raise_no_alarm() -> None:
    checks = [
        make_product_check(ORDER, CPU, 0),
        make_convolution_check(CPU, 0),
        make_repeat_check(ORDER, CPU, 0),
        make_sum_check(0, 1, CPU, lambda values: None),
    ]
    assert all(check() <= 1.0 for check in checks for _ in range(40))


def test_every_flip_in_an_exact_product_is_found() -> None:
    chance = random.Random()

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        c = torch.mm(a, b)
        while flip(c, chance) == 0.0:  # the sign of a zero
            pass
        return c

    check = make_product_check(ORDER, CPU, chance.randrange(1000), multiply)
    for _ in range(30):
        assert check() > 1.0
        check()  # of normal data, where not every bit is above the bound


def test_a_low_bit_of_a_zero_is_not_lost_in_a_sum() -> None:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        c = torch.mm(a, b)
        c[3, 4] = 0.0
        flip(c[3, 4:5], random.Random(), bit=0)
        return c

    one, other = torch.eye(ORDER), torch.zeros(ORDER, ORDER)
    other[0, 0] = 8.0
    assert check_product(multiply, one, other, 0.0) > 1.0


def test_every_flip_above_the_bound_in_a_product_of_normal_data_is_found() -> None:
    chance, seen = random.Random(), 0
    while seen < 100:
        a, b = torch.randn(ORDER, ORDER), torch.randn(ORDER, ORDER)
        bound, changed = compute_product_bound(a, b), []

        def multiply(a: Tensor, b: Tensor, changed: list[float] = changed) -> Tensor:
            c = torch.mm(a, b)
            changed.append(flip(c, chance))
            return c

        error = check_product(multiply, a, b, bound)
        if not changed[0] <= 2 * bound:  # also what is no number
            seen += 1
            assert error > 1.0


def test_a_flip_in_a_convolution_is_found() -> None:
    chance = random.Random()

    def convolve(*inputs: Tensor, **options: int) -> Tensor:
        found = F.conv2d(*inputs, **options)
        while flip(found, chance) <= 0.5:
            pass
        return found

    check = make_convolution_check(CPU, 0, convolve)
    assert all(check() > 1.0 for _ in range(20))


def test_a_flip_in_a_sum_over_ranks_is_found() -> None:
    chance = random.Random()

    def reduce(values: Tensor) -> None:
        while flip(values, chance) == 0.0:
            pass

    check = make_sum_check(0, 1, CPU, reduce)
    assert all(check() > 1.0 for _ in range(100))


def test_a_flip_in_a_file_is_found(tmp_path: Path) -> None:
    def read(path: Path) -> bytes:
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        return bytes(content)

    assert all(make_storage_check(tmp_path / "f", read)() > 1.0 for _ in range(20))
    assert make_storage_check(tmp_path / "f")() == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_product_that_does_not_repeat_its_bits_is_seen() -> None:
    scales = iter([1.0, 1.0 + 2.0**-23])
    check = make_repeat_check(ORDER, CPU, 0, lambda a, b: torch.mm(a, b) * next(scales))
    assert check() > 1.0


def sampled(node: str, values: tuple[float, ...], kind: str = "wrong") -> Sample:
    bench = Bench("check/product", "compute", "of the bound", "less", lambda place: None, checks=kind)  # type: ignore[arg-type]
    return judge_check(bench, Sample(node=node, metric=bench.metric, unit=bench.unit, better="less", values=values))


@pytest.mark.parametrize(
    ("values", "kind", "severity"),
    [
        ((0.1, 0.9, 1.0), "wrong", ""),
        ((0.1, 7.0, 0.2), "wrong", "reset"),
        ((3.0, 7.0, 0.2), "wrong", "isolate"),
        ((3.0, 7.0, 0.2), "watch", "watch"),
    ],
)
def test_how_often_a_result_is_wrong_says_what_to_do(values: tuple[float, ...], kind: str, severity: Severity) -> None:
    assert sampled("n1", values, kind).severity == severity


def test_a_wrong_node_is_named_whatever_its_speed_and_whichever_comes_first(tmp_path: Path) -> None:
    speeds = {"n1": 300.0, "n2": 100.0, "n3": 100.5, "n4": 99.7, "n5": 100.2}
    fast = [Sample(node=node, metric="gemm", better="more", values=(speed,) * 3) for node, speed in speeds.items()]
    checks = [sampled(node, (9.0, 9.0) if node == "n1" else (0.3,)) for node in speeds]
    for samples in ([*fast, *checks], [*reversed(checks), *fast]):
        found = judge(group_by_metric(samples))
        assert [node for node, word in found.words.items() if word == "wrong"] == ["n1"]
    once = judge(group_by_metric([*fast, *(sampled(node, (0.3,)) for node in speeds)]))
    for looks in ((found, once), (once, found)):  # the other look cannot clear it
        assert merge_verdicts(*looks).words["n1"] == "wrong"
    (tmp_path / "all.jsonl").write_text(render_samples(samples))
    done = mlhpc("preflight", "judge", "all.jsonl", "-o", "out", "--choose", "4", cwd=tmp_path)
    assert done.returncode == 5
    assert 'scontrol update NodeName=n1 State=DRAIN Reason="mlhpc: wrong results"' in done.stdout
    assert "--exclude=n1" in done.stdout
    assert "n1" not in (tmp_path / "out" / "chosen").read_text()
