"""Steps that are removed from a trace: nothing else is lost, whenever the process dies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.terminal import records
from support.traces import LAYERS, gradient

from gradstats.errors import InputError, TraceError
from gradstats.trace import TraceWriter, create_trace, open_trace

KINDS = ("gradient", "corrected")
LAST, BEFORE = 5, 4


def write(path, steps, *, store="gradients", resume=False):
    """Append steps, and remove those that are not of the last 5, nor every fourth."""
    writer = TraceWriter(path, 0, kinds=KINDS, store=store, expected_steps=64, resume=resume)
    have = [s for s in range(steps.start) if resume and s in open_trace(path).steps(0)]
    for step in steps:
        writer.append(step, {k: gradient(step, 0, k) for k in KINDS}, loss=step / 2)
        have.append(step)
        for old in [s for s in have if s <= step - LAST and s % BEFORE]:
            writer.remove(old)
            have.remove(old)
    writer.close()


def wanted(newest):
    return [s for s in range(newest + 1) if s > newest - LAST or s % BEFORE == 0]


def check(path, store, least):
    """What is there is right, and all that has to be kept is there."""
    trace = open_trace(path)
    steps = trace.steps(0)
    assert set(steps) >= set(wanted(max(steps, default=-1)))
    assert max(steps, default=-1) >= least
    assert np.array_equal(trace.scalars(0)["loss"], np.array(steps) / 2)
    for step in steps:
        for kind in KINDS:
            if store == "gradients":
                assert np.array_equal(trace.read(step, 0, kind), gradient(step, 0, kind))
            else:
                assert sum(s.numel for s in trace.sketches(step, 0, kind)) == 620
    return steps


def files_of(path):
    return sum(len(names) for _, _, names in os.walk(path))


@pytest.mark.parametrize("store", ["gradients", "sketches"])
def test_what_is_not_kept_goes_from_the_disk(tmp_path, store):
    few, path = tmp_path / "few.zarr", tmp_path / "run.zarr"
    for each, steps in ((few, range(40)), (path, range(200))):
        create_trace(each, LAYERS)
        write(each, steps, store=store)
        assert check(each, store, steps[-1]) == wanted(steps[-1])
    found = records("info", path)
    assert [r["step"] for r in found if r["kind"] == "gradient"] == wanted(199)
    a_step = 2 * max(1, len(LAYERS) - 1)
    kept = len(wanted(199)) - len(wanted(39))
    chunks = 16 * 3  # of scalars and moments, up to 64 rows each
    assert files_of(path) - files_of(few) <= 2 * kept * a_step + chunks
    with pytest.raises(InputError, match="no step 1 to remove"):
        TraceWriter(path, 0, kinds=KINDS, store=store, expected_steps=64, resume=True).remove(1)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("store", ["gradients", "sketches"])
def test_killed_at_any_moment_nothing_that_is_kept_is_lost(tmp_path, store, monkeypatch):
    """The process dies before each of the calls that change the disk, some of them; then the trace is continued."""
    import gradstats.trace.writer as module

    calls = {"n": 0, "die": -1}

    def mortal(function):
        def call(*args, **kwargs):
            if calls["n"] == calls["die"]:
                raise Killed
            calls["n"] += 1
            return function(*args, **kwargs)

        return call

    create_trace(tmp_path / "base.zarr", LAYERS)
    write(tmp_path / "base.zarr", range(9), store=store)
    monkeypatch.setattr(module, "write_file", mortal(module.write_file))
    monkeypatch.setattr(os, "unlink", mortal(os.unlink))
    monkeypatch.setattr(os, "rmdir", mortal(os.rmdir))
    monkeypatch.setattr(Path, "unlink", mortal(Path.unlink))
    die, done = 0, False
    while not done:
        path = tmp_path / "run.zarr"
        calls["die"] = -1
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "base.zarr", path, symlinks=True)
        calls.update(n=0, die=die)
        try:
            write(path, range(9, 12), store=store, resume=True)
            done = True
        except Killed:
            pass
        calls["die"] = -1
        steps = check(path, store, 8)
        write(path, range(steps[-1] + 1, 20), store=store, resume=True)
        assert check(path, store, 19) == wanted(19)
        if store == "gradients":
            rows = os.listdir(path / "rank00000" / "gradient" / "c")
            assert len(rows) == len(wanted(19))
        die += 17
    assert die > 60


def test_a_chunk_of_numbers_that_is_damaged_is_not_written_anew(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = TraceWriter(path, 0, kinds=KINDS, expected_steps=64)
    for step in range(70):
        writer.append(step, {k: gradient(step, 0, k) for k in KINDS})
    chunk = path / "rank00000" / "step" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[80] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(TraceError, match=r"cannot remove step 3 .*checksum"):
        writer.remove(3)
    assert chunk.read_bytes() == bytes(data)


def test_rows_of_failed_steps_do_not_hide_the_step_to_remove(tmp_path, monkeypatch):
    path = tmp_path / "run.zarr"
    create_trace(path, LAYERS)
    writer = TraceWriter(path, 0, expected_steps=64)
    writer.append(5, {"gradient": gradient(5)})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_put_gradient", full)
        for step in (10, 7):
            with pytest.raises(TraceError, match="No space"):
                writer.append(step, {"gradient": gradient(step)})
    for step in (7, 8, 20):
        writer.append(step, {"gradient": gradient(step)})
    for step in (6, 10):
        with pytest.raises(InputError, match=f"no step {step} to remove"):
            writer.remove(step)
    writer.remove(7)
    # taken up again, with rows between those of 5 and 8 that are not committed
    writer = TraceWriter(path, 0, expected_steps=64, resume=True)
    for step in (5, 8):
        writer.remove(step)
    writer.close()
    trace = open_trace(path)
    assert trace.steps() == [20]
    assert np.array_equal(trace.read(20), gradient(20))
