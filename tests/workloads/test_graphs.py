"""Training with its passes captured and replayed gives the bits of training without, in every workload that supports it."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from benchmarks.block import Fixed
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.cuda_graphs import WARM_UPS
from mlhpc.suite.training.loop import Trainer
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from tests.fixtures.recorded_graph import record
from tests.workloads.tiny import TINY

CPU = torch.device("cpu")
STEPS, BATCH = 12, 2
# As on a GPU: the back end that does not read the load on the host, in bfloat16
EXPERTS = ("precision=bfloat16", "hyperparameters.moe.backend=grouped_mm")
CAPACITY = ("hyperparameters.moe.dispatch=capacity", "hyperparameters.moe.capacity_factor=1.25")
FORMS: dict[str, tuple[str, ...]] = {
    "cosmoflow": (),
    "deepcam": (),
    "openfold, of two shapes": ("hyperparameters.num_recycling_iters=1",),
    "swinv2_moe": (*EXPERTS, "hyperparameters.drop_path=0.3"),
    "swinv2_moe, capacity": (*EXPERTS, *CAPACITY),
    "moe_lm": (*EXPERTS, "hyperparameters.context=32"),
    "moe_lm, bias": (*EXPERTS, "hyperparameters.context=32", "hyperparameters.moe.balance=bias"),
}


@dataclass(frozen=True)
class Repeated:
    """A data set's samples again and again; without one, bytes."""

    data: Any
    samples: int

    def __len__(self) -> int:
        return self.samples

    def load(self, indices: Any, *, seed: int, epoch: int) -> Mapping[str, Tensor]:
        if self.data is not None:
            return dict(self.data.load([each % len(self.data) for each in indices], seed=seed, epoch=epoch))
        generator = torch.Generator().manual_seed(0)
        every = torch.randint(0, 256, (self.samples, 33), generator=generator, dtype=torch.uint8)
        return {"bytes": every[torch.as_tensor(list(indices))]}


@dataclass(frozen=True)
class Trained:
    """What a training left: logged values by key, and the state's tensors."""

    logged: dict[str, list[Any]]
    tensors: dict[str, Tensor]
    replays: int


def train(
    name: str, root: Path | None, settings: tuple[str, ...], folder: Path, *, graphs: bool, standing_in: bool = True
) -> Trained:
    """Train two epochs of six steps, each with an evaluation."""
    fitting = TINY[name].overrides(read_manifest(root).attributes) if root is not None else ()
    fitting = [each for each in fitting if "backend" not in each]
    stated = [f"global_batch_size={BATCH}", "max_epochs=2", "window_steps=4", f"graphs={str(graphs).lower()}"]
    config: RunConfig = load_config(load_descriptor(name), "smoke", [*fitting, *stated, *settings])
    world, replays = World.create(None), 0
    workload: Workload = load_workload(load_descriptor(name))(config)
    torch.manual_seed(5)
    state = TrainingState.create(workload, workload.build_model(world), STEPS // 2, seed=5)
    splits = [None if root is None else workload.dataset(split, root) for split in ("train", "validation")]
    plan = TrialPlan(load_descriptor(name), config, RunFolder(folder), trial=0)

    def capture(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, replay = record(work)

        def counted() -> None:
            nonlocal replays
            replays += 1
            replay()

        return result, counted

    with closing(EventLog(folder / f"{graphs}.txt")) as log:
        trainer = Trainer(
            plan=plan, workload=workload, world=world, device=CPU, state=state,
            data=Fixed(Repeated(splits[0], STEPS // 2 * BATCH), Repeated(splits[1], 3)), log=log,
            checkpoint=Checkpoint(plan.folder.checkpoint(0), {}),
            capture=capture if standing_in else None,
        )  # fmt: skip
        trainer.size_card = structs.replace(trainer.size_card, eval_every_steps=None)
        trainer.target = structs.replace(trainer.target, threshold=-1.0 if trainer.target.direction == "min" else 1e9)
        torch.manual_seed(7)  # dropout
        trainer.run(Position(1, 0))
    events = read_events(folder / f"{graphs}.txt").events
    logged = {
        key: [each for each in events if each.key == key] for key in ("first_losses", "step_phases", "window_stats")
    }
    tensors = {f"model {key}": each for key, each in state.model.state_dict().items()}
    tensors |= {f"{key} {part}": each for key, parts in state.moments().items() for part, each in parts.items()}
    return Trained(
        {
            "first losses": [each.value for each in logged["first_losses"]],
            "losses of windows": [each.metadata["loss"] for each in logged["step_phases"]],
            "metric": [each.metadata for each in events if each.key == trainer.target.metric],
            "loads": [each.value.get("load") for each in logged["window_stats"]],
        },
        tensors,
        replays,
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", FORMS)
def test_replayed_passes_give_the_same_bits(form: str, made_once: Callable[[str], Path], tmp_path: Path) -> None:
    name = form.split(",")[0]
    root = made_once(name) if name in TINY else None
    plain, replayed = (train(name, root, FORMS[form], tmp_path, graphs=graphs) for graphs in (False, True))
    shapes = 2 if "two shapes" in form else 1
    assert (plain.replays, replayed.replays) == (0, STEPS - shapes * WARM_UPS)
    assert len(plain.logged["first losses"][0]) == STEPS
    assert len(set(plain.logged["first losses"][0])) > STEPS // 2  # otherwise a loss of another step would not be seen
    assert replayed.logged == plain.logged
    assert replayed.tensors.keys() == plain.tensors.keys()
    for key, value in plain.tensors.items():
        assert torch.equal(replayed.tensors[key], value), key


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (EXPERTS, None),
        ((*EXPERTS, *CAPACITY), None),
        (("precision=bfloat16", "hyperparameters.moe.backend=triton"), None),
        (("precision=bfloat16",), None),  # auto, not measured
        (("precision=float32",), "the experts' back end loop, bmm to 1.5 reads their load"),
        (EXPERTS[1:], "the experts' back end grouped_mm reads their load"),
        (("precision=bfloat16", "hyperparameters.moe.backend=bmm"), "the experts' back end bmm reads their load"),
        (("hyperparameters.moe.backend=bmm", *CAPACITY), None),
        ((*EXPERTS, CAPACITY[0], "hyperparameters.moe.capacity_factor=0"), "capacity_factor 0 makes the host read"),
    ],
)
def test_experts_whose_load_the_host_reads_are_no_graph(sets: tuple[str, ...], wanted: str | None) -> None:
    workload: Workload = load_workload(load_descriptor("moe_lm"))(load_config(load_descriptor("moe_lm"), "smoke", sets))
    found = workload.find_graph_problem(workload.build_model(World.create(None)))
    assert found is None if wanted is None else found is not None and found.startswith(wanted)


def test_without_a_gpu_graphs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^graphs is true, but this run has no GPU: give --set graphs=false$"):
        train("moe_lm", None, FORMS["moe_lm"], tmp_path, graphs=True, standing_in=False)
