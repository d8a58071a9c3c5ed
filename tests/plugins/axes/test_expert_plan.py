"""Plans that spread experts over some ranks: what they cost, and which are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.plan import find_plan
from mlhpc.workloads.moe.config import Layout, MoEConfig
from mlhpc.workloads.moe.parallel import count_node_ranks
from tests.fixtures.cli import mlhpc

SHIPPED = find_plan(load_descriptor("moe_lm"), "experts")
TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4 * 64, 64, 64, 4, 2  # moe_lm smoke on four ranks; one layer has experts


def planned(workload: str, *words: object) -> dict[str, Any]:
    done = mlhpc("plan", workload, "--size", "smoke", "--plan", "experts", "--format", "json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["plans"][0]  # type: ignore[no-any-return]


def sent(cost: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(each["axis"], each["kind"]): (each["ranks"], each["calls"], each["bytes"]) for each in cost["exchanges"]}


def test_what_experts_over_two_of_four_ranks_send_is_the_closed_form() -> None:
    cost = planned("moe_lm", "--mesh", "data=2,expert=2")
    rows = TOKENS * TOP_K * WIDTH * 4
    shares = 2 * EXPERTS // 2 * HIDDEN * WIDTH * 4
    counts = 2 * (EXPERTS // 2) * 8  # of rows, for each rank and expert there
    assert sent(cost) == {
        ("expert", "all_to_all"): (2, 5, 4 * rows + counts),
        ("twins", "all_reduce"): (2, 1, shares),
        ("gradients", "all_reduce"): (4, 1, 115264 * 4 - 2 * shares),
    }
    assert cost["gradients"] == 115264 * 4 - shares


def test_two_ranks_that_share_an_expert_gather_its_slices_too() -> None:
    cost = planned("moe_lm", "--mesh", "data=1,expert=8", "--set", "global_batch_size=32")
    shares = 2 * EXPERTS * HIDDEN * WIDTH * 4 // 8
    found = sent(cost)
    assert found["expert", "all_gather"] == (2, 2, shares)  # the upper and the lower matrix
    assert found["expert", "reduce_scatter"] == (2, 2, 2 * shares)
    assert ("twins", "all_reduce") not in found


def test_a_capacity_makes_what_is_sent_known_and_clipping_adds_a_number() -> None:
    cost = planned("swinv2_moe", "--mesh", "data=2,expert=2")
    moe = load_config(load_descriptor("swinv2_moe"), "smoke").hyperparameters.moe  # type: ignore[attr-defined]
    rows = Layout(5, spread=2).computed_rows(moe, 16) * 5 * 32 * 4
    assert sent(cost)["expert", "all_to_all"] == (2, 4, 4 * rows)
    assert sent(cost)["all", "all_reduce"] == (4, 1, 4)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("plan", "mesh", "ranks", "of"),
    [
        ("sharded", "data=2", 2, "all"),
        ("sharded", "data=1,shard=2", 2, "all"),
        ("tensor", "data=2,tensor=2", 4, "all"),
        ("experts", "data=1,expert=2", 2, "expert"),
        ("experts", "data=2,expert=2", 4, "all"),
    ],
)
def test_ranks_add_their_load_after_a_step_where_a_bias_balances(plan: str, mesh: str, ranks: int, of: str) -> None:
    """One number for each expert; no rank sends anything where there is no other."""
    words = ("--plan", plan, "--mesh", mesh, "--set", "global_batch_size=16", "--set")
    none, bias = (sent(planned("moe_lm", *words, f"hyperparameters.moe.balance={each}")) for each in ("none", "bias"))
    assert bias == none | {(of, "all_reduce"): (ranks, 1, 4 * EXPERTS)}
    assert (of, "all_reduce") not in none


def test_what_experts_send_is_not_left_out_where_no_step_can_run(tmp_path: Path) -> None:
    lines = SHIPPED.read_text().splitlines()
    first = lines.index("inputs:")
    end = next(i for i in range(first + 1, len(lines)) if not lines[i].startswith(" "))
    (path := tmp_path / "blind.yaml").write_text("\n".join([*lines[:first], *lines[end:]]))
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", path, "--mesh", "data=1,expert=2")
    assert done.returncode == 2
    assert done.stderr == (
        "mlhpc: plan: the bytes sent on the expert axis cannot be counted: the loss depends on values, or the plan lacks inputs\n"
    )
    assert mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", path, "--mesh", "data=2").returncode == 0


def test_two_levels_send_twice_and_chunks_more_often() -> None:
    moe = "hyperparameters.moe."
    settings = (f"{moe}all_to_all=2dh", f"{moe}ranks_per_node=2", f"{moe}overlap_degree=2", "global_batch_size=32")
    cost = planned("moe_lm", "--mesh", "expert=4", *(word for each in settings for word in ("--set", each)))
    each = 8 * 64 * TOP_K * WIDTH * 4
    calls, given = sum(n for _, n, _ in _all_to_alls(cost)), sum(given for *_, given in _all_to_alls(cost))
    assert calls == 2 + 4 * 2 * 2  # counts on both levels; four ways of two hops of two chunks
    assert given == 4 * 2 * each + 2 * (4 * 1 * 2 * 8)


def _all_to_alls(cost: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(e["ranks"], e["calls"], e["bytes"]) for e in cost["exchanges"] if e["kind"] == "all_to_all"]


def test_experts_that_a_setting_spreads_are_planned_so_too() -> None:
    """Without the axis the workload says: ``expert_parallel`` means all ranks."""
    words = ("--set", "hyperparameters.moe.expert_parallel=true")
    assert sent(planned("moe_lm", "--mesh", "data=4", *words)) == sent(planned("moe_lm", "--mesh", "expert=4"))
    assert ("expert", "all_to_all") not in sent(planned("moe_lm", "--mesh", "data=4,expert=1", *words))


def test_gradients_of_copies_are_in_the_work() -> None:
    assert Layout(4.0).summed_parameters(96) == 96
    assert Layout(4.0, spread=4).summed_parameters(96) == 0
    assert Layout(4.0, spread=4, copies=2).summed_parameters(96) == 24


def test_ranks_of_a_node() -> None:
    assert [count_node_ranks(4, ranks, 16) for ranks in (2, 4, 8, 16)] == [2, 4, 4, 4]
    assert count_node_ranks(3, 4, 4) == 3  # all ranks: the grid is checked where it is made
    with pytest.raises(InputError, match="expert=6: a node has 4 ranks; one of the two must divide the other"):
        count_node_ranks(4, 6, 12)


def test_ranks_of_a_node_whose_ranks_share_samples() -> None:
    """Of each mesh a node has as many ranks as it has groups; one if a group fills nodes."""
    assert [count_node_ranks(8, ranks, 64, 2) for ranks in (2, 4, 8, 32)] == [2, 4, 4, 4]
    assert [count_node_ranks(4, ranks, 64, 8) for ranks in (2, 8)] == [1, 1]
    with pytest.raises(InputError, match="tensor=3: a node has 8 ranks; one of the two must divide the other"):
        count_node_ranks(8, 2, 12, 3)


PRODUCTS = find_plan(load_descriptor("moe_lm"), "tensor").read_text()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("_EHD: {split: 1, expert: true}", "_EHD: {split: 1}", "plan 'mine' places no parameter on expert"),
        ("_EHD: {split: 1, expert: true}", "up*: {split: 1, expert: true}\n  blocks.*.experts.down*: {split: 1}",
         "down_EHD' is spread over the ranks of expert: expected the placement expert, or expert: true beside"),
        ("norm.weight: shard\n  blocks.*.ffn_n", "norm.weight: expert\n  blocks.*.ffn_n", "belongs to no expert"),
        ("expert: true", "expert: some", "expert"),
        ("down.weight: {split: 1}", "down.weight: {split: 1, expert: true}",
         "down.weight' is placed on expert but belongs to no expert"),
    ],
)  # fmt: skip
def test_placements_of_experts_beside_products(before: str, after: str, reason: str, tmp_path: Path) -> None:
    assert before in PRODUCTS
    (tmp_path / "mine.yaml").write_text(PRODUCTS.replace(before, after, 1))
    done = mlhpc("plan", "moe_lm", "--plan", tmp_path / "mine.yaml", "--size", "smoke", "--mesh", "expert=2,tensor=2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(reason, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_what_experts_and_products_of_eight_ranks_send_is_the_closed_form() -> None:
    """Each rank of a group sends all rows of the group's tokens, and sums gradients of its part of its experts."""
    done = mlhpc(
        "plan", "moe_lm", "--size", "smoke", "--plan", "tensor", "--mesh", "data=2,expert=2,tensor=2", "--format",
        "json",
    )  # fmt: skip
    (cost,) = json.loads(done.stdout)["plans"]
    rows, stream = TOKENS * TOP_K * WIDTH * 4, TOKENS * WIDTH * 4
    shares = 2 * EXPERTS // 2 * HIDDEN // 2 * WIDTH * 4
    found = sent(cost)
    assert found["expert", "all_to_all"] == (2, 5, 4 * rows + 2 * (EXPERTS // 2) * 8)
    assert found["tensor", "reduce_scatter"] == (2, 8, 8 * stream)
    assert found["tensor", "all_gather"] == (2, 9, 8 * stream // 2 + TOKENS * 256 * 4 // 2)
    twins = sorted((e["ranks"], e["calls"], e["bytes"]) for e in cost["exchanges"] if e["axis"] == "twins")
    rest = (2 * 4 * WIDTH * WIDTH + 2 * WIDTH * 2 * HIDDEN) // 2 * 4  # two attentions and a dense FFN
    assert twins == [(2, 1, shares), (4, 1, rest)]


def test_a_layer_of_one_rank_has_no_share() -> None:
    assert Layout(2.0).sent_rows(MoEConfig(experts=4, hidden=8), 16) == 0.0


WRONG = {
    "a plan that places nothing": (None, ["--plan", "sharded", "--mesh", "expert=2"], "places no parameter on expert"),
    "experts and rows of a sample": (None, ["--mesh", "axial=2,expert=2"], "expert and axial cannot be combined"),
    "a plan without products": (None, ["--mesh", "tensor=2,expert=2"], "plan 'experts' splits no products"),
    "experts over all ranks beside products": (
        None, ["--plan", "tensor", "--mesh", "tensor=2", "--set", "hyperparameters.moe.expert_parallel=true"],
        "ranks share samples, and experts are spread over all ranks: add expert=N to --mesh",
    ),
    "experts over more ranks than groups": (
        None, ["--plan", "tensor", "--mesh", "data=1,expert=3,tensor=2", "--set", "global_batch_size=12"],
        "experts is 4 on 3 ranks: one of the two numbers must divide the other",
    ),
    "a hidden width that does not divide": (
        None, ["--plan", "tensor", "--mesh", "expert=2,tensor=4", "--set", "hyperparameters.moe.hidden=66"],
        "up.weight': 132 positions|up_EHD': 66 positions of dimension 1 on tensor=4",
    ),
    "no experts": (
        None, ["--mesh", "expert=2", "--set", "hyperparameters.dense=true"], "is placed on expert|matches no",
    ),
    "a number that does not divide": (None, ["--mesh", "expert=3", "--set", "global_batch_size=12"],
        "experts is 4 on 3 ranks: one of the two numbers must divide the other"),
    "a batch that does not divide": (None, ["--mesh", "expert=3"], "global_batch_size 16 cannot be split evenly"),
    "a router on the axis": ((SHIPPED.read_text()[SHIPPED.read_text().index("  blocks.*") :], '  "*": expert\n'),
        ["--mesh", "expert=2"], "'embedding.weight' is placed on expert but belongs to no expert"),
    "experts in pieces": (
        ("blocks.*.ffn.experts.*: expert", "blocks.*.ffn.experts.up*: expert\n  blocks.*.ffn.experts.d*: shard"),
        ["--mesh", "expert=2"], "experts.down_EHD' is spread over the ranks of expert: expected the placement expert",
    ),
    "another word": (("experts.*: expert", "experts.*: experts"), ["--mesh", "expert=2"], "parameters"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    change, words, reason = WRONG[mistake]
    plan: object = "experts"
    if change is not None:
        text = SHIPPED.read_text()
        assert change[0] in text
        plan = tmp_path / "mine.yaml"
        (tmp_path / "mine.yaml").write_text(text.replace(*change, 1))
    named = [] if "--plan" in words else ["--plan", plan]
    done = mlhpc("plan", "moe_lm", "--size", "smoke", *named, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(reason, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_size_full_is_planned_for_2048_ranks() -> None:
    """Two of its layers: all blocks have experts, which the setting spreads over all ranks; the mesh says otherwise."""
    words = ("--size", "full", "--plan", "tensor_experts", "--mesh", "data=2,expert=64,tensor=16", "--format", "json")
    settings = ("--set", "global_batch_size=128", "--set", "hyperparameters.layers=2")
    (cost,) = json.loads(mlhpc("plan", "moe_lm", *words, *settings).stdout)["plans"]
    assert (cost["ranks"], cost["samples"]) == (2048, 1)
    rows = 4096 * 8 * 2048 * 2  # tokens, choices, width, bytes of bfloat16
    assert sent(cost)["expert", "all_to_all"] == (64, 2 * 5, 2 * (4 * rows + 64 * 8))
