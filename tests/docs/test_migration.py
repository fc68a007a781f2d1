"""The pages for users of Accelerate and Trainer: their programs run, their keys exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.run_files import TINY
from weft.core import RunConfig, load_run
from weft.train import build_dataset, sample_batch

DOCS = Path(__file__).parents[2] / "docs"
COLLATOR = """
import torch
from tokenizers import Tokenizer, models
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        ids = torch.arange(3 + i % 9)
        return {"input_ids": ids, "labels": ids.clone()}

words = Tokenizer(models.WordLevel({"pad": 0}, unk_token="pad"))
collator = DataCollatorForTokenClassification(
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad")
)

def padded(samples):
    return dict(collator(samples))
"""


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_both_loops_compute_the_same() -> None:
    theirs, ours = blocks("from_accelerate.md", "python")
    names: dict[str, Any] = {}
    exec(theirs, names)
    expected = names["train"]()
    mine: dict[str, Any] = {}
    exec(ours, mine)
    assert len(expected) == 8 and expected[-1] < expected[0]
    assert mine["losses"] == pytest.approx(expected, rel=1e-4)


def test_the_run_file_of_the_page_is_one(tmp_path: Path) -> None:
    text, deepspeed = blocks("from_trainer.md", "toml")
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    run = load_run(file)
    assert (str(run.layout.axes), run.train.batch, run.optimizer.arguments["lr"]) == (
        "fsdp8",
        64,
        1e-5,
    )
    file.write_text(f'[model]\nhf = "a"\n\n[data]\nhf = "b"\n\n{deepspeed}', encoding="utf-8")
    run = load_run(file)
    assert (str(run.layout.axes), run.train.accumulate, run.precision.compute) == (
        "fsdp8+zero2+offload",
        4,
        "bf16",
    )


def test_a_collator_of_transformers_goes_where_the_page_says(tmp_path: Path) -> None:
    """It pads the inputs of samples of several lengths."""
    text = (DOCS / "from_trainer.md").read_text(encoding="utf-8")
    (named,) = re.findall(
        r"^\| `data_collator` \| `(data\.\w+) = \"my_module:padded\"`", text, re.M
    )
    (tmp_path / "collator_of_page_test.py").write_text(COLLATOR)
    table = '{ build = "collator_of_page_test:Rows" }'
    file = tmp_path / "run.toml"
    file.write_text(TINY, encoding="utf-8")
    run = load_run(file, {"data": table, named: "collator_of_page_test:padded"})
    batch = sample_batch(run, build_dataset(run))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[0, 1, 2, -100], [0, 1, 2, 3]]


def unknown_keys(text: str) -> list[str]:
    """Words such as `train.clip` that are no key of a run file."""
    known = {
        f"{table}.{key}"
        for table, field in RunConfig.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    named = re.findall(r"`((?:model|data|layout|train|precision|checkpoint)\.\w+)\b", text)
    return [key for key in named if key not in known and not key.endswith("save_pretrained")]


def test_keys_of_the_table_exist() -> None:
    text = (DOCS / "from_trainer.md").read_text(encoding="utf-8")
    assert unknown_keys("`train.clop`") and text.count("`train.") > 5
    assert not unknown_keys(text)
