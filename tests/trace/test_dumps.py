"""What people have: files of a step each, lists, shards, checkpoints of DCP; and a trace of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import warnings
from pathlib import PosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.terminal import run

from gradstats import open_trace, quality
from gradstats.errors import GradstatsError, InputError
from gradstats.trace.dumps import Dumps, _Unpickler, dumps_of
from gradstats.trace.imports import import_dumps
from gradstats.trace.sources import open_source, open_sources


def step(i):
    g = torch.Generator().manual_seed(i)
    return {
        "fc.weight": torch.randn(7, 5, generator=g),
        "fc.bias": torch.randn(5, generator=g),
    }


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors.values()]).numpy()


def imported(tmp_path, *paths, **options):
    out = tmp_path / "out.zarr"
    import_dumps(Dumps(dumps_of(paths, **options), "x"), out)
    return open_trace(out)


def test_a_folder_of_steps_becomes_a_trace_and_is_a_source(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    for i in (0, 5, 10, 100):
        torch.save(step(i), folder / f"grad{i}.pt")
    (folder / "notes.txt").touch()
    trace = imported(tmp_path, folder)
    assert trace.steps() == [0, 5, 10, 100]
    assert [la.name for la in trace.layers] == ["fc.weight", "fc.bias"]
    assert np.array_equal(trace.read(100), flat(step(100)))
    (source,) = open_sources(folder)
    assert [key[2] for key in source.entries()] == [0, 5, 10, 100]
    assert [key[2] for key in open_source(str(folder)).entries()] == [0, 5, 10, 100]
    # of a folder with traces one has to be named
    import_dumps(Dumps(dumps_of([folder]), "x"), folder / "inside.zarr")
    with pytest.raises(GradstatsError, match="dumps is not a gradstats trace"):
        open_source(folder)
    assert quality(source, [0.1], ["exact"])[0]["n"] == 4


def test_numbers_of_names_are_asked_for_where_they_are_in_doubt(tmp_path):
    for rank in (0, 1):
        for i in (1, 2):
            torch.save(step(10 * rank + i), tmp_path / f"v2_step{i}_r{rank}.pt")
    with pytest.raises(InputError, match=r"several numbers: .*--step-from-name"):
        dumps_of([tmp_path])
    with pytest.raises(InputError, match="does not fit"):
        dumps_of([tmp_path], "step_{step}.pt")
    with pytest.raises(InputError, match="both step"):
        Dumps(dumps_of([tmp_path], "step{step}_"), "x")
    with pytest.raises(InputError, match=r"must have .step."):
        dumps_of([tmp_path], "step")
    trace = imported(tmp_path, tmp_path, pattern="step{step}_r{rank}.pt")
    assert trace.ranks == [0, 1]
    assert trace.world_size == 2
    assert np.array_equal(trace.read(2, 1), flat(step(12)))
    for name in ("a.pt", "b.pt"):
        torch.save(step(0), tmp_path / name)
    with pytest.raises(InputError, match="no number"):
        dumps_of([tmp_path / "a.pt", tmp_path / "b.pt"])
    assert dumps_of([tmp_path / "a.pt"])[0].key == (0, 0)
    assert dumps_of([tmp_path / "v2_step1_r0.pt"])[0].key == (0, 0)
    for name in ("step1-rank0.pt", "step1-rank3.pt"):
        torch.save(step(0), tmp_path / name)
    named = dumps_of([tmp_path / "step1-rank0.pt", tmp_path / "step1-rank3.pt"])
    assert [d.key for d in named] == [(0, 1), (3, 1)]


def test_lists_of_steps_and_of_layers(tmp_path):
    torch.save([step(0), step(1)], tmp_path / "steps.pt")
    trace = imported(tmp_path, tmp_path / "steps.pt")
    assert trace.steps() == [0, 1]
    assert np.array_equal(trace.read(1), flat(step(1)))
    torch.save(list(step(3).values()), tmp_path / "layers.pt")
    one = Dumps(dumps_of([tmp_path / "layers.pt"]), "x")
    assert [la.name for la in one.layers] == ["0", "1"]
    torch.save([torch.ones(4), torch.zeros(4)], tmp_path / "doubt.pt")
    with pytest.raises(InputError, match="--list steps or --list layers"):
        dumps_of([tmp_path / "doubt.pt"])
    assert len(dumps_of([tmp_path / "doubt.pt"], lists="steps")) == 2
    assert len(dumps_of([tmp_path / "doubt.pt"], lists="layers")) == 1
    with pytest.raises(InputError, match="gradstats import"):
        open_source(tmp_path / "layers.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_safetensors_and_dcp(tmp_path):
    import torch.distributed.checkpoint as dcp

    for number in (100, 200):
        folder = tmp_path / "runs" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        tensors = step(number)
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for name, (key, value) in zip(names, tensors.items(), strict=True):
            save_file({key: value}, folder / name)
        index = {"weight_map": dict(zip(tensors, names, strict=True))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    trace = imported(tmp_path, tmp_path / "runs")
    assert trace.steps() == [100, 200]
    assert np.array_equal(trace.read(200), flat(step(200)))
    # wherever one source is asked for, too, of a path
    assert quality(tmp_path / "runs", [0.1], ["exact"])[0]["n"] == 2
    (source,) = open_sources(tmp_path / "runs" / "checkpoint-100")
    assert np.array_equal(source.read(*source.entries()[0]).values, flat(step(100)))

    dcp.save({"model": step(7), "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (source,) = open_sources(tmp_path / "dcp")
    assert [la.name for la in source.layers] == ["fc.weight", "fc.bias"]
    assert np.array_equal(source.read(0, "gradient", 0).values, flat(step(7)))
    assert "epoch" in source.remark


W = torch.linspace(-1, 1, 12)
BUFFERS = {
    "module.fc.weight": W,
    "module.bn.running_var": 1000 * W,
    "module.bn.num_batches_tracked": torch.tensor(3),
    "none": torch.empty(0),
    "loss": torch.tensor(2.5),
}
MODEL_AND_OPTIMIZER = {"model": BUFFERS, "optim": {"state": {"fc.weight": {"exp_avg": W}}}}


def outcome(path):
    """Return what is imported from a path, or the error, without its name."""
    try:
        source = Dumps(dumps_of([path]), "x")
    except InputError as error:
        return str(error).replace(str(path), "PATH")
    values = source.read(0, "gradient", 0).values.tolist()
    return source.layers, values, source.remark.replace(f"of {path.name}", "of NAME")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_is_read_like_a_file_of_the_same_state_dict(tmp_path):
    import torch.distributed.checkpoint as dcp

    cases = {
        "buffers": BUFFERS,
        "duplicates": {"module.w": W, "w": W},
        "dictionaries": MODEL_AND_OPTIMIZER,
        "one": {"model": BUFFERS, "lists": [W, W]},
        "dots": {"model.w": W, "optim.w": W},
        "beside": {"model": {"w": W}, "loss": torch.tensor(2.5)},
        "list": {"w": W, "more": [W, W]},
        "whole": {"w": torch.arange(3)},
        "complex": {"w": torch.complex(W, W), "b": W},
    }
    got = {}
    for name, state in cases.items():
        torch.save(state, tmp_path / f"{name}.pt")
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        got[name] = outcome(tmp_path / name)
        assert got[name] == outcome(tmp_path / f"{name}.pt"), name
    layers, values, remark = got["buffers"]
    assert [la.name for la in layers] == ["fc.weight"]
    assert values == W.tolist()
    assert remark == (
        "left out of NAME, as no gradients: loss (a single number), module.bn.num_batches_tracked, "
        "module.bn.running_var, none (empty)"
    )
    assert "one layer" in got["duplicates"]
    assert "give one of them: PATH:model (5 tensors), PATH:optim.state" in got["dictionaries"]
    assert got["one"][:2] == got["buffers"][:2]
    assert "lists (a list)" in got["one"][2]
    assert [la.name for la in got["dots"][0]] == ["model.w", "optim.w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dictionary_is_chosen_in_every_checkpoint_of_a_folder(tmp_path):
    import torch.distributed.checkpoint as dcp

    for i in (1, 2):
        state = {"model": step(i), "optim": step(10 + i)}
        torch.save(state, tmp_path / f"step_{i}.pt")
        dcp.save(state, checkpoint_id=tmp_path / "runs" / f"step_{i + 2}", no_dist=True)
    one = open_source(f"{tmp_path}/runs/step_3:optim")
    assert one.name == "step_3:optim"
    assert np.array_equal(one.read(0, "gradient", 3).values, flat(step(11)))
    with pytest.raises(InputError, match=r"'modle'; there are model, optim; did you mean model"):
        open_source(f"{tmp_path}/runs/step_3:modle")
    for i, folder in ((1, tmp_path), (3, tmp_path / "runs")):
        with pytest.raises(
            InputError, match=rf"give one of them: .*step_{i}\S*:model \(2 tensors\)"
        ):
            open_source(folder)
        source = open_source(f"{folder}/:model")
        assert source.name == f"{folder.name}:model"
        assert [s for _, _, s in source.entries()] == [i, i + 1]
        assert np.array_equal(source.read(0, "gradient", i + 1).values, flat(step(2)))
    torch.save([state, state], tmp_path / "list.pt")
    done = run("import", tmp_path / "list.pt:optim", "--out", tmp_path / "list.zarr")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(open_trace(tmp_path / "list.zarr").read(1), flat(step(12)))
    np.savez(tmp_path / "runs" / "step_0.npz", w=W)
    with pytest.raises(InputError, match=r"step_0.npz holds no dictionaries: leave out :model"):
        open_source(f"{tmp_path}/runs:model")


def test_a_step_of_a_list_is_read_like_a_file(tmp_path):
    (tmp_path / "lists").mkdir()
    for name, state in {
        "buffers": BUFFERS,
        "none": {"w": W, "bias": None},
        "duplicates": {"module.w": W, "w": W},
        "whole": {"w": torch.arange(3)},
        "several": {"model": {"w": W}, "optim": {"w": W}},
    }.items():
        torch.save(state, tmp_path / f"{name}.pt")
        torch.save([state], tmp_path / "lists" / f"{name}.pt")
        both = [outcome(folder / f"{name}.pt") for folder in (tmp_path, tmp_path / "lists")]
        assert both[0] == both[1], name
    # of layers, too
    torch.save([W, torch.tensor(3), torch.ones(2)], tmp_path / "layers.pt")
    source = Dumps(dumps_of([tmp_path / "layers.pt"]), "x")
    assert [la.name for la in source.layers] == ["0", "2"]
    assert source.remark == "left out of layers.pt, as no gradients: 1"


def test_reading_dcp_warns_of_no_process_group_no_more(tmp_path):
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.save(step(0), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_source(tmp_path / "dcp")
    assert not [w for w in caught if "torch.distributed" in str(w.message)]


def test_the_index_of_dcp_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match=r"cannot read .*mkdir, which no index needs"):
        open_sources(tmp_path / "dcp")
    assert not (tmp_path / "owned").exists()


def test_an_index_of_dcp_may_be_of_another_python():
    for module in (b"pathlib", b"pathlib._local"):
        index = io.BytesIO(b"c" + module + b"\nPosixPath\n.")
        assert _Unpickler(index).load() is PosixPath


def test_other_layers_and_other_traces_are_refused(tmp_path):
    torch.save(step(0), tmp_path / "g0.pt")
    torch.save(step(1) | {"more": torch.ones(3)}, tmp_path / "g1.pt")
    with pytest.raises(InputError, match=r"other layers than .*g0.pt, such as more"):
        imported(tmp_path, tmp_path)
    with pytest.raises(InputError, match="no such file"):
        dumps_of([tmp_path / "absent"])
    torch.save(step(0) | {"emb": torch.eye(3).to_sparse()}, tmp_path / "s0.pt")
    with pytest.raises(InputError, match=r"s0\.pt: emb: a gradient must be dense"):
        imported(tmp_path, tmp_path / "s0.pt")
    with pytest.raises(InputError, match="a trace already"):
        dumps_of([tmp_path / "out.zarr"])


def test_an_import_is_resumed_where_it_was_killed(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    for i in range(30):
        torch.save(step(i), folder / f"g{i}.pt")
    whole = Dumps(dumps_of([folder]), "x")
    seen = []

    def kill():
        seen.append(1)
        if len(seen) == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_dumps(whole, tmp_path / "out.zarr", kill)
    assert open_trace(tmp_path / "out.zarr").steps() == list(range(13))
    assert import_dumps(whole, tmp_path / "out.zarr") == 17
    import_dumps(whole, tmp_path / "once.zarr")
    once, twice = open_trace(tmp_path / "once.zarr"), open_trace(tmp_path / "out.zarr")
    assert twice.steps() == list(range(30))
    for i in range(30):
        assert np.array_equal(once.read(i), twice.read(i))
    for name in ("gradient_zeros", "gradient_nonfinite", "loss"):
        a, b = (t._rank(0).column(name) for t in (once, twice))
        assert np.array_equal(a, b, equal_nan=True)
    torch.save(step(30), folder / "g30.pt")
    assert import_dumps(Dumps(dumps_of([folder]), "x"), tmp_path / "out.zarr") == 1
    assert np.array_equal(open_trace(tmp_path / "out.zarr").read(30), flat(step(30)))
    # begun with a single dump
    assert import_dumps(Dumps(dumps_of([folder / "g7.pt"]), "x"), tmp_path / "one.zarr") == 1
    assert (
        import_dumps(
            Dumps(dumps_of([folder / "g7.pt", folder / "g9.pt"]), "x"), tmp_path / "one.zarr"
        )
        == 1
    )
    assert open_trace(tmp_path / "one.zarr").steps() == [7, 9]
    torch.save(step(7), tmp_path / "g7_rank2.pt")
    third = dumps_of([tmp_path / "g7_rank2.pt"], pattern="g{step}_rank{rank}.pt")
    with pytest.raises(
        InputError, match="begun with 1 rank, and x has rank 2: import all ranks at"
    ):
        import_dumps(Dumps(third, "x"), tmp_path / "one.zarr")
    with pytest.raises(InputError, match="not an import of kind corrected"):
        import_dumps(Dumps(dumps_of([folder]), "x", "corrected"), tmp_path / "out.zarr")


def test_memory_is_that_of_one_gradient(tmp_path):
    peaks = []
    for n in (3, 12):
        folder = tmp_path / str(n)
        folder.mkdir()
        for i in range(n):
            torch.save(torch.full((1 << 20,), float(i)), folder / f"g{i}.pt")
        dumps = Dumps(dumps_of([folder]), "x")
        tracemalloc.start()
        import_dumps(dumps, tmp_path / f"{n}.zarr")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_the_command(tmp_path):
    for i in range(3):
        torch.save(step(i), tmp_path / f"g{i}.pt")
    done = run("import", tmp_path, "--out", tmp_path / "run.zarr", "--kind", "pseudogradient")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 gradients imported" in done.stderr
    assert open_trace(tmp_path / "run.zarr").kinds(0) == ["pseudogradient"]
    again = run("import", tmp_path / "g0.pt", "--out", tmp_path / "run.zarr", "--kind", "x")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
