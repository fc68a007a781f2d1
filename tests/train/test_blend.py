"""Blends: their proportions, and that they go on where they stopped on any layout."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run_files import TINY
from tests.train.test_stream import Counting, Forgetful, loader, take
from weft.core import Refusal
from weft.core.run_config import load_run
from weft.train import build_data
from weft.train.blend import Blend
from weft.train.sample_stream import Stream


class Rows:
    """Samples of a source: numbers from `first`."""

    def __init__(self, first: int, size: int):
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.first + index)}


def blend(weights: tuple[float, ...] = (6, 3, 1), seed: int = 3) -> Blend:
    sources = Rows(1000, 30), Stream(Counting), Stream(Forgetful)
    return Blend(sources[: len(weights)], weights, seed)


def values(made: Blend, count: int) -> list[int]:
    return [int(made.sample(item)["x"]) for item in islice(made, count)]


@pytest.mark.parametrize("weights", [(6, 3, 1), (0.5, 0.5, 0.001), (1, 7), (2,)])
def test_every_part_of_the_order_has_the_proportions(weights: tuple[float, ...]) -> None:
    order = [number for number, _ in islice(blend(weights), 3000)]
    counts = Counter[int]()
    for place, number in enumerate(order, 1):
        counts[number] += 1
        for source, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(counts[source] - share * place) < len(weights)
    assert [round(counts[s] / 3000, 2) for s in range(len(weights))] == [
        round(w / sum(weights), 2) for w in weights
    ]


def test_a_source_is_gone_through_in_another_order_each_time() -> None:
    found = values(blend((1,)), 90)
    passes = [found[at : at + 30] for at in (0, 30, 60)]
    assert [sorted(each) for each in passes] == [list(range(1000, 1030))] * 3
    assert passes[0] != passes[1] != passes[2] and passes[0] != sorted(passes[0])
    assert found == values(blend((1,)), 90) != values(blend((1,), seed=4), 90)
    mixed = values(blend((1, 1)), 300)
    assert [x for x in mixed if x < 1000 and x % 100 == 0] == [0, 100, 200]  # passes of the stream


@pytest.mark.parametrize("buffer", [0, 10])
def test_it_goes_on_where_it_stopped_and_on_more_ranks(buffer: int) -> None:
    def made(**options: Any) -> Any:
        one = loader(blend, shuffle_buffer=buffer, **options)
        one.stream = Stream(blend, sample=blend().sample)
        return one

    whole = take(made(), 60)
    for stop in random.Random(buffer).sample(range(60), 6):
        first = made()
        take(first, stop)
        options = {"start": stop, "position": first.position()}
        assert take(made(**options), 60 - stop) == whole[stop:]
        ranks = [take(made(data_rank=rank, data_size=2, **options), 60 - stop) for rank in range(2)]
        assert [a + b for a, b in zip(*ranks, strict=True)] == whole[stop:]


def test_a_stream_of_a_blend_goes_on_from_its_state() -> None:
    read: list[Counting] = []

    def open() -> Counting:
        read.append(Counting(size=1000))
        return read[-1]

    first = Blend([Stream(open)], [1], 0)
    assert values(first, 500)[-1] == 499
    state = json.loads(json.dumps(first.state_dict()))
    second = Blend([Stream(open)], [1], 0)
    second.load_state_dict(state)
    assert values(second, 2) == [500, 501] and min(read[-1].read) == 499


@pytest.mark.parametrize("stop", [1, 7, 40])
def test_a_blend_goes_on_from_its_own_state(stop: int) -> None:
    whole, first, second = values(blend(), 100), blend(), blend()
    values(first, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert values(second, 100 - stop) == whole[stop:]


@pytest.mark.parametrize("weights", [(6, 3), (6, 3, 2), (3, 6, 1)])
def test_a_state_of_other_sources_is_refused(weights: tuple[float, ...]) -> None:
    first = blend()
    values(first, 9)
    with pytest.raises(Refusal, match=r"data.blend.*other sources or weights than it had"):
        blend(weights).load_state_dict(first.state_dict())


SOURCES = """
import torch
class Other:
    vocab = 256
    def __len__(self): return 9
    def __getitem__(self, index): return {k: torch.arange(16) for k in ("input_ids", "labels")}
    def encode(self, text): return [1]
class Floats(Other):
    def __getitem__(self, index): return {k: v.double() for k, v in super().__getitem__(0).items()}
def splits(): return {"train": Other(), "test": Other()}
"""
FIRST = '{ weight = 1, build = "weft.data:stdlib", seq_len = 16, max_bytes = 9000 }'


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("weight = 0, build = 'a:b'", "data.blend.1.weight = 0: must be greater than 0"),
        ("wieght = 1, build = 'a:b'", "data.blend.1.weight = None: is missing"),
        ("weight = 1", "data.blend.1.*names nothing. Give exactly one of build"),
        ("weight = 1, text = 'a'", "data.blend.1.text = 'a': is not a list"),
        (
            "weight = 1, build = 'weft.data:stdlib', seq_len = 8",
            r"data.blend.1 = 'weft.data:stdl.*"
            r"a sample has .*\[8\].*another source .*\[16\].*Give all sources the same keys",
        ),
        (
            "weight = 1, build = 'sources_of_blend_test:Floats'",
            r"a sample has .*float64 \[16\].*another source .*int64 \[16\]",
        ),
        (
            "weight = 1, build = 'sources_of_blend_test:Other'",
            "makes tokens by another tokenizer",
        ),
        (
            "weight = 1, build = 'sources_of_blend_test:splits'",
            "returns a dict of train, test. Return one of these",
        ),
    ],
)
def test_sources_that_do_not_go_together_are_refused(
    tmp_path: Path, second: str, says: str
) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "sources_of_blend_test.py").write_text(SOURCES)
    with pytest.raises(Refusal, match=says):
        table = f"{{ blend = [{FIRST}, {{ {second} }}] }}"
        build_data.build_dataset(load_run(tmp_path / "run.toml", {"data": table}))


def test_a_run_file_with_a_blend(tmp_path: Path) -> None:
    text, blended = TINY.split("[data]"), f"{{ blend = [{FIRST}, {FIRST}] }}"
    (tmp_path / "run.toml").write_text(TINY)
    held = build_data.build_dataset(load_run(tmp_path / "run.toml", {"data": blended}))
    assert isinstance(held, Stream) and held.vocab == 256 and held.encode("a") == [97]
    assert held.sample(held.first(1)[0])["input_ids"].shape == (16,)
    epochs = text[0] + "[data]" + text[1].replace("steps = 2", "epochs = 2")
    (tmp_path / "run.toml").write_text(epochs)
    with pytest.raises(Refusal, match=r"train.epochs = 2.0: \[data\] names an iterable"):
        build_data.count_steps(load_run(tmp_path / "run.toml", {"data": blended}))
    with pytest.raises(Refusal, match=r"data.seq_len = 4: cannot stand beside blend"):
        load_run(tmp_path / "run.toml", {"data": blended, "data.seq_len": "4"})
