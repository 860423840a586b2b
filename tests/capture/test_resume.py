"""Reference runs that are stopped and go on: the same numbers to the last bit, and what cannot go on."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import gradstats
from capture import Capture, CaptureWarning
from capture.workloads import RunConfig, run
from capture.workloads.launch import RunFailedError
from capture.workloads.resume import result_so_far
from capture.workloads.training import _train
from gradstats import open_trace
from gradstats.compressors import TopK
from gradstats.errors import InputError
from gradstats.hooks import ErrorFeedback, LocalSteps

BASE = RunConfig(workload="resnet20-digits", steps=6, batch_size=8, ratio=0.01, diagnose_every=2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("compressor", ["dgc", "sidco-e"])
def test_a_run_goes_on_bit_for_bit(tmp_path, compressor):
    whole = run(BASE.replace(compressor=compressor))
    kept = BASE.replace(compressor=compressor, checkpoint=tmp_path / "run", checkpoint_every=2)
    assert result_so_far(tmp_path / "run") is None
    run(kept)
    # one rank was stopped before its last checkpoint was there: both go on from the one before
    files = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert sorted(files) == ["step6-rank0.pt", "step6-rank1.pt"]
    step, result = result_so_far(tmp_path / "run")
    assert step == 6
    assert result.losses == whole.losses
    kept = kept.replace(checkpoint_every=4)
    for path in files.values():
        path.unlink()
    run(kept)
    (tmp_path / "run" / "step5-rank0.pt").write_bytes(b"not needed")
    again = run(kept)  # from step 4
    assert again.losses == whole.losses
    assert again.checksum == whole.checksum
    assert [r["step"] for r in again.records] == [r["step"] for r in whole.records]
    assert [d["step"] for d in again.diagnoses] == [d["step"] for d in whole.diagnoses]
    assert all(math.isfinite(s) for s in again.seconds)
    assert len(again.seconds) == 6


@pytest.mark.slow
@pytest.mark.distributed
def test_a_capture_goes_on_beside_what_there_is(tmp_path):
    settings = {"compressor": "topk", "every": 1, "ranks": (0,), "diagnose_every": 0}
    run(BASE.replace(**settings, out=tmp_path / "whole.zarr"))
    kept = BASE.replace(**settings, checkpoint=tmp_path / "run", checkpoint_every=4)
    for _ in range(2):
        run(kept.replace(out=tmp_path / "parts.zarr"))
    whole = gradstats.open_trace(tmp_path / "whole.zarr")
    again = gradstats.open_trace(tmp_path / "parts-2.zarr")
    assert list(gradstats.open_trace(tmp_path / "parts.zarr").steps()) == list(range(6))
    assert list(again.steps()) == [4, 5]
    for kind in ("gradient", "corrected"):
        assert np.array_equal(again.read(5, kind=kind), whole.read(5, kind=kind))


@pytest.mark.slow
@pytest.mark.distributed
def test_other_settings_and_damaged_checkpoints_are_one_line(tmp_path):
    kept = BASE.replace(compressor="topk", checkpoint=tmp_path, checkpoint_every=2, steps=2)
    run(kept)
    with pytest.raises(RunFailedError, match="a run with other settings"):
        run(kept.replace(ratio=0.02))
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFailedError, match=r"cannot read .*step2-rank\d\.pt; remove it"):
        run(kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"local_steps": 2}, "without local steps"),
        ({"compressor": "powersgd", "diagnose_every": 0}, "powersgd is not resumed"),
        ({"compressor": "no-exchange", "diagnose_every": 0}, "no-exchange is not resumed"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        BASE.replace(checkpoint=tmp_path, **changes).check()


def test_a_text_is_read_on_and_traces_are_told_apart(tmp_path, one_rank):
    """What an LSTM carries from window to window is in the checkpoint; a run that is repeated loses no trace."""

    def trained(**settings):
        torch.manual_seed(0)
        return _train(config.replace(**settings))

    config = RunConfig(workload="lstm-pydoc", nproc=1, steps=3, batch_size=2, hidden=8, vocab=20)
    config = config.replace(every=1, compressor="topk", ratio=0.1, evaluate=False)
    whole = trained()
    assert whole.trace == ""
    out = tmp_path / "run.zarr"
    kept = {"checkpoint": tmp_path / "run", "out": out, "checkpoint_every": 4}
    assert trained(**kept).trace == str(out)
    kept["checkpoint_every"] = 2
    with pytest.warns(CaptureWarning, match=r"run-2\.zarr"):  # the one before had no checkpoint
        assert trained(**kept).trace == str(tmp_path / "run-2.zarr")
    with pytest.warns(CaptureWarning, match=r"run-3\.zarr"):
        again = trained(**kept)  # from step 2
    assert again.losses == whole.losses
    assert again.checksum == whole.checksum
    assert again.trace == str(tmp_path / "run-3.zarr")
    assert list(gradstats.open_trace(again.trace).steps()) == [2]
    kept["checkpoint_every"] = 1
    with pytest.warns(CaptureWarning, match=r"run-4\.zarr"):
        trained(**kept)  # to the end
    assert trained(**kept).trace == str(tmp_path / "run-4.zarr")  # nothing is left to capture
    assert not (tmp_path / "run-5.zarr").exists()
    assert trained(**kept | {"checkpoint": tmp_path / "new"}, overwrite=True).trace == str(out)


def test_every_checkpoint_says_how_good_the_model_was(tmp_path, one_rank):
    raw = np.random.default_rng(1).integers(0, 256, (60, 3073), np.uint8)
    raw[:, 0] %= 10
    raw[:40].tofile(tmp_path / "data_batch_1.bin")
    raw[40:].tofile(tmp_path / "test_batch.bin")
    config = RunConfig(
        workload="resnet20-cifar10", data_dir=tmp_path, nproc=1, batch_size=4, steps=4
    )
    config = config.replace(compressor="topk", checkpoint=tmp_path / "run", checkpoint_every=2)
    result = _train(config)
    assert [each["step"] for each in result.evaluations] == [2, 4]
    # of twenty unseen images
    assert all(20 * each["accuracy"] in range(21) for each in result.evaluations)
    assert result.accuracy == result.evaluations[-1]["accuracy"]
    config = config.replace(checkpoint=tmp_path / "other", evaluate=False)
    without = _train(config)
    assert without.evaluations == []
    assert math.isnan(without.accuracy)


def test_local_steps_resumed_within_an_interval_are_recorded_as_they_would_have_been(
    tmp_path, one_rank
):
    def trained(path, steps, state=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        batches = torch.randn(18, 8, 5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        local = LocalSteps(
            model, optimizer, steps=4, compressor=TopK(0.2), memory=ErrorFeedback(), fragments=2
        )
        if state is not None:
            model.load_state_dict(state[0])
            local.load_state_dict(state[1])
        saved = {}
        with Capture(path, model, start_step=local.exchanges) as capture:
            capture.follow(local)
            with local:
                for step in steps:
                    if step in (8, 10):  # at an exchange of both fragments, and between them
                        parts = copy.deepcopy((model.state_dict(), local.state_dict()))
                        saved[step] = parts
                    optimizer.zero_grad()
                    model(batches[step]).square().mean().backward()
                    capture.step()
                    optimizer.step()
        return open_trace(path), saved

    whole, saved = trained(tmp_path / "whole.zarr", range(18))
    at_exchange, _ = trained(tmp_path / "8.zarr", range(8, 18), saved[8])
    said = "^0.weight is NaN in the trace: the capture began within an interval"
    with pytest.warns(CaptureWarning, match=said):
        between, _ = trained(tmp_path / "10.zarr", range(10, 18), saved[10])
    assert whole.steps()[-1] == at_exchange.steps()[-1] == between.steps()[-1]
    for kind in whole.kinds(0):
        for step in at_exchange.steps():
            assert np.array_equal(at_exchange.read(step, kind=kind), whole.read(step, kind=kind))
        first, *later = between.steps()
        known = ~np.isnan(between.read(first, kind=kind))
        assert known.tolist() == [False] * 20 + [True] * 19
        assert np.array_equal(
            between.read(first, kind=kind)[known], whole.read(first, kind=kind)[known]
        )
        for step in later:
            assert np.array_equal(between.read(step, kind=kind), whole.read(step, kind=kind))
