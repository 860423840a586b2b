"""Which code reads a tensor: compiled loops, torch operators, or Triton kernels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from gradstats.errors import InputError, unknown
from gradstats.primitives.arrays import Array, is_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "DeviceCode", "backend", "device_code"]

Backend: TypeAlias = Literal["compiled", "torch", "triton"]
"""What reads a tensor, see :func:`backend`."""

_forced: Backend | None = None

_LEAST_CAPABILITY = (7, 5)
"""Compute capability from which on Triton compiles the kernels."""


class DeviceCode(Protocol):
    """What a module offers that reads tensors where they are; no more than a few scalars go to the host."""

    def sums(
        self, x: Any, above: float, log: bool
    ) -> tuple[int, int, int, float, float, float, float]:
        """Return (count, zeros, nonfinite, Σ|x|, Σx², Σln|x|, max) over finite non-zero |x| ≥ above."""

    def tail(self, x: Any, above: float) -> tuple[int, float, float]:
        """Return (count, Σ|x|, Σx²) over the same elements."""

    def signed(self, x: Any) -> tuple[int, float, float]:
        """Return (count, Σx, Σx²) over the finite elements."""

    def counts(self, x: Any, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, on the device, the elements per bin of leading bits (NaN too, zeros not), and the exact zeros."""

    def select(self, x: Any, low: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ascending positions and values of |x| ≥ low > 0, without NaN."""

    def pack_bits(self, bits: Any) -> torch.Tensor:
        """Return bool bits, eight a byte, the first the lowest."""

    def unpack_bits(self, packed: Any, numel: int) -> torch.Tensor:
        """Return the first bits of packed ones, as bool."""


@contextmanager
def _reading_with(name: Backend) -> Iterator[None]:
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def backend(name: Backend) -> AbstractContextManager[None]:
    """Choose what reads tensors, inside a ``with`` statement and in the whole process.

    Without it the device decides: compiled loops read CPU tensors; Triton kernels read CUDA tensors, where Triton is
    installed with a C compiler and the GPU is of compute capability 7.5 or newer; torch operators read all others.
    NumPy arrays are always read by the compiled loops. No GPU has been tried yet.

    Parameters
    ----------
    name : {"compiled", "torch", "triton"}
        Code that reads. ``"compiled"`` copies tensors of other devices to the host, chunk by chunk; the others read
        them where they are. ``"triton"`` leaves float64 and strided tensors to torch's operators.

    Returns
    -------
    context manager
        The choice, which ends with the block.

    Raises
    ------
    InputError
        If there is no such code, or Triton is not installed.

    Examples
    --------
    >>> import torch
    >>> from gradstats import moments
    >>> with backend("torch"):
    ...     moments(torch.tensor([1.0, -3.0])).max
    3.0
    """
    names = get_args(Backend)
    if not isinstance(name, str) or name not in names:
        raise unknown("backend", name, names)
    if name == "triton" and not _has_triton():
        raise InputError('Triton is not installed: pip install triton, or use backend("torch")')
    return _reading_with(name)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _by_device(device: torch.device) -> Backend:
    """Return what reads the tensors of a device. Triton builds its launcher with a C compiler."""
    if device.type == "cpu":
        return "compiled"
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    if device.type != "cuda" or not compiler or not _has_triton():
        return "torch"
    capability = sys.modules["torch"].cuda.get_device_capability(device)
    return "triton" if capability >= _LEAST_CAPABILITY else "torch"


def device_code(x: Array) -> DeviceCode | None:
    """Return the module that reads an array on its device; None for the compiled loops.

    Parameters
    ----------
    x : array_like
        Checked gradient.
    """
    if not is_tensor(x):
        return None
    name = _forced or _by_device(x.device)
    if name == "compiled":
        return None
    code: DeviceCode
    if name == "triton" and x.is_contiguous() and "float64" not in str(x.dtype):
        from gradstats.primitives import triton_kernels as code
    else:
        from gradstats.primitives import operators as code
    return code
