"""Writes and reads the files of a checkpoint with torch.distributed.checkpoint (DCP): one per rank, and ``.metadata``.

DCP plans and reshards; ranks agree through the harness's own transport, so process groups of any backend will do, or
none. The CRC of a file is computed from memory, before the disk.

``.metadata`` is for other programs. It is a pickle, which can do anything when it is read: a stranger's may open a
connection. So this suite reads `LAYOUT`, the same facts as plain data, and ranks send each other the same.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import google_crc32c
import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
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
from mlhpc.suite.training.parallel.layout import Away, Held, find_away

METADATA = ".metadata"
LAYOUT = "layout.msgpack"
Contents = Mapping[str, Any]  # tensors as `Held`, anything else that torch.load reads with weights_only


Sizes = tuple[int, ...]


class Box(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a rank's file: ``length`` bytes from ``begin`` on.

    It holds the part of tensor ``name`` at ``offsets``, or, without ``whole``, another value.
    """

    name: str
    file: str
    begin: int
    length: int
    offsets: Sizes = ()
    sizes: Sizes = ()
    whole: Sizes | None = None
    dtype: str = ""

    @property
    def index(self) -> MetadataIndex:
        """DCP's name of what the entry holds."""
        return MetadataIndex(self.name, None if self.whole is None else torch.Size(self.offsets))

    def item(self) -> WriteItem:
        """Make DCP's record of what was written."""
        if self.whole is None:
            return WriteItem(self.index, WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(_DTYPES[self.dtype]), torch.Size(self.whole))
        return WriteItem(self.index, WriteItemType.SHARD, tensor_data=data)


_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wrote: the entries of its file, and the sizes and checksums of its files by name."""

    boxes: list[Box]
    files: dict[str, tuple[int, int]]


def write(folder: Path, rank: int, contents: Contents) -> bytes:
    """Write a rank's file and force it to the disk. Returns what `finish` needs of it, for a message to rank 0."""
    writer, files = _writer(folder, rank)
    planner = _Saving(contents)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    try:
        places = {each.index: each.storage_data for each in writer.write_data(plan, planner).wait()}
    except Exception:  # torch.save answers a full disk with a RuntimeError about positions
        if files.error is not None:
            raise files.error from None
        raise
    return msgspec.msgpack.encode(Written([_describe(item, places[item.index]) for item in plan.items], files.sums))


def _describe(item: WriteItem, place: _StorageInfo) -> Box:
    where, data = (item.index.fqn, place.relative_path, place.offset, place.length), item.tensor_data
    if data is None:
        return Box(*where)
    chunk = data.chunk
    return Box(*where, tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size), str(data.properties.dtype))


def finish(folder: Path, every: list[bytes]) -> dict[str, FileSum]:
    """Write ``.metadata``, on rank 0, once all ranks have written. Returns the sums of all files by name.

    ValueError if the parts of all ranks are not the whole of each tensor.
    """
    written = [msgspec.msgpack.decode(each, type=Written) for each in every]
    boxes = [box for each in written for box in each.boxes]
    writer, files = _writer(folder, None)
    writer.finish(_make_metadata([each.boxes for each in written]), [[_make_result(box) for box in boxes]])
    with files.create_stream(folder / LAYOUT, "wb") as stream:
        stream.write(msgspec.msgpack.encode(boxes))
        os.fsync(stream.fileno())
    found = {name: each for rank in written for name, each in rank.files.items()}
    found |= {METADATA: files.sums[f"{METADATA}.tmp"], LAYOUT: files.sums[LAYOUT]}  # DCP's name while it writes
    return {name: FileSum(bytes=size, crc32c=crc) for name, (size, crc) in found.items()}


def _make_metadata(every: Sequence[Sequence[Box]]) -> Metadata:
    """Make DCP's metadata from the entries of each rank. ValueError if they are not the whole of each tensor."""
    return _Saving({}).create_global_plan([SavePlan([box.item() for box in boxes]) for boxes in every])[1]


def _make_result(box: Box) -> WriteResult:
    return WriteResult(box.index, box.length, _StorageInfo(box.file, box.begin, box.length))


def _writer(folder: Path, rank: int | None) -> tuple[FileSystemWriter, _Files]:
    writer, files = FileSystemWriter(folder, per_thread_copy_ahead=0), _Files()  # 0: all is on the host
    writer.fs = files
    writer.set_up_storage_writer(rank is None, rank=rank, use_collectives=rank is None)
    return writer, files


class Saved:
    """The content of a checkpoint's folder. ``check`` is called with the name of each file before it is read."""

    def __init__(self, folder: Path, check: Callable[[str], None]) -> None:
        self._check, self._reader, self._folder = check, FileSystemReader(folder), folder
        check(LAYOUT)
        try:
            boxes = msgspec.msgpack.decode((folder / LAYOUT).read_bytes(), type=list[Box])
            self._metadata = _make_metadata([boxes])
        except Exception as error:  # DCP raises many kinds for what it did not make
            text = str(error).splitlines() or [type(error).__name__]
            raise DamagedCheckpointError(f"{folder / LAYOUT}: is not of a checkpoint: {text[0]}") from None
        self._metadata.storage_data = {box.index: _make_result(box).storage_data for box in boxes}
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
        except pickle.UnpicklingError:  # whose text advises to load what may run code
            raise DamagedCheckpointError(f"{self._folder}: damaged, or holds more than numbers and names") from None
        except Exception as error:  # torch.load raises many kinds for what it did not write
            text = str(error).splitlines() or [type(error).__name__]
            raise DamagedCheckpointError(f"{self._folder}: cannot be read: {text[0]}") from None
        return {name: value for name, value in planner.contents.items() if not isinstance(value, Held)}


class _Saving(DefaultSavePlanner):
    """Plans what this rank writes: a box of a tensor is an item."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents = contents
        self._read: Tensor | None = None

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
        if not isinstance(value, Held):
            return value
        part = value.parts[cast(torch.Size, index.offset)]
        away = find_away(part)
        if away is None:
            return part
        if self._read is not None:  # written by now: DCP asks when it writes, and keeps what it got
            self._read.untyped_storage().resize_(0)
        self._read = away.read()
        return self._read


class _Loading(DefaultLoadPlanner):
    """Plans what this rank reads: for each of its boxes, the saved boxes that have values of it."""

    def __init__(self, contents: Contents, metadata: Metadata, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.contents, self.metadata, self._folder = dict(contents), metadata, folder
        self._away: tuple[Away, Tensor] | None = None  # what is being read, and its values so far

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
        part = cast(Tensor, self.contents[index.fqn].parts[index.offset])
        away = find_away(part)
        if away is None:
            return part
        self._away = away, away.read()
        return self._away[1]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._away is not None:
            away, values = self._away
            away.write(values)
            self._away = None


class _Files(FileSystem):
    """DCP's files, with the sums of what was written by name, and the first error of the disk."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.kept(), Path(path).open(mode) as raw:
            stream = _Summed(raw, self.kept)
            yield stream
        self.sums[Path(path).name] = stream.bytes, stream.crc32c

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the first error of the disk."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


class _Summed:
    """The file that torch.save writes to. Counts bytes and CRC."""

    def __init__(self, raw: Any, kept: Callable[[], AbstractContextManager[None]]) -> None:
        self._raw, self._kept = raw, kept
        self.bytes = self.crc32c = 0
        self.flush, self.close = raw.flush, raw.close

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.bytes += len(view)
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(view, np.uint8))
        with self._kept():
            self._raw.write(view)
        return len(view)

    def fileno(self) -> int:
        self.flush()  # DCP asks for it to force the file to the disk, and flushes ``.metadata`` only afterwards
        return cast(int, self._raw.fileno())

    def tell(self) -> int:
        return self.bytes
