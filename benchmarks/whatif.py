"""How wrong predictions are where both sides were measured: own pairs of runs, and published pairs under modelled roofs.

    python benchmarks/whatif.py [--measure] [--pair RUN CEILINGS RUN CEILINGS]...

Each --pair is a run folder with the ceilings file of its system, twice: predicted is the second from the first. --measure
makes four pairs: CosmoFlow smoke on 1 and 2 ranks with batch 16 and 32, and ceilings of both (4 minutes on an
idle machine of two cores; the data set must be there: mlhpc data generate cosmoflow --size smoke). Published
pairs need no logs: they are one machine at two sizes, and two machines with as many units, from the tables that ship. Epochs of
another batch are the source's times the ratio of the reference's convergence points. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlhpc.analysis.published.scores import read_scores
from mlhpc.analysis.results.selection import compute_reference_limit
from mlhpc.analysis.roofline.bounds import Bounds, predict_bounds
from mlhpc.analysis.roofline.regime import Case, compute_term_seconds, list_measured_cases
from mlhpc.analysis.roofline.whatif import Prediction, compute_phase_factor, predict, predict_solution, sum_phases
from mlhpc.analysis.sources.readers import read_inputs
from mlhpc.analysis.study import read_study
from mlhpc.suite.descriptor import list_installed_cards

HEAD = "| from | to | step seen [ms] | predicted | band | error | in band | solution seen [s] | predicted | error | in band |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of what-if predictions.")
    parser.add_argument("--pair", nargs=4, action="append", default=[], type=Path, metavar=("RUN", "CEILINGS") * 2)
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    print(HEAD)
    print("| --- " * HEAD.count(" | ") + "| --- |")
    with tempfile.TemporaryDirectory() as folder:
        for paths in [*(measured(Path(folder)) if given.measure else []), *given.pair]:
            show(*own(*paths))
    errors: dict[str, list[tuple[float, bool]]] = {}
    for kind, here, there in pairs():
        title, step, seen, whole, seen_s = public(kind, here, there)
        show(title, step, seen, whole, seen_s)
        errors.setdefault(kind, []).append((abs(step.error(seen)), step.holds(seen)))
    for kind, found in errors.items():
        median = 100 * statistics.median(error for error, _ in found)
        print(
            f"\n{kind}: n={len(found)}, median |error| of the step {median:.0f} %, {sum(h for _, h in found)} in the band"
        )


def measured(folder: Path) -> list[list[Path]]:
    """Ceilings of one and of two ranks, then two trials of each run."""
    files = {ranks: folder / f"ceilings_{ranks}.json" for ranks in (1, 2)}
    for ranks, file in files.items():
        suite("ceilings", "--ranks", str(ranks), "--quick", "-o", str(file))
    cases = [(ranks, batch) for batch in (16, 32) for ranks in (1, 2)]
    for ranks, batch in cases:
        chosen = [f"global_batch_size={batch}", "max_epochs=4", "submission.org=whatif"]
        options = [part for setting in chosen for part in ("--set", setting)]
        output = str(folder / f"ranks{ranks}_batch{batch}")
        suite("run", "cosmoflow", "--size", "smoke", "--ranks", str(ranks), "--runs", "2", *options, "-o", output)

    def place(ranks: int, batch: int) -> list[Path]:
        return [folder / f"ranks{ranks}_batch{batch}", files[ranks]]

    pairs = (((1, 16), (2, 16)), ((1, 16), (1, 32)), ((2, 16), (2, 32)), ((1, 32), (2, 32)))
    return [place(*here) + place(*there) for here, there in pairs]


def suite(*arguments: str) -> None:
    """One `mlhpc` command with one thread a rank, its output on standard error. A run may miss its target: its steps count."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "mlhpc", *arguments], env=environment, stdout=sys.stderr)
    if done.returncode not in (0, 1):
        sys.exit(f"mlhpc {' '.join(arguments)}: exit code {done.returncode}")


def show(title: tuple[str, str], step: Prediction, seen: float, whole: Prediction | None, seen_s: float) -> None:
    cells = [
        *title,
        f"{1e3 * seen:.3g}",
        f"{1e3 * step.seconds:.3g}",
        f"{1e3 * step.low_s:.3g} – {1e3 * step.high_s:.3g}",
    ]
    cells += [f"{100 * step.error(seen):+.0f} %", "yes" if step.holds(seen) else "no"]
    if whole is None:
        cells += ["–"] * 4
    else:
        cells += [f"{seen_s:,.0f}", f"{whole.seconds:,.0f} [{whole.low_s:,.0f}, {whole.high_s:,.0f}]"]
        cells += [f"{100 * whole.error(seen_s):+.0f} %", "yes" if whole.holds(seen_s) else "no"]
    print("| " + " | ".join(cells) + " |")


def own(
    run: Path, ceilings: Path, other: Path, others: Path
) -> tuple[tuple[str, str], Prediction, float, Prediction | None, float]:
    here, there = case(run, ceilings), case(other, others)
    assert here.work is not None
    assert here.ceilings is not None
    assert there.work is not None
    assert there.ceilings is not None
    phases = predict(
        here.work.phases,
        compute_term_seconds(here.ceilings, here.work),
        compute_term_seconds(there.ceilings, there.work),
    )
    return (name(here), name(there)), sum_phases(phases), there.bounds.step_s, None, 0.0


def case(run: Path, ceilings: Path) -> Case:
    return list_measured_cases(read_study([run], list_installed_cards(), read_inputs([ceilings])))[0]


def name(found: Case) -> str:
    ranks = f"{found.ranks:g} rank{'s' * (found.ranks > 1)}"
    return f"{found.benchmark} {found.size}, {ranks}, batch {found.batch:g}"


def pairs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Kind, source, target of published time-to-train results; first publications whose step can be modelled."""
    rows = read_scores()
    rows = rows[(rows["mode"] == "strong") & rows["carried_over_from"].isna() & rows["run_s"].notna()]
    known = [{str(k): v for k, v in row.items()} for row in rows.to_dict("records")]
    known = [row for row in known if predict_bounds(row) is not None]
    by_machine = sorted(known, key=lambda r: (r["benchmark"], r["machine"], r["round"], r["units"], r["group"]))
    for a, b in itertools.pairwise(by_machine):
        same = all(a[key] == b[key] for key in ("benchmark", "machine", "round", "train_samples", "device"))
        if same and a["units"] < b["units"]:
            yield "one machine, more units", a, b
    by_units = sorted(known, key=lambda r: (r["benchmark"], r["train_samples"], r["units"], -r["run_s"]))
    for a, b in itertools.pairwise(by_units):
        same = all(a[key] == b[key] for key in ("benchmark", "train_samples", "units"))
        if same and a["device"] != b["device"]:
            yield "another device, as many units", a, b


def public(
    kind: str, here: dict[str, Any], there: dict[str, Any]
) -> tuple[tuple[str, str], Prediction, float, Prediction, float]:
    """A published step has no phases: it counts as passes forward and backward, the overlap of communication unknown."""
    before, after = predict_bounds(here), predict_bounds(there)
    assert before is not None
    assert after is not None
    phases = predict({"forward_backward": before.step_s}, terms(before), terms(after))
    step = sum_phases(phases)
    steps = epochs(here, there) * there["train_samples"] / there["global_batch_size"]
    per_unit = here["units"] / there["units"]
    samples = after_samples(here, there)
    evaluation = compute_phase_factor(phases, "forward_backward").times(
        (here["eval_s"] or 0.0) * epochs(here, there) / here["epochs"]
    )
    whole = predict_solution(
        step, steps, evaluation=evaluation.times(per_unit / samples), other_s=here["other_s"] or 0.0
    )
    staged = here["staging_s"] or 0.0
    whole += Prediction(
        staged, staged * min(1.0, per_unit), staged * max(1.0, per_unit)
    )  # a node's share is staged in parallel
    label = [
        f"{r['machine']} {r['units']:g} {r['benchmark']} {r['round']}, batch {r['global_batch_size']:g}"
        for r in (here, there)
    ]
    return (label[0], label[1]), step, after.step_s, whole, there["run_s"]


def after_samples(here: dict[str, Any], there: dict[str, Any]) -> float:
    """Samples of one unit in a step there over here: scaled work has that factor already, evaluation has not."""
    return float(there["global_batch_size"] / there["units"]) / float(here["global_batch_size"] / here["units"])


def epochs(here: dict[str, Any], there: dict[str, Any]) -> float:
    """The source's epochs, at another batch times what the reference needs more there."""
    found = [
        compute_reference_limit(r["benchmark"], "full", r["round"], r["train_samples"], r["global_batch_size"], 10)
        for r in (here, there)
    ]
    ratio = found[1].mean / found[0].mean if found[0] and found[1] else 1.0
    return float(here["epochs"]) * ratio


def terms(found: Bounds) -> dict[str, float]:
    return {str(term.resource): term.seconds for term in found.terms}


if __name__ == "__main__":
    main()
