"""Makes the data of llama_bpe.toml: a Hugging Face dataset of the standard library's source, and a
BPE tokenizer for it.

    python examples/prepare_bpe.py  # writes corpus/dataset and corpus/tokenizer.json

Needs `pip install weft[hf]`; downloads nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import datasets

from weft.train import train_bpe

VOCAB = 1024  # as in llama/config.json
MAX_BYTES = 2_000_000


def sources() -> list[str]:
    """Modules of the standard library, up to MAX_BYTES of them."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        size += len(text)
        if size > MAX_BYTES:
            break
        texts.append(text)
    return texts


if __name__ == "__main__":
    corpus = Path(__file__).parent / "corpus"
    corpus.mkdir(exist_ok=True)
    (corpus / ".gitignore").write_text("*\n")
    texts = sources()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(corpus / "dataset")
    tokenizer = train_bpe(texts, VOCAB, corpus / "tokenizer.json")
    print(f"{len(texts)} texts and a vocabulary of {tokenizer.vocab} in {corpus}")
