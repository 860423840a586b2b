"""What an exchange of one step sends, and the work that it takes: what a compressor says of itself to be priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, Protocol, TypeAlias

from gradstats.collectives.codec import PLAIN, SCALED, Codec
from gradstats.collectives.header import HEADER_BYTES
from gradstats.collectives.ragged import RaggedAllGather

__all__ = [
    "FLAG",
    "FULL",
    "WORD",
    "Exchange",
    "Load",
    "Prices",
    "Topology",
    "Work",
    "coding",
    "dense",
    "ragged_bytes",
    "selection_words",
    "sparse",
]

Topology: TypeAlias = Literal["ring", "torus"]

WORD = 4
"""Bytes of the 32-bit words of which messages consist."""
_SELECTION = 2
"""Words before a packed selection."""
FULL = 4
"""Bytes of a float32."""


class Work(NamedTuple):
    """Calls of one operation.

    Attributes
    ----------
    operation : str
        A collective of :data:`gradstats.network.ALGORITHMS`, or local work.
    size : float
        Size of one call: bytes of a collective's argument, elements of local work.
    times : float
        Number of calls, made one after the other.
    """

    operation: str
    size: float
    times: float = 1


FLAG = Work("all_gather", HEADER_BYTES)
"""The exchange of headers, in which every rank says where it is and whether its gradient can be used."""


class Prices(Protocol):
    """What says how long work takes: :class:`gradstats.network.Network`."""

    def seconds(self, works: Iterable[Work], world: int) -> float:
        """Return the seconds of some work, done one after the other.

        Parameters
        ----------
        works : iterable of Work
            Calls to add up.
        world : int
            Number of workers.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a step's exchange has to carry.

    Attributes
    ----------
    name : str
        Name of the compressor.
    numel : int
        Elements of the gradient, d.
    world : int
        Number of workers, n.
    k : int
        Elements that each rank aims to send.
    selected : sequence of int, length n, or None
        Elements that each rank selects, k̂; None for as many as it aims at.
    codec : Codec
        What positions and values are on the wire.
    dense_above : float
        Share of d above which selections of all ranks together become a dense vector.
    full_every : int or None
        Rounds of ``marsit`` from one full-precision average to the next.
    topology : {"ring", "torus"}
        Topology of ``marsit``.
    shape : tuple of int, or None
        Rows and columns of the torus.
    """

    name: str
    numel: int
    world: int
    k: int
    selected: Sequence[int] | None = None
    codec: Codec = PLAIN
    dense_above: float = 1.0
    full_every: int | None = 100
    topology: Topology = "ring"
    shape: tuple[int, int] | None = None

    @property
    def counts(self) -> Sequence[int]:
        """Number of elements that each rank selects."""
        return [self.k] * self.world if self.selected is None else self.selected

    def exchange(self, selected: float, bytes_sent: float, **work: tuple[Work, ...]) -> Exchange:
        """Return the exchange of this load.

        Parameters
        ----------
        selected : float
            Elements that a rank sends.
        bytes_sent : float
            Bytes that a rank sends.
        **work : tuple of Work
            Work by its place: ``select``, ``pack``, ``communicate``, ``unpack``.
        """
        return Exchange(self.name, self.numel, self.world, selected, bytes_sent, **work)

    @property
    def selecting(self) -> Work:
        """Work of the compressor's own selection in the whole gradient."""
        # `threshold:NAME` selects as NAME does, under which it is measured; no other name has a colon
        return Work(f"select:{self.name.rpartition(':')[2]}", self.numel)


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

    def split(self, network: Prices) -> dict[str, float]:
        """Return the seconds of ``select``, ``pack``, ``communicate`` and ``unpack``, by these names.

        Parameters
        ----------
        network : Network
            Cost model of :mod:`gradstats.network`.
        """
        lanes = ("select", "pack", "communicate", "unpack")
        return {lane: network.seconds(getattr(self, lane), self.world) for lane in lanes}

    def seconds(self, network: Prices) -> float:
        """Return the seconds of the whole exchange, all parts done one after the other.

        Parameters
        ----------
        network : Network
            Cost model of :mod:`gradstats.network`.
        """
        return network.seconds(
            chain(self.select, self.pack, self.communicate, self.unpack), self.world
        )


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
    # of several selections in a message, each has its own counts
    return _SELECTION + positions + codec.value_words(values)


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
    # no group is needed: what is asked of it is its rule for the room of the next message
    gather, sent = RaggedAllGather(), []
    for counts in words:
        gather.capacity = gather.capacity or max(1, expected)
        rest = max(counts) - gather.capacity
        sent.append([HEADER_BYTES + WORD * gather.capacity] + ([WORD * rest] if rest > 0 else []))
        gather._adapt(max(counts), [])
    return sent


def dense(load: Load) -> Exchange:
    """Return the exchange of all values in an all-reduce, after the flags.

    Parameters
    ----------
    load : Load
        What it carries.
    """
    size = FULL * load.numel
    return load.exchange(load.numel, size, communicate=(FLAG, Work("all_reduce", size)))


def sparse(load: Load, single: bool = False) -> Exchange:
    """Return the exchange of one selection of each rank in an all-gather.

    Parameters
    ----------
    load : Load
        What it carries.
    single : bool
        Whether one value stands for all that are selected.
    """
    counts, numel, codec = load.counts, load.numel, load.codec
    mean = sum(counts) / len(counts)
    # in a steady state the step before, which decides, has sent as much
    if sum(counts) > load.dense_above * numel:
        # how many elements were selected travels behind the flags
        flags = HEADER_BYTES + WORD
        return load.exchange(
            mean,
            flags + FULL * numel,
            select=(load.selecting,),
            communicate=(Work("all_gather", flags), Work("all_reduce", FULL * numel)),
            unpack=(Work("average", numel),),
        )
    words = [selection_words(c, 1 if single else c, numel, codec) for c in counts]
    room = selection_words(load.k, 1 if single else load.k, numel, codec)
    # the second of two equal steps: its room is what the first one has led to
    messages = ragged_bytes([words] * 2, room)[-1]
    return load.exchange(
        mean,
        sum(messages),
        select=(load.selecting,),
        # ranks pack at the same time, and all wait for the one with most
        pack=(Work("pack", max(counts)), *coding(codec, "encode", max(counts))),
        communicate=tuple(Work("all_gather", m) for m in messages),
        unpack=(
            Work("unpack", mean, load.world),
            *(work._replace(times=load.world) for work in coding(codec, "decode", mean)),
        ),
    )
