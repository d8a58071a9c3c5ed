"""Reads short texts of the kernel and of vendors' tools, and numbers in them. No function here raises."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

COMMAND_TIMEOUT_S = 20

Run = Callable[[Sequence[str]], str]  # runs a command and returns what it prints, "" if it fails


def run_command(command: Sequence[str]) -> str:
    """Return what a command prints; "" if it is not installed, fails or takes longer than `COMMAND_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_text(path: Path) -> str:
    """Return the content of a file without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def parse_number(text: str) -> float | None:
    """Parse the number at the beginning of a text ("200 Gb/sec" gives 200.0). None without a number."""
    match = re.match(r"-?\d+(\.\d+)?", text.strip())
    return float(match.group()) if match else None


def parse_integer(text: str) -> int | None:
    """Parse a text of digits as an integer; None for any other text."""
    return int(text) if text.isdecimal() else None


def convert_to_gib(amount: str | float | None, unit_bytes: int) -> float | None:
    """Convert units of ``unit_bytes`` bytes to GiB, to three digits. None if it is no number ("max", "[N/A]")."""
    value = parse_number(amount) if isinstance(amount, str) else amount
    return round(value * unit_bytes / 2**30, 3) if value is not None else None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs as Linux writes it: ``0-2,8`` is CPUs 0, 1, 2 and 8. Empty for any other text."""
    if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*", text.strip()):
        return frozenset()
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
