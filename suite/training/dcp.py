"""Writes and reads the files of a checkpoint with torch.distributed.checkpoint (DCP): one per rank, and ``.metadata``.

DCP plans and reshards; ranks agree through the harness's own transport, so process groups of any backend will do, or
none. The CRC of a file is computed from memory, before the disk. A pickle of DCP makes nothing but its records.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from mlhpc.suite.errors import InputError
from mlhpc.suite.log.checkpoint_index import DamagedCheckpointError, FileSum
from mlhpc.suite.training.parallel.layout import Held

METADATA = ".metadata"
# What a pickle of DCP's records may name besides its own classes
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}
Contents = Mapping[str, Any]  # tensors as `Held`, anything else that torch.load reads with weights_only


@dataclass(frozen=True)
class Written:
    """What one rank wrote: DCP's plan and results, and the sizes and checksums of its files by name."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


def write(folder: Path, rank: int, contents: Contents) -> bytes:
    """Write a rank's file and force it to the disk. Returns what `finish` needs of it, for a message to rank 0."""
    writer, files = _writer(folder, rank)
    planner = _Saving(contents)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    results = writer.write_data(plan, planner).wait()
    return pickle.dumps(Written(plan, results, files.sums))


def finish(folder: Path, every: list[bytes]) -> dict[str, FileSum]:
    """Write ``.metadata``, on rank 0, once all ranks have written. Returns the sums of all files by name.

    ValueError if the parts of all ranks are not the whole of each tensor.
    """
    written: list[Written] = [_unpickled(io.BytesIO(each)) for each in every]
    _, metadata = _Saving({}).create_global_plan([each.plan for each in written])
    writer, files = _writer(folder, None)
    writer.finish(metadata, [each.results for each in written])
    found = {name: each for rank in written for name, each in rank.files.items()}
    found[METADATA] = files.sums[f"{METADATA}.tmp"]  # under which name DCP writes it
    return {name: FileSum(bytes=size, crc32c=crc) for name, (size, crc) in found.items()}


def _writer(folder: Path, rank: int | None) -> tuple[FileSystemWriter, _Files]:
    writer, files = FileSystemWriter(folder), _Files()
    writer.fs = files
    writer.set_up_storage_writer(rank is None, rank=rank, use_collectives=rank is None)
    return writer, files


class Saved:
    """The content of a checkpoint's folder. ``check`` is called with the name of each file before it is read."""

    def __init__(self, folder: Path, check: Callable[[str], None]) -> None:
        self._check, self._reader, self._folder = check, FileSystemReader(folder), folder
        check(METADATA)
        try:
            with (folder / METADATA).open("rb") as file:
                self._metadata: Metadata = _unpickled(file)
        except Exception as error:  # whatever is in a pickle
            raise DamagedCheckpointError(f"{folder / METADATA}: cannot be read: {error}") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What is known of each tensor, by its name."""
        every = self._metadata.state_dict_metadata
        return {name: found for name, found in every.items() if isinstance(found, TensorStorageMetadata)}

    def check(self, names: Contents) -> None:
        """Check the files that have these contents. InputError if something is not there, or has another size."""
        items = _Loading(names, self._metadata, self._folder).create_local_plan().items
        stored = self._metadata.storage_data
        for name in sorted({stored[item.storage_index].relative_path for item in items}):
            self._check(name)

    def read(self, contents: Contents) -> dict[str, Any]:
        """Read into these tensors, in place, and return the others. Nothing is read before its file was checked."""
        self.check(contents)
        planner = _Loading(contents, self._metadata, self._folder)
        try:
            self._reader.read_data(self._reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        except Exception as error:  # torch.load raises many kinds for what it did not write
            text = str(error).splitlines() or [type(error).__name__]
            raise DamagedCheckpointError(f"{self._folder}: cannot be read: {text[0]}") from None
        return {name: value for name, value in planner.contents.items() if not isinstance(value, Held)}


class _Saving(DefaultSavePlanner):
    """Plans what this rank writes: a box of a tensor is an item."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents = contents

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self._contents.items():
            if not isinstance(value, Held):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for offsets, part in value.parts.items():
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, part.shape), TensorProperties.create_from_tensor(part), value.whole
                )
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._contents[index.fqn]
        return value.parts[cast(torch.Size, index.offset)] if isinstance(value, Held) else value


class _Loading(DefaultLoadPlanner):
    """Plans what this rank reads: for each of its boxes, the saved boxes that have values of it."""

    def __init__(self, contents: Contents, metadata: Metadata, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.contents, self.metadata, self._folder = dict(contents), metadata, folder

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.contents.items():
            if isinstance(value, Held) and not value.parts:
                continue
            found = self.metadata.state_dict_metadata.get(name)
            if isinstance(value, Held) and isinstance(found, TensorStorageMetadata) and found.size == value.whole:
                boxes = [ChunkStorageMetadata(offsets, part.shape) for offsets, part in value.parts.items()]
                items += create_read_items_for_chunk_list(name, found, boxes)
            elif not isinstance(value, Held) and isinstance(found, BytesStorageMetadata):
                none, index = torch.Size([0]), MetadataIndex(name)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
            else:
                size = f" of {tuple(found.size)}" if isinstance(found, TensorStorageMetadata) else ""
                wanted = f" of {tuple(value.whole)}" if isinstance(value, Held) else ""
                raise InputError(f"{self._folder}: has {'no ' * (found is None)}{name!r}{size}: expected one{wanted}")
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.contents[read_item.dest_index.fqn] = torch.load(value, weights_only=True)  # torch's own executes pickles

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return cast(Tensor, self.contents[index.fqn].parts[index.offset])


class _Files(FileSystem):
    """DCP's files, with the sums of what was written by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as raw:
            stream = _Summed(raw)
            yield stream
        self.sums[Path(path).name] = stream.bytes, stream.crc32c


class _Summed:
    """The file that torch.save writes to. Counts bytes and CRC."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.bytes = self.crc32c = 0
        self.flush, self.close = raw.flush, raw.close

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.bytes += len(view)
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(view, np.uint8))
        self._raw.write(view)
        return len(view)

    def fileno(self) -> int:
        self.flush()  # DCP asks for it to force the file to the disk, and flushes ``.metadata`` only afterwards
        return cast(int, self._raw.fileno())

    def tell(self) -> int:
        return self.bytes


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        own = module.startswith("torch.distributed.checkpoint.") or (module, name) == (__name__, "Written")
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or is_type or (module, name) in _NAMES:
            found = super().find_class(module, name)
            if not own or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled(file: Any) -> Any:
    return _Unpickler(file).load()
