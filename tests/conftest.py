"""What all tests share: one thread, and one pool of processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sampling import short_run
from weft.launch.local_workers import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes; `pool.run(function, *args, world=n)`. Functions stand at the top of a test
    module."""
    with Pool(4) as processes:
        yield processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Every test: whole grids and slow tests.")
    help = "Commands of all pages that start ranks, not only of those that are read first."
    parser.addoption("--pages", action="store_true", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, and unless files are named, a sample of the tests that are many or slow."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("--all") or named:
        return
    kept, left_out = short_run(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
