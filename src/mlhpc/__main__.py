"""Runs the program `mlhpc`, which is also `python -m mlhpc`."""

import _signal  # type: ignore[import-not-found]  # built in: PYTHONPATH cannot hide it as it can signal
import sys

USAGE = 2  # of mlhpc.suite.errors, which needs enum: PYTHONPATH may hide that too


def main() -> None:
    """Run the command line. Signals are handled before anything else is imported."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until they are: Python's handler prints a traceback
    _drop_current_folder()
    from mlhpc.suite.shadowed import explain_shadowed

    try:
        from mlhpc.suite import stopping

        stopping.register_handlers()
        from mlhpc.suite.cli.main import main as run
    except Exception as error:
        if text := explain_shadowed(error) or _explain_missing(error):
            sys.exit(_print_refusal(f"mlhpc: {text}"))
        raise
    run()


def _drop_current_folder() -> None:
    """Take empty elements out of PYTHONPATH, here and for each Python that is started.

    Each stands for the current folder, as in PYTHONPATH=$PYTHONPATH:MINE. A downloaded mpi4py.py there would be run.
    """
    import os  # of the interpreter itself: it is imported before PYTHONPATH counts

    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder for folder in given if folder]
    if len(folders) < len(given) and given != [""]:
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
        try:
            here = os.getcwd()  # noqa: PTH109  pathlib is what PYTHONPATH may hide
        except OSError:
            return
        if here in sys.path and here not in folders:
            sys.path.remove(here)


def _explain_missing(error: Exception) -> str:
    """Say which package is not installed. Only now is imported what needs modules that PYTHONPATH can hide."""
    from mlhpc.suite.errors import explain_missing

    return explain_missing(error)


def _print_refusal(line: str) -> int:
    """Print the line with the interpreter's own means: any module of ours may need the hidden one."""
    sys.stderr.write("".join(each if each.isprintable() else "?" for each in line) + "\n")
    return USAGE


if __name__ == "__main__":
    main()
