"""Bandwidths as people write them."""

from __future__ import annotations

import re

from gradstats.errors import InputError

__all__ = ["format_rate", "parse_rate"]

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Return a rate in bit/s.

    Parameters
    ----------
    text : a number of Mbit/s, or one with ``kbit``, ``mbit`` or ``gbit`` behind it, as tc writes it.

    Raises
    ------
    InputError
        If it is neither, or below 1 kbit/s.
    """
    match = re.fullmatch(rf"([0-9]*\.?[0-9]+)({'|'.join(_UNITS)})?", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2] or "mbit"]) if match else 0
    if rate < 1000:
        raise InputError(f"a rate is a number of Mbit/s, or like 500kbit or 1gbit, not {text!r}")
    return rate


def format_rate(rate: float) -> str:
    """Return a rate in Mbit/s for reading, three digits of it."""
    return f"{float(f'{rate:.3g}'):,.7g} Mbit/s"
