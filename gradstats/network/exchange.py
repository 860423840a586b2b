"""Bytes and seconds of one step's exchange, for every name of :data:`gradstats.compressors.COMPRESSORS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.compressors import CompressorName, codecs, compressor_class
from gradstats.compressors.cost import Exchange, Load, Topology
from gradstats.errors import InputError
from gradstats.network.model import Network
from gradstats.primitives.ratio import target_count

__all__ = ["SLOWEST", "break_even", "exchange"]

SLOWEST = 1e6
"""A break-even is looked for in networks from this many times slower to this many times faster than the given one."""


def exchange(
    name: CompressorName | str,
    numel: int,
    ratio: float = 0.001,
    world: int = 2,
    *,
    selected: int | Sequence[int] | None = None,
    codec: Codec = PLAIN,
    dense_above: float = 1.0,
    full_every: int | None = 100,
    topology: Topology = "ring",
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
    compressor = compressor_class(name)
    codec = check_codec(codec, name, codecs(name))
    if world < 1 or numel < 1:
        raise InputError(
            f"an exchange needs ranks and elements, at least 1 each, not {world} and {numel}"
        )
    if selected is not None:
        selected = [selected] * world if isinstance(selected, int) else list(selected)
        if len(selected) != world:
            raise InputError(f"selected has {len(selected)} ranks, not {world}")
    load = Load(
        name=name,
        numel=numel,
        world=world,
        k=target_count(ratio, numel),
        selected=selected,
        codec=codec,
        dense_above=dense_above,
        full_every=full_every,
        topology=topology,
        shape=shape,
    )
    return compressor.exchange(load)


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

    # searched by logarithm, because the factors span twelve powers of ten
    def at(log_factor: float) -> float:
        return gain(network.slowed(float(np.exp(log_factor))))

    end = float(np.log(SLOWEST))
    if at(-end) > 0:
        return float("inf")
    if at(end) <= 0:
        return 0.0
    # the tests above leave a change of sign between the ends, which brentq needs
    factor = float(np.exp(brentq(at, -end, end)))
    return network.rate / factor
