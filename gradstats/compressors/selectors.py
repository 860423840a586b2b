"""Selectors that ask a threshold estimator, the same object that the tables of thresholds measure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from gradstats.compressors.base import Selector
from gradstats.errors import InputError
from gradstats.primitives import Selection, topk
from gradstats.primitives.ratio import check_count, check_ratio, shown, target_count
from gradstats.thresholds import Estimator, Exact

__all__ = ["ChunkTopK", "Everything", "ThresholdSelector", "TopK"]

_TRIED = (1 << 10, 1 << 15, 1 << 21)
"""Numbers of elements: sorted, counted, and from where on SIDCo takes a histogram."""


class Everything(Selector):
    """Selection of all elements: for a layer that is averaged densely beside others that are not."""

    whole = True

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select every element."""
        return Selection(torch.arange(gradient.numel(), device=gradient.device), gradient, 0.0)

    def warm_up(self) -> None:
        """Compile nothing: there are no loops."""

    def target(self, numel: int) -> int:
        """Return the number of elements, whatever a schedule says of the ratio."""
        return numel


class ThresholdSelector(Selector):
    """Selection of the elements with |g| ≥ η, where any threshold estimator gives η.

    Parameters
    ----------
    estimator : Estimator
        The threshold rule. Its state belongs to this selector from now on.
    ratio : float
        Target fraction k/d, in (0, 1].

    Raises
    ------
    InputError
        If the ratio is outside (0, 1].

    Notes
    -----
    Source: that of the estimator, see its class in :mod:`gradstats.thresholds`.
    """

    ratio: float

    def __init__(self, estimator: Estimator, ratio: float) -> None:
        self.estimator = estimator
        self.ratio = check_ratio(ratio)  # now, not in the first backward pass

    def select(self, gradient: torch.Tensor) -> Selection:
        """Estimate the threshold of a gradient and select by it."""
        estimate, selection = self.estimator.select(gradient, self.ratio)
        return Selection(selection.indices, selection.values, estimate.threshold)

    def warm_up(self) -> None:
        """Run a copy of the rule on few elements and on many, which rules read by different loops.

        A rule from outside may have parts that cannot be copied, or draw from a generator of the training's: it is not
        run, and all loops are compiled.
        """
        if not all(
            type(each).__module__.startswith("gradstats.") for each in (self, self.estimator)
        ):
            super().warm_up()
            return
        self.estimator.warm_up()
        for numel in _TRIED:
            tried = torch.linspace(0.1, 1, numel)
            # exact zeros, which a gradient behind a ReLU has, are told from denormals by a loop of their own
            tried[0] = 0.0
            # of a copy, as selecting moves the state of a rule on
            copy.deepcopy(self).select(tried)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimator's state."""
        return {"estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the estimator's state."""
        self.estimator.load_state_dict(state["estimator"])


class TopK(ThresholdSelector):
    """Exact top-k: selection of the k largest magnitudes, and, unless `exactly`, of those tied with the k-th.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    exactly : bool
        Select k elements whatever they are: the first of those tied, and zeros where there is nothing else. There is no
        threshold then, and on a device the host does not wait for the selection, whose length it knows.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], or `exactly` is not true or false.
    """

    def __init__(self, ratio: float, exactly: bool = False) -> None:
        super().__init__(Exact(), ratio)
        if not isinstance(exactly, bool):
            raise InputError(f"exactly must be true or false, not {shown(exactly)}")
        self.exactly = exactly

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select the largest magnitudes."""
        # topk() takes k from 1 on; of nothing the estimator selects nothing
        if self.exactly and gradient.numel():
            return topk(gradient, self.target(gradient.numel()))
        return super().select(gradient)


class ChunkTopK(Selector):
    """Top-k of every chunk of consecutive elements by itself.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d of every chunk, in (0, 1].
    chunk : int
        Number of elements of a chunk; the last one may have fewer.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1], or the chunk is empty.

    Notes
    -----
    Source: SparseLoCo (Sarfi et al. 2025), 64 of every 4,096 elements.

    Differs from the paper: chunks are cut from the flat vector, where its program cuts each weight into blocks of its
    rows and columns. Of ties at the k-th magnitude only as many are kept as make k, and zeros are not sent.
    """

    ratio: float

    def __init__(self, ratio: float = 64 / 4096, chunk: int = 4096) -> None:
        self.ratio = check_ratio(ratio)
        self.chunk = check_count(chunk, "chunk")

    def target(self, numel: int) -> int:
        """Return the sum of every chunk's target count k."""
        whole, rest = divmod(numel, self.chunk)
        last = target_count(self.ratio, rest) if rest else 0
        return whole * target_count(self.ratio, self.chunk) + last

    def select(self, gradient: torch.Tensor) -> Selection:
        """Select the largest magnitudes of each chunk."""
        # the rest is a shorter chunk, with a k of its own
        whole = gradient.numel() // self.chunk * self.chunk
        positions = []
        for start, rows in (
            (0, gradient[:whole].view(-1, self.chunk)),
            (whole, gradient[whole:].view(1, -1)),
        ):
            if rows.numel():
                k = target_count(self.ratio, rows.shape[1])
                # ascending in each chunk, and so, as chunks follow each other, in all
                inside = rows.abs().topk(k, sorted=False).indices.sort().values
                first = torch.arange(len(rows), device=rows.device) * rows.shape[1] + start
                positions.append((inside + first[:, None]).view(-1))
        indices = torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64)
        # topk takes zeros where a chunk has fewer than k other elements
        indices = indices[gradient[indices] != 0]
        return Selection(indices, gradient[indices])
