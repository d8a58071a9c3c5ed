"""Which folder may import which, what may load torch, and that no import runs in a circle. No file is named here.

The folders of ``suite`` are layers: a folder imports those listed for it and nothing else. ``suite`` itself stands for the
modules directly in it, the contract that everything else is built on. Names stand here without their ``mlhpc.``.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mlhpc.suite.log.origin.sources import KINDS
from mlhpc.suite.plugins import WINGS

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "mpi4py", "h5py", "numpy", "scipy", "pandas", "altair", "google_crc32c"}

LAYERS: dict[str, set[str]] = {
    "suite": set(),
    "suite.cli": {"suite"},
    "suite.statistics": {"suite"},
    "suite.log": {"suite", "suite.log.origin", "suite.statistics"},
    "suite.log.origin": {"suite"},
    "suite.log.energy": {"suite", "suite.log", "suite.statistics"},
    "suite.machine": {"suite"},
    "suite.machine.probes": {"suite", "suite.machine"},
    "suite.machine.power": {"suite", "suite.log", "suite.log.energy", "suite.machine.probes"},
    "suite.machine.choice": {"suite", "suite.log", "suite.machine.probes"},
    "suite.data": {"suite"},
    "suite.launch": {  # a lock has its owner's name there
        *("suite", "suite.log", "suite.machine.probes", "suite.data", "suite.launch.schedulers"),
    },
    "suite.launch.schedulers": {"suite", "suite.launch"},  # the job they render
    "suite.compliance": {
        *("suite", "suite.log", "suite.log.energy", "suite.log.origin", "suite.statistics"),
        *("suite.machine", "suite.data", "suite.training.parallel"),  # readers of the files that a package keeps
        *("suite.compliance.rules", "suite.compliance.forensics", "suite.cli"),  # the parser of commands
    },
    "suite.compliance.rules": {
        *("suite", "suite.log", "suite.log.energy", "suite.machine", "suite.compliance", "suite.training.parallel"),
    },
    "suite.compliance.forensics": {
        *("suite", "suite.data", "suite.log", "suite.log.origin", "suite.machine"),
        *("suite.compliance", "suite.compliance.rules"),
    },
    "suite.compliance.exchange": {"suite", "suite.log", "suite.compliance", "suite.compliance.rules"},
    "suite.package": {
        "suite",
        "suite.log",
        "suite.log.energy",
        "suite.log.origin",
        "suite.machine",
        "suite.data",
        "suite.compliance",
        "suite.compliance.rules",
    },
    "suite.package.reproduction": {
        *("suite", "suite.log", "suite.machine", "suite.machine.probes", "suite.compliance", "suite.compliance.rules"),
        *("suite.log.origin", "suite.package", "suite.data", "suite.launch", "suite.statistics"),
    },
    "suite.training": {
        "suite",
        "suite.log",
        "suite.machine",
        "suite.machine.power",
        "suite.machine.probes",
        "suite.data",
        "suite.machine.choice",
        "suite.training.parallel",
    },
    "suite.training.counts": set(),
    "suite.training.parallel": {"suite", "suite.data", "suite.training.counts"},
    "suite.training.own": {
        "suite",
        "suite.log",
        "suite.machine",
        "suite.data",
        "suite.training",
        "suite.training.counts",
    },
    "suite.performance": {
        *("suite", "suite.log", "suite.machine", "suite.data", "suite.training", "suite.training.parallel"),
        *("suite.machine.choice", "suite.statistics", "suite.training.counts"),
    },
    "suite.performance.ceilings": {"suite", "suite.machine.choice", "suite.machine.probes", "suite.performance"},
}
# Commands may use everything, but at the top of a module nothing heavy.
COMMANDS = {"suite.commands", "suite.commands.machine"}
LIGHT = {
    "suite",
    "suite.statistics",
    "suite.cli",
    "suite.log",
    "suite.log.origin",
    "suite.log.energy",
    "suite.machine",
    "suite.machine.power",
    "suite.machine.probes",
    "suite.launch",
    "suite.launch.schedulers",
    "suite.compliance",
    "suite.compliance.exchange",
    "suite.compliance.forensics",
    "suite.compliance.rules",
    "suite.package",
    "suite.package.reproduction",
    *COMMANDS,
}
ANALYSIS_MAY_USE = {
    "suite",
    "suite.statistics",
    "suite.cli",
    "suite.log",
    "suite.log.energy",
    "suite.machine",
    "suite.compliance",
    "suite.compliance.rules",
    "suite.compliance.forensics",
    "suite.performance",
}
# What a part of ``analysis`` may import of it, the lowest part first: the way of a log to a figure runs down this table.
ANALYSIS_LAYERS: dict[str, set[str]] = {
    "analysis.tables": set(),
    "analysis.sources": set(),
    "analysis.results": {"analysis.tables"},
    "analysis.study": {"analysis.tables", "analysis.sources", "analysis.results"},
    "analysis.published": set(),
    "analysis.roofline": {"analysis.tables", "analysis.sources", "analysis.study", "analysis.published"},
    "analysis.drawing": {"analysis.study", "analysis.results"},
    "analysis.figures": {
        *("analysis.tables", "analysis.sources", "analysis.results", "analysis.study"),
        *("analysis.published", "analysis.roofline", "analysis.drawing"),
    },
    "analysis.page": {
        *("analysis.tables", "analysis.sources", "analysis.results", "analysis.study", "analysis.published"),
        *("analysis.drawing", "analysis.figures"),
    },
    "analysis.history": set(),
}
# These may use all of it: commands, and what `mlhpc.load` returns.
ANALYSIS_TOPS = {"analysis.commands", "analysis.api"}
WORKLOADS_MAY_USE = {
    *(
        "suite",
        "suite.cli",
        "suite.data",
        "suite.launch",
        "suite.training",
        "suite.training.parallel",
        *("suite.performance", "suite.training.counts"),
        "suite.machine.choice",
    ),
}


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def folder(module: str) -> str:
    """The package that a dotted name belongs to: of a module its folder, of a package itself."""
    parts = module.split(".")
    while parts and not (ROOT.joinpath(*parts) / "__init__.py").is_file():
        parts.pop()
    return ".".join(parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def raw_imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere, by their full names."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@cache
def imports(path: Path, *, top_level_only: bool = False, types: bool = False) -> tuple[str, ...]:
    """Full dotted names a module imports. Blocks under TYPE_CHECKING are not run and count only with ``types``."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # no import is inside of an expression
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test) and not types:
                continue
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from visit(child)

    return tuple(name.removeprefix("mlhpc.") for name in visit(tree_of(path)))


def heads(path: Path, *, top_level_only: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(path, top_level_only=top_level_only)}


def used_folders(path: Path, top: str) -> set[str]:
    """The folders of ``top`` that a module imports from, its own left out."""
    return {folder(name) for name in imports(path) if name.split(".")[0] == top} - {folder(dotted(path))}


def test_there_is_something_to_check() -> None:
    assert len(modules("suite")) > 20
    assert len(modules("workloads")) > 4
    assert len(modules("analysis")) > 4
    assert {folder(dotted(path)) for path in modules("suite")} == set(LAYERS) | COMMANDS


@pytest.mark.parametrize("path", modules("suite"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_suite_knows_no_workload_and_no_analysis(path: Path) -> None:
    assert not heads(path) & {"workloads", "analysis", "pandas", "altair"}


@pytest.mark.parametrize("path", modules("suite"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_imports_only_the_layers_below_it(path: Path) -> None:
    allowed = LAYERS.get(folder(dotted(path)))
    if allowed is not None:  # commands may use everything
        assert used_folders(path, "suite") <= allowed


@pytest.mark.parametrize("path", modules("suite"), ids=lambda p: str(p.relative_to(ROOT)))
def test_contract_log_machine_launch_compliance_and_commands_load_nothing_heavy(path: Path) -> None:
    if folder(dotted(path)) in LIGHT:
        assert not heads(path, top_level_only=True) & HEAVY


@pytest.mark.parametrize("path", modules("analysis"), ids=lambda p: str(p.relative_to(ROOT)))
def test_analysis_reads_logs_and_cards_and_never_torch(path: Path) -> None:
    assert not heads(path) & {"torch", "mpi4py", "h5py", "workloads"}
    assert used_folders(path, "suite") <= ANALYSIS_MAY_USE


def part_of_analysis(module: str) -> str:
    """The layer that a module belongs to: a folder, or a module directly in ``analysis``."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("path", modules("analysis"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_part_of_the_analysis_imports_only_the_layers_below_it(path: Path) -> None:
    part = part_of_analysis(dotted(path))
    used = {part_of_analysis(name) for name in imports(path, types=True) if name.startswith("analysis.")} - {part}
    if part not in ANALYSIS_TOPS | {"analysis"}:
        assert used <= ANALYSIS_LAYERS[part]


def test_the_layers_of_the_analysis_are_in_order() -> None:
    below: set[str] = set()
    for part, used in ANALYSIS_LAYERS.items():
        assert used <= below, part
        below.add(part)


def test_no_module_of_the_analysis_loads_torch_by_way_of_another() -> None:
    names = [f"mlhpc.{dotted(path)}" for path in modules("analysis")]
    probe = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", modules("workloads"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_workload_uses_the_narrow_waist_and_no_other_workload(path: Path) -> None:
    own = path.relative_to(ROOT / "workloads").parts[0]
    others = {name.split(".")[1] for name in imports(path) if name.startswith("workloads.")} - {own, "moe"}
    assert not others
    assert used_folders(path, "suite") <= WORKLOADS_MAY_USE
    if path.name in {"__init__.py", "config.py"}:
        assert not heads(path) & HEAVY


@pytest.mark.parametrize(
    "top", ["suite", "workloads", "analysis", "submissions", "tests", "benchmarks", "docs", "examples", "src"]
)
def test_every_import_is_of_the_one_package(top: str) -> None:
    """In a checkout the folders could be imported by their own names: twice, and not from a wheel."""
    for path in modules(top):
        names = {name.split(".")[0] for name in raw_imports(path)}
        assert not names & {"suite", "workloads", "analysis", "submissions"}, path


def wing_modules(wing: str) -> list[Path]:
    return sorted((ROOT / "plugins" / wing).rglob("*.py"))


def uses_of(wing: str) -> set[str]:
    """The modules of the core that a wing says it imports: USES of its ``__init__``, without ``mlhpc.``."""
    for node in tree_of(ROOT / "plugins" / wing / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USES":
            return {name.removeprefix("mlhpc.") for name in ast.literal_eval(node.value)}
    raise AssertionError(f"plugins/{wing}/__init__.py has no USES")


INSTALLED_WINGS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py"))


@pytest.mark.parametrize("top", ["suite", "workloads", "analysis", "src"])
def test_the_core_imports_no_wing(top: str) -> None:
    for path in modules(top):
        assert not [name for name in raw_imports(path) if name.startswith("mlhpc.plugins")], path


@pytest.mark.parametrize("wing", INSTALLED_WINGS)
def test_a_wing_imports_what_it_lists_and_another_wing_only_when_it_is_needed(wing: str) -> None:
    listed = uses_of(wing)
    known = {dotted(path) for top in ("suite", "workloads", "analysis") for path in modules(top)} | listed
    names = {name for path in wing_modules(wing) for name in imports(path, types=True)}
    assert {name for name in names if name in known} - {"suite", "analysis", "workloads"} - packages(known) == listed
    assert {name for name in names if is_of_another_wing(name, wing)} <= {
        name for name in names for module in listed if f"{name}.".startswith(f"{module}.")
    } | {module.rpartition(".")[0] for module in listed}
    for path in wing_modules(wing):
        assert not [name for name in imports(path, top_level_only=True) if is_of_another_wing(name, wing)], path


def is_of_another_wing(name: str, wing: str) -> bool:
    return name.startswith("plugins.") and not f"{name}.".startswith(f"plugins.{wing}.")


def packages(names: set[str]) -> set[str]:
    """Those of the names that are folders."""
    return {name for name in names if (ROOT.joinpath(*name.split(".")) / "__init__.py").is_file()}


def test_the_list_of_wings_is_that_of_the_folders() -> None:
    assert set(INSTALLED_WINGS) <= set(WINGS)


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph as a path whose ends are equal; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for after in sorted(graph[node]):
                if found := visit(after, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_no_import_runs_in_a_circle_type_only_ones_included() -> None:
    paths = {dotted(path): path for top in ("suite", "workloads", "analysis", "plugins") for path in modules(top)}
    graph = {name: ({*imports(path, types=True)} & paths.keys()) - {name} for name, path in paths.items()}
    assert cycle(graph) == []


def test_a_circle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_command_that_imports_torch_at_the_top_is_found(tmp_path: Path) -> None:
    """It once was exempt, because a module of the same name elsewhere may."""
    path = tmp_path / "ceilings.py"
    path.write_text("import torch\n\ndef f():\n    import h5py\n")
    assert heads(path, top_level_only=True) & HEAVY == {"torch"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["workload", "list"],
        ["check", "--help"],
        ["score", "--help"],
        ["package", "--help"],
        [
            "submit",
            "cosmoflow",
            "--system",
            "slurm-two-node",
            "--size",
            "mini",
            "--nodes",
            "2",
            "--runs",
            "2",
            "--dry-run",
        ],
        ["status", "--help"],
        ["report", "--help"],
        ["history", "check", "--help"],
        ["compare", "--help"],
    ],
    ids=" ".join,
)
def test_login_node_commands_load_nothing_heavy(arguments: list[str]) -> None:
    probe = (
        "import sys; sys.argv = ['mlhpc', *sys.argv[1:]]\n"
        "from mlhpc.suite.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"loaded = {sorted(HEAVY - {'numpy'})!r}\n"
        "print('LOADED', [name for name in loaded if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr


def test_an_installed_package_has_every_kind_of_file_that_the_source_has() -> None:
    """A report of an installed mlhpc once lacked its script."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    tops = ("suite", "analysis", "workloads", "submissions", "plugins")
    files = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    suffixes = {path.suffix for path in files if "__pycache__" not in path.parts} - {".py"}
    assert {f"*{suffix}" for suffix in suffixes} == set(data)
    assert suffixes == KINDS - {".py"}  # and a run keeps the digest of each kind


def test_extras_have_normal_names_and_make_installs_all() -> None:
    """pip before 23.3 installs nothing for an extra that is asked for by another spelling than its normal one.

    Triton (``kernels``) is 190 MB, 1 GB unpacked, and torch for GPUs brings it; the client of MLflow (``mlflow``) needs 41
    packages; Ray and Monarch are 400 MB. Tests that need one of them skip.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert asked is not None
    assert set(asked.group(1).split(",")) == set(extras) - {"kernels", "mlflow", "monarch", "ray"}
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in extras)


def test_the_wheelhouse_holds_what_make_installs_and_what_builds_the_package() -> None:
    """It once lacked four extras and setuptools: pip then found no way to install without an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    said = {
        target: subprocess.run(
            ["make", "-n", "-W", "constraints.txt", "VENV=/nonexistent", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for target in ("env", "wheelhouse")
    }
    asked = {target: re.search(r'"[^"]*\[([a-z0-9,-]+)\]"', text) for target, text in said.items()}
    assert {target: match and match.group(1) for target, match in asked.items()} == dict.fromkeys(
        ("env", "wheelhouse"), ",".join(re.findall(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    )
    assert all(f'"{requirement}"' in said["wheelhouse"] for requirement in project["build-system"]["requires"])
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("## Offline install")[2]
    assert "make wheelhouse" in recipe
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheelhouse make demo" in recipe
    assert not re.search(r"pip (wheel|download)", recipe), "one recipe: that of the Makefile"


PYTHON_STARTER = "suite/processes.py"  # make_python_command


def test_a_python_of_ours_is_started_by_the_one_function() -> None:
    """A command line that begins with -m or -c imports from the current folder, which may be a stranger's."""
    starters = set()
    for path in (path for top in ("suite", "workloads", "analysis", "plugins", "src") for path in modules(top)):
        lists = [node.elts for node in ast.walk(tree_of(path)) if isinstance(node, ast.List | ast.Tuple)]
        text = "\n".join(" ".join(map(ast.unparse, each)) for each in lists)
        if re.search(r"(?m)(^| )sys\.executable( |$)|(^|[. '])python[\d.]*'? '-|'-P'", text):
            starters.add(str(path.relative_to(ROOT)))
    assert starters == {PYTHON_STARTER}


@pytest.mark.parametrize("pythonpath", ["", ":", ":/nowhere"])
def test_no_command_that_starts_a_python_runs_a_file_of_the_current_folder(tmp_path: Path, pythonpath: str) -> None:
    names = {*packages_distributions(), *sys.stdlib_module_names} - {"__main__"}
    if pythonpath:  # before a line of ours runs, Python imports its own modules, ours, and what .pth files name
        names -= {*sys.stdlib_module_names, "mlhpc", "_distutils_hack", "_virtualenv"}
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    command = [str(Path(sys.executable).with_name("mlhpc")), "doctor", "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": pythonpath}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert {"mpi4py", "mpiexec", "torch"} <= {check["name"] for check in json.loads(done.stdout)}
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


PRINTERS = {
    "suite/files.py",  # print_line itself
    "suite/launch/local.py",  # text of programs that a child process runs
}


@pytest.mark.parametrize(
    "path", [*modules("suite"), *modules("analysis"), *modules("plugins")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_everything_is_printed_by_print_line(path: Path) -> None:
    """Strings of logs and names of folders reach a terminal only through the function that takes its escapes away."""
    calls = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    names = {ast.unparse(function) for function in calls if isinstance(function, ast.Name | ast.Attribute)}
    if str(path.relative_to(ROOT)) not in PRINTERS:
        assert not names & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
