"""What a forward without elements reads into Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
