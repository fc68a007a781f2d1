"""Whether collectives of `tp+sequence` can be overlapped with matmuls (asynchronous tensor
parallelism).

Inductor divides an all-gather and the matmuls that read it, or a matmul and the reduce-scatter of
its result, into one part for each rank, and copies a part between GPUs while another is multiplied
(torch's `micro_pipeline_tp`; Wang et al. 2024). The copies need memory that the GPUs share.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import combinations
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._torch import symmetric_memory
from weft.core import CompileOptions, ConfigError, Layout, gather_json
from weft.nn import is_plain_linear
from weft.parallel import FEATURE_AXES, Mesh, plain_product

WITHOUT = "leave async_tp out"


def check_async_tp(options: CompileOptions, layout: Layout, device: torch.device) -> None:
    """Refuse what is known before any process starts.

    Raises:
        ConfigError: a layout without `tp+sequence`, another backend than inductor, a mode with CUDA
            graphs, no GPU, GPUs of this host without access to each other's memory.
    """
    axes = layout.active_axes(*FEATURE_AXES)
    if not axes or not layout.has_option("sequence"):
        _refuse(
            f"{layout} has no all-gather before a matmul and no reduce-scatter after one",
            f"use a layout with tp and its option sequence, as in tp2+sequence, or {WITHOUT}",
        )
    if options.backend != "inductor":
        problem = f"the backend {options.backend} fuses no collective with a matmul"
        _refuse(problem, f'use compile_backend = "inductor", or {WITHOUT}')
    if options.records_cuda_graphs:
        _refuse(
            f"mode {options.mode} records CUDA graphs, in which shared memory cannot grow",
            f'use compile_mode = "default" or "max-autotune-no-cudagraphs", or {WITHOUT}',
        )
    if device.type != "cuda":
        _refuse(f"async_tp needs GPUs that share memory, and this run is on {device.type}", WITHOUT)
    if torch.cuda.device_count() < layout.world:  # on several hosts: its processes will know
        return
    for rank in range(layout.world):
        for a, b in combinations(layout.group_ranks(rank, *axes), 2):
            if not torch.cuda.can_device_access_peer(a, b):
                _refuse_far(f"GPU {a} has no access to the memory of GPU {b}")


def share_memory(mesh: Mesh) -> None:
    """Let the ranks that divide features share memory; all of them call it, once.

    Raises:
        ConfigError: they are on several hosts, or their GPUs share none. The same on each of them.
    """
    group = mesh.group(*FEATURE_AXES)
    assert group is not None
    hosts = sorted(set(gather_json(socket.gethostname(), group)))
    if len(hosts) > 1:
        _refuse_far(f"its ranks are on {len(hosts)} hosts, {hosts[0]} and others")
    # a rank that fails would leave the others waiting: what is known of each is asked first
    far = next((problem for problem in gather_json(_far_peer(group), group) if problem), "")
    if far:
        _refuse_far(far)
    try:
        symmetric_memory.try_to_share(group, mesh.device)
    except RuntimeError as error:
        _refuse_far(str(error).splitlines()[0])
    symmetric_memory.enable(group)


def add_biases_apart(block: nn.Module) -> None:
    """Let linears of a block multiply, then add: inductor fuses nothing with a matmul that adds."""
    for module in block.modules():
        if is_plain_linear(module) and "forward" not in vars(module) and module.bias is not None:
            module.forward = _bias_apart(module)  # type: ignore[method-assign]


def _bias_apart(module: nn.Module) -> Callable[[Tensor], Tensor]:
    product = plain_product(module)

    def forward(x: Tensor) -> Tensor:
        return product(x, module.weight, None) + module.bias  # type: ignore[arg-type, operator]

    return forward


def _far_peer(group: dist.ProcessGroup) -> str:
    """Which GPU of the group this rank's has no access to; "": none that this process sees."""
    own = torch.cuda.current_device()
    names = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
    seen = {str(name): i for i, name in enumerate(names)}
    for name in gather_json(str(names[own]), group):
        other = seen.get(name, own)
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} has no access to the memory of GPU {other}"
    return ""


def _refuse_far(problem: str) -> NoReturn:
    fix = f"give tp ranks of one host whose GPUs have peer access (weft doctor), or {WITHOUT}"
    _refuse(problem, fix)


def _refuse(problem: str, fix: str) -> NoReturn:
    raise ConfigError("train.async_tp", True, problem, fix)
