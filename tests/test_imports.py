"""Who may import whom, and what the login-node commands may load: the architecture's table as a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "mpi4py", "h5py", "numpy", "scipy", "pandas", "matplotlib"}
SUITE_RUN_SIDE = {  # may load torch, mpi4py, h5py, numpy
    *(
        "train",
        "trial",
        "worker",
        "balance",
        "build",
        "distributed",
        "sampling",
        "timing",
        "staging",
        "shards",
        "checkpoint",
        "instrument",
        "ceilings",
        "flops",
        "profiling",
        "stragglers",
    ),
}
ANALYSIS_FROM_SUITE = {
    "card",
    "mllog",
    "record",
    "scoring",
    "system",
    "cost_model",
    "compliance",
    "workload",
    "stragglers",
    "log_reader",
}
WORKLOAD_FROM_SUITE = {
    "workload",
    "balance",
    "build",
    "config",
    "card",
    "distributed",
    "sampling",
    "shards",
    "timing",
    "cost_model",
    "launch",  # moe-bench starts its own ranks
}


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def imports(path: Path, *, top_level_only: bool) -> Iterator[str]:
    """Full dotted names a module imports; blocks under TYPE_CHECKING are not run and do not count."""
    tree = ast.parse(path.read_text())

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from visit(child)

    yield from visit(tree)


def heads(path: Path, *, top_level_only: bool) -> set[str]:
    return {name.split(".")[0] for name in imports(path, top_level_only=top_level_only)}


def test_there_is_something_to_check() -> None:
    assert len(modules("suite")) > 20
    assert len(modules("workloads")) > 4
    assert len(modules("analysis")) > 4


@pytest.mark.parametrize("path", modules("suite"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_suite_knows_no_workload_and_no_analysis(path: Path) -> None:
    assert not heads(path, top_level_only=False) & {"workloads", "analysis", "pandas", "matplotlib"}
    if path.stem not in SUITE_RUN_SIDE and path.parent.name not in SUITE_RUN_SIDE:
        assert not heads(path, top_level_only=True) & HEAVY


@pytest.mark.parametrize("path", modules("analysis"), ids=lambda p: str(p.relative_to(ROOT)))
def test_analysis_reads_logs_and_cards_and_never_torch(path: Path) -> None:
    assert not heads(path, top_level_only=False) & {"torch", "mpi4py", "h5py", "workloads"}
    used = {name.split(".")[1] for name in imports(path, top_level_only=False) if name.startswith("suite.")}
    assert used <= ANALYSIS_FROM_SUITE | {"VERSION", "RULESET"}


@pytest.mark.parametrize("path", modules("workloads"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_workload_uses_the_narrow_waist_and_no_other_workload(path: Path) -> None:
    names = list(imports(path, top_level_only=False))
    own = path.relative_to(ROOT / "workloads").parts[0]
    others = {name.split(".")[1] for name in names if name.startswith("workloads.")} - {own, "moe"}
    assert not others
    used = {name.split(".")[1] for name in names if name.startswith("suite.")}
    assert used <= WORKLOAD_FROM_SUITE | {"VERSION"}
    if path.name in {"__init__.py", "config.py"}:
        assert not heads(path, top_level_only=False) & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["check", "--help"],
        ["score", "--help"],
        ["package", "--help"],
        [
            "submit",
            "cosmoflow",
            "--system",
            "slurm-two-node",
            "--config",
            "mini",
            "--nodes",
            "2",
            "--runs",
            "2",
            "--dry-run",
        ],
        ["status", "--help"],
        ["report", "--help"],
    ],
    ids=" ".join,
)
def test_login_node_commands_load_nothing_heavy(arguments: list[str]) -> None:
    probe = (
        "import sys; sys.argv = ['mlhpc', *sys.argv[1:]]\n"
        "from suite.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"loaded = {sorted(HEAVY - {'numpy'})!r}\n"
        "print('LOADED', [name for name in loaded if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr


def test_extras_have_normal_names_and_make_installs_all() -> None:
    """pip before 23.3 installs nothing for an extra that is asked for by another spelling than its normal one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert asked is not None
    assert set(asked.group(1).split(",")) == set(extras)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in extras)
