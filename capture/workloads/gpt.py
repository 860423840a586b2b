"""A decoder-only transformer that predicts words, of torch's own modules, from a tenth of a million parameters on.

Source: GPT-2 (Radford et al. 2019): normalisation before each part, learned positions, output weights tied to the
embedding. Words take the place of its byte pairs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.task import Task, check_batch
from capture.workloads.text import load_ptb, load_pydoc, words_to_ids
from gradstats.errors import InputError

__all__ = ["GPT", "example", "make_model", "make_task", "size_of", "text_task", "texts"]

_UNSEEN = 10
"""Of the embedded text the last one in so many words is never trained on."""
_UNSEEN_WINDOWS = 64
"""Most windows of unseen text that are predicted."""


class _Size(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int


_SIZES = {
    "0.1M": _Size(2, 24, 2, 32),
    "0.5M": _Size(4, 64, 4, 64),
    "2M": _Size(4, 160, 5, 64),
    "10M": _Size(7, 320, 5, 128),
    "30M": _Size(9, 512, 8, 256),
    "124M": _Size(17, 768, 12, 512),
}
"""Shapes by the parameters that they have with 4,000 words, about."""


class GPT(nn.Module):
    """Embeddings, layers of masked self-attention, and the embedding's transpose as the output.

    Parameters
    ----------
    vocab : int
        Number of words.
    layers : int
        Number of layers.
    width : int
        Width of embeddings and layers.
    heads : int
        Number of attention heads; it divides the width.
    context : int
        Most words that are looked at.
    """

    def __init__(self, vocab: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(self._layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # a module that shares its weight: FSDP2 gathers what modules own, not what others reach into; no memory of its
        # own, and no random numbers
        self.output = nn.Linear(width, vocab, bias=False, device="meta")
        self.output.weight = self.words.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # what is added to the residual stream: less of each, the more layers add to it
                adds = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if adds else 1))

    @staticmethod
    def _layer(width: int, heads: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )

    def _through(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what leaves the layers, and what is added to the loss, if anything."""
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return hidden, None

    def forward(self, words: Tensor) -> Any:
        """Predict every next word.

        Parameters
        ----------
        words : int64 tensor, shape (batch, time)
            Word numbers.

        Returns
        -------
        tensor, shape (batch, time, vocab)
            Scores of the next word; in a tuple with it, if something is to be added to the loss.
        """
        time = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=words.device)
        hidden = self.words(words) + self.positions(torch.arange(time, device=words.device))
        hidden, added = self._through(hidden, mask)
        scores = self.output(self.norm(hidden))
        return scores if added is None else (scores, added)


class _Windows:
    """Windows of a text, in an order of their own in each pass over it."""

    def __init__(self, ids: Tensor, context: int) -> None:
        # the last word of a window is predicted, and followed by none
        count = (len(ids) - 1) // context
        if count < 1:
            raise InputError(f"a text of {len(ids)} words is shorter than a window of {context}")
        # windows overlap by that word: it is the first of the next one
        rows = torch.arange(count)[:, None] * context + torch.arange(context + 1)
        self.rows = ids[rows]

    def batch(self, config: RunConfig, rank: int, size: int, step: int) -> Tensor:
        whole = size * config.nproc
        per_pass = len(self.rows) // whole
        # alike on all ranks, of which each takes its part of the order
        shuffle = torch.Generator().manual_seed(config.seed + step // per_pass)
        order = torch.randperm(len(self.rows), generator=shuffle)
        first = step % per_pass * whole + rank * size
        return self.rows[order[first : first + size]]


def size_of(config: RunConfig) -> _Size:
    """Return layers, width, heads and context of a run's transformer.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    """
    return _SIZES[config.size or config.info.size]


def make_model(config: RunConfig) -> GPT:
    """Build the model of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.

    Returns
    -------
    GPT
        Model of the run's size and vocabulary.
    """
    return GPT(config.setting("vocab"), *size_of(config))


def example(config: RunConfig) -> tuple[Tensor]:
    """Return random inputs of the model.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.

    Returns
    -------
    tuple
        One batch of windows.
    """
    shape = config.setting("batch_size"), size_of(config).context
    return (torch.randint(config.setting("vocab"), shape),)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the data.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    rank : int
        Rank of this process.

    Returns
    -------
    Task
        Model and data of this rank.
    """
    return text_task(config, rank, make_model(config), *texts(config))


def texts(config: RunConfig) -> tuple[Tensor, Tensor | None]:
    """Return the text of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.

    Returns
    -------
    text : int64 tensor, shape (words,)
        Numbers of the words that are trained on.
    unseen : int64 tensor, shape (words,), or None
        Those of the text that is not, if there is one.
    """
    vocab = config.setting("vocab")
    folder = config.data_dir if config.info.files else None
    if folder is None:
        ids = words_to_ids(load_pydoc(), vocab)
        end = len(ids) - len(ids) // _UNSEEN
        return ids[:end], ids[end:]
    words = load_ptb(folder)
    has_other = (folder / "ptb.valid.txt").is_file()
    other = words_to_ids(load_ptb(folder, "valid"), vocab, words) if has_other else None
    return words_to_ids(words, vocab), other


def text_task(config: RunConfig, rank: int, model: GPT, text: Tensor, other: Tensor | None) -> Task:
    """Add a rank's share of a text to a model.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.
    rank : int
        Rank of this process.
    model : GPT
        Model to train.
    text : int64 tensor, shape (words,)
        Text to train on.
    other : int64 tensor, shape (words,), or None
        Text that the final model is judged on.

    Returns
    -------
    Task
        Model and data of this rank.
    """
    context = size_of(config).context
    windows = _Windows(text, context)
    unseen = None if other is None else _Windows(other, context)
    size = check_batch(config, len(windows.rows), "windows of words")

    def predicted(network: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.autocast):
            outputs = network(rows[:, :-1])
        scores, added = outputs if isinstance(outputs, tuple) else (outputs, None)
        # the loss in float32, where scores come in bfloat16 under autocast
        return F.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten()), added

    def loss(network: nn.Module, step: int) -> Tensor:
        predictions, added = predicted(network, windows.batch(config, rank, size, step))
        return predictions if added is None else predictions + added

    def perplexity(network: nn.Module) -> dict[str, float]:
        assert unseen is not None
        with torch.no_grad():
            parts = torch.split(unseen.rows[:_UNSEEN_WINDOWS], config.setting("batch_size"))
            # the last part may be smaller: each counts by its windows
            losses = sum(float(predicted(network, rows)[0]) * len(rows) for rows in parts)
        return {"perplexity": math.exp(losses / sum(map(len, parts)))}

    return Task(model, loss, None if unseen is None else perplexity)
