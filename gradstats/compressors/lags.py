"""LAGS-SGD: layer-wise selection whose ratios hide the communication behind the backward pass."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from gradstats.collectives.plain import all_reduce_mean
from gradstats.compressors.base import Activity, NamedSlice, Reduced, Selector
from gradstats.compressors.layerwise import MERGE, Layerwise
from gradstats.compressors.selectors import TopK
from gradstats.primitives.ratio import check_count, check_ratio

__all__ = ["LAGS", "Delivery", "hiding_ratios", "pipelining_bound"]

_CHOICES = 2


def hiding_ratios(
    numel: ArrayLike,
    backward: ArrayLike,
    select: ArrayLike,
    latency: float,
    per_element: float,
    smallest: float = 0.001,
) -> NDArray[np.float64]:
    """Return the largest kept fractions whose messages hide behind the backward pass.

    Parameters
    ----------
    numel : array_like, shape (m,)
        Number of elements of the gradient behind each message, in the order of sending.
    backward : array_like, shape (m,)
        Seconds of the backward pass between the sending of a message and of the next one; 0 for the last message.
    select : array_like, shape (m,)
        Seconds that the selection for each message takes.
    latency : float
        Seconds that any message takes at least.
    per_element : float
        Seconds that every element sent adds.
    smallest : float
        Smallest fraction 1/c_u, kept where nothing can be hidden.

    Returns
    -------
    ndarray of float64, shape (m,)
        Kept fractions, in [smallest, 1].

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), eq. 19, whose formula the available text has lost; this one follows from its
    words. The paper's compression ratio is c = d/k, the inverse of the fraction: the smallest c ≥ 1 with t_comm(c) +
    t_spar ≤ t_b of what follows, never above c_u, where t_comm(c) = latency + per_element · d/c.

    Examples
    --------
    A message of 1000 elements has 2 ms to hide 1 ms of latency and 10 µs per element:

    >>> hiding_ratios([1000, 1000], [2e-3, 0], [0, 0], 1e-3, 1e-5)
    array([0.1  , 0.001])
    """
    budget = np.asarray(backward, float) - np.asarray(select, float) - latency
    affordable = np.where(budget > 0, np.inf, 0.0)
    if per_element > 0:
        affordable = budget / (per_element * np.maximum(np.asarray(numel, float), 1))
    return np.clip(affordable, smallest, 1.0)


def pipelining_bound(forward: float, backward: float, communicate: float) -> float:
    """Return the largest speed-up of layer-wise sending over one message at the end of a step.

    Parameters
    ----------
    forward : float
        Seconds of the forward pass, t_f.
    backward : float
        Seconds of the backward pass, t_b.
    communicate : float
        Seconds of the communication, t_c.

    Returns
    -------
    float
        The bound (t_f + t_b + t_c) / (t_f + max(t_b, t_c)): either the backward pass or the communication is hidden
        completely.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), eq. 20, rewritten without the ratio t_c/t_b.

    Examples
    --------
    >>> pipelining_bound(1, 2, 2)
    1.6666666666666667
    """
    return (forward + backward + communicate) / (forward + max(backward, communicate))


@dataclass(frozen=True, slots=True)
class Delivery:
    """Measurements of one message of a step.

    Attributes
    ----------
    layers : tuple of str
        Names of the parameters merged in the message.
    numel : int
        Number of elements of these parameters.
    sent : float
        Number of elements that this rank aimed to send of them.
    backward : float
        Seconds of the backward pass since the message before.
    select : float
        Seconds of the selection.
    communicate : float
        Seconds of the exchange.
    """

    layers: tuple[str, ...]
    numel: int
    sent: float
    backward: float
    select: float
    communicate: float


class LAGS(Layerwise):
    """Top-k layer by layer in the order of backpropagation, with ratios that hide the messages behind it.

    For `calibrate` steps every layer keeps `ratio`. The times of backward pass, selection and communication are then
    averaged over the ranks, a latency and a cost per element are fitted to them, and the layers of every message keep
    what :func:`hiding_ratios` allows: never less than `ratio`, and the same on all ranks. Messages at the least ratio
    are too small to tell what an element costs; so everything is measured a second time at the chosen ratios, which
    are then corrected and stay.

    Parameters
    ----------
    ratio : float
        Least fraction k/d that any layer keeps, in (0, 1]: the paper's 1/c_u.
    adaptive : bool
        Whether to choose a ratio for each layer; if false, every layer keeps `ratio`.
    calibrate : int
        Number of steps to measure before each choice, at least 1. Counting starts anew when DDP rebuilds its buckets.
    merge : int
        Elements of gradient to gather before a message is sent, see :class:`Layerwise`.
    dtype : torch.dtype
        Type that values travel as: float32, float16 or bfloat16.
    overlap : bool
        Whether to exchange during the backward pass.

    Attributes
    ----------
    ratios : dict of str to float
        Fraction that each layer keeps, by name; empty before the first choice.
    deliveries : list of Delivery
        The measurements behind the last choice, one for each message: means over the ranks of medians over the steps.
        For the exchange the least time replaces the median, as anything above it is waiting.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or `calibrate` is below 1; in the first step, if `dtype` is none of the three.

    Notes
    -----
    Source: LAGS-SGD (Shi et al. 2020), algorithm 1, with the ratios of eq. 19.

    Differs from the paper: it accumulates the gradient, not learning rate times gradient, and the optimizer applies
    the rate to the average. Top-k is exact, not estimated from a sample. The paper sends one message for each layer
    and merges the selections of small layers; here messages are merged by the size of the gradient, so that merging
    does not depend on the ratios, and the layers of one message share a ratio.

    Ratios that come from a clock differ from run to run. A checkpoint keeps the chosen ratios and the number of
    choices; a run that stops while it measures begins that measurement anew.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        *,
        adaptive: bool = True,
        calibrate: int = 10,
        merge: int = MERGE,
        dtype: torch.dtype = torch.float32,
        overlap: bool = True,
    ) -> None:
        super().__init__(self._top_k, merge=merge, dtype=dtype, overlap=overlap)
        self._ratio = check_ratio(ratio)  # now, not in the first backward pass
        self.adaptive = adaptive
        self.calibrate = check_count(calibrate, "calibrate")
        self.ratios: dict[str, float] = {}
        self.deliveries: list[Delivery] = []
        self._measured: list[list[Delivery]] = []
        self._choices = 0
        self._layers: list[NamedSlice] = []

    def _top_k(self, name: str, numel: int) -> Selector:
        return TopK(self.ratios.get(name, self._ratio))

    @property
    def ratio(self) -> float:
        """Least fraction k/d that any layer keeps. Setting it, as a schedule does, drops the chosen ratios."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if ratio != self._ratio:
            self._ratio = ratio
            self._measured.clear()
            self._choices = 0
            self._keep(dict.fromkeys(self.selectors, ratio))
            self.ratios = {}

    def push(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int = 0,
    ) -> None:
        """Take layers whose gradient is complete, as :meth:`Layerwise.push` does."""
        self._layers += layers
        super().push(corrected, layers, group, flag)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Complete the step as :meth:`Layerwise.reduce` does, measure it, and choose ratios after enough steps."""
        reduced = super().reduce(corrected, group, flag)
        layers, self._layers = self._layers, []
        if self.adaptive and self._choices < _CHOICES and not any(reduced.flags):
            self._measure(layers)
            if len(self._measured) == self.calibrate:
                self._choose(group, corrected.device)
                self._measured.clear()
                self._choices += 1
        return reduced

    def abandon(self) -> None:
        """Drop a step that will not be completed."""
        super().abandon()
        self._layers = []

    def _measure(self, layers: list[NamedSlice]) -> None:
        """Cut the step's timeline into messages; start over when DDP has rebuilt its buckets."""
        names = [name for name, _ in layers]
        numels = {name: slot.stop - slot.start for name, slot in layers}
        deliveries: list[Delivery] = []
        pending: list[Activity] = []
        sending = {a.layer: a for a in self.timeline if a.lane == "communicate"}
        for activity in sorted(self.timeline, key=lambda a: a.start):
            if activity.lane == "communicate":
                continue
            pending.append(activity)
            if activity.lane == "select" and activity.layer in sending:
                last = names.index(activity.layer) + 1
                merged, names = tuple(names[:last]), names[last:]
                sent = sending[activity.layer]
                deliveries.append(
                    Delivery(
                        layers=merged,
                        numel=sent.numel,
                        sent=sum(self.selectors[n].target(numels[n]) for n in merged),
                        backward=sum(a.end - a.start for a in pending if a.lane == "backward"),
                        select=sum(a.end - a.start for a in pending if a.lane == "select"),
                        communicate=sent.end - sent.start,
                    )
                )
                pending = []
        if self._measured and [d.layers for d in self._measured[0]] != [
            d.layers for d in deliveries
        ]:
            self._measured.clear()
        self._measured.append(deliveries)

    def _choose(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Fit the cost of a message and give every layer its ratio, the same on all ranks."""
        import scipy.optimize

        each = list(zip(*self._measured, strict=True))
        seconds = torch.tensor(
            [
                [statistics.median(d.backward for d in steps) for steps in each],
                [statistics.median(d.select for d in steps) for steps in each],
                # the least time: anything above it is waiting for a slower rank
                [min(d.communicate for d in steps) for steps in each],
            ],
            dtype=torch.float64,
            device=device,
        )
        backward, select, communicate = all_reduce_mean(seconds, group).cpu().numpy()
        sent = np.array([statistics.median(d.sent for d in steps) for steps in each])
        numel = np.array([steps[0].numel for steps in each])
        design = np.stack([np.ones_like(sent), sent], axis=1)
        (latency, per_element), _ = scipy.optimize.nnls(design, communicate)
        following = np.append(backward[1:], 0.0)
        ratios = hiding_ratios(numel, following, select, latency, per_element, self._ratio)
        self.deliveries = [
            Delivery(steps[0].layers, steps[0].numel, steps[0].sent, *seconds_)
            for steps, *seconds_ in zip(
                each, backward.tolist(), select.tolist(), communicate.tolist(), strict=True
            )
        ]
        self.ratios = {
            name: float(ratio)
            for delivery, ratio in zip(self.deliveries, ratios, strict=True)
            for name in delivery.layers
        }
        self._keep(self.ratios)

    def _keep(self, ratios: Mapping[str, float]) -> None:
        for name, ratio in ratios.items():
            self.selectors[name].ratio = ratio

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`Layerwise` and the ratios."""
        return {
            **super().state_dict(),
            "ratio": self._ratio,
            "ratios": dict(self.ratios),
            "choices": self._choices,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._measured.clear()
        self._ratio = state["ratio"]
        self.ratios = dict(state["ratios"])
        self._choices = int(state["choices"])
        self._keep({name: self.ratios.get(name, self._ratio) for name in self.selectors})
