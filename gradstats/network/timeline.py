"""Layer-wise pipelining: the time of a step whose messages leave during the backward pass (LAGS-SGD, figure 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradstats.collectives.packed import index_dtype
from gradstats.compressors.base import Activity, Lane
from gradstats.compressors.lags import Delivery, hiding_ratios, pipelining_bound
from gradstats.compressors.layerwise import MERGE
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

_ROOM = 1.25
"""Length of a message in a ragged all-gather, relative to what it holds: a quarter is left free for longer ones."""


class LayerTime(NamedTuple):
    """A layer, as the backward pass delivers it.

    Attributes
    ----------
    name : str
        Name of the parameter.
    numel : int
        Elements of the parameter.
    backward : float
        Seconds of backward pass between the previous layer's gradient and this one's.
    """

    name: str
    numel: int
    backward: float


@dataclass(frozen=True, slots=True)
class Message(Delivery):
    """A predicted message of a step.

    Attributes
    ----------
    bytes_sent : int
        Bytes that a rank sends, header and padding included.
    """

    bytes_sent: int = 0


def layer_times(timeline: Iterable[Activity]) -> list[LayerTime]:
    """Return the layers of a measured step in the order of its backward pass.

    The timeline begins with the first delivery, so the backward pass before it is missing. Parameters that DDP delivers
    in one bucket are one layer.

    Parameters
    ----------
    timeline : iterable of Activity
        Timeline of a step, :attr:`gradstats.compressors.Layerwise.timeline`.
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
    """Return the name of the all-gather that is priced during the backward pass."""
    return "busy_all_gather" if network.crowded else "all_gather"


def deliveries(
    network: Network,
    layers: Sequence[LayerTime],
    world: int,
    ratio: float | Mapping[str, float] | None = 0.001,
    *,
    selection: str = "topk",
    merge: int = MERGE,
) -> list[Message]:
    """Predict the messages of a layer-wise step, see :class:`gradstats.compressors.Layerwise`.

    Parameters
    ----------
    network : Network
        Cost model.
    layers : sequence of LayerTime
        Layers in the order of the backward pass.
    world : int
        Number of workers.
    ratio : float or mapping of str to float, optional
        Kept fraction k/d of every layer, or one for each layer's name. None means a dense all-reduce without selection.
    selection : str
        One of :data:`gradstats.compressors.SELECTORS`.
    merge : int
        Elements of gradient that are gathered before a message is sent; 0 sends one message for each layer.

    Returns
    -------
    list of Message
        One for each message. `communicate` includes packing and unpacking, which run in the exchange's thread. On a
        :attr:`crowded <gradstats.network.Network.crowded>` host that thread takes a core from the others. There
        packing, unpacking and the fixed cost of a message are in `select`, and `communicate` is the time of the bytes.
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
            # The exchange's thread runs on a core that would compute: only the transfer of bytes goes on beside it.
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
    merge: int = MERGE,
) -> dict[str, float]:
    """Return the largest k/d of every layer that hides behind the backward pass, predicted (LAGS-SGD, eq. 19).

    Parameters
    ----------
    network : Network
        Cost model.
    layers : sequence of LayerTime
        Layers in the order of the backward pass.
    world : int
        Number of workers.
    smallest : float
        Fraction kept where nothing can be hidden, 1/c_u in the paper.
    selection : str
        One of :data:`gradstats.compressors.SELECTORS`.
    merge : int
        Elements of gradient that are gathered before a message is sent; layers of one message share a ratio.

    Returns
    -------
    dict of str to float
        Ratio by name of the layer.
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
        Messages predicted by :func:`deliveries`, or measured: :attr:`gradstats.compressors.LAGS.deliveries`.
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
