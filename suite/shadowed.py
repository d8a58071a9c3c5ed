"""Finds modules that PYTHONPATH puts before this Python's own: what then fails is no defect of ours.

Imports only what cannot be shadowed so that the suite still starts.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from types import ModuleType

OURS = ("suite", "workloads", "analysis", "mlhpc")


def find_shadowed(
    modules: Mapping[str, ModuleType] = sys.modules, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The loaded modules that lie in a folder of PYTHONPATH and hide one of this Python's own, with their files."""
    folders = _folders(environ)
    rest = [each for each in sys.path if os.path.abspath(each) not in folders]  # noqa: PTH100
    found = {}
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if "." in name or not file or not any(file.startswith(folder + os.sep) for folder in folders):
            continue
        if (name in OURS and not file.startswith(_root())) or importlib.machinery.PathFinder.find_spec(name, rest):
            found[name] = file
    return found


def explain_shadowed(error: BaseException) -> str:
    """One line about an error in whose way such modules are; "" if there are none."""
    found = find_shadowed()
    if not found:
        return ""
    places = ", ".join(f"{name} is loaded from {file}" for name, file in list(found.items())[:3])
    text = " ".join(str(error).split())[:300]
    return (
        f"{places}, which PYTHONPATH puts before this Python's own: {type(error).__name__}: {text}; "
        "expected no such folder in PYTHONPATH: env -u PYTHONPATH mlhpc …"
    )


def where_from(file: str) -> str:
    """`` from FILE`` if a module's file is not in this Python's own site-packages, else ""."""
    own: Iterable[str] = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return "" if any(file.startswith(folder + os.sep) for folder in own) else f" from {file}"


def _folders(environ: Mapping[str, str]) -> set[str]:
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    return {os.path.abspath(folder) for folder in given if folder}  # noqa: PTH100


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
