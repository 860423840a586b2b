"""The monitor against statistics of the whole gradient, and what it says when training breaks."""

from __future__ import annotations

import ast
import math
import re
import weakref

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import run_ranks
from torch import nn
from workers import monitor as cases
from workers.hook import model
from workers.trainings import inputs

import gradstats
from capture import Capture
from gradstats import Monitor
from gradstats.errors import InputError
from gradstats.hooks.spikes import Spikes, Trigger
from gradstats.statistics.pot.peaks import stability_at

LAYERS = [(n, p.numel()) for n, p in model().named_parameters()]


def check(values, gradient, scale=1.0):
    """Compare a monitor's dict with NumPy on the whole gradient."""
    size = np.abs(gradient[np.isfinite(gradient)])
    some = size[size > 0]
    assert values["gradient/norm"] == pytest.approx(np.linalg.norm(size), rel=1e-6)
    assert values["gradient/mean"] == pytest.approx(some.mean(), rel=1e-6)
    assert values["gradient/max"] == pytest.approx(some.max(), rel=1e-6)
    assert values["gradient/zeros"] == pytest.approx(np.mean(size == 0))
    assert values["gradient/nonfinite"] == np.count_nonzero(~np.isfinite(gradient))
    # cells are 1/128 wide at most
    low, high = (np.mean(some * scale < 2**-14 * f) for f in (0.99, 1.01))
    assert low - 1e-9 <= values["gradient/underflow"] <= high + 1e-9
    whole = gradstats.sketch(gradient).magnitudes
    assert values["gradient/xi"] == pytest.approx(stability_at(whole, 0.1, "pwm").c, abs=0.01)
    assert values["gradient/p"] == pytest.approx(gradstats.compressibility(gradient).p, rel=0.02)
    if "gradient/norm/0.weight" in values:
        start = 0
        for name, numel in LAYERS:
            norm = np.linalg.norm(gradient[start : start + numel])
            assert values[f"gradient/norm/{name}"] == pytest.approx(norm, rel=1e-6)
            start += numel


def check_sgd(values):
    """SGD at a rate of 0.1, whatever it has of the gradient: float32 rounds the parameters."""
    norm = 0.1 * values["gradient/norm"]
    assert values["gradient/update_norm"] == pytest.approx(norm, rel=1e-4)
    assert values["gradient/update_cosine"] == pytest.approx(1, abs=1e-6)
    assert 0 < values["gradient/unchanged_bf16"] < 1


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, cases.two_ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("name", cases.CASES)
def test_under_ddp_it_describes_what_the_optimizer_uses(two_ranks, name):
    _, scale, compress = cases.CASES[name]
    (first, logged), (second, silent) = (found[name] for found in two_ranks)
    assert (logged, silent) == (cases.STEPS, 0)  # one step an optimizer step, logged once
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        (values, gradient, extra), (others, other, _) = mine, theirs
        assert values["gradient/step"] == step
        assert np.array_equal(gradient, other)
        check(values, gradient, scale)
        check_sgd(values)
        shared = values.keys() - {"gradient/residual_norm", "gradient/quality"}
        assert {n: values[n] for n in shared} == {n: others[n] for n in shared}
        if compress:
            assert values["gradient/quality"] == extra[0]
            assert values["gradient/residual_norm"] == pytest.approx(extra[1], rel=1e-6)
        else:
            assert "gradient/quality" not in values


def check_shards(results):
    for (values, gradient, _), *others in zip(*results, strict=True):
        check(values, gradient)
        check_sgd(values)
        assert all(each[0] == values for each in others)


@pytest.mark.distributed
def test_of_shards_it_describes_the_whole(two_ranks):
    """FSDP2 over two ranks; the last layer has three rows, two for one rank and one for the other."""
    check_shards([found["sharded"] for found in two_ranks])


@pytest.mark.distributed
def test_of_shards_a_monitor_on_one_rank_waits_for_the_others_and_says_so(two_ranks):
    first, second = [found["on one rank"] for found in two_ranks]
    said, waited, values = first
    advice = "rank 1 (of 2){}: make the Monitor on every rank, not under `if rank == 0`; rank 0 alone logs"
    assert said == "a Monitor of a sharded model waited 1 s in vain for " + advice.format("")
    assert waited == ["a Monitor of a sharded model waits for " + advice.format(", to make it too")]
    # then made on both, as it says
    assert second == ("", [], values)
    assert values["gradient/norm"] > 0


@pytest.mark.distributed
@pytest.mark.slow
def test_of_shards_that_are_replicated_it_counts_each_once():
    check_shards(run_ranks(4, cases.sharded, (2, 2)))


@pytest.mark.distributed
@pytest.mark.slow
def test_of_shards_in_tensor_parallel_it_describes_the_whole():
    check_shards(run_ranks(4, cases.sharded_in_tensor_parallel))


def trained(steps=3, every=1, **options):
    """Train a small model; return the monitor, and the gradients of all steps."""
    net = model()
    monitor, seen = Monitor(net, every=every, **options), []
    for step in range(steps):
        net.zero_grad()
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        seen.append((monitor.step(), cases.flat(net)))
    return monitor, seen


def test_every_nth_step_is_described():
    logged = []
    monitor, seen = trained(7, 3, log=logged.append, start_step=2)
    assert [bool(values) for values, _ in seen] == [False, True, False, False, True, False, False]
    assert [v["gradient/step"] for v in logged] == [3, 6]
    check(logged[-1], seen[4][1])
    assert monitor.values == logged[-1]
    assert all(isinstance(v, float) and math.isfinite(v) for v in logged[-1].values())


@pytest.mark.parametrize("when", ["scaled", "unscaled", "hooked", "fused", "not given"])
def test_values_have_no_loss_scale_whenever_they_are_taken(when):
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=when == "fused")
    hooked = when in ("hooked", "fused", "not given")
    known = None if when == "not given" else scaler
    monitor = Monitor(net, optimizer=optimizer if hooked else None, scaler=known)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        scaler.scale(net(x).square().mean()).backward()
        gradient = cases.flat(net) / 2**12
        if when == "unscaled":
            scaler.unscale_(optimizer)
        if not hooked:
            monitor.step()
        scaler.step(optimizer)
        scaler.update()
        check(monitor.values, gradient, 2**12)
        assert monitor.values["gradient/step"] == step


def test_a_step_that_the_scaler_skips_is_seen_by_hand_only():
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    by_hand, hooked = Monitor(net, scaler=scaler), Monitor(net, optimizer=optimizer)
    scaler.scale(1e9 * net(torch.ones(2, 40)).square().sum()).backward()
    assert by_hand.step()["gradient/nonfinite"] > 0
    assert by_hand.blame is not None
    scaler.step(optimizer)
    assert not hooked.values


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_a_step_by_hand_comes_before_the_scaler_s(fused):
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=fused)
    monitor = Monitor(net, scaler=scaler)
    for set_to_none in (True, False, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(net(inputs(0, 0)).square().mean()).backward()
        monitor.step()
        scaler.step(optimizer)
        if not fused:
            monitor.step()  # unscaled, as the scaler's stage still says
        scaler.update()
        with pytest.raises(InputError, match=r"call monitor.step\(\) before scaler.step\(\)"):
            monitor.step()


def test_once_closed_it_holds_no_gradient_and_looks_at_no_step():
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor = Monitor(net, scaler=scaler)
    scaler.scale(net(inputs(0, 0)).square().mean()).backward()
    monitor.step()
    scaler.step(optimizer)
    monitor.close()
    assert not any(map(weakref.getweakrefcount, (p.grad for p in net.parameters())))
    optimizer.step()
    assert not any(map(weakref.getweakrefcount, (p.grad for p in net.parameters())))


def test_with_a_scaler_optimizers_may_take_turns_and_parameters_be_frozen():
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    layers = [net[0], net[2]]
    net[4].requires_grad_(False)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    monitor = Monitor(net, scaler=scaler)
    for step in range(4):
        layer, optimizer = layers[step % 2], optimizers[step % 2]
        optimizer.zero_grad()  # of the other one gradients stay
        gradients = torch.autograd.grad(
            scaler.scale(net(inputs(0, step)).square().mean()), list(layer.parameters())
        )
        torch.autograd.backward(list(layer.parameters()), gradients)
        monitor.step()
        scaler.step(optimizer)
        scaler.update()
    layers[1].requires_grad_(False)
    for step in range(2):
        optimizers[0].zero_grad()
        scaler.scale(net(inputs(0, step)).square().mean()).backward()
        monitor.step()
        scaler.step(optimizers[0])
        scaler.update()


def test_unused_parameters_and_empty_gradients():
    net = nn.ModuleDict({"a": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    monitor = Monitor(net, per_layer=True)
    with pytest.warns(UserWarning, match="no gradient at all"):
        assert monitor.step() == {"gradient/step": 0.0}
    net["a"](torch.ones(1, 4)).sum().backward()
    found = monitor.step()
    assert set(found) >= {"gradient/norm/a.weight", "gradient/norm/a.bias"}
    assert not any("unused" in name for name in found)
    assert found["gradient/norm"] == pytest.approx(15**0.5)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("keyword", [True, False])
def test_with_a_closure_the_values_are_those_of_the_step(make, keyword):
    """Of LBFGS, which calls it several times, those at the step's beginning."""
    net = model()
    optimizer = make(net.parameters(), lr=0.01)
    monitor = Monitor(net, optimizer=optimizer)
    for step in range(3):
        computed = []

        def closure(step=step, computed=computed):
            optimizer.zero_grad()
            x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
            loss = net(x).square().mean()
            loss.backward()
            computed.append(cases.flat(net))
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss is not None
        check(monitor.values, computed[0])
        assert monitor.values["gradient/step"] == step
        assert len(computed) > 1 or make is not torch.optim.LBFGS


def test_an_optimizer_that_another_replaces_is_missed_once():
    """By a backward pass of what goes on; not where the training is over, the monitor closed, or gone, too."""
    net = model()

    def train(optimizer, steps=2):
        for step in range(steps):
            optimizer.zero_grad()
            net(inputs(0, step)).square().mean().backward()
            optimizer.step()

    def begin():
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        monitor = Monitor(net, optimizer=optimizer)
        train(optimizer)
        return monitor, torch.optim.SGD(net.parameters(), 0.02)

    monitor, other = begin()
    with pytest.warns(UserWarning, match="make a monitor for the new one") as caught:
        train(other)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert monitor.values["gradient/step"] == 1
    monitor, other = begin()
    monitor.close()
    train(other)
    monitor, other = begin()
    del monitor
    train(other)


def test_an_optimizer_in_a_wrapper_is_found_and_what_is_none_is_one_line():
    class Wrapper(torch.optim.Optimizer):
        """As accelerate's and Lightning's: an Optimizer that was never initialised."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor = Monitor(net, optimizer=Wrapper(Wrapper(optimizer)))
    net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    check(monitor.values, cases.flat(net))
    with pytest.raises(InputError, match="str has none of its hooks"):
        Monitor(net, optimizer="SGD")


@pytest.mark.filterwarnings("error")
def test_gradients_that_an_optimizer_takes_in_the_backward_pass_are_left_out_by_name():
    def take(parameter):
        parameter.grad = None

    for layers, left in (((0,), 2), ((0, 1), 0)):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
        for i in layers:
            for p in net[i].parameters():
                p.register_post_accumulate_grad_hook(take)
        monitor = Monitor(net)
        net[:2](torch.ones(1, 4)).sum().backward()
        with pytest.warns(UserWarning, match=r"0\.weight, 0\.bias"):
            values = monitor.step()
        if left:
            assert values["gradient/norm"] > 0
        else:
            assert values == {"gradient/step": 0.0}
        net[:2](torch.ones(1, 4)).sum().backward()
        monitor.step()
        assert not net[2].weight._post_accumulate_grad_hooks


def steady(net, step, bad=None):
    """Give a model the gradients of an uneventful step, with one layer changed."""
    for i, (name, p) in enumerate(net.named_parameters()):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        p.grad = noise * (40 if name == bad else 1)


def test_a_spike_names_its_layer_and_triggers_a_capture(tmp_path):
    net = model()
    monitor = Monitor(net, following=3)
    with Capture(tmp_path / "run.zarr", net, monitor.triggered, total_steps=40) as capture:
        for step in range(40):
            steady(net, step, "2.weight" if step == 25 else None)
            found = monitor.step()
            capture.step()
            if step == 25:
                assert monitor.blame == "2.weight"
                assert found["gradient/spike/2.weight"] > 6
                assert [n for n in found if "spike/" in n] == ["gradient/spike/2.weight"]
            else:
                assert monitor.blame is None
            assert ("gradient/spike" in found) == (step >= 10)
    assert gradstats.open_trace(tmp_path / "run.zarr").steps() == [25, 26, 27]


def test_collapse_and_slow_growth_are_alarms_and_name_their_layer():
    """Of one layer beside others and of a model that has one only; ``growth`` is the factor over a window."""
    for net in (model(), nn.Linear(40, 100, bias=False)):
        layers = [n for n, p in net.named_parameters() if p.ndim > 1]
        for of, change in {
            "collapse": lambda step: 1e-2 if step == 70 else 1,
            "growth": lambda step: 2 ** (max(step - 60, 0) / 20),
        }.items():
            monitor, found = Monitor(net, following=1), {}
            for step in range(120):
                steady(net, step)
                dict(net.named_parameters())[layers[-1]].grad *= change(step)
                values = monitor.step()
                if names := [n for n in values if of in n]:
                    found[step] = names, monitor.blame, monitor.triggered(step), values
            assert found
            first = min(found)
            names, blamed, asked, values = found[first]
            assert first == 70 if of == "collapse" else 60 < first <= 110
            assert f"gradient/{of}/{layers[-1]}" in names
            assert blamed == layers[-1]
            assert asked
            assert values[f"gradient/{of}/{layers[-1]}"] >= (6 if of == "collapse" else 2)


def test_what_moves_all_layers_hides_no_layer_and_is_no_alarm():
    """Common noise with heavy tails, and norms that decay: sixty layers, of which one jumps at the end."""
    rng, layers = np.random.default_rng(0), [str(i) for i in range(60)]
    common = 0.3 * rng.standard_t(3, 300) - np.log1p(np.arange(300) / 10)
    spikes, alarms = Spikes(layers, 50, 6.0), []
    for step, level in enumerate(common):
        norms = np.exp(level + 0.05 * rng.standard_normal(60))
        norms[7] *= 4 if step == 299 else 1
        whole = float(np.linalg.norm(norms))
        values, blame = spikes.find(whole, dict(zip(layers, norms, strict=True)))
        alarms += [(step, n, blame) for n in values if n != "spike" or not spikes.doubtful]
    assert alarms == [(299, "spike/7", "7")]


def test_one_layer_thirty_times_too_large_is_an_alarm_soon_after_the_start():
    """By itself a layer's past is too short to tell; the whole gradient's is not."""
    names = [str(i) for i in range(6)]
    for seed in range(5):
        rng, spikes = np.random.default_rng(seed), Spikes(names, 50, 6.0)
        for step in range(23):
            norms = np.exp(0.1 * rng.standard_normal(6))
            norms[2] *= 30 if step == 22 else 1
            _, blame = spikes.find(
                float(np.linalg.norm(norms)), dict(zip(names, norms.tolist(), strict=True))
            )
            assert blame == ("2" if step == 22 else None)


def test_of_sixty_layers_with_heavy_tails_one_far_out_is_no_alarm_of_the_whole():
    """One of many is always far out; that all jump is an alarm, as no layer's tail explains it."""
    names = [str(i) for i in range(60)]
    for seed in range(3):
        rng, spikes, alarms, far = np.random.default_rng(seed), Spikes(names, 50, 6.0), [], 0
        for step in range(300):
            norms = np.exp(0.1 * rng.standard_t(3, 60)) * (30 if step == 299 else 1)
            values, _ = spikes.find(
                float(np.linalg.norm(norms)), dict(zip(names, norms.tolist(), strict=True))
            )
            far += values.get("spike", 0) > 8
            alarms += [(step, n) for n in values if n != "spike" or not spikes.doubtful]
        assert alarms == [(299, "spike")]
        assert far > 1  # that jump, and one that a single layer made


def test_of_heavy_tails_a_jump_is_no_alarm_that_is_little_further_out_than_one_before():
    """On its side, and ten steps before: what grows is seen, and an alarm does not hide the next."""
    for sizes, expected in (
        ({100: 0.9, 200: 3.0}, []),
        ({100: 0.9, 200: 6.0}, [200]),
        ({100: -0.9, 200: 3.0}, [200]),
        ({199: 0.9, 200: 3.0}, [200]),
        ({200: 6.0, 250: 6.0}, [200, 250]),
    ):
        rng, spikes, alarms = np.random.default_rng(0), Spikes(["w"], 50, 6.0), []
        for step in range(300):
            norm = float(np.exp(0.1 * rng.standard_t(5) + sizes.get(step, 0)))
            values, _ = spikes.find(norm, {"w": norm})
            alarms += [step] * ("spike/w" in values)
        assert alarms == expected, sizes


def test_a_small_change_of_norms_that_never_changed_hides_no_alarm():
    """As of gradients that were clipped: against no spread at all it is infinitely far out."""
    rng, spikes, alarms = np.random.default_rng(0), Spikes(["w"], 50, 6.0), []
    for step in range(250):
        norm = (
            {30: 0.9, 35: 1.1}.get(step, 1.0) if step < 60 else np.exp(0.1 * rng.standard_normal())
        )
        norm = float(norm * {239: 1e4, 249: 1e-4}.get(step, 1))
        values, _ = spikes.find(norm, {"w": norm})
        alarms += [(step, n) for n in ("spike/w", "collapse/w") if n in values]
    assert alarms == [(239, "spike/w"), (249, "collapse/w")]


def test_a_robust_z_is_that_of_numpy():
    """Deviations from the median in units of 1.4826 median absolute deviations, of logarithms."""
    rng = np.random.default_rng(7)
    norms = np.exp(0.4 * rng.standard_normal(40))
    norms[-1] = 1e9  # beyond any limit that the norms before can set
    spikes = Spikes(["w"], 25, 6.0)
    for step, norm in enumerate(norms):
        values, _ = spikes.find(float(norm), {"w": float(norm)})
        past = np.log(norms[max(step - 25, 0) : step])
        if step >= 10:
            deviation = 1.4826 * np.median(np.abs(past - np.median(past)))
            expected = (np.log(norm) - np.median(past)) / deviation
            assert values["spike"] == pytest.approx(expected)
        else:
            assert "spike" not in values
    assert values["spike/w"] == values["spike"] > 6


@pytest.mark.parametrize("blamed", ["a", "b", "c"])
def test_of_several_layers_with_an_alarm_the_one_that_changed_most_is_blamed(blamed):
    """Two layers jump; the smaller one by a larger factor. What did not jump is larger than both."""
    rng, sizes = np.random.default_rng(4), dict.fromkeys("abcdefg", 1.0)
    other = "abca"["abc".index(blamed) + 1]
    sizes |= {blamed: 10.0, "g": 1000.0}
    spikes = Spikes(sizes, 50, 6.0)
    for step in range(40):
        norms = {n: size * float(np.exp(0.1 * rng.standard_normal())) for n, size in sizes.items()}
        if step == 39:
            norms[blamed] *= 30
            norms[other] *= 90
        values, blame = spikes.find(float(np.linalg.norm([*norms.values()])), norms)
        assert blame == (blamed if step == 39 else None)
    # beside a median that two of seven have moved, layers that stayed may seem to collapse
    assert {n for n in values if n.startswith("spike/")} == {f"spike/{blamed}", f"spike/{other}"}
    assert values[f"spike/{other}"] > values[f"spike/{blamed}"]


def test_a_spike_of_the_whole_that_is_no_alarm_triggers_nothing():
    rng, spikes, trigger = (
        np.random.default_rng(1),
        Spikes(["w"], 50, 6.0),
        Trigger({"spike": 6.0}, 1),
    )
    large = asked = 0
    for step, norm in enumerate(np.exp(0.1 * rng.standard_t(3, 1000))):
        values, _ = spikes.find(float(norm), {"w": float(norm)})
        trigger.look_at(values, spikes.doubtful)
        large += values.get("spike", 0) >= 6
        asked += trigger.asks_for(step)
    assert large >= 3
    assert asked == 0


def test_a_gradient_that_is_not_finite_is_blamed_on_the_last_layer():
    net = model()
    monitor = Monitor(net, trigger={"max": 50.0}, following=2)
    steady(net, 0)
    net[0].weight.grad[3, 4] = math.nan
    net[2].bias.grad[:5] = math.inf
    assert monitor.step()["gradient/nonfinite"] == 6
    assert monitor.blame == "2.bias"
    assert not monitor.triggered(1)
    steady(net, 1, "4.weight")
    monitor.step()
    assert [monitor.triggered(s) for s in (2, 3, 4)] == [True, True, False]


def test_a_real_divergence_triggers():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    monitor, fired = Monitor(net, optimizer=optimizer, following=1), []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 5.0 if step >= 40 else 0.02
        optimizer.zero_grad()
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(step))
        (net(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
        fired.append(monitor.triggered(step))
    assert not any(fired[:40])
    assert any(fired[41:45])


def test_the_page_runs(capsys):
    page = (ROOT / "docs/howto/monitor.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    said = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [values["gradient/step"] for values in said] == [0, 10, 20]


def test_options_that_make_no_sense_are_one_line():
    net = model()
    for options, message in (
        ({"every": 0}, "every must be at least 1"),
        ({"window": 5}, "window must be at least 10"),
        ({"trigger": {"nrom": 1}}, "did you mean norm"),
        ({"trigger": {"norm": "5"}}, "trigger 'norm' must be"),
        ({"parameters": ["x*"]}, "no trainable parameter"),
        ({"spike": -1}, "spike must be in"),
    ):
        with pytest.raises(InputError, match=message):
            Monitor(net, **options)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        Monitor("net")


def test_a_pattern_that_matches_nothing_beside_one_that_does_is_said():
    with pytest.warns(
        UserWarning, match="^parameters: no parameter is called wieght, so it watches"
    ):
        Monitor(model(), parameters=["wieght", "*bias"]).close()


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy().copy()


def by_hand(before, after, gradient):
    """Return what a monitor says of an update, from whole vectors in float64."""
    b, a, g = (np.asarray(v, np.float64) for v in (before, after, gradient))
    rounded = [torch.from_numpy(np.float32(v)).bfloat16() for v in (b, a)]
    return {
        "gradient/update_norm": np.linalg.norm(b - a),
        "gradient/update_to_weight": np.linalg.norm(b - a) / np.linalg.norm(b),
        "gradient/update_cosine": (b - a) @ g / np.linalg.norm(b - a) / np.linalg.norm(g),
        "gradient/unchanged_bf16": float((rounded[0] == rounded[1]).float().mean()),
    }


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_updates_are_those_of_the_whole(kind):
    net, logged = model(), []
    options = {"fused": True} if kind == "fused" else {}
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = make(net.parameters(), 1e-3, **options)
    monitor = Monitor(net, logged.append, every=2, optimizer=optimizer, per_layer=True)
    wanted = []
    for step in range(4):
        optimizer.zero_grad()
        net(inputs(0, step)).square().mean().backward()
        before = weights(net)
        gradient = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy().copy()
        optimizer.step()
        wanted.append(by_hand(before, weights(net), gradient))
        if step == 0:
            p = net[0].weight
            ratio = np.linalg.norm(before[: p.numel()] - weights(net)[: p.numel()])
            ratio /= np.linalg.norm(before[: p.numel()])
            found = monitor.values["gradient/update_to_weight/0.weight"]
            assert found == pytest.approx(ratio, rel=1e-5)
    assert [values["gradient/step"] for values in logged] == [0, 2]
    for values, want in zip(logged, wanted[::2], strict=True):
        for name, value in want.items():
            assert values[name] == pytest.approx(value, rel=1e-5), name
    assert (wanted[0]["gradient/update_cosine"] > 0.9999) == (kind == "sgd")
    assert 0 < wanted[0]["gradient/unchanged_bf16"] < 1


def test_an_update_triggers_a_capture():
    for name in ("update_norm", "update_to_weight"):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        monitor = Monitor(net, optimizer=optimizer, trigger={name: 0.0}, following=1)
        net(inputs(0, 0)).square().mean().backward()
        optimizer.step()
        assert [monitor.triggered(step) for step in (1, 2)] == [True, False], name


def test_of_a_step_that_failed_there_is_no_update():
    net, logged = model(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor = Monitor(net, logged.append, every=2, optimizer=optimizer)
    net(inputs(0, 0)).square().mean().backward()
    rate = optimizer.param_groups[0].pop("lr")
    with pytest.raises(KeyError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    assert not logged
    optimizer.step()
    assert [values["gradient/step"] for values in logged] == [2]
    assert "gradient/update_norm" in monitor.values


class Mixed(nn.Module):
    """Parameters whose gradients are sparse, complex, and in half precision."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.phases = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.short = nn.Parameter(torch.randn(30, dtype=torch.bfloat16))

    def forward(self, x):
        parts = self.words(x), self.phases.abs(), self.short.float()
        return sum(part.square().sum() for part in parts)


def test_sparse_complex_and_half_precision_parameters_are_described_exactly():
    def flat(tensors):
        some = (t.detach().to_dense() for t in tensors)
        real = (torch.view_as_real(t) if t.is_complex() else t for t in some)
        return torch.cat([t.double().flatten() for t in real]).numpy()

    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monitor = Monitor(net, optimizer=optimizer)
    net(torch.tensor([1, 1, 5])).backward()  # a row twice
    before, gradient = flat(net.parameters()), flat(p.grad for p in net.parameters())
    optimizer.step()
    assert monitor.values["gradient/norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
    for name, value in by_hand(before, flat(net.parameters()), gradient).items():
        assert monitor.values[name] == pytest.approx(value, rel=1e-6), name


def test_without_an_optimizer_or_wish_there_are_no_updates():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for options in ({}, {"optimizer": optimizer, "updates": False}):
        monitor = Monitor(net, **options)
        net(inputs(0, 0)).square().mean().backward()
        if not options:
            monitor.step()
        optimizer.step()
        assert "gradient/norm" in monitor.values
        assert not [name for name in monitor.values if "update" in name or "bf16" in name]
        monitor.close()
    assert not optimizer._optimizer_step_post_hooks


def test_the_update_of_a_closure_is_that_of_the_whole_step():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)
    monitor = Monitor(net, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        loss = net(inputs(0, 0)).square().mean()
        loss.backward()
        return loss

    before = weights(net)
    optimizer.step(closure)
    want = np.linalg.norm(before.astype(float) - weights(net))
    assert monitor.values["gradient/update_norm"] == pytest.approx(want, rel=1e-5)


def test_what_is_frozen_later_is_left_out_and_what_is_not_any_more_is_said():
    net = model()
    net[0].requires_grad_(False)
    monitor = Monitor(net)
    net(inputs(0, 0)).square().mean().backward()
    net[2].requires_grad_(False)  # with the gradients that it has
    alone = np.concatenate([p.grad.numpy().ravel() for p in net[4].parameters()])
    assert monitor.step()["gradient/norm"] == pytest.approx(np.linalg.norm(alone), rel=1e-6)
    net[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"does not watch 0\.weight, 0\.bias, frozen when it was"):
        monitor.step()
    monitor.step()  # once


def test_a_second_monitor_of_an_optimizer_is_said():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    Monitor(net, optimizer=optimizer).close()
    first = Monitor(net, optimizer=optimizer)
    Monitor(net, optimizer=optimizer, prefix="other/")
    Monitor(net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    with pytest.warns(UserWarning, match="has a monitor already, which goes on logging"):
        Monitor(net, optimizer=optimizer)
    assert first._handles
