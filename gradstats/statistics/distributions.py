"""Symmetric distributions of gradients, and of their magnitudes, as ``scipy.stats`` objects.

Three sparsity-inducing distributions (SIDCo, Abdelmoniem et al., MLSys 2021), and controls that they have to beat. What
SciPy lacks is made of what it has: a magnitude with a random sign (`double_genpareto`, `double_lognorm`), or a
symmetric distribution folded at zero (`halft`). Shapes have SciPy's names and signs: gamma `a`; genpareto `c` = ξ,
above 0 for a heavy tail.

The tables are views of :data:`gradstats.statistics.laws.LAWS`, made anew each time one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scipy.stats import dgamma, laplace

from gradstats.statistics.laws import LAWS
from gradstats.statistics.laws.double_genpareto import double_genpareto
from gradstats.statistics.laws.lognorm import double_lognorm
from gradstats.statistics.laws.t import halft

if TYPE_CHECKING:
    from scipy.stats import rv_continuous

    DISTRIBUTIONS: dict[str, rv_continuous]
    MAGNITUDES: dict[str, rv_continuous]
    SHAPES: dict[str, str | None]
    SIDS: tuple[str, ...]
    CONTROLS: tuple[str, ...]

__all__ = [
    "CONTROLS",
    "DISTRIBUTIONS",
    "MAGNITUDES",
    "SHAPES",
    "SIDS",
    "dgamma",
    "double_genpareto",
    "double_lognorm",
    "halft",
    "laplace",
]

_VIEWS: dict[str, Callable[[], object]] = {
    # law's name to the distribution of the signed, non-zero elements
    "DISTRIBUTIONS": lambda: {name: law.signed for name, law in LAWS.items()},
    # law's name to the distribution of the non-zero magnitudes
    "MAGNITUDES": lambda: {name: law.magnitude for name, law in LAWS.items()},
    # law's name to SciPy's name of its shape parameter
    "SHAPES": lambda: {name: law.magnitude.shapes for name, law in LAWS.items()},
    # the sparsity-inducing ones, and the models that these are compared with
    "SIDS": lambda: tuple(name for name, law in LAWS.items() if not law.control),
    "CONTROLS": lambda: tuple(name for name, law in LAWS.items() if law.control),
}


def __getattr__(name: str) -> Any:
    # PEP 562: a table made when asked for has the laws that were registered since the import
    if name not in _VIEWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _VIEWS[name]()
