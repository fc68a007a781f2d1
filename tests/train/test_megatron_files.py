"""Megatron's files, written by hand here after the description of the format."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core import Refusal
from weft.train.data import Loader
from weft.train.megatron_files import megatron, read_megatron

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
DOCUMENTS = [[[3, 1, 4], [1, 5]], [[9, 2, 6, 5]], [[3]]]  # of sequences


def write(prefix: Path, documents: Any, code: int = 8, modes: bool = False) -> None:
    sequences = [sequence for document in documents for sequence in document]
    letter = CODES[code]
    size = struct.calcsize(f"<{letter}")
    parts = [b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)]
    parts += [struct.pack("<i", len(sequence)) for sequence in sequences]
    starts = [sum(map(len, sequences[:number])) * size for number in range(len(sequences))]
    parts += [struct.pack("<q", start) for start in starts]
    bounds = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    parts += [struct.pack("<q", bound) for bound in bounds]
    Path(f"{prefix}.idx").write_bytes(b"".join(parts) + (bytes(len(sequences)) if modes else b""))
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_tokens_and_documents_are_those_written(tmp_path: Path, code: int, modes: bool) -> None:
    write(tmp_path / "corpus", DOCUMENTS, code, modes)
    tokens, documents = read_megatron(tmp_path / "corpus")
    assert isinstance(tokens, np.memmap) and tokens.dtype.itemsize == struct.calcsize(CODES[code])
    assert tokens.tolist() == [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    assert documents.tolist() == [0, 5, 9, 10]


def test_the_last_documents_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "corpus", [[[number] * 4, [number]] for number in range(40)])
    train, val = (megatron(tmp_path / "corpus", 3, split) for split in ("train", "val"))
    assert train.tokens.tolist() == [number for number in range(38) for _ in range(5)]
    assert val.tokens.tolist() == [38] * 5 + [39] * 5
    assert train[1]["input_ids"].tolist() == [0, 0, 1]
    assert train[1]["labels"].tolist() == [0, 1, 1]
    assert len(train) == 63
    with pytest.raises(IndexError):
        train[63]
    write(tmp_path / "single", [[list(range(100))]])
    assert megatron(tmp_path / "single", 3, "val").tokens.tolist() == [95, 96, 97, 98, 99]
    assert next(Loader(train, 4, 0))["input_ids"].shape == (4, 3)


def change(path: Path, at: int, value: bytes) -> None:
    held = bytearray(path.read_bytes())
    held[at : at + len(value)] = value
    path.write_bytes(bytes(held))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.with_suffix(".bin").unlink(), "there is no file .*corpus.bin"),
        (lambda p: p.with_suffix(".idx").unlink(), "there is no file .*corpus.idx"),
        (
            lambda p: p.with_suffix(".idx").write_bytes(b""),
            "does not begin with the header of an index",
        ),
        (
            lambda p: change(p.with_suffix(".idx"), 0, b"X"),
            "does not begin with the header of an index",
        ),
        (lambda p: change(p.with_suffix(".idx"), 9, b"\x02"), "of version 2"),
        (lambda p: change(p.with_suffix(".idx"), 17, b"\x07"), "the dtype code 7"),
        (lambda p: change(p.with_suffix(".idx"), 25, b"\x7f"), "is cut short"),
        (lambda p: change(p.with_suffix(".idx"), 34, b"\x02"), "do not lie one after the other"),
        (lambda p: change(p.with_suffix(".idx"), -8, b"\x09"), "sequences that are not there"),
        (lambda p: p.with_suffix(".bin").write_bytes(b"123"), "does not have the 20 bytes"),
    ],
)
def test_files_that_are_none_are_refused(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    write(tmp_path / "corpus", DOCUMENTS)
    spoil(tmp_path / "corpus.x")
    with pytest.raises(Refusal, match=f"prefix = .*{says}.*without suffix"):
        megatron(tmp_path / "corpus", 2)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "corpus", DOCUMENTS)
    with pytest.raises(Refusal, match="this split holds 10 tokens, and one sample takes 17"):
        megatron(tmp_path / "corpus", 16)
    with pytest.raises(Refusal, match="seq_len = 0"):
        megatron(tmp_path / "corpus", 0)
