"""The rows of identities.yaml: each can be kept and can be broken, and no value of a package breaks the function that asks them."""

import copy
import random
import re
from typing import Any

import pytest

from mlhpc.suite.compliance import identities
from mlhpc.suite.compliance.identities import find_broken

ROWS = [(group, text) for group, texts in identities._GROUPS.items() if isinstance(texts, list) for text in texts]
WORDS = ("weak", "own", "cpu", "cuda", "auto", "float32", "STRICT", "libfaketime.so")
VALUES: list[Any] = [None, True, False, 0, 1, 4, -3, 0.5, float("nan"), float("inf"), "", "7", "%1000000s", *WORDS]
VALUES += [[], [1], [1, 2, 3, 4], {}, {"value": 1}, 10**400, -(10**400), 1e308]


def draw_roots(text: str, draw: random.Random) -> dict[str, Any]:
    """Objects that have all names of a row, with any values; a name may be missing."""
    roots: dict[str, Any] = {}
    for path in dict.fromkeys(re.findall(r"[a-z_]\w*(?:\.\w+)*", re.sub("'[^']*'", "", text))):
        *above, last = path.split(".")
        place = roots
        for name in above:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                break
        else:
            if not isinstance(place.get(last), dict) and draw.random() < 0.9:
                place[last] = copy.deepcopy(draw.choice(VALUES))
    return roots


@pytest.mark.parametrize(("group", "text"), ROWS)
def test_each_row_is_kept_by_some_numbers_and_broken_by_others(
    group: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "_GROUPS", {group: [text]})
    draw, seen = random.Random(text), set[bool]()
    for number in range(4000):
        if number > 400 and len(seen) == 2:
            break
        found = list(find_broken(group, draw_roots(text, draw)))
        seen.add(bool(found))
        assert all(": expected " in message and len(message) < 4000 for _, message in found)
    assert seen == {True, False}


def test_a_broken_row_says_what_was_found_and_what_was_expected() -> None:
    roots = {"cpu": {"sockets": 4, "cores": 2, "threads": 8}, "limits": {}, "first_caches": 2}
    roots |= {"node": {"preloaded": ""}}
    said = "cpu.cores = 2, cpu.sockets = 4: expected cpu.cores >= cpu.sockets"
    assert list(find_broken("facts-agree", roots)) == [("cpu", said)]


# Of healthy runs: what an evaluation of each workload has, and the load of experts in a window
HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "cosmoflow": (
        "metric-agrees",
        {
            "record": {"eval_samples": 1000},
            "metrics": {
                "eval_error": 0.2994244139546463,
                "mae_omega_m": 0.23633432002346672,
                "rmse_omega_m": 0.2966786401063314,
                "mae_se_omega_m": 0.005674196081874796,
                "mae_sigma_8": 0.11981416488566901,
                "rmse_sigma_8": 0.15424763021945737,
                "mae_se_sigma_8": 0.0030734904692764067,
                "mae_n_s": 0.4004100868861133,
                "rmse_n_s": 0.48374382987294573,
                "mae_se_n_s": 0.008587992132557502,
                "mae_h_0": 0.4411390840233362,
                "rmse_h_0": 0.5259453720299967,
                "mae_se_h_0": 0.009060736164720294,
                "mse": 0.15560929355589442,
            },
        },
    ),
    "moe_lm": ("metric-agrees", {"metrics": {"eval_error": 1.8395112255942045, "nats_per_byte": 1.2750520196289923}}),
    "swinv2_moe": (
        "metric-agrees",
        {
            "metrics": {
                "eval_accuracy": 0.9325,
                "accuracy_delta": 0.99375,
                "accuracy_theta": 0.875,
                "accuracy_kappa": 0.8125,
                "accuracy_mu": 0.9875,
                "accuracy_lambda": 0.99375,
            }
        },
    ),
    "experts": (
        "expert-load",
        {
            "layers": 1,
            "load": {
                "tokens_per_expert": [3719, 3868, 3710, 4703],
                "imbalance": 1.17575,
                "drop_rate": 0.025437500000000002,
                "padding_waste": 0.22035000000000005,
            },
            "efficiency": {"useful_tflops": 0.0009775884882257653, "executed_tflops": 0.0012538812136545442},
            "phases": {"experts": 0.22589237695501652, "experts_backward": 0.1661064779982553},
            "measured_choice": {"about": {"shape": {"width": 32, "hidden": 64, "activation": "gelu"}}},
            "number_of_ranks": {"value": 1},
        },
    ),
}


def list_numbers(value: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
    """The path to each number of an object, but for those that only count what others are of."""
    inner = [(name, each) for name, each in value.items() if name not in ("layers", "tokens_per_expert", "activation")]
    return [
        path
        for name, each in inner
        for path in (list_numbers(each, *above, name) if isinstance(each, dict) else [(*above, name)])
    ]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_evaluation_keeps_the_rows_and_each_of_its_numbers_breaks_one_if_it_is_changed(name: str) -> None:
    group, healthy = HEALTHY[name]
    assert list(find_broken(group, healthy)) == []
    for *above, last in list_numbers(healthy):
        forged = place = copy.deepcopy(healthy)
        for part in above:
            place = place[part]
        place[last] *= 1.01
        assert list(find_broken(group, forged)), last


def test_no_step_needs_less_capacity_than_the_mean_of_all() -> None:
    load = HEALTHY["experts"][1]["load"]
    assert list(find_broken("expert-load", {"load": load | {"needed_capacity": 1.1}}))
    assert not list(find_broken("expert-load", {"load": load | {"needed_capacity": 2.0625}}))


@pytest.mark.parametrize(
    ("factor", "drop_rate", "broken"), [(1.25, 0.0254375, False), (1.0, 0.0254375, False), (1.25, 0.2, True)]
)
def test_experts_have_the_places_that_the_capacity_factor_says(factor: float, drop_rate: float, broken: bool) -> None:
    moe = {"value": {"hyperparameters": {"moe": {"capacity_factor": factor}}}}
    load = HEALTHY["experts"][1]["load"] | {"drop_rate": drop_rate}
    assert bool(list(find_broken("expert-load", {"load": load, "run_config": moe}))) == broken
