"""Commands about the bits that numbers take: ``wire`` and ``delta``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

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
    one_of,
)
from gradstats.cli.output import MOST_ROWS, Records, Table, analyse, note, user_options

if TYPE_CHECKING:
    from gradstats.primitives.deltas import WeightType

__all__ = ["DELTA", "SIZES", "SMALLEST", "WIRE", "delta", "wire"]

WIRE = Table(
    "Number formats; bits: an element, with scales; error: ‖q − g‖²/‖g‖²; bias: ⟨q − g, g⟩/‖g‖²; zeros, saturated: "
    "shares of the numbers that are not zero; rotation: size of its blocks",
    (
        *("trace", "kind", "layer", "ranks", "format", "scale", "rounding", "rotation", "bits"),
        *("error", "bias", "cosine", "zeros", "saturated", "dropped"),
    ),
    ("trace", "kind", "layer", "ranks"),
)
SMALLEST = Table(
    "The smallest format of each layer whose error stays below the limit; ranks: how many are summed",
    (
        *("trace", "kind", "layer", "numel", "format", "scale", "bits", "error", "worst"),
        *("rounding", "rotation", "ranks"),
    ),
    ("trace", "kind"),
)
DELTA = Table(
    "What changed, by lag; predicted: what a law of the update says of bf16, or of fp16 as dtype; update ÷ weight: of "
    "norms",
    (
        *("dtype", "lag", "layer", "numel", "changed", "changed_bf16", "changed_fp8", "predicted"),
        *("rows", "update_to_weight", "law"),
    ),
    (),
)
SIZES = Table(
    "Bytes of the changes, and of the later checkpoint; entropy: what byte-wise coders of the XOR cannot go below",
    (
        *("dtype", "lag", "layer", "bytes", "bytes_bitmap", "bytes_gaps", "bytes_rice"),
        *("bytes_xor", "entropy"),
    ),
    (),
)


def _formats() -> Sequence[str]:
    from gradstats.primitives.formats import FORMATS

    return tuple(FORMATS)


def _roundings() -> Sequence[str]:
    from gradstats.analysis.wire import Rounding

    return get_args(Rounding)


def _scales() -> Sequence[str]:
    from gradstats.analysis.wire import Scale

    return get_args(Scale)


def _types() -> Sequence[str]:
    from gradstats.primitives.deltas import WeightType

    return get_args(WeightType)


def wire(  # numpydoc ignore=PR01
    source: SourceArgument,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            help="Number format (repeatable): bf16, fp16, e4m3, e5m2, int8, int4, int2, mxfp8, mxfp6, mxfp4, nvfp4 "
            "(these by default), mxfp8-e5m2, mxfp6-e3m2.",
            metavar="FORMAT",
            **one_of("number format", _formats),
        ),
    ] = None,
    rounding: Annotated[
        list[str] | None,
        typer.Option(
            help="nearest or stochastic (repeatable).",
            **one_of("rounding", _roundings),
        ),
    ] = None,
    rotation: Annotated[
        list[int] | None,
        typer.Option(
            help="Mix blocks of this size by a random Hadamard matrix first; 0: do not (repeatable).",
            metavar="SIZE",
        ),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            help="Scale of e4m3, e5m2 and integers: one for the tensor, or one for a block of 256 (repeatable).",
            **one_of("scale", _scales),
        ),
    ] = None,
    ratio: Annotated[float, typer.Option(help="Send this fraction of the elements only.")] = 1.0,
    estimator: Annotated[str, typer.Option(help="Threshold rule that chooses them.")] = "exact",
    error: Annotated[
        float,
        typer.Option(help="Name the smallest format with a relative squared error below this."),
    ] = 0.01,
    seed: Annotated[
        int, typer.Option(help="Seed of stochastic rounding and of rotations.", min=0)
    ] = 0,
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
    """Show how many bits a gradient needs: what number formats do to it, and to the sum of the ranks.

    Elements are rounded as they would be sent. Of a trace with several ranks each is rounded, and their sum compared
    with the exact one, too. With --per-layer or --layer the table has the smallest format of each layer, and with --all
    every format.
    """
    from gradstats.analysis.wire import wire
    from gradstats.primitives.ratio import check_number

    limit = check_number(error, "error", 0, float("inf"), "()")
    brief = format == "table" and not everything and bool(per_layer or layer)
    answers: list[str] = []

    def work(sources: Sequence[Any], **over: Any) -> Records:
        rows: Records = []
        for each in sources:
            records = wire(
                each,
                ratio=ratio,
                estimator=estimator,
                seed=seed,
                per_layer=per_layer,
                **user_options(formats=to, roundings=rounding, rotations=rotation, scales=scale),
                **over,
            )
            for of in dict.fromkeys(r["kind"] for r in records):
                answers.append(f"{each.name}, {of}: {records.verdict(limit, kind=of)}.")
                if brief:
                    names = dict.fromkeys(r["layer"] for r in records)
                    best = {n: records.smallest(limit, kind=of, layer=n) for n in names}
                    rows += [r for r in best.values() if r is not None]
                    _note_left(limit, [r for r in records if r["kind"] == of], best)
            if not brief:
                rows += records
        return rows

    records = analyse(
        "rounding",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
    )
    (SMALLEST if brief else WIRE).emit(records, format, output, answers)
    # of whole gradients alone: layers would be counted twice
    left_out = sum(r["nonfinite"] for r in records if r["layer"] == "all")
    if format == "table" and left_out:
        note("elements that are no number count as zero: the field nonfinite says how many")


def _note_left(limit: float, records: Records, best: Mapping[str, object]) -> None:
    """Say of which layers no format stays below a limit; the verdict says it of the whole gradient."""
    # as of the smallest, the sum of the ranks decides; of zeros no format has an error
    ranks = max(r["ranks"] for r in records)
    known = {r["layer"] for r in records if r["ranks"] == ranks and not isnan(r["worst"])}
    left = [name for name, r in best.items() if r is None and name in known - {"all"}]
    if len(left) == 1:
        note(f"no format stays below {limit:g} in {left[0]}")
    elif left:
        note(f"no format stays below {limit:g} in {len(left)} layers, such as {left[0]}")


def delta(  # numpydoc ignore=PR01
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B…",
            help="Checkpoints in the order of training: .safetensors, .pt, .npz, folders of DCP; or a trace of "
            "weights, whose steps are some.",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type that is compared and sent: fp32, bf16 or fp16; by default the shortest that holds all weights.",
            **one_of("type of weights", _types),
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Mean magnitude of an update, with AdamW about the learning rate: predict from it, and not from a law "
            "that is fitted to the difference."
        ),
    ] = None,
    master: Annotated[
        bool,
        typer.Option(
            "--master/--no-master",
            help="Whether the optimizer keeps float32 weights, and only copies are rounded.",
        ),
    ] = True,
    step: StepOption = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of traces to look at; the first by default.")
    ] = None,
    layer: LayerOption = None,
    per_layer: PerLayerOption = False,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show what changed between checkpoints, where, and what sending the changes costs.

    changed: share of the weights that differ; changed bf16, changed fp8: when both are rounded; rows: share of the rows
    in which any weight differs. Of three or more checkpoints there is a row for each lag: neighbours, next but one, …
    The bytes are of a bit for every weight, of gaps between changes in bytes and in Rice codes, each with the new
    numbers, and of the XOR under DEFLATE.
    """
    from gradstats.analysis.delta import delta
    from gradstats.analysis.pieces import connect
    from gradstats.console import progress_bar

    known = cast("WeightType | None", dtype)  # --dtype has checked it
    with connect(scheduler) as client, progress_bar() as bar:
        task = bar.add_task("comparing", total=None)
        changes = delta(
            *checkpoints,
            dtype=known,
            rate=rate,
            master=master,
            steps=step,
            rank=rank,
            layers=layer,
            per_layer=per_layer,
            client=client,
            on_progress=lambda: bar.advance(task),
        )
    records: Records = changes
    if format == "table" and not everything:
        records = [r for r in changes if r["layer"] == "all"]
        layers = sorted((r for r in changes if r["layer"] != "all"), key=lambda r: -r["changed"])
        records += layers[:MOST_ROWS]
        if len(layers) > MOST_ROWS:
            note(f"the {MOST_ROWS} rows of most changes, of {len(layers)}; --all has every one")
    if format == "table" and output is None:
        DELTA.emit(records, format, output, [f"{' → '.join(changes.names)}: {changes.verdict}."])
        typer.echo()
        SIZES.emit(records, format, output)
    else:
        # what follows dtype, lag and layer, which both tables begin with
        columns = (*DELTA.columns, *SIZES.columns[3:])
        Table(DELTA.title, columns, ()).emit(records, format, output)
    if format == "table":
        for remark in changes.remarks:
            note(f"{remark[0].upper()}{remark[1:]}.")
