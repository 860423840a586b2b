"""What a restart needs of a rank: every rank saves its own entry, and loads that one or nothing."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.plain import all_gather_flags
from gradstats.compressors import Compressor
from gradstats.errors import InputError, first_line
from gradstats.hooks.gradient import FlatGradient, MemoryPart
from gradstats.hooks.torch_private import tree_map
from gradstats.hooks.units import as_sharded, local_part
from gradstats.primitives.ratio import shown

__all__ = [
    "Checkpoint",
    "Restorable",
    "check_equal",
    "entry_for_rank",
    "entry_of_rank",
    "load_together",
    "pack_optimizer",
    "pack_state",
    "unpack_optimizer",
    "unpack_state",
]

_PLAIN = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))


def entry_for_rank(rank: int, content: dict[str, Any]) -> dict[str, Any]:
    """Return what one rank saves under a name of its own, so that all ranks' entries fit into one checkpoint.

    Parameters
    ----------
    rank : int
        Number of the rank.
    content : dict
        What it saves.
    """
    return {f"rank{rank}": content}


def entry_of_rank(rank: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what one rank saved.

    Parameters
    ----------
    rank : int
        Number of the rank.
    state : mapping
        Entries of any ranks, as :func:`entry_for_rank` made them.

    Raises
    ------
    InputError
        If this rank's is not among them.
    """
    if f"rank{rank}" not in state:
        has = ", ".join(map(str, state)) or "nothing"
        raise InputError(
            f"this is rank {rank}, and the checkpoint holds {has}: every rank saves and loads its own"
        )
    entry: Mapping[str, Any] = state[f"rank{rank}"]
    return entry


def check_equal(what: str, saved: Any, here: int) -> None:
    """Check that there are as many of something as there were.

    Parameters
    ----------
    what : str
        What is counted, in the plural.
    saved : int
        Number in the checkpoint.
    here : int
        Number now.

    Raises
    ------
    InputError
        If they differ.
    """
    if int(saved) != here:
        raise InputError(f"the checkpoint is of {saved} {what}, and these are {here}")


class Restorable(Protocol):
    """What can be saved, and restored from that."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs."""

    def load_state_dict(self, state: Any, /) -> None:
        """Restore what :meth:`state_dict` returned."""


def load_together(parts: Sequence[Restorable], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore several parts of one training, all of them or none.

    Parameters
    ----------
    parts : sequence of Restorable
        Parts. What their ``state_dict()`` returns is not changed by a later ``load_state_dict()``.
    saved : sequence of mapping
        What the ``state_dict()`` of each returned.

    Raises
    ------
    InputError
        As their ``load_state_dict()`` does. Nothing has been restored then.
    """
    before = [part.state_dict() for part in parts]
    try:
        for part, entry in zip(parts, saved, strict=True):
            part.load_state_dict(entry)
    except BaseException:
        for part, entry in zip(parts, before, strict=True):
            part.load_state_dict(entry)
        raise


class Checkpoint:
    """What a restart needs of one state of compression on this rank.

    Parameters
    ----------
    compressor : Compressor
        Its state is saved as bytes.
    gradient : FlatGradient
        Its memory is saved as tensors, by parameter.
    process_group : torch.distributed.ProcessGroup, optional
        The group of ranks, by whose numbers entries are named.
    """

    def __init__(
        self,
        compressor: Compressor,
        gradient: FlatGradient,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._compressor = compressor
        self._gradient = gradient
        self._group = process_group
        # a loaded entry whose memory waits until there is room for it, in the first step
        self._pending: Mapping[str, Any] | None = None
        self._rank_and_world: tuple[int, int] | None = None
        self._agreed = False

    def save(self, step: int) -> dict[str, Any]:
        """Return this rank's entry.

        Parameters
        ----------
        step : int
            Number of the next step.

        Returns
        -------
        dict
            What :meth:`gradstats.hooks.CompressionState.state_dict` promises.
        """
        rank, world = self._identity()
        memory = {part.key: self._saved_tensors(part) for part in self._gradient.memory_parts()}
        content = {
            "step": step,
            "world_size": world,
            **memory,
            "memory_counts": self._gradient.memory.state_dict(),
            "system": type(self._compressor).__name__,
            "compressor": pack_state(self._compressor.state_dict()),
        }
        return entry_for_rank(rank, content)

    def load(self, state: Mapping[str, Any]) -> int:
        """Restore this rank's entry; its memory once there is room for it.

        Parameters
        ----------
        state : mapping
            Entries, this rank's among them.

        Returns
        -------
        int
            Number of the next step.

        Raises
        ------
        InputError
            If the entry is missing or does not fit. Nothing has been restored then.
        """
        rank, world = self._identity()
        entry = entry_of_rank(rank, state)
        check_equal("ranks", entry["world_size"], world)
        name, memory = type(self._compressor).__name__, self._gradient.memory
        if entry["system"] != name:
            raise InputError(f"the checkpoint is of {entry['system']}, and this is {name}")
        if (entry["step"] or entry["memory"]) and memory.kinds != tuple(entry["memory"]):
            saved, here = (", ".join(k) or "nothing" for k in (entry["memory"], memory.kinds))
            raise InputError(
                f"the checkpoint's memory holds {saved} where this one holds {here}: build the state with the same "
                "memory, and with named_parameters before a distributed checkpoint is loaded into it"
            )
        if entry["memory"] and self._gradient.layout.known:
            self._check_parameters(entry)
        step, compressor = int(entry["step"]), unpack_state(entry["compressor"], "compressor")
        before = pack_state(self._compressor.state_dict())
        try:
            self._compressor.load_state_dict(compressor)
            if entry.get("memory_counts"):
                memory.load_state_dict(entry["memory_counts"])
        except BaseException:
            self._compressor.load_state_dict(unpack_state(before, "compressor"))
            raise
        self._agreed = False
        self._pending = entry
        if self._gradient.allocated:
            self._restore(entry)
        return step

    def restore_memory(self) -> None:
        """Fill the memory, which has just been allocated, from an entry loaded before.

        Raises
        ------
        InputError
            If the entry is of another model. The memory is zero then.
        """
        if self._pending is not None:
            self._check_parameters(self._pending)
            self._restore(self._pending)

    def agree(self, step: int, device: torch.device) -> None:
        """In the first step of a run, check that all ranks are at the same one: checkpoints may differ.

        Parameters
        ----------
        step : int
            Number of this rank's step.
        device : torch.device
            Device of the gradients.

        Raises
        ------
        InputError
            If the ranks begin at different steps, on all of them.
        """
        if self._agreed:
            return
        self._identity()
        steps = all_gather_flags(step, self._group, device)
        if len(set(steps)) > 1:
            raise InputError(
                f"the ranks begin at steps {', '.join(map(str, steps))}: load checkpoints of one step on all of them"
            )
        self._agreed = True

    def _identity(self) -> tuple[int, int]:
        """Return this rank and the number of ranks, as they were while the process group lived."""
        if dist.is_initialized():
            self._rank_and_world = dist.get_rank(self._group), dist.get_world_size(self._group)
        return self._rank_and_world or (0, 1)

    def _saved_tensors(self, part: MemoryPart) -> dict[str, dict[str, torch.Tensor]]:
        """Return what a part of the memory holds, by kind and parameter."""
        if self._gradient.allocated:
            return {
                kind: {  # zeros for what lost its place to a sparse gradient: a template made before lists it
                    n: tensor[part.slots[n]].clone() if n in part.slots else blank
                    for n, blank in self._blank(part).items()
                }
                for kind, tensor in part.tensors.items()
            }
        if self._pending is not None:
            return dict(self._pending.get(part.key, {}))
        # a template, which a distributed checkpoint loads into
        kinds = part.kinds if self._gradient.layout.known else ()
        return {kind: self._blank(part) for kind in kinds}

    def _blank(self, part: MemoryPart) -> dict[str, torch.Tensor]:
        """Return zeros for every parameter that a part of the memory ever had, in the model's order."""
        dtype = self._gradient.layout.dtype
        return {n: torch.zeros(d, dtype=dtype) for n, d in part.sizes.items()}

    def _check_parameters(self, entry: Mapping[str, Any]) -> None:
        """Check that an entry is of this model's parameters."""
        for part in self._gradient.memory_parts():
            for tensors in entry.get(part.key, {}).values():
                if list(tensors) != list(part.sizes):
                    odd = sorted(set(tensors) ^ set(part.sizes)) or ["order of parameters"]
                    raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
                for name, numel in part.sizes.items():
                    if tensors[name].numel() != numel:
                        raise InputError(
                            f"the checkpoint's residual of {name} has {tensors[name].numel()} elements, not {numel}"
                        )

    def _restore(self, entry: Mapping[str, Any]) -> None:
        """Copy an entry's tensors into the memory."""
        for part in self._gradient.memory_parts():
            # a checkpoint of before the first step may hold nothing
            for tensor in part.tensors.values():
                tensor.zero_()
            for kind, saved in entry.get(part.key, {}).items():
                for name, slot in part.slots.items():
                    part.tensors[kind][slot].copy_(saved[name])
        self._pending = None


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes: a distributed checkpoint that is loaded into a template cannot follow its structure.

    Parameters
    ----------
    state : mapping
        What changes its structure from step to step, such as what a compressor or an optimizer keeps.

    Returns
    -------
    bytes
        For :func:`unpack_state`.

    Raises
    ------
    InputError
        If it holds what no checkpoint can be read back with.
    """

    def plain(value: object) -> object:
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, _PLAIN):
            raise InputError(
                f"a checkpoint holds tensors, numbers and text, not {shown(value)}: it could not be read back"
            )
        return value

    stream = io.BytesIO()
    torch.save(tree_map(plain, state), stream)
    return stream.getvalue()


def unpack_state(data: bytes, what: str) -> dict[str, Any]:
    """Return what :func:`pack_state` made bytes of.

    Parameters
    ----------
    data : bytes
        Part of a checkpoint.
    what : str
        Its name, for an error.

    Raises
    ------
    InputError
        If the bytes are damaged.
    """
    try:
        return dict(torch.load(io.BytesIO(data), weights_only=True))
    except Exception as error:  # whatever damaged bytes raise
        raise InputError(f"the checkpoint's {what} cannot be read: {first_line(error)}") from None


def pack_optimizer(optimizer: torch.optim.Optimizer) -> bytes:
    """Return an optimizer's state as bytes; of what is sharded, what this rank holds, without the mesh of this run.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer of parameters, sharded or not.

    Raises
    ------
    InputError
        If its state is sharded in another way than its parameters.
    """
    state = optimizer.state_dict()
    parameters = _parameters(optimizer)
    sharded: dict[int, list[str]] = {}
    for i, values in state["state"].items():
        local = {
            n: local_part(v)
            for n, v in values.items()
            if isinstance(v, torch.Tensor) and local_part(v) is not v
        }
        if any(v.shape != local_part(parameters[i]).shape for v in local.values()):
            raise InputError(
                f"{type(optimizer).__name__} shards its state in another way than its parameters: save it by itself"
            )
        sharded[i] = list(local)
        state["state"][i] = {**values, **local}
    return pack_state({**state, "class": type(optimizer).__name__, "sharded": sharded})


def unpack_optimizer(optimizer: torch.optim.Optimizer, data: bytes, what: str) -> dict[str, Any]:
    """Return what :func:`pack_optimizer` made bytes of, for ``load_state_dict()``, sharded as the parameters are.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer that is to load it.
    data : bytes
        Part of a checkpoint.
    what : str
        Its name, for an error.

    Raises
    ------
    InputError
        If the bytes are damaged, or of another optimizer.
    """
    state = unpack_state(data, what)
    name, sharded = state.pop("class"), state.pop("sharded")
    sizes, saved = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if (name, saved) != (type(optimizer).__name__, sizes):
        raise InputError(
            f"the checkpoint's {what} is {name} with groups of {saved} parameters, and this is "
            f"{type(optimizer).__name__} with {sizes}"
        )
    parameters = _parameters(optimizer)
    for i, names in sharded.items():
        for each in names:
            state["state"][i][each] = as_sharded(parameters[i], state["state"][i][each])
    return state


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order in which its state numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]
