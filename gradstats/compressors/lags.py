"""LAGS-SGD: layer-wise selection whose ratios hide the communication behind the backward pass."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.codec import PLAIN, Codec
from gradstats.compressors.base import NamedSlice, Reduced, Selector
from gradstats.compressors.calibration import Calibration, Trial, cut, settling
from gradstats.compressors.hiding import Costs, Delivery, Way, by_layer
from gradstats.compressors.layerwise import MERGE, Layerwise
from gradstats.compressors.selectors import ThresholdSelector, TopK
from gradstats.errors import InputError
from gradstats.primitives.ratio import check_count, check_ratio, target_count
from gradstats.thresholds import DGC

__all__ = ["LAGS"]


# Size: options of the paper's algorithm, and what it measures of a training.
class LAGS(Layerwise):
    """Top-k layer by layer in the order of backpropagation, with ratios that hide the messages behind it.

    It chooses how to send once, on the same measurements on every rank:

    1. For `calibrate` steps after the first every layer keeps `ratio`, and backward pass and selection of every message
       are timed.
    2. Exchanges of several sizes among all ranks, outside of any step, show what a message and an element cost.
    3. From both follow the ratios of eq. 19, and the time of a step for each way to send
       (:func:`gradstats.compressors.hiding.ways`).
    4. Those predicted to be within a quarter of the fastest, and always one with a single message, are used in turn,
       step by step, `calibrate` times each. Then the measured times decide
       (:func:`gradstats.compressors.hiding.preferred`).

    Parameters
    ----------
    ratio : float
        Least fraction k/d that any layer keeps, in (0, 1]: the paper's 1/c_u.
    adaptive : bool
        Whether to choose how to send; if false, every layer keeps `ratio`.
    calibrate : int
        Number of steps in which times are taken, at least 1, and of steps for which each way to send is tried. Counting
        starts anew when DDP rebuilds its buckets.
    double_sampling : bool
        Whether thresholds are those of a sample of the layer, refined once (:class:`gradstats.thresholds.DGC`), instead
        of the exact k-th largest magnitude.
    exactly : bool
        Whether each layer sends k elements whatever they are, see :class:`TopK`: on a device the host then does not
        wait for a selection. With `adaptive` it is refused: what is not waited for cannot be timed.
    merge : int
        Elements of gradient to gather before a message is sent, see :class:`Layerwise`.
    codec : Codec or torch.dtype
        What positions and values are on the wire, see :class:`SparseCompressor`.
    overlap : bool
        Whether to exchange during the backward pass.

    Attributes
    ----------
    ratios : dict of str to float
        Fraction that each layer keeps, by name; equal ones where the gradient is sent as a whole. Empty before the
        choice.
    whole : bool
        Whether one message, selected in the gradient as a whole, is sent after the backward pass.
    deliveries : list of Delivery
        The measurements behind the choice, one for each message at the least ratio: means over the ranks of medians
        over the steps. For the exchange the least time replaces the median, as anything above it is waiting.
    costs : Costs or None
        Measured costs of an exchange; None before the choice.
    measured : list of (Way, float)
        The ways to send that were tried, the reference first, with the seconds of a step of each: medians over the
        steps of means over the ranks. Empty before the choice.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or `calibrate` is below 1, values cannot travel as the type given, or `exactly`
        comes with a sampled threshold or with `adaptive`.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), algorithm 1, with the ratios of eq. 19.

    Differs from the paper: it accumulates the gradient, not learning rate times gradient, and the optimizer applies
    the rate to the average. Top-k is exact unless `double_sampling` is set. The paper sends one message for each layer
    and merges the selections of small layers; here messages are merged by the size of the gradient, so that merging
    does not depend on the ratios, and the layers of one message share a ratio. The paper has neither dense messages nor
    a way back to one message: where cores are shared, what hides in theory does not in a step.

    A choice that comes from a clock differs from run to run. A checkpoint keeps it; a run that stops while it measures
    begins anew.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        *,
        adaptive: bool = True,
        calibrate: int = 20,
        double_sampling: bool = False,
        exactly: bool = False,
        merge: int = MERGE,
        codec: Codec | torch.dtype = PLAIN,
        overlap: bool = True,
    ) -> None:
        # no ratio for all: each selector gets its own from _top_k() and _keep()
        super().__init__(self._top_k, merge=merge, codec=codec, overlap=overlap)
        self._ratio = check_ratio(ratio)  # now, not in the first backward pass
        self.adaptive = adaptive
        self.calibrate = check_count(calibrate, "calibrate")
        self.settling = settling(self.calibrate) if adaptive else 0
        if exactly and double_sampling:
            raise InputError(
                "a sampled threshold does not select exactly k: leave one of the two out"
            )
        if exactly and adaptive:
            raise InputError("exactly needs adaptive=False: what is not waited for cannot be timed")
        self.double_sampling, self.exactly = double_sampling, exactly
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the choice and what was measured for it."""
        self.ratios: dict[str, float] = {}
        self.whole = False
        self._settled = False
        self._calibration = Calibration(self.calibrate, self._ratio, self._codec, self.overlap)
        self._layers: list[NamedSlice] = []
        self._flag = 0
        self._ended = time.perf_counter()

    @property
    def deliveries(self) -> list[Delivery]:
        """Each message at the least ratio, measured."""
        return self._calibration.deliveries

    @property
    def costs(self) -> Costs | None:
        """Measured costs of an exchange."""
        return self._calibration.costs

    @property
    def measured(self) -> list[tuple[Way, float]]:
        """Every way to send that was tried, with the seconds of a step."""
        return self._calibration.measured

    def _top_k(self, name: str, numel: int) -> Selector:
        ratio = self.ratios.get(name, self._ratio)
        if name not in self.ratios and self.whole:
            # the gradient as a whole has no entry, and the layers' are all equal then
            ratio = next(iter(self.ratios.values()))
        if self.double_sampling:
            return ThresholdSelector(DGC(), ratio)
        return TopK(ratio, self.exactly)

    @property
    def ratio(self) -> float:
        """Least fraction k/d that any layer keeps. Setting it, as a schedule does, drops the choice."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        # a schedule sets it in every step, mostly to what it is
        if ratio != self._ratio:
            self._ratio = ratio
            self._begin_anew()
            self._keep({})

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the target count of a layer, or of all layers met so far together."""
        if layer is None and self.whole:
            return target_count(next(iter(self.ratios.values())), numel)
        return super().target(numel, layer)

    def push(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int = 0,
    ) -> None:
        """Take layers whose gradient is complete, as :meth:`Layerwise.push` does, unless one message has them all."""
        # kept in the order of the backward pass, by which the timeline is cut
        self._layers += layers
        # of one message for everything nothing is pushed on, so reduce() announces the flag
        self._flag |= flag
        if not self.whole:
            super().push(corrected, layers, group, flag)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Complete the step as :meth:`Layerwise.reduce` does; measure it until it is known how to send."""
        layers = self._layers or [("", slice(0, corrected.numel()))]
        if self.whole:
            flag |= self._flag
        self._layers, self._flag = [], 0
        reduced = super().reduce(corrected, group, flag)
        now = time.perf_counter()
        # from the end of the step before, so forward pass and optimizer are in it
        seconds, self._ended = now - self._ended, now
        # flags are the same on all ranks, so all of them count the same steps
        if self.adaptive and not self._settled and not any(reduced.flags):
            calibration = self._calibration
            if calibration.trials:
                self._use(calibration.following(seconds, group, corrected.device))
                self._settled = not calibration.trials
            elif calibration.time(cut(self.timeline, layers, self.target), seconds):
                # one of its own: it is only timed, and the state of none may change
                selector = self._top_k("", corrected.numel())
                self._use(calibration.predict(corrected, selector, group))
                self._ended = time.perf_counter()
        return reduced

    def abandon(self) -> None:
        """Drop a step that will not be completed."""
        super().abandon()
        self._layers, self._flag = [], 0

    def _use(self, trial: Trial) -> None:
        """Send in this way from the next step on."""
        # messages differ in size from way to way: each keeps the exchanges that know their room
        way, self._gathers = trial.way, trial.gathers
        self.whole = way.whole
        # the one ratio of a whole, for every message's layers
        each = way.ratios * len(self.deliveries) if way.whole else way.ratios
        self._keep(by_layer(self.deliveries, each))

    def _keep(self, ratios: dict[str, float]) -> None:
        """Give every layer its ratio."""
        self.ratios = ratios
        if "" not in ratios:
            self._selectors.pop("", None)  # of a step that was sent as a whole
        for name, selector in self.selectors.items():
            selector.ratio = ratios.get(name, self._ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`Layerwise`, and the choice if there is one."""
        return {
            **super().state_dict(),
            "ratio": self._ratio,
            # a search under way cannot go on elsewhere: its times would be of two runs
            "ratios": dict(self.ratios) if self._settled else {},
            "whole": self.whole and self._settled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._ratio = state["ratio"]
        self._begin_anew()
        self._settled = bool(state["ratios"])
        self.whole = state["whole"]
        self._keep(dict(state["ratios"]))

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to before the last step, but for what was measured in it: the network does not change with it.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` returned before that step.
        """
        super().load_state_dict(state)
