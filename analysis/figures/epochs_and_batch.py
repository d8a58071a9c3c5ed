"""Figure: epochs to target against global batch size, with the reference's convergence points."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREY, VERMILION, listed, loglog, panels
from analysis.drawing.scatter import PROBLEM, label_axes, problems, result_table
from analysis.results.convergence import reference_limit, reference_points
from analysis.study import NotAnswerableError, Study

TITLE = "Epochs and batch size"
CAPTION = (
    "Mean epochs to target with standard deviation; hollow: open division, which may change the algorithm. The grey "
    "line "
    "are the reference convergence points of the newest round shown, the band reaches from the least mean that the "
    "rules "
    "allow to as far above the reference's."
)


def table(study: Study) -> pd.DataFrame:
    """Batch, epochs and reference by result."""
    frame = _shown(study)
    names = ["benchmark", "size", "round", "train_samples", "global_batch_size", "required_runs"]
    bounds = [reference_limit(*row) for row in frame[names].itertuples(index=False)]
    return result_table(
        frame,
        ("label", "division"),
        {
            "global batch": frame["global_batch_size"],
            "epochs to target, mean": frame["epochs_to_target.mean"],
            "epochs to target, std": frame["epochs_to_target.std"],
            "n": frame["n_averaged"],
            "reference mean [epochs]": [bound.mean if bound else None for bound in bounds],
            "least allowed mean [epochs]": [bound.minimum if bound else None for bound in bounds],
        },
    )


def answer(study: Study) -> str:
    """Smallest and largest batch of each benchmark."""
    sentences = []
    for (benchmark, size), rows in _shown(study).groupby(PROBLEM, sort=True):
        ordered = rows.sort_values("global_batch_size")
        low, high = ordered.iloc[0], ordered.iloc[-1]
        if low["global_batch_size"] == high["global_batch_size"]:
            sentences.append(f"{benchmark} {size}: one batch size only, {low['global_batch_size']:g}")
        else:
            sentences.append(
                f"{benchmark} {size}: batch {low['global_batch_size']:g} to {high['global_batch_size']:g} takes "
                f"{low['epochs_to_target.mean']:.3g} to {high['epochs_to_target.mean']:.3g} epochs"
            )
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A panel per benchmark and size."""
    classes = problems(_shown(study))
    figure, axes = panels(len(classes), min(2, len(classes)), 3.4)
    for (title, rows), axis in zip(classes, axes, strict=True):
        batches, means = rows["global_batch_size"].tolist(), rows["epochs_to_target.mean"].tolist()
        reference = _reference(axis, rows.sort_values("round").iloc[-1])
        for row in rows.to_dict("records"):
            is_open = row["division"] == "open"
            colour = VERMILION if is_open else BLUE
            axis.errorbar(
                [row["global_batch_size"]], [row["epochs_to_target.mean"]],
                yerr=None if pd.isna(row["epochs_to_target.std"]) else [row["epochs_to_target.std"]],
                marker="s" if is_open else "o", color=colour, mfc="none" if is_open else colour, capsize=3, markersize=7,
            )  # fmt: skip
        loglog(axis, [*batches, *(x for x, _ in reference)], [*means, *(y for _, y in reference)])
        label_axes(axis, title, "global batch size [samples]", "epochs to target")
    return figure


def _reference(axis: Axes, newest: pd.Series) -> list[tuple[float, float]]:
    """Draw line and band of the reference in the round of a result; its points."""
    where = newest["benchmark"], newest["size"], newest["round"], newest["train_samples"]
    bounds = [reference_limit(*where, batch, newest["required_runs"]) for batch in reference_points(*where)]
    known = {bound.global_batch_size: bound for bound in bounds if bound is not None}
    if not known:
        return []
    at = sorted(known)
    means = [known[batch].mean for batch in at]
    low = [known[batch].minimum for batch in at]
    high = [2 * known[batch].mean - known[batch].minimum for batch in at]
    axis.plot(at, means, "--x", color=GREY, label="reference")
    axis.fill_between(at, low, high, color=GREY, alpha=0.25, linewidth=0)
    return list(zip(at, means, strict=True))


def _shown(study: Study) -> pd.DataFrame:
    frame = study.distinct
    frame = frame[
        frame["global_batch_size"].notna() & (frame["epochs_to_target.mean"] > 0) & (frame["global_batch_size"] > 0)
    ]
    if frame.empty:
        raise NotAnswerableError("a result with a batch size whose runs reached the target")
    return frame
