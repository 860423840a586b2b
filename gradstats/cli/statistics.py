"""What a gradient is like: ``fit``, ``compressibility``, ``pot`` and ``drift``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradstats.cli.options import (
    FormatOption,
    KindOption,
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
)
from gradstats.cli.output import Records, analyse, emit, note_statuses
from gradstats.errors import InputError

__all__ = ["compressibility", "drift", "fit", "pot"]


def fit(
    source: SourceArgument,
    model: ModelOption = None,
    method: MethodOption = None,
    per_layer: PerLayerOption = False,
    bootstrap: Annotated[
        int,
        typer.Option(help="Replicates of a parametric bootstrap for a p-value; 0: none.", min=0),
    ] = 0,
    size: Annotated[int, typer.Option(help="Elements of the subsample it tests.", min=2)] = 2000,
    seed: Annotated[int, typer.Option(help="Of the subsample.", min=0)] = 0,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit symmetric distributions and measure their distance from the data.

    ks: Kolmogorov distance; wasserstein: relative to the mean magnitude; tail error: largest |ln η_model/η_exact| at
    ratios from 0.1 to 0.0001. JSON and CSV have all distances, standard errors and k̂/k.
    """
    from gradstats.analysis.fits import fit_records

    options: dict[str, Any] = {"method": method, "per_layer": per_layer}
    options |= {"replicates": bootstrap, "size": size, "seed": seed}
    records = analyse(
        "fitting",
        source,
        lambda sources, **given: [
            r for s in sources for r in fit_records(s, _chosen(model), **options, **given)
        ],
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
    )
    columns = ["trace", "step", "rank", "kind", "layer", "model", "params", "ks", "wasserstein"]
    columns += ["tail_error", *(["p_value", "p_naive"] if bootstrap else [])]
    title = "Fits"
    if bootstrap:
        title += f"; p of {bootstrap} refitted replicates of {size} elements, Kolmogorov's distance"
    emit(records, format, output, columns=columns, title=title, group_by=("trace", "kind"))
    note_statuses(records, format, "model")


def _chosen(names: list[str] | None) -> list[str]:
    """Return the models asked for; the sparsity-inducing ones if none is."""
    from gradstats.statistics.distributions import SIDS
    from gradstats.statistics.fitting import MODELS

    return list(MODELS) if "all" in (names or ()) else list(names or SIDS)


def compressibility(
    source: SourceArgument,
    window: Annotated[
        str | None,
        typer.Option(help="Ranks FIRST:LAST to look at; the largest hundredth if absent."),
    ] = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Check the power-law decay of the sorted magnitudes, beside controls that have none.

    sigma p: how fast the error of keeping the k largest falls; a power law promises p − ½.
    """
    from gradstats.analysis.decay import compressibility_records

    limits = _window(window)
    records = analyse(
        "decay",
        source,
        lambda sources, **given: compressibility_records(sources, limits, **given),
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
    )
    columns = ["trace", "step", "rank", "kind", "p", "p_low", "p_high", "compressible"]
    columns += ["hill", "sigma_p", "window"]
    title = "Decay of sorted magnitudes, 95 % intervals"
    emit(records, format, output, columns=columns, title=title, group_by=())


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"a window is two ranks like 1:1000, not {text!r}") from None
    return first, last


def pot(
    source: SourceArgument,
    ratio: Annotated[
        list[float] | None,
        typer.Option("--ratio", help="Of the non-zero elements beyond a threshold (repeatable)."),
    ] = None,
    method: MethodOption = "mle",
    choose: Annotated[
        int, typer.Option(help="Replicates of the tests that choose a threshold; 0: none.", min=0)
    ] = 0,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Instead: the tail at 0.1 pooled, normalised and by layer."),
    ] = False,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit the peaks over a series of thresholds: how heavy is the tail, and from where on.

    c: generalized Pareto shape ξ, above 0 a heavy tail; scale: σ − cu, which with c stays the same from a good
    threshold on.
    """
    from gradstats.analysis.peaks import mixture_records, pot_records

    options: dict[str, Any] = {"method": method}
    columns = ["trace", "step", "rank", "kind"]
    if layers:
        measure: Any = mixture_records
        options["at"] = ratio[0] if ratio else 0.1
        columns += ["layer", "n", "c", "c_low", "c_high"]
        title = "Tail shapes by layer"
    else:
        measure = pot_records
        options |= {"ratios": ratio, "replicates": choose}
        columns += ["ratio", "threshold", "n", "mean_excess", "c", "c_low", "c_high", "scale"]
        title = "Peaks over threshold, 95 % intervals"
        if choose:
            columns += ["p_value", "chosen"]
            title += "; p: of 1000 excesses each, and what they cannot show stays"

    def work(sources: Any, **given: Any) -> Records:
        return [r for s in sources for r in measure(s, **options, **given)]

    records = analyse(
        "peaks", source, work, scheduler=scheduler, steps=step, ranks=rank, kinds=kind
    )
    emit(records, format, output, columns=columns, title=title, group_by=("trace", "kind", "step"))
    note_statuses(records, format, "layer" if layers else "ratio")


def drift(
    source: SourceArgument,
    quantity: QuantityOption = None,
    model: ModelOption = None,
    ratio: RatioOption = None,
    per_layer: PerLayerOption = False,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Quantify how a gradient moves over training: trend, memory, step-to-step change.

    low–high: 90 % of steps and ranks. slope: relative change per 100 steps (JSON and CSV have its Newey-West interval).
    acf1: autocorrelation of lag one. change: 1 % and 99 % quantiles of a step's value over the last one's. It takes
    twenty steps; sketches of every step are made for this (gradstats capture --store sketches --every 1).
    """
    from gradstats.analysis.drift import drift_records, over_training

    def work(sources: Any, **given: Any) -> Records:
        records = []
        for s in sources:
            dataset = over_training(
                s,
                models=_chosen(model),
                ratios=ratio or (0.1, 0.01, 0.001),
                per_layer=per_layer,
                **given,
            )
            records += [{"trace": s.name} | r for r in drift_records(dataset, quantity or ())]
        return records

    records = analyse(
        "measuring", source, work, scheduler=scheduler, steps=step, ranks=rank, kinds=kind
    )
    columns = ["trace", "quantity", "kind", "layer", "n", "low", "high", "slope"]
    columns += ["acf1", "change_low", "change_high"]
    title = "Drift over training"
    emit(records, format, output, columns=columns, title=title, group_by=("trace", "kind"))
