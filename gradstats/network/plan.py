"""The step time of each compressor on a cluster, predicted by the cost model of :mod:`gradstats.network`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstats.analysis.verdicts.plans import ALIKE, doubtful
from gradstats.collectives.codec import PLAIN, Codec
from gradstats.compressors import CompressorName
from gradstats.errors import InputError
from gradstats.network.evidence import Evidence, evidence
from gradstats.network.model import Network
from gradstats.network.prediction import (
    TARGETS,
    Draws,
    Seconds,
    bandwidths,
    drawn_interval,
    predicted,
    price,
    utilisation,
)
from gradstats.network.question import Baseline, Choice, Question, ask
from gradstats.network.senders import Sender, sender
from gradstats.primitives.ratio import check_several
from gradstats.tables import Plan, Record, Records
from gradstats.trace.sources import open_source

__all__ = ["HELD", "TARGETS", "plan"]

HELD = (46, 48)
"""Measured steps that were within their 95 % interval, and how many there are, in docs/network.md.

The model's error in an interval is that of the other systems.
"""
_TIMED = (
    *("seconds", "low", "high", "speedup", "speedup_low", "speedup_high", "seconds_at_k", "select"),
    *("utilisation", "utilisation_low", "utilisation_high", "break_even", "codec_break_even"),
    *(f"bandwidth_{target}" for target in TARGETS),
)
"""Fields that depend on how long a selection takes."""


def plan(
    source: object,
    network: Network | str | Path,
    compute: float | Sequence[float],
    workers: Sequence[int],
    ratios: Sequence[float] = (0.001,),
    compressors: Sequence[CompressorName | str] = (),
    *,
    rates: Sequence[float | tuple[float, float]] = (),
    local_steps: Sequence[int] = (0,),
    fragments: int = 1,
    delay: int = 0,
    draws: int = 200,
    codec: Codec = PLAIN,
    baseline: Baseline = "none",
    captured: Sequence[int] | None = None,
    client: Any = None,
) -> Records:
    """Predict the step time of every compressor, dense averaging included.

    Parameters
    ----------
    source : Source, Trace, str, Path, array_like or mapping of str to array_like
        Source whose layers are sent: a trace or its path, a gradient file, an array, or named arrays. Its gradients say
        how many elements threshold rules keep, and several captured ranks how much their selections overlap.
    network : Network, str or Path
        Cost model, measured or assumed (:func:`gradstats.network.link`), or the file that it was saved to.
    compute : float or sequence of float
        Seconds of one worker's step without the exchange. Give those of several steps if there are: the
        median counts, and their spread says how long all wait for the slowest, the largest of so many draws of a
        log-normal law. A single time does not say.
    workers : sequence of int
        Numbers of workers.
    ratios : sequence of float
        Kept fractions k/d, each in (0, 1].
    compressors : sequence of str
        Names of :data:`gradstats.compressors.COMPRESSORS`. If empty, all that the network was measured with.
    rates : sequence of float or (float, float)
        Bandwidths of the links in bit/s; latencies stay as they are. If empty, the bandwidth that was measured. A pair
        is what a worker sends and receives at: in every collective of :data:`gradstats.network.ALGORITHMS` each
        transfer is one worker's to another, and the slower direction decides.
    local_steps : sequence of int
        Numbers H of local steps from one exchange to the next, see :class:`gradstats.hooks.LocalSteps`; 0 for DDP,
        which averages in every step.
    fragments : int
        Parts of the model that are exchanged at different local steps.
    delay : int
        Local steps that an exchange takes in the background, fewer than the local steps.
    draws : int
        How many networks are drawn for the intervals.
    codec : Codec
        What positions and values are on the wire, of the compressors that send them. If `compressors` are named, all of
        them must be able to use it.
    baseline : {"none", "bf16"}
        What compressors are compared with: DDP's dense averaging, or that of bfloat16 values by its
        ``bf16_compress_hook``, which is then in the plan as ``torch-bf16``.
    captured : sequence of int, optional
        Captured steps whose gradients count; all if None.
    client : distributed.Client, optional
        Cluster that runs the threshold rules over the gradients.

    Returns
    -------
    Records
        One record for each number of workers, rate, number of local steps, compressor and ratio; the fastest of these
        first. Without a 0 in `local_steps`, the baseline alone is in the plan with 0.

        - compressor, workers, and ratio, which is None for a compressor without one.
        - rate, the bandwidth in Mbit/s, of the slower direction; up and down, both.
        - local_steps; fragments and delay, 1 and 0 without local steps.
        - seconds of a step, and its 95 % interval low and high. With local steps it is the mean over an interval, as
          all seconds are.
        - utilisation, the share of it that is computing, and its 95 % interval utilisation_low and utilisation_high.
        - bandwidth_50, _75, _90, _95 and _99, the Mbit/s from which on utilisation is at least so many percent;
          infinite if no bandwidth is enough, 0 if any is. These fields are there where local steps are asked for.
        - speedup over the baseline, and its 95 % interval speedup_low and speedup_high; NaN of the baseline itself.
        - break_even, the bandwidth in Mbit/s where it begins to be faster than the baseline, and pays, on which side:
          ``"below"``, ``"above"``, ``"always"`` (break_even is infinite), ``"never"`` (0), or empty for the baseline
          (NaN).
        - baseline, the name of that exchange; indices and values, what they are on the wire.
        - codec_break_even and codec_pays, the same of the codec, which may gain more time than it takes; NaN and empty
          without one.
        - limit, the part that takes most of the step.
        - The parts in seconds: compute, memory (error feedback, and copying the average back), select, pack (with
          unpacking), latency and transfer of the collectives; and hidden, how much of it goes on while the model
          computes: during the backward pass, or, with a delay, during later steps.
        - bytes, sent by a rank in a step, with local steps in an interval, and selected, the number of elements.
        - quality, k̂/k, and basis, where it comes from: ``"trace"``, ``"assumed"``, or ``"exact"`` for a compressor that
          always sends k. Quality is NaN for a compressor that chooses ratios itself.
        - slowest, how many times as long as the median the slowest worker is expected to compute, which is in compute;
          NaN if unknown.
        - measured, whether the network knows how long it takes to select. If not, the fields that depend on it are NaN,
          limit is ``"not measured"``, and the record is after the others and not recommended.
        - union, the number of positions that all workers send together; NaN if unknown.
        - layers, the ratio of each layer if the compressor chooses them, else empty. They are equal where it sends the
          gradient as a whole.
        - seconds_at_k, the seconds if it sent at least k elements: a rule that keeps fewer is no faster for that.
        - recommended, which one to use at this number of workers, rate and local steps: the simplest of those that
          cannot be told from the fastest by seconds_at_k, dense before exact top-k before the others.
        - left_out, names of compressors that the plan does not consider, as they were not asked for or the network was
          measured without them.

    Raises
    ------
    InputError
        If an option is out of range, a compressor is unknown, or the network was not measured with it.

    Notes
    -----
    Two thirds of `compute` are taken as the backward pass, spread over the layers in proportion to their elements. This
    matters for what goes on meanwhile: DDP's dense all-reduce of buckets of 25 MB, LAGS, and the whole systems that
    :data:`gradstats.hooks.systems.SYSTEMS` builds, which send layer by layer, with a corrected momentum. With local
    steps ``dgc`` is the bare threshold rule and ``redsync`` one message, as they are there.

    With local steps a step computes for `compute` seconds, and the exchange follows after `local_steps` of them, all of
    it or fragment by fragment; with a delay it hides behind later steps. Taking the difference of parameters and the
    outer optimizer's step are priced as two more of the hook's own passes, which the training makes itself. A smaller
    share of time for the exchange does not mean that training converges as well.
    """
    opened = open_source(source)
    if not opened.numel:
        raise InputError(f"{opened.name} has no elements to send")
    question = ask(
        network,
        compute,
        workers,
        ratios,
        compressors,
        rates=rates,
        local_steps=local_steps,
        fragments=fragments,
        delay=delay,
        draws=draws,
        codec=codec,
        baseline=baseline,
    )
    if captured is not None:
        captured = check_several(captured, "captured")
    return _table(question, evidence(opened, question, captured or None, client))


def _table(question: Question, known: Evidence) -> Plan:
    """Return the records of a plan: by number of workers, rate and local steps the fastest first."""
    network, records, draws = question.network, Plan(), Draws.of(question)
    for world in dict.fromkeys(question.workers):
        waited = draws.among(world)
        # made once for all rates: prices do not depend on the rate of a link
        groups = [list(group) for group in _groups(question, known, world)]
        # the baseline is the first row of all, see _groups
        dense = groups[0][0].sender
        for link in dict.fromkeys(question.links):
            here = waited.slowed(network.rate / min(link))
            dense_seconds = here.seconds(dense)
            at = {
                "workers": world,
                "rate": min(link) / 1e6,
                "up": link[0] / 1e6,
                "down": link[1] / 1e6,
            }
            for group in groups:
                seconds = [
                    # the same array object, by which `predicted` recognises the baseline
                    dense_seconds if row.sender is dense else here.seconds(row.sender)
                    for row in group
                ]
                group_records = [
                    row.record(at, here, row_seconds, dense_seconds)
                    for row, row_seconds in zip(group, seconds, strict=True)
                ]
                best = _recommended(group_records, seconds)
                for i, record in enumerate(group_records):
                    record |= {"recommended": i == best, "left_out": ", ".join(question.left_out)}
                # what was not measured has NaN, which does not sort, and comes last
                records += sorted(group_records, key=lambda r: (not r["measured"], r["seconds"]))
    return records


@dataclass(frozen=True, slots=True)
class _Row:
    """A sender of the table, and what is known of it at any rate."""

    sender: Sender
    at_k: Sender
    """The same if it sent at least k elements."""
    price: Record
    about: Record

    def record(self, at: Record, draws: Draws, seconds: Seconds, dense: Seconds) -> dict[str, Any]:
        """Return the record at a rate; `seconds` has the step on every network, and `dense` the baseline's."""
        network = draws.networks[0]
        record = {
            "compressor": self.sender.name,
            **at,
            "ratio": self.sender.ratio,
            **predicted(self.sender, network, seconds, dense),
            **utilisation(self.sender, seconds, draws.trained(draws.slower)),
            **self.price,
            "seconds_at_k": self.at_k.seconds(network),
            **self.about,
            "measured": network.knows(self.sender.selections()),
        }
        if not record["measured"]:  # what was not measured does not take no time
            record |= {name: math.nan for name in _TIMED if name in record}
            record |= {"pays": "", "codec_pays": "", "limit": "not measured"}
        return record


def _groups(question: Question, known: Evidence, world: int) -> Iterator[Iterator[_Row]]:
    """Yield the rows for each number of local steps; the baseline, with none, is the first row of all."""
    baseline = sender(question, known, *question.choices()[0], world)
    # speed-ups are over DDP's exchange in every step, whether or not it was asked for
    if 0 not in question.local_steps:
        yield _rows(question, known, baseline, 0, question.choices()[:1])
    for steps in question.local_steps:
        yield _rows(question, known, baseline, steps, question.choices(steps))


def _rows(
    question: Question, known: Evidence, baseline: Sender, steps: int, choices: Sequence[Choice]
) -> Iterator[_Row]:
    """Yield the rows of a number of local steps, in the order of the choices."""
    network, world = question.network, baseline.world
    for name, ratio in choices:
        each = sender(question, known, name, ratio, world, steps)
        # a rule that keeps k or more is priced as it is
        few = known.qualities.get((name, ratio), 1.0) < 1
        yield _Row(
            each,
            sender(question, known.of_k, name, ratio, world, steps) if few else each,
            {
                "local_steps": steps,
                "fragments": question.fragments if steps else 1,
                "delay": question.delay if steps else 0,
                **price(each, network, baseline),
                **(bandwidths(each, network) if any(question.local_steps) else {}),
            },
            {
                "baseline": baseline.name,
                "indices": each.codec.indices,
                "values": each.codec.values,
                "slowest": question.slowest(world),
                "quality": known.quality(name, ratio),
                "basis": known.basis(name, ratio),
                "union": known.union(name, ratio, world),
            },
        )


def _recommended(records: Sequence[Record], steps: Sequence[Seconds]) -> int:
    """Return which of some records to use: the simplest that cannot be told from the fastest at k elements."""
    scaled = [
        step * (r["seconds_at_k"] / r["seconds"]) for r, step in zip(records, steps, strict=True)
    ]
    timed = [i for i, r in enumerate(records) if r["measured"]]
    fastest = min(timed, key=lambda i: records[i]["seconds_at_k"])

    def alike(i: int) -> bool:
        # both were drawn from the same networks, so that what they share cancels
        low, _ = drawn_interval(scaled[i] / scaled[fastest])
        return low <= 1 + ALIKE

    def plainness(i: int) -> tuple[int, float]:
        name = records[i]["compressor"]
        known = [records[0]["baseline"], "none", "topk"]
        return known.index(name) if name in known else len(known), records[i]["seconds_at_k"]

    close = list(filter(alike, timed))
    if 0 not in close:  # what is said to be faster than the baseline can be told from it
        close = [i for i in close if not doubtful(records[i])] or close
    return min(close, key=plainness)
