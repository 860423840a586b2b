"""Compression layer by layer: layers that are ready are selected and sent while backpropagation goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.background import Background, Pending, at_once
from gradstats.collectives.codec import PLAIN, Codec, as_codec
from gradstats.collectives.packed import GatheredSelections, SparseAllGather
from gradstats.collectives.plain import all_reduce
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Activity, Compressor, Lane, NamedSlice, Reduced, Selector
from gradstats.compressors.cost import Exchange, Load, sparse
from gradstats.primitives import Selection
from gradstats.primitives.ratio import check_count, check_ratio

__all__ = ["MERGE", "Layerwise", "sends_dense"]


MERGE = 1 << 16
"""Default number of elements of gradient that are gathered before a message is sent."""


def sends_dense(count: int, values: int, numel: int, total: int, codec: Codec = PLAIN) -> bool:
    """Return whether a layer's values alone take fewer bytes than the selection with its positions.

    Parameters
    ----------
    count : int
        Number of positions that the selection aims at.
    values : int
        Number of values: as many as positions, or 1 if one value stands for all.
    numel : int
        Elements of the layer.
    total : int
        Elements of the whole gradient, in which positions are counted.
    codec : Codec
        What positions and values of the selection are. A dense layer's values travel as float32.
    """
    # in 32-bit words: a value that travels densely is one
    return codec.index_words(count, numel, total) + codec.value_words(values) > numel


@dataclass(slots=True)
class _Message:
    """A message in the making: selections that are merged until they are large enough to send."""

    layer: str = ""
    numel: int = 0
    # positions and values, for which all ranks make room alike
    target: list[int] = field(default_factory=lambda: [0, 0])
    selections: list[Selection] = field(default_factory=list)
    dense: list[Selection] = field(default_factory=list)
    flag: int = 0


# Size: one exchange's life for all layers: chosen, sent and decoded in turns, with what is under way.
class Layerwise(Compressor):
    """Selection in every layer by itself, sent as soon as the layer's gradient is ready.

    Layers come in the order in which backpropagation delivers them (:meth:`push`); the selections of those smaller
    than `merge` wait for the next ones. The exchange runs in a thread of its own, and on CUDA and XPU in a stream of
    its own, while the backward pass continues. A layer whose target takes more bytes with its positions than all of
    its values take without is sent whole, by an all-reduce (:func:`sends_dense`).

    Parameters
    ----------
    choose : callable
        Function of a layer's name and number of elements that returns the :class:`Selector` for it. It is called once
        for each layer; the state of the selector belongs to this compressor from then on.
    merge : int
        Elements of gradient to gather before a message is sent; 0 sends every delivery by itself. The last message of a
        step holds what is left, and leaves when the step is completed.
    codec : Codec or torch.dtype
        What positions and values are on the wire, see :class:`SparseCompressor`.
    overlap : bool
        Whether to exchange during the backward pass.
    ratio : float, optional
        Kept fraction k/d of every layer, which a schedule may set, instead of what `choose` gave its selector.

    Attributes
    ----------
    timeline : list of Activity
        How the last step's time was spent.

    Raises
    ------
    InputError
        If values cannot travel as the type given.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), algorithm 1, for any selector and without a rule for the ratios;
    :class:`gradstats.compressors.LAGS` has both.

    Differs from the paper: messages are merged by the size of the gradient, not of the selections; and the paper has no
    layers that are sent whole.

    DDP delivers buckets: give it a small ``bucket_cap_mb``, or each step has one delivery and nothing overlaps. While
    messages are in flight, nothing else may use the process group.
    """

    streams = True
    codecs = ("indices", "values")

    def __init__(
        self,
        choose: Callable[[str, int], Selector],
        *,
        merge: int = MERGE,
        codec: Codec | torch.dtype = PLAIN,
        overlap: bool = True,
        ratio: float | None = None,
    ) -> None:
        self.choose = choose
        self._every: float | None = None if ratio is None else check_ratio(ratio)
        self.merge = check_count(merge, "merge", 0)
        self.overlap = overlap
        self.timeline = []
        self._codec = as_codec(codec)
        self._selectors: dict[str, Selector] = {}
        self._numels: dict[str, int] = {}
        self._restored: Mapping[str, Any] = {}
        # one for the n-th message of every step, as each remembers the room that it needs
        self._gathers: list[SparseAllGather] = []
        self._background = Background()
        self._update = SparseUpdate()
        self._numel = 0
        self._reset()

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return the exchange of one message; :func:`gradstats.network.deliveries` prices layer by layer."""
        return sparse(load)

    def _reset(self) -> None:
        """Forget the step in progress."""
        # None also says that no step has begun
        self._before: dict[str, dict[str, Any]] | None = None
        self._pending = _Message()
        self._sent: list[Selection] = []
        self._thresholds: list[float] = []
        self._pendings: list[Pending[GatheredSelections]] = []
        self._taken = 0
        self._epoch = self._resumed = 0.0

    @property
    def ratio(self) -> float | None:
        """Kept fraction k/d of every layer; None if each selector has its own."""
        return self._every

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        self._every = ratio
        for selector in self._selectors.values():
            selector.ratio = ratio

    @property
    def selectors(self) -> Mapping[str, Selector]:
        """The selector of each layer met so far, by name."""
        return self._selectors

    def push(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int = 0,
    ) -> None:
        """Take layers whose gradient is complete, select in them, and send if enough has come together."""
        self._take(corrected, layers, group, flag)

    def _take(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int,
    ) -> None:
        self._begin(corrected)
        started = self._now()
        # since the last push this thread has been in the backward pass
        self._record("backward", layers, self._resumed, started)
        message = self._pending
        message.flag |= flag
        for name, slot in layers:
            # of the message in the making, which comes after those that were sent
            numel, gather = slot.stop - slot.start, self._gather(len(self._pendings))
            selector = self._selector(name, numel)
            dense = self._whole(selector, numel)
            # targets, not what was selected: the first room must be the same on all ranks
            if not dense:
                target = selector.target(numel)
                message.target[0] += target
                message.target[1] += 1 if selector.single_value else target
            message.numel += numel
            self._taken += numel
            message.layer = name
            # a bad gradient is not read, but the message goes out, with the flag in it
            if flag:
                continue
            if dense:
                positions = torch.arange(slot.start, slot.stop, device=corrected.device)
                # a view of float32: nothing writes to the gradient before reduce() does
                selection = Selection(positions, corrected[slot].float(), 0.0)
                message.dense.append(selection)
            else:
                chosen = selector.select(corrected[slot])
                # rounded here, so that what is subtracted in the end is what the others received
                positions, rounded = chosen.indices + slot.start, gather.rounded(chosen.values)
                selection = Selection(positions, rounded, chosen.threshold)
                message.selections.append(selection)
            self._sent.append(selection)
            self._thresholds.append(selection.threshold)
        self._record("select", layers, started, self._now())
        # by the size of the layers, never of selections: all ranks must send the same messages; the step's last one
        # waits for reduce(), which may have a flag to announce
        if message.numel >= max(1, self.merge) and self._taken < self._numel:
            self._send(group)
        # what is sent without overlap is no backward pass either
        self._resumed = self._now()

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Send what is left, wait for all messages, and add up; a gradient never pushed counts as one layer."""
        if self._before is None:
            self._take(corrected, [("", slice(0, corrected.numel()))], group, flag)
        self._pending.flag |= flag
        waiting = self._now()
        try:
            # in every step, if only for the flag: all ranks send as many messages
            self._send(group)
            # nothing of the gradient is changed while one of them may still be refused
            gathered = [each.result() for each in self._pendings]
            # a rank may have flagged one message and not another
            flags = [max(f) for f in zip(*(g.flags for g in gathered), strict=True)]
            if any(flags):
                self.abandon()
                return Reduced(flags)
            union = self._update.divide(len(flags))
            # the empty one is for a step in which nothing was selected
            sent = torch.cat([corrected[:0].long(), *(each.indices for each in self._sent)])
            for each in self._sent:
                # what rounding took off stays; one value may stand for all positions
                corrected[each.indices] -= each.values.float()
        except Exception:
            self.abandon()
            raise
        alone = self._now() - waiting
        if not self.overlap:
            # so were the messages that left before
            alone += self._seconds("communicate", until=waiting)
        reduced = Reduced(
            flags=flags,
            mean=self._update.vector,
            residual=corrected,
            sent=sent,
            threshold=self._thresholds[0] if len(self._thresholds) == 1 else float("nan"),
            selected=sent.numel(),
            union=union,
            bytes_sent=sum(g.bytes_sent for g in gathered),
            select_seconds=self._seconds("select"),
            communicate_seconds=alone,
            overlapped_seconds=max(0.0, self._seconds("communicate") - alone),
        )
        self._reset()
        return reduced

    def abandon(self) -> None:
        """Drop a step that will not be completed, after its messages have ended; it leaves no trace."""
        for each in self._pendings:
            # the other ranks are in the same exchange, and it reads the gradient
            each.end()
        # selecting has moved the selectors on
        for name, state in (self._before or {}).items():
            self._selectors[name].load_state_dict(state)
        self._reset()

    def _begin(self, corrected: torch.Tensor) -> None:
        if self._before is not None:
            return
        # to go back to, should a rank refuse the step
        self._before = {name: c.state_dict() for name, c in self._selectors.items()}
        # before the first message, whose thread adds to it
        self._update.begin(corrected)
        self._numel = corrected.numel()
        self.timeline = []
        self._epoch = time.perf_counter()
        self._resumed = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._epoch

    def _record(self, lane: Lane, layers: Sequence[NamedSlice], start: float, end: float) -> None:
        if end > start and layers:
            numel = sum(slot.stop - slot.start for _, slot in layers)
            self.timeline.append(Activity(lane, layers[-1][0], start, end, numel))

    def _seconds(self, lane: Lane, until: float = math.inf) -> float:
        """Return the seconds of this step that were spent on something up to some time."""
        return sum(a.end - a.start for a in self.timeline if a.lane == lane and a.end <= until)

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the target count of a layer, or of all layers met so far together."""
        if layer is None:
            return sum(self.target(self._numels[name], name) for name in self._selectors)
        if layer not in self._selectors:
            return 0
        selector = self._selectors[layer]
        return numel if self._whole(selector, numel) else selector.target(numel)

    def _whole(self, selector: Selector, numel: int) -> bool:
        """Tell whether all of a layer is sent: by its target, which all ranks share, not by what one has selected."""
        target = selector.target(numel)
        values = 1 if selector.single_value else target
        return selector.whole or sends_dense(target, values, numel, self._numel, self._codec)

    def _selector(self, name: str, numel: int) -> Selector:
        if name not in self._selectors:
            selector = self._selectors[name] = self.choose(name, numel)
            if self._every is not None:
                selector.ratio = self._every
            self._numels[name] = numel
            if name in self._restored:
                selector.load_state_dict(self._restored[name])
            if self._before is not None:
                # met in this step, so not among those saved at its beginning
                self._before[name] = selector.state_dict()
        return self._selectors[name]

    def _gather(self, message: int) -> SparseAllGather:
        """Return the exchange for the n-th message of a step."""
        while message >= len(self._gathers):
            self._gathers.append(SparseAllGather(self._codec))
        return self._gathers[message]

    def _send(self, group: dist.ProcessGroup | None) -> None:
        message, self._pending = self._pending, _Message()
        gather, update, numel = self._gather(len(self._pendings)), self._update, self._numel
        expected = message.target[0], message.target[1]

        def exchange() -> GatheredSelections:
            started = self._now()
            gathered = gather(
                message.selections,
                numel,
                group,
                message.flag,
                expected,
                update.vector.device,
                message.numel,
            )
            # one thread adds up ranks and messages in their order: the same bits on every rank
            for rank in gathered.selections:
                update.add(rank)
            # targets and flags are the same on all ranks: all of them get here, or none
            if message.dense and not any(gathered.flags):
                positions = torch.cat([each.indices for each in message.dense])
                values = all_reduce(torch.cat([each.values for each in message.dense]), group)
                update.add([Selection(positions, values)])
                sent = gathered.bytes_sent + values.numel() * values.element_size()
                gathered = replace(gathered, bytes_sent=sent)
            self.timeline.append(
                Activity("communicate", message.layer, started, self._now(), message.numel)
            )
            return gathered

        if self.overlap:
            self._pendings.append(self._background.submit(exchange, update.vector.device))
        else:
            self._pendings.append(at_once(exchange))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every layer's selector, by name, and the capacities of the messages."""
        met = {name: c.state_dict() for name, c in self._selectors.items()}
        return {
            # after a restart some layers may not have been met yet
            "layers": {**self._restored, **met},
            "capacities": [gather.words.capacity for gather in self._gathers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; layers not met yet are restored when they are."""
        self._restored = state["layers"]
        for name, selector in list(self._selectors.items()):
            if name in self._restored:
                selector.load_state_dict(self._restored[name])
            else:  # met later: it begins anew when it is met again
                del self._selectors[name]
        # capacities must be equal on all ranks, so none is kept that the checkpoint does not have
        self._gathers.clear()
        for message, capacity in enumerate(state["capacities"]):
            self._gather(message).words.capacity = capacity
