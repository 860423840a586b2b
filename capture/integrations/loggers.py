"""What gradstats knows of a step as one dictionary of numbers and histograms, for Weights & Biases, MLflow and others.

A logger is called with such a dictionary and a step: ``log(step_values(state.last), step)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError
from gradstats.primitives import Array, histogram
from gradstats.primitives.histogram import bin_edges
from gradstats.primitives.ratio import target_count
from gradstats.primitives.sketch import sketch
from gradstats.trace.record import StepRecord

if TYPE_CHECKING:
    import xarray

__all__ = [
    "Bins",
    "MlflowLogger",
    "Values",
    "WandbLogger",
    "dataset_values",
    "gradient_values",
    "step_values",
]

_SHOWN = (
    *("threshold", "selected", "quality", "bytes_sent", "bits_per_element"),
    *("union", "build_up", "density", "select_seconds", "communicate_seconds"),
)
_QUANTILES = (0.1, 0.01, 0.001)


class Bins(NamedTuple):
    """A histogram of magnitudes, one bin for every power of two that has any.

    Attributes
    ----------
    counts : int64 array, shape (n,)
        Number of elements in each bin.
    edges : float64 array, shape (n + 1,)
        Ends of the bins, in the gradient's unit.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]


Values: TypeAlias = Mapping[str, float | Bins]
"""Numbers and histograms of one step by name."""


def step_values(record: StepRecord) -> dict[str, float]:
    """Return what a compressor did in one step, from ``state.last`` after ``backward()``.

    Parameters
    ----------
    record : StepRecord
        Record of a step, :attr:`gradstats.hooks.CompressionState.last`.

    Returns
    -------
    dict of str to float
        The names are ``compression/`` and those of :class:`gradstats.hooks.StepRecord`. All values belong to this rank,
        except ``union``, ``build_up`` and ``density``. NaN is left out: ``quality`` and ``build_up`` where there is no
        k.
    """
    values = {f"compression/{name}": float(getattr(record, name)) for name in _SHOWN}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def gradient_values(x: Array, name: str = "gradient") -> dict[str, float | Bins]:
    """Return the size of a gradient's elements: mean, maximum, zeros, exact thresholds, and a histogram.

    Parameters
    ----------
    x : array_like
        Gradient.
    name : str
        Text before the names.

    Returns
    -------
    dict of str to float or Bins
        mean, max (of the magnitudes), zero_fraction, threshold_0.1 to threshold_0.001, magnitudes (:class:`Bins`);
        numbers and histogram of nothing are left out.
    """
    sketched = sketch(x)
    m = sketched.magnitudes
    values: dict[str, float | Bins] = {f"{name}/zero_fraction": m.zero_fraction}
    if not m.count:
        return values
    values |= {f"{name}/mean": m.mean, f"{name}/max": m.max}
    for ratio in _QUANTILES:
        # k as everywhere, of all elements: of a gradient with many zeros the threshold of k may be 0
        values[f"{name}/threshold_{ratio:g}"] = m.upper_quantile(
            target_count(ratio, sketched.numel)
        )
    # bits=0: a bin for each power of two
    counts, edges = histogram(x, bits=0).counts, bin_edges(0)
    first, last = np.flatnonzero(counts)[[0, -1]]
    bins = Bins(np.asarray(counts[first : last + 1], np.int64), edges[first : last + 2])
    return values | {f"{name}/magnitudes": bins}


def dataset_values(dataset: xarray.Dataset) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield every quantity of a captured run step by step.

    Parameters
    ----------
    dataset : xarray.Dataset
        Quantities with a dimension ``step``, such as :func:`gradstats.over_training` returns. The other dimensions make
        the names, ``quantity/label/…`` in the dataset's order: ``p/0/gradient/all`` is p of rank 0. NaN is left out.

    Yields
    ------
    step : int
        Training step, ascending.
    values : dict of str to float
        Numbers by name.

    Raises
    ------
    InputError
        If the dataset has no dimension ``step``.
    """
    if "step" not in dataset.dims:
        raise InputError(
            f"no dimension 'step' in the dataset; it has {', '.join(map(str, dataset.dims))}"
        )
    # by step first: quantities may have different steps, and loggers want them in order
    scalars: dict[int, dict[str, float]] = {}
    for name, quantity in dataset.items():
        if "step" not in quantity.dims:
            continue
        # the step last, so that what comes before it are labels
        series = quantity.transpose(..., "step").to_series().dropna().reset_index()
        for *labels, step, value in series.itertuples(index=False, name=None):
            scalars.setdefault(int(step), {})["/".join(map(str, (name, *labels)))] = float(value)
    yield from sorted(scalars.items())


class WandbLogger:
    """Log to a run of Weights & Biases: ``log = WandbLogger(wandb.init())``, then ``log(values, step)``.

    Parameters
    ----------
    run : wandb.sdk.wandb_run.Run
        Run, as ``wandb.init`` returns it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, values: Values, step: int) -> None:
        """Log numbers, and histograms as ``wandb.Histogram``.

        Parameters
        ----------
        values : mapping of str to float or Bins
            What one of this module's functions returned.
        step : int
            Training step.
        """
        shown: dict[str, Any] = dict(values)
        for name, value in values.items():
            # imported only where there is a histogram: numbers need no wandb
            if isinstance(value, Bins):
                import wandb

                shown[name] = wandb.Histogram(np_histogram=(value.counts, value.edges))
        self._run.log(shown, step=step)


class MlflowLogger:
    """Log to MLflow's active run: ``log = MlflowLogger(mlflow)``, then ``log(values, step)``.

    MLflow has no histograms: of a :class:`Bins` each bin's count becomes a metric, named after its lower end.

    Parameters
    ----------
    mlflow : object
        The module ``mlflow``, or anything with its ``log_metrics``.
    """

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow

    def __call__(self, values: Values, step: int) -> None:
        """Log numbers, and the counts of histograms.

        Parameters
        ----------
        values : mapping of str to float or Bins
            What one of this module's functions returned.
        step : int
            Training step.
        """
        metrics: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, Bins):
                ends = zip(value.edges[:-1], value.counts, strict=True)
                metrics |= {f"{name}/from_{low:.3g}": float(n) for low, n in ends}
            else:
                metrics[name] = value
        # MLflow's names have letters, digits, and few signs
        clean = {
            "".join(c if c.isalnum() or c in "_-. /" else "_" for c in n): v
            for n, v in metrics.items()
        }
        self._mlflow.log_metrics(clean, step=step)
