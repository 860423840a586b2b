"""The ``gradstats`` command. Commands that need more than typer import it when they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gradstats.errors import GradstatsError, InputError

if TYPE_CHECKING:
    from gradstats._fit import Method
    from gradstats.sources import Source, TraceSource
    from gradstats.tables import Format

__all__ = ["app", "main"]

app = typer.Typer(
    name="gradstats",
    help="Statistical analysis of gradients: capture, model, threshold.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A trace, a folder of traces, or a .npy, .npz, .safetensors or .pt file.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str, typer.Option("--format", help="table, json, csv, markdown or latex.", metavar="FORMAT")
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write to this file.", metavar="FILE")
]
StepOption = Annotated[
    list[int] | None, typer.Option("--step", help="Only this step (repeatable).")
]
RankOption = Annotated[
    list[int] | None, typer.Option("--rank", help="Only this rank (repeatable).")
]
KindOption = Annotated[
    list[str] | None, typer.Option("--kind", help="Only gradient or corrected (repeatable).")
]


SchedulerOption = Annotated[
    str | None,
    typer.Option("--scheduler", help="Do the work on this dask cluster.", metavar="ADDRESS"),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="laplace, dgamma, double_genpareto (these if absent), norm, t, gennorm, dweibull, lognorm or all.",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(help="closed, moments, mle or pwm; closed forms where there are any if absent."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from gradstats import __version__

        typer.echo(f"gradstats {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


def emit(
    records: Sequence[dict[str, Any]],
    format: str,
    output: Path | None,
    *,
    columns: Sequence[str],
    title: str,
    group_by: Sequence[str] = ("trace",),
) -> None:
    """Print records, or write them to a file, in a format of the user's choice.

    `columns` are what people see; JSON and CSV hold every field. A terminal gets a table per
    value of the fields `group_by`.
    """
    import shutil

    from gradstats.tables import render

    _check_format(format)
    width = 80
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    groups = [records]
    if format == "table" and group_by:
        keys = [tuple(record[name] for name in group_by) for record in records]
        groups = [
            [r for r, other in zip(records, keys, strict=True) if other == key]
            for key in dict.fromkeys(keys)
        ] or [records]
    text = "\n".join(
        render(group, cast("Format", format), columns=columns, title=title, width=width)
        for group in groups
    )
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def _check_format(format: str) -> None:
    from gradstats.tables import FORMATS

    if format not in FORMATS:
        raise InputError(f"no format {format!r}; there are {', '.join(FORMATS)}")


def _with_progress(
    label: str,
    sources: Sequence[Source],
    selection: dict[str, Any],
    work: Callable[..., Any],
    scheduler: str | None = None,
) -> Any:
    """Call ``work(on_progress, client)`` under a progress bar that counts the gradients selected."""
    from contextlib import ExitStack

    from gradstats.sources import SKETCHED
    from gradstats.tables import progress_bar

    keys = [(source, key) for source in sources for key in source.select(**selection)]
    total = len(keys)
    rough = dict.fromkeys(s.name for s, (rank, kind, _) in keys if s.sketched(rank, kind))
    if rough:
        typer.echo(f"Sketches ({', '.join(rough)}): {SKETCHED}.", err=True)
    with ExitStack() as stack:
        client = None
        if scheduler is not None:
            from gradstats.reduction import connect

            client = stack.enter_context(connect(scheduler))
        bar = stack.enter_context(progress_bar())
        task = bar.add_task(label, total=total)
        return work(lambda: bar.advance(task), client)


def _selection(step: Any, rank: Any, kind: Any) -> dict[str, Any]:
    return {"steps": step, "ranks": rank, "kinds": kind}


@app.command()
def info(
    source: SourceArgument, format: FormatOption = "table", output: OutputOption = None
) -> None:
    """Show what a trace holds: steps, ranks, kinds, and what the run recorded."""
    from gradstats.analysis import info_records
    from gradstats.sources import TraceSource, open_sources

    _check_format(format)
    sources = open_sources(source)
    records = [record for s in sources for record in info_records(s)]
    if format == "table" and output is None:
        for s in sources:
            if isinstance(s, TraceSource):
                typer.echo(_describe(s) + "\n")
    columns = ["trace", "step", "rank", "kind", "numel"]
    if records and "loss" in records[0]:
        columns += ["zeros", "nonfinite", "loss", "threshold", "selected"]
    emit(records, format, output, columns=columns, title="Captured gradients")


def _describe(source: TraceSource) -> str:
    trace = source.trace
    a = trace.attrs
    run = [f"{a[key]}" for key in ("model", "data", "compressor") if key in a]
    if "ratio" in a:
        run.append(f"ratio {a['ratio']:g}")
    if "error_feedback" in a:
        run.append(("with" if a["error_feedback"] else "without") + " error feedback")
    lines = [
        f"{trace.path}",
        f"  {', '.join(run) or 'no description of the run'}",
        f"  {trace.numel:,} elements in {len(trace.layers)} parameters, "
        f"{trace.world_size} ranks of which {len(trace.ranks)} captured, "
        f"{len(trace.steps())} steps",
    ]
    steps = {rank: trace.steps(rank) for rank in trace.ranks}
    most = max(map(len, steps.values()), default=0)
    lines += [
        f"  rank {rank} has fewer: {len(have)} of {most} steps, the last {have[-1] if have else '–'}"
        for rank, have in steps.items()
        if len(have) < most
    ]
    return "\n".join(lines)


@app.command()
def fit(
    source: SourceArgument,
    model: ModelOption = None,
    method: MethodOption = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also fit each parameter.")
    ] = False,
    bootstrap: Annotated[
        int,
        typer.Option(help="Replicates of a parametric bootstrap for a p-value; 0: none.", min=0),
    ] = 0,
    size: Annotated[int, typer.Option(help="Elements of the subsample it tests.", min=2)] = 2000,
    seed: Annotated[int, typer.Option(help="Of the subsample.", min=0)] = 0,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit symmetric distributions and measure their distance from the data.

    ks: Kolmogorov distance; wasserstein: relative to the mean magnitude; tail error: largest |ln η_model/η_exact| at
    ratios from 0.1 to 0.0001. JSON and CSV have all distances, standard errors and k̂/k.
    """
    from gradstats.analysis import fit_records
    from gradstats.sources import matching, open_sources

    _check_format(format)
    selection = _selection(step, rank, kind)
    sources = matching(open_sources(source), **selection)

    def work(on_progress: Callable[[], None], client: Any) -> list[dict[str, Any]]:
        return [
            record
            for s in sources
            for record in fit_records(
                s,
                _models(model),
                method=cast("Method | None", method),
                per_layer=per_layer,
                replicates=bootstrap,
                size=size,
                seed=seed,
                client=client,
                on_progress=on_progress,
                **selection,
            )
        ]

    records = _with_progress("fitting", sources, selection, work, scheduler)
    columns = ["trace", "step", "rank", "kind", "layer", "model", "params", "ks", "wasserstein"]
    columns += ["tail_error", *(["p_value", "p_naive"] if bootstrap else [])]
    title = "Fits"
    if bootstrap:
        title += f"; p of {bootstrap} refitted replicates of {size} elements, Kolmogorov's distance"
    emit(records, format, output, columns=columns, title=title)
    _report_problems(records, format)


def _models(names: list[str] | None) -> list[str]:
    """Return the models asked for; the sparsity-inducing ones if none is."""
    from gradstats._fit import MODELS
    from gradstats.distributions import SIDS

    return list(MODELS) if names == ["all"] else list(names or SIDS)


def _report_problems(records: Sequence[dict[str, Any]], format: str) -> None:
    """Say below a table what a fit's status says, once each."""
    if format != "table":
        return
    where: dict[tuple[str, str], int] = {}
    for record in records:
        if record["status"] != "ok":
            key = record["model"], record["status"]
            where[key] = where.get(key, 0) + 1
    for (model, status), n in where.items():
        typer.echo(f"{model}: {status} ({n} of the fits)", err=True)


@app.command()
def compressibility(
    source: SourceArgument,
    window: Annotated[
        str | None,
        typer.Option(help="Ranks FIRST:LAST to look at; the largest hundredth if absent."),
    ] = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Check the power-law decay of the sorted magnitudes, beside controls that have none.

    sigma p: how fast the error of keeping the k largest falls; a power law promises p − ½.
    """
    from gradstats.analysis import compressibility_records
    from gradstats.sources import matching, open_sources

    _check_format(format)
    ranks = _window(window)
    selection = _selection(step, rank, kind)
    sources = matching(open_sources(source), **selection)
    records = _with_progress(
        "decay",
        sources,
        selection,
        lambda on_progress, client: compressibility_records(
            sources, ranks, client=client, on_progress=on_progress, **selection
        ),
        scheduler,
    )
    columns = [
        "trace",
        "step",
        "rank",
        "kind",
        "p",
        "p_low",
        "p_high",
        "hill",
        "sigma_p",
        "window",
        "compressible",
    ]
    emit(
        records,
        format,
        output,
        columns=columns,
        title="Decay of sorted magnitudes, 95 % intervals",
        group_by=(),
    )


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"a window is two ranks like 1:1000, not {text!r}") from None
    return first, last


@app.command()
def quality(
    source: SourceArgument,
    ratio: Annotated[
        list[float] | None, typer.Option("--ratio", help="Kept fraction k/d (repeatable).")
    ] = None,
    estimator: Annotated[
        list[str] | None, typer.Option("--estimator", help="Threshold rule (repeatable).")
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Fixed number of stages of the sidco rules; adaptive if absent."),
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also each parameter by itself.")
    ] = False,
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
    from gradstats._quality import quality as measure
    from gradstats._quality import stage_budget
    from gradstats.sources import matching, open_sources
    from gradstats.thresholds import ESTIMATORS

    _check_format(format)
    selection = _selection(step, rank, kind)
    sources = matching(open_sources(source), **selection)
    options = {name: {"stages": stages} for name in ESTIMATORS if "sidco" in name and stages}

    function: Callable[..., list[dict[str, Any]]] = measure
    if by_stage:
        function = stage_budget

    def work(on_progress: Callable[[], None], client: Any) -> list[dict[str, Any]]:
        return [
            record
            for s in sources
            for record in function(
                s,
                ratio or (0.1, 0.01, 0.001),
                estimator or tuple(ESTIMATORS),
                options=options,
                on_progress=on_progress,
                per_layer=per_layer,
                **selection,
            )
        ]

    records = _with_progress("quality", sources, selection, work)
    if by_stage:
        columns = ["trace", "step", "rank", "kind", "layer", "estimator", "ratio", "stage"]
        columns += ["asked", "got", "factor", "quality"]
        emit(records, format, output, columns=columns, title="k̂/k stage by stage")
        return
    columns = ["trace", "estimator", "ratio", "kind", "layer", "mean", "low", "high"]
    columns += ["min", "max", "energy_error", "n", "floor"]
    emit(
        records,
        format,
        output,
        columns=columns,
        title="Estimation quality k̂/k; low–high: 90 % of the gradients; floor: 1.96/√k",
    )


@app.command()
def pot(
    source: SourceArgument,
    ratio: Annotated[
        list[float] | None,
        typer.Option("--ratio", help="Of the non-zero elements beyond a threshold (repeatable)."),
    ] = None,
    method: Annotated[str, typer.Option(help="moments, mle or pwm.")] = "mle",
    choose: Annotated[
        int, typer.Option(help="Replicates of the tests that choose a threshold; 0: none.", min=0)
    ] = 0,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Instead: the tail at 0.1 pooled, normalised and by layer."),
    ] = False,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Fit the peaks over a series of thresholds: how heavy is the tail, and from where on.

    c: generalized Pareto shape ξ, above 0 a heavy tail; scale: σ − cu, which with c stays the same from a good
    threshold on.
    """
    from gradstats._fit import METHODS
    from gradstats.analysis import mixture_records, pot_records
    from gradstats.sources import matching, open_sources

    _check_format(format)
    if method not in METHODS:
        raise InputError(f"no method {method!r}; there is {', '.join(METHODS)}")
    selection = _selection(step, rank, kind)
    sources = matching(open_sources(source), **selection)
    chosen: Method = method

    def work(on_progress: Callable[[], None], client: Any) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for s in sources:
            if layers:
                at = ratio[0] if ratio else 0.1
                records += mixture_records(
                    s, at, method=chosen, client=client, on_progress=on_progress, **selection
                )
            else:
                records += pot_records(
                    s,
                    ratio,
                    method=chosen,
                    replicates=choose,
                    client=client,
                    on_progress=on_progress,
                    **selection,
                )
        return records

    records = _with_progress("peaks", sources, selection, work, scheduler)
    labels = ["trace", "step", "rank", "kind"]
    if layers:
        columns, title = [*labels, "layer", "n", "c", "c_low", "c_high"], "Tail shapes by layer"
    else:
        columns = [
            *labels,
            "ratio",
            "threshold",
            "n",
            "mean_excess",
            "c",
            "c_low",
            "c_high",
            "scale",
        ]
        columns += ["p_value", "chosen"] if choose else []
        title = "Peaks over threshold, 95 % intervals"
        if choose:
            title += "; p: of 1000 excesses each, and what they cannot show stays"
    emit(records, format, output, columns=columns, title=title, group_by=("trace", "kind", "step"))


@app.command()
def drift(
    source: SourceArgument,
    quantity: Annotated[
        list[str] | None,
        typer.Option(
            "--quantity",
            help="mean, threshold, shape, p (these if absent), rms, max, scale, ks, … (repeatable).",
        ),
    ] = None,
    model: ModelOption = None,
    ratio: Annotated[
        list[float] | None, typer.Option("--ratio", help="Of the thresholds (repeatable).")
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also each parameter by itself.")
    ] = False,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Quantify how a gradient moves over training: trend, memory, step-to-step change.

    low–high: 90 % of steps and ranks. slope: relative change per 100 steps (JSON and CSV have its Newey-West interval).
    acf1: autocorrelation of lag one. change: 1 % and 99 % quantiles of a step's value over the last one's. It takes
    twenty steps; sketches of every step are made for this (gradstats capture --store sketches --every 1).
    """
    from gradstats.evolution import drift_records, over_training
    from gradstats.sources import matching, open_sources

    _check_format(format)
    selection = _selection(step, rank, kind)
    sources = matching(open_sources(source), **selection)

    def work(on_progress: Callable[[], None], client: Any) -> list[dict[str, Any]]:
        records = []
        for s in sources:
            dataset = over_training(
                s,
                models=_models(model),
                ratios=ratio or (0.1, 0.01, 0.001),
                per_layer=per_layer,
                client=client,
                on_progress=on_progress,
                **selection,
            )
            records += [{"trace": s.name} | r for r in drift_records(dataset, quantity or ())]
        return records

    records = _with_progress("measuring", sources, selection, work, scheduler)
    columns = ["trace", "quantity", "kind", "layer", "n", "low", "high", "slope"]
    columns += ["acf1", "change_low", "change_high"]
    emit(records, format, output, columns=columns, title="Drift over training")


@app.command()
def bench(
    numel: Annotated[
        list[int] | None, typer.Option("--numel", help="Elements (repeatable).")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option("--ratio", help="Kept fraction k/d (repeatable).")
    ] = None,
    estimator: Annotated[
        list[str] | None, typer.Option("--estimator", help="Threshold rule (repeatable).")
    ] = None,
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

    from gradstats.bench import bench as measure
    from gradstats.tables import progress_bar
    from gradstats.thresholds import ESTIMATORS, make_estimator, target_count

    _check_format(format)
    if repeats < 1 or any(n < 1 for n in numel or ()):
        raise InputError("numel and repeats must be at least 1")
    for name in estimator or ():
        make_estimator(name)
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


@app.command()
def report(
    source: SourceArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write.", metavar="FILE.html")
    ],
) -> None:
    """Write one self-contained page with the figures and tables of a source."""
    from gradstats.report import write_report
    from gradstats.sources import open_sources

    write_report(open_sources(source), output)
    typer.echo(f"wrote {output}")


def main() -> None:
    """Run the command line: one line on stderr and exit code 2 for anything the user can mend."""
    for entry in entry_points(group="gradstats.commands"):
        entry.load()(app)
    try:
        app(standalone_mode=True)
    except GradstatsError as error:
        typer.echo(f"gradstats: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("gradstats: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
