"""What a plan is asked of a source: its options, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from gradstats.collectives.codec import PLAIN, Codec, check_codec
from gradstats.compressors import COMPRESSORS, CompressorName, codecs, compressor_class
from gradstats.errors import InputError
from gradstats.hooks.local_steps import check_room
from gradstats.network.model import Network
from gradstats.network.waiting import waiting
from gradstats.primitives.ratio import (
    check_count,
    check_number,
    check_ratios,
    check_several,
    shown,
)

__all__ = ["BASELINES", "DDP_BYTES", "Baseline", "Choice", "Link", "Question", "ask"]

Choice: TypeAlias = tuple[str, float | None]
"""Name of a compressor, and its ratio; None for one that has no ratio."""
Link: TypeAlias = tuple[float, float]
"""Bandwidths in bit/s at which a worker sends and receives."""

Baseline: TypeAlias = Literal["none", "bf16"]
BASELINES: dict[Baseline, str] = {"none": "none", "bf16": "torch-bf16"}
"""Names of what compressors are compared with, and the exchange behind each."""
DDP_BYTES = {"none": 4, "torch-bf16": 2}
"""Exchanges of DDP itself, bucket by bucket, and their bytes for each element."""
_BACKWARD = 2 / 3
"""Share of the backward pass in a step's computing: two of a layer's three matrix products belong to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is asked.

    Attributes
    ----------
    network : Network
        Cost model, whose all-reduce costs something per byte.
    times : list of float
        Measured seconds of a step's forward and backward pass, at least one.
    workers : list of int
        Numbers of workers, at least one.
    ratios : list of float
        Kept fractions k/d.
    names : list of str
        Compressors that the plan considers.
    baseline : str
        Name of the exchange that they are compared with.
    links : list of (float, float)
        Bandwidths up and down, in bit/s, at least one pair.
    local_steps : list of int
        Numbers of local steps in ascending order, at least one; 0 for DDP.
    fragments : int
        Parts of the model that are exchanged at different local steps.
    delay : int
        Local steps that an exchange takes in the background.
    draws : int
        How many networks are drawn for the intervals.
    codec : Codec
        What positions and values are on the wire.
    """

    network: Network
    times: list[float]
    workers: list[int]
    ratios: list[float]
    names: list[str]
    baseline: str
    links: list[Link]
    local_steps: list[int]
    fragments: int
    delay: int
    draws: int
    codec: Codec

    @property
    def compute(self) -> float:
        """Time of a step's forward and backward pass, in seconds."""
        return float(np.median(self.times))

    def slowest(self, world: int) -> float:
        """Return how many times as long as the median the slowest worker computes; NaN if one time does not say.

        Parameters
        ----------
        world : int
            Number of workers.
        """
        return waiting(self.times, world)

    @property
    def backward(self) -> float:
        """Time of the backward pass, in seconds."""
        return _BACKWARD * self.compute

    def choices(self, local_steps: int = 0) -> list[Choice]:
        """Return the compressors to compare, each with every ratio that it takes; the baseline first.

        Parameters
        ----------
        local_steps : int
            Number of local steps. DDP's average of bfloat16 is not there with any.
        """
        choices: list[Choice] = []
        for name in dict.fromkeys([self.baseline, "none", *self.names]):
            if name in DDP_BYTES or not compressor_class(name).has_ratio:
                choices.append((name, None))
            else:
                choices += [(name, ratio) for ratio in dict.fromkeys(self.ratios)]
        # LocalSteps exchanges without DDP, whose hook this is
        return [each for each in choices if not local_steps or each[0] != BASELINES["bf16"]]

    @property
    def left_out(self) -> list[str]:
        """Every compressor that the plan does not consider."""
        return [name for name in COMPRESSORS if name not in self.names and name != "none"]


def ask(  # the user's options, see :func:`gradstats.network.plan`
    network: Network | str | Path,
    compute: float | Sequence[float],
    workers: Sequence[int],
    ratios: Sequence[float],
    compressors: Sequence[CompressorName | str],
    *,
    rates: Sequence[float | Link] = (),
    local_steps: Sequence[int] = (0,),
    fragments: int = 1,
    delay: int = 0,
    draws: int = 200,
    codec: Codec = PLAIN,
    baseline: Baseline = "none",
) -> Question:
    """Check the options of :func:`gradstats.network.plan`, whose parameters these are."""
    ratios, draws = check_ratios(ratios), check_count(draws, "draws", 0)
    compressors = check_several(compressors, "compressors")
    if isinstance(network, str | Path):
        network = Network.load(network)
    elif not isinstance(network, Network):
        raise InputError(f"network must be a Network or its file, not {shown(network)}")
    workers = [check_count(n, "workers") for n in check_several(workers, "workers")]
    if not workers:
        raise InputError("a plan needs at least 1 worker")
    several = isinstance(compute, Sequence | np.ndarray) and not isinstance(compute, str)
    seconds: Any = check_several(compute, "compute") if several else [compute]  # type: ignore[arg-type]
    times = [check_number(each, "compute", 0, math.inf, hint=", seconds") for each in seconds]
    if not times:
        raise InputError("compute must be seconds of a step, not an empty list")
    # negated, so that NaN is refused as well
    if not network.link()[1].value > 0:
        raise InputError("the network's all-reduce costs nothing per byte; measure larger sizes")
    # shaped links may have two rates; others have one
    up, down = (network.about.get(way) or network.rate for way in ("up", "down"))
    links = [_link(rate) for rate in check_several(rates, "rates") or [(up, down)]]
    local_steps = _check_local(local_steps, fragments, delay)
    if baseline not in BASELINES:
        raise InputError(f"baseline must be {' or '.join(BASELINES)}, not {shown(baseline)}")
    for name in compressors:
        # dense averaging uses no codec, but may be named beside compressors that do
        check_codec(codec, name, ("indices", "values") if name == "none" else codecs(name))
    return Question(
        network=network,
        times=times,
        workers=workers,
        ratios=list(ratios),
        names=list(compressors) or _priceable(network),
        baseline=BASELINES[baseline],
        links=links,
        local_steps=local_steps,
        fragments=fragments,
        delay=delay,
        draws=draws,
        codec=codec,
    )


def _priceable(network: Network) -> list[str]:
    """Return the compressors whose selection was measured; of an assumed network, all."""
    measured = {line.operation for line in network.lines}
    return [
        name
        for name in COMPRESSORS
        if f"select:{name}" in measured or (network.about.get("assumed") and name != "none")
    ]


def _link(rate: float | Link) -> Link:
    """Return the bit/s at which a worker sends and receives."""
    both = check_several(rate, "a pair of rates") if isinstance(rate, Sequence) else (rate, rate)
    if len(both) != 2:
        raise InputError(f"a link has a rate up and a rate down, not {len(both)} rates")
    up, down = (check_number(each, "a rate", 0, math.inf, hint=", bit/s") for each in both)
    return up, down


def _check_local(local_steps: Sequence[int], fragments: int, delay: int) -> list[int]:
    """Return numbers of local steps, in order, that leave room for the fragments and the delay."""
    asked = check_several(local_steps, "local_steps")
    counts = sorted({check_count(each, "local_steps", 0) for each in asked}) or [0]
    for steps in counts:
        check_room(steps, fragments, delay)
    if not any(counts) and (fragments > 1 or delay):
        raise InputError("fragments and a delay are of local steps: give local steps, too")
    return counts
