"""Statistics of the gradient while training goes on, as a flat dict of floats for any logger."""

# Size: a third of its lines are docstrings, of every value that a logger is given.

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradstats.collectives.plain import all_reduce
from gradstats.errors import InputError, several, unknown, warn
from gradstats.hooks.applied import Applied
from gradstats.hooks.facts import Facts
from gradstats.hooks.gradient import dense, real_view
from gradstats.hooks.layout import check_patterns, matching, warn_of_idle
from gradstats.hooks.meeting import meet
from gradstats.hooks.noise import NOISE_NAMES, MicroBatches
from gradstats.hooks.optimizers import (
    GoneOptimizer,
    SteppedGradients,
    TakenGradients,
    after_closure,
    after_steps,
    before_steps,
)
from gradstats.hooks.spikes import FEWEST, LIMIT, WINDOW, Spikes, Trigger
from gradstats.hooks.step import Scaler, loss_scale
from gradstats.hooks.torch_private import (
    calling_scaler,
    has_unscaled,
    innermost_optimizer,
    unwrap,
)
from gradstats.hooks.units import shard_groups
from gradstats.hooks.updates import UPDATE_NAMES, StepUpdates
from gradstats.primitives import Moments, moments
from gradstats.primitives.ratio import check_count, check_number
from gradstats.primitives.sketch import Sketch, merge, sketch
from gradstats.statistics.compressibility import compressibility
from gradstats.statistics.pot.peaks import stability_at
from gradstats.tables import format_value, visible

__all__ = ["Log", "Monitor"]

Log: TypeAlias = Callable[[dict[str, float]], object]

_BITS = 7
"""Mantissa bits of the histograms: cells half a percent wide, as traces store them."""

_TAIL = 0.1
"""Share of the non-zero elements whose excesses give ξ."""

_SMALLEST_NORMAL = 2.0**-14
"""Smallest number that float16 holds with all its bits."""

_ADVICE = "make the Monitor on every rank, not under `if rank == 0`; rank 0 alone logs"

_COUNTS = ("numel", "count", "zeros", "nonfinite")
_SUMS = (*_COUNTS, "sum_abs", "sum_squares", "sum_log")


# Size: 163 lines are docstrings; its attributes are options, what users read, and four parts that measure.
class Monitor(Facts):
    """Describe the gradient of a training, as the optimizer is about to use it, once per optimizer step.

    With `optimizer` the monitor hooks into ``optimizer.step()``, and there is nothing more to call. Otherwise call
    :meth:`step` after the backward pass and before ``optimizer.step()``. The gradient is the one in ``.grad``: summed
    over the micro-batches of an accumulation, averaged over the ranks (or what a compressor left) under DDP, and
    without the loss scale of a ``GradScaler``. Of parameters that are sharded as DTensors (FSDP2, tensor parallel) each
    rank reads its shard, and the sums are added up over the shards: every rank that has shards must make one, for which
    the others wait, and take the step.

    Parameters
    ----------
    model : torch.nn.Module
        Module whose gradients are described, wrapped in DDP or not.
    log : callable, optional
        Called on rank 0 with the dict of every step described: ``print``, ``wandb.log``, ``trackio.log``, or a function
        of your own.
    every : int
        Distance of the steps described, at least 1.
    optimizer : torch.optim.Optimizer, optional
        Optimizer to hook into, also as accelerate or Lightning wraps it. Of ``optimizer.step(closure)`` the gradient
        described is the one that the closure computes first. Steps that a ``GradScaler`` skips never reach it: call
        :meth:`step` before ``scaler.step()`` instead where you want to see them. Another optimizer is not followed:
        a backward pass after this one is gone warns.
    updates : bool
        Whether, with `optimizer`, to describe what its steps do to the parameters. It takes one more copy of the
        parameters during steps that are described.
    noise : bool or int
        Whether to compare the micro-batches that are accumulated for one optimizer step; a number says how many samples
        each of them has, which the noise scale is then in.
    scaler : Scaler, optional
        ``torch.amp.GradScaler`` of the training, for calls of :meth:`step` by hand, and for `noise`: without it
        steps of a larger loss scale count for more.
    state : object, optional
        State of the DDP hook, such as :class:`gradstats.hooks.CompressionState`: its last record gives k̂/k, and its
        residual a norm.
    parameters : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters to describe; all if None.
    per_layer : bool
        Whether the dict has the norm of every parameter, too.
    window : int
        Number of steps described before, at least 10, whose norms tell a spike, and whose micro-batches the noise.
    spike : float
        Smallest robust z from which on a norm is said to spike or to collapse.
    trigger : mapping of str to float, optional
        Values from which on :meth:`triggered` asks for a capture, by name without the prefix; a name
        stands for the layers' values, too. By default ``spike`` and ``collapse`` at `spike`, ``growth`` at 2, and
        ``nonfinite`` at 1.
    following : int
        Number of steps that a trigger asks for.
    start_step : int
        Number of the first step, for a resumed run.
    prefix : str
        Beginning of the names in the dict.

    Attributes
    ----------
    values : dict of str to float
        What the last step described gave; empty before the first.
    blame : str or None
        Parameter to blame for what is odd in that step: the last one in the order of the model whose gradient is not
        finite, or of those that spike, collapse or grow (of all, where only the whole does) the one whose squared norm
        changed most. None if nothing is odd.

    Raises
    ------
    InputError
        If an option has a wrong value, no parameter matches `parameters`, or `optimizer` has no hooks; of a sharded
        model also if some rank makes no monitor before the group's timeout.

    Notes
    -----
    Names, all beginning with `prefix`:

    ``step``
        Number of the step.
    ``norm``, ``mean``, ``max``
        Euclidean norm; mean and maximum of the magnitudes that are not zero.
    ``xi``, ``p``
        Shape of the generalized Pareto tail of the largest tenth, by probability-weighted moments; exponent of the
        power-law decay, as :func:`gradstats.compressibility` has it. Absent where there are too few elements.
    ``zeros``, ``underflow``
        Share of exact zeros; share of the other elements that float16 at the present loss scale would round to zero or
        hold with fewer bits (below 2⁻¹⁴ ÷ scale).
    ``nonfinite``
        Number of NaN and infinities, which the other numbers leave out.
    ``quality``, ``residual_norm``
        k̂/k of this rank's last step and norm of its residual, with `state`.
    ``spike``, ``spike/LAYER``
        Robust z of the logarithm of the norm: distance from the median of the window ÷ 1.4826 MAD, from ten steps on;
        of single parameters where it is an alarm. With five parameters or more the norm of each is divided by the
        median of the others' before, which takes out what moves all.
    ``collapse``, ``collapse/LAYER``
        The same, below the median, where it is an alarm.
    ``growth``, ``growth/LAYER``
        Factor, at least 2, by which the norm grew from the first to the last third of a full window, where it is an
        alarm.
    ``norm/LAYER``
        Norm of every parameter, with `per_layer`.
    ``update_norm``, ``update_to_weight``
        Norm of what the optimizer's step took off the parameters (before − after), and the same ÷ the norm of the
        parameters before; with `per_layer` also ``update_to_weight/LAYER``. These four with `optimizer` alone, unless
        `updates` is False.
    ``update_cosine``
        Cosine of that and the gradient in ``.grad`` after the step: 1 for plain SGD.
    ``unchanged_bf16``
        Share of the parameters' elements that are the same after the step as before it once both are rounded to
        bfloat16: what a training without float32 weights would have lost, and a delta in bfloat16 need not send.

    ``noise_scale``, ``micro_cosine``, ``noise_xi``
        With `noise`, of this process's micro-batches in the last `window` steps described. The gradient noise scale tr
        Σ ÷ ‖G‖² of McCandlish et al. (2018), which estimates the critical batch size, as the ratio of the means over
        the steps of both parts without bias, in micro-batches or their samples; the cosine of two micro-batches, ‖G‖² ÷
        (‖G‖² + tr Σ) of such means; and the shape ξ of the tail of the noise, from the difference of the first two
        micro-batches: 1/ξ is the tail index. Each has ``_low`` and ``_high``, the ends of a 95 % interval from 20 steps
        on, of blocks of steps, for the first two computed anew at every fifth step. They take the micro-batches as
        drawn independently, and the gradient as the same within the window.

    The norm, the mean and the counts are exact; ξ, p and the share of underflow come from a histogram with cells half a
    percent wide. An alarm is a z from `spike` on that chance alone, judged by the z of all steps so far, would hardly
    reach in 1,000 steps. It is also further out than any before on its side, alarms and the last ten steps left out: by
    a factor up to 4.5, the larger the heavier the tail seems. A spike of the whole that is no alarm triggers nothing;
    one that a single layer makes is an alarm only if the layer's is. Windows shorter than 20 steps give none. A norm of
    exactly zero is no collapse, but in ``zeros``. A step described reads every element twice, as a sketch of every
    parameter; other steps cost nothing. On a device other than the CPU the elements stay there, and the host waits a
    few times for every parameter. Sharded parameters add an all-reduce of eight numbers per parameter, and one of 256
    kB. Parameters without a gradient are left out; where an optimizer in the backward pass has taken it, one warning
    names them, at the first step described. Where none has one, the dict has the number of the step alone. A monitor is
    not checkpointed: after a resume the window fills anew. With `noise` every micro-batch of a step described is read
    three times, as it is accumulated, and no copy of it is kept; under DDP accumulate under ``no_sync()``, for each
    rank's own sums.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(100, 10)
    >>> monitor = Monitor(model)
    >>> model(torch.ones(1, 100)).sum().backward()
    >>> values = monitor.step()
    >>> round(values["gradient/norm"], 3), values["gradient/zeros"], monitor.blame
    (31.78, 0.0, None)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        log: Log | None = None,
        every: int = 1,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        updates: bool = True,
        noise: bool | int = False,
        scaler: Scaler | None = None,
        state: Any = None,
        parameters: Sequence[str] | None = None,
        per_layer: bool = False,
        window: int = WINDOW,
        spike: float = LIMIT,
        trigger: Mapping[str, float] | None = None,
        following: int = 10,
        start_step: int = 0,
        prefix: str = "gradient/",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"a monitor watches a torch.nn.Module, not {type(model).__name__}")
        self._log, self._every = log, check_count(every, "every")
        self._scaler, self._state = scaler, state
        self._per_layer, self._prefix = per_layer, prefix
        spike = check_number(spike, "spike", 0, math.inf)
        usual = {"spike": spike, "collapse": spike, "growth": 2.0, "nonfinite": 1.0}
        limits = usual if trigger is None else dict(trigger)
        for name in limits:
            if name not in _NAMES:
                raise unknown("quantity of a monitor", name, _NAMES)
        limits = {
            name: check_number(x, f"trigger {name!r}", 0, math.inf, "[)")
            for name, x in limits.items()
        }
        self._trigger = Trigger(limits, check_count(following, "following"))
        self._next = check_count(start_step, "start_step", 0)
        # names without the wrappers' prefixes, as state_dict() of the model has them
        inner: torch.nn.Module = unwrap(model).module
        patterns = ["*"] if parameters is None else check_patterns(parameters, "parameters")
        watched = matching(patterns)
        named = [(name, p) for name, p in inner.named_parameters() if watched(name)]
        self._layers = [each for each in named if each[1].requires_grad]
        self._frozen = [each for each in named if not each[1].requires_grad]
        if not self._layers:
            raise InputError("no trainable parameter to watch; look at the patterns in parameters=")
        warn_of_idle(patterns, [n for n, _ in inner.named_parameters()], "parameters", "watches")
        self._meet()  # before anything is hooked
        self._taken = TakenGradients(self._layers)
        self._spikes = Spikes(dict(self._layers), check_count(window, "window", FEWEST), spike)
        self._noise: MicroBatches | None = None
        if noise is not False:
            samples = 1 if noise is True else check_count(noise, "noise")
            self._noise = MicroBatches(self._layers, samples, window)
            # before the first backward pass, as its micro-batches belong to the first step
            self._noise.begin(not self._next % self._every)
        self.values: dict[str, float] = {}
        self.blame: str | None = None
        self._handles: list[Any] = []
        self._updates = StepUpdates(self._layers)
        self._used: SteppedGradients | None = None
        if scaler is not None and optimizer is None:
            self._used = SteppedGradients([p for _, p in self._layers])
            self._applied = Applied(self._used.note)
            self._applied.watch(p for _, p in self._layers)
        if optimizer is not None:
            self._handles.append(before_steps(optimizer, partial(self._before, bool(updates))))
            self._warn_of_another(innermost_optimizer(optimizer))
            self._handles.append(after_steps(optimizer, self._after))
            self._handles.append(GoneOptimizer(optimizer, self._layers, self))

    def _meet(self) -> None:
        """Wait for the ranks that have other shards: the sums of a step are exchanged with them."""
        for groups in dict.fromkeys(_local(parameter)[0] for _, parameter in self._layers):
            for group in groups:
                meet("Monitor of a sharded model", _ADVICE, group)

    def _warn_of_another(self, optimizer: object) -> None:
        """Warn of a monitor that logs the same names already, as of a cell that is run again."""
        others = _followed.setdefault(optimizer, weakref.WeakSet())
        names = dict(self._layers).keys()
        if any(
            each._handles and each._prefix == self._prefix and names & dict(each._layers).keys()
            for each in others
        ):
            warn("the optimizer has a monitor already, which goes on logging: close() that one")
        others.add(self)

    def _warn_of_unfrozen(self) -> None:
        """Warn, once, of parameters that are trained and not watched."""
        trained = [name for name, p in self._frozen if p.requires_grad]
        if trained:
            self._frozen = []
            warn(
                f"a monitor does not watch {several(trained)}, frozen when it was made and trained now: make another"
            )

    def _facts(self) -> dict[str, str]:
        shown = ("step", "norm", "xi", "zeros", "quality", "spike")
        values = {n: self.values.get(self._prefix + n) for n in shown}
        texts = [
            f"{n} {value:.0f}"
            if n == "step"
            else f"{'ξ' if n == 'xi' else n} {format_value(value)}"
            for n, value in values.items()
            if value is not None
        ]
        return {
            "parameters": str(len(self._layers)),
            "every": str(self._every),
            "called": "by the optimizer" if self._handles else "by step()",
            "next step": str(self._next),
            "last described": ", ".join(texts) or "none yet",
            **({"blame": self.blame} if self.blame is not None else {}),
        }

    def step(self) -> dict[str, float]:
        """Describe the gradient of the step that is about to end, if it is one of every `every`.

        Call it once per optimizer step, after the backward pass (of the last micro-batch) and before
        ``optimizer.step()``; with a scaler before or after ``scaler.unscale_()``, and before ``scaler.step()``.

        Returns
        -------
        dict of str to float
            :attr:`values` if the step was described, else an empty dict.

        Raises
        ------
        InputError
            If the loss scaler has taken its step, and its scale off the gradients, already.
        """
        # after scaler.update() its stages say nothing of that any more
        stepped = self._used is not None and self._used.stand() and self._applied.scaled
        if stepped and not has_unscaled(self._scaler):
            raise InputError(
                "the scaler has unscaled the gradients: call monitor.step() before scaler.step()"
            )
        return self._take(self._scales)

    def close(self) -> None:
        """Unhook the optimizer. Calling it twice does no harm."""
        self._taken.stop()
        if self._used is not None:
            self._applied.forget()
            self._used.forget()
        if self._noise is not None:
            self._noise.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def triggered(self, step: int) -> bool:
        """Tell whether a step is one of those that a trigger asks for: ``Capture(…, schedule=monitor.triggered)``.

        Parameters
        ----------
        step : int
            Number of a step, as the capture counts. The first one asked about after the trigger is the first captured.

        Returns
        -------
        bool
            True for `following` steps.
        """
        return self._trigger.asks_for(step)

    def _before(
        self, updates: bool, optimizer: torch.optim.Optimizer, arguments: Any, options: Any
    ) -> tuple[Any, Any] | None:
        """Take the step that the optimizer begins. Fused optimizers unscale by themselves."""
        self._updates.forget()
        if updates and not self._next % self._every:
            self._updates.before()
        # GradScaler puts it on a fused optimizer, which gets gradients with the scale still on
        scale = getattr(optimizer, "grad_scale", None)

        def scales() -> tuple[float, float]:
            if scale is not None:
                return float(scale), float(scale)
            # asked for in a described step alone: it looks through the stack
            return 1.0, loss_scale(calling_scaler() if self._scaler is None else self._scaler)

        return after_closure(arguments, options, partial(self._take, scales))

    def _after(self, *_: object) -> None:
        """Add what the optimizer's step has done."""
        if not self._updates.waiting:
            return
        values, ratios = self._updates.after()
        self._trigger.look_at(
            values | {f"update_to_weight/{name}": ratio for name, ratio in ratios.items()}
        )
        if self._per_layer:
            values |= {f"update_to_weight/{visible(n)}": ratio for n, ratio in ratios.items()}
        self.values |= {self._prefix + name: value for name, value in values.items()}
        self._logged()

    def _scales(self) -> tuple[float, float]:
        """Return the scale that the gradients have now, which the scaler may have taken off, and the loss scale."""
        present = loss_scale(self._scaler)
        return 1.0 if has_unscaled(self._scaler) else present, present

    def _take(self, scales: Callable[[], tuple[float, float]]) -> dict[str, float]:
        """Describe a step; `scales` returns the loss scale that gradients have now, and that of the backward passes."""
        number = self._next
        # first: what raises below must not shift the numbers of later steps
        self._next += 1
        described = not number % self._every
        # on an accelerator each question waits for the device
        scale, present = scales() if described else (1.0, 1.0)
        compared = {} if self._noise is None else self._noise.end(present)
        if self._noise is not None:
            self._noise.begin(not self._next % self._every)
        if not described:
            self._taken.forget()
            return {}
        self._warn_of_unfrozen()
        names, sketches, whole = self._sketched()
        self._taken.warn(bool(names))
        values = {"step": float(number)}
        if not names:  # a norm of nothing would be a number
            self.blame, self.values = None, {self._prefix + "step": float(number)}
            return self._logged()
        values |= _described(whole, scale, present)
        values |= self._compressed() | compared
        norms = {
            name: math.sqrt(s.sum_squares) / scale for name, s in zip(names, sketches, strict=True)
        }
        spikes, self.blame = self._spikes.find(values["norm"], norms)
        bad = [name for name, s in zip(names, sketches, strict=True) if s.nonfinite]
        self.blame = bad[-1] if bad else self.blame
        values |= spikes
        if self._per_layer:
            # names of layers reach terminals and files of others
            values |= {f"norm/{visible(name)}": norms[name] for name in names}
        self._trigger.look_at(values, self._spikes.doubtful)
        self.values = {self._prefix + name: value for name, value in values.items()}
        return self._logged()

    def _logged(self) -> dict[str, float]:
        # one call of the log a step: _after() makes it, when the optimizer's step is over
        if self._updates.waiting:  # the optimizer's step belongs to it
            return self.values
        if self._log is not None and not (dist.is_initialized() and dist.get_rank()):
            self._log(dict(self.values))
        return self.values

    def _sketched(self) -> tuple[list[str], list[Moments], Sketch]:
        """Return the names of the parameters with a gradient, their moments, and the sketch of the whole."""
        plain: list[tuple[str, Sketch]] = []
        shards: dict[Any, list[tuple[str, Sketch | None]]] = {}
        for name, parameter in self._layers:
            groups, local = _local(parameter)
            if not parameter.requires_grad:
                local = None  # frozen since: a gradient that is there is an old one
            # without a gradient here a shard still takes part: the all-reduces below are for all ranks
            one = None if local is None else sketch(local, _BITS)
            if groups:
                shards.setdefault(groups, []).append((name, one))
            elif one is not None:
                plain.append((name, one))
        # merge() needs one, where all parameters are sharded
        parts = [s for _, s in plain] or [sketch(np.empty(0, np.float32), _BITS)]
        layer_moments = {name: s.moments for name, s in plain}
        for groups, some in shards.items():
            totals, whole = _over_shards([s for _, s in some], groups, self._device)
            # no elements on any rank: no gradient
            layer_moments |= {n: m for (n, _), m in zip(some, totals, strict=True) if m.numel}
            parts.append(whole)
        ordered = [name for name, _ in self._layers if name in layer_moments]
        return ordered, [layer_moments[name] for name in ordered], merge(parts)

    @property
    def _device(self) -> torch.device:
        return self._layers[0][1].device

    def _compressed(self) -> dict[str, float]:
        """Return what the hook's state says of its last step."""
        values = {}
        record = getattr(self._state, "last", None)
        if record is not None and not math.isnan(record.quality):
            values["quality"] = record.quality
        if hasattr(self._state, "residual"):
            residuals = (self._state.residual(parameter) for _, parameter in self._layers)
            squares = [
                moments(real_view(r), log=False).sum_squares for r in residuals if r is not None
            ]
            if squares:
                values["residual_norm"] = math.sqrt(sum(squares))
        return values


_followed: weakref.WeakKeyDictionary[object, weakref.WeakSet[Monitor]] = weakref.WeakKeyDictionary()
"""Monitors of each optimizer."""
_NAMES = (
    *("norm", "mean", "max", "xi", "p", "zeros", "underflow", "nonfinite"),
    *("quality", "residual_norm", "spike", "collapse", "growth"),
    *UPDATE_NAMES,
    *NOISE_NAMES,
)
"""Values that can trigger a capture."""


def _described(s: Sketch, scale: float, present: float) -> dict[str, float]:
    """Return the numbers of a whole gradient whose elements are multiplied by `scale`."""
    sums, values = s.moments, {}
    values["norm"] = math.sqrt(sums.sum_squares) / scale
    values["nonfinite"] = float(sums.nonfinite)
    values["zeros"] = sums.zero_fraction
    if not sums.count:
        return values
    m = s.magnitudes
    values["mean"], values["max"] = sums.mean / scale, sums.max / scale
    # below the limit at the scale that is (or, unscaled already, was) on the loss
    limit = _SMALLEST_NORMAL * scale / present
    # a cell cut by the limit counts in part: rounding may leave [0, 1]
    values["underflow"] = min(max(1 - m.exceedances(limit) / m.count, 0.0), 1.0)
    # neither depends on the scale
    values["xi"] = stability_at(m, _TAIL, "pwm").c
    if m.count > 1:
        values["p"] = compressibility(m).p
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _local(parameter: torch.Tensor) -> tuple[tuple[dist.ProcessGroup, ...], torch.Tensor | None]:
    """Return the groups over which a parameter is sharded, and the part of its gradient that this rank has."""
    from torch.distributed.tensor import DTensor, Partial

    gradient = parameter.grad
    groups: tuple[dist.ProcessGroup, ...] = ()
    if isinstance(parameter, DTensor):
        # a gradient need not be placed as its parameter is
        placed = gradient if isinstance(gradient, DTensor) else parameter
        if any(isinstance(p, Partial) for p in placed.placements):
            raise InputError(
                "a gradient is not reduced yet (a partial DTensor): end the backward pass first"
            )
        groups = shard_groups(placed)
    if gradient is None:
        return groups, None
    values = gradient.detach()
    values = values.to_local() if isinstance(values, DTensor) else values
    return groups, real_view(dense(values).resolve_conj())


def _over_shards(
    local: Sequence[Sketch | None], groups: Iterable[dist.ProcessGroup], device: torch.device
) -> tuple[list[Moments], Sketch]:
    """Add up the sketches of some parameters over the ranks that hold their shards."""
    empty = sketch(np.empty(0, np.float32), _BITS)
    sketches = [empty if s is None else s for s in local]
    here = [s.moments for s in sketches]
    whole = merge([s.coarsen(_BITS) for s in sketches])
    # float64 holds counts exactly up to 2⁵³
    sums = torch.tensor(
        [[getattr(m, n) for n in _SUMS] for m in here], dtype=torch.float64, device=device
    )
    largest = torch.tensor([m.max for m in here], dtype=torch.float64, device=device)
    counts = torch.from_numpy(whole.histogram.counts.astype(np.int64)).to(device)
    for group in groups:
        all_reduce(sums, group)
        all_reduce(largest, group, dist.ReduceOp.MAX)
        all_reduce(counts, group)
    totals = []
    for row, most in zip(sums.tolist(), largest.tolist(), strict=True):
        numel, count, zeros, nonfinite = map(int, row[:4])
        total_abs, squares, logs = row[4:]
        totals.append(Moments(numel, count, zeros, nonfinite, total_abs, squares, logs, most))
    every: NDArray[np.int64] = counts.cpu().numpy()
    bins = np.flatnonzero(every)
    total = totals[0]
    for one in totals[1:]:
        total = total + one
    # values: single magnitudes, of this rank alone
    return totals, replace(whole, moments=total, bins=bins, counts=every[bins], values=None)
