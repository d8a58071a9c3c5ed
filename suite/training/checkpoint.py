"""Writes and reads the checkpoint of a trial, between two optimizer steps. Continued training has the same losses.

``trial_<i>.<token>.node<n>`` is one file per node. Every rank has a part of it: buffers, random state, its share of
sharded parameters and their optimizer state. Rank 0's file also has what is the same on every rank. ``trial_<i>.pt`` is
the index (suite.log.checkpoint_index): where each part lies, and its checksum. It gets its name after all parts are on
the disk. So a crash at any moment leaves the former checkpoint whole, or none. suite.training.saver decides when to
write one, and writes it in the background.
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
from suite.files import fsync_path, make_folder
from suite.log.checkpoint_index import (
    CheckpointIndex,
    DamagedCheckpointError,
    Part,
    build_node_path,
    check_part,
    read_index,
)
from suite.training.parallel.mesh import Mesh
from suite.training.parallel.places import Place
from suite.training.state import Position, TrainingState
from suite.world import World

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of what this rank writes.

    ``own`` goes to ``parts[rank]``. ``shared`` is what all ranks have in common; None on ranks other than 0.
    """

    path: Path
    token: str
    rank: int
    own: bytes
    parts: tuple[Part, ...]
    shared: dict[str, Any] | None

    def write(self) -> None:
        """Write this rank's part under a name that no checkpoint has yet, and force it to the disk.

        OSError names the file.
        """
        make_folder(self.path.parent)
        with _named(self._node_file) as path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                view, offset = memoryview(self.own), self.parts[self.rank].offset
                while view:
                    count = os.pwrite(file, view, offset)
                    view, offset = view[count:], offset + count
                os.fsync(file)
            finally:
                os.close(file)
        if self.shared is not None:
            index = CheckpointIndex(token=self.token, shared=self._write_shared(self.shared), own=self.parts)
            with _named(self._unfinished) as path, path.open("wb") as index_file:
                index_file.write(index.text())
                index_file.flush()
                os.fsync(index_file.fileno())

    def _write_shared(self, shared: dict[str, Any]) -> Part:
        """Write what is the same on every rank behind the parts of this node's ranks."""
        node = self.parts[self.rank].node
        offset = sum(part.bytes for part in self.parts if part.node == node)
        with _named(self._node_file) as path, path.open("r+b", buffering=0) as raw:
            raw.seek(offset)
            whole = _Whole(raw)
            torch.save(shared, cast(IO[bytes], whole))
            os.fsync(raw.fileno())
        return Part(node=node, offset=offset, bytes=whole.bytes, crc32c=whole.crc32c)

    def commit(self) -> int:
        """Make this the trial's checkpoint, on rank 0, once every rank has written. Returns the bytes of all parts."""
        with _named(self._unfinished) as path:
            index = read_index(path)
            fsync_path(path.parent)  # the names of the nodes' files, before the index names them
            path.replace(self.path)
            fsync_path(self.path.parent)
        return index.size

    def discard(self) -> None:
        """Remove this rank's part of a checkpoint that could not be completed."""
        for path in (self._node_file, self._unfinished):
            with suppress(OSError):
                path.unlink()

    @property
    def _node_file(self) -> Path:
        return build_node_path(self.path, self.token, self.parts[self.rank].node)

    @property
    def _unfinished(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.{self.token}.index")


@dataclass(frozen=True)
class Restored:
    """The position that `Checkpoint.load` restored, and the number of ranks that saved it.

    ``rederived`` names what cannot be restored on another number of ranks and was made anew.
    """

    position: Position
    ranks: int
    rederived: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one trial. A run continues from it only if its ``identity`` is equal."""

    path: Path
    identity: Mapping[str, Any]
    mesh: Mesh | None = None  # None: every rank trains on samples of its own

    def snapshot(self, world: World, state: TrainingState, position: Position) -> Snapshot:
        """Copy the training state to host memory.

        Every rank calls it; one collective exchanges the sizes of the parts.
        """
        shared, own, pieces = state.split()
        mine = _saved(own | {"random": _random_state(), "pieces": pieces})
        table = np.zeros((4, world.size))
        table[:, world.rank] = (world.node, len(mine), google_crc32c.value(mine), 0)
        if world.is_first:
            table[3, 0] = int.from_bytes(secrets.token_bytes(TOKEN_BYTES))
        table = world.transport.sum(table)
        parts, ends = [], [0] * world.nodes
        for node, size, crc, _ in table.T.astype(np.int64).tolist():
            parts.append(Part(node=node, offset=ends[node], bytes=size, crc32c=crc))
            ends[node] += size
        # Rank 0 draws the token: the sum carries it to all ranks, since others add 0.
        token = int(table[3, 0]).to_bytes(TOKEN_BYTES).hex()
        content = {
            "identity": dict(self.identity),
            "block": position.block,
            "step": position.step,
            "seed": state.seed,
            "ranks": world.size,
            "groups": self._groups(world),
            "sharded": state.has_shares,
            "pieces": state.has_pieces,
        }
        host = content | {"shared": _host_copy(shared)} if world.is_first else None
        return Snapshot(self.path, token, world.rank, mine, tuple(parts), host)

    def load(self, world: World, state: TrainingState) -> Restored:
        """Restore the training state and this rank's random state. Every rank calls it.

        The checkpoint may have been saved under another plan, and on another number of ranks or of groups with
        different samples. Buffers then become the means over the former ranks, as before an evaluation. Random states
        then follow from the seed and the position.

        InputError, with nothing restored: a file is missing, damaged or of another run. Also if the number of ranks
        differs and shares have no known place.
        """
        content, own, error = None, None, None
        gathered: dict[str, torch.Tensor] = {}
        try:
            if not self.path.exists():
                raise InputError(f"{self.path}: there is no checkpoint to resume from")
            index = read_index(self.path)
            content = self._read(index, "all ranks", index.shared)
            _check(self.path, content, self.identity, world.size)
            if self._is_alike(content, world):
                own = self._read_own(index, world.rank)
            elif world.is_first:
                own = _merge([self._read_own(index, rank) for rank in range(content["ranks"])])
            gathered = self._gather(index, state.wanted()) if content["pieces"] else {}
        except ValueError as caught:
            error = caught
        # No rank may go on alone: those without an error would wait for it in a collective.
        world.check_together(error)
        assert content is not None
        position = Position(content["block"], content["step"])
        rederived: tuple[str, ...] = ()
        if not self._is_alike(content, world):
            own = _load(self.path, "all ranks", io.BytesIO(world.broadcast(_saved(own) if world.is_first else None)))
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
        """Return True if this process can see a checkpoint."""
        try:
            return self.path.exists()
        except OSError:
            return False

    def remove_others(self, token: str | None) -> None:
        """Remove the files of this trial's other checkpoints: former ones, and ones that a crash left."""
        for old in self.path.parent.glob(f"{self.path.stem}.{'[0-9a-f]' * (2 * TOKEN_BYTES)}.*"):
            if token is None or not old.name.startswith(f"{self.path.stem}.{token}."):
                with suppress(OSError):  # what stays costs space and is tried again with the next checkpoint
                    old.unlink()

    def remove(self) -> None:
        """Remove the checkpoint if there is one. The index goes first, so that no index names missing files."""
        with suppress(OSError):
            self.path.unlink()
        self.remove_others(None)

    def _groups(self, world: World) -> int:
        return world.size if self.mesh is None else self.mesh.data_size

    def _is_alike(self, content: dict[str, Any], world: World) -> bool:
        """True if each rank trains on the samples that the rank of its number had."""
        return bool(content["ranks"] == world.size and content["groups"] == self._groups(world))

    def _gather(self, index: CheckpointIndex, wanted: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """Assemble the values that this rank needs of tensors that were saved in parts.

        Reads one former rank's parts at a time.
        """
        found: dict[str, torch.Tensor] = {}
        lacking: dict[str, int] = {}
        for rank in range(len(index.own)):
            for name, (place, values) in self._read_own(index, rank, pieces=True)["pieces"].items():
                mine = wanted.get(name) or wanted.get(f"{name.rpartition(' ')[0]} ") or Place.of_range(0, 0)
                if name not in found:
                    found[name], lacking[name] = values.new_empty(mine.values), mine.values
                lacking[name] -= mine.copy(found[name], Place(*place), values)
        absent = next((name for name, count in lacking.items() if count), None)
        if absent is not None:
            raise InputError(f"{self.path}: {lacking[absent]} values of {absent!r} are in no rank's part")
        return found

    def _read_own(self, index: CheckpointIndex, rank: int, *, pieces: bool = False) -> dict[str, Any]:
        """Read a rank's own part, without its pieces of tensors unless ``pieces``."""
        found = self._read(index, f"rank {rank}", index.own[rank])
        return found if pieces else {part: value for part, value in found.items() if part != "pieces"}

    def _read(self, index: CheckpointIndex, whose: str, part: Part) -> dict[str, Any]:
        """Compare a part with its checksum, then read it. DamagedCheckpointError if it is missing or damaged."""
        path = build_node_path(self.path, index.token, part.node)
        check_part(path, whose, part)
        with path.open("rb", buffering=0) as file, io.BufferedReader(_Range(file, part.offset, part.bytes)) as source:
            return _load(path, whose, cast(IO[bytes], source))


class _Range(io.RawIOBase):
    """Presents a range of a file as a file of its own. torch.load then needs no copy of it."""

    def __init__(self, file: io.FileIO, begin: int, size: int) -> None:
        super().__init__()
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(wanted) or 0
        self._at += count
        return count


class _Whole:
    """The file that torch.save writes to.

    Every write is complete or raises the system's own error; counts bytes and CRC.
    """

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self.bytes = self.crc32c = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.bytes += len(view)
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(view, np.uint8))
        while view:
            view = view[self._raw.write(view) :]
        return len(data)

    def flush(self) -> None:
        self._raw.flush()


@contextmanager
def _named(path: Path) -> Iterator[Path]:
    """Name ``path`` in an OSError of the body, which may not know its file."""
    try:
        yield path
    except OSError as error:
        reason = "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise OSError(error.errno, reason, str(path)) from None


def _host_copy(value: Any) -> Any:
    """Copy nested dictionaries, lists and tensors to host memory, so that training can go on changing them."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _host_copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(each) for each in value)
    return value


def _merge(owns: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the own parts of several ranks: means of floating-point buffers, rank 0's values of others."""
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
    """Derive a rank's random seed for a training that continues on another number of ranks."""
    text = f"{seed} {rank} {position.block} {position.step}"
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 1


def _load(path: Path, whose: str, source: IO[bytes]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as caught:  # torch.load raises many kinds for what it did not write
        text = str(caught).splitlines() or [type(caught).__name__]
        raise DamagedCheckpointError(f"{path}: the part of {whose} is not readable: {text[0]}") from None
    return state


def _check(path: Path, state: dict[str, Any], identity: Mapping[str, Any], ranks: int) -> None:
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
