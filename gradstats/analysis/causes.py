"""Why two gradients differ: sums over their elements, and the causes that fit them.

Every linear explanation (a factor, a mean over ranks, the last step's gradient, the weights) is an angle between
vectors, and follows from their products. The rest follows from counts.
"""

# Size: each way in which two runs differ has a function, in the order in which one hides the next.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.elements import size_cause, special_cause
from gradstats.primitives.pairs import Pair, gram, pair
from gradstats.trace import Kind

__all__ = ["Causes", "Measured", "explain"]

Causes: TypeAlias = dict[tuple[int, Kind, int], dict[str, str]]
"""Cause by layer, of each step, kind and rank."""

_Vector: TypeAlias = NDArray[np.floating[Any]]

_SLACK = {"bfloat16": 2.0**-8, "float16": 2.0**-6}
"""Relative error that rounding to a type leaves; small elements lose more in float16, whose range is short."""

_MOST_SUMMED = 64
"""Largest whole factor that is taken for a sum over micro-batches or ranks."""

_LEAST_SCALE = 128
"""Smallest power of two that is taken for a loss scale."""

_ROUNDING = 1e-3
"""Relative error up to which a difference without a structure is taken for rounding."""

_SMALL = 0.1
"""Relative error below which other data would be a surprise: what has no cause there is not known."""

_DEVIATIONS = 5
"""Standard deviations of what rounding does to a factor, within which it may be another."""

_CANCELLED = 1e-6
"""Share of ‖a‖² below which ‖b − a‖² is summed over the elements: the products leave too few digits of it."""

_CHANCE = 0.05
"""Largest probability that any other factor is taken for a whole number, or another step's end for a clipped one."""


@dataclass
class Measured:
    """Sums over the gradients of one step and kind, by layer.

    Attributes
    ----------
    sizes : (int, int)
        Ranks that A and B have.
    pairs : list of (int, int)
        Places of the ranks compared, in A's list and in B's.
    ranks : list of int
        Their numbers: A's.
    products : dict of ndarray
        By layer, products of all pairs of: A's ranks, B's ranks, both in the step before, the weights.
    counts : dict of list of Pair
        By layer, counts of each pair of ranks.
    apart : dict of list of float
        By layer and pair of ranks, ‖b − a‖².
    lengths : dict of list of str
        By layer and pair of ranks, how their sizes differ; empty where they do not.
    special : dict of list of str
        By layer and pair of ranks, a cause that only the elements themselves can tell; empty where there is none.
    numbers_of_ranks : (sequence of int, sequence of int)
        Numbers of the ranks of A and of B.
    """

    sizes: tuple[int, int]
    pairs: list[tuple[int, int]]
    ranks: list[int]
    products: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, list[Pair]] = field(default_factory=dict)
    apart: dict[str, list[float]] = field(default_factory=dict)
    lengths: dict[str, list[str]] = field(default_factory=dict)
    special: dict[str, list[str]] = field(default_factory=dict)
    numbers_of_ranks: tuple[Sequence[int], Sequence[int]] = ((), ())

    @classmethod
    def of(cls, a: Sequence[int], b: Sequence[int]) -> Measured:
        """Pair the ranks of both sides by number; by place if no number is on both.

        Parameters
        ----------
        a, b : sequence of int
            Ranks that each side has.
        """
        both = [(i, b.index(rank)) for i, rank in enumerate(a) if rank in b]
        pairs = both or list(zip(range(len(a)), range(len(b)), strict=False))
        return cls((len(a), len(b)), pairs, [a[i] for i, _ in pairs], numbers_of_ranks=(a, b))

    def add(
        self,
        layer: str,
        shape: tuple[int, ...],
        here: Sequence[_Vector],
        before: Sequence[_Vector],
        weights: _Vector | None,
    ) -> None:
        """Measure one layer.

        Parameters
        ----------
        layer : str
            Its name.
        shape : tuple of int
            Its shape in A.
        here : sequence of ndarray
            Its gradients on A's ranks, then on B's.
        before : sequence of ndarray
            The same in the step before; empty if there is none.
        weights : ndarray, optional
            Its parameters.
        """
        n_a = self.sizes[0]
        # a padded shard is longer: zeros at its end change no product
        numel = max(v.size for v in here)
        # absent vectors are zeros, so that every vector has its place: A, B, both a step before, the weights
        rest = [*(before or [np.zeros(0)] * len(here)), np.zeros(0) if weights is None else weights]
        vectors = [v if v.size == numel else np.pad(v, (0, numel - v.size)) for v in (*here, *rest)]
        # every linear cause is a question about these products: elements are read only once
        products = self.products[layer] = gram(vectors)
        self.counts[layer] = [pair(vectors[i], vectors[n_a + j]) for i, j in self.pairs]
        places = [(i, n_a + j) for i, j in self.pairs]
        self.apart[layer] = [_apart(vectors, products, i, j) for i, j in places]
        self.lengths[layer] = [size_cause(here[i], here[j]) for i, j in places]
        self.special[layer] = [
            "" if c.same == c.numel or size else special_cause(here[i], here[j], shape, c)
            for (i, j), c, size in zip(places, self.counts[layer], self.lengths[layer], strict=True)
        ]
        self._add_up(layer)

    def _add_up(self, layer: str) -> None:
        """Add a layer to ``all``."""
        if "all" in self.products:
            # a new array: that in all may be the first layer's own, which += would change
            self.products["all"] = self.products["all"] + self.products[layer]
            whole = zip(self.counts["all"], self.counts[layer], strict=True)
            self.counts["all"] = [x + y for x, y in whole]
            both = zip(self.apart["all"], self.apart[layer], strict=True)
            self.apart["all"] = [x + y for x, y in both]
        else:
            self.products["all"], self.counts["all"] = self.products[layer], self.counts[layer]
            self.apart["all"] = self.apart[layer]

    def join(self, other: Measured) -> None:
        """Take the layers that were measured elsewhere, and add them to ``all``.

        Parameters
        ----------
        other : Measured
            Other layers of the same gradients.
        """
        self.special |= other.special
        self.lengths |= other.lengths
        for layer in other.products:  # in the order of the model
            # the other's "all" would count these layers twice
            if layer != "all":
                self.products[layer] = other.products[layer]
                self.counts[layer], self.apart[layer] = other.counts[layer], other.apart[layer]
                self._add_up(layer)

    def view(self, layer: str, at: int) -> _View:
        """Return what is known of one layer on one pair of ranks.

        Parameters
        ----------
        layer : str
            Its name, or ``all``.
        at : int
            Place of the pair.
        """
        i, j = self.pairs[at]
        counts, apart, numbers = (
            self.counts[layer][at],
            self.apart[layer][at],
            self.numbers_of_ranks,
        )
        return _View(self.products[layer], counts, apart, self.sizes, i, j, numbers)

    def numbers(self, layer: str, at: int) -> dict[str, float]:
        """Return how far apart one layer is on one pair of ranks.

        Parameters
        ----------
        layer : str
            Its name, or ``all``.
        at : int
            Place of the pair.

        Returns
        -------
        dict
            scale, cosine, error and signs; NaN where they have no value.
        """
        v = self.view(layer, at)
        a, b, c = v.norm(v.a), v.norm(v.b), v.counts
        return {
            "scale": b / a if a else math.nan,
            # last bits of the sums, which differ between processors, are cut: parallel vectors have 1
            "cosine": round(min(max(v.dot(v.a, v.b) / (a * b), -1.0), 1.0), 12)
            if a * b
            else math.nan,
            "error": v.error,
            "signs": c.agree / c.either if c.either else math.nan,
        }


@dataclass(frozen=True, slots=True)
class _View:
    """Products and counts of one layer on a pair of ranks. Vectors are combinations of those multiplied."""

    products: NDArray[np.float64]
    counts: Pair
    apart: float
    sizes: tuple[int, int]
    i: int
    j: int
    numbers: tuple[Sequence[int], Sequence[int]]

    def unit(self, place: int) -> NDArray[np.float64]:
        vector = np.zeros(len(self.products))
        vector[place] = 1
        return vector

    @property
    def a(self) -> NDArray[np.float64]:
        return self.unit(self.i)

    @property
    def b(self) -> NDArray[np.float64]:
        return self.unit(self.sizes[0] + self.j)

    @property
    def a_before(self) -> NDArray[np.float64]:
        return self.unit(sum(self.sizes) + self.i)

    @property
    def b_before(self) -> NDArray[np.float64]:
        return self.unit(sum(self.sizes) + self.sizes[0] + self.j)

    @property
    def weights(self) -> NDArray[np.float64]:
        return self.unit(len(self.products) - 1)

    def rank(self, side: int, place: int) -> NDArray[np.float64]:
        return self.unit(side * self.sizes[0] + place)

    def mean(self, side: int) -> NDArray[np.float64]:
        """Mean over the ranks of A (0) or B (1)."""
        # 1/n for each rank of the side: the mean, in units of the vectors that were multiplied
        total = np.zeros(len(self.products))
        total[side * self.sizes[0] :][: self.sizes[side]] = 1 / self.sizes[side]
        return total

    def dot(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
        # ⟨Σxᵢvᵢ, Σyⱼvⱼ⟩ = xᵀ (vᵢ·vⱼ) y
        return float(x @ self.products @ y)

    def norm(self, x: NDArray[np.float64]) -> float:
        # rounding may leave a little below zero
        return math.sqrt(max(self.dot(x, x), 0.0))

    def cosine(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
        size = self.norm(x) * self.norm(y)
        # each layer's products are finite, their sum over layers need not be
        return self.dot(x, y) / size if size and math.isfinite(size) else 0.0

    def factor(self, x: NDArray[np.float64], y: NDArray[np.float64], slack: float) -> float:
        """Return s with y = s·x up to a relative error; NaN if there is none."""
        size = self.dot(x, x)
        if not size or not math.isfinite(size) or not self.norm(y):
            return math.nan
        # the projection of y on x; the products also tell what it leaves
        s = self.dot(x, y) / size
        return s if self.norm(y - s * x) <= slack * self.norm(y) else math.nan

    def doubt(self, s: float, flip: bool = False) -> float:
        """Return by how much of itself the factor s of B over A (of A over B) may be off, where rounding is the rest.

        The errors of n elements that are off by up to `slack` of themselves leave slack/√(3n) of the factor; n is here
        (Σa²)² ÷ Σa⁴, and what is off is measured. Small elements that a type takes for zero add the square of it.
        """
        x, y = (self.b, self.a) if flip else (self.a, self.b)
        rest = self.norm(y - s * x) / (self.norm(y) or 1.0)
        square = self.dot(x, x)
        # 1/√n, with the effective number of elements n = (Σx²)² ÷ Σx⁴
        share = min(math.sqrt(self.counts.fourth[flip]) / square, 1.0) if square else 1.0
        return rest**2 + _DEVIATIONS * rest * share

    def weights_over(self, side: int, vector: NDArray[np.float64], slack: float) -> _Vector | None:
        """Return the weights by which the ranks of a side add up to a vector; None if they do not."""
        first, n = side * self.sizes[0], self.sizes[side]
        block = self.products[first : first + n, first : first + n]
        inner_products = self.products[first : first + n] @ vector
        # sums over layers may overflow, and lstsq raises on what is not finite
        if not (np.isfinite(block).all() and np.isfinite(inner_products).all()):
            return None
        # ranks with equal gradients leave the weights open: those of least norm share alike
        weights: _Vector = np.linalg.lstsq(block, inner_products, rcond=1e-12)[0]
        total = np.zeros(len(self.products))
        total[first : first + n] = weights
        return weights if self.norm(vector - total) <= slack * self.norm(vector) else None

    def differ(self, side: int, slack: float) -> bool:
        """Tell whether the ranks of a side have different gradients."""
        first = self.rank(side, 0)
        others = (self.rank(side, place) for place in range(1, self.sizes[side]))
        return any(self.norm(other - first) > slack * self.norm(first) for other in others)

    @property
    def error(self) -> float:
        c, a = self.counts, self.norm(self.a)
        # of two types elements are equal that are so in the shorter one
        if c.same == c.numel or (not a and not self.norm(self.b)):
            return 0.0
        return math.sqrt(self.apart) / a if a else math.inf


def _apart(vectors: Sequence[_Vector], products: NDArray[np.float64], i: int, j: int) -> float:
    """Return ‖b − a‖² of two of the vectors, over the elements that count in their products."""
    apart = float(products[i, i] - 2 * products[i, j] + products[j, j])
    if apart > _CANCELLED * products[i, i]:
        return apart
    difference = np.subtract(vectors[j], vectors[i], dtype=np.float64)
    # an element that is not finite anywhere is left out here, too; what is left may be too small for gram()
    difference = difference[np.logical_and.reduce([np.isfinite(v) for v in vectors])]
    return float(difference @ difference)


def explain(
    measured: Mapping[tuple[int, Kind], Measured], worlds: Sequence[int], tolerance: float
) -> Causes:
    """Name the likely cause of every difference.

    Parameters
    ----------
    measured : mapping of (int, Kind) to Measured
        Sums by step and kind, in order.
    worlds : sequence of int
        World sizes of A and B, 0 where unknown; then those of groups inside, over which means are taken, too: the ranks
        that hold one model's shards, and its replicas.
    tolerance : float
        Relative error up to which there is no difference.

    Returns
    -------
    dict of dict of str
        Causes by step, kind and rank, and then by layer, ``all`` included; empty where there is no difference.
    """
    explanations: Causes = {}
    first: dict[Kind, int] = {}

    @cache
    def clipped(kind: Kind, rank: int, layer: str, flip: bool, slack: float) -> str:
        # norms of this layer and rank over the steps of the kind: clipping shows in them
        same = [m for (_, k), m in measured.items() if k == kind and rank in m.ranks]
        return _clipped([m.view(layer, m.ranks.index(rank)) for m in same], flip, slack)

    for (step, kind), one in measured.items():
        for at, rank in enumerate(one.ranks):
            later = f"follows from step {first[kind]}" if first.get(kind, step) < step else ""
            over = partial(clipped, kind, rank)
            causes = _of_gradient(one, at, over, worlds, tolerance, later)
            explanations[step, kind, rank] = causes
            if causes["all"]:
                # later differences may follow from the first: the weights are no longer the same
                first.setdefault(kind, step)
    _inherit(explanations)
    return explanations


_REST = "different data, randomness or weights"
_UNKNOWN = "not known: less than a tenth apart, and none of the causes fits"
_UNNAMED = (_REST, _UNKNOWN)
_DECAY = "weight decay"


def _inherit(explanations: Causes) -> None:
    """Give the first of steps that differ by nearly the same vector the cause that only the next one can tell."""
    last: dict[tuple[Kind, int], dict[str, str]] = {}
    for (_, kind, rank), following in explanations.items():
        causes = last.get((kind, rank), {})
        if following["all"].startswith(_DECAY):
            for layer, cause in causes.items():
                if cause in _UNNAMED and following[layer].startswith(_DECAY):
                    causes[layer] = following[layer]
        last[kind, rank] = following


def _of_gradient(
    one: Measured,
    at: int,
    clipped: Callable[[str, bool, float], str],
    worlds: Sequence[int],
    tolerance: float,
    later: str,
) -> dict[str, str]:
    layers = [layer for layer in one.products if layer != "all"]

    def cause_of(layer: str, special: str, length: str) -> str:
        view = one.view(layer, at)
        same = view.error <= tolerance and view.counts.nonfinite[0] == view.counts.nonfinite[1]
        # sizes may differ where no element does; elements of another shape have no counterparts
        if same or length.startswith("another shape"):
            return length
        rest = _UNKNOWN if view.error < _SMALL else _REST
        # causes come the surest first; without one, an earlier step's difference explains this one
        cause = next(
            _causes(view, special, partial(clipped, layer), worlds, tolerance), later or rest
        )
        return f"{cause}; {length}" if length else cause

    causes = {
        layer: cause_of(layer, one.special[layer][at], one.lengths[layer][at]) for layer in layers
    }
    kinds = Counter(cause for cause in causes.values() if cause)
    if not kinds:
        return {"all": cause_of("all", "", ""), **causes}
    rest = (*_UNNAMED, later)
    named = [cause for cause in kinds if cause not in rest]
    differing = sum(kinds.values())
    if len(kinds) == len(named) == 1 and differing < len(layers):
        only = next(layer for layer in layers if causes[layer])
        where = only if differing == 1 else f"{differing} of {len(layers)} layers"
        return {"all": f"{named[0]} ({where})", **causes}
    # what all differing layers say of their elements holds of the whole
    several = (
        {of[layer][at] for layer in layers if causes[layer]} for of in (one.special, one.lengths)
    )
    whole = cause_of("all", *(each.pop() if len(each) == 1 else "" for each in several))
    if whole in rest and named:
        # a cause's head names it; the numbers after the colon are one layer's
        heads = dict.fromkeys(cause.partition(":")[0] for cause in named)
        # layers of a few elements show no grid
        unnamed = sum(
            one.counts[la][at].numel for la in layers if causes[la] in rest and causes[la]
        )
        if unnamed <= _SMALL * one.counts["all"][at].numel:
            whole = "; ".join(heads) + " (by layer)"
    elif whole:
        # what holds for all together explains a layer that shows no more than a factor, or nothing by itself
        vague = (*rest, *(c for c in kinds if c.startswith(("a factor", "rounding"))))
        causes = {
            layer: whole if cause and cause in vague else cause for layer, cause in causes.items()
        }
    return {"all": whole, **causes}


def _causes(
    v: _View,
    special: str,
    clipped: Callable[[bool, float], str],
    worlds: Sequence[int],
    tolerance: float,
) -> Iterator[str]:
    """Yield the causes that fit, the surest first."""
    if v.counts.nonfinite[0] != v.counts.nonfinite[1]:
        # the side with more of them is named
        side = int(v.counts.nonfinite[1] > v.counts.nonfinite[0])
        most, name = v.counts.nonfinite[side], "AB"[side]
        if most == v.counts.numel:  # a capture writes NaN for what it could not see
            yield f"no finite gradient in {name}: an overflow, or none was there when it was captured"
        yield f"overflow: {most} elements of {name} are not finite"
    for side, name in enumerate("AB"):
        if not v.counts.nonzero[side] and v.counts.nonzero[1 - side]:
            yield f"no gradient in {name}: frozen, unused, or not reached by backward"
    if special:
        yield special
    precision, slack = _precision(v)
    slack = max(slack, tolerance)
    factor = v.factor(v.a, v.b, slack)
    # NaN without a factor, which fails both comparisons below
    doubt = max(v.doubt(factor), tolerance)
    if abs(factor - 1) <= doubt:
        if precision:
            yield precision
    elif not math.isnan(factor):
        yield "; ".join(filter(None, [_named(factor, clipped, worlds, slack, doubt), precision]))
    yield from _over_steps(v, slack)
    yield from _over_ranks(v, slack)
    # fingerprints are sums, equal in any order of the elements
    if v.counts.prints[0] == v.counts.prints[1]:
        yield "permuted: the same values at other places, shards in another order or padded"
    for side, name, other in ((1, "B", "A"), (0, "A", "B")):
        nonzero, had = v.counts.nonzero[side], v.counts.nonzero[1 - side]
        if v.counts.shared == nonzero < had:
            yield f"compressed: {name} has {nonzero:,} of {other}'s {had:,} non-zero elements"
    if precision and v.error <= 8 * slack:
        yield precision
    if v.error <= _ROUNDING:
        yield "rounding: another order of sums, or a shorter type in between"


def _precision(v: _View) -> tuple[str, float]:
    """Return whether one side has only values of a shorter type, and the relative error that this leaves."""
    # Pair.fine has the types in this order
    for place, (name, slack) in enumerate(_SLACK.items()):
        fine = [side[place] for side in v.counts.fine]
        # only one side has nothing but numbers of the type: it was rounded
        if (fine[0] == 0) != (fine[1] == 0):
            return f"{name} rounding of {'AB'[fine[1] == 0]}", slack
    return "", 0.0


def _named(
    s: float,
    clipped: Callable[[bool, float], str],
    worlds: Sequence[int],
    slack: float,
    doubt: float,
) -> str:
    """Name a constant factor."""
    if s < 0:
        times = "" if abs(s + 1) <= doubt else f"{-s:.4g} × "
        return f"sign: B = −{times}A"
    worlds, groups = worlds[:2], worlds[2:]
    # a factor and its inverse have one name, so only factors above 1 are looked for
    large = max(s, 1 / s)
    whole = round(large)
    if abs(large / whole - 1) <= doubt <= _CHANCE / 2:
        text = f"B = {whole} × A" if s > 1 else f"B = A ÷ {whole}"
        # 0 where a world size is unknown, which no factor is
        ratio = max(worlds) / max(min(worlds), 1) if all(worlds) else 0
        if whole in {*worlds, ratio}:
            return f"world size: {text}, a sum over ranks instead of a mean"
        if whole in groups:
            return f"accumulation, or a sum over replicas or shards: {text}"
        # a power of two has a single bit
        if whole >= _LEAST_SCALE and whole & (whole - 1) == 0:
            return f"loss scale: {text}"
        # else a factor of any size would be a whole number too often
        if whole <= _MOST_SUMMED and 2 * doubt * whole <= _CHANCE:
            names = "accumulation" if all(worlds) else "accumulation or world size"
            return f"{names}: {text}"
    # a quotient of world sizes that is no whole number
    if all(worlds) and abs(large * min(worlds) / max(worlds) - 1) <= doubt:
        return f"world size: B = {worlds[1]}/{worlds[0]} × A or its inverse"
    limit = clipped(s >= 1, slack)
    if limit.startswith("clipping"):
        return limit
    return f"a factor: B = {s:.6g} × A in every element{limit}"


def _clipped(steps: Sequence[_View], flip: bool, slack: float) -> str:
    """Tell whether B (with `flip` A) ends at a norm: that of several steps, a round number, or the largest of many."""
    name = "BA"[flip]
    ends, whole, free = [], [], []
    for v in steps:
        before, after = (v.b, v.a) if flip else (v.a, v.b)
        scale = v.factor(before, after, slack)
        if scale < 1 - max(1e-4, v.doubt(scale, flip)):
            ends.append(v.norm(after))
            whole.append(v.norm(before))
        elif v.norm(after):
            free.append(v.norm(after))
    if not ends:
        return ""
    limit, near = float(np.mean(ends)), 1e-3
    # clipping ends every larger norm at one limit, and leaves none above it
    if max(free, default=0.0) > limit * (1 + near) or np.ptp(ends) > near * limit:
        return ""
    # were the norms before alike, a constant factor would end at one norm, too
    several = len(ends) > 1 and np.ptp(whole) > 10 * near * limit
    # limits that users set are round: two digits
    round_ = abs(float(f"{limit:.1e}") / limit - 1) <= 1e-4
    # a factor in one step leaves the largest norm there in one of so many runs
    largest = len(ends) == 1 and 1 / (1 + len(free)) <= _CHANCE
    if several or round_ or largest:
        return f"clipping: the norm of {name} ends at {limit:.4g}"
    one = len(ends) == 1 and free
    return f"; clipping of {name} at a norm of {limit:.4g} would do the same" if one else ""


def _over_ranks(v: _View, slack: float) -> Iterator[str]:
    """Yield the causes that other ranks show: no exchange, or ranks in another order."""
    for side, this, other, vector in ((1, "B", "A", v.a), (0, "A", "B", v.b)):
        n = v.sizes[side]
        # of one rank, or of equal ones, the mean is each rank's own gradient and says nothing
        if n > 1 and v.differ(side, slack):
            factor = v.factor(v.mean(side), vector, slack)
            if abs(factor - 1) <= 2 * slack:
                yield f"missing all-reduce in {this}: {other} is the mean over {this}'s ranks"
            if abs(factor - n) <= 2 * slack * n:
                yield f"missing all-reduce in {this}: {other} is the sum over {this}'s ranks"
    for j in range(v.sizes[1]):
        if j != v.j and abs(v.factor(v.a, v.rank(1, j), slack) - 1) <= slack:
            yield "permuted: B has A's ranks in another order"
    # a mean over A's ranks that lacks one of them is seen in B, and the other way round
    for side, this, vector in ((0, "B", v.b), (1, "A", v.a)):
        if v.sizes[side] > 1 and v.differ(side, slack):
            yield from filter(None, [_miscounted(v, side, this, vector, slack)])
    for side, this in ((1, "B"), (0, "A")):
        together = v.sizes[1 - side] > 1 and not v.differ(1 - side, slack)
        if together and v.sizes[side] > 1 and v.differ(side, slack):
            yield f"missing all-reduce in {this}: its ranks differ, the other's agree"


def _miscounted(v: _View, side: int, this: str, vector: NDArray[np.float64], slack: float) -> str:
    """Tell which rank of a side a mean over them lacks, or has twice; empty if none or several."""
    weights = v.weights_over(side, vector, slack)
    if weights is None:
        return ""
    other, numbers, most = "AB"[side], v.numbers[side], float(np.abs(weights).max())
    zero = np.flatnonzero(np.abs(weights) <= 0.02 * most)
    # one rank's gradient in place of a mean
    if zero.size == weights.size - 1 and abs(most - 1) <= 0.02:
        j = int(np.abs(weights).argmax())
        # a gradient of the pair's own rank is no miscount
        is_same_rank = j == (v.j if side else v.i)
        return (
            ""
            if is_same_rank
            else f"a rank twice in {this}: it has the gradient of {other}'s rank {numbers[j]}"
        )
    # the weights of a mean are equal but for the rank that is missing or counts double
    usual = float(np.median(weights))
    equal = np.abs(weights / usual - 1) <= 0.02 if usual else np.zeros(weights.size, bool)
    # of two weights neither is the usual one
    if weights.size < 3 or equal.sum() != weights.size - 1:
        return ""
    j = int(np.flatnonzero(~equal)[0])
    if zero.size == 1:
        return f"a rank missing in {this}: it is the mean over {other}'s ranks without rank {numbers[j]}"
    twice = abs(weights[j] / usual - 2) <= 0.04
    return f"a rank twice in {this}: rank {numbers[j]} counts double in its mean" if twice else ""


def _over_steps(v: _View, slack: float) -> Iterator[str]:
    """Yield the causes that the step before, or the weights, show."""
    # B against A a step before, then A against B
    for this, other, before, vector in (("B", "A", v.a_before, v.b), ("A", "B", v.b_before, v.a)):
        if abs(v.factor(before, vector, slack) - 1) <= slack:
            yield f"stale: {this} has the gradient that {other} had in the step before"
    difference = v.b - v.a
    for name, before, added in (("B", v.b_before, difference), ("A", v.a_before, -difference)):
        rest = v.factor(before, added, 1e-2)
        if abs(rest - 1) <= 1e-2:
            yield f"accumulation: {name} still holds the gradient of the step before (zero_grad)"
        elif 0 < rest < 1:
            yield f"momentum: {name} adds {rest:.3g} of the step before"
    # loose: the weights are those of one checkpoint, the gradients those of any step
    decay = v.factor(v.weights, difference, 0.1)
    if not math.isnan(decay):
        yield f"{_DECAY}: B − A = {decay:.3g} × weights"
    # a constant difference means a constant term only where the gradient itself is not constant
    elif (
        v.cosine(difference, v.b_before - v.a_before) >= 0.95
        and abs(v.cosine(v.a, v.a_before)) <= 0.9
    ):
        yield f"{_DECAY}, or another term that hardly changes: B − A is the same in every step"
