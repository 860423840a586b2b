"""Thresholds, counts and stages of every rule over ordinary and hostile gradients, step by step.

``exact`` holds, per kind of processor, a hash of everything that a rule gave of a gradient: thresholds to the bit,
selected positions and values, numbers of stages and what reached them, and classes of errors. ``values`` holds the
threshold, the count and the number of stages after the last step, which any processor must give: a threshold to 1e-6,
a count exactly, unless elements lie that near to the threshold. Rewrite both with
``WRITE_PINS=1 python -m pytest tests/pins/test_thresholds.py``; other kinds of processor keep what has not moved.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from pins import corpus
from pins.stored import WRITES, digest
from support.every import every

from gradstats.errors import GradstatsError
from gradstats.thresholds import ESTIMATORS, make_estimator

CLOSE = 1e-6
FACTORS = (1.0, 1.0, 0.75, 1.5, 1.5, 0.5)
"""What a gradient is multiplied by in successive steps."""
SIDCO = {
    **{f"stages={m}": {"stages": m} for m in (1, 2, 3, 5, 8)},
    **{
        f"stages={rule}": {"stages": rule, "interval": 2}
        for rule in ("corrected", "paper", "program", "program-3")
    },
    "first_ratio=0.5": {"stages": 3, "first_ratio": 0.5},
    "": {},
}
OPTIONS = {
    "exact": {"": {}},
    "warm-exact": {"": {}},
    "histogram": {"": {}, "bits=0": {"bits": 0}, "bits=12": {"bits": 12}},
    "dgc": {
        "": {},
        "sampled": {"sample_ratio": 0.1, "tolerance": 1.0, "seed": 3},
        "program": {"rule": "program"},
    },
    "hard": {"": {}, "threshold=0.5": {"threshold": 0.5}},
    "redsync": {"": {}, "paper": {"rule": "paper", "interval": 2}},
    "redsync-trimmed": {"": {}, "paper": {"rule": "paper"}},
    "gaussiank": {"": {}, "loops=0": {"loops": 0}, "loops=5": {"loops": 5}},
    "sidco-e": SIDCO,
    "sidco-gp": SIDCO
    | {
        f"closed, stages={m}": {"gamma": "closed", "stages": m, "interval": 2}
        for m in (1, 3, "corrected", "paper")
    },
    "sidco-p": SIDCO,
    "micro": {"": {}, "paper": {"rule": "paper"}, "start": {"threshold": 0.01}},
}
LARGE = {"", "stages=1", "stages=3", "stages=5", "closed, stages=corrected", "paper"}
"""Options that are tried on millions of elements."""
RATIOS = {"small": (0.3, 0.01), "medium": (0.05, 0.001), "large": (0.001,)}
STEPS = {"small": 6, "medium": 4, "large": 2}


@functools.cache
def gradients(size):
    return getattr(corpus, size)()


def times(x, factor):
    """Multiply in the array's own precision and byte order."""
    if factor == 1:
        return x
    with np.errstate(all="ignore"):
        return x * factor if torch.is_tensor(x) else (x * x.dtype.type(factor)).astype(x.dtype)


def bytes_of(values):
    if torch.is_tensor(values):
        values = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        values = values.numpy()
    return str(values.dtype).encode() + values.tobytes()


def steps(name, options, x, ratio, count):
    """Return what a rule gives of a gradient in successive steps: what is hashed, and the last of it."""
    said, last = [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said.append(make_estimator(name, **options).estimate(x, ratio).threshold.hex())
        except GradstatsError as error:
            said.append(type(error).__name__)
        rule = make_estimator(name, **options)
        for factor in FACTORS[:count]:
            try:
                estimate, selection = rule.select(times(x, factor), ratio)
            except GradstatsError as error:
                last = type(error).__name__
                said.append(last)
                continue
            stages = [each["count"] for each in estimate.details.get("stages", ())]
            m = rule.stages if name.startswith("sidco") else 0
            said += [
                estimate.threshold.hex(),
                estimate.k,
                estimate.numel,
                len(selection),
                m,
                stages,
            ]
            said += [bytes_of(selection.indices), bytes_of(selection.values)]
            last = f"{estimate.threshold:.8g} {len(selection)} {m}"
    return said, last


def results(name, size):
    """Yield options, {gradient: hash} and {gradient: what was last, by ratio}."""
    for label, options in OPTIONS[name].items():
        if size == "large" and label not in LARGE:
            continue
        hashes, values = {}, {}
        for gradient, x in gradients(size).items():
            found = [steps(name, options, x, ratio, STEPS[size]) for ratio in RATIOS[size]]
            hashes[gradient] = digest(*(each for said, _ in found for each in said))
            values[gradient] = ", ".join(last for _, last in found)
        yield label, hashes, values


def agrees(before, after, x):
    """Tell whether a result is that of another processor, up to the rounding of sums."""
    if before == after or " " not in before or " " not in after:
        return before == after
    (threshold, count, m), (found, selected, stages) = (
        map(float, each.split()) for each in (before, after)
    )
    if m != stages or not math.isclose(threshold, found, rel_tol=CLOSE, abs_tol=1e-320):
        return False
    magnitude = np.abs(x.double().numpy() if torch.is_tensor(x) else x.astype(np.float64))
    near = np.abs(magnitude - threshold) <= 2 * CLOSE * threshold
    return abs(count - selected) <= np.count_nonzero(near)


def test_every_rule_is_pinned():
    assert list(OPTIONS) == list(ESTIMATORS)


@pytest.mark.slow
@every("size", RATIOS)
@every("name", OPTIONS)
def test_thresholds_counts_and_stages(name, size, pins, kind):
    moved, far = [], []
    for label, hashes, values in results(name, size):
        place = name, size, label
        if WRITES:
            forget(pins, values, kind, *place)
            pins.put(values, "values", *place)
            pins.put(" ".join(hashes.values()), "exact", kind, *place)
            continue
        stored, exact = pins.get("values", *place), pins.get("exact", kind, *place)
        assert set(stored) == set(values)
        for gradient, value in values.items():
            x = times(gradients(size)[gradient], FACTORS[STEPS[size] - 1])
            both = stored[gradient].split(", "), value.split(", ")
            if not all(agrees(a, b, x) for a, b in zip(*both, strict=True)):
                far.append((*place, gradient, stored[gradient], value))
        if exact is not None:
            pairs = zip(exact.split(), hashes.items(), strict=True)
            moved += [(*place, gradient) for a, (gradient, b) in pairs if a != b]
    assert far == [], "a threshold, a count or a number of stages is another"
    assert moved == [], "the last bits, or a step before the last, are others"
    if not WRITES and pins.get("exact", kind) is None:
        pytest.skip(f"no bits are kept of {kind}; thresholds agree to {CLOSE:g}")


def forget(pins, values, kind, *place):
    """Forget the bits of other kinds of processor where values have moved."""
    for other in pins.get("exact") or {}:
        if other != kind and pins.get("values", *place) != values:
            pins.put(None, "exact", other, *place)
