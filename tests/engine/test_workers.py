"""Modules that live on named workers: equal to one device, whatever travels; what is refused; runs
that end, go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.cases import BATCH, SUBJECTS, VOCAB, Subject, global_batch, laid, reference, seeded
from tests.cli.test_refusals import weft_ as cli
from tests.commands import Command, children, launched
from tests.engine.test_engine import sgd, weighed
from tests.staged import STAGED
from tests.train.test_failures import STEPS, steps_of, weights
from tests.train.test_trainer import RUN, curve, lines, make, saved
from weft.core.errors import ConfigError, Refusal, UnsupportedModel, WorkerDied
from weft.core.run_config import RunConfig
from weft.core.worker_placement import DRIVER, place_modules
from weft.engine.rpc.calls import ModuleCalls
from weft.engine.rpc.remote_engine import Remote
from weft.launch import local_workers
from weft.launch.rpc import rpc_session
from weft.nn.losses import mse
from weft.nn.models import decoder
from weft.train import run_checks
from weft.train.data import NoDataset
from weft.train.trainer import train
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult

pytestmark = pytest.mark.grid

Workers = Mapping[str, Sequence[str]]
EXACT = 1e-12


def in_processes(
    function: Callable[..., Any], world: int, *args: Any, names: Sequence[str] = ()
) -> list[Any]:
    """New ones, and no pool's: torch numbers the starts of RPC in each process. One that hangs says
    where, and ends."""
    return local_workers.run_workers(in_time, world, function, *args, threads=1, names=names)


def in_time(function: Callable[..., Any], *args: Any) -> Any:
    # No faulthandler.dump_traceback_later: pytest has set it, and a fork would wait for its thread.
    alarm = threading.Timer(100, end_with_stacks)
    alarm.daemon = True
    alarm.start()
    try:
        return function(*args)
    finally:
        alarm.cancel()


def end_with_stacks() -> None:
    faulthandler.dump_traceback()
    os._exit(1)


# ---- what travels, and what comes of it ----------------------------------------------------------


@dataclass
class Found:
    """What a module of one's own returns."""

    value: Tensor
    more: dict[str, Any]


class Odd(nn.Module):
    """Takes and returns all that may travel. One parameter leads to a result that nobody needs, one
    to none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unneeded, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(
        self,
        x: Tensor,
        pair: tuple[Tensor, Any],
        given: dict[str, Any],
        *,
        scale: float,
        ignored: Tensor,
        how: str,
    ) -> Found:
        assert how == "so" and pair[1] is None and ignored is not None
        y = self.linear(x) * scale + pair[0]
        for each in given["list"]:
            y = y + torch.tanh(each)
        return Found(
            y,
            {
                "count": y.shape[1],
                "none": None,
                "pair": (y.detach(), self.unneeded(x)),
                "ids": y.argmax(-1),
            },
        )


class Strange(nn.Module):
    """Calls a module twice, one without any use of what it returns, and one whose argument only
    shapes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.side, self.odd, self.lost = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            Odd(),
            nn.Linear(6, 6),
        )
        self.before = nn.Linear(6, 6)  # leads to a call that leads nowhere

    def forward(self, input: Tensor) -> Tensor:
        x, side = self.enter(input), self.side(input)
        self.lost(self.before(x))
        for _ in range(2):
            found = self.odd(
                x, (side, None), {"list": [x, input]}, scale=0.5, ignored=self.before(x), how="so"
            )
            x = found.value + found.more["count"] * found.more["pair"][0] * F.one_hot(
                found.more["ids"], 6
            )
        return x


def rows() -> dict[str, Tensor]:
    return {"input": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 6)}


MIXED = partial(
    decoder, VOCAB, 16, 2, 4, 4, seq_len=12, experts=4, active=2, shared=1, balance=0.1, bias=0.01
)
OWN = {"strange": Subject(Strange, rows, mse), "experts": Subject(MIXED), **SUBJECTS, **STAGED}
SELECTIVE = replace(SUBJECTS["dropout"], plan=(("accumulate", 2), ("recompute", "selective")))

CASES: list[tuple[str, Workers]] = [
    ("decoder", {"storage": ["embedding"], "big": ["blocks.*"]}),
    ("decoder", {"a": ["blocks.0.attention", "head"], "b": ["blocks.?.mlp"], "c": ["norm"]}),
    ("tied", {"a": ["embedding", "head"], "b": ["blocks.1"]}),
    (
        "dropout",
        {"a": ["embedding", "blocks.0.dropout"], "b": ["dropout", "blocks.1", "blocks.0.mlp"]},
    ),
    ("recomputed", {"a": ["blocks.1"], "b": ["blocks.0"]}),
    ("clipped", {"a": ["blocks.0", "head"]}),
    ("convnet", {"vision": ["stages.0", "stages.2"], "b": ["head"]}),
    (
        "llama",
        {"storage": ["model.embed_tokens"], "big": ["model.layers.0", "model.layers.2", "lm_head"]},
    ),
    ("strange", {"a": ["odd"], "b": ["lost", "enter"]}),
    ("experts", {"a": ["blocks.0"], "b": ["blocks.1.mlp"]}),
]


def verified(name: str, workers: Workers, subject: Subject | None = None) -> LayoutResult:
    of = subject or OWN[name]
    case = replace(of.case(), workers=workers)
    found: LayoutResult = in_processes(check_layout, 1 + len(workers), case, "dp1", reference(of))[
        0
    ]
    return found


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "workers"), CASES, ids=[f"{name}-{'-'.join(w)}" for name, w in CASES]
)
def test_it_equals_one_device(name: str, workers: Workers) -> None:
    found = verified(name, workers)
    assert found.passed, found
    assert max(found.loss_rel_err, found.grad_rel_err, found.param_rel_err) < EXACT


def test_recomputed_attention_equals_one_device() -> None:
    assert verified("selective", {"a": ["blocks.0"]}, SELECTIVE).passed


def wrong(what: str) -> None:
    """One thing of a worker, or of the driver, is done otherwise from now on."""
    answer, collect, finish, root = Remote.answer, Remote.collect, Remote.finish, ModuleCalls.root
    if what == "place":
        Remote.answer = lambda self, call, a, k: answer(
            self,
            replace(call, position=call.position._replace(place=call.position.place + 1)),
            a,
            k,
        )  # type: ignore[method-assign, assignment]
    elif what == "samples":
        Remote.answer = lambda self, call, a, k: answer(self, replace(call, samples=(0, 4)), a, k)  # type: ignore[method-assign, assignment]
    elif what == "eval":
        Remote.answer = lambda self, call, a, k: answer(
            self, replace(call, modes=(False,) * len(call.modes)), a, k
        )  # type: ignore[method-assign, assignment]
    elif what == "lost":  # the gradients of the microbatches but the last

        def only_last(self: Any, context: int, step: int, norm: bool) -> float:
            for p in self.params.values() if self.here != DRIVER else ():
                p.grad = None
            return collect(self, context, step, norm)

        Remote.collect = only_last  # type: ignore[method-assign]
    elif what == "factor":
        Remote.finish = lambda self, step, factor: finish(
            self, step, 1.0 if self.here != DRIVER else factor
        )  # type: ignore[method-assign, assignment]
    elif what == "norm":
        Remote.collect = lambda self, c, s, norm: collect(self, c, s, norm and self.here == DRIVER)  # type: ignore[method-assign, assignment]
    elif what == "masks":  # all that travels counts as needed

        def all_needed(self: Any, loss: Tensor) -> Tensor:
            for call in self._open:
                call.uses[:] = [[True] * len(call.arguments) for _ in call.results]
            return root(self, loss)

        ModuleCalls.root = all_needed  # type: ignore[method-assign]


def wrongly(what: str, case: Any, found: Any) -> LayoutResult:
    wrong(what)
    return check_layout(case, "dp1", found)


WRONG = [
    ("place", "dropout", "output of dropout"),
    ("samples", "dropout", "output of dropout"),
    ("eval", "convnet", "stages.2"),
    ("lost", "decoder", "gradient of"),
    ("factor", "decoder", "every gradient of step 0 is"),
    ("norm", "clipped", "norm of all gradients at step 0"),
    ("masks", "strange", "before.weight"),
]
AT: dict[str, Workers] = {
    "dropout": {"b": ["dropout"]},
    "convnet": {"b": ["stages.2"]},
    "decoder": {"b": ["blocks.1"]},
    "clipped": {"b": ["blocks.1"]},
    "strange": {"b": ["odd"]},
}


@pytest.mark.parametrize(("what", "name", "said"), WRONG, ids=[w[0] for w in WRONG])
def test_a_fault_is_named(what: str, name: str, said: str) -> None:
    """In processes of its own, which end with it."""
    case = replace(OWN[name].case(), workers=AT[name])
    found = in_processes(wrongly, 2, what, case, reference(OWN[name]))[0]
    assert not found.passed
    assert said in str(found.first) or said in found.worst, found


# ---- one step, from Python -----------------------------------------------------------------------


def engine(model: nn.Module, subject: Subject, workers: Workers, **options: Any) -> Remote:
    return weft.Remote(
        model,
        laid(subject, model, "dp1"),
        workers,
        optimizer=partial(sgd, 0.1),
        loss=subject.loss,
        **options,
    )


def held(workers: Workers) -> tuple[str, set[str], list[str], tuple[int, int, int]]:
    """Who this is, the parameters that are alive here, those of which the engine knows, and the
    calls of a step."""
    subject = SUBJECTS["decoder"]
    with rpc_session((DRIVER, *workers)):
        model = seeded(subject.build)
        before = {name: weakref.ref(p) for name, p in model.named_parameters()}
        made = engine(model, subject, workers)
        alive = {name for name, p in before.items() if p() is not None}
        made.step(global_batch(subject, 0))
        made.close()
        return (
            made.here,
            alive,
            list(made.params),
            (made.calls.count, made.calls.sent_bytes, made.calls.came_bytes),
        )


def test_nobody_holds_what_lives_elsewhere() -> None:
    workers = {"storage": ["embedding"], "big": ["blocks.*"]}
    found = in_processes(held, 3, workers)
    places = place_modules(seeded(SUBJECTS["decoder"].build), workers)
    every = [name for name, _ in seeded(SUBJECTS["decoder"].build).named_parameters()]
    assert [here for here, *_ in found] == ["driver", "storage", "big"]
    for here, alive, params, _ in found:
        assert alive == set(params) == {name for name in every if places.of(name) == here}
    # two microbatches, of the embedding and of two blocks: [4, 12] ids one way, float64 [4, 12, 32]
    # the other ways, and to each block the cosines and sines of 12 positions
    ids, x, table = 4 * 12 * 8, 4 * 12 * 32 * 8, 2 * 12 * 4 * 8
    sent, came = 2 * (ids + x + 2 * (2 * x + table)), 2 * (x + 2 * 2 * x)
    assert found[0][3] == (2 * 3, sent, came)


def skipping(factors: list[float]) -> tuple[list[bool], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = decoder(16, 16, 1, 2, seq_len=8)
    plan = weft.plan(model, "dp1", batch=4, loss=weighed)
    with rpc_session((DRIVER, "a")):
        made = Remote(
            model, plan, {"a": ["blocks.0"]}, optimizer=partial(sgd, 0.1), loss=weighed, skip=10.0
        )
        skipped = []
        for step, factor in enumerate(factors):
            torch.manual_seed(step)
            batch = {
                "input_ids": torch.randint(0, 16, (4, 8)),
                "label_factor": torch.full((4,), factor),
            }
            skipped.append(made.step(batch).skipped)
        made.close()
        return skipped, {name: p.detach() for name, p in made.params.items()}


def test_a_step_that_is_not_to_be_trusted_is_left_out() -> None:
    usual = [1.0] * 17
    for skipped, params in in_processes(skipping, 2, [float("nan"), *usual, 1e3, 1.0]):
        assert [i for i, left_out in enumerate(skipped) if left_out] == [0, 18]
        assert all(bool(p.isfinite().all()) for p in params.values())
    once, other = (in_processes(skipping, 2, [*usual, last]) for last in (float("inf"), 1e4))
    for (_, one), (_, two) in zip(once, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


# ---- what is refused while it runs ---------------------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Appends(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x)
        return x


class Thing:
    pass


class Wild(nn.Module):
    """Does one thing that a call to another process cannot do."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.linear, self.norm = what, nn.Linear(6, 6), nn.Linear(6, 6)
        self.in_place, self.appends = InPlace(), Appends()

    def forward(self, input: Tensor) -> Tensor:
        x = self.norm(input)
        if self.what == "weight":
            return F.linear(x, self.linear.weight)
        if self.what == "in place":
            return self.in_place(x)
        if self.what == "appends":
            return self.appends(x, [])
        if self.what == "object":
            return self.appends(x, Thing())
        return torch.utils.checkpoint.checkpoint(
            lambda x: self.linear(x).tanh(), x, use_reentrant=False
        )


def wild(what: str) -> None:
    subject = Subject(partial(Wild, what), rows, mse)
    with rpc_session((DRIVER, "a")):
        made = engine(seeded(subject.build), subject, {"a": ["linear", "in_place", "appends"]})
        made.step({key: value.double() for key, value in global_batch(subject, 0).items()})


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "weight",
            "workers = 'linear.weight': is on a, and is read by another process, at"
            " test_workers.py:",
        ),
        ("in place", "workers = 'in_place': changes its arguments in place"),
        ("appends", "workers = 'appends': changes its arguments in place"),
        ("object", "workers = 'appends': its arguments or its result hold a Thing"),
        ("again", "workers = 'linear': is called in backward"),
    ],
)
def test_what_cannot_be_called_is_named(what: str, said: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        in_processes(wild, 2, what)
    assert said in str(error.value)


# ---- what is refused before any process starts ---------------------------------------------------


def run_of(folder: Path, workers: Workers, axes: str = "dp1", **settings: Any) -> RunConfig:
    return make(folder, axes, **settings).model_copy(
        update={"workers": {k: tuple(v) for k, v in workers.items()}}
    )


PLAIN = {"storage": ["embedding"], "big": ["blocks.*"]}


@pytest.mark.parametrize(
    ("workers", "settings", "said"),
    [
        (
            {"a": ["embeding"]},
            {},
            "workers.a = 'embeding': no module has such a name. Did you mean \"embedding\"?",
        ),
        ({"a": []}, {}, "workers.a = []: names no module"),
        ({"a": ["head"], "b": ["head"]}, {}, "workers.b = 'head': is on worker a too"),
        (
            {"a": ["blocks.0"], "b": ["blocks.0.mlp"]},
            {},
            "workers.b = 'blocks.0.mlp': and blocks.0, on worker a, are",
        ),
        (
            {"a": ["blocks.0.mlp"], "b": ["blocks.0"]},
            {},
            "workers.b = 'blocks.0': and blocks.0.mlp, on worker a, are",
        ),
        (
            {"a": ["blocks"]},
            {},
            "workers.a = 'blocks': is a ModuleList, whose own forward is never called",
        ),
        (
            {"a": ["head"]},
            {"model__tied": True},
            "two names: embedding.weight on driver and head.weight on a",
        ),
        (
            {"a b": ["head"]},
            {},
            "workers = 'a b': is not a name that torch.distributed.rpc accepts",
        ),
        (
            {"driver": ["head"]},
            {},
            "workers = 'driver': is the name of the process that runs the model's own forward",
        ),
        (PLAIN, {"axes": "dp2"}, "layout.axes = 'dp2': workers hold whole modules"),
        (
            PLAIN,
            {"precision__compute": "fp16"},
            "precision.compute = 'fp16': fp16 needs loss scaling",
        ),
        (PLAIN, {"sync__name": "ring"}, "sync.name = 'ring': there is one driver"),
        (PLAIN, {"sync__codec": "int8"}, "sync.codec = 'int8': there is one driver"),
        (
            PLAIN,
            {"pipeline__schedule": "gpipe"},
            "pipeline.schedule = 'gpipe': there is one driver",
        ),
        (
            {"a": ["blocks.0.mlp"]},
            {"train__recompute": "full"},
            "train.recompute = 'full': blocks.0 would be computed",
        ),
    ],
)
def test_refused_before_a_process_starts(
    tmp_path: Path, workers: Workers, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refusal) as error:
        run_checks.check_run(run_of(tmp_path, workers, **settings))
    assert said in str(error.value)
    assert run_checks.check_run(run_of(tmp_path, PLAIN))[0].layout.world == 1


TOML = f'{RUN}[workers]\nstorage = ["embedding"]\nbig = ["blocks.0", "blocks.1"]\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--trace"],
            "--trace = True: shows the stages of a layout, and a run with [workers] has no layout",
        ),
        (
            ["--nproc", "2"],
            "--nproc = 2: a driver and storage, big need 3 processes, and there are 2. Use 3",
        ),
        (["--layout", "tp2"], "layout.axes = 'tp2': workers hold whole modules"),
        (["--set", "workers.big=7"], "workers.big = 7: is not a list"),
    ],
)
def test_the_command_line_refuses(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    result = cli("train", str(tmp_path / "run.toml"), "--output", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2 and said in result.stderr


# ---- runs ----------------------------------------------------------------------------------------


def trained(run: RunConfig, resume: bool = False) -> list[bool]:
    found: list[bool] = in_processes(train, run.world, run, resume)
    return found


ALL = {
    "train__eval_every": 3,
    "train__eval_batches": 2,
    "train__sample_tokens": 4,
    "train__skip": 100.0,
}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_is_that_of_one_device(
    tmp_path: Path, compute: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: losses, validation, sample, checkpoints; each goes on from the other's
    checkpoint. A norm is a sum in another order, and clips a bit otherwise."""
    settings = ALL | {
        "precision__compute": compute,
        "optimizer__name": "adamw" if compute == "fp32" else "sgd",
    }
    one, many = make(tmp_path / "one", **settings), run_of(tmp_path / "many", PLAIN, **settings)
    one, many = (
        r.model_copy(update={"train": r.train.model_copy(update={"clip": None})})
        for r in (one, many)
    )
    trained(one)
    trained(many)
    assert "calls a step, and gets" in capfd.readouterr().out
    for key in ("loss", "val_loss", "lr"):
        assert curve(one, key) == curve(many, key) and curve(one, key), key
    norms = [[norm for _, norm in curve(run, "grad_norm")] for run in (one, many)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12) and len(norms[0]) == 6
    assert all(line["calls"] == 6 for line in lines(many) if "loss" in line)
    assert (Path(one.output) / "sample.txt").read_text() == (
        Path(many.output) / "sample.txt"
    ).read_text()
    for source, other in ((one, many), (many, one)):
        again = other.model_copy(update={"output": f"{other.output}-again"})
        subprocess.run(["cp", "-r", source.output, again.output], check=True)
        subprocess.run(["rm", "-r", f"{again.output}/checkpoints/step-000006"], check=True)
        trained(again, resume=True)
        assert_same(saved(source, 6), saved(again, 6))
    assert_same(saved(one, 6), saved(many, 6))


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    """The driver has it while it reads the second step's first sample: a worker, asked nothing,
    ends too."""
    run = run_of(tmp_path, PLAIN, train__steps=50, data__interrupt=9)
    assert trained(run) == [True] * 3
    step = lines(run)[-1]["step"]
    assert 2 <= step < 6 and saved(run, int(step))


class Unreadable(NoDataset):
    """Data that only the driver may read."""

    def __init__(self) -> None:
        super().__init__(64)
        if int(os.environ.get("RANK", 0)):
            raise ConfigError(
                "data.build", "Unreadable", "is read on a worker", "read it on the driver"
            )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(8) + index % 8}


def test_workers_need_no_data(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"a": ["head"]},
        data__build="tests.engine.test_workers:Unreadable",
        train__steps=2,
    )
    trained(run)
    assert [line["step"] for line in lines(run)] == [1, 2]


def begun(
    folder: Path,
    *more: str,
    launcher: tuple[str, ...] = (),
    data: str = "tests.train.test_failures:Slow",
) -> Any:
    folder.mkdir()
    (folder / "run.toml").write_text(
        TOML.replace("tests.train.test_trainer:Ramps", data).replace(
            "steps = 6", f"steps = {STEPS}"
        )
    )
    asked = [
        "train",
        str(folder / "run.toml"),
        "--output",
        str(folder / "out"),
        "--set",
        "checkpoint.every=2",
        *more,
    ]
    return launched(launcher, *asked) if launcher else Command(folder / "log", *asked)


def killed(process: Command, folder: Path, index: int) -> str:
    """What a run says whose process of this number is killed after some steps."""
    while process.poll() is None and (steps_of(folder) or [0])[-1] < 7:
        time.sleep(0.01)
    os.kill(children(process.pid)[index], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    return str(output)


@pytest.mark.grid(1)
@pytest.mark.parametrize("index", [0, 2])
def test_a_run_goes_on_when_a_process_dies(tmp_path: Path, index: int) -> None:
    whole = begun(tmp_path / "whole")
    process = begun(tmp_path / "killed")
    output = killed(process, tmp_path / "killed", index)
    name = ("driver", "storage", "big")[index]
    assert process.returncode == 0, output
    assert f"rank {index}, {name}: killed by SIGKILL; going on from step" in output
    assert whole.wait(120) == 0
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    process = begun(tmp_path / "run", "--set", "checkpoint.every=0")
    output = killed(process, tmp_path / "run", 2)
    assert process.returncode == 1 and "rank 2, big, died:\nkilled by SIGKILL" in output


@pytest.mark.slow
def test_under_torchrun_each_process_is_one_of_them(tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--nproc-per-node", "3", "-m")
    process = begun(tmp_path / "run", "--set", "train.steps=4", launcher=launcher)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4] and "dp1, 3 processes" in output


def failing() -> None:
    with rpc_session((DRIVER, "a")):
        subject = SUBJECTS["decoder"]
        made = engine(seeded(subject.build), subject, {"a": ["blocks.0"]})
        if dist.get_rank():
            made.model.get_submodule("blocks.0").forward = None  # type: ignore[assignment]
        made.step(global_batch(subject, 0))


def test_an_error_in_a_placed_module_is_shown_with_its_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied) as error:
        in_processes(failing, 2, names=(DRIVER, "a"))
    assert "name=a" in str(error.value) and "'NoneType' object is not callable" in str(error.value)
