"""Small models and layouts that together run most of what verify can see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from training import TRAINED

from tests.cases import LENGTH, SUBJECTS, VOCAB, Subject, tokens
from tests.staged import STAGED, one_input, padded, sequential
from tests.verification.contrastive import TwoTowers, clip, pairs
from tests.verification.nets_with_definitions import CASES
from tests.verification.nets_with_quirks import QUIRKS
from tests.verification.test_parts import towers
from weft.core.layout import Layout
from weft.engine import make_optimizer
from weft.losses import causal_lm, mse
from weft.models import decoder
from weft.sync import make_sync
from weft.verification.case import Case

STEPS = 2
TOPK = {"name": "topk", "density": 0.1}
DGC = {"name": "dgc", "density": 0.1, "clip": 0.5, "warmup": 1}
POWER = {"name": "powersgd", "rank": 2}
RANDOM = {"name": "int8", "stochastic": True}
SYNCS: dict[str, dict[str, Any]] = {
    "ring": {"name": "ring", "bucket_mb": 0.01},
    "rings": {"name": "ring", "local": 2},
    "central": {"name": "central", "bucket_mb": 0.02},
    "servers": {"name": "parameter_server", "servers": 2, "bucket_mb": 0.01},
    "int8": {"name": "allreduce", "codec": "int8"},
    "random": {"name": "allreduce", "codec": RANDOM},
    "sign": {"name": "allreduce", "codec": "sign"},
    "topk": {"name": "allreduce", "codec": TOPK},
    "powersgd": {"name": "allreduce", "codec": POWER},
    "dgc": {"name": "allreduce", "codec": DGC},
    "bf16": {"name": "allreduce", "codec": {"name": "bf16", "feedback": True}},
    "int4-ring": {"name": "ring", "codec": "int4"},
    "powersgd-central": {"name": "central", "codec": POWER},
    "local_sgd": {"name": "local_sgd", "period": 2},
    "bmuf": {"name": "bmuf", "period": 2, "momentum": 0.6, "rate": 0.8, "nesterov": True},
    "diloco": {"name": "diloco", "period": 4, "fragments": 3, "delay": 2},
    "streaming": {"name": "diloco", "period": 3, "fragments": 3, "delay": 2, "codec": POWER},
    "diloco-int8": {"name": "diloco", "period": 2, "codec": "int8"},
    "async": {"name": "parameter_server", "servers": 2, "staleness": 2},
    "async-topk": {"name": "parameter_server", "staleness": 1, "codec": TOPK},
}


def with_sync(arguments: dict[str, Any]) -> Subject:
    """The decoder with a synchroniser."""
    plan = {**dict(SUBJECTS["decoder"].plan), "sync": make_sync(**arguments)}
    return replace(SUBJECTS["decoder"], plan=tuple(plan.items()))


def with_plan(name: str, **plan: Any) -> Subject:
    """A model of several stages, with further arguments of its plan."""
    whole = {**dict(STAGED[name].plan), **plan}
    return replace(STAGED[name], plan=tuple(whole.items()))


OPTIMIZERS: dict[str, Any] = {
    "dgc": partial(torch.optim.SGD, lr=0.3),  # the codec has a momentum of its own
    "adafactor": make_optimizer("adafactor", lr=1e-2, weight_decay=0.1),
}
MODELS: dict[str, Subject] = {
    **SUBJECTS,
    **{f"deep-{name}": STAGED[name] for name in ("decoder", "tied", "llama", "t5", "convnet")},
    **{name: CASES[name] for name in ("attention", "squares", "experts", "capacity", "aligned")},
    "recurrent": QUIRKS["recurrent"],
    "contrastive": Subject(TwoTowers, pairs, clip),
    "selective": Subject(
        partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, dropout=0.1),
        tokens,
        causal_lm,
        (("accumulate", 2), ("recompute", "selective")),
    ),
    "squared": Subject(sequential, one_input, mse),
    "masked": Subject(STAGED["qwen3"].build, padded),
    "parts": towers({"vision": "fsdp", "*": "tp"}),
    "adafactor": SUBJECTS["decoder"],
    "dynamic": with_plan("deep", options={"chunks": 3}, dynamic_shapes=True),
    "two versions": with_plan("decoder", options={"versions": "2bw"}),
    **{name: with_sync(arguments) for name, arguments in SYNCS.items()},
}

COMPARED = (
    ("decoder", "dp2"),
    ("decoder", "fsdp2"),
    ("decoder", "tp2"),
    ("decoder", "pp2"),
    ("decoder", "cp2"),
    ("decoder", "tp2+sequence"),
    ("decoder", "fsdp2+zero1"),
    ("decoder", "fsdp2+zero2"),
    ("even", "tp2"),
    ("tied", "tp2"),
    ("tied", "pp2"),
    ("fused", "tp2+sequence"),
    ("dropout", "tp2"),
    ("dropout", "cp2"),
    ("recomputed", "fsdp2"),
    ("recomputed", "pp2"),
    ("selective", "tp2"),
    ("selective", "cp2"),
    ("clipped", "fsdp2"),
    ("clipped", "tp2"),
    ("clipped", "pp2"),
    ("convnet", "dp2"),
    ("experts", "ep2"),
    ("experts", "dp2"),
    ("capacity", "ep2"),
    ("capacity", "cp2"),
    ("capacity", "tp2+sequence"),
    ("attention", "dp2"),
    ("squares", "dp2"),
    ("aligned", "cp2"),
    ("recurrent", "pp2"),
    ("contrastive", "dp2"),
    ("contrastive", "pp2+gpipe"),
    ("deep-llama", "tp2"),
    ("deep-llama", "pp2+zb-h1"),
    ("deep-t5", "pp2"),
    ("deep-tied", "pp2+interleaved"),
    ("deep-convnet", "pp2"),
    ("deep-decoder", "pp2+pipedream"),
    ("deep-decoder", "pp2+dualpipev"),
    ("decoder", "dp2.tp2"),
    ("decoder", "fsdp2.tp2"),
    ("decoder", "dp2.fsdp2"),
    ("dropout", "pp2.tp2+sequence"),
    ("experts", "dp2.ep2"),
    ("decoder", "cp2.tp2"),
    ("squared", "dp2"),
    ("masked", "tp2"),
    ("decoder", "cp2+ulysses"),
    ("deep-decoder", "pp2+zb-v"),
    ("deep-decoder", "pp2+gpipe"),
    ("parts", "fsdp2.tp2"),
    ("adafactor", "dp2"),
    ("adafactor", "fsdp2+zero1"),
    ("dynamic", "pp2+interleaved"),
    ("two versions", "pp2+pipedream"),
    *((name, "dp2") for name in SYNCS if name != "rings"),
    ("rings", "dp4"),
    ("int8", "fsdp2"),
    ("int8", "dp2.fsdp2"),
    ("topk", "dp2.tp2"),
    ("diloco", "dp2.tp2"),
)
LATE = (
    ("decoder", "dp2"),
    ("decoder", "fsdp2"),
    ("decoder", "pp2"),
    ("decoder", "cp2"),
    ("experts", "ep2"),
    ("deep-decoder", "pp2+dualpipev"),
    *((name, "dp2") for name in SYNCS if name not in ("rings", "async", "async-topk")),
    ("rings", "dp4"),
)


def case_of(model: str) -> Case:
    case = MODELS[model].case()
    return replace(case, optimizer=OPTIMIZERS[model]) if model in OPTIMIZERS else case


@dataclass(frozen=True)
class Pair:
    """A model and a layout. `way`: "verify", "late" (verify, with messages that come late) or
    "deep" (`weft verify --deep`; the model is one of `training.RUNS`)."""

    way: str
    model: str
    layout: str

    def __str__(self) -> str:
        return f"{self.way} {self.model} {self.layout}"

    @property
    def world(self) -> int:
        return Layout.parse(self.layout).world

    @property
    def kind(self) -> str:
        """Pairs of one kind run much of the same."""
        axes = ".".join(Layout.parse(self.layout).axes)
        own = self.model if self.model in SYNCS or self.way == "deep" else ""
        return f"{self.way} {axes} {own}"


PAIRS = (
    *(Pair("verify", *pair) for pair in COMPARED),
    *(Pair("deep", name, layout) for name, layout in TRAINED),
    *(Pair("late", *pair) for pair in LATE),
)
