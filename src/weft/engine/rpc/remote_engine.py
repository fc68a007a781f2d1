"""Remote: the engine of a model with modules on named workers, and one optimizer step of it.

All processes run the same program, as ranks of a layout do. In a step rank 0, the driver, runs the
model's own forward, the loss and the backward; a worker answers its calls meanwhile, and gets the
step's result when it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd, rpc

from weft._torch.modules import redirect_calls
from weft.core import (
    DRIVER,
    ConfigError,
    LayoutError,
    OutlierFilter,
    Plan,
    UnsupportedModel,
    WeftError,
    WorkerPlacement,
    place_modules,
)
from weft.nn import Randomness, mix_key, named_inputs, rebalance_gates, weighed_loss
from weft.parallel import Mesh, parallelize, plan_whole_batch, wrap_blocks
from weft.pipeline import tensors_in

from ..batch_preparation import BatchPreparation
from ..compute_copies import ComputeCopies
from ..context_parallel.sequence import ContextParallel
from ..eval_metrics import NO_METRICS, Metrics, check_metrics, measure, split_totals
from ..expert_load import ExpertLoad
from ..function_overrides import FunctionOverrides
from ..microbatch import Batch, MicroBatch, check_batch
from ..optimizer_factory import OptimizerFactory
from ..optimizers import Optimizers, match_strides, refuse_kind, scale_grads, updates_tensors
from ..pipeline.stage_compute import Loss, StageModel
from ..protocol import StepResult
from ..replica_sync.replicas import ReplicaSync
from ..setup import check_offload_device
from ..training_modes import training_modes
from .calls import CallAnswer, ModuleCall, ModuleCalls, await_answer, check_unchanged, make_answer
from .remote_state import RemoteState
from .remote_tensor import RemoteTensor, drop_remote_weights

CPU = torch.device("cpu")


class Remote(RemoteState):
    """Trains `model` with the modules that `workers` names, worker -> globs, on those workers. Rank
    0 is the driver, rank i the i-th worker. Every rank makes one, of a model made alike; it keeps
    what lives on it, and drops the rest.

    `plan` is of the layout dp1. The other arguments are those of `weft.Engine`, and so are the
    numbers. The default process group must be there, and torch.distributed.rpc, with `places.names`
    as names by rank (`weft.launch.rpc.rpc_session`). Raises Refusal.
    """

    data_rank, data_size, loss_scale = 0, 1, 1.0  # one replica, and no fp16
    waited_s = 0.0  # for other pipeline stages: there are none
    codec_state_lost = False  # there is no codec
    updated_whole: frozenset[str] = frozenset()  # no parameter has parts
    around: tuple[Callable[[], AbstractContextManager], ...] = ()  # where a worker runs its modules

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        workers: Mapping[str, Sequence[str]],
        *,
        optimizer: Optimizers,
        loss: Loss,
        inputs: Sequence[str] | None = None,
        clip: float | None = None,
        skip: float | None = None,
        seed: int = 0,
    ):
        self.places = place_modules(model, workers)
        check_worker_plan(plan := plan_whole_batch(plan, loss), self.places)
        rank = _rank(self.places)
        self.here = self.places.names[rank]
        self.plan = self.global_plan = replace(plan, notes=(*plan.notes, str(self.places)))
        self.model, self.clip, self._prepared = model, clip, BatchPreparation(loss)
        self.loss = self._prepared.loss
        self.norm_filter = OutlierFilter(skip)
        self.mesh = Mesh(plan.layout, CPU, alone=True)
        self.replicas = ReplicaSync()
        self.randomness = Randomness(seed)
        named = named_inputs(model)
        self.inputs = tuple(inputs) if inputs is not None else named
        self.sequence = ContextParallel(plan, self.mesh, self.randomness, model, self.inputs)
        self.stages = StageModel(model, plan, CPU, None, self.sequence)
        selective = plan.recompute == "selective"
        self.functions = FunctionOverrides(self.randomness, selective, mesh=self.mesh)
        # a constant divisor: the true mean is taken at the end
        self.functions.scale = 1.0 / plan.batch
        self.heard: Callable[[], None] = lambda: None  # told of every call that a worker answers
        self._modes = training_modes(model)
        self._training: bool | None = None  # the mode that the model is in
        self.dispatch = parallelize(plan, model, self.mesh, self.randomness)
        wrap_blocks(plan, model, self.randomness)  # names places of dropout, recomputes
        drop_remote_weights(model, self.places, self.here)
        for name, worker in self.places.modules.items():
            if worker != self.here:  # hooks run where the module lives
                redirect_calls(model.get_submodule(name), partial(self._elsewhere, name))
        self.loads = ExpertLoad(model, (), self.mesh)
        self.params = {
            name: p for name, p in model.named_parameters() if not isinstance(p, RemoteTensor)
        }
        self._absent_buffers = {
            name for name, b in model.named_buffers() if isinstance(b, RemoteTensor)
        }
        self.low = ComputeCopies(model, plan, self.params)
        self._masters = {p: self.params[name] for name, p in self.low.filled.items()}
        trainable = [(name, p) for name, p in self.params.items() if p.requires_grad]
        if isinstance(optimizer, OptimizerFactory):
            optimizer.check(plan.weights)
        self.optimizer = optimizer(trainable or [("", nn.Parameter(torch.zeros(0)))])
        _check_optimizer(self.optimizer)
        self.calls = ModuleCalls()
        self.steps_done = 0
        self._turn, self._at = threading.Condition(), -1  # the step that this process is in
        _SERVING[:] = [self]
        dist.barrier()  # all are ready to answer

    # ---- one step --------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on a batch: dict of tensors [batch, ...] on the driver, anything on a
        worker."""
        if self.here == DRIVER:
            check_batch(batch, self.plan.batch, self.plan.batch)
            self._mode(True)  # a worker's modules may still be evaluated for the driver
        self.optimizer.zero_grad(set_to_none=True)
        self.low.refresh()
        with self._turn:
            self._at = self.steps_done
            self._turn.notify_all()
        found = torch.zeros(5, dtype=torch.float64)
        if self.here == DRIVER:
            with torch.random.fork_rng([]):  # the user's own draws are not ours to move
                found = self._step(batch)
        dist.broadcast(found, src=0)
        with self._turn:
            self._at = -1  # the next one may have the same number again, if this is undone
        loss, weight, norm, normed, skipped = found
        self.steps_done += 1
        return StepResult(loss, weight, norm if normed else None, bool(skipped))

    def _step(self, batch: Batch) -> Tensor:
        """Loss, weight, norm, whether there is one, whether the step was left out."""
        plan, batch = self.plan, self._prepared(batch)
        micros = self.sequence.cut(batch).split(plan.microbatch, plan.accumulate)
        found = [self._microbatch(number, micro) for number, micro in enumerate(micros)]
        squares, loss, weight = sum(found)
        factor, norm = self.plan.batch / weight, squares.sqrt() * self.plan.batch / weight
        normed = self.wants_norm
        taken = self.norm_filter.reject(float(norm)) is None
        if self.clip is not None:
            factor = factor * torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        self._everywhere(_finish, self.steps_done, float(factor) if taken else None)
        return torch.tensor([loss / weight, weight, norm, normed, not taken], dtype=torch.float64)

    def _microbatch(self, number: int, micro: MicroBatch) -> Tensor:
        """Squares of the gradients' norms after the last microbatch, where asked for; the loss, and
        its weight."""
        first, size = number * self.plan.microbatch, self.plan.microbatch
        self.randomness.begin(self.steps_done, [*range(first, first + size)])
        self.calls.begin()
        torch.default_generator.manual_seed(
            mix_key(self.randomness.seed, self.steps_done, number, 0) % 2**63
        )
        with autograd.context() as context:
            with self.functions:
                _, output = self.stages(0, micro, {})
                loss, weight = weighed_loss(self.loss, output, micro.batch)
            root = self.calls.root(loss * self.functions.scale)
            try:
                autograd.backward(context, [root])
            except RuntimeError as error:
                failed = RuntimeError(f"the backward of step {self.steps_done} failed: {error}")
                raise self.calls.refused or failed from error
            last = number == self.plan.accumulate - 1 and self.wants_norm
            squares = sum(self._everywhere(_collect, context, self.steps_done, last))
        counted = torch.as_tensor(weight).detach().double()
        return torch.stack(
            [torch.tensor(squares, dtype=torch.float64), loss.detach().double(), counted]
        )

    @property
    def wants_norm(self) -> bool:
        return self.clip is not None or self.norm_filter.limit is not None

    def _everywhere(self, function: Callable, *args: Any) -> list[Any]:
        """What `function(*args)` gives in every process, the driver's own first."""
        workers = self.places.workers
        futures = [rpc.rpc_async(worker, function, args, timeout=0) for worker in workers]
        own = function(*args)
        return [
            own,
            *(
                await_answer(worker, future)
                for worker, future in zip(workers, futures, strict=True)
            ),
        ]

    def collect(self, context: int, step: int, norm: bool) -> float:
        """Add the gradients of a microbatch to those of the step; the squared norm of these, if
        asked for."""
        self._wait_for(step)
        for filled, grad in autograd.get_gradients(context).items():
            p = self._masters[filled]  # type: ignore[index]
            p.grad = grad.to(p.dtype) if p.grad is None else p.grad.add_(grad)
        grads = [p.grad for p in self.params.values() if p.grad is not None] if norm else []
        return (
            float(torch.stack(torch._foreach_norm(grads)).double().square().sum()) if grads else 0.0
        )

    def finish(self, step: int, factor: float | None) -> None:
        """Take the step that all processes are in, with gradients times `factor`; None: leave it
        out."""
        self._wait_for(step)
        if factor is not None:
            grads = [p.grad for p in self.params.values() if p.grad is not None]
            scale_grads(grads, torch.tensor(factor, dtype=torch.float64))
            for p in self.params.values():
                match_strides(p)
            self.optimizer.step()
        rebalance_gates(self.model, absent=self._absent_buffers, taken=factor is not None)

    def _wait_for(self, step: int) -> None:
        """Until this process is in that step: before, it may still be copying what a checkpoint is
        to hold."""
        with self._turn:
            self._turn.wait_for(lambda: self._at >= step)

    def _mode(self, training: bool) -> None:
        if training != self._training:
            self._training = training
            for name, module in self.model.named_modules():
                module.training = training and self._modes.get(name, True)

    # ---- forward alone ---------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, metrics: Metrics = NO_METRICS) -> StepResult:
        """The mean loss of a batch in evaluation mode, on the driver; nothing on a worker."""
        check_metrics(metrics, self.plan)
        totals = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(1 + len(metrics), 1)
        if self.here == DRIVER:
            self._mode(False)
            totals.zero_()
            plan, batch = self.plan, self._prepared(batch)
            for micro in self.sequence.cut(batch).split(plan.microbatch, plan.accumulate):
                output = self._forward(micro)
                found = weighed_loss(self.loss, output, micro.batch)
                of_loss = torch.stack([torch.as_tensor(each).double() for each in found])
                totals += torch.stack([of_loss, *measure(metrics, output, micro.batch)])
        loss, weight, given = split_totals(totals, metrics)
        return StepResult(loss, weight, metrics=given)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's output in evaluation mode, on the driver; None on a worker."""
        if self.here != DRIVER:
            return None
        return self._forward(self.sequence.cut(batch))

    def _forward(self, micro: MicroBatch) -> Any:
        self._mode(False)
        self.low.refresh()
        self.calls.begin()
        return self.stages(0, micro, {})[1]

    # ---- calls -----------------------------------------------------------------------------------

    def _elsewhere(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call of a module that lives in another process."""
        worker, draws = self.places.of(name), self.randomness
        if self.here != DRIVER:
            problem = f"is on {worker}, and is called on {self.here}"
            raise UnsupportedModel(
                "workers",
                name,
                problem,
                "place what calls it on the same worker, or leave it to the driver",
            )
        held = draws.samples.tolist()
        samples = (held[0], held[-1] + 1) if held else (0, 0)
        call = ModuleCall(
            name,
            bool(self._training),
            torch.is_grad_enabled(),
            self.steps_done,
            samples,
            draws.position,
            self.calls.number,
            tuple(module.training for module in self.model.get_submodule(name).modules()),
        )
        answer = self.calls(worker, _answer, call, args, kwargs)
        draws.position = answer.position
        return answer.output

    def answer(self, call: ModuleCall, args: tuple, kwargs: dict) -> CallAnswer:
        """Run a module that lives here."""
        if call.training:
            self._wait_for(call.step)
        else:
            self.low.refresh()
        self.heard()
        self._mode(call.training)
        for module, training in zip(
            self.model.get_submodule(call.module).modules(), call.modes, strict=True
        ):
            module.training = training  # a forward may have set it
        draws = self.randomness
        draws.begin(call.step, [*range(*call.samples)])
        draws.position = call.position
        with ExitStack() as stack:
            for each in self.around:
                stack.enter_context(each())
            stack.enter_context(torch.set_grad_enabled(call.grad))
            stack.enter_context(check_unchanged(call.module, (args, kwargs)))
            if call.training:
                stack.enter_context(self.functions)
                stack.enter_context(torch.random.fork_rng([]))
                place = self.places.workers.index(self.here) + 1, call.number
                torch.default_generator.manual_seed(
                    mix_key(draws.seed, call.step, *call.samples, *place) % 2**63
                )
            output = self.model.get_submodule(call.module)(*args, **kwargs)
        arrived = [t for t in tensors_in((args, kwargs)) if t.requires_grad] if call.grad else []
        return make_answer(call, output, arrived, draws.position)

    # ---- what a checkpoint holds -----------------------------------------------------------------

    def now(self) -> tuple[str, int]:
        """What runs: microbatches, in order."""
        return "", 0

    # ---- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """All steps are taken; all ranks call it, and no worker answers any more."""
        dist.barrier()
        _SERVING.clear()

    close = leave


# ---- what is called by name ----------------------------------------------------------------------

_SERVING: list[Remote] = []  # of this process: what answers the calls of others


def _answer(call: ModuleCall, args: tuple, kwargs: dict) -> CallAnswer | WeftError:
    try:
        return _SERVING[0].answer(call, args, kwargs)
    except WeftError as error:  # torch would make another error of it
        return error


def _collect(context: int, step: int, norm: bool) -> float:
    return _SERVING[0].collect(context, step, norm)


def _finish(step: int, factor: float | None) -> None:
    _SERVING[0].finish(step, factor)


# ---- what is refused -----------------------------------------------------------------------------


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Each process has an optimizer of its own. Raises ConfigError."""
    name = type(optimizer).__name__
    refuse_kind(type(optimizer), name)
    if not updates_tensors(optimizer):
        problem = (
            "is not known to update each tensor by itself, and each worker updates only its"
            " own tensors"
        )
        fix = "mark its class @weft.optimizers.whole_tensors if it does, or use adamw"
        raise ConfigError("optimizer.name", name, problem, fix)


def check_worker_plan(plan: Plan, places: WorkerPlacement) -> None:
    """Refuse what does not go with workers. Raises Refusal."""
    if plan.layout.active_axes():
        problem = (
            "workers hold whole modules, and there is one driver, so a layout has no ranks to use"
        )
        raise LayoutError(
            "layout.axes", str(plan.layout), problem, "use layout dp1, or leave [workers] out"
        )
    check_offload_device(plan, CPU)
    if plan.runs_forward_twice:
        problem = (
            "the loss compares the samples of the whole batch, and workers run each"
            " microbatch by itself"
        )
        raise ConfigError("train.accumulate", plan.accumulate, problem, "use accumulate = 1")
    if plan.precision == "fp16":
        problem = (
            "fp16 needs loss scaling, and workers neither scale the loss nor report an overflow"
        )
        raise ConfigError("precision.compute", plan.precision, problem, "use bf16, fp32 or fp64")
    if plan.float8 is not None:
        problem = "the driver and its workers compute on a CPU, which has no float8"
        raise ConfigError("precision.float8", plan.float8.recipe, problem, "leave it out")
    for block in plan.recomputed():
        called = next((name for name in places.modules if name.startswith(f"{block}.")), None)
        if called is not None:
            problem = (
                f"{block} would be computed again in backward, and calls {called} on"
                f" {places.of(called)}"
            )
            raise ConfigError(
                "train.recompute",
                plan.recompute,
                problem,
                f'place all of {block} on one worker, or use recompute = "selective"',
            )


def _rank(places: WorkerPlacement) -> int:
    """Of this process. Raises LayoutError, ConfigError."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != len(places.names):
        problem = f"with the driver they are {len(places.names)} processes, {world} run"
        raise LayoutError(
            "workers", list(places.workers), problem, f"start {len(places.names)} processes"
        )
    name = rpc.get_worker_info().name
    if name != places.names[dist.get_rank()]:
        problem = f"rank {dist.get_rank()} has that name in torch.distributed.rpc"
        raise ConfigError("workers", name, problem, f"name it {places.names[dist.get_rank()]}")
    return dist.get_rank()
