"""What the worker processes of test_codecs.py run: every compressor with every codec of what it sends."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers.systems import gradient

from capture.workloads.baselines import EXCHANGES
from gradstats.collectives import Codec
from gradstats.compressors import GlobalHistogram, make_compressor
from gradstats.hooks import compression_hook
from gradstats.hooks.systems import make_state

RATIO = 0.05
NUMELS = (1, 3, 997)
STEPS = 4
MADE = {
    "topk": {},
    "exact": {},
    "sidco-e": {},
    "threshold:dgc": {},
    "redsync": {},
    "lags": {"adaptive": False},
    "redsync-quantised": {"dense_below": 0},
    "cltk": {},
    # an η to start from, so that the first step's bytes are those of any other
    "micro": {"threshold": 4.0},
    "global-histogram": {},
}
VALUES = ("float16", "bfloat16", "float8_e4m3fn", "int8", "int4", "int2")
VALUES += ("mxfp8", "mxfp6", "mxfp4", "nvfp4")
SUMMED = ("cltk", "micro", "redsync-quantised")
"""Values of these have no codec."""
ALL_VALUES = ("topk", "exact", "lags")
"""What is sent with every codec of values, and those below by what takes 16 bits, less than 8, and a scale a block."""
SOME_VALUES = ("bfloat16", "int4", "mxfp4")
SYSTEMS = ("topk", "sidco-e", "micro", "cltk", "lags", "dgc", "redsync", "redsync-quantised")


def values_of(name, numel):
    """Return the codecs of values that are tried; one element has all of them with one compressor."""
    if name in SUMMED:
        return ()
    return VALUES if name == "topk" or (name in ALL_VALUES and numel > 1) else SOME_VALUES


def made(name, **codec):
    if name == "global-histogram":
        return GlobalHistogram(RATIO, codec=Codec(**codec))
    return make_compressor(name, RATIO, **MADE[name], **codec)


def steps(compressor, rank, numel):
    """Return means, residuals, bytes and whether nothing was lost, of a few steps with error feedback."""
    report, residual = [], torch.zeros(numel)
    for step in range(STEPS):
        corrected = gradient("laplace", numel, rank, step) + residual
        before = corrected.clone()
        reduced = compressor.reduce(corrected, None)
        residual = reduced.residual.clone()
        # what was sent is where and by how much the residual differs; it must be exact in float32
        sent = before - residual
        lost = (sent + residual != before).sum() + (
            before.double() - residual.double() != sent
        ).sum()
        outside = torch.ones(numel, dtype=torch.bool)
        if reduced.sent is not None:
            outside[reduced.sent] = False
            lost += (sent[outside] != 0).sum()
        report.append((reduced.mean.clone(), residual, sent, reduced.bytes_sent, int(lost)))
    return report


def compressed(rank, world):
    """Return the steps by compressor, codec and number of elements."""
    report = {}
    for numel in NUMELS:
        for name in MADE:
            report[name, "plain", "float32", numel] = steps(made(name), rank, numel)
            for indices in ("rice", "chunk"):
                coded = made(name, indices=indices)
                report[name, indices, "float32", numel] = steps(coded, rank, numel)
            for values in values_of(name, numel):
                coded = made(name, indices="rice", values=values)
                report[name, "rice", values, numel] = steps(coded, rank, numel)
        for name in ("dense-bf16", "dense-fp8"):
            report[name, numel] = steps(make_compressor(name, 1.0), rank, numel)
    return report


def _trained(rank, name, options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 30), nn.ReLU(), nn.Linear(30, 3)
    )
    if name in EXCHANGES:
        state, hook, _ = EXCHANGES[name](None)
    else:
        extra = {"lags": {"adaptive": False}, "redsync": {"dense_below": 100}}.get(name, {})
        extra = {"dense_below": 100} if name == "redsync-quantised" else extra
        given = {**extra, **options}
        state = make_state(name, RATIO, net.named_parameters(), compressor_options=given)
        hook = compression_hook
    ddp = DDP(net, bucket_cap_mb=0.01)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(2 * step + rank))
        nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
    return torch.cat([p.detach().view(-1) for p in net.parameters()])


def trainings(rank, world):
    """Return the parameters after a few steps with plain positions, and with coded ones, by system."""
    pairs = {name: [_trained(rank, name, o) for o in ({}, {"indices": "rice"})] for name in SYSTEMS}
    dense = [_trained(rank, name, {}) for name in ("none", "torch-bf16", "dense-bf16", "dense-fp8")]
    return pairs, dense
