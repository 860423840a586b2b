"""Schedules: sets of steps to capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral

from gradstats.errors import InputError

__all__ = [
    *("Retention", "Schedule", "as_retention", "as_schedule"),
    *("at", "every", "logarithmic", "recent"),
]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A set of steps, possibly endless: ``step in schedule``.

    Attributes
    ----------
    includes : callable
        Function of a step's number that tells whether the step belongs to the set.
    description : str
        Text for the trace's metadata.
    known : bool
        Whether it is known beforehand which steps these are. If not, `includes` is asked once a step.
    """

    includes: Callable[[int], bool]
    description: str
    known: bool = True

    def __contains__(self, step: int) -> bool:
        return self.includes(step)

    def count(self, steps: int) -> int:
        """Count the scheduled steps among the first steps of a run.

        Parameters
        ----------
        steps : int
            Length of the run: steps 0 to steps - 1.

        Returns
        -------
        int
            Number of scheduled steps.
        """
        return sum(map(self.includes, range(steps)))


def every(n: int, start: int = 0) -> Schedule:
    """Schedule every n-th step from `start` on.

    Parameters
    ----------
    n : int
        Distance between two steps, at least 1.
    start : int
        First step.

    Returns
    -------
    Schedule
        Endless schedule.

    Raises
    ------
    InputError
        If n is below 1, or no whole number.

    Examples
    --------
    >>> [s for s in range(10) if s in every(4, start=1)]
    [1, 5, 9]
    """
    # here, for it imports NumPy, which `gradstats --help` does without
    from gradstats.primitives.ratio import check_count

    n = check_count(n, "every")
    return Schedule(lambda s: s >= start and (s - start) % n == 0, f"every {n} from {start}")


def at(steps: Iterable[int]) -> Schedule:
    """Schedule exactly the steps listed.

    Parameters
    ----------
    steps : iterable of int
        Step numbers from 0 on, in any order.

    Returns
    -------
    Schedule
        Schedule of these steps.

    Raises
    ------
    InputError
        If a step is negative, or no whole number.
    """
    # here, for it imports NumPy, which `gradstats --help` does without
    from gradstats.primitives.ratio import check_count, shown

    if not isinstance(steps, Iterable):
        raise InputError(
            f"a schedule is N for every N-th step, or a list of steps, not {shown(steps)}"
        )
    # one look-up a step, however many steps are listed
    chosen = frozenset(check_count(step, "a step", 0) for step in steps)
    return Schedule(chosen.__contains__, f"at {', '.join(map(str, sorted(chosen)))}")


def logarithmic(per_decade: int = 10) -> Schedule:
    """Schedule steps at about equal distances on a log axis: dense at first, `per_decade` in each decade.

    Parameters
    ----------
    per_decade : int
        Number of steps between a power of ten and the next, where there are that many.

    Returns
    -------
    Schedule
        Endless schedule, which begins with step 0.

    Raises
    ------
    InputError
        If `per_decade` is below 1.

    Examples
    --------
    >>> [s for s in range(120) if s in logarithmic(3)]
    [0, 1, 2, 5, 10, 22, 46, 100]
    """
    from gradstats.primitives.ratio import check_count

    per_decade = check_count(per_decade, "per_decade")

    def includes(step: int) -> bool:
        # a step of 0 has no logarithm, and belongs to the set
        if step <= 0:
            return step == 0
        # round trip: a step belongs to the set if the nearest point of the log axis rounds to it; in the first decade
        # several points may share a step
        exponent = round(math.log10(step) * per_decade)
        return round(10 ** (exponent / per_decade)) == step

    return Schedule(includes, f"logarithmic, {per_decade} per decade")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which captured steps stay in a trace: the last ones, and some of those before. :func:`recent` makes it.

    Attributes
    ----------
    last : int
        Distance to the newest captured step from which on steps are old.
    before : Schedule
        Old steps that stay.
    """

    last: int
    before: Schedule

    @property
    def description(self) -> str:
        """Text for the trace's metadata."""
        # the description of an empty list is "at ": nothing is left of it
        old = self.before.description.removeprefix("at ")
        return f"the last {self.last} steps" + (f"; of those before, {old}" if old else "")

    def outdated(self, step: int, newest: int) -> bool:
        """Tell whether a captured step is to be removed.

        Parameters
        ----------
        step : int
            Step in the trace.
        newest : int
            The newest one there.
        """
        return step <= newest - self.last and step not in self.before


def recent(last: int, before: Schedule | int | Iterable[int] = ()) -> Retention:
    """Keep the last steps of a training, and some of those before: `keep` of :class:`Capture`.

    Parameters
    ----------
    last : int
        Number of the training's last steps whose captured ones are kept, at least 1.
    before : Schedule, int or iterable of int
        Steps that are kept although they are older; none by default.

    Returns
    -------
    Retention
        What to keep.

    Raises
    ------
    InputError
        If `last` is below 1, or `before` is no set of steps.

    Examples
    --------
    >>> keep = recent(3, before=every(4))
    >>> [s for s in range(10) if not keep.outdated(s, newest=9)]
    [0, 4, 7, 8, 9]
    """
    # here, for it imports NumPy, which `gradstats --help` does without
    from gradstats.primitives.ratio import check_count

    last = check_count(last, "last")
    schedule = as_schedule(before)
    # a user's function answers for the step in progress, and is asked here about steps long past
    if not schedule.known:
        raise InputError("before= is a schedule, N for every N-th step, or a list of steps")
    return Retention(last, schedule)


def as_retention(keep: Retention | int | None) -> Retention | None:
    """Turn the number of a training's last steps into what to keep.

    Parameters
    ----------
    keep : Retention, int or None
        What to keep; None for everything.

    Returns
    -------
    Retention or None
        What to keep.

    Raises
    ------
    InputError
        If a number is below 1.
    """
    return keep if keep is None or isinstance(keep, Retention) else recent(keep)


def as_schedule(schedule: Schedule | int | Iterable[int] | Callable[[int], bool]) -> Schedule:
    """Turn an integer, a list of steps or a function into a schedule.

    Parameters
    ----------
    schedule : Schedule, int, iterable of int or callable
        A schedule, which is returned unchanged; N for every N-th step; a list of steps; or a function that is asked
        once a step whether to capture it, such as :meth:`gradstats.Monitor.triggered`.

    Returns
    -------
    Schedule
        The schedule.

    Raises
    ------
    InputError
        If N is below 1, a step is negative, or it is none of these.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if callable(schedule):
        return Schedule(
            schedule, f"asked of {getattr(schedule, '__qualname__', 'a function')}", False
        )
    # NumPy's integers, too
    return every(int(schedule)) if isinstance(schedule, int | Integral) else at(schedule)
