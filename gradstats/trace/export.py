"""Captured gradients in the files of other tools."""

from __future__ import annotations

import json
from pathlib import Path

from gradstats.errors import InputError, first_line
from gradstats.files import replacing
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
    of ``gradstats`` reads the file again. The trace's name, step, rank and kind and the order of the layers go into the
    file's metadata.

    Parameters
    ----------
    trace : Trace, str or Path
        Open trace, or its path.
    path : str or Path
        File to write, ``NAME.safetensors``. One that exists is replaced when the new one is complete.
    step : int
        Training step.
    rank : int
        Rank that captured the gradient.
    kind : Kind
        One of :data:`gradstats.trace.KINDS`, such as ``"gradient"``.

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
    # strings alone, as the format's metadata holds nothing else
    metadata = {"trace": trace.name, "step": str(step), "rank": str(rank), "kind": kind}
    metadata["layers"] = json.dumps(list(tensors))  # the file has them in another order
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, metadata)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot write {path}: {first_line(error)}") from None
