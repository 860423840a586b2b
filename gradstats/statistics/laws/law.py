"""What a law says about itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from gradstats.errors import InputError

if TYPE_CHECKING:
    from gradstats.primitives.sketch import Magnitudes
    from gradstats.statistics.solution import Solution

__all__ = ["METHODS", "Law", "Method", "Solver"]

Method: TypeAlias = Literal["closed", "moments", "mle", "pwm"]
METHODS: tuple[Method, ...] = get_args(Method)

Solver: TypeAlias = "Callable[[Magnitudes], Solution]"
"""Magnitudes of a gradient → parameters with their standard errors, or a :class:`FitError`."""


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A symmetric distribution that gradients can be fitted to.

    Shapes and the support are those of `magnitude`, and are said nowhere else.

    Attributes
    ----------
    name : str
        Name on the command line and in tables.
    label : str
        Name in the legends of figures and in sentences.
    magnitude : scipy.stats.rv_continuous
        Distribution of the non-zero magnitudes, with a scale.
    signed : scipy.stats.rv_continuous
        Distribution of the non-zero elements: `magnitude` with a random sign.
    solvers : mapping of str to callable
        Method, one of ``"closed"``, ``"moments"``, ``"mle"`` and ``"pwm"``, to the function that takes
        :class:`~gradstats.Magnitudes` and returns a :class:`Solution`. A method that has the same function as ``"mle"``
        maximizes the likelihood, too.
    control : bool
        Whether it is there for others to be compared with, and fitted only where it is asked for.
    special_cases : tuple of str
        Laws that this one becomes at a shape inside its range: a test of the two is one of nested models.
    excess : str, optional
        Law of what exceeds a threshold, where SIDCo's stages can begin with this one.
    symbols : mapping of str to str
        Shape to its symbol on screen, where that is not SciPy's name.
    reasons : mapping of str to str
        Method that it does not have to why.

    Raises
    ------
    InputError
        If it has no solver, one of no known method, or no name of its own.
    """

    name: str
    label: str
    magnitude: Any
    signed: Any
    solvers: Mapping[Method, Solver]
    control: bool = False
    special_cases: tuple[str, ...] = ()
    excess: str | None = None
    symbols: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or self.name in ("all", "none"):
            raise InputError(f"a law cannot have the name {self.name!r}")
        if not self.solvers or set(self.solvers) - set(METHODS):
            raise InputError(
                f"law {self.name!r} has solvers by {', '.join(self.solvers) or 'no method'}; "
                f"there is {', '.join(METHODS)}"
            )

    @property
    def shapes(self) -> tuple[str, ...]:
        """Shape parameters, by SciPy's names."""
        # SciPy writes several names as one text, with commas
        names: str | None = self.magnitude.shapes
        return tuple(names.replace(",", " ").split()) if names else ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that a fit estimates, by name: the shapes and the scale."""
        return (*self.shapes, "scale")

    @property
    def default_method(self) -> Method:
        """The closed form where there is one, as thresholds use it; else maximum likelihood, or what there is."""
        order: tuple[Method, ...] = ("closed", "mle", *METHODS)
        return next(method for method in order if method in self.solvers)

    def solver(self, method: object) -> Solver:
        """Return the solver of a method.

        Parameters
        ----------
        method : object
            What the user gave for a method.

        Returns
        -------
        callable
            Function that takes magnitudes and returns a :class:`Solution`.

        Raises
        ------
        InputError
            If there is no such method, or this law does not have it. The message names what there is.
        """
        for known, solve in self.solvers.items():
            if isinstance(method, str) and method == known:
                return solve
        if not isinstance(method, str) or method not in METHODS:
            # loads NumPy, which asking for names alone does not need
            from gradstats.primitives.ratio import shown

            raise InputError(f"no method {shown(method)}; there is {', '.join(METHODS)}")
        why = f" ({self.reasons[method]})" if method in self.reasons else ""
        raise InputError(
            f"{self.name} has no method {method!r}; it has {', '.join(self.solvers)}{why}"
        )

    def maximizes(self, method: str) -> bool:
        """Tell whether a method's parameters maximize the likelihood: AIC, BIC and nested tests need it.

        Parameters
        ----------
        method : str
            Name of a method.
        """
        best = self.solvers.get("mle")
        return method == "mle" or any(
            name == method and solve is best for name, solve in self.solvers.items()
        )

    @property
    def bounded(self) -> bool:
        """Whether some parameters allow no magnitude above a finite one."""
        from scipy.stats import rv_continuous

        # what SciPy's distributions override whose support depends on their shapes
        support = getattr(type(self.magnitude), "_get_support", None)
        return support is not rv_continuous._get_support or bool(self.magnitude.b < math.inf)

    def end(self, params: Mapping[str, float]) -> float:
        """Return the largest magnitude that the law allows; infinite if it allows any.

        Parameters
        ----------
        params : mapping of str to float
            Shapes and ``scale``, as of :class:`~gradstats.Fit`.
        """
        return float(self.magnitude.support(**params)[1])
