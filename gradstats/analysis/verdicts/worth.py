"""Whether to compress: what it would save, what kept the loss in trainings that were measured, and what is next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradstats.analysis.verdicts.advised import TOO_FEW, sparse_already
from gradstats.analysis.verdicts.verdict import Verdict, joined
from gradstats.tables import format_short

__all__ = ["should_compress"]

_UNIT = "\N{NO-BREAK SPACE}%"
_STANDS_OUT = 2
"""How often the share of a normal vector few elements have to hold, beside many that hold no more than its share."""


def should_compress(
    name: str,
    shares: Mapping[int, Mapping[float, float]],
    even: Mapping[float, float],
    *,
    tried: Verdict | None,
    setting: str,
    nonzero: float,
    advice: Sequence[str],
    unsound: tuple[int, int] = (0, 0),
) -> Verdict:
    """Say whether to compress, in three sentences: what it would save, what it would cost, and what to do next.

    Parameters
    ----------
    name : str
        The source, as a command takes it.
    shares : mapping of int to mapping of float to float
        Share of Σg² that the largest elements hold, by step and ratio; empty where there are too few to say.
    even : mapping of float to float
        That of a normal vector of the same size.
    tried : Verdict or None
        What to try by measured trainings that are alike, as :func:`what_to_try` says it; None if it is not sound.
    setting : str
        That setting in words; empty where none is recommended.
    nonzero : float
        Share of the elements that are not zero.
    advice : sequence of str
        What a plan for a network says.
    unsound : tuple of int
        Number of steps with NaN or infinities, and of steps that were looked at.

    Returns
    -------
    Verdict
        Its numbers are three sentences or more, a line each.
    """
    plan = f"gradstats plan {name} --link 1gbit --rtt 20ms --workers 8 --compute 0.1"
    saves = " ".join(advice) or (
        "What it would save depends on the network, which a gradient does not know: give plan a link."
    )
    if tried is None:
        bad, steps = unsound
        skipped = (
            f" If a loss scaler skipped {'that step' if bad == 1 else 'those steps'}, ask of the others: gradstats "
            f"advise {name} --step …"
        )
        # of some steps which they are; of all, and of files, whose elements info does not count, which layers
        where = (
            f"info {name} --all"
            if bad < steps
            else f"drift {name} --quantity nonfinite --per-layer"
        )
        return Verdict(
            f"Not before the data is sound: NaN or infinite elements at {bad} of {steps} steps looked at",
            f"{saves}\nA sum over workers passes them on to all.{skipped if bad < steps else ''}\n"
            f"Next: gradstats {where}",
            True,
        )
    if sparse := sparse_already(nonzero):
        headline, costs = sparse
        return Verdict(
            headline, f"{saves}\n{costs}\nNext: {plan}" if nonzero else costs, not nonzero
        )
    if not shares or tried.headline == TOO_FEW[0]:
        return Verdict(*TOO_FEW)
    held = {r: [by[r] for by in shares.values() if r in by] for r in next(iter(shares.values()))}
    most = max(held)
    holding = _holding(shares, held)
    # chance makes few elements of a normal vector hold more, and never twice as much of so many
    if all(max(v) <= (1 if r == most else _STANDS_OUT) * even[r] for r, v in held.items()):
        headline = "Hardly: it has no large elements to send"
        # a smaller number format needs none
        if setting.startswith("dense-"):
            headline += f"; if the network is slow, try {setting}"
        costs = f"{holding}, no more than those of a normal vector, {_percent(even[most])} at {most:g}: none stand out."
        return Verdict(headline, f"{saves}\n{costs}\nNext: {plan} --local-steps 20")
    costs = " ".join(tried.numbers.partition("Next:")[0].split())
    if advice:
        headline = advice[0].partition(". ")[0].rstrip(".")
        # a plan knows the network, not what a training loses
        suggestion = setting or tried.headline[0].lower() + tried.headline[1:]
        if "don't compress" not in headline and suggestion not in headline:
            headline += f"; by trainings that were measured: {suggestion}"
        following = f"which rule sends k: gradstats quality {name}; then gradstats.Trial, dense beside compressed"
    elif setting:
        headline, following = f"If the network is slow: try {setting}", plan
    else:
        # local steps leave each worker’s optimizer its dense gradients
        headline, following = tried.headline, f"{plan} --local-steps 20"
    return Verdict(headline, f"{saves}\n{costs} {holding}.\nNext: {following}")


def _holding(shares: Mapping[int, object], held: Mapping[float, Sequence[float]]) -> str:
    """Say what the largest elements hold, over the steps."""
    listed: list[str] = []
    for ratio, values in held.items():
        low, high = _percent(min(values)), _percent(max(values))
        span = high if low == high else f"{low.removesuffix(_UNIT)} to {high}"
        listed.append(f"{span} at {ratio:g}")
    steps = [*shares]
    at = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {joined(map(str, steps))}"
    return f"Here the largest hold {joined(listed)} of Σg² {at}"


def _percent(share: float) -> str:
    return format_short(100 * share) + _UNIT
