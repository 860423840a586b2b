"""The two interfaces of this room: a compressor averages a gradient over the ranks, a selector picks what is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from gradstats.errors import InputError
from gradstats.primitives import Selection
from gradstats.primitives.ratio import target_count

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from gradstats.compressors.cost import Exchange, Load

__all__ = ["Activity", "Compressor", "Lane", "NamedSlice", "Reduced", "Selector"]

NamedSlice: TypeAlias = tuple[str, slice]
"""A parameter's name and its place in the flat gradient."""


Lane: TypeAlias = Literal["backward", "select", "communicate"]
"""What a rank spends time on."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One stretch of a rank's time within a step.

    Attributes
    ----------
    lane : {"backward", "select", "communicate"}
        What the rank did.
    layer : str
        Name of the last parameter concerned. For a message that merges several, the one that completed it.
    start : float
        When it began, in seconds since the step's first gradient was ready.
    end : float
        When it ended, in seconds since the step's first gradient was ready.
    numel : int
        Number of elements of the gradient concerned.
    """

    lane: Lane
    layer: str
    start: float
    end: float
    numel: int


class _Checkpointed:
    """An object with a state for checkpoints; the state is empty unless a subclass keeps one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to continue bit-identically."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class Selector(_Checkpointed, ABC):
    """The rule inside a sparse compressor that picks elements of one rank's gradient.

    Attributes
    ----------
    ratio : float or None
        Kept fraction k/d, which a schedule may set; None for a rule without one.
    single_value : bool
        Whether the rule sends one value that stands for all selected elements.
    whole : bool
        Whether the rule selects every element, so that a layer needs no positions.
    """

    ratio: float | None = None
    single_value: bool = False
    whole: bool = False

    @abstractmethod
    def select(self, gradient: torch.Tensor) -> Selection:
        """Pick the elements to send.

        Parameters
        ----------
        gradient : tensor, shape (d,)
            The gradient, with the residual already added. It is left unchanged.

        Returns
        -------
        Selection
            Positions in ascending order and their values, or one value for all of them.
        """

    def warm_up(self) -> None:
        """Compile the loops of the rule, or load them; without knowing which they are, all."""
        from gradstats.thresholds import warm_up

        warm_up()

    def target(self, numel: int) -> int:
        """Return the number of elements that the rule aims to keep.

        Parameters
        ----------
        numel : int
            Number of elements d of the gradient.

        Returns
        -------
        int
            The target count k; 0 for a rule without a ratio.
        """
        return 0 if self.ratio is None else target_count(self.ratio, numel)


class WithSelector:
    """Something whose ratio is that of the selector inside it."""

    selector: Selector

    def warm_up(self) -> None:
        """Compile the loops of the selector, or load them."""
        self.selector.warm_up()

    @property
    def ratio(self) -> float | None:
        """Kept fraction k/d of the selector."""
        return self.selector.ratio

    @ratio.setter
    def ratio(self, ratio: float | None) -> None:
        # a schedule sets the compressor's ratio, and the selector's is the one that counts
        self.selector.ratio = ratio


@dataclass(slots=True)
class Reduced:
    """The result of one exchange over the ranks.

    Attributes
    ----------
    flags : list of int
        What each rank announced, by rank. If any flag is not zero, the step was refused and nothing below counts.
    mean : float32 or float64 tensor, shape (d,)
        The update, the same bits on every rank. Clone it to keep it: it may be a buffer that the next step overwrites.
    residual : tensor, shape (d,)
        What this rank has not sent. It may be the corrected gradient itself, overwritten.
    sent : int64 tensor, shape (k̂,), or None
        Positions that this rank sent; None if it sent something at every position.
    threshold : float
        Threshold η on this rank; NaN without one.
    selected : int
        Number of elements k̂ that this rank sent.
    union : int
        Number of positions at which any rank sent something.
    bytes_sent : int
        Size of this rank's messages, headers and padding included, in bytes. Flags that travel alone, before a step of
        which nothing else has a header, are not counted: 32 bytes.
    select_seconds : float
        Wall-clock time that this rank spent on choosing what to send.
    communicate_seconds : float
        Wall-clock time of the exchange while nothing else went on.
    overlapped_seconds : float
        Wall-clock time of the exchange while the backward pass went on.
    """

    flags: list[int]
    mean: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    threshold: float = float("nan")
    selected: int = 0
    union: int = 0
    bytes_sent: int = 0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0
    overlapped_seconds: float = 0.0


class Compressor(_Checkpointed, ABC):
    """A lossy average of a flat gradient over the ranks.

    A step is any number of calls of :meth:`push`, then one of :meth:`reduce`; :meth:`abandon` drops a step that began.
    Every rank must make the same calls.

    Attributes
    ----------
    feedback : bool
        Whether it is made for error feedback. Unbiased compressors and majority votes are not: they leave no residual
        that a later step could make up for.
    streams : bool
        Whether it takes layers as they become ready (:meth:`push`), and so needs their names.
    has_ratio : bool
        Whether it sends a fraction of the elements. Sign compressors and dense averaging do not.
    always : mapping of str to object
        Options with which it compresses in every step and at every size, as a measurement needs.
    variants : mapping of str to mapping, or None
        Options for which a name of the class stands, by name; None where PyTorch does the same by itself.
    codecs : tuple of str
        What a :class:`gradstats.collectives.Codec` may change of what it sends: ``"indices"``, ``"values"``.
    one_union : bool
        Whether all ranks together send about k positions, so that the union does not grow with the number of ranks.
    ratio : float or None
        Kept fraction k/d, which a schedule may set; None for a compressor without one.
    settling : int
        Number of steps at the start of a run in which it may still measure how to send; no benchmark counts them.
    timeline : list of Activity
        How the last step's time was spent; empty unless the compressor streams.
    """

    feedback: bool = True
    streams: ClassVar[bool] = False
    has_ratio: ClassVar[bool] = True
    one_union: ClassVar[bool] = False
    variants: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {}
    codecs: ClassVar[tuple[str, ...]] = ()
    always: ClassVar[Mapping[str, Any]] = {}
    ratio: float | None = None
    settling: int = 0
    timeline: list[Activity] = []  # noqa: RUF012 — replaced, never added to

    @abstractmethod
    def reduce(
        self, corrected: torch.Tensor, group: dist.ProcessGroup | None, flag: int = 0
    ) -> Reduced:
        """Exchange the gradient and average it.

        Parameters
        ----------
        corrected : float32 or float64 tensor, shape (d,)
            Gradient plus what the memory added. It may be overwritten unless a rank raises a flag.
        group : torch.distributed.ProcessGroup or None
            The ranks; the default group if None.
        flag : int
            A small integer that every rank learns. Not zero if this rank's gradient must not be used; the gradient is
            then not read.

        Returns
        -------
        Reduced
            The update, the residual, and what the exchange took.
        """

    @classmethod
    def exchange(cls, load: Load) -> Exchange:
        """Return what one step's exchange takes in a steady state, by which :mod:`gradstats.network` prices it.

        Parameters
        ----------
        load : Load
            What the exchange carries.

        Returns
        -------
        Exchange
            Bytes sent, and the work in its order.

        Raises
        ------
        InputError
            If the class does not say.
        """
        raise InputError(f"no cost formula for {load.name!r}; give {cls.__name__} an exchange")

    @classmethod
    def coded(cls, **options: Any) -> tuple[str, ...]:
        """Return what a codec may change of what it sends with these options: :attr:`codecs` by default.

        Parameters
        ----------
        **options : Any
            Options of the class.
        """
        return cls.codecs

    def push(
        self,
        corrected: torch.Tensor,
        layers: Sequence[NamedSlice],
        group: dist.ProcessGroup | None,
        flag: int = 0,
    ) -> None:
        """Take layers whose gradient is complete; a compressor of the whole model waits for :meth:`reduce`.

        Parameters
        ----------
        corrected : float32 or float64 tensor, shape (d,)
            Gradient plus memory. Only the parts of these layers need to be valid; nothing is changed before
            :meth:`reduce`.
        layers : sequence of (str, slice)
            Names and places of the parameters that became ready together.
        group : torch.distributed.ProcessGroup or None
            The ranks; the default group if None.
        flag : int
            Not zero if the gradient of these layers must not be used; it is then not read.
        """

    def warm_up(self) -> None:
        """Compile the loops of a step, or load them, so that no step waits for them.

        Without knowing which they are, all; a class that knows has fewer.
        """
        from gradstats.thresholds import warm_up

        warm_up()

    def abandon(self) -> None:
        """Drop a step that will not be completed."""

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to before the last step, whose update is not applied.

        Parameters
        ----------
        state : mapping
            What :meth:`state_dict` returned then. It is asked for in every step, and no later step may change it.
        """
        # enough where the state is all that a step changes
        self.load_state_dict(state)

    def target(self, numel: int, layer: str | None = None) -> int:
        """Return the number of elements that a rank aims to send.

        Parameters
        ----------
        numel : int
            Number of elements of the layer, or of the whole gradient.
        layer : str, optional
            Name of the layer; the whole gradient if None.

        Returns
        -------
        int
            The target count k; 0 for a compressor without one.
        """
        return 0 if self.ratio is None else target_count(self.ratio, numel)
