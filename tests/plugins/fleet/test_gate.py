"""What the gate of a job needs of the verdict: bounds, failures, missing nodes, second looks, the nodes to use, the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.plugins.fleet.samples import group_by_metric, read_history, read_samples
from mlhpc.plugins.fleet.slow_nodes import judge, merge_verdicts
from mlhpc.suite.machine.facts import END_METRIC, Sample, render_samples
from tests.fixtures.cli import mlhpc

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")


def measured(
    slow: Sequence[str] = (), *, part: float = 0.5, nodes: Sequence[str] = NODES, seed: int = 0
) -> list[Sample]:
    """Three metrics whose nodes differ by some per mille, ``slow`` ones by ``part``."""
    return [
        Sample(
            node=node,
            metric=f"m{metric}",
            better="more",
            values=(100.0 * (1 + 0.001 * ((7 * place + 3 * metric + seed) % 5)) * (1 - part * (node in slow)),),
        )
        for metric in range(3)
        for place, node in enumerate(nodes)
    ]


def fact(node: str, value: float, bound: float = 10.0) -> Sample:
    return Sample(node=node, metric="free_space", unit="B", better="more", values=(value,), bound=bound)


def failure(node: str, metric: str = "m1") -> Sample:
    return Sample(node=node, metric=metric, better="more", failed="OSError: no space")


def without(samples: Sequence[Sample], node: str, metric: str) -> list[Sample]:
    return [each for each in samples if (each.node, each.metric) != (node, metric)]


def test_a_metric_with_a_bound_is_judged_by_that_alone() -> None:
    found = judge(group_by_metric([*measured(), *(fact(node, 1e9 * 10**place) for place, node in enumerate(NODES))]))
    assert set(found.words.values()) == {"good"}
    found = judge(group_by_metric([*measured(), *(fact(node, 9.0 if node == "n2" else 11.0) for node in NODES)]))
    assert [node for node, word in found.words.items() if word == "bad"] == ["n2"]
    assert found.reasons["n2"] == ("free_space: 9 B, expected at least 10",)


def test_what_fails_on_one_node_makes_it_bad_and_on_all_nodes_nobody() -> None:
    found = judge(group_by_metric([*without(measured(), "n3", "m1"), failure("n3")]))
    assert [node for node, word in found.words.items() if word == "bad"] == ["n3"]
    assert found.reasons["n3"] == ("m1: failed, but not on others: OSError: no space",)
    found = judge(group_by_metric([*measured(), *(failure(node, "m9") for node in NODES)]))
    assert set(found.words.values()) == {"inconclusive"}
    assert found.warnings == ("m9: failed on every node: OSError: no space",)


def test_a_node_that_left_nothing_is_bad_unless_none_left_anything() -> None:
    found = judge(group_by_metric(measured(nodes=NODES[:5])), nodes=NODES)
    assert {node for node, word in found.words.items() if word == "bad"} == {"n6"}
    ends = [Sample(node=node, metric=END_METRIC, better="less", values=(9.0,), bound=20.0) for node in NODES[:5]]
    found = judge(group_by_metric([*measured(), *ends]), nodes=NODES)  # n6 was only seen by others
    assert {node for node, word in found.words.items() if word == "bad"} == {"n6"}
    assert set(judge([], nodes=NODES).words.values()) == {"inconclusive"}


@pytest.mark.parametrize(
    ("first", "second", "bad"),
    [
        (["n2"], ["n2"], {"n2"}),
        (["n2"], [], set()),
        ([], ["n2"], set()),
        (["n2", "n4"], ["n4"], {"n4"}),
        (["n2"], ["n4"], set()),
    ],
)
def test_bad_is_what_is_bad_twice(first: list[str], second: list[str], bad: set[str]) -> None:
    looks = [judge(group_by_metric(measured(slow, seed=n))) for n, slow in enumerate((first, second))]
    found = merge_verdicts(*looks)
    assert {node for node, word in found.words.items() if word == "bad"} == bad
    assert all("(second look)" in reason for node in bad for reason in found.reasons[node])
    for node in set(first) - bad:
        assert "(first look only)" in found.reasons[node][0]


def test_the_command_chooses_keeps_and_remembers(tmp_path: Path) -> None:
    for look in ("1", "2"):
        (tmp_path / look).mkdir()
        (tmp_path / look / "all.jsonl").write_text(render_samples(measured(["n2"], nodes=NODES[:5])))
    words = ["preflight", "judge", "1", "--again", "2", "--nodes", "n[1-6]", "--choose", "3", "-o", "out"]
    done = mlhpc(*words, "--history", "old", "--remember", "old", cwd=tmp_path)
    assert done.returncode == 2
    assert "old" in done.stderr
    done = mlhpc(*words, "--remember", "old", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "out/chosen").read_text() == "n1,n3,n4\n"
    verdict = json.loads((tmp_path / "out/verdict.json").read_text())
    assert {node: about["word"] for node, about in verdict["nodes"].items()} == {
        **dict.fromkeys(("n1", "n3", "n4", "n5"), "good"), "n2": "bad", "n6": "bad",
    }  # fmt: skip
    (kept,) = (tmp_path / "old").iterdir()
    assert {sample.node for sample in read_samples(kept)} == {"n1", "n3", "n4", "n5"}
    again = mlhpc(*words, "--history", "old", "--remember", "old", cwd=tmp_path)
    assert again.returncode == 1
    assert len(list((tmp_path / "old").iterdir())) == 2


def test_two_nodes_are_judged_beside_their_history(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / f"old/{number}.jsonl").write_text(render_samples(measured(nodes=NODES[:2], seed=number)))
    for slow, code in (((), 0), (("n2",), 1)):
        path = tmp_path / "new.jsonl"
        path.write_text(render_samples(measured(slow, nodes=NODES[:2])))
        done = mlhpc("preflight", "judge", path, "--history", tmp_path / "old")
        assert done.returncode == code, done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--choose", "2"), "--choose writes the names to the folder of -o"),
        (("--choose", "9", "-o", "out"), "--choose 9: expected at most 6, the number of nodes"),
        (("--nodes", "n[1-"), "expected a Slurm node list"),
        (("--again", "none"), "none"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    (tmp_path / "n.jsonl").write_text(render_samples(measured()))
    done = mlhpc("preflight", "judge", "n.jsonl", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr


def test_a_folder_without_samples_is_told(tmp_path: Path) -> None:
    done = mlhpc("preflight", "judge", tmp_path)
    assert done.returncode == 2
    assert "the folder has no *.jsonl file" in done.stderr


def ceilings_file(path: Path, value: float, ranks: int = 2) -> Path:
    curve = {
        "resource": "compute", "name": "torch mkl", "mode": "burst", "dtype": "float32",
        "points": [{"x": 16, "value": 1.0}, {"x": 512, "value": value}],
    }  # fmt: skip
    head = {"version": 1, "kind": "ceilings", "system": "here", "date": "2026-11-27", "ranks": ranks, "nodes": 1}
    device = {"type": "cpu", "name": "EPYC", "threads": 1}
    path.write_text(json.dumps(head | {"device": device, "roofs": [], "curves": [curve]}))
    return path


def test_nodes_that_are_equal_are_compared_with_ceilings_and_history(tmp_path: Path) -> None:
    samples = [
        Sample(
            node=f"n{node}", hardware="8 CPUs EPYC, 2 ranks of 1 threads", metric=metric, better="more",
            values=tuple(50.0 + 0.1 * ((node + repetition) % 5) for repetition in range(5)),
        )
        for metric in ("gemm/float32", "dispatch")
        for node in range(16)
    ]  # fmt: skip
    (tmp_path / "now.jsonl").write_text(render_samples(samples))
    faster = [structs.replace(each, values=tuple(2 * value for value in each.values)) for each in samples]
    (tmp_path / "before.jsonl").write_text(render_samples(faster))

    def judged(*words: str | Path) -> tuple[int, list[str]]:
        done = mlhpc("preflight", "judge", "now.jsonl", *words, cwd=tmp_path)
        return done.returncode, done.stdout.splitlines()

    code, lines = judged()
    assert code == 0
    assert "The nodes are equal to each other. Whether all are slow was not asked: give --history" in lines[-2]
    code, lines = judged("--ceilings", ceilings_file(tmp_path / "near.json", 60.0))
    assert code == 0
    assert "In 1 metrics they are not slower" in lines[-2]
    assert "In the other 1, whether all are slow was not asked." in lines[-2]
    code, lines = judged("--ceilings", ceilings_file(tmp_path / "far.json", 100.0))
    assert code == 1
    assert lines[-2:] == ["0 good, 16 bad, 0 inconclusive", "all nodes are bad: none is left"]
    assert any("below two thirds of the ceiling of 100" in line for line in lines)
    code, lines = judged("--ceilings", ceilings_file(tmp_path / "other.json", 100.0, ranks=4))
    assert code == 0
    assert any("the ceilings were not used" in line for line in lines)
    code, lines = judged("--history", "before.jsonl")
    assert code == 1
    assert any("slower than 16 earlier values" in line for line in lines)


def test_files_of_a_history_are_measurements_unless_they_hold_other_nodes(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(render_samples(measured(nodes=NODES[:2])))
    (tmp_path / "3.jsonl").write_text(render_samples(measured(nodes=NODES[2:4])))
    assert [len(values) for values in read_history([tmp_path])["", "m0"]] == [2, 2, 4]
