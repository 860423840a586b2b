"""The bounds on which the convergence of compressors rests, to be compared with a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from gradstats.primitives.ratio import check_count, check_number, check_ratio


def within_tolerance(
    kept: ArrayLike, target: float, low: float = 0.2, high: float = 0.2, window: int = 1
) -> float:
    """Return the share of steps, or of means over several steps, whose k̂ is in [1 − ε_L, 1 + ε_H]·k.

    Parameters
    ----------
    kept : array_like, shape (n,)
        Number of elements k̂ kept in each step.
    target : float
        Number of elements k asked for.
    low : float
        Tolerance ε_L below k, in [0, 1).
    high : float
        Tolerance ε_H above k, at least 0.
    window : int
        Number of steps Q that are averaged; steps at the end that do not fill a window are left out.

    Returns
    -------
    float
        The share, in [0, 1]; NaN without a single window.

    Raises
    ------
    InputError
        If a tolerance or the window is out of range.

    Notes
    -----
    Source: SIDCo (Abdelmoniem et al. 2021), eq. 12, 46 and 47, where the mean is over Q = 5 steps.

    Examples
    --------
    >>> within_tolerance([90, 110, 125, 70], 100)
    0.5
    >>> within_tolerance([90, 110, 125, 70], 100, window=2)
    1.0
    """
    check_number(low, "low", 0, 1, "[)")
    check_number(high, "high", 0, math.inf, "[)")
    check_count(window, "window")
    kept = np.asarray(kept, float)
    windows = kept[: len(kept) // window * window].reshape(-1, window)
    if not len(windows):
        return math.nan
    mean = windows.mean(axis=1)
    return float(((mean >= (1 - low) * target) & (mean <= (1 + high) * target)).mean())


def rate_iterations(share: float, tolerance: float = 0.0) -> float:
    """Return the number of iterations, up to a constant, after which error feedback has the rate of plain SGD.

    Parameters
    ----------
    share : float
        Kept fraction δ that was asked for, or the measured δ̂, in (0, 1].
    tolerance : float
        Tolerance ε of the number kept, in [0, 1); 0 for a measured δ̂.

    Returns
    -------
    float
        1/(δ²(1 − ε)²).

    Raises
    ------
    InputError
        If an argument is out of range.

    Notes
    -----
    Source: SIDCo (Abdelmoniem et al. 2021), eq. 13; with the measured δ̂ it is the bound behind it.

    Examples
    --------
    >>> round(rate_iterations(0.001, 0.2) / rate_iterations(0.001), 2)
    1.56
    """
    check_number(tolerance, "tolerance", 0, 1, "[)")
    return 1 / (check_ratio(share) * (1 - tolerance)) ** 2


def convergence_bound(
    gap: float, smoothness: float, second_moment: float, share: float, iterations: int
) -> float:
    """Return what the least squared norm of the gradient is at most, in expectation, after so many iterations.

    Parameters
    ----------
    gap : float
        Initial loss above the least one, f(x₀) − f*.
    smoothness : float
        Lipschitz constant L₀ of the gradient of f.
    second_moment : float
        Bound σ₀² of the mean squared norm of the stochastic gradient.
    share : float
        Contraction δ, in (0, 1]: the kept fraction asked for, or the measured one.
    iterations : int
        Number of iterations I, at least 1, with the constant learning rate 1/√(I + 1).

    Returns
    -------
    float
        (4·gap + L₀σ₀²)/(2√(I + 1)) + 4L₀²σ₀²(1 − δ)/(δ²(I + 1)).

    Raises
    ------
    InputError
        If the contraction or the number of iterations is out of range.

    Notes
    -----
    Source: SIDCo (Abdelmoniem et al. 2021), eq. 43, which is theorem II of Karimireddy et al. (2019) for one worker
    with error feedback.

    Examples
    --------
    >>> convergence_bound(1.0, 1.0, 1.0, 1.0, 99)
    0.25
    """
    check_ratio(share)
    length = check_count(iterations, "iterations") + 1
    sgd = (4 * gap + smoothness * second_moment) / (2 * math.sqrt(length))
    return sgd + 4 * smoothness**2 * second_moment * (1 - share) / (share**2 * length)


def residual_bound(
    learning_rates: Sequence[float], second_moment: float, ratio: float, eta: float | None = None
) -> float:
    """Return what the squared distance between the model and one trained without sparsification is at most.

    Parameters
    ----------
    learning_rates : sequence of float
        Learning rates α₀ … α_{t−1} of the steps so far.
    second_moment : float
        Bound M² of the mean squared norm of the averaged stochastic gradient.
    ratio : float
        Least kept fraction of any layer, 1/c_max, in (0, 1].
    eta : float, optional
        The free number η > 0 of the bound. By default the best of a grid of 200.

    Returns
    -------
    float
        (1/η) Σᵢ [(1 − 1/c_max)(1 + η)]ⁱ α²_{t−i} M², summed over i = 1 … t.

    Raises
    ------
    InputError
        If the ratio or η is out of range.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), corollary 1, whose formula the available text has lost: it follows from lemma 1
    and ‖a + b‖² ≤ (1 + 1/η)‖a‖² + (1 + η)‖b‖². The distance is that of the mean residual, learning rate included.

    Examples
    --------
    >>> residual_bound([1.0], 4.0, 0.5, eta=1.0)
    4.0
    """
    steps = np.asarray(learning_rates, float)[::-1]
    left = 1 - check_ratio(ratio)
    etas = np.geomspace(1e-4, 1e3, 200)
    if eta is not None:
        etas = np.array([check_number(eta, "eta", 0, math.inf)])
    with np.errstate(over="ignore"):
        powers = (left * (1 + etas[:, None])) ** np.arange(1, len(steps) + 1)
        sums = (powers * steps**2).sum(axis=1) / etas
    return float(sums.min() * second_moment)


def layerwise_bound(
    gap: float,
    smoothness: float,
    second_moment: float,
    ratio: float,
    learning_rates: Sequence[float],
) -> float:
    """Return what the weighted mean of the gradient's squared norm is at most, of training with layer-wise top-k.

    Parameters
    ----------
    gap : float
        Initial loss above the least one, f(v₀) − f*.
    smoothness : float
        Lipschitz constant C of the gradient of f.
    second_moment : float
        Bound M² of the mean squared norm of the averaged stochastic gradient.
    ratio : float
        Least kept fraction of any layer, 1/c_max, in (0, 1].
    learning_rates : sequence of float
        Learning rates α₀ … α_{T−1} of all steps.

    Returns
    -------
    float
        2·gap/Σα + (C + C²D/η)·M²·Σα²/Σα, for the best η of a grid of 200, with the least D that eq. 15 allows: the
        largest Σᵢ [(1 − 1/c_max)(1 + η)]ⁱ α²_{t−i}/α_t of any step.

    Raises
    ------
    InputError
        If the ratio is out of range.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), theorem 1, whose formulas the available text has lost. They follow from its
    proof: E f(x_{t+1}) − f(x_t) ≤ −α_t ⟨∇f(x_t), ∇f(v_t)⟩ + ½Cα_t²M², where the product is at least ½‖∇f(v_t)‖² −
    ½C²‖v_t − x_t‖², and corollary 1 bounds the distance by M²Dα_t/η. With α = θ/√T it is corollary 2, whose second term
    falls with 1/T.

    Examples
    --------
    >>> layerwise_bound(1.0, 1.0, 1.0, 1.0, [0.5, 0.5])
    2.5
    """
    left = 1 - check_ratio(ratio)
    rates = np.asarray(learning_rates, float)
    etas = np.geomspace(1e-4, 1e3, 200)
    sums, largest = np.zeros_like(etas), np.zeros_like(etas)
    with np.errstate(over="ignore", invalid="ignore"):
        for before, rate in pairwise(rates):
            sums = left * (1 + etas) * (sums + before**2)
            largest = np.maximum(largest, sums / rate)
        factors = smoothness + smoothness**2 * largest / etas
    noise = float(np.nanmin(factors)) * second_moment * np.sum(rates**2)
    return float((2 * gap + noise) / np.sum(rates))


def one_bit_bound(
    gap: float, smoothness: float, variance: float, ranks: int, every: int, iterations: int
) -> float:
    """Return what the mean of the gradient's squared norm is at most, of training with Marsit.

    Parameters
    ----------
    gap : float
        Initial loss above the least one, F(x₀) − F*.
    smoothness : float
        Lipschitz constant L of the gradient of F.
    variance : float
        Bound σ² of the variance of a rank's stochastic gradient.
    ranks : int
        Number of ranks M.
    every : int
        Number of rounds K from one full-precision round to the next.
    iterations : int
        Number of rounds T, with the local learning rate η = √(M/T) and the global one 1/√(T·D).

    Returns
    -------
    float
        [2·gap/(ηT) + 6L²K(K + 1)(η²σ²/M + 1/T) + Lησ²/M] / a, where a = 1 − Lη − 6L²η²K(K + 1); infinite where a is
        not positive.

    Raises
    ------
    InputError
        If a number is below 1.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), theorem 1, by its proof. Differs from the proof, which has 3 for the 6 in a: the 6
    of eq. 7 is multiplied by ½ηL², and ½η stands before the bracket.

    Examples
    --------
    >>> one_bit_bound(1.0, 0.0, 1.0, 1, 1, 100)
    0.2
    """
    rate = math.sqrt(check_count(ranks, "ranks") / check_count(iterations, "iterations"))
    rounds = check_count(every, "every") * (every + 1)
    share = 1 - smoothness * rate - 6 * (smoothness * rate) ** 2 * rounds
    if share <= 0:
        return math.inf
    drift = 6 * smoothness**2 * rounds * (rate**2 * variance / ranks + 1 / iterations)
    sgd = 2 * gap / (rate * iterations) + smoothness * rate * variance / ranks
    return (sgd + drift) / share


def compensation_bound(gradients: ArrayLike, updates: ArrayLike, every: int) -> float:
    """Return what the squared norm of Marsit's mean compensation is at most.

    Parameters
    ----------
    gradients : array_like, shape (n,)
        Squared norms ‖g̃‖² of the mean gradients of the one-bit rounds since the last full-precision one.
    updates : array_like, shape (n,)
        Squared norms η_s²·D of their updates.
    every : int
        Number of rounds K from one full-precision round to the next.

    Returns
    -------
    float
        6 (1 + K) Σ (‖g̃‖² + η_s²D).

    Raises
    ------
    InputError
        If K is below 1.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), eq. 7 of its appendix, before the expectation is taken; learning rates are left out
    of both sides, as they are here of the compensation.

    Examples
    --------
    >>> compensation_bound([1.0, 2.0], [0.5, 0.5], 1)
    48.0
    """
    sums = np.sum(gradients, dtype=float) + np.sum(updates, dtype=float)
    return float(6 * (1 + check_count(every, "every")) * sums)


def cascading_bound(numel: int, ranks: int, norm: float, parts: int = 1) -> float:
    """Return what the squared error of cascading compression is at most, in expectation.

    Parameters
    ----------
    numel : int
        Number of elements D of the gradient.
    ranks : int
        Number of ranks M.
    norm : float
        Bound G of the norm of every rank's gradient.
    parts : int
        Number of parts that are compressed by themselves, of D/parts elements each: 1 as published, M in a ring.

    Returns
    -------
    float
        (2D/parts)^M·G²/M; infinite where float64 ends.

    Raises
    ------
    InputError
        If a number is below 1.

    Notes
    -----
    Source: Marsit (Wu et al. 2022), theorem 2 and eq. 3 of its appendix. With several parts G² bounds the sum of the
    parts' squared norms.

    Examples
    --------
    >>> cascading_bound(100, 2, 1.0)
    20000.0
    """
    check_count(numel, "numel")
    check_count(ranks, "ranks")
    try:
        return (2 * numel / check_count(parts, "parts")) ** ranks * norm**2 / ranks
    except OverflowError:
        return math.inf
