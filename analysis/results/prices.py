"""Reads what an hour of one compute unit costs: money, node hours or energy. The user states it; nothing is assumed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from mlhpc.suite.errors import InputError

PRICE_FORMAT = "expected DEVICE=NUMBER UNIT/h, such as H100=2.50 USD/h or A64FX=0.12 kWh/h"
_RATE = re.compile(r"\s*(?P<amount>[0-9.eE+-]+)\s*(?P<unit>[^\s/0-9]+)\s*/\s*h\s*")


@dataclass(frozen=True)
class Prices:
    """Holds the price of a unit hour by device family, all in ``unit``."""

    per_unit_hour: Mapping[str, float]
    unit: str

    def cost(self, results: pd.DataFrame) -> pd.Series:
        """Return the cost of each result: unit hours times the price of its device; missing without a price."""
        # Without case: a person need not write a device exactly as its package does
        known = {device.casefold(): price for device, price in self.per_unit_hour.items()}
        return results["unit_hours"] * results["device"].str.casefold().map(known)

    def without_result(self, devices: Iterable[str]) -> list[str]:
        """Return a line for each price of a device that no result has."""
        there = {device.casefold(): device for device in devices}
        names = ", ".join(sorted(there.values())) or "none"
        return [
            f"--price: no result has the device {device!r}; devices here: {names}"
            for device in self.per_unit_hour
            if device.casefold() not in there
        ]


def read_prices(given: Sequence[str]) -> Prices | None:
    """Read ``DEVICE=NUMBER UNIT/h`` texts and YAML files of such pairs. None: nothing was given.

    Raises InputError for a text that is neither.
    """
    rates: dict[str, tuple[float, str, str]] = {}
    for text in given:
        for device, rate, where in _entries(text):
            # YAML files and options may be mixed; which of two prices holds would depend on their order
            if device in rates:
                raise InputError(
                    f"{where}: {device} has a price already, from {rates[device][2]}; expected one price for each device"
                )
            amount, unit = _parse(rate, where)
            rates[device] = (amount, unit, where)
    # One place for each unit, so that the error can name where they disagree
    units = {unit: where for _, unit, where in rates.values()}
    if len(units) > 1:
        raise InputError(
            f"prices have different units: {' and '.join(f'{unit} ({at})' for unit, at in units.items())}; expected one unit"
        )
    return Prices({device: amount for device, (amount, _, _) in rates.items()}, next(iter(units))) if rates else None


def _entries(text: str) -> list[tuple[str, str, str]]:
    """Return device, rate and where it was stated."""
    device, sign, rate = text.partition("=")
    if sign:
        return [(device.strip(), rate, f"--price {text!r}")]
    path = Path(text)
    try:
        # A text without "=" is the path of a file
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--price {text}: {error.strerror}; {PRICE_FORMAT}, or a YAML file of them") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: not valid YAML: {str(error).splitlines()[0]}; expected lines such as H100: 2.50 USD/h"
        ) from None
    if not isinstance(content, dict) or not content:
        raise InputError(f"{path}: no prices in this file; expected lines such as H100: 2.50 USD/h")
    return [(str(device), str(rate), f"{path}: {device}") for device, rate in content.items()]


def _parse(rate: str, where: str) -> tuple[float, str]:
    match = _RATE.fullmatch(rate)
    # The pattern also fits texts such as "1.2.3", which are no numbers
    try:
        amount = float(match["amount"]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or not 0 < amount < math.inf:
        raise InputError(f"{where}: {rate.strip()!r} is not a price; {PRICE_FORMAT}")
    return amount, match["unit"]
