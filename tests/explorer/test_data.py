"""What travels is what the library says: magnitudes, fits, counts; what cannot be known is absent, and said."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from support.traces import drifting_trace, heavy_trace, trace_of_steps

import gradstats
from gradstats.errors import InputError
from gradstats.explorer import data
from gradstats.explorer.data import DRAWN, RANKS, fitted, gather, needs_elements, payload
from gradstats.statistics.laws import LAWS
from gradstats.thresholds import ESTIMATORS
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import Subset, TraceSource, open_source

RESNET = DATA / "resnet20.zarr"
RATIOS = (0.1, 0.01, 0.001)
RULES = ("exact", "hard", "sidco-e", "dgc", "gaussiank")
LAYERS = ["conv1.weight", "fc.weight", "bn1.*"]


def unpacked(packed):
    """Read an array as the page does."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    size = np.dtype("<" + packed["type"]).itemsize
    values = np.ascontiguousarray(planes.reshape(size, -1).T).view("<" + packed["type"])
    values = values.reshape(packed["shape"])
    if packed["delta"]:
        values = np.cumsum(values, axis=-1, dtype=values.dtype)
    if not packed["scale"]:
        return values
    found = values / packed["scale"]
    found[values == -32768] = np.nan
    found[values == -32767] = -np.inf
    return found


def gathered(source, **options):
    subset = Subset(
        per_layer=True, layers=options.pop("layers", None), steps=options.pop("steps", None)
    )
    return gather(open_source(source), subset, **{"ratios": RATIOS, "rules": RULES} | options)


@pytest.fixture(scope="module")
def resnet():
    (series,) = gathered(RESNET, layers=LAYERS, steps=[10, 2999])
    return series


@pytest.fixture(scope="module")
def travelled(resnet):
    return json.loads(payload([resnet], RATIOS))


def each(series):
    trace = gradstats.open_trace(RESNET)
    for i, step in enumerate(series.steps):
        for j, layer in enumerate(series.layers):
            values = trace.read(step) if layer == "all" else trace.read(step, layer=layer).ravel()
            yield i, j, layer, values.astype(np.float64)


def test_magnitudes_are_those_of_the_gradient_at_ranks_evenly_spread_on_a_log_axis(
    resnet, travelled
):
    logs = unpacked(travelled["series"][0]["arrays"]["magnitudes"])
    for i, j, layer, values in each(resnet):
        magnitudes = np.sort(np.abs(values))[::-1]
        ranks = np.floor(values.size ** (np.arange(RANKS) / (RANKS - 1)) + 0.5).astype(int)
        assert (ranks[0], ranks[-1]) == (1, values.size)
        # half a unit of what is stored, and a cell of the sketch, of the 0.1 % that 10 bits have
        slack = 0.5 / 200 + (np.log2(1 + 2**-10) if layer == "all" else 1e-6)
        np.testing.assert_allclose(
            logs[i, j], np.log2(magnitudes[ranks - 1]), rtol=0, atol=slack, err_msg=layer
        )


READER = """
const { load } = await import(process.argv[1]);
const about = await load(require("fs").readFileSync(0, "utf8"));
const [series] = about.series;
const all = series.layers.map((_, layer) => {
  const { count } = series.facts(0, layer);
  const ranks = [...Array(Math.min(count, 20000)).keys()].map((i) => i + 1);
  return { ranks: ranks.map((k) => series.logSize(0, layer, k)), curve: series.curve(0, layer) };
});
process.stdout.write(JSON.stringify(all));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_page_reads_the_magnitude_of_a_rank(resnet, tmp_path):
    source = tmp_path / "data.mjs"
    shutil.copy(Path(gradstats.explorer.__file__).parent / "js" / "src" / "data.js", source)
    done = subprocess.run(
        ["node", "--input-type=commonjs", "--eval", f"(async () => {{{READER}}})()", source],
        input=payload([resnet], RATIOS),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    exact = 0
    for i, j, layer, values in each(resnet):
        if i:
            continue
        magnitudes = np.log2(np.sort(np.abs(values))[::-1])
        slack = 0.5 / 200 + (np.log2(1 + 2**-10) if layer == "all" else 1e-6)
        curve = found[j]["curve"]
        ranks = [point["rank"] for point in curve]
        assert ranks == sorted(set(ranks)), layer
        assert (ranks[0], ranks[-1]) == (1, values.size)
        np.testing.assert_allclose(
            np.log2([point["size"] for point in curve]),
            magnitudes[np.array(ranks) - 1],
            rtol=0,
            atol=slack,
            err_msg=layer,
        )
        # at every rank, between those of the ranks that travel around it
        sizes = np.array(found[j]["ranks"])
        places = np.arange(1, sizes.size + 1)
        here = np.searchsorted(ranks, places)
        above = np.array(ranks)[np.maximum(here - (np.array(ranks)[here] > places), 0)]
        below = np.array(ranks)[here]
        assert (sizes <= magnitudes[above - 1] + slack).all(), layer
        assert (sizes >= magnitudes[below - 1] - slack).all(), layer
        exact += int((above == below).sum())
    assert exact > 200


def test_norms_zeros_and_the_loss_are_those_of_the_trace(resnet, travelled):
    stored = travelled["series"][0]
    arrays = {name: unpacked(packed) for name, packed in stored["arrays"].items()}
    for i, j, _, values in each(resnet):
        assert arrays["norm"][i, j] == pytest.approx(np.linalg.norm(values), rel=1e-6)
        assert arrays["zeros"][i, j] == (values == 0).sum()
    scalars = gradstats.open_trace(RESNET).scalars()
    assert stored["losses"] == [scalars["loss"][0], scalars["loss"][-1]]
    assert stored["steps"] == [10, 2999]


def test_counts_are_those_of_the_library_and_exact_keeps_k_everywhere(resnet, travelled):
    stored = travelled["series"][0]
    off = unpacked(stored["arrays"]["off"])
    design = unpacked(stored["arrays"]["design"])
    records = gradstats.quality_series(RESNET, RATIOS, RULES, layers=LAYERS, steps=[10, 2999])
    assert len(records) == off.size
    for r in records:
        i, j = resnet.steps.index(r["step"]), resnet.layers.index(r["layer"])
        rule, q = RULES.index(r["estimator"]), RATIOS.index(r["ratio"])
        k = stored["layers"][j]["k"][q]
        assert k == r["k"]
        assert resnet.arrays["selected"][i, j, rule, q] == r["selected"]
        assert k * 2.0 ** off[i, j, rule, q] == pytest.approx(r["selected"], rel=4e-4)
        if not np.isnan(r["design"]):
            assert design[i, j, q] == pytest.approx(r["design"], abs=0.01)
    assert (off[:, :, RULES.index("exact")] == 0).all()


def test_laws_are_fitted_in_python_and_judged_by_the_tail_error_of_goodness(resnet, travelled):
    fits = travelled["series"][0]["fits"]
    assert list(fits) == ["laplace", "dgamma", "double_genpareto"]
    for model, stored in fits.items():
        params, errors = unpacked(stored["params"]), unpacked(stored["stderr"])
        tail_error, flag = unpacked(stored["tail_error"]), unpacked(stored["flag"])
        for i, j, layer, values in each(resnet):
            one = gradstats.fit(values.astype(np.float32), model)
            names = LAWS[model].parameters
            assert params[i, j] == pytest.approx([one.params[n] for n in names], rel=1e-6), layer
            errors_ = 2.0 ** errors[i, j] * np.abs(params[i, j])
            assert errors_ == pytest.approx([one.stderr[n] for n in names], rel=2e-3, nan_ok=True)
            judged = gradstats.goodness.goodness(one, values.astype(np.float32)).tail_error
            assert tail_error[i, j] == pytest.approx(judged, abs=1e-3, nan_ok=True)
            assert stored["flags"][int(flag[i, j])] == "; ".join(one.flags)
    xi = unpacked(travelled["series"][0]["arrays"]["xi"])
    assert xi == pytest.approx(unpacked(fits["double_genpareto"]["params"])[..., 0], abs=2e-4)


def test_a_law_that_is_asked_for_is_fitted_to_one_layer_in_one_step(resnet):
    found = fitted(resnet, 2999, "conv1.weight", "norm")
    values = gradstats.open_trace(RESNET).read(2999, layer="conv1.weight")
    assert found["params"] == [gradstats.fit(values, "norm").params["scale"]]
    with pytest.raises(InputError, match=r"^no step '5'"):
        fitted(resnet, 5, "all", "norm")


def test_which_rules_need_elements():
    assert [rule for rule in ESTIMATORS if needs_elements(rule)] == ["dgc", "gaussiank"]


def test_of_sketches_rules_that_need_elements_are_absent_and_the_page_says_so(sketched):
    several = gathered(sketched)
    found = json.loads(payload(several, RATIOS))
    assert [(s["kind"], s["rank"]) for s in found["series"]] == [
        *(("gradient", 0), ("corrected", 0), ("gradient", 1), ("corrected", 1))
    ]
    assert [rule["name"] for rule in found["rules"]] == ["exact", "hard", "sidco-e"]
    assert all(s["rules"] == ["exact", "hard", "sidco-e"] for s in found["series"])
    assert "Rules that need elements are not here: dgc, gaussiank." in found["notes"][0]
    assert not found["agreement"]
    assert all(np.isnan(unpacked(s["arrays"]["design"])).all() for s in found["series"])
    exact = [unpacked(s["arrays"]["off"])[:, :, 0] for s in found["series"]]
    assert (np.array(exact) == 0).all()


def test_steps_are_thinned_beyond_a_size_and_the_page_says_so(tmp_path):
    trace = drifting_trace(tmp_path / "run.zarr", range(0, 100, 5), lambda step: 1 / (1 + step))
    several = gathered(trace, rules=("exact",))
    whole = json.loads(payload(several, RATIOS))
    size = len(json.dumps(whole["series"]))
    thin = json.loads(payload(several, RATIOS, most=size // 3))
    assert len(whole["series"][0]["steps"]) == 20
    assert not whole["notes"]
    steps = thin["series"][0]["steps"]
    assert len(json.dumps(thin["series"])) <= size // 3
    assert 1 < len(steps) < 8
    assert (steps[0], steps[-1]) == (0, 95)
    assert "captured step is here, and the last" in thin["notes"][0]
    kept = unpacked(thin["series"][0]["arrays"]["norm"])
    rows = [whole["series"][0]["steps"].index(step) for step in steps]
    assert (kept == unpacked(whole["series"][0]["arrays"]["norm"])[rows]).all()


def test_losses_are_of_each_rank_and_of_the_steps_that_are_left(tmp_path):
    path, steps = tmp_path / "run.zarr", range(0, 100, 5)
    create_trace(path, [Layer("w", 0, (50,))], world_size=2)
    losses = {(rank, step): 1000.0 * rank + step for rank in (0, 1) for step in steps}
    losses[1, 95] = np.nan  # nobody said it
    for rank in (0, 1):
        writer, rng = TraceWriter(path, rank), np.random.default_rng(rank)
        for step in steps:
            gradients = {"gradient": rng.normal(size=50).astype(np.float32)}
            writer.append(step, gradients, loss=losses[rank, step])
        writer.close()
    several = gathered(path, rules=("exact",), models=["laplace"])
    whole = json.loads(payload(several, RATIOS))
    thin = json.loads(payload(several, RATIOS, most=len(json.dumps(whole["series"])) // 3))
    for found, most in ((whole, 20), (thin, 8)):
        assert [s["rank"] for s in found["series"]] == [0, 1]
        for s in found["series"]:
            assert 1 < len(s["steps"]) <= most
            expected = [losses[s["rank"], step] for step in s["steps"]]
            assert s["losses"] == [loss if loss == loss else None for loss in expected]
        assert found["series"][1]["losses"][-1] is None


def spiked(path, steps=90, layers=6):
    """A trace whose third layer is thirty times as large in step 70, and whose fifth is a thousandth in step 80."""
    rng = np.random.default_rng(5)
    gradients = [np.float32(rng.normal(size=(layers, 50))) for _ in range(steps)]
    gradients[70][2] *= 30
    gradients[80][4] /= 1000
    return trace_of_steps(path, [each.ravel() for each in gradients], layers)


def test_spikes_are_what_a_monitor_of_these_steps_says(tmp_path):
    (series,) = gathered(spiked(tmp_path / "run.zarr"), rules=("exact",))
    alarms = series.arrays["alarm"]
    assert np.isnan(alarms[:20]).all()
    found = [(i, j, int(alarms[i, j])) for i, j in np.argwhere(np.nan_to_num(alarms)).tolist()]
    assert found == [(70, 0, 1), (70, 3, 1), (80, 5, -1)]
    stored = json.loads(payload([series], RATIOS))["series"][0]["arrays"]["alarm"]
    assert np.array_equal(unpacked(stored), alarms, equal_nan=True)


def test_a_layer_without_any_gradient_has_no_magnitudes_no_norm_and_no_fit(tmp_path):
    trace = drifting_trace(tmp_path / "run.zarr", [0, 1], lambda step: 1.0, ranks=(0,))
    (series,) = gathered(trace, rules=("exact", "redsync"))
    stored = json.loads(payload([series], RATIOS))["series"][0]
    dead = [la["name"] for la in stored["layers"]].index("dead")
    arrays = {name: unpacked(packed) for name, packed in stored["arrays"].items()}
    assert (arrays["magnitudes"][:, dead] == -np.inf).all()
    assert (arrays["zeros"][:, dead] == 30).all()
    assert (arrays["norm"][:, dead] == 0).all()
    assert (arrays["off"][:, dead] == -np.inf).all()
    assert np.isnan(unpacked(stored["fits"]["laplace"]["params"])[:, dead]).all()
    assert "no finite non-zero element" in stored["fits"]["laplace"]["flags"][1]


def test_elements_that_are_zero_and_that_are_no_number_are_counted_apart():
    x = np.random.default_rng(0).laplace(size=500)
    x[:6] = 0, 0, 0, np.nan, np.nan, np.inf
    (series,) = gathered({"w": x}, rules=("exact",))
    assert [series.arrays[name][0, 0] for name in ("zeros", "nonfinite")] == [3, 3]
    x[0] = 1
    (series,) = gathered({"w": x}, rules=("exact",))
    assert [series.arrays[name][0, 0] for name in ("zeros", "nonfinite")] == [2, 3]


def test_ranks_have_in_common_what_agreement_says_and_their_union_is_counted():
    trace = DATA / "ranks" / "resnet8.zarr"
    steps = gradstats.open_trace(trace).steps()[:2]
    several = gathered(trace, steps=steps, layers=["conv1.weight"], rules=("exact",))
    (shared,) = json.loads(payload(several, RATIOS))["agreement"]
    arrays = {name: unpacked(packed) for name, packed in shared["arrays"].items()}
    assert (shared["ranks"], shared["steps"]) == ([0, 1], steps)
    for q, ratio in enumerate(RATIOS):
        for r in gradstats.agreement(trace, ratio=ratio, steps=steps, layers=["conv1.weight"]):
            if r["step"] is None:
                continue
            place = steps.index(r["step"]), int(r["layer"] != "all"), q
            for name in ("cosine", "signs", "overlap"):
                assert arrays[name][place] == pytest.approx(r[name], abs=2e-4)
    # of two ranks by what they share: ties at the k-th, of which there are some, are drawn
    assert arrays["union"] == pytest.approx(2 - arrays["overlap"], abs=3e-4)


def test_steps_that_a_rank_lacks_are_in_nothing_common(tmp_path):
    trace = drifting_trace(tmp_path / "run.zarr", range(4), lambda step: 1.0, ranks=(0, 1))
    source = open_source(trace)
    whole, late = (
        gather(source, Subset(per_layer=True, steps=steps), ratios=RATIOS, rules=())
        for steps in (None, [1, 3])
    )
    (everything,) = json.loads(payload(whole, RATIOS))["agreement"]
    assert everything["steps"] == [0, 1, 2, 3]
    # the first rank has all steps, the second one lacks the first
    (shared,) = json.loads(payload([whole[0], late[1]], RATIOS))["agreement"]
    assert shared["steps"] == [1, 3]
    for name, packed in shared["arrays"].items():
        expected = unpacked(everything["arrays"][name])[[1, 3]]
        np.testing.assert_array_equal(unpacked(packed), expected, err_msg=name)
        assert len(np.unique(expected)) > 2, name


def test_the_union_of_many_ranks_comes_from_one_reading(tmp_path, monkeypatch):
    ranks, steps = range(12), [0, 1]
    trace = drifting_trace(tmp_path / "run.zarr", steps, lambda step: 1.0, ranks=ranks)
    told = []
    several = gathered(trace, rules=(), on_progress=lambda: told.append(1))
    # once measured and once counted, though there is no rule to count
    assert len(told) == 2 * len(ranks) * len(steps)
    read, plain = [], TraceSource.read
    monkeypatch.setattr(TraceSource, "read", lambda *of: read.append(of[1:]) or plain(*of))
    (shared,) = json.loads(payload(several, RATIOS))["agreement"]
    assert len(read) == len(set(read)) == len(ranks) * len(steps)
    union = unpacked(shared["arrays"]["union"])
    for q, ratio in enumerate(RATIOS):
        found = gradstats.agreement(trace, ratio=ratio, workers=len(ranks), per_layer=True)
        expected = [r["union"] for r in found if r["step"] is not None]
        assert union[:, :, q].ravel() == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert np.nanmax(union) > 8
    # of a parameter that is zero nothing is selected
    assert np.isnan(union).sum() == 2 * len(RATIOS)


def test_arrays_of_any_size_come_back():
    rng = np.random.default_rng(0)
    values = np.array([[np.nan, -np.inf, 0.0, 1.5, -2.25, 1e9]])
    back = unpacked(data._pack(values, 100))
    assert np.isnan(back[0, 0])
    assert back[0, 1:].tolist() == [-np.inf, 0.0, 1.5, -2.25, 327.67]
    walk = rng.normal(0, 3, (3, 96)).cumsum(axis=1)
    assert np.abs(unpacked(data._pack(walk, 200, delta=True)) - walk).max() <= 0.5 / 200
    assert (unpacked(data._pack(np.array([0, 2**32 - 1]))) == [0, 2**32 - 1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["nonsense"]}, "nonsense"),
        ({"ratios": [2.0]}, "ratio"),
        ({"models": ["nonsense"]}, "nonsense"),
    ],
)
def test_what_there_is_not_is_refused_in_one_line_before_the_work(options, message):
    with pytest.raises(InputError, match=message) as caught:
        gathered(RESNET, **options)
    assert "\n" not in str(caught.value)


def test_a_law_of_ones_own_that_the_page_has_no_function_of_is_refused(forgotten):
    from gradstats.statistics.laws import Law

    plain = LAWS["laplace"]
    LAWS["mine"] = Law("mine", "mine", plain.magnitude, plain.signed, plain.solvers)
    with pytest.raises(InputError, match="the explorer has no function of mine; it draws laplace"):
        gathered(RESNET, models=["mine"])


def test_all_laws_are_those_that_it_draws(tmp_path):
    path = heavy_trace(tmp_path / "run.zarr", steps=1)
    for models, laws in (("all", list(DRAWN)), (["t"], ["t"])):
        every = gathered(path, models=models, rules=("exact",))
        assert every
        assert all(series.models == laws for series in every)


def test_two_sources_of_one_name_are_refused(tmp_path):
    one = heavy_trace(tmp_path / "a" / "run.zarr", steps=1)
    two = heavy_trace(tmp_path / "b" / "run.zarr", steps=1)
    several = [s for path in (one, two) for s in gathered(path, rules=("exact",))]
    with pytest.raises(InputError, match="two sources are called run"):
        payload(several, RATIOS)
