"""Terminal options of the commands that train, and the settings of a run made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from capture.workloads.config import (
    ClipKind,
    NesterovForm,
    Outer,
    Parallel,
    Recipe,
    RunConfig,
    Size,
)
from capture.workloads.launch import signals_raise
from capture.workloads.registry import WORKLOADS, LearningRates, OptimizerName
from gradstats.cli.options import one_of
from gradstats.console import messages

__all__ = [
    "AdamCorrectionOption",
    "AutocastOption",
    "AverageOption",
    "BatchSizeOption",
    "ClipKindOption",
    "ClipOption",
    "DataDirOption",
    "DelayOption",
    "ErrorFeedbackOption",
    "FragmentsOption",
    "HiddenOption",
    "KindsOption",
    "LearningRateOption",
    "LearningRateWarmUpOption",
    "LearningRatesOption",
    "LocalStepsOption",
    "MomentumOption",
    "NesterovOption",
    "NprocOption",
    "OptimizerOption",
    "OuterLearningRateOption",
    "OuterOption",
    "ParallelOption",
    "RecipeOption",
    "SeedOption",
    "SingleRatioOption",
    "SizeOption",
    "StepsOption",
    "VocabOption",
    "WarmUpOption",
    "WeightDecayOption",
    "WorkloadArgument",
    "WorkloadOption",
    "averages",
    "run_config",
    "signals_end_the_command",
]


def averages() -> Sequence[str]:
    """Return what a sum of sparse messages may be divided by."""
    from gradstats.compressors.sparse import Average

    return get_args(Average)


_WORKLOAD: dict[str, Any] = {
    "help": f"{', '.join(WORKLOADS)}.",
    **one_of("workload", lambda: tuple(WORKLOADS)),
}

WorkloadArgument = Annotated[
    str, typer.Argument(metavar="WORKLOAD", show_default=False, **_WORKLOAD)
]
WorkloadOption = Annotated[str, typer.Option(**_WORKLOAD)]
NprocOption = Annotated[int, typer.Option(help="Number of processes (ranks).")]
ParallelOption = Annotated[
    str,
    typer.Option(
        help="ddp, fsdp (FSDP2 over all ranks), or hsdp (within each of two replicas, compressed between them).",
        **one_of("parallel", lambda: get_args(Parallel)),
    ),
]
SingleRatioOption = Annotated[float, typer.Option(help="Kept fraction k/d.")]
ErrorFeedbackOption = Annotated[
    bool,
    typer.Option(
        "--error-feedback/--no-error-feedback",
        help="Add what was not sent to the next gradient.",
    ),
]
AdamCorrectionOption = Annotated[
    bool,
    typer.Option(
        "--adam-correction",
        help="With AdamW: compress each rank's own steps of it, in place of gradients.",
    ),
]
StepsOption = Annotated[int | None, typer.Option(help="Number of steps to train.")]
BatchSizeOption = Annotated[int | None, typer.Option(help="Samples per process and step.")]
LearningRateOption = Annotated[float | None, typer.Option(help="Learning rate at the start.")]
LearningRatesOption = Annotated[
    str | None,
    typer.Option(
        help="How the learning rate falls: constant, step, thirds, cosine, linear or annealed.",
        **one_of("lr-schedule", lambda: get_args(LearningRates)),
    ),
]
LearningRateWarmUpOption = Annotated[
    int | None, typer.Option(help="Steps in which the learning rate rises to its value.")
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        help="sgd, nesterov (momentum 0.9), adamw, or muon (AdamW for what is no hidden matrix); the workload's if "
        "absent. Another than that has a learning rate of its own.",
        **one_of("optimizer", lambda: get_args(OptimizerName)),
    ),
]
KindsOption = Annotated[
    str | None,
    typer.Option(
        help="What to capture, with commas: gradient, corrected, local, pseudogradient, update, weight. gradient, and "
        "what there is of corrected and pseudogradient, if absent.",
        metavar="KIND,…",
    ),
]
MomentumOption = Annotated[
    float | None,
    typer.Option(help="Momentum; 0.9 for dgc and redsync if absent, else the workload's."),
]
NesterovOption = Annotated[
    str | None,
    typer.Option(
        help="Nesterov's momentum: dgc (as in PyTorch), redsync (its algorithm 4), or none.",
        metavar="FORM",
        **one_of("nesterov", lambda: get_args(NesterovForm)),
    ),
]
WeightDecayOption = Annotated[
    float | None,
    typer.Option(help="Multiple of each parameter added to its gradient; 0 if absent."),
]
RecipeOption = Annotated[
    str,
    typer.Option(
        help="Training where no option sets it: short, for minutes on a CPU; paper, as published; "
        "program, as its authors' program.",
        **one_of("recipe", lambda: get_args(Recipe)),
    ),
]
ClipOption = Annotated[
    float | None, typer.Option(help="Largest norm of the gradient; 0 for no clipping.")
]
ClipKindOption = Annotated[
    str | None,
    typer.Option(
        help="What is clipped: local, or averaged. local for dgc and redsync if absent.",
        **one_of("clip-kind", lambda: get_args(ClipKind)),
    ),
]
WarmUpOption = Annotated[
    int | None, typer.Option(help="Steps of warm-up: DGC's ratios for dgc, dense for others.")
]
HiddenOption = Annotated[int | None, typer.Option(help="Width of the LSTM.")]
VocabOption = Annotated[
    int | None, typer.Option(help="Number of words that a model of text knows.")
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        help="Size of the transformer: 0.1M, 0.5M, 2M, 10M, 30M or 124M.",
        **one_of("size", lambda: get_args(Size)),
    ),
]
AutocastOption = Annotated[
    bool, typer.Option("--autocast", help="Let the transformer compute in bfloat16.")
]
LocalStepsOption = Annotated[
    int,
    typer.Option(
        help="Exchange pseudo-gradients after so many local steps; 0 for gradients in every step.",
        metavar="H",
    ),
]
OuterOption = Annotated[
    str,
    typer.Option(
        help="What follows local steps: diloco, sparseloco (a compressor of its own), or mean.",
        **one_of("outer", lambda: get_args(Outer)),
    ),
]
OuterLearningRateOption = Annotated[
    float | None, typer.Option(help="Outer learning rate; 0.7 for diloco if absent, else 1.")
]
FragmentsOption = Annotated[
    int, typer.Option(help="Parts of the model exchanged at different local steps.")
]
DelayOption = Annotated[
    int, typer.Option(help="Local steps that an exchange takes in the background.")
]
AverageOption = Annotated[
    str,
    typer.Option(
        help="What sums of local steps' sparse messages are divided by: ranks, or senders.",
        **one_of("average", averages),
    ),
]
DataDirOption = Annotated[Path | None, typer.Option(help="Folder of the data set.")]
SeedOption = Annotated[int, typer.Option(help="Seed of weights, batches and sampling.")]


def run_config(
    workload: str,
    *,
    label: str | None = None,
    indices: str = "plain",
    values: str = "float32",
    **settings: Any,
) -> RunConfig:
    """Return the settings of a run started at the terminal.

    Parameters
    ----------
    workload : str
        One of :data:`capture.workloads.WORKLOADS`.
    label : str, optional
        Text before the progress bar, which ``--quiet`` takes away; the workload if None.
    indices : str
        What positions are on the wire: an option of the compressor unless it is the default.
    values : str
        What values are on the wire, in the same way.
    **settings : object
        Other fields of :class:`capture.workloads.RunConfig`.

    Returns
    -------
    RunConfig
        The settings; they have not been checked.
    """
    # defaults are left out: exchanges that have no codec take no such option
    coded = {"indices": indices} if indices != "plain" else {}
    coded |= {"values": values} if values != "float32" else {}
    if coded:
        settings["options"] = coded
    shown = workload if label is None else label
    return RunConfig(workload=workload, label="" if messages().quiet else shown, **settings)


@contextmanager
def signals_end_the_command() -> Iterator[None]:
    """End the command as the shell expects where a signal stopped the processes of a run.

    Raises
    ------
    typer.Exit
        With exit status 128 + the signal's number.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        with signals_raise(last=True):
            yield
    except SignalException as error:  # torchrun's agent has stopped the processes
        if messages().is_terminal:
            messages().print()  # below the progress bar
        # what a shell reports of a process that a signal has ended
        raise typer.Exit(128 + error.sigval) from error
    finally:
        messages().show_cursor()  # a process that was stopped left it hidden
