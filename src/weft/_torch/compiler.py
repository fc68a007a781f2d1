"""What torch.compile has done in this process. `torch.compiler` has no public counters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class CompileCounts:
    """Since a CompileLog began.

    Args:
        seconds: in which something was compiled.
        graphs: that were compiled.
        breaks: places where a forward was left for Python between two graphs.
        recompilations: of code that had been compiled before, for other types, shapes or values.
    """

    seconds: float = 0.0
    graphs: int = 0
    breaks: int = 0
    recompilations: int = 0

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs in {self.seconds:.1f} s, {self.breaks} breaks,"
            f" {self.recompilations} recompilations"
        )


class CompileLog:
    """Counts what is compiled from now on.

    Uses the counters and callbacks of torch._dynamo, which its own tests and logs use.
    """

    def __init__(self) -> None:
        from torch._dynamo import callback, utils  # takes a second

        self._counters = utils.counters
        self._graphs, self._breaks = self._so_far()
        self._seconds, self._began, self._recompilations = 0.0, 0.0, 0
        callback.callback_handler.register_start_callback(self._start)
        callback.callback_handler.register_end_callback(self._end)

    def counts(self) -> CompileCounts:
        """Until now."""
        graphs, breaks = self._so_far()
        return CompileCounts(
            self._seconds, graphs - self._graphs, breaks - self._breaks, self._recompilations
        )

    def reasons(self) -> list[str]:
        """Why forwards were left for Python, in this process."""
        return [str(reason) for reason in self._counters["graph_break"]]

    def _so_far(self) -> tuple[int, int]:
        counters = self._counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def _start(self, event: Any) -> None:
        self._began = time.perf_counter()
        _, _, times = str(event.compile_id).partition("/")  # as in 3/1: code 3, a second time
        if "DYNAMO" in str(event.callback_trigger) and times.partition("_")[0] not in ("", "0"):
            self._recompilations += 1

    def _end(self, event: Any) -> None:
        self._seconds += time.perf_counter() - self._began


def keep_saved_tensors() -> None:
    """Graphs that are compiled from now on keep what they saved for backward until it has ended, so
    that a backward may retain its graph, as one in two parts does."""
    from torch._functorch import config

    config.donated_buffer = False


def overlapping_options(mode: str) -> dict[str, Any]:
    """What torch.compile takes as `options` for inductor in this mode, with the pass that fuses
    matmuls and the collectives around them (micro-pipelining). It names that pass by no public
    option."""
    import torch._inductor

    return {**torch._inductor.list_mode_options(mode), "_micro_pipeline_tp": True}


def forget_compile_threads() -> None:
    """In a forked process, let inductor make new threads to compile in: it would wait without end
    for those of the parent. Torch itself forgets its processes there, and not its threads."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        inductor.AsyncCompile.pool.cache_clear()


def cpp_compiler_missing() -> bool:
    """Whether inductor finds no C++ compiler, without which it compiles nothing for a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return True
    return False


def compiled_by_user(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Torch does not tell."""
    return module._compiled_call_impl is not None


def before_compiled_call(module: nn.Module, hook: Callable[[], None]) -> None:
    """Call `hook()` before each call of a module whose `compile()` was called, outside of its
    graph: its forward hooks are inside, and Python values that they change would be guarded."""
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        hook()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call  # type: ignore[assignment]


def is_compiled_copy(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made this module, which holds the other as `_orig_mod`."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
