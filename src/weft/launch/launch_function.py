"""`weft.launch`: a function in the processes of a layout, from Python or a notebook."""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.forks import autograd_survives_fork, cuda_survives_fork
from weft._torch.trees import tree_map
from weft.core import BackendChoice, ConfigError, Layout, function_of_partial, require

from .choose_backend import Backend, choose_backend
from .environment import launched_rank, local_world_size
from .local_workers import StartMethod, join_world, run_workers
from .log import log_line


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

    In a process that torchrun or srun started, no further ones are: this process is one of the
    ranks, and returns what its own call returned.

    Args:
        function: what each rank calls.
        args: its arguments.
        layout: as for `weft.plan`; here it says how many processes there are.
        device: "cuda": a GPU for each rank, by NCCL; "cpu": by gloo. Default: "cuda" if there are
            enough GPUs.
        threads: torch threads of each process. Default: cores over processes.
        every_rank: return a list, the results of all ranks in order; not under torchrun or srun.

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
    if dist.is_initialized():
        problem = "torch.distributed is used in this process: it is a rank already"
        fix = "call the function itself here, or weft.launch from a process that is no rank"
        raise ConfigError("weft.launch", "function", problem, fix)
    _check_call(function, args)
    if not isinstance(layout, str | Layout):
        problem, fix = "is no layout", 'write axes with their sizes, as in "dp2"'
        raise ConfigError("layout", layout, problem, fix)
    if threads is not None:
        require("threads", threads, int, lambda count: count > 0, "a whole number above 0")
    laid = Layout.parse(layout) if isinstance(layout, str) else layout
    world, found = laid.world, launched_rank()
    call = _RankCall(function, every_rank)
    if found is not None and found[1] > 1:
        _check_launched(laid, found[1], every_rank)
        with join_world(_backend(local_world_size(), device), threads):
            return _RankCall(function, every_rank=True)(*args)
    backend = _backend(world, device)
    start = _start_method(function, backend)
    if start == "spawn":
        _check_guarded()
    results = run_workers(call, world, *args, threads=threads, backend=backend, start=start)
    return results if every_rank else results[0]


def _check_call(function: object, args: tuple) -> None:
    """Refuse what cannot be called with these arguments. Raises ConfigError."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        problem, fix = "cannot be called", "name the function without (), as in weft.launch(train)"
        raise ConfigError("function", function, problem, fix)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        problem, fix = "is a coroutine or a generator, which a call does not run", "use a function"
        raise ConfigError("function", name, problem, fix)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        fix = "give them behind it: weft.launch(function, 1, 2); by name through functools.partial"
        raise ConfigError("function", name, f"does not take {args!r:.60}: {error}", fix) from None
    except ValueError:  # some builtins have no signature
        return


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


def _check_launched(layout: Layout, ranks: int, every_rank: bool) -> None:
    """Refuse a layout for which torchrun or srun has started too few or too many processes. Raises
    ConfigError."""
    if layout.world != ranks:
        problem = f"has {layout.world} ranks, and torchrun or srun has started {ranks} processes"
        raise ConfigError("layout", str(layout), problem, f"start {layout.world} of them")
    if every_rank:
        problem = "each process that torchrun or srun started returns what it computed itself"
        fix = "leave it out, or gather results in the function"
        raise ConfigError("every_rank", every_rank, problem, fix)


def _backend(world: int, device: str | None) -> Backend:
    """NCCL if every rank gets a GPU, else gloo. Raises ConfigError."""
    gpus = torch.cuda.device_count()
    if device not in (None, "cpu", "cuda"):
        raise ConfigError("device", device, "is not a device of weft.launch", 'use "cpu" or "cuda"')
    if device == "cuda" and gpus < world:
        problem = f"the layout has {world} ranks, and this machine has {gpus} GPUs"
        raise ConfigError("device", device, problem, 'use fewer ranks, or device="cpu"')
    if device is None and 0 < gpus < world:
        log_line(f"{world} ranks and {gpus} GPUs on this host: running on the CPU")
    asked: dict[str | None, BackendChoice] = {"cpu": "gloo", "cuda": "nccl", None: "auto"}
    return choose_backend(asked[device], world, "device")


def _start_method(function: Callable[..., Any], backend: Backend) -> StartMethod:
    """How the ranks begin. Raises ConfigError."""
    used = (
        torch.cuda.is_initialized()
        or (backend == "nccl" and not cuda_survives_fork())
        or not autograd_survives_fork()
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


def _check_guarded() -> None:
    """Refuse a launch that new interpreters would come to again, because they import the script.
    Raises ConfigError."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in ("__main__", "__mp_main__") and frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    file = None if frame is None else frame.f_globals.get("__file__")
    if frame is None or file is None or not Path(file).is_file():
        return  # of a notebook, which new interpreters do not import
    for part in ast.parse(Path(file).read_bytes()).body:
        if part.lineno <= frame.f_lineno <= (part.end_lineno or part.lineno):
            tested = ast.walk(part.test) if isinstance(part, ast.If) else ()
            if not any(isinstance(each, ast.Name) and each.id == "__name__" for each in tested):
                problem = f"line {frame.f_lineno} launches whenever the file is imported, and"
                problem += " ranks are new interpreters that import it"
                fix = 'write it below if __name__ == "__main__":'
                raise ConfigError("weft.launch", file, problem, fix)


def _is_importable(function: Callable[..., Any]) -> bool:
    """Whether a new interpreter finds the function by its name."""
    function = function_of_partial(function)
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    main = sys.modules["__main__"]
    return getattr(function, "__module__", None) != "__main__" or hasattr(main, "__file__")
