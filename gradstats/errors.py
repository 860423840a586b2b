"""Errors whose text is meant for the person at the terminal: one line, what is wrong and with what."""

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
    """Base of every error gradstats raises on purpose; the command line prints it as one line."""


class InputError(GradstatsError, ValueError):
    """An argument or an array that has no defined answer: wrong dtype, ratio out of range and so on."""


class TraceError(GradstatsError):
    """A trace that is missing, foreign, of another version, or damaged."""


class NonFiniteGradientError(GradstatsError, ArithmeticError):
    """A gradient held NaN or infinity while a compressor was running; raised on every rank."""


class ExchangeError(GradstatsError):
    """The exchange of a step failed, most likely because a rank was lost. Memories are as they were before it."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type's name where it says nothing."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
