"""Finds modules that PYTHONPATH puts before this Python's own. Failures that follow are no defect of ours.

Imports only modules that are part of the interpreter's program: no folder can hide those.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # typing's own can be hidden
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType


def find_shadowed(
    modules: Mapping[str, ModuleType] = sys.modules, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return file by name of loaded modules in folders of PYTHONPATH that hide one of this Python's own."""
    files = {}
    # A copy: another thread may import a module meanwhile.
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        # A submodule lies in the folder of its package.
        if "." not in name and file:
            files[name] = file
    return _select_hiding(files, environ)


def explain_shadowed(error: BaseException, *, loaded: bool = True) -> str:
    """Return one line about an error that shadowed modules may have caused; "" if there are none.

    With ``loaded`` False only modules count that the error names or passed through. Other loaded ones may have no part
    in it.
    """
    places = describe_shadowed(error, loaded=loaded)
    if not places:
        return ""
    text = " ".join(str(error).split())[:300]
    return f"{places}: {type(error).__name__}: {text}; expected no such folder in PYTHONPATH: env -u PYTHONPATH mlhpc …"


def describe_shadowed(error: BaseException, *, loaded: bool = False) -> str:
    """Return the modules of `explain_shadowed` with their files; "" if there are none."""
    found = _find_involved(error) | (find_shadowed() if loaded else {})
    places = ", ".join(f"{name} is loaded from {file}" for name, file in list(found.items())[:3])
    return places and f"{places}, which PYTHONPATH puts before this Python's own"


def describe_location(file: str) -> str:
    """Return `` from FILE`` if a module's file is not in this Python's own site-packages, else ""."""
    import sysconfig

    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return "" if any(file.startswith(folder + os.sep) for folder in own) else f" from {file}"


def _find_involved(error: BaseException, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return shadowing modules that an error names or passed through.

    A module whose import failed is not loaded any more.
    """
    known, files = find_shadowed(environ=environ), {}
    for each in _list_causes(error):
        named = each.name if isinstance(each, ImportError) else getattr(getattr(each, "obj", None), "__name__", None)
        if isinstance(named, str) and (name := named.partition(".")[0]) in known:
            files[name] = known[name]
        for file in _list_traceback_files(each):
            for folder in _list_pythonpath(environ):
                if file.startswith(folder + os.sep):
                    top = file[len(folder) + 1 :].partition(os.sep)[0]
                    files[top.removesuffix(".py")] = file
    return _select_hiding(files, environ)


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _list_traceback_files(error: BaseException) -> Iterator[str]:
    """Yield the files that an error passed through, starting with the one that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename
    files, trace = [], error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    yield from reversed(files)


def _select_hiding(files: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Select the modules in folders of PYTHONPATH that hide one of this Python's own."""
    folders = _list_pythonpath(environ)
    # The places where Python would look without PYTHONPATH.
    rest = [each for each in sys.path if os.path.abspath(each) not in folders]  # noqa: PTH100
    return {
        name: file
        for name, file in files.items()
        if _find_innermost(file, [*folders, *rest]) in folders and importlib.machinery.PathFinder.find_spec(name, rest)
    }


def _find_innermost(file: str, places: Iterable[str]) -> str:
    """Return the innermost of the places that hold a file; "" if none does.

    A folder of PYTHONPATH may hold the whole environment, as a home or a checkout with a .venv does.
    """
    return max((place for place in places if file.startswith(place + os.sep)), key=len, default="")


def _list_pythonpath(environ: Mapping[str, str]) -> set[str]:
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    return {os.path.abspath(folder) for folder in given if folder}  # noqa: PTH100
