"""Steps whose exchanges run beside computing against steps that wait for them, over links of stated rate and delay.

    python benchmarks/beside.py halos cosmoflow deepcam [--ranks 2 4] [--link RATE,MS ...] [--pairs 8] [--steps 2]       as root

Each rank is a host of its own: a network namespace (iproute2) whose link goes through a token bucket (`tc tbf`) of RATE; this
script carries frames from host to host and holds each for MS milliseconds. RATE 0: no bucket. All hosts share this machine's cores.
Both ways are models in the same processes, on the same random samples, in blocks of steps by turns, the order reversed in
every second pair. A block's time is that of the slowest rank. Printed is the geometric mean of the pairs' ratios, beside over
waiting, with its 95 % interval (Student's t on logarithms), and the largest relative difference of the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import math
import os
import selectors
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

import torch
from random_steps import Training

from suite.statistics import student_t
from suite.world import World

LINKS = ("0,0", "200mbit,0", "50mbit,0", "50mbit,5", "10mbit,0")
MTU = 9000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LIMIT_S = 540
COSMOFLOW = ("hyperparameters.input_size=64", "hyperparameters.conv_channels=[8,16,32,64,64]")
COSMOFLOW += tuple(f"hyperparameters.{each}" for each in ("input_norm=log1p", "input_mean=null", "input_std=null"))
DEEPCAM = ("hyperparameters.height=192", "hyperparameters.width=288", "hyperparameters.middle_blocks=2")
SETTINGS = {"cosmoflow": COSMOFLOW, "deepcam": DEEPCAM}
MESHES = {
    ("halos", "cosmoflow"): {2: "spatial=2x1x1", 4: "spatial=2x2x1"},
    ("halos", "deepcam"): {2: "spatial=2x1", 4: "spatial=2x2"},
}
PLANS = {"halos": "spatial"}


class Wire:
    """Carries frames between hosts, each after a delay, in the order in which they came."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._taps: list[int] = []
        self._end, self._wake = os.pipe()

    def plug(self, name: str) -> None:
        """Make a device whose frames are carried."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
        self._taps.append(tap)

    def run(self) -> None:
        """Carry frames until `cut`."""
        ready, waiting, number = selectors.DefaultSelector(), list[tuple[float, int, int, bytes]](), 0
        known: dict[bytes, int] = {}
        for tap in (*self._taps, self._end):
            ready.register(tap, selectors.EVENT_READ)
        while True:
            pause = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
            for key, _ in ready.select(pause):
                if key.fd == self._end:
                    return
                frame = os.read(key.fd, MTU + 100)
                known[frame[6:12]] = key.fd
                to = known.get(frame[:6])
                for tap in self._taps if to is None else [to]:
                    if tap != key.fd:
                        number += 1
                        heapq.heappush(waiting, (time.monotonic() + self._delay_s, number, tap, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(tap, frame)

    def cut(self) -> None:
        """End `run` and unplug all."""
        os.write(self._wake, b"x")
        time.sleep(0.1)
        for each in (*self._taps, self._end, self._wake):
            os.close(each)


@contextlib.contextmanager
def hosts(count: int, rate: str, delay_s: float) -> Iterator[list[list[str]]]:
    """The command that runs something on each host."""
    ip, tc = (shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in ("ip", "tc"))
    if ip is None or tc is None or os.geteuid() != 0:
        sys.exit("network namespaces need root and iproute2")
    names = [f"mlb{os.getpid()}n{i}" for i in range(count)]
    wire = Wire(delay_s)

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for number, name in enumerate(names, 1):
            wire.plug(name)
            run(ip, "netns", "add", name)
            run(ip, "link", "set", name, "netns", name)
            run(ip, "-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", name)
            run(ip, "-n", name, "link", "set", name, "mtu", str(MTU), "up")
            run(ip, "-n", name, "link", "set", "lo", "up")
            if rate != "0":
                run(ip, "netns", "exec", name, tc, "qdisc", "add", "dev", name, "root", "tbf",
                    "rate", rate, "burst", "32k", "latency", "400ms")  # fmt: skip
        threading.Thread(target=wire.run, daemon=True).start()
        own_name = ["unshare", "-u", "sh", "-c", 'hostname "$0"; exec "$@"']
        yield [[ip, "netns", "exec", name, *own_name, name] for name in names]
    finally:
        wire.cut()
        for name in names:
            subprocess.run([ip, "netns", "del", name], capture_output=True)


def start(commands: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """Run this script once per host; what rank 0 printed. SystemExit with the error where one fails."""
    started = []
    for rank, command in enumerate(commands):
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(commands),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_PORT": 29611,
        }
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "10.79.0.1", "OMP_NUM_THREADS": "1"}
        environment["MLHPC_INTERFACE"] = command[3]
        own = [*command, sys.executable, __file__, *words, "--worker"]
        started.append(
            subprocess.Popen(own, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in started]
    except subprocess.TimeoutExpired:
        sys.exit(f"no answer in {LIMIT_S} s")
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, said, strict=True):
        if process.returncode:
            sys.exit(error[-3000:])
    return said[0][0]


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints a row per workload."""
    torch.set_num_threads(1)
    world = World.create()
    world.init_torch(torch.device("cpu"))
    for workload in args.workloads:
        mesh = MESHES[args.what, workload][world.size]
        overrides = [
            *SETTINGS[workload],
            f"plan={PLANS[args.what]}",
            f"mesh={mesh}",
            f"global_batch_size={args.batch_size}",
        ]
        ways = [Training(workload, "smoke", overrides, world, beside) for beside in ((), (args.what,))]
        found: list[list[tuple[float, float, float]]] = [[], []]
        for way in ways:
            way.steps(2)
        for pair in range(args.pairs):
            for at in (0, 1) if pair % 2 == 0 else (1, 0):
                took = ways[at].steps(args.steps)
                found[at].append((took.wall_s, took.all_cpu_s, took.loss))
        if world.is_first:
            print(json.dumps({"workload": workload, "mesh": mesh, "waiting": found[0], "beside": found[1]}), flush=True)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval."""
    logs = [math.log(each) for each in ratios]
    half = student_t.compute_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def render(row: dict[str, object], link: str) -> str:
    """One row of the table."""
    waiting, beside = (torch.tensor(row[name], dtype=torch.float64) for name in ("waiting", "beside"))
    steps, cpu = [interval((beside[:, at] / waiting[:, at]).tolist()) for at in (0, 1)]
    loss = float(((beside[:, 2] - waiting[:, 2]) / waiting[:, 2]).abs().max())
    middle = float(waiting[:, 0].median())
    spread = float(waiting[:, 0].std() / waiting[:, 0].mean())
    return (
        f"| {row['workload']} | {row['mesh']} | {link.replace(',', ', ')} ms | {1e3 * middle:.0f} ms ({100 * spread:.0f} %) | "
        f"{steps[0]:.3f} [{steps[1]:.3f}, {steps[2]:.3f}] | {cpu[0]:.2f} [{cpu[1]:.2f}, {cpu[2]:.2f}] | {loss:.0e} |"
    )


def main() -> None:
    """Start the hosts, one network after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(PLANS))
    parser.add_argument("workloads", nargs="+", choices=tuple(SETTINGS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--link", nargs="+", default=LINKS)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        try:
            return worker(args)
        except Exception:  # the other ranks wait for this one
            traceback.print_exc()
            os._exit(1)
    print(f"{args.what}, {args.pairs} pairs of blocks of {args.steps} steps, batch {args.batch_size}")
    print(
        "| workload | mesh | link, delay | step, waiting (spread) | step time, beside over waiting | CPU time | loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for ranks in args.ranks:
        for link in args.link:
            rate, delay = link.split(",")
            with hosts(ranks, rate, float(delay) / 1e3) as commands:
                for line in start(commands, sys.argv[1:]).splitlines():
                    if line.startswith("{"):
                        print(render(json.loads(line), link), flush=True)


if __name__ == "__main__":
    main()
