"""What all tests share: one thread, and one pool of processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weft.launch.local_workers import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes; `pool.run(function, *args, world=n)`. Functions stand at the top of a test
    module."""
    with Pool(4) as processes:
        yield processes
