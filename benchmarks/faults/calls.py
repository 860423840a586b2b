"""Hostile arrays and arguments to every public function: a right answer or one line, soon and in little memory."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from support.hostile import Call, calls, figures, verdict


def hostile(number: int, folder: Path) -> str:
    """Make one call; when all have been made, others are drawn."""
    total = len(_calls(0))
    label, call = _calls(number // total)[number % total]
    outcome = verdict(call)
    assert outcome in ("right", "refused"), f"{label}: {outcome}"
    return outcome


@functools.lru_cache(2)
def _calls(seed: int) -> list[tuple[str, Call]]:
    rng = np.random.default_rng(seed)
    return [*calls(rng), *calls(rng, figures)]
