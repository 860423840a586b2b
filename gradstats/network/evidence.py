"""What a source says to a plan: its layers, how many elements rules keep, and how much ranks' selections overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradstats.analysis.compression import compression
from gradstats.analysis.quality import quality
from gradstats.compressors import RULE, compressor_class
from gradstats.hooks.systems import SYSTEMS
from gradstats.network.question import Choice, Question
from gradstats.network.timeline import LayerTime
from gradstats.network.union import union_growth
from gradstats.primitives.ratio import target_count
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Kind, Layer
from gradstats.trace.sources import Source, TraceSource, matching

__all__ = ["Evidence", "evidence"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a source says.

    Attributes
    ----------
    layers : sequence of Layer
        Its layers, in the order of the model.
    times : sequence of LayerTime
        The same in the order of the backward pass, which is spread in proportion to their elements.
    qualities : mapping of (str, float) to float
        k̂/k by threshold rule and ratio.
    unions : mapping of float to callable
        For each ratio the union of the ranks' top-k selections, as a function of the number of workers.
    """

    layers: Sequence[Layer]
    times: Sequence[LayerTime]
    qualities: Mapping[Choice, float]
    unions: Mapping[float, Callable[[int], float]]

    def quality(self, name: str, ratio: float | None) -> float:
        """Return k̂/k of a compressor; NaN for one that chooses ratios itself.

        Parameters
        ----------
        name : str
            Name of the compressor.
        ratio : float or None
            Its ratio.
        """
        if ratio is not None and compressor_class(name).streams:
            return math.nan
        return self.qualities.get((name, ratio), 1.0)

    def basis(self, name: str, ratio: float | None) -> str:
        """Return where the number of elements that a compressor selects comes from.

        Parameters
        ----------
        name : str
            Name of the compressor.
        ratio : float or None
            Its ratio.
        """
        if (name, ratio) in self.qualities:
            return "trace"
        return "assumed" if name.removeprefix(RULE) in ESTIMATORS or name in SYSTEMS else "exact"

    @property
    def of_k(self) -> Evidence:
        """The same, if every rule kept k elements."""
        return replace(self, qualities={})

    @property
    def numel(self) -> int:
        """Number of elements of all layers."""
        return sum(layer.numel for layer in self.layers)

    def union(self, name: str, ratio: float | None, world: int) -> float:
        """Return how many positions all workers send together; NaN if unknown.

        Parameters
        ----------
        name : str
            Name of the compressor.
        ratio : float or None
            Its ratio.
        world : int
            Number of workers.
        """
        if ratio is None:
            return self.numel
        if compressor_class(name).one_union:
            return target_count(ratio, self.numel)
        return self.unions[ratio](world) if ratio in self.unions else math.nan


def evidence(
    source: Source,
    question: Question,
    captured: Sequence[int] | None = None,
    client: Any = None,
) -> Evidence:
    """Return what a source says of the compressors that a question asks for.

    Parameters
    ----------
    source : Source
        Source whose layers are sent.
    question : Question
        Question of a plan.
    captured : sequence of int, optional
        Captured steps that count; all if None.
    client : distributed.Client, optional
        Cluster that runs the threshold rules.
    """
    if captured is not None:
        # refuses those that there are not
        matching([source], steps=captured, kinds=[_kind(source)])
    # autograd comes to the last layer first
    times = [
        LayerTime(layer.name, layer.numel, question.backward * layer.numel / source.numel)
        for layer in reversed(source.layers)
    ]
    qualities = _qualities(source, question, captured, client)
    return Evidence(source.layers, times, qualities, _unions(source, question.ratios, captured))


def _kind(source: Source) -> Kind:
    """Return the kind of vector that a compressor sees: the corrected one, or what is exchanged without a memory."""
    kinds = {k for _, k, _ in source.entries()}
    preferences: tuple[Kind, ...] = ("corrected", "pseudogradient", "gradient")
    return next((kind for kind in preferences if kind in kinds), "local")


def _qualities(
    source: Source, question: Question, captured: Sequence[int] | None, client: Any
) -> dict[Choice, float]:
    """Return k̂/k by threshold rule and ratio: recorded by the run that made the trace, else replayed."""
    # Where all ranks share one selection, one rank's gradient does not say how many elements it has.
    names = [name for name in question.names if not compressor_class(name).one_union]
    if not source.entries():
        return {}
    qualities: dict[Choice, float] = {}
    # with local steps a system's name is that of the bare rule
    whole = SYSTEMS if 0 in question.local_steps else {}
    for prefix, systems in (("", whole), (RULE, {})):
        rules = {
            bare: name for name in names
            if name.startswith(prefix) and (bare := name.removeprefix(prefix)) in ESTIMATORS
        }  # fmt: skip
        options = {name: systems[name].rule for name in rules if name in systems}
        if rules:
            replayed = quality(
                source,
                question.ratios,
                [*rules],
                options=options,
                kinds=[_kind(source)],
                steps=captured,
                client=client,
            )
            qualities |= {(rules[r["estimator"]], r["ratio"]): r["mean"] for r in replayed}
    if isinstance(source, TraceSource):
        ran = str(source.trace.attrs.get("compressor"))
        bare = ran.removeprefix(RULE)
        ratio = source.trace.attrs.get("ratio")
        # metadata are whatever the user wrote
        ratio = float(ratio) if isinstance(ratio, int | float) else math.nan
        # without a system of that name the rule is the same thing under both of its names
        runs = [(ran, ratio)] if bare in whole else [(bare, ratio), (RULE + bare, ratio)]
        runs = [run for run in runs if run in qualities]
        # preferred to a replay, which only sees the captured steps
        # read only where it counts
        every = compression(source.trace) if runs else []
        recorded = [r["quality"] for r in every if captured is None or r["step"] in captured]
        # a step that the run refused has no target, and NaN
        if known := [q for q in recorded if math.isfinite(q)]:
            qualities |= dict.fromkeys(runs, float(np.mean(known)))
    # of gradients with NaN a replay knows nothing
    return {choice: q for choice, q in qualities.items() if math.isfinite(q)}


def _unions(
    source: Source, ratios: Sequence[float], captured: Sequence[int] | None
) -> dict[float, Callable[[int], float]]:
    """Return for each ratio the union of top-k selections by workers; empty if the source does not have several."""
    if not isinstance(source, TraceSource) or len(source.trace.ranks) < 2:
        return {}
    trace, kind = source.trace, _kind(source)
    common = set.intersection(*(set(trace.steps(rank)) for rank in trace.ranks))
    if captured is not None:
        common &= {*captured}
    # a union needs positions, which sketches do not have
    if not common or not all(trace.has_gradients(rank, kind) for rank in trace.ranks):
        return {}
    first, *others = trace.ranks
    values = trace.read(min(common), rank=first, kind=kind)
    # captured after averaging: of workers, who select each by itself, it says nothing
    if all(np.array_equal(values, trace.read(min(common), rank=r, kind=kind)) for r in others):
        return {}

    def mean(ratio: float) -> Callable[[int], float]:
        # measured once: the function is called for every number of workers
        growths = union_growth(trace, ratio, kind=kind, steps=sorted(common))
        return lambda world: float(np.mean([growth(world) for growth in growths]))

    return {ratio: mean(ratio) for ratio in ratios}
