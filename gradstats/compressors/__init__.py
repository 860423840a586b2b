"""Live compressors, and the registry of their names."""

from __future__ import annotations

from typing import Any

from gradstats.compressors.base import Compressed, Compressor
from gradstats.compressors.sparsify import ThresholdCompressor, TopK
from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS, make_estimator

__all__ = [
    "COMPRESSORS",
    "Compressed",
    "Compressor",
    "ThresholdCompressor",
    "TopK",
    "make_compressor",
]

COMPRESSORS = ("none", "topk", *ESTIMATORS)
"""Names the command line takes; ``none`` is dense averaging, ``topk`` and ``exact`` are the same."""


def make_compressor(name: str, ratio: float, **options: Any) -> Compressor | None:
    """Build the compressor called `name`; None for ``none``.

    Raises
    ------
    InputError
        For an unknown name; the message lists what there is.
    """
    if name == "none":
        return None
    if name == "topk":
        return TopK(ratio, **options)
    if name not in ESTIMATORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(COMPRESSORS)}")
    return ThresholdCompressor(make_estimator(name, **options), ratio)
