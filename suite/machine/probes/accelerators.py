"""Lists a node's accelerators and their links, from nvidia-smi, the vendors' drivers or the PCI bus."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, Accelerator
from mlhpc.suite.machine.probes.sysfs import Run, convert_to_gib, parse_integer, parse_number, read_text

ACCELERATOR_CLASSES = ("0x0302", "0x0380", "0x1200")  # PCI: 3D controller, other display controller, accelerator
NVIDIA_FIELDS = (
    *("name", "memory.total", "driver_version", "clocks.max.sm", "power.limit"),
    *("pcie.link.gen.max", "pcie.link.width.max", "mig.mode.current"),
)
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits")


def list_accelerators(root: Path, run: Run) -> tuple[Accelerator, ...]:
    """List all accelerators, from the first source that knows any: the vendors' tools, then the kernel."""
    sources: tuple[Callable[[], list[Accelerator]], ...] = (
        lambda: _parse_nvidia_smi(run(NVIDIA_SMI)),
        lambda: _list_nvidia_proc(root),
        lambda: _list_amd(root, run),
        lambda: _list_pci(root),
    )
    return tuple(next((found for source in sources if (found := source())), []))


def _parse_nvidia_smi(text: str) -> list[Accelerator]:
    accelerators = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(NVIDIA_FIELDS):
            continue
        model, memory_mib, driver, clock, power, generation, width, mig = values
        accelerators.append(
            Accelerator(
                vendor="NVIDIA",
                model=model,
                memory_gib=convert_to_gib(memory_mib, 1 << 20),
                driver=driver,
                max_clock_mhz=parse_number(clock),
                power_limit_w=parse_number(power),
                pcie_generation=parse_integer(generation),
                pcie_width=parse_integer(width),
                mig=mig if mig[:1].isalpha() else UNKNOWN,
            )
        )
    return accelerators


def _list_nvidia_proc(root: Path) -> list[Accelerator]:
    texts = [read_text(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    models = [match.group(1) for text in texts if (match := re.search(r"Model:\s+(.+)", text))]
    version = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", read_text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else UNKNOWN
    return [Accelerator(vendor="NVIDIA", model=model.strip(), driver=driver) for model in models]


def _list_amd(root: Path, run: Run) -> list[Accelerator]:
    cards = [
        card / "device"
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if card.name[4:].isdigit() and read_text(card / "device/mem_info_vram_total")
    ]
    if not cards:
        return []
    names = re.findall(r"Card [Ss]eries:\s*(.+)", run(["rocm-smi", "--showproductname"]))
    driver = read_text(root / "sys/module/amdgpu/version") or UNKNOWN
    return [
        Accelerator(
            vendor="AMD",
            model=read_text(card / "product_name") or (names[i].strip() if i < len(names) else UNKNOWN),
            memory_gib=convert_to_gib(read_text(card / "mem_info_vram_total"), 1),
            driver=driver,
        )
        for i, card in enumerate(cards)
    ]


def _list_pci(root: Path) -> list[Accelerator]:
    """List PCI devices of accelerator classes. Their driver or its tool may be missing, so only numbers are known."""
    accelerators = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if read_text(device / "class").startswith(ACCELERATOR_CLASSES):
            vendor, model = read_text(device / "vendor"), read_text(device / "device")
            name = f"PCI {vendor}:{model}, no driver tool found"
            accelerators.append(Accelerator(vendor=f"PCI {vendor}", model=name))
    return accelerators


def read_accelerator_links(accelerators: Sequence[Accelerator], run: Run) -> str:
    """Return how the node's accelerators are linked, for people to read. Known only for NVIDIA's."""
    if not accelerators or accelerators[0].vendor != "NVIDIA":
        return UNKNOWN
    # The table underlines its head with terminal codes; its legend names NV# for any machine
    matrix = re.sub(r"\x1b\[[\d;]*m", "", run(["nvidia-smi", "topo", "-m"])).split("Legend")[0]
    lanes = sorted(set(re.findall(r"\bNV\d+\b", matrix)))
    if lanes:
        return "NVLink (" + ", ".join(lanes) + " in nvidia-smi topo)"
    return "PCIe" if len(accelerators) > 1 and matrix else UNKNOWN
