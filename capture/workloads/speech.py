"""Speech recognition on AN4: utterances, DeepSpeech's network trained with CTC, word and character error rates.

The network is SIDCo's (table 1: five layers of 1,024): that of SeanNaren/deepspeech.pytorch with LSTM layers in one
direction, which has 43,476,256 parameters. It differs in two ways. The transcript with the highest score is decoded
frame by frame, without beam or language model, and utterances are drawn in any order, not the shortest ones first.

A second network, of two bidirectional layers over 40 mel bands, is small enough to be trained until it transcribes on
two cores. Its batches hold utterances of similar lengths.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.config import RunConfig
from capture.workloads.images import Epochs
from capture.workloads.task import Task, check_batch
from gradstats.errors import InputError

__all__ = [
    "LABELS",
    "BidirectionalLSTM",
    "DeepSpeech",
    "decode",
    "error_rates",
    "example",
    "load_an4",
    "make_model",
    "make_task",
    "mel_spectrogram",
    "spectrogram",
]

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""Signs that the network tells apart; the first is CTC's blank."""
_WINDOW, _HOP = 320, 160
"""Samples of a window and from one to the next: 20 and 10 ms at 16 kHz."""
_AHEAD = 20
"""Frames of the future that an output depends on."""
_BANDS, _MEL_WINDOW, _MEL_FFT = 40, 400, 512
"""Mel bands, samples of their window (25 ms) and of its Fourier transform."""
_STRIDE = 4
"""Frames of 10 ms to an output of the small network."""
_HELD_OUT = 5
"""One speaker in so many is held out where the corpus comes without its training utterances."""

_Utterance = tuple[Tensor, str]


class DeepSpeech(nn.Module):
    """Two convolutions, LSTM layers with batch normalisation between them, a look ahead, and a linear layer.

    Source: Hannun et al. 2014, and Amodei et al. 2016 for the convolutions and the look ahead.

    Parameters
    ----------
    hidden : int
        Width of the LSTM layers.
    layers : int
        Number of LSTM layers.
    """

    def __init__(self, hidden: int = 1024, layers: int = 5) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        features = 32 * 41  # of the 161 frequencies, each convolution leaves half
        self.norms = nn.ModuleList([nn.BatchNorm1d(hidden) for _ in range(layers)])
        self.lstms = nn.ModuleList(
            [nn.LSTM(hidden if i else features, hidden) for i in range(layers)]
        )
        self.ahead = nn.Conv1d(hidden, hidden, _AHEAD + 1, groups=hidden, bias=False)
        self.out = nn.Linear(hidden, len(LABELS), bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of all signs in every second frame.

        Parameters
        ----------
        x : float32 tensor, shape (n, 161, frames)
            Spectrograms, with zeros after their ends.
        lengths : int64 tensor, shape (n,)
            Frames of each.

        Returns
        -------
        scores : tensor, shape (n, frames / 2, signs)
            Logarithms of probabilities.
        lengths : int64 tensor, shape (n,)
            Frames of each that are valid.
        """
        # the first convolution takes every second frame, the second takes all
        lengths = (lengths + 1) // 2
        y = self.conv[:3](x[:, None])
        valid = torch.arange(y.shape[3]) < lengths[:, None]  # what comes after the end stays zero
        # the second convolution would carry what the first one's bias leaves after the end into the utterance
        y = self.conv[3:](y * valid[:, None, None]).flatten(1, 2).permute(2, 0, 1)
        valid = valid.t()[:, :, None]  # frames, utterances, features
        y = y * valid
        for i, lstm in enumerate(self.lstms):
            # batch normalisation wants features in the second dimension
            y = lstm(self.norms[i - 1](y.transpose(1, 2)).transpose(1, 2) if i else y)[0] * valid
        # zeros after the end, which the last frames look ahead into
        y = F.hardtanh(self.ahead(F.pad(y.permute(1, 2, 0), (0, _AHEAD))), 0, 20)
        y = self.out(self.norms[-1](y).transpose(1, 2))
        return F.log_softmax(y, dim=2), lengths


class BidirectionalLSTM(nn.Module):
    """A convolution over time, two bidirectional LSTM layers with batch normalisation before each, and a linear layer.

    Parameters
    ----------
    hidden : int
        Width of the LSTM layers in each direction.
    layers : int
        Number of LSTM layers.
    """

    def __init__(self, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        # without a bias: batch normalisation follows
        self.conv = nn.Conv1d(_BANDS, hidden, 5, _STRIDE, 2, bias=False)
        widths = [hidden, *[2 * hidden] * (layers - 1)]
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for width in widths])
        self.lstms = nn.ModuleList([nn.LSTM(width, hidden, bidirectional=True) for width in widths])
        self.out = nn.Linear(2 * hidden, len(LABELS))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of all signs in every fourth frame.

        Parameters
        ----------
        x : float32 tensor, shape (n, 40, frames)
            Mel spectrograms, with zeros after their ends.
        lengths : int64 tensor, shape (n,)
            Frames of each.

        Returns
        -------
        scores : tensor, shape (n, frames / 4, signs)
            Logarithms of probabilities.
        lengths : int64 tensor, shape (n,)
            Frames of each that are valid.
        """
        lengths = (lengths + _STRIDE - 1) // _STRIDE
        # not sorted by length: PyTorch does that, and undoes it
        packed = nn.utils.rnn.pack_padded_sequence(
            self.conv(x).permute(2, 0, 1), lengths, enforce_sorted=False
        )
        for i, (norm, lstm) in enumerate(zip(self.norms, self.lstms, strict=True)):
            values = norm(packed.data)  # of frames that are there, padding does not count
            packed = lstm(packed._replace(data=values if i else F.relu(values)))[0]
        y = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        return F.log_softmax(self.out(y), dim=2), lengths


def spectrogram(samples: np.ndarray) -> Tensor:
    """Return the logarithmic spectrogram of an utterance, with mean 0 and deviation 1.

    Parameters
    ----------
    samples : ndarray, shape (n,)
        Samples at 16 kHz.

    Returns
    -------
    float32 tensor, shape (161, frames)
        Logarithms of 1 + magnitude, in windows of 20 ms every 10 ms.
    """
    wave = torch.from_numpy(samples.astype(np.float32))
    spectrum = torch.stft(
        wave, _WINDOW, _HOP, window=torch.hamming_window(_WINDOW), return_complex=True
    )
    # 1 is added, because silence has no logarithm
    values = torch.log1p(spectrum.abs())
    return (values - values.mean()) / values.std()


def mel_spectrogram(samples: np.ndarray) -> Tensor:
    """Return the logarithmic power of an utterance in mel bands, each with mean 0 and deviation 1.

    Parameters
    ----------
    samples : ndarray, shape (n,)
        Samples at 16 kHz.

    Returns
    -------
    float32 tensor, shape (40, frames)
        Logarithms, in windows of 25 ms every 10 ms. The bands overlap by half, evenly on O'Shaughnessy's mel scale.
    """
    wave = torch.from_numpy(samples.astype(np.float32))
    spectrum = torch.stft(
        wave, _MEL_FFT, _HOP, _MEL_WINDOW, torch.hamming_window(_MEL_WINDOW), return_complex=True
    )
    nyquist = 8000.0
    # natural logarithms and without O'Shaughnessy's factor, which even distances do not feel
    mels = np.linspace(0, np.log1p(nyquist / 700), _BANDS + 2)
    corners = torch.from_numpy(700 * np.expm1(mels)).float()[:, None]  # of all triangles, in Hz
    hertz = torch.linspace(0, nyquist, _MEL_FFT // 2 + 1)
    rising, falling = (
        (hertz - corners[:-2]) / (corners[1:-1] - corners[:-2]),
        (corners[2:] - hertz) / (corners[2:] - corners[1:-1]),
    )
    triangles = torch.minimum(rising, falling).clamp(min=0)
    # power, and 1 added for silence
    values = torch.log(triangles @ spectrum.abs().square() + 1)
    mean, deviation = values.mean(1, keepdim=True), values.std(1, keepdim=True)
    # a band may be silent all the time
    return (values - mean) / (deviation + 1e-3)


def load_an4(
    folder: Path, features: Callable[[np.ndarray], Tensor] = spectrogram
) -> tuple[list[_Utterance], list[_Utterance]]:
    """Load the utterances of AN4 that a manifest names: raw 16-bit big-endian samples at 16 kHz.

    Parameters
    ----------
    folder : Path
        Folder of ``manifest.tsv`` with the columns split, path and transcript.
    features : callable
        Function of an utterance's samples that returns what the network reads, shape (features, frames).

    Returns
    -------
    seen : list of tuple
        Features and transcript of every utterance to train on: the split ``train``; if that is missing, the split
        ``test`` without the last one in five of its speakers.
    unseen : list of tuple
        Those of the split ``test``; if ``train`` is missing, of the speakers left out.

    Raises
    ------
    InputError
        If a file cannot be read, or a transcript has other signs than letters, apostrophes and spaces.
    """
    manifest = folder / "manifest.tsv"
    splits: dict[str, list[tuple[str, _Utterance]]] = {"train": [], "test": []}
    try:
        with manifest.open(encoding="utf-8", newline="") as stream:
            # no quoting: an apostrophe or a quote belongs to the text
            for row in csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE):
                text = row["transcript"].upper()
                if set(text) - set(LABELS[1:]):
                    raise InputError(f"{manifest} has the transcript {text!r}: it must be letters")
                samples = np.fromfile(folder / row["path"], ">i2")
                if samples.size < _WINDOW:
                    raise InputError(f"{folder / row['path']} is too short; copy it again")
                speaker = Path(row["path"]).parent.name
                splits[row["split"]].append((speaker, (features(samples), text)))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {manifest} and its utterances: {error}") from None
    except (KeyError, TypeError):
        raise InputError(
            f"{manifest} must have the columns split (train or test), path and transcript"
        ) from None
    train, test = splits["train"], splits["test"]
    if not train:
        speakers = sorted({speaker for speaker, _ in test})
        # counted from the beginning: [-0:] would be all of them
        held = speakers[len(speakers) - len(speakers) // _HELD_OUT :]
        train = [each for each in test if each[0] not in held]
        test = [each for each in test if each[0] in held]
    if not train:
        raise InputError(f"{manifest} names no utterance")
    return [each for _, each in train], [each for _, each in test]


def decode(scores: Tensor) -> str:
    """Return the transcript of the likeliest signs: repeated ones once, and no blanks.

    Parameters
    ----------
    scores : tensor, shape (frames, signs)
        Scores in every frame.

    Returns
    -------
    str
        Transcript.
    """
    # repeats first, then blanks: two equal signs with a blank between them are two
    return "".join(LABELS[sign] for sign, _ in groupby(scores.argmax(1).tolist()) if sign)


def _distance(hypothesis: Sequence[Hashable], truth: Sequence[Hashable]) -> int:
    """Return the least number of insertions, deletions and replacements between two sequences."""
    # Levenshtein's table, of which one row is kept
    row = list(range(len(truth) + 1))
    for i, a in enumerate(hypothesis, 1):
        above, row = row, [i]
        for j, b in enumerate(truth, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def error_rates(pairs: Iterable[tuple[str, str]]) -> tuple[float, float]:
    """Return word and character error rates: wrong, missing and additional ones per word or character of the truth.

    Parameters
    ----------
    pairs : iterable of tuple of str
        Decoded and true transcript of each utterance. Spaces are no characters, as in deepspeech.pytorch.

    Returns
    -------
    words : float
        Rate of words; above 1 where most of what was decoded is additional.
    characters : float
        Rate of characters.
    """
    wrong = [0, 0]
    total = [0, 0]
    for hypothesis, truth in pairs:
        parts = (
            (hypothesis.split(), truth.split()),
            (hypothesis.replace(" ", ""), truth.replace(" ", "")),
        )
        for i, (a, b) in enumerate(parts):
            wrong[i] += _distance(a, b)
            total[i] += len(b)
    return wrong[0] / total[0], wrong[1] / total[1]


def _small(config: RunConfig) -> bool:
    return config.workload == "blstm-an4"


def make_model(config: RunConfig) -> DeepSpeech | BidirectionalLSTM:
    """Build the model of a run.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.

    Returns
    -------
    DeepSpeech or BidirectionalLSTM
        Model with the run's width.
    """
    return (BidirectionalLSTM if _small(config) else DeepSpeech)(config.setting("hidden"))


def example(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return random inputs of the network: utterances of 2.5 s, as long as AN4's median.

    Parameters
    ----------
    config : RunConfig
        Settings of the run.

    Returns
    -------
    tuple of tensor
        Spectrograms and their lengths.
    """
    size, frames = config.setting("batch_size"), 250
    features = _BANDS if _small(config) else 161
    return torch.randn(size, features, frames), torch.full((size,), frames)


def make_task(config: RunConfig, rank: int) -> Task:
    """Build the model and this rank's share of the utterances.

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

    Raises
    ------
    InputError
        If there are fewer utterances than a batch of all ranks.
    """
    assert config.data_dir is not None
    training_set, unseen = load_an4(
        config.data_dir, mel_spectrogram if _small(config) else spectrogram
    )
    size = check_batch(config, len(training_set), "utterances")
    world = size * config.nproc
    epochs = Epochs(len(training_set) // world if _small(config) else len(training_set))
    # by number where lengths are equal, so that all ranks sort alike
    by_length = sorted(range(len(training_set)), key=lambda i: (training_set[i][0].shape[1], i))

    def drawn(step: int) -> list[int]:
        if not _small(config):
            return epochs.drawn(step, size, rank, config.nproc, config.seed).tolist()
        # a batch of all ranks is of neighbours in length, so that little of it is padding
        batch = int(epochs.drawn(step, 1, 0, 1, config.seed))
        # every nproc-th, so that the ranks' parts are of equal lengths, too
        return by_length[batch * world + rank : (batch + 1) * world : config.nproc]

    def scores(network: nn.Module, utterances: Sequence[_Utterance]) -> tuple[Tensor, Tensor]:
        # padding is along the first dimension, which is then time
        spectra = [spectrum.t() for spectrum, _ in utterances]
        padded = nn.utils.rnn.pad_sequence(spectra, batch_first=True).transpose(1, 2)
        return network(padded, torch.tensor([len(s) for s in spectra]))  # type: ignore[no-any-return]

    def loss(network: nn.Module, step: int) -> Tensor:
        utterances = [training_set[i] for i in drawn(step)]
        logs, lengths = scores(network, utterances)
        targets = [torch.tensor([LABELS.index(sign) for sign in text]) for _, text in utterances]
        # a sum, because CTC's own mean would divide each utterance by the length of its transcript
        total = F.ctc_loss(
            logs.transpose(0, 1),
            torch.cat(targets),
            lengths,
            torch.tensor([len(t) for t in targets]),
            reduction="sum",
            # a transcript longer than the frames has no alignment, and an infinite loss
            zero_infinity=True,
        )
        return total / size

    def rates(network: nn.Module) -> dict[str, float]:
        # batch normalisation uses its running statistics
        network.eval()
        pairs = []
        with torch.no_grad():
            for first in range(0, len(unseen), size):
                part = unseen[first : first + size]
                logs, lengths = scores(network, part)
                texts = (decode(log[:n]) for log, n in zip(logs, lengths.tolist(), strict=True))
                pairs += [(text, truth) for text, (_, truth) in zip(texts, part, strict=True)]
        network.train()
        words, characters = error_rates(pairs)
        return {"word_error_rate": words, "character_error_rate": characters}

    return Task(make_model(config), loss, rates if unseen else None)
