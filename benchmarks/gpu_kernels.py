"""Compile every Triton kernel ahead of time and print what it takes of a GPU. It needs none: no kernel is run.

python benchmarks/gpu_kernels.py [--arch 80 90] [--short] [--json]

Triton compiles a kernel anew for arrays that do not start at a multiple of 16 bytes, of more than 2³¹ elements, and of
one. ``--short`` compiles the usual case of float32 for the last architecture named, and what differs from that in one
respect: the case, the type or the architecture.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # it would leave nothing to compile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from gradstats.primitives import triton_kernels as kernels
from gradstats.tables import render

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
DTYPES = ("fp32", "fp16", "bf16")
POINTERS = {
    "counters": "*i32",
    "hits": "*i32",
    "zeros": "*i32",
    "ends": "*i64",
    "prefix": "*i64",
    "least": "*i32",
    "most": "*i32",
    "kth": "*i64",
    "over": "*i32",
    "tied": "*i32",
    "over_ends": "*i64",
    "tied_ends": "*i64",
    "ties": "*i64",
    "indices": "*i64",
    "bits": "*u8",
    "packed": "*u8",
    "random": "*i64",
    "key": "*i64",
}
PLAIN = (
    kernels._hits_kernel,
    kernels._select_kernel,
    kernels._ranks_kernel,
    kernels._topk_kernel,
)
"""Kernels without constants of their own."""
CASES = ("usual", "unaligned", "64 bits", "one element")
"""Arguments for which Triton compiles a kernel anew."""


def variants(short: bool, last: bool) -> list[tuple[Any, str, dict[str, Any], str]]:
    """Return each kernel with a type of its elements, its constants and a case."""
    found: list[tuple[Any, str, dict[str, Any], str]] = []
    for case, dtype in product(CASES, DTYPES):
        if short and (case != "usual") + (dtype != "fp32") + (not last) > 1:
            continue
        blocks = 1 if case == "one element" else 32
        for signed, log in ((False, True), (False, False), (True, False)):
            constants = {"SIGNED": signed, "LOG": log, "BLOCKS": blocks}
            found.append((kernels._sums_kernel, dtype, constants, case))
        found.append((kernels._counts_kernel, dtype, {"SHIFT": 13, "COPIES": kernels.COPIES}, case))
        found.append((kernels._digits_kernel, dtype, {"SHIFT": 15, "WIDTH": 16}, case))
        found += [(k, dtype, {}, case) for k in PLAIN]
    bits = {
        kernels._pack_kernel: "u8",
        kernels._unpack_kernel: "u8",
        kernels._bernoulli_kernel: "i64",
    }
    cases = CASES if last or not short else ["usual"]
    return [*found, *((k, dtype, {}, case) for (k, dtype), case in product(bits.items(), cases))]


def resources(
    kernel: Any, dtype: str, constants: dict[str, Any], case: str, arch: int
) -> dict[str, Any]:
    """Compile one kernel and return what ptxas says of it.

    Parameters
    ----------
    kernel : triton.JITFunction
        The kernel.
    dtype : str
        Triton's name of the type of its elements.
    constants : dict
        Its constants, without the block.
    case : str
        One of :data:`CASES`.
    arch : int
        Compute capability, such as 80 for sm_80.

    Returns
    -------
    dict
        One record: kernel, dtype, constants, case, arch, registers, shared (bytes a program), stores and loads
        (bytes of registers spilled and read back).
    """
    constants = {**constants, "BLOCK": kernels.BLOCK}
    if case == "one element":
        constants["numel"] = 1
    pointers = {**POINTERS, "x": f"*{dtype}", "values": f"*{dtype}"}
    if kernel is kernels._sums_kernel:
        pointers["rows"] = "*fp64"
    if case == "64 bits":
        pointers["numel"] = "i64"
        if kernel in (kernels._counts_kernel, kernels._digits_kernel):
            pointers["counters"] = "*i64"
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    # allocations of torch are aligned; where the number of elements is too, four are read at once
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if case != "unaligned"
        and (signature[name][0] == "*" or (name == "numel" and name not in constants))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    with tempfile.TemporaryDirectory() as folder:
        # ptxas is asked below, for what it says: its code is of no use here, and must not come into the user's cache
        with (
            patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}),
            patch.object(CUDABackend, "make_cubin", lambda self, *_: b""),
        ):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        target = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        assert target is not None
        command = [str(PTXAS), "-v", f"-arch={target[1]}", str(ptx), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = [
        re.search(pattern, said)
        for pattern in (
            r"Used (\d+) registers",
            r"(\d+) bytes spill stores",
            r"(\d+) bytes spill loads",
        )
    ]
    registers, stores, loads = (0 if each is None else int(each[1]) for each in numbers)
    return {
        "kernel": kernel.fn.__name__.strip("_"),
        "dtype": dtype,
        "constants": " ".join(k for k, v in constants.items() if v is True),
        "case": case,
        "arch": f"sm_{arch}",
        "registers": registers,
        "shared": compiled.metadata.shared,
        "stores": stores,
        "loads": loads,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    records = [
        resources(*variant, arch)
        for arch in options.arch
        for variant in variants(options.short, arch == options.arch[-1])
    ]
    print(json.dumps(records) if options.json else render(records))


if __name__ == "__main__":
    main()
