"""Which laws are fitted, and by which solvers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gradstats.errors import unknown
from gradstats.primitives.ratio import check_several, each_once
from gradstats.statistics.laws import LAWS, LawName
from gradstats.statistics.laws.law import Law, Method, Solver

__all__ = ["chosen", "law_of", "solvers"]


def law_of(name: object) -> Law:
    """Return a law by its name.

    Parameters
    ----------
    name : object
        What the user gave for a name.

    Raises
    ------
    InputError
        If no law has it. The message lists the names.
    """
    if not isinstance(name, str) or name not in LAWS:
        raise unknown("model", name, LAWS)
    return LAWS[name]


def chosen(
    models: Iterable[LawName | str] | Literal["all"] | None = None, method: Method | None = None
) -> list[str]:
    """Return the names of the laws to fit: the one place that says what is fitted by default.

    Parameters
    ----------
    models : sequence of str, "all" or None
        Names, or ``"all"`` for every law. By default every law that is no control and has the
        method.
    method : Method, optional
        Method that each of them is to have; by default each has its own.

    Raises
    ------
    InputError
        If a law is unknown or does not have the method.
    """
    if models is None:
        default = {name: law for name, law in LAWS.items() if not law.control}
        known = isinstance(method, str)  # an option may be anything that a user gives
        models = [n for n, law in default.items() if not known or method in law.solvers]
        models = models or list(default)  # the first says what is wrong with the method
    names = list(LAWS) if isinstance(models, str) and models == "all" else models
    names = each_once(check_several(names, "models"))
    for name in names:
        law = law_of(name)
        # only asked for: it raises where a law lacks the method, before anything is fitted
        law.solver(law.default_method if method is None else method)
    return names


def solvers() -> dict[tuple[str, Method], Solver]:
    """Return the solvers of all laws by law and method."""
    return {(name, m): solve for name, law in LAWS.items() for m, solve in law.solvers.items()}
