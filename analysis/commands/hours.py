"""Parses times on the command line: 24h, 30min, 7d, 90s."""

from __future__ import annotations

import click

SHORTEST_H, LONGEST_H = 1 / 3600, 1e6
_UNITS = {"min": 1 / 60, "s": 1 / 3600, "h": 1.0, "d": 24.0}


def parse_hours(option: str, text: str, *, zero: bool = False) -> float:
    """Parse a time and return hours. UsageError names the option. With ``zero`` no time at all (0h) is allowed too."""
    for unit, each in _UNITS.items():
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * each
            except ValueError:
                break
            if SHORTEST_H <= value <= LONGEST_H or (zero and value == 0.0):
                return value
    raise click.UsageError(f"{option} {text}: expected a time such as 24h, 30min or 7d, from 1s to {LONGEST_H:.0e}h")
