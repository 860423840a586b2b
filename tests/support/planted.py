"""A trial of the campaign that does what none should."""

from __future__ import annotations

import os
from pathlib import Path


def trial(number: int, folder: Path) -> str:
    """Die, or raise, in some of five trials."""
    if number == 1:
        os._exit(1)
    if number == 3:
        raise ValueError("raw")
    return "fine"
