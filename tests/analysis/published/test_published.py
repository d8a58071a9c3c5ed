"""The first round's joint analysis and every published score, from the logs.

Uses MLHPC_PUBLISHED_RESULTS (a clone, or a folder of clones, of mlcommons/hpc_results_v*) or ../shared/data.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from mlhpc.analysis.results.decompose import add_time_parts, build_results, compute_run_spread, select_scored_runs
from mlhpc.analysis.tables.ingest import Tables, read_tables
from tests.fixtures.published import SHARED, published_results

# Quantity of the first round's analysis: our column, and our unit in its unit.
COLUMNS = {
    "run_time.mean": ("run_s.mean", 1 / 60),
    "run_time.std": ("run_s.std", 1 / 60),
    "run_stop_epoch.mean": ("epochs.mean", 1),
    "run_stop_epoch.std": ("epochs.std", 1),
    "run_epoch_time.mean": ("tau_s.mean", 1 / 60),
    "run_epoch_time.std": ("tau_s.std", 1 / 60),
    "run_epoch_throughput.mean": ("epoch_rate.mean", 60),
    "run_epoch_throughput.std": ("epoch_rate.std", 60),
    "run_train_time.mean": ("train_s.mean", 1 / 60),
    "run_eval_time.mean": ("eval_s.mean", 1 / 60),
    "run_num_evals.mean": ("evals.mean", 1),
    "run_train_throughput.mean": ("train_rate.mean", 60),
    "run_train_throughput.std": ("train_rate.std", 60),
    "run_eval_throughput.mean": ("eval_rate.mean", 60),
    "run_avg_epoch_sample_throughput.mean": ("combined_rate.mean", 60),
    "run_staging_time.mean": ("staging_s.mean", 1 / 60),
    "run_staging_time.std": ("staging_s.std", 1 / 60),
    "run_staging_throughput.mean": ("staging_rate.mean", 60),
    "eval_time/run_time": ("eval_share", 1),
    "train_time/run_time": ("train_share", 1),
    "staging_time/run_time": ("staging_exposed_share", 1),
    "run_staging_epoch_time_ratio": ("staging_in_epochs", 1),
    "run_train_throughput_per_accelerator.mean": ("train_rate_per_unit", 1),
    "run_epoch_throughput_per_accelerator.mean": ("epoch_rate_per_unit", 60),
    "run_avg_epoch_sample_throughput_per_accelerator.mean": ("combined_rate_per_unit", 1),
    "run_eval_throughput_per_accelerator.mean": ("eval_rate_per_unit", 1),
    "number_of_compute_units": ("units", 1),
    "run_compute_budget": ("unit_hours", 1),
}
EFFICIENCY_OF = {
    "run_train_throughput": "train_rate.mean",
    "run_eval_throughput": "eval_rate.mean",
    "run_avg_epoch_sample_throughput": "combined_rate.mean",
    "run_epoch_throughput": "epoch_rate.mean",
}
# "review" normalisation of the first round's analysis: reference over submission epochs, nowhere in the package
REVIEW = {"v0.7/RIKEN/fugaku_512xA64FX_tensorflow_closed/strong/cosmoflow/full": 110.875 / 102.5}


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return read_tables([published_results(tmp_path_factory)], {})


def expected(name: str) -> pd.DataFrame:
    if not (SHARED / name).exists():
        pytest.skip(f"needs {name} of the shared data")
    return pd.read_csv(SHARED / name)


@pytest.mark.long
def test_the_first_rounds_analysis(tables: Tables) -> None:
    table = expected("first_round_expected.csv")
    runs = tables.runs[tables.runs["round"] == "v0.7"]
    if runs.empty:
        pytest.skip("round v0.7 is not among the published logs")
    chosen = select_scored_runs(tables, convergence="status")
    decomposed = add_time_parts(runs, epoch_factor=REVIEW)
    rows = build_results(decomposed, chosen).set_index(["system", "benchmark"])
    rules = build_results(add_time_parts(runs), select_scored_runs(tables)).set_index(["system", "benchmark"])
    wrong = []
    for item in table.to_dict("records"):
        value = first_round_value(item, rows, rules, decomposed, chosen)
        allowed = max(item["tolerance_rel"] * abs(item["value"]), item["tolerance_abs"])
        if value is None or not abs(value - item["value"]) <= allowed:
            wrong.append((item["system"], item["quantity"], value, item["value"]))
    assert len(table) == 488
    assert wrong == []


def first_round_value(
    item: dict[str, Any], rows: pd.DataFrame, rules: pd.DataFrame, runs: pd.DataFrame, chosen: dict
) -> float | None:
    quantity, key = item["quantity"], (item["system"], item["benchmark"])
    if quantity in COLUMNS:
        column, factor = COLUMNS[quantity]
        return float(rows.loc[key, column]) * factor
    if quantity.startswith("efficiency_vs["):
        base, _, what = quantity.removeprefix("efficiency_vs[").partition("]:")
        here, there, column = rows.loc[key], rows.loc[(base, item["benchmark"])], EFFICIENCY_OF[what]
        return (here[column] / here["units"]) / (there[column] / there["units"])
    if quantity.startswith("explained_variance") or quantity == "epochs_system_correlation":
        averaged = runs[runs["run"].isin(chosen[rows.loc[key, "group"]].averaged)]
        spread = compute_run_spread(averaged["epochs"], averaged["tau_s"])
        assert spread is not None
        return {
            "explained_variance_1": spread.axis_1,
            "explained_variance_2": spread.axis_2,
            "explained_variance_ratio_1": spread.axis_1_share,
            "epochs_system_correlation": spread.correlation,
        }[quantity]
    return prose(item, rows, rules)


def prose(item: dict[str, Any], rows: pd.DataFrame, rules: pd.DataFrame) -> float | None:
    """Ratios that press releases and submitters' texts gave."""

    def cosmoflow(system: str) -> pd.Series:
        return rows.loc[(system, "cosmoflow")]

    quantity = item["quantity"]
    daint = [cosmoflow(f"daint_gpu_n{n}_tf2.2.0") for n in (128, 256)]
    fixed = {
        "epochs_ratio 256/128": daint[1]["epochs.mean"] / daint[0]["epochs.mean"],
        "epochs_std_ratio 256/128": daint[1]["epochs.std"] / daint[0]["epochs.std"],
        "epoch time vs ideal, 1 - 2*T256/T128": 1 - 2 * daint[1]["tau_s.mean"] / daint[0]["tau_s.mean"],
        "run time ratio ABCI-512/ABCI-2048": rules.loc[("abci_512xV100_tensorflow_closed", "cosmoflow"), "score_s"]
        / rules.loc[("abci_2048xV100_tensorflow_open", "cosmoflow"), "score_s"],
        "speed vs next GPU system (HAL)": cosmoflow("halv100_n16_tf1.15.0")["run_s.mean"]
        / cosmoflow("abci_2048xV100_tensorflow_open")["run_s.mean"],
        "speed vs next CPU system (Cori-KNL-1024)": cosmoflow("coriknl_n1024_tf1.15.2")["run_s.mean"]
        / cosmoflow("fugaku_16384xA64FX_tensorflow_open")["run_s.mean"],
    }
    if quantity in fixed:
        return float(fixed[quantity])
    if quantity.startswith("mean over batch<=1024"):
        flat = rows.reset_index()
        small = flat[(flat["benchmark"] == "cosmoflow") & (flat["global_batch_size"] <= 1024)]
        return float((small["run_s.std"] / small["run_s.mean"]).mean())
    other = {
        "corigpu_n64_tf1.15.0": "corigpu_n64_pt1.6.0",
        "abci_512xV100_tensorflow_closed": "abci_1024xV100_pytorch_closed",
        "abci_2048xV100_tensorflow_open": "abci_1024xV100_fjpytorch_open",
    }
    if quantity == "compute_budget cosmoflow/deepcam":
        deepcam = rows.loc[(other[item["system"]], "deepcam")]
        return float(cosmoflow(item["system"])["unit_hours"] / deepcam["unit_hours"])
    return None


def test_every_published_score(tables: Tables) -> None:
    table = expected("published_scores_expected.csv")
    # The expected training has what the first epoch takes longer
    runs = tables.runs.assign(first_epoch_extra_s=None)
    rows = build_results(add_time_parts(runs), select_scored_runs(tables))
    table["mode"] = table["scaling"].str.startswith("weak").map({True: "weak", False: "strong"})
    joined = table.merge(rows, on=["round", "submitter", "system", "mode", "benchmark"], suffixes=("_expected", ""))
    if joined.empty:
        pytest.skip("none of the expected results is among the published logs")
    weak = joined["mode"] == "weak"
    pairs = {
        "score": (joined["score_s"] / 60, joined["olympic_min_unscaled"].where(~weak, joined["weak_TTTa_min"])),
        "official tool": (joined["score_tool_s"] / 60, joined["official_tool_min"].where(~weak)),
        "models/min": (joined["models_per_min"], joined["weak_models_per_min"]),
        "epochs": (joined["epochs_to_target.mean"], joined["epochs_to_target_mean"]),
        "epochs std": (joined["epochs_to_target.std"], joined["epochs_to_target_std"]),
        "tau": (joined["tau_s.mean"], joined["time_per_epoch_s"]),
        "training": (joined["train_s.mean"], joined["train_s_mean"]),
        "throughput": (joined["train_rate.mean"], joined["train_samples_per_s"]),
        "unit hours": (joined["unit_hours"], joined["compute_unit_hours"]),
        "converged": (joined["n_reached"], joined["n_converged"]),
    }
    wrong = [
        (name, joined.loc[index, "system"], ours[index], theirs[index])
        for name, (ours, theirs) in pairs.items()
        for index in joined.index[theirs.notna()]
        if not abs(ours[index] - theirs[index]) <= 1e-3 * abs(theirs[index])
    ]
    assert wrong == []
    assert (joined["division_expected"] == joined["division"]).all()


def test_every_run_is_the_sum_of_its_parts(tables: Tables) -> None:
    ended = tables.runs[tables.runs["run_s"].notna()]
    total = ended[["staging_exposed_s", "train_s", "eval_s", "other_s"]].sum(axis=1)
    assert (total - ended["run_s"]).abs().max() < 1e-6
    assert (ended[["staging_exposed_s", "train_s", "eval_s", "other_s"]] > -1e-6).all(axis=None)
