"""Word corpora, read from their original formats, and word numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import torch

from gradstats.errors import InputError

__all__ = ["load_ptb", "load_pydoc", "load_wikitext", "words_to_ids"]

_UNKNOWN, _END = "<unk>", "<eos>"


def load_pydoc() -> list[str]:
    """Return the words and signs of CPython's help topics, in lower case.

    Returns
    -------
    list of str
        The words; every line ends with a sign for the end of a sentence.
    """
    from pydoc_data.topics import topics

    words: list[str] = []
    # sorted: the order of topics is no promise of CPython's
    for name in sorted(topics):
        for line in topics[name].splitlines():
            # words, numbers, and each other sign by itself
            if tokens := re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", line.lower()):
                words += [*tokens, _END]
    return words


def load_ptb(folder: Path, part: Literal["train", "valid", "test"] = "train") -> list[str]:
    """Return the words of one of the Penn Treebank's language-modelling files, which hold a sentence per line.

    Parameters
    ----------
    folder : Path
        Folder of ``ptb.train.txt``, ``ptb.valid.txt`` and ``ptb.test.txt``.
    part : {"train", "valid", "test"}
        File to read.

    Returns
    -------
    list of str
        The words; every line ends with a sign for the end of a sentence.

    Raises
    ------
    InputError
        If the file cannot be read or is empty.
    """
    return _read(folder / f"ptb.{part}.txt")


def load_wikitext(folder: Path, part: Literal["train", "valid", "test"] = "train") -> list[str]:
    """Return the words of one of WikiText-2's files, which hold a paragraph or a heading per line.

    Parameters
    ----------
    folder : Path
        Folder of ``wiki.train.tokens``, ``wiki.valid.tokens`` and ``wiki.test.tokens``.
    part : {"train", "valid", "test"}
        File to read.

    Returns
    -------
    list of str
        The words; every line ends with a sign for the end of a sentence.

    Raises
    ------
    InputError
        If the file cannot be read or is empty.
    """
    return _read(folder / f"wiki.{part}.tokens")


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    words = [word for line in text.splitlines() for word in [*line.split(), _END]]
    if not words:
        raise InputError(f"{file} is empty")
    return words


def words_to_ids(words: list[str], vocab: int, corpus: list[str] | None = None) -> torch.Tensor:
    """Assign numbers to words by frequency, and by spelling where that is equal.

    Parameters
    ----------
    words : list of str
        Words to number.
    vocab : int
        Size of the vocabulary. All words but the `vocab` - 1 most frequent share the number 0.
    corpus : list of str, optional
        Words whose frequencies are counted; `words` if None.

    Returns
    -------
    int64 tensor, shape (words,)
        Numbers below `vocab`.
    """
    counts = Counter(words if corpus is None else corpus)
    # its number is 0 in any case
    counts.pop(_UNKNOWN, None)
    ranked = sorted(counts, key=lambda w: (-counts[w], w))[: vocab - 1]
    ids = {word: i + 1 for i, word in enumerate(ranked)}
    return torch.tensor([ids.get(word, 0) for word in words])
