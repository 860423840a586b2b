"""One self-contained page about gradients: verdicts in words, figures, sortable tables, and how it was made."""

from __future__ import annotations

import inspect
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from copy import copy
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from gradstats.console import progress_bar
from gradstats.errors import InputError
from gradstats.files import replace_file
from gradstats.report.html import escape, page, table
from gradstats.report.measured import (
    MOST_STEPS,
    STAGES,
    Measured,
    measure,
)
from gradstats.report.questions import QUESTIONS, SHOULD, Verdict, argument_of, should
from gradstats.report.sections import run, section
from gradstats.tables import Records
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource, open_source
from gradstats.version import __version__

__all__ = ["write_report"]


def write_report(
    sources: object,
    path: str | Path | None = None,
    *,
    advice: Sequence[str] = (),
    client: Any = None,
) -> Records:
    """Write the page for one or more sources: what to do and what the gradient is like, then figures and tables.

    The page loads nothing: style, script and images are in the file. ``gradstats.report(…)`` is this function.

    Parameters
    ----------
    sources : str, Path, Trace, array_like, mapping of str to array_like, Source, or list or tuple of them
        Each a trace or its path, a gradient file, an array, or arrays by layer name.
    path : str or Path, optional
        File to write, replaced if it exists. Without one only the answers are returned.
    advice : sequence of str, optional
        What :func:`gradstats.network.advice` says of plans, each for the source that it begins with the name of; what
        names no source is for the first.
    client : distributed.Client, optional
        Cluster that does the work.

    Returns
    -------
    Records
        The answers on the first screen: source, kind, question, answer, numbers (sentences), warn (whether something is
        wrong).

    Raises
    ------
    GradstatsError
        If a source cannot be read or holds nothing, or the page cannot be written.
    """
    # a mapping or an array is one source; only lists and tuples are several
    several = sources if isinstance(sources, list | tuple) else [sources]
    opened = _told_apart([open_source(source) for source in several])
    with progress_bar() as bar:
        task = bar.add_task("report", total=(STAGES + 1) * len(opened))
        measured, sections = [], []
        for source in opened:
            measured.append(measure(source, lambda: bar.advance(task), client))
            if path is not None:
                sections.append(section(measured[-1]))
            bar.advance(task)
    answers: _Answers = []
    names = tuple(f"{m.source.name}: " for m in measured)
    for i, (m, name) in enumerate(zip(measured, names, strict=True)):
        mine = [text.removeprefix(name) for text in advice if text.startswith(name)]
        if not i:  # what names no source is of the first
            mine += [text for text in advice if not text.startswith(names)]
        # whether to compress is asked of a source, not of each of its kinds
        first = {SHOULD: should(m, m.kinds[0], mine, client)}
        for kind in m.kinds:
            answers.append(
                (m, kind, first | {q: answer(m, kind) for q, answer in QUESTIONS.items()})
            )
            first = {}
    if path is not None:
        runs = "".join(map(run, measured))
        body = "\n".join([_first_screen(measured, answers), *sections, runs, _provenance(measured)])
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # an interrupted report leaves the old page whole
            replace_file(Path(path), page("Gradient report", body))
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
    return Records(
        {"source": m.source.name, "kind": kind, "question": question, "answer": v.headline}
        # a field of a record is one line; the answer has a line a sentence
        | {"numbers": v.numbers.replace("\n", " "), "warn": v.warn}
        for m, kind, verdicts in answers
        for question, v in verdicts.items()
    )


class _Report(ModuleType):
    """The module ``gradstats.report``, which is called as the command of its name, with that signature."""

    __call__ = staticmethod(write_report)


# Python looks up __call__ on the class of what is called: the module's own class is replaced
sys.modules[__name__].__class__ = _Report
# help and completion ask for the signature where they find no function
__signature__ = inspect.signature(write_report)


_Answers: TypeAlias = list[tuple[Measured, Kind, dict[str, Verdict]]]
"""What the first screen answers of every source and kind."""


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Return sources that are told apart by their names: two traces of one name in two folders by their paths."""
    times = Counter(source.name for source in sources)
    distinct_sources: list[Source] = []
    for i, source in enumerate(sources, 1):
        if times[source.name] > 1:
            # a copy, for the user may have more to do with the source
            source, name = copy(source), argument_of(source)
            source.name = (
                f"{name} ({i})" if name in {each.name for each in distinct_sources} else name
            )
        distinct_sources.append(source)
    return distinct_sources


def _first_screen(measured: Sequence[Measured], answers: _Answers) -> str:
    names = [f"{m.source.name}, {kind}" for m, kind, _ in answers]
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    rows = []
    for question in QUESTIONS:
        cells = []
        for name, (_, _, verdicts) in zip(names, answers, strict=True):
            v = verdicts[question]
            warn = " class=warn" if v.warn else ""
            numbers = f"<small>{escape(v.numbers)}</small>"
            cells.append(
                f'<td{warn} data-of="{escape(name)}"><strong>{escape(v.headline)}</strong>{numbers}</td>'
            )
        rows.append(f"<tr><th scope=row>{escape(question)}</th>{''.join(cells)}</tr>")
    links = " · ".join(
        f'<a href="#{escape(m.source.name)}">{escape(m.source.name)}</a>' for m in measured
    )
    sources = (argument_of(m.source) for m in measured)
    # paths with spaces stay one argument
    around = shlex.join(["gradstats", "explore", *sources, "-o", "explore.html"])
    # only the first kind of a source has this answer
    worth = "".join(
        _worth(m.source.name, verdicts[SHOULD]) for m, _, verdicts in answers if SHOULD in verdicts
    )
    return (
        f"<h1>Gradient report: {escape(', '.join(m.source.name for m in measured))}</h1>{worth}"
        f"<nav>Figures and tables: {links} · "
        f'<a href="#made">how this page was made</a>. '
        f"Any step, layer, law and ratio: <code>{escape(around)}</code></nav>"
        f"<div class=scroll><table class=verdicts><thead><tr><td></td>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{''.join(map(_looked_at, measured))}{_READING}"
    )


def _looked_at(m: Measured) -> str:
    """Return which of a trace's ranks and steps the answers are of, where it has more."""
    ranks = {r["rank"] for r in m.ledger}
    of = []
    if len(ranks) > 1:
        of.append(
            f"the data and the estimates of k are judged on all {len(ranks)} ranks, what else is said of a gradient is "
            f"of rank {m.rank}"
        )
    if m.captured > len(m.steps):
        of.append(f"{len(m.steps)} of {m.captured} steps are looked at")
    return f"<p class=note>{escape(m.source.name)}: {escape('; '.join(of))}.</p>" if of else ""


def _worth(name: str, verdict: Verdict) -> str:
    """Return whether to compress, as the beginning of the page."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in verdict.numbers.split("\n"))
    warn = " warn" if verdict.warn else ""
    return (
        f'<section class="advice{warn}"><h2>{SHOULD}</h2><p>{escape(name)}: '
        f"<strong>{escape(verdict.headline)}.</strong></p><ol>{lines}</ol></section>"
    )


_READING = """<p class=note>k: elements a ratio asks to keep; k̂: those a threshold keeps. ξ: shape of the generalized
Pareto distribution of what exceeds a threshold. Compressible: sorted magnitudes fall like rank^(−p), p above ½ (SIDCo,
definition 1), which is no advice: error feedback sends later what is not sent now. Intervals are 95 % and assume
independent elements; those of a gradient depend on one another, so the true intervals are wider.</p>"""


def _provenance(measured: Sequence[Measured]) -> str:
    program = Path(sys.argv[0])
    # python -m gradstats has the file __main__.py as its program
    name = "gradstats" if program.stem == "__main__" else program.name
    packages = ("numpy", "scipy", "torch", "statsmodels", "zarr")
    others = ", ".join(f"{package} {version(package)}" for package in packages)
    versions = f"gradstats {__version__}, {others}"
    rows = []
    for m in measured:
        attributes = m.source.trace.attrs if isinstance(m.source, TraceSource) else {}
        rows.append(
            {
                "source": argument_of(m.source),
                "steps": ", ".join(map(str, m.steps)),
                "ranks": ", ".join(str(r) for r in dict.fromkeys(r["rank"] for r in m.ledger)),
                "kinds": ", ".join(m.kinds),
                "seed": attributes.get("seed"),
            }
        )
    columns = {"source": "source", "steps": "steps looked at", "ranks": "ranks", "kinds": "kinds"}
    return (
        '<h2 id="made">How this page was made</h2>'
        f"<p><code>{escape(shlex.join([name, *sys.argv[1:]]))}</code></p>"
        f"<p>{escape(versions)}, Python {platform.python_version()}. At most {MOST_STEPS} steps of a "
        "trace, one of each stretch; fits and figures at the first, middle and last of them that are not all zero, of "
        "the first rank that is not.</p>"
        + table(rows, columns | {"seed": "seed of the training"}, "Sources")
    )
