"""Errors for the person at the terminal: one line that says what is wrong and what to do."""

from __future__ import annotations

__all__ = [
    "ExchangeError",
    "GradstatsError",
    "InputError",
    "NonFiniteGradientError",
    "TraceError",
    "first_line",
]


class GradstatsError(Exception):
    """Base of every error that gradstats raises on purpose; the command line prints it as one line."""


class InputError(GradstatsError, ValueError):
    """An argument or array that cannot be used, such as a wrong dtype or a ratio out of range."""


class TraceError(GradstatsError):
    """A trace that is missing, no gradstats trace, of another version, or damaged."""


class NonFiniteGradientError(GradstatsError, ArithmeticError):
    """NaN or infinity in a gradient given to a compressor; raised on every rank."""


class ExchangeError(GradstatsError):
    """A failed exchange, most likely because a rank was lost. Memories are as they were before the step."""


_LONGEST = 300


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without its advice to run what a file holds.

    Parameters
    ----------
    error : BaseException
        The error.

    Returns
    -------
    str
        First line of its text, cut after 300 characters, or the name of its type where it has none.
    """
    text = str(error).strip()
    if "weights_only" in text:  # torch says that switching it off "will likely succeed"
        return "it holds other objects than tensors, which may run code; save tensors or a state_dict alone"
    first = text.splitlines() or [type(error).__name__]
    # zipfile repeats what a damaged archive has in the place of a name
    return first[0] if len(first[0]) <= _LONGEST else f"{first[0][:_LONGEST]}…"
