"""Batches of a Stream: the same global batches on every layout, and on from any step.

Every data rank reads the whole stream, and makes tensors of its own samples alone. So the place of
a run in its data is one for all ranks, and a run goes on with another number of them.

    stream      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 17 18     a pass
    block       2 7 0 5 . 1 4 3 6                                      shuffle_buffer 8, shuffled
    batch       2 7 0 5 | 1 4 3 6                                      batch 4: two steps
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from weft.core import CheckpointError, DataError, data_rank_indices

from .data import Collate, Dataset, Loader, part_of_batch
from .sample_stream import Pass, Stream, fingerprint, if_state_fits

LOOKED_AT = 8  # items of a block, by which it is known again
AnyLoader: TypeAlias = "Loader | StreamLoader"


def shuffled_places(seed: int, number: int, block: int, size: int) -> list[int]:
    """The order in which the items of a block are taken.

    Args:
        seed: of the run.
        number: of the pass.
        block: its number in that pass.
        size: how many items it has.
    """
    return np.random.default_rng([seed, number, block]).permutation(size).tolist()


class StreamLoader(Iterator[dict[str, Tensor]]):
    """An endless iterator over this data rank's samples of a Stream, one batch per optimizer step.

    A pass is read in blocks. Each block is shuffled, by its number and the seed, and cut into
    batches; what is left of a pass is dropped, and the next pass begins. `step` is the next step:
    setting it further skips batches, setting it back reads from the beginning.

    Args:
        stream: the samples.
        batch: samples of a global batch.
        seed: seed of the order.
        shuffle_buffer: samples of a block, rounded up to whole batches. 0: the stream's own order.
        accumulate: microbatches per step, as in `weft.plan`.
        data_rank: this process's number among those with other samples: `engine.data_rank`.
        data_size: how many such processes there are: `engine.data_size`.
        start: the first step.
        position: what `position()` of the stopped run's loader was, so that it need not read all
            again.
        collate_fn: as of a Loader.

    Raises:
        CheckpointError: a position that is none.
        DataError: a pass with fewer samples than a batch.
        LayoutError: a batch that does not divide.

    Example:
        >>> stream = Stream(lambda: ({"x": float(i)} for i in range(100)))
        >>> next(StreamLoader(stream, batch=4, seed=0))["x"].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        stream: Stream,
        batch: int,
        seed: int,
        shuffle_buffer: int = 0,
        accumulate: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        start: int = 0,
        position: str | None = None,
        collate_fn: Collate | None = None,
    ):
        self.stream, self.batch, self.seed, self.step = stream, batch, seed, start
        self.mine = data_rank_indices(batch, accumulate, data_rank, data_size)
        self._collate = collate_fn
        self._buffer, self._size = shuffle_buffer, max(1, -(-shuffle_buffer // batch)) * batch
        self._restart()
        # gone to with the first batch, perhaps by another process, which needs files of its own
        self._kept = None if position is None else read_position(position, shuffle_buffer)

    def __next__(self) -> dict[str, Tensor]:
        if self._kept is not None:
            self._restore(self._kept)
        if self.step < self._taken:
            self._restart()
        while self._taken < self.step:
            self._next_items()
        items = self._next_items()
        self.step += 1
        samples = [partial(self.stream.sample, item) for item in items]
        return part_of_batch(samples, self.mine, self._collate)

    def one_pass(self, most: int) -> Iterator[dict[str, Tensor]]:
        """The first batches of the first pass, at most so many."""
        self.step = 0
        for _ in range(most):
            batch = next(self)
            if self._number > 0:
                return
            yield batch

    def epoch(self, steps: int) -> float:
        """How many passes are over."""
        return float(self._number if self._kept is None else self._kept["pass"])

    def go_on(self, position: str) -> None:
        """Stand where another loader stood, from the next batch on."""
        self._kept = read_position(position, self._buffer)

    def position(self) -> str:
        """Where the next batch is, as JSON: the same on every rank."""
        if self._kept is not None:
            return json.dumps(self._kept)
        parts = {
            "step": self._taken,
            "pass": self._number,
            "block": self._block,
            "batches": self._batches,
            "buffer": self._buffer,
            "seen": self._seen,
        }
        return json.dumps(parts | {"state": json.loads(self.stream.text_of(self._state))})

    # ---- reading ---------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Stand before the first batch."""
        self._reading: Pass | None = None
        self._items = list[Any]()
        self._taken = 0  # global batches
        self._number = 0  # of the pass
        self._block = -1  # that is being taken, of this pass
        self._batches = 0  # taken of that block
        self._seen = ""  # fingerprint of its first items
        self._state: Any = None  # of the pass, before that block

    def _restore(self, kept: dict[str, Any]) -> None:
        """Stand where another loader stood; if that was further, stay at the beginning."""
        self._kept = None
        if kept["step"] > self.step or kept["block"] < 0:
            return
        self._taken, self._number = kept["step"], kept["pass"]
        state, block = kept["state"], kept["block"]
        # a state may lack something, as that of a shuffle buffer does: then all is read again
        for where in [None] if state is None else [state, None]:
            self._block, self._seen = block - 1, ""
            with nullcontext() if where is None else if_state_fits():
                self._reading = self.stream.read(self._number, where)
                if where is None:
                    for _ in islice(self._reading, block * self._size):
                        pass
                self._read_block()
            if self._seen == kept["seen"]:
                break
        else:
            problem = "has other samples there than it had when the run was stopped"
            fix = "resume with the files and arguments of that run, or begin another one"
            raise DataError(*self.stream.name, problem, fix)
        self._items = self._items[kept["batches"] * self.batch :]
        self._batches = kept["batches"]

    def _next_items(self) -> list[Any]:
        """The items of the next global batch, in their order."""
        while len(self._items) < self.batch:
            self._read_block()
            if len(self._items) >= self.batch:
                break
            if self._block == 0:
                problem = f"a pass over {self.stream.name[1]} has fewer samples than one batch"
                raise DataError("batch", self.batch, problem, "use a smaller batch, or more data")
            self._reading, self._number, self._block = None, self._number + 1, -1
        taken, self._items = self._items[: self.batch], self._items[self.batch :]
        self._taken += 1
        self._batches += 1
        return taken

    def _read_block(self) -> None:
        """Read the next block of the pass, and shuffle it."""
        if self._reading is None:
            self._reading = self.stream.read(self._number)
        self._block, self._batches = self._block + 1, 0
        # at the beginning of a pass an iterable may have no state yet
        self._state = self._reading.state() if self._block else None
        self._items = list(islice(self._reading, self._size))
        self._seen = fingerprint(self._items[:LOOKED_AT])
        if self._buffer:
            places = shuffled_places(self.seed, self._number, self._block, len(self._items))
            self._items = [self._items[place] for place in places]


def make_loader(
    dataset: Dataset | Stream,
    batch: int,
    seed: int,
    shuffle_buffer: int = 0,
    *,
    accumulate: int = 1,
    data_rank: int = 0,
    data_size: int = 1,
    start: int = 0,
    position: str | None = None,
    collate_fn: Collate | None = None,
    group_by_length: int = 0,
) -> AnyLoader:
    """The loader of a dataset or a Stream.

    Args:
        dataset: what is read.
        batch: samples of a global batch.
        seed: seed of the order.
        shuffle_buffer: as of a StreamLoader.
        accumulate: microbatches per step.
        data_rank: this process's number among those with other samples.
        data_size: how many such processes there are.
        start: the first step.
        position: as of a StreamLoader.
        collate_fn: as of either.
        group_by_length: as of a Loader.

    Raises:
        Refusal: what the loaders raise.
    """
    place = accumulate, data_rank, data_size, start
    if isinstance(dataset, Stream):
        return StreamLoader(dataset, batch, seed, shuffle_buffer, *place, position, collate_fn)
    return Loader(dataset, batch, seed, True, *place, collate_fn, group_by_length)


def read_position(text: object, buffer: int) -> dict[str, Any]:
    """What a loader's `position()` says, of a run with this buffer. Raises CheckpointError."""
    fix = "resume from another checkpoint, which weft saved"
    try:
        kept = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        kept = None
    counts = {"step": 0, "pass": 0, "block": -1, "batches": 0, "buffer": 0}
    if (
        not isinstance(kept, dict)
        or "state" not in kept
        or type(kept.get("seen")) is not str
        or any(type(kept.get(key)) is not int or kept[key] < low for key, low in counts.items())
    ):
        raise CheckpointError("data", text, "is not a position in a stream", fix)
    if kept["buffer"] != buffer:
        problem = (
            f"the run was saved with a shuffle buffer of {kept['buffer']} samples, not {buffer}"
        )
        fix = f"resume with data.shuffle_buffer = {kept['buffer']}, or begin another run"
        raise CheckpointError("data.shuffle_buffer", buffer, problem, fix)
    return kept
