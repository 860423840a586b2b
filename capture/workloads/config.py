"""Reference runs as data: the settings of a run, and its result."""

# Size: a run's settings are one record, which is written into its trace, and their checks stand beside it.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from capture.schedule import Schedule, at, every
from capture.workloads.registry import (
    LearningRates,
    OptimizerName,
    WorkloadInfo,
    family,
    settings_with,
    workload_info,
)
from gradstats.errors import InputError, unknown

if TYPE_CHECKING:
    from gradstats.compressors import Average
    from gradstats.hooks import Nesterov
    from gradstats.hooks.systems import System
    from gradstats.trace import Dtype, Store

__all__ = [
    "BASELINES",
    "DENSE",
    "NO_EXCHANGE",
    "ClipKind",
    "NesterovForm",
    "Outer",
    "Parallel",
    "Recipe",
    "RunConfig",
    "RunResult",
    "Size",
    "Training",
]

DENSE = "none"
"""Name of a run without compression: PyTorch's own all-reduce."""
NO_EXCHANGE = "no-exchange"
"""Name of a run that exchanges nothing: its ranks train by themselves, but wait for each other in every step."""
BASELINES = ("torch-topk", "powersgd", "torch-bf16")
"""Names that a run takes beside this project's compressors, for comparison; :mod:`capture.workloads.baselines`."""


ClipKind: TypeAlias = Literal["local", "averaged"]
"""What is clipped: each rank's gradient before it is accumulated, or the average after the exchange."""
NesterovForm: TypeAlias = Literal["none", "dgc", "redsync"]
"""No Nesterov's momentum, or one of the forms that :class:`gradstats.hooks.MomentumCorrection` has."""
Parallel: TypeAlias = Literal["ddp", "fsdp", "hsdp"]
"""Every rank with the whole model, with a shard of it, or shards in each of two replicas."""
Recipe: TypeAlias = Literal["short", "paper", "program"]
"""Where settings come from that are not given: the workload's defaults, or the training of a paper or its program."""
Size: TypeAlias = Literal["0.1M", "0.5M", "2M", "10M", "30M", "124M"]
"""Sizes of the transformer; :mod:`capture.workloads.gpt` has their shapes."""
Outer: TypeAlias = Literal["diloco", "sparseloco", "mean"]
"""What a run with local steps does with the mean of its pseudo-gradients."""
_SYSTEM_MOMENTUM = 0.9
"""Momentum of systems that have one of their own, as published."""
_SYSTEM_WARM_UP = 20
"""Systems with a warm-up spend one step in so many on it: DGC's four epochs of 90 and RedSync's five."""


# Size: a run's settings are one record: an attribute for each option, documented, and checked.
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of one run. Everything that decides its numbers is here, and is stored in its trace.

    Attributes
    ----------
    workload : str
        One of :data:`capture.workloads.WORKLOADS`.
    recipe : {"short", "paper", "program"}
        Where settings come from that are None: ``"short"`` is the workload's own defaults, for minutes on a CPU;
        ``"paper"`` the training of the first paper that has this workload, as far as it is published; ``"program"``
        that of its authors' program, where it is public and differs.
    steps : int or None
        Steps to train.
    batch_size : int or None
        Samples per process and step.
    learning_rate : float or None
        Learning rate at the start.
    hidden : int or None
        Width of the LSTM.
    vocab : int or None
        Number of words that a model of text knows.
    size : {"0.1M", "0.5M", "2M", "10M", "30M", "124M"} or None
        Size of the transformer, by its parameters with 4,000 words.
    autocast : bool
        Whether the transformer computes in bfloat16 where torch's autocast does.
    nproc : int
        Number of processes (ranks).
    parallel : {"ddp", "fsdp", "hsdp"}
        Whether every rank has the whole model, a shard of it, or a shard in one of two replicas, which exchange
        compressed gradients.
    compressor : str
        A name of :data:`gradstats.compressors.COMPRESSORS`, :data:`BASELINES`, or :data:`NO_EXCHANGE`.
    ratio : float
        Kept fraction k/d.
    options : mapping
        Further options of the compressor.
    optimizer : {"sgd", "nesterov", "adamw", "muon"} or None
        Optimizer, see :func:`capture.workloads.optimizers.make_optimizers`; the workload's own if None. Another than
        that has a learning rate of its own, 0.1 for SGD and 0.001 for AdamW and Muon, and no weight decay.
    momentum : float or None
        Momentum m in [0, 1). If None, 0.9 for the systems ``dgc``, ``redsync`` and ``redsync-quantised``, which correct
        it in the memory of each rank, and the workload's for others, whose optimizer has it.
    nesterov : {"none", "dgc", "redsync"} or None
        Form of Nesterov's momentum, see :class:`gradstats.hooks.MomentumCorrection`; the optimizer knows ``"dgc"``
        alone. If None, ``"dgc"`` for RedSync, as published, and none for others.
    weight_decay : float or None
        Multiple of the parameter added to its gradient: by these systems before it is accumulated, else by the
        optimizer. None is 0, unless the recipe has one.
    clip : float or None
        Largest norm of the gradient; 0 for no clipping. The workload's if None.
    clip_kind : {"local", "averaged"} or None
        ``"local"`` clips the gradient of each of n ranks to clip/√n before it is accumulated, ``"averaged"`` what the
        exchange returned. If None, ``"local"`` for these systems and ``"averaged"`` for others.
    warm_up : int or None
        Number of steps in the beginning that send more: DGC's falling ratios for ``dgc``, dense steps for others. If
        None, one step in 20 for these systems and none for others.
    lr_schedule : {"constant", "step", "thirds", "milestones", "cosine", "linear", "annealed"} or None
        How the learning rate falls, see :meth:`learning_rate_at`; as the workload's if None.
    lr_warm_up : int or None
        Number of steps in the beginning in which the learning rate rises to its value; as the workload's if None.
    error_feedback : bool
        Whether what is not sent is added to the next gradient, where the compressor is made for that.
    adam_correction : bool
        Whether each rank makes AdamW's step of its own gradient before the exchange, and these are compressed, see
        :class:`gradstats.hooks.AdamCorrection`. The rate and the weight decay are AdamW's.
    local_steps : int
        Local steps from one exchange to the next, see :class:`gradstats.hooks.LocalSteps`; 0 for DDP, which averages
        in every step. What is compressed, and captured, are then pseudo-gradients.
    outer : {"diloco", "sparseloco", "mean"}
        What is done with them: Nesterov's momentum on their mean; SparseLoCo, whose compressor takes the place of
        `compressor`; or the mean of the parameters.
    outer_learning_rate : float or None
        Learning rate of the outer optimizer; that of the papers if None.
    fragments : int
        Number of parts of the model that are exchanged at different steps.
    delay : int
        Local steps that an exchange takes place in the background.
    average : {"ranks", "senders"}
        What a sum of sparse messages is divided by.
    seed : int
        Seed of weights, batches and sampling.
    data_dir : Path or None
        Folder of the data set; None if the data is embedded.
    out : Path or None
        Trace to create; None for no capture.
    every : int
        Number of steps from one captured step to the next.
    at : tuple of int
        Steps to capture instead, if there are any.
    ranks : tuple of int or None
        Ranks to capture; all if None.
    kinds : tuple of str or None
        Kinds to capture, of :data:`gradstats.trace.KINDS`; as :class:`capture.Capture` chooses if None.
    store : {"gradients", "sketches"}
        What of the gradients is stored.
    dtype : {"float32", "bfloat16"}
        Type of the stored gradients.
    compress : bool
        Whether to compress the trace.
    overwrite : bool
        Whether to replace an existing trace.
    diagnose_every : int
        Every so many steps the update is compared with the dense mean, which costs a dense all-reduce; 0 for never.
    bucket_mb : float or None
        Size of DDP's buckets in MB. If None, small ones for compressors that stream, and PyTorch's default for others.
    checkpoint : Path or None
        Folder of the run's checkpoints; the same run goes on from the newest, bit for bit, and captures into
        ``NAME-2.zarr`` beside the trace that it began. None for none.
    checkpoint_every : int
        Number of steps from one checkpoint to the next. At each the model is tried on unseen data.
    evaluate : bool
        Whether the final model is tried on unseen data, where there is any.
    label : str
        Text before the progress bar; no bar if empty.
    """

    workload: str
    recipe: Recipe = "short"
    nproc: int = 2
    parallel: Parallel = "ddp"
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    hidden: int | None = None
    vocab: int | None = None
    size: Size | None = None
    autocast: bool = False
    compressor: str = "topk"
    ratio: float = 0.001
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerName | None = None
    momentum: float | None = None
    nesterov: NesterovForm | None = None
    weight_decay: float | None = None
    clip: float | None = None
    clip_kind: ClipKind | None = None
    warm_up: int | None = None
    lr_schedule: LearningRates | None = None
    lr_warm_up: int | None = None
    error_feedback: bool = True
    adam_correction: bool = False
    local_steps: int = 0
    outer: Outer = "diloco"
    outer_learning_rate: float | None = None
    fragments: int = 1
    delay: int = 0
    average: Average = "ranks"
    seed: int = 0
    data_dir: Path | None = None
    out: Path | None = None
    every: int = 10
    at: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    store: Store = "gradients"
    dtype: Dtype = "float32"
    compress: bool = False
    overwrite: bool = False
    diagnose_every: int = 0
    bucket_mb: float | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 100
    evaluate: bool = True
    label: str = ""

    @property
    def info(self) -> WorkloadInfo:
        """The workload's defaults."""
        return workload_info(self.workload)

    @property
    def _recipe(self) -> Mapping[str, Any]:
        """The training that the recipe stands for."""
        recipes: dict[str, Mapping[str, Any]] = {
            "paper": self.info.recipe,
            "program": self.info.program,
        }
        return recipes.get(self.recipe, {})

    def _chosen(self, name: str) -> Any:
        """Return a setting as given, or else as the recipe or the workload has it; None where none of them does."""
        value = getattr(self, name)
        if value is None:
            # before the recipe: an optimizer that is asked for comes with settings of its own
            value = settings_with(self.optimizer, self.info.optimizer).get(name)
        if value is None:
            recipe = self._recipe
            value = recipe.get(name)
            # of steps there is "epochs", of other settings "lr_warm_up_epochs" and the like
            epochs = recipe.get("epochs" if name == "steps" else f"{name}_epochs")
            if epochs is not None:
                value = self._epochs(epochs)
        return getattr(self.info, name, None) if value is None else value

    def _epochs(self, count: int) -> int:
        """Return the number of steps in epochs of the whole data set."""
        return -(-count * self.info.epoch // (self.setting("batch_size") * self.nproc))

    def setting(self, name: Literal["steps", "batch_size", "hidden", "vocab"]) -> int:
        """Return a setting, or the default of recipe and workload where it is not set.

        Parameters
        ----------
        name : {"steps", "batch_size", "hidden", "vocab"}
            Name of the setting.

        Returns
        -------
        int
            Value that the run uses.
        """
        return int(self._chosen(name))

    @property
    def initial_learning_rate(self) -> float:
        """The learning rate the run starts with, of a recipe that scales it as many samples take part in a step."""
        rate = float(self._chosen("learning_rate"))
        # a rate that is given is taken as it is
        if self.learning_rate is None and self.optimizer is None and "rate_per" in self._recipe:
            rate *= self.setting("batch_size") * self.nproc / self._recipe["rate_per"]
        return rate

    @property
    def decays_vectors(self) -> bool:
        """Whether weight decay applies to parameters of fewer than two dimensions, too."""
        return self._recipe.get("decay_vectors", True)  # type: ignore[no-any-return]

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name in ``torch.optim``."""
        return self.info.optimizer if self.optimizer is None else family(self.optimizer)

    @property
    def decay(self) -> LearningRates:
        """How the learning rate falls in this run."""
        return self._chosen("lr_schedule")  # type: ignore[no-any-return]

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step.

        ``"constant"`` stays as it is; ``"step"`` is divided by 10 at one half and at three quarters of the run (rounded
        down, but never in the first step), as in He et al. (2016); ``"thirds"`` is divided by 10 at each third, and
        once more at eight ninths, as in Gross and Wilber (2016) for ImageNet; ``"milestones"`` at the recipe's;
        ``"cosine"`` and ``"linear"`` fall to 0 at the end; ``"annealed"`` is divided by 1.01 in each of 150 parts of
        the run, as DeepSpeech is trained. In the first :attr:`lr_warm_up` steps it rises to this from near 0.

        Parameters
        ----------
        step : int
            Number of the step.

        Returns
        -------
        float
            Learning rate.
        """
        steps = self.setting("steps")
        factor: float = {
            "constant": 1.0,
            # rounded down, but never the first step
            "step": 0.1 ** sum(step >= max(1, part * steps // 4) for part in (2, 3)),
            # in ninths, as whole numbers: exact for any number of steps
            "thirds": 0.1 ** sum(9 * step >= part * steps for part in (3, 6, 8)),
            "milestones": 0.1 ** sum(step >= m * steps for m in self._recipe.get("milestones", ())),
            "cosine": (1 + math.cos(math.pi * step / steps)) / 2,
            "linear": 1 - step / steps,
            "annealed": 1.01 ** -(150 * step // steps),
        }[self.decay]
        # step + 1, so that the first step has a rate above zero
        rise = min(1.0, (step + 1) / max(1, int(self._chosen("lr_warm_up"))))
        return self.initial_learning_rate * rise * factor

    @property
    def whole_system(self) -> System | None:
        """The system with momentum, clipping and warm-up of its own that the compressor's name is, if any."""
        from gradstats.hooks.systems import SYSTEMS

        return SYSTEMS.get(self.compressor)

    def training(self) -> Training:
        """Return momentum, clipping and warm-up as they are in this run, every default filled in."""
        system = self.whole_system
        momentum = self.momentum
        if momentum is None:
            momentum = _SYSTEM_MOMENTUM if system else self._chosen("momentum")
        nesterov = self.nesterov
        if nesterov is None:
            # the published form needs a momentum, which may be switched off
            published = system and system.nesterov and momentum > 0
            nesterov = "dgc" if published else self._chosen("nesterov") or "none"
        warm_up = self._chosen("warm_up")
        if warm_up is None:
            warm_up = self.setting("steps") // _SYSTEM_WARM_UP if system else 0
        return Training(
            momentum=momentum,
            nesterov=None if nesterov == "none" else nesterov,
            weight_decay=self._chosen("weight_decay") or 0.0,
            # 0 switches clipping off
            clip=self._chosen("clip") or None,
            # what AdamCorrection sends are steps, which no norm bounds
            clip_kind=self.clip_kind or ("local" if system or self.adam_correction else "averaged"),
            warm_up=warm_up,
        )

    @property
    def outer_rate(self) -> float:
        """The learning rate of the outer optimizer."""
        published = 0.7 if self.outer == "diloco" else 1.0
        return published if self.outer_learning_rate is None else self.outer_learning_rate

    @property
    def schedule(self) -> Schedule:
        """The steps to capture; with local steps, the exchanges."""
        return at(self.at) if self.at else every(self.every)

    def check(self) -> None:
        """Check the settings here, where an error is one line, and not in every worker.

        Raises
        ------
        InputError
            If a setting has a wrong value, or the data folder lacks the files.
        """
        # here, because names and defaults are to load without torch
        from gradstats.compressors import COMPRESSORS, RULE, make_compressor
        from gradstats.hooks.systems import make_state
        from gradstats.primitives.ratio import check_ratio

        info = self.info
        if self.recipe not in get_args(Recipe):
            raise InputError(
                f"recipe must be one of {', '.join(get_args(Recipe))}, not {self.recipe!r}"
            )
        if self.recipe == "paper" and not info.recipe:
            raise InputError(f"no paper trains {self.workload}: leave the recipe out")
        if self.recipe == "program" and not info.program:
            raise InputError(f"no authors' program of {self.workload} is known: use recipe paper")
        if self.compressor in (*BASELINES, NO_EXCHANGE):
            check_ratio(self.ratio)
            if not {"indices", "values"}.isdisjoint(self.options):
                raise InputError(f"{self.compressor} has no codec: leave indices and values out")
        elif self.compressor not in COMPRESSORS and not self.compressor.startswith(RULE):
            raise unknown("compressor", self.compressor, (*COMPRESSORS, *BASELINES))
        elif self.whole_system:
            if not self.error_feedback:
                raise InputError(
                    f"{self.compressor} is a whole system and has a memory: use {RULE}{self.compressor.split('-')[0]} "
                    "for its rule alone"
                )
            # made to be thrown away: the constructor checks ratio and options
            make_state(self.compressor, self.ratio, (), compressor_options=dict(self.options))
        else:
            make_compressor(self.compressor, self.ratio, **self.options)
        self._check_optimizer()
        if self.decay == "milestones" and "milestones" not in self._recipe:
            raise InputError(
                "milestones are those of a recipe: use recipe program, or lr_schedule step"
            )
        self._check_training()
        self._check_parallel()
        self._check_kinds()
        self._check_local_steps()
        self._check_adam_correction()
        self._check_checkpoint()
        if self.nproc < 1:
            raise InputError(f"nproc must be at least 1, not {self.nproc}")
        for name in ("steps", "batch_size"):
            if self.setting(name) < 1:
                raise InputError(f"{name} must be at least 1, not {self.setting(name)}")
        if beyond := set(self.ranks or ()) - set(range(self.nproc)):
            raise InputError(
                f"there is no rank {min(beyond)} among {self.nproc}, which are counted from 0"
            )
        if self.at and max(self.at) >= self.setting("steps"):
            raise InputError(
                f"there is no step {max(self.at)} among {self.setting('steps')}, counted from 0"
            )
        # 0 in the workload means that it has no such setting
        for name in ("hidden", "vocab"):
            if getattr(self, name) is not None and not getattr(info, name):
                raise InputError(f"{self.workload} has no {name}: leave it out")
        if any(getattr(info, name) and self.setting(name) < 2 for name in ("hidden", "vocab")):
            raise InputError("hidden and vocab must be at least 2")
        if self.size is not None and (not info.size or self.size not in get_args(Size)):
            sizes = f"has the sizes {', '.join(get_args(Size))}" if info.size else "has one size"
            raise InputError(f"{self.workload} {sizes}, not {self.size!r}")
        if self.autocast and not info.size:
            raise InputError(f"{self.workload} does not compute in bfloat16: leave autocast out")
        if self.out is not None:
            _ = self.schedule  # raises for a negative step, or `every` below 1
        if info.files:
            if self.data_dir is None:
                raise InputError(
                    f"{self.workload} reads {info.files[0]}, …: name their folder with --data-dir"
                )
            # one is enough: CIFAR-10 may be there in part
            if not any((self.data_dir / name).exists() for name in info.files):
                raise InputError(f"{self.data_dir} holds none of {', '.join(info.files)}")

    def _check_optimizer(self) -> None:
        if self.optimizer is not None and self.optimizer not in get_args(OptimizerName):
            raise unknown("optimizer", self.optimizer, get_args(OptimizerName))
        if self.optimizer == "muon" and self.parallel != "ddp":
            raise InputError("muon needs whole matrices: use parallel=ddp")

    def _check_kinds(self) -> None:
        from gradstats.trace.format import KINDS, OF_PARAMETERS

        for kind in self.kinds or ():
            if kind not in KINDS:
                raise unknown("kind", kind, KINDS)
            # asked for, and not there
            if (kind == "pseudogradient") > bool(self.local_steps):
                raise InputError("kind pseudogradient is of local steps: give local_steps too")
            if kind in OF_PARAMETERS and self.local_steps:
                raise InputError(
                    f"kind {kind} is of every step, and with local steps exchanges are captured: take pseudogradient"
                )
            if kind == "local" and (self.parallel == "ddp" or self.local_steps):
                raise InputError(
                    "kind local is of sharded models: under ddp each rank's gradient is kind gradient"
                )

    def _check_training(self) -> None:
        from gradstats.compressors import RULE
        from gradstats.primitives.ratio import check_count, check_number, shown

        training = self.training()
        check_number(training.momentum, "momentum", 0, 1, "[)")
        check_number(training.weight_decay, "weight_decay", 0, math.inf, "[)")
        if self.clip is not None:
            check_number(self.clip, "clip", 0, math.inf, "[)")
        check_count(training.warm_up, "warm_up", 0)
        check_count(self._chosen("lr_warm_up"), "lr_warm_up", 0)
        for name, known in (
            ("nesterov", get_args(NesterovForm)),
            ("clip_kind", get_args(ClipKind)),
            ("lr_schedule", get_args(LearningRates)),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
        if not self.whole_system and training.nesterov == "redsync":
            raise InputError(
                "the optimizer has no Nesterov's momentum as in RedSync: use nesterov=dgc, or a system such as redsync"
            )
        if training.nesterov and not training.momentum:
            raise InputError("Nesterov's momentum needs a momentum: set it, or leave nesterov out")
        # the first of the baselines, torch-topk, runs in this project's hook, which can
        if self.clip_kind == "local" and self.compressor in (DENSE, NO_EXCHANGE, *BASELINES[1:]):
            raise InputError(f"{self.compressor} cannot clip locally: use clip_kind=averaged")
        if training.warm_up and self.compressor in BASELINES[1:]:
            raise InputError(f"{self.compressor} has no warm-up here: leave it out")
        if self.optimizer_name != "SGD" and (self.whole_system or training.momentum):
            raise InputError(
                f"{self.workload} trains with {self.optimizer_name}, without momentum: leave it out, and of systems "
                f"with a momentum of their own use the rule, such as {RULE}dgc"
            )

    def _check_adam_correction(self) -> None:
        from gradstats.compressors import COMPRESSORS, RULE

        if not self.adam_correction:
            return
        if self.optimizer_name != "AdamW":
            raise InputError(
                f"adam_correction takes the place of AdamW, and {self.workload} trains with {self.optimizer_name}: use "
                "optimizer=adamw"
            )
        # torch's own hooks and FSDP have no memory that could be another, and local steps keep their optimizer
        ours = self.compressor in COMPRESSORS and COMPRESSORS[self.compressor].feedback
        able = self.compressor.startswith(RULE) or (ours and self.compressor != DENSE)
        if not able or self.parallel != "ddp" or self.local_steps:
            raise InputError(
                "adam_correction needs a compressor with error feedback, such as topk, parallel=ddp and no local steps"
            )
        if not self.error_feedback or self.clip_kind == "averaged":
            raise InputError(
                "adam_correction has a memory of its own, and clips each rank's gradient: leave error_feedback and "
                "clip_kind out"
            )

    def _check_local_steps(self) -> None:
        from gradstats.compressors.sparse import check_average
        from gradstats.hooks.local_steps import check_room
        from gradstats.primitives.ratio import check_count, check_number

        check_count(self.local_steps, "local_steps", 0)
        check_average(self.average)
        if self.outer not in get_args(Outer):
            raise InputError(
                f"outer must be one of {', '.join(get_args(Outer))}, not {self.outer!r}"
            )
        if self.outer_learning_rate is not None:
            check_number(self.outer_learning_rate, "outer_learning_rate", 0, math.inf)
        check_room(self.local_steps, self.fragments, self.delay)
        if not self.local_steps:
            changes = {
                "outer": self.outer != "diloco",
                "outer_learning_rate": self.outer_learning_rate is not None,
                "fragments": self.fragments > 1,
                "delay": self.delay > 0,
                "average": self.average != "ranks",
            }
            if any(changes.values()):
                raise InputError(
                    f"{next(k for k, v in changes.items() if v)} is of local steps: give --local-steps too"
                )
        elif self.whole_system or self.compressor in (NO_EXCHANGE, *BASELINES):
            raise InputError(
                f"{self.compressor} does not go with local steps: use none, or a compressor"
            )

    def _check_checkpoint(self) -> None:
        from gradstats.primitives.ratio import check_count

        check_count(self.checkpoint_every, "checkpoint_every", 1)
        if self.checkpoint is None:
            return
        if self.parallel != "ddp" or self.local_steps:
            raise InputError("only ddp without local steps is resumed: leave checkpoint out")
        if self.compressor in (NO_EXCHANGE, *BASELINES[1:]):
            raise InputError(f"{self.compressor} is not resumed: leave checkpoint out")

    def _check_parallel(self) -> None:
        if self.parallel not in get_args(Parallel):
            raise InputError(
                f"parallel must be one of {', '.join(get_args(Parallel))}, not {self.parallel!r}"
            )
        if self.parallel == "ddp":
            return
        if self.local_steps and self.parallel == "fsdp":
            raise InputError(
                "fsdp is one replica, which has nobody to exchange local steps with: use parallel=hsdp"
            )
        # two replicas of at least two shards
        if self.parallel == "hsdp" and (self.nproc < 4 or self.nproc % 2):
            raise InputError(
                f"hsdp shards each of two replicas: give an even nproc, at least 4, not {self.nproc}"
            )
        if self.parallel == "fsdp" and self.compressor != DENSE:
            raise InputError(
                f"fsdp exchanges no whole gradients to compress: use compressor={DENSE}, or parallel=hsdp, which "
                "compresses between replicas"
            )
        if self.whole_system or self.compressor in (NO_EXCHANGE, *BASELINES[1:]):
            raise InputError(f"{self.compressor} is for ddp alone: take another compressor")
        for name in ("diagnose_every", "bucket_mb"):
            if getattr(self, name):
                raise InputError(f"{name} is for ddp alone: leave it out")
        training = self.training()
        if training.clip and training.clip_kind == "local":
            raise InputError("a sharded gradient cannot be clipped locally: use clip_kind=averaged")

    def metadata(self) -> dict[str, Any]:
        """Return the settings as JSON values, for the trace.

        Returns
        -------
        dict
            Settings that describe the run to a reader of its trace.
        """
        info, training = self.info, self.training()
        # it has a compressor of its own, whatever `compressor` says
        sparseloco = self.local_steps > 0 and self.outer == "sparseloco"
        dense = self.compressor == DENSE and not sparseloco
        return {
            "workload": self.workload,
            "model": info.name.split("-")[0],
            "data": info.name.split("-")[1],
            "optimizer": {
                "name": self.optimizer_name,
                "learning_rate": self.initial_learning_rate,
                "lr_schedule": self.decay,
                **({"lr_warm_up": rise} if (rise := self._chosen("lr_warm_up")) else {}),
                **({} if self.decays_vectors else {"decay_vectors": False}),
                **{
                    k: v
                    for k, v in asdict(training).items()
                    # zeros are what a trace without the entry means
                    if v and (k != "clip_kind" or training.clip)
                },
            },
            **({"parallel": self.parallel} if self.parallel != "ddp" else {}),
            "compressor": "sparseloco" if sparseloco else self.compressor,
            # SparseLoCo sends 64 elements of each chunk of 4,096
            "ratio": 64 / 4096 if sparseloco else 1.0 if dense else self.ratio,
            **(
                {
                    "local_steps": {
                        "steps": self.local_steps,
                        "outer": self.outer,
                        "outer_learning_rate": self.outer_rate,
                        "fragments": self.fragments,
                        "delay": self.delay,
                        "average": self.average,
                    }
                }
                if self.local_steps
                else {}
            ),
            **({"options": dict(self.options)} if self.options else {}),
            "error_feedback": self.error_feedback and not dense,
            **({"adam_correction": True} if self.adam_correction else {}),
            "seed": self.seed,
            "steps": self.setting("steps"),
            "batch_size": self.setting("batch_size"),
            **{k: self.setting(k) for k in ("hidden", "vocab") if getattr(info, k)},
            **({"size": self.size or info.size, "autocast": self.autocast} if info.size else {}),
        }

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with some settings changed.

        Parameters
        ----------
        **changes : object
            New values by name.

        Returns
        -------
        RunConfig
            The copy; it has not been checked.
        """
        return RunConfig(**{**asdict(self), **changes})


@dataclass(frozen=True, slots=True)
class Training:
    """Momentum, clipping and warm-up of a run.

    Attributes
    ----------
    momentum : float
        Momentum m.
    nesterov : {"dgc", "redsync"} or None
        Form of Nesterov's momentum; None for momentum SGD.
    weight_decay : float
        Multiple of the parameter that is added to its gradient.
    clip : float or None
        Largest norm of the gradient; None for no clipping.
    clip_kind : {"local", "averaged"}
        What is clipped.
    warm_up : int
        Number of steps in the beginning that send more.
    """

    momentum: float
    nesterov: Nesterov | None
    weight_decay: float
    clip: float | None
    clip_kind: ClipKind
    warm_up: int


# Size: all that a run leaves behind besides its trace, measured or counted.
@dataclass(slots=True)
class RunResult:
    """Result of a run, as rank 0 saw it.

    Attributes
    ----------
    losses : list of float
        Training loss of the rank at every step.
    seconds : list of float
        Wall-clock seconds of every step, gradient exchange included.
    records : list of dict
        Fields of :class:`gradstats.hooks.StepRecord` at every step; empty if the hook keeps no records,
        as PyTorch's hooks do.
    accuracy : float
        Share of the unseen samples that the final model gets right; NaN where there are none.
    perplexity : float
        Perplexity of the final model on unseen text; NaN where there is none.
    word_error_rate : float
        Word error rate of the final model on unseen utterances; NaN where there are none.
    character_error_rate : float
        Character error rate of the final model on unseen utterances; NaN where there are none.
    timeline : list of dict
        Fields of :class:`gradstats.compressors.layerwise.Activity`, for the last step of a layer-wise compressor.
    evaluations : list of dict
        ``step``, the number of steps made, and the measures on unseen data after them, at every checkpoint.
    diagnoses : list of dict
        ``step``, ``residual_norm``, ``matching_rate`` and ``delta`` (a float for each layer) of
        :class:`gradstats.hooks.Diagnosis`, for every step diagnosed.
    numel : int
        Number of trainable parameters of the model.
    checksum : float
        Sum of the final parameters in float64, to compare runs bit by bit.
    trace : str
        Trace that the run is captured in, which may have got a number; that of its last part for a resumed run. Empty
        if there is none.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float = float("nan")
    perplexity: float = float("nan")
    word_error_rate: float = float("nan")
    character_error_rate: float = float("nan")
    timeline: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    diagnoses: list[dict[str, Any]] = field(default_factory=list)
    numel: int = 0
    checksum: float = 0.0
    trace: str = ""
