"""Engine: a model under a Plan, and one optimizer step of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from weft.core import (
    CompileChoice,
    CompileOptions,
    LocalShard,
    OutlierFilter,
    Plan,
    Segment,
    data_rank_indices,
)
from weft.nn import (
    GateBias,
    Randomness,
    check_entries,
    find_experts,
    mix_key,
    named_inputs,
    rebalance_gates,
)
from weft.parallel import (
    DATA_AXES,
    FEATURE_AXES,
    parallelize,
    plan_whole_batch,
)

from .batch_preparation import BatchPreparation
from .checkpoint_state import CheckpointState
from .chosen_gradients import ChosenGradients
from .compile_blocks import CompiledBlocks, compiled_modules, plan_compilation
from .compute_copies import ComputeCopies
from .context_parallel.sequence import ContextParallel
from .context_parallel.whole_sequence import run_on_whole_sequences
from .eval_metrics import NO_METRICS, check_metrics, split_totals
from .expert_load import ExpertLoad
from .forward_overrides import ForwardOverrides
from .fsdp_units import FSDPUnits
from .function_overrides import FunctionOverrides
from .grad_buckets import GradReducer
from .grad_update import GradUpdate
from .inference import Inference
from .initial_weights import allocate, fill_shards, move_to, share_weights
from .microbatch import Batch, check_batch
from .module_trail import ModuleTrail
from .optimizers import Optimizers
from .param_update import ParamUpdate
from .pipeline.stage_compute import (
    Loss,
    StageModel,
    TrainingCompute,
)
from .pipeline.stage_forward import StageForward
from .pipeline.weight_stash import WeightStash
from .protocol import StepResult
from .replica_sync.bucket_exchange import codec_scatters
from .replica_sync.choose import make_replica_sync
from .replica_sync.membership import ReplicaGroup
from .replicated_buffers import ReplicatedBuffers
from .sample_trial import Trials
from .setup import (
    check_request,
    deferring_heads,
    make_mesh,
    make_offload,
    make_runners,
    own_device,
    require_positionwise,
    sum_over_ranks,
)
from .sharding_trial import check_recompute
from .training_modes import training_modes


class EngineKeywords(TypedDict, total=False):
    """Further arguments of `Engine`."""

    sample: Batch | None
    company: ReplicaGroup | None


def _sample_and_company(
    sample: Batch | None = None, company: ReplicaGroup | None = None
) -> tuple[Batch | None, ReplicaGroup | None]:
    """What EngineKeywords hold; any other keyword raises a TypeError."""
    return sample, company


class Engine:
    """Trains `model` as `plan` says, and changes it in place. Every rank of the layout makes one.

    Weights and buffers of rank 0 are those that all ranks begin with. Modules of a model in
    training mode keep their own modes: a frozen batch norm stays frozen. `engine.optimizer` is
    torch's, of this rank's parts: set `param_groups[i]["lr"]`, or give it to a scheduler. Its
    `state_dict` is of this rank alone; `weft.checkpoint` saves for any layout.

    Args:
        model: the module that the plan was made for. `weft.deferred_init` makes one that no rank
            ever holds whole.
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
        compile: "blocks" compiles each block's forward and the loss by torch.compile, as do
            CompileOptions; "auto" does so on CUDA if blocks repeat, "off" never.
        sample: a batch of one sample, the same on every rank, on which the engine compares the
            output and every gradient of the whole and of the sharded model (`tp`, experts, `cp`;
            under `cp` without `sample`, on the first batch). Refused if they differ.
        company: where replicas with local steps meet, if each has a process group of its own.

    Raises:
        Refusal: what the plan, the optimizer or the loss cannot do together.

    Example:
        engine = weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=weft.losses.next_token)
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
        compile: CompileChoice | CompileOptions = "auto",
        **further: Unpack[EngineKeywords],
    ):
        sample, company = _sample_and_company(**further)
        device = torch.device(device) if device is not None else own_device()
        plan = plan_whole_batch(plan, loss)
        check_request(plan, clip, device)
        options, plan = plan_compilation(compile, plan, model, device)
        self.global_plan, self.plan = plan, plan.replica()
        plan, company = self.plan, company if self.global_plan.replicas_step_independently else None
        self.mesh = make_mesh(self.global_plan, plan, device, company)
        self.data_rank = self.global_plan.layout.index(self.mesh.place, *DATA_AXES)
        self.data_size = self.global_plan.data_size
        self.rank_plan = plan.of(self.mesh.rank)
        self.model, self._prepared = move_to(model, device), BatchPreparation(loss)
        self.inputs = tuple(named_inputs(model) if inputs is None else inputs)
        self.steps_done = 0
        self.trace: list | None = None  # where the pipeline's actions are recorded
        self.replicas = make_replica_sync(self.global_plan, self.mesh, company, optimizer)
        share_weights(model, self.mesh, self.replicas)
        if self.global_plan.replicas_step_independently and self.replicas.index:
            seed = mix_key(seed, self.replicas.index)  # its samples have numbers of their own
        feature_part = self.mesh.index(*FEATURE_AXES), self.mesh.size(*FEATURE_AXES)
        self.randomness = Randomness(seed, *feature_part)
        self.sequence = ContextParallel(plan, self.mesh, self.randomness, model, self.inputs)
        self.sequence.graphs = compiled_modules(model, plan, options)
        if self.sequence:
            require_positionwise(self._prepared.loss)
        modes = training_modes(model)
        self.trial: Trials | None = Trials.of(model, plan, self.mesh, self.sequence, sample, loss)
        self._shard(options)
        if sample is not None:
            self.trial.check(sample, self.state.weights, last=False)
        # kept: a step does not walk through the model again
        self._modes = [(m, modes.get(n, True)) for n, m in model.named_modules()]
        self._has_gates = any(isinstance(m, GateBias) for m, _ in self._modes)
        self._prepare(optimizer, clip, skip)
        self.loss = self._training.loss
        self._overrides = ForwardOverrides(
            model, self.rank_plan, self.mesh, self._training, self.loads, self.compiled
        )
        self.replicas.attach(self)

    def _shard(self, options: CompileOptions | None) -> None:
        """Change the model in place: afterwards it is this rank's part, in stages."""
        plan, model, device, staged = self.plan, self.model, self.mesh.device, None
        if plan.staging is not None:
            stages, skip = plan.stages(self.mesh.rank), self.randomness.skip
            staged = StageForward(model, plan.staging, stages, device, skip, plan.dtypes)
        self.loads = loads = ExpertLoad(model, find_experts(model), self.mesh)
        self.dispatch = parallelize(self.rank_plan, model, self.mesh, self.randomness)
        run_on_whole_sequences(model, self.rank_plan, self.sequence)
        self.compiled = CompiledBlocks(model, self.rank_plan, self.mesh, options, loads.modules)
        allocate(model, self.rank_plan, device)
        held = {w.name for w in self.rank_plan.weights}
        self.params = {n: p for n, p in model.named_parameters() if n in held}
        self.low = ComputeCopies(model, plan, self.params)
        heads = deferring_heads(model, self.rank_plan)
        self.stages = StageModel(model, plan, device, staged, self.sequence, self.low, heads)
        self._runner, _ = runners = make_runners(plan, self.mesh)
        self.units = FSDPUnits(model, self.rank_plan)
        parts = FunctionOverrides(self.randomness, False, self.sequence) if self.sequence else None
        self._inference = Inference(
            self.stages, self.mesh, self.sequence, *runners, self.units, parts, self.compiled
        )
        whose = self.mesh, self.params, self.replicas
        self.state = CheckpointState(model, plan, self.global_plan, *whose)
        fill_shards(model, self.state, self.mesh, self.replicas)
        self._absent_buffers = self.state.absent_buffers()
        self.buffers = ReplicatedBuffers(model, self.rank_plan, self.mesh, self._absent_buffers)

    def _prepare(self, optimizer: Optimizers, clip: float | None, skip: float | None) -> None:
        """The optimizer, and what happens between a backward and its step."""
        model, plan, params = self.model, self.plan, self.params
        mesh, serves = self.mesh, self.replicas.servers_update
        update = ParamUpdate(optimizer, plan, mesh, params, self.updates, serves)
        self.optimizer, self.held, self.updated_whole = update.optimizer, update.held, update.whole
        self.param_update, self.reducer = update, GradReducer(self.rank_plan, self.low.filled, mesh)
        self.state.scatters = codec_scatters(plan, self.units)
        self.state.update, self.state.reducer = self.param_update, self.reducer
        versions, loss = None, self._prepared.loss
        if not plan.whole_batch:  # whose gradients are taken apart from the graph
            loss = self.compiled.loss(loss)
        if plan.schedule.versions:
            versions = WeightStash(model, plan, self.mesh, self.low, self.param_update.step)
        units, offload = self.units, make_offload(plan, mesh.device)
        order = self.randomness, self.reducer, units, versions, offload
        self._training = TrainingCompute(self.stages, mesh, loss, *order)
        self._trail = ModuleTrail(model, units.names, self.compiled.blocks, plan.chosen)
        self._chosen = ChosenGradients(model, self.rank_plan, self.low.filled, units, mesh)
        self._update = GradUpdate(
            plan,
            self.mesh,
            self.low,
            self.param_update,
            self._training,
            self.reducer,
            self._trail,
            self._chosen if self.units.units else None,
            self.replicas,
            self.state.copies(),
            self.updates,
            self.state.owned,
            clip,
            OutlierFilter(skip),
        )
        if plan.staging is not None and not self._update.known_late:
            self._training.agree = self.mesh.group(*plan.layout.active_axes())

    # ---- one step --------------------------------------------------------------------------------

    def local(self, batch: Batch) -> Batch:
        """This rank's part of a global batch, whose tensors [batch, ...] have all samples."""
        check_entries(batch)
        order = self.global_plan.batch, self.global_plan.accumulate
        index = torch.tensor(data_rank_indices(*order, self.data_rank, self.data_size))
        return {key: value[index] for key, value in batch.items()}

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on this rank's part of a batch: tensors [batch / data ranks, ...]."""
        with torch.random.fork_rng([self.mesh.device] if self.mesh.device.type == "cuda" else []):
            return self._step(batch)  # the user's own draws are not ours to move

    def _step(self, batch: Batch) -> StepResult:
        self.connect()
        batch = self._on_device(batch)
        trial, self.trial = self.trial, None
        if trial is not None:
            trial.check(batch, self.state.weights, last=True)
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode
        self.param_update.clear_gradients()
        self.buffers.refresh()
        missing = self._forward_backward(batch)
        check_recompute(self.plan, self._training.functions)
        result = self._update(missing, self.steps_done)
        if self._has_gates:
            sum_loads = partial(sum_over_ranks, self.mesh.group(*self.plan.token_axes))
            rebalance_gates(self.model, sum_loads, self._absent_buffers, taken=not result.skipped)
        self.steps_done += 1
        self.replicas.after_step(self.steps_done)
        self._overrides.settle()
        return result

    def _forward_backward(self, batch: Batch) -> list:
        """Run the schedule. Returns the parameters that no gradient reached."""
        plan, training, self.reducer.trace = self.plan, self._training, self.trace
        micros = self.sequence.cut(batch).split(plan.microbatch, plan.accumulate)
        self._trail.clear()
        self._chosen.clear()
        # a constant divisor keeps fp16 in range; the true mean is taken at the end
        training.begin(self.steps_done, micros, self.loss_scale / plan.batch)
        self._runner.run(training, [micros[0].signature] * len(micros), trace=self.trace)
        self.units.finish()
        return self.reducer.finish()

    def _on_device(self, batch: Batch) -> Batch:
        device, batch = self.mesh.device, self._prepared(batch)
        check_batch(batch, self.plan.batch // self.plan.data_size, self.global_plan.batch)
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}

    # ---- forward alone ---------------------------------------------------------------------------

    def evaluate(self, batch: Batch, metrics: Mapping[str, Loss] = NO_METRICS) -> StepResult:
        """The mean loss of a batch over all ranks, in evaluation mode. `batch` as for `step`;
        `metrics`: name -> (output, batch) -> (sum, weight). Where replicas step independently, each
        computes with its own weights."""
        check_metrics(metrics, self.plan)
        totals = self._inference.evaluate(self._on_device(batch), self.loss, metrics)
        self.replicas.sum_over(totals, self.steps_done)
        loss, weight, found = split_totals(totals, metrics)
        return StepResult(loss, weight, metrics=found)

    def forward(self, batch: Batch) -> Any:
        """The model's output in evaluation mode, logits whole on every rank. All ranks call it
        together."""
        return self._inference.output(batch)

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
        return self._training.now()

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
        return {"steps_done": self.steps_done, **self._update.scalars()}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Go on from what `scalars` returned; the tensors are loaded already."""
        self.replicas.restored()
        self.steps_done = int(scalars["steps_done"])
        self._update.load_scalars(scalars)

    def connect(self) -> None:
        """Begin to serve, and get weights from servers. The first step does it if nobody has."""
        self.replicas.connect()

    def gather(self, last: bool = False) -> bool:
        """Before weights are evaluated or saved: the replica that leads gets what servers hold;
        all replicas call it with `last`, after all steps. False if this replica was left out."""
        return self.replicas.gather(last)

    def leave(self) -> None:
        """This replica is done: others need not wait for it."""
        self.replicas.leave()

    def close(self) -> None:
        """After all steps, on all ranks, before the process group is destroyed."""
        self.gather(last=True)
        self.leave()
