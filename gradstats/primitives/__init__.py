"""The only code that reads every element of a gradient.

Three streaming passes reduce a NumPy array or torch tensor of any size and floating dtype to scalars
(:func:`moments`), to a mergeable histogram (:func:`histogram`), or to its large elements (:func:`select`). Everything
else in gradstats works on what they return. None of them makes a temporary as large as the gradient. What reads it
depends on its device, see :func:`backend`.
"""

from gradstats.primitives.arrays import Array, Selection, numel_of
from gradstats.primitives.backend import Backend, backend
from gradstats.primitives.blocks import get_num_threads, set_num_threads
from gradstats.primitives.histogram import Histogram, histogram
from gradstats.primitives.moments import Moments, exceedances, moments
from gradstats.primitives.select import kth_largest, select, top_candidates, topk

__all__ = [
    "Array",
    "Backend",
    "Histogram",
    "Moments",
    "Selection",
    "backend",
    "exceedances",
    "get_num_threads",
    "histogram",
    "kth_largest",
    "moments",
    "numel_of",
    "select",
    "set_num_threads",
    "top_candidates",
    "topk",
    "warm_up",
]


def warm_up() -> None:
    """Compile the primitives (seconds, once per installation) or load them from the cache.

    Part of :func:`gradstats.warm_up`.
    """
    # Numba loads with the loops: only where they run
    from gradstats.primitives.loops.calls import warm_up as compile_loops

    compile_loops()
