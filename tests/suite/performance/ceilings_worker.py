"""`ceilings_worker.py ARGUMENT...`: `mlhpc ceilings --quick` in this world, with few repetitions and small sizes."""

from __future__ import annotations

import sys

from mlhpc.suite.cli.main import main
from mlhpc.suite.machine.probes.processor import CpuCache
from mlhpc.suite.performance.ceilings import compute, measure
from mlhpc.suite.performance.ceilings.samples import Effort

measure.QUICK = Effort(
    repetitions=3,
    sample_s=1e-4,
    order_s=0.5,
    slowest_s=0.5,
    sustained_s=0.01,
    points_per_octave=1,
    largest_message_bytes=64 << 10,
    storage_bytes=40 << 20,
)
compute.CPU_ORDERS = (compute.LAUNCH_ORDER, 64)
measure.list_data_caches = lambda root, cpus: [CpuCache(1, "data", 16, "0"), CpuCache(2, "unified", 128, "0")]

sys.argv = ["mlhpc", "ceilings", "--quick", *sys.argv[1:]]
main()
