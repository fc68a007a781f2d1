"""torch.compile, block by block: each block's own forward and the loss become graphs. What a layout
does around a block (gathers of FSDP2, keys of dropout, recomputation) stays outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.compiler import (
    CompileCounts,
    CompileLog,
    compiled_by_user,
    cpp_compiler_missing,
    is_compiled_copy,
    keep_saved_tensors,
    overlapping_options,
)
from weft._torch.modules import leave_uncompiled
from weft.core import (
    CompileChoice,
    CompileOptions,
    ConfigError,
    Plan,
    UnsupportedModel,
    function_of_partial,
    nearest,
)
from weft.nn import DeferredLogits
from weft.parallel import BlockForward, Mesh, own_forward

from .async_tp import add_biases_apart, check_async_tp, share_memory
from .microbatch import Batch
from .pipeline.stage_compute import Loss

# kinds of blocks in one class, training and evaluation, shapes
VARIANTS = 64
CHOICES = ("auto", "off", "blocks")
# backends that run a graph as the torch functions that it was traced from
CALLS_TORCH = ("eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager")


def resolve_compile(
    choice: CompileChoice | CompileOptions, plan: Plan, device: torch.device
) -> CompileOptions | None:
    """How to compile; None: not at all.

    Raises:
        ConfigError: a model without repeated blocks, a choice or backend that does not exist, a
            CPU without a C++ compiler, selective recomputation with a backend that compiles
            nothing, async_tp where it cannot be.
    """
    if choice == "off":
        return None
    if choice == "auto":
        return CompileOptions() if device.type == "cuda" and len(plan.blocks) > 1 else None
    if choice != "blocks" and not isinstance(choice, CompileOptions):
        problem = 'is none of "auto", "off" and "blocks"'
        raise ConfigError("train.compile", choice, problem, nearest(str(choice), CHOICES))
    options = choice if isinstance(choice, CompileOptions) else CompileOptions()
    if not plan.blocks:
        raise ConfigError(
            "train.compile",
            "blocks",
            "the model has no list of repeated modules to compile",
            'use "off", and compile modules by module.compile() in the build',
        )
    if plan.offload_activations and options.records_cuda_graphs:
        problem = (
            "CUDA graphs read saved activations at their old addresses, and offloading frees those"
        )
        fix = 'use "default" or "max-autotune-no-cudagraphs", or leave offload_activations out'
        raise ConfigError("train.compile_mode", options.mode, problem, fix)
    known = torch.compiler.list_backends(exclude_tags=())
    if options.backend not in known:
        problem = "torch.compile has no such backend"
        fix = nearest(options.backend, known)
        raise ConfigError("train.compile_backend", options.backend, problem, fix)
    if options.backend in CALLS_TORCH and plan.recompute == "selective":
        problem = (
            "this backend runs the recomputed graph in Python, which would compute attention"
            " and all around it again"
        )
        fix = 'use "aot_eager" or "inductor", or recompute "none" or "full"'
        raise ConfigError("train.compile_backend", options.backend, problem, fix)
    if options.async_tp:
        check_async_tp(options, plan.layout, device)
    if options.backend == "inductor" and device.type == "cpu" and cpp_compiler_missing():
        problem = "inductor compiles for a CPU by a C++ compiler, and finds none"
        fix = 'install g++, or use compile = "off"'
        raise ConfigError("train.compile", "blocks", problem, fix)
    return options


def plan_compilation(
    choice: CompileChoice | CompileOptions, plan: Plan, model: nn.Module, device: torch.device
) -> tuple[CompileOptions | None, Plan]:
    """How to compile, and the plan with a note that says so. Raises Refusal."""
    check_compiled(model, plan.blocks)
    options = resolve_compile(choice, plan, device)
    if options is not None:
        plan = replace(plan, notes=(*plan.notes, f"compiled: {options}"))
    return options, plan


def check_compiled(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Refuse a model that its user compiled as a whole. Raises UnsupportedModel."""
    for name, module in model.named_modules():
        around = [block for block in blocks if block != name and f"{block}.".startswith(name)]
        if is_compiled_copy(module) or (compiled_by_user(module) and around):
            problem = "is compiled as a whole, and the layout must communicate between its blocks"
            fix = 'leave that out and set train.compile = "blocks", or compile each block in place'
            raise UnsupportedModel("model", name or type(module).__name__, problem, fix)


def compiled_modules(
    model: nn.Module, plan: Plan, options: CompileOptions | None
) -> tuple[str, ...]:
    """Names of blocks that become graphs, and of modules that the user compiled."""
    by_user = (name for name, module in model.named_modules() if compiled_by_user(module))
    return *(plan.blocks if options is not None else ()), *by_user


class CompiledBlocks:
    """The compiled forwards of one rank's blocks. They are compiled when they first run. False if
    nothing is to be compiled.

    Args:
        model: the model after it is sharded.
        plan: this rank's part of a plan.
        mesh: the process groups of the layout.
        options: how to compile; None: not at all.
        experts: names of the modules that hold experts, which are left out: which tokens they get
            depends on data.

    Raises:
        ConfigError: GPUs that share no memory, with async_tp.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        options: CompileOptions | None,
        experts: Sequence[str] = (),
    ):
        self.options, self.blocks = options, () if options is None else plan.blocks
        self._model, self._in_use = model, True
        self._log = None if options is None else CompileLog()
        if options is None:
            return
        if any(action.kind == "W" for order in plan.schedule.order for action in order):
            keep_saved_tensors()
        if options.async_tp:
            share_memory(mesh)
        for module in map(model.get_submodule, experts):
            leave_uncompiled(module)

    def __bool__(self) -> bool:
        return self.options is not None

    def compile_blocks(self) -> None:
        """Blocks have got their BlockForward: let them run compiled."""
        overlap = self.options is not None and self.options.async_tp
        for name in self.blocks:
            module = self._model.get_submodule(name)
            forward = own_forward(module)
            if isinstance(forward, BlockForward) and not compiled_by_user(module):
                if overlap:
                    add_biases_apart(module)
                compiler = partial(self._compile, overlap=overlap)
                forward.compile(compiler, lambda: self._in_use)

    def loss(self, loss: Loss) -> Loss:
        """A loss that is compiled where blocks are."""
        if self.options is None:
            return loss
        compiled = self._compile(loss)

        def run(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            logits = getattr(output, "logits", output)
            # deferred logits come in chunks, which leave a compiler nothing to fuse
            plain = not self._in_use or isinstance(logits, DeferredLogits)
            return loss(output, batch) if plain else compiled(output, batch)

        marked = function_of_partial(loss)
        vars(run).update(vars(marked))  # as @vocab_parallel marks it
        run.__name__ = getattr(marked, "__name__", run.__name__)
        return run

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this context nothing that is compiled runs."""
        before, self._in_use = self._in_use, False
        try:
            yield
        finally:
            self._in_use = before

    @property
    def counts(self) -> CompileCounts:
        """What this process has compiled so far."""
        return CompileCounts() if self._log is None else self._log.counts()

    @property
    def reasons(self) -> list[str]:
        """Why forwards were left for Python between two graphs."""
        return [] if self._log is None else self._log.reasons()

    def _compile(self, function: Callable[..., Any], overlap: bool = False) -> Callable[..., Any]:
        """`overlap`: collectives with matmuls; a loss has none that could be."""
        options = self.options
        assert options is not None
        mode = options.mode if options.backend == "inductor" and not overlap else None
        further = overlapping_options(options.mode) if overlap else None
        return torch.compile(
            function,
            backend=options.backend,
            mode=mode,
            options=further,
            recompile_limit=VARIANTS,
        )
