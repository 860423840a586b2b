"""The noise of micro-batches, from the accumulation that a training does anyway."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.graph import get_gradient_edge

from gradstats.errors import InputError, warn
from gradstats.hooks.gradient import dense, real_view
from gradstats.hooks.torch_private import backward_pass, nested_backward
from gradstats.hooks.units import local_part
from gradstats.primitives.sketch import Sketch, merge, sketch
from gradstats.statistics.noise import noise_and_signal
from gradstats.statistics.pot.peaks import stability_at
from gradstats.statistics.resampling import mean_interval, ratio_interval

__all__ = ["NOISE_NAMES", "MicroBatches", "noise_ends"]

NOISE_NAMES = (
    *("noise_scale", "noise_scale_low", "noise_scale_high"),
    *("micro_cosine", "micro_cosine_low", "micro_cosine_high"),
    *("noise_xi", "noise_xi_low", "noise_xi_high"),
)
"""Values of a monitor that :class:`MicroBatches` gives."""

_TAIL = 0.1
"""Share of the noise's non-zero elements whose excesses give ξ, as of the gradient's."""


_EVERY = 5
"""Steps described from one interval of the noise scale to the next: its ends take some milliseconds."""


def noise_ends(noise: NDArray[np.floating], signal: NDArray[np.floating]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a noise scale; NaN where there is none.

    Parameters
    ----------
    noise, signal : ndarray, shape (n,)
        What :func:`gradstats.statistics.noise.noise_and_signal` said of n steps.
    """
    low, high, _ = ratio_interval(noise, signal)
    return low, high


class MicroBatches:
    """See every micro-batch's gradient on its way into ``.grad``, and keep sums of it.

    A hook at the place where autograd accumulates sees the micro-batch's gradient and the sum of those before it: both
    squared norms follow from their products, and no gradient is kept.

    Parameters
    ----------
    layers : sequence of (str, torch.Tensor)
        Names and parameters.
    samples : int
        Samples of a micro-batch, the unit of the noise scale.
    window : int
        Number of optimizer steps whose sums give the values.

    Raises
    ------
    InputError
        If parameters are sharded.
    """

    def __init__(
        self, layers: Sequence[tuple[str, torch.Tensor]], samples: int, window: int
    ) -> None:
        if any(local_part(p) is not p for _, p in layers):
            raise InputError(
                "noise= takes whole gradients of micro-batches, and these parameters are sharded: compare ranks by "
                "gradstats.agreement of a capture of kind 'local' instead"
            )
        self._samples = samples
        self._sums: deque[tuple[float, float]] = deque(maxlen=window)
        self._xi: deque[float] = deque(maxlen=window)
        self._ends = math.nan, math.nan
        self._taken = 0
        self._step = _Step()
        self._warned = False
        see = weakref.WeakMethod(self._see)
        # of nodes that nobody holds autograd makes new ones, without the hook
        self._nodes = [get_gradient_edge(p).node for _, p in layers]
        self._handles = [
            node.register_prehook(_Seeing(p, see))
            for node, (_, p) in zip(self._nodes, layers, strict=True)
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def begin(self, described: bool) -> None:
        """Begin an optimizer step.

        Parameters
        ----------
        described : bool
            Whether it is to be described; else micro-batches are not looked at.
        """
        self._step = _Step(described)

    def end(self, scale: float = 1.0) -> dict[str, float]:
        """End an optimizer step.

        Parameters
        ----------
        scale : float
            The loss scale that the gradients of its micro-batches carried.

        Returns
        -------
        dict of str to float
            Values over the last steps, by :data:`NOISE_NAMES`; empty before the first step of two micro-batches, and
            of a step that is not described.
        """
        step = self._step
        if not step.described:
            return {}
        # reentrant checkpointing cuts a pass into several, each of which reaches other parameters
        count = max(step.counts.values()) if step.nested else len(step.passes)
        if step.stale:
            self._warn(
                "gradients are not zeroed between optimizer steps: the noise of micro-batches cannot be told from them"
            )
        elif count == 1:
            self._warn(
                "noise=True compares the micro-batches of one optimizer step, and here is one alone: accumulate two or "
                "more, or compare the ranks of a capture by gradstats.agreement"
            )
        elif count > 1 and step.products is not None and not step.lost:
            # a step in other units would count more, or less, than the others of the window
            squares, dots = (step.products / scale**2).tolist()
            # ‖Σ g‖² = Σ ‖g‖² + 2 Σ gᵢ · gⱼ over i < j
            of_sum = squares + 2 * dots
            if math.isfinite(squares) and math.isfinite(dots) and squares > 0:
                self._sums.append(noise_and_signal(squares, of_sum, count))
                self._xi.append(_shape(step.sketches))
        self._step = _Step(False)
        if not self._sums:
            return {}
        if not self._taken % _EVERY:
            self._ends = noise_ends(*np.array(self._sums).T)
        self._taken += 1
        return self._values()

    def _values(self) -> dict[str, float]:
        """Return the values over the window, with intervals where there are enough steps."""
        noise, signal = np.array(self._sums).T
        # a ratio of means: a step's own estimate of ‖G‖² may be near zero, or negative
        trace, square = float(noise.mean()), float(signal.mean())
        scale, (low, high) = trace / square if square > 0 else math.inf, self._ends
        xi = mean_interval(np.array(self._xi))
        total = trace + square
        values = {
            "noise_scale": self._samples * scale,
            "noise_scale_low": self._samples * low,
            "noise_scale_high": self._samples * high,
            # two micro-batches share G, and each has ‖G‖² + tr Σ
            "micro_cosine": square / total if total > 0 else math.nan,
            # 1 / (1 + scale) falls as the scale grows: the ends change places
            "micro_cosine_low": 1 / (1 + high),
            "micro_cosine_high": 1 / (1 + low),
            "noise_xi": xi.mean,
            "noise_xi_low": xi.low,
            "noise_xi_high": xi.high,
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def _see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient of one micro-batch to the sums."""
        step = self._step
        if not step.described:
            return
        number = backward_pass()
        if number not in step.passes:
            step.passes.add(number)
            step.nested |= nested_backward()
        before = parameter.grad
        count = step.counts.get(id(parameter), 0)
        step.counts[id(parameter)] = count + 1
        # zeros are no stale gradient: zero_grad(set_to_none=False) leaves them
        if not count and before is not None:
            step.stale |= bool(_flat(before).any())
        step.lost |= count > 0 and before is None  # zeroed between micro-batches, or taken
        g = _flat(gradient)
        products = [(g * g).sum(dtype=torch.float64)]
        products.append(torch.zeros_like(products[0]))
        if count and before is not None:
            total = _flat(before).to(g.dtype)
            products[1] = (g * total).sum(dtype=torch.float64)
            if count == 1:  # g − g′, of twice the noise's variance and symmetric
                step.sketches.append(sketch(g - total, 7))
        vector = torch.stack(products)
        known = step.products
        # a model may lie on several devices
        step.products = vector if known is None else known + vector.to(known.device)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn(message)


class _Step:
    """What is known of the micro-batches of an optimizer step."""

    def __init__(self, described: bool = True) -> None:
        self.described = described
        self.passes: set[int] = set()  # numbers of the backward passes
        self.counts: dict[int, int] = {}  # micro-batches of each parameter
        self.products: torch.Tensor | None = None  # Σ‖g‖², and Σ of g · (those before it)
        self.sketches: list[Sketch] = []  # of differences of two micro-batches
        self.nested = False  # whether some passes were parts of another
        self.lost = False  # whether .grad was None before a later one
        self.stale = False  # whether .grad had something before the first


class _Seeing:
    """A hook of autograd that keeps neither the parameter nor the monitor alive."""

    def __init__(self, parameter: torch.Tensor, see: weakref.WeakMethod[Any]) -> None:
        self._parameter, self._see = weakref.ref(parameter), see

    def __call__(self, gradients: tuple[torch.Tensor, ...]) -> None:
        parameter, see = self._parameter(), self._see()
        # autograd passes None where a branch gives no gradient
        if parameter is not None and see is not None and gradients[0] is not None:
            see(parameter, gradients[0])


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's elements in float32 or float64, in logical order."""
    values = real_view(dense(gradient.detach()).resolve_conj()).reshape(-1)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _shape(sketches: Sequence[Sketch]) -> float:
    """Return ξ of the noise's largest tenth; NaN where there are too few elements."""
    if not sketches:
        return math.nan
    whole = merge(sketches)
    return stability_at(whole.magnitudes, _TAIL, "pwm").c if whole.moments.count else math.nan
