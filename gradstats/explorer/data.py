"""What the explorer shows of a training: every gradient and layer in some hundred bytes, and how it is packed."""

# Size: what the page's JSON holds is gathered and packed in one file, which its JavaScript is read beside.

from __future__ import annotations

import base64
import itertools
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.agreement import each_step
from gradstats.analysis.pieces import evaluate, plan_sketches
from gradstats.analysis.quality import each_record
from gradstats.console import no_progress
from gradstats.errors import InputError, unknown
from gradstats.hooks.spikes import LIMIT, SURE, WINDOW, Spikes
from gradstats.plots.style import LINES, PALETTE, label_of, look_of
from gradstats.primitives.ratio import check_ratios, check_several, each_once, target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import fit
from gradstats.statistics.goodness import tail_distances
from gradstats.statistics.laws import LAWS, LawName
from gradstats.statistics.laws.choice import law_of
from gradstats.statistics.solution import FitError
from gradstats.thresholds import ESTIMATORS, make_estimator
from gradstats.trace import Kind
from gradstats.trace.sources import SKETCHED, Source, Subset, TraceSource
from gradstats.version import __version__

__all__ = [
    "ALARMS",
    "DRAWN",
    "MOST",
    "RANKS",
    "RATIOS",
    "Series",
    "fitted",
    "gather",
    "needs_elements",
    "payload",
]

RANKS = 96
"""Magnitudes of every gradient that travel: those at ranks n^(i/95), rounded, i = 0 … 95, of n that are not zero."""

RATIOS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Kept fractions at which rules are counted by default: the stops of the slider."""

MOST = 8_000_000
"""Bytes of data beyond which steps are left out."""

DRAWN = ("laplace", "dgamma", "double_genpareto", "norm", "t", "gennorm", "dweibull", "lognorm")
"""Laws that the page can draw: it has their functions."""

ALARMS = {"growth": 2, "spike": 1, "collapse": -1}
"""Alarms of :class:`gradstats.hooks.Monitor`, as numbers; the later one is kept where there are two."""

_SHAPE = "double_genpareto"
"""Law whose shape ξ the strips show."""

_QUANTITIES = ("cosine", "signs", "overlap", "union")
"""What ranks have in common, by the names of :func:`gradstats.agreement`."""

Packed: TypeAlias = dict[str, Any]
_Row: TypeAlias = tuple[dict[str, Any], dict[str, str]]


@dataclass
class Series:
    """The gradients of one rank and kind, in the order of the steps.

    Attributes
    ----------
    source : Source
        Where they come from.
    rank : int
        Rank.
    kind : Kind
        Kind of gradient.
    steps : list of int
        Steps.
    layers : list of str
        ``all``, then the parameters.
    numel : list of int
        Elements of each.
    rules : list of str
        Rules counted.
    models : list of str
        Laws fitted.
    arrays : dict of str to ndarray, shape (steps, layers, …)
        ``magnitudes`` at :data:`RANKS` ranks, ``zeros`` and ``nonfinite`` (numbers), ``norm``, ``xi`` (shape of the
        double generalized Pareto), ``alarm`` (of :data:`ALARMS`, NaN where too few steps came before); ``selected``
        by rule and ratio, ``design`` by ratio; ``params``, ``stderr`` and ``tail_error`` of each law, by ``NAME:LAW``.
    flags : dict of str to list
        By law, what there is to doubt: a text for each step and layer.
    """

    source: Source
    rank: int
    kind: Kind
    steps: list[int]
    layers: list[str]
    numel: list[int]
    rules: list[str]
    models: list[str]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    flags: dict[str, list[list[str]]] = field(default_factory=dict)

    @property
    def sketched(self) -> bool:
        """Whether only sketches were captured."""
        return self.source.sketched(self.rank, self.kind)

    @property
    def losses(self) -> list[float | None]:
        """Training loss of each step; None where it is not known."""
        known: dict[int, float] = {}
        if isinstance(self.source, TraceSource):
            columns = self.source.trace.scalars(self.rank)
            known = dict(zip(columns["step"].tolist(), columns["loss"].tolist(), strict=True))
        losses = (known.get(step, math.nan) for step in self.steps)
        return [loss if math.isfinite(loss) else None for loss in losses]


def needs_elements(rule: str) -> bool:
    """Tell whether a rule's threshold depends on signs or places, which no sketch has.

    Parameters
    ----------
    rule : str
        Name of :data:`gradstats.thresholds.ESTIMATORS`.

    Returns
    -------
    bool
        True if it finds another threshold for the same magnitudes with other signs and in another order.
    """
    # shifted, so that signs matter; sorted and without signs the magnitudes are the same
    values = np.random.default_rng(0).laplace(0.3, 1.0, 1 << 17).astype(np.float32)
    once, again = (
        make_estimator(rule).estimate(x, 0.01).threshold for x in (values, np.sort(np.abs(values)))
    )
    return not math.isclose(once, again, rel_tol=1e-3)


def gather(
    source: Source,
    subset: Subset,
    *,
    ratios: Sequence[float] = RATIOS,
    rules: Sequence[str] | None = None,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    client: Any = None,
    on_progress: Callable[[], None] = no_progress,
) -> list[Series]:
    """Measure, fit and count what the explorer shows of a source.

    Parameters
    ----------
    source : Source
        Source of gradients or of sketches.
    subset : Subset
        Gradients and layers to look at.
    ratios : sequence of float, optional
        Kept fractions k/d, each in (0, 1].
    rules : sequence of str, optional
        Names of :data:`gradstats.thresholds.ESTIMATORS`; all by default. Of sketches, those that need elements are left
        out.
    models : sequence of str or "all", optional
        Laws to fit, of :data:`DRAWN`; by default those that are no controls.
    client : distributed.Client, optional
        Cluster that does the work.
    on_progress : callable, optional
        Called twice for every gradient.

    Returns
    -------
    list of Series
        One for each rank and kind.

    Raises
    ------
    InputError
        If a rule is unknown, a law cannot be drawn, a ratio is outside (0, 1], or nothing matches.
    """
    ratios = check_ratios(ratios)
    names = each_once(check_several(ESTIMATORS if rules is None else rules, "estimators"))
    for name in names:
        make_estimator(name)  # one that is unknown ends this before the work
    laws = _laws(models)
    parameters = subset.parameters(source)
    sizes = {la.name: la.numel for la in source.layers}
    all_series = []
    keys = subset.keys(source)
    # groupby takes neighbours, so those of a series must stand together
    for (rank, kind), several in itertools.groupby(
        sorted(keys, key=_place(keys)), lambda key: key[:2]
    ):
        steps = [step for _, _, step in several]
        counted = names
        # made-up signs and positions would be counted as if they were the run's
        if source.sketched(rank, kind):
            counted = [name for name in names if not needs_elements(name)]
        series = Series(
            *(source, rank, kind, steps, ["all", *parameters]),
            [source.numel, *(sizes[name] for name in parameters)],
            *(counted, laws),
        )
        all_series.append(series)
    _measure(all_series, client, on_progress)
    _count(all_series, subset, ratios, client, on_progress)
    return all_series


def _place(
    keys: Sequence[tuple[int, Kind, int]],
) -> Callable[[tuple[int, Kind, int]], tuple[int, ...]]:
    """Return the order of series: kinds and ranks as the source has them, steps ascending."""
    order = list(dict.fromkeys(key[:2] for key in keys))
    return lambda key: (order.index(key[:2]), key[2])


def _laws(models: Sequence[LawName | str] | Literal["all"] | None) -> list[str]:
    # controls are fitted where they are chosen
    if models is None:
        return [name for name in DRAWN if not LAWS[name].control]
    if isinstance(models, str) and models == "all":
        return list(DRAWN)
    laws = each_once([law_of(name).name for name in check_several(models, "models")])
    for name in laws:
        if name not in DRAWN:
            raise InputError(f"the explorer has no function of {name}; it draws {', '.join(DRAWN)}")
    return laws


def _measure(several: Sequence[Series], client: Any, on_progress: Callable[[], None]) -> None:
    """Fill in what follows from the sketches."""
    for series in several:
        shape, arrays = (len(series.steps), len(series.layers)), series.arrays
        arrays["magnitudes"] = np.zeros((*shape, RANKS))
        arrays["zeros"], arrays["nonfinite"] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        arrays["norm"], arrays["xi"] = np.zeros(shape), np.full(shape, math.nan)
        for law in series.models:
            parameters = len(LAWS[law].parameters)
            arrays[f"params:{law}"] = np.full((*shape, parameters), math.nan)
            arrays[f"stderr:{law}"] = np.full((*shape, parameters), math.nan)
            arrays[f"tail_error:{law}"] = np.full(shape, math.nan)
            series.flags[law] = [[""] * shape[1] for _ in series.steps]
    # of all series at once, so that a cluster has all of the work
    places = [(series, i) for series in several for i in range(len(series.steps))]

    def plan(submit: Callable[..., Any], place: tuple[Series, int]) -> Any:
        series, i = place
        key = series.rank, series.kind, series.steps[i]
        sketches = plan_sketches(submit, series.source, key, parameters=series.layers[1:])
        return submit(_reduced, sketches, series.models)

    for (series, i), rows in zip(places, evaluate(plan, places, client), strict=True):
        for j, (row, flags) in enumerate(cast("list[_Row]", rows)):
            for name, value in row.items():
                series.arrays[name][i, j] = value
            for law, text in flags.items():
                series.flags[law][i][j] = text
        on_progress()
    for series in several:
        series.arrays["alarm"] = _alarms(series)


def _reduced(sketches: dict[str, Sketch], laws: Sequence[str]) -> list[_Row]:
    """Return the entries of a gradient's arrays and its flags, for every layer."""
    rows: list[_Row] = []
    for sketch in sketches.values():
        m, sums = sketch.magnitudes, sketch.moments
        row = {"magnitudes": _at_ranks(m), "zeros": sums.zeros, "nonfinite": sums.nonfinite}
        # the shape is shown also where this law is not among those asked for
        row |= {"norm": math.sqrt(sums.sum_squares), "xi": _fit(sketch, _SHAPE)["params"][0]}
        fits = {law: _fit(sketch, law) for law in laws}
        for law, one in fits.items():
            row |= {f"{name}:{law}": one[name] for name in ("params", "stderr", "tail_error")}
        rows.append((row, {law: one["flags"] for law, one in fits.items()}))
    return rows


def _alarms(series: Series) -> NDArray[np.float64]:
    """Return what a Monitor of these steps says of each norm: NaN before it can, 0, or a number of :data:`ALARMS`."""
    norms, names = series.arrays["norm"], series.layers[1:]
    alarms = np.zeros(norms.shape)
    # a Monitor needs so many norms before it judges
    alarms[:SURE] = math.nan
    spikes = Spikes(names, WINDOW, LIMIT)
    for i, (norm, *of_layers) in enumerate(norms.tolist()):
        values, _ = spikes.find(norm, dict(zip(names, of_layers, strict=True)))
        if spikes.doubtful:
            del values["spike"]  # the z of the whole, which is no alarm
        # in this order a later alarm overwrites an earlier one
        for name, number in ALARMS.items():
            # the whole gradient has no name in a Monitor's keys
            for j, layer in enumerate(("", *names)):
                if f"{name}/{layer}".rstrip("/") in values:
                    alarms[i, j] = number
    return alarms


def _at_ranks(m: Magnitudes) -> NDArray[np.float64]:
    """Return the magnitudes at the ranks that travel; zeros where there is none."""
    if not m.count:
        return np.zeros(RANKS)
    # whole, and a half rounded up as in js/src/data.js: between two elements there is no magnitude
    ranks = np.floor(m.count ** (np.arange(RANKS) / (RANKS - 1)) + 0.5)
    return np.array([m.upper_quantile(float(rank)) for rank in ranks])


def _fit(sketch: Sketch, law: str) -> dict[str, Any]:
    """Return a law's parameters, their standard errors, the tail error and what there is to doubt."""
    known = LAWS[law]
    nothing = [math.nan] * len(known.parameters)
    try:
        law_fit = fit(sketch, law, known.default_method)
    except FitError as error:
        return {"params": nothing, "stderr": nothing, "tail_error": math.nan, "flags": str(error)}
    distances, _ = tail_distances(law_fit, sketch.magnitudes)
    return {
        "params": [law_fit.params[name] for name in known.parameters],
        "stderr": [law_fit.stderr.get(name, math.nan) for name in known.parameters],
        "tail_error": max(map(abs, distances.values()), default=math.nan),
        "flags": "; ".join(law_fit.flags),
    }


def fitted(series: Series, step: int, layer: str, law: str) -> dict[str, Any]:
    """Fit a law to one layer in one step, when somebody asks for it.

    Parameters
    ----------
    series : Series
        Gradients of a rank and kind.
    step : int
        One of its steps.
    layer : str
        One of its layers.
    law : str
        One of :data:`DRAWN`.

    Returns
    -------
    dict
        params and stderr, in the order of :attr:`gradstats.statistics.laws.Law.parameters`; tail_error; flags.

    Raises
    ------
    InputError
        If there is no such step, layer or law.
    """
    for what, one, known in (
        ("step", step, series.steps),
        ("layer", layer, series.layers),
        ("law", law, DRAWN),
    ):
        if one not in known:
            raise unknown(what, str(one), [str(name) for name in known])
    key = (series.rank, series.kind, step)
    # a submit that calls at once: one gradient, in this process
    sketches = plan_sketches(
        lambda work, *arguments: work(*arguments), series.source, key, parameters=[layer]
    )
    return _fit(sketches[layer], law)


def _count(
    several: Sequence[Series],
    subset: Subset,
    ratios: Sequence[float],
    client: Any,
    on_progress: Callable[[], None],
) -> None:
    """Fill in what every rule keeps of every gradient: a task for each series, as rules learn from step to step."""
    advance = on_progress if client is None else no_progress  # which does not travel

    def plan(submit: Callable[..., Any], series: Series) -> Any:
        series_subset = Subset(
            series.steps, [series.rank], [series.kind], subset.layers, subset.per_layer
        )
        return submit(
            _counted, series.source, series_subset, series.layers, series.rules, ratios, advance
        )

    for series, arrays in zip(several, evaluate(plan, several, client), strict=True):
        series.arrays |= arrays
        if series.sketched:
            series.arrays["design"][:] = math.nan  # places are made up
        if client is not None:
            for _ in series.steps:
                on_progress()


def _counted(
    source: Source,
    subset: Subset,
    layers: Sequence[str],
    rules: Sequence[str],
    ratios: Sequence[float],
    advance: Callable[[], None],
) -> dict[str, NDArray[Any]]:
    """Return ``selected`` and ``design`` of one series, counted on its elements."""
    steps = cast("Sequence[int]", subset.steps)
    selected = np.zeros((len(steps), len(layers), len(rules), len(ratios)), np.int64)
    design = np.full((len(steps), len(layers), len(ratios)), math.nan)
    step, layer, rule, place = (
        {name: i for i, name in enumerate(names)} for names in (steps, layers, rules, ratios)
    )
    # no rule at all is a choice, too; each_record would take it for a mistake
    if rules:
        for r in each_record(source, subset, ratios, rules, on_progress=advance):
            i, j, q = step[r["step"]], layer[r["layer"]], place[r["ratio"]]
            selected[i, j, rule[r["estimator"]], q] = r["selected"]
            design[i, j, q] = r["design"]
    else:
        for _ in steps:
            advance()
    return {"selected": selected, "design": design}


def payload(
    several: Sequence[Series],
    ratios: Sequence[float] = RATIOS,
    *,
    most: int = MOST,
    on_demand: bool = False,
    client: Any = None,
) -> str:
    """Return all that the page needs, as JSON.

    Parameters
    ----------
    several : sequence of Series
        What :func:`gather` returned, of one or more sources.
    ratios : sequence of float, optional
        Kept fractions that were counted.
    most : int, optional
        Bytes beyond which every second step, or more, is left out. The page says so.
    on_demand : bool, optional
        Whether somebody is there to fit a law that was not fitted.
    client : distributed.Client, optional
        Cluster that compares the ranks.

    Returns
    -------
    str
        JSON, in which arrays are typed, deflated and in base64.

    Raises
    ------
    InputError
        If there is nothing, or two sources have the same name.
    """
    if not several:
        raise InputError("there is nothing to explore")
    # a view names its run, kind and rank: the names must tell series apart
    names = [(s.source.name, s.kind, s.rank) for s in several]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)[0]
        raise InputError(f"two sources are called {twice}: rename one, so that a view can name it")
    ratios = check_ratios(ratios)
    # before steps are left out: ranks are compared at all of them
    together = _together(several, ratios, client)
    every, notes = 1, _notes(several)
    packed = [_pack_series(s, ratios, every) for s in several]
    # until it fits, or two steps are left
    while (size := len(json.dumps(packed))) > most and every < max(len(s.steps) for s in several):
        # size falls about in proportion to the steps; at least one step in more is left out each time
        every = math.ceil(every * size / most)
        packed = [_pack_series(s, ratios, every) for s in several]
    if every > 1:
        notes.append(
            f"Every {_ordinal(every)} captured step is here, and the last: all would be more than {most / 1e6:g} MB. "
            "Rules were counted over all of them."
        )
    rules = list(dict.fromkeys(name for s in several for name in s.rules))
    # with Python behind the page any law can be fitted, else only those that were
    laws = list(DRAWN) if on_demand else list(dict.fromkeys(n for s in several for n in s.models))
    return json.dumps(
        {
            "version": __version__,
            "ranks": RANKS,
            "ratios": ratios,
            "notes": notes,
            "rules": [{"name": name, **_look(look_of(name))} for name in rules],
            "laws": [
                {"name": name, "label": label_of(name), "parameters": _symbols(name)}
                | _look({"color": PALETTE[i % 10], "ls": LINES[i % len(LINES)]})
                for i, name in enumerate(laws)
            ],
            "series": packed,
            "agreement": together,
            "on_demand": on_demand,
        },
        # JSON has no NaN: better an error here than in the browser
        allow_nan=False,
        separators=(",", ":"),
    )


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")


def _symbols(law: str) -> list[dict[str, str]]:
    symbols = LAWS[law].symbols
    return [{"name": name, "symbol": symbols.get(name, name)} for name in LAWS[law].parameters]


def _notes(several: Sequence[Series]) -> list[str]:
    """Return what the page has to say of its sources."""
    notes = [f"{s.source.remark}." for s in several if s.source.remark]
    for s in several:
        if s.sketched:
            absent = [name for name in ESTIMATORS if name not in s.rules and needs_elements(name)]
            notes.append(
                f"{s.source.name} was captured as sketches: {SKETCHED}. Rules that need elements are not here: "
                f"{', '.join(absent)}."
            )
    return list(dict.fromkeys(notes))


_SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle", "v": "wye", "P": "plus"}
_SYMBOLS |= {"X": "times", "*": "star", "<": "triangle2", ">": "diamond2", "p": "hexagon"}
_DASHES = {"-": "", "--": "6 3", "-.": "9 3 2 3", ":": "2 3"}


def _look(look: dict[str, Any]) -> dict[str, str]:
    """Return a line of a figure as SVG draws it."""
    dash, marker = look["ls"], look.get("marker", "")
    if not isinstance(dash, str):
        # a figure's dashes are in widths of its line, which is about two pixels here
        dash = " ".join(str(2 * length) for length in dash[1])
    return {
        "color": "#" + "".join(f"{round(255 * part):02x}" for part in look["color"]),
        "dash": _DASHES.get(dash, dash),
        "symbol": _SYMBOLS.get(marker, "asterisk"),
    }


def _pack_series(s: Series, ratios: Sequence[float], every: int) -> dict[str, Any]:
    """Return a series with every n-th step, and the last one."""
    last = len(s.steps) - 1
    # the last step ends every strip
    rows = [i for i in range(len(s.steps)) if i % every == 0 or i == last]
    of = {name: array[rows] for name, array in s.arrays.items()}
    k = np.array([[target_count(ratio, n) if n else 0 for ratio in ratios] for n in s.numel])
    with np.errstate(divide="ignore", invalid="ignore"):
        # k̂ = 0 becomes −∞, which has its own number below
        sizes, off = np.log2(of["magnitudes"]), np.log2(of["selected"] / k[None, :, None, :])
    losses = s.losses
    arrays = {
        # 1/200 of an octave is 0.35 %; int16 reaches 2^±163, beyond all of float32
        "magnitudes": _pack(sizes, 200, delta=True),
        "zeros": _pack(of["zeros"]),
        # counts take all bits: an error of one is an error
        "nonfinite": _pack(of["nonfinite"]),
        "norm": _pack(of["norm"], 0),
        # 1/4096 resolves ξ, and int16 reaches ±8
        "xi": _pack(of["xi"], 4096),
        "alarm": _pack(of["alarm"], 1),
        # 1/1024 of an octave is 0.07 % of k̂/k, and int16 reaches 2^±32
        "off": _pack(off, 1024),
        # 1/64, up to 512: about the most that counts in runs of 512 can vary
        "design": _pack(of["design"], 64),
    }
    fits = {}
    for law in s.models:
        texts = [[s.flags[law][i][j] for j in range(len(s.layers))] for i in rows]
        # few texts come many times: they travel once, by number
        flags = list(dict.fromkeys(["", *itertools.chain.from_iterable(texts)]))
        params = of[f"params:{law}"]
        with np.errstate(divide="ignore", invalid="ignore"):
            # of a standard error only the size matters: its logarithm, to 1/256
            relative = np.log2(of[f"stderr:{law}"] / np.abs(params))
        fits[law] = {
            "params": _pack(params, 0),
            "stderr": _pack(relative, 256),
            "tail_error": _pack(of[f"tail_error:{law}"], 1024),
            "flags": flags,
            "flag": _pack(np.array([[flags.index(text) for text in row] for row in texts])),
        }
    return {
        "run": s.source.name,
        "kind": s.kind,
        "rank": s.rank,
        "sketched": s.sketched,
        "steps": [s.steps[i] for i in rows],
        "losses": [losses[i] for i in rows],
        "layers": [
            {"name": name, "numel": n, "k": k[j].tolist()}
            for j, (name, n) in enumerate(zip(s.layers, s.numel, strict=True))
        ],
        "rules": s.rules,
        "arrays": arrays,
        "fits": fits,
    }


_NAN, _LEAST = -32768, -32767
"""How NaN and minus infinity, as of k̂ = 0, are stored."""


def _pack(values: NDArray[Any], scale: int | None = None, *, delta: bool = False) -> Packed:
    """Return an array as text: counts as uint32, numbers as float32 (scale 0) or as int16 in units of 1/scale.

    Parameters
    ----------
    values : ndarray
        Numbers.
    scale : int, optional
        Units in one; 0 for float32, None for counts.
    delta : bool, optional
        Store differences along the last dimension.
    """
    if scale is None:
        stored: NDArray[Any] = values.astype("<u4")
    elif scale == 0:
        stored = values.astype("<f4")
    else:
        with np.errstate(invalid="ignore"):
            # the two numbers below are taken: NaN and minus infinity
            whole = np.clip(np.rint(values * scale), _LEAST + 1, -_LEAST)
        whole = np.where(np.isneginf(values), _LEAST, np.where(np.isnan(values), _NAN, whole))
        stored = whole.astype("<i2")
        # differences wrap around in int16, and sums of them wrap back
        if delta:
            stored = np.diff(stored, axis=-1, prepend=np.zeros_like(stored[..., :1]))
    # bytes of the same weight beside each other deflate to a third less
    planes = np.ascontiguousarray(
        stored.reshape(-1).view(np.uint8).reshape(stored.size, stored.itemsize).T
    )
    return {
        "type": stored.dtype.str[1:],
        "shape": list(stored.shape),
        "scale": scale or 0,
        "delta": delta,
        "data": base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode(),
    }


def _together(
    several: Sequence[Series], ratios: Sequence[float], client: Any
) -> list[dict[str, Any]]:
    """Return what the ranks of each source and kind have in common, where several were captured in full."""
    agreements = []
    groups: dict[tuple[int, Kind], list[Series]] = {}
    # names of sources may be equal, objects are not
    for s in several:
        groups.setdefault((id(s.source), s.kind), []).append(s)
    for (_, kind), mates in groups.items():
        common = sorted(set(mates[0].steps).intersection(*(s.steps for s in mates)))
        # a rank alone has nothing in common, and sketches do not know positions
        if len(mates) < 2 or not common or any(s.sketched for s in mates):
            continue
        ranks = [s.rank for s in mates]
        shape = len(common), len(mates[0].layers), len(ratios)
        arrays = {name: np.full(shape, math.nan) for name in _QUANTITIES}
        subset = Subset(common, ranks, [kind], mates[0].layers[1:] or None)
        # the union of these ranks is counted, not predicted
        steps = each_step(mates[0].source, subset, ratios, len(ranks), client)
        for _, step, of_layers in steps:
            for layer, records in of_layers.items():
                place = common.index(step), mates[0].layers.index(layer)
                for name in _QUANTITIES:
                    arrays[name][place] = [record[name] for record in records]
        about = {"run": mates[0].source.name, "kind": kind, "ranks": ranks, "steps": common}
        # shares are at most 1; the union of many ranks is beyond what 1/4096 reaches in int16
        scales = {n: 0 if n == "union" else 4096 for n in arrays}
        agreements.append(about | {"arrays": {n: _pack(a, scales[n]) for n, a in arrays.items()}})
    return agreements
