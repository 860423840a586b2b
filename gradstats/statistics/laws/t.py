"""Student's t: half t magnitudes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, gammaln
from scipy.stats import rv_continuous, t

from gradstats.primitives.sketch import Magnitudes
from gradstats.statistics.laws.law import Law
from gradstats.statistics.laws.moments import by_ratio, require_spread
from gradstats.statistics.laws.search import search, with_errors
from gradstats.statistics.solution import Solution

__all__ = ["LAW", "by_likelihood", "by_moments", "halft", "halft_gen"]


class halft_gen(rv_continuous):
    """Magnitude of Student's t with `df` degrees of freedom: f(x) = 2 f_t(x), x ≥ 0."""

    def _argcheck(self, df: NDArray[Any]) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.asarray(df) > 0

    def _pdf(self, x: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(2 * t.pdf(x, df))

    def _logpdf(self, x: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(t.logpdf(x, df) + np.log(2))

    def _cdf(self, x: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        # not 1 − 2 sf, which loses what is small
        return np.asarray(betainc(0.5, df / 2, x * x / (x * x + df)))

    def _sf(self, x: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(2 * t.sf(x, df))

    def _isf(self, q: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(t.isf(q / 2, df))

    def _ppf(self, q: NDArray[Any], df: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        # below the median by the beta function: 1 − q would lose the digits of a small q.
        # np.where computes both branches, and an unclipped share of 1 would divide by zero in this one.
        share = betaincinv(0.5, df / 2, np.minimum(q, 0.5))
        lower = np.sqrt(df * share / (1 - share))
        return np.asarray(np.where(q <= 0.5, lower, t.isf((1 - q) / 2, df)))

    def _rvs(self, df: NDArray[Any], size: Any = None, random_state: Any = None) -> Any:  # type: ignore[override]
        return np.abs(t.rvs(df, size=size, random_state=random_state))


halft = halft_gen(a=0.0, name="halft", shapes="df")


def by_moments(m: Magnitudes) -> Solution:
    """Match Student's t, whose mean square needs df > 2; standard errors need df > 4, and up to 4 it is flagged.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """

    def raw(df: float, r: int) -> float:
        # E|t|ʳ = df^(r/2) Γ((r + 1)/2) Γ((df − r)/2) / (√π Γ(df/2)), for df > r
        logs = gammaln((r + 1) / 2) + gammaln((df - r) / 2) - gammaln(df / 2)
        return math.exp(logs + r / 2 * math.log(df)) / math.sqrt(math.pi)

    return by_ratio(m, "df", raw, 2 + 1e-6, 1e4, regular=4.0)


def by_likelihood(m: Magnitudes) -> Solution:
    """Maximize the profile in df; for a given df the scale solves a monotone equation.

    Parameters
    ----------
    m : Magnitudes
        Sample.
    """
    require_spread(m)
    squares = m.middle**2
    middle = math.log(m.mean_square)

    def log_scale(df: float) -> float:
        # ln σ with E[(df + 1) x² / (df σ² + x²)] = 1
        def equation(log_square: float) -> float:
            return (df + 1) * m.average(squares / (df * math.exp(log_square) + squares)) - 1

        # The left side falls from df to −1 as σ² grows. By Jensen's inequality its root is at most the mean square;
        # the 1.0 below leaves room for the cells' middles, whose mean square is not quite the exact one.
        low = middle - 2.0
        while equation(low) < 0:
            low -= 4.0
        return float(brentq(equation, low, middle + 1.0, xtol=1e-10)) / 2

    def full(log_shape: float, log_size: float) -> float:
        df = math.exp(log_shape)
        # mean negative log-likelihood, up to a constant
        tails = m.average(np.log1p(squares / (df * math.exp(2 * log_size))))
        constant = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * math.log(df)
        return log_size - float(constant) + (df + 1) / 2 * tails

    def loss(log_df: float) -> float:
        return full(log_df, log_scale(math.exp(log_df)))

    log_df, flags = search(loss, 0.1, 1e3)
    return with_errors(m, "df", log_df, log_scale(math.exp(log_df)), full, flags)


LAW = Law(
    name="t",
    label="Student's t",
    magnitude=halft,
    signed=t,
    solvers={"moments": by_moments, "mle": by_likelihood},
    control=True,
    reasons={"closed": "neither its moments nor its likelihood give the shape in closed form"},
)
