"""The command ``plot``: every figure of :mod:`gradstats.plots`, by itself, in a file for a paper or a talk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from gradstats.cli.options import (
    EstimatorOption,
    KindOption,
    LayerOption,
    ModelOption,
    RankOption,
    RatioOption,
    SchedulerOption,
    StepOption,
    models_of,
    one_of,
)
from gradstats.cli.output import Records, analyse, note, note_incomplete
from gradstats.errors import InputError

if TYPE_CHECKING:
    from gradstats.trace.sources import Source

__all__ = ["FIGURES", "Asked", "Figure", "plot"]

Drawing: TypeAlias = tuple[tuple[Any, ...], dict[str, Any], str]
"""Arguments of a figure's function before and after its axes, and what is drawn, in words."""
Reading: TypeAlias = Callable[[Any, "Asked", dict[str, Any]], Drawing]
_MM = 1 / 25.4
_STYLES = ("ticks", "white", "whitegrid", "dark", "darkgrid")
_CONTEXTS = ("paper", "notebook", "talk", "poster")
_FILES = (".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options choose beside steps, ranks and kinds, empty where nothing was chosen; and a dask client."""

    models: Sequence[str]
    ratios: Sequence[float]
    estimators: Sequence[str]
    layers: Sequence[str]
    quantity: str | None
    by: str | None
    client: Any = None


@dataclass(frozen=True, slots=True)
class Figure:
    """How a figure of :mod:`gradstats.plots` is made from a source.

    Attributes
    ----------
    read : callable
        Called with the sources (or the path, for figures of records), :class:`Asked`, and the steps, ranks and kinds
        to look at; returns what the figure's function is called with.
    tall : float
        Height ÷ width.
    records : bool
        Whether it is drawn from records rather than from gradients.
    """

    read: Reading
    tall: float = 0.75
    records: bool = False


def _only(sources: list[Source]) -> Source:
    if len(sources) > 1:
        raise InputError(f"one source a figure, and here are {', '.join(s.name for s in sources)}")
    return sources[0]


def _layer(source: Source, asked: Asked) -> str:
    """Return the layer to draw, ``all`` without a choice."""
    from gradstats.trace.sources import chosen

    names = chosen([la.name for la in source.layers], asked.layers, False, source.name)
    if len(names) > 1:
        raise InputError(f"one layer a figure, and these match: {', '.join(names)}")
    return names[0] if names else "all"


def _layer_suffix(layer: str) -> str:
    """Return a layer as it is said behind what is drawn."""
    return "" if layer == "all" else f", {layer}"


def _one(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Any:
    """Return one gradient: of the first rank and kind asked for, at the last step."""
    from gradstats.trace.sources import Subset

    source = _only(sources)
    layer = _layer(source, asked)
    keys = Subset(**over).keys(source)
    rank, kind, _ = keys[0]
    # steps of other ranks and kinds may be later ones
    step = max(step for *of, step in keys if of == [rank, kind])
    captured = source.read(rank, kind, step)
    for part in source.layers:
        if part.name == layer:
            captured = replace(captured, values=captured.values[part.slice])
    return captured, f"{source.name}, {kind}, step {step}, rank {rank}{_layer_suffix(layer)}"


def _fitted(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Drawing:
    from gradstats.statistics.several import possible

    captured, what = _one(sources, asked, over)
    fits, failed = possible(captured.values, models_of(asked.models))
    for model, why in failed.items():
        note(f"{model}: {why}")
    return (captured.values, fits), {}, what


def _tail(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Drawing:
    captured, what = _one(sources, asked, over)
    return (captured.values,), {"label": captured.kind}, what


def _several(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Drawing:
    """Return sketches of the first, the middle and the last step of each source and kind, or of those asked for."""
    from gradstats.analysis.closest import evenly
    from gradstats.analysis.pieces import sketches_of
    from gradstats.trace.sources import Subset

    # three steps, if none are named
    vectors, most, what = {}, len(over["steps"] or (0, 0, 0)), []
    for source in sources:
        keys, layer = Subset(**over).keys(source), _layer(source, asked)
        what.append(source.name + _layer_suffix(layer))
        rank = keys[0][0]
        for kind in dict.fromkeys(kind for _, kind, _ in keys):
            steps = evenly([s for r, k, s in keys if (r, k) == (rank, kind)], most)
            shown = [(rank, kind, step) for step in steps]
            for (*_, step), sketch in sketches_of(source, shown, asked.client, layer).items():
                label = f"{source.name}, " * (len(sources) > 1) + f"{kind}, step {step}"
                vectors[label] = sketch
    return (vectors,), {}, ", ".join(what)


def _decay(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Drawing:
    from gradstats.statistics.compressibility import default_window

    (vectors,), options, what = _several(sources, asked, over)
    # the window of p is one of ranks, which zeros do not have
    count = max(sketch.magnitudes.count for sketch in vectors.values())
    return (vectors,), options | {"window": default_window(count) if count > 1 else None}, what


def _overview(sources: list[Source], asked: Asked, over: dict[str, Any]) -> Drawing:
    """Return sketches of every step of the first rank and kind asked for."""
    from gradstats.analysis.pieces import sketches_of
    from gradstats.trace.sources import Subset

    source = _only(sources)
    keys, layer = Subset(**over).keys(source), _layer(source, asked)
    rank, kind, _ = keys[0]
    shown = [key for key in keys if key[:2] == (rank, kind)]
    sketches = sketches_of(source, shown, asked.client, layer)
    steps = {step: s for (*_, step), s in sketches.items()}
    options = {"ratios": [*asked.ratios]} if asked.ratios else {}
    return (steps,), options, f"{source.name}, {kind}, rank {rank}{_layer_suffix(layer)}"


def _training(
    sources: list[Source], asked: Asked, over: dict[str, Any], *, per_layer: bool
) -> Drawing:
    from gradstats.analysis.drift import dataset_of
    from gradstats.statistics.pot.peaks import MODEL
    from gradstats.statistics.series import incomplete_steps
    from gradstats.trace.sources import Subset

    source = _only(sources)
    quantity = asked.quantity or "mean"
    layers = {"layers": asked.layers} if asked.layers else {"per_layer": per_layer}
    data = dataset_of(
        source,
        Subset(**over, **layers),
        models=[*asked.models] or [MODEL],
        ratios=[*asked.ratios] or [0.01],
        quantities=[quantity],
        client=asked.client,
    ).isel(kind=0)
    if not per_layer:
        data = data.sel(layer=_layer(source, asked))
    else:
        data = data.isel({d: 0 for d in ("model", "ratio") if d in data.dims})
    layer = "" if per_layer else f", {data['layer'].item()}"
    if not per_layer:
        values = data[quantity].transpose(..., "step", "rank").values
        note_incomplete(incomplete_steps(values).ravel().tolist())
    return (data, quantity), {}, f"{source.name}, {data['kind'].item()}{layer}"


def _quality(sources: list[Source], asked: Asked, over: dict[str, Any], *, steps: bool) -> Drawing:
    from gradstats.analysis.quality import quality, quality_series
    from gradstats.analysis.rules import COUNTING
    from gradstats.primitives.ratio import RATIOS
    from gradstats.thresholds import ESTIMATORS
    from gradstats.trace.sources import Subset

    source = _only(sources)
    layer, kind = _layer(source, asked), Subset(**over).keys(source)[0][1]
    rules = [*asked.estimators] or [name for name in ESTIMATORS if name not in COUNTING]
    ratios, what = [*asked.ratios] or [*RATIOS], f"{source.name}, {kind}"
    if steps:
        # one ratio in a figure: without a choice the smallest
        ratios = ratios[-1:]
        what += f", ratio {ratios[0]:g}"
    records = (quality_series if steps else quality)(
        source,
        ratios,
        rules,
        layers=[*asked.layers] or None,
        client=asked.client,
        **over | {"kinds": [kind]},
    )
    return ([r for r in records if r["layer"] == layer],), {}, what + _layer_suffix(layer)


def _records(
    path: Path,
    asked: Asked,
    over: dict[str, Any],
    *,
    fields: Sequence[str],
    of: str,
    options: Callable[[Asked], dict[str, Any]] = lambda asked: {},
    per_layer: bool = False,
) -> Drawing:
    """Return records that have some fields: of a file of JSON, or of what compressors did in traces."""
    chosen = options(asked)
    # the fields that options choose must be there as well
    fields = [*fields, *(v for n, v in chosen.items() if n in ("value", "by", "at"))]
    if path.suffix in _FILES:
        records = _from_file(path, of)
    elif of.startswith("compression"):
        records = _from_traces(path, per_layer)
    else:
        raise InputError(f"this figure is drawn from records: gradstats {of} -o records.json")
    if asked.layers:
        from gradstats.trace.sources import chosen as matching

        names = list(dict.fromkeys(r["layer"] for r in records if "layer" in r))
        if not names:
            raise InputError("this figure is of no layer by itself: leave out --layer")
        wanted = matching(names, asked.layers, False, path.name)
        records = [r for r in records if r.get("layer") in wanted]
    for field in fields:
        if not any(field in r for r in records):
            raise InputError(f"no {field} in {path}: this figure takes what gradstats {of} writes")
    # steps that were not diagnosed have no residual, and traces of old have no seconds
    shown = [r for r in records if all(r.get(f) is not None and r[f] == r[f] for f in fields)]
    if not shown:
        raise InputError(f"{', '.join(fields)} of no step in {path}: see --diagnose-every")
    return (shown,), chosen, path.name


def _from_file(path: Path, of: str) -> Records:
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        documents = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    records = documents if path.suffix == ".jsonl" else documents[0]
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise InputError(f"{path} is not JSON of gradstats {of}")
    # the largest gradient, with the fewest threads
    if of.startswith("bench ") and records:  # one size and number of threads
        numel = max(r.get("numel", 0) for r in records)
        records = [r for r in records if r.get("numel", 0) == numel]
        threads = min(r.get("threads", 1) for r in records)
        records = [r for r in records if r.get("threads", 1) == threads]
    return records


def _from_traces(path: Path, per_layer: bool) -> Records:
    """Return what the compressors of one or several traces did, and which training each record is of."""
    from itertools import accumulate

    from gradstats.analysis.compression import compression
    from gradstats.trace.sources import TraceSource, open_sources

    records: Records = []
    for source in open_sources(path):
        if not isinstance(source, TraceSource):
            continue
        trace = source.trace
        labels = {
            "compressor": trace.attrs.get("compressor", source.name),
            "seed": trace.attrs.get("seed", 0),
        }
        by_rank: dict[int, Records] = {}
        for row in compression(trace, per_layer=per_layer):
            by_rank.setdefault(row["rank"], []).append(row)
        for rank in trace.ranks:
            columns = trace.scalars(rank)
            losses = dict(zip(columns["step"].tolist(), columns["loss"].tolist(), strict=True))
            rows = by_rank.get(rank, [])
            # ranks that hold shards of one model select of different elements, and what they send is added up
            sharing = len(trace.shard_ranks(rank))
            exchanging = {"nproc": trace.world_size // sharing}
            # bytes add up within a rank, over its captured steps
            sent = accumulate(r.get("bytes", 0) / sharing / 1e6 for r in rows)
            records += [
                row
                | labels
                | exchanging
                | {"loss": losses[row["step"]], "megabytes": megabytes, "sampled": True}
                for row, megabytes in zip(rows, sent, strict=True)
            ]
    if not records:
        raise InputError(
            f"{path} holds no steps of a gradstats compressor"
            + " that were diagnosed: capture with --diagnose-every N" * per_layer
        )
    return records


def _curves(asked: Asked) -> dict[str, Any]:
    return {"value": asked.quantity or "loss", "by": asked.by or "step"}


_LIVE = "compression (or a trace of it)"
FIGURES: dict[str, Figure] = {
    **dict.fromkeys(("tail", "density", "qq"), Figure(_fitted)),
    **dict.fromkeys(("mean_excess", "parameter_stability"), Figure(_tail)),
    "magnitude_decay": Figure(_decay),
    **dict.fromkeys(("best_k_error", "local_exponent", "window_exponent"), Figure(_several)),
    "overview": Figure(_overview, 0.6),
    "drift": Figure(partial(_training, per_layer=False)),
    **dict.fromkeys(("drift_map", "layer_map"), Figure(partial(_training, per_layer=True), 1.3)),
    "quality_bars": Figure(partial(_quality, steps=False)),
    "quality_over_steps": Figure(partial(_quality, steps=True)),
    "latency_bars": Figure(
        partial(
            _records,
            fields=("compressor", "ratio"),
            of="bench ",
            options=lambda asked: {"value": asked.quantity or "seconds"},
        ),
        1.0,
        True,
    ),
    "speedup": Figure(
        partial(
            _records,
            fields=("compressor", "ratio", "speedup", "speedup_low", "speedup_high"),
            of="plan",
            options=lambda asked: {"at": asked.by or "rate"},
        ),
        records=True,
    ),
    "time_split": Figure(
        partial(
            _records,
            fields=("compressor", "compute", "select", "communicate"),
            of="bench-network",
        ),
        1.1,
        True,
    ),
    "build_up": Figure(
        partial(_records, fields=("compressor", "nproc", "build_up"), of=_LIVE), records=True
    ),
    "lags_delta": Figure(
        partial(_records, fields=("layer", "step", "delta"), of=_LIVE, per_layer=True),
        records=True,
    ),
    "matching_rate": Figure(
        partial(_records, fields=("compressor", "step", "matching_rate"), of=_LIVE), records=True
    ),
    "training_curves": Figure(
        partial(_records, fields=("compressor", "seed"), of=_LIVE, options=_curves), records=True
    ),
}
"""Functions of :mod:`gradstats.plots` by name, and the reading that each needs.

Not ``timeline``: no command writes its records, which Python has of :func:`gradstats.network.simulate`.
"""


def _kinds() -> tuple[str, ...]:
    return tuple(name.replace("_", "-") for name in FIGURES)


def plot(  # numpydoc ignore=PR01
    figure: Annotated[
        str,
        typer.Argument(
            metavar="FIGURE",
            help="Figure to draw, of those above.",
            show_default=False,
            autocompletion=lambda incomplete: [n for n in _kinds() if n.startswith(incomplete)],
        ),
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A trace, a folder of traces or a gradient file; or records as .json or .jsonl.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="The file to write: .pdf, .svg or .png.", metavar="FILE"
        ),
    ],
    width: Annotated[float, typer.Option(help="Width in mm.", min=20, max=1000)] = 85.0,
    height: Annotated[
        float | None,
        typer.Option(help="Height in mm; what suits the figure if absent.", min=20, max=1000),
    ] = None,
    title: Annotated[str, typer.Option(help="Title over the axes; none if absent.")] = "",
    style: Annotated[
        str,
        typer.Option(
            help=f"Style of seaborn: {', '.join(_STYLES)}.", **one_of("style", lambda: _STYLES)
        ),
    ] = "ticks",
    context: Annotated[
        str,
        typer.Option(
            help=f"Sizes of seaborn: {', '.join(_CONTEXTS)}.",
            **one_of("context", lambda: _CONTEXTS),
        ),
    ] = "paper",
    dark: Annotated[
        bool, typer.Option("--dark", help="Draw for a dark page, on no background.")
    ] = False,
    quantity: Annotated[
        str | None,
        typer.Option(
            help="What drift, drift-map and layer-map follow (as `drift`), training-curves (loss, quality, …) or "
            "latency-bars (seconds, streams, speedup)."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Horizontal axis of training-curves (step, seconds, megabytes) and speedup (rate, workers)."
        ),
    ] = None,
    model: ModelOption = None,
    estimator: EstimatorOption = None,
    ratio: RatioOption = None,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    scheduler: SchedulerOption = None,
) -> None:
    """Draw one figure for a paper or a talk: fonts embedded, width in mm, no title.

    Of one gradient, the last of the first kind and rank unless chosen: tail, density, qq, mean-excess,
    parameter-stability. Of the first, middle and last step: magnitude-decay, best-k-error, local-exponent,
    window-exponent. Of a training: overview, drift, drift-map, layer-map, quality-bars, quality-over-steps; of its
    compressor build-up, lags-delta, matching-rate, training-curves. Of records, as `-o FILE.json` of bench, plan and
    bench-network writes them: latency-bars, speedup, time-split.
    """
    from gradstats import plots
    from gradstats.errors import unknown
    from gradstats.plots.files import check_ending, styled

    name = figure.replace("-", "_")
    if name not in FIGURES:
        raise unknown("figure", figure, _kinds())
    check_ending(output)
    chosen = FIGURES[name]
    asked = Asked(model or (), ratio or (), estimator or (), layer or (), quantity, by)
    over: dict[str, Any] = {"steps": step, "ranks": rank, "kinds": kind}
    if chosen.records:
        drawing = chosen.read(source, asked, over)
    else:

        def work(sources: list[Source], *, client: Any = None, **_: Any) -> Any:
            return chosen.read(sources, replace(asked, client=client), over)

        result: Any = analyse("reading", source, work, scheduler=scheduler, layers=layer, **over)
        drawing = result
    arguments, options, what = drawing
    size = width * _MM, (height or chosen.tall * width) * _MM
    with styled(style, context) as canvas:
        canvas.set_size_inches(*size)
        getattr(plots, name)(*arguments, ax=canvas.subplots(), title=title or None, **options)
        plots.save(canvas, output, dark=dark)
    note(f"wrote {output}: {what}")
