"""Reference training runs, one model per file, started through torchrun's own API.

This module knows names and defaults only; torch loads when a run starts.
"""

from __future__ import annotations

from capture.workloads.config import (
    BASELINES,
    WORKLOADS,
    RunConfig,
    RunResult,
    WorkloadInfo,
    workload_info,
)

__all__ = [
    "BASELINES",
    "WORKLOADS",
    "RunConfig",
    "RunResult",
    "WorkloadInfo",
    "run",
    "workload_info",
]


def run(config: RunConfig) -> RunResult:
    """Run a workload in ``config.nproc`` processes; see :func:`capture.workloads.launch.launch`."""
    from capture.workloads.launch import launch

    return launch(config)
