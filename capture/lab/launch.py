"""Starting a function as every rank of a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from capture.lab.network import INTERFACE, Network, enter
from capture.workloads.launch import start

__all__ = ["launch"]

T = TypeVar("T")


def launch(network: Network, function: Callable[..., T], *args: Any) -> list[T]:
    """Run a function in one process per rank, each in its namespace, gloo over the network's links.

    Parameters
    ----------
    network : that is up.
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
    return start(len(network.ranks), _rank, network, function, args)


def _rank(network: Network, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    enter(network.ranks[int(os.environ["RANK"])])
    # The ranks meet at rank 0, inside the lab: torchrun's agent and its store are outside.
    os.environ |= {"MASTER_ADDR": network.address, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return function(*args)
