"""Drift over training: every quantity by step, rank, kind and layer, and the records of ``gradstats drift``."""

# Size: a few lines beyond 500, of which a quarter are docstrings.

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.over import Spread, shares, subset_of
from gradstats.analysis.pieces import Key, Submit, evaluate, plan_sketches
from gradstats.analysis.quality import inner_90, spread_of
from gradstats.console import no_progress
from gradstats.errors import unknown
from gradstats.primitives.ratio import RATIOS, check_ratios, check_several, each_once, target_count
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.compressibility import compressibility
from gradstats.statistics.fitting import fit
from gradstats.statistics.goodness import goodness
from gradstats.statistics.laws import LawName
from gradstats.statistics.laws.choice import chosen, law_of
from gradstats.statistics.laws.law import Method
from gradstats.statistics.resampling import add_holm
from gradstats.statistics.series import incomplete_steps, steps_of_all_ranks, unit_root_p
from gradstats.statistics.slopes import slope, uneven_slope
from gradstats.statistics.solution import FitError
from gradstats.tables import Drift, Records
from gradstats.trace.sources import Source, Subset, TraceSource, open_source

if TYPE_CHECKING:
    import xarray

__all__ = [
    *("FEWEST_STEPS", "QUANTITIES", "Quantity", "dataset_of", "drift", "drift_records"),
    "over_training",
]

_PLAIN = ("zero_fraction", "nonfinite", "mean", "rms", "max", "p", "p_low", "p_high", "hill")
_OF_DECAY = ("p", "p_low", "p_high", "hill")
_DISTANCES = ("nll", "ks", "wasserstein", "tail_error")
_BY_MODEL = ("shape", "scale", *_DISTANCES)

Quantity: TypeAlias = Literal[
    "zero_fraction",
    "nonfinite",
    "mean",
    "rms",
    "max",
    "p",
    "p_low",
    "p_high",
    "hill",
    "shape",
    "scale",
    "nll",
    "ks",
    "wasserstein",
    "tail_error",
    "threshold",
]
"""Names of :data:`QUANTITIES`."""
QUANTITIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_PLAIN, ()),
    **dict.fromkeys(_BY_MODEL, ("model",)),
    "threshold": ("ratio",),
}
"""Quantities measured on every gradient, and their dimensions apart from step, rank, kind and layer."""

_UNIT = "gradient's unit"
_MEANINGS = {
    "zero_fraction": ("share of zeros", "1"),
    "nonfinite": ("NaN and infinite elements", "1"),
    "mean": ("mean magnitude", _UNIT),
    "rms": ("root mean square", _UNIT),
    "max": ("largest magnitude", _UNIT),
    "p": ("decay exponent p", "1"),
    "p_low": ("lower end of the 95 % interval of p", "1"),
    "p_high": ("upper end of the 95 % interval of p", "1"),
    "hill": ("Hill's estimate of p", "1"),
    "shape": ("shape of the fitted model", "1"),
    "scale": ("scale of the fitted model", _UNIT),
    "nll": ("negative log-likelihood", "1"),
    "ks": ("Kolmogorov distance", "1"),
    "wasserstein": ("Wasserstein distance ÷ mean magnitude", "1"),
    "tail_error": ("largest |ln(threshold of the model ÷ exact)|", "1"),
    "threshold": ("exact threshold", _UNIT),
    "captured": ("whether there is a gradient", "1"),
    "loss": ("training loss", "1"),
    "learning_rate": ("learning rate", "1"),
    "step": ("training step", "1"),
    "rank": ("process", "1"),
    "kind": ("kind of gradient", "1"),
    "layer": ("parameter, or all", "1"),
    "model": ("fitted model", "1"),
    "ratio": ("kept fraction k/d", "1"),
}
"""Long name and unit of every variable, as xarray shows them; 1 is a plain number, as in the CF conventions."""

_FOLLOWED = ("mean", "threshold", "shape", "p")
"""Quantities that drift is asked about where none is named."""
_TOTAL = ("total_change", "total_change_low", "total_change_high")

FEWEST_STEPS = 20
"""Steps below which a series says nothing about autocorrelation or stationarity."""


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The work on the sketches of one gradient; it travels to a worker."""

    models: tuple[str, ...]
    method: Method | None
    ratios: tuple[float, ...]
    quantities: frozenset[str]

    def __call__(self, sketches: dict[str, Sketch]) -> dict[str, dict[str, Any]]:
        return {layer: self._one(reduced) for layer, reduced in sketches.items()}

    def _one(self, reduced: Sketch) -> dict[str, Any]:
        m = reduced.magnitudes
        finite = reduced.numel - reduced.moments.nonfinite
        values: dict[str, Any] = {
            "zero_fraction": m.zero_fraction,
            "nonfinite": reduced.moments.nonfinite,
            "mean": m.mean,
            "rms": math.sqrt(m.mean_square) if m.count else math.nan,
            "max": m.max,
            # at least one element: an empty gradient has a threshold, too, which is 0
            "threshold": [m.upper_quantile(max(target_count(r, finite), 1)) for r in self.ratios],
        }
        if reduced.numel and not finite:
            values["threshold"] = [math.nan for _ in self.ratios]
        # the decay and the fits cost more than the sums: only those asked for are made
        if self.quantities.intersection(_OF_DECAY):
            decay = compressibility(reduced)
            values |= {name: getattr(decay, name) for name in _OF_DECAY}
        if self.quantities.intersection(_BY_MODEL):
            rows = [self._fit(model, reduced) for model in self.models]
            values |= {name: [row[name] for row in rows] for name in _BY_MODEL}
        return {name: values[name] for name in self.quantities}

    def _fit(self, model: str, reduced: Sketch) -> dict[str, float]:
        try:
            fitted = fit(reduced, model, self.method or law_of(model).default_method)
        except FitError:
            # no number, and not no record: the array has a place for every gradient
            return dict.fromkeys(_BY_MODEL, math.nan)
        measured = dict.fromkeys(_BY_MODEL, math.nan)
        measured |= {"shape": fitted.shape, "scale": fitted.params["scale"]}
        if self.quantities.intersection(_DISTANCES):
            distances = goodness(fitted, reduced)
            measured |= {name: getattr(distances, name) for name in _DISTANCES}
        return measured


@shares(Spread)
def over_training(
    source: object,
    *,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    method: Method | None = None,
    ratios: Sequence[float] = RATIOS,
    **over: Unpack[Spread],
) -> xarray.Dataset:
    """Measure every captured gradient of a run.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path (of gradients or of sketches), gradient file, array, or arrays by layer name.
    models : sequence of str or "all", optional
        Laws to fit, as in :func:`gradstats.fit_all`; by default those that are no controls.
    method : Method, optional
        Method of all fits, as in :func:`gradstats.fit`. By default each model has its own.
    ratios : sequence of float, optional
        Kept fractions k/d of the exact thresholds, each in (0, 1].
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    xarray.Dataset
        Over (step, rank, kind, layer): zero_fraction, nonfinite, mean, rms, max (of the finite magnitudes above zero,
        in the gradient's unit), p, p_low, p_high, hill (:func:`gradstats.compressibility`); also by ``model``: shape,
        scale, nll, ks, wasserstein, tail_error; also by ``ratio``: threshold, the exact one. Over (step, rank), from a
        trace: loss, learning_rate. Over (step, rank, kind): captured, whether there is a gradient. NaN where there is
        none, or it has no such number. The layer ``all`` is the whole gradient.

    Raises
    ------
    InputError
        If a model is unknown, a ratio is outside (0, 1], or nothing matches.
    """
    return dataset_of(
        open_source(source),
        subset_of(over),
        models=models,
        method=method,
        ratios=ratios,
        client=over["client"],
        on_progress=over["on_progress"],
    )


def dataset_of(
    source: Source,
    subset: Subset,
    *,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    method: Method | None = None,
    ratios: Sequence[float] = RATIOS,
    quantities: Sequence[str] = (),
    client: Any = None,
    on_progress: Callable[[], None] = no_progress,
) -> xarray.Dataset:
    """Return the data set of :func:`over_training` of a source that is open.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    subset : Subset
        Gradients and layers to measure.
    models : sequence of str or "all", optional
        Laws to fit, as in :func:`gradstats.fit_all`; by default those that are no controls.
    method : Method, optional
        Method of all fits, as in :func:`gradstats.fit`. By default each model has its own.
    ratios : sequence of float, optional
        Kept fractions k/d of the exact thresholds, each in (0, 1].
    quantities : sequence of str, optional
        What to measure, of :data:`QUANTITIES`; all by default.
    client : distributed.Client, optional
        Cluster that does the work.
    on_progress : callable, optional
        Called after every gradient.

    Returns
    -------
    xarray.Dataset
        Data set as in :func:`over_training`.
    """
    import xarray

    names, ratios = chosen(models, method), check_ratios(ratios)
    keys, parameters = subset.keys(source), subset.parameters(source)
    wanted = tuple(quantities) or tuple(QUANTITIES)
    work = _Measuring(tuple(names), method, tuple(ratios), frozenset(wanted))

    def plan(submit: Submit, key: Key) -> Any:
        return submit(work, plan_sketches(submit, source, key, parameters=parameters))

    coords: dict[str, list[Any]] = {
        "step": sorted({step for _, _, step in keys}),
        "rank": sorted({rank for rank, _, _ in keys}),
        "kind": list(dict.fromkeys(kind for _, kind, _ in keys)),
        "layer": ["all", *parameters],
        "model": names,
        "ratio": list(ratios),
    }
    base = ("step", "rank", "kind", "layer")
    dims = {name: (*base, *others) for name, others in QUANTITIES.items() if name in wanted}
    arrays = {n: np.full([len(coords[d]) for d in over], math.nan) for n, over in dims.items()}
    captured = np.zeros([len(coords[d]) for d in base[:3]], bool)
    for (rank, kind, step), layers in zip(keys, evaluate(plan, keys, client), strict=True):
        place = (
            coords["step"].index(step),
            coords["rank"].index(rank),
            coords["kind"].index(kind),
        )
        captured[place] = True
        # sketches come in the order of the layer coordinate: all, then the parameters
        for i, values in enumerate(layers.values()):
            for name, value in values.items():
                arrays[name][(*place, i)] = value
        on_progress()
    data = {name: (dims[name], array) for name, array in arrays.items()}
    data["captured"] = base[:3], captured
    attributes: dict[str, Any] = {"source": source.name}
    if isinstance(source, TraceSource):
        data |= _scalars(source, coords)
        # nested settings have no place among attributes of files that xarray writes
        attributes |= {
            k: v for k, v in source.trace.attrs.items() if isinstance(v, str | int | float)
        }
    dataset = xarray.Dataset(data, coords, attributes)
    for name, variable in dataset.variables.items():
        long_name, unit = _MEANINGS[str(name)]
        variable.attrs |= {"long_name": long_name}
        if variable.dtype.kind not in "OU":  # names have no unit
            variable.attrs |= {"units": unit}
    return dataset


def _scalars(
    source: TraceSource, coords: dict[str, list[Any]]
) -> dict[str, tuple[tuple[str, ...], NDArray[np.float64]]]:
    """Return the loss and the learning rate that the run recorded, by step and rank."""
    names = ("loss", "learning_rate")
    shape = len(coords["step"]), len(coords["rank"])
    arrays = {name: np.full(shape, math.nan) for name in names}
    for j, rank in enumerate(coords["rank"]):
        columns = source.trace.scalars(rank)
        # a rank may lack steps that others have
        rows = {int(s): row for row, s in enumerate(columns["step"])}
        for i, step in enumerate(coords["step"]):
            if step in rows:
                for name in names:
                    arrays[name][i, j] = columns[name][rows[step]]
    return {name: (("step", "rank"), array) for name, array in arrays.items()}


@shares(Spread)
def drift(
    source: object,
    quantities: Sequence[Quantity] = (),
    *,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    method: Method | None = None,
    ratios: Sequence[float] = RATIOS,
    **over: Unpack[Spread],
) -> Records:
    """Measure every captured gradient of a run, and quantify how it moves: :func:`drift_records` in one call.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path (of gradients or of sketches), gradient file, array, or arrays by layer name.
    quantities : sequence of str, optional
        Quantities to follow, of :data:`QUANTITIES`; by default mean, threshold, shape and p.
    models : sequence of str or "all", optional
        Laws to fit, as in :func:`gradstats.fit_all`; by default those that are no controls.
    method : Method, optional
        Method of all fits, as in :func:`gradstats.fit`. By default each model has its own.
    ratios : sequence of float, optional
        Kept fractions k/d of the exact thresholds, each in (0, 1].
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        Records as in :func:`drift_records`. Trends take :data:`FEWEST_STEPS` steps.

    Raises
    ------
    InputError
        If a quantity or model is unknown, a ratio is outside (0, 1], or nothing matches.

    Examples
    --------
    ``gradstats.drift("run.zarr", ["threshold"], ratios=[0.001]).to_dataframe()``
    """
    # what nobody asked for is not measured
    names = each_once(check_several(quantities, "quantities")) or _FOLLOWED
    for name in names:
        if name not in QUANTITIES:
            raise unknown("quantity", name, QUANTITIES)
    dataset = dataset_of(
        open_source(source),
        subset_of(over),
        models=models,
        method=method,
        ratios=ratios,
        quantities=names,
        client=over["client"],
        on_progress=over["on_progress"],
    )
    return drift_records(dataset, names)


def drift_records(dataset: xarray.Dataset, quantities: Sequence[str] = ()) -> Records:
    """Quantify how a run's quantities move, which a warm-started threshold relies on.

    Positive quantities are followed on a logarithmic scale, so that slopes and changes are relative. The mean over
    ranks is the series, over the steps at which every rank that has the quantity at all has a number: with steps of
    fewer ranks, a rank that ends early would be a trend. Low and high come from the dispersion over ranks and steps:
    standard errors of a fit take elements as independent, and are much too small.

    Tests of short or slowly moving series reject too often. At 5 %, `kpss_p` rejects a stationary series in 14 % of 20
    steps of white noise and 37 % of 400 steps at an autocorrelation of 0.9; `adf_p` rejects a random walk in 19, 12, 8
    and 6 % of 20, 60, 150 and 400 steps.

    Parameters
    ----------
    dataset : xarray.Dataset
        Data set of :func:`over_training`.
    quantities : sequence of str, optional
        Variables to follow; by default mean, threshold, shape and p.

    Returns
    -------
    Records
        trace, quantity (with its ratio or model), kind, layer; n (steps); without, captured steps that have no such
        number, as one of NaN has no mean (0 without ``captured``); incomplete, steps that are left out altogether, as
        a rank lacks them or has no such number there; spacing, the most common distance between steps; mean, low,
        high: over ranks and steps, low to high holds 90 % (``spread`` says where it is the range of fewer than 20
        values); slope, slope_low, slope_high: change per 100 steps by least squares and its 95 %
        interval, relative (0.1 is 10 %) where `relative`, without an interval where the residuals are near a unit root;
        slope_p, p of no slope; slope_p_holm, the same corrected for the number of layers, models and ratios of the
        quantity and kind (Holm 1979); acf1, the autocorrelation of lag one; adf_p, p of a unit root (small: it
        returns to its line), kpss_p, p of stationarity around a line (small: it wanders off); change_low, change_high:
        1 % and 99 % quantiles of the ratio of successive steps (of the difference where not relative); total_change,
        total_change_low, total_change_high: last over first step on the fitted line (their difference where not
        relative), with the slope's interval. What a constant, or fewer than :data:`FEWEST_STEPS`
        steps, cannot give is NaN.

    Raises
    ------
    InputError
        If a quantity is unknown.
    """
    names = list(quantities) or _FOLLOWED
    records = Drift()
    records.dataset = dataset
    for name in names:
        if name not in dataset or "layer" not in dataset[name].dims:
            raise unknown("quantity", name, [str(v) for v in dataset if "layer" in dataset[v].dims])
        # the number of tests to correct for is that of one quantity, not of all
        array, first = dataset[name], len(records)
        other = [str(d) for d in array.dims if d in ("ratio", "model")]
        stacked = array.stack(case=["kind", "layer", *other])
        for case in stacked["case"].values:
            values = stacked.sel(case=case).transpose("step", "rank").values
            # a law has no fit to many a gradient; that one has no mean is worth a record
            if np.isfinite(values).any() or "model" not in other:
                label = f"{name} {case[2]}" if other else name
                labels = {"trace": dataset.attrs.get("source"), "quantity": label}
                labels |= {"kind": str(case[0]), "layer": str(case[1])}
                captured = np.isfinite(values)
                if "captured" in dataset:  # not of one that was made by hand
                    there = dataset["captured"].sel(kind=case[0])
                    captured = there.transpose("step", "rank").values
                records.append(labels | _drift(dataset["step"].values, values, captured))
        add_holm(records[first:], "slope_p", "slope_p_holm", ("kind",))
    return records


def _drift(
    steps: NDArray[np.int64], values: NDArray[np.float64], captured: NDArray[np.bool_]
) -> dict[str, Any]:
    """Describe one quantity, whose values are by step and rank."""
    finite, whole = np.isfinite(values), steps_of_all_ranks(values)
    known = np.any(finite, axis=1)
    # a rank that has no such number at any step is none of those looked at
    used = values[whole][:, np.any(finite, axis=0)]
    # ranks of a step share its weights, so they are averaged before time is looked at
    series = used.mean(axis=1) if used.size else used.ravel()
    at = steps[whole].astype(np.float64)
    # logarithms are taken of all values or of none
    relative = bool((series > 0).all())
    low, high = inner_90(used.ravel()) if used.size else (math.nan,) * 2
    # of equally common distances the smallest, as np.unique sorts them
    gaps, times = np.unique(np.diff(at), return_counts=True)
    spacing = float(gaps[times.argmax()]) if gaps.size else math.nan
    record: dict[str, Any] = {
        "n": series.size,
        "without": int(np.count_nonzero(captured.any(axis=1) & ~known)),
        "incomplete": int(incomplete_steps(values)),
        "spacing": spacing,
        "relative": relative,
        "mean": float(used.mean()) if used.size else math.nan,
        "low": low,
        "high": high,
        "spread": spread_of(used.size),
    }
    return record | _trend(at, np.log(series) if relative else series, spacing, relative)


def _trend(
    at: NDArray[np.float64], y: NDArray[np.float64], spacing: float, relative: bool
) -> dict[str, float]:
    fields = ("slope", "slope_low", "slope_high", "slope_p", "slope_p_holm", "acf1", "adf_p")
    result = dict.fromkeys((*fields, "kpss_p", "change_low", "change_high", *_TOTAL), math.nan)
    # a constant series has no variance but rounding, by which the tests divide; that of logarithms is absolute
    if y.size < FEWEST_STEPS or np.ptp(y) <= 1e-12 * (1.0 if relative else np.abs(y).max()):
        return result
    from statsmodels.tsa.stattools import acf, kpss

    # successive changes are comparable only over the same distance
    even = np.diff(at) == spacing
    # slopes per 100 steps
    *bounds, result["slope_p"] = (slope if even.all() else uneven_slope)(at / 100, y)
    # a slope of logarithms is a rate of growth: e^slope − 1
    result |= dict(
        zip(fields[:3], map(float, np.expm1(bounds) if relative else bounds), strict=True)
    )
    # the whole run, in units of 100 steps as the slope is
    over_all = np.array(bounds) * (at[-1] - at[0]) / 100
    ends = np.exp(over_all) if relative else over_all
    result |= dict(zip(_TOTAL, map(float, ends), strict=True))
    result["acf1"] = float(acf(y, nlags=1, fft=False)[1])
    changes = np.diff(y)[even]
    # quantiles of 1 % of fewer changes lie at the very ends anyway
    if changes.size >= FEWEST_STEPS:
        ends = np.quantile(changes, [0.01, 0.99])
        ends = np.exp(ends) if relative else ends
        result["change_low"], result["change_high"] = map(float, ends)
    # lags of these tests count values, not steps: they mean a time only where steps are even
    if even.all():
        with warnings.catch_warnings():
            # both tests warn where p lies beyond their tables; they then return the table's end
            warnings.simplefilter("ignore")
            # around a line: a series that falls steadily is no random walk
            result["adf_p"] = unit_root_p(y)
            test = kpss(y, regression="ct", nlags="auto", result_object=False)
            result["kpss_p"] = float(test[1])
    return result
