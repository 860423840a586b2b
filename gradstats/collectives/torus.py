"""An all-reduce of one bit per element over a 2-D torus of ranks (Mikami et al. 2018).

It reduces along the rows; each rank then reduces the part that it completed along its column.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradstats.collectives.ring import Merge, Ring, reduce_bits
from gradstats.errors import InputError

__all__ = ["check_torus", "one_bit_torus"]


def one_bit_torus(
    packed: torch.Tensor,
    merge: Merge,
    group: dist.ProcessGroup | None = None,
    shape: tuple[int, int] = (1, 1),
) -> tuple[torch.Tensor, int]:
    """All-reduce one bit per element over a 2-D torus: rows, columns, and back.

    It moves as many bits as a ring, in (columns − 1) + (rows − 1) hops per period instead of M − 1.

    Parameters
    ----------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        This rank's bits, as :func:`gradstats.collectives.ring.pack_bits` makes them. Their number d is the same on all
        ranks and may be less than the number of ranks.
    merge : Merge
        Rule that merges two ranks' packed bits, see :data:`gradstats.collectives.ring.Merge`. Along the columns both
        sides hold more than one contribution.
    group : torch.distributed.ProcessGroup, optional
        The ranks; the default group if None.
    shape : tuple of int
        Rows and columns; rank r sits in row r div columns.

    Returns
    -------
    packed : uint8 tensor, shape (⌈d/8⌉,)
        The merged bits, the same on every rank.
    bytes_sent : int
        Bytes that this rank sent, as many as over a ring.

    Raises
    ------
    InputError
        If rows · columns is not the number of ranks.
    """
    rows, columns = check_torus(shape, dist.get_world_size(group))
    row, column = divmod(dist.get_rank(group), columns)
    # ranks of a column have the same place in their rows, so the same part becomes complete on them
    rings = [
        Ring(group, range(row * columns, (row + 1) * columns)),
        Ring(group, range(column, rows * columns, columns)),
    ]
    packed = reduce_bits(rings, packed, merge, contributions=1)
    return packed, sum(ring.bytes_sent for ring in rings)


def check_torus(shape: tuple[int, int], world: int) -> tuple[int, int]:
    """Return the shape of a torus unchanged if it holds the ranks.

    Parameters
    ----------
    shape : tuple of int
        Rows and columns.
    world : int
        Number of ranks.

    Returns
    -------
    tuple of int
        Rows and columns.

    Raises
    ------
    InputError
        If rows · columns is not the number of ranks.
    """
    rows, columns = shape
    if rows < 1 or columns < 1 or rows * columns != world:
        raise InputError(
            f"a torus of {rows} x {columns} ranks does not fit {world} ranks: rows x columns must be {world}"
        )
    return rows, columns
