"""Compiled kernels: nothing is left to compile after warming up, and no folder is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from gradstats.primitives import (
    exceedances,
    histogram,
    kernels,
    kth_largest,
    moments,
    select,
    top_candidates,
    warm_up,
)

COMPILED = [getattr(kernels, n) for n in dir(kernels) if hasattr(getattr(kernels, n), "signatures")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nothing_is_compiled_after_warming_up(dtype):
    warm_up()
    before = [k.signatures for k in COMPILED]
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for bits in (7, 10):
        histogram(x, bits)
    top_candidates(x, 1000)
    kth_largest(x, 1000)
    exceedances(x, 0.1)
    moments(x)
    select(x, 2.0)
    # loops that others call are inlined into them, and have signatures of their own once compiled
    called = ("block_", "keep_", "descend")
    assert [
        after
        for k, b in zip(COMPILED, before, strict=True)
        if (after := k.signatures) != b and k.py_func.__name__.startswith(called)
    ] == []


NO_FOLDER = """
import warnings
import numba.core.caching as caching
# as in a container of another user: no locator finds a folder that may be written
for locator in caching.CacheImpl._locator_classes:
    locator.ensure_cache_path = lambda self: (_ for _ in ()).throw(OSError("read-only"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy as np
    import gradstats
    assert gradstats.moments(np.ones(5, np.float32)).count == 5
    assert gradstats.threshold(np.arange(1.0, 101.0), 0.1) == 91
print([str(w.message) for w in caught if "NUMBA_CACHE_DIR" in str(w.message)])
"""


def test_no_writable_folder_is_said_once():
    done = subprocess.run(
        [sys.executable, "-c", NO_FOLDER],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"},
    )
    assert done.stdout.count("no folder for compiled code is writable") == 1


SUMS = """
import hashlib
import numpy as np
from gradstats import moments
from gradstats.primitives import exceedances
rng, sums = np.random.default_rng(0), hashlib.sha256()
for size in rng.integers(1, 6000, 300):
    x = rng.laplace(size=size).astype(np.float32)
    for m in (moments(x), moments(x, 0.5), exceedances(x, 0.5)):
        sums.update(np.array([m.sum_abs, m.sum_squares, m.sum_log]))
print(sums.hexdigest())
"""


def test_the_process_that_compiles_and_those_that_load_the_code_give_the_same_bits(tmp_path):
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path))
    bits = [
        subprocess.run(
            [sys.executable, "-c", SUMS],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout
        for _ in range(2)
    ]
    assert bits[0] == bits[1]
    assert any(tmp_path.rglob("*.nbc"))
