"""Text to token ids and back: bytes, or a byte-level BPE in a tokenizer.json (extra `hf`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from weft.core import DataError, import_extra

END = "<|endoftext|>"  # the token that `train_bpe` keeps for the end of a document


class Tokenizer(Protocol):
    """Text <-> ids below `vocab`."""

    @property
    def vocab(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class Bytes:
    """One id per byte of UTF-8."""

    vocab = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


class Trained:
    """A tokenizer of the `tokenizers` library; special tokens are never added."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @property
    def vocab(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        texts = iter(texts)
        while some := list(islice(texts, 1024)):  # enough for its threads, little enough for memory
            yield from (
                one.ids for one in self.tokenizer.encode_batch(some, add_special_tokens=False)
            )

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def train_bpe(texts: Iterable[str | Path], vocab: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) and write it to `path` as
    tokenizer.json.

    `texts`: files as Path, texts as str. `vocab` counts the 256 bytes and the token
    `<|endoftext|>`. Raises DataError.
    """
    tokenizers = import_extra("tokenizers", "tokenizer", str(path))
    if vocab < 257:
        raise DataError(
            "vocab", vocab, "is less than the 256 bytes and <|endoftext|>", "use at least 257"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (
            t.read_text(encoding="utf-8", errors="replace") if isinstance(t, Path) else t
            for t in texts
        ),
        trainer,
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return Trained(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or a directory that holds one or that transformers can read. Raises
    DataError."""
    fix = "give a tokenizer.json or a directory that transformers' AutoTokenizer can read"
    path = Path(path)
    if not path.exists():
        raise DataError("tokenizer", str(path), "does not exist", fix)
    if not (path.is_file() or path.is_dir()):
        raise DataError("tokenizer", str(path), "is not a file or folder", fix)
    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizers = import_extra("tokenizers", "tokenizer", str(path))
    try:
        if file.is_file():
            return Trained(tokenizers.Tokenizer.from_file(str(file)))
        auto = import_extra("transformers", "tokenizer", str(path)).AutoTokenizer
        return Trained(
            auto.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            ).backend_tokenizer
        )
    except DataError:
        raise
    except Exception as error:  # the libraries raise bare Exception
        said = " ".join(str(error).split())
        raise DataError("tokenizer", str(path), f"cannot be read ({said})", fix) from error
