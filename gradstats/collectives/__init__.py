"""Collectives for compressed gradients, on any torch.distributed backend."""

from gradstats.collectives.packed import GatheredSelections, SparseAllGather

__all__ = ["GatheredSelections", "SparseAllGather"]
