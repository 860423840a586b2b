"""What a diagnosis says of a step, against numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradstats.hooks.diagnostics import diagnose


def test_a_diagnosis_has_the_norm_the_counts_and_the_ratios_of_its_layers():
    layers = [("a", slice(0, 4)), ("b", slice(4, 6)), ("c", slice(6, 8))]
    mean = torch.tensor([4.0, 2.0, 1.0, 1.0, 3.0, -1.0, 5.0, 5.0])
    update = torch.tensor([4.0, 0.0, 0.0, 0.0, 3.0, 0.0, -5.0, 0.0])
    residual = torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0, -4.0, 0.0, 0.0])
    sent = torch.tensor([6, 4, 0])  # in no order
    found = diagnose(7, layers, [1, 1, 2], update, mean, sent, residual)
    assert (found.step, found.layers) == (7, ("a", "b", "c"))
    assert found.numel.tolist() == [4, 2, 2]
    assert found.selected.tolist() == [1, 1, 1]
    assert found.target.tolist() == [1, 1, 2]
    # what is left, over what a random draw of as many elements leaves on average
    expected = [6 / (3 / 4 * 22), 1 / (1 / 2 * 10), 125 / (1 / 2 * 50)]
    assert found.delta.tolist() == pytest.approx(expected)
    assert found.residual_norm == 5  # ‖e‖₂, not Σ|e|
    assert found.matching_rate == pytest.approx(2 / 8)
    whole = diagnose(7, layers, [4, 2, 2], mean, mean, None, torch.zeros(8))
    assert np.array_equal(whole.selected, whole.numel)
    assert all(map(math.isnan, whole.delta))
    assert (whole.residual_norm, whole.matching_rate) == (0, 1)
