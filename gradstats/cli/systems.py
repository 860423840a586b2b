"""What compressors did in training: ``compression``."""

from __future__ import annotations

from gradstats.cli.options import FormatOption, OutputOption, PerLayerOption, SourceArgument
from gradstats.cli.output import emit
from gradstats.errors import InputError

__all__ = ["compression"]


def compression(
    source: SourceArgument,
    per_layer: PerLayerOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show what a compressor did in a captured run: k̂/k, build-up, bytes, times, diagnosis.

    Layers, the residual's norm and the signs' matching rate are there in the steps that were diagnosed
    (`gradstats capture --diagnose-every`).
    """
    from gradstats.analysis.compression import compression as describe
    from gradstats.trace.sources import TraceSource, open_sources

    sources = open_sources(source)
    traces = [s.trace for s in sources if isinstance(s, TraceSource)]
    records = [r for trace in traces for r in describe(trace, per_layer=per_layer)]
    if not records:
        steps = "diagnosed steps" if per_layer else "steps of a gradstats compressor"
        raise InputError(f"{source} holds no {steps}")
    columns = ["trace", "step", "rank"]
    if per_layer:
        columns += ["layer", "numel", "selected", "target", "quality", "delta"]
        title = "The compressor by layer; δ ≤ 1 is LAGS-SGD's assumption 1"
    else:
        columns += ["selected", "quality", "build_up", "bytes", "select", "communicate"]
        columns += ["overlapped", "residual_norm", "matching_rate"]
        title = "The compressor step by step; seconds on the rank's clock"
    emit(records, format, output, columns=columns, title=title)
