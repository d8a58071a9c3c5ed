"""What a rank computes on: its device and its number of threads."""

from __future__ import annotations

import os

import torch

from suite.errors import InputError
from suite.machine.probes.allowance import usable
from suite.world import World


def threads_per_rank(world: World) -> int:
    """OMP_NUM_THREADS if the launcher set it, else the cores this process may use shared among the node's ranks; at least 1."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, usable().cores // world.local_size)


def use_precision(precision: str, device: torch.device) -> None:
    """Let a GPU compute products and convolutions of float32 numbers in TF32 if the config says so, and only then.

    torch's own default is TF32 for convolutions and float32 for products. InputError if the device has no TF32.
    """
    wanted = precision == "tf32"
    if wanted and (
        device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise InputError(
            f"precision tf32: {device.type} here has none; expected an NVIDIA GPU of compute capability 8.0 or more, "
            "or precision=float32"
        )
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted


def pick_device(wanted: str, world: World) -> torch.device:
    """This rank's device: ``auto``, ``cpu`` or ``cuda``. InputError if CUDA is asked for and there is none for this rank."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if world.local_rank >= available and available != 1:
        raise InputError(f"device cuda: local rank {world.local_rank} has no GPU; this node shows {available}")
    device = torch.device("cuda", world.local_rank if available > 1 else 0)  # srun --gpus-per-task shows each rank one
    torch.cuda.set_device(device)
    return device
