"""Compressors among some workers, each with the messages of its steps and the time that they take."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.compressors import ThresholdSelector, codecs, compressor_class
from gradstats.compressors.base import Activity
from gradstats.compressors.cost import FLAG, Exchange, Work
from gradstats.compressors.redsync import DENSE_BELOW
from gradstats.hooks import MomentumCorrection
from gradstats.hooks.systems import SYSTEMS, System
from gradstats.network.evidence import Evidence
from gradstats.network.exchange import exchange
from gradstats.network.model import Network
from gradstats.network.question import DDP_BYTES, Question
from gradstats.network.timeline import (
    LayerTime,
    Message,
    Part,
    Timeline,
    lags_way,
    local_interval,
    parts,
    simulate,
)
from gradstats.primitives.ratio import target_count
from gradstats.trace import Layer

__all__ = ["DDP", "Hiding", "Layerwise", "Local", "OneMessage", "Sender", "sender"]

_BUCKET = 25 * 2**20 // 4
"""Elements of a DDP bucket, which DDP all-reduces while the backward pass goes on."""
_OUTER_PASSES = 3
"""Passes of an exchange of pseudo-gradients, in those that the hook makes over a gradient.

One is the hook's own, the others take the difference of parameters and step the outer optimizer.
"""
_OWN_PASSES = 2
"""Those that the training itself makes: with a delay, too, it waits for them."""
_CORRECTION_PASSES = 13 / 5
"""Passes of momentum correction: 13 reads and writes of an element, where the hook's own, with a residual, make 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender(ABC):
    """A compressor among some workers.

    Attributes
    ----------
    name : str
        Name of the compressor.
    ratio : float or None
        Its ratio.
    world : int
        Number of workers.
    layers : sequence of LayerTime
        Layers in the order of the backward pass.
    forward : float
        Seconds of a step's computing outside of the backward pass.
    codec : Codec
        What positions and values are on the wire.
    chosen : mapping of str to float
        Ratio by name of the layer, if the compressor chose it by the network.
    """

    name: str
    ratio: float | None
    world: int
    layers: Sequence[LayerTime]
    forward: float
    codec: Codec = PLAIN
    chosen: Mapping[str, float] = field(default_factory=dict)

    @abstractmethod
    def messages(self, network: Network) -> list[Message]:
        """Return the messages of a step.

        Parameters
        ----------
        network : Network
            Cost model.
        """

    @property
    def steps(self) -> int:
        """Local steps from one exchange to the next; 0 for an exchange in every step, by DDP."""
        return 0

    @property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return sum(layer.numel for layer in self.layers)

    @property
    def compute(self) -> float:
        """Time of a step's computing, in seconds."""
        return self.forward + sum(layer.backward for layer in self.layers)

    def settled(self, network: Network) -> Sender:
        """Return it as it sends on this network, on which only a compressor that chooses its ratios depends.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        return self

    def selections(self) -> set[str]:
        """Return the operations of its selection, which a network has to know to price it."""
        return {f"select:{self.name}"}

    def plain(self) -> Sender:
        """Return it without its codec."""
        return replace(self, codec=PLAIN)

    def memory(self, network: Network) -> float:
        """Return the seconds of the hook's own passes: adding what a rank remembers, and copying the average back.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        return network.seconds([Work("memory", self.numel)], self.world)

    def timeline(self, network: Network, slower: float = 1.0) -> Timeline:
        """Return the step on a network, computing `slower` times as long as it is taken to.

        Parameters
        ----------
        network : Network
            Cost model.
        slower : float
            Factor on the seconds of computing.
        """
        messages = self.messages(network)
        if slower != 1:
            messages = [replace(m, backward=slower * m.backward) for m in messages]
        return simulate(messages, slower * self.forward)

    def seconds(self, network: Network) -> float:
        """Return the seconds of a step.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        return self.settled(network).timeline(network).seconds


@dataclass(frozen=True, kw_only=True)
class DDP(Sender):
    """DDP's own average, bucket by bucket, without a hook that remembers."""

    @cached_property
    def parts(self) -> list[Part]:
        """The buckets."""
        return parts(self.layers, self.world, None, merge=_BUCKET, dense_bytes=DDP_BYTES[self.name])

    def messages(self, network: Network) -> list[Message]:
        """Return the buckets."""
        return [part.on(network) for part in self.parts]

    def selections(self) -> set[str]:
        """Return none."""
        return set()

    def memory(self, network: Network) -> float:
        """Return 0."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMessage(Sender):
    """A compressor of the whole gradient, which sends it after the backward pass."""

    exchange: Exchange

    def selections(self) -> set[str]:
        """Return those of its exchange."""
        return {work.operation for work in self.exchange.select}

    def plain(self) -> Sender:
        """Return it without its codec, with as many elements selected."""
        e = self.exchange
        selected = round(e.selected)
        # a codec changes how elements are encoded, not which are sent
        one = exchange(self.name, e.numel, self.ratio or 1.0, self.world, selected=selected)
        return replace(self, exchange=one, codec=PLAIN)

    def messages(self, network: Network) -> list[Message]:
        """Return the message."""
        split = self.exchange.split(network)
        return [
            Message(
                layers=tuple(layer.name for layer in self.layers),
                numel=self.exchange.numel,
                sent=self.exchange.selected,
                backward=sum(layer.backward for layer in self.layers),
                # both go before the exchange, in the thread that computes
                select=split.pop("select") + self.memory(network),
                communicate=sum(split.values()),
                bytes_sent=round(self.exchange.bytes_sent),
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Layerwise(Sender):
    """A compressor that sends layer by layer, during the backward pass.

    Attributes
    ----------
    ratios : mapping of str to float
        Ratio by name of the layer; 1 where all values are sent.
    single : collection of str
        Names of the layers that send one value for all they select.
    passes : float
        Passes that its memory makes over the gradient, in those of a residual.
    """

    ratios: Mapping[str, float]
    single: Collection[str] = ()
    passes: float = 1

    @cached_property
    def parts(self) -> list[Part]:
        """The messages of merged layers; an interval prices them on hundreds of networks."""
        return parts(
            self.layers,
            self.world,
            self.ratios,
            selection=self.name,
            codec=self.codec,
            single=self.single,
        )

    def messages(self, network: Network) -> list[Message]:
        """Return the messages of merged layers."""
        messages = [part.on(network) for part in self.parts]
        # each message has its share of the passes, by its number of elements
        share = self.memory(network) / self.numel
        return [replace(m, select=m.select + share * m.numel) for m in messages]

    def memory(self, network: Network) -> float:
        """Return the seconds of the memory's passes."""
        return network.seconds([Work("memory", self.numel, self.passes)], self.world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding(Sender):
    """A compressor that sends layer by layer at ratios that it chooses by the network."""

    ratio: float

    def settled(self, network: Network) -> Sender:
        """Return the layers and ratios that it chooses on this network."""
        layers, ratios = lags_way(
            network,
            self.layers,
            self.world,
            self.ratio,
            self.forward,
            selection=self.name,
            codec=self.codec,
        )
        return Layerwise(
            name=self.name,
            ratio=self.ratio,
            world=self.world,
            layers=layers,
            forward=self.forward,
            codec=self.codec,
            # "" is the whole gradient as one message, see lags_way
            chosen={
                layer.name: ratios[layer.name if layer.name in ratios else ""]
                for layer in self.layers
            },
            ratios=ratios,
        )

    def messages(self, network: Network) -> list[Message]:
        """Return the messages at the ratios that it chooses on this network."""
        return self.settled(network).messages(network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(OneMessage):
    """A compressor of pseudo-gradients; all of a step's computing is `forward`, and `exchange` is a fragment's.

    The seconds of an exchange are spread over the local steps. LocalSteps has the whole pseudo-gradient at once, and
    nothing is sent layer by layer.

    Attributes
    ----------
    every : int
        Local steps from one exchange to the next.
    fragments : int
        Parts of the model that are exchanged at different local steps.
    delay : int
        Local steps that an exchange takes in the background.
    """

    every: int
    fragments: int
    delay: int

    @property
    def steps(self) -> int:
        """Local steps from one exchange to the next."""
        return self.every

    def messages(self, network: Network) -> list[Message]:
        """Return the messages of an interval."""
        split = self.exchange.split(network)
        select, memory = split.pop("select"), self.memory(network)
        message = Message(
            layers=tuple(layer.name for layer in self.layers),
            numel=self.exchange.numel,
            sent=self.exchange.selected,
            backward=0.0,
            # means over the local steps; memory() is one already, for all fragments together
            select=select / self.steps + memory / self.fragments,
            communicate=sum(split.values()) / self.steps,
            bytes_sent=round(self.exchange.bytes_sent),
        )
        return [message] * self.fragments

    def memory(self, network: Network) -> float:
        """Return the seconds of the passes of an exchange, as the mean over the local steps."""
        passes = [Work("memory", self.exchange.numel, self.fragments * _OUTER_PASSES)]
        return network.seconds(passes, self.world) / self.steps

    def timeline(self, network: Network, slower: float = 1.0) -> Timeline:
        """Return the mean of the local steps of an interval."""
        one, compute = self.messages(network)[0], slower * self.forward
        # with a delay these passes stay in the thread that trains, as if a step took longer
        thread_seconds = self.memory(network) * _OWN_PASSES / _OUTER_PASSES if self.delay else 0.0
        # of one fragment, without what the training thread does itself
        exchanged = self.steps * (one.select + one.communicate - thread_seconds / self.fragments)
        interval = local_interval(
            compute + thread_seconds, exchanged, self.steps, self.fragments, self.delay
        )
        end = interval / self.steps - compute
        # what is hidden began before the end of computing
        begun = end - self.fragments * one.communicate
        selected = Activity("select", "", begun - self.fragments * one.select, begun, one.numel)
        return Timeline(compute, (selected, Activity("communicate", "", begun, end, one.numel)))


def sender(
    question: Question,
    known: Evidence,
    name: str,
    ratio: float | None,
    world: int,
    steps: int = 0,
) -> Sender:
    """Return what sends the gradient of a source.

    Parameters
    ----------
    question : Question
        Question of a plan.
    known : Evidence
        What the source says.
    name : str
        Name of the compressor, or of an exchange of DDP.
    ratio : float or None
        Its ratio.
    world : int
        Number of workers.
    steps : int
        Local steps from one exchange to the next; 0 for an exchange in every step, by DDP.
    """
    ddp = name in DDP_BYTES
    quality = known.qualities.get((name, ratio))
    codec = PLAIN if ddp else question.codec.only(codecs(name))
    slowest = question.slowest(world)
    # one measured time says nothing about waiting: none is assumed
    slowest = 1.0 if math.isnan(slowest) else slowest  # whom all wait for
    common: dict[str, Any] = {
        "name": name,
        "ratio": ratio,
        "world": world,
        # the slowest worker's backward pass, since all wait for it
        "layers": [each._replace(backward=slowest * each.backward) for each in known.times],
        "forward": slowest * (question.compute - question.backward),
        "codec": codec,
    }

    def one(numel: int) -> Exchange:
        k = target_count(ratio, numel) if ratio else numel
        # a rule may keep more than k, but not more than there is
        selected = None if quality is None else min(numel, round(quality * k))
        sent_as = "none" if ddp else name
        return exchange(sent_as, numel, ratio or 1.0, world, selected=selected, codec=codec)

    if steps:
        # the exchange follows a whole step: nothing hides behind the backward pass
        common["layers"] = [each._replace(backward=0.0) for each in known.times]
        common["forward"] = slowest * question.compute
        # rounded up: the largest fragment
        fragment = one(-(-known.numel // question.fragments))
        if ddp:  # no bucket of DDP's: the ranks say that they can, then average
            fragment = replace(fragment, communicate=(FLAG, *fragment.communicate))
        return Local(
            **common,
            exchange=fragment,
            every=steps,
            fragments=question.fragments,
            delay=question.delay,
        )
    if ddp:
        return DDP(**common)
    if ratio is not None and name in SYSTEMS:
        system = SYSTEMS[name]
        ratios, single = _treatment(
            name, system, known.layers, ratio, 1.0 if quality is None else quality
        )
        corrects = issubclass(system.memory, MomentumCorrection)
        passes = _CORRECTION_PASSES if corrects else 1
        return Layerwise(**common, ratios=ratios, single=single, passes=passes)
    if ratio is not None and compressor_class(name).streams:
        return Hiding(**common)
    return OneMessage(**common, exchange=one(known.numel))


def _treatment(
    name: str, system: System, layers: Sequence[Layer], ratio: float, quality: float
) -> tuple[dict[str, float], set[str]]:
    """Return each layer's ratio and which layers send one value, by the selectors that the system has for them.

    `quality` is k̂/k of the threshold rule of the system's name; other selections are exact.
    """
    dimensions = {layer.name: len(layer.shape) for layer in layers}
    # a source of vectors alone does not say what they were
    known = dimensions if max(dimensions.values()) > 1 else {}
    choose = system.choose(known, ratio)
    ratios = {}
    for layer in layers:
        selector = choose(layer.name, layer.numel)
        searched = isinstance(selector, ThresholdSelector) and selector.estimator.name == name
        most = ratio * quality if searched else ratio
        # a selector sends at least one element of every layer
        ratios[layer.name] = 1.0 if selector.whole else min(1.0, max(most, 1 / layer.numel))
    # asked as of a large layer: a small one of RedSync's counts as quantised, too
    large = {layer.name: max(layer.numel, DENSE_BELOW) for layer in layers}
    return ratios, {name for name, numel in large.items() if choose(name, numel).single_value}
