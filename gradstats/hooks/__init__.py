"""Parts of a training loop: what DDP or FSDP2 calls, its state, the memories of a rank, and local steps."""

from gradstats.hooks.corrections import AdamCorrection, MomentumCorrection, Nesterov
from gradstats.hooks.diagnostics import Diagnosis
from gradstats.hooks.guard import NonFinite
from gradstats.hooks.hook import compression_hook
from gradstats.hooks.local_steps import LocalSteps
from gradstats.hooks.memory import ErrorFeedback, Memory, NoMemory
from gradstats.hooks.monitor import Monitor
from gradstats.hooks.ratio import dgc_warm_up
from gradstats.hooks.shards import ShardHook, shard_hook
from gradstats.hooks.state import CompressionState
from gradstats.hooks.step import Scaler
from gradstats.hooks.trial import Decision, Trial, TrialResult
from gradstats.trace.record import StepRecord

__all__ = [
    "AdamCorrection",
    "CompressionState",
    "Decision",
    "Diagnosis",
    "ErrorFeedback",
    "LocalSteps",
    "Memory",
    "MomentumCorrection",
    "Monitor",
    "Nesterov",
    "NoMemory",
    "NonFinite",
    "Scaler",
    "ShardHook",
    "StepRecord",
    "Trial",
    "TrialResult",
    "compression_hook",
    "dgc_warm_up",
    "shard_hook",
]
