"""The transformer, and runs with local steps: from the command to every table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.every import every
from support.networks import measured_network
from support.terminal import records
from support.terminal import run as terminal

from capture.workloads import RunConfig, run
from capture.workloads.gpt import make_model, make_task
from capture.workloads.optimizers import make_optimizers
from gradstats import open_trace
from gradstats.errors import InputError
from gradstats.network.plan import plan

GPT = {"workload": "gpt-pydoc", "batch_size": 4, "steps": 12}
ONE = ("--kind", "pseudogradient", "--rank", 0)


def test_the_transformer_sees_no_word_that_comes_later():
    torch.manual_seed(0)
    model = make_model(RunConfig(**GPT))
    words = torch.randint(4000, (2, 64))
    changed = words.clone()
    changed[:, 40:] = torch.randint(4000, (2, 24))
    before, after = model(words), model(changed)
    assert before.shape == (2, 64, 4000)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-5)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-2)
    # an untrained one says that all words are about as likely
    assert before.log_softmax(-1).mean().item() == pytest.approx(-np.log(4000), abs=0.1)


def test_ranks_read_different_windows_and_every_window_once():
    config = RunConfig(**GPT | {"nproc": 2})
    tasks = [make_task(config, rank) for rank in range(2)]
    seen = []

    def note(rows):
        seen.append(rows)
        return torch.zeros(*rows.shape, 4000, requires_grad=True)

    for step in range(50):
        for task in tasks:
            task.loss(note, step)
    rows = torch.cat(seen)
    assert rows.shape == (2 * 50 * 4, 64)
    assert len(rows.unique(dim=0)) > 0.99 * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_it_learns_and_says_so_of_unseen_text(autocast):
    config = RunConfig(**GPT | {"nproc": 1, "autocast": autocast})
    torch.manual_seed(0)
    task = make_task(config, 0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    before = task.evaluate(task.model)["perplexity"]
    for step in range(15):
        optimizer.zero_grad()
        loss = task.loss(task.model, step)
        loss.backward()
        optimizer.step()
    assert loss.dtype == torch.float32
    assert before == pytest.approx(4000, rel=0.2)
    assert task.evaluate(task.model)["perplexity"] < before / 2


@every(
    ("settings", "message"),
    [
        ({"size": "1G"}, "gpt-pydoc has the sizes 0.1M, 0.5M, 2M"),
        ({"workload": "resnet20-digits", "size": "2M"}, "resnet20-digits has one size"),
        ({"workload": "resnet20-digits", "autocast": True}, "leave autocast out"),
        ({"compressor": "dgc"}, "trains with AdamW, without momentum"),
        ({"momentum": 0.9}, "trains with AdamW, without momentum"),
        ({"local_steps": -1}, "local_steps must be at least 0"),
        ({"outer": "mean"}, "outer is of local steps: give --local-steps too"),
        ({"fragments": 2}, "fragments is of local steps"),
        ({"steps": 4, "outer": "adam"}, "outer must be one of diloco, sparseloco, mean"),
        ({"local_steps": 4, "delay": 4}, "4 local steps leave room for"),
        ({"local_steps": 4, "fragments": 5}, "4 local steps leave room for"),
        ({"local_steps": 4, "average": "all"}, "average must be one of ranks, senders"),
        ({"local_steps": 4, "outer_learning_rate": 0.0}, "outer_learning_rate must be in"),
        ({"local_steps": 4, "compressor": "powersgd"}, "does not go with local steps"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        RunConfig(**GPT | settings).check()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Seven exchanges of two ranks, of what the command makes."""
    path = tmp_path_factory.mktemp("local") / "gpt.zarr"
    done = terminal(
        *("capture", "gpt-pydoc", "--out", path, "--local-steps", 4, "--steps", 26, "--every", 1),
        *("--batch-size", 2, "--compressor", "topk", "--ratio", 0.01, "--indices", "chunk", "-q"),
        *("--size", "0.1M"),
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.distributed
def test_the_command_captures_every_exchange(trace):
    opened = open_trace(trace)
    assert opened.ranks == [0, 1]
    # six intervals, and the steps that are left at the end
    assert opened.steps(1) == [0, 1, 2, 3, 4, 5, 6]
    assert opened.kinds(1) == ["gradient", "corrected", "pseudogradient"]
    about = opened.attrs
    assert about["local_steps"] == {
        "steps": 4, "outer": "diloco", "fragments": 1, "delay": 0, "average": "ranks",
        "outer_learning_rate": 0.7,
    }  # fmt: skip
    assert about["optimizer"]["name"] == "AdamW"
    assert about["size"] == "0.1M"
    ours, theirs = (opened.read(0, rank, "pseudogradient") for rank in (0, 1))
    assert not np.array_equal(ours, theirs)
    # four steps of Adam move a parameter by about four learning rates
    assert 1e-4 < np.abs(ours).max() < 4 * 1e-3
    assert (opened.compression(0)["bytes_sent"] > 0).all()


@pytest.mark.distributed
@every(
    "command",
    [
        ("info",),
        ("fit", *ONE, "--step", 0),
        ("compressibility", *ONE),
        ("quality", *ONE, "--ratio", 0.01),
        ("quality", *ONE, "--ratio", 0.01, "--versus", "exact"),
        ("pot", *ONE, "--step", 0),
        ("drift", *ONE),
        ("compression",),
    ],
    ids=lambda command: command[0],
)
def test_every_table_takes_pseudogradients(trace, command):
    name, *options = command
    found = records(name, trace, *options)
    assert found
    if "--kind" in command:
        kinds = {r["kind"] for r in found}  # and the controls of compressibility
        assert "pseudogradient" in kinds
        assert not kinds & {"gradient", "corrected"}
    elif name == "info":
        assert {r["kind"] for r in found} == {"gradient", "corrected", "pseudogradient"}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("unrendered")
def test_the_report_and_the_plan_take_them(trace, tmp_path):
    page = tmp_path / "report.html"
    done = terminal("report", trace, "-o", page, "-q")
    assert done.returncode == 0, done.stderr
    assert "pseudogradient" in page.read_text(encoding="utf-8")
    found = plan(trace, measured_network(), 0.05, [2], [0.01], ["topk"])
    assert {r["compressor"] for r in found} == {"none", "topk"}


def test_a_trace_names_the_compressor_that_the_exchanges_have():
    """SparseLoCo's is its own, where there are local steps; elsewhere it is what was asked for."""
    for steps, outer, named, ratio in (
        (4, "sparseloco", "sparseloco", 64 / 4096),
        (4, "diloco", "topk", 0.01),
        (4, "mean", "topk", 0.01),
        (0, "sparseloco", "topk", 0.01),
        (0, "diloco", "topk", 0.01),
    ):
        config = RunConfig(**GPT, local_steps=steps, outer=outer, compressor="topk", ratio=0.01)
        found = config.metadata()
        assert (found["compressor"], found["ratio"]) == (named, ratio), (steps, outer)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "settings",
    [
        {"outer": "sparseloco", "average": "senders", "autocast": True},
        {"outer": "mean", "compressor": "none", "fragments": 2, "delay": 1},
    ],
    ids=lambda settings: settings["outer"],
)
def test_other_outer_loops_run(settings, tmp_path):
    config = RunConfig(**GPT | settings, local_steps=4, out=tmp_path / "run.zarr", every=1)
    result = run(config)
    assert len(result.losses) == 12
    assert np.isfinite(result.losses).all()
    assert result.losses[-1] < result.losses[0]
    assert result.perplexity < 4000
    opened = open_trace(tmp_path / "run.zarr")
    assert "pseudogradient" in opened.kinds(0)
    assert json.dumps(opened.attrs["local_steps"])
    assert opened.attrs["size"] == "0.5M"  # where none was asked for
    if settings["outer"] == "sparseloco":
        assert [r["step"] for r in result.records] == [0, 1, 2]
        assert opened.attrs["compressor"] == "sparseloco"
        bits = [8 * r["bytes_sent"] / r["selected"] for r in result.records]
        assert max(bits) < 16


@pytest.mark.distributed
def test_local_steps_of_muon_are_those_of_both_its_optimizers():
    # few small steps: Muon computes in bfloat16, which makes much of a last bit
    small = {
        "size": "0.1M",
        "vocab": 60,
        "batch_size": 2,
        "steps": 4,
        "evaluate": False,
        "learning_rate": 0.0001,
    }
    local = {
        "nproc": 2,
        "optimizer": "muon",
        "local_steps": 2,
        "outer": "mean",
        "compressor": "none",
    }
    config = RunConfig(**GPT | small | local)
    result = run(config)
    torch.manual_seed(config.seed)
    tasks = [make_task(config, rank) for rank in range(2)]
    models = [task.model for task in tasks]
    models[1].load_state_dict(models[0].state_dict())
    both = [make_optimizers(config, model) for model in models]
    assert [type(each).__name__ for each in both[0]] == ["Muon", "AdamW"]
    losses = []
    for step in range(4):
        for task, model, optimizers in zip(tasks, models, both, strict=True):
            model.zero_grad()
            loss = task.loss(model, step)
            loss.backward()
            losses.append(loss.item())
            for each in optimizers:
                for group in each.param_groups:
                    group["lr"] = config.learning_rate_at(step)
                each.step()
        if step % 2:
            for pair in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in pair]).mean(0)
                for p in pair:
                    p.data.copy_(mean)
    assert result.losses == pytest.approx(losses[::2], rel=1e-5)
    assert result.losses[-1] < result.losses[0]
    total = sum(float(p.detach().double().sum()) for p in models[0].parameters())
    assert result.checksum == pytest.approx(total, abs=1e-3)
