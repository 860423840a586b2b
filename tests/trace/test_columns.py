"""What the ranks that hold the shards of a gradient say together, column by column."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.every import every
from support.traces import LAYERS, gradient, held, shards_of, write_shards

from gradstats.errors import TraceError
from gradstats.hooks import Diagnosis, StepRecord
from gradstats.trace import COMPRESSION, KINDS, TraceWriter, create_trace, open_trace
from gradstats.trace.columns import COUNTS, OF_LAYERS, OF_RUN, OF_STEPS
from gradstats.trace.record import together

EXPECTED = {
    **dict.fromkeys(("zeros", "nonfinite", "target", "numel", "bytes_sent", "union"), 7.0),
    **dict.fromkeys(("select_seconds", "communicate_seconds", "overlapped_seconds"), 4.0),
    "residual_norm": 5.0,
    "matching_rate": np.nan,
    "threshold": np.nan,
    "delta": np.nan,
}


@every("column", [*COUNTS, *OF_RUN, *OF_STEPS, *OF_LAYERS], ids=lambda c: c.name)
def test_every_column_says_how_it_adds_up(column):
    if column.joined is None:
        assert column.name in ("loss", "learning_rate")  # every rank has the whole's
        return
    parts = np.array([[3.0], [4.0]])
    np.testing.assert_array_equal(column.joined(parts), [EXPECTED.get(column.name, 7.0)])
    if column.name == "threshold":
        assert column.joined(np.array([2.0, 2.0])) == 2.0
    if column in OF_RUN and column.name == "selected":
        assert column.joined(np.array([3, -1])) == -1


def test_columns_are_what_compressors_record():
    known = {f.name for cls in (StepRecord, Diagnosis) for f in dataclasses.fields(cls)}
    assert {column.name for column in OF_STEPS} <= known


def test_records_of_parts_of_a_model_add_up_and_have_no_threshold_in_common():
    numbers = {"selected": 3, "numel": 100, "bytes_sent": 96, "target": 2, "union": 5}
    numbers |= {"select_seconds": 0.25, "communicate_seconds": 1.0, "overlapped_seconds": 0.5}
    one = StepRecord(4, 0.5, **numbers)
    other = StepRecord(9, 0.5, **{name: 10 * n for name, n in numbers.items()}, problem="bad")
    for parts in ([one, other], [other, one]):
        whole = dataclasses.asdict(together(parts, 12))
        # one number stands for no two thresholds, which may differ in the next step
        assert math.isnan(whole.pop("threshold"))
        expected = {name: 11 * n for name, n in numbers.items()}
        assert whole == {"step": 12, **expected, "problem": "bad"}
    assert together([one], 7) == dataclasses.replace(one, step=7)


def test_a_trace_of_shards_has_the_whole_of_each(tmp_path):
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=2)
    for rank in (0, 1):
        write_shards(
            tmp_path / "run.zarr", range(4), rank=rank, world=2, kinds=KINDS, compression=True
        )
    trace = open_trace(tmp_path / "run.zarr")
    steps = np.arange(4)
    assert (trace.scalars(0)["selected"] == 2 * steps).all()
    assert (trace.scalars(0)["loss"] == steps / 2).all()
    together = trace.compression(0)
    for i, column in enumerate(OF_STEPS[:-1]):
        each = steps + i / 4
        expected = column.joined(np.stack([each, each]))
        np.testing.assert_allclose(together[column.name], expected, rtol=1e-12)


def test_a_step_that_lies_in_another_row_of_each_rank_is_added_up_all_the_same(
    tmp_path, monkeypatch
):
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=2)
    original = TraceWriter._put

    def full(self, name, row, value):
        if name == "selected":
            raise OSError(28, "No space left on device")
        original(self, name, row, value)

    for rank in (0, 1):
        shards = shards_of(rank, 2)
        writer = TraceWriter(
            tmp_path / "run.zarr", rank, compression=True, shards=shards, shard_ranks=range(2)
        )
        for step in range(4):
            arrays = {"gradient": held(gradient(step), shards)}
            columns = dict.fromkeys(COMPRESSION, 10.0**rank * step)
            if rank and step == 1:  # its row is left
                monkeypatch.setattr(TraceWriter, "_put", full)
                with pytest.raises(TraceError, match="No space left"):
                    writer.append(step, arrays, compression=columns)
                monkeypatch.setattr(TraceWriter, "_put", original)
            writer.append(step, arrays, compression=columns)
        writer.close()
    trace = open_trace(tmp_path / "run.zarr")
    assert trace.compression(0)["bytes_sent"].tolist() == [0, 11, 22, 33]
    for step in range(4):
        assert np.array_equal(trace.read(step), gradient(step))
