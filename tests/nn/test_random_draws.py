"""What a forward draws by torch's functions is the same whole and in parts, and distributed as
torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import UnsupportedModel
from weft.engine.draw_watch import DrawWatch, undrawable
from weft.engine.function_overrides import FunctionOverrides
from weft.nn import DRAWS, Randomness

N, WEIGHTS = 20000, torch.tensor([0.2, 0.5, 0.3])
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {  # form, mean, deviation
    "rand": (lambda x: torch.rand(len(x), 3), 0.5, 12**-0.5),
    "rand-size": (lambda x: torch.rand((len(x), 3), dtype=torch.float64), 0.5, 12**-0.5),
    "randn": (lambda x: torch.randn(size=(len(x), 3)), 0.0, 1.0),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "randint": (lambda x: torch.randint(7, (len(x), 3)), 3.0, 2.0),
    "randint-low": (lambda x: torch.randint(-3, 4, (len(x),)), 0.0, 2.0),
    "randint_like": (lambda x: torch.randint_like(x, 1, 8), 4.0, 2.0),
    "normal": (lambda x: torch.normal(x * 0 + 2.0, 3.0), 2.0, 3.0),
    "normal-size": (lambda x: torch.normal(2.0, 3.0, (len(x), 3)), 2.0, 3.0),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21**0.5),
    "bernoulli-p": (lambda x: x.bernoulli(0.3), 0.3, 0.21**0.5),
    "multinomial": (lambda x: torch.multinomial(x + WEIGHTS, 1), 1.1, 0.7),
    "multinomial-again": (lambda x: (x + WEIGHTS).multinomial(4, True), 1.1, 0.7),
    "multinomial-all": (lambda x: torch.multinomial(x + WEIGHTS, 3), 1.0, (2 / 3) ** 0.5),
    "normal_": (lambda x: torch.empty_like(x).normal_(1.0, 2.0), 1.0, 2.0),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "bernoulli_": (lambda x: x.new_empty(len(x), 1).bernoulli_(0.7), 0.7, 0.21**0.5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5).log(), 0.0, 0.5),
}


def drawn(form: Callable[[Tensor], Tensor], first: int, count: int, step: int = 0) -> Tensor:
    randomness = Randomness(3)
    randomness.begin(step, range(first, first + count))
    with FunctionOverrides(randomness, False):
        return form(torch.zeros(count, 3))


@pytest.mark.parametrize("name", FORMS)
def test_parts_draw_their_rows_of_the_whole(name: str) -> None:
    form, mean, deviation = FORMS[name]
    before = torch.get_rng_state()
    whole = drawn(form, 0, N)
    assert torch.equal(torch.cat([drawn(form, 0, 5), drawn(form, 5, N - 5)]), whole)
    assert not torch.equal(drawn(form, 0, N, step=1), whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert abs(float(whole.double().mean()) - mean) < 5 * deviation / N**0.5
    assert abs(float(whole.double().std()) / deviation - 1) < 0.05
    plain = form(torch.zeros(4, 3))
    few = drawn(form, 0, 4)
    assert (few.shape, few.dtype) == (plain.shape, plain.dtype)


def test_what_is_no_sample_is_the_same_everywhere() -> None:
    for form in (lambda x: torch.rand(()), lambda x: torch.rand(1), lambda x: torch.randn(7, 2)):
        assert torch.equal(drawn(form, 0, 4), drawn(form, 4, 4))


def test_one_row_of_weights_is_drawn_from_for_each_sample() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.multinomial(WEIGHTS, len(x), replacement=True)

    whole = drawn(noise, 0, 8)
    assert torch.equal(torch.cat([drawn(noise, 0, 3), drawn(noise, 3, 5)]), whole)


def test_every_call_draws_anew() -> None:
    two = drawn(lambda x: torch.stack([torch.rand(5), torch.rand(5)]), 0, 2)
    assert not torch.equal(two[0], two[1])
    gumbel = drawn(lambda x: F.gumbel_softmax(x), 0, 6)
    assert torch.equal(drawn(lambda x: F.gumbel_softmax(x), 4, 2), gumbel[4:])


def test_gradients_are_those_of_torch() -> None:
    x = torch.ones(4, 3, requires_grad=True)

    def filled(_: Tensor) -> Tensor:
        return (x * 2).normal_() + x

    drawn(filled, 0, 4).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(4, 3))


def test_every_function_has_a_case() -> None:
    names = {function.__name__ for function in DRAWS}
    assert names == {name.partition("-")[0] for name in FORMS}


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda: torch.poisson(torch.ones(3)), (True, False)),
        (random.random, (False, True)),
        (lambda: None, (False, False)),
    ],
)
def test_other_draws_are_noticed(draw: Callable[[], Any], found: tuple[bool, bool]) -> None:
    random.seed(5)
    wanted = random.random()
    random.seed(5)
    watch = DrawWatch(torch.nn.Linear(1, 1), [torch.default_generator])
    watch.begin(1)
    draw()
    assert watch.end() == found
    assert random.random() == wanted  # what the user draws goes on as if nothing had been
    assert isinstance(undrawable("dp2", found[0]), UnsupportedModel)
