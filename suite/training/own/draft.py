"""Drafts the card of an own loop that has none, from what one run of the loop showed. A person edits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlhpc.suite.errors import InputError, find_near
from mlhpc.suite.files import print_progress, write_file_atomically
from mlhpc.suite.training.own.folder import CARD_SUFFIXES

_HEAD = """\
# Drafted by mlhpc.Run from one run of the loop, to be edited (docs/own_loop.md). First of all `threshold`: it is the best
# value of that run, and the target of all runs to come. Counts of 0 are counted by the next run.
"""
_NAME = "card"


@dataclass
class Draft:
    """What a run without a card showed so far."""

    path: Path
    size: str
    batch: int
    epochs: int
    hyperparameters: Mapping[str, Any]
    train_samples: int = 0
    eval_samples: int = 0
    parameters: int = 0
    values: list[float] = field(default_factory=list)

    def begin(self, train_samples: int, eval_samples: int, parameters: int) -> None:
        """Keep the counts of the run."""
        self.train_samples, self.eval_samples, self.parameters = train_samples, eval_samples, parameters

    def evaluate(self, value: float | None) -> bool:
        """Keep a value. Returns True after the last epoch."""
        self.values.append(math.nan if value is None else value)
        return len(self.values) >= self.epochs

    def write(self) -> str:
        """Write the card and return one line for the person. Nothing is written if the loop evaluated nothing."""
        found = [value for value in self.values if math.isfinite(value)]
        if not found:
            return f"{self.path}: not drafted: run.evaluation() got no finite value"
        rises = found[-1] > found[0] or (found[-1] == found[0] and 0 <= found[0] <= 1)
        name = self.path.stem if self.path.stem != _NAME else self.path.absolute().parent.name
        optimizer = self.hyperparameters.get("opt_name")
        size = {
            "description": "what the loop trains on, in a few words",
            "metric": "eval_accuracy" if rises else "eval_error",
            "metric_name": "accuracy" if rises else "error",
            "threshold": max(found) if rises else min(found),
            "direction": "max" if rises else "min",
            "required_runs": 5,
            "train_samples": self.train_samples,
            "eval_samples": self.eval_samples,
            "model_parameters": self.parameters,
            "forward_flops_per_sample": 0,
            "training_flops_per_sample": 0,
            "sample_bytes": 0,
            "constraints": {"global_batch_size": {"at_least": 1}}
            | ({"opt_name": {"one_of": [optimizer]}} if optimizer is not None else {}),
        }
        card = {
            **{"version": 1, "workload": name, "mlperf_name": name, "title": name.replace("_", " ").capitalize()},
            **{"domain": "of your own", "reference": "where the task is described", "sizes": {self.size: size}},
        }
        text = _HEAD + f"# The loop had a batch of {self.batch}.\n" + yaml.safe_dump(card, sort_keys=False)
        write_file_atomically(self.path, text, overwrite=False)
        return f"{self.path}: drafted from this run, which is no result; edit its threshold, then start again"


def begin_draft(benchmark: str | Path, config: str | Path | Mapping[str, Any]) -> Draft | None:
    """Begin the draft of a card whose file does not exist. None for a benchmark that exists, or a config in a file."""
    path = Path(benchmark)
    if path.suffix not in CARD_SUFFIXES or path.exists() or not isinstance(config, Mapping):
        return None
    if not path.absolute().parent.is_dir():
        return None
    beside = [each.name for each in path.absolute().parent.glob("*.y*ml")]
    if near := find_near(path.name, beside):
        raise InputError(f"{path}: does not exist; did you mean {near!r}? A name like no other begins a new card")
    try:
        size, batch, epochs = config["size"], config["global_batch_size"], config["max_epochs"]
    except KeyError as error:
        raise InputError(f"{path}: no card yet, and the config to draft one lacks the key {error}") from None
    print_progress(f"{path}: no card yet: this run drafts one and is no result", error=True)
    return Draft(path, size, batch, epochs, config.get("hyperparameters") or {})
