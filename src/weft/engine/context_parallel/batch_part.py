"""This rank's part of a batch, and what every rank knows of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.nn import PositionNumbers, check_padding, documents_of, model_arguments

from ..microbatch import Batch, MicroBatch, SequenceInfo


def part_of_batch(
    batch: Batch,
    inputs: tuple[str, ...],
    names: Sequence[str],
    numbers: PositionNumbers,
    length: int,
    mine: Tensor,
) -> MicroBatch:
    """The part of every entry [b, length, ...]. Others, as images, stay whole.

    Args:
        batch: of whole sequences.
        inputs: entries that the model gets.
        names: what its forward can be given.
        numbers: what counts positions.
        length: of a whole sequence.
        mine: positions of this rank, int64 [positions here].
    """
    arguments = model_arguments(inputs, batch)
    first = next(value for value in batch.values() if value.ndim > 1 and value.shape[1] == length)
    samples, device = first.shape[0], first.device

    def has_positions(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length

    given = {key: batch[key] for key in inputs if key in batch}
    positions, padding = given.get("position_ids"), given.get("attention_mask")
    documents = None
    # where an image enters, or the like, a model may number its tokens otherwise
    counted = "position_ids" in names and all(
        has_positions(value)
        for value in arguments.values()
        if isinstance(value, Tensor) and value.ndim > 1
    )
    if padding is not None:
        check_padding(padding)
    elif "attention_mask" in names and (counted or positions is not None):
        # transformers would else take a jump of position_ids for the beginning of a document
        ones = torch.ones(samples, length, dtype=torch.long, device=device)
        arguments["attention_mask"] = given["attention_mask"] = ones
        documents = documents_of(positions) if positions is not None else None
        if documents is not None:
            documents = documents.expand(samples, length)
    if positions is None and counted:
        found = numbers(samples, length, device, given.get("input_ids"))
        arguments["position_ids"] = given["position_ids"] = found
    for name in names if counted else ():  # of another input, as decoder_position_ids
        ids = given.get(f"{name.removesuffix('position_ids')}input_ids")
        if not name.endswith("position_ids") or name in given or ids is None:
            continue
        if ids.shape == (samples, length):
            arguments[name] = given[name] = numbers(samples, length, device, ids)
    wholes = {
        key: value
        for key, value in given.items()
        if value.shape[:2] == (samples, length) and not value.is_floating_point()
    }
    valid = padding.bool() if padding is not None else None
    if valid is not None and bool(valid.all()):
        valid = None

    def part(entries: dict[str, Any]) -> dict[str, Any]:
        return {key: share(value) for key, value in entries.items()}

    def share(value: Any) -> Any:
        return value[:, mine] if has_positions(value) else value

    parted = tuple(key for key, value in arguments.items() if has_positions(value))
    info = SequenceInfo(length, wholes, documents, valid, parted)
    return MicroBatch(part(batch), part(arguments), info)
