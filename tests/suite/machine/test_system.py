"""System: facts and a system file become the MLPerf system JSON, complete and accepted by MLCommons' own checker."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.facts import Facts
from mlhpc.suite.machine.probes.collect import collect_facts
from mlhpc.suite.machine.system import (
    REQUIRED,
    System,
    describe_system,
    describe_system_of,
    list_differences,
    make_system_description,
    read_description,
    read_nodes,
)

FILE = """
name: mysite
description:
  system_name: Big Iron
  cooling: liquid
  networking_topology: Dragonfly
  memory_per_node_gib: 512
  software: {cuda: "12.4"}
site:
  partition: gpu
  anything: [the launcher, knows]
"""


@pytest.fixture(scope="module")
def here() -> Facts:
    return collect_facts({}, run=lambda command: "")


def test_every_field_is_there_and_none_is_empty(here: Facts) -> None:
    text = make_system_description(
        describe_system([here]), submitter="ACME", division="closed", status="research", nodes=4,
        accelerators_per_node=0,
    )  # fmt: skip
    assert tuple(text) == REQUIRED
    assert len(REQUIRED) == 33
    assert all(isinstance(value, str) and value for key, value in text.items() if key != "other_software_stack")
    assert all(isinstance(value, str) for value in text["other_software_stack"].values())
    assert text["number_of_nodes"] == "4"
    assert text["accelerator_model_name"] == "N/A"
    assert text["cooling"] == "unknown"


def test_nothing_known_is_unknown_in_every_field() -> None:
    text = make_system_description(System(), submitter="A", division="open", status="preview", nodes=1)
    assert {key for key, value in text.items() if value != "unknown"} == {
        "submitter",
        "division",
        "status",
        "number_of_nodes",
    }


def test_the_official_checker_accepts_it(here: Facts, tmp_path: Path) -> None:
    checker = pytest.importorskip("mlperf_logging.system_desc_checker.system_desc_checker")
    path = tmp_path / "system.json"
    text = make_system_description(describe_system([here]), submitter="A", division="closed", status="onprem", nodes=1)
    path.write_text(json.dumps(text))
    valid, name, *_ = checker.check_system_desc(str(path), "hpc", "3.0.0")
    assert valid
    assert name == text["system_name"]


def test_a_system_file_wins_over_the_facts_and_its_launcher_block_is_not_ours(here: Facts, tmp_path: Path) -> None:
    path = tmp_path / "mysite.yaml"
    path.write_text(FILE)
    system = describe_system([here], read_description(path))
    assert (system.system_name, system.cooling, system.memory_per_node_gib) == ("Big Iron", "liquid", 512)
    assert system.processor_model == describe_system_of(here).processor_model
    assert system.software["cuda"] == "12.4"
    assert system.software["python"] == here.software.python


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "cooling: liquid",
            "coolin: liquid",
            ":5: unknown key 'coolin'; did you mean 'cooling'? valid keys: accelerator_",
        ),
        ("memory_per_node_gib: 512", "memory_per_node_gib: lots", ":7: description.memory_per_node_gib = 'lots': "),
        ("description:\n", "description: text\nx:\n", ":3: description = 'text': expected a mapping | null, got str"),
    ],
)
def test_a_mistake_in_the_description_says_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mysite.yaml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(InputError, match=r"^.*$") as caught:
        read_description(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_nodes_that_differ_are_named_with_both_values(here: Facts) -> None:
    other = structs.replace(here, node="n2", cpu=structs.replace(here.cpu, model="Old CPU"))
    assert list_differences([here, other]) == [
        f"node n2: processor_model is Old CPU, on node {here.node} {here.cpu.model}",
    ]


def test_memory_that_the_firmware_keeps_is_no_difference(here: Facts) -> None:
    memory = structs.replace(here.memory, total_gib=here.memory.total_gib * 1.001)
    assert list_differences([here, structs.replace(here, node="n2", memory=memory)]) == []


def test_a_run_folder_without_facts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the facts of at least one node, found none"):
        read_nodes(Path(tmp_path))
