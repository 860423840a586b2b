"""Damage and hostile input: one line, in bounded time and memory, and the rest of the trace stays readable."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import time

import numpy as np
import pytest
from support.every import every
from support.traces import LAYERS, gradient, write

from gradstats import open_trace
from gradstats.errors import GradstatsError, InputError, TraceError
from gradstats.files import write_file
from gradstats.trace import KINDS, Layer, TraceWriter, create_trace, format, is_trace, writer
from gradstats.trace.export import save_safetensors
from gradstats.trace.stored import StoredArray

STEPS = list(range(0, 140, 2))


def two_ranks(tmp_path, monkeypatch):
    """Write two ranks; rank 0 has two chunks of scalars, each a file: test_packed.py damages packs."""
    monkeypatch.setattr(writer, "pack", lambda *_: None)
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS, world_size=2)
    write(path, STEPS, compression=True, expected_steps=64)
    write(path, STEPS[:3], rank=1, store="sketches")
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    return two_ranks(tmp_path, monkeypatch)


def raised(call):
    """Return the one line of the error that a call raises."""
    with pytest.raises(TraceError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def harm(file, damage):
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    elif damage == "truncate":
        file.write_bytes(raw[:-9])
    else:
        file.unlink()


@every("damage", ["flip", "truncate", "remove"])
@every("name", ["loss", "selected", "gradient_nonfinite"])
def test_a_damaged_chunk_of_a_scalar_hides_nothing_else(tmp_path, monkeypatch, name, damage):
    path = two_ranks(tmp_path, monkeypatch)
    harm(path / "rank00000" / name / "c" / "1", damage)
    trace = open_trace(path)
    scalars = trace.scalars()
    message = raised(lambda: scalars[name])
    assert message.startswith(f"{path}: {name} of rank 0 is damaged: steps 128 to 138: ")
    assert trace.steps() == STEPS
    for other in set(scalars) - {name}:
        assert len(scalars[other]) == len(STEPS)
    for step in STEPS[::20] + STEPS[-1:]:
        for kind in KINDS:
            assert np.array_equal(trace.read(step, 0, kind), gradient(step, 0, kind))
    assert len(trace.compression()) == 9
    assert trace.scalars(1)["loss"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_lost_step_numbers_are_never_no_data(path, damage):
    harm(path / "rank00000/step/c/1", damage)
    trace = open_trace(path)
    where = f"{path}: step of rank 0 is damaged: rows 64 to 69: "
    for call in (
        trace.steps,
        lambda: trace.steps(0),
        lambda: trace.scalars(0),
        lambda: trace.compression(0),
        lambda: trace.read(138),
        lambda: list(trace.gradients()),
    ):
        assert raised(call).startswith(where)
    assert np.array_equal(trace.read(126), gradient(126))
    assert trace.steps(1) == STEPS[:3]
    assert "steps=64" in repr(trace)


@pytest.mark.parametrize("length", [0, 1, 64, 69])
def test_a_length_that_hides_committed_steps(path, length):
    """One changed byte of the metadata, which has no checksum, must not read as a shorter run."""
    file = path / "rank00000/step/zarr.json"
    about = json.loads(file.read_text())
    assert about["shape"] == [len(STEPS)]
    about["shape"] = [length]
    file.write_text(json.dumps(about))
    trace = open_trace(path)
    message = raised(lambda: trace.steps(0))
    assert f"there are steps beyond its length, {length}" in message
    assert trace.steps(1) == STEPS[:3]


@every("lost", ["zarr.json", "c", "."])
@every("name", ["loss", "gradient", "compression", "gradient_zeros", "step"])
def test_a_lost_array(tmp_path, monkeypatch, name, lost):
    path = two_ranks(tmp_path, monkeypatch)
    target = path / "rank00000" / name / lost
    target.unlink() if target.is_file() else shutil.rmtree(target.resolve())
    trace = open_trace(path)
    assert trace.steps(1) == STEPS[:3]
    if name == "step":
        assert "step of rank 0 is damaged" in raised(lambda: trace.steps(0))
        assert "step of rank 0 is damaged" in raised(lambda: trace.steps())
        return
    calls = {
        "gradient": lambda: trace.read(2),
        "compression": lambda: trace.compression(),
    }
    message = raised(calls.get(name, lambda: trace.scalars()[name]))
    assert name in message
    assert "damaged" in message
    assert np.array_equal(trace.read(2, kind="corrected"), gradient(2, 0, "corrected"))
    assert trace.scalars()["selected"].tolist() == STEPS


def test_a_lost_rank_does_not_hide_the_other(path):
    (path / "rank00000/zarr.json").write_text("{")
    trace = open_trace(path)
    assert trace.ranks == [0, 1]
    assert "rank00000 is damaged" in raised(lambda: trace.kinds(0))
    assert trace.steps(1) == STEPS[:3]
    lost, *others = trace.summary().to_dict("records")
    assert "rank00000 is damaged" in lost["stored"]
    assert [r["steps"] for r in others] == [3] * len(KINDS)
    assert "rank00000 is damaged" in trace._repr_html_()


DEEP = "[" * 100_000 + "]" * 100_000


@every(
    ("changes", "message"),
    [
        ({"numel": float("inf")}, "unreadable numbers"),
        ({"numel": float("nan")}, "unreadable numbers"),
        ({"numel": -620}, "does not fit the parameter layout"),
        ({"numel": 10**12}, "does not fit the parameter layout"),
        ({"numel": 620.0}, "unreadable numbers"),
        ({"numel": True}, "unreadable numbers"),
        ({"world_size": "two"}, "unreadable numbers"),
        ({"world_size": 0}, "unreadable numbers"),
        ({"schema": True}, "schema True"),
        ({"schema": 1e400}, "schema inf"),
        ({"schema": "x" * 10_000}, "schema"),
        ({"layout": 5}, "parameter layout"),
        ({"layout": {"a": 1}}, "parameter layout"),
        ({"layout": [{"name": "w", "offset": 0, "shape": [-30, -20]}]}, "parameter layout"),
        ({"layout": [{"name": "w", "offset": 0, "shape": [30, float("inf")]}]}, "layout"),
        ({"layout": [{"name": "w", "offset": 0, "shape": [10**30]}]}, "parameter layout"),
        ({"layout": [{"name": "w", "offset": 0, "shape": [2**40] * 60}]}, "parameter layout"),
        ({"layout": [{"name": "w", "offset": 7, "shape": [620]}]}, "parameter layout"),
        ({"layout": [{"name": 5, "offset": 0, "shape": [620]}]}, "parameter layout"),
    ],
)
def test_root_attributes_are_checked(tmp_path, monkeypatch, changes, message):
    path = two_ranks(tmp_path, monkeypatch)
    file = path / "zarr.json"
    root = json.loads(file.read_text())
    root["attributes"] |= changes
    file.write_text(json.dumps(root))
    text = raised(lambda: open_trace(path))
    assert message in text
    assert len(text) < 500


@every("where", ["", "rank00000", "rank00000/step", "rank00000/loss"])
@every("what", ["deep", "fifo", "link", "loop", "folder", "list", "huge", "device"])
def test_anything_in_the_place_of_metadata(tmp_path, monkeypatch, where, what):
    path = two_ranks(tmp_path, monkeypatch)
    file = path / where / "zarr.json"
    text = file.read_text()
    file.unlink()
    if what == "deep":
        file.write_text(DEEP)
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "link":
        (tmp_path / "elsewhere").write_text(text)
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "loop":
        file.symlink_to(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "folder":
        file.mkdir()
    elif what == "list":
        file.write_text("[1]")
    else:
        monkeypatch.setattr(format, "_METADATA", 10_000)
        file.write_text(text + " " * (10_001 - len(text)))
    start = time.process_time()
    if where == "":
        raised(lambda: open_trace(path))
        assert not is_trace(path)
        with pytest.raises(TraceError, match="not touching it"):
            create_trace(path, LAYERS, overwrite=True)
    elif where.endswith("loss"):
        trace = open_trace(path)
        raised(lambda: trace.scalars()["loss"])
        assert trace.scalars()["selected"].tolist() == STEPS
    else:
        trace = open_trace(path)
        raised(lambda: trace.steps(0))
        assert trace.steps(1) == STEPS[:3]
    assert time.process_time() - start < 5


@every("name", ["gradient", "loss", "step", "compression"])
@every(
    "change",
    [
        {"shape": [10**12]},
        {"shape": [10**12, 10**12]},
        {"chunk": 10**12},
        {"shape": "many"},
        {"data_type": "float16"},
        {"codecs": [{"name": "bytes"}, {"name": "gzip"}]},
        {"node_type": "group"},
        {"fill_value": {}},
        {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}}},
    ],
)
def test_hostile_array_metadata_is_bounded(tmp_path, monkeypatch, name, change):
    path = two_ranks(tmp_path, monkeypatch)
    file = path / "rank00000" / name / "zarr.json"
    about = json.loads(file.read_text())
    if "chunk" in change:
        about["chunk_grid"]["configuration"]["chunk_shape"][-1] = change["chunk"]
    else:
        about |= change
    file.write_text(json.dumps(about))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    trace = open_trace(path)
    for call in (
        trace.steps,
        lambda: trace.read(2),
        lambda: dict(trace.scalars()),
        lambda: trace.compression(),
    ):
        with contextlib.suppress(GradstatsError):
            call()
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_trace_that_claims_a_million_million_elements(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("w", 0, (620,))])
    write(path, [0], kinds=["gradient"])
    for file, change in (
        (path / "zarr.json", lambda m: m["attributes"]["layout"][0].update(shape=[10**12])),
        (path / "zarr.json", lambda m: m["attributes"].update(numel=10**12)),
        (path / "rank00000/gradient/zarr.json", lambda m: m.update(shape=[1, 10**12])),
    ):
        about = json.loads(file.read_text())
        change(about)
        file.write_text(json.dumps(about))
    trace = open_trace(path)
    for call in (
        lambda: trace.read(0),
        lambda: trace.read_slice(0, 0, "gradient", 5, 10**12),
        lambda: trace.read_slice(0, 0, "gradient", 10**11, 10**11 + 5),
    ):
        assert "chunks are missing" in raised(call)


@every("what", ["fifo", "folder", "claim"])
@every("file", ["gradient/c/1/0", "loss/c/0", "step/c/0"])
def test_anything_in_the_place_of_a_chunk(tmp_path, what, file):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    write(path, [0, 1], kinds=["gradient"], compress=True)
    chunk = path / "rank00000" / file
    raw = bytearray(chunk.read_bytes())
    chunk.unlink()
    if what == "fifo":
        os.mkfifo(chunk)
    elif what == "folder":
        chunk.mkdir()
    else:  # Blosc's header: what decoding is to allocate
        raw[4:8] = (2**31 - 1).to_bytes(4, "little")
        chunk.write_bytes(raw if "gradient" in file else bytes(10**6))
    trace = open_trace(path)
    calls = {"gradient": lambda: trace.read(1), "loss": lambda: trace.scalars()["loss"]}
    assert "damaged" in raised(calls.get(file.split("/")[0], trace.steps))


def test_no_mutated_byte_is_a_number(tmp_path):
    """A few hundred mutations of any file: the right answer or one line."""
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    write(path, range(3), compression=True)
    write(path, range(3), rank=1, store="sketches")
    files = sorted(p for p in path.rglob("*") if p.is_file())
    expected = everything(path)
    rng = random.Random(0)
    refused = 0
    for trial in range(300):
        file = rng.choice(files)
        raw = file.read_bytes()
        mutated = bytearray(raw)
        mutated[rng.randrange(len(raw))] = rng.randrange(256)
        file.write_bytes(mutated)
        for key, value in everything(path).items():
            refused += value is None
            if value is not None and key != "trace":
                assert np.array_equal(value, expected[key], equal_nan=True), (trial, file, key)
        file.write_bytes(raw)
    assert refused > 100


def everything(path):
    """Return all that can be read, None for what raises one line."""
    found = {}

    def ask(key, call):
        found[key] = None
        with contextlib.suppress(GradstatsError):
            found[key] = call()
        return found[key]

    trace = ask("trace", lambda: open_trace(path))
    for rank in trace.ranks if trace else []:
        ask(("steps", rank), lambda rank=rank: trace.steps(rank))
        for name in ("loss", "selected", "threshold", "gradient_zeros"):
            ask((name, rank), lambda name=name, rank=rank: trace.scalars(rank)[name])
        for step in range(3):
            if rank == 0:
                ask(("read", step), lambda step=step: trace.read(step))
            else:
                ask(
                    ("sketch", step),
                    lambda step=step: np.concatenate(
                        [
                            np.r_[s.bins, s.counts, s.moments.sum_abs]
                            for s in trace.sketches(step, 1)
                        ]
                    ),
                )
        ask(("table", rank), lambda rank=rank: list(trace.compression(rank).values()))
    return found


def test_bfloat16_that_rounds_to_infinity_is_not_damage(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    x = gradient(0)
    x[3] = 3.4e38
    writer = TraceWriter(path, 0, dtype="bfloat16")
    writer.append(0, {"gradient": x})
    writer.close()
    assert 3.38e38 < open_trace(path).read(0)[3] < np.inf  # the largest there is


@pytest.mark.parametrize("key", ["format", "schema", "world_size", "numel", "layout"])
def test_metadata_does_not_replace_the_formats_own_attributes(tmp_path, key):
    path = tmp_path / "run.zarr"
    with pytest.raises(InputError, match=f"'{key}' is a name of the trace format's own"):
        create_trace(path, LAYERS, metadata={"model": "linear", key: 5})
    assert not list(tmp_path.iterdir())


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@every(
    "value",
    [float("nan"), np.float32(1), {1, 2}, b"bytes", object(), nested(100_000), {(1, 2): 3}, 1j],
    ids=lambda value: type(value).__name__,
)
def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, value
):
    path = two_ranks(tmp_path, monkeypatch)
    before = sorted(p for p in path.rglob("*"))
    for target, overwrite in ((path.with_name("new.zarr"), False), (path, True)):
        with pytest.raises(InputError, match="JSON cannot hold the value of 'ratio'") as caught:
            create_trace(target, LAYERS, metadata={"ratio": value}, overwrite=overwrite)
        assert "\n" not in str(caught.value)
    assert sorted(p for p in path.rglob("*")) == before
    assert not path.with_name("new.zarr").exists()
    with pytest.raises(InputError, match="keys must be strings"):
        create_trace(path.with_name("new.zarr"), LAYERS, metadata={5: 1})


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a\0b/c.zarr"])
def test_names_that_no_file_can_have(tmp_path, name):
    assert "cannot create" in raised(lambda: create_trace(tmp_path / name, LAYERS))
    raised(lambda: open_trace(tmp_path / name))
    assert not is_trace(tmp_path / name)


def test_overwriting_through_a_link_and_of_an_empty_folder(tmp_path):
    real = tmp_path / "disk" / "real.zarr"
    create_trace(real, LAYERS, metadata={"run": 1})
    link = tmp_path / "run.zarr"
    link.symlink_to(real)
    create_trace(link, LAYERS, metadata={"run": 2}, overwrite=True)
    assert link.is_symlink()
    assert open_trace(real).attrs["run"] == 2
    empty = tmp_path / "empty.zarr"
    empty.mkdir()
    create_trace(empty, LAYERS)
    assert is_trace(empty)
    assert sorted(p.name for p in real.parent.iterdir()) == ["real.zarr"]


def test_a_trace_that_cannot_be_replaced_stays(path, monkeypatch):
    """The disk is full when the new one is made."""

    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(format.Path, "write_bytes", full)
    with pytest.raises(TraceError, match=r"cannot create .*No space left"):
        create_trace(path, LAYERS, overwrite=True)
    monkeypatch.undo()
    assert open_trace(path).steps() == STEPS
    assert [p.name for p in path.parent.iterdir()] == ["run.zarr"]


def test_exports_are_replaced_whole(path, tmp_path, monkeypatch):
    import safetensors.numpy

    out = tmp_path / "g.safetensors"
    save_safetensors(path, out, 2)
    before = out.read_bytes()

    def dies(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", dies)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        save_safetensors(path, out, 4)
    monkeypatch.undo()
    assert out.read_bytes() == before
    save_safetensors(path, out, 4)
    assert out.read_bytes() != before
    with pytest.raises(InputError, match="cannot write"):
        save_safetensors(path, tmp_path / "nowhere" / "g.safetensors", 2)
    assert {p.name for p in tmp_path.iterdir()} == {"run.zarr", "g.safetensors"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EIO, "Input/output error"),
        MemoryError("Unable to allocate 3 GiB"),
    ],
)
def test_what_the_machine_cannot_read_is_not_called_damaged(path, monkeypatch, error):
    def refuse(*_):
        raise error

    opened = open_trace(path)
    monkeypatch.setattr(StoredArray, "holds", refuse)
    line = raised(lambda: opened.read(2))
    assert re.search("cannot be read: .*(Stale|output|not enough memory)", line)
    assert "damaged" not in line


def test_a_write_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    failed = []

    def once(file, *parts):
        if "/gradient/c/1" in str(file) and len(failed) < 2:
            failed.append(file)
            raise OSError(errno.EIO, "Input/output error")
        return write_file(file, *parts)

    monkeypatch.setattr(writer, "write_file", once)
    create_trace(tmp_path / "a.zarr", LAYERS)
    write(tmp_path / "a.zarr", range(3))
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.steps() == [0, 1, 2]
    assert len(failed) == 2
    assert np.array_equal(trace.read(1), gradient(1))
