"""What an exchange of gradients costs, predicted: bytes, seconds, pipelining and the growth of unions."""

from gradstats.network.exchange import Exchange, break_even, exchange
from gradstats.network.model import ALGORITHMS, Interval, Line, Network, Work, fit_line, interval
from gradstats.network.timeline import (
    LayerTime,
    Message,
    Timeline,
    deliveries,
    layer_ratios,
    layer_times,
    simulate,
)
from gradstats.network.union import UnionGrowth, union_growth

__all__ = [
    "ALGORITHMS",
    "Exchange",
    "Interval",
    "LayerTime",
    "Line",
    "Message",
    "Network",
    "Timeline",
    "UnionGrowth",
    "Work",
    "break_even",
    "deliveries",
    "exchange",
    "fit_line",
    "interval",
    "layer_ratios",
    "layer_times",
    "simulate",
    "union_growth",
]
