"""Live compressors, and the registry of their names. Classes load, and torch with them, when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS, make_estimator

if TYPE_CHECKING:
    from gradstats.compressors.base import Compressor, Reduced, Selection, Selector
    from gradstats.compressors.cltk import CLTk
    from gradstats.compressors.dense import DenseCompressor
    from gradstats.compressors.lags import LAGS
    from gradstats.compressors.layerwise import Layerwise
    from gradstats.compressors.marsit import Marsit
    from gradstats.compressors.micro import MiCRO
    from gradstats.compressors.randomk import RandomK
    from gradstats.compressors.redsync import RedSync
    from gradstats.compressors.shared import GlobalHistogram
    from gradstats.compressors.signs import SSDM, Cascading, EFSignSGD, SignSGD
    from gradstats.compressors.sparse import SparseCompressor
    from gradstats.compressors.sparsify import ThresholdSelector, TopK

_HOME = {
    "CLTk": "cltk",
    "Cascading": "signs",
    "Selection": "base",
    "Selector": "base",
    "DenseCompressor": "dense",
    "EFSignSGD": "signs",
    "GlobalHistogram": "shared",
    "LAGS": "lags",
    "Layerwise": "layerwise",
    "Marsit": "marsit",
    "MiCRO": "micro",
    "RandomK": "randomk",
    "RedSync": "redsync",
    "Reduced": "base",
    "Compressor": "base",
    "SSDM": "signs",
    "SignSGD": "signs",
    "SparseCompressor": "sparse",
    "ThresholdSelector": "sparsify",
    "TopK": "sparsify",
}

__all__ = [
    "COMPRESSORS",
    "LAGS",
    "SELECTORS",
    "SSDM",
    "CLTk",
    "Cascading",
    "Selection",
    "Selector",
    "DenseCompressor",
    "EFSignSGD",
    "GlobalHistogram",
    "Layerwise",
    "Marsit",
    "MiCRO",
    "RandomK",
    "RedSync",
    "Reduced",
    "Compressor",
    "SignSGD",
    "SparseCompressor",
    "ThresholdSelector",
    "TopK",
    "make_selector",
    "make_compressor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradstats.compressors' has no attribute {name!r}")
    value = getattr(import_module(f"gradstats.compressors.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


SELECTORS = ("none", "topk", *ESTIMATORS)
"""Names that :func:`make_selector` takes: what each rank selects by itself; ``topk`` and ``exact`` are the same."""

_SPARSE_SYSTEMS = {
    "micro": "MiCRO",
    "cltk": "CLTk",
    "randomk": "RandomK",
    "lags": "LAGS",
    "redsync-quantised": "RedSync",
}
_SIGN_SYSTEMS = {
    "signsgd": "SignSGD",
    "ef-signsgd": "EFSignSGD",
    "ssdm": "SSDM",
    "cascading": "Cascading",
    "marsit": "Marsit",
}

COMPRESSORS = (*SELECTORS, *(n for n in _SPARSE_SYSTEMS if n not in SELECTORS), *_SIGN_SYSTEMS)
"""Names that :func:`make_compressor` and the command line take; ``none`` is PyTorch's dense averaging."""


def make_selector(name: str, ratio: float, **options: Any) -> Selector | None:
    """Build the selection called `name`; None for ``none``.

    Raises
    ------
    InputError
        For an unknown name; the message lists what there is.
    """
    if name == "none":
        return None
    if name not in SELECTORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(SELECTORS)}")
    from gradstats.compressors.sparsify import ThresholdSelector, TopK

    if name == "topk":
        return TopK(ratio, **options)
    return ThresholdSelector(make_estimator(name, **options), ratio)


def make_compressor(name: str, ratio: float, **options: Any) -> Compressor | None:
    """Build the system called `name`: a selection with its all-gather, or an exchange of its own; None for ``none``.

    Parameters
    ----------
    name : one of :data:`COMPRESSORS`. ``micro`` is the whole system with exclusive partitions; the threshold rule alone
        is ``make_selector("micro", …)``.
    ratio : kept fraction k/d; of no meaning to systems that send signs.
    options : of the system.

    Raises
    ------
    InputError
        For an unknown name; the message lists what there is.
    """
    if name not in COMPRESSORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(COMPRESSORS)}")
    if name in _SPARSE_SYSTEMS:
        if name == "redsync-quantised":
            options["quantise"] = True
        return __getattr__(_SPARSE_SYSTEMS[name])(ratio, **options)  # type: ignore[no-any-return]
    if name in _SIGN_SYSTEMS:
        return __getattr__(_SIGN_SYSTEMS[name])(**options)  # type: ignore[no-any-return]
    from gradstats.compressors.sparse import SparseCompressor

    compressor = make_selector(name, ratio, **options)
    return None if compressor is None else SparseCompressor(compressor)
