"""Trainings other than the papers': each learns, is what its seed says, and has zeros where it should."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.every import every
from torch.nn import functional as F

from capture.workloads import (
    RunConfig,
    gpt,
    graph,
    images,
    lora,
    lstm,
    moe,
    policy,
    recommender,
    run,
)
from capture.workloads.images import Epochs
from capture.workloads.layouts import backward_pass, layout
from capture.workloads.optimizers import make_optimizers
from capture.workloads.text import load_pydoc, words_to_ids
from gradstats import open_trace

TINY = {"size": "0.1M", "vocab": 100, "batch_size": 4, "lr_warm_up": 0}
FAMILIES = {  # settings, steps, and the largest share of the first losses that the same batches may have then
    "moe-pydoc": (TINY | {"learning_rate": 1e-2}, 25, 0.85),
    "lora-pydoc": (TINY | {"learning_rate": 2e-2}, 25, 0.99),
    "vit-digits": ({"batch_size": 8, "lr_warm_up": 0}, 40, 0.85),
    "unet-digits": ({"batch_size": 8, "lr_warm_up": 0}, 20, 0.6),
    "simclr-digits": ({"batch_size": 8, "learning_rate": 0.01, "lr_warm_up": 0}, 30, 0.8),
    "policy-cartpole": ({"batch_size": 4, "learning_rate": 3e-3}, 15, 0.9),
    "gcn-blocks": ({}, 30, 0.8),
    "dlrm-clicks": ({"learning_rate": 5e-3}, 60, 0.97),
}


def task_of(name, rank=0, **settings):
    config = RunConfig(workload=name, compressor="none", nproc=2, **FAMILIES[name][0] | settings)
    config.check()
    torch.manual_seed(config.seed)
    return config, importlib.import_module(config.info.module).make_task(config, rank)


@pytest.mark.slow
@every("name", FAMILIES)
def test_a_training_learns_and_is_what_its_seed_says(name, monkeypatch):
    monkeypatch.setattr(lora, "_FIRST_STEPS", 20)
    _, steps, share = FAMILIES[name]
    gradient, _ = backward_pass(name, repeats=1, batch_size=FAMILIES[name][0].get("batch_size"))
    assert any(values.any() for values in gradient.values())
    config, task = task_of(name, steps=steps)
    trained = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    assert [r["layer"] for r in layout(name, **FAMILIES[name][0])] == [*trained]
    first = [task_of(name, rank, seed=s)[1].loss(task.model, 0).item() for rank, s in
             ((0, 0), (0, 0), (1, 0), (0, 1))]  # fmt: skip
    assert first[0] == first[1]
    assert len(set(first)) == 3  # each rank and seed has its own batch
    losses, optimizers = [], make_optimizers(config, task.model)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = task.loss(task.model, step)
        torch.autograd.backward(loss)
        assert all(p.grad is not None for p in trained.values())  # as DDP needs it
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == first[0]
    with torch.no_grad():
        again = [float(task.loss(task.model, step)) for step in range(3)]
    assert np.mean(again) < share * np.mean(losses[:3])


def test_a_pass_over_a_text_shows_each_window_once_over_all_ranks():
    count, context, size, nproc = 23, 4, 2, 3
    windows = gpt._Windows(torch.arange(count * context + 3), context)
    assert windows.rows[1].tolist() == [4, 5, 6, 7, 8]  # the next one begins with its last word
    config = SimpleNamespace(nproc=nproc, seed=5)
    per_pass = count // (size * nproc)
    orders = []
    for first in (0, per_pass):
        shown = [
            windows.batch(config, rank, size, step)[:, 0].tolist()
            for step in range(first, first + per_pass)
            for rank in range(nproc)
        ]
        assert {len(each) for each in shown} == {size}
        orders.append([start // context for each in shown for start in each])
        assert len(set(orders[-1])) == len(orders[-1]) == 18
        assert set(orders[-1]) <= set(range(count))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("batch_size", [64, 20])  # the last of the batches has four windows
def test_perplexity_is_of_all_windows_however_they_are_cut(batch_size):
    config, _ = task_of("moe-pydoc", batch_size=batch_size)
    torch.manual_seed(1)
    model = torch.nn.Embedding(100, 100)  # scores of the next word, by the word before
    torch.nn.init.normal_(model.weight, std=3.0)
    context = gpt.size_of(config).context
    unseen = torch.randint(100, (70 * context + 1,))
    unseen[60 * context :] = 0  # the last windows are unlike the others
    text = torch.arange(200 * context) % 100
    task = gpt.text_task(config, 0, model, text, unseen)
    words = unseen[: 64 * context + 1]
    with torch.no_grad():
        expected = F.cross_entropy(model(words[:-1]), words[1:]).exp()
    assert task.evaluate(model)["perplexity"] == pytest.approx(float(expected), rel=1e-4)


def test_experts_that_no_word_chose_have_gradients_of_zero():
    torch.manual_seed(0)
    mixture = moe._Experts(6)
    word = torch.randn(1, 1, 6)
    mixed, _ = mixture(word)
    mixed.sum().backward()
    reached = {i for i, e in enumerate(mixture.experts) if e[0].weight.grad.any()}
    scores = mixture.router(word[0, 0])
    assert reached == {*scores.topk(2).indices.tolist()}
    assert all(e[0].weight.grad is not None for e in mixture.experts)
    weights = {i: scores[i].exp().item() for i in reached}
    expected = sum(w * mixture.experts[i](word[0]) for i, w in weights.items())
    torch.testing.assert_close(mixed[0], expected / sum(weights.values()))
    with torch.no_grad():
        mixture.router.weight.zero_()
    assert mixture(torch.randn(2, 3, 6))[1].item() == pytest.approx(1)  # its least: all alike


def test_adapters_begin_as_the_transformer_that_they_adapt():
    config = RunConfig(workload="lora-pydoc", **TINY)
    torch.manual_seed(0)
    model = gpt.make_model(config)
    words = torch.randint(100, (2, 32))
    before = model(words)
    lora._adapted(model)
    assert torch.equal(model(words), before)
    assert {n.rsplit(".", 1)[1] for n, p in model.named_parameters() if p.requires_grad} == {
        "a",
        "b",
    }


@pytest.mark.distributed
def test_frozen_parameters_are_not_captured(tmp_path):
    path = tmp_path / "run.zarr"
    config = RunConfig(workload="lora-pydoc", **TINY, steps=2, every=1, out=path, ratio=0.1,
                       kinds=("gradient", "corrected", "update"))  # fmt: skip
    result = run(config)
    trace = open_trace(path)
    expected = layout("lora-pydoc", size="0.1M", vocab=100)
    assert [layer.name for layer in trace.layers] == [r["layer"] for r in expected]
    assert result.numel == trace.numel == sum(r["numel"] for r in expected)
    gradient = trace.read(0, 0, "gradient")
    for layer in trace.layers:  # b is zero, so that a's gradient is too
        assert bool(np.any(gradient[layer.slice])) == layer.name.endswith("b")


def test_rows_that_no_sample_has_get_gradients_of_zero():
    _, task = task_of("dlrm-clicks", batch_size=8)
    torch.autograd.backward(task.loss(task.model, 0))
    clicks = recommender._Clicks(0)
    _, values, _ = clicks.draw(8, recommender.generator(0, 0, 1))
    for i, table in enumerate(task.model.tables):
        touched = table.weight.grad.any(1).nonzero()[:, 0].tolist()
        assert touched == sorted(set(values[:, i].tolist()))


def test_the_cart_is_its_mirror_image_and_the_pole_falls():
    states = 0.1 * torch.randn(50, 4)
    right = (torch.arange(50) % 2).float()
    torch.testing.assert_close(policy._moved(-states, 1 - right), -policy._moved(states, right))
    state, speeds = torch.tensor([[0.0, 0.0, 0.05, 0.0]]), []
    for step in range(40):
        state = policy._moved(state, torch.tensor([float(step % 2)]))
        speeds.append(float(state[0, 2]))
    assert speeds[-1] > 0.15


def test_the_graph_has_the_communities_it_is_made_of():
    features, edges, truth = graph._graph(0)
    a, b = edges.indices()
    other = a != b
    inside = float((truth[a] == truth[b])[other].float().mean())
    assert inside == pytest.approx(0.6, abs=0.02)
    dense = edges.to_dense()
    assert torch.equal(dense, dense.t())
    degrees = torch.bincount(a).float()
    torch.testing.assert_close(dense @ degrees.sqrt(), degrees.sqrt())  # its first eigenvector
    centres = torch.stack([features[truth == c].mean(0) for c in range(6)])
    assert float(F.mse_loss(centres, features[truth == 0].mean(0).expand(6, -1))) > 0.01


def test_held_out_words_are_trained_on_by_nobody():
    config = RunConfig(workload="gpt-pydoc", **TINY)
    text, unseen = gpt.texts(config)
    every = words_to_ids(load_pydoc(), 100)
    assert len(unseen) > 1000
    # what is trained on, then what is held out, and no word twice
    assert torch.equal(torch.cat((text, unseen)), every)


def test_an_epoch_is_an_order_of_its_own():
    epochs = Epochs(32)

    def order(epoch, seed):
        # of two ranks, four samples each
        batches = [
            epochs.drawn(4 * epoch + step, 4, rank, 2, seed) for step in range(4) for rank in (0, 1)
        ]
        return torch.cat(batches).tolist()

    orders = [order(epoch, seed) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(each) == list(range(32)) for each in orders)
    assert len({tuple(each) for each in orders}) == 6


def test_no_state_leads_from_the_end_of_a_text_to_its_beginning():
    given = []

    def network(words, state):
        given.append(state)
        known = torch.full((1,), float(len(given)))
        return F.one_hot(words, 5).float(), (known, known)

    reader = lstm._Reader(torch.arange(400) % 5, 2, 0, 2)
    assert reader.windows > 1
    for step in range(2 * reader.windows):
        reader.loss(network, step)
    begins = [step for step, state in enumerate(given) if state is None]
    assert begins == [0, reader.windows]
    # else that of the window before
    after = [int(state[0]) for state in given if state is not None]
    assert after == [step for step in range(2 * reader.windows) if step and step != reader.windows]


def test_columns_of_all_ranks_are_stretches_of_the_text_side_by_side():
    config = RunConfig(workload="lstm-ptb", vocab=50, batch_size=3, hidden=4, nproc=2)
    given = []

    def network(words, state):
        given.append(words)
        return F.one_hot(words, 50).float(), (torch.zeros(1),) * 2

    for rank in range(2):
        lstm.make_task(config, rank).loss(network, 0)
    ids = words_to_ids(load_pydoc(), 50)
    stretches = ids[: len(ids) // 6 * 6].view(6, -1)
    window = len(given[0])
    assert torch.equal(torch.cat(given, 1), stretches[:, :window].t())


class Scores:
    """A network that keeps what it is given and answers with scores whose gradients can be read."""

    def __init__(self, answer):
        self.answer, self.given = answer, []

    def __call__(self, *inputs):
        self.given.append(inputs)
        self.scores = self.answer(*inputs).requires_grad_()
        return self.scores


def test_a_cart_that_has_ended_is_in_no_gradient_and_in_no_loss():
    _, task = task_of("policy-cartpole", batch_size=32)
    network = Scores(lambda states: torch.zeros(*states.shape[:2], 2))
    loss = task.loss(network, 0)
    torch.autograd.backward(loss)
    states = network.given[0][0]
    beyond = (states[..., 0].abs() >= 2.4) | (states[..., 2].abs() >= np.deg2rad(12))
    over = beyond.cummax(0).values  # for good, whatever comes later
    steps = (~over).sum(0)
    assert int(steps.min()) < int(steps.max()) == len(states)
    moved = network.scores.grad.abs().sum(2) > 0
    assert torch.equal(moved, ~over)
    assert loss.item() == pytest.approx(1 - float(steps.sum()) / (32 * 200))


def test_noise_and_image_of_a_step_are_of_one_variance_together():
    config, task = task_of("unet-digits", batch_size=64)
    clean = images.load_images(config.info, None).batch(0, 64, 0, 2, 0)[0][:, :1].double()
    network = Scores(lambda noisy, at: torch.zeros_like(noisy))
    plain = task.loss(network, 0).item()
    noisy, at = network.given[0]
    # Nichol and Dhariwal's equation 17
    share = np.cos((at.numpy() / 1000 + 0.008) / 1.008 * np.pi / 2) / np.cos(
        0.008 / 1.008 * np.pi / 2
    )
    signal = torch.from_numpy(share)[:, None, None, None]
    noise = (noisy.double() - signal * clean) / (1 - signal**2).sqrt()
    some = at > 100  # before, the noise is small beside rounding
    assert float(noise[some].mean()) == pytest.approx(0, abs=0.05)
    assert float(noise[some].std()) == pytest.approx(1, abs=0.05)
    # it is what is to be told
    told = Scores(lambda noisy, at: noise.float())
    assert task.loss(told, 0).item() < 1e-4 < plain


def test_nodes_that_accuracy_is_of_are_trained_on_by_nobody():
    rows, tasks = [], [task_of("gcn-blocks", rank)[1] for rank in range(2)]
    for step in range(100):
        for task in tasks:
            network = Scores(lambda features, edges: torch.zeros(len(features), 6))
            torch.autograd.backward(task.loss(network, step))
            rows.append(network.scores.grad.abs().sum(1) > 0)
    trained = torch.stack(rows).any(0)
    assert 0 < int((~trained).sum()) < 0.5 * len(trained)
    truth = graph._graph(0)[2]
    # right where nobody trains, and wrong elsewhere
    answer = torch.where(trained, (truth + 1) % 6, truth)
    for task in tasks:
        assert task.evaluate(lambda *_: F.one_hot(answer, 6).float()) == {"accuracy": 1.0}
