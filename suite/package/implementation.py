"""Writes the files under benchmarks/<benchmark>/implementations: provenance, a README and scripts.

Renders the environment of a package's runs as a requirements file, for pip or uv, offline too.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from mlhpc.suite.compliance.package_files import ORIGIN_FILE, list_kept_files
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, render_printable, write_file_atomically
from mlhpc.suite.log.origin.sources import ENVIRONMENT_VERSION, Environment, convert_distribution_name
from mlhpc.suite.log.provenance import LATE_SUBMITTER
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.results_tree import PRUNED
from mlhpc.suite.log.run_folder import RunInfo, has_run_start
from mlhpc.suite.machine.secrets import remove_random_words, remove_secrets
from mlhpc.suite.package.redaction import PersonalNames, Redaction
from mlhpc.suite.package.results import STATED, Result, Run, build_stated_result, compute_score


def write_implementation(
    staged: Path, result: Result, kinds: Collection[str], submitter: str
) -> list[tuple[Path, str, str]]:
    """Write the implementation folder of one result below ``staged``, without secrets and the ``kinds`` to redact.

    Returns the words about people and places that are still in it: file, kind and words (`Redaction.find`).
    """
    folder = staged / result.implementation
    left: list[tuple[Path, str, str]] = []
    for number, run in enumerate(result.runs):
        provenance = Path("provenance") / f"run_{number}"
        found = _write_provenance(folder / provenance, run, result, kinds, submitter)
        left += [(result.implementation / provenance / name, kind, words) for name, kind, words in found]
    stated = build_stated_result(compute_score(result), result.benchmark, result.names, staged / result.folder)
    write_file_atomically(folder / STATED, json.dumps(stated, indent=1) + "\n")
    write_file_atomically(folder / "README.md", remove_secrets(_render_readme(result, submitter)))
    setup, data = (_SETUP, _DATASETS) if result.info.loop is None else (_OWN_LOOP_SETUP, _OWN_LOOP_DATASETS)
    about_code = {
        # Texts of run.json become words of a bash script.
        "commit": shlex.quote(_render_commit(result.info)),
        "version": render_printable(result.info.suite_version),
    }
    write_file_atomically(folder / "setup.sh", setup.format(**about_code))
    manifest = result.scored[0].data_manifest
    named = {"workload": result.info.workload, "size": result.info.size, "manifest": str(manifest)}
    about_data = {key: shlex.quote(render_printable(text)) for key, text in named.items()}
    write_file_atomically(folder / "init_datasets.sh", data.format(**about_data))
    write_file_atomically(folder / "run_and_time.sh", _render_run_script(result, kinds))
    for script in folder.glob("*.sh"):
        script.chmod(0o755)
    return left


def _write_provenance(
    target: Path, run: Run, result: Result, kinds: Collection[str], submitter: str
) -> list[tuple[Path, str, str]]:
    """Copy the provenance of a run folder. Write origin.json, which maps logs to their names in the package.

    Returns the personal words that are left, by the name of their file in ``target``.
    """
    root, names = run.folder.root, result.names
    redaction = _make_redaction(run, kinds)
    for path in names:
        if path.parent == root:
            redaction.check_log(path)
    changed = []
    left = []
    for path in _list_provenance(run, result):
        name = redaction.name(path.relative_to(root))
        left += [(name, kind, words) for kind, words in _copy_file(path, target / name, redaction)]
        if not _is_log(path) and (target / name).read_bytes() != path.read_bytes():
            changed.append(name.as_posix())
    logs = {record.path.name: names[record.path] for record in run.records if record.path and record.path in names}
    document: dict[str, object] = {"version": 1, "folder": root.name, "logs": logs, "redacted": changed}
    if run.unnamed:
        document[LATE_SUBMITTER] = submitter
    write_file_atomically(target / ORIGIN_FILE, json.dumps(document, indent=1))
    return left


def _list_provenance(run: Run, result: Result) -> Iterator[Path]:
    """Yield the files of a run folder that show how the result was made, without its logs."""
    yield from list_kept_files(run.folder.root)
    yield from (record.path for record, _ in result.left_out if record.path and record.path.parent == run.folder.root)


def _render_readme(result: Result, submitter: str) -> str:
    card, first, info = result.benchmark, result.scored[0], result.info
    logs = f"`{result.folder.as_posix()}/result_0.txt` to `result_{len(result.scored) - 1}.txt`"
    own = f"{info.loop}, a loop of the submitter's own logged by " if info.loop else ""
    changes = " with local changes" if info.git and info.git.dirty else ""
    text = (
        f"# {card.name}, size {card.size}\n\n"
        f"Target: {card.target_text}. Ruleset {first.ruleset}, {card.required_runs} runs required. Logs: {logs}.\n\n"
        f"Made by {own}mlhpc {info.suite_version}, commit {_render_commit(info)}{changes}, on {info.created}: "
        f"{first.nodes} node{'s' * (first.nodes != 1)}, {first.ranks} rank{'s' * (first.ranks != 1)}, "
        f"{first.accelerators_per_node} accelerators per node, "
        f"global batch size {first.global_batch_size}.\n\n"
        "- `setup.sh` installs the suite as it was\n"
        "- `init_datasets.sh` makes the data set\n"
        "- `run_and_time.sh` runs it\n"
        f"- `{STATED}` has the score and the times of the runs, to be compared with the logs by `mlhpc reproduce`\n"
        "- `provenance/` holds what each run left: run.json, config.yaml, facts of every node, the job script, "
        "the uncommitted\n"
        "  changes, the digests of the suite's files, the environment, the data set's manifest\n"
    )
    if info.loop:
        text += "- `provenance/run_*/code/` is the program, `card.yaml` beside it what it was made for\n"
    if result.pruned:
        text += f"- `{PRUNED}/` beside the logs: {len(result.pruned)} instances that were pruned\n"
    if any(run.unnamed for run in result.runs):
        text += f"\nThe logs name no submitter. {submitter} was stated late, when this package was built.\n"
    not_scored = list(_list_not_scored(result))
    return text + ("\nNot scored, in `provenance/`:\n\n" + "".join(not_scored) if not_scored else "")


def _list_not_scored(result: Result) -> Iterator[str]:
    """Yield a line of the README for each log that is not scored, with the reason."""
    for record, why in result.left_out:
        if record.path:
            yield f"- `{record.path.name}`: {why}\n"
    for path in (path for run in result.runs for path in run.resumed):
        yield f"- `{path.name}`: a continuation of an interrupted run\n"
    for path in (path for run in result.runs for path in run.folder.failed()):
        what = "a run that began, failed and was replaced" if has_run_start(path) else "an attempt that never began"
        yield f"- `{path.name}`: {what}\n"


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


_OWN_LOOP_SETUP = """\
#!/bin/bash
# Installs mlhpc {version}, which logged the runs, and gets the code that trained.
# MLHPC_REPO, CODE_REPO: URL or path of the two repositories; the commit is that of the code. The program itself is in
# provenance/run_*/code/.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}" "${{CODE_REPO:?set it to that of the code}}"
git clone "$CODE_REPO" code
git -C code checkout {commit}
git clone "$MLHPC_REPO" mlhpc
python3 -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_OWN_LOOP_DATASETS = """\
#!/bin/bash
# The data of {workload} {size} are the submitter's. DATA: their file or folder.
# Fails if they are not those of the runs.
set -euo pipefail
: "${{DATA:?set it to the file or folder of the data}}"
found=$(python3 - "$DATA" <<'END'
import sys
from pathlib import Path
from mlhpc.suite.data.manifest import compute_fingerprint
from mlhpc.suite.world import World
print(compute_fingerprint(Path(sys.argv[1]), World.create())[0])
END
)
test "$found" = {manifest}
"""


def _render_run_script(result: Result, kinds: Collection[str]) -> str:
    lines = [
        "#!/bin/bash",
        "# The command of each run folder of this result; its events carry the times.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
    ]
    for number, run in enumerate(result.runs):
        script = run.folder.root / "job.sbatch"
        command = f"sbatch provenance/run_{number}/job.sbatch" if script.is_file() else _render_command(run.info)
        lines.append(_make_redaction(run, kinds).apply(command))
    return "\n".join(lines) + "\n"


def _render_command(info: RunInfo) -> str:
    """Render the command of a run without the path that the program had on its machine."""
    program, *rest = info.command or ("mlhpc",)
    return shlex.join([Path(program).name, *rest])


def _render_commit(info: RunInfo) -> str:
    return info.git.commit if info.git and info.git.commit else "HEAD"


def _make_redaction(run: Run, kinds: Collection[str]) -> Redaction:
    script = run.folder.root / "job.sbatch"
    texts = [script.read_text("utf-8", "replace")] if script.is_file() else []
    # The preflight measured nodes on which no trial ran, too.
    measured = [path.stem for path in run.folder.preflights() if path.suffix == ".jsonl"]
    return Redaction(PersonalNames.collect(run.nodes, texts, measured), kinds)


def _copy_file(source: Path, target: Path, redaction: Redaction) -> list[tuple[str, str]]:
    """Copy a file of the provenance, redacted unless it is a log. Returns the personal words in the copy."""
    make_folder(target.parent)
    if _is_log(source):
        redaction.check_log(source)
        shutil.copyfile(source, target)
        # A file that is not UTF-8 is searched for personal words all the same.
        text = source.read_text("utf-8", "replace")
    else:
        text = redaction.apply(source.read_text("utf-8", "replace"))
        if source.suffix == ".diff":  # uncommitted changes: people try out keys there
            text = remove_random_words(text)
        write_file_atomically(target, text)
    return list(redaction.find(text))


def _is_log(path: Path) -> bool:
    return path.suffix == ".txt"


SUITE = "mlhpc"
_IN_PACKAGE = "benchmarks/*/implementations/mlhpc-*/*/*/provenance/run_*/environment.json"


def find_environment(package: Path) -> Environment:
    """Find the environment of a package's runs. InputError if there is none, or if they had several."""
    paths = [
        path
        for path in sorted(package.glob(_IN_PACKAGE))
        if not any(part.is_symlink() for part in (path, *path.parents) if part != package)
    ]
    if not paths:
        raise InputError(f"{package}: no environment.json in its provenance; only packages of runs by mlhpc have one")
    found = [
        read_json_document(path, Environment, "an environment", ENVIRONMENT_VERSION, largest=read_limits().json)
        for path in paths
    ]
    for path, environment in zip(paths, found, strict=True):
        if environment != found[0]:
            raise InputError(
                f"{package}: its runs were made with different packages or Pythons, expected the same for all: "
                f"compare {paths[0]} and {path}"
            )
    return found[0]


def render_requirements(environment: Environment) -> str:
    """Render every distribution but the suite itself with its version.

    Names and versions fit the patterns of `InstalledPackage`, so a package cannot bring options of pip in.
    """
    lines = [f"# {environment.python} on {environment.machine}"]
    for each in environment.distributions:
        if convert_distribution_name(each.name) == SUITE:
            lines.append(f"# {SUITE} {each.version}: install it from its checkout or wheel")
        # No index has the state of that checkout.
        elif each.source == "editable":
            lines.append(f"# {convert_distribution_name(each.name)}=={each.version}: was installed from a checkout")
        else:
            lines.append(f"{convert_distribution_name(each.name)}=={each.version}")
    return "\n".join(lines) + "\n"
