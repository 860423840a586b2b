"""Commands about thresholds: ``quality`` and ``bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from gradstats.cli.options import (
    EstimatorOption,
    FormatOption,
    KindOption,
    LayerOption,
    OutputOption,
    PerLayerOption,
    RankOption,
    RatioOption,
    SourceArgument,
    StepOption,
)
from gradstats.cli.output import Table, analyse, emit, note, one_by_one
from gradstats.errors import InputError

__all__ = ["BY_STAGE", "DIFFERENCES", "QUALITY", "bench", "quality"]

QUALITY = Table(
    "Estimation quality k̂/k; low–high: 90 % of the gradients, all of fewer than 20; "
    "floor: 1.96/√k, for independent elements of a known law; floor fitted: of a Laplace fitted to the same elements; "
    "in clusters of ten both are 3.2 times as wide",
    (
        *("trace", "estimator", "ratio", "kind", "layer", "mean", "low", "high", "min", "max"),
        *("energy_error", "n", "floor", "floor_fitted"),
    ),
    ("trace", "kind"),
)
BY_STAGE = Table(
    "k̂/k stage by stage; factor: share got over share asked; blame: the stage whose factor is farthest from 1",
    (
        *("trace", "step", "rank", "kind", "layer", "estimator", "ratio", "stage"),
        *("asked", "got", "factor", "quality", "blame"),
    ),
    ("trace", "kind"),
)
DIFFERENCES = Table(
    "k̂/k minus that of another rule, step by step, 95 % intervals; error: of |k̂/k − 1|, below 0 is closer to k",
    (
        *("trace", "estimator", "versus", "ratio", "kind", "layer", "n"),
        *("difference", "difference_low", "difference_high"),
        *("error", "error_low", "error_high", "p_holm"),
    ),
    ("trace", "kind"),
)
_NUMELS = (260_000, 2_600_000, 26_000_000)


def quality(  # numpydoc ignore=PR01
    source: SourceArgument,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Number of stages of the sidco rules; adaptive by default.", min=1),
    ] = None,
    per_layer: PerLayerOption = False,
    by_stage: Annotated[
        bool,
        typer.Option("--by-stage", help="Split the error of multi-stage rules over their stages."),
    ] = False,
    versus: Annotated[
        str | None,
        typer.Option(help="Compare the rules with this one, step by step, instead."),
    ] = None,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Compare how many elements thresholds keep with how many they should: k̂/k.

    Rules with a state (reuse, feedback, warm start, adaptive stages) see the captured steps in order, as if they were
    adjacent. From twenty steps on the mean has a 95 % interval, by blocks of neighbouring steps.
    """
    from math import isfinite

    from gradstats.analysis import quality
    from gradstats.primitives.ratio import RATIOS
    from gradstats.thresholds import ESTIMATORS

    options = {name: {"stages": stages} for name in ESTIMATORS if "sidco" in name and stages}
    if by_stage and versus:
        raise InputError("--by-stage and --versus are two tables: ask for one of them")
    table, records_of = QUALITY, quality.quality
    if by_stage:
        table, records_of = BY_STAGE, quality.stage_budget
    elif versus:
        table, records_of = DIFFERENCES, quality.quality_series
    names = list(dict.fromkeys([*(estimator or ESTIMATORS), *([versus] if versus else [])]))
    work = one_by_one(records_of, ratio or RATIOS, names, options=options, per_layer=per_layer)
    records = analyse("quality", source, work, steps=step, ranks=rank, kinds=kind, layers=layer)
    if versus:
        records = quality.differences(records, versus)
    elif not by_stage and any(isfinite(r["mean_low"]) for r in records):
        intervals = "; mean low–high: 95 % interval of the mean, by blocks of steps"
        table = QUALITY.extended(intervals, "mean_low", "mean_high")
    table.emit(records, format, output)
    if versus and format == "table":
        for status in dict.fromkeys(r["status"] for r in records if r["status"] != "ok"):
            note(f"no interval: {status}")


def bench(  # numpydoc ignore=PR01
    numel: Annotated[
        list[int] | None, typer.Option("--numel", help="Elements of the gradient (repeatable).")
    ] = None,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    threads: Annotated[
        list[int] | None,
        typer.Option("--threads", help="Number of threads (repeatable); by default 1 and all."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of measurement; medians are shown.")] = 7,
    references: Annotated[
        bool, typer.Option(help="Time torch.topk, torch.kthvalue and numpy.argpartition, too.")
    ] = True,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Time estimation and selection, and compare with top-k and with one read of the data."""
    import os

    from gradstats.console import progress_bar
    from gradstats.primitives.ratio import RATIOS, check_ratio
    from gradstats.thresholds import ESTIMATORS, bench

    if repeats < 1 or any(n < 1 for n in numel or ()):
        raise InputError("numel and repeats must be at least 1")
    numels, ratios = numel or _NUMELS, [check_ratio(r) for r in ratio or RATIOS]
    counts = threads or sorted({1, os.cpu_count() or 1})
    with progress_bar() as bar:
        task = bar.add_task("bench", total=len(numels) * len(ratios) * len(counts) * (repeats + 1))
        records = bench.bench(
            numels,
            ratios,
            estimators=estimator or tuple(ESTIMATORS),
            threads=counts,
            repeats=repeats,
            references=references,
            on_progress=lambda: bar.advance(task),
        )
    emit(
        records,
        format,
        output,
        columns=list(records[0]),
        title="Estimation + selection; streams: times torch.sum of the same data",
        group_by=("threads", "numel"),
    )
