"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data"
# Data sets that are not in the repository; tests that read them are skipped where they are missing.
DATA_SETS = Path(os.environ.get("GRADSTATS_DATA", ROOT.parent / "shared" / "data"))

MEMORY = Path("/dev/shm")
# Tests replace files by the thousand, and a disk writes each before the new name is there: they take memory, if it has
# room for the gigabytes of a whole run and runs programs.
if (
    os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free > 8 << 30
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("TMPDIR", str(MEMORY))
    tempfile.tempdir = None  # asked again

# Two thread pools on two cores stall each other, and every worker process would bring its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where this is set, each of the hundreds of processes that tests start would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# An example that takes long tells of other processes, not of what is tested.
hypothesis.settings.register_profile("gradstats", deadline=None)
hypothesis.settings.load_profile("gradstats")
# Triton's kernels run in its interpreter, on CPU tensors: it is chosen when Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"


class Examples:
    """Have no module imported for its examples that has none: that for Hugging Face alone takes seconds."""

    @staticmethod
    def pytest_ignore_collect(collection_path):
        """Leave out such a module of the packages; None leaves the choice to others."""
        if collection_path.suffix != ".py" or collection_path.is_relative_to(ROOT / "tests"):
            return None
        return None if ">>>" in collection_path.read_text(encoding="utf-8") else True


def pytest_configure(config):
    """Compile loops before the tests, or the first would have the note about it in its output.

    Garbage is not collected until all tests are found: almost all that they import stays.
    """
    gc.disable()
    # not as a function of this file, whose hooks are of what is below its folder alone
    config.pluginmanager.register(Examples())
    if not hasattr(config, "workerinput"):
        import gradstats

        gradstats.warm_up()


def pytest_collection_modifyitems(items):
    """Begin with the files that have slow tests: the last to end would keep one worker alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """Leave what was imported out of every later collection of garbage: hundreds of thousands of objects, that stay."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def process_of_ranks(request):
    """Start the process that ranks are forked from: who starts it decides what it has imported."""
    if any(item.get_closest_marker("distributed") for item in request.session.items):
        from multiprocessing import forkserver

        import forked  # noqa: F401 — a run of `gradstats capture` would name less

        forkserver.ensure_running()


def pytest_terminal_summary(terminalreporter):
    """Say which loops for some kinds of processors ran here, and which did not."""
    from gradstats.primitives.loops.compiled import LOOPS, has

    for loop in LOOPS:
        if loop.needs:
            state = "run" if has(loop.needs) else "not run"
            name = loop.py_func.__name__
            terminalreporter.write_line(f"{name}: {state}, needs {loop.needs}")


def as_tensor(a):
    import torch  # once OMP_NUM_THREADS is set

    return torch.from_numpy(np.array(a))


# What turns a float32 NumPy array into the array type under test.
ARRAYS = {"numpy": np.asarray, "torch": as_tensor}
TRACES = {name: DATA / f"{name}.zarr" for name in ("resnet20", "resnet20-ef")}


@pytest.fixture(autouse=True)
def seeded():
    """Have torch draw the same for a test in every run: what fails once fails again."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(params=ARRAYS.values(), ids=ARRAYS)
def xp(request):
    """Turn a float32 NumPy array into the array type under test."""
    return request.param


@pytest.fixture(params=TRACES.values(), ids=TRACES)
def trace_path(request):
    """One of the committed traces."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_loaded():
    """Have no test leave a file loaded: the ranks of a later one would load it, too."""
    from gradstats.registry import loaded_files

    before = loaded_files()
    yield
    assert loaded_files() == before, "use the fixture forgotten"


@pytest.fixture
def forgotten(monkeypatch):
    """Forget after the test what it adds to the registries, and which files brought it."""
    from gradstats import registry as files
    from gradstats.compressors import COMPRESSORS
    from gradstats.statistics.laws import LAWS
    from gradstats.thresholds import ESTIMATORS

    monkeypatch.setattr(files, "_FILES", dict(files._FILES))
    for registry in (LAWS, ESTIMATORS, COMPRESSORS):
        monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))


@pytest.fixture
def unrendered(monkeypatch):
    """Leave pictures out of pages: to render them is much of the time that a page takes."""
    monkeypatch.setattr("gradstats.plots.png", lambda *_, **__: b"")


@pytest.fixture
def as_made(monkeypatch):
    """Have processes compute as the Makefile makes the pages: a training's digits depend on it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


def data_set(name):
    folder = DATA_SETS / name
    if not folder.is_dir():
        pytest.skip(f"no folder {name} in {DATA_SETS}; GRADSTATS_DATA names another")
    return folder


@pytest.fixture
def cifar10():
    return data_set("cifar-10-batches-bin")


@pytest.fixture
def ptb():
    return data_set("ptb")


def families(n: int = 100_000, seed: int = 1) -> dict[str, np.ndarray]:
    """Return float32 samples of the families thresholds meet."""
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0], n)
    scales = np.exp(1.5 * rng.standard_normal(50))
    samples = {
        "laplace": rng.laplace(size=n),
        "normal": rng.standard_normal(n),
        "gamma 0.4": sign * rng.gamma(0.4, size=n),
        "gamma 0.7": sign * rng.gamma(0.7, size=n),
        "student-t 3": rng.standard_t(3, n),
        "gpd 0.3": sign * (rng.random(n) ** -0.3 - 1) / 0.3,
        "gpd -0.3": sign * (1 - rng.random(n) ** 0.3) / 0.3,
        "log-normal mixture": rng.laplace(size=n) * rng.choice(scales, n),
        "30 % zeros": rng.laplace(size=n) * (rng.random(n) > 0.3),
    }
    return {name: (1e-3 * x).astype(np.float32) for name, x in samples.items()}


FAMILIES = families()


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
