"""The options of benchmarks that train one workload: WORKLOAD, --size, --data and --set. Loads no torch. No main."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlhpc.suite.config import choose_default_data_root


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of these options; ``description`` is shown as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--data", type=Path, help="[the usual place of the size's data]")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser


def data_root(args: argparse.Namespace) -> Path:
    """The folder of the data set that the options name."""
    return args.data or choose_default_data_root(args.workload, args.size)
