"""Starting a run in several processes on this machine, through torchrun's own API."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid

from capture.workloads.config import RunConfig, RunResult
from gradstats.errors import GradstatsError

__all__ = ["RunFailedError", "launch"]


class RunFailedError(GradstatsError):
    """A worker process failed; says which rank and why."""


def launch(config: RunConfig) -> RunResult:
    """Run a workload under torchrun's elastic agent, gloo over the loopback interface.

    Parameters
    ----------
    config : the run; checked before any process starts.

    Returns
    -------
    RunResult
        Of rank 0.

    Raises
    ------
    InputError
        For settings that cannot work.
    RunFailedError
        If a rank fails; the other ranks are stopped.
    """
    config.check()
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from capture.workloads.training import worker

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # One line of ours says what failed; the agent's tables of tracebacks would bury it.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gradstats-run-") as logs:
        launcher = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=config.nproc,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                start_method="spawn",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            ),
            worker,
        )
        try:
            results: dict[int, RunResult] = launcher(config)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RunFailedError(f"rank {rank} failed: {_last_line(failure.message)}") from error
    return results[0]


def _last_line(message: object) -> str:
    """Return the line of a worker's error report that names the error."""
    text = str(message)
    if isinstance(message, dict):
        text = str(message.get("message", message))
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
