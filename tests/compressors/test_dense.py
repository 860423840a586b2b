"""Dense averages of rounded values: compiled loops and torch's operators give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.every import every

from gradstats.compressors import DenseCompressor
from gradstats.primitives import set_num_threads

ODD = [
    *(0.0, -0.0, 1.0, 1e-45, -1e-40, 1.1754944e-38, 3.3895e38, -3.3895e38, 3.4e38, -3.4028235e38),
    *(1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23, float("inf"), float("-inf")),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    set_num_threads(request.param)
    yield
    set_num_threads(None)


@every("numel", [0, 1, 16, 4095, 4097, (1 << 21) + 3])
def test_loops_round_and_average_as_operators_do(numel, threads):
    values = np.random.default_rng(numel).standard_t(2, numel).astype(np.float32)
    values[: len(ODD)] = ODD[:numel]
    by_loop, by_operators = torch.from_numpy(values.copy()), torch.from_numpy(values)
    compressor = DenseCompressor(torch.bfloat16)
    for _ in range(2):  # the second time into the same memory
        sent, expected = (
            compressor._rounded_by_loop(by_loop),
            compressor._rounded(by_operators),
        )
        assert torch.equal(sent.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(by_loop.view(torch.int32), by_operators.view(torch.int32))
        for world in (2, 3):
            mean = compressor._mean_by_loop(sent, world)
            assert torch.equal(mean, expected.float().div_(world))
        by_loop += 0.1
        by_operators += 0.1


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float8_e4m3fn])
def test_nothing_has_a_mean_of_nothing(dtype, one_rank):
    assert DenseCompressor(dtype).reduce(torch.zeros(0), None).mean.shape == (0,)


def test_nan_stays_nan():
    values = torch.tensor([1.0, float("nan"), -float("nan"), 2.0])
    sent = DenseCompressor(torch.bfloat16)._rounded_by_loop(values)
    assert sent.isnan().tolist() == values.isnan().tolist() == [False, True, True, False]
