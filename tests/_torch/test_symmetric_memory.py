"""What torch must keep doing for weft._torch.symmetric_memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

from weft._torch.compiler import overlapping_options
from weft._torch.symmetric_memory import enable


def enabled() -> tuple[bool, bool]:
    group = dist.new_group()
    before = is_symm_mem_enabled_for_group(group.group_name)
    enable(group)
    return before, is_symm_mem_enabled_for_group(group.group_name)


def test_a_group_is_enabled_by_that_call_alone(pool: Any) -> None:
    assert pool.run(enabled, world=2) == [(False, True)] * 2


def test_inductor_knows_the_option() -> None:
    torch.compile(lambda x: x, options=overlapping_options("default"))
    assert overlapping_options("max-autotune-no-cudagraphs")["max_autotune"] is True
