from __future__ import annotations

import pickle
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import DATA
from safetensors.torch import save_file
from support.every import every

from gradstats import open_trace, quality, save_safetensors
from gradstats.analysis.fits import fit_records
from gradstats.errors import GradstatsError, InputError, TraceError
from gradstats.trace import Layer, TraceWriter, create_trace, dumps, files
from gradstats.trace import source as source_module
from gradstats.trace.sources import matching, open_source, open_sources

LAYERS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}


def save(path):
    tensors = {k: torch.from_numpy(v) for k, v in LAYERS.items()}
    if path.suffix == ".npy":
        np.save(path, np.concatenate([v.ravel() for v in LAYERS.values()]))
    elif path.suffix == ".npz":
        np.savez(path, **LAYERS)
    elif path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".pth"])
def test_every_format_gives_the_same_gradient(tmp_path, suffix):
    source = open_source(save(tmp_path / f"g{suffix}"))
    captured = source.read(*source.entries()[0])
    expected = np.concatenate([v.ravel() for v in LAYERS.values()])
    assert np.array_equal(np.asarray(captured.values), expected)
    assert [la.name for la in source.layers] == (["gradient"] if suffix == ".npy" else ["a", "b"])
    labels = {"trace": f"g{suffix}", "step": 0, "rank": 0, "kind": "gradient"}
    assert source.labels(*source.entries()[0]) == labels


def test_single_tensors_and_bfloat16(tmp_path):
    x = torch.linspace(-1, 1, 100).bfloat16()
    torch.save(x, tmp_path / "x.pt")
    save_file({"x": x}, tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        records = quality(tmp_path / name, [0.1], ["exact"])
        assert records[0]["k"] == 10
        assert records[0]["mean"] == 1


def test_arrays_mappings_and_layers_in_memory():
    assert quality(LAYERS["a"], [0.25], ["exact"])[0]["k"] == 3
    records = fit_records(open_source(LAYERS), ["laplace", "dgamma"], per_layer=True)
    assert [(r["layer"], r["model"]) for r in records] == [
        (layer, model) for layer in ("all", "a", "b") for model in ("laplace", "dgamma")
    ]
    constant = records[-1]
    assert constant["status"].startswith("all magnitudes are equal")
    assert np.isnan(constant["nll"])
    with pytest.raises(InputError, match="not a source"):
        open_source(3)


def test_pickles_are_not_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    for name in ("evil.pt", "evil.npy"):
        with pytest.raises(InputError, match="cannot read") as caught:
            open_source(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


@every("suffix", [".npy", ".npz", ".safetensors", ".pt"])
@every("keep", [0, 20, -5])
def test_truncated_files_are_one_line(tmp_path, suffix, keep):
    path = save(tmp_path / f"g{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="cannot read") as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


def test_a_small_file_is_not_unpacked_or_repeated_to_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_INFLATED", 1 << 20)
    zeros = {"w": torch.zeros(1 << 19)}  # 2 MiB, of which deflate leaves 2 KiB
    torch.save(zeros, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    np.savez_compressed(tmp_path / "packed.npz", **zeros)
    small = torch.ones(1)
    torch.save({"w": small.expand(10**12)}, tmp_path / "repeated.pt")
    torch.save([small.expand(10**12)] * 2, tmp_path / "list.pt")
    assert open_source(tmp_path / "plain.pt").read(0, "gradient", 0).values.shape == (1 << 19,)
    for name in ("packed.pt", "packed.npz"):
        with pytest.raises(InputError, match="unpacks 2,"):
            open_source(tmp_path / name)
    with pytest.raises(InputError, match="w repeats 4 bytes to 4,000,000,000,000"):
        open_source(tmp_path / "repeated.pt")
    for lists in ("steps", "layers"):
        with pytest.raises(InputError, match="repeats 4 bytes"):
            dumps.Dumps(dumps.dumps_of([tmp_path / "list.pt"], lists=lists), "x")
    repeated = {"w": small.expand(1000)}  # gradients of a sum are like this
    torch.save(repeated, tmp_path / "some.pt")
    assert open_source(tmp_path / "some.pt").read(0, "gradient", 0).values.sum() == 1000


def test_what_holds_nothing_useful(tmp_path):
    np.save(tmp_path / "empty.npy", np.empty(0))
    np.save(tmp_path / "int.npy", np.arange(3))
    torch.save({"lr": 0.1}, tmp_path / "opt.pt")
    (tmp_path / "notes.txt").touch()
    for name, message in [
        ("empty.npy", "no elements"),
        ("int.npy", "int64"),
        ("opt.pt", "neither a tensor"),
        ("notes.txt", "nor one of .npy"),
        ("absent.npy", "no such trace"),
        ("absent", "no such trace"),
    ]:
        with pytest.raises(GradstatsError, match=message):
            open_sources(tmp_path / name)


def test_an_error_names_what_is_near(tmp_path, trace_path):
    with pytest.raises(TraceError, match="not a gradstats trace"):
        open_sources(tmp_path)
    save(tmp_path / "step10.npy")
    save(tmp_path / "step20.pt")
    (tmp_path / "notes.txt").touch()
    (source,) = open_sources(tmp_path)  # both are steps of one training, and differ
    with pytest.raises(InputError) as caught:
        source.read(0, "gradient", 20)
    assert "step20.pt has other layers than" in str(caught.value)
    with pytest.raises(InputError, match=r"did you mean .*/step10\.npy\?"):
        open_sources(tmp_path / "stpe10.npy")
    with pytest.raises(InputError, match=rf"did you mean {trace_path}\?"):
        open_sources(trace_path.with_suffix(""))
    with pytest.raises(InputError) as caught:
        open_sources(tmp_path / "zzz")
    assert "mean" not in str(caught.value)


def test_nothing_asked_for_is_left_out_silently(tmp_path, trace_path):
    both = open_sources(trace_path.parent)
    late = open_source(make_trace(tmp_path / "late.zarr", steps=[7]))
    assert matching([*both, late], steps=[10, 7]) == [*both, late]
    assert matching([*both, late], steps=[7]) == [late]
    message = "matches steps 7, 8; there are steps 10, 100, 1000, 2999; ranks 0; kinds"
    with pytest.raises(InputError, match=message):
        matching(both, steps=[10, 7, 8])
    with pytest.raises(InputError, match="matches ranks 1; there are"):
        matching(both, steps=[10], ranks=[0, 1])
    with pytest.raises(InputError, match="matches kinds corrected; there are"):
        matching([late], kinds=["gradient", "corrected"])

    with pytest.raises(InputError, match=r"no layer of .*late matches v\*; it has .*w"):
        matching([*both, late], layers=["w", "v*"])
    assert matching([*both, late], layers=["w"]) == [late]
    assert matching([*both, late], layers=["w", "conv1.weight"]) == [*both, late]


def test_a_gradient_in_memory_is_whole_whoever_reads_it_first(monkeypatch):
    flatten, calls = source_module._flatten, []

    def slow(arrays, numel):
        calls.append(len(arrays))
        if len(calls) == 1:
            raise MemoryError
        time.sleep(0.05)
        return flatten(arrays, numel)

    monkeypatch.setattr(source_module, "_flatten", slow)
    source = open_source(LAYERS)
    with pytest.raises(MemoryError):
        source.elements(0, "gradient", 0, 0, 17)
    expected = np.concatenate([v.ravel() for v in LAYERS.values()])
    with ThreadPoolExecutor(4) as pool:
        for part in pool.map(lambda _: source.elements(0, "gradient", 0, 0, 17), range(8)):
            assert np.array_equal(part, expected)
    assert calls == [2, 2]


def make_trace(path, steps):
    create_trace(path, [Layer("w", 0, (4,))], world_size=1)
    writer = TraceWriter(path, 0)
    for step in steps:
        writer.append(step, {"gradient": np.ones(4, np.float32)})
    writer.close()
    return path


def test_a_folder_of_traces_is_all_of_them(trace_path):
    assert [s.name for s in open_sources(trace_path.parent)] == ["resnet20", "resnet20-ef"]
    source = open_source(trace_path)
    assert source.select(steps=[100], ranks=[0])
    with pytest.raises(InputError, match="it holds steps 10, 100, 1000, 2999; ranks 0; kinds"):
        source.select(steps=[7])


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_task_carries_the_path_and_not_the_file(tmp_path, suffix):
    values = np.random.default_rng(0).laplace(size=300_000).astype(np.float32)
    path = tmp_path / f"gradient{suffix}"
    if suffix == ".npy":
        np.save(path, values)
    else:
        np.savez(path, a=values[:1000], b=values[1000:])
    source = open_source(path)
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert np.array_equal(again.elements(0, "gradient", 0, 50, 2000), values[50:2000])
    assert [la.name for la in again.layers] == [la.name for la in source.layers]
    in_memory = pickle.loads(pickle.dumps(open_source({"a": values[:10], "b": values[10:]})))
    assert [la.name for la in in_memory.layers] == ["a", "b"]
    assert np.array_equal(in_memory.elements(0, "gradient", 0, 0, 300_000), values)


def test_what_another_library_says_is_cut_short(tmp_path):
    """zipfile repeats what is in the place of a name: here two thousand bytes."""
    path = tmp_path / "a.npz"
    np.savez(path, a=np.ones(2000, np.uint8))
    raw = path.read_bytes()
    at = raw.index(b"PK\x03\x04") + 26  # length of the name in the header before the data
    path.write_bytes(raw[:at] + (1500).to_bytes(2, "little") + raw[at + 2 :])
    with pytest.raises(InputError, match=r"^cannot read .*…$") as caught:
        open_source(path)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_no_advice_to_run_what_a_file_holds(tmp_path):
    """torch says of such files that loading them with ``weights_only=False`` will likely succeed."""
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "module.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    for name in ("module.pt", "script.pt"):
        with pytest.raises(InputError, match="save tensors or a state_dict alone") as caught:
            open_source(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "weights_only" not in str(caught.value)


def test_checkpoints_offer_their_dictionaries_by_name(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = tmp_path / "checkpoint.pt"
    torch.save({"step": 7, "model": model.state_dict(), "ema": {"w": torch.ones(5)}}, path)
    with pytest.raises(InputError, match=r"give one of them: .*checkpoint\.pt:model \(7 tensors\)"):
        open_source(path)
    with pytest.raises(InputError, match=r"'modle'; there are model, ema; did you mean model\?"):
        open_source(f"{path}:modle")
    source = open_source(f"{path}:model")
    assert [layer.name for layer in source.layers] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert source.remark == (
        "left out of checkpoint.pt:model, as no gradients: "
        "1.num_batches_tracked, 1.running_mean, 1.running_var"
    )
    (key,) = source.entries()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert np.array_equal(source.read(*key).values, flat.numpy())
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(again.read(*key).values, flat.numpy())


def test_wrappers_leave_no_trace_in_names(tmp_path):
    names = ("module._orig_mod.a.weight", "_orig_mod.b._orig_mod.weight", "c.module.weight")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "x.pt")
    layers = [layer.name for layer in open_source(tmp_path / "x.pt").layers]
    assert layers == ["a.weight", "b.weight", "c.module.weight"]


def test_an_exported_gradient_keeps_its_step_and_the_order_of_its_layers(tmp_path):
    trace = open_trace(DATA / "resnet20-ef.zarr")
    path = tmp_path / "x.safetensors"
    save_safetensors(trace, path, 100, kind="corrected")
    source = open_source(path)
    assert source.entries() == [(0, "corrected", 100)]
    assert [(la.name, la.shape) for la in source.layers] == [
        (la.name, la.shape) for la in trace.layers
    ]
    values = source.read(0, "corrected", 100).values
    assert np.array_equal(values, trace.read(100, kind="corrected"))
    save_file({"b": torch.ones(2), "a": torch.ones(3)}, path, {"step": "x", "kind": "weight"})
    other = open_source(path)
    assert (other.entries(), len(other.layers)) == ([(0, "gradient", 0)], 2)
