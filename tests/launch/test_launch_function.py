"""`weft.launch`: from a test, from standard input as a notebook has it, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.core import ConfigError, WeftError, WorkerDied
from weft.launch import launch_function

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def where(start: float) -> tuple[int, float, str]:
    total = torch.full((), start)
    dist.all_reduce(total)
    return dist.get_rank(), float(total), dist.get_backend()


def test_the_result_is_that_of_rank_0_or_of_all() -> None:
    scale = 2.0  # what a function closes over comes along

    def scaled(start: float) -> tuple[int, float, str]:
        return where(scale * start)

    assert weft.launch(scaled, 1.5, layout="dp2") == (0, 6.0, "gloo")
    both = weft.launch(where, 1.0, layout="fsdp2", every_rank=True, device="cpu")
    assert both == [(0, 2.0, "gloo"), (1, 2.0, "gloo")]


def test_results_that_nobody_wants_need_not_travel() -> None:
    def first() -> object:
        return 7 if dist.get_rank() == 0 else lambda: "no pickle takes me"

    assert weft.launch(first, layout="dp2") == 7


def of_a_new_module() -> object:
    module = ModuleType("only_ranks_have_it")
    exec("class Here: pass", module.__dict__)
    sys.modules[module.__name__] = module
    return module.Here()


def of_a_new_class() -> object:
    here = sys.modules[__name__]
    here.Fresh = type("Fresh", (), {"__module__": __name__})  # type: ignore[attr-defined]
    return here.Fresh()


def of_no_class() -> object:
    return lambda: "no pickle takes me"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (of_no_class, "(?:Attribute|Pickling)Error: .*lambda.*"),
        (of_a_new_module, "ModuleNotFoundError: No module named 'only_ranks_have_it'"),
        (of_a_new_class, "AttributeError: .*Fresh.*"),
    ],
)
def test_what_cannot_be_sent_back_is_one_line(function: Callable[[], object], why: str) -> None:
    with pytest.raises(WeftError) as caught:
        weft.launch(on_rank_1, function, layout="dp2", every_rank=True)
    assert re.fullmatch(
        rf"what rank 1 returned cannot be sent back \({why}\): return numbers, tensors or texts,"
        " or save a checkpoint",
        str(caught.value),
    ), str(caught.value)


def on_rank_1(function: Callable[[], object]) -> object:
    return function() if dist.get_rank() == 1 else None


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_the_notebook_trains_as_one_process_does(layout: str, tmp_path: Path) -> None:
    """Its cells come on standard input: there is no file that a rank could import."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert 'LAYOUT = "dp2"' in text
    text = text.replace('LAYOUT = "dp2"', f'LAYOUT = "{layout}"')
    text += f"""
LAYOUT = "dp1"
alone = weft.launch(train, 40, layout=LAYOUT)
assert weft.launch(lambda: torch.distributed.get_world_size(), layout="{layout}") == 2
assert max(abs(a - b) for a, b in zip(alone[:10], losses)) < 1e-5, (alone, losses)
assert losses[-1] < 0.8 * losses[0], losses
"""
    ran = subprocess.run(
        [sys.executable, "-"],
        input=text,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "it is shape" in ran.stdout


def raise_in_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the tea is cold")
    dist.barrier()


def test_an_exception_is_one_error_with_that_ranks_traceback() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(WorkerDied) as caught:
        weft.launch(raise_in_rank_1, layout="dp2")
    said = str(caught.value)
    assert caught.value.rank == 1 and said.startswith("rank 1 died:\nTraceback")
    assert "in raise_in_rank_1" in said and said.endswith("ValueError: the tea is cold")
    assert set(multiprocessing.active_children()) <= before


def test_a_refusal_in_a_rank_comes_as_itself() -> None:
    def plan() -> None:
        weft.plan(nn.Linear(2, 2), "dp2", batch=3)

    with pytest.raises(ConfigError, match=r"train\.batch = 3"):
        weft.launch(plan, layout="dp2")


# ---- what is refused -----------------------------------------------------------------------------


def launch_again() -> None:
    weft.launch(where, 1.0, layout="dp2")


def test_a_rank_launches_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="it is a rank already"):
        weft.launch(launch_again, layout="dp1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"layout = 'dp3': has 3 ranks, and torchrun or srun .* 2"
    ):
        weft.launch(where, 1.0, layout="dp3")
    with pytest.raises(ConfigError, match="each process that torchrun or srun started returns"):
        weft.launch(where, 1.0, layout="dp2", every_rank=True)


SCRIPT = """
import sys
import torch
import weft

if "used" in sys.argv:  # as if CUDA had been, so that ranks are new interpreters
    torch.cuda.is_initialized = lambda: True

def rank(scale):
    found = torch.ones(()) * scale
    torch.distributed.all_reduce(found)
    return torch.distributed.get_rank(), float(found)

MAIN
"""
CALL = 'print(weft.launch(rank, 3.0, layout="dp2", device="cpu"), flush=True)'
GUARDED = f'if __name__ == "__main__":\n    {CALL}'


def run_script(folder: Path, main: str, *command: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("MAIN", main))
    return subprocess.run(
        [sys.executable, *[part.replace("SCRIPT", str(script)) for part in command]],
        env={**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_under_torchrun_it_runs_in_the_processes_that_there_are(tmp_path: Path) -> None:
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "2", "SCRIPT"
    ran = run_script(tmp_path, CALL, *torchrun)
    assert ran.returncode == 0, ran.stderr
    # the two print at once
    assert sorted(re.findall(r"\(\d, 6\.0\)", ran.stdout)) == ["(0, 6.0)", "(1, 6.0)"], ran.stdout


@pytest.mark.parametrize(
    ("main", "option", "says"),
    [
        (CALL, (), "(0, 6.0)"),  # forked, which imports nothing
        (GUARDED, ("used",), "(0, 6.0)"),
        (CALL, ("used",), "launches whenever the file is imported"),
        (f"for _ in range(1):\n    {CALL}", ("used",), "launches whenever the file is imported"),
    ],
)
def test_a_script_without_a_guard(
    tmp_path: Path, main: str, option: tuple[str, ...], says: str
) -> None:
    ran = run_script(tmp_path, main, "SCRIPT", *option)
    assert says in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (says in ran.stdout)
    assert ran.stderr.count("Traceback") == (ran.returncode != 0)  # no rank began


def test_gpus_that_are_not_there_are_refused() -> None:
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"the layout has {ranks} ranks, and this machine"):
        weft.launch(where, 1.0, layout=f"dp{ranks}", device="cuda")
    with pytest.raises(ConfigError, match='"cpu" or "cuda"'):
        weft.launch(where, 1.0, layout="dp2", device="tpu")  # type: ignore[arg-type]


def test_cuda_that_was_used_takes_functions_of_modules_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert weft.launch(where, 1.0, layout="dp2", device="cpu") == (0, 2.0, "gloo")  # spawned
    with pytest.raises(ConfigError, match=r"CUDA has been used .* put the function in a module"):
        weft.launch(lambda: None, layout="dp2")
    cell = partial(where, 1.0)
    monkeypatch.setattr(where, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "where", where, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    monkeypatch.setattr(launch_function, "run_workers", lambda *_, **how: [how["start"]])
    assert weft.launch(cell, layout="dp2") == "spawn"  # a script's
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="defined in a notebook"):
        weft.launch(cell, layout="dp2")


def test_gpus_are_forked_to_only_where_cuda_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        launch_function, "run_workers", lambda *args, **how: started.update(how) or [None]
    )
    weft.launch(lambda: None, layout="dp2")
    assert (started["start"], started["backend"]) == ("fork", "nccl")
    monkeypatch.setattr(launch_function, "cuda_survives_fork", lambda: False)
    weft.launch(where, 1.0, layout="dp2")
    assert (started["start"], started["backend"]) == ("spawn", "nccl")
    weft.launch(lambda: None, layout="dp4")  # more ranks than GPUs
    assert (started["start"], started["backend"]) == ("fork", "gloo")
    monkeypatch.setattr(launch_function, "autograd_survives_fork", lambda: False)
    weft.launch(where, 1.0, layout="dp4")
    assert (started["start"], started["backend"]) == ("spawn", "gloo")
