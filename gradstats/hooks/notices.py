"""What a state says of a training, once of each kind."""

from __future__ import annotations

from gradstats.errors import warn

__all__ = ["Notices"]


class Notices:
    """Warnings, each given once."""

    def __init__(self) -> None:
        # by kind: what one training gets wrong it gets wrong in every step
        self._kinds: set[str] = set()

    def discarded(self, step: int) -> None:
        """Say that an update was thrown away.

        Parameters
        ----------
        step : int
            Number of the step.
        """
        self._say(
            "discarded",
            f"no optimizer took the update of step {step} before its gradient was zeroed, so it is discarded: memory "
            "and counters are as before it. If you apply updates without optimizer.step(), pass "
            "discard_unapplied=False",
        )

    def lost(self, name: str, step: int) -> None:
        """Say that a part of an update was thrown away.

        Parameters
        ----------
        name : str
            A parameter of it.
        step : int
            Number of the step.
        """
        self._say(
            "lost",
            f"the update of {name} in step {step} was zeroed before its optimizer stepped, after another optimizer "
            "had: it is lost, and error feedback counts it as sent. Around a backward pass that must not train a "
            "parameter, set its requires_grad to False, or detach its output; where parts of a model take turns, leave "
            "DDP's gradient_as_bucket_view off",
        )

    def unscaled(self) -> None:
        """Say that a loss scaler is not known."""
        self._say(
            "unscaled",
            "a GradScaler calls the optimizer's step, and this state was not given it: what error feedback keeps of "
            "one scale is added to gradients of another. Pass scaler=",
        )

    def unfrozen(self, name: str) -> None:
        """Say that DDP does not average a parameter.

        Parameters
        ----------
        name : str
            Its name.
        """
        self._say(
            "unfrozen",
            f"{name} requires gradients now, and DDP does not average it: wrap the model again, with a new state",
        )

    def adaptive(self, optimizer: str) -> None:
        """Say what an optimizer of adaptive rates makes of sparse updates.

        Parameters
        ----------
        optimizer : str
            Its kind.
        """
        self._say(
            "adaptive",
            f"{optimizer} behind sparse error feedback: updates come late and bunched, their squares say less of an "
            "element's gradient, and training loses against a dense run what SGD does not lose. At ratios of 0.01 "
            "and below memory=AdamCorrection() with SGD at the same learning rate ended nearer to dense in some "
            "trainings and farther in others (docs/losses.md): compare with a dense run, as gradstats.Trial does",
        )

    def twice(self, memory: str, optimizer: str) -> None:
        """Say that two momenta are one behind the other.

        Parameters
        ----------
        memory, optimizer : str
            Kinds of the memory and of the optimizer.
        """
        self._say(
            "twice",
            f"{memory} steps before the exchange, and {optimizer} has a momentum of its own after it: the momentum "
            "counts twice. Train with torch.optim.SGD without momentum",
        )

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(text)
