"""The program `mlhpc`. It has a module of its own: a folder of PYTHONPATH may hold another package named suite."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. One line and exit code 2 if another package is imported in place of ours."""
    try:
        from suite.__main__ import main as run
    except Exception as error:
        line = "".join(each if each.isprintable() else "?" for each in _explain(error))
        sys.stderr.write(f"mlhpc: {line}\n")
        sys.exit(2)
    run()


def _explain(error: Exception) -> str:
    """Say which file was imported. Nothing of ours can be: it would be looked for in the other package."""
    trace, file = error.__traceback__, ""
    while trace is not None:  # where the import failed, if the package is loaded no more
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    if isinstance(error, SyntaxError):
        file = error.filename or file
    other = sys.modules.get("suite")
    if other is not None:
        file = other.__file__ or ", ".join(other.__path__)
    text = " ".join(str(error).split())[:300]
    return (
        f"suite is loaded from {file}, which PYTHONPATH puts before this Python's own: {type(error).__name__}: {text}; "
        "expected no such folder in PYTHONPATH: env -u PYTHONPATH mlhpc …"
    )


if __name__ == "__main__":
    main()
