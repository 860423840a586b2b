"""Which code reads a tensor: compiled loops, torch operators, or Triton kernels."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, unknown, warn
from gradstats.primitives.arrays import Array, check, is_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "DeviceCode", "backend", "device_code", "memory_of", "readable"]

Backend: TypeAlias = Literal["compiled", "torch", "triton"]
"""What reads a tensor, see :func:`backend`."""

_DEFAULTS: dict[str, Backend] = {"cuda": "torch", "xpu": "torch"}
"""Types of device whose tensors are not copied to the host. Sums need float64, which Apple's MPS does not have."""

MANY = 1 << 23
"""Elements of a CUDA tensor from which Triton reads it where it runs: of fewer, launches take most of the time."""


class DeviceCode(Protocol):
    """What a module offers that reads tensors where they are; no more than a few scalars go to the host."""

    def sums(self, x: Any, above: float, log: bool) -> torch.Tensor:
        """Return the sums over finite non-zero |x| ≥ above, and leave them on the device.

        Parameters
        ----------
        x : tensor
            Gradient of any shape.
        above : float
            Least magnitude that is summed, a number of the gradient's precision.
        log : bool
            Sum the logarithms too; otherwise their sum is 0.

        Returns
        -------
        float64 tensor, shape (7,)
            Count, zeros, NaN and infinities, Σ|x|, Σx², Σ ln|x| and the largest: :data:`gradstats.primitives.Sums`.
        """

    def tail(self, x: Any, above: float) -> tuple[int, float, float]:
        """Return (count, Σ|x|, Σx²) over the same elements.

        Parameters
        ----------
        x : tensor
            Gradient of any shape.
        above : float
            Least magnitude that is summed, a number of the gradient's precision.
        """

    def signed(self, x: Any) -> tuple[int, float, float]:
        """Return (count, Σx, Σx²) over the finite elements.

        Parameters
        ----------
        x : tensor
            Gradient of any shape.
        """

    def counts(self, x: Any, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the elements by their leading bits, NaN too, and leave the counts on the device.

        Parameters
        ----------
        x : tensor
            Gradient of any shape; float64 is rounded to float32.
        bits : int
            Leading mantissa bits that tell bins apart.

        Returns
        -------
        counts : int64 tensor, shape (2^(8 + bits),)
            Elements per bin, zeros left out.
        zeros : int64 tensor, shape ()
            Elements that are zero.
        """

    def select(self, x: Any, low: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ascending positions and values of |x| ≥ low > 0, without NaN.

        Parameters
        ----------
        x : tensor
            Gradient of any shape.
        low : float
            Least magnitude selected, a number of the gradient's precision.
        """

    def topk(self, x: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ascending positions and values of exactly k elements with the largest magnitudes.

        Of those tied with the k-th the first are taken. NaN counts as zero, and comes back as 0.

        Parameters
        ----------
        x : tensor
            Gradient of any shape, of at least k elements.
        k : int
            Number of elements, at least 1.
        """

    def pack_bits(self, bits: Any) -> torch.Tensor:
        """Pack bits, eight a byte: element i is bit i mod 8, counted from the lowest, of byte i div 8.

        Parameters
        ----------
        bits : bool tensor, shape (n,)
            The bits.
        """

    def unpack_bits(self, packed: Any, numel: int) -> torch.Tensor:
        """Return the first bits of what :meth:`pack_bits` made, as bool.

        Parameters
        ----------
        packed : uint8 tensor, shape (bytes,)
            Packed bits.
        numel : int
            Number of bits wanted.
        """

    def bernoulli(
        self, words: int, numerator: int, denominator: int, generator: torch.Generator
    ) -> torch.Tensor:
        """Return words of 64 random bits, each 1 with exactly the probability of a fraction.

        Parameters
        ----------
        words : int
            Number of words.
        numerator, denominator : int
            The fraction, from 0 to below 1.
        generator : torch.Generator
            Generator of the bits, on the device wanted. From one state of it each code draws other bits.

        Returns
        -------
        int64 tensor, shape (words,)
            The bits.
        """


class _Choice(AbstractContextManager[None]):
    """A block in which one code reads, in every thread: hooks run in threads of autograd."""

    active: ClassVar[list[_Choice]] = []
    """Choices of the blocks that have not ended; the last one rules. Blocks of two threads may overlap."""

    _lock: ClassVar = Lock()

    def __init__(self, name: Backend) -> None:
        self.name = name

    def __enter__(self) -> None:
        with self._lock:
            self.active.append(self)

    def __exit__(self, *error: object) -> None:
        with self._lock:  # the last one of its own: a choice may be entered again inside its block
            del self.active[-1 - self.active[::-1].index(self)]


def backend(name: Backend) -> AbstractContextManager[None]:
    """Choose what reads tensors, inside a ``with`` statement and in the whole process.

    Without it the device decides: torch operators read the tensors of CUDA and XPU devices, compiled loops all others,
    and Triton those of CUDA from 8,388,608 elements on, where it is installed, finds a compiler, and reads the dtype.
    NumPy arrays are always read by the compiled loops. Where blocks overlap, as those of two threads may, the one
    entered last rules until it ends.

    Parameters
    ----------
    name : {"compiled", "torch", "triton"}
        Code that reads. ``"compiled"`` copies tensors of other devices to the host, chunk by chunk; the others read
        them where they are. ``"torch"`` needs a device with float64. ``"triton"`` leaves float64 and strided tensors
        to torch's operators; it reads CUDA tensors, and those of the CPU if ``TRITON_INTERPRET=1`` is in the
        environment before its kernels are first used.

    Returns
    -------
    context manager
        The choice, which ends with the block; it may be entered again.

    Raises
    ------
    InputError
        If there is no such code, or Triton is not installed; inside the block, if a tensor's device does not run it.

    Examples
    --------
    >>> import torch
    >>> from gradstats import moments
    >>> with backend("torch"):
    ...     moments(torch.tensor([1.0, -3.0])).max
    3.0
    """
    names = get_args(Backend)
    # `in` compares an array element by element, and raises another error
    if not isinstance(name, str) or name not in names:
        raise unknown("backend", name, names)
    if name == "triton" and not _has_triton():
        raise InputError('Triton is not installed: pip install triton, or use backend("torch")')
    return _Choice(name)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton_reads(index: int) -> bool:
    """Tell whether Triton's kernels run on a device, but not while a CUDA graph is captured, which trying would end."""
    import torch

    return not torch.cuda.is_current_stream_capturing() and triton_runs(index)


@cache
def triton_runs(index: int) -> bool:
    """Tell whether Triton's kernels run on a CUDA device: one of each kind is compiled, or comes from Triton's cache.

    Parameters
    ----------
    index : int
        Number of the device.
    """
    if not _has_triton():
        return False
    import torch

    try:
        from gradstats.primitives import triton_kernels

        if triton_kernels.INTERPRETED:  # a debugging aid, which takes minutes for a large tensor
            return False
        one = torch.ones(1, device=torch.device("cuda", index))
        sums = triton_kernels.sums(one, 0.0, True).tolist()
        counts = triton_kernels.counts(one, 7)[0].sum().item()
        lengths = [len(triton_kernels.select(one, 1.0)[0]), len(triton_kernels.topk(one, 1)[0])]
        return [sums[0], counts, *lengths] == [1, 1, 1, 1]
    except Exception as error:
        # no compiler, no headers, a device too old: torch's operators read what it would
        why = " ".join(str(error).split())[:200]
        warn(
            f"Triton does not run here, so torch's operators read large CUDA tensors, at about half its speed: {why}"
        )
        return False


def readable(x: Array) -> Array:
    """Check a gradient, and return it as it is read: a CPU tensor for the compiled loops as the array with its memory.

    A tensor's attributes take longer to read than an array's, which is most of the time where there are few elements.

    Parameters
    ----------
    x : array_like
        Gradient, NumPy or torch.

    Raises
    ------
    InputError
        If it is not floating point, not dense, or has no elements that can be read.
    """
    memory = memory_of(x)
    # an array that torch or the user made of plain memory: check() has nothing to object to
    if memory is not None and memory.dtype.type in (np.float32, np.float64):
        return memory
    x = check(x)
    # 16-bit tensors stay tensors, as bfloat16 has no NumPy dtype
    if is_tensor(x) and x.is_cpu and x.element_size() >= 4 and device_code(x) is None:
        return x.numpy()
    return x


def memory_of(x: Array) -> NDArray[Any] | None:
    """Return a plain tensor's memory as an array, or a plain array as it is; None for anything else.

    Parameters
    ----------
    x : array_like
        Anything, unchecked.
    """
    if type(x) is np.ndarray:
        return x
    torch = sys.modules.get("torch")
    # inside backend(…) other code may have been chosen for CPU tensors
    if torch is not None and type(x) is torch.Tensor and not _Choice.active:
        tensor: Any = x
        try:
            memory: NDArray[Any] = tensor.numpy()
        except (RuntimeError, TypeError):  # it is on a device, or what check() tells apart
            return None
        return memory
    return None


def device_code(x: Array) -> DeviceCode | None:
    """Return the module that reads an array on its device; None for the compiled loops.

    Parameters
    ----------
    x : array_like
        Checked gradient.

    Raises
    ------
    InputError
        If the code chosen does not run on the array's device.
    """
    if not is_tensor(x):
        return None
    device = x.device.type
    chosen = _Choice.active[-1:]  # one step: another thread may end its block
    name = chosen[0].name if chosen else _DEFAULTS.get(device, "compiled")
    if not chosen and device == "cuda" and x.numel() >= MANY and _triton_reads(x.device.index):
        name = "triton"
    if name == "compiled":
        return None
    if device == "mps":
        raise InputError(
            f'MPS has no float64, which backend("{name}") needs: use backend("compiled")'
        )
    # not at the top: it imports torch, which arrays alone do not need
    from gradstats.primitives import operators

    if name == "torch":
        return operators
    from gradstats.primitives import triton_kernels

    if device != "cuda" and not triton_kernels.INTERPRETED:
        raise InputError(
            f'backend("triton") reads CUDA tensors, and this one is on {device}: use backend("torch"), '
            "or set TRITON_INTERPRET=1 before the start"
        )
    # kernels count positions in memory order, and compare magnitudes as 32 bits
    narrow = x.is_contiguous() and "float64" not in str(x.dtype)
    return triton_kernels if narrow else operators
