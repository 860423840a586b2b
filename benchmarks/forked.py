"""Processes forked from one that has imported everything: seconds saved for each of them."""

from __future__ import annotations

import multiprocessing

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # last, as it freezes what is there
    ["torch.distributed.checkpoint", "dask", "pytest", "xarray", "zarr", "capture.workloads.forked"]
)
