"""The decorator of every compiled loop, and the cache that keeps their code.

What a loop is compiled from is looked up in memory: its own bytecode, that of every function it reaches (also in other
files), and the constants they name. The cache is keyed by that, so an edited formula is used by the next process,
wherever it stands, while comments and blank lines compile nothing anew.

What Numba does not promise is in this file alone, as read in Numba 0.68.1: ``Dispatcher.compile`` and ``_cache``,
``FunctionCache`` with ``_cache_file``, ``_impl.filename_base``, ``_index_key``, ``_load_overload`` and
``_save_overload``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.serialize import dumps, loads
from numba.extending import overload_method, register_jitable
from numpy.typing import NDArray

from gradstats.console import messages
from gradstats.errors import warn

__all__ = ["LOOPS", "Compiling", "Loop", "Written", "compiled", "has", "inner", "method", "unit"]

_T = TypeVar("_T", bound=np.generic)
_Called = TypeVar("_Called", bound=Callable[..., Any])

Written: TypeAlias = NDArray[_T]
"""An array that a loop writes to. All others are compiled as read-only, which arrays that may be written convert to."""

LOOPS: list[Loop] = []
"""The loops that have a reference, with the variants that need some processor."""

_NUMBERS = {
    "bool": types.boolean,
    "float": types.float64,
    "int": types.int64,
    "np.float32": types.float32,
    "np.int32": types.int32,
    "np.uint32": types.uint32,
    "np.uint64": types.uint64,
}
"""Types that numbers are compiled as, by their annotations, whatever is given at first."""

_FOREIGN = {*sys.stdlib_module_names, "llvmlite", "numba", "numpy"}
"""Packages whose code changes with their version alone."""

_ALWAYS = {"no_cfunc_wrapper": True}
"""Options of all compiled functions: none is called from C, and a way to do so takes a twentieth of the time."""

_CALLED = _ALWAYS | {"no_cpython_wrapper": True}
"""Options of those that loops alone call."""

_KILLED = 3600
"""Seconds after which a file that is still being written is a killed process's."""

_METHODS: set[str] = set()
"""Names of the methods of named tuples that are compiled."""


@cache
def has(feature: str) -> bool:
    """Return whether the processor that code is compiled for has a feature.

    Parameters
    ----------
    feature : str
        LLVM's name of it, such as ``avx512f``; every processor has ``""``.
    """
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    mentions = [name[0] == "+" for name in features if name[1:] == feature]
    return not feature or (bool(mentions) and mentions[-1])  # the last mention counts


def compiled(
    reference: Callable[..., Any] | None = None,
    *,
    within: float = 0.0,
    needs: str = "",
    counted: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Loop]:
    """Compile a function when it is first called, for one kind of arguments, and keep the code on disk.

    Parameters
    ----------
    reference : callable, optional
        The same in NumPy: it takes the same arguments, writes the same arrays, and returns the same, but for a sum its
        terms.
    within : float
        Error of a sum, as a part of the sum of its terms' magnitudes.
    needs : str
        The processor's feature without which the loop cannot be run, see :func:`has`.
    counted : bool
        The last number returned says how far arrays are written; what lies behind is left open.
    **options : object
        Options of ``numba.njit``, such as ``fastmath`` or ``inline``.
    """

    def decorate(function: Callable[..., Any]) -> Loop:
        # what numba.njit adds; None leaves bounds to NUMBA_BOUNDSCHECK
        always = {"nopython": True, "boundscheck": None}
        loop = Loop(function, targetoptions=always | _ALWAYS | options)
        loop.reference, loop.within, loop.needs, loop.counted = reference, within, needs, counted
        if reference:
            LOOPS.append(loop)
        return loop

    return decorate


def inner(**options: Any) -> Callable[[Callable[..., Any]], Loop]:
    """Compile a function that loops alone call: LLVM writes it into each, so that no code of its own is kept.

    Called, the process that compiles and those that load the code would take differently ordered copies of a sum. Numba
    can do the same (``inline="always"``), but finds the types of every copy anew.

    Parameters
    ----------
    **options : object
        Options of ``numba.njit``, such as ``fastmath``.
    """

    def decorate(function: Callable[..., Any]) -> Loop:
        loop = compiled(forceinline=True, **_CALLED, **options)(function)
        # without a cache of its own, as its code is in that of its callers
        loop.looked = True
        return loop

    return decorate


def method(name: str, of: Callable[..., Callable[..., Any]]) -> None:
    """Have loops call a method of named tuples, compiled from its own source, whichever tuple it is.

    Parameters
    ----------
    name : str
        Name of the method.
    of : callable
        Function of the types of its arguments, by their names, that returns it.
    """
    _METHODS.add(name)
    overload: Any = overload_method
    # annotations are the method's
    overload(types.NamedTuple, name, strict=False, jit_options=_CALLED)(of)


def unit(function: _Called) -> _Called:
    """Have loops call a function of numbers, compiled from its own source, which Python calls as it is.

    Parameters
    ----------
    function : callable
        The function.
    """
    register: Any = register_jitable
    return cast(_Called, register(**_CALLED)(function))


class Loop(CPUDispatcher):
    """A compiled function, with one signature where Numba has one for each kind of array it is called with.

    Parameters
    ----------
    py_func : callable
        The function.
    *args, **options : object
        What Numba's dispatcher takes.
    """

    reference: Callable[..., Any] | None = None
    within = 0.0
    needs = ""
    counted = False

    def __init__(self, py_func: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(py_func, *args, **options)
        names = py_func.__code__.co_varnames[: py_func.__code__.co_argcount]
        # text already where the module postpones its annotations, as those of loops do
        self._annotations = [str(py_func.__annotations__.get(name, "")) for name in names]
        self.looked = False  # for a folder

    def compile(self, sig: Any) -> Any:
        """Compile for the annotated numbers and for arrays that are read-only but where written, or load the code.

        Parameters
        ----------
        sig : tuple of types or signature
            Of the arguments of a call.
        """
        arguments, _ = sigutils.normalize_signature(sig)
        kinds = tuple(map(_declared, arguments, self._annotations))
        # Numba's own lock, which may be taken again inside: no two threads set the cache
        with global_compiler_lock, _without_collector():
            if not self.looked:
                self.looked = True
                try:
                    self._cache = _Cache(self)
                except RuntimeError:  # Numba found no folder that it may write to
                    _warn_of_no_folder()
            entry = super().compile(kinds)
            # the next call with such arguments finds the code as fast as one with its own
            if kinds != tuple(arguments):
                self._insert([kind._code for kind in arguments], entry, False)
        return entry


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the collector from looking through what a compiler makes again and again: a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _declared(kind: Any, annotation: str) -> Any:
    """Return the type that an argument is compiled as."""
    # a constant of the caller's would be a type of its own
    kind = types.unliteral(kind)
    if isinstance(kind, types.Array) and "Written" not in annotation:
        return kind.copy(readonly=True)
    return (
        _NUMBERS.get(annotation, kind) if isinstance(kind, types.Number | types.Boolean) else kind
    )


@cache
def _warn_of_no_folder() -> None:
    warn(
        "no folder for compiled code is writable, so every process compiles anew, which takes seconds: "
        "set NUMBA_CACHE_DIR to one that is"
    )


class Compiling:
    """The note that loops are being compiled: once in a process, and only where LOCAL_RANK is 0."""

    seconds = 5
    """How long it takes, about."""
    has_spoken = False

    @classmethod
    @contextlib.contextmanager
    def of_all(cls) -> Iterator[None]:
        """Say how long it takes to compile all loops, if any is compiled meanwhile."""
        cls.seconds, before = 20, cls.seconds
        try:
            yield
        finally:
            cls.seconds = before

    @classmethod
    def say(cls) -> None:
        """Say that loops are compiled now."""
        if not cls.has_spoken and os.environ.get("LOCAL_RANK", "0") == "0":
            messages().print(f"compiling loops, once, about {cls.seconds} s")
        cls.has_spoken = True


class _Cache(FunctionCache):
    """Numba's cache of one function, in the folder that Numba chooses, with files named by what they are made of."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.py_func)
        # without the line number, which moves
        name = re.sub(r"-\d+(?=\.py)", "", self._impl.filename_base)
        # in place of Numba's index, which looks at the date of the loop's own file alone
        self._loop, self._cache_file = loop, _Files(Path(self.cache_path), name)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[str, str]:
        kinds = sigutils.normalize_signature(sig)[0]
        # loops given as arguments are compiled in
        functions = [kind.dispatcher for kind in _leaves(kinds) if hasattr(kind, "dispatcher")]
        # addresses are others in every process
        signature = re.sub(r" at 0x\w+", "", str(kinds))
        # loops that one function makes have one name, and differ in what they close over
        closure = [_named(cell.cell_contents) for cell in self._py_func.__closure__ or ()]
        roots = [self._loop, *functions, *_methods(kinds)]
        content = [numba.__version__, llvmlite.__version__, *_content(roots)]
        # first what stays when the code is edited: files with the same are replaced
        return _digest([signature, *map(str, codegen.magic_tuple()), *closure]), _digest(content)

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        code = super()._load_overload(sig, target_context)
        if code is None:
            Compiling.say()
        return code

    def _save_overload(self, sig: Any, data: Any) -> None:
        # a process may have become another user's since its folder was chosen: then its code is not kept
        with contextlib.suppress(PermissionError):
            super()._save_overload(sig, data)


class _Files:
    """The files of one loop: one for each signature and processor, of the newest content."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def load(self, key: tuple[str, str]) -> Any:
        """Return the code of a key, None if there is none."""
        try:
            return loads((self._folder / f"{self._name}-{key[0]}-{key[1]}.nbc").read_bytes())
        except Exception:  # none, or one that was cut short: then whatever pickle raises
            return None

    def save(self, key: tuple[str, str], data: Any) -> None:
        """Keep the code of a key, and delete what an earlier content of the loop was compiled to."""
        path = self._folder / f"{self._name}-{key[0]}-{key[1]}.nbc"
        part = self._folder / f"{path.name}.{uuid.uuid4().hex}"
        try:
            # moved into place whole: other processes read at the same time
            part.write_bytes(dumps(data))
            part.replace(path)
        # also when interrupted, or the part would stay
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        for old in self._folder.glob(f"{self._name}-{key[0]}-*.nbc*"):
            with contextlib.suppress(OSError):  # another process was first
                # a part is another process's, unless that was killed
                if old != path and (
                    old.suffix == ".nbc" or time.time() - old.stat().st_mtime > _KILLED
                ):
                    old.unlink()

    def flush(self) -> None:
        """Delete all."""
        for path in self._folder.glob(f"{self._name}-*.nbc*"):
            path.unlink(missing_ok=True)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _leaves(kinds: Iterable[Any]) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(kind, types.BaseTuple):
            yield from _leaves(kind.types)
        else:
            yield kind


def _methods(kinds: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the compiled methods of named tuples among some types, which a loop reaches through its arguments."""
    for kind in kinds:
        if isinstance(kind, types.NamedTuple):
            # a set has an order of its own in every process
            members = (getattr(kind.instance_class, name, None) for name in sorted(_METHODS))
            yield from (each for each in members if isinstance(each, FunctionType))
        if isinstance(kind, types.BaseTuple):
            yield from _methods(kind.types)


def _named(value: Any) -> str:
    """Return what tells a constant or a function from others, the same in every process."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _constant(value) or str(getattr(value, "_name", type(value).__name__))


def _constant(value: Any) -> str:
    """Return a constant as text; empty for what is none."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, tuple):
        return f"({','.join(_constant(each) or _named(each) for each in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, dict):
        return _constant(tuple(sorted((str(k), _constant(v)) for k, v in value.items())))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return f"{type(value).__name__}:{value!r}"
    return ""


def _content(roots: Iterable[Any]) -> list[str]:
    """Return all that some functions are compiled from, as texts in an order that does not depend on the process."""
    texts, functions = set(), set()
    todo = list(roots)
    while todo:
        value = todo.pop()
        if isinstance(value, CPUDispatcher):
            texts.add(_named(value.py_func) + _constant(value.targetoptions))
            value = value.py_func
        value = getattr(value, "_defn", value)  # of an intrinsic
        # foreign code is covered by the version, and mutual calls would not end
        if (
            not isinstance(value, FunctionType)
            or value in functions
            or _is_foreign(value.__module__)
        ):
            continue
        functions.add(value)
        names: set[str] = set()
        code = "".join(_code(value.__code__, names))
        constants = {f"defaults {value.__defaults__!r} {value.__kwdefaults__!r}"}
        reached = {name: value.__globals__[name] for name in names if name in value.__globals__}
        modules = [each for each in reached.values() if isinstance(each, ModuleType)]
        for module in modules:  # grows by the modules inside them
            for name in names & vars(module).keys() if not _is_foreign(module.__name__) else ():
                other = vars(module)[name]
                reached[f"{module.__name__}.{name}"] = other
                if isinstance(other, ModuleType) and other not in modules:
                    modules.append(other)
        free = value.__code__.co_freevars
        for name, cell in zip(free, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a name not bound yet
                reached[name] = cell.cell_contents
        for name, other in reached.items():
            constants.add(f"{name}={_constant(other) or _named(other)}")
            # functions may be constants, in tuples too; what is none is passed over
            todo += other if isinstance(other, tuple) else [other]
        texts.add("\n".join([_named(value), code, *sorted(constants)]))
    return sorted(texts)


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in _FOREIGN


def _code(code: CodeType, names: set[str]) -> Iterator[str]:
    """Yield what code does, without where it stands, and collect the names it uses."""
    names.update(code.co_names)
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        # code of functions inside, as intrinsics have; its text has an address
        if isinstance(constant, CodeType):
            yield from _code(constant, names)
        else:
            yield _constant(constant)
