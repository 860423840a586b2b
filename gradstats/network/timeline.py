"""Layer-wise pipelining: what a step takes if messages leave while backpropagation goes on (LAGS-SGD, figure 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradstats.collectives.packed import index_dtype
from gradstats.compressors.lags import Delivery, hiding_ratios, pipelining_bound
from gradstats.compressors.layerwise import Activity, Lane
from gradstats.network.exchange import ragged_bytes, selection_words
from gradstats.network.model import Network, Work
from gradstats.primitives.ratio import target_count

__all__ = [
    "LayerTime",
    "Message",
    "Timeline",
    "deliveries",
    "layer_ratios",
    "layer_times",
    "simulate",
]

_MERGE = 1 << 16
_ROOM = 1.25
"""Of a message whose length varies: the quarter that a ragged all-gather leaves."""


class LayerTime(NamedTuple):
    """A layer as the backward pass delivers it.

    Attributes
    ----------
    name : of the parameter.
    numel : its elements.
    backward : seconds of backward pass before its gradient is ready, since that of the layer before.
    """

    name: str
    numel: int
    backward: float


@dataclass(frozen=True, slots=True)
class Message(Delivery):
    """A predicted message of a step.

    Attributes
    ----------
    bytes_sent : by a rank, header and padding included.
    """

    bytes_sent: int = 0


def layer_times(timeline: Iterable[Activity]) -> list[LayerTime]:
    """Return the layers of a measured step, :attr:`gradstats.compressors.Layerwise.timeline`, in its order.

    The backward pass before the first delivery is not in it: the timeline begins there. Parameters that DDP delivers in
    one bucket are one layer.
    """
    backward = (a for a in timeline if a.lane == "backward")
    return [LayerTime(a.layer, a.numel, a.end - a.start) for a in backward]


def _merged(layers: Sequence[LayerTime], merge: int) -> list[list[LayerTime]]:
    messages: list[list[LayerTime]] = [[]]
    for layer in layers:
        messages[-1].append(layer)
        if sum(each.numel for each in messages[-1]) >= max(1, merge):
            messages.append([])
    return [message for message in messages if message]


def _gather(network: Network) -> str:
    """Return the collective that is to be had beside the backward pass."""
    return "busy_all_gather" if network.crowded else "all_gather"


def deliveries(
    network: Network,
    layers: Sequence[LayerTime],
    world: int,
    ratio: float | Mapping[str, float] | None = 0.001,
    *,
    selection: str = "topk",
    merge: int = _MERGE,
) -> list[Message]:
    """Predict the messages of a layer-wise step, see :class:`gradstats.compressors.Layerwise`.

    Parameters
    ----------
    network : what they cost.
    layers : in the order of backpropagation.
    world : workers.
    ratio : k/d of every layer, or by its name; None all-reduces densely and selects nothing.
    selection : one of :data:`gradstats.compressors.SELECTORS`.
    merge : elements of gradient to gather before a message is sent; 0 for one message a layer.

    Returns
    -------
    One for each message. Its `communicate` has packing and unpacking, which go on in the exchange's thread; on a
    :attr:`crowded <gradstats.network.Network.crowded>` host that thread takes a core from the others: they, and what a
    message of no length takes beside computing, are in `select`, and only the bytes under way are left.
    """
    numel = sum(layer.numel for layer in layers)
    found = []
    for message in _merged(layers, merge):
        elements = sum(layer.numel for layer in message)
        if ratio is None:
            counts, lengths = [elements], [4 * elements]
            select, works, local = 0.0, [Work("all_reduce", 4 * elements)], []
        else:
            kept = [ratio[each.name] if isinstance(ratio, Mapping) else ratio for each in message]
            counts = [target_count(r, each.numel) for r, each in zip(kept, message, strict=True)]
            words = sum(selection_words(k, k, numel) for k in counts)
            room = selection_words(sum(counts), sum(counts), numel)
            lengths = ragged_bytes([[words]] * 2, room)[-1]
            works = [Work(_gather(network), length) for length in lengths]
            local = [Work("pack", sum(counts)), Work("unpack", sum(counts), world)]
            select = network.seconds(
                (Work(f"select:{selection}", each.numel) for each in message), world
            )
        exchanged, alongside = network.seconds(works, world), network.seconds(local, world)
        if network.crowded and local:
            # what its threads do, they do on cores that would compute: only bytes under way cost nobody anything
            handling = min(exchanged, sum(network.line(w.operation, world).at(0) for w in works))
            select, exchanged, alongside = select + alongside + handling, exchanged - handling, 0.0
        found.append(
            Message(
                layers=tuple(layer.name for layer in message),
                numel=elements,
                sent=sum(counts),
                backward=sum(layer.backward for layer in message),
                select=select,
                communicate=exchanged + alongside,
                bytes_sent=sum(lengths),
            )
        )
    return found


def layer_ratios(
    network: Network,
    layers: Sequence[LayerTime],
    world: int,
    smallest: float = 0.001,
    *,
    selection: str = "topk",
    merge: int = _MERGE,
) -> dict[str, float]:
    """Return the largest k/d of every layer that hides behind the backward pass, predicted (LAGS-SGD, eq. 19).

    Parameters
    ----------
    network, layers, world, selection, merge : see :func:`deliveries`.
    smallest : 1/c_u, what is kept where nothing can be hidden.
    """
    messages = deliveries(network, layers, world, smallest, selection=selection, merge=merge)
    width = index_dtype(sum(layer.numel for layer in layers)).itemsize + 4
    gather, pack, unpack = (network.line(o, world) for o in (_gather(network), "pack", "unpack"))
    ratios = hiding_ratios(
        [m.numel for m in messages],
        [*(m.backward for m in messages[1:]), 0.0],
        [m.select for m in messages],
        gather.fixed + pack.fixed + world * unpack.fixed,
        _ROOM * width * gather.slope + pack.slope + world * unpack.slope,
        smallest,
    )
    return {
        name: float(ratio)
        for message, ratio in zip(messages, ratios, strict=True)
        for name in message.layers
    }


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes
    ----------
    forward : seconds before the backward pass.
    activities : from the beginning of the backward pass on.
    """

    forward: float
    activities: tuple[Activity, ...]

    def lane(self, lane: Lane) -> float:
        """Return the seconds spent on one thing."""
        return sum(a.end - a.start for a in self.activities if a.lane == lane)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + max((a.end for a in self.activities), default=0.0)

    @property
    def hidden(self) -> float:
        """Seconds of communication behind the backward pass and selection."""
        computing = self.lane("backward") + self.lane("select")
        return self.forward + computing + self.lane("communicate") - self.seconds

    @property
    def bound(self) -> float:
        """What pipelining can speed up at most (LAGS-SGD, eq. 20), selection counted to the backward pass."""
        computing = self.lane("backward") + self.lane("select")
        return pipelining_bound(self.forward, computing, self.lane("communicate"))


def simulate(
    messages: Sequence[Delivery], forward: float = 0.0, *, overlap: bool = True
) -> Timeline:
    """Return when everything happens, in two threads as in :class:`gradstats.compressors.Layerwise`.

    One alternates between a message's backward pass and its selection; the other sends messages in their order, each
    when it is selected and the one before has arrived. Neither slows the other down: where they share cores or
    memory bandwidth, a step takes longer.

    Parameters
    ----------
    messages : predicted by :func:`deliveries`, or measured, :attr:`gradstats.compressors.LAGS.deliveries`.
    forward : seconds before the backward pass.
    overlap : False sends when the backward pass is over.
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
