"""The laws that gradients are fitted to: one file each, and the registry of their names.

A law states everything about itself, and every table is a view of the registry: the terminal's choices, fits, figures,
tests of nested models, the report. Nothing of NumPy or SciPy loads until a law is asked for.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from gradstats.errors import InputError
from gradstats.registry import Registry
from gradstats.statistics.laws.law import METHODS, Law, Method
from gradstats.statistics.solution import FitError, Flag, Reason, Solution

__all__ = [
    "LAWS",
    "METHODS",
    "FitError",
    "Flag",
    "Law",
    "LawName",
    "Method",
    "Reason",
    "Solution",
]

LawName: TypeAlias = Literal[
    "laplace", "dgamma", "double_genpareto", "norm", "t", "gennorm", "dweibull", "lognorm"
]
"""The package's own names: a user's law may have any other."""
_OWN: tuple[LawName, ...] = get_args(LawName)


def _check(name: str, law: object) -> None:
    if not isinstance(law, Law):
        raise InputError(f"law {name!r} is to be a Law, not of type {type(law).__name__}")
    if law.name != name:
        raise InputError(f"law {name!r} calls itself {law.name!r}: both names are to be the same")


LAWS: Registry[Law] = Registry(
    "gradstats.laws", {name: f"gradstats.statistics.laws.{name}:LAW" for name in _OWN}, _check
)
"""Law by the name that the command line and the tables use: the sparsity-inducing ones of SIDCo, then the controls.

``LAWS["mine"] = Law("mine", …)`` adds one to this program. Through the entry point ``gradstats.laws`` an installed
package adds one to every program.
"""
