"""Local steps as people train: several optimizers, parameters that come later, uneven numbers of batches."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from workers import local_trainings as cases

pytestmark = pytest.mark.distributed


def test_several_optimizers():
    for found, averaged in run_ranks(2, cases.together):
        for steps, exchanges, error, same in found:
            assert (steps, exchanges) == (9, 3)
            assert error < 1e-6
            assert same
        assert averaged


def test_several_optimizers_stop_and_resume():
    for same, message in run_ranks(2, cases.resumed):
        assert same
        assert "the checkpoint is of 2 optimizers, and these are 1" in message


def test_what_an_exchange_would_miss_is_refused():
    expected = {
        "unfrozen": "2.bias is trained, and was not when LocalSteps was made",
        "added": "3.weight is trained, and was not when LocalSteps was made",
        "replaced": "2.weight is trained, and was not when LocalSteps was made",
        "one of two": "AdamW trains 0.bias, and LocalSteps counts other optimizers' steps: give it all",
        "made anew": "4 steps of SGD, which LocalSteps was not given, and none of its own optimizer: nothing is exch",
        "no optimizer": "optimizer must be a torch.optim.Optimizer, or a list of them",
        "uneven": "(rank 0 is at 9, rank 1 has ended after 8)",
    }
    for found in run_ranks(2, cases.refused):
        assert found.pop("wrapper") == ""
        assert found.keys() == expected.keys()
        assert [name for name, text in expected.items() if text not in found[name]] == []
        assert not any("\n" in text for text in found.values())


def test_a_parameter_unfrozen_under_ddp_is_said_once():
    for messages in run_ranks(2, cases.unfrozen_under_ddp):
        (message,) = messages
        assert message.startswith("2.bias requires gradients now, and DDP does not average it")
