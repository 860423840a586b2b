"""Whole systems of the literature, put together from their parts: one call gives the hook's state."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradstats.compressors import Layerwise, Selector, make_selector
from gradstats.compressors.redsync import (
    DENSE_BELOW,
    SEARCH_ABOVE,
    redsync_selector,
)
from gradstats.hooks import CompressionState, dgc_warm_up
from gradstats.hooks.memory import MomentumCorrection
from gradstats.primitives.ratio import target_count

__all__ = ["dgc", "redsync"]


def dgc(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    ratio: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip: float | None = None,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> CompressionState:
    """Deep gradient compression (Lin et al. 2018): sampled threshold, momentum correction, clipping, warm-up.

    The optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : ``model.named_parameters()``.
    ratio : k/d in (0, 1].
    momentum, nesterov : see :class:`gradstats.hooks.memory.MomentumCorrection`.
    clip : norm of the whole gradient, of which a rank's may have N^(−½); None for no clipping.
    steps_per_epoch : gives the first four epochs 25, 6.25, 1.5625 and 0.4 %; None for no warm-up.
    options : of :class:`gradstats.hooks.CompressionState`.
    """
    compressor = make_selector("dgc", ratio)
    assert compressor is not None
    ratio_at = None
    if steps_per_epoch is not None:
        ratio_at = dgc_warm_up(steps_per_epoch, (0.25, 0.0625, 0.015625, 0.004, ratio))
    return CompressionState(
        compressor,
        memory=MomentumCorrection(momentum, nesterov=nesterov),
        named_parameters=named_parameters,
        clip=clip,
        ratio_at=ratio_at,
        **options,
    )


def redsync(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    ratio: float = 0.001,
    *,
    output_layer: Sequence[str] = (),
    quantise: bool = False,
    momentum: float = 0.9,
    nesterov: bool = True,
    clip: float | None = None,
    dense_steps: int = 0,
    dense_below: int = DENSE_BELOW,
    search_above: int = SEARCH_ABOVE,
    merge: int = 1 << 16,
    **options: Any,
) -> CompressionState:
    """RedSync (Fang et al. 2018, algorithms 4 and 5): layer by layer, each by its size, small messages fused.

    Small layers are averaged densely, middling ones selected by trimmed top-k, large ones by a searched threshold. The
    optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : ``model.named_parameters()``.
    ratio : k/d of every layer, in (0, 1].
    output_layer : name patterns (``fnmatch``) of the parameters that are never quantised.
    quantise : send one mean value a layer, see :class:`gradstats.compressors.redsync.MeanOfSign`.
    momentum, nesterov : see :class:`gradstats.hooks.memory.MomentumCorrection`.
    clip : norm of the whole gradient, of which a rank's may have N^(−½). It is known only when the backward pass is
        over, so that nothing is sent before.
    dense_steps : steps in the beginning that average densely.
    dense_below, search_above : elements of a layer, see :class:`gradstats.compressors.RedSync`.
    merge : elements of gradient to gather before a message is sent (tensor fusion).
    options : of :class:`gradstats.hooks.CompressionState`.
    """
    target_count(ratio, 1)  # raises on a bad ratio now, not in the first backward pass

    def choose(name: str, numel: int) -> Selector:
        output = any(fnmatch.fnmatchcase(name, pattern) for pattern in output_layer)
        return redsync_selector(numel, ratio, quantise and not output, search_above)

    return CompressionState(
        Layerwise(choose, merge=merge),
        memory=MomentumCorrection(momentum, nesterov=nesterov),
        named_parameters=named_parameters,
        dense_below=dense_below,
        clip=clip,
        ratio_at=(lambda step: 1.0 if step < dense_steps else None) if dense_steps else None,
        **options,
    )
