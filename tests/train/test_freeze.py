"""[model] freeze: parameters that are not trained, by patterns of their names."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.core import ConfigError, RunConfig, load_run
from weft.train import build_model, build_optimizer, build_skeleton, check_run
from weft.verification.compare import check_layout
from weft.verification.coverage import coverage
from weft.verification.reference import Reference, run_reference
from weft.verification.verified_settings import exact_sync, verified_precision
from weft.verification.verify_run import make_case

RUN = """
[model]
build = "weft.models:decoder"
vocab = 257
dim = 16
heads = 2
layers = 3
seq_len = 16
freeze = FROZEN
[data]
build = "weft.data:stdlib"
seq_len = 16
max_bytes = 100000
[train]
batch = 8
accumulate = 2
steps = 4
threads = 1
clip = 0.5
[optimizer]
lr = 1e-2
"""
# a whole first stage; some of a block, and of one gathered unit; all but the end
CASES = {
    "first blocks": '["embedding.*", "blocks.0.*"]',
    "parts of blocks": '["*.wq.*", "*norm*", "blocks.1.mlp.*"]',
    "all but the head": '["embedding.*", "blocks.*", "norm.*"]',
}
LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2")


def load(folder: Path, frozen: str, **more: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(RUN.replace("FROZEN", frozen))
    return load_run(path, {key.replace("__", "."): value for key, value in more.items()})


def exact(run: RunConfig) -> RunConfig:
    table = verified_precision(run.precision, "fp64")
    return run.model_copy(update={"precision": table, "sync": exact_sync(run.sync)})


@cache
def reference(folder: Path, frozen: str) -> Reference:
    return run_reference(make_case(exact(load(folder, frozen))), 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("freeze")


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_one_device(pool: Any, folder: Path, name: str, layout: str) -> None:
    case, expected = make_case(exact(load(folder, CASES[name]))), reference(folder, CASES[name])
    result = pool.run(check_layout, case, layout, expected, world=2)[0]
    assert result.passed, result
    frozen = {n for n, p in case.build().named_parameters() if not p.requires_grad}
    assert frozen and not frozen & set(expected.gradients[-1])
    state = {key.split("/")[1] for key in expected.final if key.startswith("optimizer/")}
    assert state and not frozen & state
    initial = dict(case.build().named_parameters())
    assert all(torch.equal(expected.final[n], initial[n]) for n in frozen)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_nothing_of_a_frozen_gradient_is_sent(pool: Any, folder: Path, layout: str) -> None:
    """Of float64 gradients; what is frozen has a size that its shapes say."""

    def reduced(frozen: str) -> int:
        case = make_case(exact(load(folder, frozen)))
        result = pool.run(check_layout, case, layout, reference(folder, frozen), world=2)[0]
        sums = [key for key in result.comms_seen if key[0] in ("all_reduce", "reduce_scatter")]
        return sum(result.comms_seen[key][1] for key in sums)

    for name in CASES:
        model = build_model(load(folder, CASES[name]))
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        fewer = reduced("[]") - reduced(CASES[name])
        assert fewer >= 8 * frozen if layout == "fsdp2" else fewer == 8 * frozen


@pytest.mark.parametrize(
    ("frozen", "says"),
    [
        ('["embeding.*"]', "model.freeze = 'embeding.*': matches no parameter. Did you mean"),
        ('["*"]', "no parameter is left to be trained"),
        ('"embedding.*"', "model.freeze = 'embedding.*': is not a list"),
    ],
)
def test_what_cannot_be_frozen_is_refused(folder: Path, frozen: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_run(load(folder, frozen))


def test_a_tied_name_is_refused(folder: Path) -> None:
    run = load(folder, '["head.*"]', model__tied="true")
    with pytest.raises(
        ConfigError, match=r'another name of the tied parameter.*"embedding.weight"'
    ):
        build_skeleton(run)


def test_what_is_frozen_is_no_optimizers(folder: Path) -> None:
    run = load(folder, CASES["first blocks"], optimizer__no_decay='["embedding.*"]')
    with pytest.raises(ConfigError, match="all parameters that it matches are frozen"):
        check_run(run)
    assert build_optimizer(run) and not build_model(run).get_parameter("embedding.weight").grad


def test_verify_says_so(folder: Path) -> None:
    run = exact(load(folder, CASES["first blocks"]))
    rows = coverage(run, 3, run.precision, "")
    assert [row.how for row in rows if "frozen, embedding.*, blocks.0.*" in row.what] == ["checked"]
