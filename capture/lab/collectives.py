"""How long gloo's collectives take in the lab, beside what the links allow.

``python -m capture.lab.collectives --nproc 4 --rate 1gbit`` prints a table; see docs/network.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import typer

from capture.lab.launch import launch
from capture.lab.network import shaped_network
from gradstats.cost.rates import parse_rate

__all__ = ["measure"]


def measure(nproc: int, rate: int, numel: int, ratio: float, repeats: int) -> list[dict[str, Any]]:
    """Time a dense all-reduce, and an all-gather of what a top-k would send of it.

    Parameters
    ----------
    nproc : ranks.
    rate : of every link, bit/s.
    numel : float32 elements of the all-reduce.
    ratio : of them that a rank puts into the all-gather, 8 bytes each.
    repeats : of each, after one that is not counted; medians are returned.

    Returns
    -------
    list of dict
        ``collective``, ``nproc``, ``rate`` (Mbit/s), ``bytes`` (each rank's), ``seconds`` (until the slowest
        rank has the result), ``bound`` (what a link at full rate needs for the ring: 2(n−1)/n·bytes for the all-reduce,
        (n−1)·bytes for the all-gather).
    """
    small = max(1, round(ratio * numel))
    with shaped_network(nproc, rate) as network:
        times = launch(network, _time, numel, small, repeats)
    hops = {
        "all-reduce": (4 * numel, 2 * (nproc - 1) / nproc),
        "all-gather": (8 * small, nproc - 1),
    }
    return [
        {
            "collective": name,
            "nproc": nproc,
            "rate": rate / 1e6,
            "bytes": size,
            "seconds": median(max(ranks) for ranks in zip(*(t[name] for t in times), strict=True)),
            "bound": factor * size * 8 / rate,
        }
        for name, (size, factor) in hops.items()
    ]


def _time(numel: int, small: int, repeats: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dense, message = torch.ones(numel), torch.ones(small, dtype=torch.int64)
    gathered = torch.empty(small * dist.get_world_size(), dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(dense),
        "all-gather": lambda: dist.all_gather_single(gathered, message),
    }
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        for _ in range(repeats + 1):
            dist.barrier()
            started = time.perf_counter()
            call()
            times.setdefault(name, []).append(time.perf_counter() - started)
    dist.destroy_process_group()
    return {name: seconds[1:] for name, seconds in times.items()}


def main(
    nproc: Annotated[int, typer.Option(help="Ranks.")] = 4,
    rate: Annotated[list[str], typer.Option(help="Of every link.")] = ["1gbit", "100mbit"],  # noqa: B006
    numel: Annotated[int, typer.Option(help="Elements of the all-reduce.")] = 2_600_000,
    ratio: Annotated[float, typer.Option(help="Share in the all-gather.")] = 0.001,
    repeats: Annotated[int, typer.Option(help="Of each; medians.")] = 5,
) -> None:
    """Print the table."""
    from gradstats.tables import render

    records = [r for each in rate for r in measure(nproc, parse_rate(each), numel, ratio, repeats)]
    print(render(records))


if __name__ == "__main__":
    typer.run(main)
