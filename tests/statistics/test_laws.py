"""What laws say about themselves, and what follows from it."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from support.every import every

from gradstats import fit, fit_all
from gradstats.errors import InputError
from gradstats.statistics.laws import LAWS, METHODS, Flag, Law, Solution
from gradstats.statistics.laws.choice import chosen

SIZES = {"laplace": 1, "norm": 1}


def mine(name="mine", **options):
    def closed(m):
        return Solution({"scale": m.mean}, {"scale": math.nan})

    law = {"magnitude": stats.expon, "signed": stats.laplace, "solvers": {"closed": closed}}
    return Law(name, "my own", **(law | options))


@every("law", LAWS.values(), ids=LAWS)
def test_a_law_is_consistent(law):
    assert LAWS[law.name] is law
    assert law.signed.shapes == law.magnitude.shapes
    assert len(law.parameters) == SIZES.get(law.name, 2)
    assert list(law.solvers) == [m for m in METHODS if m in law.solvers]
    assert not set(law.reasons) & set(law.solvers)
    assert set(law.symbols) <= set(law.shapes)
    for special in law.special_cases:
        assert len(LAWS[special].parameters) < len(law.parameters)
    if law.excess:
        assert LAWS[law.excess].excess == law.excess
    x = np.random.default_rng(0).laplace(size=2000)
    for method in law.solvers:
        assert set(fit(x, law.name, method).params) == {*law.parameters, "loc"}


@every(
    "law", [*LAWS.values(), mine(), mine(magnitude=stats.uniform)], ids=[*LAWS, "mine", "uniform"]
)
def test_a_law_is_bounded_where_some_parameters_end_it(law):
    ends = [
        law.end({"scale": 2.0} | dict.fromkeys(law.shapes, shape))
        for shape in (-2.0, -0.5, 0.5, 1.0, 2.0)
    ]
    assert law.bounded == any(end < math.inf for end in ends)  # NaN where a shape is not allowed
    assert law.bounded == (law.name == "double_genpareto" or law.magnitude is stats.uniform)


def test_the_page_has_the_methods_of_each_law():
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    table = re.search(r"\| model \| magnitudes \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", page)
    methods = [cell.strip() for cell in table[1].strip(" |").split("|")]
    assert methods == list(METHODS)
    rows = {}
    for line in table[2].splitlines():
        name, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name.strip("`")] = [m for m, cell in zip(methods, cells, strict=True) if cell]
    assert rows == {name: list(law.solvers) for name, law in LAWS.items()}


@pytest.mark.parametrize("method", LAWS["double_genpareto"].solvers)
def test_a_fit_says_where_its_support_ends(method):
    """Generalized Pareto with c < 0 ends at σ/−c: nothing is kept by a threshold there, and nearly nothing before."""
    x = stats.genpareto(-0.3, scale=2.0).rvs(20_000, random_state=np.random.default_rng(0))
    short = fit(x, "double_genpareto", method)
    assert short.end == pytest.approx(-short.params["scale"] / short.params["c"])
    assert short.end == pytest.approx(2.0 / 0.3, rel=0.1)
    assert short.magnitude.sf(short.end) == 0 < short.magnitude.sf(0.999 * short.end)
    assert short.threshold(1e-9) < short.end
    assert (Flag.SUPPORT in short.flags) == (np.abs(x).max() > short.end)
    heavy = stats.genpareto(0.2).rvs(20_000, random_state=np.random.default_rng(0))
    assert fit(heavy, "double_genpareto", method).end == math.inf


@every("name", [n for n in LAWS if n != "double_genpareto"])
def test_other_laws_have_no_end(name):
    x = np.random.default_rng(0).uniform(-1, 1, 5000)
    assert fit(x, name, LAWS[name].default_method).end == math.inf


def test_elements_beyond_the_end_of_any_law_are_flagged(monkeypatch):
    law = mine(magnitude=stats.uniform, signed=stats.uniform)  # on [0, mean]
    monkeypatch.setitem(LAWS._loaded, "mine", law)
    assert fit(np.array([1.0, 3.0]), "mine").flags == (Flag.SUPPORT,)
    assert fit(np.array([2.0, 2.0]), "mine").flags == ()


def test_by_default_every_law_is_fitted_that_is_no_control(monkeypatch):
    assert chosen() == ["laplace", "dgamma", "double_genpareto"]
    assert chosen("all") == list(LAWS)
    assert chosen(method="pwm") == ["laplace", "double_genpareto"]
    with pytest.raises(InputError, match="no method 'guess'; there is closed, "):
        chosen(method="guess")
    with pytest.raises(InputError, match="dgamma has no method 'pwm'"):
        chosen(["laplace", "dgamma"], "pwm")
    x = np.random.default_rng(0).laplace(size=500)
    assert {f.model for f in fit_all(x)} == set(chosen())
    assert {f.model for f in fit_all(x, "all")} == set(LAWS)
    monkeypatch.setitem(LAWS._loaded, "mine", mine())
    assert chosen() == ["laplace", "dgamma", "double_genpareto", "mine"]
    monkeypatch.setitem(LAWS._loaded, "mine", mine(control=True))
    assert "mine" not in chosen()
    assert "mine" in chosen("all")


def test_what_is_no_law_is_refused():
    with pytest.raises(InputError, match=r"law 'mine' is to be a Law, not of type int"):
        LAWS["mine"] = 3
    with pytest.raises(InputError, match=r"law 'mine' calls itself 'other'"):
        LAWS["mine"] = mine("other")
    with pytest.raises(InputError, match=r"cannot have the name 'all'"):
        mine("all")
    with pytest.raises(InputError, match=r"has solvers by guess; there is closed, "):
        mine(solvers={"guess": abs})
    with pytest.raises(
        InputError, match=r"t has no method 'closed'; it has moments, mle \(neither "
    ):
        fit(np.ones(3), "t")
    with pytest.raises(InputError, match=r"models must be a list"):
        fit_all(np.ones(3), "laplace")
    assert "mine" not in LAWS
