"""Start a function as every rank of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from capture.lab.caller import User, become, caller
from capture.lab.cluster import INTERFACE, Cluster, enter
from capture.workloads.launch import start

__all__ = ["launch"]

T = TypeVar("T")


def launch(cluster: Cluster, function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in one process per rank, each in its namespace; gloo uses the cluster's links.

    Ranks run as the user who called sudo; as root where nobody did (:func:`capture.lab.caller.caller`). Modules, and
    files of ``--load``, are imported before, as root.

    Parameters
    ----------
    cluster : Cluster
        Network that is up.
    function : callable
        Function at the top of a module, where the processes find it. They have torchrun's environment variables.
    *args : object
        Arguments of the function; they must be picklable.

    Returns
    -------
    list
        Return value of each rank.

    Raises
    ------
    InputError
        If sudo names a user whom this machine does not have.
    RunFailedError
        If a rank fails; the others are stopped.
    """
    # The ranks inherit it. Without it they warn that no name server knows the lab's addresses.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return start(len(cluster.ranks), _rank, cluster, caller(), function, args)


def _rank(
    cluster: Cluster, user: User | None, function: Callable[..., T], args: tuple[Any, ...]
) -> T:
    # before anything opens a socket or starts a thread: those stay where they are made
    enter(cluster.ranks[int(os.environ["RANK"])])
    if user is not None:
        become(user)
    # The ranks meet at rank 0, inside the lab: torchrun's agent and its store are outside.
    os.environ |= {"MASTER_ADDR": cluster.address, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return function(*args)
