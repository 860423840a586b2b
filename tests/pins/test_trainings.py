"""The files of short captured trainings, byte for byte, by training and array.

Left out are dates, versions and the host, and of the compressor's columns the seconds: the rest of these is read
through `open_trace`. On a kind of processor of which no bytes are kept, files in which there are sums are not compared.
Rewrite with ``WRITE_PINS=1 python -m pytest tests/pins/test_trainings.py``.
"""

from __future__ import annotations

import json
import re

import pytest
from pins import trainings
from pins.stored import WRITES, digest
from ranks import run_ranks

from gradstats import open_trace

pytestmark = [
    pytest.mark.distributed,
    # These models train faster than any disk writes.
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
]

VOLATILE = ("versions", "created", "host")
SUMS = ("sketch", "moments", "histogram", "compression", "threshold")


def text_of(path):
    """Return the description of a group or an array without what differs from run to run."""
    found = json.loads(path.read_text("utf-8"))
    for name in VOLATILE:
        found.get("attributes", {}).pop(name, None)
    return json.dumps(found, sort_keys=True)


def files(trace):
    """Return the hash of all files of every array of a trace, and of every group's description."""
    parts = {}
    for path in sorted(trace.rglob("*")):
        name = path.relative_to(trace).as_posix()
        if path.is_dir() or "/compression/c" in name:
            continue
        text = text_of(path) if path.name == "zarr.json" else path.read_bytes()
        parts.setdefault(re.sub(r"/(c/.*|zarr.json)$", "", name), []).append((name, text))
    found = {name: digest(part) for name, part in parts.items()}
    read = open_trace(trace)
    for rank in read.ranks:
        for column, values in read.compression(rank).items():
            if not column.endswith("_seconds"):
                found[f"compression {rank} {column}"] = digest(str(values.dtype), values.tobytes())
    return found


def compared(folder, pins, kind):
    wrong = {}
    for trace in sorted(folder.glob("*.zarr")):
        now = files(trace)
        if WRITES:
            pins.put(now, kind, trace.stem)
            continue
        kept = pins.get(kind)
        exact = kept is not None
        then = (kept or next(iter(pins.values.values())))[trace.stem]
        names = {
            name
            for name in {*then, *now}
            if exact or not any(each in f"{trace.stem} {name}" for each in SUMS)
        }
        moved = {name for name in names if then.get(name) != now.get(name)}
        if moved:
            wrong[trace.stem] = sorted(moved)
    assert wrong == {}, "files of these arrays are others"


def test_trainings_of_one_process(tmp_path, pins, kind):
    trainings.of_one_process(tmp_path)
    assert len(list(tmp_path.glob("*.zarr"))) == len(trainings.PLAIN)
    compared(tmp_path, pins, kind)


def test_trainings_of_two_ranks(tmp_path, pins, kind):
    run_ranks(2, trainings.of_two_ranks, str(tmp_path))
    assert len(list(tmp_path.glob("*.zarr"))) == len(trainings.DDPS) + 4
    compared(tmp_path, pins, kind)
