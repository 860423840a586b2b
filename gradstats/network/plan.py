"""Which compressor a cluster should use, if any: the step time of each, predicted by :mod:`gradstats.network`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.compression import compression
from gradstats.analysis.quality import quality
from gradstats.compressors import COMPRESSORS
from gradstats.errors import InputError
from gradstats.network import (
    ALGORITHMS,
    Exchange,
    LayerTime,
    Message,
    Network,
    Timeline,
    Work,
    break_even,
    deliveries,
    exchange,
    layer_ratios,
    simulate,
    union_growth,
)
from gradstats.network.rates import format_rate
from gradstats.primitives.ratio import target_count
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Kind
from gradstats.trace.sources import Source, TraceSource, open_source

__all__ = ["advice", "plan"]

_BACKWARD = 2 / 3
"""Of a step's computing: two of three matrix products of a layer are of the backward pass."""
_BUCKET = 25 * 2**20 // 4
"""Elements of a bucket of DDP, which it all-reduces while the backward pass goes on."""
_NO_RATIO = ("none", "signsgd", "ef-signsgd", "ssdm", "cascading", "marsit")
_ONE_UNION = ("micro", "cltk", "randomk")
"""Of all ranks together they send k positions."""
_SLOWEST = 1e6


def _short(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.7g}"


@dataclass(frozen=True, slots=True)
class _System:
    """A compressor among some workers, with the layers in the order of backpropagation."""

    name: str
    ratio: float | None
    world: int
    layers: Sequence[LayerTime]
    forward: float
    exchange: Exchange

    def ratios(self, network: Network) -> dict[str, float]:
        """Return the ratio of every layer, of the system that chooses them by the network."""
        if self.name != "lags" or self.ratio is None:
            return {}
        return layer_ratios(network, self.layers, self.world, self.ratio, selection="lags")

    def messages(self, network: Network, ratios: Mapping[str, float]) -> list[Message]:
        if self.name == "none":
            return deliveries(network, self.layers, self.world, None, merge=_BUCKET)
        memory = self._memory(network)
        if self.name == "lags":
            found = deliveries(network, self.layers, self.world, ratios, selection="lags")
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
        """Return the seconds of the hook's own passes: adding what was not sent, copying the average back."""
        if self.name == "none":
            return 0.0
        return network.seconds([Work("memory", self.exchange.numel)], self.world)

    def timeline(self, network: Network, ratios: Mapping[str, float]) -> Timeline:
        return simulate(self.messages(network, ratios), self.forward)

    def seconds(self, network: Network) -> float:
        return self.timeline(network, self.ratios(network)).seconds

    def predicted(self, networks: Sequence[Network], dense: NDArray[np.float64]) -> dict[str, Any]:
        """Return the fields of a record, from a network and others as it may be, and dense seconds on all of them."""
        ratios = self.ratios(networks[0])
        seconds = np.array([self.timeline(n, ratios).seconds for n in networks])
        low, high = _between(seconds)
        speedup_low, speedup_high = _between(dense / seconds)
        split, messages = self._split(networks[0], ratios), self.messages(networks[0], ratios)
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
            "layers": ratios,
        }

    def _split(self, network: Network, ratios: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of everything a step does, and how much of its exchange is hidden."""

        def exchanging(n: Network) -> float:
            return sum(m.communicate for m in self.messages(n, ratios))

        pack, fixed = exchanging(_unlinked(network)), exchanging(network.slowed(0))
        timeline = self.timeline(network, ratios)
        return {
            "compute": self.forward + timeline.lane("backward"),
            "memory": self._memory(network),
            "select": timeline.lane("select") - self._memory(network),
            "pack": pack,
            "latency": max(0.0, fixed - pack),
            "transfer": max(0.0, timeline.lane("communicate") - fixed),
            "hidden": max(0.0, timeline.hidden),
        }


def _unlinked(network: Network) -> Network:
    """Return the network with collectives that take no time, so that local work is left."""
    lines = (
        replace(line, fixed=0.0, slope=0.0) if line.operation in ALGORITHMS else line
        for line in network.lines
    )
    return replace(network, lines=tuple(lines))


def _limit(split: Mapping[str, float]) -> str:
    """Return what takes most of a step, of the exchange what is not hidden."""
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


def _break_even(network: Network, dense: _System, system: _System) -> float:
    """Return the break-even bandwidth in Mbit/s; NaN of dense, and where only fast links gain."""
    if system is dense:
        return math.nan

    def gain(n: Network) -> float:
        return dense.seconds(n) - system.seconds(n)

    found = break_even(network, gain)
    if math.isinf(found) and gain(network.slowed(_SLOWEST)) < 0:
        return math.nan
    return found / 1e6


def _kind(source: Source) -> Kind:
    """Return what a compressor sees: with error feedback the corrected gradient."""
    return "corrected" if any(k == "corrected" for _, k, _ in source.entries()) else "gradient"


def _measured_quality(
    source: Source, names: Iterable[str], ratios: Sequence[float]
) -> dict[tuple[str, float | None], float]:
    """Return k̂/k by rule and ratio: what the run recorded of its own, else replayed over the gradients."""
    rules = [name for name in names if name in ESTIMATORS and name != "micro"]
    if not rules or not source.entries():
        return {}
    replayed = quality(source, ratios, rules, kinds=[_kind(source)])
    found: dict[tuple[str, float | None], float] = {
        (r["estimator"], r["ratio"]): r["mean"] for r in replayed
    }
    if isinstance(source, TraceSource):
        run: Any = (source.trace.attrs.get("compressor"), source.trace.attrs.get("ratio"))
        recorded = [r["quality"] for r in compression(source.trace)] if run in found else []
        if recorded:
            found[run] = float(np.mean(recorded))
    return found


def _unions(source: Source, ratios: Sequence[float]) -> dict[float, Callable[[int], float]]:
    """Return ratio to union of top-k selections by workers; empty where the source does not have several ranks."""
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
) -> list[dict[str, Any]]:
    """Predict the step time of every compressor, dense averaging included.

    Parameters
    ----------
    source : whose layers to send: a trace or its path, a gradient file, an array, or named arrays. Its gradients
        say how many elements threshold rules keep, and several captured ranks how selections overlap.
    network : measured, or assumed.
    compute : seconds of a step's forward and backward pass.
    workers : numbers of them.
    ratios : kept fractions k/d.
    compressors : names of :data:`gradstats.compressors.COMPRESSORS`; if none, all that the network was measured with.
    rates : bandwidths of the links in bit/s, latencies left as they are; what was measured if none.
    draws : of networks, for intervals.

    Returns
    -------
    list of dict
        By workers and rate, fastest first: compressor; workers; rate, Mbit/s; ratio, None where there is none; seconds,
        of a step, with low and high, its 95 % interval; speedup over dense, with speedup_low and speedup_high;
        break_even, the bandwidth in Mbit/s below which it is faster than dense (infinity: whatever the bandwidth, 0:
        never, NaN: only on faster links, or dense itself); limit, the part that takes most of the step; the parts in
        seconds: compute, memory (error feedback, and copying the average back), select, pack (and unpack), latency and
        transfer of the collectives, and hidden, what of the last three goes on during the backward pass; bytes a rank
        sends; selected, elements; quality, k̂/k, and basis, where that comes from (``"trace"``, ``"assumed"``, or
        ``"exact"`` of a system that sends k whatever
        comes); union, positions all workers send together, NaN where unknown; layers, the ratio of each where a
        system chooses them, whose quality is NaN; recommended.

    Notes
    -----
    Two thirds of `compute` are taken for the backward pass, spread over the layers by their elements. It matters where
    something goes on meanwhile: DDP's dense all-reduce of buckets of 25 MB, and LAGS.

    Raises
    ------
    InputError
        For options out of range, an unknown compressor, or one the network was not measured with.
    """
    opened = open_source(source)
    for ratio in ratios:
        target_count(ratio, 1)  # raises on a bad ratio
    if not workers or min(workers) < 1:
        raise InputError("a plan needs at least 1 worker")
    if not 0 < compute < math.inf:
        raise InputError(f"compute must be seconds above 0, not {compute}")
    if not network.link()[1].value > 0:
        raise InputError("the network's all-reduce costs nothing per byte; measure larger sizes")
    measured = {line.operation for line in network.lines}
    names = compressors or [
        name
        for name in COMPRESSORS
        if f"select:{name}" in measured or (network.about.get("assumed") and name != "none")
    ]
    chosen = [
        (name, ratio)
        for name in dict.fromkeys(["none", *names])
        for ratio in ([None] if name in _NO_RATIO else dict.fromkeys(ratios))
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
        one = exchange(name, opened.numel, ratio or 1.0, world, selected=selected)
        return _System(name, ratio, world, layers, compute - backward, one)

    records = []
    for world in dict.fromkeys(workers):
        systems = [system(name, ratio, world) for name, ratio in chosen]
        breaks = [_break_even(network, systems[0], each) for each in systems]
        for rate in dict.fromkeys(rates) or [network.rate]:
            # drawn as measured, and only then another link
            networks = [n.slowed(network.rate / rate) for n in (network, *drawn)]
            dense = np.array([systems[0].seconds(n) for n in networks])
            found: list[dict[str, Any]] = [
                {"compressor": each.name, "workers": world, "rate": rate / 1e6, "ratio": each.ratio}
                | each.predicted(networks, dense)
                | {
                    "break_even": bandwidth,
                    "quality": math.nan
                    if each.name == "lags"
                    else qualities.get((each.name, each.ratio), 1.0),
                    "basis": _basis(each, qualities),
                    "union": _union(each, unions),
                }
                for each, bandwidth in zip(systems, breaks, strict=True)
            ]
            found.sort(key=lambda record: record["seconds"])
            records += [r | {"recommended": r is found[0]} for r in found]
    return records


def _between(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of a prediction, the first value, that is the others' if there are any."""
    low, high = np.quantile(values[1:] if values.size > 1 else values, (0.025, 0.975))
    return float(low), float(high)


def _basis(system: _System, qualities: Mapping[tuple[str, float | None], float]) -> str:
    if (system.name, system.ratio) in qualities:
        return "trace"
    return "assumed" if system.name in ESTIMATORS else "exact"


def _union(system: _System, unions: Mapping[float, Callable[[int], float]]) -> float:
    if system.ratio is None:
        return system.exchange.numel
    if system.name in _ONE_UNION:
        return target_count(system.ratio, system.exchange.numel)
    return unions[system.ratio](system.world) if system.ratio in unions else math.nan


def advice(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence or two: what to use among the workers and at the rate of a plan, and why.

    Parameters
    ----------
    records : of :func:`plan`, of one number of workers and one rate.
    """
    best, *others = records
    dense = next(r for r in records if r["compressor"] == "none")
    where = f"{best['workers']} workers at {format_rate(best['rate'])}: "
    if best is dense:
        text = f"{where}don't compress. Dense takes {_duration(dense)}"
        if not others:
            return f"{text}."
        return (
            f"{text}; {_label(others[0])}, the fastest alternative, {_duration(others[0])}, "
            f"limited by {others[0]['limit']}. {_worth(others[0])}"
        )
    text = (
        f"{where}{_label(best)}. It takes {_duration(best)} instead of dense {_duration(dense)}, "
        f"{best['speedup']:.3g} times as fast ({best['speedup_low']:.3g} to "
        f"{best['speedup_high']:.3g}), limited by {best['limit']}. {_worth(best)}"
    )
    if best["basis"] == "trace":
        text += f" It keeps {best['quality']:.3g} of the k asked for."
    if best["speedup_low"] <= 1:
        text += " The interval includes 1: dense may be as fast."
    return text


def _label(record: Mapping[str, Any]) -> str:
    ratio = record["ratio"]
    return f"{record['compressor']}" + (f" at ratio {ratio:g}" if ratio else "")


def _duration(record: Mapping[str, Any]) -> str:
    return f"{_short(1e3 * record['seconds'])} ms"


def _worth(record: Mapping[str, Any]) -> str:
    bandwidth = record["break_even"]
    if math.isnan(bandwidth):
        return "It pays on fast links only."
    if math.isinf(bandwidth):
        return "It pays whatever the bandwidth."
    return f"It pays below {format_rate(bandwidth)}." if bandwidth else "It pays at no bandwidth."
