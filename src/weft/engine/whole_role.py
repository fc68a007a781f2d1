"""Which line of [roles] leaves a module whole, or its sequences."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from weft.core import Plan, computes_whole_sequences, glob_of_blocks, is_inside
from weft.parallel import FEATURE_AXES, VOCABULARY_AXES


def lines_that_leave_whole(plan: Plan, module: str) -> str:
    """Lines such as `"layers.*.attention" = "whole"`, which leave whole what is cut in a module, or
    around it, in every block; empty where nothing is, or nothing else is: tp needs something."""
    axes = {*FEATURE_AXES, *VOCABULARY_AXES}
    cut: dict[str, set[str]] = {}  # module -> its parameters that are cut
    for step in plan.steps:
        params = {p.name for p in step.params if p.cut is not None and p.axis in axes}
        if params:
            cut[step.module] = cut.get(step.module, set()) | params
    above = module.rpartition(".")[0]
    if module in cut and any(is_inside(above, block) for block in plan.blocks):
        module = above  # one linear of a chain: the others cannot be cut without it
    found = [name for name in cut if is_inside(name, module)]
    while not found and module:
        module = module.rpartition(".")[0]
        found = [name for name in cut if is_inside(name, module)]
    if module in (*plan.blocks, ""):  # its own linears, if any; else all that is cut in it
        found = [name for name in found if name.rpartition(".")[0] == module] or found
    elif found:
        held = {param for name in found for param in cut[name]}
        tied = [name for name in cut if cut[name] & held and not is_inside(name, module)]
        found = [module, *tied]
    globs = dict.fromkeys(glob_of_blocks(plan.blocks, name) for name in found)
    left = [c for c in cut if not any(fnmatchcase(c, g) or fnmatchcase(c, f"{g}.*") for g in globs)]
    return ", ".join(f'"{glob}" = "whole"' for glob in globs) if left else ""


def line_of_whole_sequences(model: nn.Module, plan: Plan, module: str) -> str:
    """A line such as `"layers.*.mixer" = "whole_sequence"` for the innermost module around this one
    that is not torch's own; empty where it holds the blocks, and where it is written."""
    while module and type(model.get_submodule(module)).__module__.startswith("torch.nn"):
        module = module.rpartition(".")[0]
    whole = computes_whole_sequences(plan.steps, module)
    holds = any(block != module and is_inside(block, module) for block in plan.blocks)
    if whole or not module or holds:
        return ""
    return f'"{glob_of_blocks(plan.blocks, module)}" = "whole_sequence"'
