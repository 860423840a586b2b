"""Models fitted to every gradient of a source: the records of ``gradstats fit``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Unpack

from gradstats.analysis.over import Spread, shares, subset_of
from gradstats.analysis.pieces import each_sketched
from gradstats.primitives.ratio import RATIOS, target_count
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.fitting import Fit, fit
from gradstats.statistics.goodness import bootstrap, measured
from gradstats.statistics.laws import LawName
from gradstats.statistics.laws.choice import chosen, law_of
from gradstats.statistics.laws.law import Method
from gradstats.statistics.resampling import add_holm
from gradstats.statistics.solution import FitError
from gradstats.statistics.tails import tail_test
from gradstats.tables import Records
from gradstats.trace.sources import Source

__all__ = ["LEVEL", "UNJUDGED", "fewest_replicates", "fit_records"]

UNTESTED = {
    "p_value": float("nan"),
    "p_naive": float("nan"),
    "p_holm": float("nan"),
    "subsample": 0,
}
"""Fields of a fit whose bootstrap was not run or failed."""

UNJUDGED = {
    "tail_ratio": float("nan"),
    "tail_k": 0,
    "p_tail": float("nan"),
    "visible": float("nan"),
}
"""Fields of a fit whose tail was not tested: no ratio in use leaves ten elements."""

LEVEL = 0.05
"""Level of the tests."""

_DISTANCES = ("nll", "aic", "bic", "ks", "wasserstein", "ad_upper", "tail_error")


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The work of :func:`fit_records` on the sketches of one gradient; it travels to a worker."""

    models: tuple[str, ...]
    method: Method | None
    replicates: int
    size: int
    seed: int
    wasserstein: bool

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        records = [
            labels | {"layer": layer, "model": model} | self._one(model, each)
            for layer, each in sketches.items()
            for model in self.models
        ]
        for layer in sketches:
            here = [r for r in records if r["layer"] == layer]
            # NaN where a fit is not by likelihood: such a fit is above no other
            least = min((r["aic"] for r in here if not math.isnan(r["aic"])), default=math.nan)
            for record in here:
                record["delta_aic"] = record["aic"] - least
        if self.replicates:
            # the whole gradient is no further test: its elements are the layers'
            layers = (r for r in records if r["layer"] != "all")
            add_holm(layers, "p_value", "p_holm", ("model",))
            # with fewer replicates even the smallest p-value is above the level once corrected
            if self.replicates < fewest_replicates(len(sketches) - 1):
                for record in records:
                    record["p_holm"] = math.nan
        return records

    def _one(self, model: str, reduced: Sketch) -> dict[str, Any]:
        method = self.method or law_of(model).default_method
        record: dict[str, Any] = {
            "method": method,
            "n": reduced.moments.count,
            "zeros": reduced.moments.zero_fraction,
        }
        nan = float("nan")
        try:
            fitted = fit(reduced, model, method)
        except FitError as error:
            numbers = dict.fromkeys(_DISTANCES, nan)
            record |= {"params": {}, "stderr": {}, **numbers, "log_quantile": {}, "quality": {}}
            record |= {"criteria": ""} | UNJUDGED
            # every record of a table has the same fields
            if self.replicates:
                record |= UNTESTED
            # a law that cannot describe a layer is a result, not an error
            return record | {"status": str(error)}
        distances = measured(fitted, reduced, wasserstein=self.wasserstein)
        record |= {
            "params": dict(fitted.params),
            "stderr": dict(fitted.stderr),
            # asdict takes fields, and tail_error is a property
            "tail_error": distances.tail_error,
            **asdict(distances),
            **_tail(fitted, distances.quality, reduced),
        }
        if self.replicates:
            record |= self._test(model, method, reduced)
        return record | {"status": "; ".join(fitted.flags) or "ok"}

    def _test(self, model: str, method: Method, reduced: Sketch) -> dict[str, Any]:
        try:
            test = bootstrap(
                reduced,
                model,
                method,
                size=self.size,
                replicates=self.replicates,
                seed=self.seed,
            )
        except FitError:
            return UNTESTED
        tested = {"p_value": test.p_value, "p_naive": test.p_naive, "subsample": test.size}
        return UNTESTED | tested


def fewest_replicates(layers: int) -> int:
    """Return the replicates with which a test of one of so many layers can reject at 5 %, corrected by Holm.

    Parameters
    ----------
    layers : int
        Number of layers.
    """
    # the smallest p-value of r replicates is 1/(r + 1): times the layers it must not exceed the level
    return math.ceil(max(layers, 1) / LEVEL) - 1


def _tail(fitted: Fit, quality: Mapping[float, float], reduced: Sketch) -> dict[str, Any]:
    """Return the test of the tail at the smallest ratio in use."""
    judged = [ratio for ratio in RATIOS if ratio in quality]
    if not judged:
        return UNJUDGED
    # the smallest ratio is the farthest in the tail
    ratio = min(judged)
    # the k of a rule: zeros count, non-finite elements do not
    k = target_count(ratio, reduced.numel - reduced.moments.nonfinite)
    test = tail_test(fitted, ratio, k, quality[ratio])
    return {"tail_ratio": ratio, "tail_k": k, "p_tail": test.p_value, "visible": test.visible}


@shares(Spread)
def fit_records(
    source: Source,
    models: Sequence[LawName | str] | Literal["all"] | None = None,
    *,
    method: Method | None = None,
    replicates: int = 0,
    size: int = 2000,
    seed: int = 0,
    wasserstein: bool = True,
    **over: Unpack[Spread],
) -> Records:
    """Fit models to every gradient of a source, whole (layer ``all``) and optionally by layer.

    Parameters
    ----------
    source : Source
        Source to read piece by piece.
    models : sequence of str or "all", optional
        Names of :data:`gradstats.statistics.laws.LAWS`, or ``"all"``; by default those that are no controls.
    method : Method, optional
        Method of all fits, as in :func:`gradstats.fit`. By default each model has its own.
    replicates : int, optional
        Replicates of the bootstrap behind p_value. 0, the default, runs none.
    size : int, optional
        Elements of the subsample that the bootstrap tests.
    seed : int, optional
        Seed of the subsample and the replicates.
    wasserstein : bool, optional
        Whether to measure the Wasserstein distance, which takes longer than all else; NaN otherwise.
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Records
        trace, step, rank, kind, layer, model, method, n, zeros, params, stderr, the fields of
        :class:`gradstats.statistics.goodness.Goodness`; delta_aic, AIC above the least of the same elements' models;
        tail_ratio, tail_k, p_tail and visible, the test of the tail at the smallest ratio in use
        (:func:`gradstats.statistics.tails.tail_test`); with a bootstrap p_value, p_naive, subsample and p_holm
        (p_value of a layer, corrected for the number of layers; NaN where so few replicates cannot reject any); and
        status. A layer that a model cannot describe has empty numbers and the reason in ``status``.

    Raises
    ------
    InputError
        If a model or method is unknown, or nothing matches.
    """
    work = _Fitting(tuple(chosen(models, method)), method, replicates, size, seed, wasserstein)
    return each_sketched(source, subset_of(over), work, over["client"], over["on_progress"])
