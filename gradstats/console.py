"""Notes and progress bars on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import rich.console
    import rich.progress

__all__ = ["LATEST_S", "SOON_S", "followed", "messages", "no_progress", "progress_bar"]

T = TypeVar("T")

SOON_S, LATEST_S = 5.0, 15.0
"""Seconds after which work says how far it is if a tenth is done, and in any case."""


class _NoProgress:
    """Report nothing, as the default of what is called after every piece of work: help shows its name, no address."""

    __name__ = "no_progress"

    def __call__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return "<function no_progress>"

    def __reduce__(self) -> str:
        return "no_progress"  # pickled by name: the same object in another process


no_progress = _NoProgress()
"""Default of callables that are called after every piece of work."""


@cache
def messages() -> rich.console.Console:
    """Return the console on stderr for what is not a result.

    Returns
    -------
    rich.console.Console
        Always the same console. Its attribute ``quiet`` silences notes and progress.
    """
    from rich.console import Console

    # names of layers and files may hold brackets, which markup would take for styles
    return Console(stderr=True, highlight=False, markup=False)


def progress_bar() -> rich.progress.Progress:
    """Return a progress display on stderr that shows the time left.

    Returns
    -------
    rich.progress.Progress
        In a notebook it appears if the work takes more than five seconds, and goes when that is done; it needs
        ipywidgets. Elsewhere, where stderr is no terminal, it prints one line then: how much is done, and the time left
        as soon as a tenth is. Shows nothing if the console is quiet.
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
    # without ipywidgets rich shows nothing in a notebook, and warns at each refresh
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    visible = console.is_terminal or notebook

    # defined for each bar: rich loads when it is needed, and `began` is this bar's own
    class Bar(Progress):
        """A display that says something where it cannot be seen, too."""

        began = time.monotonic()
        # what is seen needs no words, and a quiet console wants none
        needs_no_words = console.quiet or visible

        def start(self) -> None:
            # in a notebook `advance` shows the bar, and only if the work takes long
            if not notebook:
                super().start()
            # timers, because one piece of work may outlast both moments and `advance` is only called after it
            self.timers = [
                threading.Timer(s, self._say, [s == LATEST_S]) for s in (SOON_S, LATEST_S)
            ]
            for timer in () if self.needs_no_words else self.timers:
                timer.daemon = True  # the end of the process must not wait for it
                timer.start()

        def stop(self) -> None:
            self.needs_no_words = True
            for timer in self.timers:
                timer.cancel()
            super().stop()

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            if time.monotonic() - self.began >= SOON_S:
                if not self.needs_no_words:
                    self._say()
                elif notebook:
                    # does nothing where the bar is already shown
                    super().start()

        def _say(self, anyway: bool = False) -> None:
            """Say how far the work is, once, if a tenth is done or it is late."""
            for task in () if self.needs_no_words else list(self.tasks):
                elapsed, total = time.monotonic() - self.began, task.total or 0
                left = ""
                if 0 < total <= 10 * task.completed:
                    left = f", about {elapsed * (total / task.completed - 1):.0f} s left"
                if left or anyway:
                    self.needs_no_words = True
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
        disable=console.quiet or not visible,
        transient=notebook,
    )


def followed(items: Iterable[T], title: str) -> Iterator[T]:
    """Yield items one by one, in a notebook with a bar of how many are done.

    Elsewhere nothing is shown: the commands have a bar for all of their work.

    Parameters
    ----------
    items : iterable
        What is worked on.
    title : str
        What they are, in the plural.

    Yields
    ------
    object
        The items.
    """
    if not messages().is_jupyter:
        yield from items
        return
    items = list(items)  # a bar needs their number
    with progress_bar() as bar:
        task = bar.add_task(title, total=len(items))
        for item in items:
            yield item
            bar.advance(task)
