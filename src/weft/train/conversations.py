"""Conversations as training samples: written out by a tokenizer's chat template, labels on the
answers alone, several packed into one window without seeing each other."""

from __future__ import annotations

import glob
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.core import DataError, import_extra
from weft.nn import IGNORED

from .data import HELD_OUT, held_out

TooLong = Literal["refuse", "cut", "drop"]
MARKED = "{% generation"  # a template that says itself which tokens are answers


@dataclass(frozen=True)
class Conversation:
    """ids: int32 [n]; answers: bool [n], which of them are of an answer."""

    ids: np.ndarray
    answers: np.ndarray


class Chat:
    """Windows of conversations: {"input_ids", "labels", "position_ids"}, int64 [seq_len] each.

    labels[t] is the token after input_ids[t] if that is part of an answer, else -100. position_ids
    begin at 0 with each conversation: attention sees no other one (transformers, and weft's models,
    read them so). What is left of a window is padding without labels.

    Args:
        conversations: their tokens.
        seq_len: tokens of a sample.
        packed: several conversations in a window; else one in each.
        padding: the token that fills the rest.
        tokenizer: of transformers, for `encode`, `decode` and `vocab`.

    Example:
        data = weft.data.chat("answers/*.jsonl", tokenizer="models/Llama-3.1-8B-Instruct")
        data.decode(data[0]["input_ids"])
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        seq_len: int,
        packed: bool,
        padding: int,
        tokenizer: Any,
    ):
        self.seq_len, self._padding, self._tokenizer = seq_len, padding, tokenizer
        self._conversations = conversations
        lengths = [len(each.ids) for each in conversations]
        self._windows = pack(lengths, seq_len) if packed else [[i] for i in range(len(lengths))]

    @property
    def vocab(self) -> int:
        """Number of tokens of the tokenizer."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode([int(i) for i in ids])

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = np.full(self.seq_len, self._padding, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        positions = np.zeros(self.seq_len, dtype=np.int64)
        start = 0
        for number in self._windows[index]:
            each = self._conversations[number]
            stop = start + len(each.ids)
            ids[start:stop] = each.ids
            positions[start:stop] = np.arange(len(each.ids))
            labels[start : stop - 1] = np.where(each.answers[1:], each.ids[1:], IGNORED)
            start = stop
        positions[start:] = np.arange(self.seq_len - start)
        entries = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(entry) for name, entry in entries.items()}


def chat(
    paths: str | Sequence[str],
    tokenizer: str | Path = "",
    seq_len: int = 2048,
    split: str = "train",
    column: str = "messages",
    packed: bool = True,
    too_long: TooLong = "refuse",
    template: str | Path | None = None,
) -> Chat:
    """Conversations for supervised fine-tuning, of which the assistant's answers count in the loss.

    Args:
        paths: JSON lines files or patterns, or a directory written by datasets' `save_to_disk`.
            Each row holds a list of {"role", "content"}, as chat templates take them.
        tokenizer: a directory that transformers can read.
        seq_len: tokens of a sample.
        split: "train" or "val", which is every 20th conversation.
        column: the key with the list.
        packed: whether a sample holds as many conversations as fit, by best fit decreasing.
        too_long: for a conversation with more tokens than `seq_len`: "refuse", "cut" or "drop".
        template: a file with the chat template. Default: the tokenizer's own.

    Raises:
        DataError: no such file, column, tokenizer or template; a row that is no conversation, or a
            conversation without an answer or too long.

    Example:
        data = weft.data.chat("answers/*.jsonl", tokenizer="models/Llama-3.1-8B-Instruct")
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if seq_len < 2:
        raise DataError("seq_len", seq_len, "holds no question and answer", "use 2 or more")
    if too_long not in ("refuse", "cut", "drop"):
        fix = 'choose "refuse", "cut" or "drop"'
        raise DataError("too_long", too_long, "is not a way to treat long conversations", fix)
    coder = _chat_tokenizer(tokenizer, template)
    val = held_out(split)
    rows = [row for pattern in patterns for row in _rows(pattern, column)]
    chosen = [r for i, r in enumerate(rows) if (i % HELD_OUT == HELD_OUT - 1) == val]
    found = [_conversation(coder, row, where, column) for where, row in chosen]
    longest = max((len(each.ids) for each in found), default=0)
    if longest > seq_len and too_long == "refuse":
        count = sum(len(each.ids) > seq_len for each in found)
        problem = f"{count} of {len(found)} conversations have more tokens, at most {longest}"
        fix = 'give a larger seq_len, or too_long = "cut" or "drop"'
        raise DataError("seq_len", seq_len, problem, fix)
    found = (
        [Conversation(e.ids[:seq_len], e.answers[:seq_len]) for e in found]
        if (too_long == "cut")
        else [e for e in found if len(e.ids) <= seq_len]
    )
    found = [each for each in found if each.answers[1:].any()]  # nothing to learn from the others
    if not found:
        fix = f"give more than {len(rows)} conversations with answers of at most seq_len tokens"
        raise DataError("chat", patterns, f"the split {split!r} holds no answer", fix)
    padding = coder.pad_token_id if coder.pad_token_id is not None else coder.eos_token_id
    return Chat(found, seq_len, packed, int(padding or 0), coder)


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Windows of at most `size`, each a list of numbers of `lengths`: the longest first, each into
    the fullest window that it fits in (best fit decreasing)."""
    windows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, window), sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[number], -1))
        if at == len(room):
            windows.append([])
            left, window = size, len(windows) - 1
        else:
            left, window = room.pop(at)
        windows[window].append(number)
        insort(room, (left - lengths[number], window))
    return windows


# ---- reading -------------------------------------------------------------------------------------


def _rows(pattern: str, column: str) -> Iterator[tuple[str, Any]]:
    """(where it is written, conversation) of each row."""
    if Path(pattern).is_dir():
        yield from _rows_on_disk(pattern, column)
        return
    files = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not files:
        fix = "give JSON lines files, patterns, or a directory written by Dataset.save_to_disk"
        raise DataError("chat", pattern, "no file matches", fix)
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{Path(file).name}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    fix = "write one JSON object on each line"
                    raise DataError("chat", where, f"is not JSON ({error})", fix) from error
                if not isinstance(row, Mapping) or column not in row:
                    keys = sorted(row) if isinstance(row, Mapping) else type(row).__name__
                    problem = f"has no {column!r} among {keys}"
                    fix = "name the key that holds the conversation: data.column"
                    raise DataError("chat", where, problem, fix)
                yield where, row[column]


def _rows_on_disk(folder: str, column: str) -> Iterator[tuple[str, Any]]:
    datasets = import_extra("datasets", "chat", folder)
    fix = "give a directory written by Dataset.save_to_disk"
    try:
        data: Any = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError) as error:
        raise DataError("chat", folder, f"cannot be read ({error})", fix) from error
    if isinstance(data, datasets.DatasetDict):
        fix = f"name the folder of one of its splits: {', '.join(sorted(data))}"
        raise DataError("chat", folder, "holds several splits", fix)
    if column not in data.column_names:
        fix = "name the column that holds the conversation: data.column"
        problem = f"has no column {column!r} among {sorted(data.column_names)}"
        raise DataError("chat", folder, problem, fix)
    for number, row in enumerate(data[column]):
        yield f"{Path(folder).name}, row {number}", row


def _chat_tokenizer(tokenizer: str | Path, template: str | Path | None) -> Any:
    fix = "name a model directory that holds its tokenizer: data.tokenizer"
    if not str(tokenizer):
        raise DataError("tokenizer", None, "a chat template needs a tokenizer", fix)
    transformers = import_extra("transformers", "tokenizer", str(tokenizer))
    try:
        coder = transformers.AutoTokenizer.from_pretrained(
            tokenizer, local_files_only=True, trust_remote_code=False
        )
        if template is not None:
            coder.chat_template = Path(template).read_text(encoding="utf-8")
    except Exception as error:  # the libraries raise bare Exception
        said = " ".join(str(error).split())
        raise DataError("tokenizer", str(tokenizer), f"cannot be read ({said})", fix) from error
    if not coder.chat_template:
        fix = "name the tokenizer of a chat model, or a file with a template: data.template"
        raise DataError("tokenizer", str(tokenizer), "has no chat template", fix)
    return coder


# ---- tokens --------------------------------------------------------------------------------------


def _conversation(coder: Any, messages: Any, where: str, column: str) -> Conversation:
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in _listed(messages)]
    if None in roles or not roles:
        problem = f"its {column} is not a list of messages with role and content"
        raise DataError("chat", where, problem, 'write [{"role": ..., "content": ...}, ...]')
    if "assistant" not in roles:
        fix = 'answers have the role "assistant"'
        raise DataError("chat", where, f"has no answer among {roles}", fix)
    try:
        if MARKED in coder.chat_template.replace("{%-", "{%"):
            return _as_marked(coder, messages)
        return _by_turns(coder, messages, roles, where)
    except DataError:
        raise
    except Exception as error:  # a template raises what it wants
        problem = f"the chat template does not take it ({error})"
        raise DataError("chat", where, problem, "correct the messages, or the template") from error


def _listed(messages: Any) -> Sequence[Any]:
    return messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ()


def _as_marked(coder: Any, messages: Any) -> Conversation:
    found = coder.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return Conversation(
        np.array(found["input_ids"], dtype=np.int32), np.array(found["assistant_masks"], dtype=bool)
    )


def _by_turns(coder: Any, messages: Any, roles: Sequence[Any], where: str) -> Conversation:
    """Each answer is what the conversation up to it has more than what asks for it."""
    whole = _written(coder, messages, False)
    answers = np.zeros(len(whole), dtype=bool)
    for turn, role in enumerate(roles):
        if role != "assistant":
            continue
        asked = _written(coder, messages[:turn], True)
        told = _written(coder, messages[: turn + 1], False)
        if told[: len(asked)] != asked or whole[: len(told)] != told:
            problem = "the template changes earlier messages when later ones follow"
            fix = "mark the answers in the template by {% generation %} ... {% endgeneration %}"
            raise DataError("chat", where, problem, fix)
        answers[len(asked) : len(told)] = True
    return Conversation(np.array(whole, dtype=np.int32), answers)


def _written(coder: Any, messages: Any, ask: bool) -> list[int]:
    found = coder.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=ask, return_dict=True
    )
    return list(found["input_ids"])
