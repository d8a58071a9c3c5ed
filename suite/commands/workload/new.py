"""`mlhpc workload new NAME`: writes the skeleton of a workload, a Python package that runs unchanged."""

from __future__ import annotations

import keyword
import shlex
import sys
from pathlib import Path

import click

from mlhpc.suite.cli.options import output_option
from mlhpc.suite.descriptor import load_descriptors
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line, write_file_atomically

FILES = {  # file of the skeleton: template
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{name}/__init__.py": "__init__.py",
    "{name}/config.py": "config.py",
    "{name}/data.py": "data.py",
    "{name}/model.py": "model.py",
    "{name}/workload.py": "workload.py",
    "{name}/card.yaml": "card.yaml",
    "{name}/config/smoke.yaml": "smoke.yaml",
    "tests/test_{name}.py": "test.py",
}


@click.command()
@click.argument("name")
@output_option("New folder for the Python package.", "NAME")
def new(name: str, output: Path | None) -> None:
    """Create a workload NAME that runs: a Python package with data, model, card, settings and test to change."""
    _check_name(name)
    root = output or Path(name)
    if root.exists():
        raise InputError(f"{root}: exists already; choose another folder with -o")
    import jinja2  # here, because `mlhpc workload list` imports this module and would wait for it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlhpc.suite.commands.workload", "skeleton"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  a name of letters, digits and _, in Python and YAML
    )
    for path, template in FILES.items():
        write_file_atomically(
            root / path.format(name=name), environment.get_template(f"{template}.j2").render(name=name)
        )
    print_line(f"{root}: written; next:")
    print_line(
        f"  {Path(sys.executable).name} -m pip install --no-deps --no-build-isolation -e {shlex.quote(str(root))}"
    )
    print_line(f"  mlhpc data generate {name} --size smoke && mlhpc run {name} --size smoke --runs 3")


def _check_name(name: str) -> None:
    """Raise InputError if no package can have the name, or if an installed module or workload has it."""
    if not name.isidentifier() or not name.isascii() or not name.islower() or keyword.iskeyword(name):
        raise InputError(f"{name!r}: expected the name of a Python package: lower-case letters, digits and _")
    if name in load_descriptors() or name in sys.stdlib_module_names or name == "mlhpc":
        raise InputError(f"{name!r}: is the name of an installed workload or module; choose another")
