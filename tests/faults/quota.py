"""Lets the disk of the checkpoints, or the memory of a control group, run out while a run trains, and checks what is left.

    python -m tests.faults.quota --disks 12 --memories 6 -o DATE-quotas.txt

Each is one epoch of moe_lm `smoke` under its plan `sharded` on two ranks, with a checkpoint every second. A disk is a tmpfs on the
folder of the checkpoints, too small for one, two or more of them: training must go on to its end, and every checkpoint that was not
written is one line with the file and "disk full". Memory is the limit of a control group, in which the kernel kills what asks for
more: all processes must end, and the run is continued without the limit. All losses equal those of an undisturbed run, bit for bit.
Both need root; memory needs version 1 of control groups.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.campaign import Chain, check_losses, make_data, steps

PLAN = "sharded"
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_S = 600.0
Reference = dict[tuple[int, int], tuple[float, float]]


def fill_disk(chain: Chain, kib: int, reference: Reference) -> tuple[str, list[str]]:
    """Train with so small a disk for checkpoints. Returns what happened to them and what is wrong."""
    process = chain.start()
    while not (chain.root / "run.json").exists() and process.poll() is None:
        time.sleep(0.01)
    disk = chain.root / "checkpoint"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], check=True)
    try:
        code = process.wait()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    lines = [
        line
        for path in (chain.root / "output").glob("*.log")
        for line in path.read_text().splitlines()
        if "warning" in line
    ]
    unwritten = [line for line in lines if "checkpoint not written" in line]
    problems = check_losses(chain, reference)
    if code not in (0, 1):
        problems.append(f"exit code {code}")
    if other := [line for line in unwritten if not re.search(r"checkpoint/trial_0\S*: disk full", line)]:
        problems.append(f"it said {other[0]!r}")
    saved = chain.logs()[0].read_bytes().count(b'"checkpoint_saved"')
    what = "none was written" if not saved else "some were not written" if unwritten else "all were written"
    return what, problems


def limit_memory(chain: Chain, mib: int, reference: Reference) -> tuple[str, list[str]]:
    """Train in a control group with so little memory, then without it. Returns what happened and what is wrong."""
    group = GROUPS / f"mlhpc-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(f"{mib}M")
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        python, chain.python = chain.python, [*enter, *chain.python]
        process, begin = chain.start(), time.monotonic()
        while process.poll() is None and time.monotonic() < begin + LIMIT_S:
            time.sleep(0.1)
        chain.python = python
        problems = [] if process.poll() is not None else [f"it did not end in {LIMIT_S:g} s"]
        end = time.monotonic() + chain.end_s
        while chain.alive() and time.monotonic() < end:
            time.sleep(0.1)
        if left := chain.alive():
            problems.append(f"left {len(left)} processes")
        kills = re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())
        what = "the kernel killed a process" if kills and int(kills[1]) else "it was enough"
        for word in (group / "cgroup.procs").read_text().split():
            os.kill(int(word), 9)
        time.sleep(0.5)
    finally:
        group.rmdir()
    chain.replace = (
        not (chain.root / "checkpoint" / "trial_0.pt").exists() and bool(chain.logs()) and not chain.trained_whole()
    )
    if not chain.trained_whole():
        chain.start().wait()
    return what, problems + check_losses(chain, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disks", type=int, default=12)
    parser.add_argument("--memories", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlhpc-quota-") as scratch:
        found = campaign(Path(scratch), options.disks, options.memories, options.seed, options.output)
    sys.exit(any(problems for _, _, problems in found))


def campaign(
    root: Path, disks: int, memories: int, seed: int, output: Path | None = None
) -> list[tuple[str, str, list[str]]]:
    """Run so many of each; the table is written after each one."""
    data, chance = make_data(root, "moe_lm"), random.Random(seed)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def chain(name: str, *, warm: bool) -> Chain:
        return Chain(root / name, data, seed, environment, PLAN, warm=warm)

    calm = chain("calm", warm=True)
    calm.start().wait()
    reference = steps(calm.root / "result_0.txt")
    found: list[tuple[str, str, list[str]]] = []
    for number in range(disks + memories):
        if number < disks:
            kib = int(100 * 30 ** chance.random())  # a checkpoint has some 700
            kind, made = "disk", fill_disk(chain(f"disk{number}", warm=True), kib, reference)
        else:
            mib = chance.randrange(150, 1200)  # both ranks and the launcher need some 900
            kind, made = "memory", limit_memory(chain(f"memory{number}", warm=False), mib, reference)
        found.append((kind, *made))
        print(kind, *made, flush=True)
        if output is not None:
            output.write_text(table(found))
    return found


def table(found: list[tuple[str, str, list[str]]]) -> str:
    """The counts by kind and what happened, and every problem."""
    counts, bad = (Counter((kind, what) for kind, what, each in found if each or not only) for only in (False, True))
    lines = ["| short of | what happened | n | with a problem |", "| --- | --- | --- | --- |"]
    lines += [f"| {kind} | {what} | {n} | {bad[kind, what]} |" for (kind, what), n in sorted(counts.items())]
    return "\n".join([*lines, *(f"- {kind}, {what}: {each}" for kind, what, all_ in found for each in all_)]) + "\n"


if __name__ == "__main__":
    main()
