"""The way of an update into the gradients: through the caches, and past them."""

from __future__ import annotations

import pytest
import torch

from gradstats.hooks import gradient
from gradstats.hooks.gradient import FlatGradient
from gradstats.hooks.layout import ParameterLayout
from gradstats.hooks.memory import NoMemory
from gradstats.primitives.loops import copies

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
def test_past_the_caches_goes_what_a_copy_writes(monkeypatch, widest, scale):
    torch.manual_seed(0)
    named = parameters(widest)
    layout = ParameterLayout(exclude=["averaged densely"])
    layout.add(named.items())
    flat = FlatGradient(layout, NoMemory())
    flat.allocate(torch.device("cpu"))
    flat.dense.normal_()
    mean = torch.randn(layout.numel, dtype=layout.dtype)
    calls = []
    copy = copies.copy_past_caches
    monkeypatch.setattr(copies, "copy_past_caches", lambda *a: (calls.append(a[0].size), copy(*a)))
    written = []
    for beyond in (layout.numel, layout.numel + 1):
        monkeypatch.setattr(gradient, "_BEYOND_CACHES", beyond)
        pairs = [
            (p, torch.full_like(p, 9, memory_format=torch.contiguous_format))
            for p in named.values()
        ]
        flat.write(pairs, mean, scale)
        written.append([g for _, g in pairs])
    for name, (a, b) in zip(named, zip(*written, strict=True), strict=True):
        assert torch.equal(a, b), name
    single = (
        widest == torch.float32
    )  # the large one, the real view of the complex one, and the widest
    assert calls == ([LARGE + 3, 2 * LARGE, LARGE] if single else [])
