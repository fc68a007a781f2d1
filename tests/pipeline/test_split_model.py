"""Any model cut along its forward: stages run one after the other in one process give the uncut
model's numbers, and what cannot be cut is refused with the line that stands in the way.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from tests.staged import STAGED
from weft.core.errors import UnsupportedModel
from weft.core.stages import Staging
from weft.engine.function_overrides import FunctionOverrides
from weft.engine.pipeline.stage_forward import StageForward
from weft.nn.dropout_rng import Randomness
from weft.nn.module_roles import find_roles
from weft.pipeline.capture.functions import count_draws
from weft.pipeline.capture.model_copy import copy_with_tensors, is_parameter
from weft.pipeline.capture.placeholder import PlaceholderTensor
from weft.pipeline.capture.split_points import split_points
from weft.pipeline.capture.structures import tensors_in
from weft.pipeline.capture.tracer import trace_forward
from weft.pipeline.split_model import split_stages

Inputs = Mapping[str, Any]

CPU = torch.device("cpu")


# ---- stages, one after the other -----------------------------------------------------------------


class Line:
    """A model in stages, each with its own copy of it; `ranks`: the stages that share a copy."""

    def __init__(
        self, model: nn.Module, staging: Staging, ranks: Sequence[Sequence[int]] | None = None
    ):
        self.staging = staging
        self.runners: dict[int, StageForward] = {}
        for stages in ranks or [[stage.index] for stage in staging.stages]:
            runner = StageForward(copy.deepcopy(model), staging, stages, CPU)
            self.runners |= dict.fromkeys(stages, runner)

    def forward(
        self, inputs: Inputs
    ) -> tuple[Any, list[tuple[dict[int, Tensor], dict[int, Tensor]]]]:
        crossing: dict[tuple[int, int], Tensor] = {}
        trail = []
        output = None
        for stage in self.staging.stages:
            received = {
                i: crossing[i, stage.index]
                for i, v in enumerate(self.staging.values)
                if stage.index in v.targets
            }
            sent, output = self.runners[stage.index](stage.index, inputs, received)
            assert set(sent) == {
                i for i, v in enumerate(self.staging.values) if v.source == stage.index
            }
            for i, tensor in sent.items():
                value = self.staging.values[i]
                if torch.is_grad_enabled():
                    assert tensor.requires_grad == value.differentiable, value
                for target in value.targets:
                    crossing[i, target] = (
                        tensor.detach().clone().requires_grad_(tensor.requires_grad)
                    )
            trail.append((received, sent))
        return output, trail

    def backward(
        self, loss: Tensor, trail: list[tuple[dict[int, Tensor], dict[int, Tensor]]]
    ) -> None:
        grads: dict[int, Tensor] = {}
        for stage in reversed(self.staging.stages):
            received, sent = trail[stage.index]
            ends = [(tensor, grads[i]) for i, tensor in sent.items() if i in grads]
            if stage.index == len(trail) - 1:
                ends.append((loss, torch.ones_like(loss)))
            torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
            for i, tensor in received.items():
                if tensor.grad is not None:
                    grads[i] = grads.get(i, 0) + tensor.grad

    def grads(self) -> dict[str, Tensor]:
        """Summed over the stages that use a parameter."""
        total: dict[str, Tensor] = {}
        for runner in dict.fromkeys(self.runners.values()):
            for name, p in runner.model.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad
        return total


def scalar(output: Any) -> Tensor:
    """A loss that every floating-point tensor of an output counts in, each element by its own
    weight."""
    found = [t.double() for t in tensors_in(output) if t.is_floating_point()]
    return sum(
        (torch.cos(torch.arange(t.numel()).view(t.shape).double()) * t.double()).sum()
        for t in found
    )  # type: ignore[return-value]


def double(inputs: Inputs) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def hold(
    model: nn.Module, points: Sequence[str], *batches: Inputs, **options: Any
) -> tuple[Line, Staging]:
    """The first batch is the sample; on each, all stages together give the uncut model's output and
    gradients."""
    model = model.double()
    staging = split_stages(trace_forward(model, double(batches[0])), points)
    line = Line(model, staging, **options)
    for batch in batches:
        model.zero_grad()
        for runner in line.runners.values():
            runner.model.zero_grad()
        torch.manual_seed(7)
        expected = model(**double(batch))
        scalar(expected).backward()
        output, trail = line.forward(double(batch))
        line.backward(scalar(output), trail)
        assert type(output) is type(expected)
        for a, b in zip(tensors_in(output), tensors_in(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        grads, want = (
            line.grads(),
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        )
        assert grads.keys() == want.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, want[name], rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
    return line, staging


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def subject(name: str, samples: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = without_dropout(STAGED[name].build()).double()
    batch = STAGED[name].data()
    return model, double(
        {k: v[:samples] for k, v in batch.items() if k not in ("labels", "label", "target")}
    )


def shorter(inputs: Inputs) -> dict[str, Tensor]:
    """Other numbers of samples and of tokens than the sample's."""
    return {
        k: v[:1, :7] if v.ndim == 2 and not v.is_floating_point() else v[:1]
        for k, v in inputs.items()
    }


def atoms(model: nn.Module, inputs: Inputs) -> list[str]:
    blocks = [block for blocks in find_roles(model).blocks for block in blocks]
    return [atom.module for atom in split_points(trace_forward(model, inputs), blocks)]


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", STAGED)
def test_stages_give_the_models_numbers(name: str, stages: int) -> None:
    model, inputs = subject(name)
    if name == "convnet":
        model.eval()  # running statistics: a batch of one sample has no variance
    points = atoms(model, inputs)[1:]
    chosen = [points[len(points) * (i + 1) // stages] for i in range(stages - 1)]
    hold(model, chosen, inputs, shorter(inputs))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "tied", "plain"])
def test_a_cut_at_every_part(name: str) -> None:
    model, inputs = subject(name)
    hold(model, atoms(model, inputs)[1:], inputs)


ODD = {
    "llama": ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.act_fn", "model.norm"],
    "gpt2": ["transformer.wpe", "transformer.h.0.ln_2", "transformer.h.6.mlp.c_proj"],
    "bert": [
        "bert.embeddings.LayerNorm",
        "bert.encoder.layer.3.attention.self.value",
        "cls.predictions.decoder",
    ],
    "t5": [
        "encoder.block.1.layer.0.SelfAttention.o",
        "decoder.block.0.layer.1",
        "decoder.block.2.layer.1.layer_norm",
    ],
    "decoder": ["dropout", "blocks.1.attention.wk", "head"],
}


@pytest.mark.parametrize("name", ODD)
def test_a_cut_in_odd_places(name: str) -> None:
    model, inputs = subject(name)
    hold(model, ODD[name], inputs)


def test_batchnorm_statistics_are_their_stages() -> None:
    model, inputs = subject("convnet", samples=8)
    before = copy.deepcopy(model.state_dict())
    line, staging = hold(model, ["stages.1", "head"], inputs)
    assert [s.buffers for s in staging.stages] == [
        tuple(
            sorted(
                f"stages.{i}.1.{b}"
                for i in which
                for b in ("num_batches_tracked", "running_mean", "running_var")
            )
        )
        for which in ([0], [1, 2], [])
    ]
    for stage in staging.stages:
        buffers = dict(line.runners[stage.index].model.named_buffers())
        for name, expected in model.named_buffers():
            want = expected if name in stage.buffers else before[name]
            torch.testing.assert_close(buffers[name], want)


class Kept(nn.Module):
    """Three ways to write to a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        new = y.detach().mean(0)
        if self.way == "in place":
            self.mean.mul_(0.9).add_(new)
        elif self.way == "data":
            self.mean.data.mul_(0.9).add_(new)
        elif self.way == "part":
            self.mean[:4].copy_(new[:4])
        elif self.way == "number":
            self.mean.data[0] += 1.0
        return y


@pytest.mark.parametrize("way", ["in place", "data", "part", "number"])
def test_a_buffer_is_its_stages_however_it_is_written_to(way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Kept(way), nn.Linear(8, 8)).double()
    x = {"input": torch.randn(3, 8).double()}
    staging = split_stages(trace_forward(model, x), ["1", "2"])
    assert [stage.buffers for stage in staging.stages] == [(), ("1.mean",), ()]
    line = Line(model, staging)
    line.forward(x)
    model(**x)
    torch.testing.assert_close(
        line.runners[1].model.get_buffer("1.mean"), model.get_buffer("1.mean")
    )
    assert bool(model.get_buffer("1.mean").any())


def test_padding_is_seen_by_every_stage() -> None:
    model, inputs = subject("qwen3")
    full = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    hold(
        model, ["model.layers.2", "model.layers.5"], full, inputs, full
    )  # the sample needs no mask, the second does


def test_stages_of_one_rank_share_a_model() -> None:
    model, inputs = subject("tied")
    line, staging = hold(
        model, ["blocks.1", "blocks.3", "blocks.5"], inputs, ranks=[[0, 3], [1, 2]]
    )  # as a V-shaped schedule places them
    assert line.runners[0] is line.runners[3]
    assert (
        "embedding.weight" in staging.stages[0].weights
        and "embedding.weight" in staging.stages[3].weights
    )


# ---- forwards as people write them ---------------------------------------------------------------


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    hidden: Tensor
    extra: list[Tensor]
    note: str = "note"


class Block(nn.Module):
    def __init__(self, inplace: bool = False):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.ReLU(inplace=inplace)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, shift: Tensor | None = None
    ) -> Tensor:
        x = self.linear(self.act(x) if scale is None else x * scale)
        return x if shift is None else x + shift


class Written(nn.Module):
    """Blocks a..d and a forward given as a function."""

    def __init__(self, forward: Callable[..., Any], inplace: bool = False, **more: Any):
        super().__init__()
        self.a, self.b, self.c, self.d = (Block(inplace) for _ in range(4))
        self.pos = nn.Parameter(torch.randn(8))
        self.register_buffer("count", torch.zeros(()))
        for key, value in more.items():
            setattr(self, key, value)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def skips(m: Any, x: Tensor) -> Tensor:
    first = m.a(x)
    second = m.b(first) + m.pos
    return m.d(m.c(second) + first) + first * second.sum()


def changed_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.pos
    early = h.clone()
    h.add_(m.b(h.clone()))
    h += m.c(h.clone())
    h[:, 0] = 0.5
    F.relu(h, inplace=True)
    return m.d(h) + early


def structures(m: Any, x: Tensor) -> Any:
    pair = Pair(m.a(x), x.mean(0))
    record = Record(m.b(pair.left), [pair.left * 2, pair.right])
    table = {"c": (m.c(record.hidden, shift=record.extra[0]),), "none": None}
    return {
        "out": m.d(table["c"][0], scale=pair.left),
        "record": record,
        "pair": pair,
        "first": record.extra,
    }


def integers(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    order = h.argsort(dim=1)
    mask = h > 0
    h = m.c(m.b(h))
    return m.d(h.gather(1, order).masked_fill(mask, 0.25))


def weights_alone(m: Any, x: Tensor) -> Tensor:
    shift = m.pos * 2  # made of a parameter and nothing else, and used by every stage
    h = m.b(m.a(x) + shift) + shift
    return m.d(m.c(h)) + shift + m.pos


def shapes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    b, width = h.shape
    table = torch.arange(b * width, dtype=h.dtype, device=h.device).view(b, width) / 100
    h = m.b(h + table) + h.new_ones(len(h), h.size(-1)) + torch.zeros_like(h)
    first, second = h.chunk(2, dim=-1)
    h = torch.cat([second, first], -1).view(-1, 2, width // 2).transpose(1, 2)
    h = m.c(h.reshape(h.shape[0], -1))
    return m.d(h.view(table.shape)) * h.shape[0]


def untouched(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.a(x)
    h = m.b(x).detach() * m.pos
    return m.d(m.c(h)) * target.float()


def sums_in_turn(m: Any, x: Tensor) -> Tensor:
    """A tensor that another block has written to is gone when the next tensor gets its memory."""
    h, order = m.a(x), torch.arange(len(x)).flip(0)
    for block in (m.b, m.c):
        total = torch.zeros_like(h).index_add_(0, order, h)
        h = block(total / len(x))
        del total
        counts = torch.bincount(order, minlength=len(x)).clamp(min=2).unsqueeze(-1)
        h = h / counts
    return m.d(h)


class ByRow(nn.Module):
    """No function inside is seen."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(torch.mul)(x, y)


def transformed(m: Any, x: Tensor) -> Tensor:
    return m.d(m.c(m.rows(m.a(x), m.b(x))))


def views(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    left = h[:, :4]
    h = m.c(m.b(h))
    return m.d(h)[:, :4] * left


def buffered(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    m.count.add_(h.detach().mean())
    return m.d(m.c(h) * (1 + m.count))


FORWARDS = [
    *(skips, changed_in_place, structures, integers, weights_alone, shapes, untouched),
    *(sums_in_turn, views),
]


@pytest.mark.parametrize(
    "points", [["b"], ["c"], ["d"], ["b", "c", "d"], ["b.linear", "c.linear", "d.linear"]], ids=str
)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_a_plain_forward(forward: Callable, points: list[str]) -> None:
    torch.manual_seed(0)
    hold(Written(forward), points, {"x": torch.randn(3, 8)}, {"x": torch.randn(5, 8)})


@pytest.mark.parametrize("points", [["b"], ["c"], ["rows"], ["b", "c", "d"]], ids=str)
def test_a_module_in_which_nothing_is_seen_reads_what_it_is_given(points: list[str]) -> None:
    hold(Written(transformed, rows=ByRow()), points, {"x": torch.randn(3, 8)})


def layer_by_layer(m: Any, x: Tensor) -> Any:
    one, other = (m.b(m.a(each)) for each in (x, x.flip(0)))
    one, other = m.c(one), m.c(other)
    return m.d(one), m.d(other), one.detach()


def view_by_view(m: Any, x: Tensor) -> Any:
    return [m.d(m.c(m.b(m.a(each)))) for each in (x, x.flip(0))]


@pytest.mark.parametrize("points", [["c"], ["d"], ["c", "d"]], ids=str)
def test_a_stage_begins_with_the_first_of_several_calls(points: list[str]) -> None:
    hold(Written(layer_by_layer), points, {"x": torch.randn(3, 8)}, {"x": torch.randn(5, 8)})


def test_candidates_share_no_weight_with_what_runs_before() -> None:
    batch = {"x": torch.randn(3, 8)}
    assert atoms(Written(layer_by_layer), batch) == ["a", "c", "d"]
    assert atoms(Written(view_by_view), batch) == ["a"]
    with pytest.raises(UnsupportedModel, match="'c': the forward calls it 2 times"):
        split_stages(trace_forward(Written(view_by_view), batch), ["c"])


def test_a_constant_that_a_later_stage_makes_depend_on_weights_has_no_gradient_before() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        sums = h.detach().softmax(-1).clone()
        g = m.b(h)
        sums += g.softmax(-1)
        return m.d(m.c(g + sums)) * sums

    hold(Written(forward), ["b", "d"], {"x": torch.randn(3, 8)})


def test_modules_that_change_their_input() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.d(m.c(m.b(m.a(x.clone()))))

    _, staging = hold(Written(forward, inplace=True), ["b", "c", "d"], {"x": torch.randn(3, 8)})
    assert {stage for stage, _ in staging.copied} == {1, 2, 3}


def test_a_far_value_goes_straight_to_its_stages() -> None:
    staging = split_stages(trace_forward(Written(skips), {"x": torch.randn(3, 8)}), ["b", "c", "d"])
    routes = [(v.source, v.targets) for v in staging.values]
    assert routes == [(0, (1, 2, 3)), (1, (2, 3)), (2, (3,))]
    assert staging.values[0].name == "output 0 of a"
    assert [s.weights for s in staging.stages] == [
        ("a.linear.weight", "a.linear.bias"),
        ("pos", "b.linear.weight", "b.linear.bias"),
        ("c.linear.weight", "c.linear.bias"),
        ("d.linear.weight", "d.linear.bias"),
    ]
    assert [s.modules for s in staging.stages] == [("a",), ("b",), ("c",), ("d",)]
    assert [s.first for s in staging.stages] == ["a", "b", "c", "d"]


def test_values_say_what_they_are() -> None:
    staging = split_stages(trace_forward(Written(integers), {"x": torch.randn(3, 8)}), ["c"])
    kinds = {(v.dtype, v.differentiable) for v in staging.values}
    assert kinds == {(torch.int64, False), (torch.bool, False), (torch.float32, True)}
    assert any(
        "`order = h.argsort(dim=1)` at test_split_model.py:" in v.name for v in staging.values
    )


class Grid(nn.Module):
    """Returns sizes beside its tensor, as vision backbones do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2, stride=2)

    def forward(self, image: Tensor) -> tuple[Tensor, int, int]:
        x = self.conv(image)
        return x.flatten(2).transpose(1, 2), x.shape[2], x.shape[3]


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix = Grid(), nn.Linear(4, 4)
        self.token, self.place = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(1, 100, 4)),
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, height, width = self.patch(image)
        x = (
            torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
            + self.place[:, : x.shape[1] + 1]
        )
        for layer in self.layers:
            x = layer(x)
        x = self.mix(x)[:, 1:].transpose(1, 2).reshape(-1, 4, height, width)
        return self.head(x)


def test_sizes_follow_the_call_not_the_sample() -> None:
    batches = [
        {"image": torch.randn(b, 3, h, w)}
        for b, h, w in ((2, 8, 8), (1, 12, 6), (3, 4, 10), (2, 8, 8))
    ]
    hold(Patches(), ["layers.0", "layers.2", "mix"], *batches)


def test_a_vision_transformer() -> None:
    import transformers as t

    config = t.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = t.AutoModelForImageClassification.from_config(config)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    points = atoms(model, inputs)
    hold(model, [points[1], points[3]], inputs, {"pixel_values": torch.randn(3, 3, 16, 16)})


class Table(nn.Module):
    """Hands out its weight, its buffer and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor, mask: Tensor, bag: Any) -> tuple[Any, ...]:
        return x * self.weight, self.weight, self.scale, mask, bag


def test_what_a_module_hands_through() -> None:
    class Bag:
        factor = 3.0

    def forward(m: Any, x: Tensor) -> Tensor:
        h, weight, scale, mask, bag = m.e(m.a(x), x > 0, Bag())
        h = m.b(h) * weight * scale
        return m.c(h).masked_fill(mask, 0.5) * bag.factor

    _, staging = hold(
        Written(forward, e=Table()), ["b", "c"], {"x": torch.randn(3, 8)}, {"x": torch.randn(4, 8)}
    )
    assert [("e.weight" in stage.weights) for stage in staging.stages] == [True, True, False]
    assert [v.name for v in staging.values] == [
        "output 0 of e",
        "`h = m.b(h) * weight * scale` at test_split_model.py:"
        + (staging.values[1].name.rpartition(":")[2]),
    ]


def test_a_module_called_on_inputs_too() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.d(m.e(m.b(m.a(m.e(x)))) + m.e(x))

    hold(Written(forward, e=nn.Identity()), ["b", "d"], {"x": torch.randn(3, 8)})


def test_own_modules_run_at_full_speed() -> None:
    active: list[Any] = []
    model = Written(skips)
    for module in (model.b.linear, model.c.linear):
        module.register_forward_pre_hook(
            lambda *_: active.append(_get_current_function_mode_stack())
        )
    staging = split_stages(trace_forward(model, {"x": torch.randn(3, 8)}), ["b", "c"])
    active.clear()
    outer = FunctionOverrides(Randomness(0), False)
    with outer:
        Line(model, staging).forward({"x": torch.randn(3, 8)})
    assert active == [[outer], [outer]]


class Caller(nn.Linear):
    """A module with its own __call__, as a wrapper for recomputation has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_hooks_and_calls_of_the_models_own() -> None:
    model = nn.Sequential(*(Caller(4, 4) for _ in range(4)))
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: out * 2)
        layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: out + 3)
    hold(model, ["1", "3"], {"input": torch.randn(2, 4)})


def test_hooks_that_come_after_planning_are_no_part_of_the_path() -> None:
    """As sharding hangs them on: they compute with weights, and hand on new tensors."""
    model = Written(skips).double()
    inputs = {"x": torch.randn(3, 8).double()}
    expected = model(**inputs)
    line = Line(model, split_stages(trace_forward(model, inputs), ["b.linear", "d"]))
    for runner in line.runners.values():
        own = next(p for p in runner.model.parameters() if not isinstance(p, PlaceholderTensor))
        for module in (runner.model, runner.model.b):
            module.register_forward_pre_hook(lambda module, args, own=own: (own.sum() * 2) and None)
        runner.model.b.register_forward_hook(
            lambda module, args, out: out + 0 if not isinstance(out, PlaceholderTensor) else None
        )
    for _ in range(2):
        torch.testing.assert_close(line.forward(inputs)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_faces_recompute(reentrant: bool) -> None:
    model, inputs = subject("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    hold(model, ["model.layers.2", "model.layers.4"], inputs)


# ---- modes ---------------------------------------------------------------------------------------


def test_evaluation() -> None:
    model, inputs = subject("gpt2")
    staging = split_stages(trace_forward(model, inputs), ["transformer.h.3"])
    line = Line(model.eval(), staging)
    with torch.no_grad():
        output, _ = line.forward(inputs)
        torch.testing.assert_close(output.logits, model(**inputs).logits, rtol=1e-12, atol=1e-12)


class Halving(nn.Module):
    """Half of the tokens in training, all of them in evaluation, and one flag that says which."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return self.linear(x[:, : x.shape[1] // 2] if self.training else x), self.training


def test_what_earlier_stages_would_make_is_of_this_mode() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Halving(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h, flag = self.a(x)
            return self.b(h) * (h.shape[1] + flag)

    model, x = Model().double(), {"x": torch.randn(2, 6, 8).double()}
    line = Line(model, split_stages(trace_forward(model, x), ["b"]))
    for mode in (True, False, True):
        model.train(mode)
        for runner in line.runners.values():
            runner.model.train(mode)
        torch.testing.assert_close(line.forward(x)[0], model(**x))


def test_autocast() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        scale, high = (
            torch.ones(8, dtype=h.dtype),
            h.float(),
        )  # on the sample, h.float() is h itself
        return m.c(m.b(h)) * scale, scale, high

    model, inputs = Written(forward), {"x": torch.randn(3, 8)}
    line = Line(model, split_stages(trace_forward(model, inputs), ["b", "c"]))
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = line.forward(inputs)
        expected = model(**inputs)
    assert (
        [t.dtype for t in output]
        == [t.dtype for t in expected]
        == [torch.bfloat16, torch.bfloat16, torch.float32]
    )
    for a, b in zip(output, expected):
        assert torch.equal(a, b)


def test_torchs_own_dropout_has_its_own_names() -> None:
    x, randomness = torch.ones(4, 50), Randomness(0)
    with FunctionOverrides(randomness, selective=False):
        randomness.begin(0, [0, 1, 2, 3])
        by_place = torch.dropout(x, 0.5, True)
        randomness.begin(0, [0, 1, 2, 3])
        assert torch.equal(torch.dropout(x, p=0.5, train=True), by_place)
        assert torch.equal(torch.dropout(x, p=0.5, train=False), x)
    assert count_draws(torch.dropout, (x,), {"p": 0.5, "train": True}) == 1
    assert count_draws(torch.dropout, (x,), {"p": 0.5, "train": False}) == 0


@pytest.mark.parametrize("name", ["deep", "sequential", "t5", "gpt2", "bert"])
def test_dropout_is_drawn_as_on_one_device(name: str) -> None:
    """Masks are counted from the forward's start outside of blocks: what an earlier stage draws is
    counted too."""
    torch.manual_seed(0)
    model = STAGED[name].build().double()
    inputs = double(
        {k: v[:3] for k, v in STAGED[name].data().items() if k not in ("labels", "target")}
    )
    points = atoms(model, inputs)
    staging = split_stages(trace_forward(model, inputs), [points[2], points[-1]])

    class Counted(Randomness):
        masks = 0

        def site(self) -> Tensor:
            self.masks += 1
            return super().site()

    def randomness() -> Counted:
        begun = Counted(seed=3)
        begun.begin(0, [0, 1, 2])
        return begun

    one = randomness()
    with FunctionOverrides(one, False):
        expected = model(**inputs)
    assert one.masks and one.drawn
    line = Line(model, staging)
    crossing: dict[int, Tensor] = {}
    drawn = 0
    for stage in staging.stages:
        mine = randomness()
        runner = line.runners[stage.index]
        runner.skipped = mine.skip
        with FunctionOverrides(mine, False):
            sent, output = runner(
                stage.index,
                inputs,
                {i: t for i, t in crossing.items() if stage.index in staging.values[i].targets},
            )
        crossing |= sent
        drawn += mine.masks
    assert drawn == one.masks
    for a, b in zip(tensors_in(output), tensors_in(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_blocks_count_their_own_masks() -> None:
    model, inputs = STAGED["deep"].build(), {"input_ids": torch.randint(0, 9, (2, 5))}
    blocks = [f"blocks.{i}" for i in range(7)]
    counted = split_stages(trace_forward(model, inputs), ["norm"], blocks)
    assert {item.name: item.draws for item in counted.items if item.draws} == {"dropout": 1}
    everywhere = split_stages(trace_forward(model, inputs), ["norm"])
    assert sum(item.draws for item in everywhere.items) == 1 + 7 * 2 + 1


# ---- memory --------------------------------------------------------------------------------------


def test_a_stage_holds_its_own_parameters() -> None:
    model, inputs = subject("tied")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    staging = split_stages(trace_forward(model, inputs), ["blocks.2", "blocks.4"])
    runner = StageForward(model, staging, [1], CPU)
    real = {n: p for n, p in model.named_parameters() if not isinstance(p, PlaceholderTensor)}
    assert (
        set(real)
        == set(staging.stages[1].weights)
        == {n for n in sizes if n.startswith(("blocks.2", "blocks.3"))}
    )
    ghost = model.embedding.weight  # type: ignore[union-attr]
    assert ghost is model.head.weight and isinstance(ghost, nn.Parameter)  # type: ignore[union-attr]
    assert (ghost.dtype, ghost.device.type, ghost.numel()) == (
        torch.float64,
        "cpu",
        sizes["embedding.weight"],
    )
    assert ghost.requires_grad and ghost.grad is None and next(model.parameters()) is ghost
    assert "head.weight" in model.state_dict()
    held = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in real.values()}
    assert sum(held.values()) == 8 * sum(sizes[n] for n in real)
    with pytest.raises(
        UnsupportedModel,
        match=r"embedding.weight.*another stage, and its elements are read at test_split_model",
    ):
        ghost + 1
    with pytest.raises(UnsupportedModel, match=r"embedding.weight"):
        bool(ghost.sum() > 0)
    assert runner.programs.keys() == {1}


def test_a_weight_that_the_sample_missed_is_where_its_module_is() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if float(x.detach().sum()) > -1e9 else self.two(x)

    model = Written(lambda m, x: m.d(m.c(m.b(m.a(x)))), c=Experts())
    _, staging = hold(model, ["b", "c"], {"x": torch.randn(2, 8)})
    assert "c.two.weight" in staging.stages[2].weights


def to_meta(tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor.detach().to("meta")) if is_parameter(tensor) else tensor.to("meta")


# ---- the chart -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAGED)
def test_a_chart_needs_no_data(name: str) -> None:
    model, inputs = subject(name)
    points = atoms(model, inputs)
    real, meta = (trace_forward(m, inputs) for m in (model, copy_with_tensors(model, to_meta)))
    staging, *others = (
        split_stages(c, points[1::2]) for c in (real, meta, pickle.loads(pickle.dumps(real)))
    )
    assert [staging, pickle.loads(pickle.dumps(staging))] == others


def test_a_chart_leaves_no_trace() -> None:
    model, inputs = subject("convnet", samples=8)
    model.eval()
    before, modules = copy.deepcopy(model.state_dict()), [set(vars(m)) for m in model.modules()]
    state = torch.get_rng_state()
    trace_forward(model, inputs, profile=1)
    assert (
        not any(m.training for m in model.modules())
        and [set(vars(m)) for m in model.modules()] == modules
    )
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_candidates_weigh_each_part() -> None:
    model, inputs = subject("tied")
    parts = split_points(trace_forward(model, inputs, profile=3), [f"blocks.{i}" for i in range(7)])
    assert [p.module for p in parts] == [
        "embedding",
        *(f"blocks.{i}" for i in range(7)),
        "norm",
        "head",
    ]
    assert sum(p.parameters for p in parts) == sum(p.numel() for p in model.parameters())
    assert (
        parts[-1].parameters == 0 and parts[-1].flops == 2 * inputs["input_ids"].numel() * 32 * 67
    )
    assert len({p.flops for p in parts[1:8]}) == 1 and parts[0].flops == 0
    assert all(p.time > 0 for p in parts)


def test_candidates_descend_as_far_as_they_must() -> None:
    model, inputs = subject("convnet")
    assert [a.module for a in split_points(trace_forward(model, inputs))][:3] == [
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
    ]
    model, inputs = subject("bert")
    assert (
        atoms(model, inputs)[:2] == ["bert.embeddings", "bert.encoder.layer.0"]
        and atoms(model, inputs)[-1] == "cls"
    )


# ---- refusals ------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable) -> Tensor:
        return run(x) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Shelf:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Keeper(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.kept = super().forward(x)
        return self.kept + 1


def reads(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.sum() > 1e9:
        h = h * 2
    return m.b(h)


def reads_weight(m: Any, x: Tensor) -> Tensor:
    h = m.a(x * float(m.pos[0]))
    return m.b(h)


def numpy_trip(m: Any, x: Tensor) -> Tensor:
    h = torch.from_numpy(np.tanh(m.a(x).detach().numpy()))
    return m.b(h)


def drops_a_layer(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if torch.rand([]) > 2.0:
        h = m.c(h)
    return m.b(h)


def writes_into_a_constant(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(len(x), 2, 8, dtype=x.dtype)
    table[:, 0] = m.a(x)
    return m.b(table).sum(1)


def writes_into_a_view(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(len(x), 2, 8, dtype=x.dtype)
    table[:, 0].copy_(m.a(x))
    return m.b(table).sum(1)


def adds_into_a_part(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(len(x), 2, 8, dtype=x.dtype)
    part = table[:, 0]
    part += m.a(x)
    table += m.b(x * 2).unsqueeze(1)
    return (table * part.unsqueeze(1)).sum(1)


def writes_into_its_input(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = m.a(x)[:, 1]
    return m.b(x)


def writes_into_a_part_of_memory(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(len(x), 2, 8, dtype=x.dtype)[:1].data
    table[:, 0] = m.a(x).sum(0)
    return m.b(table).sum(1)


def written_before_the_cut(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(len(x), 2, 8, dtype=x.dtype)
    table[:, 0].copy_(m.a(x))
    return m.b(table * 2).sum(1)


def shares_memory(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    left = h[:, :4]
    y = m.b(h.clone())
    h.add_(y)
    return y[:, :4] + left


def reshapes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.unsqueeze_(1)
    return m.b(h)


def unseen(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch._C.DisableTorchFunction():  # as a C++ extension is
        h = h * 2
    return m.b(h)


def own_function(m: Any, x: Tensor) -> Tensor:
    return m.b(Double.apply(m.a(x), lambda h: h + 1))


def inside_a_function(m: Any, x: Tensor) -> Tensor:
    return Double.apply(x, lambda h: m.b(m.a(h)))


def inside_checkpoint(m: Any, x: Tensor) -> Tensor:
    return m.d(checkpoint(lambda h: m.e(h), x, use_reentrant=False))


def side_way(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(m.e, x, use_reentrant=False)) + m.e.kept


def side_way_within_a_stage(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(m.e, x, use_reentrant=False) + m.e.kept)


def returns_an_object(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    return {"out": m.b(h), "shelf": Shelf(h)}


def two_stages_one_buffer(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * (1 + m.count)
    h = m.b(h)
    m.count.add_(h.detach().mean())
    return h


def reassigns_a_buffer(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x) * (1 + m.count))
    m.count = m.count * 0.9 + h.detach().mean()
    return h


def samples(m: Any, x: Tensor, validate_args: bool | None = None) -> Tensor:
    policy = torch.distributions.Normal(m.a(x), m.pos.exp(), validate_args=validate_args)
    return m.b(policy.log_prob(x))


def samples_unchecked(m: Any, x: Tensor) -> Tensor:
    return samples(m, x, validate_args=False)


@torch.no_grad()
def follow(m: Any, change: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
    for ours, theirs in zip(m.b.parameters(), m.a.parameters(), strict=True):
        change(ours, theirs)


def follows(m: Any, x: Tensor) -> Tensor:
    follow(m, lambda ours, theirs: ours.lerp_(theirs, 0.1))
    return m.b(m.a(x))


def follows_by_data(m: Any, x: Tensor) -> Tensor:
    follow(m, lambda ours, theirs: ours.data.mul_(0.9).add_(0.1 * theirs.data))
    return m.b(m.a(x))


def follows_by_new_data(m: Any, x: Tensor) -> Tensor:
    follow(m, lambda ours, theirs: setattr(ours, "data", 0.9 * ours.data + 0.1 * theirs.data))
    return m.b(m.a(x))


@torch.no_grad()
def follows_by_foreach(m: Any, x: Tensor) -> Tensor:
    torch._foreach_lerp_([*m.b.parameters()], [*m.a.parameters()], 0.1)
    return m.b(m.a(x))


def loops(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = m.b(m.a(x))
    return x


def hands_out_an_object(m: Any, x: Tensor) -> Tensor:
    h, shelf = m.e(m.a(x))
    return m.b(h) * len(shelf.tensor)


class Shelving(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return y, Shelf(y)


REFUSED: list[tuple[Callable, list[str], str]] = [
    (skips, ["e"], r"the model has no such module\. Known"),
    (skips, ["b.linera"], r'Did you mean "b.linear"'),
    (skips, ["a.act", "a.linear", "b", "b"], r"'b': it does not run after b"),
    (skips, ["c", "b"], r"'b': it does not run after c, which is named before it"),
    (lambda m, x: m.a(x), ["c"], r"'c': the forward never calls it"),
    (loops, ["b"], r"'b': the forward calls it 3 times, at test_split_model.py:\d+"),
    (
        reads,
        ["b"],
        r"test_split_model.py:\d+ reads `if h.sum\(\) > 1e9:` at .* into Python: `if h.sum\(",
    ),
    (reads_weight, ["a"], r"reads .* into Python: `h = m.a\(x \* float\(m.pos\[0\]\)\)`"),
    (numpy_trip, ["b"], r"into Python: `h = torch.from_numpy\(np.tanh"),
    (drops_a_layer, ["b"], r"into Python: `if torch.rand\(\[\]\) > 2.0:`"),
    (writes_into_a_part_of_memory, ["b"], r"made by code without weights.*changed in place"),
    (
        writes_into_its_input,
        ["b"],
        r"made by code without weights.*changed in place.*`x\[:, 0\] = m.a\(x\)\[:, 1\]`",
    ),
    (
        shares_memory,
        ["b"],
        r"share memory, and test_split_model.py:\d+ changes it in place: `h.add_\(y\)`",
    ),
    (reshapes, ["b"], r"changes a tensor's shape in place: `h.unsqueeze_\(1\)`"),
    (
        unseen,
        ["b"],
        r"was made by something that is no PyTorch function .*, and is used at test_split_model.py",
    ),
    (own_function, ["b"], r"is made inside the autograd function Double"),
    (inside_a_function, ["b"], r"it runs inside Double, called at test_split_model.py"),
    (
        inside_checkpoint,
        ["e.linear"],
        r"it runs inside torch.utils.checkpoint, called at test_split_model.py",
    ),
    (side_way, ["b"], r"leaves e \(called at .*\) otherwise than by its return value"),
    (side_way_within_a_stage, ["b"], r"leaves e \(called at .*\) otherwise than by its return"),
    (
        hands_out_an_object,
        ["b"],
        r"e \(called at .*:\d+\) returns an object of class Shelf, which weft",
    ),
    (returns_an_object, ["b"], r"returns output 0 of a of an earlier stage inside a Shelf"),
    (
        two_stages_one_buffer,
        ["b"],
        r"the buffer count is changed by the forward, and stages 0 and 1 use it",
    ),
    (
        reassigns_a_buffer,
        ["b"],
        r"the buffer count is changed by the forward, and stages 0 and 1 use it",
    ),
    *(
        (
            forward,
            ["b"],
            r"the weight b.linear.weight is changed by the forward, and stages 0 and 1 use",
        )
        for forward in (follows, follows_by_data, follows_by_new_data, follows_by_foreach)
    ),
]


@pytest.mark.parametrize(
    ("forward", "points", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None)
)
def test_what_cannot_be_cut_is_named(forward: Callable, points: list[str], message: str) -> None:
    more = (
        {}
        if forward is skips
        else {"e": Shelving() if forward is hands_out_an_object else Keeper()}
    )
    model = Written(forward, **more)
    with pytest.raises(UnsupportedModel, match=message) as refused:
        split_stages(trace_forward(model, {"x": torch.randn(3, 8)}), points)
    assert refused.value.field == "pipeline.cut"


def test_a_distribution_that_checks_nothing_is_cut() -> None:
    inputs = {"x": torch.randn(3, 8)}
    hold(Written(samples_unchecked), ["b"], inputs, {"x": torch.randn(4, 8)})


def kept(m: Any, x: Tensor) -> Tensor:
    return m.b(m.e(x)) + m.e.kept


def kept_within_a_stage(m: Any, x: Tensor) -> Tensor:
    return m.b(m.e(x) + m.e.kept)


def kept_twice(m: Any, x: Tensor) -> Tensor:
    first = m.e(m.a(x))
    total = m.e.kept
    return m.b(m.e(first)) + total + m.e.kept


def returned_alone(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.b(m.e(x)), m.e.kept


@pytest.mark.parametrize(
    "forward", [kept, kept_within_a_stage, kept_twice, returned_alone], ids=lambda f: f.__name__
)
def test_what_a_module_keeps_is_read_in_any_stage(forward: Callable) -> None:
    hold(Written(forward, e=Keeper()), ["b"], {"x": torch.randn(3, 8)})


def test_the_same_forwards_can_be_cut_elsewhere() -> None:
    x = {"x": torch.randn(3, 8)}
    hold(Written(writes_into_a_constant), ["b.linear"], x)
    hold(Written(writes_into_a_constant), ["b"], x)
    hold(Written(writes_into_a_view), ["b"], x)
    hold(Written(adds_into_a_part), ["b"], x)
    hold(Written(written_before_the_cut), ["b"], x)
    hold(Written(own_function), ["b.linear"], x)


def test_a_chart_without_data_asks_for_it_where_it_must() -> None:
    with pytest.raises(
        UnsupportedModel,
        match=r"reads elements of a tensor into Python at test_split_model.py:\d+: `if h.sum\(\)",
    ):
        trace_forward(Written(reads).to("meta"), {"x": torch.randn(3, 8)})


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:  # of the inputs, which every stage has
            h = self.c(h)
        elif x.shape[0] > 4:
            h = h * 3
        return self.d(self.b(h))


def test_another_path_than_the_planned_one_is_refused() -> None:
    model = Fickle()
    positive, negative = {"x": torch.ones(3, 8)}, {"x": -torch.ones(3, 8)}
    line = Line(model, split_stages(trace_forward(model, positive), ["b"]))
    line.forward(positive)
    with pytest.raises(
        UnsupportedModel,
        match=r"b at test_split_model.py:\d+'.*another path than .*: the plan has c at",
    ):
        line.forward(negative)
    line = Line(model, split_stages(trace_forward(model, negative), ["b", "d"]))
    line.forward(negative)
    with pytest.raises(UnsupportedModel, match=r"mul at test_split_model.py:\d+'.*plan has b at"):
        line.runners[2](2, {"x": -torch.ones(5, 8)}, {1: torch.ones(5, 8)})
    line.forward(negative)  # a refused call leaves nothing behind


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "tied", "bert", "plain"])
def test_no_mode_stands_around_forwards_of_blocks(name: str) -> None:
    model, inputs = subject(name)
    points = [point for point in atoms(model, inputs)[1:] if point[-1].isdigit()]
    line = Line(model, split_stages(trace_forward(model, inputs), points))
    seen = [runner.programs[stage].sees_functions for stage, runner in line.runners.items()]
    assert len(seen) > 6 and any(seen) == (name == "plain")


def test_functions_of_what_was_received_may_be_others_than_planned() -> None:
    model, inputs = Fickle(), {"x": -torch.ones(3, 8)}
    line = Line(model, split_stages(trace_forward(model, inputs), ["b"]))
    longer = {"x": -torch.ones(5, 8)}  # multiplied before b, by the stage that has b
    assert torch.equal(line.forward(longer)[0], model(**longer))


def test_an_index_of_an_earlier_stage() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        table = torch.eye(8, dtype=x.dtype)  # which every stage makes
        return m.c(m.b(table[m.a(x).argmax(1)]))

    hold(Written(forward), ["c"], {"x": torch.randn(4, 8)})


@pytest.mark.parametrize("own", [False, True])
def test_what_was_received_is_not_changed_twice(own: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if x.shape[0] > 4:
            h.mul_(3)  # by the stage that sends it, and by the one that receives it
        z = m.b(h)
        if own:
            z += 1
        return m.c(z)

    model, inputs = Written(forward), {"x": torch.ones(3, 8)}
    line = Line(model, split_stages(trace_forward(model, inputs), ["b"]))
    with torch.no_grad():
        assert torch.equal(line.forward(inputs)[0], model(**inputs))
        with pytest.raises(UnsupportedModel, match="a tensor changed in place before test_split"):
            line.forward({"x": torch.ones(5, 8)})


def test_a_received_tensor_that_its_stage_changes_at_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        m.b(h)
        g = m.pos + h
        g += 1
        return m.c(g) + h

    hold(Written(forward), ["b"], {"x": torch.randn(4, 8)})
    hold(Written(forward), ["c"], {"x": torch.randn(4, 8)})


def test_an_absent_tensor_on_another_path_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        k = m.b(h)
        y = h if x.shape[0] > 4 else k  # the plan sends k
        y = m.c(k) * y
        return m.d(y * 2)

    model = Written(forward)
    line = Line(model, split_stages(trace_forward(model, {"x": torch.ones(3, 8)}), ["c", "d"]))
    line.forward({"x": torch.ones(3, 8)})
    with pytest.raises(UnsupportedModel, match="made on another stage"):
        line.forward({"x": torch.ones(5, 8)})


def test_a_path_that_ends_early_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.b(m.a(x))
        return m.c(h) if x.sum() > 0 else h

    model, inputs = Written(forward), {"x": torch.ones(3, 8)}
    line = Line(model, split_stages(trace_forward(model, inputs), ["b"]))
    line.forward(inputs)
    with pytest.raises(
        UnsupportedModel,
        match=r"'its end': the forward took another path .* the plan has c at test_split_model.py",
    ):
        line.forward({"x": -inputs["x"]})


class Several(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return (y, y * 2) if len(x) < 4 else (y, y * 2, y * 3)


def test_another_number_of_values_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        first, second, *_ = m.e(x)
        return m.b(first) * second

    model, inputs = Written(forward, e=Several()), {"x": torch.ones(3, 8)}
    line = Line(model, split_stages(trace_forward(model, inputs), ["b"]))
    line.forward(inputs)
    with pytest.raises(
        UnsupportedModel, match=r"e at test_split_model.py:\d+ with 3 tensors, not 2"
    ):
        line.forward({"x": torch.ones(5, 8)})


def test_what_torch_does_not_run_without_a_tensor_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.a(x)
        return torch.vmap(torch.mul)(m.b(x), rows)  # which no mode sees

    line = Line(
        Written(forward),
        split_stages(trace_forward(Written(forward), {"x": torch.ones(3, 8)}), ["b"]),
    )
    says = r"and `return torch.vmap.*` at test_split_model.py:\d+ does not run without it"
    with pytest.raises(UnsupportedModel, match=says):
        line.forward({"x": torch.ones(3, 8)})


def test_an_error_of_the_model_is_its_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.b(m.a(x))
        if len(h) > 3:
            raise ValueError("too many")
        return h

    model = Written(forward)
    line = Line(model, split_stages(trace_forward(model, {"x": torch.randn(3, 8)}), ["b"]))
    with pytest.raises(ValueError, match="too many"):
        line.forward({"x": torch.randn(4, 8)})
    line.forward({"x": torch.randn(3, 8)})
