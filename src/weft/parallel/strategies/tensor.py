"""Tensor parallel over `tp`: columns, rows, heads, and the vocabulary (Megatron-LM, Shoeybi et al.
2019).

With the option `sequence` (see sequence.py) the all-reduce at a chain's end becomes a
reduce-scatter, and an all-gather stands at the next one's start.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from weft.core import (
    COPY,
    SUM,
    ActivationSharding,
    AxisTraits,
    Boundary,
    DimShard,
    Divides,
    Layout,
    NothingToDivide,
    Param,
    Step,
    UnsupportedModel,
    is_inside,
)
from weft.nn import (
    OF_OUTPUTS,
    Chain,
    ExpertsRole,
    LoneLinear,
    is_linear,
    local_attributes,
    unknown_forward,
)

from ._request import StepsRequest
from ._vocabulary import vocabulary_steps

AXIS = "tp"
TRAITS = AxisTraits(
    frozenset({Divides.FEATURES, Divides.VOCABULARY}),
    order=7,
    spreads_experts=True,
    within_node=True,
)
OPTIONS: Mapping[str, str] = {}
_TO_DECLARE = (
    ', or declare a column and the row that follows it in [roles], such as "blocks.*.up" ='
    ' "column" and "blocks.*.down" = "row"'
)

_SEEN = (
    ": in its forward, no linear's output features stay separate until one linear that reads all"
    " of them"
)


def steps(request: StepsRequest) -> Iterator[Step]:
    """Steps for every chain and for the vocabulary."""
    model, roles, layout, names = request.model, request.roles, request.layout, request.names
    size = layout.size(AXIS)
    if not roles.chains and not roles.embeddings and roles.uneven:
        row, count = roles.uneven[0]
        fit = [n for n in range(2, count + 1) if count % n == 0]
        problem = f"{row} takes {count} features or heads, which tp{size} does not divide"
        raise UnsupportedModel("layout", str(layout), problem, f"tp sizes that work: {fit}")
    if not roles.chains and not roles.embeddings and not roles.lone:
        some = any(is_linear(m) or isinstance(m, nn.Embedding) for m in model.modules())
        several = sum(map(is_linear, model.modules())) > 1
        problem = "tensor parallelism finds no attention, feed-forward or embedding to cut in this"
        problem += f" model{_SEEN if roles.all_seen else ''}"
        problem += f" ({'; '.join(_once(roles.notes))})" if roles.notes else ""
        problem += "" if some else ", whose weights are in no nn.Linear and no nn.Embedding"
        seen = roles.all_seen or roles.read_elsewhere or roles.needs_whole
        fix = _instead(model) + (_TO_DECLARE if several and not seen else "")
        raise NothingToDivide("layout", str(layout), problem, fix)
    sequence = "sequence" in layout.options_of(AXIS)
    residual: Placement = Shard(1) if sequence else COPY
    blocks = [block for stack in roles.stacks() for block in stack]
    for chain in roles.chains:
        in_stack = any(chain.row.startswith(block + ".") for block in blocks)
        _check_modules(model, chain, size)
        yield from _chain(chain, size, layout, residual if in_stack else COPY, names)
    yield from _padded(model, roles.chains)
    for experts in roles.experts if "ep" not in layout.options_of(AXIS) else ():
        in_stack = any(experts.module.startswith(block + ".") for block in blocks)
        yield from _expert_steps(experts, size, layout, Shard(0) if sequence and in_stack else COPY)
    yield from (_lone(each, size, names) for each in roles.lone)
    yield from vocabulary_steps(request, AXIS, "tensor")


def _instead(model: nn.Module) -> str:
    """What to do where tp cuts nothing."""
    assigned = ", ".join(dict.fromkeys(_assigned_buffers(model)))
    fix = f", after changing outside of the forward what it assigns to buffers ({assigned})"
    return f"{{others}}{fix if assigned else ''}"


def _assigned_buffers(model: nn.Module) -> Iterator[str]:
    """Names, in their modules, of buffers that the forward may assign: ranks with other samples
    assign other values."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and module._buffers:
            stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
            yield from (key for key in module._buffers if key in stored)


def _once(notes: Iterable[str]) -> list[str]:
    """Of notes that differ in the number of a block alone, the first."""
    return [*{re.sub(r"\.\d+(?=\.)", ".*", note): note for note in reversed([*notes])}.values()][
        ::-1
    ]


def _chain(
    chain: Chain, size: int, layout: Layout, outside: Placement, names: Mapping[str, str]
) -> Iterator[Step]:
    _check(chain, size, layout)
    activation_sharding: ActivationSharding = "heads" if chain.heads else "features"
    # keys may be of another sequence, a mask may be learned; of a divided sequence there is one
    every = chain.by_entry and outside == COPY
    entry = Boundary({AXIS: outside}, {AXIS: COPY}, every=every)
    left = Boundary({AXIS: outside}, {AXIS: SUM})
    if chain.entry is not None:
        yield Step(
            chain.entry,
            "tensor",
            input=entry,
            output=left if chain.by_entry else None,
            activation_sharding=activation_sharding,
        )
    for module, attributes in local_attributes(chain, size).items():
        yield Step(module, "tensor", attributes=attributes)
    for module, divided in chain.arguments.items():
        arguments = tuple((name, AXIS, cut) for name, cut in divided.items())
        yield Step(module, "tensor", arguments=arguments)
    for column in chain.columns:
        cut = chain.cuts[column]
        params = [_weight(f"{column}.weight", cut, size, names)]
        each = DimShard(0, cut.parts, cut.units)
        others = [f"{column}.{leaf}" for leaf in OF_OUTPUTS if f"{column}.{leaf}" in names]
        params += [_weight(name, each, size, names) for name in others]
        own = entry if chain.entry is None else None
        yield Step(
            column,
            "tensor",
            tuple(params),
            input=own,
            activation_sharding=activation_sharding if own else None,
        )
    for row in chain.rows:
        params = [_weight(f"{row}.weight", chain.cuts[row], size, names)]
        if f"{row}.bias" in names:
            # added once, after the sum: on a slice of the sequence its gradient is a partial sum
            grad = SUM if outside != COPY else COPY
            params.append(Param(names[f"{row}.bias"], AXIS, COPY, COPY, grad))
        yield Step(row, "tensor", tuple(params), output=None if chain.by_entry else left)
    entering: ActivationSharding = "whole" if chain.entry or outside == COPY else "sequence"
    for module, beside in chain.dropouts.items():
        yield Step(module, "tensor", dropped="features" if beside == "row" else entering)
    for table in chain.tables:
        yield Step(
            table,
            "tensor",
            (_weight(f"{table}.weight", chain.cuts[table], size, names),),
            activation_sharding=activation_sharding,
        )
    for name, cut in chain.parameters.items():
        module = name.rpartition(".")[0]
        mean_over = AXIS if module in chain.norms else ""
        yield Step(module, "tensor", (_weight(name, cut, size, names),), mean_over=mean_over)
    for name in chain.inner:
        # used whole on this rank's heads alone
        yield Step(name.rpartition(".")[0], "tensor", (Param(names[name], AXIS, COPY, COPY, SUM),))


def _lone(lone: LoneLinear, size: int, names: Mapping[str, str]) -> Step:
    """All ranks gather the output of which each makes some features, or sum what each makes of some
    features of the input."""
    count = (lone.features,)
    cut = DimShard(lone.dim, count, count)
    params = [_weight(f"{lone.module}.weight", cut, size, names)]
    part, whole, total = {AXIS: Shard(lone.activation_dim)}, {AXIS: COPY}, {AXIS: SUM}
    others = [n for leaf in OF_OUTPUTS if (n := f"{lone.module}.{leaf}") in names]
    if lone.by == "output":
        params += [_weight(n, DimShard(0, count, count), size, names) for n in others]
        entry, left = Boundary(whole, whole), Boundary(whole, part)
    else:
        params += [Param(names[n], AXIS, COPY, COPY, COPY) for n in others]
        entry, left = Boundary(whole, part), Boundary(whole, total)
    return Step(lone.module, "tensor", tuple(params), input=entry, output=left)


def _padded(model: nn.Module, chains: Iterable[Chain]) -> Iterator[Step]:
    """In evaluation nn.TransformerEncoder takes padding out of its input, which then has no one
    length, and crosses no boundary: it is to keep padding, as in training."""
    rows = [chain.row for chain in chains]
    for name, module in model.named_modules():
        if any(is_inside(row, name) for row in rows) and isinstance(module, nn.TransformerEncoder):
            yield Step(name, "tensor", attributes=(("use_nested_tensor", False),))


def _expert_steps(
    experts: ExpertsRole, size: int, layout: Layout, outside: Placement
) -> Iterator[Step]:
    """Features inside of every expert on ranks, which all have the same tokens."""
    for name, cut in experts.cuts.items():
        if cut.parts[0] % size:
            problem = f"{name} has {cut.parts[0]} features, which tp{size} does not divide"
            fit = [n for n in range(2, cut.parts[0] + 1) if cut.parts[0] % n == 0]
            raise UnsupportedModel(
                "layout",
                str(layout),
                problem,
                f"tp sizes that work: {fit}; or tp{size}+sequence+ep",
            )
    if experts.cuts:
        params = [_weight(name, cut, size, {name: name}) for name, cut in experts.cuts.items()]
        entry, left = (
            Boundary({AXIS: outside}, {AXIS: COPY}, every=True),
            Boundary({AXIS: outside}, {AXIS: SUM}),
        )
        yield Step(
            experts.module,
            "tensor",
            tuple(params),
            input=entry,
            output=left,
            activation_sharding="features",
        )


def _weight(name: str, cut: DimShard, size: int, names: Mapping[str, str]) -> Param:
    if cut.shared(size):
        return Param(names[name], AXIS, COPY, COPY, SUM, cut)
    return Param(names[name], AXIS, Shard(cut.dim), Shard(cut.dim), Shard(cut.dim), cut)


def _check(chain: Chain, size: int, layout: Layout) -> None:
    def refuse(problem: str, fix: str) -> None:
        raise UnsupportedModel("layout", str(layout), problem, fix)

    if chain.heads:
        if chain.heads % size:
            fit = [n for n in range(2, chain.heads + 1) if chain.heads % n == 0]
            refuse(
                f"{chain.row} has {chain.heads} heads, which tp{size} does not divide",
                f"tp sizes that work: {fit}",
            )
        if chain.kv_heads % size and size % chain.kv_heads:
            refuse(
                f"{chain.row} has {chain.kv_heads} key heads, which tp{size} neither divides nor is"
                " a multiple of",
                "choose a tp size that divides the key heads, or is a multiple of them",
            )
    elif chain.cuts[chain.row].parts[0] % size:
        refuse(
            f"{chain.row} takes {chain.cuts[chain.row].parts[0]} features, which tp{size} does not"
            " divide",
            "choose a tp size that divides them",
        )


def _check_modules(model: nn.Module, chain: Chain, size: int) -> None:
    problem, fix = unknown_forward(model, chain, size), 'use nn.Linear, or declare it "whole"'
    if problem:
        raise UnsupportedModel(f"roles.{chain.row}", "row", problem, f"{fix} in [roles]")
