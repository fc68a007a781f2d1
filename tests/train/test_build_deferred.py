"""A run's model without weights: its shards are those of the whole model, for every family that is
supported, and each rank reads its part of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.test_hf_checkpoint import FAMILIES, begun
from weft.core import Layout, LocalShard, UnsupportedModel, cut_segments, fsdp_rows
from weft.core.shards import chunks_of
from weft.nn import hf_model, initial_weights, weight_files
from weft.train import build, build_data

transformers = pytest.importorskip("transformers")


def rows(model: nn.Module, rank: int, world: int) -> list[LocalShard]:
    """What FSDP2 gives this rank of each parameter."""
    found = []
    for name, p in model.named_parameters():
        start, stop = fsdp_rows(p.shape[0], world, rank)
        dims = [cut_segments([(start, stop)]), *(cut_segments([(0, n)]) for n in p.shape[1:])]
        local = torch.empty(stop - start, *p.shape[1:], dtype=p.dtype)
        found.append(LocalShard(name, local, tuple(p.shape), chunks_of(dims), True))
    return found


def assert_same(run: Any, world: int = 2) -> None:
    whole = build.build_model(run, dtype=torch.float32)
    model = build.build_deferred(run, dtype=torch.float32)
    weights = initial_weights(model)
    assert weights is not None and model.training
    for rank in range(world):
        shards = rows(model, rank, world)
        weights.fill(shards)
        for shard in shards:
            start, stop = fsdp_rows(shard.shape[0], world, rank)
            assert torch.equal(shard.tensor, whole.get_parameter(shard.name)[start:stop]), (
                shard.name
            )
    for (name, b), (_, other) in zip(whole.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(b, other), name


@pytest.mark.parametrize("family", [*FAMILIES])
def test_drawn_weights_are_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    assert_same(begun(tmp_path, family))


@pytest.mark.parametrize("family", [*FAMILIES])
def test_weights_of_files_are_those_of_the_whole_model(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, family)
    torch.manual_seed(3)
    build.build_model(run, seed=5).to(torch.bfloat16).save_pretrained(  # type: ignore[operator]
        tmp_path / "saved", max_shard_size="20KB"
    )
    table = run.model.model_copy(update={"hf": str(tmp_path / "saved")})
    run = run.model_copy(update={"model": table})
    assert len(hf_model.hf_weight_files(tmp_path / "saved")) > 1
    assert_same(run)

    read = 0
    right = weight_files.FileTensor._read_run

    def counted(self: Any, descriptor: int, into: memoryview, at: int) -> None:
        nonlocal read
        read += len(into)
        right(self, descriptor, into, at)

    monkeypatch.setattr(weight_files.FileTensor, "_read_run", counted)
    model = build.build_deferred(run, dtype=torch.float32)
    assert read <= sum(b.nbytes for b in model.buffers())  # these are there already
    read = 0
    weights, shards = initial_weights(model), rows(model, 0, 2)
    assert weights is not None
    weights.fill(shards)
    assert read <= 1.15 * sum(shard.tensor.nbytes // 2 for shard in shards)  # bf16 in the files


def test_a_new_head_is_that_of_the_whole_model(tmp_path: Path) -> None:
    run = begun(tmp_path, "llama")
    build.build_model(run, seed=5).save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    changes = {"hf": str(tmp_path / "saved"), "auto": "sequence-classification"}
    run = run.model_copy(update={"model": run.model.model_copy(update=changes)})
    assert_same(run)


def test_where_the_whole_model_is_built_the_plan_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> nn.Module:
        raise UnsupportedModel("model", "build", "keeps a list", "do not")

    run = begun(tmp_path, "gpt2")
    sample = build_data.sample_batch(run, build_data.build_dataset(run))
    model, plan = build.build_for_ranks(run, sample)
    assert initial_weights(model) is not None and plan.notes == ()
    monkeypatch.setattr(build, "build_deferred", refused)
    model, plan = build.build_for_ranks(run, sample)
    assert initial_weights(model) is None and plan.layout == Layout.parse("dp1")
    assert "every process builds the whole model" in plan.notes[-1]
    assert "keeps a list" in str(plan)
