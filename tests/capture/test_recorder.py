"""A step's life, without a training: begun, copied, sent, and committed, dropped or skipped."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from capture.recorder import CaptureWarning, Contents, Phase, Recorder, Storage
from capture.schedule import Schedule, every, recent
from capture.writer import ThinningWriter
from gradstats import open_trace
from gradstats.trace import Layer, TraceWriter, create_trace

CONTENTS = Contents(("gradient",), frozenset({torch.device("cpu")}))
WHOLE = slice(0, 3)


@pytest.fixture
def asked():
    """Numbers of the steps that the schedule was asked for."""
    return []


@pytest.fixture
def recorder(tmp_path, asked):
    path = tmp_path / "a.zarr"
    create_trace(path, [Layer("w", 0, (3,))], world_size=1)
    schedule = Schedule(lambda step: asked.append(step) or step != 1, "all but one", known=False)
    storage = Storage(path, 0, "gradients", "float32", False, 4, None)
    made = Recorder(storage, schedule, 0, None, True)
    yield made
    made.close()


def begin(recorder, value):
    recorder.begin(lambda: CONTENTS, recorder.wanted())
    recorder.copy("gradient", WHOLE, torch.full((3,), value))


def test_only_what_the_schedule_wants_and_the_training_sent_is_stored(recorder, asked):
    assert recorder.phase is Phase.IDLE
    for step in range(4):
        begin(recorder, float(step))
        assert recorder.phase is Phase.OPEN
        assert bool(recorder.arrays) == (step != 1)
        recorder.sent()
        assert recorder.phase is Phase.SENT
        recorder.commit(loss=10.0 * step, learning_rate=0.5)
        assert recorder.phase is Phase.IDLE
        assert not recorder.arrays
    recorder.close()
    assert not recorder.active
    trace = open_trace(recorder.storage.path)
    assert asked == [0, 1, 2, 3]
    assert trace.steps() == [0, 2, 3]
    assert [trace.read(step)[0] for step in trace.steps()] == [0, 2, 3]
    assert trace.scalars()["loss"].tolist() == [0, 20, 30]


def test_a_dropped_step_does_not_count_and_a_skipped_one_does(recorder):
    begin(recorder, 7.0)
    recorder.drop()
    begin(recorder, 1.0)
    recorder.commit()
    recorder.skip()  # step 1
    begin(recorder, 2.0)
    recorder.skip()  # step 2, with what had come of it
    begin(recorder, 3.0)
    recorder.commit()
    recorder.close()
    trace = open_trace(recorder.storage.path)
    assert trace.steps() == [0, 3]
    assert np.array_equal(trace.read(0), np.ones(3))
    assert np.array_equal(trace.read(3), np.full(3, 3.0))


def test_a_step_with_a_loss_that_is_no_number_goes_on(recorder):
    begin(recorder, 1.0)
    recorder.sent()
    with pytest.warns(CaptureWarning, match="takes one number, not 'high'"):
        recorder.commit(loss="high")
    assert recorder.phase is Phase.IDLE
    for loss in (1.0, 2.0):  # step 1 is not recorded
        begin(recorder, loss)
        recorder.sent()
        recorder.commit(loss=loss)
    recorder.close()
    assert np.nan_to_num(open_trace(recorder.storage.path).scalars()["loss"]).tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("schedule", "total", "first", "keep", "rows", "room"),
    [
        (every(10), 100, 0, None, 10, 10),
        (every(10), 100, 40, None, 6, 6),  # a resumed run
        (every(100), None, 0, 200, None, 2),
        (every(100), None, 300, 200, None, 2),
        (every(1), 100, 90, 200, 10, 10),
        (Schedule(lambda step: True, "asked", known=False), 500, 0, 200, None, 200),
        (every(10), 5, 20, None, 1, 1),  # longer than was said
    ],
)
def test_as_many_steps_are_expected_as_come(tmp_path, schedule, total, first, keep, rows, room):
    path = tmp_path / "a.zarr"
    create_trace(path, [Layer("w", 0, (3,))], world_size=1)
    kept = None if keep is None else recent(keep)
    storage = Storage(path, 0, "gradients", "float32", False, 4, total, kept)
    made, asked = Recorder(storage, schedule, first, None, True), []
    made.room = SimpleNamespace(problem=lambda path, size, steps: asked.append(steps))
    with (
        patch("capture.recorder.TraceWriter", wraps=TraceWriter) as plain,
        patch("capture.recorder.ThinningWriter", wraps=ThinningWriter) as thinning,
    ):
        begin(made, 1.0)
    made.drop()
    made.close()
    (call,) = (plain if keep is None else thinning).call_args_list
    assert (call.kwargs["expected_steps"], asked) == (rows, [room])


@pytest.mark.parametrize(("dtype", "size"), [("float32", 24), ("bfloat16", 12)])
def test_a_step_takes_what_its_kinds_hold(tmp_path, dtype, size):
    path = tmp_path / "a.zarr"
    create_trace(path, [Layer("w", 0, (3,))], world_size=1)
    storage = Storage(path, 0, "gradients", dtype, False, 4, None)
    made, asked = Recorder(storage, every(1), 0, None, True), []
    made.room = SimpleNamespace(problem=lambda path, size, steps: asked.append(size))
    made.begin(lambda: Contents(("gradient", "corrected"), CONTENTS.devices), True)
    made.drop()
    made.close()
    assert asked == [made.bytes] == [size]


def test_kinds_that_are_not_written_are_not_copied(recorder):
    begin(recorder, 1.0)
    recorder.copy("corrected", WHOLE, torch.full((3,), 9.0))
    assert list(recorder.arrays) == ["gradient"]
    assert recorder.arrays["gradient"].tolist() == [1, 1, 1]
    recorder.drop()
