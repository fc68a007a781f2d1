"""The pipeline runtime: any valid schedule gives what one process gives, keeps no more than the
schedule says, and stops with its own error."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import combinations, islice

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.core.errors import UnsupportedModel, WorkerDied
from weft.core.schedule import Action, Schedule
from weft.engine.pipeline.p2p import PipelineTransport
from weft.engine.pipeline.runner import PipelineRunner, Span, ValueRoute
from weft.launch.local_workers import Pool

WIDTH = 4
Key = Callable[
    [Action, list[Action]], float | None
]  # (action, what its rank has done) -> its turn; None: not now


# ---- schedules -----------------------------------------------------------------------------------


def listed(
    name: str, placement: Sequence[int], microbatches: int, split: bool, key: Key
) -> Schedule:
    """Each rank in turn does the ready action with the least key."""
    ranks = 1 + max(placement)
    order: list[list[Action]] = [[] for _ in range(ranks)]
    shape = Schedule(name, tuple(placement), ())
    kinds = ("F", "B", "W") if split else ("F", "B")
    left = [
        Action(k, s, m) for k in kinds for s in range(len(placement)) for m in range(microbatches)
    ]  # type: ignore[arg-type]
    done: set[Action] = set()
    while left:
        ready = [a for a in left if done.issuperset(shape.needs(a))]
        before = len(done)
        for rank in range(ranks):
            mine = [
                (k, a)
                for a in ready
                if placement[a.stage] == rank and (k := key(a, order[rank])) is not None
            ]
            if mine:
                action = min(mine)[1]
                order[rank].append(action)
                done.add(action)
                left.remove(action)
        assert len(done) > before
    return Schedule(name, tuple(placement), tuple(map(tuple, order)))


def in_turn(kinds: str) -> Key:
    return lambda action, _: kinds.index(action.kind)


def at_most(placement: Sequence[int]) -> Key:
    """1F1B: backward first, and as many microbatches under way as there are stages still to
    come."""

    def key(action: Action, done: list[Action]) -> float | None:
        under_way = sum((a.kind == "F") - (a.kind == "B") for a in done if a.stage == action.stage)
        if action.kind == "F" and under_way >= len(placement) - action.stage:
            return None
        return "BFW".index(action.kind)

    return key


def at_random(seed: int) -> Key:
    draw = random.Random(seed)
    return lambda *_: draw.random() if draw.random() < 0.5 else 1.0


def schedules(ranks: int, microbatches: int) -> Iterator[Schedule]:
    chain = list(range(ranks))
    loops, vee = chain + chain, chain + chain[::-1]
    for split in (False, True):
        yield listed("gpipe", chain, microbatches, split, in_turn("FBW"))
        yield listed("1f1b", chain, microbatches, split, at_most(chain))
        yield listed("interleaved", loops, microbatches, split, at_most(loops))
        yield listed("breadth first", loops, microbatches, split, in_turn("FBW"))
        yield listed("vee", vee, microbatches, split, at_most(vee))
        for seed in range(3):
            placement = [chain, vee, random.Random(seed).choices(chain, k=5)][seed]
            placement[:ranks] = chain  # every rank has a stage
            yield listed(f"random {seed}", placement, microbatches, split, at_random(seed))
    full = listed("some split", vee, microbatches, True, at_random(9))
    yield Schedule(
        full.name,
        full.placement,
        tuple(tuple(a for a in order if a.kind != "W" or a.microbatch % 2) for order in full.order),
    )


# ---- a model whose stages exchange all kinds of values -------------------------------------------


class Toy(nn.Module):
    """Stage 0 makes values of all kinds for later ones; each stage passes a main one to the
    next."""

    def __init__(self, stages: int):
        super().__init__()
        torch.manual_seed(0)
        self.stages, last = stages, stages - 1
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages)).double()
        self.tables = nn.ModuleList(nn.Embedding(3, WIDTH) for _ in range(stages)).double()
        self.routes = [ValueRoute(s, (s + 1,), f"main {s}") for s in range(last)]
        self.kinds = (
            ("skip", "ids", "mask", "wave", "scalar", "empty", "half", "rest") if last else ()
        )
        for kind in self.kinds:
            targets = tuple(range(1, stages)) if kind in ("skip", "mask") else (last,)
            self.routes.append(ValueRoute(last - 1 if kind == "rest" else 0, targets, kind))

    def stage(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        names = {route.name: value for value, route in enumerate(self.routes)}
        got = {self.routes[value].name: tensor for value, tensor in received.items()}
        assert sorted(got) == sorted(r.name for r in self.routes if stage in r.targets)
        x = batch(microbatch) if stage == 0 else got[f"main {stage - 1}"]
        h = self.layers[stage](x).tanh() + self.tables[stage](torch.tensor([0, 2, 2])).mean()
        made: dict[str, Tensor] = {}
        if "skip" in got:
            h = torch.where(got["mask"], h + got["skip"], h)
        last = self.stages - 1
        if stage == 0 and last:
            made = {
                "skip": (h * 2).t().contiguous().t(),
                "ids": torch.tensor([microbatch, 1]),
                "mask": x > 0,
                "wave": torch.fft.fft(h).conj(),
                "scalar": h.mean(),
                "empty": h[:0],
                "half": h.to(torch.bfloat16),
            }
        if stage == last - 1:
            made["rest"] = h.cos()
        if stage < last:
            made[f"main {stage}"] = h
            return {names[name]: tensor for name, tensor in made.items()}, None
        if last:
            h = (
                h
                + F.embedding(got["ids"] % 3, self.tables[stage].weight).mean()
                + got["wave"].abs() * got["scalar"]
            )
            h = h + got["empty"].sum() + got["half"].double().sin()
            if microbatch % 2:
                h = h * got["rest"]
        return {}, (h * h).sum()


def batch(microbatch: int) -> Tensor:
    rows = 2 + microbatch % 3
    return torch.randn(
        rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(microbatch)
    )


class Work:
    def __init__(self, toy: Toy):
        self.toy, self.log, self.losses = toy, [], {}

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        made, loss = self.toy.stage(stage, microbatch, received)
        if loss is not None:
            self.losses[microbatch] = loss.item()
        return made, loss

    def before(self, action: Action) -> None:
        self.log.append(action)

    def around_backward(self) -> AbstractContextManager:
        return nullcontext()

    def after(self, action: Action) -> None:
        assert self.log[-1] == action


@cache
def reference(stages: int, microbatches: int) -> tuple[list[Tensor | None], list[float]]:
    """(gradients of all parameters, losses) of one process."""
    toy, losses = Toy(stages), []
    for m in range(microbatches):
        values: dict[int, Tensor] = {}
        for stage in range(stages):
            made, loss = toy.stage(
                stage, m, {v: values[v] for v, r in enumerate(toy.routes) if stage in r.targets}
            )
            values |= made
        assert loss is not None
        losses.append(loss.item())
        loss.backward()
    return [p.grad for p in toy.parameters()], losses


def transport(dynamic_shapes: bool = False) -> PipelineTransport | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {}
    for low, high in combinations(range(world), 2):
        two = dist.new_group([low, high]), dist.new_group([low, high])
        if rank in (low, high):
            groups[low + high - rank] = two
    return PipelineTransport(rank, groups, torch.device("cpu"), dynamic_shapes)


# ---- parity --------------------------------------------------------------------------------------


def parity(
    ranks: int, microbatches: int, every: int = 1, dynamic_shapes: bool = False
) -> list[tuple[str, float]]:
    """(schedule, error of this rank's gradients and losses); each schedule twice, and forward
    alone."""
    line = transport(dynamic_shapes) if ranks > 1 else None
    return [
        (s.name + " split" * s.split, error)
        for s in islice(schedules(ranks, microbatches), 0, None, every)
        for error in _errors(s, line, microbatches)
    ]


def _errors(
    schedule: Schedule, line: PipelineTransport | None, microbatches: int
) -> Iterator[float]:
    rank = dist.get_rank() if line is not None else 0
    if line is not None:
        line._specs.clear()  # another model
    toy = Toy(schedule.stages)
    want, losses = reference(schedule.stages, microbatches)
    pipeline = PipelineRunner(schedule, toy.routes, rank, line)
    signatures = [tuple(batch(m).shape) for m in range(microbatches)]
    for forward_only in (False, True, False):
        toy.zero_grad()
        work = Work(toy)
        with torch.set_grad_enabled(not forward_only):
            pipeline.run(work, signatures, forward_only)
        assert work.log == [a for a in schedule.order[rank] if a.kind == "F" or not forward_only]
        if schedule.placement[-1] == rank:
            assert sorted(work.losses) == list(range(microbatches))
            yield max(abs(work.losses[m] - losses[m]) for m in work.losses)
        for (name, p), wanted in zip(toy.named_parameters(), want, strict=True):
            mine = schedule.placement[int(name.split(".")[1])] == rank
            if not mine or forward_only or wanted is None:
                assert p.grad is None, name
            else:
                assert p.grad is not None, name
                yield (p.grad - wanted).abs().max().item()


@pytest.mark.grid(1)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 5)])
def test_every_schedule_gives_what_one_process_gives(
    pool: Pool, ranks: int, microbatches: int
) -> None:
    for errors in pool.run(parity, ranks, microbatches, world=ranks, timeout=60):
        assert errors and {name: e for name, e in errors if e > 1e-11} == {}


def test_shapes_sent_every_time(pool: Pool) -> None:
    for errors in pool.run(parity, 3, 4, 3, True, world=3, timeout=60):
        assert {name: e for name, e in errors if e > 1e-11} == {}


def test_without_torch_distributed() -> None:
    """Gradient accumulation is a schedule on one rank."""
    assert not dist.is_initialized()
    errors = parity(1, 4)
    assert errors and max(e for _, e in errors) < 1e-11


# ---- messages ------------------------------------------------------------------------------------


class Two:
    """Two stages, one value of `shape(microbatch)`."""

    def __init__(self, shape: Callable[[int], tuple[int, ...]], requires_grad: bool = True):
        self.shape, self.w = shape, torch.ones((), requires_grad=requires_grad)

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        if stage == 0:
            return {0: torch.ones(self.shape(microbatch)) * self.w}, None
        return {}, received[0].sum() * self.w

    def around_backward(self) -> AbstractContextManager:
        return nullcontext()

    def before(self, action: Action) -> None: ...

    after = before


def counted(requires_grad: bool, dynamic_shapes: bool) -> list[tuple[int, int]]:
    line = transport(dynamic_shapes)
    assert line is not None
    other = (
        1 - dist.get_rank()
    )  # NCCL takes turns within a group: what flows the other way must not wait for this
    assert line._to[other][0] is not line._from[other].group
    pipeline = PipelineRunner(
        listed("gpipe", [0, 1], 3, False, in_turn("FB")),
        [ValueRoute(0, (1,), "h")],
        dist.get_rank(),
        line,
    )
    counts = []
    for _ in range(2):
        line.messages = line.bytes = 0
        pipeline.run(Two(lambda m: (5,), requires_grad), ["same"] * 3)
        counts.append((line.messages, line.bytes))
    return counts


HEADER = 11 * 8


@pytest.mark.parametrize(
    ("requires_grad", "dynamic_shapes", "source", "target"),
    [
        (True, False, [(4, HEADER + 60), (3, 60)], [(3, 60), (3, 60)]),
        (False, False, [(4, HEADER + 60), (3, 60)], [(0, 0), (0, 0)]),
        (True, True, [(6, 3 * HEADER + 60)] * 2, [(3, 60), (3, 60)]),
    ],
)
def test_what_is_sent(
    pool: Pool, requires_grad: bool, dynamic_shapes: bool, source: list, target: list
) -> None:
    """One header for a shape, none for gradients; no gradient for what needs none."""
    assert pool.run(counted, requires_grad, dynamic_shapes, world=2, timeout=60) == [source, target]


def shaped(dynamic_shapes: bool, *shape_of_last: int) -> float:
    line = transport(dynamic_shapes)
    work = Two(lambda m: shape_of_last if m == 2 else (5,))
    schedule = listed("gpipe", [0, 1], 3, False, in_turn("FB"))
    PipelineRunner(schedule, [ValueRoute(0, (1,), "h")], dist.get_rank(), line).run(
        work, ["same"] * 3
    )
    assert work.w.grad is not None
    return work.w.grad.item()


def test_a_shape_that_follows_from_the_data(pool: Pool) -> None:
    assert pool.run(shaped, True, 7, world=2, timeout=60) == [17.0, 17.0]
    with pytest.raises(
        UnsupportedModel, match=r"value h = 'float32\[7\].*was float32\[5\].*dynamic_shapes"
    ):
        pool.run(shaped, False, 7, world=2, timeout=60)


def test_more_dimensions_than_a_header_takes(pool: Pool) -> None:
    with pytest.raises(UnsupportedModel, match=r"value h = .* header cannot describe it"):
        pool.run(shaped, True, *[1] * 9, world=2, timeout=60)


def sends_kept() -> int:
    """Most sends that this rank holds while it goes forward and backward in turn."""
    line = transport()
    assert line is not None
    most = 0

    class Watched(Two):
        def before(self, action: Action) -> None:
            nonlocal most
            most = max(most, *(len(sent) for sent in line._sent.values()))

        after = before

    placement = list(range(dist.get_world_size()))
    schedule = listed("1f1b", placement, 20, False, at_most(placement))
    PipelineRunner(schedule, [ValueRoute(0, (1,), "h")], dist.get_rank(), line).run(
        Watched(lambda m: (5,)), ["same"] * 20
    )
    assert not any(line._sent.values())
    return most


def test_what_was_sent_is_let_go(pool: Pool) -> None:
    assert max(pool.run(sends_kept, world=2, timeout=60)) <= 4


# ---- errors --------------------------------------------------------------------------------------


class Fails(Work):
    def __init__(self, toy: Toy, at: Action):
        super().__init__(toy)
        self.at = at

    def before(self, action: Action) -> None:
        super().before(action)
        if action == self.at:
            raise ArithmeticError(f"in {action}")


def failing(action: Action) -> None:
    line, toy = transport(), Toy(4)
    schedule = listed("1f1b", range(4), 6, False, at_most(range(4)))
    PipelineRunner(schedule, toy.routes, dist.get_rank(), line).run(
        Fails(toy, action), list(range(6))
    )


@pytest.mark.parametrize("action", [Action("F", 1, 3), Action("B", 2, 1)])
def test_an_error_stops_all_ranks(pool: Pool, action: Action) -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerDied, match=f"rank {action.stage} died:(.|\n)*ArithmeticError: in {action}"
    ):
        pool.run(failing, action, world=4, timeout=60)
    assert time.monotonic() - started < 30  # nobody waited for the one that is gone


def test_an_error_leaves_nothing_behind() -> None:
    toy = Toy(3)
    schedule = listed("gpipe", [0, 0, 0], 2, False, in_turn("FB"))
    pipeline = PipelineRunner(schedule, toy.routes, 0)
    with pytest.raises(ArithmeticError):
        pipeline.run(Fails(toy, Action("B", 1, 0)), [0, 1])
    toy.zero_grad()
    pipeline.run(Work(toy), [0, 1])
    for p, wanted in zip(toy.parameters(), reference(3, 2)[0], strict=True):
        torch.testing.assert_close(p.grad, wanted)


# ---- memory --------------------------------------------------------------------------------------


class Counting:
    """Stages that save one tensor per microbatch; `log`: before each action, which saved tensors
    and outputs live."""

    def __init__(self, stages: int):
        self.stages, self.log = stages, []
        self.weights = [torch.ones(3, requires_grad=True) for _ in range(stages)]
        self.saved: dict[tuple[int, int], weakref.ref] = {}
        self.made: dict[tuple[int, int], weakref.ref] = {}

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        x = received[stage - 1] if stage else torch.ones(3)

        def pack(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone()
            self.saved[stage, microbatch] = weakref.ref(copy)
            return copy

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            h = x * self.weights[stage]
        h = h if stage < self.stages - 1 else h.sum()
        self.made[stage, microbatch] = weakref.ref(h)
        return ({stage: h}, None) if stage < self.stages - 1 else ({}, h)

    def before(self, action: Action) -> None:
        self.log.append((action, _living(self.saved), _living(self.made)))

    def around_backward(self) -> AbstractContextManager:
        return nullcontext()

    def after(self, action: Action) -> None: ...


@pytest.mark.parametrize(
    "schedule", list(schedules(2, 4)), ids=lambda s: s.name + " split" * s.split
)
def test_a_microbatch_lives_as_long_as_the_schedule_says(schedule: Schedule) -> None:
    gc.disable()
    try:
        placement = (0,) * schedule.stages
        actions = _merged(schedule)
        split = {a[1:] for a in actions if a.kind == "W"}
        routes = [ValueRoute(s, (s + 1,), str(s)) for s in range(schedule.stages - 1)]
        work = Counting(schedule.stages)
        PipelineRunner(Schedule("one rank", placement, (actions,)), routes, 0).run(work, [0] * 4)
    finally:
        gc.enable()
    saved: set[tuple[int, int]] = set()
    made: set[tuple[int, int]] = set()
    for action, saved_now, made_now in work.log:
        assert (saved_now, made_now) == (saved, made), action
        if action.kind == "F":
            saved.add(action[1:])
            made.add(action[1:])
        elif action.kind == "B":
            made.discard(action[1:])
        if action.kind == "W" or (action.kind == "B" and action[1:] not in split):
            saved.discard(action[1:])
    assert not saved


def _living(refs: dict[tuple[int, int], weakref.ref]) -> set[tuple[int, int]]:
    return {key for key, ref in refs.items() if ref() is not None}


def _merged(schedule: Schedule) -> tuple[Action, ...]:
    """One order of all ranks' actions that keeps each rank's."""
    queues, done = [list(order) for order in schedule.order], []
    while any(queues):
        for queue in queues:
            if queue and all(a in done for a in schedule.needs(queue[0])):
                done.append(queue.pop(0))
    return tuple(done)


def test_forward_alone_keeps_nothing() -> None:
    work = Counting(2)
    schedule = listed("gpipe", [0, 0], 4, False, in_turn("FB"))
    PipelineRunner(schedule, [ValueRoute(0, (1,), "h")], 0).run(work, [0] * 4, forward_only=True)
    assert len(work.log) == 8
    assert [_living(refs) for refs in (work.saved, work.made)] == [set(), set()]
    assert not any(saved or made for _, saved, made in work.log)


# ---- trace ---------------------------------------------------------------------------------------


def spans() -> tuple[list[Span], float, float]:
    schedule = listed("1f1b", range(2), 3, True, at_most(range(2)))
    toy, line, trace = Toy(2), transport(), []
    start = time.perf_counter()
    PipelineRunner(schedule, toy.routes, dist.get_rank(), line).run(
        Work(toy), [m % 3 for m in range(3)], trace=trace
    )
    assert [s.action for s in trace if s.kind == "compute"] == list(schedule.order[dist.get_rank()])
    return trace, start, time.perf_counter()


def test_a_trace_says_when(pool: Pool) -> None:
    for trace, start, stop in pool.run(spans, world=2, timeout=60):
        times = [t for span in trace for t in (span.start, span.stop)]
        assert times == sorted(times) and start <= times[0] and times[-1] <= stop
        waits = {span.action.kind for span in trace if span.kind == "recv-wait"}
        assert waits and "W" not in waits


def trained_beside_groups_of_ones_own() -> float:
    """Ranks that hold different numbers of groups, as a user's own make them."""
    dist.new_group([0, 1])
    dist.new_group([1], use_local_synchronization=True)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    sample = {"input": torch.ones(2, 4)}
    plan = weft.plan(model, "pp3", batch=6, accumulate=3, sample=sample)
    engine = weft.Engine(
        model,
        plan,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named]),
        device="cpu",
        loss=lambda output, batch: (output.sum(), torch.tensor(float(len(output)))),
    )
    return float(engine.step({"input": torch.ones(6, 4)}).loss)


def test_groups_that_the_user_made_before(pool: Pool) -> None:
    losses = pool.run(trained_beside_groups_of_ones_own, world=3, timeout=60)
    assert losses[0] == losses[1] == losses[2]
