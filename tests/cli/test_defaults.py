"""A command without options calls its Python function as without options, and hands on each that it is given."""

from __future__ import annotations

import inspect
import pkgutil
import shlex
from contextlib import nullcontext
from dataclasses import fields

import numpy as np
import pytest
import typer
from support.every import every
from support.networks import measured_network
from support.terminal import main, records
from support.traces import LAYERS, write

import gradstats
from capture.workloads import RunConfig
from gradstats.analysis import pieces
from gradstats.cli import _load_plugins, app
from gradstats.collectives.codec import Codec
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

OF = " --step 1 --rank 0 --kind corrected"
OF_LAYERS = f"{OF} --layer a.w* --per-layer"
CHOSEN = {"steps": [1], "ranks": [0], "kinds": ["corrected"]}
CHOSEN_LAYERS = CHOSEN | {"layers": ["a.w*"], "per_layer": True}
ON_A_CLUSTER = "--scheduler tcp://some:1"
# Each option that a command hands on has a value of its own here: none may be dropped or taken for another.
ASKED = {
    **{
        f"{line} --link wan --rtt 7ms --workers 5 --compute 0.2": (
            "gradstats.network:link",
            {"name": "wan", "rtt": 0.007},
        )
        for line in ("advise run.zarr", "plan run.zarr", "report run.zarr -o x.html")
    },
    "advise run.zarr --optimizer adam --tolerance 0.3 --without some --step 1": (
        "gradstats.analysis.advise:advise",
        {"optimizer": "adam", "tolerance": 0.3, "without": ["some"], "steps": [1]},
    ),
    "advise run.zarr --network network.json --workers 5 --compute 0.2 --step 1": (
        "gradstats.network:plan",
        {"compute": 0.2, "workers": [5], "captured": [1]},
    ),
    f"agreement run.zarr --ratio 0.1 --workers 5 --batch 7{OF_LAYERS}": (
        "gradstats.analysis.agreement:agreement",
        {"ratio": 0.1, "workers": 5, "batch": 7, **CHOSEN_LAYERS},
    ),
    "bench --numel 99 --tail laplace --ratio 0.1 --estimator exact --threads 2 --repeats 3": (
        "gradstats.thresholds.bench:bench",
        {
            "numels": [99],
            "tails": ["laplace"],
            "ratios": [0.1],
            "estimators": ["exact"],
            "threads": [2],
            "repeats": 3,
        },
    ),
    "bench --no-references": ("gradstats.thresholds.bench:bench", {"references": False}),
    "bench --published": ("gradstats.thresholds.bench:bench", {"published": True}),
    "bench --cold": ("gradstats.thresholds.bench:bench", {"cold": True}),
    f"compare run.zarr b.npz --weights a.npz --tolerance 0.3{OF_LAYERS}": (
        "gradstats.analysis.compare:compare",
        {"a": "run.zarr", "b": "b.npz", "weights": "a.npz", "tolerance": 0.3, **CHOSEN_LAYERS},
    ),
    f"compressibility run.zarr --window 2:50{OF}": (
        "gradstats.analysis.decay:compressibility_records",
        {"window": (2, 50), **CHOSEN},
    ),
    "compression run.zarr --per-layer": (
        "gradstats.analysis.compression:compression",
        {"per_layer": True},
    ),
    "delta a.npz b.npz --dtype fp16 --rate 0.1 --no-master --step 1 --rank 2 --layer w* --per-layer": (
        "gradstats.analysis.delta:delta",
        {"dtype": "fp16", "rate": 0.1, "master": False, "steps": [1], "rank": 2}
        | {"layers": ["w*"], "per_layer": True},
    ),
    f"drift run.zarr --quantity rms --model laplace --ratio 0.1{OF_LAYERS}": (
        "gradstats.analysis.drift:drift",
        {"quantities": ["rms"], "models": ["laplace"], "ratios": [0.1], **CHOSEN_LAYERS},
    ),
    f"explore run.zarr -o x.html --ratio 0.1 --estimator exact --model laplace{OF} --layer a.w*": (
        "gradstats.explorer:write_explorer",
        {"path": "x.html", "ratios": [0.1], "estimators": ["exact"], "models": ["laplace"]}
        | {"layers": ["a.w*"], **CHOSEN},
    ),
    f"fit run.zarr --model laplace --method moments --bootstrap 3 --size 50 --seed 7{OF_LAYERS}": (
        "gradstats.analysis.fits:fit_records",
        {"models": ["laplace"], "method": "moments", "replicates": 3, "size": 50, "seed": 7}
        | CHOSEN_LAYERS,
    ),
    "import grad_0.npz --out new.zarr --step-from-name {step}.npz --kind weight --list layers": (
        "gradstats.trace.dumps:dumps_of",
        {"pattern": "{step}.npz", "lists": "layers"},
    ),
    "import grad_0.npz --out new.zarr --kind weight": (
        "gradstats.trace.dumps:Dumps",
        {"kind": "weight"},
    ),
    f"plan run.zarr {PLAN} --ratio 0.1 --compressor topk --indices rice --values int8 --baseline bf16"
    " --bandwidth 6 --local-steps 3 --fragments 2 --delay 5 --step 1": (
        "gradstats.network:plan",
        {
            "compute": [0.1],
            "workers": [4],
            "ratios": [0.1],
            "compressors": ["topk"],
            "rates": [6e6],
            "local_steps": [3],
            "fragments": 2,
            "delay": 5,
            "codec": Codec("rice", "int8"),
            "baseline": "bf16",
            "captured": [1],
        },
    ),
    f"plan run.zarr {PLAN} --up 2 --down 9": ("gradstats.network:plan", {"rates": [(2e6, 9e6)]}),
    f"pot run.zarr --ratio 0.2 --method moments --choose 3{OF}": (
        "gradstats.analysis.peaks:pot",
        {"ratios": [0.2], "method": "moments", "replicates": 3, **CHOSEN},
    ),
    f"pot run.zarr --ratio 0.2 --layers{OF} --layer a.w*": (
        "gradstats.analysis.peaks:pot",
        {"ratios": [0.2], **CHOSEN_LAYERS},
    ),
    f"quality run.zarr --ratio 0.1 --estimator sidco-e --stages 2{OF_LAYERS}": (
        "gradstats.analysis.quality:quality_series",
        {"ratios": [0.1], "estimators": ["sidco-e"], **CHOSEN_LAYERS},
    ),
    "quality run.zarr --estimator sidco-e --versus exact": (
        "gradstats.analysis.quality:quality_series",
        {"estimators": ["sidco-e", "exact"]},
    ),
    f"quality run.zarr --by-stage --ratio 0.1 --estimator sidco-e{OF_LAYERS}": (
        "gradstats.analysis.quality:stage_budget",
        {"ratios": [0.1], "estimators": ["sidco-e"], **CHOSEN_LAYERS},
    ),
    f"report run.zarr -o x.html {PLAN} --ratio 0.1": (
        "gradstats.network:plan",
        {"compute": [0.1], "workers": [4], "ratios": [0.1]},
    ),
    "wire run.zarr --to bf16 --rounding stochastic --rotation 64 --scale block --ratio 0.1 --estimator exact"
    f" --seed 7{OF_LAYERS}": (
        "gradstats.analysis.wire:wire",
        {"formats": ["bf16"], "roundings": ["stochastic"], "rotations": [64], "scales": ["block"]}
        | {"ratio": 0.1, "estimator": "exact", "seed": 7, **CHOSEN_LAYERS},
    ),
}
# Options that say what is done with the records, or that choose the function: they are no argument of it.
ELSEWHERE = {
    "bench": {"--compare", "--layout", "--per-layer", "--step", "--rank", "--kind"},
    "plan": {"--figure", "--measured"},
    "wire": {"--error"},
}
OF_THE_OUTPUT = {"--output", "--format", "--all", "--scheduler", "--help"}


class CalledError(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("defaults")
    create_trace(path / "run.zarr", LAYERS, world_size=2)
    for rank in (0, 1):
        write(path / "run.zarr", range(2), rank=rank, compression=True)
    measured_network().save(path / "network.json")
    np.savez(path / "grad_0.npz", w=np.ones(3, np.float32))
    return path


def plain(value):
    """Return a value so that ways to say the same are the same: no options, and a list or tuple."""
    if isinstance(value, list | tuple):
        value = tuple(value)
    return value if value not in ((), {}) else None


def handed_on(line, place, monkeypatch):
    """Return the arguments with which a command calls a function, which does nothing then."""
    function = pkgutil.resolve_name(place)
    calls = []

    def called(*arguments, **options):
        calls.append(inspect.signature(function).bind(*arguments, **options).arguments)
        raise CalledError

    module, _, name = place.partition(":")
    monkeypatch.setattr(pkgutil.resolve_name(module), name, called)
    with pytest.raises(CalledError):
        main(shlex.split(line))
    (asked,) = calls
    return asked


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
    asked = handed_on(line, FUNCTIONS[line], monkeypatch)
    defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    if function.__name__ == "run":  # the settings of a training are one object
        config = asked.pop("config")
        asked = {each.name: getattr(config, each.name) for each in fields(config)}
        bare = RunConfig(workload=config.workload)
        defaults = {each.name: getattr(bare, each.name) for each in fields(bare)}
    given = {name for name in asked if defaults[name] is not inspect.Parameter.empty}
    for name in given - OF_THE_RUN:
        assert plain(asked[name]) == plain(defaults[name]), name


@every("line", ASKED)
def test_the_terminal_hands_on_what_it_is_asked(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    place, expected = ASKED[line]
    client = object()
    monkeypatch.setattr(
        pieces,
        "connect",
        lambda address: nullcontext(client if address == "tcp://some:1" else None),
    )
    takes = inspect.signature(pkgutil.resolve_name(place)).parameters
    # this one works before it calls, which takes a real cluster
    if "client" in takes and not line.startswith("advise run.zarr --network"):
        line += f" {ON_A_CLUSTER}"
        expected = expected | {"client": client}
    asked = handed_on(line, place, monkeypatch)
    for name, value in expected.items():
        given = asked[name]
        assert (str(given) if isinstance(value, str) else plain(given)) == plain(value), name
    if "--stages" in line:
        assert asked["options"]["sidco-e"] == {"stages": 2}


def test_every_option_is_handed_on():
    _load_plugins()
    commands = typer.main.get_command(app).commands
    asked = {}
    for line in ASKED:
        name, *words = shlex.split(line)
        asked.setdefault(name, set()).update(word for word in words if word.startswith("-"))
    for name, given in asked.items():
        has = {
            p.opts[-1]: {*p.opts, *p.secondary_opts}
            for p in commands[name].params
            if p.opts[-1][0] == "-"
        }
        left = {option for option, ways in has.items() if not ways & given}
        assert left - OF_THE_OUTPUT == ELSEWHERE.get(name, set()), name


def test_another_version_is_timed_with_the_same_options(folder, monkeypatch):
    (folder / "other").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    asked = (
        "--numel 99 --tail laplace --layout mlp --ratio 0.1 --estimator exact --threads 2 --step 1 --rank 0"
        " --kind corrected --per-layer --published --cold --no-references"
    )
    place = "gradstats.thresholds.changes:alternated"
    found = handed_on(f"bench run.zarr --compare other --repeats 3 {asked}", place, monkeypatch)
    assert found["arguments"] == [str(folder / "run.zarr"), *asked.split()]
    assert found["repeats"] == 3
    assert str(found["other"]) == "other"


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
