"""Weights from safetensors: each part is that of the file, no other bytes are read, and what is
damaged is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.core import CheckpointError, LocalShard, index_shape, whole_shard
from weft.nn import deferred_init, initial_weights
from weft.nn.weight_files import FileTensor, file_tensors

STORED = {
    "plain": torch.randn(6, 8),
    "second": torch.randn(6, 8),
    "half": torch.randn(4, 6, dtype=torch.bfloat16),
    "cube": torch.randn(3, 4, 5, dtype=torch.float64),
    "scalar": torch.tensor(7),
    "none": torch.empty(0, 4),
    **{f"experts.{i}.{part}": torch.randn(2, 3) for i in range(4) for part in ("gate", "up")},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(STORED, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each read."""
    seen: list[int] = []
    whole = FileTensor._read_run

    def counted(self: FileTensor, descriptor: int, into: memoryview, at: int) -> None:
        seen.append(len(into))
        whole(self, descriptor, into, at)

    monkeypatch.setattr(FileTensor, "_read_run", counted)
    yield seen


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("plain", (slice(0, 6), slice(0, 8))),
        ("plain", (slice(2, 5), slice(0, 8))),
        ("plain", (slice(1, 4), slice(3, 7))),
        ("plain", (slice(2, 2), slice(0, 8))),
        ("half", (slice(1, 3), slice(5, 6))),
        ("cube", (slice(1, 3), slice(0, 4), slice(0, 5))),
        ("cube", (slice(0, 3), slice(1, 3), slice(0, 5))),
        ("cube", (slice(0, 2), slice(0, 4), slice(2, 3))),
        ("scalar", ()),
        ("none", (slice(0, 0), slice(0, 4))),
    ],
)
def test_a_part_is_read_and_nothing_else(
    file: Path, read_bytes: list[int], name: str, index: Any
) -> None:
    found = file_tensors([file])[name].read(index)
    assert torch.equal(found, STORED[name][index]) and found.dtype == STORED[name].dtype
    assert sum(read_bytes) == found.nbytes


class Mixed(nn.Module):
    """A model whose tensors are copied, cast, stacked and joined."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.linear.load_state_dict({"weight": tensors["plain"], "bias": torch.ones(6)})
        self.cast = nn.Parameter(tensors["half"].float())
        self.cube = nn.Parameter(tensors["cube"])
        parts = [
            torch.stack([tensors[f"experts.{i}.{p}"] for i in range(4)]) for p in ("gate", "up")
        ]
        self.experts = nn.Parameter(torch.cat(parts, dim=1))
        self.flipped = nn.Parameter(tensors["plain"].t().contiguous())
        self.rounded = nn.Parameter(tensors["plain"].bfloat16().float())
        self.rows = nn.Parameter(tensors["plain"][2:4].clone())
        changed = tensors["cube"].clone()
        changed[0] = 0
        self.changed = nn.Parameter(changed)
        source = tensors["plain"].clone()
        self.earlier = nn.Parameter(source.clone())
        source.copy_(tensors["second"])  # after it was copied
        self.later = nn.Parameter(source)
        self.fresh = nn.Parameter(torch.randn(5))


def parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    yield tuple(slice(0, n) for n in shape)
    yield tuple(slice(n // 3, n - n // 3) for n in shape)
    yield (slice(shape[0] - 1, shape[0]), *(slice(0, n) for n in shape[1:]))


def test_weights_are_those_of_the_files(file: Path, read_bytes: list[int]) -> None:
    torch.manual_seed(0)
    whole = Mixed(dict(STORED))
    model = deferred_init(Mixed, 0, [file])
    weights = initial_weights(model)
    assert weights is not None
    for name, p in whole.named_parameters():
        for position in parts(tuple(p.shape)):
            local = torch.full(index_shape(position), 9.0, dtype=p.dtype)
            inside = tuple(slice(0, n) for n in local.shape)
            read_bytes.clear()
            weights.fill([LocalShard(name, local, tuple(p.shape), ((inside, position),), True)])
            assert torch.equal(local, p[position]), (name, position)
            if name in ("linear.weight", "cube", "experts", "rows"):
                assert sum(read_bytes) == local.nbytes, name
            if name == "cast":
                assert sum(read_bytes) == local.nbytes // 2


def test_a_file_that_ends_too_early_is_refused(file: Path) -> None:
    model = deferred_init(Mixed, 0, [file])
    weights = initial_weights(model)
    assert weights is not None
    stored = file_tensors([file])["experts.3.up"]
    with file.open("r+b") as opened:
        opened.truncate(stored.start)
    shard = whole_shard("experts", torch.empty(4, 4, 3))
    with pytest.raises(CheckpointError, match="ends too early"):
        weights.fill([shard])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"", "not a safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "not a safetensors file"),
        (lambda data: data[:40], "not a safetensors file"),
        (lambda data: data[:-4], "ends within"),
        (lambda data: data.replace(b'"F64"', b'"F99"', 1), "F99"),
        (lambda data: data.replace(b"[6,8]", b"[6,9]", 1), "gives plain 192 bytes"),
        (lambda data: data[:8] + b"}" + data[9:], "cannot be read"),
    ],
)
def test_what_is_damaged_is_refused(file: Path, change: Any, problem: str) -> None:
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=problem):
        file_tensors([file])


def test_a_name_that_two_files_hold_is_refused(file: Path) -> None:
    other = file.with_name("other.safetensors")
    save_file({"plain": torch.ones(2)}, other)
    with pytest.raises(CheckpointError, match="plain"):
        file_tensors([file, other])


def test_a_header_is_no_code(tmp_path: Path) -> None:
    text = json.dumps(["no", "table"]).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        file_tensors([path])
