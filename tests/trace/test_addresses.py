"""Addresses: read wherever fsspec opens them, and never written to."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import zipfile

import numpy as np
import pytest
import torch
from support.programs import program

from capture import Capture
from gradstats import open_trace, save_safetensors
from gradstats.errors import GradstatsError, InputError
from gradstats.files import address_of, replace_file
from gradstats.report.questions import argument_of
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_sources

ADDRESSES = ["s3://bucket/run.zarr", "memory://run.zarr", "file:///tmp/run.zarr", "https://x/y"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "run.zarr"
    create_trace(path, [Layer("a", 0, (40,))])
    writer = TraceWriter(path, 0)
    for step in range(2):
        writer.append(step, {"gradient": np.arange(40, dtype=np.float32) + step})
    writer.close()
    return path


@pytest.mark.parametrize("address", ADDRESSES)
def test_writing_is_refused_and_leaves_nothing(address, trace, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for write in (
        lambda: Capture(address, torch.nn.Linear(2, 2)),
        lambda: create_trace(address, [Layer("a", 0, (4,))]),
        lambda: replace_file(f"{address}.csv", "x"),
        lambda: save_safetensors(open_trace(trace), f"{address}.safetensors", 0),
    ):
        with pytest.raises(InputError, match="cannot write to"):
            write()
    assert not list(work.iterdir())


def test_every_rank_refuses_by_itself():
    # before anything is asked of the others: a rank that captures nothing refuses, too
    with pytest.raises(InputError, match="cannot write to s3://b/x"):
        Capture("s3://b/x", torch.nn.Linear(2, 2), ranks=[7])


def test_what_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("run.zarr", "/a/b", "C:/a", "x.pt:model", "a/s3:/b", "./s3:/b"):
        assert address_of(text) is None, text
    assert address_of("s3:/b/x") == "s3://b/x"  # as pathlib writes it
    assert address_of("zip://a.zarr::s3://b/x.zip") == "zip://a.zarr::s3://b/x.zip"
    (tmp_path / "s3:").mkdir()
    assert address_of("s3:/b/x") is None


def test_reading_from_archives_memory_and_http(trace, tmp_path):
    import fsspec

    expected = open_trace(trace).read(1)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in trace.rglob("*"):
            archive.write(file, file.relative_to(tmp_path))
    assert np.array_equal(open_trace(f"zip://run.zarr::{tmp_path}/all.zip").read(1), expected)
    (source,) = open_sources(f"file://{trace}")
    assert source.name == "run"
    # what pages and `info` say stays true when the copy has gone
    assert argument_of(source) == f"file://{trace}"
    assert argument_of(open_sources(trace)[0]) == str(trace)
    fsspec.filesystem("memory").put(str(trace), "/held/run.zarr", recursive=True)
    assert np.array_equal(open_trace("memory://held/run.zarr").read(1), expected)
    torch.save({"model": {"w": torch.ones(5)}}, tmp_path / "x.pt")
    pytest.importorskip("aiohttp")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    handler.func.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (source,) = open_sources(f"http://127.0.0.1:{server.server_port}/x.pt:model")
        assert source.numel == 5
    finally:
        server.shutdown()
        server.server_close()


def test_what_cannot_be_opened_is_one_line():
    for address in (
        "nosuchscheme://a/b",
        "memory://absent.zarr",
        "zip://a::/absent.zip",
        "file:///tmp/..",
    ):
        with pytest.raises(GradstatsError) as caught:
            open_sources(address)
        assert "\n" not in str(caught.value)


def test_quality_of_a_bucket(trace):
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        keys |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        bucket = s3fs.S3FileSystem(key="x", secret="y", endpoint_url=keys["AWS_ENDPOINT_URL"])
        bucket.mkdir("bucket")
        bucket.put(str(trace), "bucket/run.zarr", recursive=True)
        command = ["quality", "s3://bucket/run.zarr", "--ratio", "0.1", "--estimator", "exact"]
        run = program("-m", "gradstats", *command, "--format", "json", env=keys)
        assert json.loads(run.stdout)[0]["n"] == 2
    finally:
        server.stop()
