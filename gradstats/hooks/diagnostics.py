"""What is known of one step of a compressor in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.compressors.signs import matching_rate

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a dense exchange beside the compressed one tells of a step, layer by layer in the model's order.

    Attributes
    ----------
    step : of the :class:`StepRecord` it belongs to.
    layers : names of the compressed parameters.
    numel : int64 (layers,), their elements.
    selected : int64 (layers,), elements this rank sent of each, k̂.
    target : int64 (layers,), elements it was to send, k; 0 where there is no such number. Where
        the threshold is one for the whole model, the layer's share ratio · d.
    delta : float64 (layers,), δ_l of LAGS-SGD's eq. 21: how far the update is from the dense mean, in squares, against
        what k̂ random elements would leave on average, (1 − k̂/d) · the square of the mean. Its assumption 1
        holds where δ_l ≤ 1. NaN where everything was sent or the mean is zero.
    matching_rate : share of elements whose sign the update and the dense mean agree in (Marsit, figure 1b); see
        :func:`gradstats.compressors.signs.matching_rate`.
    residual_norm : of what this rank did not send, ‖e‖; the mean over ranks is MiCRO's eq. 1.
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
    step : number of the step.
    layers : names and places in the flat gradient, in order and without gaps.
    targets : k of each; 0 for none.
    update : float32 (d,), the mean of what the ranks sent.
    dense_mean : float32 (d,), of the ranks' corrected gradients.
    sent : int64 (k̂,), positions this rank sent, None for all.
    residual : (d,), what it did not send.
    """
    names, slots = zip(*layers, strict=True)
    ends = np.array([slot.stop for slot in slots])
    numel = np.diff(ends, prepend=0)
    selected = numel.copy()
    if sent is not None:
        below = np.searchsorted(np.sort(sent.cpu().numpy()), ends)
        selected = np.diff(below, prepend=0)
    missed = [float((dense_mean[s] - update[s]).double().square().sum()) for s in slots]
    energy = [float(dense_mean[s].double().square().sum()) for s in slots]
    random = (1 - selected / np.maximum(numel, 1)) * energy
    with np.errstate(divide="ignore", invalid="ignore"):
        delta = np.where(random > 0, missed / random, np.nan)
    return Diagnosis(
        step=step,
        layers=names,
        numel=numel,
        selected=selected,
        target=np.array(list(targets), dtype=np.int64),
        delta=delta,
        matching_rate=matching_rate(update, dense_mean),
        residual_norm=float(residual.double().norm()),
    )
