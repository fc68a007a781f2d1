"""Records what building a model does to its tensors, and replays it for some of them.

A model is built on FakeTensors, which have shapes and no elements. Every operator that creates or
writes a tensor is recorded with the storages it reads and writes. A replay walks the record
backwards to find what the wanted storages need, then runs that forwards on real tensors, and frees
each storage after its last use. Random draws that nobody needs run too and are thrown away: so
each draw that is needed starts from the state that its generator has in an ordinary build, and the
numbers are the same bit for bit. Tensors of files are read when the replay needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
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

from .recorded_ops import NO_STORAGE, Op, RecordedGenerator, Replay, StorageView, named_values
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


_MARK = 7_203_051_118_264_077_000  # seeds that nobody else uses: a number and the operator's index


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
        self._sources: dict[int, torch.UntypedStorage] = {}  # the storages of real tensors
        self._versions: Counter[int] = Counter()  # of tensors, after the last write by storage
        self._constants: dict[int, Tensor] = {}  # real tensors that joined in: bytes of the storage
        self.computed: dict[int, str] = {}  # constants that an operator made of elements -> which
        self._generators: list[RecordedGenerator] = []
        self._marks: dict[bytes, tuple[int, int]] = {}  # a state -> the draw that left it behind
        self._stored: dict[int, FileTensor] = {}
        self._last_writers: dict[int, int] = {}
        # index of a draw -> the state that it begins with, of draws that were replayed for elements
        self._before: dict[int, Tensor] = {}

    def add_stored(self, stored: FileTensor) -> Tensor:
        """A recorded tensor without elements, which has those of the file. Call it inside of the
        modes."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self._stored[self._number(tensor)] = stored
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
        specs = tree_map(self._known, (args, kwargs))
        if func.overloadpacket is aten.lift_fresh:
            number = specs[0][0].storage
            if number in self._sources and self._sources[number].resizable():
                del self._sources[number]  # of torch.tensor, whose memory nobody else has
        try:
            out = func(*args, **kwargs)
        except NEEDS_ELEMENTS:  # Python goes on with what the elements are
            out = tree_map(self._joined, self._on_real_tensors(func, *specs))
            made = {self.spec(tensor).storage for tensor in tree_leaves(out, Tensor)}
            self.computed |= dict.fromkeys(made, func.overloadpacket.__name__)
            return out
        if not any(t.is_meta for t in tree_leaves(out, Tensor)):  # these never get elements
            self._record(func, specs, args, kwargs, out)
        if func is aten.detach.default:
            forget_fakes(self._mode)  # a parameter that is known there cannot be swapped
        return out

    def _known(self, value: Any) -> Any:
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
        number, nbytes = self._number(value), value.untyped_storage().nbytes()
        if number not in self._flat:
            rows = nbytes // value.dtype.itemsize
            self._flat[number] = torch.empty(rows, dtype=value.dtype, device=value.device)
            self._kept.append(self._flat[number].untyped_storage())
            self._numbers[storage_id(self._flat[number])] = number
        if self._flat[number].dtype != value.dtype:
            raise _unrecordable("it reads a tensor's memory in another dtype")
        return self._flat[number].as_strided(value.shape, value.stride(), value.storage_offset())

    def _number(self, tensor: Tensor, made: bool = False) -> int:
        """The number of this tensor's storage. `made`: an operator that is recorded now makes it.
        The elements of a real tensor are copied into the record, at the first time."""
        key = storage_id(tensor)
        if tensor.is_meta:
            self._numbers[key] = NO_STORAGE
            self._kept.append(tensor.untyped_storage())
        if key not in self._numbers:
            if tensor.layout is not torch.strided or key < 0:
                raise _unrecordable(f"it makes a tensor of layout {tensor.layout}")
            real = not isinstance(tensor, FakeTensor)
            if not (made or real):
                raise _unrecordable(
                    "it makes tensors in another thread, or by `from torch import load`"
                )
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(tensor.untyped_storage().nbytes())
            self._kept.append(tensor.untyped_storage())
            if real:
                with without_dispatch_modes():
                    self._constants[number] = _bytes_of(tensor.untyped_storage()).clone()
                self._sources[number] = tensor.untyped_storage()
        return self._numbers[key]

    def spec(self, tensor: Tensor, made: bool = False) -> StorageView:
        """Where this tensor's elements are."""
        if tensor.is_conj() or tensor.is_neg():
            raise _unrecordable("it makes a tensor that is conjugated when it is read")
        return StorageView(
            self._number(tensor, made),
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
            for argument, value in named_values(func, *specs)
            if _is_written(argument)
            for spec in tree_leaves(value, StorageView)
        )
        outputs = [self.spec(t, made=True) for t in tree_leaves(out, Tensor)]
        makes = {i: spec for i, spec in enumerate(outputs) if spec.storage not in before}
        if func.overloadpacket is aten.resize_:
            raise _unrecordable("it resizes a tensor")
        if func.overloadpacket is aten.set_ or (not written and (not makes or func in _ALLOCATE)):
            return  # a view, or memory that a later operator fills
        if any(number in self._sources for number in written):
            raise _unrecordable("it writes to a tensor that numpy, or code outside of it, can read")
        for argument, value in named_values(func, args, kwargs):
            for tensor in tree_leaves(value, Tensor) if _is_written(argument) else ():
                number = self._number(tensor)
                self._versions[number] = max(self._versions[number], tensor._version + 1)
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
            {key: value for key, value in specs[1].items() if key != "generator"},
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
            raise _unrecordable(f"it draws random numbers on {device}")
        real = given if given is not None else torch.default_generator
        number = next((i for i, g in enumerate(self._generators) if g.real is real), None)
        if number is None:
            number = len(self._generators)
            self._generators.append(RecordedGenerator(real))
        found, here = self._generators[number], len(self._ops)
        with without_dispatch_modes():
            state = real.get_state()
            raw = state.numpy().tobytes()
            if raw != found.last:  # seeded anew, or set back to what it was once
                found.jumps[here] = self._marks.get(raw, state)
            real.manual_seed(_MARK + here)  # a state that only this draw leaves behind
            found.last = real.get_state().numpy().tobytes()
            self._marks[found.last] = number, here
        return number

    def digest(self) -> tuple[bytes, bytes]:
        """32 bytes that are the same if the same was recorded; and 32 that are the same if what
        operators computed meanwhile is too."""
        seen, computed = sha256(), sha256()
        for op in self._ops:
            seen.update(repr((str(op.func), op.args, op.kwargs, op.generator)).encode())
        for generator in self._generators:
            for index, state in generator.jumps.items():
                seen.update(f"{index} {state if isinstance(state, tuple) else ''}".encode())
                seen.update(b"" if isinstance(state, tuple) else state.numpy().tobytes())
        for number, constant in self._constants.items():
            content = f"constant {number}".encode() + constant.cpu().numpy().tobytes()
            (computed if number in self.computed else seen).update(content)
        for number, file in self._stored.items():
            name = f"{file.file.name} {file.start} {file.shape} {file.dtype}"
            seen.update(f"file {number} {name}".encode())
        return seen.digest(), computed.digest()

    def check_writes(self, tensor: Tensor) -> None:
        """Refuse a tensor that was written to unseen, as from another thread."""
        number = self._number(tensor)
        unmade = number not in self._last_writers and number not in self._constants
        seen = unmade or number in self._versions
        if isinstance(tensor, FakeTensor) and seen and tensor._version > self._versions[number]:
            raise _unrecordable("it writes to tensors in another thread")

    def end(self) -> None:
        """Nothing more is recorded: let go of what that needs. Raises UnsupportedModel if elements
        changed that were taken from elsewhere."""
        for number, source in self._sources.items():
            if not torch.equal(_bytes_of(source), self._constants[number]):
                raise _unrecordable("numpy, or code outside of it, changes a tensor that it uses")
        self._sources.clear()
        self._flat.clear()
        self._numbers.clear()
        self._kept.clear()
        self._before.clear()

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
            real = dict(self.replay(wanted, while_recording=True))
            args, kwargs = tree_map(elements, (args, kwargs))
            return func(*args, **kwargs)

    @torch.no_grad()
    def replay(
        self, wanted: Collection[int], while_recording: bool = False
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """(number, storage with its elements) of each wanted storage, as soon as nothing writes to
        it any more. Let go of it before asking for the next one: then only one is in memory, as a
        rule. `while_recording`: states of generators are kept, so that no later replay repeats what
        was drawn before: `trunc_normal_` reads elements several times for each weight."""
        steps, starts = self._steps(wanted), dict[int, Tensor]()
        if while_recording:
            steps, starts = _from_known_states(steps, self._ops, self._generators, self._before)
        last_write: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for index, needed in steps:
            op = self._ops[index]
            for number in op.changed if needed else ():
                last_write[number] = last_use[number] = index
            for number in op.reads if needed else ():
                last_use[number] = index
        replay = Replay(self._generators, self._constants, self._stored)
        replay.starts, replay.before = starts, self._before if while_recording else None
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

    @property
    def _states_cross(self) -> bool:
        """Whether a generator has been set to the state that another one had."""
        return any(
            isinstance(state, tuple) and state[0] != number
            for number, generator in enumerate(self._generators)
            for state in generator.jumps.values()
        )

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
        if self._states_cross:
            last = dict.fromkeys(range(len(self._generators)), max(last.values(), default=0))
        for index, op in enumerate(self._ops):
            if op.generator is not None and index < last.get(op.generator, 0):
                chosen.setdefault(index, False)
        return sorted(chosen.items())


def _from_known_states(
    steps: list[tuple[int, bool]],
    ops: Sequence[Op],
    generators: Sequence[RecordedGenerator],
    before: Mapping[int, Tensor],
) -> tuple[list[tuple[int, bool]], dict[int, Tensor]]:
    """The steps without the draws before a known state that leads to the first needed draw; and
    these states by the index of the draw that begins with them."""
    jumps = (state for generator in generators for state in generator.jumps.values())
    if any(isinstance(state, tuple) for state in jumps):
        return steps, {}  # a state that an earlier draw leaves behind is asked for
    first: dict[int, int] = {}
    for index, needed in steps:
        number = ops[index].generator
        if needed and number is not None:
            first.setdefault(number, index)
    begin: dict[int, int] = {}
    for index in before:
        number = ops[index].generator
        if number in first and begin.get(number, -1) < index <= first[number]:
            begin[number] = index
    rest = [
        (index, needed)
        for index, needed in steps
        if (number := ops[index].generator) is None or index >= begin.get(number, 0)
    ]
    return rest, {index: before[index] for index in begin.values()}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _unrecordable(problem: str) -> UnsupportedModel:
    return UnsupportedModel(
        "model", "build", f"cannot be recorded: {problem}", "build it on the CPU, with weights"
    )
