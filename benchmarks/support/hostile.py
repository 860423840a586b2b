"""Hostile arrays and arguments for every public function, and the verdict on each call.

A call must end at once, in a right answer or in one :class:`gradstats.GradstatsError` of one line. :func:`calls` yields
the calls and :func:`verdict` makes one; tests run a few hundred, the campaign in ``benchmarks`` as many as it likes.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradstats
from gradstats import compressors, goodness, plots, pot, primitives, thresholds
from gradstats.analysis import peaks
from gradstats.hooks import (
    AdamCorrection,
    CompressionState,
    ErrorFeedback,
    MomentumCorrection,
    dgc_warm_up,
    systems,
)
from gradstats.network import Network
from gradstats.statistics import compressibility

LIMIT_S = 2.0
"""Longest time that one call may compute, in seconds: the slowest takes 0.8 on an idle machine, which CI's is not."""

LIMIT_BYTES = 100_000_000
"""Most memory by which one call may raise the process's peak."""

Call = Callable[[], object]


class WrongAnswer(AssertionError):
    """A result that is not what the elements say."""


def verdict(call: Call) -> str:
    """Make a call and return "right", "refused", or what is wrong with how it ended.

    One that took long, or much memory, is made again: the first call of its kind imports libraries and compiles.
    """
    ended = _once(call)
    return _once(call) if ended.startswith(("right,", "refused,")) else ended


def _once(call: Call) -> str:
    # not to be charged with what earlier calls left to collect: of figures, up to a second
    gc.disable()
    before, started = _begin_peak(), time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        ended = "right"
    except gradstats.GradstatsError as error:
        ended = "refused" if 0 < len(str(error)) < 500 and "\n" not in str(error) else repr(error)
    except (Exception, RecursionError) as error:
        ended = f"{type(error).__name__}: {str(error)[:200]}"
    elapsed, grown = time.process_time() - started, _peak() - before
    gc.enable()
    if elapsed > LIMIT_S:
        return f"{ended}, after {elapsed:.1f} s"
    if grown > LIMIT_BYTES:
        return f"{ended}, with {grown / 1e6:.0f} MB"
    return ended


def _begin_peak() -> int:
    """Let the peak of the process's memory start again from where it is; return it in bytes.

    What was freed goes back to the system first: malloc would reuse it, and the peak would not show the call.
    """
    global _resident  # of the process
    # that takes milliseconds: only if the process holds a megabyte more, or less, than after the last time
    if abs(_now() - _resident) > LIMIT_BYTES / 100:
        ctypes.CDLL(None).malloc_trim(0)
        _resident = _now()
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


_resident = 0
"""What the process held after it had last given back what was freed, in bytes."""


def _now() -> int:
    """Return the memory that the process holds, in bytes."""
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


def _peak() -> int:
    """Return the most memory that the process had since then, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def numbers() -> dict[str, Any]:
    """Return what users, and programs that go wrong, give for a number."""
    return {
        "text": "0.1",
        "a line\nbreak": "0.1\n\x1b[31m",
        "long text": "9" * 100_000,
        "bytes": b"1",
        "None": None,
        "list": [0.1],
        "tuple": (0.1, 0.2),
        "dict": {"ratio": 0.1},
        "function": len,
        "object": object(),
        "complex": 1j,
        "nan": math.nan,
        "inf": math.inf,
        "-inf": -math.inf,
        "0": 0,
        "-0.0": -0.0,
        "-1": -1,
        "2": 2,
        "13": 13,
        "0.5": 0.5,
        "10**6": 10**6,
        "1e-300": 1e-300,
        "2**63": 2**63,
        "2**64": 2**64,
        "10**400": 10**400,
        "-10**400": -(10**400),
        "10**5000": 10**5000,
        "True": True,
        "tensor": torch.tensor(0.1),
        "tensor of 2": torch.ones(2),
        "0-d array": np.array(0.1),
        "array": np.array([0.1, 0.2]),
        "float32": np.float32(0.1),
        "float16": np.float16(0.1),
        "longdouble": np.longdouble(0.1),
        "int8": np.int8(1),
        "bool_": np.bool_(True),
        "nan32": np.float32("nan"),
        "Fraction": Fraction(1, 10),
        "Fraction of size": Fraction(10**500, 3),
        "Decimal": Decimal("0.1"),
    }


@dataclass(frozen=True)
class Odd:
    """An odd array and what its elements are.

    Attributes
    ----------
    name : str
        What is odd about it.
    value : object
        The array.
    elements : float64 array, shape (d,), or None
        Its elements in logical order; None if it is no gradient, and must be refused.
    """

    name: str
    value: Any
    elements: np.ndarray | None


class _Raises:
    """An object whose conversion to an array fails in two lines."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("no array\nnor any other day")


class _Subclass(torch.Tensor):
    """A tensor subclass without behaviour of its own."""


def arrays(rng: np.random.Generator) -> list[Odd]:
    """Return odd arrays: some that have a right answer, and some that must be refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes warn when they are made
        return [*_good(rng), *_bad(rng)]


def tensors(rng: np.random.Generator) -> list[Odd]:
    """Return the odd arrays that have a right answer, as tensors, which have one order of bytes."""
    found = []
    for odd in arrays(rng):
        if odd.elements is None:
            continue
        value = odd.value
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))
        found.append(Odd(odd.name, value, odd.elements))
    return found


def _good(rng: np.random.Generator) -> Iterator[Odd]:
    n = int(rng.integers(200, 3000))
    plain = rng.laplace(size=n).astype(np.float32)
    double = plain.astype(np.float64)
    large = rng.laplace(size=40_000).astype(np.float32)  # beyond what a sketch keeps one by one

    def odd(name: str, value: Any, elements: Any = None) -> Odd:
        if elements is None:
            elements = value.detach().double().numpy() if torch.is_tensor(value) else value
        return Odd(name, value, np.asarray(elements, np.float64).reshape(-1))

    def with_(values: np.ndarray, *bad: float) -> np.ndarray:
        found = values.copy()
        for i, each in enumerate(bad):
            found[i * 61 : (i + 1) * 61] = each
        return found

    yield odd("plain", plain)
    yield odd("61 infinities", with_(plain, math.inf))
    yield odd("infinities and NaN", with_(plain, math.inf, -math.inf, math.nan))
    yield odd("61 infinities of many", with_(large, math.inf))
    yield odd("infinite alone", np.full(100, np.inf, np.float32))
    yield odd("NaN alone", np.full(100, np.nan, np.float32))
    yield odd("zeros", np.zeros(100, np.float32))
    yield odd("one zero", np.zeros(1, np.float32))
    yield odd("one element", np.full(1, -2.0, np.float32))
    yield odd("two elements", np.array([1.0, -3.0], np.float32))
    yield odd("constant", np.full(n, 0.25, np.float32))
    yield odd("two values", np.where(rng.random(n) < 0.5, 1.0, -2.0).astype(np.float32))
    yield odd("few non-zero", np.where(np.arange(n) % 97 == 0, plain, np.float32(0)))
    yield odd("empty", np.empty(0, np.float32))
    yield odd("empty, of a shape", np.empty((3, 0, 2), np.float64))
    yield odd("0-d", np.array(1.5, np.float32))
    yield odd("float64 1e200", double * 1e200)
    yield odd("float64 1e200 of many", large.astype(np.float64) * 1e200)
    yield odd("float64 1e-200", double * 1e-200)
    yield odd("float64 denormal", double * 5e-324)
    yield odd("float64 largest", with_(double, 1.7e308))
    yield odd("float64 of all sizes", np.sign(double) * 10.0 ** rng.uniform(-300, 300, n))
    yield odd("float32 denormal", (plain * 1e-42).astype(np.float32))
    yield odd("float32 largest", with_(plain, 3.4e38))
    yield odd("float32 of all sizes", (10.0 ** rng.uniform(-45, 38, n)).astype(np.float32))
    yield odd("float16 largest", np.full(n, 65504, np.float16))
    yield odd("float16 denormal", (plain * 1e-7).astype(np.float16))
    yield odd("big-endian float32", plain.astype(">f4"))
    yield odd("big-endian float64", (double * 1e200).astype(">f8"))
    yield odd("big-endian float16", plain.astype(">f2"))
    yield odd("strided", np.repeat(plain, 3)[::3])
    yield odd("reversed", plain[::-1])
    yield odd("Fortran order", np.asfortranarray(plain[: n // 7 * 7].reshape(7, -1)))
    yield odd("broadcast", np.broadcast_to(plain[:50], (20, 50)))
    yield odd("matrix", np.matrix(plain[:20].reshape(4, 5)))
    yield odd("unaligned", np.frombuffer(b"\0" + plain.tobytes(), np.float32, offset=1))
    frozen = plain.copy()
    frozen.flags.writeable = False
    yield odd("read-only", frozen)
    yield odd("read-only of many", np.frombuffer(large.tobytes(), np.float32))
    fields = np.zeros(n, [("a", "<f4"), ("b", "i1")])
    fields["a"] = plain
    yield odd("one field of a structure", fields["a"])

    tensor = torch.from_numpy(plain.copy())
    yield odd("tensor", tensor)
    yield odd("tensor with gradient", tensor.clone().requires_grad_())
    yield odd("parameter", torch.nn.Parameter(tensor.clone()))
    yield odd("negative bit", torch.imag(torch.complex(tensor, tensor).conj()))
    yield odd("negative view", tensor.clone()._neg_view())
    yield odd(
        "channels last", tensor[:120].reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    )
    yield odd("expanded", tensor[:1].expand(100))
    yield odd("flipped and strided", tensor.flip(0)[::2])
    yield odd("0-d tensor", torch.tensor(-1.5))
    yield odd("empty tensor", torch.empty(0))
    yield odd("bfloat16", tensor.bfloat16())
    yield odd("bfloat16 largest", torch.full((100,), 3.38e38).bfloat16())
    yield odd("float16 tensor", tensor.half())
    yield odd("float64 tensor 1e200", tensor.double() * 1e200)
    yield odd("subclass", tensor.clone().as_subclass(_Subclass))
    yield odd("quiet in inference", torch.inference_mode()(tensor.clone)())


def _bad(rng: np.random.Generator) -> Iterator[Odd]:
    from torch._subclasses import FakeTensorMode

    plain = rng.laplace(size=100).astype(np.float32)
    tensor = torch.from_numpy(plain)
    with FakeTensorMode():
        fake = torch.ones(3)
    itself: list[Any] = []
    itself.append(itself)
    refused = {
        "masked": np.ma.array(plain, mask=plain > 0),
        "object": np.array([1.0, None, "a"], object),
        "bool": plain > 0,
        "int64": np.arange(10),
        "uint8": np.arange(10, dtype=np.uint8),
        "complex64": plain.astype(np.complex64),
        "longdouble": plain.astype(np.longdouble),
        "structured": np.zeros(3, [("a", "f4"), ("b", "f8")]),
        "many fields": np.zeros(1, [(f"f{i}", "f4") for i in range(1000)]),
        "dates": np.array(["2000-01-01"], "M8[D]"),
        "array of text": np.array(["0.1", "0.2"]),
        "text": "gradient.no",
        "bytes": b"\0\0\0\0",
        "None": None,
        "int": 3,
        "dict": {"a": 3},
        "set": {1.0},
        "generator": (float(i) for i in range(3)),
        "function": len,
        "list of text": ["0.1", "0.2"],
        "list of int": [1, 2],
        "uneven list": [[1.0], [1.0, 2.0]],
        "list of itself": itself,
        "raises": _Raises(),
        "module": torch.nn.Linear(2, 2),
        "meta": torch.empty(10, device="meta"),
        "fake": fake,
        "without a shape": torch.nn.parameter.UninitializedParameter(),
        "nested": torch.nested.nested_tensor([tensor[:3], tensor[:5]]),
        "jagged": torch.nested.nested_tensor([tensor[:3], tensor[:5]], layout=torch.jagged),
        "sparse": tensor.to_sparse(),
        "sparse rows": tensor.reshape(10, 10).to_sparse_csr(),
        "mkldnn": tensor.to_mkldnn(),
        "quantized": torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "masked tensor": torch.masked.masked_tensor(tensor, tensor > 0),
        "int tensor": torch.arange(10),
        "bool tensor": tensor > 0,
        "complex tensor": torch.complex(tensor, tensor).conj(),
        "float8": tensor.to(torch.float8_e4m3fn),
        "float4": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    for name, value in refused.items():
        yield Odd(name, value, None)


def _magnitudes(odd: Odd) -> np.ndarray:
    """Return the finite non-zero magnitudes of an array, descending."""
    magnitude = np.abs(odd.elements)
    return np.sort(magnitude[np.isfinite(magnitude) & (magnitude > 0)])[::-1]


def _require(condition: object, text: str) -> None:
    if not condition:
        raise WrongAnswer(text)


def _close(found: float, right: float, relative: float = 1e-6) -> bool:
    return found == right or math.isclose(found, right, rel_tol=relative)


def _reached(odd: Odd, threshold: float) -> np.ndarray:
    """Return the positions of the elements at or above a threshold."""
    magnitude = np.abs(odd.elements)
    return np.flatnonzero((magnitude >= threshold) & (magnitude > 0))


def _check_moments(odd: Odd, found: Any, above: float = 0.0) -> None:
    some = _magnitudes(odd)
    some = some[some >= above]
    with np.errstate(over="ignore", under="ignore"):
        total, squares = float(some.sum()), float(np.square(some).sum())
    _require(found.numel == odd.elements.size, "numel")
    _require(found.count == some.size, f"{found.count} counted of {some.size}")
    _require(_close(found.sum_abs, total), f"sum {found.sum_abs}, not {total}")
    _require(
        _close(found.sum_squares, squares, 1e-5), f"squares {found.sum_squares}, not {squares}"
    )


def _check_whole(odd: Odd, found: Any) -> None:
    _check_moments(odd, found)
    elements = odd.elements
    _require(found.zeros == np.count_nonzero(elements == 0), "zeros")
    _require(found.nonfinite == np.count_nonzero(~np.isfinite(elements)), "nonfinite")
    _require(found.max == max(_magnitudes(odd), default=0.0), "max")
    logs = float(np.log(_magnitudes(odd)).sum())
    _require(math.isclose(found.sum_log, logs, rel_tol=1e-6, abs_tol=1e-6), "logarithms")


def _check_histogram(odd: Odd, found: Any) -> None:
    _require(found.numel == odd.elements.size, "numel")
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.abs(odd.elements.astype(np.float32))
    counted = np.histogram(narrow[(narrow > 0) & np.isfinite(narrow)], _edges(found.bits))[0]
    _require(np.array_equal(found.counts, counted), "counts")


def _edges(bits: int) -> np.ndarray:
    return primitives.histogram.__globals__["bin_edges"](bits)


def _check_selection(odd: Odd, threshold: float, found: Any) -> None:
    positions = _reached(odd, threshold)
    indices = np.asarray(found.indices)
    _require(np.array_equal(indices, positions), f"{indices.size} selected, not {positions.size}")
    values = found.values
    values = values.double().numpy() if torch.is_tensor(values) else values.astype(np.float64)
    _require(np.array_equal(values, odd.elements[positions]), "values")


def _check_topk(odd: Odd, k: int, found: Any) -> None:
    magnitude = np.abs(np.nan_to_num(odd.elements, nan=0.0, posinf=math.inf, neginf=-math.inf))
    positions = np.sort(np.argsort(-magnitude, kind="stable")[:k])
    indices = np.asarray(found.indices)
    _require(indices.dtype == np.int64 and np.array_equal(indices, positions), "positions")
    values = found.values
    values = values.double().numpy() if torch.is_tensor(values) else values.astype(np.float64)
    wanted = np.where(magnitude > 0, odd.elements, 0.0)[positions]
    _require(np.array_equal(values, wanted), "values")


def _check_threshold(odd: Odd, ratio: float, name: str, found: float) -> None:
    _require(isinstance(found, float) and 0 <= found < math.inf, f"threshold {found!r}")
    some = _magnitudes(odd)
    k = thresholds.target_count(ratio, odd.elements.size)
    right = some[k - 1] if 0 < k <= some.size else 0.0
    kept, wanted = _reached(odd, found).size, _reached(odd, right).size
    if name in ("exact", "warm-exact"):
        _require(found == right, f"threshold {found}, not {right}")
    elif name == "redsync-trimmed":
        _require(kept == wanted, f"{kept} kept, not {wanted}")
    elif name == "redsync":
        _require(kept >= wanted, f"{kept} kept of {wanted}")


def _check_estimate(odd: Odd, ratio: float, name: str, found: Any) -> None:
    estimate, selection = found
    _check_threshold(odd, ratio, name, estimate.threshold)
    _check_selection(odd, estimate.threshold, selection)


def _check_magnitudes(odd: Odd, found: Any) -> None:
    some = _magnitudes(odd)
    _require(found.numel == odd.elements.size, "numel")
    m = found.magnitudes
    _require(m.count == some.size, "count")
    _require(found.histogram.numel == odd.elements.size, "counts")
    if some.size:
        k = (some.size + 1) // 2
        _require(_close(m.upper_quantile(k), some[k - 1], 1e-3), "median")


def _check_laplace(odd: Odd, found: Any) -> None:
    _require(_close(found.params["scale"], float(np.mean(_magnitudes(odd))), 1e-6), "scale")


def _check_quality(odd: Odd, found: Any) -> None:
    for record in found:
        k = thresholds.target_count(record["ratio"], odd.elements.size)
        _require(record["k"] == k, "k")
        if record["estimator"] in ("exact", "warm-exact"):
            some = _magnitudes(odd)
            at = some[k - 1] if 0 < k <= some.size else 0.0
            right = _reached(odd, at).size / k if k else math.nan
            _require(repr(record["mean"]) == repr(right), f"quality {record['mean']}, not {right}")


def _nothing(odd: Odd, found: Any) -> None:
    """Accept any answer: what is right is the tests' of the function."""


@dataclass(frozen=True)
class Target:
    """A public function, arguments that it takes, and the check of its answer.

    Attributes
    ----------
    function : callable
        The function.
    arguments : mapping of str to object
        Valid arguments, by name.
    array : str
        Name of the argument that is an array; empty for none.
    check : callable
        Called with the array and the answer.
    among : tuple of str
        Names of the other arguments that are made hostile; all if empty.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    array: str = "x"
    check: Callable[[Odd, Any], None] = _nothing
    among: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the function, without what it was given before."""
        function = self.function
        function = function.func if isinstance(function, partial) else function
        return getattr(function, "__qualname__", type(function).__name__)


_HARMLESS = ("self", "on_progress", "client", "ax", "title", "label", "dtype", "rng")
"""Arguments that are left alone: called back, drawn on, or checked by others."""


def targets(rng: np.random.Generator) -> Iterator[Target]:
    """Return the public functions with valid arguments."""
    x = rng.laplace(size=2000)
    yield Target(gradstats.moments, {}, check=_check_whole)
    yield Target(gradstats.moments, {"above": 0.5}, check=lambda o, m: _check_moments(o, m, 0.5))
    yield Target(
        primitives.exceedances, {"above": 0.5}, check=lambda o, m: _check_moments(o, m, 0.5)
    )
    yield Target(primitives.exceedances, {"above": 0.0}, check=_check_moments)
    yield Target(gradstats.histogram, {}, check=_check_histogram)
    yield Target(gradstats.histogram, {"bits": 0}, check=_check_histogram)
    yield Target(
        gradstats.select, {"threshold": 0.5}, check=lambda o, s: _check_selection(o, 0.5, s)
    )
    yield Target(gradstats.select, {"threshold": 0}, check=lambda o, s: _check_selection(o, 0, s))
    yield Target(
        primitives.kth_largest,
        {"k": 3},
        check=lambda o, t: _require(t == ([*_magnitudes(o)[2:3], 0.0])[0], f"third {t}"),
    )
    yield Target(gradstats.sketch, {}, check=_check_magnitudes)
    for ratio in (0.01, 0.3, 1.0):
        check = partial(_swapped, _check_threshold, ratio, "exact")
        yield Target(gradstats.threshold, {"ratio": ratio}, check=check)
    for name in thresholds.ESTIMATORS:
        check = partial(_swapped, _check_estimate, 0.01, name)
        yield Target(_Select(name), {"ratio": 0.01}, check=check)
        yield Target(_Compress(name), {"ratio": 0.01})
    yield Target(
        gradstats.quality, {"ratios": (0.01,)}, "source", _check_quality, ("ratios", "estimators")
    )
    yield Target(
        partial(gradstats.quality, ratios=(0.01,), estimators=list(thresholds.ESTIMATORS)),
        {},
        "source",
        _check_quality,
        ("per_layer",),
    )
    yield Target(gradstats.quality_series, {}, "source", _nothing, ("ratios", "estimators"))
    yield Target(
        gradstats.wire,
        {"formats": ["fp16", "int4", "nvfp4"]},
        "source",
        _nothing,
        ("formats", "roundings", "rotations", "scales", "ratio", "estimator", "seed"),
    )
    yield Target(_changed, {"dtype": None, "rate": 1e-3}, array="x")
    every = {"roundings": ["stochastic"], "rotations": [16], "ratio": 0.1}
    yield Target(partial(gradstats.wire, **every), {}, "source", _nothing, ("layers",))
    yield Target(gradstats.stage_budget, {}, "source", _nothing, ("ratios", "estimators"))
    yield Target(gradstats.over_training, {}, "source", _nothing, ("ratios", "models", "method"))
    followed = ("quantities", "ratios", "models", "method")
    yield Target(gradstats.drift, {}, "source", _nothing, followed)
    yield Target(peaks.pot, {}, "source", _nothing, ("ratios", "method", "replicates", "layers"))
    yield Target(
        gradstats.plan,
        {"network": Network.of_link(1e-3, 1e-8), "compute": 0.1, "workers": [2]}
        | {"compressors": ["topk"]},
        "source",
        _nothing,
        ("network", "compute", "workers", "ratios", "rates", "local_steps", "fragments", "delay"),
    )
    yield Target(gradstats.compressibility, {})
    yield Target(compressibility.local_exponents, {})
    yield Target(compressibility.control, {"name": "laplace", "numel": 1000}, array="")
    for model, method in (
        ("laplace", "closed"),
        ("dgamma", "closed"),
        ("double_genpareto", "closed"),
        ("double_genpareto", "pwm"),
        ("norm", "closed"),
        ("lognorm", "closed"),
        ("laplace", "mle"),
        ("dgamma", "mle"),
        ("double_genpareto", "mle"),
        ("gennorm", "mle"),
        ("t", "mle"),
        ("dweibull", "mle"),
    ):
        check = _check_laplace if model == "laplace" else _nothing
        yield Target(gradstats.fit, {"model": model, "method": method}, check=check)
    yield Target(goodness.goodness, {"fit": gradstats.fit(x, "laplace")})
    yield Target(
        goodness.compare,
        {"first": gradstats.fit(x, "laplace"), "second": gradstats.fit(x, "norm")},
        among=("x",),
    )
    yield Target(
        goodness.bootstrap, {"model": "laplace", "size": 50, "replicates": 2, "statistic": "ad"}
    )
    yield Target(gradstats.fit_all, {"models": ["laplace", "dgamma"]})
    yield Target(pot.mean_excess, {})
    yield Target(pot.parameter_stability, {"ratios": (0.5, 0.1)})
    few = {"ratios": (0.5,), "size": 50, "replicates": 9, "alpha": 0.25, "splits": 1}
    yield Target(pot.choose_threshold, few)
    yield Target(pot.tail_quantile, {"ratio": 0.01})
    yield Target(pot.stages, {"ratio": 0.01, "n_stages": 3})
    yield Target(_mixture, {"at": 0.1})
    yield Target(
        primitives.top_candidates,
        {"k": 3},
        check=lambda o, f: _check_selection(o, f[0], f[1]),
        among=("k",),
    )

    for k in (3, 600):
        yield Target(
            primitives.topk, {"k": k}, check=lambda o, f, k=k: _check_topk(o, k, f), among=("k",)
        )

    yield Target(gradstats.compare, {"a": {"w": x}}, array="b", among=("weights", "tolerance"))
    fitted, sketched = gradstats.fit(x, "laplace"), gradstats.sketch(x)
    counted, m = gradstats.histogram(x), sketched.magnitudes
    for method, arguments in (
        (fitted.threshold, {"ratio": 0.1}),
        (fitted.interval, {"parameter": "scale", "level": 0.9}),
        (counted.coarsen, {"bits": 3}),
        (counted.upper_quantile, {"k": 10}),
        (sketched.coarsen, {"bits": 3}),
        (m.exceedances, {"threshold": 1.0}),
        (m.excesses, {"threshold": 1.0}),
        (m.upper_quantile, {"k": 10}),
        (m.scaled, {"factor": 2.0}),
        (m.largest, {"count": 10}),
        (partial(m.sample, rng=np.random.default_rng(0)), {"size": 10}),
        (thresholds.target_count, {"ratio": 0.1, "numel": 100}),
        (thresholds.make_estimator, {"name": "exact"}),
        (compressors.make_selector, {"name": "dgc", "ratio": 0.1}),
        (compressors.compressor_class, {"name": "dgc"}),
        (compressors.codecs, {"name": "dgc"}),
        (compressors.as_compressor, {"rule": compressors.TopK(0.1)}),
        (dgc_warm_up, {"steps_per_epoch": 10}),
        (_threads, {"n": 1}),
        (gradstats.backend, {"name": "torch"}),
    ):
        yield Target(method, arguments, array="")
    for factory in thresholds.ESTIMATORS.values():
        yield Target(factory, {}, array="")
    yield Target(partial(thresholds.SIDCoGP, gamma="exact"), {"stages": 2}, array="")
    for name in compressors.COMPRESSORS:
        cls = compressors.compressor_class(name)
        if cls.has_ratio:  # others ignore it
            yield Target(partial(compressors.make_compressor, name), {"ratio": 0.1}, array="")
        if cls is not compressors.SparseCompressor:
            yield Target(cls, {"ratio": 0.1} if cls.has_ratio else {}, array="")
    yield Target(compressors.GlobalHistogram, {"ratio": 0.1}, array="")
    yield Target(compressors.TopK, {"ratio": 0.1}, array="")
    yield Target(compressors.ChunkTopK, {"ratio": 0.1}, array="")
    yield Target(compressors.SparseCompressor, {"selector": compressors.TopK(0.1)}, array="")
    yield Target(
        CompressionState,
        {"compressor": compressors.TopK(0.1)},
        array="",
        among=("compressor", "dense_below", "clip", "weight_decay", "diagnose_every", "exclude"),
    )
    yield Target(_scheduled, {"ratio": 0.5}, array="")
    yield Target(ErrorFeedback, {}, array="")
    yield Target(MomentumCorrection, {}, array="", among=("momentum", "nesterov"))
    yield Target(AdamCorrection, {}, array="")
    named = [("weight", torch.zeros(8, 8))]
    for system in (systems.dgc, systems.redsync):
        yield Target(partial(system, named), {}, array="")


def figures(rng: np.random.Generator) -> Iterator[Target]:
    """Return the figures of gradients with valid arguments."""
    fitted = gradstats.fit(rng.laplace(size=2000), "laplace")
    for function, arguments in (
        (plots.magnitude_decay, {"window": (10, 100)}),
        (plots.best_k_error, {}),
        (plots.local_exponent, {"per_decade": 2}),
        (plots.window_exponent, {}),
        (plots.mean_excess, {}),
        (plots.parameter_stability, {}),
        (partial(plots.density, fits=[fitted]), {"coverage": 0.99}),
        (partial(plots.tail, fits=[fitted]), {}),
        (partial(plots.qq, fits=[fitted]), {}),
    ):
        yield Target(_Plot(function), arguments)


def _swapped(check: Callable[..., None], *arguments: Any) -> None:
    *given, odd, found = arguments
    check(odd, *given, found)


class _Select:
    """Selection by a new estimator of some name."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = f"make_estimator({name!r}).select"
        self._name = name

    def __call__(self, x: Any, ratio: float) -> Any:
        rule = thresholds.make_estimator(self._name)
        rule.select(x, ratio)  # the second time with a state
        return rule.select(x, ratio)


class _Compress(_Select):
    """Selection by a new selector of some name, as in training: a flat float32 tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__qualname__ = f"make_selector({name!r}).select"

    def __call__(self, x: Any, ratio: float) -> Any:
        selector = compressors.make_selector(self._name, ratio)
        return selector.select(x)


class _Plot:
    """A figure drawn on axes of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__qualname__ = _plain(function).__qualname__
        options = inspect.signature(function).parameters
        self._many = "vectors" in options
        self.__signature__ = inspect.Signature(
            [p for n, p in options.items() if n not in ("vectors", "x", "ax", "fits")]
        )

    def __call__(self, x: Any, **options: Any) -> Any:
        from matplotlib.figure import Figure

        ax = Figure().add_subplot()
        given = {"vectors": {"x": x}} if self._many else {"x": x}
        return self._function(**given, ax=ax, **options)


def _changed(x: Any, dtype: Any, rate: float | None) -> Any:
    return gradstats.delta(x, x, dtype=dtype, rate=rate)


def _mixture(x: Any, at: float) -> Any:
    return pot.mixture({"a": x, "b": np.ones(200)}, at)


def _threads(n: Any) -> None:
    try:
        primitives.set_num_threads(n)
    finally:
        primitives.set_num_threads(None)


def _scheduled(ratio: Any) -> Any:
    return CompressionState(compressors.TopK(0.1), ratio_at=lambda step: ratio)


def calls(
    rng: np.random.Generator,
    of: Callable[[np.random.Generator], Iterator[Target]] = targets,
) -> Iterator[tuple[str, Call]]:
    """Yield (label, call) for each public function with every odd array, and with every hostile argument."""
    import xarray  # noqa: F401 — seconds, which are no call's

    gradstats.warm_up()
    odd_arrays, plain = arrays(rng), rng.laplace(size=300)
    for target in of(rng):
        if target.array:
            for odd in odd_arrays:
                yield f"{target.name}, {target.array}: {odd.name}", partial(_answer, target, odd)
        given = {**({target.array: plain} if target.array else {}), **target.arguments}
        for name, parameter in inspect.signature(target.function).parameters.items():
            unfit = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            flag = parameter.annotation in (bool, "bool")
            if name in (*_HARMLESS, target.array) or unfit or flag:
                continue
            if target.among and name not in target.among:
                continue
            number = parameter.annotation in ("float", "int", "float | None", "int | None")
            for label, value in numbers().items():
                call = partial(target.function, **{**given, name: value})
                if number and not _is_number(value):
                    call = partial(_must_refuse, call)
                yield f"{target.name}, {name}: {label}", call


def _is_number(value: Any) -> bool:
    """Tell whether a value may be taken for a number, or for none."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return value is None or (real and value == value)  # not NaN


def _must_refuse(call: Call) -> None:
    raise WrongAnswer(f"{call()!r:.100} of what is no number")


def _answer(target: Target, odd: Odd) -> None:
    """Call a function with an odd array, and check what it answers."""
    found = target.function(**{target.array: odd.value}, **target.arguments)
    if odd.elements is None:
        raise WrongAnswer(f"{found!r:.100} of what is no gradient")
    target.check(odd, found)


_ELSEWHERE = (
    "get_num_threads",  # takes nothing
    "warm_up",
    "numel_of",  # of arrays that are checked
    "set_num_threads",  # called by _threads, which undoes it
    "mixture",  # called by _mixture
    "delta",  # called by _changed
    "open_trace",  # of paths and traces: the tests of damaged traces
    "compression",
    "save_safetensors",
    "agreement",  # of traces of several ranks
    "advise",  # of any source; its own tests have odd ones
    "explore",  # tests/explorer has its wrong options
    "write_explorer",
)
"""Public functions that are no target by themselves."""


def uncovered() -> list[str]:
    """Return the names of public functions that no call reaches."""
    reached = {_plain(target.function) for target in targets(np.random.default_rng(0))}
    modules = (gradstats, primitives, compressors, thresholds, goodness, pot)
    return [
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if inspect.isfunction(value := getattr(module, name))
        and name not in _ELSEWHERE
        and value not in reached
    ]


def _plain(function: Any) -> Any:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__func__", function)
