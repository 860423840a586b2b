"""What is not the gradient: left out with a remark, asked for, or refused; never guessed."""

from __future__ import annotations

import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradstats import compare, open_trace, threshold
from gradstats.errors import InputError, TraceError
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source

W = torch.linspace(-1, 1, 12)


def saved(tmp_path, value, name="x.pt"):
    torch.save(value, tmp_path / name)
    return tmp_path / name


def test_a_loss_beside_a_state_dict_is_asked_about(tmp_path):
    path = saved(tmp_path, {"model_state_dict": {"w": W}, "loss": torch.tensor(2.3)})
    with pytest.raises(
        InputError, match=r"give one of them: .*x.pt:\. \(1 tensor\), .*model_state"
    ):
        open_source(path)
    assert open_source(f"{path}:model_state_dict").numel == 12
    assert open_source(f"{path}:.").numel == 1


def test_what_is_no_tensor_is_said(tmp_path):
    source = open_source(saved(tmp_path, {"w": W, "b": None, "more": [W], "epoch": 3}))
    assert source.numel == 12
    for text in ("b (None)", "more (a list)", "epoch (a int)"):
        assert text in source.remark
    source = open_source(saved(tmp_path, {"w": W, "loss": torch.tensor(900.0)}))
    assert source.numel == 12
    assert "loss (a single number)" in source.remark
    np.savez(tmp_path / "x.npz", w=W.numpy(), loss=np.float32(900))
    source = open_source(tmp_path / "x.npz")
    assert source.numel == 12
    assert "loss (a single number)" in source.remark


def test_names_that_collide_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"module.w and w, which are one layer"):
        open_source(saved(tmp_path, {"module.w": W, "w": W}))
    with pytest.raises(InputError, match="two tensors are named 1"):
        open_source(saved(tmp_path, {1: W, "1": W}))
    np.save(tmp_path / "w.npy", W.numpy())
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(tmp_path / "w.npy", "w.npy")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.write(tmp_path / "w.npy", "w.npy")
    with pytest.raises(InputError, match="two arrays named w"):
        open_source(tmp_path / "x.npz")


def test_scales_of_whole_numbers_are_no_gradient(tmp_path):
    quantised = {"w": torch.ones(64, dtype=torch.int8), "w.scale": torch.ones(4)}
    save_file(quantised, tmp_path / "x.safetensors")
    for path in (saved(tmp_path, quantised), tmp_path / "x.safetensors"):
        with pytest.raises(InputError, match=r"whole numbers \(w: .*int8\).*scales"):
            open_source(path)


def test_a_foreign_entry_named_layers_is_ignored(tmp_path):
    for entry in ("12", "not json", '{"a": 1}', "[[1]]", "[" * 100_000):
        save_file({"w": W}, tmp_path / "x.safetensors", metadata={"layers": entry})
        assert open_source(tmp_path / "x.safetensors").numel == 12


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.zarr"
    create_trace(path, [Layer("a", 0, (4,)), Layer("b", 4, (3,))])
    writer = TraceWriter(path, 0)
    writer.append(0, {"gradient": np.arange(7, dtype=np.float32)})
    writer.close()
    return path


def edited(file, change):
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_a_trace_whose_parts_contradict_each_other_is_refused(trace):
    same = trace.with_name("same.zarr")
    shutil.copytree(trace, same)
    edited(same / "zarr.json", lambda d: d["attributes"]["layout"][1].update(name="a"))
    with pytest.raises(TraceError, match="two of its layers are named 'a'"):
        open_trace(same)
    moved = trace.with_name("moved.zarr")
    shutil.copytree(trace, moved)
    (moved / "rank00000").rename(moved / "rank00001")
    with pytest.raises(TraceError, match="that of rank 0"):
        open_trace(moved)
    big = trace.with_name("big.zarr")
    shutil.copytree(trace, big)

    def turn(document):
        document["codecs"][0]["configuration"]["endian"] = "big"

    edited(big / "rank00000" / "gradient" / "zarr.json", turn)
    with pytest.raises(TraceError, match="metadata is not that of a trace"):
        open_trace(big).read(0)
    with pytest.raises(InputError, match="two layers have the same name"):
        create_trace(trace.with_name("new.zarr"), [Layer("a", 0, (4,)), Layer("a", 4, (3,))])


def test_a_chunk_that_leads_out_of_the_trace_is_not_followed(trace, tmp_path):
    chunk = trace / "rank00000" / "gradient" / "c" / "0" / "0"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match="link that leads out of the trace"):
        open_trace(trace).read(0)


@pytest.mark.filterwarnings("ignore")
def test_advice_gives_the_gradient_that_was_meant():
    dense = torch.zeros(100)
    dense[[3, 7]] = torch.tensor([1.0, 2.0])
    quantised = torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)
    for x, advice, meant in (
        (dense.to_sparse(), "to_dense()", dense),
        (dense.reshape(10, 10).to_sparse_csr(), "to_dense()", dense.reshape(10, 10)),
        (quantised, "dequantize()", quantised.dequantize()),
        (torch.complex(W, 2 * W), "view_as_real", torch.stack([W, 2 * W], -1)),
    ):
        with pytest.raises(InputError) as caught:
            threshold(x, 0.5)
        assert advice in str(caught.value)
        done = torch.view_as_real(x) if x.is_complex() else getattr(x, advice[:-2])()
        assert torch.equal(done, meant)
        threshold(done, 0.5)
    with pytest.raises(InputError, match=r"np.stack\(\[x.real, x.imag\], -1\)"):
        threshold(np.ones(4, complex), 0.5)


def test_a_file_is_read_in_the_order_of_its_indices(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.save(tmp_path / "f.npy", np.asfortranarray(x))
    source = open_source(tmp_path / "f.npy")
    assert np.array_equal(source.read(0, "gradient", 0).values, x.ravel())
    assert np.array_equal(source.elements(0, "gradient", 0, 5, 9), [5, 6, 7, 8])
    assert "no difference" in str(compare(x, tmp_path / "f.npy").verdict)


def test_files_take_the_memory_that_is_promised(tmp_path):
    import tracemalloc

    from gradstats import quality

    x = np.random.default_rng(0).laplace(size=(16384, 1024)).astype(np.float32)
    np.save(tmp_path / "f.npy", x)
    save_file({c: torch.from_numpy(x).bfloat16() for c in "ab"}, tmp_path / "b.safetensors")
    quality(x[:64], [0.01], ["exact"])  # what is imported late is imported now
    tracemalloc.start()
    (row,) = quality(tmp_path / "f.npy", [0.01], ["exact"])
    half = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    source = open_source(tmp_path / "b.safetensors")
    assert source.numel == 2 * x.size
    assert source.entries() == [(0, "gradient", 0)]
    opened = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row["mean"] == 1
    assert half < x.nbytes / 2
    assert opened < x.nbytes / 2


@pytest.mark.slow
def test_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path):
    header = {"descr": "<f4", "fortran_order": False, "shape": (300 << 20,)}
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(member, header)
        for _ in range(300):
            member.write(bytes(4 << 20))
    with pytest.raises(InputError, match=r"unpacks .* bytes to 1,258,"):
        open_source(tmp_path / "x.npz")
