"""Symmetric distributions of gradients, and of their magnitudes, as ``scipy.stats`` objects.

Three sparsity-inducing distributions (SIDCo, Abdelmoniem et al., MLSys 2021), and controls that they have to beat. What
SciPy lacks is made of what it has: a magnitude with a random sign (`double_genpareto`, `double_lognorm`), or a
symmetric distribution folded at zero (`halft`). Shapes have SciPy's names and signs: gamma `a`; genpareto `c` = ξ,
above 0 for a heavy tail.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv
from scipy.stats import (
    dgamma,
    dweibull,
    expon,
    gamma,
    gennorm,
    genpareto,
    halfgennorm,
    halfnorm,
    laplace,
    lognorm,
    norm,
    rv_continuous,
    t,
    weibull_min,
)

__all__ = [
    "CONTROLS",
    "DISTRIBUTIONS",
    "MAGNITUDES",
    "SHAPES",
    "SIDS",
    "dgamma",
    "double_genpareto",
    "double_lognorm",
    "halft",
    "laplace",
]


class _Reflected(rv_continuous):
    """Symmetric distribution whose magnitude follows `_magnitude`, a one-shape distribution on the positive axis."""

    _magnitude: Any  # rv_continuous, whose private methods the type stubs take for scalar ones

    def _argcheck(self, c: NDArray[Any]) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.asarray(self._magnitude._argcheck(c))

    def _get_support(self, c: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:  # type: ignore[override]
        end = np.asarray(self._magnitude._get_support(c)[1])
        return -end, end

    def _pdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(0.5 * self._magnitude.pdf(np.abs(x), c))

    def _logpdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(self._magnitude.logpdf(np.abs(x), c) - np.log(2))

    def _cdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return self._sf(-x, c)

    def _sf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        tail = 0.5 * self._magnitude.sf(np.abs(x), c)
        return np.asarray(np.where(x >= 0, tail, 1 - tail))

    def _ppf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(-self._isf(q, c))

    def _isf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        upper = self._magnitude.isf(np.minimum(2 * q, 1), c)
        lower = self._magnitude.isf(np.minimum(2 * (1 - q), 1), c)
        return np.asarray(np.where(q <= 0.5, upper, -lower))

    def _stats(self, c: NDArray[Any], *_: Any, **__: Any) -> tuple[Any, Any, Any, Any]:  # type: ignore[override]
        mean, variance = self._magnitude.stats(c, moments="mv")
        # SciPy says NaN where the mean square is infinite
        square = np.nan_to_num(variance + np.square(mean), nan=np.inf)
        return np.where(np.isfinite(mean), 0.0, np.nan), square, None, None

    def _rvs(self, c: NDArray[Any], size: Any = None, random_state: Any = None) -> Any:  # type: ignore[override]
        return self._isf(random_state.uniform(size=size), c)


class double_genpareto_gen(_Reflected):
    """Double (reflected) generalized Pareto: f(x) = ½ (1 + c|x|)^(−1−1/c), on |x| < −1/c if c < 0.

    Symmetric; its magnitude is :data:`scipy.stats.genpareto` with the same `c`. c = 0 is the Laplace distribution,
    c = −1 the uniform one on (−1, 1).
    """

    _magnitude = genpareto


class double_lognorm_gen(_Reflected):
    """Symmetric distribution whose magnitude is log-normal, :data:`scipy.stats.lognorm` with the same `s`."""

    _magnitude = lognorm


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
        share = betaincinv(0.5, df / 2, np.minimum(q, 0.5))
        lower = np.sqrt(df * share / (1 - share))
        return np.asarray(np.where(q <= 0.5, lower, t.isf((1 - q) / 2, df)))

    def _rvs(self, df: NDArray[Any], size: Any = None, random_state: Any = None) -> Any:  # type: ignore[override]
        return np.abs(t.rvs(df, size=size, random_state=random_state))


double_genpareto = double_genpareto_gen(name="double_genpareto", shapes="c")
double_lognorm = double_lognorm_gen(name="double_lognorm", shapes="s")
halft = halft_gen(a=0.0, name="halft", shapes="df")

DISTRIBUTIONS: dict[str, rv_continuous] = {
    "laplace": laplace,
    "dgamma": dgamma,
    "double_genpareto": double_genpareto,
    "norm": norm,
    "t": t,
    "gennorm": gennorm,
    "dweibull": dweibull,
    "lognorm": double_lognorm,
}
"""Model name to distribution of the signed, non-zero elements."""

MAGNITUDES: dict[str, rv_continuous] = {
    "laplace": expon,
    "dgamma": gamma,
    "double_genpareto": genpareto,
    "norm": halfnorm,
    "t": halft,
    "gennorm": halfgennorm,
    "dweibull": weibull_min,
    "lognorm": lognorm,
}
"""Model name to distribution of the non-zero magnitudes."""

SHAPES: dict[str, str | None] = {
    "laplace": None,
    "dgamma": "a",
    "double_genpareto": "c",
    "norm": None,
    "t": "df",
    "gennorm": "beta",
    "dweibull": "c",
    "lognorm": "s",
}
"""Model name to SciPy's name of its shape parameter."""

SIDS = ("laplace", "dgamma", "double_genpareto")
"""The sparsity-inducing distributions."""

CONTROLS = ("norm", "t", "gennorm", "dweibull", "lognorm")
"""Models that the sparsity-inducing ones are compared with."""
