"""Policy gradient on the pole that is balanced on a cart.

Source: Williams 1992 (REINFORCE); Barto, Sutton and Anderson 1983 for the cart, whose equations are integrated here.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.sharding import whole
from capture.workloads.task import Task, generator

__all__ = ["Policy", "example", "make_model", "make_task"]

_WIDTH, _LONGEST, _DISCOUNT = 128, 200, 0.98
_GRAVITY, _CART, _POLE, _HALF, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_FAR, _TILT = 2.4, 12 * torch.pi / 180
"""Metres from the middle and radians from upright at which an episode ends."""


class Policy(nn.Module):
    """Two hidden layers of 128, from place, speed, angle and its speed to the scores of pushing left and right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, _WIDTH),
            nn.Tanh(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.Tanh(),
            nn.Linear(_WIDTH, 2),
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return the scores of both actions.

        Parameters
        ----------
        states : float32 tensor, shape (..., 4)
            States of carts.

        Returns
        -------
        tensor, shape (..., 2)
            Scores.
        """
        scores: Tensor = self.layers(states)
        return scores


def _moved(states: Tensor, right: Tensor) -> Tensor:
    """Return the states of carts a fiftieth of a second after they are pushed."""
    # the place has no part in the equations
    speed, angle, turning = states[:, 1:].unbind(1)
    sine, cosine, mass = angle.sin(), angle.cos(), _CART + _POLE
    pushed = (_FORCE * (2 * right - 1) + _POLE * _HALF * turning**2 * sine) / mass
    # of the angle and of the cart, without friction; _HALF is half of the pole's length
    turn = (_GRAVITY * sine - cosine * pushed) / (_HALF * (4 / 3 - _POLE * cosine**2 / mass))
    push = pushed - _POLE * _HALF * turn * cosine / mass
    # one step of Euler's method
    return states + _SECONDS * torch.stack([speed, push, turning, turn], 1)


def make_model(config: RunConfig) -> Policy:
    """Build the model of a run."""
    return Policy()


def example(config: RunConfig) -> tuple[Tensor]:
    """Return random states."""
    return (torch.randn(config.setting("batch_size"), 4),)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's carts, one a sample of the batch."""
    model, count = make_model(config), config.setting("batch_size")
    # plays the episodes: these end at different steps, so that ranks call it in different numbers, and neither DDP nor
    # a sharded model may be called like that
    actor = copy.deepcopy(model)

    def loss(network: nn.Module, step: int) -> Tensor:
        with torch.no_grad():
            for mine, trained in zip(actor.parameters(), model.parameters(), strict=True):
                mine.copy_(whole(trained))
        random = generator(config.seed, step, rank + 1)
        state = 0.1 * torch.rand(count, 4, generator=random) - 0.05
        up = torch.ones(count, dtype=torch.bool)
        states: list[Tensor] = []
        pushes, alive = [], []
        while up.any() and len(states) < _LONGEST:
            with torch.no_grad():
                right = torch.rand(count, generator=random) < actor(state).softmax(1)[:, 1]
            states.append(state)
            pushes.append(right.long())
            alive.append(up)
            state = _moved(state, right.float())
            # carts that have ended stay in the batch, and count nothing
            up = up & (state[:, 0].abs() < _FAR) & (state[:, 2].abs() < _TILT)
        still, to_come = torch.stack(alive).float(), torch.zeros(count)
        returns = torch.empty_like(still)
        # from the end: a return is the reward and what follows it, discounted
        for i in reversed(range(len(states))):
            to_come = still[i] + _DISCOUNT * to_come
            returns[i] = to_come
        # over the states that were reached
        baseline = (returns * still).sum() / still.sum()
        deviation = (((returns - baseline) ** 2 * still).sum() / still.sum()).sqrt()
        advantage = (returns - baseline) / (deviation + 1e-6) * still
        logs = network(torch.stack(states)).log_softmax(2)
        taken = logs.gather(2, torch.stack(pushes)[..., None])[..., 0]
        surrogate = -(taken * advantage).sum() / still.sum()
        # the value is what is to fall, the share of the longest episode that is lost; the slope is the policy gradient
        lost = 1 - still.sum() / (count * _LONGEST)
        value: Tensor = lost + surrogate - surrogate.detach()
        return value

    return Task(model, loss)
