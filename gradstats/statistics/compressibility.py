"""Is a gradient compressible? Power-law decay of its sorted magnitudes (SIDCo, definition 1 and property 1).

A vector is compressible if its j-th largest magnitude is at most c₁ j^(−p) with p > ½; the error σ_k of keeping the k
largest is then at most c₂ k^(½−p). Any finite vector meets that for some c₁, and a line through the whole log-log plot
gives p = 0.65 even for uniform noise. So the exponent is estimated over a stated window of the largest ranks and over
shorter and longer ones, the decay of σ_k is measured too, and all are compared with controls. "Compressible" is said
only where they agree.
"""

# Size: two fifths of its lines are docstrings; a decay and its control are judged by the same windows.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, unknown
from gradstats.primitives import Array, kth_largest, numel_of, select
from gradstats.primitives.arrays import as_numpy, as_positions, check
from gradstats.primitives.ratio import check_count, check_ratios, check_several, shown
from gradstats.primitives.sketch import Magnitudes, Sketch, sketch
from gradstats.statistics.dependence import NO_POSITIONS, exponent_of, over_blocks, runs_of
from gradstats.statistics.fitting import as_magnitudes
from gradstats.statistics.powerlaw import against_lognormal
from gradstats.statistics.solution import Z95
from gradstats.tables import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "CONTROLS",
    "SHARES",
    "Compressibility",
    "LocalExponent",
    "Ruling",
    "compressibility",
    "control",
    "decay_of",
    "default_window",
    "in_order",
    "local_exponents",
    "window_exponents",
    "with_blocks",
]

_FEWEST = 10
"""Ranks below which no exponent is estimated."""

_FEWEST_FOR_VERDICT = 50
"""Ranks below which an exponent has no verdict: the interval of 50 is p ± 39 %."""

_LARGEST_SHARE = 0.05
"""Share of the non-zero elements beyond which a window has no verdict: there, noise falls like a power law."""

SHARES = (0.001, 0.01, 0.1)
"""Shares of the non-zero elements that the windows beside the main one hold."""


class Ruling(StrEnum):
    """Why a vector is called compressible, not compressible, or neither; a member is the string that is shown."""

    SHOWN = "p above ½ in every window, by Hill's estimate and by σ_k"
    NOT_SHOWN = "p above ½ is shown in no window"
    WINDOW = "depends on the window: p above ½ is shown in some of them only"
    NOT_A_POWER_LAW = "not a power law there: Hill's estimate or σ_k disagrees with p"
    UNCHECKED = "σ_k cannot be told from rounding, or is beyond the range of numbers"
    LOGNORMAL = "not told from a log-normal: it is at least as likely among the largest 5 %"
    TOO_FEW = f"too few: a verdict takes {_FEWEST_FOR_VERDICT} ranks"
    TOO_WIDE = f"beyond the largest {100 * _LARGEST_SHARE:g} % of the non-zero elements noise falls like a power law"


# Size: a result, a field a number; it has no behaviour but its sentence.
@dataclass(frozen=True, slots=True, repr=False)
class Compressibility(Shown):
    """Decay of the sorted magnitudes over a window of ranks.

    Attributes
    ----------
    p, p_low, p_high : float
        Exponent by the rank-½ regression (Gabaix and Ibragimov 2011) and its 95 % interval p(1 ± 1.96 √(2/n)), which
        allows for the dependence of order statistics; NaN with fewer than ten ranks. It takes the elements themselves
        as independent: with clusters of twenty alike it covers 39 %. See `runs_low`. In a window that begins beyond
        rank 1, the standard error is that of the gaps between its ranks.
    hill, hill_low, hill_high : float
        Hill's estimate from the same largest ranks, with the interval p(1 ± 1.96/√n).
    c1 : float
        Smallest constant for which magnitude_j ≤ c₁ j^(−p) holds over the whole window.
    sigma_p : float
        Measured exponent: σ_k falls like k^(−sigma_p) from the first to the last rank of the window. A pure power law
        with p > ½ has about p − ½, a little less in a window from rank 1 on (0.321 for p = 0.834). NaN where nothing is
        left to measure.
    sigma_bound : float
        Largest σ_k/(c₂ k^(½−p)) on the window, with c₂ = c₁/√(2p − 1). At most 1 where property 1 holds, which may fail
        because the bound on magnitudes is only known on the window. NaN for p ≤ ½, which promises nothing, and where
        σ_k is not known: what is left beyond nearly all ranks is less than the rounding of Σg², or squares leave
        float64's range.
    window : (int, int)
        First and last rank, counted from 1.
    compressible : bool or None
        True where p > ½ with 97.5 % confidence on every window of at least 50 ranks, and on `window` Hill's estimate
        says the same (above ½, the intervals overlapping), property 1 holds, and a power law is likelier than a
        log-normal among the largest 5 % of the non-zero elements. False where no window shows p > ½.
        None where windows or estimates disagree, σ_k is not known, or `window` has fewer than 50 ranks or holds more
        than 5 % of the non-zero elements.
    reason : str
        Reason for `compressible`, one of :class:`Ruling`.
    windows : mapping of str to float
        First and last rank as text, such as ``"1-270"``, to p over these ranks, for the largest 0.1, 1 and 10 % of the
        non-zero elements (:data:`SHARES`) where those are at least 50 ranks, and for `window`.
    runs_low, runs_high : float
        95 % interval of `p` by a bootstrap of runs of √d neighbouring elements. It allows for elements that depend on
        their neighbours, as `p_low` and `p_high` do not; NaN where there is none. Where clusters are longer than a
        tenth of a run it covers 84 %.
    layers_low, layers_high : float
        The same by a bootstrap of whole layers; NaN where layers are not known or fewer than 20 reach into the window.
    dependence : str
        Why there is no interval by runs; empty if there is one.
    sample : Magnitudes or None
        The magnitudes looked at, for :meth:`plot`.
    """

    p: float
    p_low: float
    p_high: float
    hill: float
    hill_low: float
    hill_high: float
    c1: float
    sigma_p: float
    sigma_bound: float
    window: tuple[int, int]
    compressible: bool | None
    reason: str = Ruling.TOO_FEW.value
    windows: Mapping[str, float] = field(default_factory=dict)
    runs_low: float = math.nan
    runs_high: float = math.nan
    layers_low: float = math.nan
    layers_high: float = math.nan
    dependence: str = NO_POSITIONS
    sample: Magnitudes | None = field(default=None, compare=False)

    def _rows(self) -> list[dict[str, Any]]:
        """Return the estimates as one record."""
        names = ("p", "p_low", "p_high", "hill", "hill_low", "hill_high", "sigma_p", "c1")
        record = {name: getattr(self, name) for name in names}
        window = "–".join(map(str, self.window))
        return [
            record | {"window": window, "compressible": self.compressible, "reason": self.reason}
        ]

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the sorted magnitudes and the window: :func:`gradstats.plots.magnitude_decay`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; new ones by default.
        **options : object
            Options of the figure, such as ``title``.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.

        Raises
        ------
        InputError
            If there is no sample, as in an estimate that was made by hand.
        """
        if self.sample is None:
            raise InputError("there is no sample to draw; use gradstats.plots.magnitude_decay")
        drawn = {"captured": self.sample}
        return self._draw("magnitude_decay", drawn, ax=ax, **{"window": self.window} | options)


def default_window(count: int) -> tuple[int, int]:
    """Return the ranks of the largest hundredth, (1, max(50, count/100)), within the vector.

    Parameters
    ----------
    count : int
        Number of non-zero elements of the vector.
    """
    return 1, min(max(_FEWEST_FOR_VERDICT, count // 100), count)


def compressibility(
    x: Array | Sketch | Magnitudes,
    window: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
) -> Compressibility:
    """Estimate the decay exponent of a gradient's sorted magnitudes.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient of any shape, NumPy or torch, its sketch, or magnitudes; from the latter two, ranks are good to the
        width of the cells. Zeros have no rank; NaN and infinities are left out.
    window : (int, int), optional
        First and last rank, cut to the non-zero elements; by default :func:`default_window`.
    layers : sequence of int, optional
        Where each layer begins in the flat gradient, ascending from 0, for an interval by whole layers.

    Returns
    -------
    Compressibility
        Exponents, intervals and bounds on the window. Of a sketch or magnitudes, where positions are lost, there is no
        interval by runs or layers.

    Raises
    ------
    InputError
        If the window is not 1 ≤ first < last, or layers do not ascend from 0 within the gradient.

    Notes
    -----
    A light-tailed vector (uniform, normal, Laplace) meets the bound with a tiny exponent: p is the inverse of the tail
    index, and falls with the window. An estimate is about its window, not about the vector; :func:`local_exponents`
    has one for each range of ranks.
    """
    if isinstance(x, Sketch | Magnitudes):
        m = as_magnitudes(x)
        first, last = checked_window(window, m.count)
        return decay_of(m.largest(last), first, m)
    x = check(x)
    m = sketch(x).magnitudes
    first, last = checked_window(window, m.count)
    # replicates of the bootstrap reach below the window
    magnitudes, positions = _largest(x, 2 * last)
    starts = None if layers is None else checked_starts(layers, numel_of(x))
    return with_blocks(
        decay_of(magnitudes[:last], first, m), magnitudes, positions, numel_of(x), starts
    )


def with_blocks(
    decay: Compressibility,
    magnitudes: NDArray[np.float64],
    positions: NDArray[np.int64] | None,
    numel: int,
    layers: NDArray[np.int64] | None = None,
) -> Compressibility:
    """Return a decay with its intervals by blocks of elements.

    Parameters
    ----------
    decay : Compressibility
        Decay over its window.
    magnitudes : ndarray of float64, shape (n,)
        Largest magnitudes, descending, about twice as many as the last rank of the window.
    positions : ndarray of int64, shape (n,), or None
        Where they lie in the flat gradient; None where that is not known.
    numel : int
        Number of elements of the gradient, with zeros.
    layers : ndarray of int64, optional
        Where each layer begins, ascending from 0.
    """
    if positions is None or math.isnan(decay.p):
        return decay if positions is None else replace(decay, dependence=decay.reason)
    runs = over_blocks(magnitudes, positions, runs_of(numel), decay.window)
    decay_with_runs = replace(decay, runs_low=runs[0], runs_high=runs[1], dependence=runs[2])
    if layers is None:
        return decay_with_runs
    low, high, _ = over_blocks(magnitudes, positions, layers, decay.window)
    return replace(decay_with_runs, layers_low=low, layers_high=high)


def checked_starts(layers: Sequence[int], numel: int) -> NDArray[np.int64]:
    """Return where layers begin as an array.

    Parameters
    ----------
    layers : sequence of int
        Position of each layer's first element, ascending from 0.
    numel : int
        Number of elements of the gradient.

    Raises
    ------
    InputError
        If they are no whole numbers, not ascending from 0, or beyond the gradient.
    """
    starts = [
        check_count(s, "where a layer begins", 0, 2**62) for s in check_several(layers, "layers")
    ]
    if starts[:1] != [0] or any(b <= a for a, b in pairwise(starts)):
        raise InputError("layers must be where each layer begins, ascending from 0")
    if starts[-1] >= max(numel, 1):
        raise InputError(f"a layer begins at {starts[-1]}, and the gradient has {numel} elements")
    return np.array(starts, np.int64)


def checked_window(window: tuple[int, int] | None, count: int) -> tuple[int, int]:
    """Return a window's first and last rank, cut to the non-zero elements.

    Parameters
    ----------
    window : (int, int) or None
        First and last rank; None for :func:`default_window`.
    count : int
        Number of non-zero elements of the vector.

    Raises
    ------
    InputError
        If the window is not 1 ≤ first < last.
    """
    if window is None:
        return default_window(count)
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise InputError(f"a window must be two ranks, 1 ≤ first < last, not {shown(window)}")
    first = check_count(window[0], "a window's first rank")
    last = check_count(window[1], "a window's last rank", first + 1)
    return first, min(last, count)


def _largest(x: Array, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the `count` largest finite magnitudes, descending, and their positions; fewer if fewer are non-zero."""
    if count < 1 or not numel_of(x):
        return np.empty(0), np.empty(0, np.int64)
    selection = select(x, kth_largest(x, min(count, numel_of(x))))
    magnitudes = np.abs(as_numpy(selection.values)).astype(np.float64)
    # all ties with the last one are selected, so there may be more than `count`
    return in_order(magnitudes, as_positions(selection.indices), count)


def in_order(
    magnitudes: NDArray[np.float64], positions: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the largest finite magnitudes, descending, and their positions.

    Parameters
    ----------
    magnitudes : ndarray of float64, shape (n,)
        Magnitudes in any order.
    positions : ndarray of int64, shape (n,)
        Their positions.
    count : int
        Most that are returned.
    """
    # a selection contains infinite elements
    known = np.isfinite(magnitudes)
    magnitudes, positions = magnitudes[known], positions[known]
    # stable, so that ties have one order on every machine
    order = np.argsort(magnitudes, kind="stable")[::-1][:count]
    return magnitudes[order], positions[order]


def decay_of(magnitudes: NDArray[np.float64], first: int, m: Magnitudes) -> Compressibility:
    """Estimate the decay from the largest magnitudes.

    Parameters
    ----------
    magnitudes : ndarray of float64, shape (last,)
        Magnitudes from rank 1 to the last rank of the window, descending.
    first : int
        First rank of the window.
    m : Magnitudes
        Distribution of all non-zero magnitudes, for σ_k and for the windows beside this one.
    """
    nan = float("nan")
    last = magnitudes.size
    n = last - first + 1
    if n < _FEWEST:
        return Compressibility(*(nan,) * 9, (first, last), compressible=None, sample=m)
    # Σg² of all elements: with it σ_k needs the largest ones only
    energy = m.count * m.mean_square
    logs = np.log(magnitudes)
    ranks = np.arange(first, last + 1, dtype=np.float64)
    p = exponent_of(logs[first - 1 :], first)
    low, high = _interval(p, first, last)
    # Hill's estimate takes all ranks above the last one of the window
    hill = float(logs[:-1].mean() - logs[-1])
    hill_half = Z95 / math.sqrt(last - 1)
    hill_low, hill_high = hill * (1 - hill_half), hill * (1 + hill_half)
    with np.errstate(over="ignore"):  # infinite beyond float64's range
        c1 = float((magnitudes[first - 1 :] * ranks**p).max())
    exponent, bound = _best_k_error(magnitudes, first, energy, p, c1)
    windows = _windows(first, m) | {(first, last): p}
    ruling = _rule(windows, (first, last), m.count, hill_low, hill_high)
    # p is above ½ here, so that property 1 promises something
    if ruling is Ruling.SHOWN and not bound <= 1:
        ruling = Ruling.UNCHECKED if math.isnan(bound) else Ruling.NOT_A_POWER_LAW
    if (
        ruling is Ruling.SHOWN
        # negated: NaN, of magnitudes that do not differ, shows no power law
        and not against_lognormal(m, first, int(_LARGEST_SHARE * m.count)) > 0
    ):
        ruling = Ruling.LOGNORMAL
    return Compressibility(
        p=p,
        p_low=low,
        p_high=high,
        hill=hill,
        hill_low=hill_low,
        hill_high=hill_high,
        c1=c1,
        sigma_p=exponent,
        sigma_bound=bound,
        window=(first, last),
        compressible={Ruling.SHOWN: True, Ruling.NOT_SHOWN: False}.get(ruling),
        reason=ruling.value,
        windows={f"{a}-{b}": windows[a, b] for a, b in sorted(windows)},
        sample=m,
    )


def _interval(p: float, first: int, last: int) -> tuple[float, float]:
    """Return the 95 % interval of an exponent by the rank-½ regression (Gabaix and Ibragimov 2011, from rank 1)."""
    half = Z95 * (
        math.sqrt(2 / last) if first == 1 else _relative_error(np.arange(first, last + 1))
    )
    return p * (1 - half), p * (1 + half)


def _rule(
    windows: Mapping[tuple[int, int], float],
    window: tuple[int, int],
    count: int,
    hill_low: float,
    hill_high: float,
) -> Ruling:
    """Return what the windows and Hill's estimate say together."""
    if window[1] - window[0] + 1 < _FEWEST_FOR_VERDICT:
        return Ruling.TOO_FEW
    if window[1] > _LARGEST_SHARE * count:
        return Ruling.TOO_WIDE

    intervals = {ranks: _interval(p, *ranks) for ranks, p in windows.items()}
    # the lower ends decide: an interval that contains ½ shows nothing
    shown = {low > 0.5 for low, _ in intervals.values()}
    if shown != {True}:
        return Ruling.WINDOW if True in shown else Ruling.NOT_SHOWN
    low, high = intervals[window]
    overlap = hill_low <= high and low <= hill_high
    return Ruling.SHOWN if hill_low > 0.5 and overlap else Ruling.NOT_A_POWER_LAW


def window_exponents(
    x: Array | Sketch | Magnitudes, shares: Sequence[float] = SHARES
) -> list[LocalExponent]:
    """Estimate the exponent over windows from the largest element on, one for each share of the non-zero elements.

    A power law has the same exponent in all of them.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    shares : sequence of float
        Shares of the non-zero elements that the windows hold, in (0, 1]. Those of fewer than 50 ranks are left out.

    Returns
    -------
    list of LocalExponent
        Exponents, with intervals for independent elements.
    """
    exponents = _windows(1, as_magnitudes(x), check_ratios(shares))
    return [LocalExponent(*ranks, p, *_interval(p, *ranks)) for ranks, p in exponents.items()]


def _windows(
    first: int, m: Magnitudes, shares: Sequence[float] = SHARES
) -> dict[tuple[int, int], float]:
    """Return p by the rank-½ regression over the largest shares of the magnitudes, from their cells."""
    from scipy.special import gammaln

    exponents = {}
    last_rank = m.weight[::-1].cumsum()  # of each cell, from the largest
    logs = np.log(m.middle[::-1])
    for share in shares:
        last = int(share * m.count)
        if last - first + 1 < _FEWEST_FOR_VERDICT:
            continue
        # the cells of ranks `first` to `last`, the outer ones in part
        some = slice(np.searchsorted(last_rank, first), np.searchsorted(last_rank, last) + 1)
        ends = np.minimum(last_rank[some], last)
        starts = np.append(first - 1.0, ends[:-1])
        # ln(rank − ½), summed over the ranks of a cell
        log_ranks = gammaln(ends + 0.5) - gammaln(starts + 0.5)
        weight, size = ends - starts, logs[some]
        size = size - weight @ size / weight.sum()
        # each rank of a cell weighs alike; slope and case of no spread as in exponent_of
        covariance = -float(size @ (log_ranks - weight * log_ranks.sum() / weight.sum()))
        exponents[first, last] = float(weight @ size**2) / covariance if covariance > 0 else 0.0
    return exponents


def _best_k_error(
    magnitudes: NDArray[np.float64], first: int, energy: float, p: float, c1: float
) -> tuple[float, float]:
    """Return the exponent at which σ_k falls over the window, and the largest σ_k over its bound."""
    if not math.isfinite(energy):  # squares beyond float64's range
        return math.nan, math.nan
    # σ_k² for each k of the window
    left = energy - np.cumsum(magnitudes**2)[first - 1 :]
    ranks = np.arange(first, magnitudes.size + 1, dtype=np.float64)
    known = left > 1e-12 * energy  # below that, the difference is rounding
    if np.count_nonzero(known) < _FEWEST:
        return math.nan, math.nan
    left, ranks = np.sqrt(left[known]), ranks[known]
    exponent = math.log(left[0] / left[-1]) / math.log(ranks[-1] / ranks[0])
    if p <= 0.5 or not math.isfinite(c1):
        return exponent, math.nan
    # Σ_{j>k} c₁² j^(−2p) ≤ c₁² k^(1−2p)/(2p − 1)
    c2 = c1 / math.sqrt(2 * p - 1)
    return exponent, float((left / (c2 * ranks ** (0.5 - p))).max())


@dataclass(frozen=True, slots=True)
class LocalExponent:
    """Decay exponent between two ranks, by regression of ln magnitude on ln rank over that range alone.

    Attributes
    ----------
    first, last : int
        First and last rank of the range, counted from 1.
    p, p_low, p_high : float
        Exponent and its 95 % interval.
    """

    first: int
    last: int
    p: float
    p_low: float
    p_high: float


def local_exponents(x: Array | Sketch | Magnitudes, per_decade: int = 2) -> list[LocalExponent]:
    """Estimate the exponent over successive ranges of ranks, from the largest element to the smallest.

    A power law has the same exponent everywhere; that of a light tail starts low and rises. Ranges with fewer than ten
    ranks are left out. Intervals are normal: that of the first range, of about ten ranks, covers 86 % of the time.

    Parameters
    ----------
    x : array_like, Sketch or Magnitudes
        Gradient, its sketch, or magnitudes.
    per_decade : int
        Number of ranges per factor of ten, from 1 to 1000.
    """
    per_decade = check_count(per_decade, "per_decade", 1, 1000)
    m = as_magnitudes(x)
    decades = math.log10(m.count) if m.count else 0.0
    borders = np.unique(
        np.rint(10 ** np.arange(0, decades + 1 / per_decade, 1 / per_decade)).astype(np.int64)
    )
    borders = np.minimum(borders, m.count)
    exponents = []
    for first, last in pairwise(borders):
        if last - first + 1 < _FEWEST:
            continue
        ranks = np.unique(np.geomspace(first, last, 200).astype(np.int64))
        logs = np.log([m.upper_quantile(int(k)) for k in ranks])
        spread = np.log(ranks - 0.5)
        spread = spread - spread.mean()
        # magnitudes on ranks, not ranks on magnitudes as elsewhere: the error below is that of this sum
        p = -float(spread @ logs) / float(spread @ spread)
        half = Z95 * _relative_error(ranks)
        exponents.append(LocalExponent(int(first), int(last), p, p * (1 - half), p * (1 + half)))
    return exponents


def _relative_error(ranks: NDArray[np.integer]) -> float:
    """Return the standard error of an exponent by regression on some ranks, as a share of it.

    Logarithms of a power law's sorted magnitudes are sums of independent gaps, p/i times a standard exponential
    between ranks i and i + 1 (Rényi 1953). The exponent is a weighted sum of them.
    """
    from scipy.special import zeta

    spread = np.log(ranks - 0.5)
    spread = spread - spread.mean()
    # summation by parts: coefficient of the gap after each rank
    weights = np.cumsum(spread)[:-1] / (spread @ spread)
    # Σ 1/i² from one of the ranks up to the next, by Hurwitz's zeta function
    variances = -np.diff(zeta(2, ranks))
    return math.sqrt(float(weights**2 @ variances))


def _uniform(tail: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 - tail


def _halfnorm(tail: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import ndtri

    return np.asarray(-ndtri(tail / 2), float)


def _laplace(tail: NDArray[np.float64]) -> NDArray[np.float64]:
    return -np.log(tail)


CONTROLS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "uniform": _uniform,
    "halfnorm": _halfnorm,
    "laplace": _laplace,
}
"""Upper quantile functions of magnitudes that are not compressible, by SciPy's names of the distributions."""

_MEAN_SQUARES = {"uniform": 1 / 3, "halfnorm": 1.0, "laplace": 2.0}


def control(
    name: str, numel: int, window: tuple[int, int] | None = None
) -> tuple[Compressibility, NDArray[Any]]:
    """Return the decay of an ideal sample of a known distribution, and its largest magnitudes.

    Nothing is random: the j-th largest magnitude is the upper quantile at (j − ½)/numel.

    Parameters
    ----------
    name : str
        Name of the distribution, a key of :data:`CONTROLS`.
    numel : int
        Size of the sample.
    window : (int, int), optional
        First and last rank; by default :func:`default_window`.

    Returns
    -------
    decay : Compressibility
        Exponents, intervals and bounds on the window.
    magnitudes : ndarray of float64, shape (last,)
        Magnitudes from rank 1 to the last rank of the window, descending.
    """
    if not isinstance(name, str) or name not in CONTROLS:
        raise unknown("control", name, CONTROLS)
    first, last = checked_window(window, check_count(numel, "numel", 1, 2**40))
    magnitudes = CONTROLS[name]((np.arange(1, last + 1) - 0.5) / numel)
    # the whole sample, in cells of ranks
    ranks = np.unique(np.rint(np.geomspace(1, numel + 1, 20_000)))[::-1]
    # a cell of ranks has the quantile of its mean rank j, at (j − ½)/numel
    middle = CONTROLS[name](((ranks[:-1] + ranks[1:]) / 2 - 1) / numel)
    cells = Magnitudes.from_cells(middle, middle, ranks[:-1] - ranks[1:])
    # its energy is the distribution's
    return decay_of(magnitudes, first, replace(cells, mean_square=_MEAN_SQUARES[name])), magnitudes
