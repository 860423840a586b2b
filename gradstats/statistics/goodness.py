"""How far a fitted model is from the data. Effect sizes first; a p-value only on a declared subsample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.ratio import target_count
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, Method, as_magnitudes, fit
from gradstats.statistics.solution import FitError

__all__ = [
    "TAIL_RATIOS",
    "Bootstrap",
    "Comparison",
    "Distances",
    "Goodness",
    "bootstrap",
    "compare",
    "goodness",
]

TAIL_RATIOS = (0.1, 0.01, 0.001, 0.0001)
"""Kept fractions at which the tail is looked at, where at least ten elements lie beyond."""

_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Goodness:
    """Distances of a fit from its data.

    Attributes
    ----------
    nll : mean negative log-likelihood per finite element (nats), the point mass at zero included.
    aic, bic : 2·parameters + 2·n·nll; ln(n)·parameters + 2·n·nll.
    ks : Kolmogorov distance between the magnitudes' distribution functions. It says nothing about the tail.
    wasserstein : Wasserstein-1 distance between them, relative to the mean magnitude.
    ad_upper : upper-tail Anderson-Darling statistic of the non-zero magnitudes divided by their number,
        ∫ (Fₙ − F)²/(1 − F) dF; infinite if data lies beyond the model's support.
    log_quantile : ratio δ to ln(η_model/η_exact); 0.69 is a factor of two.
    quality : ratio δ to k̂/k, what the model's threshold keeps over what it should.
    tail_error : largest |ln(η_model/η_exact)|; NaN where no ratio leaves ten elements.
    """

    nll: float
    aic: float
    bic: float
    ks: float
    wasserstein: float
    ad_upper: float
    log_quantile: Mapping[float, float]
    quality: Mapping[float, float]

    @property
    def tail_error(self) -> float:
        """Largest |ln(η_model/η_exact)| over the ratios."""
        return max((abs(e) for e in self.log_quantile.values()), default=math.nan)


def goodness(
    fit: Fit, x: Array | Sketch | Magnitudes, ratios: Sequence[float] = TAIL_RATIOS
) -> Goodness:
    """Measure a fit against its data.

    Parameters
    ----------
    fit : of the same gradient.
    x : the gradient, or its sketch.
    ratios : for the tail, fractions of all elements.

    Notes
    -----
    From a sketch of more than :data:`~gradstats.primitives.sketch.EXACT` elements, distances are exact at the edges
    of cells 0.05 to 0.1 % wide, and the likelihood is taken at their middles (relative error about 1e-7).
    """
    m = as_magnitudes(x)
    distances = Distances(fit, m)
    zero = fit.zero_fraction
    finite = m.count / (1 - zero)
    entropy = -sum(p * math.log(p) for p in (zero, 1 - zero) if p > 0)
    nll = entropy - (1 - zero) * m.average(fit.magnitude.logpdf(m.middle) - math.log(2))
    log_quantile, quality = {}, {}
    for ratio in ratios:
        k = target_count(ratio, round(finite))
        if _FEWEST <= k <= m.count:
            threshold = fit.threshold(ratio)
            exact = m.upper_quantile(k)
            log_quantile[ratio] = math.log(threshold / exact) if threshold > 0 else -math.inf
            quality[ratio] = m.exceedances(threshold) / k
    return Goodness(
        nll=nll,
        aic=2 * fit.n_params + 2 * finite * nll,
        bic=math.log(finite) * fit.n_params + 2 * finite * nll,
        ks=(1 - zero) * distances.kolmogorov(),
        wasserstein=distances.wasserstein() / m.mean,
        ad_upper=distances.upper_anderson_darling(),
        log_quantile=log_quantile,
        quality=quality,
    )


class Distances:
    """Distances between the survival functions of non-zero magnitudes and of a model."""

    def __init__(self, fit: Fit, m: Magnitudes) -> None:
        self.m = m
        self.law = fit.magnitude
        self.model_left, self.model_right = self.law.sf(m.left), self.law.sf(m.right)
        after = (m.count - m.cumulative) / m.count
        self.left, self.right = after + m.weight / m.count, after  # shares above the cell's ends

    def kolmogorov(self) -> float:
        """Return the largest difference."""
        return max(
            float(np.abs(self.left - self.model_left).max()),
            float(np.abs(self.right - self.model_right).max()),
        )

    def wasserstein(self) -> float:
        """Return Wasserstein-1, the integral of |difference|: linear in cells and gaps, and beyond the last."""
        m = self.m
        before, after = self.left - self.model_left, self.right - self.model_right
        total = _absolute_area(before, after, m.right - m.left)
        starts, ends = np.append(0.0, m.right[:-1]), m.left
        gap_before = np.append(0.0, after[:-1])
        total += _absolute_area(gap_before, before, ends - starts)
        mean = float(self.law.mean())
        if not math.isfinite(mean):
            return math.inf
        return total + self._beyond()

    def _beyond(self) -> float:
        """Return the integral of the model's survival beyond the last cell, over the quantile q = S(last) e^(−s)."""
        last, share = float(self.m.right[-1]), float(self.model_right[-1])
        if share <= 0:
            return 0.0
        s, weight = np.polynomial.laguerre.laggauss(40)
        seen = weight > 1e-25
        return share * float(weight[seen] @ (self.law.isf(share * np.exp(-s[seen])) - last))

    def upper_anderson_darling(self) -> float:
        """Return ∫ (w − c)²/w dw over the model's survival w; c is constant in gaps, its middle's value in cells."""
        edges = np.column_stack([self.model_left, self.model_right]).reshape(-1)
        edges = np.concatenate([[1.0], edges, [0.0]])
        level = np.column_stack([self.left, (self.left + self.right) / 2]).reshape(-1)
        level = np.append(level, 0.0)
        high, low = edges[:-1], np.minimum(edges[1:], edges[:-1])
        if np.any((low[:-1] <= 0) & (level[:-1] > 0) & (self.m.weight.repeat(2) > 0)):
            return math.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(level > 0, level**2 * np.log(high / low), 0.0)
        pieces = (high**2 - low**2) / 2 - 2 * level * (high - low) + logs
        return max(float(pieces.sum()), 0.0)


def _absolute_area(
    start: NDArray[np.float64], end: NDArray[np.float64], width: NDArray[np.float64]
) -> float:
    """Integrate the absolute value of lines from `start` to `end`."""
    a, b = np.abs(start), np.abs(end)
    crossing = start * end < 0
    total = np.where(a + b > 0, a + b, 1.0)
    mean = np.where(crossing, (a * a + b * b) / (2 * total), (a + b) / 2)
    return float(mean @ width)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of two models is closer to the data, per element.

    Attributes
    ----------
    difference : mean log-likelihood of the first minus the second, nats per non-zero element: the effect size.
    z, p_value : Vuong's statistic √n·difference/sd and its two-sided p; for nested models the likelihood-ratio
        statistic 2n·|difference| and its χ²(1) p.
    nested : whether one model is a special case of the other (Laplace of all but the log-normal and Student's).
    """

    difference: float
    z: float
    p_value: float
    nested: bool


_SPECIAL_CASES = {
    frozenset(("laplace", other)) for other in ("dgamma", "double_genpareto", "gennorm", "dweibull")
} | {frozenset(("norm", other)) for other in ("gennorm",)}


def compare(first: Fit, second: Fit, x: Array | Sketch | Magnitudes) -> Comparison:
    """Compare two maximum-likelihood fits of the same data (Vuong 1989).

    With millions of elements any difference is significant, and elements are not independent: read `difference`
    first. Positive favours the first model.
    """
    from scipy.stats import chi2, norm

    m = as_magnitudes(x)
    ratio = first.magnitude.logpdf(m.middle) - second.magnitude.logpdf(m.middle)
    difference = m.average(ratio)
    nested = frozenset((first.model, second.model)) in _SPECIAL_CASES
    if nested:
        statistic = 2 * m.count * abs(difference)
        return Comparison(difference, statistic, float(chi2.sf(statistic, 1)), True)
    deviation = math.sqrt(max(m.average((ratio - difference) ** 2), 0.0))
    if deviation == 0:
        return Comparison(difference, 0.0, 1.0, False)
    z = math.sqrt(m.count) * difference / deviation
    return Comparison(difference, z, 2 * float(norm.sf(abs(z))), False)


Statistic: TypeAlias = Literal["ks", "ad"]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A calibrated test of a model on a subsample.

    Attributes
    ----------
    statistic : observed on the subsample, Kolmogorov's D or the upper-tail Anderson-Darling statistic/n.
    p_value : (b + 1)/(B + 1), b replicates at least as far; each refitted.
    p_naive : of the Kolmogorov test that takes the fitted parameters as known. It hardly ever rejects: shown
        to be distrusted; NaN for other statistics.
    size, replicates, failed, seed : elements drawn, replicates B, those without a fit (counted as farther), seed.
    """

    statistic: float
    p_value: float
    p_naive: float
    size: int
    replicates: int
    failed: int
    seed: int


def bootstrap(
    x: Array | Sketch | Magnitudes,
    model: str,
    method: Method = "closed",
    *,
    statistic: Statistic = "ks",
    size: int = 2000,
    replicates: int = 499,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> Bootstrap:
    """Test a model by parametric bootstrap (Stute, Manteiga and Quindimil 1993).

    A subsample of stated size is fitted; as many elements are drawn from the fit, refitted and measured, `replicates`
    times. At full size a test only says that n is large; on a subsample it says whether the misfit is
    visible among that many elements.

    Parameters
    ----------
    x : gradient or sketch; the non-zero magnitudes are tested.
    model, method : as for :func:`gradstats.fit`.
    statistic : ``"ks"``, or ``"ad"`` for the upper tail.
    size : elements of the subsample, at most those there are.
    replicates : B.
    seed : of the subsample and the replicates; the global random state is not touched.
    on_progress : called after every replicate.

    Raises
    ------
    FitError
        If the subsample has no fit.
    """
    if statistic not in ("ks", "ad"):
        raise InputError(f"no statistic {statistic!r}; there are ks, ad")
    if size < 2 or replicates < 1:
        raise InputError("a bootstrap needs at least two elements and one replicate")
    rng = np.random.default_rng(seed)
    sample = as_magnitudes(x).sample(size, rng)
    n = sample.count
    if sample.zero_fraction:
        sample = Magnitudes.from_cells(sample.left, sample.right, sample.weight)
    fitted = fit(sample, model, method)
    observed = _distance(fitted, sample, statistic)
    law = fitted.magnitude
    farther = failed = 0
    for _ in range(replicates):
        replicate = Magnitudes.from_values(np.asarray(law.rvs(n, random_state=rng), float))
        try:
            refitted = fit(replicate, model, method)
        except FitError:
            failed += 1
            farther += 1
        else:
            farther += _distance(refitted, replicate, statistic) >= observed
        on_progress()
    naive = math.nan
    if statistic == "ks":
        from scipy.stats import kstwo

        naive = float(kstwo.sf(observed, n))
    p_value = (farther + 1) / (replicates + 1)
    return Bootstrap(observed, p_value, naive, n, replicates, failed, seed)


def _distance(fitted: Fit, m: Magnitudes, statistic: Statistic) -> float:
    distances = Distances(fitted, m)
    return distances.kolmogorov() if statistic == "ks" else distances.upper_anderson_darling()
