"""Sign compressors that all-gather their messages: signSGD with majority vote, EF-signSGD and SSDM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from gradstats.compressors.signs import (
    RandomStream,
    SignGathering,
    add_signed,
    bernoulli_bits,
    check_scale,
    mean_magnitude,
    packed_signs,
    packed_stochastic_signs,
    signed,
)

__all__ = ["SSDM", "EFSignSGD", "SignSGD"]


def majority_bits(voters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Count votes without unpacking them.

    The votes on eight elements at a time are added up binary digit by digit, and so compared with half their number.

    Parameters
    ----------
    voters : sequence of uint8 tensors, shape (bytes,)
        Packed bits of each voter, at least one.

    Returns
    -------
    majority : uint8 tensor, shape (bytes,)
        Bits that more than half of the voters have set.
    ties : uint8 tensor, shape (bytes,)
        Bits that exactly half of them have set; of an odd number, half of one fewer.
    """
    # digits of the counts, the lowest first; each tensor has one digit of all counts, eight a byte
    digits = [torch.zeros_like(voters[0]) for _ in range(len(voters).bit_length())]
    for carry in voters:
        # a binary adder: `both` is the carry into the next digit
        for digit in digits:
            both = digit & carry
            digit ^= carry
            carry = both
    # from the highest digit down; `equal` marks the counts that agree with half so far
    more, equal = torch.zeros_like(digits[0]), torch.full_like(digits[0], 255)
    for place in reversed(range(len(digits))):
        if len(voters) // 2 >> place & 1:
            equal &= digits[place]
        else:
            more |= equal & digits[place]
            equal &= ~digits[place]
    return more, equal


class SignSGD(SignGathering):
    """Signs by majority vote: the update is η_s·sgn(Σ_r sgn(g_r)).

    A majority of votes is not the sum of what was sent, so there is no residual for a memory; :class:`EFSignSGD` is the
    system with error feedback.

    Parameters
    ----------
    scale : float or "mean"
        Size η_s of the update, above 0. ``"mean"`` takes the mean over ranks of each rank's mean |g|, which gives the
        update the size of a gradient, so that one learning rate suits dense training and this.
    seed : int
        Seed of the coins, at least 0 and equal on all ranks.

    Raises
    ------
    InputError
        If the scale is not positive or the seed is negative.

    Notes
    -----
    Source: signSGD with majority vote (Bernstein et al. 2018).

    Differs from the paper, whose η_s is 1 (``scale=1.0``). sgn(0) is a fair coin of each rank, and a tie is a fair coin
    that all ranks throw alike.
    """

    feedback = False

    def __init__(self, scale: float | Literal["mean"] = "mean", seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = check_scale(scale)
        self._ties = RandomStream(seed, 1)

    def _compress(
        self, corrected: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, float]:
        packed, total = packed_signs(corrected, generator)
        scale = mean_magnitude(total, corrected.numel()) if self.scale == "mean" else self.scale
        return packed, float(scale)

    def _average(
        self, messages: list[tuple[torch.Tensor, float]], corrected: torch.Tensor
    ) -> torch.Tensor:
        majority, ties = majority_bits([packed for packed, _ in messages])
        # votes of an odd number of ranks are never tied
        if len(messages) % 2 == 0:
            # On the CPU, as the ranks may have different devices, whose generators differ.
            coin = self._ties.generator(rank=0)
            thrown = bernoulli_bits(ties.numel(), 1, 2, coin, alike=True)
            majority |= ties & thrown.to(ties.device)
        scale = sum(s for _, s in messages) / len(messages) if self.scale == "mean" else self.scale
        return signed(majority, corrected.numel(), float(scale), corrected.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both random generators."""
        return {**super().state_dict(), "ties": self._ties.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._ties.load(state["ties"])


class _Averaging(SignGathering):
    """Sign compressor whose update is the average of scale·sign over the ranks."""

    def _average(
        self, messages: list[tuple[torch.Tensor, float]], corrected: torch.Tensor
    ) -> torch.Tensor:
        (packed, scale), *others = messages
        total = signed(packed, corrected.numel(), scale, corrected.dtype)
        # in the order of ranks, and so to the same bits on every rank
        for packed, scale in others:
            add_signed(packed, scale, total)
        return total.div_(len(messages))


class EFSignSGD(_Averaging):
    """Signs times the mean magnitude, with error feedback.

    Each rank sends (‖p‖₁/d)·sgn(p) of its corrected gradient p, the update is the average over ranks, and the
    residual is p minus what the rank itself sent. The constructor takes the `seed` of the coins for zeros, at least 0
    and equal on all ranks.

    Raises
    ------
    InputError
        If the seed is negative.

    Notes
    -----
    Source: EF-signSGD (Karimireddy et al. 2019).

    Differs from the paper: sgn(0) is a fair coin of each rank, and the memory holds the gradient without the learning
    rate, which the optimizer applies to the average.
    """

    def _compress(
        self, corrected: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, float]:
        packed, total = packed_signs(corrected, generator)
        return packed, mean_magnitude(total, corrected.numel())

    def _residual(
        self, corrected: torch.Tensor, packed: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return add_signed(packed, -scale, corrected)


class SSDM(_Averaging):
    """Stochastic signs times the norm, an unbiased compression without memory.

    Each rank sends ‖g‖₂·b with b = ±1 and P(b_i = 1) = ½ + g_i/(2‖g‖₂), so that the average over ranks is unbiased.
    The variance of a message is about d times the squared norm of the gradient. The constructor takes the `seed` of
    the signs, at least 0 and equal on all ranks; each rank draws from a stream of its own.

    Raises
    ------
    InputError
        If the seed is negative.

    Notes
    -----
    Source: SSDM (Safaryan and Richtárik 2021), as appendix A of Marsit (Wu et al. 2022) states it.

    Differs from Marsit's section 3.2, whose ½ + |g|/‖g‖₂ exceeds 1 where |g| > ‖g‖₂/2.
    """

    feedback = False

    def _compress(
        self, corrected: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, float]:
        return packed_stochastic_signs(corrected, generator)
