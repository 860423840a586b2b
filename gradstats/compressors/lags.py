"""LAGS-SGD: layer-wise selection whose ratios hide the communication behind the backward pass."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.collectives.packed import SparseAllGather
from gradstats.collectives.plain import all_reduce, all_reduce_mean
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Activity, Lane, NamedSlice, Reduced, Selector
from gradstats.compressors.layerwise import MERGE, Layerwise, sends_dense
from gradstats.compressors.selectors import ThresholdSelector, TopK
from gradstats.errors import InputError
from gradstats.primitives import Selection
from gradstats.primitives.ratio import check_count, check_ratio, target_count
from gradstats.thresholds import DGC

__all__ = [
    "LAGS",
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
_WORTH_A_TRIAL = 1.25
"""A way to send is tried if its predicted step takes at most this many times as long as the fastest."""
_MOST_WAYS = 5
"""Number of ways to send that :func:`ways` returns at most."""
_SMALLEST_PROBE = 1 << 6
"""Elements of the smallest exchange by which the network is measured; the next one has four times as many."""
_PROBES = 5
"""How often each of these exchanges is timed."""
_LONGEST_PROBE_S = 0.1
"""Seconds of an exchange after which no larger one is measured: then its bytes decide how long it takes."""


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
    elements = np.maximum(np.asarray(numel, float), 1)
    budget = np.asarray(backward, float) - np.asarray(select, float) - latency
    affordable = np.where(budget > 0, np.inf, 0.0)
    if per_element > 0:
        affordable = budget / (per_element * elements)
    if dense is None:
        return np.clip(affordable, smallest, 1.0)
    kept = np.clip(affordable, smallest, max(smallest, 0.5))
    whole = dense[0] + dense[1] * elements
    sparse = np.asarray(select, float) + latency + per_element * elements * kept
    return np.where(whole <= np.maximum(sparse, np.asarray(backward, float)), 1.0, kept)


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
        [*(m.backward for m in messages[1:]), 0.0],
        [m.select for m in messages],
        costs.latency,
        costs.per_element,
        smallest,
        (costs.latency + costs.dense_latency, costs.dense_per_element),
    )
    found = []
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
        kept = numel.sum() if (ratios == 1).all() else sent
        found.append(Way(whole, tuple(ratios.tolist()), float(kept)))
    return list(dict.fromkeys(found))


def reference(found: Sequence[Way], seconds: Sequence[float]) -> int:
    """Return the position of the way to send that others must compare with.

    Nothing has to go on at once in a message after the backward pass, so its predicted time can be relied on.

    Parameters
    ----------
    found : sequence of Way
        Ways to send.
    seconds : sequence of float
        Predicted seconds of a step of each.

    Returns
    -------
    int
        The fastest of those with one message.
    """
    return min((i for i, way in enumerate(found) if way.whole), key=lambda i: seconds[i])


def preferred(found: Sequence[Way], seconds: ArrayLike, safe: int) -> int:
    """Return the position of the way to send that LAGS chooses.

    A way counts only if its step takes at most a tenth longer than that of the reference, with 97.5 % confidence: the
    noisier the measurements, the more often the reference stays. Of the ways that count, those within 3 % of the
    fastest are as fast as it, and the one of them that sends most is chosen, as more elements cost no time there.

    Parameters
    ----------
    found : sequence of Way
        Ways to send.
    seconds : array_like, shape (ways, rounds)
        Seconds of a step of each, measured in turns, so that those of a round belong together; or one predicted number
        of each.
    safe : int
        Position of the reference.

    Returns
    -------
    int
        Position of the chosen way; of those that send equally many, the fastest.
    """
    took = np.log(np.asarray(seconds, float))
    slower = took - took[safe]
    medians = np.median(slower, axis=1)
    # 1.253 σ/√n of a median of normal numbers, with σ = 1.483 times their median absolute deviation
    deviation = np.median(np.abs(slower - medians[:, None]), axis=1)
    highest = medians + 1.96 * 1.253 * 1.483 * deviation / np.sqrt(took.shape[1])
    count = [i for i in range(len(found)) if i == safe or highest[i] <= np.log1p(_MARGIN)]
    limit = min(medians[i] for i in count) + np.log1p(_TOLERANCE)
    fast = [i for i in count if medians[i] <= limit]
    return max(fast, key=lambda i: (found[i].sent, -medians[i]))


@dataclass(slots=True)
class _Trial:
    """A way to send, the seconds of the steps that used it, and the exchanges that it keeps from step to step."""

    way: Way
    seconds: list[float] = field(default_factory=list)
    gathers: list[SparseAllGather] = field(default_factory=list)


class LAGS(Layerwise):
    """Top-k layer by layer in the order of backpropagation, with ratios that hide the messages behind it.

    It chooses how to send once, on the same measurements on every rank:

    1. For `calibrate` steps every layer keeps `ratio`, and backward pass and selection of every message are timed.
    2. Exchanges of several sizes among all ranks, outside of any step, show what a message and an element cost.
    3. From both follow the ratios of eq. 19, and the time of a step for each of :func:`ways`.
    4. Those predicted to be within a quarter of the fastest, and always one with a single message, are used in turn,
       step by step, `calibrate` times each. Then the measured times decide (:func:`preferred`).

    Parameters
    ----------
    ratio : float
        Least fraction k/d that any layer keeps, in (0, 1]: the paper's 1/c_u.
    adaptive : bool
        Whether to choose how to send; if false, every layer keeps `ratio`.
    calibrate : int
        Number of steps in which times are taken, at least 1, and of steps for which each way to send is tried. Counting
        starts anew when DDP rebuilds its buckets.
    double_sampling : bool
        Whether thresholds are those of a sample of the layer, refined once (:class:`gradstats.thresholds.DGC`), instead
        of the exact k-th largest magnitude.
    exactly : bool
        Whether each layer sends k elements whatever they are, see :class:`TopK`: on a device the host then does not
        wait for a selection. With `adaptive` it is refused: what is not waited for cannot be timed.
    merge : int
        Elements of gradient to gather before a message is sent, see :class:`Layerwise`.
    codec : Codec or torch.dtype
        What positions and values are on the wire, see :class:`SparseCompressor`.
    overlap : bool
        Whether to exchange during the backward pass.

    Attributes
    ----------
    ratios : dict of str to float
        Fraction that each layer keeps, by name; equal ones where the gradient is sent as a whole. Empty before the
        choice.
    whole : bool
        Whether one message, selected in the gradient as a whole, is sent after the backward pass.
    deliveries : list of Delivery
        The measurements behind the choice, one for each message at the least ratio: means over the ranks of medians
        over the steps. For the exchange the least time replaces the median, as anything above it is waiting.
    costs : Costs or None
        Measured costs of an exchange; None before the choice.
    measured : list of (Way, float)
        The ways to send that were tried, the reference first, with the seconds of a step of each: medians over the
        steps of means over the ranks. Empty before the choice.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or `calibrate` is below 1, values cannot travel as the type given, or `exactly`
        comes with a sampled threshold or with `adaptive`.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), algorithm 1, with the ratios of eq. 19.

    Differs from the paper: it accumulates the gradient, not learning rate times gradient, and the optimizer applies
    the rate to the average. Top-k is exact unless `double_sampling` is set. The paper sends one message for each layer
    and merges the selections of small layers; here messages are merged by the size of the gradient, so that merging
    does not depend on the ratios, and the layers of one message share a ratio. The paper has neither dense messages nor
    a way back to one message: where cores are shared, what hides in theory does not in a step.

    A choice that comes from a clock differs from run to run. A checkpoint keeps it; a run that stops while it measures
    begins anew.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        *,
        adaptive: bool = True,
        calibrate: int = 20,
        double_sampling: bool = False,
        exactly: bool = False,
        merge: int = MERGE,
        codec: Codec | torch.dtype = PLAIN,
        overlap: bool = True,
    ) -> None:
        super().__init__(self._top_k, merge=merge, codec=codec, overlap=overlap)
        self._ratio = check_ratio(ratio)  # now, not in the first backward pass
        self.adaptive = adaptive
        self.calibrate = check_count(calibrate, "calibrate")
        # one more, as DDP rebuilds its buckets after the first step
        self.settling = 1 + self.calibrate * (1 + _MOST_WAYS) if adaptive else 0
        if exactly and double_sampling:
            raise InputError(
                "a sampled threshold does not select exactly k: leave one of the two out"
            )
        if exactly and adaptive:
            raise InputError("exactly needs adaptive=False: what is not waited for cannot be timed")
        self.double_sampling, self.exactly = double_sampling, exactly
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the choice and what was measured for it."""
        self.ratios: dict[str, float] = {}
        self.whole = False
        self.deliveries: list[Delivery] = []
        self.costs: Costs | None = None
        self.measured: list[tuple[Way, float]] = []
        self._timed: list[tuple[list[Delivery], float]] = []
        self._trials: list[_Trial] = []
        self._settled = False
        self._layers: list[NamedSlice] = []
        self._flag = 0
        self._ended = time.perf_counter()

    def _top_k(self, name: str, numel: int) -> Selector:
        ratio = self.ratios.get(name, self._ratio)
        if name not in self.ratios and self.whole:
            ratio = next(iter(self.ratios.values()))
        if self.double_sampling:
            return ThresholdSelector(DGC(), ratio)
        return TopK(ratio, self.exactly)

    @property
    def ratio(self) -> float:
        """Least fraction k/d that any layer keeps. Setting it, as a schedule does, drops the choice."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if ratio != self._ratio:
            self._ratio = ratio
            self._begin_anew()
            self._keep({})

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the target count of a layer, or of all layers met so far together."""
        if layer is None and self.whole:
            return target_count(next(iter(self.ratios.values())), numel)
        return super().target(numel, layer)

    def push(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int = 0,
    ) -> None:
        """Take layers whose gradient is complete, as :meth:`Layerwise.push` does, unless one message has them all."""
        self._layers += layers
        self._flag |= flag
        if not self.whole:
            super().push(corrected, layers, group, flag)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Complete the step as :meth:`Layerwise.reduce` does; measure it until it is known how to send."""
        layers = self._layers or [("", slice(0, corrected.numel()))]
        if self.whole:
            flag |= self._flag
        self._layers, self._flag = [], 0
        reduced = super().reduce(corrected, group, flag)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        if self.adaptive and not self._settled and not any(reduced.flags):
            if self._trials:
                self._try_next(seconds, group, corrected.device)
            else:
                self._time(layers, seconds)
                if len(self._timed) == self.calibrate:
                    self._predict(corrected, group)
                    self._ended = time.perf_counter()
        return reduced

    def abandon(self) -> None:
        """Drop a step that will not be completed."""
        super().abandon()
        self._layers, self._flag = [], 0

    def _time(self, layers: list[NamedSlice], seconds: float) -> None:
        """Cut the step's timeline into messages; start over when DDP has rebuilt its buckets."""
        names = [name for name, _ in layers]
        numels = {name: slot.stop - slot.start for name, slot in layers}
        deliveries: list[Delivery] = []
        pending: list[Activity] = []
        sending = {a.layer: a for a in self.timeline if a.lane == "communicate"}
        for activity in sorted(self.timeline, key=lambda a: a.start):
            if activity.lane == "communicate":
                continue
            pending.append(activity)
            if activity.lane == "select" and activity.layer in sending:
                last = names.index(activity.layer) + 1
                merged, names = tuple(names[:last]), names[last:]
                sent = sending[activity.layer]
                deliveries.append(
                    Delivery(
                        layers=merged,
                        numel=sent.numel,
                        sent=sum(self.selectors[n].target(numels[n]) for n in merged),
                        backward=sum(a.end - a.start for a in pending if a.lane == "backward"),
                        select=sum(a.end - a.start for a in pending if a.lane == "select"),
                        communicate=sent.end - sent.start,
                    )
                )
                pending = []
        if self._timed and [d.layers for d in self._timed[0][0]] != [d.layers for d in deliveries]:
            self._timed.clear()
        self._timed.append((deliveries, seconds))

    def _predict(self, corrected: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Find the ways to send that may be the fastest, the same on all ranks."""
        each = list(zip(*(deliveries for deliveries, _ in self._timed), strict=True))
        step = statistics.median(seconds for _, seconds in self._timed)
        selector = self._top_k("", corrected.numel())
        whole = _seconds(lambda: selector.select(corrected))
        lanes = [
            [statistics.median(d.backward for d in steps) for steps in each],
            [statistics.median(d.select for d in steps) for steps in each],
            # the least time: anything above it is waiting for a slower rank
            [min(d.communicate for d in steps) for steps in each],
        ]
        agreed = torch.tensor([step, whole, *itertools.chain(*lanes)], dtype=torch.float64)
        step, whole, *rest = all_reduce_mean(agreed.to(corrected.device), group).tolist()
        means = np.reshape(rest, (len(lanes), len(each))).T.tolist()
        self.deliveries = [
            Delivery(steps[0].layers, steps[0].numel, steps[0].sent, *seconds)
            for steps, seconds in zip(each, means, strict=True)
        ]
        self.costs = self._probe(corrected, group)
        self._timed.clear()

        def seconds_of(way: Way) -> float:
            messages = self._messages(way, whole)
            return simulate(messages, overlap=self.overlap and corrected.is_cpu).seconds

        found = ways(self.deliveries, self.costs, self._ratio)
        least = next(w for w in found if not w.whole and set(w.ratios) == {self._ratio})
        outside = max(0.0, step - seconds_of(least))
        seconds = [outside + seconds_of(way) for way in found]
        limit, safe = _WORTH_A_TRIAL * min(seconds), reference(found, seconds)
        others = [w for w, s in zip(found, seconds, strict=True) if s <= limit and w != found[safe]]
        self._trials = [_Trial(way) for way in (found[safe], *others)]
        self._use(self._trials[0])

    def _messages(self, way: Way, whole: float) -> list[Delivery]:
        """Return the predicted messages of a way to send; `whole` is the time of one selection in everything."""
        assert self.costs is not None
        numel = sum(d.numel for d in self.deliveries)
        rows = (
            [Delivery(("",), numel, 0, sum(d.backward for d in self.deliveries), whole, 0)]
            if way.whole
            else self.deliveries
        )
        found = []
        for row, ratio in zip(rows, way.ratios, strict=True):
            count = max(ratio * row.numel, len(row.layers))
            if sends_dense(round(count), round(count), row.numel, numel, self._codec):
                found.append(replace(row, select=0.0, communicate=self.costs.dense(row.numel)))
            else:
                found.append(replace(row, communicate=self.costs.sparse(count)))
        return found

    def _probe(self, like: torch.Tensor, group: dist.ProcessGroup | None) -> Costs:
        """Measure exchanges of growing size among all ranks, and return the costs, the same on all ranks."""
        numel, update = like.numel(), SparseUpdate()
        largest = max(d.numel for d in self.deliveries)

        def sparse(count: int) -> Callable[[], object]:
            gather = SparseAllGather(self._codec)
            positions = torch.arange(count, device=like.device) * (numel // count)
            chosen = Selection(positions, gather.rounded(like[positions]))

            def call() -> None:
                update.begin(like)
                for rank in gather(
                    [chosen], numel, group, 0, (count, count), like.device
                ).selections:
                    update.add(rank)

            return call

        def dense(count: int) -> Callable[[], object]:
            values = torch.zeros(count, device=like.device)
            return lambda: all_reduce(values, group)

        lines = []
        for prepare, most in ((sparse, -(-largest // 2)), (dense, numel)):
            size, sizes, medians = min(_SMALLEST_PROBE, most), [], []
            while True:
                call = prepare(size)
                call()  # the first one pays for the memory
                took = torch.tensor([_seconds(call)], dtype=torch.float64, device=like.device)
                sizes.append(size)
                medians.append(float(all_reduce_mean(took, group)))
                if size == most or medians[-1] > _LONGEST_PROBE_S:
                    break
                size = min(4 * size, most)
            lines.append(_line(sizes, medians))
        return Costs(*lines[0], *lines[1])

    def _try_next(
        self, seconds: float, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """Note how long a step took, and go on to the next way to send, or to the preferred one of all."""
        trials = self._trials
        current = min(trials, key=lambda trial: len(trial.seconds))
        current.seconds.append(seconds)
        following = min(trials, key=lambda trial: len(trial.seconds))
        if len(following.seconds) == self.calibrate:
            rounds = torch.tensor([t.seconds for t in trials], dtype=torch.float64, device=device)
            agreed = all_reduce_mean(rounds, group).cpu().numpy()
            found = [trial.way for trial in trials]
            self.measured = list(zip(found, np.median(agreed, axis=1).tolist(), strict=True))
            following = trials[preferred(found, agreed, 0)]
            self._trials = []
            self._settled = True
        self._use(following)

    def _use(self, trial: _Trial) -> None:
        """Send in this way from the next step on."""
        way, self._gathers = trial.way, trial.gathers
        self.whole = way.whole
        each = way.ratios * len(self.deliveries) if way.whole else way.ratios
        self._keep(by_layer(self.deliveries, each))

    def _keep(self, ratios: dict[str, float]) -> None:
        """Give every layer its ratio."""
        self.ratios = ratios
        if "" not in ratios:
            self._selectors.pop("", None)  # of a step that was sent as a whole
        for name, selector in self.selectors.items():
            selector.ratio = ratios.get(name, self._ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`Layerwise`, and the choice if there is one."""
        return {
            **super().state_dict(),
            "ratio": self._ratio,
            "ratios": dict(self.ratios) if self._settled else {},
            "whole": self.whole and self._settled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._begin_anew()
        self._ratio = state["ratio"]
        self._settled = bool(state["ratios"])
        self.whole = state["whole"]
        self._keep(dict(state["ratios"]))


def _seconds(call: Callable[[], object]) -> float:
    """Return the median seconds of several calls."""
    seconds = []
    for _ in range(_PROBES):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency and seconds per element, fitted with equal weight on the relative error of every size."""
    import scipy.optimize

    took = np.asarray(seconds)
    design = np.stack([np.ones_like(took), np.asarray(sizes, float)], axis=1) / took[:, None]
    latency, per_element = scipy.optimize.nnls(design, np.ones_like(took))[0]
    return float(latency), float(per_element)
