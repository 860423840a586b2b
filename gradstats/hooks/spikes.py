"""What is odd in the norms of a step: jumps, collapses and slow growth; and values that ask for a capture."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEWEST", "LIMIT", "SURE", "WINDOW", "Spikes", "Trigger"]

WINDOW, LIMIT = 50, 6.0
"""Steps before that tell a jump, and the smallest robust z of one, by default."""

FEWEST = 10
"""Norms of a layer from which on a robust z is told from them."""

SURE = 20
"""The same from which on it may be an alarm: the deviation of fewer values of a heavy tail is anything."""

_ENOUGH = 5
"""Layers from which on each is judged beside the median of the others, which takes out what they have in common."""

_LEAST_SPREAD = 0.05
"""Smallest deviation of a logarithmic norm that a robust z divides by: steady layers move by less."""

_FALSE, _STEPS = 0.05, 1000
"""False alarms to expect in so many steps, over all layers and all kinds of alarm."""

_BEYOND = 4.5
"""Largest factor by which an alarm is further out than any value before on its side."""

_DOUBT = 1000
"""How far a tail's index may be estimated too large: 1 + 1,000/n times, of n values."""

_LATE = 10
"""Steps after which a value is one of those before, or half of the steps judged: what goes wrong may begin slowly."""

_ALONE = 0.5
"""Part of a jump of the whole that is left without the layer that changed most, below which that layer made it."""

_LEAST_GROWTH = math.log(2)
"""Smallest growth between the first and the last third of a window that counts."""

_GROWS = 6.0
"""Smallest robust z of such growth."""

_PRIOR = 200
"""Values that a tail begins with, quantiles of Student's t."""

_TAIL = 30
"""Values that a quantile of the tail rests on."""

_APART = 5
"""Steps from one look at the growth to the next: windows that overlap more say the same."""

_MAD = 1.4826
"""Standard deviations of a normal law in a median absolute deviation."""

Values = NDArray[np.float64]


class _Tail:
    """The sizes of all z so far, as a histogram, and the size that chance alone would hardly reach in 1,000 steps."""

    edges = np.geomspace(1e-3, 1e3, 500)
    # 1/ν: the heavier the tail, the larger the ratio of its quantiles, as np.interp needs them
    inverse_freedom = np.geomspace(0.02, 0.8, 60)

    def __init__(self, tests: float, freedom: float, scale: float) -> None:
        from scipy.special import stdtrit

        # a sixth each for jumps up, jumps down and growth, of the layers and of the whole
        self._probability = _FALSE / 6 / tests
        self._counts = np.zeros(self.edges.size)
        # the upper half of the law, as sizes are of one side
        places = 0.5 + (np.arange(_PRIOR) + 0.5) / (2 * _PRIOR)
        self.add(np.asarray(scale * stdtrit(freedom, places), np.float64))

    def add(self, sizes: Values) -> None:
        """Take in the z of a step."""
        # without the last edge: what lies beyond it counts in the last cell
        np.add.at(self._counts, np.searchsorted(self.edges[:-1], sizes), 1)

    @property
    def count(self) -> float:
        """Number of values, with those that it began with."""
        return float(self._counts.sum())

    def limit(self, farthest: float = 0.0) -> float:
        """Return the size that is an alarm, by the Student's t with the same ratio of a far quantile to the median.

        One number is estimated, so that few values do. It is as much further out than `farthest`, the largest size that
        was no alarm, as the tail is heavy.
        """
        from scipy.special import stdtrit

        above = self._counts[::-1].cumsum()[::-1]
        # as far out as _TAIL values carry, and no further than one in 500
        share = max(_TAIL / above[0], 0.002)
        far, middle = (
            self.edges[np.count_nonzero(above > part * above[0]) - 1] for part in (share, 0.5)
        )
        freedom = 1 / self.inverse_freedom
        # quantiles of |t|: half of a share on either side, and 0.75 for the median
        ratios = stdtrit(freedom, 1 - share / 2) / stdtrit(freedom, 0.75)
        nearest = 1 / float(np.interp(far / middle, ratios, self.inverse_freedom))
        limit = middle * stdtrit(nearest, 1 - self._probability / 2) / stdtrit(nearest, 0.75)
        # an estimate from few values is often too light, so records are asked, too: the next of n values of any law is
        # the largest in one case of n + 1, and c times as far out in c⁻ᵛ of those
        records = math.log(_STEPS / SURE)
        heaviest = nearest / (1 + _DOUBT / above[0])
        beyond = min((records / _FALSE) ** (1 / heaviest), _BEYOND)
        return float(max(limit, beyond * farthest))


class _Rows:
    """Logarithmic norms over a window of steps, a row for each layer: what jumps or grows among them."""

    def __init__(self, rows: int, window: int, limit: float) -> None:
        self._least = limit
        self._logs = np.full((rows, window), math.nan)  # the latest is last
        self._common = np.zeros((rows, window))  # what was taken off them
        self._count = np.zeros(rows, np.int64)
        self._jumps = {side: _Tail(_STEPS * rows, 4, 1) for side in (1, -1)}
        self._growth = _Tail(_STEPS / _APART * rows, 8, 0.5)
        # of all rows to either side, until some steps ago; and all values since, the latest last
        self._farthest = dict.fromkeys(self._jumps, 0.0)
        self._recent: deque[Values] = deque()
        self._judged = 0
        self._waiting: deque[Values] = deque(maxlen=max(window // _APART, 1))
        self._widths = _small_samples(window, _FALSE / (_STEPS * rows))
        self._steps = 0

    @property
    def learned(self) -> bool:
        """Whether the tails of its jumps rest on values of its own, and not only on those that they began with."""
        return all(tail.count >= 1.5 * _PRIOR for tail in self._jumps.values())

    def take(
        self, logs: Values, common: Values, without: Values | None = None
    ) -> tuple[Values, NDArray[np.bool_], Values, Values]:
        """Return the z of each row, which of them are alarms, growth that is (else 0), and the rows' medians.

        Jumps that are hardly any in `without`, the rows without what one part of them does, have a known reason: they
        are no alarms, and say nothing of what chance does.
        """
        logs = logs - common
        z, sure, middle = self._against_the_past(logs)
        if without is not None:
            alone = np.abs(without - middle) < _ALONE * np.abs(logs - middle)
            sure[alone & (np.abs(z) >= self._least)] = math.nan
        alarms = np.zeros(logs.size, np.bool_)
        while len(self._recent) > min(_LATE, self._judged / 2):
            old = self._recent.popleft()
            for side, farthest in self._farthest.items():
                self._farthest[side] = float(np.max(side * old, initial=farthest))
        for side, tail in self._jumps.items():
            sizes = side * sure
            large = side * z >= self._least
            # only where it can matter: the limit takes 60 quantiles of Student's t
            if large.any():
                alarms |= large & (sizes >= tail.limit(self._farthest[side]))
            # alarms count, too: one changes no quantile, and many are how the norms are
            tail.add(sizes[sizes > 0])
        # no further out than by z, whose deviation has a least: against norms that hardly moved a small change is
        # anything, and would hide what comes later. An alarm would hide the next
        jumps = np.copysign(np.minimum(np.abs(sure), np.abs(z)), z)[~(np.isnan(sure) | alarms)]
        self._recent.append(jumps)
        self._judged += bool(jumps.size)
        known = np.isfinite(logs)
        for past, now in ((self._logs, logs), (self._common, common)):
            # a layer without a norm in this step keeps its window
            past[known, :-1] = past[known, 1:]
            past[known, -1] = now[known]
        self._count[known] += 1
        self._steps += 1
        return z, alarms, self._grown(), middle

    def _against_the_past(self, logs: Values) -> tuple[Values, Values, Values]:
        """Return the robust z of each row, the same with the doubt of short windows, and the rows' medians."""
        z, sure, middle = (np.full(logs.size, math.nan) for _ in range(3))
        window = self._logs.shape[1]
        count = np.where(np.isfinite(logs), np.minimum(self._count, window), 0)
        # rows with as many norms behind them are one array
        for n in np.unique(count[count >= FEWEST]):
            rows = np.flatnonzero(count == n)
            past = self._logs[rows, window - n :]
            middle[rows] = _middle(np.sort(past, axis=1))
            apart = np.sort(np.abs(past - middle[rows, None]), axis=1)
            off = logs[rows] - middle[rows]
            z[rows] = off / np.maximum(_MAD * _middle(apart), _LEAST_SPREAD)
            if n < SURE:
                continue
            # nine tenths of the window tell more of its deviation than the median does
            spread = np.sqrt(np.square(apart[:, : math.ceil(0.9 * n)]).mean(axis=1))
            # no spread at all: infinity for what has moved, NaN, which is no alarm, for what has not
            with np.errstate(divide="ignore", invalid="ignore"):
                sure[rows] = off / (self._widths[n] * spread)
        return z, sure, middle

    def _grown(self) -> Values:
        """Return by how much each row has grown over a full window, where that is an alarm; else 0."""
        window = self._logs.shape[1]
        grown = np.zeros(self._count.size)
        rows = np.flatnonzero(self._count >= window)
        # windows of neighbouring steps are nearly the same: the tail would count each one several times
        if self._steps % _APART or not rows.size:
            return grown
        logs, third = self._logs[rows], window // 3

        def risen(logs: Values) -> Values:
            first, last = (_middle(np.sort(p, axis=1)) for p in (logs[:, :third], logs[:, -third:]))
            return np.asarray(last - first)

        rise = risen(logs)
        # around the trend, whose size is in question; the middles of both thirds are window − third apart
        rest = logs - (rise / (window - third))[:, None] * np.arange(window)
        rest -= _middle(np.sort(rest, axis=1))[:, None]
        # one that only decays more slowly than the others does not grow
        rise = np.minimum(rise, risen(logs + self._common[rows]))
        spread = _MAD * _middle(np.sort(np.abs(rest), axis=1))
        z = rise / np.maximum(spread, _LEAST_SPREAD)
        if len(self._waiting) == self._waiting.maxlen:
            # counted a window late: until then, z of growth under way can still be removed
            old = self._waiting.popleft()
            self._growth.add(old[old > 0])
        alarms = (z >= _GROWS) & (rise >= _LEAST_GROWTH)
        if alarms.any():
            alarms &= z >= self._growth.limit()
        grown[rows[alarms]] = rise[alarms]
        every = np.full(self._count.size, math.nan)
        every[rows[~alarms]] = z[~alarms]
        # growth under way is none of what chance does, also before it was an alarm
        for one in self._waiting:
            one[grown > 0] = math.nan
        self._waiting.append(every)
        return grown


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
    From five layers on, a layer's norm is divided by the median of the others', which takes out how the whole gradient
    fluctuates and decays; the whole is judged by itself. An alarm takes a z of at least `limit`, and one that chance
    would hardly reach in 1,000 steps: the z of the steps so far give the Student's t that extrapolates them, so heavy
    tails raise it. Where they are few they stand beside quantiles of Student's t with 4 degrees of freedom. Alarms are
    among them: one changes little, and many are how the norms are. As few values say little of a tail, an alarm is also
    up to 4.5 times as far out, by how heavy the tail seems, as any value before on its side, but for alarms and the
    last ten steps. Where one layer makes a jump of the whole, the layer's has to be an alarm, once their tails are
    known: of many with heavy tails one is always far out, and the whole with it.
    """

    def __init__(self, layers: Iterable[str], window: int, limit: float) -> None:
        self._names = list(layers)
        self._whole = _Rows(1, window, limit)
        self._layers = _Rows(len(self._names), window, limit)
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
            Robust z of the whole as ``spike``. Of alarms, with ``/LAYER`` where they are not of the whole: ``spike``,
            robust z of a jump up; ``collapse``, that of a jump down; ``growth``, the factor from the first to the last
            third of the window.
        blame : str or None
            The parameter with an alarm whose squared norm changed most, or of all where only the whole has one; None
            if nothing has.
        """
        logs = _logs([norms.get(name, 0.0) for name in self._names])
        common = _of_the_others(logs)
        learned = self._layers.learned
        z, jumps, grown, middle = self._layers.take(logs, common)
        # squared norms add up to that of the whole: what changed most there is to blame
        squares, usual = np.exp(2 * logs), np.exp(2 * (middle + common))
        change = np.abs(squares - usual)

        without = None
        if learned and not jumps.any() and np.isfinite(change).any():
            most = int(np.nanargmax(change))
            without = _logs([math.sqrt(max(norm * norm - squares[most] + usual[most], 0.0))])
        values: dict[str, float] = {}
        whole_z, whole_jumps, whole_grown, _ = self._whole.take(_logs([norm]), np.zeros(1), without)
        if np.isfinite(whole_z[0]):
            values["spike"] = float(whole_z[0])
        # its z is always among the values, and must not trigger by its size alone
        self.doubtful = bool(np.isfinite(whole_z[0]) and not whole_jumps[0])
        _name(values, [""], whole_z, whole_jumps, whole_grown)
        _name(values, self._names, z, jumps, grown)
        odd = jumps | (grown > 0)
        # many small changes together, none of them an alarm
        if not odd.any() and (whole_jumps[0] or whole_grown[0]):
            odd = np.isfinite(change)
        blamed = max(np.flatnonzero(odd), key=lambda i: change[i], default=None)
        return values, None if blamed is None else self._names[blamed]


def _middle(ordered: Values) -> Values:
    """Return the median of each row of sorted values: for a few dozen np.median takes ten times as long."""
    n = ordered.shape[1]
    return np.asarray(ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2


def _of_the_others(logs: Values) -> Values:
    """Return the median of all other rows for each, or 0 where they are too few."""
    known = np.flatnonzero(np.isfinite(logs))
    common = np.zeros(logs.size)
    if (n := known.size) >= _ENOUGH:
        order = known[np.argsort(logs[known])]
        rank = np.arange(n)
        # the middle of n − 1 values in the order of all n: from its own rank on, each row skips itself
        places = [np.where(rank <= at, at + 1, at) for at in ((n - 2) // 2, (n - 1) // 2)]
        common[order] = (logs[order[places[0]]] + logs[order[places[1]]]) / 2
    return common


def _logs(norms: list[float]) -> Values:
    sizes = np.array(norms, np.float64)
    known = (sizes > 0) & np.isfinite(sizes)
    return np.log(sizes, where=known, out=np.full(sizes.size, math.nan))


def _name(
    values: dict[str, float],
    names: list[str],
    z: Values,
    jumps: NDArray[np.bool_],
    grown: Values,
) -> None:
    """Add the alarms of some rows by name."""
    for i in np.flatnonzero(jumps):
        kind = "spike" if z[i] > 0 else "collapse"
        values[f"{kind}/{names[i]}".rstrip("/")] = abs(float(z[i]))
    for i in np.flatnonzero(grown):
        values[f"growth/{names[i]}".rstrip("/")] = math.exp(grown[i])


def _small_samples(window: int, probability: float) -> Values:
    """Return, by their number, how much wider the deviation of a few values makes an interval of that probability."""
    from scipy.special import ndtri, stdtrit

    freedom = 0.8 * (np.maximum(np.arange(window + 1), FEWEST) - 1)
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
