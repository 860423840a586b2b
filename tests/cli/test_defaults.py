"""A command without options does what the Python function that it calls does without options."""

from __future__ import annotations

import inspect
import pkgutil
import shlex
from dataclasses import fields

import numpy as np
import pytest
import typer
from support.every import every
from support.networks import measured_network
from support.terminal import records
from support.traces import LAYERS, write

import gradstats
from capture.workloads import RunConfig
from gradstats.cli import _load_plugins, app, main
from gradstats.trace import create_trace

PLAN = "--network network.json --workers 4 --compute 0.1"
FUNCTIONS = {
    "advise run.zarr": "gradstats.analysis.advise:advise",
    "agreement run.zarr": "gradstats.analysis.agreement:agreement",
    "bench": "gradstats.thresholds.bench:bench",
    "bench run.zarr": "gradstats.thresholds.bench:bench",
    "bench-network": "capture.lab.run:bench_network",
    "capture resnet20-digits --out new.zarr": "capture.workloads:run",
    "compare run.zarr run.zarr": "gradstats.analysis.compare:compare",
    "compressibility run.zarr": "gradstats.analysis.decay:compressibility_records",
    "compression run.zarr": "gradstats.analysis.compression:compression",
    "delta a.npz b.npz": "gradstats.analysis.delta:delta",
    "drift run.zarr": "gradstats.analysis.drift:drift",
    "explore run.zarr -o explore.html": "gradstats.explorer:write_explorer",
    "fit run.zarr --all": "gradstats.analysis.fits:fit_records",
    "import run.zarr --out new.zarr": "gradstats.trace.dumps:dumps_of",
    "info run.zarr --all": "gradstats.analysis.info:info_records",
    f"plan run.zarr {PLAN}": "gradstats.network:plan",
    "pot run.zarr --all": "gradstats.analysis.peaks:pot",
    "quality run.zarr": "gradstats.analysis.quality:quality_series",
    "quality run.zarr --by-stage": "gradstats.analysis.quality:stage_budget",
    "quality run.zarr --versus exact": "gradstats.analysis.quality:quality_series",
    "report run.zarr -o report.html": "gradstats.report:write_report",
    f"report run.zarr -o report.html {PLAN}": "gradstats.network:plan",
    "wire run.zarr": "gradstats.analysis.wire:wire",
    "workloads resnet20-digits --gradient x.npz": "capture.workloads.layouts:backward_pass",
}
# What is of this run: what the command line names, and what shows how far it is.
OF_THE_RUN = {
    "source",
    "sources",
    "trace",
    "path",
    "advice",
    "on_progress",
    "label",
    "out",
    "gradients",
    "last",
}
OF_THE_RUN |= {"numels"}  # none, beside gradients of a source


class CalledError(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("defaults")
    create_trace(path / "run.zarr", LAYERS, world_size=2)
    for rank in (0, 1):
        write(path / "run.zarr", range(2), rank=rank, compression=True)
    measured_network().save(path / "network.json")
    return path


def plain(value):
    """Return a value so that ways to say the same are the same: no options, and a list or tuple."""
    if isinstance(value, list | tuple):
        value = tuple(value)
    return value if value not in ((), {}) else None


def test_every_command_is_compared():
    _load_plugins()
    names = set(typer.main.get_command(app).commands)
    assert {line.split()[0] for line in FUNCTIONS} == names - {
        "atlas",
        "demo",
        "plot",
    }  # trainings and an example of their own; pictures


@every("line", FUNCTIONS)
def test_the_terminal_has_the_defaults_of_python(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    function = pkgutil.resolve_name(FUNCTIONS[line])
    calls = []

    def called(*arguments, **options):
        calls.append(inspect.signature(function).bind(*arguments, **options).arguments)
        raise CalledError

    module, _, name = FUNCTIONS[line].partition(":")
    monkeypatch.setattr(pkgutil.resolve_name(module), name, called)
    with pytest.raises(CalledError):
        main(shlex.split(line))
    (asked,) = calls
    defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    if function.__name__ == "run":  # the settings of a training are one object
        config = asked.pop("config")
        asked = {each.name: getattr(config, each.name) for each in fields(config)}
        bare = RunConfig(workload=config.workload)
        defaults = {each.name: getattr(bare, each.name) for each in fields(bare)}
    given = {name for name in asked if defaults[name] is not inspect.Parameter.empty}
    for name in given - OF_THE_RUN:
        assert plain(asked[name]) == plain(defaults[name]), name


def test_a_summary_has_the_defaults_of_its_series():
    whole, series = (
        inspect.signature(f).parameters for f in (gradstats.quality, gradstats.quality_series)
    )
    assert [*whole] == [*series]
    for name in whole.keys() - {"on_progress"}:
        assert whole[name].default == series[name].default


def test_tables_have_the_same_rows(folder, monkeypatch):
    monkeypatch.chdir(folder)
    x = np.random.default_rng(0).laplace(size=2000).astype(np.float32)
    np.save("x.npy", x)
    fits = gradstats.fit_all(x)
    assert {r["model"] for r in records("fit", "x.npy")} == {fit.model for fit in fits}
    here = gradstats.quality(x)
    names = [(r["estimator"], r["ratio"]) for r in records("quality", "x.npy")]
    assert names == [(r["estimator"], r["ratio"]) for r in here]
    assert {name for name, _ in names} == set(gradstats.thresholds.ESTIMATORS)
