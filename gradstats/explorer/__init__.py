"""See a whole training: steps, layers, laws, rules and ranks, in JupyterLab or in a page that one can mail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from gradstats.analysis.over import SpreadGradients, shares, subset_of
from gradstats.console import progress_bar
from gradstats.errors import GradstatsError, InputError
from gradstats.explorer.data import RATIOS, Series, gather, payload
from gradstats.explorer.page import page
from gradstats.files import replace_file
from gradstats.statistics.laws import LawName
from gradstats.thresholds import EstimatorName
from gradstats.trace.sources import Subset, matching, open_source

if TYPE_CHECKING:
    from gradstats.explorer.widget import Explorer

__all__ = ["explore", "write_explorer"]


@shares(SpreadGradients)
def explore(
    sources: object,
    *,
    ratios: Sequence[float] = RATIOS,
    estimators: Sequence[EstimatorName | str] | None = None,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    layers: Sequence[str] | None = None,
    **over: Unpack[SpreadGradients],
) -> Explorer:
    """Open the explorer in JupyterLab: any step, layer, law and ratio of one or more runs.

    Parameters
    ----------
    sources : str, Path, Trace, array_like, mapping of str to array_like, Source, or list or tuple of them
        Each a trace or its path, a gradient file, an array, or arrays by layer name.
    ratios : sequence of float, optional
        Kept fractions k/d at which rules are counted: the stops of the slider.
    estimators : sequence of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    models : sequence of str or "all", optional
        Laws fitted to every layer in every step; by default those that are no controls. Others are fitted where they
        are chosen.
    layers : sequence of str, optional
        Patterns of parameter names, as in :mod:`fnmatch`; all by default.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Explorer
        A widget; ``view.step``, ``view.ratio`` and the others read and set what it shows, ``view.save(path)`` writes a
        page.

    Raises
    ------
    GradstatsError
        If anywidget is not installed, or a source cannot be read or holds nothing.
    InputError
        If a rule or law is unknown, a ratio is outside (0, 1], or nothing matches.

    Examples
    --------
    ``view = gradstats.explore("run.zarr")``
    """
    try:
        # anywidget is an extra: only the widget needs it
        from gradstats.explorer.widget import Explorer
    except ImportError:
        raise GradstatsError(
            "the explorer in JupyterLab needs anywidget: pip install 'gradstats[explore]'; "
            "gradstats explore SOURCE -o FILE.html needs nothing"
        ) from None
    return Explorer(*_gathered(sources, ratios, estimators, models, layers, over))


@shares(SpreadGradients)
def write_explorer(
    sources: object,
    path: str | Path,
    *,
    ratios: Sequence[float] = RATIOS,
    estimators: Sequence[EstimatorName | str] | None = None,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    layers: Sequence[str] | None = None,
    **over: Unpack[SpreadGradients],
) -> None:
    """Write the explorer as one page that needs no server and loads nothing, to open in a browser or to mail.

    Parameters
    ----------
    sources : str, Path, Trace, array_like, mapping of str to array_like, Source, or list or tuple of them
        As in :func:`explore`.
    path : str or Path
        File to write, replaced if it exists.
    ratios : sequence of float, optional
        Kept fractions k/d at which rules are counted: the stops of the slider.
    estimators : sequence of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default.
    models : sequence of str or "all", optional
        Laws fitted to every layer in every step; by default those that are no controls.
    layers : sequence of str, optional
        Patterns of parameter names, as in :mod:`fnmatch`; all by default.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Raises
    ------
    GradstatsError
        If a source cannot be read or holds nothing, or the page cannot be written.
    InputError
        If a rule or law is unknown, a ratio is outside (0, 1], or nothing matches.
    """
    several, ratios = _gathered(sources, ratios, estimators, models, layers, over)
    # two kinds or ranks of a source have one name
    names = ", ".join(dict.fromkeys(s.source.name for s in several))
    text = page(f"Gradients: {names}", payload(several, ratios, client=over["client"]))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _gathered(
    sources: object,
    ratios: Sequence[float],
    rules: Sequence[str] | None,
    models: Sequence[LawName | str] | Literal["all"] | None,
    layers: Sequence[str] | None,
    over: SpreadGradients,
) -> tuple[list[Series], Sequence[float]]:
    """Measure every source under one bar."""
    # a mapping or an array is one source; only lists and tuples are several
    inputs = sources if isinstance(sources, list | tuple) else [sources]
    asked = subset_of(over)
    # every layer by itself: the strips show them side by side
    subset = Subset(asked.steps, asked.ranks, asked.kinds, layers, per_layer=True)
    choice: dict[str, Any] = {"steps": asked.steps, "ranks": asked.ranks, "kinds": asked.kinds}
    # a value that no source has is refused here, before the work; sources without any of it are left out
    opened = matching([open_source(source) for source in inputs], layers=layers, **choice)
    several: list[Series] = []
    with progress_bar() as bar:
        total = sum(len(subset.keys(source)) for source in opened)
        # each gradient is measured and counted
        task = bar.add_task("explore", total=2 * total)

        def advance() -> None:
            bar.advance(task)
            over["on_progress"]()

        for source in opened:
            several += gather(
                source,
                subset,
                ratios=ratios,
                rules=rules,
                models=models,
                client=over["client"],
                on_progress=advance,
            )
    return several, ratios
