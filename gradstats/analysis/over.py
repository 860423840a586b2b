"""What tables look at: options that their functions share, with one place for types, defaults and meanings.

A function takes them as ``**over: Unpack[Over]``, which type checkers read, and :func:`shares` writes names, defaults
and their meanings into the signature and the docstring that ``help``, notebooks and completion show: to users they are
keyword-only parameters like the others, after those that the function has alone.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar

from gradstats.console import no_progress
from gradstats.trace import Kind
from gradstats.trace.sources import Subset

__all__ = ["Gradients", "Over", "Spread", "SpreadGradients", "shares", "subset_of"]

P = ParamSpec("P")
R = TypeVar("R")


class Gradients(TypedDict, total=False):
    """Which gradients a function looks at."""

    steps: Sequence[int] | None
    ranks: Sequence[int] | None
    kinds: Sequence[Kind] | None
    on_progress: Callable[[], None]


class Over(Gradients, total=False):
    """The same, and which layers by themselves."""

    layers: Sequence[str] | None
    per_layer: bool


class SpreadGradients(Gradients, total=False):
    """Which gradients a function looks at that spreads its work over a cluster."""

    client: Any


class Spread(Over, total=False):
    """The same, and which layers by themselves."""

    client: Any


# Names that share a text, the text, and the defaults; in the order in which users see them.
_MEANINGS: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (
        ("steps", "ranks"),
        "sequence of int, optional\n    Steps and ranks to look at; all by default.",
        None,
    ),
    (("kinds",), "sequence of Kind, optional\n    Kinds to look at; all by default.", None),
    (
        ("layers",),
        "sequence of str, optional\n"
        "    Patterns of parameter names, as in :mod:`fnmatch`: look at these parameters by themselves, too.",
        None,
    ),
    (("per_layer",), "bool, optional\n    Look at every parameter by itself, too.", False),
    (("client",), "distributed.Client, optional\n    Cluster that does the work.", None),
    (
        ("on_progress",),
        "callable, optional\n    Called after every gradient, or other piece of the work.",
        no_progress,
    ),
)
_ENTRY = re.compile(r"^( *)\*\*over :.*\n(?:\1 +.*\n)+", re.MULTILINE)
"""What the docstring of a function in the source says of all of them."""


def shares(options: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show shared options in a function's signature and docstring, and give it all of them, with their defaults.

    Parameters
    ----------
    options : type
        One of the typed dictionaries here: that of the function's ``**over``.

    Returns
    -------
    callable
        Decorator.
    """
    # TypedDict keeps its annotations, those inherited too, as forward references, whose text is shown
    names = {n: getattr(a, "__forward_arg__", a) for n, a in options.__annotations__.items()}
    shared = {n: default for each, _, default in _MEANINGS for n in each if n in names}
    # names that share a line of the docstring are shown only where the function has all of them
    texts = (f"{', '.join(n)} : {text}\n" for n, text, _ in _MEANINGS if names.keys() >= set(n))
    meanings = "".join(texts)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.signature(function)
        # **over itself gives way to the names behind it
        parameters = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(n, kind, default=value, annotation=names[n])
            for n, value in shared.items()
        ]
        shown = plain.replace(parameters=[*parameters, *added])

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                # bind refuses unknown and missing names, as Python does for written parameters
                arguments: dict[str, Any] = shared | shown.bind(*args, **kwargs).arguments
            except TypeError as error:
                # bind does not know the function's name, with which Python's own message begins
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(**arguments)  # type: ignore[call-arg]

        checked.__signature__ = shown  # type: ignore[attr-defined]
        if checked.__doc__:  # not there under -OO
            checked.__doc__ = _ENTRY.sub(
                lambda entry: textwrap.indent(meanings, entry[1]), checked.__doc__
            )
        return checked

    return decorate


def subset_of(over: Gradients) -> Subset:
    """Return the part of a source that shared options choose.

    Parameters
    ----------
    over : Gradients
        Shared options.
    """
    fields = ("steps", "ranks", "kinds", "layers", "per_layer")
    # some functions have no choice of layers
    return Subset(**{name: over[name] for name in fields if name in over})  # type: ignore[literal-required]
