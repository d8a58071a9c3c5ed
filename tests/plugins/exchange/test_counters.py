"""Counters of four tools: FLOPs and bytes as their formulas have them, units honoured, what is missing named."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlhpc.plugins.exchange.counters import counters, read
from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError

NCU_LONG = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","","gpu__time_duration.sum","usecond","2.50"
"0","1","gemm","","sm__sass_thread_inst_executed_op_ffma_pred_on.sum","inst","1,000"
"0","1","gemm","","sm__sass_thread_inst_executed_op_fadd_pred_on.sum","inst","10"
"0","1","gemm","","sm__ops_path_tensor_src_bf16_dst_fp32.sum","","5,000"
"0","1","gemm","","sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum","","5,000"
"0","1","gemm","","dram__bytes.sum","Kbyte","1.5"
"1","1","gemm","","gpu__time_duration.sum","nsecond","500"
"1","1","gemm","","sm__sass_thread_inst_executed_op_ffma_pred_on.sum","inst","1"
"1","1","gemm","","sm__sass_thread_inst_executed_op_fadd_pred_on.sum","inst","0"
"1","1","gemm","","sm__ops_path_tensor_src_bf16_dst_fp32.sum","","0"
"1","1","gemm","","dram__bytes.sum","byte","500"
"""
NCU_RAW = """\
"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","lts__t_bytes.sum",\
"sm__sass_thread_inst_executed_op_dmul_pred_on.sum"
"","","Mbyte","us","Mbyte","inst"
"0","copy","2","10","3","7"
"1","add","1","20","1","0"
"""
ROCPROF = """\
Index,KernelName,BeginNs,EndNs,SQ_INSTS_VALU_FMA_F32,SQ_INSTS_VALU_MFMA_MOPS_F32,TCC_EA_RDREQ_sum,TCC_EA_RDREQ_32B_sum,\
TCC_EA_WRREQ_sum,TCC_EA_WRREQ_64B_sum
0,k.kd,100,1100,10,2,5,1,4,3
"""
LIKWID = """STRUCT,Info,3
CPU name:,AMD
TABLE,Region step,Group 1 Raw,MEM_SP,2
Event,Counter,HWThread 0,HWThread 1
X,PMC0,1,2
TABLE,Region step,Group 1 Metric,MEM_SP,4
Metric,HWThread 0,HWThread 1
Runtime (RDTSC) [s],2.0,1.0
SP [MFLOP/s],100,200
Memory data volume [GBytes],3.5,0
TABLE,Region step,Group 1 Metric STAT,MEM_SP,4
Metric,Sum,Min,Max,Avg
Memory data volume [GBytes] STAT,9,9,9,9
"""
PERF = """# started on Friday
2000000000,ns,duration_time,2000000000,100.00,,
100,,fp_arith_inst_retired.512b_packed_single,1,100.00,,
7,,fp_arith_inst_retired.scalar_double:u,1,100.00,,
S0,1,3.00,MiB,uncore_imc_0/cas_count_read/,1,100.00,,
S0,1,1.00,MiB,uncore_imc_0/cas_count_write/,1,100.00,,
"""


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "counted.csv"
    path.write_text(text)
    return path


def test_ncu_one_metric_a_line(tmp_path: Path) -> None:
    (kernel,) = read("ncu", saved(tmp_path, NCU_LONG))
    assert (kernel.name, kernel.count) == ("gemm", 2)
    assert kernel.seconds == pytest.approx(3.0e-6)
    assert kernel.flops == 2 * 1001 + 10 + 5000, "the tensor path once, not per kind of sparsity"
    assert kernel.bytes == {"dram": 2000.0}


LONG_NAMES = sorted(set(re.findall(r"\w+__\w+\.sum", NCU_LONG)))
PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
UNITS = {f"{p}{unit}": factor for p, factor in PREFIXES.items() for unit in ("byte", "B")} | {"byte": 1, "B": 1, "": 1}


def add_up(path: Path) -> tuple[float, float, float]:
    (kernel,) = read("ncu", path)
    return kernel.seconds, kernel.flops, kernel.bytes["dram"]


@pytest.mark.parametrize("name", LONG_NAMES)
@pytest.mark.parametrize(("old", "new"), [("sm__", "smsp__"), ("sm__", "tpc__"), ("_op_", "_op_x"), ("__", "__new_")])
def test_a_counter_of_another_name_is_read_or_named_and_never_zero(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    path, renamed = saved(tmp_path, NCU_LONG), name.replace(old, new)
    whole = add_up(path)
    path.write_text(NCU_LONG.replace(name, renamed))
    if renamed == name or new == "smsp__":
        assert add_up(path) == whole
    else:
        with pytest.raises(InputError, match=f"{re.escape(renamed)} counts|no (counter of bytes|metric gpu__time)"):
            read("ncu", path)


@pytest.mark.parametrize("unit", [*UNITS, "parsec", "fortnight", "KBit", "Mo", "byte/second", "inst", "second"])
def test_a_unit_is_known_for_what_is_counted_or_refused(tmp_path: Path, unit: str) -> None:
    text = NCU_LONG.replace('"byte","500"', f'"{unit}","500"')
    if unit in UNITS:
        assert add_up(saved(tmp_path, text))[2] == pytest.approx(1500 + 500 * UNITS[unit])
    else:
        with pytest.raises(InputError, match=rf"dram__bytes.sum has the unit '{unit}'; expected one of bytes"):
            read("ncu", saved(tmp_path, text))
    for other in ("seconds", "counts"):
        was = '"usecond","2.50"' if other == "seconds" else '"inst","1,000"'
        text = NCU_LONG.replace(was, f'"{unit}",{was.partition(",")[2]}')
        if unit not in {"second", "inst", "", "Mo"} and not (other == "counts" and unit in UNITS):
            with pytest.raises(InputError, match=f"expected one of {other}"):
                read("ncu", saved(tmp_path, text))


@pytest.mark.parametrize(
    "value", ["1.310.720", "5,24", "1.234,56", "1,23,456", "1 310", "n/a", "", "0x10", "nan", "inf"]
)
def test_digits_of_another_country_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match=r"expected a number, as 1,234\.5"):
        read("ncu", saved(tmp_path, NCU_LONG.replace("1,000", value)))


def test_messages_of_ncu_and_lines_of_the_program_stand_before_the_table_and_in_it(tmp_path: Path) -> None:
    first, *rest = NCU_LONG.splitlines()
    program = [
        "epoch 1: loss 0.5",
        '==PROF== Profiling "k<float, 4>" - 0: 0%....100% - 10 passes',
        "",
        '"quoted", said it',
    ]
    lines = [*program, first, *rest[:3], "==WARNING== no more passes", "", *rest[3:], "==PROF== Disconnected"]
    assert add_up(saved(tmp_path, "\n".join(lines))) == add_up(saved(tmp_path, NCU_LONG))


def test_a_metric_that_is_not_used_may_hold_anything(tmp_path: Path) -> None:
    head, units, *rows = NCU_RAW.splitlines()
    lines = [f'{head},"launch__func_cache_config"', f'{units},"furlong"', *(f'{row},"CachePreferNone"' for row in rows)]
    path = saved(tmp_path, "\n".join(lines))
    assert [kernel.name for kernel in read("ncu", path)] == ["add", "copy"]


def test_ncu_raw_page_longest_first(tmp_path: Path) -> None:
    first, second = read("ncu", saved(tmp_path, NCU_RAW))
    assert (first.name, first.seconds) == ("add", pytest.approx(20e-6))
    assert (second.flops, second.bytes) == (7.0, {"L2": 3e6, "dram": 2e6})


@pytest.mark.parametrize("name", ["Host Name", "Process ID", "Device", "Process_Id", "Agent_Id", "GPU_ID"])
def test_launches_of_two_ranks_are_not_those_of_one(tmp_path: Path, name: str) -> None:
    tool, text = ("rocprof", ROCPROF + ROCPROF.splitlines()[1]) if "_" in name else ("ncu", NCU_RAW)
    head, *rows = text.splitlines()
    ncu = tool == "ncu"  # a row of units follows the head
    same = [f"{head},{name}", *(f"{row},{'' if ncu and not at else 4}" for at, row in enumerate(rows))]
    assert read(tool, saved(tmp_path, "\n".join(same))) == read(tool, saved(tmp_path, text))
    with pytest.raises(InputError, match=f"has launches of {name} 4 and 5; expected those of one rank"):
        read(tool, saved(tmp_path, "\n".join([*same[:-1], same[-1][:-1] + "5"])))


def test_a_launch_that_stands_twice_is_named_and_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="launch 1 of add has a row twice; expected one file of ncu"):
        read("ncu", saved(tmp_path, NCU_RAW + NCU_RAW.splitlines()[-1]))
    again = NCU_LONG.splitlines()[-1]
    assert read("ncu", saved(tmp_path, NCU_LONG + again)) == read("ncu", saved(tmp_path, NCU_LONG))  # another section
    with pytest.raises(InputError, match=r"launch 1 of gemm has dram__bytes\.sum twice"):
        read("ncu", saved(tmp_path, NCU_LONG + again.replace("500", "600")))


def test_rocprof(tmp_path: Path) -> None:
    (kernel,) = read("rocprof", saved(tmp_path, ROCPROF))
    assert kernel.seconds == pytest.approx(1e-6)
    assert kernel.flops == 64 * 2 * 10 + 512 * 2
    assert kernel.bytes == {"dram": 4 * 64 + 1 * 32 + 3 * 64 + 1 * 32}


@pytest.mark.parametrize("seed", range(4))
def test_rocprof_one_counter_a_line_is_the_same_as_one_launch_a_line(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    names = ["SQ_INSTS_VALU_FMA_F32", "SQ_INSTS_VALU_ADD_F16", "TCC_EA0_RDREQ_sum", "TCC_EA0_WRREQ_sum"]
    wide = [["Process_Id", "Dispatch_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp", *names]]
    for dispatch in range(1, 7):
        start, values = draw.randint(1, 999), [draw.randint(1, 9999) for _ in names]
        fixed = [7, dispatch, f"void k{draw.randint(0, 1)}<float, 2>()", start, start + draw.randint(1, 99)]
        wide.append([*map(str, (*fixed, *values))])
    long = [[*row[:5], name, f"{row[at]}.000000"] for row in wide[1:] for at, name in enumerate(names, 5)]
    draw.shuffle(long)

    def read_rows(rows: list[list[str]]) -> dict[str, list[float]]:
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
        found = read("rocprof", saved(tmp_path, text.getvalue()))
        return {each.name: [each.count, each.seconds, each.flops, each.bytes["dram"]] for each in found}

    head = [*wide[0][:5], "Counter_Name", "Counter_Value"]
    joined, expected = read_rows([head, *long]), read_rows(wide)
    assert joined.keys() == expected.keys()
    for name, kernel in expected.items():
        assert joined[name] == pytest.approx(kernel)
    with pytest.raises(InputError, match="has two values; expected the counter_collection.csv of one pass"):
        read_rows([head, *long, long[0]])


def test_likwid_sums_threads_and_leaves_statistics_alone(tmp_path: Path) -> None:
    (kernel,) = read("likwid", saved(tmp_path, LIKWID))
    assert (kernel.name, kernel.seconds) == ("step", 2.0)
    assert kernel.flops == pytest.approx(1e6 * (100 * 2 + 200 * 1))
    assert kernel.bytes == {"dram": 3.5e9}


def test_likwids_metrics_without_a_value_that_nobody_asks_for_do_no_harm(tmp_path: Path) -> None:
    text = LIKWID.replace("SP [MFLOP/s]", "CPI,nan,-\nSP [MFLOP/s]")
    assert read("likwid", saved(tmp_path, text)) == read("likwid", saved(tmp_path, LIKWID))


def test_perf(tmp_path: Path) -> None:
    (kernel,) = read("perf", saved(tmp_path, PERF))
    assert (kernel.seconds, kernel.flops) == (2.0, 16 * 100 + 7)
    assert kernel.bytes == {"dram": 4 * 2**20}


def test_perfs_json_is_what_its_csv_is(tmp_path: Path) -> None:
    rows = [line.split(",") for line in PERF.splitlines() if line and not line.startswith("#")]
    at = [next(i for i, cell in enumerate(row) if "_" in cell) for row in rows]
    records = [
        {"counter-value": row[i - 2], "unit": row[i - 1], "event": row[i]} for row, i in zip(rows, at, strict=True)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    assert read("perf", saved(tmp_path, text)) == read("perf", saved(tmp_path, PERF))


PERF_FOR_PEOPLE = """# started on Friday

 Performance counter stats for 'python flops.py' (5 runs):

     2,000,000,000 ns   duration_time                                            ( +-  0.50% )
               100      fp_arith_inst_retired.512b_packed_single   #    1.2 G/sec  (25.01%)
                 7      fp_arith_inst_retired.scalar_double:u
              3.00 MiB  uncore_imc_0/cas_count_read/
              1.00 MiB  uncore_imc_0/cas_count_write/

       2.000000000 seconds time elapsed                                          ( +-  0.10% )
"""


def test_perfs_other_forms_are_what_its_csv_is(tmp_path: Path) -> None:
    expected = read("perf", saved(tmp_path, PERF))
    repeated = re.sub("(?m)(duration_time|single|double:u|read/|write/),", r"\1,0.50%,", PERF)  # -r
    for text in (PERF.replace(",", ";"), PERF.replace(",", "|"), repeated, PERF_FOR_PEOPLE):
        assert read("perf", saved(tmp_path, text)) == expected
    for old, new in (("3.00 MiB", "3,00 MiB"), ("2,000,000,000", "2.000.000.000"), (" 100 ", " <not counted> ")):
        with pytest.raises(InputError, match="LC_ALL=C|perf did not measure"):
            read("perf", saved(tmp_path, PERF_FOR_PEOPLE.replace(old, new)))


@pytest.mark.parametrize(
    ("tool", "text", "words"),
    [
        ("ncu", "nonsense\n", "Kernel Name"),
        ("ncu", NCU_LONG.replace("dram__bytes", "other"), "no counter of bytes"),
        ("ncu", NCU_RAW.replace("sm__sass", "sm__else"), "sm__else_thread_inst_executed_op_dmul_pred_on.sum counts"),
        ("ncu", NCU_RAW.replace("op_dmul", "op_bit"), "no counter of FLOPs"),
        (
            "ncu",
            NCU_LONG.rpartition('"1","1","gemm","","dram')[0],
            "launch 1 has no dram__bytes.sum, which others have",
        ),
        ("ncu", NCU_LONG.replace('","gemm","","dram__bytes.sum","byte","500"', ""), "is no row of the table"),
        ("rocprof", ROCPROF.replace("MOPS_F32", "MOPS_F8"), "SQ_INSTS_VALU_MFMA_MOPS_F8 counts operations in a way"),
        ("rocprof", ROCPROF.replace("1100,10,", "1100,n/a,"), "SQ_INSTS_VALU_FMA_F32 of k.kd is 'n/a'"),
        ("perf", PERF.replace("512b_packed_single", "8_flops"), "fp_arith_inst_retired.8_flops counts operations"),
        (
            "perf",
            PERF.replace("3.00,MiB", "3.00,parsec"),
            "cas_count_read/ has the unit 'parsec'; expected one of bytes",
        ),
        ("ncu", NCU_LONG.replace('"2.50"', '"n/a"'), "a value is 'n/a'; expected a number"),
        ("rocprof", ROCPROF.replace("BeginNs", "Begin"), "no duration"),
        ("rocprof", "a,b\n1,2\n", "KernelName"),
        ("rocprof", "", "no kernel found"),
        ("likwid", LIKWID.replace("SP [MFLOP/s]", "X"), "region step: needs"),
        ("likwid", LIKWID.replace("100,200", "-,200"), "a value is '-'; expected a number"),
        ("likwid", LIKWID.replace("100,200", "nan,200"), "a value is 'nan'; expected a number"),
        ("perf", PERF.replace("duration_time", "cycles"), "collect with perf stat -e: duration_time"),
        ("perf", PERF.replace("100,,fp", "<not counted>,,fp"), "perf did not measure this event"),
        ("perf", PERF.replace("3.00,MiB", "3,00,MiB"), "3 stands before its count"),
        ("perf", re.sub("(?m)^(?=.)", "1.000,", PERF), "1.000 stands before its count"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, tool: str, text: str, words: str) -> None:
    with pytest.raises(InputError, match="counted.csv") as caught:
        read(tool, saved(tmp_path, text))
    assert words in str(caught.value)


def test_the_command_writes_what_the_report_reads(tmp_path: Path) -> None:
    from mlhpc.analysis.sources.readers import Counters

    output = tmp_path / "counters.json"
    words = ["--system", "here", "--workload", "cosmoflow", "--size", "mini", "--steps", "2", "-o", str(output)]
    done = CliRunner().invoke(counters, ["ncu", str(saved(tmp_path, NCU_RAW)), *words])
    assert done.exit_code == 0, done.output
    read_back = convert(json.loads(output.read_text()), Counters)
    assert [kernel.name for kernel in read_back.kernels] == ["add", "copy"]
    again = CliRunner().invoke(counters, ["ncu", str(tmp_path / "counted.csv"), *words])
    assert "is not overwritten" in str(again.exception)
