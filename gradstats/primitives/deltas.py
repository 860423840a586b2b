"""What changed between two copies of the same weights, bit for bit, and ways to write it down.

Weights are compared as words: the bits of float32, bfloat16 or float16. A codec writes the words that changed, and
gives back the later copy from the earlier one, to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives.codec import rice_decode, rice_encode
from gradstats.primitives.formats import FORMATS

__all__ = [
    "CODECS",
    "WIDTHS",
    "DeltaCodec",
    "WeightType",
    "decode",
    "encode",
    "entropy_bytes",
    "rounded_words",
    "words_of",
]

Words = NDArray[np.unsignedinteger]

WeightType: TypeAlias = Literal["fp32", "bf16", "fp16"]
"""Names of :data:`WIDTHS`."""
WIDTHS: dict[WeightType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Types that weights are compared as, and the bytes of each number."""
_HEAD = 8
"""Bytes of a count before what is counted."""
_LEVEL = 1
"""Effort of DEFLATE: more takes ten times as long, and saves a few percent."""


def words_of(values: NDArray[np.float32], dtype: WeightType) -> Words:
    """Return numbers as words: the bits of the type that they are rounded to.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        The numbers.
    dtype : {"fp32", "bf16", "fp16"}
        The type.

    Returns
    -------
    ndarray of uint32 or uint16, shape (n,)
        The words.
    """
    plain = np.ascontiguousarray(values, np.float32)
    if dtype == "fp32":
        return plain.view(np.uint32)
    # one bit pattern for each number also where the array may not be written to
    rounded = torch.from_numpy(plain.copy()).to(FORMATS[dtype].dtype)
    # by way of int16, as bfloat16 has no NumPy dtype
    return rounded.view(torch.int16).numpy().view(np.uint16)


def rounded_words(
    values: NDArray[np.float32], largest: float, dtype: str = "e4m3"
) -> NDArray[np.uint8]:
    """Return numbers as they are in 8 bits with one scale.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        The numbers; those that are none count as zero.
    largest : float
        Magnitude that becomes the largest number of the type; 0 if all of them are 0.
    dtype : {"e4m3", "e5m2"}
        The type.
    """
    form = FORMATS[dtype].whole()
    x = torch.from_numpy(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))
    if not x.numel():
        return np.empty(0, np.uint8)
    rows = form.rows(x)
    # given: with a scale of its own, each copy could differ from the other in every word
    scales = form.scales(rows, torch.tensor(largest, dtype=torch.float32))
    return form.codes(form.rounded(form.scaled(rows, scales))).view(-1).numpy()


def _changes(before: Words, after: Words) -> tuple[NDArray[np.int64], bytes]:
    # of words: 0 and −0 are different, and NaN equals itself
    places = np.flatnonzero(before != after)
    return places, after[places].tobytes()


def _count(places: NDArray[np.int64]) -> bytes:
    return np.array([places.size], "<u8").tobytes()


def _counted(message: bytes) -> tuple[int, bytes]:
    return int(np.frombuffer(message, "<u8", 1)[0]), message[_HEAD:]


def _put(before: Words, places: NDArray[np.int64], words: bytes) -> Words:
    after = before.copy()
    after[places] = np.frombuffer(words, before.dtype)
    return after


def _encode_bitmap(before: Words, after: Words) -> bytes:
    changed = before != after
    return bytes(np.packbits(changed)) + bytes(after[changed])


def _decode_bitmap(before: Words, message: bytes) -> Words:
    size = -(-before.size // 8)
    bits = np.unpackbits(np.frombuffer(message, np.uint8, size), count=before.size)
    return _put(before, np.flatnonzero(bits), message[size:])


def _encode_gaps(before: Words, after: Words) -> bytes:
    """Write the distance from each change to the next in 7 bits a byte, the lowest first."""
    places, words = _changes(before, after)
    gaps = np.diff(places, prepend=-1) - 1
    sizes = np.ones(gaps.size, np.int64)
    # nine bytes of 7 bits hold any gap below 2⁶³
    for i in range(1, 9):
        sizes += gaps >> 7 * i > 0
    ends = np.cumsum(sizes)
    octets = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    # byte by byte over all gaps: most are short, so that later rounds have little to do
    for i in range(int(sizes.max(initial=0))):
        there = sizes > i
        # the highest bit: another byte of this gap follows
        more = (sizes[there] > i + 1).astype(np.uint8) << 7
        octets[(ends - sizes)[there] + i] = (gaps[there] >> 7 * i & 127).astype(np.uint8) | more
    return _count(places) + octets.tobytes() + words


def _decode_gaps(before: Words, message: bytes) -> Words:
    count, message = _counted(message)
    octets = np.frombuffer(message, np.uint8, len(message) - count * before.itemsize)
    last = octets < 128
    # the gap that a byte belongs to: as many gaps have ended before it
    number: NDArray[np.int64] = np.cumsum(last) - last
    starts = np.flatnonzero(np.append(True, last[:-1])) if octets.size else np.empty(0, np.int64)
    digit = np.arange(octets.size) - starts[number]
    gaps = np.zeros(count, np.int64)
    # gaps[number] += … would add only one of a gap's bytes
    np.add.at(gaps, number, (octets & 127).astype(np.int64) << 7 * digit)
    return _put(before, np.cumsum(gaps + 1) - 1, message[octets.size :])


def _encode_rice(before: Words, after: Words) -> bytes:
    places, words = _changes(before, after)
    return _count(places) + rice_encode(places).tobytes() + words


def _decode_rice(before: Words, message: bytes) -> Words:
    count, message = _counted(message)
    stream = message[: len(message) - count * before.itemsize]
    places, _ = rice_decode(np.frombuffer(stream, np.uint32), count, before.size)
    return _put(before, places, message[len(stream) :])


def _planes(before: Words, after: Words) -> NDArray[np.uint8]:
    """Return the bytes of what changed in every word, the highest bytes of all words first."""
    # big-endian on every machine, so that the highest byte comes first
    differences = (before ^ after).astype(before.dtype.newbyteorder(">"))
    octets = differences.view(np.uint8).reshape(-1, before.itemsize)
    # signs and exponents seldom change: side by side they are the runs of zeros that DEFLATE shortens
    return np.ascontiguousarray(octets.T)


def _encode_xor(before: Words, after: Words) -> bytes:
    return zlib.compress(_planes(before, after).tobytes(), _LEVEL)


def _decode_xor(before: Words, message: bytes) -> Words:
    planes = np.frombuffer(zlib.decompress(message), np.uint8).reshape(before.itemsize, -1)
    words = np.ascontiguousarray(planes.T).reshape(-1).view(before.dtype.newbyteorder(">"))
    return before ^ words.astype(before.dtype)


DeltaCodec: TypeAlias = Literal["bitmap", "gaps", "rice", "xor"]
CODECS: dict[
    DeltaCodec, tuple[Callable[[Words, Words], bytes], Callable[[Words, bytes], Words]]
] = {
    "bitmap": (_encode_bitmap, _decode_bitmap),
    "gaps": (_encode_gaps, _decode_gaps),
    "rice": (_encode_rice, _decode_rice),
    "xor": (_encode_xor, _decode_xor),
}
"""Ways to write what changed, and to read it: a bit for every word, bytes or Rice codes for the gaps between changes,
each before the words that are new; and the differences of all words, byte by byte, compressed by DEFLATE."""


def _codec(
    name: DeltaCodec,
) -> tuple[Callable[[Words, Words], bytes], Callable[[Words, bytes], Words]]:
    if name not in CODECS:
        raise InputError(f"changes are written as {', '.join(CODECS)}, not {name!r}")
    return CODECS[name]


def encode(before: Words, after: Words, codec: DeltaCodec) -> bytes:
    """Return a message from which, and from the earlier words, the later ones follow.

    Parameters
    ----------
    before, after : ndarray of unsigned integers, shape (n,)
        Words of one type.
    codec : {"bitmap", "gaps", "rice", "xor"}
        How they are written.

    Raises
    ------
    InputError
        If there is no such codec.
    """
    return _codec(codec)[0](before, after)


def decode(before: Words, message: bytes, codec: DeltaCodec) -> Words:
    """Return the later words.

    Parameters
    ----------
    before : ndarray of unsigned integers, shape (n,)
        The earlier words.
    message : bytes
        What :func:`encode` returned.
    codec : {"bitmap", "gaps", "rice", "xor"}
        How they were written.

    Raises
    ------
    InputError
        If there is no such codec.
    """
    return _codec(codec)[1](before, message)


def entropy_bytes(before: Words, after: Words) -> float:
    """Return the bytes below which no coder gets that takes each byte of the differences for itself.

    Parameters
    ----------
    before, after : ndarray of unsigned integers, shape (n,)
        Words of one type.
    """
    bits = 0.0
    for plane in _planes(before, after):
        counts = np.bincount(plane, minlength=256)
        counts = counts[counts > 0]
        bits += float(counts @ np.log2(plane.size / counts))
    return bits / 8
