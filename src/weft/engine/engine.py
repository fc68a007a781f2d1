"""Engine: a model under a Plan, and one optimizer step of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.core import (
    DATA_AXES,
    EXPERTS,
    TOKEN_AXES,
    LocalShard,
    Plan,
    Segment,
    UnsupportedModel,
    data_rank_indices,
)
from weft.nn import (
    Randomness,
    experts_of,
    mix_key,
    model_arguments,
    named_inputs,
    rebalance_gates,
)
from weft.parallel import parallelize

from .checkpoint_state import CheckpointState
from .context_parallel.sequence import ContextParallel
from .expert_load import ExpertLoad
from .fsdp import FSDPUnits
from .function_overrides import FunctionOverrides
from .grad_buckets import GradReducer
from .grad_norm_guard import GradNormGuard
from .grad_update import GradUpdate
from .module_trail import ModuleTrail
from .optimizers import Optimizers, check_codec, check_optimizer
from .pipeline.stage_compute import (
    Batch,
    InferenceCompute,
    Loss,
    MicroBatches,
    StageModel,
    TrainingCompute,
    batch_signature,
    check_batch,
)
from .pipeline.stage_forward import StageForward
from .pipeline.weight_stash import WeightStash
from .protocol import StepResult
from .replica_sync.bucket_exchange import codec_scatters
from .replica_sync.choose import make_replica_sync
from .replica_sync.membership import ReplicaGroup
from .setup import (
    check_request,
    make_mesh,
    make_runners,
    own_device,
    require_positionwise,
    share_initial,
    unsynced_buffers,
)
from .trial_forward import check_sequence_parts, check_sharded_output


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
        device = torch.device(device) if device is not None else own_device()
        check_request(plan, clip, device)
        self.global_plan, self.plan = plan, plan.replica() if plan.separate else plan
        plan, company = self.plan, company if self.global_plan.separate else None
        self.mesh = make_mesh(self.global_plan, plan, device, company)
        self.data_rank = self.global_plan.layout.index(self.mesh.place, *DATA_AXES)
        self.data_size = self.global_plan.data_size
        self.rank_plan = plan.of(self.mesh.rank)
        self.model, self.loss = model.to(device), loss
        self.inputs = tuple(inputs) if inputs is not None else named_inputs(model)
        self.steps_done = 0
        self.trace: list | None = None  # where the pipeline's actions are recorded, if anywhere
        self.replicas = make_replica_sync(self.global_plan, self.mesh, company, optimizer)
        share_initial(model, self.mesh, self.replicas)
        if self.global_plan.separate and self.replicas.index:
            seed = mix_key(seed, self.replicas.index)  # its samples have numbers of their own
        self.randomness = Randomness(seed, self.mesh.index("tp"), self.mesh.size("tp"))
        names = named_inputs(model)
        self.sequence = ContextParallel(plan, self.mesh, self.randomness, names, self.inputs)
        self.tried = not self.sequence  # whether the trial in parts of the sequence has passed
        parts = self.sequence if self.sequence else None
        if parts is not None:
            require_positionwise(loss)
        self._in_parts = FunctionOverrides(self.randomness, False, parts) if parts else None
        self._modes = {n: m.training or not model.training for n, m in model.named_modules()}
        tried = sample is not None and plan.layout.live("tp", EXPERTS)
        before = self._unsharded_output(sample) if sample is not None and tried else None
        self._shard()
        if sample is not None and before is not None:
            experts = self.dispatch.group is not None
            check_sharded_output(self.forward, before, sample, plan, experts)
        if sample is not None and self.sequence:
            self._try_in_parts(sample)
        self._prepare_update(optimizer, clip, skip)
        functions = FunctionOverrides(
            self.randomness, plan.recompute == "selective", parts, mesh=self.mesh, loads=self.loads
        )
        self._training.functions = functions
        self.replicas.attach(self)

    def _shard(self) -> None:
        """Change the model in place: afterwards it is this rank's part, in stages."""
        plan, model, staged = self.plan, self.model, None
        if plan.staging is not None:
            stages = plan.stages(self.mesh.rank)
            staged = StageForward(model, plan.staging, stages, skipped=self.randomness.skip)
        self.loads = ExpertLoad(model, experts_of(model), self.mesh)
        self.dispatch = parallelize(self.rank_plan, model, self.mesh, self.randomness)
        held = {w.name for w in self.rank_plan.weights}
        self.params = {name: p for name, p in model.named_parameters() if name in held}
        self.stages = StageModel(model, plan, self.mesh.device, self.inputs, staged, self.sequence)
        self._runner, self._forward_runner = make_runners(plan, self.mesh)
        self.units = FSDPUnits(model, self.rank_plan)
        self.state = CheckpointState(
            model, plan, self.global_plan, self.mesh, self.params, self.replicas
        )
        self._absent_buffers = self.state.absent_buffers()
        self._stale_buffers = unsynced_buffers(model, self.rank_plan, self._absent_buffers)

    def _prepare_update(
        self, optimizer: Optimizers, clip: float | None, skip: float | None
    ) -> None:
        """The optimizer, and what happens between a backward and its step."""
        plan, params, device = self.plan, self.params, self.mesh.device
        trainable = [(name, p) for name, p in params.items() if p.requires_grad]
        # a stage whose weights are all frozen still has an optimizer, of nothing
        self.optimizer = optimizer(trainable or [("", nn.Parameter(torch.zeros(0, device=device)))])
        check_optimizer(self.optimizer, plan)
        self.reducer = GradReducer(self.rank_plan, params, self.mesh)
        scatters = codec_scatters(plan, self.units)
        check_codec(self.optimizer, plan)
        self.state.optimizer, self.state.reducer = self.optimizer, self.reducer
        self.state.scatters = scatters
        versions = None
        if plan.schedule.versions:
            versions = WeightStash(
                self.model, plan, self.mesh, params, lambda: self.optimizer.step()
            )
        self._training = TrainingCompute(
            self.stages, self.mesh, self.loss, self.randomness, self.reducer, self.units, versions
        )
        self._trail = ModuleTrail(self.model, watch=bool(self.units.units))
        self._update = GradUpdate(
            plan,
            self.mesh,
            params,
            self.optimizer,
            self._training,
            self.reducer,
            self._trail,
            bool(self.units.units),
            self.replicas,
            self.state.copies(),
            self.updates,
            self.state.owned,
            clip,
            GradNormGuard(skip) if skip is not None else None,
        )
        if plan.staging is not None and not self._update.wants_norm and not self.reducer.buckets:
            self._training.agree = self.mesh.group(*plan.layout.live())

    # ---- one step --------------------------------------------------------------------------------

    def local(self, batch: Batch) -> Batch:
        """This rank's part of a global batch (every tensor's dim 0 counts the plan's `batch`
        samples)."""
        plan = self.global_plan
        index = data_rank_indices(plan.batch, plan.accumulate, self.data_rank, self.data_size)
        return {key: value[torch.tensor(index)] for key, value in batch.items()}

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on this rank's part of the batch: dict of tensors [batch / data ranks,
        ...]."""
        with torch.random.fork_rng([self.mesh.device] if self.mesh.device.type == "cuda" else []):
            return self._step(batch)  # the user's own draws are not ours to move

    def _step(self, batch: Batch) -> StepResult:
        self.connect()
        batch = self._on_device(batch)
        if not self.tried:
            self._try_in_parts({key: value[:2] for key, value in batch.items()})
        self._train_mode()
        self.optimizer.zero_grad(set_to_none=True)
        self._refresh_buffers()
        missing = self._forward_backward(batch)
        self._check_attention()
        result = self._update(missing, self.steps_done)
        taken = not result.skipped
        rebalance_gates(self.model, self._of_all_tokens, self._absent_buffers, taken=taken)
        self.steps_done += 1
        self.replicas.after_step(self.steps_done)
        self._drop_unused_overrides()
        return result

    def _forward_backward(self, batch: Batch) -> list:
        """Run the schedule. Returns the parameters that no gradient reached."""
        training, micros = self._training, self._microbatches(self.sequence.cut(batch))
        self._trail.clear()
        # a constant divisor keeps fp16 in range; the true mean is taken at the end
        training.begin(self.steps_done, micros, self.loss_scale / self.plan.batch)
        self._runner.run(training, [batch_signature(micros[0])] * len(micros), trace=self.trace)
        self.units.finish()
        return self.reducer.finish()

    def _of_all_tokens(self, loads: Tensor) -> Tensor:
        """Counts of this rank's tokens -> of all."""
        group = self.mesh.group(*self.plan.token_axes)
        if group is not None:
            dist.all_reduce(loads, group=group)
        return loads

    def _train_mode(self) -> None:
        for name, module in self.model.named_modules():
            module.training = self._modes.get(name, True)

    def _microbatches(self, batch: Batch) -> MicroBatches:
        return MicroBatches(batch, self.plan.microbatch, self.plan.accumulate)

    def _on_device(self, batch: Batch) -> Batch:
        check_batch(batch, self.plan.batch // self.plan.data_size, self.global_plan.batch)
        return {key: value.to(self.mesh.device, non_blocking=True) for key, value in batch.items()}

    def _refresh_buffers(self) -> None:
        """Every replica starts a step from the first one's buffers, as one device would have one
        set of them."""
        group = self.mesh.group(*TOKEN_AXES)
        if group is not None:
            for buffer in self._stale_buffers:
                dist.broadcast(buffer, group=group, group_src=0)

    def _check_attention(self) -> None:
        """Whether what the plan does with attention happened: a stage may have none."""
        core = "torch.nn.functional.scaled_dot_product_attention"
        problem = "the model never calls scaled_dot_product_attention"
        functions = self._training.functions
        if self.sequence and self.plan.staging is None and self.sequence.calls == 0:
            fix = f"use dp or fsdp, or attention through {core}"
            raise UnsupportedModel("layout", str(self.plan.layout), problem, fix)
        if self.plan.recompute == "selective" and functions and functions.attention_cores == 0:
            fix = f'use "full" or "none", or attention through {core}'
            raise UnsupportedModel("train.recompute", "selective", problem, fix)

    def _drop_unused_overrides(self) -> None:
        """A model without dropout pays nothing for it after the first step."""
        training = self._training
        routed = training.functions is not None and training.functions.routed
        needed = self.sequence or self.loads or routed or self.randomness.drawn
        if self.plan.recompute != "selective" and not needed:
            training.functions = None

    # ---- forward alone ---------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepResult:
        """The mean loss of a batch over all ranks, in evaluation mode. `batch` as for `step`. Where
        replicas step independently, each computes with its own weights."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

        def add(output: Any, micro: Batch) -> None:
            with self.stages.autocast():
                loss, weight = self.loss(output, micro)
            total.add_(torch.stack([loss, torch.as_tensor(weight, device=loss.device)]).double())

        micros = self._microbatches(self.sequence.cut(self._on_device(batch)))
        work = InferenceCompute(self.stages, micros, add, self._in_parts)
        self._runner.run(work, [batch_signature(micros[0])] * len(micros), forward_only=True)
        self.units.reshard()
        group = self.mesh.group(*TOKEN_AXES, "pp")
        if group is not None:
            dist.all_reduce(total, group=group)
        self.replicas.sum_over(total, self.steps_done)
        return StepResult(total[0] / total[1], total[1])

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's output in evaluation mode, logits whole on every rank. All ranks call it
        together."""
        return self._output(batch, False)

    def _output(self, batch: Batch, in_parts: bool) -> Any:
        """`in_parts`: ranks share the sequence. Otherwise each runs all of it."""
        self.model.eval()
        batch = {key: value.to(self.mesh.device) for key, value in batch.items()}
        outputs: list[Any] = []
        self.sequence.end()
        functions = self._in_parts if in_parts else None
        if functions is not None:
            batch = self.sequence.cut(batch)
        work = InferenceCompute(
            self.stages, [batch], lambda output, _: outputs.append(_unsharded(output)), functions
        )
        self._forward_runner.run(work, [batch_signature(batch)], forward_only=True)
        self.units.reshard()
        group = self.mesh.group("pp")
        if group is not None:
            source, device = self.plan.schedule.placement[-1], self.mesh.device
            outputs = outputs or [None]
            dist.broadcast_object_list(outputs, group_src=source, group=group, device=device)
        return outputs[0]

    @torch.no_grad()
    def _unsharded_output(self, batch: Batch) -> Any:
        """The output of the model before it is sharded."""
        self.model.eval()
        device = self.mesh.device
        model = StageModel(self.model, self.plan, device, self.inputs, None, self.sequence)
        with model.autocast():
            placed = {k: v.to(device) for k, v in batch.items()}
            return self.model(**model_arguments(self.inputs, placed))

    def _try_in_parts(self, sample: Batch) -> None:
        self.tried = True
        check_sequence_parts(self._output, sample, self.plan, self.sequence)

    # ---- what is known of a step -----------------------------------------------------------------

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for other stages."""
        return self._runner.waited_s

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by, to keep fp16 gradients in range."""
        return self._update.loss_scale.value

    def now(self) -> tuple[str, int]:
        """The kind of the action that runs, and its microbatch."""
        action = self._training.action
        return ("", 0) if action is None else (action.kind, action.microbatch)

    @property
    def stale_buffer_bytes(self) -> list[int]:
        """Bytes of each buffer that is broadcast at the start of a step."""
        return [buffer.nbytes for buffer in self._stale_buffers]

    def updates(self, name: str) -> bool:
        """Whether this rank updates a parameter; otherwise the replica that owns it sends it."""
        return self.state.updates(name)

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, or its part."""
        return self.state.holds(name)

    def segments(self, name: str) -> list[list[Segment]]:
        """Per dim of this rank's part of a parameter: where its rows lie in the global tensor."""
        return self.state.segments(name)

    # ---- checkpoints, and the end ----------------------------------------------------------------

    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]:
        """Weights, buffers and optimizer state: this rank's part of each, by global name. Storage
        is live. `saved`: the names in a checkpoint that is to be loaded into them."""
        return self.state.tensors(self.steps_done, saved)

    def codec_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What codecs keep from step to step, by name."""
        return self.state.codec_tensors()

    @property
    def codec_state_lost(self) -> bool:
        """Whether the loaded checkpoint had codec state of another layout or codec."""
        return self.state.codec_state_lost

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        scale, guard = self._update.loss_scale, self._update.guard
        found = {
            "steps_done": self.steps_done,
            "loss_scale": scale.value,
            "good_steps": scale.good_steps,
        }
        return found | ({"norms": [*guard.norms]} if guard is not None else {})

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Go on from what `scalars` returned; the tensors are loaded already."""
        self.replicas.restored()
        self.steps_done = int(scalars["steps_done"])
        scale, guard = self._update.loss_scale, self._update.guard
        scale.value, scale.good_steps = float(scalars["loss_scale"]), int(scalars["good_steps"])
        if guard is not None:
            guard.remember(scalars.get("norms", ()))

    def connect(self) -> None:
        """Where there are asynchronous servers: begin to serve, and get weights. The first step
        does it, if nobody has."""
        self.replicas.connect()

    def gather(self, last: bool = False) -> bool:
        """Before weights are evaluated or saved: where servers hold them, these and their
        optimizers' state become this rank's too. The replica that leads calls it, and all do with
        `last`, after all steps. Returns False if this replica has been left out, so that its
        weights are not what others go on from."""
        return self.replicas.gather(last)

    def leave(self) -> None:
        """This replica is done: others need not wait for it."""
        self.replicas.leave()

    def close(self) -> None:
        """All steps are taken; all ranks call it before the process group is destroyed. Where
        servers hold the weights, the replica that leads then has the last ones."""
        self.gather(last=True)
        self.leave()


def _unsharded(output: Any) -> Any:
    """The output with no tensor sharded."""
    if isinstance(output, DTensor):
        return output.full_tensor()
    for key, value in output.items() if isinstance(output, dict) else ():
        if isinstance(value, DTensor):
            output[key] = value.full_tensor()
    return output
