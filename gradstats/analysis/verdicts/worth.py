"""Whether to compress: what it would save, what it cost in trainings that were measured, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradstats.analysis.verdicts.verdict import Verdict, joined, signed
from gradstats.primitives.ratio import RATIOS

__all__ = ["EVIDENCE", "LITTLE", "Training", "is_adaptive", "should_compress"]

LITTLE = 0.05
"""Nats above dense training up to which a loss is small."""
_UNIT = "\N{NO-BREAK SPACE}%"
_SPARSE = 0.1
"""Share of elements that are not zero up to which a gradient is sparse already."""
_ADAPTIVE = ("ada", "lamb", "lion", "muon", "prodigy", "rms", "shampoo", "soap")
"""What is in the names of optimizers whose step is not proportional to the gradient, as in FusedAdam and Adam8bit."""


@dataclass(frozen=True, slots=True)
class Training:
    """How far trainings with ``topk`` and error feedback ended above dense ones of the same seeds.

    Attributes
    ----------
    name : str
        What was trained.
    results : str
        File of docs/results that has the runs.
    optimizer : str
        Optimizer, in words.
    adaptive : bool
        Whether its step is not proportional to the gradient.
    behind : mapping of float to (float, float)
        By ratio, least and most nats over the seeds that the loss ended above the dense one, on data not trained on.
    early : mapping of float to float
        By ratio, nats that the training loss of the first tenth of the steps was above; mean over the seeds.
    """

    name: str
    results: str
    optimizer: str
    adaptive: bool
    behind: Mapping[float, tuple[float, float]]
    early: Mapping[float, float]


EVIDENCE = (
    Training(
        "ResNet-8 on CIFAR-10",
        "plateau-resnet8-cifar16.jsonl",
        "SGD with momentum",
        False,
        {0.1: (0.00, 0.01), 0.01: (0.04, 0.08), 0.001: (0.23, 0.31)},
        {0.1: 0.01, 0.01: 0.05, 0.001: 0.16},
    ),
    Training(
        "an LSTM on the Penn Treebank",
        "plateau-lstm-ptb.jsonl",
        "SGD with momentum",
        False,
        {0.1: (-0.02, 0.02), 0.01: (0.05, 0.07), 0.001: (0.19, 0.28)},
        {0.1: 0.00, 0.01: 0.02, 0.001: 0.09},
    ),
    Training(
        "a small GPT on Python's manual",
        "plateau-gpt-pydoc.jsonl",
        "AdamW",
        True,
        {0.1: (0.19, 0.21), 0.01: (0.58, 0.66), 0.001: (1.12, 1.20)},
        {0.1: 0.25, 0.01: 0.46, 0.001: 0.63},
    ),
)
"""Trainings of two workers from three seeds, to a plateau."""


def is_adaptive(optimizer: str) -> bool:
    """Return whether an optimizer's step is not proportional to the gradient.

    Parameters
    ----------
    optimizer : str
        Name of the optimizer.
    """
    return any(name in optimizer.lower() for name in _ADAPTIVE)


def should_compress(
    name: str,
    shares: Mapping[int, Mapping[float, float]],
    even: Mapping[float, float],
    *,
    optimizer: str | None,
    ratio: float | None,
    nonzero: float,
    sound: bool,
    advice: Sequence[str],
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
    optimizer : str or None
        Name of the training's optimizer, if it is known.
    ratio : float or None
        Ratio that the training sent, if it did.
    nonzero : float
        Share of the elements that are not zero.
    sound : bool
        Whether all elements are finite.
    advice : sequence of str
        What a plan for a network says.

    Returns
    -------
    Verdict
        Its numbers are three sentences or more, a line each.
    """
    plan = f"gradstats plan {name} --link 1gbit --rtt 20ms --workers 8 --compute 0.1"
    saves = " ".join(advice) or (
        "What it would save depends on the network, which a gradient does not know: give plan a link."
    )
    if not shares:
        return Verdict("Too few elements to say", "No ratio in use leaves ten of them.")
    if not sound:
        return Verdict(
            "Not before the data is sound: it has NaN or infinite elements",
            f"{saves}\nA sum over workers passes them on to all.\nNext: gradstats info {name}",
            True,
        )
    if nonzero <= _SPARSE:
        headline = f"It is sparse already: at ratio {nonzero:.2g} nothing is lost"
        costs = f"All but {_percent(nonzero)} of its elements are zero, which cost nothing to leave out."
        return Verdict(headline, f"{saves}\n{costs}\nNext: {plan}")
    held = {r: [by[r] for by in shares.values() if r in by] for r in next(iter(shares.values()))}
    most = max(held)
    holding = _holding(shares, held)
    if max(held[most]) <= even[most]:
        headline = "Hardly: it has no large elements to send"
        costs = (
            f"{holding}, those of a normal vector {_percent(even[most])} at {most:g}: to choose the largest is hardly "
            "better than to choose at random, which every training that was measured lost by."
        )
        return Verdict(headline, f"{saves}\n{costs}\nNext: {plan} --local-steps 20")
    adaptive = None if optimizer is None else is_adaptive(optimizer)
    # of an unknown optimizer both families are told
    measured = [t for t in EVIDENCE if adaptive is None or t.adaptive is adaptive]
    costs = " ".join(_cost(measured, family, ratio) for family in (False, True)).strip()
    small = _ratio_of_little(measured)
    if advice:
        headline = advice[0].partition(". ")[0].rstrip(".")
        # a plan knows the network, not what a training loses
        if adaptive and "don't compress" not in headline:
            headline += f"; but behind {optimizer} it cost much"
        following = (
            "train both ways for a tenth of the steps and compare the losses; which rule sends k: "
        )
        following += f"gradstats quality {name}"
    elif adaptive:
        headline = f"Not behind {optimizer}, by what was measured"
        # local steps leave each worker’s optimizer its dense gradients
        following = f"{plan} --local-steps 20"
    else:
        headline = f"If the network is slow: topk with error feedback, at ratio {small:g}"
        headline += "" if optimizer else "; not behind Adam"
        following = plan
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


def _cost(measured: Sequence[Training], adaptive: bool, own: float | None) -> str:
    """Say what trainings with one kind of optimizer lost."""
    family = [t for t in measured if t.adaptive is adaptive]
    if not family:
        return ""
    ratios = [r for r in family[0].behind if all(r in t.behind for t in family)]
    ends = {
        r: (min(t.behind[r][0] for t in family), max(t.behind[r][1] for t in family))
        for r in ratios
    }
    listed: list[str] = []
    for ratio, (low, high) in ends.items():
        span = signed(low) if low == high else f"{signed(low)} to {signed(high)}"
        unit = "" if listed else " nats above dense training"
        listed.append(f"{span}{unit} at {ratio:g}{' (this run’s ratio)' if ratio == own else ''}")
    of = joined([t.name for t in family])
    # the smallest ratio is behind most, and soonest
    early = max(t.early[ratios[-1]] for t in family)
    text = (
        f"Trained by {family[0].optimizer}, topk with error feedback ended {joined(listed)} "
        f"({of}; 2 workers, 3 seeds), and at {ratios[-1]:g} up to {early:.2f} above it in the first tenth of the steps."
    )
    if not adaptive:
        text += " Sending all in the first twentieth (redsync) mended most of that for the ResNet, not for the LSTM."
    return text


def _ratio_of_little(measured: Sequence[Training]) -> float:
    """Return the smallest ratio at which no training without an adaptive optimizer lost more than :data:`LITTLE`."""
    plain = [t for t in measured if not t.adaptive]
    ratios = [r for t in plain for r, (_, high) in t.behind.items() if high <= LITTLE]
    return min((r for r in ratios if ratios.count(r) == len(plain)), default=max(RATIOS))


def _percent(share: float) -> str:
    # two digits of 99.5 and more would be 1e+02
    return (f"{100 * share:.2g}" if share < 0.995 else "100") + _UNIT
