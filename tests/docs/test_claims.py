"""Claims beside measurements, and other tables and sentences: all their numbers are those of docs/results or data/.

``PYTHONPATH=benchmarks python tests/docs/test_claims.py --write`` makes the tables anew, and shows what the
sentences must say.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import capture_cost
import convergence
import corners
import experiment
import growth
import hook_overhead
import numpy as np
import plateau
import primitives
import trace_sizes
from experiment import LAST, steps_to
from lags import table as lags_table
from pages import RESULTS, block, put
from parts import PARTS

import gradstats
from gradstats.analysis.atlas import worst_cases
from gradstats.tables import render

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
ANSWERS = {"confirmed", "in part", "not confirmed", "not tested"}
WORKLOADS = {
    "lstm-ptb": "LSTM, PTB",
    "vgg16-cifar10": "VGG16, CIFAR-10",
    "resnet20-cifar10": "ResNet-20, CIFAR-10",
}
SHOWN = (
    "none", "dense-bf16", "torch-bf16", "torch-topk", "topk", "warm-exact", "sidco-e", "redsync",
    "redsync-quantised", "micro", "lags", "signsgd", "marsit", "powersgd",
)  # fmt: skip
LEARNED = [w for w in WORKLOADS if not w.startswith("vgg16")]
"""Workloads whose losses tell systems apart: after 30 steps VGG16 is as good as chance with any of them."""
Row = dict[str, Any]


@cache
def stored(name: str) -> list[Row]:
    """Return the rows of a file of results."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else [*map(json.loads, text.splitlines())]


def runs(workload: str) -> dict[str, Row]:
    """Return the runs in the network lab by compressor, without those that diverged."""
    return {r["compressor"]: r for r in stored(f"network-{workload}.jsonl")[1:] if "seconds" in r}


def share(workload: str) -> float:
    """Return the share of a dense step that is communication."""
    compute = stored(f"network-{workload}.jsonl")[0]["compute"]
    return experiment.visible(compute, runs(workload)["none"]["seconds"])


def speed(workload: str, name: str, to: str = "none") -> float:
    """Return how many steps one makes while another makes one."""
    return runs(workload)[to]["seconds"] / runs(workload)[name]["seconds"]


def on_gpu(rule: str, numel: int) -> str:
    """Return how many times as fast as torch.topk a rule is by Triton, at three ratios."""
    found = {
        r["ratio"]: f"{r['speedup']:.2g}"
        for r in stored("gpu.json")
        if (r["part"], r.get("what"), r.get("numel")) == ("latency", rule, numel)
        and r["backend"] == "triton"
    }
    return f"{found[0.001]}, {found[0.01]} and {found[0.1]}"


def to_loss(workload: str, name: str, to: str = "none") -> float:
    """Return how much sooner than another a system has the dense run's last loss; NaN if it never has."""
    each = runs(workload)
    goal = statistics.fmean(each["none"]["losses"][-LAST:])
    own, other = (steps_to(each[n]["losses"], goal) * each[n]["seconds"] for n in (name, to))
    return other / own if math.isfinite(own) else math.nan


def against_dgc(workload: str, to_loss: bool = False) -> str:
    """Return how many times as fast as DGC's SIDCo-E is, over rounds, with its 95 % interval."""
    rows = stored(f"rounds-{workload}.jsonl")[1:]
    if to_loss:
        goal = statistics.fmean(runs(workload)["none"]["losses"][-LAST:])
        rows = [r | {"seconds": steps_to(r["losses"], goal) * r["seconds"]} for r in rows]
    return "{:.2f} ({:.2f} to {:.2f})".format(*experiment.against(rows, "dgc"))


def by_system(value: Any, form: str, workloads: Iterable[str] = WORKLOADS) -> str:
    """Return one number for each system and workload as Markdown."""
    workloads = [*workloads]
    heads = [f"{WORKLOADS[w]}, {100 * share(w):.0f} %" for w in workloads]
    lines = ["| system | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name in SHOWN:
        cells = []
        for workload in workloads:
            number = value(workload, name) if name in runs(workload) else math.nan
            missing = "–" if name not in runs(workload) else "never"
            cells.append(missing if math.isnan(number) else format(number, form))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mixture() -> str:
    """Return ξ of the top tenth, pooled and with every layer divided by its mean magnitude."""
    lines = ["| step | pooled | normalised |", "|---:|---:|---:|"]
    trace = gradstats.open_trace(ROOT / "data" / "resnet20.zarr")
    for step in trace.steps():
        g = trace.read(step)
        found = gradstats.pot.mixture({layer.name: g[layer.slice] for layer in trace.layers})
        cells = [
            f"{each.c:.3f} ({each.c_low:.3f}–{each.c_high:.3f})"
            for each in (found.pooled, found.normalised)
        ]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def captured() -> str:
    """Return speed-up over torch.topk and k̂/k in captured gradients, at ratio 0.001."""
    rows = [r for r in stored("bench_models.json") if r["ratio"] == 0.001]
    models = dict.fromkeys((r["gradient"], r["numel"]) for r in rows)
    heads = "".join(f" {model}, {numel:,} | k̂/k |" for model, numel in models)
    lines = [f"| rule |{heads}", "|---" + "|---:" * (2 * len(models)) + "|"]
    for rule in dict.fromkeys(r["compressor"] for r in rows):
        if rule != "torch.topk":
            of = [r for r in rows if r["compressor"] == rule]
            cells = "".join(f" {r['speedup']:.3g} | {r['quality']:.2f} |" for r in of)
            lines.append(f"| `{rule}` |{cells}")
    return "\n".join(lines)


IN_SHORT = (
    "warm-exact", "exact", "histogram", "sidco-e", "torch.topk", "torch.kthvalue", "dgc", "gaussiank",
)  # fmt: skip
"""Rows of the short table of thresholds."""
BENCH = (
    *("compressor", "ratio", "seconds", "streams", "streams_low", "streams_high", "streams_mean"),
    *("quality", "memory", "speedup"),
)


def tables() -> dict[tuple[str, str], str]:
    """Return the tables that are made from the results, by page and mark."""
    made = {
        ("claims", "throughput"): by_system(speed, ".2f"),
        ("claims", "time to loss"): by_system(to_loss, ".2f", LEARNED),
        ("measurements", "passes"): primitives.table(stored("primitives.json")),
        ("measurements", "corners"): corners.table(stored("corners.json")),
        ("measurements", "capture cost"): capture_cost.table(stored("capture_cost.jsonl")),
        ("measurements", "trace sizes"): trace_sizes.table(stored("trace_sizes.json")),
        ("network", "growth"): growth.table(stored("growth.jsonl")),
        ("network", "rounds"): experiment.rounds_table(),
        ("systems", "hook"): hook_overhead.table(stored("hook_overhead.json")),
        ("measurements", "bench models"): captured(),
        ("measurements", "bench"): render(stored("bench.json"), "markdown", columns=BENCH),
        ("statistics", "mixture"): mixture(),
    }
    for workload in WORKLOADS:
        setting, *rows = stored(f"network-{workload}.jsonl")
        made["network", workload] = experiment.table(rows, setting)
    for workload in (*WORKLOADS, "lstm-an4"):
        times = f"times-{workload}.jsonl"
        made["systems", workload] = convergence.table(
            stored(f"convergence-{workload}.jsonl"),
            stored(times) if (RESULTS / times).exists() else [],
        )
    return made


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest of some numbers."""
    numbers = sorted(values)
    return f"{numbers[0]:{form}} to {numbers[-1]:{form}}"


def theory(study: str, **fields: Any) -> list[Row]:
    """Return the rows of a study of benchmarks/theory.py that have these values."""
    rows = [r for r in stored("theory.jsonl") if r["study"] == study]
    return [r for r in rows if all(r[k] == v for k, v in fields.items())]


def listed(rows: list[Row], name: str, by: str, value: Callable[[Row], float]) -> str:
    """Return what a system's runs have, in percent: means over the seeds, in the order of a field."""
    seeds: dict[float, list[float]] = {}
    for r in rows:
        if r["compressor"] == name:
            seeds.setdefault(r[by], []).append(100 * value(r))
    *each, last = (f"{statistics.fmean(values):.1f}" for _, values in sorted(seeds.items()))
    return f"{', '.join(each)} and {last}" if each else last


def right(name: str) -> str:
    """Return the test images that trainings to a plateau get right, from the largest ratio on."""
    rows = [r | {"kept": -r["ratio"]} for r in stored("plateau-resnet8-cifar16.jsonl")]
    return listed(rows, name, "kept", lambda r: r["accuracy"])


def words(name: str) -> str:
    """Return the perplexities of word LSTMs trained to a plateau, from the largest ratio on."""
    rows = [r | {"kept": -r["ratio"]} for r in stored("plateau-lstm-ptb.jsonl")]
    return listed(rows, name, "kept", lambda r: r["perplexity"] / 100)


def concentration(step: int) -> tuple[float, float]:
    """Return the share of the squared norm in the largest 1 %, and the largest magnitude over the mean one."""
    found = gradstats.open_trace(ROOT / "data" / "resnet20.zarr").read(step)
    magnitudes = np.sort(np.abs(np.asarray(found, np.float64)))[::-1]
    squares = magnitudes**2
    largest = squares[: len(squares) // 100].sum() / squares.sum()
    return 100 * float(largest), float(magnitudes[0] / magnitudes.mean())


def paper_rows() -> list[tuple[str, str]]:
    """Return the same for the claims that are made from results of several programs."""
    lstm, vgg, resnet = WORKLOADS
    small = stored("plateau-resnet8-cifar16.jsonl")
    lab = {
        (r["compressor"], r["ratio"]): r["curves"]
        for r in stored("plateau-resnet8-cifar16-lab.jsonl")
    }
    dense = lab["none", 1.0]["loss"]
    targets = [
        min(dense[: max(1, round(share * len(dense)))]) for share in plateau.TARGETS.values()
    ]

    def until(name: str, goal: float) -> float:
        pairs = zip(lab[name, 1.0]["loss"], lab[name, 1.0]["seconds"], strict=True)
        return next((second for loss, second in pairs if loss <= goal), math.inf)

    assert [until("marsit", goal) for goal in targets[1:]] == [math.inf] * 2
    full = [r | {"every": r["full_every"] or math.inf} for r in stored("marsit.jsonl")]
    ring = {
        (r["topology"], r["elements"]): f"{r['ratio']:.2f}" for r in stored("marsit-times.json")
    }
    loopback = {r["compressor"]: r for r in stored(f"times-{resnet}.jsonl")}
    taken = {
        n: f"{1e3 * loopback[n]['communicate']:.1f}" for n in ("marsit", "signsgd", "ef-signsgd")
    }
    by_words = {r["compressor"]: r for r in stored("times-lstm-ptb.jsonl")}
    grew = {(r["compressor"], r["nproc"]): r for r in stored("growth.jsonl")}

    slower = {
        n: f"{grew['lags', n]['seconds'] / grew['topk', n]['seconds']:.2f}" for n in (2, 4, 8)
    }

    def ms(name: str, field: str, digits: int = 0) -> str:
        return f"{1e3 * by_words[name][field]:.{digits}f}"

    def more(name: str, to: int, field: str = "bytes") -> str:
        return f"{grew[name, to][field] / grew[name, 2][field]:.1f}"

    warm = [
        sum(r["curves"]["bytes"][:2]) / 2 * (r["steps"] / 20) / (r["bytes"] * r["steps"])
        for r in small
        if (r["compressor"], r["ratio"]) == ("redsync", 0.001)
    ]
    both = [*small, *stored("plateau-lstm-ptb.jsonl")]
    most = max(x for r in both if r["compressor"] == "sidco-gp" for x in r["curves"]["quality"])
    early = {
        (r["step"], r["rule"]): r["quality"]
        for r in stored("sidco.json")
        if r["estimator"] == "sidco-e" and r["error_feedback"]
    }
    steps = sorted({step for step, _ in early})
    assert max(early[step, "paper"] for step in steps[3:]) < 2.5
    union = {(r["compressor"], r["nproc"]): r["build_up"] for r in stored("build_up.json")}
    hard = [f"{r['quality']:.1f}" for r in small if r["compressor"] == "hard"]
    bench = {
        r["compressor"]: r["streams"]
        for r in stored("bench.json")
        if (r["numel"], r["ratio"], r["threads"]) == (26_000_000, 0.001, 1)
    }
    sidco = [
        statistics.fmean(r["quality"] for r in small if (r["compressor"], r["ratio"]) == each)
        for each in ((n, x) for n in ("sidco-e", "sidco-gp", "sidco-p") for x in (0.1, 0.01, 0.001))
    ]
    rate = {r["ratio"]: r for r in theory("layered rate", schedule="falling", steps=1000)}
    small_part, large_part = concentration(100), concentration(2999)
    at_own = {
        r["compressor"]: f"{100 * r['accuracy']:.1f}"
        for r in stored("marsit-own.jsonl")
        if (r["steps"], r["seed"]) == (500, 0)
    }
    overlap = {r["nproc"]: r for r in stored("overlap.json")}
    speech = {r["compressor"]: r for r in stored("plateau-blstm-an4.jsonl")}
    wrong = {n: f"{100 * r['character_error_rate']:.1f}" for n, r in speech.items()}

    def first_pass(name: str) -> int:
        trials = speech[name]["evaluations"]
        return next(i for i, r in enumerate(trials, 1) if r["character_error_rate"] <= 0.55)

    return [
        (
            "VGG16 on CIFAR-10",
            f"{speed(vgg, 'sidco-e'):.2f} times dense, "
            f"{speed(vgg, 'sidco-e', 'torch-topk'):.2f} times `torch.topk` and {against_dgc(vgg)} times DGC",
        ),
        ("VGG16 on CIFAR-10", f"more than {1 / (1 - share(vgg)):.1f} times"),
        (
            "Only SIDCo",
            f"{first_pass('sidco-e')} passes, top-k after {first_pass('topk')}, DGC after "
            f"{first_pass('dgc')} and dense after {first_pass('none')}; "
            f"at the end {wrong['sidco-e']}, {wrong['topk']}, {wrong['dgc']} and {wrong['none']} %",
        ),
        (
            "Only SIDCo",
            f"DGC sends {speech['dgc']['bytes'] / speech['topk']['bytes']:.1f} times the bytes of top-k, "
            f"SIDCo-E {speech['sidco-e']['bytes'] / speech['topk']['bytes']:.1f}",
        ),
        (
            "More is kept early",
            f"{early[steps[0], 'paper']:.1f} k at the first step, "
            f"{early[steps[2], 'paper']:.1f} at step {steps[2]} and {early[steps[4], 'paper']:.1f} at step {steps[4]}",
        ),
        (
            "More is kept early",
            f"the corrected one {early[steps[0], 'corrected']:.1f} at the first",
        ),
        (
            "Sparser at step 10,000",
            f"{small_part[0]:.0f} % of the squared norm at step 100 and {large_part[0]:.0f} % at step 2,999",
        ),
        (
            "Sparser at step 10,000",
            f"from {small_part[1]:.0f} to {large_part[1]:.0f} times the mean magnitude",
        ),
        (
            "On a CPU",
            f"LSTM {speed(lstm, 'sidco-e', 'torch-topk'):.2f} times `torch.topk` and {against_dgc(lstm)} times DGC, "
            f"VGG16 {speed(vgg, 'sidco-e', 'torch-topk'):.2f} and {against_dgc(vgg)}, "
            f"ResNet-20 {speed(resnet, 'sidco-e', 'torch-topk'):.2f} and {against_dgc(resnet)}",
        ),
        ("GP keeps too much", f"at most {most:.1f} k"),
        (
            "On a GPU top-k is the slowest",
            f"E is {on_gpu('sidco-e', 26_000_000)} times as fast as `torch.topk` of 26 M elements at ratios 0.001, "
            f"0.01 and 0.1, and {on_gpu('sidco-e', 260_000_000)} of 260 M; DGC {on_gpu('dgc', 26_000_000)}, and "
            f"{on_gpu('dgc', 260_000_000)}",
        ),
        (
            "E is a little faster",
            f"{bench['sidco-e']:.2f}, {bench['sidco-gp']:.2f} and {bench['sidco-p']:.2f} times one read of the data",
        ),
        (
            "As accurate as SGD",
            f"accuracy {right('redsync')} %, quantised {right('redsync-quantised')}, dense {right('none')}",
        ),
        (
            "As accurate as SGD",
            f"perplexity {words('redsync')}, quantised {words('redsync-quantised')}, dense {words('none')}",
        ),
        ("As accurate as SGD", f"{100 * statistics.fmean(warm):.0f} % of its bytes"),
        (
            "Selections of 16",
            f"{overlap[16]['build_up']:.1f} k with 16 workers, {overlap[8]['build_up']:.1f}, "
            f"{overlap[4]['build_up']:.1f} and {overlap[2]['build_up']:.1f} with 8, 4 and 2",
        ),
        ("Selections of 16", f"{100 * overlap[16]['density']:.2f} % of all elements"),
        (
            "Traffic and unpacking",
            f"{more('topk', 4)} and {more('topk', 8)} times the bytes with four and eight workers",
        ),
        ("Traffic and unpacking", f"a dense ring {more('none', 4)} and {more('none', 8)}"),
        ("Traffic and unpacking", "takes {:.1f} and {:.1f} times".format(*unpacking())),
        (
            "On few nodes",
            f"{ms('redsync-quantised', 'step')} ms a step and {ms('redsync', 'step')} unquantised, of which selecting "
            f"{ms('redsync-quantised', 'select', 1)} and {ms('redsync', 'select', 1)}",
        ),
        (
            "Top-k, hard",
            f"{union['topk', 8]:.2f}, of SIDCo-E {union['sidco-e', 8]:.2f}, of CLT-k {union['cltk', 8]:.2f} and of "
            f"MiCRO {union['micro', 8]:.2f}",
        ),
        (
            "Top-k, hard",
            f"a fixed threshold keeps {', '.join(hard[:-1])} and {hard[-1]} k, the SIDCo rules "
            f"{span(sidco)}",
        ),
        (
            "Top-k, hard",
            f"SIDCo-E takes {bench['sidco-e']:.1f} reads of the data, exact selection {bench['exact']:.1f}, MiCRO "
            f"{bench['micro']:.1f}",
        ),
        ("Top-k, hard", f"CLT-k {right('cltk')} %, top-k {right('topk')}"),
        (
            "As fast as SGD after",
            f"{rate[0.1]['bound'] / rate[0.1]['bound_dense']:.1f} and "
            f"{rate[0.01]['bound'] / rate[0.01]['bound_dense']:.0f} times that of dense training",
        ),
        (
            "As fast as SGD after",
            f"{rate[0.1]['weighted']:.4f} and {rate[0.01]['weighted']:.4f}",
        ),
        (
            "More accurate than signSGD",
            f"Marsit {right('marsit')} %, signSGD {right('signsgd')}, EF-signSGD {right('ef-signsgd')}, dense "
            f"{right('none')}",
        ),
        (
            "More accurate than signSGD",
            f"perplexity {words('marsit')}, {words('signsgd')} and dense {words('none')}",
        ),
        (
            "More accurate than signSGD",
            f"500 steps: Marsit {at_own['marsit']} %, signSGD {at_own['signsgd']}, dense {at_own['none']}",
        ),
        (
            "Hardly less accurate the rarer",
            f"{listed(full, 'marsit', 'every', lambda r: r['accuracy'])} %",
        ),
        ("1.5 times as fast", f"{to_loss(lstm, 'marsit'):.1f} times"),
        (
            "1.5 times as fast",
            f"after {until('marsit', targets[0]):.0f} s, dense after {until('none', targets[0]):.0f}",
        ),
        (
            "A torus takes less",
            f"{ring['torus', 270_000]} and {ring['torus', 4_500_000]} times a dense all-reduce, a ring "
            f"{ring['ring', 270_000]} and {ring['ring', 4_500_000]}",
        ),
        (
            "The least time in",
            f"{taken['marsit']} ms, signSGD {taken['signsgd']}, EF-signSGD {taken['ef-signsgd']}",
        ),
        (
            "Faster than single-layer",
            f"{slower[2]}, {slower[4]} and {slower[8]} of top-k's time with 2, 4 and 8 workers",
        ),
    ]


def wrong(name: str, unit: str = "") -> str:
    """Return the test images that trainings by batch size get wrong, from the smallest batch on."""
    return listed(stored("batch_sizes.jsonl"), name, "batch", lambda r: 1 - r["accuracy"]) + unit


def facts() -> list[tuple[str, str]]:
    """Return how a claim begins, and what its row must say."""
    bench = {
        r["compressor"]: r
        for r in stored("bench.json")
        if (r["numel"], r["ratio"], r["threads"]) == (26_000_000, 0.001, 1)
    }
    faster = {name: f"{r['speedup']:.1f}" for name, r in bench.items()}
    lstm, vgg, resnet = WORKLOADS
    convergence = {r["compressor"]: r for r in stored(f"convergence-{resnet}.jsonl")}
    loss = {name: f"{r['loss']:.2f}" for name, r in convergence.items() if "loss" in r}
    loopback = {r["compressor"]: r for r in stored(f"times-{resnet}.jsonl")}
    perplexity = {
        r["compressor"]: f"{r['perplexity']:.0f}" for r in stored(f"convergence-{lstm}.jsonl")
    }
    delta = stored("delta.json")
    above = [r for r in delta if r["delta"] > 1]
    union = {(r["compressor"], r["nproc"]): r["build_up"] for r in stored("build_up.json")}
    tables = lags_table(stored("lags.jsonl"))
    equal = [
        float(r) for r in re.findall(r"^\| \d+ \| [\d.]+ \| ([\d.]+) \(", tables, re.MULTILINE)
    ]
    lags = [
        (r["bytes"] / runs(w)["topk"]["bytes"], speed(w, "lags", "topk"))
        for w in WORKLOADS
        for r in [runs(w)["lags"]]
    ]
    plain, fed = (
        [r["line"] for r in theory("decay", trace=trace, kind="gradient") if r["of"].isdigit()]
        for trace in ("resnet20.zarr", "resnet20-ef.zarr")
    )
    ours = [r["p"] for r in theory("decay", trace="resnet20.zarr") if r["of"].isdigit()]
    ends = [r["ends"] for r in theory("decay", trace="resnet20.zarr") if r["of"].isdigit()]
    corrected = [r["line"] for r in theory("decay", kind="corrected")]
    laplace = theory("decay", of="laplace")[0]
    kept = {(r["name"], r["rule"], r["feedback"]): r for r in theory("tolerance")}
    adapted = [r["kept"] for r in theory("tolerance", rule="corrected")]
    matching = {(r["name"], r["form"]): r for r in theory("signs")}
    fixed = {
        name: statistics.fmean(r["loss"] for r in theory("equal", name=name))
        for name in ("none", "topk", "lags")
    }
    marsit = [1 - 1 / speed(w, "marsit") for w in WORKLOADS]
    selecting = [100 * r["select"] / r["seconds"] for w in WORKLOADS for r in [runs(w)["micro"]]]
    micro, exact = (
        {
            n: span(
                (
                    1e3 * r["select"]
                    for r in stored("validation.jsonl")
                    if (r["compressor"], r["nproc"]) == (name, n)
                ),
                ".1f",
            )
            for n in (2, 4)
        }
        for name in ("micro", "topk")
    )
    least = min(
        min(r["bound"], r["bound_kept"], r["bound_contraction"]) / r["least"]
        for r in theory("convergence")
    )

    others = f"top-k {right('topk')}, dense {right('none')}"

    def taken(name: str) -> str:
        return span(
            (100 * runs(w)[name]["select"] / runs(w)[name]["seconds"] for w in (lstm, vgg)), ".1f"
        )

    return [
        (
            "Training 41.7",
            f"{to_loss(lstm, 'sidco-e'):.1f} times dense, "
            f"{to_loss(lstm, 'sidco-e', 'torch-topk'):.2f} times `torch.topk`, "
            f"{against_dgc(lstm, to_loss=True)} times DGC",
        ),
        (
            "Highest throughput",
            f"{speed(lstm, 'sidco-e'):.1f}, {speed(lstm, 'sidco-e', 'torch-topk'):.2f} and "
            f"{against_dgc(lstm)} times",
        ),
        ("Highest throughput", f"1/(1 − {share(lstm):.4f}) = {1 / (1 - share(lstm)):.1f}"),
        (
            "Gradients are compressible",
            f"$p$ = {span(plain)} at every step without error feedback and {span(fed)} with it",
        ),
        ("Gradients are compressible", f"{span(corrected)} of corrected gradients"),
        ("Gradients are compressible", f"falls from {ends[0]:.2f} to {ends[-1]:.2f}"),
        ("Gradients are compressible", f"Laplace noise has {laplace['line']:.2f}"),
        ("Gradients are compressible", f"the largest 1 % have {span(ours)}"),
        ("$\\hat k/k", f"E, GP and P keep {span(adapted)} of k"),
        ("$\\hat k/k", f"{kept['threshold:dgc', '', True]['kept']:.2f} for DGC"),
        (
            "$\\hat k/k",
            f"E is within 20 % in {100 * kept['sidco-e', 'corrected', True]['within']:.0f} % of the "
            "steps with error feedback",
        ),
        (
            "$\\hat k/k",
            f"GP and P in {100 * kept['sidco-p', 'corrected', True]['within']:.0f} to "
            f"{100 * kept['sidco-gp', 'corrected', True]['within']:.0f} %",
        ),
        (
            "Stages adapt",
            f"the published adaptation keeps {kept['sidco-e', 'paper', False]['kept']:.1f} k",
        ),
        (
            "RedSync and GaussianK",
            f"RedSync {kept['threshold:redsync', '', True]['kept']:.2f} and GaussianK "
            f"{kept['gaussiank', '', True]['kept']:.2f} of k",
        ),
        ("Threshold estimation", f"{faster['sidco-e']} times faster than `torch.topk`"),
        ("Threshold estimation", f"exact selection {faster['exact']}"),
        ("DGC is slower", f"DGC {faster['dgc']} times"),
        ("Trimmed top-k", f"{faster['redsync-trimmed']} times faster"),
        (
            "1.16 to 4.72",
            f"{speed(lstm, 'redsync-quantised'):.1f} (LSTM), {speed(vgg, 'redsync-quantised'):.2f} and unquantised "
            f"{speed(vgg, 'redsync'):.2f} (VGG16)",
        ),
        (
            "0.66 to 0.94",
            f"{loopback['none']['step'] / loopback['redsync-quantised']['step']:.2f} and "
            f"{loopback['none']['step'] / loopback['redsync']['step']:.2f} (ResNet-20 over loopback)",
        ),
        (
            "Quantising",
            f"{convergence['redsync-quantised']['bytes']:,.0f} bytes a step, "
            f"{convergence['topk']['bytes']:,.0f} of top-k; "
            f"loss {loss['redsync-quantised']} and {loss['topk']}",
        ),
        ("A threshold can be reused", f"k̂/k {convergence['redsync']['quality']:.2f} live"),
        (
            "No gradient build-up",
            f"{union['topk', 8]:.2f} with eight workers, MiCRO's {union['micro', 8]:.2f}",
        ),
        ("Selection at near-zero", f"{span(selecting)} % of a step"),
        (
            "Selection at near-zero",
            f"{micro[2]} ms with two workers and {micro[4]} with four, exact selection {exact[2]} and {exact[4]}",
        ),
        (
            "Faster than single-layer",
            f"{span((b for b, _ in lags), '.2f')} times the bytes of top-k",
        ),
        ("Faster than single-layer", f"{span(s for _, s in lags)} times as fast"),
        ("Faster than single-layer", f"[{span(equal)} of the time]"),
        (
            "The same convergence",
            f"losses {fixed['lags']:.2f}, {fixed['topk']:.2f} and dense {fixed['none']:.2f}",
        ),
        ("Assumption 1", f"{len(delta) - len(above):,} of {len(delta):,} cases"),
        ("Assumption 1", f"at most {max(r['numel'] for r in above)} elements"),
        (
            "Assumption 1",
            "In VGG16 and the LSTM of PTB in {} and {}".format(
                *map(at_most_one, delta_models().values())
            ),
        ),
        ("Hardly any loss", f"LAGS {perplexity['lags']}, top-k {perplexity['topk']}"),
        (
            "Up to 35",
            f"{100 * marsit[0]:.0f} % less at {100 * share(lstm):.0f} % communication, {100 * marsit[1]:.0f} % less at "
            f"{100 * share(vgg):.0f} %, {-100 * marsit[2]:.0f} % more at {100 * share(resnet):.0f} %",
        ),
        (
            "Cascading matches",
            f"cascading {100 * matching['cascading', '']['matching_rate']:.0f} % until it diverges, Marsit "
            f"{100 * matching['marsit', '']['matching_rate']:.0f} %",
        ),
        ("Training 41.7", f"{runs(lstm)['torch-topk']['select']:.1f} s of a step"),
        (
            "The same accuracy as top-k",
            f"E {right('sidco-e')} %, GP {right('sidco-gp')}, P {right('sidco-p')}, {others}",
        ),
        ("Outstanding", f"MiCRO {right('micro')} %, {others}"),
        ("The same convergence", f"LAGS {right('lags')} %, {others}"),
        ("The accuracy of dense", f"Marsit {right('marsit')} %, dense {right('none')}"),
        ("Hardly any loss", f"LAGS {right('lags')} %, dense {right('none')}"),
        ("No loss of accuracy as", f"error {wrong('redsync', ' %')}"),
        (
            "No loss of accuracy as",
            f"quantised {wrong('redsync-quantised')}, dense {wrong('none')}",
        ),
        ("1.16 to 4.72", f"{taken('redsync-quantised')} % of the step"),
        ("Up to 35", f"{taken('marsit')} % of the steps"),
        ("The rate of SGD", f"by a factor of {least:.0f} and more"),
    ]


def claims() -> list[str]:
    """Return the rows of the tables of claims."""
    rows = re.findall(r"(?m)^\| (?!claim|system|---|`)(.*) \|$", PAGE.read_text(encoding="utf-8"))
    return [" ".join(row.split()) for row in rows]


def test_every_claim_has_the_numbers_of_the_results():
    for begin, fact in [*facts(), *paper_rows()]:
        (row,) = [row for row in claims() if row.startswith(begin)]
        assert " ".join(fact.split()) in row


def test_the_tables_are_those_of_the_results():
    for (page, mark), text in tables().items():
        shown = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert block(mark, text) in shown, (page, mark)


def delta_models() -> dict[str, list[float]]:
    """Return LAGS-SGD's δ of every layer and step in VGG16 and the LSTM."""
    rows = stored("delta_models.json")
    return {
        w: [r["delta"] for r in rows if r["workload"] == w] for w in ("vgg16-cifar10", "lstm-ptb")
    }


def at_most_one(deltas: list[float]) -> str:
    return f"{sum(d <= 1 for d in deltas)} of {len(deltas)}"


def parts_of(workload: str, quantise: bool) -> dict[int, Row]:
    """Return the times of RedSync's parts in a training, by the number of workers."""
    rows = stored("parts.jsonl")
    case = workload, quantise
    return {r["workers"]: r for r in rows if (r["workload"], r["quantise"]) == case}


def unpacking() -> list[float]:
    """Return the time of unpacking of four and eight workers over that of two, in VGG16."""
    rows = parts_of("vgg16-cifar10", quantise=False)
    return [rows[n]["unpack"] / rows[2]["unpack"] for n in (4, 8)]


def worst_of_a_formula() -> str:
    """Return what the atlas says of the rule whose worst case is best, of gradients and of all kinds."""
    rows = stored("atlas.jsonl")
    worst = []
    for kinds in (("gradient", "corrected"), {r["kind"] for r in rows}):
        best = worst_cases([r for r in rows if r["kind"] in kinds])[0]
        assert best["estimator"] == "sidco-p"
        worst.append(f"{best['worst']:.2f}")
    return f"a factor of {worst[0]}. With updates and pseudo-gradients it is a factor of {worst[1]}"


def sentences() -> list[tuple[str, str]]:
    """Return sentences of other pages whose numbers are those of a table or of the results."""
    bench = {
        r["compressor"]: r["streams"]
        for r in stored("bench.json")
        if (r["numel"], r["ratio"], r["threads"]) == (26_000_000, 0.001, 1)
    }
    sizes = {(r["compressor"], r["numel"]): r["streams"] for r in stored("bench_sizes.json")}

    def of_size(numel: int, *names: str) -> str:
        return ", ".join(f"{name} {sizes[name, numel]:.2g}" for name in names)

    hook = {r["hook"]: r["ratio"] for r in stored("hook_overhead.json")}
    sparse = [hook[n] for n in ("topk", "warm-exact", "sidco-e", "sidco-gp", "dgc", "micro")]
    ended = [statistics.fmean(r["losses"][-LAST:]) for r in runs("vgg16-cifar10").values()]
    lstm = next(iter(WORKLOADS))
    compute = stored(f"network-{lstm}.jsonl")[0]["compute"]
    alone = [f"{compute / runs(lstm)[n]['seconds']:.2f}" for n in ("topk", "warm-exact")]
    grew = {(r["compressor"], r["nproc"]): r for r in stored("growth.jsonl")}

    def grown(name: str, field: str = "bytes") -> str:
        return f"{grew[name, 8][field] / grew[name, 2][field]:.1f} times"

    assert grown("cltk") == grown("marsit")
    resnet = "resnet20-cifar10"
    waiting = stored(f"network-{resnet}.jsonl")[0]["compute"]
    ones = {r["pass"]: r["one"] for r in stored("primitives.json")}
    passes = {name: f"{one / ones['torch.sum, one stream']:.1f}" for name, one in ones.items()}
    sketched = stored("trace_sizes.json")[0]["bytes"]
    streams = [
        (
            "concepts/thresholds",
            f"`{r['compressor']}` | {r['streams']:#.3g} | {r['quality']:#.3g} |",
        )
        for r in stored("bench.json")
        if r["ratio"] == 0.001 and r["compressor"] in IN_SHORT
    ]
    selected = " / ".join(passes[f"select {ratio}"] for ratio in (0.001, 0.01, 0.1))
    small = [r for r in stored("bench_models.json") if r["ratio"] == 0.001]
    found = {(r["gradient"], r["compressor"]): r for r in small}
    vgg, large = "vgg16-cifar10", "lstm-ptb"
    exact = [f"{found[model, 'exact']['speedup']:.0f}" for model in (vgg, large)]
    rules = ("sidco-e", "sidco-gp", "sidco-p")
    (alike,) = {f"{found[vgg, rule]['speedup']:.0f}" for rule in rules}
    speeds, kept = (sorted(found[large, r][f] for r in rules) for f in ("speedup", "quality"))
    most = max(r["seconds"] / r["seconds_best"] for r in small)
    deltas = delta_models()
    below = {name: at_most_one(found) for name, found in deltas.items()}
    plain, signed = (parts_of(vgg, quantise) for quantise in (False, True))
    slower = [signed[n]["select"] / plain[n]["select"] for n in plain]
    eight = plain[8]
    of_words = [r for quantise in (False, True) for r in parts_of(large, quantise).values()]
    share = 100 * eight["unpack"] / sum(eight[part] for part in PARTS)
    return [
        (
            "measurements",
            f"selection is {exact[0]} times as fast in VGG16 and {exact[1]} times in the LSTM",
        ),
        (
            "measurements",
            f"SIDCo are {alike} times as fast in VGG16 and {speeds[0]:.0f} to {speeds[-1]:.0f} times",
        ),
        ("measurements", f"they keep {kept[0]:.2f} to {kept[-1]:.2f} of k"),
        ("measurements", f"medians of seven rounds, and up to {most:.1f} times the least of them"),
        *streams,
        (
            "measurements",
            f"`moments` ≤ 4 ({passes['moments, no logarithms']}), `histogram` ≤ 5.5 ({passes['histogram, 7 bits']} "
            f"with 7 bits, {passes['histogram, 10 bits']} with 10), `select` ≤ 2.5 / 3.5 / 8 at 0.001 / 0.01 / 0.1 "
            f"({selected})",
        ),
        ("choose", worst_of_a_formula()),
        (
            "claims",
            "there is nothing to save, cells lie between "
            + span(speed(resnet, name) for name in SHOWN if name in runs(resnet)).replace(
                " to ", " and "
            ),
        ),
        ("statistics", f"{sketched / 1e3:.0f} kB a step for ResNet-20 instead of"),
        ("glossary", f"stand for a gradient; {sketched / 1e3:.0f} kB for ResNet-20"),
        ("measurements", f"with three stages and selection ≤ 9 ({bench['sidco-e']:.1f})"),
        ("measurements", f"warm-started exact with selection ≤ 4 ({bench['warm-exact']:.1f})"),
        (
            "measurements",
            of_size(260_000_000, "exact", "warm-exact", "histogram", "sidco-e", "dgc", "hard"),
        ),
        ("measurements", of_size(260_000, "exact", "warm-exact", "histogram", "sidco-e", "hard")),
        ("network", f"{span(sparse)} times the time of a dense all-reduce"),
        (
            "network",
            f"{span(r['seconds'] / waiting for r in runs(resnet).values())} times as long as those without",
        ),
        ("network", f"a dense step takes {grown('none', 'seconds')} as long"),
        ("network", f"grow with every worker ({grown('topk')} from two to eight)"),
        ("network", f"about as the ring does ({grown('cltk')})"),
        (
            "network",
            "add up to "
            f"{span((n * grew['micro', n]['quality'] for n in (2, 4, 8)), '.1f')} k with any number",
        ),
        ("network", f"its bytes grow {grown('micro')}"),
        ("systems", f"sparse systems take {span(sparse)} times as long as PyTorch's dense"),
        ("systems", f"PowerSGD's hook {hook['PowerSGD']:.2f} times"),
        (
            "systems",
            f"in VGG16 {unpacking()[1]:.1f} times from two to eight, to {share:.0f} % of these parts",
        ),
        (
            "systems",
            f"RedSync keeps {span((r['quality'] for r in of_words), '.0f')} k, and unpacks",
        ),
        ("systems", f"their selection takes {span(slower, '.1f')} times as long"),
        ("systems", f"holds in {below[vgg]} and {below[large]} cases"),
        ("systems", f"cases; largest are {max(deltas[vgg]):.3f}"),
        ("systems", f"of 512 elements, and {max(deltas[large]):.3f}"),
        (
            "systems",
            "the medians are {:.3f} and {:.3f}".format(*map(statistics.median, deltas.values())),
        ),
        ("network", f"losses lie from {span(ended)}, and chance is ln 10 = {math.log(10):.2f}"),
        ("network", f"noise alone: {' and '.join(alone)} times the steps without an exchange"),
    ]


def test_sentences_of_other_pages_have_the_numbers_of_their_tables():
    for page, sentence in sentences():
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert sentence in " ".join(text.split()), sentence


def test_every_claim_has_one_answer():
    rows = [row.split(" | ") for row in claims()]
    assert len(rows) > 20
    for claim, answer, *_ in rows:
        assert answer in ANSWERS, claim
    assert len({claim for claim, *_ in rows}) == len(rows)


if __name__ == "__main__":
    if "--write" in sys.argv:
        for (page, mark), text in tables().items():
            put(ROOT / "docs" / f"{page}.md", mark, text)
    for begin, fact in [*facts(), *paper_rows(), *sentences()]:
        print(f"{begin} …: {fact}")
