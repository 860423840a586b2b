"""Two runs side by side: each cause planted, in real trainings where one process can show it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.every import every
from support.terminal import records, run
from support.traces import gradient, write_replicas
from torch import nn

import gradstats
from capture import Capture
from gradstats.analysis.causes import Measured
from gradstats.errors import InputError, TraceError
from gradstats.trace import Layer, TraceWriter, create_trace

# These models train faster than any disk writes.
pytestmark = pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning")
SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (20, 40)}
STEPS, RANKS = 4, 2


def layers_of(shapes):
    found, offset = [], 0
    for name, shape in shapes.items():
        found.append(Layer(name, offset, shape))
        offset += found[-1].numel
    return found


def gradients(seed=0):
    """Return gradients by step, rank and layer; a common part and one of each rank."""
    found = {}
    for step, rank in itertools.product(range(STEPS), range(RANKS)):
        common = np.random.default_rng([seed, step])
        own = np.random.default_rng([seed, step, rank])
        found[step, rank] = {
            n: ((1 + step) * (common.standard_normal(s) + own.standard_normal(s))).astype(
                np.float32
            )
            for n, s in SHAPES.items()
        }
    return found


def write(path, runs, shapes=SHAPES, world=None):
    layout = layers_of(shapes)
    ranks = sorted({rank for _, rank in runs})
    create_trace(path, layout, world_size=world or len(ranks))
    for rank in ranks:
        writer = TraceWriter(path, rank)
        for step in sorted(s for s, r in runs if r == rank):
            parts = [np.ravel(runs[step, rank][layer.name]) for layer in layout]
            writer.append(step, {"gradient": np.concatenate(parts).astype(np.float32)})
        writer.close()
    return path


def each(runs, change):
    return {key: {n: change(x) for n, x in g.items()} for key, g in runs.items()}


def flat(g):
    return np.concatenate([x.ravel() for x in g.values()])


def clipped(g, limit=30.0):
    factor = min(1.0, limit / (np.linalg.norm(flat(g)) + 1e-6))
    return {n: x * np.float32(factor) for n, x in g.items()}


def averaged(runs):
    mean = {s: {n: (runs[s, 0][n] + runs[s, 1][n]) / 2 for n in SHAPES} for s in range(STEPS)}
    return {(s, r): mean[s] for s, r in runs}


def bf16(x):
    return torch.from_numpy(x).bfloat16().float().numpy()


def half(x):
    return x.astype(np.float16).astype(np.float32)


def int8(x):
    scale = np.abs(x).max() / 127
    return (np.rint(x / scale) * scale).astype(np.float32)


def fp8(x, dtype):
    scale = torch.finfo(dtype).max / float(np.abs(x).max())
    return ((torch.from_numpy(x) * scale).to(dtype).float() / scale).numpy()


def moved(runs):
    """Swap two shards of the flat gradient, whose borders are not those of layers."""
    found = {}
    for key, g in runs.items():
        whole = np.roll(flat(g), 777)
        found[key] = {la.name: whole[la.slice].reshape(la.shape) for la in layers_of(SHAPES)}
    return found


def kept(x):
    limit = np.sort(np.abs(x), axis=None)[-5]
    return np.where(np.abs(x) >= limit, x, 0)


def one_layer_averaged(runs):
    mean = averaged(runs)
    return {key: g | {"b.weight": mean[key]["b.weight"]} for key, g in runs.items()}


PLANTED = {
    "world size: B = 2 × A": lambda g: each(g, lambda x: x * 2),
    "world size: B = A ÷ 2": lambda g: each(g, lambda x: x / 2),
    "accumulation: B = 8 × A": lambda g: each(g, lambda x: x * 8),
    "loss scale: B = 1024 × A": lambda g: each(g, lambda x: x * 1024),
    "loss scale: B = A ÷ 65536": lambda g: each(g, lambda x: x / 65536),
    "sign: B = −A": lambda g: each(g, lambda x: -x),
    "sign: B = −4 × A": lambda g: each(g, lambda x: -4 * x),
    "a factor: B = 1.7 × A": lambda g: each(g, lambda x: x * np.float32(1.7)),
    "clipping: the norm of B ends at 30": lambda g: {k: clipped(x) for k, x in g.items()},
    "clipping: the norm of B ends at 31.42": lambda g: {k: clipped(x, 31.4159) for k, x in g.items()},
    "clipping: elements of B end at ±1.5": lambda g: each(g, lambda x: np.clip(x, -1.5, 1.5)),
    "missing all-reduce in A: B is the mean": averaged,
    "missing all-reduce in A: B is the mean over A's ranks (b.weight)": one_layer_averaged,
    "missing all-reduce in A: B is the sum": lambda g: each(averaged(g), lambda x: 2 * x),
    "permuted: B has A's ranks in another order": lambda g: {(s, r): g[s, 1 - r] for s, r in g},
    "permuted: the same values at other places, shards": moved,
    "permuted: the same values at other places": lambda g: each(g, lambda x: x.ravel()[::-1].reshape(x.shape)),
    "bfloat16 rounding of B": lambda g: each(g, bf16),
    "float16 rounding of B": lambda g: each(g, lambda x: x.astype(np.float16).astype(np.float32)),
    "loss scale: B = 1024 × A; bfloat16 rounding of B": lambda g: each(g, lambda x: bf16(x * 1024)),
    "different data": lambda g: gradients(1),
    "int8 rounding of B": lambda g: each(g, int8),
    "fp8 (e4m3) rounding of B": lambda g: each(g, lambda x: fp8(x, torch.float8_e4m3fn)),
    "fp8 (e5m2) rounding of B": lambda g: each(g, lambda x: fp8(x, torch.float8_e5m2)),
    "a factor: B = 1.0": lambda g: each(g, lambda x: half(np.float32(1.01) * x)),
    "a factor: B = 40.3": lambda g: each(g, lambda x: half(np.float32(40.35) * x)),
    "accumulation: B = 40 × A; float16": lambda g: each(g, lambda x: half(40 * x)),
    "not known": lambda g: each(g, lambda x: x * (1 + 0.05 * np.sin(1e6 * x)).astype(np.float32)),
    "compressed: B has 15 of A's": lambda g: each(g, kept),
    "no gradient in B": lambda g: each(g, np.zeros_like),
    "no finite gradient in B: an overflow, or none": lambda g: each(g, lambda x: x * np.float32(np.nan)),
    "rounding": lambda g: each(g, lambda x: x * (1 + 1e-4 * np.sign(np.sin(1e6 * x))).astype(np.float32)),
    "weight decay, or another": lambda g: {
        k: {n: x + np.random.default_rng(len(n)).standard_normal(x.shape).astype(np.float32) / 9 for n, x in v.items()}
        for k, v in g.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return write(tmp_path_factory.mktemp("left") / "a.zarr", gradients())


@every("cause", PLANTED)
def test_every_planted_cause_is_named(cause, left, tmp_path):
    right = write(tmp_path / "b.zarr", PLANTED[cause](gradients()))
    found = gradstats.compare(left, right)
    assert [(r["step"], r["rank"]) for r in found] == sorted(gradients())
    assert all(r["cause"].startswith(cause) for r in found if r["step"] == 0), found
    assert found.first["step"] == 0
    assert found.first["cause"].startswith(cause)
    # a cause that holds in every step is not said to follow from the first one
    assert all(
        r["cause"].startswith(cause[:9]) or cause in ("different data", "not known") for r in found
    ), found
    mirrored = gradstats.compare(right, left)
    swap = str.maketrans("AB", "BA")
    if cause.startswith(("missing", "compressed", "no gradient", "bfloat", "clipping")):
        assert mirrored.first["cause"].startswith(cause.translate(swap))


def test_numbers_are_those_of_numpy(left, tmp_path):
    a, b = gradients(), gradients(1)
    for record in gradstats.compare(left, write(tmp_path / "b.zarr", b), per_layer=True):
        key, layer = (record["step"], record["rank"]), record["layer"]
        x, y = (
            np.float64(flat(g[key]) if layer == "all" else g[key][layer].ravel()) for g in (a, b)
        )
        one, other = np.linalg.norm(x), np.linalg.norm(y)
        assert record["scale"] == pytest.approx(other / one, rel=1e-9)
        assert record["cosine"] == pytest.approx(x @ y / one / other, rel=1e-9)
        assert record["error"] == pytest.approx(np.linalg.norm(y - x) / one, rel=1e-9)
        assert record["signs"] == pytest.approx(np.mean(np.sign(x) == np.sign(y)), rel=1e-9)


def test_a_gradient_of_the_step_before_is_stale(left, tmp_path):
    runs = gradients()
    late = {(s, r): runs[max(s - 1, 0), r] for s, r in runs}
    found = gradstats.compare(left, write(tmp_path / "b.zarr", late))
    assert found.first["step"] == 1
    assert {r["cause"] for r in found if r["step"]} == {
        "stale: B has the gradient that A had in the step before"
    }
    assert gradstats.compare(tmp_path / "b.zarr", left).first["cause"].startswith("stale: A has")


def test_a_quotient_of_world_sizes_is_theirs(left, tmp_path):
    runs = each(gradients(), lambda x: x * np.float32(1.5))
    found = gradstats.compare(left, write(tmp_path / "b.zarr", runs, world=3))
    assert {r["cause"] for r in found} == {"world size: B = 3/2 × A or its inverse"}


def test_a_sum_over_replicas_is_no_sum_over_all_ranks(tmp_path):
    one = write_replicas(tmp_path / "a.zarr", range(2))
    for times, cause in (
        (2, "accumulation, or a sum over replicas or shards: B = 2 × A"),
        (3, "accumulation: B = 3 × A"),
        (4, "world size: B = 4 × A, a sum over ranks instead of a mean"),
    ):
        other = tmp_path / f"{times}.zarr"
        write_replicas(other, range(2), lambda s, r, n=times: n * gradient(s, r))
        assert {r["cause"] for r in gradstats.compare(one, other)} == {cause}


def test_what_is_left_of_the_step_before_is_momentum(left, tmp_path):
    runs, sums = gradients(), {}
    for (s, r), g in sorted(runs.items()):
        before = sums.get((s - 1, r), dict.fromkeys(g, np.float32(0)))
        sums[s, r] = {n: x + np.float32(0.9) * before[n] for n, x in g.items()}
    found = gradstats.compare(left, write(tmp_path / "b.zarr", sums))
    assert found.first["step"] == 1
    assert found.first["cause"] == "momentum: B adds 0.9 of the step before"


def many(steps=1, ranks=4):
    rng = np.random.default_rng(8)
    return {
        (s, r): {n: rng.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
        for s, r in itertools.product(range(steps), range(ranks))
    }


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ((1, 0, 1, 1), "a rank missing in B: it is the mean over A's ranks without rank 1"),
        ((1, 1, 1, 2), "a rank twice in B: rank 3 counts double in its mean"),
        ((1, 1, 1, 1), "missing all-reduce in A: B is the mean over A's ranks"),
        ((1, 2, 3, 4), "missing all-reduce in A: its ranks differ"),
    ],
)
def test_a_rank_that_a_mean_lacks_or_has_twice_is_named(weights, cause, tmp_path):
    runs = many()
    mean = {n: np.average([runs[0, r][n] for r in range(4)], 0, weights) for n in SHAPES}
    a = write(tmp_path / "a.zarr", runs)
    b = write(tmp_path / "b.zarr", dict.fromkeys(runs, mean))
    found = gradstats.compare(a, b)
    assert all(r["cause"].startswith(cause) for r in found), found
    if "rank" in cause.partition(":")[0]:
        assert "in A" in gradstats.compare(b, a).first["cause"]


def test_two_ranks_with_the_same_data_are_named(tmp_path):
    runs = many()
    found = gradstats.compare(
        write(tmp_path / "a.zarr", runs), write(tmp_path / "b.zarr", runs | {(0, 2): runs[0, 1]})
    )
    assert [r["rank"] for r in found if r["cause"]] == [2]
    assert found.first["cause"] == "a rank twice in B: it has the gradient of A's rank 1"


@pytest.mark.parametrize(("steps", "clear"), [(4, False), (24, True)])
def test_clipping_in_one_step_takes_many_others_to_be_told_from_a_factor(steps, clear, tmp_path):
    runs = many(steps, 1)
    runs[2, 0] = {n: 3 * x for n, x in runs[2, 0].items()}
    limit = 1.234 * np.linalg.norm(flat(runs[1, 0]))
    cut = {key: clipped(g, limit) for key, g in runs.items()}
    found = gradstats.compare(write(tmp_path / "a.zarr", runs), write(tmp_path / "b.zarr", cut))
    assert [r["step"] for r in found if r["cause"]] == [2]
    at = f"{limit:.4g}"
    if clear:
        assert found.first["cause"] == f"clipping: the norm of B ends at {at}"
    else:
        assert found.first["cause"].startswith("a factor: B = 0.4")
        assert found.first["cause"].endswith(f"clipping of B at a norm of {at} would do the same")


@pytest.mark.parametrize(("times", "what"), [(1, "mean"), (2, "sum")])
def test_one_file_is_told_for_the_mean_or_the_sum_of_two_ranks(times, what, left, tmp_path):
    runs, file = gradients(), tmp_path / "g.npy"
    np.save(file, times * (flat(runs[1, 0]) + flat(runs[1, 1])) / 2)
    for sources, ranks, one in (((left, file), "A", "B"), ((file, left), "B", "A")):
        (record,) = gradstats.compare(*sources, steps=[1])
        expected = f"missing all-reduce in {ranks}: {one} is the {what} over {ranks}'s ranks"
        assert record["cause"] == expected


@every(
    ("factor", "cause"),
    [
        (32, "accumulation: B = 32 × A"),
        (63, "accumulation: B = 63 × A"),
        (65, "a factor: B = 65 × A in every element"),
        (128, "loss scale: B = 128 × A"),
        (300, "a factor: B = 300 × A in every element"),
        (1 / 300, "a factor: B = 0.00333333 × A in every element"),
        (1 / 32, "accumulation: B = A ÷ 32"),
    ],
)
def test_whole_factors_are_sums_up_to_64_and_powers_of_two_beyond_are_loss_scales(
    factor, cause, left, tmp_path
):
    right = write(tmp_path / "b.zarr", each(gradients(), lambda x: x * np.float32(factor)))
    assert {r["cause"] for r in gradstats.compare(left, right)} == {cause}


def test_other_data_in_float16_is_no_rounding(left, tmp_path):
    """A third of the gradient is other data; that all of it is float16 explains nothing."""
    other = each(gradients(), lambda x: half(x * (1 + 0.5 * np.sin(1e6 * x))))
    found = gradstats.compare(left, write(tmp_path / "b.zarr", other))
    assert all(0.3 < r["error"] < 0.4 for r in found)
    assert found.first["cause"] == "different data, randomness or weights"


def test_eight_ranks_summed_in_bfloat16_are_a_sum_over_ranks(tmp_path):
    """Of gradients that differ, and of one that all have; every addition rounds."""
    runs = many(ranks=8)
    total = {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
    for r in range(8):
        total = {n: bf16(x + runs[0, r][n]) for n, x in total.items()}
    a = write(tmp_path / "a.zarr", runs)
    found = gradstats.compare(a, write(tmp_path / "b.zarr", dict.fromkeys(runs, total)))
    assert {r["cause"] for r in found} == {"missing all-reduce in A: B is the sum over A's ranks"}
    alike, times = (
        dict.fromkeys(runs, runs[0, 0]),
        dict.fromkeys(runs, each(runs, lambda x: bf16(8 * x))[0, 0]),
    )
    found = gradstats.compare(write(tmp_path / "c.zarr", alike), write(tmp_path / "d.zarr", times))
    assert {r["cause"] for r in found} == {
        "world size: B = 8 × A, a sum over ranks instead of a mean; bfloat16 rounding of B"
    }


def test_parameters_of_one_side_are_in_the_verdict():
    x = np.random.default_rng(0).standard_normal(50)
    found = gradstats.compare({"w": x, "old": x}, {"w": x, "b": x, "c": x})
    assert found.first is None
    assert found.verdict == (
        "no difference beyond the tolerance in the parameters that both have, but 1 is only in A: old; "
        "2 are only in B: b, c"
    )


def test_equal_runs_have_no_difference(left):
    found = gradstats.compare(left, left, per_layer=True)
    assert len(found) == STEPS * RANKS * (1 + len(SHAPES))
    assert {(r["error"], r["signs"], r["cause"]) for r in found} == {(0.0, 1.0, "")}
    assert found.first is None
    assert "no difference" in found.verdict


def test_gradients_that_were_not_compared_are_counted(left, tmp_path):
    """Of a run that was captured at every second step only, with one rank."""
    some = {key: g for key, g in gradients().items() if key in ((0, 0), (2, 0))}
    found = gradstats.compare(left, write(tmp_path / "b.zarr", some))
    assert found.first is None
    assert found.verdict == (
        "no difference beyond the tolerance in 2 gradients compared, of 8 in A and 2 in B"
    )
    same = gradstats.compare(left, tmp_path / "b.zarr", steps=[0, 2], ranks=[0])
    assert same.verdict == "no difference beyond the tolerance"


def test_the_first_difference_has_its_step_and_layer(left, tmp_path):
    runs = gradients()
    runs[2, 1]["b.weight"] = runs[2, 1]["b.weight"] * np.float32(1.1)
    runs[3, 0]["a.weight"] = gradients(3)[3, 0]["a.weight"]
    found = gradstats.compare(left, write(tmp_path / "b.zarr", runs))
    where = {n: found.first[n] for n in ("step", "rank", "kind", "layer")}
    assert where == {"step": 2, "rank": 1, "kind": "gradient", "layer": "b.weight"}
    causes = {(r["step"], r["rank"]): r["cause"] for r in found}
    assert causes[2, 1] == "a factor: B = 1.1 × A in every element (b.weight)"
    assert causes[3, 0] == "follows from step 2"
    assert causes[3, 1] == causes[2, 0] == ""


def test_sizes_and_prefixes_of_wrappers(left, tmp_path):
    runs = {
        key: {f"module._orig_mod.{n}": x for n, x in g.items()} for key, g in gradients().items()
    }
    for g in runs.values():
        g["module._orig_mod.a.bias"] = np.append(g["module._orig_mod.a.bias"], [0, 0]).astype("f4")
        g["module.only"] = np.ones(3, np.float32)
    shapes = {n: x.shape for n, x in runs[0, 0].items()}
    found = gradstats.compare(left, write(tmp_path / "b.zarr", runs, shapes), per_layer=True)
    assert found.unmatched == ([], ["only"])
    for pair in ((left, tmp_path / "b.zarr"), (tmp_path / "b.zarr", left)):
        assert run("compare", *pair).stderr == f"only in {tmp_path / 'b.zarr'}: only\n"
    assert found.first["layer"] == "a.bias"
    assert {r["layer"]: r["cause"] for r in found if r["cause"]} == {
        "all": "padding: B has 2 zeros more at its end (a.bias)",
        "a.bias": "padding: B has 2 zeros more at its end",
    }


def test_the_part_before_a_padding_is_compared_too():
    x, y = np.random.default_rng(0).standard_normal((2, 1000)).astype(np.float32)
    padding = "padding: B has 5 zeros more at its end"
    for b, cause in (
        (y, f"different data, randomness or weights; {padding}"),
        (8 * x, f"accumulation or world size: B = 8 × A; {padding}"),
        (np.nextafter(x, np.float32(9)), padding),
    ):
        assert (
            gradstats.compare({"w": x}, {"w": np.append(b, np.zeros(5, np.float32))})[0]["cause"]
            == cause
        )
    longer = np.append(x, np.ones(5, np.float32))
    assert gradstats.compare({"w": x}, {"w": longer})[0]["cause"].startswith("another shape")


def test_only_whole_parts_of_a_name_are_a_wrappers():
    x, y = np.random.default_rng(0).standard_normal((2, 50))
    found = gradstats.compare(
        {"my_module.w": x, "b": y}, {"module.my_module.w": x, "module.b": y}, layers=["my_module.*"]
    )
    assert [r["layer"] for r in found] == ["all", "my_module.w"]
    # a model with a module of that name, plain and wrapped
    for before in ("", "module.", "_orig_mod.module."):
        other = {f"{before}module.w": 2 * x, f"{before}w": y}
        found = gradstats.compare({"module.w": x, "w": y}, other, per_layer=True)
        assert [(r["layer"], r["error"]) for r in found[1:]] == [("module.w", 1.0), ("w", 0.0)]
    weights = {"module.module.w": x, "module.w": y}
    found = gradstats.compare(
        {"module.w": y, "w": x}, {"module.w": y + x / 10, "w": x + y / 10}, weights=weights
    )
    assert found[0]["cause"].startswith("weight decay: B − A = 0.1")


def test_last_bits_have_no_cause_and_errors_have_all_their_digits():
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(1000)
    for x, size in (
        *((wide.astype(np.float32), size) for size in (1e-7, 1e-6)),
        *((wide, size) for size in (1e-15, 1e-12, 1e-9)),
    ):
        y = (x * (1 + size * rng.standard_normal(1000))).astype(x.dtype)
        exact = np.linalg.norm(np.float64(y) - x) / np.linalg.norm(np.float64(x))
        for a, b in ((x, y), (y, x)):
            (record,) = gradstats.compare({"w": a}, {"w": b})
            assert record["cause"] == "", size
            assert record["error"] == pytest.approx(exact, rel=1e-6, abs=0)
            (record,) = gradstats.compare({"w": a}, {"w": b}, tolerance=exact / 2)
            assert record["cause"].startswith("rounding"), size
    y = wide.copy()
    y[3] += 1e-9
    (record,) = gradstats.compare({"w": wide, "v": wide}, {"w": y, "v": wide}, tolerance=1e-13)
    assert record["error"] == pytest.approx(1e-9 / np.linalg.norm([wide, wide]), rel=1e-6)


def test_the_step_before_is_that_of_the_same_ranks(tmp_path):
    runs = many(2, 4)
    before, after = ({r: runs[s, r] for r in range(4)} for s in (0, 1))
    # A has ranks 0 and 1, then 2 and 3: what rank 0 had is no step before of rank 2
    a = {(0, 0): before[0], (0, 1): before[1], (1, 2): after[2], (1, 3): after[3]}
    b = {(0, 0): before[0], (0, 1): before[1], (1, 2): before[0], (1, 3): before[1]}
    found = gradstats.compare(
        write(tmp_path / "a.zarr", a, world=4), write(tmp_path / "b.zarr", b, world=4)
    )
    assert {r["cause"] for r in found if r["step"]} == {"different data, randomness or weights"}


def test_the_work_of_explaining_grows_with_the_steps_and_not_their_square(tmp_path, monkeypatch):
    looked, view = [], Measured.view
    monkeypatch.setattr(Measured, "view", lambda *of: looked.append(of) or view(*of))
    work = {}
    for steps in (6, 12):
        runs = many(steps, 1)
        times = each(runs, lambda x: x * np.float32(1.7))
        names = (tmp_path / f"{side}{steps}.zarr" for side in "ab")
        looked.clear()
        gradstats.compare(write(next(names), runs), write(next(names), times))
        work[steps] = len(looked)
    assert work[12] == 2 * work[6]


def test_transposed_and_shifted_layers():
    x = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    turned = gradstats.compare({"w": x}, {"w": x.T.copy()})
    assert turned[0]["cause"] == "permuted: B has A's axes in the order 1, 0"
    shifted = np.concatenate([np.zeros(3, np.float32), x.ravel()[:-3]])
    assert gradstats.compare({"w": x}, {"w": shifted})[0]["cause"].startswith(
        "padding: B is A moved"
    )


def test_overflow_is_told_before_all_else():
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    y = x.copy()
    y[:7] = np.inf
    (record,) = gradstats.compare({"w": x}, {"w": y})
    assert record["cause"] == "overflow: 7 elements of B are not finite"
    assert record["error"] == 0.0  # of the others


def test_a_flat_file_against_a_step_of_a_trace(left, tmp_path):
    np.save(tmp_path / "g.npy", 2 * flat(gradients()[1, 0]))
    found = gradstats.compare(left, tmp_path / "g.npy", steps=[1], per_layer=True)
    assert [r["layer"] for r in found] == ["all", *SHAPES]
    assert {(r["step"], round(r["scale"], 6)) for r in found} == {(1, 2.0)}
    with pytest.raises(InputError, match="choose one step"):
        gradstats.compare(left, tmp_path / "g.npy")


def test_differences_whose_squares_vanish_are_none_and_gradients_are_refused():
    x = np.random.default_rng(0).standard_normal(100)
    x[:3] = 1e-200
    y = x.copy()
    y[:3] = 2e-200
    (record,) = gradstats.compare(x, y)
    assert (record["error"], record["cause"]) == (0, "")
    with pytest.raises(InputError, match="squares of these magnitudes leave the range of numbers"):
        gradstats.compare(x * 1e-200, x * 2e-200)


def test_what_cannot_be_compared_is_one_line(left, tmp_path):
    x = np.ones(5, np.float32)
    with pytest.raises(InputError, match="no parameter in common"):
        gradstats.compare({"a": x, "b": x}, {"c": x, "d": x})
    late = write(tmp_path / "late.zarr", {(s + 10, r): g for (s, r), g in gradients().items()})
    with pytest.raises(InputError, match="nothing to compare"):
        gradstats.compare(left, late)
    create_trace(tmp_path / "s.zarr", layers_of(SHAPES), world_size=1)
    writer = TraceWriter(tmp_path / "s.zarr", 0, store="sketches")
    writer.append(0, {"gradient": flat(gradients()[0, 0])})
    writer.close()
    with pytest.raises(TraceError, match="only sketches"):
        gradstats.compare(left, tmp_path / "s.zarr")


# Real trainings, each with one mistake.


def train(path, mistake="", steps=4):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    net = net.bfloat16() if mistake == "bfloat16" else net
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    torch.save(net.state_dict(), path.with_suffix(".pt"))
    generator = torch.Generator().manual_seed(1 if mistake == "data" else 0)
    batch, micro = torch.randn(steps, 16, 20, generator=generator), 4
    batch = batch.bfloat16() if mistake == "bfloat16" else batch
    with Capture(path, net) as capture:
        net[0].bias.requires_grad_(mistake != "frozen")
        for x in batch:
            if mistake != "not zeroed":
                optimizer.zero_grad()
            for part in x.split(4):
                loss = 10 * net(part).square().mean() / (1 if mistake == "sum" else micro)
                if mistake == "decay":
                    squares = sum(p.square().sum() for p in net.parameters())
                    loss = loss + 0.005 * squares / micro
                (loss * (4096 if mistake == "scale" else 1)).backward()
            if mistake == "clip":
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            capture.step()
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def right_run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("right") / "right.zarr")


@every(
    ("mistake", "step", "cause"),
    [
        ("sum", 0, "accumulation: B = 4 × A"),
        ("not zeroed", 1, "accumulation: B still holds the gradient of the step before"),
        ("scale", 0, "loss scale: B = 4096 × A"),
        ("clip", 0, "clipping: the norm of B ends at 0.5"),
        ("decay", 0, "weight decay"),
        ("bfloat16", 0, "bfloat16 rounding of B"),
        ("data", 0, "different data"),
        ("frozen", 0, "no gradient in B: frozen, unused, or not reached by backward (0.bias)"),
    ],
)
def test_mistakes_in_a_real_training(mistake, step, cause, right_run, tmp_path):
    wrong = train(tmp_path / "wrong.zarr", mistake)
    found = gradstats.compare(right_run, wrong)
    assert found.first["step"] == step
    assert found.first["cause"].startswith(cause)
    assert all(not r["cause"] for r in found if r["step"] < step)


def test_weights_tell_weight_decay_from_one_step(right_run, tmp_path):
    wrong = train(tmp_path / "wrong.zarr", "decay", steps=1)
    weights = right_run.with_suffix(".pt")
    found = gradstats.compare(right_run, wrong, weights=weights)
    assert found.first["cause"] == "weight decay: B − A = 0.01 × weights"
    # half a percent apart: other data would be further
    assert gradstats.compare(right_run, wrong).first["cause"].startswith("not known")


def test_of_a_trace_the_weights_are_taken_and_not_its_gradients(tmp_path):
    rng = np.random.default_rng(0)
    w, g = (rng.standard_normal(1000).astype("f4") for _ in range(2))
    for name, kinds in (("both", ("gradient", "weight")), ("gradients", ("gradient",))):
        create_trace(tmp_path / name, [Layer("w", 0, (1000,))])
        writer = TraceWriter(tmp_path / name, 0, kinds=kinds)
        writer.append(0, {"gradient": g, "weight": w} if len(kinds) > 1 else {"gradient": g})
        writer.close()
    found = gradstats.compare({"w": g}, {"w": g + 0.05 * w}, weights=tmp_path / "both")
    assert found.first["cause"] == "weight decay: B − A = 0.05 × weights"
    with pytest.raises(InputError, match=r"gradients holds gradient, and no weights"):
        gradstats.compare({"w": g}, {"w": g + 0.05 * w}, weights=tmp_path / "gradients")


def test_weights_of_another_model_tell_nothing(right_run, tmp_path):
    wrong = train(tmp_path / "wrong.zarr", "decay", steps=1)
    own = torch.load(right_run.with_suffix(".pt"))
    another = {n: p[torch.randperm(len(p))] for n, p in own.items()}
    found = gradstats.compare(right_run, wrong, weights=another)
    assert found.first["cause"].startswith("not known")
    for others in ({n: p[:-1] for n, p in own.items()}, {f"other.{n}": p for n, p in own.items()}):
        with pytest.raises(InputError, match=r"has none of the parameters 0\.weight, 0\.bias"):
            gradstats.compare(right_run, wrong, weights=others)
    # parameters of the same size count, others are left out
    mixed = own | {"0.weight": own["0.weight"][:-1]}
    found = gradstats.compare(right_run, wrong, weights=mixed, per_layer=True)
    causes = {r["layer"]: r["cause"] for r in found if r["step"] == 0}
    assert causes["2.weight"] == "weight decay: B − A = 0.01 × weights"


def test_the_same_training_again_is_the_same(right_run, tmp_path):
    assert gradstats.compare(right_run, train(tmp_path / "again.zarr")).first is None


def test_the_command(left, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    right = write(
        tmp_path / "b.zarr", PLANTED["missing all-reduce in A: B is the mean"](gradients())
    )
    found = records("compare", left, right, "--per-layer", "--step", 1)
    fields = {"step", "rank", "kind", "layer", "scale", "cosine", "error", "signs", "cause"}
    assert {frozenset(r) for r in found} == {frozenset(fields)}
    assert len(found) == RANKS * (1 + len(SHAPES))
    done = run("compare", left, right)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "likely cause: missing all-reduce in A" in " ".join(done.stdout.split())
    done = run("compare", left, tmp_path / "none.zarr")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
