"""Ceilings and counters files: what is refused, and that a file is never guessed for a system."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report
from mlhpc.analysis.drawing.charts import build_specification
from mlhpc.analysis.drawing.view import View
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.figures.roofline import HOST_LINK, build_roof_table, draw_roof_chart
from mlhpc.analysis.roofline.bounds import Demand, Resource
from mlhpc.analysis.roofline.points import list_machines
from mlhpc.analysis.roofline.regime import (
    Case,
    Work,
    compute_rank_roof,
    find_roofs_of,
    list_measured_cases,
    list_memory_levels,
    list_published_cases,
)
from mlhpc.analysis.sources.readers import Inputs, read_ceilings, read_inputs
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.ceilings_file import Ceiling
from tests.fixtures.charts import drawn
from tests.fixtures.cli import mlhpc

Build = Callable[..., Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "profile"}, "field `kind` is 'profile'"),
        ({"version": 2}, "`version` of the ceilings file is 2; this suite reads 1"),
        ({"ranks": 0}, "ranks = 0: expected int >= 1"),
        ({"roofs": [{"resource": "compute"}]}, "missing keys 'roofs.0.name', "),
        ({"device": None}, "device = None: "),
        (
            {"curves": [{"resource": "all_reduce", "name": "x", "points": [{"x": 8, "value": -1}]}]},
            "curves.0.points.0.value",
        ),
    ],
)
def test_a_file_that_is_not_one_says_what_and_where(
    tmp_path: Path, ceilings: Build, change: dict[str, Any], message: str
) -> None:
    path = ceilings(tmp_path / "x.json", **change)
    with pytest.raises(InputError, match="x.json") as caught:
        read_ceilings(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_and_lists_are_not_ceilings(tmp_path: Path) -> None:
    for content in ("{", "[1, 2]", '"ceilings"'):
        path = tmp_path / "x.json"
        path.write_text(content)
        with pytest.raises(InputError, match="x.json"):
            read_inputs([path])


def test_unknown_keys_are_accepted(tmp_path: Path, ceilings: Build) -> None:
    assert read_ceilings(ceilings(tmp_path / "x.json", new_key=[1], duration_s=3.0)).system == "testbed"


def inputs(tmp_path: Path, ceilings: Build, *systems: tuple[str, int]) -> Inputs:
    return read_inputs([ceilings(tmp_path / f"{n}.json", name, ranks=r) for n, (name, r) in enumerate(systems)])


def test_a_file_is_matched_by_name_or_is_the_only_one_and_says_so(tmp_path: Path, ceilings: Build) -> None:
    several = inputs(tmp_path, ceilings, ("a", 4), ("b", 4))
    found = several.of_system({"B"}, 4, 2)
    assert not isinstance(found, str)
    assert (found[0].system, found[1]) == ("b", "")
    assert several.of_system({"c"}, 4, 2) == "no ceilings of this system; there are those of a, b"
    assert several.of_system({"a", "b"}, 4, 2) == "ceilings of several systems go by this system's names: a, b"
    only = inputs(tmp_path, ceilings, ("a", 4)).of_system({"c"}, 4, 2)
    assert not isinstance(only, str)
    assert "the only ones given: no system here" in only[1]
    assert str(Inputs().of_system({"a"}, 1, 1)).startswith("no ceilings given")


def test_of_several_files_of_a_system_the_one_with_as_many_ranks_a_node_is_taken(
    tmp_path: Path, ceilings: Build
) -> None:
    several = inputs(tmp_path, ceilings, ("a", 2), ("a", 4), ("a", 8))
    for ranks, nodes, expected in ((4, 2, 4), (16, 8, 4), (64, 8, 8), (1, 1, 2)):
        found = several.of_system({"a"}, ranks, nodes)
        assert not isinstance(found, str)
        assert found[0].ranks == expected


@pytest.fixture
def made(tmp_path: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card]) -> Study:
    files = [ceilings(tmp_path / "c.json"), counters(tmp_path / "k.json")]
    return read_study([run_folder(tmp_path)], cards, read_inputs(files))


def only_case(made: Study) -> Case:
    [case] = list_measured_cases(made)
    return case


def test_a_run_on_its_ceilings_has_every_resource_that_was_logged(made: Study) -> None:
    case = only_case(made)
    seconds = {term.resource: term.seconds for term in case.bounds.terms}
    assert case.bounds.step_s == pytest.approx(1.0)
    assert seconds["compute"] == pytest.approx(2e9 * 2 / 110e9)  # two samples a rank, the burst's rate
    assert seconds["memory"] == pytest.approx(0.5e9 * 2 / 10e9)  # dram: a gigabyte fits no cache
    assert seconds["storage"] == pytest.approx(1e5 / 2e9)  # 1e6 bytes in ten steps, from the page cache
    assert seconds["all_reduce"] == pytest.approx(2e-4 * 11 + 2 * 2e6 / 1e9, rel=0.7)  # two messages of 2 MB
    assert case.bounds.unknown == {}
    basis = {term.resource: term.demand.basis for term in case.bounds.terms}
    assert basis == {"compute": "logged", "memory": "algorithmic", "storage": "logged", "all_reduce": "logged"}
    assert 4 < case.scale[0] < case.scale[1]  # a computation as slow as the step hides the network for longer


def test_a_collective_without_a_curve_has_the_bus_bandwidth_of_its_roof(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    path = ceilings(tmp_path / "c.json")
    document = json.loads(path.read_text())
    bus = {"resource": "all_reduce", "name": "gloo", "mode": "bus", "dtype": "float32", "library": "gloo"}
    document["roofs"].append({**document["roofs"][0], **bus, "value": 1e9, "unit": "B/s", "shape": None})
    path.write_text(json.dumps(document | {"curves": []}))
    case = only_case(read_study([run_folder(tmp_path)], cards, read_inputs([path])))
    (term,) = [term for term in case.bounds.terms if term.resource == "all_reduce"]
    assert term.seconds == pytest.approx(term.demand.amount / 1e9)


def test_a_host_is_shared_by_threads_and_cores(tmp_path: Path, ceilings: Build) -> None:
    cpu = {"type": "cpu", "name": "x", "threads": 2, "cores_allowed": 8}
    file = read_ceilings(ceilings(tmp_path / "c.json", ranks=4, device=cpu))  # two ranks a node of two threads each
    gemm, dram = file.of("compute")[0], list_memory_levels(file)[-1]

    def got(roof: Ceiling, ranks: float, threads: float, *, shared: bool) -> float:
        work = Work(ranks, 1.0, threads, None, 1.0, "float32", {}, {}, 0.0, {}, 0.0, 0.0)
        return compute_rank_roof(file, work, roof, "", shared=shared).per_s / roof.value

    assert got(gemm, 2, 2, shared=False) == pytest.approx(1)
    assert got(gemm, 8, 1, shared=False) == pytest.approx(0.5)
    assert got(gemm, 8, 4, shared=False) == pytest.approx(0.5)  # 32 threads take turns on 8 cores
    assert got(dram, 2, 2, shared=True) == pytest.approx(1)
    assert got(dram, 1, 4, shared=True) == pytest.approx(2)  # all that the two had together
    assert got(dram, 1, 1, shared=True) == pytest.approx(2)  # no more is known than that
    assert got(dram, 4, 2, shared=True) == pytest.approx(1)  # more cores than were measured


def test_a_gpu_is_not_shared_and_its_formats_have_their_own_roofs(tmp_path: Path, ceilings: Build) -> None:
    rate = {"n": 5, "unit": "FLOP/s", "resource": "compute", "name": "gemm", "mode": "burst"}
    roofs = [
        rate | {"dtype": "float32", "value": 50e12},
        rate | {"dtype": "tf32", "value": 380e12},
        rate | {"dtype": "bfloat16", "value": 700e12},
        rate | {"dtype": "bfloat16", "value": 640e12, "mode": "sustained"},
        *(rate | {"resource": "host_link", "name": "host_to_device", "unit": "B/s", "mode": mode, "value": value}
          for mode, value in (("pinned", 55e9), ("pageable", 12e9))),
    ]  # fmt: skip
    gpu = {"type": "cuda", "name": "NVIDIA H200", "threads": 8}
    file = read_ceilings(ceilings(tmp_path / "c.json", device=gpu, roofs=roofs))

    def got(precision: str, ranks: float) -> dict[str, float]:
        demands: dict[Resource, Demand] = {"host_link": Demand(1e6, "logged", "samples")}
        found = find_roofs_of(file, Work(ranks, 1.0, 2.0, None, 1.0, precision, demands, {}, 0.0, {}, 0.0, 0.0))
        return {name: roof.per_s for name, roof in found.items() if not isinstance(roof, str)}

    assert got("float32", 8) == {"compute": 50e12, "host_link": 55e9}
    assert got("tf32", 1)["compute"] == 380e12
    assert got("bfloat16", 1)["compute"] == 700e12


def test_the_ridge_of_the_host_link_is_the_break_even_of_offload(made: Study) -> None:
    """b F / (2 B) tokens: at 2 FLOPs a token for b bytes the intensity F / B."""
    table = build_roof_table(made)
    assert HOST_LINK not in table  # a processor is the host
    panels = build_specification(draw_roof_chart(table.assign(**{HOST_LINK: 1e6})))["datasets"].values()
    line = [row for panel in panels for row in panel if "offload" in str(row.get("_roof"))]
    peak = table["compute roof [FLOP/s]"].max()
    assert {row["_x"] for row in line if row["_y"] == peak} >= {peak / 1e6}


def test_phases_are_hollow_and_kernels_filled(made: Study) -> None:
    [machine] = list_machines(made)
    by_basis = {
        basis: [p.point.name for p in machine.placed if p.point.basis == basis] for basis in ("algorithmic", "counted")
    }
    assert by_basis["algorithmic"] == ["training step", "forward + backward"]
    assert len(by_basis["counted"]) == 9  # eight, and all others together
    assert by_basis["counted"][-1] == "4 other kernels"
    assert machine.launch_s == pytest.approx(16e-7)
    assert [(roof.name, roof.per_s) for roof in machine.lesser_peaks] == [("GEMM float32, sustained", 100e9)]


def test_the_optimizer_is_a_point_of_its_own_where_its_work_is_logged(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    work = {"model_flops": 2e9, "executed_flops": 2e9, "algorithmic_bytes": 0.5e9}
    update = {"optimizer_flops_per_step": 4e6, "optimizer_bytes_per_step": 28e6, "all_reduce_bytes_per_step": 4e6}
    folder = run_folder(tmp_path, extra=(("work_per_sample", work | update),))
    made = read_study([folder], cards, read_inputs([ceilings(tmp_path / "c.json")]))
    points = {p.point.name: p.point for p in list_machines(made)[0].placed}
    assert points["optimizer"].seconds == pytest.approx(0.06)
    assert points["optimizer"].intensity == pytest.approx(4 / 28)
    step = points["forward + backward"].bytes + points["optimizer"].bytes
    assert points["training step"].bytes == pytest.approx(step)
    assert step == pytest.approx((0.5e9 - 28e6 / 8) * 2 + 28e6)  # each rank updates all parameters


def test_counters_of_another_size_are_not_used(
    tmp_path: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card]
) -> None:
    files = [ceilings(tmp_path / "c.json"), counters(tmp_path / "k.json", size="other")]
    [machine] = list_machines(read_study([run_folder(tmp_path)], cards, read_inputs(files)))
    assert all(placed.point.basis == "algorithmic" for placed in machine.placed)


def test_imported_counters_are_points(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    table = tmp_path / "ncu.csv"
    rows = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for name, unit, value in (
        ("gpu__time_duration.sum", "msecond", "500"),
        ("sm__sass_thread_inst_executed_op_ffma_pred_on.sum", "inst", "1,000,000,000"),
        ("dram__bytes.sum", "Mbyte", "1,000"),
    ):
        rows.append(f'"0","conv","{name}","{unit}","{value}"')
    table.write_text("\n".join(rows))
    given = ["--system", "testbed", "--workload", "cosmoflow", "--size", "mini", "--steps", "10"]
    command = pytest.importorskip("mlhpc.plugins.exchange.counters").counters
    made = CliRunner().invoke(command, ["ncu", str(table), *given, "-o", str(tmp_path / "k.json")])
    assert made.exit_code == 0, made.output
    files = [ceilings(tmp_path / "c.json"), tmp_path / "k.json"]
    [machine] = list_machines(read_study([run_folder(tmp_path)], cards, read_inputs(files)))
    [point] = [placed.point for placed in machine.placed if placed.point.basis == "counted"]
    assert (point.name, point.intensity, point.seconds) == ("conv", pytest.approx(2.0), pytest.approx(0.05))


def test_without_ceilings_the_figures_say_what_is_missing(
    tmp_path: Path, run_folder: Build, cards: dict[str, Card]
) -> None:
    made = read_study([run_folder(tmp_path)], cards)
    with pytest.raises(NotAnswerableError, match="mlhpc ceilings"):
        list_measured_cases(made)
    theirs = list_published_cases(made)
    assert {case.modelled for case in theirs} == {True}
    eos = next(case for case in theirs if case.label.startswith("Eos"))
    assert eos.ranks < eos.scale[0] < 3 * eos.ranks < eos.scale[1]  # a global batch of 512 would not feed many more


def test_ceilings_of_a_processor_are_not_those_of_a_gpu(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    folder = run_folder(tmp_path)
    for log in folder.glob("result_*.txt"):
        record = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "run_config", "value": {}}
        log.write_text(f":::MLLOG {json.dumps(record | {'metadata': {'device': 'cuda'}})}\n{log.read_text()}")
    with pytest.raises(NotAnswerableError, match="ran on cuda, the ceilings of 'testbed' are of cpu"):
        list_measured_cases(read_study([folder], cards, read_inputs([ceilings(tmp_path / "c.json")])))


def test_a_format_without_a_roof_has_none(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    folder = run_folder(tmp_path, extra=(("run_config", {"precision": "bfloat16"}),))
    case = only_case(read_study([folder], cards, read_inputs([ceilings(tmp_path / "c.json")])))
    assert case.bounds.unknown["compute"] == "no GEMM measured in bfloat16, only in float32"


def test_a_ceiling_in_a_wrong_unit_is_refused_in_the_report(
    tmp_path: Path, run_folder: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    path = ceilings(tmp_path / "c.json", faster=1e-3)
    case = only_case(read_study([run_folder(tmp_path)], cards, read_inputs([path])))
    assert {refusal.term.resource for refusal in case.bounds.refused} >= {"compute", "memory"}
    assert "above the roof" in case.bounds.refused[0].reason


def test_a_kernel_without_flops_is_in_the_tables_and_not_on_the_classic_roofline(
    tmp_path: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card]
) -> None:
    """Copies have bytes and no FLOPs; they once stopped the report."""
    path = counters(tmp_path / "k.json")
    document = json.loads(path.read_text())
    document["kernels"][0] |= {"name": "copy", "flops": 0.0}
    path.write_text(json.dumps(document))
    made = read_study([run_folder(tmp_path)], cards, read_inputs([ceilings(tmp_path / "c.json"), path]))
    for name in ("roofline", "time_roofline", "hierarchical_roofline"):
        assert all(row.get("point") != "copy" for rows in drawn(name, made)["datasets"].values() for row in rows)
    rows = list_views()["roofline"].table(made).set_index("point")
    assert rows.loc["copy", "state"] == "not drawn: no FLOPs"


def test_results_of_one_system_with_one_label_are_predicted_one_by_one(
    tmp_path: Path, package: Build, ceilings: Build, cards: dict[str, Card]
) -> None:
    """A package with two benchmarks on one system once stopped the report."""
    for benchmark in ("cosmoflow", "deepcam"):
        package(tmp_path, benchmark=benchmark, size="mini", ours=True, phases=True)
    elsewhere = ceilings(tmp_path / "d.json", "elsewhere", faster=2.0)
    made = read_study([tmp_path / "ACME"], cards, read_inputs([ceilings(tmp_path / "c.json")], [elsewhere]))
    assert made.results["label"].nunique() == 1
    rows = list_views()["what_if"].table(made)
    assert set(rows["benchmark"]) == {"cosmoflow", "deepcam"}


ABSURD = [
    ("number_of_ranks", 0), ("number_of_ranks", -3), ("number_of_ranks", 10**15), ("number_of_ranks", "many"),
    ("number_of_nodes", 0), ("global_batch_size", 0), ("global_batch_size", 1e300), ("model_parameters", -1),
    ("work_per_sample", {"executed_flops": -1.0, "algorithmic_bytes": 0.0}),
    ("work_per_sample", {"executed_flops": 1e308, "algorithmic_bytes": 1e308, "optimizer_bytes_per_step": 1e308}),
    ("work_per_sample", {"executed_flops": 1e-300, "algorithmic_bytes": 1e-300}),
    ("work_per_sample", [1]), ("run_config", {"precision": ["float32"]}), ("run_config", {"precision": "<b>"}),
    ("rank_stats", {"all_reduce_bytes": {"mean": 1e308, "values": "x"}, "step_s": 3}), ("rank_stats", "nothing"),
    ("rank_stats", {"step_s": {"values": [1, None]}, "exposed_communication_s": {"values": [1, 2, 3]}}),
]  # fmt: skip


DRAWN = ("number_of_nodes", "model_parameters")  # the others in `make test-long`


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("key", "value"), ABSURD, ids=str)
def test_no_log_can_stop_the_answers(
    tmp_path: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card], key: str, value: Any
) -> None:
    made = absurd(tmp_path, run_folder, ceilings, counters, cards, key, value)
    for module in of_files():
        with suppress(NotAnswerableError):
            assert module.answer(made)
            assert len(module.table(made))


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(*case, marks=() if case[0] in DRAWN else pytest.mark.long) for case in ABSURD],
    ids=str,
)
def test_no_log_can_stop_the_figures(
    tmp_path: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card], key: str, value: Any
) -> None:
    made = absurd(tmp_path, run_folder, ceilings, counters, cards, key, value)
    for module in of_files():
        with suppress(NotAnswerableError):
            assert drawn(module.name, made)["datasets"]


def of_files() -> list[View]:
    """The figures that show ceilings or counters files."""
    wanted = {"stragglers", "what_if"}
    return [module for name, module in list_views().items() if name.endswith("roofline") or name in wanted]


def absurd(
    folder: Path, run_folder: Build, ceilings: Build, counters: Build, cards: dict[str, Card], key: str, value: Any
) -> Study:
    """Logs that begin with this event, with ceilings here and elsewhere."""
    runs = run_folder(folder)
    for log in runs.glob("result_*.txt"):
        record = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": key, "value": value}
        line = json.dumps(record | {"metadata": {"epoch_num": 1, "steps": 10}})
        log.write_text(f":::MLLOG {line}\n{log.read_text()}")
    given = [ceilings(folder / "c.json"), counters(folder / "k.json")]
    return read_study([runs], cards, read_inputs(given, [ceilings(folder / "d.json", "other", faster=2.0)]))


def test_the_command_takes_ceilings_among_its_paths_and_refuses_them_alone(
    tmp_path: Path, run_folder: Build, ceilings: Build
) -> None:
    folder, file = run_folder(tmp_path), ceilings(tmp_path / "c.json")
    there = ceilings(tmp_path / "d.json", "elsewhere", faster=2.0)
    alone = mlhpc("report", file, "-o", tmp_path / "none")
    assert alone.returncode == 2
    assert "a report needs logs" in alone.stderr
    done = CliRunner().invoke(
        report, [str(folder), str(file), "--what-if", str(there), "-o", str(tmp_path / "made")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    figures = {f["name"]: f for f in json.loads((tmp_path / "made" / "report.json").read_text())["figures"]}
    assert (
        "no known ceiling explains the time; memory alone would allow 10 times the speed"
        in figures["extended_roofline"]["answer"]
    )
    assert "on elsewhere" in figures["what_if"]["answer"]
    assert figures["hierarchical_roofline"]["not_answerable"].startswith("needs counters")
