from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from weft.core.shards import (
    LocalShard,
    assemble,
    chunks_of,
    coverage_flaw,
    cut_segments,
    fsdp_rows,
    index_overlap,
    index_shape,
    shift_index,
    take_segments,
    whole_shard,
)


def rows(segments):
    """The global row of every local row, one by one: the plain meaning of segments."""
    return [position + i for _, position, length in segments for i in range(length)]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 10])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_fsdp_rows_are_those_of_torch_chunk(size, world):
    parts = list(torch.arange(size).chunk(world)) if size else []
    expected = [part.tolist() for part in parts] + [[]] * (world - len(parts))
    assert [list(range(*fsdp_rows(size, world, rank))) for rank in range(world)] == expected


def test_cut_segments_of_a_fused_weight():
    # q, k, v of 4 rows each, rank 1 of 2
    assert cut_segments([(2, 4), (6, 8), (10, 12)]) == [(0, 2, 2), (2, 6, 2), (4, 10, 2)]
    assert cut_segments([(0, 4), (4, 8)]) == [(0, 0, 8)]  # what touches is one
    assert cut_segments([(3, 3), (5, 6)]) == [(0, 5, 1)]
    assert cut_segments([(4, 8), (0, 4)]) == [(0, 4, 4), (4, 0, 4)]  # order is the local order
    assert cut_segments([]) == []


@pytest.mark.parametrize("start,stop", [(0, 6), (0, 3), (3, 6), (1, 5), (2, 2), (5, 6)])
def test_take_is_the_slice_of_the_rows(start, stop):
    segments = cut_segments([(2, 4), (6, 8), (10, 12)])
    taken = take_segments(segments, start, stop)
    assert rows(taken) == [2, 3, 6, 7, 10, 11][start:stop]
    assert [local for local, _, _ in taken] == [
        sum(n for _, _, n in taken[:i]) for i in range(len(taken))
    ]


def test_chunks_are_the_product_over_the_dims():
    full = torch.arange(12 * 6).reshape(12, 6)
    fused, columns = cut_segments([(2, 4), (6, 8), (10, 12)]), cut_segments([(0, 2), (4, 6)])
    local = full[rows(fused)][:, rows(columns)]
    parts = chunks_of([fused, columns])
    assert len(parts) == 6
    for where, position in parts:
        assert index_shape(where) == index_shape(position)
        assert torch.equal(local[where], full[position])


def test_chunks_of_a_0_dim_tensor_and_of_nothing():
    assert chunks_of([]) == (((), ()),)
    assert chunks_of([[], cut_segments([(0, 4)])]) == ()


@pytest.mark.parametrize("tp,fsdp", [(1, 1), (2, 1), (2, 2), (2, 5), (1, 4)])
def test_a_fused_cut_then_a_row_cut_assembles_to_the_full_tensor(tp, fsdp):
    full = torch.randn(3 * 4, 5)
    parts = []
    for t in range(tp):
        width = 4 // tp
        fused = cut_segments(
            [(part * 4 + t * width, part * 4 + (t + 1) * width) for part in range(3)]
        )
        for f in range(fsdp):
            own = take_segments(fused, *fsdp_rows(12 // tp, fsdp, f))
            parts.append((full[rows(own)], chunks_of([own, cut_segments([(0, 5)])])))
    assert torch.equal(assemble(parts, (12, 5), torch.float32), full)
    with pytest.raises(ValueError, match="in no chunk"):
        assemble(parts[1:], (12, 5), torch.float32)
    with pytest.raises(ValueError, match="in 2 chunks"):
        assemble([*parts, parts[0]], (12, 5), torch.float32)


def box(*pairs):
    return tuple(slice(*pair) for pair in pairs)


def test_flaw_names_the_region():
    quarters = [box((r, r + 2), (c, c + 3)) for r in (0, 2) for c in (0, 3)]
    assert coverage_flaw(quarters, (4, 6)) is None
    assert coverage_flaw(quarters[:3], (4, 6)) == "[2:4, 3:6] of (4, 6) is in no chunk"
    assert (
        coverage_flaw([*quarters, box((1, 2), (0, 1))], (4, 6))
        == "[1:2, 0:1] of (4, 6) is in 2 chunks"
    )
    # as many elements as the tensor has, and still wrong
    assert coverage_flaw([box((0, 2)), box((1, 3))], (4,)) == "[1:2] of (4,) is in 2 chunks"
    assert coverage_flaw([box((0, 5))], (4,)) == "[0:5] lies outside of (4,)"
    assert coverage_flaw([box((0, 4))], (4, 1)) == "[0:4] lies outside of (4, 1)"


def test_stairs_that_no_layout_makes_take_no_time():
    """n columns, each cut in another place: n * n boxes are open at one edge or another."""
    n = 5000
    below = [box((0, column + 1), (column, column + 1)) for column in range(n)]
    above = [box((column + 1, n + 1), (column, column + 1)) for column in range(n)]
    since = time.process_time()
    assert "as no layout does" in str(coverage_flaw([*below, *above], (n + 1, n)))
    assert time.process_time() - since < 30.0  # minutes, if each open box is compared
    few = [*below[:3], *(box((part[0].start, 4), part[1].indices(n)[:2]) for part in above[:3])]
    assert coverage_flaw(few, (4, 3)) is None


def test_flaw_of_empty_and_0_dim_tensors():
    assert coverage_flaw([], (0, 3)) is None
    assert coverage_flaw([], (3, 0)) is None
    assert coverage_flaw([box((0, 0), (0, 3))], (0, 3)) is None
    assert coverage_flaw([()], ()) is None
    assert coverage_flaw([], ()) is not None
    assert coverage_flaw([(), ()], ()) is not None
    assert coverage_flaw([box((0, 3)), box((3, 3))], (3,)) is None


def test_flaw_agrees_with_counting_every_element():
    generator = torch.Generator().manual_seed(0)
    clean = 0
    for _ in range(300):
        rows_at, cols_at = (
            sorted(torch.randint(0, 5, (2,), generator=generator).tolist()),
            [0, 2, 4],
        )
        edges = [0, *rows_at, 4]
        boxes = [box((a, b), (c, d)) for a, b in pairwise(edges) for c, d in pairwise(cols_at)]
        if torch.rand((), generator=generator) < 0.5:
            boxes.pop(int(torch.randint(0, len(boxes), (), generator=generator)))
        if torch.rand((), generator=generator) < 0.3:
            boxes.append(boxes[0])
        count = torch.zeros(4, 4)
        for each in boxes:
            count[each] += 1
        assert (coverage_flaw(boxes, (4, 4)) is None) == bool((count == 1).all())
        clean += bool((count == 1).all())
    assert 50 < clean < 250


def test_overlap_and_shift():
    assert index_overlap(box((0, 4), (2, 6)), box((2, 8), (0, 3))) == box((2, 4), (2, 3))
    assert index_overlap(box((0, 4)), box((4, 8))) is None
    assert index_overlap((), ()) == ()
    assert shift_index(box((12, 14)), box((10, 20)), box((0, 10))) == box((2, 4))


def test_piece_refuses_chunks_that_do_not_fit():
    tensor = torch.zeros(2, 3)
    whole_shard("w", tensor)
    with pytest.raises(
        ValueError, match=r"w: \[0:2, 0:3\] of a local \(2, 3\) cannot be \[3:5, 0:3\]"
    ):
        LocalShard("w", tensor, (4, 3), ((box((0, 2), (0, 3)), box((3, 5), (0, 3))),), True)
    with pytest.raises(ValueError):
        LocalShard("w", tensor, (4, 3), ((box((0, 3), (0, 3)), box((0, 3), (0, 3))),), True)
    with pytest.raises(ValueError):
        LocalShard("w", tensor, (4, 3), ((box((0, 2), (0, 3)), box((0, 1), (0, 3))),), True)
