"""The exchange that sparse compressors share: every rank sends a selection and adds up those of all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives import Codec, SparseAllGather
from gradstats.collectives.codec import PLAIN, as_codec
from gradstats.collectives.header import Kind
from gradstats.collectives.plain import all_reduce_mean
from gradstats.collectives.ragged import RaggedAllGather
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced, Selector, WithSelector
from gradstats.compressors.cost import Exchange, Load, sparse
from gradstats.errors import InputError
from gradstats.primitives import Selection
from gradstats.primitives.codec import rice_decode, rice_encode
from gradstats.primitives.ratio import check_number, shown

__all__ = ["Average", "SparseCompressor", "as_compressor", "check_average"]

Average: TypeAlias = Literal["ranks", "senders"]
"""What a sum of sparse messages is divided by, see :class:`SparseCompressor`."""


def check_average(average: str) -> Average:
    """Return what a sum is divided by if it is one of the two.

    Parameters
    ----------
    average : str
        What the user gave.

    Raises
    ------
    InputError
        If it is neither ``"ranks"`` nor ``"senders"``.
    """
    known = get_args(Average)
    if not isinstance(average, str) or average not in known:
        raise InputError(f"average must be one of {', '.join(known)}, not {shown(average)}")
    return cast("Average", average)


class SparseCompressor(WithSelector, Compressor):
    """All-gather of what a :class:`Selector` selects on each rank.

    Parameters
    ----------
    selector : Selector
        The rule that selects. Its state belongs to this compressor from now on.
    codec : Codec or torch.dtype
        What positions and values are on the wire; a type for plain positions and values of this type. What rounding
        takes off stays in the residual.
    dense_above : float
        Share of the gradient's elements. If the selections of all ranks in the step before came to more, they are
        all-reduced as one dense vector; from 1 on that moves fewer bytes. Infinity for never. The union is then a
        lower bound: the positions at which the sum is not 0, or as many as the rank with the most has sent.
    average : {"ranks", "senders"}
        What the sum at a position is divided by: the number of all ranks, or of those that sent this position, which
        makes the update up to as many times larger as there are ranks. A mean over senders is never sent densely.

    Raises
    ------
    InputError
        If values cannot travel as this type, or the average is neither of these.

    Notes
    -----
    Source: the packed message of RedSync (Fang et al. 2018), section 5.3: lengths, indices and values in one
    all-gather.

    Differs from the paper: positions and values may be coded, messages of all ranks are padded to one length, which
    they derive from the lengths seen so far, and beyond `dense_above` the exchange is dense.
    """

    codecs = ("indices", "values")

    def __init__(
        self,
        selector: Selector,
        codec: Codec | torch.dtype = PLAIN,
        dense_above: float = 1.0,
        average: Average = "ranks",
    ) -> None:
        self.selector = selector
        self.average = check_average(average)
        self.dense_above = check_number(dense_above, "dense_above", 0, math.inf, "[]")
        # chunks are coded by torch's operators, which need no compiling
        self._coded = as_codec(codec).indices == "rice"
        self._gather = SparseAllGather(codec)
        # beside a dense sum, which does not show how much was selected
        self._counts = RaggedAllGather(kind=Kind.COUNTS)
        self._update = SparseUpdate()
        self._last = 0
        """Number of elements that all ranks together sent in the last step."""

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return an all-gather of positions and values, or an all-reduce where these are too many."""
        return sparse(load)

    def warm_up(self) -> None:
        """Compile the loops of the selector and of coded positions, or load them."""
        super().warm_up()
        if self._coded:
            rice_decode(rice_encode(np.arange(3)), 3, 3)

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the selector's target count k."""
        return self.selector.target(numel)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select, exchange and add up; the flag travels in the message."""
        numel = corrected.numel()
        target = self.selector.target(numel)
        expected = target, 1 if self.selector.single_value else target
        # selecting moves the rule on, and another rank may refuse the step
        before = self.selector.state_dict()
        started = time.perf_counter()
        try:
            message = self.selector.select(corrected) if not flag else None
            selected = time.perf_counter()
            selections = []
            if message is not None:
                # rounded once, here: what is subtracted in the end is what the others received
                selections = [Selection(message.indices, self._gather.rounded(message.values))]
            # by what all ranks know of the step before, so that all choose the same collective
            dense = self.average == "ranks" and self._last > self.dense_above * numel
            if dense:
                reduced = self._all_reduce(selections, corrected, group, flag)
            else:
                reduced = self._all_gather(selections, corrected, group, flag, expected)
        except BaseException:
            # nor does a failed one
            self.selector.load_state_dict(before)
            raise
        if message is None or any(reduced.flags):
            self.selector.load_state_dict(before)  # a refused step leaves no trace on any rank
            return Reduced(reduced.flags)
        reduced.communicate_seconds = time.perf_counter() - selected
        reduced.select_seconds = selected - started
        reduced.threshold, reduced.selected = message.threshold, message.indices.numel()
        # after the exchange, as a refused step leaves the gradient; what rounding took off stays
        corrected[message.indices] -= selections[0].values.float()
        reduced.residual, reduced.sent = corrected, message.indices
        return reduced

    def _all_gather(
        self,
        selections: list[Selection],
        corrected: torch.Tensor,
        group: dist.ProcessGroup | None,
        flag: int,
        expected: tuple[int, int],
    ) -> Reduced:
        numel = corrected.numel()
        gathered = self._gather(selections, numel, group, flag, expected, corrected.device)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        self._last = sum(len(each) for rank in gathered.selections for each in rank)
        self._update.begin(corrected)
        # in the same order, and so to the same bits, on every rank
        for rank in gathered.selections:
            self._update.add(rank)
        union = self._update.divide(len(gathered.flags) if self.average == "ranks" else None)
        return Reduced(
            gathered.flags,
            self._update.vector,
            union=union,
            bytes_sent=gathered.bytes_sent,
        )

    def _all_reduce(
        self,
        selections: list[Selection],
        corrected: torch.Tensor,
        group: dist.ProcessGroup | None,
        flag: int,
    ) -> Reduced:
        mean = torch.zeros_like(corrected)
        for each in selections:
            mean[each.indices] = each.values.to(mean.dtype)
        count = torch.tensor([sum(len(each) for each in selections)], dtype=torch.int32)
        # before the sum, as it carries the flags: all ranks go on to the all-reduce, or none
        counts = self._counts(count.to(corrected.device), group, flag)
        if any(counts.flags):
            return Reduced(counts.flags)
        # when it falls below the limit, the next step gathers again
        sent = [int(each) for each in counts.words]
        self._last = sum(sent)
        mean = all_reduce_mean(mean, group)
        return Reduced(
            counts.flags,
            mean,
            # where summands cancel, or round to 0, a sum does not show them
            union=max(int(mean.count_nonzero()), *sent),
            bytes_sent=counts.bytes_sent + mean.numel() * mean.element_size(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the selector's state, the capacity of the messages, and how much all ranks sent."""
        return {
            "selector": self.selector.state_dict(),
            "capacity": self._gather.words.capacity,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.selector.load_state_dict(state["selector"])
        self._gather.words.capacity = state["capacity"]
        self._last = state["last"]


def as_compressor(rule: Selector | Compressor, codec: Codec = PLAIN) -> Compressor:
    """Return a compressor as it is, and a selector inside a :class:`SparseCompressor`.

    Parameters
    ----------
    rule : Selector or Compressor
        What a user gives to :class:`gradstats.hooks.CompressionState`.
    codec : Codec
        What a selector's positions and values are on the wire.

    Returns
    -------
    Compressor
        The same object, or a :class:`SparseCompressor` around the selector.

    Raises
    ------
    InputError
        If it is neither.
    """
    if not isinstance(rule, Selector | Compressor):
        raise InputError(
            f"a compressor or a selector is needed, not {shown(rule)}; gradstats.compressors.make_compressor("
            f"{shown(rule) if isinstance(rule, str) else repr('topk')}, 0.01) builds one"
        )
    return SparseCompressor(rule, codec) if isinstance(rule, Selector) else rule
