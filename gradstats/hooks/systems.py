"""Whole systems of papers, put together from their parts: one call returns the state of the hook.

What a system does to each layer is in one function, from which the hook's state is built and by which
:func:`gradstats.network.plan` prices it.
"""

# Size: a system is a function and what it does to a layer, side by side to be compared.

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.compressors import (
    ChunkTopK,
    Compressor,
    Layerwise,
    Selector,
    SparseCompressor,
    make_compressor,
    make_selector,
    with_codec,
)
from gradstats.compressors.layerwise import MERGE
from gradstats.compressors.redsync import DENSE_BELOW, SEARCH_ABOVE, redsync_selector
from gradstats.compressors.selectors import Everything
from gradstats.compressors.sparse import Average
from gradstats.errors import InputError, options_of
from gradstats.hooks import CompressionState, LocalSteps, dgc_warm_up
from gradstats.hooks.corrections import MomentumCorrection, Nesterov
from gradstats.hooks.layout import check_patterns, matching
from gradstats.hooks.memory import ErrorFeedback, Memory
from gradstats.hooks.ratio import DGC_RATIOS
from gradstats.primitives.ratio import check_count, check_number, check_ratio

__all__ = ["SYSTEMS", "System", "dgc", "diloco", "make_state", "redsync", "sparseloco"]

Choice: TypeAlias = Callable[[str, int], Selector]
"""Function of a parameter's name and number of elements that returns the selector for it."""

# positions within a chunk of 4096 take 12 bits, values 2
_SPARSELOCO = Codec("chunk", "int2")


@dataclass(frozen=True, slots=True)
class System:
    """A paper's whole system.

    Attributes
    ----------
    build : callable
        Function of named parameters, a ratio and options that returns the hook's state.
    choose : callable
        Function of the number of dimensions of every parameter, by name and in the order of the model, and of a ratio.
        It returns how `build` selects in each parameter: a function of its name and number of elements that returns a
        :class:`gradstats.compressors.Selector`, one of everything where the parameter is averaged densely. A parameter
        that has no number of dimensions is taken for a matrix in the middle of the model.
    memory : type
        Class of the memory that `build` puts before the selection.
    nesterov : bool
        Whether the paper trains with Nesterov's momentum.
    warm_up : callable
        Function of a number of steps that returns the options of `build` for a warm-up of that many.
    rule : mapping of str to object
        Options of the threshold rule of the system's name that it selects with.
    """

    build: Callable[..., CompressionState]
    choose: Callable[[Mapping[str, int], float], Choice]
    memory: type[Memory]
    nesterov: bool
    warm_up: Callable[[int], dict[str, int]]
    rule: Mapping[str, Any] = field(default_factory=dict)


def dgc(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    ratio: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool | Nesterov = False,
    clip: float | None = None,
    steps_per_epoch: int | None = None,
    exclude: Sequence[str] = (),
    merge: int = MERGE,
    codec: Codec = PLAIN,
    **options: Any,
) -> CompressionState:
    """Build deep gradient compression: sampled threshold, momentum correction, masking, clipping and warm-up.

    Every layer is selected by itself. Parameters of fewer than two dimensions (biases, normalisation) are averaged
    densely, with the same momentum. The optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``.
    ratio : float
        Kept fraction k/d of every layer after the warm-up, in (0, 1].
    momentum : float
        Momentum m, in [0, 1), see :class:`gradstats.hooks.MomentumCorrection`.
    nesterov : bool or {"dgc", "redsync"}
        Form of Nesterov's momentum, if any.
    clip : float, optional
        Norm at which the whole gradient is clipped; each of N ranks clips its own to N^(−½) of it. None for no
        clipping.
    steps_per_epoch : int, optional
        Number of steps of an epoch. The first four epochs then keep 25, 6.25, 1.5625 and 0.4 %, those of them that are
        more than `ratio`. None for no warm-up.
    exclude : sequence of str
        Name patterns (``fnmatch``) of further parameters to average densely.
    merge : int
        Elements of gradient to gather before a message is sent.
    codec : Codec
        What positions and values are on the wire, see :class:`gradstats.compressors.SparseCompressor`.
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
    Source: deep gradient compression (Lin et al. 2018); its program for what is averaged densely and for the selection,
    see ``rule="program"`` of :class:`gradstats.thresholds.DGC`.

    Differs from the paper: messages of small layers are merged; weight decay, an option of the state, is added before
    the accumulation, where the program gives it a momentum of its own afterwards.
    """
    named = list(named_parameters)
    choose = _dgc_choice({name: p.dim() for name, p in named}, ratio)
    # excluded, and not sent whole: their momentum is then one of the mean, as in DGC's program
    vectors = [glob.escape(name) for name, p in named if choose(name, p.numel()).whole]
    if steps_per_epoch is not None:
        # a schedule of the user's own goes before the paper's
        options.setdefault("ratio_at", dgc_warm_up(steps_per_epoch, DGC_RATIOS[:-1], ratio))
    return CompressionState(
        Layerwise(choose, merge=merge, codec=codec, ratio=ratio),
        memory=MomentumCorrection(momentum, nesterov=nesterov),
        named_parameters=named,
        exclude=[*check_patterns(exclude, "exclude"), *vectors],
        clip=clip,
        **options,
    )


_DGC_RULE = {"rule": "program"}


def _dgc_choice(dimensions: Mapping[str, int], ratio: float) -> Choice:
    """Return how DGC treats each parameter: vectors are averaged densely."""

    def choose(name: str, numel: int) -> Selector:
        if dimensions.get(name, 2) < 2:
            return Everything()
        return make_selector("dgc", ratio, **_DGC_RULE)

    return choose


def redsync(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    ratio: float = 0.001,
    *,
    output_layer: Sequence[str] | None = None,
    quantise: bool = False,
    momentum: float = 0.9,
    nesterov: bool | Nesterov = True,
    clip: float | None = None,
    dense_steps: int = 0,
    dense_below: int = DENSE_BELOW,
    topk_below: int = DENSE_BELOW,
    search_above: int = SEARCH_ABOVE,
    merge: int = MERGE,
    codec: Codec = PLAIN,
    **options: Any,
) -> CompressionState:
    """Build RedSync: layer by layer, each treated according to its size, small messages fused.

    Small layers are averaged densely, during the backward pass and with the same momentum. Of the others the smallest
    are selected by plain top-k, those of middle size by trimmed top-k, and large ones by a searched threshold. The
    optimizer must be SGD without a momentum of its own.

    Parameters
    ----------
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``.
    ratio : float
        Kept fraction k/d of every layer, in (0, 1].
    output_layer : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters that are never quantised. If None, the last parameter of at least
        two dimensions and those after it.
    quantise : bool
        Whether to send one mean value for each layer, see :class:`gradstats.compressors.redsync.MeanOfSign`.
    momentum : float
        Momentum m, in [0, 1), see :class:`gradstats.hooks.MomentumCorrection`.
    nesterov : bool or {"dgc", "redsync"}
        Form of Nesterov's momentum, if any: true for the one that DGC's program and PyTorch have, ``"redsync"`` for
        algorithm 4 as published.
    clip : float, optional
        Norm at which the whole gradient is clipped; each of N ranks clips its own to N^(−½) of it. The norm is known
        only when the backward pass is over, so nothing is then sent before. None for no clipping.
    dense_steps : int
        Number of steps in the beginning that average densely.
    dense_below : int
        Number of elements below which a layer is averaged densely: the paper's 128 KB.
    topk_below : int
        Number of elements below which plain top-k selects: the paper's thsd1, for which it gives no number. By
        default plain top-k has what a smaller `dense_below` leaves to it.
    search_above : int
        Number of elements from which on a layer's threshold is searched: the paper's 4 MB.
    merge : int
        Elements of gradient to gather before a message is sent (the paper's tensor fusion).
    codec : Codec
        What positions and values are on the wire, see :class:`gradstats.compressors.SparseCompressor`.
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
    a layer; a quantised layer keeps corrected − sent as its residual. `docs/concepts/errata.md` lists what is wrong in
    the paper's algorithms.
    """
    check_ratio(ratio)  # now, not in the first backward pass
    named = list(named_parameters)
    choose = _redsync_choice(
        {name: p.dim() for name, p in named},
        ratio,
        quantise,
        output_layer=output_layer,
        topk_below=topk_below,
        search_above=search_above,
        dense_below=dense_below,
    )
    if dense_steps := check_count(dense_steps, "dense_steps", 0):
        options.setdefault("ratio_at", lambda step: 1.0 if step < dense_steps else None)
    return CompressionState(
        Layerwise(choose, merge=merge, codec=codec, ratio=ratio),
        memory=MomentumCorrection(momentum, nesterov=nesterov),
        named_parameters=named,
        clip=clip,
        **options,
    )


def _redsync_choice(
    dimensions: Mapping[str, int],
    ratio: float,
    quantise: bool = False,
    *,
    output_layer: Sequence[str] | None = None,
    topk_below: int = DENSE_BELOW,
    search_above: int = SEARCH_ABOVE,
    dense_below: int = DENSE_BELOW,
) -> Choice:
    """Return how RedSync treats each parameter: by its size, and without quantising the output layer."""
    if output_layer is None:
        names = list(dimensions)
        # the last matrix is taken for the output layer's, and what follows for its bias
        matrices = [i for i, name in enumerate(names) if dimensions[name] > 1]
        output_layer = [glob.escape(name) for name in names[max(matrices, default=len(names)) :]]
    is_output = matching(check_patterns(output_layer, "output_layer"))
    topk_below = check_count(topk_below, "topk_below", 0)
    search_above = check_count(search_above, "search_above", 0)
    dense_below = check_count(dense_below, "dense_below", 0)

    def choose(name: str, numel: int) -> Selector:
        # everything of it, and not dense_below of the state: so it goes out during the backward pass
        if numel < dense_below:
            return Everything()
        output = is_output(name)
        return redsync_selector(
            numel, ratio, quantise and not output, search_above, topk_below=topk_below
        )

    return choose


def _quantised(*args: Any, **options: Any) -> CompressionState:
    return redsync(*args, **{"quantise": True, **options})


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def diloco(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    steps: int = 500,
    *,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    compressor: Compressor | Selector | None = None,
    **options: Any,
) -> LocalSteps:
    """Build DiLoCo: local steps, and Nesterov's momentum on the mean of the pseudo-gradients.

    Parameters
    ----------
    model : torch.nn.Module
        The model, not wrapped in DDP.
    optimizer : torch.optim.Optimizer or sequence of torch.optim.Optimizer
        Optimizer of the local steps; the paper's is AdamW.
    steps : int
        Number of local steps H from one exchange to the next.
    learning_rate : float
        Learning rate of the outer optimizer, above 0.
    momentum : float
        Momentum of the outer optimizer, in (0, 1).
    compressor : Compressor or Selector, optional
        What is sent of the pseudo-gradients; all, as published, if None.
    **options : Any
        Further options of :class:`gradstats.hooks.LocalSteps`.

    Returns
    -------
    LocalSteps
        Context manager around the training loop.

    Raises
    ------
    InputError
        If an option is out of range.

    Notes
    -----
    Source: DiLoCo (Douillard et al. 2023), algorithm 1 and its settings.
    """
    outer = torch.optim.SGD(
        _trained(model),
        lr=check_number(learning_rate, "learning_rate", 0, math.inf),
        momentum=check_number(momentum, "momentum", 0, 1),
        nesterov=True,
    )
    return LocalSteps(model, optimizer, outer, steps, compressor, **options)


def sparseloco(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    steps: int = 30,
    *,
    learning_rate: float = 1.0,
    ratio: float = 64 / 4096,
    chunk: int = 4096,
    decay: float = 0.95,
    codec: Codec = _SPARSELOCO,
    average: Average = "ranks",
    **options: Any,
) -> LocalSteps:
    """Build SparseLoCo: local steps, and the largest of every chunk of pseudo-gradient plus a decaying residual.

    The residual stands in for the outer momentum. A position takes 12 bits and 16 for each chunk, a value 2 bits and
    the scale of 256 values.

    Parameters
    ----------
    model : torch.nn.Module
        The model, not wrapped in DDP.
    optimizer : torch.optim.Optimizer or sequence of torch.optim.Optimizer
        Optimizer of the local steps; the paper's is AdamW.
    steps : int
        Number of local steps H from one exchange to the next.
    learning_rate : float
        Learning rate α of the outer SGD, above 0; it has no momentum.
    ratio : float
        Kept fraction k/d of every chunk, in (0, 1].
    chunk : int
        Number of elements of a chunk.
    decay : float
        What the residual is multiplied by before it is added, in (0, 1].
    codec : Codec
        What positions and values are on the wire.
    average : {"ranks", "senders"}
        What a sum is divided by: ``"ranks"`` is the paper's formula, ``"senders"`` what the programs of SparseLoCo and
        DeMo do.
    **options : Any
        Further options of :class:`gradstats.hooks.LocalSteps`.

    Returns
    -------
    LocalSteps
        Context manager around the training loop.

    Raises
    ------
    InputError
        If an option is out of range.

    Notes
    -----
    Source: SparseLoCo (Sarfi et al. 2025), algorithm 1.

    Differs from the paper: chunks are cut from the flat vector (:class:`gradstats.compressors.ChunkTopK`); its program
    rounds to four bins around the mean of a tensor's values, where here they are 0 and plus or minus the largest of 256
    values (:class:`gradstats.collectives.Codec`); here a result of `average` is not normalised further.
    """
    learning_rate = check_number(learning_rate, "learning_rate", 0, math.inf)
    return LocalSteps(
        model,
        optimizer,
        torch.optim.SGD(_trained(model), lr=learning_rate),
        steps,
        SparseCompressor(ChunkTopK(ratio, chunk), codec),
        ErrorFeedback(decay),
        average=average,
        **options,
    )


def _dgc_warm_up(steps: int) -> dict[str, int]:
    # rounded up: as many epochs as there are ratios, over at least so many steps
    return {"steps_per_epoch": -(-steps // len(DGC_RATIOS[:-1]))}


def _redsync_warm_up(steps: int) -> dict[str, int]:
    return {"dense_steps": steps}


SYSTEMS: dict[str, System] = {
    "dgc": System(dgc, _dgc_choice, MomentumCorrection, False, _dgc_warm_up, _DGC_RULE),
    "redsync": System(redsync, _redsync_choice, MomentumCorrection, True, _redsync_warm_up),
    "redsync-quantised": System(
        _quantised,
        lambda dimensions, ratio: _redsync_choice(dimensions, ratio, quantise=True),
        MomentumCorrection,
        True,
        _redsync_warm_up,
    ),
}
"""Whole systems by name."""


def make_state(
    name: str,
    ratio: float,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    compressor_options: dict[str, Any] | None = None,
    **options: Any,
) -> CompressionState:
    """Build the hook's state of a system or compressor by name.

    Parameters
    ----------
    name : str
        One of :data:`SYSTEMS`, or a name that :func:`gradstats.compressors.make_compressor` takes, ``threshold:dgc``
        and the like for the bare threshold rule among them.
    ratio : float
        Kept fraction k/d, in (0, 1].
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``.
    compressor_options : dict, optional
        Options of the compressor; those of a system are options of its function.
    **options : Any
        Options of the system's function, or of :class:`gradstats.hooks.CompressionState`.

    Returns
    -------
    CompressionState
        State for :func:`gradstats.hooks.compression_hook`.

    Raises
    ------
    InputError
        If the name or an option is unknown or out of range, or the name is ``none``, which has no state.
    """
    arguments = compressor_options or {}
    if name in SYSTEMS:
        arguments = with_codec(name, arguments)
        with options_of("system", name):
            return SYSTEMS[name].build(named_parameters, ratio, **arguments, **options)
    compressor = make_compressor(name, ratio, **arguments)
    if compressor is None:
        raise InputError("none is PyTorch's own averaging: register its allreduce_hook")
    return CompressionState(compressor, named_parameters=named_parameters, **options)
