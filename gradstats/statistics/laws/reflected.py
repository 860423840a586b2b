"""A magnitude with a random sign, for laws whose signed form SciPy does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rv_continuous

__all__ = ["Reflected"]


class Reflected(rv_continuous):
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
        # by symmetry: 1 − sf would lose the digits of the lower tail
        return self._sf(-x, c)

    def _sf(self, x: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        tail = 0.5 * self._magnitude.sf(np.abs(x), c)
        return np.asarray(np.where(x >= 0, tail, 1 - tail))

    def _ppf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        return np.asarray(-self._isf(q, c))

    def _isf(self, q: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:  # type: ignore[override]
        # np.where computes both branches: clipped, the one not taken stays a valid probability
        upper = self._magnitude.isf(np.minimum(2 * q, 1), c)
        lower = self._magnitude.isf(np.minimum(2 * (1 - q), 1), c)
        return np.asarray(np.where(q <= 0.5, upper, -lower))

    def _stats(self, c: NDArray[Any], *_: Any, **__: Any) -> tuple[Any, Any, Any, Any]:  # type: ignore[override]
        mean, variance = self._magnitude.stats(c, moments="mv")
        # SciPy says NaN where the mean square is infinite
        square = np.nan_to_num(variance + np.square(mean), nan=np.inf, posinf=np.inf)
        return np.where(np.isfinite(mean), 0.0, np.nan), square, None, None

    def _rvs(self, c: NDArray[Any], size: Any = None, random_state: Any = None) -> Any:  # type: ignore[override]
        return self._isf(random_state.uniform(size=size), c)
