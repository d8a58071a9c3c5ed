"""Lists the disks of the node and finds the file systems of the folders that the run uses."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, BlockDevice, FileSystem
from mlhpc.suite.machine.probes.sysfs import convert_to_gib, parse_number, read_text


def list_block_devices(root: Path) -> tuple[BlockDevice, ...]:
    """List the disks. Leaves out loop, memory, mapped, optical and empty devices."""
    devices = []
    for device in sorted((root / "sys/block").glob("*")):
        sectors = parse_number(read_text(device / "size"))
        if device.name.startswith(("loop", "ram", "zram", "dm-", "sr")) or not sectors:
            continue
        rotational = read_text(device / "queue/rotational")
        devices.append(
            BlockDevice(
                name=device.name,
                model=read_text(device / "device/model") or UNKNOWN,
                rotational=rotational == "1" if rotational else None,
                size_gib=convert_to_gib(sectors, 512),  # the kernel counts in 512 bytes, whatever the disk does
            )
        )
    return tuple(devices)


def list_file_systems(root: Path, folders: Mapping[str, Path]) -> tuple[FileSystem, ...]:
    """List the file system of each folder. ``folders`` maps purpose to path."""
    mounts = _list_mounts(root)
    return tuple(_find_file_system(purpose, path.resolve(), mounts) for purpose, path in folders.items())


def _list_mounts(root: Path) -> list[tuple[str, str, str]]:
    """List (mount point, file-system type, device) of every mount that this process sees."""
    mounts = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, device = right.split()[:2]
        mounts.append((_unescape(left.split()[4]), kind, device))
    return mounts


def _find_file_system(purpose: str, path: Path, mounts: Sequence[tuple[str, str, str]]) -> FileSystem:
    """Find the nearest mount above ``path``, which must be resolved: a link may lead to another file system."""
    above = [mount for mount in mounts if path == Path(mount[0]) or Path(mount[0]) in path.parents]
    mount, kind, device = max(above, key=lambda each: len(each[0]), default=(UNKNOWN, UNKNOWN, UNKNOWN))
    disk = os.statvfs(path)
    return FileSystem(
        purpose=purpose,
        path=str(path),
        mount=mount,
        type=kind,
        device=device,
        size_gib=convert_to_gib(disk.f_blocks, disk.f_frsize),
        free_gib=convert_to_gib(disk.f_bavail, disk.f_frsize),
    )


def _unescape(text: str) -> str:
    """Decode a path of mountinfo, which writes spaces and backslashes as octal numbers."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), text)
