"""What a forward without elements reads into Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from weft._torch.tensors import fake_mode
from weft.parallel.without_elements import without_elements


@pytest.mark.parametrize("cast", [Tensor.bool, Tensor.byte])
def test_nothing_holds_for_any_element_and_all_for_all(cast: object) -> None:
    """Of bytes too: a loop that goes on while any sample does would not end."""
    mode = fake_mode()
    with without_elements(mode):
        below = cast(torch.randn(3) < 0.5)  # type: ignore[operator]
        assert not below.any()
        assert below.all()


def test_a_mask_takes_all_where_it_may() -> None:
    """By a mask of known elements too it takes those that are true."""
    mode = fake_mode()
    known = torch.tensor([True, False, True])
    with without_elements(mode, masks_take_all=True):
        x = torch.randn(3, 4)
        below = x < 0.5
        assert x[below].shape == (12,)
        assert x[:, below[0]].shape == (3, 4)
        assert x[known].shape == (2, 4)
        assert below.nonzero().shape == (12, 2)
        assert x.masked_select(below[0]).shape == (12,)
        x[below] -= 1
    with without_elements(fake_mode()), pytest.raises(DynamicOutputShapeException):
        x = torch.randn(3, 4)
        x[x < 0.5]
