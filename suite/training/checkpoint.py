"""The checkpoint of a trial: training between two optimizer steps, so that the continuation has the same losses.

``trial_<i>.pt`` holds what is the same on every rank, and names the files of what each rank has of its own (buffers,
its share of sharded parameters with their optimizer state, random state): one file per node,
``trial_<i>.<token>.node<n>``, in which every rank has a range. ``trial_<i>.pt`` gets its name after all of these are on
the disk: a crash at any moment leaves the former checkpoint whole, or none. suite.training.saver decides when to write
one and writes it in the background.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import google_crc32c
import numpy as np
import torch

from suite.errors import InputError
from suite.files import force_to_disk
from suite.training.parallel.mesh import Mesh
from suite.training.parallel.places import Place
from suite.training.state import Position, TrainingState
from suite.world import World

CHECKPOINT_VERSION = 6
TOKEN_BYTES = 4
Ranges = list[dict[str, int]]  # per rank: node, offset, bytes and crc32c of its own state


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of what this rank writes; ``shared`` on rank 0 only.

    ``bytes``: of all ranks' own states.
    """

    path: Path
    token: str
    own: bytes
    node: int
    offset: int
    bytes: int
    shared: dict[str, Any] | None

    def write(self) -> None:
        """Write this rank's part under a name that no checkpoint has yet, and force it to the disk.

        OSError names the file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _named(_node_path(self.path, self.token, self.node)) as path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                view, offset = memoryview(self.own), self.offset
                while view:
                    count = os.pwrite(file, view, offset)
                    view, offset = view[count:], offset + count
                os.fsync(file)
            finally:
                os.close(file)
        if self.shared is not None:
            with _named(self._unfinished) as path:
                with path.open("wb", buffering=0) as raw:
                    torch.save(self.shared, cast(IO[bytes], _Whole(raw)))
                    os.fsync(raw.fileno())
                force_to_disk(path.parent)

    def commit(self) -> int:
        """Make it the trial's checkpoint: on rank 0, after every rank has written.

        Returns the bytes of all its files.
        """
        with _named(self._unfinished) as path:
            size = path.stat().st_size
            path.replace(self.path)
            force_to_disk(self.path.parent)
        return size + self.bytes

    def discard(self) -> None:
        """Remove this rank's part of a checkpoint that did not come about."""
        for path in (_node_path(self.path, self.token, self.node), self._unfinished):
            with suppress(OSError):
                path.unlink()

    @property
    def _unfinished(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.{self.token}.shared")


@dataclass(frozen=True)
class Restored:
    """What `Checkpoint.load` found: where training stands and on how many ranks it was.

    ``rederived`` names what could not be restored on another number of ranks and was made anew.
    """

    position: Position
    ranks: int
    rederived: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one trial. ``identity``: what must be equal for another run to continue from it."""

    path: Path
    identity: Mapping[str, Any]
    mesh: Mesh | None = None  # None: every rank trains on samples of its own

    def snapshot(self, world: World, state: TrainingState, position: Position) -> Snapshot:
        """Copy the training to host memory; every rank calls.

        One collective: the sizes of what ranks have of their own.
        """
        shared, own, pieces = state.split()
        mine = _saved(own | {"random": _random_state(), "pieces": pieces})
        table = np.zeros((4, world.size))
        table[:, world.rank] = (world.node, len(mine), google_crc32c.value(mine), 0)
        if world.is_first:
            table[3, 0] = int.from_bytes(secrets.token_bytes(TOKEN_BYTES))
        table = world.transport.sum(table)
        ranges, ends = [], [0] * world.nodes
        for node, size, crc, _ in table.T.astype(np.int64).tolist():
            ranges.append({"node": node, "offset": ends[node], "bytes": size, "crc32c": crc})
            ends[node] += size
        token = int(table[3, 0]).to_bytes(TOKEN_BYTES).hex()
        content = {
            "version": CHECKPOINT_VERSION,
            "identity": dict(self.identity),
            "block": position.block,
            "step": position.step,
            "seed": state.seed,
            "ranks": world.size,
            "groups": self._groups(world),
            "sharded": state.has_shares,
            "pieces": state.has_pieces,
            "token": token,
            "own": ranges,
        }
        host = content | {"shared": _host_copy(shared)} if world.is_first else None
        return Snapshot(self.path, token, mine, world.node, ranges[world.rank]["offset"], sum(ends), host)

    def load(self, world: World, state: TrainingState) -> Restored:
        """Restore the training and this rank's random state; every rank calls.

        It may have been saved under another plan. On another number of ranks, or of groups with different samples,
        buffers are the means over the former ranks, as before an evaluation, and random states follow from the seed and
        the position. InputError if a file is missing, damaged or of another run, or if ranks had shares whose place
        nobody knows and are not as many; nothing is restored then.
        """
        content, own, error = None, None, None
        gathered: dict[str, torch.Tensor] = {}
        try:
            content = _read(self.path)
            _check(self.path, content, self.identity, world.size)
            if self._is_alike(content, world):
                own = self._read_own(content, world.rank)
            elif world.is_first:
                own = _merge([self._read_own(content, rank) for rank in range(content["ranks"])])
            gathered = self._gather(content, state.wanted())
        except ValueError as caught:
            error = caught
        world.check_together(error)
        assert content is not None
        position = Position(content["block"], content["step"])
        rederived: tuple[str, ...] = ()
        if not self._is_alike(content, world):
            own = _load(self.path, io.BytesIO(world.broadcast(_saved(own) if world.is_first else None)))
            rederived = ("random state", *(("buffers: mean over ranks",) if own["model"] else ()))
        assert own is not None
        state.restore(content["shared"], own, gathered)
        state.seed = content["seed"]
        if "random" in own:
            _set_random_state(own["random"])
        else:
            group = world.rank if self.mesh is None else self.mesh.data_rank  # ranks of one sample draw the same
            torch.manual_seed(_derived_seed(state.seed, group, position))
        return Restored(position, content["ranks"], rederived)

    def exists(self) -> bool:
        """True if there is a checkpoint that this process can see."""
        try:
            return self.path.exists()
        except OSError:
            return False

    def remove_others(self, token: str | None) -> None:
        """Remove the files of all checkpoints of this trial that are not named ``token``: of former ones, of crashes.
        """
        for old in self.path.parent.glob(f"{self.path.stem}.{'[0-9a-f]' * (2 * TOKEN_BYTES)}.*"):
            if token is None or not old.name.startswith(f"{self.path.stem}.{token}."):
                with suppress(OSError):  # what stays costs space and is tried again with the next checkpoint
                    old.unlink()

    def remove(self) -> None:
        """Remove the checkpoint, if there is one and it can be removed: the file that names the others first."""
        with suppress(OSError):
            self.path.unlink()
        self.remove_others(None)

    def _groups(self, world: World) -> int:
        return world.size if self.mesh is None else self.mesh.data_size

    def _is_alike(self, content: dict[str, Any], world: World) -> bool:
        """True if each rank trains on the samples that the rank of its number had."""
        return bool(content["ranks"] == world.size and content["groups"] == self._groups(world))

    def _gather(self, content: dict[str, Any], wanted: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """Put together what this rank needs of tensors that were saved in parts.

        One former rank's parts are read at a time.
        """
        found: dict[str, torch.Tensor] = {}
        lacking: dict[str, int] = {}
        for rank in range(content["ranks"]) if content["pieces"] else ():
            for name, (place, values) in self._read_own(content, rank, pieces=True)["pieces"].items():
                mine = wanted.get(name) or wanted.get(f"{name.rpartition(' ')[0]} ") or Place.of_range(0, 0)
                if name not in found:
                    found[name], lacking[name] = values.new_empty(mine.values), mine.values
                lacking[name] -= mine.copy(found[name], Place(*place), values)
        absent = next((name for name, count in lacking.items() if count), None)
        if absent is not None:
            raise InputError(f"{self.path}: {lacking[absent]} values of {absent!r} are in no rank's part")
        return found

    def _read_own(self, content: dict[str, Any], rank: int, *, pieces: bool = False) -> dict[str, Any]:
        """Read what a rank had of its own, without its pieces unless they are asked for.

        InputError if missing or damaged.
        """
        where = content["own"][rank]
        path = _node_path(self.path, content["token"], where["node"])
        try:
            with path.open("rb") as file:
                file.seek(where["offset"])
                own = file.read(where["bytes"])
        except OSError as error:
            raise InputError(f"{path}: the part of rank {rank} cannot be read: {error.strerror}") from None
        if google_crc32c.value(own) != where["crc32c"]:
            raise InputError(f"{path}: damaged: the part of rank {rank} has another checksum than it was written with")
        found = _load(path, io.BytesIO(own))
        return found if pieces else {part: value for part, value in found.items() if part != "pieces"}


class _Whole:
    """What torch.save writes to: every write is complete or raises the system's own error."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[self._raw.write(view) :]
        return len(data)

    def flush(self) -> None:
        self._raw.flush()


@contextmanager
def _named(path: Path) -> Iterator[Path]:
    """Give an OSError of the body, which may know no file, the name of this one."""
    try:
        yield path
    except OSError as error:
        reason = "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise OSError(error.errno, reason, str(path)) from None


def _node_path(path: Path, token: str, node: int) -> Path:
    return path.with_name(f"{path.stem}.{token}.node{node}")


def _host_copy(value: Any) -> Any:
    """A copy in host memory of nested dictionaries, lists and tensors, so that training can go on changing them."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _host_copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(each) for each in value)
    return value


def _merge(owns: list[dict[str, Any]]) -> dict[str, Any]:
    """What stands for the own states of several ranks: means of floating-point buffers, rank 0's values of others."""
    first = owns[0]
    parts = {part: first[part] for part in first if part != "random"}
    for part in parts.keys() - {"optimizer"}:
        parts[part] = {
            name: torch.stack([own[part][name].double() for own in owns]).mean(0).to(value.dtype)
            if value.is_floating_point()
            else value
            for name, value in first[part].items()
        }
    return parts


def _saved(own: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(own, buffer)
    return buffer.getvalue()


def _derived_seed(seed: int, rank: int, position: Position) -> int:
    """A seed for the random numbers of a rank that continues another number of ranks' training."""
    text = f"{seed} {rank} {position.block} {position.step}"
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 1


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise InputError(f"{path}: there is no checkpoint to resume from")
    return _load(path, path)


def _load(path: Path, source: Path | IO[bytes]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as caught:  # torch.load raises many kinds for a damaged file
        text = str(caught).splitlines() or [type(caught).__name__]
        raise InputError(f"{path}: not a readable checkpoint: {text[0]}") from None
    return state


def _check(path: Path, state: dict[str, Any], identity: Mapping[str, Any], ranks: int) -> None:
    if not isinstance(state, dict) or state.get("version") != CHECKPOINT_VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise InputError(f"{path}: checkpoint version {found}; this suite reads {CHECKPOINT_VERSION}")
    for key, wanted in identity.items():
        found = state["identity"].get(key)
        if found != wanted:
            raise InputError(f"{path}: checkpoint has {key} = {found!r}, this run has {wanted!r}")
    if state["ranks"] != ranks and state["sharded"]:
        raise InputError(
            f"{path}: checkpoint of {state['ranks']} ranks, each with its share of the parameters; this run has {ranks}"
        )


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
