"""Where parameters lie in the flat gradient that is compressed, and which are averaged densely instead."""

from __future__ import annotations

import fnmatch
import glob
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradstats.compressors.base import NamedSlice
from gradstats.errors import InputError, several, warn
from gradstats.primitives.ratio import check_several, shown

__all__ = ["ParameterLayout", "check_patterns", "idle", "matching", "warn_of_idle"]


def check_patterns(patterns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return name patterns of parameters as a tuple if they are some.

    Parameters
    ----------
    patterns : sequence of str
        What the user gave.
    name : str
        Name of the argument.

    Raises
    ------
    InputError
        If they are no sequence, or one is no text.
    """
    for pattern in (several := check_several(patterns, name)):
        # a mapping has keys, which are no patterns
        if not isinstance(pattern, str) or isinstance(patterns, Mapping):
            wrong = patterns if isinstance(patterns, Mapping) else pattern
            raise InputError(f"{name} must be name patterns such as '*.bias', not {shown(wrong)}")
    # a set has another order in every process
    return tuple(sorted(several) if isinstance(patterns, set | frozenset) else several)


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches any of some patterns.

    Parameters
    ----------
    patterns : sequence of str
        Name patterns (``fnmatch``).
    """
    # where they are many they are names, which need no search; brackets of a part's name, experts[3], are no set
    names = {*patterns}
    rest = [each for each in patterns if glob.escape(each) != each]
    # fnmatchcase, because fnmatch ignores case on some systems
    return lambda name: name in names or any(fnmatch.fnmatchcase(name, each) for each in rest)


def idle(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that match none of some names.

    Parameters
    ----------
    patterns : sequence of str
        Name patterns (``fnmatch``).
    names : sequence of str
        Names of parameters.
    """
    known = set(names)
    return [
        each for each in patterns if each not in known and not any(map(matching([each]), names))
    ]


def warn_of_idle(
    patterns: Sequence[str], names: Sequence[str], argument: str = "exclude", does: str = "excludes"
) -> None:
    """Warn of patterns that no parameter has, such as misspelt ones.

    Parameters
    ----------
    patterns : sequence of str
        Name patterns (``fnmatch``).
    names : sequence of str
        Names of the parameters of the model.
    argument : str
        Name of the argument that has them.
    does : str
        What a pattern does to the parameters that have it.
    """
    if unused := idle(patterns, names):
        first = names[0] if names else "missing"
        warn(
            f"{argument}: no parameter is called {several(unused)}, so it {does} nothing; the first of {len(names)} is "
            f"{first}"
        )


class ParameterLayout:
    """Places of parameters, by identity, in two flat vectors: the compressed and the densely averaged part.

    A complex parameter takes two places an element, its real and its imaginary part.

    Parameters
    ----------
    dense_below : int
        Parameters with fewer elements are averaged densely.
    exclude : sequence of str
        Name patterns (``fnmatch``) of parameters to average densely.

    Attributes
    ----------
    names : list of str
        Names of the compressed parameters, in order.
    slots : dict of int to slice
        Places of the compressed parameters, contiguous from 0.
    dense_slots : dict of int to slice
        Places of the densely averaged parameters.
    numel, dense_numel : int
        Elements of either part.
    dtype : torch.dtype
        What either part is kept in: float64 if any parameter is, else float32.
    known : bool
        Whether parameters were added.
    all : dict of str to int
        Elements by name of the compressed parameters, those that lost their place (:meth:`skip`) included.
    """

    def __init__(self, dense_below: int = 0, exclude: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        # by identity: == of tensors compares elements, and names are not known to DDP
        self.slots: dict[int, slice] = {}
        self.dense_slots: dict[int, slice] = {}
        self.numel = self.dense_numel = 0
        self.dtype = torch.float32
        self.known = False
        self.all: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # weak: the layout must not keep a model alive
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._dense_below = dense_below
        self._exclude = tuple(exclude)

    def __getstate__(self) -> dict[str, Any]:
        """Copy the places alone: the parameters are others, or of another process."""
        return {**vars(self), "_parameters": {}}

    def name_of(self, parameters: set[int]) -> str | None:
        """Return the name of the first of some parameters that has a place; None if none has.

        Parameters
        ----------
        parameters : set of int
            Their identities.
        """
        return next((name for key, name in self._names.items() if key in parameters), None)

    def add(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give every parameter its place, under the first of its names.

        Parameters
        ----------
        named_parameters : iterable of (str, torch.Tensor)
            Names and parameters, in the order of the flat gradient.
        """
        self.known = True
        excluded = matching(self._exclude)
        for name, parameter in named_parameters:
            if id(parameter) in self._names:  # tied weights have one gradient
                continue
            n = parameter.numel() * (1 + parameter.is_complex())
            self._parameters[id(parameter)] = weakref.ref(parameter)
            if parameter.dtype in (torch.float64, torch.complex128):
                self.dtype = torch.float64
            if n < self._dense_below or excluded(name):
                self._names[id(parameter)] = name
                self.dense_slots[id(parameter)] = slice(self.dense_numel, self.dense_numel + n)
                self.dense_numel += n
            else:
                self.names.append(name)
                self.all[name] = n
                self._names[id(parameter)] = name
                self.slots[id(parameter)] = slice(self.numel, self.numel + n)
                self.numel += n

    def skip(self, parameter: torch.Tensor) -> None:
        """Forget the place of a parameter that is averaged elsewhere; places behind it move up.

        Parameters
        ----------
        parameter : torch.Tensor
            The parameter; nothing happens if it has no place.
        """
        key = id(parameter)
        if key in self.slots:
            self.names.remove(self._names.pop(key))
            self.numel -= _close_up(self.slots, key)
        elif key in self.dense_slots:
            del self._names[key]
            self.dense_numel -= _close_up(self.dense_slots, key)

    def dense_parts(self) -> Iterable[NamedSlice]:
        """Return names and places of the densely averaged parameters, in order."""
        return ((self._names[key], slot) for key, slot in self.dense_slots.items())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that have a place, in the order in which they were added."""
        places = self.slots.keys() | self.dense_slots.keys()
        parameters = (self._parameters[key]() for key in self._parameters if key in places)
        return [parameter for parameter in parameters if parameter is not None]

    def dense_places(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, slice]]:
        """Return the densely averaged parameters of a step with their places, in order.

        Parameters
        ----------
        pairs : iterable of (parameter, gradient)
            All gradients of the step.
        """
        dense = [(p, self.dense_slots[id(p)]) for p, _ in pairs if id(p) in self.dense_slots]
        # Memory.update_dense() walks over them in order, and DDP's buckets have another
        return sorted(dense, key=lambda each: each[1].start)

    def parts(self) -> Iterable[NamedSlice]:
        """Return names and places of the compressed parameters, in order."""
        # names and slots are added and removed together, both in the order of the model
        return zip(self.names, self.slots.values(), strict=True)

    def name(self, parameter: torch.Tensor) -> str:
        """Return the name of a compressed parameter.

        Parameters
        ----------
        parameter : torch.Tensor
            One of the compressed parameters.

        Returns
        -------
        str
            Its name.
        """
        return self._names[id(parameter)]

    def require(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check that parameters have a place.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Parameters of a bucket.

        Raises
        ------
        InputError
            If one was never added.
        """
        if set(map(id, parameters)) - self.slots.keys() - self.dense_slots.keys():
            raise InputError(
                "the hook met a parameter that named_parameters did not list; pass the model DDP wraps"
            )

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check that the gradients of a step are those of the layout, each once.

        Parameters
        ----------
        parameters : sequence of torch.Tensor
            The parameters whose gradients came.

        Raises
        ------
        InputError
            If a parameter was never added, or one that was did not come.
        """
        self.require(parameters)
        came, expected = set(map(id, parameters)), len(self.slots) + len(self.dense_slots)
        # a parameter that came twice shows in the length alone
        if len(came) != expected or len(parameters) != expected:
            absent = [name for key, name in self._names.items() if key not in came]
            first = f", {absent[0]} not" if absent else ""
            raise InputError(
                f"{len(came)} of {expected} parameters came in DDP's buckets{first}: give every DDP model a state of "
                "its own, made of the parameters that require gradients when DDP wraps it"
            )


def _close_up(slots: dict[int, slice], key: int) -> int:
    """Take one place out, move those behind it up, and return the elements it had."""
    gone = slots.pop(key)
    n: int = gone.stop - gone.start
    # new values of known keys leave the iteration as it is
    for other, slot in slots.items():
        if slot.start > gone.start:
            slots[other] = slice(slot.start - n, slot.stop - n)
    return n
