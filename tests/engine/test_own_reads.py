"""Numbers that a rank reads of its own positions: where they decide whether attention runs, ranks
would wait for one another."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.core.errors import UnsupportedModel
from weft.engine.context_parallel.own_reads import OwnReads
from weft.launch.local_workers import Pool
from weft.nn.losses import next_token

VOCAB, LENGTH, WIDTH, SAMPLES = 67, 16, 32, 4


class Halts(nn.Module):
    """Runs one block until all positions have halted (Graves 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.halt = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        total, steps = torch.zeros_like(x[..., :1]), 0
        while (total < 1).any() and steps < 8:
            x, steps = self.block(x), steps + 1
            total = total + self.halt(x).sigmoid()
        return self.head(x)


class Logs(Halts):
    """Reads as much, and runs the same blocks whatever it is."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        self.norm = x.norm().item()
        if self.norm > 1e9:
            print("large activations")
        for _ in range(2):
            x = self.block(x)
        return self.head(x)


class Skips(Halts):
    """Layers are left out by a number that all ranks draw alike (LayerDrop, Fan et al. 2019)."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for _ in range(4):
            kept = torch.rand([]) < 0.7 if self.training else True
            if kept:
                x = self.block(x)
        return self.head(x)


def step_of(build: Callable[[], nn.Module]) -> float:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(VOCAB, (SAMPLES, LENGTH))}
    model = build()
    plan = weft.plan(model, "cp2", batch=SAMPLES, loss=next_token, sample=batch)
    engine = weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=next_token)
    return float(engine.step(batch).loss)


def test_a_loop_that_ranks_leave_by_their_own_positions_is_refused(pool: Pool) -> None:
    says = r"depends on `while \(total < 1\).any\(\) and steps < 8:` at test_own_reads.py:\d+"
    with pytest.raises(UnsupportedModel, match=says):
        pool.run(step_of, Halts, world=2, timeout=60)


def test_what_is_read_for_a_log_decides_nothing(pool: Pool) -> None:
    assert pool.run(step_of, Logs, world=2, timeout=60)[0] > 0


def test_a_number_that_all_ranks_draw_may_decide(pool: Pool) -> None:
    first, second = pool.run(step_of, Skips, world=2, timeout=60)
    assert first == second > 0


# ---- which line decides ----------------------------------------------------------------------


def in_a_branch(reads: OwnReads, value: Callable[[], bool]) -> str:
    if value():
        return reads.deciding()
    return ""


def in_a_loop_that_breaks(reads: OwnReads, value: Callable[[], bool]) -> str:
    found = ""
    for _ in range(2):
        found = reads.deciding()
        if value() and found:
            break
    return found


def by_a_name(reads: OwnReads, value: Callable[[], bool]) -> str:
    small = value()
    if small:
        return reads.deciding()
    return ""


def after_a_return(reads: OwnReads, value: Callable[[], bool]) -> str:
    if not value():
        return ""
    return reads.deciding()


def after_a_branch(reads: OwnReads, value: Callable[[], bool]) -> str:
    small = 0
    if value():
        small += 1
    return reads.deciding()


def in_another_branch(reads: OwnReads, value: Callable[[], bool]) -> str:
    small = value()
    training = len(LENGTHS) > 0
    if training:
        return reads.deciding()
    return str(small)


LENGTHS = (1,)
DECIDES = [in_a_branch, in_a_loop_that_breaks, by_a_name, after_a_return]
FUNCTIONS = [*((f, True) for f in DECIDES), (after_a_branch, False), (in_another_branch, False)]


@pytest.mark.parametrize(("function", "decides"), FUNCTIONS)
def test_which_line_decides(function: Callable[..., str], decides: bool) -> None:
    reads = OwnReads()

    def value() -> bool:
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        assert caller is not None
        reads._lines.setdefault(caller.f_code, set()).add(caller.f_lineno)
        return True

    assert bool(function(reads, value)) is decides
