"""What one step's exchange moves and takes, for every system of :data:`gradstats.compressors.COMPRESSORS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from gradstats.collectives.packed import index_dtype
from gradstats.collectives.ragged import RaggedAllGather
from gradstats.collectives.ring import check_torus
from gradstats.compressors import COMPRESSORS, SELECTORS
from gradstats.compressors.marsit import most_square
from gradstats.compressors.micro import partition
from gradstats.compressors.redsync import DENSE_BELOW
from gradstats.errors import InputError
from gradstats.network.model import Network, Work
from gradstats.primitives.ratio import target_count

__all__ = [
    "Exchange",
    "break_even",
    "exchange",
    "ragged_bytes",
    "selection_words",
]

_WORD = 4
_HEADER = 2
_FLAG = Work("all_gather", 4)
_SCALE_BYTES = 4
_FULL = 4
"""Bytes of a float32."""
_SLOWEST = 1e6


def selection_words(count: int, values: int, numel: int, value_bytes: int = 4) -> int:
    """Return the 32-bit words of a packed selection, see :func:`gradstats.collectives.packed.pack`.

    Parameters
    ----------
    count : positions, k̂.
    values : as many, or 1 where one stands for all.
    numel : elements of the dense gradient; decides the width of an index.
    value_bytes : 4, or 2 for 16-bit values.
    """
    return (
        _HEADER + count * index_dtype(numel).itemsize // _WORD + -(-values * value_bytes // _WORD)
    )


def ragged_bytes(words: Sequence[Sequence[int]], expected: int) -> list[list[int]]:
    """Return the bytes a rank sends in each collective of a :class:`RaggedAllGather`, by step.

    Parameters
    ----------
    words : (steps, ranks), what the ranks have to send.
    expected : words to make room for in the first step.
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
    """One step's exchange in a steady state.

    Attributes
    ----------
    name : of the system.
    numel, world : elements and workers.
    selected : elements a rank sends, the mean over ranks.
    bytes_sent : what :attr:`gradstats.compressors.Reduced.bytes_sent` says, the mean over ranks (and over the rounds of
        Marsit): uneven parts of a ring, and what CLT-k's leader broadcasts, differ from rank to rank.
    select, pack, communicate, unpack : what is done, one after the other.
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
        """Return the seconds of selection, packing, communication and unpacking, by name."""
        lanes = ("select", "pack", "communicate", "unpack")
        return {lane: network.seconds(getattr(self, lane), self.world) for lane in lanes}

    def seconds(self, network: Network) -> float:
        """Return the seconds of all of it, nothing hidden behind anything."""
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
    value_bytes: Literal[2, 4] = 4,
    dense_above: float = 1.0,
    full_every: int | None = 100,
    topology: Literal["ring", "torus"] = "ring",
    shape: tuple[int, int] | None = None,
) -> Exchange:
    """Return what one step of a system comes to.

    Parameters
    ----------
    name : one of :data:`gradstats.compressors.COMPRESSORS`. ``lags`` is one message here; layer by layer it is
        :func:`gradstats.network.deliveries`.
    numel : elements of the gradient, d.
    ratio : k/d.
    world : workers, n.
    selected : elements each rank selects, k̂, where a rule misses k; by rank, or the same on all. MiCRO's are of its
        partitions. k if None.
    value_bytes, dense_above : of the sparse all-gather, see :class:`gradstats.compressors.SparseCompressor`.
    full_every, topology, shape : of Marsit, see :class:`gradstats.compressors.Marsit`.

    Raises
    ------
    InputError
        For an unknown name, or options out of range.
    """
    if name not in COMPRESSORS:
        raise InputError(f"no compressor {name!r}; there are {', '.join(COMPRESSORS)}")
    if world < 1 or numel < 1:
        raise InputError(f"an exchange needs ranks and elements, not {world} and {numel}")
    k = target_count(ratio, numel)
    if selected is None:
        parts = (partition(k, world, i) for i in range(world))
        counts = [p.stop - p.start for p in parts] if name == "micro" else [k] * world
    else:
        counts = [selected] * world if isinstance(selected, int) else list(selected)
    if len(counts) != world:
        raise InputError(f"selected has {len(counts)} ranks, not {world}")
    single = name == "redsync-quantised"
    if name == "none" or (single and numel < DENSE_BELOW):
        return _dense(name, numel, world)
    if single or name == "lags" or (name in SELECTORS and name != "micro"):
        return _sparse(name, numel, k, counts, single, value_bytes, dense_above)
    if name == "marsit":
        return _marsit(numel, world, full_every, topology, shape)
    others: dict[str, Callable[[], Exchange]] = {
        "micro": lambda: _micro(numel, k, counts),
        "cltk": lambda: _cltk(numel, world, counts[0]),
        "randomk": lambda: _randomk(numel, world, counts[0]),
        "cascading": lambda: _cascading(numel, world),
    }
    return others.get(name, lambda: _signs(name, numel, world))()


def _dense(name: str, numel: int, world: int) -> Exchange:
    reduce = Work("all_reduce", _FULL * numel)
    communicate = (reduce,) if name == "none" else (_FLAG, reduce)
    return Exchange(name, numel, world, numel, _FULL * numel, communicate=communicate)


def _sparse(
    name: str,
    numel: int,
    k: int,
    counts: list[int],
    single: bool,
    value_bytes: int,
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
    words = [selection_words(c, 1 if single else c, numel, value_bytes) for c in counts]
    room = selection_words(k, 1 if single else k, numel, value_bytes)
    messages = ragged_bytes([words] * 2, room)[-1]
    return Exchange(
        name,
        numel,
        world,
        mean,
        sum(messages),
        select=select,
        pack=(Work("pack", max(counts)),),
        communicate=tuple(Work("all_gather", m) for m in messages),
        unpack=(Work("unpack", mean, world),),
    )


def _micro(numel: int, k: int, counts: list[int]) -> Exchange:
    world, union = len(counts), sum(counts)
    width = index_dtype(numel).itemsize // _WORD
    words = [1 + c * width for c in counts]
    messages = ragged_bytes([words] * 2, 1 + -(-5 * k // (4 * world)) * width)[-1]
    values = [Work("all_reduce", _FULL * union)] if union else []
    return Exchange(
        "micro",
        numel,
        world,
        union / world,
        sum(messages) + _FULL * union,
        select=(Work("select:micro", numel / world),),
        pack=(Work("pack", max(counts)),),
        communicate=(*(Work("all_gather", m) for m in messages), *values),
        unpack=(Work("unpack", union),),
    )


def _cltk(numel: int, world: int, k: int) -> Exchange:
    positions = (1 + k) * index_dtype(numel).itemsize
    return Exchange(
        "cltk",
        numel,
        world,
        k,
        _FLAG.size + _FULL * k + positions / world,
        select=(Work("select:cltk", numel),),
        communicate=(_FLAG, Work("broadcast", positions), Work("all_reduce", _FULL * k)),
        unpack=(Work("unpack", k),),
    )


def _randomk(numel: int, world: int, k: int) -> Exchange:
    return Exchange(
        "randomk",
        numel,
        world,
        k,
        _FLAG.size + _FULL * k,
        select=(Work("select:randomk", numel),),
        communicate=(_FLAG, Work("all_reduce", _FULL * k)),
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
        communicate=(_FLAG, Work("all_gather", message)),
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
        communicate=(_FLAG, Work("hop", max(parts), hops)),
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
            _FLAG,
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

    All collectives' seconds per byte are scaled alike, latencies and local work stay as they are.

    Parameters
    ----------
    network : as it is.
    gain : network to seconds won, which increases as the network slows down.

    Returns
    -------
    bit/s of a link, as :attr:`Network.rate` has them; 0 where nothing is won on the slowest network, infinity where it
    is won on the fastest.
    """
    from scipy.optimize import brentq

    def at(log_factor: float) -> float:
        return gain(network.slowed(float(np.exp(log_factor))))

    end = float(np.log(_SLOWEST))
    if at(-end) > 0:
        return float("inf")
    if at(end) <= 0:
        return 0.0
    factor = float(np.exp(brentq(at, -end, end)))
    return network.rate / factor
