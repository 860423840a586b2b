"""The recommendation of a plan, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.network.rates import format_rate

__all__ = ["advice"]


def advice(records: Sequence[Mapping[str, Any]]) -> str:
    """Return what to use among these workers at this rate, and why, in a few sentences.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.network.plan` for one number of workers and one rate, the fastest first.
    """
    best, *others = records
    dense = next(r for r in records if r["compressor"] == r["baseline"])
    called = "dense" if dense["compressor"] == "none" else _label(dense)
    where = f"{best['workers']} workers at {format_rate(best['rate'])}: "
    if best is dense:
        text = f"{where}don't compress. {called.capitalize()} takes {_duration(dense)}"
        if not others:
            return f"{text}."
        return (
            f"{text}; {_label(others[0])}, the fastest alternative, {_duration(others[0])}, "
            f"limited by {others[0]['limit']}. {_worth(others[0])}"
        )
    text = (
        f"{where}{_label(best)}. It takes {_duration(best)} instead of {called} {_duration(dense)}, "
        f"{best['speedup']:.3g} times as fast ({best['speedup_low']:.3g} to "
        f"{best['speedup_high']:.3g}), limited by {best['limit']}. {_worth(best)}"
    )
    if best["basis"] == "trace":
        text += f" It keeps {best['quality']:.3g} of the k asked for."
    if best["speedup_low"] <= 1:
        text += f" The interval includes 1: {called} may be as fast."
    return text


def _label(record: Mapping[str, Any]) -> str:
    ratio = record["ratio"]
    return f"{record['compressor']}" + (f" at ratio {ratio:g}" if ratio else "")


def _duration(record: Mapping[str, Any]) -> str:
    milliseconds = float(f"{1e3 * record['seconds']:.3g}")
    return f"{milliseconds:,.7g} ms"


def _worth(record: Mapping[str, Any]) -> str:
    """Say at which bandwidths a compressor, and its codec, save time."""
    text = f"It pays {_below(record['break_even'])}."
    if (record["indices"], record["values"]) == ("plain", "float32"):
        return text
    pays = _below(record["codec_break_even"])
    return f"{text} Its codec ({record['indices']}, {record['values']}) pays {pays}."


def _below(bandwidth: float) -> str:
    if math.isnan(bandwidth):
        return "on fast links only"
    if math.isinf(bandwidth):
        return "whatever the bandwidth"
    return f"below {format_rate(bandwidth)}" if bandwidth else "at no bandwidth"
