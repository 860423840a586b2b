"""What a reference run is made of: workload defaults, a run's settings, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradstats.errors import InputError

__all__ = [
    "BASELINES",
    "NO_EXCHANGE",
    "WORKLOADS",
    "RunConfig",
    "RunResult",
    "WorkloadInfo",
    "workload_info",
]

BASELINES = ("torch-topk", "powersgd")
"""Rivals that a run takes beside this project's compressors: :mod:`capture.workloads.baselines`."""
NO_EXCHANGE = "no-exchange"
"""Name of a run that exchanges nothing: its ranks train by themselves, but wait for each other in every step."""


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """A workload's description and defaults."""

    name: str
    description: str
    module: str
    learning_rate: float
    batch_size: int
    steps: int
    files: tuple[str, ...] = ()
    """Names of which at least one must be in the data folder; empty if the data is embedded."""
    hidden: int = 0
    vocab: int = 0


_CIFAR10 = tuple(f"data_batch_{i}.bin" for i in range(1, 6))

WORKLOADS: dict[str, WorkloadInfo] = {
    info.name: info
    for info in (
        WorkloadInfo(
            "resnet20-digits",
            "ResNet-20 on scikit-learn's digits, enlarged to 16×16 (embedded)",
            "capture.workloads.resnet20",
            learning_rate=0.1,
            batch_size=32,
            steps=400,
        ),
        WorkloadInfo(
            "resnet20-cifar10",
            "ResNet-20 on CIFAR-10, binary version",
            "capture.workloads.resnet20",
            learning_rate=0.1,
            batch_size=64,
            steps=3000,
            files=_CIFAR10,
        ),
        WorkloadInfo(
            "vgg16-cifar10",
            "VGG16 on CIFAR-10, binary version, 14,982,987 parameters",
            "capture.workloads.vgg16",
            learning_rate=0.01,
            batch_size=32,
            steps=1000,
            files=_CIFAR10,
        ),
        WorkloadInfo(
            "lstm-pydoc",
            "2-layer word LSTM on the English text of CPython's pydoc topics (embedded)",
            "capture.workloads.lstm",
            learning_rate=5.0,
            batch_size=20,
            steps=400,
            hidden=200,
            vocab=4000,
        ),
        WorkloadInfo(
            "lstm-ptb",
            "2-layer word LSTM on the Penn Treebank, 66,034,000 parameters at full size",
            "capture.workloads.lstm",
            learning_rate=5.0,
            batch_size=20,
            steps=1000,
            files=("ptb.train.txt",),
            hidden=1500,
            vocab=10_000,
        ),
    )
}


def workload_info(name: str) -> WorkloadInfo:
    """Return the workload called `name`; raise :class:`InputError` listing them if there is none."""
    try:
        return WORKLOADS[name]
    except KeyError:
        raise InputError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of one run. Everything that decides its numbers is here, and is stored in its trace."""

    workload: str
    nproc: int = 2
    steps: int | None = None  # the workload's default if None, like the next four
    batch_size: int | None = None  # per process
    learning_rate: float | None = None
    hidden: int | None = None
    vocab: int | None = None
    compressor: str = "topk"
    ratio: float = 0.001
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compressor
    error_feedback: bool = True
    seed: int = 0
    data_dir: Path | None = None
    out: Path | None = None  # no capture if None
    every: int = 1
    at: tuple[int, ...] = ()  # these steps instead of every N
    ranks: tuple[int, ...] | None = None
    store: Literal["gradients", "sketches"] = "gradients"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compress: bool = False
    overwrite: bool = False
    diagnose_every: int = 0  # steps; each costs a dense all-reduce
    bucket_mb: float | None = (
        None  # DDP's; small for layer-wise systems, PyTorch's for others if None
    )
    evaluate: bool = True  # the final model on unseen data, where there is any
    label: str = ""  # before the progress bar; no bar if empty

    @property
    def info(self) -> WorkloadInfo:
        """The workload's defaults."""
        return workload_info(self.workload)

    def setting(self, name: Literal["steps", "batch_size", "hidden", "vocab"]) -> int:
        """Return a setting, or the workload's default for it."""
        value = getattr(self, name)
        return int(getattr(self.info, name) if value is None else value)

    @property
    def initial_learning_rate(self) -> float:
        """The learning rate the run starts with."""
        return self.info.learning_rate if self.learning_rate is None else self.learning_rate

    def check(self) -> None:
        """Raise :class:`InputError` for anything a worker would trip over."""
        from gradstats.compressors import COMPRESSORS, make_compressor
        from gradstats.primitives.ratio import target_count

        info = self.info
        if self.compressor in (*BASELINES, NO_EXCHANGE):
            target_count(self.ratio, 1)  # raises on a bad ratio
        elif self.compressor not in COMPRESSORS:
            known = ", ".join((*COMPRESSORS, *BASELINES))
            raise InputError(f"no compressor {self.compressor!r}; there are {known}")
        else:
            make_compressor(self.compressor, self.ratio, **self.options)
        if self.nproc < 1:
            raise InputError(f"nproc must be at least 1, not {self.nproc}")
        for name in ("steps", "batch_size"):
            if self.setting(name) < 1:
                raise InputError(f"{name} must be at least 1, not {self.setting(name)}")
        if info.hidden and min(self.setting("hidden"), self.setting("vocab")) < 2:
            raise InputError("hidden and vocab must be at least 2")
        if info.files:
            if self.data_dir is None:
                raise InputError(
                    f"{self.workload} reads {info.files[0]}, …: name its folder with --data-dir"
                )
            if not any((self.data_dir / name).is_file() for name in info.files):
                raise InputError(f"{self.data_dir} holds none of {', '.join(info.files)}")

    def metadata(self) -> dict[str, Any]:
        """Return the settings as JSON values, for the trace."""
        info = self.info
        return {
            "workload": self.workload,
            "model": info.name.split("-")[0],
            "data": info.name.split("-")[1],
            "optimizer": {"name": "SGD", "learning_rate": self.initial_learning_rate},
            "compressor": self.compressor,
            "ratio": self.ratio if self.compressor != "none" else 1.0,
            **({"options": dict(self.options)} if self.options else {}),
            "error_feedback": self.error_feedback and self.compressor != "none",
            "seed": self.seed,
            "steps": self.setting("steps"),
            "batch_size": self.setting("batch_size"),
            **({k: self.setting(k) for k in ("hidden", "vocab")} if info.hidden else {}),
        }

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with some settings changed."""
        return RunConfig(**{**asdict(self), **changes})


@dataclass(slots=True)
class RunResult:
    """What rank 0 saw.

    Attributes
    ----------
    losses : its training loss at every step.
    seconds : wall-clock seconds of every step, gradient exchange included.
    numel : trainable parameters of the model.
    records : of the hook's state at every step (:class:`gradstats.hooks.StepRecord`'s fields); empty if dense.
    accuracy : share of the unseen samples that the final model gets right; NaN where there are none.
    perplexity : of the final model on unseen text; likewise.
    timeline : of a layer-wise system's last step (:class:`gradstats.compressors.layerwise.Activity`'s fields).
    checksum : sum of the final parameters in float64, to compare runs bit by bit.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float = float("nan")
    perplexity: float = float("nan")
    timeline: list[dict[str, Any]] = field(default_factory=list)
    numel: int = 0
    checksum: float = 0.0
