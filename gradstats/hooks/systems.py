"""Whole systems of papers, put together from their parts: one call returns the state of the hook."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradstats.compressors import Layerwise, Selector, make_selector
from gradstats.compressors.layerwise import MERGE
from gradstats.compressors.redsync import DENSE_BELOW, SEARCH_ABOVE, redsync_selector
from gradstats.hooks import CompressionState, dgc_warm_up
from gradstats.hooks.memory import MomentumCorrection
from gradstats.primitives.ratio import check_ratio

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
    """Build deep gradient compression: sampled threshold, momentum correction, clipping and warm-up.

    The optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``.
    ratio : float
        Kept fraction k/d after the warm-up, in (0, 1].
    momentum : float
        Momentum m, in [0, 1), see :class:`gradstats.hooks.memory.MomentumCorrection`.
    nesterov : bool
        Whether to use Nesterov's momentum.
    clip : float, optional
        Norm at which the whole gradient is clipped; each of N ranks clips its own to N^(−½) of it. None for no
        clipping.
    steps_per_epoch : int, optional
        Number of steps of an epoch. The first four epochs then keep 25, 6.25, 1.5625 and 0.4 %. None for no warm-up.
    **options : Any
        Further options of :class:`gradstats.hooks.CompressionState`.

    Returns
    -------
    CompressionState
        State for :func:`gradstats.hooks.compression_hook`.

    Raises
    ------
    InputError
        If an option is out of range.

    Notes
    -----
    Source: deep gradient compression (Lin et al. 2018).

    Differs from the paper, which selects in each layer: here one threshold serves the whole gradient.
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
    merge: int = MERGE,
    **options: Any,
) -> CompressionState:
    """Build RedSync: layer by layer, each treated according to its size, small messages fused.

    Small layers are averaged densely, layers of middle size are selected by trimmed top-k, and large layers by a
    searched threshold. The optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``.
    ratio : float
        Kept fraction k/d of every layer, in (0, 1].
    output_layer : sequence of str
        Name patterns (``fnmatch``) of the parameters that are never quantised.
    quantise : bool
        Whether to send one mean value for each layer, see :class:`gradstats.compressors.redsync.MeanOfSign`.
    momentum : float
        Momentum m, in [0, 1), see :class:`gradstats.hooks.memory.MomentumCorrection`.
    nesterov : bool
        Whether to use Nesterov's momentum.
    clip : float, optional
        Norm at which the whole gradient is clipped; each of N ranks clips its own to N^(−½) of it. The norm is known
        only when the backward pass is over, so nothing is then sent before. None for no clipping.
    dense_steps : int
        Number of steps in the beginning that average densely.
    dense_below : int
        Number of elements below which a layer is averaged densely.
    search_above : int
        Number of elements from which on a layer's threshold is searched.
    merge : int
        Elements of gradient to gather before a message is sent (the paper's tensor fusion).
    **options : Any
        Further options of :class:`gradstats.hooks.CompressionState`.

    Returns
    -------
    CompressionState
        State for :func:`gradstats.hooks.compression_hook`.

    Raises
    ------
    InputError
        If an option is out of range.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), algorithms 4 and 5 and sections 5.3 to 5.6.

    Differs from the paper: messages are fused by the size of the gradient; the binary search runs on all elements of
    a layer; a quantised layer keeps corrected − sent as its residual. `docs/concepts/errata.md` lists what is wrong
    in the paper's algorithms.
    """
    check_ratio(ratio)  # now, not in the first backward pass

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
