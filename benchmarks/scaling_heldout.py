"""How wrong scaling models are at a scale they have not seen: fit on the smaller scales of a series, predict the largest.

    python benchmarks/scaling_heldout.py PATH...        clones of mlcommons/hpc_results_v*

A published series is seconds per epoch over compute units of one benchmark, training set and kind of device, pooled over
submitters, because no submitter published five sizes of one code. Two sizes of the small side are too few for any model and
are left out. With fewer than five sizes left, `mlhpc report` refuses to fit; the table shows why. Prints Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlhpc.analysis.results.scaling import Model, fit
from mlhpc.analysis.study import Study, read_study

LEAST_TO_FIT = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of scaling models at a held-out scale.")
    parser.add_argument("paths", nargs="+", type=Path)
    print("| series | fitted on units | predicted | Amdahl | USL | PMNF |")
    print("| --- | --- | --- | --- | --- | --- |")
    for title, times in series(read_study(parser.parse_args().paths, {})):
        largest = max(times)
        known = {units: values for units, values in times.items() if units < largest}
        models = {model.name: model for model in fit(known, LEAST_TO_FIT)}
        errors = " | ".join(error(models[name], largest, times[largest]) for name in ("Amdahl", "USL", "PMNF"))
        print(f"| {title} | {', '.join(f'{n:g}' for n in sorted(known))} | {largest:g} | {errors} |")


def error(model: Model, units: float, seen: list[float]) -> str:
    mean = sum(seen) / len(seen)
    low, high = (100 * (float(end[0]) / mean - 1) for end in model.band([units]))
    return f"{100 * (float(model.time_s([units])[0]) / mean - 1):+.0f} % [{low:+.0f}, {high:+.0f}]"


def series(made: Study) -> list[tuple[str, dict[float, list[float]]]]:
    rows = made.results
    rows = rows[(rows["mode"] == "strong") & (rows["units"] > 0) & (rows["tau_s.mean"] > 0)]
    found = []
    for key, part in rows.groupby(["benchmark", "train_samples", "device"], sort=True):
        times: dict[float, list[float]] = {}
        for row in part.to_dict("records"):
            runs = made.runs_of(row["group"]).query("converged")["tau_s"].dropna()
            times.setdefault(float(row["units"]), []).extend(float(tau) for tau in runs)
        if len(times) > LEAST_TO_FIT:
            found.append((f"{key[0]} {key[2]}, {int(key[1]):,} samples", times))
    return found


if __name__ == "__main__":
    main()
