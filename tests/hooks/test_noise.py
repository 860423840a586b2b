"""The noise of micro-batches: exact sums from hooks on the accumulation, and intervals that hold the truth."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from micro_batches import ask_noise, population, truth
from support.every import every
from torch import nn
from torch.utils.checkpoint import checkpoint
from workers import monitor as cases
from workers.hook import model
from workers.trainings import inputs

from gradstats import Monitor
from gradstats.errors import InputError
from gradstats.primitives.sketch import sketch
from gradstats.statistics.noise import noise_and_signal
from gradstats.statistics.pot.peaks import stability_at


class Sometimes(nn.Module):
    """A network of which some micro-batches do not reach a part."""

    def __init__(self):
        super().__init__()
        self.net, self.idle = model(), nn.Linear(3, 3)

    def forward(self, x):
        y = self.net(x)
        return self.idle(y) if x[0, 0] > 0 else y


def whole(net, losses):
    """Return the gradients of some losses by themselves, zeros where one does not reach."""
    found = []
    for loss in losses:
        gradients = torch.autograd.grad(loss(net), list(net.parameters()), allow_unused=True)
        pairs = zip(gradients, net.parameters(), strict=True)
        found.append(torch.cat([(p * 0 if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(found).detach().double().numpy()


@every("micro", [2, 5])
@every("kind", ["plain", "scaled", "zeros", "sometimes", "float64"])
def test_the_sums_are_those_of_the_micro_batches_alone(kind, micro):
    dtype = torch.float64 if kind == "float64" else torch.float32
    net = (Sometimes() if kind == "sometimes" else model()).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    monitor = Monitor(net, every=2, optimizer=optimizer, noise=16)
    scale, seen = 1024.0 if kind == "scaled" else 1.0, []
    for step in range(6):
        optimizer.zero_grad(set_to_none=kind != "zeros")
        losses = [
            lambda m, i=i: m(inputs(0, i).to(dtype)).square().mean() / micro
            for i in range(micro * step, micro * (step + 1))
        ]
        seen.append(whole(net, losses))
        for loss in losses:
            (scale * loss(net)).backward()
        for p in net.parameters():
            p.grad = None if p.grad is None else p.grad / scale
        optimizer.step()
    values = monitor.values
    scale, noise, signal = cases.noise_by_hand(seen[::2])
    assert values["gradient/noise_scale"] == pytest.approx(16 * scale, rel=1e-4)
    cosine = signal / (signal + noise)
    assert values["gradient/micro_cosine"] == pytest.approx(cosine, rel=1e-4)
    if kind != "sometimes":  # elements that one of the two does not reach have no difference
        differences = [sketch(np.float32(g[1] - g[0])).magnitudes for g in seen[::2]]
        xi = [stability_at(m, 0.1, "pwm").c for m in differences]
        assert values["gradient/noise_xi"] == pytest.approx(np.mean(xi), abs=0.02)
    assert not [name for name in values if name.endswith(("_low", "_high"))]  # of 3 steps


@pytest.mark.distributed
def test_under_ddp_each_rank_has_its_own():
    from ranks import run_ranks

    found = run_ranks(2, cases.own_noise)
    for said, exact in found:
        assert said == pytest.approx(exact, rel=1e-4)
    assert found[0][1] != found[1][1]


def test_a_monitor_finds_the_noise_scale_of_a_data_set():
    """A regression whose per-sample gradients are known, at fixed parameters: the interval holds the exact value."""
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = x @ torch.randn(20) + torch.randn(256)
    net = nn.Linear(20, 1, bias=False)
    errors = (net(x)[:, 0] - y).detach()
    exact = truth((2 * errors[:, None] * x).double().numpy())
    monitor, drawn = Monitor(net, noise=4), torch.Generator().manual_seed(1)
    for _ in range(41):
        net.zero_grad()
        for _ in range(4):
            i = torch.randint(0, 256, (4,), generator=drawn)
            (net(x[i])[:, 0] - y[i]).square().mean().backward()
        values = monitor.step()
    low, high = (values[f"gradient/noise_scale_{end}"] for end in ("low", "high"))
    assert low < exact < high
    assert high < 2 * low
    ends = [values[f"gradient/micro_cosine_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx([1 / (1 + high / 4), 1 / (1 + low / 4)])
    low, xi, high = (values[f"gradient/noise_xi{end}"] for end in ("_low", "", "_high"))
    assert low < xi < high


def test_the_noise_is_that_of_the_last_steps_of_a_window():
    net = model()
    monitor, seen = Monitor(net, noise=True, window=10), []
    for step in range(25):
        net.zero_grad()
        losses = [
            lambda m, i=i: (1 + i) * m(inputs(0, i)).square().mean()
            for i in (2 * step, 2 * step + 1)
        ]
        seen.append(whole(net, losses))
        for loss in losses:
            loss(net).backward()
        monitor.step()
    scale, _, _ = cases.noise_by_hand(seen[-10:])
    assert monitor.values["gradient/noise_scale"] == pytest.approx(scale, rel=1e-4)
    assert cases.noise_by_hand(seen)[0] != pytest.approx(scale, rel=0.01)
    differences = [sketch(np.float32(g[1] - g[0])).magnitudes for g in seen]
    xi = [stability_at(m, 0.1, "pwm").c for m in differences]
    assert monitor.values["gradient/noise_xi"] == pytest.approx(np.mean(xi[-10:]), abs=0.002)


def test_micro_batches_that_are_zeroed_between_are_not_compared():
    net = model()
    monitor = Monitor(net, noise=True)
    for i in range(2):
        net.zero_grad()
        net(inputs(0, i)).square().mean().backward()
    assert "gradient/noise_scale" not in monitor.step()


def test_intervals_hold_the_exact_value_as_often_as_they_say():
    """The committed rows have 1,000 draws a case; here are some of each, that of all must be within the band."""
    inside = 0
    for kind in ("normal", "heavy"):
        for micro, batch in ((2, 4), (4, 8), (8, 1)):
            for i in range(40):
                rng = np.random.default_rng([11, i])
                low, high, exact = ask_noise(kind, micro, batch, 50, rng)["noise scale"]
                inside += low <= exact <= high
    # 93 to 97 % of 240, and what chance does to them
    assert 0.93 - 0.025 <= inside / 240 <= 0.97 + 0.025


def test_both_parts_are_without_bias():
    gradients = population("normal", 64, 5)
    rng, found = np.random.default_rng(0), []
    for _ in range(4000):
        g = gradients[rng.integers(0, 64, 3)]
        found.append(noise_and_signal(np.square(g).sum(), np.square(g.sum(0)).sum(), 3))
    mean = gradients.mean(0)
    exact = np.square(gradients - mean).sum(1).mean(), mean @ mean
    error = np.std(found, axis=0) / 4000**0.5
    assert (np.abs(np.mean(found, axis=0) - exact) < 4 * error).all()


def test_a_loss_scale_that_changes_gives_no_step_more_weight():
    found = []
    for scales in ([1.0] * 6, [2.0**16, 2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**13]):
        net, scaler = model(), torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))  # from then on its scale can be set
        monitor = Monitor(net, noise=True, scaler=scaler)
        for step, scale in enumerate(scales):
            scaler.update(scale)
            net.zero_grad()
            for i in range(2):
                scaler.scale(net(inputs(0, 2 * step + i)).square().mean()).backward()
            monitor.step()
        found.append(monitor.values)
    for name in ("noise_scale", "micro_cosine"):
        one, other = (values[f"gradient/{name}"] for values in found)
        assert one == pytest.approx(other, rel=1e-5)


def test_a_step_that_is_not_described_computes_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "gradstats.hooks.noise.noise_ends", lambda *_: asked.append("ends") or (0.0, 1.0)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.get_scale = lambda: asked.append("scale") or 2.0
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    monitor = Monitor(net, every=2, optimizer=optimizer, noise=True, scaler=scaler)
    monitor._noise._values = lambda: asked.append("values") or {}
    for step in range(12):
        optimizer.zero_grad()
        for i in range(2):
            (2 * net(inputs(0, 2 * step + i)).square().mean()).backward()
        optimizer.step()
    # six steps described: the interval in the first and the sixth of them
    assert [asked.count(each) for each in ("scale", "values", "ends")] == [6, 6, 2]


def test_what_cannot_be_compared_is_said_once():
    for passes, zero, message in ((1, True, "one alone"), (2, False, "not zeroed")):
        net = model()
        monitor = Monitor(net, noise=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(3):
                for _ in range(passes):
                    net(inputs(0, step)).square().mean().backward()
                monitor.step()
                if zero:
                    net.zero_grad()
        assert [message in str(w.message) for w in said] == [True]
        assert ("gradient/noise_scale" in monitor.values) != zero
        monitor.close()
        assert not monitor._noise._handles
    for wrong in (0, -1, 2.5, "yes"):
        with pytest.raises(InputError, match="noise"):
            Monitor(model(), noise=wrong)


def test_reentrant_checkpointing_changes_no_number():
    found = []
    for reentrant in (True, False):
        net, monitored = model(), {}
        monitor = Monitor(net, noise=True)
        for step in range(2):
            net.zero_grad()
            for i in range(3):
                y = inputs(0, 3 * step + i)
                for layer in net:  # a part of the backward pass each
                    y = checkpoint(layer, y.requires_grad_(), use_reentrant=reentrant)
                y.square().mean().backward()
            monitored = monitor.step()
        found.append(monitored)
    assert found[0] == pytest.approx(found[1])
    assert "gradient/noise_scale" in found[0]
