"""The `mlhpc` command: one way to call things. `main` runs it; an error is one line and an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import NoReturn

import click

from suite import VERSION
from suite.cli.former import explain_usage
from suite.cli.group import LazyGroup, asks_for_help
from suite.cli.options import shared
from suite.errors import DEBUG, DEFECT, InputError, keep_traceback
from suite.files import one_line, print_line

FINDINGS = 1
USAGE = 2
YOUNG_OBJECTS = 20_000  # before garbage is looked for: of the modules that a command loads nothing is

EPILOG = """\b
Examples:
  mlhpc demo                                      everything once, on this machine
  mlhpc data generate cosmoflow --size mini       data set of a size
  mlhpc run cosmoflow --size mini --ranks 2 --runs 5
  mlhpc submit cosmoflow --system mysite --size small --nodes 1,2,4 --runs 10 --dry-run
  mlhpc package runs/R --system mysite --submitter ACME -o submissions/ACME && mlhpc check submissions/ACME
  mlhpc compare runs/before runs/after            exit code 1 if after is slower
  mlhpc report submissions/ACME -o report

\b
Help of a command: mlhpc help COMMAND. All commands: docs/commands.md
Shell completion:  eval "$(_MLHPC_COMPLETE=bash_source mlhpc)"
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="mlhpc")
def group() -> None:
    """Benchmark suite for AI on supercomputers: run, package, check, compare.

    Exit codes of every command: 0 fine, 1 findings or a failed run, 2 usage, 70 a defect of mlhpc itself, 130 Ctrl-C.
    """


group.params += shared()


UNTOUCHED = ("torch", "mpi4py", "h5py")  # what these began they end themselves


def program() -> NoReturn:
    """`mlhpc` as a process: `main`, and then its end at once."""
    code: object = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    _leave(code)  # here, where nothing holds what a failed command held: its files are closed
    gc.freeze()  # else Python's end looks through all that torch has loaded for garbage: a quarter of a second
    sys.exit(code)  # type: ignore[arg-type]


def _leave(code: object) -> None:
    """End this process as Python would, but for taking apart all that is loaded: a seventh of what a small command takes.

    Handlers of atexit run and output is written. Returns, for Python to do it all, where somebody waits for the usual end (a
    thread, a tracer, a profiler, a prompt), output cannot be written, or a library is loaded that has more to end.
    """
    threads = sys.modules.get("threading")
    monitoring = getattr(sys, "monitoring", None)  # of Python 3.12
    tools = [] if monitoring is None else [*filter(None, map(monitoring.get_tool, range(6)))]
    watched = sys.gettrace() or sys.getprofile() or tools or sys.flags.interactive or sys.flags.inspect
    if (
        watched
        or (threads is not None and threads.active_count() > 1)
        or any(name in sys.modules for name in UNTOUCHED)
    ):
        return
    if code is not None and type(code) is not int:
        return
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    os._exit((code or 0) & 0xFF)


def main() -> None:
    """Run the command line. An error is one line: the user's (InputError), the machine's (OSError) or a defect of ours."""
    gc.set_threshold(YOUNG_OBJECTS)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # which it looks for in all installed packages
    try:
        sys.exit(group.main(asks_for_help(sys.argv[1:]), "mlhpc", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as usage:
        usage.show()
        sys.exit(USAGE)
    except click.ClickException as error:
        print_line(f"mlhpc: {explain_usage(error)}", error=True)
        sys.exit(USAGE)
    except (click.Abort, KeyboardInterrupt):
        print_line("mlhpc: stopped", error=True)
        sys.exit(130)
    except (InputError, OSError) as error:
        print_line(f"mlhpc: {one_line(error)}", error=True)
        sys.exit(USAGE if isinstance(error, InputError) else FINDINGS)
    except Exception as error:
        if DEBUG in os.environ:
            raise
        name, text = type(error).__name__, one_line(error)
        print_line(f"mlhpc: a defect of mlhpc itself: {name}: {text} ({keep_traceback()})", error=True)
        sys.exit(DEFECT)
