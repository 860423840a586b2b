"""Layouts of the workloads' models: names, shapes and counts, without data and without memory for the weights."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from capture.workloads.config import RunConfig
from gradstats.network.timeline import LayerTime

__all__ = ["backward_pass", "layout"]


def layout(workload: str, **settings: Any) -> list[dict[str, Any]]:
    """Return the parameters of a workload's model in the order of the flat gradient.

    Parameters
    ----------
    workload : str
        One of :data:`capture.workloads.WORKLOADS`.
    **settings : object
        Fields of :class:`capture.workloads.RunConfig` that change the model, such as ``hidden``.

    Returns
    -------
    list of dict
        Records with ``layer``, ``shape``, ``numel`` and ``offset``, the number of elements before it.
    """
    config = RunConfig(workload=workload, **settings)
    module = importlib.import_module(config.info.module)
    records, offset = [], 0
    with torch.device("meta"):
        for name, parameter in module.make_model(config).named_parameters():
            # frozen parameters have no gradient, and no place in it
            if not parameter.requires_grad:
                continue
            numel = parameter.numel()
            shape = "×".join(map(str, parameter.shape))
            records.append({"layer": name, "shape": shape, "numel": numel, "offset": offset})
            offset += numel
    return records


def backward_pass(
    workload: str, repeats: int = 3, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[LayerTime]]:
    """Run backward passes of a workload's model on random inputs, to have its gradient's layout and its times.

    The inputs carry no information: the gradient is no more typical than that of the first step of a training.

    Parameters
    ----------
    workload : str
        One of :data:`capture.workloads.WORKLOADS`.
    repeats : int
        Number of passes; the one of median length is returned, the first is not counted.
    **settings : object
        Other fields of :class:`capture.workloads.RunConfig`, such as ``batch_size`` and ``seed``.

    Returns
    -------
    gradient : dict of str to float32 tensor
        Gradient of each parameter.
    layers : list of LayerTime
        Parameters in the order in which the backward pass delivers them, for :func:`gradstats.network.simulate`.
    """
    config = RunConfig(workload=workload, **settings)
    module = importlib.import_module(config.info.module)
    delivered: list[tuple[str, int, float]] = []
    passes: list[list[LayerTime]] = []
    # a caller's random numbers stay as they are
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model, inputs = module.make_model(config), module.example(config)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(
                # bound now, for the loop goes on
                lambda p, name=name: delivered.append((name, p.numel(), time.perf_counter()))
            )
        # one more, which warms up
        for _ in range(repeats + 1):
            model.zero_grad()
            delivered.clear()
            outputs = model(*inputs)
            # the scores come first, lengths or a state follow
            scores = outputs[0] if isinstance(outputs, tuple) else outputs
            # of a single score, which is a logit against none, the softmax would be 1 whatever the model
            if scores.shape[-1] == 1:
                scores = torch.cat([scores, torch.zeros_like(scores)], -1)
            loss = -scores.log_softmax(-1)[..., 0].mean()
            # the time before the first layer's gradient is that layer's
            last = time.perf_counter()
            torch.autograd.backward(loss)
            layers = []
            for name, numel, now in delivered:
                layers.append(LayerTime(name, numel, now - last))
                last = now
            passes.append(layers)
    # of whole passes: medians layer by layer would be of no pass
    middle = sorted(passes[1:], key=lambda p: sum(layer.backward for layer in p))[repeats // 2]
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradient, middle
