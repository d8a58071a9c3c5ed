"""Measures sequential reads and writes of one file per rank. Reads are warm, and cold if the page cache can be dropped.

Cold means that this node's page cache holds nothing of the file, which is verified. Caches behind it (of a hypervisor
or a file server) cannot be controlled from here.

Measures copies between host and device memory: one GPU per rank, all ranks at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mlhpc.suite.files import render_duration
from mlhpc.suite.performance.ceilings.samples import (
    Effort,
    Samples,
    TimeLimit,
    count_calls_for,
    gather_maxima,
    measure_on_all_ranks,
)
from mlhpc.suite.performance.ceilings_file import Ceiling, Findings, NotMeasured, Resource
from mlhpc.suite.world import World

BLOCK = 4 << 20  # bytes of one write or read
REPETITIONS = 3
# Over the file in all: three writes, three cold reads and four warm ones, which cost less.
PASSES = 10
# A file is cold if less than this share of it is in the page cache.
COLD_SHARE = 0.01


def measure_storage(world: World, effort: Effort, directory: Path, free: int, budget: TimeLimit) -> Findings:
    """Measure a write with fsync, a cold and a warm read; then remove the files. Nothing if the folder is unsuitable.

    Files are smaller than ``effort.storage_bytes`` if space, time or memory do not suffice. The directory may lie in
    memory. ``size_bytes`` of the ceilings is their size.
    """
    size = (
        min(effort.storage_bytes, _find_free_bytes(directory, world) // 10, free // 8 // world.local_size)
        // BLOCK
        * BLOCK
    )
    path = directory / f".mlhpc-ceilings-{os.getpid()}-{world.rank}"
    reason = _explain_unmeasurable(world, directory, size)
    if reason:
        return _make_not_measured(reason)
    # Ranks write files of the same size, or the fastest would measure an idle file server.
    size = min(world.allgather(size))
    # Random and different per rank: file systems compress and deduplicate.
    block = np.random.default_rng(world.rank).bytes(BLOCK)
    findings = Findings()
    try:
        if budget.ends:
            once = gather_maxima(world, [measure_write(path, block, BLOCK)])[0]
            size = min(size, int(budget.left() / (PASSES * once)) * BLOCK)
            if size == 0:
                return _make_not_measured(
                    f"{directory} takes {render_duration(once)} to write {BLOCK >> 20} MiB: too slow for the time"
                )
        if size < effort.storage_bytes:
            what = (
                f"files of more than {size >> 20} MiB per rank: they do not fit into the time, the space or the memory"
            )
            findings.not_measured.append(NotMeasured("storage_write", what, str(directory)))
        findings.add(_measure_files(world, directory, path, block, size, budget))
    finally:
        path.unlink(missing_ok=True)
    return findings


def _measure_files(world: World, directory: Path, path: Path, block: bytes, size: int, budget: TimeLimit) -> Findings:
    """Measure the three ceilings of one file per rank."""
    findings = Findings()
    written = measure_on_all_ranks(world, lambda: size / measure_write(path, block, size), REPETITIONS, budget=budget)
    findings.roofs.append(_build_ceiling(world, "storage_write", directory, "fsync", written, size))
    cold = [all(world.allgather(drop_from_page_cache(path)))]

    def read_cold() -> float:
        cold.append(drop_from_page_cache(path))
        return size / measure_read(path)

    samples = measure_on_all_ranks(world, read_cold, REPETITIONS, budget=budget)
    if all(world.allgather(all(cold))):
        findings.roofs.append(_build_ceiling(world, "storage_read", directory, "cold", samples, size))
    else:
        reason = "the page cache keeps the file (a file system in memory, or one that ignores POSIX_FADV_DONTNEED)"
        findings.not_measured.append(NotMeasured("storage_read", reason, "cold"))
    # Once without timing: the last cold read may have been dropped from the cache again.
    measure_read(path)
    warm = measure_on_all_ranks(world, lambda: size / measure_read(path), REPETITIONS, budget=budget)
    findings.roofs.append(_build_ceiling(world, "storage_read", directory, "warm", warm, size))
    return findings


def _make_not_measured(reason: str) -> Findings:
    return Findings(not_measured=[NotMeasured("storage_read", reason), NotMeasured("storage_write", reason)])


def measure_resident_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        # from_buffer needs a writable mapping; MAP_PRIVATE makes sure that the file is not written.
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(value & 1 for value in present) / pages


def drop_from_page_cache(path: Path) -> bool:
    """Drop a file from this node's page cache. True if it is gone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return measure_resident_share(path) < COLD_SHARE


def measure_write(path: Path, block: bytes, size: int) -> float:
    """Write a file and force it to the device. Returns the seconds."""
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(size // len(block)):
            view = memoryview(block)
            while view:
                # write(2) may take fewer bytes than it was given.
                view = view[os.write(descriptor, view) :]
        # Without it, the time would be that of copying into the page cache.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - begin


def measure_read(path: Path) -> float:
    """Read a whole file. Returns the seconds."""
    buffer = bytearray(BLOCK)
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)
    return time.perf_counter() - begin


def _find_free_bytes(directory: Path, world: World) -> int:
    """Return the free bytes of the directory's file system divided by the node's ranks; 0 if unknown."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize // world.local_size


def _explain_unmeasurable(world: World, directory: Path, size: int) -> str:
    """Return why storage is not measured; "" if it is. One rank that cannot write is enough. All ranks call it."""
    mine = ""
    if not directory.is_dir():
        mine = f"{directory} is not a directory (choose another --directory)"
    elif not os.access(directory, os.W_OK):
        mine = f"{directory} cannot be written (choose another --directory)"
    elif size < BLOCK:
        mine = f"{directory} has too little free space: a tenth of it holds no {BLOCK >> 20} MiB per rank"
    return next((text for text in world.allgather(mine) if text), "")


def _build_ceiling(
    world: World, resource: Resource, directory: Path, mode: str, samples: Samples, size: int
) -> Ceiling:
    return samples.roof(
        resource,
        str(directory),
        mode,
        "B/s",
        ranks=world.size,
        nodes=world.nodes,
        library="read(2)" if resource == "storage_read" else "write(2)",
        size_bytes=size,
    )


COPY_BYTES = 256 << 20  # bytes of a copy, large enough that its launch does not count


def measure_host_link(world: World, effort: Effort, device: torch.device, budget: TimeLimit) -> Findings:
    """Measure both directions with pinned and with pageable host memory."""
    if device.type == "cpu":
        return Findings(not_measured=[NotMeasured("host_link", "the device is the host: nothing is copied")])
    findings = Findings()
    on_device = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    for mode, on_host in (
        ("pinned", torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)),
        ("pageable", torch.ones(COPY_BYTES, dtype=torch.uint8)),
    ):
        for name, target, source in (
            ("host_to_device", on_device, on_host),
            ("device_to_host", on_host, on_device),
        ):

            def run(calls: int, target: torch.Tensor = target, source: torch.Tensor = source) -> float:
                torch.cuda.synchronize(device)
                begin = time.perf_counter()
                for _ in range(calls):
                    # From pageable memory the driver copies through a pinned buffer of its own, so both modes differ.
                    target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(device)
                return time.perf_counter() - begin

            if not budget.left():
                findings.not_measured.append(NotMeasured("host_link", f"{mode}: the time was over", name))
                continue
            # The first copy maps the pages.
            run(1)
            calls = int(gather_maxima(world, [count_calls_for(10 * effort.sample_s, run(1))])[0])

            def rate(calls: int = calls, run: Callable[[int], float] = run) -> float:
                return COPY_BYTES * calls / run(calls)

            samples = measure_on_all_ranks(world, rate, effort.repetitions, budget=budget)
            findings.roofs.append(
                samples.roof(
                    "host_link",
                    name,
                    mode,
                    "B/s",
                    ranks=world.size,
                    nodes=world.nodes,
                    library="torch",
                    size_bytes=COPY_BYTES,
                )
            )
    return findings
