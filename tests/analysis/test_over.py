"""Options that tables share: users see them in signatures, help and completion as if each function had its own."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest
from support.every import every

from gradstats.analysis.over import Gradients, Over, Spread, SpreadGradients

SHARING = {
    "agreement.agreement": Over,
    "closest.law_pairs": SpreadGradients,
    "compare.compare": Over,
    "decay.compressibility_records": SpreadGradients,
    "drift.drift": Spread,
    "drift.over_training": Spread,
    "fits.fit_records": Spread,
    "peaks.mixture_records": SpreadGradients,
    "peaks.pot": Spread,
    "peaks.pot_records": SpreadGradients,
    "quality.quality": Over,
    "quality.quality_series": Over,
    "quality.stage_budget": Over,
}


def named(name):
    module, function = name.split(".")
    return getattr(importlib.import_module(f"gradstats.analysis.{module}"), function)


@every("name", SHARING)
def test_users_see_every_option_with_its_default_and_its_meaning(name):
    parameters = inspect.signature(named(name)).parameters
    assert "over" not in parameters
    shared = SHARING[name].__annotations__
    assert shared.keys() <= parameters.keys()
    for option in shared:
        default = parameters[option].default
        assert default is None or default is False or default() is None, option
    text = inspect.getdoc(named(name))
    described = re.search(r"Parameters\n-+\n(.*?)\n\n", text, re.DOTALL)[1]
    entries = re.findall(r"^(\S.*?) : ", described, re.MULTILINE)
    assert sorted(n for e in entries for n in e.split(", ")) == sorted(parameters)


def test_a_wrong_name_is_refused_by_the_function_that_was_called():
    with pytest.raises(TypeError, match=r"quality\(\) got an unexpected keyword argument 'stepz'"):
        named("quality.quality")(np.ones(3), stepz=[1])
    with pytest.raises(TypeError, match=r"quality\(\) missing a required argument: 'source'"):
        named("quality.quality")(steps=[1])


def test_completion_in_a_notebook_knows_them():
    shells = pytest.importorskip("IPython.core.interactiveshell")
    completion = importlib.import_module("IPython.core.completer")
    shell = shells.InteractiveShell()
    shell.user_ns["quality"] = named("quality.quality")
    for jedi in (True, False):
        shell.Completer.use_jedi = jedi
        with completion.provisionalcompleter():
            offered = [c.text for c in shell.Completer.completions("quality(x, ", 11)]
        assert {f"{option}=" for option in Over.__annotations__} <= set(offered), jedi


def test_every_option_has_a_meaning():
    for options in (Gradients, Over, Spread, SpreadGradients):
        shown = inspect.signature(named("drift.drift")).parameters
        assert options.__annotations__.keys() <= shown.keys()
