"""Commands about compressors in training: ``compression``."""

from __future__ import annotations

from gradstats.cli.options import FormatOption, OutputOption, PerLayerOption, SourceArgument
from gradstats.cli.output import Table
from gradstats.errors import InputError

__all__ = ["BY_LAYER", "BY_STEP", "compression"]

BY_STEP = Table(
    "The compressor step by step; times on the rank's clock",
    (
        *("trace", "step", "rank", "selected", "quality", "build_up", "bytes", "select"),
        *("communicate", "overlapped", "residual_norm", "matching_rate"),
    ),
)
BY_LAYER = Table(
    "The compressor by layer; δ ≤ 1 is LAGS-SGD's assumption 1",
    ("trace", "step", "rank", "layer", "numel", "selected", "target", "quality", "delta"),
)


def compression(  # numpydoc ignore=PR01
    source: SourceArgument,
    per_layer: PerLayerOption = False,
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show what a compressor did in a captured run: k̂/k, build-up, bytes, times, diagnosis.

    Only diagnosed steps have layers, the residual's norm and the signs' matching rate
    (`gradstats capture --diagnose-every`).
    """
    from gradstats.analysis import compression
    from gradstats.trace.sources import TraceSource, open_sources

    # files of gradients say nothing of a compressor, and are passed over beside traces
    traces = [s.trace for s in open_sources(source) if isinstance(s, TraceSource)]
    records = [r for trace in traces for r in compression.compression(trace, per_layer=per_layer)]
    if not records:
        steps = "steps of a gradstats compressor"
        if per_layer:
            steps = "diagnosed steps; capture with --diagnose-every N, CompressionState(diagnose_every=N)"
        # what info calls its compressor ran elsewhere, or was not asked
        elif names := [t.attrs["compressor"] for t in traces if "compressor" in t.attrs]:
            raise InputError(
                f"{source} does not hold what its compressor, {names[0]}, did: capture.wrap(state, compression_hook) "
                "captures it"
            )
        raise InputError(f"{source} holds no {steps}")
    (BY_LAYER if per_layer else BY_STEP).emit(records, format, output)
