"""The weights that training starts from: a file of NumPy arrays, one for each parameter, by its name in the network.

MLPerf's OpenFold starts from a provided checkpoint too. Without one, chance decides when a network leaves lDDT-CA 0.5.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold.config import compute_checkpoint_sha256, find_checkpoint

SETTING = "hyperparameters.init_checkpoint"
_LOADED: dict[Path, str] = {}  # sum of the bytes that this process loaded, which the log states


def compute_loaded_sha256(name: str | None) -> str:
    """Compute the sum of the bytes that this process loaded, else of the file, hexadecimal; empty without a file."""
    if name is None:
        return ""
    return _LOADED.get(find_checkpoint(name)) or compute_checkpoint_sha256(name)


def load_checkpoint(model: nn.Module, name: str) -> None:
    """Give the model the weights of a checkpoint. InputError if the file is no such file, or of another network."""
    path = find_checkpoint(name)
    try:
        content = path.read_bytes()
        arrays = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        weights = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: {SETTING} expects a .npz file of weights ({error})") from error
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in weights.items()}
    if found != expected:
        first = min(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        raise InputError(
            f"{path}: weights of another network: {first} is {found.get(first, 'missing')}, expected "
            f"{expected.get(first, 'none')}; set {SETTING}=null to start from random weights"
        )
    _LOADED[path] = hashlib.sha256(content).hexdigest()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(weights[key])  # load_state_dict warns if the model is on the meta device


def save_checkpoint(model: nn.Module, path: Path) -> None:
    """Write the weights of a model as float32."""
    np.savez_compressed(path, **{key: value.float().numpy() for key, value in model.state_dict().items()})
