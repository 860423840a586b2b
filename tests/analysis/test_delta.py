"""What changed between checkpoints: shares and sizes against NumPy, predictions against planted updates, all files."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import DATA
from safetensors.numpy import save_file
from support.every import every
from support.terminal import records, run
from torch.distributed import checkpoint as dcp

import gradstats
from gradstats.analysis.delta import LAWS
from gradstats.errors import InputError, TraceError
from gradstats.primitives import deltas
from gradstats.trace import Layer, TraceWriter, create_trace

SHAPES = {"body": (300, 200), "row": (1000, 20), "bias": (300,)}


def weights(seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"body": 0.05, "row": 1.0, "bias": 1e-3}
    return {n: (rng.normal(size=s) * sizes[n]).astype(np.float32) for n, s in SHAPES.items()}


def stepped(before, scale=1e-5, seed=1, law="laplace"):
    """Return weights after an update of a known law; of `row` every tenth row has one."""
    rng, after = np.random.default_rng(seed), {}
    for name, w in before.items():
        update = getattr(rng, law)(size=w.shape) * scale
        if name == "row":
            update[np.arange(len(w)) % 10 > 0] = 0
        after[name] = (w.astype(np.float64) + update).astype(np.float32)
    return after


def flat(w):
    return np.concatenate([x.ravel() for x in w.values()])


def test_shares_rows_and_norms():
    a = weights()
    b = stepped(a)
    found = {r["layer"]: r for r in gradstats.delta(a, b, per_layer=True)}
    assert list(found) == ["all", *SHAPES]
    for name, each in found.items():
        x, y = (flat(w) if name == "all" else w[name] for w in (a, b))
        assert each["changed"] == pytest.approx(np.mean(x != y))
        bf16 = [w.astype(ml_dtypes.bfloat16) for w in (x, y)]
        assert each["changed_bf16"] == pytest.approx(np.mean(bf16[0] != bf16[1]))
        u = y.astype(np.float64) - x
        norm = np.linalg.norm(x.astype(np.float64).ravel())
        assert each["update_to_weight"] == pytest.approx(np.linalg.norm(u.ravel()) / norm)
        assert each["rms_update"] == pytest.approx(np.sqrt(np.mean(u**2)))
        assert (each["numel"], each["dtype"], each["bytes"]) == (x.size, "fp32", 4 * x.size)
        assert each["lag"] == each["pairs"] == 1
    assert found["row"]["rows"] == 0.1
    assert found["body"]["rows"] == 1
    scale = np.float32(448 / np.abs(a["body"]).max())
    eight = [(w["body"] * scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn) for w in (a, b)]
    changed = np.mean(eight[0].view(np.uint8) != eight[1].view(np.uint8))
    assert found["body"]["changed_fp8"] == pytest.approx(changed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_sizes_are_those_of_messages_that_give_the_later_checkpoint(dtype):
    a = weights()
    b = stepped(a)
    found = {r["layer"]: r for r in gradstats.delta(a, b, dtype=dtype, per_layer=True)}
    for codec in deltas.CODECS:
        for name in SHAPES:
            x, y = (deltas.words_of(w[name].ravel(), dtype) for w in (a, b))
            message = deltas.encode(x, y, codec)
            assert np.array_equal(deltas.decode(x, message, codec), y)
            assert found[name][f"bytes_{codec}"] == len(message)
        total = sum(found[name][f"bytes_{codec}"] for name in SHAPES)
        assert found["all"][f"bytes_{codec}"] == total
    assert found["all"]["entropy"] <= found["all"]["bytes"]


@every("law", ["laplace", "normal", "uniform"])
@every("scale", [1e-7, 1e-5, 1e-3])
def test_the_law_of_the_update_predicts_what_changes_in_bf16(law, scale):
    a = weights()
    found = gradstats.delta(a, stepped(a, scale, law=law), per_layer=True)
    for each in found:
        if each["layer"] in ("all", "body"):
            deviation = math.sqrt(each["changed_bf16"] / each["numel"])
            off = abs(each["predicted"] - each["changed_bf16"])
            assert off < 0.05 * each["changed_bf16"] + 4 * deviation, each
        assert each["law"] in ("laplace", "dgamma", "norm", "lognorm")


def test_the_rate_predicts_where_weights_in_16_bits_hide_the_update():
    a = weights()
    b = stepped(a)
    short = [
        {n: torch.from_numpy(x).bfloat16() for n, x in w.items() if n != "row"} for w in (a, b)
    ]
    (each,) = found = gradstats.delta(*short)
    said = "predicted: not known, as weights in 16 bits hide the update of bias, "
    assert any(text.startswith(said) for text in found.remarks)
    # one layer in 16 bits, as in many a mixed checkpoint, or one of two files: what is not seen is not predicted
    first, *_ = short[0]
    for mixed in (
        (a | {first: short[0][first].float()}, b),
        (short[0], {n: b[n] for n in short[1]}),
    ):
        every = gradstats.delta(*mixed, dtype="bf16", per_layer=True)
        unseen = {r["layer"] for r in every if math.isnan(r["predicted"])}
        assert {first, "all"} <= unseen
        assert any(first in text for text in every.remarks)
    assert each["dtype"] == "bf16"  # as all numbers are
    assert each["bytes"] == 2 * each["numel"]
    assert math.isnan(each["predicted"])
    # weights kept in float32 show it, whatever they are compared in
    (wide,) = found = gradstats.delta(a, b, dtype="bf16")
    assert wide["law"] == gradstats.delta(a, b)[0]["law"]
    assert wide["predicted"] == pytest.approx(wide["changed"], rel=0.05)
    assert not found.remarks
    (each,) = found = gradstats.delta(*short, rate=1e-5)
    assert not found.remarks
    assert each["predicted"] == pytest.approx(each["changed"], rel=0.05)
    assert each["law"] == "rate"
    # trained in bf16: an update of less than half a step is lost, and one of more is not
    kept = {n: x.double() for n, x in short[0].items()}
    rng, after = np.random.default_rng(4), {}
    for name, w in kept.items():
        after[name] = (w + torch.from_numpy(rng.laplace(size=tuple(w.shape)) * 1e-4)).bfloat16()
    (each,) = gradstats.delta(short[0], after, rate=1e-4, master=False)
    assert each["predicted"] == pytest.approx(each["changed"], rel=0.05)
    assert gradstats.delta(short[0], after, rate=1e-4)[0]["predicted"] > 1.05 * each["changed"]


def test_lags_of_several_checkpoints():
    path = [{n: w[:100] for n, w in weights().items()}]
    for i in range(3):
        path.append(stepped(path[-1], seed=i + 1))
    found = gradstats.delta(*path)
    assert [(r["lag"], r["pairs"]) for r in found] == [(1, 3), (2, 2), (3, 1)]
    for each in found:
        lag = each["lag"]
        alone = [gradstats.delta(path[i], path[i + lag])[0] for i in range(4 - lag)]
        for name in ("changed", "changed_bf16", "changed_fp8", "predicted"):
            assert each[name] == pytest.approx(np.mean([r[name] for r in alone]))
        assert each["bytes_rice"] == round(np.mean([r["bytes_rice"] for r in alone]))
    assert found[0]["changed_bf16"] < found[1]["changed_bf16"] < found[2]["changed_bf16"]
    rated = gradstats.delta(*path, rate=1e-5)
    assert [math.isnan(r["predicted"]) for r in rated] == [False, True, True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_file_that_holds_weights(tmp_path):
    """The same numbers by every loader, whichever the other one is."""
    a, b = weights(), stepped(weights())
    save_file(a, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", **a)
    tensors = {n: torch.from_numpy(x) for n, x in a.items()}
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({"model": tensors, "step": 3}, tmp_path / "b.pt")
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "sharded").mkdir()
    places = {}
    for i, (name, x) in enumerate(a.items()):
        save_file({name: x}, tmp_path / "sharded" / f"{i}.safetensors")
        places[name] = f"{i}.safetensors"
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    right = gradstats.delta(a, b)[0]
    for name in ("a.safetensors", "a.npz", "a.pt", "b.pt:model", "dcp", "sharded"):
        each = gradstats.delta(str(tmp_path / name), b)[0]
        assert each == pytest.approx(right | {"law": each["law"]}, nan_ok=True), name
        assert not gradstats.delta(tmp_path / "a.npz", str(tmp_path / name))[0]["changed"]
    (tmp_path / "several").mkdir()
    for step, w in ((10, a), (20, b)):
        save_file(w, tmp_path / "several" / f"step_{step}.safetensors")
    found = gradstats.delta(tmp_path / "several")
    assert found[0]["changed"] == right["changed"]
    assert found.names == ["several, step 10", "several, step 20"]


def held(path, steps, store="gradients"):
    """Store weights by step, as a capture of kind ``weight`` does, and something else beside them."""
    layers, start = [], 0
    for name, shape in SHAPES.items():
        layers.append(Layer(name, start, shape))
        start += math.prod(shape)
    create_trace(path, layers)
    writer = TraceWriter(path, 0, kinds=["gradient", "weight"], store=store)
    for step, w in steps.items():
        writer.append(step, {"weight": flat(w), "gradient": flat(weights(7))})
    writer.close()
    return str(path)


def test_a_trace_of_weights_is_as_many_checkpoints_as_it_has_steps(tmp_path):
    a = weights()
    b = stepped(a)
    both = held(tmp_path / "run.zarr", {5: a, 9: b})
    found = gradstats.delta(both)
    assert found == gradstats.delta(a, b)
    assert found.names == ["run, step 5", "run, step 9"]
    last = held(tmp_path / "last.zarr", {9: b})
    assert gradstats.delta(a, last)[0]["changed"] == found[0]["changed"]
    with pytest.raises(InputError, match="two checkpoints are needed"):
        gradstats.delta(both, steps=[9])
    with pytest.raises(TraceError, match="only sketches"):
        gradstats.delta(held(tmp_path / "sketches.zarr", {5: a, 9: b}, "sketches"))
    with pytest.raises(InputError, match="and no weights"):
        gradstats.delta(str(DATA / "resnet20.zarr"))


def test_a_rank_is_one_of_traces_and_files_have_none():
    before, after = weights(), stepped(weights())
    assert list(gradstats.delta(before, after, rank=1)) == list(gradstats.delta(before, after))


def test_layers_that_differ_are_left_out_and_said():
    a, b = weights(), stepped(weights())
    b["body"] = b["body"].T.copy()
    b["more"] = np.ones(3, np.float32)
    found = gradstats.delta(a, b, per_layer=True)
    assert [r["layer"] for r in found] == ["all", "row", "bias"]
    assert found.remarks == [
        "left out, as array does not have them: more",
        "left out, as they have other shapes in array than in array: body",
    ]
    other = dict(reversed(list(a.items())))
    assert not gradstats.delta(a, other)[0]["changed"]  # the order is not a difference
    with pytest.raises(InputError, match="no layer in common"):
        gradstats.delta({"x": a["bias"]}, {"y": a["bias"]})


def test_numbers_without_an_answer_have_a_defined_one():
    a = {"w": np.array([0.0, np.nan, np.inf, 1.0], np.float32)}
    b = {"w": np.array([-0.0, np.nan, 1.0, 1.0], np.float32)}
    each = gradstats.delta(a, b)[0]
    assert each["changed"] == 0.5  # another zero is another number: what is compared are bits
    a = weights()
    same = gradstats.delta(a, a)
    assert same[0]["changed"] == same[0]["predicted"] == same[0]["entropy"] == 0
    assert same.verdict == "no weight differs"
    zeros = {"w": np.zeros(10, np.float32)}
    assert math.isnan(gradstats.delta(zeros, zeros)[0]["update_to_weight"])
    wide = {"w": np.array([0.1, 0.2])}
    with pytest.raises(
        InputError, match=r"float64 that are no numbers of float32: save it \.float"
    ):
        gradstats.delta(wide, wide)
    exact = {"w": np.array([0.5, 0.25])}
    assert not gradstats.delta(exact, exact)[0]["changed"]
    b = stepped(a)
    for options, message in (
        ({"dtype": "fp8"}, "type of weights 'fp8'"),
        ({"rate": 0}, "rate must be in"),
        ({"layers": ["x*"]}, "no layer of array matches"),
    ):
        with pytest.raises(InputError, match=message):
            gradstats.delta(a, b, **options)


def test_at_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    a = weights()
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.safetensors")
        save_file(a, files[-1])
        a = stepped(a, seed=i)
    done = run("delta", *files, "--per-layer")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.safetensors → 1.safetensors → 2.safetensors:")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Too wide" not in done.stdout
    found = records("delta", *files, "--layer", "b*", "--dtype", "bf16", "--rate", 1e-5)
    assert [r["layer"] for r in found] == ["all", "bias", "body"] * 2
    assert found[0].keys() >= {
        *("layer", "changed", "changed_bf16", "predicted", "update_to_weight"),
        *(f"bytes_{codec}" for codec in deltas.CODECS),
    }
    refused = run("delta", files[0])
    assert refused.returncode == 2
    assert "two checkpoints are needed" in refused.stderr


def test_a_prediction_is_from_the_law_of_what_moves():
    """Of a model of which most is frozen, whose update has no law."""
    rng = np.random.default_rng(7)
    frozen, w = (rng.normal(size=n).astype(np.float32) for n in (3000, 1000))
    moved = w + rng.laplace(size=w.size).astype(np.float32) * np.float32(1e-3)
    found = gradstats.delta({"frozen": frozen, "w": w}, {"frozen": frozen, "w": moved})
    assert found[0]["law"] in LAWS
    assert found[0]["predicted"] > 0
    assert f"% predicted from {found[0]['law']})" in found.verdict
    assert gradstats.delta({"w": w}, {"w": w})[0]["law"] == "none"
