"""Conclusions from records, in sentences: every verdict that is printed anywhere.

Report, terminal, objects and notebooks print what is said here, so that they cannot say different things.
"""

from __future__ import annotations

from gradstats.analysis.verdicts.advised import setting_of, what_to_try
from gradstats.analysis.verdicts.batches import batch_sentence
from gradstats.analysis.verdicts.decay import decay_shown
from gradstats.analysis.verdicts.drift import movement, scale_moves
from gradstats.analysis.verdicts.gradient import (
    compressor_did,
    largest_tie,
    sound_elements,
    spiky,
    tail_weight,
    uneven,
)
from gradstats.analysis.verdicts.laws import closest_law, named_law, tail_tests
from gradstats.analysis.verdicts.pairs import first_difference, smallest_format, what_changed
from gradstats.analysis.verdicts.plans import advice, local_advice
from gradstats.analysis.verdicts.rules import counting_rules, left_out, which_rule
from gradstats.analysis.verdicts.trial import trial_result
from gradstats.analysis.verdicts.verdict import FITS, Verdict
from gradstats.analysis.verdicts.worth import should_compress

__all__ = [
    "FITS",
    "Verdict",
    "advice",
    "batch_sentence",
    "closest_law",
    "compressor_did",
    "counting_rules",
    "decay_shown",
    "first_difference",
    "largest_tie",
    "left_out",
    "local_advice",
    "movement",
    "named_law",
    "scale_moves",
    "setting_of",
    "should_compress",
    "smallest_format",
    "sound_elements",
    "spiky",
    "tail_tests",
    "tail_weight",
    "trial_result",
    "uneven",
    "what_changed",
    "what_to_try",
    "which_rule",
]
