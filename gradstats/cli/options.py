"""Options that several commands share, and how names are checked and completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from gradstats.errors import InputError, unknown
from gradstats.statistics.laws import LAWS, METHODS

__all__ = [
    "EstimatorOption",
    "EverythingOption",
    "FormatOption",
    "IndicesOption",
    "KindOption",
    "LayerOption",
    "MethodOption",
    "ModelOption",
    "OutputOption",
    "PerLayerOption",
    "QuantityOption",
    "RankOption",
    "RatioOption",
    "SchedulerOption",
    "SourceArgument",
    "StepOption",
    "ValuesOption",
    "models_of",
    "one_of",
    "trained",
]


def one_of(what: str, names: Callable[[], Sequence[str]]) -> dict[str, Any]:
    """Return the settings of an option or argument that takes one of some names.

    Parameters
    ----------
    what : str
        What is named, such as ``estimator``; the error says it.
    names : callable
        Returns the names. Called when a value is checked or completed, so that ``--help`` loads no registry.

    Returns
    -------
    dict
        Keyword arguments of :func:`typer.Option`: completion, and a check that raises :class:`InputError`.
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    def check(value: Any) -> Any:
        # a repeatable option gives a list, one that is absent None
        for choice in [value] if isinstance(value, str) else value or ():
            if choice not in names():
                raise unknown(what, choice, names())
        return value

    return {"autocompletion": complete, "callback": check}


def trained() -> Sequence[str]:
    """Return the names of compressors that a training takes: all, and the bare threshold rules.

    Returns
    -------
    sequence of str
        Names that ``--compressor`` takes.
    """
    from gradstats.compressors import COMPRESSORS, RULE, SELECTORS

    return (*COMPRESSORS, *(f"{RULE}{name}" for name in SELECTORS))


def _estimators() -> Sequence[str]:
    from gradstats.thresholds import ESTIMATORS

    return tuple(ESTIMATORS)


def _formats() -> Sequence[str]:
    from gradstats.tables import FORMATS

    return FORMATS


def _indices() -> Sequence[str]:
    from gradstats.collectives.codec import INDICES

    return INDICES


def _values() -> Sequence[str]:
    from gradstats.collectives.codec import VALUES

    return VALUES


def _kinds() -> Sequence[str]:
    from gradstats.trace import Kind

    return get_args(Kind)


def _methods() -> Sequence[str]:
    return METHODS


def _models() -> Sequence[str]:
    return (*LAWS, "all")


def models_of(names: Sequence[str] | None) -> list[str] | Literal["all"] | None:
    """Return the models asked for as the functions take them.

    Parameters
    ----------
    names : sequence of str or None
        What ``--model`` was given.
    """
    return "all" if names and "all" in names else [*(names or ())] or None


def _quantities() -> Sequence[str]:
    from gradstats.analysis.drift import QUANTITIES

    return tuple(QUANTITIES)


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A trace, a folder of traces, or a .npy, .npz, .safetensors or .pt file.",
        show_default=False,
    ),
]
ENDINGS = {
    ".csv": "csv",
    ".json": "json",
    ".md": "markdown",
    ".parquet": "parquet",
    ".tex": "latex",
}
ENDINGS[".txt"] = "table"
"""Formats by the endings of files that tables are written to."""


def _format_of(context: typer.Context, value: str) -> str:
    """Return the format that a file's ending asks for, or the one given."""
    if value not in _formats():
        raise unknown("format", value, _formats())
    # known by now, because -o is eager
    output = context.params.get("output")
    source = context.get_parameter_source("format")
    # a default format is not the user's choice, and gives way to the file's ending
    is_explicit = source is not None and source.name != "DEFAULT"
    if output is None or not output.suffix:
        return value
    ending = output.suffix.lower()
    if ending not in ENDINGS and not is_explicit:
        raise InputError(f"no format for {output}: name it {', '.join(ENDINGS)}, or give --format")
    if is_explicit and ENDINGS.get(ending, value) != value:
        raise InputError(f"--format {value} is not what {output} is named for: give one of them")
    return ENDINGS.get(ending, value)


FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        help="Format: table, json, csv, markdown, latex or parquet; by default that of FILE's ending.",
        metavar="FORMAT",
        **one_of("format", _formats) | {"callback": _format_of},
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Write to this file instead of stdout: .csv, .json, .md, .parquet, .tex or .txt.",
        metavar="FILE",
        is_eager=True,
    ),
]
StepOption = Annotated[
    list[int] | None, typer.Option("--step", help="Look at this step only (repeatable).")
]
RankOption = Annotated[
    list[int] | None, typer.Option("--rank", help="Look at this rank only (repeatable).")
]
KindOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        help="Look at this kind only: gradient, corrected, local, pseudogradient, update or weight (repeatable).",
        **one_of("kind", _kinds),
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler", help="Address of a dask cluster that does the work.", metavar="ADDRESS"
    ),
]
RttOption = Annotated[
    str | None,
    typer.Option(
        help="Round trip between two workers of --link, as `ping` shows it: 20ms, 80us.",
        metavar="TIME",
    ),
]
IndicesOption = Annotated[
    str,
    typer.Option(
        help="How positions travel: plain, rice (coded gaps), or chunk (12 bits).",
        **one_of("indices", _indices),
    ),
]
ValuesOption = Annotated[
    str,
    typer.Option(
        help="How values travel: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int4, int2, mxfp8, "
        "mxfp6, mxfp4 or nvfp4.",
        **one_of("values", _values),
    ),
]
EverythingOption = Annotated[
    bool,
    typer.Option(
        "--all", help="Show every step and row in the table; other formats have them anyway."
    ),
]
PerLayerOption = Annotated[
    bool, typer.Option("--per-layer", help="Show each parameter by itself, too.")
]
LayerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layer",
        help="Show the parameters whose names match, such as 'conv*', by themselves (repeatable).",
        metavar="PATTERN",
    ),
]
RatioOption = Annotated[
    list[float] | None, typer.Option("--ratio", help="Kept fraction k/d (repeatable).")
]
EstimatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--estimator",
        help="Threshold rule (repeatable); all by default.",
        **one_of("estimator", _estimators),
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help=f"Model to fit (repeatable): {', '.join(LAWS)} or all; by default those that are no controls.",
        **one_of("model", _models),
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="Method of the fits: closed, moments, mle or pwm. By default closed forms where there are any.",
        **one_of("method", _methods),
    ),
]
QuantityOption = Annotated[
    list[str] | None,
    typer.Option(
        "--quantity",
        help="Quantity to follow (repeatable): mean, threshold, shape, p (these by default), rms, max, scale, ks, …",
        **one_of("quantity", _quantities),
    ),
]
