"""Distances of a fitted model from the data: effect sizes first, p-values only on a stated subsample."""

# Size: two fifths of its lines are docstrings; all distances come from one pass over the cells.

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.console import no_progress
from gradstats.errors import InputError
from gradstats.primitives import Array
from gradstats.primitives.levels import Levels
from gradstats.primitives.ratio import (
    RATIOS,
    check_count,
    check_ratios,
    check_seed,
    shown,
    target_count,
)
from gradstats.primitives.sketch import Magnitudes, Sketch
from gradstats.statistics.fitting import Fit, as_magnitudes, check_fit, fit, fittable
from gradstats.statistics.laws import LAWS, LawName
from gradstats.statistics.laws.law import Method
from gradstats.statistics.solution import FitError

__all__ = [
    "MOST_REPLICATES",
    "TAIL_RATIOS",
    "Bootstrap",
    "Comparison",
    "Distances",
    "Goodness",
    "Statistic",
    "bootstrap",
    "compare",
    "goodness",
]

TAIL_RATIOS = (*RATIOS, 0.0001)
"""Kept fractions at which the tail is compared, if at least ten elements lie beyond."""

_FEWEST = 10
"""Elements beyond a quantile below which the tail is not compared there."""

_NO_CRITERIA = "AIC and BIC take a fit by maximum likelihood: method mle has one"


@dataclass(frozen=True, slots=True)
class Goodness:
    """Distances of a fit from its data.

    Attributes
    ----------
    nll : float
        Mean negative log-likelihood per finite element, in nats, with the point mass at zero.
    aic : float
        2·parameters + 2·n·nll; NaN where the fit is not by maximum likelihood, which both criteria take.
    bic : float
        ln(n)·parameters + 2·n·nll; NaN likewise.
    ks : float
        Kolmogorov distance between the distribution functions of the magnitudes. It says nothing about the tail.
    wasserstein : float
        Wasserstein-1 distance between them, relative to the mean magnitude.
    ad_upper : float
        Upper-tail Anderson-Darling statistic of the non-zero magnitudes divided by their number,
        ∫ (Fₙ − F)²/(1 − F) dF; infinite if data lies beyond the model's support.
    log_quantile : mapping of float to float
        Ratio δ → ln(η_model/η_exact); 0.69 is a factor of two.
    quality : mapping of float to float
        Ratio δ → k̂/k, what the model's threshold keeps over what it should.
    criteria : str
        Why `aic` and `bic` are NaN; empty where they are not.
    """

    nll: float
    aic: float
    bic: float
    ks: float
    wasserstein: float
    ad_upper: float
    log_quantile: Mapping[float, float]
    quality: Mapping[float, float]
    criteria: str = ""

    @property
    def tail_error(self) -> float:
        """Largest |ln(η_model/η_exact)| over the ratios; NaN if no ratio leaves ten elements."""
        return max((abs(e) for e in self.log_quantile.values()), default=math.nan)


def goodness(
    fit: Fit, x: Array | Sketch | Magnitudes, ratios: Sequence[float] = TAIL_RATIOS
) -> Goodness:
    """Measure a fit against its data.

    Parameters
    ----------
    fit : Fit
        Model of the same gradient.
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float
        Kept fractions of all elements at which the tail is compared.

    Returns
    -------
    Goodness
        All distances.

    Raises
    ------
    FitError
        If there is no finite non-zero element, or squares leave the range of numbers.
    InputError
        If `fit` is none, or a ratio is outside (0, 1].

    Notes
    -----
    Of more than :data:`~gradstats.primitives.sketch.EXACT` elements, distances are exact at the edges of cells 0.05 to
    0.1 % wide. The likelihood is taken at their middles and corrected by the exact means of |g|, g² and ln|g|: exact
    for the Laplace, gamma and normal models, within about 1e-6 for the others.
    """
    return measured(fit, x, ratios)


def measured(
    fit: Fit,
    x: Array | Sketch | Magnitudes,
    ratios: Sequence[float] = TAIL_RATIOS,
    *,
    wasserstein: bool = True,
) -> Goodness:
    """Return what :func:`goodness` does, without the distance that takes longest where it is not asked for.

    Parameters
    ----------
    fit : Fit
        Model of the same gradient.
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    ratios : sequence of float
        Kept fractions of all elements at which the tail is compared.
    wasserstein : bool
        Whether to measure that distance, which is NaN otherwise.

    Returns
    -------
    Goodness
        The distances.

    Raises
    ------
    FitError, InputError
        As :func:`goodness` does.
    """
    check_fit(fit)
    ratios, m = check_ratios(ratios), fittable(x)
    distances = Distances(fit, m)
    zero = fit.zero_fraction
    # zeros are elements of the likelihood, too
    finite = m.count / (1 - zero)
    # mean negative log-likelihood of being zero or not, at the fitted share
    entropy = -sum(p * math.log(p) for p in (zero, 1 - zero) if p > 0)
    # a magnitude with a random sign has half its density
    nll = entropy - (1 - zero) * (_mean(m, fit.magnitude.logpdf(m.middle)) - math.log(2))
    log_quantile, quality = tail_distances(fit, m, ratios)
    criteria = "" if fit.is_likelihood else _NO_CRITERIA
    penalty = math.nan if criteria else fit.n_params
    return Goodness(
        nll=nll,
        aic=2 * penalty + 2 * finite * nll,
        bic=math.log(finite) * penalty + 2 * finite * nll,
        # both distribution functions jump by π₀ at zero; what differs is the rest, by its share
        ks=(1 - zero) * distances.kolmogorov(),
        wasserstein=distances.wasserstein() / m.mean if wasserstein else math.nan,
        ad_upper=distances.upper_anderson_darling(),
        log_quantile=log_quantile,
        quality=quality,
        criteria=criteria,
    )


def tail_distances(
    fit: Fit, m: Magnitudes, ratios: Sequence[float] = TAIL_RATIOS
) -> tuple[dict[float, float], dict[float, float]]:
    """Return how far the model's thresholds are from the exact ones, which takes no distance over all magnitudes.

    Parameters
    ----------
    fit : Fit
        Model of the same gradient.
    m : Magnitudes
        Its magnitudes.
    ratios : sequence of float
        Kept fractions of all elements; those that leave fewer than ten elements are passed over.

    Returns
    -------
    log_quantile : dict of float to float
        As in :class:`Goodness`.
    quality : dict of float to float
        As in :class:`Goodness`.
    """
    log_quantile, quality = {}, {}
    finite = m.count / (1 - fit.zero_fraction)
    for ratio in ratios:
        k = target_count(ratio, round(finite))
        if _FEWEST <= k <= m.count:
            threshold = fit.threshold(ratio)
            exact = m.upper_quantile(k)
            # a threshold of 0 keeps every non-zero element
            log_quantile[ratio] = math.log(threshold / exact) if threshold > 0 else -math.inf
            quality[ratio] = m.exceedances(threshold) / k
    return log_quantile, quality


def _mean(m: Magnitudes, values: NDArray[np.float64]) -> float:
    """Return the mean over the magnitudes of a smooth function, known at the cells' middles.

    As far as the function is like 1, x, x² and ln x, its mean is exact: those of x, x² and ln x are.
    """
    mean = m.average(values)
    if not math.isfinite(mean) or np.array_equal(m.left, m.right):
        return mean
    # control variates: their exact means are known, and those over the cells' middles are computed
    means = np.array([m.mean, m.mean_square, m.mean_log])
    scale = np.array([m.mean, m.mean_square, 1.0])
    basis = np.column_stack([m.middle, m.middle**2, np.log(m.middle)]) / scale
    of_cells = m.weight @ basis / m.count
    if not np.isfinite(means).all():
        return mean
    # least squares over the elements, so cells weigh by their counts; centring takes care of the constant
    root = np.sqrt(m.weight)[:, None]
    weights = np.linalg.lstsq(root * (basis - of_cells), root[:, 0] * (values - mean))[0]
    return mean + float(weights @ (means / scale - of_cells))


class Distances:
    """Distances between the survival functions of non-zero magnitudes and of a model.

    Parameters
    ----------
    fit : Fit
        Model.
    m : Magnitudes
        Non-zero magnitudes.
    """

    def __init__(self, fit: Fit, m: Magnitudes) -> None:
        self.m = m
        # not frozen: SciPy takes longer for that than for the rest of a bootstrap's replicate
        self.law, self.params = LAWS[fit.model].magnitude, dict(fit.params)
        self.model_left = self._survival(m.left)
        # cells without width, of single magnitudes, have the same ends
        self.model_right = (
            self.model_left if np.array_equal(m.left, m.right) else self._survival(m.right)
        )
        after = (m.count - m.cumulative) / m.count
        self.left, self.right = after + m.weight / m.count, after  # shares above the ends of cells

    def _survival(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(self.law.sf(at, **self.params))

    def kolmogorov(self) -> float:
        """Return the largest difference."""
        return max(
            # the data's share is known at the ends of cells, and a step differs most on one of its sides
            float(np.abs(self.left - self.model_left).max()),
            float(np.abs(self.right - self.model_right).max()),
        )

    def wasserstein(self) -> float:
        """Return Wasserstein-1, the integral of |difference|: linear in cells and small gaps, then the model's tail."""
        m = self.m
        before, after = self.left - self.model_left, self.right - self.model_right
        total = _absolute_area(before, after, m.right - m.left)
        # in a gap the data's share stays that of the cell before; at 0 both shares are 1
        starts, ends = np.append(0.0, m.right[:-1]), m.left
        gap_before = np.append(0.0, after[:-1])
        fall = np.append(1.0, self.model_right[:-1]) - self.model_left
        # where the model's share falls much over a wide gap, it is no line
        wide = fall * (ends - starts) > 1e-6 * m.mean
        total += _absolute_area(gap_before[~wide], before[~wide], (ends - starts)[~wide])
        total += self._over_gaps(starts[wide], ends[wide], np.append(1.0, self.right[:-1])[wide])
        from scipy.integrate import IntegrationWarning

        with warnings.catch_warnings():  # only whether it is finite counts
            warnings.simplefilter("ignore", IntegrationWarning)
            mean = float(self.law.mean(**self.params))
        # then so is the integral of the survival beyond the last element
        if not math.isfinite(mean):
            return math.inf
        return total + self._beyond()

    def _over_gaps(
        self, starts: NDArray[np.float64], ends: NDArray[np.float64], share: NDArray[np.float64]
    ) -> float:
        """Return the integral of |difference| over gaps, in each of which the data has one share."""
        # the difference is smooth up to where it changes its sign, from there to the end of the support, and beyond
        places = self.law.isf(share, **self.params), self.law.support(**self.params)[1]
        turns = [np.clip(at, starts, ends) for at in places]
        node, weight = np.polynomial.legendre.leggauss(20)
        total = 0.0
        for low, high in pairwise([starts, *turns, ends]):
            at = low[:, None] + (high - low)[:, None] * (node + 1) / 2
            total += (
                float((np.abs(share[:, None] - self._survival(at)) @ weight * (high - low)).sum())
                / 2
            )
        return total

    def _beyond(self) -> float:
        """Return the integral of the model's survival beyond the last cell, over quantiles q = S(last) e^(−s)."""
        last, share = float(self.m.right[-1]), float(self.model_right[-1])
        if share <= 0:
            return 0.0
        s, weight = np.polynomial.laguerre.laggauss(40)
        # far beyond the scale the survival rounds to 0, whose quantile is infinite
        inside = (weight > 1e-25) & (share * np.exp(-s) > 0)
        places = self.law.isf(share * np.exp(-s[inside]), **self.params)
        return share * float(weight[inside] @ (places - last))

    def upper_anderson_darling(self) -> float:
        """Return ∫ (w − c)²/w dw over the model's survival w.

        The data's survival c is constant in gaps; in a cell it is taken as that of the middle.
        """
        # w falls from 1 to 0 over gap, cell, gap, …, cell, and what lies beyond the last cell
        edges = np.column_stack([self.model_left, self.model_right]).reshape(-1)
        edges = np.concatenate([[1.0], edges, [0.0]])
        level = np.column_stack([self.left, (self.left + self.right) / 2]).reshape(-1)
        level = np.append(level, 0.0)
        # a computed survival may rise by its last digit
        high, low = edges[:-1], np.minimum(edges[1:], edges[:-1])
        # c²/w has no integral down to w = 0: there data lies beyond the support
        if np.any((low[:-1] <= 0) & (level[:-1] > 0) & (self.m.weight.repeat(2) > 0)):
            return math.inf
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            log_ratio = np.log(high / low)
            far = np.isinf(log_ratio) & (
                low > 0
            )  # the quotient overflows where its logarithm does not
            log_ratio = np.where(far, np.log(high) - np.log(low), log_ratio)
            logs = np.where(level > 0, level**2 * log_ratio, 0.0)
        # antiderivative of (w − c)²/w: w²/2 − 2cw + c² ln w
        pieces = (high**2 - low**2) / 2 - 2 * level * (high - low) + logs
        return max(float(pieces.sum()), 0.0)


def _absolute_area(
    start: NDArray[np.float64], end: NDArray[np.float64], width: NDArray[np.float64]
) -> float:
    """Integrate the absolute value of lines from `start` to `end`."""
    a, b = np.abs(start), np.abs(end)
    # a line that crosses 0 bounds two triangles, of area (a² + b²)/(2(a + b)) together
    crossing = start * end < 0
    # np.where computes both branches: no division of 0 by 0
    total = np.where(a + b > 0, a + b, 1.0)
    mean = np.where(crossing, (a * a + b * b) / (2 * total), (a + b) / 2)
    return float((mean * width).sum())  # BLAS's last bits would depend on the number of threads


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much closer to the data one of two models is.

    Attributes
    ----------
    difference : float
        Mean log-likelihood of the first minus that of the second, in nats per non-zero element: the effect size.
    z : float
        Vuong's statistic √n·difference/sd; for nested models the likelihood-ratio statistic, 2n times what the general
        model gains, which is at least 0 at maximum likelihood.
    p_value : float
        Two-sided p-value of Vuong's statistic; for nested models that of χ², with a degree for each
        parameter more.
    nested : bool
        Whether one model is a special case of the other (Laplace of all but the log-normal and Student's).
    """

    difference: float
    z: float
    p_value: float
    nested: bool


def compare(first: Fit, second: Fit, x: Array | Sketch | Magnitudes) -> Comparison:
    """Compare two maximum-likelihood fits of the same data (Vuong 1989).

    With millions of elements any difference is significant, and elements are not independent (in clusters of 10 to 20
    that share a scale, 31 to 43 % of true hypotheses are rejected at 5 %): read `difference` first. Models that are
    not nested take 2,000 elements.

    Parameters
    ----------
    first : Fit
        Model that a positive difference favours.
    second : Fit
        Model that a negative difference favours.
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.

    Returns
    -------
    Comparison
        Effect size and test.

    Raises
    ------
    InputError
        If one is no fit. If one model is a special case of the other and a fit is not by maximum likelihood, without
        which twice the gain is not χ².
    """
    from scipy.stats import chi2, norm

    check_fit(first)
    check_fit(second)
    m = fittable(x)
    ratio = first.magnitude.logpdf(m.middle) - second.magnitude.logpdf(m.middle)
    difference = _mean(m, ratio)
    for special, general, gain in ((first, second, -difference), (second, first, difference)):
        law = LAWS[general.model]
        if special.model not in law.special_cases:
            continue
        if not (special.is_likelihood and general.is_likelihood):
            raise InputError(
                f"{special.model} is a special case of {general.model}: a test takes fits by maximum likelihood; "
                'fit both with method="mle"'
            )
        statistic = max(2 * m.count * gain, 0.0)  # below 0 is rounding
        more = len(law.parameters) - len(LAWS[special.model].parameters)
        return Comparison(difference, statistic, float(chi2.sf(statistic, more)), True)
    deviation = math.sqrt(max(m.average((ratio - difference) ** 2), 0.0))
    # the same density everywhere: there is nothing to test
    if deviation == 0:
        return Comparison(difference, 0.0, 1.0, False)
    z = math.sqrt(m.count) * difference / deviation
    return Comparison(difference, z, 2 * float(norm.sf(abs(z))), False)


MOST_REPLICATES = 100_000
"""Largest number of replicates of a bootstrap: hours."""

Statistic: TypeAlias = Literal["ks", "ad"]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A calibrated test of a model on a subsample.

    Attributes
    ----------
    statistic : float
        Kolmogorov's D, or the upper-tail Anderson-Darling statistic divided by n, of the subsample.
    p_value : float
        (b + 1)/(B + 1), where b of the B refitted replicates are at least as far.
    p_naive : float
        p-value of the Kolmogorov test that takes the fitted parameters as known, NaN for the other statistic. Do not
        trust it: it hardly ever rejects.
    size : int
        Elements drawn.
    replicates : int
        Replicates B.
    failed : int
        Replicates without a fit, which count as farther.
    seed : int
        Seed of the subsample and the replicates.
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
    model: LawName | str,
    method: Method = "closed",
    *,
    statistic: Statistic = "ks",
    size: int = 2000,
    replicates: int = 499,
    seed: int = 0,
    on_progress: Callable[[], None] = no_progress,
) -> Bootstrap:
    """Test a model by parametric bootstrap (Stute, Manteiga and Quindimil 1993).

    A subsample of stated size is fitted. Then, `replicates` times, as many elements are drawn from the fit, refitted
    and measured. At full size a test only says that n is large, and of elements in clusters rejects 38 to 76 % of true
    models; on a subsample it says whether the misfit is visible among that many elements, and 500 out of 100,000 in
    clusters reject about 5 %.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes. The non-zero magnitudes are tested.
    model : str
        Model to test, a key of :data:`gradstats.statistics.laws.LAWS`.
    method : {"closed", "moments", "mle", "pwm"}
        Method of every fit, see :func:`gradstats.fit`.
    statistic : {"ks", "ad"}
        Kolmogorov's D, or Anderson-Darling of the upper tail.
    size : int
        Elements of the subsample; all of them if there are fewer.
    replicates : int
        Replicates B, at most 100,000.
    seed : int
        Seed of the subsample and the replicates; the global random state is not touched.
    on_progress : callable
        Called without arguments after every replicate.

    Returns
    -------
    Bootstrap
        Statistic and p-value.

    Raises
    ------
    FitError
        If the subsample has no fit.
    InputError
        If the model, method or statistic is unknown, or there are too few elements or replicates.
    """
    if not isinstance(statistic, str) or statistic not in ("ks", "ad"):
        raise InputError(f"no statistic {shown(statistic)}; there are ks, ad")
    size = check_count(size, "a bootstrap's size", 2)
    replicates = check_count(replicates, "a bootstrap's replicates", 1, MOST_REPLICATES)
    rng = np.random.default_rng(check_seed(seed))
    sample = as_magnitudes(x).sample(size, rng)
    n = sample.count
    # replicates have no zeros, so the model is fitted without them
    if sample.zero_fraction and not isinstance(sample, Levels):
        sample = Magnitudes.from_cells(sample.left, sample.right, sample.weight)
    fitted = fit(sample, model, method)
    observed = _distance(fitted, sample, statistic)
    law = fitted.magnitude
    farther = failed = 0
    for _ in range(replicates):
        drawn = np.asarray(law.rvs(n, random_state=rng), float)
        replicate = (
            # replicates pile up on levels as the sample does, or its ties would look like a misfit
            sample.rounded(drawn) if isinstance(sample, Levels) else Magnitudes.from_values(drawn)
        )
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
