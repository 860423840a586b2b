"""One view of every array type: flat chunks of a size that stays in the cache.

CPU tensors are read through their NumPy view, so NumPy and torch inputs go through the same instructions and give the
same bits. Of a tensor on another device the compiled loops read a copy, chunk by chunk.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import InputError, first_line
from gradstats.primitives.ratio import shown

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

    Array: TypeAlias = NDArray[Any] | torch.Tensor
else:
    Array: TypeAlias = Any

Sums: TypeAlias = tuple[int, int, int, float, float, float, float]
"""count, zeros, nonfinite, Σ|x|, Σx², Σln|x|, max of the elements that are summed."""

CHUNK = 1 << 17
"""Elements per chunk: 512 kB of float32, which a core's second-level cache holds with its buffers."""

_FLOATS = (np.float16, np.float32, np.float64)
_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
# half a unit in the last place beyond the largest: the tie goes to the even neighbour, infinity
_BEYOND = float(np.finfo(np.float32).max) + 2.0**103
"""Least number that rounds to infinity in float32."""
# the only way past the __setattr__ of a frozen dataclass
_set = object.__setattr__


# no ==, which arrays do not answer with one truth value
@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Elements of a gradient, by position: what a threshold keeps, and what a compressor sends.

    Parameters
    ----------
    indices : int64 array, shape (k̂,)
        Positions in the flattened gradient, ascending.
    values : array, shape (k̂,) or (1,)
        The gradient's values there, of its dtype (float32 where the gradient is bfloat16 in NumPy's view); or one
        value that stands for all of them. NumPy for a NumPy gradient, torch (same device) for a tensor.
    threshold : float
        Magnitude η from which on elements were kept; NaN where no threshold decided.
    """

    indices: Any
    values: Any
    threshold: float = math.nan

    def __init__(self, indices: Any, values: Any, threshold: float = math.nan) -> None:
        _set(self, "indices", indices)  # half the time of what a frozen dataclass makes by itself
        _set(self, "values", values)
        _set(self, "threshold", threshold)

    def __len__(self) -> int:
        return int(self.indices.shape[0])


def is_tensor(x: object) -> TypeIs[torch.Tensor]:
    """Tell whether an object is a torch tensor, without importing torch.

    Parameters
    ----------
    x : object
        Object to look at.
    """
    if type(x) is np.ndarray:  # most often, and without asking torch
        return False
    # where torch is not loaded, nothing can be a tensor of it
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def numel_of(x: Array) -> int:
    """Count the elements of a NumPy array or a torch tensor.

    Parameters
    ----------
    x : array_like
        Array of any shape.
    """
    return int(x.size if type(x) is np.ndarray else x.numel() if is_tensor(x) else np.size(x))


def check(x: Array) -> Array:
    """Return an array that is dense and of floating point, without its autograd history.

    Parameters
    ----------
    x : array_like
        Gradient, NumPy or torch.

    Raises
    ------
    InputError
        If it is not floating point, not dense, or has no elements that can be read; the message says what it is.
    """
    if is_tensor(x):
        return _check_tensor(x)
    # the scalar type, which is the same for both byte orders; a dtype is not
    if type(x) is np.ndarray and x.dtype.type in _FLOATS:
        return x
    # np.asarray drops the mask, and what it hid would be read
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("a gradient must not be masked; call .compressed(), or .filled(0.0)")
    try:
        array = np.asarray(x)
    except Exception as error:  # whatever a list of uneven rows or a foreign object raises
        raise InputError(
            f"a gradient must be an array, not {shown(x)}: {first_line(error)}"
        ) from None
    if array.dtype.type not in _FLOATS:
        if array.dtype.kind == "c":
            raise InputError(
                f"a gradient must be real, not {array.dtype}; give both parts, as np.stack([x.real, x.imag], -1)"
            )
        raise InputError(
            f"a gradient must be float16, float32 or float64 (or bfloat16 in torch), not {_named(array)}; convert it"
        )
    return array


def _named(array: NDArray[Any]) -> str:
    """Return the dtype of an array as an error may show it: fields of a structure can be many."""
    return "a structure" if array.dtype.names else str(array.dtype)


def _check_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements can be read, without its autograd history or a pending sign."""
    torch = sys.modules["torch"]
    kind = type(x)
    # here, because its data_ptr() below raises an error of another type
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        raise InputError("a gradient must have elements, and this parameter has no shape yet")
    # before the layout, which nested tensors call strided
    if x.is_nested:
        raise InputError(
            "a gradient must be one dense tensor, not nested; call torch.cat(x.unbind())"
        )
    # a wrapper such as a DTensor or a fake tensor: its own memory is not its elements
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InputError(
            f"a gradient must be a plain tensor, not {kind.__name__}; give the data inside it, as .to_local() does"
        )
    if x.layout is not torch.strided:
        # its values alone would be another gradient: a ratio is of all elements, zeros included
        raise InputError(f"a gradient must be dense, not {x.layout}; call .to_dense()")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        if x.is_quantized:
            raise InputError(f"a gradient must not be quantised, as {x.dtype}; call .dequantize()")
        if x.is_complex():
            raise InputError(
                "a gradient must be real; call torch.view_as_real(x), whose last dimension has both parts"
            )
        raise InputError(
            f"a gradient must be float16, bfloat16, float32 or float64, not {x.dtype}; call .float()"
        )
    try:
        x.data_ptr()
    except RuntimeError:  # inside vmap, grad and their like
        readable = False
    else:
        # on the meta device the address is 0, as that of an empty tensor may be
        readable = not x.is_meta
    if not readable:
        raise InputError(
            "a gradient must have data, and this tensor is on the meta device or traced"
        )
    plain = x.detach()
    # a subclass would run its __torch_function__ at every operator
    plain = plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)
    # the imaginary part of a conjugate is stored with the opposite sign; only such a tensor is copied here
    return plain.resolve_neg()


def as_numpy(x: Array) -> NDArray[Any]:
    """Bring a small array to NumPy: float64 stays, everything else becomes float32.

    Parameters
    ----------
    x : array_like
        Array of any floating dtype and device.
    """
    if is_tensor(x):
        torch = sys.modules["torch"]
        # may share memory with x: whoever writes has to copy
        return x.to("cpu", torch.float64 if x.dtype == torch.float64 else torch.float32).numpy()
    return np.asarray(x, wide_dtype(x))


def dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the sum of products of two vectors, by one thread.

    BLAS shares a sum of ten thousand numbers among threads: to wake them takes longer, and the last digits depend on
    their number.

    Parameters
    ----------
    a, b : ndarray of float64, shape (n,)
        The vectors.
    """
    return float(np.einsum("i,i", a, b))


def as_positions(indices: Array) -> NDArray[np.int64]:
    """Bring positions to NumPy, as they are.

    Parameters
    ----------
    indices : int64 array
        Positions, NumPy or torch on any device.
    """
    return indices.cpu().numpy() if is_tensor(indices) else np.asarray(indices, np.int64)


def strided(x: Array, stride: int, start: int = 0) -> Array:
    """Return every `stride`-th element of the flattened array, without flattening a strided one.

    Parameters
    ----------
    x : array_like
        Array of any shape.
    stride : int
        Distance of the elements taken, at least 1.
    start : int
        Position of the first.
    """
    if _is_contiguous(x):
        return x.reshape(-1)[start::stride]
    return taken(x, np.arange(start, numel_of(x), stride))


def taken(x: Array, positions: Array) -> Array:
    """Return the elements at some positions of the flattened array, without flattening a strided one.

    Parameters
    ----------
    x : array_like
        Array of any shape.
    positions : ndarray of int64, or int64 tensor on the array's device
        Positions in index order.
    """
    flat = _is_contiguous(x)
    if is_tensor(positions):
        at = positions if flat else sys.modules["torch"].unravel_index(positions, x.shape)
    elif flat:
        at = torch_index(positions, x)
    else:
        at = tuple(torch_index(p, x) for p in np.unravel_index(positions, tuple(x.shape)))
    # reshape(-1) would copy a whole strided array for a sample of it
    return x.reshape(-1)[at] if flat else x[at]


def _is_contiguous(x: Array) -> bool:
    return bool(x.is_contiguous() if is_tensor(x) else x.flags.c_contiguous)


def torch_index(index: NDArray[np.int64], like: Array) -> Array:
    """Return positions in a form that indexes another array on its device.

    Parameters
    ----------
    index : ndarray of int64
        Positions.
    like : array_like
        Array to be indexed.
    """
    if not is_tensor(like):
        return index
    moved: Array = sys.modules["torch"].from_numpy(index).to(like.device)
    return moved


def wide_dtype(x: Array) -> np.dtype[Any]:
    """Return the dtype in which the chunks of an array arrive: float64 for float64, float32 for the rest.

    Parameters
    ----------
    x : array_like
        Array of any floating dtype.
    """
    # not its name, which a byte order changes
    double = "float64" in str(x.dtype) if is_tensor(x) else x.dtype.type is np.float64
    return _DOUBLE if double else _SINGLE


def as_compared(x: Array, magnitude: float) -> float:
    """Round a magnitude to the precision in which the elements of an array are compared with it.

    Parameters
    ----------
    x : array_like
        Array of any floating dtype.
    magnitude : float
        A number, not NaN; infinite where it is beyond the range.
    """
    return float(magnitude if wide_dtype(x) == np.float64 else narrowed(magnitude))


def narrowed(magnitude: float) -> np.float32:
    """Round a magnitude to float32; infinite beyond its range, without a warning.

    Parameters
    ----------
    magnitude : float
        A number, or NaN.
    """
    return np.float32(math.inf if magnitude >= _BEYOND else magnitude)


def flat_blocks(x: Array, size: int) -> tuple[NDArray[Any], range] | None:
    """Return a flat view of a contiguous float32 or float64 CPU array and where its blocks start.

    Parameters
    ----------
    x : array_like
        Array of any shape, dtype and device.
    size : int
        Elements per block.

    Returns
    -------
    (ndarray, range) or None
        None if there is no such view without a copy.
    """
    if is_tensor(x):
        torch = sys.modules["torch"]
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return None
        x = x.numpy()
    wide = x.dtype.type is np.float32 or x.dtype.type is np.float64
    # loops are compiled for the processor's own byte order
    if not (wide and x.flags.c_contiguous and x.dtype.isnative):
        return None
    return x.reshape(-1), range(0, x.size, size)


def flat_chunks(x: Array, size: int = CHUNK) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (offset, chunk) over the flattened array, in index order.

    Parameters
    ----------
    x : array_like
        Array of any shape, floating dtype and device.
    size : int
        Largest number of elements in a chunk.

    Yields
    ------
    (int, ndarray)
        Position of the chunk's first element, and the chunk: one-dimensional, float32 or float64 (float16 and bfloat16
        arrive as float32). A view where the memory allows it, otherwise a buffer that the next chunk reuses.
    """
    widened = wide_dtype(x)
    if is_tensor(x):
        torch = sys.modules["torch"]
        # bfloat16 has no NumPy dtype, so that torch widens it, as it does what lies on a device
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64, torch.float16):
            wide = torch.float64 if widened == np.float64 else torch.float32
            offset = 0
            for run in _runs(x, size):
                yield offset, run.to("cpu", wide).numpy()
                offset += run.numel()
            return
        x = x.numpy()
    if x.flags.c_contiguous and x.dtype == widened:
        flat = x.reshape(-1)
        for offset in range(0, flat.size, size):
            yield offset, flat[offset : offset + size]
        return
    # Strided or half precision: one buffer at a time is copied, never the whole array.
    offset = 0
    with np.nditer(
        x,
        flags=["external_loop", "buffered", "zerosize_ok", "refs_ok"],
        op_dtypes=[widened],
        casting="same_kind",
        # positions count in logical order, whatever the order in memory
        order="C",
        buffersize=size,
    ) as chunks:
        # some hold fewer than `size`: NumPy fills a buffer with whole inner rows
        for buffer in chunks:
            chunk = np.ascontiguousarray(buffer)  # nditer copies for the type alone
            yield offset, chunk
            offset += chunk.size


def _runs(x: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield a flattened tensor in parts of up to `size` elements; of a strided one no more is copied at once."""
    if x.is_contiguous():
        flat = x.view(-1)
        for offset in range(0, flat.numel(), size):
            yield flat[offset : offset + size]
    elif x[0].numel() > size:
        for row in x:
            yield from _runs(row, size)
    else:
        rows = size // x[0].numel()
        for i in range(0, len(x), rows):
            yield x[i : i + rows].reshape(-1)


def even_chunks(x: Array) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield what :func:`flat_chunks` does in chunks of :data:`CHUNK` elements, but for the last.

    So those of arrays of one length lie side by side, however their elements lie in memory.

    Parameters
    ----------
    x : array_like
        Array of any shape, floating dtype and device.

    Yields
    ------
    (int, ndarray)
        Position of the chunk's first element, and the chunk, as :func:`flat_chunks` yields it.
    """
    numel, filled = numel_of(x), 0
    buffer = np.empty(min(CHUNK, numel), wide_dtype(x))
    for offset, chunk in flat_chunks(x):
        # as it is where it needs nothing of another one
        if not filled and chunk.size in (CHUNK, numel - offset):
            yield offset, chunk
            continue
        at = offset
        while at < offset + chunk.size:
            part = chunk[at - offset :][: buffer.size - filled]
            buffer[filled : filled + part.size] = part
            at, filled = at + part.size, filled + part.size
            if filled == buffer.size or at == numel:
                yield at - filled, buffer[:filled]
                filled = 0
