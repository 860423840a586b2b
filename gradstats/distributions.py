"""Sparsity-inducing distributions of signed gradients, as ``scipy.stats`` objects.

`laplace` and `dgamma` are SciPy's. `double_genpareto` is what it lacks: a generalized Pareto magnitude with a
random sign. Shapes are named and signed as in SciPy: gamma `a`, genpareto `c` = ξ, heavy tail > 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import dgamma, genpareto, laplace, rv_continuous

__all__ = ["DISTRIBUTIONS", "dgamma", "double_genpareto", "laplace"]


class double_genpareto_gen(rv_continuous):
    """Double (reflected) generalized Pareto: f(x) = ½ (1 + c|x|)^(−1−1/c), on |x| < −1/c if c < 0.

    The symmetric law whose magnitude is :data:`scipy.stats.genpareto` with the same `c`. c = 0 is the Laplace
    distribution, c = −1 the uniform one on (−1, 1).
    """

    def _argcheck(self, c: NDArray[Any]) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.asarray(np.isfinite(c))

    def _get_support(self, c: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:  # type: ignore[override]
        c = np.asarray(c)
        end = np.where(c < 0, -1 / np.where(c < 0, c, 1), np.inf)
        return -end, end

    def _pdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(0.5 * genpareto.pdf(np.abs(x), c))

    def _logpdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(genpareto.logpdf(np.abs(x), c) - np.log(2))

    def _cdf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return self._sf(-x, c)

    def _sf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        tail = 0.5 * genpareto.sf(np.abs(x), c)
        return np.where(x >= 0, tail, 1 - tail)

    def _ppf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return -self._isf(q, c)

    def _isf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.where(
            q <= 0.5,
            genpareto.isf(np.minimum(2 * q, 1), c),
            -genpareto.isf(np.minimum(2 * (1 - q), 1), c),
        )

    def _stats(self, c: NDArray[Any], *_: Any, **__: Any) -> tuple[Any, Any, Any, Any]:  # type: ignore[override]
        finite = np.asarray(c) < 0.5
        safe = np.where(finite, c, 0.0)
        variance = np.where(finite, 2 / ((1 - safe) * (1 - 2 * safe)), np.inf)
        return np.where(np.asarray(c) < 1, 0.0, np.nan), variance, None, None

    def _rvs(self, c: NDArray[Any], size: Any = None, random_state: Any = None) -> Any:  # type: ignore[override]
        return self._isf(random_state.uniform(size=size), c)


double_genpareto = double_genpareto_gen(name="double_genpareto", shapes="c")

DISTRIBUTIONS: dict[str, rv_continuous] = {
    "laplace": laplace,
    "dgamma": dgamma,
    "double_genpareto": double_genpareto,
}
"""Model name to distribution of the signed, non-zero elements."""
