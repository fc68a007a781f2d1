"""One rank's tensors on other ranks."""

from __future__ import annotations

import ast
import re
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft.core import broadcast_value
from weft.core.errors import UnsupportedModel
from weft.launch.local_workers import Pool

Pair = namedtuple("Pair", "left right")
VALUE: Any = OrderedDict(
    logits=torch.arange(6.0).reshape(2, 3).T,
    parts=[torch.tensor(True), torch.tensor(3, dtype=torch.int16), None, 1.5, "é"],
    pair=Pair(torch.ones(0, 4, dtype=torch.bfloat16), (torch.tensor(2.0, requires_grad=True), 7)),
    table={1: torch.tensor([1 + 2j])},
)


def received(source: int) -> tuple[str, bool]:
    mine = VALUE if dist.get_rank() == source else None
    found = broadcast_value(mine, source, dist.group.WORLD)  # type: ignore[arg-type]
    same = [torch.equal(a, b) for a, b in zip(leaves(found), leaves(VALUE), strict=True)]
    kinds = type(found), type(found["pair"]), type(found["parts"]), type(found["pair"].right)
    right = kinds == (OrderedDict, Pair, list, tuple) and found["table"].keys() == {1}
    return str(kinds), right and all(same) and found["parts"][2:] == [None, 1.5, "é"]


def leaves(value: Any) -> list[torch.Tensor]:
    parts, pair = value["parts"], value["pair"]
    return [value["logits"], *parts[:2], pair.left, pair.right[0], value["table"][1]]


@pytest.mark.parametrize("source", [0, 1])
def test_a_value_is_the_same_on_every_rank(pool: Pool, source: int) -> None:
    for kinds, same in pool.run(received, source, world=2):
        assert same, kinds


def test_ranks_exchange_no_pickles() -> None:
    """As torch's collectives of objects do."""
    files = sorted(Path(weft.__file__).parent.rglob("*.py"))
    called = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and re.search(r"(gather|cast|ter|send|recv)_object", node.attr)
    ]
    assert len(files) > 300 and called == []


def refused() -> str:
    try:
        broadcast_value({"x": object()}, 1, dist.group.WORLD)  # type: ignore[arg-type]
    except UnsupportedModel as error:
        return str(error)
    return ""


def test_another_thing_is_refused_on_every_rank(pool: Pool) -> None:
    for said in pool.run(refused, world=2):
        assert "builtins:object" in said and "cannot be sent" in said
