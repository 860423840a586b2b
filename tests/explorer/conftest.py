"""A page of two runs, made once for all tests here."""

from __future__ import annotations

import pytest
from conftest import DATA
from support.traces import heavy_trace

from gradstats.explorer import write_explorer

RULES = ("exact", "redsync", "gaussiank", "sidco-e")


@pytest.fixture(scope="session")
def sketched(tmp_path_factory):
    return heavy_trace(tmp_path_factory.mktemp("explorer") / "sketched.zarr", store="sketches")


@pytest.fixture(scope="session")
def written(tmp_path_factory, sketched):
    """A page of a trace of gradients, one of two ranks, and one of sketches."""
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    sources = [DATA / "resnet20.zarr", DATA / "ranks" / "resnet8.zarr", sketched]
    layers = ["conv1.weight", "blocks.0.*", "bn1.*", "embedding", "bias", "w"]
    write_explorer(sources, path, estimators=RULES, ratios=(0.1, 0.01, 0.001), layers=layers)
    return path
