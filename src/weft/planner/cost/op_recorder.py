"""Reading: what one forward computes, moves, keeps and sends, module by module of a chain.

The forward runs as weft runs it (its dropout, autocast, the loss) on FakeTensors, which have shapes
and no data. What each op computes and moves is seen at torch's dispatcher; what autograd keeps, at
the hooks by which it keeps it, each storage once. Of equal blocks two are run, forward and
backward, and the others stood in for.

How an op is divided follows the tensors: what a column makes is divided until a row takes it (see
`weft.nn.module_roles`).
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from weft._torch.modules import intercept_calls, original_call
from weft._torch.tensors import NEEDS_ELEMENTS, FakeTensorMode, fake_mode, make_fake, storage_id
from weft.core import UnsupportedModel
from weft.engine import FunctionOverrides
from weft.nn import (
    Loss,
    Randomness,
    Roles,
    accepts_sharded_logits,
    linear_features,
    model_arguments,
    routing_arguments,
)
from weft.parallel import DTYPES
from weft.pipeline import (
    GROUPED_MM,
    PLAIN_TYPES,
    ForwardGraph,
    GraphNode,
    containers_of,
    copy_with_tensors,
    is_parameter,
    map_tensors,
    other_leaves,
    run_op_without_data,
    split_points,
    tensors_in,
)

from .model_work import Cut, Kind

# fused kernels: (query, key, value, ...), and where among the arguments `is_causal` stands
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: 4,
    torch.ops.aten._scaled_dot_product_flash_attention: 4,
    torch.ops.aten._scaled_dot_product_efficient_attention: 6,
    torch.ops.aten._scaled_dot_product_cudnn_attention: 6,
}
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CALLED = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
)  # scaled_dot_product_attention's arguments
_ADDED = {torch.ops.aten.addmm, torch.ops.aten.baddbmm}
_NONE: tuple[Kind, float, float, tuple[int, ...], int] = ("memory", 0.0, 0.0, (), 0)
_COUNTED = re.compile(
    "layer|index|idx"
)  # in the names of attributes that say which block of all it is
BYTES = (
    "output_bytes",
    "reduced_bytes",
    "key_bytes",
    "query_bytes",
    "routed_bytes",
    "working_bytes",
)
COUNTS = ("reductions", "heads", "kv_heads", "experts")
_BACKWARD = {
    "matmul": 2.0,
    "attention": 2.5,
    "memory": 1.5,
}  # over forward; attention's after Dao et al. 2022


def record_forward(
    model: nn.Module,
    roles: Roles,
    batch: dict[str, Tensor],
    loss: Loss,
    precision: str,
    inputs: Sequence[str],
    fused: bool,
) -> OpRecorder:
    """One forward of `model` and `loss` on all of `batch`. `fused`: with the kernels of a GPU.
    Raises UnsupportedModel."""
    fake = fake_mode()
    cpu = torch.device("cpu")
    traced = copy_with_tensors(
        model, lambda t: make_fake(fake, t, cpu) if t.is_meta or is_parameter(t) else t.clone()
    )
    if not model.training:
        traced.train()
    forward = OpRecorder(traced, roles, fake, accepts_sharded_logits(loss), fused)
    cast_to = (
        nullcontext()
        if precision not in ("fp16", "bf16")
        else torch.autocast("cpu", DTYPES[precision])
    )
    with torch.random.fork_rng([]), torch.enable_grad(), forward.watching(), cast_to:
        try:
            output = traced(**model_arguments(inputs, batch))
            forward.in_loss = True
            loss(output, batch)
        except NEEDS_ELEMENTS as problem:
            raise UnsupportedModel(
                "model",
                type(model).__name__,
                f"its forward reads elements of a tensor into Python ({problem})",
                "give its work by its dimensions instead",
            ) from problem
    return forward


@dataclass(frozen=True)
class OpKey:
    """Ops that are one Op. `size`: of a matmul, which of equal size are counted together."""

    kind: Kind
    cut: Cut
    core: bool
    backward: float
    size: tuple[int, ...] = ()


@dataclass
class OpTotals:
    """What ops of one key come to, for all samples. `full`: FLOPs without what a causal kernel
    leaves out."""

    flops: float = 0.0
    full: float = 0.0
    moved: float = 0.0
    saved: float = 0.0
    matmuls: int = 0
    kernels: int = 0
    names: dict[str, None] = field(default_factory=dict)

    def add(self, other: OpTotals) -> None:
        self.flops, self.full, self.moved = (
            self.flops + other.flops,
            self.full + other.full,
            self.moved + other.moved,
        )
        self.saved, self.matmuls = self.saved + other.saved, self.matmuls + other.matmuls
        self.kernels, self.names = self.kernels + other.kernels, self.names | other.names


@dataclass
class ModuleRecord:
    """One module of the chain: `sums` of its ops, `bytes` by what they are, `counts`, elements of
    its `params`."""

    name: str
    sums: dict[OpKey, OpTotals] = field(default_factory=lambda: defaultdict(OpTotals))
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    params: dict[Cut, int] = field(default_factory=lambda: defaultdict(int))
    repeated: bool = False
    tied: bool = False

    def full(self) -> float:
        return sum(one.full for one in self.sums.values())

    def add(self, other: ModuleRecord) -> None:
        """Takes what was seen at another place."""
        for key, one in other.sums.items():
            self.sums[key].add(one)
        for name, size in other.bytes.items():
            self.bytes[name] += size
        for name, count in other.counts.items():
            self.counts[name] = (
                self.counts[name] + count if name == "reductions" else max(self.counts[name], count)
            )


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
                weakref.finalize(memory, self._gone, storage, memory.nbytes())
        self.peak = max(self.peak, self._now)
        if not _is_heavy(packet):
            self.moved += _moved(given, made)

    def _gone(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self._now -= nbytes


class _DropoutMasks(Randomness):
    """Masks of dropout, of which the work is seen, and no element drawn."""

    def __init__(self, forward: OpRecorder):
        super().__init__(seed=0)
        self._forward = forward

    def keep(self, shape: torch.Size, p: float, site: int, device: torch.device) -> Tensor:
        with self._forward.fake, self._forward:
            return super().keep(shape, p, site, device)

    def dropout(self, x: Tensor, p: float, site: int) -> Tensor:
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
        self.rows = {chain.row for chain in roles.chains}
        self.experts = {e.module: e for e in roles.experts}
        self.inside = {
            n: role
            for e in roles.experts
            for n, role in zip(e.cuts, ("column", "row"), strict=False)
        }
        self.cuts = self._cuts()
        heads = [m for h in roles.heads if isinstance(m := self.modules.get(h), nn.Module)]
        self.vocab = linear_features(heads[0])[1] if heads else 0

    def _cuts(self) -> dict[int, Cut]:
        """What divides each parameter."""
        cuts: dict[int, Cut] = {id(p): "whole" for p in self.model.parameters()}
        for chain in self.roles.chains:
            divided = [
                f"{c}.{leaf}"
                for c in (*chain.columns, *chain.tables)
                for leaf in ("weight", "bias")
            ]
            for name in (*divided, f"{chain.row}.weight"):
                if (p := self._parameter(name)) is not None:
                    cuts[id(p)] = "features"
        for module in (*self.roles.embeddings, *self.roles.heads):
            cuts |= {id(p): "vocabulary" for p in self.modules[module].parameters(recurse=False)}
        for module in self.experts:
            cuts |= {id(p): "expert" for p in self.modules[module].parameters()}
        return cuts

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
        key = self._look(name, args, kwargs) if name in self.blocks else None
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
        part.bytes["output_bytes"] = float(sum(_nbytes(t) for t in storages.values()))
        cut_inside = name in self.experts and self.experts[name].cuts
        if name in self.rows or cut_inside or name in self.roles.embeddings:
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
        grads = self._unseen(lambda: [torch.empty_like(t) for t in outputs])
        self.live = live = _LiveBytes(sum(t.nbytes for t in grads))
        try:
            with torch.autocast("cpu", enabled=False):
                torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        finally:
            self.live = None
        part.bytes["working_bytes"], part.bytes["backward_bytes"] = live.peak, live.moved

    def _look(self, name: str, args: tuple, kwargs: dict) -> Hashable | None:
        """What is the same of two calls only where they do the same work; None where that cannot be
        told."""
        given = other_leaves((args, kwargs))
        if not all(isinstance(part, PLAIN_TYPES) for part in given):
            return None
        module = self.modules[name]
        inner = tuple(
            (
                n,
                type(m),
                m.training,
                str(
                    {
                        k: v
                        for k, v in vars(m).items()
                        if isinstance(v, PLAIN_TYPES) and not _COUNTED.search(k)
                    }
                ),
                tuple(
                    (leaf, p.shape, p.dtype, p.requires_grad)
                    for leaf, p in m.named_parameters(recurse=False)
                ),
            )
            for n, m in module.named_modules()
        )
        return (
            inner,
            str(given),
            tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in((args, kwargs))),
        )

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

        return self._unseen(lambda: map_tensors(out, other))

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
        part.bytes["key_bytes"] += _nbytes(key) + _nbytes(value)
        part.bytes["query_bytes"] += _nbytes(query) + _nbytes(out)
        part.counts["heads"] = max(part.counts["heads"], query.shape[1] if query.ndim > 3 else 1)
        part.counts["kv_heads"] = max(part.counts["kv_heads"], key.shape[1] if key.ndim > 3 else 1)

    # ---- ops ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.aside:
            return func(*args, **kwargs)
        out = self._unseen(lambda: run_op_without_data(func, args, kwargs))
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

    def _unseen(self, call: Callable[[], Any]) -> Any:
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
        kind, flops, full, size, groups = _work(packet, args, kwargs, out) if graded else _NONE
        role = "column" if module in self.columns else "row" if module in self.rows else ""
        cut_by: Cut = "features"
        for weight in weights:
            if self.cuts[id(self._parameter(weight))] == "vocabulary":
                cut_by = "vocabulary"
            if weight in self.inside:
                role, cut_by = self.inside[weight], "expert"
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
        key = OpKey(
            kind, mark or self._stream(), self.core, _BACKWARD[kind] if graded else 0.0, size
        )
        entry = self._part(len(self.events) - 1).sums[key]
        entry.flops += flops
        entry.matmuls += groups
        entry.kernels += 1
        entry.full += full
        if kind == "memory":
            entry.moved += _moved(given, made)
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

    # ---- the chain ----

    def parts(self) -> list[ModuleRecord]:
        """The modules of the chain, in the order of the forward: those with which stages of a
        pipeline may begin, each with all that runs until the next."""
        bare = ForwardGraph(tuple(self.events), (), {}, frozenset(), {}, containers_of(self.model))
        starts = {event.name: place for place, event in enumerate(self.events)}
        names = [atom.module for atom in split_points(bare, set(self.blocks))]
        begins = [starts[name] for name in names]
        self._settle()
        used: set[int] = set()
        chain = list[ModuleRecord]()
        for name, begin, end in zip(
            names, [0, *begins[1:]], [*begins[1:], len(self.events)], strict=True
        ):
            here = ModuleRecord(name, repeated=name in self.blocks)
            for place in range(begin, end):
                here.add(self.at.get(place, ModuleRecord("")))
            here.bytes["output_bytes"] = self._part(starts[name]).bytes["output_bytes"]
            here.params, here.tied = self._parameters(self.events[begin:end], used)
            chain.append(here)
        for p in self.model.parameters():
            if id(p) not in used:  # the first stage holds what no module uses
                chain[0].params[self.cuts[id(p)]] += p.numel()
        found = {part.name: part for part in chain}
        for part in chain:
            if part.name in self.like:
                part.add(found[self.like[part.name]])
                part.bytes["output_bytes"] = found[self.like[part.name]].bytes["output_bytes"]
        return chain

    def _parameters(
        self, events: Sequence[GraphNode], used: set[int]
    ) -> tuple[dict[Cut, int], bool]:
        """Elements of the parameters of these calls that none before has used; or of all, and that
        they are tied."""
        found: dict[int, nn.Parameter] = {}
        for event in events:
            own = self.modules[event.name].parameters(recurse=event.name in self.like)
            found |= {id(p): p for p in own}
        new = {key: p for key, p in found.items() if key not in used}
        used |= set(found)
        params: dict[Cut, int] = defaultdict(int)
        for key, p in (new or found).items():
            params[self.cuts[key]] += p.numel()
        return params, bool(found) and not new

    def _settle(self) -> None:
        """Adds what was kept to the ops."""
        for storage, one in self.saved.items():
            cut = self.divided.get(storage) or ("whole" if storage in self.gathered else one.cut)
            sums = self._part(one.place).sums
            key = (
                next((k for k in sums if k.core and k.kind == "attention"), None)
                if one.core
                else None
            )
            entry = sums[key or OpKey("memory", cut, one.core, _BACKWARD["memory"])]
            entry.saved += one.tensor.untyped_storage().nbytes()
            entry.names[one.leaf] = None
        self.saved = {}


# ---- ops -----------------------------------------------------------------------------------------


def _work(
    packet: Any, args: tuple, kwargs: dict, out: Any
) -> tuple[Kind, float, float, tuple[int, ...], int]:
    """Of an op: its kind; its FLOPs, and those in full; the size of a matmul, and how many of equal
    size it is."""
    if packet in _ATTENTION:
        query, key, value = args[:3]
        full = float(sdpa_flop_count(query.shape, key.shape, value.shape))
        place = _ATTENTION[packet]
        causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
        return "attention", full * (0.5 if causal else 1.0), full, (), 0
    if packet is GROUPED_MM:
        rows, weights = args[:2]
        flops = 2.0 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]
        return "matmul", flops, flops, tuple(sorted(weights.shape[-2:])), weights.shape[0]
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
        shape = (args[2] if packet in _ADDED else args[1]).shape
        return (
            "matmul",
            flops,
            flops,
            tuple(sorted(shape[-2:])) if len(shape) < 4 else tuple(shape),
            1,
        )
    return _NONE


def _is_heavy(packet: Any) -> bool:
    return (
        packet in flop_registry
        or packet in _ATTENTION
        or packet in (GROUPED_MM, _ATTENTION_BACKWARD)
    )


def _moved(given: list[tuple[Tensor, int]], made: list[tuple[Tensor, int]]) -> int:
    """Bytes that are read and written; each storage once."""
    return sum(_nbytes(t) for t in {storage: t for t, storage in (*given, *made)}.values())


def _nbytes(t: Tensor) -> int:
    """Bytes that reading it moves: of what is repeated without a copy, once."""
    numel = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * t.itemsize
