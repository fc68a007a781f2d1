"""Laws of every codec: what is sent and what is kept add up to what came, errors stay in their
bounds, and messages have the size that is predicted. The ranks are run side by side in one process:
a codec only says what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.core.codec import (
    AllGatherRequest,
    AllReduceRequest,
    Codec,
    CodecState,
    CommRequest,
    MessageCodec,
    ReplicaView,
)
from weft.core.errors import ConfigError
from weft.sync import codecs as codec

SHAPES = [(64, 48), (7,), (130, 33), (5, 4, 3), (300,)]
NUMEL = sum(map(prod, SHAPES))
CODECS = {
    "identity": codec.make_codec("identity"),
    "bf16": codec.make_codec("bf16"),
    "bf16 feedback": codec.make_codec("bf16", feedback=True),
    "fp16": codec.make_codec("fp16"),
    "int8": codec.make_codec("int8"),
    "int8 stochastic": codec.make_codec("int8", stochastic=True, block=32),
    "int4": codec.make_codec("int4"),
    "int4 stochastic": codec.make_codec("int4", stochastic=True),
    "sign": codec.make_codec("sign", block=64),
    "topk": codec.make_codec("topk", density=0.05),
    "dgc": codec.make_codec("dgc", density=0.02),
    "powersgd": codec.make_codec("powersgd", rank=2),
}
WITH_FEEDBACK = [
    name for name, c in CODECS.items() if getattr(c, "feedback", False) or name == "dgc"
]
MESSAGES = [name for name, c in CODECS.items() if isinstance(c, MessageCodec)]


def together(
    each: Codec, xs: Sequence[Tensor], states: Sequence[CodecState], sharded: bool = False
) -> list[list[CommRequest]]:
    """All ranks' `reduce` in lockstep; the sums are left in xs. Returns what every rank asked
    for."""
    size = len(xs)
    everyone = enumerate(zip(xs, states, strict=True))
    return lockstep(
        [each.reduce(x, s, SHAPES, ReplicaView(size, i, sharded, 1.0)) for i, (x, s) in everyone]
    )


def lockstep(runs: Sequence[Any]) -> list[list[CommRequest]]:
    asked: list[list[CommRequest]] = [[] for _ in runs]
    answers: list[Tensor | None] = [None] * len(runs)
    while True:
        asks = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                asks.append(run.send(answer))
            except StopIteration:
                assert not asks, "ranks ask for different numbers of things"
        if not asks:
            return asked
        for mine, ask in zip(asked, asks, strict=True):
            mine.append(ask)
        answers = answer_all(asks)


def answer_all(asks: Sequence[CommRequest]) -> list[Tensor]:
    first = asks[0]
    if isinstance(first, AllReduceRequest):
        total = torch.stack([a.tensor for a in asks]).sum(0)
        return [a.tensor.copy_(total) for a in asks]
    if isinstance(first, AllGatherRequest):
        return [torch.stack([a.message for a in asks]) for _ in asks]
    rows = [torch.stack([a.messages[i] for a in asks]) for i in range(len(asks))]
    return [r.sum(0) for r in rows] if first.sums else rows


def start(each: Codec, ranks: int, dtype: torch.dtype = torch.float64) -> list[CodecState]:
    return [each.state(SHAPES, torch.zeros(NUMEL, dtype=dtype)) for _ in range(ranks)]


def kept(state: CodecState) -> Tensor:
    return state.get("residual", torch.zeros(()))


def draws(seed: int, ranks: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator, dtype=dtype) for _ in range(ranks)]


INPUTS = {
    "random": lambda x: x,
    "sparse": lambda x: x * (x.abs() > 2.5),
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-38,
    "zero": lambda x: x * 0,
    "one": lambda x: x * (torch.arange(x.numel()) == 77),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_get_the_same_bits(name: str, ranks: int, sharded: bool) -> None:
    each, states = CODECS[name], start(CODECS[name], ranks)
    for step in range(3):
        xs = draws(step, ranks)
        together(each, xs, states, sharded)
        assert all(torch.equal(x, xs[0]) for x in xs)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [n for n in WITH_FEEDBACK if n != "dgc"])
def test_what_was_sent_and_what_is_kept_is_what_came(name: str, ranks: int, sharded: bool) -> None:
    each, states = CODECS[name], start(CODECS[name], ranks)
    came, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(5):
        xs = draws(step, ranks)
        came += sum(xs)
        together(each, xs, states, sharded)
        sent += xs[0]
        if name != "bf16 feedback":  # there the sum itself is rounded
            torch.testing.assert_close(sent + sum(map(kept, states)), came, rtol=0, atol=1e-9)
        elif ranks == 1:
            torch.testing.assert_close(sent + kept(states[0]), came, rtol=0, atol=1e-9)
    assert float(sum(s["residual"].abs().sum() for s in states)) > 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CODECS)
def test_messages_have_the_predicted_size(name: str, ranks: int, sharded: bool) -> None:
    each = CODECS[name]
    for dtype in (torch.float64, torch.float32):
        xs, states = draws(0, ranks, dtype), start(each, ranks, dtype)
        for step in range(2):
            asked = together(each, xs, states, sharded)
            for index, mine in enumerate(asked):
                want = each.asks(SHAPES, ReplicaView(ranks, index, sharded), dtype.itemsize, step)
                assert [size_of(a) for a in mine] == [(asked.kind, asked.nbytes) for asked in want]


def size_of(ask: CommRequest) -> tuple[str, int]:
    if isinstance(ask, AllReduceRequest):
        return "sum", ask.tensor.nbytes
    if isinstance(ask, AllGatherRequest):
        return "gather", ask.message.nbytes
    return "sum_scatter" if ask.sums else "scatter", ask.messages[0].nbytes


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", CODECS)
def test_the_stated_bound_holds(name: str, kind: str) -> None:
    """One rank: what is got is what its own message says."""
    each = CODECS[name]
    x = INPUTS[kind](draws(3, 1, torch.float32)[0])
    got = x.clone()
    together(each, [got], start(each, 1, torch.float32))
    error = (got.double() - x.double()).abs()
    size = x.double().abs()
    if name == "identity":
        assert torch.equal(got, x)
    elif name.startswith("bf16"):
        assert bool((error <= size * 2**-8 + 1e-40).all())
    elif name == "fp16":
        assert bool(((error <= size * 2**-11 + 2**-24) | ~got.isfinite()).all())
        assert bool((got.isfinite() | (size > 65000)).all())
    elif name.startswith(("int8", "int4")):
        rows = torch.nn.functional.pad(size, (0, -NUMEL % each.block)).view(-1, each.block)
        step = rows.amax(1, keepdim=True).expand_as(rows).reshape(-1)[:NUMEL] / (
            127 if "int8" in name else 7
        )
        assert bool(
            (error <= step * (1 if "stochastic" in name else 0.5) * (1 + 1e-5) + 1e-42).all()
        )
    elif name == "sign":
        for a, e in zip(x.double().split(each.block), error.split(each.block), strict=True):
            want = float((a**2).sum() - a.abs().sum() ** 2 / a.numel())
            assert float((e**2).sum()) <= want * (1 + 1e-4) + 1e-80
    elif name == "topk":
        assert float((error**2).sum()) <= (1 - 0.05) * float((size**2).sum())
        assert int((got != 0).sum()) <= round(0.05 * NUMEL)
    elif name == "powersgd":
        assert float(error.norm()) <= float(size.norm()) * (1 + 1e-5)
    if kind == "zero":
        assert not bool(got.any())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_never_lost(name: str, bad: float) -> None:
    each = CODECS[name]
    xs = draws(5, 2, torch.float32)
    xs[1][64 * 48 + 2 + 7] = bad
    together(each, xs, start(each, 2, torch.float32))
    assert not all(bool(x.isfinite().all()) for x in xs)
    assert all(not bool(x.isfinite().all()) for x in xs)


@pytest.mark.parametrize("name", MESSAGES)
def test_feedback_lets_a_constant_gradient_through(name: str) -> None:
    """The mean of what is sent tends to the gradient, whatever one message leaves out."""
    each, (x,) = CODECS[name], draws(9, 1)
    states, sent, steps = start(each, 1), torch.zeros(NUMEL, dtype=torch.float64), 200
    for _ in range(steps):
        got = x.clone()
        together(each, [got], states)
        sent += got
    assert float((sent / steps - x).norm() / x.norm()) < 0.2


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    each, (x,) = codec.make_codec("int4", stochastic=True, feedback=False), draws(9, 1)
    torch.manual_seed(0)
    mean = torch.stack([each.decode(each.encode(x), NUMEL, x.dtype) for _ in range(2000)]).mean(0)
    nearest = codec.make_codec("int4")
    assert float((mean - x).norm()) < 0.1 * float(
        (nearest.decode(nearest.encode(x), NUMEL, x.dtype) - x).norm()
    )


@pytest.mark.parametrize("n", [1, 8, 2**17, 2**18 + 3])
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.3, 1.0])
def test_topk_sends_the_largest(n: int, density: float) -> None:
    generator = torch.Generator().manual_seed(n)
    each, x = codec.make_codec("topk", density=density), torch.randn(n, generator=generator)
    got = each.decode(each.encode(x), n, x.dtype)
    count = max(1, round(density * n))
    assert int((got != 0).sum()) == count
    assert float(got.abs().sum()) == pytest.approx(
        float(x.abs().topk(count).values.sum()), rel=1e-5
    )


def test_topk_of_what_is_mostly_zero_or_equal() -> None:
    each = codec.make_codec("topk", density=0.01)
    for x in (torch.zeros(2**18), torch.ones(2**18), torch.arange(2**18) % 2.0):
        got = each.decode(each.encode(x), x.numel(), x.dtype)
        assert float(got.sum()) == min(float(x.sum()), round(0.01 * x.numel()))


def test_dgc_is_its_paper() -> None:
    """Lin et al. 2018, algorithm 4: two workers, four steps, SGD at rate 1."""
    each, ranks, momentum, clip = (
        codec.make_codec("dgc", density=0.02, momentum=0.9, clip=30.0),
        2,
        0.9,
        30.0,
    )
    states = start(each, ranks)
    u = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(ranks)]
    v = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(ranks)]
    for step in range(4):
        gradients = draws(step, ranks)
        want = torch.zeros(NUMEL, dtype=torch.float64)
        for k in range(ranks):
            g = gradients[k] * min(1.0, clip * ranks**-0.5 / float(gradients[k].norm()))
            u[k] = momentum * u[k] + g
            v[k] = v[k] + u[k]
            threshold = v[k].abs().sort(descending=True).values[round(0.02 * NUMEL) - 1]
            mask = v[k].abs() >= threshold
            want += v[k] * mask
            v[k], u[k] = v[k] * ~mask, u[k] * ~mask
        together(each, gradients, states)
        torch.testing.assert_close(
            gradients[0], want, rtol=1e-5, atol=1e-6
        )  # values travel as float32
        for k in range(ranks):
            torch.testing.assert_close(states[k]["residual"], v[k], rtol=0, atol=1e-5)
            torch.testing.assert_close(states[k]["momentum"], u[k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_of_nothing_has_no_bytes(name: str) -> None:
    assert CODECS[name].nbytes(0) == 0


def test_dgc_warms_up() -> None:
    each = codec.make_codec("dgc", density=0.001, warmup=4)
    assert [each.count(10**6, step) for step in range(6)] == [
        250000,
        62872,
        15811,
        3976,
        1000,
        1000,
    ]


def test_powersgd_is_its_paper() -> None:
    """Vogels et al. 2019, algorithms 1 and 2, for one matrix and two workers."""
    each, ranks = codec.make_codec("powersgd", rank=2), 2
    states = start(each, ranks)
    q = states[0]["right"][: 48 * 2].view(48, 2).clone()
    errors = [torch.zeros(64, 48, dtype=torch.float64) for _ in range(ranks)]
    for step in range(3):
        gradients = draws(step, ranks)
        ms = [g[: 64 * 48].view(64, 48) + e for g, e in zip(gradients, errors, strict=True)]
        p, _ = torch.linalg.qr(sum(m @ q for m in ms))
        errors = [m - p @ (m.T @ p).T for m in ms]
        q = sum(m.T @ p for m in ms)
        together(each, gradients, states)
        torch.testing.assert_close(gradients[0][: 64 * 48].view(64, 48), p @ q.T)
        torch.testing.assert_close(states[1]["residual"][: 64 * 48].view(64, 48), errors[1])


def test_powersgd_begins_every_bucket_with_other_factors() -> None:
    like, each = torch.zeros(NUMEL, dtype=torch.float64), CODECS["powersgd"]
    one, same, other = (each.state(SHAPES, like, name)["right"] for name in ("a", "a", "b"))
    assert torch.equal(one, same)
    assert not bool((one == other).any())


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.scatters])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_reduce_scatter_gives_each_its_part(name: str, ranks: int) -> None:
    each, n = CODECS[name], 300
    generator = torch.Generator().manual_seed(0)
    like = torch.zeros(ranks * n, dtype=torch.float64)
    states = [each.state([(ranks * n,)], like) for _ in range(ranks)]
    came, sent = torch.zeros_like(like), torch.zeros_like(like)
    for _ in range(4):
        xs = [
            torch.randn(ranks * n, generator=generator, dtype=torch.float64) for _ in range(ranks)
        ]
        came += sum(xs)
        outs = [torch.empty(n, dtype=torch.float64) for _ in range(ranks)]
        lockstep(
            [
                each.scatter(x, o, s, ReplicaView(ranks, i))
                for i, (x, o, s) in enumerate(zip(xs, outs, states, strict=True))
            ]
        )
        sent += torch.cat(outs)
    if name in WITH_FEEDBACK and name != "bf16 feedback":
        torch.testing.assert_close(sent + sum(map(kept, states)), came, rtol=0, atol=1e-9)
    error = float((sent - came).norm() / came.norm())
    assert error < {"identity": 1e-12, "sign": 2.0, "int4": 0.2, "int4 stochastic": 0.4}.get(
        name, 0.02
    )


def test_bad_options_are_refused() -> None:
    for name, options, field in [
        ("int5", {}, "sync.codec"),
        ("int8", {"bits": 4}, "sync.codec.bits"),
        ("int4", {"block": 33}, "sync.codec.block"),
        ("topk", {"density": 0.0}, "sync.codec.density"),
        ("topk", {"density": True}, "sync.codec.density"),
        ("dgc", {"momentum": 1.0}, "sync.codec.momentum"),
        ("powersgd", {"rank": 0}, "sync.codec.rank"),
        ("sign", {"feedback": 1}, "sync.codec.feedback"),
    ]:
        with pytest.raises(ConfigError) as caught:
            codec.make_codec(name, **options)
        assert caught.value.field == field


def test_compression() -> None:
    """Bytes of a message of a million elements, of 4 MB."""
    million, shapes = 2**20, [(1024, 1024)]
    ratios = {
        name: (
            4
            * million
            / sum(asked.nbytes for asked in codec.make_codec(name).asks(shapes, ReplicaView(2), 4))
        )
        for name in ("bf16", "int8", "int4", "sign", "topk", "dgc", "powersgd")
    }
    assert {k: round(v) for k, v in ratios.items()} == {
        "bf16": 2,
        "int8": 4,
        "int4": 8,
        "sign": 31,
        "topk": 50,
        "dgc": 500,
        "powersgd": 128,
    }
