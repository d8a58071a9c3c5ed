"""One rank of the staging tests: pretends to be on the node its rank is given, stages, prints what it saw as JSON.

Usage: staging_worker.py NODES SOURCE DIRECTORY [FAULT], NODES one name per rank. A fault is how this rank's node fails.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

NODES = sys.argv[1].split(",")
SOURCE, DIRECTORY = Path(sys.argv[2]), Path(sys.argv[3])
FAULT = sys.argv[4] if len(sys.argv) > 4 else ""
RANK = int(os.environ.get("RANK") or os.environ["PMI_RANK"])  # torchrun, mpiexec
os.environ["SLURMD_NODENAME"] = NODES[RANK]

from mlhpc.suite.data import staging  # noqa: E402
from mlhpc.suite.world import World  # noqa: E402

read_bytes = 0
writes = 0
preadv, pwrite = os.preadv, os.pwrite


def counting_preadv(*arguments):
    global read_bytes
    count = preadv(*arguments)
    read_bytes += count
    return count


def failing_pwrite(*arguments):
    global writes
    writes += 1
    if FAULT == "kill" and RANK == 1 and writes == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "disk" and RANK == 1 and writes == 10:
        raise OSError(28, "No space left on device")
    return pwrite(*arguments)


os.preadv, os.pwrite = counting_preadv, failing_pwrite
if FAULT == "full" and RANK == 1:
    statvfs = os.statvfs
    os.statvfs = lambda path: os.statvfs_result((*statvfs(path)[:3], 5, 5, *statvfs(path)[5:]))

world = World.create()
answer = {"rank": RANK}


def work():
    try:
        report = staging.stage(SOURCE, DIRECTORY, staging_world, block_bytes=4096)
        answer.update(root=str(report.root), stats=report.stats(overlapped=False), per_node=report.read_bytes_per_node)
    except ValueError as error:
        answer["error"] = str(error)


staging_world = staging.create_own_world(world)
thread = threading.Thread(target=work)  # as in training: main thread's communicator stays in use meanwhile
thread.start()
answer["sum"] = world.sum({"ranks": 1.0})["ranks"]
thread.join()
answer["read_bytes"] = read_bytes
answers = world.allgather(answer)
if world.is_first:
    print(json.dumps(answers))
