"""Updates and weights: what optimizers take off the parameters, to the bit, in every kind of training."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from ranks import run_ranks
from workers import updates

from capture import Capture, CaptureWarning
from gradstats import open_trace
from gradstats.errors import InputError
from gradstats.hooks import LocalSteps

# These models train faster than any disk writes.
pytestmark = pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning")

ORDERS = ("before", "after")
KINDS = ["gradient", "update"]


def test_updates_and_weights_are_to_the_bit(tmp_path):
    for name, make in updates.OPTIMIZERS.items():
        for order in ORDERS:
            for every in (1, 2):
                path = tmp_path / f"{name}-{order}-{every}.zarr"
                found = updates.plain(path, make, order, every=every)
                assert found == (list(range(0, 5, every)), []), (name, order, every)


@pytest.mark.parametrize("order", ORDERS)
def test_accumulation_buffers_and_other_precisions(tmp_path, order):
    for number, options in enumerate(
        [
            {"parts": 3},
            {"buffers": 1},
            {"dtype": torch.float64},
            {"dtype": torch.bfloat16},
        ]
    ):
        found = updates.plain(tmp_path / f"{number}.zarr", updates.adamw, order, **options)
        assert found == ([0, 1, 2, 3, 4], []), options


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["sgd", "adamw fused"])
def test_steps_that_a_scaler_skips_have_an_update_of_zeros(tmp_path, order, kind):
    make, overflows = updates.OPTIMIZERS[kind], (0, 1, 4)
    found, still = updates.scaled(tmp_path / "a.zarr", order, make, overflows)
    assert found == (list(range(6)), [])
    assert still == {step: step in overflows for step in range(6)}


def test_closures(tmp_path):
    """With one capture.step() an iteration its update is the whole; with one a closure they add up to it."""
    found, moved = updates.closures(tmp_path / "outside.zarr", inside=False)
    assert len(found) == 4
    for each, before, after in zip(found, moved, moved[1:], strict=False):
        want = updates.flat([b - a for b, a in zip(before, after, strict=True)])
        assert np.array_equal(each, want)
        assert want.any()
    found, moved = updates.closures(tmp_path / "inside.zarr", inside=True)
    assert len(found) > 8
    total = updates.flat([b - a for b, a in zip(moved[0], moved[-1], strict=True)])
    np.testing.assert_allclose(np.sum(found, 0), total, atol=1e-6)
    # as Lightning calls it: every step has a closure, that calls capture.step()
    found, moved = updates.closures(tmp_path / "lightning.zarr", True, updates.adamw)
    for each, before, after in zip(found, moved, moved[1:], strict=False):
        want = updates.flat([b - a for b, a in zip(before, after, strict=True)])
        assert np.array_equal(each, want)


def test_two_optimizers_of_one_iteration(tmp_path):
    for order in ORDERS:
        for every in (1, 2, 3):
            found = updates.adversaries(tmp_path / f"{order}{every}.zarr", order, every)
            assert found == (list(range(0, 7, every)), []), (order, every)


def test_an_optimizer_that_took_another_s_place_is_said_and_not_a_step_of_zeros(tmp_path):
    net = torch.nn.Linear(3, 2)
    first = optimizer = torch.optim.SGD(net.parameters(), 0.1)
    path, said = tmp_path / "run.zarr", "or another one stepped in its place"
    capture = Capture(path, net, optimizer=first, kinds=["update"])
    with pytest.warns(CaptureWarning, match=said), capture:  # noqa: PT031
        for step in range(4):
            if step == 2:
                optimizer = torch.optim.SGD(net.parameters(), 0.2)
            net(torch.ones(1, 3)).sum().backward()
            capture.step(loss=1.0)
            if step != 1:  # one that is skipped has an update of zeros
                optimizer.step()
    found = [open_trace(path).read(step, 0, "update") for step in range(4)]
    assert found[0].any()
    assert not found[1].any()
    assert np.isnan(found[2:]).all()


@pytest.mark.distributed
def test_two_ranks_under_ddp(tmp_path):
    for found in run_ranks(2, updates.under_ddp, str(tmp_path)):
        assert found == dict.fromkeys(found, ([0, 2, 4], []))
    trace = open_trace(tmp_path / "hook.zarr")
    assert trace.kinds(1) == ["gradient", "update", "weight"]
    for step in trace.steps():  # what DDP keeps the same
        assert np.array_equal(trace.read(step, 0, "update"), trace.read(step, 1, "update"))


@pytest.mark.distributed
def test_shards_of_fsdp2(tmp_path):
    for found in run_ranks(2, updates.under_fsdp, str(tmp_path)):
        assert found == {"adamw": ([0, 1, 2], []), "sgd": ([0, 1, 2], [])}


def one_step(path, net, optimizers, stepping, **options):
    """Capture one step, with so many steps of the first optimizer; return the parameters before it."""
    with Capture(path, net, optimizer=optimizers, **options) as capture:
        net(updates.batch(0)).sum().backward()
        before = updates.copied(net)
        capture.step(loss=1.0)
        for _ in range(stepping):
            optimizers[0].step()
    return before


def test_sketches_of_updates(tmp_path):
    net, path = updates.network(), tmp_path / "a.zarr"
    optimizers = [updates.adamw(net)]
    before = one_step(path, net, optimizers, 1, kinds=["update"], store="sketches")
    trace = open_trace(path)
    assert trace.kinds(0) == ["update"]
    assert trace.scalars()["loss"].tolist() == [1.0]
    total = sum(layer.moments.sum_abs for layer in trace.sketches(0, 0, "update"))
    assert total == pytest.approx(np.abs(updates.difference(before, net)).sum(dtype=float))


def test_what_is_not_seen_is_said(tmp_path):
    net = updates.network()
    one = torch.optim.SGD(net[0].parameters(), 0.1)
    path = tmp_path / "a.zarr"
    with pytest.warns(CaptureWarning, match=r"updates of 2\.weight, 2\.bias are NaN"):
        one_step(path, net, [one], 1, kinds=["update", "weight"])
    trace = open_trace(path)
    values = trace.read(0, 0, "update")
    for layer in trace.layers:
        assert np.isfinite(values[layer.slice]).all() == layer.name.startswith("0")
    assert np.array_equal(trace.read(0, 0, "weight"), updates.flat(updates.copied(net)))
    both = updates.sgd(net)
    with pytest.warns(CaptureWarning, match="took no step"):
        one_step(tmp_path / "b.zarr", net, [both], 0, kinds=KINDS)
    assert not open_trace(tmp_path / "b.zarr").read(0, 0, "update").any()
    with pytest.warns(CaptureWarning, match="stepped again"):
        one_step(tmp_path / "c.zarr", net, [both], 2, kinds=KINDS)


def test_optimizers_in_the_backward_pass(tmp_path):
    net, path = updates.network(), tmp_path / "a.zarr"
    each = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def apply(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(apply)
    seen = {}
    capture = Capture(path, net, kinds=["update", "weight"], optimizer=list(each.values()))
    for step in range(3):
        before = updates.copied(net)
        net(updates.batch(step)).sum().backward()
        capture.step()
        seen[step] = updates.difference(before, net), updates.flat(updates.copied(net))
    capture.close()
    assert updates.compared(path, seen) == ([0, 1, 2], [])


def test_bad_options_are_refused(tmp_path):
    net = updates.network()
    optimizer, path = updates.sgd(net), tmp_path / "a.zarr"
    for options, message in [
        ({"kinds": KINDS}, "give Capture\\(optimizer="),
        ({"kinds": ["weight"]}, "'weight'"),
        ({"optimizer": optimizer}, "name them, as in kinds="),
        ({"kinds": KINDS, "optimizer": []}, "empty list"),
        ({"kinds": KINDS, "optimizer": [net]}, "Sequential"),
        ({"kinds": KINDS, "optimizer": updates.sgd(updates.network())}, "none of the captured"),
    ]:
        with pytest.raises(InputError, match=message):
            Capture(path, net, **options)
    capture = Capture(path, net, kinds=KINDS, optimizer=optimizer)
    with pytest.raises(InputError, match="pseudogradient"):
        capture.follow(LocalSteps.__new__(LocalSteps))
    capture.close()


def test_a_capture_that_is_not_closed_writes_its_last_update_and_lets_go(tmp_path):
    net = updates.network()
    optimizer = updates.sgd(net)
    capture = Capture(tmp_path / "a.zarr", net, kinds=KINDS, optimizer=optimizer)
    net(updates.batch(0)).sum().backward()
    before = updates.copied(net)
    capture.step()
    optimizer.step()
    alive = weakref.ref(capture)
    del capture
    gc.collect()
    assert alive() is None
    want = updates.difference(before, net)
    assert np.array_equal(open_trace(tmp_path / "a.zarr").read(0, 0, "update"), want)
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.step()
