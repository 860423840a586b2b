"""Scalars of gradients as TensorBoard event files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        f"{__name__} needs tensorboard: pip install 'gradstats[tensorboard]'"
    ) from error

from gradstats.errors import InputError
from gradstats.trace.record import StepRecord

if TYPE_CHECKING:
    import xarray

__all__ = ["add_step", "write_dataset"]

_SHOWN = (
    *("threshold", "selected", "quality", "bytes_sent", "bits_per_element"),
    *("union", "build_up", "density", "select_seconds", "communicate_seconds"),
)


def write_dataset(dataset: xarray.Dataset, log_dir: str | Path) -> None:
    """Write every quantity of a captured run over its steps, as scalars.

    Parameters
    ----------
    dataset : xarray.Dataset
        Quantities with a dimension ``step``, such as :func:`gradstats.over_training` returns. The other dimensions make
        the tags, ``quantity/label/…`` in the dataset's order: ``p/0/gradient/all`` is p of rank 0. NaN is left out.
    log_dir : str or Path
        Folder of one TensorBoard run, made if missing.

    Raises
    ------
    InputError
        If the dataset has no dimension ``step``.
    """
    if "step" not in dataset.dims:
        raise InputError(
            f"no dimension 'step' in the dataset; it has {', '.join(map(str, dataset.dims))}"
        )
    with SummaryWriter(str(log_dir)) as writer:
        for name, quantity in dataset.items():
            if "step" not in quantity.dims:
                continue
            series = quantity.transpose(..., "step").to_series().dropna().reset_index()
            for *labels, step, value in series.itertuples(index=False, name=None):
                writer.add_scalar("/".join(map(str, (name, *labels))), value, step)


def add_step(writer: SummaryWriter, record: StepRecord) -> None:
    """Add what a compressor did in one step; call it after ``backward()`` with ``state.last``.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Writer of your training.
    record : StepRecord
        Record of a step, :attr:`gradstats.hooks.CompressionState.last`.

    Notes
    -----
    The tags are ``compression/`` and the names of :class:`gradstats.hooks.StepRecord`. All values belong to this rank,
    except ``union``, ``build_up`` and ``density``. NaN is left out: ``quality`` and ``build_up`` where there is no k.
    """
    for name in _SHOWN:
        value = getattr(record, name)
        if not math.isnan(value):
            writer.add_scalar(f"compression/{name}", value, record.step)
