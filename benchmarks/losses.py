"""What compression costs in loss: the atlas' trainings, dense and compressed, at equal steps.

    python benchmarks/losses.py [PIECE …] [--data-dir DIR] [--seeds N] [--systems NAME …] [--write]

A piece is a training and an optimizer of the atlas, such as gpt-pydoc/adamw. Each system is first trained from seed 0
at a third, once and three times the atlas' learning rate, with AdamW at nine times it, too, with Muon at three, nine
and 27 times; the best of them is its own, dense or compressed. Then it trains at that rate from the seeds 1 to N, which
are compared with dense training of the same seeds and batches: the rate is not judged where it was chosen. The loss is
the mean of the last quarter of the steps. Each run is stored in docs/results/losses.jsonl as soon as it ends, and is
not repeated, so the program can be interrupted; ``--seeds 0`` runs nothing. The table is printed at the end;
``--write`` also puts it into docs/losses.md, and what ``gradstats advise`` rests on into
gradstats/analysis/evidence.json: these runs, those to a plateau of the same trainings (benchmarks/plateau.py), and what
the atlas says of their gradients.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from records import RESULTS, ROOT, Row, by, command, complete, grid, show, stored
from scipy.stats import permutation_test, rankdata, sem, zscore
from scipy.stats import t as t_law

from capture.atlas import PIECES, settings_of
from capture.workloads import WORKLOADS, RunConfig, run
from capture.workloads.launch import RunFailedError
from capture.workloads.optimizers import make_optimizers
from gradstats.analysis.advise import (
    DIVERGED,
    NEAREST,
    TOLERANCE,
    choose,
    distances,
    mean_above,
)
from gradstats.analysis.verdicts.advised import FEWEST_ALIKE, setting_of, sparse_already
from gradstats.analysis.verdicts.trial import LITTLE
from gradstats.analysis.verdicts.verdict import joined
from gradstats.primitives.ratio import RATIOS
from gradstats.statistics.resampling import holm

FILE = RESULTS / "losses.jsonl"
PAGE = "losses.md"
EVIDENCE = ROOT / "gradstats" / "analysis" / "evidence.json"
STEPS = 120
WARM_UP = 12
"""Steps in which the rate rises; then it falls to zero with a cosine, so that the loss has settled."""
FACTORS = {
    "sgd": (0.3333333, 1.0, 3.0), "adamw": (0.3333333, 1.0, 3.0, 9.0), "muon": (3.0, 9.0, 27.0),
}  # fmt: skip
"""Multiples of the atlas' learning rate that are tried, by optimizer: with Muon it is far too small, with AdamW too
small for half of the trainings."""
BEYOND = 3.0
"""A further rate is so many times the largest of them; no setting trains at it, it says whether these end too early."""
LAST = 0.25
"""Share of the steps, at the end, whose mean loss is judged, as in :class:`gradstats.Trial`."""
DENSE = "dense"
EDGES = ((DENSE, 1.0), ("topk", 0.01))
"""Systems and ratios that train at :data:`BEYOND`, too."""
_PLATEAU = {"resnet8-cifar16/sgd": "resnet8-cifar16", "gpt-pydoc/adamw": "gpt-pydoc"}
"""Pieces that were trained to a plateau, too."""

# Settings of each system; the ratio is set where there is none.
SYSTEMS: dict[str, dict[str, Any]] = {
    DENSE: {"compressor": "none", "ratio": 1.0},
    "dense-bf16": {"compressor": "dense-bf16", "ratio": 1.0},
    "topk": {"compressor": "topk"},
    "sidco-p": {"compressor": "sidco-p"},
    "topk without feedback": {"compressor": "topk", "error_feedback": False},
    "dense-fp8": {"compressor": "dense-fp8", "ratio": 1.0},
    "topk of AdamW's steps": {"compressor": "topk", "adam_correction": True},
    "ef-signsgd": {"compressor": "ef-signsgd", "ratio": 1.0},
    "diloco": {"compressor": "none", "ratio": 1.0, "local_steps": 10, "outer": "diloco"},
    # its compressor is its own: 64 elements of each 4,096
    "sparseloco": {
        "compressor": "none", "ratio": 64 / 4096, "local_steps": 10, "outer": "sparseloco",
    },
}  # fmt: skip
PROPERTIES = {
    "energy_0.01": "energy of the largest 1 %",
    "energy_0.001": "energy of the largest 0.1 %",
    "zeros": "zeros",
    "cosine": "cosine of the ranks",
    "left": "dense loss, last ÷ first",
}
YARDSTICKS = {"loss": "the dense loss", "fall": "the fall of the dense loss"}
"""What a loss above dense is a share of."""
FEWEST = 5
"""Trainings below which no property is said to go with the loss."""
CORE = (DENSE, "topk", "dense-bf16", "dense-fp8")
OTHERS = (
    *("sidco-p", "topk without feedback", "topk of AdamW's steps"),
    *("ef-signsgd", "diloco", "sparseloco"),
)
"""Systems that are compared with top-k."""
BESIDE = {"ef-signsgd": (0.1, 0.01), "diloco": (0.1, 0.01), "sparseloco": (0.01, 0.001)}
"""The ratios of top-k beside systems that have none: those of the three whose bytes are nearest to theirs."""
APART = {2: 2.5, 3: 1.0}
"""How often the difference of their seeds two systems have to be apart, by the fewer seeds: of equal systems with
normal losses 5 of 100 pairs are; where the seeds of one differ far more, up to 13 with two seeds and 8 with three."""
PLACES = ("nearer", "untold", "farther")
"""Where a system may end beside top-k: nearer to dense, not told apart from it, or farther."""
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
UNTUNED = ("dense-bf16", "dense-fp8")
"""Systems that train at the dense rate: they send every element, with fewer bits."""


UNJUDGED = ("policy-cartpole",)
"""Trainings whose loss does not say how good the model is: a policy's is that of episodes which it chose itself."""
FELL = LITTLE * TOLERANCE
"""Least fall of a dense loss, as a share of where it ends, of a training that says something, as of a trial."""
SHARE = 0.1
"""Least share of the parameters that Muon trains, the rest being AdamW's, of a training that says something of Muon."""


def settings(
    piece: str, systems: Sequence[str], ratios: Sequence[float] = RATIOS
) -> Iterator[tuple[str, str, float]]:
    """Yield a piece with every system and ratio."""
    for system in systems:
        if "adam_correction" in SYSTEMS[system] and not piece.endswith("/adamw"):
            continue
        fixed = SYSTEMS[system].get("ratio")
        for ratio in ratios if fixed is None else (fixed,):
            yield piece, system, ratio


def factors(piece: str) -> tuple[float, ...]:
    """Return the multiples of the atlas' rate that a piece tries."""
    return FACTORS[piece.partition("/")[2]]


def edge_of(piece: str) -> float:
    """Return the multiple beyond them that says whether they end too early."""
    return BEYOND * max(factors(piece))


def trials(every: Sequence[tuple[str, str, float]]) -> Iterator[tuple[Any, ...]]:
    """Yield the cases that choose a learning rate."""
    for setting in every:
        if setting[1] not in UNTUNED:
            yield from ((*setting, factor, 0) for factor in factors(setting[0]))


def one(piece: str, system: str, ratio: float, factor: float, seed: int, data: Path | None) -> Row:
    """Train once, and return the row that is stored."""
    chosen = settings_of(piece, data) | {"steps": STEPS, "ratio": ratio, "seed": seed}
    chosen |= {"lr_schedule": "cosine", "lr_warm_up": WARM_UP, "label": ""} | SYSTEMS[system]
    rate = factor * RunConfig(**chosen).initial_learning_rate
    row: Row = {"piece": piece, "system": system, "ratio": ratio, "factor": factor, "seed": seed}
    row |= {"steps": STEPS, "rate": rate}
    try:
        result = run(RunConfig(**chosen | {"learning_rate": rate}))
    except RunFailedError as error:
        if "finite" not in str(error):
            raise
        # a training that diverges is a result
        return {**row, "problem": str(error)}
    quarter, tenth = max(1, round(LAST * STEPS)), max(1, STEPS // 10)
    row |= {"loss": statistics.fmean(result.losses[-quarter:])}
    row |= {"first": statistics.fmean(result.losses[:tenth])}
    if result.records:
        row["bytes"] = statistics.fmean(r["bytes_sent"] for r in result.records)
    return {k: round7(v) if isinstance(v, float) else v for k, v in row.items()}


def best_factor(rows: Sequence[Row], piece: str, system: str, ratio: float) -> float:
    """Return the factor of the rate with the lowest loss of seed 0."""
    if system in UNTUNED:
        system, ratio = DENSE, 1.0
    mine = [
        r for r in rows
        if (r["piece"], r["system"], r["ratio"], r["seed"]) == (piece, system, ratio, 0)
    ]  # fmt: skip
    ends = {r["factor"]: r.get("loss", math.inf) for r in mine}
    # a loss that is not finite is no candidate
    return min(
        factors(piece), key=lambda f: x if math.isfinite(x := ends.get(f, math.inf)) else math.inf
    )


def beyond(rows: Sequence[Row]) -> str:
    """Say in how many trainings seed 0 ended lower beyond the rates, and how that moved top-k beside dense."""
    losses = {
        by("piece", "system", "ratio", "factor", "seed")(r): r.get("loss", math.inf) for r in rows
    }

    def ends(piece: str, edge: tuple[str, float], *further: float) -> float:
        return min(losses[piece, *edge, factor, 0] for factor in (*factors(piece), *further))

    dense, topk = EDGES
    small: list[str] = []

    def counted(optimizer: str) -> list[int]:
        pieces = [
            piece for piece in PIECES
            if piece.endswith(f"/{optimizer}")
            and all((piece, *edge, edge_of(piece), 0) in losses for edge in EDGES)
        ]  # fmt: skip
        pairs = [
            [ends(p, topk, *more) / ends(p, dense, *more) - 1 for more in ((), (edge_of(p),))]
            for p in pieces
        ]
        lower = [
            sum(losses[p, *edge, edge_of(p), 0] < ends(p, edge) for p in pieces) for edge in EDGES
        ]
        if pieces and 2 * lower[0] >= len(pieces):
            small.append(OPTIMIZERS[optimizer])
        return [
            *(len(pieces), *lower),
            sum(a - b >= 0.01 for a, b in pairs),
            sum(b - a >= 0.01 for a, b in pairs),
            sum((a <= TOLERANCE) is not (b <= TOLERANCE) for a, b in pairs),
        ]

    # of each count one number for each optimizer, in their order
    of, dense_lower, topk_lower, nearer, away, crossed = (
        joined(map(str, counts)) for counts in zip(*map(counted, OPTIMIZERS), strict=True)
    )
    return (
        "At three times the largest rate, seed 0 of dense training ended lower than at any smaller one in "
        f"{dense_lower} of {of} trainings with {joined(OPTIMIZERS.values())}, that of `topk` at 0.01 in {topk_lower}. "
        "With that rate added for both, `topk` ended nearer to dense, by 1 % of its loss or more, "
        f"in {nearer}, farther in {away}, and crossed 2 % of it in {crossed}."
        + "".join(
            f" With {name} all are too small for half of the trainings or more: what is said here of its losses "
            "is of trainings that are slower than they have to be."
            for name in small
        )
    )


def round7(value: float) -> float:
    """Return a number as rows have it."""
    return float(f"{value:.7g}")


def trainings(losses: Sequence[Row], atlas: Sequence[Row]) -> list[Row]:
    """Return what each training cost in loss, and what its gradients are like, as advice takes them."""
    found: list[Row] = []
    for piece in PIECES:
        short = [*_short(losses, piece)]
        if not short:
            continue
        runs = [*short, *_plateau(piece)]
        training, optimizer = piece.split("/")
        # the atlas knows how wide a model is here; where it has not got to, the workload's own width is it
        known = [r["numel"] for r in atlas if r["piece"] == piece]
        numel = known[0] if known else WORKLOADS[training].parameters
        for setting in runs:
            sent = setting.pop("sent")
            # of what never ended well nothing is stored: a position is as large as a value
            setting["bytes"] = round7(sent / (4 * numel)) if sent else 2 * setting["ratio"]
        row = {"training": training, "optimizer": optimizer, "fell": _fell(losses, piece)}
        if optimizer == "muon":
            row |= {"share": share_of_muon(training)}
        found.append(row | {"properties": _properties(atlas, piece), "runs": runs})
    return found


def _fell(losses: Sequence[Row], piece: str) -> float:
    """Return how far a piece's dense loss fell, from its first tenth, as a share of where it ended: mean over seeds."""
    dense = (r for r in losses if (r["piece"], r["system"]) == (piece, DENSE) and r["seed"])
    return round7(statistics.fmean(r["first"] / r["loss"] - 1 for r in dense))


@cache
def share_of_muon(training: str) -> float:
    """Return the share of a training's parameters that Muon trains: AdamW does the rest."""
    # a model is made without its data
    config = RunConfig(**settings_of(f"{training}/muon", Path()))
    model = import_module(config.info.module).make_model(config)
    optimizers = make_optimizers(config, model)
    muon, *_ = (sum(p.numel() for g in o.param_groups for p in g["params"]) for o in optimizers)
    return round7(muon / sum(p.numel() for p in model.parameters() if p.requires_grad))


def telling(found: Sequence[Row]) -> list[Row]:
    """Return the trainings whose loss says something of their optimizer, which advice may rest on."""
    return [
        t for t in found
        if t["training"] not in UNJUDGED and t["fell"] >= FELL and t.get("share", 1.0) >= SHARE
    ]  # fmt: skip


def muon_said(found: Sequence[Row]) -> str:
    """Say of how much Muon has, by training."""
    known = sorted((t for t in found if "share" in t), key=lambda t: -t["share"])
    counted, others = (
        joined([f"`{t['training']}` ({100 * t['share']:.0f} %)" for t in known if (t["share"] >= SHARE) is side])
        for side in (True, False)
    )  # fmt: skip
    return (
        "Muon trains matrices, and AdamW what else a model has: embeddings, the output layer, kernels of convolutions. "
        f"Of the parameters it has most or many in {counted}; in {others} too few for these trainings to say what "
        "compression costs with Muon, and they are not counted."
    )


def _topk(training: Row, ratio: float, yardstick: str = "loss") -> float | None:
    """Return how far a short training with top-k and its memory ended above dense, mean over seeds."""
    for r in training["runs"]:
        if (r["rule"], r["memory"], r["ratio"], r["steps"]) == ("topk", "residual", ratio, STEPS):
            return mean_above(r["above"]) / (training["fell"] if yardstick == "fall" else 1.0)
    return None


def kept(found: Sequence[Row]) -> list[Row]:
    """Return in how many short trainings top-k stayed within the tolerance, by optimizer, yardstick and ratio."""
    rows = []
    for optimizer, yardstick in product(OPTIMIZERS, YARDSTICKS):
        row: Row = {"optimizer": optimizer, "yardstick": yardstick, "of": 0}
        for ratio in RATIOS:
            ended = [
                above for each in found
                if each["optimizer"] == optimizer
                and (above := _topk(each, ratio, yardstick)) is not None
            ]  # fmt: skip
            row |= {"of": max(row["of"], len(ended)), ratio: sum(x <= TOLERANCE for x in ended)}
        rows.append(row)
    return rows


def told(found: Sequence[Row]) -> str:
    """Say in how many short trainings the intervals of the seeds lie on one side of the tolerance."""
    parts = []
    for rule, ratio in (*((rule, 1.0) for rule in UNTUNED), ("topk", 0.1)):
        every = [
            r["above"] for t in found for r in t["runs"]
            if (r["rule"], r["ratio"], r["memory"], r["steps"]) == (rule, ratio, "residual", STEPS)
            and len(r["above"]) > 1
        ]  # fmt: skip
        counts = []
        for side in (-1, 1):  # within, beyond
            t = [
                side * (statistics.fmean(above) - TOLERANCE) / sem(above) if len({*above}) > 1
                # equal seeds have no spread: they are where they are
                else math.copysign(math.inf, side * (above[0] - TOLERANCE))
                for above in every
            ]  # fmt: skip
            p = t_law.sf(t, [len(above) - 1 for above in every])
            counts.append(int(np.count_nonzero(holm(p) <= 0.05)))
        name = f"`{rule}`" if ratio == 1 else f"`{rule}` at {ratio:g}"
        parts.append(
            f"{name} is within it in {counts[0]} of {len(every)} and beyond in {counts[1]}"
        )
    return (
        "A mean of three seeds is itself uncertain. Told from 2 % of the dense loss (one-sided t test at 5 %, "
        f"corrected for the number of trainings by Holm's method), {'; '.join(parts)}; of the others these "
        "seeds cannot tell."
    )


def kept_table(rows: Sequence[Row]) -> str:
    """Return :func:`kept` as Markdown."""
    heads = " | ".join(f"`topk` {ratio:g}:" for ratio in RATIOS)
    lines = [
        [OPTIMIZERS[r["optimizer"]], YARDSTICKS[r["yardstick"]], *map(str, (r["of"], *(r[x] for x in RATIOS)))]
        for r in rows
    ]  # fmt: skip
    return grid(f"optimizer | within 2 % of | trainings: | {heads}", lines)


def _run(system: str, ratio: float, steps: int, above: Sequence[float], sent: float | None) -> Row:
    chosen = SYSTEMS[system]
    row: Row = {"rule": chosen["compressor"], "ratio": ratio}
    memory = "adam" if "adam_correction" in chosen else "residual"
    # fewer bits have it, too: of what rounding takes off
    row |= {"memory": memory if chosen.get("error_feedback", True) else "none"}
    row |= {"format": {"dense-bf16": "bfloat16", "dense-fp8": "fp8"}.get(system, "float32")}
    return row | {"steps": steps, "above": [round(x, 7) for x in above], "sent": sent}


def _above(
    losses: Sequence[Row], piece: str
) -> Iterator[tuple[str, float, list[float], float | None]]:
    """Yield a piece's systems: name, ratio, how far each judging seed ended above dense, and bytes sent."""
    mine = [r for r in losses if r["piece"] == piece and r["seed"]]
    dense = {r["seed"]: r for r in mine if r["system"] == DENSE}
    # of a loss of 0, such as that of a policy that has become certain, nothing is a share
    if not all(r["loss"] for r in dense.values()):
        return
    order = [*SYSTEMS]
    known = {(r["system"], r["ratio"]) for r in mine}
    for system, ratio in sorted(known, key=lambda each: (order.index(each[0]), -each[1])):
        pairs = [
            (r, dense[r["seed"]]) for r in mine
            if (r["system"], r["ratio"]) == (system, ratio) and r["seed"] in dense
        ]  # fmt: skip
        if system == DENSE or not pairs:
            continue
        above = [r.get("loss", math.inf) / d["loss"] - 1 for r, d in pairs]
        # JSON has no infinity
        above = [x if math.isfinite(x) else DIVERGED for x in above]
        yield system, ratio, above, pairs[0][0].get("bytes")


def _short(losses: Sequence[Row], piece: str, local: bool = False) -> Iterator[Row]:
    """Yield the settings of a piece that were judged from seeds of their own, those of local steps or all others."""
    for system, ratio, above, sent in _above(losses, piece):
        if local is ("local_steps" in SYSTEMS[system]):
            yield _run(system, ratio, STEPS, above, sent)


def farther(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether one ended farther from dense than the other, by more than :data:`APART` times what seeds differ by.

    What diverged is farther than what did not. A difference below the tolerance is none.
    """
    if DIVERGED in (*one, *other):
        return DIVERGED in one and DIVERGED not in other
    times = APART[min(len(one), len(other), max(APART))]
    spread = max(max(each) - min(each) for each in (one, other))
    difference = statistics.fmean(one) - statistics.fmean(other)
    return difference > max(times * spread, TOLERANCE)


def beside_topk(losses: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return where each of :data:`OTHERS` ended beside top-k, by ratio and optimizer: trainings by name.

    What has no ratio is compared with top-k at those of :data:`BESIDE`. ``times`` is the median of its bytes in a step
    over those of top-k, ``behind`` in how many trainings its mean is farther, by however little. A training with one
    judging seed has no difference of seeds, and is left out, as is one whose loss says little.
    """
    each = {
        piece: {
            (system, ratio): (above, sent)
            for system, ratio, above, sent in _above(losses, piece)
            if len(above) > 1
        }
        for piece in PIECES
    }
    judging = {(t["training"], t["optimizer"]) for t in found}
    rows = []
    for system, ratio, optimizer in product(OTHERS, RATIOS, OPTIMIZERS):
        fixed = SYSTEMS[system].get("ratio")
        if ratio not in BESIDE.get(system, RATIOS):
            continue
        row: Row = {"system": system, "ratio": ratio, "optimizer": optimizer, "above": []}
        row |= {"behind": 0}
        row |= {place: [] for place in PLACES}
        # bytes are those of an exchange
        steps, times = SYSTEMS[system].get("local_steps") or 1, []
        for piece, ended in each.items():
            training, of = piece.split("/")
            mine, topk = ended.get((system, fixed or ratio)), ended.get(("topk", ratio))
            if of == optimizer and (training, of) in judging and mine and topk:
                row[_place(mine[0], topk[0])].append(training)
                row["behind"] += mean_above(mine[0]) > mean_above(topk[0])
                row["above"] += mine[0]
                if mine[1] and topk[1]:
                    times.append(mine[1] / steps / topk[1])
        if row["above"]:
            rows.append(row | {"times": statistics.median(times) if times else math.nan})
    return rows


def beside_said(rows: Sequence[Row]) -> str:
    """Return the counts of :func:`beside_topk` over all optimizers, at the three ratios, as a list in Markdown."""

    def count(system: str, place: str, ratio: float) -> int:
        mine = [r for r in rows if (r["system"], r["ratio"]) == (system, ratio)]
        return sum(len(r[place]) for r in mine)

    def of(system: str, ratio: float) -> int:
        return sum(count(system, place, ratio) for place in PLACES)

    def by_ratio(system: str, place: str) -> str:
        return " · ".join(
            f"{count(system, place, ratio)} of {of(system, ratio)}" for ratio in RATIOS
        )

    found = [
        f"{name}: nearer in {by_ratio(system, 'nearer')}, farther in {by_ratio(system, 'farther')}."
        for system, name in (
            ("sidco-p", "`sidco-p`"),
            ("topk without feedback", "Top-k without feedback"),
            ("topk of AdamW's steps", "Top-k of AdamW's steps"),
        )
    ]
    for system, name in (
        ("ef-signsgd", "`ef-signsgd`"),
        ("diloco", "Ten local steps"),
        ("sparseloco", "Ten local steps, sparse"),
    ):
        parts = [
            f"beside `topk` at {ratio:g} nearer in {count(system, 'nearer', ratio)} of {of(system, ratio)} and farther "
            f"in {count(system, 'farther', ratio)}" for ratio in BESIDE[system]
        ]  # fmt: skip
        found.append(f"{name}: {', '.join(parts)}.")
    return "\n".join(f"- {each}" for each in found)


def _place(one: Sequence[float], other: Sequence[float]) -> str:
    """Return where one ended beside the other: one of :data:`PLACES`."""
    if farther(one, other):
        return "farther"
    return "nearer" if farther(other, one) else "untold"


def beside_table(rows: Sequence[Row]) -> str:
    """Return what :func:`beside_topk` found as Markdown."""
    heads = "system | `topk`: | its bytes ÷ `topk`'s: | optimizer | trainings: | "
    heads += "nearer: | not told: | farther: | its mean farther: | above dense, %:"
    lines = []
    for row in rows:
        counts = [len(row[place]) for place in PLACES]
        optimizer = OPTIMIZERS[row["optimizer"]]
        numbers = map(str, (sum(counts), *counts, row["behind"]))
        beside = [f"{row['ratio']:g}", f"{row['times']:.2g}"]
        lines.append([f"`{row['system']}`", *beside, optimizer, *numbers, _cell(row["above"])])
    return grid(heads, lines)


def _plateau(piece: str) -> Iterator[Row]:
    """Yield the settings of a piece that was trained to a plateau."""
    if piece not in _PLATEAU:
        return
    rows = [r for r in stored(RESULTS / f"plateau-{_PLATEAU[piece]}.jsonl") if "loss" in r]
    dense = {r["seed"]: r for r in rows if r["compressor"] == "none"}
    for system, ratio in dict.fromkeys((r["compressor"], r["ratio"]) for r in rows):
        if system not in SYSTEMS or system == DENSE:
            continue
        mine = [r for r in rows if (r["compressor"], r["ratio"]) == (system, ratio)]
        above = [r["loss"] / dense[r["seed"]]["loss"] - 1 for r in mine]
        yield _run(system, ratio, mine[0]["steps"], above, mine[0]["bytes"])


def _properties(atlas: Sequence[Row], piece: str) -> Row:
    """Return the medians over phases of what the atlas says of a piece's gradients, by kind."""
    found: Row = {}
    for kind in ("gradient", "corrected"):
        rows = [r for r in atlas if (r["piece"], r["kind"]) == (piece, kind)]
        if rows:
            each = [
                {f"energy_{k}": v for k, v in r["energy"].items()}
                | {"zeros": r["zeros"], "cosine": r["cosine"]}
                for r in rows
            ]
            found[kind] = {n: round7(float(np.median([e[n] for e in each]))) for n in each[0]}
    return found


def held_out(found: Sequence[Row], tolerance: float = TOLERANCE) -> Row:
    """Return what came of advice that is made for each training without it, and what would have of always the same.

    Of trainings whose gradients are sparse already :func:`gradstats.advise` says that, and no other asks what is like
    them.
    """
    rows: list[Row] = []
    constant = dict.fromkeys(UNTUNED, 0)
    for mine in found:
        properties = mine["properties"].get("gradient")
        if not properties or sparse_already(1 - properties["zeros"]):
            continue
        others = [t for t in found if t["training"] != mine["training"]]
        records = choose("gradient", properties, mine["optimizer"], tolerance, others)
        # of an optimizer in too few trainings nothing is advised, which is neither right nor wrong
        if max(r["trainings"] for r in records) < FEWEST_ALIKE:
            continue
        best = records[0]
        name = f"{mine['training']}/{mine['optimizer']}"
        row = {"training": name} | {n: best[n] for n in ("rule", "ratio", "memory", "bytes")}
        setting = {n: best[n] for n in ("rule", "ratio", "memory", "format")}
        above = 0.0 if best["rule"] == "none" else _worst(mine, setting)
        if above is not None:
            row |= {"distance": best["distance"], "above": round(above, 5)}
            rows.append(row | {"within": above <= tolerance})
            for rule in UNTUNED:
                ended = _worst(mine, {"rule": rule})
                constant[rule] += ended is not None and ended <= tolerance
    return {
        "tolerance": tolerance,
        "of": len(rows),
        "within": sum(r["within"] for r in rows),
        "settings": sorted({setting_of(r) for r in rows}),
        "optimizers": sorted({r["training"].partition("/")[2] for r in rows}),
        "constant": constant,
        # dense averaging rests on no training
        "distance": round7(max((r["distance"] for r in rows if r["rule"] != "none"), default=0.0)),
        "rows": rows,
    }


def _worst(training: Row, setting: Row) -> float | None:
    """Return how far a training with a setting ended above dense, at the length at which most; None if not measured."""
    runs = (run for run in training["runs"] if setting.items() <= run.items())
    return max((mean_above(run["above"]) for run in runs), default=None)


def table(found: Sequence[Row]) -> str:
    """Return the losses as Markdown: a row for each training and optimizer, a column for each setting."""
    columns = dict.fromkeys(_column(r) for t in found for r in t["runs"])
    heads = " | ".join(f"{column}:" for column in columns)
    lines = []
    for each in found:
        for steps in dict.fromkeys(r["steps"] for r in each["runs"]):
            mine = {_column(r): r["above"] for r in each["runs"] if r["steps"] == steps}
            counts = sorted(set(map(len, mine.values())))
            name = f"{each['training']}/{each['optimizer']}"
            count = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(*counts)
            lines.append([name, str(steps), count, *(_cell(mine.get(c)) for c in columns)])
    return grid(f"training | steps: | runs: | {heads}", lines)


def _column(run: Row) -> str:
    """Return what a setting is called."""
    if run["ratio"] == 1:
        return f"`{run['rule']}`"
    of = {"none": " without feedback", "adam": " of AdamW's steps"}.get(run["memory"], "")
    return f"`{run['rule']}` {run['ratio']:g}{of}"


def _percent(above: float) -> str:
    if above == DIVERGED:
        return "diverged"
    # rounded before it is written, so that no zero has a sign
    percent = round(100 * above, 1)
    return f"{percent:+.1f}".replace("-", "−") if percent else "0.0"


def _cell(above: Sequence[float] | None) -> str:
    if above is None:
        return "–"
    ends = [*map(_percent, (min(above), max(above)))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def local_table(losses: Sequence[Row]) -> str:
    """Return the losses of local steps as Markdown: advice, of what a hook does in every step, leaves them out."""
    columns = [s for s, settings in SYSTEMS.items() if "local_steps" in settings]
    lines = []
    for piece in PIECES:
        # the ratio tells the systems apart
        mine = {r["ratio"]: r["above"] for r in _short(losses, piece, local=True)}
        if mine:
            cells = [_cell(mine.get(SYSTEMS[s]["ratio"])) for s in columns]
            lines.append([piece, str(max(map(len, mine.values()))), *cells])
    return grid(f"training | runs: | {' | '.join(f'`{s}`:' for s in columns)}", lines)


def predictors(found: Sequence[Row]) -> list[Row]:
    """Return how the loss behind top-k goes with each property of the gradients, over trainings.

    A training counts once, with the means over its optimizers, because its gradients under two of them are alike. ρ is
    Spearman's, p two-sided by permutation. The loss above dense is a share of the dense one, which is small where that
    fell far, and a share of its fall.
    """
    rows = []
    for name, yardstick, ratio in product(PROPERTIES, YARDSTICKS, RATIOS):
        points: dict[str, list[tuple[float, float]]] = {}
        for each in found:
            known = each["properties"].get("gradient", {}) | {"left": 1 / (1 + each["fell"])}
            above = _topk(each, ratio, yardstick)
            if name in known and above is not None:
                points.setdefault(each["training"], []).append((known[name], above))
        means = [
            tuple(map(statistics.fmean, zip(*pairs, strict=True))) for pairs in points.values()
        ]
        if len(means) < FEWEST:
            continue
        # Spearman's is the correlation of ranks, and scipy's of each permutation would take minutes
        x, y = zscore(rankdata(np.array(means), axis=0), axis=0).T
        test = permutation_test(
            (x,), lambda x, axis=-1, y=y: np.mean(x * y, axis), vectorized=True,
            permutation_type="pairings", n_resamples=9999, rng=np.random.default_rng(0),
        )  # fmt: skip
        row = {"property": name, "yardstick": yardstick, "ratio": ratio, "trainings": len(means)}
        rows.append(row | {"rho": float(test.statistic), "p": float(test.pvalue)})
    return rows


def predicted(found: Sequence[Row]) -> str:
    """Return which property goes with the loss as Markdown; the last column has the least p of a row by Holm."""
    rows = predictors(found)
    adjusted = holm(np.array([r["p"] for r in rows]))
    lines = []
    for name, yardstick in product(PROPERTIES, YARDSTICKS):
        mine = [
            (r, p) for r, p in zip(rows, adjusted, strict=True)
            if (r["property"], r["yardstick"]) == (name, yardstick)
        ]  # fmt: skip
        if mine:
            cells = [f"{r['rho']:+.2f} ({r['p']:.2g})".replace("-", "−") for r, _ in mine]
            counts = sorted({r["trainings"] for r, _ in mine})
            # a training may have been compressed at some of the ratios
            known = " or ".join(map(str, counts))
            line = [PROPERTIES[name], YARDSTICKS[yardstick], known, *cells]
            lines.append([*line, f"{min(p for _, p in mine):.2g}"])
    heads = " | ".join(f"`topk` {ratio:g}, ρ (p):" for ratio in RATIOS)
    heads = f"property | loss as a share of | trainings: | {heads}"
    return grid(f"{heads} | least p of {len(rows)}:", lines)


def alike(found: Sequence[Row]) -> list[Row]:
    """Return how well the trainings most alike foretell what top-k costs, beside any others.

    ρ is Spearman's, between what top-k cost a training and the median of what it cost the :data:`NEAREST` others that
    are most alike, of the same optimizer. p is the share of random orders of the properties with as large a ρ.
    """
    rng = np.random.default_rng(0)
    rows = []
    for optimizer, ratio in product(OPTIMIZERS, RATIOS):
        costs = [
            (t, above) for t in found
            if t["optimizer"] == optimizer and "gradient" in t["properties"]
            and (above := _topk(t, ratio)) is not None
        ]  # fmt: skip
        if len(costs) <= NEAREST:
            continue
        mine, cost = [t for t, _ in costs], np.array([above for _, above in costs])
        far = np.array(
            [[*distances("gradient", t["properties"]["gradient"], mine).values()] for t in mine]
        )
        np.fill_diagonal(far, math.inf)

        # the order as it is, then random ones
        orders = np.array([range(len(mine)), *(rng.permutation(len(mine)) for _ in range(999))])
        nearest = far[orders[:, :, None], orders[:, None, :]].argsort(axis=2, kind="stable")
        foretold = np.median(cost[nearest[:, :, :NEAREST]], axis=2)
        # Spearman's is the correlation of ranks
        rho = np.mean(zscore(rankdata(foretold, axis=1), axis=1) * zscore(rankdata(cost)), axis=1)
        row = {"optimizer": optimizer, "ratio": ratio, "trainings": len(mine)}
        rows.append(row | {"rho": float(rho[0]), "p": float(np.mean(rho >= rho[0]))})
    return rows


def alike_table(rows: Sequence[Row]) -> str:
    """Return :func:`alike` as Markdown."""
    lines = []
    for optimizer in dict.fromkeys(r["optimizer"] for r in rows):
        mine = [r for r in rows if r["optimizer"] == optimizer]
        cells = [f"{r['rho']:+.2f} ({r['p']:.2g})".replace("-", "−") for r in mine]
        lines.append([OPTIMIZERS[optimizer], str(mine[0]["trainings"]), *cells])
    heads = " | ".join(f"`topk` {ratio:g}, ρ (p):" for ratio in RATIOS)
    return grid(f"optimizer | trainings: | {heads}", lines)


def judged(found: Mapping[str, Any]) -> str:
    """Return what came of held-out advice as Markdown, and what would have come of looking at nothing."""
    heads = "training | advice without it | bytes ÷ dense: | loss above dense, %: | within 2 %"
    always = " and ".join(f"`{rule}` in {n}" for rule, n in found["constant"].items())
    return f"Always the same would have been right with {always} of {found['of']}.\n\n" + grid(
        heads,
        (
            [
                row["training"], _column(row), f"{row['bytes']:.3g}", _cell([row["above"]]),
                "yes" if row["within"] else "**no**",
            ]
            for row in found["rows"]
        ),
    )  # fmt: skip


def main() -> None:
    """Run what is not stored yet, and show the tables."""
    parser = command(__doc__, PAGE)
    parser.add_argument("pieces", nargs="*", default=PIECES, metavar="PIECE")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="judge seeds 1 to N; 0 runs nothing")
    parser.add_argument("--systems", nargs="*", default=CORE, choices=SYSTEMS, metavar="NAME")
    parser.add_argument(
        "--beyond", action="store_true", help="train at three times the largest, too"
    )
    parser.add_argument("--ratios", nargs="*", type=float, default=RATIOS, choices=RATIOS)
    options = parser.parse_args()
    key = by("piece", "system", "ratio", "factor", "seed")
    run_one = partial(one, data=options.data_dir)
    # piece by piece, so that what is there after an interruption can be compared
    for piece in options.pieces if options.seeds else ():
        every = [*settings(piece, options.systems, options.ratios)]
        rows = complete(FILE, key, trials(every), run_one)
        judged_by = range(1, options.seeds + 1)
        cases = [(*each, best_factor(rows, *each), seed) for each in every for seed in judged_by]
        complete(FILE, key, cases, run_one)
    if options.beyond:
        edges = [(piece, *edge, edge_of(piece), 0) for piece in options.pieces for edge in EDGES]
        complete(FILE, key, edges, run_one)
    losses = stored(FILE)
    found = trainings(losses, stored(RESULTS / "atlas.jsonl"))
    judging = telling(found)
    made = held_out(judging)
    tables = {"losses": table(found), "local-steps": local_table(losses)}
    tables |= {"beyond": beyond(losses), "told": told(judging), "muon": muon_said(found)}
    beside = beside_topk(losses, judging)
    tables |= {"beside-topk": beside_table(beside), "beside-said": beside_said(beside)}
    tables |= {"kept": kept_table(kept(judging)), "alike": alike_table(alike(judging))}
    tables |= {"predictors": predicted(judging), "held-out": judged(made)}
    show(tables, options.write, PAGE)
    if options.write:
        # what advice was not judged by is not hidden
        rest = {k: v for k, v in made.items() if k != "rows"} | {
            "left_out": len(found) - len(judging)
        }
        dump = {"held_out": rest, "trainings": judging}
        EVIDENCE.write_text(json.dumps(dump, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
