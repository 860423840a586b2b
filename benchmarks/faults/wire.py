"""Messages that arrive damaged: refused in one line, or harmless; never written outside the gradient."""

from __future__ import annotations

import datetime
import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from faults.processes import check_line
from faults.resumes import SYSTEMS
from gradstats.collectives import plain
from gradstats.errors import GradstatsError

NUMEL = 500
GATHERING = [
    name
    for name in SYSTEMS
    # one all-gather or more; the others add numbers up, of which any is a number that a rank can have sent
    if name
    not in (
        "none",
        "dense-bf16",
        "dense-fp8",
        "layerwise",
        "lags",
        "cascading",
        "marsit",
        "randomk",
        "cltk",
    )
]


@functools.cache
def _group() -> None:
    folder = tempfile.mkdtemp()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=20),
    )


def _damage(raw: np.ndarray[Any, Any], rng: random.Random) -> None:
    """Flip a bit, or lose the end, or put something else in its place."""
    kind, n = rng.choice(["flip", "flip", "words", "cut", "foreign", "shift"]), raw.size
    if kind == "flip":
        raw[rng.randrange(n)] ^= 1 << rng.randrange(8)
    elif kind == "words":
        for _ in range(rng.randrange(1, 4)):
            at = 4 * rng.randrange(max(1, n // 4))
            word = rng.choice(
                [-1, 0, 1, 2**31 - 1, -(2**31), NUMEL, NUMEL - 1, rng.getrandbits(31)]
            )
            raw[at : at + 4] = np.array([word], "<i4").view(np.uint8)[: raw[at : at + 4].size]
    elif kind == "cut":
        raw[rng.randrange(n) :] = 0
    elif kind == "foreign":
        raw[:] = np.frombuffer(rng.randbytes(n), np.uint8)
    else:
        raw[:] = np.roll(raw, rng.randrange(1, n) if n > 1 else 0)


@contextmanager
def _damaged(rng: random.Random, which: int) -> Iterator[list[bool]]:
    """Damage what arrives in the `which`-th all-gather."""
    true, calls, changed = dist.all_gather_single, 0, [False]

    def gather(gathered: torch.Tensor, message: torch.Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        work = true(gathered, message, *rest, **options)
        if calls == which:
            raw = gathered.view(torch.uint8).numpy().reshape(-1)
            before = raw.copy()
            _damage(raw, rng)
            changed[0] = not np.array_equal(before, raw)
        calls += 1
        return work

    plain.dist.all_gather_single = gather
    try:
        yield changed
    finally:
        plain.dist.all_gather_single = true


def _reduced(make: Callable[[], Any], gradient: torch.Tensor, guard: torch.Tensor) -> Any:
    place = guard[NUMEL : 2 * NUMEL]
    place.copy_(gradient)
    return make().reduce(place, None)


def message(number: int, folder: Path) -> str:
    """Damage one message on its way into a compressor."""
    _group()
    rng = random.Random(number)
    make = SYSTEMS[GATHERING[number % len(GATHERING)]]
    gradient = torch.from_numpy(np.random.default_rng(number).laplace(size=NUMEL).astype("f4"))
    guard = torch.full((3 * NUMEL,), 7.5)
    torch.manual_seed(number)
    expected = _reduced(make, gradient, guard.clone()).mean.clone()
    torch.manual_seed(number)
    outcome = "harmless"
    try:
        with _damaged(rng, rng.choice([0, 0, 1])) as changed:
            reduced = _reduced(make, gradient, guard)
    except GradstatsError as error:
        check_line(error)
        outcome = "refused"
    else:
        if not changed[0]:
            outcome = "not damaged"
        elif any(reduced.flags):
            outcome = "taken for a rank's refusal"
        else:
            assert reduced.mean.shape == (NUMEL,)
            if not torch.equal(reduced.mean, expected):
                # no message carries a checksum of its own: that is the network's, as in every all-reduce
                outcome = "another value or position in the gradient"
    assert (guard[:NUMEL] == 7.5).all(), "written before the gradient"
    assert (guard[2 * NUMEL :] == 7.5).all(), "written behind the gradient"
    return outcome
