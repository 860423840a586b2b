"""What every rank comes to need, imported and compiled once: the process that ranks are forked from imports this."""

import gc
from importlib import import_module

from gradstats.compressors import COMPRESSORS
from gradstats.thresholds import ESTIMATORS, warm_up

__all__: list[str] = []

for name in (
    "capture.workloads.training",
    "torch._inductor.config",  # DistributedDataParallel and deterministic algorithms import it
    "torch.onnx",
):
    import_module(name)
warm_up()
for registry in (ESTIMATORS, COMPRESSORS):
    len(registry)  # looks through the installed packages
gc.freeze()  # ranks would look through it again and again, and it stays
import_module("sklearn.datasets")  # last, for it may be missing
