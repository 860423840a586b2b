"""Image networks of the papers, compact: residual networks, VGG, AlexNet, GoogLeNet, Inception-v4.

Those for ImageNet have the parameters of torchvision's and timm's definitions, in the same order with the same shapes;
ResNet-18, SENet-18, GoogLeNet and the normalised VGG16 for CIFAR those of kuangliu/pytorch-cifar, which MiCRO trains.
Neither library is needed: their packages for a CPU build of PyTorch are not on PyPI.
"""

# Size: one network after the other, of parts that several share.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.workloads.vit import ViT

__all__ = [
    "NETWORKS",
    "Branches",
    "ResNet",
    "alexnet",
    "googlenet",
    "inception_v4",
    "resnet",
    "small_resnet",
    "vgg",
]

_VGG = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Number of convolutions before each pooling (Simonyan and Zisserman 2015, configurations D and E)."""


class _Block(nn.Module):
    """Convolutions with batch normalisation, and a shortcut around them.

    Two 3×3 convolutions, or 1×1, 3×3 and 1×1 where the outputs are `expansion` times wider. Where widths or sizes
    differ, the shortcut is a 1×1 convolution, or without parameters: it subsamples, and pads channels with zeros.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, expansion: int = 1, project: bool = True
    ) -> None:
        super().__init__()
        outputs = width * expansion
        sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if expansion > 1:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for i, (a, b, size, step) in enumerate(sizes, 1):
            self.add_module(f"conv{i}", nn.Conv2d(a, b, size, step, size // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(b))
        # half of the channels that lack go before, half after
        self.count, self.stride, self.padding = len(sizes), stride, (outputs - inputs) // 2
        self.shortcut: nn.Module | None = None
        if project and (stride > 1 or inputs != outputs):
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            # the last one's comes after the sum
            y = F.relu(y) if i < self.count else y
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.padding:
            # from the last dimension to the first: width, height, channels
            around = (0, 0, 0, 0, self.padding, self.padding)
            x = F.pad(x[:, :, :: self.stride, :: self.stride], around)
        return F.relu(x + y)


class _SqueezeBlock(nn.Module):
    """Pre-activation block whose channels are weighted by squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride > 1 or inputs != width:
            self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.fc1, self.fc2 = nn.Conv2d(width, width // 16, 1), nn.Conv2d(width // 16, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        # the block is pre-activated, and its shortcut begins after the activation
        x = x if self.shortcut is None else self.shortcut(y)
        y = self.conv2(F.relu(self.bn2(self.conv1(y))))
        weight = self.fc2(F.relu(self.fc1(y.mean((2, 3), keepdim=True))))
        return x + y * torch.sigmoid(weight)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Residual network: a first convolution, blocks, the mean over the image, and a linear layer.

    Parameters
    ----------
    blocks : sequence of torch.nn.Module
        Blocks in their order.
    width : int
        Channels of the first convolution.
    features : int
        Channels of the last block.
    classes : int
        Number of outputs.
    large : bool
        Whether the images are ImageNet's: a 7×7 convolution and a pooling, each with stride 2, come first.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        width: int,
        features: int,
        classes: int,
        large: bool = False,
    ) -> None:
        super().__init__()
        size, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(3, width, size, stride, padding=size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(features, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits.

        Parameters
        ----------
        x : float32 tensor, shape (n, 3, h, w)
            Images.

        Returns
        -------
        tensor, shape (n, classes)
            Logits.
        """
        x = self.blocks(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _initialise(
    network: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out", linear: bool = False
) -> None:
    """Draw the weights of convolutions, and if wanted of linear layers, as He et al. (2015) do."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) or (linear and isinstance(module, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_resnet(depth: int, classes: int, project: bool = False) -> ResNet:
    """Return a residual network for small images: three stages of widths 16, 32 and 64 (He et al. 2016, section 4.2).

    Parameters
    ----------
    depth : int
        Number of layers with weights, 6n + 2.
    classes : int
        Number of outputs.
    project : bool
        Whether shortcuts between stages are convolutions; otherwise they have no parameters.

    Returns
    -------
    ResNet
        Network.
    """
    n = (depth - 2) // 6
    # one more of the first width, for the first convolution's outputs
    widths = [16] * (n + 1) + [32] * n + [64] * n
    # a wider stage begins with half the size
    blocks = [_Block(i, o, 1 if i == o else 2, project=project) for i, o in pairwise(widths)]
    return ResNet(blocks, 16, 64, classes)


def resnet(
    counts: Sequence[int],
    classes: int,
    *,
    expansion: int = 1,
    squeeze: bool = False,
    large: bool = False,
) -> ResNet:
    """Return a residual network of four stages of widths 64 to 512 (He et al. 2016, table 1).

    Parameters
    ----------
    counts : sequence of int
        Blocks in each stage.
    classes : int
        Number of outputs.
    expansion : int
        4 for blocks of three convolutions, whose outputs are four times as wide; 1 for blocks of two.
    squeeze : bool
        Whether blocks are pre-activated and weight their channels by squeeze and excitation (SENet).
    large : bool
        Whether the images are ImageNet's.

    Returns
    -------
    ResNet
        Network.
    """
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(counts):
        width = 64 << stage
        for i in range(count):
            stride = 2 if stage and not i else 1
            if squeeze:
                blocks.append(_SqueezeBlock(inputs, width, stride))
            else:
                blocks.append(_Block(inputs, width, stride, expansion))
            inputs = width * expansion
    return ResNet(blocks, 64, inputs, classes, large)


def vgg(
    classes: int,
    depth: int = 16,
    *,
    hidden: Sequence[int] = (512,),
    size: int = 1,
    norm: bool = False,
) -> nn.Sequential:
    """Return VGG: 3×3 convolutions in five stages that end with a pooling, then linear layers.

    Parameters
    ----------
    classes : int
        Number of outputs.
    depth : int
        16 or 19 layers with weights, where there are two hidden ones.
    hidden : sequence of int
        Width of each hidden linear layer.
    size : int
        Height and width of the image that the last pooling leaves: 1 of 32 pixels, 7 of 224.
    norm : bool
        Whether convolutions are followed by batch normalisation.

    Returns
    -------
    torch.nn.Sequential
        Network. Without normalisation it trains from weights that keep the size of activations from layer to layer,
        with a learning rate that rises in the first steps; torchvision's, which keep the size of gradients, make the
        outputs of thirteen convolutions small.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for stage, count in enumerate(_VGG[depth]):
        for _ in range(count):
            outputs = min(64 << stage, 512)
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            layers += [nn.BatchNorm2d(outputs)] if norm else []
            layers.append(nn.ReLU())
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    widths = (512 * size * size, *hidden)
    for a, b in pairwise(widths):
        # dropout between the layers of 4,096 alone
        layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout()] if size > 1 else [])]
    network = nn.Sequential(*layers, nn.Linear(widths[-1], classes))
    first = next(i for i, layer in enumerate(network) if isinstance(layer, nn.Linear))
    # before the first linear layer, wherever that is
    network.insert(first, nn.Flatten())
    _initialise(network, "fan_in", linear=True)
    return network


def alexnet(classes: int, *, channels: int = 3, large: bool = False) -> nn.Sequential:
    """Return AlexNet as torchvision has it (Krizhevsky 2014), or its usual form for images of 32×32.

    Parameters
    ----------
    classes : int
        Number of outputs.
    channels : int
        Channels of an image: 3, or 1 for grey values.
    large : bool
        Whether the images are ImageNet's.

    Returns
    -------
    torch.nn.Sequential
        Network.
    """
    window, side = (3, 6) if large else (2, 2)
    first = nn.Conv2d(channels, 64, *((11, 4, 2) if large else (3, 2, 1)))
    second = nn.Conv2d(64, 192, 5, padding=2) if large else nn.Conv2d(64, 192, 3, padding=1)
    layers: list[nn.Module] = [first, nn.ReLU(), nn.MaxPool2d(window, 2), second, nn.ReLU()]
    layers.append(nn.MaxPool2d(window, 2))
    # from the second convolution's width on
    for a, b in pairwise((192, 384, 256, 256)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(window, 2), nn.Flatten()]
    # dropout stands before the layer, not after it as in VGG
    for a in (256 * side * side, 4096):
        layers += [nn.Dropout(), nn.Linear(a, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class Branches(nn.ModuleList):
    """Branches of an Inception block, whose outputs are put side by side.

    Parameters
    ----------
    *branches : torch.nn.Module
        Networks of the same input.
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels of all branches.

        Parameters
        ----------
        x : tensor, shape (n, channels, h, w)
            Input of every branch.

        Returns
        -------
        tensor, shape (n, channels, h, w)
            Outputs, branch by branch.
        """
        return torch.cat([branch(x) for branch in self], 1)


_Size = int | tuple[int, int]


def _conv(
    *widths: int, sizes: Sequence[_Size], stride: int = 1, pad: bool = True, bias: bool = False
) -> nn.Sequential:
    """Return convolutions with batch normalisation and ReLU; the stride is the last one's, which then pads nothing."""
    layers: list[nn.Module] = []
    for i, ((a, b), size) in enumerate(zip(pairwise(widths), sizes, strict=True), 1):
        height, width = size if isinstance(size, tuple) else (size, size)
        step = stride if i == len(sizes) else 1
        padding = (height // 2, width // 2) if pad and step == 1 else 0
        layers.append(nn.Conv2d(a, b, (height, width), step, padding, bias=bias))
        # GoogLeNet's convolutions have a bias, and torch's eps; those of Inception-v4 have neither
        layers += [nn.BatchNorm2d(b, eps=1e-5 if bias else 1e-3), nn.ReLU()]
    return nn.Sequential(*layers)


def googlenet(classes: int) -> nn.Sequential:
    """Return GoogLeNet for images of 32×32: Szegedy et al. 2015 with batch normalisation, without auxiliary outputs.

    Parameters
    ----------
    classes : int
        Number of outputs.

    Returns
    -------
    torch.nn.Sequential
        Network.
    """

    def block(inputs: int, *widths: int) -> nn.Module:
        one, reduced3, three, reduced5, five, pooled = widths
        pool = nn.MaxPool2d(3, 1, padding=1)
        return Branches(
            _conv(inputs, one, sizes=[1], bias=True),
            _conv(inputs, reduced3, three, sizes=[1, 3], bias=True),
            # two 3×3 stand for the paper's 5×5, as in pytorch-cifar
            _conv(inputs, reduced5, five, five, sizes=[1, 3, 3], bias=True),
            nn.Sequential(pool, _conv(inputs, pooled, sizes=[1], bias=True)),
        )

    return nn.Sequential(
        _conv(3, 192, sizes=[3], bias=True),
        block(192, 64, 96, 128, 16, 32, 32),
        block(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, padding=1),
        block(480, 192, 96, 208, 16, 48, 64),
        block(512, 160, 112, 224, 24, 64, 64),
        block(512, 128, 128, 256, 24, 64, 64),
        block(512, 112, 144, 288, 32, 64, 64),
        block(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(3, 2, padding=1),
        block(832, 256, 160, 320, 32, 128, 128),
        block(832, 384, 192, 384, 48, 128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )


def inception_v4(classes: int) -> nn.Sequential:
    """Return Inception-v4 for images of 299×299 (Szegedy et al. 2017, figure 9).

    Parameters
    ----------
    classes : int
        Number of outputs.

    Returns
    -------
    torch.nn.Sequential
        Network.
    """
    across, down = (1, 7), (7, 1)

    def pooled(inputs: int, outputs: int) -> nn.Module:
        # zeros of the border are not averaged
        pool = nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)
        return nn.Sequential(pool, _conv(inputs, outputs, sizes=[1]))

    def a() -> nn.Module:
        return Branches(
            _conv(384, 96, sizes=[1]),
            _conv(384, 64, 96, sizes=[1, 3]),
            _conv(384, 64, 96, 96, sizes=[1, 3, 3]),
            pooled(384, 96),
        )

    def b() -> nn.Module:
        return Branches(
            _conv(1024, 384, sizes=[1]),
            _conv(1024, 192, 224, 256, sizes=[1, across, down]),
            _conv(1024, 192, 192, 224, 224, 256, sizes=[1, down, across, down, across]),
            pooled(1024, 128),
        )

    def c() -> nn.Module:
        return Branches(
            _conv(1536, 256, sizes=[1]),
            nn.Sequential(_conv(1536, 384, sizes=[1]), split(384)),
            nn.Sequential(_conv(1536, 384, 448, 512, sizes=[1, (3, 1), (1, 3)]), split(512)),
            pooled(1536, 256),
        )

    def split(inputs: int) -> nn.Module:
        return Branches(*(_conv(inputs, 256, sizes=[size]) for size in ((1, 3), (3, 1))))

    return nn.Sequential(
        _conv(3, 32, sizes=[3], stride=2),
        _conv(32, 32, sizes=[3], pad=False),
        _conv(32, 64, sizes=[3]),
        Branches(nn.MaxPool2d(3, 2), _conv(64, 96, sizes=[3], stride=2)),
        Branches(
            nn.Sequential(_conv(160, 64, sizes=[1]), _conv(64, 96, sizes=[3], pad=False)),
            nn.Sequential(
                _conv(160, 64, 64, 64, sizes=[1, across, down]),
                _conv(64, 96, sizes=[3], pad=False),
            ),
        ),
        Branches(_conv(192, 192, sizes=[3], stride=2), nn.MaxPool2d(3, 2)),
        *(a() for _ in range(4)),
        Branches(
            _conv(384, 384, sizes=[3], stride=2),
            _conv(384, 192, 224, 256, sizes=[1, 3, 3], stride=2),
            nn.MaxPool2d(3, 2),
        ),
        *(b() for _ in range(7)),
        Branches(
            _conv(1024, 192, 192, sizes=[1, 3], stride=2),
            _conv(1024, 256, 256, 320, 320, sizes=[1, across, down, 3], stride=2),
            nn.MaxPool2d(3, 2),
        ),
        *(c() for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1536, classes),
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet8": lambda classes: small_resnet(8, classes),
    "resnet20": lambda classes: small_resnet(20, classes),
    "resnet44": lambda classes: small_resnet(44, classes, project=True),
    "resnet18-small": lambda classes: resnet((2, 2, 2, 2), classes),
    "senet18": lambda classes: resnet((2, 2, 2, 2), classes, squeeze=True),
    "googlenet": googlenet,
    "vgg16-small": vgg,
    "vgg16bn": lambda classes: vgg(classes, hidden=(), norm=True),
    "alexnet-small": alexnet,
    "alexnet-grey": lambda classes: alexnet(classes, channels=1),
    "resnet18": lambda classes: resnet((2, 2, 2, 2), classes, large=True),
    "resnet50": lambda classes: resnet((3, 4, 6, 3), classes, expansion=4, large=True),
    "vgg16": lambda classes: vgg(classes, hidden=(4096, 4096), size=7),
    "vgg19": lambda classes: vgg(classes, 19, hidden=(4096, 4096), size=7),
    "alexnet": lambda classes: alexnet(classes, large=True),
    "inceptionv4": inception_v4,
    "vit": ViT,
}
"""Networks by name, as functions of the number of outputs."""
