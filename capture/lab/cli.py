"""The command ``gradstats bench-network``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capture.lab.cluster import BURST
from capture.options import (
    BatchSizeOption,
    ClipKindOption,
    ClipOption,
    DataDirOption,
    DelayOption,
    ErrorFeedbackOption,
    FragmentsOption,
    HiddenOption,
    LearningRateOption,
    LearningRatesOption,
    MomentumOption,
    NesterovOption,
    NprocOption,
    SeedOption,
    SingleRatioOption,
    StepsOption,
    VocabOption,
    WarmUpOption,
    WeightDecayOption,
    WorkloadOption,
    run_config,
    signals_end_the_command,
)
from capture.workloads.config import BASELINES
from gradstats.cli.options import (
    FormatOption,
    IndicesOption,
    OutputOption,
    ValuesOption,
    one_of,
    trained,
)
from gradstats.cli.output import emit, note

__all__ = ["bench_network"]


def bench_network(  # numpydoc ignore=PR01
    nproc: NprocOption = 4,
    rate: Annotated[
        str, typer.Option(help="Rate of every link: Mbit/s, or as tc writes it: 1gbit.")
    ] = "1gbit",
    up: Annotated[
        str | None, typer.Option(help="Rate at which a rank sends; --rate if absent.")
    ] = None,
    down: Annotated[
        str | None, typer.Option(help="Rate at which it receives; --rate if absent.")
    ] = None,
    workload: WorkloadOption = "resnet20-digits",
    compressor: Annotated[
        list[str] | None,
        typer.Option(
            help="none, topk, …; threshold:NAME: a bare rule; torch-topk, powersgd, torch-bf16: PyTorch (repeatable).",
            **one_of("compressor", lambda: (*trained(), *BASELINES)),
        ),
    ] = None,
    steps: StepsOption = 30,
    local_steps: Annotated[
        list[int] | None,
        typer.Option(
            help="Exchange pseudo-gradients after so many local steps (repeatable); 0 for gradients in every step.",
            metavar="H",
        ),
    ] = None,
    fragments: FragmentsOption = 1,
    delay: DelayOption = 0,
    ratio: SingleRatioOption = 0.001,
    indices: IndicesOption = "plain",
    values: ValuesOption = "float32",
    batch_size: BatchSizeOption = None,
    learning_rate: LearningRateOption = None,
    momentum: MomentumOption = None,
    nesterov: NesterovOption = None,
    weight_decay: WeightDecayOption = None,
    clip: ClipOption = None,
    clip_kind: ClipKindOption = None,
    warm_up: WarmUpOption = None,
    lr_schedule: LearningRatesOption = None,
    data_dir: DataDirOption = None,
    seed: SeedOption = 0,
    hidden: HiddenOption = None,
    vocab: VocabOption = None,
    error_feedback: ErrorFeedbackOption = True,
    burst: Annotated[
        int, typer.Option(help="Bytes that an idle link saves up and then sends at once.")
    ] = BURST,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Also measure the network, and write what `gradstats plan` needs.",
            metavar="network.json",
        ),
    ] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Train over links of a given rate: where the time of a step goes (Linux, root, iproute2).

    Every rank gets a network namespace, a link shaped with tc and a real socket. The machine's own interfaces are
    not touched, and nothing is left behind. Ranks run as the user who called sudo, as root if nobody did. compute is
    the step without an exchange (at most what the other parts leave of it), communicate is what the exchange adds to
    it, bytes is what left a rank's interface. Times are seconds per step; the first 3 steps are not counted. With
    --local-steps they are means over an interval, the median of the intervals after the first, and --steps is rounded
    up to whole ones. lags measures how to send in further steps, before those that are counted.
    """
    from capture.lab import run
    from capture.lab.caller import caller
    from gradstats.network.rates import parse_rate

    names = compressor or ["none", "topk"]
    config = run_config(
        workload,
        nproc=nproc,
        steps=steps,
        fragments=fragments,
        delay=delay,
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        clip=clip,
        clip_kind=clip_kind,
        warm_up=warm_up,
        lr_schedule=lr_schedule,
        ratio=ratio,
        indices=indices,
        values=values,
        data_dir=data_dir,
        seed=seed,
        hidden=hidden,
        vocab=vocab,
        error_feedback=error_feedback,
    )
    bits = parse_rate(up or rate), parse_rate(down or rate)
    with signals_end_the_command():
        records = run.bench_network(
            config,
            bits,
            names,
            local_steps=local_steps or (0,),
            burst=burst,
            on_network=None if measure is None else lambda network: network.save(measure),
            label=config.label and "network",
        )
    if caller() is None:
        note("the ranks ran as root, as no other user called sudo")
    if measure is not None:
        note(f"wrote {measure}")
    sent, received = (f"{bit / 1e6:g}" for bit in bits)
    rates = f"{sent} Mbit/s" + (f" up and {received} down" if sent != received else "")
    unsaid = {"nproc", "rate", "up", "down", "ratio", "compute_alone"}
    if not local_steps:
        unsaid |= {"local_steps", "fragments", "delay", "utilisation"}
    emit(
        records,
        format,
        output,
        columns=[c for c in records[0] if c not in unsaid],
        title=f"{workload}, {nproc} ranks at {rates}: times and bytes per step",
        group_by=("nproc", "rate"),
    )
