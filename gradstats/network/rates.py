"""Bandwidths, as people write and read them."""

from __future__ import annotations

import re

from gradstats.errors import InputError
from gradstats.tables import format_rate

__all__ = ["format_rate", "parse_rate"]

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Return a rate in bit/s.

    Parameters
    ----------
    text : str
        A number of Mbit/s, or a number followed by ``kbit``, ``mbit`` or ``gbit``, as tc writes it.

    Returns
    -------
    int
        Rate in bit/s.

    Raises
    ------
    InputError
        If the text is neither, or the rate is below 1 kbit/s.
    """
    match = re.fullmatch(rf"([0-9]*\.?[0-9]+)({'|'.join(_UNITS)})?", text.strip().lower())
    # without a match 0, which is refused like any rate that is too small
    rate = round(float(match[1]) * _UNITS[match[2] or "mbit"]) if match else 0
    if rate < 1000:
        raise InputError(f"a rate is a number of Mbit/s, or like 500kbit or 1gbit, not {text!r}")
    return rate
