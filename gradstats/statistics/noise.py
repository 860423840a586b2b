"""How much of a gradient is noise, from several gradients of the same parameters."""

from __future__ import annotations

__all__ = ["noise_and_signal"]


def noise_and_signal(squares: float, of_sum: float, count: int) -> tuple[float, float]:
    """Return unbiased estimates of tr Σ and ‖G‖² from n gradients of mean G and covariance Σ.

    Parameters
    ----------
    squares : float
        Sum of their squared norms.
    of_sum : float
        Squared norm of their sum.
    count : int
        Number n of gradients, at least 2.

    Returns
    -------
    noise : float
        Estimate of tr Σ (McCandlish et al. 2018, appendix A.1).
    signal : float
        Estimate of ‖G‖².
    """
    # E[square] = ‖G‖² + tr Σ and E[of_mean] = ‖G‖² + tr Σ/n, solved for both; either result may be below 0
    square, of_mean = squares / count, of_sum / count**2
    noise = (square - of_mean) * count / (count - 1)
    return noise, of_mean - noise / count
