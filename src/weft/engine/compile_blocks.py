"""torch.compile, block by block: each block's own forward and the loss become graphs. What a layout
does around a block (gathers of FSDP2, keys of dropout, recomputation) stays outside of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from weft._torch.compiler import CompileLog, compiled_by_user, is_compiled_copy
from weft.core import CompileChoice, CompileOptions, ConfigError, Plan, UnsupportedModel
from weft.parallel import BlockForward

# kinds of blocks in one class, training and evaluation, shapes
VARIANTS = 64


def resolve_compile(
    choice: CompileChoice | CompileOptions, plan: Plan, device: torch.device
) -> CompileOptions | None:
    """How to compile; None: not at all.

    Raises:
        ConfigError: "blocks" of a model without repeated blocks, or an unknown choice.
    """
    if isinstance(choice, CompileOptions) or choice == "blocks":
        if not plan.blocks:
            raise ConfigError(
                "train.compile",
                "blocks",
                "the model has no list of repeated modules, which would be compiled",
                'use "off", and compile modules by module.compile() in the build',
            )
        return choice if isinstance(choice, CompileOptions) else CompileOptions()
    if choice == "auto":
        return CompileOptions() if device.type == "cuda" and len(plan.blocks) > 1 else None
    if choice == "off":
        return None
    raise ConfigError("train.compile", choice, "is no choice", 'use "auto", "off" or "blocks"')


def check_compiled(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Refuse a model that its user compiled as a whole. Raises UnsupportedModel."""
    for name, module in model.named_modules():
        around = [block for block in blocks if block != name and f"{block}.".startswith(name)]
        if is_compiled_copy(module) or (compiled_by_user(module) and around):
            problem = "is compiled around what a layout does between its blocks"
            fix = 'leave that out and set train.compile = "blocks", or compile each block in place'
            raise UnsupportedModel("model", name or type(module).__name__, problem, fix)


class CompiledBlocks:
    """The compiled forwards of one rank's blocks. They are compiled when they first run.

    Args:
        model: the model after it is sharded.
        plan: this rank's part of a plan.
        options: how to compile.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: CompileOptions):
        self._log = CompileLog()
        self._compile = partial(
            torch.compile,
            backend=options.backend,
            mode=None if options.backend != "inductor" else options.mode,
            recompile_limit=VARIANTS,
        )
        self.blocks = plan.blocks
        for name in self.blocks:
            module = model.get_submodule(name)
            if isinstance(module.forward, BlockForward) and not compiled_by_user(module):
                module.forward.compile(self._compile)

    def loss(self, loss: Any) -> Any:
        """The loss, compiled."""
        return self._compile(loss)

    @property
    def counts(self) -> Any:
        """What was compiled so far in this process."""
        return self._log.counts()
