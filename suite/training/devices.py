"""Sets up what a rank computes with: its device and threads, and how batches get to the device.

Controls a rank's process: its age, its memory, what it leaves unloaded, its signals, its end without the other
ranks.

Stop signals are deferred while a trial trains. So it ends between two steps, with a checkpoint.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mlhpc.suite import LAUNCH
from mlhpc.suite.config import WatchdogSettings
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.processes import load_parent_signal, read_start_time
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.config import RunConfig
    from mlhpc.suite.workload import Batch


# From malloc.h of glibc; mallopt takes an int.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MALLOPT_MAX = 2**31 - 1
COMPILER_MODULE = "torch._dynamo"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 2.0


def compute_process_age_s() -> float:
    """Return the seconds since the kernel started this process (Linux; resolution one clock tick, usually 10 ms)."""
    started = read_start_time(os.getpid())
    assert started is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


@contextmanager
def end_with_launcher(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """End this rank if the mpiexec proxy that started it ends, until the ranks are connected. Only for ranks of `mlhpc
    run`.

    MPI's start would wait for the proxy for ever, because the ranks hold its end of each other's connections. Connected
    ranks do not need it.
    """
    signalled = load_parent_signal() if LAUNCH in environ else None
    if signalled is None:
        yield
        return
    signalled(signal.SIGKILL)
    # The proxy may have ended before the signal was set up; this process is then init's child. In a container whose command
    # is mlhpc that is the launcher itself.
    if os.getppid() == 1 and b"mlhpc" not in Path("/proc/1/cmdline").read_bytes():
        print_line("mlhpc: the process that started this rank has ended", error=True)
        os._exit(1)
    try:
        yield
    finally:
        signalled(0)


STDERR = 2  # the file descriptor


@contextmanager
def end_hung_start(settings: WatchdogSettings) -> Iterator[None]:
    """Print this rank's Python stack to stderr and exit with 1 if the body takes too long.

    Limit and action are the watchdog's, which itself needs connected ranks.
    """
    # A thread of C does it: MPI's start, which has been seen to wait for ever, holds Python's lock.
    if settings.silence_s is not None:
        # By number, because a notebook's sys.stderr has no file descriptor.
        faulthandler.dump_traceback_later(settings.silence_s, exit=settings.action == "end", file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it. False if libc is not glibc.

    By default glibc maps every block above a threshold (128 KiB, at most 32 MiB) separately and unmaps it when freed.
    Then the kernel clears the same pages for the same tensors in every step. Memory that is already mapped is not
    affected.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  mallopt exists elsewhere too, with other numbers
        # No block gets a mapping of its own, and the end of the heap is never given back.
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, MALLOPT_MAX))
    except (OSError, AttributeError, TypeError):
        return False


class _LazyModule(ModuleType):
    """Lazy proxy of a module or of an object in one. The first attribute that it does not know loads the module."""

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        # inspect and unittest look for such names in every loaded module; that must not load the compiler. An
        # import of a submodule asks for __path__ and does need it.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"{self.__name__} is not loaded: {name}")
        # import_module would return this proxy while it stands in sys.modules.
        if isinstance(sys.modules.get(COMPILER_MODULE), _LazyModule):
            del sys.modules[COMPILER_MODULE]
        found: Any = importlib.import_module(COMPILER_MODULE)
        for part in self.__name__.removeprefix(COMPILER_MODULE).split(".")[1:]:
            found = getattr(found, part)
        return getattr(found, name)


def keep_compiler_unloaded() -> None:
    """Keep torch's optimizers and DDP from loading torch's compiler in a run that does not compile.

    Loading it takes as much CPU time as loading torch, and about a thousand files. They ask it for three things. It
    must leave a function alone, break a graph (there is none), and name DDP's mode. Any other request loads it.
    """
    if COMPILER_MODULE in sys.modules:
        return
    module = _LazyModule(
        COMPILER_MODULE,
        disable=lambda function, recursive=True, **others: function,
        graph_break=lambda *others: None,
        utils=_LazyModule(f"{COMPILER_MODULE}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        trace_rules=_LazyModule(f"{COMPILER_MODULE}.trace_rules", clear_lru_cache=lambda: None),
    )
    sys.modules[COMPILER_MODULE] = module
    # `torch._dynamo` is looked up in torch itself, where a lazy __getattr__ would import it.
    sys.modules["torch"].__dict__["_dynamo"] = module


class InterruptedTrialError(Exception):
    """A signal asked the trial to stop while there was nothing to save."""


class StopSignals:
    """Handles stop signals. During training the first one is remembered; otherwise, or the second time, it interrupts.

    A signal within `SAME_REQUEST_S` of the first is the same request. Linux reports the parent's death to mpiexec once
    for each thread of the parent. mpiexec passes each report on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._asked_s = 0.0
        self.deferred = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.deferred and self.name is not None and time.monotonic() - self._asked_s < SAME_REQUEST_S:
            return
        if not self.deferred or self.name is not None:
            raise InterruptedTrialError(f"stopped by {name}")
        self.name, self._asked_s = name, time.monotonic()

    def ignore(self) -> None:
        """Ignore stop signals until the process ends.

        The launcher may answer the first rank's exit code with a signal to all ranks. While Python shuts down it
        restores default handlers, but leaves an ignored signal ignored.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


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


def compute_threads_per_rank(world: World) -> int:
    """Return OMP_NUM_THREADS if the launcher set it, else this process's cores divided by the node's ranks;
    at least 1.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given) if given.isdigit() and int(given) > 0 else max(1, find_usable_resources().cores // world.local_size)
    )


def set_up_rank(config: RunConfig, world: World) -> tuple[torch.device, bool]:
    """Set up this process for a trial: threads, device, precision, memory, and torch's compiler only if asked for.

    Returns the device, and whether freed memory is kept. InputError as in `choose_device` and `use_precision`.
    """
    if not config.compile:
        keep_compiler_unloaded()
    torch.set_num_threads(compute_threads_per_rank(world))
    device = choose_device(config.device, world)
    # With precision "auto" this forbids TF32 until the run has chosen.
    use_precision(config.precision, device)
    return device, device.type == "cpu" and keep_freed_memory()


def use_precision(precision: str, device: torch.device) -> None:
    """Allow TF32 for float32 products and convolutions on a GPU if the config asks for it, else forbid it.

    torch's own default is TF32 for convolutions only. InputError if the device has no TF32.
    """
    wanted = precision == "tf32"
    # ROCm calls its GPUs cuda too, with capabilities such as (9, 4): a capability alone does not show an NVIDIA GPU.
    if wanted and (
        device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise InputError(
            f"precision tf32: {device.type} here has none; expected an NVIDIA GPU of compute capability 8.0 or more, "
            "or precision=float32"
        )
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted


def choose_device(wanted: str, world: World) -> torch.device:
    """Return this rank's device: ``auto``, ``cpu`` or ``cuda``. InputError if CUDA is asked for and this rank
    has none.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if world.local_rank >= available and available != 1:
        raise InputError(f"device cuda: local rank {world.local_rank} has no GPU; this node shows {available}")
    # With srun --gpus-per-task each rank sees one GPU, its own, as number 0.
    device = torch.device("cuda", world.local_rank if available > 1 else 0)
    torch.cuda.set_device(device)
    return device


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
