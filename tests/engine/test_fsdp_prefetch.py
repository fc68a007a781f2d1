"""Gathers of weights ahead of their use: their order, and that their number stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Subject, batch_of, seeded, tokens
from tests.staged import STAGED
from tests.verification.test_parity import run
from weft.core.errors import ConfigError
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.verification.case import Batch

DEEP = Subject(partial(decoder, VOCAB, 16, 6, 2, 2, seq_len=LENGTH), tokens, next_token)


class Backwards(nn.Module):
    """Holds its blocks in the other order than that in which it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class RecordedGather:
    """Notes when a unit's gather starts, and gathers as FSDP2 does."""

    def __init__(self, name: str, events: list[tuple[str, str]]):
        self.name, self.events = name, events

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self.events.append(("gather", self.name))
        return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


def stepped(subject: Subject, layout: str) -> tuple[weft.Engine, Batch]:
    """An engine after its first step, and the batch of it."""
    case = subject.case()
    model = case.model()
    engine = weft.Engine(
        model, case.plan(model, layout), optimizer=case.optimizer, loss=case.loss, device="cpu"
    )
    data = batch_of(subject, 0, 0, 1)
    engine.step(engine.local(data))
    return engine, data


def events_of(subject: Subject, layout: str) -> list[tuple[str, str]]:
    """What happens to the blocks of this rank in the second step, which has one microbatch: gather,
    forward, backward."""
    engine, data = stepped(subject, layout)
    events: list[tuple[str, str]] = []
    for unit in engine.units:
        if not unit.name:
            continue
        unit.module.set_custom_all_gather(RecordedGather(unit.name, events))

        def begins(*_: Any, name: str = unit.name) -> None:
            events.append(("forward", name))

        def ends(_: nn.Module, __: Any, out: Tensor, name: str = unit.name) -> None:
            out.register_hook(lambda _: events.append(("backward", name)))

        unit.module.register_forward_pre_hook(begins)
        unit.module.register_forward_hook(ends)
    engine.step(engine.local(data))
    return events


def ahead(events: list[tuple[str, str]], kind: str) -> list[int]:
    """As each block's forward or backward begins: how many of those that come after it have their
    gather under way. Fails where one runs that has not been gathered."""
    order = [name for what, name in events if what == kind]
    turn = max(i for i, (what, _) in enumerate(events) if what == "forward")
    phase = events[: turn + 1] if kind == "forward" else events[turn + 1 :]
    found = []
    for place, name in enumerate(order):
        gathered = [n for what, n in phase[: phase.index((kind, name))] if what == "gather"]
        assert name in gathered
        found.append(sum(later in gathered for later in order[place + 1 :]))
    return found


def with_prefetch(subject: Subject, depth: int | None, **more: Any) -> Subject:
    return replace(
        subject, plan=tuple({**dict(subject.plan), "fsdp_prefetch": depth, **more}.items())
    )


@pytest.mark.grid(5, ci=5)
@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        ("decoder", "fsdp2", "none"),
        ("decoder", "fsdp2", "full"),
        ("decoder", "fsdp2+offload", "none"),
        ("decoder", "dp2.fsdp2", "none"),
        ("backwards", "fsdp2", "none"),
    ],
)
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_so_many_gathers_start_before_a_unit_runs(
    pool: Any, name: str, layout: str, recompute: str, depth: int | None
) -> None:
    subject = DEEP if name == "decoder" else Subject(Backwards, tokens, next_token)
    blocks = 6 if name == "decoder" else 4
    subject = with_prefetch(subject, depth, accumulate=1, recompute=recompute)
    world = weft.Layout.parse(layout).world
    events = pool.run(events_of, subject, layout, world=world)[0]
    # by itself FSDP2 gathers none ahead in forward, where gathers have a stream of their own, and
    # one in backward
    for kind, most in (("forward", depth or 0), ("backward", depth or 1)):
        want = [min(most, blocks - 1 - place) for place in range(blocks)]
        assert ahead(events, kind) == want, kind
    assert [what for what, _ in events].count("gather") == 2 * blocks


def test_a_stage_gathers_its_own_units_ahead(pool: Any) -> None:
    subject = with_prefetch(STAGED["decoder"], 2, accumulate=2)
    held = pool.run(staged_events, subject, "pp2+interleaved.fsdp2", world=4)
    for stages in held:
        assert len(stages) == 2
        for names, gathered in stages:
            assert set(gathered) == set(names)  # of this stage, all at its first block


def staged_events(subject: Subject, layout: str) -> list[tuple[list[str], list[str]]]:
    """Of each stage of this rank: its blocks, and those gathered before the first of them ran."""
    engine, data = stepped(subject, layout)
    events: list[tuple[str, str]] = []
    stages: dict[int | None, list[str]] = {}
    for unit in engine.units:
        if unit.name and unit.reduced() is not None:
            unit.module.set_custom_all_gather(RecordedGather(unit.name, events))
            stages.setdefault(unit.stage, []).append(unit.name)

            def begins(*_: Any, name: str = unit.name) -> None:
                events.append(("forward", name))

            unit.module.register_forward_pre_hook(begins)
    engine.step(engine.local(data))
    found = []
    for names in stages.values():
        at = events.index(("forward", names[0]))
        before = events[:at]
        since = max((i for i, (what, _) in enumerate(before) if what == "forward"), default=-1)
        found.append((names, [name for what, name in before[since + 1 :] if what == "gather"]))
    return found


PARITY = [
    ("decoder", "fsdp2", {}),
    ("tied", "fsdp2+zero1", {}),
    ("decoder", "fsdp2+zero2", {"recompute": "full"}),
    ("tied", "fsdp2+offload", {"recompute": "selective"}),
    ("gpt2", "dp2.fsdp2", {"recompute": "full", "accumulate": 2}),
    ("llama", "fsdp2.tp2+sequence", {}),
    ("decoder", "pp2+zb-h1.fsdp2", {}),
    ("tied", "pp2+interleaved.fsdp2", {"recompute": "full"}),
    ("decoder", "fsdp2+zero2.pp2+zb-v", {}),
]


@pytest.mark.grid(3, ci=2)
@pytest.mark.parametrize(("name", "layout", "more"), PARITY)
def test_prefetch_changes_no_number_and_no_collective(
    pool: Any, name: str, layout: str, more: dict[str, Any]
) -> None:
    result = run(pool, with_prefetch(STAGED[name], 2, **more), layout)
    assert result.passed, result


@pytest.mark.grid(2)
@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp2+ep.tp2"])
def test_prefetch_beside_experts(pool: Any, layout: str) -> None:
    mixture = Subject(
        partial(decoder, VOCAB, 32, 3, 4, 2, seq_len=LENGTH, experts=4), tokens, next_token
    )
    result = run(pool, with_prefetch(mixture, 2), layout)
    assert result.passed, result


class Twice(Backwards):
    """Runs each block two times."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


def test_blocks_that_run_twice(pool: Any) -> None:
    found = [
        run(pool, with_prefetch(Subject(Twice, tokens, next_token), depth), "fsdp2")
        for depth in (None, 2)
    ]
    assert all(result.first is None and result.problem is None for result in found), found
    assert found[0].comms_seen == found[1].comms_seen


@pytest.mark.parametrize(
    ("build", "layout", "depth", "text"),
    [
        (DEEP.build, "dp2", 2, "has no effect with layout dp2"),
        (partial(nn.Linear, 2, 2), "fsdp2", 2, "no repeated blocks"),
        (DEEP.build, "fsdp2", 0, "not a number of units"),
    ],
)
def test_prefetch_without_effect_is_refused(build: Any, layout: str, depth: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        weft.plan(seeded(build), layout, batch=8, fsdp_prefetch=depth)
    assert refused.value.field == "train.fsdp_prefetch"


def test_the_plan_says_it() -> None:
    assert "fsdp_prefetch 3" in str(weft.plan(DEEP.build(), "fsdp2", batch=8, fsdp_prefetch=3))
