"""benchmarks/claims.yaml has each claim of the pages, and nothing below benchmarks/ is without a claim.

A number of docs/measured.md stands in a table that its line names, and the table belongs to a row that names the
section. Whether the sentence means that number of the table, no test can say: of wrong numbers about four in ten are found.
"""

import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mlhpc.suite.plugins import list_missing_wings

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = "benchmarks/results/"
FILE = yaml.safe_load((BENCHMARKS / "claims.yaml").read_text(encoding="utf-8"))
MEASURED = "docs/measured.md"
DATED = r"20\d\d-\d\d-\d\d-[\w.-]+\.(?:txt|json|md)"
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w]|-\d)")
WORD = re.compile(r"(?<![A-Za-z_\d.])\d+(?:,\d{3})*(?:\.\d+)?(?![\d.]*e)")  # a number of a table
FOLDERS = {"CosmoFlow": "cosmoflow", "DeepCAM": "deepcam", "OpenCatalyst": "open_catalyst", "OpenFold": "openfold"}
FOLDERS |= {"SwinV2-MoE": "swinv2_moe", "`moe_lm`": "moe_lm"}
KNOWN = {"claim", "page", "script", "table", "date", "commit", "cpu", "uses", "computed"}


def as_list(value: Any) -> list[str]:
    """Return a field that has one value or several."""
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def list_tables(row: dict[str, Any]) -> list[str]:
    """Return the paths of a row's tables."""
    names = as_list(row["table"])
    return [name if "/" in name else RESULTS + name for name in names if name != "none kept"]


def list_headings(page: str) -> set[str]:
    """Return the anchors of a page's headings as the site makes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def read_tables(paths: list[str]) -> str:
    """Return the text of tables, of folders that of the Python files in them."""
    files = [each for path in paths for each in sorted((ROOT / path).rglob("*.py")) or [ROOT / path]]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("row", FILE["claims"], ids=lambda row: row["claim"])
def test_a_row_names_what_exists(row: dict[str, Any]) -> None:
    assert set(row) <= KNOWN
    script = row["script"]
    command = script.startswith(("mlhpc ", "make ")) or script == "not kept"
    for path in (*list_tables(row), *as_list(row.get("uses", [])), *([] if command else [script])):
        assert (ROOT / path).exists() or path.split("/")[2:3] in ([wing] for wing in list_missing_wings()), path
    for place in as_list(row["page"]):
        page, _, anchor = place.partition("#")
        assert anchor in list_headings(page), place
        text = (ROOT / page).read_text(encoding="utf-8")
        words = [Path(path).name for path in (*list_tables(row), *([] if command else [script]))]
        assert any(word in text for word in (*words, script)), f"{page} names neither table nor script"
        assert row["table"] != "none kept" or "none kept" in text


@pytest.mark.parametrize("row", FILE["claims"], ids=lambda row: row["claim"])
def test_a_row_dates_its_table(row: dict[str, Any]) -> None:
    tables = [path for path in list_tables(row) if not path.startswith("tests/")]
    assert ("date" in row, "commit" in row) == (bool(tables), bool(tables))
    if not tables:
        return
    dated = [path for path in tables if path.startswith(RESULTS)]
    assert {str(row["date"])} >= {Path(path).name[:10] for path in dated}
    if dated and row["cpu"] != "not stated":
        assert row["cpu"] in read_tables(dated)
    inside = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if inside.stdout.strip() == "false":
        for path in tables:
            done = subprocess.run(["git", "cat-file", "-e", f"{row['commit']}:{path}"], cwd=ROOT, capture_output=True)
            assert done.returncode == 0, f"{path} is not in {row['commit']}"


def test_every_script_and_table_belongs_to_a_claim() -> None:
    kept = {str(path.relative_to(ROOT)) for path in (*BENCHMARKS.glob("*.*"), *(BENCHMARKS / "results").iterdir())}
    others = {*FILE["tools"]}
    named = set(others)
    for row in FILE["claims"]:
        named |= {row["script"], *list_tables(row), *as_list(row.get("uses", []))}
    assert kept - named - {"benchmarks/claims.yaml"} == set()
    assert {path for path in others if not (ROOT / path).exists()} == set()


def test_a_part_is_used() -> None:
    """A file of ``uses`` is named by the script, or by another part of the row."""
    for row in FILE["claims"]:
        parts = as_list(row.get("uses", []))
        users = [path for path in (row["script"], *parts, *list_tables(row)) if (ROOT / path).is_file()]
        for part in parts:
            word = Path(part).stem if part.endswith(".py") else Path(part).name
            texts = [(ROOT / path).read_text(encoding="utf-8") for path in users if path != part]
            assert any(word in text for text in texts), (row["claim"], part)


def units() -> Iterator[tuple[str, str]]:
    """Yield (section, text) of each row of a table, item of a list and paragraph of docs/measured.md with a section."""
    page = (ROOT / MEASURED).read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
        for block in re.split(r"\n(?=\||- |\n)", text):
            if block.strip() and not re.fullmatch(r"[\s|-]*", block):
                yield anchor, block.strip()


def find_sources(unit: str, before: list[str]) -> list[str]:
    """Return what a unit rests on: tables, scripts, tests, or the pages that it links."""
    if unit.startswith("|") and unit.rstrip("| ").endswith("the same"):
        return before
    named = [RESULTS + name for name in re.findall(DATED, unit)]
    named += re.findall(r"`((?:benchmarks|tests)/[\w/.]+)`", unit)
    return named or ["docs/" + page for page in re.findall(r"\]\((\w+\.md)", unit)]


def is_in(number: str, text: str) -> bool:
    """Whether a text has a number that is this one, as it is, rounded as the page has it, or as a share of 1."""
    if "e" in number:
        return number in text
    decimals = len(number.partition(".")[2])
    wanted = float(number)
    near = (0.5 + 1e-6) * 10**-decimals
    for word in WORD.findall(text):
        digits = len(word.partition(".")[2])
        value = float(word.replace(",", ""))
        if value == wanted and digits >= decimals:
            return True
        if digits > decimals and abs(value - wanted) <= near and (decimals or wanted >= 10):
            return True
        if digits >= decimals + 2 and value <= 2 < wanted and abs(100 * value - wanted) <= near:
            return True
    return False


def test_every_number_of_measured_stands_in_a_table_of_a_claim() -> None:
    rows = [(row, as_list(row["page"])) for row in FILE["claims"]]
    before: list[str] = []
    count = 0
    for section, unit in units():
        before = find_sources(unit, before)
        numbers = NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", unit))
        if not numbers or "±" in unit:  # the epochs to target: the next test
            continue
        count += len(numbers)
        for source in before:
            places = [place for row, pages in rows for place in pages if source in {row["script"], *list_tables(row)}]
            linked = [place for _, pages in rows for place in pages if place.startswith(f"{source}#")]
            assert f"{MEASURED}#{section}" in places or linked, f"no row of {section}: {unit}"
        text = read_tables([source for source in before if not source.startswith("benchmarks/") or RESULTS in source])
        assert before, f"no table is named: {unit}"
        computed = {
            each for row, _ in rows if {*before} & {*list_tables(row)} for each in as_list(row.get("computed", []))
        }
        missing = {each for each in numbers if text and not is_in(each.replace(",", ""), text)} - computed
        assert missing == set(), f"not in {before}: {unit}"
    assert count > 100


def test_the_epochs_to_target_are_those_of_the_reference_points() -> None:
    page = (ROOT / MEASURED).read_text(encoding="utf-8")
    for name, folder in FOLDERS.items():
        (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*±.*) \|$", page, re.MULTILINE)
        stated = re.findall(r"([\d.]+) ± ([\d.]+) \((\d+), (\d+)", line)
        sizes = ("smoke", "mini", "mini_facts")[: len(stated)]
        for size, numbers in zip(sizes, stated, strict=True):
            path = ROOT / "workloads" / folder / "rcp" / f"{size}.json"
            (point,) = msgspec.json.decode(path.read_bytes())["points"]
            epochs = point["epochs"]
            seen = (f"{statistics.mean(epochs):.1f}", f"{statistics.stdev(epochs):.1f}")
            assert numbers == (*seen, str(len(epochs)), str(len(set(point["data_manifests"])))), (name, size)


def test_what_courses_show_is_counted_and_stated_of_each_course() -> None:
    page = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    share = r"\| (\d+) of (\d+) "
    stated = re.findall(rf"^\| (\S+) `(\w+)` {3 * share}\| `({DATED})` \|$", page, re.MULTILINE)
    shipped = {(path.parts[-3], path.name) for path in (ROOT / "workloads").glob("*/rcp/*_course.json")}
    assert sorted((FOLDERS[name], f"{size}_course.json") for name, size, *_ in stated) == sorted(shipped)
    unseen = re.findall(r"^\| ([^|]+) \| ((?:\S+ `(?:smoke|mini)`(?:, )?)+) \| [^|]+ \|$", page, re.MULTILINE)
    listed = {(*where, fault) for fault, places in unseen for where in re.findall(r"(\S+) `(smoke|mini)`", places)}
    missed = set()
    for name, size, *numbers, table in stated:
        text = (ROOT / RESULTS / table).read_text(encoding="utf-8")
        counts = r"([^|]+) \| (\d+) \| (\d+) \| (\d+) \|"
        rows = re.findall(rf"^\| {FOLDERS[name]} {size} \| {counts}", text, re.MULTILINE)
        # These have no decay of weights, and 100 times none is no fault.
        rows = [row for row in rows if name not in ("CosmoFlow", "OpenFold") or row[0] != "weight decay x 100"]
        broken = [(int(n), int(seen), int(reached)) for fault, n, seen, reached in rows if fault != "none"]
        missed |= {
            (name, size, fault.replace(" by ", " / ")) for fault, _, seen, _ in rows if seen == "0" and fault != "none"
        }
        healthy = [(seen, n) for fault, n, seen, _ in rows if fault == "none"]
        healthy = healthy or re.findall(r"(\d+) of (\d+) called unlike", text)
        assert {n for n, *_ in broken} == {1}, (name, size)
        on_target = [seen for _, seen, reached in broken if reached]
        found = [sum(seen for _, seen, _ in broken), len(broken), sum(on_target), len(on_target), *map(int, healthy[0])]
        assert [int(number) for number in numbers] == found, (name, size)
    assert listed == missed
