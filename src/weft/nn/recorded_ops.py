"""What a recording is made of: operators with views of numbered storages; and running them again on
real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft._torch.trees import tree_leaves, tree_map

from .weight_files import FileTensor

NO_STORAGE = -1  # of tensors on the meta device


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a numbered storage. Offset and strides count elements."""

    storage: int
    nbytes: int  # of the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def fills_storage(self) -> bool:
        """Whether its elements are all of the storage, each once."""
        dense = 1
        for size, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda x: x[1]):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return dense * self.dtype.itemsize == self.nbytes

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)  # type: ignore[call-overload]

    def scratch(self) -> Tensor:
        """A tensor like it, with any elements."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass
class Op:
    """An operator that was recorded."""

    func: Any
    args: tuple  # StorageView in place of tensors
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]  # in place
    makes: dict[int, StorageView]  # index among the results -> a new storage
    overwrites: frozenset[int]  # those of `writes` whose earlier elements do not matter
    generator: int | None = None  # the number of the generator it draws from

    def named_arguments(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of each argument that was given."""
        yield from (
            (argument.name, value)
            for argument, value in named_values(self.func, self.args, self.kwargs)
        )

    @property
    def draws_by_value(self) -> bool:
        """Whether how much it draws may depend on elements that it reads."""
        likeness = self.func.overloadpacket.__name__.endswith("_like")
        return self.generator is not None and bool(self.reads - self.writes) and not likeness

    @property
    def changed(self) -> frozenset[int]:
        """The storages that it writes to or makes."""
        return self.writes | {spec.storage for spec in self.makes.values()}


@dataclass
class RecordedGenerator:
    """A generator, and how its state changes between recorded draws. `jumps`: index of an op ->
    the state it draws from: a state, or the (generator, op) that left it behind."""

    real: torch.Generator
    jumps: dict[int, Tensor | tuple[int, int]] = field(default_factory=dict)
    last: bytes | None = None


class Replay:
    """Real storages and generators of one replay."""

    def __init__(
        self,
        generators: Sequence[RecordedGenerator],
        constants: dict[int, Tensor],
        stored: dict[int, FileTensor],
    ):
        self.held: dict[int, torch.UntypedStorage] = {}
        self._recorded, self._constants, self._stored = generators, constants, stored
        self._own = [torch.Generator(device=g.real.device) for g in generators]
        self._states: dict[tuple[int, int], Tensor] = {}  # after draws that are returned to
        self._asked = {j for g in generators for j in g.jumps.values() if isinstance(j, tuple)}
        self.before: dict[int, Tensor] | None = None  # of draws, the states that they begin with
        self.starts: dict[int, Tensor] = {}  # the same, known already

    def storage(self, number: int, nbytes: int, device: Any = None) -> torch.UntypedStorage:
        if number not in self.held:
            if number in self._stored:
                fresh = self._stored[number].read()
            elif number in self._constants:
                fresh = self._constants[number].clone()
            else:
                fresh = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.held[number] = fresh.untyped_storage()
        return self.held[number]

    def forget(self, number: int) -> None:
        self.held.pop(number, None)

    def run(self, index: int, op: Op, needed: bool) -> None:
        kwargs = op.kwargs
        if op.generator is not None:
            generator = self._own[op.generator]
            jump = self._recorded[op.generator].jumps.get(index)
            if jump is not None:
                generator.set_state(self._states[jump] if isinstance(jump, tuple) else jump)
            if index in self.starts:
                generator.set_state(self.starts[index])
            if self.before is not None:
                self.before[index] = generator.get_state()
            if "generator" in {argument.name for argument in op.func._schema.arguments}:
                kwargs = {**kwargs, "generator": generator}
        if op.generator is not None and "generator" not in kwargs:
            self._with_default(op, kwargs, needed)
        else:
            self._call(op, kwargs, needed)
        if op.generator is not None and (op.generator, index) in self._asked:
            self._states[op.generator, index] = self._own[op.generator].get_state()

    def _with_default(self, op: Op, kwargs: dict, needed: bool) -> None:
        """An operator that draws from the default generator and takes no other."""
        assert op.generator is not None
        own, real = self._own[op.generator], torch.default_generator
        before = real.get_state()
        try:
            real.set_state(own.get_state())
            self._call(op, kwargs, needed)
            own.set_state(real.get_state())
        finally:
            real.set_state(before)

    def _call(self, op: Op, kwargs: dict, needed: bool) -> None:
        def real(value: Any) -> Any:
            if not isinstance(value, StorageView):
                return value
            if not needed or value.storage == NO_STORAGE:
                return value.scratch()
            return value.view(self.storage(value.storage, value.nbytes, value.device))

        args, kwargs = tree_map(real, (op.args, kwargs))
        results = tree_leaves(op.func(*args, **kwargs), Tensor)
        for place, spec in op.makes.items() if needed else ():
            made = results[place]
            if made.stride() != spec.strides or made.storage_offset() != spec.offset:
                view = spec.view(self.storage(spec.storage, spec.nbytes, spec.device))
                view.copy_(made)
            else:
                self.held[spec.storage] = made.untyped_storage()


def named_values(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Any, Any]]:
    """(argument of the operator's schema, value) of each argument that was given."""
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
