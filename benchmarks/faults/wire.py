"""Messages that arrive damaged: refused in one line, or harmless; never written outside the gradient."""

from __future__ import annotations

import datetime
import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from faults.options import Net, _gradients
from faults.processes import check_line, start_ranks
from faults.resumes import SYSTEMS
from gradstats.collectives import plain
from gradstats.collectives.ring import Ring
from gradstats.errors import GradstatsError
from gradstats.hooks import CompressionState
from gradstats.hooks.shards import exchange

NUMEL = 500
GATHERING = [name for name in SYSTEMS if name != "none"]
RANKS = ("all_gather_single", "all_reduce", "broadcast", "all_to_all_single", "hop")
"""What carries messages between two ranks."""


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
        with _damaged(rng, rng.choice([0, 0, 1, 2])) as changed:
            reduced = _reduced(make, gradient, guard)
    except GradstatsError as error:
        check_line(error)
        outcome = "refused"
    else:
        if not changed[0]:
            outcome = "not damaged"
        else:  # what was changed is padding, which nobody reads
            assert not any(reduced.flags), "taken for a rank's refusal"
            assert torch.equal(reduced.mean, expected), "another value or position in the gradient"
    assert (guard[:NUMEL] == 7.5).all(), "written before the gradient"
    assert (guard[2 * NUMEL :] == 7.5).all(), "written behind the gradient"
    return outcome


def _between(rank: int, world: int, number: int, verify: int, reports: Connection) -> None:
    """Train two steps, then two with a damaged message on one rank; report what came of them."""
    rng = random.Random(number)
    system = GATHERING[number % len(GATHERING)]
    victim, at = rng.randrange(2), rng.randrange(12)
    calls, changed, armed = 0, False, False

    def damage(arrived: torch.Tensor) -> None:
        nonlocal calls, changed
        calls += 1
        if armed and rank == victim and calls == at + 1 and arrived.numel():
            raw = arrived.view(-1).view(torch.uint8).numpy()
            before = raw.copy()
            _damage(raw, rng)
            changed = not np.array_equal(before, raw)

    def through(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(arrived: torch.Tensor, *rest: Any, **options: Any) -> Any:
            work = true(arrived, *rest, **options)
            damage(arrived)
            return work

        return call

    checked = Ring._checked

    def hop(ring: Ring, incoming: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        damage(incoming)
        return checked(ring, incoming, like)

    Ring._checked = hop
    for name in RANKS[:-1]:
        setattr(dist, name, through(getattr(dist, name)))
    found: list[torch.Tensor] = []
    for damaging in (False, True):
        armed, calls, model = damaging, 0, Net()
        state = CompressionState(
            SYSTEMS[system](),
            named_parameters=model.named_parameters(),
            dense_below=20,
            verify_every=verify,
        )
        for step in range(2):
            pairs = _gradients(model, rank, step)
            try:
                exchange(state, pairs)
            except GradstatsError as error:
                check_line(error)
                reports.send(("refused", changed, str(error)))
                return
        found.append(torch.cat([g.reshape(-1) for _, g in pairs]))
    reports.send(("same" if torch.equal(*found) else "other", changed, ""))


def between_ranks(number: int, folder: Path) -> str:
    """Damage one message of any kind on one of two ranks, with an update that is verified."""
    said = [rank.rest() for rank in start_ranks(2, folder, _between, number, 1)]
    assert all(len(each) == 1 for each in said), f"died: {said}"
    (one,), (other,) = said
    damaged = one[1] or other[1]
    outcomes = {one[0], other[0]}
    if not damaged:
        assert outcomes == {"same"}, said
        return "not damaged"
    assert "other" not in outcomes, f"silent: {said}"
    if "refused" not in outcomes:
        return "harmless"
    assert not any("NaN" in each[2] for each in (one, other)), f"a false cause: {said}"
    return "refused"
