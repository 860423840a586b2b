"""Random-k: the same random positions on every rank, so that no index travels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradstats.collectives.plain import all_gather_flags
from gradstats.collectives.update import SparseUpdate
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FLAG, FULL, Exchange, Load, Work
from gradstats.primitives.ratio import check_ratio, check_seed, target_count

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["RandomK"]


class RandomK(Compressor):
    """All-reduce of the values at k positions drawn without replacement, the same on every rank.

    Parameters
    ----------
    ratio : float
        Kept fraction k/d, in (0, 1].
    unbiased : bool
        Whether to scale what was sent by d/k, so that the expectation of the update over the draws is the dense mean.
        This is for training *without* error feedback: no residual can account for scaled values. The residual is then
        the gradient without the drawn elements, as for plain random-k.
    seed : int
        Seed of the positions, at least 0 and equal on all ranks.

    Raises
    ------
    InputError
        If the ratio is outside (0, 1] or the seed is negative.

    Notes
    -----
    Source: the random-k baseline of the literature, plain or scaled by d/k; no particular paper's program is followed.

    The positions are a function of seed and step alone: no other random state is touched, resuming needs only the step,
    and a step refused by a flag leaves the ranks in step. With `unbiased` false nothing is lost: what was sent and the
    residual add up to the corrected gradient, bit for bit.
    """

    one_union = True

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return an all-reduce of the values at positions that every rank draws for itself."""
        k = load.counts[0]
        return load.exchange(
            k,
            FULL * k,
            select=(load.selecting,),
            communicate=(FLAG, Work("all_reduce", FULL * k)),
            unpack=(Work("unpack", k),),
        )

    def __init__(self, ratio: float, unbiased: bool = False, seed: int = 0) -> None:
        self.ratio: float = check_ratio(ratio)  # now, not in the first backward pass
        self.unbiased = unbiased
        self.feedback = not unbiased
        self.seed = check_seed(seed)
        self._update = SparseUpdate()
        self._step = 0

    def warm_up(self) -> None:
        """Compile nothing: what is drawn needs no loops."""

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Average the gradient at this step's positions."""
        started = time.perf_counter()
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        flagged = time.perf_counter()
        numel = corrected.numel()
        k = target_count(self.ratio, numel)
        # drawn on the host: generators of devices differ from each other
        indices = self._draw(numel, k).to(corrected.device)
        drawn = time.perf_counter()
        mean = self._update.average(corrected, indices, group)
        if self.unbiased and k:
            # all of the buffer, which is zero at the other positions
            mean.mul_(numel / k)
        # only now, so that a step refused or lost draws the same positions again
        self._step += 1
        return Reduced(
            flags=flags,
            mean=mean,
            residual=corrected,
            sent=indices,
            selected=k,
            union=k,
            bytes_sent=k * corrected.element_size(),
            select_seconds=drawn - flagged,
            communicate_seconds=time.perf_counter() - drawn + flagged - started,
        )

    def _draw(self, numel: int, k: int) -> torch.Tensor:
        """Return this step's k positions, in ascending order."""
        if not k:
            return torch.empty(0, dtype=torch.int64)
        # a new one for each step, so that a checkpoint needs no state of it
        generator = np.random.default_rng([self.seed, self._step])
        # unshuffled, as they are sorted anyway
        drawn = generator.choice(numel, k, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(drawn.astype(np.int64)))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the seed."""
        return {"step": self._step, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._step, self.seed = int(state["step"]), int(state["seed"])
