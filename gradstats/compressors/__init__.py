"""Live compressors, and the registry of their names. Classes load, and torch with them, when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradstats.errors import InputError
from gradstats.thresholds import ESTIMATORS, make_estimator

if TYPE_CHECKING:
    from gradstats.compressors.base import Compressed, Compressor, Reduced, Reducer
    from gradstats.compressors.cltk import CLTk
    from gradstats.compressors.dense import DenseReducer
    from gradstats.compressors.lags import LAGS
    from gradstats.compressors.layerwise import Layerwise
    from gradstats.compressors.marsit import Marsit
    from gradstats.compressors.micro import MiCRO
    from gradstats.compressors.randomk import RandomK
    from gradstats.compressors.redsync import RedSync
    from gradstats.compressors.shared import GlobalHistogram
    from gradstats.compressors.signs import SSDM, Cascading, EFSignSGD, SignSGD
    from gradstats.compressors.sparse import SparseReducer
    from gradstats.compressors.sparsify import ThresholdCompressor, TopK

_HOME = {
    "CLTk": "cltk",
    "Cascading": "signs",
    "Compressed": "base",
    "Compressor": "base",
    "DenseReducer": "dense",
    "EFSignSGD": "signs",
    "GlobalHistogram": "shared",
    "LAGS": "lags",
    "Layerwise": "layerwise",
    "Marsit": "marsit",
    "MiCRO": "micro",
    "RandomK": "randomk",
    "RedSync": "redsync",
    "Reduced": "base",
    "Reducer": "base",
    "SSDM": "signs",
    "SignSGD": "signs",
    "SparseReducer": "sparse",
    "ThresholdCompressor": "sparsify",
    "TopK": "sparsify",
}

__all__ = [
    "COMPRESSORS",
    "LAGS",
    "SELECTIONS",
    "SSDM",
    "CLTk",
    "Cascading",
    "Compressed",
    "Compressor",
    "DenseReducer",
    "EFSignSGD",
    "GlobalHistogram",
    "Layerwise",
    "Marsit",
    "MiCRO",
    "RandomK",
    "RedSync",
    "Reduced",
    "Reducer",
    "SignSGD",
    "SparseReducer",
    "ThresholdCompressor",
    "TopK",
    "make_compressor",
    "make_reducer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradstats.compressors' has no attribute {name!r}")
    value = getattr(import_module(f"gradstats.compressors.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


SELECTIONS = ("none", "topk", *ESTIMATORS)
"""Names that :func:`make_compressor` takes: what each rank selects by itself; ``topk`` and ``exact`` are the same."""

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

COMPRESSORS = (*SELECTIONS, *(n for n in _SPARSE_SYSTEMS if n not in SELECTIONS), *_SIGN_SYSTEMS)
"""Names that :func:`make_reducer` and the command line take; ``none`` is PyTorch's dense averaging."""


def make_compressor(name: str, ratio: float, **options: Any) -> Compressor | None:
    """Build the selection called `name`; None for ``none``.

    Raises
    ------
    InputError
        For an unknown name; the message lists what there is.
    """
    if name == "none":
        return None
    if name not in SELECTIONS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(SELECTIONS)}")
    from gradstats.compressors.sparsify import ThresholdCompressor, TopK

    if name == "topk":
        return TopK(ratio, **options)
    return ThresholdCompressor(make_estimator(name, **options), ratio)


def make_reducer(name: str, ratio: float, **options: Any) -> Reducer | None:
    """Build the system called `name`: a selection with its all-gather, or an exchange of its own; None for ``none``.

    Parameters
    ----------
    name : one of :data:`COMPRESSORS`. ``micro`` is the whole system with exclusive partitions; the threshold rule alone
        is ``make_compressor("micro", …)``.
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
    from gradstats.compressors.sparse import SparseReducer

    compressor = make_compressor(name, ratio, **options)
    return None if compressor is None else SparseReducer(compressor)
