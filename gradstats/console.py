"""What stderr shows beside results: notes and progress bars."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console
    import rich.progress

__all__ = ["messages", "progress_bar"]


@cache
def messages() -> rich.console.Console:
    """Return the console for what is not a result, on stderr; its attribute ``quiet`` silences notes and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def progress_bar() -> rich.progress.Progress:
    """Return a progress display on stderr with time left; silent where stderr is no terminal, or told to be quiet."""
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
