"""The kept fraction k/d, the number of elements it asks for, and checks of every other number that users give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import TypeVar

import numpy as np

from gradstats.errors import InputError

__all__ = [
    "RATIOS",
    "check_count",
    "check_magnitude",
    "check_number",
    "check_ratio",
    "check_ratios",
    "check_seed",
    "check_several",
    "each_once",
    "shown",
    "target_count",
]

T = TypeVar("T")

RATIOS = (0.1, 0.01, 0.001)
"""Kept fractions that tables, reports and benchmarks show by default."""

_LONGEST = 40
"""Characters of a wrong value that an error repeats."""


def shown(value: object) -> str:
    """Return a value as an error may repeat it: short, on one line, without reading an array.

    Parameters
    ----------
    value : object
        Anything.
    """
    if isinstance(value, str | bytes):
        # cut before repr(), which would copy a text of any length
        text = repr(value[: _LONGEST + 1])
    # Python refuses to write out numbers of some thousand digits
    elif isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return "so large a number"
    elif value is None or isinstance(value, int | float | complex | np.number | np.bool_):
        text = str(value)
    else:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _real(value: object) -> float:
    """Return a real number as a float, and NaN for everything else: booleans, text, arrays and tensors too."""
    if type(value) is float:  # nearly always, and an abstract class takes microseconds to say so
        return value
    # True is 1 to Python
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number or fraction beyond float64
        return math.inf if abs(value) == value else -math.inf


def _whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_number(
    value: float, name: str, low: float, high: float, ends: str = "()", hint: str = ""
) -> float:
    """Return a number as a float if it lies in an interval.

    Real scalars of Python and NumPy are numbers. Booleans, text, arrays and tensors are not, not even with one element.

    Parameters
    ----------
    value : float
        What the user gave.
    name : str
        Name of the argument.
    low : float
        Lower end of the interval.
    high : float
        Upper end of the interval.
    ends : {"()", "(]", "[)", "[]"}
        Whether the ends belong to it.
    hint : str
        What the argument means, for the error.

    Raises
    ------
    InputError
        If it is no number, NaN, or outside the interval.

    Examples
    --------
    >>> check_number(0.95, "level", 0, 1)
    0.95
    """
    number = _real(value)
    above = number >= low if ends[0] == "[" else number > low
    below = number <= high if ends[1] == "]" else number < high
    # negated, so that NaN fails, which compares with nothing
    if not (above and below):
        interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
        raise InputError(f"{name} must be in {interval}{hint}, not {shown(value)}")
    return number


def check_magnitude(value: float, name: str = "a threshold") -> float:
    """Return a number as a float if it is not negative. It may be infinite.

    Parameters
    ----------
    value : float
        What the user gave.
    name : str
        Name of the argument.

    Raises
    ------
    InputError
        If it is no number, NaN, or negative.
    """
    # negated, so that NaN fails
    if not (number := _real(value)) >= 0:
        raise InputError(f"{name} must be a non-negative magnitude, not {shown(value)}")
    return number


def check_count(value: int, name: str, least: int = 1, most: int | None = None) -> int:
    """Return a whole number as an int if it is in a range.

    Parameters
    ----------
    value : int
        What the user gave: an integer of Python or NumPy.
    name : str
        Name of the argument.
    least : int
        Smallest number allowed.
    most : int, optional
        Largest number allowed.

    Raises
    ------
    InputError
        If it is no integer, or out of range.
    """
    whole = _whole(value)
    if not whole or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        kind = "" if whole else "a whole number, "
        raise InputError(f"{name} must be {kind}{bounds}, not {shown(value)}")
    return int(value)


def check_seed(seed: int) -> int:
    """Return the seed of a random generator if it is a whole number from 0 to 2⁶⁴ − 1.

    Parameters
    ----------
    seed : int
        What the user gave.

    Raises
    ------
    InputError
        If it is not.
    """
    return check_count(seed, "seed", 0, 2**64 - 1)


def check_ratio(ratio: float, name: str = "ratio") -> float:
    """Return a kept fraction as a float if it is one.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d.
    name : str
        Name of the argument.

    Raises
    ------
    InputError
        If it is not a number in (0, 1].
    """
    return check_number(ratio, name, 0, 1, "(]", ", the fraction of elements kept")


def check_ratios(ratios: Iterable[float]) -> list[float]:
    """Return kept fractions as a list of floats if they are some, each once.

    Parameters
    ----------
    ratios : iterable of float
        Kept fractions k/d.

    Raises
    ------
    InputError
        If they are no sequence, or one is not a number in (0, 1].
    """
    return each_once([check_ratio(ratio) for ratio in check_several(ratios, "ratios")])


def each_once(values: Sequence[T]) -> list[T]:
    """Return values in their order without those that came before: what is asked for twice is not measured twice.

    Parameters
    ----------
    values : sequence
        Values, such as names.
    """
    return [value for i, value in enumerate(values) if value not in values[:i]]


def check_several(values: Iterable[T], name: str) -> list[T]:
    """Return several values as a list. Text is one value, not several.

    Parameters
    ----------
    values : iterable
        What the user gave.
    name : str
        Name of the argument.

    Raises
    ------
    InputError
        If they are no iterable.
    """
    # tensors and arrays without a dimension say that they are not iterable only when they are asked
    with suppress(TypeError):
        if not isinstance(values, str | bytes):
            return list(values)
    raise InputError(f"{name} must be a list or a tuple, not {shown(values)}")


def target_count(ratio: float, numel: int) -> int:
    """Return k = max(1, round(ratio · numel)), at most `numel`; 0 for an empty gradient.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    numel : int
        Elements of the gradient, d.

    Raises
    ------
    InputError
        If the ratio is not in (0, 1], or `numel` no whole number from 0 on.
    """
    if not (type(ratio) is float and 0 < ratio <= 1 and type(numel) is int and 0 <= numel < 2**62):
        numel = check_count(numel, "numel", 0, 2**62)  # nearly never: calls that say what is wrong
        ratio = check_ratio(ratio)
    k = round(ratio * numel)
    # 0 elements only of an empty gradient
    return k if 1 <= k <= numel else min(1, numel)
