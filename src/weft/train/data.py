"""Datasets: map-style, each sample a dict of tensors, the same at every call; and the Loader that
batches them.

`split` is "train" or "val"; a corpus without splits of its own holds out a twentieth, always the
same.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.core import DataError, data_rank_indices, import_extra, nearest

from .length_groups import grouped_by_length, sample_lengths
from .samples import noted_sample
from .tokenizer import Bytes, Tokenizer, load_tokenizer

Collate = Callable[[Sequence[dict[str, Tensor]]], dict[str, Tensor]]
HELD_OUT = 20  # every 20th file or row is validation, or the last 1/20 of each of fewer files
DEFAULT_BYTES = (
    4_000_000  # of the standard library: enough for a first run, and read in well under a second
)


class Dataset(Sized, Protocol):
    """What weft trains on: `dataset[i]` is a dict of tensors, with the same shapes for every i
    below len(dataset).

    Example:
        class Squares:
            def __len__(self):
                return 100

            def __getitem__(self, i):
                return {"x": torch.tensor([float(i)]), "target": torch.tensor([float(i * i)])}
    """

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


def held_out(split: str) -> bool:
    """Whether this split is the held-out one. Raises DataError for an unknown split."""
    if split not in ("train", "val"):
        raise DataError("split", split, "is not a split", nearest(split, ("train", "val")))
    return split == "val"


# ---- text ----------------------------------------------------------------------------------------


class Text:
    """Consecutive windows of a token stream: {"input_ids": int64 [seq_len], "labels": int64
    [seq_len]}.

    labels[t] is the token after input_ids[t]. `vocab`, `encode` and `decode` are the tokenizer's.

    Example:
        >>> data = stdlib(seq_len=32)
        >>> data.vocab, data[0]["input_ids"].shape
        (256, torch.Size([32]))
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, tokenizer: Tokenizer, field: str, source: object
    ):
        if seq_len < 1:
            raise DataError("seq_len", seq_len, "is not a number of tokens", "use 1 or more")
        if len(tokens) <= seq_len:
            problem = f"this split holds {len(tokens)} tokens, and one sample takes {seq_len + 1}"
            raise DataError(field, source, problem, "give more text or a smaller seq_len")
        self.tokens, self.seq_len = tokens, seq_len
        self.vocab, self.encode, self.decode = tokenizer.vocab, tokenizer.encode, tokenizer.decode

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return window(self.tokens, index, self.seq_len)


def window(tokens: np.ndarray, index: int, seq_len: int) -> dict[str, Tensor]:
    """Window `index` of tokens: {"input_ids", "labels"}, int64 [seq_len] each. Raises
    IndexError."""
    if not 0 <= index < (len(tokens) - 1) // seq_len:
        raise IndexError(index)
    found = torch.from_numpy(tokens[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64))
    return {"input_ids": found[:-1], "labels": found[1:]}


def stdlib(
    seq_len: int = 256,
    split: str = "train",
    max_bytes: int | None = None,
    files: Sequence[str] | None = None,
) -> Text:
    """The source of Python's standard library as bytes (vocab 256): a corpus that every machine
    has.

    Args:
        seq_len: tokens of a sample.
        split: "train" or "val".
        max_bytes: largest number of bytes to read. Default: 4 MB.
        files: patterns below the library's folder, such as "asyncio/*.py". Default: all but tests.

    Raises:
        DataError: no such split or file, or too little text.

    Example:
        >>> sorted(stdlib(seq_len=64, files=["json/*.py"])[0])
        ['input_ids', 'labels']
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            set(folders) - {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
        )
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found.sort(key=lambda path: path.relative_to(root).as_posix())
    if files is not None:
        found = [
            p
            for p in found
            if any(fnmatch(p.relative_to(root).as_posix(), pattern) for pattern in files)
        ]
    if not found:
        raise DataError(
            "files", files, "no source file of the standard library matches", 'try ["*.py"]'
        )
    limit = DEFAULT_BYTES if max_bytes is None else max_bytes
    chosen: list[np.ndarray] = []
    for path in found:
        if limit > 0:
            chosen.append(np.fromfile(path, dtype=np.uint8, count=limit))
            limit -= len(chosen[-1])
    return Text(
        np.concatenate(split_documents(chosen, split)), seq_len, Bytes(), "seq_len", seq_len
    )


def text(
    paths: str | Sequence[str],
    seq_len: int = 256,
    split: str = "train",
    tokenizer: str | Path | None = None,
) -> Text:
    """Your text files, concatenated in sorted order.

    Args:
        paths: file names or patterns (`**` matches any folders).
        seq_len: tokens of a sample.
        split: "train" or "val".
        tokenizer: a tokenizer.json, or a directory for transformers. Default: bytes.

    Raises:
        DataError: no such file, split or tokenizer, or too little text.

    Example:
        data = weft.data.text("corpus/**/*.txt", seq_len=512, tokenizer="corpus/tokenizer.json")
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    found: set[str] = set()
    for pattern in patterns:
        matches = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        if not matches:
            raise DataError(
                "text",
                pattern,
                "no file matches",
                "give files or patterns relative to the folder in which weft runs",
            )
        found |= matches
    if tokenizer is None:
        bytewise = [np.fromfile(path, dtype=np.uint8) for path in sorted(found)]
        return Text(
            np.concatenate(split_documents(bytewise, split)), seq_len, Bytes(), "text", patterns
        )
    trained = load_tokenizer(tokenizer)
    documents = (Path(path).read_text(encoding="utf-8", errors="replace") for path in sorted(found))
    tokens = [np.array(ids, dtype=np.int32) for ids in trained.encode_all(documents)]
    return Text(np.concatenate(split_documents(tokens, split)), seq_len, trained, "text", patterns)


def split_documents(documents: list[np.ndarray], split: str) -> list[np.ndarray]:
    """The documents of this split: every 20th is held out, or the end of each if there are fewer
    than 20."""
    val = held_out(split)
    if len(documents) >= HELD_OUT:
        return [d for i, d in enumerate(documents) if (i % HELD_OUT == HELD_OUT - 1) == val]
    ends = [len(d) - len(d) // HELD_OUT for d in documents]
    return [d[end:] if val else d[:end] for d, end in zip(documents, ends)]


def hf(
    path: str | Path,
    seq_len: int = 256,
    split: str = "train",
    tokenizer: str | Path | None = None,
    column: str = "text",
    end: str | None = None,
) -> Text:
    """The text column of a Hugging Face dataset on disk (`save_to_disk`), its rows concatenated.

    Args:
        path: the dataset's folder.
        seq_len: tokens of a sample.
        split: "train" or "val": the split "validation", "val" or "test" of a DatasetDict, or every
            20th row of a Dataset.
        tokenizer: a tokenizer.json, or a directory for transformers. Default: bytes.
        column: the column with the text.
        end: a token that closes every row.

    Raises:
        DataError: no such dataset, column, split or token, or too little text.

    Example:
        data = weft.data.hf("corpus/dataset", seq_len=512, tokenizer="corpus/tokenizer.json")
    """
    datasets = import_extra("datasets", "hf", str(path))
    if not Path(path).is_dir():
        raise DataError(
            "hf",
            str(path),
            "is not a directory",
            "give a directory written by Dataset.save_to_disk",
        )
    try:
        data: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        fix = "give a directory written by Dataset.save_to_disk"
        raise DataError("hf", str(path), f"cannot be read ({error})", fix) from error
    val = held_out(split)
    if isinstance(data, datasets.DatasetDict):
        names = [
            name for name in (("validation", "val", "test") if val else ("train",)) if name in data
        ]
        if not names:
            raise DataError(
                "hf",
                str(path),
                f"has no split for {split!r} among {sorted(data)}",
                f"name one {split!r}",
            )
        data = data[names[0]]
    else:
        data = data.select([i for i in range(len(data)) if (i % HELD_OUT == HELD_OUT - 1) == val])
    columns = [name for name, kind in data.features.items() if kind == datasets.Value("string")]
    if column not in columns:
        raise DataError(
            "column", column, f"is not a column of text in {str(path)!r}", nearest(column, columns)
        )
    coder: Tokenizer = Bytes() if tokenizer is None else load_tokenizer(tokenizer)
    close = [] if end is None else coder.encode(end)
    if end is not None and len(close) != 1:
        raise DataError(
            "end",
            end,
            "is not one token of the tokenizer",
            "leave it out, or give its end-of-text token",
        )
    rows = (row for some in data.select_columns(column).iter(1024) for row in some[column])
    tokens = [np.array(ids + close, dtype=np.int32) for ids in coder.encode_all(rows)]
    return Text(np.concatenate(tokens or [np.empty(0, np.int32)]), seq_len, coder, "hf", str(path))


# ---- images --------------------------------------------------------------------------------------

# A shape is a region of the plane around its centre, where u points right, v down, and the radius
# is 1.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) <= 0.85,
    "triangle": lambda u, v: (v <= 0.8) & (2 * abs(u) - 1 <= v),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) <= 0.3) & (np.maximum(abs(u), abs(v)) <= 1),
    "diamond": lambda u, v: abs(u) + abs(v) <= 1,
    "ring": lambda u, v: (u**2 + v**2 <= 1) & (u**2 + v**2 >= 0.4),
}


class Images:
    """Images and their classes: {"image": float32 [channels, h, w], "label": int64 []}.
    `names[label]` is the name of a class.

    Example:
        >>> data = shapes(size=10)
        >>> data[0]["image"].shape, len(data.names)
        (torch.Size([1, 16, 16]), 4)
    """

    def __init__(self, images: Tensor, labels: Tensor, names: tuple[str, ...]):
        self.images, self.labels, self.names = images, labels, names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def shapes(
    size: int = 2000,
    image: int = 16,
    classes: int = 4,
    noise: float = 0.3,
    split: str = "train",
    seed: int = 0,
) -> Images:
    """Pictures of circles, squares, triangles, crosses ..., at random places and in random sizes.

    Args:
        size: number of pictures.
        image: side in pixels. A shape is 1, its background 0.
        classes: number of different shapes.
        noise: standard deviation of the Gaussian noise on top.
        split: "train" or "val".
        seed: seed of the pictures.

    Raises:
        DataError: no such split, or sizes that cannot be.

    Example:
        >>> shapes(size=10, image=8).images.shape
        torch.Size([10, 1, 8, 8])
    """
    if not 2 <= classes <= len(SHAPES):
        raise DataError(
            "classes", classes, f"there are {len(SHAPES)} shapes", f"use 2 to {len(SHAPES)}"
        )
    if image < 8:
        raise DataError(
            "image", image, "shapes cannot be told apart on so few pixels", "use 8 or more"
        )
    random = np.random.default_rng([seed, int(held_out(split))])
    names = tuple(SHAPES)[:classes]
    labels = random.integers(classes, size=size)
    radius = random.uniform(image / 5, image / 3, size=(size, 1, 1))
    column, row = random.uniform(radius, image - 1 - radius, size=(2, size, 1, 1))
    grid = np.arange(image)
    u, v = (grid[None, None, :] - column) / radius, (grid[None, :, None] - row) / radius
    pixels = random.normal(0, noise, size=(size, image, image)).astype(np.float32)
    for label, name in enumerate(names):
        pixels[labels == label] += SHAPES[name](u[labels == label], v[labels == label])
    return Images(torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(labels), names)


# ---- no data -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoDataset:
    """In place of a dataset that another process reads: `size` samples of nothing."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {}


# ---- batches -------------------------------------------------------------------------------------


class Loader(Iterator[dict[str, Tensor]]):
    """An endless iterator over this data rank's samples, one stacked batch per optimizer step.

    Step k takes the global samples k * batch up to (k + 1) * batch, epoch after epoch; the rest of
    an epoch is dropped. The order of an epoch depends only on `seed` and its number, so it is the
    same on every layout, and a resumed run continues where it stopped. The loader reads this
    rank's samples alone. `step` is the next step.

    Args:
        dataset: a map-style dataset of dicts of tensors.
        batch: samples of a global batch.
        seed: seed of the order.
        shuffle: whether to shuffle each epoch.
        accumulate: microbatches per step, as in `weft.plan`.
        data_rank: this process's number among those with other samples: `engine.data_rank`.
        data_size: how many such processes there are: `engine.data_size`.
        start: the first step.
        collate_fn: makes a global batch of a list of samples. Default: this rank's samples are
            stacked.
        group_by_length: batches whose samples are sorted by length together, so that each has
            samples of like length. 0: none.

    Raises:
        DataError: fewer samples than a batch, or `lengths` of a dataset that are none.
        LayoutError: a batch that does not divide.

    Example:
        >>> next(Loader(stdlib(seq_len=32), batch=8, seed=0))["input_ids"].shape
        torch.Size([8, 32])
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        seed: int,
        shuffle: bool = True,
        accumulate: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        start: int = 0,
        collate_fn: Collate | None = None,
        group_by_length: int = 0,
    ):
        if len(dataset) < batch:
            problem = f"the dataset has {len(dataset)} samples, fewer than one batch"
            raise DataError(
                "batch", batch, problem, f"use a batch of at most {len(dataset)}, or more data"
            )
        self.dataset, self.batch, self.seed, self.shuffle = dataset, batch, seed, shuffle
        self.mine = data_rank_indices(batch, accumulate, data_rank, data_size)
        self.steps_per_epoch = len(dataset) // batch
        self.step = start
        self._collate, self._pool = collate_fn, group_by_length
        self._lengths = sample_lengths(dataset) if group_by_length else None
        self._order = (-1, np.empty(0, np.int64))  # the epoch, and its order

    def indices(self, step: int) -> list[int]:
        """The samples of the whole global batch of this step, over all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            random, size = np.random.default_rng([self.seed, epoch]), len(self.dataset)
            order = random.permutation(size) if self.shuffle else np.arange(size)
            if self._lengths is not None:
                order = grouped_by_length(order, self._lengths, self.batch, self._pool, random)
            self._order = epoch, order
        return self._order[1][place * self.batch : (place + 1) * self.batch].tolist()

    def one_pass(self, most: int) -> Iterator[dict[str, Tensor]]:
        """The first batches of the first epoch, at most so many."""
        self.step = 0
        for _ in range(min(most, self.steps_per_epoch)):
            yield next(self)

    def epoch(self, steps: int) -> float:
        """How many epochs so many steps are."""
        return steps / self.steps_per_epoch

    def position(self) -> None:
        """Nothing: a step says where the next batch is."""

    def __next__(self) -> dict[str, Tensor]:
        whole = self.indices(self.step)
        self.step += 1
        return part_of_batch(
            [partial(noted_sample, self.dataset, i) for i in whole], self.mine, self._collate
        )


def part_of_batch(
    samples: Sequence[Callable[[], dict[str, Tensor]]], mine: Sequence[int], own: Collate | None
) -> dict[str, Tensor]:
    """A rank's samples of a global batch, which calls give. A function of the user's makes the
    whole batch, so that its padding is the same on every layout."""
    if own is None:
        return collate([samples[index]() for index in mine])
    whole = own([sample() for sample in samples])
    return {key: value[torch.tensor(mine)] for key, value in whole.items()}


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples key by key along a new first dim. Raises DataError if keys or shapes differ.

    Example:
        >>> collate([{"x": torch.zeros(3)}, {"x": torch.ones(3)}])["x"].shape
        torch.Size([2, 3])
    """
    first = samples[0]
    fix = "give every sample the same keys and shapes, or name a function that pads in data.collate"
    for sample in samples:
        if not isinstance(sample, Mapping):
            problem = f"is of type {type(sample).__name__}, and others are dicts of tensors"
            raise DataError("data", "a sample", problem, fix)
        for key in first.keys() | sample.keys():
            shapes = [
                list(s[key].shape) if isinstance(s.get(key), Tensor) else None
                for s in (first, sample)
            ]
            if shapes[0] is None or shapes[0] != shapes[1]:
                problem = f"one sample has shape {shapes[0]}, another {shapes[1]} (None: no tensor)"
                raise DataError("data", key, problem, fix)
    return {key: torch.stack([sample[key] for sample in samples]) for key in first}
