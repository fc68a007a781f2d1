"""Applies a Plan to a live module: shards its parameters, adds boundaries, wraps what FSDP2
shards.

The user's forward is not edited: inside a boundary it computes on plain local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from weft._torch.fsdp import gather_for_views
from weft.core import (
    COPY,
    DTYPES,
    EXPERTS,
    SUM,
    ActivationSharding,
    Boundary,
    Param,
    Plan,
    Step,
    UnsupportedModel,
    glob_of_blocks,
)
from weft.nn import (
    BatchNorm,
    LocalMultiheadAttention,
    Randomness,
    ShardedRMSNorm,
    is_conv1d,
    is_linear,
    rms_rule,
    set_attribute,
)
from weft.pipeline import PlaceholderTensor

from .axes import batchnorm_axes
from .block_forward import WITHOUT_SEQUENCE, check_single_gradient
from .collectives import Crossing
from .direct_forward import call_forwards_with_hooks
from .divided_arguments import positional_names, take_part
from .expert_dispatch import ExpertCommStats, shard_experts
from .linear_products import LinearProducts, Product
from .low_precision import prepare_low_precision
from .mesh import Mesh
from .tensor_shards import shard_of


def parallelize(
    plan: Plan, model: nn.Module, mesh: Mesh, randomness: Randomness
) -> ExpertCommStats:
    """Make a plan true on a model, in place: parameters become this rank's, and the forward its
    part.

    Args:
        plan: this rank's part of a plan, `plan.of(rank)`.
        model: the whole model, as it is on one device.
        mesh: the process groups of the layout.
        randomness: is told how activations are cut where a module runs.

    Returns:
        What counts the exchanges for experts.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts: dict[
        str, dict[str, Param]
    ] = {}  # by name and axis: of an expert's features, also by experts
    for param in (p for step in plan.steps for p in step.params if p.cut is not None):
        cuts.setdefault(param.name, {})[param.axis] = param
    names = {alias: w.name for w in plan.weights for alias in (w.name, *w.aliases)}
    traffic = ExpertCommStats(mesh.group(EXPERTS))
    products = LinearProducts(plan.float8)
    products.install(model)
    _make_gradients_dense(model)
    _cut_parameters(plan, model, cuts, mesh)
    for step in plan.steps:
        if step.gather is not None:  # what it cuts is in a step of another axis
            continue
        module = modules[step.module]
        for key, value in step.attributes:
            set_attribute(module, key, value)
        held = {
            leaf: cuts.get(names.get(f"{step.module}.{leaf}", ""), {})
            for leaf in module._parameters
        }
        computed = {
            leaf: [p for p in ps.values() if p.axis != EXPERTS] for leaf, ps in held.items()
        }
        product = products.of(step.module, module)
        first = {leaf: found[0] for leaf, found in computed.items() if found}
        _cut_module(module, first, mesh, product)
        if step.mean_over:
            _share_norm(module, step, mesh)
        if step.arguments:
            module.register_forward_pre_hook(_arguments(module, step, mesh), with_kwargs=True)
        if step.dropped is not None:
            _drop_as(module, step.dropped, randomness)
        if step.dispatch is not None:
            shard_experts(model, step.module, step.dispatch, traffic)
        if step.input is not None:
            module.register_forward_pre_hook(_entry(step, mesh, randomness, plan), with_kwargs=True)
        if step.output is not None:
            _leave(module, step, mesh, randomness, plan, product)
    for name in plan.batchnorms:
        group = mesh.group(*batchnorm_axes(plan, name))
        _replace(model, name, BatchNorm.of(modules[name], group))
    prepare_low_precision(model, plan.dtypes, plan.blocks)
    # a batch norm that has been replaced may be a unit by itself
    _gather(plan, dict(model.named_modules(remove_duplicate=False)), mesh)
    call_forwards_with_hooks(model)
    return traffic


def _make_gradients_dense(model: nn.Module) -> None:
    """Sums over ranks and optimizers take dense gradients, which have the same numbers."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, leaf = _owner(model, name)
    setattr(parent, leaf, new)


# ---- parameters ----------------------------------------------------------------------------------


def _cut_parameters(
    plan: Plan, model: nn.Module, cuts: dict[str, dict[str, Param]], mesh: Mesh
) -> None:
    for weight in plan.weights:
        params = [p for p in cuts.get(weight.name, {}).values() if p.stored != COPY]
        if not params:
            continue
        owner, leaf = _owner(model, weight.name)
        whole = owner.get_parameter(leaf)
        local = whole.detach()
        for param in params:
            assert param.cut is not None
            local = shard_of(local, param.cut, mesh.index(param.axis), mesh.size(param.axis))
        local = local.clone()
        fresh = nn.Parameter(local, requires_grad=whole.requires_grad)
        for name in (weight.name, *weight.aliases):  # tied tensors stay one tensor
            owner, leaf = _owner(model, name)
            setattr(owner, leaf, fresh)


def _cut_module(module: nn.Module, params: dict[str, Param], mesh: Mesh, product: Product) -> None:
    """Make a linear or an embedding compute with what this rank holds of its parameters."""
    if not params:
        return
    if isinstance(module, nn.Embedding):
        cut = params["weight"].cut
        if cut is not None and cut.dim == 0:  # by columns, a lookup stays what it is
            _cut_embedding(module, params["weight"], mesh)
        return
    shared = {leaf: p for leaf, p in params.items() if p.stored == COPY}
    if shared:

        def view(leaf: str) -> Tensor | None:
            tensor = getattr(module, leaf, None)
            if tensor is None or leaf not in shared:
                return tensor
            param = shared[leaf]
            assert param.cut is not None
            return shard_of(tensor, param.cut, mesh.index(param.axis), mesh.size(param.axis))

        module.forward = lambda x: product(x, view("weight"), view("bias"))  # type: ignore[method-assign, arg-type]
        return
    if is_conv1d(module):
        module.nf = module.weight.shape[1]  # type: ignore[assignment, union-attr]


def _share_norm(module: nn.Module, step: Step, mesh: Mesh) -> None:
    """Make a norm of this rank's features one of all features."""
    (param,), axis = step.params, step.mean_over
    assert param.cut is not None
    rule = rms_rule(module)
    assert rule is not None
    out = Crossing(Boundary({axis: COPY}, {axis: SUM}), False, mesh)
    back = Crossing(Boundary({axis: COPY}, {axis: COPY}), True, mesh)
    features = sum(param.cut.parts)
    ShardedRMSNorm.take_over(module, rule, features, lambda squares: back(out(squares)))


def _drop_as(module: nn.Module, sharding: ActivationSharding, randomness: Randomness) -> None:
    """Make a dropout draw the mask of what is cut so; around it, activations stay as they are."""
    around = list[ActivationSharding]()

    def before(_: nn.Module, __: Any) -> None:
        around.append(randomness.activation_sharding)
        randomness.activation_sharding = sharding

    def after(_: nn.Module, __: Any, ___: Any) -> None:
        randomness.activation_sharding = around.pop()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _cut_embedding(module: nn.Embedding, param: Param, mesh: Mesh) -> None:
    """A token whose row lies elsewhere gives zero; the sum over ranks is the lookup."""
    assert param.cut is not None
    ((start, stop),) = param.cut.intervals(mesh.index(param.axis), mesh.size(param.axis))
    if module.padding_idx is not None:
        module.padding_idx = (
            module.padding_idx - start if start <= module.padding_idx < stop else None
        )  # type: ignore[assignment]
    (rows,), absent = param.cut.parts, list[Tensor]()

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = args
        # a whole table fails on a token without a row; a GPU is not made to wait for that
        if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < rows:
            raise IndexError(f"a token is out of range of the {rows} rows of {param.name}")
        absent.append((ids < start) | (ids >= stop))
        return ((ids - start).masked_fill(absent[-1], 0), *rest)

    def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return out.masked_fill(absent.pop().unsqueeze(-1), 0.0)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _arguments(module: nn.Module, step: Step, mesh: Mesh) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook by which a module takes this rank's part of what it is called with."""
    names = positional_names(module)
    parts = [(name, cut, mesh.index(axis), mesh.size(axis)) for name, axis, cut in step.arguments]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, cut, index, size in parts:  # a compiler sees numbers alone
            args, kwargs = take_part(names, args, kwargs, {name: cut}, index, size)
        return args, kwargs

    return before


# ---- boundaries ----------------------------------------------------------------------------------


def _entry(
    step: Step, mesh: Mesh, randomness: Randomness, plan: Plan
) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
    """A hook that takes the first floating-point tensor among the arguments over the boundary, or
    all tensors; each once, wherever it stands."""
    assert step.input is not None
    every, cross = step.input.every, _crossing(step, step.input, True, mesh)
    glob = glob_of_blocks(plan.blocks, step.module)
    whole = f'write "{glob}" = "whole" under [roles], and no line of what is inside'
    whole += ", or use dp or fsdp"

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if step.activation_sharding is not None:
            randomness.activation_sharding = step.activation_sharding
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if not every:
            check_single_gradient(plan.layout, step.module, whole, args, kwargs)
            tensors = [v for v in tensors if v.is_floating_point()][:1]
            if not tensors:
                problem = f"no floating-point tensor enters {step.module}, whose input is sharded"
                raise UnsupportedModel("layout", str(plan.layout), problem, whole)
        moved: list[tuple[Tensor, Tensor]] = []
        for each in tensors:
            if not any(each is before for before, _ in moved):
                moved.append((each, cross(each)))

        def crossed(value: Any) -> Any:
            return next((after for before, after in moved if value is before), value)

        return tuple(map(crossed, args)), {key: crossed(v) for key, v in kwargs.items()}

    return enter


def _crossing(
    step: Step, boundary: Boundary, entry: bool, mesh: Mesh, total: int | None = None
) -> Callable[[Tensor], Tensor]:
    """What takes a tensor over the boundary. Of one [positions, dim] that is cut by positions,
    samples and positions may be one dim, and come in another order then, which is nothing to what
    looks at each by itself."""
    cross = Crossing(boundary, entry, mesh, total)
    if boundary.every or Shard(1) not in boundary.outside.values():
        return cross
    outside = {axis: Shard(0) if p == Shard(1) else p for axis, p in boundary.outside.items()}
    cross_flat = Crossing(replace(boundary, outside=outside), entry, mesh, total)

    def by_dims(x: Tensor) -> Tensor:
        if x.ndim != 2:
            return cross(x)
        if step.activation_sharding == "heads":
            raise UnsupportedModel(
                "layout",
                str(mesh.layout),
                f"the attention {step.module} is called with samples and positions in one dim",
                f"{WITHOUT_SEQUENCE}, or call it with [samples, positions, features]",
            )
        return cross_flat(x)

    return by_dims


def _leave(
    module: nn.Module,
    step: Step,
    mesh: Mesh,
    randomness: Randomness,
    plan: Plan,
    product: Product,
) -> None:
    boundary = step.output
    assert boundary is not None
    total = _total(step)
    cross = _crossing(step, boundary, False, mesh, total)
    cut = {Shard(0), Shard(1)} & {*boundary.outside.values()}  # samples and positions may be one
    outside: ActivationSharding = "sequence" if cut else "whole"

    def outwards(y: Tensor) -> Tensor:
        y = cross(y)
        randomness.activation_sharding = outside
        return _as_dtensor(y, boundary, mesh, total) if boundary.typed else y

    if isinstance(module, nn.MultiheadAttention) and SUM in boundary.inside.values():
        (axis,) = boundary.inside
        LocalMultiheadAttention.take_over(module, mesh.index(axis), outwards)
        return
    if (
        is_linear(module)
        and SUM in boundary.inside.values()
        and getattr(module, "bias", None) is not None
    ):

        def forward(x: Tensor) -> Tensor:
            return outwards(product(x, module.weight, None)) + module.bias  # type: ignore[arg-type, operator]

        module.forward = forward  # type: ignore[method-assign]
        return

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return outwards(out)
        return type(out)((outwards(out[0]), *out[1:]))

    module.register_forward_hook(hook)


def _total(step: Step) -> int | None:
    """Length of an output's last dim, if ranks divide it: the shards of a vocabulary may differ."""
    if step.output is None or Shard(-1) not in step.output.inside.values():
        return None
    return next(sum(p.cut.parts) for p in step.params if p.cut is not None)


def _as_dtensor(y: Tensor, boundary: Boundary, mesh: Mesh, total: int | None) -> Tensor:
    """A DTensor that carries its placement to whoever reads it (a vocabulary-parallel loss)."""
    assert mesh.device_mesh is not None and total is not None
    ((axis, placement),) = boundary.outside.items()
    assert isinstance(placement, Shard)
    shape = torch.Size((*y.shape[:-1], total))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        y, mesh.device_mesh[axis], [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=stride
    )


# ---- sharded storage -----------------------------------------------------------------------------


def _policy(plan: Plan) -> MixedPrecisionPolicy:
    """Shards are masters. FSDP2 rounds what it gathers; inputs are cast as without sharding."""
    low = DTYPES[plan.precision], DTYPES[plan.reduce]
    given = low if plan.dtypes.low else (None, None)
    return MixedPrecisionPolicy(*given, cast_forward_inputs=False)


def _gather(plan: Plan, modules: dict[str, nn.Module], mesh: Mesh) -> None:
    units = [step for step in plan.steps if step.gather is not None]
    if not units:
        return
    sharded = {param.name for step in units for param in step.params}
    absent = {
        p for p in modules[""].parameters() if isinstance(p, PlaceholderTensor)
    }  # another stage's
    spread = {param.name for step in plan.steps for param in step.params if param.axis == EXPERTS}
    gathering = {step.gather.axis for step in units if step.gather is not None}
    every = {param.name for step in plan.steps for param in step.params if param.axis in gathering}
    absent |= {modules[""].get_parameter(name) for name in (spread | every) - sharded}
    for name in sharded:
        p = modules[""].get_parameter(name)
        if not p.is_contiguous():  # rows of one are sent as they lie in memory
            p.data = p.data.contiguous()
    for step in units:
        gather = step.gather
        assert gather is not None
        offload = (
            CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
            if gather.offload
            else OffloadPolicy()
        )
        together = [modules[name] for name in (step.module, *gather.beside)]
        fully_shard(
            together if gather.beside else together[0],
            mesh=mesh.sharding(gather.axis, across=not plan.uses_custom_dp_sync),
            reshard_after_forward=gather.gathered == "use",
            offload_policy=offload,
            mp_policy=_policy(plan),
            ignored_params=absent or None,
        )
        gather_for_views(together[0])
        # gradients are summed, then divided once by the global weight
        unit: Any = together[0]
        unit.set_gradient_divide_factor(float(gather.copies))
        unit.set_force_sum_reduction_for_comms(True)
