"""A model's buffers in a checkpoint: of each rank, whose own they stay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradstats.errors import InputError
from gradstats.hooks.checkpoint import pack_state, unpack_state
from gradstats.hooks.torch_private import kept_buffers
from gradstats.hooks.units import local_part

__all__ = ["pack_buffers", "unpack_buffers"]


def pack_buffers(model: torch.nn.Module) -> bytes:
    """Return a model's buffers as bytes, as ``state_dict()`` keeps them; of sharded ones what this rank holds.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    """
    # bytes: some are made, or grow, in the first forward pass, which a template of a new model has not seen
    state = {}
    for name, buffers, key in kept_buffers(model):
        here = buffers[key]
        state[name] = None if here is None else local_part(here.detach()).clone()
    return pack_state(state)


def unpack_buffers(model: torch.nn.Module, data: bytes) -> Callable[[], None]:
    """Check what :func:`pack_buffers` made bytes of; nothing is changed.

    Parameters
    ----------
    model : torch.nn.Module
        The model that is to have them.
    data : bytes
        Part of a checkpoint.

    Returns
    -------
    callable
        What restores them.

    Raises
    ------
    InputError
        If the bytes are damaged, or of another model.
    """
    saved = unpack_state(data, "buffers")
    places = {name: (buffers, key) for name, buffers, key in kept_buffers(model)}
    if saved.keys() != places.keys():
        raise InputError("the checkpoint has other buffers than this model")
    anywhere = next(model.parameters()).device
    for name, values in saved.items():
        buffers, key = places[name]
        here, shape = buffers[key], getattr(values, "shape", None)
        if here is None or shape == local_part(here).shape:
            continue
        # what a first forward pass makes, or makes larger, is whole in the checkpoint
        if shape is None or local_part(here) is not here or here.numel() > shape.numel():
            raise InputError(
                f"the checkpoint's buffer {name} has shape {tuple(shape or ())}, not {tuple(here.shape)}"
            )

    def restore() -> None:
        for name, values in saved.items():
            buffers, key = places[name]
            here = buffers[key]
            if here is not None and local_part(here).shape == values.shape:
                local_part(here.detach()).copy_(values)
            elif values is not None:
                buffers[key] = values.to(anywhere if here is None else here.device)

    return restore
