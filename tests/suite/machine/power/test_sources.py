"""Files of other meters: every form once, and what is refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.errors import InputError
from suite.log.energy.integrate import curve
from suite.log.energy.power_log import read_power_log
from suite.machine.power.sources import read_readings, render_power_log
from tests.fixtures.power import power_log

IPMI = """
    Instantaneous power reading:                   {} Watts
    Minimum during sampling period:                 70 Watts
    IPMI timestamp:                           Mon Nov 23 04:00:0{} 2026
    Power reading state is:                   activated
"""
ISO = "2026-11-23T04:00:0{}Z"
AT = 1795406400.0  # 2026-11-23T04:00:00Z
FORMS = {
    "csv": ("time,power [W]\n2026-11-23T04:00:00Z,100\n2026-11-23T04:00:01Z,200\n", "csv"),
    "no zone is UTC": ("timestamp;Power_kW\n2026-11-23 04:00:00;0.1\n2026-11-23 04:00:01;0.2\n", "csv"),
    "zone": ("date,watts\n2026-11-23T05:00:00+01:00,100\n2026-11-23T05:00:01+01:00,200\n", "csv"),
    "unix": ("time_s,power_w\n1795406400,100\n1795406401,200\n", "csv"),
    "unix ms": ("time_ms,power (mW)\n1795406400000,100000\n1795406401000,200000\n", "csv"),
    "bom, blank line": ("\ufefftime,power\n1795406400,100\n\n1795406401,200 W\n", "csv"),
    "jpwr": ("timestamps,gpu:0,gpu:1\n1795406400.0,60,40\n1795406401.0,150,50\n", "jpwr"),
    "ipmitool": (IPMI.format(100, 0) + IPMI.format(200, 1), "ipmi"),
    "redfish": (
        '{"MetricValues": [{"Timestamp": "2026-11-23T04:00:00Z", "MetricValue": "100"},'
        ' {"Timestamp": "2026-11-23T04:00:01Z", "MetricValue": "200"}]}',
        "redfish",
    ),
    "redfish lines": (
        '{"PowerConsumedWatts": 100, "time": 1795406400}\n{"PowerConsumedWatts": 200, "time": 1795406401}\n',
        "redfish",
    ),
    "slurm": (
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:00|2026-11-23T04:00:01|\n7.0|2026-11-23T04:00:00|2026-11-23T04:00:01|200\n",
        "slurm",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_and_read(tmp_path: Path, name: str) -> None:
    text, form = FORMS[name]
    path = tmp_path / "meter"
    path.write_text(text, encoding="utf-8")
    found = read_readings(path)
    assert found.form == form
    first = 200.0 if form == "slurm" else 100.0
    assert found.points == ((AT, pytest.approx(first)), (AT + 1, pytest.approx(200.0)))
    target = tmp_path / "node_0.txt"
    target.write_text(render_power_log(found, {"scope": "node", "measurement_type": "AC"}))
    log = read_power_log(target)
    assert (log.damaged, log.current, log.stated["source"]) == (0, "AC", form)
    assert curve(log).between(AT, AT + 1) == pytest.approx(200.0)


def test_an_official_log_is_read_and_one_with_an_efficiency_is_not_converted(tmp_path: Path) -> None:
    path = power_log(tmp_path / "log.txt", [100.0, 200.0])
    assert [watts for _, watts in read_readings(path).points] == [100.0, 200.0]
    with pytest.raises(InputError, match="conversion_eff; put the file into power/ as it is"):
        read_readings(power_log(tmp_path / "log.txt", [100.0, 200.0], eff=0.9))


REFUSED = {
    "nothing": ("", "expected a CSV"),
    "no time": ("a,power\n1,2\n3,4\n", "expected a CSV"),
    "no power": ("time,a\n1,2\n3,4\n", "expected a CSV"),
    "two powers": ("time,power_w,power_kw\n1,2,3\n4,5,6\n", "several columns of power"),
    "one reading": ("time,power\n1795406400,1\n", "1 readings; expected two or more"),
    "goes back": ("time,power\n1795406400,1\n1795406399,1\n", "is not after"),
    "same time": ("time,power\n1795406400,1\n1795406400,1\n", "is not after"),
    "no number": ("time,power\n1795406400,1\n1795406401,much\n", ":3: 'much' is no number"),
    "nan": ("time,power\n1795406400,nan\n1795406401,1\n", ":2: 'nan' is no number"),
    "no date": ("time,power\nyesterday,1\ntoday,1\n", ":2: 'yesterday' is no time"),
    "short row": ("time,power\n1795406400\n", ":2: 1 columns; expected 2"),
    "not JSON": ('{"PowerConsumedWatts": 1\n', ":1: not JSON"),
    "no plug-in": (
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:00|2026-11-23T04:00:01|0\n",
        "expected joules",
    ),
    "all bits": (
        "JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:00|2026-11-23T04:00:01|18446744073709551614\n",
        "expected joules",
    ),
    "no start": ("JobID|ConsumedEnergyRaw\n7|100\n", "no column End, Start"),
    "ends first": ("JobID|Start|End|ConsumedEnergyRaw\n7|2026-11-23T04:00:01|2026-11-23T04:00:00|5\n", "ends before"),
    "ipmi without time": ("Instantaneous power reading: 5 Watts\n", "no IPMI timestamp"),
    "damaged official": (":::MLLOG {broken\n", ":1: not JSON after"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_readings_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    text, message = REFUSED[name]
    path = tmp_path / "meter"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_readings(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
