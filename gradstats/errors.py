"""Errors for the person at the terminal: one line that says what is wrong and what to do."""

from __future__ import annotations

import errno
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

__all__ = [
    "ExchangeError",
    "GradstatsError",
    "InputError",
    "NonFiniteGradientError",
    "TraceError",
    "first_line",
    "of_the_machine",
    "options_of",
    "several",
    "unknown",
    "unread",
    "warn",
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
_LONGEST_NAME = 80
_LONGEST_LIST = 600


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


_MACHINE = {
    getattr(errno, name)
    for name in (
        *("ENOMEM", "ESTALE", "EIO", "EMFILE", "ENFILE", "EACCES", "EPERM", "EAGAIN", "EINTR"),
        *(
            "ETIMEDOUT",
            "ENOTCONN",
            "ECONNRESET",
            "ECONNREFUSED",
            "EHOSTDOWN",
            "EHOSTUNREACH",
            "EREMOTEIO",
        ),
    )
    if hasattr(errno, name)  # not every platform has all of them
}
"""Numbers of errors that say nothing of what is in a file."""


def of_the_machine(error: BaseException) -> bool:
    """Tell whether the machine, its memory or its network kept something from being read, not what was to be read.

    Parameters
    ----------
    error : BaseException
        The error, and what it came from.

    Returns
    -------
    bool
        Whether another machine, or this one later, may read it.
    """
    # libraries wrap the system's error in one of their own: it may be anywhere in the chain
    each: BaseException | None = error
    while each is not None:
        # MemoryError is not an OSError and has no errno
        if isinstance(each, MemoryError) or (isinstance(each, OSError) and each.errno in _MACHINE):
            return True
        each = each.__cause__ or each.__context__
    return False


def unread(why: object, where: str = "") -> str:
    """Say what is wrong with something that could not be read: that it is damaged, or that it is not known.

    Parameters
    ----------
    why : BaseException or str
        An error, or what is wrong with it.
    where : str
        In which part of it.

    Returns
    -------
    str
        Such as ``is damaged: a chunk is missing``, or ``cannot be read: Stale file handle``.
    """
    if not isinstance(why, BaseException):
        return f"is damaged: {where}{why}"
    line = first_line(why)
    if of_the_machine(why):
        memory = "there is not enough memory: " if isinstance(why, MemoryError) else ""
        return f"cannot be read: {where}{memory}{line}"
    return f"is damaged: {where}{line}"


@contextmanager
def options_of(what: str, name: str) -> Iterator[None]:
    """Say of what is built inside that it does not take an option.

    Parameters
    ----------
    what : str
        What has such names, in the singular.
    name : str
        The one that is built.

    Raises
    ------
    InputError
        For a TypeError, as Python reports an unknown argument.
    """
    try:
        yield
    except TypeError as error:
        raise InputError(f"{what} {name!r}: {error}") from None


def unknown(what: str, value: object, names: Iterable[str]) -> InputError:
    """Return the error for a name that nothing has: those there are, and the one that was perhaps meant.

    Parameters
    ----------
    what : str
        What has such names, in the singular.
    value : object
        What the user gave for a name.
    names : iterable of str
        The names there are.

    Returns
    -------
    InputError
        To be raised.
    """
    names, hint = list(names), ""
    shown = f"of type {type(value).__name__}"
    if isinstance(value, str):
        shown = repr(value) if len(value) <= _LONGEST_NAME else f"{value[:_LONGEST_NAME]!r}…"
        # cut, because matching takes time quadratic in the length
        near = get_close_matches(value[:_LONGEST_NAME], names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(names)
    if len(listed) > _LONGEST_LIST:
        listed = ", ".join([*names[:5], f"{len(names) - 5} more"])
    return InputError(f"no {what} {shown}; there are {listed}{hint}")


def several(names: Sequence[str]) -> str:
    """Return some of many names.

    Parameters
    ----------
    names : sequence of str
        Names, one or more.
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_WITHIN = frozenset({"capture", "contextlib", "gradstats", "torch"})
"""Packages whose lines are not the user's."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that led here.

    Parameters
    ----------
    message : str
        The warning.
    category : type, optional
        Its category.
    """
    # warnings has an argument for this from Python 3.12 on
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _WITHIN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
