from __future__ import annotations

import functools
import itertools
import multiprocessing
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft._torch import functional_collectives
from weft.core.errors import ConfigError
from weft.nn import chunked_softmax, losses

IGNORED = losses.IGNORED


def reference(logits, labels):
    """Value and gradient of the sum, by torch, in the dtype of the logits."""
    logits = logits.clone().requires_grad_()
    total = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total.detach(), torch.autograd.grad(total, logits)[0]


def example(vocab, ignored, scale=3.0):
    generator = torch.Generator().manual_seed(vocab)
    logits = scale * torch.randn(3, 7, vocab, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab, (3, 7), generator=generator)
    if ignored == "some":
        labels[:, 4:] = IGNORED
        labels[1, 0] = IGNORED
    elif ignored == "all":
        labels[:] = IGNORED
    return logits, labels


def peak_bytes(run):
    """The most memory that `run` holds at once, beside what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_is_a_sum_and_its_weight(ignored):
    logits, labels = example(11, ignored)
    leaf = logits.clone().requires_grad_()
    total, weight = losses.cross_entropy(leaf, labels)
    total.backward()
    expected, gradient = reference(logits, labels)
    assert total.shape == weight.shape == () and weight.dtype == total.dtype == torch.float64
    assert not weight.requires_grad
    assert torch.equal(total.detach(), expected) and torch.equal(leaf.grad, gradient)
    assert weight.item() == {"none": 21, "some": 11, "all": 0}[ignored]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_chunks_of_tokens(ignored, dtype, monkeypatch):
    """A chunk of two rows, the last of one: the same numbers, and no float32 copy of bfloat16."""
    monkeypatch.setattr(chunked_softmax, "CPU_CHUNK", 25)
    logits, labels = example(11, ignored, scale=1e2)
    leaf = logits.to(dtype).requires_grad_()
    wide = leaf.detach().to(torch.promote_types(dtype, torch.float32))
    expected, gradient = reference(wide, labels)
    total, weight = losses.cross_entropy(leaf, labels)
    (0.5 * total).backward()
    assert total.dtype == weight.dtype == wide.dtype and leaf.grad.dtype == dtype
    tight = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(
        total.detach(), expected, rtol=1e-6 if tight > 1e-6 else tight, atol=0
    )
    torch.testing.assert_close(leaf.grad, (0.5 * gradient).to(dtype), rtol=tight, atol=tight)
    assert weight.item() == {"none": 21, "some": 11, "all": 0}[ignored]
    with pytest.raises(RuntimeError, match="outside the vocabulary of 11"):
        losses.cross_entropy(leaf, labels + 111)


def test_memory_beside_the_gradient_is_a_chunk(monkeypatch):
    monkeypatch.setattr(chunked_softmax, "CPU_CHUNK", 4000)
    logits = torch.randn(100, 1000).bfloat16().requires_grad_()
    labels = torch.randint(1000, (100,))
    losses.cross_entropy(logits, labels)[0].backward()  # what torch allocates once

    def step():
        logits.grad = None
        losses.cross_entropy(logits, labels)[0].backward()

    chunk, rows = 4 * 4000, 64 * 100
    assert peak_bytes(lambda: losses.cross_entropy(logits, labels)) <= chunk + rows
    assert peak_bytes(step) <= logits.nbytes + chunk + rows  # its gradient


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("elements", [25, 2**19])
def test_compiled_in_one_graph(backend, elements, monkeypatch):
    monkeypatch.setattr(chunked_softmax, "CPU_CHUNK", elements)
    logits, labels = example(11, "some")
    torch._dynamo.reset()
    loss = torch.compile(losses.next_token, fullgraph=True, backend=backend)
    for step in range(3):
        leaf = (logits * (step + 1)).requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            total, _ = loss(leaf, {"labels": labels})
            total.backward()
        expected, gradient = reference(leaf.detach(), labels)
        torch.testing.assert_close(total.detach(), expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-14)


def test_operators_are_sound():
    """Fake and autograd rules, as torch checks them."""
    logits, column = torch.randn(5, 30, requires_grad=True), torch.randint(30, (5,))
    ops = torch.ops.weft
    parts = ops.softmax_parts(logits.detach(), column)
    parts = torch.cat([parts, parts[:2]])
    torch.library.opcheck(ops.softmax_parts.default, (logits.detach(), column))
    torch.library.opcheck(ops.token_losses.default, (logits, column, None))
    torch.library.opcheck(ops.token_losses.default, (logits, column, parts))


def test_low_precision_is_summed_in_float32():
    logits, labels = example(11, "some")
    total, weight = losses.cross_entropy(logits.bfloat16(), labels)
    assert total.dtype == weight.dtype == torch.float32
    torch.testing.assert_close(total, reference(logits.bfloat16().float(), labels)[0])


def test_next_token_shifts_input_ids_unless_labels_are_given():
    logits, ids = example(11, "none")
    shifted = torch.full_like(ids, IGNORED)
    shifted[:, :-1] = ids[:, 1:]
    total, weight = losses.next_token(logits, {"input_ids": ids})
    assert weight.item() == 3 * 6
    by_hand = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(total, by_hand, rtol=1e-14, atol=0)
    assert torch.equal(losses.next_token(logits, {"input_ids": ids, "labels": shifted})[0], total)
    aligned, weight = losses.next_token(
        SimpleNamespace(logits=logits), {"input_ids": ids, "labels": ids}
    )
    assert torch.equal(aligned, reference(logits, ids)[0]) and weight.item() == 21


def test_classification_and_mse():
    logits = torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 1, 2])
    expected = F.cross_entropy(logits, labels, reduction="sum")
    for key in ("label", "labels"):
        total, weight = losses.classification(SimpleNamespace(logits=logits), {key: labels})
        assert torch.equal(total, expected) and weight.item() == 5
    total, weight = losses.mse(logits, {"target": torch.zeros(5, 4)})
    torch.testing.assert_close(total, logits.square().sum())
    assert weight.item() == 20 and weight.dtype == torch.float64
    with pytest.raises(ValueError, match=r"\[5, 4\].*\[5, 1\]"):
        losses.mse(logits, {"target": torch.zeros(5, 1)})


def test_which_losses_take_sharded_logits():
    assert losses.accepts_sharded_logits(losses.next_token)
    assert losses.accepts_sharded_logits(
        functools.partial(functools.partial(losses.classification))
    )
    assert not losses.accepts_sharded_logits(losses.mse)
    assert not losses.accepts_sharded_logits(functools.partial(losses.mse))
    assert losses.next_token.__name__ == "next_token"


# ---- several processes: the last dim of the logits sharded ---------------------------------------


def spawn(world, check, folder: Path):
    """Run check(mesh) in `world` forked processes joined by gloo; raise what one of them raised."""
    context = multiprocessing.get_context("fork")
    errors = context.Queue()
    workers = [
        context.Process(target=worker, args=(r, world, check, folder, errors)) for r in range(world)
    ]
    for process in workers:
        process.start()
    reports = [errors.get(timeout=60) for _ in workers]
    for process in workers:
        process.join(10)
    assert not any(reports), "\n".join(filter(None, reports))


def worker(rank, world, check, folder, errors):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
        check(DeviceMesh("cpu", torch.arange(world)))
        dist.destroy_process_group()
        errors.put(None)
    except BaseException:
        errors.put(traceback.format_exc())


def shard(logits, mesh):
    """This rank's slice of the last dim as a leaf, and the DTensor that it is part of."""
    chunks = logits.chunk(mesh.size(), dim=-1)
    rank = mesh.get_local_rank()
    leaf = (chunks[rank] if rank < len(chunks) else logits[..., :0]).clone().requires_grad_()
    whole = DTensor.from_local(
        leaf,
        mesh,
        [Shard(logits.dim() - 1)],
        run_check=False,
        shape=logits.shape,
        stride=logits.stride(),
    )
    return leaf, whole


def slice_of(full, mesh):
    chunks = full.chunk(mesh.size(), dim=-1)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full[..., :0]


def check_equal(mesh, vocab, ignored):
    logits, labels = example(vocab, ignored)
    expected, gradient = reference(logits, labels)
    leaf, whole = shard(logits, mesh)
    total, weight = losses.next_token(whole, {"labels": labels})
    assert not isinstance(total, DTensor) and total.shape == weight.shape == ()
    (0.5 * total).backward()
    assert type(leaf.grad) is torch.Tensor and leaf.grad.shape == leaf.shape
    assert (total - expected).abs() <= 1e-12 * expected.abs().clamp(min=1)
    assert torch.isfinite(leaf.grad).all()
    torch.testing.assert_close(leaf.grad, 0.5 * slice_of(gradient, mesh), rtol=0, atol=1e-12)
    assert weight.item() == (labels != IGNORED).sum()


def check_all(mesh):
    for vocab in (
        101,
        8,
        mesh.size() - 1,
    ):  # uneven, even (or uneven over 3), one rank with nothing
        for ignored in ("none", "some", "all"):
            check_equal(mesh, vocab, ignored)


def check_rest(mesh):
    logits, labels = example(101, "some")
    # Large logits must not overflow, and the samples of a classifier are sharded as tokens are.
    leaf, whole = shard(1e4 * logits[:, 0], mesh)
    total, _ = losses.classification(whole, {"label": labels[:, 0]})
    torch.testing.assert_close(
        total, reference(1e4 * logits[:, 0], labels[:, 0])[0], rtol=1e-12, atol=0
    )
    # bfloat16 in, float32 between, bfloat16 gradient out.
    leaf, whole = shard(logits.bfloat16(), mesh)
    total, weight = losses.cross_entropy(whole, labels)
    total.backward()
    expected, gradient = reference(logits.bfloat16().float(), labels)
    assert total.dtype == weight.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(leaf.grad, slice_of(gradient, mesh).bfloat16(), rtol=1e-2, atol=1e-6)
    # A label that is ignored may be a word, such as a padding token.
    leaf, whole = shard(logits, mesh)
    total, weight = losses.cross_entropy(whole, labels.clamp(min=0), ignore_index=0)
    total.backward()
    expected, gradient = reference(logits, labels.masked_fill(labels == 0, IGNORED))
    torch.testing.assert_close(total.detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(leaf.grad, slice_of(gradient, mesh), rtol=0, atol=1e-12)
    # Words that are masked out everywhere, on one rank all of them.
    masked = logits.clone()
    masked[..., len(logits[0, 0].chunk(mesh.size())[0]) :] = -torch.inf
    first = labels.clamp(max=10)
    leaf, whole = shard(masked, mesh)
    total, weight = losses.cross_entropy(whole, first)
    total.backward()
    expected, gradient = reference(masked, first)
    torch.testing.assert_close(total.detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(leaf.grad, slice_of(gradient, mesh), rtol=0, atol=1e-12)
    # Labels outside the vocabulary are refused, as F.cross_entropy does.
    with pytest.raises(RuntimeError, match="outside the vocabulary of 101"):
        losses.cross_entropy(shard(logits, mesh)[1], labels + 101)
    # Every rank holds all: nothing to reduce. A partial sum is no logit.
    expected, gradient = reference(logits, labels)
    leaf = logits.clone().requires_grad_()
    total, _ = losses.cross_entropy(DTensor.from_local(leaf, mesh, [Replicate()]), labels)
    total.backward()
    assert torch.equal(total.detach(), expected) and torch.equal(leaf.grad, gradient)
    with pytest.raises(ValueError, match="partial"):
        losses.cross_entropy(DTensor.from_local(logits, mesh, [Partial()]), labels)


class Collectives(TorchDispatchMode):
    """Records the name of every collective."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def check_collectives(mesh):
    """One maximum and one pair of sums per token, whatever the vocabulary; none in backward."""
    reduced = []

    def all_reduce(x, op, group):
        reduced.append((op, tuple(x.shape), group.group_name))
        return functional_collectives.all_reduce(x, op, group)

    losses.all_reduce = all_reduce  # of this process alone
    logits, labels = example(101, "some")
    grid = DeviceMesh("cpu", torch.arange(mesh.size()).view(-1, 1), mesh_dim_names=("dp", "tp"))
    for on, placements in ((mesh, [Shard(2)]), (grid, [Replicate(), Shard(2)])):
        leaf = shard(logits, mesh)[0] if on is mesh else logits.clone().requires_grad_()
        whole = DTensor.from_local(
            leaf, on, placements, run_check=False, shape=logits.shape, stride=logits.stride()
        )
        with Collectives() as record:
            total, _ = losses.cross_entropy(whole, labels)
            total.backward()
        group = on.get_group(len(placements) - 1).group_name
        assert reduced == [("max", (21,), group), ("sum", (2, 21), group)]
        assert record.seen == ["allreduce_.default"] * 2
        reduced.clear()
        assert losses.reduced_numels(21) == (21, 42)


def check_compiled():
    """One graph, the same at every step."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    logits, labels = example(101, "some")
    expected, gradient = reference(logits, labels)
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        loss = torch.compile(losses.next_token, fullgraph=True, backend=backend)
        for step in range(3):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                leaf, whole = shard(logits * (step + 1), mesh)
                expected, gradient = reference(logits * (step + 1), labels)
                total, weight = loss(whole, {"labels": labels})
                total.backward()
            torch.testing.assert_close(total.detach(), expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(leaf.grad, slice_of(gradient, mesh), rtol=0, atol=1e-12)
            assert weight.item() == 11
        with pytest.raises(RuntimeError, match="outside the vocabulary of 101"):
            loss(shard(logits, mesh)[1], {"labels": labels + 101})


def check_two_axes(mesh):
    """The batch on one axis, the vocabulary on the other: reductions stay on the second."""
    grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = grid.get_coordinate()
    logits, labels = (t.repeat(2, *[1] * (t.dim() - 1)) for t in example(101, "some"))
    logits[3:] += torch.arange(101) / 50
    mine = slice(3 * dp, 3 * dp + 3)
    leaf = logits[mine].chunk(2, dim=-1)[tp].clone().requires_grad_()
    whole = DTensor.from_local(
        leaf,
        grid,
        [Shard(0), Shard(2)],
        run_check=False,
        shape=logits.shape,
        stride=logits.stride(),
    )
    total, weight = losses.cross_entropy(whole, labels[mine])
    total.backward()
    expected, gradient = reference(logits[mine], labels[mine])
    torch.testing.assert_close(total.detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(leaf.grad, gradient.chunk(2, dim=-1)[tp], rtol=0, atol=1e-12)
    assert weight.item() == 11


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", [check_all, check_rest, check_collectives])
def test_vocabulary_parallel(world, check, tmp_path):
    spawn(world, check, tmp_path)


def test_vocabulary_parallel_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(chunked_softmax, "CPU_CHUNK", 120)  # two or three rows
    spawn(2, check_all, tmp_path)


def test_vocabulary_parallel_compiled(pool):
    pool.run(check_compiled, world=2)


def test_vocabulary_parallel_beside_data_parallel(tmp_path):
    spawn(4, check_two_axes, tmp_path)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (torch.zeros(()), "returns one tensor of shape \\[\\], not \\(sum, weight\\). Return"),
        (torch.zeros(2), "returns one tensor of shape \\[2\\]"),
        ((torch.zeros(3), 3), "returns \\(one tensor of shape \\[3\\], int\\)"),
        ((0.5, 3), "returns \\(float, int\\)"),
        ((torch.zeros(()),) * 3, "not \\(sum, weight\\)"),
        (None, "returns NoneType"),
    ],
)
def test_a_loss_that_returns_no_sum_and_weight_is_refused(found: Any, says: str) -> None:
    def mine(output: Any, batch: Any) -> Any:
        return found

    with pytest.raises(ConfigError, match=f"loss = 'mine': .*{says}"):
        losses.weighed_loss(mine, torch.zeros(2), {})
    total = torch.zeros(())
    for weight in (3, 3.0, torch.ones(())):
        assert losses.weighed_loss(lambda *_: (total, weight), None, {}) == (total, weight)  # noqa: B023
    for weight in (np.float32(3), np.int64(3), torch.full((1,), 3.0)):
        found = losses.weighed_loss(lambda *_: (torch.ones(1), weight), None, {})  # noqa: B023
        assert (found[0].shape, float(found[1])) == ((), 3.0)
        assert not isinstance(found[1], np.generic)


def test_an_engine_refuses_such_a_loss() -> None:
    model = torch.nn.Linear(2, 2)

    def mean(output: Any, batch: Any) -> Any:
        return output.mean()

    plan = weft.plan(model, "dp1", batch=4)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=mean, device="cpu")
    for call in (engine.step, engine.evaluate):
        with pytest.raises(ConfigError, match="loss = 'mean': returns one tensor"):
            call({"input": torch.zeros(4, 2)})
