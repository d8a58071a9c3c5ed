"""The files beside the results, under benchmarks/<benchmark>/implementations: provenance, a README and scripts."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from suite.files import write_whole
from suite.log.attempts import began
from suite.log.results_tree import PRUNED
from suite.log.run_folder import RunInfo
from suite.machine.secrets import redact_random
from suite.package.redaction import Personal, Redaction
from suite.package.results import Result, Run, score_of
from suite.package.stated import STATED, state_result


def write_implementation(staged: Path, result: Result, kinds: Collection[str]) -> list[tuple[Path, str, str]]:
    """Write the implementation folder of one result below ``staged``, without secrets and what ``kinds`` of redaction ask for.

    Returns what of people and places is still in it: file, kind and words (`suite.package.redaction.find`).
    """
    folder = staged / result.implementation
    names = result.names
    left: list[tuple[Path, str, str]] = []
    for number, run in enumerate(result.runs):
        provenance = folder / "provenance" / f"run_{number}"
        redaction = _redaction(run, kinds)
        for path in (path for path in result.names if path.parent == run.folder.root):
            redaction.check_log(path)
        changed = []
        for path in _provenance(run, result):
            name = redaction.name(path.relative_to(run.folder.root))
            found = _copy(path, provenance / name, redaction)
            left += [(result.implementation / provenance.relative_to(folder) / name, *what) for what in found]
            if _is_log(path):
                continue
            if (provenance / name).read_bytes() != path.read_bytes():
                changed.append(name.as_posix())
        origin = {
            record.path.name: names[record.path] for record in run.records if record.path and record.path in names
        }
        document = {"version": 1, "folder": run.folder.root.name, "logs": origin, "redacted": changed}
        write_whole(provenance / "origin.json", json.dumps(document, indent=1))
    stated = state_result(score_of(result), result.benchmark, names, staged / result.folder)
    write_whole(folder / STATED, json.dumps(stated, indent=1) + "\n")
    write_whole(folder / "README.md", _readme(result))
    setup, data = (_SETUP, _DATASETS) if result.info.loop is None else (_OWN_SETUP, _OWN_DATASETS)
    write_whole(folder / "setup.sh", setup.format(commit=_commit(result.info), version=result.info.suite_version))
    manifest = result.scored[0].data_manifest
    about_data = {"workload": result.info.workload, "size": result.info.size, "manifest": manifest}
    write_whole(folder / "init_datasets.sh", data.format(**about_data))
    write_whole(folder / "run_and_time.sh", _run_and_time(result, kinds))
    for script in folder.glob("*.sh"):
        script.chmod(0o755)
    return left


def _provenance(run: Run, result: Result) -> Iterator[Path]:
    """Every file of a run folder that says how the result was made, except the logs of the result itself."""
    root = run.folder.root
    known = run.folder
    fixed = (
        *(known.info_path, known.config_path, known.card_path, root / "job.sbatch", root / "job.json"),
        *(known.changes_path, known.sources_path, known.environment_path, known.data_path),
    )
    yield from (path for path in fixed if path.is_file())
    yield from sorted(path for path in run.folder.code.rglob("*") if path.is_file() and not path.is_symlink())
    yield from run.folder.node_facts()
    yield from run.folder.preflights()
    yield from run.resumed
    yield from run.folder.failed()
    yield from (record.path for record, _ in result.left_out if record.path and record.path.parent == root)


def _readme(result: Result) -> str:
    card = result.benchmark
    first = result.scored[0]
    info = result.info
    logs = f"`{result.folder.as_posix()}/result_0.txt` to `result_{len(result.scored) - 1}.txt`"
    left_out = "".join(f"- `{record.path.name}`: {why}\n" for record, why in result.left_out if record.path)
    resumed = "".join(
        f"- `{path.name}`: a continuation of an interrupted run\n" for run in result.runs for path in run.resumed
    )
    failed = "".join(
        f"- `{path.name}`: {'a run that began, failed and was replaced' if began(path) else 'an attempt that never began'}\n"
        for run in result.runs
        for path in run.folder.failed()
    )
    return (
        f"# {card.name}, size {card.size}\n\n"
        f"Target: {card.target_text}. Ruleset {first.ruleset}, {card.required_runs} runs required. Logs: {logs}.\n\n"
        f"Made by {_maker(info)}, commit {_commit(info)}"
        f"{' with local changes' if info.git and info.git.get('dirty') else ''}, on {info.created}: "
        f"{first.nodes} node{'s' * (first.nodes != 1)}, {first.ranks} rank{'s' * (first.ranks != 1)}, "
        f"{first.accelerators_per_node} accelerators per node, "
        f"global batch size {first.global_batch_size}.\n\n"
        "- `setup.sh` installs the suite as it was\n"
        "- `init_datasets.sh` makes the data set\n"
        "- `run_and_time.sh` runs it\n"
        f"- `{STATED}` has the score and the times of the runs, to be compared with the logs by `mlhpc reproduce`\n"
        "- `provenance/` holds what each run left: run.json, config.yaml, facts of every node, the job script, the uncommitted\n"
        "  changes, the digests of the suite's files, the environment, the data set's manifest\n"
        + (
            "- `provenance/run_*/code/` is the program, `card.yaml` beside it what it was made for\n"
            if info.loop
            else ""
        )
        + (f"- `{PRUNED}/` beside the logs: {len(result.pruned)} instances that were pruned\n" if result.pruned else "")
        + (f"\nNot scored, in `provenance/`:\n\n{left_out}{resumed}{failed}" if left_out or resumed or failed else "")
    )


_SETUP = """\
#!/bin/bash
# Installs mlhpc {version} at the commit this result was made with. MLHPC_REPO: URL or path of its repository.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}"
git clone "$MLHPC_REPO" mlhpc
git -C mlhpc checkout {commit}
python3 -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_DATASETS = """\
#!/bin/bash
# Makes the data set: the same bytes on any machine.
set -euo pipefail
mlhpc data generate {workload} --size {size}
"""


_OWN_SETUP = """\
#!/bin/bash
# Installs mlhpc {version}, which logged the runs, and gets the code that trained, of which provenance/run_*/code/ has the program.
# MLHPC_REPO, CODE_REPO: URL or path of the two repositories; the commit is that of the code.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}" "${{CODE_REPO:?set it to that of the code}}"
git clone "$CODE_REPO" code
git -C code checkout {commit}
git clone "$MLHPC_REPO" mlhpc
python3 -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_OWN_DATASETS = """\
#!/bin/bash
# The data of {workload} {size} are the submitter's. DATA: their file or folder. An error if they are not those that the runs read.
set -euo pipefail
: "${{DATA:?set it to the file or folder of the data}}"
found=$(python3 - "$DATA" <<'END'
import sys
from pathlib import Path
from suite.data.fingerprint import fingerprint
from suite.world import World
print(fingerprint(Path(sys.argv[1]), World.create())[0])
END
)
test "$found" = {manifest}
"""


def _maker(info: RunInfo) -> str:
    """What trained and what logged it."""
    own = f"{info.loop}, a loop of the submitter's own logged by " if info.loop else ""
    return f"{own}mlhpc {info.suite_version}"


def _run_and_time(result: Result, kinds: Collection[str]) -> str:
    lines = [
        "#!/bin/bash",
        "# The command of each run folder of this result; its events carry the times.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
    ]
    for number, run in enumerate(result.runs):
        script = run.folder.root / "job.sbatch"
        command = f"sbatch provenance/run_{number}/job.sbatch" if script.is_file() else _command(run.info)
        lines.append(_redaction(run, kinds).apply(command))
    return "\n".join(lines) + "\n"


def _command(info: RunInfo) -> str:
    """The command as a person types it: without the path that the program had on the machine of the run."""
    program, *rest = info.command or ("mlhpc",)
    return shlex.join([Path(program).name, *rest])


def _commit(info: RunInfo) -> str:
    return str(info.git["commit"]) if info.git and info.git.get("commit") else "HEAD"


def _redaction(run: Run, kinds: Collection[str]) -> Redaction:
    script = run.folder.root / "job.sbatch"
    texts = [script.read_text("utf-8", "replace")] if script.is_file() else []
    measured = [
        path.stem for path in run.folder.preflights() if path.suffix == ".jsonl"
    ]  # of nodes that no trial ran on too
    return Redaction(Personal.collect(run.nodes, texts, measured), kinds)


def _copy(source: Path, target: Path, redaction: Redaction) -> list[tuple[str, str]]:
    """Copy a file of the provenance, redacted unless it is a log. Returns what is personal in the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if _is_log(source):
        redaction.check_log(source)
        shutil.copyfile(source, target)
        text = source.read_text("utf-8", "replace")
    else:
        text = redaction.apply(source.read_text("utf-8", "replace"))
        if source.suffix == ".diff":  # what people try out, keys among it
            text = redact_random(text)
        write_whole(target, text)
    return list(redaction.find(text))


def _is_log(path: Path) -> bool:
    return path.suffix == ".txt"
