"""`[data] collate`: samples of several lengths, padded by a function of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run_files import TINY
from weft.core import Refusal, RunConfig
from weft.core.run_config import load_run
from weft.train import build_data, run_checks
from weft.verification.verify_run import make_case

MINE = """
import torch
from torch.nn.utils.rnn import pad_sequence

class Sentences:
    # sample i has 3 + i % 9 tokens
    def __len__(self):
        return 64
    def __getitem__(self, i):
        ids = (torch.arange(4 + i % 9) + i) % 256
        return {"input_ids": ids[:-1], "labels": ids[1:]}

def padded(samples):
    ids = pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}

def short(samples):
    return {key: value[:1] for key, value in padded(samples).items()}

def listed(samples):
    return list(samples)

def empty(samples):
    return {}
"""


def make(folder: Path, collate: str | None, **keys: str) -> RunConfig:
    (folder / "collate_of_test.py").write_text(MINE)
    (folder / "run.toml").write_text(TINY)
    table = '{ build = "collate_of_test:Sentences"'
    table += f', collate = "collate_of_test:{collate}" }}' if collate else " }"
    return load_run(folder / "run.toml", {"data": table, **keys})


def test_samples_of_several_lengths_are_padded(tmp_path: Path) -> None:
    run = make(tmp_path, "padded")
    run_checks.check_run(run)
    case = make_case(run)
    for step in range(6):
        whole = case.whole_batch_of(step)
        assert whole["labels"].shape == (8, int((whole["labels"] != -100).sum(1).max()))
        for rank, rows in enumerate((slice(0, 4), slice(4, 8))):
            part = case.batch_of(step, rank, 2)
            assert all(torch.equal(part[key], whole[key][rows]) for key in whole)


@pytest.mark.parametrize(
    ("collate", "says"),
    [
        (None, "data = '.*': one sample has shape .3., another .4."),
        (
            "short",
            r"data.collate = '.*short': returns first dims .* for 2 .*first dim is the samples",
        ),
        ("listed", r"data.collate = '.*listed': returns first dims .*list.* for 2 samples"),
        ("empty", r"data.collate = '.*empty': returns first dims .* for 2 samples"),
        ("paded", r"data.collate = '.*paded': .* has no paded.*mean \"padded\""),
    ],
)
def test_what_is_no_batch_is_refused(tmp_path: Path, collate: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        run = make(tmp_path, collate)
        build_data.sample_batch(run, build_data.build_dataset(run))
