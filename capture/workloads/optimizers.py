"""Optimizers of the reference runs: the workload's own, or another by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture.workloads.config import RunConfig

if TYPE_CHECKING:
    import torch

__all__ = ["BETAS", "make_optimizers"]

BETAS = (0.9, 0.95)
"""AdamW's decays, as transformers are trained."""


def make_optimizers(config: RunConfig, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run's model: two for Muon, else one.

    Muon takes matrices alone. As its authors do it, AdamW trains the rest: embeddings, the output layer, vectors, and
    what torch's Muon does not take, kernels of convolutions. Where no matrix would be left, as in convolutional
    networks, Muon has the output layer. Its updates are scaled to the size of AdamW's (``match_rms_adamw``), so that
    one learning rate is both's.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    model : torch.nn.Module
        The model, in DDP or not.
    """
    import torch

    training, rate = config.training(), config.initial_learning_rate
    decayed: dict[str, Any] = {"lr": rate, "weight_decay": training.weight_decay}
    name = config.optimizer_name
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.adam_correction:
        # the memory has made Adam's steps; to subtract them, and rate · decay · parameter, is what is left of AdamW
        return [torch.optim.SGD(trained, **decayed)]
    if name == "AdamW":
        return [torch.optim.AdamW(trained, betas=BETAS, **decayed)]
    if name == "Muon":
        matrices = _matrices(model)
        chosen = {id(p) for p in matrices}
        # by identity: == compares elements
        rest = [p for p in trained if id(p) not in chosen]
        adamw = [torch.optim.AdamW(rest, betas=BETAS, **decayed)] if rest else []
        return [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **decayed), *adamw]
    outside = not config.whole_system  # a system corrects its momentum in the memory
    decay = training.weight_decay if outside else 0.0
    groups: list[Any] = [*trained]
    if decay and not config.decays_vectors:
        # biases, and scales and shifts of normalisation
        vectors = [p for p in groups if p.ndim < 2]
        groups = [
            {"params": [p for p in groups if p.ndim > 1]},
            *([{"params": vectors, "weight_decay": 0.0}] if vectors else []),
        ]
    return [
        torch.optim.SGD(
            groups,
            lr=rate,
            momentum=training.momentum if outside else 0.0,
            nesterov=outside and bool(training.nesterov),
            weight_decay=decay,
        )
    ]


def _matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that Muon takes."""
    import torch

    embeddings = {
        id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)
    }  # an output layer may be tied to one
    every = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    inner = [p for p in every if id(p) not in embeddings]
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    # the last linear layer is taken for the output
    outputs = {id(linear[-1].weight)} if linear else set()
    hidden = [p for p in inner if id(p) not in outputs]
    return hidden or inner or every
