"""Defines the MLPerf log format: names of events, and the writer. The reader is mlhpc.suite.log.reader.

One event is one line, ``:::MLLOG {json}``, with the keys namespace, time_ms, event_type, key, value, metadata (format:
mlcommons/logging, mllog). Key names follow the MLPerf HPC 3.0 rules. Names that MLPerf does not have are listed under
"ours" below.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from mlhpc.suite.files import VERBOSE, check_ownership, print_line, render_reason, render_repr

TOKEN = ":::MLLOG "
INTERVAL_START = "INTERVAL_START"
INTERVAL_END = "INTERVAL_END"
POINT_IN_TIME = "POINT_IN_TIME"

# MLPerf HPC 3.0 keys
CACHE_CLEAR = "cache_clear"  # true: the page cache was dropped before the run
INIT = "init"  # intervals are named by their stem: EventLog.start(INIT) writes INIT_START
INIT_START, INIT_STOP = "init_start", "init_stop"  # connecting ranks, building the model: not timed, at most 30 minutes
RUN = "run"
RUN_START, RUN_STOP = "run_start", "run_stop"  # the time to train; run_stop: metadata status, reason
STAGING = "staging"
STAGING_START, STAGING_STOP = "staging_start", "staging_stop"  # copying data to the node; its time counts
EPOCH = "epoch"
EPOCH_START, EPOCH_STOP = "epoch_start", "epoch_stop"  # metadata epoch_num, from 1
EVAL = "eval"
EVAL_START, EVAL_STOP = "eval_start", "eval_stop"  # metadata epoch_num: the epoch that was trained last
BLOCK = "block"  # OpenFold's logs count blocks of steps in place of epochs
SUBMISSION_BENCHMARK = "submission_benchmark"  # cosmoflow, deepcam, oc20, openfold, or a benchmark of this suite
SUBMISSION_ORG = "submission_org"  # who ran it
SUBMISSION_DIVISION = "submission_division"  # closed or open
SUBMISSION_STATUS = "submission_status"  # cloud, onprem, preview or research
SUBMISSION_PLATFORM = "submission_platform"  # the system
SEED = "seed"  # of this run; no two runs of a result have the same
NUMBER_OF_RANKS = "number_of_ranks"  # processes
NUMBER_OF_NODES = "number_of_nodes"  # nodes
ACCELERATORS_PER_NODE = "accelerators_per_node"  # those in use; 0 on processors alone
GLOBAL_BATCH_SIZE = "global_batch_size"  # samples of one optimizer step, over all ranks
TRAIN_SAMPLES = "train_samples"  # samples of the training split
EVAL_SAMPLES = "eval_samples"  # samples of the validation split
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"  # parts a rank computes its share of a batch in
EVAL_ERROR = "eval_error"  # value of the metric, lower is better; metadata epoch_num
EVAL_ACCURACY = "eval_accuracy"  # value of the metric, higher is better; metadata epoch_num
TRACKED_STATS = "tracked_stats"  # {"throughput": samples per second of an epoch}; metadata epoch_num
TARGET_ACCURACY_REACHED = "target_accuracy_reached"  # the first value that meets the target; metadata epoch_num

# Ours: what analysis needs and MLPerf has no key for
RULESET = "ruleset"  # the ruleset the run was made for
BENCHMARK_SIZE = "benchmark_size"  # the card's size; sizes are never ranked together
SUITE_VERSION = "suite_version"  # version of this suite
RUN_CONFIG = "run_config"  # the whole resolved RunConfig as a mapping; of a person's own loop what was stated
TUNED = "tuned"  # how mlhpc tune found the settings: objective, evaluations, seconds, time over the default's
CONFIG_FILE = "config_file"  # name of the file of settings, in run folder and package; metadata: sha256
RUN_FILES = "run_files"  # {name: sha256} of what the run folder says of code and environment; never of facts
MEASURED_CHOICE = "measured_choice"  # {"name", "chosen"}: how to compute; metadata: source, seconds of each way, shape
PARALLEL_PLAN = "parallel_plan"  # the plan by which ranks share samples, its mesh and checksum; only where there is one
RUN_MODE = "run_mode"  # value "strong" or "weak"; metadata: trial, launcher
CACHE_STATE = "cache_state"  # "dropped" | "cold-by-size" | "unverified"; metadata: command, exit_code, ...
STARTUP = "startup"  # seconds from process start: {"interpreter": {min, median, max}, "imports": ..., "init": ...}
STAGING_STATS = "staging_stats"  # bytes, seconds, gb_per_s, files, nodes, reused, overlapped
DATA_MANIFEST = "data_manifest"  # sha256 of the data set's manifest
DATA_VERIFIED = "data_verified"  # {"bytes", "files", "seconds", "gb_per_s"}; null: the run was told not to
DATA_ROOT, STAGED_COPY = "data root", "staged copy of each node"  # which copy was verified
MODEL_PARAMETERS = "model_parameters"  # trainable numbers of the model
WORK_PER_SAMPLE = "work_per_sample"  # model and executed FLOPs, algorithmic bytes (see mlhpc.suite.workload.Work)
BASELINE = "baseline"  # the card's metric of simple predictors; metadata: oracle baselines, and the data they hold for
WINDOW_STATS = "window_stats"  # what the workload counts over a logging window (experts' load, imbalance of samples)
FIRST_LOSSES = "first_losses"  # losses of the first 20 steps, mean over ranks, each the shortest text of its float64
TRAINING_COURSE = "training_course"  # per epoch: norms, and how the losses of steps vary and repeat
RECOMPUTED_FLOPS = "recomputed_flops_per_sample"  # of blocks that the plan computes again, counted in the first step
STEP_PHASES = "step_phases"  # seconds per phase of one logging window on rank 0; sums to the window's step time
CHECKPOINT = "checkpoint_saved"  # {"stall_s", "write_s", "bytes", "files"}
CHECKPOINT_FAILED = "checkpoint_failed"  # the place and the reason; training went on
RUN_RESUMED = "run_resumed"  # present only in a resumed run, which is therefore not scored
RECOVERY = "recovery"  # of a run that goes on, at run_start: seconds since the last step that counts, by phase
SUSPENDED = "suspended"  # seconds for which the first rank was suspended: its clock jumped
RUN_REPLACED = "failed_run_replaced"  # for each run of this trial that began, failed and was run again by choice
RANK_PHASES = "rank_phases"  # per-epoch phase seconds: mean over ranks
RANK_STATS = "rank_stats"  # per epoch: phases, bytes read and communicated, memory peaks: their distribution over ranks
GOODPUT = "goodput"  # after run_stop: where the seconds of this trial's attempts went, what each interruption cost
PREFLIGHT = "preflight"  # {"good", "bad", "inconclusive"; "wrong" if any}: nodes by verdict; metadata: criteria
ENERGY = "energy"  # joules since the last such event or run_start, by counter, summed over nodes and GPUs
OTHER_WORK = "other_work"  # per node, CPU seconds of the run: the ranks' own, other processes', stolen by a hypervisor


class EventLog:
    """Writes events to a log file. Every rank makes every call; only the rank that was given a path writes.

    Each line is written before the call returns, so that a killed run leaves whole lines. If the disk is full, the run
    goes on: lines wait in memory for space. `close` raises OSError if there never was any.

    ``wall_ms`` returns Unix milliseconds. FileExistsError if the file exists: a log is never overwritten. With
    ``later`` `open` makes the file, and events wait for it: a trial that is refused earlier leaves no log.
    """

    def __init__(self, path: Path | None, *, wall_ms: Callable[[], int] | None = None, later: bool = False) -> None:
        anchor = time.time_ns() - time.monotonic_ns()  # a stepped system clock cannot make an interval negative
        self._wall_ms = wall_ms or (lambda: (anchor + time.monotonic_ns()) // 1_000_000)
        self.path = path
        self._file: FileIO | None = None
        self._waiting = b""
        self._told = False
        if not later:
            self.open()

    def open(self) -> None:
        """Make the file. FileExistsError if there is one, another OSError if it cannot be made."""
        if self.path is not None and self._file is None:
            self._file = self.path.open("xb", buffering=0)

    def event(
        self,
        key: str,
        value: Any = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        event_type: str = POINT_IN_TIME,
        stack_level: int = 1,
    ) -> None:
        """Write one event. Any value is accepted: what JSON cannot hold is written as text."""
        if self.path is None:
            return
        frame = sys._getframe(stack_level)
        where = {"file": _shorten_path(frame.f_code.co_filename), "lineno": frame.f_lineno}
        record = {
            "namespace": "",
            "time_ms": self._wall_ms(),
            "event_type": event_type,
            "key": str(key),
            "value": convert_to_json(value),
            "metadata": where | (convert_to_json(dict(metadata)) if metadata else {}),
        }
        if os.environ.get(VERBOSE):
            print_line(f"{key}: {render_repr(record['value'], longest=200)}", error=True, result=False)
        self._waiting += f"{TOKEN}{json.dumps(record, allow_nan=False)}\n".encode()
        try:
            self._write()
        except OSError as error:
            if not self._told:
                self._told = True
                why = render_reason(error, self.path)
                print_line(f"mlhpc: {self.path}: {why}; the run goes on, events wait for space", error=True)

    def _write(self) -> None:
        """Write the waiting lines. Bytes that the disk has taken are not written again."""
        check_ownership()
        while self._waiting and self._file is not None:
            self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def start(self, stem: str, value: Any = None, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write ``<stem>_start``."""
        self.event(f"{stem}_start", value, metadata=metadata, event_type=INTERVAL_START, stack_level=2)

    def stop(self, stem: str, value: Any = None, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write ``<stem>_stop``."""
        self.event(f"{stem}_stop", value, metadata=metadata, event_type=INTERVAL_END, stack_level=2)

    @contextmanager
    def interval(self, stem: str, *, metadata: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Write start, run the body, write stop. If the body raises, the interval stays open in the log."""
        self.event(f"{stem}_start", metadata=metadata, event_type=INTERVAL_START, stack_level=3)
        yield
        self.event(f"{stem}_stop", metadata=metadata, event_type=INTERVAL_END, stack_level=3)

    def close(self) -> None:
        """Force the file to the disk and close it. OSError, with the file's name, if a part could not be written."""
        if self._file is None:
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            why = f"{render_reason(error, self.path)}; the end of the log is missing"
            raise OSError(error.errno, why, str(self.path)) from None
        finally:
            self._file.close()


def convert_to_json(value: Any) -> Any:
    """Convert any Python value to plain JSON. numpy and torch values become lists or numbers; NaN, infinity and others
    text.
    """
    if value is None or isinstance(value, str | bool):
        return value if not isinstance(value, str) else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [convert_to_json(item) for item in value]
    convert = getattr(value, "tolist", None)  # numpy and torch, without importing either
    if callable(convert):
        plain = convert()
        return convert_to_json(plain) if not hasattr(plain, "tolist") else str(plain)
    return str(value)


def _shorten_path(filename: str) -> str:
    return "/".join(Path(filename).parts[-3:]).lstrip("/")
