"""The report: what its first screen says, that it is one file, and that it works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DATA
from support.traces import LAYERS, trace_of_steps, write, write_shards

import gradstats
from gradstats import report
from gradstats.analysis.closest import evenly, law_pairs
from gradstats.analysis.decay import compressibility_records
from gradstats.analysis.drift import dataset_of
from gradstats.analysis.info import info_records
from gradstats.analysis.quality import summarise
from gradstats.analysis.verdicts import compressor_did, sound_elements
from gradstats.analysis.verdicts.verdict import Verdict
from gradstats.errors import InputError
from gradstats.primitives.sketch import sketch
from gradstats.report import measured, sections, write_report
from gradstats.report.questions import QUESTIONS, SHOULD
from gradstats.statistics.compressibility import Ruling, control
from gradstats.statistics.laws import LAWS
from gradstats.trace import TraceWriter, create_trace
from gradstats.trace.sources import ArraySource, Subset, open_source, open_sources

# the page of the module is drawn, and so are tests/cli's of odd gradients
pytestmark = pytest.mark.usefixtures("unrendered")


class Page(HTMLParser):
    """Elements with their attributes, and the text of the verdict table by row."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.rows, self.warned, self._in_cell = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            if dict(attrs).get("class") == "warn":
                self.warned.append(self.rows[-1][0])
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data

    def answer(self, question, column=1):
        return next(row for row in self.rows if row and row[0] == question)[column]

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    write_report([open_source(DATA / "resnet20.zarr")], path)
    return path


@pytest.fixture(scope="module")
def page(path):
    return Page(path.read_text(encoding="utf-8"))


def test_it_loads_nothing(page, path):
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "srcset", "poster", "action", "data", "background"):
            if name in attrs:
                assert attrs[name].startswith(("data:image/png;base64,", "#")), (tag, name)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(|https?:|fetch\(|XMLHttpRequest|import\(", text)
    assert path.stat().st_size < 2_500_000  # two such traces are to stay below 5 MB


def test_every_image_says_what_it_shows(page):
    images = page.all("img")
    shown = (
        "The training as one picture",
        "Sorted magnitudes",
        "Mean excess (rising: heavy) and shape ξ of the excesses by threshold at step 2999",
        "Density, tail and Q–Q of the gradient at step 10 ",
        "Density, tail and Q–Q of the gradient at step 2999 ",
        "Kept over asked for, and the interval",
        "Kept over asked for at ratio 0.001",
        "Scale and tail of the gradient by layer",
        "Loss of resnet20",
    )
    for image, text in zip(images, shown, strict=True):
        assert image["alt"].startswith(text)
        assert len(image["alt"]) > 40


def test_links_lead_to_places_on_the_page(page):
    ids = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    links = [attrs["href"].removeprefix("#") for attrs in page.all("a")]
    assert links == ["resnet20", "made"]
    assert set(links) <= ids


def test_it_says_how_to_look_around_in_the_same_source(path):
    text = path.read_text(encoding="utf-8")
    command = f"gradstats explore {DATA / 'resnet20.zarr'} -o explore.html"
    assert f"<code>{command}</code></nav>" in text


def test_the_first_screen_has_the_numbers_of_the_functions(page):
    trace = gradstats.open_trace(DATA / "resnet20.zarr")
    steps = trace.steps()
    found = {s: gradstats.compressibility(trace.read(s)) for s in steps}
    said = page.answer("Is it compressible?")
    assert not any(c.compressible for c in found.values())
    assert said.startswith("Not shown at any step")
    unsure = {s: c for s, c in found.items() if c.compressible is None}
    assert len(unsure) == 2
    for step, c in unsure.items():
        assert f"Step {step}: {c.reason} (p = {c.windows['1-269']:.2f} to rank 269, " in said
    for step in (steps[0], steps[-1]):
        c = found[step]
        assert f"{c.p:.2f} ({c.p_low:.2f} to {c.p_high:.2f}) at step {step}" in said
    for name, title in (("uniform", "uniform"), ("halfnorm", "half-normal")):
        assert f"{title} {control(name, trace.numel)[0].p:.2f}" in said
    shapes = gradstats.pot.mixture({la.name: trace.read(2999)[la.slice] for la in trace.layers})
    said = page.answer("How heavy is its tail?")
    assert said.startswith(
        f"Heavy in the top tenth: ξ = {shapes.pooled.c:.2f}, most of it from layers"
    )
    # the opposite at the ratio that thresholds are about
    (least,) = gradstats.pot.parameter_stability(trace.read(2999), [0.001])
    assert least.c_high < 0
    assert f"; short in the top 0.1\N{NO-BREAK SPACE}%: −{-least.c:.2f}" in said
    assert f"divided by its mean {shapes.normalised.c:.2f}" in said
    magnitudes = np.sort(np.square(trace.read(2999).astype(float)))[::-1]
    share = magnitudes[: trace.numel // 100].sum() / magnitudes.sum()
    said = page.answer("How uneven is it?")
    assert said.startswith(
        f"The largest 1\N{NO-BREAK SPACE}% hold {100 * share:.0f}\N{NO-BREAK SPACE}%"
    )
    assert "rank 1 of 2 not captured" in page.answer("Is the data sound?")
    said = page.answer("Which estimate hits k?")
    series = [r for r in gradstats.quality_series(trace, estimators=("dgc",)) if r["ratio"] == 0.1]
    assert said.startswith("Not decided; the nearest, dgc, has k̂/k = ")
    mean = np.exp(np.mean([np.log(r["quality"]) for r in series]))
    assert f"{mean:.2f}" in said.split(". ")[0]
    assert "4 have no power" in page.answer("Does it move?")
    assert page.warned == []
    said = page.answer("Which model is closest?")
    pairs = [p for p in law_pairs(open_source(trace)) if p["model"] == "double_genpareto"]
    whole = [p for p in pairs if p["method"] == "mle" and not p["by_layer"]]
    steps_judged = [(p["fitted"], p["judged"]) for p in whole]
    assert steps_judged == [*pairwise(steps)]
    median, worst = (np.exp(f([p["tail_error"] for p in whole])) for f in (np.median, max))
    off = f"{100 * (median - 1):.2g}\N{NO-BREAK SPACE}% (worst {worst:.2g}-fold) off"
    assert said.startswith(f"None of 3; the nearest, double gen. Pareto (mle), is {off}")
    said = page.answer("What did the compressor do?")
    assert said.startswith("topk, ratio 0.001, without error feedback: k̂/k = 1.00 (1.00 to 1.00)")


def test_the_answer_comes_first_and_the_run_last(page, path):
    text = path.read_text(encoding="utf-8")
    worth, table = text.index(f"<h2>{SHOULD}</h2>"), text.index("<table class=verdicts>")
    run = text.index("<section class=run>")
    assert worth < table < run < text.index('<h2 id="made">')
    for fact in ("resnet20 on cifar10", "2.38 at step 10 to 1.62 at step 2999", "59 parameters"):
        assert text.index(fact) > run
    assert text.index("Loss of resnet20 at the captured steps") > run
    assert "torch 2." not in text[:run]
    rows = {row[0]: row[1] for row in page.rows if len(row) == 2}
    assert rows["optimizer, learning rate"] == "0.1"
    assert not any("{" in value for value in rows.values())
    trace = gradstats.open_trace(DATA / "resnet20.zarr")
    held = {}
    for step in (10, 100, 2999):
        squares = np.sort(np.square(trace.read(step).astype(float)))[::-1]
        held[step] = squares[:2697].sum() / squares.sum()
    low, high = (f"{100 * f(held.values()):.0f}" for f in (min, max))
    said = text[worth:table]
    # word for word what the command says
    advised = gradstats.advise(DATA / "resnet20.zarr")
    assert f"If the network is slow: t{advised.verdict.headline[1:]}." in said
    assert advised.verdict.numbers.split("\n")[0] in said
    assert f"{low} to {high}\N{NO-BREAK SPACE}% at 0.01" in said
    assert said.count("<li>") == 3


def test_advice_comes_before_the_answers(tmp_path):
    x = np.random.default_rng(0).laplace(size=3000)
    answers = gradstats.report(x, tmp_path / "r.html", advice=["4 workers: don't compress."])
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.index("4 workers: don&#x27;t compress.") < text.index("<table class=verdicts>")
    page = Page(text)
    assert (answers[0]["question"], answers[0]["answer"]) == (SHOULD, "4 workers: don't compress")
    for row in answers[1:]:
        assert page.answer(row["question"]).startswith(row["answer"])
        assert page.answer(row["question"]).endswith(row["numbers"])
    assert len(answers) == 1 + len(QUESTIONS)


def test_two_traces_of_one_name_are_told_apart_by_their_paths(tmp_path):
    rng = np.random.default_rng(0)
    paths = [
        trace_of_steps(tmp_path / folder / "run.zarr", [rng.laplace(size=2000).astype(np.float32)])
        for folder in ("a", "b")
    ]
    advice = [f"{paths[1]}: send topk."]
    answers = gradstats.report(paths, tmp_path / "r.html", advice=advice)
    assert {r["source"] for r in answers} == {str(path) for path in paths}
    heads = [r["answer"] for r in answers if r["question"] == SHOULD]
    assert [head.startswith("send topk") for head in heads] == [False, True]
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert all(text.count(f'<h2 id="{path}">') == 1 for path in paths)


def test_advice_goes_to_the_source_that_it_names_and_else_to_the_first():
    x, y = np.random.default_rng(0).laplace(size=(2, 3000))
    sources = [ArraySource({"w": x}, "one"), ArraySource({"w": y}, "two")]
    for advice, said in (
        (["two: don't compress."], ["If the network is slow", "don't compress"]),
        (["two: don't compress.", "send topk."], ["send topk", "don't compress"]),
        (["two: slow.", "one: fast.", "more."], ["fast", "slow"]),
    ):
        answers = gradstats.report(sources, advice=advice)
        heads = [r["answer"] for r in answers if r["question"] == SHOULD]
        assert [h.startswith(s) for h, s in zip(heads, said, strict=True)] == [True, True], heads


def test_whether_to_compress_is_asked_of_the_first_kind(monkeypatch):
    kinds = ["gradient", "corrected"]
    monkeypatch.setattr(report, "measure", lambda s, *_: SimpleNamespace(source=s, kinds=kinds))
    monkeypatch.setattr(report, "QUESTIONS", {})
    monkeypatch.setattr(report, "should", lambda m, kind, *_: Verdict(f"of {kind}", ""))
    found = gradstats.report(np.ones(3))
    assert [(r["kind"], r["answer"]) for r in found] == [("gradient", "of gradient")]


def test_of_many_dumps_those_looked_at_count_and_a_step_of_zeros_decides_nothing(tmp_path):
    rng = np.random.default_rng(0)
    many = {step: rng.laplace(size=2000).astype(np.float32) for step in range(25)}
    many[0][:], many[24][:9] = 0, np.nan
    for step, x in many.items():
        np.save(tmp_path / f"grad_step{step}_rank0.npy", x)
    # a rank that has none of the steps of the first
    np.save(tmp_path / "grad_step30_rank1.npy", np.r_[many[1][:1999], 0])
    (source,) = open_sources(tmp_path)
    first, second = measured._ledger(source, info_records(source), evenly(range(25), 20), None)
    assert [first[n] for n in ("steps", "zeros", "nonfinite")] == [25, 2000, 9]
    assert [second[n] for n in ("steps", "zeros", "nonfinite")] == [1, 1, 0]
    for path in tmp_path.glob("*.npy"):
        if re.search("step0_|step1_|step2_", path.name) is None:
            path.unlink()
    rows = {row["question"]: row for row in gradstats.report(open_sources(tmp_path))}
    assert rows[SHOULD]["answer"].startswith("If the network is slow")
    scale = np.abs(many[2]).mean() / np.abs(many[1]).mean()
    assert rows["Does it move?"]["answer"] == f"Mean magnitude × {scale:.2g}"
    assert rows["Does it move?"]["numbers"].startswith("Step 1 to 2, ")
    (tmp_path / "grad_step1_rank0.npy").unlink()
    rows = {row["question"]: row for row in gradstats.report(open_sources(tmp_path))}
    assert rows["Does it move?"]["answer"] == "Nothing to follow"


def test_ranks_that_are_missing_are_of_the_world(tmp_path):
    """Two ranks hold one gradient together, and two others were not captured."""
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=4)
    for rank in range(2):
        write_shards(tmp_path / "run.zarr", [0], rank=rank, world=2, kinds=("gradient",))
    rows = {row["question"]: row for row in gradstats.report(tmp_path / "run.zarr")}
    assert "rank 2, 3 of 4 not captured" in rows["Is the data sound?"]["numbers"]


def test_gradients_with_any_nan_are_those_of_all_ranks(tmp_path):
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=2)
    for rank, (steps, bad) in enumerate([(3, (0, 2)), (5, (1,))]):
        writer = TraceWriter(tmp_path / "run.zarr", rank)
        for step in range(steps):
            values = np.ones(620, np.float32)
            values[:4] = np.nan if step in bad else 1
            writer.append(step, {"gradient": values})
        writer.close()
    source = open_source(tmp_path / "run.zarr")
    ledger = measured._ledger(source, info_records(source), range(5), None)
    said = sound_elements(ledger, 620, 2, [], 2).headline
    assert said.startswith(
        "4 elements NaN or infinite in the worst step (0.65\N{NO-BREAK SPACE}%), "
        "with any in 3 gradients; "
    )
    assert said.endswith("; ranks have 3 to 5 steps")
    write_report([source], tmp_path / "r.html")
    # of both ranks together
    said = "Not before the data is sound: NaN or infinite elements at 3 of 5 steps looked at"
    assert said in (tmp_path / "r.html").read_text(encoding="utf-8")


def _contrast(one, other):
    def luminance(colour):
        parts = [int(c, 16) / (15 if len(colour) == 4 else 255) for c in _parts(colour)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _parts(colour):
    return re.findall("." if len(colour) == 4 else "..", colour[1:])


def test_text_and_lines_stand_out_in_light_and_dark(path):
    text = path.read_text(encoding="utf-8")
    schemes = re.findall(r":root \{ ([^}]*--back[^}]*)\}", text)
    assert len(schemes) == 3  # light, dark, print
    light = dict(re.findall(r"--(\w+): (#\w+)", schemes[0]))
    for scheme in schemes:
        colours = light | dict(re.findall(r"--(\w+): (#\w+)", scheme))
        for name in ("text", "dim", "link", "warn"):
            assert _contrast(colours[name], colours["back"]) >= 4.5, (name, scheme)
        assert _contrast(colours["strong"], colours["back"]) >= 3, scheme


def test_quantiles_of_few_gradients_are_called_low_and_high(page):
    heads = next(row for row in page.rows if row[:2] == ["rule", "ratio"])
    assert heads[5:7] == ["low", "high"]


def test_how_it_was_made(page):
    made = next(row for row in page.rows if row and row[0].endswith("resnet20.zarr"))
    assert made[1:] == ["10, 100, 1000, 2999", "0", "gradient", "0"]


def test_bad_data_is_said_first(tmp_path):
    rng = np.random.default_rng(0)
    dull = rng.laplace(size=3000).astype(np.float32)
    dull[:7] = np.nan
    dull[10:60] = 0.25
    layers = {"a": dull, "dead": np.zeros(500, np.float32), "bias": np.ones(1, np.float32)}
    # the first is the largest or the least of its layer: not constant
    layers["falls"] = np.sort(rng.laplace(size=100)).astype(np.float32)[::-1]
    layers["rises"] = layers["falls"][::-1]
    write_report([ArraySource(layers, "<bad> & sons")], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.rows[0][1] == "<bad> & sons, gradient"
    said = page.answer("Is the data sound?")
    assert "7 elements NaN or infinite in the worst step" in said
    assert "500 elements zero in the worst step" in said  # 14 %
    assert "50 elements of one magnitude" in said
    assert "1 constant layer" in said
    assert "Not judged" not in page.answer("Which estimate hits k?").split(".")[0]
    assert "One step only" in page.answer("Does it move?")
    assert page.warned[0] == "Is the data sound?"


@pytest.mark.parametrize(
    ("x", "model", "warned"),
    [
        (np.random.default_rng(0).laplace(size=3000), "Laplace: thresholds within ", []),
        # a tenth of ties: every threshold keeps all of them or none
        (
            np.r_[np.linspace(1, 2, 2970), np.full(3000, 1e6)],
            "None of 3; the nearest",
            ["Is the data sound?", "Which model is closest?"],
        ),
        (np.zeros(300), "No law can be judged", ["Is the data sound?"]),
    ],
)
def test_a_model_far_off_is_warned_of(x, model, warned, tmp_path):
    write_report([ArraySource({"x": x})], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert model in page.answer("Which model is closest?")
    assert page.warned == warned


@pytest.mark.parametrize("passes", [False, True])
def test_a_control_that_passes_is_warned_of(passes):
    row = {"kind": "gradient", "step": 7, "p": 0.6, "p_low": 0.55, "p_high": 0.65}
    row |= {"runs_low": 0.4, "runs_high": 0.8}
    row |= {"compressible": True, "reason": Ruling.SHOWN, "window": "1-500", "windows": {}}
    control_row = row | {"step": None, "kind": "uniform", "compressible": passes}
    verdict = QUESTIONS["Is it compressible?"](
        SimpleNamespace(decay=[row, control_row]), "gradient"
    )
    assert (verdict.headline, verdict.warn) == ("Shown", passes)
    assert "p = 0.60 (0.55 to 0.65) at step 7" in verdict.numbers
    assert "by runs of neighbours 0.40 to 0.80" in verdict.numbers
    assert ("passes what it must reject!" in verdict.numbers) == passes


@pytest.mark.parametrize("x", [np.zeros(300, np.float32), np.ones(5), np.full(200, np.nan)])
def test_gradients_without_statistics_have_a_page(x, tmp_path):
    write_report([ArraySource({"x": x})], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "Too few" in page.answer("How uneven is it?")
    assert "Too few" in page.answer("How heavy is its tail?")


def test_of_zeros_alone_the_first_rank_is_shown(tmp_path):
    create_trace(tmp_path / "run.zarr", LAYERS, world_size=2)
    for rank in (0, 1):
        writer = TraceWriter(tmp_path / "run.zarr", rank)
        writer.append(0, {"gradient": np.zeros(620, np.float32)})
        writer.close()
    write_report([open_source(tmp_path / "run.zarr")], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "Too few" in page.answer("How heavy is its tail?")


@pytest.mark.parametrize("several", [True, False])
def test_a_source_is_opened_once(several, tmp_path, monkeypatch):
    """At the top; whatever measures it has a source handed down."""
    opened = []

    def counted(source):
        opened.append(source)
        return open_source(source)

    for module in list(sys.modules.values()):
        if module.__name__.startswith("gradstats.") and hasattr(module, "open_source"):
            monkeypatch.setattr(module, "open_source", counted)
    x = np.random.default_rng(0).laplace(size=3000).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    sources = [tmp_path / "x.npy", {"a": x[:2000], "b": x[2000:]}] if several else x
    write_report(sources, str(tmp_path / "r.html"))
    assert len(opened) == (2 if several else 1)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.all("nav")) == 1
    assert [row[0] for row in page.rows].count("Is the data sound?") == 1


def test_a_page_that_cannot_be_written():
    with pytest.raises(InputError, match="cannot write"):
        write_report([ArraySource({"x": np.ones(5)})], DATA / "README.md" / "r.html")


_CLICKS = """<script>
const table = [...document.querySelectorAll("table.sortable")].find((t) => t.caption.textContent.startsWith("Decay"));
const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("p"));
const shown = () => [...table.tBodies[0].rows].map((r) => r.cells[column].dataset.value).join(" ");
const button = table.tHead.rows[0].cells[column].querySelector("button");
const found = [shown()];
for (let i = 0; i < 2; i++) { button.click(); found.push(shown()); }
found.push(button.parentElement.getAttribute("aria-sort"));
document.body.innerHTML = `<pre id=found>${found.join("|")}</pre>`;
</script></body>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_tables_sort_in_a_browser(path, tmp_path):
    clicked = tmp_path / "clicked.html"
    clicked.write_text(path.read_text(encoding="utf-8").replace("</body>", _CLICKS))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        ["chromium", *options, "--dump-dom", clicked.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = re.search(r"<pre id=\"found\">(.*)</pre>", done.stdout).group(1).split("|")
    before, up, down = ([float(v) for v in order.split()] for order in found[:3])
    assert before not in (sorted(before), sorted(before, reverse=True))
    assert up == sorted(before)
    assert down == sorted(before, reverse=True)
    assert found[3] == "descending"


def test_a_training_is_one_picture_of_each_kind(monkeypatch):
    """Of the steps looked at, with the elements of that kind; of one gradient there is none."""
    drawn = []
    monkeypatch.setattr(gradstats.plots, "overview", lambda steps, ax: drawn.append(steps))
    source = open_source(DATA / "resnet20-ef.zarr")
    kinds, steps = ["gradient", "corrected"], [10, 100, 2999]
    sketches = {(k, s): sketch(source.read(0, k, s).values) for k in kinds for s in steps}
    m = SimpleNamespace(source=source, rank=0, kinds=kinds, steps=steps, sketches=sketches)
    shown = sections._overview(m)
    assert shown.count("<img") == 2
    assert shown.index("of the gradient have") < shown.index("of the corrected have")
    for kind, steps in zip(m.kinds, drawn, strict=True):
        assert list(steps) == m.steps
        for step, reduced in steps.items():
            whole = sketch(source.read(0, kind, step).values)
            assert reduced.moments == whole.moments, (kind, step)
    assert sections._overview(SimpleNamespace(source=source, steps=[10, 100])) == ""


def test_thresholds_are_drawn_over_the_steps_at_the_smallest_ratio(monkeypatch):
    """Each kind by itself, without the rules that count: they would be a line at 1."""
    drawn, bars = [], []
    monkeypatch.setattr(
        gradstats.plots, "quality_over_steps", lambda rows, ax, title: drawn.append((title, rows))
    )
    monkeypatch.setattr(
        gradstats.plots, "quality_bars", lambda rows, ax, title: bars.append((title, rows))
    )
    source = open_source(DATA / "resnet20-ef.zarr")
    rules = ["exact", "sidco-e"]
    series = list(gradstats.quality_series(source, measured.RATIOS, rules))
    kinds = ["gradient", "corrected"]
    quality = summarise(series)
    shown = sections._thresholds(
        SimpleNamespace(source=source, kinds=kinds, steps=[10, 100], quality=quality, series=series)
    )
    # of two gradients a kind
    assert "the interval of all gradients; 1 is right" in shown
    wanted = [r for r in quality if r["estimator"] == "sidco-e"]
    assert bars == [(kind, [r for r in wanted if r["kind"] == kind]) for kind in kinds]
    assert [title for title, _ in drawn] == kinds
    for kind, rows in drawn:
        assert {(r["kind"], r["estimator"], r["ratio"]) for r in rows} == {
            (kind, "sidco-e", min(measured.RATIOS))
        }


def test_tails_and_layers_are_those_of_each_kind(monkeypatch):
    """Kinds of different scale share the axes of the mean excess: each is divided by its mean."""
    means, maps = {}, []
    monkeypatch.setattr(
        gradstats.plots, "mean_excess", lambda m, ax, label: means.update({label: m.mean})
    )
    for name in ("parameter_stability", "drift_map"):
        monkeypatch.setattr(gradstats.plots, name, lambda *_, **__: None)
    monkeypatch.setattr(
        gradstats.plots,
        "layer_map",
        lambda data, name, ax: maps.append((str(data["kind"].values), name)),
    )
    source = open_source(DATA / "resnet20-ef.zarr")
    kinds = ["gradient", "corrected"]
    training = dataset_of(source, Subset([100], [0], per_layer=True), ratios=[0.01])
    m = SimpleNamespace(source=source, rank=0, kinds=kinds, shown=[100], training=training)
    m.peaks = m.tails = []
    reduced = {f"{k}, step 100": sketch(source.read(0, k, 100).values) for k in kinds}
    sections._tail(m, reduced)
    assert means == pytest.approx(dict.fromkeys(kinds, 1.0))
    sections._layers(m)
    assert maps[:2] + maps[-2:] == [(k, name) for k in kinds for name in ("mean", "shape")]


def test_the_shapes_of_layers_are_those_of_the_last_step():
    """Earlier steps have the pooled shapes alone; a layer of too few elements has none."""

    def shape(step, layer, c):
        numbers = {"n": 333, "c": c, "c_low": c - 0.01, "c_high": c + 0.01}
        return {"kind": "gradient", "step": step, "layer": layer} | numbers

    tails = [shape(10, "pooled", 0.111), shape(10, "normalised", 0.222)]
    tails += [shape(90, "pooled", 0.333), shape(90, "wide", 0.444), shape(90, "few", np.nan)]
    source = open_source({"wide": np.ones(5), "few": np.ones(5)})
    m = SimpleNamespace(source=source, kinds=["gradient"], shown=[10, 90], peaks=[], tails=tails)
    # of so few elements there is no figure
    shown = sections._tail(m, {"gradient, step 90": sketch(np.ones(9))})
    by_layer = shown.partition("Tail shape by layer")[2]
    assert "top tenth at step 90" in by_layer
    assert {*re.findall(r"0\.(?:111|222|333|444)", by_layer)} == {"0.333", "0.444"}
    assert ("wide" in by_layer, "few<" in by_layer) == (True, False)


def test_a_trace_of_an_older_kind_says_what_was_kept(tmp_path):
    """Of 620 elements and a ratio of 0.1, of which 124 were kept: twice k."""
    create_trace(tmp_path / "run.zarr", LAYERS, metadata={"ratio": 0.1})
    write(tmp_path / "run.zarr", [124])
    live = measured._run(open_source(tmp_path / "run.zarr"), 0)[2]
    assert compressor_did(live, None, 620).headline == "The compressor: k̂/k = 2.00 (2.00 to 2.00)"


@pytest.mark.parametrize(
    ("program", "name"), [("/opt/gradstats/__main__.py", "gradstats"), ("/opt/bin/mine", "mine")]
)
def test_the_command_is_on_the_page(monkeypatch, program, name):
    monkeypatch.setattr(sys, "argv", [program, "report", "a run.zarr"])
    assert f"<code>{name} report &#x27;a run.zarr&#x27;</code>" in report._provenance([])


def test_the_figure_of_the_fits_has_what_is_fitted_by_default(monkeypatch):
    drawn = []
    monkeypatch.setattr(gradstats.plots, "tail", lambda m, fits, ax: drawn.extend(fits))
    monkeypatch.setattr(gradstats.plots, "density", lambda *_: None)
    mine = replace(
        LAWS["t"], name="mine", control=False
    )  # by maximum likelihood: it has no closed form
    monkeypatch.setitem(LAWS._loaded, "mine", mine)
    x = np.random.default_rng(0).laplace(size=500)
    sections._fits("x", SimpleNamespace(values=x, kind="gradient", step=0), sketch(x))
    assert [f.model for f in drawn] == ["laplace", "dgamma", "double_genpareto", "mine"]


def test_a_rank_of_zeros_speaks_for_no_other(tmp_path):
    """Answers that are of one rank are of the first that has any element, and the page says which."""
    path, rng = tmp_path / "run.zarr", np.random.default_rng(0)
    create_trace(path, LAYERS, world_size=3)
    numel = sum(layer.numel for layer in LAYERS)
    for rank in range(3):
        writer = TraceWriter(path, rank)
        for step in range(24):
            values = rng.laplace(size=numel) * (rank > 0) * (step < 23)
            writer.append(step, {"gradient": values.astype(np.float32)})
        writer.close()
    answers = {row["question"]: row for row in write_report(path, tmp_path / "r.html")}
    assert "No step has" not in answers["Does it move?"]["numbers"]
    assert not answers["Does it move?"]["answer"].startswith("Nothing to follow")
    text = " ".join((tmp_path / "r.html").read_text(encoding="utf-8").split())
    assert "judged on all 3 ranks, what else is said of a gradient is of rank 1" in text
    assert "20 of 24 steps are looked at" in text
    # the last step is of zeros: laws are fitted to the last that is not
    rank, telling = measured._shown(info_records(open_source(path)), 0)
    assert (rank, telling) == (1, {*range(23)})


def test_the_ranks_that_are_shaded_are_those_of_p(tmp_path, monkeypatch):
    """Of a gradient of which half the elements are zero, the largest hundredth of the others."""
    windows = []
    draw = gradstats.plots.magnitude_decay

    def drawn(*arguments, window, **options):
        windows.append(window)
        return draw(*arguments, window=window, **options)

    monkeypatch.setattr(gradstats.plots, "magnitude_decay", drawn)
    x = np.append(np.random.default_rng(3).laplace(size=10_000), np.zeros(10_000))
    source = open_source(x.astype(np.float32))
    m = SimpleNamespace(source=source, decay=compressibility_records([source]))
    sections._decay(m, {"gradient, step 0": sketch(x)})
    assert windows == [(1, 100)]
    assert m.decay[0]["window"] == "1-100"
