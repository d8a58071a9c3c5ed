"""Runs the tests with other Pythons and with the oldest and the newest allowed version of each dependency; prints a table.

    python benchmarks/matrix.py [--python /path/to/python3.13 ...] [--versions oldest newest] [-- pytest arguments]

Oldest: the oldest version with a wheel that pyproject.toml allows, found by uv (--resolution lowest-direct). Newest: what the
index has today, without constraints.txt. torch stays at the version of constraints.txt: the index's other builds bring
gigabytes of CUDA libraries. Warnings are no errors here: versions that were never seen may
deprecate what they like. `make test-matrix` runs it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("run", "mpi", "open-catalyst", "analysis", "parquet", "nvml", "official", "docs", "test")
PINNED = ("torch",)
SOURCES = ("python-hostlist",)  # the index has no wheel of it
TESTS = ["-q", "-W", "default", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long"]


def requirements() -> list[str]:
    """The dependencies of the suite and of all extras, except those of `PINNED` and `SOURCES`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = dict.fromkeys([*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])])
    return [text for text in texts if re.split(r"[<>=]", text)[0] not in (*PINNED, *SOURCES)]


def pins() -> list[str]:
    """The requirements of `PINNED`, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in PINNED]


def environment(python: str, versions: str, folder: Path) -> Path:
    """Make a virtual environment with the suite in it and return its Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = folder / "bin" / "python"
    pip = [str(inside), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *pins(), *SOURCES, "setuptools>=77", "uv"], check=True)
    resolution = "lowest-direct" if versions == "oldest" else "highest"
    uv = [str(folder / "bin" / "uv"), "pip", "install", "-q", "--python", str(inside), "--only-binary", ":all:"]
    subprocess.run([*uv, "--resolution", resolution, *requirements()], check=True)
    copy = folder / "source"  # an editable install would leave its metadata in the checkout
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(copy)], check=True)
    return inside


def run_tests(python: Path, arguments: list[str]) -> str:
    """Run the tests and return pytest's closing line; failures are printed."""
    words = [str(python), "-m", "pytest", *(arguments or TESTS)]
    path = f"{python.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(python.parent)},
        text=True,
        capture_output=True,
    )
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", help="Interpreter; may be repeated. Default: python3.11, 3.12 and 3.13 if found."
    )
    parser.add_argument("--versions", nargs="+", choices=["oldest", "newest"], default=["oldest", "newest"])
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    named = [f"python3.{minor}" for minor in (11, 12, 13)]
    pythons = options.python or [name for name in named if shutil.which(name)]
    print("not found:", ", ".join(name for name in named if not options.python and name not in pythons) or "none")
    failed = False
    rows = []
    for python in pythons:
        for versions in options.versions:
            with tempfile.TemporaryDirectory(prefix="mlhpc-matrix-") as scratch:
                try:
                    inside = environment(python, versions, Path(scratch) / "venv")
                    version = subprocess.run(
                        [str(inside), "-V"], capture_output=True, text=True, check=True
                    ).stdout.split()[1]
                    result = run_tests(inside, options.tests)
                except subprocess.CalledProcessError as error:
                    version, result = (
                        python,
                        f"not installable: {' '.join(map(str, error.cmd[:6]))} ended with {error.returncode}",
                    )
            rows.append((version, versions, result))
            failed |= not re.search(r"\d+ passed", result) or "failed" in result or "error" in result
            print(*rows[-1], sep="  ", flush=True)
    print("\n| Python | dependencies | tests |\n| --- | --- | --- |")
    for row in rows:
        print("|", " | ".join(row), "|")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
