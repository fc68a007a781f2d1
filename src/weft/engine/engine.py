"""Engine: a model under a Plan, and one optimizer step of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.core import (
    COPY,
    DATA_AXES,
    EXPERTS,
    TOKEN_AXES,
    Action,
    AsyncServers,
    ConfigError,
    LocalShard,
    LocalSteps,
    Plan,
    Schedule,
    Segment,
    Sync,
    SyncEveryStep,
    UnsupportedModel,
    WeftError,
    bucket_owners,
    chunks_of,
    cut_segments,
    data_rank_indices,
    fsdp_rows,
    take_segments,
    whole_shard,
)
from weft.nn import (
    Randomness,
    experts_of,
    is_positionwise,
    mix_key,
    model_arguments,
    named_inputs,
    rebalance_gates,
)
from weft.parallel import Mesh, parallelize

from .context_parallel.sequence import ContextParallel
from .expert_load import ExpertLoad
from .fsdp import FSDPUnits
from .function_overrides import FunctionOverrides
from .grad_buckets import GradReducer, local_tensor
from .grad_norm_guard import GradNormGuard
from .pipeline.p2p import PipelineTransport
from .pipeline.runner import PipelineRunner, ValueRoute
from .pipeline.stage_compute import (
    Batch,
    InferenceCompute,
    Loss,
    MicroBatches,
    StageModel,
    TrainingCompute,
    batch_signature,
)
from .pipeline.stage_forward import StageForward
from .pipeline.weight_stash import WeightStash
from .replica_sync import state_transfer
from .replica_sync.async_parameter_server import AsyncWorker, ParameterServer
from .replica_sync.bucket_exchange import FSDPReduceScatter
from .replica_sync.flat_params import FlatParams
from .replica_sync.membership import TRIES, Membership, ReplicaGroup
from .replica_sync.outer_optimizer import OuterOptimizer
from .replica_sync.transports import start_async

Optimizers = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# what these compute for one element depends on that element alone, so a shard is updated as the
# whole would be
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


@dataclass(frozen=True)
class StepResult:
    """What a step gave, over all ranks: 0-dim float64 tensors. `loss` is the mean over `weight`
    things that count.

    `grad_norm` is None where nothing asked for it; `skipped`: the step was not taken, as gradients
    were not finite (fp16), or not to be trusted (`Engine`'s `skip`).
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor | None = None
    skipped: bool = False


class Engine:
    """Trains `model` as `plan` says, and changes it in place. Every rank of the layout makes one.

    Weights and buffers of rank 0 are those that all ranks begin with. Modules of a model in
    training mode keep their own modes: a frozen batch norm stays frozen.

    Args:
        model: the module that the plan was made for.
        plan: what `weft.plan` returned.
        optimizer: list of (name, parameter) -> torch.optim.Optimizer.
        loss: (output, batch) -> (sum, weight).
        inputs: batch entries that the model is called with. Default: those that its forward names,
            without labels.
        clip: largest global norm of the mean gradient. Default: no clipping.
        skip: skip a step whose gradient norm is not finite, or exceeds this many times the median
            of the last 64 steps taken.
        seed: seed of dropout.
        device: device of this rank. Default: this rank's GPU, or the CPU.
        sample: a batch of one sample, the same on every rank. Under `tp`, and with sharded experts,
            the engine compares the model's output for it with and without sharding, because wrong
            roles may have matching sizes. Under `cp` it compares the first positions in parts and
            whole; without `sample` it uses the first batch.
        company: where replicas with local steps meet, if each has a process group of its own.

    Raises:
        Refusal: what the plan, the optimizer or the loss cannot do together.

    Example:
        engine = weft.Engine(
            model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3), loss=weft.losses.next_token
        )
        for batch in loader:
            result = engine.step(engine.local(batch))
        engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        optimizer: Optimizers,
        loss: Loss,
        inputs: Sequence[str] | None = None,
        clip: float | None = None,
        skip: float | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        sample: Batch | None = None,
        company: ReplicaGroup | None = None,
    ):
        if device is None:
            device = _own_device()
        if clip is not None and plan.schedule.versions:
            problem = (
                f"{plan.schedule.name} updates each stage by itself, and no stage knows the norm of"
                " all gradients"
            )
            raise ConfigError(
                "train.clip",
                clip,
                problem,
                "leave it out, or use a synchronous schedule such as 1f1b",
            )
        whole = plan
        if (
            torch.device(device).type == "cuda"
            and plan.sync is not None
            and not _runs_on_cuda(plan.sync)
        ):
            problem = (
                "has run on CPUs alone: its messages are not ordered with what else a GPU does"
            )
            raise ConfigError(
                "sync.name", plan.sync.name, problem, 'use name = "allreduce", with any codec'
            )
        groups = (
            plan.sync.groups(plan.layout.size("dp"))
            if isinstance(plan.sync, SyncEveryStep) and plan.apart
            else ()
        )
        if plan.separate:
            plan = plan.replica()
        else:
            company = None
        self.plan, self.whole, self.loss, self.clip = plan, whole, loss, clip
        self.trust = GradNormGuard(skip) if skip is not None else None
        shared = [
            b.among for rank in range(plan.layout.world) for b in plan.of(rank).buckets() if b.among
        ]
        self.mesh = Mesh(
            whole.layout,
            torch.device(device),
            shared=shared,
            pairs=_pairs(plan),
            replicas=groups,
            apart=("dp",) if whole.separate else (),
            replica=company.replica if company is not None else None,
        )
        self.replica = whole.layout.coords(self.mesh.place).get("dp", 0)
        self.data_rank, self.data_size = (
            whole.layout.index(self.mesh.place, *DATA_AXES),
            whole.data_size,
        )
        self.part = plan.of(self.mesh.rank)
        self.model = model.to(self.mesh.device)
        self.inputs = tuple(inputs) if inputs is not None else named_inputs(model)
        self.steps_done = 0
        self.trace: list | None = None  # where the pipeline's actions are recorded, if anywhere
        self._anchored = False  # a checkpoint had what replicas last agreed on
        self.forgot = (
            False  # a checkpoint was of another layout or codec, so what codecs keep begins anew
        )
        # replicas that share a world write one checkpoint, of the first one's
        self._speaks = not whole.separate or company is not None or self.replica == 0
        self.quorum = self._quorum(company)
        self.worker: AsyncWorker | None = None
        self.server: ParameterServer | None = None
        self._own_part: FlatParams | None = None
        self._optimizers = optimizer
        self.caught_up = self._share_initial()  # whether it goes on from where others were
        if whole.separate and self.replica:
            seed = mix_key(seed, self.replica)  # its samples have numbers of their own
        self.randomness = Randomness(seed, self.mesh.index("tp"), self.mesh.size("tp"))
        names = named_inputs(model)
        self.sequence = ContextParallel(plan, self.mesh, self.randomness, names, self.inputs)
        self.tried = not self.sequence  # whether it gives what it gives whole
        if self.sequence and not is_positionwise(loss):
            problem = "is not known to be a sum over positions, which ranks share"
            raise ConfigError(
                "loss",
                getattr(loss, "__name__", loss),
                problem,
                "mark it @weft.losses.positionwise",
            )
        parts = self.sequence if self.sequence else None
        self._in_parts = (
            FunctionOverrides(self.randomness, False, parts) if parts is not None else None
        )  # without a backward
        self._modes = {n: m.training or not model.training for n, m in model.named_modules()}
        before = (
            self._alone(sample) if sample is not None and plan.layout.live("tp", EXPERTS) else None
        )
        staged = None
        if plan.staging is not None:
            staged = StageForward(
                model, plan.staging, plan.stages(self.mesh.rank), skipped=self.randomness.skip
            )
        self.loads = ExpertLoad(self.model, experts_of(self.model), self.mesh)
        self.dispatch = parallelize(self.part, self.model, self.mesh, self.randomness)
        held = {w.name for w in self.part.weights}
        self.params = {name: p for name, p in self.model.named_parameters() if name in held}
        self.stages = StageModel(
            self.model, plan, self.mesh.device, self.inputs, staged, self.sequence
        )
        self._pipeline, self._single = self._pipelines()
        self.units = FSDPUnits(self.model, self.part)
        if sample is not None and before is not None:
            self._hold(before, sample)
        if sample is not None and self.sequence:
            self._hold_in_parts(sample)
        trainable = [(name, p) for name, p in self.params.items() if p.requires_grad]
        # a stage whose weights are all frozen still has an optimizer, of nothing
        self.optimizer = optimizer(
            trainable or [("", nn.Parameter(torch.zeros(0, device=self.mesh.device)))]
        )
        _check_optimizer(self.optimizer, plan)
        self.reducer = GradReducer(self.part, self.params, self.mesh)
        self._scatters: dict[str, FSDPReduceScatter] = {}
        if plan.scattered and isinstance(plan.sync, SyncEveryStep):
            for unit in self.units:
                like = unit.reduced()
                if like is not None:
                    self._scatters[unit.name] = FSDPReduceScatter(plan.sync.codec, unit.name, like)
                    unit.module.set_custom_reduce_scatter(self._scatters[unit.name])
        check_codec(self.optimizer, plan)
        self._owners = plan.owners()
        self._table = table = plan.params()
        self._weights = {w.name: w for w in plan.weights}
        # how many ranks hold each element of a parameter: the global norm counts it once
        within = (
            plan.layout.world
            // plan.layout.size("pp")
            // (plan.layout.size("dp") if self._owners else 1)
        )
        self._copies = {
            name: (
                within
                * len(plan.holders(name))
                // plan.layout.size(*(axis for axis, p in table[name].items() if p.stored != COPY))
            )
            for name in self.params
        }
        self._stale_buffers = _unsynced_buffers(self.model, self.part, self._absent_buffers())
        versions = None
        if plan.schedule.versions:
            versions = WeightStash(
                self.model, plan, self.mesh, self.params, lambda: self.optimizer.step()
            )
        functions = FunctionOverrides(
            self.randomness, plan.recompute == "selective", parts, mesh=self.mesh, loads=self.loads
        )
        self._training = TrainingCompute(
            self.stages,
            self.mesh,
            loss,
            self.randomness,
            self.reducer,
            self.units,
            versions,
            functions,
        )
        if plan.staging is not None and not self._wants_norm() and not self.reducer.buckets:
            self._training.agree = self.mesh.group(*plan.layout.live())
        self._trail = (
            0  # which modules ran, in order: FSDP2 pairs the ranks' collectives by nothing else
        )
        if self.units.units:
            for index, module in enumerate(self.model.modules()):
                if module._parameters:
                    module.register_forward_pre_hook(partial(self._pass, index))
        self.loss_scale, self._good_steps = (2.0**16, 0) if plan.precision == "fp16" else (1.0, 0)
        self.outer: OuterOptimizer | None = None
        if whole.separate:
            trained = {
                name: local_tensor(p.detach()) for name, p in self.params.items() if p.requires_grad
            }
            assert self.quorum is not None
            if isinstance(whole.sync, AsyncServers):
                self._serve(whole.sync, trained, self.quorum)
            else:
                self.outer = OuterOptimizer(whole, trained, self.quorum)
        self.caught_up = (
            self.caught_up and self.outer is not None
        )  # from servers it gets what it needs when it connects
        if self.caught_up:
            self._catch_up()

    def _serve(self, sync: AsyncServers, trained: dict[str, Tensor], quorum: Membership) -> None:
        """Ready to push gradients to servers, and to be one."""
        every = [w for w in self.whole.weights if w.trainable]
        owned = bucket_owners([prod(w.shape) for w in every], sync.servers)
        parts = []
        for server in range(sync.servers):
            names = [
                w.name
                for w, owner in zip(every, owned, strict=True)
                if owner == server and w.name in trained
            ]
            parts.append(FlatParams(names, [trained[name] for name in names]))
        self.worker = AsyncWorker(sync, quorum, parts)
        if self.replica < sync.servers and parts[self.replica].params:
            self._own_part = parts[self.replica]

    def connect(self) -> None:
        """Where there are asynchronous servers: begin to serve, and get weights, and the number of
        steps that count as taken. Weights and optimizer state must be those that training goes on
        from; the first step does it, if nobody has."""
        if self.worker is None or self.worker.connected:
            return
        assert self.quorum is not None and isinstance(self.whole.sync, AsyncServers)
        if self._own_part is not None:
            state = {
                name: {
                    key: local_tensor(v).clone() if torch.is_tensor(v) else v
                    for key, v in self._state_of(name).items()
                }
                for name in self._own_part.names
                if self._state_of(name)
            }
            sync, part = self.whole.sync, self._own_part
            self.server = ParameterServer(
                sync, self.quorum, part, self._optimizers, state, self.steps_done
            )
        self.optimizer.state.clear()  # it is the servers' from now on
        live = self.mesh.layout.live()
        steps = torch.tensor(self.worker.connect(self.steps_done))
        if live:  # servers of its ranks may have counted differently
            dist.all_reduce(steps, dist.ReduceOp.MAX, group=self.mesh.group(*live))
        self.steps_done = int(steps)

    def _state_of(self, name: str) -> dict[str, Any]:
        return self.optimizer.state.get(self.params[name], {})

    def gather(self, last: bool = False) -> bool:
        """Before weights are evaluated or saved: where servers hold them, these and their
        optimizers' state are this rank's too. `last`: all steps are taken. The replica that leads
        calls it, and with `last` all do. Whether what the replica has is what others go on from:
        not if it has been left out."""
        if self.outer is not None:
            self.outer.settle()
            return not self.outer.left
        if self.worker is None or not self.worker.connected:
            return True
        if last:
            self.worker.done()
        if last and self.server is not None:
            self.server.idle()
        if self.leads:
            for name, state in self.worker.collect(last).items():
                p = self.params[name]
                self.optimizer.state[p] = {
                    key: self._like(p, value) for key, value in state.items()
                }
        if last:
            self.worker.close()
            if self.server is not None:
                self.server.close()
        return True

    def close(self) -> None:
        """All steps are taken; all ranks call it before the process group is destroyed. Where
        servers hold the weights, the replica that leads then has the last ones."""
        self.gather(last=True)
        self.leave()

    def _like(self, p: nn.Parameter, value: Tensor) -> Tensor:
        """A tensor of a parameter's optimizer state, laid as the parameter is."""
        if not isinstance(p, DTensor) or value.shape != local_tensor(p).shape or not value.ndim:
            return value
        return DTensor.from_local(
            value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _quorum(self, company: ReplicaGroup | None) -> Membership | None:
        """Of replicas that step by themselves."""
        sync, layout = self.whole.sync, self.whole.layout
        if not self.whole.separate or not isinstance(sync, LocalSteps | AsyncServers):
            return None
        if company is None:
            company = ReplicaGroup(dist.distributed_c10d._get_default_store(), self.replica)
        return Membership(
            company, layout.size("dp"), self.mesh.rank, self.plan.layout.world, sync.timeout_s
        )

    @torch.no_grad()
    def _share_initial(self) -> bool:
        """All ranks begin with the first one's weights and buffers. Whether this replica came too
        late for that."""
        tensors = [t.data for t in (*self.model.parameters(), *self.model.buffers())]

        def share(group: dist.ProcessGroup | None) -> None:
            for tensor in tensors if group is not None else ():
                start_async(dist.broadcast(tensor, group=group, group_src=0, async_op=True)).wait()

        live = self.mesh.layout.live()
        share(self.mesh.group(*live) if live else None)
        if self.quorum is None:
            return False
        if self.quorum.company.incarnation:
            return True
        meeting = self.quorum.run("begin", lambda meeting: share(meeting.group))
        if meeting is not None:
            self.quorum.count(meeting)
        return meeting is None

    def _pipelines(self) -> tuple[PipelineRunner, PipelineRunner]:
        """The plan's schedule, and one of a single microbatch that only goes forward."""
        schedule, staging = self.plan.schedule, self.plan.staging
        routes = (
            [ValueRoute(v.source, v.targets, v.name) for v in staging.values]
            if staging is not None
            else []
        )
        transport = None
        if staging is not None:
            position, pipes = self.mesh.coords["pp"], self.mesh.pipes
            transport = PipelineTransport(
                position, pipes, self.mesh.device, dynamic_shapes=self.plan.dynamic_shapes
            )
        order = tuple(
            tuple(
                Action("F", stage, 0)
                for stage, rank in enumerate(schedule.placement)
                if rank == each
            )
            for each in range(schedule.ranks)
        )
        single = Schedule("forward", schedule.placement, order)
        rank = self.mesh.coords.get("pp", 0)
        return PipelineRunner(schedule, routes, rank, transport), PipelineRunner(
            single, routes, rank, transport
        )

    # ---- one step ------------------------------------------------------------------------------------------------

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for other stages."""
        return self._pipeline.waited_s

    def local(self, batch: Batch) -> Batch:
        """This rank's part of a global batch (every tensor's dim 0 counts the plan's `batch`
        samples)."""
        index = data_rank_indices(
            self.whole.batch, self.whole.accumulate, self.data_rank, self.data_size
        )
        return {key: value[torch.tensor(index)] for key, value in batch.items()}

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on this rank's part of the batch: dict of tensors [batch / data ranks,
        ...]."""
        with torch.random.fork_rng([self.mesh.device] if self.mesh.device.type == "cuda" else []):
            return self._step(batch)  # the user's own draws are not ours to move

    def _step(self, batch: Batch) -> StepResult:
        plan, training = self.plan, self._training
        self.connect()
        batch = self._placed(batch)
        if not self.tried:
            self._hold_in_parts({key: value[:2] for key, value in batch.items()})
        micros = self._microbatches(self.sequence.cut(batch))
        self._train_mode()
        self.optimizer.zero_grad(set_to_none=True)
        self._refresh_buffers()
        self._trail = 0
        # a constant divisor keeps fp16 in range; the true mean is taken at the end
        training.begin(self.steps_done, micros, self.loss_scale / plan.batch)
        self._pipeline.run(training, [batch_signature(micros[0])] * len(micros), trace=self.trace)
        self.units.finish()
        missing = self.reducer.finish()
        self._check_attention()
        result = self._update(missing)
        rebalance_gates(
            self.model, self._of_all_tokens, self._absent_buffers(), taken=not result.skipped
        )
        self.steps_done += 1
        if self.outer is not None:
            self.outer.after(self.steps_done)
            self._let_in_others()
            if self.outer.left:
                self._catch_up()
        routed = training.functions is not None and training.functions.routed
        needed = self.sequence or self.loads or routed
        if self.plan.recompute != "selective" and self.randomness.drawn == 0 and not needed:
            training.functions = (
                None  # a model without dropout pays nothing for it after the first step
            )
        return result

    def _of_all_tokens(self, loads: Tensor) -> Tensor:
        """Counts of this rank's tokens -> of all."""
        group = self.mesh.group(*self.plan.token_axes)
        if group is not None:
            dist.all_reduce(loads, group=group)
        return loads

    def _wants_norm(self) -> bool:
        return self.clip is not None or self.trust is not None or self.plan.precision == "fp16"

    def _pass(self, index: int, *_: Any) -> None:
        self._trail = (self._trail * 1000003 + index) % 2**20

    def _train_mode(self) -> None:
        for name, module in self.model.named_modules():
            module.training = self._modes.get(name, True)

    def _microbatches(self, batch: Batch) -> MicroBatches:
        return MicroBatches(batch, self.plan.microbatch, self.plan.accumulate)

    def _update(self, missing: list) -> StepResult:
        total = self._training.total
        grads = self._gradients()
        want_norm = self._wants_norm()
        if want_norm and grads:
            low = any(g.dtype in (torch.bfloat16, torch.float16) for g in grads.values())
            norms = torch._foreach_norm(
                list(grads.values()), 2, dtype=torch.float32 if low else None
            )
            for name, norm in zip(grads, norms, strict=True):
                total[0] += norm.double().square().to(total.device) / self._copies[name]
        if self.plan.staging is not None and self.units.units:
            self._check_trail()
        if self._training.agreed is not None:
            self._training.agreed.wait()
        else:
            trail = [self._trail, self._trail**2] if self.plan.staging is None else [0, 0]
            total[3:] = torch.tensor([len(missing), *trail], dtype=torch.float64)
            if self.plan.layout.world > 1:
                dist.all_reduce(total, group=self.mesh.group(*self.plan.layout.live()))
        total[1:3] /= self.plan.layout.world // self.plan.layout.size(*TOKEN_AXES, "pp")
        if total[3] > 0:
            self.reducer.drop_unused(missing, self.mesh)
            grads = self._gradients()
        if total[5] * self.plan.layout.world != total[4] ** 2:
            raise self._diverged()
        loss_sum, weight = total[1], total[2]
        factor = self.plan.batch / (weight * self.loss_scale)
        if self.reducer.exchange is not None:
            self.reducer.exchange.scale = factor
        norm = total[0].sqrt() * factor if want_norm else None
        result = StepResult(loss_sum / weight, weight, norm)
        if self._training.versions is not None:
            return result  # every stage has taken its steps
        if self.plan.precision == "fp16" and not self._rescale(bool(torch.isfinite(total[0]))):
            return StepResult(result.loss, weight, norm, skipped=True)
        if self.trust is not None and norm is not None and not self.trust(float(norm)):
            return StepResult(result.loss, weight, norm, skipped=True)
        if self.clip is not None and norm is not None:
            factor = factor * torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        scale_grads(grads.values(), factor)
        for name, p in self.params.items():
            if not self.updates(name):
                p.grad = None
        if self.worker is not None:
            groups = [
                (float(group["lr"]), {id(p) for p in group["params"]})
                for group in self.optimizer.param_groups
            ]
            rates = {
                n: next((lr for lr, ids in groups if id(p) in ids), 0.0)
                for n, p in self.params.items()
            }
            try:
                self.worker.step(self._gradients(), rates)
            finally:
                if self.server is not None and self.server.broken:
                    raise WeftError(
                        f"the parameter server of replica {self.replica}"
                        f" failed:\n{self.server.broken}"
                    )
            return result
        self.optimizer.step()
        if self._owners:
            self.reducer.spread()
        return result

    def _gradients(self) -> dict[str, Tensor]:
        """Those that this rank has the sum of."""
        return {
            n: local_tensor(p.grad)
            for n, p in self.params.items()
            if p.grad is not None and self.updates(n)
        }

    def updates(self, name: str) -> bool:
        """Whether this rank updates a parameter, and does not get it from the replica that owns
        it."""
        return self._owners.get(name, self.mesh.coords.get("dp", 0)) == self.mesh.coords.get(
            "dp", 0
        )

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, or its part."""
        return self.mesh.coords.get("pp", 0) in self.plan.holders(name)

    def _check_trail(self) -> None:
        """The ranks that shard one stage's parameters ran the same of its modules."""
        seen = torch.tensor(
            [self._trail, self._trail**2], dtype=torch.float64, device=self.mesh.device
        )
        dist.all_reduce(seen, group=self.mesh.group(*DATA_AXES))
        if seen[1] * self.plan.data_size != seen[0] ** 2:
            raise self._diverged()

    def _diverged(self) -> UnsupportedModel:
        return UnsupportedModel(
            "layout",
            str(self.plan.layout),
            f"in step {self.steps_done} ranks ran different modules, or in another order",
            "use dp: FSDP2 gathers and reduces what runs, and it must be the same on every rank",
        )

    def _rescale(self, finite: bool) -> bool:
        """Dynamic loss scaling (Micikevicius et al. 2018). Returns whether the step may be
        taken."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self._good_steps == 2000:
            self.loss_scale, self._good_steps = self.loss_scale * 2, 0
        return finite

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepResult:
        """The mean loss of a batch over all ranks, in evaluation mode. `batch` as for `step`. Where
        replicas step by themselves, each computes with its own weights."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

        def add(output: Any, micro: Batch) -> None:
            with self.stages.autocast():
                loss, weight = self.loss(output, micro)
            total.add_(torch.stack([loss, torch.as_tensor(weight, device=loss.device)]).double())

        micros = self._microbatches(self.sequence.cut(self._placed(batch)))
        work = InferenceCompute(self.stages, micros, add, self._in_parts)
        self._pipeline.run(work, [batch_signature(micros[0])] * len(micros), forward_only=True)
        self.units.reshard()
        group = self.mesh.group(*TOKEN_AXES, "pp")
        if group is not None:
            dist.all_reduce(total, group=group)
        if self.outer is not None:
            self.outer.add(total, self.steps_done)
        return StepResult(total[0] / total[1], total[1])

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's output in evaluation mode, logits whole on every rank. All ranks call it
        together."""
        return self._output(batch, None)

    def _output(self, batch: Batch, functions: FunctionOverrides | None) -> Any:
        """`functions`: where ranks share the sequence, what lets them. Else each runs all of it."""
        self.model.eval()
        batch = {key: value.to(self.mesh.device) for key, value in batch.items()}
        outputs: list[Any] = []
        self.sequence.end()
        if functions is not None:
            batch = self.sequence.cut(batch)
        work = InferenceCompute(
            self.stages, [batch], lambda output, _: outputs.append(_whole(output)), functions
        )
        self._single.run(work, [batch_signature(batch)], forward_only=True)
        self.units.reshard()
        group = self.mesh.group("pp")
        if group is not None:
            source = self.plan.schedule.placement[-1]
            outputs = outputs or [None]
            dist.broadcast_object_list(
                outputs, group_src=source, group=group, device=self.mesh.device
            )
        return outputs[0]

    @torch.no_grad()
    def _alone(self, batch: Batch) -> Any:
        """The output of the model before it is cut."""
        self.model.eval()
        with StageModel(
            self.model, self.plan, self.mesh.device, self.inputs, None, self.sequence
        ).autocast():
            return self.model(
                **model_arguments(
                    self.inputs, {k: v.to(self.mesh.device) for k, v in batch.items()}
                )
            )

    def _hold(self, before: Any, sample: Batch) -> None:
        """Refuse a cut that changes what the model computes."""

        def refuse(problem: str) -> UnsupportedModel:
            fix = "correct [roles], or weft verify names the first module that differs"
            if self.dispatch.group is not None:
                fix = (
                    "experts are to take each token by itself, and to count themselves by"
                    f" num_experts; else {fix}"
                )
            return UnsupportedModel("layout", str(self.plan.layout), problem, fix)

        try:
            after = self.forward(sample)
        except (RuntimeError, ValueError, IndexError, TypeError) as problem:
            raise refuse(
                f"the model does not run as it is cut ({str(problem).splitlines()[0]})"
            ) from problem
        whole, cut = (first_tensor_of(output).double() for output in (before, after))
        size = float(whole.norm())
        error = float((whole - cut).norm()) / (size if size > 0 else 1.0)
        if not error < (1e-3 if self.plan.precision in ("fp64", "fp32") else 5e-2):
            raise refuse(f"laid so, the model's output changes by {error:.2g} of itself")

    @torch.no_grad()
    def _hold_in_parts(self, sample: Batch) -> None:
        """Refuse a model that computes something else where ranks share the sequence: it may mix or
        count positions by other means than those that weft replaces. The first positions tell, as
        many as are quickly run whole."""
        self.tried = True
        length, parts = self.sequence.length(sample), self.sequence.multiple * 2
        self.sequence.positions(length, self.mesh.device)  # refuses what does not divide
        short = (
            min(length, max(parts, 256 // parts * parts))
            // self.sequence.multiple
            * self.sequence.multiple
        )
        sample = {
            k: v[:, :short] if v.ndim > 1 and v.shape[1] == length else v for k, v in sample.items()
        }
        whole, part = (
            first_tensor_of(self._output(sample, None)),
            first_tensor_of(self._output(sample, self._in_parts)),
        )
        whole, part = (x.full_tensor() if isinstance(x, DTensor) else x for x in (whole, part))
        if whole.ndim > 1 and whole.shape[1] == short:
            part = self.sequence.whole(part)
        elif (
            whole.shape[0] == len(next(iter(sample.values()))) * short
        ):  # samples and positions in one dim
            rows = short // self.plan.sequence_size
            part = self.sequence.whole(part.unflatten(0, (-1, rows))).flatten(0, 1)
        size = float(whole.double().norm())
        error = (
            float((whole - part).double().norm()) / (size or 1.0)
            if whole.shape == part.shape
            else float("inf")
        )
        if not error < (1e-3 if self.plan.precision in ("fp64", "fp32") else 5e-2):
            raise UnsupportedModel(
                "layout",
                str(self.plan.layout),
                f"in parts of the sequence the model's output changes by {error:.2g} of itself: it"
                " mixes positions, or counts them, by other means than attention and position_ids",
                "use dp, fsdp or tp, or let its forward take position_ids, and use them",
            )

    # ---- parts of a step -----------------------------------------------------------------------------------------

    def _placed(self, batch: Batch) -> Batch:
        check_batch(batch, self.plan.batch // self.plan.data_size, self.whole.batch)
        return {key: value.to(self.mesh.device, non_blocking=True) for key, value in batch.items()}

    def now(self) -> tuple[str, int]:
        """The kind of the action that runs, and its microbatch."""
        action = self._training.action
        return ("", 0) if action is None else (action.kind, action.microbatch)

    @property
    def stale_buffer_bytes(self) -> list[int]:
        """Bytes of each buffer that is broadcast at the start of a step."""
        return [buffer.nbytes for buffer in self._stale_buffers]

    def _refresh_buffers(self) -> None:
        """Every replica starts a step from the first one's buffers, as one device would have one
        set of them."""
        group = self.mesh.group(*TOKEN_AXES)
        if group is not None:
            for buffer in self._stale_buffers:
                dist.broadcast(buffer, group=group, group_src=0)

    def _check_attention(self) -> None:
        """Whether what the plan does with attention came to be: a stage may have none."""
        if self.sequence and self.plan.staging is None and self.sequence.calls == 0:
            raise UnsupportedModel(
                "layout",
                str(self.plan.layout),
                "the model never calls scaled_dot_product_attention",
                "use dp or fsdp, or attention through"
                " torch.nn.functional.scaled_dot_product_attention",
            )
        functions = self._training.functions
        if (
            self.plan.recompute == "selective"
            and functions is not None
            and functions.attention_cores == 0
        ):
            raise UnsupportedModel(
                "train.recompute",
                "selective",
                "the model never calls scaled_dot_product_attention",
                'use "full" or "none", or attention through'
                " torch.nn.functional.scaled_dot_product_attention",
            )

    # ---- what a checkpoint holds ---------------------------------------------------------------------------------

    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]:
        """Weights, buffers and optimizer state: this rank's part of each, by global name. Storage
        is live.

        `saved`: the names that a checkpoint holds, to be loaded from it: optimizer state is made
        for these alone.
        """
        for name, p in self.params.items():
            yield self._piece(name, local_tensor(p.detach()), name)
        persistent, absent = (
            self.model.state_dict(keep_vars=True).keys() - self.params.keys(),
            self._absent_buffers(),
        )
        for name, buffer in self.model.named_buffers():
            if name in persistent and name not in absent:
                yield whole_shard(name, buffer, self._writes(self._buffer_holders(name), ()))
        yield from self._agreed(saved)
        for name, kept in self._kept():
            if saved is None or name in saved:
                yield whole_shard(name, kept, True)
        if saved is not None:
            here = f"/{self.mesh.place}/"
            had = {name for name in saved if name.startswith("sync/") and here in name}
            self.forgot = had != {name for name, _ in self._kept()} and any(
                n.startswith("sync/") for n in saved
            )
        if saved is not None:
            make_state(self.optimizer, self.params, saved, self.updates)
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    continue
                full = f"optimizer/{name}/{key}"
                if value.shape == p.shape and value.ndim:
                    yield self._piece(full, local_tensor(value), name, self._owners.get(name, 0))
                else:
                    writer = self._writes(self.plan.holders(name), (), self._owners.get(name, 0))
                    yield whole_shard(full, local_tensor(value), writer)

    def _agreed(self, saved: Collection[str] | None) -> Iterator[LocalShard]:
        """What replicas that step by themselves last agreed on, and what is under way between
        them."""
        if self.outer is None:
            return
        self._anchored = saved is not None and any(name.startswith("outer/") for name in saved)
        for name, what, tensor in self.outer.kept(self.steps_done if saved is None else None):
            full = f"outer/{name}/{what}"
            if saved is None or full in saved:
                yield self._piece(full, tensor, name)

    def _kept(self) -> Iterator[tuple[str, Tensor]]:
        """What codecs keep from step to step: this rank's, of use to the same layout and codec
        alone."""
        each = (
            self.outer.states()
            if self.outer
            else self.reducer.exchange.states
            if self.reducer.exchange
            else ()
        )
        states = {str(i): s for i, s in enumerate(each)}
        states |= {name or "root": scatter.state for name, scatter in self._scatters.items()}
        shapes = [
            (name, key, tuple(t.shape))
            for name, state in states.items()
            for key, t in state.items()
        ]
        for name, key, _ in shapes:
            mark = crc32(repr((str(self.whole.layout), self.whole.sync, shapes)).encode())
            yield f"sync/{mark:08x}/{self.mesh.place}/{name}/{key}", states[name][key]

    # ---- replicas that come and go -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """This replica was left out, or has been started anew: it takes over all that one of the
        others has."""
        assert self.outer is not None and self.quorum is not None
        self.outer.forget()
        for _ in range(TRIES):
            group = self.quorum.ask()
            facts: dict[str, Any] = {}
            with suppress(RuntimeError):  # the other one has ended meanwhile
                facts = self._taken(group)
            if self._all_ranks(bool(facts)):
                self.load_scalars(facts)
                return
        raise WeftError(
            f"replica {self.replica} was left out, and {TRIES} others ended while it caught up from"
            " them"
        )

    def _taken(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """The scalars of the replica that gives; its tensors are this one's now."""
        assert self.outer is not None
        facts = state_transfer.receive_facts(group)
        pieces, kept = self._told(facts["names"])
        if [piece.name for piece in pieces] != facts["names"]:
            raise WeftError(
                f"replica {self.replica} and the one that it catches up from hold other things"
            )
        state_transfer.receive_tensors(group, [*(piece.tensor for piece in pieces), *kept])
        for name, tensor in self._kept():
            if name.endswith("/residual"):
                tensor.zero_()  # what the other one has not sent is not this one's to send
        return facts["scalars"]

    def _all_ranks(self, well: bool) -> bool:
        """Whether it is so on all ranks of the replica."""
        live, found = self.mesh.layout.live(), torch.tensor(int(well))
        if live:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self.mesh.group(*live))
        return bool(found)

    def _let_in_others(self) -> None:
        """Give those that asked at exchanges that have ended all that this replica has, if it is to
        do that."""
        assert self.outer is not None and self.quorum is not None
        while self.outer.ended:
            for group in self.quorum.grants(self.outer.ended.pop(0)):
                pieces, kept = self._told(None)
                facts = {"scalars": self.scalars(), "names": [piece.name for piece in pieces]}
                if self.outer.left:  # what it has is of no use, and who asked asks again
                    continue
                with suppress(RuntimeError):  # it is gone again
                    state_transfer.send_state(
                        group, facts, [*(piece.tensor for piece in pieces), *kept]
                    )

    def _told(self, names: Collection[str] | None) -> tuple[list[LocalShard], list[Tensor]]:
        """What a replica gives another one: all that a checkpoint holds, and what codecs keep."""
        pieces = [piece for piece in self.tensors(names) if not piece.name.startswith("sync/")]
        return pieces, [tensor for _, tensor in self._kept()]

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that take part, as far as this one knows, where each steps by itself."""
        if self.server is not None:
            return self.server.workers
        return self.quorum.members if self.quorum is not None else ()

    @property
    def leads(self) -> bool:
        """Whether this rank's replica speaks for all: others that step by themselves are silent."""
        return self.quorum is None or self.quorum.leads

    def leave(self) -> None:
        """This replica is done: others need not wait for it."""
        if self.quorum is not None:
            self.quorum.leave()

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        found = {
            "steps_done": self.steps_done,
            "loss_scale": self.loss_scale,
            "good_steps": self._good_steps,
        }
        return found | ({"norms": [*self.trust.norms]} if self.trust is not None else {})

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        if self.outer is not None and not self._anchored:
            self.outer.agree()
        self.steps_done = int(scalars["steps_done"])
        self.loss_scale, self._good_steps = float(scalars["loss_scale"]), int(scalars["good_steps"])
        if self.trust is not None:
            self.trust.remember(scalars.get("norms", ()))

    def segments(self, name: str) -> list[list[Segment]]:
        """Per dim of this rank's part of a parameter: where its rows lie in the global tensor."""
        placed = self._table[name].values()
        dims: list[list[Segment]] = [cut_segments([(0, n)]) for n in self._weights[name].shape]
        for p in placed:
            if p.cut is not None and p.stored != COPY:
                dims[p.cut.dim] = cut_segments(
                    list(p.cut.intervals(self.mesh.index(p.axis), self.mesh.size(p.axis)))
                )
        for p in placed:
            if p.stored != p.compute:
                rows = sum(length for _, _, length in dims[0])
                dims[0] = take_segments(
                    dims[0], *fsdp_rows(rows, self.mesh.size(p.axis), self.mesh.index(p.axis))
                )
        return dims

    def _piece(self, full: str, tensor: Tensor, name: str, replica: int = 0) -> LocalShard:
        cut = [axis for axis, p in self._table[name].items() if p.stored != COPY]
        writer = self._writes(self.plan.holders(name), cut, replica)
        return LocalShard(
            full, tensor, self._weights[name].shape, chunks_of(self.segments(name)), writer
        )

    def _writes(self, holders: Sequence[int], cut: Sequence[str], replica: int = 0) -> bool:
        """Whether this rank is the first of those that hold the same part of something, in this
        replica."""
        cut = self.plan.layout.expand(*cut)
        copies = [axis for axis in self.plan.layout.live() if axis not in (*cut, "pp", "dp")]
        here = self.mesh.coords.get("pp", 0) == holders[0] and (
            "dp" in cut or self.mesh.coords.get("dp", 0) == replica
        )
        return self._speaks and here and all(self.mesh.coords[axis] == 0 for axis in copies)

    def _buffer_holders(self, name: str) -> tuple[int, ...]:
        """The positions on `pp` that keep a buffer; what no stage changes is kept by all."""
        staging, placement = self.plan.staging, self.plan.schedule.placement
        stages = (
            [s.index for s in staging.stages if name in s.buffers] if staging is not None else []
        )
        return tuple(sorted({placement[stage] for stage in stages or range(len(placement))}))

    def _absent_buffers(self) -> set[str]:
        position = self.mesh.coords.get("pp", 0)
        return {
            name
            for name, _ in self.model.named_buffers()
            if position not in self._buffer_holders(name)
        }


def _own_device() -> torch.device:
    """The GPU of this process; the CPU where there is none or the process group talks through
    gloo."""
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def first_tensor_of(output: Any) -> Tensor:
    """The first tensor of a model's output: logits, as a rule."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


def _whole(output: Any) -> Any:
    """The output with no tensor sharded."""
    if isinstance(output, DTensor):
        return output.full_tensor()
    for key, value in output.items() if isinstance(output, dict) else ():
        if isinstance(value, DTensor):
            output[key] = value.full_tensor()
    return output


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """The positions on `pp` between which values cross."""
    at = plan.schedule.placement
    values = plan.staging.values if plan.staging is not None else ()
    pairs = {(at[value.source], at[target]) for value in values for target in value.targets}
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def make_state(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    saved: Collection[str],
    updates: Callable[[str], bool] = lambda name: True,
) -> None:
    """Optimizers make their state at the first step; a checkpoint, which holds the names `saved`,
    is loaded into state that is there. `updates`: whether this rank updates a parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    for name, p in params.items():
        if not updates(name):
            p.grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with_state = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    for name, p in params.items():
        if name not in with_state:  # no gradient ever came
            optimizer.state.pop(p, None)


def scale_grads(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, those of one kind together."""
    by_kind: dict[tuple, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), tensors in by_kind.items():
        torch._foreach_mul_(tensors, factor.to(device, dtype))


def check_batch(batch: Batch, want: int, whole: int) -> None:
    """Refuse a batch that is not this rank's part, `want` of the `whole` batch's samples. Raises
    ConfigError."""
    for key, value in batch.items():
        if value.shape[0] != want:
            hint = (
                "take this rank's part with engine.local(batch)"
                if value.shape[0] == whole
                else f"give {want}"
            )
            raise ConfigError(
                f"batch[{key!r}]", tuple(value.shape), f"this rank's part is {want} samples", hint
            )


def _check_optimizer(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    sharded = [axis for axis in ("fsdp", "tp") if axis in plan.layout.live()]
    if sharded and not isinstance(optimizer, ELEMENTWISE):
        raise ConfigError(
            "optimizer.name",
            type(optimizer).__name__,
            f"it looks at whole tensors, which {plan.layout} cuts over {' and '.join(sharded)}",
            "use dp, or one of " + ", ".join(cls.__name__ for cls in ELEMENTWISE),
        )


def _runs_on_cuda(sync: Sync) -> bool:
    return isinstance(sync, SyncEveryStep) and sync.route == "backend"


def check_codec(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """A codec that has the momentum goes with an optimizer that has none. Raises ConfigError."""
    codec = plan.sync.codec if plan.sync is not None and not plan.sync.plain else None
    if codec is None or not codec.has_momentum:
        return
    if type(optimizer) is not torch.optim.SGD or any(
        group["momentum"] for group in optimizer.param_groups
    ):
        raise ConfigError(
            "optimizer.name",
            type(optimizer).__name__,
            f"{codec.name} has the momentum, and sends sums of many steps",
            "use sgd without momentum, or another codec",
        )


def _unsynced_buffers(model: nn.Module, plan: Plan, absent: set[str]) -> list[Tensor]:
    """Buffers that replicas could come to differ in: those of the state, less statistics that the
    plan synchronises."""
    if not plan.layout.live(*TOKEN_AXES):
        return []
    kept = model.state_dict(keep_vars=True).keys()
    synced = {f"{name}." for name in plan.batchnorms}
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in kept - absent
        and not buffer.is_complex()
        and f"{name.rpartition('.')[0]}." not in synced
    ]
