"""Out of core and beyond one machine: the same numbers, piece by piece."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from multiprocessing import forkserver

import dask
import distributed  # noqa: F401 — its settings are there once it is imported
import numpy as np
import pytest
import xarray
from conftest import DATA
from forked import CONTEXT
from support.installed import files_of
from support.networks import measured_network
from support.terminal import run
from support.traces import HEAVY_LAYERS, drifting_trace, heavy_trace

from gradstats import registry
from gradstats.analysis import pieces
from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.delta import delta
from gradstats.analysis.drift import over_training
from gradstats.analysis.fits import fit_records
from gradstats.analysis.peaks import mixture_records
from gradstats.errors import InputError
from gradstats.primitives.sketch import sketch
from gradstats.report import write_report
from gradstats.statistics.laws import LAWS
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return heavy_trace(tmp_path_factory.mktemp("reduction") / "run.zarr")


def close(a, b, rel=1e-9):
    """Two lists of records are the same, numbers to 1e-9."""
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, dict):
                close([value], [other[name]], rel)
            elif isinstance(value, float):
                assert value == pytest.approx(other[name], rel=rel, nan_ok=True), name
            else:
                assert value == other[name], name


@pytest.mark.parametrize("piece", [7, 1000, 149_999, 10**9])
def test_pieces_do_not_change_the_numbers(trace, monkeypatch, piece):
    source = open_source(trace)
    selection = {"steps": [1], "ranks": [0], "kinds": ["gradient"]}
    if piece == 7:  # a quarter of a hundred thousand reads: only the bias
        source = open_source({"bias": source.read(0, "gradient", 1).values[150_000:150_070]})
        selection = {}
    whole = fit_records(
        source, ["laplace", "dgamma", "double_genpareto"], per_layer=True, **selection
    )
    decay = compressibility_records([source], (1, 50), **selection)
    monkeypatch.setattr(pieces, "PIECE", piece)
    close(
        fit_records(source, ["laplace", "dgamma", "double_genpareto"], per_layer=True, **selection),
        whole,
    )
    close(compressibility_records([source], (1, 50), **selection), decay)


@pytest.mark.parametrize("store", ["gradients", "sketches"])
def test_layers_chosen_by_pattern_have_the_numbers_of_all_layers(tmp_path, store):
    source = open_source(heavy_trace(tmp_path / "run.zarr", store, steps=1))
    here = {"ranks": [0], "kinds": ["gradient"]}
    whole = fit_records(source, ["dgamma"], per_layer=True, **here)
    some = fit_records(source, ["dgamma"], layers=["b*", "w"], **here)
    assert [r["layer"] for r in some] == ["all", "bias", "w"]
    close(some, [r for r in whole if r["layer"] != "embedding"])
    tails = mixture_records(source, **here)
    close(
        mixture_records(source, layers=["w"], **here),
        [r for r in tails if r["layer"] in ("pooled", "normalised", "w")],
    )
    dataset = over_training(source, models=["laplace"], layers=["w"], **here)
    assert list(dataset["layer"].values) == ["all", "w"]
    xarray.testing.assert_equal(
        dataset,
        over_training(source, models=["laplace"], per_layer=True, **here).sel(layer=["all", "w"]),
    )
    with pytest.raises(InputError, match=r"no layer of run matches x\*; it has bias, embedding, w"):
        fit_records(source, layers=["x*"])


def test_the_numbers_are_those_of_the_array_in_memory(trace):
    from gradstats import compressibility, fit
    from gradstats.statistics.goodness import goodness

    source = open_source(trace)
    records = fit_records(
        source, ["double_genpareto"], method="mle", per_layer=True, steps=[2], ranks=[1]
    )
    for record in records:
        values = source.read(1, record["kind"], 2).values
        if record["layer"] != "all":
            values = values[next(la for la in HEAVY_LAYERS if la.name == record["layer"]).slice]
        fitted = fit(values, "double_genpareto", "mle")
        assert record["params"] == pytest.approx(fitted.params, rel=1e-9, abs=1e-10)
        assert record["ks"] == pytest.approx(goodness(fitted, values).ks, rel=1e-9)
    decay = compressibility_records([source], steps=[2], ranks=[1], kinds=["gradient"])[0]
    exact = compressibility(source.read(1, "gradient", 2).values)
    assert decay["p"] == pytest.approx(exact.p, rel=1e-12)
    assert decay["c1"] == pytest.approx(exact.c1, rel=1e-12)
    assert decay["sigma_p"] == pytest.approx(exact.sigma_p, rel=1e-9)


@pytest.mark.slow
def test_sketches_are_enough(trace, tmp_path):
    """A trace of sketches of the same run: parameters within 1 %, thresholds within half a percent."""
    full, rough = open_source(trace), open_source(heavy_trace(tmp_path / "s.zarr", "sketches"))
    models = ["laplace", "dgamma", "double_genpareto", "t"]
    options = {"method": "mle", "per_layer": True, "steps": [0, 2], "ranks": [0]}
    options["kinds"] = ["gradient"]  # the other kind is twice the same
    for a, b in zip(
        fit_records(full, models, **options), fit_records(rough, models, **options), strict=True
    ):
        for name, value in a["params"].items():
            assert b["params"][name] == pytest.approx(value, rel=0.01, abs=0.01 * (name == "c"))
        assert b["ks"] == pytest.approx(a["ks"], abs=0.005)
    here = {"ranks": [0], "kinds": ["gradient"]}
    x, y = (over_training(s, per_layer=True, **here) for s in (full, rough))
    assert np.allclose(x["threshold"], y["threshold"], rtol=0.005)
    assert np.allclose(x["mean"], y["mean"], rtol=1e-6)
    p, q = (compressibility_records([s], steps=[1], ranks=[0]) for s in (full, rough))
    assert q[0]["p"] == pytest.approx(p[0]["p"], rel=0.01)


@pytest.mark.parametrize(("name", "kind"), [("resnet20", "gradient"), ("resnet20-ef", "corrected")])
def test_sketches_of_the_captured_gradients_are_enough(tmp_path, name, kind):
    """The traces in data/, kept as sketches instead: thresholds within 0.5 %, parameters within 1 %."""
    full = open_source(DATA / f"{name}.zarr")
    create_trace(tmp_path / "s.zarr", full.layers)
    writer = TraceWriter(tmp_path / "s.zarr", 0, kinds=(kind,), store="sketches")
    for _, _, step in full.select(kinds=[kind]):
        writer.append(step, {kind: full.read(0, kind, step).values})
    writer.close()
    rough = open_source(tmp_path / "s.zarr")
    x, y = (over_training(s, models=list(LAWS), kinds=[kind]) for s in (full, rough))
    assert np.abs(y["threshold"] / x["threshold"] - 1).max() < 0.005
    assert np.abs(y["scale"] / x["scale"] - 1).max() < 0.01
    shapes = ["double_genpareto", "dgamma", "gennorm", "dweibull", "lognorm"]
    difference = (y["shape"] - x["shape"]).sel(model=shapes)
    assert (np.abs(difference) <= 0.01 * np.abs(x["shape"].sel(model=shapes)) + 1e-3).all()
    assert np.allclose(x["ks"], y["ks"], atol=0.003)
    for q in ("p", "hill"):
        assert np.allclose(x[q], y[q], rtol=0.02)


def test_estimators_run_on_a_gradient_made_up_from_sketches(trace, tmp_path):
    from gradstats import quality

    rough = heavy_trace(tmp_path / "s.zarr", "sketches")
    options = {"estimators": ["exact", "histogram", "sidco-p"], "ratios": (0.01,), "steps": [0]}
    for a, b in zip(quality(trace, **options), quality(rough, **options), strict=True):
        assert b["mean"] == pytest.approx(a["mean"], abs=0.02)
    values = open_source(rough).read(0, "gradient", 0).values
    original = open_source(trace).read(0, "gradient", 0).values
    assert values.size == original.size
    assert np.array_equal(sketch(values, 7).counts, sketch(original, 7).counts)


@pytest.fixture(scope="module")
def cluster():
    import dask
    from distributed import Client, LocalCluster

    forkserver.ensure_running()  # of all ranks of this process: it has imported what workers need
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": CONTEXT.get_start_method()}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",  # None takes port 8787, which another may have
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
class TestCluster:
    """Two dask workers, processes of their own."""

    def test_the_same_numbers(self, trace, cluster, monkeypatch):
        monkeypatch.setattr(pieces, "PIECE", 40_000)  # several pieces per gradient
        source, models = open_source(trace), ["dgamma", "double_genpareto"]
        some = {"steps": [0, 2], "kinds": ["gradient"]}  # of two ranks: four gradients
        here = fit_records(source, models, per_layer=True, **some)
        there = fit_records(source, models, per_layer=True, client=cluster, **some)
        close(there, here)
        close(
            compressibility_records([source], client=cluster, **some),
            compressibility_records([source], **some),
        )
        a, b = over_training(source, **some), over_training(source, client=cluster, **some)
        xarray.testing.assert_allclose(a, b, rtol=1e-9)

    def test_the_workers_did_the_work(self, trace, cluster):
        seen = []

        def plan(submit, key):
            return submit(worker_of, pieces.plan_sketches(submit, open_source(trace), key))

        keys = open_source(trace).select()
        for name in pieces.evaluate(plan, keys, cluster):
            seen.append(name)
        assert len(seen) == len(keys) == 12
        assert os.getpid() not in seen

    def test_a_worker_s_error_is_one_line_here(self, tmp_path, cluster):
        path = heavy_trace(tmp_path / "damaged.zarr", steps=1)
        for chunk in (path / "rank00001" / "gradient" / "c").rglob("*"):
            if chunk.is_file():
                chunk.write_bytes(b"not a chunk")
        with pytest.raises(InputError.__base__, match="damaged"):
            fit_records(open_source(path), client=cluster)

    def test_every_command_writes_the_same_bytes(self, trace, cluster, tmp_path):
        """Rules that learn see the steps of their rank and kind in order, wherever they run."""
        rules = [f"--estimator={name}" for name in ("sidco-e", "micro", "warm-exact")]
        few = ["--ratio", "0.01", *rules]
        measured_network().save(tmp_path / "network.json")
        planned = ("--network", tmp_path / "network.json", "--ratio=0.01", "--compressor=sidco-e")
        for name, *options in (
            ("fit", "--step", "0"),
            ("compressibility", "--kind", "gradient"),
            ("pot", "--step", "0", "--layers"),
            ("drift", "--kind", "gradient"),
            ("quality", *few, "--per-layer"),
            ("quality", *few, "--by-stage"),
            ("wire", "--to", "e4m3", "--rounding", "stochastic", "--per-layer"),
            ("agreement", "--per-layer"),
            ("compare", trace, "--per-layer"),
            ("plan", *planned, "--compute=0.1", "--workers=8"),
            ("advise", *planned[:2], "--compute=0.1"),
        ):
            command = (name, trace, *options, "--format", "json")
            here, there = run(*command), run(*command, "--scheduler", cluster.scheduler.address)
            assert (here.returncode, there.returncode) == (0, 0), there.stderr
            assert len(here.stdout) > 1000
            assert there.stdout == here.stdout, name

    @pytest.mark.parametrize("bits", [0, 16])
    def test_checkpoints_are_compared_there(self, cluster, tmp_path, monkeypatch, bits):
        """Files, and a folder of them; arrays in memory are compared here. bf16 is found in either place."""
        rng, paths, arrays = np.random.default_rng(0), [], []
        for i in range(3):
            layers = {f"layer{i}": rng.normal(size=400).astype(np.float32) for i in range(9)}
            for values in layers.values():
                values.view(np.uint32)[:] &= np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
            paths.append(tmp_path / f"step_{i}.npz")
            np.savez(paths[-1], **layers)
            arrays.append(layers)
        expected = list(delta(*paths, per_layer=True))
        assert {r["dtype"] for r in expected} == {"bf16" if bits else "fp32"}
        assert {r["lag"] for r in expected} == {1, 2}
        close(delta(*arrays, per_layer=True, client=cluster), expected, rel=0)
        elsewhere = functools.partial(pairs_elsewhere, os.getpid())
        monkeypatch.setattr("gradstats.analysis.delta._pairs", elsewhere)
        for sources in (paths, [tmp_path]):
            close(delta(*sources, per_layer=True, client=cluster), expected, rel=0)

    def test_pages_and_figures_are_the_same(self, cluster, tmp_path):
        """Of the report its answers: figures are drawn here, from what was measured there."""
        trace, file = tmp_path / "few.zarr", tmp_path / "one.npy"
        drifting_trace(trace, [0, 1, 2], lambda step: 1 + step)
        np.save(file, np.random.default_rng(2).laplace(size=40_000).astype(np.float32))
        assert write_report(file, client=cluster) == write_report(file)
        at = ["--scheduler", cluster.scheduler.address]
        for name, *options in (
            ("explorer.html", "explore", file, "--ratio", "0.01", "--estimator", "micro"),
            ("overview.png", "plot", "overview", trace),
            ("drift.png", "plot", "drift", trace),
            ("bars.png", "plot", "quality-bars", trace, "--estimator", "micro"),
        ):
            pages = []
            for where in ([], at):
                done = run(*options, "-o", tmp_path / name, *where)
                assert done.returncode == 0, done.stderr
                pages.append((tmp_path / name).read_bytes())
            assert len(pages[0]) > 5000
            assert pages[1] == pages[0], name

    def test_a_wrong_option_is_one_line(self, trace, cluster):
        done = run("quality", trace, "--scheduler", cluster.scheduler.address, "--ratio", "2")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1

    def test_the_workers_load_what_the_command_does(
        self, trace, cluster, tmp_path, forgotten, monkeypatch
    ):
        monkeypatch.setattr(registry, "_FILES", {})
        (tmp_path / "dlogistic.py").write_text(files_of("law.md")["dlogistic.py"])
        command = ["fit", trace, "--step", "0", "--model", "dlogistic"]
        loads = ["--load", tmp_path / "dlogistic.py"]
        here = json.loads(run(*command, *loads, "--format", "json").stdout)
        there = json.loads(
            run(
                *command, *loads, "--scheduler", cluster.scheduler.address, "--format", "json"
            ).stdout
        )
        assert {r["model"] for r in there} == {"dlogistic"}
        close(there, here)


def pairs_elsewhere(process, *arguments):
    from gradstats.analysis.delta import _pairs

    assert os.getpid() != process
    return _pairs(*arguments)


def worker_of(sketches):
    assert sketches["all"].numel == 165_070
    return os.getpid()


def test_no_scheduler_is_one_line():
    """At once where nothing listens, however patient dask is; what listens and is none has dask's time to answer."""
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1h"}),
        pytest.raises(InputError, match=r"no dask scheduler at tcp://127\.0\.0\.1:9: .*refused"),
    ):
        pieces.connect("tcp://127.0.0.1:9")
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(
            InputError, match=r"no dask scheduler at tcp://127\.0\.0\.1:\d+: .* not answered in 1 s"
        ),
    ):
        pieces.connect(f"tcp://127.0.0.1:{other.getsockname()[1]}")
    with pytest.raises(InputError, match="no dask scheduler at nonsense: missing port"):
        pieces.connect("nonsense")


@pytest.mark.slow
def test_memory_stays_constant(tmp_path):
    """A gradient of 200 MB is fitted with far less than that beside it."""
    path = tmp_path / "large.zarr"
    numel = 50_000_000
    create_trace(path, [Layer("w", 0, (numel,))])
    writer = TraceWriter(path, 0)
    writer.append(0, {"gradient": np.random.default_rng(0).standard_normal(numel, np.float32)})
    writer.close()
    code = f"""
import re
from pathlib import Path
import numpy as np
from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.fits import fit_records
from gradstats.trace.sources import open_source
def peak():  # of this process alone: what getrusage says begins with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
fit_records(open_source({{"w": np.ones(100_000, np.float32) * np.arange(100_000, dtype=np.float32)}}))
before = peak()
records = fit_records(open_source({str(path)!r}))
compressibility_records([open_source({str(path)!r})], (1, 10_000))
assert len(records) == 3
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 150
