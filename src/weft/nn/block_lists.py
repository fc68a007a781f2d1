"""The repeated blocks of a model: what is gathered, computed again and compiled as one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def block_lists(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The lists of repeated blocks: children, all of one class and not leaves, of a ModuleList or
    Sequential."""
    lists: list[tuple[str, ...]] = []
    for name, module in model.named_modules():
        children = list(module.named_children())
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not children:
            continue
        if any(name == b or name.startswith(b + ".") for blocks in lists for b in blocks):
            continue  # a list inside a block
        first = type(children[0][1])
        repeated = len(children) > 1 or isinstance(module, nn.ModuleList)
        inner = any(True for _ in children[0][1].children()) and any(
            True for _ in children[0][1].parameters()
        )
        if repeated and inner and all(type(child) is first for _, child in children):
            lists.append(tuple(f"{name}.{child}" if name else child for child, _ in children))
    return tuple(lists)


def callable_blocks(model: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """The blocks that a forward can call: in the place of one that only holds modules, as a
    ModuleDict does and a class without a forward, those in it."""
    found: list[str] = []
    for name in blocks:
        module = model.get_submodule(name)
        if type(module).forward is not nn.Module.forward or "forward" in vars(module):
            found.append(name)
            continue
        inside = [f"{name}.{child}" for child, _ in module.named_children()]
        found += callable_blocks(model, inside)
    return tuple(found)
