"""Predicted cost of an exchange of gradients: bytes, seconds, pipelining, the growth of unions, and a plan.

:func:`gradstats.network.measure.measure` measures a cluster, and ``python -m gradstats.network`` does so from the
command line.
"""

from gradstats.analysis.verdicts.plans import advice, doubtful, local_advice
from gradstats.compressors.cost import Exchange, Work
from gradstats.network.exchange import break_even, exchange
from gradstats.network.links import LINKS, Link, LinkName, link
from gradstats.network.model import ALGORITHMS, Interval, Line, Network, fit_line, interval
from gradstats.network.plan import HELD, TARGETS, plan
from gradstats.network.prediction import SYSTEMS
from gradstats.network.question import Baseline
from gradstats.network.timeline import (
    LayerTime,
    Message,
    Timeline,
    deliveries,
    lags_way,
    layer_ratios,
    layer_times,
    local_interval,
    simulate,
)
from gradstats.network.union import UnionGrowth, union_growth

__all__ = [
    "ALGORITHMS",
    "HELD",
    "LINKS",
    "SYSTEMS",
    "TARGETS",
    "Baseline",
    "Exchange",
    "Interval",
    "LayerTime",
    "Line",
    "Link",
    "LinkName",
    "Message",
    "Network",
    "Timeline",
    "UnionGrowth",
    "Work",
    "advice",
    "break_even",
    "deliveries",
    "doubtful",
    "exchange",
    "fit_line",
    "interval",
    "lags_way",
    "layer_ratios",
    "layer_times",
    "link",
    "local_advice",
    "local_interval",
    "plan",
    "simulate",
    "union_growth",
]
