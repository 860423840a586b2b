"""How objects of a training show themselves: what runs, which step it is at, and what was sent."""

from __future__ import annotations

import math
from html import escape

from gradstats.tables import format_bytes, format_value, visible
from gradstats.trace.record import StepRecord

__all__ = ["Facts", "compressor_text", "sent_text"]


class Facts:
    """An object that says what it is doing: in a line, and as a table in notebooks."""

    def _facts(self) -> dict[str, str]:
        """Return what there is to say, by its name, the most important first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {text}" for name, text in self._facts().items())
        return f"<{type(self).__name__}: {visible(facts)}>"

    def _repr_html_(self) -> str:
        """Return the table that Jupyter shows."""
        # names and classes of the user's own are shown: escaped for HTML, visible for terminals
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(visible(text))}</td></tr>"
            for name, text in self._facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def compressor_text(compressor: object) -> str:
    """Return the name of a compressor or selector, with its ratio.

    Parameters
    ----------
    compressor : Compressor or Selector
        What averages gradients, or picks elements.
    """
    part = getattr(compressor, "selector", compressor)
    part = getattr(part, "estimator", part)
    name = getattr(part, "name", None) or type(part).__name__
    name = "topk" if name == "exact" else name  # the rule, and the compressor that follows it
    ratio = getattr(compressor, "ratio", None)
    return f"{name} at ratio {ratio:g}" if isinstance(ratio, float) else str(name)


def sent_text(record: StepRecord | None) -> str:
    """Return what this rank sent in a step, in words.

    Parameters
    ----------
    record : StepRecord or None
        Record of the step; None before the first.
    """
    if record is None:
        return "nothing yet"
    text = f"{record.selected:,} of {record.numel:,} elements"
    # NaN where the compressor has no k to compare with
    if not math.isnan(record.quality):
        text += f" (k̂/k {format_value(record.quality)})"
    text += f", {format_bytes(record.bytes_sent)}, in step {record.step}"
    return f"{text}; {record.problem}" if record.problem else text
