"""A forward that asks for gradients: it does so in validation, too, which keeps no graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.cases import laid, seeded
from tests.verification.nets_with_gradients import WITH_GRADIENTS


def evaluated(name: str, layout: str) -> list[float]:
    """Losses of an evaluation, a step, and an evaluation after it."""
    subject = WITH_GRADIENTS[name]
    model = seeded(subject.build)
    plan = laid(subject, model, layout)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(model, plan, optimizer=optimizer, loss=subject.loss, device="cpu")
    torch.manual_seed(3)
    batch = engine.local({key: x.double() for key, x in subject.data().items()})
    found = [engine.evaluate(batch), engine.step(batch), engine.evaluate(batch)]
    return [float(result.loss) for result in found]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
@pytest.mark.parametrize("name", ["critic", "forces"])
def test_an_evaluation_is_that_of_one_device(pool: Any, name: str, layout: str) -> None:
    alone = pool.run(evaluated, name, "dp1", world=1)[0]
    found = pool.run(evaluated, name, layout, world=2)[0]
    assert found == pytest.approx(alone, rel=1e-9)
    assert found[0] == pytest.approx(found[1], rel=1e-9) and found[2] != found[1]
