"""Number formats: what is left of float32 numbers in 16, 8, 6, 4 or 2 bits, with the scales that they share.

One place for what is analysed and what is sent: :func:`gradstats.wire` measures what
:class:`gradstats.collectives.Codec` puts on the wire. Operators of torch, on any device.

Sources: *OCP Microscaling Formats (MX) Specification*, version 1.0 (2023), for elements of 8, 6 and 4 bits in blocks of
32 with a scale 2ᵉ, and section 6.3 for the scale, e = ⌊log₂ max⌋ − (exponent of the type's largest number); *OCP 8-bit
Floating Point Specification*, revision 1.0 (2023), for E4M3 and E5M2; NVIDIA, *Pretraining Large Language Models with
NVFP4* (2025), for E2M1 in blocks of 16 with a scale in E4M3 and one in float32 for the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import torch

from gradstats.errors import unknown

__all__ = ["FORMATS", "Format", "NumberFormat", "Scales", "as_format", "rotated"]

_TINY = 2.0**-100
"""Largest magnitude below which numbers are sent as 0 where a scale is no power of two: dividing by one that small
would leave the normal numbers."""
_LEAST_SCALE = 2.0**-6
"""Smallest normal number of E4M3, and smallest scale of a block of NVFP4: with it, rounding twice is rounding once."""
_MARGINS = {"float32": 1 + 2.0**-20, "e4m3": 1 + 2.0**-14}
"""What rounding adds at most to a number that is scaled to the largest one of its type; with NVFP4's scale of the
tensor, the cutting off of its last bits, too."""


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """Return x / by, the same bits on every device: CUDA divides by a tensor, and of a number takes the reciprocal."""
    return x / x.new_full((), by)


@dataclass(frozen=True, slots=True)
class Format:
    """A type of numbers, and the scale that some of them share.

    Attributes
    ----------
    name : str
        Name in tables and options.
    bits : int
        Bits of a number, without its share of the scales.
    largest : float
        Largest number of the type.
    mantissa : int or None
        Bits of the fraction; None for whole numbers.
    emin : int
        Exponent of the smallest normal number.
    scale : {"none", "float32", "e8m0", "e4m3"}
        What a scale is: ``"float32"`` makes the largest magnitude of a block the largest number of the type; ``"e8m0"``
        is a power of two, by the MX specification; ``"e4m3"`` is NVFP4's, beside one float32 for the whole tensor.
    block : int
        Numbers in a row that share a scale; 0 for all of the tensor.
    dtype : torch.dtype or None
        The same type in torch.
    """

    name: str
    bits: int
    largest: float
    mantissa: int | None = None
    emin: int = 0
    scale: Literal["none", "float32", "e8m0", "e4m3"] = "none"
    block: int = 0
    dtype: torch.dtype | None = None

    @property
    def emax(self) -> int:
        """Return the exponent of the largest number."""
        # frexp gives a fraction from 1/2 to below 1
        return math.frexp(self.largest)[1] - 1

    @property
    def scale_bits(self) -> int:
        """Return the bits of a scale."""
        return {"none": 0, "float32": 32, "e8m0": 8, "e4m3": 8}[self.scale]

    def whole(self) -> Format:
        """Return the format with one scale for the tensor."""
        return replace(self, block=0)

    def blocks(self, count: int) -> int:
        """Return the number of scales.

        Parameters
        ----------
        count : int
            Numbers that are sent.
        """
        if self.scale == "none":
            return 0
        return -(-count // self.block) if self.block else min(count, 1)

    def bits_of(self, count: int) -> int:
        """Return the bits of so many numbers with all their scales.

        Parameters
        ----------
        count : int
            Numbers that are sent.
        """
        # NVFP4's second scale, once for the tensor
        whole = 32 if self.scale == "e4m3" and count else 0
        return count * self.bits + self.blocks(count) * self.scale_bits + whole

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers with a block in each row, the last one filled with zeros.

        Parameters
        ----------
        x : float32 tensor, shape (n,)
            The numbers, at least one.
        """
        if self.scale == "none" or not self.block:
            return x.view(1, -1)
        count = -(-x.numel() // self.block)
        if count * self.block != x.numel():
            # zeros leave a block's largest magnitude as it is
            x = torch.cat([x, x.new_zeros(count * self.block - x.numel())])
        return x.view(count, self.block)

    def scales(self, rows: torch.Tensor, largest: torch.Tensor | None = None) -> Scales:
        """Return the scales of some blocks.

        Parameters
        ----------
        rows : float32 tensor, shape (blocks, n)
            The numbers, finite, a block in each row.
        largest : float32 tensor of one element, optional
            Largest magnitude of the tensor that they are a part of; by default that of the blocks.
        """
        none = rows.new_empty(0)
        if self.scale == "none":
            return Scales(none, none)
        # given where a tensor comes in pieces, which all share its scale
        whole = largest if largest is not None else rows.abs().amax()
        if not self.block:
            each = whole.view(1)
        # amax of no rows raises an error
        elif rows.numel():
            each = rows.abs().amax(1)
        else:
            each = none
        if self.scale == "float32":
            # NaN compares with nothing; no selector selects it
            return Scales(torch.where(each >= _TINY, each, 0), none)
        if self.scale == "e8m0":
            exponents = _exponents(each) - self.emax  # of a subnormal magnitude below -127 anyway
            # biased by 127; 255, beyond the clamp, is NaN in E8M0
            return Scales((exponents.clamp(-127, 127) + 127).to(torch.uint8), none)
        # 16 significant bits: its products with numbers and scales are exact, and rounding again changes nothing
        tensor = _divided(
            whole, 448 * self.largest
        )  # for the fullest block E4M3's largest scale, 448
        tensor = (tensor.view(torch.int32) & ~0xFF).view(torch.float32)
        tensor = torch.where(whole >= _TINY, tensor, 0).view(1)
        # 0 where all numbers are too small to send: every unit is 0 then, and every number
        ratio = torch.where(tensor > 0, _divided(each, self.largest) / tensor, 0)
        # the scale of the fullest block may pass 448, as `tensor` was cut off
        return Scales(ratio.clamp(_LEAST_SCALE, 448).to(torch.float8_e4m3fn), tensor)

    def scaled(self, rows: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return numbers in the unit of their type, before they are rounded.

        Parameters
        ----------
        rows : float32 tensor, shape (blocks, n)
            The numbers.
        scales : Scales
            Their scales.
        """
        if self.scale == "none":
            return rows
        if self.scale == "float32":
            size = scales.each
            return rows * torch.where(size > 0, self.largest / size, 0)[:, None]
        unit = scales.unit()
        return torch.where(unit > 0, rows / unit, 0)

    def restored(self, numbers: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return the values of numbers that :meth:`rounded` returned.

        Parameters
        ----------
        numbers : float32 tensor, shape (blocks, n)
            Numbers of the type.
        scales : Scales
            Their scales.
        """
        if self.scale == "none":
            return numbers
        if self.scale == "float32":
            # in this order the type's largest number gives back the block's largest magnitude, to the bit
            return _divided(numbers, self.largest).mul_(scales.each[:, None])
        return numbers * scales.unit()

    def beyond(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return which numbers are larger than the largest of their type, which takes their place.

        Parameters
        ----------
        scaled : float32 tensor
            Numbers as :meth:`scaled` returns them.
        """
        return scaled.abs() > self.largest * _MARGINS.get(self.scale, 1.0)

    def rounded(
        self, scaled: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Return numbers of the type: the nearest, even ones of two, or one of the two around at random.

        Parameters
        ----------
        scaled : float32 tensor
            Numbers as :meth:`scaled` returns them.
        generator : torch.Generator, optional
            Source of randomness: a number is rounded up with the probability that makes its mean right.
        """
        # the type's largest number takes the place of what is larger, which torch makes infinite in E5M2
        x = scaled.clamp(-self.largest, self.largest)
        if self.mantissa is None:
            x = x.round_() if generator is None else _drawn(x, generator)
            return x.nan_to_num_(nan=0.0).add_(0.0)  # whole numbers have one zero, and no NaN
        if self.dtype is not None and generator is None:
            return x.to(self.dtype).float()
        if self.dtype == torch.bfloat16 and generator is not None:
            return _drawn_bfloat16(x, generator).clamp_(-self.largest, self.largest)
        step = self._steps(x)
        x = x / step  # by powers of two: exact
        x = x.round_() if generator is None else _drawn(x, generator)
        return x.mul_(step)

    def _steps(self, x: torch.Tensor) -> torch.Tensor:
        """Return the distance of the type's numbers around each number."""
        assert self.mantissa is not None
        # among subnormal numbers the distance stays that of the smallest normal ones
        exponents = _exponents(x).clamp_(min=self.emin) - self.mantissa
        return ((exponents + 127) << 23).view(torch.float32)

    def codes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of the type, of 8 bits or fewer, as their bits.

        Parameters
        ----------
        numbers : float32 tensor
            Numbers as :meth:`rounded` returns them.

        Returns
        -------
        uint8 tensor
            The bits, the lowest ones; whole numbers have an offset.
        """
        if self.mantissa is None:
            return (numbers + (1 << (self.bits - 1))).to(torch.uint8)
        if self.dtype is not None:
            return numbers.to(self.dtype).view(torch.uint8)
        size = numbers.abs()
        # a number counts the steps below it: 2^mantissa for each exponent, and those since the last power of two
        exponents = _exponents(size).clamp_(min=self.emin) - self.emin
        steps = (exponents << self.mantissa) + (size / self._steps(size)).int()
        return (steps + (torch.signbit(numbers).int() << (self.bits - 1))).to(torch.uint8)

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what bits stand for, as float32.

        Parameters
        ----------
        codes : uint8 tensor
            Bits as :meth:`codes` returns them.
        """
        if self.mantissa is None:
            return codes.float() - (1 << (self.bits - 1))
        if self.dtype is not None:
            return codes.view(self.dtype).float()
        return _table(self).to(codes.device)[codes.int()]

    def quantised(self, x: torch.Tensor) -> torch.Tensor:
        """Return what arrives of a tensor: every number scaled, rounded to the nearest, and scaled back.

        Parameters
        ----------
        x : float32 tensor, shape (n,)
            The numbers, finite.
        """
        if not x.numel():
            return x.clone()
        rows = self.rows(x)
        scales = self.scales(rows)
        arrived = self.restored(self.rounded(self.scaled(rows, scales)), scales)
        return arrived.view(-1)[: x.numel()]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of some blocks, as they travel.

    Attributes
    ----------
    each : tensor, shape (blocks,)
        float32, E8M0 in uint8, or E4M3.
    tensor : float32 tensor, shape (1,) or (0,)
        The scale of the whole tensor, if the format has one.
    """

    each: torch.Tensor
    tensor: torch.Tensor

    def unit(self) -> torch.Tensor:
        """Return what a 1 in each row stands for, where scales are E8M0 or E4M3."""
        if self.tensor.numel():
            return (self.each.float() * self.tensor)[:, None]
        # E8M0 is the exponent of a float32, with the same bias
        bits = self.each.int()
        # 2⁻¹²⁷, the least of them, is no normal number
        return torch.where(bits > 0, bits << 23, 1 << 22).view(torch.float32)[:, None]


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Return ⌊log₂|x|⌋ of normal numbers, −127 of others."""
    # from the bits, as log2 rounds up just below a power of two
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def _drawn(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round to one of the whole numbers around, so that the mean is right; whole numbers stay."""
    low = x.floor()
    draws = torch.rand(x.shape, generator=generator, device=x.device)
    # draws are from 0 to below 1: at a whole number none is smaller
    return low + (draws < x - low)


def _drawn_bfloat16(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Do the same to bfloat16, whose steps may be no normal numbers of float32."""
    bits = x.view(torch.int32)
    draws = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device)
    # the bits cut off are the way to the next magnitude, in 2⁻¹⁶ of a step, also where it has the next exponent
    up = (draws < (bits & 0xFFFF)).int() << 16
    return ((bits & ~0xFFFF) + up).view(torch.float32)


@lru_cache
def _table(format: Format) -> torch.Tensor:
    """Return the numbers of a short type by their bits."""
    assert format.mantissa is not None
    fraction, numbers = 1 << format.mantissa, []
    for code in range(1 << (format.bits - 1)):
        exponent, part = divmod(code, fraction)
        # exponent 0 is the subnormal numbers', without the leading one and with the next exponent
        significand = part + fraction if exponent else part
        numbers.append(
            math.ldexp(significand, format.emin + max(exponent - 1, 0) - format.mantissa)
        )
    return torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.float32)


_SHARED = 256
"""Numbers that share a float32."""
# 448, not 480: E4M3 has no infinity, and its highest pattern is NaN
_E4M3 = Format("e4m3", 8, 448.0, 3, -6, "float32", _SHARED, torch.float8_e4m3fn)
_E5M2 = Format("e5m2", 8, 57344.0, 2, -14, "float32", _SHARED, torch.float8_e5m2)


def _mx(name: str, element: Format) -> Format:
    return replace(element, name=name, scale="e8m0", block=32)


NumberFormat: TypeAlias = Literal[
    "bf16",
    "fp16",
    "e4m3",
    "e5m2",
    "int8",
    "int4",
    "int2",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "mxfp8-e5m2",
    "mxfp6-e3m2",
]
"""Names of :data:`FORMATS`."""
FORMATS = {
    each.name: each
    for each in (
        Format("bf16", 16, torch.finfo(torch.bfloat16).max, 7, -126, dtype=torch.bfloat16),
        Format("fp16", 16, 65504.0, 10, -14, dtype=torch.float16),
        _E4M3,
        _E5M2,
        Format("int8", 8, 127.0, scale="float32", block=_SHARED),
        Format("int4", 4, 7.0, scale="float32", block=_SHARED),
        Format("int2", 2, 1.0, scale="float32", block=_SHARED),
        _mx("mxfp8", _E4M3),
        _mx("mxfp6", Format("e2m3", 6, 7.5, 3, 0)),
        _mx("mxfp4", Format("e2m1", 4, 6.0, 1, 0)),
        Format("nvfp4", 4, 6.0, 1, 0, "e4m3", 16),
        _mx("mxfp8-e5m2", _E5M2),
        _mx("mxfp6-e3m2", Format("e3m2", 6, 28.0, 2, -2)),
    )
}
"""Number formats by name. MX formats of 8 and 6 bits are those with more bits of fraction, where no other is named."""


def as_format(name: object) -> Format:
    """Return a format by its name.

    Parameters
    ----------
    name : str
        One of :data:`FORMATS`.

    Raises
    ------
    InputError
        If there is no format of this name.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise unknown("number format", name, FORMATS)
    return FORMATS[name]


def rotated(rows: torch.Tensor, signs: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return each row times a Hadamard matrix, after random signs; or take both back.

    It spreads what is large over the row: every number becomes a sum of all, with signs, over the root of their number.

    Parameters
    ----------
    rows : float32 tensor, shape (blocks, n)
        The numbers; n is a power of two.
    signs : float32 tensor, shape (n,)
        1 or −1 for each column.
    back : bool
        Whether to take a rotation back.
    """
    size = rows.shape[1]
    # H H = n, so the transform is its own inverse, and the signs are taken off last
    mixed = rows if back else rows * signs
    # the fast transform: sums and differences of neighbours, of pairs, of fours, …
    half = 1
    while half < size:
        pairs = mixed.view(-1, size // (2 * half), 2, half)
        mixed = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    # with this factor it is orthogonal: norms and products stay
    mixed = mixed.view(-1, size) / math.sqrt(size)
    return mixed.mul_(signs) if back else mixed
