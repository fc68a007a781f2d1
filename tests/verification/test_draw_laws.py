"""What dropout and each of torch's distributions are, as laws: what weft draws keeps them, and what
is drawn in another way is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.mutants import Mutant, mutated
from weft.nn import DRAWS, Randomness
from weft.verification.plain.draw_laws import DrawLaws
from weft.verification.plain.functions import PlainFunctions

SAMPLES, WIDTH = 8, 500
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
X = torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)
CALLS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(SAMPLES, WIDTH),
    "randn": lambda: torch.randn((SAMPLES, WIDTH)),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(3, 40, (SAMPLES, WIDTH)),
    "randint from 0": lambda: torch.randint(40, (SAMPLES, WIDTH)),
    "randint_like": lambda: torch.randint_like(X, 3, 40),
    "normal": lambda: torch.normal(2.0, 3.0, (SAMPLES, WIDTH)),
    "normal of tensors": lambda: torch.normal(X + 2.0, X + 3.0),
    "bernoulli": lambda: torch.bernoulli(X + 0.3),
    "Tensor.bernoulli": lambda: (X + 0.3).bernoulli(),
    "multinomial": lambda: torch.multinomial(X[:, :3].repeat(100, 1) + WEIGHTS, 2),
    "multinomial again": lambda: (X[:, :3] + WEIGHTS).multinomial(WIDTH, True),
    "normal_": lambda: X.clone().normal_(2.0, 3.0),
    "log_normal_": lambda: X.clone().log_normal_(0.5, 0.7),
    "uniform_": lambda: X.clone().uniform_(-1.0, 5.0),
    "bernoulli_": lambda: X.clone().bernoulli_(0.3),
    "exponential_": lambda: X.clone().exponential_(4.0),
}
DRAWN = "weft.nn.random_draws"
MUTANTS = {
    "rand": ("weft.nn.dropout_rng", "Randomness.uniform", "2.0**-53", "2.0**-52"),
    "randn": (DRAWN, "Draws.normal", "-2.0 *", "-5.0 *"),
    "randint": (DRAWN, "_whole_numbers", "+ low", "- low"),
    "randint_like": (DRAWN, "_whole_numbers", "(high - low)", "(high - low) * 1.2"),
    "normal": (DRAWN, "_normal", "mean + std * draws", "std + mean * draws"),
    "normal of tensors": (DRAWN, "_normal", "* std + mean", "+ mean"),
    "rand_like": ("weft.nn.dropout_rng", "Randomness.uniform", "2.0**-53", "2.0**-53 * 0.9"),
    "bernoulli": (DRAWN, "_bernoulli", "uniform <", "uniform >"),
    "multinomial": (DRAWN, "_multinomial", "weights / times", "times / weights"),
    "multinomial again": (DRAWN, "_multinomial", "weights.cumsum", "(weights**2).cumsum"),
    "normal_": (DRAWN, "_normal_", "* std + mean", "* mean + std"),
    "log_normal_": (DRAWN, "_log_normal_", "* std + mean", "* mean + std"),
    "uniform_": (DRAWN, "_uniform_", "+ low", "- low"),
    "bernoulli_": (DRAWN, "_bernoulli_", "< p", "> p"),
    "exponential_": (DRAWN, "_exponential_", "/ lambd", "* lambd"),
}


def broken(call: Callable[[], Tensor]) -> list[str]:
    """The laws that a call breaks, over two steps."""
    randomness, laws = Randomness(0), DrawLaws()
    for step in range(2):
        randomness.begin(step, range(SAMPLES))
        with PlainFunctions(randomness, laws):
            call()
            call()
    return laws.broken


@pytest.mark.parametrize("name", CALLS)
def test_each_distribution_keeps_its_law(name: str) -> None:
    assert broken(CALLS[name]) == []


def test_every_function_that_weft_draws_is_held_to_a_law() -> None:
    assert {function.__name__ for function in DRAWS} == {
        name.split()[0].removeprefix("Tensor.") for name in CALLS
    }


@pytest.mark.parametrize("name", MUTANTS)
def test_another_distribution_is_named(name: str) -> None:
    with mutated(Mutant(*MUTANTS[name])):
        assert f"torch.{name.split()[0]} " in broken(CALLS[name])[0]


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dropout", [F.dropout, F.alpha_dropout, F.dropout1d])
def test_masks_keep_their_laws(dropout: Callable[..., Tensor], p: float) -> None:
    x = torch.ones(SAMPLES, WIDTH, 3, dtype=torch.float64)
    assert broken(lambda: dropout(x, p)) == []


def test_few_numbers_say_nothing() -> None:
    """Two of them may be equal, or have any mean, by chance."""
    low = torch.ones(1, dtype=torch.bfloat16)
    assert broken(lambda: [F.dropout(torch.ones(4)), torch.rand_like(low), torch.rand(1)][0]) == []


def test_what_chance_may_do_breaks_no_law() -> None:
    """Rare elements, that come three at once or not at all; numbers that a dtype rounds."""
    laws = DrawLaws()
    keep = torch.ones(100, dtype=torch.bool)
    keep[:3] = False
    laws.mask(keep, 0.001, 0, "here", None)
    randomness = Randomness(0)
    randomness.begin(0, range(SAMPLES))
    with PlainFunctions(randomness, laws):
        torch.bernoulli(torch.full((SAMPLES, 13), 0.011, dtype=torch.float64))
        torch.rand_like(torch.zeros(SAMPLES, 500_000, dtype=torch.bfloat16))
    assert laws.broken == []


DROPOUT = "weft.nn.dropout_rng"
OTHER_BITS = {
    # as good as the right ones, but those of no definition
    "calls by twos": ("Randomness.site", "self.calls += 1", "self.calls += 2"),
    "another seed": ("Randomness.make_key", "self.seed, self.step", "self.seed + 1, self.step"),
    "steps and places swapped": (
        "Randomness.make_key",
        "self.step, self.place",
        "self.place, self.step",
    ),
    "another mixing of keys": ("mix_key", "(state >> 27)", "(state >> 28)"),
    "another mixing of bits": ("Randomness._words", "word >> shift", "word >> (shift + 1)"),
    "samples beside themselves": (
        "Randomness._places",
        "total = shape[dim]",
        "total = 1 + shape[dim]",
    ),
}


@pytest.mark.parametrize("name", OTHER_BITS)
def test_other_bits_are_named(name: str) -> None:
    def call() -> Tensor:
        return F.dropout(X + 1.0, 0.3)

    assert broken(call) == []
    with mutated(Mutant(DROPOUT, *OTHER_BITS[name])):
        found = broken(call)
    assert found and ("another key" in found[0] or "other bits" in found[0]), found
