"""What a restart needs of a rank: every rank saves its own entry, and loads that one or nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from gradstats.compressors import Compressor
from gradstats.errors import InputError, first_line
from gradstats.hooks.contents import check_count_of, check_values, field, refusing, seal, unseal
from gradstats.hooks.gradient import FlatGradient, MemoryPart
from gradstats.hooks.memory import Memory
from gradstats.hooks.optimizers import parameters_of
from gradstats.hooks.torch_private import tree_map
from gradstats.hooks.units import as_sharded, local_part
from gradstats.primitives.ratio import shown

__all__ = [
    "Checkpoint",
    "Restorable",
    "load_all",
    "pack_optimizer",
    "pack_state",
    "try_all",
    "unpack_optimizer",
    "unpack_state",
]

# what torch.load(weights_only=True) reads back
_PLAIN = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))


def load_all(parts: Sequence[Restorable], saved: Sequence[Mapping[str, Any]]) -> None:
    """Load several parts of one training, all of them or none.

    Parameters
    ----------
    parts : sequence of Restorable
        Parts. What their ``state_dict()`` returns is not changed by a later ``load_state_dict()``.
    saved : sequence of mapping
        What the ``state_dict()`` of each returned.

    Raises
    ------
    InputError
        If one cannot load it. All are as they were then.
    """
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    try:
        with refusing():
            for part, entry in zip(parts, saved, strict=True):
                part.load_state_dict(entry)
    # an interrupt, too: one part of another run among those of this one would go unnoticed
    except BaseException:
        for part, entry in zip(parts, before, strict=True):
            part.load_state_dict(entry)
        raise


def try_all(parts: Sequence[Restorable], saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that several parts can load what was saved; they are as they were afterwards.

    Parameters
    ----------
    parts : sequence of Restorable
        Parts, as for :func:`load_all`.
    saved : sequence of mapping
        What they are to load.

    Raises
    ------
    InputError
        If one cannot.
    """
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    load_all(parts, saved)
    for part, entry in zip(parts, before, strict=True):
        part.load_state_dict(entry)


class Restorable(Protocol):
    """What can be saved, and restored from that."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs."""

    def load_state_dict(self, state: Any, /) -> None:
        """Restore what :meth:`state_dict` returned."""


class Checkpoint:
    """What a restart needs of one state of compression on this rank.

    Parameters
    ----------
    compressor : Compressor
        Its state is saved as bytes.
    gradient : FlatGradient
        Its memory is saved as tensors, by parameter.
    process_group : torch.distributed.ProcessGroup, optional
        The group of ranks, of whose number an entry is.
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
        return seal(self._identity()[0], self.content(step))

    def content(self, step: int) -> dict[str, Any]:
        """Return what is in this rank's entry.

        Parameters
        ----------
        step : int
            Number of the next step.
        """
        memory = {part.key: self._saved_tensors(part) for part in self._gradient.memory_parts()}
        return {
            "step": step,
            "world_size": self._identity()[1],
            **memory,
            "memory_counts": self._gradient.memory.state_dict(),
            "system": type(self._compressor).__name__,
            "compressor": pack_state(self._compressor.state_dict()),
        }

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
            If the entry is missing, damaged, or does not fit. Nothing has been restored then.
        """
        with refusing():
            return self.prepare(unseal(self._identity()[0], state))()

    def prepare(self, entry: Mapping[str, Any]) -> Callable[[], int]:
        """Check the content of an entry, whole; nothing is changed.

        Parameters
        ----------
        entry : mapping
            What :meth:`content` returned.

        Returns
        -------
        callable
            What restores it, and returns the number of the next step.

        Raises
        ------
        InputError
            If it does not fit.
        """
        check_count_of("ranks", entry.get("world_size"), self._identity()[1])
        name, memory = type(self._compressor).__name__, self._gradient.memory
        if entry.get("system") != name:
            raise InputError(f"the checkpoint is of {entry.get('system')}, and this is {name}")
        step = field(entry, "step", int)
        if step < 0:
            raise InputError(f"the checkpoint's step must not be negative, and is {step}")
        tensors = field(entry, "memory", Mapping)  # type: ignore[type-abstract]
        # saved before the first step there may be no tensors yet
        if (step or tensors) and memory.kinds != tuple(tensors):
            was, is_now = (", ".join(k) or "nothing" for k in (tensors, memory.kinds))
            raise InputError(
                f"the checkpoint's memory holds {was} where this one holds {is_now}: build the state with the same "
                "memory, and with named_parameters before a distributed checkpoint is loaded into it"
            )
        self._check_tensors(entry)
        if self._gradient.layout.known and tensors:
            self._check_parameters(entry)
        counts, numbers = entry.get("memory_counts") or {}, memory.state_dict()
        if counts.keys() != numbers.keys():
            odd = min(counts.keys() ^ numbers.keys())
            raise InputError(f"the checkpoint's memory and this one do not both count {odd}")
        for what, count in counts.items():
            # isinstance would take True for 1
            if type(count) is not type(numbers[what]) or (isinstance(count, int) and count < 0):
                raise InputError(f"the checkpoint's memory cannot count {count!r} of {what}")
        compressor = unpack_state(field(entry, "compressor", bytes), "compressor")
        here = self._compressor.state_dict()
        if compressor.keys() != here.keys():
            odd = min(compressor.keys() ^ here.keys())
            raise InputError(f"the checkpoint's {name} and this one do not both have {odd}")
        parts: tuple[Restorable, ...] = (self._compressor, memory)
        # loaded and taken back: what a part refuses only the part knows
        try_all(parts, (compressor, counts))

        def restore() -> int:
            load_all(parts, (compressor, counts))
            # kept until it is in the memory, so that a checkpoint saved before that has it, too
            self._pending = entry
            if self._gradient.allocated:
                self._restore(entry)
            return step

        return restore

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

    def restore_part(self, memory: Memory, name: str) -> None:
        """Fill a memory of one compressed parameter alone from an entry loaded before, if there is one.

        Parameters
        ----------
        memory : Memory
            Allocated, and zero.
        name : str
            Name of the parameter.
        """
        saved = (self._pending or {}).get("memory", {})
        for kind, tensor in memory.tensors().items():
            # what does not fit is of another model, which the step is about to say
            values = saved.get(kind, {}).get(name)
            if values is not None and values.shape == tensor.shape:
                tensor.copy_(values)

    def _identity(self) -> tuple[int, int]:
        """Return this rank and the number of ranks in its group, as they were while the process group lived."""
        if dist.is_initialized():
            # asked each time while there is a group: it may have been made after the state
            # the rank in the training: those of several groups may save into one checkpoint
            self._rank_and_world = dist.get_rank(), dist.get_world_size(self._group)
        return self._rank_and_world or (0, 1)

    def _saved_tensors(self, part: MemoryPart) -> dict[str, dict[str, torch.Tensor]]:
        """Return what a part of the memory holds, by kind and parameter."""
        if self._gradient.allocated:
            return {
                # copies: the next steps write into these buffers
                kind: {  # zeros for what lost its place to a sparse gradient: a template made before lists it
                    n: tensor[part.slots[n]].clone() if n in part.slots else blank
                    for n, blank in self._blank(part).items()
                }
                for kind, tensor in part.tensors.items()
            }
        if self._pending is not None:
            # loaded, and no step since: the same goes out again
            return dict(self._pending.get(part.key, {}))
        # a template, which a distributed checkpoint loads into
        kinds = part.kinds if self._gradient.layout.known else ()
        return {kind: self._blank(part) for kind in kinds}

    def _blank(self, part: MemoryPart) -> dict[str, torch.Tensor]:
        """Return zeros for every parameter that a part of the memory ever had, in the model's order."""
        dtype = self._gradient.layout.dtype
        return {n: torch.zeros(d, dtype=dtype) for n, d in part.sizes.items()}

    def _check_tensors(self, entry: Mapping[str, Any]) -> None:
        """Check that what was saved of the memory is vectors of finite values."""
        for part in self._gradient.memory_parts():
            # a distributed checkpoint leaves out what is empty
            saved = field({part.key: {}, **entry}, part.key, Mapping)  # type: ignore[type-abstract]
            for kind in saved:
                if kind not in part.kinds:
                    raise InputError(f"the checkpoint's {part.key} holds {kind}, and this one not")
                tensors = field(saved, kind, Mapping)  # type: ignore[type-abstract]
                # squares
                low = 0.0 if kind == "second_moment" else None
                for name, values in tensors.items():
                    check_values(f"{kind} of {name}", values, low=low)

    def _check_parameters(self, entry: Mapping[str, Any]) -> None:
        """Check that an entry is of this model's parameters."""
        dtype = self._gradient.layout.dtype
        for part in self._gradient.memory_parts():
            saved = entry.get(part.key) or {}
            if entry["step"] and part.sizes and tuple(saved) != part.kinds:
                raise InputError(
                    f"the checkpoint's {part.key} holds {', '.join(saved) or 'nothing'}, and must hold "
                    f"{', '.join(part.kinds) or 'nothing'}"
                )
            tensors: Mapping[str, torch.Tensor]
            for kind, tensors in saved.items():
                # order, too: it is that of the flat gradient, and decides which elements ranks add up
                if list(tensors) != list(part.sizes):
                    odd = sorted(set(tensors) ^ set(part.sizes)) or ["order of parameters"]
                    raise InputError(f"the checkpoint's residuals are of another model: {odd[0]}")
                for name, numel in part.sizes.items():
                    check_values(f"{kind} of {name}", tensors[name], (numel,), dtype)

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
        # weights_only refuses NumPy's scalars
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
        # wherever it lay: the device may be gone, and who loads it takes it to theirs
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping):
            raise InputError(f"it is no state, but {type(state).__name__}")
        return dict(state)
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
    parameters = parameters_of(optimizer)
    sharded: dict[int, list[str]] = {}
    for i, values in state["state"].items():
        local = {
            n: local_part(v)
            for n, v in values.items()
            if isinstance(v, torch.Tensor) and local_part(v) is not v
        }
        # as_sharded() knows no other placement than the parameter's
        if any(v.shape != local_part(parameters[i]).shape for v in local.values()):
            raise InputError(
                f"{type(optimizer).__name__} shards its state in another way than its parameters: save it by itself"
            )
        sharded[i] = list(local)
        # a new dictionary: the inner ones of an optimizer's state_dict() are its own
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
    # load_state_dict() does not ask for the class, and would keep another one's buffers
    if (name, saved) != (type(optimizer).__name__, sizes):
        raise InputError(
            f"the checkpoint's {what} is {name} with groups of {saved} parameters, and this is "
            f"{type(optimizer).__name__} with {sizes}"
        )
    parameters = parameters_of(optimizer)
    for i, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                check_values(f"{what}'s {key} of parameter {i}", value, value.shape, value.dtype)
    for i, names in sharded.items():
        for each in names:
            part = state["state"][i][each].to(local_part(parameters[i]).device)
            state["state"][i][each] = as_sharded(parameters[i], part)
    # load_state_dict() takes state to the parameters' devices, and leaves options, such as a rate, where they are
    for group, options in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for key, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                options[key] = value.to(group[key].device)
    return state
