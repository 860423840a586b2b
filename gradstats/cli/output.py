"""Where commands meet the terminal: records on stdout, notes and progress on stderr."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import typer

from gradstats.errors import InputError

if TYPE_CHECKING:
    from gradstats.tables import Format

__all__ = ["Records", "analyse", "emit", "note", "note_statuses"]

Records: TypeAlias = list[dict[str, Any]]


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
    from rich.console import Console

    from gradstats.tables import render

    groups: dict[tuple[Any, ...], Records] = {} if records else {(): []}
    for record in records:
        key = tuple(record[name] for name in group_by) if format == "table" else ()
        groups.setdefault(key, []).append(record)
    terminal = Console()
    color = output is None and terminal.is_terminal and not terminal.no_color
    text = "\n\n".join(
        render(
            group,
            cast("Format", format),
            columns=columns,
            title=None if i else title,
            width=shutil.get_terminal_size().columns,
            color=color,
        )
        for i, group in enumerate(groups.values())
    )
    if output is None:
        typer.echo(text, color=color)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def note(text: str) -> None:
    """Tell the person something that is not a result; ``--quiet`` keeps it back."""
    from gradstats.console import messages

    messages().print(text, soft_wrap=True)


def note_statuses(records: Sequence[dict[str, Any]], format: str, label: str) -> None:
    """Say below a table what the records' status says, once for each value of the field `label`."""
    from collections import Counter

    if format != "table":
        return
    statuses = Counter((r[label], r["status"]) for r in records if r["status"] != "ok")
    for (name, status), n in statuses.items():
        note(f"{name}: {status} ({n} of the fits)")


def analyse(
    title: str,
    source: Path,
    work: Callable[..., Records],
    *,
    scheduler: str | None = None,
    **selection: Any,
) -> Records:
    """Open a source and work on it under a progress bar that counts the gradients selected.

    Parameters
    ----------
    title : of the progress bar.
    source : trace, folder or file.
    work : called with the sources that hold something of the selection, and ``steps``, ``ranks``, ``kinds``,
        ``on_progress``, and ``client`` if there is a scheduler.
    scheduler : address of a dask cluster.
    selection : ``steps``, ``ranks``, ``kinds``.

    Raises
    ------
    GradstatsError
        For a source that cannot be read, a selection that matches nothing, or no scheduler at the address.
    """
    from contextlib import ExitStack

    from gradstats.console import progress_bar
    from gradstats.trace.sources import SKETCHED, matching, open_sources

    sources = matching(open_sources(source), **selection)
    keys = [(s, key) for s in sources for key in s.select(**selection)]
    rough = dict.fromkeys(s.name for s, (rank, kind, _) in keys if s.sketched(rank, kind))
    if rough:
        note(f"Sketches ({', '.join(rough)}): {SKETCHED}.")
    with ExitStack() as stack:
        if scheduler is not None:
            from gradstats.analysis.pieces import connect

            selection["client"] = stack.enter_context(connect(scheduler))
        bar = stack.enter_context(progress_bar())
        task = bar.add_task(title, total=len(keys))
        return work(sources, on_progress=lambda: bar.advance(task), **selection)
