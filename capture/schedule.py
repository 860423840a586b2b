"""Schedules: sets of steps to capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradstats.errors import InputError

__all__ = ["Schedule", "as_schedule", "at", "every", "logarithmic"]


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
        If n is below 1.

    Examples
    --------
    >>> [s for s in range(10) if s in every(4, start=1)]
    [1, 5, 9]
    """
    if n < 1:
        raise InputError(f"every must be at least 1 step, not {n}")
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
        If a step is negative.
    """
    chosen = frozenset(steps)
    if any(s < 0 for s in chosen):
        raise InputError(f"steps count from 0; got {min(chosen)}")
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
    if per_decade < 1:
        raise InputError(f"per_decade must be at least 1, not {per_decade}")

    def includes(step: int) -> bool:
        if step <= 0:
            return step == 0
        exponent = round(math.log10(step) * per_decade)
        return round(10 ** (exponent / per_decade)) == step

    return Schedule(includes, f"logarithmic, {per_decade} per decade")


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
        If N is below 1, or a step is negative.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if callable(schedule):
        return Schedule(
            schedule, f"asked of {getattr(schedule, '__qualname__', 'a function')}", False
        )
    return every(schedule) if isinstance(schedule, int) else at(schedule)
