"""Everything this project uses of PyTorch that PyTorch does not promise; a new release is read against this file.

Each entry says what it is for. All were read in torch 2.13, and those with a branch in the older release it names.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of hooks, and GradBucket must be the class.

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

# dist.GradBucket is the same class, where mypy does not see it
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from gradstats.errors import InputError

__all__ = [
    "NESTED",
    "GradBucket",
    "Unwrapped",
    "after_backward",
    "backward_pass",
    "before_finalizing",
    "before_thread_pools_end",
    "calling_scaler",
    "comm_hooks",
    "copy_all",
    "fail_when_asked",
    "groups_of_rank",
    "has_step_hooks",
    "has_unscaled",
    "innermost_optimizer",
    "is_part",
    "kept_buffers",
    "nested_backward",
    "parts_of",
    "store_of",
    "tree_map",
    "unwrap",
    "values_of_sparse",
    "version",
    "without_names_of_events",
]


class Unwrapped(NamedTuple):
    """What is behind the wrappers of a model.

    Attributes
    ----------
    module : torch.nn.Module
        The innermost one: what the user defined, or what ``fully_shard`` was called on.
    ddp : DistributedDataParallel or None
        The DDP wrapper on the way to it, if there is one.
    """

    module: Any
    ddp: DistributedDataParallel | None


def unwrap(model: object) -> Unwrapped:
    """Find the model behind ``torch.compile``, DDP and ``DataParallel``, in whatever order they were put around it.

    ``fully_shard`` and accelerate change a model in place or wrap it by these. ``torch.compile`` keeps the module in
    ``_orig_mod``, and would put that name into those of all parameters. A module of the user's around DDP (a pair of
    networks, a Lightning module) stays the model, and DDP is found in it.

    Parameters
    ----------
    model : object
        Model, as the training has it. What is no module is returned as it is.

    Returns
    -------
    Unwrapped
        The model and its DDP wrapper.

    Raises
    ------
    InputError
        If there are several DDP models in it.
    """
    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            # each may wrap the others, so all are tried again after every one that was taken off
            ddp, model = model, model.module
        elif isinstance(model, torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, torch.nn.Module) and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            break
    # below a module of the user's: that one stays the model, so that names are those of its state_dict()
    if ddp is None and isinstance(model, torch.nn.Module):
        inside = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        if inside[1:]:
            raise InputError(f"{type(model).__name__} has {len(inside)} DDP models in it: give one")
        ddp = inside[0] if inside else None
    return Unwrapped(model, ddp)


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of PyTorch's that accelerate, Lightning or another has wrapped.

    Parameters
    ----------
    optimizer : object
        Optimizer, as the training has it. What holds none is returned as it is.
    """
    inner = optimizer
    # a wrapper may be an Optimizer that was never initialised
    while inner is not None and not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None)
    return optimizer if inner is None else inner


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks that users registered on a DDP model, with their states.

    Parameters
    ----------
    ddp : DistributedDataParallel
        The model. Its own mixed precision is such a hook too, which averages, and is left out.
    """
    # DDP keeps its own mixed precision in the same list as users' hooks
    return [] if ddp.mixed_precision is not None else list(ddp._comm_hooks)


# no hook of PyTorch's says who calls an optimizer
_SCALER = os.path.join("amp", "grad_scaler.py")


def calling_scaler() -> Any:
    """Return the loss scaler of PyTorch's, switched on, that calls what calls this, such as an optimizer's step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_SCALER):
            scaler = frame.f_locals.get("self")
            return scaler if getattr(scaler, "is_enabled", lambda: False)() else None
        frame = frame.f_back
    return None


def has_step_hooks(optimizer: object) -> bool:
    """Tell whether something calls the hooks of an optimizer's step: what ``register_step_pre_hook()`` fills.

    Parameters
    ----------
    optimizer : object
        What the user gave as an optimizer.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def parts_of(module: torch.nn.Module) -> list[object]:
    """Return the modules and parameters that a module itself holds now, in order.

    Parameters
    ----------
    module : torch.nn.Module
        Any module. Its ``children()`` leave out one that is there twice.
    """
    return [*module._modules.values(), *module._parameters.values()]


def has_unscaled(scaler: object) -> bool:
    """Tell whether a GradScaler has taken its scale off gradients of this step; ``update()`` makes it forget that.

    Parameters
    ----------
    scaler : object
        Loss scaler; one of another kind does not tell.
    """
    states = getattr(scaler, "_per_optimizer_states", {})
    # a stage for each optimizer: READY, UNSCALED or STEPPED
    stages = (getattr(state.get("stage"), "name", "READY") for state in states.values())
    return any(stage != "READY" for stage in stages)


def backward_pass() -> int:
    """Return the number of the backward pass that is under way in this thread, a new one for each; -1 if none is.

    In DDP's Join a hook is called without one.
    """
    return torch._C._current_graph_task_id()


NESTED = (
    "reentrant activation checkpointing cuts the backward pass into parts, and DDP's buckets come in several of them: "
    "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
)
"""What to do where :func:`nested_backward` ends before the exchange does."""


def nested_backward() -> bool:
    """Tell whether the backward pass under way is one within another, as reentrant activation checkpointing makes.

    Each such part of the model has a number of its own in :func:`backward_pass`, and an end of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # what calls backward() of an autograd.Function
        if frame.f_code.co_qualname == "BackwardCFunction.apply":
            return True
        frame = frame.f_back
    return False


def after_backward(call: Callable[[], None]) -> bool:
    """Call something when DDP has put the results into the gradients; tell whether a backward pass is under way.

    Parameters
    ----------
    call : callable
        Called without arguments. What it raises comes out of ``backward()``.
    """
    engine = torch.autograd.Variable._execution_engine
    try:
        # DDP queues its own callback after this one: ours must wait for another round
        engine.queue_callback(lambda: engine.queue_callback(call))
    except RuntimeError:
        # no backward pass: in DDP's Join a rank without inputs takes part in the others' exchange
        return False
    return True


def before_finalizing(call: Callable[[], None]) -> None:
    """Call something when the backward pass is over, before DDP waits for its buckets.

    Parameters
    ----------
    call : callable
        Called without arguments, unless no backward pass is under way. DDP queues its own callback when the last
        bucket is ready, and so after this one.
    """
    with contextlib.suppress(RuntimeError):
        torch.autograd.Variable._execution_engine.queue_callback(call)


def fail_when_asked(
    future: torch.futures.Future[torch.Tensor], fail: Callable[[object], NoReturn]
) -> None:
    """Have who asks a future for its value see an error, while DDP, which reads it from C++, sees the value.

    Parameters
    ----------
    future : torch.futures.Future
        Not set yet.
    fail : callable
        Raises the error.
    """
    future._set_unwrap_func(fail)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors in one call: parameters may be many and small.

    Parameters
    ----------
    targets, sources : sequence of torch.Tensor
        As many of each, of equal shapes.
    """
    torch._foreach_copy_(list(targets), list(sources))


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place.

    Parameters
    ----------
    tensor : torch.Tensor
        Any tensor.
    """
    return tensor._version


def is_part(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of another, as gradients are of buckets (``gradient_as_bucket_view``).

    Parameters
    ----------
    tensor : torch.Tensor
        Any tensor.
    """
    return tensor._is_view()


def values_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, coalesced or not, as a view.

    Parameters
    ----------
    tensor : torch.Tensor
        In coordinate format.
    """
    return tensor._values()


def kept_buffers(
    model: torch.nn.Module,
) -> Iterator[tuple[str, MutableMapping[str, torch.Tensor | None], str]]:
    """Yield the buffers that ``state_dict()`` keeps, also those that are None: name, those of its module, name there.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    """
    # not by state_dict() itself: hooks of wrappers give its entries other names
    for path, module in model.named_modules():
        for key in list(module._buffers.keys()):  # of a scripted module they are no dict
            if key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, module._buffers, key


def groups_of_rank() -> int:
    """Return the number of process groups this rank is in: PyTorch names a new one by it, and waits for that name."""
    world: Any = dist.distributed_c10d._world
    return len(world.pg_names)


def store_of(group: dist.ProcessGroup | None) -> Any:
    """Return the ``torch.distributed.Store`` that the ranks of a group share; None if it has none.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The ranks; the default group if None.
    """
    world: Any = dist.distributed_c10d._world
    _, store = world.pg_map.get(group or dist.group.WORLD, (None, None))
    return store


def before_thread_pools_end(call: Callable[[], None]) -> None:
    """Call something at interpreter exit while thread pools, such as zarr's, still run; ``atexit`` comes after them.

    Parameters
    ----------
    call : callable
        Called without arguments; the last registered comes first, as in ``concurrent.futures``, which uses this too.

    Raises
    ------
    RuntimeError
        If the interpreter exits already.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


@contextlib.contextmanager
def without_names_of_events() -> Iterator[None]:
    """Have torchrun's agent not look up the names of events that nobody records.

    It asks ``inspect.stack()`` for them, which reads the source of every frame, before it looks whether anybody records
    events. That is slow where the stack is deep, as in a notebook.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    original = dynamic_rendezvous.get_method_name
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    try:
        yield
    finally:
        dynamic_rendezvous.get_method_name = original
