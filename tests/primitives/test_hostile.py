"""Hostile arrays and arguments: every public function answers rightly or with one line, at once."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from support import hostile

import gradstats
from gradstats.errors import InputError
from gradstats.primitives.ratio import check_count, check_number, check_ratio, check_ratios, shown


def test_every_public_function():
    """Neither raw exceptions nor warnings, wrong answers, seconds or a hundred megabytes.

    Every third call; the campaign makes all of them.
    """
    calls = list(hostile.calls(np.random.default_rng(3)))
    functions = Counter(label.partition(",")[0] for label, _ in calls[::3])
    assert functions.keys() == {label.partition(",")[0] for label, _ in calls}
    assert min(functions.values()) > 12
    verdicts = [(label, hostile.verdict(call)) for label, call in calls[::3]]
    assert [each for each in verdicts if each[1] not in ("right", "refused")] == []
    assert {verdict for _, verdict in verdicts} == {"right", "refused"}


def test_every_figure():
    """Every fifth call; the campaign makes all of them."""
    calls = islice(hostile.calls(np.random.default_rng(3), hostile.figures), 0, None, 5)
    verdicts = {label: hostile.verdict(call) for label, call in calls}
    assert {k: v for k, v in verdicts.items() if v not in ("right", "refused")} == {}
    assert set(verdicts.values()) == {"right", "refused"}


def test_no_public_function_is_left_out():
    assert hostile.uncovered() == []


def test_verdicts_see_what_is_wrong():
    assert hostile.verdict(lambda: 1 / 0).startswith("ZeroDivisionError")
    assert hostile.verdict(lambda: np.float64(1e300) ** 2).startswith("RuntimeWarning")
    assert hostile.verdict(lambda: bytearray(200_000_000)).startswith("right, with ")
    assert hostile.verdict(lambda: gradstats.threshold(np.ones(2), 2)) == "refused"
    assert hostile.verdict(lambda: _raise(InputError("two\nlines"))) == r"InputError('two\nlines')"
    assert hostile.verdict(lambda: _raise(InputError("x" * 1000))).startswith("InputError('xx")


def _raise(error):
    raise error


@pytest.mark.parametrize("value", [0.1, np.float32(0.1), np.float16(0.1), np.longdouble(0.1)])
def test_scalars_are_numbers(value):
    found = check_ratio(value)
    assert type(found) is float
    assert found == float(value)


def test_what_is_not_a_number():
    for value in ("0.1", None, [0.1], 1j, float("nan"), True, torch.tensor(0.1), np.array(0.1)):
        with pytest.raises(
            InputError, match=r"ratio must be in \(0, 1\], the fraction of"
        ) as caught:
            check_ratio(value)
        assert str(caught.value).endswith(f"not {shown(value)}")
        with pytest.raises(InputError, match="bits must be a whole number, from 0 to 12, not"):
            check_count(value, "bits", 0, 12)
    with pytest.raises(InputError, match="steps must be at least 1, not 0"):
        check_count(0, "steps")
    assert type(check_count(np.int8(3), "bits")) is int
    for value in ("0.1", 0.1, None, torch.tensor(0.1)):
        with pytest.raises(InputError, match="ratios must be a list or a tuple, not"):
            check_ratios(value)
    assert check_ratios(iter((0.5, 1))) == [0.5, 1.0]


def test_ends_of_intervals():
    for ends, low, high in (("()", 0, 0), ("(]", 0, 1), ("[)", 1, 0), ("[]", 1, 1)):
        for value, inside in ((0, low), (1, high), (0.5, 1), (-1, 0), (2, 0), (10**400, 0)):
            if inside:
                assert check_number(value, "level", 0, 1, ends) == value
            else:
                with pytest.raises(InputError, match="level must be in"):
                    check_number(value, "level", 0, 1, ends)


def test_what_an_error_repeats_is_short():
    assert shown("9" * 10**6) == f"'{'9' * 39}…"
    assert shown("a\n\x1b[31m") == r"'a\n\x1b[31m'"
    assert shown(10**5000) == "so large a number"
    assert shown(np.float32(0.5)) == "0.5"
    assert shown(np.ones(3)) == "a value of type ndarray"


def test_a_mask_is_not_overlooked():
    masked = np.ma.array([1.0, 100.0], mask=[False, True])
    with pytest.raises(InputError, match=r"masked; call \.compressed\(\)"):
        gradstats.moments(masked)


def test_byte_order_does_not_narrow():
    x = np.array([1e200, -3e-200, 2.0], ">f8")
    assert gradstats.threshold(x, 0.3) == 1e200
    assert gradstats.select(x, 1e-200).values.tolist() == x.tolist()
    assert gradstats.moments(x).max == 1e200
