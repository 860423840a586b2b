"""Questions of the first screen, and what their verdicts are asked with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradstats.analysis.advise import advice_for, optimizer_of, properties_of
from gradstats.analysis.rules import COUNTING, judged_rules
from gradstats.analysis.verdicts import (
    Verdict,
    closest_law,
    compressor_did,
    counting_rules,
    decay_shown,
    largest_tie,
    scale_moves,
    should_compress,
    sound_elements,
    spiky,
    tail_tests,
    tail_weight,
    uneven,
    which_rule,
)
from gradstats.primitives.ratio import target_count
from gradstats.report.measured import Measured
from gradstats.statistics.compressibility import control
from gradstats.statistics.pot import FEWEST
from gradstats.trace import Kind
from gradstats.trace.remote import asked_for
from gradstats.trace.sources import Source, TraceSource

__all__ = ["COUNTING", "QUESTIONS", "SHOULD", "Verdict", "argument_of", "missing_ranks", "should"]


def missing_ranks(measured: Measured) -> list[int]:
    """Return the ranks of the run that were not captured.

    Parameters
    ----------
    measured : Measured
        Measurements of a source.

    Returns
    -------
    list of int
        Ranks in ascending order; empty for a single gradient.
    """
    if not isinstance(measured.source, TraceSource):
        return []
    trace = measured.source.trace
    # a sharded gradient is read under one rank, and held by several
    return sorted({*range(trace.world_size)}.difference(*map(trace.shard_ranks, trace.ranks)))


def argument_of(source: Source) -> str:
    """Return what a command takes for a source.

    Parameters
    ----------
    source : Source
        A source that was opened.

    Returns
    -------
    str
        The path or address of a trace, the name of anything else.
    """
    return asked_for(source.trace.path) if isinstance(source, TraceSource) else source.name


def _of(records: Sequence[dict[str, Any]], kind: Kind) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == kind]


_TENTH = 0.1
"""Share of the elements that the tail is of."""


def should(measured: Measured, kind: Kind, advice: Sequence[str], client: Any = None) -> Verdict:
    """Ask whether to compress.

    Parameters
    ----------
    measured : Measured
        Measurements of a source.
    kind : Kind
        Kind of gradient that would be compressed.
    advice : sequence of str
        What plans for networks say of this source.
    client : distributed.Client, optional
        Cluster that does the work.
    """
    source = measured.source
    shares = {r["step"]: r["shares"] for r in _of(measured.energy, kind) if r["shares"]}
    tried, nonzero = None, 1.0
    # one step is enough: the sum over workers passes NaN on to all
    if not any(r["nonfinite"] for r in measured.ledger):
        of, properties = properties_of(source, {"client": client})
        tried = advice_for(of, properties, optimizer_of(source))
        nonzero = properties["nonzero"]
    return should_compress(
        argument_of(source),
        shares,
        {ratio: _even(source.numel, ratio) for ratio in next(iter(shares.values()), ())},
        tried=tried.verdict if tried else None,
        setting=tried.setting if tried else "",
        nonzero=nonzero,
        advice=advice,
        # ranks overflow at steps of their own, and a sum passes on what any of them has
        unsound=(_steps(measured, "nonfinite_at"), _steps(measured, "looked_at")),
    )


def _steps(measured: Measured, name: str) -> int:
    """Return the number of steps that a column of the ledger has, of any rank and kind."""
    return len({step for r in measured.ledger for step in r[name]})


def _even(numel: int, ratio: float) -> float:
    """Return the share of Σg² that the largest elements of a normal vector hold."""
    k = target_count(ratio, numel)
    # a standard normal vector has Σg² = numel
    return float(np.square(control("halfnorm", numel, (1, k))[1]).sum()) / numel


def _live(measured: Measured, kind: Kind) -> Verdict:
    return compressor_did(measured.live, measured.facts.get("compressor"), measured.source.numel)


def _data(measured: Measured, kind: Kind) -> Verdict:
    source, absent = measured.source, missing_ranks(measured)
    world = source.trace.world_size if isinstance(source, TraceSource) else 1
    ledger = _of(measured.ledger, kind)
    return sound_elements(ledger, source.numel, len(source.layers), absent, world)


def _spread(measured: Measured, kind: Kind) -> Verdict:
    numel, ratio = measured.source.numel, 0.01
    energy = [r for r in _of(measured.energy, kind) if ratio in r["shares"]]
    shares = {r["step"]: r["shares"][ratio] for r in energy}
    return uneven(shares, ratio, _even(numel, ratio) if shares else math.nan, numel)


def _tail(measured: Measured, kind: Kind) -> Verdict:
    ledger = _of(measured.ledger, kind)
    # zeros are left out of tails, as of the ledger's ties
    some = measured.source.numel - max(r["zeros"] for r in ledger)
    # ratios are of all elements, the tenth is of those that are not zero: alike where few are zero
    by_step = ((step, _designs(measured, kind, step)) for step in measured.shown)
    return tail_weight(
        _of(measured.tails, kind),
        _of(measured.peaks, kind),
        spike=spiky(ledger),
        layers=len(measured.source.layers),
        designs={step: designs[_TENTH] for step, designs in by_step if _TENTH in designs},
        tied=largest_tie(ledger) >= max(FEWEST, _TENTH * some),
    )


def _compressible(measured: Measured, kind: Kind) -> Verdict:
    return decay_shown(_of(measured.decay, kind), [r for r in measured.decay if r["step"] is None])


def _model(measured: Measured, kind: Kind) -> Verdict:
    step = measured.shown[-1]
    verdict = closest_law(_of(measured.laws, kind))
    rows = [r for r in _of(measured.fits, kind) if r["step"] == step]
    designs = _designs(measured, kind, step)
    return replace(verdict, numbers=f"{verdict.numbers} {tail_tests(rows, designs)}".strip())


def _designs(measured: Measured, kind: Kind, step: int) -> dict[float, float]:
    """Return the design effect of the elements beyond each ratio at a step, where it is known."""
    return {
        r["ratio"]: r["design"]
        # the design effect is the gradient's, the same in every rule's record
        for r in _of(measured.series, kind)
        if (r["rank"], r["step"], r["estimator"]) == (measured.rank, step, "exact")
        and math.isfinite(r["design"])
    }


def _threshold(measured: Measured, kind: Kind) -> Verdict:
    rows = _of(measured.series, kind)
    verdict = which_rule(judged_rules(rows))
    return replace(verdict, numbers=(verdict.numbers + counting_rules(rows)).strip())


def _training(measured: Measured, kind: Kind) -> Verdict:
    record = next((r for r in _of(measured.drift, kind) if r["quantity"] == "mean"), None)
    series = measured.training["mean"].sel(kind=kind, layer="all").isel(rank=0).dropna("step")
    zeros = measured.training["zero_fraction"].sel(kind=kind, layer="all").isel(rank=0)
    share = 1 - zeros.sel(step=series["step"]).values
    return scale_moves(
        record,
        series["step"].values.tolist(),
        series.values.tolist(),
        len(measured.steps),
        (float(share.min()), float(share.max())) if share.size else (1.0, 1.0),
    )


SHOULD = "Should I compress?"
"""The first question, which is answered once for a source."""
QUESTIONS: dict[str, Callable[[Measured, Kind], Verdict]] = {
    "What did the compressor do?": _live,
    "Is the data sound?": _data,
    "How uneven is it?": _spread,
    "How heavy is its tail?": _tail,
    "Is it compressible?": _compressible,
    "Which model is closest?": _model,
    "Which estimate hits k?": _threshold,
    "Does it move?": _training,
}
"""Questions that the first screen answers for every gradient, after whether to compress."""
