"""CSV exports of external meters: the four examples of docs/energy.md, and values that are refused with file and line."""

from __future__ import annotations

import gzip
import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from mlhpc.plugins.exchange.power import (
    MeterReadings,
    _list_windows,
    read_meter,
    read_power_columns,
    read_power_csv,
    recognise,
    write_readings,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.energy.power_log import build_curve, read_power_log, render_power_log
from mlhpc.suite.log.energy.score import compute_energy_of_run, read_power_logs
from mlhpc.suite.log.record import RunRecord
from tests.fixtures.power import line as event_line

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
    assert set(examples()) == {"Cray", "IPMI", "PDU", "Redfish", "sacct"}


def check_refused(path: Path, text: str, said: str) -> None:
    """Check that a file with this text is refused in one line."""
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_power_csv(path, recognise(path))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["Cray", "IPMI", "PDU", "Redfish", "sacct"])
def test_the_examples_of_the_page_are_read(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, *examples()[name])
    nodes = {number: [watts for _, watts in points] for number, points in found.by_node.items()}
    expected = {
        "Cray": {0: [412.0, 418.0]},
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
    "microseconds": (ISO + "time_form: us\n", "time,w\n1795406400000000,100\n1795406401000000,200\n"),
    "nanoseconds": (ISO + "time_form: ns\n", "time,w\n1795406400000000000,100\n1795406401000000000,200\n"),
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
    "counter goes back": (COUNTER + "time_form: s\n", "time,e\n1,5\n2,4\n", ":3: e is below that of the row before"),
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


# Tables as these tools write them. Lines of the A100, of sacct and of the 7900 XTX (llama-swap #775, with a time in front) are
# public logs; cells of the MI250 (rocm_smi_lib #149, #160) too. Those of amd-smi, jpwr and one of rocm-smi are made
SMI_REPORT = """
==============NVSMI LOG==============

Timestamp                                 : Mon Nov 23 {0} 2026
Attached GPUs                             : 2
GPU 00000000:01:00.0
    GPU Power Readings
        Power Draw                        : {1} W
        Current Power Limit               : 400.00 W
GPU 00000000:02:00.0
    GPU Power Readings
        Average Power Draw                : 59.00 W
        Instantaneous Power Draw          : {2} W
    Module Power Readings
        Power Draw                        : N/A
"""
PUBLIC = {
    "nvidia-smi, one A100, idle": (
        "timestamp, power.draw [W], utilization.gpu [%], temperature.gpu\n"
        "2026/05/09 03:57:48.161, 62.87 W, 0 %, 40\n2026/05/09 03:57:49.169, 62.53 W, 0 %, 40\n",
        [62.87, 62.53],
    ),
    "nvidia-smi without units, of two devices, the second later": (
        "timestamp, index, name, uuid, memory.used [MiB], memory.total [MiB], power.draw [W], power.limit [W], "
        "utilization.gpu [%]\n"
        "2026/05/01 21:30:00.000, 0, RTX PRO 6000, GPU-0, 1024, 98304, 250.5, 600, 78\n"
        "2026/05/01 21:30:00.003, 1, RTX PRO 6000, GPU-1, 4096, 98304, 275.0, 600, 65\n"
        "2026/05/01 21:30:01.000, 0, RTX PRO 6000, GPU-0, 2048, 98304, 300.0, 600, 90\n"
        "2026/05/01 21:30:01.003, 1, RTX PRO 6000, GPU-1, 4096, 98304, 275.0, 600, 65\n",
        [525.5, 575.0],
    ),
    "nvidia-smi without milliseconds": (
        "timestamp, index, utilization.gpu [%], utilization.memory [%], memory.used [MiB], power.draw [W]\n"
        "2026/09/23 20:00:00, 0, 80 %, 20 %, 100 MiB, 100 W\n2026/09/23 20:00:01, 0, 100 %, 30 %, 120 MiB, 110 W\n",
        [100.0, 110.0],
    ),
    "nvidia-smi with gaps and the head of a restart": (
        "timestamp, name, power.draw.instant [W], power.limit [W]\n"
        "2026/05/09 03:57:48.161, GeForce RTX 2070, 5.87 W, [N/A]\n2026/05/09 03:57:49.161, GeForce RTX 2070, [N/A], [N/A]\n"
        "2026/05/09 03:57:50.161, GeForce RTX 2070, [Unknown Error], [N/A]\n"
        "timestamp, name, power.draw.instant [W], power.limit [W]\n"
        "2026/05/09 03:57:51.161, GeForce RTX 2070, 6.01 W, [N/A]\n",
        [5.87, 6.01],
    ),
    "nvidia-smi with a device that has a gap": (
        "timestamp, index, power.draw [W]\n"
        "2026/05/09 03:57:48.1, 0, 24.80 W\n2026/05/09 03:57:48.2, 1, 25.05 W\n"
        "2026/05/09 03:57:49.1, 0, 24.80 W\n2026/05/09 03:57:49.2, 1, [Unknown Error]\n"
        "2026/05/09 03:57:50.1, 0, 26.26 W\n2026/05/09 03:57:50.2, 1, 25.05 W\n",
        [49.85, 51.31],
    ),
    "rocm-smi with a time in front": (
        "timestamp,device,Average Graphics Package Power (W)\n"
        "1795406400,card0,210.0\n1795406400,card1,198.5\n1795406401,card0,211.0\n1795406401,card1,198.5\n",
        [408.5, 409.5],
    ),
    "rocm-smi of two 7900 XTX": (
        "timestamp,device,Device Name,Device ID,Temperature (Sensor edge) (C),Average Graphics Package Power (W),GPU use (%),"
        "Memory Activity,Avg. Memory Bandwidth,VRAM Total Memory (B),Card Vendor,GFX Version  \n"
        "1795406400,card0,Radeon RX 7900 XTX,0x744c,31.0,19.0,0,N/A,0,25753026560,Advanced Micro Devices [AMD/ATI],gfx1100  \n"
        "1795406400,card1,Radeon RX 7900 XTX,0x744c,27.0,18.0,0,N/A,0,25753026560,Advanced Micro Devices [AMD/ATI],gfx1100  \n"
        "1795406401,card0,Radeon RX 7900 XTX,0x744c,31.0,21.0,0,N/A,0,25753026560,Advanced Micro Devices [AMD/ATI],gfx1100  \n"
        "1795406401,card1,Radeon RX 7900 XTX,0x744c,27.0,18.0,0,N/A,0,25753026560,Advanced Micro Devices [AMD/ATI],gfx1100  \n",
        [37.0, 39.0],
    ),
    "rocm-smi of an MI250, whose second die says nothing": (
        "timestamp,device,Average Graphics Package Power (W)\n"
        "1795406400,card0,237.0\n1795406400,card1,N/A (Secondary die)\n"
        "1795406401,card0,238.0\n1795406401,card1,N/A (Secondary die)\n",
        [237.0, 238.0],
    ),
    "rocm-smi 6 of an APU": (
        "timestamp,device,Current Socket Graphics Package Power (W)\n1795406400,card0,4.0\n1795406401,card0,3.0\n",
        [4.0, 3.0],
    ),
    "amd-smi": (
        "timestamp,gpu,socket_power,gfx_voltage\n1795406400,0,142 W,N/A\n1795406401,0,143 W,N/A\n",
        [142.0, 143.0],
    ),
    "nvidia-smi dmon, which repeats its head": (
        "#Date       Time        gpu    pwr  gtemp  mtemp \n#YYYYMMDD   HH:MM:SS    Idx      W      C      C \n"
        " 20261123   04:00:00      0     62     35      - \n 20261123   04:00:00      1     60     35      - \n"
        "#Date       Time        gpu    pwr  gtemp  mtemp \n"
        " 20261123   04:00:01      0     63     35      - \n 20261123   04:00:01      1     60     35      - \n"
        " 20261123   04:00:02      0     64     35      - \n 20261123   04:00:02      1      -     35      - \n",
        [122.0, 123.0],
    ),
    "nvidia-smi -q, of two GPUs, the second with the power of the moment": (
        SMI_REPORT.format("04:00:00", 62.5, 60.0) + SMI_REPORT.format("04:00:01", 63.5, 60.0),
        [122.5, 123.5],
    ),
    "amd-smi monitor": (
        "timestamp,gpu,power_usage,gfx_clock\n1795406400,0,142 W,9 MHz\n1795406401,0,143 W,9 MHz\n",
        [142.0, 143.0],
    ),
    "xpu-smi": (
        "Timestamp, DeviceId, GPU Power (W), GPU Frequency (MHz)\n2026-11-23T04:00:00.000,    0, 120.50, 1600\n"
        "2026-11-23T04:00:01.000,    0, 121.00, 1600\n",
        [120.5, 121.0],
    ),
    "remarks above the head": (
        "# host nid001234\n\ntimestamp, power.draw [W]\n2026/05/09 03:57:48, 62.87 W\n2026/05/09 03:57:49, 62.53 W\n",
        [62.87, 62.53],
    ),
    "jpwr": ("timestamps,gpu:0,gpu:1\n1795406400.1,61.5,60.25\n1795406400.2,62.5,60.25\n", [121.75, 122.75]),
}
ALPS = """JobID|ConsumedEnergyRaw|Start|End|AllocNodes|State
38113|20543125|2024-03-15-20:24:16|2024-03-15-20:59:18|4|COMPLETED
38113.batch|5094129|2024-03-15-20:24:16|2024-03-15-20:59:18|1|COMPLETED
38113.extern|20543125|2024-03-15-20:24:16|2024-03-15-20:59:18|4|COMPLETED
38113.0|20536917|2024-03-15-20:24:16|2024-03-15-20:59:17|4|COMPLETED
"""


@pytest.mark.parametrize("name", PUBLIC)
def test_the_table_of_a_tool_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    path, (text, watts) = tmp_path / "smi.csv", PUBLIC[name]
    path.write_text(text)
    columns = recognise(path)
    found = read_power_csv(path, columns)
    assert (columns.scope, list(found.by_node)) == ("device", [0])
    assert [each for _, each in found.by_node[0]] == pytest.approx(watts)


def test_a_table_that_powershell_wrote_is_read(tmp_path: Path) -> None:
    path, (text, watts) = tmp_path / "smi.csv", PUBLIC["nvidia-smi, one A100, idle"]
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-16"))
    assert [each for _, each in read_power_csv(path, recognise(path)).by_node[0]] == watts


def test_turbostat_counts_processors_and_their_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "turbostat.txt"
    rows = "{0}\t-\t-\t62.0\t5.0\n{0}\t0\t0\t62.0\t5.0\n"
    path.write_text("Time_Of_Day_Seconds\tCore\tCPU\tPkgWatt\tRAMWatt\n" + rows.format(AT) + rows.format(AT + 1))
    found = read_power_csv(path, recognise(path))
    assert (found.columns.scope, found.by_node) == ("package", {0: [(AT, 67.0), (AT + 1, 67.0)]})


def test_a_meter_that_was_killed_leaves_a_part_of_a_line(tmp_path: Path) -> None:
    text, watts = PUBLIC["nvidia-smi, one A100, idle"]
    for end in ("2026/05/09 03:57:50.170", "2026/0", "2026/05/09 03:57:50.170, 62.53 W, 0 %"):
        (path := tmp_path / "smi.csv").write_text(text + end)
        found = read_power_csv(path, recognise(path))
        assert [each for _, each in found.by_node[0]] == watts
        check_refused(path, text + end + "\n" + text.splitlines()[-1], "")


@pytest.mark.parametrize("name", ["JobID", "JobIDRaw"])
def test_the_energy_of_a_job_is_not_that_of_its_first_node(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(ALPS.replace("JobID", name))
    columns = recognise(path)
    assert columns.scope == "job"
    ((begin, watts), (end, _)) = read_power_csv(path, columns).by_node[0]
    assert (end - begin, watts * (end - begin)) == pytest.approx((2102, 20543125))
    folder = tmp_path / "power" / "result_0"
    folder.mkdir(parents=True)
    (folder / "node_0.txt").write_text(render_power_log([(begin, watts), (end, watts)], columns.stated))
    (folder / "node_1.txt").write_text(
        render_power_log([(begin, 9.0), (end, 9.0)], columns.stated | {"scope": "device"})
    )
    record = RunRecord(path=tmp_path / "result_0.txt", run_start_s=begin, run_stop_s=end, nodes=4)
    energy = compute_energy_of_run(record, read_power_logs(tmp_path / "result_0.txt"))
    assert (energy.scope, energy.nodes, energy.joules) == ("job", 4, pytest.approx(20543125))
    assert energy.reason == "the meter counts for the whole job, not for each node"


SACCT_WIDTHS = """JobID                      Start                 End ConsumedEnergy
------------ ------------------- ------------------- --------------
7            2026-11-23T04:00:00 2026-11-23T04:10:00 {0:>14}
7.batch      2026-11-23T04:00:00 2026-11-23T04:10:00 {0:>14}
"""


@pytest.mark.parametrize(
    "form", ["JobID|ConsumedEnergy|Start|End\n7|{0}|2026-11-23T04:00:00|2026-11-23T04:10:00\n", SACCT_WIDTHS]
)
@pytest.mark.parametrize(("text", "joules"), [("20.5K", 20500.0), ("20.54M", 20.54e6), ("1.2G", 1.2e9), ("300", 300.0)])
def test_sacct_may_shorten_its_numbers_and_align_its_columns(
    tmp_path: Path, form: str, text: str, joules: float
) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(form.format(text))
    ((begin, watts), (end, _)) = read_power_csv(path, recognise(path)).by_node[0]
    assert watts * (end - begin) == pytest.approx(joules)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"timestamp, power.draw [W]\n", mtime=0), r"is a packed file \(gzip\)"),
        (b"PK\3\4xl/workbook.xml", "is a packed file or a workbook"),
        (b"PAR1\0\0\0\0", "is no text; expected a CSV file"),
        (b"\x89HDF\r\n\x1a\n\0\0", "is no text; expected a CSV file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:9\n", "git lfs pull"),
        (b'{"status":"success","data":{}}', "is JSON or XML"),
        (b'[{"host": 1}]', "is JSON or XML"),
        (b"<?xml version='1.0'?>", "is JSON or XML"),
    ],
)
def test_a_file_of_another_kind_is_told_by_its_kind(tmp_path: Path, content: bytes, said: str) -> None:
    (path := tmp_path / "given.csv").write_bytes(content)
    with pytest.raises(InputError, match=said):
        recognise(path)


@pytest.mark.parametrize(("unit", "per_joule"), [("uJ", 1e6), ("mJ", 1e3), ("mWh", 1 / 3.6), ("J", 1.0), ("kJ", 1e-3)])
def test_a_counter_of_each_unit_has_the_same_watts(tmp_path: Path, unit: str, per_joule: float) -> None:
    (path := tmp_path / "e.csv").write_text(
        "time,e\n" + "".join(f"2026-11-23T04:00:0{i}Z,{(7 + 100 * i) * per_joule:.6f}\n" for i in range(3))
    )
    (columns := tmp_path / "e.yaml").write_text(COUNTER.replace("kJ", unit))
    readings = read_power_csv(path, read_power_columns(columns)).by_node[0]
    assert [watts for _, watts in readings] == pytest.approx([100.0] * 2, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timestamp, power.draw [W]\n2026/05/09 03:57:48, 62 mW\n", ":2: '62 mW' is not a number"),
        ("timestamp, power.draw [W]\n2026/05/09 03:57:48, 62 %\n", ":2: '62 %' is not a number"),
        ("power.draw [W]\n62 W\n", ":1: the head has no column with the time"),
        ("time,temperature\n1,2\n", ":1: the head has no column with the power of a known tool"),
        ("timestamp, power.draw [BTU]\n1,2\n", ":1: the head has no column with the power of a known tool"),
        (ALPS + ALPS.splitlines()[1].replace("38113", "38114"), "has 2 jobs ('38113, 38114'); expected one"),
        ("", ":1: the head has no column"),
    ],
)
def test_what_is_no_known_table_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    check_refused(tmp_path / "meter.csv", text, said)


def test_a_file_of_columns_without_the_time_adds_to_what_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(PUBLIC["nvidia-smi, one A100, idle"][0])
    (tmp_path / "map.yaml").write_text("clock_offset_s: -7200\nclock_bound_s: 0.5\n")
    meter = read_meter(tmp_path / "smi.csv", tmp_path / "map.yaml").args[0]
    assert (meter.columns.clock_offset_s, meter.columns.power) == (-7200, "power.draw [W]")


IPMITOOL = """
    Instantaneous power reading:                   215 Watts
    Minimum during sampling period:                162 Watts
    Maximum during sampling period:                276 Watts
    Average power reading over sample period:      176 Watts
    IPMI timestamp:                           Wed Feb 15 12:49:{} 2017
    Sampling period:                          01131466 Seconds.
    Power reading state is:                   activated

"""
SUPERMICRO = """
    Instantaneous power reading:                   109 Watts
    IPMI timestamp:                           10/12/23 13:29:{} CEST    Sampling period:                          00065530 Seconds.
    Power reading state is:                   activated
"""
FREEIPMI = """
Current Power                        : 332 Watts
Minimum Power over sampling duration : 68 watts
Average Power over sampling duration : 348 watts
Time Stamp                           : 11/03/2023 - 08:36:{}
Statistics reporting time period     : 2685198000 milliseconds
Power Measurement                    : Active
"""
XCAT = """ops01: Current Power                        : 591W
ops01: Time Stamp                           : 11/18/2015 - 1:4:{}
ops01: Power Measurement                    : Active
"""
TEGRASTATS = (
    "07-14-2025 10:29:{} RAM 2147/7620MB (lfb 2x4MB) SWAP 1476/3810MB (cached 1MB) CPU [0%@729,0%@729,0%@729] GR3D_FREQ 0% "
    "cpu@47.687C gpu@48.625C tj@48.625C VDD_IN 4556mW/4570mW VDD_CPU_GPU_CV 483mW/483mW VDD_SOC 1451mW/1451mW\n"
)
DMON = """{0} #Entity   POWER   TOTEC
{0} ID         W      mJ
1777708{0[0]}07.135 GPU 0     16.609  256000
1777708{0[0]}07.141 GPU 1     17.000  N/A
"""


@pytest.mark.parametrize(
    ("text", "first_s", "watts", "scope"),
    [
        (IPMITOOL, 1487162951.0, 215.0, "node"),  # github.com/lovoo/ipmi_exporter/issues/18
        (SUPERMICRO, 1697110151.0, 109.0, "node"),  # github.com/ateodorescu/home-assistant-ipmi/issues/13
        (FREEIPMI, 1699000571.0, 332.0, "node"),  # github.com/ceems-dev/ceems, its collector of IPMI
        (XCAT, 1447808651.0, 591.0, "node"),  # the manual of xCAT's renergy
        (
            DMON,
            1777708107.141,
            33.609,
            "device",
        ),  # dcgmi 4.5.2 with a wall clock before each line, as public scripts write it
        (TEGRASTATS, 1752488951.0, 4.556, "node"),  # a Jetson Orin Nano of San José State University's course notes
    ],
    ids=["ipmitool", "ipmitool of a Supermicro board", "FreeIPMI", "xCAT", "dcgmi dmon", "tegrastats"],
)
def test_the_text_of_a_tool_is_read_as_it_is(
    tmp_path: Path, text: str, first_s: float, watts: float, scope: str
) -> None:
    path = tmp_path / "meter.txt"
    # Asked more often than it measures, a board gives the same reading again
    path.write_text(text.format("11") + text.format("11") * (scope == "node") + text.format("22"))
    columns = recognise(path)
    found = read_power_csv(path, columns)
    assert (columns.scope, list(found.by_node)) == (scope, [0])
    ((begin, one), (end, two)) = found.by_node[0]
    assert (begin, one, two) == pytest.approx((first_s, watts, watts))
    assert 10 < end - begin < 101


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # github.com/openbmc/phosphor-host-ipmid/issues/167
        (
            IPMITOOL.replace("Wed Feb 15 12:49:{} 2017", "Thu Jan  1 00:00:00 1970"),
            "the clock of the board was not set",
        ),
        (
            IPMITOOL.format("11").replace("activated", "deactivated"),
            ":2: the board says that its power reading is deactivated",
        ),
        (IPMITOOL.format("11").replace("215 Watts", "215 BTU"), "the unit is 'BTU'; expected Watts"),
        (IPMITOOL.format("x"), "is no time that ipmitool or ipmi-dcmi writes"),
        (IPMITOOL.partition("    IPMI timestamp")[0], "a reading without its time"),
        (IPMITOOL.format("11"), "1 readings of node 0; expected two or more"),
        (
            "#Entity   POWER\nID   W\nGPU 0   16.6\n",
            "dcgmi dmon writes no times; put them before: dcgmi dmon … | ts %.s",
        ),
        (TEGRASTATS.partition(" ")[2].partition(" ")[2], "writes no times; put them before: tegrastats | ts"),
        (TEGRASTATS.format("11").replace("VDD_IN", "VDD_CPU"), ":1: no VDD_IN, the power of the whole module"),
        ("1777708107.1 #Entity   TMPTR\n", "no column POWER (TMPTR); ask for it: dcgmi dmon -e 155"),
    ],
)
def test_a_text_that_lacks_something_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    check_refused(tmp_path / "meter.txt", text, said)


@pytest.mark.parametrize(
    "state",
    ["deactivated", "not activated", "Not Available", "Not Active", "Inactive", "NotActive", "unknown", "no", "N/A"],
)
def test_a_board_that_does_not_say_that_it_measures_gives_no_reading(tmp_path: Path, state: str) -> None:
    for text, on in ((IPMITOOL, "activated"), (FREEIPMI, "Active")):
        said = f": the board says that its power reading is {state.lower()}: it measures nothing"
        check_refused(tmp_path / "meter.txt", text.format("11").replace(on, state) + text.format("22"), said)


def write_in_zone(path: Path, zone_s: int, before_s: float, after_s: float, idle_w: float) -> None:
    """Write a table of nvidia-smi in the local time of a zone: 100 W from AT to AT + 120 s, ``idle_w`` around it."""
    rows = ["timestamp, index, power.draw [W]"]
    for step in range(round(-before_s / 5), round((120 + after_s) / 5) + 1):
        shown = datetime.fromtimestamp(AT + 5 * step + zone_s, UTC).strftime("%Y/%m/%d %H:%M:%S.000")
        rows.append(f"{shown}, 0, {100.0 if 0 <= step <= 24 else idle_w:.2f} W")
    path.write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("seed", range(16))
def test_the_hours_of_another_zone_are_never_taken_for_those_of_a_run(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    zone_s = 0 if seed % 4 == 0 else 900 * draw.randint(-48, 56)
    before_s, after_s = draw.choice([60, 1800, 9000]), draw.choice([60, 1800, 9000])
    run = RunRecord(path=tmp_path / "result_0.txt", run_start_s=AT, run_stop_s=AT + 120.0)
    write_in_zone(tmp_path / "smi.csv", zone_s, before_s, after_s, 20.0)
    meter = read_meter(tmp_path / "smi.csv", None)
    if zone_s == 0 and max(before_s, after_s) == 60:
        meter(run, tmp_path / "power")
    else:
        with pytest.raises(InputError, match=r"smi\.csv: its times have no zone; as UTC the table .* UTC[+-]\d+:\d\d"):
            meter(run, tmp_path / "power")
    (tmp_path / "map.yaml").write_text(f"clock_offset_s: {-zone_s}\nclock_bound_s: 1\n")
    read_meter(tmp_path / "smi.csv", tmp_path / "map.yaml")(run, tmp_path / "stated")
    log = read_power_log(tmp_path / "stated" / "node_0.txt")
    inside = [
        watts for time, watts in zip(log.times_ms, log.watts, strict=True) if AT <= time / 1e3 - zone_s <= AT + 120
    ]
    assert inside == [100.0] * 25


def test_the_zone_does_not_matter_where_the_power_is_the_same(tmp_path: Path) -> None:
    run = RunRecord(path=tmp_path / "result_0.txt", run_start_s=AT, run_stop_s=AT + 120.0)
    write_in_zone(tmp_path / "smi.csv", 0, 9000, 9000, 99.0)
    read_meter(tmp_path / "smi.csv", None)(run, tmp_path / "power")
    assert (tmp_path / "power" / "node_0.txt").exists()


def test_several_runs_say_more_of_the_zone_than_one(tmp_path: Path) -> None:
    """One run of 120 s in a table of an hour may be anywhere; two at its ends can not."""
    write_in_zone(tmp_path / "smi.csv", 0, 60, 3600, 20.0)
    run = RunRecord(path=tmp_path / "result_0.txt", run_start_s=AT, run_stop_s=AT + 120.0)
    with pytest.raises(InputError, match=r"as UTC the table fits the runs, and as UTC\+0:15 \(20 W, not 100 W\)"):
        read_meter(tmp_path / "smi.csv", None)(run, tmp_path / "power")
    lines = [event_line(key, None, AT + at, {}) for key, at in (("run_start", 3500), ("run_stop", 3600))]
    (tmp_path / "result_1.txt").write_text("\n".join(lines) + "\n")
    _list_windows.cache_clear()
    read_meter(tmp_path / "smi.csv", None)(run, tmp_path / "power")


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("label", ["{}: ", "node{}: ", " {}: ", "P0 {}: "])
def test_each_label_of_the_lines_is_a_node(tmp_path: Path, name: str, label: str) -> None:
    """Srun --label, pdsh and the like put a label before each line; that of a node alone is what the reader knows."""
    text, watts = PUBLIC[name]
    lines = text.splitlines(keepends=True)
    path = tmp_path / "smi.csv"
    path.write_text("".join(label.format(node) + line for line in lines for node in (10, 2)))
    found = read_power_csv(path, recognise(path))
    assert found.columns.nodes == [label.format(node).strip()[:-1] for node in (2, 10)]
    assert [[each for _, each in found.by_node[node]] for node in (0, 1)] == [pytest.approx(watts)] * 2


def test_labels_of_tasks_are_not_taken_for_nodes(tmp_path: Path) -> None:
    path, (text, _) = tmp_path / "smi.csv", PUBLIC["remarks above the head"]
    path.write_text("".join(f"{task}: {line}\n" for line in text.splitlines()[2:] for task in range(4)))
    meter = read_power_csv(path, recognise(path))
    start = meter.by_node[0][0][0]
    run = RunRecord(path=tmp_path / "result_0.txt", run_start_s=start, run_stop_s=start + 1.0, nodes=2)
    with pytest.raises(InputError, match="4 labels .* number_of_nodes of the run is 2; expected one label per node"):
        write_readings(meter, run, tmp_path / "power")
    write_readings(meter, replace(run, nodes=4), tmp_path / "power")
    assert len(list((tmp_path / "power").glob("node_*.txt"))) == 4


@pytest.mark.parametrize("name", [name for name in PUBLIC if "-q" not in name])  # -q has no head
def test_a_table_without_its_head_says_so(tmp_path: Path, name: str) -> None:
    head = recognised_head(name)
    lines = PUBLIC[name][0].splitlines(keepends=True)
    text = "".join(line for line in lines[lines.index(head) + 1 :] if line != head)
    for labelled in (text, "".join(f"0: {line}" for line in text.splitlines(keepends=True))):
        check_refused(tmp_path / "smi.csv", labelled, ":1: no head: the first line holds readings; write it again")
        columns = tmp_path / "y.yaml"
        columns.write_text(ISO)
        with pytest.raises(InputError, match="no head: the first line holds readings"):
            read_power_csv(tmp_path / "smi.csv", read_power_columns(columns))


def recognised_head(name: str) -> str:
    """The line of the head: the first one that is no remark."""
    lines = PUBLIC[name][0].splitlines(keepends=True)
    return next(line for line in lines if line.strip() and not line.startswith("#"))


HET = "JobID|Start|End|ConsumedEnergyRaw\n"


def het_row(part: str, start: int, stop: int, joules: int) -> str:
    return f"{part}|2026-11-23T04:00:{start:02}|2026-11-23T04:00:{stop:02}|{joules}\n"


@pytest.mark.parametrize("seed", range(6))
def test_the_energies_of_the_components_of_a_job_are_added(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows, total = [], 0
    for part in range(draw.randint(2, 5)):
        start, stop, joules = draw.randint(0, 9), draw.randint(20, 50), draw.randint(1, 9999)
        total += joules
        rows.append(het_row(f"7+{part}", start, stop, joules))
        rows.append(het_row(f"7+{part}.0", start, stop, joules))  # a step is a part of it
    draw.shuffle(rows)
    path = tmp_path / "sacct.txt"
    path.write_text(HET + "".join(rows))
    points = read_power_csv(path, recognise(path)).by_node[0]
    added = sum(watts * (end - begin) for (begin, _), (end, watts) in pairwise(points))
    assert added == pytest.approx(total)
    assert [time for time, _ in points] == sorted({time for time, _ in points})
    # Slurm gives each component a raw number of its own: only JobID tells that they are one job
    raw = [line.rstrip() + f"|{40 + number}\n" for number, line in enumerate(rows)]
    path.write_text(HET.rstrip() + "|JobIDRaw\n" + "".join(raw))
    assert read_power_csv(path, recognise(path)).by_node[0] == points


@pytest.mark.parametrize("parts", [["7+0"], ["7+1"], ["7+0", "7+2"], ["7+1", "7+2"], ["7", "7+0"]])
def test_the_energy_of_some_components_is_not_that_of_the_job(tmp_path: Path, parts: list[str]) -> None:
    text = HET + "".join(het_row(part, 0, 9, 100) for part in parts)
    said = f"has '{', '.join(parts)}', not every component of the heterogeneous job 7"
    check_refused(tmp_path / "sacct.txt", text, said)


def smi_rows(times: list[list[float]], *, columns: str = "", cells: str = "") -> str:
    """A table of nvidia-smi: one row for each time of each sweep, the devices in order."""
    rows = [f"{AT + time:.3f}{cells.format(device)}, {100 + 200 * device} W\n"
            for sweep in times for device, time in enumerate(sweep)]  # fmt: skip
    return f"timestamp{columns}, power.draw [W]\n" + "".join(rows)


def sweeps_of(draw: random.Random, devices: int, *, equal: bool = False) -> list[list[float]]:
    """Sweeps over devices with jitter; now and then one that lacks a row, or takes long."""
    period, count = draw.choice([0.5, 1.0, 5.0]), draw.choice([5, 7, 40, 300])
    within = 0.0 if equal else draw.uniform(0.002, 0.006)
    found, now = [], 0.0
    for number in range(count):
        times = [now + within * device * draw.uniform(0.9, 1.0) for device in range(devices)]
        if count > 39 and number % 40 == 20:
            times = times[1:] if draw.random() < 0.5 else [*times[:-1], times[-1] + 0.3 * period]
        found.append(times)
        now += period * draw.uniform(0.9, 1.1)
    found[0] = found[0][draw.randrange(devices) :]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_devices_that_no_column_tells_apart_are_refused(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    devices, equal = draw.choice([2, 2, 3, 4, 8, 16]), seed % 4 == 0
    sweeps = sweeps_of(draw, devices, equal=equal)
    if seed % 3 == 1 and len(sweeps) >= 40:  # at first there was one device
        sweeps = [[-1000.0 + second] for second in range(500)] + sweeps
    path, said = tmp_path / "smi.csv", rf"smi\.csv: several devices \({devices} rows every [\d.]+ s\) and "
    named = {"columns": ", name", "cells": ", A100"}
    for parts in ({}, named):
        path.write_text(smi_rows(sweeps, **parts))
        with pytest.raises(InputError, match=said + "no column tells them apart: query index too$"):
            read_power_csv(path, recognise(path))
    (tmp_path / "map.yaml").write_text("device: name\n")
    with pytest.raises(InputError, match=said + "column 'name' does not tell them apart: query index too$"):
        read_meter(path, tmp_path / "map.yaml")
    # With a column that does, the powers of the devices are added
    path.write_text(smi_rows(sweeps, columns=", index", cells=", {}"))
    watts = {each for _, each in read_power_csv(path, recognise(path)).by_node[0]}
    assert sum(100 + 200 * device for device in range(devices)) in watts


def test_the_devices_of_two_nodes_are_not_taken_for_those_of_one(tmp_path: Path) -> None:
    path, columns = tmp_path / "smi.csv", tmp_path / "map.yaml"
    rows = [
        f"{AT + second + 0.002 * row:.3f}, {row % 2}, GPU-{row}, 100 W\n" for second in range(9) for row in range(4)
    ]
    path.write_text("timestamp, index, uuid, power.draw [W]\n" + "".join(rows))
    with pytest.raises(InputError, match=r"\(2 rows every 1 s\) and column 'index' does not .* apart: query uuid too"):
        read_power_csv(path, recognise(path))
    columns.write_text("device: uuid\n")
    meter = read_meter(path, columns).args[0]
    assert [watts for _, watts in meter.by_node[0]] == [400.0] * 9


def test_one_device_that_is_read_in_sessions_of_alike_length_needs_its_unique_name(tmp_path: Path) -> None:
    path, times = tmp_path / "smi.csv", [60.0 * session + second for session in range(9) for second in range(10)]
    path.write_text(smi_rows([[time] for time in times], columns=", index", cells=", 0"))
    with pytest.raises(InputError, match="query uuid too, and state it as `device`"):
        read_power_csv(path, recognise(path))
    path.write_text(smi_rows([[time] for time in times], columns=", uuid", cells=", GPU-0"))
    assert len(read_power_csv(path, recognise(path)).by_node[0]) == 90


@pytest.mark.parametrize("later", [0.0, 0.003])
def test_two_rows_of_a_device_at_one_time_are_refused_without_naming_that_column_again(
    tmp_path: Path, later: float
) -> None:
    path, columns = tmp_path / "smi.csv", tmp_path / "map.yaml"
    columns.write_text("device: name\n")
    path.write_text(smi_rows([[0.0, 0.0], [1.0, 1.0 + later]], columns=", name", cells=", A100"))
    with pytest.raises(InputError, match="state as `device` a column that differs between all devices$") as refused:
        read_meter(path, columns)
    assert "\n" not in str(refused.value)


def test_a_few_bursts_in_the_time_of_a_run_are_refused(tmp_path: Path) -> None:
    path, sweeps = tmp_path / "smi.csv", [[30.0 * number] for number in range(-100, 0)]
    path.write_text(smi_rows([*sweeps, *([30.0 * number, 30.0 * number + 0.003] for number in range(5))]))
    meter = read_power_csv(path, recognise(path))
    assert len(meter.during(AT - 600, AT - 300)[0]) == 13  # with one before and one after
    with pytest.raises(InputError, match="several devices \\(2 rows every 30 s\\)"):
        meter.during(AT, AT + 100)


def irregular_times(draw: random.Random, kind: int) -> list[float]:
    """Times of one meter: what delays, loses or rounds its readings."""
    count = draw.choice([6, 12, 60, 1000])
    steps = {
        0: lambda: 0.1 * draw.uniform(0.5, 1.5),
        1: lambda: draw.uniform(0.1, 1.0),  # a loop that sleeps for a random time, as docs/energy.md has it
        2: lambda: 0.1 * draw.choice([1, 1, 1, 2, 3]),  # rows are missing
        3: lambda: draw.expovariate(2.0) + 0.001,
        4: lambda: 0.1 if draw.random() < 0.95 else draw.uniform(1.0, 60.0),  # it stops now and then
        5: lambda: draw.choice([0.003, 0.5]),  # bursts of any length
    }[kind % 6]
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += steps()
    if kind % 2:  # two bursts by chance, and as many sessions
        times += [now + 60.0, now + 60.003, now + 61.0, now + 61.003]
    return times


@pytest.mark.parametrize("seed", range(120))
def test_a_meter_that_is_irregular_is_read(tmp_path: Path, seed: int) -> None:
    path, times = tmp_path / "smi.csv", irregular_times(random.Random(seed), seed)
    path.write_text(smi_rows([[time] for time in times]))
    assert len(read_power_csv(path, recognise(path)).by_node[0]) == len(times)


@pytest.mark.parametrize("period", [0.15, 0.3, 0.7, 1.25, 1.5, 2.5])
def test_a_meter_whose_times_are_rounded_is_read(tmp_path: Path, period: float) -> None:
    """A rounded time makes some gaps twice as long as others, again and again."""
    unit = 0.1 if period < 1 else 1.0
    path, times = tmp_path / "smi.csv", [unit * (number * period // unit) for number in range(200)]
    path.write_text(smi_rows([[time] for time in times]))
    assert len(read_power_csv(path, recognise(path)).by_node[0]) == 200


def test_a_counter_that_began_again_at_0_is_read_if_its_range_is_known(tmp_path: Path) -> None:
    """RAPL counts to max_energy_range_uj, which takes a minute at 4 kW."""
    path, columns, most = tmp_path / "rapl.csv", tmp_path / "rapl.yaml", 262_143_328_850
    rows = [(second, (most - 250_000_000 + 100_000_000 * second) % most) for second in range(6)]
    path.write_text("time,uj\n" + "".join(f"{1795406400 + second},{value}\n" for second, value in rows))
    known = "time: time\ntime_form: s\nenergy: uj\nunit: uJ\nscope: package\ncurrent: DC\n"
    columns.write_text(known)
    with pytest.raises(InputError, match=r"rapl.csv:5: uj is below .* state `wraps_at` .*max_energy_range_uj"):
        read_power_csv(path, read_power_columns(columns))
    columns.write_text(f"{known}wraps_at: {most}\n")
    readings = read_power_csv(path, read_power_columns(columns)).by_node[0]
    assert [round(watts, 3) for _, watts in readings] == [100.0] * 5
    columns.write_text(f"{known}wraps_at: 1000\n")
    with pytest.raises(InputError, match="was above wraps_at"):
        read_power_csv(path, read_power_columns(columns))
