"""What `gradstats plan` gives of committed traces, and `gradstats report` of an array: to the bit, but for figures.

The network is that of `support/networks.py`. Figures are left out of the page, for their bytes are those of matplotlib
and its fonts, and so are dates and versions. Rewrite with ``WRITE_PINS=1 python -m pytest
tests/pins/test_plans_and_report.py``, on every kind of processor that is to be compared: on others fits and sums have
other last digits, and the tests are skipped.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from conftest import DATA
from pins.stored import WRITES, changed, digest
from support.networks import measured_network
from support.terminal import records, run

FEW = [each for name in ("topk", "sidco-e", "dgc", "ef-signsgd") for each in ("--compressor", name)]
PLANS = {
    "compressors and workers": ("resnet20-ef.zarr", "--workers", 16, "--workers", 1024, *FEW),
    "coded, two ranks": (
        *("ranks/resnet8.zarr", "--workers", 8, "--indices", "rice", "--baseline", "bf16"),
    ),
    "local steps": (
        *("local/sparseloco.zarr", "--workers", 4, "--local-steps", 20),
        *("--up", 20, "--down", 100),
    ),
}


def compared(now, pins, kind, name):
    if WRITES:
        pins.put(now, kind, name)
        return
    kept = pins.get(kind, name)
    if kept is None:
        pytest.skip(f"no values are kept of {kind}")
    assert changed(kept, now) == {}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name, tmp_path, pins, kind):
    source, *options = PLANS[name]
    measured_network().save(tmp_path / "network.json")
    cluster = "--network", tmp_path / "network.json", "--compute", 0.035
    rows = records("plan", DATA / source, *cluster, *options)
    now = {f"{i}": digest(json.dumps(row)) for i, row in enumerate(rows)}
    compared(now, pins, kind, name)


@pytest.mark.usefixtures("unrendered")
def test_a_report(tmp_path, pins, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("planted.npy", np.random.default_rng(41).laplace(size=3000).astype(np.float32))
    done = run("report", "planted.npy", "-o", "report.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text("utf-8")
    for volatile in (
        r"made</h2><p><code>[^<]*",  # the command line
        r"data:image/png;base64,[^\"]*",
        r"\b20\d\d-\d\d-\d\d[^<]*",
        r"\b\d+\.\d+\.\d+\b",
    ):
        page = re.sub(volatile, "", page)
    now = {f"line {i}": digest(line) for i, line in enumerate(page.splitlines())}
    compared(now, pins, kind, "report")
