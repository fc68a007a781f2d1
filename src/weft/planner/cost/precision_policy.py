"""In which dtypes a framework keeps and sends what belongs to a parameter, and what it
overlaps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """`compute`: what matmuls are computed in; with `wide_experts`, those of experts are in bf16
    where that is fp8.

    Bytes of one parameter: `weight_bytes` that rest; `copy_bytes` of a second copy in the dtype
    computed in, where there is one, which weights that fsdp gathers in use have none of; with
    `shards_weights` all that state is sharded over rests in shards, and copies alone are whole (as
    FSDP2 has it). `grad_bytes` of its gradient; `state_bytes` of the optimizer (with master
    weights); `average_bytes` of a moving average of a weight, which is sharded as the weight is. On
    the wire: `reduce_bytes` of its gradient, `gather_bytes` where sharded weights are gathered.
    `update_bytes` that an optimizer step reads and writes; `added_bytes`: where a
    microbatch's gradient is added to those before. `logit_bytes` at the peak, of one logit; whether
    these `logits_stay` through the backward, as Megatron-Core's fused cross-entropy leaves them,
    and whether the loss `gathers_logits` of all ranks of tp, of which then each holds all.
    More logits than `few_logits` are made by the loss in chunks, of `chunk_bytes` a logit, while
    gradients of the head are added up in `sum_bytes` each; where a backward comes in two parts,
    only if `always_chunks`.
    `dummy_bytes` of one block's gradients that stand in for those which a fused matmul has summed
    elsewhere (Transformer Engine). `messages`: in how many the sharded weights of a block are
    gathered, or its gradients reduced; `ahead`: units that are gathered beside the one that runs.
    `overlaps`: whether sums of gradients over data axes run beside backward; `sends_beside`:
    whether what the chunks of an interleaved pipeline send runs beside compute, as Megatron-Core
    overlaps it. `sums_whole`: whether ZeRO 1 sums whole gradients on each rank, which then updates
    its shard; `whole_bytes` of a gradient that flat buckets, casts and norms read and write for
    that. `awaits_weights`: whether a step ends when all updated shards are gathered, so that no
    forward hides it. `keeps_sent`: whether a stage keeps what it sent until the gradient comes,
    which Megatron-Core does not. `scatters`: whether ranks of tp send a part each of what goes to
    the next stage, and gather it there (Narayanan et al. 2021).
    `step_bytes` that a step of the optimizer needs for a moment beside what rests, when activations
    are gone. `start_bytes` of a weight that is whole for a moment before the first step; 0: nobody
    asks what the start holds.
    `offloads`: what rests in host memory where a layout is offloaded, of weights, gradients,
    optimizer and activations (of these, inputs of blocks that run again; Rajbhandari et al. 2021,
    ZeRO-Infinity). `host_activations`: whether, under any layout, what blocks save for backward
    does, but for two blocks. `bucket_bytes` of a flat copy of gradients, in which ranks of dp sum
    them after the backward: no block that activations left is so large, and the allocator takes
    more.
    """

    compute: str = "bf16"
    wide_experts: bool = False
    weight_bytes: float = 4.0
    copy_bytes: float = 0.0
    shards_weights: bool = False
    grad_bytes: float = 4.0
    state_bytes: float = 8.0
    average_bytes: float = 0.0
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    update_bytes: float = 30.0
    added_bytes: float = 0.0
    logit_bytes: float = 10.0
    logits_stay: bool = False
    gathers_logits: bool = False
    few_logits: float = float("inf")
    chunk_bytes: float = 0.0
    sum_bytes: float = 0.0
    always_chunks: bool = False
    dummy_bytes: float = 0.0
    messages: float = 1.0
    ahead: float = 1.0
    overlaps: bool = True
    sends_beside: bool = False
    sums_whole: bool = False
    whole_bytes: float = 0.0
    awaits_weights: bool = False
    keeps_sent: bool = False
    scatters: bool = False
    step_bytes: float = 0.0
    start_bytes: float = 0.0
    offloads: Collection[str] = ("weights", "gradients", "optimizer")
    host_activations: bool = False
    bucket_bytes: float = 0.0
