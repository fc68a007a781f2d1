"""Records what one forward computes, moves, keeps and sends, module by module.

The forward runs as weft runs it (its dropout, autocast, the loss) on FakeTensors, which have shapes
and no data. What each op computes and moves is seen at torch's dispatcher; what autograd keeps, at
the hooks by which it keeps it, each storage once. Of equal blocks two are run, forward and
backward, and the others stood in for.

How an op is divided follows the tensors: what a column makes is divided until a row takes it (see
`weft.nn.module_roles`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch.modes import without_dispatch_modes
from weft._torch.modules import intercept_calls, original_call
from weft._torch.tensors import FakeTensorMode, make_fake, storage_id
from weft.core import Part
from weft.engine import FunctionOverrides
from weft.nn import (
    Randomness,
    Roles,
    linear_features,
    routing_arguments,
)
from weft.pipeline import (
    GraphNode,
    map_tensors,
    run_op_without_data,
    tensors_in,
)

from .call_signature import call_signature
from .model_work import Cut
from .module_record import ModuleRecord, OpKey
from .op_work import NO_WORK, graded_operands, is_heavy, moved_bytes, read_bytes, work_of_op
from .parameter_cuts import parameter_cuts, part_storage

_CALLED = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
)  # scaled_dot_product_attention's arguments
BACKWARD_WORK = {
    "matmul": 2.0,  # of two operands that are both trained
    "attention": 2.5,
    "memory": 1.5,
}  # over forward; attention's after Dao et al. 2022


@dataclass
class _SavedTensor:
    """A tensor whose storage autograd keeps since `place`, in the module `leaf`, which `cut`
    divides. `core`: it is attention's own."""

    place: int
    tensor: Tensor
    core: bool
    cut: Cut
    leaf: str


class _LiveBytes:
    """What ops of a backward move, matmuls and attention apart, and the most bytes that are there
    at once of what they make."""

    def __init__(self, begun: int):
        self.moved, self.peak, self._now = 0, begun, begun
        self._known: set[int] = set()

    def see(
        self, packet: Any, given: list[tuple[Tensor, int]], made: list[tuple[Tensor, int]]
    ) -> None:
        for t, storage in made:
            if storage not in self._known:
                self._known.add(storage)
                memory = t.untyped_storage()
                self._now += memory.nbytes()
                weakref.finalize(memory, self._on_freed, storage, memory.nbytes())
        self.peak = max(self.peak, self._now)
        if not is_heavy(packet):
            self.moved += moved_bytes(given, made)

    def _on_freed(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self._now -= nbytes


class _DropoutMasks(Randomness):
    """Masks of dropout, of which the work is seen, and no element drawn."""

    def __init__(self, forward: OpRecorder):
        with without_dispatch_modes():
            super().__init__(seed=0)
            self._zero = torch.zeros((), dtype=torch.int64)
        self._forward = forward

    def site(self) -> Tensor:
        self.drawn = True
        return self._forward.fake.from_tensor(self._zero)

    def keep(self, shape: torch.Size, p: float, site: Tensor, device: torch.device) -> Tensor:
        with self._forward.fake, self._forward:
            return super().keep(shape, p, site, device)

    def dropout(self, x: Tensor, p: float, site: Tensor) -> Tensor:
        self._forward.drawn = self._forward.divided.get(storage_id(x))
        try:
            return super().dropout(x, p, site)
        finally:
            self._forward.drawn = None


class _RMSNorm(torch.autograd.Function):
    """Stands for a kernel that keeps its input and a factor for each row; it moves what a layer
    norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, _, factor = torch.native_layer_norm(x, weight.shape, weight, None, 1e-5)
        ctx.save_for_backward(x, weight, factor)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, factor = ctx.saved_tensors
        back = torch.ops.aten.native_layer_norm_backward
        found = back(grads[0], x, weight.shape, factor, factor, weight, None, [True, True, False])
        return found[0], found[1]


class _SeenFunctions(FunctionOverrides):
    """weft's functions in place of torch's, as in a run; the core of attention is marked."""

    def __init__(self, forward: OpRecorder):
        super().__init__(_DropoutMasks(forward), selective=False)
        self._forward = forward

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self._forward.fused and func in (F.rms_norm, torch.rms_norm):
            given = dict(
                zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)
            ) | (kwargs or {})
            if given["weight"] is not None and given["weight"].dtype == given["input"].dtype:
                return _RMSNorm.apply(given["input"], given["weight"])
        return super().__torch_function__(func, types, args, kwargs)

    def _attention(self, args: tuple, kwargs: dict) -> Tensor:
        given = dict(zip(_CALLED, args, strict=False)) | kwargs
        query, value = given["query"], given["value"]
        if (
            self._forward.fused
            and query.shape[-1] != value.shape[-1]
            and not given.get("dropout_p")
        ):
            mask, causal = given.get("attn_mask"), given.get("is_causal", False)
            fused = torch.ops.aten._scaled_dot_product_efficient_attention
            core = lambda: fused(query, given["key"], value, mask, True, 0.0, causal)[0]  # noqa: E731
        else:
            core = lambda: super(_SeenFunctions, self)._attention(args, kwargs)  # noqa: E731
        out = self._forward.attention(core)
        self._forward.attended(query, given["key"], value, out)
        return out


class OpRecorder(TorchDispatchMode):
    """Reads a forward while `watching`. A *place* is the number of the module call that began
    last."""

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        fake: FakeTensorMode,
        sharded_logits: bool,
        fused: bool,
        parts: Sequence[Part] = (),
    ):
        super().__init__()
        self.model, self.roles, self.fake, self.fused = model, roles, fake, fused
        self.modules = dict(model.named_modules())
        self.events: list[GraphNode] = []
        self.open: list[int] = []
        self.at: dict[int, ModuleRecord] = {}  # place -> what was seen there
        self.saved: dict[int, _SavedTensor] = {}
        self.divided: dict[int, Cut] = {}  # storages of which a rank of tp has a part
        self.gathered: set[int] = set()  # storages that columns read, whole on every rank
        self.alive: list[Tensor] = []  # so that no storage has another's number
        self.params = {storage_id(p): n for n, p in model.named_parameters()}
        self.in_loss, self.core, self.core_began = False, False, 0
        self.aside = False  # whether ops are not the model's
        self.live: _LiveBytes | None = None  # where a backward runs
        self.drawn: Cut | None = None  # what divides a mask that is drawn
        self.born: dict[int, int] = {}  # storage -> how many ops were before it
        self.count = 0
        self.blocks = {b: i for blocks in roles.blocks for i, b in enumerate(blocks)}
        self.streams = tuple(b + "." for blocks in roles.stacks() for b in blocks)
        self.seen: dict[Hashable, list[str]] = defaultdict(list)
        self.made: dict[
            str, tuple[list[Tensor], Any]
        ] = {}  # block -> its arguments' tensors, and what it returned
        self.like: dict[str, str] = {}  # block that was stood in for -> one that is equal
        self.columns = {c for chain in roles.chains for c in (*chain.columns, *chain.tables)}
        self.columns |= {*roles.heads} if sharded_logits else set()
        self.rows = {row for chain in roles.chains for row in chain.rows}
        own = [chain for chain in roles.chains if chain.by_entry]
        self.summed = (self.rows - {c.row for c in own}) | {c.entry or "" for c in own}
        self.experts = {e.module: e for e in roles.experts}
        self.inside = {
            n: role
            for e in roles.experts
            for n, role in zip(e.cuts, ("column", "row"), strict=False)
        }
        self.inside |= {name: "column" for chain in own for name in chain.parameters}
        self.inside |= {f"{chain.row}.weight": "row" for chain in own}
        self.cuts, self.stored = parameter_cuts(model, roles), part_storage(model, parts)
        heads = [m for h in roles.heads if isinstance(m := self.modules.get(h), nn.Module)]
        self.vocab = linear_features(heads[0])[1] if heads else 0

    def _parameter(self, name: str) -> nn.Parameter | None:
        module, _, leaf = name.rpartition(".")
        return self.modules[module]._parameters.get(leaf)

    def watching(self) -> ExitStack:
        stack = ExitStack()
        handlers = [
            (module, self._handler(name, original_call(module)))
            for name, module in self.modules.items()
        ]
        stack.enter_context(intercept_calls(handlers))
        stack.enter_context(self)
        stack.enter_context(_SeenFunctions(self))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t))
        return stack

    # ---- module calls ----

    def _handler(self, name: str, call: Callable) -> Callable:
        return lambda *args, **kwargs: self._call(name, call, args, kwargs)

    def _call(self, name: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        holds = dict.fromkeys(["any"] if any(True for _ in self.modules[name].parameters()) else [])
        place = len(self.events)
        self.events.append(
            GraphNode(name, True, self.open[-1] if self.open else -1, "", "", "", weights=holds)
        )
        key = call_signature(self.modules[name], args, kwargs) if name in self.blocks else None
        if key is not None and len(self.seen[key]) == 2:
            self.like[name] = self.seen[key][1]
            self.events[place].end = place
            return self._stand_in(self.like[name], args, kwargs)
        if name in self.experts:
            args, kwargs = self._even(name, args, kwargs)
        self.open.append(place)
        try:
            out = call(*args, **kwargs)
        finally:
            self.open.pop()
        self.events[place].end = len(self.events) - 1
        part = self._part(place)
        if name in self.blocks:
            self._back(part, tensors_in((args, kwargs)), tensors_in(out))
        if key is not None:
            self.seen[key].append(name)
            self.made[name] = tensors_in((args, kwargs)), out
        storages = {storage_id(t): t for t in tensors_in(out)}
        part.bytes["output_bytes"] = float(sum(read_bytes(t) for t in storages.values()))
        cut_inside = name in self.experts and self.experts[name].cuts
        if name in self.summed or cut_inside or name in self.roles.embeddings:
            part.bytes["reduced_bytes"] += part.bytes["output_bytes"]
            part.counts["reductions"] += 1
        return out

    def _back(self, part: ModuleRecord, given: list[Tensor], made: list[Tensor]) -> None:
        """A block's backward, by the first of its inputs: others may have been made of parts that
        ran theirs."""
        inputs = next(([t] for t in given if t.requires_grad), [])
        outputs = [t for t in made if t.grad_fn is not None and not any(t is one for one in given)]
        if not inputs or not outputs:
            return
        grads = self._run_unrecorded(lambda: [torch.empty_like(t) for t in outputs])
        self.live = live = _LiveBytes(sum(t.nbytes for t in grads))
        try:
            with torch.autocast("cpu", enabled=False):
                torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        finally:
            self.live = None
        part.bytes["working_bytes"], part.bytes["backward_bytes"] = live.peak, live.moved

    def _stand_in(self, like: str, args: tuple, kwargs: dict) -> Any:
        """What a block would have returned, after another that was called with the like."""
        before, out = self.made[like]
        now = {id(old): new for old, new in zip(before, tensors_in((args, kwargs)), strict=True)}

        def other(t: Tensor) -> Tensor:
            if id(t) in now:
                return now[id(t)]
            new = make_fake(self.fake, t)
            self.alive.append(new)
            return new.requires_grad_(t.requires_grad)

        return self._run_unrecorded(lambda: map_tensors(out, other))

    def _even(self, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a module of experts, with choices that give each of them as many
        tokens."""
        experts = self.experts[name]
        x, index, _ = routing_arguments(experts.names, args, kwargs)
        rows, k = index.shape
        even = (torch.arange(rows * k) % experts.count).view(rows, k).to(index.dtype)
        part = self._part(len(self.events) - 1)
        part.bytes["routed_bytes"] += rows * k * x.shape[-1] * x.itemsize
        part.counts["experts"] = max(experts.count, part.counts["experts"])
        place = 1
        if place < len(args):
            return (*args[:place], even, *args[place + 1 :]), kwargs
        return args, {**kwargs, experts.names[place]: even}

    # ---- attention ----

    def attention(self, call: Callable[[], Tensor]) -> Tensor:
        """The core of attention, within `call`."""
        self.core, self.core_began = True, self.count
        try:
            return call()
        finally:
            self.core = False

    def attended(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        part = self._part(len(self.events) - 1)
        part.bytes["key_bytes"] += read_bytes(key) + read_bytes(value)
        part.bytes["query_bytes"] += read_bytes(query) + read_bytes(out)
        part.counts["heads"] = max(part.counts["heads"], query.shape[1] if query.ndim > 3 else 1)
        part.counts["kv_heads"] = max(part.counts["kv_heads"], key.shape[1] if key.ndim > 3 else 1)

    # ---- ops ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.aside:
            return func(*args, **kwargs)
        out = self._run_unrecorded(lambda: run_op_without_data(func, args, kwargs))
        made, given = tensors_in(out), tensors_in((args, kwargs))
        if not made:
            return out
        sources = [(t, storage_id(t)) for t in given]
        results = [(t, storage_id(t)) for t in made]
        known = {storage for _, storage in sources}
        view = all(storage in known for _, storage in results) and not func._schema.is_mutable
        if self.live is not None:
            if not view:
                self.live.see(func._overloadpacket, sources, results)
            return out
        self.count += 1
        self.alive += made
        for _, storage in results:
            self.born.setdefault(storage, self.count)
        if not view:
            self._op(func._overloadpacket, args, kwargs, out, sources, results)
        return out

    def _run_unrecorded(self, call: Callable[[], Any]) -> Any:
        """What is not the model's doing: FakeTensors are made of other ops."""
        before, self.aside = self.aside, True
        try:
            return call()
        finally:
            self.aside = before

    def _op(
        self,
        packet: Any,
        args: tuple,
        kwargs: dict,
        out: Any,
        given: list[tuple[Tensor, int]],
        made: list[tuple[Tensor, int]],
    ) -> None:
        graded = any(t.requires_grad for t, _ in given) and torch.is_grad_enabled()
        weights = [self.params[s] for _, s in given if s in self.params]
        if len(given) == 1 and weights:  # a weight in another dtype, or another order
            for _, s in made:
                self.params.setdefault(s, weights[0])
        module = self.events[self.open[-1]].name if self.open else ""
        kind, flops, full, size, groups = (
            work_of_op(packet, args, kwargs, out) if graded else NO_WORK
        )
        role = "column" if module in self.columns else "row" if module in self.rows else ""
        cut_by: Cut = "features"
        for weight in weights:
            divided_by = self.cuts[id(self._parameter(weight))]
            if divided_by in ("vocabulary", "expert"):
                cut_by = divided_by
            role = self.inside.get(weight, role)
        marks = [self.divided[s] for _, s in given if s in self.divided]
        mark: Cut | None = marks[0] if marks else self.drawn
        takes = kind == "matmul" and bool(weights)
        if takes and role == "column":
            self.gathered |= {s for _, s in given if s not in self.params}
            mark = cut_by
        makes: Cut | None = mark
        if takes and role == "row":
            mark, makes = cut_by, None
        elif role == "column" and weights:
            mark = makes = cut_by
        if makes is not None:
            self.divided |= dict.fromkeys((s for _, s in made), makes)
        backward = BACKWARD_WORK[kind] if graded else 0.0
        if kind == "matmul":
            backward = float(graded_operands(packet, args))
        key = OpKey(kind, mark or self._stream(), self.core, backward, size)
        entry = self._part(len(self.events) - 1).sums[key]
        entry.flops += flops
        entry.matmuls += groups
        entry.kernels += 1
        entry.full += full
        if kind == "memory":
            entry.moved += moved_bytes(given, made)
        entry.names[self._leaf()] = None

    def _leaf(self) -> str:
        """The module that runs, in a word that is the same in all blocks."""
        module = self.events[self.open[-1]].name if self.open else ""
        leaf = module.rpartition(".")[2]
        return type(self.modules[module]).__name__ if not leaf or leaf.isdigit() else leaf

    def _stream(self) -> Cut:
        """What divides an op that no chain does, at this place."""
        module = self.events[self.open[-1]].name if self.open else ""
        inside = any(module == e or module.startswith(e + ".") for e in self.experts)
        return (
            "sequence"
            if (module + ".").startswith(self.streams) and not inside and self.streams
            else "whole"
        )

    def _part(self, place: int) -> ModuleRecord:
        return self.at.setdefault(place, ModuleRecord(self.events[place].name))

    # ---- what autograd keeps ----

    def _keep(self, t: Tensor) -> Tensor:
        storage = storage_id(t)
        if storage in self.params or (self.in_loss and self.vocab):
            return t
        core = self.core and self.born.get(storage, 0) > self.core_began
        known = self.saved.get(storage)
        if known is None:
            self.alive.append(t)
            self.saved[storage] = _SavedTensor(
                len(self.events) - 1, t, core, self._stream(), self._leaf()
            )
        else:
            known.core = known.core and core
        return t


# ---- ops -----------------------------------------------------------------------------------------
