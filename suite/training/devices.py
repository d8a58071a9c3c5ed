"""Sets up what a rank computes with: its device, threads and precision.

Controls a rank's process: its age, its memory, what it leaves unloaded, its signals, its end without the other
ranks.

Stop signals are deferred while a trial trains. So it ends between two steps, with a checkpoint.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from mlhpc.suite import LAUNCH
from mlhpc.suite.config import WatchdogSettings
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.processes import load_parent_signal, read_start_time
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.config import RunConfig


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
