"""Integers and shapes of this rank's part, and what they are of the whole sequence."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.context_parallel.followed_shapes import FollowedShapes
from weft.engine.context_parallel.position_counts import PositionCount, whole_number
from weft.engine.context_parallel.whole_marks import (
    dims_of_positions,
    is_marked,
    set_whole_shape,
    whole_shape,
)

HERE, ALL = 8, 16
N = PositionCount(HERE, ALL)


@pytest.mark.parametrize(
    "function",
    [
        lambda n: n + 3,
        lambda n: 2 * n - 1,
        lambda n: 1 - n,
        lambda n: n // 4,
        lambda n: -(-n // 3),
        lambda n: n % 5,
        lambda n: n * n,
        lambda n: (n + n) // 2,
        lambda n: abs(-n),
    ],
)
def test_integers_are_of_both(function: Callable[[int], int]) -> None:
    found = function(N)
    assert (int(found), whole_number(found)) == (function(HERE), function(ALL))


def test_what_is_the_same_of_both_is_a_plain_integer() -> None:
    assert type(N // N) is int and type(N * 0) is int and type(N % 8) is int


def test_comparisons_and_fractions_are_of_the_whole() -> None:
    assert N > 10 and not N < 10 and N > 10 and N >= ALL and min(N, 12) == 12
    assert N / 2 == ALL / 2 and N**-0.5 == ALL**-0.5
    assert float(N) == ALL and math.sqrt(N) == math.sqrt(ALL)


def test_as_a_size_it_is_that_of_the_part() -> None:
    assert torch.zeros(2, N).shape == (2, HERE) and N == HERE and [*range(N)] == [*range(HERE)]
    assert PositionCount(HERE, ALL + 1) != N and {N: 1}[HERE] == 1
    assert type(pickle.loads(pickle.dumps(N))) is int


SQUARE = {
    "heads first": lambda x: x.transpose(1, 2),
    "scores": lambda x: x.transpose(1, 2) @ x.permute(0, 2, 3, 1),
    "flattened": lambda x: x.flatten(2),
    "split": lambda x: x.flatten(2).chunk(2, -1)[1],
    "of samples and positions": lambda x: x.flatten(0, 1),
    "linear": lambda x: F.linear(x, torch.ones(3, HERE)),
    "turned": lambda x: x.mT.movedim(0, -1),
    "summed": lambda x: x.sum(1),
    "one of each": lambda x: x[:, -1],
    "padded": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1],
}


@pytest.mark.parametrize("name", SQUARE)
def test_dims_of_positions_are_followed_where_all_sizes_are_alike(name: str) -> None:
    """As many samples, heads and features as positions."""
    function, shapes = SQUARE[name], FollowedShapes()
    follow = _Follows(shapes)
    x = set_whole_shape(torch.ones(HERE, HERE, HERE, HERE), (HERE, ALL, HERE, HERE))
    with follow:
        found = function(x)
    assert whole_shape(found) == tuple(function(torch.ones(HERE, ALL, HERE, HERE)).shape)


class _Follows(torch.overrides.TorchFunctionMode):
    def __init__(self, shapes: FollowedShapes):
        super().__init__()
        self.shapes = shapes

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.shapes.mark(made, func, args, kwargs or {})
        return made


def test_a_tensor_of_which_nothing_is_known_beside_one_of_positions() -> None:
    """As what an all-reduce gives, which is added to the residual."""
    x, other = set_whole_shape(torch.ones(2, HERE, 3), (2, ALL, 3)), torch.ones(2, HERE, 3)
    with _Follows(FollowedShapes()):
        assert whole_shape(x + other) == whole_shape(other * x) == (2, ALL, 3)
        assert not is_marked(x.mT @ other)  # which dims are of positions, nothing says


def test_what_a_function_with_its_own_backward_hands_on_keeps_its_dims() -> None:
    """As FSDP2 hands on what enters a unit: another tensor, in the same memory."""
    x = torch.ones(2, HERE, HERE, requires_grad=True) * 1
    for given in (x, x.mT):
        whole = tuple(ALL if d == 1 + (given is not x) else n for d, n in enumerate(given.shape))
        set_whole_shape(given, whole)
        (found,) = _HandsOn.apply(given)
        assert found is not given and dims_of_positions(found) == dims_of_positions(given) != []


class _HandsOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def test_following_draws_no_numbers_and_takes_no_memory() -> None:
    shapes, before = FollowedShapes(), torch.get_rng_state()
    assert shapes.shapes(torch.rand, (2, N), {}) == [(2, ALL)]
    x = set_whole_shape(torch.ones(2, HERE), (2, ALL))
    assert shapes.shapes(F.dropout, (x, 0.5, True), {}) == [(2, ALL)]
    huge = PositionCount(HERE, 10**7)
    assert shapes.shapes(torch.zeros, (huge, huge), {}) == [(10**7, 10**7)]
    assert torch.equal(torch.get_rng_state(), before)
