"""The rates that LAGS-SGD and Marsit prove, beside softmax regressions in real processes, whose constants are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from bounds import layerwise_bound, one_bit_bound
from ranks import run_ranks
from records import Row

from gradstats.compressors import Compressor, make_compressor

LIMIT_S = 1800
"""Seconds that a training may take, also on a busy machine."""
BATCH = 16
LOOKS = 200
"""Steps of a training, evenly spaced, at which both sides are looked at."""
LAYERS = (64, 640, 2_560, 5_120, 13_056)
"""Elements of the parts that the regression's 21,440 weights are sent in, as if they were layers."""


class Regression:
    """A softmax regression on scikit-learn's digits, with products of pixels as features.

    Attributes
    ----------
    smoothness : float
        Lipschitz constant of the gradient. The Hessian of the mean cross-entropy is at most ½ the largest eigenvalue of
        XᵀX/n.
    weights : tensor of float64, shape (features, 10)
        Zeros at first, with a loss of ln 10; the least is at least 0.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(pixels / 16)
        rows, columns = torch.triu_indices(64, 64)
        x = torch.cat([x, x[:, rows] * x[:, columns]], 1)
        self._x = x / x.norm(dim=1, keepdim=True)
        self._y = torch.from_numpy(labels)
        self.smoothness = 0.5 * float(torch.linalg.eigvalsh(self._x @ self._x.T)[-1]) / len(x)
        self.weights = torch.zeros(x.shape[1], 10, dtype=x.dtype)

    def _errors(self, batch: torch.Tensor) -> torch.Tensor:
        errors = torch.softmax(self._x[batch] @ self.weights, 1)
        errors[torch.arange(len(batch)), self._y[batch]] -= 1
        return errors

    def gradient(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the mean loss of some samples."""
        return (self._x[batch].T @ self._errors(batch) / len(batch)).flatten()

    def drawn(self, generator: torch.Generator) -> torch.Tensor:
        """Return the gradient of a batch that is drawn with replacement."""
        return self.gradient(torch.randint(len(self._x), (BATCH,), generator=generator))

    def moments(self) -> tuple[float, float]:
        """Return ‖∇f‖², and the variance of the gradient of a batch, exactly."""
        everything = torch.arange(len(self._x))
        norm = float(self.gradient(everything).square().sum())
        # rows of x have norm 1, so a sample's gradient has that of its error
        single = float(self._errors(everything).square().sum(1).mean())
        return norm, (single - norm) / BATCH


Step = Callable[[torch.Tensor], torch.Tensor]
Moments = list[tuple[float, float, float]]


def sent_by(compressors: Sequence[Compressor], sizes: Sequence[int]) -> Step:
    """Return a function of a gradient that averages it part by part, with a memory of its own."""
    memory = [torch.zeros(size) for size in sizes]

    def step(gradient: torch.Tensor) -> torch.Tensor:
        means = []
        for i, part in enumerate(gradient.float().split(list(sizes))):
            done = compressors[i].reduce(memory[i] + part, None)
            assert done.mean is not None
            assert done.residual is not None
            means.append(done.mean.double())
            memory[i] = done.residual.clone()
        return torch.cat(means)

    return step


def follow(rank: int, rates: Sequence[float], step: Step) -> Moments:
    """Train; return ‖∇f‖² and the variance of a batch's gradient before some steps, with these steps' rates."""
    task = Regression()
    generator = torch.Generator().manual_seed(rank)
    found: Moments = []
    for t, rate in enumerate(rates):
        if rank == 0 and t % max(1, len(rates) // LOOKS) == 0:
            found.append((rate, *task.moments()))
        task.weights -= step(rate * task.drawn(generator)).view_as(task.weights)
    return found


def layers_in_a_rank(rank: int, _: int, ratio: float, rates: Sequence[float]) -> Moments:
    """Train with top-k of every layer."""
    made = [make_compressor("topk", ratio, exactly=True) for _ in LAYERS]
    return follow(rank, rates, sent_by([each for each in made if each is not None], LAYERS))


def one_bit_in_a_rank(
    rank: int, _: int, every: int, scale: float, rates: Sequence[float]
) -> Moments:
    """Train with Marsit."""
    compressor = make_compressor("marsit", full_every=every, scale=scale)
    assert compressor is not None
    return follow(rank, rates, sent_by([compressor], [sum(LAYERS)]))


def of_layers(world: int, ratio: float, schedule: str, steps: int) -> list[Row]:
    """Return both sides of LAGS-SGD's theorem 1 (corollary 2 where rates are constant)."""
    constant = [1 / math.sqrt(steps)] * steps
    falling = [1 / math.sqrt(t + 1) for t in range(steps)]
    rates = constant if schedule == "constant" else falling
    looks = run_ranks(world, layers_in_a_rank, ratio, rates, limit_s=LIMIT_S)[0]
    # of the mean of all ranks' gradients, whatever point they are taken at
    moment = max(norm + variance / world for _, norm, variance in looks)
    least = min(max(1, round(ratio * size)) / size for size in LAYERS)
    smoothness = Regression().smoothness
    weighted = sum(a * norm for a, norm, _ in looks) / sum(a for a, *_ in looks)
    return [
        {
            "nproc": world,
            "ratio": ratio,
            "schedule": schedule,
            "steps": steps,
            "smoothness": smoothness,
            "second_moment": moment,
            "c_max": 1 / least,
            "weighted": weighted,
            "bound": layerwise_bound(math.log(10), smoothness, moment, least, rates),
            "bound_dense": layerwise_bound(math.log(10), smoothness, moment, 1.0, rates),
        }
    ]


def of_one_bit(world: int, every: int, steps: int) -> list[Row]:
    """Return both sides of Marsit's theorem 1."""
    numel = sum(LAYERS)
    rates = [math.sqrt(world / steps)] * steps
    scale = 1 / math.sqrt(steps * numel)
    looks = run_ranks(world, one_bit_in_a_rank, every, scale, rates, limit_s=LIMIT_S)[0]
    _, norms, variances = zip(*looks, strict=True)
    smoothness = Regression().smoothness
    bound = one_bit_bound(math.log(10), smoothness, max(variances), world, every, steps)
    return [
        {
            "nproc": world,
            "every": every,
            "steps": steps,
            "smoothness": smoothness,
            "variance": max(variances),
            "least": min(norms),
            "mean": statistics.fmean(norms),
            "bound": bound if math.isfinite(bound) else None,
            "steps_needed": 9 * (smoothness * every * (every + 1)) ** 2,
        }
    ]
