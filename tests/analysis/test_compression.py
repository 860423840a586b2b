"""What a compressor did, from its state to the trace, the table and the terminal."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from conftest import DATA
from ranks import run_ranks
from support.terminal import main
from workers import layerwise as cases

import gradstats
from gradstats.trace import COMPRESSION, Layer, TraceWriter, create_trace


def run(*arguments):
    """Run the terminal program; return its exit code."""
    with pytest.raises(SystemExit) as exited:
        main([str(a) for a in arguments])
    return exited.value.code


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["topk", "layerwise"])
def test_the_trace_holds_what_the_state_said(tmp_path, name, capsys):
    path = tmp_path / "run.zarr"
    said = run_ranks(2, cases.captured, str(path), name)
    trace = gradstats.open_trace(path)
    records = gradstats.compression(trace)
    assert [(r["rank"], r["step"]) for r in records] == [(r, s) for r in range(2) for s in range(5)]
    for record in records:
        last, diagnosis = said[record["rank"]][record["step"]]
        assert record["selected"] == last.selected
        assert record["quality"] == last.quality == last.selected / last.target
        assert record["build_up"] == last.build_up == last.union / last.target
        assert record["bytes"] == last.bytes_sent
        assert record["bits_per_element"] == 8 * last.bytes_sent / last.numel
        assert record["density"] == last.density == last.union / last.numel
        assert record["communicate"] == last.communicate_seconds
        if diagnosis is None:
            assert math.isnan(record["residual_norm"])
            assert math.isnan(record["error_norm"])
        else:
            norms = [said[rank][record["step"]][1].residual_norm for rank in range(2)]
            assert record["residual_norm"] == norms[record["rank"]]
            assert record["error_norm"] == np.mean(norms)
            assert record["matching_rate"] == diagnosis.matching_rate
    layers = gradstats.compression(trace, per_layer=True)
    assert {r["step"] for r in layers} == {0, 3}
    assert [r["layer"] for r in layers[:5]] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "4.weight",
    ]
    for record in layers:
        diagnosis = said[record["rank"]][record["step"]][1]
        place = diagnosis.layers.index(record["layer"])
        assert record["delta"] == pytest.approx(diagnosis.delta[place], nan_ok=True)
        assert (record["selected"], record["target"]) == (
            diagnosis.selected[place],
            diagnosis.target[place],
        )
    assert run("compression", path, "--per-layer", "--format", "json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [r["layer"] for r in printed] == [r["layer"] for r in layers]
    assert run("compression", path) == 0
    assert "build" in capsys.readouterr().out


def test_runs_without_a_compressor_say_so(tmp_path, capsys):
    path = tmp_path / "plain.zarr"
    create_trace(path, [Layer("w", 0, (3,))])
    writer = TraceWriter(path, 0, compression=True)
    writer.append(0, {"gradient": np.ones(3, np.float32)})
    writer.close()
    trace = gradstats.open_trace(path)
    assert set(trace.compression()) == set(COMPRESSION)
    assert gradstats.compression(trace) == gradstats.compression(trace, per_layer=True) == []
    assert run("compression", path) == 2
    assert capsys.readouterr().err.strip().endswith("holds no steps of a gradstats compressor")
    # info names this one's compressor
    assert run("compression", DATA / "resnet20-ef.zarr") == 2
    assert "does not hold what its compressor, topk, did: capture.wrap" in capsys.readouterr().err


def test_a_damaged_column_is_one_line(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("w", 0, (3,))])
    writer = TraceWriter(path, 0, compression=True)
    writer.append(0, {"gradient": np.ones(3, np.float32)}, selected=1, compression={"target": 1})
    writer.close()
    chunk = path / "rank00000" / "compression" / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(gradstats.TraceError, match="compression of rank 0 is damaged"):
        gradstats.compression(gradstats.open_trace(path))
