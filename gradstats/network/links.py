"""Links that were not measured: α and β of usual ones, each with the range that they lie in and where that is from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradstats.errors import InputError
from gradstats.network.model import Network
from gradstats.network.rates import parse_rate
from gradstats.primitives.ratio import check_number
from gradstats.statistics.solution import Z95

__all__ = ["LINKS", "Link", "LinkName", "link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A usual link, as two workers see it.

    Attributes
    ----------
    rate : float
        Its bandwidth in bit/s.
    latency : (float, float, float)
        Seconds of a message, α: lowest, usual and highest.
    slower : (float, float, float)
        Seconds per byte, β, in those of the bandwidth: lowest, usual and highest.
    source : str
        Where the numbers are from.
    """

    rate: float
    latency: tuple[float, float, float]
    slower: tuple[float, float, float]
    source: str


_FRAMES = 1538 / 1448
"""Bytes on an Ethernet of 1,500-byte packets per byte that TCP carries: 20 + 32 of headers, 38 of frame and gap."""
_RINGS = (
    "β: 1448 of 1538 bytes of a frame are data; rings took 1.02 to 1.12 times the link's own time between machines, "
    "and 1.15 in the lab (docs/network.md)"
)
_TABLE = (
    "https://ttsugriy.github.io/distributed-training-book/foundations/04-alpha-beta-model: Ethernet 10 to 50 µs, "
    "InfiniBand 1 to 5 µs"
)

LinkName: TypeAlias = Literal["1gbit", "10gbit", "100gbit", "wan"]
LINKS: dict[str, Link] = {
    "1gbit": Link(
        rate=1e9,
        latency=(10e-6, 50e-6, 250e-6),
        slower=(1.0, _FRAMES, 1.15),
        source=f"α: {_TABLE}; up to five times that where a message wakes a process. {_RINGS}",
    ),
    "10gbit": Link(
        rate=1e10,
        latency=(10e-6, 30e-6, 150e-6),
        slower=(1.0, _FRAMES, 1.3),
        source=f"α: {_TABLE}; up to three times that. {_RINGS}; the upper end is assumed",
    ),
    "100gbit": Link(
        rate=1e11,
        latency=(1e-6, 10e-6, 50e-6),
        slower=(1.0, _FRAMES, 2.0),
        source=f"α: {_TABLE}. {_RINGS}; the upper end is assumed: one TCP stream seldom fills such a link",
    ),
    "wan": Link(
        rate=4.3e8,
        latency=(24e-3, 39e-3, 100e-3),
        slower=(0.5, _FRAMES, 4.0),
        source="α: half of the round trips of 48 to 200 ms, usually 78, in IBM Cloud's page on latency between sites "
        "(cloud.ibm.com/docs/cephaas?topic=cephaas-network_latency_main); β: 4 MiB, the most that Linux sends unasked, "
        "in such a round trip; its range is assumed",
    ),
}
"""Usual links by name: in a machine room, and between sites."""
_SURE = 1.25
"""By what factor half of a round trip that somebody measured may miss the time of a message."""


def link(
    name: LinkName | str, rtt: float | None = None, local: Mapping[str, float] | None = None
) -> Network:
    """Return an assumed network of usual links, whose predictions have the doubt of not being measured.

    Parameters
    ----------
    name : str
        A name of :data:`LINKS`, or a rate such as ``2.5gbit``, which takes the range of the nearest of them.
    rtt : float, optional
        Seconds of a round trip, as ``ping`` shows them; a message takes half of it.
    local : mapping of str to float, optional
        Seconds per element by name of the local work, as in :meth:`gradstats.network.Network.of_link`.

    Returns
    -------
    Network
        Network whose latencies and bandwidths are drawn from their range where a plan draws networks.

    Raises
    ------
    InputError
        If the name is neither, or the round trip is no positive number.
    """
    known = LINKS.get(name.lower())
    try:
        rate = known.rate if known else float(parse_rate(name))
    except InputError:
        raise InputError(
            f"a link is one of {', '.join(LINKS)} or a rate like 2.5gbit, not {name!r}"
        ) from None
    # a bare rate is taken for a cable, not for a link between sites
    wired = [each for key, each in LINKS.items() if key != "wan"]
    usual = known or min(wired, key=lambda each: abs(math.log(each.rate / rate)))
    low, alpha, high = usual.latency
    if rtt is not None:
        alpha = check_number(rtt, "rtt", 0, math.inf, hint=", seconds") / 2
        low, high = alpha / _SURE, alpha * _SURE
    fast, slower, slow = usual.slower
    # 8: a rate is in bits, β in seconds per byte
    network = Network.of_link(alpha, 8 * slower / rate, local)
    about = {
        "link": name,
        "rate": rate,
        "source": usual.source,
        "range": {"latency": [low, high], "slower": [fast, slow]},
        # standard deviations of ln α and ln β of laws that have 95 % in these ranges
        "doubt": [math.log(high / low) / 2 / Z95, math.log(slow / fast) / 2 / Z95],
    }
    return Network(network.lines, network.algorithms, {**network.about, **about})
