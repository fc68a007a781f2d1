"""Compiled blocks: the numbers of one device, no break inside of a block, nothing compiled again
after the second step; and what stands around a forward that is not compiled: nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases import LENGTH, VOCAB, Subject, in_turn, reference, tokens
from tests.engine import test_experts
from tests.verification.nets_to_trace import Net, NormedHeads, SlopedSamples
from tests.verification.test_parity import SUBJECTS, transformer
from weft._torch.compiler import CompileCounts, CompileLog
from weft._torch.modes import dispatch_modes, function_modes
from weft.core import CompileOptions, ConfigError, UnsupportedModel
from weft.engine.module_trail import ModuleTrail
from weft.nn import may_drop, may_route, with_loss
from weft.nn.losses import classification, mse, next_token
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.delayed_reference import run_delayed
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference

STEPS = 5
MODELS = {
    "decoder": Subject(
        partial(decoder, VOCAB, 32, 3, 4, 2, seq_len=LENGTH, dropout=0.2), tokens, next_token
    ),
    "llama": SUBJECTS["llama"],
    "qwen3": SUBJECTS["qwen3"],
    "gpt2": SUBJECTS["gpt2"],  # with dropout
}
LAYOUTS = [
    "dp2",
    "fsdp2",
    "tp2",
    "pp2",
    "tp2+sequence",
    "fsdp2+zero1",
    "dp2.tp2",
    "fsdp2+zero2",
    "pp2.fsdp2",
    "fsdp2.tp2+sequence",
    "pp2+zb-h1.tp2",
]
RECOMPUTE: list[Any] = ["none", "selective", "full"]
GRID = [
    (name, layout, again)
    for i, (name, layout) in enumerate(in_turn(MODELS, LAYOUTS, len(LAYOUTS)))
    for again in (RECOMPUTE[i % 3],)
]
GRID += [("decoder", layout, again) for layout in ("dp2", "tp2+sequence") for again in RECOMPUTE]
GRID = list(dict.fromkeys(GRID))


def compiled_layout(case: Case, layout: str, held_to: Reference) -> LayoutResult:
    torch.compiler.reset()  # other tests of this process have compiled the same code
    return check_layout(case, layout, held_to)


def check(
    pool: Any, subject: Subject, layout: str, backend: str = "aot_eager", steps: int = STEPS
) -> LayoutResult:
    case = replace(subject.case(), compile=CompileOptions(backend=backend))
    world = weft.Layout.parse(layout).world
    held_to = reference(subject, steps)
    result: LayoutResult = pool.run(compiled_layout, case, layout, held_to, world=world)[0]
    assert result.passed, (result.problem, result.first, result)
    assert result.compiled is not None and result.compiled.graphs
    return result


def break_reasons() -> list[str]:
    return CompileLog().reasons()


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout", "again"), GRID)
def test_compiled_blocks_equal_one_device(pool: Any, name: str, layout: str, again: str) -> None:
    subject = replace(MODELS[name], plan=(("accumulate", 2), ("recompute", again)), clip=0.5)
    found = check(pool, subject, layout).compiled
    assert found is not None and found.breaks == 0
    assert found.recompilations == 0


TP_PARTS = {
    "norms over all heads": Subject(partial(Net, NormedHeads), tokens, next_token),
    "biases of all heads": Subject(partial(Net, SlopedSamples), tokens, next_token),
}


@pytest.mark.parametrize("name", TP_PARTS)
def test_what_tp_puts_beside_linears_breaks_no_graph(pool: Any, name: str) -> None:
    found = check(pool, TP_PARTS[name], "tp2", steps=3).compiled
    assert found is not None and found.breaks == found.recompilations == 0


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "layout", "versions", "again"),
    [
        ("decoder", "pp2", "stash", "none"),
        ("llama", "pp2", "vertical", "full"),
        ("decoder", "pp2.dp2", "stash", "selective"),
        ("llama", "pp2", "2bw", "none"),
    ],
)
def test_an_asynchronous_pipeline_equals_its_sequential_definition(
    pool: Any, name: str, layout: str, versions: str, again: str
) -> None:
    """A block computes with other tensors in each version of its weights."""
    options = {"schedule": "pipedream", "options": {"versions": versions}, "accumulate": 4}
    subject = replace(MODELS[name], plan=(*options.items(), ("recompute", again)))
    case = replace(subject.case(), compile=CompileOptions(backend="aot_eager"))
    delayed, world = run_delayed(case, layout, 3), weft.Layout.parse(layout).world
    result = pool.run(compiled_layout, case, layout, delayed, world=world)[0]
    assert result.passed and result.delayed, (result.problem, result.first, result)
    assert result.compiled is not None and result.compiled.graphs == 1
    assert result.compiled.breaks == result.compiled.recompilations == 0


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("layout", ["cp2", "cp2+gather", "ulysses2", "cp2.tp2"])
def test_a_ring_stands_between_graphs(pool: Any, layout: str) -> None:
    found = check(pool, MODELS["decoder"], layout).compiled
    assert found is not None and found.breaks == 4  # at one attention, with all that calls it
    assert found.recompilations == 0


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("kind", ["mixtral", "decoder"])
@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2+sequence"])
def test_experts_stand_between_graphs(pool: Any, kind: str, layout: str) -> None:
    mixture = Subject(
        partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH, experts=4), tokens, next_token
    )
    subject = test_experts.subject("mixtral") if kind == "mixtral" else mixture
    found = check(pool, subject, layout, steps=3).compiled
    assert found is not None and 0 < found.breaks <= 4
    assert found.recompilations == 0
    ours = "`torch.compiler.disable()`d function"
    assert all(ours in reason for rank in pool.run(break_reasons) for reason in rank)


@pytest.mark.grid(1, ci=1)
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "layout"), [("decoder", "dp2"), ("gpt2", "fsdp2"), ("llama", "tp2+sequence")]
)
def test_inductor_equals_one_device(pool: Any, name: str, layout: str) -> None:
    found = check(pool, MODELS[name], layout, "inductor", steps=3).compiled
    assert found is not None and found.breaks == found.recompilations == 0


def add_small(x: Tensor) -> Tensor:
    return with_loss(x, 1e-3 * x.square().mean())


class AddsByAHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.added(x)

    def added(self, x: Tensor) -> Tensor:
        return add_small(x)


class AddsByAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add = with_loss

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, x.square().mean())


def test_bf16_is_compiled_too(pool: Any) -> None:
    def close(a: float, b: float) -> bool:
        return a == pytest.approx(b, rel=2e-2)

    eager, compiled = (pool.run(losses, "tp2", choice, world=2)[0] for choice in ("off", "blocks"))
    assert all(map(close, eager, compiled)) and eager[-1] < eager[0]


def losses(layout: str, choice: Any, precision: str = "bf16", steps: int = 4) -> list[float]:
    torch.compiler.reset()
    options = CompileOptions(backend="aot_eager") if choice == "blocks" else choice
    engine = make_engine(MODELS["decoder"].build(), layout, options, precision=precision)
    batch = tokens()
    found = [float(engine.step(engine.local(batch)).loss) for _ in range(steps)]
    assert engine.compiled.counts.breaks == 0, engine.compiled.reasons
    return found


def make_engine(
    model: nn.Module, layout: str, compile: Any, loss: Any = next_token, **plan: Any
) -> weft.Engine:
    made = weft.plan(model, layout, batch=8, loss=loss, **plan)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return weft.Engine(model, made, optimizer=sgd, loss=loss, compile=compile, device="cpu")


# ---- what a compiler cannot see ------------------------------------------------------------------


def masks_of_steps(compile: Any) -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Droppers()
    engine = make_engine(model, "dp1", compile, loss=model.loss)
    found = []
    for _ in range(3):
        engine.step({"x": torch.ones(8, 16)})
        found.append(model.seen)
    return found


class Dropper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dropout = nn.Parameter(torch.ones(16)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.scale + torch.zeros_like(x))


class Droppers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropper() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.seen = output.detach().clone()
        return output.sum() * 0.0, torch.tensor(8.0)


def test_masks_are_the_same_compiled_and_differ_from_step_to_step() -> None:
    eager, compiled = masks_of_steps("off"), masks_of_steps(CompileOptions(backend="aot_eager"))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(compiled[0], compiled[1])
    assert len({tuple(sample.tolist()) for sample in compiled[0]}) == 8  # each has its own masks


# ---- nothing around a forward --------------------------------------------------------------------


class Watched(nn.Module):
    """A block that tells which modes are active around it."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(16, 32), nn.Linear(32, 16), seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(function_modes()) + len(dispatch_modes()))
        return x + self.down(F.gelu(self.up(x)))


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Watched(self.seen) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 2  # under pp, work of the first stage: the second one skips it
        self.seen.append(len(function_modes()) + len(dispatch_modes()))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def modes_seen(layout: str, recompute: Any) -> list[int]:
    model = Watching()
    engine = make_engine(
        model, layout, "off", classification, recompute=recompute, roles={}, sample=images()
    )
    for _ in range(3):
        engine.step(engine.local(images()))
    return model.seen


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16), "label": torch.randint(0, 3, (8,))}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2", "fsdp2+zero1", "pp2", "tp2"])
def test_no_mode_is_active_from_the_first_step_on(pool: Any, layout: str, recompute: str) -> None:
    ranks = pool.run(modes_seen, layout, recompute, world=weft.Layout.parse(layout).world)
    assert all(seen and not any(seen) for seen in ranks)


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


class Hidden(nn.Module):
    """Dropout that neither a module, nor an attribute, nor the code of a class tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.down(drop(F.relu(self.norm(self.up(features)))))


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_dropout_that_nothing_tells_of_is_found_when_it_draws(pool: Any, layout: str) -> None:
    assert not may_drop(Hidden())
    subject = replace(SUBJECTS["perceptron"], build=Hidden)
    result = pool.run(check_layout, subject.case(), layout, reference(subject, 3), world=2)[0]
    assert result.loss_rel_err < 1e-12 and result.param_rel_err < 1e-9, result


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, training=self.training)


class Probability(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.resid_dropout = p


class Renewed(nn.Module):
    """Its noise is drawn by a method that another module calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.noise

    def renew(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self.noise = torch.randn(3)


class Latent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, 1.0).rsample()


class Renewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Renewed()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.renew()
            x = layer(x)
        return x


def test_what_may_drop_is_told_from_the_model() -> None:
    assert may_drop(Renewing()) and not may_drop(Renewed())
    assert may_drop(Latent())
    assert may_drop(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not may_drop(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert may_drop(Functional())
    assert may_drop(Probability(0.1)) and not may_drop(Probability(0.0))
    assert may_drop(transformer("gpt2")) and not may_drop(transformer("llama"))
    assert may_route(decoder(experts=4)) and not may_route(decoder())
    assert may_route(AddsByAHelper()) and may_route(AddsByAnAttribute())


# ---- what its user compiled ----------------------------------------------------------------------


def steps_of_compiled(
    layout: str, name: str, part: str | None, choice: Any = "off"
) -> tuple[list[float], int, CompileCounts]:
    """Losses; how many graphs the user's backend got, of parts of blocks or, "", of whole ones;
    what was compiled in all."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, graphs, log = MODELS[name].build(), [], CompileLog()

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for block in model.model.layers if name == "llama" else model.transformer.h:
        if part is not None:
            block.get_submodule(part).compile(backend=count)
    engine = make_engine(model, layout, choice, sample={k: v[:2] for k, v in tokens().items()})
    found = [float(engine.step(engine.local(tokens())).loss) for _ in range(STEPS)]
    return found, len(graphs), log.counts()


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_blocks_that_the_user_compiled_stay_compiled(pool: Any, layout: str) -> None:
    eager, none, _ = pool.run(steps_of_compiled, layout, "llama", None, world=2)[0]
    compiled, graphs, _ = pool.run(steps_of_compiled, layout, "llama", "", world=2)[0]
    assert none == 0 and 0 < graphs <= 2
    assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("part", ["", "mlp"])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_dropout_in_what_the_user_compiled_is_compiled_once(
    pool: Any, layout: str, part: str
) -> None:
    """Its key and what ran before it are other numbers in each step and block."""
    eager = pool.run(steps_of_compiled, layout, "gpt2", None, world=2)[0][0]
    found, graphs, counts = pool.run(steps_of_compiled, layout, "gpt2", part, world=2)[0]
    assert graphs == 1 and counts.recompilations == 0
    assert found == pytest.approx(eager, rel=1e-5)


def test_what_the_user_compiled_is_on_the_trail_of_modules() -> None:
    first, second = Droppers(), Droppers()  # without parameters of their own
    second.compile(backend="eager")
    trail = ModuleTrail(nn.ModuleList([first, second]), [""])

    def hash_of(*calls: nn.Module) -> int:
        trail.clear()
        for call in calls:
            call(torch.ones(1, 16))
        return trail.hash

    orders = [(first,), (second,), (first, second), (second, first)]
    assert len({0, *(hash_of(*calls) for calls in orders)}) == 5
    assert hash_of(first, second) == hash_of(first, second)


def test_blocks_are_compiled_around_parts_that_the_user_compiled(pool: Any) -> None:
    eager = pool.run(steps_of_compiled, "fsdp2", "gpt2", None, world=2)[0][0]
    ours = CompileOptions(backend="aot_eager")
    found, graphs, counts = pool.run(steps_of_compiled, "fsdp2", "gpt2", "mlp", ours, world=2)[0]
    assert graphs == 0 and counts.graphs == 2 and counts.breaks == counts.recompilations == 0
    assert found == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("how", [torch.compile, lambda model: model.compile() or model])
def test_a_model_that_is_compiled_as_a_whole_is_refused(how: Any) -> None:
    model = how(MODELS["decoder"].build())
    with pytest.raises(UnsupportedModel, match=r"train\.compile"):
        make_engine(model, "dp1", "off")


def test_a_checkpoint_of_the_model_around_compiled_dropout_is_refused() -> None:
    model = transformer("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = make_engine(model, "dp1", CompileOptions(backend="eager"))
    with pytest.raises(UnsupportedModel, match="checkpoint"):
        engine.step(tokens())


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "choice", "says"),
    [
        (partial(nn.Linear, 6, 3), "blocks", "no list of repeated modules"),
        (MODELS["decoder"].build, "block", "Did you mean"),
        (MODELS["decoder"].build, CompileOptions(backend="inducter"), "no such backend"),
    ],
)
def test_what_cannot_be_compiled_is_refused(build: Any, choice: Any, says: str) -> None:
    loss = mse if build.func is nn.Linear else next_token
    with pytest.raises(ConfigError, match=says):
        make_engine(build(), "dp1", choice, loss)


def test_selective_recomputation_is_refused_with_a_backend_that_calls_torch() -> None:
    model = MODELS["decoder"].build()
    with pytest.raises(ConfigError, match=r"train\.compile_backend.*aot_eager"):
        make_engine(model, "dp1", CompileOptions(backend="eager"), recompute="selective")


def test_nothing_is_compiled_on_a_cpu_unless_asked_for() -> None:
    assert make_engine(MODELS["decoder"].build(), "dp1", "auto").compiled.options is None
    engine = make_engine(MODELS["decoder"].build(), "dp1", CompileOptions(backend="eager"))
    assert "compiled: blocks and loss, by eager" in str(engine.global_plan)


def test_an_unknown_argument_is_refused() -> None:
    model = MODELS["decoder"].build()
    plan = weft.plan(model, "dp1", batch=8, loss=next_token)
    with pytest.raises(TypeError, match="clipp"):
        weft.Engine(model, plan, optimizer=torch.optim.SGD, loss=next_token, clipp=1.0)  # type: ignore[call-arg]
