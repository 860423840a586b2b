"""Sharded trainings: FSDP2 on gloo ranks, beside the same model in one piece."""

from __future__ import annotations

import hashlib
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpoints import resealed
from support.traces import flat_gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from capture import Capture
from gradstats.compressors import make_compressor
from gradstats.errors import GradstatsError
from gradstats.hooks import CompressionState, ErrorFeedback, compression_hook, shard_hook
from gradstats.hooks.fsdp_private import reduce_scatter
from gradstats.hooks.units import local_part, units


def network(dtype=torch.float32, width=32):
    """A model whose parameters do not divide evenly over the ranks, and one smaller than two ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 1)]
    return nn.Sequential(*layers).to(dtype)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model, mesh, **options):
    """Shard layer by layer; the last one belongs to the model's own unit."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step, rank, model, part=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(8, 24, generator=generator).to(next(model.parameters()).dtype)


def loss_of(model, x):
    return (model(x) - x[:, :1].sin()).square().mean()


def own_gradient(plain, step, rank, parts=1):
    """Return this rank's gradient of the model in one piece, summed over micro-batches."""
    plain.zero_grad()
    for part in range(parts):
        loss_of(plain, batch(step, rank, plain, part)).backward()
    return flat_gradient(plain).astype(np.float64)


def gathered(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def follow(plain, model):
    """Give the plain model the sharded one's parameters."""
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), gathered(model), strict=True):
            ours.copy_(theirs)


def captured(rank, world, path, shape, case, options):
    """Train with a capture; return what each rank's autograd gave in every step."""
    dtype = torch.float64 if case == "float64" else torch.float32
    plain, model = network(dtype), network(dtype)
    mesh = mesh_of(*shape)
    policy = {}
    if case == "bfloat16":
        policy["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if case == "second dimension":
        policy["shard_placement_fn"] = lambda p: Shard(1) if p.shape == (32, 24) else None
    shard(model, mesh, **policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, parts = [], 2 if "micro-steps" in case else 1
    with Capture(path, model, **options) as capture:
        for step in range(4):
            follow(plain, model)
            optimizer.zero_grad()
            for part in range(parts):
                if case == "micro-steps without exchange":
                    model.set_requires_gradient_sync(part == parts - 1)
                loss = loss_of(model, batch(step, rank, model, part))
                loss.backward()
            capture.step(loss=loss, learning_rate=0.1)
            seen.append(own_gradient(plain, step, rank, parts))
            optimizer.step()
    return np.stack(seen)


class Idle(nn.Module):
    """A network with a parameter that no step uses."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


def unused(rank, world, path, told):
    """Capture a model of which a parameter gets no gradient; return warnings, and what autograd gave."""
    plain, model = network(), Idle()
    fully_shard(model.net[0], mesh=mesh_of(world))
    fully_shard(model, mesh=mesh_of(world))
    if told:
        model.set_reduce_scatter_unused_params(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Capture(path, model, kinds=("gradient", "local")) as capture:
            for step in range(2):
                model.zero_grad()
                loss_of(model, batch(step, rank, plain)).backward()
                capture.step()
    seen = [own_gradient(plain, step, rank) for step in range(2)]
    return [str(w.message) for w in said], np.stack(seen)


def in_turns(rank, world, folder):
    """Capture layers that take turns, and steps of which one is thrown away; then change the model's type."""
    mesh = mesh_of(world)

    def model():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
        return net

    x = torch.ones(2, 4) * (rank + 1)
    net = model()
    with Capture(f"{folder}/turns.zarr", net) as capture:
        for step in range(4):
            net[step % 2].zero_grad()
            net[step % 2](x).sum().backward()
            capture.step()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    net.to(torch.bfloat16)
    for to_none in (True, False):
        net = model()
        path = f"{folder}/thrown-{to_none}.zarr"
        with Capture(path, net, kinds=("gradient", "local")) as capture:
            for step in range(3):
                net.zero_grad(set_to_none=to_none)
                # two micro-steps
                net(x).sum().backward()
                net(x).sum().backward()
                if step != 1:
                    capture.step()


def trained(model, rank, optimizer, first, steps, before=lambda step, loss: None):
    """Return the losses of some steps; `before` is called before each of the optimizer's."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank, model))
        loss.backward()
        before(step, loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fingerprint(model):
    data = b"".join(p.detach().numpy().tobytes() for p in gathered(model))
    return hashlib.sha256(data).hexdigest()


def hybrid(rank, world, compressor, ratio, steps, width=256):
    """Train two replicas of two shards, dense and compressed; return losses, parameters and bytes."""
    found = {}
    for name in ("dense", compressor):
        model, mesh = network(width=width), mesh_of(2, world // 2)
        dense = name == "dense"
        shard(model, mesh if dense else mesh["shard"])
        hook = None
        if not dense:
            make = lambda: make_compressor(compressor, ratio)  # noqa: E731
            hook = shard_hook(model, mesh["replicate"], make, ErrorFeedback)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = trained(model, rank, optimizer, 0, steps)
        found[name] = {"losses": losses, "parameters": fingerprint(model)}
        if hook is not None:
            local = sum(p.to_local().numel() for p in model.parameters())
            found[name] |= {"sent": hook.last.bytes_sent, "local": local, "last": hook.last.step}
    return found


def against_ddp(rank, world, compressor, ratio):
    """One shard a replica: the same bits as DDP with one state a unit, if there is one unit."""
    updates = []
    for kind in ("shards", "ddp"):
        model = network()
        if kind == "shards":
            mesh = mesh_of(world, 1)
            fully_shard(model, mesh=mesh["shard"])
            shard_hook(model, mesh["replicate"], lambda: make_compressor(compressor, ratio))
        else:
            model = nn.parallel.DistributedDataParallel(model)
            state = CompressionState(
                make_compressor(compressor, ratio), named_parameters=model.module.named_parameters()
            )
            model.register_comm_hook(state, compression_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, rank, optimizer, 0, 6)
        updates.append(torch.cat([p.detach().reshape(-1) for p in gathered(model)]).numpy())
        del model
    return updates


def with_hook(rank, world, path, parts, kinds, replicas=2, reduce_dtype=None):
    """Capture a compressed training; return each rank's own gradients and what the units sent."""
    plain, model, mesh = network(), network(), mesh_of(replicas, world // replicas)
    shard(model, mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    hook = shard_hook(
        model, mesh["replicate"], lambda: make_compressor("topk", 0.05), ErrorFeedback
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, records = [], []
    with Capture(path, model, kinds=kinds) as capture:
        for step in range(4):
            follow(plain, model)
            optimizer.zero_grad()
            for part in range(parts):
                model.set_requires_all_reduce(part == parts - 1)
                loss_of(model, batch(step, rank, model, part)).backward()
            capture.step(loss=step / 2)
            seen.append(own_gradient(plain, step, rank, parts))
            records.append(hook.last)
            optimizer.step()
    # nothing of a capture that is closed stays on the model
    assert not hook.observers
    for unit in units(model):
        assert not type(reduce_scatter(unit.group)).__module__.startswith("capture")
    return np.stack(seen), records


def resumed(rank, world, folder, compressor):
    """Stop and resume through torch's distributed checkpoint: the same bits as never having stopped."""

    def start():
        model, mesh = network(), mesh_of(2, world // 2)
        shard(model, mesh["shard"])
        make = lambda: make_compressor(compressor, 0.02)  # noqa: E731
        return model, shard_hook(model, mesh["replicate"], make, ErrorFeedback)

    def stored(model, hook):
        return {"model": model.state_dict(), "hook": hook.state_dict()}

    model, hook = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, rank, optimizer, 0, 3)
    dcp.save(stored(model, hook), checkpoint_id=folder)
    trained(model, rank, optimizer, 3, 3)
    expected = fingerprint(model)
    model, hook = start()
    template = stored(model, hook)
    dcp.load(template, checkpoint_id=folder)
    model.load_state_dict(template["model"])
    hook.load_state_dict(template["hook"])
    trained(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), 3, 3)
    refused = []
    mine = hook.state_dict()[f"rank{rank}"]
    for wrong in (
        {f"rank{(rank + 1) % world}": mine},
        resealed(rank, mine, replicas=3),
        resealed(rank, mine, units={"other": {}}),
        resealed(rank, mine, units=mine["units"] | {"2": mine["units"]["0"]}),
    ):
        before = repr(hook.state_dict())
        try:
            hook.load_state_dict(wrong)
        except GradstatsError as error:
            refused.append(str(error))
        assert repr(hook.state_dict()) == before
    return expected, fingerprint(model), refused


def refusals(rank, world, path):
    """Return what is said of models and meshes that do not fit."""
    mesh, said = mesh_of(2, world // 2), {}
    make = lambda: make_compressor("topk", 0.1)  # noqa: E731

    def attempt(name, call):
        try:
            call()
        except GradstatsError as error:
            said[name] = str(error)

    attempt("plain", lambda: shard_hook(network(), mesh["replicate"], make))
    both = shard(network(), mesh)
    attempt("both dimensions", lambda: shard_hook(both, mesh["replicate"], make))
    model = shard(network(), mesh["shard"])
    attempt("not a factory", lambda: shard_hook(model, mesh["replicate"], make()))
    attempt("two dimensions", lambda: shard_hook(model, mesh, make))
    attempt("wrong dimension", lambda: shard_hook(model, mesh["shard"], make))
    attempt("local of a plain model", lambda: Capture(path, network(), kinds=["local"]))
    attempt("kept", lambda: Capture(path, model, keep=3))
    capture = Capture(path, model, overwrite=True)
    shard_hook(model, mesh["replicate"], make)
    loss_of(model, batch(0, rank, model)).backward()
    attempt("capture before the hook", capture.step)
    capture.close()
    for name, model in (("averaged", both), ("apart", shard(network(), mesh["shard"]))):
        for ranks in (None, [0]):
            with Capture(path, model, ranks=ranks, overwrite=True) as capture:
                room = capture._recorder.room
            said[f"room of {name} replicas, {ranks}"] = str(room and room.ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Capture(path, both, ranks=[1], kinds=["gradient", "local"], overwrite=True).close()
    said["unwritten"] = [str(w.message) for w in caught if "leaves out" in str(w.message)]
    late = shard(network(), mesh["shard"])
    late(batch(0, rank, late))  # parameters of the root unit stay gathered until the backward pass
    attempt("gathered", lambda: Capture(path, late, overwrite=True))
    dist.barrier()
    return said


def options(rank, world):
    """Return what options of ``shard_hook`` do: policies for NaN, a schedule, a comparison of replicas."""
    mesh, found = mesh_of(2, world // 2), {}

    def one_step(step, bad=None, wrong=(), **given):
        model = shard(network(), mesh["shard"])
        hook = shard_hook(model, mesh["replicate"], lambda: make_compressor("topk", 0.05), **given)
        for state in hook.states.values():
            write = state._setup.gradient.write

            def spoiled(pairs, *others, write=write):
                write(pairs, *others)
                if rank in wrong:
                    pairs[0][1].view(-1)[0] += 1

            state._setup.gradient.write = spoiled
        hidden = []
        handle = model[0].register_forward_hook(lambda *seen: hidden.append(seen[2]))
        for number in range(step + 1):
            model.zero_grad()
            loss = loss_of(model, batch(number, rank, model))
            if rank == bad:
                loss = loss + hidden[-1][:, 3].sum() * float("inf")
            loss.backward()
        handle.remove()
        gradients = [local_part(p.grad) for p in model[0].parameters()]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        sent = [sum(int(g.count_nonzero()) for g in gradients), hook.last.selected]
        return finite, *sent, hook.last.numel, hook.last.problem

    for policy in ("zero", "skip"):
        found[policy] = one_step(0, bad=0, nonfinite=policy)
    for step in range(3):
        found[step] = one_step(step, ratio_at=lambda step: 1.0 if step < 2 else None)
    try:
        one_step(1, wrong=(2, 3), verify_every=1)
    except GradstatsError as error:
        found["verified"] = str(error)
    return found


def not_finite(rank, world):
    """One rank's gradient is not finite: every rank says so, and the training can go on."""
    model, mesh = network(), mesh_of(2, world // 2)
    shard(model, mesh["shard"])
    hook = shard_hook(model, mesh["replicate"], lambda: make_compressor("topk", 0.05))
    try:
        hidden = []
        handle = model[0].register_forward_hook(lambda *seen: hidden.append(seen[2]))
        loss = loss_of(model, batch(0, rank, model))
        handle.remove()
        # a row of one weight: of one shard of one replica
        (loss + (hidden[0][:, 3].sum() * float("inf") if rank == 0 else 0)).backward()
        said = ""
    except GradstatsError as error:
        said = str(error)
    model.reset_iter_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = trained(model, rank, optimizer, 1, 3)
    return said, losses, fingerprint(model), hook.last.step
