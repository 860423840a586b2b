"""What headers, checksums and the comparison of updates cost, against a step of one process.

    .venv/bin/python benchmarks/header_cost.py [--write]

Minimum of many calls of one process that is the whole group: no message waits for another rank. The table goes into
docs/reliability.md with ``--write``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from records import RESULTS, Row, grid, measure_into
from torch import nn

from gradstats.collectives.header import (
    HEADER_BYTES,
    HEADER_WORDS,
    Header,
    Kind,
    check_bodies,
    checksum,
    read_headers,
)
from gradstats.compressors import make_compressor
from gradstats.hooks import CompressionState
from gradstats.hooks.agreement import check_applied
from gradstats.hooks.shards import exchange

FILE = RESULTS / "header_cost.json"
SIZES = (4_000, 4_000_000)


def _least(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Return the shortest time of a call, in microseconds."""
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


def _headers(words: torch.Tensor) -> None:
    own = Header.now(Kind.SELECTIONS, words.numel())
    made = own.words(words)
    read_headers(made.view(1, HEADER_WORDS), own, 0)


def measure() -> list[Row]:
    """Return the microseconds of each part at each size."""
    rows: list[Row] = []
    empty = torch.empty(0, dtype=torch.int32)
    for numel in SIZES:
        sparse = torch.randint(-9, 9, (2 * numel // 100,), dtype=torch.int32)
        signs = torch.randint(-9, 9, (numel // 32,), dtype=torch.int32)
        gradient = torch.randn(numel)
        layer = nn.Linear(numel, 1, bias=False)
        state = CompressionState(
            make_compressor("topk", 0.01), named_parameters=layer.named_parameters()
        )
        named = [("weight", gradient)]
        rows.append(
            {
                "numel": numel,
                "header_bytes": HEADER_BYTES,
                "header": _least(lambda: _headers(empty)),
                "sparse_body": _least(lambda x=sparse: check_bodies([x], [int(checksum(x))])),
                "signs_body": _least(lambda x=signs: check_bodies([x], [int(checksum(x))])),
                "verify": _least(lambda named=named: check_applied(named, None)),
                "agreement": _least(
                    lambda s=state: (
                        s.agreement.reopen(),
                        s.agreement.check(0, s.compressor.state_dict, None, torch.device("cpu")),
                    )
                ),
                "step": _least(
                    lambda s=state, p=layer.weight, g=gradient: exchange(
                        s, [(p, g.clone().view(p.shape))]
                    ),
                    3,
                ),
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the times as Markdown."""
    heads = (
        "elements: | a header, made and read: | checksum of a body of 1 %: | of signs: | "
        "`verify_every`, a step of its: | agreement, once: | exchange of top-k at 1 %:"
    )
    names = ("header", "sparse_body", "signs_body", "verify", "agreement", "step")
    return grid(heads, [[f"{r['numel']:,}", *(f"{r[n]:,.0f} µs" for n in names)] for r in rows])


def everything() -> list[Row]:
    """Return all rows, of one thread and a group of one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return measure()


if __name__ == "__main__":
    measure_into("header", FILE, everything, table, __doc__, "reliability.md")
