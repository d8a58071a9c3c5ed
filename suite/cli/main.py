"""The command line: `group` of all commands; `main` runs it. An error is one line and an exit code."""

from __future__ import annotations

import os
import sys

import click

from suite import VERSION
from suite.cli.group import LazyGroup, asks_for_help
from suite.cli.options import shared
from suite.cli.usage_errors import explain_usage
from suite.errors import DEBUG, InputError, is_of_memory, keep_traceback
from suite.exit_codes import ExitCode
from suite.files import one_line, print_line

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
Help of a command: mlhpc help COMMAND
Shell completion:  eval "$(_MLHPC_COMPLETE=bash_source mlhpc)"
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="mlhpc")
def group() -> None:
    """Benchmark suite for AI on supercomputers: run, package, check, compare.

    Exit codes of every command: 0 fine, 1 findings or a failed run, 2 usage, 70 a defect of mlhpc itself, 130 Ctrl-C.
    """


group.params += shared()


def main() -> None:
    """Run the command line. An error is one line: the user's (InputError), the machine's (OSError) or our defect."""
    try:
        sys.exit(group.main(asks_for_help(sys.argv[1:]), "mlhpc", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as usage:
        usage.show()
        sys.exit(ExitCode.USAGE)
    except click.ClickException as error:
        print_line(f"mlhpc: {explain_usage(error)}", error=True)
        sys.exit(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        print_line("mlhpc: stopped", error=True)
        sys.exit(ExitCode.INTERRUPTED)
    except (InputError, OSError) as error:
        print_line(f"mlhpc: {one_line(error)}", error=True)
        sys.exit(ExitCode.USAGE if isinstance(error, InputError) else ExitCode.FAILED)
    except Exception as error:
        if DEBUG in os.environ:
            raise
        name, text = type(error).__name__, one_line(error)
        if is_of_memory(error):
            print_line(f"mlhpc: not enough memory here for what was asked: {text}", error=True)
            sys.exit(ExitCode.FAILED)
        print_line(f"mlhpc: a defect of mlhpc itself: {name}: {text} ({keep_traceback()})", error=True)
        sys.exit(ExitCode.DEFECT)
