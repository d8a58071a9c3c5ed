"""The page of the events of a log, from the comments of suite/log/mllog.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mlhpc.suite.log import mllog

HEAD = """# Events of a log

A log is one file per trial, `result_<i>.txt`. One event is one line, `:::MLLOG {json}`, with the keys `namespace`, `time_ms` (Unix
milliseconds), `event_type` (`INTERVAL_START`, `INTERVAL_END`, `POINT_IN_TIME`), `key`, `value` and `metadata` (format:
mlcommons/logging). Each line is written before training goes on, so that a killed run leaves whole lines. In Python:
`mlhpc.suite.log.reader.read_events`.

Events of a step stand between `run_start` and `run_stop`; the reader leaves them out where nobody asks for them.

In order, a log of this suite has:

1. `cache_state`, `init_start`, and what the run states of itself: submission, size, seed, ranks, configuration,
   hyperparameters, model, data.
2. `staging_start`, `staging_stop`, `data_verified`, `train_samples`, `eval_samples`, `startup`, `init_stop`.
3. `run_start`.
4. For each block: `epoch_start`, `step_phases` and `window_stats` of each window, `tracked_stats`, `rank_phases`, `rank_stats`,
   `eval_start`, the metric, `eval_stop`, `energy`, `epoch_stop`.
5. `target_accuracy_reached` if the run reached it, `other_work`, `run_stop`.

Events of checkpoints come at any time between `run_start` and `run_stop`.
"""
# Of events whose value is not one number or name.
VALUES = {
    "run_files": "`{name: sha256}` of `sources.json` and `environment.json`",
    "tuned": "`by`, `objective`, `ranks`, `threads`, `evaluations`, `search_s`, `ratio` with `low` and `high`, `pairs`",
    "measured_choice": (
        "`name`, `chosen`; metadata `source` (kept, pinned, cache, measured, rule), `seconds` of each way, "
        "`problems`, `shape`"
    ),
    "step_phases": (
        "seconds on rank 0: `data_wait`, `forward_backward`, `exposed_communication`, `optimizer`, `other`; "
        "their sum `step`; `overlapped_communication` lies inside forward_backward. Metadata `epoch_num`, "
        "`first_step`, `steps`, `loss`"
    ),
    "rank_phases": "the same names for an epoch, mean over ranks",
    "rank_stats": (
        "each quantity: `min`, `median`, `mean`, `max`, `min_rank`, `max_rank`, and `values` of up to 64 "
        "ranks; metadata `absent`: why a quantity is missing"
    ),
    "first_losses": "losses of the first 20 steps, mean over ranks, exact; a resumed trial has none",
    "training_course": (
        "of an epoch: `gradient_norm` before clipping, geometric mean over about 16 of its steps; `still_weights`, "
        "the share of weights without a gradient in them; `weight_norm`; `coarse_weights`, the share of weights that "
        "bfloat16 holds exactly; `same_order`, the share of samples in their place of the epoch before; `loss_spread`, "
        "how losses of steps vary; `loss_repeat`, how they correlate with the same steps an epoch earlier. No norms "
        "where ranks hold parts of weights"
    ),
    "energy": (
        "per counter `joules` since the last such event, and how many `counters`; metadata `seconds`, "
        "`scopes`, `absent`"
    ),
    "checkpoint_saved": (
        "`stall_s` that training stood still, `write_s`, `bytes`, `files`; metadata `epoch_num`, `next_step`"
    ),
    "other_work": (
        "per node `cpus` and CPU seconds: `own_s` (the ranks and their children), `other_s`, `stolen_s` (by "
        "the hypervisor), and `pressure_s`, in which a process waited for a CPU; `source` is `proc_stat` or "
        "`control_group`"
    ),
    "startup": (
        "seconds over ranks: `interpreter` (process start to our first line), `imports` (torch, workload), "
        "`init` (the rest)"
    ),
    "work_per_sample": "the fields of `mlhpc.suite.workload.Work`, and `sample_bytes` as stored",
    "run_stop": "metadata `status`: success or aborted",
}
# Numbers and names that say what should happen: key, where its value is from, and what shows that it did happen.
STATED = {
    "submission_benchmark, submission_org, submission_division, submission_status, submission_platform": (
        "settings and system file",
        "the checker compares them with the package",
    ),
    "ruleset, suite_version, benchmark_size, run_mode": ("the program and its settings", "the files of the run folder"),
    "run_config, config_file, parallel_plan": ("settings", "sha256 of the file in the package"),
    "tuned, preflight": ("documents of an earlier command", "those documents"),
    "seed": ("settings, or drawn", "the order of samples; equal seeds give equal losses"),
    "global_batch_size, gradient_accumulation_steps": ("settings", "the counted samples of each epoch"),
    "train_samples, eval_samples": (
        "the data set's manifest",
        "a split that opens with another number is refused; samples are counted over ranks in each epoch and evaluation, and a "
        "difference ends the run. Rule `metric-share`",
    ),
    "samples_count (metadata)": ("steps × global batch", "the counted samples, as above"),
    "data_manifest": ("the manifest's bytes", "`data_verified`, where the run read all files"),
    "work_per_sample": ("formulas of the workload", "`benchmarks/results/`: counted operators of a step"),
    "baseline": ("the card", "the card's table"),
}
TITLES = {
    "MLPerf HPC 3.0 keys": "Keys of MLPerf HPC 3.0",
    "Ours: what analysis needs and MLPerf has no key for": "Keys of this suite: what analysis needs and MLPerf has no key for",
}


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, (key, remark) of each event) of the two sections of the source."""
    lines = Path(mllog.__file__).read_text(encoding="utf-8").splitlines()
    last = next(index for index, line in enumerate(lines) if line.startswith("class "))
    found: list[tuple[str, list[tuple[str, str]]]] = []
    statement = ""
    for line in lines[:last]:
        code, _, remark = line.partition("#")
        statement += code
        if line.startswith("# ") and remark.strip() in TITLES:
            found.append((TITLES[remark.strip()], []))
            statement = ""
        elif found and _whole(statement):
            found[-1][1].extend((key, remark.strip()) for key in _keys(statement))
            statement = ""
    for title, rows in found:
        stems = {key.removesuffix("_start") for key, _ in rows if key.endswith("_start")} | {mllog.BLOCK}
        yield title, [(key, remark) for key, remark in rows if key not in stems]


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for title, rows in sections():
        parts += [f"\n## {title}\n", "| key | meaning |", "| --- | --- |"]
        parts += [f"| `{key}` | {remark.replace('|', chr(92) + '|')} |" for key, remark in rows]
    parts += ["\n## Values and metadata\n", "| event | value |", "| --- | --- |"]
    parts += [f"| `{key}` | {text} |" for key, text in VALUES.items()]
    parts += [
        "\n## What is stated, and what is counted\n",
        "These say what should happen. All other events say what did: clocks, counters and sums over ranks.\n",
        "| key | from | what shows that it happened |",
        "| --- | --- | --- |",
    ]
    parts += [f"| {_quote(keys)} | {source} | {shown} |" for keys, (source, shown) in STATED.items()]
    return "\n".join(parts) + "\n"


def _quote(keys: str) -> str:
    return ", ".join(f"`{name}`{rest}" for name, rest in (split_remark(key) for key in keys.split(", ")))


def split_remark(key: str) -> tuple[str, str]:
    """Split ``name (remark)``."""
    name, gap, remark = key.partition(" ")
    return name, gap + remark


def _whole(statement: str) -> bool:
    try:
        return bool(ast.parse(statement.strip()).body)
    except SyntaxError:
        return False


def _keys(statement: str) -> list[str]:
    return [node.value for node in ast.walk(ast.parse(statement.strip())) if isinstance(node, ast.Constant)]
