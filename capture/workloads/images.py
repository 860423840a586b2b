"""Image sets in their original formats, and their batches."""

# Size: nearly half of its lines are docstrings; three sets of images are read in one form.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from capture.workloads.registry import CIFAR10_FILES, WorkloadInfo
from capture.workloads.task import generator
from gradstats.errors import GradstatsError, InputError

__all__ = [
    "Epochs",
    "ImageFolder",
    "ImageSet",
    "load_cifar10",
    "load_cifar100",
    "load_digits",
    "load_images",
    "load_mnist",
    "side_of",
]

_PIXELS = 3 * 32 * 32
"""Bytes of an image of CIFAR."""
_SUFFIXES = (".jpeg", ".jpg", ".png")
# Mean and deviation of ImageNet's colours, as its models are published with.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Epochs:
    """The order in which samples are drawn: each epoch is a new permutation, shared by all ranks.

    Parameters
    ----------
    count : int
        Number of samples.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._epoch: tuple[int, int] | None = None
        self._order = torch.empty(0)

    def drawn(self, step: int, size: int, rank: int, world_size: int, seed: int) -> torch.Tensor:
        """Return the samples of one rank in one step, which depend on the arguments alone.

        The samples that do not fill a last batch are left out of that epoch.

        Parameters
        ----------
        step : int
            Number of the step, from 0.
        size : int
            Samples per rank.
        rank : int
            Rank that gets the batch.
        world_size : int
            Number of ranks.
        seed : int
            Seed of the permutations.

        Returns
        -------
        int64 tensor, shape (size,)
            Numbers of the samples.
        """
        epoch, position = divmod(step, self._count // (size * world_size))
        # a permutation takes longer than a batch: kept for the epoch
        if (seed, epoch) != self._epoch:
            self._order = torch.randperm(self._count, generator=generator(seed, epoch))
            self._epoch = (seed, epoch)
        # ranks take neighbouring parts of what all of them draw in a step
        first = (position * world_size + rank) * size
        return self._order[first : first + size]


class ImageSet:
    """Labelled images in memory.

    Parameters
    ----------
    images : float32 tensor, shape (n, channels, h, w)
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
        self._epochs = Epochs(len(labels))

    def __len__(self) -> int:
        return len(self._labels)

    def batch(
        self, step: int, size: int, rank: int, world_size: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of one rank in one step.

        It depends on the arguments alone, see :class:`Epochs`.

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
        chosen = self._epochs.drawn(step, size, rank, world_size, seed)
        # rank + 1: SeedSequence fills up with zeros, so that (seed, step, 0) would be a permutation's (seed, epoch)
        images = self._augment(self._padded[chosen], generator(seed, step, rank + 1))
        return images, self._labels[chosen]

    def unseen(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the images that are never trained on, some at a time.

        Parameters
        ----------
        size : int
            Number of images at once.

        Yields
        ------
        images : float32 tensor, shape (size, 3, h, w)
            Images.
        labels : int64 tensor, shape (size,)
            Their classes.
        """
        if self.test is not None:
            for first in range(0, len(self.test[1]), size):
                images, labels = (part[first : first + size] for part in self.test)
                yield images, labels

    def _augment(self, padded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        n, size = len(padded), self._size
        # the images have a border of `shift` pixels on each side
        top, left = torch.randint(2 * self._shift + 1, (2, n), generator=generator)
        rows = (top[:, None] + torch.arange(size))[:, :, None]
        columns = (left[:, None] + torch.arange(size))[:, None, :]
        if self._flip:
            mirrored = torch.rand(n, generator=generator) < 0.5
            columns = torch.where(mirrored[:, None, None], columns.flip(2), columns)
        # indices around a slice put the channels last
        return padded[torch.arange(n)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


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
    # a digit seen in a mirror is none
    return ImageSet(images, labels, shift=1, flip=False)


def load_cifar10(folder: Path, side: int = 32) -> ImageSet:
    """Load CIFAR-10's binary version: those of the five training batches that are there, and the test batch.

    Parameters
    ----------
    folder : Path
        Folder of ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, all but one optional.
    side : int
        Height and width to which images are reduced, by the mean of neighbours.

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
    return _cifar(files, folder / "test_batch.bin", labels=1, classes=10, side=side)


def load_cifar100(folder: Path) -> ImageSet:
    """Load CIFAR-100's binary version, with its hundred fine labels.

    Parameters
    ----------
    folder : Path
        Folder of ``train.bin`` and, optionally, ``test.bin``.

    Returns
    -------
    ImageSet
        The images, normalised by the mean and deviation of the training images.

    Raises
    ------
    InputError
        If there is no training file, a file is not whole records, or a label is not 0–99.
    """
    # a coarse label comes before the fine one
    return _cifar([folder / "train.bin"], folder / "test.bin", labels=2, classes=100)


def _cifar(files: list[Path], unseen: Path, labels: int, classes: int, side: int = 32) -> ImageSet:
    parts = [_read_records(file, labels, classes) for file in files]
    test = _read_records(unseen, labels, classes) if unseen.is_file() else None
    images, numbers = torch.cat([i for i, _ in parts]), torch.cat([n for _, n in parts])
    if side != 32:
        images = F.adaptive_avg_pool2d(images, side)
        test = test and (F.adaptive_avg_pool2d(test[0], side), test[1])
    # four of 32 pixels, and as large a part of smaller images
    return _normalised(images, numbers, test, shift=side // 8, flip=True)


def _normalised(
    images: torch.Tensor,
    labels: torch.Tensor,
    test: tuple[torch.Tensor, torch.Tensor] | None,
    shift: int,
    flip: bool,
) -> ImageSet:
    """Return images normalised by mean and deviation of those that are trained on."""
    mean = images.mean(dim=(0, 2, 3), keepdim=True)
    std = images.std(dim=(0, 2, 3), keepdim=True)
    test = test and ((test[0] - mean) / std, test[1])
    return ImageSet((images - mean) / std, labels, shift=shift, flip=flip, test=test)


def _read_records(file: Path, labels: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of one file, with values from 0 to 1, and their labels; the last label is the class."""
    raw, size = _read_bytes(file), labels + _PIXELS
    if raw.size == 0 or raw.size % size:
        raise InputError(
            f"{file} is not whole records of {size} bytes but {raw.size} bytes; copy it again"
        )
    records = torch.from_numpy(raw.reshape(-1, size))
    numbers = records[:, labels - 1].long()
    if numbers.max() >= classes:
        raise InputError(
            f"{file} has the label {numbers.max()}; CIFAR-{classes}'s are 0 to {classes - 1}"
        )
    return records[:, labels:].reshape(-1, 3, 32, 32).float() / 255, numbers


def _read_bytes(file: Path) -> np.ndarray:
    try:
        return np.fromfile(file, np.uint8)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None


def load_mnist(folder: Path) -> ImageSet:
    """Load MNIST's original files, with a border of two pixels.

    Parameters
    ----------
    folder : Path
        Folder of ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and, optionally, the two of ``t10k``.

    Returns
    -------
    ImageSet
        The images, normalised by the mean and deviation of the training images.

    Raises
    ------
    InputError
        If a file cannot be read, or images and labels do not fit together.
    """

    def read(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        file = folder / f"{part}-images-idx3-ubyte"
        # after the header of an IDX file: four numbers of four bytes, here magic, images, rows, columns
        pixels = torch.from_numpy(_read_bytes(file)[16:])
        # two numbers: magic, labels
        labels = torch.from_numpy(_read_bytes(folder / f"{part}-labels-idx1-ubyte")[8:]).long()
        if not len(labels) or pixels.numel() != 784 * len(labels) or labels.max() > 9:
            raise InputError(f"{file} and its labels are not MNIST's files; copy them again")
        images = F.pad(pixels.reshape(-1, 1, 28, 28).float() / 255, (2, 2, 2, 2))
        return images, labels

    images, labels = read("train")
    test = read("t10k") if (folder / "t10k-images-idx3-ubyte").is_file() else None
    return _normalised(images, labels, test, shift=2, flip=False)


class ImageFolder:
    """Images on disk, one folder for each class: ``train/CLASS/*.jpeg``, and ``val/CLASS/*.jpeg`` if there is one.

    Parameters
    ----------
    folder : Path
        Folder of ``train`` and ``val``.
    side : int
        Height and width of the crops.
    classes : int
        Largest number of classes.

    Raises
    ------
    InputError
        If there are no images, or more classes than outputs.
    """

    def __init__(self, folder: Path, side: int, classes: int) -> None:
        # sorted, for all ranks and runs must number the classes alike
        names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
        if len(names) > classes:
            raise InputError(
                f"{folder / 'train'} has {len(names)} classes; the model has {classes}"
            )
        self._side = side
        self._train, self._unseen = (
            [
                (file, label)
                for label, name in enumerate(names)
                # sorted: a file system's own order differs from machine to machine
                for file in sorted((folder / part / name).glob("*"))
                if file.suffix.lower() in _SUFFIXES
            ]
            for part in ("train", "val")
        )
        if not self._train:
            raise InputError(
                f"{folder / 'train'} has no images ({', '.join(_SUFFIXES)}) in folders of classes"
            )
        self._epochs = Epochs(len(self._train))

    def __len__(self) -> int:
        return len(self._train)

    def batch(
        self, step: int, size: int, rank: int, world_size: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of one rank in one step, as :meth:`ImageSet.batch` does: random crops, half mirrored.

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
            Seed of the permutations, crops and mirror images.

        Returns
        -------
        images : float32 tensor, shape (size, 3, side, side)
            Normalised images.
        labels : int64 tensor, shape (size,)
            Their classes.
        """
        chosen = self._epochs.drawn(step, size, rank, world_size, seed).tolist()
        rng = np.random.default_rng((seed, step, rank + 1))
        return self._load([self._train[i] for i in chosen], rng)

    def unseen(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the images that are never trained on, some at a time, cropped in the middle.

        Parameters
        ----------
        size : int
            Number of images at once.

        Yields
        ------
        images : float32 tensor, shape (size, 3, side, side)
            Normalised images.
        labels : int64 tensor, shape (size,)
            Their classes.
        """
        for first in range(0, len(self._unseen), size):
            yield self._load(self._unseen[first : first + size], None)

    def _load(
        self, files: list[tuple[Path, int]], rng: np.random.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.stack([self._read(file, rng) for file, _ in files])
        mean, std = (torch.tensor(values)[:, None, None] for values in _IMAGENET)
        return (images - mean) / std, torch.tensor([label for _, label in files])

    def _read(self, file: Path, rng: np.random.Generator | None) -> torch.Tensor:
        """Return 8 to 100 % of an image, its sides from 3:4 to 4:3, or seven eighths of the middle."""
        from PIL import Image

        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except OSError as error:
            raise InputError(f"cannot read {file}: {error}") from None
        width, height = image.size
        if rng is None:
            # 224 of 256 pixels, as ImageNet's networks are tested
            across = down = 0.875 * min(width, height)
            left, top = (width - across) / 2, (height - down) / 2
        else:
            area = rng.uniform(0.08, 1) * width * height
            # evenly in the logarithm: 3:4 is as likely as 4:3
            ratio = np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
            # an area that is nearly the whole does not fit in another shape
            across = min(width, np.sqrt(area * ratio))
            down = min(height, np.sqrt(area / ratio))
            left, top = rng.uniform(0, width - across), rng.uniform(0, height - down)
        box = (left, top, left + across, top + down)
        side = (self._side, self._side)
        pixels = np.array(image.resize(side, Image.Resampling.BILINEAR, box=box))
        if rng is not None and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        # copied, for torch takes no negative strides
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255


def side_of(info: WorkloadInfo) -> int:
    """Return the height and width of a workload's images.

    Parameters
    ----------
    info : WorkloadInfo
        Workload that classifies images.

    Returns
    -------
    int
        Number of pixels.
    """
    if info.network == "inceptionv4":
        return 299
    return {"imagenet": 224, "digits": 16, "cifar16": 16}.get(info.name.split("-")[1], 32)


def load_images(info: WorkloadInfo, folder: Path | None) -> ImageSet | ImageFolder:
    """Load the images of a workload.

    Parameters
    ----------
    info : WorkloadInfo
        Workload that classifies images.
    folder : Path or None
        Folder of the data set; None if it is embedded.

    Returns
    -------
    ImageSet or ImageFolder
        The images.

    Raises
    ------
    InputError
        If the files cannot be read or are not what they should be.
    """
    data = info.name.split("-")[1]
    if folder is None or data == "digits":
        return load_digits()
    if data == "imagenet":
        return ImageFolder(folder, side_of(info), info.classes)
    if data == "cifar16":
        return load_cifar10(folder, side_of(info))
    return {"cifar10": load_cifar10, "cifar100": load_cifar100, "mnist": load_mnist}[data](folder)
