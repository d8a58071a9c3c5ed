"""The program `mlhpc`, which is also `python -m suite`."""

import sys

from suite import stopping


def main() -> None:
    """Run the command line. Signals are handled before anything else is imported."""
    stopping.install()
    try:
        from suite.cli.main import main as run
    except Exception as error:
        from suite.files import print_line
        from suite.shadowed import explain_shadowed

        if text := explain_shadowed(error):
            print_line(f"mlhpc: {text}", error=True)
            sys.exit(2)
        raise
    run()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        from pathlib import Path

        if sys.path[:1] == [str(Path.cwd())]:
            del sys.path[0]  # put there by -m: a user's folder workloads/ or analysis/ is not ours
    main()
