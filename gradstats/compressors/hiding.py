"""What hides behind the backward pass, and which way to send a gradient is the fastest (LAGS-SGD): arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradstats.compressors.base import Activity, Lane
from gradstats.primitives.ratio import target_count

__all__ = [
    "Costs",
    "Delivery",
    "Timeline",
    "Way",
    "by_layer",
    "hiding_ratios",
    "pipelining_bound",
    "preferred",
    "reference",
    "simulate",
    "ways",
]

_TOLERANCE = 0.03
"""A way to send that takes longer than the fastest by at most this share counts as fast as it."""
_MARGIN = 0.1
"""A way to send that may take longer than the reference by more than this share does not count."""


def hiding_ratios(
    numel: ArrayLike,
    backward: ArrayLike,
    select: ArrayLike,
    latency: float,
    per_element: float,
    smallest: float = 0.001,
    dense: tuple[float, float] | None = None,
) -> NDArray[np.float64]:
    """Return the largest kept fractions whose messages hide behind the backward pass.

    Parameters
    ----------
    numel : array_like, shape (m,)
        Number of elements of the gradient behind each message, in the order of sending.
    backward : array_like, shape (m,)
        Seconds of the backward pass between the sending of a message and of the next one; 0 for the last message.
    select : array_like, shape (m,)
        Seconds that the selection for each message takes.
    latency : float
        Seconds that any message takes at least.
    per_element : float
        Seconds that every element sent adds.
    smallest : float
        Smallest fraction 1/c_u, kept where nothing can be hidden.
    dense : tuple of float, optional
        Seconds that a message of values without positions takes at least, and that every element of the gradient adds
        to it; None if there are no such messages. With them a message keeps everything where that hides too, or takes
        no longer than the largest selection that hides. Otherwise it keeps half at most: positions and values of more
        would be longer than all values.

    Returns
    -------
    ndarray of float64, shape (m,)
        Kept fractions, in [smallest, 1].

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), eq. 19, whose formula the available text has lost; this one follows from its
    words. The paper's compression ratio is c = d/k, the inverse of the fraction: the smallest c ≥ 1 with t_comm(c) +
    t_spar ≤ t_b of what follows, never above c_u, where t_comm(c) = latency + per_element · d/c.

    Examples
    --------
    A message of 1000 elements has 2 ms to hide 1 ms of latency and 10 µs per element:

    >>> hiding_ratios([1000, 1000], [2e-3, 0], [0, 0], 1e-3, 1e-5)
    array([0.1  , 0.001])
    """
    # at least 1: a message may be of empty layers
    elements = np.maximum(np.asarray(numel, float), 1)
    # eq. 19: what is left of the backward pass for the elements of a message
    budget = np.asarray(backward, float) - np.asarray(select, float) - latency
    # if elements cost nothing, all of them fit into any time that is left
    affordable = np.where(budget > 0, np.inf, 0.0)
    if per_element > 0:
        affordable = budget / (per_element * elements)
    if dense is None:
        return np.clip(affordable, smallest, 1.0)
    ratios = np.clip(affordable, smallest, max(smallest, 0.5))
    # nothing is selected for it, so it has all of the backward pass to hide behind
    whole = dense[0] + dense[1] * elements
    sparse = np.asarray(select, float) + latency + per_element * elements * ratios
    return np.where(whole <= np.maximum(sparse, np.asarray(backward, float)), 1.0, ratios)


def pipelining_bound(forward: float, backward: float, communicate: float) -> float:
    """Return the largest speed-up of layer-wise sending over one message at the end of a step.

    Parameters
    ----------
    forward : float
        Seconds of the forward pass, t_f.
    backward : float
        Seconds of the backward pass, t_b.
    communicate : float
        Seconds of the communication, t_c.

    Returns
    -------
    float
        The bound (t_f + t_b + t_c) / (t_f + max(t_b, t_c)): either the backward pass or the communication is hidden
        completely.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), eq. 20, rewritten without the ratio t_c/t_b.

    Examples
    --------
    >>> pipelining_bound(1, 2, 2)
    1.6666666666666667
    """
    return (forward + backward + communicate) / (forward + max(backward, communicate))


@dataclass(frozen=True, slots=True)
class Delivery:
    """Measurements of one message of a step.

    Attributes
    ----------
    layers : tuple of str
        Names of the parameters merged in the message.
    numel : int
        Number of elements of these parameters.
    sent : float
        Number of elements that this rank aimed to send of them.
    backward : float
        Seconds of the backward pass since the message before.
    select : float
        Seconds of the selection.
    communicate : float
        Seconds of the exchange.
    """

    layers: tuple[str, ...]
    numel: int
    sent: float
    backward: float
    select: float
    communicate: float


def by_layer(messages: Iterable[Delivery], ratios: Iterable[float]) -> dict[str, float]:
    """Return the ratio of every layer, which is that of its message.

    Parameters
    ----------
    messages : iterable of Delivery
        Messages of a layer-wise step.
    ratios : iterable of float
        Ratio of each.

    Returns
    -------
    dict of str to float
        Ratio by name of the layer.
    """
    each = zip(messages, ratios, strict=True)
    return {name: float(ratio) for message, ratio in each for name in message.layers}


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes
    ----------
    forward : float
        Seconds before the backward pass.
    activities : tuple of Activity
        Activities from the beginning of the backward pass on.
    """

    forward: float
    activities: tuple[Activity, ...]

    def lane(self, lane: Lane) -> float:
        """Return the seconds spent on one kind of activity.

        Parameters
        ----------
        lane : {"backward", "select", "communicate"}
            Kind of activity.
        """
        return sum(a.end - a.start for a in self.activities if a.lane == lane)

    @property
    def seconds(self) -> float:
        """Length of the whole step in seconds."""
        return self.forward + max((a.end for a in self.activities), default=0.0)

    @property
    def hidden(self) -> float:
        """Communication that goes on during the backward pass and selection, in seconds."""
        computing = self.lane("backward") + self.lane("select")
        # what it would take one after the other, less what it takes
        return self.forward + computing + self.lane("communicate") - self.seconds

    @property
    def bound(self) -> float:
        """Largest speed-up that pipelining can reach (LAGS-SGD, eq. 20); selection counts as backward pass."""
        computing = self.lane("backward") + self.lane("select")
        return pipelining_bound(self.forward, computing, self.lane("communicate"))


def simulate(
    messages: Sequence[Delivery], forward: float = 0.0, *, overlap: bool = True
) -> Timeline:
    """Simulate a step in two threads, as :class:`gradstats.compressors.Layerwise` runs it.

    The first thread alternates between the backward pass of a message and its selection. The second sends the messages
    in order, each as soon as it is selected and the one before has arrived. Neither thread slows the other down: where
    they share cores or memory bandwidth, a real step takes longer.

    Parameters
    ----------
    messages : sequence of Delivery
        Messages predicted by :func:`gradstats.network.deliveries`, or measured:
        :attr:`gradstats.compressors.LAGS.deliveries`.
    forward : float
        Seconds before the backward pass.
    overlap : bool
        Whether messages are sent during the backward pass. If False, they wait until it is over.

    Returns
    -------
    Timeline
        Start and end of everything in the step.
    """
    activities = []

    def add(lane: Lane, message: Delivery, start: float, seconds: float) -> float:
        end = start + seconds
        activities.append(Activity(lane, message.layers[-1], start, end, message.numel))
        return end

    ready, now = [], 0.0
    for message in messages:
        now = add("backward", message, now, message.backward)
        now = add("select", message, now, message.select)
        ready.append(now)
    free = 0.0 if overlap else now
    for message, selected in zip(messages, ready, strict=True):
        free = add("communicate", message, max(free, selected), message.communicate)
    return Timeline(forward, tuple(activities))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of an exchange among the workers, as lines in the number of elements.

    Attributes
    ----------
    latency : float
        Seconds that any selection takes at least, packing and unpacking included.
    per_element : float
        Seconds that every element of a selection adds.
    dense_latency : float
        Seconds that any all-reduce of values takes at least.
    dense_per_element : float
        Seconds that every element of an all-reduce adds.
    """

    latency: float
    per_element: float
    dense_latency: float
    dense_per_element: float

    def sparse(self, count: float) -> float:
        """Return the seconds in which a selection is exchanged.

        Parameters
        ----------
        count : float
            Number of elements selected.
        """
        return self.latency + self.per_element * count

    def dense(self, numel: float) -> float:
        """Return the seconds in which values without positions are exchanged; their flags go before them.

        Parameters
        ----------
        numel : float
            Number of elements.
        """
        return self.latency + self.dense_latency + self.dense_per_element * numel


@dataclass(frozen=True, slots=True)
class Way:
    """A way to send a step's gradient.

    Attributes
    ----------
    whole : bool
        Whether one message, selected in the gradient as a whole, is sent after the backward pass. If False, every layer
        is selected by itself and sent as soon as it is ready.
    ratios : tuple of float
        Fraction that each message keeps, in the order of sending; one number if `whole`. All values are sent, without
        positions, where it is 1.
    sent : float
        Elements that a rank sends.
    """

    whole: bool
    ratios: tuple[float, ...]
    sent: float


def ways(messages: Sequence[Delivery], costs: Costs, smallest: float = 0.001) -> list[Way]:
    """Return the ways to send a step's gradient among which LAGS chooses.

    These are: every message at the ratio of eq. 19; every message at the smallest ratio; every message dense; one
    message of the whole gradient at the smallest ratio, the paper's SLGS; and one that is dense.

    Parameters
    ----------
    messages : sequence of Delivery
        Messages of a layer-wise step.
    costs : Costs
        Costs of an exchange.
    smallest : float
        Smallest fraction to keep, 1/c_u.

    Returns
    -------
    list of Way
        Ways that differ from each other; the one of eq. 19 is the first.
    """
    numel = np.array([m.numel for m in messages])
    layers = np.array([len(m.layers) for m in messages])
    hiding = hiding_ratios(
        numel,
        # a message hides behind the backward pass of the next one; nothing follows the last
        [*(m.backward for m in messages[1:]), 0.0],
        [m.select for m in messages],
        costs.latency,
        costs.per_element,
        smallest,
        (costs.latency + costs.dense_latency, costs.dense_per_element),
    )
    candidates = []
    for whole, ratios in (
        (False, hiding),
        (False, np.full(numel.shape, smallest)),
        (False, np.ones(numel.shape)),
        (True, np.array([smallest])),
        (True, np.ones(1)),
    ):
        sent = (
            target_count(smallest, int(numel.sum()))
            if whole
            else np.maximum(ratios * numel, layers).sum()
        )
        # `sent` of a whole is that of the smallest ratio, also where it is dense
        elements = numel.sum() if (ratios == 1).all() else sent
        candidates.append(Way(whole, tuple(ratios.tolist()), float(elements)))
    # eq. 19 may come out as the smallest ratio, or 1, everywhere: no way is tried twice
    return list(dict.fromkeys(candidates))


def reference(candidates: Sequence[Way], seconds: Sequence[float]) -> int:
    """Return the position of the way to send that others must compare with.

    Nothing has to go on at once in a message after the backward pass, so its predicted time can be relied on.

    Parameters
    ----------
    candidates : sequence of Way
        Ways to send.
    seconds : sequence of float
        Predicted seconds of a step of each.

    Returns
    -------
    int
        The fastest of those with one message.
    """
    return min((i for i, way in enumerate(candidates) if way.whole), key=lambda i: seconds[i])


def preferred(candidates: Sequence[Way], seconds: ArrayLike, safe: int) -> int:
    """Return the position of the way to send that LAGS chooses.

    A way counts only if its step takes at most a tenth longer than that of the reference, with 97.5 % confidence: the
    noisier the measurements, the more often the reference stays. Of the ways that count, those within 3 % of the
    fastest are as fast as it, and the one of them that sends most is chosen, as more elements cost no time there.

    Parameters
    ----------
    candidates : sequence of Way
        Ways to send.
    seconds : array_like, shape (ways, rounds) or (ways,)
        Seconds of a step of each, measured in turns, so that those of a round belong together; or one predicted number
        of each.
    safe : int
        Position of the reference.

    Returns
    -------
    int
        Position of the chosen way; of those that send equally many, the fastest.
    """
    # logarithms, so that what slows down all of a round by one factor cancels
    took = np.log(np.asarray(seconds, float).reshape(len(candidates), -1))
    slower = took - took[safe]
    medians = np.median(slower, axis=1)
    # 1.253 σ/√n of a median of normal numbers, with σ = 1.483 times their median absolute deviation
    deviation = np.median(np.abs(slower - medians[:, None]), axis=1)
    highest = medians + 1.96 * 1.253 * 1.483 * deviation / np.sqrt(took.shape[1])
    # the reference always counts, so there is something to choose
    count = [i for i in range(len(candidates)) if i == safe or highest[i] <= np.log1p(_MARGIN)]
    limit = min(medians[i] for i in count) + np.log1p(_TOLERANCE)
    fast = [i for i in count if medians[i] <= limit]
    return max(fast, key=lambda i: (candidates[i].sent, -medians[i]))
