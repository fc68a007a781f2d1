"""Samples that are read one after the other, of an iterable: a generator, a Hugging Face
IterableDataset, a StatefulDataLoader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from weft.core import ConfigError, DataError, Refusal, told_fault

from .samples import as_entries, read_sample


class Stream:
    """An iterable as weft reads it: anew for every pass, by a call of `open`.

    What the iterable offers is used: `set_epoch(n)`, called with the number of the pass before it
    is read; `state_dict()` and `load_state_dict(state)`, so that a resumed run need not read again
    what it has read. All else is asked of the iterable itself.

    Args:
        open: returns the iterable, which gives the same samples each time.
        entries: the names of the items of a sample that is no dict.
        name: what errors call it: a key of the run file and its value.
        sample: makes a dict of tensors of an item, in place of `entries`.

    Example:
        rows = lambda: load_dataset("json", data_files=..., split="train", streaming=True)
        stream = weft.data.Stream(rows)
        batches = weft.data.StreamLoader(stream, batch=8, seed=0, shuffle_buffer=1000)
    """

    def __init__(
        self,
        open: Callable[[], Any],
        entries: Sequence[str] | None = None,
        name: tuple[str, object] = ("data", "an iterable"),
        sample: Callable[[Any], dict[str, Tensor]] | None = None,
    ):
        self._open, self.name = open, name
        self._sample = sample or partial(as_entries, entries=entries)
        self._source = open()
        self._first: list[Any] = []
        source = self._source
        if isinstance(source, DataLoader) and source.batch_size is not None:
            problem = f"returns batches of {source.batch_size}, and weft makes batches itself"
            raise DataError(*name, problem, "make that DataLoader with batch_size=None")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a process that unpickles this has no iterable yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def size(self) -> int | None:
        """Samples of a pass, where the iterable says that."""
        try:
            return len(self._source)
        except TypeError:
            return None

    def first(self, count: int) -> list[Any]:
        """The first items of a pass, at most so many."""
        if len(self._first) < count:
            with self._reading():
                self._first = list(islice(self.read(0), count))
        return self._first[:count]

    def read(self, number: int, state: Any = None) -> Pass:
        """The pass of this number, from its beginning or from where it had this `state`."""
        return Pass(self._open(), number, state)

    def sample(self, item: Any) -> dict[str, Tensor]:
        """An item of the iterable as a dict of tensors. Raises DataError."""
        return self._sample(item)

    def check(self, batch: int, split: str) -> None:
        """Refuse an iterable with fewer samples than a batch, or other ones when it is read again.
        Raises ConfigError, DataError."""
        found = self.first(batch)
        if not found:
            raise DataError(
                *self.name, "gives no sample", "name files or an iterable that has some"
            )
        if len(found) < batch:
            problem = f"the split {split!r} has {len(found)} samples, fewer than one batch"
            raise DataError(
                "train.batch", batch, problem, f"use at most {len(found)}, or more data"
            )
        with self._reading():
            again = self.read(0)
            twice = [*islice(again, batch)]
        if fingerprint(twice) != fingerprint(found):
            problem = "gives other samples when it is read again, as each rank does"
            raise ConfigError(*self.name, problem, "give its random choices a seed")
        self.text_of(again.state())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """The first samples are read. Raises DataError before any process starts; a rank may find
        them when it begins anew."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:  # a user's code may fail in any way
            if dist.is_initialized():
                raise
            problem = f"its first samples cannot be read: {told_fault(error)}"
            raise DataError(*self.name, problem, "correct that code, or the data") from error

    def text_of(self, state: Any) -> str:
        """A state as JSON, which checkpoints hold. Raises ConfigError."""
        try:
            text = json.dumps(state)
            if json.loads(text) == state:
                return text
            problem = "has a state_dict that JSON does not give back as it was"
        except (TypeError, ValueError) as error:
            problem = f"has a state_dict that JSON does not hold ({error})"
        fix = "make it of dicts with text keys, lists, numbers and texts"
        raise ConfigError(*self.name, problem, fix)


class Pass(Iterator[Any]):
    """One pass over an iterable, and where it stands."""

    def __init__(self, source: Any, number: int, state: Any):
        self._source = source
        if hasattr(source, "set_epoch"):
            source.set_epoch(number)
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        if state is not None and self._stateful:
            source.load_state_dict(state)
        self._items = iter(source)

    def state(self) -> Any:
        """What `Stream.read` goes on from; None if it cannot."""
        return self._source.state_dict() if self._stateful else None

    def __next__(self) -> Any:
        return next(self._items)


@contextmanager
def if_state_fits() -> Iterator[None]:
    """In this context an iterable is read on from a state that may be another iterable's: what it
    raises says that it is. Reading from the beginning then shows what else is wrong."""
    try:
        yield
    except Refusal:
        raise
    except Exception:
        return


def first_samples(dataset: Any, count: int) -> list[dict[str, Tensor]]:
    """The first samples of a dataset or a Stream, at most so many. Raises DataError."""
    if not isinstance(dataset, Stream):
        if not len(dataset):
            fix = "use a dataset with samples"
            raise DataError("data", type(dataset).__name__, "has no sample", fix)
        return [read_sample(dataset, index) for index in range(min(count, len(dataset)))]
    found = [dataset.sample(item) for item in dataset.first(count)]
    if not found:
        raise DataError(*dataset.name, "gives no sample", "name files or an iterable that has some")
    return found


def fingerprint(items: Sequence[Any]) -> str:
    """The same for equal items, whatever they are made of; of unknown types it sees the type."""
    found = hashlib.blake2b(digest_size=8)

    def add(item: Any) -> None:
        if isinstance(item, Mapping):
            found.update(b"{%d" % len(item))
            for key in item:
                add((key, item[key]))
        elif isinstance(item, list | tuple):
            found.update(b"[%d" % len(item))
            for each in item:
                add(each)
        elif isinstance(item, Tensor | np.ndarray | np.generic):
            array = torch.as_tensor(item).detach().cpu()
            found.update(f"{array.dtype}{tuple(array.shape)}".encode())
            found.update(array.reshape(-1).contiguous().view(torch.uint8).numpy())
        else:
            plain = isinstance(item, str | bytes | int | float | None)
            found.update(f"{type(item).__name__} {item if plain else ''}|".encode())

    add(list(items))
    return found.hexdigest()
