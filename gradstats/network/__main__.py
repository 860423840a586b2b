"""Measure a cluster from the command line, on every rank at once.

::

    torchrun --nproc-per-node 4 -m gradstats.network -o network.json

Rank 0 writes a :class:`gradstats.network.Network` and prints what was fitted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradstats.compressors import COMPRESSORS
from gradstats.errors import InputError
from gradstats.network.measure import compare, measure
from gradstats.network.model import Network
from gradstats.tables import render

__all__ = ["main"]


def _table(network: Network) -> str:
    records = []
    for line in network.lines:
        fixed, slope = line.confidence()
        records.append(
            {
                "operation": line.operation,
                "n": line.world if line.world > 1 else None,
                "fixed_us": 1e6 * line.fixed,
                "± us": 1e6 * (fixed.high - fixed.value),
                "ns/unit": 1e9 * line.slope,
                "± ns": 1e9 * (slope.high - slope.value),
                "spread": line.spread,
                "noise": line.noise,
            }
        )
    return render(records, title="seconds = fixed + slope · size (bytes; elements of local work)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m gradstats.network",
        description="Measure latency and bandwidth of collectives and the speed of selection, packing and unpacking.",
    )
    parser.add_argument("-o", "--output", default="network.json", help="JSON to write")
    parser.add_argument("--backend", default="gloo", help="gloo (default), nccl, …")
    parser.add_argument("--worlds", type=int, nargs="+", help="numbers of workers; all that run")
    parser.add_argument("--largest", type=int, default=1 << 25, help="bytes of a message")
    parser.add_argument("--largest-numel", type=int, default=1 << 21, help="of local work")
    parser.add_argument("--repeats", type=int, default=9, help="of every size")
    parser.add_argument("--ratio", type=float, default=0.001, help="k/d of the selections")
    parser.add_argument(
        "--select", nargs="*", default=COMPRESSORS, metavar="NAME", help="systems; all"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run every system, too, and compare with the prediction",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; errors a user can mend are one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(options: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        raise InputError(f"start it on every rank: {_parser().prog} -o network.json")
    device = "cpu"
    if options.backend == "nccl":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    try:
        network = measure(
            options.worlds,
            largest=options.largest,
            largest_numel=options.largest_numel,
            repeats=options.repeats,
            ratio=options.ratio,
            select=options.select,
            device=device,
            on_progress=_report if dist.get_rank() == 0 else lambda _: None,
        )
        if dist.get_rank() == 0:
            network.save(options.output)
            print(_table(network))
            print(f"wrote {options.output}", file=sys.stderr)
        if options.check:
            records = compare(
                network,
                options.largest_numel,
                repeats=options.repeats,
                ratio=options.ratio,
                select=options.select,
                device=device,
            )
            if dist.get_rank() == 0:
                print(f"\n{render(records, title='A step, predicted and measured, in seconds')}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _report(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
