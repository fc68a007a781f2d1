"""examples/continued.toml goes on from a model directory as plain transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.docs.test_recipes import EXAMPLES, load
from weft.core import RunConfig
from weft.core.run_config import load_run
from weft.data import Loader, text
from weft.train import export_weights
from weft.train.trainer import train

STEPS = 3
SMALL = {
    "layout.axes": '"fsdp2"',
    "precision.compute": '"fp64"',
    "data.seq_len": "32",
    "train.batch": "4",
    "train.steps": f"{STEPS}",
    "train.warmup": "0",
    "train.decay": '"constant"',
    "train.eval_every": "0",
    "train.log_every": "1",
    "train.clip": "1e9",
    "optimizer": '{ name = "sgd", lr = 0.05 }',
    "checkpoint.every": f"{STEPS}",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script makes, with a model that has taken two steps."""
    folder = tmp_path_factory.mktemp("continued")
    recipe = load("prepare_continued")
    recipe.prepare(recipe.parse(["--steps", "2", "--folder", str(folder)]))
    return folder


def small(prepared: Path, folder: Path) -> RunConfig:
    named = {
        "model.hf": prepared / "model",
        "output": folder / "out",
    }
    keys = {key: json.dumps(str(value)) for key, value in named.items()}
    keys["data.text"] = json.dumps([str(prepared / "text" / "*.txt")])
    return load_run(EXAMPLES / "continued.toml", {**SMALL, **keys})


def test_it_goes_on_as_plain_transformers_does(prepared: Path, tmp_path: Path, pool: Any) -> None:
    run = small(prepared, tmp_path)
    pool.run(train, run, False, world=2)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(prepared / "model").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, losses = Loader(text(str(prepared / "text" / "*.txt"), 32), 4, seed=0), []
    for _ in range(STEPS):
        batch = next(loader)
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-9)

    export_weights(tmp_path / "out", tmp_path / "model")
    saved: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(weight.double(), model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_text_that_the_model_has_not_seen(prepared: Path) -> None:
    """It is documentation: prose, and not the source that the model was trained on."""
    texts = [path.read_text() for path in (prepared / "text").iterdir()]
    assert len(texts) > 100 and not any('"""' in each[:200] for each in texts[:20])
