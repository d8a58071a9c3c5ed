"""Plan files and meshes: what is legal, what is refused and how, who holds what."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from mlhpc.plugins.axes.spatial import Transposed, Window
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.mesh import Mesh, parse_mesh, part_of
from mlhpc.suite.training.parallel.parallel_dims import Parallel, placements
from mlhpc.suite.training.parallel.plan import find_plan, read_plan

SHIPPED = [("cosmoflow", "spatial"), ("deepcam", "spatial")]


def test_every_position_belongs_to_one_rank_and_parts_differ_by_one() -> None:
    for n, parts in product(range(1, 20), range(1, 20)):
        found = [part_of(n, parts, index) for index in range(parts)]
        assert [each for low, high in found for each in range(low, high)] == list(range(n))
        lengths = {high - low for low, high in found}
        assert max(lengths) - min(lengths) <= 1


def test_ranks_of_one_sample_are_consecutive_and_lines_differ_in_one_part() -> None:
    meshes = [Mesh(rank, 24, (2, 3, 2)) for rank in range(24)]
    assert [mesh.data_rank for mesh in meshes] == [0] * 12 + [1] * 12
    assert len({(mesh.data_rank, *mesh.place) for mesh in meshes}) == 24
    for mesh, d in product(meshes, range(3)):
        line = mesh.line(d)
        assert line[mesh.place[d]] == mesh.rank
        for part, other in enumerate(meshes[rank] for rank in line):
            assert other.data_rank == mesh.data_rank
            assert other.place == (*mesh.place[:d], part, *mesh.place[d + 1 :])


def test_ranks_of_experts_are_consecutive_and_pieces_lie_over_those_of_the_same_experts() -> None:
    meshes = [parse_mesh("data=2,shard=3,expert=2", (), rank=rank, ranks=12) for rank in range(12)]
    for mesh in meshes:
        assert (mesh.copies, mesh.data_size, mesh.data_rank) == (2, 12, mesh.rank)
        assert [other % 2 for other in mesh.holders] == [mesh.rank % 2] * 3
        assert mesh.holders[mesh.piece] == mesh.rank
        assert [meshes[other].piece for other in mesh.holders] == [0, 1, 2]
        assert mesh.replicas == [other.rank for other in meshes if other.piece == mesh.piece]
    assert sorted(rank for mesh in meshes if mesh.piece == 0 for rank in mesh.holders) == list(range(12))
    assert meshes[0].text() == "data=2,shard=3,expert=2"


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "left"), list(product((1, 2, 3, 5), (1, 2, 3), (1, 2), (0, 1, 3)))
)
def test_what_a_window_needs_is_what_its_definition_says(kernel: int, stride: int, dilation: int, left: int) -> None:
    for low, high in ((0, 1), (2, 5), (3, 4)):
        inputs = {o * stride - left + i * dilation for o in range(low, high) for i in range(kernel)}
        first, last = Window(kernel, stride, dilation, left).needs((low, high))
        assert (first, last) == (min(inputs), max(inputs) + 1)
        window = Transposed(kernel, stride, dilation, left)
        first, last = window.needs((low, high))
        reached = [i for i in range(-20, 30) for j in range(kernel) if low <= i * stride - left + j * dilation < high]
        assert all(first <= i < last for i in reached)  # every input that adds to one of the outputs
        assert window.begins(first) <= low  # and what comes of them covers the range
        assert window.begins(last - 1) + dilation * (kernel - 1) >= high - 1


MESHES = {
    "data=2,spatial=2x1x1": (4, (2, 1, 1), 2),
    "spatial=2x1x1": (8, (2, 1, 1), 4),
    "data=4": (4, (), 4),
    "data=2,expert=2": (4, (), 4),
    "expert=1": (4, (), 4),
    "shard=2,expert=4": (16, (), 16),
    "": (3, (), 3),
    "spatial=1x1x8, data=1": (8, (1, 1, 8), 1),
}


@pytest.mark.parametrize("text", MESHES)
def test_a_mesh_is_read(text: str) -> None:
    ranks, spatial, data = MESHES[text]
    mesh = parse_mesh(text, ("d", "h", "w"), rank=1, ranks=ranks)
    assert (mesh.spatial, mesh.data_size) == (spatial, data)
    assert parse_mesh(mesh.text(), ("d", "h", "w"), rank=1, ranks=ranks) == mesh


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data=2,spatial=2x1x1", "4 ranks, the run has 8; expected data=4"),
        ("spatial=3x1x1", "3 ranks|6 ranks.*expected a multiple of 3 ranks"),
        ("spatial=2x2", "2 numbers, the plan splits 3 dimensions: expected DxHxW"),
        ("spatial=0x1x1", "expected positive numbers"),
        ("spatial=2X1x1", "expected positive numbers"),
        ("spatial=-2x1x1", "expected positive numbers"),
        ("tens=2", "unknown axis 'tens'"),
        ("tensor=2x2", "tensor is one number"),
        ("tensor=2,spatial=2x1x1", "tensor and spatial cannot be combined: give one of them"),
        ("tensor=3", "expected a multiple of 3 ranks"),
        ("expert=2x2", "expert is one number"),
        ("expert=3", "expected a multiple of 3 ranks"),
        ("data=4,expert=4", "16 ranks, the run has 8; expected data=2"),
        ("expert=4,spatial=2x1x1", "expert and spatial cannot be combined: give one"),
        ("shard=2x2", "shard is one number"),
        ("shard=3", "3 ranks|6 ranks.*expected a multiple of 3 ranks"),
        ("data=8,shard=2", "16 ranks, the run has 8; expected data=4"),
        ("data=2,data=4", "axis 'data' is given twice"),
        ("data=2x4", "data is one number"),
        ("data", "expected AXIS=N"),
        ("spatial=99999999x1x1", "expected positive numbers"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        parse_mesh(text, ("d", "h", "w"), rank=0, ranks=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("workload", "name"), SHIPPED)
def test_the_slabs_of_all_ranks_are_the_sample(workload: str, name: str) -> None:
    chosen = load_descriptor(workload)
    config = load_config(chosen, "smoke", [f"plan={name}"])
    plan, _ = read_plan(find_plan(chosen, name))
    parts = (2, 3, 1)[: len(plan.split)]
    mesh = f"data=2,spatial={'x'.join(map(str, parts))}"
    ranks = [Parallel.of(structs.replace(config, mesh=mesh), chosen, rank, 12) for rank in range(12)]
    whole = 1
    for extent in list(ranks[0].extents.values())[: len(parts)]:
        whole *= extent
    sizes = [1] * 12
    for rank, each in enumerate(ranks):
        for low, high in each.slabs(evaluation=False)["x"][: len(parts)]:
            sizes[rank] *= high - low
    assert sum(sizes) == 2 * whole
    assert sum(each.loss_factor for each in ranks) == pytest.approx(12)  # the mean over ranks is the loss of the batch
    assert sum(each.counts for each in ranks) == 2


def edited(tmp_path: Path, **changes: Any) -> Path:
    data = yaml.safe_load(find_plan(load_descriptor("cosmoflow"), "spatial").read_text())
    for key, value in changes.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version"),
    ({"description": ...}, "description"),
    ({"meshes": "data=1"}, "meshes"),
    ({"split": ["d", "depth"]}, "dimension 'depth' has no entry under extents"),
    ({"split": ["d", "d", "w"]}, "a dimension is named twice"),
    ({"inputs": {}}, "split needs a description of the inputs"),
    ({"inputs": {"x": {"dims": ["d", "sample"], "dtype": "int16"}}}, "expected sample"),
    ({"inputs": {"x": {"dims": ["sample", "z"], "dtype": "int16"}}}, "dimension 'z' has no entry"),
    ({"inputs": {"x": {"dims": ["sample", "d"], "dtype": "complex64"}}}, "dtype"),
    ({"parameters": {}}, "parameters"),
    ({"parameters": {"hidden.*": "quantise"}}, "replicate"),
    ({"reshard_after_forward": "never"}, "reshard_after_forward"),
    ({"exchanges": {"all_reduce": {"calls": 0, "bytes_per_rank": 8}}}, "calls"),
    ({"loss": "mean"}, "loss"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_a_wrong_plan_file_is_refused_with_file_and_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        read_plan(edited(tmp_path, **changes))
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_extent_that_names_no_hyperparameter_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, extents={"d": "input_sise", "h": 16, "w": 16, "channel": 4, "target": 4})
    chosen = load_descriptor("cosmoflow")
    with pytest.raises(InputError, match="unknown hyperparameter 'input_sise'; did you mean 'input_size'"):
        Parallel.of(load_config(chosen, "smoke", [f"plan={path}"]), chosen, 0, 2)


def test_every_parameter_is_matched_exactly_once(tmp_path: Path) -> None:
    names = ["convolutions.0.weight", "hidden.0.bias"]
    for patterns, reason in [
        ({"convolutions.*": "replicate"}, "'hidden.0.bias' is matched by no pattern: add 'hidden.0.*: replicate'"),
        ({"*": "replicate", "hidden.*": "replicate"}, "matched by '\\*' and 'hidden.\\*': narrow one"),
        ({"*": "replicate", "dense.*": "replicate"}, "pattern 'dense.\\*' of parameters matches no parameter"),
    ]:
        plan, _ = read_plan(edited(tmp_path, parameters=patterns))
        with pytest.raises(InputError, match=reason):
            placements(plan, names)


def test_a_parameter_of_a_region_lacks_another_entry_than_replicate() -> None:
    plan, _ = read_plan(load_descriptor("moe_lm").folder / "plans" / "tensor.yaml")
    known = [pattern.replace("[ug]", "u").replace("*", "0", 1).replace("*", "x") for pattern in plan.parameters]
    for name, region in (
        ("blocks.0.attention.gate.weight", "'blocks.*.attention'"),
        ("blocks.11.ffn.experts.deep.bias", "'blocks.*.ffn'"),
    ):
        with pytest.raises(InputError) as found:
            placements(plan, [*known, name])
        assert f"{name!r} is matched by no pattern: it lies in region {region}" in str(found.value)
        assert f"add '{name}: {{split: 0}}'" in str(found.value)
    for name in ("extra.weight", "blocks.0.attention_scale", "blocks.0.norm.weight"):
        with pytest.raises(InputError, match=f"{name!r}.*no pattern: add '{name.rpartition('.')[0]}.*: replicate'"):
            placements(plan, [*known, name])


def test_a_mesh_without_a_plan_and_an_unknown_plan_are_refused() -> None:
    chosen = load_descriptor("cosmoflow")
    with pytest.raises(InputError, match="a mesh needs a plan"):
        Parallel.of(load_config(chosen, "smoke", ["mesh=data=2"]), chosen, 0, 2)
    with pytest.raises(InputError, match="unknown plan 'spacial'; did you mean 'spatial'"):
        Parallel.of(load_config(chosen, "smoke", ["plan=spacial"]), chosen, 0, 2)
    with pytest.raises(InputError, match="torch.compile does not support split samples"):
        Parallel.of(load_config(chosen, "smoke", ["plan=spatial", "compile=true"]), chosen, 0, 2)


def test_an_axis_of_holders_needs_a_plan_that_shards_and_no_compiler() -> None:
    chosen = load_descriptor("cosmoflow")
    with pytest.raises(InputError, match="shards no parameter"):
        Parallel.of(load_config(chosen, "smoke", ["plan=spatial", "mesh=shard=2"]), chosen, 0, 2)
    with pytest.raises(InputError, match="torch.compile does not support sharded parameters"):
        Parallel.of(load_config(chosen, "smoke", ["plan=sharded", "mesh=shard=2", "compile=true"]), chosen, 0, 2)
