"""What is odd in the numbers of a step: norms that jump or grow, and values that ask for a capture."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEWEST", "Spikes", "Trigger"]

FEWEST = 10
"""Norms of a layer from which on a spike is told from them."""

_SURE = 20
"""The same from which on it may be an alarm: the deviation of fewer values of a heavy tail is anything."""

_LEAST_SPREAD = 0.05
"""Smallest deviation of a logarithmic norm that a robust z divides by: steady layers move by less."""

_FALSE, _STEPS = 0.05, 1000
"""Largest probability of a false alarm of any layer in so many steps."""

_LEAST_GROWTH = math.log(2)
"""Smallest growth between the first and the last third of a window that counts."""

_GROWS = 8.0
"""Smallest robust z of such growth."""

_KEPT, _FEWEST_TAIL = 200, 20
"""Largest z that a tail remembers, and the number that it takes to extrapolate them."""

_EARLY, _EARLY_GROWTH = 20.0, 4.0
"""How many times the largest z an alarm is before that, of jumps and of growth."""

_SAFE, _SAFE_GROWTH = 2.0, 1.0
"""Deviations by which the shape of the tail is taken for heavier than it is estimated."""

_APART = 5
"""Steps from one look at the growth to the next: windows that overlap more say the same."""

_MAD = 1.4826
"""Standard deviations of a normal law in a median absolute deviation."""

Values = NDArray[np.float64]


class _Tail:
    """The largest z of all layers so far, alarms left out: which one chance would hardly reach in 1,000 steps."""

    def __init__(self, rows: int, early: float, safe: float) -> None:
        self._early, self._safe = early, safe
        self._probability = _FALSE / (_STEPS * rows)
        self._largest = np.empty(0)
        self._seen = 0

    def add(self, z: Values) -> None:
        """Take in what was no alarm."""
        self._seen += z.size
        least = self._largest[0] if self._largest.size == _KEPT else -math.inf
        if (some := z[z > least]).size:
            self._largest = np.sort(np.concatenate([self._largest, some]))[-_KEPT:]

    def limit(self, least: float) -> float:
        """Return the z that is an alarm, by a generalized Pareto tail, and no less than `least`."""
        k = min(_KEPT, self._seen // 10)
        if k < _FEWEST_TAIL:
            most = float(self._largest[-1]) if self._largest.size else 1.0
            return max(least, self._early * most)
        over = self._largest[-k]
        excess = self._largest[-k + 1 :] - over
        mean = float(excess.mean())
        # probability-weighted moments (Hosking and Wallis 1987)
        place = (np.arange(excess.size) + 0.65) / excess.size
        weighted = float(((1 - place) * excess).mean())
        xi = 2 - mean / (mean - 2 * weighted) if mean > 2 * weighted else 0.0
        # deviations of the estimate: too small a shape would let alarms through
        xi = min(max(xi, 0.0), 0.9) + self._safe / math.sqrt(k)
        scale = mean * (1 - min(xi, 0.95))
        beyond = k / self._seen / self._probability
        far: float = float(over) + scale / xi * (beyond**xi - 1)
        return max(least, far)


class Spikes:
    """Norms that jump up or down, or grow slowly, against the steps before and what chance does to all layers.

    Parameters
    ----------
    layers : iterable of str
        Names of the parameters.
    window : int
        Number of steps before that tell a jump, at least :data:`FEWEST`.
    limit : float
        Smallest robust z of a jump.

    Notes
    -----
    An alarm takes a z of at least `limit`, and one that the z of all layers so far, extrapolated by a generalized
    Pareto tail, lead to expect in at most one of twenty runs of 1,000 steps: heavy tails raise it. The few values of a
    short window widen it as Student's t does. What was an alarm is not among the z extrapolated; growth that is under
    way is not either, since windows wait there for as long as they are.
    """

    def __init__(self, layers: Iterable[str], window: int, limit: float) -> None:
        self._names = ["", *layers]
        rows = len(self._names)
        self._limit = limit
        self._logs = np.full((rows, window), math.nan)  # the latest is last
        self._count = np.zeros(rows, np.int64)
        self._jumps, self._growth = (
            _Tail(rows, _EARLY, _SAFE),
            _Tail(rows, _EARLY_GROWTH, _SAFE_GROWTH),
        )
        self._waiting: deque[Values] = deque(maxlen=max(window // _APART, 1))
        self._factors = _small_samples(window, _FALSE / (_STEPS * rows))
        self._steps = 0
        self.doubtful = False

    def find(self, norm: float, norms: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """Return what jumps or grows in a step, whose norms are among those before the next one.

        Parameters
        ----------
        norm : float
            Norm of the whole gradient.
        norms : mapping of str to float
            Norms of parameters.

        Returns
        -------
        values : dict of str to float
            Robust z of the whole as ``spike``. Of alarms, ``/LAYER`` where they are not of the whole: ``spike``, robust
            z of a jump up; ``collapse``, that of a jump down; ``growth``, the factor from the first to the last third
            of the window.
        blame : str or None
            The parameter with an alarm whose squared norm changed most; None if none has one.
        """
        sizes = np.array([norm, *(norms.get(name, 0.0) for name in self._names[1:])], np.float64)
        known = (sizes > 0) & np.isfinite(sizes)
        logs = np.log(sizes, where=known, out=np.full(sizes.size, math.nan))
        values: dict[str, float] = {}
        z, widened, middle = self._against_the_past(logs)
        sure = self._count >= _SURE
        alarms = sure & (np.abs(widened) >= self._jumps.limit(self._limit))
        if not math.isnan(z[0]):
            values["spike"] = float(z[0])
        self.doubtful = bool(abs(z[0]) >= self._limit and not alarms[0])
        self._jumps.add(np.abs(widened[~alarms & np.isfinite(widened)]))
        self._logs[known, :-1] = self._logs[known, 1:]
        self._logs[known, -1] = logs[known]
        self._count[known] += 1
        self._steps += 1
        grown = self._grown()
        for i in np.flatnonzero(alarms):
            name = "spike" if z[i] > 0 else "collapse"
            values[f"{name}/{self._names[i]}".rstrip("/")] = abs(float(z[i]))
        for i in np.flatnonzero(grown):
            values[f"growth/{self._names[i]}".rstrip("/")] = float(grown[i])
        change = np.abs(sizes**2 - np.exp(2 * middle))
        odd = [int(i) for i in np.flatnonzero(alarms | (grown > 0)) if i]
        return values, self._names[max(odd, key=lambda i: change[i])] if odd else None

    def _against_the_past(self, logs: Values) -> tuple[Values, Values, Values]:
        """Return the robust z of each row, the same widened for short windows, and the rows' medians."""
        z, widened, middle = (np.full(logs.size, math.nan) for _ in range(3))
        window = self._logs.shape[1]
        count = np.where(np.isfinite(logs), np.minimum(self._count, window), 0)
        for n in np.unique(count[count >= FEWEST]):
            rows = np.flatnonzero(count == n)
            past = self._logs[rows, window - n :]
            middle[rows] = np.median(past, axis=1)
            spread = _MAD * np.median(np.abs(past - middle[rows, None]), axis=1)
            off = logs[rows] - middle[rows]
            z[rows] = off / np.maximum(spread, _LEAST_SPREAD)
            widened[rows] = off / np.maximum(self._factors[n] * spread, _LEAST_SPREAD)
        return z, widened, middle

    def _grown(self) -> Values:
        """Return by what factor each row has grown over a full window, where that is an alarm; else 0."""
        window = self._logs.shape[1]
        grown = np.zeros(self._count.size)
        rows = np.flatnonzero(self._count >= window)
        if self._steps % _APART or not rows.size:
            return grown
        logs, third = self._logs[rows], window // 3
        ends = (np.median(part, axis=1) for part in (logs[:, :third], logs[:, -third:]))
        first, last = ends
        rise = last - first
        rest = logs - (rise / (window - third))[:, None] * np.arange(window)
        rest -= np.median(rest, axis=1)[:, None]
        z = rise / np.maximum(_MAD * np.median(np.abs(rest), axis=1), _LEAST_SPREAD)
        if len(self._waiting) == self._waiting.maxlen:
            old = self._waiting.popleft()
            self._growth.add(old[np.isfinite(old)])
        alarms = (z >= self._growth.limit(_GROWS)) & (rise >= _LEAST_GROWTH)
        grown[rows[alarms]] = np.exp(rise[alarms])
        every = np.full(self._count.size, math.nan)
        every[rows[~alarms]] = np.abs(z[~alarms])
        for one in self._waiting:
            one[grown > 0] = math.nan
        self._waiting.append(every)
        return grown


def _small_samples(window: int, probability: float) -> Values:
    """Return, by their number, how much wider the deviation of a few values makes an interval of that probability."""
    from scipy.special import ndtri, stdtrit

    # a median absolute deviation has 37 % of the efficiency of a standard deviation
    freedom = 0.37 * (np.maximum(np.arange(window + 1), FEWEST) - 1)
    factors: Values = stdtrit(freedom, 1 - probability) / ndtri(1 - probability)
    return factors


class Trigger:
    """Values of a step that ask for the following steps to be captured.

    Parameters
    ----------
    limits : mapping of str to float
        Values from which on they ask, by name; a name stands for the layers' values, too.
    following : int
        Number of steps that are asked for.
    """

    def __init__(self, limits: Mapping[str, float], following: int) -> None:
        self._limits = limits
        self._following = following
        self._armed = False
        # the first step that is not asked for any more
        self._until = -1

    def look_at(self, values: Mapping[str, float], doubtful: bool = False) -> None:
        """Ask for steps if a value has reached its limit.

        Parameters
        ----------
        values : mapping of str to float
            Values of a step, by name or ``name/LAYER``.
        doubtful : bool
            Whether the spike of the whole, which is always among them, is no alarm.
        """
        limits = self._limits
        names = [n for n in values if not (doubtful and n == "spike")]
        if any(limits.get(n.partition("/")[0], math.inf) <= values[n] for n in names):
            self._armed = True

    def asks_for(self, step: int) -> bool:
        """Tell whether a step is asked for; the first one after the values counts as the first.

        Parameters
        ----------
        step : int
            Number of the step.
        """
        if self._armed:
            self._until, self._armed = max(self._until, step + self._following), False
        return step < self._until
