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


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without its advice to run what a file holds.

    Parameters
    ----------
    error : BaseException
        The error.

    Returns
    -------
    str
        First line of its text, or the name of its type where it has none.
    """
    text = str(error).strip().splitlines()
    if any(
        "weights_only" in line for line in text
    ):  # torch says that switching it off "will likely succeed"
        return "it holds other objects than tensors, which may run code; save tensors or a state_dict alone"
    return text[0] if text else type(error).__name__
