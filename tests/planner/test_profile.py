"""The work of a module, read off a forward without data: against closed forms, against what real
forwards keep, and against plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft._torch.tensors import storage_id
from weft.core.errors import UnsupportedModel
from weft.core.layout import EXPERTS
from weft.core.precision import DtypeRule
from weft.core.whole_updates import stored_numel, stored_segments
from weft.engine.function_overrides import FunctionOverrides
from weft.launch.local_workers import Pool
from weft.nn.dropout_rng import Randomness
from weft.nn.losses import classification, next_token
from weft.nn.models import convnet, decoder
from weft.nn.module_roles import find_roles
from weft.parallel.low_precision import low_precision
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.memory import part_params, stage_params
from weft.planner.cost.model_work import BlockWork, ModelWork, OpWork
from weft.planner.cost.pipeline_stages import stage_shares
from weft.planner.cost.profile import profile_model

VOCAB, LENGTH, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 96, 32, 32, 3, 4, 2, 64
WIDTH, KEYS = DIM, KV_HEADS * DIM // HEADS
Batch = dict[str, Tensor]


def own(**options: Any) -> nn.Module:
    return decoder(VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, seq_len=LENGTH, **options)


def hf(config: str, kind: str, **options: Any) -> nn.Module:
    """A small model of transformers."""
    transformers = pytest.importorskip("transformers")
    names = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    settings = getattr(transformers, config + "Config")(**(names | options))
    return getattr(transformers, kind)(settings).train()


class Encoder(nn.Module):
    """torch's own encoder, whose attention calls no linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "decoder": partial(own, dropout=0.1),
    "tied": partial(own, tied=True),
    "mixture": partial(own, experts=4, active=2, shared=1),
    "llama": partial(
        hf, "Llama", "LlamaForCausalLM", num_key_value_heads=KV_HEADS, intermediate_size=HIDDEN
    ),
    "gpt2": partial(hf, "GPT2", "GPT2LMHeadModel", n_positions=LENGTH),
    "bert": partial(
        hf, "Bert", "BertForMaskedLM", intermediate_size=HIDDEN, max_position_embeddings=LENGTH
    ),
    "t5": partial(
        hf, "T5", "T5ForConditionalGeneration", d_kv=DIM // HEADS, d_ff=HIDDEN, num_decoder_layers=2
    ),
    "deepseek": partial(
        hf,
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=HEADS,
        intermediate_size=HIDDEN,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def tokens(name: str = "", rows: int = 1) -> Batch:
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % VOCAB
    short = ids[:, :20].clone()
    return {"input_ids": ids} | (
        {"decoder_input_ids": short, "labels": short} if name == "t5" else {}
    )


def traced(name: str, **options: Any) -> ModelWork:
    with torch.device("meta"):
        model = MODELS[name]()
    return profile_model(model, tokens(name), next_token, **options)


def ops(work: ModelWork) -> Iterator[tuple[BlockWork, OpWork]]:
    for block in work.blocks:
        for op in block.ops:
            yield block, op


CUT = ("features", "vocabulary", "expert")  # what axes of the model divide


def saved(work: ModelWork, tp: int = 1, cuts: tuple[str, ...] = CUT) -> float:
    """Bytes that a rank of `tp`, which divides these, keeps of one sample."""
    return sum(b.count * op.saved_bytes / (tp if op.cut in cuts else 1) for b, op in ops(work))


# ---- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_a_decoder_is_what_its_dimensions_say(name: str) -> None:
    work = traced(name)
    attention, mlp = DIM * (2 * WIDTH + 2 * KEYS), 3 * DIM * HIDDEN
    first, block, norm, head = work.blocks
    assert [b.count for b in work.blocks] == [1, LAYERS, 1, 1] and work.depth == LAYERS
    assert dict(first.params) == {"vocabulary": VOCAB * DIM} == dict(head.params) and dict(
        norm.params
    ) == {"whole": DIM}
    assert dict(block.params) == {"features": attention + mlp, "whole": 2 * DIM}

    matmuls = [op for op in block.ops if op.kind == "matmul"]
    assert all(op.cut == "features" and not op.core and op.backward == 2 for op in matmuls)
    assert sum(op.flops for op in matmuls) == 2 * LENGTH * (attention + mlp)
    assert sorted((op.flops / op.matmuls, op.matmuls) for op in matmuls) == [
        (2 * LENGTH * DIM * KEYS, 2),
        (2 * LENGTH * DIM * WIDTH, 2),
        (2 * LENGTH * DIM * HIDDEN, 3),
    ]
    (core,) = [op for op in block.ops if op.kind == "attention"]
    full = 4 * LENGTH * LENGTH * WIDTH
    assert (core.flops, core.cut, core.core, core.backward) == (full / 2, "features", True, 2.5)
    # a sum for each query, and what it gives, where the projection does not keep that itself
    assert core.saved_bytes == 4 * LENGTH * (HEADS + (WIDTH if name == "decoder" else 0))
    assert sum(op.flops for op in head.ops) == 2 * LENGTH * DIM * VOCAB
    assert (
        work.model_flops
        == 6 * LENGTH * (LAYERS * (attention + mlp) + DIM * VOCAB) + 3 * LAYERS * full
    )

    stream = 4 * LENGTH * DIM
    assert (
        first.output_bytes == block.output_bytes == stream
        and head.output_bytes == 4 * LENGTH * VOCAB
    )
    assert (block.reduced_bytes, block.reductions) == (2 * stream, 2) and (
        first.reductions,
        head.reductions,
    ) == (1, 0)
    assert (block.key_bytes, block.query_bytes) == (2 * 4 * LENGTH * KEYS, 2 * stream)
    assert (block.heads, block.kv_heads, block.experts, work.tokens, work.vocab) == (
        HEADS,
        KV_HEADS,
        0,
        LENGTH,
        VOCAB,
    )


def test_experts_have_as_many_tokens_each() -> None:
    block = traced("mixture").blocks[1]
    per, rows = 3 * DIM * HIDDEN, 2 * LENGTH
    up, down = sorted(
        (op for op in block.ops if op.cut == "expert" and op.kind == "matmul"),
        key=lambda op: -op.flops,
    )
    assert (up.flops + down.flops, up.matmuls, down.matmuls) == (2 * rows * per, 4, 4)
    assert dict(block.params)["expert"] == 4 * per and (block.experts, block.routed_bytes) == (
        4,
        4 * rows * DIM,
    )
    rows_saved = sum(op.saved_bytes for op in block.ops if op.cut == "expert")
    assert (
        rows_saved == 4 * rows * 4 * HIDDEN
    )  # a gate and what it gates (in one), its activation, and the product
    assert (block.reductions, block.reduced_bytes) == (
        3,
        3 * 4 * LENGTH * DIM,
    )  # attention, experts, what all share


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_block(name: str) -> None:
    work = traced(name)
    assert work.params == sum(p.numel() for p in MODELS[name]().parameters())
    assert [b.tied for b in work.blocks if b.name in ("head", "lm_head")] == [
        name in ("tied", "gpt2", "t5")
    ] * (name != "bert")


# ---- what is kept --------------------------------------------------------------------------------


def kept(run: Callable[[], Any], model: nn.Module) -> float:
    """Bytes of the storages that autograd keeps of what runs, parameters apart."""
    weights = {storage_id(p) for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        if storage_id(t) not in weights:
            held[storage_id(t)] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for t in held.values())


def forward(model: nn.Module, batch: Batch, precision: str) -> None:
    draws = Randomness(0)
    draws.begin(0, [*range(len(batch["input_ids"]))])
    with ExitStack() as stack:
        stack.enter_context(FunctionOverrides(draws, selective=False))
        if precision == "bf16":
            blocks = [block for found in find_roles(model, None).blocks for block in found]
            stack.enter_context(low_precision(model, DtypeRule("bf16"), blocks))
        model(**{key: t for key, t in batch.items() if key != "labels"})


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in MODELS), ("decoder", "bf16"), ("deepseek", "bf16")],
)
def test_what_is_kept_is_what_a_real_forward_keeps(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for p in model.parameters() if precision == "bf16" else ():
        p.data = p.data.bfloat16()
    few, many = (
        kept(partial(forward, model, tokens(name, rows), precision), model) for rows in (3, 5)
    )
    assert saved(traced(name, precision=precision)) == (many - few) / 2


def test_kernels_of_a_gpu_keep_less() -> None:
    cpu, gpu = traced("decoder"), traced("decoder", device="cuda")
    assert (
        saved(cpu) - saved(gpu) == (2 * LAYERS + 1) * 4 * LENGTH * DIM
    )  # what each norm made before its weight
    assert cpu.model_flops == gpu.model_flops and cpu.params == gpu.params
    for block in traced("deepseek", device="cuda").blocks[1:3]:  # keys 16 wide, values 8
        (core,) = [op for op in block.ops if op.core]
        assert (core.kind, core.flops) == ("attention", LENGTH * LENGTH * HEADS * (16 + 8))


def test_what_the_loss_keeps_counts_where_there_is_no_vocabulary() -> None:
    batch = {"image": torch.randn(4, 1, 8, 8), "label": torch.arange(4)}
    model = convnet(8, 5)

    def run(rows: int) -> None:
        part = {key: t[:rows].clone() for key, t in batch.items()}
        classification(model(part["image"]), part)

    work = profile_model(model, batch, classification)
    assert saved(work) == (kept(partial(run, 4), model) - kept(partial(run, 2), model)) / 2
    assert [b.name for b in work.blocks] == [
        "stages.0",
        "stages.1",
        "stages.2",
        "head",
    ] and work.vocab == 0
    convolutions = [op.flops for _, op in ops(work) if op.kind == "matmul"]
    assert convolutions == [2 * 64 * 9 * 8, 2 * 16 * 9 * 8 * 16, 2 * 4 * 9 * 16 * 32, 2 * 32 * 5]
    assert sum(op.cut != "whole" for _, op in ops(work)) == 0


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("decoder", "tp2"),
        ("encoder", "tp2"),
        ("gpt2", "tp2"),
        ("bert", "tp2"),
        ("t5", "tp2"),
        ("llama", "tp2+sequence"),
        ("mixture", "tp2"),
        ("mixture", "ep2.tp2"),
        ("deepseek", "ep4"),
    ],
)
def test_a_ranks_parameters_are_its_plans(name: str, layout: str) -> None:
    work = traced(name)
    with torch.device("meta"):
        plan = weft.plan(MODELS[name](), layout, batch=8, loss=next_token)
    table, tp = plan.params(), plan.layout.size("tp")
    ways = {"features": tp, "vocabulary": tp, "expert": tp * plan.layout.size(EXPERTS)}
    mine = sum(
        b.count * n / ways.get(cut, 1) for b in work.blocks if not b.tied for cut, n in b.params
    )
    assert mine == sum(prod(plan.local_shape(weight, table)) for weight in plan.weights)


def test_an_attention_without_linears_is_summed_too() -> None:
    layers = [block for block in traced("encoder").blocks if block.repeated]
    assert {(b.reductions, b.reduced_bytes) for b in layers} == {(2, 2 * 4 * LENGTH * DIM)}


@pytest.mark.parametrize(
    "parts",
    [
        {"embedding": "fsdp+tp", "head": "fsdp"},
        {"blocks.0": "tp", "*.attention": "whole"},
        {"*.mlp": "fsdp", "*": "tp"},
    ],
)
def test_what_a_rank_stores_of_parts_is_its_plans(parts: dict[str, str]) -> None:
    work = profile_model(own(), tokens("decoder", 1), next_token, parts=parts)
    with torch.device("meta"):
        plan = weft.plan(own(), "fsdp2.tp2", batch=8, loss=next_token, parts=parts)
    table = plan.params()
    want = sum(
        stored_numel(stored_segments(plan, w.shape, table[w.name], rank))
        for w in plan.weights
        for rank in range(4)
    )
    choices = LayoutBatch.of([plan.layout], batch=8)
    first = stage_shares(work, choices)[0]
    _, plain = stage_params(first, work, choices)
    more, unsharded = part_params(first, work, choices)
    assert (plain / 2 + more).item() == pytest.approx(want / 4)
    kept = {n for n in table if all(p.stored == p.compute for p in table[n].values())}
    mine = sum(prod(plan.local_shape(w, table)) for w in plan.weights if w.name in kept)
    assert unsharded.item() == mine


def rank_keeps(name: str, layout: str) -> float:
    """Bytes that this rank keeps of one sample in a step."""

    def of(rows: int) -> float:
        torch.manual_seed(0)
        model = MODELS[name]()
        plan = weft.plan(model, layout, batch=rows, loss=next_token)
        engine = weft.Engine(
            model, plan, optimizer=partial(torch.optim.SGD, lr=0.1), loss=next_token
        )
        engine.step(tokens(name, rows))
        nbytes = kept(lambda: engine.step(tokens(name, rows)), model)
        engine.close()
        return nbytes

    return (of(4) - of(2)) / 2


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("decoder", "tp2"),
        ("decoder", "tp2+sequence"),
        ("bert", "tp2"),
        ("encoder", "tp2"),
        ("mixture", "tp2"),
    ],
)
def test_a_rank_of_two_keeps_its_part(pool: Pool, name: str, layout: str) -> None:
    # of the vocabulary: logits of half, the target's column, five numbers of the softmax, and two
    # masks
    vocabulary = LENGTH * (4 * VOCAB // 2 + 8 + 5 * 4 + 1 + 1)
    work = traced(name)
    cuts = (*CUT, *(["sequence"] if "sequence" in layout else []))
    assert (
        pool.run(partial(rank_keeps, name, layout), world=2)
        == [saved(work, 2, cuts) + vocabulary] * 2
    )


# ---- what is run, and what is not ----------------------------------------------------------------


def test_of_equal_blocks_two_are_run() -> None:
    ran: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

        def forward(self, x: Tensor) -> Tensor:
            ran.append(x)
            return x + self.down(F.relu(self.up(x)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Layer(16 if i < 3 else 32) for i in range(50))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    work = profile_model(
        Stack(), {"x": torch.randn(1, 8), "label": torch.zeros(1, dtype=torch.long)}, classification
    )
    assert len(ran) == 2 * (2 + 2)  # two batches, two kinds
    assert [(b.name, b.count) for b in work.blocks] == [
        ("stem", 1),
        ("layers.0 .. layers.2", 3),
        ("layers.3 .. layers.49", 47),
        ("head", 1),
    ]
    layer = work.blocks[1]
    # at once a gradient that comes, that of what `down` takes, and that of what `up` makes
    assert layer.working_bytes == 4 * (8 + 16 + 16)
    # forward a relu and a sum; backward a relu's gradient, and that of the input from both ways
    assert {op.backward for op in layer.ops if op.kind == "memory" and op.moved_bytes} == {
        (48 + 24) / (32 + 24)
    }
    # of the stem's input there is no gradient
    stem, rest = 8 * 8, 3 * 2 * 8 * 16 + 47 * 2 * 8 * 32 + 8 * 5
    assert work.model_flops == 4 * stem + 6 * rest


def test_frozen_weights_have_no_gradient_and_cost_none() -> None:
    def adapted() -> nn.Module:
        model = own()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attention_norm" in name or name.endswith("down.weight"))
        return model

    work = profile_model(adapted(), tokens(), next_token)
    trained = LAYERS * DIM * (1 + HIDDEN)
    assert work.trained_params == trained < work.params
    assert [dict(b.trained) for b in work.blocks if not b.repeated] == [
        dict.fromkeys(dict(b.params), 0.0) for b in work.blocks if not b.repeated
    ]
    model, batch = adapted(), tokens(rows=2)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        next_token(model(batch["input_ids"]), batch)[0].backward()
    assert 2 * work.model_flops == counted.get_total_flops()


def test_a_forward_that_reads_an_element_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(UnsupportedModel, match="reads elements of a tensor into Python"):
        profile_model(
            Asks(),
            {"x": torch.randn(2, 4), "label": torch.zeros(2, dtype=torch.long)},
            classification,
        )
