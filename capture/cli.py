"""The commands that train: ``gradstats capture`` and ``gradstats demo``, plugged into :mod:`gradstats.cli`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from capture.lab.cli import bench_network
from capture.workloads.config import WORKLOADS, RunConfig
from gradstats.cli.options import compressors, one_of
from gradstats.cli.output import analyse, emit, note
from gradstats.errors import InputError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this package's commands to the terminal program."""
    app.command("capture", rich_help_panel="Capture")(capture)
    app.command("demo", rich_help_panel="Capture")(demo)
    app.command("bench-network", rich_help_panel="Thresholds")(bench_network)


def _stores() -> Sequence[str]:
    from gradstats.trace import STORES

    return STORES


def capture(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"{', '.join(WORKLOADS)}.",
            show_default=False,
            **one_of("workload", lambda: tuple(WORKLOADS)),
        ),
    ],
    out: Annotated[Path, typer.Option(help="Trace to create, NAME.zarr.", show_default=False)],
    nproc: Annotated[int, typer.Option(help="Processes.")] = 2,
    compressor: Annotated[
        str,
        typer.Option(
            help="none, topk, an estimator's name, or a system's, such as micro or marsit.",
            **one_of("compressor", compressors),
        ),
    ] = "topk",
    ratio: Annotated[float, typer.Option(help="Kept fraction k/d.")] = 0.001,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback/--no-error-feedback", help="Keep what is not sent.")
    ] = True,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    every: Annotated[int, typer.Option(help="Capture every S-th step.", metavar="S")] = 10,
    at: Annotated[
        list[int] | None, typer.Option(help="Capture this step instead (repeatable).")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Capture this rank only (repeatable).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and sampling.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Per process.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At the start.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the LSTM.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Words the LSTM knows.")] = None,
    store: Annotated[
        str,
        typer.Option(
            help="gradients, or sketches: their histograms, some kB a step.",
            **one_of("store", _stores),
        ),
    ] = "gradients",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32 or bfloat16, on disk.",
            **one_of("dtype", lambda: ("float32", "bfloat16")),
        ),
    ] = "float32",
    compress: Annotated[bool, typer.Option(help="Compress the trace.")] = False,
    diagnose_every: Annotated[
        int, typer.Option(help="Compare with the dense mean in every N-th step.", metavar="N")
    ] = 0,
    bucket_mb: Annotated[
        float | None, typer.Option(help="DDP's buckets; small for lags if absent.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing trace.")] = False,
) -> None:
    """Train a reference workload in several processes and capture its gradients."""
    _run(
        RunConfig(
            workload=workload,
            nproc=nproc,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            hidden=hidden,
            vocab=vocab,
            compressor=compressor,
            ratio=ratio,
            error_feedback=error_feedback,
            seed=seed,
            data_dir=data_dir,
            out=out,
            every=every,
            at=tuple(at or ()),
            ranks=tuple(rank) if rank else None,
            store=store,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            compress=compress,
            diagnose_every=diagnose_every,
            bucket_mb=bucket_mb,
            overwrite=overwrite,
            label=workload,
        )
    )


def _run(config: RunConfig) -> None:
    from capture.workloads import run
    from gradstats.console import messages

    config.check()
    if config.out is not None and config.out.exists() and not config.overwrite:
        raise InputError(f"{config.out} exists; choose another name or give --overwrite")
    steps = config.setting("steps")
    note(f"{config.info.description}: {config.nproc} processes, {steps} steps")
    if messages().quiet:
        config = config.replace(label="")
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        result = run(config)
    except SignalException as error:  # torchrun's agent has stopped the processes
        if messages().is_terminal:
            messages().print()  # below the progress bar
        raise typer.Exit(128 + error.sigval) from error
    finally:
        messages().show_cursor()  # a process that was stopped left it hidden
    unseen = ""
    if not math.isnan(result.accuracy):
        unseen = f", {100 * result.accuracy:.1f} % of unseen right,"
    elif not math.isnan(result.perplexity):
        unseen = f", perplexity {result.perplexity:.0f} on unseen text,"
    note(
        f"  loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}{unseen} "
        f"in {sum(result.seconds):.0f} s; captured in {config.out}"
    )


def demo(
    out: Annotated[Path, typer.Option(help="Folder for traces and report.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Steps of each of the two runs.")] = 400,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Train twice, capture, analyse: the whole path in about two minutes.

    ResNet-20 on scikit-learn's digits in two processes, exact top-k at ratio 0.001, first without and then with
    error feedback. Ends with the tables on stdout and a report.html.
    """
    started = time.monotonic()
    traces = []
    for error_feedback in (False, True):
        name = "topk-ef" if error_feedback else "topk"
        note(f"Training {'with' if error_feedback else 'without'} error feedback")
        config = RunConfig(
            workload="resnet20-digits",
            steps=steps,
            error_feedback=error_feedback,
            seed=seed,
            out=out / f"{name}.zarr",
            every=max(1, steps // 20),
            overwrite=True,
            label=name,
        )
        _run(config)
        traces.append(config.out)
    _tables(out)
    from gradstats.report import write_report
    from gradstats.trace.sources import open_source

    page = out / "report.html"
    write_report([open_source(trace) for trace in traces], page)
    note(f"\nDone in {time.monotonic() - started:.0f} s. Everything is in {out}/:")
    note(f"  {page}   the figures behind the tables, open it in a browser")
    for trace in traces:
        note(f"  {trace}   captured gradients")
    note("Try next:")
    note(f"  gradstats fit {traces[1]} --per-layer --step 0")
    note(f"  gradstats quality {traces[1]} --estimator sidco-e --stages 1")
    note(f"  gradstats info {traces[1]}")
    note("  README.md shows how to capture your own training run")


def _tables(out: Path) -> None:
    """Print the two tables of the demo: the decay at a few steps, and the estimation quality."""
    from gradstats.analysis.decay import compressibility_records
    from gradstats.analysis.quality import quality
    from gradstats.thresholds import ESTIMATORS
    from gradstats.trace.sources import open_sources

    steps = sorted({key[2] for source in open_sources(out) for key in source.select()})
    emit(
        analyse(
            "decay",
            out,
            compressibility_records,
            steps=sorted({steps[0], steps[len(steps) // 2], steps[-1]}),
            ranks=[0],
        ),
        "table",
        None,
        columns=["trace", "step", "kind", "p", "p_low", "p_high", "hill", "compressible"],
        title="Compressibility: is p above ½ on the largest hundredth of ranks? (rank 0)",
        group_by=(),
    )
    typer.echo()
    emit(
        analyse(
            "quality",
            out,
            lambda sources, **given: [
                r for s in sources for r in quality(s, estimators=tuple(ESTIMATORS), **given)
            ],
        ),
        "table",
        None,
        columns=["trace", "estimator", "ratio", "kind", "mean", "low", "high", "floor", "n"],
        title="Estimation quality k̂/k, all steps and ranks",
        group_by=("trace", "kind"),
    )
