"""The text classifier of docs/recipes.md learns, and is one device's on every layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tests.docs.scripts import ROOT, load_script

refresh = load_script("refresh")
GOOD, BAD = ["great", "lovely", "fine"], ["awful", "poor", "sad"]
OTHER = ["the", "film", "was", "a", "very", "long", "day", "and", "then", "it"]


def write_texts(folder: Path, drawn: random.Random) -> None:
    """Texts of 5 to 12 words whose label one word tells."""
    for split, count in (("train", 256), ("val", 96)):
        rows = []
        for _ in range(count):
            label = drawn.randrange(2)
            words = drawn.choices(OTHER, k=drawn.randint(4, 11))
            words.insert(drawn.randrange(len(words)), drawn.choice(GOOD if label else BAD))
            rows.append(json.dumps({"text": " ".join(words), "label": label}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(rows))


def write_model(folder: Path) -> None:
    """A small BERT without a head for classes, and a tokenizer of these words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=special)
    made.train_from_iterator([" ".join(GOOD + BAD + OTHER)], trainer)
    ends = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


@pytest.mark.slow(ci=False)
@pytest.mark.timeout(600)
def test_the_page_trains_a_text_classifier(tmp_path: Path) -> None:
    for item in refresh.read(ROOT / "docs" / "recipes.md"):
        if isinstance(item, refresh.NamedFile) and item.name.startswith("sentiment."):
            (tmp_path / item.name).write_text(item.text)
    write_texts(tmp_path, random.Random(0))
    write_model(tmp_path / "bert-base")
    more = "--set optimizer.lr=1e-2 --set train.epochs=8 --output out"
    code, output = refresh.run(f"weft train sentiment.toml {more}", tmp_path, 240)
    assert code == 0, output
    rows = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    right = [row["val_accuracy"] for row in rows if "val_accuracy" in row]
    assert right[-1] > 0.9 and right[-1] > right[0], right
    layouts = " ".join(f"--layout {layout}" for layout in ("dp2", "fsdp2", "tp2", "pp2"))
    code, output = refresh.run(f"weft verify sentiment.toml {layouts} --steps 1", tmp_path, 300)
    assert code == 0 and "4 of 4 layouts equal one device" in output, output
