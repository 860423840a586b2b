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
from gradstats.cli.output import Table, analyse, emit, one_by_one
from gradstats.errors import InputError

__all__ = ["BY_STAGE", "QUALITY", "bench", "quality"]

QUALITY = Table(
    "Estimation quality k̂/k; low–high: 90 % of the gradients, all of fewer than 20; "
    "floor: 1.96/√k, for independent elements of a known law",
    (
        *("trace", "estimator", "ratio", "kind", "layer", "mean", "low", "high", "min", "max"),
        *("energy_error", "n", "floor"),
    ),
    ("trace", "kind"),
)
BY_STAGE = Table(
    "k̂/k stage by stage",
    (
        *("trace", "step", "rank", "kind", "layer", "estimator", "ratio", "stage"),
        *("asked", "got", "factor", "quality"),
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
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Compare how many elements thresholds keep with how many they should: k̂/k.

    Rules with a state (reuse, feedback, warm start, adaptive stages) see the captured steps in order, as if they were
    adjacent.
    """
    from gradstats.analysis import quality
    from gradstats.primitives.ratio import RATIOS
    from gradstats.thresholds import ESTIMATORS

    options = {name: {"stages": stages} for name in ESTIMATORS if "sidco" in name and stages}
    work = one_by_one(
        quality.stage_budget if by_stage else quality.quality,
        ratio or RATIOS,
        estimator or tuple(ESTIMATORS),
        options=options,
        per_layer=per_layer,
    )
    records = analyse("quality", source, work, steps=step, ranks=rank, kinds=kind, layers=layer)
    (BY_STAGE if by_stage else QUALITY).emit(records, format, output)


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
