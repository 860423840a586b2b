"""Compiled loops: what each computes, and that its code is compiled once, of what stands in the files."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT
from support.every import every

from gradstats.collectives.ring import unpack_bits
from gradstats.compressors.signs import take_off
from gradstats.primitives import (
    exceedances,
    histogram,
    kth_largest,
    moments,
    select,
    top_candidates,
)
from gradstats.primitives.loops import copies, counts, rice, selection, signs, sums
from gradstats.primitives.loops.calls import calls
from gradstats.primitives.loops.compiled import LOOPS, _Files, has
from gradstats.primitives.select import _FEW, SORTED
from gradstats.primitives.sketch import sketch
from gradstats.thresholds import make_estimator, sidco, warm_up

COMPILED = [
    loop
    for module in (copies, counts, rice, selection, signs, sums)
    for loop in vars(module).values()
    if hasattr(loop, "signatures")
]
COMPILED += sidco.compiled_algorithm()


SIZES = (1, 2, 63, 64, 65, 129, 257, 1023, 2047, 2048, 2049, 2113, 5000)
SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0]


def blocks():
    """Yield (name, block, bits of a threshold) at the ends of words and parts, of all that float32 has."""
    for size in SIZES:
        rng = np.random.default_rng(size)
        plain = rng.normal(size=size).astype(np.float32)
        kinds = {
            "plain": plain,
            "subnormal": plain * np.float32(1e-39),
            "large": plain * np.float32(1e37),
            "sparse": plain * (rng.random(size) < 0.3),
            "special": np.where(
                rng.random(size) < 0.3, rng.choice(np.float32(SPECIAL), size), plain
            ),
            "equal": np.full(size, -1.5, np.float32),
        }
        for kind, x in kinds.items():
            for threshold in (1e-45, 1e-40, 1.0, np.finfo(np.float32).max):
                low = int(np.float32(threshold).view(np.int32))
                yield f"{kind}, {size}, from {threshold}", x.astype(np.float32), low


def check_result(found, expected, within):
    """Compare what a loop returned with what its reference did: of a sum its terms."""
    if isinstance(expected, tuple):
        for pair in zip(found, expected, strict=True):
            check_result(*pair, within)
    elif np.ndim(found):
        np.testing.assert_array_equal(found, expected)
    elif np.ndim(expected) and np.isfinite(expected).all():
        assert abs(found - math.fsum(expected)) <= within * math.fsum(np.abs(expected))
    else:
        np.testing.assert_allclose(found, np.sum(expected), within)


@pytest.mark.parametrize("needs", sorted({loop.needs for loop in LOOPS}), ids=lambda f: f or "any")
def test_loops_do_what_their_references_do(needs):
    """Those of every processor, and those that need some feature."""
    if not has(needs):
        names = ", ".join(loop.py_func.__name__ for loop in LOOPS if loop.needs == needs)
        pytest.skip(f"not run: {names} needs {needs}")
    seen = set()
    for name, x, low in blocks():
        for loop, arguments in calls(x, low):
            if loop.needs == needs and loop.reference:
                seen.add(loop)
                try:
                    compare(loop, arguments)
                except AssertionError as error:
                    error.add_note(f"{loop.py_func.__name__}: {name}")
                    raise
    assert seen == {loop for loop in LOOPS if loop.needs == needs}


def compare(loop, arguments):
    ours, theirs = (
        [a.copy() if isinstance(a, np.ndarray) else a for a in arguments] for _ in range(2)
    )
    with np.errstate(all="ignore"):
        expected = loop.reference(*theirs)
    found = loop(*ours)
    if expected is not None:
        check_result(found, expected, loop.within)
    stop = np.ravel(found)[-1] if loop.counted else None
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, np.ndarray) and a[:stop].tobytes() != b[:stop].tobytes():
            close = loop.within and a.dtype == np.float64
            np.testing.assert_allclose(
                a[:stop], b[:stop], *((loop.within, 1e-9) if close else (0, 0))
            )


def test_flushed_denormals_are_no_zeros_to_a_loop_of_bits():
    x = np.random.default_rng(0).choice(np.float32(SPECIAL), 5000)
    for loop, arguments in calls(x, 1):
        if not has(loop.needs) or loop not in (signs.block_signs, selection.block_select):
            continue
        found = []
        for flushes in (False, True):
            torch.set_flush_denormal(flushes)
            try:
                stop = loop(*arguments)
            finally:
                torch.set_flush_denormal(False)
            arrays = [a for a in arguments if isinstance(a, np.ndarray)]
            found.append([a[: stop if loop.counted else None].tobytes() for a in arrays])
        assert found[0] == found[1]


def flushed(function):
    """Return what a function does where denormals are taken for zeros."""
    torch.set_flush_denormal(True)
    try:
        return function()
    finally:
        torch.set_flush_denormal(False)


def test_flushed_denormals_are_counted_and_summed_all_the_same():
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    some = x.copy()
    some[::3] *= np.float32(1e-40)
    zeros = np.where(np.arange(x.size) % 7, some, 0)
    odd = np.append(zeros, np.float32([np.nan, np.inf]))
    for values in (some, zeros, odd, x * np.float32(1e-40), np.float32([1e-40, 0, 1, 2])):
        for above, log in ((0, True), (0, False), (0.5, True), (0.5, False)):
            reduced = partial(moments, values, above, log=log)
            found, expected = flushed(reduced), reduced()
            for name in found.__slots__:
                close = pytest.approx(getattr(expected, name), rel=1e-12, nan_ok=True)
                assert getattr(found, name) == close, name
        for bits in (0, 7, 12):
            found, expected = flushed(partial(histogram, values, bits)), histogram(values, bits)
            assert found.zeros == expected.zeros
            assert (found.counts == expected.counts).all()
        found, expected = flushed(partial(sketch, values)), sketch(values)
        assert found.values.tolist() == expected.values.tolist()
        assert (found.counts == expected.counts).all()
    x = np.tile(np.float32([1e-40, 0, 1, 2]), 2)
    parts, found = np.array([[0, 4], [4, 8]]), np.empty((2, 7))
    tally, used = np.zeros((8, 2, 4096), np.uint32), np.zeros(8, bool)

    def count():
        sums.moments_of_parts(x, parts, np.float32(0), True, found)
        counts.histograms_of_parts(x.view(np.uint32), parts, found, 0, 16, 255 << 7, tally, used)

    flushed(count)
    assert np.where(used[:, None, None], tally, 0).sum((0, 2)).tolist() == [3, 3]


def test_an_interrupted_count_leaves_nothing_to_the_next(monkeypatch):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32).view(np.uint32)
    expected = counts.counts_of_all(x, 0, 16)
    count = counts.block_histogram

    def interrupted(*arguments):
        count(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(counts, "block_histogram", interrupted)
    with pytest.raises(KeyboardInterrupt):
        counts.counts_of_all(x, 0, 16)
    monkeypatch.undo()
    assert counts.counts_of_all(x, 0, 16).tolist() == expected.tolist()


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    files = _Files(tmp_path, "loop")
    killed, writing = (tmp_path / f"loop-a-b.nbc.{i}" for i in range(2))
    for path in (killed, writing):
        path.touch()
    os.utime(killed, (0, 0))
    files.save(("a", "c"), 1)
    assert files.load(("a", "c")) == 1
    assert {path.name for path in tmp_path.iterdir()} == {writing.name, "loop-a-c.nbc"}
    files.flush()
    assert not [*tmp_path.iterdir()]


EDITED = """
import numpy as np
from gradstats import threshold
from gradstats.primitives.codec import rice_decode, rice_encode
from gradstats.primitives.moments import moments, rounded_sums
from gradstats.thresholds.sidco import warm_up
warm_up()  # or Python would run the stages
x = np.random.default_rng(0).laplace(size=20_000).astype(np.float32)
for stages in (1, 2):
    for values in (x, np.stack([x, x], 1)[:, 0]):
        print(threshold(values, 0.1, "sidco-e", stages=stages))
print(rounded_sums(x).sum_abs)
print(moments(x, log=False).sum_abs)
print(rice_decode(rice_encode(np.array([3, 5, 9])), 3, 100)[0].sum())
"""


@pytest.mark.slow
def test_an_edited_formula_is_used_by_the_next_process(tmp_path):
    """On every path: by a loop over one block, and by passes; in a file of formulas, and in a loop that others call."""
    cache, package = tmp_path / "cache", tmp_path / "gradstats"
    shutil.copytree(ROOT / "gradstats", package, ignore=shutil.ignore_patterns("__pycache__"))
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(tmp_path)}

    def run():
        command = [sys.executable, "-c", EDITED]
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return np.array(done.stdout.split(), float)

    def edit(file, old, new):
        text = (package / file).read_text("utf-8")
        assert text.count(old) == 1
        (package / file).write_text(text.replace(old, new), "utf-8")

    before, again = run(), run()
    files = len([*cache.rglob("*.nbc")])
    assert files
    assert (before == again).all()
    assert before[0] == pytest.approx(before[1])
    edit(
        "statistics/stages.py",
        "scale * math.log(1 / ratio), scale\n",
        "scale * 1.2 * math.log(1 / ratio), scale\n",
    )
    edit(  # a function that loops alone call
        "primitives/loops/sums.py",
        "        a = np.float64(abs(x[i]))\n        total += a\n",
        "        a = np.float64(abs(x[i]))\n        total += 2 * a\n",
    )
    edit("primitives/loops/rice.py", "position += gap + 1", "position += gap + 2")
    formula = run()
    assert formula[:2] == pytest.approx(1.2 * before[:2])  # of one stage
    assert formula[2] == pytest.approx(formula[3])
    assert formula[4] == before[4]
    assert formula[5] == pytest.approx(2 * before[5])
    assert (before[6], formula[6]) == (3 + 5 + 9, 3 + 6 + 11)
    edit(
        "primitives/loops/sums.py",
        "        total += s\n    for i in range(whole",
        "        total += 1.25 * s\n    for i in range(whole",
    )
    edit(  # a view's method, which a loop reaches through its argument
        "thresholds/sidco_loops.py",
        "low = max(np.float32(threshold).view(np.int32), np.int32(1))\n        if self.state",
        "low = max(np.float32(2 * threshold).view(np.int32), np.int32(1))\n        if self.state",
    )
    loops = run()
    assert loops[:2] == pytest.approx(1.25 * formula[:2], rel=1e-3)
    assert loops[4] == pytest.approx(1.25 * before[4], rel=1e-3)
    assert loops[2] > 1.2 * loops[3]  # without that edit both paths find the same
    assert loops[5:].tolist() == formula[5:].tolist()
    assert len([*cache.rglob("*.nbc")]) == files  # of what was compiled before nothing is left


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
    make_estimator("sidco-gp").select(x[:100_000], 0.01)
    # loops that others call are inlined into them, and have signatures of their own once compiled
    called = ("block_", "keep_", "descend", "best_", "run_")
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
from gradstats.primitives.loops.sums import moments_of_parts
rng, sums = np.random.default_rng(0), hashlib.sha256()
for size in rng.integers(1, 6000, 300):
    x = rng.laplace(size=size).astype(np.float32)
    for m in (moments(x), moments(x, 0.5), exceedances(x, 0.5)):
        sums.update(np.array([m.sum_abs, m.sum_squares, m.sum_log]))
    x *= np.exp(rng.normal(size=size, scale=8)).astype(np.float32)
    parts, rows = np.array([(0, size // 3), (size // 3, size)]), np.empty((2, 7))
    moments_of_parts(x, parts, np.float32(0), True, rows)
    sums.update(rows)
    for (start, stop), row in zip(parts, rows):  # and the same as of an array of its own
        m = moments(x[start:stop])
        assert row[3:6].tolist() == [m.sum_abs, m.sum_squares, m.sum_log]
print(sums.hexdigest())
"""


@every("size", [1, 3, 4, 5, 2047, 2048, 2051, 9000])
@every("scale", [1e-44, 1e-20, 1.0, 1e20, 3e37])
def test_logarithms_add_up_over_the_whole_range_of_float32(size, scale):
    rng = np.random.default_rng(size)
    x = (rng.uniform(0.5, 8, size) * scale * rng.choice([-1, 1], size)).astype(np.float32)
    with_zeros = np.concatenate([x, np.zeros(3, np.float32)])
    expected = math.fsum(np.log(np.abs(x.astype(np.float64))))
    for array in (x, with_zeros):
        assert moments(array).sum_log == pytest.approx(expected, rel=1e-13, abs=1e-12)


@every("size", [700, SORTED, SORTED + 9, _FEW - 1, _FEW, _FEW + 1])
@every("k", [1, 300, 655, _FEW // 2, _FEW - 1])
@every("kind", ["plain", "zeros", "ties", "nonfinite"])
def test_few_are_sorted_and_many_are_sampled_with_one_result(size, k, kind):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    if kind == "zeros":
        x[: size // 2] = 0
    elif kind == "ties":
        x = np.round(x, 1)
    elif kind == "nonfinite":
        x[:7] = [np.nan, np.inf, -np.inf, np.nan, np.inf, np.inf, np.nan]
    finite = np.sort(np.abs(x[np.isfinite(x)]))[::-1]
    expected = finite[k - 1] if k <= finite.size else 0.0
    for array in (x, torch.from_numpy(x), torch.from_numpy(x).double()):
        found, selection = top_candidates(array, k)
        assert found == expected
        kept = np.flatnonzero((np.abs(x) >= expected) & (x != 0))
        assert np.asarray(selection.indices).tolist() == kept.tolist()
        assert np.asarray(selection.values, np.float32).tolist() == x[kept].tolist()


@pytest.mark.parametrize("high", [0.0, 1e-3, 1.0, 3.0, 1e300, math.inf])
def test_a_guess_from_above_decides_about_time_alone(high):
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    x[3] = np.inf
    expected = float(np.sort(np.abs(np.delete(x, 3)))[-500])
    assert top_candidates(x, 500, 1.0, high)[0] == expected
    assert top_candidates(x, 500, 3.5, high)[0] == expected  # and one from below that is too high
    for k in (1, 70_000, 99_999):  # of as many in the bracket most are counted
        expected = float(np.sort(np.abs(np.delete(x, 3)))[-k])
        assert top_candidates(x, k, 1e-9, high)[0] == expected


@pytest.mark.parametrize("size", [2, 5, 1001])
def test_histograms_count_what_starts_between_two_words(size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    assert (histogram(x[1:]).counts == histogram(x[1:].copy()).counts).all()
    assert histogram(x[1:]).numel == size - 1


def test_histograms_of_parts_are_those_of_the_parts():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=200_003) * np.exp(rng.normal(size=200_003, scale=20))).astype(np.float32)
    x[rng.choice(x.size, 5000)] = 0
    x[-1000:] = np.float32(1e-42)
    tally, used = np.full((8, 6, 4096), 7, np.uint32), np.ones(8, bool)
    odd = x.copy()
    odd[500:510], odd[510:520] = np.nan, -np.inf
    odd[:64] = 0
    for values, ends in (
        (odd, [(0, 64), (64, 150_001), (150_001, 150_001), (150_001, 150_002), (3, 9), (3, 600)]),
        (x, [(0, 0), (199_003, 200_003), (199_003, 199_004), (0, 0), (0, 0), (0, 0)]),
    ):
        parts = np.array(ends, np.int64)
        used[:] = False
        for some in (slice(0, 2), slice(2, 3), slice(3, 6)):
            found = np.empty((len(parts[some]), 7))
            sums.moments_of_parts(values, parts[some], np.float32(0), True, found)
            counts.histograms_of_parts(
                values.view(np.uint32), parts[some], found, some.start, 16, 255 << 7, tally, used
            )
        whole = np.where(used[:, None, None], tally, 0).transpose(1, 0, 2).reshape(6, -1)
        for (start, stop), found in zip(ends, whole, strict=True):
            assert (found[: 255 << 7] == histogram(values[start:stop]).counts).all()
            assert not found[255 << 7 :].any()
        assert used.tolist() == [
            bool(chunk.any()) for chunk in whole.reshape(6, 8, -1).swapaxes(0, 1)
        ]


def test_bfloat16_rounds_as_torch_and_keeps_what_is_finite():
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([high | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    rounded, x = np.empty(bits.size, np.uint16), bits.view(np.float32)
    copies.block_bfloat16(bits, rounded)
    found = torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16).float().numpy()
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    largest = np.finfo(np.float32).max * (1 - 2.0**-8)  # of those that bfloat16 has, about
    over = np.isfinite(x) & np.isinf(expected)
    assert over.any()
    assert (np.abs(found[over]) > largest).all()
    assert np.isfinite(found[over]).all()
    np.testing.assert_array_equal(found[~over], expected[~over])


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_past_the_caches_every_place_is_written_and_none_beside(factor):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    for start in range(17):  # wherever a cache line begins
        for size in (0, 1, 15, 16, 17, 32, 70):
            target = np.full(size + 40, 9, np.float32)
            copies.copy_past_caches(target[start : start + size], x[:size], np.float32(factor))
            assert (target[start : start + size] == x[:size] * np.float32(factor)).all()
            assert (target[:start] == 9).all()
            assert (target[start + size :] == 9).all()


OTHER_PROCESSOR = """
import numpy as np
from gradstats.primitives import select
from gradstats.primitives.loops.compiled import has
from gradstats.thresholds import make_estimator
for size in (63, 5_000, 100_000):
    x = np.random.default_rng(size).standard_t(3, size).astype(np.float32)
    x[size // 3 : size // 2] *= 4  # where more are selected they are written otherwise
    for share in (1, 0.5, 0.1, 0.001):
        least = np.quantile(np.abs(x), 1 - share)
        found, kept = select(x, least), np.flatnonzero(np.abs(x) >= np.float32(least))
        assert (found.indices == kept).all() and (found.values == x[kept]).all()
    for name in ("sidco-e", "sidco-gp", "sidco-p"):
        estimate, found = make_estimator(name).select(x, 0.01)
        print(len(estimate.details["stages"]), estimate.threshold.hex(), found.indices.sum())
print(has("avx512f"))
"""


@pytest.mark.slow
def test_processors_and_processes_find_the_same(tmp_path):
    """Loops that were compiled, that were cached, and those of processors without what x86 ones have."""
    sums, printed = [], []
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    both = SUMS + OTHER_PROCESSOR
    for code, processor in ((both, {}), (both, {}), (OTHER_PROCESSOR, generic)):
        environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **processor}
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, env=environ, capture_output=True, text=True, check=True)
        *lines, compresses = done.stdout.splitlines()
        assert compresses == str(has("avx512f") and not processor)
        # sums are those of one kind of processor, to the bit
        sums += [lines.pop(0)] if not processor else []
        printed.append(lines)
    assert all(lines == printed[0] for lines in printed)
    assert sums[0] == sums[1]
    assert any(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("size", [1, 7, 8, 2047, 2049, 5000])
def test_signs_are_spread_and_taken_off_in_one_pass(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    packed = torch.randint(0, 256, (-(-size // 8),), generator=generator, dtype=torch.uint8)
    expected = torch.where(unpack_bits(packed, size), 0.3, -0.3)
    left, room = x.clone(), torch.full((8 * packed.numel(),), 7.0)
    taken = take_off(packed, 0.3, left, room)
    assert torch.equal(taken, expected)
    assert torch.equal(left, x - expected)
    assert taken.data_ptr() == room.data_ptr()
    assert (room[size:] == 7).all()
    strided = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(take_off(packed, 0.3, strided, room), expected)
    assert torch.equal(strided, left)
