"""Makes what continued.toml goes on from: a model directory of Hugging Face, as a download of one
would be, and text that the model has not seen.

    python examples/prepare_continued.py  # writes continued/model and continued/text

The model is a small Llama over bytes that has learnt Python's standard library for 150
steps; the text is that library's documentation strings. Needs `pip install weft[hf]`; downloads
nothing.
"""

from __future__ import annotations

import argparse
import ast
import logging
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.data import Loader, stdlib

SEQ_LEN, BATCH = 128, 16
FOLDER = Path(__file__).parent / "continued"


def make_model() -> Any:
    # transformers imports torchao, if it is installed, which names each kernel that is not for here
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=SEQ_LEN,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def pretrain(model: Any, steps: int) -> float:
    """On one device, in plain torch; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader, loss = Loader(stdlib(SEQ_LEN), BATCH, seed=0), torch.zeros(())
    for step in range(1, steps + 1):
        batch = next(loader)
        logits: Tensor = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return loss.item()


def documentation() -> list[str]:
    """Of each module of the standard library, what its strings say of it."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        said = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        found.append("\n\n".join(text for text in said if text))
    return [text for text in found if text]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> None:
    text = options.folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    (options.folder / ".gitignore").write_text("*\n")
    for number, each in enumerate(documentation()):
        (text / f"{number:03}.txt").write_text(each, encoding="utf-8")
    model = make_model()
    loss = pretrain(model, options.steps)
    model.save_pretrained(options.folder / "model")
    print(f"{options.folder}: a model with loss {loss:.3f}, and {len([*text.iterdir()])} texts")


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare(parse())
