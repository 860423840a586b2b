"""RedSync: a selection that fits the message's size, and one mean value instead of k."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradstats import thresholds
from gradstats.collectives.indices import IndexAllGather
from gradstats.compressors.base import Reduced, Reducer
from gradstats.compressors.dense import DenseReducer
from gradstats.compressors.sparse import SparseReducer
from gradstats.compressors.sparsify import ThresholdCompressor
from gradstats.errors import InputError
from gradstats.thresholds.redsync import Rule

__all__ = ["RedSync"]


class RedSync(Reducer):
    """RedSync's exchange (Fang et al. 2018, algorithms 4 and 5, section 5.4).

    Three classes of messages by their number of elements d: a dense all-reduce of small ones, trimmed
    top-k of middling ones, binary search of the threshold, reused for five steps, of large ones.

    Parameters
    ----------
    ratio : k/d in (0, 1].
    quantise : send positions and one float, the mean of the values there. So that they have one sign, the largest k
        elements are taken in even steps, the smallest k in odd ones. The output layer should not be quantised (section
        5.2.3); whoever lays out the messages sees to that.
    dense_below : below this d all is averaged densely; 32768 is the paper's 128 KB of float32. 0 for never.
    search_above : from this d on the threshold is searched; 1048576 is 4 MB.
    rule : of the thresholds, see :class:`gradstats.thresholds.RedSync` and
        :class:`gradstats.thresholds.RedSyncTrimmed`.

    Notes
    -----
    The paper chooses by the size of a layer, each layer being a message. Here the message is the gradient that comes,
    usually the whole model's. Its binary search runs on a sample, without a word on how; here on everything.
    With quantisation the threshold is searched anew in every step, as published: it is of the other sign each time.

    Algorithm 4 (line 22) zeroes the residual where values were sent, and so loses how each
    differed from the mean. Here the residual is corrected − sent: sent + residual = corrected, to rounding.
    """

    def __init__(
        self,
        ratio: float,
        quantise: bool = False,
        dense_below: int = 1 << 15,
        search_above: int = 1 << 20,
        rule: Rule = "corrected",
    ) -> None:
        if dense_below > search_above:
            raise InputError(f"dense_below {dense_below} exceeds search_above {search_above}")
        thresholds.target_count(ratio, 1)
        thresholds.RedSync(rule)  # raises on a bad rule
        self.ratio = ratio
        self.quantise = quantise
        self.dense_below = dense_below
        self.search_above = search_above
        self.rule: Rule = rule
        self._chosen: Reducer | None = None
        self._restored: Mapping[str, Any] | None = None

    def _choose(self, numel: int) -> Reducer:
        """Build what messages of this size take."""
        if numel < self.dense_below:
            return DenseReducer()
        estimator: thresholds.Estimator
        if numel < self.search_above:
            estimator = thresholds.RedSyncTrimmed(self.rule)
        else:
            estimator = thresholds.RedSync(self.rule, interval=1 if self.quantise else 5)
        compressor = ThresholdCompressor(estimator, self.ratio)
        return _Quantised(compressor) if self.quantise else SparseReducer(compressor)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Exchange by the class of the message; all messages must be of the same one."""
        if self._chosen is None:
            self._chosen = self._choose(corrected.numel())
            if self._restored is not None:
                self._chosen.load_state_dict(self._restored)
                self._restored = None
        return self._chosen.reduce(corrected, group, flag)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what was chosen; None before the first step."""
        return {"chosen": self._restored if self._chosen is None else self._chosen.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it at the next step, when the size of the messages is known."""
        self._chosen, self._restored = None, state["chosen"]


class _Quantised(Reducer):
    """One sign a step, and one float a message: `[count, flag, mean | indices]`."""

    def __init__(self, compressor: ThresholdCompressor) -> None:
        self._compressor = compressor
        self._gather: IndexAllGather | None = None
        self._capacity: int | None = None
        self._step = 0

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Select among one sign, all-gather positions and means, add them up."""
        numel = corrected.numel()
        if self._gather is None:
            capacity = self._capacity or self._compressor.target(numel)
            self._gather = IndexAllGather(capacity, group)
        started = time.perf_counter()
        indices, number, threshold = corrected[:0].long(), 0.0, float("nan")
        if not flag:
            # The other sign is zero, which is never selected: fewer than k of this one are sent as they are.
            positive = self._step % 2 == 0
            signed = corrected.clamp(min=0) if positive else corrected.clamp(max=0)
            message = self._compressor.compress(signed)
            indices, threshold = message.indices, message.threshold
            if indices.numel():
                # float64: the mean of millions; rounded once, so that what is sent is what is subtracted
                number = float(corrected[indices].double().mean().float())
        selected = time.perf_counter()
        gathered = self._gather(indices, numel, number, flag)
        if any(gathered.flags):
            return Reduced(gathered.flags)
        communicated = time.perf_counter()
        total = torch.zeros_like(corrected)
        # One rank after the other, so that all sum in the same order; within a rank positions are distinct.
        for positions, each in zip(gathered.indices, gathered.numbers, strict=True):
            total[positions] += each
        union = int(total.count_nonzero())  # one sign: no two cancel
        corrected[indices] -= number
        self._step += 1
        return Reduced(
            flags=gathered.flags,
            mean=total.div_(len(gathered.flags)),
            residual=corrected,
            sent=indices,
            threshold=threshold,
            selected=indices.numel(),
            union=union,
            bytes_sent=gathered.bytes_sent,
            select_seconds=selected - started,
            communicate_seconds=communicated - selected,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the step, whose parity is the sign, the threshold's state, and the room messages have."""
        return {
            "step": self._step,
            "compressor": self._compressor.state_dict(),
            "capacity": self._gather.capacity if self._gather is not None else self._capacity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._step = int(state["step"])
        self._compressor.load_state_dict(state["compressor"])
        self._gather, self._capacity = None, state["capacity"]
