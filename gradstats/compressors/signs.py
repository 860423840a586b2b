"""Parts that one-bit compressors share: signs as bits, their messages and coins, and the all-gather of signs.

A sign has two values and zero has none of them. So sgn(0) is a fair coin that each rank throws for itself, and a tied
majority is a fair coin that all ranks throw alike. All coins come from the compressor's own generators.
"""

# Size: half of its lines are docstrings; a sign's bit is drawn, packed, sent and added by the same rules.

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradstats.collectives import all_gather_flags
from gradstats.collectives.header import checked_bytes
from gradstats.collectives.plain import all_gather_checked
from gradstats.collectives.ring import pack_bits
from gradstats.compressors.base import Compressor, Reduced
from gradstats.compressors.cost import FLAG, Exchange, Load, Work
from gradstats.errors import InputError, first_line
from gradstats.primitives import operators
from gradstats.primitives.arrays import narrowed
from gradstats.primitives.backend import device_code
from gradstats.primitives.blocks import map_blocks
from gradstats.primitives.ratio import check_number, check_seed, shown

__all__ = [
    "SCALE_BYTES",
    "RandomStream",
    "SignCompressor",
    "SignGathering",
    "add_signed",
    "bernoulli_bits",
    "bits_per_element",
    "check_scale",
    "matching_rate",
    "mean_magnitude",
    "mean_over_ranks",
    "norm_of",
    "packed_signs",
    "packed_stochastic_signs",
    "read_message",
    "sign_message",
    "signed",
    "stochastic_sign_bits",
    "take_off",
]

SCALE_BYTES = 4
_DEVICE_STATE = 16
"""Bytes of the state of a device's generator."""
_WORD = 8
"""Bytes of a word of random bits."""
_AT_ONCE = 1 << 14
"""Signs that become numbers together, which a cache holds: whole bytes of them."""


def matching_rate(mean: torch.Tensor, exact_mean: torch.Tensor) -> float:
    """Return the share of elements whose signs agree with those of the exact mean, Marsit's figure 1b.

    Parameters
    ----------
    mean : tensor, shape (d,)
        A lossy average.
    exact_mean : tensor, shape (d,)
        The dense average. Elements where it is zero have no sign to agree with and do not count.

    Returns
    -------
    float
        Share in [0, 1]; NaN if no element counts.
    """
    counts = exact_mean != 0
    agree = (torch.sign(mean) == torch.sign(exact_mean)) & counts
    total = int(counts.sum())
    return int(agree.sum()) / total if total else math.nan


def bits_per_element(bytes_sent: float, numel: int, ring: int | None = None) -> float:
    """Return the number of bits that travelled for each element in a round.

    Parameters
    ----------
    bytes_sent : float
        Bytes that one rank sent in a round, or the average over rounds.
    numel : int
        Number of elements d of the gradient.
    ring : int, optional
        Number of ranks M of a ring or torus (:class:`Cascading`, :class:`Marsit`). Every element then takes 2(M − 1)
        hops with M messages under way at once, so bytes are divided by 2(M − 1)/M: the result is bits per element
        *and hop*, which is 1 for one-bit and 32 for full precision, as in Marsit's figure 3b. None for an all-gather,
        whose bytes are those of one message.

    Returns
    -------
    float
        Number of bits; NaN for d = 0 and for a ring of one rank, which sends nothing.
    """
    hops = 1.0 if ring is None else 2 * (ring - 1) / ring
    return 8 * bytes_sent / (numel * hops) if numel and hops else math.nan


class RandomStream:
    """A compressor's own random generator, made on first use, with a state for checkpoints.

    Parameters
    ----------
    seed : int
        Seed, at least 0 and equal on all ranks.
    purpose : int
        Number that tells the streams of one compressor apart.

    Raises
    ------
    InputError
        If the seed is not a whole number from 0 to 2⁶⁴ − 1.
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self.seed, self.purpose = check_seed(seed), purpose
        self._generator: torch.Generator | None = None
        self._state: torch.Tensor | None = None

    def generator(self, rank: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator, seeded on the first call.

        Parameters
        ----------
        rank : int
            Number of the stream: ranks that pass their own have a stream each; ranks that pass the same number and
            draw equally often share one.
        device : torch.device or str
            Device on which the numbers are drawn.

        Returns
        -------
        torch.Generator
            The same generator at every call.
        """
        if self._generator is None:
            self._generator = torch.Generator(device)
            # mixed by NumPy: streams of neighbouring seeds and ranks have nothing in common
            key = np.random.SeedSequence([self.seed, self.purpose, rank])
            self._generator.manual_seed(int(key.generate_state(1, np.uint64)[0]))
            # a checkpoint is read before the device of the gradient is known
            if self._state is not None:
                self._generator.set_state(self._state)
        return self._generator

    def state(self) -> torch.Tensor | None:
        """Return the generator's state; None before its first use."""
        return self._state if self._generator is None else self._generator.get_state()

    def load(self, state: torch.Tensor | None) -> None:
        """Continue from what :meth:`state` returned.

        Parameters
        ----------
        state : uint8 tensor or None
            The generator's state; None to start anew from the seed.

        Raises
        ------
        InputError
            If it is no such state.
        """
        if state is not None:
            if (
                not isinstance(state, torch.Tensor)
                or state.dtype != torch.uint8
                or state.dim() != 1
            ):
                raise InputError(f"a generator's state is bytes in a tensor, not {shown(state)}")
            # those of devices are of a few bytes, any of which are a state
            if state.numel() > _DEVICE_STATE:
                try:
                    torch.Generator().set_state(state)
                except RuntimeError as error:
                    raise InputError(f"no state of a generator: {first_line(error)}") from None
            elif state.numel() != _DEVICE_STATE:
                raise InputError(f"no state of a generator has {state.numel()} bytes")
        # the next call makes a generator for its device, in this state
        self._generator, self._state = None, state


def bernoulli_bits(
    length: int,
    numerator: int,
    denominator: int,
    generator: torch.Generator,
    *,
    alike: bool = False,
) -> torch.Tensor:
    """Return packed random bits, each 1 with exactly the probability of a fraction, made 64 at a time.

    A bit says whether a uniform number lies below the fraction. Both are compared digit by binary digit, those of the
    number drawn for 64 bits in one word, until they differ: two digits for a bit on average.

    Parameters
    ----------
    length : int
        Number of bytes.
    numerator : int
        Numerator of the probability, at least 0.
    denominator : int
        Its denominator, above the numerator.
    generator : torch.Generator
        Generator of the words, on the device wanted.
    alike : bool
        Whether ranks whose tensors are read by different codes are to draw the same bits from the same state.

    Returns
    -------
    uint8 tensor, shape (length,)
        Eight bits a byte.
    """
    # no compiled loop draws bits: on the CPU torch's operators do
    chosen = None if alike else device_code(torch.empty(0, device=generator.device))
    code = chosen or operators
    bits = code.bernoulli(-(-length // _WORD), numerator, denominator, generator)
    return bits.view(torch.uint8)[:length]


def stochastic_sign_bits(
    values: torch.Tensor, norm: float, generator: torch.Generator
) -> torch.Tensor:
    """Return random signs as bits, so that ‖v‖₂·(2·bit − 1) has the expectation v.

    Parameters
    ----------
    values : tensor, shape (d,)
        Values v of any sign.
    norm : float
        Their norm ‖v‖₂.
    generator : torch.Generator
        Generator of the bits, on the device of the values.

    Returns
    -------
    bool tensor, shape (d,)
        True with probability ½ + v/(2‖v‖₂).

    Notes
    -----
    Source: Marsit (Wu et al. 2022), appendix A. Section 3.2's ½ + |v|/‖v‖₂ is not a probability for |v| > ‖v‖₂/2.
    """
    # float32 draws are multiples of 2⁻²⁴: an element below that share of the norm is a fair coin
    uniform = torch.rand(
        values.numel(), generator=generator, device=values.device, dtype=values.dtype
    )
    # A zero vector becomes fair coins; whatever they show is multiplied by zero.
    return uniform < (values / (2 * norm) if norm > 0 else values).add(0.5)


def packed_signs(values: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, float]:
    """Return the signs of values as packed bits, and the sum of their magnitudes.

    Parameters
    ----------
    values : tensor, shape (d,)
        Values of any sign.
    generator : torch.Generator
        Generator of the coins for zeros, on the device of the values.

    Returns
    -------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Signs, eight a byte: 1 for +, 0 for − and NaN, and a fair coin for zero.
    total : float
        Σ|v|; NaN if a value is.
    """
    flat, length = _compiled_view(values), -(-values.numel() // 8)
    if flat is None:
        total = float(torch.linalg.vector_norm(values, 1, dtype=torch.float64))
        packed, zeros = pack_bits(values > 0), pack_bits(values == 0)
        # mostly there are no zeros, and no coins are drawn for them
        some = bool(zeros.any())
    else:
        from gradstats.primitives.loops.signs import block_signs

        # signs and zeros, in whole words, whose last bytes are cut off again
        words = np.empty((2, -(-length // _WORD)), np.uint64)
        some, total = block_signs(flat, *words)
        packed, zeros = torch.from_numpy(words.view(np.uint8)[:, :length])
    if some:
        packed |= zeros & bernoulli_bits(length, 1, 2, generator)
    return packed, total


def packed_stochastic_signs(
    values: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, float]:
    """Return random signs as packed bits, as :func:`stochastic_sign_bits` has them, and the norm of the values.

    Parameters
    ----------
    values : tensor, shape (d,)
        Values of any sign.
    generator : torch.Generator
        Generator of the bits, on the device of the values.

    Returns
    -------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Signs, eight a byte.
    norm : float
        ‖v‖₂, rounded to float32; not finite if a value is not.
    """
    flat = _compiled_view(values)
    if flat is not None:
        from gradstats.primitives.loops.signs import block_stochastic_signs
        from gradstats.primitives.loops.sums import block_norm
        from gradstats.primitives.loops.words import PART

        # blocks begin at multiples of PART, so every thread has entries of its own
        largest = np.empty(-(-flat.size // PART), np.float32)
        squares = map_blocks(lambda at, block: block_norm(block, largest[at // PART :]), flat)
        norm = float(narrowed(math.sqrt(sum(squares))))
    # the compiled loop takes finite elements alone
    if flat is None or not math.isfinite(norm):
        norm = norm_of(values)
        return pack_bits(stochastic_sign_bits(values, norm, generator)), norm
    # one word a call, whatever the values: the loop goes on from it with a generator of its own
    seed = operators.random_words(1, generator)
    words = np.empty(-(-flat.size // 64), np.uint64)
    block_stochastic_signs(flat, norm, largest, seed.numpy().view(np.uint64)[0], words)
    return torch.from_numpy(words.view(np.uint8)[: -(-flat.size // 8)]), norm


def _compiled_view(values: torch.Tensor) -> NDArray[np.float32] | None:
    """Return the memory of values that the compiled loops read; None if others do."""
    # the memory of a lazily negated tensor has the opposite signs
    values = values.detach().resolve_neg()
    compiled = values.dtype == torch.float32 and values.is_contiguous()
    return values.numpy() if compiled and values.is_cpu and device_code(values) is None else None


def _written_view(values: torch.Tensor) -> NDArray[np.float32] | None:
    """Return the memory of values that the compiled loops write to; None if others do."""
    # to resolve a negation is to copy, and the loop would write into the copy
    return None if values.is_neg() else _compiled_view(values)


def signed(
    packed: torch.Tensor,
    numel: int,
    scale: float,
    dtype: torch.dtype,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return scale·(2·bit − 1) for every bit.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Bits, eight a byte, the first lowest: 1 for +, 0 for −.
    numel : int
        Number of elements d.
    scale : float
        Size of every element.
    dtype : torch.dtype
        Floating dtype of the result.
    room : tensor, shape (8·⌈d/8⌉,), optional
        Memory for the result, such as that of the last step: new memory takes longer than what is written to it.

    Returns
    -------
    tensor, shape (d,)
        Elements of either sign and one size.
    """
    if room is None:
        room = torch.empty(8 * packed.numel(), dtype=dtype, device=packed.device)
    numbers = _written_view(room)
    if numbers is not None:
        _spread(packed.numpy(), scale, spread=numbers)
        return room[:numel]
    # the signs of each byte, made where they are used: nothing is copied to the device
    byte, place = (torch.arange(n, device=packed.device) for n in (256, 8))
    table = ((byte[:, None] >> place & 1) * 2 - 1).to(dtype).mul_(scale)
    # index_select takes no bytes for positions
    return torch.index_select(table, 0, packed.int(), out=room.view(-1, 8)).view(-1)[:numel]


def add_signed(packed: torch.Tensor, scale: float, values: torch.Tensor) -> torch.Tensor:
    """Add what :func:`signed` returns to values, which takes no memory of their size where compiled loops read them.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Bits, eight a byte, the first lowest: 1 for +, 0 for −.
    scale : float
        Size of every element.
    values : tensor, shape (d,)
        Overwritten.

    Returns
    -------
    tensor, shape (d,)
        The values.
    """
    flat = _written_view(values)
    if flat is None:
        return values.add_(signed(packed, values.numel(), scale, values.dtype))
    # what the loop takes off has the other sign
    _spread(packed.numpy(), -scale, values=flat)
    return values


def _spread(
    packed: NDArray[np.uint8],
    scale: float,
    values: NDArray[np.float32] | None = None,
    spread: NDArray[np.float32] | None = None,
) -> None:
    """Make bits numbers, and take them off from values; of what is not given there is a part at a time, in a cache."""
    from gradstats.primitives.loops.signs import block_spread_signs

    size = values.size if values is not None else 8 * packed.size
    left, numbers = np.zeros((2, min(size, _AT_ONCE)), np.float32)
    for start in range(0, size, _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, size))
        n = part.stop - start
        block_spread_signs(
            packed[start // 8 :],
            np.float32(scale),
            left[:n] if values is None else values[part],
            numbers[:n] if spread is None else spread[part],
        )


def take_off(
    packed: torch.Tensor, scale: float, values: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """Return what :func:`signed` does, and subtract it from the values, in one pass where compiled loops read them.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Bits, eight a byte, the first lowest: 1 for +, 0 for −.
    scale : float
        Size of every element.
    values : tensor, shape (d,)
        Overwritten.
    room : tensor, shape (8·⌈d/8⌉,)
        Memory for the result, of the values' dtype.

    Returns
    -------
    tensor, shape (d,)
        Elements of either sign and one size.
    """
    flat = _written_view(values)
    if flat is None:
        taken = signed(packed, values.numel(), scale, values.dtype, room)
        values.sub_(taken)
        return taken
    from gradstats.primitives.loops.signs import block_spread_signs

    taken = room[: values.numel()]
    block_spread_signs(packed.numpy(), np.float32(scale), flat, taken.numpy())
    return taken


def check_scale(scale: float | str) -> float | Literal["mean"]:
    """Return a step size of signs unchanged if it is one.

    Parameters
    ----------
    scale : float or "mean"
        Positive step size, or ``"mean"``.

    Returns
    -------
    float or "mean"
        The step size.

    Raises
    ------
    InputError
        If the scale is neither ``"mean"`` nor a positive finite number.
    """
    if isinstance(scale, str) and scale == "mean":
        return "mean"
    number: Any = scale
    return check_number(number, "scale, unless it is 'mean',", 0, math.inf)


def mean_over_ranks(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Average a number over the ranks.

    Parameters
    ----------
    value : float
        This rank's number.
    group : torch.distributed.ProcessGroup or None
        The ranks; the default group if None.
    device : torch.device
        Device of the message.

    Returns
    -------
    float
        The mean, the same bits on every rank, because all ranks add in the same order.
    """
    # gathered, as the order in which an all-reduce adds is its backend's
    message = torch.tensor([value], dtype=torch.float64, device=device)
    values: list[float] = all_gather_checked(message, group).view(-1).tolist()
    return sum(values) / len(values)


def mean_magnitude(total: float, numel: int) -> float:
    """Return the mean magnitude ‖v‖₁/d as it travels.

    Parameters
    ----------
    total : float
        Σ|v|.
    numel : int
        Number of elements d.

    Returns
    -------
    float
        Mean magnitude, rounded to float32; 0 for d = 0.
    """
    return float(narrowed(total / max(1, numel)))


def norm_of(values: torch.Tensor) -> float:
    """Return the norm ‖v‖₂.

    Parameters
    ----------
    values : tensor, shape (d,)
        Values v of any sign.

    Returns
    -------
    float
        Norm, rounded to float32. It is added up in float64, where squares neither overflow nor vanish.
    """
    return float(narrowed(float(torch.linalg.vector_norm(values, 2, dtype=torch.float64))))


def sign_message(packed: torch.Tensor, scale: float) -> torch.Tensor:
    """Put a scale and signs into a message.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        Signs, eight a byte, as :func:`gradstats.collectives.ring.pack_bits` returns them.
    scale : float
        Size of every element, sent as a float32.

    Returns
    -------
    uint8 tensor, shape (4 + ⌈d/8⌉,)
        The scale, then eight signs a byte.
    """
    scales = torch.tensor([scale], dtype=torch.float32, device=packed.device)
    return torch.cat([scales.view(torch.uint8), packed])


def read_message(message: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the signs and the scale that :func:`sign_message` packed.

    Parameters
    ----------
    message : uint8 tensor, shape (4 + ⌈d/8⌉,)
        The scale, then eight signs a byte.

    Returns
    -------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        The signs, a view of the message.
    scale : float
        Size of every element.
    """
    # Cloned, as a row of gathered messages need not start where a float32 may.
    scale = message[:SCALE_BYTES].clone().view(torch.float32)
    return message[SCALE_BYTES:], float(scale)


class SignCompressor(Compressor):
    """A compressor of signs, whose coins every rank throws for itself.

    Parameters
    ----------
    seed : int
        Seed of the coins, at least 0 and equal on all ranks. Each rank draws from a stream of its own.

    Raises
    ------
    InputError
        If the seed is not a whole number from 0 to 2⁶⁴ − 1.
    """

    has_ratio = False

    def __init__(self, seed: int = 0) -> None:
        self._random = RandomStream(seed, 0)

    def warm_up(self) -> None:
        """Compile the loops of signs, or load them."""
        # a whole byte of signs and a part of one
        values, generator = torch.ones(9), torch.Generator()
        packed, scale = packed_stochastic_signs(values, generator)
        packed_signs(values, generator)
        take_off(packed, scale, values, torch.empty(16))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator."""
        return {"generator": self._random.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._random.load(state["generator"])


class SignGathering(SignCompressor):
    """All-gather of one message from every rank: a float32 scale and the signs. Subclasses say which."""

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return an all-gather of a scale and one bit for each element."""
        message = checked_bytes(SCALE_BYTES + -(-load.numel // 8))
        return load.exchange(
            load.numel,
            message,
            select=(load.selecting,),
            communicate=(FLAG, Work("all_gather", message)),
            unpack=(Work(f"decode:{load.name}", load.numel),),
        )

    @abstractmethod
    def _compress(
        self, corrected: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, float]:
        """Return this rank's signs, packed, uint8 (⌈d/8⌉,), and its scale, a float32."""

    @abstractmethod
    def _average(
        self, messages: list[tuple[torch.Tensor, float]], corrected: torch.Tensor
    ) -> torch.Tensor:
        """Return the update from all ranks' packed signs and scales."""

    def _residual(
        self, corrected: torch.Tensor, packed: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the residual, which is zero unless a subclass says otherwise."""
        return corrected.zero_()

    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Send the signs and a scale, and average those of all ranks."""
        flags = all_gather_flags(flag, group, corrected.device)
        if any(flags):
            return Reduced(flags)
        started = time.perf_counter()
        # after the flags: a refused step throws no coins
        generator = self._random.generator(dist.get_rank(group), corrected.device)
        packed, scale = self._compress(corrected, generator)
        message = sign_message(packed, scale)
        selected = time.perf_counter()
        rows = all_gather_checked(message, group)
        communicated = time.perf_counter()
        numel = corrected.numel()
        return Reduced(
            flags=flags,
            mean=self.decode(rows, corrected),
            residual=self._residual(corrected, packed, scale),
            selected=numel,
            union=numel,
            bytes_sent=checked_bytes(message.numel()),
            select_seconds=selected - started,
            communicate_seconds=communicated - selected,
        )

    def decode(self, messages: torch.Tensor, corrected: torch.Tensor) -> torch.Tensor:
        """Return the update from the messages of all ranks.

        Parameters
        ----------
        messages : uint8 tensor, shape (ranks, 4 + ⌈d/8⌉)
            Messages of :func:`sign_message`, by rank.
        corrected : tensor, shape (d,)
            A gradient, which gives the number of elements, dtype and device. Its values are not used.

        Returns
        -------
        tensor, shape (d,)
            The update.
        """
        return self._average([read_message(row) for row in messages], corrected)
