"""How much is sent in which step: schedules of the kept fraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from gradstats.compressors import Compressor
from gradstats.errors import GradstatsError, InputError, first_line
from gradstats.primitives.ratio import check_count, check_ratio, check_several, shown

__all__ = ["DGC_RATIOS", "RatioSchedule", "dgc_warm_up"]

DGC_RATIOS = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""Kept fractions of DGC's epochs of warm-up, and that of the training (Lin et al. 2018)."""

_PROBED = (0, *(1 << n for n in range(31)))
"""Steps at which a schedule is asked beforehand whether it needs a ratio to set."""


def dgc_warm_up(
    steps_per_epoch: int,
    ratios: Sequence[float] = DGC_RATIOS,
    final: float | None = None,
) -> Callable[[int], float | None]:
    """Return DGC's warm-up: the n-th ratio in the n-th epoch, the last one from then on (Lin et al. 2018).

    Parameters
    ----------
    steps_per_epoch : int
        Steps of an epoch, at least 1.
    ratios : sequence of float
        Kept fractions k/d, in (0, 1]. A ratio of 1 is a dense step.
    final : float, optional
        Ratio after the warm-up, below which no ratio of the warm-up lies; the last of `ratios` if None.

    Returns
    -------
    callable
        Step to ratio, for :class:`gradstats.hooks.CompressionState`.

    Raises
    ------
    InputError
        If a ratio is outside (0, 1], or `steps_per_epoch` is below 1.
    """
    steps_per_epoch = check_count(steps_per_epoch, "steps_per_epoch")
    ratios = [check_ratio(ratio) for ratio in check_several(ratios, "ratios")]
    if not ratios:
        raise InputError("a warm-up needs at least one ratio")
    if final is not None:
        final = check_ratio(final)
        ratios = [*(r for r in ratios if r > final), final]
    return lambda step: ratios[min(step // steps_per_epoch, len(ratios) - 1)]


class RatioSchedule:
    """The ratio of every step, applied to a compressor.

    Parameters
    ----------
    compressor : Compressor
        Its ratio is set when a step begins.
    at : callable, optional
        Step to ratio: 1 is a dense step, None leaves the compressor's own.

    Raises
    ------
    InputError
        If the schedule has a ratio out of range, or one below 1 for a compressor that has none to set.
    """

    def __init__(self, compressor: Compressor, at: Callable[[int], float | None] | None) -> None:
        self._compressor = compressor
        self._at = at
        # kept, as the compressor's own is overwritten by the first step of a schedule
        self._default = compressor.ratio
        if at is not None and not callable(at):
            raise InputError(f"a schedule must be a function of the step, not {shown(at)}")
        for step in _PROBED if at is not None else ():
            self.begin(step)  # raises now, not in the middle of training
        self.begin(0)

    def of(self, step: int) -> float | None:
        """Return the ratio scheduled for a step, None for the compressor's own.

        Parameters
        ----------
        step : int
            Number of the step.

        Returns
        -------
        float or None
            Kept fraction k/d.

        Raises
        ------
        InputError
            If the schedule fails at the step.
        """
        try:
            return None if self._at is None else self._at(step)
        except GradstatsError:
            raise
        # whatever a function of the user's raises, such as the end of a table
        except Exception as error:
            raise InputError(
                f"the schedule has no ratio at step {step} ({type(error).__name__}: {first_line(error)}): it must have "
                "one at every step, such as that of min(step, last)"
            ) from None

    def described(self) -> list[str] | None:
        """Return the schedule in words, at steps 0, 1, 2, 4, 8 and so on; None if there is none."""
        if self._at is None:
            return None
        ratios = [(step, self.of(step)) for step in _PROBED]
        # where it changes: functions cannot be compared, so ranks compare their values
        turns = [ratios[0], *(b for a, b in pairwise(ratios) if a[1] != b[1])]
        return [f"{ratio} at step {step}" for step, ratio in turns]

    def dense(self, step: int) -> bool:
        """Tell whether a step averages densely.

        Parameters
        ----------
        step : int
            Number of the step.

        Returns
        -------
        bool
            Whether the ratio is 1.
        """
        # None, the compressor's own ratio, is never a dense step, whatever that ratio is
        return (self.of(step) or 0) >= 1

    def begin(self, step: int) -> None:
        """Set the compressor's ratio for a step.

        Parameters
        ----------
        step : int
            Number of the step.

        Raises
        ------
        InputError
            If the ratio is out of range, or the compressor has none to set.
        """
        if self._at is None:
            return
        scheduled = self.of(step)
        ratio = self._default if scheduled is None else check_ratio(scheduled)
        if ratio is None or scheduled == 1:  # nothing to set, or a dense step
            return
        # a dense step needs no ratio, so that a compressor without one may have a dense warm-up
        if self._compressor.ratio is None:
            raise InputError(f"{type(self._compressor).__name__} has no ratio to schedule")
        self._compressor.ratio = ratio
