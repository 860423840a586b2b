"""RedSync: a selection that fits the message's size, and one mean value instead of k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradstats import thresholds
from gradstats.compressors.base import Compressor, Reduced, Selector
from gradstats.compressors.dense import DenseCompressor
from gradstats.compressors.selectors import ThresholdSelector
from gradstats.compressors.sparse import SparseCompressor
from gradstats.errors import InputError
from gradstats.primitives import Selection
from gradstats.primitives.ratio import check_ratio
from gradstats.thresholds.redsync import Rule

__all__ = ["DENSE_BELOW", "SEARCH_ABOVE", "MeanOfSign", "RedSync", "redsync_selector"]

DENSE_BELOW = 1 << 15
"""Elements below which all is averaged densely: the paper's 128 KB of float32."""
SEARCH_ABOVE = 1 << 20
"""Elements from which on the threshold is searched: 4 MB."""


class MeanOfSign(Selector):
    """Send positions and one float, the mean of the values there (RedSync, section 5.2.3).

    So that the values have one sign, the largest k elements are taken in even steps, the smallest k in odd ones. Fewer
    than k of that sign are sent as they are.

    Parameters
    ----------
    selector : selects; its state belongs to this one from now on.

    Notes
    -----
    Algorithm 4 (line 22) zeroes the residual where values were sent, and so loses how each differed from the mean.
    Here the residual is corrected − sent: sent + residual = corrected, to rounding.
    """

    single_value = True

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._step = 0

    @property
    def ratio(self) -> float | None:
        """The inner rule's kept fraction k/d."""
        return self.selector.ratio

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        self.selector.ratio = ratio

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select among one sign."""
        # The other sign is zero, which is never selected.
        signed = gradient.clamp(min=0) if self._step % 2 == 0 else gradient.clamp(max=0)
        message = self.selector.select(signed)
        self._step += 1
        if not message.indices.numel():
            return message
        # float64: the mean of millions; rounded once, so that what is sent is what is subtracted
        mean = gradient[message.indices].double().mean().float()
        return Selection(message.indices, mean[None], message.threshold)

    def target(self, numel: int) -> int:
        """Return the number of elements it aims to send, k."""
        return self.selector.target(numel)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, whose parity is the sign, and the selection's state."""
        return {"step": self._step, "selector": self.selector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._step = int(state["step"])
        self.selector.load_state_dict(state["selector"])


def redsync_selector(
    numel: int,
    ratio: float,
    quantise: bool = False,
    search_above: int = SEARCH_ABOVE,
    rule: Rule = "corrected",
) -> Selector:
    """Return what RedSync selects with in a message of `numel` elements (algorithm 5).

    Trimmed top-k up to `search_above` elements, binary search of the threshold, reused for five steps, from there on.
    With quantisation the threshold is searched anew in every step, as published: it is of the other sign each
    time. The paper's binary search runs on a sample, without a word on how; here on everything.
    """
    estimator: thresholds.Estimator = thresholds.RedSyncTrimmed(rule)
    if numel >= search_above:
        estimator = thresholds.RedSync(rule, interval=1 if quantise else 5)
    selector = ThresholdSelector(estimator, ratio)
    return MeanOfSign(selector) if quantise else selector


class RedSync(Compressor):
    """RedSync's exchange of the gradient as one message (Fang et al. 2018, algorithms 4 and 5, section 5.4).

    The paper chooses by the size of a layer, each layer being a message: :func:`gradstats.hooks.systems.redsync`.

    Parameters
    ----------
    ratio : k/d in (0, 1].
    quantise : send one value, see :class:`MeanOfSign`. The output layer should not be quantised (section 5.2.3).
    dense_below : below this number of elements all is averaged densely. 0 for never.
    search_above : see :func:`redsync_selector`.
    rule : of the thresholds, see :class:`gradstats.thresholds.RedSync` and
        :class:`gradstats.thresholds.RedSyncTrimmed`.
    """

    def __init__(
        self,
        ratio: float,
        quantise: bool = False,
        dense_below: int = DENSE_BELOW,
        search_above: int = SEARCH_ABOVE,
        rule: Rule = "corrected",
    ) -> None:
        if dense_below > search_above:
            raise InputError(f"dense_below {dense_below} exceeds search_above {search_above}")
        thresholds.RedSync(rule)  # raises on a bad rule
        self._ratio = check_ratio(ratio)
        self.quantise = quantise
        self.dense_below = dense_below
        self.search_above = search_above
        self.rule: Rule = rule
        self._chosen: Compressor | None = None
        self._restored: Mapping[str, Any] | None = None

    @property
    def ratio(self) -> float:
        """Kept fraction k/d of the message."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        assert ratio is not None
        self._ratio = ratio
        if self._chosen is not None and self._chosen.ratio is not None:
            self._chosen.ratio = ratio

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Exchange by the class of the message; all messages must be of the same one."""
        if self._chosen is None:
            numel = corrected.numel()
            self._chosen = DenseCompressor()
            if numel >= self.dense_below:
                self._chosen = SparseCompressor(
                    redsync_selector(numel, self.ratio, self.quantise, self.search_above, self.rule)
                )
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
