"""Measure what docs/energy.md states: the public logs, coverage, the sampler's cost.

    OMP_NUM_THREADS=1 python benchmarks/energy.py --power-logs FOLDER -o benchmarks/results/DATE-energy.txt

FOLDER: packages with power readings, such as mlcommons/training_results_v4.0 has (smc-ac-power, smc-dc-power).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlhpc.suite.compliance.check import check  # noqa: E402
from mlhpc.suite.log.energy.power_log import (  # noqa: E402
    build_curve,
    read_power_log,
)
from mlhpc.suite.log.energy.score import read_power_logs  # noqa: E402
from mlhpc.suite.machine.probes.processor import read_cpu  # noqa: E402
from tests.fixtures.zoo import machine  # noqa: E402
from tests.suite.log.energy.test_integrate import covered  # noqa: E402

PUBLISHED = {("smc-ac-power", 1): 12_127_904, ("smc-dc-power", 1): 11_769_962, ("smc-ac-power", 8): 20_644_275}


def reading(folder: Path) -> Iterator[str]:
    files = [path for kind in ("node", "sw") for path in folder.glob(f"*/results/*/*/power/*/{kind}_*.txt")]
    size = sum(path.stat().st_size for path in files)
    rounds = max(1, round(197e6 / size))
    begin = time.process_time()
    for _ in range(rounds):
        for path in files:
            read_power_log(path)
    spent = time.process_time() - begin
    yield (
        f"reader: {len(files)} files, {size / 1e6:.2f} MB, read {rounds} times = {rounds * size / 1e6:.0f} MB in "
        f"{spent:.2f} s of CPU (limit 10 s for 197 MB)"
    )


def public(folder: Path) -> Iterator[str]:
    yield "public logs: MLPerf Training 4.0, Llama 2 70B LoRA. Joules of the runs that the time score keeps, mean"
    for scored in check([folder]).results:
        result = scored.energy
        if result is None or result.mean_j is None:
            continue
        package = scored.group.package.name if scored.group.package else ""
        factor = scored.scale_factor or 1.0
        whole = [_whole_file(run.path, run.seconds) for run in result.runs if run.path in result.kept and run.path]
        network = statistics.fmean(run.interconnect_j for run in result.runs if run.path in result.kept)
        mean_power = statistics.fmean(whole) + network
        published = PUBLISHED.get((package, result.nodes))
        beside = f"{published:,}" if published else "-"
        yield f"  {package}, {result.nodes} nodes, {len(result.kept)} runs kept, network estimated: {result.estimated}"
        interval = ", ".join(f"{joules:,.0f}" for joules in result.interval_j or ())
        yield f"    in the run, integrated             {result.mean_j:14,.0f} J, 95 % [{interval}]"
        yield f"    mean power of the whole file x time {mean_power:13,.0f} J"
        ours = f"{result.mean_j * factor:,.0f} / {mean_power * factor:,.0f}"
        yield f"    published / our two x scaling.json ({factor:.6f}): {beside} / {ours}"
        if published:
            ratios = (result.mean_j * factor / published - 1, mean_power * factor / published - 1)
            yield f"    differences from the published figure: {ratios[0]:+.2%} / {ratios[1]:+.2%}"
        yield f"    {result.reason}"
    found = [finding for finding in check([folder]).findings if finding.rule.startswith("power-")]
    yield "breaches by rule: " + ", ".join(
        f"{rule} {count}" for rule, count in Counter(f.rule for f in found).most_common()
    )
    for finding in found:
        yield f"  {finding.rule:16} {Path(finding.file).relative_to(folder)}: {finding.message}"


def _whole_file(log: Path, seconds: float) -> float:
    """Mean power of all that the files hold, times the run's time: what the published function means."""
    meters = read_power_logs(log)
    assert meters is not None
    total = 0.0
    for each in meters.of("node"):
        line = build_curve(each)
        total += line.up_to(line.end_s) / (line.end_s - line.begin_s) * seconds
    return total


def coverage(runs: int = 1000) -> Iterator[str]:
    for duty, name in (
        (None, "readings of a moment, one at a random time in each second"),
        (0.25, "board that looks 25 ms of 100 ms, read every 1 s"),
    ):
        held = sum(covered(seed, duty=duty) for seed in range(runs))
        yield f"95 % interval, 10 Hz wave, 400 or 1200 W (half periods vary 10 %), 120 s, {name}: {held} of {runs}"


def sampler(seconds: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        root = machine("xeon_with_counters").lay_out(Path(folder) / "root")
        words = [
            sys.executable,
            "-P",
            "-m",
            "mlhpc.suite.machine.power.sampler",
            f"{folder}/power",
            "0",
            "--root",
            str(root),
        ]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            stat = Path(f"/proc/{process.pid}/stat")
            time.sleep(10.0)
            started = _cpu_s(stat)
            begin = time.monotonic()
            time.sleep(seconds)
            used, wall = _cpu_s(stat) - started, time.monotonic() - begin
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        log = read_power_log(Path(folder) / "power" / "node_0.txt")
        rate = len(log.times_ms) / (wall + 10)
    yield (
        f"sampler: 3 counters of a fake tree, {wall:.0f} s: {used * 1e3:.0f} ms of CPU = {used / wall:.3%} of a core "
        f"(0.1 % allowed), {rate:.2f} readings a second; its start costs {started * 1e3:.0f} ms of CPU once (clock ticks of 10 ms)"
    )


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--power-logs", type=Path, required=True)
    parser.add_argument("--sampler-s", type=float, default=120.0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    lines = [f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {read_cpu(Path('/')).model}, "
             f"{os.cpu_count()} CPUs, shared, load {os.getloadavg()[0]:.1f}", ""]  # fmt: skip
    parts = (reading(given.power_logs), coverage(), sampler(given.sampler_s), public(given.power_logs))
    for part in parts:
        for line in part:
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    spent = resource.getrusage(resource.RUSAGE_SELF)
    lines.append(f"all of it: {spent.ru_utime + spent.ru_stime:.0f} s of CPU, {spent.ru_maxrss / 1024:.0f} MiB at most")
    given.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
