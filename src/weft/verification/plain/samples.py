"""The whole batches of a run, read from its dataset sample by sample; and the laws of their order.

Which samples a step has is the loader's choice. That it is a shuffle can be seen: an epoch has
every sample once, the next has them in another order, and no step has too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

MOST = 1_000_000  # samples whose order is looked at


class Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def whole_batch_of(dataset: Samples, indices: Sequence[int]) -> dict[str, Tensor]:
    """These samples, in this order, along a new dim 0."""
    samples = [dataset[index] for index in indices]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def order_faults(
    indices: Callable[[int], Sequence[int]], samples: int, batch: int, shuffled: bool = True
) -> list[str]:
    """What is wrong with the order of samples in the first three epochs.

    Args:
        indices: of the samples of a step's global batch.
        samples: how many the dataset has.
        batch: samples of a global batch.
        shuffled: whether each epoch has an order of its own.
    """
    found, steps = list[str](), max(1, min(samples, MOST) // batch)
    whole = samples // batch  # steps of an epoch; what is left over is in none
    epochs = list[list[int]]()
    for epoch in range(3):
        order = list[int]()
        for step in range(epoch * whole, epoch * whole + steps):
            one = list(indices(step))
            if len(one) != batch:
                found.append(f"step {step} has {len(one)} samples, not {batch}")
            order += one
        if any(not 0 <= index < samples for index in order):
            found.append(f"epoch {epoch} has a sample that the dataset does not have")
        if len(set(order)) != len(order):
            found.append(f"epoch {epoch} has a sample twice")
        epochs.append(order)
    if shuffled and batch * steps > 20:  # 20! orders: none comes twice by chance
        if any(one == other for one, other in pairwise(epochs)):
            found.append("two epochs have the same order")
        if any(order == sorted(order) for order in epochs):
            found.append("an epoch is not shuffled")
    return found
