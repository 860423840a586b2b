"""The page of the atlas, made of its records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradstats.analysis.atlas import LAGS, claims, components, reused, worst_cases
from gradstats.analysis.rules import COUNTING
from gradstats.tables import format_short, format_value, render

__all__ = ["atlas_page"]

_KINDS = ("gradient", "corrected", "update", "pseudogradient")

_HEAD = """# An atlas of gradients

What gradients of small trainings are like, of {trainings} kinds of models under {optimizers}: {pieces} of {all}
trainings are measured. `gradstats atlas --data-dir DIR --out docs/results --page docs/atlas.md` trains what is
missing, a piece at a time, adds it to `docs/results/atlas.jsonl` and `docs/results/atlas-steps.jsonl`, and writes this
page; `--only gpt-pydoc/sgd` runs one piece. Traces are rebuilt, not stored.

Each training is a [workload](workloads.md) of two ranks, {steps} steps long, with top-k at ratio 0.01 and error
feedback, from one seed. Steps 6 to 9, 30 to 33 and 56 to 59 are captured whole on both ranks: the gradient, the
gradient plus what was not sent before (`corrected`, to which a threshold is applied), and the optimizer's update,
which is the same on all ranks. Sketches of every step come from a second training, alike. Pseudo-gradients are those of
a third, DiLoCo with an exchange every five steps, of which exchanges 1 and 2, 5 and 6, and 10 and 11 are captured.
`sgd` has momentum 0.9; `adamw-bf16` is AdamW behind a forward pass in bfloat16 (autocast). Learning rates are not
tuned. Muon trains matrices, and AdamW the rest: nearly all of the networks with convolutions ([shares](losses.md)).

These are short trainings of small models, of one seed each, behind one compressor: they say how much gradients
differ, not what yours is like.
"""

_READ = """\
Medians over the three phases. `tail error`: the law that is closest, fitted at one step, puts the threshold of the
next step off by this factor at the worst of the ratios 0.1, 0.01 and 0.001; the law is the one that is closest in
most phases (one fit a layer where it says so). ξ is the shape of the tail beyond the largest 10, 1 and 0.1 % of the
elements that are not zero, as far as there are enough; energy the share of the squares in the largest 1 and 0.1 %; p
the exponent of compressibility; cosine that of the two ranks' vectors; noise scale in samples (– where the signal is
not told from zero); bits those of the smallest format with an error below 1 %.
"""


def atlas_page(
    records: Sequence[Mapping[str, Any]],
    series: Sequence[Mapping[str, Any]],
    pieces: Sequence[str],
    steps: int,
) -> str:
    """Return the page of the atlas as Markdown.

    Parameters
    ----------
    records : sequence of mapping
        Records of :func:`gradstats.analysis.atlas.atlas_records`, with piece, training, optimizer, rate, first_loss and
        last_loss.
    series : sequence of mapping
        Records of :func:`gradstats.analysis.atlas.step_records`, with piece.
    pieces : sequence of str
        All pieces that there could be, as ``training/optimizer``.
    steps : int
        Steps of each training.

    Returns
    -------
    str
        The page, which lists the pieces that have no records.
    """
    # in the order of the list of pieces, not of the file: pieces are measured in any order
    done = [piece for piece in pieces if any(r["piece"] == piece for r in records)]
    missing = [piece for piece in pieces if piece not in done]
    trainings = list(dict.fromkeys(piece.split("/")[0] for piece in done))
    parts = [
        _HEAD.format(
            trainings=len(trainings),
            optimizers=", ".join(f"`{o}`" for o in dict.fromkeys(p.split("/")[1] for p in done)),
            pieces=len(done),
            all=len(pieces),
            steps=steps,
        ),
        f"**Not measured:** {_grouped(missing)}.",
        "## Trainings",
        _markdown([_training(piece, records) for piece in done]),
        "Losses are the means of the first and the last tenth of the steps.",
    ]
    for kind in _KINDS:
        each = {p: [r for r in records if (r["piece"], r["kind"]) == (p, kind)] for p in done}
        rows = [_one(piece, mine) for piece, mine in each.items() if mine]
        parts += [f"## Kind `{kind}`", _READ if kind == _KINDS[0] else "", _markdown(rows)]
    parts += _over_time([r for p in done for r in series if r["piece"] == p])
    parts += _rules(records)
    parts += _claims(records, series)
    # the same optimizer in fewer bits is no draw of another
    parts += _spread([r for r in records if not r["optimizer"].endswith("-bf16")])
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _grouped(pieces: Sequence[str]) -> str:
    by: dict[str, list[str]] = {}
    for piece in pieces:
        training, optimizer = piece.split("/")
        by.setdefault(optimizer, []).append(f"`{training}`")
    return "; ".join(f"under `{o}` {', '.join(t)}" for o, t in by.items()) or "nothing"


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    return render(rows, "markdown") if rows else "Nothing is measured yet."


def _training(piece: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    one = next(r for r in records if r["piece"] == piece)
    names = ("training", "optimizer", "rate", "first_loss", "last_loss")
    row = {n.replace("_", " "): one[n] for n in names} | {"parameters": f"{one['numel']:,}"}
    return {"learning rate" if n == "rate" else n: value for n, value in row.items()}


def _middle(values: Sequence[float | None]) -> float | None:
    # None where a number has no meaning, as the cosine of a kind that all ranks share
    known = [v for v in values if v is not None and not math.isnan(v)]
    return float(np.median(known)) if known else None


def _one(piece: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of one piece and kind."""
    # a law is the same in a phase only if it is fitted in the same way, once or by layer
    laws = Counter(r["law"] + (" by layer" if r["by_layer"] else "") for r in rows if r["law"])
    law, times = laws.most_common(1)[0] if laws else ("–", 0)
    error = _middle([r["tail_error"] for r in rows])
    forms = Counter(r["format"] or "none" for r in rows)
    row: dict[str, Any] = {
        "training": piece,
        "law": f"{law}, {times} of {len(rows)}",
        # errors are logarithms in the records and factors on the page
        "tail error": None if error is None else float(np.exp(error)),
    }
    # keys of JSON are texts
    for share in ("0.1", "0.01", "0.001"):
        row[f"ξ {100 * float(share):g} %"] = _middle([r["xi"].get(share) for r in rows])
    for share in ("0.01", "0.001"):
        row[f"energy {100 * float(share):g} %"] = _middle([r["energy"][share] for r in rows])
    row |= {n: _middle([r[n] for r in rows]) for n in ("zeros", "p")}
    # kinds that all ranks share have no such columns
    if any(r["cosine"] is not None for r in rows):
        row |= {"cosine": _middle([r["cosine"] for r in rows])}
        row |= {"noise scale": _middle([r["noise_scale"] for r in rows])}
    bits = format_value(_middle([r["bits"] for r in rows]))
    return row | {"bits": f"{bits} ({forms.most_common(1)[0][0]})"}


def _over_time(series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is said of thresholds from step to step."""
    mine = [r for r in series if r["kind"] == "corrected"]
    if not mine:
        return []
    reuse = reused(mine)
    shown = {
        (r["piece"], f"{r['ratio']:g}, {r['lag']} before"): f"{r['median']:.2f} ({r['high']:.2f})"
        for r in reuse
        if r["lag"] == 1 or r["ratio"] == 0.01
    }
    columns = list(dict.fromkeys(column for _, column in shown))
    rows = []
    for record in mine:
        # from tenth to tenth of the steps, as losses are
        few = max(len(record["rms"]) // 10, 1)
        first, last = (
            float(np.median(part)) for part in (record["rms"][:few], record["rms"][-few:])
        )
        growth = {"training": record["piece"], "rms, last ÷ first": last / first if first else None}
        rows.append(growth | {name: shown.get((record["piece"], name)) for name in columns})
    text = (
        "Over all steps, of `corrected`: the root mean square in the last tenth of the steps ÷ that in the first "
        "(medians), and by which factor the exact threshold is off that of 1, 5 or 20 steps before, by ratio. Half of "
        "the steps stay within the first number, 95 % within the one in brackets."
    )
    if old := [r for r in reuse if r["lag"] == LAGS[1]]:
        worst = max(old, key=lambda r: r["high"])
        text += (
            " RedSync uses a threshold for five steps: in the worst training 95 % of the steps stay within a factor of "
            f"{worst['high']:.2f} (`{worst['piece']}`, ratio {worst['ratio']:g})."
        )
    return [
        "## From step to step",
        text,
        _markdown(rows),
    ]


def _rules(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is said of rules: k̂/k at three ratios, and the worst cases."""
    rows = []
    for rule in dict.fromkeys(name for r in records for name in r["rules"]):
        row: dict[str, Any] = {"rule": rule}
        for ratio in ("0.1", "0.01", "0.001"):
            here = [q[ratio] for r in records if ratio in (q := r["rules"].get(rule, {}))]
            if here:
                # k̂/k is a factor, so its middle is that of the logarithms
                typical = float(np.exp(np.median(np.log(here))))
                row[ratio] = (
                    f"{typical:.2f} ({format_short(min(here))} to {format_short(max(here))})"
                )
        rows.append(row)
    # counting rules come first: the text below speaks of the first four
    rows.sort(key=lambda r: (r["rule"] not in COUNTING, r["rule"]))
    parts = [
        "## Rules",
        "k̂/k of every rule, the geometric mean over the four steps of a phase: the median over trainings, kinds and "
        "phases, and the smallest and largest. A rule with a memory begins anew in each phase. The first four count "
        "until they have k; below 1 they found fewer elements that are not zero.",
        _markdown(rows),
    ]
    judged = worst_cases(records)
    if not judged:
        return parts
    count = judged[0]["trainings"]
    chosen = [r for r in judged if r["chosen"]]
    # the worst of the choices, each on the training that it was made without
    held = max((r["held_out"] for r in chosen), default=None)
    sentence = (
        f"Of the rules that estimate, `{judged[0]['estimator']}` has the best worst case over {count} kinds of "
        "training, all optimizers, kinds, phases, and ratios that have k elements: a factor of "
        f"{format_value(judged[0]['worst'])} from k, in `{judged[0]['where']}`."
    )
    if held is not None:
        names = ", ".join(f"`{r['estimator']}` ({r['chosen']} of {count})" for r in chosen)
        sentence += (
            f" With each training left out in turn, the choice is {names}; at worst it is a factor of "
            f"{format_value(held)} from k on the training that it was made without."
        )
    columns = {
        "estimator": "rule", "worst": "worst factor", "where": "in", "median": "median factor",
        "low": "median, low", "high": "median, high", "chosen": "chosen", "held_out": "held out",
    }  # fmt: skip
    shown = [{new: r[old] for old, new in columns.items()} for r in judged]
    return [*parts, "### Whose worst case is best", sentence, _markdown(shown)]


_CLAIMS = {
    "compressible": "gradients are compressible, p > ½ (SIDCo, property 1)",
    "sidco-e": "SIDCo-E keeps 0.8 to 1.25 k (SIDCo, whose ε is 0.2)",
    "sidco-gp": "SIDCo-GP does",
    "sidco-p": "SIDCo-P does",
    "dgc": "DGC's sample does",
    "gaussiank": "GaussianK does, which SIDCo says it does not",
    "redsync": "RedSync's search keeps k to 2 k (RedSync, algorithm 3)",
    "reuse": "a threshold five steps old is within a quarter, in 95 % of the steps (RedSync, algorithm 5, uses it)",
}


def _claims(records: Sequence[Mapping[str, Any]], series: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is said of the papers' claims."""
    tallies = claims(records, series)
    rows = []
    for claim, text in _CLAIMS.items():
        for kind in _KINDS[:2]:
            row: dict[str, Any] = {"claim": text, "kind": kind} | dict.fromkeys(
                ("any", "0.1", "0.01", "0.001"), "–"
            )
            for r in tallies:
                if (r["claim"], r["kind"]) == (claim, kind):
                    column = "any" if math.isnan(r["ratio"]) else f"{r['ratio']:g}"
                    row[column] = f"{r['holds']} · {r['depends']} · {r['fails']}"
            if any(row[column] != "–" for column in list(row)[2:]):
                rows.append(row)
    return [
        "## Where claims of the papers hold",
        "In how many of the trainings a claim holds in all phases · in some · in none, by ratio (`any`: it has none). "
        "Where exact top-k does not find k elements nothing is asked of a rule, and where the interval of p contains ½ "
        "nothing of a phase. [All claims](claims.md), with what they were compared with.",
        _markdown(rows),
    ]


def _spread(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is said of what varies."""
    rows = components(records)
    if not rows:
        return []
    shown = [
        {"kind": r["kind"], "level": r["level"], "variance": r["variance"]}
        | {"share": r["share"], "low": r["low"], "high": r["high"]}
        | {"trainings": r["trainings"], "shapes": r["values"]}
        for r in rows
    ]
    return [
        "## What varies",
        "Variance of ξ beyond the largest tenth of each layer, split over trainings, and in each of them over "
        "optimizers, phases and layers, which cross each other; the rest is what some of these have together, such as "
        "a layer under one optimizer, with the error of the fit. Trainings count that have two optimizers and two "
        "layers or more, with the layers that have a fit in all phases. Intervals of the shares are of 1,000 draws of "
        "trainings, from five trainings on; of so few they are too narrow. One training can have most of a variance.",
        _markdown(shown),
    ]
