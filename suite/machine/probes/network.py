"""Lists the network ports of the node: Ethernet and InfiniBand interfaces, RDMA adapters, HPE Slingshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, NetworkInterface
from mlhpc.suite.machine.probes.sysfs import parse_number, read_text

LINKS = {"1": "ethernet", "32": "infiniband"}  # ARPHRD_* of the kernel's if_arp.h


def list_network_interfaces(root: Path) -> tuple[NetworkInterface, ...]:
    """List all ports that belong to a device. One InfiniBand port may appear as interface and as RDMA port."""
    return (*_list_interfaces(root), *_list_rdma_ports(root), *_list_slingshot(root))


def _list_interfaces(root: Path) -> Iterator[NetworkInterface]:
    for port in sorted((root / "sys/class/net").glob("*")):
        device = port / "device"
        if port.name == "lo" or not device.exists():  # bridges, tunnels and the like have no device
            continue
        megabit_s = parse_number(read_text(port / "speed"))  # -1 while the link is down
        yield NetworkInterface(
            name=port.name,
            link=LINKS.get(read_text(port / "type"), "other"),
            driver=(device / "driver").resolve().name if (device / "driver").exists() else UNKNOWN,
            speed_gbit_s=megabit_s / 1000 if megabit_s and megabit_s > 0 else None,
            state=read_text(port / "operstate") or UNKNOWN,
        )


def _list_rdma_ports(root: Path) -> Iterator[NetworkInterface]:
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        adapter = port.parent.parent
        yield NetworkInterface(
            name=f"{adapter.name}/{port.name}",
            link=f"rdma over {read_text(port / 'link_layer').lower() or UNKNOWN}",
            driver=read_text(adapter / "hca_type") or UNKNOWN,
            speed_gbit_s=parse_number(read_text(port / "rate")),
            state=read_text(port / "state").partition(": ")[2].lower() or UNKNOWN,
        )


def _list_slingshot(root: Path) -> Iterator[NetworkInterface]:
    for device in sorted((root / "sys/class/cxi").glob("*")):
        yield NetworkInterface(name=device.name, link="slingshot", driver="cxi", speed_gbit_s=None, state=UNKNOWN)
