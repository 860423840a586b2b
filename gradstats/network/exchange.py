"""Bytes and seconds of one step's exchange, for every name of :data:`gradstats.compressors.COMPRESSORS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from gradstats.collectives.codec import CHUNK, PLAIN, SCALED, Codec, check_codec
from gradstats.collectives.ragged import RaggedAllGather
from gradstats.collectives.torus import check_torus
from gradstats.compressors import SparseCompressor, codecs, compressor_class
from gradstats.compressors.marsit import most_square
from gradstats.compressors.micro import partition
from gradstats.compressors.redsync import DENSE_BELOW
from gradstats.errors import InputError
from gradstats.network.model import Network, Work
from gradstats.primitives.ratio import target_count

__all__ = [
    "FLAG",
    "SLOWEST",
    "Exchange",
    "break_even",
    "coding",
    "exchange",
    "ragged_bytes",
    "selection_words",
]

_WORD = 4
"""Bytes of the 32-bit words of which messages consist."""
_HEADER = 2
"""Words before a packed selection, and before a ragged message."""
FLAG = Work("all_gather", 4)
"""The exchange in which every rank says whether its gradient can be used."""
_SCALE_BYTES = 4
_FULL = 4
"""Bytes of a float32."""
_HALF = 2
"""Bytes of a bfloat16."""
SLOWEST = 1e6
"""A break-even is looked for in networks from this many times slower to this many times faster than the given one."""


def selection_words(
    count: int, values: int, numel: int, codec: Codec = PLAIN, span: int | None = None
) -> int:
    """Return the number of 32-bit words of a packed selection, see :func:`gradstats.collectives.packed.pack`.

    Of coded positions it is the largest number, which a message has room for.

    Parameters
    ----------
    count : int
        Number of positions, k̂.
    values : int
        Number of values: as many as positions, or 1 if one value stands for all.
    numel : int
        Elements of the dense gradient. It decides the width of an index.
    codec : Codec
        What positions and values are.
    span : int, optional
        Elements of the part that the selection is from; `numel` if None.
    """
    positions = codec.index_words(count, numel if span is None else span, numel)
    return _HEADER + positions + codec.value_words(values)


def coding(codec: Codec, step: Literal["encode", "decode"], count: float) -> Iterator[Work]:
    """Yield the work of a codec beyond copying words, for one message.

    Parameters
    ----------
    codec : Codec
        What positions and values are.
    step : {"encode", "decode"}
        Whether a message is written or read.
    count : float
        Number of positions and values.
    """
    if codec.indices != PLAIN.indices:
        yield Work(f"{step}:{codec.indices}", count)
    if codec.values in SCALED:
        yield Work(f"{step}:{codec.values}", count)


def ragged_bytes(words: Sequence[Sequence[int]], expected: int) -> list[list[int]]:
    """Return the bytes a rank sends in each collective of a :class:`RaggedAllGather`, for each step.

    Parameters
    ----------
    words : sequence of sequence of int, shape (steps, ranks)
        Words that each rank has to send in each step.
    expected : int
        Words for which the first step makes room.

    Returns
    -------
    list of list of int
        For each step, the bytes of its collectives: one, or two where a message is larger than the room.
    """
    gather, sent = RaggedAllGather(), []
    for counts in words:
        gather.capacity = gather.capacity or max(1, expected)
        rest = max(counts) - gather.capacity
        sent.append([_WORD * (_HEADER + gather.capacity)] + ([_WORD * rest] if rest > 0 else []))
        gather._adapt(max(counts), [])
    return sent


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of one step in a steady state.

    Attributes
    ----------
    name : str
        Name of the compressor.
    numel : int
        Elements of the gradient, d.
    world : int
        Number of workers, n.
    selected : float
        Elements that a rank sends, averaged over the ranks.
    bytes_sent : float
        Value of :attr:`gradstats.compressors.Reduced.bytes_sent`, averaged over the ranks and over Marsit's rounds.
        Ranks differ in the uneven parts of a ring, and in what CLT-k's leader broadcasts.
    select : tuple of Work
        Selection, done first.
    pack : tuple of Work
        Packing of this rank's message.
    communicate : tuple of Work
        Collectives.
    unpack : tuple of Work
        Unpacking of all ranks' messages, done last.
    """

    name: str
    numel: int
    world: int
    selected: float
    bytes_sent: float
    select: tuple[Work, ...] = ()
    pack: tuple[Work, ...] = ()
    communicate: tuple[Work, ...] = ()
    unpack: tuple[Work, ...] = ()

    def split(self, network: Network) -> dict[str, float]:
        """Return the seconds of ``select``, ``pack``, ``communicate`` and ``unpack``, by these names.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        lanes = ("select", "pack", "communicate", "unpack")
        return {lane: network.seconds(getattr(self, lane), self.world) for lane in lanes}

    def seconds(self, network: Network) -> float:
        """Return the seconds of the whole exchange, all parts done one after the other.

        Parameters
        ----------
        network : Network
            Cost model.
        """
        return network.seconds(
            chain(self.select, self.pack, self.communicate, self.unpack), self.world
        )


def exchange(
    name: str,
    numel: int,
    ratio: float = 0.001,
    world: int = 2,
    *,
    selected: int | Sequence[int] | None = None,
    codec: Codec = PLAIN,
    dense_above: float = 1.0,
    full_every: int | None = 100,
    topology: Literal["ring", "torus"] = "ring",
    shape: tuple[int, int] | None = None,
) -> Exchange:
    """Return the exchange of one step of a compressor.

    Parameters
    ----------
    name : str
        One of :data:`gradstats.compressors.COMPRESSORS`. ``lags`` is priced as one message here;
        :func:`gradstats.network.deliveries` prices it layer by layer.
    numel : int
        Elements of the gradient, d.
    ratio : float
        Kept fraction k/d, in (0, 1]. Compressors without a ratio ignore it.
    world : int
        Number of workers, n.
    selected : int or sequence of int, optional
        Elements that each rank selects, k̂: one number for all ranks, or one for each. For ``micro`` they are those of
        a rank's partition. By default every rank selects k.
    codec : Codec
        What positions and values are on the wire, see :class:`gradstats.compressors.SparseCompressor`.
    dense_above : float
        If all ranks together select more than this share of d, they all-reduce the dense vector instead, see
        :class:`gradstats.compressors.SparseCompressor`.
    full_every : int, optional
        Rounds of ``marsit`` from one full-precision average to the next; None if there is none.
    topology : {"ring", "torus"}
        Topology of ``marsit``.
    shape : tuple of int, optional
        Rows and columns of the torus. By default it is as square as possible.

    Returns
    -------
    Exchange
        Bytes sent, and the work in its order.

    Raises
    ------
    InputError
        If the name is unknown, an option is out of range, or the codec changes what the compressor does not send.
    """
    sparse_rule = compressor_class(name) is SparseCompressor  # raises for an unknown name
    codec = check_codec(codec, name, codecs(name))
    if world < 1 or numel < 1:
        raise InputError(
            f"an exchange needs ranks and elements, at least 1 each, not {world} and {numel}"
        )
    k = target_count(ratio, numel)
    if selected is None:
        parts = (partition(k, world, i) for i in range(world))
        counts = [p.stop - p.start for p in parts] if name == "micro" else [k] * world
    else:
        counts = [selected] * world if isinstance(selected, int) else list(selected)
    if len(counts) != world:
        raise InputError(f"selected has {len(counts)} ranks, not {world}")

    def dense() -> Exchange:
        return _dense(name, numel, world)

    def sparse(single: bool = False) -> Exchange:
        return _sparse(name, numel, k, counts, single, codec, dense_above)

    def signs() -> Exchange:
        return _signs(name, numel, world)

    formulas: dict[str, Callable[[], Exchange]] = {
        "none": dense,
        "dense-bf16": lambda: _dense_bf16(numel, world),
        "dense-fp8": lambda: _dense_fp8(numel, world),
        "lags": sparse,
        "redsync-quantised": dense if numel < DENSE_BELOW else lambda: sparse(single=True),
        "micro": lambda: _micro(numel, k, counts, codec),
        "cltk": lambda: _cltk(numel, world, counts[0], codec),
        "randomk": lambda: _randomk(numel, world, counts[0]),
        "signsgd": signs,
        "ef-signsgd": signs,
        "ssdm": signs,
        "cascading": lambda: _cascading(numel, world),
        "marsit": lambda: _marsit(numel, world, full_every, topology, shape),
    }
    if name not in formulas and not sparse_rule:
        raise InputError(f"no cost formula for {name!r}; add one to gradstats/network/exchange.py")
    return formulas.get(name, sparse)()


def _dense(name: str, numel: int, world: int) -> Exchange:
    reduce = Work("all_reduce", _FULL * numel)
    communicate = (reduce,) if name == "none" else (FLAG, reduce)
    return Exchange(name, numel, world, numel, _FULL * numel, communicate=communicate)


def _dense_bf16(numel: int, world: int) -> Exchange:
    reduce = Work("all_reduce", _HALF * numel)
    return Exchange(
        "dense-bf16",
        numel,
        world,
        numel,
        _HALF * numel,
        select=(Work("select:dense-bf16", numel),),
        communicate=(FLAG, reduce),
        unpack=(Work("average", numel),),
    )


def _dense_fp8(numel: int, world: int) -> Exchange:
    codec = Codec(values="float8_e4m3fn")
    part = CHUNK * -(-numel // (CHUNK * world))
    message = _WORD * codec.value_words(part)
    # an all-to-all of parts puts as many bytes on every link as an all-gather of one
    hop = Work("all_gather", message)
    return Exchange(
        "dense-fp8",
        numel,
        world,
        numel,
        (world + 1) * message,
        select=(Work("select:dense-fp8", numel),),
        communicate=(FLAG, hop, hop),
        unpack=(*coding(codec, "encode", part), *coding(codec, "decode", (world + 1) * part)),
    )


def _sparse(
    name: str,
    numel: int,
    k: int,
    counts: list[int],
    single: bool,
    codec: Codec,
    dense_above: float,
) -> Exchange:
    world, mean = len(counts), sum(counts) / len(counts)
    select = (Work(f"select:{name}", numel),)
    if sum(counts) > dense_above * numel:
        flags = 3 * _WORD
        return Exchange(
            name,
            numel,
            world,
            mean,
            flags + _FULL * numel,
            select=select,
            communicate=(Work("all_gather", flags), Work("all_reduce", _FULL * numel)),
            unpack=(Work("average", numel),),
        )
    words = [selection_words(c, 1 if single else c, numel, codec) for c in counts]
    room = selection_words(k, 1 if single else k, numel, codec)
    messages = ragged_bytes([words] * 2, room)[-1]
    return Exchange(
        name,
        numel,
        world,
        mean,
        sum(messages),
        select=select,
        pack=(Work("pack", max(counts)), *coding(codec, "encode", max(counts))),
        communicate=tuple(Work("all_gather", m) for m in messages),
        unpack=(
            Work("unpack", mean, world),
            *(work._replace(times=world) for work in coding(codec, "decode", mean)),
        ),
    )


def _micro(numel: int, k: int, counts: list[int], codec: Codec) -> Exchange:
    world, union = len(counts), sum(counts)
    part = -(-numel // world)

    def words(count: int) -> int:
        return (1 if codec == PLAIN else 2) + codec.index_words(count, part, numel)

    messages = ragged_bytes([[words(c) for c in counts]] * 2, words(-(-5 * k // (4 * world))))[-1]
    values = [Work("all_reduce", _FULL * union)] if union else []
    return Exchange(
        "micro",
        numel,
        world,
        union / world,
        sum(messages) + _FULL * union,
        select=(Work("select:micro", numel / world),),
        pack=(Work("pack", max(counts)), *coding(codec, "encode", max(counts))),
        communicate=(*(Work("all_gather", m) for m in messages), *values),
        unpack=(Work("unpack", union), *coding(codec, "decode", union)),
    )


def _cltk(numel: int, world: int, k: int, codec: Codec) -> Exchange:
    positions = _WORD * (1 + codec.index_words(k, numel))
    return Exchange(
        "cltk",
        numel,
        world,
        k,
        FLAG.size + _FULL * k + positions / world,
        select=(Work("select:cltk", numel),),
        pack=tuple(coding(codec, "encode", k)),
        communicate=(FLAG, Work("broadcast", positions), Work("all_reduce", _FULL * k)),
        unpack=(Work("unpack", k), *coding(codec, "decode", k)),
    )


def _randomk(numel: int, world: int, k: int) -> Exchange:
    return Exchange(
        "randomk",
        numel,
        world,
        k,
        FLAG.size + _FULL * k,
        select=(Work("select:randomk", numel),),
        communicate=(FLAG, Work("all_reduce", _FULL * k)),
        unpack=(Work("unpack", k),),
    )


def _signs(name: str, numel: int, world: int) -> Exchange:
    message = _SCALE_BYTES + -(-numel // 8)
    return Exchange(
        name,
        numel,
        world,
        numel,
        message,
        select=(Work(f"select:{name}", numel),),
        communicate=(FLAG, Work("all_gather", message)),
        unpack=(Work(f"decode:{name}", numel),),
    )


def _cascading(numel: int, world: int) -> Exchange:
    ends = [partition(numel, world, i) for i in range(world)]
    parts = [_SCALE_BYTES + -(-(e.stop - e.start) // 8) for e in ends if e.stop > e.start]
    hops = 2 * (world - 1)
    return Exchange(
        "cascading",
        numel,
        world,
        numel,
        hops / world * sum(parts),
        select=(Work("select:cascading", numel / world, world),),
        communicate=(FLAG, Work("hop", max(parts), hops)),
        unpack=(Work("unpack_signs", numel / world, 2 * world - 1),),
    )


def _marsit(
    numel: int,
    world: int,
    full_every: int | None,
    topology: Literal["ring", "torus"],
    shape: tuple[int, int] | None,
) -> Exchange:
    rows, columns = (1, world) if topology == "ring" else (shape or most_square(world))
    check_torus((rows, columns), world)
    packed = -(-numel // 8)
    along_row = -(-packed // columns)
    along_column = -(-along_row // rows)
    moved = 2 * packed * (rows * (columns - 1) + rows - 1) / world
    scale = 8 if world > 1 else 0
    full = 1 / full_every if full_every else 0.0
    one_bit = 1 - full
    return Exchange(
        "marsit",
        numel,
        world,
        numel,
        full * (2 * (world - 1) * numel * _FULL // world) + one_bit * (moved + scale),
        select=(Work("select:marsit", numel, one_bit),),
        communicate=(
            FLAG,
            Work("all_reduce", _FULL * numel, full),
            Work("all_gather", scale, one_bit),
            Work("hop", along_row, one_bit * 2 * (columns - 1)),
            Work("hop", along_column, one_bit * 2 * (rows - 1)),
        ),
        unpack=(
            Work("merge_signs", 8 * along_row, one_bit * (columns - 1)),
            Work("merge_signs", 8 * along_column, one_bit * (rows - 1)),
            Work("unpack_signs", numel, one_bit),
        ),
    )


def break_even(network: Network, gain: Callable[[Network], float]) -> float:
    """Return the bandwidth below which compression gains time.

    The seconds per byte of all collectives are scaled alike. Latencies and local work stay as they are.

    Parameters
    ----------
    network : Network
        Cost model.
    gain : callable
        Function from a network to the seconds that compression gains in it. It must increase as the network slows down.

    Returns
    -------
    float
        Bandwidth of a link in bit/s, comparable with :attr:`Network.rate`; 0 if nothing is gained on the slowest
        network, infinity if something is gained on the fastest.
    """
    from scipy.optimize import brentq

    def at(log_factor: float) -> float:
        return gain(network.slowed(float(np.exp(log_factor))))

    end = float(np.log(SLOWEST))
    if at(-end) > 0:
        return float("inf")
    if at(end) <= 0:
        return 0.0
    factor = float(np.exp(brentq(at, -end, end)))
    return network.rate / factor
