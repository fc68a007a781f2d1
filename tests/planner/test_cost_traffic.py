"""What an estimate says a rank sends and holds, against the plan's own prediction of collectives,
and its shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core.layout import EXPERTS, Layout
from weft.core.plan import Plan
from weft.core.sync import Sync
from weft.engine.function_overrides import FunctionOverrides
from weft.engine.replica_sync.async_servers import AsyncServerReplicas
from weft.engine.replica_sync.local_steps import LocalStepReplicas
from weft.launch.local_workers import Pool
from weft.nn import model_arguments, named_inputs
from weft.nn.dropout_rng import Randomness
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.parallel import wire_bytes
from weft.parallel.predict_comms import Collective, predict_collectives
from weft.pipeline.capture.tracer import trace_forward
from weft.pipeline.split_model import split_stages
from weft.planner.cost.estimate import Estimate, estimate
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.model_work import ModelWork
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.profile import profile_model
from weft.verification.activation_recorder import ActivationRecorder, record_activations
from weft.verification.stage_values import _parts

BATCH, VOCAB, LENGTH, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 16, 96, 32, 32, 4, 4, 2, 64
WEFT = PrecisionPolicy(
    compute="fp32", weight_bytes=4, grad_bytes=4, state_bytes=8, reduce_bytes=4, gather_bytes=4
)
FIRST = (
    "dp",
    "fsdp",
    "ep",
    "cp",
    "ulysses",
    "vp",
    "tp",
    "pp",
)  # the axis by which what several sum together is counted


def own(**options: Any) -> nn.Module:
    return decoder(VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, seq_len=LENGTH, **options)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        use_cache=False,
        num_key_value_heads=KV_HEADS,
        intermediate_size=HIDDEN,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).train()


def part_frozen() -> nn.Module:
    """All is frozen but queries, values, and the matmul that makes a block's output."""
    model = own()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("wq.weight", "wv.weight", "down.weight")))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": own,
    "part frozen": part_frozen,
    "tied": partial(own, tied=True),
    "mixture": partial(own, experts=4, active=2, shared=1),
    "one key": partial(decoder, VOCAB, DIM, LAYERS, HEADS, 1, HIDDEN, seq_len=LENGTH),
    "llama": llama,
}


def tokens(rows: int) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(rows * LENGTH).view(rows, LENGTH) % VOCAB}


@cache
def seen(name: str) -> ActivationRecorder:
    """A forward and backward on one device."""
    torch.manual_seed(0)
    model, randomness = MODELS[name](), Randomness(0)
    randomness.begin(0, [*range(BATCH)])
    with (
        record_activations(model, BATCH) as found,
        FunctionOverrides(randomness, False, seen=found.attention, asked=found.ask),
    ):
        next_token(model(**model_arguments(named_inputs(model), tokens(BATCH))), tokens(BATCH))[
            0
        ].backward()
    return found


@cache
def work_of(name: str) -> ModelWork:
    with torch.device("meta"):
        model = MODELS[name]()
    return profile_model(model, tokens(1), next_token)


def value_bytes(plan: Plan, model: nn.Module) -> dict[int, int]:
    """Of what crosses stages, of one microbatch on one rank."""
    if plan.staging is None:
        return {}
    rows = max(2, plan.microbatch)
    recorded = trace_forward(model, model_arguments(named_inputs(model), tokens(rows)))
    values = split_stages(recorded, [stage.first for stage in plan.staging.stages[1:]]).values
    parts = [
        _parts(plan, v.name.rpartition(" of ")[2], tuple(v.shape), rows) * plan.sequence_size
        for v in values
    ]
    return {
        i: prod(v.shape) * plan.microbatch // rows * v.dtype.itemsize // n
        for i, (v, n) in enumerate(zip(values, parts))
    }


def sends(name: str, plan: Plan) -> dict[str, float]:
    """Axis -> bytes that the first rank sends in a step."""
    trace_, values = seen(name), value_bytes(plan, MODELS[name]())
    comms = predict_collectives(
        plan,
        trace_.crossings,
        4,
        values=values,
        sequence_calls=trace_.cores,
        routings=trace_.routings,
        asked=trace_.asked,
    )
    found = dict.fromkeys(FIRST, 0.0)
    for comm in comms:
        found[_key(plan, comm, name)] += wire_bytes(
            comm.kind, comm.nbytes, plan.layout.size(*comm.axis.split("."))
        )
    return found


def _key(plan: Plan, comm: Collective, name: str) -> str:
    axes, spread = comm.axis.split("."), plan.layout.active_axes(EXPERTS)
    experts = {routing.module for routing in seen(name).routings}
    if spread and spread != ("tp",) and comm.axis == ".".join(spread) and comm.module in experts:
        return "ep"
    return (
        "pp"
        if "pp" in axes and comm.when == "reduce"
        else next(axis for axis in FIRST if axis in axes)
    )


def laid(name: str, layout: str, **options: Any) -> Plan:
    torch.manual_seed(0)
    return weft.plan(
        MODELS[name](), layout, batch=BATCH, loss=next_token, sample=tokens(2), **options
    )


def estimated(
    name: str,
    layout: str,
    sync: Sync | None = None,
    practice: PrecisionPolicy = WEFT,
    **options: Any,
) -> Estimate:
    cluster = Cluster.parse("a100x64")
    choices = LayoutBatch.of([Layout.parse(layout)], batch=BATCH, **options)
    return estimate(work_of(name), choices, cluster, cluster.hardware.era("eager"), practice, sync)


def held_to(got: Mapping[str, Any], want: Mapping[str, float], share: float) -> None:
    """Every axis within this share, or within 1 % of all."""
    of = {axis: float(got[axis][0]) if axis in got else 0.0 for axis in FIRST}
    assert of == pytest.approx(want, rel=share, abs=0.01 * sum(want.values())), "bytes by axis"


DENSE = [
    "dp2",
    "dp4",
    "fsdp2",
    "fsdp2+zero1",
    "fsdp2+zero2",
    "dp2.fsdp2",
    "dp2.fsdp2+zero1",
    "tp2",
    "tp4",
    "vp2",
    "dp2.vp2",
    "pp2.vp2",
    "tp2+sequence",
    "cp2",
    "cp4",
    "ulysses2",
    "pp2",
    "pp4",
    "dp2.tp2",
    "fsdp2.tp2",
    "pp2.tp2",
    "cp2.tp2",
    "dp2.cp2",
    "cp2.ulysses2",
    "ulysses2.tp2",
    "fsdp2.cp2",
    "dp2.fsdp2.cp2",
    "dp2.fsdp2.tp2+sequence",
    "pp2.dp2",
    "pp2.fsdp2",
    "pp2.fsdp2+zero2",
    "pp2.tp2+sequence",
    "pp2.dp2.tp2",
    "cp2+gather",
    "cp4+gather",
    "cp2+gather.tp2",
    "cp2+gather.ulysses2",
]


@pytest.mark.grid(12, ci=9)
@pytest.mark.parametrize("layout", DENSE)
def test_bytes_are_the_plans(layout: str) -> None:
    for accumulate, recompute in ((1, "none"), (2, "none"), (2, "full"), (2, "selective"), (2, 2)):
        plan = laid("decoder", layout, accumulate=accumulate, recompute=recompute)
        # key heads fewer than ranks are stored whole, and their gradients summed over tp: Work does
        # not tell them apart
        share = 0.025 if "tp4" in layout else 0.01
        got = estimated("decoder", layout, accumulate=accumulate, recompute=recompute)
        held_to(got.traffic, sends("decoder", plan), share)


@pytest.mark.parametrize("layout", ["fsdp2", "dp2.fsdp2", "fsdp2.tp2", "fsdp2+zero2"])
@pytest.mark.parametrize("units", ["model", 2, ("blocks.*.mlp",), ("*.w?", "*.up")])
def test_bytes_of_other_units(units: Any, layout: str) -> None:
    work = profile_model(own(), tokens(1), next_token, fsdp_units=units)
    cluster = Cluster.parse("a100x64")
    for accumulate in (1, 2):
        plan = laid("decoder", layout, accumulate=accumulate, fsdp_units=units)
        choices = LayoutBatch.of([Layout.parse(layout)], batch=BATCH, accumulate=accumulate)
        got = estimate(work, choices, cluster, cluster.hardware.era("eager"), WEFT)
        held_to(got.traffic, sends("decoder", plan), 0.01)


def test_gathered_weights_are_those_of_units() -> None:
    """The part of a rank's memory: of the unit that runs, the next one, and one's gradient."""
    block = sum(p.numel() for p in own().blocks[0].parameters())
    mlp = sum(p.numel() for p in own().blocks[0].mlp.parameters())
    wanted = {
        "blocks": 2 * block + block,
        2: min(4, LAYERS) * block + 2 * block,
        "model": LAYERS * block + LAYERS * block,
        ("blocks.*.mlp",): 3 * mlp + 2 * LAYERS * (block - mlp),
    }
    cluster, choices = (
        Cluster.parse("a100x64"),
        LayoutBatch.of([Layout.parse("fsdp2")], batch=BATCH),
    )
    for units, elements in wanted.items():
        work = profile_model(own(), tokens(1), next_token, fsdp_units=units)
        found = estimate(work, choices, cluster, cluster.hardware.era("eager"), WEFT)
        part = next(p for p in found.memory if p.name == "gathered weights")
        assert float(part.value[0]) == pytest.approx(4 * elements), units


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(
            ("llama", layout)
            for layout in (
                "dp2",
                "fsdp2",
                "tp2",
                "tp2+sequence",
                "cp2",
                "ulysses2",
                "pp2",
                "pp2.fsdp2.tp2",
            )
        ),
        *(("tied", layout) for layout in ("tp2", "fsdp2", "pp2", "pp2.dp2", "pp2.tp2")),
        *(("one key", layout) for layout in ("ulysses2", "cp2.ulysses2", "cp2+gather.ulysses2")),
        *(
            ("part frozen", layout)
            for layout in ("dp2", "fsdp2", "fsdp2+zero2", "dp2.fsdp2", "pp2.fsdp2", "fsdp2.cp2")
        ),
        *(
            ("mixture", layout)
            for layout in (
                "dp2",
                "tp2",
                "fsdp2",
                "ep2",
                "ep4",
                "dp2+ep",
                "fsdp2+ep",
                "cp2+ep",
                "ep2.tp2",
                "ep2.tp2+sequence",
                "ep2.fsdp2",
                "dp2.ep2",
                "ep2.cp2",
                "pp2.ep2",
                "tp2+sequence+ep",
            )
        ),
    ],
)
def test_bytes_of_other_models(name: str, layout: str) -> None:
    for accumulate, recompute in ((1, "none"), (2, "full")):
        plan = laid(name, layout, accumulate=accumulate, recompute=recompute)
        got = estimated(name, layout, accumulate=accumulate, recompute=recompute)
        # tokens go where the gates send them: not quite evenly
        held_to(got.traffic, sends(name, plan), 0.05 if name == "mixture" else 0.01)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", 1),
        ("interleaved", 2),
        ("bfs", 2),
        ("interleaved-zb", 2),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("dualpipev", 2),
    ],
)
def test_messages_of_every_placement(schedule: str, chunks: int) -> None:
    options = {"chunks": chunks} if schedule in ("interleaved", "bfs", "interleaved-zb") else {}
    plan = laid("decoder", "pp2", accumulate=4, schedule=schedule, options=options)
    got = estimated("decoder", "pp2", accumulate=4, schedule=schedule, chunks=chunks)
    held_to(got.traffic, sends("decoder", plan), 0.01)


SYNCS: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "ring"},
    {"name": "central"},
    {"name": "parameter_server", "servers": 2},
    *({"name": "allreduce", "codec": codec} for codec in ("bf16", "int8", "int4", "sign", "topk")),
    {"name": "ring", "codec": "int8"},
    {"name": "central", "codec": "int8"},
    {"name": "ring", "codec": "topk"},
]


@pytest.mark.parametrize("layout", ["dp2", "dp4", "dp2.tp2"])
@pytest.mark.parametrize("options", SYNCS, ids=lambda o: "-".join(map(str, o.values())))
def test_bytes_of_synchronisers(options: dict[str, Any], layout: str) -> None:
    sync = weft.sync.make_sync(**options)
    plan = laid("decoder", layout, sync=sync)
    want = [
        sum(
            wire_bytes(c.kind, c.nbytes, plan.layout.size("dp"))
            for c in predict_collectives(plan, seen("decoder").crossings, 4, rank=rank)
            if c.axis == "dp"
        )
        for rank in range(plan.layout.world)
    ]
    got = float(estimated("decoder", layout, sync).traffic["dp"][0])
    # owners send more than others, and so the mean of ranks counts
    assert got == pytest.approx(sum(want) / len(want), rel=0.05)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "bmuf"])
@pytest.mark.parametrize(
    ("codec", "share"), [("identity", 1.0), ("bf16", 0.5), ("int8", (1 + 4 / 128) / 4)]
)
def test_a_periods_bytes_are_spread_over_its_steps(name: str, codec: str, share: float) -> None:
    whole = float(estimated("decoder", "dp2").traffic["dp"][0])
    for options in ({}, {"fragments": 4}):
        sync = weft.sync.make_sync(name, codec, period=8, **options)
        assert float(estimated("decoder", "dp2", sync).traffic["dp"][0]) == pytest.approx(
            whole * share / 8
        )


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("decoder", layout) for layout in DENSE if "tp4" not in layout),
        ("llama", "fsdp2.tp2"),
        ("tied", "pp2"),
        ("tied", "pp2.tp2"),
        ("tied", "tp2"),
        ("mixture", "fsdp2"),
        ("mixture", "ep2.tp2"),
        ("mixture", "fsdp2+ep"),
        ("mixture", "ep2.fsdp2"),
        ("mixture", "tp2+sequence+ep"),
        *(("part frozen", layout) for layout in ("dp2", "fsdp2", "fsdp2+zero1", "pp2.tp2")),
    ],
)
def test_what_rests_on_a_rank_is_what_the_plan_says(name: str, layout: str) -> None:
    plan = laid(name, layout)
    table = plan.params()
    options = plan.layout.options_of("fsdp")
    levels = {"zero1": 1, "zero2": 2}
    level = next(
        (levels[o] for o in options if o in levels), 3 if plan.layout.active_axes("fsdp") else 0
    )

    def rests(rank: int, sharded: bool, trained: bool) -> float:
        part, size = plan.of(rank), plan.layout.size("fsdp") if sharded else 1
        weights = [w for w in part.weights if w.trainable or not trained]
        ways = {w.name: size if "fsdp" in table[w.name] else 1 for w in weights}
        return sum(prod(part.local_shape(w, table)) / ways[w.name] for w in weights)

    sizes = {part.name: float(part.value[0]) for part in estimated(name, layout).memory}
    ends = [0, plan.layout.world - 1]
    for what, each, least in (("weights", 4, 3), ("gradients", 4, 2), ("optimizer", 8, 1)):
        # of the end of a pipeline that needs more
        assert sizes[what] in [
            pytest.approx(each * rests(rank, level >= least, what != "weights"), rel=0.005)
            for rank in ends
        ], what


def kept(layout: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of what a rank has to agree with others after a step, and of its optimizer's state."""
    torch.manual_seed(0)
    model, sync = own(), weft.sync.make_sync(**options)
    plan = weft.plan(model, layout, batch=BATCH, loss=next_token, sample=tokens(2), sync=sync)
    kind = torch.optim.SGD if options.get("codec") == "dgc" else torch.optim.AdamW
    engine = weft.Engine(
        model,
        plan,
        optimizer=partial(kind, lr=1e-3),
        loss=next_token,
        sample=tokens(2),
        device="cpu",
    )
    engine.step(engine.local(tokens(BATCH)))
    tensors, states = (
        [],
        [
            *(engine.reducer.exchange.states if engine.reducer.exchange else []),
            *(scatter.state for scatter in engine.state.scatters.values()),
        ],
    )
    optimizer = engine.optimizer
    replicas = engine.replicas
    if isinstance(replicas, LocalStepReplicas):
        for message in replicas.outer.messages:
            tensors += [message.anchor, message.sent, message.mean]
            tensors += [] if message.momentum is None else [message.momentum]
        states += [
            *replicas.outer.states(),
            *replicas.outer.states(),
        ]  # as it was, too, until others have answered
    if isinstance(replicas, AsyncServerReplicas):
        tensors += [link.got for link in replicas.worker._links.values()]
        if replicas.server is not None:
            tensors.append(replicas.server._flat)
            optimizer = replicas.server._optimizer
    tensors += [value for state in states for value in state.values()]
    moments = [v for s in optimizer.state.values() for v in s.values()]
    found = {"synchroniser": tensors, "optimizer": moments}
    plain = {what: [getattr(v, "_local_tensor", v) for v in each] for what, each in found.items()}
    engine.close()
    return {
        what: float(sum(v.numel() * v.itemsize for v in each if v.numel() > 1))
        for what, each in plain.items()
    }


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *(
            ("dp2", {"name": "allreduce", "codec": codec})
            for codec in ("bf16", "topk", "dgc", "sign")
        ),
        ("dp2.fsdp2", {"name": "allreduce", "codec": "topk"}),
        ("fsdp2", {"name": "allreduce", "codec": "sign"}),
        ("fsdp2", {"name": "diloco", "codec": "sign"}),
        ("dp2.tp2", {"name": "ring", "codec": "topk"}),
        ("dp4", {"name": "parameter_server", "servers": 4}),
        ("dp2", {"name": "local_sgd", "period": 4}),
        ("dp2", {"name": "diloco", "period": 4}),
        ("dp2.fsdp2", {"name": "diloco", "period": 4, "fragments": 2, "codec": "topk"}),
        ("dp2", {"name": "parameter_server", "staleness": 2}),
        ("dp2.tp2", {"name": "parameter_server", "staleness": 2}),
        ("dp4", {"name": "parameter_server", "staleness": 2, "servers": 2}),
    ],
    ids=str,
)
def test_what_is_kept_to_agree_is_what_an_engine_has(
    pool: Pool, layout: str, options: dict[str, Any]
) -> None:
    sizes = Layout.parse(layout)
    found = pool.run(kept, layout, options, world=sizes.world)
    parts = {
        part.name: float(part.value[0])
        for part in estimated("decoder", layout, weft.sync.make_sync(**options)).memory
    }
    held = max(each["synchroniser"] for each in found)
    if (
        "staleness" in options
    ):  # what is under way: a worker's gradients, and at the servers all replicas', and weights
        held += (1 + 2 * sizes.size("dp")) * parts["gradients"] / options.get("servers", 1)
    assert parts["synchroniser"] == pytest.approx(
        held, rel=0.02 if options.get("servers", 1) == 1 else 0.3
    )
    most = max(each["optimizer"] for each in found)
    if options.get("codec") == "dgc":  # which has the momentum
        assert not most
        return
    assert parts["optimizer"] == pytest.approx(
        most, rel=0.02 if options.get("servers", 1) == 1 else 0.3
    )
