"""The numbers of a step: what each is, and what the ranks that hold the shards of a gradient say together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["COUNTS", "OF_LAYERS", "OF_RUN", "OF_STEPS", "Column"]

Joined: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
"""Values of all ranks of a sharded gradient, shape (ranks, …) → that of the whole, shape (…)."""


def _sum(parts: NDArray[Any]) -> NDArray[Any]:
    return parts.sum(axis=0)  # type: ignore[no-any-return]


def _longest(parts: NDArray[Any]) -> NDArray[Any]:
    return parts.max(axis=0)  # type: ignore[no-any-return]


def _norm(parts: NDArray[Any]) -> NDArray[Any]:
    # shards have no element in common, so that squares add up
    return np.sqrt(np.square(parts).sum(axis=0))  # type: ignore[no-any-return]


def _same(parts: NDArray[Any]) -> NDArray[Any]:
    # NaN equals nothing: what one rank does not know, or ranks know differently, is not known
    return np.where((parts == parts[0]).all(axis=0), parts[0], np.nan)


def _sum_if_known(parts: NDArray[Any]) -> NDArray[Any]:
    # -1, the fill value: one rank that does not know makes the sum unknown
    return np.where((parts < 0).any(axis=0), -1, parts.sum(axis=0))


def _unknown(parts: NDArray[Any]) -> NDArray[Any]:
    return np.full_like(parts[0], np.nan)


@dataclass(frozen=True, slots=True)
class Column:
    """A number of every step, or of every layer in every step.

    Attributes
    ----------
    name : str
        Its name.
    label : str
        What it is, as xarray shows it; empty for one of several in an array.
    dtype : str
        Type in which it is stored.
    fill : float
        Value that says that it is not known.
    joined : callable, optional
        How the values of all ranks of a sharded gradient make that of the whole; None where every rank has the whole's.
    of_compressor : bool
        Whether a compressor says it, of the shards of its rank.
    """

    name: str
    label: str = ""
    dtype: str = "float64"
    fill: float = math.nan
    joined: Joined | None = None
    of_compressor: bool = False


COUNTS = (
    Column("zeros", "zero elements", "int64", 0, _sum),
    Column("nonfinite", "NaN and infinite elements", "int64", 0, _sum),
)
"""Of every kind of gradient: counts, by what follows the kind's name."""

OF_RUN = (
    Column("loss", "training loss"),
    Column("learning_rate", "learning rate"),
    Column("threshold", "selection threshold", joined=_same, of_compressor=True),
    Column("selected", "elements selected", "int64", -1, _sum_if_known, of_compressor=True),
)
"""Of every step, in arrays of their own."""

OF_STEPS = (
    Column("target", joined=_sum),
    Column("numel", joined=_sum),
    Column("bytes_sent", joined=_sum),
    # ranks send positions of different shards, so that unions add up
    Column("union", joined=_sum),
    # ranks work at the same time, and a step takes as long as the slowest
    Column("select_seconds", joined=_longest),
    Column("communicate_seconds", joined=_longest),
    Column("overlapped_seconds", joined=_longest),
    Column("residual_norm", joined=_norm),
    # a share of each rank's own elements: that of the whole does not follow
    Column("matching_rate", joined=_unknown),
)
"""What a compressor says of a step."""

OF_LAYERS = (
    Column("selected", joined=_sum),
    Column("target", joined=_sum),
    # a quotient of errors of one shard: that of the whole does not follow
    Column("delta", joined=_unknown),
)
"""What a compressor says of a layer."""
