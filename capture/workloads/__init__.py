"""Reference training runs, started through torchrun's own API.

Importing this package loads names and defaults only; torch loads when a run starts.
"""

from __future__ import annotations

from capture.workloads.config import BASELINES, RunConfig, RunResult
from capture.workloads.registry import WORKLOADS, WorkloadInfo, workload_info

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
    """Run a workload in several processes on this machine.

    Parameters
    ----------
    config : RunConfig
        Settings of the run; they are checked before any process starts.

    Returns
    -------
    RunResult
        Result of rank 0.

    Raises
    ------
    InputError
        If the settings cannot work.
    RunFailedError
        If a rank fails; the other ranks are stopped.
    """
    from capture.workloads.launch import launch

    return launch(config)
