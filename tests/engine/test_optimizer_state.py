"""`engine.optimizer` is an optimizer of torch, also where a rank has a part of each weight."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from tests.cases import LENGTH, VOCAB, Subject, batch_of, tokens
from weft import Engine
from weft.nn.models import decoder

SMALL = Subject(partial(decoder, VOCAB, 16, 2, 2, 2, seq_len=LENGTH), tokens)


def steps_after_loading(layout: str, loads: bool) -> float:
    """How far a step from saved weights and optimizer state is from the one that was taken."""
    case = SMALL.case()
    model = case.model()
    engine = Engine(
        model, case.plan(model, layout), optimizer=case.optimizer, loss=case.loss, device="cpu"
    )
    batches = [engine.local(batch_of(SMALL, step, 0, 1)) for step in range(2)]
    engine.step(batches[0])
    saved = deepcopy(engine.optimizer.state_dict())
    weights = {name: p.detach().clone() for name, p in engine.params.items()}
    engine.step(batches[1])
    taken = {name: p.detach().clone() for name, p in engine.params.items()}
    with torch.no_grad():
        for name, p in engine.params.items():
            p.copy_(weights[name])
    if loads:
        engine.optimizer.load_state_dict(saved)
    engine.step(batches[1])
    found = [(p.detach() - taken[name]).abs().max() for name, p in engine.params.items()]
    engine.close()
    return max(float(getattr(each, "full_tensor", lambda each=each: each)()) for each in found)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_its_state_dict_is_this_ranks(pool: Any, layout: str) -> None:
    assert pool.run(steps_after_loading, layout, True, world=2) == [0.0, 0.0]
    assert min(pool.run(steps_after_loading, layout, False, world=2)) > 1e-4
