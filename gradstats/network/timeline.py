"""Layer-wise pipelining: the time of a step whose messages leave during the backward pass (LAGS-SGD, figure 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.compressors import CompressorName
from gradstats.compressors.base import Activity
from gradstats.compressors.cost import Work, coding, ragged_bytes, selection_words
from gradstats.compressors.hiding import (
    Costs,
    Delivery,
    Timeline,
    Way,
    by_layer,
    hiding_ratios,
    preferred,
    reference,
    simulate,
    ways,
)
from gradstats.compressors.layerwise import MERGE, sends_dense
from gradstats.network.model import Network
from gradstats.primitives.ratio import target_count

__all__ = [
    "LayerTime",
    "Message",
    "Part",
    "Timeline",
    "deliveries",
    "lags_way",
    "layer_ratios",
    "layer_times",
    "local_interval",
    "parts",
    "simulate",
]

_INTERVALS = 12
"""Intervals of local steps after which delayed exchanges are taken to be in a steady state; as many are averaged."""
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


@dataclass(frozen=True, slots=True)
class Part:
    """What a message of a step holds, and the work that it takes among so many workers, whatever the network.

    Attributes
    ----------
    layers : tuple of str
        Names of its layers.
    numel, sent : int
        Elements of its layers, and those that are sent.
    backward : float
        Seconds of backward pass before it.
    world : int
        Number of workers.
    gathered, reduced : tuple of int
        Bytes of its all-gathers, and of its all-reduces.
    select, local : tuple of Work
        Selection, and packing, coding and averaging.
    """

    layers: tuple[str, ...]
    numel: int
    sent: int
    backward: float
    world: int
    gathered: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    select: tuple[Work, ...] = ()
    local: tuple[Work, ...] = ()

    def on(self, network: Network) -> Message:
        """Return the message with its seconds on a network.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        works = [Work(_gather(network), length) for length in self.gathered]
        works += [Work("all_reduce", length) for length in self.reduced]
        select = network.seconds(self.select, self.world) if self.select else 0.0
        exchanged = network.seconds(works, self.world)
        alongside = network.seconds(self.local, self.world)
        if network.crowded and self.local:
            # The exchange's thread runs on a core that would compute: only the transfer of bytes goes on beside it.
            # the cost of an empty message is paid on a core, not on the wire
            empty = (network.line(w.operation, self.world).at(0) for w in works)
            handling = min(exchanged, sum(empty))
            select, exchanged, alongside = select + alongside + handling, exchanged - handling, 0.0
        return Message(
            layers=self.layers,
            numel=self.numel,
            sent=self.sent,
            backward=self.backward,
            select=select,
            communicate=exchanged + alongside,
            bytes_sent=sum(self.gathered) + sum(self.reduced),
        )


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
        # 0 sends every layer by itself
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
    selection: CompressorName | str = "topk",
    merge: int = MERGE,
    codec: Codec = PLAIN,
    dense_bytes: int = 4,
    single: Collection[str] = (),
) -> list[Message]:
    """Predict the messages of a layer-wise step, see :class:`gradstats.compressors.Layerwise`.

    Layers whose values alone take fewer bytes than their selection are all-reduced, as there.

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
    codec : Codec
        What positions and values of selections are on the wire.
    dense_bytes : int
        Bytes of a value where `ratio` is None: 4, or 2 for bfloat16, to which two passes over the gradient convert.
    single : collection of str
        Names of the layers that send one value for all that they select.

    Returns
    -------
    list of Message
        One for each message. `communicate` includes packing and unpacking, which run in the exchange's thread. On a
        :attr:`crowded <gradstats.network.Network.crowded>` host that thread takes a core from the others. There
        packing, unpacking and the fixed cost of a message are in `select`, and `communicate` is the time of the bytes.
    """
    some = parts(
        layers,
        world,
        ratio,
        selection=selection,
        merge=merge,
        codec=codec,
        dense_bytes=dense_bytes,
        single=single,
    )
    return [part.on(network) for part in some]


def parts(
    layers: Sequence[LayerTime],
    world: int,
    ratio: float | Mapping[str, float] | None,
    *,
    selection: CompressorName | str = "topk",
    merge: int = MERGE,
    codec: Codec = PLAIN,
    dense_bytes: int = 4,
    single: Collection[str] = (),
) -> list[Part]:
    """Return the messages of a layer-wise step without their seconds; parameters are those of :func:`deliveries`.

    Parameters
    ----------
    layers : sequence of LayerTime
        Layers in the order of the backward pass.
    world : int
        Number of workers.
    ratio : float or mapping of str to float, optional
        Kept fraction.
    selection : str
        Selector.
    merge : int
        Elements of gradient in a message.
    codec : Codec
        What is on the wire.
    dense_bytes : int
        Bytes of a value where `ratio` is None.
    single : collection of str
        Layers that send one value.
    """
    numel = sum(layer.numel for layer in layers)
    result = []
    for message in _merged(layers, merge):
        elements = sum(layer.numel for layer in message)
        gathered: list[int] = []
        reduced: list[int] = []
        select: list[Work] = []
        local: list[Work] = []
        if ratio is None:
            counts, reduced = [elements], [dense_bytes * elements]
            if dense_bytes < 4:
                # with bfloat16 the hook converts before and after
                local = [Work("average", elements, 2)]
        else:
            ratios = [ratio[each.name] if isinstance(ratio, Mapping) else ratio for each in message]
            counts = [target_count(r, each.numel) for r, each in zip(ratios, message, strict=True)]
            asked = [
                (k, 1 if each.name in single else k, each.numel)
                for k, each in zip(counts, message, strict=True)
            ]
            picked = [each for each in asked if not sends_dense(*each, numel, codec)]
            sparse = [k for k, _, _ in picked]
            dense = elements - sum(span for _, _, span in picked)
            counts = [*sparse, dense]
            words = sum(
                selection_words(k, values, numel, codec, span) for k, values, span in picked
            )
            values = sum(each for _, each, _ in picked)
            room = selection_words(sum(sparse), values, numel, codec, elements)
            # the second of two steps: the first finds the room that its messages are padded to
            gathered = [*ragged_bytes([[words]] * 2, room)[-1]]
            local = [
                Work("pack", sum(sparse)),
                *coding(codec, "encode", sum(sparse)),
                Work("unpack", sum(sparse), world),
                *(w._replace(times=world) for w in coding(codec, "decode", sum(sparse))),
            ]
            if dense:
                # values without positions go in one all-reduce beside the selections
                reduced = [4 * dense]
                local.append(Work("average", dense))
            # layers that are sent whole need no selection
            select = [Work(f"select:{selection}", n) for *_, n in picked]
        result.append(
            Part(
                layers=tuple(layer.name for layer in message),
                numel=elements,
                sent=sum(counts),
                backward=sum(layer.backward for layer in message),
                world=world,
                gathered=tuple(gathered),
                reduced=tuple(reduced),
                select=tuple(select),
                local=tuple(local),
            )
        )
    return result


def layer_ratios(
    network: Network,
    layers: Sequence[LayerTime],
    world: int,
    smallest: float = 0.001,
    *,
    selection: CompressorName | str = "topk",
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
    costs = _costs(network, world, sum(layer.numel for layer in layers), smallest)
    ratios = hiding_ratios(
        [m.numel for m in messages],
        # a message hides behind the next one's backward pass, and the last behind nothing
        [*(m.backward for m in messages[1:]), 0.0],
        [m.select for m in messages],
        costs.latency,
        costs.per_element,
        smallest,
    )
    return by_layer(messages, ratios)


def _costs(network: Network, world: int, numel: int, ratio: float, codec: Codec = PLAIN) -> Costs:
    """Return what LAGS measures in a run: the lines of an exchange among the workers."""
    gather, pack, unpack = (network.line(o, world) for o in (_gather(network), "pack", "unpack"))
    reduce, average = (network.line(o, world) for o in ("all_reduce", "average"))
    k = target_count(ratio, numel)
    # bytes of one element sent, with its share of the coded positions
    width = 4 * (codec.index_words(k, numel) + codec.value_words(k)) / k
    return Costs(
        gather.fixed + pack.fixed + world * unpack.fixed,
        _ROOM * width * gather.slope + pack.slope + world * unpack.slope,
        reduce.fixed + average.fixed,
        4 * reduce.slope + average.slope,
    )


def _sent_as(
    way: Way, layers: Sequence[LayerTime], messages: Sequence[Delivery]
) -> tuple[list[LayerTime], dict[str, float]]:
    """Return layers, or one that holds them all, and their ratios as a way to send takes them."""
    if way.whole:
        one = LayerTime(
            "", sum(layer.numel for layer in layers), sum(layer.backward for layer in layers)
        )
        return [one], {"": way.ratios[0]}
    return list(layers), by_layer(messages, way.ratios)


def lags_way(
    network: Network,
    layers: Sequence[LayerTime],
    world: int,
    smallest: float = 0.001,
    forward: float = 0.0,
    *,
    selection: CompressorName | str = "lags",
    merge: int = MERGE,
    codec: Codec = PLAIN,
) -> tuple[list[LayerTime], dict[str, float]]:
    """Return how LAGS sends a step's gradient, predicted by the rules that it follows in a run.

    Parameters
    ----------
    network : Network
        Cost model.
    layers : sequence of LayerTime
        Layers in the order of the backward pass.
    world : int
        Number of workers.
    smallest : float
        Smallest fraction to keep, 1/c_u in the paper.
    forward : float
        Seconds of the step outside of backward pass and exchange.
    selection : str
        One of :data:`gradstats.compressors.COMPRESSORS`.
    merge : int
        Elements of gradient that are gathered before a message is sent.
    codec : Codec
        What positions and values of selections are on the wire.

    Returns
    -------
    layers : list of LayerTime
        The same layers; or one without a name that holds them all, if one message of the whole gradient is faster.
    ratios : dict of str to float
        Ratio by name of the layer; 1 where all values are sent.
    """
    options: dict[str, Any] = {"selection": selection, "merge": merge, "codec": codec}
    messages = deliveries(network, layers, world, smallest, **options)
    costs = _costs(network, world, sum(layer.numel for layer in layers), smallest, codec)
    known = ways(messages, costs, smallest)
    candidates = [_sent_as(way, layers, messages) for way in known]
    seconds = [
        simulate(deliveries(network, sent, world, ratios, **options), forward).seconds
        for sent, ratios in candidates
    ]
    # a single prediction of each way, where a run has several measured rounds
    return candidates[preferred(known, [[s] for s in seconds], reference(known, seconds))]


def local_interval(
    compute: float, exchange: float, steps: int, fragments: int = 1, delay: int = 0
) -> float:
    """Return the seconds from one exchange to the next with local steps, as :class:`gradstats.hooks.LocalSteps` runs.

    Without a delay all wait for every exchange. With one, exchanges take place in one background thread, in order,
    which does not slow the steps down; the steps wait where a result is due and not there.

    Parameters
    ----------
    compute : float
        Seconds of a local step.
    exchange : float
        Seconds of a fragment's exchange.
    steps : int
        Local steps H of an interval.
    fragments : int
        Number of fragments, each exchanged once in an interval, at equal distances.
    delay : int
        Local steps from the beginning of an exchange to the step that needs its result, less than `steps`.

    Returns
    -------
    float
        Seconds of an interval in a steady state: `steps` · `compute` and the waiting.
    """
    if not delay:
        return steps * compute + fragments * exchange
    # at equal distances, the last at the interval's end
    offsets = [(i + 1) * steps // fragments for i in range(fragments)]
    # what happens after a step, in LocalSteps' order: by fragment, and what came in before what goes out
    events = sorted(
        (begun + late, fragment, late == 0)
        for fragment, offset in enumerate(offsets)
        # the first half reaches the steady state, the second is averaged
        for begun in (n * steps + offset for n in range(2 * _INTERVALS))
        for late in (0, delay)
    )
    now, at, free, halfway = 0.0, 0, 0.0, 0.0
    arrives = [0.0] * fragments
    for step, fragment, sent in events:
        now, at = now + (step - at) * compute, step
        if not sent:
            now = max(now, arrives[fragment])
            continue
        # begins when the one background thread is free, and not before the step that sends it
        free = arrives[fragment] = max(now, free) + exchange
        if fragment == fragments - 1:
            if step == _INTERVALS * steps:
                halfway = now
            if step == 2 * _INTERVALS * steps:
                break
    return (now - halfway) / _INTERVALS
