"""The tap: record the gradients of a training run into a trace.

``capture`` builds on :mod:`gradstats`; nothing in :mod:`gradstats` imports it.
"""

from capture.schedule import Schedule, at, every, logarithmic
from capture.tap import Capture, CaptureWarning

__all__ = ["Capture", "CaptureWarning", "Schedule", "at", "every", "logarithmic"]
