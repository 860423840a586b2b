"""Models fitted to every gradient of a source: the records of ``gradstats fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradstats.analysis.pieces import each_sketched
from gradstats.primitives.sketch import Sketch
from gradstats.statistics.fitting import MODELS, Method, check_method, default_method, fit
from gradstats.statistics.goodness import bootstrap, goodness
from gradstats.statistics.solution import FitError
from gradstats.trace.sources import Source

__all__ = ["fit_records"]


@dataclass(frozen=True, slots=True)
class _Fitting:
    """What :func:`fit_records` does with the sketches of one gradient; travels to a worker."""

    models: tuple[str, ...]
    method: Method | None
    replicates: int
    size: int
    seed: int

    def __call__(self, labels: dict[str, Any], sketches: dict[str, Sketch]) -> list[dict[str, Any]]:
        return [
            labels | {"layer": layer, "model": model} | self._one(model, reduced)
            for layer, reduced in sketches.items()
            for model in self.models
        ]

    def _one(self, model: str, reduced: Sketch) -> dict[str, Any]:
        method = self.method or default_method(model)
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
            if self.replicates:
                record |= _UNTESTED
            return record | {"status": str(error)}
        distances = goodness(fitted, reduced)
        record |= {
            "params": dict(fitted.params),
            "stderr": dict(fitted.stderr),
            "tail_error": distances.tail_error,
            **asdict(distances),
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
            return _UNTESTED
        return {"p_value": test.p_value, "p_naive": test.p_naive, "subsample": test.size}


_UNTESTED = {"p_value": float("nan"), "p_naive": float("nan"), "subsample": 0}
_DISTANCES = ("nll", "aic", "bic", "ks", "wasserstein", "ad_upper", "tail_error")


def fit_records(
    source: Source,
    models: Sequence[str] = MODELS[:3],
    *,
    method: Method | None = None,
    per_layer: bool = False,
    replicates: int = 0,
    size: int = 2000,
    seed: int = 0,
    client: Any = None,
    on_progress: Callable[[], None] = lambda: None,
    **selection: Any,
) -> list[dict[str, Any]]:
    """Fit models to every gradient of a source, whole (layer ``all``) and optionally by layer.

    Parameters
    ----------
    source : read piece by piece.
    models : names; the three sparsity-inducing ones if absent.
    method : as for :func:`gradstats.fit`; :func:`default_method` of each model if None.
    replicates : of the bootstrap behind p_value; none if 0.
    size, seed : of the subsample it tests.
    client : dask client to do the work.
    on_progress : called after every gradient.
    selection : steps, ranks, kinds.

    Returns
    -------
    list of dict
        trace, step, rank, kind, layer, model, method, n, zeros, params, stderr, the fields of
        :class:`gradstats.goodness.Goodness`, p_value, p_naive and subsample if asked for, status. A layer that
        a model cannot describe has empty numbers and the reason in ``status``.
    """
    for model in models:
        check_method(model, method or default_method(model))
    work = _Fitting(tuple(models), method, replicates, size, seed)
    return each_sketched(source, work, per_layer, client, on_progress, selection)
