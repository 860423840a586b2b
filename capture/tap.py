"""The object a training script talks to: it takes snapshots of gradients and hands them to a background thread."""

# No `from __future__ import annotations` here: DDP reads the annotations of the wrapped hook at run time.

import contextlib
import fnmatch
import platform
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from capture.copies import Copies, Run, Values
from capture.schedule import Schedule, as_schedule
from capture.sharded import Sharding
from capture.states import (
    ObservedState,
    Said,
    name_parameters,
    observe,
    records_steps,
    step_columns,
    unnamed,
)
from capture.watch import BackwardWatch
from capture.writer import BackgroundWriter, Snapshot
from gradstats.errors import GradstatsError, InputError, TraceError, first_line
from gradstats.hooks import LocalSteps, Scaler
from gradstats.hooks.gradient import Pair, logical, pairs_of
from gradstats.hooks.torch_private import (
    GradBucket,
    before_thread_pools_end,
    comm_hooks,
    other_micro_steps,
    scaler_stages,
    unwrap,
)
from gradstats.hooks.units import Unit, is_sharded
from gradstats.primitives.ratio import check_count, shown
from gradstats.trace import KINDS, STORES, Kind, Layer, Store, TraceWriter, create_trace
from gradstats.trace.format import WHOLE

__all__ = ["Capture", "CaptureWarning", "Hook"]

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_PATIENCE_S = 10.0
"""Longest that the collection of a capture that nobody closed waits for the disk."""


class CaptureWarning(UserWarning):
    """Capturing is slower than training, has stopped, or does not see what it should. The training goes on."""


class Capture:
    """Record per-step gradients of a training run, before and after error feedback.

    In a loop without DDP, call :meth:`step` once per iteration after ``backward()``. Under DDP, register the hook
    that :meth:`wrap` returns; it takes a snapshot of what goes into the inner hook, and the step is stored if the
    inner hook succeeds. A background thread writes the snapshots, and sketches them first if asked to. When the
    disk is slower than the training, the training waits, and one warning says so once that is a second and a tenth
    of the time; when a write fails, capturing stops with one warning and the training goes on. A capture that is
    not closed is finished when it is collected as garbage, or when the interpreter exits.

    Parameters
    ----------
    path : str or Path
        Trace to create, ``NAME.zarr``.
    model : torch.nn.Module
        Module whose gradients are captured, wrapped in DDP or not. Give the DDP model where there is one: only then
        can a hook that was registered without :meth:`wrap`, or a misplaced ``no_sync``, be noticed.
    schedule : Schedule, int, iterable of int or callable
        Steps to capture: a :class:`Schedule`, N for every N-th step, a list of steps, or a function that is asked once
        a step, such as :meth:`gradstats.Monitor.triggered`.
    ranks : iterable of int, optional
        Ranks to capture; all if None.
    kinds : sequence of {"gradient", "corrected", "local", "pseudogradient"}, optional
        What to store: the gradient, the gradient plus the hook's memory, and, of a sharded model, this rank's gradient
        before any reduction. If None, the first two where the hook keeps a memory, else the gradient. :meth:`follow`
        adds the pseudo-gradient, and corrected is then of that.
    parameters : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters to capture; all if None.
    store : {"gradients", "sketches"}
        Whether to store the gradients themselves, or in their place a histogram and the moments of every layer, which
        take some kilobytes a step.
    dtype : {"float32", "bfloat16"}
        Type of the stored gradients; ``"bfloat16"`` takes half the space. Sketches are always of the
        float32 values.
    total_steps : int, optional
        Length of the run. If it is known, the trace is laid out once and need not grow.
    metadata : mapping of str to JSON values, optional
        Description of the run, stored with the trace.
    buffers : int
        Largest number of steps on their way from the training to the disk.
    compress : bool
        Whether to compress the stored gradients; sketches always are.
    overwrite : bool
        Whether to replace an existing trace at `path`.
    start_step : int
        Number of the first step, for a resumed run.
    process_group : ProcessGroup, optional
        Group whose ranks are captured. If None, that of the DDP model, else the default group, if there is one.
    scaler : Scaler, optional
        ``torch.amp.GradScaler`` of the training. Gradients are then stored without the loss scale. If None, that of the
        wrapped hook's state, if it has one.

    Attributes
    ----------
    path : Path
        The trace.
    schedule : Schedule
        Steps to capture.
    rank : int
        Rank of this process; 0 without a process group.
    active : bool
        Whether this rank still captures: False if it is not one of `ranks`, after a failed write, and once closed.

    Raises
    ------
    TraceError
        On every rank, if the trace cannot be created.
    InputError
        If no parameter matches `parameters`, an option has a wrong value, or a communication hook is registered on the
        DDP model already.

    Notes
    -----
    A parameter without a gradient (unused in the step) is recorded as zeros. With gradient accumulation under
    ``no_sync`` one step is recorded per synchronised backward pass, holding the accumulated sum. Under DDP without a
    wrapped hook the gradient is the average over the ranks, the same on all of them.

    Elements are in the logical order of their parameters, whatever the memory format, as float32 (or bfloat16), also
    those of float64 models. Of a complex parameter real and imaginary parts are recorded: its shape in the trace has a
    last dimension of 2. Sparse gradients are recorded as dense ones.

    The layout is that of the parameters that require gradients when the capture is made; one that is unfrozen later is
    left out, with a warning.

    Under FSDP2 (``fully_shard``) every rank writes the shards that it holds of the gradient, which is read back whole
    under the first rank of a replica. With :func:`gradstats.hooks.shard_hook` it is the mean over one replica's ranks,
    as it goes into the compressor; else the mean over all ranks, stored once. Of kind ``"local"`` every rank writes all
    elements: the sum over its micro-batches, before the reduce-scatter. Make the capture after ``fully_shard`` and
    ``shard_hook`` or :class:`gradstats.hooks.LocalSteps`, and before the first forward pass.
    """

    def __init__(
        self,
        path: str | Path,
        model: torch.nn.Module,
        schedule: Schedule | int | Iterable[int] | Callable[[int], bool] = 1,
        *,
        ranks: Iterable[int] | None = None,
        kinds: Sequence[Kind] | None = None,
        parameters: Sequence[str] | None = None,
        store: Store = "gradients",
        dtype: Literal["float32", "bfloat16"] = "float32",
        total_steps: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        buffers: int = 2,
        compress: bool = False,
        overwrite: bool = False,
        start_step: int = 0,
        process_group: dist.ProcessGroup | None = None,
        scaler: Scaler | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        if kinds is not None and (isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS)):
            raise InputError(f"kinds must be a list of {', '.join(KINDS)}, not {kinds!r:.100}")
        if store not in STORES:
            raise InputError(f"store must be {' or '.join(STORES)}, not {store}")
        if dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype must be float32 or bfloat16, not {dtype}")
        check_count(buffers, "buffers")
        self.path = Path(path)
        self.schedule = as_schedule(schedule)
        self._model = _module(model)
        ddp = unwrap(model).ddp
        # weakly, for DDP holds the hook, and with it the capture, where no garbage collector sees it
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._layers, self._slots = _layout(self._model, parameters)
        self._parameters = [p for p in self._model.parameters() if id(p) in self._slots]
        self._expected = {id(p) for p in self._model.parameters() if p.requires_grad}
        self._scaler = scaler
        self._kinds: tuple[Kind, ...] | None = tuple(kinds) if kinds is not None else None
        self._store = store
        self._dtype = dtype
        self._buffers = buffers
        self._compress = compress
        self._total_steps = total_steps
        self._next = start_step
        self._current: Snapshot | None = None
        self._copies = Copies()
        self._runs: dict[int, Run] = {}
        self._background: BackgroundWriter | None = None
        self._state: Any = None
        self._hook: Hook | None = None
        self._local: LocalSteps | None = None
        self._told: dict[str, float | torch.Tensor | None] = {}
        self._in_step = False
        self._passed = 0
        self._sent = False
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._said: Said | None = None
        self._scale = 1.0
        self._warned: set[str] = set()
        self._sharding: Sharding | None = None
        self._seen: set[int] = set()
        if process_group is None and ddp is not None:
            process_group = ddp.process_group
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        world_size = dist.get_world_size(process_group) if distributed else 1
        self.active = ranks is None or self.rank in set(ranks)
        if is_sharded(self._model):
            self._shard(ranks, process_group)
        elif self._kinds is not None and "local" in self._kinds:
            raise InputError(
                "kind 'local' is of models sharded by fully_shard(); under DDP wrap a hook, and 'gradient' is each "
                "rank's own"
            )
        self._check_hook()

        def create() -> None:
            attributes = {
                "capture": {
                    "schedule": self.schedule.description,
                    "store": store,
                    "dtype": dtype,
                },
                "versions": _versions(),
                "created": datetime.now(UTC).isoformat(" ", "seconds"),
                "host": platform.node(),
                **(metadata or {}),
            }
            create_trace(
                self.path,
                self._layers,
                world_size=world_size,
                metadata=attributes,
                overwrite=overwrite,
            )

        _create_on_rank_zero(create, self.path, self.rank, process_group, distributed)
        self._watch = BackwardWatch(self._parameters if self.active else ())
        self._closed = False
        _at_exit(weakref.WeakMethod(self.close))

    def _shard(self, ranks: Iterable[int] | None, process_group: dist.ProcessGroup | None) -> None:
        """Find out what this rank holds of a sharded model, and tap its exchanges."""
        sharding = Sharding(self._layers, self._parameters, self._model, process_group, ranks)
        self._sharding, self._state = sharding, sharding.hook
        own = sharding.kinds(self._kinds or _usual_kinds(self._state))
        self.active = bool(own)
        if self._scaler is None and sharding.hook is not None:
            self._scaler = sharding.hook.scaler
        # weakly, for the model holds the taps
        on_exchange, on_reduce = (
            weakref.WeakMethod(self._on_exchange),
            weakref.WeakMethod(self._on_reduce),
        )
        if {"gradient", "corrected"} & set(own):
            sharding.watch(lambda *seen: _call(on_exchange, *seen))
        if "local" in own:
            sharding.tap(lambda *seen: _call(on_reduce, *seen))

    def wrap(self, state: Any, hook: Hook) -> tuple["Capture", Hook]:
        """Wrap a DDP communication hook, so that what goes into it is captured.

        Use as ``ddp_model.register_comm_hook(*capture.wrap(state, hook))``. The inner hook runs unchanged.

        Parameters
        ----------
        state : object
            State of the inner hook; the process group or None for PyTorch's ``allreduce_hook``. It says what
            ``"corrected"`` is: see :class:`capture.states.ObservedState` for states of your own. For a state that keeps
            no memory, corrected equals gradient. A state with a method ``name_parameters`` is told the model's names.
        hook : callable
            Any DDP communication hook.

        Returns
        -------
        tuple of (Capture, callable)
            State and hook to register.

        Raises
        ------
        InputError
            If the hook is none, as when the two are swapped.
        """
        if not callable(hook):
            raise InputError(
                "capture.wrap(state, hook) takes the state first: the two are swapped"
                if callable(state) and not hasattr(state, "last")
                else f"a communication hook is a function of a state and a bucket, not {shown(hook)}"
            )
        self._state = state
        self._hook = hook
        if self._scaler is None:
            self._scaler = getattr(state, "scaler", None)
        name_parameters(state, self._model.named_parameters())

        def capture_hook(
            capture: "Capture", bucket: GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            try:
                capture._before(bucket)
                future = hook(state, bucket)
                capture._after(bucket, future)
            except BaseException:
                capture._drop()
                raise
            return future

        return self, capture_hook

    def follow(self, local_steps: LocalSteps) -> None:
        """Record the exchanges of local steps: one step of the trace for each, numbered from 0.

        It holds the pseudo-gradient, what is compressed of it where there is a memory, and the gradient of the last
        local step, as the optimizer saw it. :meth:`step`, before ``optimizer.step()``, adds that step's loss and
        learning rate.

        Parameters
        ----------
        local_steps : LocalSteps
            What the training goes through, before it is entered. With a delay, what the compressor says of an exchange
            is not recorded.

        Raises
        ------
        InputError
            If the capture wraps a hook already, or captures kind ``"local"``.
        """
        if self._hook is not None:
            raise InputError("a Capture wraps a hook or follows local steps: make one for each")
        if self._kinds is not None and "local" in self._kinds:
            raise InputError(
                "kind 'local' is of every step, and these are of many: take 'gradient', that of the last one"
            )
        self._local = self._state = local_steps
        if not self._closed:
            local_steps.watch(self._before_exchange, self._after_exchange)

    def step(
        self,
        model: torch.nn.Module | None = None,
        *,
        loss: float | torch.Tensor | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """End a step: call once per iteration, after ``backward()`` and before gradients are zeroed.

        Without a wrapped hook it takes a snapshot of the model's gradients now. With one, it only adds the loss and
        the learning rate to what the hook saw; a step it is not called for is committed without them. Called without a
        backward pass since the last call, it records nothing, and warns.

        With a loss scaler but no wrapped hook, call it before ``scaler.unscale_()`` and ``scaler.step()``.

        Parameters
        ----------
        model : torch.nn.Module, optional
            Module with the same parameter names, if other than the one given at construction.
        loss : float or torch.Tensor, optional
            Loss to record with the step, if the step is captured.
        learning_rate : float, optional
            Learning rate to record with the step, if the step is captured.

        Raises
        ------
        InputError
            If `model` lacks a parameter of the trace; if the hook on the DDP model is not the wrapped one; or if the
            scaler has unscaled the gradients already.
        """
        if self._closed:
            return
        self._check_hook()
        if not self.active:
            return
        if self._local is not None:
            self._told = {"loss": loss, "learning_rate": learning_rate}
        elif self._hook is None:
            self._take(model, loss, learning_rate)
        elif self._in_step:
            self._commit(loss, learning_rate)
        elif not self._watch.fired:
            self._misplaced()
        else:
            self._passed += 1
        # else a backward pass under no_sync: the step goes on; or one that failed
        self._watch.restart(self._parameters if self._hook is None else ())

    def close(self) -> None:
        """Write what is queued and finish the trace.

        Calling it twice does no harm. Ctrl-C takes effect when all is written; pressed again, at once.
        """
        background = self._background
        if not self._closed:
            self._closed = True
            self._watch.stop()
            if self._in_step:
                self._commit()
            if self._passed and self._said is None:
                _warn(
                    f"{self.path}: the hook that capture.wrap() returned saw no gradient in {self._passed} backward "
                    "passes: give the Capture the DDP model, and register the hook on it"
                )
            self.active = self.active and background is not None
        if background is not None:
            background.close(on_interrupt=self._on_interrupt)
            self._check()
        self.active = False

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        # not close(), which waits for a slow disk: garbage is collected in any place
        self._closed = True
        self._watch.stop()
        if self._in_step:
            self._commit()
        if self._background is not None:
            background, path = self._background, self.path
            if not background.close(_PATIENCE_S):
                _at_exit(lambda: background.close)
            elif background.error is not None and self.active:
                _warn(f"{path} was not closed, and lacks its last steps: {background.error}")

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wanted(self) -> bool:
        return self.active and self._next in self.schedule

    def _before(self, bucket: GradBucket) -> None:
        """Snapshot a bucket; the first one of an iteration begins a step."""
        if bucket.index() == 0:
            self._begin()
        if self._current is None:
            return
        arrays = self._current.arrays
        observed = observe(self._state, bucket)
        if self._copy_run(bucket, observed, arrays):
            return
        # a state that knows the scaler has taken the scale out of what it corrects
        unscaled = getattr(self._state, "scaler", None) is not None
        for parameter, gradient in _gradients(bucket):
            slot = self._slots.get(id(parameter))
            if slot is None:
                self._note_absent(parameter)
                continue
            if "gradient" in arrays:
                self._copies.copy(gradient, arrays["gradient"][slot], self._scale)
            if "corrected" in arrays:
                corrected = observed.corrected(parameter, gradient)
                self._copies.copy(
                    corrected, arrays["corrected"][slot], 1.0 if unscaled else self._scale
                )

    def _copy_run(
        self, bucket: GradBucket, observed: ObservedState, arrays: Mapping[Kind, Values]
    ) -> bool:
        """Snapshot a bucket in one go, if it can be done; tell whether it was.

        Of a network with many small parameters the calls for each take longer than the memory.
        """
        gradient, corrected = arrays.get("gradient"), arrays.get("corrected")
        buffer = bucket.buffer()
        if not isinstance(gradient, np.ndarray) or self._scale != 1 or buffer.is_sparse:
            return False
        run = self._runs.get(bucket.index())
        if run is None or not run.fits(buffer):
            if bucket.index() == 0:  # DDP has made new buckets, perhaps fewer
                self._runs.clear()
            run = self._runs[bucket.index()] = Run(buffer, list(_gradients(bucket)), self._slots)
        if run.place is None:
            return False
        copied = run.copy(gradient)
        if corrected is None:
            return True
        together = getattr(observed, "corrected_run", None)
        return together is not None and together(
            run.parameters, copied, torch.from_numpy(corrected)[run.place]
        )

    def _begin(self) -> None:
        if self._in_step:  # step() was not called for the last one, or it failed
            self._commit()
        self._in_step = True
        self._said = Said(observe(self._state))
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            self._warn_once(
                "no_sync",
                "DDP's no_sync() around backward() alone does nothing: gradients are exchanged, and a step is "
                "recorded; put the forward pass into it too",
            )
        if self._wanted():
            self._current = self._borrow()
            self._scale = self._loss_scale()

    def _tapped(self) -> Snapshot | None:
        """Return where a tap of a sharded model writes; the first one of an iteration begins a step."""
        if self._closed or not self.active:
            return None
        if not self._seen:
            self._said = Said(observe(self._state))
            if self._current is None and self._wanted():
                self._current = self._borrow()
                self._scale = self._loss_scale()
                # a step writes nothing for units that it does not reach
                for array in () if self._current is None else self._current.arrays.values():
                    array[...] = 0
        return self._current

    def _on_exchange(
        self, state: Any, parameters: Sequence[torch.Tensor], pairs: Sequence[Pair]
    ) -> None:
        """Snapshot what a unit's replicas are about to exchange."""
        assert self._sharding is not None
        snapshot, scale = self._tapped(), state.scaler.get_scale()
        if id(state) in self._seen and parameters[0].grad is not None:
            self._warn_once(
                "exchanges",
                "the shard hook exchanges on every micro-step, and the last is recorded: call "
                "model.set_requires_all_reduce(False) before all but the last",
            )
        self._seen.add(id(state))
        arrays = {} if snapshot is None else snapshot.arrays
        for parameter, (shard, gradient) in zip(parameters, pairs, strict=True):
            place = self._sharding.places.get(id(parameter))
            if place is None:
                continue
            if "gradient" in arrays:
                self._copies.copy(gradient, arrays["gradient"][place], scale)
            if "corrected" in arrays:
                self._copies.copy(state.corrected(shard, gradient), arrays["corrected"][place])

    def _on_reduce(self, unit: Unit, buffer: torch.Tensor) -> None:
        """Snapshot this rank's gradients of a unit, before they are reduced; add those of micro-steps."""
        snapshot = self._tapped()
        self._seen.add(id(unit))
        if snapshot is None:
            return
        try:
            local: Any = snapshot.arrays["local"]
            divided = unit.factors[0]
            for parameter, gradient in unit.unreduced(buffer):
                place = self._slots.get(id(parameter.sharded_param))
                if place is None:
                    continue
                values = self._copies.zeros(local[place].shape[0])
                self._copies.copy(gradient, values, self._scale / divided, wait=True)
                waits = other_micro_steps(unit.group) is not None
                if waits or parameter.sharded_param.grad is not None:
                    values += local[place]
                local[place] = values
        except InputError as error:
            self._drop()
            self._stop(error)

    def _before_exchange(self, pairs: list[Pair]) -> None:
        """Snapshot the pseudo-gradients of a fragment; the first one of an interval begins a step."""
        if self._closed:
            return
        if not self._in_step:
            self._begin()
        if self._current is None:
            return
        assert self._local is not None
        arrays = self._current.arrays
        places = self._slots if self._sharding is None else self._sharding.places
        for parameter, pseudogradient in pairs:
            slot = places.get(id(parameter))
            if slot is None:
                self._note_absent(parameter)
                continue
            if slot.start == slot.stop:  # another rank's
                continue
            if "pseudogradient" in arrays:
                self._copies.copy(pseudogradient, arrays["pseudogradient"][slot])
            if "corrected" in arrays:
                corrected = self._local.corrected(parameter, pseudogradient)
                self._copies.copy(corrected, arrays["corrected"][slot])
            if "gradient" in arrays:
                self._copies.put(parameter, arrays["gradient"][slot], 1.0)

    def _after_exchange(self) -> None:
        """End the step of an exchange."""
        if self._in_step:
            self._sent = True
            self._commit(**self._told)  # type: ignore[arg-type]

    def _after(self, bucket: GradBucket, future: object) -> None:
        """Note that the inner hook took a bucket; the last one completes the step."""
        if isinstance(future, torch.futures.Future):
            self._futures.append(future)
        self._sent = bucket.is_last()

    def _succeeded(self) -> bool:
        """Tell whether the exchange of the step is over, and well."""
        if not self._sent:
            return False
        try:
            return all(f.done() and [f.value()] for f in self._futures)
        except Exception:  # the training has it already
            return False

    def _drop(self) -> None:
        """Forget a step that failed; it does not count."""
        snapshot, self._current = self._current, None
        self._in_step = self._sent = False
        self._futures.clear()
        self._seen.clear()
        if snapshot is not None and self._background is not None:
            snapshot.arrived = self._copies.mark()
            snapshot.wait()  # what is still on its way would come into another step
            self._background.give_back(snapshot)

    def _take(
        self,
        model: torch.nn.Module | None,
        loss: float | torch.Tensor | None,
        learning_rate: float | None,
    ) -> None:
        """Snapshot the gradients of a model without a wrapped hook, and commit the step."""
        source = self._model if model is None else _module(model)
        own = source is self._model
        if self._sharding is not None and not own:
            raise InputError(
                "step() takes no other model than the sharded one that the Capture was made for"
            )
        slots = self._slots if own else self._slots_of(source)
        parameters = self._parameters
        if not own:
            parameters = [p for p in source.parameters() if id(p) in slots]
        # a tap has asked the schedule already
        wanted = self._current is not None or (not self._seen and self._wanted())
        # values are looked at where they are needed, and not where DDP wrote them after the backward pass
        shallow = self._watch.fired and (not wanted or self._ddp is not None)
        if own and not shallow:
            came = self._watch.has_gradient(parameters)
        else:
            came = any(p.grad is not None for p in parameters)
        if not came:
            self._misplaced()
            if self._watch.fired:
                self._next += 1
            return
        if self._scaler is not None:
            self._check_scaler()
        self._in_step = self._sent = True
        try:
            if wanted and self._current is None:
                self._current = self._borrow()
            if self._current is not None and self._sharding is None:
                scale = self._loss_scale()
                for parameter in source.parameters():
                    slot = slots.get(id(parameter))
                    if slot is None:
                        if own and parameter.grad is not None:
                            self._note_absent(parameter)
                        continue
                    for array in self._current.arrays.values():
                        self._copies.put(parameter, array[slot], scale)
            elif self._current is not None:
                self._take_shards(self._current.arrays)
            self._commit(loss, learning_rate)
        except BaseException:
            self._drop()
            raise

    def _take_shards(self, arrays: Mapping[Kind, Values]) -> None:
        """Snapshot what no tap has seen: the shards that FSDP2 left, where there is no hook."""
        assert self._sharding is not None
        if not self._seen and ("local" in arrays or self._sharding.hook is not None):
            raise InputError(
                "nothing was seen of the exchange: fully_shard(), shard_hook() and set_custom_reduce_scatter() come "
                "before the Capture"
            )
        if self._sharding.hook is None:
            scale = self._loss_scale()
            for array in (array for kind, array in arrays.items() if kind not in WHOLE):
                for parameter in self._parameters:
                    self._copies.put(parameter, array[self._sharding.places[id(parameter)]], scale)

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _check_scaler(self) -> None:
        """Refuse gradients that the scaler has unscaled; it keeps that in a private place only."""
        if any(stage != "READY" for stage in scaler_stages(self._scaler)):
            raise InputError(
                "the scaler has unscaled the gradients: call capture.step() before scaler.unscale_() and "
                "scaler.step(), or give the Capture no scaler"
            )

    def _check_hook(self) -> None:
        """Refuse a DDP model whose hook is not the wrapped one: its ``.grad`` are what that hook left."""
        if self._sharding is not None:
            self._sharding.check()
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            return
        hooks = comm_hooks(ddp)
        bare = [getattr(hook, "__name__", "hook") for hook, state in hooks if state is not self]
        if self._hook is None and bare:
            raise InputError(
                f"the DDP model has a communication hook, {bare[0]}, and its result would be captured instead of the "
                "gradient: make the Capture first, and register the hook by "
                f"ddp.register_comm_hook(*capture.wrap(state, {bare[0]}))"
            )
        if self._hook is not None and (
            (not hooks and self._watch.fired) or any(hook is self._hook for hook, _ in hooks)
        ):
            name = getattr(self._hook, "__name__", "hook")
            raise InputError(
                "the hook that capture.wrap() returned is not registered on the DDP model: write "
                f"ddp.register_comm_hook(*capture.wrap(state, {name}))"
            )

    def _note_absent(self, parameter: torch.Tensor) -> None:
        """Warn of a parameter that the trace has no place for, unless it was left out on purpose."""
        if id(parameter) not in self._expected:
            names = {id(p): name for name, p in self._model.named_parameters()}
            name = names.get(id(parameter), "a parameter of another model")
            self._warn_once(
                "absent",
                f"{name} is not captured: it did not require a gradient, or was not there, when the Capture was made",
            )

    def _misplaced(self) -> None:
        self._warn_once(
            "misplaced",
            "capture.step() found no gradient of a new backward pass, and records nothing: call it once per iteration, "
            "after backward() and before gradients are zeroed. Losses and learning rates are not recorded from here "
            "on, for they may be of other steps",
        )

    def _slots_of(self, model: torch.nn.Module) -> dict[int, slice]:
        named = dict(_module(model).named_parameters())
        try:
            return {id(named[layer.name]): layer.slice for layer in self._layers}
        except KeyError as error:
            raise InputError(
                f"the model has no parameter {error}; the trace was made for another model"
            ) from None

    def _borrow(self) -> Snapshot | None:
        if self._background is None:
            self._start()
        self._check()
        if self._background is None or not self.active:
            return None
        return self._background.borrow(self._on_wait)

    def _start(self) -> None:
        """Open this rank's writer, once the hook is known and with it the kinds to write."""
        own: list[Kind] = ["pseudogradient"] if self._local is not None else []
        if self._kinds is None:
            self._kinds = (*_usual_kinds(self._state), *own)
        elif not own and "pseudogradient" in self._kinds:
            raise InputError(
                "there are pseudo-gradients where local steps are taken: call capture.follow(local_steps)"
            )
        if self._sharding is not None:
            self._kinds = self._sharding.kinds(self._kinds)
        expected = None
        if self._total_steps is not None and self.schedule.known:
            expected = self.schedule.count(self._total_steps)
        try:
            writer = TraceWriter(
                self.path,
                self.rank,
                kinds=self._kinds,
                store=self._store,
                dtype=self._dtype,
                expected_steps=expected,
                compress=self._compress,
                compression=records_steps(self._state),
                **self._shards(),
            )
            self._copies = Copies(
                (p.device for p in self._parameters), stay=self._store == "sketches"
            )
            self._background = BackgroundWriter(writer, self._kinds, self._buffers, self._copies)
        except Exception as error:
            self._stop(error)

    def _shards(self) -> dict[str, Any]:
        """Return a writer's options of a sharded gradient."""
        if self._sharding is None or set(self._kinds or ()) <= set(WHOLE):
            return {}
        return {"shards": self._sharding.shards, "shard_ranks": self._sharding.ranks}

    def _commit(
        self, loss: float | torch.Tensor | None = None, learning_rate: float | None = None
    ) -> None:
        """End a step, and queue its snapshot if there is one; drop a step whose exchange did not succeed."""
        if not self._succeeded():
            self._drop()
            return
        if self._current is not None:
            # where this raises (a loss that is no number), the step of a wrapped hook stays open
            self._current.scalars = self._scalars(loss, learning_rate)
            self._current.step = self._next
            self._current.arrived = self._copies.mark()
        self._next += 1
        snapshot, self._current = self._current, None
        self._in_step = self._sent = False
        self._futures.clear()
        self._seen.clear()
        if snapshot is not None and self._background is not None:
            self._background.submit(snapshot)

    def _scalars(
        self, loss: float | torch.Tensor | None, learning_rate: float | None
    ) -> dict[str, Any]:
        scalars: dict[str, Any] = {}
        if "misplaced" not in self._warned:
            if loss is not None:
                scalars["loss"] = self._copies.number(loss)
            if learning_rate is not None:
                scalars["learning_rate"] = float(learning_rate)
        observed = observe(self._state)
        if self._said is not None and self._said.changed(observed):
            layers = [layer.name for layer in self._layers]
            scalars |= step_columns(observed, layers)
            if unnamed(observed, layers):
                self._warn_once(
                    "unnamed",
                    "the hook's state numbers its parameters, so that its diagnosis of layers cannot be recorded: "
                    "give it named_parameters=model.named_parameters()",
                )
        return scalars

    def _on_wait(self) -> None:
        self._warn_once(
            "wait",
            f"{self.path}: the disk is slower than the training, which waits for it: capture fewer steps, keep "
            f"sketches (store='sketches'), or take more memory (buffers={2 * self._buffers})",
        )

    def _on_interrupt(self) -> None:
        _warn(f"{self.path}: writing what is queued; press Ctrl-C again to lose it")

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _warn(message)

    def _check(self) -> None:
        if self.active and self._background is not None and self._background.error is not None:
            self._stop(self._background.error)

    def _stop(self, error: Exception) -> None:
        self.active = False
        if self._background is not None:
            self._background.close(0.0)  # gives its memory back
        _warn(f"capture stopped, training goes on: {error}")


def _warn(message: str) -> None:
    warnings.warn(message, CaptureWarning, stacklevel=2)


def _at_exit(close: Callable[[], Callable[[], object] | None]) -> None:
    """Call what `close` returns at interpreter exit, such as a method that is weakly held; nothing if that is None."""

    def finish() -> None:
        method = close()
        if method is not None:
            method()

    with contextlib.suppress(RuntimeError):  # the interpreter exits already
        before_thread_pools_end(finish)


def _module(model: object) -> torch.nn.Module:
    inner = unwrap(model).module
    if not isinstance(inner, torch.nn.Module):
        hint = (
            "; give the model whose parameters it updates" if hasattr(model, "param_groups") else ""
        )
        raise InputError(f"Capture needs a torch.nn.Module, not {shown(model)}{hint}")
    return inner


def _layout(
    model: torch.nn.Module, patterns: Sequence[str] | None
) -> tuple[list[Layer], dict[int, slice]]:
    layers: list[Layer] = []
    slots: dict[int, slice] = {}
    offset = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if patterns is not None and not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            continue
        shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
        layer = Layer(name, offset, shape)
        layers.append(layer)
        slots[id(parameter)] = layer.slice
        offset += layer.numel
    if not layers:
        names = ", ".join(name for name, _ in list(model.named_parameters())[:5])
        raise InputError(f"no trainable parameter to capture; the model has {names or 'none'}")
    return layers, slots


def _gradients(bucket: GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a bucket's parameters and their gradients, element for element."""
    if bucket.buffer().is_sparse:  # a bucket of its own
        yield bucket.parameters()[0], bucket.buffer().to_dense()
        return
    for parameter, gradient in pairs_of(bucket):
        yield parameter, logical(parameter, gradient.detach())


def _usual_kinds(state: object) -> tuple[Kind, ...]:
    """Return what is captured where nothing is asked for."""
    return ("gradient", "corrected") if observe(state).error_feedback else ("gradient",)


def _call(method: "weakref.WeakMethod[Callable[..., None]]", *arguments: Any) -> None:
    found = method()
    if found is not None:
        found(*arguments)


def _create_on_rank_zero(
    create: Callable[[], None],
    path: Path,
    rank: int,
    process_group: dist.ProcessGroup | None,
    distributed: bool,
) -> None:
    """Create the trace once; raise its error on every rank, whatever it is, so that none waits for another."""
    problem: list[str | None] = [None]
    interrupt: BaseException | None = None
    if rank == 0:
        try:
            create()
        except GradstatsError as error:
            problem = [str(error)]
        except BaseException as error:
            problem = [f"cannot create {str(path)!r}: {type(error).__name__}: {first_line(error)}"]
            interrupt = None if isinstance(error, Exception) else error
    if distributed:
        dist.broadcast_object_list(problem, group=process_group, group_src=0)
    if interrupt is not None:
        raise interrupt
    if problem[0] is not None:
        raise TraceError(problem[0])


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("gradstats", "torch", "numpy", "zarr")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
