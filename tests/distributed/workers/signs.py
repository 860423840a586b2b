"""What the worker processes of test_signs.py run: one function per number of ranks, to start few processes."""

import io
import random
import time

import numpy as np
import torch
import torch.distributed as dist

from gradstats.collectives.ring import one_bit_ring, pack_bits, unpack_bits
from gradstats.collectives.torus import one_bit_torus
from gradstats.compressors.cascading import Cascading
from gradstats.compressors.marsit import Marsit
from gradstats.compressors.signs import bits_per_element, matching_rate
from gradstats.compressors.signsgd import SSDM, EFSignSGD, SignSGD
from gradstats.errors import InputError

SYSTEMS = {
    "signsgd": lambda: SignSGD(seed=3),
    "signsgd 1": lambda: SignSGD(scale=1.0),
    "ef-signsgd": EFSignSGD,
    "ssdm": SSDM,
    "cascading": Cascading,
    "cascading sign": lambda: Cascading(stochastic=False),
    "marsit": lambda: Marsit(full_every=2),
    "marsit never": lambda: Marsit(full_every=None, scale=0.01),
    "marsit torus": lambda: Marsit(full_every=4, topology="torus"),
}
SIZES = (0, 1, 5, 1003)
REPEATS = 20_000
FEW = (1, 2, 3, 4)
"""Numbers of ranks that run all cases; eight of them, in turns on few cores, only those that depend on the number."""


def sizes(world):
    return SIZES if world in FEW else (5, 1003)  # fewer elements than ranks, and more


def gradient(rank, step, numel, zeros=True):
    """A rank's gradient: a part all ranks share, noise of its own, and some exact zeros."""
    shared = np.random.default_rng([step, numel]).laplace(size=numel)
    own = np.random.default_rng([step, numel, rank + 1]).laplace(size=numel)
    values = (shared + own).astype(np.float32)
    if zeros:
        values[::7] = 0
    return torch.from_numpy(values)


def gathered(values):
    """Return all ranks' values, (world, d)."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    if values.numel():
        dist.all_gather(rows, values)
    return torch.stack(rows)


def shapes(world):
    return [(r, world // r) for r in range(1, world + 1) if world % r == 0]


def parity(counts):
    """A merge that notices a contribution missed or made twice; it notes the counts it was told."""

    def merge(local, local_count, received_count):
        counts.append((local_count, received_count))
        return lambda received: received ^ local

    return merge


def reductions(rank, world):
    """The ring and all tori, with parity for a merge, against the exact parity; bits per hop."""
    report = {"parity": [], "bits": [], "counts": []}
    for numel in (*SIZES, 100_003):
        bits = torch.from_numpy(np.random.default_rng([rank, numel]).random(numel) < 0.5)
        exact, packed = gathered(bits.to(torch.uint8)).sum(0) % 2 == 1, pack_bits(bits)
        for shape in (None, *shapes(world)):
            counts = []
            if shape is None:
                got, sent = one_bit_ring(packed, parity(counts))
            else:
                got, sent = one_bit_torus(packed, parity(counts), shape=shape)
            right = got.dtype == torch.uint8 and torch.equal(unpack_bits(got, numel), exact)
            report["parity"].append(right)
            report["bits"].append((numel, sent, bits_per_element(sent, numel, ring=world)))
            report["counts"].append((shape, numel, counts))
    return report


def systems(rank, world):
    """Two rounds of each system and size: what went in, the update, and what is left."""
    report = {}
    for name, make in SYSTEMS.items():
        for numel in sizes(world):
            compressor, kept, rounds = make(), torch.zeros(numel), []
            for step in range(2):
                corrected = kept + gradient(rank, step, numel)
                before = corrected.numpy().copy()
                got = compressor.reduce(corrected, None)
                kept = got.residual
                assert got.mean.dtype == torch.float32
                assert got.mean.shape == got.residual.shape == (numel,)
                assert (got.flags, got.sent) == ([0] * world, None)
                assert (got.selected, got.union) == (numel, numel)
                rounds.append((before, got.mean.numpy().copy(), got.residual.numpy().copy()))
            report[name, numel] = rounds
    return report


def expectations(rank, world):
    """The share of ones in Marsit's merged bits, for each pattern of the ranks' signs."""
    if world <= 4:
        patterns = [[p >> r & 1 for r in range(world)] for p in range(2**world)]
    else:  # one for each number of ones, in a mixed order
        order = np.random.default_rng(5).permutation(world)
        patterns = [[int(order[r] < ones) for r in range(world)] for ones in range(world + 1)]
    patterns = np.array(patterns, dtype=np.float32)
    # Interleaved: every pattern is in every part of the ring, and so starts at every rank.
    values = np.tile(2 * patterns[:, rank] - 1, REPEATS)
    report = []
    for topology, shape in [("ring", None), *[("torus", shape) for shape in shapes(world)]]:
        compressor = Marsit(full_every=None, scale=1.0, topology=topology, shape=shape, seed=11)
        mean = compressor.reduce(torch.from_numpy(values.copy()), None).mean
        share = (mean > 0).view(REPEATS, -1).float().mean(0)
        report.append((topology, share.numpy(), patterns.mean(1)))
    return report


def full_rounds(rank, world):
    """Marsit with K = 3: which rounds equal the dense mean, and which leave nothing."""
    compressor, kept, rounds = Marsit(full_every=3), torch.zeros(1003), []
    for step in range(7):
        corrected = kept + gradient(rank, step, 1003)
        dense = corrected.clone()
        dist.all_reduce(dense)
        got = compressor.reduce(corrected, None)
        kept = got.residual
        rounds.append((torch.equal(got.mean, dense / world), not kept.any(), got.bytes_sent))
    return rounds


def votes(rank, world):
    """SignSGD against a naive majority; what it does with ties and zeros."""
    values = gradient(rank, 0, REPEATS, zeros=False)
    rows = gathered(values)
    total = torch.sign(rows).sum(0)
    got = SignSGD(seed=1).reduce(values.clone(), None)
    sizes = got.mean.abs()
    zero = SignSGD(scale=0.5).reduce(torch.zeros(REPEATS), None).mean
    opposed = torch.full((REPEATS,), 1.0 if rank % 2 else -1.0)
    tied = SignSGD(scale=1.0).reduce(opposed, None).mean
    return {
        "majority": torch.equal(torch.sign(got.mean)[total != 0], torch.sign(total)[total != 0]),
        "scale": torch.allclose(sizes, rows.abs().mean(), rtol=1e-5)
        and sizes.unique().numel() == 1,
        "zero": (zero > 0).float().mean().item(),
        "tied": (tied > 0).float().mean().item(),
        "values": sorted(zero.unique().tolist()),
        "bits": bits_per_element(got.bytes_sent, REPEATS),
    }


def unbiased(rank, world):
    """The average of SSDM's updates over rounds, in standard errors of the exact mean."""
    rounds, values = 80, gradient(rank, 0, 20)
    compressor, total = SSDM(seed=2), torch.zeros(20, dtype=torch.float64)
    for _ in range(rounds):
        total += compressor.reduce(values.clone(), None).mean
    rows = gathered(values).double()
    norms = rows.norm(dim=1, keepdim=True)
    # the variance of one element is ‖g‖² − g_i²
    error = ((norms**2 - rows**2).sum(0) / (world**2 * rounds)).sqrt()
    return ((total / rounds - rows.mean(0)) / error).abs().max().item()


def one_element_each(rank, world):
    """A gradient with one element for each rank, and what both forms of cascading make of all of them."""
    own = gradient(rank, 0, world, zeros=False)
    forms = (Cascading(stochastic=stochastic) for stochastic in (True, False))
    return own.numpy(), [form.reduce(own.clone(), None).mean.numpy() for form in forms]


def quality(rank, world):
    """Matching rate and relative error of one round of each system, without memory."""
    values = gradient(rank, 0, 200_000, zeros=False)
    exact = gathered(values).mean(0)
    makers = SYSTEMS | {"marsit": lambda: Marsit(full_every=None)}
    report = {}
    for name, make in makers.items():
        mean = make().reduce(values.clone(), None).mean.double()
        report[name] = {
            "match": matching_rate(mean, exact),
            "error": ((mean - exact).norm() / exact.norm()).item(),
            "direction": 1 - torch.cosine_similarity(mean, exact.double(), 0).item(),
        }
    return report


def resume(rank, world):
    """Each system stopped after two rounds of four, in a file, and gone on with."""
    same = {}
    for name, make in SYSTEMS.items():
        compressor, means = make(), []
        for step in range(4):
            if step == 2:
                file = io.BytesIO()
                torch.save(compressor.state_dict(), file)
            means.append(compressor.reduce(gradient(rank, step, 1003), None).mean)
        file.seek(0)
        resumed = make()
        resumed.load_state_dict(torch.load(file, weights_only=True))
        again = [resumed.reduce(gradient(rank, step, 1003), None).mean for step in (2, 3)]
        same[name] = all(torch.equal(a, b) for a, b in zip(means[2:], again, strict=True))
    return same


def flagged(rank, world):
    """A rank that announces a bad gradient: nothing changes, on any rank, and the next round works."""
    fine = True
    for make in SYSTEMS.values():
        compressor, reference = make(), make()
        values = gradient(rank, 0, 100)
        if rank == world - 1:
            values[3] = float("nan")
        untouched = values.clone()
        got = compressor.reduce(values, None, flag=2 if rank == world - 1 else 0)
        fine &= got.flags == [0] * (world - 1) + [2] and got.mean is None
        fine &= torch.equal(values.nan_to_num(), untouched.nan_to_num())
        for step in range(2):
            a = compressor.reduce(gradient(rank, step, 100), None).mean
            fine &= torch.equal(a, reference.reduce(gradient(rank, step, 100), None).mean)
    return fine


def misfits(rank, world):
    """Torus shapes that do not hold the ranks."""
    messages = []
    for shape in ((world, 2), (world + 1, 1), (0, world), (-1, -world)):
        for attempt in (
            lambda shape=shape: Marsit(topology="torus", shape=shape).reduce(torch.ones(4), None),
            lambda shape=shape: one_bit_torus(
                pack_bits(torch.ones(4) > 0), parity([]), shape=shape
            ),
        ):
            try:
                attempt()
            except InputError as error:
                messages.append(str(error))
    return messages


def everything(rank, world):
    """Run all cases; the user's generators are the same afterwards."""
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    cases = (
        reductions,
        systems,
        expectations,
        full_rounds,
        votes,
        quality,
        misfits,
    )
    if world in FEW:
        cases += (unbiased, resume, flagged)
    report = {"seconds": {}}
    for case in cases:
        started = time.perf_counter()
        report[case.__name__] = case(rank, world)
        report["seconds"][case.__name__] = round(time.perf_counter() - started, 2)
    report["generators"] = (
        torch.equal(before[0], torch.get_rng_state())
        and np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
        and before[2] == random.getstate()
    )
    return report
