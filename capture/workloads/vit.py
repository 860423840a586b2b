"""A vision transformer for small images, of torch's own layers.

Source: Dosovitskiy et al. 2021, with the mean of all patches in place of the class token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ViT"]

_PATCH, _WIDTH, _HEADS, _LAYERS = 4, 64, 4, 4


class ViT(nn.Module):
    """Patches of 4×4, four layers of width 64, and a linear layer on their mean.

    Parameters
    ----------
    classes : int
        Number of outputs.
    side : int
        Height and width of the images, a multiple of 4.
    """

    def __init__(self, classes: int, side: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.positions = nn.Parameter(torch.empty(1, (side // _PATCH) ** 2, _WIDTH))
        nn.init.normal_(self.positions, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(_LAYERS)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.output = nn.Linear(_WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images.

        Parameters
        ----------
        images : float32 tensor, shape (n, 3, side, side)
            Images.

        Returns
        -------
        tensor, shape (n, classes)
            Scores.
        """
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.output(self.norm(hidden).mean(1))
        return scores
