"""Every model through every schedule equals one device, and what crosses stages is what was
predicted.

Each pair of a model and a schedule is run once; the layouts beside them take turns.
`benchmarks/parity` runs all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, Subject, in_turn, laid, reference, seeded
from tests.staged import STAGED
from tests.verification.test_parity import run
from weft.core.errors import ConfigError, LayoutError, Refusal, UnsupportedModel
from weft.core.schedule import Action, Schedule
from weft.launch.local_workers import Pool
from weft.nn.losses import mse
from weft.pipeline import schedules
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import run_reference

pytestmark = pytest.mark.grid

SYNCHRONOUS = [
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zb-v",
    "dualpipev",
]
BESIDE = [
    "pp2+{}.tp2",
    "pp2+{}",
    "pp4+{}",
    "pp2+{}.dp2",
    "pp2+{}",
    "pp2+{}.fsdp2",
    "dp2.pp2+{}",
    "pp2+{}",
    "pp2+{}.tp2+sequence",
]
NO_TP = {"convnet", "sequential", "plain"}
SHALLOW = {"convnet"}  # seven parts: too few for two stages on each of four ranks


def _grid() -> list[tuple[str, str]]:
    """Every model with every fifth schedule, and the next four with the others."""
    found, turns = [], cycle(BESIDE)
    for number, name in enumerate(STAGED):
        for kind in SYNCHRONOUS[number % 5 :: 5]:
            layout = next(turns)
            while (name in NO_TP and "tp2" in layout) or (name in SHALLOW and "pp4" in layout):
                layout = next(turns)
            if name == "t5":  # its decoder attends to another sequence, which is not cut
                layout = layout.replace("+sequence", "")
            found.append((name, layout.format(kind)))
    return found


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), _grid())
def test_pipeline_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = run(pool, replace(STAGED[name], clip=0.5), layout)
    assert result.passed, result
    assert result.comms_seen["send", "pp"][0] >= 4, "a pipeline that sends nothing"


WIDE = [
    ("tied", "pp2+zb-v.fsdp2+zero1"),
    ("llama", "fsdp2+zero2.pp2+zb-h1"),
    ("gpt2", "pp2+interleaved.fsdp2+offload"),
    ("deep", "tp2.pp2"),
]


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize(("name", "layout"), WIDE)
def test_sharded_and_cut_inside_a_stage(pool: Any, name: str, layout: str) -> None:
    result = run(pool, STAGED[name], layout)
    assert result.passed, result


def with_plan(name: str, **plan: Any) -> Subject:
    return replace(STAGED[name], plan=tuple({**dict(STAGED[name].plan), **plan}.items()))


AGAIN = in_turn(["pp2.dp2", "pp2+zb-h1.tp2", "pp2+dualpipev.fsdp2"], ["selective", "full", 2], 2)


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize(("layout", "recompute"), AGAIN)
def test_recompute_inside_a_stage(pool: Any, layout: str, recompute: str | int) -> None:
    result = run(pool, with_plan("deep", recompute=recompute), layout)
    assert result.passed, result


@pytest.mark.parametrize("cut", ["flops", "time", ("blocks.3.mlp",), ("blocks.2.attention.proj",)])
def test_cut_anywhere(pool: Any, cut: Any) -> None:
    """Inside a block too, whose dropout masks are counted across both of its stages."""
    result = run(pool, with_plan("deep", cut=cut), "pp2+zb-h1")
    assert result.passed, result


def test_chunks_and_shapes_that_are_always_sent(pool: Any) -> None:
    case = with_plan("deep", options={"chunks": 3}, dynamic_shapes=True).case()
    result = pool.run(check_layout, case, "pp2+interleaved", reference(STAGED["deep"], 3), world=2)[
        0
    ]
    assert isinstance(result, LayoutResult) and result.passed, result


def backwards(ranks: int, microbatches: int) -> Schedule:
    """Someone's own: the last microbatch first."""
    order = [
        tuple(Action(kind, rank, m) for kind in "FB" for m in reversed(range(microbatches)))
        for rank in range(ranks)
    ]
    return Schedule("backwards", tuple(range(ranks)), tuple(order))  # type: ignore[arg-type]


def test_a_schedule_of_ones_own(pool: Any) -> None:
    result = run(pool, with_plan("deep", schedule=backwards), "pp4")
    assert result.passed, result


# ---- asynchronous --------------------------------------------------------------------------------

DELAYED = [
    ("llama", "pp4", "stash"),
    ("deep", "pp2.dp2", "stash"),
    ("convnet", "pp2.dp2", "stash"),
    ("llama", "pp4", "vertical"),
    ("gpt2-untied", "pp2.tp2+sequence", "vertical"),
    ("plain", "pp4", "2bw"),
]


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize(("name", "layout", "versions"), DELAYED)
def test_pipedream_equals_its_sequential_definition(
    pool: Any, name: str, layout: str, versions: str
) -> None:
    name = name.removesuffix("-untied") if name != "gpt2-untied" else "deep"
    subject = with_plan(
        name,
        schedule="pipedream",
        options={"versions": versions},
        accumulate=8 // (1 + ("dp" in layout)),
    )
    delayed = run_delayed(subject.case(), layout, 3)
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, subject.case(), layout, delayed, world=world)[0]
    assert isinstance(result, LayoutResult) and result.passed, result
    bound = (
        0.0 if world == weft.Layout.parse(layout).size("pp") else 1e-12
    )  # bit for bit where nothing else is summed
    assert max(result.loss_rel_err, result.param_rel_err) <= bound, result


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("layout", "recompute"), [("pp4", "full"), ("pp2.dp2", 2), ("pp2", "selective")]
)
def test_pipedream_recomputes_with_the_version_of_its_microbatch(
    pool: Any, layout: str, recompute: str | int
) -> None:
    """The definition recomputes nothing, and the weights have changed by the time that backward
    comes."""
    options = {
        "schedule": "pipedream",
        "accumulate": 8 // (1 + ("dp" in layout)),
        "recompute": recompute,
    }
    case = with_plan("deep", **options).case()
    result = pool.run(
        check_layout,
        case,
        layout,
        run_delayed(case, layout, 2),
        world=weft.Layout.parse(layout).world,
    )[0]
    assert isinstance(result, LayoutResult) and result.passed, result


class Direct(nn.Module):
    """A weight that the forward uses between modules, and one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.a, self.b = (
            nn.Parameter(torch.ones(4, 6)),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.unused = nn.Linear(6, 6)

    def forward(self, input: Tensor) -> Tensor:
        return self.b(self.a(input) + self.position[1, :6].expand_as(input)) * self.position[2]


def direct_batch() -> dict[str, Tensor]:
    return {"input": torch.arange(BATCH * 6).view(BATCH, 6) / 50.0, "target": torch.ones(BATCH, 6)}


@pytest.mark.parametrize("layout", ["pp2", "pp2.dp2"])
def test_pipedream_with_weights_outside_of_modules(pool: Any, layout: str) -> None:
    plan = tuple({"schedule": "pipedream", "cut": ("b",), "accumulate": 4}.items())
    subject = Subject(Direct, direct_batch, mse, plan)
    with pytest.raises(UnsupportedModel, match="used by two stages"):
        laid(subject, seeded(Direct), layout)
    alone = replace(subject, build=Apart)
    delayed = run_delayed(alone.case(), layout, 2)
    result = pool.run(
        check_layout, alone.case(), layout, delayed, world=weft.Layout.parse(layout).world
    )[0]
    assert isinstance(result, LayoutResult) and result.passed, result


class Apart(Direct):
    def forward(self, input: Tensor) -> Tensor:
        return self.b(self.a(input) + self.position[1, :6].expand_as(input))


def test_pipedream_cut_by_measured_time(pool: Pool) -> None:
    """Two measurements cut at two places: the definition and the run have one plan."""
    subject = with_plan("deep", schedule="pipedream", cut="time", accumulate=8)
    delayed = run_delayed(subject.case(), "pp2", 1)
    measured = delayed.plan
    assert measured is not None and measured.staging is not None
    other = next(
        block for block in measured.blocks[2:] if block != measured.staging.stages[1].first
    )
    moved = with_plan("deep", schedule="pipedream", cut=(other,), accumulate=8).case()
    result = pool.run(check_layout, moved, "pp2", delayed, world=2)[0]
    assert isinstance(result, LayoutResult) and result.passed and result.delayed, result


def test_delays_change_the_weights() -> None:
    """What the two definitions are told apart by."""
    found = {}
    for versions in ("stash", "vertical", "2bw"):
        subject = with_plan(
            "llama", schedule="pipedream", options={"versions": versions}, accumulate=8
        )
        found[versions] = run_delayed(subject.case(), "pp4", 1).updated["model.norm.weight"]
    plain = reference(STAGED["llama"], 1).updated["model.norm.weight"]
    for one, other in [("stash", "vertical"), ("stash", "2bw"), ("vertical", "2bw")]:
        assert not torch.allclose(found[one], found[other], rtol=1e-9)
    assert not any(torch.allclose(weights, plain, rtol=1e-9) for weights in found.values())


# ---- parts that do not learn ---------------------------------------------------------------------


START = ("embedding", "position", "blocks.0.", "blocks.1.", "blocks.2.", "blocks.3.")
FROZEN = [
    "fsdp2",
    "fsdp2+zero2",
    "pp4",
    "pp4+zb-h1",
    "pp2+dualpipev",
    "pp2+zb-v.dp2",
    "pp2+zb-h1.fsdp2",
    "pp4+pipedream",
]


def frozen(*parts: str) -> nn.Module:
    model = STAGED["deep"].build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(parts))
    return model


PARTS = [START[:3], START, START[3:]]  # a part of a stage, stages, in the midst


@pytest.mark.grid(4, ci=3)
@pytest.mark.parametrize(("layout", "parts"), in_turn(FROZEN, PARTS, 2))
def test_frozen_parts(pool: Pool, layout: str, parts: tuple[str, ...]) -> None:
    subject = replace(STAGED["deep"], build=partial(frozen, *parts))
    case = replace(subject, clip=None if "pipedream" in layout else 0.5).case()
    known = run_delayed(case, layout, 2) if "pipedream" in layout else run_reference(case, 2)
    result = pool.run(check_layout, case, layout, known, world=weft.Layout.parse(layout).world)[0]
    assert isinstance(result, LayoutResult) and result.passed, result


class Aside(nn.Module):
    """What it returns beside its output crosses stages, and the loss may leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        x = self.a(input)
        aside = self.b(x)
        return {"output": self.c(x), "aside": self.d(aside)}


def of_the_output(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output["output"], {"target": batch["input"]})


def of_both(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss, weight = of_the_output(output, batch)
    return loss + output["aside"].square().sum(), weight


def stepped(
    build: Any, loss: Any, layout: str, batch: dict[str, Tensor], **plan: Any
) -> dict[str, Tensor]:
    """This rank's weights after a step."""
    model = seeded(build)
    sample = {key: value[:2] for key, value in batch.items()}
    laid_out = weft.plan(
        model, layout, batch=BATCH, accumulate=2, loss=loss, precision="fp64", sample=sample, **plan
    )
    engine = weft.Engine(
        model, laid_out, optimizer=partial(torch.optim.SGD, lr=0.1), loss=loss, device="cpu"
    )
    engine.trial = None  # what a step itself does; by chance a trial sees that samples are mixed
    engine.step(engine.local(batch))
    return {name: p.detach().clone() for name, p in engine.params.items()}


@pytest.mark.parametrize("layout", ["pp2", "pp2+zb-h1"])
@pytest.mark.parametrize("loss", [of_both, of_the_output])
def test_a_value_that_the_loss_leaves_out_sends_no_gradient(
    pool: Pool, loss: Any, layout: str
) -> None:
    batch = {"input": torch.randn(BATCH, 6).double()}
    after = partial(stepped, cut=("c",))
    alone = pool.run(after, Aside, loss, "dp1", batch, world=1)[0]
    whole = dict(
        part
        for rank in pool.run(after, Aside, loss, layout, batch, world=2)
        for part in rank.items()
    )
    assert whole.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-12, atol=1e-12)


class Beside(Aside):
    """What it returns beside its output is made before the cut, and no later part computes with
    it."""

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        x = self.a(input)
        return {"aside": x.sin(), "output": self.d(self.c(self.b(x)))}


def of_both_by_flag(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (of_both if bool(batch["target"].any()) else of_the_output)(output, batch)


@pytest.mark.parametrize("layout", ["pp2", "pp2+zb-h1"])
@pytest.mark.parametrize("build", [Beside, Aside])
def test_a_loss_that_uses_an_output_in_a_later_step_alone_is_refused(
    pool: Pool, build: Any, layout: str
) -> None:
    flag, run_of = torch.zeros(BATCH), partial(stepped, cut=("c",))
    batch = {"input": torch.randn(BATCH, 6).double(), "target": flag}
    pool.run(run_of, build, of_both_by_flag, layout, batch, world=2)
    later = {**batch, "target": flag.clone().index_fill_(0, torch.tensor([BATCH - 1]), 1.0)}
    with pytest.raises(UnsupportedModel, match="did not use it for the sample"):
        pool.run(run_of, build, of_both_by_flag, layout, later, world=2)


class Twice(nn.Module):
    """A value that two later stages use, the last of them without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, input: Tensor) -> Tensor:
        start = self.a(input)
        return self.d(self.c(self.b(start))) + start.detach()


def test_a_value_whose_gradient_one_of_two_ranks_has(pool: Pool) -> None:
    batch = {"input": torch.randn(BATCH, 6).double()}
    pool.run(partial(stepped, cut=("b", "c", "d")), Twice, of_its_size, "pp4", batch, world=4)
    pool.run(partial(stepped, cut=("b", "d")), Twice, of_its_size, "pp3", batch, world=3)


class Noisy(nn.Module):
    """Adds noise of torch's own generator, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        self.drawn = noise
        return self.linear(x + noise)


def noise(layout: str, batch: dict[str, Tensor]) -> list[Tensor]:
    model = seeded(lambda: nn.Sequential(*(Noisy() for _ in range(4))))
    sample = {key: value[:2] for key, value in batch.items()}
    plan = weft.plan(
        model, layout, batch=BATCH, loss=of_its_size, precision="fp64", sample=sample, cut=("2",)
    )
    engine = weft.Engine(
        model, plan, optimizer=partial(torch.optim.SGD, lr=0.1), loss=of_its_size, device="cpu"
    )
    engine.step(batch)
    return [
        module.drawn for module in model if isinstance(module, Noisy) and hasattr(module, "drawn")
    ]


def test_stages_draw_other_numbers(pool: Pool) -> None:
    batch = {"input": torch.randn(BATCH, 6).double()}
    drawn = [each for ranks in pool.run(noise, "pp2", batch, world=2) for each in ranks]
    assert len(drawn) == 4
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == 4


def evaluated(layout: str, batch: dict[str, Tensor]) -> tuple[list[float], list[float]]:
    """The loss of an evaluation, and of another with weights put in place: by these ranks, by one
    device."""
    model, alone = (seeded(STAGED["deep"].build) for _ in range(2))
    subject = STAGED["deep"]
    plan = laid(subject, model, layout)
    sgd = partial(torch.optim.SGD, lr=0.0)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=subject.loss, device="cpu")
    found, pieces = [], list(engine.tensors())
    for _ in range(2):
        found.append(float(engine.evaluate(engine.local(batch)).loss))
        with torch.no_grad():
            for piece in pieces:
                if piece.tensor.is_floating_point():
                    piece.tensor.mul_(0.5)
    want = []
    for _ in range(2):
        with torch.no_grad():
            total, weight = subject.loss(alone.double().eval()(batch["input_ids"]), batch)
            want.append(float(total / weight))
            for tensor in alone.parameters():
                tensor.mul_(0.5)
    return found, want


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2+zero1", "pp2.fsdp2", "pp2.fsdp2+zero2"])
def test_evaluation_sees_weights_that_were_put_in_place_since(pool: Pool, layout: str) -> None:
    batch = STAGED["deep"].data()
    for found, want in pool.run(evaluated, layout, batch, world=weft.Layout.parse(layout).world):
        assert found == pytest.approx(want, rel=1e-12)


class Tied(nn.Module):
    """A head that is a function of the embedding's weight, in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embedding.weight)


@pytest.mark.parametrize("layout", ["pp2.tp2"])
def test_a_cut_weight_that_a_stage_uses_by_a_function_is_refused(layout: str) -> None:
    sample = {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}
    weft.plan(Tied(), "pp2.dp2", batch=BATCH, sample=sample)
    with pytest.raises(UnsupportedModel, match="its weight is read by Tied"):
        weft.plan(
            Tied(),
            layout,
            batch=BATCH,
            sample=sample,
            roles={"embedding": "embedding", "layers.*": "whole"},
        )


class Routed(nn.Module):
    """Each stage holds one of two equal experts by the data: the ranks that shard it may run
    different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = (nn.ModuleList(Chosen() for _ in range(1)) for _ in range(2))

    def forward(self, input: Tensor) -> Tensor:
        return self.leave[0](self.enter[0](input))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() > 0)](x)


def of_its_size(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output.square().sum(), torch.tensor(float(output.numel()))


def test_shards_of_a_stage_may_run_different_modules(pool: Pool) -> None:
    """What data choose is gathered with the rest of its stage: no rank waits for another."""
    rows = torch.tensor(
        [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    )  # of each microbatch, the second half is rank 1's
    for factor in (rows, rows.abs()):
        batch = {"input": torch.rand(BATCH, 6).double() * factor[:, None]}
        pool.run(
            partial(stepped, cut=("leave.0",)), Routed, of_its_size, "pp2.fsdp2", batch, world=4
        )


# ---- refusals ------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, dict[str, Any], type[Refusal], str]] = [
    (
        "tied",
        "pp2+pipedream",
        {},
        UnsupportedModel,
        "used by two stages, which pipedream updates at different times",
    ),
    ("deep", "pp2+pipedream.fsdp2", {}, LayoutError, "keeps several versions of the weights"),
    ("deep", "pp2+1f1", {}, LayoutError, '(?i)did you mean "1f1b"'),
    ("deep", "pp2+gpipe+1f1b", {}, ConfigError, "at once"),
    ("deep", "pp2", {"schedule": "zb"}, ConfigError, "not a schedule"),
    ("deep", "pp2", {"options": {"chunks": 2}}, ConfigError, "1f1b has no such option"),
    ("deep", "pp2", {"cut": "layers"}, ConfigError, "not a way to cut stages"),
    ("deep", "pp2", {"cut": ("blocks.3", "blocks.4")}, ConfigError, "has 2 stages"),
    ("deep", "pp2", {"cut": ("block.3",)}, UnsupportedModel, "blocks.3"),
    (
        "deep",
        "pp2.tp2",
        {"cut": ("blocks.3.attention.proj",)},
        UnsupportedModel,
        "one unit of tensor parallelism",
    ),
    (
        "deep",
        "pp2.tp2+sequence",
        {"cut": ("blocks.3.mlp",)},
        UnsupportedModel,
        "one unit of sequence parallelism",
    ),
    ("deep", "pp2.fsdp2", {"cut": ("blocks.3.mlp",)}, UnsupportedModel, "one unit of sharding"),
    (
        "deep",
        "pp2",
        {"cut": ("blocks.3.mlp",), "recompute": "full"},
        UnsupportedModel,
        "one unit of recompute",
    ),
    (
        "deep",
        "pp2",
        {"schedule": schedules.make_schedule("1f1b", 2, 1), "options": {"chunks": 2}},
        ConfigError,
        "which takes no options",
    ),
    ("convnet", "pp8", {}, UnsupportedModel, "has 8 stages, and the model has only 7 modules"),
]


@pytest.mark.parametrize(("name", "layout", "plan", "kind", "says"), REFUSED)
def test_what_cannot_be_cut_is_refused(
    name: str, layout: str, plan: dict, kind: type[Refusal], says: str
) -> None:
    with pytest.raises(kind, match=says):
        laid(with_plan(name, **plan), seeded(STAGED[name].build), layout)


def test_pipedream_does_not_clip() -> None:
    """No process group is needed to say so."""
    subject = STAGED["deep"]
    model = seeded(subject.build)
    plan = laid(subject, model, "pp2+pipedream")
    with pytest.raises(ConfigError, match="no stage knows the norm of all gradients"):
        weft.Engine(
            model, plan, optimizer=partial(torch.optim.SGD, lr=0.1), loss=subject.loss, clip=1.0
        )


def test_a_pipeline_needs_a_sample() -> None:
    with pytest.raises(ConfigError, match="Give a batch of two samples"):
        weft.plan(STAGED["deep"].build(), "pp2", batch=BATCH)
