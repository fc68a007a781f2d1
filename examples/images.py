r"""Classification of images: what images.toml names. A residual net with batch norm, samples that
are tuples (image, class) as those of torchvision, augmentation, and accuracy.

    weft train examples/images.toml
    weft verify examples/images.toml --layout dp2 --layout fsdp2 --layout pp2

With images of your own, in DIR/train/CLASS/*.png and DIR/val/CLASS/*.png (also .jpg):

    weft train images.toml --set 'data.build="images:Folder"' --set 'data.root="DIR"' \
        --set 'model.classes=10'
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data import shapes

MEAN, DEVIATION = 0.5, 0.25  # about those of photographs


class Augment(nn.Module):
    """In training each image is moved by up to `most` pixels, and mirrored or not.

    weft draws the numbers of a forward as it draws those of dropout: an image has the same ones on
    every layout, and others in each step.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def forward(self, image: Tensor) -> Tensor:
        if not (self.training and self.most):
            return image
        count, channels, height, width = image.shape
        drawn = torch.rand(count, 3, device=image.device)
        down, right = ((2 * self.most + 1) * drawn[:, :2]).long().unbind(1)
        rows, columns = (torch.arange(n, device=image.device) for n in (height, width))
        columns = torch.where(drawn[:, 2:] < 0.5, columns, columns.flip(0)) + right[:, None]
        rows = (rows + down[:, None])[:, None, :, None]
        which = torch.arange(count, device=image.device)[:, None, None, None]
        plane = torch.arange(channels, device=image.device)[:, None, None]
        wide = F.pad(image, (self.most,) * 4)
        return wide[which, plane, rows, columns[:, None, None, :]]


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class Net(nn.Module):
    """image [b, channels, h, w] -> logits [b, classes]."""

    def __init__(self, classes: int = 4, channels: int = 1, width: int = 16, augment: int = 2):
        super().__init__()
        self.augment = Augment(augment)
        sizes = (channels, width, 2 * width, 4 * width)
        self.blocks = nn.Sequential(*map(Block, sizes, sizes[1:], (1, 2, 2)))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.augment(image)).mean(dim=(2, 3)))


def accuracy(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """How many are right, and of how many: weft takes the mean over all ranks and batches."""
    return (output.argmax(1) == batch["label"]).sum(), len(output)


class Shapes:
    """Circles, squares, triangles and crosses, drawn here."""

    def __init__(self, size: int = 4000, split: str = "train"):
        self.drawn = shapes(size=size, split=split)

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.drawn.images[index], int(self.drawn.labels[index])


class Folder:
    """Images of root/SPLIT/CLASS, all brought to one size, in grey or in colour."""

    def __init__(self, root: str, split: str = "train", side: int = 16, channels: int = 1):
        self.side, self.mode = side, {1: "L", 3: "RGB"}[channels]
        folder = Path(root, split)
        self.names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.names)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in (".png", ".jpg", ".jpeg")
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.files[index]
        with Image.open(path) as opened:
            image = opened.convert(self.mode).resize((self.side, self.side))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.side, self.side, -1).permute(2, 0, 1)
        return (pixels / 255 - MEAN) / DEVIATION, label
