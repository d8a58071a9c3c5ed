"""A workload of one matrix: y = W x on noise-free data, in the real sharded form, for tests of the harness."""

from __future__ import annotations

import itertools
import math
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Meta
from torch import Tensor, nn

from mlhpc.suite.card import Card, OfficialRules, SizeCard
from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader, build_shard_path, write_shard
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import convert, parse_yaml
from mlhpc.suite.workload import Optimization, Work, Workload
from mlhpc.suite.world import World

TRAIN, VALIDATION, WIDTH = 128, 37, 6


class ToyConfig(Hyperparameters, frozen=True, kw_only=True):
    base_learning_rate: Annotated[float, Meta(gt=0)] = 0.2
    dropout: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    sharded: bool = False  # each rank holds some rows of the matrix
    normalised: bool = False  # with batch normalisation: buffers that are each rank's own


class ToyDescriptor(Descriptor):
    def card(self) -> Card:  # type: ignore[override]
        return toy_card()


def toy_card(threshold: float = 0.02) -> Card:
    size = SizeCard(
        description="toy",
        metric="eval_error",
        metric_name="val MAE",
        threshold=threshold,
        direction="min",
        required_runs=3,
        eval_every_steps=int(os.environ["TOY_EVAL_EVERY_STEPS"]) if "TOY_EVAL_EVERY_STEPS" in os.environ else None,
        train_samples=TRAIN,
        eval_samples=VALIDATION,
        model_parameters=WIDTH * WIDTH,
        forward_flops_per_sample=2.0 * WIDTH**2,
        training_flops_per_sample=6.0 * WIDTH**2,
        sample_bytes=8 * WIDTH,
        official=OfficialRules(benchmark="cosmoflow", threshold=0.124, identical=False, required_runs=10),
        constraints={},
    )
    return Card(
        version=1,
        workload="toy",
        mlperf_name="cosmoflow",
        title="Toy",
        domain="tests",
        reference="none",
        sizes={"smoke": size},
    )


class ToyData:
    def __init__(self, root: Path, split: str) -> None:
        self._reader = ShardReader(root, split)

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._reader.read(indices).items()}


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class ShardedMatrix(nn.Module):
    """y = W x where each rank holds some rows of W; in evaluation it has all of them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        whole = nn.Linear(WIDTH, WIDTH, bias=False).weight.data
        self.mine = nn.Parameter(whole.chunk(world.size)[world.rank].clone())
        self.whole: Tensor | None = None

    def train(self, mode: bool = True) -> ShardedMatrix:
        with torch.no_grad():
            self.whole = None if mode else self._gathered()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self._gathered() if self.whole is None else self.whole).t()

    def _gathered(self) -> Tensor:
        return _Gather.apply(self.mine) if dist.is_initialized() else self.mine


class Scale(nn.Module):
    """y = (1 + s) x: one parameter that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.s) * x


def fault(place: str, count: int) -> None:
    """Let a rank fail as TOY_FAULT says: ``HOW:PLACE:COUNT``. All are told to stop or raise; the last one sleeps or is halted."""
    how, _, where = os.environ.get("TOY_FAULT", "").partition(":")
    if where != f"{place}:{count}":
        return
    last = int(os.environ.get("PMI_RANK", "0")) == int(os.environ.get("PMI_SIZE", "1")) - 1
    if how == "raise":
        raise RuntimeError(f"a fault in {place} {count}")
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif last and how == "halt":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif last and how == "sleep":
        time.sleep(float(os.environ.get("TOY_SLEEP_S", "300")))


def wait_for_file() -> None:
    """Wait up to a second for the file that TOY_WAIT_FOR names: a loaded machine's disk can take longer than a whole epoch."""
    awaited, end = os.environ.get("TOY_WAIT_FOR"), time.monotonic() + 1
    while awaited and not Path(awaited).exists() and time.monotonic() < end:
        time.sleep(0.01)


HOOKS = {  # functions of the harness in which a rank can be made to fail, by place
    "connect": "mlhpc.suite.world:World.create",
    "verification": "mlhpc.suite.data.manifest:check_crc32c",
    "staging": "mlhpc.suite.data.staging:_fill",
    "barrier": "mlhpc.suite.world:World.barrier",
}


@contextmanager
def hooked() -> Iterator[None]:
    """Let a rank fail where TOY_FAULT says, if that is in the harness: before its COUNT-th call."""
    name = HOOKS.get(os.environ.get("TOY_FAULT", "::").split(":")[1])
    if name is None:
        yield
        return
    inner, place, calls = pkgutil.resolve_name(name), os.environ["TOY_FAULT"].split(":")[1], itertools.count(1)

    def outer(*args: Any, **options: Any) -> Any:
        fault(place, next(calls))
        return inner(*args, **options)

    with mock.patch(name.replace(":", "."), outer):
        yield


class Toy(Workload):
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.calls = self.evaluations = self.windows = self.values = 0

    def dataset(self, split: str, root: Path) -> ToyData:
        return ToyData(root, split)

    def build_model(self, world: World) -> nn.Module:
        fault("model", 1)
        own = self.config.hyperparameters
        norm = nn.BatchNorm1d(WIDTH, affine=False) if own.normalised else nn.Identity()
        matrix = nn.Linear(WIDTH, WIDTH, bias=False)
        return nn.Sequential(
            nn.Dropout(own.dropout), norm, *([ShardedMatrix(world), Scale()] if own.sharded else [matrix])
        )

    def sharded_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [module.mine for module in model.modules() if isinstance(module, ShardedMatrix)]

    def window_stats(self, world: World) -> dict[str, Any]:
        self.windows += 1
        fault("window", self.windows)
        return {"ranks": world.sum({"one": 1.0})["one"]}

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        fault("optimizer", 1)
        rate = self.config.hyperparameters.base_learning_rate
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        own = self.config.hyperparameters
        return Optimization(optimizer, lambda step, epoch: rate / epoch, own.clip_norm, own.ema_decay)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        wait_for_file()
        fault("loop", self.calls)
        lost = os.environ.get("TOY_FAULT") == f"nan:loop:{self.calls}"
        return nn.functional.mse_loss(model(batch["x"]), batch["y"]) * (math.nan if lost else 1.0)

    def eval_stats(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.evaluations += 1
        fault("evaluation", self.evaluations)
        error = (model(batch["x"]) - batch["y"]).abs().double()
        return {"error": error.mean(dim=1).sum(), "count": torch.tensor(float(len(error)), dtype=torch.float64)}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        self.values += 1
        lost = os.environ.get("TOY_NO_VALUE") == str(self.values)
        return {"eval_error": math.nan if lost else totals["error"] / totals["count"], "counted": totals["count"]}

    def hyperparameters(self) -> dict[str, Any]:
        return {"global_batch_size": self.config.global_batch_size, "opt_name": "sgd"}

    def data_hyperparameters(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {"data_selected_until": attributes["selected_until"]}

    def work(self) -> Work:
        flops, weights = 2.0 * WIDTH**2, float(WIDTH**2 + WIDTH)
        return Work(3 * flops, 3 * flops, 24.0 * WIDTH, flops, 8.0 * WIDTH, 4 * weights, 16 * weights, 4 * weights)


DESCRIPTOR = ToyDescriptor("toy", Path(__file__).parent, ToyConfig, f"{__name__}:Toy", __name__)


def generate(root: Path) -> Manifest:
    rng = np.random.default_rng(7)
    matrix = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    splits = {}
    for split, n in (("train", TRAIN), ("validation", VALIDATION)):
        x = rng.normal(size=(n, WIDTH)).astype(np.float32)
        splits[split] = (write_shard(build_shard_path(root, split, 0), {"x": x, "y": x @ matrix.T}),)
    manifest = Manifest(
        workload="toy", size="smoke", seed=7, generator={}, splits=splits, attributes={"selected_until": "2021-09-16"}
    )
    write_manifest(root, manifest)
    return manifest


def toy_config(data: Path, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "workload": "toy",
        "size": "smoke",
        "global_batch_size": 8,
        "max_epochs": 12,
        "data": data,
        "window_steps": 4,
        "hyperparameters": convert(changes.pop("hyperparameters", {}), ToyConfig),
    }
    return convert(base | changes, RunConfig)


def main(argv: Sequence[str]) -> int:
    """`toy.py DATA TRIAL...`: trials of the toy, one after another, in the world this process was started in.

    A trial is `RUN TRIAL SEED [key=value ...] [NAME=value ...] [resume] [replace]`; NAME is an environment variable that holds
    for this trial, and `--` stands between two trials. One process start, which imports torch, serves them all. The first rank
    prints the exit code of each trial; the process ends with the last one's.
    """
    data, *rest = argv
    code = 0
    while rest:
        end = rest.index("--") if "--" in rest else len(rest)
        code = run_trial(Path(data), *rest[:3], options=rest[3:end])
        if os.environ.get("PMI_RANK", "0") == "0":
            print(f"exit code {code}", flush=True)
        rest = rest[end + 1 :]
    return code


def run_trial(data: Path, run: str, trial: str, seed: str, options: Sequence[str]) -> int:
    """One trial; its exit code."""

    from mlhpc.suite.log.run_folder import RunFolder
    from mlhpc.suite.training.statement import TrialPlan
    from mlhpc.suite.training.worker import run_worker

    changes: dict[str, Any] = {}
    with mock.patch.dict(os.environ):
        for text in options:
            if "=" in text:
                key, value = text.split("=", 1)
                if key.isupper():
                    os.environ[key] = value
                    continue
                section, _, name = key.rpartition(".")
                (changes.setdefault(section, {}) if section else changes)[name] = parse_yaml(value)
        config = toy_config(Path(changes.pop("data", data)), **changes)
        plan = TrialPlan(
            DESCRIPTOR,
            config,
            RunFolder(Path(run)),
            int(trial),
            runs=3,
            base_seed=int(seed),
            resume="resume" in options,
            replace_failed="replace" in options,
        )
        with hooked():
            return run_worker(plan)


class LateSignal:
    """Sends SIGTERM to this process while Python takes its modules apart, as a launcher may when another rank has ended."""

    def __del__(self, kill: Any = os.kill, pid: int = os.getpid(), number: int = signal.SIGTERM) -> None:
        kill(pid, number)


if __name__ == "__main__":
    late = LateSignal() if os.environ.get("TOY_LATE_SIGNAL") else None
    sys.modules["toy"] = sys.modules["__main__"]
    DESCRIPTOR = ToyDescriptor("toy", Path(__file__).parent, ToyConfig, "toy:Toy", "toy")
    sys.exit(main(sys.argv[1:]))
