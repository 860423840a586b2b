"""Starting a function as every rank of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from capture.lab.cluster import INTERFACE, Cluster, enter
from capture.workloads.launch import start

__all__ = ["launch"]

T = TypeVar("T")


def launch(cluster: Cluster, function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in one process per rank, each in its namespace, gloo over the network's links.

    Parameters
    ----------
    cluster : that is up.
    function : of a module, to be found by the processes; the environment is torchrun's.
    args : of the function, picklable.

    Returns
    -------
    list
        What each rank returned.

    Raises
    ------
    RunFailedError
        If a rank fails; the others are stopped.
    """
    # The ranks inherit it, and would warn that no name server knows the lab's addresses.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return start(len(cluster.ranks), _rank, cluster, function, args)


def _rank(cluster: Cluster, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    enter(cluster.ranks[int(os.environ["RANK"])])
    # The ranks meet at rank 0, inside the lab: torchrun's agent and its store are outside.
    os.environ |= {"MASTER_ADDR": cluster.address, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return function(*args)
