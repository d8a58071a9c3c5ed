"""`mlhpc submit` with an sbatch of ours on PATH: folders, texts, sweeps, costs, refusals; and that it stays light."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlhpc.suite.card import ReferencePoint, ReferencePoints
from mlhpc.suite.commands.submit import parse_nodes, submit, wait_for_jobs
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.errors import InputError
from mlhpc.suite.launch import estimates, queue
from mlhpc.suite.launch.schedulers import slurm
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.timeline import Epoch
from tests.fixtures import cli

ROOT = Path(__file__).resolve().parents[3]
CARD = load_descriptor("cosmoflow").card().size("mini")


def mlhpc(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{tmp_path / 'tools'}:/usr/bin:/bin", "HOME": str(tmp_path)} | variables
    return cli.mlhpc("submit", "cosmoflow", *arguments, cwd=tmp_path, environment=environment)


def fake_sbatch(tmp_path: Path, body: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(f"#!/bin/bash\n{body}\n")
    (tools / "sbatch").chmod(0o755)


MINI = ("--system", "slurm-two-node", "--size", "mini")


def test_a_preflight_without_its_wing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlhpc.suite.commands.submit.list_missing_wings", lambda: ["fleet"])
    done = mlhpc(tmp_path, *MINI, "--nodes", "2", "--preflight", "--dry-run")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--preflight: the wing 'fleet' is not installed here" in done.stderr
    assert mlhpc(tmp_path, *MINI, "--nodes", "2", "--dry-run").returncode == 0


def test_a_submitted_run_has_its_folder_script_and_job_id(tmp_path: Path) -> None:
    fake_sbatch(tmp_path, 'env > "$HOME/environment"; echo "4711;cluster"')
    done = mlhpc(
        tmp_path, *MINI, "--nodes", "2", "--runs", "5", "--seed", "7", "--set", "max_epochs=9", "-o", "r",
        SBATCH_PARTITION="wrong", SLURM_JOB_ID="1", SLURM_CONF="/c", SLURM_JWT="j", MLHPC_RUNS="99", MLHPC_DATA="/d",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "r"
    assert done.stdout == (f"job 4711: cosmoflow mini, 2 nodes x 1 rank, 5 runs: {run}\nstate: mlhpc status r\n")
    job = json.loads((run / "job.json").read_text())
    assert (job["version"], job["job_ids"]) == (1, ["4711"])
    info = json.loads((run / "run.json").read_text())
    assert (info["mode"], info["runs"], info["ranks"], info["same_allocation"]) == ("strong", 5, 2, True)
    assert "max_epochs: 9" in (run / "config.yaml").read_text()
    script = (run / "job.sbatch").read_text()
    for line in (
        f': "${{MLHPC_PYTHON:={sys.executable}}}"',
        f'[[ -n $MLHPC_SIZE$MLHPC_CONFIG ]] || : "${{MLHPC_CONFIG:={run}/config.yaml}}"',
        f': "${{MLHPC_RUN:={run}}}" # the run folder',
        ': "${MLHPC_SEED=7}" # trial i gets seed + i; empty: drawn and logged',
        f"#SBATCH --output={run}/output/job_%j.log",
    ):
        assert line in script.splitlines()
    assert (run / "output").is_dir()
    environment = (tmp_path / "environment").read_text().splitlines()
    assert "SLURM_CONF=/c" in environment
    assert "SLURM_JWT=j" in environment  # a login that squeue and sbatch need
    assert "MLHPC_DATA=/d" in environment
    assert not [line for line in environment if line.startswith(("SBATCH_", "SLURM_JOB", "MLHPC_RUNS"))]


def test_a_list_of_node_counts_is_one_job_and_folder_each(tmp_path: Path) -> None:
    fake_sbatch(tmp_path, "echo $$")
    done = mlhpc(tmp_path, *MINI, "--nodes", "1,2,4", "--runs", "3", "-o", "sweep")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["nodes-1", "nodes-2", "nodes-4"]
    assert "#SBATCH --nodes=4\n" in (tmp_path / "sweep" / "nodes-4" / "job.sbatch").read_text()


def test_an_array_is_not_one_allocation_and_instances_are_the_weak_mode(tmp_path: Path) -> None:
    fake_sbatch(tmp_path, "echo 1")
    mlhpc(tmp_path, *MINI, "--nodes", "1", "--runs", "3", "--array", "-o", "a")
    assert json.loads((tmp_path / "a" / "run.json").read_text())["same_allocation"] is False
    mlhpc(tmp_path, *MINI, "--nodes", "1", "--instances", "2", "-o", "w")
    info = json.loads((tmp_path / "w" / "run.json").read_text())
    assert (info["mode"], info["runs"], info["ranks"]) == ("weak", 2, 1)


def test_a_dry_run_prints_what_would_be_submitted_and_its_cost_and_leaves_nothing(tmp_path: Path) -> None:
    fake_sbatch(tmp_path, "echo called >&2; echo 1")
    words = (*MINI, "--nodes", "2", "--runs", "5", "--set", "max_epochs=3", "-o", "r")
    dry = mlhpc(tmp_path, *words, "--dry-run")
    assert not (tmp_path / "r").exists()
    mlhpc(tmp_path, *words)
    there = (tmp_path / "r" / "job.sbatch").read_text().splitlines()
    different = [(a, b) for a, b in zip(dry.stdout.splitlines(), there, strict=True) if a != b]
    assert [a for a, _ in different] == [
        "#SBATCH --output=%x-%j.out",
        '[[ -n $MLHPC_SIZE$MLHPC_CONFIG ]] || : "${MLHPC_SIZE:=mini}"',
        ': "${MLHPC_SET=max_epochs=3}" # more settings, key=value separated by spaces',
    ]
    assert "called" not in dry.stderr
    for word in ("epochs per run", "time", "data set", "files written"):
        assert f"\n  {word}" in dry.stderr


def test_the_script_of_a_dry_run_needs_no_folder_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((load_descriptors()["cosmoflow"].folder / "config" / "mini.yaml").read_text())
    dry = mlhpc(tmp_path, "--system", "slurm-two-node", "--config", "mine.yaml", "--nodes", "2", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f'"${{MLHPC_CONFIG:={tmp_path}/mine.yaml}}"' in dry.stdout
    assert ': "${MLHPC_RUN:=runs/cosmoflow-mini-$job}"' in dry.stdout
    assert str(tmp_path / "runs") not in dry.stdout
    spaced = mlhpc(tmp_path, *MINI, "--nodes", "2", "--set", "submission.platform=A B", "--dry-run")
    assert (spaced.returncode, spaced.stdout) == (2, "")
    assert "takes settings without spaces" in spaced.stderr.splitlines()[-1]


def test_a_dry_run_prints_the_script_of_every_full_size_as_the_documentation_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "slurm.md").read_text()
    rows = {
        name: (nodes, runs) for name, nodes, runs in re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    }
    required = {name: chosen.card().size("full").required_runs for name, chosen in load_descriptors().items()}
    assert {name: int(runs) for name, (_, runs) in rows.items()} == required
    for name, (nodes, runs) in rows.items():
        words = [name, "--system", str(ROOT / "submissions" / "systems" / "gpu-pyxis.yaml"), "--size", "full"]
        words += ["--nodes", nodes, "--runs", runs, "-o", str(tmp_path / name), "--dry-run"]
        done = CliRunner().invoke(submit, words, catch_exceptions=False)
        script = done.stdout
        assert script.startswith(f"#!/bin/bash\n# {name} full on gpu-pyxis: {runs} scored runs, one after another,")
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert f': "${{MLHPC_RUNS:={runs}}}"\n' in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MINI, "--nodes", "2x"), "--nodes '2x': expected positive numbers separated by commas, for example 1,2,4"),
        ((*MINI, "--nodes", "2,2"), "--nodes '2,2': each node count can be given once"),
        ((*MINI, "--nodes", "3", "--set", "global_batch_size=32"),
         "--nodes 3 x 1 ranks per node: global_batch_size 32 cannot be split evenly over 3 ranks; nearest batch that can: "),
        *(
            ((*MINI, "--nodes", "1", "--time-limit", text), f"time limit '{text}': expected more than nothing")
            for text in ("0", "0:00", "0-0", "99999999999", "9999-0")
        ),
        ((*MINI, "--nodes", "1", "--time-limit", "1"), "time limit '1': ranks are to save and stop 60 s before it"),
        ((*MINI, "--nodes", "1", "--time-limit", "soon"), "time limit 'soon': expected minutes, h:mm:ss or d-hh:mm:ss"),
        ((*MINI, "--nodes", "1", "--instances", "2", "--runs", "2"), "--instances cannot be combined with --runs"),
        (("--system", "nope", "--size", "mini", "--nodes", "1"), "unknown system 'nope'; systems: "),
        (("--system", "slurm-two-node", "--size", "huge", "--nodes", "1"), "cosmoflow: unknown size 'huge'; sizes: "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_no_folder(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = mlhpc(tmp_path, *arguments, "-o", "r")
    assert done.returncode == 2
    assert done.stderr.startswith(f"mlhpc: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_an_existing_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "result_0.txt").write_text("earlier")
    done = mlhpc(tmp_path, *MINI, "--nodes", "1", "-o", "r")
    assert done.returncode == 2
    assert "r: exists already; choose another folder with -o" in done.stderr
    assert (tmp_path / "r" / "result_0.txt").read_text() == "earlier"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "no sbatch on PATH: submit on a login node, or see the script with --dry-run"),
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
         "sbatch refused job.sbatch: Batch job submission failed: Invalid account"),
        ("echo hello", "sbatch answered 'hello': expected a job id; squeue --me shows whether the job is queued"),
    ],
)  # fmt: skip
def test_a_refused_job_leaves_no_folder(tmp_path: Path, body: str | None, message: str) -> None:
    if body is not None:
        fake_sbatch(tmp_path, body)
    elif Path("/usr/bin/sbatch").exists():
        (tmp_path / "tools").mkdir()
        done = mlhpc(tmp_path, *MINI, "--nodes", "1", "-o", "r", PATH=str(tmp_path / "tools"))
        assert done.stderr.splitlines()[-1] == f"mlhpc: {message}"
        return
    done = mlhpc(tmp_path, *MINI, "--nodes", "1", "-o", "r")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"mlhpc: {message}"
    assert not (tmp_path / "r").exists()


LIGHT = """
import sys, time
from mlhpc.suite.cli.main import main
sys.argv = ["mlhpc", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "mpi4py", "pandas", "numpy", "h5py"} & set(sys.modules)
    print("HEAVY", sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "cosmoflow", *MINI, "--nodes", "2", "--dry-run"),
        ("workload", "list"),
        ("status", "."),
        ("submit", "--help"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_planning_commands_import_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == "HEAVY []"


def test_node_counts_keep_their_order() -> None:
    assert parse_nodes("4,1,2") == (4, 1, 2)


def points(*batches: tuple[int, tuple[float, ...]]) -> ReferencePoints:
    return ReferencePoints(
        version=1,
        workload="cosmoflow",
        size="mini",
        points=tuple(
            ReferencePoint(
                global_batch_size=batch,
                epochs=epochs,
                seeds=(),
                hyperparameters={},
                recorded="",
                suite_version="",
                system="",
            )
            for batch, epochs in batches
        ),
    )


def test_expected_epochs_come_from_the_nearest_reference_point() -> None:
    known = points((32, (10.0, 12.0)), (512, (20.0,)))
    assert estimates.estimate_epochs(known, 64, 40).count == 11.0
    assert estimates.estimate_epochs(known, 400, 40).count == 20.0
    assert estimates.estimate_epochs(known, 400, 15).count == 15.0  # a run ends at max_epochs
    assert estimates.estimate_epochs(None, 64, 40) == estimates.Epochs(
        40, "max_epochs, an upper bound: no reference convergence point"
    )


def test_a_stated_rate_gives_the_time_of_the_cards_flops() -> None:
    flops = CARD.train_samples * CARD.training_flops_per_sample + CARD.eval_samples * CARD.forward_flops_per_sample
    assert estimates.compute_pace_from_rate(CARD, ranks=4, flops_per_s_per_rank=1e9).epoch_s == pytest.approx(
        flops / 4e9
    )


def test_an_earlier_run_gives_its_pace_in_proportion_to_ranks() -> None:
    epochs = (Epoch(1, 0, 10, 9, True), Epoch(2, 10, 24, 13, True), Epoch(3, 24, 25, 1, False))
    pace = estimates.compute_pace_from_record(RunRecord(ranks=2, epochs=epochs), ranks=8)
    assert pace.epoch_s == pytest.approx(12 * 2 / 8)
    with pytest.raises(InputError, match="no complete epoch to estimate from"):
        estimates.compute_pace_from_record(RunRecord(ranks=2), ranks=8)


def test_node_hours_are_nodes_times_hours_of_all_trials() -> None:
    data = estimates.DataSize(2**30, 11, "counted")
    estimate = estimates.Cost(estimates.Epochs(10, "x"), estimates.Pace(36.0, "y"), 5, 4, data, 2**32, 20)
    assert estimate.job_s == pytest.approx(1800)
    assert estimate.node_hours == pytest.approx(2.0)
    text = "\n".join(estimates.render_cost(estimate, 600))
    assert estimate.run_s == pytest.approx(360)
    assert "30 min of training, modelled (y)" in text
    assert "1 GiB on each of 4 nodes, 4 GiB in all" in text


@pytest.mark.parametrize(
    ("epoch_s", "limit_s", "trials", "array", "said"),
    [
        (36.0, 1800, 5, False, []),
        (36.0, 360, 5, True, []),
        (36.0, 1799, 5, False, ["about 4 of 5 runs of 6 min fit in the time limit of 30 min: the one that is cut would be resumed "
                                "and not scored; ask for --time-limit 38, or --array"]),
        (36.0, 300, 5, False, ["one run takes about 6 min, the time limit is 5 min: every run would be stopped and resumed, and "
                               "resumed runs are never scored; ask for --time-limit 8 or more nodes"]),
        (36.0, 300, 5, True, ["one run takes about 6 min, the time limit is 5 min: every run would be stopped and resumed, and "
                              "resumed runs are never scored; ask for --time-limit 8 or more nodes"]),
        (36.0, 3600, 1, False, ["1 run planned; a score of this size needs 5"]),
        (1e9, 300, 5, False, ["this cannot finish here: one run needs about 1.3e+03 node-years, on 4 nodes"]),
        (None, 60, 5, False, []),  # nothing is known, so nothing is said
    ],
)  # fmt: skip
def test_a_plan_that_cannot_score_is_told_before_it_costs_anything(
    epoch_s: float | None, limit_s: int, trials: int, array: bool, said: list[str]
) -> None:
    pace = None if epoch_s is None else estimates.Pace(epoch_s, "y")
    estimate = estimates.Cost(estimates.Epochs(10, "x"), pace, trials, 4, estimates.DataSize(1, 1, "z"), 0, 20)
    assert estimates.find_obstacles(estimate, limit_s, trials=trials, required=5, array=array) == said


def test_a_dry_run_says_that_a_short_time_limit_cannot_score(tmp_path: Path) -> None:
    words = ("--nodes", "1", "--runs", "5", "--time-limit", "1:01", "-o", "r", "--dry-run")
    done = mlhpc(tmp_path, *MINI, *words)
    assert "  cannot score     one run takes about " in done.stderr
    assert done.stdout.startswith("#!/bin/bash")
    assert "cannot score" not in mlhpc(tmp_path, *MINI, *words, "--time-limit", "10-0").stderr


def test_a_dry_run_of_a_sweep_shows_the_sizes_that_are_possible_and_names_the_others(tmp_path: Path) -> None:
    dry = mlhpc(tmp_path, *MINI, "--nodes", "1,3,2", "--set", "global_batch_size=32", "-o", "r", "--dry-run")
    assert dry.returncode == 1
    assert re.findall(r"^#SBATCH --nodes=(\d)$", dry.stdout, re.MULTILINE) == ["1", "2"]
    assert dry.stderr.splitlines()[-1].startswith(
        "not possible: --nodes 3 x 1 ranks per node: global_batch_size 32 cannot"
    )
    none = mlhpc(tmp_path, *MINI, "--nodes", "3,5", "--set", "global_batch_size=32", "-o", "r", "--dry-run")
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr.startswith("mlhpc: no node count of --nodes is possible: --nodes 3 x 1")
    fake_sbatch(tmp_path, "echo 1")
    real = mlhpc(tmp_path, *MINI, "--nodes", "1,3", "--set", "global_batch_size=32", "-o", "r")
    assert (real.returncode, real.stdout) == (2, "")  # a sweep is submitted whole or not at all
    assert not (tmp_path / "r").exists()


def test_job_ids_and_states_are_read_from_slurms_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert queue.parse_job_id("123\n", slurm) == "123"
    assert queue.parse_job_id("123;cluster\n", slurm) == "123"
    answers = {"squeue": "7 1 PENDING\n7 0 RUNNING\n8 N/A COMPLETING\n", "scontrol": ""}
    monkeypatch.setattr(queue, "ask", lambda *words, **_: answers[words[0]])
    found = {"7": "RUNNING", "7_0": "RUNNING", "7_1": "PENDING", "8": "COMPLETING"}
    assert queue.fetch_job_states(["7", "8", "9"], slurm) == found
    for text, state in (
        ("JobId=9 x\n   JobState=FAILED Reason=None\n", "FAILED"),
        ("JobId=9\n JobState=COMPLETED\n\nJobId=10\n JobState=RUNNING\n", "RUNNING"),
        ("JobId=9\n JobState=PREEMPTED\n\nJobId=10\n JobState=COMPLETED\n", "PREEMPTED"),  # has not ended
    ):
        answers["scontrol"] = text
        assert queue.fetch_job_states(["9"], slurm)["9"] == state


FAKE_JOB = """[[ $0 == */squeue ]] && { echo "7 N/A RUNNING"; exit; }
echo 7 "$@" >> "$HOME/calls"; echo 7
run=$(dirname "${@: -1}"); mkdir -p "$run/exit"; echo 1 > "$run/exit/7"
"""


def test_a_data_set_is_a_job_and_runs_wait_for_it(tmp_path: Path) -> None:
    fake_sbatch(tmp_path, FAKE_JOB)
    system = tmp_path / "s.yaml"
    text = (ROOT / "submissions/systems/slurm-two-node.yaml").read_text()
    system.write_text(text.replace("site:\n", "site:\n  data: $HOME/sets\n  runs: $HOME/all\n"))
    words = ["--system", str(system), "--size", "mini", "--nodes", "2"]
    environment = {"PATH": f"{tmp_path / 'tools'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = cli.mlhpc("submit", "data", "cosmoflow", *words, "--wait", cwd=tmp_path, environment=environment)
    assert done.returncode == 1, done.stderr  # the job's own code
    assert done.stdout.startswith(
        f"job 7: data set cosmoflow mini in {tmp_path}/sets/cosmoflow-mini: {tmp_path}/all/data-cosmo"
    )
    assert done.stderr == "job 7: exit 1\n"
    (folder,) = (tmp_path / "all").iterdir()
    script = (folder / "job.sbatch").read_text()
    assert ': "${MLHPC_DATA:=$HOME/sets}"; export MLHPC_DATA\n' in script
    assert '"${suite[@]}" data generate cosmoflow --size "$MLHPC_SIZE"' in script
    subprocess.run(["bash", "-n", folder / "job.sbatch"], check=True)
    done = cli.mlhpc("submit", "cosmoflow", *words, "--after", "7", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "--dependency=afterok:7" in (tmp_path / "calls").read_text().splitlines()[-1]
    for wrong, message in (
        (["submit", "data", "cosmoflow", *words, "--runs", "2"], "--runs is of runs; leave it out to make a data set"),
        (
            ["submit", "cosmoflow", "data", *words],
            "cosmoflow data: expected the name of a workload, or data and that name",
        ),
    ):
        done = cli.mlhpc(*wrong, cwd=tmp_path, environment=environment)
        assert (done.returncode, message in done.stderr) == (2, True)


def test_waiting_looks_again_for_a_job_that_is_not_listed_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["", "PENDING", "", "RUNNING", "", "", ""])
    monkeypatch.setattr(queue, "ask", lambda *words, **_: f"7 N/A {state}\n" if (state := next(states)) else "")
    monkeypatch.setattr("mlhpc.suite.launch.schedulers.slurm.fetch_states", lambda ids, ask: slurm_states(ask))
    (tmp_path / "job.json").write_text('{"version": 1, "job_ids": ["7"], "submitted": "x"}')
    assert wait_for_jobs([tmp_path], lambda seconds: None) == 1
    assert list(states) == []


def slurm_states(ask: Callable[..., str]) -> list[tuple[str, str | None, str]]:
    return [("7", None, line.split()[2]) for line in ask("squeue").splitlines()]
