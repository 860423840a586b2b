"""Which exchanges are of one optimizer step: a gradient may be exchanged after each of several backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from gradstats.hooks.torch_private import GradBucket, after_backward, backward_pass, version

__all__ = ["Accumulation"]


class Accumulation:
    """Tell a backward pass that adds to exchanged gradients from one that begins a step.

    It adds to them if ``.grad`` holds, when it begins, what the exchange before has put there.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        Captured parameters.

    Attributes
    ----------
    exchanged : bool
        Whether the gradients were exchanged, and stand so.
    carried : bool
        Whether the backward pass under way adds to such gradients.
    ended : bool
        Whether the last backward pass is known to have ended well.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.exchanged = False
        self.carried = False
        self.ended = False
        # smallest first: the values of one gradient are kept, and compared
        self._parameters = sorted((p for p in parameters if p.numel()), key=torch.Tensor.numel)
        self._result: _Result | None = None
        self._pass = -1
        self._exchanging = -1

    def enter(self, leave: Callable[[], None]) -> bool:
        """Take note of the backward pass under way.

        Parameters
        ----------
        leave : callable
            Called when it is over, unless it fails.

        Returns
        -------
        bool
            Whether it is a new one, and adds to exchanged gradients.
        """
        number = backward_pass()
        # every parameter comes here, and the first of a pass decides
        if number == self._pass:
            return False
        self._pass, self.ended = number, False
        self.carried = self.exchanged and self._result is not None and self._result.stands()
        # what does not stand any more has been used up, or zeroed
        self.exchanged = self.carried
        # after DDP's own callback: only then are the results in the gradients
        after_backward(leave)
        return self.carried

    def exchange(self, bucket: GradBucket) -> bool:
        """Take note of an exchange; tell whether it begins a step.

        Parameters
        ----------
        bucket : GradBucket
            What DDP exchanges.
        """
        number = backward_pass()
        # by the pass, for DDP may skip the first bucket; without one where a rank joins in others' exchanges
        first = bucket.index() == 0 if number < 0 else number != self._exchanging
        self._exchanging = number
        self.exchanged = True
        # a pass that adds to an exchange goes on with its step
        return first and not (self.carried and number == self._pass)

    def leave(self) -> bool:
        """End a backward pass: its results are in the gradients. Return whether it has exchanged them."""
        self.ended = True
        if self.exchanged:
            # one stands for all: what zeroes gradients, or drops them, does so with every one
            self._result = next(
                (_Result(p, p.grad) for p in self._parameters if p.grad is not None), None
            )
        return self._exchanging == self._pass


class _Result:
    """What an exchange has put into the gradient of one parameter: a small one, for its values are kept."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._parameter = parameter
        # weakly: zero_grad(set_to_none=True) is to free the memory
        self._gradient = weakref.ref(gradient)
        self._version = version(gradient)
        # a copy, for DDP may move the gradient into another bucket, where only its values tell
        self._values = gradient.detach().clone()

    def stands(self) -> bool:
        """Tell whether it is still there, as it was."""
        gradient = self._parameter.grad
        if gradient is None:
            return False
        # the version counts writes in place, such as zeroing and clipping
        if gradient is self._gradient():
            return version(gradient) == self._version
        # DDP has made new buckets, and moved the gradients into them; zeros say nothing
        values = self._values
        return (
            gradient.layout == values.layout == torch.strided
            and bool(values.any())
            and torch.equal(gradient, values)
        )
