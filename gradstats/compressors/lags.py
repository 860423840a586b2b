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
from gradstats.errors import InputError
from gradstats.primitives.ratio import check_ratio

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
    """Return the largest kept fractions whose messages hide behind the backward pass (LAGS-SGD, eq. 19).

    The paper's compression ratio is c = d/k = 1 / the fraction: the smallest c ≥ 1 with
    t_comm(c) + t_spar ≤ t_backward of what follows, where t_comm(c) = latency + per_element · d/c, and never above c_u.

    Parameters
    ----------
    numel : (m,), elements of gradient behind each message, in the order they are sent.
    backward : (m,), seconds of the backward pass between a message's sending and the next one's; 0 for the last one.
    select : (m,), seconds the message's selection takes.
    latency : seconds a message takes at least.
    per_element : seconds more for every element sent.
    smallest : 1/c_u, the fraction kept where nothing can be hidden.

    Returns
    -------
    float64 (m,), in [smallest, 1].

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
    """Return how much faster than one message at the end layer-wise sending can be at most (LAGS-SGD, eq. 20).

    (t_f + t_b + t_c) / (t_f + max(t_b, t_c)): either the backward pass or the communication is hidden completely.

    Parameters
    ----------
    forward, backward, communicate : seconds of a step.

    Examples
    --------
    >>> pipelining_bound(1, 2, 2)
    1.6666666666666667
    """
    return (forward + backward + communicate) / (forward + max(backward, communicate))


@dataclass(frozen=True, slots=True)
class Delivery:
    """Measured medians of one message of a step, over calibration steps and ranks.

    Attributes
    ----------
    layers : the parameters merged in it, by name.
    numel : their elements.
    sent : elements this rank sent of them.
    backward : seconds of backward pass before it, since the message before.
    select, communicate : seconds.
    """

    layers: tuple[str, ...]
    numel: int
    sent: float
    backward: float
    select: float
    communicate: float


class LAGS(Layerwise):
    """LAGS-SGD (Shi et al. 2020): layer-wise top-k in the order of backpropagation, ratios by eq. 19.

    For `calibrate` steps every layer keeps `ratio`. What the backward pass, selection and communication took is then
    averaged over the ranks, latency and cost per element fitted to it, and every message's layers keep what
    :func:`hiding_ratios` allows: never less than `ratio`, and the same on all ranks. Messages at the least ratio are
    too small to tell what an element costs; so all of it is measured a second time at the ratios chosen, which are then
    corrected and stay.

    Parameters
    ----------
    ratio : 1/c_u, the least k/d any layer keeps.
    adaptive : False keeps `ratio` in every layer.
    calibrate : steps that are measured each time, after DDP has rebuilt its buckets.
    merge, dtype, overlap : see :class:`Layerwise`.

    Attributes
    ----------
    ratios : the fraction each layer keeps, by name; empty before they are chosen for the first time.
    deliveries : the measurements they were chosen by.

    Notes
    -----
    Ratios that come from a clock differ from run to run. A checkpoint keeps those chosen, and how often they were; a
    run stopped while it measures begins that measurement anew.

    The paper has one message a layer, and merges the selections of small ones. Here messages are merged by the size of
    the gradient, so that merging does not depend on the ratios, and the layers of a message share a ratio.
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
        if calibrate < 1:
            raise InputError(f"calibrate must be at least 1, not {calibrate}")
        super().__init__(self._top_k, merge=merge, dtype=dtype, overlap=overlap)
        self._ratio = check_ratio(ratio)  # now, not in the first backward pass
        self.adaptive = adaptive
        self.calibrate = calibrate
        self.ratios: dict[str, float] = {}
        self.deliveries: list[Delivery] = []
        self._measured: list[list[Delivery]] = []
        self._choices = 0
        self._layers: list[NamedSlice] = []

    def _top_k(self, name: str, numel: int) -> Selector:
        return TopK(self.ratios.get(name, self._ratio))

    @property
    def ratio(self) -> float:
        """The least k/d any layer keeps. Setting it, as a warm-up does, drops the ratios chosen."""
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
        """Take layers whose gradient is complete, see :meth:`Layerwise.push`."""
        self._layers += layers
        super().push(corrected, layers, group, flag)

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Complete the step, see :meth:`Layerwise.reduce`; measure it, and choose ratios when enough are measured."""
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
        """Cut the step's timeline into messages, and start over when DDP has cut its buckets anew."""
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
        """Fit the cost of a message, and give every layer its ratio: the same on all ranks."""
        import scipy.optimize

        each = list(zip(*self._measured, strict=True))
        seconds = torch.tensor(
            [
                [statistics.median(d.backward for d in steps) for steps in each],
                [statistics.median(d.select for d in steps) for steps in each],
                # the least: the rest is waiting for a slower rank
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
        """Return the ratios, and what :class:`Layerwise` keeps."""
        return {
            **super().state_dict(),
            "ratio": self._ratio,
            "ratios": dict(self.ratios),
            "choices": self._choices,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        super().load_state_dict(state)
        self._measured.clear()
        self._ratio = state["ratio"]
        self.ratios = dict(state["ratios"])
        self._choices = int(state["choices"])
        self._keep({name: self.ratios.get(name, self._ratio) for name in self.selectors})
