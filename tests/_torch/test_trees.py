"""What torch must keep doing for weft._torch.trees."""

from __future__ import annotations

import torch
from torch import Tensor

from weft._torch.trees import tree_leaves, tree_map


def test_leaves_of_nested_arguments() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    tree = (1, [x, {"key": y}], None)
    assert [id(t) for t in tree_leaves(tree, Tensor)] == [id(x), id(y)]
    changed = tree_map(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, tree)
    assert changed[0] == 1 and changed[2] is None
    assert changed[1][0].tolist() == [2] and changed[1][1]["key"].tolist() == [1, 1]
