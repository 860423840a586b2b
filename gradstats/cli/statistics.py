"""Commands about a gradient's distribution: ``fit``, ``compressibility``, ``pot`` and ``drift``."""

# Size: a third of its lines are options, of five commands that have most of them in common.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gradstats.cli.options import (
    EverythingOption,
    FormatOption,
    KindOption,
    LayerOption,
    MethodOption,
    ModelOption,
    OutputOption,
    PerLayerOption,
    QuantityOption,
    RankOption,
    RatioOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
    models_of,
)
from gradstats.cli.output import (
    MOST_ROWS,
    Records,
    Table,
    analyse,
    note,
    note_incomplete,
    note_statuses,
    one_by_one,
    user_options,
    worst_first,
)
from gradstats.errors import InputError
from gradstats.statistics.laws import LAWS

if TYPE_CHECKING:
    from gradstats.trace.sources import Source

__all__ = [
    "CHOICE",
    "CLOSEST",
    "DECAY",
    "DRIFT",
    "FITS",
    "PEAKS",
    "TAILS",
    "closest",
    "compressibility",
    "drift",
    "fit",
    "pot",
]

FITS = Table(
    "Fits; p tail: tests how many the model's threshold keeps at the smallest ratio (tail k would be right), as if "
    "elements were independent; visible: the smallest k̂/k − 1 that this test sees with probability 0.8",
    (
        *("trace", "step", "rank", "kind", "layer", "model", "params"),
        *("delta_aic", "ks", "tail_error", "p_tail", "tail_k", "visible"),
    ),
    ("trace", "kind"),
)
CLOSEST = Table(
    "The nearest model, fitted at the steps shown; its errors are those on the data that it was fitted to; tail error: "
    "the largest at ratios down to 0.0001",
    (
        *("trace", "step", "rank", "kind", "layer", "model", "method", "params", "ks"),
        "tail_error",
    ),
)
DECAY = Table(
    "Decay of sorted magnitudes like rank^(−p), 95 % intervals: of independent elements, and by runs of neighbours; "
    "hill, σ p: p by Hill's estimate and by the error of the best k",
    (
        *("trace", "step", "rank", "kind", "p", "p_low", "p_high", "runs_low", "runs_high"),
        *("compressible", "hill", "sigma_p", "window"),
    ),
    (),
)
PEAKS = Table(
    "Peaks over threshold: the shape ξ of what the n largest exceed the threshold by; 0 is an exponential tail, above "
    "0 a heavier one. 95 % intervals: of independent elements, and of those that are large together, by runs of "
    "neighbours",
    (
        *("trace", "step", "rank", "kind", "ratio", "threshold", "n", "mean_excess"),
        *("c", "c_low", "c_high", "runs_low", "runs_high", "scale"),
    ),
    ("trace", "kind", "step"),
)
CHOICE = Table(
    "Peaks over threshold, 95 % intervals; p: that 1000 of the excesses are generalized Pareto, a test that misses "
    "small misfits; p stable: of one ξ from there on",
    (
        *("trace", "step", "rank", "kind", "ratio", "threshold", "n", "mean_excess"),
        *("c", "c_low", "c_high", "scale", "p_value", "p_stable", "chosen"),
    ),
    ("trace", "kind", "step"),
)
TAILS = Table(
    "Tail shapes ξ by layer, from n excesses, 95 % intervals; p: of ξ = 0, corrected (Holm) for the number of layers",
    ("trace", "step", "rank", "kind", "layer", "n", "c", "c_low", "c_high", "p_holm"),
    ("trace", "kind", "step"),
)
DRIFT = Table(
    "Drift over n steps; slope: change per 100 steps, relative for positive quantities; acf1: correlation of "
    "successive steps; change: a step's value ÷ the last one's, of others minus it",
    (
        *("trace", "quantity", "kind", "layer", "n", "low", "high", "slope"),
        *("acf1", "change_low", "change_high"),
    ),
    ("trace", "kind"),
)


_OF: tuple[Any, ...] = ("step", "rank", "kind")
_MOST_STEPS = 6
"""Steps by which the closest law is judged: one of each stretch of equal length."""


def fit(  # numpydoc ignore=PR01
    source: SourceArgument,
    model: ModelOption = None,
    method: MethodOption = None,
    per_layer: PerLayerOption = False,
    layer: LayerOption = None,
    bootstrap: Annotated[
        int,
        typer.Option(help="Replicates of the parametric bootstrap behind p; 0: no test.", min=0),
    ] = 0,
    size: Annotated[int, typer.Option(help="Elements of the subsample tested.", min=2)] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the subsample.", min=0)] = 0,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit symmetric distributions, and show which is closest to the data.

    The table has the model that is nearest, fitted at the last step, or at those of --step. tail error: largest
    |ln η_model/η_exact| at ratios from 0.1 to 0.0001; ks: Kolmogorov distance. --all, --bootstrap and the other formats
    have every model, and p tail: of the number of elements that the model's threshold keeps at the smallest ratio in
    use; JSON and CSV every distance, standard errors and k̂/k, too.
    """
    from gradstats.analysis import fits

    brief = format == "table" and not everything
    work = one_by_one(
        fits.fit_records,
        models_of(model),
        method=method,
        replicates=bootstrap,
        size=size,
        seed=seed,
        per_layer=per_layer,
    )
    records = analyse(
        "fitting",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
        last=brief,
    )
    table = FITS
    if brief and not bootstrap:
        answers, named = _closest_laws(records, source, models_of(model), method, step, rank, kind)
        best_fits = closest(records)
        # with --layer the question is about these layers, each with its own nearest law
        named = [] if layer else named
        whole = {(r["trace"], r["kind"]) for r in named}
        judged = {(r["trace"], r["kind"]) for r in best_fits if r["layer"] != "all"}
        # a law by layer has a row of each, unless each layer's own nearest is asked for
        named = [r for r in named if r["layer"] == "all" or (r["trace"], r["kind"]) not in judged]
        best_fits = [
            r for r in best_fits if r["layer"] != "all" or (r["trace"], r["kind"]) not in whole
        ]
        shown = worst_first(named + best_fits, "tail_error")
        by_layer = any(r["layer"] != "all" for r in shown)
        which = "; of a layer the model of the smallest tail error" if judged and by_layer else ""
        which += "; worst layers first" if by_layer else ""
        replace(CLOSEST, title=CLOSEST.title + which).emit(shown, format, output, answers)
        _note_rest(records, shown)
        note_statuses(records, format, "model")
        return
    if bootstrap:
        test = f"; p of {bootstrap} refitted replicates of {size} elements, Kolmogorov's distance: of the body"
        table = FITS.extended(test, "p_value", "subsample")
    if format not in ("json", "csv", "parquet"):  # whose names are SciPy's
        table.emit([r | {"params": _symbols(r)} for r in records], format, output)
    else:
        table.emit(records, format, output)
    note_statuses(records, format, "model")
    layers = len({r["layer"] for r in records if r["layer"] != "all"})
    if bootstrap and layers > 1 and bootstrap < (fewest := fits.fewest_replicates(layers)):
        note(
            f"{bootstrap} replicates cannot reject anything at 5 % among {layers} layers (Holm): it takes {fewest:,}"
        )


def _closest_laws(
    records: Records,
    source: Path,
    models: list[str] | Literal["all"] | None,
    method: str | None,
    steps: list[int] | None,
    ranks: list[int] | None,
    kinds: list[str] | None,
) -> tuple[list[str], Records]:
    """Return which law is closest to each trace and kind, in sentences, and the fits of that law."""
    from gradstats.analysis.closest import closest_laws, law_pairs
    from gradstats.analysis.verdicts import closest_law, named_law
    from gradstats.trace.sources import matching, open_sources

    answers: list[str] = []
    named = Records()
    chosen: dict[str, Any] = {"steps": steps, "kinds": kinds}  # the options have checked them
    for each in matching(open_sources(source), ranks=ranks, **chosen):
        held = {rank for rank, _, _ in each.select()}
        one = ranks or [min(held)]
        of = f", rank {one[0]} of {len(held)}" if not ranks and len(held) > 1 else ""
        way: Any = method
        pairs = law_pairs(each, models, method=way, ranks=one, most=_MOST_STEPS, **chosen)
        laws = closest_laws(pairs)
        for kind in dict.fromkeys(kind for _, kind, _ in each.select()):
            if kinds and kind not in kinds:
                continue
            judged = [r for r in laws if r["kind"] == kind]
            answers.append(f"{each.name}, {kind}{of}: {closest_law(judged)}")
            here = [r for r in records if (r["trace"], r["kind"]) == (each.name, kind)]
            law, _ = named_law(judged)
            named += _fits_of(law, here, each) if law else closest(here)
    return answers, named


def _fits_of(law: Mapping[str, Any], records: Records, source: Source) -> Records:
    """Return the fits of a law to the gradients of some records: those of the records, where they have them."""
    from gradstats.analysis.fits import fit_records

    fits = [r for r in records if all(r[name] == law[name] for name in ("model", "method"))]
    if law["by_layer"] or not fits:
        over: dict[str, Any] = {
            f"{name}s": list(dict.fromkeys(r[name] for r in records)) for name in _OF
        }
        fits = fit_records(
            source, [law["model"]], method=law["method"], per_layer=law["by_layer"], **over
        )
    # a law by layer shows layers only, another one the whole gradient only
    return [r | {"params": _symbols(r)} for r in fits if (r["layer"] == "all") != law["by_layer"]]


def _symbols(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the parameters of a fit by the letters that papers give them."""
    symbols = LAWS[record["model"]].symbols
    return {symbols.get(name, name): value for name, value in record["params"].items()}


def closest(records: Records) -> Records:
    """Return one record for each gradient and layer: the model with the smallest tail error on its own data.

    Parameters
    ----------
    records : list of dict
        Records of :func:`gradstats.analysis.fits.fit_records`.

    Returns
    -------
    list of dict
        Records of these models, with ``model`` ``none`` where none has a fit.
    """
    groups: dict[tuple[Any, ...], Records] = {}
    for record in records:
        key = tuple(record[label] for label in ("trace", "step", "rank", "kind", "layer"))
        groups.setdefault(key, []).append(record)
    best_fits = []
    for group in groups.values():
        # of the smallest layers tail errors are not known
        best = min(group, key=lambda r: tuple((isnan(r[n]), r[n]) for n in ("tail_error", "ks")))
        name = best["model"] if not isnan(best["ks"]) else "none"
        best_fits.append(best | {"model": name, "params": _symbols(best)})
    return best_fits


def _note_rest(records: Records, shown: Records) -> None:
    """Say what a summary leaves out."""
    if (rows := len(records)) > len(shown):
        note(f"{len(shown)} of {rows} rows; --all has every step, model and layer.")


def compressibility(  # numpydoc ignore=PR01
    source: SourceArgument,
    window: Annotated[
        str | None,
        typer.Option(help="Ranks FIRST:LAST to look at; by default the largest hundredth."),
    ] = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Check the power-law decay of the sorted magnitudes, and of controls that have none.

    The table has the first and the last step of every kind; --all and the other formats have all steps.
    compressible: yes only where all windows, Hill's estimate and the error of keeping the k largest agree, and a power
    law is likelier than a log-normal; – where not; JSON and CSV have the reason. sigma p: exponent with which that
    error falls; a power law gives about p − ½.
    """
    from collections import Counter

    from gradstats.analysis import decay

    limits = _window(window)
    records = analyse(
        "decay",
        source,
        lambda sources, **over: decay.compressibility_records(sources, limits, **over),
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
    )
    if format == "table" and not everything:
        shown, answers = _ends(records)
        DECAY.emit(shown, format, output, answers)
        _note_rest(records, shown)
        return
    DECAY.emit(records, format, output)
    if format == "table":
        taken = [r for r in records if r["trace"] != "control"]
        undecided = Counter(r["reason"] for r in taken if r["compressible"] is None)
        for reason, n in undecided.items():
            note(f"compressible –, {n} of {len(taken)}: {reason}")
        for reason, n in Counter(r["dependence"] for r in taken if r["dependence"]).items():
            note(f"runs –, {n} of {len(taken)}: {reason}")


def _ends(records: Records) -> tuple[Records, list[str]]:
    """Return the first and the last step of each gradient and the controls, and what all steps show, in sentences."""
    from gradstats.analysis.verdicts import decay_shown

    controls = [r for r in records if r["trace"] == "control"]
    gradients: dict[tuple[Any, ...], Records] = {}
    for record in records:
        if record["trace"] != "control":
            key = tuple(record[name] for name in ("trace", "rank", "kind"))
            gradients.setdefault(key, []).append(record)
    several = len({rank for _, rank, _ in gradients}) > 1
    shown, answers = [], []
    for (trace, rank, kind), each in [*gradients.items()][:MOST_ROWS]:
        shown += each if len(each) < 3 else [each[0], each[-1]]
        of = f", rank {rank}" if several else ""
        answers.append(f"{trace}, {kind}{of}: {decay_shown(each, controls)}")
    return shown + controls, answers


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"a window is two ranks like 1:1000, not {text!r}") from None
    return first, last


def pot(  # numpydoc ignore=PR01
    source: SourceArgument,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", help="Share of the non-zero elements beyond a threshold (repeatable)."
        ),
    ] = None,
    method: MethodOption = "mle",
    choose: Annotated[
        int,
        typer.Option(help="Replicates of the tests that choose a threshold; 0: no choice.", min=0),
    ] = 0,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Show one tail, at the first ratio or 0.1, instead: pooled, normalised and by layer.",
        ),
    ] = False,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit the peaks over a series of thresholds: how heavy the tail is, and where it begins.

    ξ (c in the other formats): shape of the generalized Pareto distribution of what exceeds a threshold u, above 0 a
    heavy tail. σ − ξu (scale): its scale, reduced to the threshold 0. Both stay the same from a good threshold on.
    The table has the last step, or those of --step, and the heaviest layers; --all and the other formats have all.
    """
    from gradstats.analysis import peaks

    by_layer = bool(layers or layer)
    if by_layer and choose:
        raise InputError(
            "a threshold is chosen for the whole gradient: leave out --choose, or --layers and --layer"
        )
    table = TAILS if by_layer else CHOICE if choose else PEAKS
    work = one_by_one(peaks.pot, ratio, method=method, replicates=choose, per_layer=by_layer)
    brief = format == "table" and not everything
    records = analyse(
        "peaks",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
        last=brief,
    )
    shown = records
    if brief and by_layer:
        shown = worst_first(records, "c", ("pooled", "normalised"))
        table = replace(table, title=f"{table.title}; heaviest first")
    table.emit(shown, format, output)
    _note_rest(records, shown)
    note_statuses(records, format, "layer" if by_layer else "ratio")
    if choose and not by_layer and format == "table":
        _note_choices(records)


def _note_choices(records: Iterable[dict[str, Any]]) -> None:
    """Say of every gradient which threshold was chosen, and what each random split of its elements chooses."""
    gradients: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        if r.get("splits"):
            gradients.setdefault((r["trace"], r["kind"], r["step"], r["rank"]), []).append(r)
    for (trace, kind, step, rank), rows in gradients.items():
        by = {f"{r['ratio']:g}": r["chosen_by"] for r in rows if r["chosen_by"]}
        # splits in which no threshold passed the tests
        if none := rows[0]["splits"] - sum(by.values()):
            by["none"] = none
        chosen = next((r for r in rows if r["chosen"]), None)
        answer = f"{chosen['ratio']:g}" if chosen else "none"
        text = f"{trace}, {kind}, step {step}, rank {rank}: chosen {answer}, the median\n"
        text += "  random splits choose " + ", ".join(
            f"{ratio} ({n} of {rows[0]['splits']})" for ratio, n in by.items()
        )
        if chosen:
            text += (
                f"\n  ξ = {chosen['unseen_c']:.3f} ({chosen['unseen_c_low']:.3f} to {chosen['unseen_c_high']:.3f}) "
                f"by the {chosen['unseen_n']:,} excesses that the choice did not see"
            )
        note(text)


def drift(  # numpydoc ignore=PR01
    source: SourceArgument,
    quantity: QuantityOption = None,
    model: ModelOption = None,
    ratio: RatioOption = None,
    per_layer: PerLayerOption = False,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Quantify how a gradient moves over training: trend, memory, step-to-step change.

    First what changed from the first step to the last, by a fitted line with its 95 % interval. low–high: 90 % of steps
    and ranks, all of them below twenty. slope: relative change per 100 steps (JSON and CSV have its interval, which is
    not given near a unit root). acf1: autocorrelation of lag one. change: 1 % and 99 % quantiles of a step's value over
    the last one's, or minus it if not all are positive. These take twenty steps: capture sketches of every step
    (gradstats capture --store sketches --every 1).
    """
    from gradstats.analysis import drift
    from gradstats.analysis.verdicts import movement

    asked = user_options(quantities=quantity, models=models_of(model), ratios=ratio)
    work = one_by_one(drift.drift, **asked, per_layer=per_layer)
    records = analyse(
        "measuring",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
    )
    whole = [r for r in records if r["layer"] == "all"]
    # the first record of each trace and kind, in the order of the table
    firsts = {(r["trace"], r["kind"]): r for r in reversed(whole)}
    several = len({trace for trace, _ in firsts}) > 1
    answers = [
        f"{trace}, " * several + f"{k}: {movement(r)}" for (trace, k), r in reversed(firsts.items())
    ]
    DRIFT.emit(records, format, output, answers)
    if format != "table":
        return
    note_incomplete([r["incomplete"] for r in records])
    few = [r for r in records if r["n"] < drift.FEWEST_STEPS]
    if not few:
        return
    take = f"Trend, autocorrelation and change take {drift.FEWEST_STEPS} steps, and "
    # steps without such a number, as of a layer of zeros, were captured all the same
    captured = max(r["n"] + r["without"] + r["incomplete"] for r in records)
    if captured < drift.FEWEST_STEPS:
        note(
            f"{take}here are {captured}: capture sketches of every step (gradstats capture --store sketches --every 1)."
        )
        return
    have = "has" if len(few) == 1 else "have"
    rows = "row" if len(records) == 1 else "rows"
    note(f"{take}{len(few)} of {len(records)} {rows} {have} fewer with such a number.")
