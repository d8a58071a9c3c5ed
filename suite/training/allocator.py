"""The C library's heap of a process that trains on the CPU. No torch."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have freed memory stay with this process, to be used again; False where the C library is not glibc.

    glibc maps every block above a threshold (128 KiB, at most 32 MiB) on its own and returns it when it is freed: the kernel
    then clears the same pages for the same tensors in every step. Threads that run already keep what they have mapped.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  mallopt exists elsewhere too, with other numbers
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))
    except (OSError, AttributeError, TypeError):
        return False
