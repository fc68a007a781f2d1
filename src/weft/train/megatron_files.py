"""Tokens as Megatron-LM's preprocess_data writes them: NAME.bin and NAME.idx, memory-mapped.

NAME.bin    the tokens of all sequences, one after the other
NAME.idx    "MMIDIDX\\0\\0"; version 1 (u64); code of the tokens' dtype (u8); numbers of
            sequences and of entries of the document index (u64 each); then of each sequence
            its length (i32), of each its first byte in NAME.bin (i64), and of each document
            its first sequence, closed by the number of sequences (i64). Little-endian.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor

from weft.core import DataError

from .data import HELD_OUT, held_out, window
from .tokenizer import load_tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by their codes


class MappedTokens:
    """Consecutive windows of tokens on disk: {"input_ids", "labels"}, as of weft.data.Text.

    With a tokenizer it has `vocab`, `encode` and `decode`.

    Args:
        tokens: a memory-mapped vector.
        seq_len: tokens of a sample.
        tokenizer: a tokenizer.json, or a directory for transformers.

    Example:
        >>> MappedTokens(np.arange(100), seq_len=8)[2]["input_ids"].tolist()
        [16, 17, 18, 19, 20, 21, 22, 23]
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, tokenizer: str | Path | None = None):
        self.tokens, self.seq_len = tokens, seq_len
        if tokenizer is not None:
            coder = load_tokenizer(tokenizer)
            self.vocab, self.encode, self.decode = coder.vocab, coder.encode, coder.decode

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return window(self.tokens, index, self.seq_len)


def megatron(
    prefix: str | Path,
    seq_len: int = 256,
    split: str = "train",
    tokenizer: str | Path | None = None,
) -> MappedTokens:
    """Tokens that Megatron-LM's preprocess_data wrote, in the order of the file.

    Args:
        prefix: the path of PREFIX.bin and PREFIX.idx.
        seq_len: tokens of a sample.
        split: "train" or "val", which is the last twentieth of the documents.
        tokenizer: what made the tokens, to generate text: a tokenizer.json, or a directory for
            transformers.

    Raises:
        DataError: no such split, files that are not of this format, or too few tokens.

    Example:
        data = weft.data.megatron("corpus/web_text_document", seq_len=4096)
    """
    if seq_len < 1:
        raise DataError("seq_len", seq_len, "is not a number of tokens", "use 1 or more")
    val = held_out(split)
    tokens, documents = read_megatron(prefix)
    end = len(tokens) - len(tokens) // HELD_OUT
    if len(documents) > HELD_OUT:
        end = int(documents[(len(documents) - 1) * (HELD_OUT - 1) // HELD_OUT])
    part = tokens[end:] if val else tokens[:end]
    if len(part) <= seq_len:
        problem = f"this split holds {len(part)} tokens, and one sample takes {seq_len + 1}"
        raise DataError("prefix", str(prefix), problem, "give more data or a smaller seq_len")
    return MappedTokens(part, seq_len, tokenizer)


def read_megatron(prefix: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """(all tokens, memory-mapped; the first token of each document, and their number). Raises
    DataError."""
    binary, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")

    def refusal(problem: str) -> DataError:
        fix = "name the path of a .bin and .idx of Megatron-LM's preprocess_data, without suffix"
        return DataError("prefix", str(prefix), problem, fix)

    for path in (binary, index):
        if not path.is_file():
            raise refusal(f"there is no file {path}")
    raw = np.memmap(index, np.uint8, "r") if os.path.getsize(index) else np.empty(0, np.uint8)
    at = len(MAGIC)
    if raw[:at].tobytes() != MAGIC or len(raw) < at + HEADER.itemsize:
        raise refusal(f"{index} does not begin with the header of an index")
    head = raw[at : at + HEADER.itemsize].view(HEADER)[0]
    at += HEADER.itemsize
    code, sequences, documents = (int(head[k]) for k in ("dtype", "sequences", "documents"))
    if int(head["version"]) != 1:
        raise refusal(f"{index} is of version {head['version']}, and weft reads version 1")
    if code not in DTYPES:
        raise refusal(f"{index} has the dtype code {code}, which is not an integer dtype")
    if len(raw) < at + 12 * sequences + 8 * documents:
        raise refusal(f"{index} is cut short")
    lengths = raw[at : (at := at + 4 * sequences)].view("<i4")
    firsts = raw[at : (at := at + 8 * sequences)].view("<i8")
    bounds = raw[at : at + 8 * documents].view("<i8")
    size = np.dtype(DTYPES[code]).itemsize
    ends = np.cumsum(lengths, dtype=np.int64)
    if not np.array_equal(firsts, (ends - lengths) * size):
        raise refusal(f"{index} has sequences that do not lie one after the other")
    total = int(ends[-1]) if sequences else 0
    if os.path.getsize(binary) != total * size:
        raise refusal(f"{binary} does not have the {total * size} bytes that {index.name} gives")
    if documents and (bounds.min() < 0 or bounds.max() > sequences):
        raise refusal(f"{index} has a document of sequences that are not there")
    tokens = np.memmap(binary, DTYPES[code], "r") if total else np.empty(0, DTYPES[code])
    return tokens, np.concatenate([[0], ends])[bounds]
