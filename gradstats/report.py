"""One self-contained page: verdicts in words, figures, tables, and how it was made."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradstats._compressibility import default_window
from gradstats._fit import FitError, fit
from gradstats._quality import quality_series, summarise
from gradstats._sketch import sketch
from gradstats.analysis import compressibility_records, fit_records
from gradstats.distributions import SIDS
from gradstats.errors import InputError
from gradstats.primitives import numel_of
from gradstats.sources import SKETCHED, Captured, Source, TraceSource
from gradstats.tables import progress_bar
from gradstats.thresholds import ESTIMATORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_report"]

_RATIOS = (0.1, 0.01, 0.001)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1, h2, h3 {{ line-height: 1.2 }} h2 {{ margin-top: 2.5rem; border-bottom: 1px solid #ccc }}
figure {{ margin: 1rem 0 }} figure img {{ max-width: 100% }} figcaption, .note {{ color: #555; font-size: .9rem }}
.scroll {{ overflow-x: auto }} table {{ border-collapse: collapse; font-size: .85rem }}
th, td {{ padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap }}
th {{ border-bottom: 1px solid #888 }} td.text, th.text {{ text-align: left }}
@media print {{ h2 {{ break-before: page }} .scroll {{ overflow: visible }} }}
</style></head><body>
{body}
</body></html>
"""


def write_report(sources: Sequence[Source], path: Path) -> None:
    """Write the page for one or more sources.

    Parameters
    ----------
    sources : traces or single gradients.
    path : file to write, replaced if it exists.

    Raises
    ------
    InputError
        If the page cannot be written, or a source holds nothing.
    """
    with progress_bar() as bar:
        task = bar.add_task("report", total=4 * len(sources) + 1)
        parts = [_overview(sources)]
        for source in sources:
            parts.append(_section(source, lambda: bar.advance(task)))
        page = _PAGE.format(title="Gradient report", body="\n".join(parts))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        bar.advance(task)


def _overview(sources: Sequence[Source]) -> str:
    from gradstats import __version__

    names = ", ".join(html.escape(source.name) for source in sources)
    return (
        f"<h1>Gradient report</h1><p>Sources: {names}. Made by gradstats {__version__}.</p>"
        "<p class=note>k is the number of elements a ratio asks to keep, k̂ the number a threshold keeps. "
        "A gradient is called compressible if its sorted magnitudes fall like rank^(−p) with p above ½ "
        "(SIDCo, definition 1) on its largest hundredth; uniform, half-normal and Laplace vectors stand beside it "
        "as controls that must fail.</p>"
    )


def _section(source: Source, advance: Callable[[], None]) -> str:
    keys = source.select()
    rank = keys[0][0]
    shown = [key for key in keys if key[0] == rank]
    steps = sorted({step for _, _, step in shown})
    steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    captured = [source.read(*key) for key in shown if key[2] in steps]
    parts = [f"<h2>{html.escape(source.name)}</h2>", _describe(source)]
    if any(source.sketched(rank, kind) for rank, kind, _ in shown):
        parts.append(f"<p class=note>Captured as sketches: {SKETCHED}.</p>")
    decay = compressibility_records([source], steps=steps, ranks=[rank])
    series = quality_series(source, _RATIOS, tuple(ESTIMATORS))
    results = summarise(series)
    parts += [_verdicts(decay, results), _decay_figure(captured)]
    columns = ["kind", "step", "p", "p_low", "p_high", "hill", "c1", "window", "compressible"]
    parts.append(_table(decay, columns))
    advance()
    parts += [
        "<h3>How well thresholds hit their target</h3>",
        _quality_figure(results),
        _steps_figure([r for r in series if r["ratio"] == min(_RATIOS)]),
        _table(results, ["estimator", "ratio", "kind", "mean", "low", "high", "min", "max", "n"]),
        "<p class=note>low to high holds 90 % of the gradients (steps and ranks).</p>",
    ]
    advance()
    parts += ["<h3>Models of the elements</h3>", _fit_figures(captured)]
    advance()
    fits = fit_records(source, steps=steps, ranks=[rank])
    parts.append(
        _table(
            fits, ["kind", "step", "model", "params", "nll", "ks", "tail_error", "zeros", "status"]
        )
    )
    advance()
    return "\n".join(parts)


def _describe(source: Source) -> str:
    if not isinstance(source, TraceSource):
        return f"<p>One gradient of {sum(la.numel for la in source.layers):,} elements.</p>"
    trace = source.trace
    facts = {k: trace.attrs[k] for k in trace.attrs if k not in ("layout", "format")}
    rows = "".join(
        f"<tr><td class=text>{html.escape(k)}</td><td class=text>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
    )
    return (
        f"<p>{trace.numel:,} elements in {len(trace.layers)} parameters; ranks "
        f"{', '.join(map(str, trace.ranks))}; {len(trace.steps())} steps.</p>"
        f"<details><summary>How it was captured</summary><table>{rows}</table></details>"
    )


def _verdicts(decay: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for record in decay:
        if record["step"] is None:
            continue
        verdict = "compressible" if record["compressible"] else "not shown to be compressible"
        lines.append(
            f"Step {record['step']}, {record['kind']}: {verdict}; p = {record['p']:.2f} "
            f"({record['p_low']:.2f}–{record['p_high']:.2f}) on ranks {record['window']}."
        )
    for record in results:
        if record["ratio"] == min(_RATIOS) and record["estimator"] != "exact":
            lines.append(
                f"{record['estimator']} at ratio {record['ratio']:g} on the {record['kind']}: keeps "
                f"{record['mean']:.2f} of what it should "
                f"({record['low']:.2f}–{record['high']:.2f})."
            )
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _decay_figure(captured: Sequence[Captured]) -> str:
    from gradstats import plots

    vectors = {f"{c.kind}, step {c.step}": c.values for c in captured}
    window = default_window(numel_of(captured[0].values))
    return _figure(
        1,
        lambda axes: plots.magnitude_decay(vectors, axes[0], window=window),
        "Sorted magnitudes. Shaded: the ranks the exponent is estimated on.",
    )


def _quality_figure(results: Sequence[dict[str, Any]]) -> str:
    from gradstats import plots

    kinds = list(dict.fromkeys(r["kind"] for r in results))

    def draw(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, kinds, strict=True):
            plots.quality_bars([r for r in results if r["kind"] == kind], ax, title=kind)

    return _figure(
        len(kinds), draw, "Kept over asked for; 1 is right. Grey: noise floor 1 ∓ 1.96/√k."
    )


def _steps_figure(series: Sequence[dict[str, Any]]) -> str:
    from gradstats import plots

    kinds = list(dict.fromkeys(r["kind"] for r in series))
    if len({r["step"] for r in series}) < 2:
        return ""

    def draw(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, kinds, strict=True):
            plots.quality_over_steps([r for r in series if r["kind"] == kind], ax, title=kind)

    return _figure(
        len(kinds),
        draw,
        f"Kept over asked for at ratio {min(_RATIOS):g}, step by step. Rules with a state see the captured "
        "steps as if they were adjacent.",
    )


def _fit_figures(captured: Sequence[Captured]) -> str:
    from gradstats import plots

    figures = []
    for each in captured:
        reduced = sketch(each.values)
        fits = []
        for model in SIDS:
            try:
                fits.append(fit(reduced, model))
            except FitError:
                continue

        def draw(axes: Sequence[Axes], each: Captured = each, fits: list[Any] = fits) -> None:
            plots.density(each.values, fits, axes[0])
            plots.tail(each.values, fits, axes[1])

        caption = f"Density and tail, {each.kind} of step {each.step}, with closed-form fits."
        figures.append(_figure(2, draw, caption))
    return "\n".join(figures)


def _figure(panels: int, draw: Callable[[Sequence[Axes]], object], caption: str) -> str:
    """Render a figure as an embedded PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * max(panels, 1.3), 3.8), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    draw(axes)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    data = base64.b64encode(stream.getvalue()).decode()
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    from gradstats.tables import format_value

    def cell(tag: str, value: Any) -> str:
        kind = "" if isinstance(value, int | float) or value is None else " class=text"
        text = value if tag == "th" else format_value(value)
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = "".join(
        "<tr>" + "".join(cell("td", record[name]) for name in columns) + "</tr>"
        for record in records
    )
    return f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>"
