"""How many bits a gradient needs: what number formats do to it, and to the sum of the ranks; ``gradstats wire``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, get_args

import numpy as np

from gradstats.analysis.over import Spread, shares, subset_of
from gradstats.analysis.pieces import Submit, evaluate
from gradstats.analysis.verdicts import smallest_format
from gradstats.errors import InputError, TraceError, unknown
from gradstats.primitives.arrays import CHUNK, numel_of
from gradstats.primitives.ratio import (
    check_count,
    check_number,
    check_ratio,
    check_seed,
    check_several,
)
from gradstats.tables import Records
from gradstats.thresholds import EstimatorName, make_estimator
from gradstats.trace import Kind
from gradstats.trace.sources import Source, Subset, layer_parts, open_source

if TYPE_CHECKING:
    from gradstats.primitives.formats import NumberFormat
    from gradstats.primitives.rounding import Measured, Way

__all__ = ["USUAL", "Rounding", "Scale", "Wire", "wire"]

USUAL = (
    *("bf16", "fp16", "e4m3", "e5m2", "int8", "int4", "int2"),
    *("mxfp8", "mxfp6", "mxfp4", "nvfp4"),
)
"""Formats that are looked at if none are named."""
_MEANS = ("bits", "error", "bias", "cosine", "zeros", "saturated", "dropped")
"""Fields that are means over the gradients."""

Rounding: TypeAlias = Literal["nearest", "stochastic"]
"""How an element is rounded to a number of a format: to the nearest, or up or down so that the mean is right."""
Scale: TypeAlias = Literal["tensor", "block"]
"""What shares a scale: all elements, or each block of them."""


class Wire(Records):
    """Records of :func:`wire`."""

    def smallest(
        self, error: float = 0.01, *, kind: str | None = None, layer: str = "all"
    ) -> dict[str, Any] | None:
        """Return the record with the fewest bits whose error stays at or below a limit.

        Where ranks were summed, their sum decides, as it is what a training gets.

        Parameters
        ----------
        error : float, optional
            Limit on the relative squared error of every gradient looked at, above 0.
        kind : str, optional
            Kind of gradients; the first one by default.
        layer : str, optional
            Layer; ``all`` is the whole gradient.

        Returns
        -------
        dict or None
            The record; None if no format stays below the limit.

        Raises
        ------
        InputError
            If the limit is not positive, or there is no such kind or layer.
        """
        limit = check_number(error, "error", 0, math.inf, "()")
        some = self._deciding(kind, layer)
        # every gradient must be within the limit, not their mean
        within = [r for r in some if r["worst"] <= limit]
        return min(within, key=lambda r: (r["bits"], r["error"])) if within else None

    def verdict(self, error: float = 0.01, *, kind: str | None = None) -> str:
        """Return the answer in a sentence: the smallest format below an error, for the whole gradient.

        Parameters
        ----------
        error : float, optional
            Limit on the relative squared error, above 0.
        kind : str, optional
            Kind of gradients; the first one by default.

        Returns
        -------
        str
            The sentence.
        """
        return smallest_format(
            self.smallest(error, kind=kind), self._deciding(kind, "all"), error, self._usual
        )

    @property
    def _usual(self) -> bool:
        """Whether all usual formats were tried."""
        return {*USUAL} <= {r["format"] for r in self}

    def _deciding(self, kind: str | None, layer: str) -> list[dict[str, Any]]:
        """Return the records that answer for a layer: those of the sum of ranks, where there are any."""
        kinds = list(dict.fromkeys(r["kind"] for r in self))
        if kind is not None and kind not in kinds:
            raise unknown("kind", kind, kinds)
        some = [r for r in self if r["kind"] == (kind or kinds[0]) and r["layer"] == layer]
        if not some:
            raise unknown("layer", layer, dict.fromkeys(r["layer"] for r in self))
        # a sum of ranks is what the training gets; one by one they are only its parts
        ranks = max(r["ranks"] for r in some)
        return [r for r in some if r["ranks"] == ranks]


@shares(Spread)
def wire(
    source: object,
    formats: Sequence[NumberFormat] | None = None,
    *,
    roundings: Sequence[Rounding] = ("nearest",),
    rotations: Sequence[int] = (0,),
    scales: Sequence[Scale] | None = None,
    ratio: float = 1.0,
    estimator: EstimatorName | str = "exact",
    seed: int = 0,
    **over: Unpack[Spread],
) -> Wire:
    """Round gradients to number formats as they would be sent, and measure what that changes.

    Parameters
    ----------
    source : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Trace or its path, gradient file, array, or arrays by layer name.
    formats : sequence of str, optional
        ``bf16``, ``fp16``, ``e4m3``, ``e5m2``, ``int8``, ``int4``, ``int2``, ``mxfp8``, ``mxfp6``, ``mxfp4`` or
        ``nvfp4``, which are the default; ``mxfp8-e5m2`` and ``mxfp6-e3m2`` have more exponent and less fraction.
    roundings : sequence of {"nearest", "stochastic"}, optional
        To the nearest number of the format, or to one of the two around it at random, with the right mean.
    rotations : sequence of int, optional
        Sizes of the blocks that a Hadamard matrix with random signs mixes before rounding, and unmixes after it: powers
        of two up to 131,072, and 0 for none.
    scales : sequence of {"tensor", "block"}, optional
        Scales of e4m3, e5m2 and integers, which leave a choice: one for the tensor, or one for 256 elements. By default
        both of the floats, and blocks of the integers.
    ratio : float, optional
        Fraction k/d of the elements that are sent, in (0, 1]; the others count as lost.
    estimator : str, optional
        Threshold rule that chooses them, of :data:`gradstats.thresholds.ESTIMATORS`, without a past.
    seed : int, optional
        Seed of stochastic rounding and of a rotation's signs, which all ranks share.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Wire
        One record per trace, kind, layer (``all`` is the whole gradient as one tensor; a layer by itself is a tensor of
        its own), format, scale (``none``, ``tensor``, or ``block``), rounding, rotation (size, 0 for none) and ranks: 1
        for gradients one by one, and of a trace with several ranks their number, for Σ Q(g) over ranks against Σ g.
        bits, an element, with scales (and with Rice-coded positions where not all are sent); error, ‖q − g‖²/‖g‖²,
        the mean over steps and ranks, and worst, the largest of them; bias, ⟨q − g, g⟩/‖g‖²: by how much the gradient
        grows (above 0) or shrinks along itself; cosine of q and g; zeros and saturated, the shares of the numbers that
        are not zero which become zero, and which are beyond the format's largest number and become it; dropped, the
        part of the error that elements not sent have; nonfinite, elements that are no number, which count as zero; n,
        gradients; ratio; numel.

    Raises
    ------
    InputError
        If an option has a wrong value, or nothing matches.
    TraceError
        If the trace holds only sketches, which have no elements to round.

    Notes
    -----
    What is measured is what :class:`gradstats.collectives.Codec` sends, number for number. Elements are float32 before
    they are rounded, larger ones its largest number. A gradient that is zero has no error, bias or cosine: NaN, and
    means leave it out. Stochastic rounding has a larger error in each gradient than the nearest number, but no bias but
    that of saturation, so that a sum of many ranks can be the better for it. Gradients of all ranks of one step are in
    memory at once, and nothing else of their size: each format is a pass over them, each size of rotation one more, for
    the largest element.

    Sources: OCP Microscaling Formats Specification 1.0 (2023) for the formats; Ashkboos et al. (2024), QuaRot, and
    Tseng et al. (2025), Training LLMs with MXFP4, for rotations.

    Examples
    --------
    >>> import gradstats
    >>> x = np.random.default_rng(0).laplace(size=4096)
    >>> print(gradstats.wire(x).smallest(0.01)["format"])
    nvfp4
    """
    ways = list(_ways(formats, roundings, rotations, scales))
    ratio, opened = check_ratio(ratio), open_source(source)
    make_estimator(estimator)  # a name that is none is refused before anything is read
    seed, subset = check_seed(seed), subset_of(over)
    parameters, steps = subset.parameters(opened), _by_step(opened, subset)
    several: dict[tuple[Any, ...], list[Measured]] = {}

    def plan(submit: Submit, at: tuple[Kind, int]) -> Any:
        return submit(_measured, opened, *at, steps[at], parameters, ways, ratio, estimator, seed)

    for (at, ranks), measurements in zip(
        steps.items(), evaluate(plan, steps, over["client"], "steps"), strict=True
    ):
        for layer, way, measured in measurements:
            several.setdefault((at[0], layer, way, measured.ranks), []).append(measured)
        # progress is counted in gradients, of which a step has one a rank
        for _ in ranks:
            over["on_progress"]()
    # gradients one by one before their sum
    # sorting is stable: within each, formats stay in the order in which they were asked for
    order = sorted(several, key=lambda key: key[3])
    labels = {"trace": opened.name, "ratio": ratio}
    return Wire(_record(labels, key, several[key]) for key in order)


def _measured(
    source: Source,
    kind: Kind,
    step: int,
    ranks: Sequence[int],
    parameters: Sequence[str],
    ways: Sequence[Way],
    ratio: float,
    estimator: str,
    seed: int,
) -> list[tuple[str, Way, Measured]]:
    """Round what all ranks have of one step, in every way."""
    from gradstats.primitives.rounding import Message, measure

    # the sum over ranks needs all of them at once
    vectors = [dict(layer_parts(source, source.read(r, kind, step), parameters)) for r in ranks]
    measurements = []
    for layer in vectors[0]:
        sent = []
        for rank, vector in zip(ranks, vectors, strict=True):
            values, chosen = vector[layer], None
            # an empty layer has nothing to choose from
            if ratio < 1 and numel_of(values):
                chosen = make_estimator(estimator).select(values, ratio)[1]
            # each rank and step rounds with random numbers of its own, the same in every run
            sent.append(Message(values, (seed, step, rank), chosen))
        measurements += [
            (layer, way, measured) for way in ways for measured in measure(way, sent, seed)
        ]
    return measurements


def _by_step(source: Source, subset: Subset) -> dict[tuple[Kind, int], list[int]]:
    """Return the ranks of each kind and step."""
    ranks: dict[tuple[Kind, int], list[int]] = {}
    for rank, kind, step in subset.keys(source):
        if source.sketched(rank, kind):
            raise TraceError(
                f"{source.name} holds only sketches of {kind}, which have no elements to round; capture with --store "
                "gradients"
            )
        ranks.setdefault((kind, step), []).append(rank)
    return ranks


def _ways(
    formats: Sequence[str] | None,
    roundings: Sequence[str],
    rotations: Sequence[int],
    scales: Sequence[str] | None,
) -> Iterator[Way]:
    """Yield every combination of options, checked."""
    from gradstats.primitives.formats import as_format
    from gradstats.primitives.rounding import Way

    named = USUAL if formats is None else check_several(formats, "formats")
    rounds, sizes = check_several(roundings, "roundings"), check_several(rotations, "rotations")
    scales = None if scales is None else check_several(scales, "scales")
    for values, known, what in (
        (rounds, get_args(Rounding), "rounding"),
        (scales or (), get_args(Scale), "scale"),
    ):
        for value in values:
            if not isinstance(value, str) or value not in known:
                raise unknown(what, value, known)
    for i, size in enumerate(sizes):
        sizes[i] = check_count(size, "rotations", 0, CHUNK)
        if sizes[i] & (sizes[i] - 1):
            raise InputError(f"rotations must be powers of two, or 0 for none, not {sizes[i]}")
    for name, what in ((named, "formats"), (rounds, "roundings"), (sizes, "rotations")):
        if not name:
            raise InputError(f"{what} must name at least one")
    for form in dict.fromkeys(as_format(name) for name in named):
        # formats of microscaling have their blocks, and 16 bits need no scale
        choice = ["none" if form.scale == "none" else "block"]
        if form.scale == "float32":
            # without exponents, integers of one scale spend their range on the largest element: only on request
            choice = list(
                dict.fromkeys(scales or (("tensor", "block") if form.mantissa else ("block",)))
            )
        for scale in choice:
            at = form.whole() if scale == "tensor" else form
            for rounding in dict.fromkeys(rounds):
                for size in dict.fromkeys(sizes):
                    yield Way(at, scale, rounding, size)


def _record(
    labels: dict[str, Any], key: tuple[Any, ...], measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the means over the gradients of one format."""
    kind, layer, way, ranks = key
    means = {}
    for name in _MEANS:
        # NaN comes of a gradient that is zero
        known = [v for m in measured if not math.isnan(v := getattr(m, name))]
        means[name] = float(np.mean(known)) if known else math.nan
    errors = [m.error for m in measured if not math.isnan(m.error)]
    return {
        "trace": labels["trace"],
        "kind": kind,
        "layer": layer,
        "format": way.format.name,
        "scale": way.scale,
        "rounding": way.rounding,
        "rotation": way.rotation,
        "ranks": ranks,
        "bits": means.pop("bits"),
        "error": means.pop("error"),
        "worst": max(errors, default=math.nan),
        **means,
        "nonfinite": sum(m.nonfinite for m in measured),
        "ratio": labels["ratio"],
        "numel": measured[0].numel,
        "n": len(measured),
    }
