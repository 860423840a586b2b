"""Sketches in a trace: exact, complete, and never numbers that were not written."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import warnings

import numpy as np
import pytest
import xarray
from forked import CONTEXT
from ranks import run_ranks
from support.traces import LAYERS, assert_same_sketch, gradient, train, write
from workers import hook as cases

from capture import Capture, CaptureWarning
from gradstats import open_trace
from gradstats.errors import TraceError
from gradstats.primitives.sketch import EXACT, sketch
from gradstats.trace import KINDS, Layer, TraceWriter, create_trace

pytestmark = pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning")


def layers_of(*numels):
    return [Layer(f"p{i}", sum(numels[:i]), (n,)) for i, n in enumerate(numels)]


def awkward():
    """Return layers and a gradient that holds every sort of element a histogram must not lose."""
    rng = np.random.default_rng(0)
    parts = [
        rng.standard_normal(600),
        rng.standard_t(2, EXACT + 100) * 1e-4,  # beyond what a sketch keeps single magnitudes of
        rng.laplace(size=(1 << 20) + 77)
        * (rng.random((1 << 20) + 77) > 0.3),  # and beyond one block
        np.zeros(50),
        np.full(7, np.nan),
        np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.0]),
        np.array([1e-45, -1e-45, 1e-40, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 0.0]),
        np.exp2(rng.uniform(-149, 128, 3000)),  # every chunk of bins
        np.empty(0),
    ]
    with np.errstate(under="ignore"):
        return layers_of(*map(len, parts)), np.concatenate(parts).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, layers_of(600, 20))
    return path


@pytest.fixture
def sketched(path):
    # as a killed training leaves it; packs are those of tests/trace/test_packed.py
    write(path, [0, 1, 2], store="sketches", expected_steps=3, close=False)
    return path


def test_stored_sketches_are_those_of_the_layers_bit_for_bit(tmp_path):
    layers, x = awkward()
    path = tmp_path / "a.zarr"
    create_trace(path, layers)
    writer = TraceWriter(path, 0, kinds=KINDS, store="sketches")
    others = dict.fromkeys(KINDS, x)
    writer.append(4, others | {"corrected": -x[::-1].copy()}, loss=1.5)
    last = {"gradient": np.zeros_like(x), "corrected": np.full_like(x, np.inf)}
    writer.append(9, others | last)
    writer.close()
    trace = open_trace(path)
    assert trace.kinds(0) == list(KINDS)
    for step, kind, values in (
        (4, "gradient", x),
        (4, "corrected", -x[::-1]),
        (9, "gradient", np.zeros_like(x)),
    ):
        stored = trace.sketches(step, kind=kind)
        assert len(stored) == len(layers)
        for layer, one in zip(layers, stored, strict=True):
            assert_same_sketch(one, sketch(values[layer.slice], 7))
        scalars = trace.scalars()
        row = trace.steps().index(step)
        assert scalars[f"{kind}_zeros"][row] == np.count_nonzero(values == 0)
        assert scalars[f"{kind}_nonfinite"][row] == np.count_nonzero(~np.isfinite(values))
    assert [s.moments.nonfinite for s in trace.sketches(9, kind="corrected")] == [
        layer.numel for layer in layers
    ]
    # the sketches of the layers add up to that of the whole
    total = sum(trace.sketches(4)[1:], trace.sketches(4)[0])
    whole = sketch(x, 7)
    assert total.numel == whole.numel == x.size
    assert np.array_equal(total.counts, whole.counts)
    assert trace.scalars()["loss"].tolist() == [1.5, pytest.approx(np.nan, nan_ok=True)]


def test_the_trace_says_what_it_holds(sketched):
    write(sketched, [0, 1], rank=1, kinds=["gradient"])
    trace = open_trace(sketched)
    whole, none = [True] * len(KINDS), [False] * len(KINDS)
    assert [trace.has_sketches(r, k) for r in (0, 1) for k in KINDS] == [*whole, *none]
    assert [trace.has_gradients(r, k) for r in (0, 1) for k in KINDS] == [*none, True, *none[1:]]
    assert (trace.kinds(0), trace.kinds(1)) == (list(KINDS), ["gradient"])
    assert [key for *key, _ in trace.gradients()] == [[0, 1, "gradient"], [1, 1, "gradient"]]
    for call in (
        lambda: trace.read(1, 0, "corrected"),
        lambda: trace.read_slice(1, 0, "corrected", 0, 5),
        lambda: trace.chunk_numel(0, "corrected"),
    ):
        with pytest.raises(
            TraceError, match=r"only sketches of 'corrected' .* --store gradients"
        ) as e:
            call()
        assert "\n" not in str(e.value)
    for bad, message in [
        ((0, 1, "gradient"), "no sketches of 'gradient' on rank 1"),
        ((0, 1, "corrected"), "no sketches of 'corrected'"),
        ((7, 0, "gradient"), "no step 7 on rank 0"),
        ((0, 5, "gradient"), "no rank 5"),
    ]:
        with pytest.raises(TraceError, match=message):
            trace.sketches(*bad)
    with pytest.raises(TraceError, match="no rank 5"):
        trace.has_sketches(5)


def test_opens_in_xarray_as_documented(sketched):
    node = xarray.open_datatree(sketched, engine="zarr", consolidated=False)[
        "rank00000"
    ].to_dataset()
    assert node.gradient_counts.dims == ("step", "layer", "bin")
    assert node.gradient_moments.dims == ("step", "layer", "moment")
    names = node.gradient_moments.attrs["names"]
    edges = (np.arange(32641, dtype="u4") << 16).view("f4")
    for i, one in enumerate(open_trace(sketched).sketches(1)):
        counts = node.gradient_counts.isel(step=1, layer=i).values
        assert counts.sum() == one.numel - one.moments.zeros
        assert np.array_equal(np.flatnonzero(counts), one.bins)
        assert edges[one.bins[-1]] <= one.moments.max < edges[one.bins[-1] + 1]
        values = node.gradient_moments.isel(step=1, layer=i).values
        assert dict(zip(names, values, strict=True)) == {n: getattr(one.moments, n) for n in names}


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
@pytest.mark.parametrize("array", ["counts", "moments"])
def test_damaged_chunks_are_errors_not_numbers(sketched, array, damage):
    folder = sketched / "rank00000" / f"gradient_{array}"
    pattern = "c.1.0.*" if array == "counts" else "c/0/0/0"
    chunks = sorted(folder.glob(pattern))
    assert chunks
    for chunk in chunks:
        raw = bytearray(chunk.read_bytes())
        if damage == "truncate":
            chunk.write_bytes(raw[: len(raw) // 2])
        elif damage == "remove":
            chunk.unlink()
        else:
            flipped = raw.copy()
            flipped[len(raw) // 2] ^= 1
            chunk.write_bytes(flipped)
        trace = open_trace(sketched)
        with pytest.raises(
            TraceError, match=r"sketch of gradient of step 1, rank 0 is damaged"
        ) as e:
            trace.sketches(1)
        assert "\n" not in str(e.value)
        if array == "counts":  # moments of many steps are in one chunk
            assert trace.sketches(0)
        assert trace.sketches(1, kind="corrected")
        chunk.write_bytes(raw)
    assert open_trace(sketched).sketches(1)


def test_a_layout_that_does_not_fit_is_damage(sketched):
    file = sketched / "zarr.json"
    meta = json.loads(file.read_text())
    meta["attributes"]["layout"].pop()
    file.write_text(json.dumps(meta))
    with pytest.raises(TraceError, match="does not fit the parameter layout"):
        open_trace(sketched).sketches(0)


def test_growing_and_unused_rows(path):
    steps = list(range(0, 150, 2))
    write(path, steps, kinds=["gradient"], store="sketches")
    create_trace(path.with_name("b.zarr"), layers_of(600, 20))
    write(path.with_name("b.zarr"), [5], kinds=["gradient"], store="sketches", expected_steps=40)
    trace = open_trace(path)
    assert trace.steps() == steps
    assert all(sum(s.numel for s in trace.sketches(step)) == 620 for step in steps)
    assert trace.to_datatree()["rank00000"].sizes["step"] == len(steps)
    assert open_trace(path.with_name("b.zarr")).to_datatree()["rank00000"].sizes["step"] == 1


def write_for_ever(path, reports):
    """Say every step whose append returned."""
    writer = TraceWriter(path, 0, kinds=KINDS, store="sketches")
    for step in itertools.count():
        writer.append(step, {k: gradient(step, 0, k) for k in KINDS}, loss=step)
        reports.send(step)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3, 70])
def test_a_killed_process_leaves_every_step_it_committed(path, after):
    """Killed a moment after a step it reported, somewhere in a later one."""
    create_trace(path, LAYERS, overwrite=True)
    reports, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=write_for_ever, args=(path, theirs))
    process.start()
    theirs.close()
    reported = [reports.recv() for _ in range(after + 1)]
    process.kill()
    with contextlib.suppress(EOFError):
        while True:
            reported.append(reports.recv())
    process.join()
    trace = open_trace(path)
    steps = trace.steps()
    # at most one more was committed and not reported
    assert steps == list(range(len(steps)))
    assert len(reported) <= len(steps) <= len(reported) + 1
    for step in steps:
        for kind in KINDS:
            values = gradient(step, 0, kind)
            for layer, one in zip(LAYERS, trace.sketches(step, 0, kind), strict=True):
                assert_same_sketch(one, sketch(values[layer.slice], 7))
    assert trace.scalars()["loss"].tolist() == steps


def test_a_step_that_was_not_committed_is_not_there(path, monkeypatch):
    """Everything is on the disk but the step number."""
    original = TraceWriter._put

    def dies(self, name, row, value):
        if name == "step" and value == 1:
            raise OSError(28, "No space left on device")
        original(self, name, row, value)

    monkeypatch.setattr(TraceWriter, "_put", dies)
    writer = write(path, [0], store="sketches", close=False)
    x = np.full(620, 1e30, np.float32)  # in another chunk of bins than the next step
    with pytest.raises(TraceError, match="cannot write step 1"):
        writer.append(1, dict.fromkeys(KINDS, x))
    assert open_trace(path).steps() == [0]
    writer.append(2, dict.fromkeys(KINDS, 1e-3 * x / x))
    writer.close()
    trace = open_trace(path)
    assert trace.steps() == [0, 2]
    assert [s.bins.size for s in trace.sketches(2)] == [1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plain_loop_is_sketched_step_by_step(tmp_path, dtype):
    model = cases.model()
    with Capture(tmp_path / "a.zarr", model, store="sketches", dtype=dtype) as capture:
        seen = train(capture, model, 6)
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.attrs["capture"]["store"] == "sketches"
    assert trace.steps() == list(range(6))
    for step, values in enumerate(seen):
        for layer, one in zip(trace.layers, trace.sketches(step), strict=True):
            assert_same_sketch(one, sketch(values[layer.slice], 7))


def test_sketching_is_not_the_training_threads_work(tmp_path, monkeypatch):
    import threading

    from gradstats.trace import writer as trace_writer

    threads, original = set(), trace_writer._Tally.__call__

    def spy(tally, values):
        threads.add(threading.current_thread().name)
        return original(tally, values)

    monkeypatch.setattr(trace_writer._Tally, "__call__", spy)
    model = cases.model()
    with Capture(tmp_path / "a.zarr", model, store="sketches") as capture:
        train(capture, model, 3)
    assert threads == {"gradstats-capture"}


def test_a_full_disk_stops_the_sketches_not_the_training(tmp_path, monkeypatch):
    original = TraceWriter._put_sketch

    def failing(self, kind, row, values):
        if row == 3:
            raise OSError(28, "No space left on device")
        return original(self, kind, row, values)

    monkeypatch.setattr(TraceWriter, "_put_sketch", failing)
    model = cases.model()
    capture = Capture(tmp_path / "a.zarr", model, store="sketches")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(train(capture, model, 12)) == 12
        capture.close()
    stopped = [str(w.message) for w in caught if "slower" not in str(w.message)]
    assert len(stopped) == 1
    assert issubclass(caught[-1].category, CaptureWarning)
    assert stopped[0].startswith("capture stopped, training goes on: cannot write step 3")
    assert open_trace(tmp_path / "a.zarr").steps() == [0, 1, 2]


@pytest.mark.distributed
def test_ddp_is_sketched_before_and_after_error_feedback(tmp_path):
    """Two runs of the same seed, stored in full and as sketches, agree in every step, kind and rank."""
    for store in ("gradients", "sketches"):
        run_ranks(2, cases.capture_run, str(tmp_path / store), "topk", 1, 8, 1, store)
    full, sketched = (open_trace(tmp_path / store) for store in ("gradients", "sketches"))
    assert sketched.ranks == [0, 1]
    compared = 0
    for step, rank, kind, values in full.gradients():
        for layer, one in zip(full.layers, sketched.sketches(step, rank, kind), strict=True):
            assert_same_sketch(one, sketch(values[layer.slice], 7))
        compared += 1
    assert compared == 2 * 2 * 8


@pytest.mark.parametrize("name", ["gradient_counts", "gradient_moments"])
def test_an_array_that_has_vanished_is_not_made_anew(tmp_path, name):
    """It would lack its metadata, and no reader would find what is in it."""
    path, layers = tmp_path / "a.zarr", [Layer("w", 0, (50,))]
    create_trace(path, layers)
    writer = TraceWriter(path, 0, store="sketches")
    shutil.rmtree(path / "rank00000" / name)
    with pytest.raises(TraceError, match="cannot write step 0"):
        writer.append(0, {"gradient": np.ones(50, np.float32)})
    assert not (path / "rank00000" / name).exists()
