"""Which steps to capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradstats.errors import InputError

__all__ = ["Schedule", "as_schedule", "at", "every", "logarithmic"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A set of steps, possibly endless: ``step in schedule``.

    Attributes
    ----------
    includes : tells whether a step belongs to it.
    description : for the trace's metadata.
    """

    includes: Callable[[int], bool]
    description: str

    def __contains__(self, step: int) -> bool:
        return self.includes(step)

    def count(self, steps: int) -> int:
        """Count the scheduled steps among 0 … steps-1."""
        return sum(map(self.includes, range(steps)))


def every(n: int, start: int = 0) -> Schedule:
    """Schedule every n-th step from `start` on.

    Examples
    --------
    >>> [s for s in range(10) if s in every(4, start=1)]
    [1, 5, 9]
    """
    if n < 1:
        raise InputError(f"every needs a positive number of steps, not {n}")
    return Schedule(lambda s: s >= start and (s - start) % n == 0, f"every {n} from {start}")


def at(steps: Iterable[int]) -> Schedule:
    """Schedule exactly the steps listed."""
    chosen = frozenset(steps)
    if any(s < 0 for s in chosen):
        raise InputError(f"steps count from 0; got {min(chosen)}")
    return Schedule(chosen.__contains__, f"at {', '.join(map(str, sorted(chosen)))}")


def logarithmic(per_decade: int = 10) -> Schedule:
    """Schedule steps at about equal distances on a log axis: dense at first, `per_decade` in each decade.

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
        import math

        exponent = round(math.log10(step) * per_decade)
        return round(10 ** (exponent / per_decade)) == step

    return Schedule(includes, f"logarithmic, {per_decade} per decade")


def as_schedule(schedule: Schedule | int | Iterable[int]) -> Schedule:
    """Turn an integer N (every N steps) or a list of steps into a schedule."""
    if isinstance(schedule, Schedule):
        return schedule
    return every(schedule) if isinstance(schedule, int) else at(schedule)
