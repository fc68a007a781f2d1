"""The whole batches of a run, read from its dataset sample by sample; and the laws of their order.

Which samples a step has is the loader's choice. That it is a shuffle can be seen: an epoch has
every sample once, the next has them in another order, and no step has too few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

MOST = 1_000_000  # samples whose order is looked at


def division_faults(parts: Sequence[Sequence[int]], batch: int) -> list[str]:
    """What is wrong with the samples that each replica takes of a global batch: every one is one
    replica's."""
    counts = Counter(sample for part in parts for sample in part)
    wrong = [n for n in sorted({*range(batch), *counts}) if counts[n] != (n < batch)]
    return [f"sample {n} of a batch is taken {counts[n]} times" for n in wrong[:1]]


class Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def whole_batch_of(
    dataset: Samples,
    indices: Sequence[int],
    collate: Callable[[list[Any]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """These samples, in this order, along a new dim 0, or as the run's own `collate` has them."""
    samples = [dataset[index] for index in indices]
    if collate is not None:
        return collate(samples)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def streamed_batch_of(
    read: Callable[[int], Iterable[Any]],
    step: int,
    batch: int,
    buffer: int,
    places: Callable[[int, int, int], Sequence[int]],
) -> list[Any]:
    """The items of a step's global batch, of all that is read up to it.

    Args:
        read: gives the items of a pass by its number.
        step: the step, counted from 0.
        batch: samples of a global batch.
        buffer: how many samples are shuffled together, in whole batches; 0: none.
        places: the order of a block: of its pass, its number in that, and its size.
    """
    number = 0
    while True:
        waiting, blocks, items = list[Any](), 0, iter(read(number))
        while True:
            block = list(islice(items, max(1, math.ceil(buffer / batch)) * batch))
            if buffer:
                block = [block[place] for place in places(number, blocks, len(block))]
            waiting, blocks = waiting + block, blocks + 1
            while len(waiting) >= batch:
                if step == 0:
                    return waiting[:batch]
                waiting, step = waiting[batch:], step - 1
            if not block:
                break
        number += 1


def place_faults(places: Callable[[int, int, int], Sequence[int]], seed: int) -> list[str]:
    """What is wrong with the orders of blocks of a stream, by pass, block and size."""
    found, blocks = list[str](), [(number, block) for number in range(2) for block in range(2)]
    for size in (1, 7, 64):
        if any(sorted(places(*block, size)) != list(range(size)) for block in blocks):
            found.append(f"the order of {size} samples of a stream has not each of them once")
    if any([*places(*block, 64)] != _shuffled([seed, *block], 64) for block in blocks):
        found.append("a block of a stream has another order than that of its seed and numbers")
    orders = {tuple(places(*block, 64)) for block in blocks}
    if len(orders) < len(blocks):
        found.append("two blocks of a stream have the same order")
    if tuple(range(64)) in orders:
        found.append("a block of a stream is not shuffled")
    return found


def lengths_of(dataset: Samples) -> list[float]:
    """How long each sample is: as the dataset says, or how many elements it has."""
    said = getattr(dataset, "lengths", None)
    if said is not None:
        return [float(length) for length in said]
    samples = (dataset[index] for index in range(len(dataset)))
    return [float(sum(value.numel() for value in sample.values())) for sample in samples]


def batches_of_like_length(
    shuffled: Sequence[int], lengths: Sequence[float], batch: int, pool: int
) -> list[list[int]]:
    """The batches of an epoch, in no order: of each `pool` batches that come together in the
    shuffled order, the shortest samples make one, the next shortest another."""
    found, left = list[list[int]](), [*shuffled[: len(shuffled) // batch * batch]]
    while left:
        together, left = left[: pool * batch], left[pool * batch :]
        # of equal lengths those that come first are the shortest
        together = sorted(together, key=lambda sample: lengths[sample])
        found += [together[first : first + batch] for first in range(0, len(together), batch)]
    return found


def grouping_faults(
    indices: Callable[[int], Sequence[int]],
    shuffled: Callable[[int], Sequence[int]],
    lengths: Sequence[float],
    batch: int,
    pool: int,
) -> list[str]:
    """What is wrong with batches of samples of like length, in the first two epochs; of many
    samples, in the first pools of each.

    Args:
        indices: of the samples of a step's global batch.
        shuffled: those that it would have if lengths did not count.
        lengths: of each sample.
        batch: samples of a global batch.
        pool: how many batches are sorted together.
    """
    found, whole = list[str](), len(lengths) // batch
    for epoch in range(2):
        steps = range(epoch * whole, (epoch + 1) * whole)
        order = [sample for step in steps for sample in shuffled(step)]
        wanted = batches_of_like_length(order, lengths, batch, pool)
        made = [[*indices(step)] for step in steps]
        if sorted(map(sorted, made)) != sorted(map(sorted, wanted)):
            found.append(f"epoch {epoch} has other batches than those of like length")
        longest = [max(lengths[sample] for sample in one) for one in made]
        in_order = len({*longest}) > 10 and longest in (sorted(longest), sorted(longest)[::-1])
        if in_order or (whole > 20 and [*map(sorted, made)] == [*map(sorted, wanted)]):
            found.append(f"the batches of epoch {epoch} are not shuffled")
    return found


def _shuffled(of: Sequence[int], samples: int) -> list[int]:
    """A shuffled order: numpy's permutation from the seed and the numbers that it is `of`."""
    order: list[int] = np.random.default_rng(of).permutation(samples).tolist()
    return order


def order_faults(
    indices: Callable[[int], Sequence[int]],
    samples: int,
    batch: int,
    shuffled: bool = True,
    seed: int | None = None,
) -> list[str]:
    """What is wrong with the order of samples in the first three epochs.

    Args:
        indices: of the samples of a step's global batch.
        samples: how many the dataset has.
        batch: samples of a global batch.
        shuffled: whether each epoch has an order of its own.
        seed: of which that follows; None: of anything.
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
        if seed is not None and order != _shuffled([seed, epoch], samples)[: len(order)]:
            found.append(f"epoch {epoch} has another order than that of its seed and number")
        epochs.append(order)
    if shuffled and batch * steps > 20:  # 20! orders: none comes twice by chance
        if any(one == other for one, other in pairwise(epochs)):
            found.append("two epochs have the same order")
        if any(order == sorted(order) for order in epochs):
            found.append("an epoch is not shuffled")
    return found
