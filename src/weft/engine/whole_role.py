"""Which lines of [roles] leave modules whole, or their sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from weft.core import Layout, Plan, Step, UnsupportedModel, glob_of_blocks, is_inside
from weft.nn import WHOLE_SEQUENCE
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


# a fix together with lines of [roles]
FIX_OR_LINES = "{fix}, or write {lines} under [roles]"
FIX_OR_LINES_IF_MIXED = "{fix}; or, if that module mixes positions, write {lines} under [roles]"
LINES_AROUND = "write {lines} under [roles], or use dp or fsdp"


class MixesPositions(UnsupportedModel):
    """A module does not compute on a part of the positions, and might on whole sequences.

    Attributes:
        module: where.
        advice: one of the texts above.
    """

    module = ""
    advice = FIX_OR_LINES

    @classmethod
    def of(cls, layout: Layout, problem: str, fix: str, module: str, advice: str = advice) -> Self:
        made = cls("layout", str(layout), problem, fix)
        made.module, made.advice = module, advice
        return made

    def with_lines(self, globs: Iterable[str]) -> UnsupportedModel:
        """The refusal that names these lines too; there may be none."""
        lines = ", ".join(f'"{glob}" = "{WHOLE_SEQUENCE}"' for glob in globs)
        fix = self.advice.format(fix=self.fix, lines=lines) if lines else self.fix
        return UnsupportedModel(self.field, self.value, self.problem, fix)


def glob_to_be_whole(model: nn.Module, plan: Plan, module: str) -> str:
    """The glob, such as "layers.*.mixer", of the innermost module around this one that has no whole
    sequences yet and is not torch's own; empty where there is none that can have them."""
    around = [s.module for s in plan.steps if s.whole_sequence and is_inside(module, s.module)]
    module = around[0].rpartition(".")[0] if around else module
    while module and type(model.get_submodule(module)).__module__.startswith("torch.nn"):
        module = module.rpartition(".")[0]
    holds = any(_is_below(block, module) for block in plan.blocks)
    if not module or holds or plan.layout.has_option("sequence"):  # which tp's ranks part once more
        return ""
    return glob_of_blocks(plan.blocks, module)


def with_whole_sequences(model: nn.Module, plan: Plan, glob: str) -> Plan:
    """The plan with the modules of this glob, and what is in them, on whole sequences."""
    found = [name for name, _ in model.named_modules() if fnmatchcase(name, glob)]
    names = [name for name in found if not any(_is_below(name, outer) for outer in found)]
    others = (
        step
        for step in plan.steps
        if not (step.whole_sequence and any(is_inside(step.module, name) for name in names))
    )
    steps = (Step(name, "context", whole_sequence=True) for name in names)
    return replace(plan, steps=(*others, *steps))


def _is_below(module: str, outer: str) -> bool:
    return module != outer and is_inside(module, outer)
