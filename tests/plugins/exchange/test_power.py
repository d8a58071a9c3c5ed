"""CSV exports of external meters: the four examples of docs/energy.md, and values that are refused with file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlhpc.plugins.exchange.power import MeterReadings, read_power_columns, read_power_csv
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.energy.power_log import build_curve, read_power_log, render_power_log

PAGE = Path(__file__).resolve().parents[3] / "docs" / "energy.md"
AT = 1795406400.0  # 2026-11-23T04:00:00Z
ISO = "scope: node\ncurrent: AC\ntime: time\npower: w\nunit: W\n"
COUNTER = "scope: node\ncurrent: DC\ntime: time\nenergy: e\nunit: kJ\n"
SACCT = "scope: node\ncurrent: AC\ntime: End\nsince: Start\nenergy: ConsumedEnergyRaw\nunit: J\ndelimiter: '|'\n"


def read(folder: Path, columns: str, text: str) -> MeterReadings:
    (folder / "map.yaml").write_text(columns)
    (folder / "meter.csv").write_text(text, encoding="utf-8")
    return read_power_csv(folder / "meter.csv", read_power_columns(folder / "map.yaml"))


def examples() -> dict[str, tuple[str, str]]:
    """The blocks of the page: (columns, readings) by name of the meter."""
    blocks = re.findall(
        r"^### (\w+).*?```yaml\n(.*?)```.*?```text\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return {name: (columns, readings) for name, columns, readings in blocks}


def test_the_page_has_an_example_of_each_export() -> None:
    assert set(examples()) == {"IPMI", "PDU", "Redfish", "sacct"}


@pytest.mark.parametrize("name", ["IPMI", "PDU", "Redfish", "sacct"])
def test_the_examples_of_the_page_are_read(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, *examples()[name])
    nodes = {number: [watts for _, watts in points] for number, points in found.by_node.items()}
    expected = {
        "IPMI": {0: [412.0, 418.0]},
        "PDU": {0: [1210.0, 1225.0], 1: [1190.0, 1188.0]},
        "Redfish": {0: [640.0, 652.0]},
        "sacct": {0: [500.0, 500.0]},
    }
    assert nodes == expected[name]


FORMS = {
    "no zone is UTC": (ISO, "time,w\n2026-11-23 04:00:00,100\n2026-11-23 04:00:01,200\n"),
    "zone": (ISO, "time,w\n2026-11-23T05:00:00+01:00,100\n2026-11-23T05:00:01+01:00,200\n"),
    "seconds": (ISO + "time_form: s\n", "time,w\n1795406400,100\n1795406401,200\n"),
    "milliseconds": (ISO + "time_form: ms\n", "time,w\n1795406400000,100\n1795406401000,200\n"),
    "own form": (
        ISO + "time_form: '%d.%m.%Y %H:%M:%S'\n",
        "time,w\n23.11.2026 04:00:00,100\n23.11.2026 04:00:01,200\n",
    ),
    "byte order mark, kW": (
        ISO.replace("unit: W", "unit: kW"),
        "\ufefftime,w\n2026-11-23T04:00:00Z,0.1\n2026-11-23T04:00:01Z,0.2\n",
    ),
    "a column per device": (
        ISO.replace("power: w", "power: [a, b]"),
        "time,a,b\n2026-11-23T04:00:00Z,60,40\n2026-11-23T04:00:01Z,150,50\n",
    ),
    "rows of another sensor": (
        ISO + "rows: {sensor: power}\n",
        "time,sensor,w\n2026-11-23T04:00:00Z,power,100\n2026-11-23T04:00:00Z,fan,9\n2026-11-23T04:00:01Z,power,200\n",
    ),
    "counter": (
        COUNTER + "time_form: s\n",
        "time,e\n1795406399,7.0\n1795406400,7.1\n1795406401,7.3\n",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_readings_become_a_power_log(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, *FORMS[name])
    assert list(found.by_node) == [0]
    assert [time for time, _ in found.by_node[0]] == [AT, AT + 1]
    assert [watts for _, watts in found.by_node[0]] == pytest.approx([100, 200])
    target = tmp_path / "node_0.txt"
    target.write_text(render_power_log(found.by_node[0], found.columns.stated))
    log = read_power_log(target)
    assert (log.damaged, log.scope, log.integrates) == (0, "node", name == "counter")
    assert build_curve(log).between(AT, AT + 1) == pytest.approx(200)


REFUSED = {
    "no column": (ISO, "time,power\n", "meter.csv:1: no column w; the columns are 'time, power'"),
    "one reading": (ISO, "time,w\n2026-11-23T04:00:00Z,1\n", "1 readings of node 0; expected two or more"),
    "goes back": (ISO, "time,w\n2026-11-23T04:00:01Z,1\n2026-11-23T04:00:00Z,1\n", ":3: its time 2026-11-23T04:00:00"),
    "same time": (ISO, "time,w\n2026-11-23T04:00:00Z,1\n2026-11-23T04:00:00Z,1\n", ":3: its time"),
    "no number": (ISO, "time,w\n2026-11-23T04:00:00Z,much\n", ":2: 'much' is not a number"),
    "not finite": (ISO, "time,w\n2026-11-23T04:00:00Z,nan\n", ":2: 'nan' is not a number"),
    "short row": (ISO, "time,w\n2026-11-23T04:00:00Z\n", ":2: None is not a number"),
    "no date": (ISO, "time,w\nyesterday,1\n", ":2: 'yesterday' is no time of the form 'iso'"),
    "counter goes back": (COUNTER + "time_form: s\n", "time,e\n1,5\n2,4\n", ":3: its time or e is not above"),
    "Slurm without a plug-in": (
        SACCT,
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:00|2026-11-23T04:00:01|0\n",
        ":2: ConsumedEnergyRaw is 0 J; expected more than 0",
    ),
    "Slurm's mark of a failure": (
        SACCT,
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:00|2026-11-23T04:00:01|18446744073709551614\n",
        "expected more than 0",
    ),
    "ends first": (
        SACCT,
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:01|2026-11-23T04:00:00|5\n",
        ":2: End is not after Start",
    ),
    "unknown key": (ISO + "colour: red\n", "", "unknown key 'colour'"),
    "no scope": (ISO.replace("scope: node\n", ""), "", "scope"),
    "power and energy": (ISO + "energy: e\n", "", "expected either power or energy"),
    "unit of the other": (ISO.replace("unit: W", "unit: J"), "", "J is no unit of power"),
    "half a clock": (ISO + "clock_offset_s: 1\n", "", "clock_offset_s and clock_bound_s belong together"),
    "accuracy in percent": (ISO + "accuracy: 5\n", "", "accuracy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_readings_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    columns, text, message = REFUSED[name]
    with pytest.raises(InputError) as caught:
        read(tmp_path, columns, text)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
