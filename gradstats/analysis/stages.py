"""Which stage of a multi-stage threshold is to blame, over many gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from gradstats.tables import Records

__all__ = ["worst_stages"]


def worst_stages(budget: Iterable[dict[str, Any]]) -> Records:
    """Reduce the records of :func:`gradstats.stage_budget` to one of each rule, ratio, kind and layer.

    Parameters
    ----------
    budget : iterable of dict
        Records of :func:`gradstats.stage_budget`.

    Returns
    -------
    Records
        trace, kind, layer, estimator, ratio, n (gradients), stages (their number, in words), quality (mean of k̂/k),
        blame (the stage that is farthest off in most gradients), blamed (in how many, in words), factor (mean of its
        got/asked there).
    """
    rules: dict[tuple[Any, ...], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    names = ("trace", "kind", "layer", "estimator", "ratio")
    for record in budget:
        gradients = rules.setdefault(tuple(record[n] for n in names), {})
        gradients.setdefault((record["step"], record["rank"]), []).append(record)
    records = Records()
    for key, gradients in rules.items():
        each = [*gradients.values()]
        # adaptive rules change their number of stages from gradient to gradient
        counts = sorted({len(stages) for stages in each})
        # ties go to the first stage that is farthest off
        blamed = Counter(next(s["stage"] for s in stages if s["blame"]) for stages in each)
        # the most blamed; of equally blamed the earliest, as later ones build on it
        worst, times = min(blamed.items(), key=lambda item: (-item[1], item[0]))
        factors = [
            s["factor"] for stages in each for s in stages if s["blame"] and s["stage"] == worst
        ]
        records.append(
            dict(zip(names, key, strict=True))
            | {
                "n": len(each),
                # one number where all are equal
                "stages": " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
                "quality": float(np.mean([stages[-1]["quality"] for stages in each])),
                "blame": worst,
                "blamed": f"{times} of {len(each)}",
                "factor": float(np.mean(factors)),
            }
        )
    return records
