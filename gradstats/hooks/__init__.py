"""What a training loop registers with DDP: the hook, its state, and what a rank remembers."""

from gradstats.hooks.diagnostics import Diagnosis
from gradstats.hooks.hook import CompressionState, NonFinite, compression_hook, dgc_warm_up
from gradstats.hooks.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from gradstats.trace.record import StepRecord

__all__ = [
    "CompressionState",
    "Diagnosis",
    "ErrorFeedback",
    "Memory",
    "MomentumCorrection",
    "NoMemory",
    "NonFinite",
    "StepRecord",
    "compression_hook",
    "dgc_warm_up",
]
