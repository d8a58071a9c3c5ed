"""The space of settings: conditions, narrowing, files, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlhpc.plugins.tune.space import (
    MOST_POINTS,
    Space,
    add_default,
    build_space,
    find_default,
    key_of_point,
    list_settings,
    narrow,
    read_space_file,
    render_point,
)
from mlhpc.suite.card import Tunable
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError

SPACE = Space(
    {
        "ranks": Tunable(values=(1, 2)),
        "plan": Tunable(values=(None, "sharded data=1,shard=2"), when={"ranks": (2,)}),
        "precision": Tunable(values=("float32", "bfloat16")),
    }
)
DEFAULT = {"ranks": 1, "precision": "float32"}


def test_a_condition_leaves_a_tunable_out_where_it_does_not_hold() -> None:
    points = list(SPACE.points())
    assert len(points) == SPACE.count() == 6
    assert [point for point in points if "plan" in point] == [point for point in points if point["ranks"] == 2]
    assert SPACE.restrict({"ranks": 1, "plan": None, "precision": "float32"}) == DEFAULT
    assert {key_of_point(SPACE.draw(seed)) for seed in range(99)} == {key_of_point(point) for point in points}


def test_true_is_not_one() -> None:
    space = Space({"a": Tunable(values=(1, True)), "b": Tunable(values=(2,), when={"a": (True,)})})
    assert list(space.points()) == [{"a": 1}, {"a": True, "b": 2}]
    assert len({key_of_point(point) for point in ({"a": 1}, {"a": True}, {"a": None}, {"a": "1"})}) == 4


def test_a_large_space_is_sampled_without_repetition_and_alike_for_a_seed() -> None:
    space = Space({name: Tunable(values=tuple(range(1, 9))) for name in "abcdef"})
    pool = space.pool(3)
    assert MOST_POINTS * 0.9 < len({key_of_point(point) for point in pool}) == len(pool) <= MOST_POINTS
    assert pool == space.pool(3) != space.pool(4)


def test_settings_of_a_point_are_those_of_set() -> None:
    point = {"ranks": 2, "threads": 1, "plan": "sharded data=1,shard=2", "channels_last": True}
    assert list_settings(point) == ['plan="sharded"', 'mesh="data=1,shard=2"', "channels_last=true"]
    assert list_settings({"plan": None}) == ["plan=null", "mesh=null"]
    assert render_point(point, {"threads": 1}) == "ranks=2 plan=sharded:data=1,shard=2 channels_last=true"
    assert render_point(DEFAULT, DEFAULT) == "the default"


def test_the_default_of_a_machine_is_in_its_space() -> None:
    chosen = load_descriptor("moe_lm")
    config = load_config(chosen, "smoke")
    own = chosen.card().tunable
    space = build_space(
        own, places=6, cores=6, gpu=False, batch=config.global_batch_size, plans=["sharded data=1,shard=2"]
    )
    assert space.tunables["ranks"].values == (1, 2, 4, 6)
    default = find_default(space, config, 1, 5)
    assert default["hyperparameters.moe.backend"] == "auto"
    assert "hyperparameters.moe.overlap_degree" not in default
    wider = add_default(space, default)
    assert wider.tunables["threads"].values[0] == 5
    assert key_of_point(default) in {key_of_point(point) for point in wider.points()}
    assert "threads" not in build_space({}, places=2, cores=8, gpu=True, batch=16, plans=[]).tunables


def test_narrowing_keeps_named_tunables_and_fixes_the_others() -> None:
    assert len(list(narrow(SPACE, DEFAULT, (), ("precision",)).points())) == 2
    assert list(narrow(SPACE, DEFAULT, ("ranks=2", "plan=null"), ("precision",)).points()) == [
        {"ranks": 2, "plan": None, "precision": "float32"},
        {"ranks": 2, "plan": None, "precision": "bfloat16"},
    ]


@pytest.mark.parametrize(
    ("fix", "only", "reason"),
    [
        (("rank=2",), (), "--fix rank: unknown tunable 'rank'; did you mean 'ranks'"),
        (("ranks",), (), "--fix ranks: expected NAME=VALUE"),
        (("ranks=[1, 2]",), (), "expected a single value"),
        (("ranks={",), (), "--fix 'ranks={': the value is not valid YAML"),
        ((), ("precison",), "--only precison: unknown tunable 'precison'; did you mean 'precision'"),
    ],
)
def test_a_mistake_in_narrowing_is_one_line(fix: tuple[str, ...], only: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InputError) as error:
        narrow(SPACE, DEFAULT, fix, only)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tunable_that_is_no_setting_is_refused() -> None:
    config = load_config(load_descriptor("moe_lm"), "smoke")
    for name, reason in (("precison", "no such setting"), ("hyperparameters.moe", "is a section")):
        with pytest.raises(InputError, match=f"tunable {name}: {reason}"):
            find_default(Space({name: Tunable(values=(1,))}), config, 1, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version: 1\ntunable: {a: {values: []}}", "a.values"),
        ("version: 2\ntunable: {}", "version"),
        ("version: 1\ntunable: {a: {value: [1]}}", "unknown key 'value'"),
        ("version: 1", "tunable"),
        ("- 1", "mapping"),
    ],
)
def test_a_damaged_space_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_space_file(tmp_path / "space.yaml")
    assert str(tmp_path / "space.yaml") in str(error.value)
    assert reason in str(error.value)


def test_a_space_that_repeats_a_value_or_names_a_later_tunable_is_refused() -> None:
    with pytest.raises(InputError, match="a value occurs twice"):
        Space({"a": Tunable(values=(1, 2, 1))})
    with pytest.raises(InputError, match="when names 'b'; expected a tunable before it: none"):
        Space({"a": Tunable(values=(1,), when={"b": (1,)}), "b": Tunable(values=(1,))})


@pytest.mark.parametrize(("gpu", "values"), [(False, ("loop", "onednn")), (True, ("loop", "triton"))])
def test_values_of_another_kind_of_device_are_not_tried(gpu: bool, values: tuple[str, ...]) -> None:
    own = {"backend": Tunable(values=("loop",), cpu=("onednn",), gpu=("triton",))}
    assert build_space(own, places=1, cores=1, gpu=gpu, batch=1, plans=[]).tunables["backend"].values == values
