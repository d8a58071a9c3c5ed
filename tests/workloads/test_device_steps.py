"""What a GPU must not suffer from in a training step of any workload, shown without one; and with one, where there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.batch_loading import PackedBatch
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from tests.fixtures.device_steps import (
    COPIES,
    LONG,
    META,
    ON_HOST,
    WAITS,
    counted_reads,
    pretend_meta_computes,
    step_of,
    watching,
)
from tests.workloads.tiny import TINY

CUDA = torch.device("cuda")
CAPACITY = ("hyperparameters.moe.dispatch=capacity", "hyperparameters.moe.capacity_factor=1.25")
EXPERTS = ("moe_lm", "swinv2_moe")
# As a GPU runs them: bfloat16, in which grouped_mm multiplies all experts at once, or with a capacity
FORMS = {name: () for name in TINY if name not in EXPERTS} | {
    f"{name} {form}": settings
    for name in EXPERTS
    for form, settings in (("dropless", ("precision=bfloat16",)), ("capacity", ("precision=bfloat16", *CAPACITY)))
}


def configured(name: str, root: Path | None, *settings: str, device: torch.device = META) -> RunConfig:
    """The workload's smoke size, made to fit the tiny data set where there is one."""
    overrides = [] if root is None else list(TINY[name].overrides(read_manifest(root).attributes))
    if name in EXPERTS:
        overrides = [each for each in overrides if "backend" not in each]
        overrides += [] if device == CUDA else ["hyperparameters.moe.backend=grouped_mm"]
        overrides += ["instrumentation=false"]
    return load_config(load_descriptor(name), "smoke", [*overrides, *settings])


def batch_of(workload: Workload, root: Path | None, split: str, device: torch.device) -> dict[str, Tensor]:
    """Four samples, brought to the device as a run brings them."""
    if root is None:
        context = workload.config.hyperparameters.context  # type: ignore[attr-defined]
        batch = {"bytes": torch.randint(0, 256, (4, context + 1), dtype=torch.uint8)}
    else:
        epoch = int(split == "train")
        batch = dict(workload.dataset(split, root).load(range(4), seed=1, epoch=epoch))
    return PackedBatch.pack(batch, pinned=device == CUDA).to(device).unpack()


@pytest.mark.parametrize("name", [*TINY, "moe_lm"])
def test_tf32_has_the_bytes_of_float32(name: str) -> None:
    """A GPU rounds the factors of its products; what is stored and sent is as long as before."""
    stated = []
    for precision in ("float32", "tf32"):
        config = load_config(load_descriptor(name), "smoke", [f"precision={precision}"])
        workload: Workload = load_workload(load_descriptor(name))(config)
        hyperparameters = {key: value for key, value in workload.hyperparameters().items() if "precision" not in key}
        stated.append((workload.work(), hyperparameters))
    assert stated[0] == stated[1]


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(form: str, made_once: Callable[[str], Path]) -> Path | None:
    name = form.split()[0]
    return made_once(name) if name in TINY else None


@pytest.fixture
def on_meta(form: str, root: Path | None, world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Workload, nn.Module]:
    name = form.split()[0]
    config = configured(name, root, *FORMS[form])
    workload: Workload = load_workload(load_descriptor(name))(config)
    model = workload.build_model(world).to(META)
    pretend_meta_computes(monkeypatch, bfloat16=config.precision == "bfloat16")
    return workload, model


@pytest.mark.drawn(3)
def test_a_training_step_neither_waits_nor_copies_nor_computes_in_float64(
    root: Path | None, on_meta: tuple[Workload, nn.Module]
) -> None:
    """From zeroed gradients to the optimizer and the moving average; the first step makes tables on the device."""
    workload, model = on_meta
    step, batch = step_of(workload, model, META), batch_of(workload, root, "train", META)
    step(batch)
    with watching() as watched:
        step(batch)
    assert watched.found == {}


@pytest.mark.drawn(3)
def test_an_evaluation_batch_neither_waits_nor_copies(root: Path | None, on_meta: tuple[Workload, nn.Module]) -> None:
    """Sums of a metric are in float64; that is all that an evaluation has of it."""
    workload, model = on_meta
    model.eval()
    batch = batch_of(workload, root, "validation", META)
    with torch.no_grad():
        workload.eval_stats(model, batch)
        with watching() as watched:
            workload.eval_stats(model, batch)
    assert [each for each in watched.found if not each.startswith(LONG)] == []


CASES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a value": (WAITS, lambda x: x.sum().item()),
    "a branch": (WAITS, lambda x: 1 if x.sum() > 0 else 0),
    "a mask": (WAITS, lambda x: x[x > 0]),
    "a masked write": (WAITS, lambda x: x.clone().__setitem__(x > 0, x.new_zeros(3))),
    "positions": (WAITS, lambda x: x.nonzero()),
    "repeats of unknown sum": (WAITS, lambda x: x.repeat_interleave(x.long())),
    "a comparison": (WAITS, lambda x: torch.equal(x, x)),
    "a way to the host": (WAITS, lambda x: x.cpu()),
    "a list": (COPIES, lambda x: torch.tensor([0.0, 1.0], device=x.device)),
    "a number": (COPIES, lambda x: x.new_tensor(3.0)),
    "a small tensor": (COPIES, lambda x: torch.arange(3).to(x.device)),
    "indices on the host": (COPIES, lambda x: x[torch.arange(3)]),
    "a wide sum": (LONG, lambda x: x.double().sum()),
    "wide numbers": (LONG, lambda x: torch.zeros(3, dtype=torch.float64, device=x.device)),
    "work of the host": (ON_HOST, lambda x: torch.rand(4).sort()),
}
FINE: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ x.t(),
    "a scalar of the host": lambda x: x * torch.tensor(2.0),
    "a fill": lambda x: x.new_full((3,), 2.0) + torch.full((3,), 1.0, device=x.device),
    "repeats of known sum": lambda x: x[0].repeat_interleave(x[0].long(), output_size=7),
    "a choice": lambda x: torch.where(x > 0, x, 0.0),
    "indices on the device": lambda x: x[torch.arange(3, device=x.device)],
    "a sort": lambda x: x.sort(dim=0, stable=True),
    "whole numbers on the host": lambda x: torch.full((8,), 3).sum().item(),
    "a count": lambda x: x.new_zeros(4).scatter_add(0, x[0].long(), x[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_gpu_would_suffer_from_is_seen(name: str) -> None:
    kind, action = CASES[name]
    x = torch.empty(4, 4, device=META)
    if kind == WAITS:
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), watching():
            action(x)
        return
    with watching() as watched:
        action(x)
    assert any(each.startswith(kind) for each in watched.found), watched.found


@pytest.mark.parametrize("name", FINE)
def test_what_a_gpu_does_well_is_let_pass(name: str) -> None:
    x = torch.empty(4, 4, device=META)
    with watching() as watched:
        FINE[name](x)
    assert watched.found == {}


READS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "a value": (1, lambda x: x.sum().item()),
    "a number": (1, lambda x: float(x[0, 0])),
    "a branch": (1, lambda x: 1 if x.sum() > 0 else 0),
    "a list": (1, lambda x: (x @ x).tolist()),
    "an array": (1, lambda x: x.exp().numpy()),
    "a copy, read twice": (1, lambda x: [(host := x.cpu()).tolist(), float(host.sum())]),
    "two of its values": (2, lambda x: [x[0].tolist(), x[1].tolist()]),
    "a mask": (1, lambda x: x[x > 0]),
    "what was written from it": (1, lambda x: torch.empty(4, 4).copy_(x).tolist()),
    "in the backward pass": (1, lambda x: _ReadsBackward.apply(x.requires_grad_()).sum().backward()),
    "nothing": (0, lambda x: (x @ x).softmax(0)),
    "the host's own": (0, lambda x: [*torch.full((4,), 3).tolist(), int(torch.arange(4).sum())]),
    "shapes": (0, lambda x: [len(x), x.shape, x.numel()]),
}


class _ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum())


@pytest.mark.parametrize("name", READS)
def test_reads_are_counted(name: str) -> None:
    wanted, action = READS[name]
    x = torch.randn(4, 4)
    with counted_reads(x) as reads:
        action(x)
    assert reads.count == wanted


@pytest.fixture
def errors_on_waiting() -> Iterator[None]:
    """torch itself then raises where the host waits for the GPU."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the same is shown on meta tensors")
@pytest.mark.usefixtures("errors_on_waiting")
def test_on_a_gpu_no_training_step_waits(form: str, root: Path | None, world: World) -> None:
    name = form.split()[0]
    workload: Workload = load_workload(load_descriptor(name))(configured(name, root, *FORMS[form], device=CUDA))
    torch.manual_seed(0)
    step = step_of(workload, workload.build_model(world).to(CUDA), CUDA)
    batch = batch_of(workload, root, "train", CUDA)
    for _ in range(3):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    window = step(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert window.steps == 1
