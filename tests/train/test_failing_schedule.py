"""A learning-rate schedule that fails at a step that nobody tried before the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.test_trainer import make
from weft.core import ConfigError
from weft.launch.local_workers import Pool
from weft.train.trainer import train

HERE = "tests.train.test_failing_schedule"


def falls_until_step_4(steps: int) -> Callable[[int], float]:
    return lambda step: 1 / (4 - step)


def test_a_schedule_that_fails_in_a_run_ends_it_with_one_line(tmp_path: Path, pool: Pool) -> None:
    own = {"lr_schedule__build": f"{HERE}:falls_until_step_4", "train__decay": "constant"}
    run = make(tmp_path, "dp2", train__warmup=0, **own)
    with pytest.raises(ConfigError, match="fails at step 4: ZeroDivisionError") as caught:
        pool.run(train, run, False, world=2)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
