"""Output of the commands: records on stdout, notes and progress on stderr."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import typer

from gradstats.errors import InputError
from gradstats.files import replace_file

if TYPE_CHECKING:
    from gradstats.tables import Format
    from gradstats.trace import Kind
    from gradstats.trace.sources import Source

__all__ = [
    *("MOST_ROWS", "Records", "Table", "analyse", "emit", "note"),
    *("note_incomplete", "note_statuses"),
    *("one_by_one", "user_options", "worst_first"),
]

Records: TypeAlias = list[dict[str, Any]]

_MOST_NAMES = 3
MOST_ROWS = 20
"""Most layers that a summary shows of one gradient."""


@dataclass(frozen=True, slots=True)
class Table:
    """What people see of a command's records.

    Attributes
    ----------
    title : str
        Heading of the table.
    columns : tuple of str
        Fields shown. JSON and CSV hold every field.
    group_by : tuple of str
        Fields whose values have a table each on a terminal.
    """

    title: str
    columns: tuple[str, ...]
    group_by: tuple[str, ...] = ("trace",)

    def extended(self, title: str, *columns: str) -> Table:
        """Return the table with a longer title and more columns.

        Parameters
        ----------
        title : str
            Text after the title.
        *columns : str
            Fields after those shown.

        Returns
        -------
        Table
            A new table.
        """
        return replace(self, title=self.title + title, columns=(*self.columns, *columns))

    def emit(
        self,
        records: Sequence[dict[str, Any]],
        format: str,
        output: Path | None,
        answers: Sequence[str] = (),
    ) -> None:
        """Print records, or write them to a file.

        Parameters
        ----------
        records : sequence of dict
            Records of the table.
        format : str
            Format of :data:`gradstats.tables.FORMATS`.
        output : Path or None
            File to write; stdout if None.
        answers : sequence of str, optional
            What follows from the records, in sentences: above a terminal table, and nowhere else.
        """
        emit(
            records,
            format,
            output,
            columns=self.columns,
            title=self.title,
            group_by=self.group_by,
            answers=answers,
        )


def emit(
    records: Sequence[dict[str, Any]],
    format: str,
    output: Path | None,
    *,
    columns: Sequence[str],
    title: str,
    group_by: Sequence[str] = ("trace",),
    answers: Sequence[str] = (),
) -> None:
    """Print records, or write them to a file, in a format of the user's choice.

    Parameters
    ----------
    records : sequence of dict
        Records of the same fields.
    format : str
        Format of :data:`gradstats.tables.FORMATS`. JSON and CSV hold every field.
    output : Path or None
        File to write; stdout if None.
    columns : sequence of str
        Fields that the other formats show.
    title : str
        Heading of a terminal table.
    group_by : sequence of str, optional
        Fields whose values have a table each on a terminal.
    answers : sequence of str, optional
        Sentences above a terminal table.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    from rich.console import Console

    from gradstats.tables import parquet, render

    if format == "parquet" and output is not None:
        return _write(output, parquet(records))

    # without records there is still an empty list, or a table without rows
    groups: dict[tuple[Any, ...], Records] = {} if records else {(): []}
    for record in records:
        key = tuple(record[name] for name in group_by) if format == "table" else ()
        groups.setdefault(key, []).append(record)
    # rich decides, by NO_COLOR among others
    terminal = Console()
    color = output is None and terminal.is_terminal and not terminal.no_color
    width = shutil.get_terminal_size().columns
    # wrapped here, as render takes records only; names such as sidco-e stay whole
    above = [
        textwrap.fill(answer, width, break_on_hyphens=False)
        for answer in answers
        if format == "table"
    ]
    tables = (
        render(
            group,
            cast("Format", format),
            columns=columns,
            title=None if i else title,
            width=width,
            color=color,
            caption=(*group_by, "step", "rank", "kind"),
        )
        for i, group in enumerate(groups.values())
    )
    text = "\n\n".join([*above, *tables])
    if output is None:
        return typer.echo(text, color=color)
    return _write(output, text + "\n")


def _write(output: Path, content: str | bytes) -> None:
    try:
        replace_file(output, content)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def note(text: str) -> None:
    """Print on stderr what is not a result, unless ``--quiet`` is given.

    Parameters
    ----------
    text : str
        The note.
    """
    from gradstats.console import messages
    from gradstats.tables import visible

    console = messages()
    text = "\n".join(map(visible, text.split("\n")))  # names of files and layers are in it
    # one line where it is not for eyes; a path stays whole
    console.print(text, soft_wrap=not console.is_terminal, overflow="ignore", crop=False)


def note_incomplete(counts: Sequence[int], *, numbers: bool = True) -> None:
    """Say how many steps are left out, as not all ranks have them.

    Parameters
    ----------
    counts : sequence of int
        Steps that each row or line leaves out.
    numbers : bool, optional
        Whether also steps are left out that a rank has without such a number.
    """
    if most := max(counts, default=0):
        up_to = "" if len({*counts}) == 1 else "up to "
        are, it = ("step is", "it") if most == 1 else ("steps are", "them")
        why = f"a rank lacks {it}" + " or has no such number there" * numbers
        note(f"{up_to}{most} {are} left out, as {why}: name ranks that hold {it} with --rank")


def note_statuses(records: Sequence[dict[str, Any]], format: str, label: str) -> None:
    """Print below a table what its records' status says, once for each value of a field.

    Parameters
    ----------
    records : sequence of dict
        Records with a field ``status``.
    format : str
        Format of the records. Only ``table`` has notes.
    label : str
        Field whose values are told apart, such as ``model``.
    """
    from collections import Counter

    if format != "table":
        return
    statuses: dict[str, Counter[Any]] = {}
    for record in records:
        if record["status"] != "ok":
            statuses.setdefault(record["status"], Counter())[record[label]] += 1
    for status, names in statuses.items():
        if len(names) > _MOST_NAMES:
            note(f"{status}: {len(names)} {label}s, such as {next(iter(names))}")
            continue
        for name, n in names.items():
            note(f"{name}: {status} ({n} of the fits)")


def worst_first(records: Records, name: str, first: Sequence[str] = ("all",)) -> Records:
    """Return records by layer with the largest values of a field first, and at most :data:`MOST_ROWS` layers of each.

    Parameters
    ----------
    records : list of dict
        Records by layer, of any traces, steps, ranks and kinds.
    name : str
        Field that says how bad a layer is; NaN is not bad at all.
    first : sequence of str, optional
        Names in the column of layers that stay at the top, in this order.

    Returns
    -------
    list of dict
        The records shown, gradient by gradient.
    """
    gradients: dict[tuple[Any, ...], Records] = {}
    for record in records:
        key = tuple(record[label] for label in ("trace", "step", "rank", "kind"))
        gradients.setdefault(key, []).append(record)
    shown: Records = []
    for each in gradients.values():
        shown += sorted(
            (r for r in each if r["layer"] in first), key=lambda r: first.index(r["layer"])
        )
        layers = [r for r in each if r["layer"] not in first]
        # NaN compares with nothing
        layers.sort(key=lambda r: -r[name] if r[name] == r[name] else math.inf)
        shown += layers[:MOST_ROWS]
    return shown


def user_options(**options: Any) -> dict[str, Any]:
    """Return the options that were given, so that the function that takes them has the say about the others.

    Parameters
    ----------
    **options : Any
        Options; None, or an empty list, for what was not given.

    Returns
    -------
    dict
        Those that were.
    """
    # 0 and False count as given
    return {name: value for name, value in options.items() if value not in (None, [])}


def one_by_one(
    records_of: Callable[..., Records], *arguments: Any, **options: Any
) -> Callable[..., Records]:
    """Return the work of :func:`analyse` for a table that is made source by source.

    Parameters
    ----------
    records_of : callable
        ``records_of(source, *arguments, **options)`` returns the records of one source. It takes what :func:`analyse`
        hands down, too.
    *arguments : Any
        Arguments after the source.
    **options : Any
        Keyword arguments.

    Returns
    -------
    callable
        Function of the sources that joins their records.
    """
    return lambda sources, **over: [
        record for s in sources for record in records_of(s, *arguments, **options, **over)
    ]


def analyse(
    title: str,
    source: Path,
    work: Callable[..., Records],
    *,
    scheduler: str | None = None,
    steps: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    last: bool = False,
) -> Records:
    """Open a source and work on it under a progress bar that counts the gradients selected.

    Parameters
    ----------
    title : str
        Title of the progress bar.
    source : Path
        Trace, folder of traces, or gradient file.
    work : callable
        Called with the sources that hold something of the selection, and with the keywords ``steps``, ``ranks``,
        ``kinds`` and ``on_progress``; with ``layers`` and ``client`` only if patterns and a scheduler are given.
    scheduler : str, optional
        Address of a dask cluster that does the work.
    steps, ranks : sequence of int, optional
        Steps and ranks to look at; all by default.
    kinds : sequence of str, optional
        Kinds to look at; all by default.
    layers : sequence of str, optional
        Patterns of parameter names, for tables by layer.
    last : bool, optional
        Look at the last step of every source only, if no steps are given.

    Returns
    -------
    list of dict
        What the work returned.

    Raises
    ------
    GradstatsError
        If the source cannot be read, the selection matches nothing, or there is no scheduler at the address.
    """
    from contextlib import ExitStack

    from gradstats.console import progress_bar
    from gradstats.trace.sources import SKETCHED, Subset, matching, open_sources

    known = cast("Sequence[Kind] | None", kinds)  # --kind has checked them
    sources = matching(open_sources(source), steps=steps, ranks=ranks, kinds=known, layers=layers)
    # the gradients to look at, whose number the progress bar needs
    held = {s: Subset(steps, ranks, known).keys(s) for s in sources}
    ends: dict[Source, list[int]] = {}
    if last and not steps:
        ends = {s: [max(step for _, _, step in keys)] for s, keys in held.items()}
        held = {s: Subset(ends[s], ranks, known).keys(s) for s in sources}
    keys = [(s, key) for s, each in held.items() for key in each]
    for source_of in sources:
        if source_of.remark:
            note(f"{source_of.remark[0].upper()}{source_of.remark[1:]}.")
    rough = dict.fromkeys(s.name for s, (rank, kind, _) in keys if s.sketched(rank, kind))
    # once for each source, and before the work, which may take long
    if rough:
        note(f"Sketches ({', '.join(rough)}): {SKETCHED}.")
    over: dict[str, Any] = {"steps": steps, "ranks": ranks, "kinds": known}
    if layers:
        over["layers"] = layers
    with ExitStack() as stack:
        if scheduler is not None:
            from gradstats.analysis.pieces import connect

            over["client"] = stack.enter_context(connect(scheduler))
        bar = stack.enter_context(progress_bar())
        task = bar.add_task(title, total=len(keys))
        over["on_progress"] = lambda: bar.advance(task)
        # one may hold the last step of another in between
        if ends:
            return [r for s in sources for r in work([s], **over | {"steps": ends[s]})]
        return work(sources, **over)
