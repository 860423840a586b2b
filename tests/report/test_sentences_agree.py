"""Sentences about one trace do not contradict each other, nor the table that stands below them."""

import re

import numpy as np
import pytest
from support.every import every
from support.terminal import Runner
from support.traces import trace_of_steps

import gradstats
from gradstats.analysis.compare import TOLERANCE
from gradstats.analysis.rules import COUNTING
from gradstats.cli import app
from gradstats.statistics.laws import LAWS
from gradstats.thresholds import ESTIMATORS

N, STEPS = 10_000, 3
RNG = np.random.default_rng(3)
LAPLACE = [RNG.laplace(size=N) for _ in range(STEPS)]
DATA = {
    "Laplace": LAPLACE,
    "layers": [np.repeat([1, 0.1, 0.01, 0.003], N // 4) * x for x in LAPLACE],
    "heavy": [np.sign(x) * RNG.pareto(1.25, N) for x in LAPLACE],
    "clipped": [np.clip(x, -3, 3) for x in LAPLACE],
    "ties": [np.round(x, 1) for x in LAPLACE],
    "spike": [np.where(np.arange(N) == 7, 1e6, x) for x in LAPLACE],
    "smaller": [x / 4**step for step, x in enumerate(LAPLACE)],
    "zeros": [np.where(RNG.random(N) < 0.003, x, 0) for x in LAPLACE],
    "few": [x[:60] for x in LAPLACE],
    "one step": LAPLACE[:1],
}
NUMBER = r"(\d[\d.]*\d(?:e-\d+)?|\d)"
LABELS = {law.label: name for name, law in LAWS.items()}


@pytest.fixture(params=DATA)
def path(request, tmp_path):
    """A trace of each kind of data."""
    layers = 4 if request.param == "layers" else 1
    return trace_of_steps(tmp_path / "run.zarr", DATA[request.param], layers)


def shown(*words):
    """Return what a command says before its table, and the table, each as one line of words."""
    result = Runner().invoke(app, [*map(str, words)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    above, _, below = result.stdout.partition("\n\n")
    return " ".join(above.split()), below


def named(text, words):
    """Return the names that are listed behind some words."""
    found = re.search(rf"{words}: ([^.:]*)[.:]", text)
    return {re.sub(r" \(.*", "", name) for name in found[1].split(", ")} if found else set()


def test_sentences_and_tables_agree(path):
    said = {row["question"]: f"{row['answer']}. {row['numbers']}" for row in gradstats.report(path)}
    rows = {question: " ".join(text.split()) for question, text in said.items()}

    # one law is named, and it is the one in the table; no verdict is no law's
    law, table = shown("fit", path)
    headline = law.removeprefix("run, gradient: ").partition(". Fitted")[0].partition(". Judged")[0]
    if "run, gradient: No law" in law or "Too few" in law:
        assert rows["Which model is closest?"].startswith(headline.partition(". ")[0])
        assert " fits" not in law
    else:
        named_law = re.match(r"(?:None of \d+; the nearest, )?([^,(:]*)(,| \(|:)", headline)
        label = named_law[1].strip()
        assert LABELS[label] in table
        others = (LAWS.keys() - {LABELS[label]}) & {*table.split()}
        assert not others, (headline, table)
        assert ("one a layer" in headline) == ("l1" in table)
        pairs = "Judged on the gradient" in law or "2 pairs" in law
        assert pairs, law

    # a rule is in one list, the nearest in none of them, and every rule is in a list or in the table
    rule, table = shown("quality", path)
    untold, off = named(rule, "Cannot be told"), named(rule, "More than twofold off")
    hit, counted = named(rule, "These hit k, too"), named(rule, "Not shown, for they count")
    unknown = named(rule, "Not judged") & {*ESTIMATORS.built_in}
    lists = [untold, off, hit, counted, unknown]
    assert sum(map(len, lists)) == len(set().union(*lists)), rule
    hidden = off | counted if "--all shows them" in rule else set()
    for name in hidden:
        assert not re.search(rf"^ {name} ", table, re.MULTILINE), (rule, table)
    for name in ESTIMATORS.built_in:
        assert name in hidden or re.search(rf"^ {name} ", table, re.MULTILINE), (rule, table)
    nearest = re.match(r"run, gradient: (?:(?:None|Not decided); the nearest, )?([\w-]+)[,:]", rule)
    if nearest and not rule.startswith("run, gradient: No "):
        assert nearest[1] not in untold | hit | counted
        assert nearest[1] not in COUNTING
        decided = "Not decided" not in rule
        # of three steps at most
        assert decided or f"The widened range of {nearest[1]} is " in rule or "Kept nothing" in rule
    said = re.split(" Geometric means over| Of one gradient", rule.removeprefix("run, gradient: "))[
        0
    ]
    assert rows["Which estimate hits k?"].startswith(said.partition(" Not judged")[0])
    counts = re.search(r"(?:Even r|R)ules that count elements [^.]*", rule)
    assert not counts or counts[0] in rows["Which estimate hits k?"]
    assert ("tied" in rule) <= ("Not shown, for they count" not in rule)

    # what is shown of the decay is what the column says, and both pages say the same
    decay, table = shown("compressibility", path)
    decay = decay.removeprefix("run, gradient: ").removesuffix("rejected.")
    assert rows["Is it compressible?"].startswith(decay.partition(". ")[0])
    many = re.match(r"Shown at (\d+) of \d+ steps", decay)
    assert not decay.startswith("Not shown") or not re.search(r"gradient .* yes\b", table)
    assert bool(many) <= ("yes" in table)

    # what has no trend yet has moved all the same
    moved, _ = shown("drift", path)
    assert "no trend of" not in moved
    low, high = map(
        float,
        re.search(rf"mean (?:is |between ){NUMBER}(?: and {NUMBER})?", moved).groups(default="0"),
    )
    ratio = re.search(rf"Mean magnitude × {NUMBER}", rows["Does it move?"])
    if ratio and high:
        assert 0.95 * low / high <= float(ratio[1]) <= 1.05 * high / low


CHANGES = {
    "the same": lambda x, step: x,
    "rounded": lambda x, step: x.astype(np.float16),
    "a factor at the last step": lambda x, step: x if step < STEPS - 1 else 1.5 * x,
    "one element": lambda x, step: np.where(np.arange(x.size) == 7, 1 + 2 * x, x),
}


def of_columns(records, *names):
    return [tuple(r[n] for n in names) for r in records]


@pytest.mark.parametrize("path", ["Laplace", "layers", "zeros", "few"], indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_what_the_table_shows(change, path, tmp_path):
    """The sentence above `compare` names the first row with a cause, and none where no row has one."""
    a = gradstats.open_trace(path)
    steps = [np.asarray(a.read(step)) for step in a.steps()]
    other = trace_of_steps(
        tmp_path / "other.zarr",
        [CHANGES[change](x, step) for step, x in enumerate(steps)],
        len(a.layers),
    )
    found = gradstats.compare(path, other, per_layer=True)
    said = Runner().invoke(app, ["compare", str(path), str(other)], env={"COLUMNS": "400"})
    assert said.exit_code == 0, said.output
    assert found.verdict[1:] in " ".join(said.output.split())
    caused = [r for r in found if r["cause"]]
    assert ("no difference" in found.verdict) == (not caused)
    if caused:
        first = found.first
        place = {n: first[n] for n in ("step", "rank", "kind")}
        whole, *layers = (r for r in found if {n: r[n] for n in place} == place)
        assert all(r["step"] >= first["step"] for r in caused)
        assert (first["layer"], first["error"]) in of_columns(layers, "layer", "error")
        assert first["cause"] == (whole["cause"] or first["cause"])
        assert f"step {first['step']}, " in found.verdict
        assert f"layer {first['layer']}; likely cause: {first['cause']}" in found.verdict
    assert all((r["error"] > TOLERANCE) or not r["cause"] for r in found)
    assert (change == "the same") <= (not caused)
    assert change != "a factor at the last step" or found.first["step"] == len(steps) - 1


@every("name", DATA)
def test_ranks_that_agree_are_said_to(name, tmp_path):
    """No side is claimed of the batch without an interval, and the reason is one, in every place."""
    path = trace_of_steps(tmp_path / "run.zarr", DATA[name], ranks=3)
    (whole,) = (r for r in gradstats.agreement(path, ratio=0.1) if r["step"] is None)
    result = Runner().invoke(app, ["agreement", str(path)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert np.isnan(whole["low"]) == np.isnan(whole["high"]) == bool(whole["reason"])
    assert (f"no interval: {whole['reason']}" in said) == bool(whole["reason"])
    assert ("would pay is not known: " in said) == bool(whole["reason"])
    assert not re.search("batch would (pay: |bring)", said)  # of three steps
    assert whole["union_low"] <= whole["union"] <= whole["union_high"]
    assert -1 <= whole["cosine"] <= 1
