"""Training steps of the public reference codes and of ours on the same inputs, in interleaved blocks, one thread each.

    MLHPC_REFERENCES=DIR python benchmarks/reference_steps.py [WORKLOAD ...] [--blocks 12] [--steps 4] [--data ROOT]
                                                             [--precision float32] [--device cpu]

DIR has clones as `make test-reference` wants them, and microsoft/Swin-Transformer for SwinV2-MoE. A reference whose packages (Tutel
for SwinV2-MoE) are not in our environment runs in another Python of MLHPC_REFERENCE_PYTHONS (separated as in PATH).
ROOT/open_catalyst-mini are OpenCatalyst's data.

A step is: gradients to none, forward pass, loss, backward pass, clipping where the workload clips, optimizer. Inputs lie in
memory; weights are random, drawn by each code, and of the same number. Both take the optimizer of the reference where it runs on
a CPU: AdamW for DeepCAM, whose LAMB is of NVIDIA's apex. The references run in float32, on a GPU with torch's default of TF32
convolutions; --precision is that of our steps. With --device cuda samples are larger, and CosmoFlow is left out (TensorFlow).
Each code runs in a process of its own, as its authors set it up, ours with the settings that the harness chooses. Exactness is
what `make test-reference` compares; SwinV2-MoE's block gets our weights, and is measured only if its output is ours.

Printed: median CPU-ms per step of each (on a GPU ms of a block that ends when the device is done), and the median over pairs of
blocks of theirs / ours with the least and the largest.
A subject that cannot run here is named with the reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from references import find_clone

ROOT = Path(__file__).resolve().parent.parent
RATE = 1e-6  # of learning, in both: weights stay where they are
Step = Callable[[], object]
OPEN = ExitStack()  # until the process ends
NEEDS = {  # packages of a reference, beside numpy
    "cosmoflow": ("tensorflow", "keras"),
    "deepcam": ("torch",),
    "open_catalyst": ("torch", "torch_geometric", "lmdb"),
    "openfold": ("torch", "Bio"),
    "swinv2_moe": ("torch", "tutel"),
}
CLONES = {"swinv2_moe": "microsoft/Swin-Transformer"}  # of the others: mlcommons/hpc
MAX_DIFFERENCE = 1e-4  # of the block's output in float32, over its largest value
# One block with experts, as Tutel's code has it: its load loss is of another kind than ours, and noise would be drawn
BLOCK = [
    f"hyperparameters.{each}"
    for each in ("depths=[1,1,2,1]", "moe_stages=[3]", "drop_path=0.0", "moe.gate_noise=0.0", "moe.balance=gshard")
] + ["hyperparameters.moe.expert_parallel=false"]
SIZES = {  # the size whose network is compared, and how large a sample is
    "cosmoflow": ("full", 4, ["hyperparameters.input_size=64"], "64^3 voxels of 128^3"),
    "deepcam": (
        "full",
        2,
        [f"hyperparameters.{each}" for each in ("height=96", "width=144", "optimizer=AdamW")],
        "96 x 144 pixels of 768 x 1152",
    ),
    "open_catalyst": (
        "full",
        8,
        [f"hyperparameters.{each}" for each in ("cutoff_angstrom=4.5", "max_neighbours=20")],
        "frames of about 13 atoms",
    ),
    "openfold": (
        "full",
        1,
        [
            f"hyperparameters.{each}"
            for each in ("crop_size=48", "max_msa_clusters=16", "max_extra_msa=32", "max_templates=2")
        ]
        + [f"hyperparameters.{each}" for each in ("evoformer_blocks=2", "extra_msa_blocks=1", "num_recycling_iters=0")],
        "two blocks of 48, crops of 48 residues of 256",
    ),
    "swinv2_moe": ("full", 4, BLOCK, "a block with 32 experts, 12 x 12 tokens of width 512"),
}

SIZES_ON_GPU = {
    "deepcam": ("full", 2, ["hyperparameters.optimizer=AdamW"], "768 x 1152 pixels"),
    "open_catalyst": ("full", 16, SIZES["open_catalyst"][2], "frames of about 13 atoms"),
    "openfold": (
        "full",
        1,
        [
            f"hyperparameters.{each}"
            for each in ("crop_size=128", "max_msa_clusters=64", "max_extra_msa=128", "max_templates=2")
        ]
        + [f"hyperparameters.{each}" for each in ("evoformer_blocks=8", "extra_msa_blocks=2", "num_recycling_iters=0")],
        "eight blocks of 48, crops of 128 residues of 256",
    ),
    "swinv2_moe": ("full", 64, BLOCK, SIZES["swinv2_moe"][3]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--data", type=Path, default=os.environ.get("MLHPC_DATA", "data"))
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32", help="of our steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker", nargs=2, metavar=("CODE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = sizes_of(args)
    args.workloads = args.workloads or [*sizes]
    for name in args.workloads:
        if name not in sizes:
            parser.error(f"{name}: expected {', '.join(sizes)}")
    if args.worker:
        code, folder = args.worker
        make = globals().get(f"{code}_{args.workloads[0]}", ours)
        serve(make(args, Path(folder)), args.steps, args.device)
        return 0
    print(
        f"one thread each, {args.blocks} pairs of blocks of {args.steps} steps, load average {os.getloadavg()[0]:.1f}"
    )
    unit = "CPU-ms" if args.device == "cpu" else "ms"
    print(f"{'':14} {'samples':>7}  {f'theirs, {unit}':>15} {f'ours, {unit}':>15}  theirs / ours (range)")
    missing = 0
    for name in args.workloads:
        try:
            print(compared(args, name), flush=True)
        except (OSError, RuntimeError) as error:
            missing += 1
            print(f"{name:14} not measured: {error}", flush=True)
    return 1 if missing else 0


def sizes_of(args: argparse.Namespace) -> dict[str, tuple[str, int, list[str], str]]:
    """What is compared on the device: size, samples, overrides, extent."""
    return SIZES if args.device == "cpu" else SIZES_ON_GPU


def compared(args: argparse.Namespace, name: str) -> str:
    """A line of the table. RuntimeError with the reason if there is none."""
    repository = CLONES.get(name, "mlcommons/hpc")
    found = find_clone(repository)
    if found is None:
        raise RuntimeError(f"no clone of github.com/{repository} in MLHPC_REFERENCES")
    size, samples, _, extent = sizes_of(args)[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "clone").symlink_to(found.resolve())
        workers = [Worker(args, "ours", name, sys.executable, folder)]
        try:
            workers.append(Worker(args, "theirs", name, python_with(NEEDS[name]), folder))
            ours, theirs = workers
            if ours.parameters != theirs.parameters:
                raise RuntimeError(f"{ours.parameters} parameters, but {theirs.parameters} in the reference")
            pairs = []
            for block in range(args.blocks):
                times = {each: each.block() for each in (workers if block % 2 else workers[::-1])}
                pairs.append((times[theirs], times[ours]))
        finally:
            for each in workers:
                each.end()
    texts = []
    for column in zip(*pairs, strict=True):
        ms = [1e3 * each / args.steps for each in column]
        texts.append(f"{statistics.median(ms):9.1f} ± {statistics.stdev(ms):.1f}")
    ratios = [a / b for a, b in pairs]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(ratios)})"
    about = f"{size}, {extent}; {ours.parameters:,} parameters; ours: {args.precision}, {ours.chosen or 'as shipped'}"
    about += f"; {theirs.chosen}" if theirs.chosen else ""
    return f"{name:14} {samples:7}  {texts[0]:>15} {texts[1]:>15}  {ratio}   {about}"


def python_with(packages: tuple[str, ...]) -> str:
    """Our Python, or the first of MLHPC_REFERENCE_PYTHONS, that imports all packages."""
    for python in (sys.executable, *filter(None, os.environ.get("MLHPC_REFERENCE_PYTHONS", "").split(os.pathsep))):
        check = (
            "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(each) is None for each in sys.argv[1:]))"
        )
        if subprocess.run([python, "-c", check, *packages], capture_output=True).returncode == 0:
            return python
    raise RuntimeError(f"no Python in MLHPC_REFERENCE_PYTHONS has {', '.join(packages)}")


class Worker:
    """One code in a process of its own."""

    def __init__(self, args: argparse.Namespace, code: str, name: str, python: str, folder: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        quiet = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        options = ["--steps", str(args.steps), "--data", str(args.data), "--precision", args.precision]
        options += ["--device", args.device, "--worker", code, folder]
        self._log = Path(folder, f"{code}.txt")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, __file__, name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
        ready = self._answer()
        self.parameters, self.chosen = ready["parameters"], ready["chosen"]

    def block(self) -> float:
        """Seconds of a block of steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("block\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def end(self) -> None:
        """Ask it to end, and wait."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                found: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return found
        last = self._log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(last[-1] if last else f"its process ended with {self._process.wait()}")


def serve(made: tuple[Step, int, str], steps: int, device: str) -> None:
    """Warm up, then answer each line of stdin with the seconds of a block: of CPU time, or until the GPU is done."""
    step, parameters, chosen = made
    for _ in range(3):
        step()
    clock = time.process_time if device == "cpu" else read_gpu_clock
    clock()
    print("answer", json.dumps({"parameters": parameters, "chosen": chosen}), flush=True)
    for _ in sys.stdin:
        begin = clock()
        for _ in range(steps):
            step()
        print("answer", json.dumps({"seconds": clock() - begin}), flush=True)


def read_gpu_clock() -> float:
    """Read the wall clock when the GPU has nothing left to do."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def torch_step(model: Any, optimizer: Any, loss: Callable[[], Any], clip: Callable[[], object] | None) -> Step:
    """A step of a torch model."""
    for group in optimizer.param_groups:
        group["lr"] = RATE

    def step() -> object:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        if clip is not None:
            clip()
        optimizer.step()
        return value.detach()  # on the device: no code waits for it in a step

    model.train()
    return step


def count(model: Any) -> int:
    """Trainable parameters of a torch model."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def ours(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """Our step, set up as the harness does. What the reference's worker needs is written to the folder."""
    import torch
    from block import open_workload

    from mlhpc.suite.machine.choice.chooser import make_chooser
    from mlhpc.suite.training.loop import make_autocast
    from mlhpc.suite.training.parallel.clipping import Clipping
    from mlhpc.suite.world import World

    name, world = args.workloads[0], World.create(None)
    size, samples, overrides, _ = sizes_of(args)[name]
    fixed = [f"precision={args.precision}", f"global_batch_size={samples}", f"device={args.device}"]
    workload, config = open_workload(name, size, [*fixed, *overrides], world)
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = workload.build_model(world).to(device)
    chooser = make_chooser(config, world, device)
    workload.choose(model, chooser)
    batch, given = INPUTS[name](workload, samples, args.data, folder)
    batch = {key: value.to(device) for key, value in batch.items()}
    optimization = workload.build_optimizer(model, 1000)
    norm = optimization.clip_norm
    torch.save(given | {"clip": norm}, folder / "given.pt")
    clip = None if norm is None else Clipping(model, (), norm)

    def loss() -> Any:
        with make_autocast(config, device):
            return workload.loss(model, batch)

    step = torch_step(model, optimization.optimizer, loss, clip)
    return step, count(model), ", ".join(str(choice.value) for choice in chooser.choices.values())


def inputs_cosmoflow(workload: Any, samples: int, data: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts of particles as the data set stores them; the reference's pipeline gives their logarithms."""
    settings = workload.config.hyperparameters
    import numpy as np
    import torch

    random = np.random.default_rng(0)
    x = random.poisson(1.0, (samples, *3 * [settings.input_size], 4)).astype(np.int16)
    y = random.uniform(-1, 1, (samples, 4)).astype(np.float32)
    np.savez(folder / "inputs.npz", x=np.log1p(x.astype(np.float32)), y=y)
    model = {
        "name": "cosmoflow",
        "input_shape": list(x.shape[1:]),
        "target_size": 4,
        "conv_size": settings.conv_channels[0],
        "n_conv_layers": len(settings.conv_channels),
        "l2": settings.l2,
        "dropout": settings.dropout,
    }
    (folder / "model.json").write_text(json.dumps(model))
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, {}


def theirs_cosmoflow(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """Keras's own training step."""
    import numpy as np

    from tests.reference.cosmoflow_code import load

    code = load(str(folder / "clone" / "cosmoflow"))
    found = np.load(folder / "inputs.npz")
    x, y = found["x"], found["y"]
    model = code.network(**json.loads((folder / "model.json").read_text()))
    model.compile(optimizer=code.optimizer("SGD", momentum=0.9), loss="mse", metrics=["mean_absolute_error"])
    model.optimizer.learning_rate = RATE
    return lambda: float(model.train_on_batch(x, y)[0]), model.count_params(), ""


def inputs_deepcam(workload: Any, samples: int, data: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random fields and classes."""
    settings = workload.config.hyperparameters
    import torch

    x = torch.rand(samples, settings.height, settings.width, 16)
    y = torch.randint(3, (samples, settings.height, settings.width))
    return {"x": x, "y": y.to(torch.uint8)}, {"x": x.permute(0, 3, 1, 2).contiguous(), "y": y}


def theirs_deepcam(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """The network and loss of the reference."""
    import torch

    from mlhpc.workloads.deepcam.config import LOSS_WEIGHTS

    given = torch.load(folder / "given.pt")
    sys.path.insert(0, str(folder / "clone" / "deepcam" / "src" / "deepCam"))
    from architecture.deeplab_xception import DeepLabv3_plus
    from utils.losses import FPLoss

    x, y = given["x"].to(args.device), given["y"].to(args.device)
    model = DeepLabv3_plus(x.shape[1], 3, _print=False).to(args.device)
    height, width = x.shape[2:]
    model.bottleneck.tiles = (1, 1, -(-height // 16), -(-width // 16))  # of 1152 x 768 pixels there
    criterion, optimizer = FPLoss(LOSS_WEIGHTS).to(args.device), torch.optim.AdamW(model.parameters())
    return torch_step(model, optimizer, lambda: criterion(model(x), y), None), count(model), ""


def inputs_open_catalyst(
    workload: Any, samples: int, data: Path, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Frames of the data set, exported for the reference's loader."""
    settings = workload.config.hyperparameters
    from tests.fixtures.export_open_catalyst import export_lmdb

    root, numbers = data / "open_catalyst-mini", [7 * each for each in range(samples)]
    export_lmdb(root, folder / "lmdb")
    shape = {
        "hidden_channels": settings.hidden_channels,
        "out_emb_channels": settings.output_channels,
        "num_blocks": settings.blocks,
        "int_emb_size": settings.triplet_channels,
        "basis_emb_size": settings.basis_channels,
        "num_spherical": settings.num_spherical,
        "num_radial": settings.num_radial,
        "cutoff": settings.cutoff_angstrom,
        "envelope_exponent": settings.envelope_exponent,
        "num_before_skip": settings.before_skip,
        "num_after_skip": settings.after_skip,
        "num_output_layers": settings.output_layers,
    }
    return workload.dataset("train", root).load(numbers, seed=0, epoch=1), {
        "shape": shape,
        "samples": numbers,
        "std": settings.target_std_ev,
    }


def theirs_open_catalyst(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """The reference's loss of free atoms' forces."""
    import torch

    from tests.reference.open_catalyst_code import load, network

    given, code = torch.load(folder / "given.pt"), load(folder / "clone")
    model, data = network(code, given["shape"]), code.data_set({"src": str(folder / "lmdb" / "train")})
    model, batch = model.to(args.device), code.collate([data[number] for number in given["samples"]]).to(args.device)
    free = batch.fixed == 0
    target = batch.force[free] / given["std"]

    def loss() -> Any:
        _, forces = model(batch)
        return 50 * code.loss(forces[free], target)

    return torch_step(model, torch.optim.AdamW(model.parameters()), loss, None), count(model), ""


def inputs_openfold(workload: Any, samples: int, data: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A protein of the generator."""
    settings = workload.config.hyperparameters
    import numpy as np
    import torch

    from mlhpc.workloads.openfold.features import build_sample
    from mlhpc.workloads.openfold.proteins import Families, make_proteins

    length = settings.crop_size
    proteins = make_proteins(Families(length, length, 24, max(1, settings.max_templates)), 8, range(samples))
    random = np.random.default_rng(2)
    arrays = [build_sample(each, settings, random, length=length, training=True) for each in proteins]
    batch = {name: torch.stack([torch.from_numpy(np.asarray(each[name])) for each in arrays]) for name in arrays[0]}
    batch.setdefault("resolution", torch.full((samples,), 2.0))
    return batch, {"batch": batch}


def theirs_openfold(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """The reference's network of our widths, its loss and its clipping."""
    import importlib
    from types import SimpleNamespace

    import torch

    from mlhpc.suite.config import load_config
    from mlhpc.suite.descriptor import load_descriptor
    from tests.reference.openfold_code import openfold_code
    from tests.reference.openfold_inputs import their_batch, their_net

    given = torch.load(folder / "given.pt")
    size, _, overrides, _ = sizes_of(args)["openfold"]
    settings: Any = load_config(load_descriptor("openfold"), size, overrides).hyperparameters
    names = ("config", "loss", "model.alphafold", "data.transforms", "data.residue_constants")
    OPEN.enter_context(openfold_code(folder / "clone"))  # it imports more when it is called
    code = SimpleNamespace(**{each.rpartition(".")[2]: importlib.import_module(f"openfold.{each}") for each in names})
    model = their_net(code, settings).to(args.device)
    features = {key: value.to(args.device) for key, value in their_batch(code, given["batch"]).items()}
    criterion, last = code.loss.AlphaFoldLoss(code.config.LossConfig()), {k: v[..., -1] for k, v in features.items()}
    clip = given["clip"]
    return (
        torch_step(
            model,
            torch.optim.Adam(model.parameters()),
            lambda: criterion(model(features), last)[0],
            None if clip is None else lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), clip),
        ),
        count(model),
        "",
    )


def ours_swinv2_moe(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """Our block with experts. The reference's worker gets its weights, input and output."""
    import torch
    from block import open_workload
    from torch import nn

    from mlhpc.suite.machine.choice.chooser import make_chooser
    from mlhpc.suite.training.loop import make_autocast
    from mlhpc.suite.world import World
    from mlhpc.workloads.moe.layer import MoELayer
    from mlhpc.workloads.swinv2_moe.model import SwinBlock

    world, device = World.create(None), torch.device(args.device)
    size, samples, overrides, _ = sizes_of(args)["swinv2_moe"]
    fixed = [f"precision={args.precision}", f"global_batch_size={samples}", f"device={args.device}"]
    workload, config = open_workload("swinv2_moe", size, [*fixed, "instrumentation=false", *overrides], world)
    settings: Any = config.hyperparameters
    torch.manual_seed(0)
    model: Any = workload.build_model(world).to(device)
    chooser = make_chooser(config, world, device)
    workload.choose(model, chooser)
    block: Any = next(
        each for each in model.modules() if isinstance(each, SwinBlock) and isinstance(each.ffn, MoELayer)
    )
    # Norms of weight one: with those of a run, zero, the block would begin as the identity.
    nn.init.ones_(block.attention_norm.weight)
    nn.init.ones_(block.ffn_norm.weight)
    shape = next(each for each in settings.blocks() if each.experts is not None)
    x_NRRC = torch.randn(samples, shape.resolution, shape.resolution, shape.width, device=device)
    gradient = torch.randn_like(x_NRRC)
    block.train()
    with torch.no_grad():
        y_NRRC, auxiliary = block(x_NRRC)
    given = {
        "shape": {key: value for key, value in vars(shape).items() if key != "experts"},
        "experts": {key: getattr(shape.experts, key) for key in ("experts", "top_k", "capacity_factor", "hidden")},
        "weights": block.state_dict(),
        "tensors": (x_NRRC, gradient, y_NRRC, auxiliary / shape.experts.balance_coefficient),
        "coefficient": shape.experts.balance_coefficient,
        "clip": settings.clip_norm,
    }
    torch.save(given, folder / "given.pt")

    def loss() -> Any:
        with make_autocast(config, device):
            y, auxiliary = block(x_NRRC)
            return (y.float() * gradient).sum() + auxiliary

    clip = partial(nn.utils.clip_grad_norm_, block.parameters(), settings.clip_norm)
    step = torch_step(block, torch.optim.AdamW(block.parameters(), fused=True), loss, clip)
    return step, count(block), ", ".join(str(choice.value) for choice in chooser.choices.values())


def theirs_swinv2_moe(args: argparse.Namespace, folder: Path) -> tuple[Step, int, str]:
    """SwinV2's block with the MoE layer of Swin-MoE, which is Tutel's. RuntimeError if its output is not ours."""
    import torch
    import torch.distributed as dist
    from torch import nn

    given = torch.load(folder / "given.pt", map_location=args.device)
    shape, moe = given["shape"], given["experts"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the layer asks for the rank
    v2, swin_moe = (load_swin(folder / "clone" / "models" / f"swin_transformer_{each}.py") for each in ("v2", "moe"))

    class WithLoss(nn.Module):
        """The layer in place of a dense FFN, which returns one tensor; keeps the balance loss."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = swin_moe.MoEMlp(
                shape["width"], moe["hidden"], moe["experts"], moe["top_k"], moe["capacity_factor"], gate_noise=0.0
            )
            self.loss: Any = None

        def forward(self, x: Any) -> Any:
            y, self.loss = self.layer(x)
            return y

    side = shape["resolution"]
    block = v2.SwinTransformerBlock(shape["width"], (side, side), shape["heads"], shape["window"], shape["shift"])
    block.mlp = WithLoss()
    block.to(args.device)
    copy_swin_weights(block, given["weights"])
    x_NRRC, gradient, wanted, wanted_loss = given["tensors"]
    x_NTC = x_NRRC.flatten(1, 2)
    block.train()
    with torch.no_grad():
        y = block(x_NTC).view_as(wanted)
    apart = float((y - wanted).abs().max() / wanted.abs().max())
    losses_apart = abs(float(block.mlp.loss) / float(wanted_loss) - 1)
    if max(apart, losses_apart) > MAX_DIFFERENCE:
        raise RuntimeError(f"with the same weights outputs differ by {apart:.1e}, balance losses by {losses_apart:.1e}")

    def loss() -> Any:
        y = block(x_NTC).view_as(gradient)
        return (y * gradient).sum() + given["coefficient"] * block.mlp.loss

    clip = partial(nn.utils.clip_grad_norm_, block.parameters(), given["clip"])
    step = torch_step(block, torch.optim.AdamW(block.parameters(), fused=True), loss, clip)
    return step, count(block), f"outputs differ by {apart:.1e}"


def load_swin(path: Path) -> Any:
    """Load a module of the clone. Of timm it needs three functions, which are put in their place."""
    import importlib.util
    from types import ModuleType

    from torch import nn

    layers: Any = ModuleType("timm.models.layers")
    layers.DropPath, layers.trunc_normal_ = nn.Identity, nn.init.trunc_normal_
    layers.to_2tuple = lambda value: (value, value)
    sys.modules |= {"timm": ModuleType("timm"), "timm.models": ModuleType("timm.models"), layers.__name__: layers}
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_swin_weights(block: Any, weights: dict[str, Any]) -> None:
    """Copy our block's weights to the reference's."""
    import torch

    layer, attention = block.mlp.layer._moe_layer, block.attn
    places = {
        "attention.log_scale_A11": attention.logit_scale,
        "attention.q_bias": attention.q_bias,
        "attention.v_bias": attention.v_bias,
        "attention.qkv.weight": attention.qkv.weight,
        "attention.position_bias.hidden.weight": attention.cpb_mlp[0].weight,
        "attention.position_bias.hidden.bias": attention.cpb_mlp[0].bias,
        "attention.position_bias.out.weight": attention.cpb_mlp[2].weight,
        "ffn.router.gate.weight": layer.gates[0].wg.weight,
        "ffn.experts.up_EHD": layer.experts.batched_fc1_w,
        "ffn.experts.down_EHD": layer.experts.batched_fc2_w,
        "ffn.experts.up_bias_EH": layer.experts.batched_fc1_bias,
        "ffn.experts.down_bias_ED": layer.experts.batched_fc2_bias,
    }
    for ours, theirs in (("attention.out", attention.proj), ("attention_norm", block.norm1), ("ffn_norm", block.norm2)):
        places |= {f"{ours}.{name}": parameter for name, parameter in theirs.named_parameters()}
    if {id(each) for each in places.values()} != {id(each) for each in block.parameters()}:
        raise RuntimeError("the reference has other parameters than expected")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(weights[name].view_as(place))


INPUTS = {name: found for name in SIZES if (found := globals().get(f"inputs_{name}"))}

if __name__ == "__main__":
    sys.exit(main())
