"""Whether a larger batch would pay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradstats.tables import format_value

__all__ = ["batch_sentence"]


def batch_sentence(record: Mapping[str, Any]) -> str:
    """Say how the batch of a run lies to the noise scale over its steps.

    Parameters
    ----------
    record : mapping
        Record of :func:`gradstats.agreement` over all steps, of kind ``gradient``.

    Returns
    -------
    str
        The sentence, which claims a side only where the whole interval lies there.
    """
    sentence, without = _payoff(record), record["without"]
    if not without:
        return sentence
    return f"{sentence}. Left out: {'one step' if without == 1 else f'{without} steps'} of zeros or NaN"


def _payoff(record: Mapping[str, Any]) -> str:
    """Say the same of the steps that count."""
    # all ranks together take one step, so the batch of a step is that of all of them
    batch, low, high = record["world"] * (record["batch"] or 1), record["low"], record["high"]
    unit = "samples" if record["batch"] else "batches of one rank"
    # NaN is no interval; infinite is one without an upper end
    if math.isnan(low):
        return f"whether a larger batch than {batch:,} {unit} would pay is not known: {record['reason']}"
    if low <= 0 and math.isinf(high):
        return f"whether a larger batch than {batch:,} {unit} would pay is not known: the noise scale may be anything"
    ends = f"{format_value(low)} to {format_value(high)} {unit}"
    if batch < low:
        return (
            f"a larger batch would pay: that of all ranks, {batch:,} {unit}, is below the noise scale of {ends}, far "
            "below which twice the batch needs about half the steps, and at which three quarters"
        )
    if batch > high:
        return (
            f"a larger batch would bring little: that of all ranks, {batch:,} {unit}, is above the noise scale of "
            f"{ends}, far beyond which more samples hardly save steps"
        )
    return (
        f"the batch of all ranks, {batch:,} {unit}, is about the noise scale of {ends}: whether more would pay is not "
        "known"
    )
