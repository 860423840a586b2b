"""The command ``gradstats bench-network``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capture.lab.cluster import BURST
from capture.workloads import BASELINES, WORKLOADS, RunConfig
from gradstats.cli.options import FormatOption, OutputOption, compressors, one_of
from gradstats.cli.output import emit, note

__all__ = ["bench_network"]


def bench_network(
    nproc: Annotated[int, typer.Option(help="Ranks, each in a namespace of its own.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Of every link: Mbit/s, or as tc writes it: 1gbit.")
    ] = "1gbit",
    workload: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(WORKLOADS)}.", **one_of("workload", lambda: tuple(WORKLOADS))
        ),
    ] = "resnet20-digits",
    compressor: Annotated[
        list[str] | None,
        typer.Option(
            help="none, topk, …; torch-topk and powersgd are PyTorch's (repeatable). The first two if absent.",
            **one_of("compressor", lambda: (*compressors(), *BASELINES)),
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Of each run; the first 3 are not counted.")] = 30,
    ratio: Annotated[float, typer.Option(help="Kept fraction k/d.")] = 0.001,
    batch_size: Annotated[int | None, typer.Option(help="Per process.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and sampling.")] = 0,
    hidden: Annotated[int | None, typer.Option(help="Width of the LSTM.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Words the LSTM knows.")] = None,
    no_error_feedback: Annotated[
        bool, typer.Option("--no-error-feedback", help="Lose what is not sent.")
    ] = False,
    burst: Annotated[int, typer.Option(help="Bytes an idle link saves up.")] = BURST,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure the network, too, for `gradstats plan`.", metavar="network.json"
        ),
    ] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Train over links of a given rate: where the time of a step goes (Linux, root, iproute2).

    Every rank gets a network namespace, a link shaped with tc and a real socket; the machine's own interfaces are not
    touched, and nothing is left behind. compute is the step without an exchange, communicate what the exchange
    adds to it, bytes what left a rank's interface; times are seconds per step.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    from capture.lab import run
    from gradstats.console import messages
    from gradstats.network.rates import parse_rate

    names = compressor or ["none", "topk"]
    config = RunConfig(
        workload=workload,
        nproc=nproc,
        steps=steps,
        batch_size=batch_size,
        ratio=ratio,
        data_dir=data_dir,
        seed=seed,
        hidden=hidden,
        vocab=vocab,
        error_feedback=not no_error_feedback,
        label="" if messages().quiet else workload,
    )
    bits = parse_rate(rate)
    try:
        records = run.bench_network(
            config,
            bits,
            names,
            burst=burst,
            on_network=None if measure is None else lambda network: network.save(measure),
            label=config.label and "network",
        )
    except SignalException as error:
        raise typer.Exit(128 + error.sigval) from error
    finally:
        messages().show_cursor()  # a process that was stopped left it hidden
    if measure is not None:
        note(f"wrote {measure}")
    emit(
        records,
        format,
        output,
        columns=[c for c in records[0] if c not in ("nproc", "rate", "ratio")],
        title=f"{workload}, {nproc} ranks at {bits / 1e6:g} Mbit/s: seconds and bytes per step",
        group_by=("nproc", "rate"),
    )
