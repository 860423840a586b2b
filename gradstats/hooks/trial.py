"""A short run of one's own training, dense beside compressed, that confirms or refuses the compression."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradstats.analysis.verdicts import Verdict, trial_result
from gradstats.collectives.plain import all_reduce_mean
from gradstats.errors import InputError, NonFiniteGradientError
from gradstats.primitives.ratio import check_count, check_number, check_seed, shown
from gradstats.tables import Record, Records, Shown

__all__ = ["Decision", "Train", "Trial", "TrialResult", "decide"]

Decision: TypeAlias = Literal["confirmed", "refused", "undecided"]
"""Whether the compressed loss stays within the tolerance of the dense one."""
LEVEL = 0.05
"""Share of trials in which a wrong "confirmed" is allowed, and of those in which a wrong "refused" is."""
_FEWEST = 3
_SAME = 1e-3
"""Relative difference of two losses up to which they are of the same batch and weights."""
_AGAIN = 20
"""Most steps of the dense training that are repeated: rounding in another order has not grown yet."""


class Train(Protocol):
    """A training that a :class:`Trial` runs."""

    def __call__(
        self, install: Callable[[torch.nn.Module], Any], seed: int
    ) -> Iterator[float | torch.Tensor]:
        """Train from a seed, and yield the loss of every step.

        Parameters
        ----------
        install : callable
            To be called with the model, DDP's or another, before the first step. It returns what the trial's own
            `install` returns, and None in the dense runs.
        seed : int
            Seed of the weights, the batches and everything else that is drawn.

        Yields
        ------
        float or tensor of one element
            This rank's loss of each step.
        """
        ...


def decide(above: Sequence[float], tolerance: float, pairs: int) -> tuple[Decision, float, float]:
    """Decide from a few pairs of runs whether the compressed loss stays within the tolerance.

    Parameters
    ----------
    above : sequence of float
        Relative differences of the losses, compressed ÷ dense − 1, of pairs of the same seed.
    tolerance : float
        Largest mean difference that is acceptable.
    pairs : int
        Most pairs that will be run.

    Returns
    -------
    decision : {"confirmed", "refused", "undecided"}
        Confirmed if the upper bound of the mean is within the tolerance, refused if the lower one is above it.
    low, high : float
        The bounds. Infinite where this is not one of the numbers of pairs at which a decision may fall.

    Notes
    -----
    Each bound is Student's t for the mean of the pairs. A decision may fall after 3, about half of, and all pairs, so
    each look spends an equal share of :data:`LEVEL` (Bonferroni): over all looks, either wrong decision has at most
    that share if the differences are normal.
    """
    from scipy.special import stdtrit

    # fixed beforehand: a look after every pair would spend the level on each
    looks = _looks(pairs)
    n = len(above)
    if n not in looks:
        return "undecided", -math.inf, math.inf
    # the standard error of the mean; ddof=1, as the mean is estimated from the same pairs
    mean, error = float(np.mean(above)), float(np.std(above, ddof=1)) / math.sqrt(n)
    margin = error * float(stdtrit(n - 1, 1 - LEVEL / len(looks)))
    low, high = mean - margin, mean + margin
    return (
        "confirmed" if high <= tolerance else "refused" if low > tolerance else "undecided",
        low,
        high,
    )


def _looks(pairs: int) -> list[int]:
    """Return the numbers of pairs after which a decision may fall."""
    return sorted({_FEWEST, (_FEWEST + pairs) // 2, pairs})


@dataclass(frozen=True, slots=True, repr=False)
class TrialResult(Shown):
    """What a :class:`Trial` found.

    Attributes
    ----------
    decision : {"confirmed", "refused", "undecided"}
        Whether the compressed loss stays within the tolerance of the dense one.
    above, low, high : float
        Relative difference of the losses, compressed ÷ dense − 1, mean over the pairs, and its bounds: each is wrong in
        at most 5 of 100 trials.
    tolerance : float
        Largest difference that was to be accepted.
    pairs : Records
        One record a pair: seed, dense, compressed (mean loss of the steps that are judged) and above.
    losses : ndarray, shape (pairs, 2, steps)
        Losses of all steps, mean over the ranks, dense first.
    diverged : str
        Where a compressed run had a loss that is not finite; empty if none had.
    same_ranks : bool
        Whether all ranks had the same dense losses, as with the same batches.
    fell : float
        How far the dense loss fell from the first tenth of the steps to those that are judged, as a share of the loss
        there, mean over the pairs: a training that hardly learns stays near dense whatever is sent.
    """

    decision: Decision
    above: float
    low: float
    high: float
    tolerance: float
    pairs: Records
    losses: NDArray[np.float64]
    diverged: str = ""
    fell: float = math.nan
    same_ranks: bool = False

    @property
    def verdict(self) -> Verdict:
        """The decision and its numbers in words.

        Returns
        -------
        Verdict
            A headline, and the sentences behind it.
        """
        return trial_result(
            self.decision,
            (self.above, self.low, self.high),
            tolerance=self.tolerance,
            pairs=len(self.pairs),
            steps=self.losses.shape[-1],
            # a hook that was never registered confirms anything
            equal=np.array_equal(self.losses[:, 0], self.losses[:, 1]),
            diverged=self.diverged,
            fell=self.fell,
            same_ranks=self.same_ranks,
        )

    def _rows(self) -> Sequence[Record]:
        return self.pairs

    def __str__(self) -> str:
        return str(self.verdict)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.verdict.headline}; {len(self.pairs)} pairs>"


class Trial:
    """A paired short run: the same training dense and compressed, from the same seeds and batches.

    Pairs of runs are added until the answer is known: after three, about half of, and all of them. A compressed run
    that diverges ends the trial. The first steps of a dense run are repeated, which shows schedules, iterators and
    counters that runs share. Under torch.distributed every rank runs the trial, losses are averaged over the ranks,
    and all ranks decide alike.

    Parameters
    ----------
    train : callable
        The training, a generator function, see :class:`Train`.
    install : callable
        Compresses a model: ``install(ddp)`` registers a hook, for example.
    steps : int
        Steps of each run.
    tolerance : float, optional
        How far above the dense loss is acceptable, as a share of it.
    pairs : int, optional
        Most pairs to run, at least 3.
    last : float, optional
        Share of the steps, at the end, whose mean loss is judged.
    seed : int, optional
        Seed of the first pair; the others count up from it.
    group : torch.distributed.ProcessGroup, optional
        The ranks, if the training is distributed; the default group if None.

    Raises
    ------
    InputError
        If a number is out of range.

    Notes
    -----
    Losses of the first `steps` steps say nothing of later ones: in longer trainings the gap to dense grew, and a
    learning rate that falls may close one or show one. The losses are those that `train` yields, of held-out data if
    it so chooses.

    PyTorch's own random state is seeded for each run and restored; Python's and NumPy's are the training's to seed.

    Examples
    --------
    >>> import torch
    >>> from gradstats.hooks import Trial
    >>> def train(install, seed):
    ...     model = torch.nn.Linear(4, 1)
    ...     coarse = install(model)
    ...     for _ in range(40):
    ...         x = torch.randn(16, 4)
    ...         loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    ...         yield loss
    ...         model.zero_grad()
    ...         loss.backward()
    ...         with torch.no_grad():
    ...             for p in model.parameters():
    ...                 p -= 0.1 * (p.grad.sign() if coarse else p.grad)
    >>> print(Trial(train, lambda model: True, steps=40).run().verdict.headline)
    Refused: more than 2 % above the dense loss
    """

    def __init__(
        self,
        train: Train,
        install: Callable[[Any], Any],
        *,
        steps: int,
        tolerance: float = 0.02,
        pairs: int = 8,
        last: float = 0.25,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, function in (("train", train), ("install", install)):
            if not callable(function):
                raise InputError(f"{name} must be a function, not {shown(function)}")
        self.train, self.install = train, install
        self.steps = check_count(steps, "steps")
        self.tolerance = check_number(tolerance, "tolerance", 0, math.inf)
        self.pairs = check_count(pairs, "pairs", _FEWEST)
        self.last = check_number(last, "last", 0, 1, "(]", ", a share of the steps")
        self.seed = check_seed(seed)
        self.group = group

    def run(self, on_progress: Callable[[int, int], object] | None = None) -> TrialResult:
        """Run pairs until it is decided.

        Parameters
        ----------
        on_progress : callable, optional
            Called after each run of a pair with the number of these done and the most that there may be.

        Returns
        -------
        TrialResult
            The decision, its bounds and all losses.

        Raises
        ------
        InputError
            If the training yields fewer losses than there are steps, never calls `install`, is not the same
            twice from one seed, is the same from two, or if its dense loss is not finite or not positive.
        """
        pairs = Records()
        losses: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        alike = True
        judged = slice(-max(1, round(self.last * self.steps)), None)
        decision: Decision = "undecided"
        low, high, diverged = -math.inf, math.inf, ""
        while decision == "undecided" and len(pairs) < self.pairs:
            seed = self.seed + len(pairs)
            both = []
            for install in (None, self.install):
                both.append(self._run(seed, install, self.steps))
                if on_progress is not None:
                    on_progress(2 * len(pairs) + len(both), 2 * self.pairs)
            dense, compressed = (run.losses for run in both)
            # losses are means over the ranks: all of them raise here, or none does
            _check(seed, dense, compressed, both[1].refused)
            if not pairs:
                again = self._run(seed, None, min(self.steps, _AGAIN)).losses
                # sums on a GPU may differ from run to run; less than that decides nothing
                _check_again(seed, dense, again, max(_SAME, self.tolerance / 4))
            _check_drawn(self.seed, [pair[0] for pair in losses], dense)
            alike = alike and both[0].alike
            losses.append((dense, compressed))
            ends = {"dense": dense[judged].mean(), "compressed": compressed[judged].mean()}
            if ends["dense"] <= 0:
                raise InputError(
                    f"the dense loss of seed {seed} is {ends['dense']:.4g}, and no share of it can be a tolerance: "
                    "yield a loss that is positive"
                )
            above = float(ends["compressed"] / ends["dense"] - 1)
            pairs.append({"seed": seed, **{n: float(v) for n, v in ends.items()}, "above": above})
            if both[1].refused:
                diverged, decision = _REFUSED.format(seed=seed, error=both[1].refused), "refused"
            elif (at := _not_finite(seed, compressed)) is not None:
                diverged, decision = f"Its loss is {at}; dense it was finite.", "refused"
            else:
                decision, low, high = decide(
                    [r["above"] for r in pairs], self.tolerance, self.pairs
                )
        mean = float(np.mean([r["above"] for r in pairs]))
        every = np.array(losses)
        first = every[:, 0, : max(1, self.steps // 10)].mean(axis=1)
        fell = float(np.mean(first / [r["dense"] for r in pairs])) - 1
        return TrialResult(
            decision, mean, low, high, self.tolerance, pairs, every, diverged, fell, alike
        )

    def _run(self, seed: int, install: Callable[[Any], Any] | None, steps: int) -> _Run:
        """Train for some steps."""
        devices: list[torch.device] = []

        def installed(model: torch.nn.Module) -> Any:
            devices.append(next((p.device for p in model.parameters()), torch.device("cpu")))
            return None if install is None else install(model)

        # the last place says how many there are: that one rank yields too few is found by all of them together, where
        # its last steps exchange nothing; a collective that the others wait for in vain fails by itself
        losses = np.full(steps + 1, np.nan)
        refused = ""
        # all of them, as nobody knows where the training draws; fork_rng restores those it is told
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            run = self.train(installed, seed)
            if not isinstance(run, Iterable):
                raise InputError(_NO_LOSSES.format(f"returned {type(run).__name__}"))
            run = iter(run)
            count = 0
            try:
                # range first: the other way round zip would train one step more before it stops
                for count, loss in zip(range(1, steps + 1), run, strict=False):
                    losses[count - 1] = _number(loss)
            except NonFiniteGradientError as error:
                # raised on all ranks alike, by a hook; the losses that are lacking then are NaN
                if install is None:
                    raise
                refused, count = str(error).rstrip("."), steps
            finally:
                if isinstance(run, Generator):
                    # ends the training's own with blocks now, and not when the collector comes
                    run.close()
                del run
                gc.collect()  # a DDP model and its hook hold each other, and buffers of the gradient's size
        # a mean of −∞ tells every rank that one of them has no model
        losses[-1] = count if devices else -math.inf
        local = losses.copy()
        several = dist.is_initialized() and dist.get_world_size(self.group) > 1
        if dist.is_initialized():
            # NCCL takes tensors of the model's device alone
            values = torch.from_numpy(losses).to(devices[0] if devices else "cpu")
            losses = all_reduce_mean(values, self.group).cpu().numpy()
        if losses[-1] < 0:
            raise InputError("train must call install(model) before its first step")
        if losses[-1] < steps:
            raise InputError(
                f"train must yield a loss for each of the {steps} steps; on this rank it yielded {count}"
            )
        # the mean of equal numbers is that number, up to the last bit
        return _Run(losses[:-1], refused, several and np.allclose(local, losses, 1e-12, 0))


class _Run(NamedTuple):
    """Losses of a run, mean over the ranks; why a hook refused a gradient; whether the ranks' losses are the same."""

    losses: NDArray[np.float64]
    refused: str
    alike: bool


_REFUSED = (
    "Its hook refused a gradient in the run of seed {seed}, {error}; dense no loss was NaN or infinite. Where a loss "
    "scaler is to skip such a step, pass it to the hook's state (scaler=)."
)
_NO_LOSSES = "train must be a generator that yields the loss of each step, one number; it {}"


def _number(loss: Any) -> float:
    """Return a loss as a number."""
    try:
        values = torch.as_tensor(loss).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(_NO_LOSSES.format(f"yielded {shown(loss)}")) from error
    if values.numel() != 1:
        raise InputError(_NO_LOSSES.format(f"yielded {values.numel()} numbers"))
    return float(values)


def _check(
    seed: int, dense: NDArray[np.float64], compressed: NDArray[np.float64], refused: str
) -> None:
    """Refuse two runs that are no pair."""
    if (at := _not_finite(seed, dense)) is not None:
        raise InputError(f"the dense training has a loss of {at}")
    if refused and math.isnan(compressed[0]):
        return  # before its first loss
    if not math.isclose(dense[0], compressed[0], rel_tol=_SAME):
        raise InputError(
            f"the first losses of seed {seed} differ, {dense[0]:.6g} dense and {compressed[0]:.6g} compressed, "
            "before any step: draw weights and batches from the seed that train is given, and yield a loss before the "
            "step that it leads to"
        )


def _check_again(
    seed: int, dense: NDArray[np.float64], again: NDArray[np.float64], within: float
) -> None:
    """Refuse a training that runs share something of: the compressed one would not begin where the dense one did."""
    first = dense[: len(again)]
    apart = ~np.isclose(again, first, rtol=within, atol=0)
    if apart.any():
        step = int(np.argmax(apart))
        raise InputError(
            f"the dense training of seed {seed} is not the same twice, its loss at step {step} was {first[step]:.6g} "
            f"and then {again[step]:.6g}: make optimizers, schedules, iterators and counters in train"
        )


def _check_drawn(
    first: int, others: Sequence[NDArray[np.float64]], dense: NDArray[np.float64]
) -> None:
    """Refuse a training that is the same from every seed: its pairs would be one observation that counts as many."""
    for seed, other in enumerate(others, first):
        if np.array_equal(other, dense):
            raise InputError(
                f"the dense losses of the seeds {seed} and {first + len(others)} are the same: draw weights or batches "
                "from the seed that train is given"
            )


def _not_finite(seed: int, losses: NDArray[np.float64]) -> str | None:
    """Return the first loss that is not finite, and where it is."""
    finite = np.isfinite(losses)
    step = int(np.argmin(finite))
    return None if finite.all() else f"{losses[step]} at step {step} of seed {seed}"
