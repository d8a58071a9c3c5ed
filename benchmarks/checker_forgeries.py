"""Invalid packages and legal variants of published and own packages: which of them are errors of `mlhpc check`.

    python -m benchmarks.checker_forgeries HPC [TRAINING] > benchmarks/results/DATE-checker_forgeries.txt

HPC is a folder of hpc_results_v* checkouts, TRAINING one of training_results_v5.0 and v5.1; without it no case of Training is
tried. A case copies one published result, or a package of this suite as tests/suite/compliance/forge makes it, and changes
it: of the forge's cases some are drawn, without those that nobody can detect. A forgery counts as found if it has an error that
the unchanged package lacks. Exit code 1 if fewer than 95 of 101 forgeries are found, or a legal variant has a new error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.forensics.course_rules import _CLOCKED as CLOCKED
from tests.suite.compliance.forge import test_legal as legal
from tests.suite.compliance.forge.forgeries import draw, list_forgeries
from tests.suite.compliance.forge.test_forgeries import is_undetected, make_package

Event = dict[str, Any]
Events = list[Event]
Change = Callable[[Events], Events]
Damage = Callable[[Path], object]
TOKEN = ":::MLLOG "
DRAWN, SEED = 100, 20261129  # of the forge's cases


@dataclass(frozen=True)
class Case:
    """One package. ``base`` is the place of a published result, or None for a package of this suite."""

    kind: str
    name: str
    base: str | None
    damage: Damage
    legal: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hpc", type=Path)
    parser.add_argument("training", type=Path, nargs="?")
    args = parser.parse_args()
    roots = {"hpc": args.hpc, "training": args.training}
    cases = [*time_cases(), *clock_cases(), *evaluation_cases(), *interval_cases(), *whose_cases(), *package_cases()]
    cases = [case for case in cases if args.training is not None or not str(case.base).startswith("training")]
    with tempfile.TemporaryDirectory(prefix="mlhpc-forgeries-") as folder:
        whole = Path(folder) / "own"
        package = make_package(whole)
        drawn = [each for each in draw(list_forgeries(package), DRAWN, SEED) if not is_undetected(each.name)]
        cases += [Case("own package", each.name, None, each.change) for each in drawn]
        cases += [
            Case("own package", " + ".join(names), None, partial(legal.change, names), legal=True)
            for names in legal.draw_names()
        ]
        before: dict[str | None, Counter[str]] = {}
        rows = [(case, judge(case, roots, Path(folder), whole, before)) for case in cases]
    return report(rows)


def report(rows: list[tuple[Case, list[str]]]) -> int:
    """Print a table by kind and each case, and return the exit code."""
    forged, legal = [row for row in rows if not row[0].legal], [row for row in rows if row[0].legal]
    found, wrong = sum(bool(errors) for _, errors in forged), [row for row in legal if row[1]]
    print(
        f"{datetime.date.today()}  python -m benchmarks.checker_forgeries {' '.join(sys.argv[1:])}: no timing was taken\n"
    )
    print(f"{found} of {len(forged)} forgeries are errors; {len(wrong)} of {len(legal)} legal variants are.\n")
    for kind in dict.fromkeys(case.kind for case, _ in rows):
        of_kind = [(case, errors) for case, errors in rows if case.kind == kind]
        some = [errors for case, errors in of_kind if not case.legal]
        others = [errors for case, errors in of_kind if case.legal]
        print(
            f"{kind}: {sum(map(bool, some))} of {len(some)} forgeries, {sum(map(bool, others))} of {len(others)} legal"
        )
    print("\n| kind | case | package | it is | errors |\n| --- | --- | --- | --- | --- |")
    for case, errors in rows:
        place = case.base or "own"
        what = "legal" if case.legal else "forged"
        print(f"| {case.kind} | {case.name} | {place} | {what} | {', '.join(errors[:3]) or 'none'} |")
    return int(found * 101 < 95 * len(forged) or bool(wrong))


def judge(
    case: Case, roots: dict[str, Path], scratch: Path, whole: Path, before: dict[str | None, Counter[str]]
) -> list[str]:
    """List the rules whose errors a case has more often than the unchanged package."""
    if case.base not in before:
        before[case.base] = errors_of(prepare(case.base, roots, scratch / "before", whole))
    folder = prepare(case.base, roots, scratch / "case", whole)
    case.damage(folder)
    return sorted(errors_of(folder) - before[case.base])


def errors_of(folder: Path) -> Counter[str]:
    top = next(path for path in (*folder.parents, folder) if path.name in ("case", "before"))
    return Counter(item.rule for item in check([top]).findings if item.severity == "error")


def prepare(base: str | None, roots: dict[str, Path], place: Path, whole: Path) -> Path:
    """Copy a package with the one result that a base names, and return it."""
    shutil.rmtree(place, ignore_errors=True)
    if base is None:
        return Path(shutil.copytree(whole / "ACME", place / "ACME"))
    root = roots["training" if base.startswith("training") else "hpc"]
    round_, submitter, system, *rest = base.split("/")
    package = place / round_ / submitter
    result = Path(round_, submitter, "results", system, *rest)
    shutil.copytree(root / result, place / result)
    (package / "systems").mkdir()
    shutil.copy(root / round_ / submitter / "systems" / f"{system}.json", package / "systems")
    return package


# Changes of logs


def every_log(change: Change) -> Damage:
    return lambda folder: [rewrite(path, change) for path in sorted(folder.rglob("result_*.txt")) if path.is_file()]


def one_log(change: Change, index: int = 1) -> Damage:
    return lambda folder: rewrite(sorted(folder.rglob("result_*.txt"))[index], change)


def rewrite(path: Path, change: Change) -> None:
    lines = path.read_text(encoding="latin-1").splitlines()
    events = [json.loads(line[line.rindex(TOKEN) + len(TOKEN) :]) for line in lines if TOKEN in line]
    path.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in change(events)), encoding="latin-1")


def chain(*changes: Change) -> Change:
    def apply(events: Events) -> Events:
        for change in changes:
            events = change(events)
        return events

    return apply


def first_ms(events: Events, key: str) -> float:
    return next(event["time_ms"] for event in events if event["key"] == key)


def faster(factor: float) -> Change:
    """Multiply all times after run_start."""

    def apply(events: Events) -> Events:
        begin = first_ms(events, "run_start")
        return [
            e
            | {
                "time_ms": begin + (e["time_ms"] - begin) * (factor if e["time_ms"] > begin else 1),
                "metadata": {
                    name: each * factor if name == "staging_duration" else each for name, each in e["metadata"].items()
                },
            }
            for e in events
        ]

    return apply


def without(*keys: str) -> Change:
    return lambda events: [event for event in events if event["key"] not in keys]


def shifted(key: str, occurrences: range | tuple[int, ...], milliseconds: float) -> Change:
    """Move the n-th events of a key, and all that follows each, in time."""

    def apply(events: Events) -> Events:
        number, offset, moved = count(), 0.0, []
        for event in events:
            if event["key"] == key and next(number) in occurrences:
                offset += milliseconds
            moved.append(event | {"time_ms": event["time_ms"] + offset})
        return moved

    return apply


def set_value(key: str, value: Any, **metadata: Any) -> Change:
    return lambda events: [
        event | {"value": value, "metadata": {**event["metadata"], **metadata}} if event["key"] == key else event
        for event in events
    ]


def scaled_rates(factor: float) -> Change:
    def apply(events: Events) -> Events:
        return [
            event | {"value": {**event["value"], "throughput": factor * event["value"]["throughput"]}}
            if event["key"] == "tracked_stats" and "throughput" in event["value"]
            else event | {"value": factor * event["value"]}
            if event["key"] == "throughput"
            else event
            for event in events
        ]

    return apply


def scaled_clocks(factor: float) -> Change:
    """Change the durations that some codes log beside their time stamps."""

    def apply(events: Events) -> Events:
        for about in (event["metadata"] for event in events):
            about |= {name: about[name] * factor for name in CLOCKED.keys() & about.keys() - {"staging_duration"}}
        return events

    return apply


def short_evaluations(milliseconds: float, only: int | None = None) -> Change:
    """Evaluations take so long, and what follows is earlier by as much."""

    def apply(events: Events) -> Events:
        number, offset, begun, moved = -1, 0.0, 0.0, []
        for event in events:
            event = event | {"time_ms": event["time_ms"] + offset}
            if event["key"] == "eval_start":
                number, begun = number + 1, event["time_ms"]
            chosen = only is None or number == only
            if (
                chosen
                and event["key"] in ("eval_accuracy", "eval_error", "eval_stop")
                and event["time_ms"] > begun + milliseconds
            ):
                offset += begun + milliseconds - event["time_ms"]
                event = event | {"time_ms": begun + milliseconds}
            moved.append(event)
        return moved

    return apply


def repeated(key: str, seconds: float) -> Change:
    def apply(events: Events) -> Events:
        event = next(event for event in events if event["key"] == key)
        again = event | {"time_ms": event["time_ms"] + 1000 * seconds}
        # Of a second rank it stands beside the first.
        beside = key if abs(seconds) < 1 else "eval_start"
        place = next(n for n, other in enumerate(events) if other["key"] == beside) + (beside == key)
        return [*events[:place], again, *events[place:]]

    return apply


def kept_evaluations(keep: Callable[[int], bool]) -> Change:
    """Leave evaluations out, and the time that they took. The last one stays."""

    def apply(events: Events) -> Events:
        metrics = ("eval_accuracy", "eval_error")
        last, seen, left = sum(event["key"] in metrics for event in events), 0, []
        for event in events:
            number = seen + (event["key"] in metrics or event["key"] == "eval_start")
            seen += event["key"] in metrics
            if not event["key"].startswith("eval_") or event["key"] == "eval_samples" or number == last or keep(number):
                left.append(event)
        return left

    return apply


def placed(factor: float) -> Change:
    """Multiply the place of every evaluation, as if they had come at another interval."""

    def apply(events: Events) -> Events:
        names = ("samples_count", "epoch_num")
        return [
            event | {"metadata": {key: value * factor if key in names and isinstance(value, int | float) else value
                                  for key, value in event["metadata"].items()}}
            if event["key"].startswith("eval_") and isinstance(event["metadata"], dict) else event
            for event in events
        ]  # fmt: skip

    return apply


def other_evaluations(seed: int) -> Change:
    """Give a run other values and other times, and keep what else it measured."""

    def apply(events: Events) -> Events:
        draw = random.Random(seed)
        changed, offset = [], 0.0
        for event in events:
            offset += draw.uniform(0, 3000) if event["key"] == "epoch_start" else 0.0
            event = event | {"time_ms": event["time_ms"] + offset + 10**8}
            if event["key"] == "eval_accuracy" and isinstance(event["value"], float):
                event = event | {"value": min(0.9999, event["value"] * draw.uniform(1.0, 1.03))}
            changed.append(event)
        return set_value("seed", draw.randrange(10**9))(changed)

    return apply


DELL = "hpc_results_v3.0/Dell/32xXE8545x4A100-SXM4-40GB/strong/deepcam"
CLEMSON = "hpc_results_v3.0/Clemson/18xR750-2xA100-PCIe-80GB/strong/deepcam"
FOLD = "hpc_results_v3.0/Clemson/18xR750-2xA100-PCIe-80GB/strong/openfold"
COSMO = "hpc_results_v3.0/HPE+LBNL/perlmutter_128x4/strong/cosmoflow"
OC20 = "hpc_results_v3.0/HPE+LBNL/perlmutter_128x4/strong/oc20"
ANL = "hpc_results_v1.0/ANL/thetagpu_n128_pt1.7.1/strong/oc20"
LONGHORN = "hpc_results_v1.0/TACC/longhorn-tf/strong/cosmoflow"
LORA = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/llama2_70b_lora"
BERT = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/bert"
RETINA = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/retinanet"
DIFFUSION = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/stable_diffusion"
DLRM = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/dlrm_dcnv2"
RGAT = "training_results_v5.0/Dell/XE9680x8H200-SXM-141GB/rgat"
BIG = "training_results_v5.0/Nebius/nebius_soperator_8xH200_n64_ngc25.01_nemo/llama31_405b"
SMALL = "training_results_v5.1/Nebius/nebius_b200_n1/llama31_8b"
FLUX = "training_results_v5.1/NVIDIA/theia_ngpu16_ngc25.09_nemo/flux1"
EXEMPT_HPC = "hpc_results_v3.0/NVIDIA/eos_n256_ngc23.09_pytorch/weak/deepcam"
EXEMPT = "training_results_v5.1/Cisco/hpf_n8/llama31_8b"
TRAINING = (LORA, BERT, RETINA, DIFFUSION, DLRM, RGAT, BIG, SMALL, FLUX)


def time_cases() -> list[Case]:
    case = partial(Case, "time")
    blind = without("tracked_stats", "throughput")
    tenth = every_log(chain(blind, faster(0.1)))
    return [
        *(
            case(f"times x {factor:g}", DELL, every_log(faster(factor)))
            for factor in (0.001, 0.01, 0.1, 0.5, 0.8, 0.91)
        ),
        *(
            case("times x 0.1 without a rate", base, tenth)
            for base in (DELL, CLEMSON, FOLD, COSMO, OC20, ANL, LONGHORN)
        ),
        case("times x 0.1, rates x 10", DELL, every_log(chain(scaled_rates(10), faster(0.1)))),
        case("one run x 0.1 without a rate", DELL, one_log(chain(blind, faster(0.1)))),
        *(case("times x 0.1 without a rate", base, tenth) for base in TRAINING),
        case("times x 0.1 with rates", LORA, every_log(faster(0.1))),
        case("times x 0.5 with rates", LORA, every_log(faster(0.5))),
        *(
            case(
                "times x 2, rates too",
                base,
                every_log(chain(scaled_rates(0.5), scaled_clocks(2), faster(2))),
                legal=True,
            )
            for base in (DELL, COSMO, LORA, RGAT)
        ),
        *(case("no rates", base, every_log(blind), legal=True) for base in (DELL, COSMO, OC20, LORA, RETINA)),
        case("rates 2 % lower", DELL, every_log(scaled_rates(0.98)), legal=True),
    ]


def clock_cases() -> list[Case]:
    case = partial(Case, "clock")
    back = lambda seconds, *epochs: every_log(shifted("epoch_start", epochs, -1000 * seconds))  # noqa: E731
    return [
        case("40 s back at seven epochs", COSMO, back(4, *range(2, 9))),
        case("40 s back at seven epochs", DELL, back(40, *range(1, 8))),
        case("2 s back three times", DELL, back(2, 1, 3, 5)),
        case("half a second back seven times", DELL, back(0.5, *range(1, 8))),
        case("1.1 s back once", DELL, back(1.1, 4)),
        case("two minutes back once", DELL, back(120, 4)),
        case("60 s back at four evaluations", LORA, every_log(shifted("eval_start", (1, 2, 3, 4), -60_000))),
        case("run_start again after 30 s", DELL, every_log(repeated("run_start", 30))),
        case("run_start again before", DELL, every_log(repeated("run_start", -30))),
        case("run_stop twice", DELL, every_log(repeated("run_stop", -300))),
        case("run_start again in Training", LORA, every_log(repeated("run_start", 30))),
        case("1 ms back at each epoch", DELL, back(0.001, *range(1, 9)), legal=True),
        case("half a second back once", DELL, back(0.5, 4), legal=True),
        case("run_start by a second rank", DELL, every_log(repeated("run_start", 0.1)), legal=True),
    ]


def evaluation_cases() -> list[Case]:
    case = partial(Case, "evaluations")
    return [
        *(case("every evaluation takes 1 ms", base, every_log(short_evaluations(1))) for base in (DELL, CLEMSON, OC20)),
        case("every evaluation takes 50 ms", DELL, every_log(short_evaluations(50))),
        case("one evaluation takes 1 ms", DELL, every_log(short_evaluations(1, only=3))),
        case("the evaluations of one run take 1 ms", DELL, one_log(short_evaluations(1))),
        case("training is slower by a disk", DELL, every_log(shifted("eval_start", range(99), 3_600_000)), legal=True),
        case("every evaluation takes 20 s", DELL, every_log(short_evaluations(20_000)), legal=True),
        case("a slow first epoch", DELL, every_log(shifted("eval_start", (0,), 600_000)), legal=True),
    ]


def interval_cases() -> list[Case]:
    case = partial(Case, "interval of evaluations")
    half, third = kept_evaluations(lambda n: n % 2 == 0), kept_evaluations(lambda n: n % 3 == 0)
    return [
        *(case("every second evaluation", base, every_log(half)) for base in (LORA, BERT, DLRM, RGAT, BIG, SMALL, FLUX)),
        case("every third evaluation", LORA, every_log(third)),
        case("one evaluation left out", RGAT, every_log(kept_evaluations(lambda n: n != 7))),
        case("only the last evaluation", BERT, every_log(kept_evaluations(lambda n: False))),
        case("twice as often", FLUX, every_log(placed(0.5))),
        case("every second epoch", RETINA, every_log(half)),
        case("first ones left out as the rules allow", LORA, every_log(kept_evaluations(lambda n: True)), legal=True),
        case("of v5.0 by samples and a batch", LORA, every_log(chain(placed(1.0))), legal=True),
        case("in the open division", LORA, chain_damage(every_log(chain(half, set_value("submission_division", "open"))),
             described(division="open")), legal=True),
    ]  # fmt: skip


def chain_damage(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def described(**fields: str) -> Damage:
    def apply(folder: Path) -> None:
        for path in (folder / "systems").glob("*.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def whose_cases() -> list[Case]:
    case = partial(Case, "whose runs")

    def again(round_: str, owner: str, *changes: Change, **fields: str) -> Damage:
        def apply(folder: Path) -> None:
            copy = Path(shutil.copytree(folder, folder.parents[1] / round_ / owner))
            if changes:
                every_log(chain(*changes))(copy)
            described(**fields)(copy)

        return apply

    hide = (set_value("submission_org", "Thief"), set_value("submission_platform", "mine"))
    copied = lambda change: lambda folder: (  # noqa: E731
        shutil.copy(*sorted(folder.rglob("result_*.txt"))[:2]), one_log(change)(folder))  # fmt: skip
    return [
        case("another's logs", DELL, again("hpc_results_v2.0", "Thief", submitter="Thief")),
        case("another's logs, same round", DELL, again("hpc_results_v3.0", "Thief", submitter="Thief")),
        case("another's logs, other names", DELL, again("hpc_results_v3.0", "Thief", *hide, submitter="Thief")),
        case("another's logs, other seeds", DELL, again("hpc_results_v3.0", "Thief", set_value("seed", 11), *hide)),
        case("another's logs of Training", LORA, again("training_results_v5.1", "Thief", *hide, submitter="Thief")),
        case("resubmitted of other nodes", DELL, again("hpc_results_v2.0", "Dell", number_of_nodes="64")),
        case("resubmitted of other accelerators", DELL, again("hpc_results_v2.0", "Dell", accelerator_model_name="B200")),
        case("resubmitted, other software", DELL, again("hpc_results_v2.0", "Dell", framework="another")),
        case("resubmitted, not announced", RETINA, again("training_results_v5.1", "Dell")),
        case("a run twice", DELL, copied(lambda events: events)),
        case("a run twice, another seed", DELL, copied(set_value("seed", 4711))),
        case("a run twice, other evaluations", DELL, copied(other_evaluations(3))),
        case("a run twice, other evaluations", CLEMSON, copied(other_evaluations(4))),
        case("a run twice, other evaluations", LORA, copied(other_evaluations(5))),
        case("a run twice, 100 s later", DELL, copied(lambda events: [e | {"time_ms": e["time_ms"] + 10**5} for e in events])),
        case("resubmitted", DELL, again("hpc_results_v2.0", "Dell"), legal=True),
        case("resubmitted with a partner", DELL, again("hpc_results_v2.0", "Dell+HPE", submitter="Dell+HPE"), legal=True),
    ]  # fmt: skip


def package_cases() -> list[Case]:
    case = partial(Case, "package")

    def moved(name: str) -> Damage:
        def apply(folder: Path) -> None:
            (system,) = (folder / "results").iterdir()
            system.rename(folder / "results" / name)
            (folder / "systems" / f"{system.name}.json").rename(folder / "systems" / f"{name}.json")
            one_log(without("run_stop", "eval_accuracy"))(folder)

        return apply

    def diverged(events: Events) -> Events:
        end = next(n for n, event in enumerate(events) if event["key"] == "epoch_stop")
        stop = next(event for event in events if event["key"] == "run_stop")
        last = {name: events[end]["metadata"][name] for name in ("epoch_num",) if name in stop["metadata"]}
        head = [
            event | {"value": float("nan")} if event["key"].startswith("eval_accuracy") else event
            for event in events[: end + 1]
        ]
        return [
            *head,
            stop
            | {"time_ms": events[end]["time_ms"] + 1, "metadata": {**stop["metadata"], "status": "aborted"} | last},
        ]

    def one_more(events: Events) -> Events:
        last = max(n for n, event in enumerate(events) if event["key"] == "epoch_start")
        length = events[-1]["time_ms"] - events[last]["time_ms"]
        steps = events[last]["metadata"].get("step_num", 0) // max(1, events[last]["metadata"]["epoch_num"] - 1)
        by = {"epoch_num": 1, "epoch": 1, "step_num": steps, "step": steps}
        more = [
            event
            | {
                "time_ms": event["time_ms"] + length,
                "value": event["value"] * (1.0003 if event["key"] in ("eval_accuracy", "eval_loss") else 1.0)
                if isinstance(event["value"], float)
                else event["value"],
                "metadata": {name: each + by.get(name, 0) for name, each in event["metadata"].items() if name in by},
            }
            for event in events[last:]
            if by.keys() & event["metadata"].keys() and event["key"] not in ("run_stop", "target_accuracy_reached")
        ]
        stop = next(n for n, event in enumerate(events) if event["key"] == "run_stop")
        return [*events[:stop], *more, events[stop] | {"time_ms": events[stop]["time_ms"] + length}]

    remove = lambda number: lambda folder: sorted(folder.rglob("result_*.txt"))[number].unlink()  # noqa: E731
    return [
        case("a bad log below a system .git", DELL, moved(".git")),
        case("a bad log below a system power", DELL, moved("power")),
        case("a bad log below a system pruned_results", DELL, moved("pruned_results")),
        case("four of five runs", DELL, remove(2)),
        case("nine of ten runs", LORA, remove(2)),
        case("the target was missed twice", DELL, every_log(set_value("eval_accuracy", 0.5))),
        case("two runs diverged", DELL, chain_damage(one_log(diverged, 1), one_log(diverged, 2))),
        case("another optimizer", DELL, every_log(set_value("opt_name", "SGD"))),
        case("half the samples", DELL, every_log(set_value("train_samples", 60_633))),
        case("one run of another batch", DELL, one_log(set_value("global_batch_size", 128))),
        case("a claim of twice the nodes", DELL, described(number_of_nodes="64")),
        case("an exempted result with another seed", EXEMPT_HPC, one_log(set_value("seed", 5))),
        case("an exempted result with another seed", EXEMPT, one_log(set_value("seed", 5))),
        case("one run diverged", DELL, one_log(diverged), legal=True),
        case("one more epoch after the target", DELL, every_log(one_more), legal=True),
        case("the code of another file name", DELL, lambda folder: (folder / "README.md").write_text("x"), legal=True),
        *(
            case("untouched", base, lambda folder: None, legal=True)
            for base in (COSMO, OC20, FOLD, ANL, EXEMPT, *TRAINING)
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
