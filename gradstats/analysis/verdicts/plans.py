"""The recommendation of a plan, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.tables import format_rate

__all__ = ["ALIKE", "advice", "doubtful", "local_advice", "workers_of"]

_MEASURE = "measure the cluster, `python -m gradstats.network` under torchrun, or let --link time them on this machine"
_DOUBT = "which cannot be told from 1"
_LITTLE = "which may be less than 2 %"
_PREDICTED = ", by the prediction"
ALIKE = 0.02
"""Share of a step that is no reason to prefer one compressor to a simpler one."""
_BUSY = 90
"""Percent of the time spent computing for which local steps are advised."""


def advice(records: Sequence[Mapping[str, Any]]) -> str:
    """Return what to use among these workers at this rate, and why, in a few sentences.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.network.plan` for one number of workers and one rate, the fastest first.
    """
    best = next(r for r in records if r["recommended"])
    dense = next(r for r in records if r["compressor"] == r["baseline"])
    others = [r for r in records if r is not best and r["measured"]]
    unknown = [r["compressor"] for r in records if not r["measured"]]
    called = "dense" if dense["compressor"] == "none" else _label(dense)
    where = f"{workers_of(best)} at {format_rate(best['rate'])}: "
    if best is dense:
        text = (
            f"{where}don't compress. {called.replace('dense', 'Dense', 1)} takes {_duration(dense)}"
        )
        if not others and unknown:
            return (
                f"{text}. How long selecting takes was not measured of any compressor: {_MEASURE}."
            )
        if not others:
            return (
                f"{text}. No compressor was considered: measure the network again with --compressor, or name one "
                "that it was measured with."
            )
        other = others[0]
        text += f"; {_label(other)}, the fastest alternative, {_duration(other)}, limited by {other['limit']}"
        # predicted to be faster, but not recommended: say why
        if other["seconds"] < dense["seconds"]:
            doubt = _DOUBT if other["speedup_low"] <= 1 else _LITTLE
            if other["speedup_low"] > 1 + ALIKE and other["quality"] < 1:
                doubt = (
                    f"but of {other['quality']:.2g} k elements, and with k it would be no faster"
                )
            text += f": {_speedup(other)}, {doubt}"
        return f"{text}. {_worth(other)}"
    text = (
        f"{where}{_label(best)}. It takes {_duration(best)} instead of {called} {_duration(dense)}, "
        f"{_speedup(best)}, limited by {best['limit']}. {_worth(best)}"
    )
    if best["basis"] == "trace":
        text += f" It keeps {best['quality']:.3g} of the k asked for."
    # a rule that keeps less than k may be faster, but is not recommended for that
    if others[0]["seconds"] < best["seconds"]:
        text += f" {_label(others[0])} ({_duration(others[0])}) is no faster, within the interval"
        few = others[0]["quality"] < 1
        text += f", if it sent k elements and not {others[0]['quality']:.2g} k." if few else "."
    return text


def local_advice(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many local steps keep these workers computing at this rate, in a few sentences.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.network.plan` with local steps, for one number of workers and one rate.
    """
    ddp = next(r for r in records if not r["local_steps"] and r["compressor"] == r["baseline"])
    records = [r for r in records if r["measured"]]
    local = [r for r in records if r["local_steps"]]
    text = (
        f"{workers_of(ddp)} at {format_rate(ddp['rate'])}: with an exchange in every step, by DDP, {_percent(ddp)} "
        "of the time is spent computing. "
    )
    enough = [r for r in records if r["utilisation"] >= _BUSY / 100]
    if not enough:
        best = max(local, key=lambda r: r["utilisation"])
        text += f"None of this gives {_BUSY} %: {_steps(best)} with {_label(best)} give {_percent(best)}."
    else:
        fewest = min(r["local_steps"] for r in enough)
        there = [r for r in enough if r["local_steps"] == fewest]
        best = next((r for r in there if r["recommended"]), there[0])
        if fewest:
            text += f"Of those asked for, {_steps(best)} with {_label(best)} give {_BUSY} % first: {_percent(best)}."
        else:
            return (
                text
                + f"No local steps are needed for {_BUSY} %: {_label(best)} has {_percent(best)}."
            )
    # what dense exchanges reach at best, to compare
    dense = [r for r in local if r["compressor"] == "none"]
    if dense and best["compressor"] != "none":
        most = max(dense, key=lambda r: r["local_steps"])
        needed = most[f"bandwidth_{_BUSY}"]
        at = f"take {format_rate(needed)}" if needed < math.inf else "cannot have it at any rate"
        text += (
            f" Dense exchanges every {_steps(most)} give {_percent(most)}, and for {_BUSY} % {at}."
        )
    return text


def workers_of(record: Mapping[str, Any]) -> str:
    """Return how many workers a record is of, in words.

    Parameters
    ----------
    record : mapping
        Record of :func:`gradstats.network.plan`.
    """
    return f"{record['workers']} worker{'s' * (record['workers'] != 1)}"


def _percent(record: Mapping[str, Any]) -> str:
    percentage = f"{100 * record['utilisation']:.3g}"
    # what is not enough is not to be read as if it were
    if 100 * record["utilisation"] < _BUSY <= float(percentage):
        return f"just below {_BUSY} %"
    return f"{percentage} %"


def _steps(record: Mapping[str, Any]) -> str:
    steps = record["local_steps"]
    return f"{steps} local step{'s' * (steps != 1)}"


def _speedup(record: Mapping[str, Any]) -> str:
    low, high = record["speedup_low"], record["speedup_high"]
    return f"{record['speedup']:.3g} times as fast ({low:.3g} to {high:.3g})"


def _label(record: Mapping[str, Any]) -> str:
    ratio = record["ratio"]
    return f"{record['compressor']}" + (f" at ratio {ratio:g}" if ratio else "")


def _duration(record: Mapping[str, Any]) -> str:
    milliseconds = float(f"{1e3 * record['seconds']:.3g}")
    return f"{milliseconds:,.7g} ms"


def doubtful(record: Mapping[str, Any]) -> bool:
    """Return whether a compressor cannot be told from the baseline at this rate, or may differ by 2 % only.

    Parameters
    ----------
    record : mapping
        Record of :func:`gradstats.network.plan`.
    """
    return bool(record["speedup_low"] <= 1 + ALIKE and record["speedup_high"] >= 1 - ALIKE)


def _worth(record: Mapping[str, Any]) -> str:
    """Say at which bandwidths a compressor, and its codec, save time; with as much doubt as there is at this rate."""
    pays = _pays(record["break_even"], record["pays"])
    if not doubtful(record):
        text = f"It {pays}."
    elif record["pays"] in ("below", "above", "never"):
        pays = pays.removesuffix(_PREDICTED)
        text = f"By the prediction alone it {pays}; here the difference is within its doubt."
    else:
        text = "Whether it pays has to be measured."
    if (record["indices"], record["values"]) == ("plain", "float32"):
        return text
    pays = _pays(record["codec_break_even"], record["codec_pays"])
    return f"{text} Its codec ({record['indices']}, {record['values']}) {pays}."


def _pays(bandwidth: float, side: str) -> str:
    if side in ("below", "above"):
        return f"pays {side} {format_rate(bandwidth)}"
    return f"{'pays' if side == 'always' else 'does not pay'} at any bandwidth{_PREDICTED}"
