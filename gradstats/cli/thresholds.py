"""How thresholds do: ``quality`` and ``bench``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradstats.cli.options import (
    EstimatorOption,
    FormatOption,
    KindOption,
    OutputOption,
    PerLayerOption,
    RankOption,
    RatioOption,
    SourceArgument,
    StepOption,
)
from gradstats.cli.output import analyse, emit
from gradstats.errors import InputError

__all__ = ["bench", "quality"]


def quality(
    source: SourceArgument,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Fixed number of stages of the sidco rules; adaptive if absent.", min=1),
    ] = None,
    per_layer: PerLayerOption = False,
    by_stage: Annotated[
        bool,
        typer.Option("--by-stage", help="Split the error of multi-stage rules over their stages."),
    ] = False,
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
    from gradstats.analysis.quality import quality as compare
    from gradstats.analysis.quality import stage_budget
    from gradstats.thresholds import ESTIMATORS

    options = {name: {"stages": stages} for name in ESTIMATORS if "sidco" in name and stages}
    replay = {
        "ratios": ratio or (0.1, 0.01, 0.001),
        "estimators": estimator or tuple(ESTIMATORS),
        "options": options,
        "per_layer": per_layer,
    }
    measure: Any = stage_budget if by_stage else compare
    records = analyse(
        "quality",
        source,
        lambda sources, **given: [r for s in sources for r in measure(s, **replay, **given)],
        steps=step,
        ranks=rank,
        kinds=kind,
    )
    if by_stage:
        columns = ["trace", "step", "rank", "kind", "layer", "estimator", "ratio", "stage"]
        columns += ["asked", "got", "factor", "quality"]
        title = "k̂/k stage by stage"
    else:
        columns = ["trace", "estimator", "ratio", "kind", "layer", "mean", "low", "high"]
        columns += ["min", "max", "energy_error", "n", "floor"]
        title = "Estimation quality k̂/k; low–high: 90 % of the gradients; floor: 1.96/√k"
    emit(records, format, output, columns=columns, title=title, group_by=("trace", "kind"))


def bench(
    numel: Annotated[
        list[int] | None, typer.Option("--numel", help="Elements (repeatable).")
    ] = None,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    threads: Annotated[
        list[int] | None,
        typer.Option("--threads", help="Threads (repeatable); 1 and all if absent."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 7,
    references: Annotated[
        bool, typer.Option(help="Also time torch.topk, torch.kthvalue, numpy.argpartition.")
    ] = True,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Time estimation with selection, against top-k and against one read of the data."""
    import os

    from gradstats.console import progress_bar
    from gradstats.primitives.ratio import target_count
    from gradstats.thresholds import ESTIMATORS
    from gradstats.thresholds.bench import bench as measure

    if repeats < 1 or any(n < 1 for n in numel or ()):
        raise InputError("numel and repeats must be at least 1")
    for r in ratio or ():
        target_count(r, 1)
    numels, ratios = numel or [260_000, 2_600_000, 26_000_000], ratio or [0.1, 0.01, 0.001]
    counts = threads or sorted({1, os.cpu_count() or 1})
    with progress_bar() as bar:
        task = bar.add_task("bench", total=len(numels) * len(ratios) * len(counts) * (repeats + 1))
        records = measure(
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
