"""What stands before every exchange: a header of fixed size with kind, step, length and checksums.

Eight 32-bit words::

    magic, wire version and kind | step | length | flag | details | 0 | checksum of these | checksum of the body

What must be the same on all ranks at this moment of the training (:class:`Moment`) travels as a number, `details`; only
where the numbers differ do the ranks exchange the texts behind it, to name what it is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import torch

from gradstats.errors import ExchangeError, InputError
from gradstats.primitives.backend import device_code

__all__ = [
    "HEADER_BYTES",
    "HEADER_WORDS",
    "WIRE",
    "Header",
    "Kind",
    "Moment",
    "at_moment",
    "by_rank",
    "check_bodies",
    "check_kinds",
    "checked_bytes",
    "checksum",
    "damaged",
    "moment",
    "read_headers",
    "words_of",
]

WIRE = 1
"""Version of the messages: ranks of another one are refused by name."""
HEADER_WORDS = 8
"""Words of a header."""
HEADER_BYTES = 4 * HEADER_WORDS
"""Bytes of a header."""

_MAGIC = 0x6773  # "gs" in ASCII
_CHECKED = 6
"""Words that the header's own checksum is of."""
_NOT_ZERO = 0x5BD1E995
"""Added to checksums: words and checksum that were all lost, and are zero, do not fit."""
_SEED = 0x9E3779B1
"""Seed of the checksums' weights, the same on all ranks."""


class Kind(IntEnum):
    """What a message is."""

    AGREEMENT = 1
    TEXTS = 2
    STEP = 3
    FLAGS = 4
    SELECTIONS = 5
    POSITIONS = 6
    COUNTS = 7
    HISTOGRAM = 8
    WORDS = 9
    END = 10
    DIGESTS = 11

    def __str__(self) -> str:
        return _SHOWN[self]


_SHOWN = {
    Kind.AGREEMENT: "the options of a training that begins",
    Kind.TEXTS: "texts",
    Kind.STEP: "the beginning of a step",
    Kind.FLAGS: "flags",
    Kind.SELECTIONS: "selections",
    Kind.POSITIONS: "positions",
    Kind.COUNTS: "numbers of elements",
    Kind.HISTOGRAM: "a histogram",
    Kind.WORDS: "words",
    Kind.END: "the end of local steps",
    Kind.DIGESTS: "digests of an update",
}


@dataclass(frozen=True)
class Moment:
    """Where in a training an exchange takes place.

    Attributes
    ----------
    step : int
        Number of the step.
    details : mapping of str to str
        What else must be the same on all ranks, such as the ratio of the step, by name.
    """

    step: int = 0
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """The details as a number."""
        if not self.details:
            return 0
        # in the order given, so ranks have to name their details in the same order
        return _signed(zlib.crc32("\n".join(map(str, self.details.items())).encode()))


# no plain global: an exchange in another thread runs in a copy of its caller's context
_NOW: ContextVar[Moment] = ContextVar("gradstats_moment")
_NEVER = Moment()


def moment() -> Moment:
    """Return where in a training this code runs."""
    return _NOW.get(_NEVER)


@contextmanager
def at_moment(now: Moment) -> Iterator[None]:
    """Let the headers of exchanges inside say where in the training they take place.

    Parameters
    ----------
    now : Moment
        Step, and what must agree in it.
    """
    token = _NOW.set(now)
    try:
        yield
    finally:
        _NOW.reset(token)


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself.

    Attributes
    ----------
    kind : int
        A :class:`Kind`, if this version knows it.
    length : int
        Words that the rank sends behind it, padding not counted.
    flag : int
        A small integer for the other ranks.
    step : int
        Number of the step.
    details : int
        Digest of what else must be the same in this step.
    body : int
        Checksum of the words behind it.
    """

    kind: int
    length: int = 0
    flag: int = 0
    step: int = 0
    details: int = 0
    body: int = 0

    @classmethod
    def now(cls, kind: Kind, length: int = 0, flag: int = 0) -> Header:
        """Return a header of this moment of the training.

        Parameters
        ----------
        kind : Kind
            What the message is.
        length : int
            Words that this rank sends behind it.
        flag : int
            A small integer for the other ranks.
        """
        at = moment()
        # the step as a signed 32-bit word
        return cls(kind, length, flag, at.step & 0x7FFFFFFF, at.digest)

    def words(self, body: torch.Tensor) -> torch.Tensor:
        """Return the header as it travels, without the body.

        Parameters
        ----------
        body : int32 tensor, shape (n,)
            What will follow, for its checksum.

        Returns
        -------
        int32 tensor, shape (8,)
            The header, on the body's device.
        """
        # in one word, so that another program's or version's message is of no known kind
        kind = _signed(_MAGIC << 16 | WIRE << 8 | self.kind)
        fields = (kind, self.step, self.length, self.flag, self.details, 0)
        known = [*fields, _check(fields)]
        if _in_memory(body):
            return torch.tensor([*known, _sum(body)], dtype=torch.int32)
        made = torch.tensor(known, dtype=torch.int32, device=body.device)
        # without waiting for the device
        return torch.cat([made, checksum(body)[None]])


def _signed(number: int) -> int:
    """Return the int32 of the same 32 bits."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


def _check(fields: Sequence[int]) -> int:
    """Return the checksum of a header's own words."""
    return _signed(zlib.crc32(struct.pack(f"<{_CHECKED}i", *fields)))


def damaged(rank: int, why: str) -> ExchangeError:
    """Return the error for a message that no rank of this program can have sent.

    Parameters
    ----------
    rank : int
        Rank that it came from.
    why : str
        What is wrong with it.
    """
    return ExchangeError(f"the message of rank {rank} is damaged: {why}")


def read_headers(rows: torch.Tensor, header: Header, rank: int) -> list[Header]:
    """Return the headers that all ranks sent.

    Parameters
    ----------
    rows : int32 tensor, shape (ranks, 8)
        What arrived.
    header : Header
        What this rank sent.
    rank : int
        This rank.

    Returns
    -------
    list of Header
        Headers, by rank.

    Raises
    ------
    ExchangeError
        If one is damaged.
    """
    headers = []
    # one transfer from a device for all headers
    for sender, row in enumerate(rows.tolist()):
        *fields, check, body = row
        # before a field is believed, as the length says how much is read
        if check != _check(fields):
            raise damaged(sender, "its header does not have its checksum")
        kind, step, length, flag, details, _ = fields
        word = kind & 0xFFFFFFFF
        # another program's, or another version's, is no kind of this one
        known = word >> 8 == _MAGIC << 8 | WIRE
        headers.append(Header(word & 0xFF if known else -1, length, flag, step, details, body))
    # the body's checksum is made when the message is written, and `header` does not have it
    came = replace(headers[rank], body=header.body)
    if came != header:
        raise damaged(rank, f"it came back as {came.length} words, and {header.length} were sent")
    return headers


def check_kinds(headers: Sequence[Header]) -> None:
    """Check that all ranks exchange the same thing.

    Parameters
    ----------
    headers : sequence of Header
        Headers, by rank.

    Raises
    ------
    InputError
        If they do not, on all ranks.
    """
    # all ranks see the same headers, so all of them raise, or none
    if len({header.kind for header in headers}) > 1:
        shown = [
            str(Kind(h.kind)) if h.kind in _SHOWN else "something of another version"
            for h in headers
        ]
        raise InputError(
            f"the ranks send different things, {by_rank(shown)}: all of them must make the same steps in the same order"
        )


def by_rank(values: Sequence[str], most: int = 4) -> str:
    """Return which rank has which value, in words; of many ranks, those that differ.

    Parameters
    ----------
    values : sequence of str
        Values, by rank.
    most : int
        Number of values to name.

    Returns
    -------
    str
        Such as ``0.1 on rank 0, 0.01 on ranks 1 and 2``.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = []
    for value, those in list(ranks.items())[:most]:
        first = ", ".join(map(str, those[:most])) + (" and more" if len(those) > most else "")
        shown.append(f"{value} on rank{'s' if len(those) > 1 else ''} {first}")
    return ", ".join(shown) + (" and others" if len(ranks) > most else "")


_BLOCK = 1 << 16
"""Words whose weights are kept, which then stay in the cache; the sums of 2³¹ words have as many halves."""
# of the bit generator itself, whose numbers are the same in every version of NumPy
_WEIGHTS = np.random.PCG64(_SEED).random_raw(_BLOCK).view(np.int64)
_weights: dict[torch.device, torch.Tensor] = {}  # copied to each device once


def _in_memory(words: torch.Tensor) -> bool:
    # what NumPy reads where it is, unless the user chose other code for CPU tensors, too
    return words.is_cpu and device_code(words) is None


def checksum(words: torch.Tensor) -> torch.Tensor:
    """Return the checksum of words: the upper half of a sum, modulo 2⁶⁴, of each times a random number of its own.

    Whatever was changed in them, it is not noticed in less than one of 2 billion cases.

    Parameters
    ----------
    words : int32 tensor, shape (…, n)
        Words. Zeros behind them change nothing.

    Returns
    -------
    int32 tensor, shape (…)
        Checksums, on the same device.

    Notes
    -----
    Source: Lemire and Kaser (2014), "Strongly universal string hashing is fast", MULTILINEAR.

    Differs from the paper: every block of 2¹⁶ words is summed with the same numbers, and what is returned is of the
    sums of the blocks.
    """
    if _in_memory(words):
        rows = words.flatten(0, -2) if words.dim() > 1 else words[None]
        checksums = torch.tensor([_sum(row) for row in rows], dtype=torch.int32)
        return checksums.view(words.shape[:-1])
    weights = _weights.get(words.device)
    if weights is None:
        weights = _weights[words.device] = torch.from_numpy(_WEIGHTS).to(words.device)
    blocks = torch.split(words, _BLOCK, -1)
    sums = torch.stack([(each * weights[: each.shape[-1]]).sum(-1) for each in blocks], -1)
    halves = sums.view(torch.int32)
    total = (halves * weights.flip(0)[: halves.shape[-1]]).sum(-1)
    return (total + (_NOT_ZERO << 32) >> 32).int()


def _sum(words: torch.Tensor) -> int:
    """Return the checksum of a vector in this machine's memory, as an int32."""
    numbers = words.contiguous().numpy()
    blocks = [numbers[start : start + _BLOCK] for start in range(0, numbers.size, _BLOCK)]
    # products and sums wrap; einsum, because dot would make an int64 copy of each block
    sums = [np.einsum("i,i->", each, _WEIGHTS[: each.size]) for each in blocks]
    halves = np.array(sums, np.int64).view(np.int32)
    # from the other end, so that no sum has a number that is in it
    total = int(np.dot(halves, _WEIGHTS[::-1][: halves.size]))
    return _signed((total >> 32) + _NOT_ZERO)


def checked_bytes(size: int) -> int:
    """Return the bytes of a message that travels with a checksum behind it.

    Parameters
    ----------
    size : int
        Bytes without it.

    Returns
    -------
    int
        Whole words, and one more.
    """
    return 4 * (-(-size // 4) + 1)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as words, with zeros up to a whole one.

    Parameters
    ----------
    values : tensor
        Values of any dtype.

    Returns
    -------
    int32 tensor, shape (⌈bytes/4⌉,)
        A view of them where that is possible.
    """
    flat = values.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # an empty array of NumPy's has a stride of 0, which no view of another type takes
    if flat.element_size() % 4 == 0 and flat.numel():
        return flat.view(torch.int32)
    octets = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    # zeros, which add nothing to a checksum
    padded = octets.new_zeros(-(-octets.numel() // 4) * 4)
    padded[: octets.numel()] = octets
    return padded.view(torch.int32)


def check_bodies(bodies: Sequence[torch.Tensor], sums: Sequence[int]) -> None:
    """Check that messages arrived as they were sent.

    Parameters
    ----------
    bodies : sequence of int32 tensors
        Words, by rank.
    sums : sequence of int
        The checksums that came with them.

    Raises
    ------
    ExchangeError
        If one did not.
    """
    if all(map(_in_memory, bodies)):
        checksums = [_sum(body) for body in bodies]
    else:  # one transfer from a device for all ranks
        checksums = torch.stack([checksum(body) for body in bodies]).tolist()
    for rank, (expected, actual) in enumerate(zip(sums, checksums, strict=True)):
        if expected != actual:
            raise damaged(rank, "what it carries does not have its checksum")
