"""The page that specifies the format says what the writer writes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import xarray
from conftest import ROOT
from support.traces import LAYERS, NUMEL, gradient, shards_of, write, write_shards

from gradstats.trace import COMPRESSION, KINDS, LAYER_COMPRESSION, SCHEMA, create_trace
from gradstats.trace.format import BINS, BITS, STATISTICS

PAGE = (ROOT / "docs/reference/trace_format.md").read_text(encoding="utf-8")


def table(name):
    """Return the rows of a marked table, cells without backticks."""
    text = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)[1]
    rows = [[c.strip().strip("`") for c in row.split("|")[1:-1]] for row in text.splitlines()]
    return rows[2:]


@pytest.fixture(scope="module", params=[None, 5, 100, 5000])
def run(request, tmp_path_factory):
    """A trace with every array, by the row of the table that describes it."""
    path = tmp_path_factory.mktemp("page") / "run.zarr"
    create_trace(path, LAYERS, metadata={"model": "linear"})
    options = [
        {"compression": True},
        {"dtype": "bfloat16"},
        {"compress": True},
        {"store": "sketches"},
    ]
    found = {}
    for rank, option in enumerate(options):
        write(path, range(3), rank=rank, close=False, expected_steps=request.param, **option)
        suffix = {1: " (bfloat16)", 2: " (compressed)"}.get(rank, "")
        for file in (path / f"rank{rank:05d}").glob("*/zarr.json"):
            name = file.parent.name
            found[name + (suffix if name in KINDS else "")] = file.parent
    return path, request.param, found


def test_every_array_is_as_the_page_says(run):
    _, expected, found = run
    described = {}
    for listed, *cells in table("arrays"):
        described |= {name.strip("`").replace("` ", " "): cells for name in listed.split(", ")}
    for name in [n for n in described if n.startswith("gradient")]:
        described |= {name.replace("gradient", kind): described[name] for kind in KINDS}
    assert described.keys() == found.keys()
    names = {
        "d": NUMEL,
        "L": len(LAYERS),
        "R": 1024 if expected is None else min(max(expected, 64), 1024),
        "min": min,
        "max": max,
    }
    for name, (dimensions, shape, dtype, fill, chunk, blosc, attributes) in described.items():
        about = json.loads((found[name] / "zarr.json").read_text())
        assert about["zarr_format"] == 3
        assert about["dimension_names"] == dimensions.split(", ")
        assert about["shape"][1:] == list(eval(f"({shape},)" if shape else "()", names))
        assert about["shape"][0] == (expected or 64)
        assert about["data_type"] == dtype
        assert str(about["fill_value"]) == fill
        sizes = list(eval(f"({chunk},)", names))
        assert about["chunk_grid"]["configuration"]["chunk_shape"] == sizes
        codecs = ["bytes", *(["blosc"] if blosc == "yes" else []), "crc32c"]
        assert [c["name"] for c in about["codecs"]] == codecs
        labels = about["attributes"]
        assert labels.pop("long_name")
        counts = dtype in ("int64", "uint32")
        assert (labels.pop("units", None) == "1") == counts
        assert list(labels) == [a.strip("`") for a in attributes.split(", ") if a]
        chunks = [
            p for p in [*found[name].glob("c.*"), *(found[name] / "c").rglob("*")] if p.is_file()
        ]
        assert chunks
        if "blosc" not in codecs:
            size = int(np.prod(sizes)) * np.dtype(dtype).itemsize
            assert {p.stat().st_size for p in chunks} == {size + 4}


def test_attributes_are_as_the_page_says(run):
    path, _, found = run
    root = json.loads((path / "zarr.json").read_text())
    assert [row[0] for row in table("root")] == [a for a in root["attributes"] if a != "model"]
    assert root["attributes"]["schema"] == SCHEMA == int(table("root")[1][1])
    rank = json.loads((path / "rank00000/zarr.json").read_text())["attributes"]
    assert [row[0] for row in table("rank")] == list(rank)
    assert sorted(rank["arrays"]) == sorted(p.name for p in (path / "rank00000").glob("*/"))
    for name, expected in (
        ("gradient_moments", STATISTICS),
        ("compression", COMPRESSION),
        ("layer_compression", LAYER_COMPRESSION),
    ):
        about = json.loads((found[name] / "zarr.json").read_text())
        assert about["attributes"]["names"] == list(expected)
        said = re.search(rf"^\| `{name}` \| .*names`: (.*)\|$", PAGE, re.MULTILINE)
        assert [n for n in re.findall(r"`(\w+)`", said[1]) if n != "names"] == list(expected)
    counts = json.loads((found["gradient_counts"] / "zarr.json").read_text())
    assert counts["attributes"]["bits"] == BITS
    assert f"numpy.arange({BINS + 1}" in PAGE


def test_the_programs_on_the_page_run(run, monkeypatch):
    path, _, _ = run
    monkeypatch.chdir(path.parent)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1].replace("step=100", "step=2")
    names = {}
    exec(program, names)
    assert names["done"].step.values.tolist() == [0, 1, 2]


def test_shards_are_as_the_page_says(tmp_path):
    path, world = tmp_path / "run.zarr", 3
    create_trace(path, LAYERS, world_size=world)
    for rank in range(world):
        write_shards(path, range(2), rank=rank, world=world, dims=(1, 0))
        about = json.loads((path / f"rank{rank:05d}/zarr.json").read_text())["attributes"]
        assert list(about) == [row[0] for row in (*table("rank"), *table("sharded"))]
        assert about["shard_ranks"] == [0, 1, 2]
        for kind, dimension in (("gradient", "shard_element"), ("local", "element")):
            array = json.loads((path / f"rank{rank:05d}/{kind}/zarr.json").read_text())
            assert array["dimension_names"] == ["step", dimension]
            held = sum(shard.numel for shard in shards_of(rank, world, (1, 0)))
            assert array["shape"][1] == (held if kind == "gradient" else NUMEL)
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names = {}
    exec(program, names)
    with xarray.open_datatree(path, engine="zarr", consolidated=False) as tree:
        for kind in ("gradient", "corrected"):
            assert np.array_equal(names["whole"](tree, 1, kind), gradient(1, 0, kind))
