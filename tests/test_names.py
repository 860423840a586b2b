"""Names that users give: what annotations and docstrings say of them is what the code takes."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Literal, get_args, get_origin

import test_public_api
from support.every import every

import gradstats
from capture.workloads.config import NesterovForm
from gradstats import collectives, compressors, hooks, laws, network, plots, thresholds, trace
from gradstats.analysis import drift, wire
from gradstats.collectives.codec import _FLOATS, SCALED
from gradstats.network import question
from gradstats.plots import speedups, systems
from gradstats.primitives import deltas, formats
from gradstats.tables import FORMATS, Format

# Where an alias cannot be what the code asks, as that is a table with more in it. Where it is, get_args() stands there.
TABLES = {
    "EstimatorName": (thresholds.EstimatorName, thresholds.ESTIMATORS.built_in),
    "estimators": (thresholds.EstimatorName, [e.name for e in thresholds._OWN]),
    "LawName": (laws.LawName, laws.LAWS.built_in),
    "CompressorName": (
        compressors.CompressorName,
        [
            name
            for name in compressors.COMPRESSORS
            if name in {"topk", *thresholds.ESTIMATORS.built_in, *compressors.COMPRESSORS.built_in}
        ],
    ),
    "SelectorName": (compressors.SelectorName, ("topk", *thresholds.ESTIMATORS.built_in)),
    "NumberFormat": (formats.NumberFormat, formats.FORMATS),
    "Values": (collectives.Values, (*_FLOATS, *SCALED)),
    "WeightType": (deltas.WeightType, deltas.WIDTHS),
    "DeltaCodec": (deltas.DeltaCodec, deltas.CODECS),
    "Quantity": (drift.Quantity, drift.QUANTITIES),
    "LinkName": (network.LinkName, network.LINKS),
    "Baseline": (network.Baseline, question.BASELINES),
    "CurveValue": (plots.CurveValue, systems._MEASURED),
    "CurveBy": (plots.CurveBy, systems._SPENT),
    "SpeedupAt": (plots.SpeedupAt, speedups._LABELS),
    "NesterovForm": (NesterovForm, ("none", *get_args(hooks.Nesterov))),
    "Kind": (trace.Kind, trace.KINDS),
    "Store": (trace.Store, trace.STORES),
    "Dtype": (trace.Dtype, trace.DTYPES),
    "Method": (laws.Method, laws.METHODS),
    "Indices": (collectives.Indices, collectives.codec.INDICES),
    "Format": (Format, FORMATS),
}


@every(("alias", "table"), TABLES.values(), ids=list(TABLES))
def test_an_alias_has_the_names_that_the_code_takes_in_their_order(alias, table):
    assert get_args(alias) == tuple(table)
    assert set(wire.USUAL) <= set(get_args(formats.NumberFormat))


def callables():
    """Yield every public function, class and method with its name and its module."""
    for module in test_public_api.MODULES:
        for public in test_public_api.found(module).__all__:
            value = getattr(test_public_api.found(module), public)
            if inspect.ismodule(value):  # gradstats.pot can be called, too
                continue
            yield f"{module}.{public}", value
            if inspect.isclass(value):
                for attribute in vars(value):
                    inner = test_public_api.ours(value, attribute)
                    if not attribute.startswith("_") and inner is not None:
                        yield f"{module}.{public}.{attribute}", inner


def documented(function):
    """Yield parameters that a docstring gives names for: ``name : {"a", "b"}``."""
    for names, said in re.findall(
        r"^ *([\w, ]+) : .*?\{(['\"].*?)\}", function.__doc__ or "", re.M
    ):
        for name in names.split(", "):
            yield name, tuple(re.findall(r"['\"]([^'\"]+)['\"]|(…)", said))


def literals(annotation, function):
    """Return the names of the literals in an annotation, which is text, and of what a file imports for it alone."""
    module = importlib.import_module(function.__module__)
    found = []
    for word in re.findall(r"Literal\[.*?\]|\b[A-Z]\w+", annotation):
        if word.startswith("Literal["):
            found += re.findall(r"['\"]([^'\"]+)['\"]", word)
        else:
            alias = getattr(module, word, None) or getattr(gradstats, word, None)
            found += get_args(alias) if get_origin(alias) is Literal else ()
    return tuple(found)


def test_docstrings_and_annotations_have_the_same_names():
    seen = 0
    for where, function in callables():
        if not inspect.isroutine(function) and not inspect.isclass(function):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        for name, pairs in documented(function):
            if name not in parameters:  # an attribute, or a result
                continue
            said = [text for text, more in pairs if not more]
            known = literals(str(parameters[name].annotation), function)
            if any(more for _, more in pairs):
                assert set(said) < set(known), (where, name)
            else:
                # of an open set, those that the function itself has a use for
                assert set(said) == set(known) or (
                    set(said) < set(known) and "| str" in str(parameters[name].annotation)
                ), (where, name, known)
            seen += 1
    assert seen > 30


@every("module", test_public_api.MODULES)
def test_a_default_that_is_a_name_is_annotated_as_one(module):
    """Text with a default of one word is a name; those that are none are listed."""
    free = {"prefix", "label", "device", "problem", "diverged", "status", "note", "criteria"}
    free |= {"operation"}  # of a network: collectives, and local work by any name
    free |= {"quantity"}  # of a table: any column
    for where, function in callables():
        if not where.startswith(module) or not callable(function):
            continue
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        for p in parameters:
            if isinstance(p.default, str) and p.name not in free:
                assert literals(str(p.annotation), function), (where, p.name)
