"""How a quantity moves over a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gradstats.analysis.drift import FEWEST_STEPS
from gradstats.analysis.quality import QUANTILES
from gradstats.analysis.verdicts.verdict import Verdict
from gradstats.tables import format_short, format_uncertain, format_value

__all__ = ["movement", "scale_moves"]

_SHIFT = 0.1
"""Change of the share of non-zero elements from which on their mean is not the gradient's."""
_STEADY = 1.1
"""Quotient of the largest and the smallest mean of a few steps up to which they hardly move."""


def movement(record: Mapping[str, Any]) -> str:
    """Say how a quantity moves over a run: the change that is fitted, where its interval leaves no doubt of its side.

    Parameters
    ----------
    record : mapping
        Record of :func:`gradstats.analysis.drift.drift_records`.

    Returns
    -------
    str
        Such as "mean × 0.62 (0.55 to 0.70) from the first step to the last, fitted".
    """
    n, without, incomplete = (record[name] for name in ("n", "without", "incomplete"))
    if not n:
        whom = " of all ranks" if incomplete else ""
        return f"{record['quantity']}: no step has such a number{whom}"
    sentence, every = _moved(record), n + without + incomplete
    reasons = {"which have no such number": without, "which not all ranks have": incomplete}
    out = [f"{many} of {every} steps, {why}" for why, many in reasons.items() if many]
    return f"{sentence}. Left out: {'; '.join(out)}." if out else sentence


def _moved(record: Mapping[str, Any]) -> str:
    """Say how it moves over the steps that have it."""
    name, n = record["quantity"], record["n"]
    change, low, high = (record[f"total_change{end}"] for end in ("", "_low", "_high"))
    if math.isnan(change):
        low, high = (format_value(record[end]) for end in ("low", "high"))
        text = f"{name} is {low}" if low == high else f"{name} between {low} and {high}"
        if record["spread"] == QUANTILES and (low != high or n < FEWEST_STEPS):
            text += f" ({QUANTILES} of the values)"
        if n >= FEWEST_STEPS:
            return f"{text}, the same at all {n} steps"
        many = f"are {n}" if n > 1 else "is one"
        return f"{text}; a trend takes {FEWEST_STEPS} steps, and here {many}"
    sign = "× " if record["relative"] else ""
    size = f"{sign}{format_value(change)}"
    if math.isnan(low):
        return (
            f"{name}: no trend is told; what the line ({size}) leaves may wander like a random walk"
        )
    text = f"{sign}{format_uncertain(change, low, high)} from the first step to the last, fitted"
    # no change is a factor of 1, or a difference of 0
    none = float(record["relative"])
    return f"{name} {text}" if not low <= none <= high else f"{name}: no trend is told, {text}"


def scale_moves(
    record: Mapping[str, Any] | None,
    steps: Sequence[int],
    means: Sequence[float],
    captured: int,
    nonzero: tuple[float, float] = (1.0, 1.0),
) -> Verdict:
    """Say how the mean magnitude moves over the steps.

    Parameters
    ----------
    record : mapping or None
        Record of :func:`gradstats.analysis.drift.drift_records` of the quantity ``mean``, where there is one.
    steps : sequence of int
        Steps with a mean.
    means : sequence of float
        Their means.
    captured : int
        Number of all steps looked at.
    nonzero : tuple of float
        Least and largest share of elements that are not zero, which these means are of.
    """
    if captured < 2:
        return Verdict("One step only", "Nothing to compare.")
    if record is None or not record["n"]:
        return Verdict("Nothing to follow", "No step has a finite non-zero element.")
    if len(means) < 2:
        return Verdict("Nothing to follow", "Only one step has a finite non-zero element.")
    numbers = f"Step {steps[0]} to {steps[-1]}, between {format_short(min(means))} and {format_short(max(means))}."
    slope, many = record["slope"], len(means)
    if many >= FEWEST_STEPS:
        headline = _moved(record).replace("mean", "Mean magnitude", 1)
    else:
        # of few steps there is no more to say; where they go up and down the last over the first says nothing
        headline = f"Mean magnitude × {format_short(means[-1] / means[0])}"
        ways = {later > earlier for earlier, later in pairwise(means) if later != earlier}
        if len(ways) > 1 and max(means) > _STEADY * min(means):
            headline = (
                f"Mean magnitude between {format_short(min(means))} and {format_short(max(means))}"
            )
        numbers += f" Trend tests take {FEWEST_STEPS} steps; {many} have no power."
    # of a shorter run that would be said of steps that there are not
    if not math.isnan(slope) and steps[-1] - steps[0] >= 100:
        low, high = record["slope_low"], record["slope_high"]
        interval = f"{100 * low:+.1f} to {100 * high:+.1f}"
        if math.isnan(low):
            interval = "no interval: what is left may wander like a random walk"
        numbers += f" Per 100 steps {100 * slope:+.1f} % ({interval})."
    if nonzero[1] - nonzero[0] >= _SHIFT:
        least, most = (format_short(100 * share) for share in nonzero)
        numbers += f" Means are of the elements that are not zero, {least} to {most}\N{NO-BREAK SPACE}% of all."
    return Verdict(headline, numbers)
