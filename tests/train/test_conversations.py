"""Conversations as samples: which tokens count, what is packed, and that attention sees one of them
at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from tests.train.test_hf_checkpoint import FAMILIES
from weft.cli.app import app
from weft.core import run_config
from weft.core.errors import DataError
from weft.train import build_data
from weft.train.conversations import Chat, chat, pack

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# as of models that leave out what they thought, once there is another question
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last or m.role == 'user' else 'x' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<pad>"]


def tokenizer_in(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of bytes with a chat template."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={
                c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
            },
            merges=[],
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def said(*turns: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + found


def talk(count: int) -> list[list[dict[str, str]]]:
    draw = random.Random(5)
    words = ["blue", "seven", "why", "because", "of course", "never"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 3)))

    return [said(*(text() for _ in range(2 * draw.randint(1, 2)))) for _ in range(count)]


def written(folder: Path, rows: list[Any], key: str = "messages") -> str:
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))
    return str(file)


def answers(data: Chat) -> list[str]:
    """What counts, of each window."""
    return [
        data.decode([i for i in data[n]["labels"].tolist() if i >= 0]) for n in range(len(data))
    ]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_alone_count(tmp_path: Path, template: str) -> None:
    rows = [said("a?", "b.", "c?", "d.", system="s"), said("e?", "f."), said("?", "g")]
    coder = tokenizer_in(tmp_path, template)
    data = chat(written(tmp_path, rows), coder, seq_len=64, packed=False)
    assert answers(data) == ["b.<|end|>d.<|end|>", "f.<|end|>", "g<|end|>"]
    for number, row in enumerate(rows):
        sample = data[number]
        inside = sample["labels"] >= 0
        assert torch.equal(sample["labels"][inside], sample["input_ids"][1:][inside[:-1]])
        whole = transformers.AutoTokenizer.from_pretrained(coder).apply_chat_template(
            row, tokenize=False
        )
        assert data.decode(sample["input_ids"]).replace("<pad>", "") == whole


def test_windows_hold_every_conversation_once(tmp_path: Path) -> None:
    rows = talk(60)
    data = chat(written(tmp_path, rows), tokenizer_in(tmp_path), seq_len=96)
    alone = chat(written(tmp_path, rows), tokenizer_in(tmp_path), seq_len=96, packed=False)
    assert len(alone) == 57 and len(data) < 40  # every 20th is held out
    texts = []
    for number in range(len(data)):
        sample = data[number]
        begins = [*(sample["position_ids"] == 0).nonzero().flatten().tolist(), 96]
        for start, stop in pairwise(begins):
            assert sample["position_ids"][start:stop].tolist() == list(range(stop - start))
            assert sample["labels"][stop - 1] == -100  # nothing of the next one
            texts.append(data.decode(sample["input_ids"][start:stop]))
    texts = [text for text in texts if "<pad>" not in text]
    others = [alone.decode(alone[i]["input_ids"]).replace("<pad>", "") for i in range(len(alone))]
    assert sorted(texts) == sorted(others)


def test_packing_is_tight_and_complete() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(1, 100) for _ in range(500)]
    windows = pack(lengths, 128)
    assert sorted(i for window in windows for i in window) == list(range(500))
    assert all(sum(lengths[i] for i in window) <= 128 for window in windows)
    assert len(windows) <= 1.02 * sum(lengths) / 128 + 1


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """Packed or alone, the loss is what transformers makes of each conversation by itself."""
    rows = talk(20)
    kind, keys = FAMILIES["llama"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**keys, "vocab_size": 261, "use_cache": False})
    ).double()
    coder = tokenizer_in(tmp_path)
    alone = chat(written(tmp_path, rows), coder, seq_len=96, packed=False)
    total = count = 0.0
    with torch.no_grad():
        for number in range(len(alone)):
            sample = alone[number]
            length = int((sample["input_ids"] != 260).sum())
            ids = sample["input_ids"][:length]
            labels = torch.cat([torch.tensor([-100]), sample["labels"][: length - 1]])
            counted = int((labels >= 0).sum())
            mean = model(input_ids=ids[None], labels=labels[None]).loss
            total, count = total + float(mean) * counted, count + counted
        packed = chat(written(tmp_path, rows), coder, seq_len=96)
        assert len(packed) < len(alone)
        batch = weft.data.collate([packed[i] for i in range(len(packed))])
        given = {key: batch[key] for key in ("input_ids", "position_ids")}
        mine, weight = weft.losses.next_token(model(**given), batch)
    assert int(weight) == count
    assert float(mine / weight) == pytest.approx(
        total / count, rel=1e-6
    )  # theirs is of float32 logits


RUN = """
[model]
hf = "model/config.json"
[data]
chat = ["answers.jsonl"]
tokenizer = "tokenizer"
seq_len = 96
[train]
batch = 4
steps = 2
"""


@pytest.mark.slow
def test_every_layout_equals_one_device(tmp_path: Path) -> None:
    """Packed conversations, under context parallelism too."""
    kind, keys = FAMILIES["llama"]
    getattr(transformers, kind)(**{**keys, "vocab_size": 261}).save_pretrained(tmp_path / "model")
    tokenizer_in(tmp_path / "tokenizer")
    written(tmp_path, talk(60))
    (tmp_path / "run.toml").write_text(RUN)
    run = run_config.load_run(tmp_path / "run.toml")
    assert run.loss == "weft.losses:next_token"
    assert {*build_data.build_dataset(run)[0]} == {"input_ids", "labels", "position_ids"}
    layouts = [("--layout", each) for each in ("dp2", "fsdp2", "tp2", "pp2", "cp2")]
    file = str(tmp_path / "run.toml")
    found = CliRunner().invoke(app, ["verify", file, *(x for pair in layouts for x in pair)])
    assert found.exit_code == 0 and "5 of 5 layouts equal" in found.stdout, found.output


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def forgetful(folder: Path) -> None:
    tokenizer_in(folder, FORGETFUL)
    written(folder, [said("a?", "b.", "c?", "d.")])


def row_of(row: Any, key: str = "messages") -> Callable[[Path], None]:
    return lambda folder: written(folder, [row], key) and None


REFUSED: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (no_template, {}, "has no chat template.*data.template"),
    (forgetful, {}, "line 1.*changes earlier messages.*generation"),
    (row_of(said("a", "b"), "chat"), {}, "has no 'messages' among .*chat"),
    (row_of("hello"), {}, "is not a list of messages"),
    (row_of(said("a")), {}, "has no answer among"),
    (row_of([{"content": "x"}]), {}, "is not a list of messages"),
    (lambda folder: (folder / "answers.jsonl").write_text("{"), {}, "line 1.*is not JSON"),
    (lambda folder: None, {"seq_len": 4}, "have more tokens, at most .*too_long"),
    (lambda folder: None, {"too_long": "split"}, "is not a way to treat"),
    (lambda folder: None, {"too_long": "drop", "seq_len": 4}, "holds no answer"),
    (lambda folder: None, {"tokenizer": ""}, "needs a tokenizer"),
    (lambda folder: None, {"tokenizer": "nowhere"}, "cannot be read"),
    (lambda folder: (folder / "answers.jsonl").unlink(), {}, "no file matches"),
]


@pytest.mark.parametrize(("spoil", "arguments", "says"), REFUSED)
def test_what_is_refused(
    tmp_path: Path, spoil: Callable[[Path], Any], arguments: dict[str, Any], says: str
) -> None:
    tokenizer_in(tmp_path)
    file = written(tmp_path, [said("a?", "b."), said("c?", "d.")])
    chat(file, tmp_path, seq_len=32)
    spoil(tmp_path)
    with pytest.raises(DataError, match=f"(?s){says}"):
        chat(file, **{"tokenizer": str(tmp_path), "seq_len": 32, **arguments})


def test_long_conversations_are_cut_or_dropped_if_told_so(tmp_path: Path) -> None:
    rows = [said("a?", "b" * 40), said("c?", "d.")]
    coder = tokenizer_in(tmp_path)
    cut = chat(written(tmp_path, rows), coder, seq_len=24, too_long="cut", packed=False)
    assert answers(cut) == ["b" * 19, "d.<|end|>"]
    dropped = chat(written(tmp_path, rows), coder, seq_len=24, too_long="drop", packed=False)
    assert answers(dropped) == ["d.<|end|>"]


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = talk(30)
    datasets.Dataset.from_dict({"messages": rows}).save_to_disk(tmp_path / "rows")
    coder = tokenizer_in(tmp_path / "coder")
    mine = chat(str(tmp_path / "rows"), coder, seq_len=96)
    theirs = chat(written(tmp_path, rows), coder, seq_len=96)
    assert answers(mine) == answers(theirs)
    val = chat(written(tmp_path, rows), coder, seq_len=96, split="val", packed=False)
    assert len(val) == 1
