"""Commands about the data: ``info`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradstats.cli.options import FormatOption, OutputOption, SourceArgument
from gradstats.cli.output import Table, note

if TYPE_CHECKING:
    from gradstats.trace.sources import TraceSource

__all__ = ["INFO", "info", "report"]

INFO = Table("Captured gradients", ("trace", "step", "rank", "kind", "numel"))
_RECORDED = ("zeros", "nonfinite", "loss", "threshold", "selected")


def info(  # numpydoc ignore=PR01
    source: SourceArgument, format: FormatOption = "table", output: OutputOption = None
) -> None:
    """Show what a trace holds: steps, ranks, kinds, and what the run recorded."""
    from gradstats.analysis import info
    from gradstats.trace.sources import TraceSource, open_sources

    sources = open_sources(source)
    records = [record for s in sources for record in info.info_records(s)]
    if format == "table" and output is None:
        for s in sources:
            if isinstance(s, TraceSource):
                typer.echo(_describe(s) + "\n")
    recorded = _RECORDED if records and "loss" in records[0] else ()
    INFO.extended("", *recorded).emit(records, format, output)


def _describe(source: TraceSource) -> str:
    trace = source.trace
    a = trace.attrs
    run = [f"{a[key]}" for key in ("model", "data", "compressor") if key in a]
    if "ratio" in a:
        run.append(f"ratio {a['ratio']:g}")
    if "error_feedback" in a:
        run.append(("with" if a["error_feedback"] else "without") + " error feedback")
    captured = set().union(*map(trace.shard_ranks, trace.ranks))
    lines = [
        f"{trace.path}",
        f"  {', '.join(run) or 'no description of the run'}",
        f"  {trace.numel:,} elements in {len(trace.layers)} parameters, "
        f"{trace.world_size} ranks of which {len(captured)} captured, "
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


def report(  # numpydoc ignore=PR01
    source: SourceArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write.", metavar="FILE.html")
    ],
) -> None:
    """Write one self-contained page with the figures and tables of a source."""
    from gradstats.report import write_report
    from gradstats.trace.sources import open_sources

    write_report(open_sources(source), output)
    note(f"wrote {output}")
