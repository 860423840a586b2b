"""Which compression to try, by measured trainings that are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from gradstats.analysis.verdicts.verdict import Verdict, signed_percent
from gradstats.primitives.ratio import shown
from gradstats.tables import format_uncertain

__all__ = [
    "FEWEST_ALIKE",
    "TOO_FEW",
    "Ranks",
    "lossless_ratio",
    "setting_of",
    "sparse_already",
    "what_to_try",
]

FEWEST_ALIKE = 5
"""Measured trainings below which nothing is predicted: of three, SIDCo at 0.1 looked harmless, and was not."""
_MEMORIES = {
    "residual": "with error feedback",
    "none": "without error feedback",
    "adam": "of AdamW's steps (memory=AdamCorrection())",
}
_SPARSE = 0.1
"""Share of elements that are not zero up to which a gradient is sparse already."""
TOO_FEW = ("Too few elements to say", "The largest 1\N{NO-BREAK SPACE}% are fewer than ten.")
"""What is said where no share of the energy can be told."""
Ranks: TypeAlias = Literal["compared", "same", "unknown"]
"""Whether ranks were compared: not where they hold the same gradient, or the gradient of one alone is known."""
_UNCOMPARED = {
    "same": "the ranks hold the same gradient, as after averaging",
    "unknown": "whole gradients of several ranks are not known",
}
_SHORT = "short trainings of small models on two workers"
_TRY = "Next: try it on yours with gradstats.Trial, docs/howto/trial.md"


def what_to_try(
    records: Sequence[Mapping[str, Any]],
    optimizer: str | None,
    held: Mapping[str, Any] | None,
    *,
    usual: float,
    planned: bool,
    nonzero: float,
    enough: bool,
    ranks: Ranks = "compared",
    unlike: str = "",
    unmeasured: str = "",
    fewest: int = FEWEST_ALIKE,
) -> Verdict:
    """Say which compression to try, and what that rests on.

    Parameters
    ----------
    records : sequence of mapping
        Records of :attr:`gradstats.analysis.advise.Advice.records`, that which is recommended first.
    optimizer : str or None
        Name of the training's optimizer, if it is known.
    held : mapping of str to object or None
        What came of advice for trainings that it was made without: tolerance, within, of, settings, constant (in how
        many always the same setting would have been within), and left_out, trainings that it was not judged by; None
        if that advice was made otherwise, with another tolerance or by a plan.
    usual : float
        How far the trainings that such advice rested on were at most.
    planned : bool
        Whether a plan says which settings are faster than dense averaging.
    nonzero : float
        Share of the elements that are not zero, at the step that has most of them.
    enough : bool
        Whether there are elements enough to compare trainings by.
    ranks : {"compared", "same", "unknown"}
        Whether ranks were compared.
    unlike : str, optional
        Name of an optimizer that tells of no family, so that trainings of all count.
    unmeasured : str, optional
        Kind of the gradients, if no training has any of it.
    fewest : int, optional
        Trainings that a setting is judged by at least.

    Returns
    -------
    Verdict
        Its numbers are three sentences or more, a line each.
    """
    if sparse := sparse_already(nonzero, records[0]["ratio"]):
        return Verdict(
            sparse[0], "\n".join((sparse[1], _TRY)) if nonzero else sparse[1], not nonzero
        )
    if not enough:
        return Verdict(*TOO_FEW)
    best, *others = records
    like = "" if optimizer is None else f" with optimizers like {optimizer}"
    known = [r for r in others if r["trainings"] >= fewest]
    if unmeasured or not known:
        why = f"Fewer than {fewest} trainings{like} were measured"
        if unmeasured:
            why = f"No measured training has gradients of the kind {unmeasured}"
        return Verdict("Not known", f"{why}. {_TRY}", True)
    if best["rule"] == "none":
        headline = "Don't compress"
        good = [r for r in known if r["acceptable"]]
        # a plan may know nothing of a setting
        if faster := [r for r in good if r["speedup"] > 1]:
            fastest = max(faster, key=lambda r: r["speedup"])
            times = format_uncertain(*(fastest[f"speedup{end}"] for end in ("", "_low", "_high")))
            basis = (
                f"By the plan a step with {setting_of(fastest)}, which kept the loss, is {times} times as fast as "
                "dense: it may be slower."
            )
        elif good:
            basis = "By the plan no setting that kept the loss is faster than dense averaging."
        else:
            most = max(known, key=lambda r: r["bytes"])
            basis = f"No setting kept the loss in measured trainings{like}: {setting_of(most)} {most['reason']}."
    else:
        headline = f"Try {setting_of(best)}"
        count, models = best["trainings"], best["models"]
        of = "" if models == count else f" of {models} models"
        ends = " to ".join(f"{signed_percent(best[end])} %" for end in ("low", "high"))
        basis = (
            f"In the {count} measured trainings{of}{like} whose gradients are most like these ({best['evidence']}; "
            f"{best['runs']} runs) its mean loss ended {ends} from the dense one: "
            # one model with two optimizers is not two
            f"expect yours above this range in one case of {models + 1} if it is like these, else oftener."
        )
        if math.isinf(best["distance"]):
            basis += " Of some of them no gradients of this kind were measured."
        elif best["distance"] > usual:
            basis += (
                f" It is not much like them: the farthest is {best['distance']:.2g} standard deviations away, and of "
                f"the measured trainings none was farther than {usual:.2g} from its own."
            )
        if ranks in _UNCOMPARED:
            basis += f" How workers differ is not among what is compared: {_UNCOMPARED[ranks]}."
        if planned:
            basis += f" By the plan a step is {best['speedup']:.3g} times as fast as dense."
        else:
            basis += (
                " It is chosen by its bytes, which are not time: to pack them can take longer than it saves. A link "
                "(--link and --compute) tells."
            )
        less = [r for r in known if r["bytes"] < best["bytes"] and not r["acceptable"]]
        if less:
            basis += f" Of what sends less, {setting_of(less[-1])} {less[-1]['reason']}."
    if unlike:
        basis += f" No measured training has an optimizer like {shown(unlike)}: those of all families count."
    caveat = f"These are {_SHORT}."
    if held and best["rule"] != "none":
        always = f", always by {held['settings'][0]}" if len(held["settings"]) == 1 else ""
        but = f" ({held['left_out']} that say little are not counted)" if held["left_out"] else ""
        caveat = (
            f"Made without the training that it was judged on, such advice ended within {100 * held['tolerance']:g} % "
            f"of dense in {held['within']} of {held['of']}{always}{but}."
        )
        # the control: advice that looks at nothing
        if any(within >= held["within"] for within in held["constant"].values()):
            same = ", ".join(f"always {name} in {n}" for name, n in held["constant"].items())
            caveat += f" A rule that looks at no gradient would have, too: {same}."
        caveat += f" These are {_SHORT}."
    return Verdict(headline, "\n".join((basis, caveat, _TRY)))


def sparse_already(nonzero: float, ratio: float | None = None) -> tuple[str, str] | None:
    """Return a headline and what it costs for a gradient of which few elements are not zero; None where there are more.

    Parameters
    ----------
    nonzero : float
        Share of the elements that are not zero.
    ratio : float, optional
        Ratio that is recommended; the least at which nothing is lost by default.

    Returns
    -------
    tuple of (str, str) or None
        What to do, and what it costs.
    """
    if not nonzero:
        return (
            "All its elements are zero: there is nothing to send",
            "Look at steps that have gradients.",
        )
    if nonzero > _SPARSE:
        return None
    least = lossless_ratio(nonzero)
    headline = f"It is sparse already: at ratio {ratio or least:g} nothing is lost"
    share = f"{100 * nonzero:.2g}\N{NO-BREAK SPACE}%"
    return headline, (
        f"All but {share} of its elements are zero at the steps looked at; they cost nothing to leave out."
    )


def lossless_ratio(nonzero: float) -> float:
    """Return a ratio of two digits at which no element that is not zero is left out.

    Parameters
    ----------
    nonzero : float
        Share of the elements that are not zero, above 0.
    """
    digits = 1 - math.floor(math.log10(nonzero))
    # a share that is a number of two digits is that number
    return float(round(math.ceil(nonzero * 10.0**digits - 1e-9) * 10.0**-digits, digits))


def setting_of(record: Mapping[str, Any]) -> str:
    """Return a setting in words.

    Parameters
    ----------
    record : mapping of str to object
        Its rule, ratio and memory.
    """
    if record["ratio"] == 1:
        return str(record["rule"])
    memory = _MEMORIES[record["memory"]]
    return f"{record['rule']} at ratio {record['ratio']:g} {memory}"
