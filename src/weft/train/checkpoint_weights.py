"""The tensors that an export reads from a checkpoint: as they are, or with an adapter merged into
them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.checkpoint import CheckpointIndex, CheckpointReader
from weft.core import ConfigError
from weft.engine import averaged_name
from weft.nn import merged_sources, merged_weight
from weft.parallel import weights_of


class CheckpointWeights:
    """The tensors of a checkpoint, by name; `averaged`: of weights their averages."""

    def __init__(
        self,
        reader: CheckpointReader,
        contents: CheckpointIndex,
        dtype: torch.dtype | None,
        averaged: bool = False,
    ):
        self.step = contents.step
        self._reader, self._contents, self._dtype = reader, contents, dtype
        self._averaged = averaged

    def _stored(self, name: str) -> str:
        """What is read for a tensor: its average, where that is wanted and there is one."""
        average = averaged_name(name)
        return average if self._averaged and average in self._contents.tensors else name

    def nbytes(self, name: str) -> int | None:
        """Its bytes in the checkpoint; None: it is not there."""
        stored = self._contents.tensors.get(self._stored(name))
        if stored is None:
            return None
        return torch.Size(stored.shape).numel() * stored.dtype.itemsize

    def read(self, name: str, cast: bool = True) -> Tensor:
        """The tensor, in the dtype that was chosen if `cast`."""
        found = self._reader.read_tensor(self._stored(name))
        return self.cast(found) if cast else found

    def cast(self, tensor: Tensor) -> Tensor:
        """Tensors of real numbers in the dtype that was chosen."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)


class MergedWeights:
    """The tensors of the model without its adapter, with that merged into them."""

    def __init__(self, weights: CheckpointWeights, model: nn.Module, adapted: nn.Module):
        self.step = weights.step
        self._weights, self._adapted = weights, adapted
        tied = {alias: w.name for w in weights_of(model) for alias in (w.name, *w.aliases)}
        several = {name for name in tied.values() if [*tied.values()].count(name) > 1}
        for alias, name in tied.items():
            if name in several and merged_sources(adapted, alias)[0]:
                problem = f"{alias} is tied to {name}, and the adapter changes one of them"
                raise ConfigError("--merge", "", problem, "export the adapter by itself")

    def nbytes(self, name: str) -> int | None:
        """Bytes of what it is made of; None: that is not there."""
        parts = [self._weights.nbytes(each) for each in merged_sources(self._adapted, name)[1]]
        return sum(n for n in parts if n is not None) if None not in parts else None

    def read(self, name: str) -> Tensor:
        """The tensor, merged before it is cast."""
        module, parts = merged_sources(self._adapted, name)
        if not module:
            return self._weights.read(parts[0])
        tensors = {each: self._weights.read(each, cast=False) for each in parts}
        leaf = name.rpartition(".")[2]
        return self._weights.cast(merged_weight(self._adapted, module, leaf, tensors))
