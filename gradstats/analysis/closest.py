"""Which law is closest: laws fitted to one captured gradient, judged by their thresholds at the next one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Unpack

import numpy as np

from gradstats.analysis.over import SpreadGradients, shares, subset_of
from gradstats.analysis.pieces import each_sketched
from gradstats.primitives.ratio import RATIOS, check_ratios, target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, fit
from gradstats.statistics.laws import LAWS, LawName
from gradstats.statistics.laws.choice import chosen
from gradstats.statistics.laws.law import Method
from gradstats.statistics.solution import Z95, FitError
from gradstats.tables import Records
from gradstats.trace.sources import Source

__all__ = ["closest_laws", "evenly", "law_pairs"]

_FEWEST = 10
"""Elements that a threshold should keep; of fewer its exact value is too uncertain to judge by."""
_FEWEST_OF_LAYER = 10
"""Non-zero elements below which a layer has no law of its own, and counts with the others like it."""


@dataclass(frozen=True, slots=True)
class _Thresholds:
    """The work of :func:`law_pairs` on the sketches of one gradient; it travels to a worker.

    Thresholds are in units of the geometric mean magnitude, so that those of one step can be used at another.
    """

    models: tuple[str, ...]
    method: Method | None
    ratios: tuple[float, ...]

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        whole, *layers = (each.magnitudes for each in sketches.values())
        finite = sketches["all"].numel - sketches["all"].moments.nonfinite
        # a rule's k is of all finite elements, zeros included
        counts = {ratio: target_count(ratio, finite) for ratio in self.ratios}
        scale = math.exp(whole.mean_log) if whole.count else math.nan
        exact = {
            ratio: whole.upper_quantile(k) / scale
            for ratio, k in counts.items()
            # beyond the non-zero elements the exact threshold is 0, and no law's error has a logarithm
            if _FEWEST <= k <= whole.count
        }
        laws = {}
        if exact:
            for name, thresholds in self._candidates(whole, layers, counts):
                laws[name] = {r: t / scale for r, t in thresholds.items() if r in exact}
        chance = {ratio: _chance(whole, counts[ratio]) for ratio in exact}
        return [labels | {"counts": counts, "exact": exact, "chance": chance, "laws": laws}]

    def _candidates(
        self, whole: Magnitudes, layers: Sequence[Magnitudes], counts: Mapping[float, int]
    ) -> Iterator[tuple[tuple[str, str, bool], dict[float, float]]]:
        """Yield (law, method, by layer) and the threshold by ratio, of every law that has a fit."""
        for model in self.models:
            for method in self._methods(model):
                try:
                    one = fit(whole, model, method)
                except FitError:
                    continue
                yield (model, method, False), {r: one.threshold(r) for r in counts}
            method = self._methods(model)[0]
            # one layer is the whole gradient again
            if len(layers) > 1 and (mixture := _by_layer(layers, model, method)):
                yield (model, method, True), {r: mixture(k) for r, k in counts.items()}

    def _methods(self, model: str) -> tuple[Method, ...]:
        """Return the methods of a law: its own, and likelihood, which no moment of a heavy tail misleads."""
        law = LAWS[model]
        method = self.method or law.default_method
        if self.method or "mle" not in law.solvers or law.maximizes(method):
            return (method,)
        return method, "mle"


def _chance(m: Magnitudes, k: int) -> float:
    """Return the half-width of the 95 % interval of the logarithm of the k-th largest of independent elements."""
    # the law's slope d ln|g| / d ln k at rank k, from the ranks k/2 and k
    half = max(k // 2, 1)
    slope = math.log(m.upper_quantile(half) / m.upper_quantile(k)) / math.log(k / half)
    # a count of k varies by 1/√k of itself; the slope turns that into ln|g|
    return Z95 * slope / math.sqrt(k)


def _by_layer(
    layers: Sequence[Magnitudes], model: str, method: Method
) -> Callable[[int], float] | None:
    """Return k → the threshold of a mixture with one law a layer; None if some layer has no fit.

    Layers of a few elements share one fit.
    """
    few = [m for m in layers if 0 < m.count < _FEWEST_OF_LAYER]
    each = [m for m in layers if m.count >= _FEWEST_OF_LAYER]
    try:
        fits: list[Fit] = [fit(m, model, method) for m in each]
    except FitError:
        # a mixture without one of its layers would be of another gradient
        return None
    if not fits:
        return None
    names = LAWS[model].parameters
    params = {name: np.array([one.params[name] for one in fits]) for name in names}
    counts = np.array([m.count for m in each], np.float64)
    # layers too small for a fit share the laws of the others, in proportion to their elements
    counts *= 1 + sum(m.count for m in few) / counts.sum()
    law = LAWS[model].magnitude
    # of all layers at once: to freeze a distribution takes longer than to fit it
    # where the search begins: hardly any element of any layer lies above
    top = float(np.max(law.isf(1e-12, **params)))

    def threshold(k: int) -> float:
        # every non-zero element is asked for
        if k >= counts.sum():
            return 0.0
        from scipy.optimize import brentq

        # on a logarithmic scale, as thresholds may span many powers of ten
        def excess(log_threshold: float) -> float:
            return float(counts @ law.sf(math.exp(log_threshold), **params)) - k

        low = math.log(top) - 1
        # e^−700 is near the end of float64's range
        while excess(low) < 0 and low > -700:
            low -= 4
        high = math.log(top)
        if excess(high) > 0:
            # more than k elements are expected above all that the search looks at
            return math.inf
        return math.exp(brentq(excess, low, high, xtol=1e-6))

    return threshold


@shares(SpreadGradients)
def law_pairs(
    source: Source,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    *,
    method: Method | None = None,
    ratios: Sequence[float] = RATIOS,
    most: int | None = None,
    **over: Unpack[SpreadGradients],
) -> Records:
    """Fit laws at every captured step, and compare their thresholds with the exact ones of the next captured step.

    A law is fitted to the gradient of one step. Its threshold at the next one is that of its fit times the quotient of
    the two geometric means of the magnitudes, which exist for any tail: what is judged is the law's form. Every law
    competes by its own method and by likelihood, and as a mixture with a fit for each layer.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    models : sequence of str or "all", optional
        Names of :data:`gradstats.statistics.laws.LAWS`, or ``"all"``; by default those that are no controls.
    method : Method, optional
        Method of all fits, as in :func:`gradstats.fit`. By default each law has its own.
    ratios : sequence of float, optional
        Kept fractions k/d in use, each in (0, 1]; those that leave fewer than ten elements are left out.
    most : int, optional
        Most steps looked at, as :func:`evenly` takes them; all by default.
    **over : Unpack[SpreadGradients]
        Gradients to look at, as in :class:`gradstats.analysis.over.SpreadGradients`.

    Returns
    -------
    Records
        One record per trace, rank, kind, pair of steps and law: fitted (step), judged (the next step; the same where a
        series has one step that is not all zero), model, method, by_layer, log_quantile (ratio → ln(η of the law ÷
        exact)), tail_error (the largest of their magnitudes), chance (1.96 standard errors of the exact threshold at
        its least certain, of independent elements) and k (the elements beyond that threshold).

    Raises
    ------
    InputError
        If a law, a method or a ratio is unknown, or nothing matches.
    """
    work = _Thresholds(tuple(chosen(models, method)), method, tuple(check_ratios(ratios)))
    subset = replace(subset_of(over), per_layer=len(source.layers) > 1)
    if most is not None:
        steps = evenly(sorted({step for _, _, step in subset.keys(source)}), most)
        subset = replace(subset, steps=steps)
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in each_sketched(source, subset, work, over["client"], over["on_progress"]):
        key = tuple(record[label] for label in ("trace", "rank", "kind"))
        series.setdefault(key, []).append(record)
    pairs = Records()
    for (trace, rank, kind), rows in series.items():
        # of zeros there is no law, nor a threshold to judge one by: two networks that train in turn alternate with them
        known = sorted((r for r in rows if r["exact"]), key=lambda r: r["step"])
        # a series of one step that tells has no other to judge by
        alone = [(r, r) for r in known if len(known) == 1]
        for one, other in [*pairwise(known), *alone]:
            for (model, fitted_by, by_layer), thresholds in one["laws"].items():
                errors = {
                    ratio: _log_ratio(thresholds[ratio], exact)
                    for ratio, exact in other["exact"].items()
                    if ratio in thresholds
                }
                if not errors:
                    continue
                labels = {"trace": trace, "rank": rank, "kind": kind}
                labels |= {"fitted": one["step"], "judged": other["step"]}
                labels |= {"model": model, "method": fitted_by, "by_layer": by_layer}
                # a law is as good as its worst ratio
                ratio = max(errors, key=lambda r: abs(errors[r]))
                # not always at the fewest elements: where zeros begin, the threshold of more is less certain
                unsure = max(errors, key=lambda r: other["chance"][r])
                pairs.append(
                    labels
                    | {"log_quantile": errors, "tail_error": abs(errors[ratio])}
                    | {"k": other["counts"][unsure], "chance": other["chance"][unsure]}
                )
    return pairs


def _log_ratio(threshold: float, exact: float) -> float:
    # a threshold of 0 keeps everything: farther off than any number
    return math.log(threshold / exact) if threshold > 0 else -math.inf


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most so many of some steps: the first, the last, and one of each stretch of equal length between them.

    Where a step lies in its stretch differs from one to the next. At a fixed distance only one side would be seen of
    gradients that repeat with that distance, such as those of two losses in turn. Of three, the one between is the
    middle.

    Parameters
    ----------
    steps : sequence of int
        Steps, ascending.
    most : int
        Number of steps, at least 1.
    """
    number = min(len(steps), most)
    stretch = (len(steps) - 1) / max(number - 1, 1)
    from_middle = np.arange(number) - (number - 1) / 2
    # multiples of √2 would be regular, too, and plain squares alike on both sides of the middle
    shift = (from_middle * np.abs(from_middle) * math.sqrt(2) + 0.5) % 1 - 0.5
    shift[:1] = shift[-1:] = 0.0
    # shifted by less than what a stretch has beyond one step, no two are the same
    places = np.arange(number) * stretch + shift * max(stretch - 1, 0.0)
    # rounding must not put what is a whole number below it
    return [steps[i] for i in np.floor(places + 1e-9).astype(int)]


def closest_laws(pairs: Sequence[dict[str, Any]]) -> Records:
    """Reduce the records of :func:`law_pairs` to one of each law, the closest first.

    Parameters
    ----------
    pairs : sequence of dict
        Records of :func:`law_pairs`.

    Returns
    -------
    Records
        One record per trace, kind, model, method and by_layer: tail_error, the median over pairs and ranks, and worst,
        infinite where a law has no fit; pairs, their number; ratios, those judged; k and chance, as there, of the
        pair with the median chance; predictive,
        whether laws were judged at other steps than they were fitted to; of the pair with the largest error: off (the
        logarithm of the law's threshold over the exact one), off_ratio, off_fitted and off_judged.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in pairs:
        key = tuple(record[n] for n in ("trace", "kind", "model", "method", "by_layer"))
        groups.setdefault(key, []).append(record)
    most: Counter[tuple[Any, ...]] = Counter()
    # the number of pairs: a law that always has a fit has a row for each
    for key, rows in groups.items():
        most[key[:2]] = max(most[key[:2]], len(rows))
    ranking = Records()
    for (trace, kind, model, method, by_layer), rows in groups.items():
        # a law without a fit has no threshold, which is as wrong as can be
        missing = [math.inf] * (most[trace, kind] - len(rows))
        errors = np.array([r["tail_error"] for r in rows] + missing)
        labels = {"trace": trace, "kind": kind, "model": model, "method": method}
        labels |= {"by_layer": by_layer, "pairs": errors.size}
        # of sparse gradients not every pair has all
        judged = {ratio for r in rows for ratio in r["log_quantile"]}
        labels |= {"ratios": sorted(judged, reverse=True)}
        predictive = all(r["fitted"] != r["judged"] for r in rows)
        numbers = {"tail_error": float(np.median(errors)), "worst": float(errors.max())}
        middle = sorted(rows, key=lambda r: r["chance"])[len(rows) // 2]
        numbers |= {"k": middle["k"], "chance": middle["chance"]}
        # the pair that explains best what is wrong with the law
        far = max(rows, key=lambda r: r["tail_error"])
        ratio, off = max(far["log_quantile"].items(), key=lambda item: abs(item[1]))
        at = {"off_fitted": far["fitted"], "off_judged": far["judged"], "off_ratio": ratio}
        ranking.append(labels | numbers | at | {"off": off, "predictive": predictive})
    # of equal medians the one with the better worst case
    ranking.sort(key=lambda r: (r["trace"], r["kind"], r["tail_error"], r["worst"]))
    return ranking
