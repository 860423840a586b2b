"""The commands that train: ``gradstats capture`` and ``gradstats demo``, plugged into :mod:`gradstats.cli`."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capture.atlas import atlas
from capture.lab.cli import bench_network
from capture.options import (
    AdamCorrectionOption,
    AutocastOption,
    AverageOption,
    BatchSizeOption,
    ClipKindOption,
    ClipOption,
    DataDirOption,
    DelayOption,
    ErrorFeedbackOption,
    FragmentsOption,
    HiddenOption,
    KindsOption,
    LearningRateOption,
    LearningRatesOption,
    LearningRateWarmUpOption,
    LocalStepsOption,
    MomentumOption,
    NesterovOption,
    NprocOption,
    OptimizerOption,
    OuterLearningRateOption,
    OuterOption,
    ParallelOption,
    RecipeOption,
    SeedOption,
    SingleRatioOption,
    SizeOption,
    StepsOption,
    VocabOption,
    WarmUpOption,
    WeightDecayOption,
    WorkloadArgument,
    run_config,
    signals_end_the_command,
)
from capture.workloads.config import DENSE, RunConfig
from capture.workloads.registry import WORKLOADS, WorkloadInfo
from gradstats.cli.options import (
    FormatOption,
    IndicesOption,
    OutputOption,
    ValuesOption,
    one_of,
    trained,
)
from gradstats.cli.output import Table, analyse, note, one_by_one
from gradstats.errors import InputError
from gradstats.files import refuse_address

if TYPE_CHECKING:
    from capture.workloads import RunResult

__all__ = ["register"]

_WORKLOADS = Table("Reference trainings", ("workload", "parameters", "papers", "files"), ())


def register(app: typer.Typer) -> None:
    """Add this package's commands to the terminal program.

    Parameters
    ----------
    app : typer.Typer
        The program ``gradstats``.
    """
    app.command("capture", rich_help_panel="Capture")(capture)
    app.command("demo", rich_help_panel="Capture")(demo)
    app.command("workloads", rich_help_panel="Capture")(workloads)
    app.command("atlas", rich_help_panel="Capture")(atlas)
    app.command("bench-network", rich_help_panel="Thresholds")(bench_network)


def _dtypes() -> Sequence[str]:
    from gradstats.trace import DTYPES

    return DTYPES


def _stores() -> Sequence[str]:
    from gradstats.trace import STORES

    return STORES


def capture(  # numpydoc ignore=PR01
    workload: WorkloadArgument,
    out: Annotated[Path, typer.Option(help="Trace to create, NAME.zarr.", show_default=False)],
    nproc: NprocOption = 2,
    parallel: ParallelOption = "ddp",
    recipe: RecipeOption = "short",
    compressor: Annotated[
        str | None,
        typer.Option(
            help="none, topk, an estimator, a system such as dgc or marsit, or threshold:NAME, the bare rule. topk if "
            "absent; none for fsdp.",
            **one_of("compressor", trained),
        ),
    ] = None,
    ratio: SingleRatioOption = 0.001,
    indices: IndicesOption = "plain",
    values: ValuesOption = "float32",
    error_feedback: ErrorFeedbackOption = True,
    adam_correction: AdamCorrectionOption = False,
    steps: StepsOption = None,
    every: Annotated[
        int, typer.Option(help="Capture every S-th step, or exchange.", metavar="S")
    ] = 10,
    at: Annotated[
        list[int] | None, typer.Option(help="Capture this step instead (repeatable).")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Capture this rank only (repeatable).")
    ] = None,
    kinds: KindsOption = None,
    data_dir: DataDirOption = None,
    seed: SeedOption = 0,
    batch_size: BatchSizeOption = None,
    learning_rate: LearningRateOption = None,
    optimizer: OptimizerOption = None,
    momentum: MomentumOption = None,
    nesterov: NesterovOption = None,
    weight_decay: WeightDecayOption = None,
    clip: ClipOption = None,
    clip_kind: ClipKindOption = None,
    warm_up: WarmUpOption = None,
    lr_schedule: LearningRatesOption = None,
    lr_warm_up: LearningRateWarmUpOption = None,
    hidden: HiddenOption = None,
    vocab: VocabOption = None,
    size: SizeOption = None,
    autocast: AutocastOption = False,
    local_steps: LocalStepsOption = 0,
    outer: OuterOption = "diloco",
    outer_learning_rate: OuterLearningRateOption = None,
    fragments: FragmentsOption = 1,
    delay: DelayOption = 0,
    average: AverageOption = "ranks",
    store: Annotated[
        str,
        typer.Option(
            help="gradients, or sketches: histograms of them, which take some kB a step.",
            **one_of("store", _stores),
        ),
    ] = "gradients",
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the stored gradients: float32 or bfloat16.",
            **one_of("dtype", _dtypes),
        ),
    ] = "float32",
    compress: Annotated[bool, typer.Option(help="Compress the trace.")] = False,
    diagnose_every: Annotated[
        int,
        typer.Option(
            help="Compare the update with the dense mean in every N-th step; 0 for never.",
            metavar="N",
        ),
    ] = 0,
    bucket_mb: Annotated[
        float | None,
        typer.Option(help="Size of DDP's buckets in MB; small for lags if absent."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints: the same command goes on from the last, and captures into NAME-2.zarr.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps from one checkpoint to the next.", metavar="N")
    ] = 100,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing trace.")] = False,
) -> None:
    """Train a reference workload in several processes and capture its gradients.

    Steps, batch size, learning rate, width and vocabulary have defaults that depend on the workload.
    """
    _run(
        run_config(
            workload,
            recipe=recipe,
            nproc=nproc,
            parallel=parallel,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            optimizer=optimizer,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            clip=clip,
            clip_kind=clip_kind,
            warm_up=warm_up,
            lr_schedule=lr_schedule,
            lr_warm_up=lr_warm_up,
            hidden=hidden,
            vocab=vocab,
            size=size,
            autocast=autocast,
            local_steps=local_steps,
            outer=outer,
            outer_learning_rate=outer_learning_rate,
            fragments=fragments,
            delay=delay,
            average=average,
            # fsdp exchanges no gradient that could be compressed
            compressor=compressor or (DENSE if parallel == "fsdp" else "topk"),
            ratio=ratio,
            indices=indices,
            values=values,
            error_feedback=error_feedback,
            adam_correction=adam_correction,
            seed=seed,
            data_dir=data_dir,
            out=out,
            every=every,
            at=tuple(at or ()),
            ranks=tuple(rank) if rank else None,
            kinds=None if kinds is None else tuple(k.strip() for k in kinds.split(",")),
            store=store,
            dtype=dtype,
            compress=compress,
            diagnose_every=diagnose_every,
            bucket_mb=bucket_mb,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            overwrite=overwrite,
        )
    )


def _run(config: RunConfig) -> RunResult:
    from capture.workloads import run

    config.check()
    if config.out is not None:
        refuse_address(config.out)
    # with a checkpoint the same command goes on, and its trace gets a number
    may_exist = config.overwrite or config.checkpoint is not None
    if config.out is not None and config.out.exists() and not may_exist:
        raise InputError(f"{config.out} exists; choose another name or give --overwrite")
    steps = config.setting("steps")
    note(f"{config.info.description}: {config.nproc} processes, {steps} steps")
    with signals_end_the_command():
        result = run(config)
    unseen = ""
    if not math.isnan(result.accuracy):
        unseen = f", {100 * result.accuracy:.1f} % of unseen right,"
    elif not math.isnan(result.perplexity):
        unseen = f", perplexity {result.perplexity:.0f} on unseen text,"
    elif not math.isnan(result.word_error_rate):
        unseen = (
            f", {100 * result.word_error_rate:.0f} % of words and "
            f"{100 * result.character_error_rate:.0f} % of characters wrong in unseen speech,"
        )
    captured = f"; captured in {result.trace}" if result.trace else ""
    note(
        f"  loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}{unseen} "
        f"in {sum(result.seconds):.0f} s{captured}"
    )
    return result


def workloads(  # numpydoc ignore=PR01
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="Show the layers of this one.",
            show_default=False,
            **one_of("workload", lambda: tuple(WORKLOADS)),
        ),
    ] = None,
    gradient: Annotated[
        Path | None,
        typer.Option(
            help="Run backward passes on random inputs, show their times, and store the gradient, "
            "a source for other commands.",
            metavar="FILE.npz",
        ),
    ] = None,
    batch_size: BatchSizeOption = None,
    seed: SeedOption = 0,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """List the reference trainings of the papers, or the layers of one model.

    Layers come in the order of the flat gradient: name, shape, number of elements, number of elements before it.
    """
    if workload is None:
        if gradient is not None:
            raise InputError("name the workload whose gradient is to be stored")
        records = [_facts(info) for info in WORKLOADS.values()]
        return _WORKLOADS.emit(records, format, output)
    from capture.workloads.layouts import backward_pass, layout

    records = layout(workload)
    if gradient is not None:
        import numpy as np

        values, layers = backward_pass(workload, batch_size=batch_size, seed=seed)
        try:
            # a stream, because savez() adds .npz to a name that has another ending
            with gradient.open("wb") as stream:
                np.savez(stream, **{n: v.numpy() for n, v in values.items()})  # type: ignore[arg-type]
        except OSError as error:
            raise InputError(f"cannot write {gradient}: {error}") from None
        times = {layer.name: layer.backward for layer in layers}
        records = [{**record, "backward": times[record["layer"]]} for record in records]
    columns = tuple(records[0])
    title = f"{sum(r['numel'] for r in records):,} parameters"
    return Table(title, columns, ()).emit(records, format, output)


def _facts(info: WorkloadInfo) -> dict[str, Any]:
    """Return a workload as a record."""
    papers = ", ".join(f"{p} ({n})" if n else p for p, n in info.papers.items())
    return {
        "workload": info.name,
        "parameters": info.parameters,
        "papers": papers or None,
        "files": info.files[0] if info.files else None,
    }


def demo(  # numpydoc ignore=PR01
    out: Annotated[Path, typer.Option(help="Folder for traces and report.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Number of steps of each of the two runs.")] = 400,
    seed: SeedOption = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Do not open the report in a browser.")
    ] = False,
) -> None:
    """Train twice, capture, analyse: the whole path in about two minutes.

    ResNet-20 on scikit-learn's digits in two processes, exact top-k at ratio 0.001, first without and then with
    error feedback. Ends with the tables and the answer in three sentences on stdout, and opens report.html.
    """
    started = time.monotonic()
    traces, losses = [], []
    # in this order: the answer compares the first loss with the second
    for error_feedback in (False, True):
        name = "topk-ef" if error_feedback else "topk"
        refuse_address(out)
        note(f"Training {'with' if error_feedback else 'without'} error feedback")
        config = run_config(
            "resnet20-digits",
            label=name,
            steps=steps,
            error_feedback=error_feedback,
            seed=seed,
            out=out / f"{name}.zarr",
            every=max(1, steps // 20),
            overwrite=True,
        )
        last = _run(config).losses[-_LAST:]
        losses.append(sum(last) / len(last))
        traces.append(config.out)
    _tables(out)
    from gradstats.report import write_report
    from gradstats.trace.sources import open_source

    page = out / "report.html"
    answers = write_report([open_source(trace) for trace in traces], page)
    width = shutil.get_terminal_size().columns
    typer.echo("\n" + textwrap.fill(_answer(losses, answers), width, break_on_hyphens=False))
    note(f"\nDone in {time.monotonic() - started:.0f} s: {page} has the figures behind this;")
    note(f"the traces are {' and '.join(map(str, traces))}. What to do with yours: gradstats")
    if not no_open and _has_browser():
        typer.launch(str(page))


_LAST = 10
"""Steps whose losses are averaged at the end of a training."""


def _answer(losses: Sequence[float], answers: Sequence[Mapping[str, Any]]) -> str:
    """Return in three sentences what the demo has shown: what error feedback does, and what laws and rules make of it.

    The last two are the report's answers about what the compressor saw at last: the corrected gradient.
    """
    last = {r["question"]: r["answer"] for r in answers if r["kind"] == "corrected"}
    law, rule = last["Which model is closest?"], last["Which estimate hits k?"]
    return (
        f"Sending one element in a thousand, the loss ends at {losses[0]:.2f} without error feedback and at "
        f"{losses[1]:.2f} with it. Law that is closest to what the compressor sees then: {law[0].lower()}{law[1:]}. "
        f"Rule that finds its k largest elements by a threshold: {rule[0].lower()}{rule[1:]}."
    )


def _has_browser() -> bool:
    """Tell whether somebody sits before a screen: a browser of text, as in an ssh session, would take the terminal."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return screen and sys.stdout.isatty()


def _tables(out: Path) -> None:
    """Print the two tables of the demo: the decay at a few steps, and the estimation quality."""
    from gradstats.analysis import decay, quality
    from gradstats.cli.statistics import DECAY
    from gradstats.cli.thresholds import QUALITY
    from gradstats.trace.sources import open_sources

    steps = sorted({key[2] for source in open_sources(out) for key in source.select()})
    # a set, for a short run may have captured a single step
    few = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    DECAY.emit(
        analyse("decay", out, decay.compressibility_records, steps=few, ranks=[0]), "table", None
    )
    typer.echo()
    work = one_by_one(quality.quality)
    QUALITY.emit(analyse("quality", out, work), "table", None)
