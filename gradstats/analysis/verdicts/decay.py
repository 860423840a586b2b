"""Whether sorted magnitudes fall fast enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.analysis.verdicts.verdict import Verdict, signed
from gradstats.statistics.compressibility import Ruling

__all__ = ["decay_shown"]

_CONTROLS = {"uniform": "uniform", "halfnorm": "half-normal", "laplace": "Laplace"}


def decay_shown(
    decay: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]]
) -> Verdict:
    """Say at which steps the sorted magnitudes fall fast enough, and whether a control does.

    Parameters
    ----------
    decay : sequence of dict
        Records of :func:`gradstats.analysis.decay.compressibility_records` of one trace, rank and kind.
    controls : sequence of dict
        Those of the controls.
    """
    rows = [r for r in decay if math.isfinite(r["p"])]
    if not rows:
        return Verdict("No power", "Fewer ranks than an exponent takes.")
    # too few or too wide a window is no verdict of the data
    judged = [r for r in rows if r["reason"] not in (Ruling.TOO_FEW, Ruling.TOO_WIDE)]
    if not judged:
        return Verdict("No power", f"No verdict: {rows[0]['reason']}.")
    yes = sum(r["compressible"] is True for r in rows)
    headline = "Not shown at any step" if len(rows) > 1 else "Not shown"
    if yes:
        headline = f"Shown at {yes} of {len(rows)} steps" if len(rows) > 1 else "Shown"
    ends = rows if len(rows) < 3 else [rows[0], rows[-1]]
    # of ever more non-zero elements the window grows
    of = [_ranks(r) for r in ends]
    alike = len({*of}) == 1
    at = ", ".join(
        f"{_between(r, 'p')} at step {r['step']}" + ("" if alike else f" {ranks}")
        for r, ranks in zip(ends, of, strict=True)
    )
    at += f", {of[0]}" if alike else ""
    # the intervals above are those of independent elements
    known = [r for r in ends if math.isfinite(r["runs_low"])]
    each = " and ".join(
        f"{signed(r['runs_low'])} to {signed(r['runs_high'])}"
        + f" at step {r['step']}" * (len(known) < len(ends))
        for r in known
    )
    runs = f"; by runs of neighbours {each}" if known else ""
    numbers = (
        f"p = {at}{runs}. Shown means p above ½ in every window, by Hill's estimate and by "
        "σ_k too, and a power law likelier than a log-normal. "
    )
    unsure = [r for r in rows if r["compressible"] is None]
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for r in unsure:
        reasons.setdefault(r["reason"], []).append(r)
    for reason, those in reasons.items():
        at = f"Step {those[0]['step']}" if len(those) == 1 else f"{len(those)} of {len(rows)} steps"
        which = "" if len(those) == 1 else f"at step {those[-1]['step']} "
        numbers += f"{at}: {reason} ({which}p = {_by_window(those[-1])}). "
    # a control that passes means that the test does not reject what it must
    passing = [r["kind"] for r in controls if r["compressible"]]
    listed = ", ".join(f"{_CONTROLS.get(r['kind'], r['kind'])} {r['p']:.2f}" for r in controls)
    numbers += f"Controls: {listed}"
    numbers += ": passes what it must reject!" if passing else ", rejected."
    return Verdict(headline, numbers, bool(passing))


def _ranks(record: Mapping[str, Any]) -> str:
    """Return the window of a record of a decay in words."""
    first, last = map(int, record["window"].split("-"))
    return f"of the largest {last:,}" if first == 1 else f"of ranks {first:,} to {last:,}"


def _by_window(record: Mapping[str, Any]) -> str:
    """Return p by the last rank of the window, from a record of a decay."""
    shown = (
        f"{p:.2f} to rank {int(ranks.split('-')[1]):,}" for ranks, p in record["windows"].items()
    )
    return ", ".join(shown)


def _between(record: Mapping[str, Any], name: str) -> str:
    middle, low, high = (signed(record[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"
