"""Brings batches to the device of a rank: loading ahead in threads, packing, copying.

Ranks that compute on every core load in the step's own thread, until storage makes them wait.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

Item = TypeVar("Item")
# The caller checks after this many loads whether they waited for storage.
LOADS_PER_CHECK = 8
# If loads wait for a larger share of the time, a thread loads.
MAX_WAIT_SHARE = 0.05
# If the loads since the last check waited longer than this, a thread loads at once.
LONG_WAIT_S = 0.1
# After this many loads by a thread, the caller tries again.
THREAD_LOADS = 32
# Bytes: each tensor of a packed batch begins at a multiple, as in memory from torch's allocator.
ALIGNMENT = 512


@dataclass(frozen=True)
class PackedBatch:
    """The tensors of a batch in one buffer: one copy brings all to a device."""

    buffer: Tensor
    contents: dict[str, tuple[int, torch.Size, torch.dtype]]

    @staticmethod
    def pack(batch: Batch, *, pinned: bool) -> PackedBatch:
        """Copy a batch into one buffer; ``pinned``: in memory that a GPU can read by itself."""
        contents, end = {}, 0
        for name, tensor in batch.items():
            begin = math.ceil(end / ALIGNMENT) * ALIGNMENT
            contents[name] = (begin, tensor.shape, tensor.dtype)
            end = begin + tensor.nbytes
        packed = PackedBatch(torch.empty(end, dtype=torch.uint8, pin_memory=pinned), contents)
        for name, place in packed.unpack().items():
            place.copy_(batch[name])
        return packed

    def to(self, device: torch.device) -> PackedBatch:
        """Start to copy the buffer to a device; on a GPU in the current stream."""
        return PackedBatch(self.buffer.to(device, non_blocking=True), self.contents)

    def unpack(self) -> dict[str, Tensor]:
        """Return the tensors as views of the buffer."""
        return {
            name: self.buffer[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (begin, shape, dtype) in self.contents.items()
        }


class BatchCopier:
    """Brings batches to a device while it computes. Loader threads pack and pin. A separate stream copies.

    On a CPU batches stay where they are. ``alone``: the ranks compute on every core, so a loader thread would only slow
    the training thread down. ``fixed``: batches of one form lie at one place, and each replaces the one before it.
    """

    def __init__(self, device: torch.device, *, alone: bool = False, fixed: bool = False) -> None:
        self._device, self.alone = device, alone and device.type == "cpu"
        self._stream: Any = torch.Stream(device) if device.type == "cuda" else None
        self._places: dict[object, tuple[Tensor, Batch]] | None = {} if fixed else None

    @property
    def copies(self) -> bool:
        """True if batches are copied to the device's own memory."""
        return self._stream is not None

    def pack(self, batch: Batch) -> Batch | PackedBatch:
        """Prepare a batch for its copy, in a loader's thread."""
        if self._stream is None and self._places is None:
            return batch
        return PackedBatch.pack(batch, pinned=self._stream is not None)

    def begin(self, packed: Batch | PackedBatch) -> Batch | PackedBatch:
        """Start the copy, which runs while the device computes."""
        if isinstance(packed, PackedBatch) and self._stream is not None:
            with self._stream:
                return packed.to(self._device)
        return packed

    def end(self, packed: Batch | PackedBatch) -> Batch:
        """Make the device wait for the copy. The host does not wait."""
        if not isinstance(packed, PackedBatch):
            return packed
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            # The current stream waits, not the host: the host goes on and issues the step.
            current.wait_stream(self._stream)
            # The buffer belongs to the copy's stream: the allocator could reuse it while the step reads it.
            packed.buffer.record_stream(current)
        return packed.unpack() if self._places is None else self._put(packed, self._places)

    def _put(self, packed: PackedBatch, places: dict[object, tuple[Tensor, Batch]]) -> Batch:
        """Copy a batch to its form's place, after what still reads the batch before it. Returns the views there."""
        form = tuple(packed.contents.items())
        if form not in places:
            buffer = torch.empty_like(packed.buffer)
            places[form] = buffer, PackedBatch(buffer, packed.contents).unpack()
        buffer, batch = places[form]
        buffer.copy_(packed.buffer)
        return batch


def has_no_idle_core(world: World) -> bool:
    """Return True if this node's single-threaded ranks compute on every core that they may use.

    A rank that may use only some of the node's CPUs is assumed to have them for itself.
    """
    allowed = find_usable_resources()
    sharing = world.local_size if len(allowed.cpus) == os.cpu_count() else 1
    return torch.get_num_threads() == 1 and sharing >= allowed.cores


def count_prefetched_batches(threads: int) -> int:
    """Return how many batches a pool of threads loads or holds ready, besides the one in use."""
    return 2 * threads + 1


def load_with_prefetch(
    load: Callable[[Item], Batch], items: Iterable[Item], *, threads: int, feed: BatchCopier
) -> Iterator[tuple[Item, Batch]]:
    """Load the batches of items in order, ahead of their use, and bring them to the device.

    Usually a pool of threads loads. If it would take a core from the ranks (`BatchCopier.alone`), the caller loads each
    batch when needed. A thread would save nothing there, and handing a batch over costs time. If storage makes the
    caller wait, a thread loads for a while, then the caller tries again. Each time the thread loads twice as many.
    """
    left, most = iter(items), THREAD_LOADS
    while feed.alone and threads == 1:
        yield from _load_in_caller(load, left)
        part = list(islice(left, most))
        if not part:
            return
        yield from _load_in_threads(load, iter(part), threads=threads, feed=feed)
        most *= 2
    yield from _load_in_threads(load, left, threads=threads, feed=feed)


def _load_in_caller(load: Callable[[Item], Batch], items: Iterator[Item]) -> Iterator[tuple[Item, Batch]]:
    """Load each batch where it is used, until loading waits for storage. Leaves the other items.

    Waiting is the time of a load minus the CPU time of this thread.
    """
    waited_s, loads, begin_s = 0.0, 0, time.perf_counter()
    for item in items:
        load_begin_s, computed_before_s = time.perf_counter(), time.thread_time()
        batch = load(item)
        computed_s = time.thread_time() - computed_before_s
        waited_s, loads = waited_s + max(0.0, time.perf_counter() - load_begin_s - computed_s), loads + 1
        yield item, batch
        # Checked after each load: one slow file server may take seconds for eight loads.
        if waited_s > LONG_WAIT_S:
            return
        if loads == LOADS_PER_CHECK:
            if waited_s > MAX_WAIT_SHARE * (time.perf_counter() - begin_s):
                return
            waited_s, loads, begin_s = 0.0, 0, time.perf_counter()


def _load_in_threads(
    load: Callable[[Item], Batch], left: Iterator[Item], *, threads: int, feed: BatchCopier
) -> Iterator[tuple[Item, Batch]]:
    """Load with a pool of threads, up to two batches per thread ahead.

    The next batch's copy starts before a batch is used, if it is loaded by then. No batch waits for a later one.
    """
    waiting: deque[tuple[Item, Future[Batch | PackedBatch]]] = deque()
    coming: tuple[Item, Batch | PackedBatch] | None = None

    def take() -> tuple[Item, Batch | PackedBatch]:
        item, future = waiting.popleft()
        return item, feed.begin(future.result())

    # With as many OpenMP threads as the rank has, loading took the cores that the step needs: DeepCAM's step took twice
    # as long.
    alone = partial(torch.set_num_threads, 1)  # of the calling thread
    with ThreadPoolExecutor(threads, thread_name_prefix="loader", initializer=alone) as pool:

        def submit(most: int) -> None:
            for item in islice(left, most - len(waiting)):
                # Packing and pinning happen in the loader's thread as well: they copy the whole batch.
                waiting.append((item, pool.submit(lambda each: feed.pack(load(each)), item)))

        try:
            submit(count_prefetched_batches(threads))
            while waiting or coming is not None:
                item, packed = coming or take()
                batch = feed.end(packed)
                # Only if it is loaded already: to wait for it here would delay this batch.
                coming = take() if feed.copies and waiting and _is_loaded(waiting[0][1]) else None
                yield item, batch
                submit(count_prefetched_batches(threads))
        finally:
            for _, future in waiting:
                # If the consumer stops early, loads that have not begun are dropped; otherwise the pool would do all of
                # them.
                future.cancel()


def _is_loaded(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None
