"""The command that says which compressor to use: ``plan``."""

from __future__ import annotations

import json
import math
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from gradstats.cli.options import (
    FormatOption,
    IndicesOption,
    OutputOption,
    RatioOption,
    RttOption,
    SchedulerOption,
    SourceArgument,
    StepOption,
    ValuesOption,
    one_of,
    trained,
)
from gradstats.cli.output import Records, emit, note, user_options
from gradstats.errors import InputError

if TYPE_CHECKING:
    from gradstats.network import Network
    from gradstats.trace.sources import Source

__all__ = ["assumed_link", "cluster_of", "only_source", "plan"]

_CAVEAT = "Predicted, not run; the prediction says nothing about how training converges."


def _baselines() -> Sequence[str]:
    from gradstats.network import Baseline

    return get_args(Baseline)


def plan(  # numpydoc ignore=PR01
    source: SourceArgument,
    workers: Annotated[
        list[int], typer.Option("--workers", help="Number of workers (repeatable).", min=1)
    ],
    measured_network: Annotated[
        Path | None,
        typer.Option(
            "--network",
            help="Measured cluster: a file that `bench-network --measure` or "
            "`python -m gradstats.network` wrote.",
            metavar="network.json",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="In place of --network, a link that was not measured: 1gbit, 10gbit, 100gbit, wan, or another rate. "
            "Selections are timed on this machine.",
            metavar="LINK",
        ),
    ] = None,
    rtt: RttOption = None,
    compute: Annotated[
        list[float] | None,
        typer.Option(
            help="Time of a step of one worker without its exchange; that of --measured if absent. Repeat it for "
            "several steps: how they differ says how long all wait for the slowest.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    ratio: RatioOption = None,
    compressor: Annotated[
        list[str] | None,
        typer.Option(
            "--compressor",
            help="Compare only this one with dense (repeatable).",
            **one_of("compressor", trained),
        ),
    ] = None,
    indices: IndicesOption = "plain",
    values: ValuesOption = "float32",
    baseline: Annotated[
        str,
        typer.Option(
            help="What compressors are compared with: none, DDP's averaging, or bf16, PyTorch's of bfloat16.",
            **one_of("baseline", _baselines),
        ),
    ] = "none",
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="Bandwidth of the links in Mbit/s, or like 500kbit or 1gbit (repeatable); "
            "that of the measured cluster if absent."
        ),
    ] = None,
    up: Annotated[
        str | None,
        typer.Option(help="Rate at which a worker sends, with --down and without --bandwidth."),
    ] = None,
    down: Annotated[
        str | None,
        typer.Option(help="Rate at which it receives. The slower direction decides."),
    ] = None,
    local_steps: Annotated[
        list[int] | None,
        typer.Option(
            help="Local steps from one exchange to the next (repeatable); 0 for an exchange in every step, by DDP.",
            metavar="H",
        ),
    ] = None,
    fragments: Annotated[
        int, typer.Option(help="Parts of the model exchanged at different local steps.")
    ] = 1,
    delay: Annotated[
        int, typer.Option(help="Local steps that an exchange takes in the background.")
    ] = 0,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw the speed-up over the baseline to this file.", metavar="FILE.pdf"),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="JSON that `bench-network` wrote; its steps become points of the figure.",
            metavar="FILE",
        ),
    ] = None,
    step: StepOption = None,
    scheduler: SchedulerOption = None,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Predict the time of a step with each compressor on a cluster, and recommend the simplest of the fastest.

    A threshold rule is priced with the elements that it keeps of the source's gradients; one that keeps fewer than k is
    recommended only if it would be as fast with k. pays: the bandwidths at which one is faster than the baseline.

    With --local-steps: the share of the time that is spent computing (utilisation), and the Mbit/s that 50, 75, 90, 95
    and 99 % of it take, with pseudo-gradients in place of gradients.
    """
    from gradstats import network
    from gradstats.analysis.pieces import connect
    from gradstats.analysis.verdicts.plans import ALIKE, workers_of
    from gradstats.collectives.codec import PLAIN, Codec
    from gradstats.console import progress_bar
    from gradstats.network.rates import format_rate, parse_rate

    points = _points(measured) if measured else []
    compute = compute or _computing(points)
    opened = only_source(source)
    rates: list[float | tuple[float, float]] = [parse_rate(text) for text in bandwidth or ()]
    if up or down:
        if not (up and down) or rates:
            raise InputError("--up and --down go together, and take the place of --bandwidth")
        rates = [(parse_rate(up), parse_rate(down))]
    # as typed: their options have checked them
    codec = Codec(cast("Any", indices), cast("Any", values))
    with connect(scheduler) as client, progress_bar() as bar:
        bar.add_task("plan", total=None)
        cluster = cluster_of(
            measured_network, link, rtt, opened.numel, ratio, compressor or (), codec != PLAIN
        )
        records = network.plan(
            opened,
            cluster,
            compute,
            workers,
            **user_options(
                ratios=ratio, compressors=compressor, rates=rates, local_steps=local_steps
            ),
            fragments=fragments,
            delay=delay,
            codec=codec,
            baseline=cast("Any", baseline),
            captured=step or None,
            client=client,
        )
    if figure is not None:
        _draw(records, points, figure)
    columns = ["compressor", "ratio", "seconds", "low", "high", "speedup", "pays", "limit"]
    local = any(local_steps or ())
    if local:
        needed = [f"bandwidth_{share}" for share in network.TARGETS]
        columns = ["local_steps", "compressor", "ratio", "seconds", "utilisation", *needed]
    if (indices, values) != ("plain", "float32"):
        columns += ["bytes"] if local else ["bytes", "codec_pays"]
    # what compressors are compared with is dense averaging, too, if in bfloat16
    dense = "dense" if baseline == "none" else records[0]["baseline"]
    advise = network.local_advice if local else network.advice
    # groupby needs equal keys to be adjacent: plan orders records by workers and rate
    plans = [list(group) for _, group in groupby(records, lambda r: (r["workers"], r["rate"]))]
    if format == "table" and output is None:
        for each in plans:
            at = f"A step of {workers_of(each[0])} at {format_rate(each[0]['rate'])}"
            title = (
                f"{at} in ms, the share of it that is computing, and the Mbit/s that so many percent take"
                if local
                else f"{at}, in ms with 95 % intervals; pays: at which Mbit/s it is faster than {dense}"
            )
            emit(list(map(_shown, each)), format, None, columns=columns, title=title, group_by=())
            width = shutil.get_terminal_size().columns
            # so that names such as sidco-e stay whole
            typer.echo("\n" + textwrap.fill(advise(each), width, break_on_hyphens=False) + "\n")
    else:
        title = "Steps, predicted, in ms"
        columns = ["workers", "rate", *columns]
        emit(records, format, output, columns=columns, title=title, group_by=("workers", "rate"))
        for each in plans:
            note(advise(each))
    if assumed := sorted({r["compressor"] for r in records if r["basis"] == "assumed"}):
        note(f"Assumed to send exactly k: {', '.join(assumed)}.")
    if not compressor and records[0]["left_out"]:
        note(f"Not considered, as the network was measured without them: {records[0]['left_out']}.")
    if unknown := sorted({r["compressor"] for r in records if not r["measured"]}):
        note(f"Selection not measured, and so not ranked: {', '.join(unknown)}.")
    if not local and any("?" in _shown(r)["pays"] for r in records):
        note(
            f"?: by the prediction alone; at this rate it may be within {100 * ALIKE:g} % of {dense}."
        )
    if link is not None:
        note(assumed_link(cluster))
    # measured steps include the wait for the slowest
    if any(math.isnan(r["slowest"]) for r in records) and not measured:
        note("How long all wait for the slowest worker is not known from one --compute.")
    held, known = network.HELD
    note(
        f"Intervals: 95 %; of {known} steps of {network.SYSTEMS} systems (docs/network.md), each left out when the "
        f"error was estimated, they held {held}" + (", none with local steps." if local else ".")
    )
    note(_CAVEAT)


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its break-even bandwidths in words."""
    from gradstats.network import doubtful

    cells: dict[str, Any] = {
        name: "never" if math.isinf(value) else "any" if not value else _rounded(value)
        for name, value in record.items()
        if name.startswith("bandwidth_")
    }
    for name, at in (("pays", "break_even"), ("codec_pays", "codec_break_even")):
        side = record[name]
        cells[name] = (
            f"{side} {_rounded(record[at])}" if side in ("below", "above") else side or "–"
        )
    if record["pays"] and doubtful(record):
        cells["pays"] += "?"
    return record | cells


def _rounded(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.7g}"


def _points(path: Path) -> Records:
    """Read the steps that ``gradstats bench-network --format json`` wrote."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return [
            {
                "compressor": str(r["compressor"]),
                "workers": int(r["nproc"]),
                "rate": float(r["rate"]),
                "ratio": r["ratio"],
                "seconds": float(r["seconds"]),
                "compute": float(r.get("compute_alone", r["compute"])),
                "local_steps": int(r.get("local_steps", 0)),
            }
            for r in records
        ]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is not JSON of bench-network; write it with `bench-network --format json`"
        ) from None


def only_source(path: Path | str) -> Source:
    """Open the one source at a path.

    Parameters
    ----------
    path : str or Path
        Trace, or file of gradients.

    Returns
    -------
    Source
        The source.

    Raises
    ------
    InputError
        If it is a folder of several.
    """
    from gradstats.trace.sources import open_sources

    sources = open_sources(path)
    if len(sources) > 1:
        raise InputError(f"{path} holds several traces; give one of them")
    return sources[0]


def cluster_of(
    file: Path | None,
    link: str | None,
    rtt: str | None,
    numel: int,
    ratios: list[float] | None,
    compressors: Sequence[str],
    coded: bool,
) -> Network:
    """Return the network that a plan is for: measured, or of usual links, with local work timed here.

    Parameters
    ----------
    file : Path or None
        File of a measured network.
    link, rtt : str or None
        In its place, a usual link, and the round trip between two workers.
    numel : int
        Elements of the gradient, by which local work is timed.
    ratios : list of float or None
        Ratios asked for, the first of which local work is timed at.
    compressors : sequence of str
        Compressors asked for; all if empty.
    coded : bool
        Whether messages are encoded.

    Returns
    -------
    Network
        The network.

    Raises
    ------
    InputError
        If not exactly one of `file` and `link` is given, or one of them cannot be understood.
    """
    from gradstats import network
    from gradstats.compressors import COMPRESSORS
    from gradstats.network.measure import time_local

    if (file is None) == (link is None):
        raise InputError(
            "say one of --link (1gbit, 10gbit, 100gbit, wan, or a rate) and --network FILE, which `torchrun … -m "
            "gradstats.network -o FILE` writes on the cluster and `gradstats bench-network --measure FILE` in a lab"
        )
    if file is not None:
        if rtt is not None:
            raise InputError("--rtt is of --link; a measured network has its latencies")
        return network.Network.load(file)
    assert link is not None
    usual = network.link(link, None if rtt is None else _seconds(rtt))
    # dense averaging selects nothing
    selects = [name for name in compressors or COMPRESSORS if name != "none"]
    return replace(
        usual,
        # only the links are assumed; local work is timed on this machine
        lines=usual.lines + time_local(numel, (ratios or [0.001])[0], selects, coded=coded),
    )


def assumed_link(usual: Network) -> str:
    """Say what a link that was not measured is taken to be, and in which range.

    Parameters
    ----------
    usual : Network
        Network of :func:`gradstats.network.link`.

    Returns
    -------
    str
        A sentence.
    """
    # a hop is one message: its line is α and β themselves
    alpha, beta = (each.value for each in usual.link("hop"))
    # latency and slower, in the order in which network.link puts them
    (low, high), (fast, slow) = usual.about["range"].values()
    return (
        f"{usual.about['link']} was not measured: a message takes {1e3 * alpha:.3g} ms ({1e3 * low:.3g} to "
        f"{1e3 * high:.3g}) and {beta * usual.rate / 8:.3g} times its bytes at the link's rate ({fast:.3g} to "
        f"{slow:.3g}), with sources in docs/concepts/cost.md."
    )


def _seconds(text: str) -> float:
    """Return a round trip in seconds."""
    units = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(us|µs|ms|s)", text.strip().lower())
    if match is None:
        raise InputError(f"a round trip is like 20ms, 80us or 0.1s, not {text!r}")
    return float(match[1]) * units[match[2]]


def _computing(points: Records) -> list[float]:
    """Return the time of computing in the measured steps, which has the wait for the slowest already."""
    if not points:
        raise InputError("say --compute SECONDS, or --measured with a file of `bench-network`")
    return [median(float(point["compute"]) for point in points)]


def _draw(records: Records, points: Records, path: Path) -> None:
    from gradstats.plots import SpeedupAt, save, speedup
    from gradstats.plots.files import styled

    both: tuple[SpeedupAt, ...] = get_args(SpeedupAt)
    axes = [at for at in both if len({r[at] for r in records}) > 1]
    if not axes:
        raise InputError("a figure needs several --bandwidth or --workers; give one of them twice")
    with styled(context="notebook") as drawing:
        drawing.set_size_inches(6.4 * len(axes), 4.2)
        for at, ax in zip(axes, drawing.subplots(1, len(axes), squeeze=False)[0], strict=True):
            speedup(records, ax, at=at, measured=points)
        save(drawing, path)
    note(f"wrote {path}")
