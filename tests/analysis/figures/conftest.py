"""Three studies that between them draw every figure: everything at once, many results close together, one machine at many sizes."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from mlhpc.analysis.sources.readers import read_inputs
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.card import Card
from tests.analysis.figures.test_energy_front import counted
from tests.fixtures.sweeps import sweep_documents

Build = Callable[..., Any]
LONG = "a-system-with-a-name-that-no-axis-has-room-for-" + "x" * 200


@pytest.fixture(scope="session")
def rich(
    tmp_path_factory: pytest.TempPathFactory,
    run_folder: Build,
    package: Build,
    ceilings: Build,
    counters: Build,
    cards: dict[str, Card],
) -> Study:
    """Own results with ceilings, counters, another machine and a sweep, beside published ones."""
    root = tmp_path_factory.mktemp("rich")
    paths = [run_folder(root, "one"), run_folder(root, "two", size="other")]
    paths += [
        package(root / "hpc_results_v9.9", system="daint_a"),
        package(root / "hpc_results_v9.9", system="daint_b", nodes=4, train_s=6.0),
        package(root / "hpc_results_v9.8", system="older", staging=(-9.0, -2.0)),
        package(root / "hpc_results_v9.7", system="open", division="open", eval_s=2.5),
    ]
    here, there = ceilings(root / "here.json"), ceilings(root / "there.json", "other", faster=3.0)
    inputs = read_inputs([here, counters(root / "counters.json")], [there])
    return read_study(paths, cards, inputs, sweep_documents(root))


@pytest.fixture(scope="session")
def crowded(tmp_path_factory: pytest.TempPathFactory, package: Build, cards: dict[str, Card]) -> Study:
    """Many results that lie close together, names without end, misses, 60 instances at once, results published again."""
    root = tmp_path_factory.mktemp("crowded")
    for place in range(12):
        make = {
            "system": f"juwels_{place}",
            "submitter": f"S{place}",
            "nodes": 2 ** (place // 2),
            "train_s": 8.0 + place / 10,
        }
        built = package(root / "hpc_results_v1.0", **make, benchmark=("cosmoflow", "deepcam")[place % 5 == 1])
        counted(built, ("pm_counters/node", "nvml/gpu")[place % 3 == 0], 1000.0 + 10.0 * place)
    package(root / "hpc_results_v1.0", system=LONG, submitter="$x^$<b>", runs=3, errors=(0.5, 0.4))
    package(root / "hpc_results_v1.0", system="daint", submitter="S1", nodes=500, train_s=0.05, eval_s=0.01, gap_s=0.01)
    shutil.copytree(root / "hpc_results_v1.0", root / "hpc_results_v2.0")
    weak = package(root / "hpc_results_v3.0", system="eos", submitter="NV", runs=60, start_s=0.0, nodes=120)
    shutil.move(weak / "results/eos/strong", weak / "results/eos/weak")
    package(root / "hpc_results_v3.0", system="eos_b", submitter="NV", errors=(0.5, 0.3, 0.2, 0.1), train_s=5000.0)
    return read_study([root / f"hpc_results_{round_}" for round_ in ("v1.0", "v2.0", "v3.0")], cards)


@pytest.fixture(scope="session")
def sizes(tmp_path_factory: pytest.TempPathFactory, run_folder: Build, cards: dict[str, Card]) -> Study:
    """One machine at seven sizes: models are fitted."""
    root = tmp_path_factory.mktemp("sizes")
    return read_study([run_folder(root, f"of{2**n}", ranks=2**n, train_s=40.0 / 2**n + 1) for n in range(1, 8)], cards)
