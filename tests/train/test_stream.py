"""Iterables as training data: one order on every layout, and on from any step."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.run_files import TINY
from weft.checkpoint import load_checkpoint, read_index
from weft.core import Refusal, RunConfig, data_rank_indices, whole_shard
from weft.core.run_config import load_run
from weft.launch.local_workers import Pool
from weft.train import build_data, run_checks, run_folder
from weft.train.sample_stream import Stream, fingerprint
from weft.train.stream_loader import StreamLoader
from weft.train.token_stream import stream
from weft.train.trainer import train

BATCH = 4
WORDS = [f"row {number} says {'la ' * (number % 7)}{number * number}" for number in range(150)]


@dataclass
class Counting:
    """Numbers below `size`, and on from a state; each pass begins at another one."""

    size: int = 50
    read: list[int] = field(default_factory=list)
    place: int = 0
    shift: int = 0

    def set_epoch(self, number: int) -> None:
        self.shift = 100 * number

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.place < self.size:
            self.place += 1
            self.read.append(self.place - 1)
            yield {"x": self.place - 1 + self.shift}


class Forgetful(Counting):
    """Its state lacks the items that it holds back, as that of a shuffle buffer does."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        items = super().__iter__()
        held = list(islice(items, 7))
        while held:
            yield held.pop(0)
            held += islice(items, 1)


def numbers(size: int = 50) -> Iterator[dict[str, Tensor]]:
    return ({"x": torch.tensor(number)} for number in range(size))


def numbers_from(first: int) -> Iterator[dict[str, int]]:
    return ({"x": first + number} for number in range(50))


def loader(open: Callable[[], Any] = Counting, **options: Any) -> StreamLoader:
    return StreamLoader(Stream(open), **{"batch": BATCH, "seed": 3, **options})


def take(loader: StreamLoader, steps: int) -> list[list[int]]:
    return [batch["x"].tolist() for batch in islice(loader, steps)]


# ---- order ---------------------------------------------------------------------------------------


def test_without_a_buffer_the_order_is_the_streams_own() -> None:
    steps = take(loader(numbers), 13)  # 12 to the pass, and two samples are left over
    assert list(chain(*steps)) == [*range(48), *range(4)]
    assert take(loader(), 13)[12] == [100, 101, 102, 103]  # of the next pass


def test_blocks_are_shuffled_each_in_its_own_way() -> None:
    steps = take(loader(numbers, shuffle_buffer=10), 24)
    blocks = [list(chain(*steps[at : at + 3])) for at in range(0, 12, 3)]  # 10 are three batches
    for number, block in enumerate(blocks):
        assert sorted(block) == list(range(12 * number, 12 * number + 12)) != block
    orders = [[place - 12 * number for place in block] for number, block in enumerate(blocks)]
    assert len({tuple(order) for order in orders}) == 4
    assert steps[:12] != steps[12:] and sorted(map(sorted, steps[:3])) != sorted(
        map(sorted, steps[12:15])
    )
    assert steps == take(loader(numbers, shuffle_buffer=10), 24)
    assert steps != take(loader(numbers, shuffle_buffer=10, seed=4), 24)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("buffer", [0, 10])
def test_ranks_have_their_part_of_the_same_batches(accumulate: int, buffer: int) -> None:
    whole = take(loader(shuffle_buffer=buffer), 30)
    for rank in range(2):
        mine = data_rank_indices(BATCH, accumulate, rank, 2)
        part = loader(shuffle_buffer=buffer, accumulate=accumulate, data_rank=rank, data_size=2)
        assert take(part, 30) == [[step[place] for place in mine] for step in whole]


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("open", [Counting, numbers, Forgetful])
@pytest.mark.parametrize("buffer", [0, 10, 100])
def test_a_loader_goes_on_where_another_stopped(open: Callable[[], Any], buffer: int) -> None:
    whole = take(loader(open, shuffle_buffer=buffer), 40)
    for stop in random.Random(buffer).sample(range(40), 8):
        first = loader(open, shuffle_buffer=buffer)
        take(first, stop)
        options = {"shuffle_buffer": buffer, "start": stop, "position": first.position()}
        assert take(loader(open, **options), 40 - stop) == whole[stop:]
        ranks = [loader(open, data_rank=rank, data_size=2, **options) for rank in range(2)]
        both = [a + b for a, b in zip(*(take(rank, 40 - stop) for rank in ranks), strict=True)]
        assert both == whole[stop:]


def test_a_state_spares_reading_all_again() -> None:
    first, made = loader(), list[Counting]()

    def open() -> Counting:
        made.append(Counting())
        return made[-1]

    take(first, 9)
    assert take(loader(open, start=9, position=first.position()), 1) == [[36, 37, 38, 39]]
    assert min(chain(*(each.read for each in made))) == 32  # the block of the last batch


def test_a_step_further_on_or_back_is_as_if_read_to_there() -> None:
    one, whole = loader(shuffle_buffer=10), take(loader(shuffle_buffer=10), 30)
    for step in (5, 20, 3, 29):
        one.step = step
        assert take(one, 1) == [whole[step]]


def test_other_samples_than_those_of_the_stopped_run_are_refused() -> None:
    first = loader()
    take(first, 5)
    with pytest.raises(Refusal, match="other samples there than it had when the run was stopped"):
        take(loader(lambda: numbers_from(1), start=5, position=first.position()), 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1}', None, "[" * 9999])
def test_a_position_that_is_none_is_refused(text: Any) -> None:
    position = loader().position() if text is None else text
    with pytest.raises(Refusal, match="data"):
        loader(position=position, shuffle_buffer=8)


def test_equal_items_have_the_same_fingerprint() -> None:
    items = [{"a": torch.ones(2), "b": ["x", None, 1.5]}, (torch.tensor(1.0).bfloat16(), object())]
    again = [{"a": torch.ones(2), "b": ["x", None, 1.5]}, (torch.tensor(1.0).bfloat16(), object())]
    assert fingerprint(items) == fingerprint(again)
    others: list[Any] = [[{"a": torch.zeros(2)}], [{"a": torch.ones(2).double()}], [{"b": 1}], [1]]
    assert len({fingerprint(each) for each in [items, *others]}) == 5


# ---- text ----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        rows = [json.dumps({"text": word}) for word in WORDS[50 * number : 50 * number + 50]]
        (tmp_path / f"part{number}.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "part*.jsonl")


def test_windows_are_those_of_the_rows_in_their_order(files: str) -> None:
    rows = [row for number, row in enumerate(WORDS) if number % 20 != 19]
    tokens = list("\n".join([*rows, ""]).encode())
    found = list(stream(files, 16, end="\n"))
    assert len(found) == (len(tokens) - 1) // 16
    for number, sample in enumerate(found):
        start = 16 * number
        assert sample["input_ids"].tolist() == tokens[start : start + 16]
        assert sample["labels"].tolist() == tokens[start + 1 : start + 17]
    val = b"".join(bytes(s["input_ids"].tolist()) for s in stream(files, 4, "val"))
    assert "".join(WORDS[19::20]).encode().startswith(val)


def test_windows_go_on_from_their_state(files: str) -> None:
    whole = list(stream(files, 16))
    for stop in random.Random(1).sample(range(1, len(whole)), 6):
        first, second = stream(files, 16), stream(files, 16)
        for _ in islice(first, stop):
            pass
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = list(second)
        assert fingerprint(rest) == fingerprint(whole[stop:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"paths": "no*.jsonl"}, "stream = 'no.*no file matches"),
        ({"paths": __file__}, r"files end in .py. Give files of one of .jsonl"),
        ({"column": "txt"}, "column = 'txt': is not a column of text.*mean \"text\""),
        ({"end": "<end>"}, "end = '<end>': is not one token"),
        ({"seq_len": 0}, "seq_len = 0: is not a number of tokens"),
        ({"split": "valid"}, "split = 'valid'"),
    ],
)
def test_text_that_cannot_be_read_is_refused(
    files: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refusal, match=says):
        stream(**{"paths": files, **arguments})


def test_a_row_without_text_is_empty(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in (None, "one two ", None, "three four five")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    found = list(stream(str(tmp_path / "rows.jsonl"), 4))
    text = b"".join(bytes(sample["input_ids"].tolist()) for sample in found)
    assert b"one two three four five".startswith(text) and len(text) > 16


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"text": ["a"]}', "cannot be read|holds list"),
        ('{"txt": "a"}', "column = 'text': is missing in a row|cannot be read"),
        ('{"text": "a', "cannot be read"),
    ],
)
def test_a_later_file_that_cannot_be_read_is_refused(files: str, row: str, says: str) -> None:
    (Path(files).parent / "part9.jsonl").write_text(row)
    windows = stream(files, 16)
    with pytest.raises(Refusal, match=says):
        list(windows)


def test_a_state_holds_where_a_restored_pass_began(tmp_path: Path) -> None:
    """Within a long row, of which several windows are read after it was restored."""
    rows = [json.dumps({"text": word * 30}) for word in WORDS[:9]]
    (tmp_path / "long.jsonl").write_text("\n".join(rows))
    first, second, third = (stream(str(tmp_path / "long.jsonl"), 16) for _ in range(3))
    list(islice(first, 99))
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    list(islice(second, 1))
    again = json.loads(json.dumps(second.state_dict()))
    assert again["row"] == state["row"] > 0 and again["rows"] == state["rows"]
    third.load_state_dict(again)
    whole = list(stream(str(tmp_path / "long.jsonl"), 16))
    assert fingerprint(list(third)) == fingerprint(whole[100:])


def test_a_state_of_another_iterable_is_none() -> None:
    first = loader()
    take(first, 5)
    position = json.loads(first.position())
    position["state"] = {"counts": [1, 2]}  # for which Counting raises KeyError
    again = loader(start=5, position=json.dumps(position))
    assert take(again, 3) == take(first, 3)


# ---- runs ----------------------------------------------------------------------------------------


def make_run(folder: Path, files: str, **keys: str) -> RunConfig:
    """TINY on these files, in float64, with a checkpoint after each step."""
    text = TINY.replace('build = "weft.data:stdlib"', f'stream = ["{files}"]')
    (folder / "run.toml").write_text(text.replace("max_bytes = 100000\n", ""))
    every = {"train.steps": "9", "train.log_every": "1", "checkpoint.every": "1"}
    every |= {"checkpoint.keep": "20", "precision.compute": '"fp64"', "data.shuffle_buffer": "20"}
    return load_run(folder / "run.toml", every | keys)


def weights(run: RunConfig) -> dict[str, Tensor]:
    folder = Path(run.output) / "checkpoints"
    contents = read_index(folder, run.train.steps)
    tensors = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in contents.tensors.items()}
    shards = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    load_checkpoint(folder, run.train.steps, shards)
    return tensors


def test_a_stopped_run_is_the_whole_one_bit_for_bit_and_on_more_ranks(
    tmp_path: Path, files: str, pool: Pool
) -> None:
    whole = make_run(tmp_path, files, output=f'"{tmp_path}/whole"')
    run_checks.check_run(whole)
    train(whole, False)
    stop = random.Random(7).randrange(2, 8)
    runs = []
    for axes, world in (("dp1", 1), ("dp2", 2)):
        keys = {"output": f'"{tmp_path}/{axes}"', "layout.axes": f'"{axes}"'}
        shutil.copytree(whole.output, tmp_path / axes)
        for step in range(stop + 1, 10):
            shutil.rmtree(tmp_path / axes / "checkpoints" / f"step-{step:06}")
        runs.append(make_run(tmp_path, files, **keys))
        pool.run(train, runs[-1], True, world=world)
    same, other = map(weights, runs)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, same[name]), name
        assert (tensor - other[name]).norm() <= 1e-9 * tensor.norm(), name
    with pytest.raises(Refusal, match=r"Resume with data.shuffle_buffer = 20"):
        run_folder.check_output(
            runs[0].model_copy(
                update={"data": runs[0].data.model_copy(update={"shuffle_buffer": 3})}
            ),
            True,
        )


ITERABLES = """
import random
import torch
from torch.utils.data import DataLoader, IterableDataset

def rows(count=40):
    for number in range(count):
        ids = (torch.arange(17) + number) % 256
        yield {"input_ids": ids[:-1], "labels": ids[1:]}

def unseeded():
    return ({"input_ids": torch.randint(256, (16,)), "labels": r["labels"]} for r in rows())

def batches():
    return DataLoader(list(rows()), batch_size=4)

class Stated:
    def __init__(self, state):
        self.state = eval(state)
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        pass
    def __iter__(self):
        return rows()

class OfTorch(IterableDataset):
    def __len__(self):
        return 40
    def __iter__(self):
        return rows()
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iterables_of_stream_test.py").write_text(ITERABLES)

    def made(build: str, **keys: str) -> RunConfig:
        table = f'{{ build = "iterables_of_stream_test:{build}", '
        (tmp_path / "run.toml").write_text(TINY)
        table += "".join(f"{key} = {value}, " for key, value in keys.pop("data", {}).items())  # type: ignore[attr-defined]
        return load_run(tmp_path / "run.toml", {"data": table.removesuffix(", ") + " }", **keys})

    return made


@pytest.mark.parametrize(
    ("build", "data", "says"),
    [
        ("rows", {"count": 0}, "data.build = '.*rows': gives no sample"),
        ("rows", {"count": 5}, "train.batch = 8: the split 'train' has 5 samples.*Use at most 5"),
        ("unseeded", {}, "gives other samples when it is read again.*Give its random choices a se"),
        ("batches", {}, "returns batches of 4, .*batch_size=None"),
        ("Stated", {"state": '"object()"'}, "state_dict that JSON does not hold"),
        ("Stated", {"state": '"{1: 2}"'}, "state_dict that JSON does not give back"),
        ("rows", {"shuffle_buffer": -1}, "data.shuffle_buffer = -1: must be"),
    ],
)
def test_an_iterable_that_cannot_be_trained_on_is_refused(
    tiny: Callable[..., RunConfig], build: str, data: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refusal, match=says) as found:
        run_checks.check_run(tiny(build, data=data))
    assert "\n" not in str(found.value)


def test_a_map_style_dataset_has_no_buffer(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    with pytest.raises(Refusal, match=r"data.shuffle_buffer = 9: is for iterables"):
        build_data.build_dataset(load_run(tmp_path / "run.toml", {"data.shuffle_buffer": "9"}))


class Slow:
    """Rows, of which one takes long on rank 0: the place, and each validation's first."""

    def __init__(self, place: int):
        self.place = place

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(80):
            if number == self.place and dist.is_initialized() and dist.get_rank() == 0:
                time.sleep(5)
            ids = torch.arange(17) + number
            yield {"input_ids": ids[:-1], "labels": ids[1:]}


def slow(split: str = "train") -> Slow:
    return Slow(0 if split == "val" else 30)


def no_more_than_a_batch(split: str = "train") -> Iterator[dict[str, Tensor]]:
    """Rows, of which a validation may read 8."""
    for number in range(80):
        assert split == "train" or number < 8
        ids = torch.arange(17) + number
        yield {"input_ids": ids[:-1], "labels": ids[1:]}


def test_a_validation_reads_no_shuffle_buffer(tmp_path: Path) -> None:
    ours = TINY.replace("weft.data:stdlib", "tests.train.test_stream:no_more_than_a_batch")
    ours = ours.replace("seq_len = 16\nmax_bytes = 100000\n", "shuffle_buffer = 64\n")
    (tmp_path / "run.toml").write_text(ours)
    keys = {"output": f'"{tmp_path}/run"', "train.eval_every": "1", "train.eval_batches": "1"}
    train(load_run(tmp_path / "run.toml", keys), False)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count("val_loss") == 2  # of as many steps


def test_reading_that_takes_long_is_no_hang(tmp_path: Path, pool: Pool) -> None:
    ours = TINY.replace("weft.data:stdlib", "tests.train.test_stream:slow")
    ours = ours.replace("seq_len = 16\nmax_bytes = 100000\n", "")
    (tmp_path / "run.toml").write_text(ours)
    keys = {
        "output": f'"{tmp_path}/run"',
        "layout.axes": '"dp2"',
        "train.hang_s": "3",
        "train.steps": "9",
        "train.eval_every": "8",
    }
    run = load_run(tmp_path / "run.toml", keys | {"train.eval_batches": "1"})
    pool.run(train, run, False, world=2)


def test_epochs_need_a_length(tiny: Callable[..., RunConfig]) -> None:
    tiny("rows")
    text = TINY.replace("steps = 2", "epochs = 2")
    run = Path("run.toml")
    run.write_text(text)
    table = '{{ build = "iterables_of_stream_test:{}" }}'.format
    with pytest.raises(Refusal, match=r"train.epochs = 2.0: \[data\] names an iterable.*set|Set"):
        build_data.count_steps(load_run(run, {"data": table("rows")}))
    assert build_data.count_steps(load_run(run, {"data": table("OfTorch")})).train.steps == 10


def test_a_data_loader_of_torch_gives_samples() -> None:
    class Numbers(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter([{"x": number} for number in range(20)])

    assert take(loader(lambda: DataLoader(Numbers(), batch_size=None)), 2) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
