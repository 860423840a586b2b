"""What LAGS measures to choose how to send: its own steps, exchanges of several sizes, and the ways to send in turn."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.codec import Codec
from gradstats.collectives.packed import SparseAllGather
from gradstats.collectives.plain import all_reduce, all_reduce_mean
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Activity, NamedSlice, Selector
from gradstats.compressors.hiding import (
    Costs,
    Delivery,
    Way,
    preferred,
    reference,
    simulate,
    ways,
)
from gradstats.compressors.layerwise import sends_dense
from gradstats.primitives import Selection

__all__ = ["Calibration", "Trial", "cut", "probe", "settling"]

_WORTH_A_TRIAL = 1.25
"""A way to send is tried if its predicted step takes at most this many times as long as the fastest."""
_MOST_WAYS = 5
"""Number of ways to send that :func:`gradstats.compressors.hiding.ways` returns at most."""
_SMALLEST_PROBE = 1 << 6
"""Elements of the smallest exchange by which the network is measured; the next one has four times as many."""
_PROBES = 5
"""How often each of these exchanges is timed."""
_LONGEST_PROBE_S = 0.1
"""Seconds of an exchange after which no larger one is measured: then its bytes decide how long it takes."""


def settling(steps: int) -> int:
    """Return the number of steps after which a :class:`Calibration` has ended.

    Parameters
    ----------
    steps : int
        Number of its steps.
    """
    # one more, as DDP rebuilds its buckets after the first step
    return 1 + steps * (1 + _MOST_WAYS)


@dataclass(slots=True)
class Trial:
    """A way to send, the seconds of the steps that used it, and the exchanges that it keeps from step to step.

    Attributes
    ----------
    way : Way
        The way to send.
    seconds : list of float
        Seconds of the steps.
    gathers : list of SparseAllGather
        The exchange of each message.
    """

    way: Way
    seconds: list[float] = field(default_factory=list)
    gathers: list[SparseAllGather] = field(default_factory=list)


class Calibration:
    """The search of :class:`gradstats.compressors.LAGS` for how to send, the same on all ranks.

    Parameters
    ----------
    steps : int
        Number of steps in which times are taken, and for which each way to send is tried.
    ratio : float
        Fraction that every layer keeps meanwhile, and the least of any.
    codec : Codec
        What positions and values are on the wire.
    overlap : bool
        Whether messages are sent during the backward pass.

    Attributes
    ----------
    deliveries : list of Delivery
        Each message at the least ratio, measured; empty before all steps are timed.
    costs : Costs or None
        Measured costs of an exchange; None before.
    trials : list of Trial
        Ways to send that are being tried, the reference first; empty before and afterwards.
    measured : list of (Way, float)
        The ways that were tried, with the seconds of a step of each; empty before the end.
    """

    def __init__(self, steps: int, ratio: float, codec: Codec, overlap: bool) -> None:
        self.steps, self.ratio, self.codec, self.overlap = steps, ratio, codec, overlap
        self.deliveries: list[Delivery] = []
        self.costs: Costs | None = None
        self.trials: list[Trial] = []
        self.measured: list[tuple[Way, float]] = []
        self._timed: list[tuple[list[Delivery], float]] = []
        self._begun = False

    def time(self, deliveries: list[Delivery], seconds: float) -> bool:
        """Note a step at the least ratio, but not the first one; start over when DDP has rebuilt its buckets.

        Parameters
        ----------
        deliveries : list of Delivery
            Messages of the step.
        seconds : float
            Seconds of the step.

        Returns
        -------
        bool
            Whether enough steps are timed to predict the others.
        """
        # DDP rebuilds its buckets after it
        if not self._begun:
            self._begun = True
            return False
        # times are of other messages now; DDP rebuilds its buckets on all ranks in the same step
        if self._timed and [d.layers for d in self._timed[0][0]] != [d.layers for d in deliveries]:
            self._timed.clear()
        self._timed.append((deliveries, seconds))
        return len(self._timed) == self.steps

    def predict(
        self, corrected: torch.Tensor, selector: Selector, group: dist.ProcessGroup | None
    ) -> Trial:
        """Find the ways to send that may be the fastest.

        Parameters
        ----------
        corrected : tensor, shape (d,)
            A gradient; what is left of it once its selections are sent.
        selector : Selector
            Selector of the gradient as a whole.
        group : torch.distributed.ProcessGroup or None
            The ranks.

        Returns
        -------
        Trial
            The first to try.
        """
        whole = _seconds(lambda: selector.select(corrected))
        # everything that the choice follows from is a mean over the ranks: all of them choose alike
        step, whole, self.deliveries = _agreed(self._timed, whole, group, corrected.device)
        self.costs = costs = probe(
            corrected, max(d.numel for d in self.deliveries), self.codec, group
        )
        self._timed.clear()

        def seconds_of(way: Way) -> float:
            messages = _messages(way, self.deliveries, costs, whole, self.codec)
            return simulate(messages, overlap=self.overlap and corrected.is_cpu).seconds

        candidates = ways(self.deliveries, costs, self.ratio)
        # the way in which the timed steps were sent
        least = next(w for w in candidates if not w.whole and set(w.ratios) == {self.ratio})
        # what is not simulated, and the same for every way: forward pass, optimizer, data
        outside = max(0.0, step - seconds_of(least))
        seconds = [outside + seconds_of(way) for way in candidates]
        # the reference is tried however slow it is predicted: the others are compared with it
        limit, safe = _WORTH_A_TRIAL * min(seconds), reference(candidates, seconds)
        others = [
            w
            for w, s in zip(candidates, seconds, strict=True)
            if s <= limit and w != candidates[safe]
        ]
        self.trials = [Trial(way) for way in (candidates[safe], *others)]
        return self.trials[0]

    def following(
        self, seconds: float, group: dist.ProcessGroup | None, device: torch.device
    ) -> Trial:
        """Note how long a step took, and return the next way to send, or the preferred one of all.

        Parameters
        ----------
        seconds : float
            Seconds of the step.
        group : torch.distributed.ProcessGroup or None
            The ranks.
        device : torch.device
            Device of the gradient.
        """
        trials = self.trials
        # ways take turns, so the first of those with the fewest steps was in use
        current = min(trials, key=lambda trial: len(trial.seconds))
        current.seconds.append(seconds)
        following = min(trials, key=lambda trial: len(trial.seconds))
        if len(following.seconds) == self.steps:
            # all ranks have tried the same ways equally often, so the shapes agree
            rounds = torch.tensor([t.seconds for t in trials], dtype=torch.float64, device=device)
            agreed = all_reduce_mean(rounds, group).cpu().numpy()
            candidates = [trial.way for trial in trials]
            self.measured = list(zip(candidates, np.median(agreed, axis=1).tolist(), strict=True))
            # predict() put the reference first
            following = trials[preferred(candidates, agreed, 0)]
            # tells LAGS that it has the answer
            self.trials = []
        return following


def cut(
    timeline: Iterable[Activity],
    layers: Sequence[NamedSlice],
    target: Callable[[int, str], int],
) -> list[Delivery]:
    """Cut a step's timeline into its messages.

    Parameters
    ----------
    timeline : iterable of Activity
        What the step's time was spent on.
    layers : sequence of (str, slice)
        Names and places of the parameters, in the order in which they were ready.
    target : callable
        Function of a parameter's number of elements and its name that returns how many are aimed at.
    """
    names = [name for name, _ in layers]
    numels = {name: slot.stop - slot.start for name, slot in layers}
    deliveries: list[Delivery] = []
    pending: list[Activity] = []
    timeline = list(timeline)
    # an exchange bears the name of the layer that completed its message
    sending = {a.layer: a for a in timeline if a.lane == "communicate"}
    # the thread of the exchange adds to the same list, so its order is not that of time
    for activity in sorted(timeline, key=lambda a: a.start):
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
                    sent=sum(target(numels[n], n) for n in merged),
                    backward=sum(a.end - a.start for a in pending if a.lane == "backward"),
                    select=sum(a.end - a.start for a in pending if a.lane == "select"),
                    communicate=sent.end - sent.start,
                )
            )
            pending = []
    return deliveries


def _agreed(
    timed: Sequence[tuple[list[Delivery], float]],
    whole: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[float, float, list[Delivery]]:
    """Return the seconds of a step and of a selection in everything, and the messages, as means over the ranks."""
    each = list(zip(*(deliveries for deliveries, _ in timed), strict=True))
    step = statistics.median(seconds for _, seconds in timed)
    # medians, as a single step may have been disturbed
    lanes = [
        [statistics.median(d.backward for d in steps) for steps in each],
        [statistics.median(d.select for d in steps) for steps in each],
        # the least time: anything above it is waiting for a slower rank
        [min(d.communicate for d in steps) for steps in each],
    ]
    agreed = torch.tensor([step, whole, *itertools.chain(*lanes)], dtype=torch.float64)
    step, whole, *rest = all_reduce_mean(agreed.to(device), group).tolist()
    means = np.reshape(rest, (len(lanes), len(each))).T.tolist()
    deliveries = [
        Delivery(steps[0].layers, steps[0].numel, steps[0].sent, *seconds)
        for steps, seconds in zip(each, means, strict=True)
    ]
    return step, whole, deliveries


def _messages(
    way: Way, deliveries: Sequence[Delivery], costs: Costs, whole: float, codec: Codec
) -> list[Delivery]:
    """Return the predicted messages of a way to send; `whole` is the time of one selection in everything."""
    numel = sum(d.numel for d in deliveries)
    rows = (
        [Delivery(("",), numel, 0, sum(d.backward for d in deliveries), whole, 0)]
        if way.whole
        else deliveries
    )
    messages = []
    for row, ratio in zip(rows, way.ratios, strict=True):
        # every layer sends one element at least
        count = max(ratio * row.numel, len(row.layers))
        if sends_dense(round(count), round(count), row.numel, numel, codec):
            messages.append(replace(row, select=0.0, communicate=costs.dense(row.numel)))
        else:
            messages.append(replace(row, communicate=costs.sparse(count)))
    return messages


def probe(like: torch.Tensor, largest: int, codec: Codec, group: dist.ProcessGroup | None) -> Costs:
    """Measure exchanges of growing size among all ranks.

    Parameters
    ----------
    like : tensor, shape (d,)
        A gradient.
    largest : int
        Elements of the largest message.
    codec : Codec
        What positions and values are on the wire.
    group : torch.distributed.ProcessGroup or None
        The ranks.

    Returns
    -------
    Costs
        The costs, the same on all ranks.
    """
    numel, update = like.numel(), SparseUpdate()

    def sparse(count: int) -> Callable[[], object]:
        gather = SparseAllGather(codec)
        # spread over the gradient, as the length of coded positions depends on the gaps
        positions = torch.arange(count, device=like.device) * (numel // max(1, count))
        chosen = Selection(positions, gather.rounded(like[positions]))

        def call() -> None:
            update.begin(like)
            # adding up is part of what a selection costs
            for rank in gather([chosen], numel, group, 0, (count, count), like.device).selections:
                update.add(rank)

        return call

    def dense(count: int) -> Callable[[], object]:
        values = torch.zeros(count, device=like.device)
        return lambda: all_reduce(values, group)

    lines = []
    # a selection of more than half of a message would be longer than all its values
    for prepare, most in ((sparse, -(-largest // 2)), (dense, numel)):
        size, sizes, medians = min(_SMALLEST_PROBE, most), [], []
        while True:
            call = prepare(size)
            call()  # the first one pays for the memory
            took = torch.tensor([_seconds(call)], dtype=torch.float64, device=like.device)
            sizes.append(size)
            # the mean also decides whether to go on: by its own clock a rank could go on alone, and hang
            medians.append(float(all_reduce_mean(took, group)))
            if size == most or medians[-1] > _LONGEST_PROBE_S:
                break
            size = min(4 * size, most)
        lines.append(_line(sizes, medians))
    return Costs(*lines[0], *lines[1])


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
    # not negative: noise must not make a latency or an element take less than no time
    latency, per_element = scipy.optimize.nnls(design, np.ones_like(took))[0]
    return float(latency), float(per_element)
