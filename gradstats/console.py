"""Notes and progress bars on stderr."""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console
    import rich.progress

__all__ = ["LATEST_S", "SOON_S", "messages", "progress_bar"]

SOON_S, LATEST_S = 5.0, 15.0
"""Seconds after which work says how far it is if a tenth is done, and in any case."""


@cache
def messages() -> rich.console.Console:
    """Return the console on stderr for what is not a result.

    Returns
    -------
    rich.console.Console
        Always the same console. Its attribute ``quiet`` silences notes and progress.
    """
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def progress_bar() -> rich.progress.Progress:
    """Return a progress display on stderr that shows the time left.

    Returns
    -------
    rich.progress.Progress
        Where stderr is no terminal it prints one line, if the work takes more than five seconds: how much is done, and
        the time left as soon as a tenth is. Shows nothing if the console is quiet.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = messages()

    class Bar(Progress):
        """A display that says something where it cannot be seen, too."""

        began = time.monotonic()
        said = console.quiet or console.is_terminal

        def start(self) -> None:
            super().start()
            self.timers = [
                threading.Timer(s, self.say, [s == LATEST_S]) for s in (SOON_S, LATEST_S)
            ]
            for timer in () if self.said else self.timers:
                timer.daemon = True
                timer.start()

        def stop(self) -> None:
            self.said = True
            for timer in self.timers:
                timer.cancel()
            super().stop()

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            if not self.said and time.monotonic() - self.began >= SOON_S:
                self.say()

        def say(self, anyway: bool = False) -> None:
            """Say how far the work is, once, if a tenth is done or it is late."""
            for task in () if self.said else list(self.tasks):
                elapsed, total = time.monotonic() - self.began, task.total or 0
                left = ""
                if 0 < total <= 10 * task.completed:
                    left = f", about {elapsed * (total / task.completed - 1):.0f} s left"
                if left or anyway:
                    self.said = True
                    done = f"{task.completed:.0f} of {total:.0f} " if total else "under way "
                    console.print(f"{task.description}: {done}after {elapsed:.0f} s{left}")

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet or not console.is_terminal,
    )
