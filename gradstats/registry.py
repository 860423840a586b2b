"""What can be named: the package's own, what installed packages bring, and what a program adds while it runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Generic, TypeVar

from gradstats.errors import InputError, first_line

__all__ = ["Registry", "entries", "load", "load_file", "loaded_files"]

T = TypeVar("T")

_FILES: dict[str, None] = {}
"""Files that have been imported by their paths, in order."""


@cache
def _installed() -> Any:  # of a type of its own before Python 3.12
    """Return what installed packages bring to all groups: reading it takes as long for one of them."""
    return entry_points()


def entries(group: str) -> EntryPoints:
    """Return what installed packages bring to a group of entry points. Nothing of theirs is loaded.

    Parameters
    ----------
    group : str
        Name of the group, such as ``gradstats.commands``.
    """
    group_entries: EntryPoints = _installed().select(group=group)
    return group_entries


def load(entry: EntryPoint) -> Any:
    """Load what an entry point names.

    Parameters
    ----------
    entry : EntryPoint
        One of :func:`entries`.

    Returns
    -------
    object
        What it names.

    Raises
    ------
    InputError
        If it cannot be loaded. The message names the package that brings it.
    """
    try:
        return entry.load()
    except Exception as error:  # another package's code, which may do anything
        brought = f" of {entry.dist.name}" if entry.dist else ""
        raise InputError(
            f"{entry.group} {entry.name!r}{brought} cannot be loaded from {entry.value}: {first_line(error)}"
        ) from error


def load_file(path: str | Path) -> None:
    """Import a Python file, so that what it puts into registries is there: laws, rules, compressors, commands.

    It finds modules beside it, as a program does.

    Parameters
    ----------
    path : str or Path
        The file.

    Raises
    ------
    InputError
        If it cannot be read or imported. The message says in which line.
    """
    file = Path(path).resolve()
    name = plain = f"load_{file.stem}"  # of no module that somebody else might mean
    number = 1
    # pickle finds a class by the name of its module, which is of one file alone
    while getattr(sys.modules.get(name), "__file__", str(file)) != str(file):
        number += 1
        name = f"{plain}_{number}"
    # an explicit loader, so that the file need not end in .py
    loader = SourceFileLoader(name, str(file))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    # before the code runs: dataclasses and pickle look up a class's module by name
    sys.modules[name] = module = module_from_spec(spec)
    if str(file.parent) not in sys.path:
        # last in the path, so that no file beside it shadows a module that others import
        sys.path.append(str(file.parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # anybody's code, which may do anything
        del sys.modules[name]
        # an OSError about this file means that it cannot be read; any other was raised by its code
        if isinstance(error, OSError) and error.filename == str(file):
            raise InputError(f"cannot load {path}: {error.strerror}") from None
        # the innermost line within this file: the error itself may come from another
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines = [error.lineno]
        where = f", line {lines[-1]}" if lines else ""
        # an InputError is a whole sentence, other messages need their type
        what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"cannot load {path}{where}: {what}{first_line(error)}") from error
    # only after it worked: workers import every file in this list
    _FILES[str(file)] = None


def loaded_files() -> list[str]:
    """Return the files that :func:`load_file` has imported, for other processes to do the same."""
    return list(_FILES)


class Registry(MutableMapping[str, T], Generic[T]):
    """Objects by name, each loaded when it is first asked for; names alone load nothing.

    Parameters
    ----------
    group : str
        Group of entry points through which installed packages bring more. Their names come after the package's own,
        which they cannot replace.
    homes : mapping of str to str
        Name to ``module:attribute`` of the package's own.
    check : callable
        Takes a name and what is to have it, and raises :class:`InputError` if it cannot.

    Examples
    --------
    >>> def check(name, value):
    ...     assert callable(value)
    >>> functions = Registry("example.functions", {"sqrt": "math:sqrt"}, check)
    >>> functions["double"] = lambda x: 2 * x
    >>> list(functions), functions["sqrt"](9.0), functions["double"](2)
    (['sqrt', 'double'], 3.0, 4)
    """

    def __init__(
        self, group: str, homes: Mapping[str, str], check: Callable[[str, object], None]
    ) -> None:
        self.built_in = tuple(homes)
        """Names of the package's own."""
        self._group, self._homes, self._check = group, homes, check
        self._loaded: dict[str, T] = {}
        self._places: dict[str, EntryPoint] | None = None

    def _entries(self) -> dict[str, EntryPoint]:
        """Return the places of what is not there until it is asked for, found the first time they are needed."""
        if self._places is None:
            self._places = {
                n: EntryPoint(n, place, self._group) for n, place in self._homes.items()
            }
            for entry in entries(self._group):
                self._places.setdefault(entry.name, entry)
        return self._places

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            # through __setitem__, so that what a package brings is checked, too
            self[name] = load(self._entries()[name])
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._check(name, value)
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        # looked up before the removal, after which the name is never there; a subclass has names that stay
        known = Registry.__contains__(self, name)
        self._loaded.pop(name, None)
        self._entries().pop(name, None)
        if not known:
            raise KeyError(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a name and return what had it.

        Parameters
        ----------
        name : str
            The name.
        *default : object
            What to return if nothing has it; without one that is a KeyError.
        """
        # the one of the base class has an object for a default, whose address help would show
        return super().pop(name, *default)

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._entries()

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._entries(), *self._loaded))

    def __len__(self) -> int:
        return len(set(self._entries()) | set(self._loaded))
