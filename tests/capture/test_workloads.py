"""Reference runs, for real: torchrun's agent, gloo, several processes."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from support import terminal
from support.every import every
from support.programs import program
from support.traces import assert_same_sketch

from capture.workloads import WORKLOADS, RunConfig, RunResult, run, training, workload_info
from capture.workloads.images import load_cifar10, load_digits
from capture.workloads.launch import RunFailedError
from capture.workloads.optimizers import make_optimizers
from capture.workloads.text import load_ptb, load_pydoc, words_to_ids
from capture.workloads.training import thread_count
from gradstats import open_trace
from gradstats.errors import InputError
from gradstats.primitives.sketch import sketch


@pytest.mark.parametrize(
    ("given", "nproc", "threads"), [(1, 1, 1), (4, 2, 4), (16, 1, 16), (16, 5, 3), (8, 32, 1)]
)
def test_a_rank_takes_its_part_of_the_cores_and_no_more_than_it_is_given(
    given, nproc, threads, monkeypatch
):
    """`given` is OMP_NUM_THREADS, as torch has read it, on a machine of 16 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: given)
    assert thread_count(nproc) == threads


def test_digits_are_all_there_and_channels_differ():
    digits = load_digits()
    assert len(digits) == 1797
    images, labels = digits.batch(3, 32, 1, 2, seed=0)
    assert images.shape == (32, 3, 16, 16)
    assert set(labels.tolist()) <= set(range(10))
    assert not torch.equal(images[:, 0], images[:, 1])
    again, _ = load_digits().batch(3, 32, 1, 2, seed=0)
    assert torch.equal(images, again)
    other, _ = digits.batch(3, 32, 0, 2, seed=0)
    assert not torch.equal(images, other)


def test_an_epoch_shows_every_image_once():
    digits = load_digits()
    digits._labels = torch.arange(1797)  # labels that tell the images apart
    seen = torch.cat([digits.batch(s, 32, r, 2, seed=1)[1] for s in range(28) for r in (0, 1)])
    assert len(set(seen.tolist())) == 28 * 64


def test_cifar10_records_are_read_as_documented(tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (20, 3073), np.uint8)
    raw[:, 0] %= 10
    raw.tofile(tmp_path / "data_batch_3.bin")
    images = load_cifar10(tmp_path)
    assert len(images) == 20
    pixels = raw[:, 1:].reshape(20, 3, 32, 32).astype(np.float32) / 255
    mean = pixels.mean((0, 2, 3), keepdims=True)
    expected = (pixels - mean) / pixels.std((0, 2, 3), keepdims=True, ddof=1)
    assert np.allclose(images._padded[:, :, 4:-4, 4:-4], expected, atol=1e-4)
    assert images.test is None
    raw[:12].tofile(tmp_path / "test_batch.bin")
    unseen, labels = load_cifar10(tmp_path).test  # normalised like what is trained on
    assert np.allclose(unseen, expected[:12], atol=1e-4)
    assert labels.tolist() == raw[:12, 0].tolist()
    (tmp_path / "data_batch_3.bin").write_bytes(raw.tobytes()[:-1])
    with pytest.raises(InputError, match="not whole records"):
        load_cifar10(tmp_path)
    raw[0, 0] = 77
    raw.tofile(tmp_path / "data_batch_3.bin")
    with pytest.raises(InputError, match="label 77"):
        load_cifar10(tmp_path)


def test_accuracy_is_what_the_model_gets_right_of_unseen_images(tmp_path):
    from capture.workloads.classification import make_task

    raw = np.random.default_rng(1).integers(0, 256, (1100, 3073), np.uint8)
    raw[:, 0] = 3
    raw[:40].tofile(tmp_path / "data_batch_1.bin")
    raw[600:, 0] = 4
    raw.tofile(tmp_path / "test_batch.bin")  # 600 threes, 500 fours
    config = RunConfig(workload="resnet20-cifar10", data_dir=tmp_path, batch_size=4, nproc=1)
    task = make_task(config, 0)
    with torch.no_grad():
        task.model.fc.weight.zero_()
        task.model.fc.bias.copy_(torch.eye(10)[3])
    assert task.evaluate(task.model) == {"accuracy": pytest.approx(600 / 1100)}
    assert task.model.training


def test_cifar10_of_the_shared_folder(cifar10):
    images = load_cifar10(cifar10)
    assert len(images) == 20_000
    assert torch.bincount(images._labels).min() > 1800


def test_texts(ptb):
    words = load_ptb(ptb)
    assert len(words) == 929_589
    assert len(set(words)) == 10_000
    ids = words_to_ids(words, 10_000)
    assert int(ids.max()) == 9999
    unseen = load_ptb(ptb, "valid")
    assert len(unseen) == 73_760
    number = dict(zip(words, ids.tolist(), strict=True))
    assert words_to_ids(unseen, 10_000, words).tolist() == [number[word] for word in unseen]
    assert float((ids == 0).float().mean()) == pytest.approx(words.count("<unk>") / len(words))


def test_pydoc_is_english():
    words = load_pydoc()
    assert len(words) > 50_000
    assert words.count("the") > 1000
    ids = words_to_ids(words, 1000)
    assert set(ids.unique().tolist()) == set(range(1000))


def test_bad_settings_never_start_a_process(tmp_path):
    for config in (
        RunConfig(workload="nonsense"),
        RunConfig(workload="lstm-ptb"),
        RunConfig(workload="lstm-pydoc", hidden=1),
        RunConfig(workload="resnet20-digits", ratio=2),
        RunConfig(workload="resnet20-digits", ratio=2, compressor="torch-topk"),
        RunConfig(workload="resnet20-digits", out=tmp_path / "a.zarr", every=0),
        RunConfig(workload="resnet20-digits", out=tmp_path / "a.zarr", at=(3, -1)),
    ):
        with pytest.raises(InputError):
            run(config)
    assert workload_info("lstm-ptb") is WORKLOADS["lstm-ptb"]


DIGITS = {"workload": "resnet20-digits", "steps": 40}


@every(
    ("settings", "expected"),
    [
        ({"compressor": "topk"}, (0.0, None, None, "averaged", 0)),
        ({"compressor": "dgc"}, (0.9, None, None, "local", 2)),
        ({"compressor": "redsync"}, (0.9, "dgc", None, "local", 2)),
        ({"compressor": "redsync-quantised", "momentum": 0}, (0, None, None, "local", 2)),
        ({"compressor": "threshold:dgc"}, (0.0, None, None, "averaged", 0)),
        ({"compressor": "dgc", "workload": "lstm-pydoc"}, (0.9, None, 0.25, "local", 2)),
        ({"workload": "lstm-pydoc"}, (0.0, None, 0.25, "averaged", 0)),
        ({"workload": "lstm-pydoc", "clip": 0}, (0.0, None, None, "averaged", 0)),
        (
            {"compressor": "dgc", "nesterov": "redsync", "momentum": 0.5, "clip": 2, "warm_up": 7},
            (0.5, "redsync", 2, "local", 7),
        ),
        (
            {"compressor": "none", "momentum": 0.5, "nesterov": "dgc", "clip_kind": "averaged"},
            (0.5, "dgc", None, "averaged", 0),
        ),
    ],
)
def test_momentum_clipping_and_warm_up_of_a_run(settings, expected):
    config = RunConfig(**DIGITS | settings)
    config.check()
    training = config.training()
    momentum, nesterov, clip, kind, warm_up = expected
    assert (training.momentum, training.nesterov) == (momentum, nesterov)
    assert (training.clip, training.clip_kind, training.warm_up) == (clip, kind, warm_up)
    optimizer = config.metadata()["optimizer"]
    assert optimizer.get("momentum", 0) == momentum
    json.dumps(optimizer)


@every(
    ("settings", "expected"),
    [
        ({"optimizer": "sgd"}, ("SGD", 0.1, 0.0, None, 0.0)),
        ({"optimizer": "nesterov"}, ("SGD", 0.1, 0.9, "dgc", 0.0)),
        ({"optimizer": "adamw"}, ("AdamW", 1e-3, 0.0, None, 0.0)),
        ({"optimizer": "muon", "learning_rate": 0.01}, ("Muon", 0.01, 0.0, None, 0.0)),
        ({"optimizer": "adamw", "workload": "gpt-pydoc"}, ("AdamW", 1e-3, 0.0, None, 0.1)),
        ({"optimizer": "nesterov", "workload": "gpt-pydoc"}, ("SGD", 0.1, 0.9, "dgc", 0.0)),
        ({"optimizer": "nesterov", "workload": "lstm-pydoc"}, ("SGD", 5.0, 0.9, "dgc", 0.0)),
    ],
)
def test_settings_that_an_optimizer_brings(settings, expected):
    config = RunConfig(**DIGITS | {"compressor": "none"} | settings)
    config.check()
    training = config.training()
    found = training.momentum, training.nesterov, training.weight_decay
    assert (config.optimizer_name, config.initial_learning_rate, *found) == expected
    assert config.metadata()["optimizer"]["name"] == expected[0]


def test_what_muon_takes():
    from capture.workloads.networks import small_resnet

    def shapes(model, **settings):
        config = RunConfig(**DIGITS | {"optimizer": "muon"} | settings)
        return [
            [tuple(p.shape) for group in each.param_groups for p in group["params"]]
            for each in make_optimizers(config, model)
        ]

    torch.manual_seed(0)
    words = torch.nn.Sequential(
        torch.nn.Embedding(9, 4),
        torch.nn.Linear(4, 6),
        torch.nn.LayerNorm(6),
        torch.nn.Linear(6, 9),
    )
    hidden, rest = shapes(words)
    assert hidden == [(6, 4)]
    assert rest == [(9, 4), (6,), (6,), (6,), (9, 6), (9,)]
    images = small_resnet(20, 10)
    hidden, rest = shapes(images)
    assert hidden == [(10, 64)]  # the output layer: a convolution's kernel is no matrix
    assert sum(map(np.prod, hidden + rest)) == sum(p.numel() for p in images.parameters())


def test_every_optimizer_follows_the_learning_rate(one_rank, monkeypatch):
    """Muon comes with AdamW for what is no matrix."""
    config = RunConfig(**DIGITS | {"nproc": 1, "batch_size": 2, "compressor": "none"})
    config = config.replace(optimizer="muon", steps=4, lr_warm_up=3, evaluate=False)
    rates = {}

    def make(config, model):
        made = make_optimizers(config, model)
        for each in made:
            rates[type(each).__name__] = seen = []
            each.register_step_post_hook(
                lambda o, *_, seen=seen: seen.append([g["lr"] for g in o.param_groups])
            )
        return made

    monkeypatch.setattr(training, "make_optimizers", make)
    training._train(config)
    expected = [[config.learning_rate_at(step)] for step in range(4)]
    assert len({rate for (rate,) in expected}) == 4
    assert rates == {"Muon": expected, "AdamW": expected}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "settings",
    [
        {"workload": "lstm-pydoc", "hidden": 16, "vocab": 50, "optimizer": "muon"},
        {"workload": "gpt-pydoc", "size": "0.1M", "vocab": 60, "parallel": "fsdp"},
    ],
)
def test_a_run_captures_what_its_optimizer_applies(tmp_path, settings):
    path = tmp_path / "run.zarr"
    settings = {"steps": 3, "batch_size": 4, "every": 1, "compressor": "none", **settings}
    result = run(RunConfig(**settings, kinds=("update", "weight"), out=path, evaluate=False))
    trace = open_trace(path)
    assert trace.kinds(0) == ["update", "weight"]
    for step in (1, 2):
        before, after = trace.read(step - 1, 0, "weight"), trace.read(step, 0, "weight")
        assert np.array_equal(trace.read(step, 0, "update"), before - after)
        assert (before != after).any()
    assert after.sum(dtype=np.float64) == pytest.approx(result.checksum, abs=1e-6)


@pytest.mark.distributed
def test_all_of_one_ranks_steps_of_adamw_are_adamws():
    usual = {"workload": "gpt-pydoc", "size": "0.1M", "vocab": 60, "nproc": 1, "batch_size": 4}
    usual |= {"steps": 8, "optimizer": "adamw", "learning_rate": 0.01, "evaluate": False}
    dense = run(RunConfig(**usual, compressor="none"))
    config = RunConfig(**usual, compressor="topk", ratio=1.0, adam_correction=True)
    corrected = run(config)
    # clipped before the step, and its decay after it, as with AdamW
    assert config.training().clip_kind == "local"
    assert corrected.losses == pytest.approx(dense.losses, rel=1e-5)
    # of one twentieth the rest comes later
    few = run(config.replace(ratio=0.05))
    assert few.losses[0] == dense.losses[0]
    assert few.losses[-1] > dense.losses[-1] + 0.01
    assert config.metadata()["adam_correction"] is True
    assert "adam_correction" not in RunConfig(**usual).metadata()


def test_learning_rates():
    def rates(**settings):
        config = RunConfig(**DIGITS | {"learning_rate": 2.0} | settings)
        return [config.learning_rate_at(step) for step in (0, 19, 20, 29, 30, 39)]

    steps = [2, 2, 0.2, 0.2, 0.02, 0.02]
    assert rates() == pytest.approx(steps)
    for count, factors in ((1, [1]), (2, [1, 0.01]), (5, [1, 1, 0.1, 0.01, 0.01])):
        short = RunConfig(**DIGITS | {"learning_rate": 2.0, "steps": count})
        found = [short.learning_rate_at(step) / 2 for step in range(count)]
        assert found == pytest.approx(factors)
    assert rates(workload="lstm-pydoc") == [2.0] * 6
    assert rates(workload="lstm-pydoc", lr_schedule="step") == pytest.approx(steps)
    assert rates(lr_schedule="constant") == [2.0] * 6
    assert rates(lr_schedule="linear") == pytest.approx([2, 1.05, 1, 0.55, 0.5, 0.05])
    assert rates(lr_schedule="thirds") == pytest.approx([2, 0.2, 0.2, 0.02, 0.02, 0.002])
    assert rates(lr_schedule="annealed")[5] == pytest.approx(2 * 1.01**-146)
    assert rates(lr_schedule="constant", lr_warm_up=40) == pytest.approx(
        [0.05, 1, 1.05, 1.5, 1.55, 2]
    )
    cosine = rates(lr_schedule="cosine")
    assert cosine[0] == 2
    assert cosine[2] == pytest.approx(1)
    assert cosine == sorted(cosine, reverse=True)


@every(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, "momentum must be in"),
        ({"weight_decay": -1.0}, "weight_decay must be in"),
        ({"clip": -1.0}, "clip must be in"),
        ({"clip_kind": "both"}, "clip_kind must be one of local, averaged"),
        ({"warm_up": -1}, "warm_up must be"),
        ({"lr_schedule": "exponential"}, "lr_schedule must be one of constant, step"),
        ({"lr_warm_up": -1}, "lr_warm_up must be"),
        ({"recipe": "paper"}, "no paper trains resnet20-digits"),
        ({"recipe": "best"}, "recipe must be one of short, paper"),
        ({"nesterov": "torch", "momentum": 0.9}, "nesterov must be one of none, dgc, redsync"),
        ({"nesterov": "redsync", "momentum": 0.9}, "the optimizer has no Nesterov"),
        ({"nesterov": "dgc"}, "needs a momentum"),
        ({"compressor": "none", "clip": 1.0, "clip_kind": "local"}, "none cannot clip locally"),
        ({"compressor": "powersgd", "warm_up": 3}, "powersgd has no warm-up"),
        ({"compressor": "redsync-quantised", "error_feedback": False}, "use threshold:redsync for"),
        ({"compressor": "threshold:nonsense"}, "no compressor"),
        ({"compressor": "dgc", "options": {"nonsense": 1}}, "system 'dgc'"),
        ({"optimizer": "adam"}, "no optimizer 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "trains with AdamW, without momentum"),
        ({"optimizer": "muon", "compressor": "dgc"}, "trains with Muon, without momentum"),
        ({"optimizer": "muon", "parallel": "fsdp", "compressor": "none"}, "whole matrices"),
        (
            {"adam_correction": True},
            "takes the place of AdamW, and resnet20-digits trains with SGD",
        ),
        *(
            ({"optimizer": "adamw", "adam_correction": True} | other, message)
            for other, message in (
                ({"compressor": "none"}, "needs a compressor with error feedback"),
                ({"compressor": "torch-topk"}, "needs a compressor with error feedback"),
                ({"compressor": "signsgd"}, "needs a compressor with error feedback"),
                ({"local_steps": 2}, "no local steps"),
                ({"parallel": "hsdp", "nproc": 4}, "parallel=ddp"),
                ({"error_feedback": False}, "a memory of its own"),
                ({"clip": 1.0, "clip_kind": "averaged"}, "clips each rank's gradient"),
            )
        ),
        ({"ranks": (0, 2)}, "no rank 2 among 2, which are counted from 0"),
        ({"at": (0, 7), "steps": 7}, "no step 7 among 7, counted from 0"),
        ({"hidden": 12}, "resnet20-digits has no hidden: leave it out"),
        ({"vocab": 12}, "resnet20-digits has no vocab: leave it out"),
        ({"kinds": ("updates",)}, "did you mean update"),
        ({"kinds": ("update",), "local_steps": 4}, "take pseudogradient"),
        ({"kinds": ("pseudogradient",)}, "give local_steps too"),
        ({"kinds": ("local",)}, "of sharded models"),
    ],
)
def test_trainings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        RunConfig(**DIGITS | settings).check()


@pytest.mark.slow
@pytest.mark.distributed
def test_systems_that_send_everything_are_momentum_sgd():
    config = RunConfig(workload="resnet20-digits", steps=6, batch_size=8, weight_decay=1e-3)
    config = config.replace(momentum=0.9, nesterov="dgc", lr_schedule="cosine", evaluate=False)
    dense = run(config.replace(compressor="none"))
    plain = run(config.replace(compressor="none", momentum=0, nesterov="none"))
    for name, options in (
        ("redsync", {"dense_below": 3000, "topk_below": 1 << 30}),
        ("threshold:topk", {}),
    ):
        whole = run(config.replace(compressor=name, ratio=1.0, options=options, warm_up=2))
        assert whole.losses == pytest.approx(dense.losses, rel=2e-3)
        assert abs(whole.losses[-1] - plain.losses[-1]) > 0.1 * plain.losses[-1]
    dgc = run(config.replace(compressor="dgc", ratio=0.01, warm_up=4, clip=1.0))
    selected = [r["selected"] / r["numel"] for r in dgc.records]
    assert selected[:3] == pytest.approx([0.25, 0.0625, 0.015625], rel=0.3)
    assert selected[4:] == pytest.approx([0.01] * 2, rel=0.3)
    assert dgc.records[0]["numel"] < dgc.numel  # vectors are dense


@pytest.mark.slow
@pytest.mark.distributed
def test_baselines_train_beside_the_compressors():
    def train(compressor, **settings):
        config = RunConfig(workload="resnet20-digits", steps=8, batch_size=8, ratio=0.01)
        return run(config.replace(compressor=compressor, **settings))

    ours, theirs = train("topk"), train("torch-topk")
    assert theirs.checksum == ours.checksum  # the same selection, to the bit
    assert all(r["selected"] == round(0.01 * ours.numel) for r in theirs.records)
    dense, low_rank, alone = (train(name) for name in ("none", "powersgd", "no-exchange"))
    assert low_rank.losses[:2] == dense.losses[:2]  # it starts compressing at step 2
    assert low_rank.losses != dense.losses
    assert np.isfinite(low_rank.losses).all()
    full = train("powersgd", options={"start_powerSGD_iter": 100})
    assert full.losses == pytest.approx(dense.losses, rel=1e-4)
    assert alone.losses[0] == dense.losses[0]
    assert alone.losses[2] != dense.losses[2]
    assert not low_rank.records + alone.records


def test_a_run_does_not_read_the_source_of_all_that_called_it(monkeypatch):
    asked, stack = [], inspect.stack
    monkeypatch.setattr(inspect, "stack", lambda *options: asked.append(1) or stack(*options))
    tiny = {"workload": "lstm-pydoc", "hidden": 16, "vocab": 50, "compressor": "none"}
    run(RunConfig(**tiny, nproc=1, steps=1, evaluate=False))
    assert not asked


def test_a_failing_rank_is_one_line():
    with pytest.raises(
        RunFailedError, match=r"rank \d failed: InputError: a batch of 4000 .* 1797 images"
    ):
        run(RunConfig(workload="resnet20-digits", batch_size=2000, steps=1))
    with pytest.raises(RunFailedError, match="too short"):
        run(RunConfig(workload="lstm-pydoc", batch_size=20_000, steps=1, nproc=1))


UNGUARDED = """
from capture.workloads import RunConfig, run
run(RunConfig(workload="resnet20-digits", nproc=1, steps=1))
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stdin", [True, False])
def test_a_script_that_its_processes_cannot_import_is_told_so(tmp_path, stdin):
    file = tmp_path / "script.py"
    file.write_text(UNGUARDED)
    source = ("-", UNGUARDED) if stdin else (file,)
    done = program(*source, check=False, trains=True)
    assert 'below if __name__ == "__main__":' in done.stderr


@pytest.mark.distributed
@pytest.mark.slow
def test_same_seed_same_gradients_and_capture_changes_no_loss(tmp_path):
    config = RunConfig(workload="resnet20-digits", steps=9, every=4, compressor="dgc", batch_size=8)
    results = [run(config.replace(out=tmp_path / f"{name}.zarr")) for name in "ab"]
    bare = run(config)
    other = run(config.replace(seed=1))
    assert results[0].losses == results[1].losses == bare.losses
    assert results[0].checksum == results[1].checksum == bare.checksum
    assert other.losses != bare.losses
    dense = config.replace(compressor="none")
    captured, unhooked = run(dense.replace(out=tmp_path / "dense.zarr")), run(dense)
    assert captured.losses == unhooked.losses  # the second is DDP without a hook
    assert captured.checksum == unhooked.checksum
    traces = [open_trace(tmp_path / f"{name}.zarr") for name in "ab"]
    assert traces[0].steps() == [0, 4, 8]
    assert traces[0].ranks == [0, 1]
    for (*key, a), (*same, b) in zip(traces[0].gradients(), traces[1].gradients(), strict=True):
        assert key == same
        assert np.array_equal(a, b)
    assert traces[0].scalars()["loss"].tolist() == [results[0].losses[s] for s in (0, 4, 8)]
    stored = traces[0].attrs
    assert (stored["model"], stored["data"], stored["compressor"]) == ("resnet20", "digits", "dgc")
    assert (stored["ratio"], stored["error_feedback"], stored["seed"]) == (0.001, True, 0)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"compressor": "none"}, {"compressor": "sidco-e", "error_feedback": False}]
)
def test_training_learns(options):
    config = RunConfig(workload="resnet20-digits", steps=60, batch_size=8, ratio=0.1, **options)
    losses = run(config.replace(evaluate=False)).losses
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


def command(*args):
    done = terminal.run(*args)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.distributed
@pytest.mark.slow
def test_cifar10_and_ptb_runs_over_shared_data(tmp_path, cifar10, ptb):
    images = tmp_path / "images"  # of unseen ones 200: all 10,000 take half a minute
    images.mkdir()
    (images / "data_batch_1.bin").symlink_to(cifar10 / "data_batch_1.bin")
    (images / "test_batch.bin").write_bytes((cifar10 / "test_batch.bin").read_bytes()[: 200 * 3073])
    command("capture", "resnet20-cifar10", "--out", tmp_path / "c.zarr", "--steps", 3, "--every", 1,
            "--data-dir", images, "--batch-size", 16, "--rank", 1, "--no-error-feedback")  # fmt: skip
    trace = open_trace(tmp_path / "c.zarr")
    assert (trace.ranks, trace.steps(), trace.kinds(1)) == ([1], [0, 1, 2], ["gradient"])
    done = command("capture", "lstm-ptb", "--out", tmp_path / "p.zarr", "--steps", 3, "--at", 2, "--hidden", 64,
                   "--data-dir", ptb, "--vocab", 2000, "--dtype", "bfloat16", "--nproc", 1)  # fmt: skip
    # three steps: better than guessing among all words, and far from good
    assert 100 < float(re.search(r"perplexity (\d+) on unseen", done.stderr)[1]) < 2000
    trace = open_trace(tmp_path / "p.zarr")
    assert trace.numel == 2 * 2000 * 64 + 2000 + 2 * (4 * 64 * 128 + 8 * 64)
    assert trace.steps() == [2]
    rows = json.loads(command("info", tmp_path / "p.zarr", "--format", "json").stdout)
    # words of the vocabulary that no batch holds leave their rows of the embedding at zero
    assert rows[0]["zeros"] > 10_000


@pytest.mark.distributed
@pytest.mark.slow
def test_a_run_captured_as_sketches_is_the_same_run_captured_in_full(tmp_path):
    for store in ("gradients", "sketches"):
        command("capture", "resnet20-digits", "--out", tmp_path / f"{store}.zarr", "--steps", 5, "--every", 1,
                "--batch-size", 8, "--store", store)  # fmt: skip
    full, sketched = (open_trace(tmp_path / f"{store}.zarr") for store in ("gradients", "sketches"))
    assert sketched.attrs["capture"]["store"] == "sketches"
    assert (sketched.ranks, sketched.steps()) == (full.ranks, full.steps()) == ([0, 1], [*range(5)])
    for step, rank, kind, values in full.gradients():
        for layer, stored in zip(full.layers, sketched.sketches(step, rank, kind), strict=True):
            assert_same_sketch(stored, sketch(values[layer.slice], 7))
    for rank in (0, 1):
        assert sketched.kinds(rank) == full.kinds(rank) == ["gradient", "corrected"]
        columns = full.scalars(rank)
        assert columns["loss"].size == 5
        for name, column in sketched.scalars(rank).items():
            assert np.array_equal(column, columns[name]), name
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / f"{store}.zarr").rglob("*") if f.is_file())
        for store in ("gradients", "sketches")
    ]
    # all files, metadata and the columns of the compressor included, which are as large in both
    assert sizes[1] < sizes[0] / 20


def test_a_run_says_which_trace_it_is_captured_in(tmp_path, monkeypatch, capsys):
    from capture import cli, workloads

    for trace, said in (("run-2.zarr", "in 1 s; captured in run-2.zarr"), ("", "in 1 s")):
        result = RunResult(losses=[2.0, 1.0], seconds=[0.5, 0.5], trace=trace)
        monkeypatch.setattr(workloads, "run", lambda config, result=result: result)
        cli._run(RunConfig(**DIGITS, out=tmp_path / "run.zarr"))
        assert " ".join(capsys.readouterr().err.split()).endswith(said)


def test_a_run_says_how_it_does_on_what_it_has_not_seen(monkeypatch, capsys):
    from capture import cli, workloads

    for rates, said in (
        ({"accuracy": 0.625}, "0.250, 62.5 % of unseen right, in 7 s"),
        ({"perplexity": 91.7}, "0.250, perplexity 92 on unseen text, in 7 s"),
        (
            {"word_error_rate": 0.75, "character_error_rate": 0.3},
            "0.250, 75 % of words and 30 % of characters wrong in unseen speech, in 7 s",
        ),
        ({}, "loss 2.500 → 0.250 in 7 s"),
    ):
        result = RunResult(losses=[2.5, 0.25], seconds=[3.0, 4.0], trace="", **rates)
        monkeypatch.setattr(workloads, "run", lambda config, result=result: result)
        cli._run(RunConfig(**DIGITS))
        assert " ".join(capsys.readouterr().err.split()).endswith(said)


def test_an_unknown_store_is_one_line(tmp_path):
    words = ("capture", "resnet20-digits", "--out", tmp_path / "a.zarr", "--store", "best")
    done = program("-m", "gradstats", *words, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("no store 'best'; there are gradients, sketches\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_demo_from_a_to_z(tmp_path):
    done = command("demo", "--out", tmp_path / "demo", "--steps", 4)
    assert "k̂/k, elements kept over elements asked for" in " ".join(done.stdout.split())
    assert "resnet20" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
    words = " ".join(done.stdout.split())
    said = re.search(r"Sending one element in a thousand, the loss ends at ([\d.]+) without error feedback and at "
                     r"([\d.]+) with it\. Law that .*?: (.+?)\. Rule that .*?: (.+)\.$", words)  # fmt: skip
    for text, name in zip(said.groups(), ("topk", "topk-ef"), strict=False):
        scalars = open_trace(tmp_path / "demo" / f"{name}.zarr").scalars(0)
        assert float(text) == pytest.approx(
            float(np.mean(scalars["loss"])), abs=0.006
        )  # of all steps
    assert str(tmp_path / "demo" / "report.html") in "".join(done.stderr.split())
    for name in ("topk", "topk-ef"):
        trace = tmp_path / "demo" / f"{name}.zarr"
        assert len(open_trace(trace).steps()) == 4
        tree = xarray.open_datatree(trace, engine="zarr", consolidated=False)
        assert tree["rank00001"].sizes["step"] == 4


@pytest.mark.distributed
@pytest.mark.parametrize(
    "workload", [{"workload": "resnet20-digits"}, {"workload": "gpt-pydoc", "size": "0.1M"}]
)
def test_a_sharded_run_trains_as_ddp_and_is_captured(tmp_path, workload):
    # what is captured of either is not clipped
    settings = {**workload, "steps": 3, "batch_size": 8, "every": 1, "clip": 0.01}
    whole, path = tmp_path / "ddp.zarr", tmp_path / "fsdp.zarr"
    dense = run(RunConfig(**settings, compressor="none", evaluate=False, out=whole))
    sharded = run(RunConfig(**settings, compressor="none", parallel="fsdp", out=path))
    assert sharded.losses == pytest.approx(dense.losses, rel=1e-3)
    assert sharded.numel == dense.numel
    assert sharded.checksum == pytest.approx(dense.checksum, rel=1e-4)
    trace = open_trace(path)
    assert (trace.ranks, trace.shard_ranks(0), trace.steps()) == ([0], [0, 1], [0, 1, 2])
    assert trace.attrs["parallel"] == "fsdp"
    each_rank = open_trace(whole)
    for step in trace.steps():
        mean = (each_rank.read(step, rank=0) + each_rank.read(step, rank=1)) / 2
        off = np.linalg.norm(trace.read(step) - mean) / np.linalg.norm(mean)
        assert off < 0.01 < 10 * settings["clip"] < np.linalg.norm(mean)


def listening(ports):
    """Add the addresses, in hexadecimal, at which this process and those that it started listen."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    sockets = set()
    for file in (f for pid in own for f in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):
            sockets.add(os.readlink(file))
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(fields[1].partition(":")[0])


@pytest.mark.distributed
def test_episodes_of_different_lengths_and_nothing_that_others_reach():
    """Ranks of a sharded policy play as under DDP; a run leaves this process as it was, and listens to itself alone."""
    config = RunConfig(workload="policy-cartpole", steps=3, batch_size=2, compressor="none")
    before, ports, over = set(), set(), threading.Event()
    listening(before)

    def watch():
        while not over.wait(0.05):
            listening(ports)

    def settings():
        names = ("torch.distributed", "torch.multiprocessing.spawn")
        loggers = [logging.getLogger(name) for name in names]
        return [(each.level, each.disabled) for each in loggers], dict(os.environ)

    was = settings()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        sharded = run(config.replace(parallel="fsdp"))
    finally:
        over.set()
        watcher.join()
    assert settings() == was
    assert "0100007F" in ports | before  # gloo's, on the loopback interface
    assert ports - before <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert sharded.losses == pytest.approx(run(config).losses, rel=1e-3)


@pytest.mark.distributed
def test_two_replicas_of_two_shards_compress_between_them(tmp_path):
    path = tmp_path / "hsdp.zarr"
    config = RunConfig(
        workload="lstm-pydoc",
        parallel="hsdp",
        nproc=4,
        steps=3,
        hidden=32,
        vocab=200,
        out=path,
        every=1,
        ratio=0.01,
    )
    result = run(config)
    trace = open_trace(path)
    assert trace.ranks == [0, 2]
    assert list(trace.kinds(2)) == ["gradient", "corrected"]
    assert len(result.records) == 3
    assert trace.scalars(0)["loss"].tolist() == result.losses
    both = trace.compression(0)["bytes_sent"]
    assert (both > [r["bytes_sent"] for r in result.records]).all()
    assert (trace.compression(0)["numel"] == trace.numel).all()


def test_a_run_of_sharded_replicas_with_local_steps(tmp_path):
    path = tmp_path / "run.zarr"
    config = RunConfig(
        workload="gpt-pydoc",
        parallel="hsdp",
        nproc=4,
        steps=4,
        local_steps=2,
        compressor="topk",
        ratio=0.01,
        size="0.1M",
        out=path,
        every=1,
    )
    result = run(config)
    trace = open_trace(path)
    assert [rank for rank in trace.ranks if trace.has_gradients(rank)] == [0, 2]
    assert list(trace.kinds(2)) == ["gradient", "corrected", "pseudogradient"]
    assert trace.steps() == [0, 1]
    assert trace.scalars(0)["loss"].tolist() == result.losses[1::2]
    assert trace.attrs["local_steps"]["steps"] == 2
    assert len(result.records) == 2


@every(
    ("settings", "said"),
    [
        ({"parallel": "tp"}, "ddp, fsdp, hsdp"),
        ({"parallel": "fsdp"}, "compressor=none"),
        ({"parallel": "fsdp", "compressor": "none", "local_steps": 4}, "use parallel=hsdp"),
        ({"parallel": "hsdp"}, "at least 4"),
        ({"parallel": "hsdp", "nproc": 5}, "even nproc"),
        ({"parallel": "hsdp", "nproc": 4, "compressor": "dgc"}, "for ddp alone"),
        ({"parallel": "hsdp", "nproc": 4, "compressor": "powersgd"}, "for ddp alone"),
        ({"parallel": "hsdp", "nproc": 4, "bucket_mb": 1.0}, "bucket_mb is for ddp"),
        ({"parallel": "hsdp", "nproc": 4, "diagnose_every": 1}, "diagnose_every is for ddp"),
        ({"parallel": "hsdp", "nproc": 4, "clip": 1.0, "clip_kind": "local"}, "averaged"),
    ],
)
def test_what_sharded_runs_refuse(settings, said):
    with pytest.raises(InputError, match=said):
        RunConfig(workload="resnet20-digits", **settings).check()
