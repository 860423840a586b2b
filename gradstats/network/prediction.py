"""What is predicted of a sender: seconds with their intervals, the parts of a step, and where it pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradstats.collectives.codec import PLAIN
from gradstats.network.exchange import SLOWEST, break_even
from gradstats.network.model import ALGORITHMS, Network, middle_95
from gradstats.network.question import Question
from gradstats.network.senders import Sender
from gradstats.network.waiting import expected_largest, largest_normal, log_spread

__all__ = [
    "ERROR",
    "LATE",
    "SYSTEMS",
    "TARGETS",
    "Draws",
    "bandwidths",
    "drawn_interval",
    "predicted",
    "price",
    "utilisation",
]

TARGETS = (50, 75, 90, 95, 99)
"""Shares of a step's time spent computing, in percent, for which a plan says what bandwidth they take."""
LATE, ERROR, SYSTEMS = 0.095, 0.107, 8
"""What a training does that no fitted line knows: mean and standard deviation of ln(measured ÷ predicted) of a system
that was not among those compared, and how many systems these were; benchmarks/validation.py computes them.

The 48 steps of docs/network.md are those of eight systems, and the steps of a system err alike: they say as much as 13
independent ones would.
"""
_NOTHING = 1e-9
"""Share of a step that counts as no gain."""

_TRAININGS = 20
"""Trainings drawn on each drawn network: they cost nothing, and an end of an interval should not be luck."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """A network and trainings on it as they may really be.

    Attributes
    ----------
    networks : list of Network
        The network as fitted, then as drawn from its distribution.
    times : sequence of float
        Measured seconds of computing.
    slower : list of float
        For each, by what factor computing differs from what is expected of the slowest worker.
    errors : mapping
        By what factor a step differs from its prediction, by name, ratio and local steps: not at all, then for
        several trainings on each drawn network.
    """

    networks: list[Network]
    times: Sequence[float]
    slower: list[float]
    errors: Mapping[tuple[str, float | None, int], Seconds]

    @classmethod
    def of(cls, question: Question) -> Draws:
        """Draw networks and trainings, the same ones for equal questions.

        Parameters
        ----------
        question : Question
            Question of a plan.
        """
        network, draws = question.network, question.draws
        # a fixed seed: the same question gives the same plan
        generator = np.random.default_rng(0)
        drawn = [network.drawn(generator) for _ in range(draws)]

        def errors(steps: int) -> Seconds:
            # t-distributed, as ERROR itself is an estimate, from so many systems
            error = ERROR * generator.standard_t(SYSTEMS - 1, draws * _TRAININGS)
            # what makes a step late is in each exchange: of local steps, few have one
            return np.exp([0.0, *(LATE / max(steps, 1) + error)])

        # each system errs by itself, and the same at every rate
        by_training = {
            (*each, steps): errors(steps)
            # 0 always, since the baseline has no local steps
            for steps in dict.fromkeys((0, *question.local_steps))
            for each in question.choices()
        }
        return cls([network, *drawn], question.times, [1.0] * (draws + 1), by_training)

    def among(self, world: int) -> Draws:
        """Return them with what the slowest of some workers computes, who all differ as the measured times do.

        Parameters
        ----------
        world : int
            Number of workers.
        """
        n, draws = len(self.times), len(self.networks) - 1
        # a single time does not say how workers differ
        if n < 2:
            return self
        generator = np.random.default_rng(1)  # the same for every number: more workers wait longer
        # what a few measured times leave open: the spread (χ²), and below the median
        spread = log_spread(self.times) * np.sqrt((n - 1) / generator.chisquare(n - 1, draws))
        middle = generator.standard_normal(draws) / math.sqrt(n)
        # a quantile of the largest of `world` normal numbers, for each draw
        slowest = middle + largest_normal(generator.random(draws), world)
        expected = log_spread(self.times) * expected_largest(world)
        # a sender's seconds have the expected wait already: this is the rest
        return replace(self, slower=[1.0, *np.exp(spread * slowest - expected).tolist()])

    def slowed(self, factor: float) -> Draws:
        """Return them with slower links: networks are drawn as measured, and only then the links get another rate.

        Parameters
        ----------
        factor : float
            Factor on the seconds per byte.
        """
        return replace(self, networks=[n.slowed(factor) for n in self.networks])

    def seconds(self, sender: Sender) -> Seconds:
        """Return the seconds of a step on every network; what a sender chooses, it chooses by the fitted one.

        Parameters
        ----------
        sender : Sender
            What sends the gradient.
        """
        settled = sender.settled(self.networks[0])
        pairs = list(zip(self.networks, self.slower, strict=True))
        if all(pair == pairs[0] for pair in pairs):  # nothing of an assumed network differs
            pairs = pairs[:1]
        # one value, repeated below, where all draws are equal
        seconds = np.array([settled.timeline(n, slower).seconds for n, slower in pairs])
        seconds = np.broadcast_to(seconds, len(self.networks))
        return self.errors[sender.name, sender.ratio, sender.steps] * self.trained(seconds)

    def trained(self, values: ArrayLike) -> Seconds:
        """Return a value of every network for each training on it.

        Parameters
        ----------
        values : array_like of float, shape (draws + 1,)
            The value on the network as fitted, then as drawn.
        """
        values = np.asarray(values)
        return np.concatenate([values[:1], np.tile(values[1:], _TRAININGS)])


def drawn_interval(values: Seconds) -> tuple[float, float]:
    """Return the 95 % interval of a prediction.

    Parameters
    ----------
    values : ndarray of float64
        The prediction, then what was drawn.
    """
    # without draws the prediction is all there is
    return middle_95(values[1:] if values.size > 1 else values)


def predicted(sender: Sender, network: Network, seconds: Seconds, dense: Seconds) -> dict[str, Any]:
    """Return the fields of a record that say how long a step takes, and of what parts.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    network : Network
        Network as fitted.
    seconds : ndarray of float64, one on the fitted network, then drawn
        Its seconds by :meth:`Draws.seconds`.
    dense : ndarray of float64, of the same shape
        Those of the baseline.
    """
    settled = sender.settled(network)
    low, high = drawn_interval(seconds)
    # the baseline is as fast as itself: there is nothing to doubt, and no interval
    itself = seconds is dense
    speedup_low, speedup_high = (math.nan,) * 2 if itself else drawn_interval(dense / seconds)
    split, messages = _split(settled, network), settled.messages(network)
    return {
        "seconds": float(seconds[0]),
        "low": low,
        "high": high,
        "speedup": float(dense[0] / seconds[0]),
        "speedup_low": speedup_low,
        "speedup_high": speedup_high,
        "limit": _limit(split),
        **split,
        "bytes": sum(m.bytes_sent for m in messages),
        "selected": sum(m.sent for m in messages),
        "layers": dict(settled.chosen),
    }


def _split(sender: Sender, network: Network) -> dict[str, float]:
    """Return the seconds of each part of a step, and how much of its exchange is hidden."""

    def exchanging(n: Network) -> float:
        return sum(m.communicate for m in sender.messages(n))

    # without links only packing is left; without bytes, what messages take at least; transfer is the rest
    pack, fixed = exchanging(_unlinked(network)), exchanging(network.slowed(0))
    timeline, memory = sender.timeline(network), sender.memory(network)
    return {
        "compute": sender.forward + timeline.lane("backward"),
        "memory": memory,
        # senders count the memory's passes as selection
        "select": max(0.0, timeline.lane("select") - memory),
        "pack": pack,
        "latency": max(0.0, fixed - pack),
        "transfer": max(0.0, timeline.lane("communicate") - fixed),
        "hidden": max(0.0, timeline.hidden),
    }


def _unlinked(network: Network) -> Network:
    """Return the network with collectives that take no time, so that only local work costs something."""
    lines = (
        replace(line, fixed=0.0, slope=0.0) if line.operation in ALGORITHMS else line
        for line in network.lines
    )
    return replace(network, lines=tuple(lines))


def _limit(split: Mapping[str, float]) -> str:
    """Return the part that takes most of a step.

    What is hidden is not taken off: computing and exchanging hide each other, and the step waits for the longer one.
    """
    parts = ("compute", "memory", "select", "pack", "latency", "transfer")
    return max(parts, key=lambda part: split[part])


def utilisation(sender: Sender, seconds: Seconds, slower: Seconds) -> dict[str, float]:
    """Return the share of a step that is computing, and its interval.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    seconds : ndarray of float64, one on the fitted network, then drawn
        Its seconds by :meth:`Draws.seconds`.
    slower : ndarray of float64, of the same shape
        By what factor computing differs in each.
    """
    # an error drawn below 1 makes a step shorter than its own computing
    share = np.minimum(slower * sender.compute / seconds, 1.0)
    low, high = drawn_interval(share)
    return {"utilisation": float(share[0]), "utilisation_low": low, "utilisation_high": high}


def price(sender: Sender, network: Network, dense: Sender) -> dict[str, Any]:
    """Return from which bandwidth on a sender, and its codec, save time; no rate of the links changes that.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    network : Network
        Network as fitted.
    dense : Sender
        The baseline.
    """
    itself = sender.steps == dense.steps and sender.name == dense.name
    bandwidth, side = (math.nan, "") if itself else _break_even(network, dense, sender)
    coded = (math.nan, "")
    if sender.codec != PLAIN:
        coded = _break_even(network, sender.plain(), sender)
    return {
        "break_even": bandwidth,
        "pays": side,
        "codec_break_even": coded[0],
        "codec_pays": coded[1],
    }


def bandwidths(sender: Sender, network: Network) -> dict[str, float]:
    """Return the bandwidths in Mbit/s from which on a step computes for these shares of its time.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    network : Network
        Network as fitted.
    """

    def needed(share: float) -> float:
        # 0 where computing is exactly this share, and above it on slower links, as break_even takes it
        at = break_even(network, lambda n: sender.seconds(n) - sender.compute / share)
        return at / 1e6

    return {f"bandwidth_{target}": needed(target / 100) for target in TARGETS}


def _break_even(network: Network, other: Sender, sender: Sender) -> tuple[float, str]:
    """Return the bandwidth in Mbit/s where a sender begins to be faster than another, and on which side of it."""

    def gain(n: Network) -> float:
        seconds = sender.seconds(n)
        # where both come to the same, nothing is gained
        return other.seconds(n) - seconds - _NOTHING * seconds

    bandwidth = break_even(network, gain)
    # faster on the fastest links, and so perhaps everywhere
    if math.isinf(bandwidth):
        if gain(network.slowed(SLOWEST)) >= 0:
            return bandwidth, "always"
        # it gains on fast links only: the end of that is where the opposite begins
        return break_even(network, lambda n: -gain(n)) / 1e6, "above"
    return bandwidth / 1e6, "below" if bandwidth else "never"
