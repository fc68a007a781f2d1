"""examples/images.toml trains as plain torch does, and reads folders of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.docs.test_recipes import EXAMPLES, load, stacked
from weft.core import RunConfig
from weft.core.run_config import load_run
from weft.data import Loader
from weft.train.trainer import train

SMALL = {
    "model.augment": "0",  # whose numbers are weft's own
    "data.size": "100",
    "data.workers": "0",
    "train.batch": "16",
    "train.steps": "6",
    "train.warmup": "0",
    "train.decay": '"constant"',
    "train.eval_every": "6",
    "train.eval_batches": "4",
    "train.log_every": "1",
    "optimizer": '{ name = "sgd", lr = 0.05 }',
    "checkpoint.every": "0",
}


def small(folder: Path, **more: str) -> RunConfig:
    out = {"output": json.dumps(str(folder / "out"))}
    return load_run(EXAMPLES / "images.toml", {**SMALL, **out, **more})


def plain_training() -> tuple[list[float], float, float]:
    """Losses of steps, and loss and accuracy of what is held out, by torch alone."""
    images = load("images")
    torch.manual_seed(0)
    model = images.Net(augment=0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def batches(split: str) -> Any:
        data = images.Shapes(100, split)
        order = Loader(data, 16, seed=0)
        return lambda step: stacked([data[i] for i in order.indices(step)])

    losses, of, held_out = [], batches("train"), batches("val")
    for step in range(6):
        image, label = of(step)
        loss = F.cross_entropy(model(image.double()), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    image, label = (torch.cat(parts) for parts in zip(*map(held_out, range(4))))
    with torch.no_grad():
        logits: Tensor = model.eval()(image.double())
    right = (logits.argmax(1) == label).double().mean()
    return losses, F.cross_entropy(logits, label).item(), right.item()


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2"])
def test_images_are_classified_as_by_plain_torch(layout: str, tmp_path: Path, pool: Any) -> None:
    in_float64 = {"precision.compute": '"fp64"', "layout.axes": json.dumps(layout)}
    pool.run(train, small(tmp_path, **in_float64), False, world=2)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    losses, held_out, right = plain_training()
    assert losses[-1] < losses[0]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses, rel=1e-9)
    (validation,) = [line for line in lines if "val_loss" in line]
    assert validation["val_loss"] == pytest.approx(held_out, rel=1e-9)
    assert validation["val_accuracy"] == pytest.approx(right, abs=1e-9)


def test_augmentation_moves_and_mirrors_in_training_alone() -> None:
    images = load("images")
    image = torch.zeros(64, 1, 8, 8)
    image[:, 0, 3, 2] = 1.0
    augment = images.Augment(2)
    torch.manual_seed(0)
    moved = augment(image).flatten(1)
    assert moved.sum(1).eq(1.0).all()
    places = {divmod(int(place), 8) for place in moved.argmax(1)}
    rows, columns = zip(*places)
    assert {*rows} == {1, 2, 3, 4, 5} and {*columns} == {*range(8)}  # 2 and 5, give or take 2
    assert augment.eval()(image) is image


def test_a_folder_of_images(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for split, shade in (("train", 255), ("val", 0)):
        for name, size in (("cat", (20, 10)), ("dog", (16, 16))):
            (tmp_path / split / name).mkdir(parents=True)
            pillow.new("RGB", size, (shade, 0, 0)).save(tmp_path / split / name / "0.png")
            (tmp_path / split / name / "notes.txt").write_text("no image")
    folder = load("images").Folder(str(tmp_path), "train", side=8, channels=3)
    assert folder.names == ["cat", "dog"] and [folder[i][1] for i in range(len(folder))] == [0, 1]
    red, green = folder[0][0][0], folder[0][0][1]
    assert folder[0][0].shape == (3, 8, 8) and red.unique() == 2.0 and green.unique() == -2.0
    table = f'{{ build = "images:Folder", root = "{tmp_path}", entries = ["image", "label"] }}'
    keys = {"data": table, "train.batch": "2", "train.steps": "2", "train.eval_every": "0"}
    train(small(tmp_path, **{"layout.axes": '"dp1"', "model.classes": "2", **keys}), False)
