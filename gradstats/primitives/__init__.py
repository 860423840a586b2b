"""The only code that reads every element of a gradient.

Three streaming passes over an array of any size, on NumPy arrays and torch tensors of
any floating dtype, reduce a gradient to scalars (:func:`moments`), to a mergeable histogram
(:func:`histogram`), or to its large elements (:func:`select`). Everything else in this package works on
what they return. None of them makes a temporary as large as the gradient.
"""

from gradstats.primitives.arrays import Array, Selection, numel_of
from gradstats.primitives.blocks import get_num_threads, set_num_threads
from gradstats.primitives.histogram import Histogram, histogram
from gradstats.primitives.moments import Moments, exceedances, moments
from gradstats.primitives.select import kth_largest, select, top_candidates

__all__ = [
    "Array",
    "Histogram",
    "Moments",
    "Selection",
    "exceedances",
    "get_num_threads",
    "histogram",
    "kth_largest",
    "moments",
    "numel_of",
    "select",
    "set_num_threads",
    "top_candidates",
    "warm_up",
]


def warm_up() -> None:
    """Compile the primitives (seconds, once per installation) or load them from the cache.

    Otherwise the first call does; building a live compressor's state does too, so that no hook waits for it.
    """
    from gradstats.primitives import kernels

    kernels.warm_up()
