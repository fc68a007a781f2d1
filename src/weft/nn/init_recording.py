"""Records what building a model does to its tensors, and replays it for some of them.

A model is built on FakeTensors, which have shapes and no elements. Every operator that creates or
writes a tensor is recorded with the storages it reads and writes. A replay walks the record
backwards to find what the wanted storages need, then runs that forwards on real tensors, and frees
each storage after its last use. Random draws that nobody needs run too and are thrown away: so
every generator is in the state that it has in an ordinary build, and the numbers are the same bit
for bit. Tensors of files are read when the replay needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from weft._torch.modes import TorchDispatchMode, without_dispatch_modes
from weft._torch.tensors import (
    NEEDS_ELEMENTS,
    FakeTensor,
    FakeTensorMode,
    forget_fakes,
    storage_id,
)
from weft._torch.trees import tree_leaves, tree_map
from weft.core import UnsupportedModel

from .weight_files import FileTensor

aten = torch.ops.aten

# Operators that overwrite their first tensor and do not read it.
_OVERWRITE = frozenset(
    (
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.normal_.default,
        aten.uniform_.default,
        aten.exponential_.default,
        aten.log_normal_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.bernoulli_.float,
    )
)
_ALLOCATE = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)


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
            for argument, value in _arguments(self.func, self.args, self.kwargs)
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
class _Generator:
    """A generator, and how its state changes between recorded draws. `jumps`: index of an op ->
    the state it draws from, either a state or the op after which the generator had it."""

    real: torch.Generator
    jumps: dict[int, Tensor | int] = field(default_factory=dict)
    marks: dict[bytes, int] = field(default_factory=dict)  # state after a recorded draw -> that op
    last: bytes | None = None


class InitRecording(TorchDispatchMode):
    """A mode above this FakeTensorMode: inside of both, operators are recorded."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._ops: list[Op] = []
        self._numbers: dict[int, int] = {}  # id of a storage -> its number
        self._sizes: list[int] = []  # bytes of each storage
        self._kept: list[torch.UntypedStorage] = []  # so that ids stay unique
        self._flat: dict[int, Tensor] = {}  # FakeTensors of the storages of real tensors
        self._constants: dict[int, Tensor] = {}  # real tensors that joined in: bytes of the storage
        self._generators: list[_Generator] = []
        self._stored: dict[int, FileTensor] = {}
        self._last_writers: dict[int, int] = {}

    def add_stored(self, stored: FileTensor) -> Tensor:
        """A recorded tensor without elements, which has those of the file. Call it inside of the
        modes."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self._stored[self.spec(tensor).storage] = stored
        return tensor

    @property
    def files(self) -> Mapping[int, FileTensor]:
        """Storage -> the file's tensor that it holds."""
        return self._stored

    def last_writer(self, storage: int) -> tuple[int, Op] | None:
        """The last operator that makes or writes to a storage, and its index."""
        index = self._last_writers.get(storage)
        return None if index is None else (index, self._ops[index])

    # ---- recording -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = tree_map(self._joined, (args, kwargs or {}))
        specs = tree_map(self._spec_of, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except NEEDS_ELEMENTS:  # Python goes on with what the elements are
            out = self._on_real_tensors(func, *specs)
            tree_map(self._spec_of, out)
            return out
        if not any(t.is_meta for t in tree_leaves(out, Tensor)):  # these never get elements
            self._record(func, specs, args, kwargs, out)
        if func is aten.detach.default:
            forget_fakes(self._mode)  # a parameter that is known there cannot be swapped
        return out

    def _spec_of(self, value: Any) -> Any:
        return self.spec(value) if isinstance(value, Tensor) else value

    def _joined(self, value: Any) -> Any:
        """A FakeTensor for a real tensor, such as one made by numpy. Views of one storage are views
        of one FakeTensor."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.is_meta:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        number, nbytes = self.spec(value).storage, value.untyped_storage().nbytes()
        if number not in self._flat:
            rows = nbytes // value.dtype.itemsize
            self._flat[number] = torch.empty(rows, dtype=value.dtype, device=value.device)
            self._kept.append(self._flat[number].untyped_storage())
            self._numbers[storage_id(self._flat[number])] = number
        if self._flat[number].dtype != value.dtype:
            raise _unrecordable("it reads a tensor's memory in another dtype")
        return self._flat[number].as_strided(value.shape, value.stride(), value.storage_offset())

    def spec(self, tensor: Tensor) -> StorageView:
        """Where this tensor's elements are. Those of a real tensor are copied into the record, at
        the first time."""
        key = storage_id(tensor)
        if tensor.is_meta:
            self._numbers[key] = NO_STORAGE
            self._kept.append(tensor.untyped_storage())
        if key not in self._numbers:
            if tensor.layout is not torch.strided or key < 0:
                raise _unrecordable(f"it makes a tensor of layout {tensor.layout}")
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(tensor.untyped_storage().nbytes())
            self._kept.append(tensor.untyped_storage())
            if not isinstance(tensor, FakeTensor):
                with without_dispatch_modes():
                    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    flat.set_(tensor.untyped_storage())  # type: ignore[call-overload]
                    self._constants[number] = flat.clone()
        return StorageView(
            self._numbers[key],
            tensor.untyped_storage().nbytes(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
        )

    def _record(self, func: Any, specs: tuple, args: tuple, kwargs: dict, out: Any) -> None:
        before = {spec.storage for spec in tree_leaves(specs, StorageView)} - {NO_STORAGE}
        written = frozenset(
            spec.storage
            for argument, value in _arguments(func, *specs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for spec in tree_leaves(value, StorageView)
        )
        outputs = [self.spec(t) for t in tree_leaves(out, Tensor)]
        makes = {i: spec for i, spec in enumerate(outputs) if spec.storage not in before}
        if func.overloadpacket is aten.resize_:
            raise _unrecordable("it resizes a tensor")
        if func.overloadpacket is aten.set_ or (not written and (not makes or func in _ALLOCATE)):
            return  # a view, or memory that a later operator fills
        overwrites: frozenset[int] = frozenset()
        if func in _OVERWRITE and specs[0][0].fills_storage:
            overwrites = written - {s.storage for s in tree_leaves(specs[0][1:], StorageView)}
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            device = outputs[0].device
            generator = self._draw(kwargs.get("generator"), device)
        op = Op(
            func,
            specs[0],
            specs[1],
            reads=frozenset(before) - overwrites,
            writes=written,
            makes=makes,
            overwrites=overwrites,
            generator=generator,
        )
        self._last_writers |= dict.fromkeys(op.changed, len(self._ops))
        self._ops.append(op)

    def _draw(self, given: torch.Generator | None, device: torch.device) -> int:
        """Note from which state the operator that is recorded now draws. Returns the number of its
        generator."""
        if given is None and device.type != "cpu":
            raise _unrecordable(f"it draws on {device}")
        real = given if given is not None else torch.default_generator
        number = next((i for i, g in enumerate(self._generators) if g.real is real), None)
        if number is None:
            number = len(self._generators)
            self._generators.append(_Generator(real))
        found, here = self._generators[number], len(self._ops)
        with without_dispatch_modes():
            state = real.get_state()
            raw = state.numpy().tobytes()
            if raw != found.last:  # seeded anew, or set back to what it was once
                found.jumps[here] = found.marks.get(raw, state)
            torch.empty(1).uniform_(generator=real)  # a state that only this draw leaves behind
            found.last = real.get_state().numpy().tobytes()
            found.marks[found.last] = here
        return number

    def digest(self) -> bytes:
        """32 bytes that are the same if the same was recorded."""
        seen = sha256()
        for op in self._ops:
            seen.update(repr((str(op.func), op.args, op.kwargs, op.generator)).encode())
        for generator in self._generators:
            for index, state in generator.jumps.items():
                seen.update(f"{index} {state if isinstance(state, int) else ''}".encode())
                seen.update(b"" if isinstance(state, int) else state.numpy().tobytes())
        for number, constant in self._constants.items():
            seen.update(f"constant {number}".encode() + constant.cpu().numpy().tobytes())
        for number, file in self._stored.items():
            name = f"{file.file.name} {file.start} {file.shape} {file.dtype}"
            seen.update(f"file {number} {name}".encode())
        return seen.digest()

    def end(self) -> None:
        """Nothing more is recorded: let go of what that needs."""
        self._flat.clear()
        self._numbers.clear()
        self._kept.clear()

    def writes_to(self, tensor: Tensor) -> bool:
        """Whether an operator has been recorded that writes to this tensor's storage."""
        number = self._numbers.get(storage_id(tensor))
        return number in self._last_writers

    # ---- replaying -------------------------------------------------------------------------------

    def _on_real_tensors(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of an operator on elements: what a model does that reads them as it is
        built."""
        wanted = {spec.storage for spec in tree_leaves((args, kwargs), StorageView)} - {NO_STORAGE}

        def elements(value: Any) -> Any:
            if not isinstance(value, StorageView):
                return value
            return value.view(real[value.storage]) if value.storage in real else value.scratch()

        with without_dispatch_modes():
            real = dict(self.replay(wanted))
            args, kwargs = tree_map(elements, (args, kwargs))
            return func(*args, **kwargs)

    @torch.no_grad()
    def replay(self, wanted: Collection[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """(number, storage with its elements) of each wanted storage, as soon as nothing writes to
        it any more. Let go of it before asking for the next one: then only one is in memory, as a
        rule."""
        steps = self._steps(wanted)
        last_write: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for index, needed in steps:
            op = self._ops[index]
            for number in op.changed if needed else ():
                last_write[number] = last_use[number] = index
            for number in op.reads if needed else ():
                last_use[number] = index
        replay = _Replay(self._generators, self._constants, self._stored)
        for number in wanted:
            if number not in last_write:  # nothing writes to it: a constant, or never filled
                yield number, replay.storage(number, self._sizes[number])
                replay.forget(number)
        for index, needed in steps:
            op = self._ops[index]
            replay.run(index, op, needed)
            for number in op.reads | op.changed if needed else ():
                if number in wanted and last_write.get(number) == index:
                    yield number, replay.held[number]
                if last_use[number] == index:
                    replay.forget(number)

    def _steps(self, wanted: Collection[int]) -> list[tuple[int, bool]]:
        """(index of an operator, whether its result is needed), in order. Draws before the last
        needed one run in any case."""
        open_, chosen, later = set(wanted), {}, set[int | None]()
        for index in reversed(range(len(self._ops))):
            op = self._ops[index]
            if op.changed & open_ or (op.generator in later and op.draws_by_value):
                chosen[index] = True
                open_ -= op.overwrites | {spec.storage for spec in op.makes.values()}
                open_ |= op.reads
                later.add(op.generator)
        last = {op.generator: i for i, op in enumerate(self._ops) if i in chosen}
        for index, op in enumerate(self._ops):
            if op.generator is not None and index < last.get(op.generator, 0):
                chosen.setdefault(index, False)
        return sorted(chosen.items())


class _Replay:
    """Real storages and generators of one replay."""

    def __init__(
        self,
        generators: Sequence[_Generator],
        constants: dict[int, Tensor],
        stored: dict[int, FileTensor],
    ):
        self.held: dict[int, torch.UntypedStorage] = {}
        self._recorded, self._constants, self._stored = generators, constants, stored
        self._own = [torch.Generator(device=g.real.device) for g in generators]
        self._states: dict[int, Tensor] = {}  # after an op to whose state a generator is set back
        self._asked = {j for g in generators for j in g.jumps.values() if isinstance(j, int)}

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
                generator.set_state(self._states[jump] if isinstance(jump, int) else jump)
            if "generator" in {argument.name for argument in op.func._schema.arguments}:
                kwargs = {**kwargs, "generator": generator}
        if op.generator is not None and "generator" not in kwargs:
            self._with_default(op, kwargs, needed)
        else:
            self._call(op, kwargs, needed)
        if index in self._asked and op.generator is not None:
            self._states[index] = self._own[op.generator].get_state()

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


def _arguments(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _unrecordable(problem: str) -> UnsupportedModel:
    return UnsupportedModel(
        "model", "build", f"cannot be recorded: {problem}", "build it on the CPU, with weights"
    )
