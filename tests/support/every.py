"""One test for many cases: all run, and those that fail are named."""

from __future__ import annotations

import functools
import inspect
from itertools import product

import pytest

__all__ = ["every"]


def every(names, cases, ids=None):
    """Run a test for all of these cases as one item; `pytest.mark.parametrize` makes an item of each.

    Decorators on top of each other run the product. A case has its own `monkeypatch` and `tmp_path`;
    other fixtures are made once for all cases, so what a case changes it makes itself.
    """
    names = tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)
    cases = [case if len(names) > 1 else (case,) for case in cases]
    assert cases, "a test without a case tests nothing"
    if ids is None or callable(ids):
        ids = ["-".join(_label(value, ids) for value in case) for case in cases]
    axis = [
        (f"{','.join(names)}={label}", dict(zip(names, case, strict=True)))
        for label, case in zip(ids, cases, strict=True)
    ]

    def decorate(function):
        inner, axes = getattr(function, "every", (function, []))
        axes = [axis, *axes]
        given = {name for axis in axes for name in axis[0][1]}
        fixtures = [p for p in inspect.signature(inner).parameters.values() if p.name not in given]
        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(inner)
        def test(*self, subtests, **fixtures):
            for number, case in enumerate(product(*axes)):
                label = " ".join(label for label, _ in case)
                with subtests.test(label), pytest.MonkeyPatch.context() as patch:
                    own = fixtures.copy()
                    for _, values in case:
                        own |= values
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    if "tmp_path" in own:
                        own["tmp_path"] /= str(number)
                        own["tmp_path"].mkdir()
                    inner(*self, **own)

        test.every = inner, axes
        test.__signature__ = inspect.Signature([*fixtures, subtests])
        return test

    return decorate


def _label(value, ids):
    """Return a value as it is named in a report."""
    text = ids(value) if ids else getattr(value, "__name__", None)
    return f"{value!s:.40}".replace("\n", " ") if text is None else str(text)
