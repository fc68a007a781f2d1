"""Activations that rest in the host's memory: the numbers of a run without, freed storages, and the
order in which blocks come back.

Here the device is the CPU and "the host" other tensors of it: what is a copy over PCIe there is a
copy in memory here, and what must leave the device must be freed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
import weft.engine.engine
import weft.engine.setup
from tests.cases import LENGTH, VOCAB, Subject, batch_of, reference, seeded, tokens
from tests.staged import STAGED
from weft._torch.tensors import StorageWeakRef, storage_id
from weft.core import CompileOptions
from weft.core.errors import ConfigError, UnsupportedModel
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.parallel import ActivationOffload
from weft.parallel.host_copies import HostCopies
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult


class OwnCopies(HostCopies[int]):
    """Copies within the CPU's memory, which take effect as late as those of a GPU may: what was
    started is done when it is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.out: list[Tensor] = []  # what the host holds, by number
        self.originals: list[StorageWeakRef] = []
        self._numbers: dict[int, int] = {}
        self._under_way: list[tuple[int, Tensor, Tensor]] = []
        self._moment = 0

    def start_out(self, data: Tensor) -> Tensor:
        host = torch.full_like(data, 255)
        self._start(host, data)
        self._numbers[storage_id(host)] = len(self.originals)
        self.events.append(("out", (len(self.originals),)))
        self.originals.append(StorageWeakRef(data.untyped_storage()))
        return host

    def mark_out(self) -> int:
        return self._mark()

    def start_back(self, held: Sequence[Tensor], after: int) -> tuple[list[Tensor], int]:
        self.wait(after)
        self.events.append(("back", tuple(self._numbers[storage_id(host)] for host in held)))
        here = [torch.full_like(host, 255) for host in held]
        for device, host in zip(here, held, strict=True):
            self._start(device, host)
        return here, self._mark()

    def wait(self, mark: int) -> None:
        for _, target, source in [each for each in self._under_way if each[0] <= mark]:
            target.copy_(source)
        self._under_way = [each for each in self._under_way if each[0] > mark]

    def _start(self, target: Tensor, source: Tensor) -> None:
        self._under_way.append((self._moment, target, source))

    def _mark(self) -> int:
        self._moment += 1
        return self._moment - 1


@contextmanager
def on_this_cpu(smallest: int = 1) -> Iterator[list[OwnCopies]]:
    """Inside of it an Engine offloads activations on the CPU; gets the copies that it makes."""
    made: list[OwnCopies] = []

    def make(plan: weft.Plan, device: torch.device) -> ActivationOffload | None:
        if not plan.offload_activations:
            return None
        made.append(OwnCopies())
        return ActivationOffload(made[-1], smallest)

    with (
        mock.patch.object(weft.engine.engine, "make_offload", make),
        mock.patch.object(weft.engine.setup, "check_offload_device", lambda *_: None),
    ):
        yield made


# ---- the same numbers ----------------------------------------------------------------------------


def engine_of(subject: Subject, layout: str, compile: Any = "off") -> weft.Engine:
    case, further = subject.case(), dict(subject.plan)
    model = case.model()
    plan = case.plan(model, layout)
    if layout == "dp1":  # as the reference is planned: without
        plan = replace(plan, offload_activations=further["offload_activations"])
    optimizer, loss = case.optimizer, case.loss
    return weft.Engine(model, plan, optimizer=optimizer, loss=loss, device="cpu", compile=compile)


def with_offload(subject: Subject, **more: Any) -> Subject:
    return replace(
        subject, plan=tuple({**dict(subject.plan), "offload_activations": True, **more}.items())
    )


def bits(subject: Subject, layout: str, compile: Any = "off") -> tuple[list[Tensor], int]:
    """Every gradient and weight of this rank after two steps; how many storages came back."""
    torch.compiler.reset()
    with on_this_cpu() as made:
        engine = engine_of(subject, layout, compile)
        found = []
        for step in range(2):
            engine.step(engine.local(batch_of(subject, step, 0, 1)))
            found += [p.grad.clone() for p in engine.params.values() if p.grad is not None]
        found += [p.detach().clone() for p in engine.params.values()]
        back = sum(len(n) for copies in made for what, n in copies.events if what == "back")
    return [getattr(t, "_local_tensor", t) for t in found], back


def same_bits(subject: Subject, layout: str, compile: Any = "off") -> tuple[bool, int]:
    plain, _ = bits(subject, layout, compile)
    offloaded, back = bits(with_offload(subject), layout, compile)
    pairs = zip(plain, offloaded, strict=True)
    return bool(plain) and all(torch.equal(a, b) for a, b in pairs), back


DROPOUT = Subject(
    partial(decoder, VOCAB, 32, 3, 4, 2, seq_len=LENGTH, dropout=0.2), tokens, next_token
)
LAYOUTS = ["dp2", "fsdp2", "tp2", "fsdp2.tp2", "pp2", "tp2+sequence", "fsdp2+zero2", "cp2"]


@pytest.mark.grid
@pytest.mark.parametrize("recompute", ["none", "selective", "full", 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes(pool: Any, layout: str, recompute: Any) -> None:
    subject = replace(DROPOUT, plan=(("accumulate", 2), ("recompute", recompute)))
    world = weft.Layout.parse(layout).world
    found = pool.run(same_bits, subject, layout, world=world)
    assert all(same for same, _ in found)
    assert any(back for _, back in found)  # of few blocks of a last stage none leaves


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_no_bit_changes_with_compiled_blocks(pool: Any, layout: str, recompute: Any) -> None:
    subject = replace(DROPOUT, plan=(("accumulate", 2), ("recompute", recompute)))
    compiled = CompileOptions(backend="aot_eager")
    found = pool.run(same_bits, subject, layout, compiled, world=2)
    assert all(same for same, _ in found) and any(back for _, back in found)


def checked(case: Any, layout: str, held_to: Any) -> LayoutResult:
    torch.compiler.reset()
    with on_this_cpu():
        return check_layout(case, layout, held_to)


PARITY = [
    ("decoder", "pp2+gpipe", "none"),
    ("decoder", "pp2+zb-h1", "none"),
    ("tied", "pp2+zb-v", "full"),
    ("decoder", "pp2+dualpipev.fsdp2", "selective"),
    ("llama", "pp2+interleaved", "full"),
    ("gpt2", "pp2+interleaved-zb", "none"),
    ("decoder", "pp4+zb-h2", "none"),
    ("t5", "pp2", "full"),
    ("convnet", "pp2", "none"),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout", "recompute"), PARITY)
def test_pipelines_equal_one_device(pool: Any, name: str, layout: str, recompute: str) -> None:
    subject = with_offload(STAGED[name], recompute=recompute)
    world = weft.Layout.parse(layout).world
    result = pool.run(checked, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, result


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_stages_that_meet_inside_a_block(pool: Any, schedule: str) -> None:
    subject = with_offload(STAGED["decoder"], cut=("blocks.1.mlp",))
    result = pool.run(checked, subject.case(), f"pp2+{schedule}", reference(subject), world=2)[0]
    assert result.passed, result


@pytest.mark.grid
@pytest.mark.parametrize("layout", ["ep2", "fsdp2+ep", "ep2.tp2", "cp2+gather", "ulysses2"])
def test_experts_and_sequences_equal_one_device(pool: Any, layout: str) -> None:
    experts = {"experts": 4} if "ep" in layout else {}
    subject = with_offload(
        Subject(partial(decoder, VOCAB, 32, 3, 4, 2, seq_len=LENGTH, **experts), tokens, next_token)
    )
    world = weft.Layout.parse(layout).world
    result = pool.run(checked, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, result


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2+sequence", "pp2+zb-h1"])
def test_compiled_blocks_are_neither_broken_nor_compiled_again(pool: Any, layout: str) -> None:
    subject = with_offload(replace(DROPOUT, clip=0.5))
    case = replace(subject.case(), compile=CompileOptions(backend="aot_eager"))
    result = pool.run(checked, case, layout, reference(subject, 5), world=2)[0]
    assert result.passed, result
    assert result.compiled.graphs and not result.compiled.breaks
    assert result.compiled.recompilations == 0


# ---- what leaves the device, and when it comes back ----------------------------------------------


class Block(nn.Module):
    """A linear and what follows it, which both save storages of their own."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def chain(
    blocks: Sequence[nn.Module], offload: ActivationOffload, x: Tensor, key: Any = None
) -> Tensor:
    offload.begin_forward(key)
    for block in blocks:
        with offload.block(block):
            x = block(x)
    return x


def made(count: int = 5) -> tuple[list[Block], Tensor]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(count)], torch.randn(4, 8, dtype=torch.float64)


def gone(copies: OwnCopies) -> list[bool]:
    gc.collect()
    return [ref.expired() for ref in copies.originals]


def test_storages_are_freed_between_forward_and_backward() -> None:
    blocks, x = made()
    x = x.clone()
    copies = OwnCopies()
    out = chain(blocks, ActivationOffload(copies, 1), x)
    del x
    # a block saves its input, which its linear reads, and what tanh made
    assert len(copies.originals) == 2 * 5
    assert gone(copies) == [True] * 6 + [False] * 4  # two blocks stay
    out.sum().backward()
    assert all(gone(copies))


def test_blocks_come_back_one_ahead() -> None:
    blocks, x = made()
    copies = OwnCopies()
    out = chain(blocks, ActivationOffload(copies, 1), x)
    assert [what for what, _ in copies.events] == ["out"] * 10
    left: list[tuple[int, int]] = []
    for place, block in enumerate(blocks):
        block.linear.weight.register_hook(
            lambda _, place=place: left.append((place, len(copies.events) - 10))
        )
    out.sum().backward()
    back = [numbers for what, numbers in copies.events if what == "back"]
    # the last two blocks never left; each other comes at once, when the one after it runs
    assert [sorted(numbers) for numbers in back] == [[4, 5], [2, 3], [0, 1]]
    assert left == [(4, 0), (3, 1), (2, 2), (1, 3), (0, 3)]


def test_gradients_are_those_without() -> None:
    blocks, x = made()
    for offload in (None, ActivationOffload(OwnCopies(), 1)):
        y = x.clone()
        for block in blocks:
            if offload is None:
                y = block(y)
        y = y if offload is None else chain(blocks, offload, x)
        y.pow(2).sum().backward()
        if offload is None:
            want = [p.grad.clone() for block in blocks for p in block.parameters()]
            for block in blocks:
                block.zero_grad()
    got = [p.grad for block in blocks for p in block.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


class Sharing(nn.Module):
    """Saves several views of one storage, a table that other blocks save too, and its weight."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 24, dtype=torch.float64))
        self.register_buffer("scale", torch.rand(8, dtype=torch.float64))
        self.tables = [table]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight).chunk(3, -1)
        return x + torch.sin(q * k * v) * self.tables[0] * self.scale


def test_each_storage_is_copied_once_and_weights_stay() -> None:
    torch.manual_seed(0)
    table, x = torch.rand(8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    blocks = [Sharing(table) for _ in range(3)]
    copies = OwnCopies()
    own = {storage_id(t) for b in blocks for t in (*b.parameters(), *b.buffers())}
    with mock.patch.object(copies, "start_out", wraps=copies.start_out) as out:
        result = chain(blocks, ActivationOffload(copies, 1), x)
    started = [storage_id(call.args[0]) for call in out.call_args_list]
    assert storage_id(table) in started and not own & set(started)
    # of a block: its input, q with k and v, q * k, and that times v; and the table
    assert len(started) == 3 * 4 + 1
    result.sum().backward()
    got = [b.weight.grad.clone() for b in blocks]
    for b in blocks:
        b.zero_grad()
    y = x
    for b in blocks:
        y = b(y)
    y.sum().backward()
    assert all(torch.equal(a, b.weight.grad) for a, b in zip(got, blocks, strict=True))


def test_small_tensors_stay() -> None:
    blocks, x = made()
    nbytes = x.numel() * 8
    for smallest, copied in ((nbytes, 10), (nbytes + 1, 0)):
        copies = OwnCopies()
        chain(blocks, ActivationOffload(copies, smallest), x)
        assert len(copies.originals) == copied


def test_under_full_recomputation_inputs_alone_leave() -> None:
    blocks, x = made()
    x.requires_grad_()
    copies = OwnCopies()
    offload = ActivationOffload(copies, 1)
    offload.begin_forward(None)
    y = x * 1.0
    for block in blocks:
        with offload.block(block):
            y = checkpoint(block, y, use_reentrant=False)
    assert len(copies.originals) == 5
    assert gone(copies) == [True] * 3 + [False] * 2
    y.sum().backward()
    got = x.grad.clone()
    z = x.detach().clone().requires_grad_()
    y = z
    for block in blocks:
        y = block(y)
    y.sum().backward()
    assert torch.equal(got, z.grad)


def test_a_second_backward_reads_the_host_again() -> None:
    """As where W follows B: what B has read leaves the device before W comes."""
    blocks, x = made()
    copies = OwnCopies()
    out = chain(blocks, ActivationOffload(copies, 1), x)
    weights = [p for block in blocks for p in block.parameters()]
    first = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    assert gone(copies) == [False] + [True] * 9  # x is ours
    second = torch.autograd.grad(out.sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    back = [numbers for what, numbers in copies.events if what == "back"]
    assert len(back) > 5


def test_forwards_of_several_microbatches_and_their_backwards_in_any_order() -> None:
    blocks, x = made()
    copies = OwnCopies()
    offload = ActivationOffload(copies, 1)
    outs = {key: chain(blocks, offload, x * (key + 1), key) for key in range(3)}
    for key in (1, 0, 2):
        offload.begin_backward(key)
        outs.pop(key).sum().backward()
        if key == 1:  # the last forward's blocks have left for it
            assert sum(not freed for freed in gone(copies)) == 0
    got = [p.grad.clone() for block in blocks for p in block.parameters()]
    for block in blocks:
        block.zero_grad()
    for key in (1, 0, 2):
        y = x * (key + 1)
        for block in blocks:
            y = block(y)
        y.sum().backward()
    want = [p.grad for block in blocks for p in block.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_saved_tensor_that_is_changed_is_noticed() -> None:
    blocks, x = made(3)
    offload = ActivationOffload(OwnCopies(), 1)
    offload.begin_forward(None)
    with offload.block(blocks[0]):
        y = torch.tanh(blocks[0].linear(x))
    y.mul_(2)
    for block in blocks[1:]:
        with offload.block(block):
            y = block(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_a_step_keeps_on_the_device() -> None:
    """Through the engine: at the first backward, the device holds what two blocks have saved."""
    with on_this_cpu(smallest=8 * LENGTH * 16) as made:
        deep = Subject(
            partial(decoder, VOCAB, 16, 6, 2, 2, seq_len=LENGTH),
            tokens,
            next_token,
            (("accumulate", 1), ("offload_activations", True)),
        )
        engine = engine_of(deep, "dp1")
        alive: list[int] = []
        real = engine.loss

        def loss(output: Any, batch: Any) -> Any:
            alive.append(sum(not freed for freed in gone(made[0])))
            return real(output, batch)

        engine._training.loss = loss
        engine.step(batch_of(deep, 0, 0, 1))
    total = len(made[0].originals)
    # two of six blocks; the table of positions is the model's own
    assert alive == [pytest.approx(total / 3, abs=1)]


# ---- refusals ------------------------------------------------------------------------------------


def test_on_a_cpu_it_is_refused() -> None:
    model = seeded(DROPOUT.build)
    plan = weft.plan(model, "dp1", batch=8, offload_activations=True)
    assert "activations offloaded" in str(plan)
    with pytest.raises(ConfigError, match="whose memory is host memory already") as refused:
        weft.Engine(
            model, plan, optimizer=partial(torch.optim.SGD, lr=1), loss=next_token, device="cpu"
        )
    assert refused.value.field == "train.offload_activations"


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no list of repeated blocks"):
        weft.plan(nn.Linear(2, 2), "dp1", batch=8, offload_activations=True)


def test_cuda_graphs_are_refused() -> None:
    from weft.engine import resolve_compile

    plan = weft.plan(seeded(DROPOUT.build), "dp1", batch=8, offload_activations=True)
    with pytest.raises(ConfigError, match="CUDA graphs"):
        resolve_compile(CompileOptions("reduce-overhead"), plan, torch.device("cuda"))


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks by itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_the_model_checkpoints_are_refused(reentrant: bool) -> None:
    subject = Subject(
        partial(Checkpointed, reentrant), tokens, next_token, (("offload_activations", True),)
    )
    with pytest.raises(UnsupportedModel, match=r"torch\.utils\.checkpoint"):
        bits(subject, "dp1")
