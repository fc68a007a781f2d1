"""B and W leave what one backward leaves, and each does its own half of the work."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from weft.engine.pipeline.split_backward import backward_inputs


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64) / 2)


class _Scale(torch.autograd.Function):
    """x * w + 0 for a vector w; its backward is written by hand, with two outputs of which one may
    be unused."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, g, h):  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w + h, (g * x + h).sum(0)


class _Affine(torch.autograd.Function):
    """x * factor * w + v, of arguments that need no gradient among those that do."""

    @staticmethod
    def forward(ctx, factor, x, still, w, v):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * factor * w + v + still

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        x, w = ctx.saved_tensors
        return None, g * w * ctx.factor, None, (g * x * ctx.factor).sum(0), g.sum(0)


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Case(nn.Module):
    """Ways in which a stage can use its weights. `a`, `b` [5, 6] may need gradients, `ids` [5]
    cannot."""

    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.w, self.v, self.bias, self.unused = (
            _weight(6, 6),
            _weight(6, 6),
            _weight(6),
            _weight(6),
        )
        self.table, self.single = _weight(7, 6), nn.Parameter(torch.randn(6))
        self.blocks = nn.ModuleList(_Block(6) for _ in range(3)).double()
        self.conv, self.batch = nn.Conv1d(1, 3, 3, padding=1).double(), nn.BatchNorm1d(3).double()
        self.frozen = _weight(6, 6).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return getattr(self, "_" + self.name)(a, b, ids)

    def _linear(self, a, b, ids):
        return F.linear(F.linear(a, self.w, self.bias).relu(), self.v), b

    def _blocks(self, a, b, ids):
        for block in self.blocks:
            a = block(a)
        return (a * b,)

    def _consecutive(self, a, b, ids):
        return (((a @ self.w).tanh() @ self.w @ self.w) * b,)

    def _consecutive_linear(self, a, b, ids):
        return (F.linear(F.linear(a, self.w, self.bias).tanh(), self.w, self.bias) + b,)

    def _looped(self, a, b, ids):
        for _ in range(3):
            a = self.blocks[0](a)
        return (a,)

    def _transposed(self, a, b, ids):
        return (F.linear((a @ self.w).tanh(), self.w).tanh() @ self.v,)

    def _two_ways(self, a, b, ids):
        return (a @ self.w).sin(), (b @ self.w).cos(), a * b

    def _tied(self, a, b, ids):
        x = F.embedding(ids, self.table) + a
        return (F.linear(self.blocks[0](x), self.table),)

    def _prepared(self, a, b, ids):
        w = self.w * self.w.sigmoid() / self.w.norm()
        return ((a @ w).tanh() @ w.t() @ self.v,)

    def _pass(self, a, b, ids):
        return a, b, a @ self.w, self.bias, self.bias * 2

    def _weights_alone(self, a, b, ids):
        return (self.w @ self.v).tanh(), a + 1

    def _conv(self, a, b, ids):
        return (self.batch(self.conv(a[:, None])).relu() + b[:, None],)

    def _custom(self, a, b, ids):
        x, y = _Scale.apply(a, self.bias)
        z, _ = _Scale.apply(x * y, self.bias)
        return (z + b,)

    def _arguments(self, a, b, ids):
        x = _Affine.apply(3.0, a, ids[:, None].double(), self.bias, self.single.double())
        return (_Affine.apply(2.0, x, b.detach(), self.bias, self.unused.detach()) + b,)

    def _broadcast(self, a, b, ids):
        return ((a + self.bias) * self.bias + self.single, b * self.w[0, 0])

    def _in_place(self, a, b, ids):
        x = a @ self.w
        x[0] = self.bias * 2
        x[1:3] += self.v[:2]
        return x.mul_(self.bias), b

    def _checkpointed(self, a, b, ids):
        for block in self.blocks:
            a = checkpoint(block, a, use_reentrant=False)
        return (a + b,)

    def _checkpointed_tied(self, a, b, ids):
        for _ in range(2):
            a = checkpoint(self.blocks[0], a, use_reentrant=False)
        return (F.linear(a, self.w),)

    def _checkpointed_prepared(self, a, b, ids):
        return (
            checkpoint(
                lambda x: self.blocks[0](x) @ (self.w * self.w.sigmoid()), a, use_reentrant=False
            ),
        )

    def _frozen(self, a, b, ids):
        return ((a @ self.frozen).relu() @ self.w,)

    def _split(self, a, b, ids):
        x, y = F.linear(a, torch.cat([self.w, self.v])).chunk(2, -1)
        return x.tanh(), (y * b).sum()

    def _hooked(self, a, b, ids):
        x = F.embedding(ids, self.table)
        x.register_hook(lambda grad: grad * 3)
        y = F.linear(x + a, self.w)
        y.register_hook(lambda grad: grad * 2)
        z = F.linear(y.tanh(), self.w, self.bias) @ self.bias.diag()
        z.register_hook(lambda grad: grad * 5)
        return (z,)


CASES = [
    name[1:]
    for name, value in vars(_Case).items()
    if name.startswith("_") and not name.startswith("__")
]


def _graph(case: _Case, needing: str) -> tuple[list[Tensor], tuple[Tensor, ...], list[Tensor]]:
    """(inputs, roots, their gradients), equal in every call."""
    torch.manual_seed(1)
    a, b = (torch.randn(5, 6, dtype=torch.float64, requires_grad=n in needing) for n in "ab")
    ids = torch.tensor([1, 3, 3, 0, 6])
    outputs = case(a, b, ids)
    return [a, b, ids], outputs, [torch.randn_like(o) for o in outputs]


@pytest.mark.parametrize("needing", ["ab", "a", ""])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_backward(name: str, needing: str) -> None:
    case, plain = _Case(name), _Case(name)
    for times in range(2):  # the second in place, into the same tensors
        inputs, roots, grads = _graph(plain, needing)
        wanted = [(r, g) for r, g in zip(roots, grads) if r.requires_grad]
        torch.autograd.backward([r for r, _ in wanted], [g for _, g in wanted])
        before = {n: p.grad for n, p in case.named_parameters()}
        mine, roots, grads = _graph(case, needing)
        found, deferred = backward_inputs(roots, grads, mine)
        for n, p in case.named_parameters():
            assert p.grad is before[n]  # B leaves weights alone
        deferred.run()
        deferred.run()  # nothing is left to do
        for x, grad in zip(inputs, found, strict=True):
            assert (grad is None) == (x.grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, x.grad, rtol=0, atol=1e-12)
        for (n, p), (_, q) in zip(case.named_parameters(), plain.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12, msg=n)
                assert times == 0 or p.grad is before[n]
    assert all(x.grad is None for x in mine)


def _random(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(weights, inputs, roots) of a random stage: weights are shared, prepared, returned,
    checkpointed, unused."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weights: list[Tensor] = [_weight(4, 4) for _ in range(3)]
    inputs = [
        torch.randn(4, 4, dtype=torch.float64, requires_grad=draw.random() < 0.6) for _ in range(3)
    ]
    ways = [w * v for w, v in [draw.sample(weights, 2)]] + [draw.choice(weights).t(), *weights]
    made = list(inputs)
    for _ in range(draw.randint(3, 12)):
        x, y = draw.choice(made[-4:]), draw.choice(made)
        w, v = draw.choice(ways), draw.choice(ways)
        makers = (
            lambda x, y, w, v: x @ w,
            lambda x, y, w, v: x + y,
            lambda x, y, w, v: x * y.sin(),
            lambda x, y, w, v: F.linear(x, w, v[0]).tanh(),
            lambda x, y, w, v: F.layer_norm(x, (4,), w[0], v[1]),
            lambda x, y, w, v: w @ v,
            lambda x, y, w, v: _Affine.apply(0.5, x, y.detach(), w[0], v[1]),
            lambda x, y, w, v: _Scale.apply(x, w[0])[draw.randint(0, 1)],
            lambda x, y, w, v: (x + y).mul_(w[2]),
            lambda x, y, w, v: checkpoint(
                lambda x, w: (x @ w).sin() @ w, x, w, use_reentrant=False
            ),
        )
        made.append(draw.choice(makers)(x, y, w, v))
    return (
        weights,
        inputs,
        draw.sample(made, draw.randint(1, 4)) + draw.sample(ways, draw.randint(0, 1)),
    )


@pytest.mark.parametrize("seeds", [range(100 * i, 100 * (i + 1)) for i in range(4)])
def test_random_stages(seeds: Sequence[int]) -> None:
    for seed in seeds:
        weights, inputs, roots = _random(seed)
        grads = [torch.randn_like(root) for root in roots]
        wanted = [
            (root, grad) for root, grad in zip(roots, grads, strict=True) if root.requires_grad
        ]
        if wanted:
            torch.autograd.backward([root for root, _ in wanted], [grad for _, grad in wanted])
        mine, given, roots = _random(seed)
        found, deferred = backward_inputs(roots, grads, given)
        deferred.run()
        for a, b in zip(
            [*(w.grad for w in mine), *found], [x.grad for x in (*weights, *inputs)], strict=True
        ):
            assert (a is None) == (b is None), seed
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=str(seed))


class _Ops(TorchDispatchMode):
    """How often each operation that computes runs; of a norm's backward, which gradients it
    makes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        name = func.overloadpacket.__name__
        if name.endswith("backward") or name in ("mm", "embedding_dense_backward"):
            self.counts[
                name
                + "".join(
                    str(int(wanted))
                    for x in args
                    if isinstance(x, list)
                    for wanted in x
                    if isinstance(wanted, bool)
                )
            ] += 1
        return func(*args, **(kwargs or {}))


def test_each_part_does_its_own_half() -> None:
    case = _Case("blocks")
    inputs, roots, grads = _graph(case, "ab")
    with _Ops() as ops:
        _, deferred = backward_inputs(roots, grads, inputs)
    assert ops.counts == {"mm": 6, "gelu_backward": 3, "native_layer_norm_backward100": 3}
    with _Ops() as ops:
        deferred.run()
    assert ops.counts == {"mm": 6, "native_layer_norm_backward011": 3}


def test_a_first_stage_leaves_the_whole_backward_to_w() -> None:
    case = _Case("tied")
    inputs, roots, grads = _graph(case, "")
    with _Ops() as ops:
        _, deferred = backward_inputs(roots, grads, inputs)
    assert not ops.counts
    with _Ops() as ops:
        deferred.run()
    assert ops.counts == {
        "mm": 6,
        "gelu_backward": 1,
        "native_layer_norm_backward111": 1,
        "embedding_dense_backward": 1,
    }


def test_hooks_on_the_path_run_once() -> None:
    case = _Case("linear")
    a = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    called: list[str] = []
    x = F.linear(a, case.w, case.bias)
    x.register_hook(lambda grad: called.append("linear") or grad * 2)
    x.grad_fn.register_prehook(lambda grads: called.append("node"))  # type: ignore[union-attr]
    _, deferred = backward_inputs([x.relu()], [torch.ones_like(x)], [a])
    deferred.run()
    assert called == ["linear", "node"]
    torch.testing.assert_close(case.bias.grad, 2.0 * (x > 0).sum(0).double())


@pytest.mark.parametrize(
    ("name", "regions"),
    [("checkpointed", 3), ("checkpointed_tied", 2), ("checkpointed_prepared", 1)],
)
def test_checkpointed_regions_are_recomputed_once_in_each_part(name: str, regions: int) -> None:
    case = _Case(name)
    inputs, roots, grads = _graph(case, "ab")
    ran: list[nn.Module] = []
    for block in case.blocks:
        block.register_forward_pre_hook(lambda module, _: ran.append(module))
    _, deferred = backward_inputs(roots, grads, inputs)
    assert len(ran) == regions
    deferred.run()
    assert len(ran) == 2 * regions


@pytest.mark.parametrize(
    "name", ["blocks", "consecutive", "conv", "custom", "prepared", "tied", "checkpointed"]
)
def test_what_is_saved_is_freed(name: str) -> None:
    case = _Case(name)
    saved: list[weakref.ref] = []

    def pack(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        saved.append(weakref.ref(copy))
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inputs, roots, grads = _graph(case, "a")
    _, deferred = backward_inputs(roots, grads, inputs)
    del roots, grads
    assert any(ref() is not None for ref in saved)
    deferred.run()
    assert not any(ref() is not None for ref in saved)


def test_hooks_on_weights_run_once_and_see_the_whole_gradient() -> None:
    case, plain = _Case("consecutive_linear"), _Case("consecutive_linear")
    called: list[str] = []
    for n, p in (("w", case.w), ("bias", case.bias)):
        p.register_post_accumulate_grad_hook(lambda _, n=n: called.append(n))
        p.register_hook(lambda grad: grad * 2)
    inputs, roots, grads = _graph(case, "a")
    _, deferred = backward_inputs(roots, grads, inputs)
    assert not called
    deferred.run()
    assert sorted(called) == ["bias", "w"]
    _, roots, grads = _graph(plain, "a")
    torch.autograd.backward(roots, grads)
    torch.testing.assert_close(case.w.grad, plain.w.grad * 2)


def test_gradients_are_added_in_place() -> None:
    """`.grad` may be a view of a bucket."""
    case = _Case("linear")
    bucket = torch.ones(36, dtype=torch.float64)
    case.w.grad = bucket.view(6, 6)
    inputs, roots, grads = _graph(case, "a")
    backward_inputs(roots, grads, inputs)[1].run()
    assert case.w.grad.data_ptr() == bucket.data_ptr()
    assert not torch.equal(bucket, torch.ones(36, dtype=torch.float64))


def test_a_scalar_root_starts_from_one() -> None:
    case = _Case("linear")
    inputs, roots, _ = _graph(case, "a")
    (grad, _, _), deferred = backward_inputs([roots[0].sum()], [None], inputs)
    deferred.run()
    (wanted,) = torch.autograd.grad(_graph(case, "a")[1][0].sum(), case.w)
    torch.testing.assert_close(case.w.grad, wanted)
    assert grad is not None


def test_nothing_needs_a_gradient() -> None:
    x = torch.ones(3)
    found, deferred = backward_inputs([x * 2], [torch.ones(3)], [x])
    deferred.run()
    assert found == [None]
