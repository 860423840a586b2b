"""The commands that compare: two runs with each other, and the ranks of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from gradstats.cli.options import (
    EverythingOption,
    FormatOption,
    KindOption,
    LayerOption,
    OutputOption,
    PerLayerOption,
    RankOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
)
from gradstats.cli.output import Table, analyse, note, note_incomplete, one_by_one

__all__ = ["agreement", "compare"]

COMPARE = Table(
    "B against A; signs: share that agrees; error: ‖B − A‖ ÷ ‖A‖",
    ("step", "rank", "kind", "layer", "scale", "cosine", "error", "signs", "cause"),
    group_by=(),
)
AGREEMENT = Table(
    "Ranks against each other (no step: over all steps). signs: share that agrees; overlap: of two ranks' largest k; "
    "union: positions that --workers would select together, ÷ k; explained: share of the squared norm that their mean "
    "has; noise scale: about the batch beyond which a larger one brings little (inf: no common signal is seen)",
    (
        *("step", "kind", "layer", "cosine", "signs", "overlap", "union", "explained"),
        *("noise_scale", "low", "high", "union_low", "union_high"),
        *("cosine_low", "cosine_high", "overlap_low", "overlap_high"),
    ),
    group_by=("trace", "kind"),
)


def compare(  # numpydoc ignore=PR01
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="A trace or a gradient file.", show_default=False),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    per_layer: PerLayerOption = False,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="File of the model's parameters: tells weight decay in the first step.",
            metavar="FILE",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Relative error up to which gradients are the same.")
    ] = 1e-5,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Compare two runs, step by step and layer by layer: by what they differ, and the likely cause.

    scale: norm of B over norm of A; error: norm of B − A over norm of A; signs: share of elements of the same sign. The
    cause is a guess that fits the numbers: world size, accumulation, clipping, loss scale, weight decay, a step too
    late, a missing all-reduce, a rank missing or twice, other ranks or places, a shorter type, other data. It may be
    not known.
    """
    from gradstats.analysis.compare import compare
    from gradstats.analysis.pieces import connect
    from gradstats.console import progress_bar
    from gradstats.trace import Kind

    with connect(scheduler) as client, progress_bar() as bar:
        task = bar.add_task("comparing", total=None)
        comparison = compare(
            a,
            b,
            steps=step,
            ranks=rank,
            kinds=cast("list[Kind] | None", kind),
            layers=layer,
            per_layer=per_layer,
            weights=weights,
            tolerance=tolerance,
            client=client,
            on_progress=lambda: bar.advance(task),
        )
    COMPARE.emit(
        comparison, format, output, [comparison.verdict[0].upper() + comparison.verdict[1:] + "."]
    )
    if format == "table":
        for name, only in zip((a, b), comparison.unmatched, strict=True):
            if only:
                note(f"only in {name}: {', '.join(only[:5])}{', …' if len(only) > 5 else ''}")


def agreement(  # numpydoc ignore=PR01
    source: SourceArgument,
    ratio: Annotated[
        float, typer.Option(help="Kept fraction k/d of the selections compared.")
    ] = 0.001,
    workers: Annotated[
        int | None,
        typer.Option(help="Workers to predict the union for; twice the ranks by default.", min=1),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples in a rank's batch, where the trace does not say.", min=1),
    ] = None,
    per_layer: PerLayerOption = False,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Compare the ranks of a run: do workers agree, and how large a batch would pay.

    overlap: share of a rank's top k that another has; union: what the workers select together ÷ k, with bounds that
    need no model; explained: share of the squared norm that the mean over ranks has; noise scale: an estimate of the
    critical batch size, of ranks whose samples are independent, with its 95 % interval from 20 steps on, as cosine
    and overlap have them. A sentence above the table says whether a larger batch would pay.
    """
    from gradstats.analysis.agreement import agreement
    from gradstats.analysis.verdicts import batch_sentence

    work = one_by_one(agreement, ratio=ratio, workers=workers, batch=batch, per_layer=per_layer)
    records = analyse(
        "comparing",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
    )
    # a larger batch is a question about the whole gradient, over all steps
    answers = [
        f"{each['trace']}: {batch_sentence(each)}."
        for each in records
        if each["step"] is None and (each["kind"], each["layer"]) == ("gradient", "all")
    ]
    brief = format == "table" and not everything
    shown = [r for r in records if r["step"] is None] if brief else records
    AGREEMENT.emit(shown, format, output, answers)
    if format != "table" or not records:
        return
    if len(shown) < len(records):
        note(f"{len(shown)} of {len(records)} rows, over all steps; --all has every step.")
    note_incomplete([max(r["incomplete"] for r in records)], numbers=False)
    known = records[0]["batch"]
    unit = "samples" if known else "batches of one rank (--batch says how many samples they have)"
    note(f"noise scale in {unit}; union of {records[0]['workers']} workers, k = {ratio:g} d")
    for reason in dict.fromkeys(r["reason"] for r in records if r["step"] is None and r["reason"]):
        note(f"no interval: {reason}")
    note(
        "noise that ranks share (the same samples, an augmentation) makes the noise scale too small, unseen"
    )
