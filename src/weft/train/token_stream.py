"""Text that is read and tokenized during training: files of any size, of which no rank holds more
than a few rows."""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core import DataError, import_extra, nearest

from .data import HELD_OUT, held_out
from .tokenizer import Bytes, Tokenizer, load_tokenizer

# suffix -> what `datasets` calls a reader of such files
READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


class TokenStream:
    """Consecutive windows of the tokens of rows: {"input_ids", "labels"}, as of weft.data.Text.

    Its state is where the rows stood before the one in which the next window begins, and how many
    tokens of that row have been taken.

    Args:
        rows: returns an iterable of rows of text, which has a state.
        seq_len: tokens of a sample.
        tokenizer: makes tokens of a row.
        close: tokens that close every row.
        val: whether to give the held-out rows, every 20th, or the others.

    Example:
        windows = weft.data.stream("corpus/*.jsonl", seq_len=512)
        windows.vocab, next(iter(windows))["input_ids"].shape
    """

    def __init__(
        self,
        rows: Callable[[], Any],
        seq_len: int,
        tokenizer: Tokenizer,
        close: Sequence[int],
        val: bool,
    ):
        self._rows, self.seq_len, self._close, self._val = rows, seq_len, close, val
        self.vocab, self.encode, self.decode = tokenizer.vocab, tokenizer.encode, tokenizer.decode
        self._start: dict[str, Any] | None = None  # of the next pass
        self._state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """Where the next window begins."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass there."""
        self._start = self._state = state

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows, start = self._rows(), self._start
        self._start = None
        if start is not None:
            rows.load_state_dict(start["rows"])
        number, skip = (start["row"], start["token"]) if start is not None else (0, 0)
        tokens: list[int] = []  # from the beginning of the next window
        begun: deque[dict[str, Any]] = deque()  # rows of these tokens: their states, and lengths
        # a restored state is not always told before the first row
        before = rows.state_dict() if start is None else start["rows"]
        for text in rows:
            here, before, place = before, rows.state_dict(), number
            number += 1
            if (place % HELD_OUT == HELD_OUT - 1) != self._val:
                continue
            found = [*self.encode(text), *self._close]
            begun.append({"rows": here, "row": place, "token": skip, "length": len(found)})
            tokens += found[skip:]
            skip = 0
            while len(tokens) > self.seq_len:
                window = torch.tensor(tokens[: self.seq_len + 1])
                del tokens[: self.seq_len]
                self._take(begun)
                yield {"input_ids": window[:-1], "labels": window[1:]}

    def _take(self, begun: deque[dict[str, Any]]) -> None:
        """Note where a window ends. The token after it has been read: there is a row that it is
        of."""
        left = self.seq_len
        while left >= begun[0]["length"] - begun[0]["token"]:
            left -= begun[0]["length"] - begun[0]["token"]
            begun.popleft()
        begun[0]["token"] += left
        self._state = {key: begun[0][key] for key in ("rows", "row", "token")}


class _Column:
    """One column of a Hugging Face IterableDataset; a row that has none there is empty. Raises
    DataError."""

    def __init__(self, dataset: Any, column: str, patterns: Sequence[str]):
        self._dataset, self._column, self._patterns = dataset, column, [*patterns]
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[str]:
        rows = iter(self._dataset)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # each reader raises its own
                raise _unreadable(self._patterns, error) from error
            if self._column not in row:
                problem = f"is missing in a row of {self._patterns}"
                raise DataError("column", self._column, problem, "give every file that column")
            text = row[self._column]
            if text is not None and not isinstance(text, str):
                problem = f"holds {type(text).__name__} in a row of {self._patterns}"
                raise DataError("column", self._column, problem, "give rows of text")
            yield text or ""


def _unreadable(patterns: Sequence[str], error: Exception) -> DataError:
    said = " ".join(str(error).split())
    if isinstance(error, StopIteration):
        said = "there is no row"
    problem = f"cannot be read ({said})"
    return DataError("stream", [*patterns], problem, "correct that file")


def stream(
    paths: str | Sequence[str],
    seq_len: int = 256,
    split: str = "train",
    tokenizer: str | Path | None = None,
    column: str = "text",
    end: str | None = None,
) -> TokenStream:
    """Text of files in sorted order, read and tokenized during training.

    Args:
        paths: file names or patterns, all of one kind: .jsonl, .json, .parquet, .csv, .arrow or
            .txt, whose lines are rows.
        seq_len: tokens of a sample.
        split: "train" or "val", which is every 20th row.
        tokenizer: a tokenizer.json, or a directory for transformers. Default: bytes.
        column: the column with the text.
        end: a token that closes every row.

    Raises:
        DataError: no such file, column, split or token, or files of several kinds.

    Example:
        build = lambda: weft.data.stream("corpus/*.jsonl", seq_len=512, end="<|endoftext|>")
        batches = weft.data.StreamLoader(weft.data.Stream(build), batch=8, seed=0)
    """
    if seq_len < 1:
        raise DataError("seq_len", seq_len, "is not a number of tokens", "use 1 or more")
    patterns = [paths] if isinstance(paths, str) else list(paths)
    files: set[str] = set()
    for pattern in patterns:
        found = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        if not found:
            fix = "give files or patterns relative to the folder in which weft runs"
            raise DataError("stream", pattern, "no file matches", fix)
        files |= found
    kinds = {_suffix(path) for path in files}
    if len(kinds) != 1 or not kinds <= READERS.keys():
        problem = f"files end in {' and '.join(sorted(kinds))}"
        raise DataError("stream", patterns, problem, f"give files of one of {', '.join(READERS)}")
    datasets = import_extra("datasets", "stream", patterns)
    reader = READERS[kinds.pop()]
    rows = partial(
        datasets.load_dataset, reader, data_files=sorted(files), split="train", streaming=True
    )
    try:
        heads: list[dict[str, Any]] = [*islice(rows(), 100)]
    except Exception as error:
        raise _unreadable(patterns, error) from error
    texts = [row[column] for row in heads if row.get(column) is not None]
    if heads and (column not in heads[0] or not all(isinstance(text, str) for text in texts)):
        columns = [name for name, value in heads[0].items() if isinstance(value, str)]
        problem = f"is not a column of text in {sorted(files)[0]!r}"
        raise DataError("column", column, problem, nearest(column, columns))
    coder: Tokenizer = Bytes() if tokenizer is None else load_tokenizer(tokenizer)
    close = [] if end is None else coder.encode(end)
    if end is not None and len(close) != 1:
        problem, fix = "is not one token of the tokenizer", "give its end-of-text token"
        raise DataError("end", end, problem, f"leave it out, or {fix}")
    return TokenStream(
        lambda: _Column(rows(), column, patterns), seq_len, coder, close, held_out(split)
    )


def _suffix(path: str) -> str:
    """The suffix that says what a file holds."""
    suffixes = [s.lower() for s in Path(path).suffixes if s.lower() not in COMPRESSED]
    return suffixes[-1] if suffixes else "no suffix"
