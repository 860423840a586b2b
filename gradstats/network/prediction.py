"""What is predicted of a sender: seconds with their intervals, the parts of a step, and where it pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.collectives.codec import PLAIN
from gradstats.network.exchange import SLOWEST, break_even
from gradstats.network.model import ALGORITHMS, Network, middle_95
from gradstats.network.question import Question
from gradstats.network.senders import Sender

__all__ = [
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
_ERROR = 0.14
"""Standard deviation of what a training does that no fitted line knows, as a share of a step.

The root mean square of ln(measured ÷ predicted) in docs/network.md; 0.10 without `redsync-quantised`, which sends
several times k in the first steps.
"""
_NOTHING = 1e-9
"""Share of a step that counts as no gain."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """A network and trainings on it as they may really be.

    Attributes
    ----------
    networks : list of Network
        The network as fitted, then as drawn from its distribution.
    slower : list of float
        For each, by what factor computing differs from the median of its measurements.
    errors : mapping
        For each, by what factor a step differs from its prediction, by name, ratio and local steps.
    """

    networks: list[Network]
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
        network, times = question.network, question.times
        generator = np.random.default_rng(0)
        uncertain = any(line.degrees for line in network.lines)
        several = uncertain or len(times) > 1
        drawn = [network.drawn(generator) for _ in range(question.draws if several else 0)]
        draws = len(drawn)
        slower = _noise(times, draws, generator)
        errors = {
            (*each, steps): np.exp([0.0, *(_ERROR * generator.standard_normal(draws))])
            if uncertain
            else np.ones(draws + 1)
            for steps in dict.fromkeys((0, *question.local_steps))
            for each in question.choices()
        }
        return cls([network, *drawn], slower, errors)

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
        pairs = zip(self.networks, self.slower, strict=True)
        seconds = np.array([settled.timeline(n, slower).seconds for n, slower in pairs])
        return np.asarray(self.errors[sender.name, sender.ratio, sender.steps] * seconds)


def _noise(times: Sequence[float], draws: int, generator: np.random.Generator) -> list[float]:
    """Return by what factor computing differs from the median of its measurements: not at all, then as drawn."""
    n = len(times)
    if n < 2:
        return [1.0] * (draws + 1)
    # the interval of one more measurement, of which the times are a sample
    spread = float(np.std(np.log(times), ddof=1)) * math.sqrt(1 + 1 / n)
    return [1.0, *np.exp(spread * generator.standard_t(n - 1, draws)).tolist()]


def drawn_interval(values: Seconds) -> tuple[float, float]:
    """Return the 95 % interval of a prediction.

    Parameters
    ----------
    values : ndarray of float64, shape (draws + 1,)
        The prediction, then what was drawn.
    """
    return middle_95(values[1:] if values.size > 1 else values)


def predicted(sender: Sender, network: Network, seconds: Seconds, dense: Seconds) -> dict[str, Any]:
    """Return the fields of a record that say how long a step takes, and of what parts.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    network : Network
        Network as fitted.
    seconds : ndarray of float64, shape (draws + 1,)
        Its seconds by :meth:`Draws.seconds`.
    dense : ndarray of float64, shape (draws + 1,)
        Those of the baseline.
    """
    settled = sender.settled(network)
    low, high = drawn_interval(seconds)
    speedup_low, speedup_high = drawn_interval(dense / seconds)
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

    pack, fixed = exchanging(_unlinked(network)), exchanging(network.slowed(0))
    timeline, memory = sender.timeline(network), sender.memory(network)
    return {
        "compute": sender.forward + timeline.lane("backward"),
        "memory": memory,
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


def utilisation(sender: Sender, seconds: Seconds, slower: Iterable[float]) -> dict[str, float]:
    """Return the share of a step that is computing, and its interval.

    Parameters
    ----------
    sender : Sender
        What sends the gradient.
    seconds : ndarray of float64, shape (draws + 1,)
        Its seconds by :meth:`Draws.seconds`.
    slower : iterable of float, length draws + 1
        By what factor computing differs in each.
    """
    share = np.minimum(np.array(slower) * sender.compute / seconds, 1.0)
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
        at = break_even(network, lambda n: sender.seconds(n) - sender.compute / share)
        return at / 1e6

    return {f"bandwidth_{target}": needed(target / 100) for target in TARGETS}


def _break_even(network: Network, other: Sender, sender: Sender) -> tuple[float, str]:
    """Return the bandwidth in Mbit/s where a sender begins to be faster than another, and on which side of it."""

    def gain(n: Network) -> float:
        seconds = sender.seconds(n)
        # where both come to the same, nothing is gained
        return other.seconds(n) - seconds - _NOTHING * seconds

    found = break_even(network, gain)
    if math.isinf(found):
        if gain(network.slowed(SLOWEST)) >= 0:
            return found, "always"
        return break_even(network, lambda n: -gain(n)) / 1e6, "above"
    return found / 1e6, "below" if found else "never"
