"""What all tests share: one thread, and one pool of processes for the whole session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.sampling import sample
from weft.launch.local_workers import Pool

torch.set_num_threads(1)
os.environ["LANGUAGE"] = "en"  # tests read what weft prints
# of this session alone: runs of tests are no runs of the user's
CACHE = tempfile.TemporaryDirectory(prefix="weft-cache-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = CACHE.name


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes; `pool.run(function, *args, world=n)`. Functions stand at the top of a test
    module."""
    with Pool(4) as processes:
        yield processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Every test: whole grids and slow tests.")
    help = "What CI runs: slow tests too, and of grids the cases in which each word occurs."
    parser.addoption("--slow", action="store_true", help=help)
    help = "Commands of all pages that start ranks, not only of those that are read first."
    parser.addoption("--pages", action="store_true", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, and unless files are named, a sample of the tests that are many or slow."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    slow = config.getoption("--slow")
    if config.getoption("--all") or (named and not slow):
        return
    kept, left_out = sample(items, slow)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
