"""Chunks of a closed trace in few files: the same bytes, found by every reader, and never numbers when damaged."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import numpy as np
import pytest
import zarr
from support.every import every
from support.readers import assert_all_agree, assert_as_written
from support.traces import LAYERS, NUMEL, gradient, write

from gradstats import open_trace
from gradstats.errors import GradstatsError, TraceError
from gradstats.trace import TraceWriter, create_trace, packed
from gradstats.trace import format as trace_format

ONE = {"kinds": ["gradient"], "store": "sketches"}


def empty(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    return path


@pytest.fixture
def path(tmp_path):
    return empty(tmp_path)


@pytest.fixture
def closed(path):
    write(path, range(5), **ONE)
    return path


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


def counts_of(path):
    """Return the sums of the counts of a trace's steps, through our reader."""
    trace = open_trace(path)
    return [sum(int(s.counts.sum()) for s in trace.sketches(step)) for step in trace.steps()]


def test_a_thousand_sketched_steps_are_at_most_five_files(tmp_path):
    """Beyond those of a few steps: each array has a description, and at least one file of chunks."""
    found = {}
    for steps in (64, 1064):  # more rows than a chunk of any column
        path = tmp_path / f"{steps}.zarr"
        create_trace(path, LAYERS)
        writer = write(path, range(steps), close=False, **ONE)
        before = len(files_of(path / "rank00000"))
        writer.close()
        found[steps] = len(files_of(path / "rank00000"))
        assert before > steps
        assert_as_written(open_trace(path), 0, range(steps), ["gradient"])
    assert found[1064] - found[64] <= 5
    assert found[1064] < 30


def test_chunks_are_in_their_packs_byte_for_byte(path, monkeypatch):
    monkeypatch.setattr(trace_format, "GROW", 2)
    writer = write(path, range(9), compression=True, expected_steps=2, close=False, **ONE)
    arrays = zarr.open_group(path / "rank00000", mode="r")
    before = {name: array[:9] for name, array in arrays.arrays()}
    chunks = {}
    for name, spec in writer._specs.items():
        folder = path / "rank00000" / name
        each = packed._chunk_files(folder, spec.separator, len(spec.dimensions))
        chunks[name] = {key: file.read_bytes() for key, file in each.items()}
    writer.close()
    for name, spec in writer._specs.items():
        folder = path / "rank00000" / name
        assert not packed._chunk_files(folder, spec.separator, len(spec.dimensions))
        size = trace_format.pack_of(json.loads((folder / "zarr.json").read_text()))
        found = {}
        packs = packed._chunk_files(folder, spec.pack_separator, len(spec.dimensions))
        for (place, *rest), file in packs.items():
            data = file.read_bytes()
            with file.open("rb") as stream:
                for i, (begin, length) in enumerate(packed.read_index(stream, size).tolist()):
                    if begin >= 0:
                        found[place * size + i, *rest] = data[begin : begin + length]
        assert found == chunks[name]
    arrays = zarr.open_group(path / "rank00000", mode="r")
    for name, array in arrays.arrays():
        assert array.shards is not None
        assert array[:].tobytes() == before[name].tobytes()
    assert_as_written(assert_all_agree(path), 0, range(9), ["gradient"], compression=True)


def test_a_pack_is_not_larger_than_its_limit(path, monkeypatch):
    writer = write(path, range(30), close=False, **ONE)
    chunks = sorted((path / "rank00000/gradient_counts").glob("c.*"))
    limit = sum(f.stat().st_size for f in chunks) // 4
    monkeypatch.setattr(packed, "_LARGEST", limit)
    writer.close()
    packs = [p for p in (path / "rank00000/gradient_counts/c").rglob("*") if p.is_file()]
    assert len(packs) > 4
    for file in packs:
        assert file.stat().st_size <= limit + 30 * 16 + 4
    assert_as_written(assert_all_agree(path), 0, range(30), ["gradient"])


def test_gradients_in_full_stay_as_they_are(path):
    writer = write(path, range(5), kinds=["gradient"], close=False)
    before = [f for f in files_of(path) if f.name != "zarr.json"]
    writer.close()
    assert [f for f in files_of(path) if f.name != "zarr.json"] == before


def test_steps_are_added_and_removed_after_closing(closed):
    writer = TraceWriter(closed, 0, resume=True, **ONE)
    writer.close()
    writer.remove(2)
    writer.append(5, {"gradient": gradient(5)}, loss=2.5)
    assert open_trace(closed).steps() == [0, 1, 3, 4, 5]
    writer.close()
    assert_as_written(assert_all_agree(closed), 0, [0, 1, 3, 4, 5], ["gradient"])
    files = files_of(closed)
    writer.close()
    assert files_of(closed) == files


def test_what_was_opened_before_is_an_error_or_right(closed):
    """Reads by a reader of the closed trace, while a writer takes a step out, and closes the trace again."""
    reader = open_trace(closed)
    first = reader.sketches(4)
    writer = TraceWriter(closed, 0, resume=True, **ONE)
    with pytest.raises(TraceError, match="damaged"):
        reader.sketches(4)
    writer.remove(1)
    writer.close()
    again = reader.sketches(4)  # its pack is another, and has another index
    assert [s.moments for s in again] == [s.moments for s in first]
    with pytest.raises(TraceError, match="damaged"):
        reader.sketches(1)
    assert open_trace(closed).steps() == [0, 2, 3, 4]


def test_a_disk_that_is_full_leaves_the_chunk_files(path, monkeypatch):
    writer = write(path, range(5), close=False, **ONE)
    writer._resize(5)
    before = {p: p.read_bytes() for p in files_of(path)}
    original = packed._write_pack

    def full(file, *rest):
        original(file, *rest)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed, "_write_pack", full)
        with pytest.raises(TraceError, match=r"cannot finish .*No space left"):
            writer.close()
    assert {p: p.read_bytes() for p in files_of(path)} == before
    writer.append(5, {"gradient": gradient(5)}, loss=2.5)
    writer.close()
    assert_as_written(assert_all_agree(path), 0, range(6), ["gradient"])


@every("damage", ["chunk", "index", "truncate", "remove"])
@every("array", ["gradient_counts", "loss", "step"])
def test_damage_of_a_pack_is_one_line(tmp_path, monkeypatch, array, damage):
    path = empty(tmp_path)
    monkeypatch.setattr(trace_format, "GROW", 2)
    write(path, range(5), expected_steps=2, kinds=["gradient"], store="sketches")
    folder = path / "rank00000" / array
    packs = [p for p in [*folder.glob("c.*"), *(folder / "c").rglob("*")] if p.is_file()]
    for file in packs:
        raw = bytearray(file.read_bytes())
        if damage == "remove":
            file.unlink()
        elif damage == "truncate":
            file.write_bytes(raw[: len(raw) // 3])
        else:
            raw[5 if damage == "chunk" else -20] ^= 1
            file.write_bytes(raw)
    trace = open_trace(path)
    calls = {
        "gradient_counts": lambda: [trace.sketches(step) for step in range(5)],
        "loss": lambda: trace.scalars()["loss"],
        "step": trace.steps,
    }
    with pytest.raises(TraceError, match="is damaged: ") as caught:
        calls[array]()
    assert "\n" not in str(caught.value)
    if array != "step":
        assert trace.steps() == list(range(5))
        assert trace.scalars()["selected"].tolist() == list(range(5))


def test_packs_are_not_read_by_metadata_of_another_program(closed):
    file = closed / "rank00000/gradient_counts/zarr.json"
    text = file.read_text()
    about = json.loads(text)
    inner = about["codecs"][0]["configuration"]
    grid = about["chunk_grid"]["configuration"]
    changes = [
        lambda: grid.update(chunk_shape=[10**12, *grid["chunk_shape"][1:]]),
        lambda: grid.update(chunk_shape=[5, 1, 4096]),
        lambda: inner.update(index_location="start"),
        lambda: inner.update(index_codecs=[]),
        lambda: inner.update(chunk_shape=[0, 2, 4096]),
        lambda: inner.update(chunk_shape="many"),
        lambda: about.update(codecs=about["codecs"] * 2),
        lambda: about["chunk_key_encoding"]["configuration"].update(separator="."),
    ]
    for change in changes:
        about = json.loads(text)
        inner = about["codecs"][0]["configuration"]
        grid = about["chunk_grid"]["configuration"]
        change()
        file.write_text(json.dumps(about))
        trace = open_trace(closed)
        assert trace.steps() == list(range(5))
        with pytest.raises(TraceError, match="gradient_counts of rank 0 is damaged"):
            trace.sketches(0)
    file.write_text(text)
    assert counts_of(closed) == [NUMEL] * 5


def test_a_damaged_pack_is_not_taken_out(closed):
    """A writer that continues the group says so, and leaves everything as it was."""
    file = next(p for p in (closed / "rank00000/gradient_counts/c").rglob("*") if p.is_file())
    raw = bytearray(file.read_bytes())
    raw[-20] ^= 1
    file.write_bytes(raw)
    with pytest.raises(TraceError, match=r"is damaged: the checksum of a pack's index is wrong"):
        TraceWriter(closed, 0, resume=True, **ONE)
    assert file.read_bytes() == bytes(raw)
    assert open_trace(closed).steps() == list(range(5))


def test_a_pipe_in_the_place_of_a_pack(closed):
    file = next(p for p in (closed / "rank00000/gradient_counts/c").rglob("*") if p.is_file())
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TraceError, match="not a regular file"):
        open_trace(closed).sketches(0)


def test_index_entries_that_lead_out_of_a_pack(closed):
    from google_crc32c import value as crc32c

    file = next(p for p in (closed / "rank00000/gradient_counts/c").rglob("*") if p.is_file())
    raw = file.read_bytes()
    index = np.frombuffer(raw[-5 * 16 - 4 : -4], "<i8").reshape(5, 2)
    for begin, length in ((0, len(raw)), (-5, 10), (2**62, 2**62), (10**9, 1), (3, -1)):
        other = index.copy()
        other[0] = begin, length
        data = other.tobytes()
        file.write_bytes(raw[: -5 * 16 - 4] + data + crc32c(data).to_bytes(4, "little"))
        with pytest.raises(TraceError, match="leads out of it"):
            open_trace(closed).sketches(0)
    with suppress(GradstatsError):
        file.write_bytes(b"")
        open_trace(closed).sketches(0)
