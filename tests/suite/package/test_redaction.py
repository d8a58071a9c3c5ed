"""What must not leave a site: secrets never do, hosts, paths and accounts only if they may; logs stay as they are."""

import json
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.package_files import check_manifest
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.machine.facts import Sample, render_samples
from mlhpc.suite.machine.secrets import is_secret_name
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import edit, our_run, write
from tests.fixtures.runs import node, run_folder, state_job

SCRIPT = """#!/bin/bash
#SBATCH --account=ab1234
#SBATCH -A ab1234
seed=$(od -An -N2 -tu2 /dev/urandom)
#SBATCH --output=/home/ada/runs/a/output/job_%j.log
export HF_TOKEN="abcdefgh1234"
export WANDB_API_KEY='00112233'
export NCCL_DEBUG="WARN"
export AWS_SECRET_ACCESS_KEY=hunter2
srun --export=ALL,REGISTRY_PASSWORD=hunter2 /project/ab1234/mlhpc/bin/python -m mlhpc run cosmoflow
curl https://ada:geheim@example.org/x
"""


def test_names_of_secrets() -> None:
    assert [name for name in ("SSH_KEY", "apikey", "a.token", "MONKEY", "TOKENS", "key") if is_secret_name(name)] == [
        "SSH_KEY",
        "apikey",
        "a.token",
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "runs" / "a")
    (folder / "job.sbatch").write_text(SCRIPT)
    state_job(folder)
    facts = node("gpu17", hostname="gpu17.cluster.example.org", slurm={"SLURM_JOB_NODELIST": "gpu[17-18]"})
    (folder / "facts" / "node1.json").unlink()
    (folder / "facts" / "gpu17.json").write_text(json.dumps(convert_to_plain_data(facts), indent=1))
    info = json.loads((folder / "run.json").read_text())
    info["command"] = ["/home/ada/bin/mlhpc", *info["command"][1:], "-o", "/home/ada/runs/mine"]
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def text_of(package: Path) -> str:
    return "\n".join(f"{path}\n{path.read_text()}" for path in sorted(package.rglob("*")) if path.is_file())


def test_secrets_never_leave_and_what_is_personal_is_listed(run: Path, tmp_path: Path) -> None:
    done = mlhpc("package", run, "--system", "bed", "-o", tmp_path / "out" / "ACME")
    assert done.returncode == 0, done.stderr
    text = text_of(tmp_path / "out" / "ACME")
    for secret in ("abcdefgh1234", "00112233", "hunter2", "geheim"):
        assert secret not in text
    assert 'export NCCL_DEBUG="WARN"' in text
    assert "personal data: account ab1234 in " in done.stdout
    assert "'n'" not in done.stdout
    assert "personal data: hosts gpu17, gpu17.cluster.example.org in " in done.stdout
    assert "personal data: paths " in done.stdout
    assert "/home/ada/bin/mlhpc" in done.stdout
    origin = json.loads(next((tmp_path / "out").rglob("origin.json")).read_text())
    assert origin["redacted"].keys() == {"job.sbatch"}


def test_what_is_asked_for_is_taken_out_and_the_package_is_compliant(run: Path, tmp_path: Path) -> None:
    package = tmp_path / "out" / "ACME"
    done = mlhpc("package", run, "--system", "bed", "-o", package, "--redact", "hosts,paths,account")
    assert done.returncode == 0, done.stderr
    assert "personal:" not in done.stdout
    text = text_of(package).replace(str(tmp_path), "")
    for word in ("gpu17", "gpu[17", "example.org/", "cluster.example.org", "/home/", "ab1234", "hunter2"):
        assert word not in text.replace("https://REDACTED@example.org/", ""), word
    assert "facts/node1.json" in text
    assert '"node": "node1"' in text
    assert "#!/bin/bash" in text
    assert "seed=$(od -An -N2 -tu2 /dev/urandom)" in text
    assert check([package]).compliant
    assert not list(check_manifest(package))
    for number in range(5):
        log = package / f"results/bed_1x2_smoke/strong/cosmoflow/result_{number}.txt"
        assert log.read_bytes() == (run / f"result_{number}.txt").read_bytes()


def test_what_was_measured_of_nodes_goes_with_the_run_without_their_names(run: Path, tmp_path: Path) -> None:
    """Of a node that no trial ran on too."""
    look = run / "preflight/7-20261123T000000Z/1"
    look.mkdir(parents=True)
    for name in ("gpu17", "gpu18"):
        (look / f"{name}.jsonl").write_text(
            render_samples([Sample(node=name, metric="m", better="more", values=(1.0,))])
        )
    verdict = '{"nodes": {"gpu17": {"word": "good"}, "gpu18": {"word": "bad"}}}'
    (look.parent / "verdict.json").write_text(verdict)
    state_job(run, verdict)
    (look.parent / "messages.txt").write_text("/home/ada")
    package = tmp_path / "out" / "ACME"
    done = mlhpc("package", run, "--system", "bed", "-o", package, "--redact", "hosts,paths,account")
    assert done.returncode == 0, done.stderr
    text = text_of(package).replace(str(tmp_path), "")
    assert "gpu1" not in text
    assert '"word": "bad"' in text
    assert len(list(package.rglob("preflight/*/1/*.jsonl"))) == 2
    assert not list(package.rglob("messages.txt"))
    assert check([package]).compliant


@pytest.mark.parametrize(
    ("content", "redact", "expected"),
    [
        ({"data": "/home/ada/data"}, "paths", "--redact paths: contains '/home/ada/data'; logs are never edited"),
        ({"data": "gpu17"}, "hosts", "--redact hosts: contains 'gpu17'; logs are never edited"),
        ({"data": "https://a:b12345@example.org"}, "", "contains what looks like a password or token"),
    ],
)
def test_a_log_that_says_too_much_is_refused_not_edited(
    run: Path, tmp_path: Path, content: dict[str, str], redact: str, expected: str
) -> None:
    config = dict(next(line.value for line in our_run() if line.key == "run_config"))
    write(run / "resumed_0_1.txt", edit("run_config", value=config | content)(our_run()))
    done = mlhpc("package", run, "--system", "bed", "-o", tmp_path / "out" / "ACME", "--redact", redact)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "resumed_0_1.txt:" in done.stderr
    assert not (tmp_path / "out" / "ACME").exists()


def test_an_unknown_kind_is_refused(run: Path) -> None:
    done = mlhpc("package", run, "--system", "bed", "--redact", "hosts,names")
    assert done.returncode == 2
    assert "--redact 'names': expected some of hosts, paths, account" in done.stderr


def test_a_log_has_no_paths() -> None:
    config = load_config(
        load_descriptor("cosmoflow"), "smoke", ["data=/home/ada/data/c", "staging.directory=/local/ada/{node}"]
    )
    logged = config.logged()
    assert logged["data"] == "c"
    assert logged["staging"]["directory"] == "{node}"
    assert logged["hyperparameters"] == convert_to_plain_data(config)["hyperparameters"]
    assert "/" not in json.dumps(logged)
