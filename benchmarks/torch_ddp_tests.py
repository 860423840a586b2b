"""PyTorch's own tests of DistributedDataParallel, with a hook of this project on every model that has none.

They ship in PyTorch's wheel (``torch.testing._internal.distributed.distributed_test``) and run here on gloo, two
processes on the CPU, also where they ask for GPUs. Every DDP model gets a hook before its first forward pass, unless
the test registers one:

- ``none``: no hook, the tests as they are;
- ``allreduce``: PyTorch's ``allreduce_hook``, the measure: what a hook may change at all;
- ``dense``: ``compression_hook`` with the dense compressor;
- ``capture``: a ``Capture`` around ``allreduce_hook``, which records every step.

``python benchmarks/torch_ddp_tests.py`` appends a line for each test and hook to docs/results/torch_ddp_tests.jsonl,
and goes on where it was stopped; ``--table`` prints what ends how, and where the hooks differ from
``allreduce``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import types
import unittest
import weakref
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "torch_ddp_tests.jsonl"
HOOKS = ("none", "allreduce", "dense", "capture")
WORLD = 2
_CLONE = "The test refuses every copy of a gradient, and {} one"
REASONS = {
    ("test_ddp_sink_noclone", "dense"): _CLONE.format("the compressor works on"),
    ("test_ddp_sink_noclone", "capture"): _CLONE.format("a capture is"),
    (
        "test_ddp_static_graph_nested_types",
        "capture",
    ): "It puts a DDP model into another. The inner hook's result would be captured, which is refused by name",
}
"""Why a test ends otherwise than with PyTorch's own hook."""

folder = tempfile.mkdtemp()
for key, value in {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(WORLD),
    "TEMP_DIR": folder,
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
    "GLOO_SOCKET_IFNAME": "lo",
}.items():
    os.environ.setdefault(key, value)
if "expecttest" not in sys.modules:  # the tests of DDP use no more of it than its base class
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class DDPTests(TestDistBackend, DistributedTest._DistTestBase):
    """The tests, in forked processes."""

    def setUp(self):
        """Start the ranks."""
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def give_hook(ddp, hook, number):
    """Register a hook on a model; return what to call before each following forward pass."""
    default = dist.distributed_c10d._get_default_group()
    # a group cannot be saved with the model, and some tests do that
    group = None if ddp.process_group is default else ddp.process_group
    if hook == "allreduce":
        ddp.register_comm_hook(group, allreduce_hook)
    elif hook == "dense":
        from gradstats.compressors import DenseCompressor
        from gradstats.hooks import CompressionState, compression_hook

        ignored = set(ddp.parameters_to_ignore)
        named = [(n, p) for n, p in ddp.module.named_parameters() if n not in ignored]
        state = CompressionState(DenseCompressor(), named_parameters=named, process_group=group)
        ddp.register_comm_hook(state, compression_hook)
    elif hook == "capture":
        from capture import Capture

        capture = Capture(Path(os.environ["TEMP_DIR"]) / f"{number}.zarr", ddp, overwrite=True)
        ddp.register_comm_hook(*capture.wrap(group, allreduce_hook))
        return capture.step
    return lambda: None


def inject(hook):
    """Have every DDP model that is trained get a hook before its first forward pass."""
    original, builtin = (
        DistributedDataParallel._pre_forward,
        DistributedDataParallel._register_builtin_comm_hook,
    )
    count = iter(range(10**6))
    # not attributes of the models, which some tests save
    ends, built_in = weakref.WeakKeyDictionary(), weakref.WeakSet()

    @functools.wraps(original)
    def pre_forward(self, *inputs, **options):
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            if self in ends:
                ends[self]()
            elif not self._comm_hooks and self not in built_in:
                ends[self] = give_hook(self, hook, next(count))
        return original(self, *inputs, **options)

    def register_builtin(self, *arguments):
        built_in.add(self)
        return builtin(self, *arguments)

    if hook != "none":
        DistributedDataParallel._pre_forward = pre_forward
        DistributedDataParallel._register_builtin_comm_hook = register_builtin


class _OnCPU(TorchFunctionMode):
    """Puts on the CPU what a test would put on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_gpu(each) else each for each in args)
        return func(*args, **kwargs)


def _is_gpu(device):
    number = isinstance(device, int) and not isinstance(device, bool)
    return number or str(device).startswith("cuda")


def on_cpu():
    """Have tests that ask for GPUs run on the CPU: most of them test nothing that a GPU does otherwise."""
    available, count = torch.cuda.is_available, torch.cuda.device_count
    init = DistributedDataParallel.__init__

    def asked():  # by a decorator that would skip the test
        return sys._getframe(2).f_code.co_filename.endswith("common_distributed.py")

    torch.cuda.is_available = lambda: asked() or available()
    torch.cuda.device_count = lambda: WORLD if asked() else count()
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: 0
    torch.nn.Module.cuda = lambda self, *_: self
    move = torch.nn.Module.to

    def to(self, *args, **options):
        if _is_gpu(options.get("device")):
            options["device"] = "cpu"
        return move(self, *("cpu" if _is_gpu(each) else each for each in args), **options)

    torch.nn.Module.to = to

    @functools.wraps(init)
    def on_no_device(self, module, device_ids=None, output_device=None, *args, **options):
        init(self, module, None, None, *args, **options)

    DistributedDataParallel.__init__ = on_no_device
    _OnCPU().__enter__()


def names():
    """Return the names of the tests of DDP."""
    every = (n for n in dir(DDPTests) if n.startswith("test"))
    return [n for n in every if re.search("ddp|DistributedDataParallel", n, re.IGNORECASE)]


def run(name):
    """Return how a test ended, and the last line of what it raised or the reason to skip it."""
    result = unittest.TestResult()
    unittest.TestSuite([DDPTests(name)]).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    for _, text in result.failures + result.errors:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
        # the parent's own line comes last, and says that a process failed
        return "failed", next((e for e in errors if "Process " not in e), lines[-1])[:300]
    return "passed", ""


def stored():
    """Return the results so far."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table():
    """Print how many tests ended in which way, and where the hooks differ from PyTorch's, as Markdown."""
    found = {(row["test"], row["hook"]): row for row in stored()}
    print("| hook | passed | failed | skipped |\n|---|---:|---:|---:|")
    for hook in HOOKS:
        ends = [row["result"] for (_, h), row in found.items() if h == hook]
        counts = " | ".join(str(ends.count(end)) for end in ("passed", "failed", "skipped"))
        print(f"| `{hook}` | {counts} |")
    print("\n| not as `allreduce` | result | why |\n|---|---|---|")
    for (name, hook), row in found.items():
        theirs = found.get((name, "allreduce"))
        if (
            hook in ("dense", "capture")
            and theirs is not None
            and theirs["result"] != row["result"]
        ):
            why = REASONS.get((name, hook), "not known")
            print(f"| {name}, `{hook}` | {row['result']} | {why} |")


def main():
    """Run what is not stored yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hook", choices=HOOKS, action="append")
    parser.add_argument("--test", action="append")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        return table()
    done = {(row["test"], row["hook"]) for row in stored()}
    for hook in given.hook or HOOKS:
        # a fork each, as the patch cannot be taken back, and only one may write
        for name in given.test or names():
            if (name, hook) in done:
                continue
            pid = os.fork()
            if not pid:
                on_cpu()
                inject(hook)
                end, reason = run(name)
                row = {"test": name, "hook": hook, "result": end, "reason": reason}
                row["torch"] = torch.__version__
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(f"{hook} {name}: {end} {reason}", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main()
