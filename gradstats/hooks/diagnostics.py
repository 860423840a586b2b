"""Diagnosis of one step in training: the compressed update against the dense mean, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.compressors.contraction import random_ratio
from gradstats.compressors.signs import matching_rate

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Comparison of a step's update with a dense exchange beside it, layer by layer in the model's order.

    Attributes
    ----------
    step : int
        Number of the step, that of its :class:`StepRecord`.
    layers : tuple of str
        Names of the compressed parameters.
    numel : ndarray of int64, shape (layers,)
        Number of elements d of each layer.
    selected : ndarray of int64, shape (layers,)
        Number of elements k̂ that this rank sent of each layer.
    target : ndarray of int64, shape (layers,)
        Number of elements k that this rank was to send of each layer; 0 for a compressor without such a number. With
        one threshold for the whole model it is the layer's share, ratio · d.
    delta : ndarray of float64, shape (layers,)
        δ_l of LAGS-SGD's eq. 21: the squared distance of the update from the dense mean, divided by what k̂ random
        elements would leave on average, (1 − k̂/d) times the squared norm of the mean. The paper draws the random
        elements once; this is the expectation, and :func:`gradstats.compressors.contraction.random_ratio` offers the
        draw. Its assumption 1 holds where δ_l ≤ 1. NaN where everything was sent or the mean is zero.
    matching_rate : float
        Share of elements whose sign is the same in the update and the dense mean (Marsit, figure 1b); see
        :func:`gradstats.compressors.signs.matching_rate`.
    residual_norm : float
        Norm ‖e‖ of what this rank did not send; its mean over the ranks is MiCRO's eq. 1.
    """

    step: int
    layers: tuple[str, ...]
    numel: NDArray[np.int64]
    selected: NDArray[np.int64]
    target: NDArray[np.int64]
    delta: NDArray[np.float64]
    matching_rate: float
    residual_norm: float


def diagnose(
    step: int,
    layers: Iterable[tuple[str, slice]],
    targets: Iterable[int],
    update: torch.Tensor,
    dense_mean: torch.Tensor,
    sent: torch.Tensor | None,
    residual: torch.Tensor,
) -> Diagnosis:
    """Compare an update with the mean that a dense exchange would have given.

    Parameters
    ----------
    step : int
        Number of the step.
    layers : iterable of (str, slice)
        Names of the layers and their places in the flat gradient, in order and without gaps.
    targets : iterable of int
        Target count k of each layer; 0 for none.
    update : float32 or float64 tensor, shape (d,)
        Mean of what the ranks sent.
    dense_mean : float32 or float64 tensor, shape (d,)
        Mean of the ranks' corrected gradients.
    sent : int64 tensor, shape (k̂,), or None
        Positions that this rank sent; None for all.
    residual : tensor, shape (d,)
        What this rank did not send.

    Returns
    -------
    Diagnosis
        The comparison.
    """
    names, slots = zip(*layers, strict=True)
    ends = np.array([slot.stop for slot in slots])
    # the layers leave no gaps, so that their ends tell their sizes
    numel = np.diff(ends, prepend=0)
    # None stands for all elements
    selected = numel.copy()
    if sent is not None:
        # positions below each end, of all layers by one sort
        below = np.searchsorted(np.sort(sent.cpu().numpy()), ends)
        selected = np.diff(below, prepend=0)
    delta = [
        random_ratio(dense_mean[s], update[s], int(count))
        for s, count in zip(slots, selected, strict=True)
    ]
    return Diagnosis(
        step=step,
        layers=names,
        numel=numel,
        selected=selected,
        target=np.array(list(targets), dtype=np.int64),
        delta=np.array(delta, dtype=np.float64),
        matching_rate=matching_rate(update, dense_mean),
        residual_norm=float(residual.double().norm()),
    )
