"""Collectives of tp+sequence overlapped with matmuls: which of them inductor's pass fuses, the
numbers of one device with its fused operators, and what is refused.

The fused operators run on GPUs alone. Here they are torch's own stand-ins, which compute the same
of the same arguments.
"""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as shared

import weft
from tests.cases import Subject, reference, tokens
from tests.engine.test_compile import MODELS, make_engine
from weft.core import CompileOptions, ConfigError, Layout, Refusal
from weft.engine import Audit, async_tp, compile_blocks
from weft.parallel import Mesh, collective_totals
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference

OVERLAPPED = CompileOptions(async_tp=True)
OPERATORS = {
    "gather + matmul": torch.ops.symm_mem.fused_all_gather_matmul.default,
    "matmul + scatter": torch.ops.symm_mem.fused_matmul_reduce_scatter.default,
    "gather": torch.ops._c10d_functional.all_gather_into_tensor.default,
    "scatter": torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
Counts = dict[str, int]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@contextmanager
def stand_ins() -> Iterator[list[Counts]]:
    """Inside this context async_tp works on the CPU. Yields what inductor's pass leaves in each
    graph that has any of OPERATORS."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    graphs: list[Counts] = []
    fuse = post_grad.micro_pipeline_tp_pass

    def fuse_and_count(graph: torch.fx.Graph) -> None:
        fuse(graph)
        targets = Counter(node.target for node in graph.nodes)
        found = {name: targets[each] for name, each in OPERATORS.items() if targets[each]}
        if found:
            graphs.append(found)

    library = torch.library.Library("symm_mem", "FRAGMENT")
    library.impl("fused_all_gather_matmul", shared._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", shared._fused_matmul_reduce_scatter_fallback, "CPU")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for patch in (
            mock.patch.object(compile_blocks, "check_async_tp"),
            mock.patch.object(compile_blocks, "share_memory"),
            mock.patch.object(dist, "is_nccl_available", lambda: True),
            mock.patch.object(post_grad, "micro_pipeline_tp_pass", fuse_and_count),
            config.patch(force_disable_caches=True),  # a graph of another run has passed the pass
            shared._test_mode(),
        ):
            stack.enter_context(patch)
        yield graphs


def overlapped_layout(
    case: Case, layout: str, held_to: Reference
) -> tuple[LayoutResult, list[Counts]]:
    torch.compiler.reset()
    with stand_ins() as graphs:
        return check_layout(case, layout, held_to), graphs


# of a block: both chains gather before their first matmuls and scatter after their last one. In
# backward a scatter comes after one matmul only where one matmul read what was gathered
FORWARD = {"gather + matmul": 2, "matmul + scatter": 2}
SUMMED = {"gather + matmul": 2, "scatter": 2}


@pytest.mark.slow(ci=False)
@pytest.mark.timeout(900)
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("name", "layout", "options", "backward"),
    [
        ("llama", "tp2+sequence", {}, SUMMED),
        ("decoder", "pp2.tp2+sequence", {"recompute": "full", "accumulate": 2}, SUMMED),
        ("gpt2", "tp2+sequence", {}, FORWARD),
    ],
)
def test_pairs_are_fused_and_equal_one_device(
    pool: Any, name: str, layout: str, options: dict[str, Any], backward: Counts
) -> None:
    subject: Subject = replace(MODELS[name], plan=tuple(options.items()))
    case = replace(subject.case(), compile=OVERLAPPED)
    held_to, world = reference(subject, 2), Layout.parse(layout).world
    result, graphs = pool.run(overlapped_layout, case, layout, held_to, world=world, timeout=800)[0]
    assert graphs == [FORWARD, backward]
    assert result.passed, (result.problem, result.first, result)
    assert result.compiled is not None and not result.compiled.breaks


def collectives(layout: str, options: Any) -> dict[tuple[str, str], tuple[int, int]]:
    torch.compiler.reset()
    with stand_ins():
        engine = make_engine(MODELS["decoder"].build(), layout, options)
        with Audit(engine.mesh) as audit:
            engine.step(engine.local(tokens()))
    return collective_totals(audit.seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fused_operator_counts_as_the_collective_that_it_replaces(pool: Any) -> None:
    plain, fused = (
        pool.run(collectives, "tp2+sequence", options, world=2, timeout=500)[0]
        for options in ("off", OVERLAPPED)
    )
    assert fused == plain
    assert plain["all_gather", "tp"][0] > 6


# ---- what is refused -----------------------------------------------------------------------------


def refusal(layout: str, options: CompileOptions, device: str = "cuda") -> Refusal:
    with pytest.raises(ConfigError) as raised:
        async_tp.check_async_tp(options, Layout.parse(layout), torch.device(device))
    assert raised.value.field == "train.async_tp" and raised.value.value is True
    return raised.value


@pytest.mark.parametrize(
    ("layout", "options", "device", "problem", "fix"),
    [
        ("tp2", OVERLAPPED, "cuda", "tp2 has no all-gather", "tp2+sequence"),
        ("dp2.tp1+sequence", OVERLAPPED, "cuda", "has no all-gather", "tp2+sequence"),
        ("tp2+sequence", replace(OVERLAPPED, backend="eager"), "cuda", "eager", "inductor"),
        ("tp2+sequence", replace(OVERLAPPED, mode="max-autotune"), "cuda", "graphs", "default"),
        ("tp2+sequence", OVERLAPPED, "cpu", "run is on cpu", "leave async_tp out"),
    ],
)
def test_what_cannot_be_overlapped_is_refused(
    layout: str, options: CompileOptions, device: str, problem: str, fix: str
) -> None:
    found = refusal(layout, options, device)
    assert problem in found.problem and fix in found.fix


@pytest.mark.parametrize(
    ("layout", "far"), [("dp2.tp2+sequence", (2, 3)), ("tp4+sequence", (0, 3))]
)
def test_gpus_of_this_host_without_peer_access_are_refused(
    layout: str, far: tuple[int, int]
) -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 4),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda *pair: pair != far),
    ):
        found = refusal(layout, OVERLAPPED)
    assert f"GPU {far[0]} has no access to the memory of GPU {far[1]}" in found.problem


def test_gpus_of_other_pairs_need_no_peer_access() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 4),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2),
    ):
        device = torch.device("cuda")
        async_tp.check_async_tp(OVERLAPPED, Layout.parse("dp2.tp2+sequence"), device)
        assert "no access" in refusal("tp4+sequence", OVERLAPPED).problem


def share_between(hosts: list[str], peers: bool, shares: bool) -> tuple[str, list[str]]:
    """What a rank is told, and which groups were enabled."""
    mesh = Mesh(Layout.parse("tp2+sequence"), torch.device("cpu"))
    rank, enabled = mesh.rank, list[str]()
    memory = async_tp.symmetric_memory

    def share(*_: Any) -> None:
        if not shares:
            raise RuntimeError("no handle\nat symmetric_memory.cpp")

    kinds = [mock.Mock(uuid=uuid) for uuid in ("one", "other")]
    with (
        mock.patch.object(socket, "gethostname", lambda: hosts[rank]),
        mock.patch.object(torch.cuda, "current_device", lambda: rank),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "get_device_properties", lambda i: kinds[i]),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: peers or a != 1),
        mock.patch.object(memory, "try_to_share", share),
        mock.patch.object(memory, "enable", lambda group: enabled.append(group.group_name)),
    ):
        try:
            async_tp.share_memory(mesh)
        except ConfigError as error:
            return error.problem, enabled
    return "", enabled


@pytest.mark.parametrize(
    ("hosts", "peers", "shares", "says"),
    [
        (["a", "b"], True, True, "its ranks are on 2 hosts, a and others"),
        (["a", "a"], False, True, "GPU 1 has no access to the memory of GPU 0"),
        (["a", "a"], True, False, "no handle"),
    ],
)
def test_ranks_that_share_no_memory_say_so_together(
    pool: Any, hosts: list[str], peers: bool, shares: bool, says: str
) -> None:
    assert pool.run(share_between, hosts, peers, shares, world=2) == [(says, [])] * 2


def test_ranks_that_share_memory_are_enabled(pool: Any) -> None:
    for said, enabled in pool.run(share_between, ["a", "a"], True, True, world=2):
        assert said == "" and len(enabled) == 1


def test_an_engine_and_its_plan_say_it() -> None:
    model = MODELS["decoder"].build()
    plan = weft.plan(model, "tp2+sequence", batch=8, loss=MODELS["decoder"].loss)
    with pytest.raises(ConfigError, match=r"train\.async_tp"):
        compile_blocks.plan_compilation(OVERLAPPED, plan, model, torch.device("cpu"))
    with mock.patch.object(compile_blocks, "check_async_tp"):
        device = torch.device("cpu")
        _, noted = compile_blocks.plan_compilation(OVERLAPPED, plan, model, device)
    assert "tp overlapped with matmuls" in str(noted)
