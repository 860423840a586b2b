"""A part of a model whose pseudo-gradient the ranks exchange: sent, waited for, applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gradstats.collectives.background import Background, Pending
from gradstats.collectives.header import Kind
from gradstats.collectives.plain import all_gather_flags
from gradstats.errors import ExchangeError, InputError
from gradstats.hooks.contents import check_values, field
from gradstats.hooks.gradient import Pair
from gradstats.hooks.layout import check_patterns, matching
from gradstats.hooks.shards import bad_in_replica, exchange
from gradstats.hooks.state import CompressionState
from gradstats.hooks.units import as_sharded, local_part, stand_in
from gradstats.primitives.ratio import check_count, check_several, shown

__all__ = ["Fragment", "Named", "divide", "local_values"]

Named = list[tuple[str, torch.Tensor]]
"""Names and parameters."""


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, which shares its memory, for arithmetic that autograd does not see.

    Parameters
    ----------
    tensor : torch.Tensor
        A tensor, sharded or not.
    """
    return local_part(tensor.detach())


# Size: two lines beyond 300, of which 131 are docstrings.
class Fragment:
    """Parameters that are exchanged together.

    An exchange is :meth:`pseudogradients`, :meth:`send` and :meth:`apply`, the last when its step has come.

    Parameters
    ----------
    named : list of (str, torch.Tensor)
        Names and parameters.
    offset : int
        Local steps into an interval after which it is exchanged, from 1 to the length of the interval.
    within : torch.distributed.ProcessGroup, optional
        Ranks that hold the shards of one replica; None if the model is not sharded.
    build : callable
        Makes the state of compression, given ``named_parameters``.

    Attributes
    ----------
    named : list of (str, torch.Tensor)
        Names and parameters.
    offset : int
        As given.
    state : CompressionState
        Memory and compressor.
    anchors : dict of str to tensor
        The parameters at the last exchange, what this rank holds of them, by name.
    pairs : list of (parameter, pseudo-gradient)
        What is exchanged, and the mean once that is done; empty if no exchange is under way.
    sent : int
        Local step of the last exchange.
    due : int
        Local step at which the exchange under way is applied.
    """

    def __init__(
        self,
        named: Named,
        offset: int,
        within: dist.ProcessGroup | None,
        build: Callable[..., CompressionState],
    ) -> None:
        self.named = named
        self.offset = offset
        # of sharded parameters the state knows what this rank holds
        self._known = {id(p): stand_in(p) for _, p in named}
        self.state = build(named_parameters=[(n, self._known[id(p)]) for n, p in named])
        # a rank may be at its end, or at another step, where another one exchanges
        self.state.agreement.announces = True
        # the optimizer steps between exchanges, and an outer one takes the update
        self.state.forget_optimizers()
        self.anchors: dict[str, torch.Tensor] = {}
        self.pairs: list[Pair] = []
        self.sent = self.due = 0
        self._within = within
        self._pending: Pending[None] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.named[0][1].device

    def anchor(self) -> None:
        """Take the parameters as they are for those of the last exchange."""
        self.anchors = {n: local_values(p).clone() for n, p in self.named}

    def moved(self) -> bool:
        """Tell whether a parameter is not its anchor: another value, dtype or device."""
        for name, parameter in self.named:
            values, anchor = local_values(parameter), self.anchors[name]
            if (values.dtype, values.device) != (anchor.dtype, anchor.device):
                return True
            if not torch.allclose(values, anchor, rtol=0, atol=0, equal_nan=True):
                return True
        return False

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter is one of the fragment's.

        Parameters
        ----------
        parameter : torch.Tensor
            Parameter of the model.
        """
        return id(parameter) in self._known

    def corrected(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what will be compressed of a parameter's pseudo-gradient: with the memory, the same bits.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the fragment's.
        gradient : torch.Tensor
            What this rank holds of its pseudo-gradient.
        """
        return self.state.corrected(self._known[id(parameter)], gradient)

    def pseudogradients(self) -> list[Pair]:
        """Return the parameters with how far this rank took them: those of the last exchange less those now."""
        # old − new, as an optimizer subtracts its gradient
        return [(p, self.anchors[n] - local_values(p)) for n, p in self.named]

    def send(
        self,
        pairs: list[Pair],
        step: int,
        delay: int,
        background: Background,
        details: Mapping[str, str],
    ) -> None:
        """Exchange pseudo-gradients, now or in the background.

        Parameters
        ----------
        pairs : list of (parameter, pseudo-gradient)
            What :meth:`pseudogradients` returned; the mean over the ranks takes their place.
        step : int
            Local steps taken.
        delay : int
            Local steps after which :meth:`apply` is called; 0 for an exchange now.
        background : Background
            What runs it otherwise.
        details : mapping of str to str
            What must be the same on all ranks now, by name.

        Raises
        ------
        NonFiniteGradientError, ExchangeError, InputError
            As :func:`gradstats.hooks.compression_hook` says; of an exchange in the background, when it is waited for.
        """
        self.state.agreement.details.update(details)
        # in this thread: the replica's ranks train over the same group
        bad = self._bad_elsewhere(pairs, step)

        def reduce() -> None:
            self._agree(step)
            self._reduce(pairs, step, bad)

        if delay:
            self._pending = background.submit(reduce, self.device)
        else:
            reduce()
        # last: an exchange that failed at once is not under way
        self.pairs, self.sent, self.due = pairs, step, step + delay

    def average(self, pairs: list[Pair], step: int, details: Mapping[str, str]) -> None:
        """Put the mean over the ranks into gradients, now.

        Parameters
        ----------
        pairs : list of (parameter, gradient)
            Of all parameters.
        step : int
            Local steps taken.
        details : mapping of str to str
            What must be the same on all ranks now, by name.
        """
        self.state.agreement.details.update(details)
        self._reduce(pairs, step, self._bad_elsewhere(pairs, step))

    def wait(self) -> None:
        """Wait for an exchange in the background; what it raised is raised here, and there is nothing to apply then."""
        # waited for once: a second call must not raise the same error again
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except BaseException:
                self.pairs = []
                raise

    @torch.no_grad()
    def apply(self, outer: torch.optim.Optimizer, step: int, mix: float) -> None:
        """Step the outer optimizer from the parameters of the last exchange, with the mean as their gradient.

        Parameters
        ----------
        outer : torch.optim.Optimizer
            Optimizer of all parameters of the model.
        step : int
            Local steps taken.
        mix : float
            Weight of the parameters now, if steps were taken since the exchange was sent.
        """
        self.wait()
        late = step > self.sent
        # with the local steps since the exchange was sent, which the anchors below would overwrite
        local = [local_values(p).clone() for p, _ in self.pairs] if late else []
        # the outer optimizer passes over what has no gradient: all but this fragment
        gradients = [(p, p.grad) for group in outer.param_groups for p in group["params"]]
        for parameter, _ in gradients:
            parameter.grad = None
        for (name, parameter), (_, mean) in zip(self.named, self.pairs, strict=True):
            local_values(parameter).copy_(self.anchors[name])
            # what is frozen and moved on no rank stays: the outer momentum would move it on
            if self.counts(parameter, mean):
                parameter.grad = as_sharded(parameter, mean)
        outer.step()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for i, (name, parameter) in enumerate(self.named):
            values = local_values(parameter)
            # before mixing: the outer optimizer's result, the same on all ranks
            self.anchors[name].copy_(values)
            if late:
                if self.state.nonfinite in ("skip", "zero"):  # nor may it stay on this rank
                    local[i] = torch.where(local[i].isfinite(), local[i], values)
                # (1 − mix) · outer + mix · local
                values.lerp_(local[i], mix)
        self.pairs = []

    def counts(self, parameter: torch.Tensor, mean: torch.Tensor) -> bool:
        """Tell whether an optimizer is to have a mean: of what is frozen, if it is not zero; alike on all ranks.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the fragment's.
        mean : torch.Tensor
            Mean over the ranks, of sharded parameters what this rank holds of it.
        """
        if parameter.requires_grad:
            return True
        if self._within is None:
            return bool(mean.any())
        # other ranks of the replica hold other parts of it
        return any(all_gather_flags(int(mean.any()), self._within, self.device))

    def end(self, step: int) -> None:
        """Check that all ranks end a training here.

        Parameters
        ----------
        step : int
            Steps taken.

        Raises
        ------
        InputError
            If ranks have taken other numbers of steps.
        """
        self._agree(step, ended=True)

    def is_behind(self, step: int, delay: int) -> bool:
        """Tell whether some rank has taken steps that it has not exchanged, on all ranks, at the end of a training.

        Parameters
        ----------
        step : int
            Local steps taken.
        delay : int
            Local steps that an exchange is applied late, after which ranks differ.

        Raises
        ------
        InputError
            If ranks have taken other numbers of steps.
        """
        self.end(step)
        left = step - self.sent + (delay > 0)
        with _naming_step(step):
            # in the group of the exchanges, whose headers tell where another rank is
            group = self.state.process_group
            return any(all_gather_flags(left, group, self.device, Kind.END))

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs besides the parameters and the anchors; no exchange may be running."""
        # the same structure whether an exchange is under way or not: loading fills a template
        zeros = [(p, torch.zeros_like(local_values(p))) for _, p in self.named]
        return {
            "names": [n for n, _ in self.named],
            "sent": self.sent,
            "due": self.due,
            "under_way": bool(self.pairs),
            "pending": [mean.clone() for _, mean in self.pairs or zeros],
            "state": self.state.content(),
        }

    def prepare(
        self, saved: Mapping[str, Any], anchors: Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Check what :meth:`state_dict` returned; nothing is changed.

        Parameters
        ----------
        saved : mapping
            Entry of a checkpoint.
        anchors : mapping of str to tensor
            The parameters at the last exchange then, checked.

        Returns
        -------
        callable
            What restores it.

        Raises
        ------
        InputError
            If it does not fit.
        """
        # order, too: what is pending has no names of its own
        if field(saved, "names", list) != [n for n, _ in self.named]:
            raise InputError("the checkpoint has other fragments than this model")
        sent, due = field(saved, "sent", int), field(saved, "due", int)
        if not 0 <= sent <= due:
            raise InputError(f"a fragment sent at step {sent} cannot be due at step {due}")
        under_way, pending = field(saved, "under_way", bool), field(saved, "pending", list)
        if len(pending) != len(self.named):
            raise InputError(
                f"the checkpoint has {len(pending)} pending means of {len(self.named)}"
            )
        for (name, p), mean in zip(self.named, pending, strict=True):
            check_values(f"pending mean of {name}", mean, local_values(p).shape, p.dtype)
        state = self.state.prepare(field(saved, "state", Mapping))  # type: ignore[type-abstract]

        def restore() -> None:
            state()
            self.sent, self.due, self._pending = sent, due, None
            self.pairs = [
                (p, mean.to(p.device, copy=True))
                for (_, p), mean in zip(self.named, pending, strict=True)
                if under_way
            ]
            for name, anchor in self.anchors.items():
                anchor.copy_(anchors[name])

        return restore

    def _bad_elsewhere(self, pairs: list[Pair], step: int) -> int:
        """Count what is not finite on ranks with other shards."""
        if self._within is None:
            return 0
        with _naming_step(step):
            return bad_in_replica(self.state, [each for _, each in pairs], self._within)

    def _agree(self, step: int, ended: bool = False) -> None:
        """Check that all ranks have come to the same exchange: what one sends, others would take for something else."""
        with _naming_step(step):
            # a number below 0 says that the rank has ended; − 1, as −0 would not
            flag = -step - 1 if ended else step
            ranks = all_gather_flags(flag, self.state.process_group, self.device)
        if len(set(ranks)) > 1:
            came = ", ".join(
                f"rank {i} has ended after {-n - 1}" if n < 0 else f"rank {i} is at {n}"
                for i, n in enumerate(ranks)
            )
            raise InputError(
                f"the ranks have taken different numbers of local steps ({came}): each must call optimizer.step() as "
                "often as the others, also where it has no batch"
            )

    def _reduce(self, pairs: list[Pair], step: int, bad: int) -> None:
        """Put the mean of the ranks' pseudo-gradients into them."""
        with _naming_step(step):
            exchange(self.state, [(self._known[id(p)], each) for p, each in pairs], bad)


@contextmanager
def _naming_step(step: int) -> Iterator[None]:
    """Say in errors of the exchange after which local step it was."""
    try:
        yield
    except ExchangeError as error:
        why = str(error)
        if why.startswith("step "):  # of the exchange, which nobody has counted
            why = why.partition(": ")[2]
        raise ExchangeError(f"after local step {step}: {why}") from error


def divide(named: Named, fragments: int | Sequence[Sequence[str]]) -> list[Named]:
    """Divide the parameters of a model into fragments, each in the model's order.

    Parameters
    ----------
    named : list of (str, torch.Tensor)
        Names and parameters.
    fragments : int or sequence of sequences of str
        Number of parts of about equal size, or name patterns (``fnmatch``) of each.

    Returns
    -------
    list of list
        Names and parameters of each fragment.

    Raises
    ------
    InputError
        If a fragment would be empty, or a parameter in none.
    """
    if isinstance(fragments, int):
        return _divide_evenly(named, check_count(fragments, "fragments"))
    if isinstance(fragments, set | frozenset):
        # of another order in every process
        raise InputError(f"fragments must be a list or a tuple, not {shown(fragments)}")
    patterns = [
        matching(check_patterns(each, "each of fragments"))
        for each in check_several(fragments, "fragments")
    ]
    parts: list[Named] = [[] for _ in patterns]
    for name, parameter in named:
        place = next((i for i, matches in enumerate(patterns) if matches(name)), None)
        if place is None:
            raise InputError(f"{name} is in none of the fragments: add a pattern such as '*'")
        parts[place].append((name, parameter))
    if not all(parts):
        raise InputError(f"no parameter is in fragment {parts.index([])}: {shown(fragments)}")
    return parts


def _divide_evenly(named: Named, count: int) -> list[Named]:
    """Return as many parts of about as many elements each, none of them empty."""
    if count > len(named):
        raise InputError(f"{count} fragments of {len(named)} parameters")
    # by elements, as messages are; whole parameters alone, as states know them
    total, before, at = sum(p.numel() for _, p in named), 0, 0
    parts: list[Named] = [[] for _ in range(count)]
    for i, (name, parameter) in enumerate(named):
        middle = before + parameter.numel() / 2
        # as far as the elements go, but leaving a parameter for each fragment behind
        wanted = min(int(count * middle / max(total, 1)), count - 1)
        if parts[at] and (wanted > at or len(named) - i <= count - 1 - at):
            at += 1
        parts[at].append((name, parameter))
        before += parameter.numel()
    return parts
