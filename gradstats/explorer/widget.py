"""The explorer as a widget of JupyterLab, whose view Python reads and sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

from gradstats.errors import GradstatsError, unknown
from gradstats.explorer.data import DRAWN, Series, fitted, payload
from gradstats.explorer.page import MODULE, page
from gradstats.files import replace_file

__all__ = ["Explorer"]

_RULES = ("exact", "redsync", "gaussiank", "sidco-e")


class Explorer(anywidget.AnyWidget):  # type: ignore[misc]
    """A view of gradients: what it shows can be read here, and set.

    Parameters
    ----------
    several : sequence of Series
        What to look at.
    ratios : sequence of float
        Kept fractions that were counted.

    Attributes
    ----------
    run : str
        Run, kind and rank: ``resnet20/gradient/0``.
    beside : str
        The same of what is shown beside it; empty for nothing.
    step : int
        Step.
    layer : str
        Layer; ``all`` is the whole gradient.
    ratio : float
        Kept fraction k/d.
    laws, rules : list of str
        Laws that are drawn, and rules. A law that was not fitted is when it is chosen.
    quantity : str
        What the strips show: ``norm``, ``xi``, ``zeros`` or ``rule:NAME``.
    first, last : int or None
        First and last step in view; None for all.
    """

    _esm: ClassVar[Any] = MODULE.read_text(encoding="utf-8")

    payload = traitlets.Unicode().tag(sync=True)
    run = traitlets.Unicode().tag(sync=True)
    beside = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    layer = traitlets.Unicode("all").tag(sync=True)
    ratio = traitlets.Float().tag(sync=True)
    laws = traitlets.List(traitlets.Unicode()).tag(sync=True)
    rules = traitlets.List(traitlets.Unicode()).tag(sync=True)
    quantity = traitlets.Unicode("norm").tag(sync=True)
    first = traitlets.Int(None, allow_none=True).tag(sync=True)
    last = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(self, several: Sequence[Series], ratios: Sequence[float]) -> None:
        # by the name that the page sends back
        self._series = {f"{s.source.name}/{s.kind}/{s.rank}": s for s in several}
        self._ratios = list(ratios)
        run, first = next(iter(self._series.items()))
        super().__init__(
            payload=payload(several, ratios, on_demand=True),
            run=run,
            step=first.steps[-1],
            # the stop nearest to the ratio that papers use most
            ratio=min(ratios, key=lambda ratio: abs(ratio - 0.001)),
            laws=first.models,
            # a few at first: all would hide each other
            rules=[name for name in _RULES if name in first.rules] or first.rules[:4],
        )
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<Explorer {self.run} step={self.step} layer={self.layer} ratio={self.ratio:g}>"

    def save(self, path: str | Path) -> None:
        """Write what is here into a page of its own, which opens with the view that it has by default.

        Parameters
        ----------
        path : str or Path
            File to write, replaced if it exists.
        """
        several = list(self._series.values())
        names = ", ".join(dict.fromkeys(s.source.name for s in several))
        replace_file(path, page(f"Gradients: {names}", payload(several, self._ratios)))

    @traitlets.validate("run", "beside", "step", "layer", "ratio", "laws", "rules", "quantity")
    def _known(self, proposal: Any) -> Any:
        """Refuse what there is not, in one line that says what there is."""
        name, value = proposal["trait"].name, proposal["value"]
        # the run chosen says which steps, layers and rules there are
        series = self._series.get(self.run)
        if series is None:
            raise unknown("run", self.run, self._series)
        known: dict[str, Sequence[Any]] = {
            "run": list(self._series),
            "beside": ["", *self._series],
            "step": series.steps,
            "layer": series.layers,
            "ratio": self._ratios,
            "laws": DRAWN,
            "rules": series.rules,
            "quantity": [
                "norm",
                "xi",
                "zeros",
                "alarm",
                *(f"rule:{rule}" for rule in series.rules),
            ],
        }
        # laws and rules are lists, the others single values
        for one in value if isinstance(value, list) else [value]:
            if one not in known[name]:
                raise unknown(name, str(one), [str(each) for each in known[name]])
        return value

    def _answer(self, _: Any, question: dict[str, Any], __: Any) -> None:
        """Fit the law that the page asks for."""
        # what fails is said on the page: nobody sees an error of a message
        try:
            series = self._series[question["run"]]
            answer = fitted(series, question["step"], question["layer"], question["law"])
        except GradstatsError as error:
            answer = {"params": [], "stderr": [], "tail_error": None, "flags": str(error)}
        self.send({"id": question["id"], "found": _plain(answer)})


def _plain(value: Any) -> Any:
    """Return numbers as JSON has them: None for NaN and infinities."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    # v − v is NaN for NaN and infinities, and 0 for every other number
    return None if isinstance(value, float) and value - value != 0 else value
