"""Fixtures of the pins; `stored.py` says what a pin is and how it is rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from pins.stored import Pins, processor


@pytest.fixture(scope="module")
def pins(request):
    """The values of a test's own file: `thresholds` of `test_thresholds.py`."""
    return Pins(Path(request.module.__file__).stem.removeprefix("test_"))


@pytest.fixture(scope="session")
def kind():
    """The kind of processor."""
    return processor()
