"""A small convolutional net with batch norm, written for one device."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """image [b, in_channels, h, w] -> logits [b, classes]."""

    def __init__(self, channels: int, classes: int, in_channels: int, dropout: float):
        super().__init__()
        widths = (in_channels, channels, 2 * channels, 4 * channels)
        # No bias before a batch norm: the norm would take it away again.
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                )
                for before, after, stride in zip(widths, widths[1:], (1, 2, 2))
            )
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.dropout(self.stages(image).mean(dim=(2, 3))))


def convnet(
    channels: int = 16, classes: int = 10, in_channels: int = 1, dropout: float = 0.0
) -> nn.Module:
    """Three 3x3 convolutions with batch norm, of widths 1, 2 and 4 times `channels`, a mean over
    pixels, and a linear head.

    Args:
        channels: width of the first convolution.
        classes: number of classes.
        in_channels: channels of an image.
        dropout: dropout probability before the head.

    Example:
        >>> import torch
        >>> convnet(classes=4)(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 4])
    """
    return ConvNet(channels, classes, in_channels, dropout)
