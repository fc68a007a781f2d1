"""Which modules hold experts, and what of each expert is divided."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from weft.core import DimShard

from .role_types import ExpertsRole


def find_experts(model: nn.Module) -> Iterator[ExpertsRole]:
    """Modules called with (tokens [n, dim], experts [n, k], weights [n, k]), of whose parameters
    dim 0 counts experts, as in transformers."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _why_no_experts(module) is None:
            count, names = _expert_count(module), [*inspect.signature(module.forward).parameters]
            prefix = name.rpartition(".")[0] + "." if "." in name else ""
            shared = [
                prefix + leaf
                for leaf in ("shared", "shared_expert", "shared_experts", "shared_mlp")
            ]
            held = (o for o in shared if o in modules and _takes_tokens_alone(modules[o]))
            beside = [*modules[prefix.rstrip(".")].parameters()]
            widths = {
                p.shape[1] for p in beside if p.ndim == 2 and p.shape[0] == count
            }  # of the gate
            yield ExpertsRole(
                name,
                count,
                _features_inside(name, module, widths),
                tuple(names[:3]),
                next(held, ""),
            )


def _expert_count(module: nn.Module) -> int:
    """How many experts a module says that it has, of two or more, 0 for none."""
    count = getattr(module, "num_experts", None)
    return (
        count
        if isinstance(count, int) and count > 1 and any(True for _ in module.parameters())
        else 0
    )


def _takes_tokens_alone(module: nn.Module) -> bool:
    """Whether it can be called with tokens, while those of other experts travel."""
    given = inspect.signature(module.forward).parameters.values()
    needed = [p for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(needed) == 1


def why_none_of(model: nn.Module) -> str:
    """The module that is most like one that holds experts, and why it is not taken for one. Empty
    where none is like one."""

    def differs(module: nn.Module) -> tuple[bool, bool]:
        return not module._parameters, not _takes_routing(module)

    near = [(n, m) for n, m in model.named_modules() if n and (_expert_count(m) or _is_stack(m))]
    near.sort(key=lambda each: differs(each[1]))
    told = (f"{name} is not taken for experts: {_why_no_experts(m)}" for name, m in near)
    return next(told, "")


def _takes_routing(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) >= 3


def _is_stack(module: nn.Module) -> bool:
    """Whether all its matrices are several, one behind the other, none lies in a part of it, it is
    none of torch's, and takes a routing."""
    own = not type(module).__module__.startswith("torch.nn.")
    matrices = [p for p in module.parameters() if p.ndim > 1]
    held = sum(p is not None and p.ndim > 1 for p in module._parameters.values())
    stacks = bool(matrices) and all(p.ndim > 2 and p.shape[0] > 1 for p in matrices)
    return own and stacks and held == len(matrices) and _takes_routing(module)


def _why_no_experts(module: nn.Module) -> str | None:
    """Why a module that counts experts, or is like one that holds them, is not taken for one."""
    if not _expert_count(module):
        if not hasattr(module, "num_experts"):
            return "it has no attribute num_experts"
        return f"its num_experts is {module.num_experts!r}, no count of two or more"
    inner = next(
        (name for name, child in module.named_children() if any(True for _ in child.parameters())),
        None,
    )
    if inner is not None:
        return f"its part {inner} holds weights, and not the module itself"
    for name, p in module.named_parameters():
        if p.ndim < 2 or p.shape[0] != _expert_count(module):
            return (
                f"its parameter {name} {list(p.shape)} has no part for each of"
                f" {_expert_count(module)} experts"
            )
    if not _takes_routing(module):
        return "its forward does not take (tokens, experts, weights)"
    return None


def _features_inside(name: str, module: nn.Module, widths: set[int]) -> dict[str, DimShard]:
    """How to divide what is inside of each expert: of two weights, the one that makes its features
    (or two of them, a gate's beside) and the one that takes them, [experts, out, in] or [experts,
    in, out]. Nothing, where the shapes tell more than one way. `widths` of tokens, if known."""
    held = [(f"{name}.{leaf}", tuple(p.shape)) for leaf, p in module.named_parameters()]
    if len(held) != 2 or any(len(shape) != 3 for _, shape in held):
        return {}
    found: list[dict[str, DimShard]] = []
    for (up, made), (down, taken) in (held, held[::-1]):
        for out, into in ((1, 2), (2, 1)):
            width = taken[into]
            tokens = made[into] == taken[out] and (made[into] in widths or not widths)
            if tokens and made[out] in (width, 2 * width):
                parts = (width,) * (made[out] // width)
                cuts = {up: DimShard(out, parts, parts), down: DimShard(into, (width,), (width,))}
                found += [cuts] if cuts not in found else []
    return found[0] if len(found) == 1 else {}
