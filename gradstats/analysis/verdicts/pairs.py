"""What differs between two runs or checkpoints, and what number formats do to a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradstats.tables import format_bytes, format_value

__all__ = ["first_difference", "smallest_format", "what_changed"]


def first_difference(
    first: Mapping[str, Any] | None,
    unmatched: tuple[Sequence[str], Sequence[str]],
    compared: int,
    held: tuple[int, int],
) -> str:
    """Say where two runs differ first, and why.

    Parameters
    ----------
    first : mapping or None
        The first gradient whose error exceeds the tolerance, as :class:`gradstats.analysis.compare.Comparison` has it.
    unmatched : (list of str, list of str)
        Parameters that only A, and that only B has.
    compared : int
        Number of gradients that were compared, of all steps, ranks and kinds.
    held : (int, int)
        Numbers of those that A and B have.
    """
    only = "; ".join(
        f"{len(names)} {'is' if len(names) == 1 else 'are'} only in {side}: {', '.join(names[:3])}"
        + (", …" if len(names) > 3 else "")
        for side, names in zip("AB", unmatched, strict=True)
        if names
    )
    if first is None:
        sentence = "no difference beyond the tolerance"
        if compared < max(held):
            both = "one gradient" if compared == 1 else f"{compared:,} gradients"
            sentence += f" in {both} compared, of {held[0]:,} in A and {held[1]:,} in B"
            sentence += f"; {only}" if only else ""
        elif only:
            sentence += f" in the parameters that both have, but {only}"
        return sentence
    where = ", ".join(f"{n} {first[n]}" for n in ("step", "rank", "kind", "layer"))
    return f"first difference: {where}; likely cause: {first['cause']}"


def what_changed(whole: Mapping[str, Any]) -> str:
    """Say what share of the weights differs between checkpoints, and the shortest message that says how.

    Parameters
    ----------
    whole : mapping
        Record of :func:`gradstats.delta` over all layers.
    """
    if not whole["changed"]:
        return "no weight differs"
    sizes = {n.removeprefix("bytes_"): v for n, v in whole.items() if n.startswith("bytes_")}
    best = min(sizes, key=sizes.__getitem__)
    share = f"{100 * whole['changed']:.3g} % of the weights differ"
    if whole.get("pairs", 1) > 1:
        share = f"from one to the next {share} on average"
    short = f", {100 * whole['changed_bf16']:.3g} % in bf16" * (whole["dtype"] != "bf16")
    prediction = ""
    if not math.isnan(whole["predicted"]):
        what = {"rate": "updates of this rate", "none": "updates of zero"}.get(
            whole["law"], whole["law"]
        )
        prediction = f" ({100 * whole['predicted']:.3g} % predicted from {what})"
    # beside the share that it predicts: that in the type itself, or that in bf16 of weights in float32
    share += prediction + short if whole["dtype"] == "fp16" else short + prediction
    return (
        f"{share}; the shortest message is {best}: {format_bytes(sizes[best])} of {format_bytes(whole['bytes'])}, "
        f"{format_value(8 * sizes[best] / whole['numel'])} bits a weight"
    )


def smallest_format(
    best: Mapping[str, Any] | None,
    tried: Sequence[Mapping[str, Any]],
    error: float,
    usual: bool = True,
) -> str:
    """Say which number format is the smallest with an error below a limit.

    Parameters
    ----------
    best : mapping or None
        Its record of :func:`gradstats.wire`, if there is one.
    tried : sequence of mapping
        Records of all formats, of the whole gradient.
    error : float
        Limit on the relative squared error.
    usual : bool, optional
        Whether all usual formats were tried, and not some that were chosen.
    """
    # a gradient of zeros has no error
    known = [r for r in tried if not math.isnan(r["worst"])]
    if not known:
        return "no format changes a gradient that is zero"
    shown = best or min(known, key=lambda r: r["worst"])
    what = f"the sum of {shown['ranks']} ranks" if shown["ranks"] > 1 else "the gradient"
    bits = f"{format_value(shown['bits'])} bits an element"
    average, worst = format_value(shown["error"]), format_value(shown["worst"])
    errors = f"an error of {average} on average, and {worst} at worst"
    # where not all is sent, what is left out is an error no format can lower
    if shown["ratio"] < 1:
        return (
            f"at ratio {shown['ratio']:g} {_named(shown)} takes {bits} of the gradient, with positions, and leaves a "
            f"relative squared error of {format_value(shown['error'])} in {what}, of which "
            f"{format_value(shown['dropped'])} is what is not sent"
        )
    if best is None:
        return (
            f"no format that was tried keeps the relative squared error of {what} below {error:g}; "
            f"{_named(shown)} comes closest: {bits}, {errors}"
        )
    smallest = "the smallest format" if usual else "the smallest of the formats tried"
    return (
        f"{smallest} that keeps the relative squared error of {what} below {error:g} is {_named(shown)}: {bits}, "
        f"{errors}"
    )


def _named(record: Mapping[str, Any]) -> str:
    """Return a record's format with what is not plain about it."""
    parts = [record["format"]]
    if record["scale"] == "tensor":
        parts.append("with one scale")
    if record["rounding"] != "nearest":
        parts.append("rounded at random")
    if record["rotation"]:
        parts.append(f"rotated by {record['rotation']}")
    return " ".join(parts)
