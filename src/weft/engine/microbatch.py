"""MicroBatch: the samples that one forward runs, split into what the model and the loss get."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from weft.core import ConfigError

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class SequenceInfo:
    """The whole sequences [samples, positions] of a microbatch whose ranks share each sequence.

    Args:
        length: positions of a whole sequence; 0 where each rank has whole sequences.
        wholes: integer arguments of the model, such as position_ids, for all positions, by name.
        documents: the document of each position, as transformers derives it from position_ids.
        valid: false where a position is padding. None: no position is.
        parted: arguments of the model of which a rank has its positions.
    """

    length: int = 0
    wholes: Mapping[str, Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    valid: Tensor | None = None
    parted: tuple[str, ...] = ()

    def rows(self, start: int, stop: int) -> SequenceInfo:
        """The same of the samples `start` to `stop`."""
        return replace(
            self,
            wholes={key: whole[start:stop] for key, whole in self.wholes.items()},
            documents=None if self.documents is None else self.documents[start:stop],
            valid=None if self.valid is None else self.valid[start:stop],
        )


@dataclass(frozen=True)
class MicroBatch:
    """Samples as one rank runs them: with context parallelism, its positions of each.

    Args:
        batch: what the loss gets: entries [samples, ...], labels included.
        arguments: what the model is called with.
        sequence: what is known of positions that other ranks have.

    Example:
        whole = MicroBatch(batch, model_arguments(inputs, batch))
        micros = whole.split(size=2, count=4)
    """

    batch: Batch
    arguments: dict[str, Any]
    sequence: SequenceInfo = field(default_factory=SequenceInfo)

    def split(self, size: int, count: int) -> list[MicroBatch]:
        """`count` microbatches of `size` samples each; their tensors are views."""

        def rows(entries: dict[str, Any], start: int) -> dict[str, Any]:
            return {
                key: value[start : start + size] if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }

        return [
            MicroBatch(
                rows(self.batch, start),
                rows(self.arguments, start),
                self.sequence.rows(start, start + size),
            )
            for start in range(0, count * size, size)
        ]

    @property
    def signature(self) -> Hashable:
        """Names, shapes and dtypes, which determine the shapes of the activations."""
        entries = {**self.batch, **self.arguments}
        return tuple(
            (key, tuple(value.shape), value.dtype)
            for key, value in sorted(entries.items())
            if isinstance(value, Tensor)
        )


def check_batch(batch: Batch, want: int, whole: int) -> None:
    """Refuse a batch that is not this rank's part of the global batch.

    Args:
        batch: entries [samples, ...].
        want: samples of this rank's part.
        whole: samples of the global batch.

    Raises:
        ConfigError: an entry has another number of samples.
    """
    for key, value in batch.items():
        if value.shape[0] != want:
            hint = (
                "take this rank's part with engine.local(batch)"
                if value.shape[0] == whole
                else f"give {want}"
            )
            raise ConfigError(
                f"batch[{key!r}]", tuple(value.shape), f"this rank's part is {want} samples", hint
            )
