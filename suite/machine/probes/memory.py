"""Reads the node's main memory: sizes from /proc/meminfo, DIMMs from the EDAC driver or else from dmidecode."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, Memory
from mlhpc.suite.machine.probes.sysfs import Run, convert_to_gib, parse_number, read_text


def read_memory(root: Path, run: Run) -> Memory:
    """Read sizes, DIMMs and huge pages. What the node does not show keeps its default."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo"), re.M))
    hugepages = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(
        total_gib=convert_to_gib(info.get("MemTotal"), 1024),
        swap_gib=convert_to_gib(info.get("SwapTotal"), 1024),
        modules=_count_dimms_edac(root) or _count_dimms_dmi(run(["dmidecode", "-t", "memory"])),
        transparent_hugepages=hugepages.group(1) if hugepages else UNKNOWN,
    )


def _count_dimms_edac(root: Path) -> dict[str, int]:
    """Count DIMMs by description. The driver states sizes in MiB."""
    dimms: Counter[str] = Counter()
    for dimm in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*"):
        size = parse_number(read_text(dimm / "size"))
        if size:
            dimms[f"{size / 1024:g} GiB {read_text(dimm / 'dimm_mem_type')}".strip()] += 1
    return dict(dimms)


def _count_dimms_dmi(text: str) -> dict[str, int]:
    """Count DIMMs by description in the output of dmidecode. Often none: dmidecode needs root."""
    dimms: Counter[str] = Counter()
    for block in text.split("Memory Device\n")[1:]:
        fields = dict(re.findall(r"^\s+(Size|Type|Configured Memory Speed): (.+)$", block.split("\n\n")[0], re.M))
        if re.match(r"\d", fields.get("Size", "")):
            parts = (fields.get(key, "") for key in ("Size", "Type", "Configured Memory Speed"))
            dimms[" ".join(part for part in parts if part and part != "Unknown")] += 1
    return dict(dimms)
