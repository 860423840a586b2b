"""The first screen of data whose truth is known: what it says is so."""

import re

import numpy as np
from support.every import every
from support.traces import trace_of_steps

import gradstats
from gradstats.report.questions import SHOULD

N, STEPS = 20_000, 3
SIZES = (1.0, 0.1, 0.01, 0.003)
DATA, TAIL, DECAY = "Is the data sound?", "How heavy is its tail?", "Is it compressible?"
MODEL, RULE, MOVES = "Which model is closest?", "Which estimate hits k?", "Does it move?"


def signed(rng, magnitudes):
    return (magnitudes * rng.choice((-1, 1), magnitudes.size)).astype(np.float32)


def exponential(rng, step):
    return signed(rng, rng.exponential(size=N))


MAKE = {
    "uniform": lambda rng, _: signed(rng, rng.uniform(size=N)),
    "Laplace": exponential,
    "layered Laplace": lambda rng, _: np.concatenate(
        [signed(rng, size * rng.exponential(size=N // 4)) for size in SIZES]
    ),
    "Pareto 0.8": lambda rng, _: signed(rng, rng.pareto(1 / 0.8, N)),
    "clipped": lambda rng, step: np.clip(exponential(rng, step), -4, 4),
    "two laws": lambda rng, _: signed(
        rng, np.where(rng.random(N) < 0.02, 30, 1) * rng.exponential(size=N)
    ),
    "ties": lambda rng, step: np.round(exponential(rng, step), 1),
    "zeros": lambda rng, step: np.where(rng.random(N) < 0.001, exponential(rng, step), 0),
    "one spike": lambda rng, step: np.where(np.arange(N) == 7, 1e6, exponential(rng, step)),
    "drifting": lambda rng, step: exponential(rng, step) / np.float32(2**step),
    "filling up": lambda rng, step: exponential(rng, step) * (rng.random(N) < 0.1 + 0.4 * step),
    # as of two networks that train in turn
    "in turn": lambda rng, step: exponential(rng, step) * np.float32(step != 1),
    "signs": lambda rng, _: signed(rng, np.full(N, 0.5)),
    "short": lambda rng, step: exponential(rng, step)[:60],
    "one element": lambda rng, _: np.array([1.5], np.float32),
}
IF_SLOW = r"If the network is slow: try dense-bf16$"
NO_LAW = r"No law can be judged$"
TRUE = {
    "uniform": {
        SHOULD: r"Hardly: it has no large elements to send; if the network is slow, try dense-bf16$",
        DATA: r"Yes$",
        TAIL: r"Short in the top tenth: ξ = −(0\.9|1\.0)\d$",
        DECAY: r"Not shown at any step$",
        MODEL: r"double gen\. Pareto: thresholds within \d(\.\d)?\N{NO-BREAK SPACE}% ",
        MOVES: r"Mean magnitude × (1|0\.99|1\.0)$",
    },
    "Laplace": {
        SHOULD: IF_SLOW,
        DATA: r"Yes$",
        TAIL: r"Exponential in the top tenth: ξ = −?0\.0\d; exponential in the top",
        DECAY: r"Not shown at any step$",
        MODEL: r"Laplace: thresholds within ",
        RULE: r"(Not decided; the nearest, )?(sidco-.*|dgc)[,:]",
    },
    "layered Laplace": {
        SHOULD: IF_SLOW,
        DATA: r"Yes$",
        DECAY: r"Not shown at any step$",
        MODEL: r"Laplace, one a layer: thresholds within ",
    },
    "Pareto 0.8": {
        SHOULD: IF_SLOW,
        DATA: r"Yes$",
        TAIL: r"Heavy in the top tenth: ξ = 0\.[789]\d; heavy in the top ",
        DECAY: r"Shown at 3 of 3 steps$",
        MODEL: r"Too few elements to tell laws apart$",  # 20 elements beyond the smallest ratio
    },
    "clipped": {
        DATA: r"\d+ elements of one magnitude: no threshold lies between them$",
        DECAY: r"Not shown at any step$",
        MODEL: r"None of \d+; the nearest, ",
        RULE: r"None; the nearest, ",
    },
    "two laws": {
        SHOULD: IF_SLOW,
        DATA: r"Yes$",
        DECAY: r"Not shown at any step$",
    },
    "ties": {
        DATA: r"[\d,]+ elements zero in the worst step .* elements of one magnitude",
        TAIL: r"Exponential in the top tenth",
        DECAY: r"Not shown at any step$",
    },
    "zeros": {
        SHOULD: r"It is sparse already: at ratio 0\.0\d+ nothing is lost$",
        DATA: r"[\d,]+ elements zero in the worst step \(99\.9\d",
        TAIL: r"Too few elements for a tail$",
        DECAY: r"No power$",
        MODEL: r"Too few elements to tell laws apart$",
        RULE: r"None; the nearest, ",
    },
    "one spike": {
        DATA: r"the largest magnitude is a hundred times the next or more$",
        TAIL: r"Cannot be told: at some step the largest magnitude is far beyond all others$",
        DECAY: r"Not shown at any step$",
        MODEL: r"None of \d+; the nearest, ",
    },
    "drifting": {
        SHOULD: IF_SLOW,
        DATA: r"Yes$",
        TAIL: r"Exponential in the top tenth",
        DECAY: r"Not shown at any step$",
        MODEL: r"Laplace: thresholds within ",
        MOVES: r"Mean magnitude × 0\.25$",
    },
    "filling up": {
        DATA: r"1\d,\d\d\d elements zero in the worst step",
        TAIL: r"Exponential in the top tenth",
        MOVES: r"Mean magnitude × (1|0\.9\d|1\.0\d?)$",
    },
    "in turn": {
        SHOULD: IF_SLOW,
        DATA: r"20,000 elements zero in the worst step \(100\.00",
        TAIL: r"Exponential in the top tenth",
        MODEL: r"Laplace: thresholds within ",
        RULE: r"(Not decided; the nearest, )?(sidco-.*|dgc)[,:]",
    },
    "signs": {
        DATA: r"20,000 elements of one magnitude: no threshold lies between them$",
        TAIL: r"Cannot be told: magnitudes are tied$",
        MOVES: r"Mean magnitude × 1$",
    },
    "short": {
        SHOULD: r"Too few elements to say$",
        DATA: r"Yes$",
        TAIL: r"Too few elements for a tail$",
        DECAY: r"No power$",
        MODEL: NO_LAW,
        RULE: r"No estimating rule is judged$",
    },
    "one element": {
        SHOULD: r"Too few elements to say$",
        DATA: r"Yes$",
        TAIL: r"Too few elements for a tail$",
        DECAY: r"No power$",
        MODEL: NO_LAW,
        RULE: r"No estimating rule is judged$",
        MOVES: r"Mean magnitude × 1$",
    },
}
"""How headlines begin, by what was made."""
MORE = {
    "uniform": [(MODEL, "and rejects Laplace, double gamma."), (TAIL, "no interval: below −½")],
    "Laplace": [(MODEL, "rejects none of them"), (RULE, "Rules that count elements keep within")],
    "clipped": [
        (RULE, "Even rules that count elements are up to "),
        (RULE, "-fold off (k = 20): magnitudes are tied."),
    ],
    "filling up": [(MOVES, "Means are of the elements that are not zero, 10 to 90")],
    "zeros": [(RULE, "There are fewer non-zero elements than k at ratios 0.1, 0.01 and 0.001")],
    "short": [(RULE, "Not judged: fewer than 10 elements asked for.")],
    "one element": [(DATA, "1 element in 1 layer; 3 steps")],
}
"""What stands behind headlines, too."""


@every("name", MAKE)
def test_the_first_screen_is_right(name, tmp_path):
    rng = np.random.default_rng(0)
    steps = [MAKE[name](rng, step).astype(np.float32) for step in range(STEPS)]
    layers = len(SIZES) if "layered" in name else 1
    path = trace_of_steps(tmp_path / "run.zarr", steps, layers)
    rows = {row["question"]: row for row in gradstats.report(path)}
    for question, headline in TRUE[name].items():
        assert re.match(headline, rows[question]["answer"]), (question, rows[question]["answer"])
    for question, text in MORE.get(name, ()):
        assert text in rows[question]["numbers"], (question, rows[question]["numbers"])
    everything = " ".join(row["answer"] + row["numbers"] for row in rows.values())
    assert not re.search(r"\bnan\b|\binf\b|\b1 (elements|layers|steps)\b", everything)
    warned = {question for question, row in rows.items() if row["warn"]}
    assert (DATA in warned) == (rows[DATA]["answer"] != "Yes")


def test_gradients_that_alternate_are_seen_to(tmp_path):
    # of two losses in turn; twenty of 39 steps at one distance are all of the same one
    rng = np.random.default_rng(0)
    sizes = [1.0, 10.0] * 19 + [1.0]
    steps = [(size * rng.laplace(size=2000)).astype(np.float32) for size in sizes]
    path = trace_of_steps(tmp_path / "run.zarr", steps)
    (row,) = (r for r in gradstats.report(path) if r["question"] == MOVES)
    assert row["answer"].startswith("Mean magnitude: no trend is told")
    assert re.search(r"between (1|0\.9\d?|1\.0\d?) and (10|9\.\d)\.", row["numbers"]), row[
        "numbers"
    ]
