"""Whether a compressed training stays near the dense one."""

from __future__ import annotations

from gradstats.analysis.verdicts.verdict import Verdict, signed_percent
from gradstats.tables import format_short

__all__ = ["LITTLE", "trial_result"]

LITTLE = 5
"""Tolerances that a dense loss has to fall by: what hardly learns ends within one of them whatever is sent."""


def trial_result(
    decision: str,
    difference: tuple[float, float, float],
    *,
    tolerance: float,
    pairs: int,
    steps: int,
    equal: bool,
    diverged: str,
    fell: float,
    same_ranks: bool = False,
) -> Verdict:
    """Say what pairs of a dense and a compressed training have shown.

    Parameters
    ----------
    decision : {"confirmed", "refused", "undecided"}
        Whether the compressed loss ends no further above the dense one than the tolerance.
    difference : (float, float, float)
        Relative difference of the losses, mean over the pairs, and its bounds.
    tolerance : float
        Largest difference that was to be accepted.
    pairs, steps : int
        Number of pairs, and of the steps of each run.
    equal : bool
        Whether all losses of both sides are equal.
    diverged : str
        Where a compressed run had a loss or a gradient that is not finite; empty if none had.
    fell : float
        How far the dense loss fell, as a share of where it ended; NaN if that is not known.
    same_ranks : bool
        Whether all ranks had the same dense losses.
    """
    limit = f"{100 * tolerance:g} % above the dense loss"
    runs = f"{pairs} pairs of {steps} steps"
    if diverged:
        return Verdict("Refused: the compressed training met NaN or infinity", diverged, True)
    ends = [*map(signed_percent, difference)]
    numbers = (
        f"The compressed loss ends {ends[0]} % from the dense one ({ends[1]} to {ends[2]}, {runs}), "
        f"tolerance {100 * tolerance:g} %."
    )
    if same_ranks:
        numbers += (
            " All ranks had the same losses: unless these are of data that all of them hold, draw batches by rank, or "
            "it is a trial of one worker."
        )
    if equal:
        return Verdict(
            "Confirmed, or not tried: no loss differs from the dense one",
            f"{numbers} Either what was installed loses nothing, or it is not in use: see that install registers it.",
            True,
        )
    if decision == "confirmed":
        # NaN is not below anything
        little = fell < LITTLE * tolerance
        if little:
            moved = f"fell by {format_short(100 * fell)} % of where it ended"
            moved = moved if fell > 0 else "did not fall"
            numbers += (
                f" That says little: the dense loss itself {moved}. Take more steps, or a tolerance that is a small "
                "share of that fall."
            )
        return Verdict(f"Confirmed: at most {limit}", numbers, little)
    if decision == "refused":
        return Verdict(f"Refused: more than {limit}", numbers, True)
    return Verdict("Undecided", f"{numbers} More pairs, or longer ones, would tell.", True)
