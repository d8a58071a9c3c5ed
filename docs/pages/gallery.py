"""The page of figures: each with what it answers and how to read it, drawn from made-up results.

Titles, questions, captions and answers come from the figures themselves. The logs are written by the tests' own writers: no
system of these pictures exists.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mlhpc.analysis.drawing.charts import build_specification
from mlhpc.analysis.drawing.view import View
from mlhpc.analysis.figures import list_views, load_figure_modules
from mlhpc.analysis.page.pictures import encode_chart
from mlhpc.analysis.page.report import render_report
from mlhpc.analysis.sources.readers import read_sources
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.descriptor import list_installed_cards
from mlhpc.suite.plugins import WINGS_GROUP, find_plugins
from tests.analysis.conftest import (
    START_MS,
    LogText,
    log_text,
    small_card,
    write_ceilings,
    write_counters,
    write_course_runs,
    write_run_folder,
)
from tests.fixtures.sweeps import sweep_documents

INTRODUCTION = """# Gallery

Every figure of the report (`mlhpc report`), in the order of the page. Titles, questions, captions
and answers are the figures' own.

**The systems here are made up** ("north", "south", "laptop"); only the two figures that put results beside the published ones show
published MLPerf HPC scores too. Results are unofficial: not verified by MLCommons Association.
"""
SIZES = (
    (4, 1200, 5, 256),
    (8, 640, 5, 512),
    (16, 350, 6, 1024),
    (32, 210, 8, 2048),
    (64, 140, 11, 4096),
)  # nodes, s, epochs, batch

SHOTS = (  # of the report: name, title, width in pixels, flags of Chromium
    ("light", "1400 pixels, light", 1400, ()),
    ("dark", "1400 pixels, dark", 1400, ("--force-dark-mode",)),
    ("narrow", "400 pixels, as on a phone", 400, ()),
    ("paper", "On paper", 1040, ()),
)
SHOT_HEIGHT = 3000  # pixels
NARROWEST_WINDOW = 500  # pixels: Chromium makes none narrower, so a narrower page leaves a margin


def page(example: Study, shots: dict[str, bytes]) -> str:
    """The page. Every figure has a section, and so has the report as a browser shows it, if there are ``shots``."""
    parts = [INTRODUCTION]
    if shots:
        parts.append("## The report in a browser\n")
    parts += [f"### {title}\n\n![{title}](gallery/page_{name}.png)\n" for name, title, *_ in SHOTS if name in shots]
    for module in load_figure_modules().values():
        parts += [f"## {module.TITLE}\n", *(_section(view, example) for view in module.VIEWS)]
    return "\n".join(parts)


def example(root: Path) -> Study:
    """Made-up results: five sizes of a machine, a faster one, throughput mode, two of one's own, ceilings, a sweep, a search."""
    rounds = root / "made up"
    for nodes, seconds, epochs, batch in SIZES:
        _result(rounds, f"north-{2 * nodes}", "north", nodes, seconds, epochs, batch)
    _result(rounds, "south-32", "south", 16, 245, 6, 1024, accelerator="B2")
    _result(rounds, "south-32-throughput", "south", 16, 2400, 5, 256, accelerator="B2", runs=24, mode="weak")
    laptop = write_run_folder(root, "laptop", extra=(("precision", "float32"),))
    course = write_course_runs(root, last_metric=0.9)
    here, there = write_ceilings(root / "here.json"), write_ceilings(root / "there.json", "south", faster=3.0)
    files = [here, write_counters(root / "counters.json"), *_write_examples_of_wings(root)]
    found = read_sources([rounds, laptop, *files], [there])
    cards = list_installed_cards() | {"cosmoflow": small_card()}
    return read_study([rounds, laptop, course], cards, found.inputs, {**found.documents, **sweep_documents(root)})


def _write_examples_of_wings(root: Path) -> list[Path]:
    """Files that the figures of the installed wings need, as `examples.py` among each wing's tests writes them."""
    modules = [f"tests.plugins.{wing}.examples" for wing in find_plugins(WINGS_GROUP)]
    found = [importlib.import_module(module) for module in modules if importlib.util.find_spec(module)]
    return [path for module in found for path in module.write_examples(root)]


def _result(
    root: Path, system: str, machine: str, nodes: int, seconds: float, epochs: int, batch: int,
    accelerator: str = "A1", runs: int = 10, mode: str = "strong",
) -> None:  # fmt: skip
    """A package of one result: each run has its seed, which changes its epochs, and its speed."""
    chance = random.Random(f"{system} {mode}")  # noqa: S311  made-up results
    package = root / machine.upper()
    for run in range(runs):
        more = max(2, epochs + chance.choice((-1, 0, 0, 0, 1, 1)))
        errors = (*(0.1 + 0.4 * 0.6 ** (i * 6 / more) + 0.03 * chance.random() for i in range(more)), 0.11)
        text = log_text(
            errors=errors, train_s=seconds * (1 + 0.03 * chance.random()), eval_s=seconds / 9, gap_s=1.0,
            start_s=0.0 if mode == "weak" else 50_000.0 * run, seed=run, ranks=2 * nodes, ours=True, platform=machine,
            staging=(0.0, 100 + 50 * chance.random()),
        )  # fmt: skip
        _goodput(text, seconds, nodes if mode == "strong" else 0, f"{system} {mode} {run}")
        _energy(text, nodes, 1500.0 if machine == "south" else 900.0, f"energy {system} {run}")
        text.lines = [
            line.replace('"value": 8,', f'"value": {batch},') if "global_batch_size" in line else line
            for line in text.lines
        ]
        text.write(package / "results" / system / mode / "cosmoflow" / f"result_{run}.txt")
    described: dict[str, Any] = {
        "submitter": machine.upper(), "division": "closed", "system_name": machine,
        "number_of_nodes": str(nodes * (runs if mode == "weak" else 1)), "accelerators_per_node": "2",
        "host_processors_per_node": "1", "accelerator_model_name": accelerator,
        "framework": "TensorFlow 2.9" if machine == "south" else "PyTorch 1.12",
    }  # fmt: skip
    (package / "systems").mkdir(parents=True, exist_ok=True)
    (package / "systems" / f"{system}.json").write_text(json.dumps(described))


def _energy(text: LogText, nodes: int, watts: float, name: str) -> None:
    """What the counters of the nodes say of a run: made up, each node at about the same power."""
    watts *= 1 + 0.02 * random.Random(name).random()  # noqa: S311  made-up results
    place = next(index for index, line in enumerate(text.lines) if '"run_stop"' in line)
    start = next(line for line in text.lines if '"run_start"' in line)
    begin, end = (json.loads(line.removeprefix(":::MLLOG "))["time_ms"] for line in (start, text.lines[place]))
    took = (end - begin) / 1e3
    joules = {"pm_counters/node": {"joules": watts * nodes * took, "counters": 2}}  # the made-up logs all say two nodes
    text.event((end - START_MS) / 1e3, "energy", joules, seconds=took)
    text.lines.insert(place, text.lines.pop())


def _goodput(text: LogText, seconds: float, nodes: int, name: str) -> None:
    """What a run logs of its attempts after its end: made up, with more interruptions on more nodes."""
    count = int(nodes > 8 and random.Random(name).random() < nodes / 100)  # noqa: S311  made-up results
    parts = {"useful_s": 5 * seconds, "lost_s": 0.3 * seconds * count, "stalled_s": 0.05 * seconds, "starting_s": 60.0}
    parts |= {"down_s": 120.0 * count, "restarting_s": 30.0 * count}
    wall_s = sum(parts.values()) - parts["restarting_s"]
    each = [{"lost_s": parts["lost_s"], "down_s": 120.0, "restart_s": 30.0}] * count
    value = parts | {"wall_s": wall_s, "checkpoint": {"saves": 5}, "interruptions": each}
    text.event(10.0**5 * 12, "goodput", value)


def _section(view: View, example: Study) -> str:
    decision = f"\n\n**Decision.** {view.question.decision}." if view.question.decision else ""
    return (
        f"### {view.title}\n\n*{view.question.text}*\n\n![{view.title}](gallery/{view.name}.svg)\n\n"
        f"**How to read it.** {view.caption}{decision}\n\n**What it says here.** {view.answer(example)}\n\n"
        f"Module `{view.table.__module__}`; numbers in `tables/figure_{view.name}.csv`.\n"
    )


def screenshots(example: Study, folder: Path) -> dict[str, bytes]:
    """The report as Chromium shows it, as PNG by name: wide and narrow, light and dark, on paper. Empty without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        return {}
    html, found = render_report(example, []).html, {}
    for name, _, width, flags in SHOTS:
        # The rules for print hold on the screen too, where a picture can be taken
        shown = html.replace("@media print", "@media all") if name == "paper" else html
        shown = shown.replace("</head>", f"<style>html {{ width: {width}px }}</style></head>", 1)
        (folder / "page.html").write_text(shown)
        window = f"--window-size={max(width, NARROWEST_WINDOW)},{SHOT_HEIGHT}"
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *flags, window,
            f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000",
            f"--screenshot={folder / 'shot.png'}", f"file://{folder / 'page.html'}",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        found[name] = (folder / "shot.png").read_bytes()
    return found


def pictures(example: Study) -> dict[str, str]:
    """Every view as the text of an SVG file on white paper, by name."""
    return {
        name: encode_chart(build_specification(view.chart(view.table(example))), "svg").decode() + "\n"
        for name, view in list_views().items()
    }
