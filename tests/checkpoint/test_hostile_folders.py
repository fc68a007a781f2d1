"""Run folders that somebody else wrote, or broke: each ends in one error of weft's that names the
file, soon, and nothing outside of the folder is touched.

FUZZ=100000 takes so many changes; a few hundred go with every run of the tests.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from weft import checkpoint
from weft.callbacks import Callbacks, Csv
from weft.checkpoint import (
    CheckpointReader,
    Retention,
    describe_checkpoint,
    engine_files,
    listing_text,
)
from weft.core import files
from weft.core.errors import CheckpointError, ConfigError, DamagedCheckpoint, WeftError
from weft.core.run_config import load_run
from weft.core.shards import whole_shard
from weft.nn.weight_files import file_tensors
from weft.train import metrics, run_folder, tokenizer
from weft.train.run_lock import run_lock
from weft.train.step_profiler import StepProfiler

COUNT = int(os.environ.get("FUZZ", "500"))
SOON_S = 5.0  # far more than any takes, and far less than one that waits
SCALARS = {"steps_done": 20, "loss_scale": 1.0, "good_steps": 0, "batch": 8, "seed": 0}
SCALARS |= {"batches_left_out": 0, "losses": [1.5], "norms": [0.5]}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 62, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), "", "x"),
    *([], {}, [[]], [0, 1], {"": 0}, "float8", "load", "../../etc/passwd", "\x1b[2J\x07", "\u202e"),
    *(["rank-00000-000.safetensors", [[0, 1]], [[0, 1]]], [[[0, 3]]], [1] * 100),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    torch.manual_seed(0)
    state = {f"layers.{i}": torch.randn(7, 5) for i in range(3)} | {"step": torch.tensor(3)}
    pieces = [whole_shard(name, tensor) for name, tensor in state.items()]
    folder = tmp_path / "run" / "checkpoints"
    checkpoint.save_checkpoint(folder, 20, pieces, SCALARS, {"layout": "dp1"}, Retention(1))
    return tmp_path / "run"


def sign(index: dict[str, Any]) -> bytes:
    """An index with the right checksum, as somebody who means harm would write it."""
    body = {key: index[key] for key in index if key not in ("format", "version", "crc32")}
    head = {"format": "weft checkpoint", "version": 1, "crc32": crc32(json.dumps(body).encode())}
    return json.dumps({**head, **body}).encode()


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all that is in a value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    inner = [value[key] for key in keys if isinstance(value[key], dict | list)]
    return found + [place for each in inner for place in places(each)]


def change(index: dict[str, Any], dice: random.Random) -> None:
    """Something in it is another value, is lost, has another name, or stands twice."""
    for _ in range(dice.randint(1, 3)):
        container, key = dice.choice(places(index))
        kind = dice.randrange(4)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[dice.choice(["", "w", "../w", "\x1b[31m", "\n", "a/b"])] = container.pop(key)
        elif kind == 2 and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        else:
            container[key] = deepcopy(dice.choice(VALUES))


def read_all(run: Path) -> None:
    """As every command that reads a run folder does."""
    folder = run / "checkpoints"
    found = describe_checkpoint(run, None)
    text = listing_text(found, tensors=True)
    assert files.printable(text, "\n") == text
    json.dumps(found)
    contents = checkpoint.read_index(folder)
    run_folder.loop_state(contents.scalars)
    with CheckpointReader(checkpoint.checkpoint_path(folder, contents.step), contents) as reader:
        reader.check()
        for name in contents.tensors:
            reader.read_tensor(name)
    checkpoint.load_checkpoint(folder, None, [])


def refused(read: Callable[[], object], kind: type[WeftError] = WeftError) -> str:
    """What is said, at once."""
    since = time.monotonic()
    with pytest.raises(kind) as found:
        read()
    assert time.monotonic() - since < SOON_S
    said = str(found.value)
    assert files.printable(said, "\n\t") == said
    return said


def survives(read: Callable[[], object], what: object) -> bool:
    """Whether it was read."""
    since = time.monotonic()
    try:
        read()
        return True
    except WeftError as error:
        assert files.printable(str(error), "\n\t") == str(error)
        return False
    except BaseException as error:  # what it must not be
        raise AssertionError(f"{type(error).__name__}: {error}, for\n{what!r}") from error
    finally:
        assert time.monotonic() - since < SOON_S, what


def test_an_index_that_is_signed_and_wrong(run: Path) -> None:
    path = run / "checkpoints" / "step-000020" / "index.json"
    right, dice = path.read_text(), random.Random(0)
    read_all(run)
    taken = 0
    for _ in range(COUNT):
        index = json.loads(right)
        change(index, dice)
        path.write_bytes(sign(index))
        taken += survives(lambda: read_all(run), path.read_bytes())
    assert taken < COUNT / 2  # what is read are other scalars and meta data


def test_safetensors_that_are_signed_and_wrong(run: Path) -> None:
    folder = run / "checkpoints" / "step-000020"
    path, dice = folder / "rank-00000-000.safetensors", random.Random(1)
    right, index = path.read_bytes(), json.loads((folder / "index.json").read_text())
    length = int.from_bytes(right[:8], "little")
    for number in range(COUNT):
        header = json.loads(right[8 : 8 + length])
        change(header, dice)
        text = json.dumps(header).encode()
        size = len(text) if number % 10 else dice.choice([0, 1 << 60, 1 << 63, len(text) * 1000])
        data = size.to_bytes(8, "little") + text + right[8 + length :]
        path.write_bytes(data)
        index["files"] = {path.name: [len(data), crc32(data)]}
        (folder / "index.json").write_bytes(sign(index))
        survives(lambda: read_all(run), data)
        survives(lambda: file_tensors([path]), data)


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": ' + b"[" * 100_000,
        b'{"format": ' + b'{"a":' * 100_000,
        b'{"format": ' + b"9" * 100_000 + b"}",
        b'{"format": "\xff\xfe"}',
        b"",
        b"\0" * 1000,
    ],
    ids=["lists", "tables", "digits", "utf-8", "empty", "zeros"],
)
def test_an_index_that_is_no_json(run: Path, text: bytes) -> None:
    (run / "checkpoints" / "step-000020" / "index.json").write_bytes(text)
    assert "index.json" in refused(lambda: read_all(run), DamagedCheckpoint)


def test_scalars_that_are_nested_deeply(run: Path) -> None:
    path = run / "checkpoints" / "step-000020" / "index.json"
    index, deep = json.loads(path.read_text()), []
    for _ in range(200):
        deep = [deep]
    index["scalars"]["more"] = deep
    path.write_bytes(sign(index))
    assert "too deeply" in refused(lambda: read_all(run), DamagedCheckpoint)


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    path.mkdir()


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_link(path: Path) -> None:
    target = path.parents[3] / "elsewhere"
    target.write_text("of somebody else")
    path.symlink_to(target)


def put_huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # of no blocks


THINGS = (put_pipe, put_device, put_folder, put_loop, put_link, put_huge)


@pytest.mark.parametrize("name", ["index.json", "rank-00000-000.safetensors"])
@pytest.mark.parametrize("put", THINGS, ids=lambda put: put.__name__)
def test_other_things_in_the_place_of_files(
    run: Path, name: str, put: Callable[[Path], None]
) -> None:
    path = run / "checkpoints" / "step-000020" / name
    path.unlink()
    put(path)
    said = refused(lambda: read_all(run), CheckpointError)
    assert name in said or (name == "index.json" and put is put_loop)  # a loop is no file


@pytest.mark.parametrize("put", THINGS, ids=lambda put: put.__name__)
def test_other_things_in_the_place_of_weights_and_of_texts(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    path = tmp_path / "a" / "b" / "c" / "thing"
    path.parent.mkdir(parents=True)
    put(path)
    refused(lambda: file_tensors([path]), CheckpointError)
    assert "thing" in refused(lambda: load_run(path), ConfigError)
    if put is not put_huge:  # as large as the tokenizers library lets it be
        pytest.importorskip("tokenizers")
        assert "thing" in refused(lambda: tokenizer.load_tokenizer(path))
    if put not in (put_loop, put_link):
        assert "thing" in refused(lambda: metrics.keep_until(path, 3), ConfigError)


def test_names_are_shown_and_not_obeyed(run: Path) -> None:
    path = run / "checkpoints" / "step-000020" / "index.json"
    index = json.loads(path.read_text())
    evil = "\x1b]0;owned\x07\n\u202ew"
    index["tensors"][evil] = index["tensors"].pop("step") | {"chunks": []}
    path.write_bytes(sign(index))
    said = refused(lambda: read_all(run), DamagedCheckpoint)
    assert "\\x1b]0;owned\\x07" in said and "\n" not in said

    index["tensors"][evil] = {"shape": [0], "dtype": "float32", "chunks": []}
    del index["tensors"][evil]
    index["meta"] = {evil: evil}
    path.write_bytes(sign(index))
    lines = listing_text(describe_checkpoint(run, None), True)
    assert "\x1b" not in lines and "\u202e" not in lines and "\\x1b]0;owned\\x07\\n" in lines


def test_a_folder_that_has_another_steps_name_is_refused(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-000020").rename(folder / "step-000030")
    said = refused(lambda: read_all(run), DamagedCheckpoint)  # a run that resumes sets it aside
    assert "is the index of step 20" in said and "step-000020" in said
    (folder / "step-000030").rename(folder / "step-0000020")  # not as weft writes it
    assert checkpoint.saved_steps(folder) == []


def test_an_engine_that_had_taken_other_steps_is_refused(run: Path) -> None:
    folder = run / "checkpoints"
    path = folder / "step-000020" / "index.json"
    index = json.loads(path.read_text())
    engine: Any = None  # refused before it is touched
    for done in (30, "20", None, float("nan"), True):
        index["scalars"]["steps_done"] = done
        path.write_bytes(sign(index))
        said = refused(partial(engine_files.fill_engine, engine, folder, None), CheckpointError)
        assert "steps_done" in said


class FakeEngine:
    """As much of an engine as a logger and a profiler need."""

    steps_done, mesh, trace = 1, SimpleNamespace(device=torch.device("cpu")), None


def test_nothing_is_written_through_a_link(run: Path) -> None:
    victim = run.parent / "victim"
    victim.write_text("precious")
    names = (".lock", ".run.toml.partial", "run.toml", "metrics.jsonl", "metrics.csv")
    for name in (*names, ".metrics.csv.partial", "metrics.partial", ".profile.json-0"):
        (run / name).symlink_to(victim)
    one: Any = FakeEngine()
    with run_lock(str(run), make=True):
        files.replace_file(run / "run.toml", "mine")
    metrics.Metrics(run, 0).write({"step": 1, "loss": 2.0})
    with Callbacks([Csv()], one, folder=run) as callbacks:
        callbacks.log({"loss": 2.0})
    profiler = StepProfiler(one, range(1, 2))
    with profiler.step(1):
        torch.ones(2)
    assert profiler.finish(run) is not None
    assert victim.read_text() == "precious"
    assert (run / "metrics.csv").read_text() == "step,loss\n1,2.0\n"
    assert not [*run.glob(".profile*")]
    assert (run / "run.toml").read_text() == "mine" and not (run / "run.toml").is_symlink()
    assert json.loads((run / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    (run / "later").symlink_to(victim)  # put there while the run writes
    with pytest.raises(OSError):
        files.append_file(run / "later", "mine")
    shutil.rmtree(run)
