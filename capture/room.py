"""How much a trace takes, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gradstats.console import messages
from gradstats.tables import format_bytes

__all__ = ["Room"]

_FEW = 1000
"""Steps for which there should be room where nobody knows how many come."""

_LITTLE = 100_000
"""Bytes a step that are not worth a word."""


@dataclass(frozen=True, slots=True)
class Room:
    """What all ranks of a capture take together.

    Attributes
    ----------
    ranks : int
        Number of ranks that write.
    thinned : bool
        Whether the user has chosen steps; else every one is captured.
    """

    ranks: int
    thinned: bool

    def problem(self, path: Path, size: float, steps: int | None) -> str:
        """Say what a step takes, if that is much; return what is wrong where the disk will be full.

        Parameters
        ----------
        path : Path
            The trace, which is there.
        size : float
            Bytes that a step of one rank takes, without compression.
        steps : int or None
            Number of steps that will be captured, if that is known.

        Returns
        -------
        str
            The warning; empty if there is room, or nobody can tell.
        """
        each = size * self.ranks
        # who thins the steps has thought of the disk
        if not self.thinned and each >= _LITTLE:
            of = f" of {self.ranks} ranks" if self.ranks > 1 else ""
            messages().print(
                f"capture: {format_bytes(each)} a step{of}, in {path}; every 100th with schedule=100",
                soft_wrap=True,
            )
        try:
            free = shutil.disk_usage(path).free
        except OSError:
            return ""
        room = int(free / each)
        if room >= (_FEW if steps is None else steps):
            return ""
        needed = "" if steps is None else f", and {steps:,} would take {format_bytes(steps * each)}"
        return (
            f"the disk of {path} has {format_bytes(free)} left, room for {room:,} captured steps{needed}: capture "
            "fewer (schedule=100), keep sketches (store='sketches') or half the bits (dtype='bfloat16')"
        )
