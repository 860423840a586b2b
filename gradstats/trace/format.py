"""What both sides of a trace know: names, layout, attributes, bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from gradstats.errors import TraceError

__all__ = [
    "BINS",
    "BIN_CHUNK",
    "BITS",
    "CHUNK",
    "COMPRESSION",
    "FLOAT_SCALARS",
    "FORMAT",
    "GROW",
    "KINDS",
    "LAYER_COMPRESSION",
    "SCHEMA",
    "STATISTICS",
    "STORES",
    "Kind",
    "Layer",
    "Store",
    "count_nonfinite",
    "create_trace",
    "from_bfloat16",
    "is_trace",
    "layout",
    "root_attributes",
    "to_bfloat16",
]

SCHEMA = 2
"""Version of the format this module writes, and the newest it reads; it reads all from 1 on."""

Kind: TypeAlias = Literal["gradient", "corrected"]
KINDS: tuple[Kind, ...] = ("gradient", "corrected")

Store: TypeAlias = Literal["gradients", "sketches"]
STORES: tuple[Store, ...] = ("gradients", "sketches")

COMPRESSION = (
    "target",
    "numel",
    "bytes_sent",
    "union",
    "select_seconds",
    "communicate_seconds",
    "overlapped_seconds",
    "residual_norm",
    "matching_rate",
)
"""Columns of a step's compression, NaN where unknown; gradstats.hooks' StepRecord and Diagnosis say what they are."""
LAYER_COMPRESSION = ("selected", "target", "delta")
"""Likewise of a layer."""

FORMAT = "gradstats-trace"
FLOAT_SCALARS = ("loss", "learning_rate", "threshold")
CHUNK = 1 << 22
GROW = 64

BITS = 7
"""Mantissa bits of the histograms stored: bins 0.4 to 0.8 % wide."""
BINS = 255 << BITS
BIN_CHUNK = 64 << BITS
"""Bins per chunk: 64 octaves, with borders at 2^-63, 2 and 2^65. All 32,640 bins in one chunk would cost 17 ms a step
for ResNet-20 and 42 ms for 160 layers, spent on zeros. Empty chunks are never written, gradients lie in one chunk or
two, and no bin is cut off: 6 ms and 14 kB, or 14 ms and 115 kB. Narrower chunks save no more and make more files."""
STATISTICS = ("count", "zeros", "nonfinite", "sum_abs", "sum_squares", "sum_log", "max")


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter's place in the flat gradient."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def slice(self) -> slice:
        """Position in the flat gradient."""
        return slice(self.offset, self.offset + self.numel)


def create_trace(
    path: str | Path,
    layers: Sequence[Layer],
    *,
    world_size: int = 1,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Create an empty trace; one process does this before any :class:`TraceWriter` opens it.

    Parameters
    ----------
    path : directory to create, ``NAME.zarr`` by convention.
    layers : parameters in the order of the flat gradient.
    world_size : ranks of the run, whether captured or not.
    metadata : JSON values describing the run (model, data, optimizer, compressor, ratio, seed, versions, …).
    overwrite : replace an existing trace. Anything else at `path` is never removed.

    Raises
    ------
    TraceError
        If `path` exists and is not an empty directory or a trace to overwrite.
    """
    import zarr

    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not is_trace(path):
            raise TraceError(f"{path} exists and is not a trace; not touching it")
        if not overwrite:
            raise TraceError(f"{path} exists; choose another name or ask to overwrite it")
        shutil.rmtree(path)
    attributes = {
        "format": FORMAT,
        "schema": SCHEMA,
        "world_size": world_size,
        "numel": sum(layer.numel for layer in layers),
        "layout": [
            {"name": la.name, "offset": la.offset, "shape": list(la.shape)} for la in layers
        ],
        **(metadata or {}),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        zarr.create_group(path, attributes=attributes, zarr_format=3)
    except OSError as error:
        raise TraceError(f"cannot create {path}: {error}") from error


def is_trace(path: str | Path) -> bool:
    """Tell whether `path` is a directory that says it is a trace, of whatever version."""
    try:
        attributes = json.loads((Path(path) / "zarr.json").read_bytes())["attributes"]
        return bool(attributes["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def root_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a trace, checked; raise :class:`TraceError` for anything else."""
    if not path.exists():
        raise TraceError(f"no such trace: {path}")
    if not is_trace(path):
        raise TraceError(f"{path} is not a gradstats trace")
    attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
    schema = attributes.get("schema")
    if schema not in range(1, SCHEMA + 1):
        raise TraceError(f"{path} has trace schema {schema}; this gradstats reads 1 to {SCHEMA}")
    missing = {"world_size", "numel", "layout"} - attributes.keys()
    if missing:
        raise TraceError(f"{path} is damaged: its attributes lack {', '.join(sorted(missing))}")
    return cast("dict[str, Any]", attributes)


def layout(path: Path, attributes: Mapping[str, Any]) -> list[Layer]:
    """Return the parameters that the attributes list, in the order of the flat gradient."""
    try:
        return [
            Layer(la["name"], int(la["offset"]), tuple(la["shape"])) for la in attributes["layout"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is damaged: unreadable parameter layout") from error


def count_nonfinite(values: NDArray[np.float32]) -> int:
    """Return the number of NaN and infinite elements."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest even, NaN kept NaN; return the bits."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
