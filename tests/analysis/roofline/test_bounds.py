"""Rooflines as arithmetic: bands, refusals, the ring, the scale at which the network decides, and the paper's V100."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.analysis.roofline.bounds import (
    ALL_REDUCE,
    ALL_TO_ALL,
    RESOURCES,
    Demand,
    Point,
    Resource,
    Ring,
    Roof,
    compute_attainable,
    compute_bounds,
    compute_complexity,
    describe_roof_share,
    explain_above_roof,
    find_network_scale,
    fit_ring,
    render_si,
)

positive = st.floats(1e-6, 1e6)


def roof(per_s: float, *, spread: float = 0.0) -> Roof:
    return Roof(per_s, "a roof", "measured", "a test", spread)


def logged(amount: float) -> Demand:
    return Demand(amount, "logged", "a test")


@given(st.dictionaries(st.sampled_from(RESOURCES), st.tuples(positive, positive), min_size=1))
def test_the_band_is_from_the_longest_resource_to_their_sum(work: dict[Resource, tuple[float, float]]) -> None:
    seconds = {name: amount / per_s for name, (amount, per_s) in work.items()}
    step_s = sum(seconds.values())
    found = compute_bounds(
        step_s, {n: logged(a) for n, (a, _) in work.items()}, {n: roof(c) for n, (_, c) in work.items()}
    )
    assert found.lower_s == pytest.approx(max(seconds.values()))
    assert found.upper_s == pytest.approx(step_s)
    assert found.verdict == "within the band"
    assert seconds[found.nearest.resource] == max(seconds.values())
    assert found.distance >= 1 - 1e-12
    assert set(found.unknown) == set(RESOURCES) - set(work)


def test_a_step_slower_than_all_resources_in_a_row_is_not_explained() -> None:
    found = compute_bounds(1.0, {"compute": logged(10.0)}, {"compute": roof(100.0)})
    assert found.verdict.startswith("the step takes longer")
    assert found.distance == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "memory is the limit, at 100 % of its ceiling"),
        (0.62, "memory is the limit, at 62 % of its ceiling"),
        (0.5, "memory is the limit, at 50 % of its ceiling"),
        (0.49, "no known ceiling explains the time; memory alone would allow 2.04 times the speed"),
        (1 / 15, "no known ceiling explains the time; memory alone would allow 15 times the speed"),
        (1 / 82.7, "no known ceiling explains the time; memory alone would allow 82.7 times the speed"),
        (0.0, "no known ceiling explains the time"),
    ],
)
def test_a_roof_that_explains_little_of_a_step_is_not_said_to_bind(share: float, text: str) -> None:
    assert describe_roof_share("memory", share) == text


def test_a_resource_that_would_take_longer_than_the_step_is_refused_with_the_reason() -> None:
    found = compute_bounds(
        1.0,
        {"compute": logged(50.0), "memory": Demand(300.0, "algorithmic", "operands")},
        {"compute": roof(100.0), "memory": roof(100.0)},
    )
    assert [term.resource for term in found.terms] == ["compute"]
    assert [refusal.term.resource for refusal in found.refused] == ["memory"]
    assert "300 B/s, above the roof of 100 B/s" in found.refused[0].reason
    assert "caches serve part of it" in found.refused[0].reason
    assert found.upper_s == pytest.approx(0.5)


def test_a_point_within_the_spread_of_its_roof_is_not_refused() -> None:
    demand: dict[Resource, Demand] = {"compute": logged(110.0)}
    assert compute_bounds(1.0, demand, {"compute": roof(100.0)}).refused
    assert not compute_bounds(1.0, demand, {"compute": roof(100.0, spread=0.12)}).refused


def test_what_is_missing_has_a_name_and_nothing_asked_is_no_term() -> None:
    found = compute_bounds(1.0, {"all_to_all": logged(0.0), "storage": logged(5.0)}, {"storage": "no storage ceiling"})
    assert found.terms == ()
    assert math.isnan(found.lower_s)
    assert "all_to_all" not in found.unknown
    assert found.unknown["storage"] == "no storage ceiling"
    assert found.unknown["compute"] == "quantity not logged"
    assert found.verdict == "no resource has both a quantity and a ceiling"


# Cori GPU's V100 as the authors of the first round measured it: mlperf-deepcam/analysis/roofline_plot.ipynb
V100 = {"L1": 14336e9, "L2": 2996.77e9, "HBM": 828.758e9}
V100_FP64_FMA, V100_FP64 = 7068.86e9, 3535.79e9


def test_the_papers_v100_has_its_ridge_where_its_notebook_draws_it() -> None:
    fp32, fp16 = 2 * V100_FP64_FMA, 4 * V100_FP64_FMA
    ridge = {level: fp32 / bandwidth for level, bandwidth in V100.items()}
    assert ridge["HBM"] == pytest.approx(17.06, abs=0.01)
    assert ridge["L2"] == pytest.approx(4.718, abs=0.001)
    assert ridge["L1"] == pytest.approx(0.986, abs=0.001)
    for bandwidth in V100.values():
        at = fp32 / bandwidth
        assert compute_attainable(fp32, bandwidth, at) == pytest.approx(fp32)
        assert compute_attainable(fp32, bandwidth, at / 4) == pytest.approx(fp32 / 4)
        assert compute_attainable(fp32, bandwidth, at * 4) == pytest.approx(fp32)
    assert compute_attainable(fp16, V100["HBM"], 1e9) == pytest.approx(28275.44e9)
    assert compute_attainable(125e12, V100["HBM"], 140) == pytest.approx(
        116.0e12, rel=1e-3
    )  # DeepCAM: near the ridge at 151
    assert pytest.approx(2, rel=1e-3) == V100_FP64_FMA / V100_FP64


def test_a_point_above_its_roof_is_an_error_that_says_which() -> None:
    peak, memory = roof(100.0), roof(10.0)
    assert explain_above_roof(Point("conv", 90.0, 10.0, 1.0, "counted"), peak, memory) is None
    assert "FLOP count is wrong" in str(explain_above_roof(Point("conv", 190.0, 10.0, 1.0, "counted"), peak, memory))
    assert "caches serve part" in str(explain_above_roof(Point("relu", 50.0, 10.0, 0.5, "algorithmic"), peak, memory))


def test_a_kernel_that_only_waits_for_its_launch_is_launch_bound() -> None:
    tiny = compute_complexity(Point("add", 1.0, 1.0, 1e-2, "counted", count=1000), roof(1e6), roof(1e6), 1e-5)
    assert (tiny.bound, tiny.roof_s) == ("launch", pytest.approx(1e-2))
    large = compute_complexity(Point("conv", 1e6, 1.0, 2.0, "counted", count=1), roof(1e6), roof(1e6), 1e-5)
    assert (large.bound, large.roof_s) == ("compute", pytest.approx(1.0))


@pytest.mark.parametrize("passes", [ALL_REDUCE, ALL_TO_ALL])
@pytest.mark.parametrize(("latency", "per_s"), [(20e-6, 10e9), (0.0, 1e9)])
def test_a_ring_is_recovered_from_its_times(passes: int, latency: float, per_s: float) -> None:
    truth = Ring(passes, latency, per_s)
    times = [(n, size, truth.seconds(n, size)) for n in (2, 4, 8) for size in (1e3, 1e5, 1e7)]
    found = fit_ring(passes, times)
    assert found.per_s == pytest.approx(per_s, rel=1e-6)
    assert found.latency_s == pytest.approx(latency, abs=1e-12)


@given(st.lists(st.tuples(st.integers(2, 64), st.floats(1e3, 1e9), st.floats(1e-6, 10.0)), min_size=1, max_size=6))
def test_a_fitted_ring_is_never_negative(times: list[tuple[float, float, float]]) -> None:
    found = fit_ring(ALL_REDUCE, times)
    assert found.latency_s >= 0
    assert found.per_s > 0


def test_no_usable_time_gives_no_ring() -> None:
    assert fit_ring(ALL_REDUCE, [(1, 1e6, 1e-3), (2, 0.0, 1e-3)]) is None


def test_the_scale_of_the_network_roof_is_the_first_at_which_it_takes_longer() -> None:
    ring = Ring(ALL_REDUCE, 10e-6, 10e9)

    def network(ranks: float) -> float:
        return ring.seconds(ranks, 100e6)

    found = find_network_scale(lambda ranks: 5.0 / ranks, network)
    assert network(found) >= 5.0 / found
    assert network(found - 1) < 5.0 / (found - 1)
    assert find_network_scale(lambda ranks: 1e-9, network) == 2
    assert find_network_scale(lambda ranks: 1.0, lambda ranks: 0.0) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 "), (1234, "1.23 k"), (999.6, "1 k"), (0.0456, "45.6 m"), (312e12, "312 T"), (12, "12 "), (2e-6, "2 µ")],
)
def test_numbers_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert render_si(value) == text
