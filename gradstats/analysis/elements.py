"""Why two gradients differ, as only their elements can tell: shapes, places, cut magnitudes, types of few values."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.primitives.pairs import Pair

__all__ = ["size_cause", "special_cause"]

_Vector: TypeAlias = NDArray[np.floating[Any]]

_HEAD, _MOST_LEVELS = 4096, 256
"""Elements that are looked at first, and magnitudes that a type of 8 bits has at most."""
_FEWEST_ROUNDED, _FEWEST_LEVELS = 32, 8
"""Elements, and different magnitudes, below which they may lie on a grid by chance."""


def size_cause(a: _Vector, b: _Vector) -> str:
    """Return how the sizes of two layers differ, or an empty text.

    Parameters
    ----------
    a, b : ndarray
        One layer of A and of B, flat.
    """
    for x, y, name in ((a, b, "B"), (b, a, "A")):
        if x.size < y.size:
            if not y[x.size :].any():
                return f"padding: {name} has {y.size - x.size} zeros more at its end"
            return f"another shape: {a.size} elements in A, {b.size} in B"
    return ""


def special_cause(a: _Vector, b: _Vector, shape: tuple[int, ...], counts: Pair) -> str:
    """Return a cause that only the elements themselves can tell, or an empty text.

    Parameters
    ----------
    a, b : ndarray
        One layer of A and of B, flat, of the same size.
    shape : tuple of int
        Its shape in A.
    counts : Pair
        What they have in common.
    """
    if counts.prints[0] == counts.prints[1]:
        # five axes have 120 orders, six have 720
        for axes in itertools.permutations(range(len(shape))) if len(shape) < 6 else ():
            # fingerprints tell that values are the same, not that places are; each order is tried in full
            if np.array_equal(a.reshape(shape).transpose(axes).reshape(-1), b):
                return f"permuted: B has A's axes in the order {', '.join(map(str, axes))}"
        return "permuted: the same values at other places"
    for x, y, name in ((a, b, "B"), (b, a, "A")):
        # the largest magnitude is where a cut would end
        limit = float(np.abs(y).max(initial=0.0))
        # by more than rounding moves an element
        cut = 0 < limit * (1 + 1e-6) < float(np.abs(x).max(initial=0.0))
        if cut and np.allclose(np.clip(x, -limit, limit), y, rtol=1e-6, atol=1e-6 * limit):
            return f"clipping: elements of {name} end at ±{limit:.4g}"
    for x, y, name in ((a, b, "B"), (b, a, "A")):
        if short := _short_type(x, y):
            return f"{short} rounding of {name}"
    # a shift moves the largest element with all others, so that one tells by how many places
    k = int(np.abs(b).argmax()) - int(np.abs(a).argmax()) if a.size else 0
    head, tail = (a[: a.size - k], b[k:]) if k >= 0 else (a[-k:], b[: b.size + k])
    # more than half must overlap, or chance may do it
    if k and head.size > a.size // 2 and np.array_equal(head, tail):
        return f"padding: B is A moved by {k} elements"
    return ""


def _short_type(x: _Vector, y: _Vector) -> str:
    """Name the type of 8 bits or fewer that y is x rounded to, with one scale for all; empty if there is none."""
    # the first elements tell most vectors from a grid without sorting all of them
    levels = np.unique(np.abs(y[:_HEAD]))
    if y.size < _FEWEST_ROUNDED or not 1 < levels.size <= _MOST_LEVELS:
        return ""
    # a grid must have merged values: x with as few of its own was not rounded to it
    if np.unique(np.abs(x[:_HEAD])).size < 2 * levels.size:
        return ""
    # a value beyond the head may lie off the grid
    levels = np.unique(np.abs(y)).astype(np.float64)
    levels = levels[levels > 0]
    if not np.isfinite(levels).all() or levels.size > _MOST_LEVELS:
        return ""
    # few levels are a grid only if many elements lie on each
    if levels.size < _FEWEST_LEVELS and y.size < _FEWEST_ROUNDED * levels.size:
        return ""
    off, size = np.abs(y.astype(np.float64) - x), np.abs(x)
    names = []
    # the smallest gap is near the grid's step, up to the rounding of the levels
    step = float(np.diff(levels, prepend=0.0).min())
    for _ in range(2):  # the step that all levels together have
        whole = np.rint(levels / step)
        # least squares of levels = step × whole numbers; the second pass rounds by a better step
        step = float(levels @ whole / (whole @ whole))
    # −128 is the largest magnitude of int8
    if whole[-1] <= 128 and _near_whole(levels / step) and _most(off <= 1.01 * step):
        names.append("int8" if whole[-1] > 7 else "int4")
    # two fraction bits first: their numbers are numbers of three bits, too
    for name, bits in {"fp8 (e5m2)": 2, "fp8 (e4m3)": 3}.items():
        # the largest has one of the significands, whatever the scale
        tops = np.arange(2**bits, 2 ** (bits + 1))
        # frexp gives a fraction from ½ to 1: times 2^(bits + 1) it is whole for a number of the type
        fits = any(
            _near_whole(np.frexp(levels * (top / levels[-1]))[0] * 2 ** (bits + 1)) for top in tops
        )
        # rounding is off by less than a spacing, 2^−bits of the element, or by the smallest number near zero
        if fits and _most(off <= np.maximum(1.01 * 2.0**-bits * size, levels[0])):
            names.append(name)
            break
    return " or ".join(names)


def _near_whole(x: _Vector) -> bool:
    return bool((np.abs(x - np.rint(x)) <= 1e-3).all())


def _most(holds: NDArray[np.bool_]) -> bool:
    """Tell whether something holds of all elements but those that a type cut off."""
    return float(holds.mean()) >= 0.99
