"""Which exchanges are of one optimizer step: a gradient may be exchanged after each of several backward passes."""

from __future__ import annotations

from collections.abc import Callable

from capture.taps.layout import Layout
from capture.taps.watch import BackwardWatch
from gradstats.hooks.torch_private import GradBucket, after_backward, backward_pass

__all__ = ["Accumulation"]


class Accumulation:
    """Tell a backward pass that adds to exchanged gradients from one that begins a step.

    It adds to them if ``.grad`` holds, when it begins, what the exchange before has put there.

    Parameters
    ----------
    watch : BackwardWatch
        Knows gradients that are old.
    layout : Layout
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

    def __init__(self, watch: BackwardWatch, layout: Layout) -> None:
        self.exchanged = False
        self.carried = False
        self.ended = False
        self._watch = watch
        self._layout = layout
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
        if number == self._pass:
            return False
        self._pass, self.ended = number, False
        self.exchanged = self.exchanged and self._watch.carries(self._layout.parameters)
        self.carried = self.exchanged
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
        return first and not (self.carried and number == self._pass)

    def leave(self) -> bool:
        """End a backward pass: its results are in the gradients. Return whether it has exchanged them."""
        self.ended = True
        if self.exchanged:
            self._watch.age(self._layout.parameters)
        return self._exchanging == self._pass
