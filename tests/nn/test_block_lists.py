"""Which modules count as repeated blocks: each is gathered, computed again and compiled as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.nn import block_lists, callable_blocks


def block(deep: bool = True) -> nn.Module:
    """A module with children; `deep`: with a list of blocks of its own."""
    inner = nn.ModuleList([Pair(), Pair()]) if deep else nn.Linear(2, 2)
    return nn.ModuleDict({"inner": inner, "out": nn.Linear(2, 2)})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Holder(nn.Module):
    """No forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.scale = Pair(), nn.Parameter(torch.ones(2))


class Activations(nn.Module):
    """No parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()


def holding(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict(parts)


MODELS: dict[str, tuple[nn.Module, tuple[tuple[str, ...], ...]]] = {
    "a list": (holding(blocks=nn.ModuleList([Pair(), Pair()])), (("blocks.0", "blocks.1"),)),
    "the model itself": (nn.Sequential(Pair(), Pair()), (("0", "1"),)),
    "a list of one": (holding(blocks=nn.ModuleList([Pair()])), (("blocks.0",),)),
    "two lists": (
        holding(encoder=nn.ModuleList([Pair()]), decoder=nn.Sequential(Pair(), Pair())),
        (("encoder.0",), ("decoder.0", "decoder.1")),
    ),
    # 1 is a block, and 10 is no part of it
    "eleven": (
        nn.ModuleList([*(block() for _ in range(11))]),
        (tuple(str(n) for n in range(11)),),
    ),
    "a list inside a block": (
        holding(layers=nn.ModuleList([block(), block()])),
        (("layers.0", "layers.1"),),
    ),
    # a Sequential of one is a wrapper; modules of two classes, leaves, and what has no parameters
    # are no blocks
    "a wrapper": (holding(body=nn.Sequential(Pair())), ()),
    "other classes": (nn.ModuleList([Pair(), block(deep=False)]), ()),
    "other classes after the first two": (nn.ModuleList([Pair(), Pair(), Activations()]), ()),
    "leaves": (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ()),
    "no parameters": (nn.Sequential(Activations(), Activations()), ()),
    "an empty list": (holding(blocks=nn.ModuleList()), ()),
    "no list": (holding(a=Pair(), b=Pair()), ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_lists_of_blocks(name: str) -> None:
    model, wanted = MODELS[name]
    assert block_lists(model) == wanted


def test_what_a_forward_can_call() -> None:
    """In the place of a module that has no forward, however deep, what it holds."""
    layers = nn.ModuleList([block(), block(deep=False)])
    model = holding(layers=layers, last=Pair(), held=Holder())
    assert callable_blocks(model, ["layers.0", "layers.1", "last", "held"]) == (
        "layers.0.inner.0",
        "layers.0.inner.1",
        "layers.0.out",
        "layers.1.inner",
        "layers.1.out",
        "last",
        "held.pair",
    )
