"""AsyncCheckpointer: a checkpoint is written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import (
    LocalShard,
    WeftError,
    gather_json,
)

from .writer import Retention, save_checkpoint


class AsyncCheckpointer:
    """Saves in the background: `save` returns once this rank's shards are copied to host
    memory, and a thread writes the files, one checkpoint at a time. All ranks construct it together
    and call each method together."""

    def __init__(self) -> None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        # a group of its own: its collectives do not mix with those of training
        self._group = None if alone else dist.new_group(backend="gloo")
        # name -> host copy, used again for each save: new memory would cost as much as the copy
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        folder: Path,
        step: int,
        pieces: Iterable[LocalShard],
        scalars: dict,
        meta: dict,
        keep: Retention,
        unless: Callable[[Sequence[LocalShard]], str | None] = lambda pieces: None,
    ) -> None:
        """Start to save a checkpoint. Errors are raised by `wait`, or by the next `save`.

        Args:
            folder: See `save_checkpoint`, as for the other arguments.
            step: The step's number.
            pieces: This rank's shards of the global tensors.
            scalars: JSON values that resuming needs.
            meta: JSON values for people and tools.
            keep: Which older checkpoints stay.
            unless: Gets this rank's copies and returns why they must not be saved, or None. A
                reason on any rank is raised as a WeftError on all.
        """
        self.wait()
        held = [self._copy_shard(piece) for piece in pieces]
        if any(piece.tensor.is_pinned() for piece in held if not piece.tensor.is_meta):
            torch.cuda.synchronize()

        def run() -> None:
            try:
                reason = next(filter(None, gather_json(unless(held), self._group)), None)
                if reason is not None:
                    raise WeftError(reason)
                save_checkpoint(folder, step, held, scalars, meta, keep, self._group)
            except BaseException as error:
                self._error = error

        # a daemon: when another process dies, this one ends without waiting for the save
        self._thread = threading.Thread(target=run, name="weft checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the latest checkpoint is on disk. Raises the error if its save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, limit_s: float) -> bool:
        """Wait at most so long for the latest checkpoint, where another error ends the run: its own
        errors are not raised. Returns whether none is being written any more."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def _copy_shard(self, piece: LocalShard) -> LocalShard:
        if not piece.writer or not piece.chunks:  # only the name, shape and dtype matter
            return replace(piece, tensor=torch.empty_like(piece.tensor, device="meta"))
        tensor, host = piece.tensor.detach(), self._host.get(piece.name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[piece.name] = host
        host.copy_(tensor, non_blocking=True)
        return replace(piece, tensor=host)
