"""Compressors that average gradients in training, and the registry of their names.

The classes, and torch with them, are loaded when first used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from inspect import isabstract
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gradstats.errors import InputError, options_of, unknown
from gradstats.primitives.ratio import shown
from gradstats.registry import Registry
from gradstats.thresholds import ESTIMATORS, EstimatorName, make_estimator

if TYPE_CHECKING:
    from gradstats.compressors.base import Compressor, Reduced, Selector
    from gradstats.compressors.cascading import Cascading
    from gradstats.compressors.cltk import CLTk
    from gradstats.compressors.cost import Topology
    from gradstats.compressors.dense import DenseCompressor
    from gradstats.compressors.lags import LAGS
    from gradstats.compressors.layerwise import Layerwise
    from gradstats.compressors.marsit import Marsit
    from gradstats.compressors.micro import MiCRO
    from gradstats.compressors.randomk import RandomK
    from gradstats.compressors.redsync import RedSync
    from gradstats.compressors.selectors import ChunkTopK, ThresholdSelector, TopK
    from gradstats.compressors.shared import GlobalHistogram
    from gradstats.compressors.signsgd import SSDM, EFSignSGD, SignSGD
    from gradstats.compressors.sparse import Average, SparseCompressor, as_compressor

_HOME = {
    "Average": "sparse",
    "CLTk": "cltk",
    "Cascading": "cascading",
    "ChunkTopK": "selectors",
    "Compressor": "base",
    "DenseCompressor": "dense",
    "EFSignSGD": "signsgd",
    "GlobalHistogram": "shared",
    "LAGS": "lags",
    "Layerwise": "layerwise",
    "Marsit": "marsit",
    "MiCRO": "micro",
    "RandomK": "randomk",
    "RedSync": "redsync",
    "Reduced": "base",
    "SSDM": "signsgd",
    "Selector": "base",
    "SignSGD": "signsgd",
    "SparseCompressor": "sparse",
    "ThresholdSelector": "selectors",
    "TopK": "selectors",
    "Topology": "cost",
    "as_compressor": "sparse",
}

__all__ = [
    "COMPRESSORS",
    "LAGS",
    "RULE",
    "SELECTORS",
    "SSDM",
    "Average",
    "CLTk",
    "Cascading",
    "ChunkTopK",
    "Compressor",
    "CompressorName",
    "DenseCompressor",
    "EFSignSGD",
    "GlobalHistogram",
    "Layerwise",
    "Marsit",
    "MiCRO",
    "RandomK",
    "RedSync",
    "Reduced",
    "Selector",
    "SelectorName",
    "SignSGD",
    "SparseCompressor",
    "ThresholdSelector",
    "TopK",
    "Topology",
    "as_compressor",
    "codecs",
    "compressor_class",
    "make_compressor",
    "make_selector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradstats.compressors' has no attribute {name!r}")
    value = getattr(import_module(f"gradstats.compressors.{_HOME[name]}"), name)
    # from now on Python finds it without asking this function
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Selectors(Sequence[str]):
    """Names of the rules that pick elements, those that come later included."""

    def __getitem__(self, index: Any) -> Any:
        return ("topk", *ESTIMATORS)[index]

    def __len__(self) -> int:
        return 1 + len(ESTIMATORS)


SELECTORS: Sequence[str] = _Selectors()
"""Names that :func:`make_selector` takes. Each rank selects by itself; ``topk`` and ``exact`` are the same rule."""


class _Compressors(Registry["type[Compressor]"]):
    """Compressors by name; a rule that is no more than a rule is the all-gather of what it selects."""

    def __getitem__(self, name: str) -> type[Compressor]:
        if self.rule(name) is not None:
            from gradstats.compressors.sparse import SparseCompressor

            return SparseCompressor
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in SELECTORS

    def __iter__(self) -> Iterator[str]:
        # dense ones first, then rules, then systems; a system with the name of a rule comes once
        dense, others = _DENSE, super().__iter__()
        yield from dict.fromkeys((*(name for name in dense if name in self), *SELECTORS, *others))

    def __len__(self) -> int:
        # the registry does not count the rules
        return sum(1 for _ in self)

    def rule(self, name: str) -> str | None:
        """Return the rule that a name is of, if it is of nothing more."""
        bare = name.removeprefix(RULE)
        # `micro` alone is the system in the registry, `threshold:micro` its rule
        alone = bare != name or not super().__contains__(name)
        return bare if alone and bare in SELECTORS else None


SelectorName: TypeAlias = Literal["topk", EstimatorName]
CompressorName: TypeAlias = Literal[
    "none",
    "dense-bf16",
    "dense-fp8",
    SelectorName,
    "cltk",
    "randomk",
    "lags",
    "redsync-quantised",
    "signsgd",
    "ef-signsgd",
    "ssdm",
    "cascading",
    "marsit",
]
"""The package's own names: a user's compressor may have any other, and ``threshold:NAME`` is one."""
RULE = "threshold:"
"""Prefix of the bare threshold rule of a name, where the name alone is a whole system: ``threshold:dgc``."""
_DENSE: tuple[CompressorName, ...] = ("none", "dense-bf16", "dense-fp8")
_OWN: dict[CompressorName, str] = {
    **dict.fromkeys(_DENSE, "dense:DenseCompressor"),
    "micro": "micro:MiCRO",
    "cltk": "cltk:CLTk",
    "randomk": "randomk:RandomK",
    "lags": "lags:LAGS",
    "redsync-quantised": "redsync:RedSync",
    "signsgd": "signsgd:SignSGD",
    "ef-signsgd": "signsgd:EFSignSGD",
    "ssdm": "signsgd:SSDM",
    "cascading": "cascading:Cascading",
    "marsit": "marsit:Marsit",
}


def _check(name: str, value: object) -> None:
    from gradstats.compressors.base import Compressor

    # the colon is for prefixes such as `threshold:`
    if not name or ":" in name:
        raise InputError(f"a compressor cannot have the name {name!r}")
    if not isinstance(value, type) or not issubclass(value, Compressor):
        raise InputError(
            f"compressor {name!r} is to be a subclass of Compressor, not {shown(value)}"
        )
    # here it is one line that says what is missing; building it would be a TypeError
    if isabstract(value):
        raise InputError(f"compressor {name!r} has no reduce(corrected, group, flag)")


COMPRESSORS = _Compressors(
    "gradstats.compressors",
    {name: f"gradstats.compressors.{place}" for name, place in _OWN.items()},
    _check,
)
"""Names that :func:`make_compressor` and the command line take, and the class behind each.

``none`` is PyTorch's dense averaging, ``dense-bf16`` and ``dense-fp8`` are averages of rounded values. Every estimator
in :data:`gradstats.thresholds.ESTIMATORS` is one under its name. ``COMPRESSORS["mine"] = Mine`` adds one to this
program; the ratio is its first argument if it has one (:attr:`Compressor.has_ratio`). Through the entry point
``gradstats.compressors`` an installed package adds one to every program.
"""


def compressor_class(name: CompressorName | str) -> type[Compressor]:
    """Return the class of the compressor called `name`.

    Parameters
    ----------
    name : str
        One of :data:`COMPRESSORS`, or of :data:`gradstats.thresholds.ESTIMATORS`.

    Returns
    -------
    type
        A subclass of :class:`Compressor`; its class attributes say what it needs.

    Raises
    ------
    InputError
        If the name is unknown; the message lists the known ones.
    """
    # `threshold:NAME` is in no listing, and has a class all the same
    if not isinstance(name, str) or (name not in COMPRESSORS and COMPRESSORS.rule(name) is None):
        raise unknown("compressor", name, COMPRESSORS)
    return COMPRESSORS[name]


def codecs(name: CompressorName | str) -> tuple[str, ...]:
    """Return what a :class:`gradstats.collectives.Codec` may change of what a compressor sends.

    Parameters
    ----------
    name : str
        A name that :func:`make_compressor` takes.

    Returns
    -------
    tuple of str
        ``"indices"`` and ``"values"``, one of them, or none.
    """
    cls = compressor_class(name)
    return cls.coded(**(cls.variants.get(name) or {}))


def with_codec(name: CompressorName | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which ``indices`` and ``values`` have become the ``codec`` that a compressor takes.

    Parameters
    ----------
    name : str
        A name that :func:`make_compressor` takes.
    options : mapping of str to object
        Options as a user gives them.

    Returns
    -------
    dict
        The options; without a codec if none was given, or the compressor has nothing to code.

    Raises
    ------
    InputError
        If there is no such codec, or it changes what the compressor does not send.
    """
    coded = {key: options[key] for key in ("indices", "values") if key in options}
    others = {key: value for key, value in options.items() if key not in coded}
    if not coded:
        return others
    # not before a codec is asked for, as it loads torch
    from gradstats.collectives.codec import Codec, check_codec

    codec = check_codec(Codec(**coded), name, codecs(name))
    # a compressor that codes nothing takes no codec, and check_codec() let a plain one pass
    return others | ({"codec": codec} if codecs(name) else {})


def make_selector(name: SelectorName | str, ratio: float, **options: Any) -> Selector:
    """Build the selector called `name`.

    Parameters
    ----------
    name : str
        ``topk``, or one of :data:`gradstats.thresholds.ESTIMATORS`.
    ratio : float
        Kept fraction k/d, in (0, 1].
    **options : Any
        Options of the estimator, or of :class:`TopK`.

    Returns
    -------
    Selector
        A selector with an estimator of its own.

    Raises
    ------
    InputError
        If the name or an option is unknown, or the ratio is outside (0, 1].
    """
    from gradstats.compressors.selectors import ThresholdSelector, TopK

    # no estimator has this name: as a rule it is `exact`
    if isinstance(name, str) and name == "topk":
        with options_of("selector", name):
            return TopK(ratio, **options)
    return ThresholdSelector(make_estimator(name, **options), ratio)


def make_compressor(
    name: CompressorName | str, ratio: float | None = None, **options: Any
) -> Compressor | None:
    """Build the compressor called `name`.

    Parameters
    ----------
    name : str
        One of :data:`COMPRESSORS`, or of :data:`gradstats.thresholds.ESTIMATORS`, which gives a selector with the
        all-gather of :class:`SparseCompressor`. ``micro`` is the whole system with exclusive partitions; its threshold
        rule alone is ``threshold:micro``, and every other rule has such a name too. The systems ``dgc``, ``redsync``
        and ``redsync-quantised`` are more than a compressor: :func:`gradstats.hooks.systems.make_state` builds them,
        and this function only the compressor of the whole gradient that goes by their name.
    ratio : float, optional
        Kept fraction k/d, in (0, 1]. Compressors that send signs, and dense ones, ignore it.
    **options : Any
        Options of the compressor or of its estimator. Every compressor takes ``indices`` and ``values``, what these
        are on the wire (:class:`gradstats.collectives.Codec`), but only that which it sends may be coded.

    Returns
    -------
    Compressor or None
        The compressor; None for ``none``, PyTorch's own dense averaging.

    Raises
    ------
    InputError
        If the name or an option is unknown, or the ratio is missing or outside (0, 1].
    """
    cls = compressor_class(name)
    options = with_codec(name, options)
    variant, rule = cls.variants.get(name, {}), COMPRESSORS.rule(name)
    # `none`: DDP averages without a hook
    if variant is None:
        if options:
            raise InputError(f"compressor {name!r} has no option {', '.join(options)}")
        return None
    if ratio is None and cls.has_ratio:
        raise InputError(f"{name} sends a fraction of the elements: give it a ratio, such as 0.01")
    if rule is not None:
        from gradstats.compressors.sparse import as_compressor

        assert ratio is not None
        # the exchange takes the codec, the rule all other options
        codec = {"codec": options.pop("codec")} if "codec" in options else {}
        return as_compressor(make_selector(rule, ratio, **options), **codec)
    build: Any = cls
    with options_of("compressor", name):
        arguments = {**variant, **options}
        return build(ratio, **arguments) if cls.has_ratio else build(**arguments)  # type: ignore[no-any-return]
