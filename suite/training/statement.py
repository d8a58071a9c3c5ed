"""Writes the events that name a run. Trials of the harness and own loops use it.

States what one trial is to do, before torch is imported. It is the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlhpc.suite import RULESET, VERSION
from mlhpc.suite.card import SizeCard, Target
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import convert_to_plain_data, list_differing_keys
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line, read_bytes, write_file_atomically
from mlhpc.suite.launcher import find_batch_job
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.run_folder import RunFolder, list_replaced_runs
from mlhpc.suite.machine.probes.processor import find_machine_root, is_simulated
from mlhpc.suite.world import World


@dataclass(frozen=True)
class TrialPlan:
    """Trial number ``trial`` of the ``runs`` of a run folder.

    ``mode``: strong (time to train) or weak (throughput). ``base_seed`` None: the operating system draws the seed.
    ``resume``: continue the trial. The worker decides from where (mlhpc.suite.log.run_folder); `run_trial` loads its
    checkpoint. ``replace_failed``: repeat a run that began and failed.
    """

    descriptor: Descriptor
    config: RunConfig
    folder: RunFolder
    trial: int
    runs: int = 1
    mode: str = "strong"
    base_seed: int | None = None
    resume: bool = False
    replace_failed: bool = False

    @property
    def size_card(self) -> SizeCard:
        """The card of the config's size."""
        return self.descriptor.card().size(self.config.size)

    @property
    def target(self) -> Target:
        """The metric's value that the trial must reach."""
        return self.descriptor.card().target(self.config.size)


# run_trial adds the rank's number above these bits, so the seeds of ranks do not meet.
SEED_BITS = 31


@dataclass(frozen=True)
class Startup:
    """The start of this process: seconds to the suite's first line, seconds of imports, and perf_counter after them."""

    interpreter_s: float
    imports_s: float
    imported_at: float


@dataclass(frozen=True)
class RunHeader:
    """What one run states of itself before it begins.

    ``config`` and ``about_config`` are value and metadata of ``run_config``; ``device`` is cpu or cuda. ``facts``: the
    value of each further event by its key, in order, such as hyperparameters.
    """

    device: str
    seed: int
    config: Mapping[str, Any]
    about_config: Mapping[str, Any]
    facts: Mapping[str, Any]
    data_manifest: str


def log_run_header(log: EventLog, plan: TrialPlan, world: World, header: RunHeader) -> None:
    """Write the events that name a run: submission, size, version, seed, ranks, configuration,
    hyperparameters, data.
    """
    submission = plan.config.submission
    log.event(mllog.SUBMISSION_BENCHMARK, plan.descriptor.card().mlperf_name)
    log.event(mllog.SUBMISSION_ORG, submission.org)
    log.event(mllog.SUBMISSION_DIVISION, submission.division)
    log.event(mllog.SUBMISSION_STATUS, submission.status)
    log.event(mllog.SUBMISSION_PLATFORM, submission.platform)
    log.event(mllog.RULESET, RULESET)
    log.event(mllog.BENCHMARK_SIZE, plan.config.size)
    log.event(mllog.SUITE_VERSION, VERSION)
    log.event(
        mllog.RUN_MODE,
        plan.mode,
        metadata={"trial": plan.trial, "launcher": world.launcher, "job": find_batch_job(os.environ)},
    )
    log.event(mllog.SEED, header.seed)
    # Ranks other than 0 have no log; they need not read the folder.
    for failed in list_replaced_runs(plan.folder, plan.trial) if world.is_first else ():
        log.event(mllog.RUN_REPLACED, failed.name)
    log.event(mllog.NUMBER_OF_RANKS, world.size)
    log.event(mllog.NUMBER_OF_NODES, world.nodes)
    log.event(mllog.ACCELERATORS_PER_NODE, world.local_size if header.device == "cuda" else 0)
    # The verdict is one file for the whole job.
    judged = world.is_first and read_preflight(os.environ)
    if judged:
        log.event(mllog.PREFLIGHT, judged[0], metadata=judged[1])
    simulated = is_simulated(find_machine_root(os.environ))
    about = {"device": header.device, **header.about_config, "simulated_machine": simulated}
    log_run_files(log, plan.folder)
    log.event(mllog.RUN_CONFIG, header.config, metadata=about)
    if plan.config.tuned is not None:
        log.event(mllog.TUNED, convert_to_plain_data(plan.config.tuned))
    log.event(mllog.GRADIENT_ACCUMULATION_STEPS, plan.config.gradient_accumulation_steps)
    for key, value in header.facts.items():
        log.event(key, value)
    log.event(mllog.DATA_MANIFEST, header.data_manifest)
    if (stated := plan.size_card.baselines) is None:
        log.event(mllog.BASELINE, {})
    else:
        about = {"oracle": stated.metrics(oracle=True), "data_seed": stated.seed, "samples": stated.samples}
        log.event(mllog.BASELINE, stated.metrics(), metadata=about | {"table": stated.table})


def log_run_files(log: EventLog, folder: RunFolder) -> None:
    """Write the checksums of the files that state what the run was made with. Skips a file that cannot be read.

    Facts of nodes are not included, because each trial writes them anew.
    """
    found = {}
    for path in (folder.config_path, folder.sources_path, folder.environment_path):
        with suppress(OSError):
            found[path.name] = hashlib.sha256(read_bytes(path, read_limits().json)).hexdigest()
    config = found.pop(folder.config_path.name, None)
    if config is not None:
        log.event(mllog.CONFIG_FILE, folder.config_path.name, metadata={"sha256": config})
    log.event(mllog.RUN_FILES, found)


def keep_data_manifest(folder: RunFolder, text: str, world: World) -> None:
    """Copy the data set's manifest into the run folder if it has none yet. A failed write is ignored."""
    if world.is_first and not folder.data_path.exists():
        with suppress(OSError):
            write_file_atomically(folder.data_path, text, overwrite=False)


def read_preflight(environ: Mapping[str, str]) -> tuple[dict[str, int], dict[str, Any]] | None:
    """Read the verdict of the job's preflight: nodes per verdict, and its criteria. None if there is no verdict.

    Names of nodes stay in the verdict's file; the criteria include its checksum.
    """
    folder = environ.get("MLHPC_PREFLIGHT")
    if not folder:
        return None
    path = Path(folder) / "verdict.json"
    try:
        content = read_bytes(path, read_limits().json)
        document = json.loads(content)
        words = [node["word"] for node in document["nodes"].values()]
        about = {key: document[key] for key in ("false_alarms", "effect")}
        about["found_9_in_10"] = {each["metric"]: each["found_9_in_10"] for each in document["metrics"]}
    # A damaged verdict of a preflight must not end a run; the log then has no event of it.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    counts = {word: words.count(word) for word in ("good", "bad", "inconclusive")}
    if "wrong" in words:  # results and not times: rare, so named only then
        counts["wrong"] = words.count("wrong")
    return counts, about | {"verdict_sha256": hashlib.sha256(content).hexdigest()}


def check_parameters(plan: TrialPlan, parameters: int) -> None:
    """Raise InputError if a closed submission's model has another number of parameters than the card."""
    expected = plan.size_card.model_parameters
    # The open division allows another model (MLPerf's rules for both divisions).
    if parameters == expected or plan.config.submission.division != "closed":
        return
    size, own = plan.config.size, plan.config
    with suppress(InputError):  # a person's own loop may have no configuration of the size
        own = load_config(plan.descriptor, size)
    a, b = (convert_to_plain_data(each.hyperparameters) for each in (own, plan.config))
    changed = list_differing_keys(a, b, (f"of {size}", "here"), "hyperparameters")
    words = (f"model has {parameters} parameters, the card says {expected}", *changed)
    raise InputError(f"{size}: {'; '.join(words)}; another model is for submission.division=open")


def draw_seed(base_seed: int | None, trial: int) -> int:
    """Return the seed of a trial: base seed + trial, or a random one from the operating system."""
    if base_seed is not None:
        return base_seed + trial
    return int.from_bytes(os.urandom(8)) >> (64 - SEED_BITS)


def write_exit_code(plan: TrialPlan, code: int, *, overwrite: bool = True) -> None:
    """Leave the exit code for the launcher. mpiexec and srun report another one for ranks that they killed."""
    with suppress(OSError):  # a full disk, or no run folder: then the launcher's word and the log's status count
        write_file_atomically(plan.folder.exit_code(plan.trial), f"{code}\n", overwrite=overwrite)


def print_for_trial(plan: TrialPlan, text: str) -> None:
    """Print a line that names the trial as an error."""
    print_line(f"mlhpc: {plan.folder.root} trial {plan.trial}: {text}", error=True)
