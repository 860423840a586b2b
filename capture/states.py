"""The interface between a capture and a communication hook's state, and adapters for states not made for it.

Nothing else in this package looks for members of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from gradstats.hooks.gradient import flatten, real_view
from gradstats.trace import COMPRESSION, LAYER_COMPRESSION, Kind

if TYPE_CHECKING:
    from gradstats.hooks import Diagnosis, Scaler, StepRecord
    from gradstats.hooks.torch_private import GradBucket

__all__ = [
    "ObservedState",
    "Reports",
    "corrected_run",
    "name_parameters",
    "observe",
    "records_steps",
    "scaler_of",
    "step_columns",
    "unnamed",
    "usual_kinds",
]

_MEMBERS = ("error_feedback", "last", "diagnosis")


@runtime_checkable
class ObservedState(Protocol):
    """State of a DDP communication hook, as :meth:`capture.Capture.wrap` reads it.

    :class:`gradstats.hooks.CompressionState` has these members. Give them to the state of your own hook, and its
    memory and its records are captured too; the state need not inherit from this class. Where it has only some of
    them, or only a method ``residual(parameter)``, see :func:`observe`. A state with an attribute ``scaler`` that is
    not None returns from ``corrected`` a gradient without the loss scale.

    Examples
    --------
    >>> import torch
    >>> class Remembering:
    ...     error_feedback = True
    ...     last = diagnosis = None
    ...
    ...     def __init__(self, model):
    ...         self.memory = {p: torch.zeros_like(p) for p in model.parameters()}
    ...
    ...     def corrected(self, parameter, gradient):
    ...         return gradient + self.memory[parameter]
    >>> isinstance(Remembering(torch.nn.Linear(3, 2)), ObservedState)
    True
    """

    @property
    def error_feedback(self) -> bool:
        """Whether the hook adds a memory to the gradient before it compresses it."""

    @property
    def last(self) -> StepRecord | None:
        """Record of the last step; None before the first one, or if the hook keeps no records."""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Comparison of the last diagnosed step with a dense exchange; None if there was none."""

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the hook is about to compress of one parameter's gradient. Called before the hook.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the parameters in the bucket that the hook gets next.
        gradient : torch.Tensor
            This rank's gradient of the parameter, of the same shape, element for element, whatever the parameter's
            memory format. It must not be changed.

        Returns
        -------
        torch.Tensor
            Gradient plus memory, of the parameter's shape, or flat in its logical order.
        """


class _Partial:
    """A state with some of the members, or none: nothing is recorded, and nothing added, that it does not tell."""

    def __init__(self, state: object) -> None:
        self._corrected = getattr(state, "corrected", None)
        self._residual = getattr(state, "residual", None)
        adds = self._corrected is not None or self._residual is not None
        # a state that has something to add is taken to add it, unless it denies it
        self.error_feedback = adds and bool(getattr(state, "error_feedback", True))
        self.last: StepRecord | None = getattr(state, "last", None)
        self.diagnosis: Diagnosis | None = getattr(state, "diagnosis", None)

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if self._corrected is not None:
            return self._corrected(parameter, gradient)  # type: ignore[no-any-return]
        return _sum(gradient, None if self._residual is None else self._residual(parameter))


class _PowerSGD:
    """PyTorch's ``PowerSGDState``, whose residuals are flat and kept by the index of the bucket."""

    last = diagnosis = None

    def __init__(self, state: PowerSGDState, bucket: GradBucket | None) -> None:
        self.error_feedback = bool(state.use_error_feedback)
        self._residuals: dict[int, torch.Tensor] = {}
        flat = None
        # there is none until PowerSGD compresses for the first time
        if bucket is not None and self.error_feedback:
            flat = state.error_dict.get(bucket.index())
        if bucket is not None and flat is not None:
            parameters = bucket.parameters()
            parts = torch.split(flat, [p.numel() for p in parameters])
            # as in the bucket: every parameter's part in its memory order
            self._residuals = {
                id(p): flatten(p, part.view(p.shape))
                for p, part in zip(parameters, parts, strict=True)
            }

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return _sum(gradient, self._residuals.get(id(parameter)))


def _sum(gradient: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return gradient plus residual, flat: the same sum, in the same precision, as the hook is about to make."""
    flat = real_view(gradient.detach()).reshape(-1)
    return flat if residual is None else flat + real_view(residual).reshape(-1)


def observe(state: object, bucket: GradBucket | None = None) -> ObservedState:
    """Return what a capture sees of a hook's state now.

    Parameters
    ----------
    state : object
        Any hook's state. An :class:`ObservedState` is returned as it is; PyTorch's ``PowerSGDState`` has an adapter.
        Other states may have some members of :class:`ObservedState`, or instead of ``corrected`` a method
        ``residual(parameter)`` that returns what the hook will add: a tensor of the parameter's shape, or flat in its
        logical order, or None.
        A state that has neither, such as None or a process group, adds nothing.
    bucket : GradBucket, optional
        Bucket that the hook gets next. ``PowerSGDState`` keeps its residuals by bucket: without one
        ``corrected`` returns the gradient.

    Returns
    -------
    ObservedState
        View of the state, to be asked for anew with every bucket.
    """
    # not isinstance(): with a protocol it is slow, and every step comes here several times
    if callable(getattr(state, "corrected", None)) and all(hasattr(state, n) for n in _MEMBERS):
        return cast("ObservedState", state)
    if isinstance(state, PowerSGDState):
        return _PowerSGD(state, bucket)
    return _Partial(state)


def corrected_run(
    state: ObservedState,
    parameters: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    out: torch.Tensor,
) -> bool:
    """Write what a state is about to compress of parameters that follow one another; False if it cannot say so at once.

    Parameters
    ----------
    state : ObservedState
        A state. If it has one, its method ``corrected_run`` is called, as
        :meth:`gradstats.hooks.CompressionState.corrected_run` is.
    parameters : sequence of torch.Tensor
        Parameters, in the model's order.
    gradient : tensor, shape (n,)
        Their gradients, each flat in logical order, one after another.
    out : tensor, shape (n,)
        Written.
    """
    return _knows_runs(type(state)) and state.corrected_run(parameters, gradient, out)  # type: ignore[attr-defined]


@cache
def _knows_runs(kind: type) -> bool:
    """Tell whether a class has a ``corrected_run`` that says what its ``corrected`` does.

    A subclass may have changed ``corrected`` alone.
    """
    nearest = next((c for c in kind.__mro__ if "corrected" in vars(c)), object)
    return "corrected_run" in vars(nearest)


def records_steps(state: object) -> bool:
    """Tell whether a hook's state says what the hook did in a step, so that a trace needs room for it.

    Parameters
    ----------
    state : object
        Any hook's state. Its ``last`` counts, also while it is still None.

    Returns
    -------
    bool
        True if the state has an attribute ``last``.
    """
    return hasattr(state, "last")


def name_parameters(state: object, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Tell a state the names of its parameters, if it has a method ``name_parameters`` that wants them.

    Parameters
    ----------
    state : object
        Any hook's state.
    named_parameters : iterable of (str, torch.Tensor)
        Parameters of the captured model, by the names under which the trace knows them.
    """
    if hasattr(state, "name_parameters"):
        state.name_parameters(named_parameters)


def scaler_of(state: object) -> Scaler | None:
    """Return the loss scaler whose scale a state takes out of what it corrects; None if it has none.

    Parameters
    ----------
    state : object
        Any hook's state.
    """
    scaler: Scaler | None = getattr(state, "scaler", None)
    return scaler


def usual_kinds(state: object) -> tuple[Kind, ...]:
    """Return what is captured where nothing is asked for.

    Parameters
    ----------
    state : object
        Any hook's state.
    """
    return ("gradient", "corrected") if observe(state).error_feedback else ("gradient",)


class Reports:
    """What a hook's state reports of its steps, each told from the one before.

    Parameters
    ----------
    state : object
        Any hook's state.
    """

    def __init__(self, state: object) -> None:
        self._state = state
        self._last: StepRecord | None = None
        self._step: int | None = None

    def begin(self) -> None:
        """Begin a step: what the state has reported so far is of earlier ones."""
        self._last = observe(self._state).last
        self._step = _number(self._last)

    def new(self) -> ObservedState | None:
        """Return the state if it has reported something since; None if not."""
        observed = observe(self._state)
        # a record may be kept, and changed in place
        if observed.last is self._last and _number(observed.last) == self._step:
            return None
        return observed


def _number(record: object) -> int | None:
    return getattr(record, "step", None)


def unnamed(state: ObservedState, layers: Sequence[str]) -> bool:
    """Tell whether a state's diagnosis numbers the parameters, so that it cannot be assigned to the trace's.

    Parameters
    ----------
    state : ObservedState
        State after the hook has run.
    layers : sequence of str
        Names of the captured parameters.

    Returns
    -------
    bool
        True if there is a diagnosis, and all it names are numbers unknown to the trace.
    """
    names = _layers(state.diagnosis)
    # a ParameterList names its parameters by numbers, too; those the trace knows
    return len(names) > 0 and all(n.isdecimal() and n not in layers for n in names)


def step_columns(state: ObservedState, layers: Sequence[str]) -> dict[str, Any]:
    """Return what a state says of its last step, in the columns of a trace.

    Parameters
    ----------
    state : ObservedState
        State after the hook has run.
    layers : sequence of str
        Names of the captured parameters, in the trace's order.

    Returns
    -------
    dict
        Keyword arguments of :meth:`gradstats.trace.TraceWriter.append`; empty if the state keeps no records.
        Layers that the diagnosis does not know, such as those averaged densely, get NaN. Names with DDP's prefix
        ``module.`` are those without.
    """
    record, diagnosis = state.last, state.diagnosis
    if record is None:
        return {}
    # a user's state may report some of these only
    columns = _members(record, ("threshold", "selected"))
    step = columns["compression"] = _members(record, COMPRESSION)
    # a diagnosis stays until the next one, steps later
    if _number(record) is not None and _number(diagnosis) == _number(record):
        # in place: columns holds this dict already
        step |= _members(diagnosis, ("residual_norm", "matching_rate"))
        places = {name: i for i, name in enumerate(_layers(diagnosis))}
        rows = [places.get(name, places.get(f"module.{name}")) for name in layers]
        columns["layer_compression"] = {
            name: np.array([np.nan if i is None else values[i] for i in rows])
            for name, values in _members(diagnosis, LAYER_COMPRESSION).items()
        }
    return columns


def _members(report: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(report, name) for name in names if hasattr(report, name)}


def _layers(diagnosis: object) -> Sequence[str]:
    return getattr(diagnosis, "layers", ())
