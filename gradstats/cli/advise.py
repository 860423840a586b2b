"""The command that says which compression to try: ``advise``."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Annotated

import typer

from gradstats.cli.options import (
    FormatOption,
    OutputOption,
    RttOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
)
from gradstats.cli.output import emit, note
from gradstats.cli.plan import assumed_link, cluster_of, only_source
from gradstats.errors import InputError

__all__ = ["advise"]


def advise(  # numpydoc ignore=PR01
    source: SourceArgument,
    link: Annotated[
        str | None,
        typer.Option(
            help="Link between the workers: 1gbit, 10gbit, 100gbit, wan, or another rate. What is no faster than dense "
            "over it is not recommended.",
            metavar="LINK",
        ),
    ] = None,
    rtt: RttOption = None,
    network: Annotated[
        Path | None,
        typer.Option(
            help="In place of --link, a measured cluster, as for `gradstats plan`.",
            metavar="network.json",
        ),
    ] = None,
    compute: Annotated[
        float | None,
        typer.Option(
            help="Time of a step of one worker without its exchange; needed with --link.",
            metavar="SECONDS",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of workers.", min=2)] = 8,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Name of the training's optimizer; as the trace has it if absent.", metavar="NAME"
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Share of the dense loss that may be lost: 0.02 is 2 %.", min=0)
    ] = 0.02,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave out a measured training, or, as NAME/sgd, that with one optimizer (repeatable).",
            metavar="TRAINING",
        ),
    ] = None,
    step: StepOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Recommend a compressor, a ratio, a memory and a number format to try, with reasons.

    It is what kept the loss of dense training in the measured trainings whose gradients are most like these. low and
    high: how far a training's mean loss ended from dense there; bytes: what two workers send, as a share of dense.
    """
    from gradstats import network as networks
    from gradstats.analysis.advise import SENT, advise, properties_of
    from gradstats.analysis.pieces import connect
    from gradstats.analysis.verdicts.advised import lossless_ratio, sparse_already
    from gradstats.primitives.ratio import RATIOS

    opened = only_source(source)
    plans: list[dict[str, object]] = []
    linked = link is not None or network is not None
    if linked and compute is None:
        raise InputError(
            "a plan for a link needs --compute, the seconds of a step without its exchange"
        )
    if not linked and (rtt is not None or compute is not None):
        raise InputError("--rtt and --compute are of a link: give --link, or --network")
    with connect(scheduler) as client:
        if compute is not None:  # of a link, as was checked
            ratios = [*RATIOS]
            _, properties = properties_of(opened, {"steps": step, "client": client})
            # of zeros alone, where they are so many, nothing is lost: that is planned, too
            if properties["nonzero"] and sparse_already(properties["nonzero"]):
                ratios.append(lossless_ratio(properties["nonzero"]))
            cluster = cluster_of(network, link, rtt, opened.numel, ratios, SENT, False)
            plans = networks.plan(
                opened,
                cluster,
                compute,
                [workers],
                ratios,
                SENT,
                captured=step or None,
                client=client,
            )
            if link is not None:
                note(assumed_link(cluster))
        advice = advise(
            opened,
            plans,
            optimizer=optimizer,
            tolerance=tolerance,
            without=without or (),
            steps=step,
            client=client,
        )
    if format != "table":  # its records do not hold the sentences
        note(str(advice.verdict))
    columns = ["rule", "ratio", "memory", "format", "low", "high", "runs", "bytes", "reason"]
    if plans:
        columns.insert(-1, "speedup")
        if any(isnan(r["speedup"]) for r in advice.records):
            note("speedup –: of such a setting the plan has no time, so it is not recommended")
    emit(
        advice.records,
        format,
        output,
        columns=columns,
        title="Settings that were measured; low, high: how far the loss ended from dense, as a share of it",
        group_by=(),
        answers=(f"{advice.verdict.headline}.", *advice.verdict.numbers.split("\n")),
    )
