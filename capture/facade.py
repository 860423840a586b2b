"""The object a training script talks to: options, the choice of a tap, and the end of a step."""

# Size: half of its lines are docstrings of one class, which says every option of a capture.

# No `from __future__ import annotations` here: DDP reads the annotations of the wrapped hook at run time.

import platform
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from capture.creation import Overwrite, create_on_all, held, hold, restarted, vacant
from capture.recorder import Recorder, Storage, at_exit, warn
from capture.room import Room
from capture.schedule import Retention, Schedule, as_retention, as_schedule
from capture.states import name_parameters, records_steps, usual_kinds
from capture.taps.buckets import BucketTap, Hook
from capture.taps.exchanges import ExchangeTap
from capture.taps.layout import Layout
from capture.taps.parts import UnitsOption
from capture.taps.plain import PlainTap
from capture.taps.shards import Sharding, ShardTap
from capture.taps.tap import Tap
from capture.taps.watch import BackwardWatch
from capture.updates import Updates, optimizers_of
from gradstats.errors import InputError, TraceError, several
from gradstats.files import refuse_address
from gradstats.hooks import LocalSteps, Scaler
from gradstats.hooks.facts import Facts
from gradstats.hooks.torch_private import GradBucket, backward_pass, unwrap
from gradstats.hooks.units import is_sharded
from gradstats.primitives.ratio import check_count, shown
from gradstats.tables import format_bytes
from gradstats.trace import DTYPES, KINDS, STORES, Dtype, Kind, Store, create_trace
from gradstats.version import __version__

__all__ = ["Capture", "capture_hook"]


# Size: half of its lines are docstrings of what users call; recorder, tap and watch do the work.
class Capture(Facts):
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
        Steps to capture; every one by default, and a line on stderr then says how much that takes. A
        :class:`Schedule`, N for every N-th step, a list of steps, or a function that is asked once
        a step, such as :meth:`gradstats.Monitor.triggered`.
    ranks : iterable of int, optional
        Ranks to capture; all if None.
    kinds : sequence of {"gradient", "corrected", "local", "pseudogradient", "update", "weight"}, optional
        What to store: the gradient, the gradient plus the hook's memory, and, of a sharded model, this rank's gradient
        before any reduction. If None, the first two where the hook keeps a memory, else the gradient. Without a hook
        nothing is corrected, and the first step to be recorded raises an :class:`InputError`. :meth:`follow` adds the
        pseudo-gradient, and corrected is then of that. The update is what the optimizer's step takes off the
        parameters, and the weight the parameters after it: both need `optimizer`.
    parameters : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters to capture; all if None.
    store : {"gradients", "sketches"}
        Whether to store the gradients themselves, or in their place a histogram and the moments of every layer, which
        take some kilobytes a step.
    dtype : {"float32", "bfloat16"}
        Type of the stored gradients; ``"bfloat16"`` takes half the space. Sketches are always of the
        float32 values.
    total_steps : int, optional
        Length of the run from step 0 on, in steps of the trace: with :meth:`follow` the number of exchanges. If it is
        known, the trace is laid out once and need not grow.
    metadata : mapping of str to JSON values, optional
        Description of the run, stored with the trace.
    buffers : int
        Largest number of steps on their way from the training to the disk.
    compress : bool
        Whether to compress the stored gradients; sketches always are.
    overwrite : bool or "number"
        Whether to replace an existing trace at `path`; not one that another Capture, of any process, still writes into.
        ``"number"`` leaves that one and those that have steps alone, and takes ``NAME-2.zarr``, or the next that is
        free: for a training that begins again. A process that torchrun has restarted after a failure does so by itself.
    start_step : int
        Number of the first step, for a resumed run.
    process_group : ProcessGroup, optional
        Group whose ranks are captured. If None, that of the DDP model, else the default group, if there is one.
    scaler : Scaler, optional
        ``torch.amp.GradScaler`` of the training. Gradients are then stored without the loss scale. If None, that of the
        wrapped hook's state, if it has one.
    optimizer : torch.optim.Optimizer or list of them, optional
        Optimizers of the model, also as accelerate or Lightning wraps them: for the kinds ``"update"`` and
        ``"weight"``, which need it.
    units : mapping of str to int or (int, int), optional
        Parts of parameters that are layers of their own in the trace, by name pattern: ``{"*.experts": 0}`` makes every
        index of the first dimension one, ``experts[0]`` and so on, such as experts of a fused parameter or rows of an
        embedding; ``{"*.q_proj.weight": (0, 12)}`` cuts it into 12 equal ones, such as heads. Dimension 0 alone can be
        cut.
    keep : Retention or int, optional
        Steps that stay in the trace; all by default. N for the last N steps of the training, or
        ``recent(200, before=100)``: every captured step of the last 200, and of those before every 100th. A step is
        removed, with its loss, when the newer one is committed, from each rank by itself; what lies in one file with
        others, such as moments of small layers, goes with the last of them. Not for a sharded model, whose ranks might
        keep parts of different steps.

    Attributes
    ----------
    path : Path
        The trace: `path`, or the number after it.
    schedule : Schedule
        Steps to capture.
    rank : int
        Rank of this process; 0 without a process group.
    active : bool
        Whether this rank still captures: False if it is not one of `ranks`, after a failed write, and once closed.

    Raises
    ------
    TraceError
        On every rank, if the trace cannot be created, or a rank does not find it (machines without a shared disk), or
        it would replace one that is written into.
    InputError
        If some ranks make no Capture, which a warning says after five seconds; if no parameter matches `parameters`,
        there is no such rank as one of `ranks`, an option has a wrong value, or a communication hook is registered on
        the DDP model already.

    Notes
    -----
    A parameter without a gradient (unused in the step) is recorded as zeros. One that has a gradient which cannot be
    seen (an optimizer in the backward pass takes it, its module was replaced by another shape) is NaN, with a warning
    that names it; one of the same name and shape takes its place. Parameters that DDP or FSDP2 is told to ignore are
    left out, with a warning.

    A step is one of the optimizer. With gradient accumulation under ``no_sync`` it is recorded at the synchronised
    backward pass, with the accumulated sum. Where every backward pass exchanges, and adds to the ``.grad`` of the one
    before, it is the sum of this rank's own gradients, too. Under DDP without a wrapped hook the gradient is the
    average over the ranks, the same on all of them.

    Elements are in the logical order of their parameters, whatever the memory format, as float32 (or bfloat16), also
    those of float64 models. Of a complex parameter real and imaginary parts are recorded: its shape in the trace has a
    last dimension of 2. Sparse gradients are recorded as dense ones.

    The layout is that of the parameters that require gradients when the capture is made; one that is unfrozen later is
    left out, with a warning.

    An update is θ before the optimizer's step less θ after it, in the precision of the parameters, and so has the sign
    of a gradient. It belongs to the step of the trace whose gradient it follows: :meth:`step` may come before or after
    ``optimizer.step()``. Several steps of an optimizer, or several optimizers, until the next gradient are one update.
    That of a step which a ``GradScaler`` skipped is zeros; a parameter that none of the optimizers holds is NaN, with a
    warning. Where a closure calls :meth:`step` several times, as with LBFGS, each has the way to the next. On recorded
    steps it takes one more copy of this rank's parameters in their own precision, on their device, from the
    optimizer's step until the step of the trace is over; the weight takes none, nor do steps that are not recorded.

    Under FSDP2 (``fully_shard``) every rank writes the shards that it holds of the gradient, which is read back whole
    under the first rank of a replica. With :func:`gradstats.hooks.shard_hook` it is the mean over one replica's ranks,
    as it goes into the compressor; else the mean over all ranks, stored once. Of kind ``"local"`` every rank writes all
    elements: the sum over its micro-batches, before the reduce-scatter. Make the capture after ``fully_shard`` and
    ``shard_hook`` or :class:`gradstats.hooks.LocalSteps`, and before the first forward pass.
    """

    _held: Callable[[], object] | None = None  # of the process that has created the trace

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
        dtype: Dtype = "float32",
        total_steps: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        buffers: int = 2,
        compress: bool = False,
        overwrite: Overwrite = False,
        start_step: int = 0,
        process_group: dist.ProcessGroup | None = None,
        scaler: Scaler | None = None,
        optimizer: Any = None,
        units: UnitsOption | None = None,
        keep: Retention | int | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        _check_options(kinds, store, dtype)
        optimizers = optimizers_of(optimizer, kinds)
        check_count(buffers, "buffers")
        start_step = check_count(start_step, "start_step", 0)
        if total_steps is not None:
            total_steps = check_count(total_steps, "total_steps")
        refuse_address(path)  # before any rank waits for another
        self.path = Path(path)
        self.schedule = as_schedule(schedule)
        self._layout = Layout(model, parameters, units)
        self._kinds = None if kinds is None else tuple(kinds)
        ddp = unwrap(model).ddp
        # weakly, for DDP holds the hook, and with it the capture, where no garbage collector sees it
        self._ddp = None if ddp is None else weakref.ref(ddp)
        if process_group is None and ddp is not None:
            process_group = ddp.process_group
        # numbers are those within the captured group, here and in the trace
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        world_size = dist.get_world_size(process_group) if distributed else 1
        ranks = None if ranks is None else set(ranks)
        if ranks and (beyond := ranks - set(range(world_size))):
            raise InputError(
                f"ranks: there is no rank {min(beyond)} among {world_size}, which are counted from 0"
            )
        active = ranks is None or self.rank in ranks
        self._sharding: Sharding | None = None
        retention = as_retention(keep)
        if is_sharded(self._layout.model):
            if retention is not None:
                raise InputError(
                    "keep= is not for a sharded model, whose ranks might keep parts of different steps: thin the "
                    "schedule"
                )
            self._sharding = Sharding(self._layout, process_group, ranks)
            # of a sharded model a rank also writes its part of a gradient that another rank stands for
            asked = self._kinds or usual_kinds(self._sharding.hook)
            active = bool(self._sharding.kinds(asked))
            self._sharding.warn_of_unwritten(asked)
        elif "local" in (self._kinds or ()):
            raise InputError(
                "kind 'local' is of models sharded by fully_shard(); under DDP wrap a hook, and 'gradient' is each "
                "rank's own"
            )
        storage = Storage(
            self.path, self.rank, store, dtype, compress, buffers, total_steps, retention
        )
        self._recorder = Recorder(storage, self.schedule, start_step, scaler, active)
        self._watch = BackwardWatch()
        common = (self._recorder, self._layout, self._kinds, self._watch)
        self._tap: Tap = (
            PlainTap(*common, self._ddp)
            if self._sharding is None
            else ShardTap(*common, self._sharding)
        )
        self._tap.check()
        if optimizers:
            layers = self._layout.names, self._layout.parameters
            places = self._layout.slots if self._sharding is None else self._sharding.places
            # the function must not hold the capture, which could then never be collected
            watch = self._watch
            self._recorder.updates = Updates(optimizers, layers, places, lambda: watch.fired)
        if restarted() and not overwrite:
            overwrite = "number"

        # rank 0 alone calls it; the others are told what it has decided
        def create() -> Path:
            path, over = (
                vacant(self.path) if overwrite == "number" else (self.path, bool(overwrite))
            )
            if path != self.path:
                warn(
                    f"{self.path} has steps of an earlier training, or is written into: this one is captured in {path}"
                )
            elif over and held(path):
                raise TraceError(
                    f"another Capture writes into {path}: end its training, close() it if it is of this process, or "
                    "choose another name"
                )
            create_trace(
                path,
                self._layout.parts.layers,
                world_size=world_size,
                metadata={**_origin(storage, self.schedule), **(metadata or {})},
                overwrite=over,
            )
            self._held = weakref.finalize(self, hold(path))
            return path

        self.path, writers = create_on_all(create, self.path, self.rank, process_group, active)
        # nothing has been opened yet, and the path may have got a number
        self._recorder.storage = replace(storage, path=self.path)
        if self.rank in writers[:1]:  # one of them says what all take
            every = isinstance(schedule, int | Integral) and schedule == 1
            self._recorder.room = Room(len(writers), thinned=retention is not None or not every)
        # other ranks look at nothing, and get no hooks
        self._watch.start(self._layout.parameters if active else ())
        if self._layout.ignored and active:
            why = (
                "DDP keeps out of its buckets" if ddp is not None else "fully_shard() leaves alone"
            )
            warn(f"not captured: {several(self._layout.ignored)}, which {why}")
        # from here on there is something to close
        self._closed = False
        updates = self._recorder.updates
        if updates is not None and active:
            recorder = self._recorder
            updates.start(
                # weakly: the optimizers must not keep the capture alive
                weakref.WeakMethod(self._before_update),
                weakref.WeakMethod(recorder.submit_waiting),
                recorder.warn_once,
            )
        at_exit(weakref.WeakMethod(self.close))

    def _facts(self) -> dict[str, str]:
        recorder = self._recorder
        state = "recording" if self.active else "closed" if self._closed else "not recording"
        return {
            "trace": str(self.path),
            "rank": str(self.rank),
            "steps": self.schedule.description,
            "state": state,
            "next step": str(recorder.step),
            "recorded": f"{recorder.recorded} steps",
            **({"a step takes": format_bytes(recorder.bytes)} if recorder.bytes else {}),
        }

    @property
    def active(self) -> bool:
        """Whether this rank still captures."""
        return self._recorder.active

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
            If the hook is none, as when the two are swapped, or the DDP model can take none.
        """
        if not callable(hook):
            raise InputError(
                "capture.wrap(state, hook) takes the state first: the two are swapped"
                if callable(state) and not records_steps(state)
                else f"a communication hook is a function of a state and a bucket, not {shown(hook)}"
            )
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and ddp.mixed_precision is not None:
            raise InputError(
                "DDP(mixed_precision=…) averages in a hook of its own, and takes no other: use torch.autocast instead"
            )
        # parameters may have been replaced since the Capture was made
        self._layout.adopt()
        name_parameters(state, self._layout.model.named_parameters())
        tap = BucketTap(
            self._recorder, self._layout, self._kinds, self._watch, self._ddp, state, hook
        )
        self._tap = tap
        # a function at the top of a module: DDP refuses callable objects and
        # partials, and a hook is pickled by its name
        return self, capture_hook

    def _continue_in(self, later: "Capture") -> None:
        """Have the hook that is registered record into another capture: DDP takes one hook, and keeps it."""
        self._tap = later._tap

    def _before_update(self) -> None:
        if self.active:
            self._tap.before_update()

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
        if self._recorder.updates is not None:
            raise InputError(
                "kinds 'update' and 'weight' are of every optimizer step, and an exchange is of many: leave them and "
                "optimizer= out, and take 'pseudogradient'"
            )
        if isinstance(self._tap, BucketTap):
            raise InputError("a Capture wraps a hook or follows local steps: make one for each")
        if self._kinds is not None and "local" in self._kinds:
            raise InputError(
                "kind 'local' is of every step, and these are of many: take 'gradient', that of the last one"
            )
        # a step is an exchange here, and local backward passes tell nothing of it
        self._watch.stop()
        tap = ExchangeTap(
            self._recorder,
            self._layout,
            self._kinds,
            self,
            local_steps,
            self._sharding,
            self._ddp,
        )
        self._tap = tap
        # a copy of a capture, or one that is finished, is not called
        if not self._closed:
            local_steps.watch(tap.before, tap.after)

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
            If `model` lacks a parameter of the trace; if the hook on the DDP model is not the wrapped one; if the
            scaler has unscaled the gradients already; or within a backward pass.
        """
        # the training may go on after close()
        if self._closed:
            return
        if backward_pass() >= 0:
            raise InputError(
                "capture.step() is called within a backward pass, which has computed a part of the gradient: call it "
                "after backward()"
            )
        # on every rank, captured or not, so that all of them raise
        self._tap.check()
        if self.active:
            self._tap.end(model, loss, learning_rate)

    def close(self) -> None:
        """Write what is queued and finish the trace; the many files of sketches become few.

        Calling it twice does no harm. Ctrl-C takes effect when all is written; pressed again, at once.
        """
        if not self._closed:
            self._closed = True
            self._watch.stop()
            self._tap.close()
        # not only the first time: Ctrl-C may have cut that short
        self._recorder.close()
        if self._held:
            self._held()

    def __del__(self) -> None:
        # the constructor may have failed before it set this
        if getattr(self, "_closed", True):
            return
        # not close(), which waits for a slow disk: garbage is collected in any place
        self._closed = True
        self._watch.stop()
        self._tap.finish()
        self._recorder.abandon()

    def __reduce__(self) -> tuple[Any, ...]:
        # DDP holds what wrap() returned, and is copied and saved with it; a copy of DDP has no hook
        return _closed_copy, (self.path, self.rank, self._recorder.storage)

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def capture_hook(state: Capture, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Record a bucket, and call the hook that the capture wraps. By this name, so that it can be pickled.

    Parameters
    ----------
    state : Capture
        What :meth:`Capture.wrap` returned.
    bucket : GradBucket
        What DDP gives.

    Returns
    -------
    torch.futures.Future
        What the hook returned.
    """
    return cast("BucketTap", state._tap).exchange(bucket)


def _closed_copy(path: Path, rank: int, storage: Storage) -> Capture:
    """Return a capture that records nothing: the trace, its thread and its hooks are the original's."""
    # without the constructor, which creates a trace
    copy = object.__new__(Capture)
    copy._closed = True
    copy.path, copy.rank, copy.schedule = path, rank, as_schedule(1)
    copy._recorder = Recorder(storage, copy.schedule, 0, None, active=False)
    return copy


def _check_options(kinds: Sequence[Kind] | None, store: str, dtype: str) -> None:
    """Refuse values that these options do not have."""
    # a string is a sequence, too
    if kinds is not None and (isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS)):
        raise InputError(f"kinds must be a list of {', '.join(KINDS)}, not {kinds!r:.100}")
    if store not in STORES:
        raise InputError(f"store must be {' or '.join(STORES)}, not {store}")
    if dtype not in DTYPES:
        raise InputError(f"dtype must be float32 or bfloat16, not {dtype}")


def _origin(storage: Storage, schedule: Schedule) -> dict[str, Any]:
    """Return what a trace says of where it comes from."""
    versions = {"python": platform.python_version(), "gradstats": __version__}
    versions |= {name: version(name) for name in ("torch", "numpy", "zarr")}
    return {
        "capture": {
            "schedule": schedule.description,
            "store": storage.store,
            "dtype": storage.dtype,
            **({"keep": storage.keep.description} if storage.keep else {}),
        },
        "versions": versions,
        "created": datetime.now(UTC).isoformat(" ", "seconds"),
        "host": platform.node(),
    }
