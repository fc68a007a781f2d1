"""Checkpoints written under one arrangement of chunks and read under another, and every way they
can be damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import traceback
from itertools import count
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from weft import checkpoint
from weft.checkpoint import Retention, writer
from weft.core.errors import CheckpointError, WeftError
from weft.core.shards import (
    LocalShard,
    chunks_of,
    cut_segments,
    fsdp_rows,
    take_segments,
    whole_shard,
)

# ---- a small state under several arrangements ----------------------------------------------------

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
}


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def make_state():
    """Global tensors by name: matrices of every dtype, a fused weight, a vector, 0-dim ones, an
    empty one."""
    generator = torch.Generator().manual_seed(7)
    state = {
        name: (torch.randn(10, 6, generator=generator, dtype=torch.float64) * 50).abs().to(dtype)
        for name, dtype in DTYPES.items()
    }
    state["qkv"] = torch.randn(3 * 4, 5, generator=generator)
    state["special"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -1.0, 2.0, 3.0])
    state["step"] = torch.tensor(41.0)
    state["flag"] = torch.tensor(True)
    state["empty"] = torch.empty(0, 4)
    state["conv"] = torch.randn(5, 2, 3, 3, generator=generator)
    return state


def row_cut(name, shape, rank, world):
    return [
        cut_segments([fsdp_rows(shape[0], world, rank)]),
        *[cut_segments([(0, size)]) for size in shape[1:]],
    ]


def column_cut(name, shape, rank, world):
    edges = [0, *[shape[-1] * (r + 1) // world for r in range(world)]]
    return [
        *[cut_segments([(0, size)]) for size in shape[:-1]],
        cut_segments([(edges[rank], edges[rank + 1])]),
    ]


def fused_then_rows(name, shape, rank, world):
    """Tensor parallel over 2 (three parts for qkv, else rows), each part then cut by rows over the
    other ranks."""
    t, f = divmod(rank, world // 2)
    if name == "qkv":
        segments = cut_segments([(part * 4 + t * 2, part * 4 + t * 2 + 2) for part in range(3)])
    else:
        segments = cut_segments([fsdp_rows(shape[0], 2, t)])
    rows = sum(length for _, _, length in segments)
    own = take_segments(segments, *fsdp_rows(rows, world // 2, f))
    return [own, *[cut_segments([(0, size)]) for size in shape[1:]]]


def last_rank_only(name, shape, rank, world):
    """Everything lies on the last rank, as on a pipeline's last stage; the others hold an empty
    local tensor."""
    return [cut_segments([(0, size if rank == world - 1 else 0)]) for size in shape]


def uneven(name, shape, rank, world):
    """Rank 0 holds one row in the middle, the last rank all others, in another order; the rest hold
    nothing."""
    middle = shape[0] // 2
    own = (
        [(middle, middle + 1)]
        if rank == 0
        else [(middle + 1, shape[0]), (0, middle)]
        if rank == world - 1
        else []
    )
    return [cut_segments(own), *[cut_segments([(0, size)]) for size in shape[1:]]]


def replicated(name, shape, rank, world):
    return [cut_segments([(0, size)]) for size in shape]


ARRANGEMENTS = (replicated, row_cut, column_cut, fused_then_rows, last_rank_only, uneven)


def local_of(full, dims):
    for dim, segments in enumerate(dims):
        index = [position + i for _, position, length in segments for i in range(length)]
        full = full.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return full


def arrange(state, arrangement, rank, world, fill=True):
    """This rank's pieces; with fill=False of garbage to be loaded over. Locals are strided views of
    larger tensors."""
    pieces = []
    for name, full in state.items():
        shape = tuple(full.shape)
        cut = full.ndim > 0 and full.numel() > 0
        dims = (arrangement if cut else replicated)(name, shape, rank, world)
        local = local_of(full, dims)
        room = torch.full((*local.shape, 2), 1, dtype=full.dtype)
        live = room[..., 0]
        if fill:
            live.copy_(local)
        writer = rank == 0 if not cut or arrangement is replicated else True
        pieces.append(LocalShard(name, live, shape, chunks_of(dims), writer))
    return pieces


def assert_arranged(state, arrangement, rank, world, pieces):
    expected = arrange(state, arrangement, rank, world)
    for got, want in zip(pieces, expected, strict=True):
        assert got.tensor.dtype == want.tensor.dtype
        assert torch.equal(bits(got.tensor), bits(want.tensor)), (arrangement.__name__, got.name)


# ---- several ranks, forked -----------------------------------------------------------------------

_fork = multiprocessing.get_context("fork")
_meetings = count()


def _child(function, rank, world, meeting, results, args):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
        )
        results.put((rank, None, function(rank, world, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def ranks(tmp_path, world, function, *args):
    """`function(rank, world, *args)` on `world` ranks; the results in rank order."""
    results = _fork.Queue()
    meeting = tmp_path / f"meeting-{next(_meetings)}"
    children = [
        _fork.Process(target=_child, args=(function, rank, world, meeting, results, args))
        for rank in range(world)
    ]
    for child in children:
        child.start()
    try:
        answers = sorted((results.get(timeout=60) for _ in children), key=lambda answer: answer[0])
    finally:
        for child in children:
            child.join(timeout=10)
            child.kill()
    errors = [f"rank {rank}: {error}" for rank, error, _ in answers if error]
    assert not errors, "\n".join(errors)
    return [value for _, _, value in answers]


def _save_and_reload_all(rank, world, folder):
    state = make_state()
    for step, arrangement in enumerate(ARRANGEMENTS):
        pieces = arrange(state, arrangement, rank, world)
        checkpoint.save_checkpoint(
            folder,
            step,
            pieces,
            {"step": step},
            {"layout": arrangement.__name__},
            keep=Retention(99),
        )
        for other in ARRANGEMENTS:
            fresh = arrange(state, other, rank, world, fill=False)
            assert checkpoint.load_checkpoint(folder, step, fresh) == {"step": step}
            assert_arranged(state, other, rank, world, fresh)


def _load_all(rank, world, folder):
    state = make_state()
    for step in range(len(ARRANGEMENTS)):
        for other in ARRANGEMENTS:
            fresh = arrange(state, other, rank, world, fill=False)
            checkpoint.load_checkpoint(folder, step, fresh)
            assert_arranged(state, other, rank, world, fresh)


@pytest.mark.parametrize("written_by,read_by", [(4, 2), (2, 4)])
def test_every_arrangement_is_read_under_every_other(tmp_path, written_by, read_by, monkeypatch):
    monkeypatch.setattr(writer, "FILE_BYTES", 1000)  # several files a rank
    ranks(tmp_path, written_by, _save_and_reload_all, tmp_path / "c")
    assert len(list((tmp_path / "c" / "step-000000").glob("rank-00000-*.safetensors"))) > 1
    ranks(tmp_path, read_by, _load_all, tmp_path / "c")
    for step in range(len(ARRANGEMENTS)):  # and by one process without a process group
        fresh = arrange(make_state(), replicated, 0, 1, fill=False)
        checkpoint.load_checkpoint(tmp_path / "c", step, fresh)
        assert_arranged(make_state(), replicated, 0, 1, fresh)


def _save_with_one_failing(rank, world, folder, bad_rank):
    state = make_state()
    if rank == bad_rank:  # as a full disk or a quota does: write() itself fails
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    try:
        checkpoint.save_checkpoint(
            folder, 2, arrange(state, row_cut, rank, world), {}, {}, keep=Retention(1)
        )
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_rank_that_cannot_write_fails_all_and_harms_nothing(tmp_path, bad_rank):
    folder = tmp_path / "c"
    state = make_state()
    checkpoint.save_checkpoint(
        folder, 1, arrange(state, replicated, 0, 1), {"n": 1}, {}, keep=Retention(1)
    )
    messages = ranks(tmp_path, 3, _save_with_one_failing, folder, bad_rank)
    assert len(set(messages)) == 1
    assert f"rank {bad_rank} failed: OSError" in messages[0] and "File too large" in messages[0]
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    fresh = arrange(state, replicated, 0, 1, fill=False)
    assert checkpoint.load_checkpoint(folder, None, fresh) == {"n": 1}


def _load_with_one_unlike(rank, world, folder):
    live = torch.zeros(3 if rank == 1 else 4)
    try:
        checkpoint.load_checkpoint(folder, None, [whole_shard("w", live)])
    except CheckpointError as error:
        return str(error), live.tolist()


def test_a_rank_that_cannot_load_fails_all_before_anything_changes(tmp_path):
    checkpoint.save_checkpoint(
        tmp_path / "c", 1, [whole_shard("w", torch.ones(4))], {}, {}, keep=Retention(1)
    )
    (first, a), (second, b) = ranks(tmp_path, 2, _load_with_one_unlike, tmp_path / "c")
    assert first == second and "(3,)" in first and "(4,)" in first and "'w'" in first
    assert a == [0] * 4 and b == [0] * 3


def _save_wrongly(rank, world, folder, how):
    full, rows = torch.arange(8.0), (rank * 4, rank * 4 + 4)
    good = LocalShard("w", full[slice(*rows)], (8,), chunks_of([cut_segments([rows])]), True)
    bad = {
        "nobody writes": [LocalShard("w", full, (8,), chunks_of([cut_segments([(0, 8)])]), False)],
        "both write": [whole_shard("w", full)],
        "a hole": [good] if rank == 0 else [],
        "shapes differ": [whole_shard("w", full[: 8 - rank])],
        "twice": [good, good],
    }
    try:
        checkpoint.save_checkpoint(folder, 1, bad[how], {}, {}, keep=Retention(1))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(
    "how,message",
    [
        ("nobody writes", "[0:8] of (8,) is in no chunk"),
        ("both write", "[0:8] of (8,) is in 2 chunks"),
        ("a hole", "[4:8] of (8,) is in no chunk"),
        ("shapes differ", "torch.float32 (7,) on rank 1"),
        ("twice", "has it twice"),
    ],
)
def test_what_is_not_written_exactly_once_is_not_saved(tmp_path, how, message):
    messages = ranks(tmp_path, 2, _save_wrongly, tmp_path / "c", how)
    assert messages[0] == messages[1] and message in messages[0] and "'w'" in messages[0]
    assert checkpoint.latest_step(tmp_path / "c") is None


# ---- one process ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint.save_checkpoint(
        folder,
        100,
        [whole_shard("w", torch.arange(6.0).reshape(2, 3)), whole_shard("b", torch.ones(3))],
        {},
        {},
        Retention(3),
    )
    return folder


def refused(folder, step=None, pieces=None):
    """The message of the refusal; the live tensors must be as they were."""
    live = [torch.full((2, 3), -1.0), torch.full((3,), -1.0)]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_checkpoint(
            folder,
            step,
            [whole_shard("w", live[0]), whole_shard("b", live[1])] if pieces is None else pieces,
        )
    assert all((tensor == -1).all() for tensor in live)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_loads_into_parameters_and_views_in_place(folder):
    flat = torch.zeros(9)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    checkpoint.load_checkpoint(
        folder, 100, [whole_shard("w", parameter), whole_shard("b", flat[3:6])]
    )
    assert (
        parameter.requires_grad
        and parameter.is_leaf
        and parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
    )
    assert flat.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_tensors_that_share_memory_are_saved(tmp_path):
    flat = torch.arange(8.0)
    checkpoint.save_checkpoint(
        tmp_path,
        1,
        [whole_shard("a", flat[:6]), whole_shard("b", flat[2:]), whole_shard("c", flat)],
        {},
        {},
        Retention(1),
    )
    live = torch.zeros(6)
    checkpoint.load_checkpoint(tmp_path, 1, [whole_shard("b", live)])  # a part of the names will do
    assert live.tolist() == [2, 3, 4, 5, 6, 7]


def test_scalars_and_inspect(tmp_path):
    state = make_state()
    scalars = {
        "steps_done": 100,
        "loss_scale": 65536.0,
        "lr": 0.1 + 0.2,
        "nested": {"seen": [1, 2]},
        "best": None,
    }
    checkpoint.save_checkpoint(
        tmp_path,
        100,
        arrange(state, replicated, 0, 1),
        scalars,
        {"layout": "dp2.tp2", "ü": "é"},
        keep=Retention(2),
    )
    assert checkpoint.load_checkpoint(tmp_path, None, []) == scalars
    contents = checkpoint.read_index(tmp_path)
    assert (
        contents.step == 100
        and contents.meta == {"layout": "dp2.tp2", "ü": "é"}
        and contents.scalars == scalars
    )
    assert {name: (t.shape, t.dtype) for name, t in contents.tensors.items()} == {
        name: (tuple(t.shape), t.dtype) for name, t in state.items()
    }
    assert list(contents.tensors) == list(state)  # in the model's order


def test_scalars_that_are_not_json_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save_checkpoint(
            tmp_path / "c", 1, [], {"loss": torch.tensor(1.0)}, {}, keep=Retention(1)
        )
    assert not (tmp_path / "c").exists()


def test_keep_the_last_ones(tmp_path):
    for step in (1, 2, 10, 20):
        checkpoint.save_checkpoint(
            tmp_path, step, [whole_shard("w", torch.tensor(step))], {}, {}, keep=Retention(2)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000020"]
    checkpoint.save_checkpoint(
        tmp_path, 5, [whole_shard("w", torch.tensor(5))], {}, {}, keep=Retention(1)
    )  # never the one just written
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    checkpoint.save_checkpoint(tmp_path, 1234567, [], {}, {}, keep=Retention(5))
    assert checkpoint.latest_step(tmp_path) == 1234567
    with pytest.raises(CheckpointError, match="keep = 0"):
        checkpoint.save_checkpoint(tmp_path, 6, [], {}, {}, keep=Retention(0))


def test_the_same_step_is_replaced(folder):
    checkpoint.save_checkpoint(
        folder, 100, [whole_shard("new", torch.ones(2))], {"again": True}, {}, keep=Retention(3)
    )
    assert list(checkpoint.read_index(folder).tensors) == ["new"]
    assert [path.name for path in folder.iterdir()] == ["step-000100"]


def _dies(folder, step, moment):
    def die(path, *_, **__):
        if moment[1] == "rmtree":
            next(path.glob("*.safetensors")).unlink()  # half removed
        os._exit(9)

    setattr(*moment, die)
    checkpoint.save_checkpoint(
        folder, step, [whole_shard("w", torch.ones(2, 3))], {}, {}, keep=Retention(1)
    )


@pytest.mark.parametrize(
    "step,moment,left",
    [
        (200, (writer, "write_file"), ["step-000100"]),
        (200, (writer, "index_text"), ["step-000100"]),
        (200, (writer, "sync_folder"), ["step-000100"]),
        (
            200,
            (writer, "_retire"),
            ["step-000100", "step-000200"],
        ),  # published, before the old one is removed
        (200, (writer.shutil, "rmtree"), ["step-000200"]),  # while the old one is removed
        (100, (writer.shutil, "rmtree"), ["step-000100"]),  # while a replaced one is removed
    ],
)
def test_a_crash_is_never_seen_and_swept_at_the_next_save(folder, step, moment, left):
    child = _fork.Process(target=_dies, args=(folder, step, moment))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 9
    assert sorted(path.name for path in folder.glob("step-*")) == left
    assert any(path.name.startswith(".") for path in folder.iterdir()) or len(left) == 2
    assert checkpoint.latest_step(folder) == int(left[-1][-3:])
    checkpoint.load_checkpoint(folder, None, [whole_shard("w", torch.zeros(2, 3))])
    for again in (step, 300):
        checkpoint.save_checkpoint(
            folder, again, [whole_shard("w", torch.ones(2, 3))], {}, {}, keep=Retention(9)
        )
    expected = {*left, f"step-{step:06d}", "step-000300"}
    assert {path.name for path in folder.iterdir()} == expected


def data_file(folder):
    (path,) = (folder / "step-000100").glob("*.safetensors")
    return path


def test_a_truncated_file_is_refused(folder):
    path = data_file(folder)
    path.write_bytes(path.read_bytes()[:-4])
    message = refused(folder)
    assert path.name in message and "bytes where" in message


def test_a_flipped_byte_anywhere_is_refused(folder):
    path = data_file(folder)
    good = path.read_bytes()
    for position in (0, 20, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        message = refused(folder)
        assert path.name in message and "checksum" in message
    path.write_bytes(good)
    checkpoint.load_checkpoint(folder, None, [whole_shard("w", torch.zeros(2, 3))])


def test_every_flipped_byte_of_the_index_is_refused(folder):
    path = folder / "step-000100" / "index.json"
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert "index.json" in refused(folder)
    for length in (0, 1, len(good) - 1):
        path.write_bytes(good[:length])
        assert "index.json" in refused(folder)


def test_a_missing_file_is_refused(folder):
    path = data_file(folder)
    path.unlink()
    message = refused(folder)
    assert path.name in message and "the file is missing" in message


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": {}, "metadata": {}}', "null", "\udc80", "not json"]
)
def test_an_index_of_another_program_is_refused(folder, text):
    (folder / "step-000100" / "index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    message = refused(folder)
    assert "not the index of a weft checkpoint" in message and "index.json" in message


def sign(path, change):
    """Change an index and give it the right checksum, as somebody who means harm would."""
    index = json.loads(path.read_text())
    head = {key: index.pop(key) for key in ("format", "version", "crc32")}
    change(index, head)
    head["crc32"] = crc32(json.dumps(index).encode())
    path.write_text(json.dumps({**head, **index}))


def test_a_later_version_a_path_out_of_the_folder_and_a_hole_are_refused(folder):
    path = folder / "step-000100" / "index.json"
    good = path.read_text()
    sign(path, lambda index, head: None)
    checkpoint.load_checkpoint(folder, None, [])  # the forger signs well

    sign(path, lambda index, head: head.update(version=2))
    assert "version 2" in refused(folder)

    path.write_text(good)
    sign(
        path,
        lambda index, head: index["tensors"]["w"]["chunks"][0].__setitem__(
            0, "../../other.safetensors"
        ),
    )
    assert "names a file '../../other.safetensors'" in refused(folder)

    path.write_text(good)
    sign(path, lambda index, head: index["tensors"]["w"].update(chunks=[]))
    assert "'w'" in refused(folder)

    path.write_text(good)
    sign(path, lambda index, head: index["tensors"]["w"].update(dtype="load"))
    assert "not the index of a weft checkpoint" in refused(folder)


def test_a_folder_without_checkpoints_and_a_step_that_is_absent(folder, tmp_path):
    assert checkpoint.latest_step(tmp_path / "nowhere") is None
    assert "no complete checkpoint" in refused(tmp_path / "nowhere")
    assert "checkpoint.every" in refused(tmp_path / "nowhere")
    message = refused(folder, step=7)
    assert "step 7" in message and "[100]" in message
    shutil.copytree(folder / "step-000100", folder / "step-000101")
    assert "step 100" in refused(folder)
    (folder / "step-000101" / "index.json").unlink()
    (folder / "step-best").mkdir()
    assert checkpoint.latest_step(folder) == 100


def test_names_shapes_and_dtypes_that_differ_are_refused(folder):
    live = torch.full((2, 3), -1.0)
    first = whole_shard("w", live)
    assert "'missing'" in refused(folder, None, [first, whole_shard("missing", torch.zeros(1))])
    message = refused(folder, None, [first, whole_shard("b", torch.zeros(4))])
    assert "'b'" in message and "(4,)" in message and "(3,)" in message
    message = refused(folder, None, [first, whole_shard("b", torch.zeros(3, dtype=torch.float64))])
    assert "torch.float64" in message and "torch.float32" in message
    assert (live == -1).all()


def test_nothing_is_pickled(folder):
    assert {path.suffix for path in (folder / "step-000100").iterdir()} == {".json", ".safetensors"}


# ---- beside training -----------------------------------------------------------------------------


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """Training goes on in the same memory while files are written; errors come with the next
    call."""
    go, write = threading.Event(), writer.write_shards

    def slow(*args):
        assert go.wait(10)
        return write(*args)

    monkeypatch.setattr(writer, "write_shards", slow)
    saver, weight = checkpoint.AsyncCheckpointer(), torch.ones(3)
    for step in (1, 2):
        go.clear()
        threading.Timer(0.2, go.set).start()  # the second save waits for the first one
        saver.save(tmp_path, step, [whole_shard("w", weight)], {}, {}, Retention(5))
        assert checkpoint.latest_step(tmp_path) == (step - 1 or None)
        weight += 1.0
    saver.wait()
    for step in (1, 2):
        found = torch.zeros(3)
        checkpoint.load_checkpoint(tmp_path, step, [whole_shard("w", found)])
        assert found.tolist() == [step] * 3
    saver.save(
        tmp_path,
        3,
        [whole_shard("w", weight)],
        {},
        {},
        Retention(5),
        unless=lambda pieces: "no good",
    )
    with pytest.raises(WeftError, match="no good"):
        saver.wait()
    saver.save(tmp_path / "x", 3, [whole_shard("w", weight)], {}, {}, Retention(0))
    with pytest.raises(CheckpointError, match="keep at least 1"):
        saver.save(tmp_path, 4, [whole_shard("w", weight)], {}, {}, Retention(5))
    assert checkpoint.latest_step(tmp_path) == 2


def test_some_are_kept_beside_the_last_ones(tmp_path):
    for step in range(1, 11):
        checkpoint.save_checkpoint(tmp_path, step, [], {}, {}, Retention(2, every=4))
    assert checkpoint.saved_steps(tmp_path) == [4, 8, 9, 10]


def beside(rank, world, folder):
    saver, weight = checkpoint.AsyncCheckpointer(), torch.full((2,), float(rank))
    pieces = [
        LocalShard(
            "w", weight, (2 * world,), (((slice(0, 2),), (slice(2 * rank, 2 * rank + 2),)),), True
        )
    ]
    saver.save(folder, 1, pieces, {}, {}, Retention(1))
    for _ in range(20):  # collectives of training meanwhile, in no order with those of the save
        dist.all_reduce(weight)
    saver.wait()
    saver.save(
        folder,
        2,
        pieces,
        {},
        {},
        Retention(2),
        unless=lambda held: "rank 1 says no" if rank == 1 else None,
    )
    with pytest.raises(WeftError, match="rank 1 says no"):
        saver.wait()


def test_ranks_save_together_beside_collectives_of_training(tmp_path):
    ranks(tmp_path, 4, beside, tmp_path / "saved")
    found = torch.zeros(8)
    checkpoint.load_checkpoint(tmp_path / "saved", None, [whole_shard("w", found)])
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
