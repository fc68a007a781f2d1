"""Positions are numbered as the model numbers them where it is not told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.nn.position_ids import PositionNumbers, sequence_length


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


IMAGE, IDS = torch.zeros(2, 3, 32, 32), torch.zeros(2, 12, dtype=torch.long)
WAVE, FEATURES = torch.zeros(2, 1600), torch.zeros(2, 10, 8)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"pixel_values": IMAGE, "input_ids": IDS}, 12),
        ({"features": FEATURES, "input_ids": IDS}, 12),
        ({"features": FEATURES, "pixel_values": IMAGE}, 10),
        ({"wave": WAVE}, 1600),
        ({"pixel_values": IMAGE, "labels": IDS[:, 0]}, 0),
    ],
)
def test_length_is_that_of_tokens_else_of_features(batch: dict[str, Tensor], length: int) -> None:
    assert sequence_length(tuple(batch), batch) == length
