"""Collectives return when the backend has let go of their tensors: a process may end right after the last one."""

from __future__ import annotations

import threading
import time

import torch
from support.every import every

from gradstats.collectives import plain

CALLS = {
    "all_gather": lambda x: plain.all_gather(torch.zeros(2), x, None),
    "all_reduce": lambda x: plain.all_reduce(x, None),
    "all_to_all": lambda x: plain.all_to_all(x[:, None], None),
    "broadcast": lambda x: plain.broadcast(x, 0, None),
}


@every("first", [0, -1])
@every("name", CALLS)
def test_they_return_when_the_backend_has_let_go(monkeypatch, name, first):
    """Of all tensors: its thread drops them, in any order, after it has reported completion, as gloo's does."""
    threads, held = [], []

    def collective(*tensors, **_):
        held.extend(t for t in tensors if isinstance(t, torch.Tensor))

        def drop():
            while held:
                time.sleep(0.05)
                held.pop(first)

        threads.append(threading.Thread(target=drop))
        threads[-1].start()

    for function in ("all_gather_single", "all_reduce", "all_to_all_single", "broadcast"):
        monkeypatch.setattr(plain.dist, function, collective, raising=False)  # older PyTorch
    CALLS[name](torch.ones(2))
    assert not held
    (thread,) = threads
    thread.join()


def test_they_do_not_wait_for_a_reference_that_is_anothers(monkeypatch):
    """Such as one that a debugger keeps: a second at most."""
    kept = []
    monkeypatch.setattr(plain, "_LONGEST_S", 0.05)
    monkeypatch.setattr(plain.dist, "all_reduce", lambda x, *_, **__: kept.append(x))
    began = time.monotonic()
    plain.all_reduce(torch.ones(2), None)
    assert 0.05 <= time.monotonic() - began < 1
