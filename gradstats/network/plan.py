"""The step time of each compressor on a cluster, predicted by the cost model of :mod:`gradstats.network`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.compression import compression
from gradstats.analysis.quality import quality
from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.compressors import COMPRESSORS, RULE, codecs, compressor_class
from gradstats.compressors.base import Activity
from gradstats.compressors.redsync import DENSE_BELOW, SEARCH_ABOVE
from gradstats.errors import InputError
from gradstats.hooks.local_steps import check_room
from gradstats.hooks.systems import SYSTEMS, output_from
from gradstats.network.exchange import FLAG, SLOWEST, Exchange, break_even, exchange
from gradstats.network.model import ALGORITHMS, Network, Work, middle_95
from gradstats.network.timeline import (
    LayerTime,
    Message,
    Timeline,
    deliveries,
    lags_way,
    local_interval,
    simulate,
)
from gradstats.network.union import union_growth
from gradstats.primitives.ratio import (
    check_count,
    check_number,
    check_ratios,
    check_several,
    shown,
    target_count,
)
from gradstats.tables import Plan, Records
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Kind, Layer
from gradstats.trace.sources import Source, TraceSource, open_source

__all__ = ["BASELINES", "HELD", "TARGETS", "plan"]

HELD = (44, 48)
"""Measured steps that were within their 95 % interval, and how many there are, in docs/network.md."""
_ERROR = 0.14
"""Standard deviation of what a training does that no fitted line knows, as a share of a step.

The root mean square of ln(measured ÷ predicted) in docs/network.md; 0.10 without `redsync-quantised`, which sends
several times k in the first steps.
"""
_ALIKE = 0.02
"""Share of a step that is no reason to prefer one compressor to a simpler one."""

_BACKWARD = 2 / 3
"""Share of the backward pass in a step's computing: two of a layer's three matrix products belong to it."""
_BUCKET = 25 * 2**20 // 4
"""Elements of a DDP bucket, which DDP all-reduces while the backward pass goes on."""
TARGETS = (50, 75, 90, 95, 99)
"""Shares of a step's time spent computing, in percent, for which a plan says what bandwidth they take."""
_OUTER_PASSES = 3
"""Passes of an exchange of pseudo-gradients, in those that the hook makes over a gradient.

One is the hook's own, the others take the difference of parameters and step the outer optimizer.
"""
_CORRECTION_PASSES = 13 / 5
"""Passes of momentum correction: 13 reads and writes of an element, where the hook's own, with a residual, make 5."""
_OWN_PASSES = 2
"""Those that the training itself makes: with a delay, too, it waits for them."""
_NOTHING = 1e-9
"""Share of a step that counts as no gain."""
_DENSE = {"none": 4, "torch-bf16": 2}
"""Exchanges of DDP itself, bucket by bucket, and their bytes for each element."""
BASELINES = {"none": "none", "bf16": "torch-bf16"}
"""Names of what compressors are compared with, and the exchange behind each."""


_Way: TypeAlias = tuple[Sequence[LayerTime], Mapping[str, float]]
"""Layers as they are sent, and the ratio of each; none for a compressor that does not choose them."""


@dataclass(frozen=True, slots=True)
class _System:
    """A compressor among some workers, with the layers in the order of the backward pass."""

    name: str
    ratio: float | None
    world: int
    layers: Sequence[LayerTime]
    forward: float
    exchange: Exchange
    codec: Codec = PLAIN
    sent: Mapping[str, float] = field(default_factory=dict)
    """Ratio by name of the layer, of a whole system."""
    single: Collection[str] = ()
    """Names of the layers that send one value for all they select."""
    steps: int = 0
    fragments: int = 1
    delay: int = 0

    @property
    def streams(self) -> bool:
        """Whether it sends layer by layer."""
        return self.name in SYSTEMS or self.chooses

    @property
    def chooses(self) -> bool:
        """Whether it chooses the layers' ratios by the network."""
        return self.name not in _DENSE and compressor_class(self.name).streams

    def way(self, network: Network) -> _Way:
        """Return how it sends; only a compressor that chooses has more than one way."""
        if not self.streams or self.ratio is None:
            return self.layers, {}
        if not self.chooses:
            return self.layers, self.sent
        return lags_way(
            network,
            self.layers,
            self.world,
            self.ratio,
            self.forward,
            selection=self.name,
            codec=self.codec,
        )

    def messages(self, network: Network, way: _Way) -> list[Message]:
        if self.name in _DENSE:
            size = _DENSE[self.name]
            return deliveries(
                network, self.layers, self.world, None, merge=_BUCKET, dense_bytes=size
            )
        memory = self._memory(network)
        if self.streams:
            layers, ratios = way
            found = deliveries(
                network,
                layers,
                self.world,
                ratios,
                selection=self.name,
                codec=self.codec,
                single=self.single,
            )
            share = memory / self.exchange.numel
            return [replace(m, select=m.select + share * m.numel) for m in found]
        split = self.exchange.split(network)
        return [
            Message(
                layers=tuple(layer.name for layer in self.layers),
                numel=self.exchange.numel,
                sent=self.exchange.selected,
                backward=sum(layer.backward for layer in self.layers),
                select=split.pop("select") + memory,
                communicate=sum(split.values()),
                bytes_sent=round(self.exchange.bytes_sent),
            )
        ]

    def _memory(self, network: Network) -> float:
        """Return the seconds of the hook's own passes: adding what a rank remembers, and copying the average back."""
        if self.name in _DENSE:
            return 0.0
        passes = _CORRECTION_PASSES if self.name in SYSTEMS else 1
        return network.seconds([Work("memory", self.exchange.numel, passes)], self.world)

    def timeline(self, network: Network, way: _Way, slower: float = 1.0) -> Timeline:
        """Return the step on a network, computing `slower` times as long as it is taken to."""
        messages = self.messages(network, way)
        if slower != 1:
            messages = [replace(m, backward=slower * m.backward) for m in messages]
        return simulate(messages, slower * self.forward)

    def seconds(self, network: Network) -> float:
        return self.timeline(network, self.way(network)).seconds

    @property
    def compute(self) -> float:
        return self.forward + sum(layer.backward for layer in self.layers)

    def utilisation(
        self, seconds: NDArray[np.float64], slower: Sequence[float]
    ) -> dict[str, float]:
        """Return the share of a step that is computing, and its interval; `seconds` are as in :meth:`predicted`."""
        share = np.minimum(np.array(slower) * self.compute / seconds, 1.0)
        low, high = _drawn_interval(share)
        return {"utilisation": float(share[0]), "utilisation_low": low, "utilisation_high": high}

    def bandwidths(self, network: Network) -> dict[str, float]:
        """Return the bandwidths in Mbit/s from which on a step computes for these shares of its time."""

        def needed(share: float) -> float:
            return break_even(network, lambda n: self.seconds(n) - self.compute / share) / 1e6

        return {f"bandwidth_{target}": needed(target / 100) for target in TARGETS}

    def drawn(
        self, networks: Sequence[Network], slower: Sequence[float], error: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the seconds of a step on every network, the fitted one first."""
        way = self.way(networks[0])
        pairs = zip(networks, slower, strict=True)
        seconds = np.array([self.timeline(n, way, s).seconds for n, s in pairs])
        return np.asarray(error * seconds)

    def predicted(
        self,
        networks: Sequence[Network],
        seconds: NDArray[np.float64],
        dense: NDArray[np.float64],
    ) -> dict[str, Any]:
        """Return the fields of a record.

        The first network is the fitted one, and the others are drawn from it; `seconds` has the step on each, and
        `dense` the dense one.
        """
        way = self.way(networks[0])
        low, high = _drawn_interval(seconds)
        speedup_low, speedup_high = _drawn_interval(dense / seconds)
        split, messages = self._split(networks[0], way), self.messages(networks[0], way)
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
            "layers": {layer.name: way[1].get(layer.name, way[1].get("")) for layer in self.layers}
            if self.chooses and way[1]
            else {},
        }

    def _split(self, network: Network, way: _Way) -> dict[str, float]:
        """Return the seconds of each part of a step, and how much of its exchange is hidden."""

        def exchanging(n: Network) -> float:
            return sum(m.communicate for m in self.messages(n, way))

        pack, fixed = exchanging(_unlinked(network)), exchanging(network.slowed(0))
        timeline = self.timeline(network, way)
        return {
            "compute": self.forward + timeline.lane("backward"),
            "memory": self._memory(network),
            "select": max(0.0, timeline.lane("select") - self._memory(network)),
            "pack": pack,
            "latency": max(0.0, fixed - pack),
            "transfer": max(0.0, timeline.lane("communicate") - fixed),
            "hidden": max(0.0, timeline.hidden),
        }


@dataclass(frozen=True, slots=True)
class _LocalSystem(_System):
    """A compressor of pseudo-gradients; all of a step's computing is `forward`, and `exchange` is a fragment's.

    The seconds of an exchange are spread over the local steps.
    """

    @property
    def streams(self) -> bool:
        """LocalSteps has the whole pseudo-gradient at once, so that nothing is sent layer by layer."""
        return False

    def messages(self, network: Network, way: _Way) -> list[Message]:
        split = self.exchange.split(network)
        select, memory = split.pop("select"), self._memory(network)
        message = Message(
            layers=tuple(layer.name for layer in self.layers),
            numel=self.exchange.numel,
            sent=self.exchange.selected,
            backward=0.0,
            select=select / self.steps + memory / self.fragments,
            communicate=sum(split.values()) / self.steps,
            bytes_sent=round(self.exchange.bytes_sent),
        )
        return [message] * self.fragments

    def _memory(self, network: Network) -> float:
        passes = [Work("memory", self.exchange.numel, self.fragments * _OUTER_PASSES)]
        return network.seconds(passes, self.world) / self.steps

    def timeline(self, network: Network, way: _Way, slower: float = 1.0) -> Timeline:
        one, compute = self.messages(network, way)[0], slower * self.forward
        own = self._memory(network) * _OWN_PASSES / _OUTER_PASSES if self.delay else 0.0
        exchanged = self.steps * (one.select + one.communicate - own / self.fragments)
        interval = local_interval(compute + own, exchanged, self.steps, self.fragments, self.delay)
        end = interval / self.steps - compute
        # what is hidden began before the end of computing
        begun = end - self.fragments * one.communicate
        selected = Activity("select", "", begun - self.fragments * one.select, begun, one.numel)
        return Timeline(compute, (selected, Activity("communicate", "", begun, end, one.numel)))


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


def _break_even(network: Network, other: _System, system: _System) -> tuple[float, str]:
    """Return the bandwidth in Mbit/s where a system begins to be faster than another, and on which side of it."""

    def gain(n: Network) -> float:
        seconds = system.seconds(n)
        # where both come to the same, nothing is gained
        return other.seconds(n) - seconds - _NOTHING * seconds

    found = break_even(network, gain)
    if math.isinf(found):
        if gain(network.slowed(SLOWEST)) >= 0:
            return found, "always"
        return break_even(network, lambda n: -gain(n)) / 1e6, "above"
    return found / 1e6, "below" if found else "never"


def _kind(source: Source) -> Kind:
    """Return the kind of vector that a compressor sees: the corrected one, or what is exchanged without a memory."""
    kinds = {k for _, k, _ in source.entries()}
    seen: tuple[Kind, ...] = ("corrected", "pseudogradient", "gradient")
    return next((kind for kind in seen if kind in kinds), "local")


def _measured_quality(
    source: Source, names: Iterable[str], ratios: Sequence[float]
) -> dict[tuple[str, float | None], float]:
    """Return k̂/k by threshold rule and ratio: recorded by the run that made the trace, else replayed."""
    # Where all ranks share one selection, one rank's gradient does not say how many elements it has.
    rules = [name for name in names if name in ESTIMATORS and not compressor_class(name).one_union]
    if not rules or not source.entries():
        return {}
    replayed = quality(source, ratios, rules, kinds=[_kind(source)])
    found: dict[tuple[str, float | None], float] = {
        (r["estimator"], r["ratio"]): r["mean"] for r in replayed
    }
    if isinstance(source, TraceSource):
        name = str(source.trace.attrs.get("compressor")).removeprefix(RULE)
        run: Any = (name, source.trace.attrs.get("ratio"))
        recorded = [r["quality"] for r in compression(source.trace)] if run in found else []
        if recorded:
            found[run] = float(np.mean(recorded))
    return found


def _unions(source: Source, ratios: Sequence[float]) -> dict[float, Callable[[int], float]]:
    """Return for each ratio the union of top-k selections by workers; empty if the source has not several ranks."""
    if not isinstance(source, TraceSource) or len(source.trace.ranks) < 2:
        return {}
    trace, kind = source.trace, _kind(source)
    common = set.intersection(*(set(trace.steps(rank)) for rank in trace.ranks))
    if not common or not all(trace.has_gradients(rank, kind) for rank in trace.ranks):
        return {}

    def mean(ratio: float) -> Callable[[int], float]:
        growths = union_growth(trace, ratio, kind=kind)
        return lambda world: float(np.mean([growth(world) for growth in growths]))

    return {ratio: mean(ratio) for ratio in ratios}


def plan(
    source: object,
    network: Network | str | Path,
    compute: float | Sequence[float],
    workers: Sequence[int],
    ratios: Sequence[float] = (0.001,),
    compressors: Sequence[str] = (),
    *,
    rates: Sequence[float | tuple[float, float]] = (),
    local_steps: Sequence[int] = (0,),
    fragments: int = 1,
    delay: int = 0,
    draws: int = 200,
    codec: Codec = PLAIN,
    baseline: str = "none",
) -> Records:
    """Predict the step time of every compressor, dense averaging included.

    Parameters
    ----------
    source : Source, Trace, str, Path, array_like or mapping of str to array_like
        Source whose layers are sent: a trace or its path, a gradient file, an array, or named arrays. Its gradients say
        how many elements threshold rules keep, and several captured ranks how much their selections overlap.
    network : Network, str or Path
        Cost model, measured or assumed, or the file that it was saved to.
    compute : float or sequence of float
        Seconds of a step's forward and backward pass. Give several measurements if there are: the median counts, and
        the intervals have their noise.
    workers : sequence of int
        Numbers of workers.
    ratios : sequence of float
        Kept fractions k/d, each in (0, 1].
    compressors : sequence of str
        Names of :data:`gradstats.compressors.COMPRESSORS`. If empty, all that the network was measured with.
    rates : sequence of float or (float, float)
        Bandwidths of the links in bit/s; latencies stay as they are. If empty, the bandwidth that was measured. A pair
        is what a worker sends and receives at: in every collective of :data:`gradstats.network.ALGORITHMS` each
        transfer is one worker's to another, and the slower direction decides.
    local_steps : sequence of int
        Numbers H of local steps from one exchange to the next, see :class:`gradstats.hooks.LocalSteps`; 0 for DDP,
        which averages in every step.
    fragments : int
        Parts of the model that are exchanged at different local steps.
    delay : int
        Local steps that an exchange takes in the background, fewer than the local steps.
    draws : int
        How many networks are drawn for the intervals.
    codec : Codec
        What positions and values are on the wire, of the compressors that send them. If `compressors` are named, all of
        them must be able to use it.
    baseline : {"none", "bf16"}
        What compressors are compared with: DDP's dense averaging, or that of bfloat16 values by its
        ``bf16_compress_hook``, which is then in the plan as ``torch-bf16``.

    Returns
    -------
    Records
        One record for each number of workers, rate, number of local steps, compressor and ratio; the fastest of these
        first. Without a 0 in `local_steps`, the baseline alone is in the plan with 0.

        - compressor, workers, and ratio, which is None for a compressor without one.
        - rate, the bandwidth in Mbit/s, of the slower direction; up and down, both.
        - local_steps; fragments and delay, 1 and 0 without local steps.
        - seconds of a step, and its 95 % interval low and high. With local steps it is the mean over an interval, as
          all seconds are.
        - utilisation, the share of it that is computing, and its 95 % interval utilisation_low and utilisation_high.
        - bandwidth_50, _75, _90, _95 and _99, the Mbit/s from which on utilisation is at least so many percent;
          infinite if no bandwidth is enough, 0 if any is. These fields are there where local steps are asked for.
        - speedup over the baseline, and its 95 % interval speedup_low and speedup_high.
        - break_even, the bandwidth in Mbit/s where it begins to be faster than the baseline, and pays, on which side:
          ``"below"``, ``"above"``, ``"always"`` (break_even is infinite), ``"never"`` (0), or empty for the baseline
          (NaN).
        - baseline, the name of that exchange; indices and values, what they are on the wire.
        - codec_break_even and codec_pays, the same of the codec, which may gain more time than it takes; NaN and empty
          without one.
        - limit, the part that takes most of the step.
        - The parts in seconds: compute, memory (error feedback, and copying the average back), select, pack (with
          unpacking), latency and transfer of the collectives; and hidden, how much of it goes on while the model
          computes: during the backward pass, or, with a delay, during later steps.
        - bytes, sent by a rank in a step, with local steps in an interval, and selected, the number of elements.
        - quality, k̂/k, and basis, where it comes from: ``"trace"``, ``"assumed"``, or ``"exact"`` for a compressor that
          always sends k. Quality is NaN for a compressor that chooses ratios itself.
        - union, the number of positions that all workers send together; NaN if unknown.
        - layers, the ratio of each layer if the compressor chooses them, else empty. They are equal where it sends the
          gradient as a whole.
        - seconds_at_k, the seconds if it sent at least k elements: a rule that keeps fewer is no faster for that.
        - recommended, which one to use at this number of workers, rate and local steps: the simplest of those that
          cannot be told from the fastest by seconds_at_k, dense before exact top-k before the others.
        - left_out, names of compressors that the plan does not consider, as they were not asked for or the network was
          measured without them.

    Raises
    ------
    InputError
        If an option is out of range, a compressor is unknown, or the network was not measured with it.

    Notes
    -----
    Two thirds of `compute` are taken as the backward pass, spread over the layers in proportion to their elements. This
    matters for what goes on meanwhile: DDP's dense all-reduce of buckets of 25 MB, LAGS, and the whole systems that
    :data:`gradstats.hooks.systems.SYSTEMS` builds, which send layer by layer, with a corrected momentum. With local
    steps ``dgc`` is the bare threshold rule and ``redsync`` one message, as they are there.

    With local steps a step computes for `compute` seconds, and the exchange follows after `local_steps` of them, all of
    it or fragment by fragment; with a delay it hides behind later steps. Taking the difference of parameters and the
    outer optimizer's step are priced as two more of the hook's own passes, which the training makes itself. A smaller
    share of time for the exchange does not mean that training converges as well.
    """
    opened, ratios = open_source(source), check_ratios(ratios)
    if not opened.numel:
        raise InputError(f"{opened.name} has no elements to send")
    if isinstance(network, str | Path):
        network = Network.load(network)
    elif not isinstance(network, Network):
        raise InputError(f"network must be a Network or its file, not {shown(network)}")
    workers = [check_count(n, "workers") for n in check_several(workers, "workers")]
    if not workers:
        raise InputError("a plan needs at least 1 worker")
    several = isinstance(compute, Sequence | np.ndarray) and not isinstance(compute, str)
    given: Any = check_several(compute, "compute") if several else [compute]  # type: ignore[arg-type]
    times = [check_number(each, "compute", 0, math.inf, hint=", seconds") for each in given]
    if not times:
        raise InputError("compute must be seconds of a step, not an empty list")
    compute = float(np.median(times))
    if not network.link()[1].value > 0:
        raise InputError("the network's all-reduce costs nothing per byte; measure larger sizes")
    up, down = (network.about.get(way) or network.rate for way in ("up", "down"))
    links = [_link(rate) for rate in check_several(rates, "rates") or [(up, down)]]
    local_steps = _check_local(local_steps, fragments, delay)
    if baseline not in BASELINES:
        raise InputError(f"baseline must be {' or '.join(BASELINES)}, not {shown(baseline)}")
    for name in compressors:
        check_codec(codec, name, ("indices", "values") if name == "none" else codecs(name))
    measured = {line.operation for line in network.lines}
    names = compressors or [
        name
        for name in COMPRESSORS
        if f"select:{name}" in measured or (network.about.get("assumed") and name != "none")
    ]
    chosen = [
        (name, ratio)
        for name in dict.fromkeys([BASELINES[baseline], "none", *names])
        for ratio in (
            dict.fromkeys(ratios)
            if name not in _DENSE and compressor_class(name).has_ratio
            else [None]
        )
    ]
    qualities = _measured_quality(opened, names, ratios)
    unions = _unions(opened, ratios)
    backward = _BACKWARD * compute
    layers = [
        LayerTime(layer.name, layer.numel, backward * layer.numel / opened.numel)
        for layer in reversed(opened.layers)
    ]
    generator = np.random.default_rng(0)
    uncertain = any(line.degrees for line in network.lines)
    drawn = [network.drawn(generator) for _ in range(draws if uncertain or len(times) > 1 else 0)]
    slower = _noise(times, len(drawn), generator)
    errors: dict[tuple[str, float | None, int], NDArray[np.float64]] = {
        (*each, steps): np.exp([0.0, *(_ERROR * generator.standard_normal(len(drawn)))])
        if uncertain
        else np.ones(len(drawn) + 1)
        for steps in dict.fromkeys((0, *local_steps))
        for each in chosen
    }
    left_out = ", ".join(n for n in COMPRESSORS if n not in names and n != "none")

    def layerwise(name: str, ratio: float | None, kept: float) -> tuple[dict[str, float], set[str]]:
        if name not in SYSTEMS or ratio is None:
            return {}, set()
        return _sent_by_system(name, opened.layers, ratio, kept)

    def system(name: str, ratio: float | None, world: int, steps: int) -> _System:
        parts = fragments if steps else 1
        numel = -(-opened.numel // parts)
        kept = qualities.get((name, ratio))
        k = target_count(ratio, numel) if ratio else numel
        selected = None if kept is None else min(numel, round(kept * k))
        own = PLAIN if name in _DENSE else codec.only(codecs(name))
        one = exchange(
            "none" if name in _DENSE else name,
            numel,
            ratio or 1.0,
            world,
            selected=selected,
            codec=own,
        )
        if not steps:
            sent, single = layerwise(name, ratio, 1.0 if kept is None else kept)
            return _System(name, ratio, world, layers, compute - backward, one, own, sent, single)
        if name in _DENSE:  # no bucket of DDP's: the ranks say that they can, then average
            one = replace(one, communicate=(FLAG, *one.communicate))
        there = [each._replace(backward=0.0) for each in layers]
        return _LocalSystem(
            name, ratio, world, there, compute, one, own, steps=steps, fragments=parts, delay=delay
        )

    def at_least_k(each: _System) -> _System:
        kept = qualities.get((each.name, each.ratio), 1.0)
        if kept >= 1:
            return each
        numel = each.exchange.numel
        one = exchange(each.name, numel, each.ratio or 1.0, each.world, codec=each.codec)
        return replace(each, exchange=one, sent=layerwise(each.name, each.ratio, 1.0)[0])

    asked = [
        (steps, [pair for pair in chosen if not steps or pair[0] != BASELINES["bf16"]])
        for steps in local_steps
    ]
    if 0 not in local_steps:
        asked.insert(0, (0, chosen[:1]))
    records = Plan()
    for world in dict.fromkeys(workers):
        dense = system(*chosen[0], world, 0)
        groups = []
        for steps, pairs in asked:
            systems = [system(name, ratio, world, steps) for name, ratio in pairs]
            prices = [_priced(network, dense, each) for each in systems]
            if any(local_steps):
                for each, price in zip(systems, prices, strict=True):
                    price |= each.bandwidths(network)
            groups.append((systems, prices))
        for rate in dict.fromkeys(links):
            # Networks are drawn as measured; only then the links get another rate.
            networks = [n.slowed(network.rate / min(rate)) for n in (network, *drawn)]
            dense_seconds = dense.drawn(networks, slower, errors[*chosen[0], 0])
            for systems, prices in groups:
                seconds = [
                    each.drawn(networks, slower, errors[each.name, each.ratio, each.steps])
                    for each in systems
                ]
                found: list[dict[str, Any]] = [
                    {
                        "compressor": each.name,
                        "workers": world,
                        "rate": min(rate) / 1e6,
                        "up": rate[0] / 1e6,
                        "down": rate[1] / 1e6,
                        "ratio": each.ratio,
                    }
                    | each.predicted(networks, drawn_seconds, dense_seconds)
                    | each.utilisation(drawn_seconds, slower)
                    | price
                    | {
                        "seconds_at_k": at_least_k(each).seconds(networks[0]),
                        "baseline": dense.name,
                        "indices": each.codec.indices,
                        "values": each.codec.values,
                        "quality": math.nan
                        if each.chooses
                        else qualities.get((each.name, each.ratio), 1.0),
                        "basis": _basis(each, qualities),
                        "union": _union(each, unions),
                    }
                    for each, drawn_seconds, price in zip(systems, seconds, prices, strict=True)
                ]
                best = _recommended(found, seconds)
                for i, record in enumerate(found):
                    record |= {"recommended": i == best, "left_out": left_out}
                records += sorted(found, key=lambda record: record["seconds"])
    return records


def _sent_by_system(
    name: str, layers: Sequence[Layer], ratio: float, kept: float
) -> tuple[dict[str, float], set[str]]:
    """Return each layer's ratio and which layers send one value, as :mod:`gradstats.hooks.systems` builds them.

    `kept` is k̂/k of the threshold rule. RedSync has that rule for large layers, and exact selections for others.
    """
    output = output_from([len(layer.shape) for layer in layers])
    matrices = output < len(layers)

    def of(layer: Layer) -> float:
        if name == "dgc":
            dense, searched = matrices and len(layer.shape) < 2, True
        else:
            dense, searched = layer.numel < DENSE_BELOW, layer.numel >= SEARCH_ABOVE
        most = ratio * kept if searched else ratio
        return 1.0 if dense else min(1.0, max(most, 1 / layer.numel))

    single = {layer.name for layer in layers[:output]} if name == "redsync-quantised" else set()
    return {layer.name: of(layer) for layer in layers}, single


def _link(rate: float | tuple[float, float]) -> tuple[float, float]:
    """Return the bit/s at which a worker sends and receives."""
    both = check_several(rate, "a pair of rates") if isinstance(rate, Sequence) else (rate, rate)
    if len(both) != 2:
        raise InputError(f"a link has a rate up and a rate down, not {len(both)} rates")
    up, down = (check_number(each, "a rate", 0, math.inf, hint=", bit/s") for each in both)
    return up, down


def _check_local(local_steps: Sequence[int], fragments: int, delay: int) -> list[int]:
    """Return numbers of local steps, in order, that leave room for the fragments and the delay."""
    asked = check_several(local_steps, "local_steps")
    found = sorted({check_count(each, "local_steps", 0) for each in asked}) or [0]
    for steps in found:
        check_room(steps, fragments, delay)
    if not any(found) and (fragments > 1 or delay):
        raise InputError("fragments and a delay are of local steps: give local steps, too")
    return found


def _priced(network: Network, dense: _System, system: _System) -> dict[str, Any]:
    """Return the fields of a record that do not depend on the rate of the links."""
    itself = system.steps == dense.steps and system.name == dense.name
    bandwidth, side = (math.nan, "") if itself else _break_even(network, dense, system)
    coded, coded_side = math.nan, ""
    if system.codec != PLAIN:
        one = exchange(
            system.name,
            system.exchange.numel,
            system.ratio or 1.0,
            system.world,
            selected=round(system.exchange.selected),
        )
        coded, coded_side = _break_even(network, replace(system, exchange=one, codec=PLAIN), system)
    return {
        "local_steps": system.steps,
        "fragments": system.fragments,
        "delay": system.delay,
        "break_even": bandwidth,
        "pays": side,
        "codec_break_even": coded,
        "codec_pays": coded_side,
    }


def _noise(times: Sequence[float], draws: int, generator: np.random.Generator) -> list[float]:
    """Return by what factor computing differs from the median of its measurements: not at all, then as drawn."""
    n = len(times)
    if n < 2:
        return [1.0] * (draws + 1)
    # the interval of one more measurement, of which the times are a sample
    spread = float(np.std(np.log(times), ddof=1)) * math.sqrt(1 + 1 / n)
    return [1.0, *np.exp(spread * generator.standard_t(n - 1, draws)).tolist()]


def _recommended(records: Sequence[Mapping[str, Any]], steps: Sequence[NDArray[np.float64]]) -> int:
    """Return which of some records to use: the simplest that cannot be told from the fastest at k elements."""
    scaled = [
        step * (r["seconds_at_k"] / r["seconds"]) for r, step in zip(records, steps, strict=True)
    ]
    fastest = min(range(len(records)), key=lambda i: records[i]["seconds_at_k"])

    def alike(i: int) -> bool:
        low, _ = _drawn_interval(scaled[i] / scaled[fastest])
        return low <= 1 + _ALIKE

    def plainness(i: int) -> tuple[int, float]:
        name = records[i]["compressor"]
        known = [records[0]["baseline"], "none", "topk"]
        return known.index(name) if name in known else len(known), records[i]["seconds_at_k"]

    return min(filter(alike, range(len(records))), key=plainness)


def _drawn_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of a prediction: its first value is the prediction, the others are drawn."""
    return middle_95(values[1:] if values.size > 1 else values)


def _basis(system: _System, qualities: Mapping[tuple[str, float | None], float]) -> str:
    """Return where the number of selected elements comes from."""
    if (system.name, system.ratio) in qualities:
        return "trace"
    searched = system.name in ESTIMATORS or system.name == "redsync-quantised"
    return "assumed" if searched else "exact"


def _union(system: _System, unions: Mapping[float, Callable[[int], float]]) -> float:
    """Return how many positions all workers send together; NaN if unknown."""
    numel = sum(layer.numel for layer in system.layers)
    if system.ratio is None:
        return numel
    if compressor_class(system.name).one_union:
        return target_count(system.ratio, numel)
    return unions[system.ratio](system.world) if system.ratio in unions else math.nan
