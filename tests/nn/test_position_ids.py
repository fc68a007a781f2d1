"""Positions are numbered as the model numbers them where it is not told."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.nn.position_ids import PositionNumbers


def create_position_ids_from_input_ids(ids: Tensor, padding_idx: int) -> Tensor:
    kept = ids.ne(padding_idx)
    return kept.cumsum(1) * kept + padding_idx


class Beside(nn.Module):
    """Counts by the function beside its class."""

    padding_idx = 1

    def forward(self, ids: Tensor) -> Tensor:
        return create_position_ids_from_input_ids(ids, self.padding_idx)


class Own(Beside):
    @staticmethod
    def create_position_ids_from_input_ids(ids: Tensor, padding_idx: int) -> Tensor:
        return 2 * create_position_ids_from_input_ids(ids, padding_idx)


class Other(Beside):
    """Has no such function."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids


def test_numbers_are_the_models_own() -> None:
    ids, here = torch.tensor([[5, 1, 7]]), torch.device("cpu")
    want = Beside()(ids)
    assert want.tolist() == [[2, 1, 3]]
    assert torch.equal(PositionNumbers(nn.Sequential(Beside()))(1, 3, here, ids), want)
    assert torch.equal(PositionNumbers(nn.Sequential(Own()))(1, 3, here, ids), 2 * want)
    assert PositionNumbers(nn.Sequential(Other()))(1, 3, here, ids).tolist() == [[0, 1, 2]]
    assert PositionNumbers(Beside())(1, 3, here, None).tolist() == [[0, 1, 2]]
