"""RedSync: a selection that suits the size of the message, and one mean value instead of k values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gradstats import thresholds
from gradstats.collectives.codec import PLAIN, Codec, as_codec
from gradstats.compressors.base import Compressor, Reduced, Selector, WithSelector
from gradstats.compressors.cost import Exchange, Load, dense, sparse
from gradstats.compressors.dense import DenseCompressor
from gradstats.compressors.selectors import ThresholdSelector
from gradstats.compressors.sparse import SparseCompressor
from gradstats.errors import InputError
from gradstats.primitives import Selection
from gradstats.primitives.ratio import check_count, check_ratio, shown
from gradstats.thresholds.redsync import Rule

__all__ = ["DENSE_BELOW", "SEARCH_ABOVE", "MeanOfSign", "RedSync", "redsync_selector"]

DENSE_BELOW = 1 << 15
"""Number of elements below which a message is averaged densely: the paper's 128 KB of float32."""
SEARCH_ABOVE = 1 << 20
"""Number of elements from which on the threshold is searched: the paper's 4 MB of float32."""


class MeanOfSign(WithSelector, Selector):
    """Selection among the elements of one sign, sent as positions and one float, the mean of their values.

    The selected elements are the largest k in even steps and the smallest k in odd steps, so that all values have one
    sign. If fewer than k elements have it, all of those are selected.

    Parameters
    ----------
    selector : Selector
        The rule that selects among the elements of one sign. Its state belongs to this selector from now on.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), section 5.2.3.

    Differs from algorithm 4, whose line 22 zeroes the residual where values were sent, and so loses how each of them
    differed from the mean. Here the residual is corrected − sent.
    """

    single_value = True

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._step = 0

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select among the elements of this step's sign, and average them."""
        # Elements of the other sign become zero, which is never selected.
        signed = gradient.clamp(min=0) if self._step % 2 == 0 else gradient.clamp(max=0)
        message = self.selector.select(signed)
        self._step += 1
        if not message.indices.numel():
            return message
        # In float64, as it is the mean of millions; rounded once, so that what is sent is what is subtracted.
        mean = gradient[message.indices].double().mean().float()
        return Selection(message.indices, mean[None], message.threshold)

    def target(self, numel: int) -> int:
        """Return the target count k of the inner selector."""
        return self.selector.target(numel)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, whose parity decides the sign, and the inner selector's state."""
        return {"step": self._step, "selector": self.selector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step = int(state["step"])
        self.selector.load_state_dict(state["selector"])


def redsync_selector(
    numel: int,
    ratio: float,
    quantise: bool = False,
    search_above: int = SEARCH_ABOVE,
    rule: Rule = "corrected",
    topk_below: int = 0,
) -> Selector:
    """Return the selector that RedSync uses in a message of a given size.

    It is plain top-k below `topk_below` elements, trimmed top-k below `search_above`, and from there on a binary
    search of the threshold, which is reused for five steps.

    Parameters
    ----------
    numel : int
        Number of elements of the message.
    ratio : float
        Kept fraction k/d, in (0, 1].
    quantise : bool
        Whether to send one mean value, see :class:`MeanOfSign`. The threshold is then searched anew in every step, as
        the sign changes each time.
    search_above : int
        Number of elements from which on the threshold is searched.
    rule : {"corrected", "paper"}
        Rule of the thresholds, see :class:`gradstats.thresholds.RedSync` and
        :class:`gradstats.thresholds.RedSyncTrimmed`.
    topk_below : int
        Number of elements below which plain top-k selects: the paper's thsd1, for which it gives no number.

    Returns
    -------
    Selector
        A selector with a state of its own.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or the rule is unknown.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), algorithm 5 and section 5.4.

    Differs from the paper, whose binary search runs on a sample that it does not describe: here it runs on all
    elements.
    """
    # algorithm 5: by size plain top-k, trimmed top-k, binary search
    estimator: thresholds.Estimator = thresholds.RedSyncTrimmed(rule)
    if numel < topk_below:
        estimator = thresholds.Exact()
    elif numel >= search_above:
        estimator = thresholds.RedSync(rule, interval=1 if quantise else 5)
    selector = ThresholdSelector(estimator, ratio)
    return MeanOfSign(selector) if quantise else selector


class RedSync(Compressor):
    """RedSync's exchange of the whole gradient as one message, dense or selected according to its size.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    quantise : bool
        Whether to send one mean value, see :class:`MeanOfSign`. The paper does not quantise the output layer.
    dense_below : int
        Number of elements below which all of them are averaged densely; 0 for never. At most `search_above`.
    search_above : int
        Number of elements from which on the threshold is searched, see :func:`redsync_selector`.
    rule : {"corrected", "paper"}
        Rule of the thresholds, see :class:`gradstats.thresholds.RedSync` and
        :class:`gradstats.thresholds.RedSyncTrimmed`.
    codec : Codec or torch.dtype
        What positions and values are on the wire, see :class:`SparseCompressor`. Dense messages have none.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], the rule is unknown, or `dense_below` exceeds `search_above`.

    Notes
    -----
    Source: RedSync (Fang et al. 2018), algorithms 4 and 5 and section 5.4.

    Differs from the paper, where each layer is a message and chosen for by its size: that is
    :func:`gradstats.hooks.systems.redsync`. Momentum is not in here but in
    :class:`gradstats.hooks.MomentumCorrection`.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {
        "redsync-quantised": {"quantise": True}
    }
    codecs = ("indices", "values")
    always: ClassVar[Mapping[str, Any]] = {"dense_below": 0}

    def __init__(
        self,
        ratio: float,
        quantise: bool = False,
        dense_below: int = DENSE_BELOW,
        search_above: int = SEARCH_ABOVE,
        rule: Rule = "corrected",
        codec: Codec | torch.dtype = PLAIN,
    ) -> None:
        dense_below = check_count(dense_below, "dense_below", 0)
        search_above = check_count(search_above, "search_above", 0)
        if dense_below > search_above:
            raise InputError(
                f"dense_below must be at most search_above ({shown(search_above)}), not {shown(dense_below)}"
            )
        thresholds.RedSync(rule)  # raises on a bad rule
        self._ratio = check_ratio(ratio)
        self.quantise = quantise
        self.dense_below = dense_below
        self.search_above = search_above
        self.rule: Rule = rule
        self.codec = as_codec(codec)
        # made in the first step, which shows the size of the messages
        self._chosen: Compressor | None = None
        self._restored: Mapping[str, Any] | None = None

    @classmethod
    def coded(cls, quantise: bool = False, **options: Any) -> tuple[str, ...]:
        """Return what a codec may change: where one value stands for all, positions alone."""
        return ("indices",) if quantise else cls.codecs

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return the exchange of a quantised message, which is dense if it is small."""
        return dense(load) if load.numel < DENSE_BELOW else sparse(load, single=True)

    @property
    def ratio(self) -> float:
        """Kept fraction k/d of the message."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        assert ratio is not None
        self._ratio = ratio
        # the dense exchange has no ratio
        if self._chosen is not None and self._chosen.ratio is not None:
            self._chosen.ratio = ratio

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the target count k, or all elements of a message that is averaged densely."""
        return numel if numel < self.dense_below else super().target(numel, layer)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Exchange the message as its size class demands; all messages must be of the same class."""
        if self._chosen is None:
            numel = corrected.numel()
            self._chosen = DenseCompressor()
            if numel >= self.dense_below:
                selector = redsync_selector(
                    numel, self.ratio, self.quantise, self.search_above, self.rule
                )
                self._chosen = SparseCompressor(selector, self.codec)
            if self._restored is not None:
                # a checkpoint may be read before the first step, which decides whose state it is
                self._chosen.load_state_dict(self._restored)
                self._restored = None
        return self._chosen.reduce(corrected, group, flag)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exchange that was chosen, None before the first step."""
        return {"chosen": self._restored if self._chosen is None else self._chosen.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, at the next step, when the size of the messages is known."""
        self._chosen, self._restored = None, state["chosen"]
