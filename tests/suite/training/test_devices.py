"""What a rank computes on, and in which numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.devices import use_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SWITCHES = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = [switch.allow_tf32 for switch in SWITCHES]
    yield
    for switch, allowed in zip(SWITCHES, before, strict=True):
        switch.allow_tf32 = allowed


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_nothing_computes_in_tf32_unless_the_config_says_so(precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = True  # torch's own default
    use_precision(precision, CPU)
    assert [switch.allow_tf32 for switch in SWITCHES] == [False, False]


@pytest.mark.parametrize(("capability", "fits"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_tf32_is_of_gpus_that_have_it(capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        use_precision("tf32", GPU)
        assert [switch.allow_tf32 for switch in SWITCHES] == [True, True]
    else:
        with pytest.raises(InputError, match="precision tf32: cuda here has none"):
            use_precision("tf32", GPU)


def test_tf32_is_not_of_other_vendors_nor_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="precision tf32: cpu here has none; expected an NVIDIA GPU"):
        use_precision("tf32", CPU)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(InputError, match="precision tf32"):
        use_precision("tf32", GPU)


def test_a_rank_is_set_up_with_its_threads_its_precision_and_memory_that_it_keeps() -> None:
    program = """
import sys
from pathlib import Path
import torch
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.devices import set_up_rank
from mlhpc.suite.world import World
config = load_config(load_descriptor("cosmoflow"), "smoke", ["device=cpu"])
device, keeps = set_up_rank(config, World.create(None))
def faults():
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])
def used():
    before = faults()
    torch.ones(4 << 20)
    return faults() - before
for _ in range(8):  # glibc's pieces come to fit
    used()
usual = sorted(used() for _ in range(5))[2]  # now and then one no longer fits
print(device, keeps, torch.get_num_threads(), usual, sys.modules.get("torch._dynamo").__class__.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    device, keeps, threads, faults, compiler = done.stdout.split()
    assert (device, keeps, threads) == ("cpu", "True", "2")
    assert int(faults) < 100  # of 4,096 pages that the tensor has
    assert compiler != "module"  # stands for one that is not loaded
