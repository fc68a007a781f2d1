"""`weft.launch`: a function in the processes of a layout, from Python or a notebook."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.forks import autograd_survives_fork, cuda_survives_fork
from weft._torch.trees import tree_map
from weft.core import ConfigError, Layout

from .environment import launched_rank
from .local_workers import StartMethod, run_workers
from .log import log_line
from .rank_process import Backend


def launch(
    function: Callable[..., Any],
    *args: Any,
    layout: str | Layout,
    device: Literal["cpu", "cuda"] | None = None,
    threads: int | None = None,
    every_rank: bool = False,
) -> Any:
    """Run `function(*args)` in a process for each rank of a layout, on this machine; the result of
    rank 0. Works in notebooks, also with functions that are defined there.

    In each process torch.distributed is ready: the function makes its plan and its `Engine`, as a
    script of torchrun does. If it raises in one process, the others are ended, and the error has
    that rank's traceback. No process is left when `launch` returns, raises or is interrupted.

    On Linux the processes are forked: they have everything that is defined here, and begin at once.
    Where CUDA has been used in this process already, which no fork survives, they are new
    interpreters; then the function must come from a module or a script's file, and not from a
    notebook.

    Args:
        function: what each rank calls.
        args: its arguments.
        layout: as for `weft.plan`; here it says how many processes there are.
        device: "cuda": a GPU for each rank, by NCCL; "cpu": by gloo. Default: "cuda" if there are
            enough GPUs.
        threads: torch threads of each process. Default: cores over processes.
        every_rank: return a list, the results of all ranks in order.

    Returns:
        What the function returned, with tensors in tuples, lists and dicts on the CPU.

    Raises:
        Refusal: it cannot run here.
        WorkerDied: a process failed; it has the traceback of the rank that failed first.

    Example:
        >>> launch(dist.get_world_size, layout="dp2")
        2
        >>> launch(dist.get_rank, layout="fsdp2", every_rank=True)
        [0, 1]
    """
    _check_first_launch()
    world = (Layout.parse(layout) if isinstance(layout, str) else layout).world
    backend = _backend(world, device)
    call = _RankCall(function, every_rank)
    start = _start_method(function, backend)
    results = run_workers(call, world, *args, threads=threads, backend=backend, start=start)
    return results if every_rank else results[0]


@dataclass(frozen=True)
class _RankCall:
    """The function as a rank calls it, whose result travels to the parent only if it is wanted."""

    function: Callable[..., Any]
    every_rank: bool

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        if dist.get_rank() and not self.every_rank:
            return None
        # a parent that gets tensors of a GPU would use CUDA, and then fork no more
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, result)


def _check_first_launch() -> None:
    """Refuse to start ranks from a rank. Raises ConfigError."""
    found = launched_rank()
    if dist.is_initialized() or (found is not None and found[1] > 1):
        what = "torchrun or srun has started this process" if found else "torch.distributed is used"
        problem = f"{what}: it is a rank already"
        fix = "call the function itself here, or weft.launch from a process that is no rank"
        raise ConfigError("weft.launch", "function", problem, fix)


def _backend(world: int, device: str | None) -> Backend:
    """NCCL if every rank gets a GPU, else gloo. Raises ConfigError."""
    gpus = torch.cuda.device_count()
    if device not in (None, "cpu", "cuda"):
        raise ConfigError("device", device, "is no device of weft.launch", 'use "cpu" or "cuda"')
    if device == "cuda" and gpus < world:
        problem = f"the layout has {world} ranks, and this machine {gpus} GPUs"
        raise ConfigError("device", device, problem, 'use fewer ranks, or device="cpu"')
    if device is None and 0 < gpus < world:
        log_line(f"{world} ranks and {gpus} GPUs on this host: running on the CPU")
    return "nccl" if device != "cpu" and gpus >= world else "gloo"


def _start_method(function: Callable[..., Any], backend: Backend) -> StartMethod:
    """How the ranks begin. Raises ConfigError."""
    used = (
        torch.cuda.is_initialized()
        or (backend == "nccl" and not cuda_survives_fork())
        or (torch.cuda.device_count() > 0 and not autograd_survives_fork())
    )
    if sys.platform == "linux" and not used:
        return "fork"
    if _is_importable(function):
        return "spawn"
    why = "CUDA has been used in this process" if used else f"{sys.platform} forks no process"
    again = "restart Python and call weft.launch before anything else asks for CUDA, or " * used
    raise ConfigError(
        "function",
        getattr(function, "__qualname__", repr(function)),
        f"{why}, so ranks are new interpreters, which cannot import what is defined in a notebook,"
        " in another function or on standard input",
        f"{again}put the function in a module",
    )


def _is_importable(function: Callable[..., Any]) -> bool:
    """Whether a new interpreter finds the function by its name."""
    while isinstance(function, partial):
        function = function.func
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    main = sys.modules["__main__"]
    return getattr(function, "__module__", None) != "__main__" or hasattr(main, "__file__")
