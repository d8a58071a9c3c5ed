"""The data set that a card names is the one that the generator makes."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.world import World
from tests.fixtures.logs import edit, our_run, results

ROOT = Path(__file__).resolve().parents[2]
NAMED = [name for name, each in sorted(load_descriptors().items()) if each.card().size("smoke").data_sha256 is not None]


def test_some_cards_name_their_data() -> None:
    assert NAMED == ["cosmoflow", "moe_lm", "openfold", "swinv2_moe"]


@pytest.mark.parametrize(
    ("workload", "size"),
    [
        ("moe_lm", "mini"),
        *(pytest.param(name, "smoke", marks=[pytest.mark.long] if name == "swinv2_moe" else []) for name in NAMED),
    ],
)
def test_the_generator_makes_the_data_that_the_card_names(
    tmp_path: Path, workload: str, size: str, request: pytest.FixtureRequest
) -> None:
    pinned = re.search(r"^h5py==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if version("h5py") != pinned[1]:
        pytest.skip("another version of HDF5 may write other bytes for the same samples")
    chosen = load_descriptor(workload)
    if workload == "cosmoflow":  # many tests train on these data, which are made once
        data = request.getfixturevalue("smoke_data") / "cosmoflow-smoke"
    else:
        data = tmp_path / "data"
        chosen.load_generator().generate(data, size, seed=0, world=World.create())
    assert read_manifest(data).sha256 == chosen.card().size(size).data_sha256


PROCESSORS = {"Prescott": "sse2", "Haswell": "avx2", "SkylakeX": "avx512f"}  # kernels of OpenBLAS, and what they need


@pytest.mark.parametrize("kernel", PROCESSORS)
def test_the_entropy_rate_in_the_manifest_is_the_same_on_every_processor(kernel: str) -> None:
    if PROCESSORS[kernel] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {PROCESSORS[kernel]}")
    code = "from mlhpc.workloads.moe_lm.generate import Language, Lexicon; print(repr(Language(0, Lexicon(8, 32)).entropy_rate()))"
    environment = {"OPENBLAS_CORETYPE": kernel, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1.56406528\n"


HYPER = {"global_batch_size": 16}


@pytest.mark.parametrize("own", [True, False])
def test_the_checker_refuses_other_data_than_the_cards(tmp_path: Path, own: bool) -> None:
    sha256 = load_descriptor("openfold").card().size("smoke").data_sha256
    lines = edit("data_manifest", value=sha256 if own else "ab" * 32)
    folder = results(
        tmp_path / "r", 5, lambda n: lines(our_run(workload="openfold", seed=n, values=[0.8], hyperparameters=HYPER))
    )
    found = [each for each in check([folder]).findings if each.rule == "data-expected"]
    assert len(found) == (0 if own else 5)
    assert all(each.severity == "error" and "abab" in each.message for each in found)
