"""`[data] group_by_length`: batches of samples of like length, of which less is padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.mutants import Mutant, mutated
from tests.run_files import TINY
from weft.core import Refusal, RunConfig
from weft.core.run_config import load_run
from weft.train import build_data, run_checks
from weft.train.data import Loader
from weft.train.length_groups import grouped_by_length
from weft.train.prefetch import prefetched
from weft.train.trainer import train
from weft.verification.verify_run import make_case


class Words:
    """Sample i has 3 to 42 tokens, counted up from i."""

    def __init__(self, size: int = 103) -> None:
        self.counts = np.random.default_rng(1).integers(3, 43, size)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(int(self.counts[i]) + 1) + i
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Measured(Words):
    """Words that say how long they are: the other way round."""

    @property
    def lengths(self) -> list[float]:
        return [-float(count) for count in self.counts]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


def loader(words: Any = None, **options: Any) -> Loader:
    options = {"group_by_length": 3, "collate_fn": padded, **options}
    return Loader(words or Words(), 8, seed=5, **options)


def rows(batch: dict[str, Tensor]) -> list[int]:
    return [int(row[0]) for row in batch["input_ids"]]


def test_an_epoch_as_in_the_picture() -> None:
    lengths = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    order = np.array([7, 3, 9, 1, 2, 8, 4, 6, 5])
    found = grouped_by_length(order, lengths, 2, 2, np.random.default_rng(0)).tolist()
    batches = [found[i : i + 2] for i in range(0, 8, 2)]
    assert sorted(batches) == [[1, 3], [2, 4], [6, 8], [7, 9]] and found[8:] == [5]


def test_each_epoch_has_every_sample_once_in_batches_of_like_length() -> None:
    words, grouped, bare = Words(), loader(), loader(group_by_length=0)
    whole, epochs = grouped.steps_per_epoch, []
    for epoch in range(3):
        steps = range(epoch * whole, (epoch + 1) * whole)
        made, plain = ([one.indices(step) for step in steps] for one in (grouped, bare))
        flat = [i for batch in made for i in batch]
        assert len({*flat}) == len(flat) == 96 and {*flat} == {i for b in plain for i in b}
        pads = [pads_of(words, batches) for batches in (made, plain)]
        assert pads[0] < pads[1] / 2.5
        epochs.append(flat)
    assert epochs[0] != epochs[1] != epochs[2]


def pads_of(words: Words, batches: list[list[int]]) -> int:
    """How many places of padded batches are padding."""
    counts = [words.counts[batch] for batch in batches]
    return int(sum(count.max() * len(count) - count.sum() for count in counts))


def test_a_dataset_says_what_its_lengths_are() -> None:
    read: list[int] = []

    class Seen(Measured):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            read.append(i)
            return super().__getitem__(i)

    said = loader(Seen())
    assert read == []
    ordered = [words.counts[said.indices(0)] for words in (Words(),)]
    assert [*ordered[0]] == sorted(ordered[0], reverse=True)
    for wrong in ([1, 2], [float("nan")] * 103, ["a"] * 103, np.ones((103, 2)), [[1], [2, 3]]):

        class Wrong(Words):
            lengths = wrong

        with pytest.raises(Refusal, match=r"lengths = '\w+': are not 103 finite numbers"):
            loader(Wrong())


def test_the_same_batches_on_every_layout_and_from_any_step() -> None:
    one = loader()
    whole = [next(one) for _ in range(20)]
    for rank in range(2):
        mine = loader(data_rank=rank, data_size=2)
        for batch in whole:
            part = next(mine)
            assert all(torch.equal(part[k], batch[k][rank * 4 : rank * 4 + 4]) for k in batch)
    assert [rows(batch) for batch in whole[7:]] == [rows(next(x)) for x in [loader(start=7)] * 13]
    with prefetched(loader(start=7), 2, 2, False) as ahead:
        assert [rows(batch) for batch in whole[7:]] == [rows(next(ahead)) for _ in range(13)]  # type: ignore[call-overload]


# ---- run files -----------------------------------------------------------------------------------


def make(folder: Path, data: str = "", **keys: str) -> RunConfig:
    (folder / "run.toml").write_text(TINY)
    of = "tests.train.test_length_groups"
    data = data or f'build = "{of}:Words", collate = "{of}:padded", group_by_length = 3'
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return load_run(folder / "run.toml", {"data": f"{{ {data} }}", "model.seq_len": "64", **named})


def test_the_reference_has_its_own_definition(tmp_path: Path) -> None:
    run = make(tmp_path)
    run_checks.check_run(run)
    case = make_case(run)
    assert case.faults() == []
    for step in (0, 5, 14):
        whole = case.whole_batch_of(step)
        for rank, part in enumerate((slice(0, 4), slice(4, 8))):
            mine = case.batch_of(step, rank, 2)
            assert all(torch.equal(mine[key], whole[key][part]) for key in whole)


MUTANTS = {
    "not sorted": ("lengths[each], kind", "0 * lengths[each], kind"),
    "the wrong way round within a pool": ("each[np.argsort(", "each[::-1][np.argsort("),
    "other pools": ("start + pool * batch", "start + 2 * pool * batch"),
    "all as one pool": ("for each in pools", "for each in [order[:whole]]"),
    "samples shuffled": ("random.permutation(batches)", "random.permutation(batches.reshape(-1))"),
    "from the shortest to the longest": (
        "random.permutation(batches)",
        "batches[np.argsort(lengths[batches].max(1))]",
    ),
    "batches not shuffled": ("random.permutation(batches)", "batches"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_other_batches_are_seen(name: str, tmp_path: Path) -> None:
    case = make_case(make(tmp_path, train__batch="4"))
    with mutated(Mutant("weft.train.length_groups", "grouped_by_length", *MUTANTS[name])):
        assert case.faults()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            'build = "weft.data:stdlib", group_by_length = 3',
            r"data.group_by_length = 3: needs samples of several lengths.*Set data.collate",
        ),
        (
            'stream = ["run.toml"], collate = "MODULE:padded", group_by_length = 3',
            "data.group_by_length = 3: sorts samples by length, and an iterable's lengths are",
        ),
    ],
)
def test_what_has_no_lengths_is_refused(data: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("one\n" * 200)
    data = data.replace("run.toml", "rows.txt").replace("MODULE", "tests.train.test_length_groups")
    with pytest.raises(Refusal, match=says):
        build_data.build_dataset(make(tmp_path, data))


def test_a_run_goes_on_with_its_own_order(tmp_path: Path) -> None:
    keys = {"train__steps": "14", "checkpoint__every": "5", "checkpoint__keep": "9"}
    whole = make(tmp_path, output=json.dumps(str(tmp_path / "whole")), **keys)
    train(whole, False)
    part = make(tmp_path, output=json.dumps(str(tmp_path / "part")), **keys, train__log_every="1")
    short = part.model_copy(update={"train": part.train.model_copy(update={"steps": 10})})
    train(short, False)
    with pytest.raises(Refusal, match=r"data.group_by_length = 4: the run in .* has group_by_le"):
        four = part.data.model_copy(update={"group_by_length": 4})
        train(part.model_copy(update={"data": four}), True)
    train(part, True)
    ends = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for name in ("whole", "part")
    ]
    assert ends[0] == ends[1]
