"""Which meshes a sweep tries: no cost is computed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlhpc.plugins.axes.predict import NotLegalError, list_meshes, list_plan_costs, render_mesh
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.mesh import parse_mesh
from mlhpc.suite.training.parallel.plan import ParallelPlan, find_plan, read_plan

SHIPPED = [
    (name, path.stem)
    for name in ("cosmoflow", "deepcam", "open_catalyst", "moe_lm", "swinv2_moe", "openfold")
    for path in sorted((load_descriptor(name).folder / "plans").glob("*.yaml"))
]


def plan(workload: str, name: str) -> ParallelPlan:
    return read_plan(Path(find_plan(load_descriptor(workload), name)))[0]


@pytest.mark.parametrize("ranks", [1, 6, 24, 2048])
@pytest.mark.parametrize(("workload", "name"), SHIPPED)
def test_every_mesh_has_all_ranks_and_is_tried_once(workload: str, name: str, ranks: int) -> None:
    chosen = plan(workload, name)
    texts = [render_mesh(chosen, axes, ranks) for axes in list_meshes(chosen, ranks)]
    assert len(set(texts)) == len(texts)
    assert texts[0] == f"data={ranks}"
    for text in texts:
        mesh = parse_mesh(text, chosen.split, rank=0, ranks=ranks)
        assert mesh.copies * mesh.shard * max(1, mesh.expert) * mesh.parts == ranks
        assert max(mesh.parts, *mesh.spatial, mesh.expert) <= 64 * max(1, mesh.expert)


def test_the_axes_of_a_plan_and_their_shapes() -> None:
    assert len(list(list_meshes(plan("cosmoflow", "spatial"), 8))) == sum(math.comb(n + 2, 2) for n in range(4))
    found = [render_mesh(plan("openfold", "axial"), axes, 4) for axes in list_meshes(plan("openfold", "axial"), 4)]
    assert found[-2:] == ["data=2,axial=2", "data=1,axial=4"]
    both = [render_mesh(plan("moe_lm", "tensor"), axes, 8) for axes in list_meshes(plan("moe_lm", "tensor"), 8)]
    assert both[-6:] == [
        *("data=4,expert=1,tensor=2", "data=2,expert=1,tensor=4", "data=1,expert=1,tensor=8"),
        *("data=2,expert=2,tensor=2", "data=1,expert=4,tensor=2", "data=1,expert=2,tensor=4"),
    ]


def test_what_a_part_of_a_mesh_refuses_is_not_tried_again() -> None:
    """Too few samples or too much memory is said of one mesh alone, and so is what is refused without any axis."""
    spatial, tried = plan("cosmoflow", "spatial"), []

    def cost(_: str, mesh: str) -> str:
        tried.append(mesh)
        if mesh == "data=8":
            raise NotLegalError("no axes")
        if mesh == "data=4,spatial=2x1x1":
            raise InputError("memory")
        if mesh == "data=4,spatial=1x1x2":
            raise NotLegalError("w")
        return mesh

    found, refused = list_plan_costs({"spatial": spatial}, 8, lambda _: None, cost)
    reasons = {each["mesh"]: each["reason"] for each in refused}
    assert reasons == {
        **{"data=8": "no axes", "data=4,spatial=2x1x1": "memory"},
        **{f"data={data},spatial={shape}": "w" for data, shape in ((4, "1x1x2"), (2, "1x2x2"), (2, "2x1x2"))},
        **{f"data=1,spatial={shape}": "w" for shape in ("1x4x2", "2x2x2", "4x1x2")},
    }
    assert len(tried) == len(found) + 3


def test_axes_that_two_plans_have_are_the_first_ones() -> None:
    plans = {name: plan("cosmoflow", name) for name in ("spatial", "sharded")}
    found, refused = list_plan_costs(plans, 4, lambda _: None, lambda name, mesh: (name, mesh))
    assert refused == []
    assert [mesh for name, mesh in found if name == "sharded"] == ["data=2,shard=2", "data=1,shard=4"]
