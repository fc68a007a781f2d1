"""Executes a Schedule on one of its ranks: any schedule, any placement, any work.

What an action waits for and what it sends is derived from the schedule once, for this rank and for
those that send to it. A run walks the rank's actions: wait for what the next one needs, post
receives ahead, compute, send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.core import Action, Schedule, UnsupportedModel

from .p2p import IncomingMessage, PipelineMessage, PipelineTransport
from .split_backward import DeferredWeightGrad, backward_inputs


@dataclass(frozen=True)
class ValueRoute:
    """A value that crosses from its `source` stage to its later `target` stages. It is known by its
    place in a list. `unread`: its source sends it without a gradient, since the loss does not use
    it; a gradient that comes to it all the same is refused."""

    source: int
    targets: tuple[int, ...]
    name: str
    unread: bool = False


# tensors that backward starts from and their gradients, asked for when it starts
CPU = torch.device("cpu")
Roots = Callable[[], list[tuple[Tensor, Tensor]]]


class StageCompute(Protocol):
    """What one rank does for each action."""

    def forward(
        self, stage: int, microbatch: int, received: dict[int, Tensor]
    ) -> tuple[dict[int, Tensor], Tensor | Roots | None]:
        """({value: tensor} made for other stages, on the last stage what backward starts from: the
        loss, a scalar, or roots).

        `received`: {value: leaf} for this stage, which require gradients where the sender's did.
        """

    def before(self, action: Action) -> None: ...

    def around_backward(self) -> AbstractContextManager[Any]:
        """In this context a backward may compute forwards again."""

    def after(self, action: Action) -> None:
        """What was computed is on its way. A U is done here."""


class Span(NamedTuple):
    """What a rank did from `start` to `stop`, in seconds: compute an action, wait for what it
    needs, or beside that sum the gradients of its stage."""

    action: Action
    start: float
    stop: float
    kind: Literal["compute", "recv-wait", "reduce"] = "compute"


class _RunnerStep(NamedTuple):
    """An action, with the messages that it waits for and those that it sends: to (rank, number in
    that channel)."""

    action: Action
    takes: tuple[tuple[PipelineMessage, int], ...]
    sends: tuple[tuple[PipelineMessage, tuple[tuple[int, int], ...]], ...]


class PipelineRunner:
    """One rank of a schedule. `rank` counts within the pipeline; `transport` may be None where the
    schedule has one.

    Where the schedule has a W for a stage and microbatch, its B is the inputs' gradients alone
    (`split`); else B is torch's backward. Gradients accumulate in the weights' `.grad`, over all
    microbatches.
    """

    def __init__(
        self,
        schedule: Schedule,
        routes: Sequence[ValueRoute],
        rank: int,
        transport: PipelineTransport | None = None,
        device: torch.device = CPU,
    ):
        self.schedule, self.rank, self.transport = schedule, rank, transport
        self._device = device  # whose times a trace has
        self._names = [route.name for route in routes]
        self._unread = [route.unread for route in routes]
        traffic = _MessagePlan(schedule, routes)
        self._plans = {forward: traffic.plan(rank, forward) for forward in (False, True)}
        self._split = {a[1:] for a in schedule.order[rank] if a.kind == "W"}
        stages = range(schedule.stages)
        self._gets = [
            [v for v, route in enumerate(routes) if stage in route.targets] for stage in stages
        ]
        self._makes = [
            [v for v, route in enumerate(routes) if stage == route.source] for stage in stages
        ]
        # of each value: its target stages on this rank, and whether it is made here
        self._here = [
            [s for s in sorted(route.targets) if schedule.placement[s] == rank] for route in routes
        ]
        self._own = [schedule.placement[route.source] == rank for route in routes]
        self._alone = [{schedule.placement[s] for s in route.targets} == {rank} for route in routes]

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for messages of others, as the host sees it."""
        return 0.0 if self.transport is None else self.transport.clock.exposed_s

    def run(
        self,
        work: StageCompute,
        signatures: Sequence[Hashable],
        forward_only: bool = False,
        trace: list[Span] | None = None,
    ) -> None:
        """All actions of this rank; with `forward_only` the forwards alone, of which nothing is
        kept.

        `signatures`: of each microbatch, what the shapes of its activations follow from, equal on
        all ranks. `trace` gets this rank's Spans, by time.perf_counter; on CUDA times are the
        device's.
        """
        steps, incoming = self._plans[forward_only]
        if self.transport is not None:
            self.transport.begin(incoming, self._names, signatures, forward_only)
        run = _PipelineRun(self, work, forward_only)
        if trace is None:
            for step in steps:
                run(step)
        else:
            clock = _SpanTimer(self._device)
            for step in steps:
                run(step, clock)
            trace += clock.spans()
        if self.transport is not None:
            self.transport.end()
        run.check_gradients(len(signatures))


class _PipelineRun:
    """One run: what is under way. A microbatch's tensors leave with the last action that needs
    them."""

    def __init__(self, pipeline: PipelineRunner, work: StageCompute, forward_only: bool):
        self.pipeline, self.work, self.forward_only = pipeline, work, forward_only
        # (value, microbatch) -> what this rank's stages are still to get, whether it has a
        # gradient, how many still
        self.values: dict[tuple[int, int], tuple[Tensor, bool, int]] = {}
        # (value, microbatch) -> the parts of its gradient: this rank's, from the last stage to the
        # first, then other ranks'; so the sum's order does not depend on what arrives when
        self.grads: dict[tuple[int, int], list[Tensor | None]] = {}
        # (stage, microbatch) -> what it made, its loss, what it got
        self.live: dict[
            tuple[int, int], tuple[dict[int, Tensor], Tensor | Roots | None, dict[int, Tensor]]
        ] = {}
        self.deferred: dict[tuple[int, int], DeferredWeightGrad] = {}
        self.newest: dict[int, int] = {}  # stage -> the microbatch of its latest forward
        self.absent: dict[
            int, int
        ] = {}  # value -> microbatches in which no gradient came back over it

    def __call__(self, step: _RunnerStep, clock: _SpanTimer | None = None) -> None:
        action, work, transport = step.action, self.work, self.pipeline.transport
        # what needs no message is done while it may still be on its way
        if transport is not None:
            transport.post()
        work.before(action)
        if clock is not None:
            clock.tick()
        for message, peer in step.takes:
            self.take(message, peer)
        if clock is not None:
            clock.tick()
        if action.kind == "F":
            self.forward(step)
        elif action.kind in ("B", "W"):
            with work.around_backward():
                if action.kind == "B":
                    self.backward(step)
                else:
                    self.deferred.pop(action[1:]).run()
        work.after(action)
        if clock is not None:
            clock.close(action, bool(step.takes))

    def check_gradients(self, microbatches: int) -> None:
        """Refuse what one device would leave without a gradient: here it got zeros, which an
        optimizer acts on. Of a value that goes to several ranks none knows whether another had a
        gradient for it."""
        for value, count in self.absent.items():
            if self.pipeline._alone[value] and count == microbatches * len(
                self.pipeline._here[value]
            ):
                raise UnsupportedModel(
                    f"value {self.pipeline._names[value]}",
                    "no gradient",
                    "it crosses stages and needs a gradient, and the loss does not depend on it",
                    "detach it where it is made, leave it out of what the model returns, or cut"
                    " elsewhere",
                )

    def take(self, message: PipelineMessage, peer: int) -> None:
        transport = self.pipeline.transport
        assert transport is not None
        kind, value, microbatch = message
        if kind == "F":
            tensor = transport.receive(message, peer)
            needs = transport.has_gradient(value, microbatch)
            self.values[value, microbatch] = tensor, needs, len(self.pipeline._here[value])
        elif transport.has_gradient(value, microbatch):
            self.grads.setdefault((value, microbatch), []).append(transport.receive(message, peer))

    def forward(self, step: _RunnerStep) -> None:
        pipeline, (_, stage, microbatch) = self.pipeline, step.action
        received = {value: self.get(value, microbatch) for value in pipeline._gets[stage]}
        made, loss = self.work.forward(stage, microbatch, received)
        self.newest[stage] = microbatch
        for message, peers in step.sends:
            assert pipeline.transport is not None
            pipeline.transport.send(message, made[message.value], peers)
        for value in pipeline._makes[stage]:
            here = len(pipeline._here[value])
            if here:
                self.values[value, microbatch] = (
                    made[value].detach(),
                    made[value].requires_grad,
                    here,
                )
        if not self.forward_only:
            self.live[stage, microbatch] = (
                {v: x for v, x in made.items() if x.requires_grad},
                loss,
                received,
            )

    def get(self, value: int, microbatch: int) -> Tensor:
        tensor, needs, left = self.values.pop((value, microbatch))
        if left > 1:
            self.values[value, microbatch] = tensor, needs, left - 1
        needs = needs or self.pipeline._unread[value]
        return tensor.detach().requires_grad_(needs and not self.forward_only)

    def backward(self, step: _RunnerStep) -> None:
        pipeline, (_, stage, microbatch) = self.pipeline, step.action
        made, loss, received = self.live.pop((stage, microbatch))
        roots: list[Tensor] = []
        grads: list[Tensor | None] = []
        for value, root in made.items():
            grad = _total(self.grads.pop((value, microbatch), []))
            if grad is not None:
                roots.append(root)
                grads.append(grad)
        if isinstance(loss, Tensor):
            if loss.requires_grad:
                roots.append(loss)
                grads.append(None)
        elif loss is not None:
            for root, known in loss():
                roots.append(root)
                grads.append(known)
        needing = {value: leaf for value, leaf in received.items() if leaf.requires_grad}
        with _read_as_saved(self.newest.get(stage, microbatch) != microbatch):
            if (stage, microbatch) in pipeline._split:
                found, self.deferred[stage, microbatch] = backward_inputs(
                    roots, grads, list(needing.values())
                )
            else:
                if roots:
                    torch.autograd.backward(roots, grads)
                found = [leaf.grad for leaf in needing.values()]
        for (value, leaf), grad in zip(needing.items(), found, strict=True):
            if pipeline._unread[value]:
                if grad is not None:
                    raise _used_now(pipeline._names[value])
                continue
            if grad is None and not pipeline._own[value]:
                grad = torch.zeros_like(leaf)  # its source waits for one
                self.absent[value] = self.absent.get(value, 0) + 1
            self.grads.setdefault((value, microbatch), []).append(grad)
        for message, peers in step.sends:
            assert pipeline.transport is not None
            if pipeline.transport.has_gradient(message.value, microbatch):
                total = _total(self.grads.pop((message.value, microbatch)))
                assert total is not None
                pipeline.transport.send(message, total, peers)


@contextmanager
def _read_as_saved(overtaken: bool) -> Iterator[None]:
    """Around a backward. Where one microbatch runs at a time, it may read a buffer that the next
    forward changes. `overtaken`: the stage has run the forward of another microbatch since."""
    try:
        yield
    except RuntimeError as problem:
        if not overtaken or "modified by an inplace operation" not in str(problem):
            raise
        raise UnsupportedModel(
            "model",
            "backward",
            "it reads a tensor, such as a buffer, that the forward of another microbatch has"
            " changed in place since: a pipeline runs forwards of several before the backward of"
            " the first",
            "give the module a new tensor in each forward instead, or set accumulate = 1",
        ) from problem


def _used_now(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"value {name}",
        "reaches the loss in this step",
        "the loss did not use it for the sample batch, so the plan sends no gradient of"
        " it between stages",
        "let the loss depend on it in every step (add 0 times its sum), or detach it",
    )


def _total(parts: list[Tensor | None]) -> Tensor | None:
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


# ---- what crosses, from the schedule -------------------------------------------------------------

Draft = tuple[
    Action, list[tuple[PipelineMessage, int]], list[tuple[PipelineMessage, list[int]]]
]  # takes (from), sends (to)


class _MessagePlan:
    def __init__(self, schedule: Schedule, routes: Sequence[ValueRoute]):
        self.schedule, self.routes, self.placement = schedule, routes, schedule.placement

    def plan(
        self, rank: int, forward_only: bool
    ) -> tuple[list[_RunnerStep], dict[int, list[IncomingMessage]]]:
        """A rank's steps, and what each peer sends to it in that peer's order."""
        own = list(self._draft(rank, forward_only))
        numbers = {
            (message, peer): n
            for peer, sent in _channels(own).items()
            for n, message in enumerate(sent)
        }
        steps = [
            _RunnerStep(
                action,
                tuple(takes),
                tuple((m, tuple((p, numbers[m, p]) for p in peers)) for m, peers in sends),
            )
            for action, takes, sends in own
        ]
        incoming: dict[int, list[IncomingMessage]] = {}
        for peer in sorted({peer for _, takes, _ in own for _, peer in takes}):
            taken = 0
            for _, takes, sends in self._draft(peer, forward_only):
                for message, source in takes:
                    if source == rank:
                        taken = max(taken, 1 + numbers[message, peer])
                for message, peers in sends:
                    if rank in peers:
                        incoming.setdefault(peer, []).append(IncomingMessage(message, taken))
        return steps, incoming

    def _draft(self, rank: int, forward_only: bool) -> Iterator[Draft]:
        """A rank's actions in order."""
        at, seen = self.placement, set()
        gets = {
            s: [v for v, r in enumerate(self.routes) if s in r.targets]
            for s in range(self.schedule.stages)
        }
        makes = {
            s: [v for v, r in enumerate(self.routes) if s == r.source]
            for s in range(self.schedule.stages)
        }
        users = [
            sorted({at[s] for s in route.targets} - {at[route.source]}) for route in self.routes
        ]
        here = [sum(at[s] == rank for s in route.targets) for route in self.routes]
        done: dict[tuple[int, int], int] = {}  # backwards of a value's target stages on this rank
        for action in self.schedule.order[rank]:
            kind, stage, microbatch = action
            takes: list[tuple[PipelineMessage, int]] = []
            sends: list[tuple[PipelineMessage, list[int]]] = []
            if forward_only and kind != "F":
                continue
            if kind in ("F", "B"):
                for value in gets[stage]:
                    source = at[self.routes[value].source]
                    key = value, microbatch
                    if source == rank:
                        continue
                    if kind == "F" and key not in seen:
                        seen.add(key)
                        takes.append((PipelineMessage("F", *key), source))
                    elif kind == "B":
                        done[key] = done.get(key, 0) + 1
                        if done[key] == here[value]:
                            sends.append((PipelineMessage("B", *key), [source]))
                for value in makes[stage]:
                    if kind == "F" and users[value]:
                        sends.append((PipelineMessage("F", value, microbatch), users[value]))
                    elif kind == "B":
                        takes += [
                            (PipelineMessage("B", value, microbatch), user) for user in users[value]
                        ]
            yield action, takes, sends


def _channels(draft: Sequence[Draft]) -> dict[int, list[PipelineMessage]]:
    """To each peer, the messages in order."""
    found: dict[int, list[PipelineMessage]] = {}
    for _, _, sends in draft:
        for message, peers in sends:
            for peer in peers:
                found.setdefault(peer, []).append(message)
    return found


# ---- when it ran ---------------------------------------------------------------------------------


class _SpanTimer:
    """Times of a run: the host's, or on CUDA the device's, read when all is done."""

    def __init__(self, device: torch.device):
        self._device, self._cuda = device, device.type == "cuda"
        self._times: list = []
        self._closed: list[tuple[Action, bool]] = []
        if self._cuda:
            torch.cuda.synchronize(device)
            self._origin, self._zero = time.perf_counter(), torch.cuda.Event(enable_timing=True)
            self._zero.record()

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._times.append(event)
        else:
            self._times.append(time.perf_counter())

    def close(self, action: Action, waited: bool) -> None:
        """After the third tick of an action: before its messages, after them, at its end."""
        self.tick()
        self._closed.append((action, waited))

    def spans(self) -> Iterator[Span]:
        times = self._times
        if self._cuda:
            torch.cuda.synchronize(self._device)
            times = [self._origin + self._zero.elapsed_time(event) / 1e3 for event in times]
        for (action, waited), i in zip(self._closed, range(0, len(times), 3), strict=True):
            if waited:
                yield Span(action, times[i], times[i + 1], "recv-wait")
            yield Span(action, times[i + 1], times[i + 2])
