"""Image sets in their original formats, and their batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from capture.workloads.config import CIFAR10_FILES
from gradstats.errors import GradstatsError, InputError

__all__ = ["ImageSet", "load_cifar10", "load_digits"]

_CIFAR_RECORD = 1 + 3 * 32 * 32
"""Bytes of a record: a label and the pixels."""


class ImageSet:
    """Labelled images in memory.

    Parameters
    ----------
    images : float32 tensor, shape (n, 3, h, w)
        Normalised images.
    labels : int64 tensor, shape (n,)
        Class of each image.
    shift : int
        Largest number of pixels that an image is moved by, at random, in each direction.
    flip : bool
        Whether to mirror half of the images, at random.
    test : tuple of tensors, shapes (m, 3, h, w) and (m,), optional
        Images and labels that are never trained on.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        shift: int,
        flip: bool,
        test: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.test = test
        self._padded = F.pad(images, (shift, shift, shift, shift))
        self._labels = labels
        self._shift = shift
        self._flip = flip
        self._size = images.shape[-1]
        self._epoch = -1
        self._order = torch.empty(0)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(
        self, step: int, size: int, rank: int, world_size: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of one rank in one step.

        It depends on the arguments alone. Each epoch is a new permutation shared by all ranks; the images that
        do not fill a last batch are left out of that epoch.

        Parameters
        ----------
        step : int
            Number of the step, from 0.
        size : int
            Images per rank.
        rank : int
            Rank that gets the batch.
        world_size : int
            Number of ranks.
        seed : int
            Seed of the permutations, shifts and mirror images.

        Returns
        -------
        images : float32 tensor, shape (size, 3, h, w)
            Shifted and mirrored images.
        labels : int64 tensor, shape (size,)
            Their classes.
        """
        per_epoch = len(self) // (size * world_size)
        epoch, position = divmod(step, per_epoch)
        if epoch != self._epoch:
            generator = _generator(seed, epoch)
            self._order = torch.randperm(len(self), generator=generator)
            self._epoch = epoch
        first = (position * world_size + rank) * size
        chosen = self._order[first : first + size]
        images = self._augment(self._padded[chosen], _generator(seed, step, rank + 1))
        return images, self._labels[chosen]

    def _augment(self, padded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        n, size = len(padded), self._size
        top, left = torch.randint(2 * self._shift + 1, (2, n), generator=generator)
        rows = (top[:, None] + torch.arange(size))[:, :, None]
        columns = (left[:, None] + torch.arange(size))[:, None, :]
        if self._flip:
            mirrored = torch.rand(n, generator=generator) < 0.5
            columns = torch.where(mirrored[:, None, None], columns.flip(2), columns)
        return padded[torch.arange(n)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


def _generator(*entropy: int) -> torch.Generator:
    """Return a generator of its own for each tuple of numbers."""
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def load_digits() -> ImageSet:
    """Load scikit-learn's 1,797 handwritten digits, 8×8, enlarged to 16×16.

    The three channels are the image and its differences along rows and columns: three equal ones would give the
    first layer equal gradients three times over, and top-k ties that no colour image has.

    Returns
    -------
    ImageSet
        The images, without a test set.
    """
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError:
        raise GradstatsError(
            "the digits need scikit-learn: pip install 'gradstats[workloads]'"
        ) from None

    digits = sklearn_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    images = F.interpolate(images, size=(16, 16), mode="bilinear", align_corners=False)
    images = torch.cat([images, *torch.gradient(images, dim=(2, 3))], dim=1)
    images -= images.mean(dim=(0, 2, 3), keepdim=True)
    images /= images.std(dim=(0, 2, 3), keepdim=True)
    labels = torch.from_numpy(digits.target).long()
    return ImageSet(images, labels, shift=1, flip=False)


def load_cifar10(folder: Path) -> ImageSet:
    """Load CIFAR-10's binary version: those of the five training batches that are there, and the test batch.

    Parameters
    ----------
    folder : Path
        Folder of ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, all but one optional.

    Returns
    -------
    ImageSet
        The images, normalised by the mean and deviation of the training images.

    Raises
    ------
    InputError
        If there is no training batch, a file is not whole records, or a label is not 0–9.
    """
    files = [folder / name for name in CIFAR10_FILES if (folder / name).is_file()]
    if not files:
        raise InputError(f"{folder} holds none of {', '.join(CIFAR10_FILES)}")
    parts = [_read_records(file) for file in files]
    images, labels = torch.cat([i for i, _ in parts]), torch.cat([n for _, n in parts])
    mean = images.mean(dim=(0, 2, 3), keepdim=True)
    std = images.std(dim=(0, 2, 3), keepdim=True)
    test = None
    if (folder / "test_batch.bin").is_file():
        unseen, unseen_labels = _read_records(folder / "test_batch.bin")
        test = ((unseen - mean) / std, unseen_labels)
    return ImageSet((images - mean) / std, labels, shift=4, flip=True, test=test)


def _read_records(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of one file, with values from 0 to 1, and their labels."""
    raw = np.fromfile(file, np.uint8)
    if raw.size == 0 or raw.size % _CIFAR_RECORD:
        raise InputError(
            f"{file} is not whole records of {_CIFAR_RECORD} bytes but {raw.size} bytes; copy it again"
        )
    records = torch.from_numpy(raw.reshape(-1, _CIFAR_RECORD))
    if records[:, 0].max() > 9:
        raise InputError(f"{file} has the label {records[:, 0].max()}; CIFAR-10's are 0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32).float() / 255, records[:, 0].long()
