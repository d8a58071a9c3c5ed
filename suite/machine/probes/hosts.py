"""Reads the name of the node and the addresses that /etc/hosts gives it."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from mlhpc.suite.machine.probes.sysfs import read_text


def read_hostname(root: Path) -> str:
    """Return the node's own name, as the kernel has it."""
    return read_text(root / "proc/sys/kernel/hostname") or socket.gethostname()


def list_own_addresses(root: Path) -> tuple[str, ...]:
    """List the addresses that /etc/hosts gives the node's own name, in file order. Empty if it is not listed."""
    name = read_hostname(root)
    rows = (line.partition("#")[0].split() for line in read_text(root / "etc/hosts").splitlines())
    return tuple(row[0] for row in rows if name in row[1:] or name.partition(".")[0] in row[1:])


def is_loopback(address: str) -> bool:
    """Return True for an address that only the node itself reaches; False for a text that is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
