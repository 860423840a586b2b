"""Processes forked from one that has imported everything: seconds saved for each of them."""

from __future__ import annotations

import multiprocessing

from capture.workloads.launch import PRELOADED

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "zarr", "capture.tap", *PRELOADED])
