"""The step time of each compressor on a cluster, predicted by the cost model of :mod:`gradstats.network`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.compression import compression
from gradstats.analysis.quality import quality
from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.compressors import COMPRESSORS, RULE, codecs, compressor_class
from gradstats.errors import InputError
from gradstats.network.exchange import SLOWEST, Exchange, break_even, exchange
from gradstats.network.model import ALGORITHMS, Network, Work, middle_95
from gradstats.network.timeline import (
    LayerTime,
    Message,
    Timeline,
    deliveries,
    lags_way,
    simulate,
)
from gradstats.network.union import union_growth
from gradstats.primitives.ratio import check_ratio, shown, target_count
from gradstats.tables import Records
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource, open_source

__all__ = ["BASELINES", "plan"]

_BACKWARD = 2 / 3
"""Share of the backward pass in a step's computing: two of a layer's three matrix products belong to it."""
_BUCKET = 25 * 2**20 // 4
"""Elements of a DDP bucket, which DDP all-reduces while the backward pass goes on."""
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

    @property
    def streams(self) -> bool:
        """Whether it sends layer by layer, at ratios that it chooses by the network."""
        return self.name not in _DENSE and compressor_class(self.name).streams

    def way(self, network: Network) -> _Way:
        """Return how it sends; only a compressor that streams has a choice."""
        if not self.streams or self.ratio is None:
            return self.layers, {}
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
                network, layers, self.world, ratios, selection=self.name, codec=self.codec
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
        """Return the seconds of the hook's own passes: adding the residual, and copying the average back."""
        if self.name in _DENSE:
            return 0.0
        return network.seconds([Work("memory", self.exchange.numel)], self.world)

    def timeline(self, network: Network, way: _Way) -> Timeline:
        return simulate(self.messages(network, way), self.forward)

    def seconds(self, network: Network) -> float:
        return self.timeline(network, self.way(network)).seconds

    def predicted(self, networks: Sequence[Network], dense: NDArray[np.float64]) -> dict[str, Any]:
        """Return the fields of a record.

        The first network is the fitted one, and the others are drawn from it; `dense` has the seconds of a dense step
        on each.
        """
        way = self.way(networks[0])
        seconds = np.array([self.timeline(n, way).seconds for n in networks])
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
            if way[1]
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


def _unlinked(network: Network) -> Network:
    """Return the network with collectives that take no time, so that only local work costs something."""
    lines = (
        replace(line, fixed=0.0, slope=0.0) if line.operation in ALGORITHMS else line
        for line in network.lines
    )
    return replace(network, lines=tuple(lines))


def _limit(split: Mapping[str, float]) -> str:
    """Return the part that takes most of a step; of the exchange only what is not hidden counts."""
    exchanged = split["pack"] + split["latency"] + split["transfer"]
    exposed = 1 - split["hidden"] / exchanged if exchanged else 0.0
    kept = {
        "compute": 1.0,
        "memory": 1.0,
        "select": 1.0,
        "pack": exposed,
        "latency": exposed,
        "transfer": exposed,
    }
    return max(kept, key=lambda part: kept[part] * split[part])


def _break_even(network: Network, other: _System, system: _System) -> float:
    """Return the bandwidth in Mbit/s below which a system is faster than another; NaN if on fast links only."""

    def gain(n: Network) -> float:
        seconds = system.seconds(n)
        # where both come to the same, nothing is gained
        return other.seconds(n) - seconds - _NOTHING * seconds

    found = break_even(network, gain)
    if math.isinf(found) and gain(network.slowed(SLOWEST)) < 0:
        return math.nan
    return found / 1e6


def _kind(source: Source) -> Kind:
    """Return the kind of vector that a compressor sees: the corrected one, or what is exchanged without a memory."""
    kinds = {k for _, k, _ in source.entries()}
    seen: tuple[Kind, ...] = ("corrected", "pseudogradient", "gradient")
    return next((kind for kind in seen if kind in kinds), "gradient")


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
    network: Network,
    compute: float,
    workers: Sequence[int],
    ratios: Sequence[float] = (0.001,),
    compressors: Sequence[str] = (),
    *,
    rates: Sequence[float] = (),
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
    network : Network
        Cost model, measured or assumed.
    compute : float
        Seconds of a step's forward and backward pass.
    workers : sequence of int
        Numbers of workers.
    ratios : sequence of float
        Kept fractions k/d, each in (0, 1].
    compressors : sequence of str
        Names of :data:`gradstats.compressors.COMPRESSORS`. If empty, all that the network was measured with.
    rates : sequence of float
        Bandwidths of the links in bit/s; latencies stay as they are. If empty, the bandwidth that was measured.
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
        One record for each number of workers, rate, compressor and ratio; the fastest of each number and rate first.

        - compressor, workers, and ratio, which is None for a compressor without one.
        - rate, the bandwidth in Mbit/s.
        - seconds of a step, and its 95 % interval low and high.
        - speedup over the baseline, and its 95 % interval speedup_low and speedup_high.
        - break_even, the bandwidth in Mbit/s below which it is faster than the baseline. Infinity means at any
          bandwidth, 0 means never, and NaN means only on faster links, or the baseline itself.
        - baseline, the name of that exchange; indices and values, what they are on the wire.
        - codec_break_even, the bandwidth in Mbit/s below which the codec gains more time than it takes; NaN without
          one.
        - limit, the part that takes most of the step.
        - The parts in seconds: compute, memory (error feedback, and copying the average back), select, pack (with
          unpacking), latency and transfer of the collectives; and hidden, how much of the last three goes on during
          the backward pass.
        - bytes, sent by a rank, and selected, the number of elements.
        - quality, k̂/k, and basis, where it comes from: ``"trace"``, ``"assumed"``, or ``"exact"`` for a compressor that
          always sends k. Quality is NaN for a compressor that chooses ratios itself.
        - union, the number of positions that all workers send together; NaN if unknown.
        - layers, the ratio of each layer if the compressor chooses them, else empty. They are equal where it sends the
          gradient as a whole.
        - recommended, whether it is the fastest.

    Raises
    ------
    InputError
        If an option is out of range, a compressor is unknown, or the network was not measured with it.

    Notes
    -----
    Two thirds of `compute` are taken as the backward pass, spread over the layers in proportion to their elements. This
    matters for what goes on meanwhile: DDP's dense all-reduce of buckets of 25 MB, and LAGS.
    """
    opened = open_source(source)
    for ratio in ratios:
        check_ratio(ratio)
    if not workers or min(workers) < 1:
        raise InputError("a plan needs at least 1 worker")
    if not 0 < compute < math.inf:
        raise InputError(f"compute must be seconds above 0, not {compute}")
    if not network.link()[1].value > 0:
        raise InputError("the network's all-reduce costs nothing per byte; measure larger sizes")
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
    drawn = [network.drawn(generator) for _ in range(draws if uncertain else 0)]

    def system(name: str, ratio: float | None, world: int) -> _System:
        kept = qualities.get((name, ratio))
        k = target_count(ratio, opened.numel) if ratio else opened.numel
        selected = None if kept is None else min(opened.numel, round(kept * k))
        own = PLAIN if name in _DENSE else codec.only(codecs(name))
        one = exchange(
            "none" if name in _DENSE else name,
            opened.numel,
            ratio or 1.0,
            world,
            selected=selected,
            codec=own,
        )
        return _System(name, ratio, world, layers, compute - backward, one, own)

    def plain(coded: _System) -> _System:
        one = exchange(
            coded.name,
            opened.numel,
            coded.ratio or 1.0,
            coded.world,
            selected=round(coded.exchange.selected),
        )
        return replace(coded, exchange=one, codec=PLAIN)

    records = Records()
    for world in dict.fromkeys(workers):
        systems = [system(name, ratio, world) for name, ratio in chosen]
        breaks = [
            math.nan if each is systems[0] else _break_even(network, systems[0], each)
            for each in systems
        ]
        coding_pays = [
            math.nan if each.codec == PLAIN else _break_even(network, plain(each), each)
            for each in systems
        ]
        for rate in dict.fromkeys(rates) or [network.rate]:
            # Networks are drawn as measured; only then the links get another rate.
            networks = [n.slowed(network.rate / rate) for n in (network, *drawn)]
            dense = np.array([systems[0].seconds(n) for n in networks])
            found: list[dict[str, Any]] = [
                {"compressor": each.name, "workers": world, "rate": rate / 1e6, "ratio": each.ratio}
                | each.predicted(networks, dense)
                | {
                    "break_even": bandwidth,
                    "baseline": systems[0].name,
                    "indices": each.codec.indices,
                    "values": each.codec.values,
                    "codec_break_even": below,
                    "quality": math.nan
                    if each.streams
                    else qualities.get((each.name, each.ratio), 1.0),
                    "basis": _basis(each, qualities),
                    "union": _union(each, unions),
                }
                for each, bandwidth, below in zip(systems, breaks, coding_pays, strict=True)
            ]
            found.sort(key=lambda record: record["seconds"])
            records += [r | {"recommended": r is found[0]} for r in found]
    return records


def _drawn_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of a prediction: its first value is the prediction, the others are drawn."""
    return middle_95(values[1:] if values.size > 1 else values)


def _basis(system: _System, qualities: Mapping[tuple[str, float | None], float]) -> str:
    """Return where the number of selected elements comes from."""
    if (system.name, system.ratio) in qualities:
        return "trace"
    return "assumed" if system.name in ESTIMATORS else "exact"


def _union(system: _System, unions: Mapping[float, Callable[[int], float]]) -> float:
    """Return how many positions all workers send together; NaN if unknown."""
    if system.ratio is None:
        return system.exchange.numel
    if compressor_class(system.name).one_union:
        return target_count(system.ratio, system.exchange.numel)
    return unions[system.ratio](system.world) if system.ratio in unions else math.nan
