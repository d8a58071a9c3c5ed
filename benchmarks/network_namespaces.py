"""Predict the all-to-alls of eight hosts from those of one, two and four, on a network that is measured, not drawn.

    python benchmarks/network_namespaces.py [--rate 8mbit] [--repeats 5] [--up-to-mib 0.5]        as root, with iproute2

Hosts are network namespaces on one machine, two ranks each, joined by a bridge; what leaves a host goes through a token bucket
(`tc tbf`), what stays inside it does not: a network of two levels. `mlhpc moe --sweep-network` sweeps all of it once with
gloo, `mlhpc moe fit` sees the grids up to four hosts. Hosts share the processor's cores, so their latencies are those of a
busy machine; the links between them are the bucket's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlhpc.plugins.network.fit import fit_sweep
from mlhpc.plugins.network.intervals import find_crossover, predict_all_to_all_band
from mlhpc.plugins.network.sweep import KIB, Sweep, read_sweep
from mlhpc.suite.performance.cost_model import ALGORITHMS

HOSTS, PER_HOST = 8, 2
WIRE = "wire"
PORT = 29577
LIMIT_S = 500


def main() -> None:
    parser = argparse.ArgumentParser(description="Measured against predicted all-to-alls of eight network namespaces.")
    parser.add_argument("--rate", default="8mbit", help="of what leaves a host, as tc writes it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--up-to-mib", type=float, default=0.5)
    parser.add_argument(
        "--sweep", type=Path, help="judge this file, made before, instead of measuring; or keep it here"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.sweep or Path(folder) / "sweep.json"
        if not path.exists():
            with hosts(chosen.rate) as commands:
                measure(commands, path, chosen.repeats, chosen.up_to_mib)
        judge(read_sweep(path), chosen.rate)


@contextmanager
def hosts(rate: str) -> Iterator[list[list[str]]]:
    """The command that runs something on each host."""
    ip, tc = (shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in ("ip", "tc"))
    if ip is None or tc is None or os.geteuid() != 0:
        sys.exit("network namespaces need root and iproute2")
    names = [f"mlhpc{os.getpid()}n{i}" for i in range(HOSTS)]
    switch = f"mlhpc{os.getpid()}s"

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        run(ip, "netns", "add", switch)
        run(ip, "-n", switch, "link", "add", "bridge", "type", "bridge")
        run(ip, "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            run(ip, "netns", "add", name)
            run(ip, "-n", switch, "link", "add", f"to{number}", "type", "veth", "peer", "name", WIRE, "netns", name)
            run(ip, "-n", switch, "link", "set", f"to{number}", "master", "bridge", "up")
            run(ip, "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", WIRE)
            for device in (WIRE, "lo"):
                run(ip, "-n", name, "link", "set", device, "up")
            run(ip, "netns", "exec", name, tc, "qdisc", "add", "dev", WIRE, "root", "tbf",
                "rate", rate, "burst", "16k", "latency", "400ms")  # fmt: skip
        own_name = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"']
        yield [[ip, "netns", "exec", name, *own_name, name] for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run([ip, "netns", "del", name], capture_output=True)


def measure(commands: Sequence[Sequence[str]], path: Path, repeats: int, up_to_mib: float) -> None:
    """Sweep the network with one process per rank; SystemExit with its error where one fails."""
    bench = [
        sys.executable, "-P", "-m", "mlhpc", "moe", "--sweep-network", "--ranks-per-node", str(PER_HOST),
        "--tokens", "256", "--width", "64", "--hidden", "64", "--experts", str(HOSTS * PER_HOST), "--top-k", "1",
        "--repeats", str(repeats), "--up-to-mib", str(up_to_mib), "-o", str(path),
    ]  # fmt: skip
    ranks = HOSTS * PER_HOST
    started = []
    for rank in range(ranks):
        host, local = divmod(rank, PER_HOST)
        place = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": PER_HOST,
            "MASTER_PORT": PORT,
        }
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {
            "MASTER_ADDR": "10.78.0.1",
            "MLHPC_INTERFACE": WIRE,
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen(
                [*commands[host], *bench], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, words in zip(started, said, strict=True):
        if process.returncode:
            sys.exit(words.decode(errors="replace")[-2000:])


def judge(sweep: Sweep, rate: str) -> None:
    """Print what a fit to the grids up to four hosts says of eight, beside what was measured."""
    seen = HOSTS // 2 * PER_HOST
    shown = replace(
        sweep,
        ranks=seen,
        measurements=tuple(m for m in sweep.measurements if m.ranks <= seen),
        layers=tuple(layer for layer in sweep.layers if layer.ranks <= seen),
    )
    fit, full = fit_sweep(shown), HOSTS * PER_HOST
    medians = {(m.algorithm, m.size_bytes): m.seconds for m in sweep.measurements if m.ranks == full}
    print(f"{sweep.description}; {rate} from host to host; fitted on {seen} ranks, predicted on {full}")
    print("\n| KiB per rank | algorithm | measured | predicted (90 %) | held |\n| --- | --- | --- | --- | --- |")
    held = []
    for algorithm in ALGORITHMS:
        sizes = np.array(sorted(size for name, size in medians if name == algorithm))
        band = predict_all_to_all_band(fit, full, sizes, algorithm)
        for index, size in enumerate(sizes.tolist()):
            measured = medians[algorithm, size]
            held.append(bool(band.low[index] <= measured <= band.high[index]))
            words = band.at(index).words(" ms", 1e3)
            print(
                f"| {size / KIB:g} | {algorithm} | {1e3 * measured:,.1f} ms | {words} | {'yes' if held[-1] else 'no'} |"
            )
    wins = [size for name, size in medians if name == "2dh" and medians["2dh", size] < medians["linear", size]]
    print(f"\nheld: {sum(held)} of {len(held)}; predicted: {find_crossover(fit, full).words()}; measured: 2DH wins at KiB per rank "
          + (", ".join(f"{size / KIB:g}" for size in sorted(wins)) or "none"))  # fmt: skip


if __name__ == "__main__":
    main()
