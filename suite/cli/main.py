"""Runs the command line. `group` has all commands; `main` runs it. An error is one line and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from traceback import walk_tb

import click

from mlhpc.suite import VERSION, stopping
from mlhpc.suite.cli.group import LazyGroup, convert_help_words
from mlhpc.suite.cli.options import make_shared_options
from mlhpc.suite.cli.usage_errors import explain_usage
from mlhpc.suite.errors import (
    DEBUG,
    InputError,
    explain_limit,
    explain_missing,
    explain_variable,
    is_of_memory,
    write_traceback,
)
from mlhpc.suite.exit_codes import ExitCode, choose_exit_code
from mlhpc.suite.files import (
    expand_home_in_variables,
    expand_home_in_words,
    find_output_error,
    give_up_output,
    open_closed_streams,
    print_line,
    quote_path,
    render_error,
    set_missing_home,
    show_path,
)
from mlhpc.suite.path_kinds import add_kind, find_oddity
from mlhpc.suite.shadowed import explain_shadowed

OUTPUTS = ("-o", "--output", "--requirements", "--record", "--remember")  # options with a path that is written
EPILOG = """\b
Examples:
  mlhpc demo                                      every step once, on this machine
  mlhpc data generate cosmoflow --size mini       make the data set of a size
  mlhpc run cosmoflow --size mini --ranks 2 --runs 5
  mlhpc submit cosmoflow --system mysite --size small --nodes 1,2,4 --runs 10 --dry-run
  mlhpc package runs/R --system mysite --submitter ACME -o submissions/ACME && mlhpc check submissions/ACME
  mlhpc compare runs/before runs/after            exit code 1 if `after` is slower
  mlhpc report submissions/ACME -o report

\b
Help of a command: mlhpc help COMMAND
Shell completion:  eval "$(_MLHPC_COMPLETE=bash_source mlhpc)"
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="mlhpc")
def group() -> None:
    """Benchmark suite for AI on supercomputers: run, package, check, compare.

    Exit codes of every command: 0 success. 1 findings, or a failed run. 2 a mistake in the command, a file or the
    environment. 70 a defect of mlhpc itself. 130 Ctrl-C. 143 SIGTERM.
    """


group.params += make_shared_options()


def main() -> None:
    """Run the command line and exit with its code. The code is 1 instead of 0 if a result could not be printed."""
    open_closed_streams()
    set_missing_home()
    output = sys.stdout
    try:
        code: object = _run()
    except SystemExit as end:
        # Click ends with 1, behind a stream of its own, if the reader of help or version had enough
        code = end.code if sys.stdout is output else ExitCode.OK
    if (lost := find_output_error()) is not None:
        print_line(f"mlhpc: standard output: {render_error(lost)}: the result was not written", error=True)
        code = code or ExitCode.FAILED
    sys.exit(code)  # type: ignore[arg-type]


def _require_folder() -> None:
    """Raise InputError if the current folder is gone: otherwise each relative path would look like a mistake."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError("the current folder was removed; go to one that exists: cd") from None


def _run() -> int:
    """Run the command. An error is one line: the user's (InputError), the machine's (OSError) or our defect."""
    try:
        with stopping.use_keyboard_interrupt():
            _require_folder()
            sys.argv[1:] = expand_home_in_words(sys.argv[1:])
            expand_home_in_variables()
            _refuse_odd_words(sys.argv[1:])
            # Alone, click would print errors on several lines and choose exit codes of its own.
            return group.main(convert_help_words(sys.argv[1:]), "mlhpc", standalone_mode=False) or ExitCode.OK
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as usage:
        print_line(usage.format_message(), error=True)
        return ExitCode.USAGE
    except (Exception, KeyboardInterrupt) as error:
        # A library may have made another error of the interrupt
        if isinstance(error, KeyboardInterrupt | click.Abort) or stopping.find_first_signal() is not None:
            return _print_stopped()
        if isinstance(error, OSError) and _is_of_click(error):
            give_up_output(error)  # `main` looks at the end, whatever printed
            return ExitCode.OK
        text, code = _explain(error)
        print_line(f"mlhpc: {text}", error=True)
        return code


def _is_of_click(error: OSError) -> bool:
    """Return whether click itself, which prints help and version, could not write to standard output."""
    *_, (last, _) = walk_tb(error.__traceback__)
    return last.f_code is click.echo.__code__


def _explain(error: BaseException) -> tuple[str, ExitCode]:
    """Return one line about an error, and the exit code. Called while the error is handled."""
    if isinstance(error, click.ClickException):
        hidden = explain_shadowed(error.__cause__) if error.__cause__ is not None else ""
        return hidden or add_kind(explain_usage(error, group)), ExitCode.USAGE
    if isinstance(error, InputError):
        return add_kind(render_error(error)), ExitCode.USAGE
    limit = explain_limit(str(error) or type(error).__name__)
    if isinstance(error, OSError):
        end = f"; {limit}" if limit else _name_output(error)
        return f"{render_error(error)}{end}", ExitCode.USAGE if limit else choose_exit_code(error)
    if DEBUG in os.environ:
        raise error
    if text := explain_shadowed(error) or explain_missing(error):
        return text, ExitCode.USAGE
    if sizes := re.search(r"size calculation overflowed with sizes=(\[[\d, ]+\])", str(error)):
        return (
            f"no memory can hold an array of {sizes[1]} elements, as these settings ask for; give smaller ones",
            ExitCode.USAGE,
        )
    if limit or (limit := explain_variable(str(error))):
        return f"{render_error(error)}: {limit}", ExitCode.USAGE
    if is_of_memory(error):
        return f"not enough memory here for what was asked: {render_error(error)}", ExitCode.FAILED
    return (
        f"a defect of mlhpc itself: {type(error).__name__}: {render_error(error)} ({write_traceback()})",
        ExitCode.DEFECT,
    )


def _name_output(error: OSError) -> str:
    """Return what to do about a file or folder that an option named and that could not be written. "" for one that was
    read.
    """
    file = Path(str(error.filename or ""))
    for option, value in _list_outputs(sys.argv[1:]):
        if Path(value) not in (file, *file.parents):
            continue
        if "--resume" not in sys.argv:
            return f"; choose another {option}"
        # Elsewhere there is nothing to continue
        first = "ask for write permission" if isinstance(error, PermissionError) else "mend this"
        given = (value, f"{option}{value}", f"{option}={value}")
        words = (f"{word.removesuffix(value)}MINE" if word in given else word for word in sys.argv[1:])
        return f"; {first}, or continue a copy: cp -r {quote_path(value)} MINE && {shlex.join(['mlhpc', *words])}"
    return ""


def _refuse_odd_words(words: Sequence[str]) -> None:
    """Raise InputError for a word that ends with a carriage return, and for an output that nobody can mean.

    In a script with the line ends of Windows each line ends so, and a folder of that name would be made.
    """
    own = list(words)[: words.index("--")] if "--" in words else list(words)
    if ended := next((word for word in own if word.endswith("\r")), None):
        raise InputError(f"{ended!r}: a carriage return ends this word, as in a script from Windows: dos2unix SCRIPT")
    for option, value in _list_outputs(own):
        if value and not os.path.lexists(value) and (odd := find_oddity(value)):
            raise InputError(f"{option} {show_path(value)}: {odd}")


def _list_outputs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option of `OUTPUTS` on a command line, and its value: ``-o R``, ``-oR``, ``--output=R``."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        for option in OUTPUTS:
            joined = f"{option}=" if option.startswith("--") else option
            if word == option:
                yield option, following
            elif word.startswith(joined):
                yield option, word.removeprefix(joined)


def _print_stopped() -> int:
    """Print the one line of a command that a signal ended. On a terminal it begins below the ^C."""
    if text := stopping.render_end_line():
        print_line("\n" * sys.stderr.isatty() + text, error=True)
    return stopping.compute_exit_code()
