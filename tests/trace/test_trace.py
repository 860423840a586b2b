from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray
from forked import CONTEXT
from support.every import every
from support.traces import LAYERS, NUMEL, gradient, write

import gradstats
from gradstats import open_trace
from gradstats.errors import InputError, TraceError
from gradstats.trace import KINDS, SCHEMA, TraceWriter, create_trace, is_trace
from gradstats.trace import writer as trace_writer
from gradstats.trace.export import save_safetensors
from gradstats.trace.sources import Subset


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=2, metadata={"model": "linear"})
    return path


@pytest.mark.parametrize("expected", [None, 5, 200])
@pytest.mark.parametrize("compress", [False, True])
def test_round_trip_is_bit_exact(path, expected, compress):
    steps = list(range(0, 700, 5)) if expected is None else [1, 4, 9]
    write(path, steps, expected_steps=expected, compress=compress)
    trace = open_trace(path)
    assert trace.steps() == steps
    assert trace.layers == LAYERS
    assert (trace.numel, trace.world_size, trace.ranks) == (NUMEL, 2, [0])
    assert trace.attrs["model"] == "linear"
    for step, rank, kind, values in trace.gradients():
        assert np.array_equal(values.view(np.uint32), gradient(step, rank, kind).view(np.uint32))
    scalars = trace.scalars()
    assert scalars["loss"].tolist() == [s / 2 for s in steps]
    assert scalars["selected"].tolist() == steps
    assert np.isnan(scalars["threshold"]).all()


def test_ranks_have_all_the_digits_of_their_folders(tmp_path):
    path, ranks = tmp_path / "run.zarr", [3, 12_345, 112_345]
    create_trace(path, LAYERS, world_size=200_000)
    for rank in ranks:
        writer = TraceWriter(path, rank)
        writer.append(0, {"gradient": gradient(0, rank)})
        writer.close()
    trace = open_trace(path)
    assert trace.ranks == ranks
    for rank in ranks:
        assert np.array_equal(trace.read(0, rank), gradient(0, rank))


def test_a_layer_may_have_no_elements(tmp_path):
    path, layers = tmp_path / "run.zarr", [*LAYERS, gradstats.trace.Layer("none", NUMEL, (0, 3))]
    create_trace(path, layers)
    writer = TraceWriter(path, 0)
    writer.append(0, {"gradient": gradient(0)})
    writer.close()
    trace = open_trace(path)
    assert trace.layers == layers
    assert trace.numel == NUMEL
    assert trace.read(0, layer="none").size == 0
    assert np.array_equal(trace.read(0), gradient(0))


def test_counts_of_zeros_and_nonfinite_values_are_kept(path):
    x = gradient(0)
    x[:7], x[10], x[11] = 0, np.nan, np.inf
    writer = TraceWriter(path, 0)
    writer.append(3, {"gradient": x})
    writer.close()
    trace = open_trace(path)
    assert np.array_equal(trace.read(3), x, equal_nan=True)
    assert trace.scalars()["gradient_zeros"].tolist() == [7]
    assert trace.scalars()["gradient_nonfinite"].tolist() == [2]


def test_bfloat16_is_rounded_to_nearest_and_documented(path):
    torch = pytest.importorskip("torch")
    x = gradient(0) * np.float32(2.0) ** np.random.default_rng(0).integers(-120, 120, NUMEL)
    x = x.astype(np.float32)
    x[:4] = np.nan, np.inf, -np.inf, -0.0
    writer = TraceWriter(path, 0, dtype="bfloat16")
    writer.append(0, {"gradient": x})
    writer.close()
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(open_trace(path).read(0), expected, equal_nan=True)
    stored = xarray.open_datatree(path, engine="zarr", consolidated=False)["rank00000"]["gradient"]
    assert stored.dtype == np.uint16
    assert stored.attrs["encoding"] == "bfloat16"


def test_what_is_finite_stays_finite_in_bfloat16(path):
    x = gradient(0)
    x[:3] = 3.4e38, -3.4e38, np.inf
    writer = TraceWriter(path, 0, dtype="bfloat16")
    writer.append(0, {"gradient": x})
    writer.close()
    trace = open_trace(path)
    assert (
        np.isfinite(trace.read(0)).sum()
        == x.size - 1
        == x.size - trace.scalars()["gradient_nonfinite"][0]
    )


def test_opens_in_xarray_without_this_package(path):
    write(path, [0, 10, 20], expected_steps=5, close=False)
    write(path, [0, 10], rank=1)
    script = f"""
import xarray, sys
tree = xarray.open_datatree({str(path)!r}, engine="zarr", consolidated=False, chunks={{}})
node = tree["rank00000"].to_dataset()
assert "gradstats" not in sys.modules
assert node.gradient.dims == ("step", "element")
assert type(node.gradient.data).__module__.startswith("dask")
done = node.sel(step=node.step >= 0)
print(done.step.values.tolist(), float(done.gradient.sel(step=10).sum()), node.sizes["step"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    steps, rest = done.stdout.split("]")
    assert steps == "[0, 10, 20"
    assert float(rest.split()[0]) == pytest.approx(float(gradient(10).sum()), rel=1e-5)
    assert rest.split()[1] == "5"
    assert set(open_trace(path).to_datatree().children) == {"rank00000", "rank00001"}


def test_what_is_not_there_is_said_in_one_line(path, tmp_path):
    write(path, [0, 10], kinds=["gradient"])
    trace = open_trace(path)
    for bad, message in [
        ((5, 0, "gradient"), "no step 5"),
        ((0, 3, "gradient"), "no rank 3; it holds 0"),
        ((0, 0, "corrected"), "no 'corrected'"),
    ]:
        with pytest.raises(TraceError, match=message):
            trace.read(*bad)
    with pytest.raises(TraceError, match="no such trace"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="not a gradstats trace"):
        open_trace(tmp_path)


def test_existing_directories_are_respected(path, tmp_path):
    with pytest.raises(TraceError, match="exists; choose"):
        create_trace(path, LAYERS)
    create_trace(path, LAYERS, overwrite=True)
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("years of work")
    with pytest.raises(TraceError, match="not touching it"):
        create_trace(other, LAYERS, overwrite=True)
    assert (other / "chapter1.tex").exists()
    write(path, [0])
    with pytest.raises(TraceError, match="already holds rank 0"):
        TraceWriter(path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="cannot create"):
        create_trace(tmp_path / "file" / "run.zarr", LAYERS)


def test_versions_and_foreign_zarr_are_refused(path, tmp_path):
    file = path / "zarr.json"
    meta = json.loads(file.read_text())
    for schema in (SCHEMA + 1, SCHEMA - 1, 0, None, float(SCHEMA)):
        meta["attributes"]["schema"] = schema
        file.write_text(json.dumps(meta))
        with pytest.raises(TraceError) as caught:
            open_trace(path)
        assert str(caught.value) == (
            f"{path} was written by another version of gradstats (schema {schema}); this one reads schema "
            f"{SCHEMA}: open it with the version that wrote it, or capture it again"
        )
        assert is_trace(path)
    del meta["attributes"]["format"]
    file.write_text(json.dumps(meta))
    with pytest.raises(TraceError, match="not a gradstats trace"):
        open_trace(path)
    file.write_text("{")
    assert not is_trace(path)


def test_the_committed_traces_are_read(trace_path):
    trace = open_trace(trace_path)
    assert trace.attrs["schema"] == SCHEMA
    step, rank, kind, values = next(trace.gradients())
    assert trace.has_gradients(rank, kind)
    assert not trace.has_sketches(rank, kind)
    with pytest.raises(TraceError, match="has no sketches of 'gradient' on rank 0"):
        trace.sketches(step, rank, kind)
    assert np.array_equal(trace.read_slice(step, rank, kind, 1000, 2000), values[1000:2000])
    assert trace.to_datatree()["rank00000"].sizes["element"] == trace.numel


def test_lost_attributes_are_damage(path):
    file = path / "zarr.json"
    meta = json.loads(file.read_text())
    del meta["attributes"]["layout"]
    file.write_text(json.dumps(meta))
    with pytest.raises(TraceError, match="lack layout"):
        open_trace(path)
    layout = [{"name": "x"}]
    for bad in ({"layout": layout}, {"layout": [], "numel": "many"}):
        meta["attributes"] |= bad
        file.write_text(json.dumps(meta))
        with pytest.raises(TraceError, match=r"is damaged: unreadable (parameter layout|numbers)"):
            open_trace(path)


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_damaged_chunks_are_errors_not_numbers(path, damage):
    write(path, [0, 1, 2])
    chunk = path / "rank00000" / "gradient" / "c" / "1" / "0"
    raw = bytearray(chunk.read_bytes())
    if damage == "truncate":
        chunk.write_bytes(raw[: len(raw) // 2])
    elif damage == "remove":
        chunk.unlink()
    else:
        raw[100] ^= 1
        chunk.write_bytes(raw)
    trace = open_trace(path)
    with pytest.raises(TraceError, match=r"step 1, rank 0 is damaged") as caught:
        trace.read(1)
    assert "\n" not in str(caught.value)
    assert np.array_equal(trace.read(2), gradient(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compress", [False, True])
def test_slices_are_parts_of_the_gradient(path, monkeypatch, dtype, compress):
    monkeypatch.setattr(trace_writer, "CHUNK", 100)
    write(path, [0, 3], dtype=dtype, compress=compress)
    trace = open_trace(path)
    assert trace.chunk_numel(0, "gradient") == 100
    borders = [0, 1, 99, 100, 101, 250, 300, 599, 600, NUMEL]
    for kind in KINDS:
        whole = trace.read(3, 0, kind)
        for start in borders:
            for stop in (b for b in borders if b >= start):
                part = trace.read_slice(3, 0, kind, start, stop)
                assert part.dtype == np.float32
                assert np.array_equal(part, whole[start:stop]), (start, stop)
    for bad in ((-1, 5), (5, 4), (0, NUMEL + 1)):
        with pytest.raises(InputError, match=r"is not within the 620 elements"):
            trace.read_slice(3, 0, "gradient", *bad)
    with pytest.raises(TraceError, match="no step 1 on rank 0"):
        trace.read_slice(1, 0, "gradient", 0, 5)
    with pytest.raises(TraceError, match="no rank 1"):
        trace.chunk_numel(1)


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_slices_read_only_their_chunks_and_notice_when_they_are_damaged(path, monkeypatch, damage):
    monkeypatch.setattr(trace_writer, "CHUNK", 100)
    x = gradient(0)
    x[[5, 150, 250, 350]] = np.nan
    writer = TraceWriter(path, 0)
    writer.append(0, {"gradient": x})
    writer.close()
    chunk = path / "rank00000" / "gradient" / "c" / "0" / "2"
    if damage == "truncate":
        chunk.write_bytes(chunk.read_bytes()[:100])
    else:
        chunk.unlink()
    trace = open_trace(path)
    for start, stop in ((0, 200), (300, NUMEL)):
        part = trace.read_slice(0, 0, "gradient", start, stop)
        assert np.array_equal(part, x[start:stop], equal_nan=True)
    # three elements, no more than the NaN that were there: their chunk has a hundred
    for start, stop in ((200, 300), (250, 253), (0, NUMEL)):
        with pytest.raises(
            TraceError, match=r"gradient of step 0, rank 0 is damaged: .*"
        ) as caught:
            trace.read_slice(0, 0, "gradient", start, stop)
        assert "\n" not in str(caught.value)


def test_a_row_that_failed_is_left_and_never_shows_through(path, monkeypatch):
    writer = write(path, [0], kinds=["gradient"], close=False)
    original = TraceWriter._put

    def full(self, name, row, value):
        if name == "selected":
            raise OSError(28, "No space left on device")
        original(self, name, row, value)

    monkeypatch.setattr(TraceWriter, "_put", full)
    with pytest.raises(TraceError, match=r"cannot write step 1 to .*No space left on device"):
        writer.append(1, {"gradient": gradient(1)}, loss=0.5)
    monkeypatch.setattr(TraceWriter, "_put", original)
    writer.append(2, {"gradient": gradient(2)})
    writer.close()
    trace = open_trace(path)
    assert trace.steps() == [0, 2]
    assert np.array_equal(trace.read(2), gradient(2))
    assert trace.scalars()["loss"].tolist() == [0, pytest.approx(np.nan, nan_ok=True)]


@pytest.mark.parametrize("store", ["gradients", "sketches"])
def test_a_writer_leaves_what_has_taken_the_place_of_its_trace_alone(path, store):
    old = write(
        path, range(300), kinds=["gradient"], store=store, close=False
    )  # laid out anew on the way
    os.utime(path / "rank00000" / "zarr.json")  # as a network filesystem may tell it anew
    old.append(300, {"gradient": gradient(300)})
    create_trace(path, LAYERS, overwrite=True, metadata={"created": "later"})
    new = write(path, [5], kinds=["gradient"], store=store, close=False)
    for call in (
        old.close,
        lambda: old.append(301, {"gradient": gradient(0)}),
        lambda: old.remove(7),
    ):
        with pytest.raises(
            TraceError, match="was replaced while it was being written: another Capture"
        ):
            call()
    new.append(6, {"gradient": gradient(6)})
    new.close()
    assert open_trace(path).steps() == [5, 6]


def test_a_commit_that_failed_is_made_by_no_later_step(path, monkeypatch):
    writer = write(path, range(3), kinds=["gradient"], close=False)
    original = trace_writer._write_chunk

    def full(file, *rest):
        if "/step/" in file:
            raise OSError(28, "No space left on device")
        original(file, *rest)

    monkeypatch.setattr(trace_writer, "_write_chunk", full)
    with pytest.raises(TraceError, match="cannot write step 3"):
        writer.append(3, {"gradient": gradient(3)})
    with pytest.raises(TraceError, match="cannot remove step 1"):
        writer.remove(1)
    monkeypatch.setattr(trace_writer, "_write_chunk", original)
    writer.append(4, {"gradient": gradient(4)})
    assert open_trace(path).steps() == [0, 1, 2, 4]


def test_damaged_metadata_is_one_line(path):
    write(path, [0])
    (path / "rank00000" / "step" / "zarr.json").write_text("{}")
    with pytest.raises(TraceError, match="is damaged") as caught:
        open_trace(path)
    assert "\n" not in str(caught.value)


def test_nothing_is_unpickled():
    from conftest import ROOT

    for file in [*(ROOT / "gradstats").rglob("*.py"), *(ROOT / "capture").rglob("*.py")]:
        text = file.read_text()
        assert "allow_pickle=True" not in text
        assert "weights_only=False" not in text
        # the index of DCP's checkpoints is a pickle, and read by names that do nothing
        if "import pickle" in text:
            assert file.name == "dumps.py"
            assert text.count("pickle.") == text.count("pickle.Unpick")


def test_wrong_arrays_are_refused_before_the_commit(path):
    writer = TraceWriter(path, 0)
    for bad in (np.zeros(3, np.float32), np.zeros(NUMEL)):
        with pytest.raises(TraceError, match="expected float32"):
            writer.append(0, {"gradient": bad})
    writer.append(1, {"gradient": gradient(1)})
    writer.close()
    assert open_trace(path).steps() == [1]


def write_for_ever(path, rank, reports):
    """Say every step whose append returned."""
    reports.send("ready")
    writer = TraceWriter(path, rank, kinds=KINDS, expected_steps=[None, 100_000][rank])
    for step in itertools.count():
        writer.append(step, {k: gradient(step, rank, k) for k in KINDS}, loss=step)
        reports.send(step)


def received(reports):
    """Return what is left in a pipe whose other end is gone."""
    steps = []
    with contextlib.suppress(EOFError):
        while True:
            steps.append(reports.recv())
    return steps


@pytest.mark.slow
def test_sigkill_at_20_random_moments_loses_only_uncommitted_steps(tmp_path):
    """Ranks take turns: one grows its arrays as it goes, the other has them laid out. The campaign has hundreds.

    Moments are counted in steps of the writer, not in seconds, so that a slow disk has as many of them.
    """
    rng = random.Random(0)
    committed, stretch = [], 0.0
    for trial in range(20):
        path = tmp_path / f"{trial}.zarr"
        create_trace(path, LAYERS)
        rank = trial % 2
        reports, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=write_for_ever, args=(path, rank, theirs))
        process.start()
        theirs.close()
        assert reports.recv() == "ready"
        reported = []
        for _ in range(rng.randrange(8)):
            began = time.perf_counter()
            reported.append(reports.recv())
            stretch = time.perf_counter() - began
        time.sleep(rng.uniform(0, stretch))
        process.kill()
        reported += received(reports)
        process.join()
        trace = open_trace(path)
        if not trace.ranks:
            assert not reported
            committed.append(0)
            continue
        steps = trace.steps(rank)
        # every step whose append returned is there; at most one more was committed and not reported
        assert len(reported) <= len(steps) <= len(reported) + 1
        assert steps == list(range(len(steps)))
        for step in steps:
            for kind in KINDS:
                assert np.array_equal(trace.read(step, rank, kind), gradient(step, rank, kind))
        assert trace.scalars(rank)["loss"].tolist() == steps
        committed.append(len(steps))
    assert sum(n > 0 for n in committed) > 10
    assert len(set(committed)) > 4


@pytest.mark.parametrize("path", [None, 5, b"run.zarr", ["run.zarr"], "a\nb.zarr", "x" * 100_000])
def test_what_is_no_path_is_said_in_one_short_line(path):
    for call in (
        open_trace,
        gradstats.compression,
        lambda p: save_safetensors(p, "a.safetensors", 0),
    ):
        with pytest.raises(
            InputError, match=r"^a trace is opened by the path of its folder, not "
        ) as caught:
            call(path)
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)


def test_a_name_that_no_file_can_have_is_said_in_one_short_line():
    with pytest.raises(TraceError, match=r"^cannot open 'x+…: File name too long$") as caught:
        open_trace("x" * 4000)
    assert len(str(caught.value)) < 200


@every("field", ["steps", "ranks", "kinds", "layers"])
@every("value", [5, "gradient", 1.5, object()])
def test_what_is_no_list_selects_nothing(field, value):
    with pytest.raises(InputError, match=f"{field} must be a list or a tuple, not "):
        Subset(**{field: value})


def test_a_column_of_many_chunks_takes_the_time_of_its_rows(path, monkeypatch):
    """Two rows a chunk, as the layers of a wide model have: a pass over all rows for each would take minutes."""
    write(path, range(3))
    group = open_trace(path)._rank(0)
    array = group.array("loss")
    array.chunk = (2,)
    monkeypatch.setattr(array, "holds", lambda *_: True)
    monkeypatch.setattr(array, "chunk_rows", lambda chunk: np.array([2.0 * chunk, 2 * chunk + 1]))
    rows = range(1, 120_001, 3)
    start = time.process_time()
    assert np.array_equal(group.column("loss", rows), rows)
    assert time.process_time() - start < 2
