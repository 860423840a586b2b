"""What all ranks must agree on: compared before the first exchange, in every header, and, if wanted, after a step."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.header import Header, Kind, by_rank, checksum, words_of
from gradstats.collectives.plain import (
    all_gather_checked,
    all_gather_flags,
    all_gather_headers,
    all_gather_texts,
)
from gradstats.errors import ExchangeError, InputError
from gradstats.hooks.contents import tensor_text

__all__ = [
    "Agreement",
    "agree",
    "agree_on_model",
    "as_made",
    "check_applied",
    "described",
    "optimizer_options",
]

_LONGEST = 120
"""Characters of a value in an error."""
_DEEPEST = 6
_OF_A_RANK = {"selector", "layers", "generator", "estimator", "calibration", "measured"}
"""Parts of a compressor's state that belong to one rank."""
_ELSEWHERE = {"rank", "device", "group", "process_group"}
"""Options that every rank has its own of."""
_AT_WORK = {"Background", "Calibration", "SparseUpdate", "RaggedAllGather", "_Message"}
"""Parts of a compressor that say nothing of how it was made."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def agree(
    what: Mapping[str, str],
    group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu",
    step: int = 0,
) -> None:
    """Check that all ranks have the same of everything that must agree.

    A digest travels, in a message as long as any header; only where the digests differ do the texts.

    Parameters
    ----------
    what : mapping of str to str
        What must agree, by name.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device or str
        Device of messages.
    step : int
        Number of the step with which this rank begins.

    Raises
    ------
    InputError
        On all ranks, in one line that names what differs.
    """
    text = "\n".join(f"{_line(name)}\t{_line(value)}" for name, value in what.items())
    # not hash(): it differs between processes
    digest = hashlib.sha256(text.encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    # 63 bits of the digest: lengths and steps are not negative
    header = Header(Kind.AGREEMENT, high & 0x7FFFFFFF, step=step & 0x7FFFFFFF, details=low)
    headers = all_gather_headers(header, group, device)
    # the step first: where that differs, states differ as a matter of course
    steps = [each.step for each in headers]
    if len(set(steps)) > 1:
        raise InputError(
            f"the ranks begin at steps {', '.join(map(str, steps))}: load checkpoints of one step on all of them"
        )
    # all ranks have read the same headers: either all of them send texts or none
    if len({(each.length, each.details) for each in headers}) > 1:
        raise InputError(_difference(all_gather_texts(text, group, device)))


def _line(text: str) -> str:
    """Return a text without what would end its line, or reach a terminal."""
    return text if text.isprintable() else repr(text)


def _difference(texts: Sequence[str]) -> str:
    """Return what differs, in one line."""
    ranks = [dict(line.split("\t", 1) for line in text.splitlines()) for text in texts]
    # a set in order of appearance: every rank names the same first
    names = dict.fromkeys(name for rank in ranks for name in rank)
    odd = [name for name in names if len({rank.get(name) for rank in ranks}) > 1]
    if not odd:
        return "the ranks have other options, whose texts are the same"
    values = [rank.get(odd[0], "none") for rank in ranks]
    shown = by_rank([v if len(v) <= _LONGEST else f"{v[:_LONGEST]}…" for v in values])
    more = f", and in {', '.join(odd[1:4])}" if len(odd) > 1 else ""
    more += f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return f"the ranks differ in {odd[0]}, {shown}{more}: give all of them the same"


def described(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what an object was made with.

    Parameters
    ----------
    name : str
        Name of the object.
    value : object
        A plain value, or an object whose constructor's arguments are attributes of it.
    depth : int
        How deep it lies in another.

    Yields
    ------
    tuple of str
        Name and text.
    """
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.tensor(value)
    if isinstance(value, _PLAIN):
        yield name, _text(value)
    elif isinstance(value, torch.Tensor):
        yield name, tensor_text(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from described(f"{name}.{key}", each, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset) and depth < _DEEPEST:
        inside = [" ".join(dict(described("", each, depth + 1)).values()) for each in value]
        # a set has another order in every process
        in_order = sorted(inside) if isinstance(value, set | frozenset) else inside
        yield name, f"[{', '.join(in_order)}]"
    elif inspect.isroutine(value) or isinstance(value, functools.partial):
        yield name, _function(value)
    elif depth < _DEEPEST:
        kind = value if isinstance(value, type) else type(value)
        # never repr(): it has addresses, which differ between processes
        yield name, f"{kind.__module__}.{kind.__qualname__}".removeprefix("gradstats.")
        if kind is not value:
            for key, each in _options(value):
                yield from described(f"{name}.{key}", each, depth + 1)


def _options(value: object) -> Iterator[tuple[str, Any]]:
    """Yield what an object was made with: arguments of its constructor, and the parts it has made of them."""
    if is_dataclass(value):
        yield from ((f.name, getattr(value, f.name)) for f in fields(value))
        return
    has = getattr(value, "__dict__", {})
    try:
        parameters = inspect.signature(type(value)).parameters
    except ValueError:  # of a type made in C, such as torch.Generator
        return
    names = [n for n in parameters if n not in _ELSEWHERE]
    argument_ids: set[int] = set()
    for name in names:
        # constructors keep their arguments under the same names, or with an underscore before
        place = name if name in has else f"_{name}"
        if place in has:
            argument_ids.add(id(has[place]))
            yield name, has[place]
        elif isinstance(getattr(type(value), name, None), property):
            yield name, getattr(value, name)
    # parts that were made of the arguments, unless they are arguments themselves
    for name, each in has.items():
        ours = type(each).__module__.startswith("gradstats.") and not isinstance(each, type)
        if ours and id(each) not in argument_ids and type(each).__name__ not in _AT_WORK:
            yield name.lstrip("_"), each


def _text(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return hex(value)  # of longer ones Python has no decimals
    # 1 and 1.0 are the same option
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return repr(value).removesuffix(".0") if whole else repr(value)


def _function(function: Callable[..., Any]) -> str:
    """Return what tells a function from another: its name, and the numbers and texts in it."""
    if isinstance(function, functools.partial):
        named = [(f"{i}", each) for i, each in enumerate(function.args)] + [
            *function.keywords.items()
        ]
        inside = [f"{key}: {_text(each)}" for key, each in named if isinstance(each, _PLAIN)]
        return f"{_function(function.func)} with {inside}"
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return str(name)
    # what a lambda has taken from around it, such as a number of warm-up steps
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or () if _filled(c)]
    constants = [*code.co_consts, *cells, *(getattr(function, "__defaults__", None) or ())]
    return f"{name} with {[_text(each) for each in constants if isinstance(each, _PLAIN)]}"


def _filled(cell: Any) -> bool:
    try:
        # a name that is bound only later has an empty cell, which raises
        return cell.cell_contents is not None
    except ValueError:
        return False


def optimizer_options(optimizer: torch.optim.Optimizer) -> str:
    """Return the options of an optimizer's groups, such as its rate, as a text.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    """
    # of how it computes, not of what; and what a scheduler notes
    other = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
    groups = [
        # a rate may be a tensor, whose repr rounds
        {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in g.items() if k not in other}
        for g in optimizer.param_groups
    ]
    shown = [", ".join(f"{k} {v}" for k, v in sorted(group.items())) for group in groups]
    # groups with the same options are named once
    return "; ".join(dict.fromkeys(shown))


def as_made(compressor: object) -> dict[str, str]:
    """Return what a compressor was made with, as it was when this was asked first: rules change as they go.

    Parameters
    ----------
    compressor : object
        Compressor or selector.
    """
    made: dict[str, str] | None = getattr(compressor, "_as_made", None)
    if made is None:
        made = dict(described("compressor", compressor))
        with suppress(AttributeError):  # of a class with slots
            compressor._as_made = made  # type: ignore[attr-defined]
    return made


def agree_on_model(
    model: torch.nn.Module,
    compressor: object,
    options: Mapping[str, object],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Check that all ranks have the same model, but for its values, and the same options.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    compressor : object
        Compressor or selector, or None.
    options : mapping of str to object
        Options, by name.
    group : torch.distributed.ProcessGroup or None
        The ranks.
    device : torch.device
        Device of messages.

    Raises
    ------
    InputError
        On all ranks, in one line that names what differs.
    """
    what = dict(as_made(compressor)) if compressor is not None else {"compressor": "none"}
    what |= dict(each for name, value in options.items() for each in described(name, value))
    for kind, tensors in (
        ("parameter", [(n, p) for n, p in model.named_parameters() if p.requires_grad]),
        ("frozen parameter", [(n, p) for n, p in model.named_parameters() if not p.requires_grad]),
        ("buffer", [*model.named_buffers()]),
    ):
        what[f"number of {kind}s"] = str(len(tensors))
        for i, (name, tensor) in enumerate(tensors):
            # numbered: the order decides which elements of two ranks are added up
            what[f"{kind} {i}"] = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
    agree(what, group, device)


class Agreement:
    """What the ranks of one state of compression have agreed on.

    Parameters
    ----------
    options : iterable of (str, str)
        Names and texts of the options.
    announces : bool
        Whether every step begins with a header of its own, because ranks may be about to send messages of different
        sizes.

    Attributes
    ----------
    details : dict of str to str
        What else must be the same in the next step, by name; it travels in the headers.
    announces : bool
        As given.
    """

    def __init__(self, options: Iterable[tuple[str, str]], announces: bool = False) -> None:
        self.details: dict[str, str] = {}
        self.announces = announces
        self._options = dict(options)
        self._parameters: list[str] = []
        self._agreed = -1

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note parameters, in their order.

        Parameters
        ----------
        named : iterable of (str, torch.Tensor)
            Names and parameters.
        """
        self._parameters += [
            f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in named
        ]

    def reopen(self) -> None:
        """Agree anew in the next step: something was loaded."""
        self._agreed = -1

    def check(
        self,
        step: int,
        state: Callable[[], Mapping[str, Any]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """In the first step, and when parameters were added, check that all ranks have the same of everything.

        Parameters
        ----------
        step : int
            Number of this rank's step.
        state : callable
            Returns the compressor's state, some parts of which every rank must have the same of.
        group : torch.distributed.ProcessGroup or None
            The ranks.
        device : torch.device
            Device of the gradients.

        Raises
        ------
        InputError
            If they do not, on all of them.
        """
        # −1 before the first agreement, or the number of parameters in the last one
        if self._agreed == len(self._parameters):
            return
        parameters = {"number of parameters": str(len(self._parameters))}
        for i, each in enumerate(self._parameters):
            parameters[f"parameter {i}"] = each
        agree(
            {**self._options, **dict(_shared("state", state())), **parameters}, group, device, step
        )
        # not before: what failed is compared again in the next step
        self._agreed = len(self._parameters)

    def announce(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Begin a step with a header of its own, if ranks may be about to send messages of different sizes.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup or None
            The ranks.
        device : torch.device
            Device of the gradients.
        """
        if self.announces:
            all_gather_flags(0, group, device, Kind.STEP)


def _shared(name: str, state: object) -> Iterator[tuple[str, str]]:
    """Yield what must be the same on all ranks in a compressor's state."""
    if isinstance(state, Mapping):
        for key, each in state.items():
            if key not in _OF_A_RANK:
                yield from _shared(f"{name}.{key}", each)
    elif isinstance(state, torch.Tensor):
        yield name, tensor_text(state)
    else:
        yield name, repr(state)


def check_applied(
    named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Check that tensors have the same bits on all ranks.

    Parameters
    ----------
    named : sequence of (str, torch.Tensor)
        Names and tensors, the same ones on every rank.
    group : torch.distributed.ProcessGroup or None
        The ranks.

    Raises
    ------
    ExchangeError
        On all ranks, if they do not; it names a tensor, and the ranks that have others than most.
    """
    if not named:
        return
    # one word a tensor, whatever its size
    rows = all_gather_checked(
        torch.stack([checksum(words_of(each)) for _, each in named]), group
    ).tolist()
    odd = [i for i, sums in enumerate(zip(*rows, strict=True)) if len(set(sums)) > 1]
    if odd:
        sums = [row[odd[0]] for row in rows]
        (common, count), *_ = Counter(sums).most_common()
        ranks = [str(rank) for rank, each in enumerate(sums) if each != common]
        # without a majority nothing tells who is wrong
        if 2 * count <= len(sums):
            who = "no two halves of the ranks agree" if len(sums) > 2 else "ranks 0 and 1 differ"
        else:
            many = len(ranks) > 1
            who = f"rank{'s' if many else ''} {', '.join(ranks)} differ{'' if many else 's'} from the others"
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise ExchangeError(f"{named[odd[0]][0]}{more} did not become the same on all ranks: {who}")
