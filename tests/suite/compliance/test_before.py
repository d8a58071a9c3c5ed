"""What is said before a run is what the checker says afterwards of its logs: twenty refused, twenty accepted."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mlhpc.suite.compliance.before import judge_statement
from mlhpc.suite.compliance.check import check
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.mllog import convert_to_json
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Lines, our_run, write
from tests.fixtures.wings import needs_axes

LOG1P = tuple(f"hyperparameters.{name}" for name in ("input_norm=log1p", "input_mean=null", "input_std=null"))
# workload, settings, number of runs (None: as many as it needs), a part of what is said
REFUSED: list[tuple[str, tuple[str, ...], int | None, str]] = [
    ("cosmoflow", ("global_batch_size=32",), None, "above all reference points"),
    ("cosmoflow", ("global_batch_size=512",), None, "above all reference points"),
    ("cosmoflow", ("hyperparameters.augmentation=false",), None, "augmentation = False: expected True"),
    ("cosmoflow", LOG1P, None, "input_norm"),
    ("cosmoflow", (), 1, "1 run; cosmoflow needs 5"),
    ("cosmoflow", (), 4, "4 runs; cosmoflow needs 5"),
    ("cosmoflow", (), 6, "has exactly 5"),
    ("moe_lm", (), 9, "has exactly"),
    ("swinv2_moe", (), 1, "1 run"),
    ("deepcam", ("global_batch_size=64",), None, "above all reference points"),
    ("deepcam", ("hyperparameters.batchnorm_group_size=2",), 2, "runs; deepcam needs 5"),
    ("open_catalyst", ("hyperparameters.weight_decay=0.1",), None, "opt_weight_decay"),
    ("open_catalyst", ("hyperparameters.force_coefficient=10",), None, "force_coefficient"),
    ("open_catalyst", ("hyperparameters.energy_coefficient=1",), None, "energy_coefficient"),
    ("open_catalyst", ("hyperparameters.cutoff_angstrom=3",), None, "cutoff"),
    ("open_catalyst", ("hyperparameters.exact_angles=true",), None, "exact_angles"),
    ("openfold", ("hyperparameters.init_checkpoint=null",), None, "init_checkpoint_sha256sum"),
    ("openfold", ("hyperparameters.fape_loss_weight=2",), None, "fape_loss_weight"),
    ("openfold", ("hyperparameters.adam_beta_1=0.8",), None, "opt_adam_beta_1"),
    ("moe_lm", ("hyperparameters.context=32",), None, "max_sequence_length"),
    ("swinv2_moe", ("hyperparameters.augmentation=false",), None, "augmentation"),
]
ACCEPTED: list[tuple[str, tuple[str, ...]]] = [
    ("cosmoflow", ()),
    ("cosmoflow", ("hyperparameters.dropout=0.3",)),
    ("cosmoflow", ("hyperparameters.base_learning_rate=0.004",)),
    ("cosmoflow", ("hyperparameters.l2=0.01",)),
    ("cosmoflow", ("global_batch_size=8",)),
    ("cosmoflow", ("gradient_accumulation_steps=2",)),
    ("cosmoflow", ("precision=bfloat16",)),
    ("cosmoflow", ("loader_threads=4", "max_epochs=99")),
    ("cosmoflow", ("global_batch_size=512", "hyperparameters.augmentation=false", "submission.division=open")),
    ("deepcam", ()),
    ("deepcam", ("hyperparameters.optimizer=LAMB",)),
    ("deepcam", ("hyperparameters.learning_rate=0.01",)),
    ("open_catalyst", ()),
    ("open_catalyst", ("hyperparameters.learning_rate=0.01",)),
    ("open_catalyst", ("hyperparameters.weight_decay=0.1", "submission.division=open")),
    ("openfold", ()),
    ("openfold", ("hyperparameters.learning_rate=0.01",)),
    ("moe_lm", ()),
    ("moe_lm", ("hyperparameters.learning_rate=0.01",)),
    ("moe_lm", ("precision=auto",)),
    ("swinv2_moe", ()),
    ("swinv2_moe", ("hyperparameters.label_smoothing=0.1",)),
]


def resolve(workload: str, settings: tuple[str, ...]) -> RunConfig:
    stated = ("submission.org=ACME", "submission.platform=test bed")
    return load_config(load_descriptor(workload), "smoke", (*stated, *settings))


def said_before(workload: str, settings: tuple[str, ...], runs: int | None) -> list[str]:
    chosen = load_descriptor(workload)
    need = chosen.card().size("smoke").required_runs
    return judge_statement(chosen, resolve(workload, settings), runs=need if runs is None else runs)


def log(config: RunConfig) -> Lines:
    """The log of a run with this configuration. What it measured is the same whatever the configuration."""
    known = structs.replace(config, precision="float32") if config.precision == "auto" else config
    facts = config.hyperparameters.collect_logged(known)
    lines = our_run(workload=config.workload, values=(0.5, 0.4, 0.3), hyperparameters=facts)
    stated: dict[str, Any] = {f"submission_{key}": value for key, value in config.logged()["submission"].items()}
    stated |= {"run_config": convert_to_json(known.logged())}
    return [dataclasses.replace(line, value=stated.get(line.key, line.value)) for line in lines]


@cache
def refusals(workload: str, settings: tuple[str, ...], runs: int | None, folder: Path) -> frozenset[str]:
    """The rules that the checker finds broken in logs of such runs."""
    need = load_descriptor(workload).card().size("smoke").required_runs
    lines = log(resolve(workload, settings))
    for trial in range(need if runs is None else runs):
        write(folder / f"result_{trial}.txt", lines)
    return frozenset(finding.rule for finding in check([folder]).counted("error"))


@pytest.mark.parametrize(("workload", "settings", "runs", "says"), REFUSED, ids=str)
def test_what_the_checker_would_refuse_is_said_before(
    workload: str, settings: tuple[str, ...], runs: int | None, says: str, tmp_path: Path
) -> None:
    said = said_before(workload, settings, runs)
    assert says in "\n".join(said)
    new = refusals(workload, settings, runs, tmp_path / "new") - refusals(workload, (), None, tmp_path / "plain")
    assert {line.rpartition("(rule ")[2].rstrip(")") for line in said} == new - AFTERWARDS


# What only a run itself shows: here one log stands for all runs, with the measurements of another configuration
AFTERWARDS = {"rcp-speed", "samples-agree", "sums-agree", "events-whole", "trial-gap", "facts-agree"}


@pytest.mark.parametrize(("workload", "settings"), ACCEPTED, ids=str)
def test_of_what_the_checker_accepts_nothing_is_said(workload: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    assert said_before(workload, settings, None) == []
    new = refusals(workload, settings, None, tmp_path / "new") - refusals(workload, (), None, tmp_path / "plain")
    assert new <= AFTERWARDS


@needs_axes
def test_compressed_gradients_are_said_before_in_the_closed_division(tmp_path: Path) -> None:
    shipped = load_descriptor("moe_lm").folder / "plans" / "sharded.yaml"
    (tmp_path / "plan.yaml").write_text(shipped.read_text() + "compress: {kind: bf16}\n")
    for division, expected in (("closed", 1), ("open", 0)):
        settings = (f"plan={tmp_path / 'plan.yaml'}", f"submission.division={division}")
        config, chosen = resolve("moe_lm", settings), load_descriptor("moe_lm")
        plan = Parallel.of(config, chosen, 0, 2).logged()
        said = judge_statement(chosen, config, plan=plan)
        assert len([line for line in said if "compresses gradients" in line]) == len(said) == expected


def test_strict_begins_nothing_that_would_be_refused(tmp_path: Path) -> None:
    words = ("submit", "cosmoflow", "--system", "slurm-two-node", "--size", "smoke", "--nodes", "1", "--dry-run")
    large = ("--set", "global_batch_size=32", "--set", "submission.org=ACME")
    told = mlhpc(*words, *large, "--runs", 5)
    assert told.returncode == 0
    assert "note: the checker would refuse this result: batch size 32 is above all reference points" in told.stderr
    refused = mlhpc(*words, *large, "--runs", 5, "--strict")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--strict: the checker would refuse this result: batch size 32" in refused.stderr
    assert mlhpc(*words, "--runs", 5, "--strict", "--set", "submission.org=ACME").returncode == 0
    assert "the submitter is not known" in mlhpc(*words, "--runs", 5, "--strict").stderr
