"""Numbers and histograms of gradients as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        f"{__name__} needs tensorboard: pip install 'gradstats[tensorboard]'"
    ) from error

from capture.integrations.loggers import Bins, Values, dataset_values, step_values
from gradstats.trace.record import StepRecord

if TYPE_CHECKING:
    import xarray

__all__ = ["TensorBoardLogger", "add_step", "write_dataset"]


class TensorBoardLogger:
    """Log to TensorBoard: ``log = TensorBoardLogger(writer)``, then ``log(values, step)``.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Writer of your training.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def __call__(self, values: Values, step: int) -> None:
        """Add numbers and histograms.

        Parameters
        ----------
        values : mapping of str to float or Bins
            What one of :mod:`capture.integrations.loggers`' functions returned.
        step : int
            Training step.
        """
        for name, value in values.items():
            if isinstance(value, Bins):
                # sums are not known of a histogram: those of the middles of its bins stand for them
                middle = (value.edges[:-1] + value.edges[1:]) / 2
                self._writer.add_histogram_raw(
                    name,
                    min=value.edges[0],
                    max=value.edges[-1],
                    num=int(value.counts.sum()),
                    sum=float(middle @ value.counts),
                    sum_squares=float(np.square(middle) @ value.counts),
                    # upper ends
                    bucket_limits=value.edges[1:].tolist(),
                    bucket_counts=value.counts.tolist(),
                    global_step=step,
                )
            else:
                self._writer.add_scalar(name, value, step)


def write_dataset(dataset: xarray.Dataset, log_dir: str | Path) -> None:
    """Write every quantity of a captured run over its steps, as scalars.

    Parameters
    ----------
    dataset : xarray.Dataset
        Quantities with a dimension ``step``, as :func:`capture.integrations.loggers.dataset_values` takes them.
    log_dir : str or Path
        Folder of one TensorBoard run, made if missing.

    Raises
    ------
    InputError
        If the dataset has no dimension ``step``.
    """
    # before there is a file: the dataset may be refused
    steps = list(dataset_values(dataset))
    with SummaryWriter(str(log_dir)) as writer:
        log = TensorBoardLogger(writer)
        for step, values in steps:
            log(values, step)


def add_step(writer: SummaryWriter, record: StepRecord) -> None:
    """Add what a compressor did in one step; call it after ``backward()`` with ``state.last``.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Writer of your training.
    record : StepRecord
        Record of a step; its numbers are those of :func:`capture.integrations.loggers.step_values`.
    """
    TensorBoardLogger(writer)(step_values(record), record.step)
