"""Commands about the data: ``info``, ``import``, ``report`` and ``explore``."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from gradstats.cli.options import (
    EstimatorOption,
    EverythingOption,
    FormatOption,
    KindOption,
    LayerOption,
    ModelOption,
    OutputOption,
    RankOption,
    RatioOption,
    RttOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
    models_of,
    one_of,
)
from gradstats.cli.output import Table, note, user_options
from gradstats.errors import InputError

if TYPE_CHECKING:
    from gradstats.trace.sources import TraceSource

__all__ = ["INFO", "SUMMARY", "explore", "import_", "info", "report"]

INFO = Table("Captured gradients", ("trace", "step", "rank", "kind", "numel"))
SUMMARY = Table(
    "Captured gradients; zeros: most elements of one; nonfinite: gradients with any",
    ("trace", "kind", "ranks", "steps", "gradients", "numel"),
    (),
)
_MOST_FEWER = 8
"""Most ranks that a summary names that lack steps."""
_RECORDED = ("zeros", "nonfinite", "loss", "threshold", "selected")


def _lists() -> tuple[str, ...]:
    from gradstats.trace.dumps import Lists

    return get_args(Lists)


def _kinds() -> tuple[str, ...]:
    from gradstats.trace import KINDS

    return KINDS


def info(  # numpydoc ignore=PR01
    source: SourceArgument,
    everything: EverythingOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show what a trace holds: the run, its compressor, loss and size; steps, ranks, kinds, and what was recorded.

    The table has one row of each kind; --all and the other formats have every gradient.
    """
    from gradstats.analysis import info
    from gradstats.trace.sources import TraceSource, open_sources

    sources = open_sources(source)
    # facts before the table are for a terminal, and in no file
    if format == "table" and output is None:
        for s in sources:
            if isinstance(s, TraceSource):
                typer.echo(_describe(s, everything) + "\n")
        if not any(s.entries() for s in sources):
            return  # the facts say so
    if format == "table" and not everything:
        records = [record for s in sources for record in info.info_summary(s)]
        counted = ("zeros", "nonfinite") if records and "zeros" in records[0] else ()
        SUMMARY.extended("", *counted).emit(records, format, output)
        if any(r["gradients"] > 1 for r in records):
            note(f"{sum(r['gradients'] for r in records):,} gradients; --all has a row of each.")
        return
    records = [record for s in sources for record in info.info_records(s)]
    recorded = _RECORDED if records and "loss" in records[0] else ()
    INFO.extended("", *recorded).emit(records, format, output)


def _describe(source: TraceSource, everything: bool) -> str:
    from gradstats.analysis.info import describe
    from gradstats.tables import visible
    from gradstats.trace.remote import asked_for

    trace, width = source.trace, shutil.get_terminal_size().columns
    facts = describe(source)
    indent = 3 + max(map(len, facts))
    # not through textwrap, which would break a long path
    lines = [visible(asked_for(trace.path))]
    for name, text in facts.items():
        first = f"  {name:<{indent - 2}}"
        lines += textwrap.wrap(
            visible(text), width, initial_indent=first, subsequent_indent=" " * indent
        )
    # a rank has fewer steps if it was killed, or still writes
    steps = {rank: trace.steps(rank) for rank in trace.ranks}
    most = max(map(len, steps.values()), default=0)
    fewer = [
        f"  rank {rank} has fewer: {len(have)} of {most} steps, the last {have[-1] if have else '–'}"
        for rank, have in sorted(steps.items(), key=lambda each: len(each[1]))
        if len(have) < most
    ]
    shown = len(fewer) if everything else _MOST_FEWER
    lines += fewer[:shown]
    if fewer[shown:]:
        lines.append(
            f"  ranks with fewer that are not named here: {len(fewer) - shown}; --all has them"
        )
    return "\n".join(lines)


def import_(  # numpydoc ignore=PR01
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE…",
            help="Folders of gradient files or checkpoints, and gradient files.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Trace to make or to continue.", show_default=False)],
    step_from_name: Annotated[
        str | None,
        typer.Option(
            help="Where the numbers are in a name, if it has several: grad_{step}_rank{rank}.pt.",
            metavar="PATTERN",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="What the dumps are.", **one_of("kind", _kinds))
    ] = "gradient",
    lists: Annotated[
        str | None,
        typer.Option(
            "--list",
            help="What the tensors of a list in a file are.",
            **one_of("list", _lists),
        ),
    ] = None,
) -> None:
    """Make a trace of dumps: files or checkpoints of a step each, lists in a file.

    An import that was interrupted is continued by the same command; so is one whose folder has got further steps.
    """
    from typing import Any, cast

    from gradstats.console import progress_bar
    from gradstats.trace.dumps import Dumps, dumps_of
    from gradstats.trace.imports import import_dumps
    from gradstats.trace.remote import local

    paths = [local(path) for path in source]
    dumps = dumps_of(paths, step_from_name, cast("Any", lists))
    dump_source = Dumps(dumps, paths[0].name, cast("Any", kind))
    if dump_source.remark:
        note(f"{dump_source.remark[0].upper()}{dump_source.remark[1:]}.")
    with progress_bar() as bar:
        task = bar.add_task("import", total=len(dumps))
        written = import_dumps(dump_source, out, lambda: bar.advance(task))
    there = f"; {len(dumps) - written} were there" if written < len(dumps) else ""
    note(f"{written} of {len(dumps)} gradients imported into {out}{there}")


def report(  # numpydoc ignore=PR01
    source: SourceArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write.", metavar="FILE.html")
    ],
    network: Annotated[
        Path | None,
        typer.Option(
            help="Measured cluster, as for `plan`: the page then begins with its advice.",
            metavar="network.json",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="In place of --network, a link that was not measured: 1gbit, 10gbit, 100gbit, wan, or another rate.",
            metavar="LINK",
        ),
    ] = None,
    rtt: RttOption = None,
    workers: Annotated[
        list[int] | None, typer.Option("--workers", help="Number of workers (repeatable).", min=1)
    ] = None,
    compute: Annotated[
        list[float] | None,
        typer.Option(help="Time of a step without its exchange (repeatable).", metavar="SECONDS"),
    ] = None,
    ratio: RatioOption = None,
    scheduler: SchedulerOption = None,
) -> None:
    """Write one self-contained page: the run, what to do, what the gradient is like, figures and tables.

    With --network or --link, --workers and --compute it says, too, whether compressing would save time.
    """
    from gradstats.analysis.pieces import connect
    from gradstats.report import write_report
    from gradstats.trace.sources import open_sources

    sources = open_sources(source)
    advice = []
    linked = network is not None or link is not None
    if linked and not (workers and compute):
        raise InputError("--network and --link take --workers and --compute, too")
    if not linked and (workers or compute or ratio or rtt):
        raise InputError(
            "--workers, --compute, --ratio and --rtt are of the plan: give --network or --link, too"
        )
    with connect(scheduler) as client:
        if workers and compute:  # of a link, as was checked
            from gradstats.cli.plan import assumed_link, cluster_of
            from gradstats.network import advice as advised
            from gradstats.network import plan

            options = user_options(ratios=ratio, client=client)
            for each in sources:
                # codecs are no option of a report, and are not timed
                cluster = cluster_of(network, link, rtt, each.numel, ratio, (), coded=False)
                plans = plan(each, cluster, compute, workers, **options)
                for n in dict.fromkeys(workers):
                    text = advised([r for r in plans if r["workers"] == n])
                    advice.append(f"{each.name}: {text}")
            if link is not None:
                note(assumed_link(cluster))
        write_report(sources, output, advice=advice, client=client)
    note(f"wrote {output}")


def explore(  # numpydoc ignore=PR01
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE…",
            help="Traces, folders of traces, or .npy, .npz, .safetensors or .pt files.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write.", metavar="FILE.html")
    ],
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    model: ModelOption = None,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
) -> None:
    """Write one self-contained page to look around in: any step, layer, law, rule and ratio of one or more runs.

    It needs no server and loads nothing, so that it can be mailed. The address after # holds the view.
    """
    from gradstats.analysis.pieces import connect
    from gradstats.explorer import write_explorer
    from gradstats.trace.sources import open_sources

    sources = [each for path in source for each in open_sources(path)]
    for each in sources:
        if each.remark:
            note(f"{each.remark[0].upper()}{each.remark[1:]}.")
    wanted = {"ratios": ratio, "estimators": estimator, "models": models_of(model), "layers": layer}
    over = user_options(**wanted, steps=step, ranks=rank, kinds=kind)
    with connect(scheduler) as client:
        write_explorer(sources, output, **over, client=client)
    note(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
