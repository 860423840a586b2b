"""Where parameters lie in the flat gradient that is compressed, and which are averaged densely instead."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import torch

from gradstats.errors import InputError

__all__ = ["ParameterLayout"]


class ParameterLayout:
    """Places of parameters, by identity, in two flat vectors: the compressed and the dense part.

    Parameters
    ----------
    dense_below, exclude : see :class:`gradstats.hooks.CompressionState`.

    Attributes
    ----------
    names : of the compressed parameters, in order.
    slots : their places; contiguous from 0.
    dense_slots : likewise of the densely averaged ones.
    numel, dense_numel : elements of either part.
    known : whether parameters were added.
    """

    def __init__(self, dense_below: int = 0, exclude: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self.slots: dict[int, slice] = {}
        self.dense_slots: dict[int, slice] = {}
        self.numel = self.dense_numel = 0
        self.known = False
        self._names: dict[int, str] = {}
        self._dense_below = dense_below
        self._exclude = tuple(exclude)

    def add(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give every parameter its place."""
        self.known = True
        for name, parameter in named_parameters:
            n = parameter.numel()
            if n < self._dense_below or any(fnmatch.fnmatchcase(name, e) for e in self._exclude):
                self.dense_slots[id(parameter)] = slice(self.dense_numel, self.dense_numel + n)
                self.dense_numel += n
            else:
                self.names.append(name)
                self._names[id(parameter)] = name
                self.slots[id(parameter)] = slice(self.numel, self.numel + n)
                self.numel += n

    def parts(self) -> Iterable[tuple[str, slice]]:
        """Return names and places of the compressed parameters, in order."""
        return zip(self.names, self.slots.values(), strict=True)

    def name(self, parameter: torch.Tensor) -> str:
        """Return a compressed parameter's name."""
        return self._names[id(parameter)]

    def check(self, parameter: torch.Tensor) -> None:
        """Raise :class:`InputError` for a parameter that was never added."""
        if id(parameter) not in self.slots and id(parameter) not in self.dense_slots:
            raise InputError(
                "the hook met a parameter that named_parameters did not list; pass the model DDP wraps"
            )
