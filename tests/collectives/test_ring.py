"""A ring over devices whose backend sends from the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradstats.collectives import ring
from gradstats.collectives.plain import exchange_errors
from gradstats.errors import ExchangeError


@pytest.mark.parametrize(
    ("config", "backends"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:gloo,cuda:gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("cuda:nccl", {"cuda": "nccl"}),
    ],
)
def test_each_device_has_the_backend_of_its_group(monkeypatch, config, backends):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert ring._backends(None) == backends


@pytest.mark.parametrize(("backend", "place"), [("gloo", "cpu"), ("nccl", "meta")])
def test_gloo_is_given_the_hosts_memory(monkeypatch, backend, place):
    """A device without data stands for a GPU: gloo ends the process where it is given another memory."""
    given = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"meta:{backend}")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "P2POp", lambda run, tensor, **_: given.append(tensor))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
    monkeypatch.setattr(ring, "_framed", lambda part: torch.zeros(part.numel() + ring.CHECK))
    part = torch.empty(5, dtype=torch.uint8, device="meta")
    incoming, _ = ring.Ring()._start(part, part)
    assert [tensor.device.type for tensor in (*given, incoming)] == [place] * 3


def test_memory_that_is_short_here_is_no_lost_rank():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA"), exchange_errors():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(ExchangeError, match="a rank may be lost: Connection"), exchange_errors():
        raise RuntimeError("Connection closed by peer")


def test_what_came_through_the_host_goes_back_to_the_device():
    whole = ring._framed(torch.arange(5, dtype=torch.uint8))
    like = torch.empty(5, dtype=torch.uint8, device="meta")
    found = ring.Ring.__new__(ring.Ring)._checked(whole, like)
    assert found.device.type == "meta"
