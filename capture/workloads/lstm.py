"""A 2-layer word LSTM: 66,034,000 parameters at hidden size 1,500 and a vocabulary of 10,000.

Source: Abdelmoniem et al. 2021 (SIDCo), table 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.task import Task
from capture.workloads.text import load_ptb, load_pydoc, load_wikitext, words_to_ids
from gradstats.errors import InputError

__all__ = ["WordLSTM", "example", "make_model", "make_task"]

_WINDOW = 35
"""Words that backpropagation through time goes back."""
_VALIDATION = ("ptb.valid.txt", "wiki.valid.tokens")
"""Files of text that is never trained on."""
_UNSEEN_COLUMNS, _UNSEEN_WINDOWS = 20, 30
"""The validation text is read in 20 columns, of which the first 30 windows are predicted: 21,000 words."""


class WordLSTM(nn.Module):
    """Embedding, two LSTM layers and a decoder of the same width; untied weights, no dropout.

    Parameters
    ----------
    vocab : int
        Number of words.
    hidden : int
        Width of the embedding and of both layers.
    """

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2)
        self.decoder = nn.Linear(hidden, vocab)
        for parameter in (self.embedding.weight, self.decoder.weight):
            nn.init.uniform_(parameter, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(
        self, words: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Predict every next word.

        Parameters
        ----------
        words : int64 tensor, shape (time, batch)
            Word numbers.
        state : tuple of tensors or None
            State that the window before left; zeros if None.

        Returns
        -------
        logits : tensor, shape (time, batch, vocab)
            Scores of the next word.
        state : tuple of tensors
            State for the next window.
        """
        outputs, state = self.lstm(self.embedding(words), state)
        return self.decoder(outputs), state


class _Reader:
    """Reader of one rank's columns of the corpus, window by window, which carries the LSTM's state along."""

    def __init__(self, ids: Tensor, columns: int, first: int, total: int) -> None:
        length = len(ids) // total
        # a window needs one word more, which is predicted last
        self.windows = (length - 1) // _WINDOW
        if self.windows < 1:
            raise InputError(
                f"a text of {len(ids)} words is too short for {total} columns of {_WINDOW} words; lower --batch-size"
            )
        # a column is a stretch of the text, so that each window goes on where the one before ended
        self._columns = ids[: length * total].view(total, length)[first : first + columns].t()
        self._state: tuple[Tensor, Tensor] | None = None

    def loss(self, network: nn.Module, step: int) -> Tensor:
        window = step % self.windows
        # the text begins again, and no state leads there
        if window == 0:
            self._state = None
        rows = slice(window * _WINDOW, (window + 1) * _WINDOW + 1)
        words = self._columns[rows]
        logits, state = network(words[:-1], self._state)
        # cut off: backpropagation ends at the window's beginning
        self._state = (state[0].detach(), state[1].detach())
        return F.cross_entropy(logits.flatten(0, 1), words[1:].flatten())

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self._state = content["state"]


def make_model(config: RunConfig) -> WordLSTM:
    """Build the model of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.

    Returns
    -------
    WordLSTM
        Model with the run's width and vocabulary.
    """
    return WordLSTM(config.setting("vocab"), config.setting("hidden"))


def example(config: RunConfig) -> tuple[Tensor, None]:
    """Return random inputs of the model.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.

    Returns
    -------
    tuple
        One window of words, and no state.
    """
    return torch.randint(config.setting("vocab"), (_WINDOW, config.setting("batch_size"))), None


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
    load = {"lstm-ptb": load_ptb, "lstm-wikitext2": load_wikitext}.get(config.workload)
    folder = config.data_dir
    words = load(folder) if load and folder else load_pydoc()
    vocab, columns = config.setting("vocab"), config.setting("batch_size")
    reader = _Reader(words_to_ids(words, vocab), columns, rank * columns, config.nproc * columns)
    unseen = None
    if load and folder and any((folder / name).is_file() for name in _VALIDATION):
        # numbered as in the text that is trained on
        ids = words_to_ids(load(folder, "valid"), vocab, words)
        unseen = _Reader(ids, _UNSEEN_COLUMNS, 0, _UNSEEN_COLUMNS)

    def perplexity(network: nn.Module) -> dict[str, float]:
        assert unseen is not None
        with torch.no_grad():
            windows = range(min(_UNSEEN_WINDOWS, unseen.windows))
            losses = torch.stack([unseen.loss(network, w) for w in windows])
        return {"perplexity": float(losses.mean().exp())}

    evaluate = None if unseen is None else perplexity
    return Task(make_model(config), reader.loss, evaluate, carried=reader)
