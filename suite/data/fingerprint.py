r"""Computes the identity of data that are not in the suite's shards: one sha256 over the files of a folder.

It is the sha256 of the text that sha256sum prints for the files in the order of their names:

    cd FOLDER && find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from mlhpc.suite.data.manifest import MANIFEST_NAME, Manifest, compute_checksums, read_manifest
from mlhpc.suite.data.verification import Verification, verify_shards
from mlhpc.suite.errors import InputError
from mlhpc.suite.transport import convert
from mlhpc.suite.world import World


def compute_fingerprint(root: Path, world: World, tick: Callable[[], None] = lambda: None) -> tuple[str, Verification]:
    """Read all files of a data set. Return its sha256 in hex, and the bytes and files read.

    All ranks call it, each reads its share. Sharded data are compared with their manifest, whose sha256 is returned.
    InputError, the same on every rank, if there is no file, or one cannot be read or is damaged.
    """
    found, error = None, None
    if world.is_first:
        try:
            found = read_manifest(root) if (root / MANIFEST_NAME).is_file() else list_files(root)
        except (OSError, ValueError) as caught:
            error = InputError(str(caught))
    world.check_together(error)
    found = world.broadcast(found)
    if isinstance(found, list):
        return _digest_files(root if root.is_dir() else root.parent, found, world, tick)
    manifest: Manifest = convert(found, Manifest)
    return manifest.sha256, verify_shards(root, manifest.shards, world, tick)


def list_files(root: Path) -> list[str]:
    """List the files below a folder, or the one file, relative, in byte order. InputError if there is none."""
    if root.is_file():
        return [root.name]
    below = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
    # By bytes, as `LC_ALL=C sort` does: the order of a locale differs between machines.
    files = sorted((path.relative_to(root).as_posix() for path in below if path.is_file()), key=os.fsencode)
    if not files:
        raise InputError(f"{root}: no data found; expected a file, or a folder with at least one file")
    return files


def _digest_files(root: Path, files: list[str], world: World, tick: Callable[[], None]) -> tuple[str, Verification]:
    begin, lines, error, size = time.monotonic(), {}, None, 0
    try:
        for name in files[world.rank :: world.size]:
            lines[name] = compute_checksums(root / name)[0]
            size += (root / name).stat().st_size
            tick()
    except OSError as caught:
        error = InputError(f"{caught.filename}: cannot be read: {caught.strerror}")
    world.check_together(error)
    # The digests of all files on every rank, so that all ranks return the same sha256 without another message.
    parts = world.allgather((lines, size, time.monotonic() - begin))
    known = {name: digest for part, _, _ in parts for name, digest in part.items()}
    text = "".join(f"{known[name]}  {name}\n" for name in files)
    read = Verification(sum(part[1] for part in parts), len(files), max(part[2] for part in parts))
    return hashlib.sha256(os.fsencode(text)).hexdigest(), read
