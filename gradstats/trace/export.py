"""Captured gradients in the files of other tools."""

from __future__ import annotations

from pathlib import Path

from gradstats.errors import InputError
from gradstats.trace import Kind, Trace, open_trace

__all__ = ["save_safetensors"]


def save_safetensors(
    trace: Trace | str | Path,
    path: str | Path,
    step: int,
    rank: int = 0,
    kind: Kind = "gradient",
) -> None:
    """Write one captured gradient as a ``.safetensors`` file, one tensor per parameter.

    ``safetensors.torch.load_file(path)`` gives ``{name: float32 tensor of the parameter's shape}``, and every command
    of ``gradstats`` reads the file again.

    Parameters
    ----------
    trace : an open trace or its path.
    path : file to write, ``NAME.safetensors``; replaced if it exists.
    step, rank, kind : as of :meth:`gradstats.Trace.read`; they go, with the trace's name, into the file's metadata.

    Raises
    ------
    InputError
        If `path` has another ending, or cannot be written.
    TraceError
        If the gradient was not captured, or as a sketch only, or its data is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: the name must end in .safetensors")
    if not isinstance(trace, Trace):
        trace = open_trace(trace)
    values = trace.read(step, rank, kind)
    tensors = {layer.name: values[layer.slice].reshape(layer.shape) for layer in trace.layers}
    metadata = {"trace": trace.name, "step": str(step), "rank": str(rank), "kind": kind}
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise InputError(f"cannot write {path}: {error}") from None
