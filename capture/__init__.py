"""Record the gradients of a training run into a trace.

``capture`` builds on :mod:`gradstats`; nothing in :mod:`gradstats` imports it. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.facade import Capture
    from capture.recorder import CaptureWarning
    from capture.schedule import Schedule, at, every, logarithmic, recent

_HOME = {
    "Capture": "capture.facade",
    "CaptureWarning": "capture.recorder",
    "Schedule": "capture.schedule",
    "at": "capture.schedule",
    "every": "capture.schedule",
    "logarithmic": "capture.schedule",
    "recent": "capture.schedule",
}

__all__ = ["Capture", "CaptureWarning", "Schedule", "at", "every", "logarithmic", "recent"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'capture' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    # kept, so that this function is not called for it again
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
