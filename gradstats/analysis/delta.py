"""What changed between checkpoints, where, and what sending it costs; ``gradstats delta``."""

# Size: a quarter of its lines are docstrings; what is compared, predicted and added up are numbers of one record.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.pieces import Submit, evaluate
from gradstats.analysis.verdicts import what_changed
from gradstats.console import no_progress
from gradstats.errors import InputError, TraceError, unknown
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.ratio import check_number
from gradstats.primitives.sketch import sketch
from gradstats.statistics.fitting import Fit
from gradstats.statistics.several import fit_all
from gradstats.tables import Records
from gradstats.trace import Kind, Layer
from gradstats.trace.files import some
from gradstats.trace.source import Source
from gradstats.trace.sources import TraceSource, chosen, open_source, open_sources

if TYPE_CHECKING:
    from gradstats.primitives.deltas import WeightType

__all__ = ["LAWS", "Delta", "delta"]

LAWS = ("laplace", "dgamma", "norm", "lognorm")
"""Laws of the update, of which the closest by Kolmogorov's distance predicts what changes."""
_NODES = 64
"""Points of the integral over a law."""
_LEAST = 1e-9
"""Probability of larger updates that the integral leaves out."""

Vector = NDArray[np.float32]


class Delta(Records):
    """Records of :func:`delta`.

    Attributes
    ----------
    names : list of str
        The checkpoints, in order.
    remarks : list of str
        What was left out, and why, in sentences.
    """

    names: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """The result in one sentence: of neighbours, over all weights."""
        return what_changed(next(r for r in self if r["layer"] == "all"))


def delta(
    a: object,
    *others: object,
    dtype: WeightType | None = None,
    rate: float | None = None,
    master: bool = True,
    steps: Sequence[int] | None = None,
    rank: int | None = None,
    layers: Sequence[str] | None = None,
    per_layer: bool = False,
    client: Any = None,
    on_progress: Callable[[], None] = no_progress,
) -> Delta:
    """Compare checkpoints: which weights changed, what sending the changes costs, and what an update's law predicts.

    Parameters
    ----------
    a : str, Path, Trace, mapping of str to array_like, or Source
        A checkpoint: ``.safetensors`` (an index of shards, too), ``.pt``, ``.npz``, a folder of DCP, or arrays by name.
        A trace of kind ``weight``, or a folder of checkpoints with numbers in their names, holds several.
    *others : object
        More of them, in the order of training.
    dtype : {"fp32", "bf16", "fp16"}, optional
        Type that is compared and sent, such as ``"bf16"`` of what is copied to inference; by default the shorter one if
        all weights are numbers of it, else fp32.
    rate : float, optional
        Mean magnitude of an update's elements, with AdamW about the learning rate: predict from a Laplace distribution
        of this scale, of neighbours only. By default the law is fitted to the difference, which weights in 16 bits do
        not tell.
    master : bool, optional
        Whether the optimizer keeps weights in float32, and only copies of them are rounded; False for weights that are
        trained in 16 bits.
    steps : sequence of int, optional
        Steps of traces to look at; all by default.
    rank : int, optional
        Rank of traces to look at; the first by default.
    layers : sequence of str, optional
        Patterns of names, as in :mod:`fnmatch`: look at these weights by themselves, too.
    per_layer : bool, optional
        Look at every layer by itself, too.
    client : distributed.Client, optional
        Cluster that does the work. What is no file is compared in this process.
    on_progress : callable, optional
        Called after every layer.

    Returns
    -------
    Delta
        One record per lag and layer (``all`` is the whole model): lag, 1 for neighbours, and pairs, so many of which
        the record is the mean; changed, share of the weights that differ; changed_bf16 and changed_fp8, share that
        differs when both are rounded to bf16, or to E4M3 with the scale of the earlier layer; rows, share of the rows
        (of the first dimension) in which any weight differs; bytes, of the later checkpoint, and bytes_bitmap,
        bytes_gaps, bytes_rice and bytes_xor, of what changed (:mod:`gradstats.primitives.deltas`); entropy, the bytes
        below which no coder gets that takes each byte of the XOR for itself; predicted, share of the weights that
        should differ in bf16 (in the type itself, if that has 16 bits) by the law of the update; law, that law
        (``rate`` if the rate was given); update_to_weight, norm of the difference over norm of the earlier weights;
        rms_update; numel, dtype.

    Raises
    ------
    InputError
        If there are fewer than two checkpoints, they have no weights in common, hold numbers of float64, or an option
        has a wrong value.
    TraceError
        If a trace holds only sketches of the weights.

    Notes
    -----
    A weight that is kept in float32 and sent in bf16 lies anywhere within the interval of length ulp(w) that is rounded
    to one number, so an update u takes it to another one with probability min(1, |u|/ulp(w)): predicted is the mean of
    that over the weights, by the exponents that they have, and over the law of u. Without a `master`, w is such a
    number, and changes if |u| exceeds ulp(w)/2. Both take updates as independent of the weights within a layer.

    Layers that not all checkpoints have, or have in another shape, are left out, and ``remarks`` says so. One layer of
    all checkpoints is in memory at once where the source can read parts.

    Examples
    --------
    >>> import gradstats
    >>> w = np.linspace(0.5, 1, 1000, dtype=np.float32)
    >>> changes = gradstats.delta({"w": w}, {"w": np.where(np.arange(1000) < 10, 0, w)})
    >>> print(changes[0]["changed"])
    0.01
    """
    from gradstats.primitives.deltas import WIDTHS

    if dtype is not None and dtype not in tuple(WIDTHS):
        raise unknown("type of weights", dtype, WIDTHS)
    if rate is not None:
        rate = check_number(rate, "rate", 0, math.inf, "()")
    checkpoints = [c for each in (a, *others) for c in _checkpoints(each, steps, rank)]
    if len(checkpoints) < 2:
        raise InputError(
            f"two checkpoints are needed to compare, and {checkpoints[0].name if checkpoints else 'nothing'} is one: "
            "give another, or a trace of weights with several steps"
        )
    common, remarks = _common(checkpoints)
    named = chosen([layer.name for layer in common], layers, per_layer, checkpoints[0].name)
    if any(c.source.in_memory for c in checkpoints):
        client = None  # each task would carry all of them
    # before any layer is compared: all are compared in one type
    compared = dtype or _shortest(checkpoints, common, client)
    hidden: set[str] = set()
    totals: dict[tuple[int, str], _Change] = {}

    def plan(submit: Submit, layer: Layer) -> Any:
        return submit(_pairs, checkpoints, layer, compared, rate, master)

    for layer, pairs in zip(common, evaluate(plan, common, client, "layers"), strict=True):
        for lag, change in pairs:
            if change.laws[""] and _has_law(rate, lag):
                hidden.add(layer.name)
            for name in ("all", layer.name) if layer.name in named else ("all",):
                totals.setdefault((lag, name), _Change()).add(change)
        on_progress()
    if hidden:
        remarks.append(
            f"predicted: not known, as weights in 16 bits hide the update of {some(hidden)}; give its mean magnitude "
            "as rate (--rate)"
        )
    counts = {lag: len(checkpoints) - lag for lag, _ in totals}
    order = {"all": -1} | {name: i for i, name in enumerate(named)}
    keys = sorted(totals, key=lambda key: (key[0], order[key[1]]))
    comparison = Delta(_record(key, totals[key], counts[key[0]], compared) for key in keys)
    comparison.names, comparison.remarks = [c.name for c in checkpoints], remarks
    return comparison


@dataclass(frozen=True)
class _Checkpoint:
    """One set of weights: where it is read."""

    name: str
    source: Source
    key: tuple[int, Any, int]

    def __reduce__(self) -> tuple[Any, ...]:
        # without the layers, which a worker lists for itself
        return _Checkpoint, (self.name, self.source, self.key)

    # frozen dataclasses refuse assignment; cached_property writes into __dict__, past it
    @cached_property
    def layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.source.layers}

    def values(self, layer: Layer) -> Vector:
        """Return a layer's weights, flat, which must be numbers of float32."""
        place = self.layers[layer.name].slice
        wide = as_numpy(self.source.elements(*self.key, place.start, place.stop)).reshape(-1)
        if wide.dtype == np.float32:
            return wide
        with np.errstate(over="ignore", under="ignore"):
            values = wide.astype(np.float32)
        if not np.array_equal(values, wide, equal_nan=True):
            raise InputError(
                f"{layer.name} of {self.name} holds float64 that are no numbers of float32: save it .float()"
            )
        return values


def kinds_of_weights(source: Source) -> list[Kind] | None:
    """Return the kinds of a source that are parameters; None of a file, which does not say what it holds.

    Parameters
    ----------
    source : Source
        Trace or file.

    Raises
    ------
    InputError
        If a trace has none.
    """
    kinds = {kind for _, kind, _ in source.entries()}
    if "weight" in kinds:
        return ["weight"]
    if isinstance(source, TraceSource):
        raise InputError(
            f"{source.name} holds {some(kinds) or 'nothing'}, and no weights: capture kind weight, or give files"
        )
    return None


def _checkpoints(
    origin: object, steps: Sequence[int] | None, rank: int | None
) -> Iterator[_Checkpoint]:
    """Yield the checkpoints that a source holds, in the order of steps."""
    sources = open_sources(origin) if isinstance(origin, str | Path) else [open_source(origin)]
    for source in sources:
        weights = kinds_of_weights(source)
        ranks = [rank] if weights and rank is not None else None
        keys = source.select(steps=steps if weights else None, ranks=ranks, kinds=weights)
        first = min(r for r, _, _ in keys)
        keys = [key for key in keys if key[0] == first]
        for key in sorted(keys, key=lambda k: k[2]):
            if source.sketched(key[0], key[1]):
                raise TraceError(f"{source.name} holds only sketches of its weights")
            name = source.name if len(keys) == 1 else f"{source.name}, step {key[2]}"
            yield _Checkpoint(name, source, key)


def _common(checkpoints: Sequence[_Checkpoint]) -> tuple[list[Layer], list[str]]:
    """Return the layers that all checkpoints have in one shape, and what is said of the others."""
    first, remarks = checkpoints[0], []
    shapes = [{n: la.shape for n, la in c.layers.items()} for c in checkpoints]
    common = [
        layer
        for layer in first.source.layers
        if layer.numel and all(s.get(layer.name) == layer.shape for s in shapes)
    ]
    for i, (checkpoint, held) in enumerate(zip(checkpoints, shapes, strict=True)):
        if i and (changed := [n for n, s in held.items() if shapes[0].get(n, s) != s]):
            remarks.append(
                f"left out, as they have other shapes in {checkpoint.name} than in {first.name}: {some(changed)}"
            )
        elsewhere = set().union(*shapes) - held.keys()
        if elsewhere:
            remarks.append(f"left out, as {checkpoint.name} does not have them: {some(elsewhere)}")
        if checkpoint.source.remark:
            remarks.append(checkpoint.source.remark)
    if not common:
        raise InputError(
            f"{first.name} and {checkpoints[1].name} have no layer in common: the first has {some(shapes[0])}, the "
            f"other {some(shapes[1])}"
        )
    # sources of several checkpoints repeat their remark for each
    return common, list(dict.fromkeys(remarks))


def _shortest(
    checkpoints: Sequence[_Checkpoint], layers: Sequence[Layer], client: Any
) -> WeightType:
    """Return the shortest type of which all weights are numbers."""

    def plan(submit: Submit, layer: Layer) -> Any:
        return submit(_types, checkpoints, layer, left)

    # bfloat16 first: numbers that are of both types, such as zeros, are called that
    left: list[WeightType] = ["bf16", "fp16"]
    # one layer of float32 is enough: the first is looked at before a cluster is asked for the others
    first = evaluate(plan, layers[:1], None, "layers")
    for types in chain(first, evaluate(plan, layers[1:], client, "layers")):
        left = [name for name in left if name in types]
        if not left:
            return "fp32"
    return left[0]


def _types(
    checkpoints: Sequence[_Checkpoint], layer: Layer, left: list[WeightType]
) -> list[WeightType]:
    """Return those types of which one layer's weights are numbers in every checkpoint."""
    for checkpoint in checkpoints:
        values = checkpoint.values(layer)
        left = [name for name in left if _fits(values, name)]
        if not left:
            break
    return left


def _is_short(values: Vector) -> bool:
    """Tell whether weights seem to have been kept in 16 bits; those that are all equal, as at first, do not tell."""
    return (_fits(values, "bf16") or _fits(values, "fp16")) and bool((values != values[0]).any())


def _fits(values: Vector, dtype: str) -> bool:
    """Tell whether numbers are of a type of 16 bits."""
    if dtype == "bf16":
        # bfloat16 is the upper half of float32
        return not np.any(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)
    with np.errstate(over="ignore", under="ignore"):
        return np.array_equal(values.astype(np.float16).astype(np.float32), values, equal_nan=True)


@dataclass
class _Change:
    """What changed in some weights, in numbers that add up."""

    numel: int = 0
    changed: int = 0
    changed_bf16: int = 0
    changed_fp8: int = 0
    rows: int = 0
    rows_changed: int = 0
    sizes: Counter[str] = field(default_factory=Counter)
    predicted: float = 0.0
    laws: Counter[str] = field(default_factory=Counter)
    square: float = 0.0
    weight: float = 0.0

    def add(self, other: _Change) -> None:
        """Add what changed in other weights, or in the same between other checkpoints."""
        for name, more in vars(other).items():
            if isinstance(more, Counter):
                getattr(self, name).update(more)  # a sum would leave out what is 0
            else:
                setattr(self, name, getattr(self, name) + more)


def _has_law(rate: float | None, lag: int) -> bool:
    """Tell whether updates have a law: a rate is that of one interval between checkpoints, not of several."""
    return rate is None or lag == 1


def _pairs(
    checkpoints: Sequence[_Checkpoint],
    layer: Layer,
    dtype: WeightType,
    rate: float | None,
    master: bool,
) -> list[tuple[int, _Change]]:
    """Compare one layer of every two checkpoints; return each pair's lag, and what changed."""
    # all pairs come from one read
    values = [c.values(layer) for c in checkpoints]
    short = [rate is None and _is_short(each) for each in values]
    changes = []
    for i, before in enumerate(values):
        for lag, after in enumerate(values[i + 1 :], 1):
            # in float64, where the difference of two float32 cannot overflow
            update = _finite(after) - _finite(before)
            change = _compare(layer, before, after, update, dtype)
            law, share = "", math.nan
            if _has_law(rate, lag):
                known = not (short[i] or short[i + lag])
                law, share = _predict(update, before, dtype, rate, master, known=known)
            # counted by elements, so that a record's law is that of most of its weights
            change.laws[law], change.predicted = layer.numel, share * layer.numel
            changes.append((lag, change))
    return changes


def _compare(
    layer: Layer, before: Vector, after: Vector, update: NDArray[np.float64], dtype: WeightType
) -> _Change:
    """Compare one layer of two checkpoints."""
    from gradstats.primitives import deltas

    # bits are compared, as bits are sent: −0 differs from 0, and NaN equals the same NaN
    a, b = (deltas.words_of(x, dtype) for x in (before, after))
    differs = a != b
    rows = layer.shape[0] if layer.shape else 1
    change = _Change(numel=layer.numel, changed=int(np.count_nonzero(differs)), rows=rows)
    change.rows_changed = int(np.count_nonzero(differs.reshape(rows, -1).any(1)))
    short = [deltas.words_of(x, "bf16") for x in (before, after)]
    change.changed_bf16 = int(np.count_nonzero(short[0] != short[1]))
    # one scale for both, or a new largest weight would change the words of all others, too
    largest = float(np.max(np.abs(before), initial=0.0, where=np.isfinite(before)))
    eight = [deltas.rounded_words(x, largest) for x in (before, after)]
    change.changed_fp8 = int(np.count_nonzero(eight[0] != eight[1]))
    change.sizes["bytes"] = layer.numel * deltas.WIDTHS[dtype]
    for codec in deltas.CODECS:
        change.sizes[f"bytes_{codec}"] = len(deltas.encode(a, b, codec))
    change.sizes["entropy"] = math.ceil(deltas.entropy_bytes(a, b))
    change.square, change.weight = float(update @ update), float(np.square(_finite(before)).sum())
    return change


def _finite(values: Vector) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0.0)


def _predict(
    update: NDArray[np.float64],
    before: Vector,
    dtype: str,
    rate: float | None,
    master: bool,
    *,
    known: bool,
) -> tuple[str, float]:
    """Return an update's law and the share of a layer's weights that change by it; NaN if no law is known."""
    if rate is not None:
        return "rate", _share(_laplace(rate), before, dtype, master)
    # of weights stored in 16 bits the update is rounded to their grid, so its law cannot be seen
    if not known:
        return "", math.nan
    if not update.any():
        return "none", 0.0
    law = _law(update)
    return law.model, _share(law, before, dtype, master)


def _share(law: Fit, before: Vector, dtype: str, master: bool) -> float:
    """Return the share of a layer's weights that updates of a law change in 16 bits; NaN if no weight is finite."""
    # exponent bits of float32 say how far apart neighbouring numbers are
    bits = np.ascontiguousarray(before).view(np.uint32)
    exponents = ((bits >> 23) & 0xFF).astype(np.int64)
    # 255 marks NaN and infinities
    counts = np.bincount(exponents[exponents < 255], minlength=255)
    if not counts.any():
        return math.nan
    # fraction bits and smallest normal exponent of the type
    mantissa, emin = (10, -14) if dtype == "fp16" else (7, -126)
    there = np.flatnonzero(counts)
    # below the smallest normal number the spacing stays the same
    ulp = np.exp2(np.maximum(there - 127.0, emin) - mantissa)
    # in 16 bits alone an update counts once it is rounded away from the old number: beyond half a spacing
    share = _crossing(law, ulp) if master else law.magnitude.sf(ulp / 2)
    # updates of exactly zero, a point mass beside the law, change nothing
    return (1 - law.zero_fraction) * float(counts[there] @ share) / float(counts.sum())


def _law(update: NDArray[np.float64]) -> Fit:
    """Return the law that is closest to an update; a Laplace distribution where none can be fitted."""
    reduced = sketch(update)
    fits = fit_all(reduced, LAWS)
    if not fits:
        # the maximum-likelihood scale of a Laplace distribution around 0
        return _laplace(float(np.abs(update).mean()))
    return min(zip(fits, fits.goodness, strict=True), key=lambda pair: pair[1].ks)[0]


def _laplace(scale: float) -> Fit:
    params = {"loc": 0.0, "scale": scale}
    return Fit("laplace", params, zero_fraction=0.0, count=0, method="closed")


def _crossing(law: Fit, ulp: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of min(1, |u|/ulp), which is ∫ P(|u| > t) dt from 0 to ulp, over ulp."""
    # of a narrow law the rest up to ulp is empty, and the points would miss the law
    end = np.minimum(ulp, float(law.magnitude.isf(_LEAST)))
    nodes, weights = _nodes()
    v = (nodes + 1) / 2
    # closer points towards 0, where a law may be steep
    # t = end·v²: ∫ P(|u| > t) dt = end · ∫ 2v P(|u| > end·v²) dv, v = (node + 1)/2
    inner: NDArray[np.float64] = law.magnitude.sf(end[:, None] * v**2) @ (weights * v)
    return np.minimum(inner * end / ulp, 1.0)


@cache
def _nodes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points and weights of Gauss and Legendre; to find them takes longer than to use them."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def _record(key: tuple[int, str], total: _Change, pairs: int, dtype: str) -> dict[str, Any]:
    """Return the means over the pairs of one lag."""
    lag, layer = key
    numel = total.numel
    sizes = {name: round(size / pairs) for name, size in total.sizes.items()}
    norm = math.sqrt(total.weight)
    # of weights that do not move nothing is predicted
    law = max(total.laws, key=lambda name: (name != "none", total.laws[name]))
    return {
        "lag": lag,
        "pairs": pairs,
        "layer": layer,
        "numel": numel // pairs,
        "dtype": dtype,
        "changed": total.changed / numel,
        "changed_bf16": total.changed_bf16 / numel,
        "changed_fp8": total.changed_fp8 / numel,
        "rows": total.rows_changed / total.rows,
        **sizes,
        "predicted": total.predicted / numel,
        "law": law,
        "update_to_weight": math.sqrt(total.square) / norm if norm else math.nan,
        "rms_update": math.sqrt(total.square / numel),
    }
