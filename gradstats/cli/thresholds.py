"""Commands about thresholds: ``quality`` and ``bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gradstats.cli.options import (
    EstimatorOption,
    EverythingOption,
    FormatOption,
    KindOption,
    LayerOption,
    OutputOption,
    PerLayerOption,
    RankOption,
    RatioOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
    one_of,
)
from gradstats.cli.output import Table, analyse, note, one_by_one, user_options
from gradstats.errors import InputError
from gradstats.tables import Records

if TYPE_CHECKING:
    from gradstats.primitives import Array
    from gradstats.trace import Kind

__all__ = [
    "BENCH",
    "BY_STAGE",
    "CHANGES",
    "DIFFERENCES",
    "QUALITY",
    "WORST_STAGE",
    "bench",
    "quality",
]

QUALITY = Table(
    "k̂/k, elements kept over elements asked for: mean over n gradients; low–high: 90 % of them, all if fewer than "
    "20; fresh: of rules that forget the gradients before; energy error: error of what is kept over that of the k "
    "largest, minus 1 (below 0: more than k are kept); floor: 1.96/√k, how far a perfect law is off by chance if "
    "elements are independent, else times √design",
    (
        *("trace", "estimator", "ratio", "kind", "layer", "mean", "low", "high", "fresh"),
        *("energy_error", "n", "floor", "design"),
    ),
    ("trace", "kind"),
)
BY_STAGE = Table(
    "k̂/k stage by stage; factor: share kept over share asked for; blame: the stage whose factor is farthest from 1",
    (
        *("trace", "step", "rank", "kind", "layer", "estimator", "ratio", "stage"),
        *("asked", "got", "factor", "quality", "blame"),
    ),
    ("trace", "kind"),
)
WORST_STAGE = Table(
    "k̂/k of multi-stage rules, means over the gradients; blame: the stage that is farthest off in most of them, and "
    "in how many; factor: share it kept over share asked for; n: gradients",
    (
        *("trace", "kind", "layer", "estimator", "ratio", "n", "stages"),
        *("quality", "blame", "blamed", "factor"),
    ),
    ("trace", "kind"),
)
DIFFERENCES = Table(
    "k̂/k minus that of another rule over n steps, 95 % intervals; error: the same of |ln k̂/k|, below 0 if closer to"
    " k",
    (
        *("trace", "estimator", "versus", "ratio", "kind", "layer", "n"),
        *("difference", "difference_low", "difference_high"),
        *("error", "error_low", "error_high", "p_holm"),
    ),
    ("trace", "kind"),
)
_RULE = ("trace", "kind", "layer", "estimator")
"""Fields that tell the rules of a table apart."""
BENCH = Table(
    "Estimation and selection; streams: time ÷ that of torch.sum of the same data; low–high: quartiles of the rounds",
    (
        *("gradient", "layers", "numel", "threads", "cache", "compressor", "ratio", "seconds"),
        *("streams", "streams_low", "streams_high", "quality", "memory", "speedup"),
    ),
    ("threads", "cache", "gradient", "layers", "numel"),
)
CHANGES = Table(
    "Streams (time ÷ that of torch.sum) against an earlier run; slower, faster: by more than 5 %, in at most 5 of 100"
    " tables by chance",
    (
        *("gradient", "layers", "numel", "threads", "cache", "compressor", "ratio"),
        *("streams_before", "streams", "change", "change_low", "change_high", "status"),
        *("p_holm", "quality_before", "quality"),
    ),
    ("threads", "cache", "gradient", "layers", "numel"),
)


def _tails() -> tuple[str, ...]:
    from gradstats.thresholds.bench import TAILS

    return tuple(TAILS)


def quality(  # numpydoc ignore=PR01
    source: SourceArgument,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Number of stages of the sidco rules; adaptive by default.", min=1),
    ] = None,
    per_layer: PerLayerOption = False,
    by_stage: Annotated[
        bool,
        typer.Option("--by-stage", help="Split the error of multi-stage rules over their stages."),
    ] = False,
    versus: Annotated[
        str | None,
        typer.Option(help="Compare the rules with this one, step by step, instead."),
    ] = None,
    layer: LayerOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    everything: EverythingOption = False,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Compare how many elements thresholds keep with how many they should: k̂/k.

    The table has the rules nearest to k first; --all and the other formats have those that count elements, and those
    that are more than twofold off, too, and with --by-stage every gradient. Rules with a state (reuse, feedback, warm
    start, adaptive stages) see the captured steps in order, as if they were adjacent: fresh is what they do without a
    past. From twenty steps on the mean has a 95 % interval, by blocks of neighbouring steps.
    """
    from math import isfinite

    from gradstats.analysis import quality
    from gradstats.analysis.stages import worst_stages
    from gradstats.thresholds import ESTIMATORS

    options = {name: {"stages": stages} for name in ESTIMATORS if "sidco" in name and stages}
    if by_stage and versus:
        raise InputError("--by-stage and --versus are two tables: ask for one of them")
    table, records_of = QUALITY, quality.quality_series
    if by_stage:
        table, records_of = BY_STAGE, quality.stage_budget
    elif versus:
        table = DIFFERENCES
    # differences need the series of the other rule, too
    if estimator and versus and versus not in estimator:
        estimator = [*estimator, versus]
    asked = user_options(ratios=ratio, estimators=estimator)
    work = one_by_one(records_of, **asked, options=options, per_layer=per_layer)
    records = analyse(
        "quality",
        source,
        work,
        scheduler=scheduler,
        steps=step,
        ranks=rank,
        kinds=kind,
        layers=layer,
    )
    answers: list[str] = []
    if versus:
        records = quality.differences(records, versus)
    elif not by_stage:
        answers, records = _answered(records, table=format == "table", brief=not everything)
        if any(isfinite(r["mean_low"]) for r in records):
            intervals = "; mean low–high: 95 % interval of the mean, by blocks of steps"
            table = QUALITY.extended(intervals, "mean_low", "mean_high")
    elif format == "table" and not everything:
        rows = len(records)
        table, records = WORST_STAGE, worst_stages(records)
        note(f"{rows:,} rows in short; --all shows each gradient's stages.")
    table.emit(records, format, output, answers)
    if versus and format == "table":
        for status in dict.fromkeys(r["status"] for r in records if r["status"] != "ok"):
            note(f"no interval: {status}")
    elif not by_stage and format == "table":
        for status in dict.fromkeys(r["status"] for r in records if r["status"] != "ok"):
            rules = dict.fromkeys(r["estimator"] for r in records if r["status"] == status)
            note(f"{', '.join(rules)}: {status}")


def _answered(
    series: list[dict[str, Any]], *, table: bool, brief: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return which rule hits k, in sentences, and the summary of the series; of a table the nearest rules first."""
    from gradstats.analysis.quality import summarise
    from gradstats.analysis.rules import judged_rules
    from gradstats.analysis.verdicts import counting_rules, left_out, which_rule

    summary = summarise(series)
    if not table:
        return [], summary
    rules = judged_rules(series)
    # rules are ordered by how near they come to k, and rows follow them
    place = {tuple(r[n] for n in _RULE): i for i, r in enumerate(rules)}
    gradients: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rule in rules:
        if rule["layer"] == "all":
            gradients.setdefault((rule["trace"], rule["kind"]), []).append(rule)
    answers, hidden = [], set()
    for (trace, kind), each in gradients.items():
        mine = [r for r in series if (r["trace"], r["kind"], r["layer"]) == (trace, kind, "all")]
        answers.append(f"{trace}, {kind}: {which_rule(each)}{counting_rules(mine)}")
        names, reason = left_out(each) if brief else ((), "")
        hidden |= {(trace, kind, name) for name in names}
        answers[-1] += f" {reason}" if reason else ""
    shown = [r for r in summary if (r["trace"], r["kind"], r["estimator"]) not in hidden]
    shown.sort(key=lambda r: place[tuple(r[n] for n in _RULE)])
    return answers, shown


def bench(  # numpydoc ignore=PR01
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="Gradients to time, instead of synthetic ones: a trace or a file.",
            show_default=False,
        ),
    ] = None,
    numel: Annotated[
        list[int] | None, typer.Option("--numel", help="Elements of the gradient (repeatable).")
    ] = None,
    tail: Annotated[
        list[str] | None,
        typer.Option(
            help="Law of synthetic gradients: layered, laplace or student-t (repeatable).",
            **one_of("tail", _tails),
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help="Time layer by layer, in the sizes of this workload's model (repeatable).",
            metavar="WORKLOAD",
        ),
    ] = None,
    per_layer: PerLayerOption = False,
    ratio: RatioOption = None,
    estimator: EstimatorOption = None,
    threads: Annotated[
        list[int] | None,
        typer.Option("--threads", help="Number of threads (repeatable); by default 1 and all."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of measurement; medians are shown.")] = 15,
    references: Annotated[
        bool, typer.Option(help="Time torch.topk, torch.kthvalue and numpy.argpartition, too.")
    ] = True,
    published: Annotated[
        bool,
        typer.Option("--published", help="Time the papers' rules in plain torch operations, too."),
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Empty the processor's caches before every run.")
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="JSON of an earlier run, or a folder with another version's package, which is then run in turns with "
            "this one: show what changed, in ratios of streams.",
            metavar="FILE",
        ),
    ] = None,
    step: StepOption = None,
    rank: RankOption = None,
    kind: KindOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Time estimation and selection, and compare with top-k and with one read of the data."""
    from gradstats.console import progress_bar
    from gradstats.primitives.ratio import RATIOS, check_ratio
    from gradstats.thresholds import bench

    if repeats < 1 or any(n < 1 for n in numel or ()):
        raise InputError("numel and repeats must be at least 1")
    if source is None and (step or rank or kind or per_layer):
        raise InputError("--step, --rank, --kind and --per-layer choose of a SOURCE: name one")
    if compare is not None and compare.is_dir():
        asked = {
            "--numel": numel,
            "--tail": tail,
            "--layout": layout,
            "--ratio": ratio,
            "--estimator": estimator,
            "--threads": threads,
            "--step": step,
            "--rank": rank,
            "--kind": kind,
        }
        arguments = [] if source is None else [str(source.resolve())]
        arguments += [str(a) for n, values in asked.items() for v in values or () for a in (n, v)]
        switches = {"--per-layer": per_layer, "--published": published, "--cold": cold}
        arguments += [
            name for name, on in {**switches, "--no-references": not references}.items() if on
        ]
        return _changed(*_alternated(compare, arguments, repeats), compare, format, output)
    before = None if compare is None else _earlier(compare)
    gradients = None
    if source is not None:
        # one more than is measured, since the first round warms up
        gradients = _gradients(source, step, rank, kind, per_layer, repeats + 1)
    layouts = {name: _sizes(name) for name in layout or ()}
    numels = numel or (() if gradients or layouts else bench.NUMELS)
    ratios, tails = [check_ratio(r) for r in ratio or RATIOS], tail or bench.USUAL
    counts = threads or bench.numbers_of_threads()
    with progress_bar() as bar:
        cases = len(tails) * (len(numels) + len(layouts)) + len(gradients or ())
        total = cases * len(ratios) * len(counts) * (repeats + 1)
        task = bar.add_task("bench", total=total)
        records = bench.bench(
            numels,
            ratios,
            estimators=estimator or None,
            threads=threads or None,
            repeats=repeats,
            references=references,
            published=published,
            tails=tails,
            layouts=layouts,
            gradients=gradients,
            cold=cold,
            on_progress=lambda: bar.advance(task),
        )
    if before is not None and compare is not None:
        return _changed(records, before, compare, format, output)
    return BENCH.emit(records, format, output)


def _alternated(other: Path, arguments: list[str], repeats: int) -> tuple[Records, Records]:
    """Run this version and another one in turns."""
    from gradstats.console import progress_bar
    from gradstats.thresholds.changes import alternated

    with progress_bar() as bar:
        task = bar.add_task("bench", total=2 * repeats)
        return alternated(other, arguments, repeats, lambda: bar.advance(task))


def _changed(
    records: Records, before: Records, compare: Path, format: str, output: Path | None
) -> None:
    """Show what changed between two runs."""
    from gradstats.thresholds.changes import FEWEST_ROUNDS, compared

    both = compared(records, before)
    if not both:
        raise InputError(f"{compare} has nothing in common with this run: give the same options")
    CHANGES.emit(both, format, output)
    few = min(r["rounds"] for r in both)
    if format == "table" and few < FEWEST_ROUNDS:
        note(
            f"too few rounds to tell a difference: {few} in one of the runs, and it takes {FEWEST_ROUNDS} in both "
            "(--repeats, and a JSON that has them)"
        )
    elif format == "table":
        note("unknown: the interval of the change reaches beyond 5 %; more rounds narrow it")


def _gradients(
    source: Path,
    steps: list[int] | None,
    ranks: list[int] | None,
    kinds: list[str] | None,
    per_layer: bool,
    most: int,
) -> dict[str, list[list[Array]]]:
    """Return the first gradients of a source by trace, rank and kind, in parts."""
    from gradstats.trace.sources import Subset, matching, open_sources

    known = cast("list[Kind] | None", kinds)  # --kind has checked them
    gradients: dict[str, list[list[Array]]] = {}
    for each in matching(open_sources(source), steps=steps, ranks=ranks, kinds=known):
        for rank, of, at in Subset(steps, ranks, known).keys(each):
            if each.sketched(rank, of):
                raise InputError(f"{each.name} has sketches, and rules are timed on gradients")
            several = gradients.setdefault(f"{each.name} {of} of rank {rank}", [])
            if len(several) < most:
                values = each.read(rank, of, at).values
                parts = [values[layer.slice] for layer in each.layers if layer.numel]
                several.append(parts if per_layer else [values])
    return gradients


def _sizes(workload: str) -> list[int]:
    """Return the sizes of a model's layers."""
    from gradstats.registry import entries, load

    # the first package that knows layouts answers
    for entry in entries("gradstats.layouts"):
        return [layer["numel"] for layer in load(entry)(workload)]
    raise InputError("no package that is installed knows layouts of models")


def _earlier(path: Path) -> Records:
    """Read what ``gradstats bench --format json`` wrote."""
    import json

    from gradstats.thresholds.changes import compared

    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if not compared(records, records):  # looks at every field that is needed
            raise ValueError
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        raise InputError(
            f"{path} is not JSON of bench; write it with `bench --format json`"
        ) from None
    return Records(records)
