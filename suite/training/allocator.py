"""Settings of the C library's memory allocator for ranks that train on a CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it. False if libc is not glibc.

    By default glibc maps every block above a threshold (128 KiB, at most 32 MiB) separately and unmaps it when it is freed, so
    the kernel clears the same pages for the same tensors in every step. Memory that is mapped already is not affected.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  mallopt exists elsewhere too, with other numbers
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))
    except (OSError, AttributeError, TypeError):
        return False
