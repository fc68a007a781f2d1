"""A microbatch: views of the samples it has, for the model, for the loss and for attention."""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import ConfigError
from weft.engine.microbatch import MicroBatch, SequenceInfo, check_batch


def test_split_gives_views_of_all_that_belongs_to_the_samples() -> None:
    ids, documents = torch.arange(24).view(6, 4), torch.arange(6)[:, None].expand(6, 4)
    info = SequenceInfo(8, {"position_ids": ids * 10}, documents, ids > 3)
    batch = {"input_ids": ids, "labels": ids + 1}
    micros = MicroBatch(batch, {"input_ids": ids}, info).split(2, 3)
    assert len(micros) == 3
    for number, micro in enumerate(micros):
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(micro.batch["labels"], ids[rows] + 1)
        assert micro.arguments["input_ids"].data_ptr() == ids[rows].data_ptr()
        assert micro.sequence.length == 8
        assert torch.equal(micro.sequence.wholes["position_ids"], ids[rows] * 10)
        assert micro.sequence.documents is not None and micro.sequence.valid is not None
        assert torch.equal(micro.sequence.documents, documents[rows])
        assert torch.equal(micro.sequence.valid, ids[rows] > 3)


def test_the_signature_follows_shapes_of_batch_and_arguments() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    one = MicroBatch({"input_ids": ids}, {"input_ids": ids})
    assert one.signature == MicroBatch({"input_ids": ids + 1}, {"input_ids": ids}).signature
    longer = MicroBatch({"input_ids": ids, "mask": ids}, {"input_ids": ids})
    made = MicroBatch({"input_ids": ids}, {"input_ids": ids, "position_ids": ids})
    assert len({one.signature, longer.signature, made.signature}) == 3


def test_a_batch_of_other_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.local"):
        check_batch({"x": torch.zeros(8, 2)}, 4, 8)
    with pytest.raises(ConfigError, match="Give 4"):
        check_batch({"x": torch.zeros(3, 2)}, 4, 8)
