"""What all tests share: one thread, and one pool of processes for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.sampling import paired_run, short_run
from weft.launch.local_workers import Pool

torch.set_num_threads(1)
os.environ["LANGUAGE"] = "en"  # tests read what weft prints


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes; `pool.run(function, *args, world=n)`. Functions stand at the top of a test
    module."""
    with Pool(4) as processes:
        yield processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Every test: whole grids and slow tests.")
    help = "What CI runs: of whole grids, cases in which each pair of words occurs; slow tests."
    parser.addoption("--pairs", action="store_true", help=help)
    help = "Commands of all pages that start ranks, not only of those that are read first."
    parser.addoption("--pages", action="store_true", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, and unless files are named, a sample of the tests that are many or slow."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("--all") or (named and not config.getoption("--pairs")):
        return
    kept, left_out = (paired_run if config.getoption("--pairs") else short_run)(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
