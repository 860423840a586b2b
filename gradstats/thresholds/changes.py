"""Two versions of the rules by their times: what is slower or faster; ``gradstats bench --compare``."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.console import no_progress
from gradstats.errors import InputError
from gradstats.statistics.resampling import holm
from gradstats.tables import Records

__all__ = ["FEWEST_ROUNDS", "KEY", "MARGIN", "alternated", "compared"]

FEWEST_ROUNDS = 15
"""Rounds of either run below which nothing is said of a difference."""
MARGIN = 0.05
"""Relative change up to which a row counts as the same: what another process or another hour does to the same code."""
_LEVEL = 0.05
_Rounds: TypeAlias = NDArray[np.float64]

KEY = ("compressor", "gradient", "numel", "layers", "ratio", "threads", "cache")
"""Fields by which two runs of :func:`gradstats.thresholds.bench.bench` are compared."""


def compared(records: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> Records:
    """Compare a run of ``bench`` with an earlier one, in streams: a slower machine reads the data slower, too.

    Parameters
    ----------
    records : sequence of mapping
        The run.
    before : sequence of mapping
        The earlier one.

    Returns
    -------
    Records
        One per combination that both have: its fields, ``streams`` and ``streams_before``, ``change`` (the first over
        the second) with the 95 % interval ``change_low`` to ``change_high``, ``quality`` and ``quality_before``,
        ``p_holm`` and ``status``: ``"slower"`` or ``"faster"`` where that is so by more than :data:`MARGIN`, ``"same"``
        where the interval lies within it, else ``"unknown"``, also where a run has fewer than :data:`FEWEST_ROUNDS`
        rounds; rounds, the smaller number of them.

    Notes
    -----
    The test is that of Mann and Whitney (1947) of the rounds of one run against those of the other times 1 ± the
    margin, the p-value corrected for the number of rows (Holm 1979); the interval is that of the median ratio of two
    rounds (Hodges and Lehmann 1963). Rounds of one process share what that process has, such as where its arrays lie:
    only runs in alternating processes, :func:`alternated`, have that among their differences.
    """
    earlier = {_key(record): record for record in before}
    both = [(r, old) for r in records if (old := earlier.get(_key(r))) is not None]
    rounds = [[np.asarray(r.get("rounds", ()), np.float64) for r in pair] for pair in both]
    comparisons = Records()
    for (record, old), pair, (p, low, high) in zip(both, rounds, _tests(rounds), strict=True):
        comparisons.append(
            {
                **dict(zip(KEY, _key(record), strict=True)),
                "streams_before": old["streams"],
                "streams": record["streams"],
                "change": record["streams"] / old["streams"],
                "change_low": low,
                "change_high": high,
                "quality_before": old["quality"],
                "quality": record["quality"],
                "p": p,
                "rounds": min(each.size for each in pair),
            }
        )
    for record, p in zip(
        comparisons, holm(np.array([r.pop("p") for r in comparisons])), strict=True
    ):
        record |= {"p_holm": float(p), "status": _status(record, float(p))}
    return comparisons


def _tests(rounds: Sequence[Sequence[_Rounds]]) -> list[tuple[float, float, float]]:
    """Return each row's p-value of a change within the margin, and interval of the ratio; NaN of too few rounds."""
    answers = [(math.nan,) * 3] * len(rounds)
    sizes = [(new.size, old.size) for new, old in rounds]
    for size in {size for size in sizes if min(size) >= FEWEST_ROUNDS}:
        rows = [i for i, each in enumerate(sizes) if each == size]
        new, old = (np.stack([rounds[i][side] for i in rows]) for side in (0, 1))
        for i, answer in zip(rows, _test(new, old), strict=True):
            answers[i] = answer
    return answers


def _test(new: _Rounds, old: _Rounds) -> Iterable[tuple[float, float, float]]:
    """Return the same of rows with equal numbers of rounds, asked together: a call of SciPy takes longer than a row."""
    from scipy.stats import mannwhitneyu

    # one test at each end of the margin; their minimum counts twice, for there are two
    slower = mannwhitneyu(new, (1 + MARGIN) * old, alternative="greater", axis=1).pvalue
    faster = mannwhitneyu(new, old / (1 + MARGIN), alternative="less", axis=1).pvalue
    n, m = new.shape[1], old.shape[1]
    ratios = np.sort((new[:, :, None] / old[:, None, :]).reshape(len(new), -1), axis=1)
    # quotients to leave out at either end: 2.5 % of U's distribution, which is nearly normal from 15 rounds on
    out = math.floor(n * m / 2 - 1.96 * math.sqrt(n * m * (n + m + 1) / 12))
    p = np.minimum(1.0, 2 * np.minimum(slower, faster))
    return zip(p.tolist(), ratios[:, out].tolist(), ratios[:, -1 - out].tolist(), strict=True)


def _status(record: Mapping[str, Any], p: float) -> str:
    if p <= _LEVEL:
        return "slower" if record["change"] > 1 else "faster"
    ends = record["change_low"], record["change_high"]
    return "same" if ends[0] >= 1 / (1 + MARGIN) and ends[1] <= 1 + MARGIN else "unknown"


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what was timed; a run of before there was a choice is of layered gradients in one part."""
    return tuple({"gradient": "layered", "layers": 1, "cache": "warm", **record}[n] for n in KEY)


def alternated(
    other: Path,
    arguments: Sequence[str],
    repeats: int,
    on_progress: Callable[[], None] = no_progress,
) -> tuple[Records, Records]:
    """Run ``gradstats bench`` of this version and of another one in turns, each round in a process of its own.

    Parameters
    ----------
    other : Path
        Folder that holds the other version's package ``gradstats``, such as a checkout or a ``site-packages``.
    arguments : sequence of str
        Options of ``gradstats bench``, without ``--repeats``, ``--format`` and ``--compare``.
    repeats : int
        Rounds of each version.
    on_progress : callable
        Called after every process.

    Returns
    -------
    Records, Records
        Those of this version and of the other one; ``streams`` is the median over the rounds, which are in ``rounds``.

    Raises
    ------
    InputError
        If the folder holds no such package, or its ``bench`` fails.
    """
    if not (other / "gradstats" / "__init__.py").is_file():
        raise InputError(f"{other} holds no package gradstats: name a checkout, or a JSON of bench")
    # the folder that holds this package, as `other` holds the other one
    here = Path(__file__).parents[2]
    several: tuple[list[Any], list[Any]] = ([], [])
    for turn in range(repeats):
        for side in (0, 1) if turn % 2 else (1, 0):  # neither always goes first
            several[side].append(_run((here, other)[side], arguments))
            on_progress()
    new, old = (_joined(runs) for runs in several)
    return new, old


def _run(folder: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Time one round of the version in a folder."""
    # before the current folder, and before what is installed
    program = f"import sys; sys.path[0] = {str(folder.resolve())!r}; from gradstats.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", *arguments]
    command += ["--repeats", "1", "--format", "json"]
    # a failure is told by output that is no JSON
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        records: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise InputError(f"bench of {folder} failed: {reason}") from None
    return records


def _joined(runs: Sequence[Sequence[dict[str, Any]]]) -> Records:
    """Return one record for each combination, with the rounds of all runs."""
    records = Records()
    for same in zip(*runs, strict=True):
        rounds = [record["streams"] for record in same]
        quality = float(np.mean([record["quality"] for record in same]))
        one = {"streams": float(np.median(rounds)), "quality": quality, "rounds": rounds}
        records.append(same[0] | one | {"repeats": len(rounds)})
    return records
