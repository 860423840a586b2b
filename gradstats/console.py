"""Notes and progress bars on stderr."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console
    import rich.progress

__all__ = ["messages", "progress_bar"]


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
        Shows nothing where stderr is no terminal or the console is quiet.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = messages()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet or not console.is_terminal,
    )
