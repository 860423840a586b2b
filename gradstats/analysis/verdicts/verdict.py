"""What a verdict is, and the words that several of them share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradstats.tables import format_short

__all__ = [
    "FAR",
    "FITS",
    "Verdict",
    "joined",
    "listed",
    "off_by",
    "percent",
    "signed",
    "signed_percent",
]

FITS = math.log(1.05)
"""Median |ln| of a law's thresholds over the exact ones up to which it fits, where these are known that well."""
FAR = math.log(2)
"""|ln| of a law's thresholds, or of a rule's k̂/k, from which on it is warned of, or left out of a short table."""
_LEAST = 1e-4
"""Smallest error of a logarithm that is written out."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer on the first screen.

    Attributes
    ----------
    headline : str
        Answer in a few words.
    numbers : str
        Numbers behind it, in sentences.
    warn : bool
        Whether something is wrong.
    """

    headline: str
    numbers: str
    warn: bool = False

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.headline}. {self.numbers}".rstrip()


def percent(error: float) -> str:
    """Return an error of a logarithm in per cent.

    Parameters
    ----------
    error : float
        Absolute value of the logarithm of a ratio.
    """
    # e⁵ is 148; an infinite error is said so, too
    if error > 5:
        return "more than 100-fold"
    if error > FAR:
        return f"{format_short(math.exp(error))}-fold"
    return f"{format_short(100 * math.expm1(max(error, _LEAST)))}\N{NO-BREAK SPACE}%"


def off_by(off: float) -> str:
    """Return how far a value is off, and on which side.

    Parameters
    ----------
    off : float
        Logarithm of its ratio to the exact one, finite.
    """
    if off >= 0:
        return f"{percent(off)} too high"
    # of what is too low a percentage would be another one; where it is small they are the same
    if -off <= FITS or -off > 5:
        return f"{percent(-off)} too low"
    return f"too low by a factor of {math.exp(-off):.3g}"


def listed(ratios: Sequence[float] | Mapping[float, Any]) -> str:
    """Return ratios as a list in words.

    Parameters
    ----------
    ratios : sequence of float, or mapping
        Ratios, or what has them as keys.
    """
    texts = [f"{ratio:g}" for ratio in ratios]
    if len(texts) == 1:
        return f"ratio {texts[0]}"
    return f"ratios {', '.join(texts[:-1])} and {texts[-1]}"


def signed(value: float) -> str:
    """Return a number with two digits after the point, and a minus as long as a plus.

    Parameters
    ----------
    value : float
        The number.
    """
    # adding 0.0 makes a negative zero plain
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def signed_percent(share: float) -> str:
    """Return a difference in per cent, with its sign: a digit after the point below ten per cent.

    Parameters
    ----------
    share : float
        The difference, as a share.
    """
    digits = 1 if abs(share) < 0.1 else 0
    # rounded before it is written, so that no zero has a sign
    percent = round(100 * share, digits)
    return f"{percent:+.{digits}f}".replace("-", "−") if percent else "0.0"


def joined(parts: Iterable[str]) -> str:
    """Return some words as a list.

    Parameters
    ----------
    parts : iterable of str
        At least one.
    """
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
