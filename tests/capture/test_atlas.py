"""``gradstats atlas``: a piece is recorded once, alike each time, and the page is made of the records."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.terminal import run

from capture import atlas
from gradstats import open_trace
from gradstats.errors import InputError
from gradstats.report.atlas import atlas_page


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(atlas, "STEPS", 4)
    late = {"late": range(2, 4)}
    monkeypatch.setattr(atlas, "_WHOLE", atlas._WHOLE._replace(phases=late))
    settings = atlas._LOCAL.settings | {"local_steps": 1}
    monkeypatch.setattr(atlas, "_LOCAL", atlas._LOCAL._replace(settings=settings, phases=late))


@pytest.mark.distributed
@pytest.mark.slow
def test_a_piece_is_recorded_once_and_alike_each_time(tmp_path, short):
    piece = ("--only", "policy-cartpole/sgd")
    done = run("atlas", "--out", tmp_path / "a", *piece, "--keep", "--page", tmp_path / "a.md")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "a" / "atlas.jsonl"
    before = file.read_text()
    records = atlas.read_records(file)
    kinds = ["gradient", "corrected", "update"]
    assert [(r["kind"], r["phase"]) for r in records] == [
        (kind, "late") for kind in (*kinds, "pseudogradient")
    ]
    series = atlas.read_records(tmp_path / "a" / "atlas-steps.jsonl")
    assert [(r["kind"], r["steps"]) for r in series] == [(kind, [0, 1, 2, 3]) for kind in kinds]
    trace = open_trace(tmp_path / "a" / "policy-cartpole-sgd.zarr")
    assert (trace.steps(), trace.ranks) == ([2, 3], [0, 1])
    zeros = float((trace.read(2, 0, "update") == 0).mean())
    assert records[2]["zeros"] == pytest.approx(zeros, rel=1e-4)
    # the second training is the first one again, seen in every step
    assert series[2]["zeros"][2] == records[2]["zeros"]
    exchanged = open_trace(tmp_path / "a" / "policy-cartpole-sgd-local.zarr")
    assert (exchanged.kinds(0), exchanged.steps()) == (["pseudogradient"], [2, 3])
    # most of an update is what top-k sent of two ranks, and the momentum of what it sent before
    assert 0.5 < zeros < 1
    page = (tmp_path / "a.md").read_text()
    assert page == atlas_page(records, series, atlas.PIECES, 4)
    assert "1 of 37 trainings are measured" in " ".join(page.split())
    assert run("atlas", "--out", tmp_path / "a", *piece).returncode == 0
    assert file.read_text() == before  # skipped
    assert run("atlas", "--out", tmp_path / "b", *piece).returncode == 0
    assert (tmp_path / "b" / "atlas.jsonl").read_text() == before  # rebuilt bit for bit
    assert not (tmp_path / "b" / "policy-cartpole-sgd.zarr").exists()


def test_phases_are_of_one_length_and_the_last_ends_the_training():
    exchanges = atlas.STEPS // atlas._LOCAL.settings["local_steps"]
    for part, end in ((atlas._WHOLE, atlas.STEPS), (atlas._LOCAL, exchanges)):
        phases = [[*steps] for steps in part.phases.values()]
        assert [*part.phases] == ["early", "middle", "late"]
        assert len({len(steps) for steps in phases}) == 1
        assert phases == sorted(phases)
        assert len({step for steps in phases for step in steps}) == sum(map(len, phases))
        assert phases[-1][-1] == end - 1


def test_pieces_are_chosen_by_training_optimizer_or_both():
    assert [*atlas._chosen(None)] == [*atlas.PIECES]
    assert [*atlas._chosen(["gpt-pydoc"])] == [
        f"gpt-pydoc/{o}" for o in ("sgd", "adamw", "muon", "adamw-bf16")
    ]
    assert len([*atlas._chosen(["muon", "gpt-pydoc/sgd"])]) == 13
    with pytest.raises(InputError, match="no piece 'gpt-pydoc/lion'"):
        [*atlas._chosen(["gpt-pydoc/lion"])]


def test_every_piece_is_a_training_that_there_is(tmp_path):
    from capture.workloads import RunConfig

    for training in atlas.TRAININGS:
        folder = tmp_path / str(atlas.TRAININGS[training].get("data_dir", ""))
        folder.mkdir(exist_ok=True)
        for name in ("data_batch_1.bin", "manifest.tsv"):
            (folder / name).touch()
    for piece in atlas.PIECES:
        RunConfig(**atlas.settings_of(piece, tmp_path)).check()
    with pytest.raises(InputError, match="reads an4/: name the folder that it is in"):
        atlas.settings_of("lstm-an4/sgd")


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    file = tmp_path / "atlas.jsonl"
    assert atlas.read_records(file) == []
    file.write_text(json.dumps({"piece": "a"}) + "\n" + '{"piece": "b", "num')
    assert atlas.read_records(file) == [{"piece": "a"}]


def test_numbers_are_short_json():
    found = atlas._short(
        {"a": np.float64(1.23456789), "b": float("nan"), "c": np.int64(3), "d": True}
    )
    assert found == {"a": 1.2346, "b": None, "c": 3, "d": True}
    assert json.dumps(found)
