"""Gradients, ordinary and hostile, of which the pins of thresholds are: the same bits in every process."""

from __future__ import annotations

import math

import numpy as np

BLOCK = 1 << 20
"""Elements that are read as one block; more go another way."""
MANY = 1 << 21
"""Elements from which on one histogram stands for the passes of SIDCo's stages."""


def _with(values, *bad):
    found = values.copy()
    for i, each in enumerate(bad):
        found[i * 7 : (i + 1) * 7] = each
    return found


def _layered(rng, numel):
    """Layers of scales that are far apart; one of them is zero."""
    x = (
        rng.laplace(size=numel)
        * np.repeat(np.exp(2 * rng.standard_normal(16)), -(-numel // 16))[:numel]
    )
    x[numel // 2 : numel // 2 + numel // 16] = 0
    return (1e-3 * x).astype(np.float32)


def small():
    """Return arrays of up to 5,000 elements by name."""
    rng = np.random.default_rng(41)
    x = rng.laplace(size=1000)
    f = x.astype(np.float32)
    five = rng.laplace(size=5000).astype(np.float32)
    sign = np.sign(x)
    return {
        "empty": np.empty(0, np.float32),
        "one zero": np.zeros(1, np.float32),
        "one element": np.full(1, -2, np.float32),
        "two elements": np.array([1, -3], np.float32),
        "zeros": np.zeros(100, np.float32),
        "equal": np.full(300, 0.25, np.float32),
        "two values": np.where(x < 0, 1, -2).astype(np.float32),
        "NaN alone": np.full(100, np.nan, np.float32),
        "infinite alone": np.full(100, np.inf, np.float32),
        "infinities and NaN": _with(f, math.inf, -math.inf, math.nan),
        "few non-zero": np.where(np.arange(1000) % 97 == 0, f, np.float32(0)),
        "laplace 64": f[:64],
        "laplace 1000": f,
        "laplace 4097": five[:4097],
        "student-t 2": rng.standard_t(2, 1000).astype(np.float32),
        "normal": rng.standard_normal(1000).astype(np.float32),
        "uniform": rng.uniform(-1, 1, 1000).astype(np.float32),
        "ties": (np.round(five * 4) / 4).astype(np.float32),
        "clipped": np.clip(five, -1, 1),
        "subnormal": (x * 1e-42).astype(np.float32),
        "some subnormal": np.where(np.arange(5000) % 3, five, five * np.float32(1e-42)),
        "largest": _with(f, 3.4e38),
        "of all sizes": (sign * 10.0 ** rng.uniform(-45, 38, 1000)).astype(np.float32),
        "one large": _with(f[:200], 0)[:]
        + np.eye(1, 200, 50, dtype=np.float32)[0] * np.float32(1e6),
        "reversed": five[::-1],
        "strided": np.repeat(f, 3)[::3],
        "float64": x,
        "float64 1e200": x * 1e200,
        "float64 1e-200": x * 1e-200,
        "float64 denormal": x * 5e-324,
        "float64 of all sizes": sign * 10.0 ** rng.uniform(-300, 300, 1000),
        "float16": five.astype(np.float16),
        "float16 largest": np.full(300, 65504, np.float16),
        "big-endian": f.astype(">f4"),
        "torch float32": tensor(five),
        "torch bfloat16": tensor(five, "bfloat16"),
        "torch float16": tensor(five, "float16"),
        "torch float64": tensor(x),
    }


def medium():
    """Return arrays of 20,000 and of 260,000 elements by name."""
    rng = np.random.default_rng(42)
    some = rng.laplace(size=20_000).astype(np.float32)
    more = rng.laplace(size=260_000).astype(np.float32)
    gamma = rng.gamma(0.4, size=20_000) * np.sign(some)
    return {
        "20k laplace": some,
        "20k gamma 0.4": gamma.astype(np.float32),
        "20k layered": _layered(rng, 20_000),
        "20k clipped": np.clip(some, -2, 2),
        "20k float64": some.astype(np.float64) * 1e100,
        "20k bfloat16": tensor(some, "bfloat16"),
        "260k layered": _layered(rng, 260_000),
        "260k student-t 3": rng.standard_t(3, 260_000).astype(np.float32),
        "260k zeros": np.where(rng.random(260_000) < 0.9, np.float32(0), more),
        "260k infinities and NaN": _with(more, math.inf, -math.inf, math.nan),
        "260k torch": tensor(more),
        "260k bfloat16": tensor(more, "bfloat16"),
    }


def large():
    """Return arrays just above one block, and just above what a histogram is for, by name."""
    rng = np.random.default_rng(43)
    layered = _layered(rng, MANY + 1000)
    student = rng.standard_t(3, MANY + 1000).astype(np.float32)
    return {
        "1M layered": layered[: BLOCK + 1000],
        "1M bfloat16": tensor(student[: BLOCK + 1000], "bfloat16"),
        "2M layered": layered,
        "2M clipped": np.clip(student, -3, 3),
        "2M bfloat16": tensor(student, "bfloat16"),
        "2M float64": student.astype(np.float64),
    }


def tensor(values, dtype=None):
    """Return a tensor with a copy of an array."""
    import torch

    found = torch.from_numpy(np.array(values))
    return found if dtype is None else found.to(getattr(torch, dtype))
