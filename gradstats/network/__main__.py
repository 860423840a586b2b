"""Program that measures a cluster from the command line, on every rank at once.

::

    torchrun --nproc-per-node 4 -m gradstats.network -o network.json

Rank 0 writes a :class:`gradstats.network.Network` and prints the fitted lines.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gradstats.compressors import COMPRESSORS, compressor_class
from gradstats.errors import InputError, first_line
from gradstats.network.measure import compare, measure
from gradstats.network.model import Network
from gradstats.registry import load_file
from gradstats.tables import render

__all__ = ["main"]

_COMMAND = "torchrun --nproc-per-node N -m gradstats.network"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, too."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_COMMAND,
        usage="%(prog)s [OPTION …]",
        description="Measure the latency and bandwidth of collectives, and the speed of selecting, packing and "
        "unpacking gradients. `gradstats plan` predicts training steps from the result.",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="network.json",
        metavar="FILE",
        help="JSON to write; default %(default)s",
    )
    parser.add_argument(
        "--backend", default="gloo", metavar="NAME", help="gloo, nccl, …; default %(default)s"
    )
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of workers to measure; default all ranks that run",
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=1 << 25,
        metavar="BYTES",
        help="largest message; default %(default)s",
    )
    parser.add_argument(
        "--largest-numel",
        type=int,
        default=1 << 21,
        metavar="N",
        help="elements of the largest gradient of local work; default %(default)s",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        metavar="N",
        help="how often each size is timed; default %(default)s",
    )
    parser.add_argument(
        "--ratio",
        type=float,
        default=0.001,
        metavar="K/D",
        help="fraction of the elements that is selected; default %(default)s",
    )
    parser.add_argument(
        "--select",
        nargs="*",
        metavar="NAME",
        help="compressors whose selection is measured; default all",
    )
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="FILE.py",
        help="Python file to import first: rules and compressors of your own",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also run each of these compressors, and compare its time with the prediction",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program on this rank.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line without the program's name. By default that of the process.

    Raises
    ------
    SystemExit
        With 2 on every rank, after one line on stderr, for anything that the user can mend.
    """
    joined = False
    try:
        options = _parser().parse_args(arguments)
        device = _device(options)
        _join(options.backend)
        joined = True
        _run(options, device)
    except InputError as error:
        # A rank that cannot join is alone with its error. Later every rank has the same one, and the first tells it.
        if os.environ.get("RANK", "0") == "0" or not joined:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        if joined:
            dist.destroy_process_group()


def _device(options: argparse.Namespace) -> str:
    """Check what can be checked before the ranks meet, and return the device of the tensors."""
    if "RANK" not in os.environ:
        raise InputError(f"start it on every rank: {_COMMAND} -o network.json")
    for file in options.load:
        load_file(file)
    # after the files, which may bring compressors of their own
    if options.select is None:
        options.select = tuple(COMPRESSORS)
    for name in options.select:
        compressor_class(name)
    if not dist.is_backend_available(options.backend):
        raise InputError(f"this PyTorch has no backend {options.backend!r}; gloo is always there")
    if options.backend != "nccl":
        return "cpu"
    # NCCL takes the current device of the process: set before the group is made
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= there:
        raise InputError(f"nccl needs a GPU for each rank, and this host has {there}; use gloo")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def _join(backend: str) -> None:
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:  # a variable is missing; nobody answers
        rank = os.environ["RANK"]
        raise InputError(f"rank {rank} cannot join the others: {first_line(error)}") from None


def _run(options: argparse.Namespace, device: str) -> None:
    first = dist.get_rank() == 0
    _on_first(lambda: _check_writable(Path(options.output)))
    network = measure(
        options.worlds,
        largest=options.largest,
        largest_numel=options.largest_numel,
        repeats=options.repeats,
        ratio=options.ratio,
        select=options.select,
        device=device,
        on_progress=_report if first else lambda _: None,
    )
    # saved before --check, which takes minutes as well and may fail
    _on_first(lambda: network.save(options.output))
    if first:
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
        if first:
            print(f"\n{render(records, title='A step, predicted and measured, in seconds')}")
    # no rank leaves the group while another is still in one of its collectives
    dist.barrier()


def _on_first(action: Callable[[], object]) -> None:
    """Do something on rank 0; if it raises :class:`InputError`, raise that on every rank."""
    messages: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except InputError as error:
            messages[0] = str(error)
    # reached by all ranks even where rank 0 raised, or the others would wait for ever
    dist.broadcast_object_list(messages)
    if messages[0] is not None:
        raise InputError(messages[0])


def _check_writable(path: Path) -> None:
    """Raise now what writing the result would raise after minutes of measuring."""
    there = path.exists()
    try:
        # appending creates the file or leaves what is in it as it is
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


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


def _report(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
