"""Collectives for compressed gradients, on any torch.distributed backend."""

from gradstats.collectives.codec import Codec, Indices, Values
from gradstats.collectives.packed import GatheredSelections, SparseAllGather
from gradstats.collectives.plain import all_gather_flags
from gradstats.collectives.ring import one_bit_ring
from gradstats.collectives.torus import one_bit_torus

__all__ = [
    "Codec",
    "GatheredSelections",
    "Indices",
    "SparseAllGather",
    "Values",
    "all_gather_flags",
    "one_bit_ring",
    "one_bit_torus",
]
