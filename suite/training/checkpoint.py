"""Writes and reads the checkpoint of a trial, between two optimizer steps. Continued training has the same losses.

The folder ``trial_<i>.<token>`` has the files of torch.distributed.checkpoint (mlhpc.suite.training.dcp): each rank
writes its parts of tensors, its buffers and random state; rank 0 also what is the same on every rank. ``trial_<i>.pt``
is the index (mlhpc.suite.log.checkpoint_index): the checksum of each file. It gets its name after all files are on the
disk. So a crash at any moment leaves the former checkpoint whole, or none. mlhpc.suite.training.checkpoint decides when
to write one, and writes it in the background.

Saves checkpoints of a trial in the background: at intervals, or when it has to stop.

All ranks copy their part to host memory before the same step. A thread of each writes it while training goes on. About
once a second the ranks agree whether all have written (mlhpc.suite.training.agreement). A checkpoint that cannot be
written is a warning. Training goes on, and the next one is tried when it is due.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from msgspec import Meta, Struct, ValidationError, convert, structs
from torch import Tensor

from mlhpc.suite.documents import list_differing_keys
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import check_ownership, fsync_path, make_folder, print_line, render_error, render_reason
from mlhpc.suite.log import mllog
from mlhpc.suite.log.checkpoint_index import (
    CheckpointIndex,
    DamagedCheckpointError,
    build_folder_path,
    check_file,
    read_index,
)
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.parallel.layout import Layout
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.training.dcp import Saved  # loads torch.distributed.checkpoint, in a second: only when it is used


TOKEN_BYTES = 4
TRIAL = "trial"  # what is the same on every rank and no tensor


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of what this rank writes: ``contents`` by name, tensors as `Held`."""

    path: Path
    token: str
    rank: int
    contents: Mapping[str, Any]

    def write(self) -> bytes:
        """Write this rank's file into a folder that no checkpoint has yet, and force it to the disk.

        Returns what `commit` needs of every rank. OSError names the file.
        """
        check_ownership()
        with _named(self._own_file):
            make_folder(self._folder)
            from mlhpc.suite.training import dcp

            return dcp.write(self._folder, self.rank, self.contents)

    def commit(self, every: list[bytes]) -> int:
        """Make this the trial's checkpoint, on rank 0, from what `write` returned on every rank.

        Returns the bytes of all files.
        """
        from mlhpc.suite.training import dcp

        check_ownership()
        with _named(self._unfinished) as path:
            index = CheckpointIndex(token=self.token, files=dcp.finish(self._folder, every))
            with path.open("wb") as file:
                file.write(index.text())
                file.flush()
                os.fsync(file.fileno())
            fsync_path(self._folder)  # the names of the files, before the index names them
            fsync_path(path.parent)
            path.replace(self.path)
            fsync_path(self.path.parent)
        return index.size

    def discard(self) -> None:
        """Remove this rank's file of a checkpoint that could not be completed."""
        first = (
            [self._unfinished, *self._folder.glob(".metadata*"), *self._folder.glob("layout.*")]
            if self.rank == 0
            else []
        )
        for path in (self._own_file, *first):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):  # other ranks' files are there still
            self._folder.rmdir()

    @property
    def _folder(self) -> Path:
        return build_folder_path(self.path, self.token)

    @property
    def _own_file(self) -> Path:
        return self._folder / f"__{self.rank}_0.distcp"

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
    stages: tuple[int, ...] = (0,)  # of a pipeline's first rank

    def snapshot(self, world: World, state: TrainingState, position: Position) -> Snapshot:
        """Copy the training state to host memory.

        Every rank calls it; one collective says the folder's name.
        """
        shared, own = _host_copy(state.settings())
        held = state.hold(world.rank, state.moments())
        contents: dict[str, Any] = {name: each.copied() for name, each in held.items() if each.written and each.parts}
        contents[_own(world.rank)] = {"random": _random_state(), "optimizer": own, "shared": None}
        if 0 < world.rank < self._stages[0]:  # the first rank that has these stages of a pipeline
            contents[_own(world.rank)]["shared"] = shared
        if world.is_first:
            contents[TRIAL] = {
                "identity": dict(self.identity),
                "block": position.block,
                "step": position.step,
                "seed": state.seed,
                "ranks": world.size,
                "groups": self._groups(world),
                "stages": self._stages,
                "sharded": state.has_shares,
                "optimizer": shared,
            }
        token = world.broadcast(secrets.token_hex(TOKEN_BYTES) if world.is_first else None)
        return Snapshot(self.path, token, world.rank, contents)

    def load(self, world: World, state: TrainingState) -> Restored:
        """Restore the training state and this rank's random state. Every rank calls it.

        The checkpoint may have been saved under another plan, and on another number of ranks or of groups with
        different samples. Buffers then become the means over the former ranks, as before an evaluation. Random states
        then follow from the seed and the position.

        InputError, with nothing restored: a file is missing, damaged or of another run. Also if the number of ranks
        differs and shares have no known place.
        """
        error: Exception | None = None
        try:
            saved = self.open()
            trial = _read_trial(self.path, saved)
            _check(self.path, trial, self.identity, world.size)
            form = world.size, self._groups(world), self._stages
            alike = bool((trial.ranks, trial.groups, trial.stages) == form)
            shapes = {name: (each.size, each.properties.dtype) for name, each in saved.tensors.items()}
            moments = state.make_moments(shapes, world.rank)
            wanted: dict[str, Any] = dict(state.hold(world.rank, moments, own_buffers=alike))
            wanted |= {_own(world.rank): None} if alike else {}
            saved.check(wanted)
            means = _mean_buffers(saved, trial.ranks) if world.is_first and not alike else {}
        except ValueError as caught:
            error = caught
        # No rank may go on alone: those without an error would wait for it in a collective.
        world.check_together(error)
        try:
            own = saved.read(wanted).get(_own(world.rank), {"optimizer": {}})
            # what all ranks have in common is rank 0's, which has some stages of a pipeline only
            others = saved.read({_own(rank): None for rank in range(1, trial.stages[0])})
        except ValueError as caught:
            error = caught
        world.check_together(error)
        rederived: tuple[str, ...] = ()
        if not alike:
            means = torch.load(io.BytesIO(world.broadcast(_saved(means))), weights_only=True)
            state.set_buffers(means)
            rederived = ("random state", *(("buffers: mean over ranks",) if means else ()))
        groups, values = trial.optimizer.groups, trial.optimizer.values
        for each in others.values():
            groups += each["shared"]["groups"]
            values |= each["shared"]["values"]
        state.restore(moments, groups, values | own["optimizer"])
        state.seed = trial.seed
        position = Position(trial.block, trial.step)
        if "random" in own:
            _set_random_state(own["random"])
        else:
            group = world.rank if self.mesh is None else self.mesh.data_rank  # ranks of one sample draw the same
            torch.manual_seed(_derived_seed(state.seed, group, position))
        return Restored(position, trial.ranks, rederived)

    def open(self) -> Saved:
        """Open the files. InputError names one that is missing or damaged."""
        from mlhpc.suite.training import dcp

        if not self.path.exists():
            raise InputError(f"{self.path}: there is no checkpoint to resume from")
        index = read_index(self.path)
        folder, checked = build_folder_path(self.path, index.token), set[str]()

        def check(name: str) -> None:
            if name not in index.files:
                raise DamagedCheckpointError(f"{folder / dcp.LAYOUT}: names {name!r}, which {self.path} does not list")
            if name not in checked:
                check_file(folder / name, index.files[name])
                checked.add(name)

        return dcp.Saved(folder, check)

    def exists(self) -> bool:
        """Return True if this process can see a checkpoint."""
        try:
            return self.path.exists()
        except OSError:
            return False

    def remove_others(self, token: str | None) -> None:
        """Remove the files of this trial's other checkpoints: former ones, and ones that a crash left."""
        check_ownership()
        # What stays costs space and is tried again with the next checkpoint
        for old in self.path.parent.glob(f"{self.path.stem}.{'[0-9a-f]' * (2 * TOKEN_BYTES)}*"):
            if token is not None and old.name.split(".")[1] == token:
                continue
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                with suppress(OSError):
                    old.unlink()

    def remove(self) -> None:
        """Remove the checkpoint if there is one. The index goes first, so that no index names missing files."""
        check_ownership()
        with suppress(OSError):
            self.path.unlink()
        self.remove_others(None)

    @property
    def _stages(self) -> tuple[int, ...]:
        """What ranks have of the model: the ranks of a pipeline and the stages of the first."""
        return (1 if self.mesh is None else self.mesh.pipeline, *self.stages)

    def _groups(self, world: World) -> int:
        return world.size if self.mesh is None else self.mesh.data_size


@contextmanager
def _named(path: Path) -> Iterator[Path]:
    """Name ``path`` in an OSError of the body, which may not know its file."""
    try:
        yield path
    except OSError as error:
        raise OSError(error.errno, render_reason(error, path), str(path)) from None


def _host_copy(value: Any) -> Any:
    """Copy nested dictionaries, lists and tensors to host memory, so that training can go on changing them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _host_copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(each) for each in value)
    return value


def _own(rank: int) -> str:
    """Return the name of what only a rank has and no tensor: its random state."""
    return f"rank {rank}"


def _mean_buffers(saved: Saved, ranks: int) -> dict[str, Tensor]:
    """Return means of all ranks' floating-point buffers by name, and the first rank's values of others."""
    labels = [label for label in saved.tensors if " of rank " in label and not label.startswith("optimizer ")]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(label.rpartition(" of rank ")[0] for label in labels):
        # of a pipeline only the ranks that have the stage
        holders = [f"{name} of rank {rank}" for rank in range(ranks) if f"{name} of rank {rank}" in saved.tensors]
        known = saved.tensors[holders[0]]
        every = [torch.empty(known.size, dtype=known.properties.dtype) for _ in holders]
        contents = {
            label: Layout.of_whole(known.size, written=True).hold(each)
            for label, each in zip(holders, every, strict=True)
        }
        saved.read(contents)
        found[name] = _mean(every)
    return found


def _mean(every: list[Tensor]) -> Tensor:
    first = every[0]
    if not first.is_floating_point():
        return first
    return torch.stack([each.double() for each in every]).mean(0).to(first.dtype)


def _saved(own: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(own, buffer)
    return buffer.getvalue()


def _derived_seed(seed: int, rank: int, position: Position) -> int:
    """Derive a rank's random seed for a training that continues on another number of ranks."""
    text = f"{seed} {rank} {position.block} {position.step}"
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 1


class _Shared(Struct):
    groups: list[Any]
    values: dict[Any, Any]


class _Trial(Struct):
    """What rank 0 writes of a trial: a stranger's checkpoint may have anything there."""

    identity: dict[str, Any]
    block: Annotated[int, Meta(ge=1)]
    step: Annotated[int, Meta(ge=0)]
    seed: int
    ranks: Annotated[int, Meta(ge=1)]
    groups: Any
    stages: Annotated[tuple[int, ...], Meta(min_length=1)]
    sharded: bool
    optimizer: _Shared


def _read_trial(path: Path, saved: Saved) -> _Trial:
    try:
        return convert(saved.read({TRIAL: None})[TRIAL], _Trial)
    except ValidationError as error:
        raise DamagedCheckpointError(f"{path}: damaged, or not written by this suite: {error}") from None


def _check(path: Path, trial: _Trial, identity: Mapping[str, Any], ranks: int) -> None:
    saved, wanted = (dict(each) for each in (trial.identity, identity))
    data = saved.pop("data_manifest", None), wanted.pop("data_manifest", None)
    differing = [
        *list_differing_keys({"data_manifest": data[0]}, {"data_manifest": data[1]}, ("checkpoint", "data set")),
        *list_differing_keys(saved, wanted, ("checkpoint", "config")),
    ]
    if differing:
        raise InputError(f"{path}: is not of this run: {'; '.join(differing)}; {_OTHER_WAYS}")
    if trial.ranks != ranks and trial.sharded:
        raise InputError(
            f"{path}: checkpoint of {trial.ranks} ranks, each with its share of the parameters; this run has {ranks}; "
            f"{_OTHER_WAYS}"
        )


_OTHER_WAYS = "restore that, or begin anew: --resume --replace-failed"


def find_refusal(checkpoint: Checkpoint, ranks: int) -> str | None:
    """Return one line on why a run of this identity cannot continue from a checkpoint; None if it can.

    What the identity leaves out is not compared.
    """
    try:
        trial = _read_trial(checkpoint.path, checkpoint.open())
        known = {key: value for key, value in trial.identity.items() if key in checkpoint.identity}
        _check(checkpoint.path, structs.replace(trial, identity=known), checkpoint.identity, ranks)
    except InputError as error:
        return str(error).removesuffix(f"; {_OTHER_WAYS}")
    return None


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


DUE, WRITTEN, FAILED = "checkpoint_due", "checkpoint_written", "checkpoint_failed"


@dataclass
class _PendingCheckpoint:
    """One rank's view of a checkpoint that is being written."""

    snapshot: Snapshot
    where: dict[str, int]
    began: float
    stall_s: float
    thread: threading.Thread | None = None
    written: bytes = b""
    write_s: float = 0.0
    done: bool = False
    error: Exception | None = None

    def write(self) -> None:
        """Write in the thread. An error is kept for the next agreement."""
        begin = time.perf_counter()
        try:
            self.written = self.snapshot.write()
        # Whatever the disk does, training goes on.
        except Exception as caught:
            self.error = caught
        self.write_s = time.perf_counter() - begin
        self.done = True


class CheckpointSaver:
    """Saves a trial's checkpoints every ``interval_s`` seconds of rank 0's clock (None: only on request).

    Every rank makes every call, except `votes`. ``warn`` gets one line, on rank 0.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        world: World,
        log: EventLog,
        interval_s: float | None,
        warn: Callable[[str], None] = lambda text: print_line(f"mlhpc: warning: {text}", error=True),
    ) -> None:
        self._checkpoint, self._world, self._log, self._warn = checkpoint, world, log, warn
        self._interval_s = interval_s
        self._last = time.perf_counter()
        self._took_s = 0.0
        self._writing: _PendingCheckpoint | None = None
        self._cleaning: threading.Thread | None = None

    def votes(self) -> dict[str, float]:
        """Return what this rank contributes to the next agreement."""
        writing = self._writing
        return {
            # Rank 0's clock alone decides, because the clocks of ranks differ.
            DUE: float(self._world.is_first and writing is None and self._is_due()),
            WRITTEN: float(writing is not None and writing.done and writing.error is None),
            FAILED: float(writing is not None and writing.done and writing.error is not None),
        }

    def settle(self, agreed: Mapping[str, float]) -> bool | None:
        """Finish the checkpoint that is being written, once all ranks have done their part. ``agreed``: the sums of
        `votes`.

        True: it is the trial's checkpoint now. False: it failed. None: ranks are still writing, or there is none.
        """
        writing = self._writing
        # Each rank votes once its thread has ended, so this is the first check at which all have.
        if writing is None or agreed[WRITTEN] + agreed[FAILED] < self._world.size:
            return None
        self._writing = None
        begin = time.perf_counter()
        problem = None if writing.error is None else render_error(writing.error)
        if not agreed[FAILED]:
            size, every = 0, self._world.gather(writing.written, bytes)
            if every is not None:
                try:
                    size = writing.snapshot.commit(every)
                except (OSError, ValueError) as caught:
                    problem = render_error(caught)
            # Commit can fail on rank 0 only; all must know before they log or clean.
            problem = self._world.broadcast(problem)
            if problem is None:
                self._log_saved(writing, size, time.perf_counter() - begin)
                self._took_s = time.perf_counter() - writing.began
                self._clean(writing.snapshot.token)
                return True
        texts = self._world.allgather(problem)
        writing.snapshot.discard()
        text = next(text for text in texts if text is not None)
        self._log.event(mllog.CHECKPOINT_FAILED, text, metadata=writing.where)
        if self._world.is_first:
            self._warn(f"checkpoint not written: {text}")
        return False

    def begin(self, state: TrainingState, position: Position, epoch_num: int) -> None:
        """Copy the training to host memory and start writing. Training stands still only for the copy."""
        begin = time.perf_counter()
        # The cleaning removes all files except the former checkpoint's. It must end before any rank writes, and ranks
        # write only after rank 0 has come to `snapshot`.
        self._join_cleaning()
        snapshot = self._checkpoint.snapshot(self._world, state, position)
        where = {"epoch_num": epoch_num, "next_step": position.step}
        writing = _PendingCheckpoint(snapshot, where, begin, time.perf_counter() - begin)
        # A daemon: a trial that ends with an error must not wait for the disk.
        writing.thread = threading.Thread(target=writing.write, name="checkpoint", daemon=True)
        writing.thread.start()
        self._writing, self._last = writing, begin

    def save(self, state: TrainingState, position: Position, epoch_num: int) -> bool:
        """Save now and wait for the disk.

        False if the trial has no checkpoint afterwards, neither a new nor a former one.
        """
        self._wait()
        self.begin(state, position, epoch_num)
        saved = self._wait()
        self._join_cleaning()
        # A trial that stops may be resumed from a former checkpoint, too.
        return bool(saved or self._world.broadcast(self._checkpoint.exists()))

    def close(self) -> None:
        """Discard a checkpoint that is being written, after training.

        No collective; no file is written after it returns.
        """
        if self._writing is not None:
            assert self._writing.thread is not None
            self._writing.thread.join()
            # A trial that came to its end needs no checkpoint; half a checkpoint helps nobody.
            self._writing.snapshot.discard()
            self._writing = None
        self._join_cleaning()

    def _is_due(self) -> bool:
        """True early enough that the new checkpoint is whole when the former one is ``interval_s`` old."""
        if self._interval_s is None:
            return False
        # If writing takes longer than half the interval, checkpoints would otherwise follow each other without a pause.
        return time.perf_counter() - self._last >= max(self._interval_s / 2, self._interval_s - self._took_s)

    def _wait(self) -> bool | None:
        if self._writing is None:
            return None
        assert self._writing.thread is not None
        self._writing.thread.join()
        return self.settle(self._world.sum(self.votes()))

    def _log_saved(self, writing: _PendingCheckpoint, size: int, commit_s: float) -> None:
        value = {
            "stall_s": writing.stall_s + commit_s,
            "write_s": writing.write_s,
            "bytes": size,
            "files": self._world.size + 2,  # one per rank, DCP's metadata, the index
        }
        self._log.event(mllog.CHECKPOINT, value, metadata=writing.where)

    def _clean(self, token: str) -> None:
        """Remove the former checkpoint's files in the background: there is one per rank."""
        if self._world.is_first:
            self._join_cleaning()
            self._cleaning = threading.Thread(target=self._checkpoint.remove_others, args=(token,), daemon=True)
            self._cleaning.start()

    def _join_cleaning(self) -> None:
        if self._cleaning is not None:
            self._cleaning.join()
            self._cleaning = None
