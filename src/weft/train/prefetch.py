"""Batches made ahead of the step that takes them, by processes of their own."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from weft._torch.data_workers import hide_worker_info
from weft.core import Refusal, WeftError
from weft.launch import follow_parent

from .stream_loader import AnyLoader, StreamLoader

AHEAD = 2  # batches that each process makes ahead
OUTLIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by processes that read


@contextmanager
def prefetched(
    loader: AnyLoader, workers: int, ahead: int | None, pinned: bool
) -> Iterator[AnyLoader | Prefetcher]:
    """The loader itself without `workers`, else one that gives the same batches; its processes end
    with the context.

    Args:
        loader: makes the batches.
        workers: how many processes.
        ahead: batches that each makes ahead. Default: 2.
        pinned: whether batches come in pinned memory.
    """
    if workers == 0:
        yield loader
        return
    made = Prefetcher(loader, workers, ahead or AHEAD, pinned)
    try:
        yield made
    finally:
        made.close()


class Prefetcher(Iterator[dict[str, Tensor]]):
    """A loader's batches, in its order. Of N processes, the one with number i makes the batches
    i, i + N, ... after the first.

    Each process has a copy of the loader. The position of a batch comes with it, so that a
    checkpoint holds where the training is, and not how far the processes are.
    """

    def __init__(self, loader: AnyLoader, workers: int, ahead: int, pinned: bool):
        self._loader, self.step = loader, loader.step
        self._workers, self._ahead, self._pinned = workers, ahead, pinned
        self._batches: Any = None  # started with the first batch
        self._next = -1  # the step of the next one
        self._position = loader.position()

    def __next__(self) -> dict[str, Tensor]:
        if self.step != self._next:
            self._start()
        try:
            found = next(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # of a process that is gone: torch says so, or what it has sent cannot be fetched
            said = " ".join(str(error).split())
            if "Caught" in said or (type(error) is RuntimeError and "exited unexp" not in said):
                raise
            raise WeftError(
                f"a process of data.workers died ({said}). It may have been out of memory: try"
                " fewer data.workers, or a smaller data.prefetch"
            ) from None
        if isinstance(found, Refusal):
            raise found
        batch, self._position = found
        self.step = self._next = self.step + 1
        return batch

    def epoch(self, steps: int) -> float:
        """How many epochs so many steps are; of a stream, how many passes are over."""
        self._follow()
        return self._loader.epoch(steps)

    def position(self) -> str | None:
        """Where the next batch is, as of the loader."""
        return self._position

    def _follow(self) -> None:
        """Have this process's loader stand where the training is: new processes begin there."""
        if isinstance(self._loader, StreamLoader) and self._position is not None:
            self._loader.go_on(self._position)

    def close(self) -> None:
        """End the processes."""
        self._batches, self._next = None, -1

    def _start(self) -> None:
        """Start the processes anew, at `step`."""
        self.close()
        self._follow()
        self._loader.step = self._next = self.step
        made = DataLoader(
            _MadeAhead(self._loader),
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=self._ahead,
            pin_memory=self._pinned,
            multiprocessing_context=_readers(),
            worker_init_fn=partial(_outlive_signals, os.getpid()),
            # its seed would be drawn from this process's random numbers else
            generator=torch.Generator().manual_seed(self.step),
        )
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        # a process begins with the mask of this thread, and holds these back until it ignores them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTLIVED)
        try:
            self._batches = iter(made)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if main:  # torch's own raises where a process dies, in the middle of any line of this one
            signal.signal(signal.SIGCHLD, handler)


class _MadeAhead(IterableDataset):
    """What a process makes: (batch, position of the next one), or the Refusal that ends it."""

    def __init__(self, loader: AnyLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        info, loader = get_worker_info(), self._loader
        assert info is not None
        hide_worker_info()  # each of them reads all there is, and makes batches of its steps
        loader.step += info.id
        while True:
            try:
                batch = next(loader)
            except Refusal as refusal:
                yield refusal
                return
            yield batch, loader.position()
            loader.step += info.num_workers - 1


class _Reader(multiprocessing.Process):
    """A process that ignores SIGTERM."""

    def terminate(self) -> None:
        """What torch calls of a process that does not end when it is told to."""
        self.kill()


def _readers() -> BaseContext:
    """How processes are started, but that each is a _Reader."""
    context = copy.copy(multiprocessing.get_context())
    context.Process = _Reader  # type: ignore[misc]
    return context


def _outlive_signals(parent: int, worker: int) -> None:
    """A process that reads ends with the one that trains, and not by a signal that stops the run:
    SLURM sends it to all processes of a job, and a batch more is read before the run stops."""
    for number in OUTLIVED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTLIVED)
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
