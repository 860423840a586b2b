"""A ring over devices whose backend sends from the host."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gradstats.collectives import ring


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
