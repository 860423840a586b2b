"""Cyclic local top-k: in every step one rank chooses the positions for all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.collectives.header import checksum
from gradstats.collectives.plain import all_gather_flags, broadcast
from gradstats.collectives.ragged import damaged
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FLAG, FULL, WORD, Exchange, Load, Work, coding
from gradstats.compressors.selectors import TopK

__all__ = ["CLTk"]

_HEAD = 2
"""Words before the positions: their number, and the checksum of what is behind it."""


class CLTk(Compressor):
    """Cyclic local top-k: ranks take turns in choosing the positions at which all of them are averaged.

    In step t rank t mod n, the leader, broadcasts the positions of its own top-k; the values of all ranks there are
    all-reduced. Nothing builds up, but the positions are one rank's choice, and the others wait while it chooses.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    codec : Codec
        What positions are on the wire. Values are added up on the way, and stay float32.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], or values are coded.

    Notes
    -----
    Source: CLT-k of ScaleCom (Chen et al. 2020).

    Differs from the paper: the residual is that of plain error feedback, without ScaleCom's low-pass filter. Exactly
    k positions travel, or as many as the leader has non-zero elements: of magnitudes tied with the k-th, the first in
    index order are taken, since a broadcast needs a length that all ranks know.

    A step takes three collectives: flags (a leader must not choose while its gradient is bad), positions, values. A
    step refused by a flag keeps the leader. ``selected`` is k̂ on every rank, as all of them send that many values;
    ``bytes_sent`` counts the broadcast on the leader alone.
    """

    one_union = True
    codecs = ("indices",)

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return a broadcast of the leader's positions, and an all-reduce of the values there."""
        k, codec = load.counts[0], load.codec
        positions = WORD * (_HEAD + codec.index_words(k, load.numel))
        return load.exchange(
            k,
            # the leader alone sends positions: a mean over the ranks
            FULL * k + positions / load.world,
            select=(load.selecting,),
            pack=tuple(coding(codec, "encode", k)),
            communicate=(FLAG, Work("broadcast", positions), Work("all_reduce", FULL * k)),
            unpack=(Work("unpack", k), *coding(codec, "decode", k)),
        )

    def __init__(self, ratio: float, codec: Codec = PLAIN) -> None:
        self._top = TopK(ratio)
        self._codec = check_codec(codec, "cltk", self.codecs)
        self._update = SparseUpdate()
        self._step = 0

    @property
    def ratio(self) -> float:
        """Kept fraction k/d, which a schedule may set."""
        return self._top.ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self._top.ratio = ratio

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average the gradient at the leader's positions."""
        started = time.perf_counter()
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        leader = self._step % dist.get_world_size(group)
        k = self._top.target(corrected.numel())
        numel = corrected.numel()
        room = _HEAD + self._codec.index_words(k, numel)  # a broadcast's length is known to all
        message = torch.zeros(room, dtype=torch.int32, device=corrected.device)
        body = message[_HEAD:]
        before = time.perf_counter()
        threshold, leading = float("nan"), dist.get_rank(group) == leader
        if leading:
            indices, threshold = self._choose(corrected, k)
            message[0] = indices.numel()
            # no more words than there is room for, as there are at most k positions
            words = self._codec.pack_indices(indices, numel)
            body[: words.numel()] = words
            # of the count, too: by a damaged one a rank would miss positions that the others have
            message[1] = checksum(body) ^ message[0]
        chosen = time.perf_counter()
        broadcast(message, leader, group)
        # one transfer from a device
        count, sent, digest = torch.stack([*message[:_HEAD], checksum(body)]).tolist()
        if sent != digest ^ count:
            raise damaged(leader, "what it carries does not have its checksum")
        if not 0 <= count <= k:
            raise damaged(leader, f"it claims {count} positions, of {k} at most")
        # the leader reads them from the message, too: all ranks average at the same positions
        indices, _ = self._codec.unpack_indices(body, count, numel, leader)
        mean = self._update.average(corrected, indices, group)
        # after all exchanges: a step that failed keeps its leader
        self._step += 1
        value_bytes = count * corrected.element_size()
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected,
            sent=indices,
            threshold=threshold,
            selected=count,
            union=count,
            bytes_sent=value_bytes + leading * message.numel() * message.element_size(),
            select_seconds=chosen - before,
            communicate_seconds=time.perf_counter() - chosen + before - started,
        )

    def _choose(self, gradient: torch.Tensor, k: int) -> tuple[torch.Tensor, float]:
        """Return at most k positions, in ascending order, and the threshold."""
        message = self._top.select(gradient)
        indices = message.indices
        if indices.numel() > k:
            # stable: of equal magnitudes the first in index order
            order = message.values.abs().argsort(descending=True, stable=True)
            # codes of positions need them ascending
            indices = indices[order[:k]].sort().values
        return indices, message.threshold

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, which decides who leads."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step = int(state["step"])
