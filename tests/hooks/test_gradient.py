"""The way of an update into the gradients: by positions, and as a whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from gradstats.hooks import gradient
from gradstats.hooks.gradient import FlatGradient
from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.memory import NoMemory
from gradstats.primitives import kernels

LARGE = gradient._LARGE


def parameters(widest):
    """Return parameters of every kind that takes its own way; the widest dtype decides the vector's."""
    square = torch.empty(4, LARGE // 8, 2, 2)
    return {
        "large": torch.empty(LARGE + 3),
        "small": torch.empty(5),
        "channels last": square.to(memory_format=torch.channels_last),
        "half": torch.empty(LARGE, dtype=torch.bfloat16),
        "complex": torch.empty(LARGE, dtype=torch.complex64),
        "averaged densely": torch.empty(LARGE),
        "empty": torch.empty(0),
        "widest": torch.empty(LARGE, dtype=widest),
    }


@pytest.mark.parametrize("widest", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("share", [0, 1e-5, 0.004, 0.1])
def test_positions_write_what_a_copy_writes(monkeypatch, widest, scale, share):
    torch.manual_seed(0)
    named = parameters(widest)
    layout = ParameterLayout(exclude=["averaged densely"])
    layout.add(named.items())
    flat = FlatGradient(layout, NoMemory())
    flat.allocate(torch.device("cpu"))
    flat.dense.normal_()
    mean, of_each = torch.zeros(layout.numel, dtype=layout.dtype), round(layout.numel * share)
    ends = torch.tensor(
        list(
            itertools.chain(
                *((s.start, s.stop - 1) for s in layout.slots.values() if s.stop > s.start)
            )
        )
    )
    touched = [
        torch.cat([torch.randint(layout.numel, (of_each,)), ends]).unique(),
        torch.zeros(0, dtype=torch.int64),
        torch.randint(layout.numel, (of_each,)).unique(),
    ]
    for positions in touched:
        mean[positions] = torch.randn(len(positions), dtype=mean.dtype)
    calls = []
    put_at = kernels.put_at
    monkeypatch.setattr(kernels, "put_at", lambda *a: (calls.append(a[2]), put_at(*a)))
    written = []
    for positions in (touched, None):
        pairs = [
            (p, torch.full_like(p, 9, memory_format=torch.contiguous_format))
            for p in named.values()
        ]
        flat.write(pairs, mean, positions, scale)
        written.append([g for _, g in pairs])
    for name, (a, b) in zip(named, zip(*written, strict=True), strict=True):
        assert torch.equal(a, b), name
    few = 2 * share < 1 / gradient._FEW and widest == torch.float32
    assert len(calls) == (3 if few else 0)  # large, complex and widest
