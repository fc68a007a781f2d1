"""The command line: what it refuses, before any process starts, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

# so that it is not first imported while a test has replaced what it imports
import weft.verification.verify_model
from tests.run_files import TINY
from weft.checkpoint import Retention, save_checkpoint
from weft.cli.app import app
from weft.core.errors import NO_CODE, ConfigError
from weft.core.shards import whole_shard
from weft.launch import local_workers

MINE = """
import os, signal, time
import torch

class Rows:
    # "what" happens when a rank reads the sample after the first, which the parent looks at
    def __init__(self, what):
        self.what, self.parent = what, os.getpid()
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if os.environ.get("RANK") == "1" and i > 0:
            if self.what == "raise":
                raise ValueError("the row is torn")
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "wait":
                open("waiting", "w").close()
                time.sleep(600)
        return {"input": torch.zeros(3), "label": torch.tensor(0)}

def model():
    return torch.nn.Linear(3, 2)

class Tokens:
    # sample `at` has a token, `odd`, that the model does not know
    def __init__(self, at=99, odd=35, seq_len=8):
        self.at, self.odd, self.seq_len = at, odd, seq_len
    def __len__(self):
        return 64
    def __getitem__(self, i):
        ids = (torch.arange(self.seq_len + 1) + i) % 32
        if i == self.at:
            ids[3] = self.odd
        return {"input_ids": ids[:-1], "labels": ids[1:]}

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 8)
        self.places = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 32)
    def forward(self, input_ids):
        x = self.tokens(input_ids)
        x = x + self.places(torch.arange(input_ids.shape[1], device=x.device))
        return self.head(x)

def mean(output, batch):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

def broken():
    raise AttributeError("a fault of the model itself")
"""

TORN = """
[model]
build = "mine_of_refusals_test:model"
[data]
build = "mine_of_refusals_test:Rows"
what = "raise"
[train]
batch = 8
steps = 2
threads = 1
loss = "weft.losses:classification"
"""


TOKENS = """
[model]
build = "mine_of_refusals_test:Small"
[data]
build = "mine_of_refusals_test:Tokens"
[train]
batch = 8
steps = 8
threads = 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two run files; started by no launcher."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of a machine that was not measured
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "small.toml").write_text(TINY)
    (tmp_path / "torn.toml").write_text(TORN)
    (tmp_path / "tokens.toml").write_text(TOKENS)
    (tmp_path / "mine_of_refusals_test.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine_of_refusals_test", raising=False)
    return tmp_path


def weft_(*args: str) -> Result:
    return CliRunner().invoke(app, args)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process fails the test."""

    def start(*args: object, **options: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(local_workers, "run_workers", start)
    monkeypatch.setattr(local_workers, "Pool", start)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "train smal.toml",
            "run file = 'smal.toml': there is no such file. Did you mean \"small.toml\"?",
        ),
        (
            "train small.toml --set train.bacth=4",
            'train.bacth = 4: is not a key of [train]. Did you mean "batch"?',
        ),
        (
            "train small.toml --set train.lr=4",
            "train.lr = 4: is not a key of [train]. Did you mean optimizer.lr?",
        ),
        (
            "train small.toml --set train.checkpoint_every=4",
            "is not a key of [train]. Did you mean checkpoint.every?",
        ),
        (
            "train small.toml --set train.loss=next_token",
            "train.loss = 'next_token': is not of the form package.module:callable. Did you mean"
            ' "weft.losses:next_token"?',
        ),
        ("train small.toml --set train.loss=weft.losses.mse", '"weft.losses:mse"?'),
        ("train small.toml --set train.loss=a.b.mine", 'Write "a.b:mine" for mine in a/b.py.'),
        (
            "train small.toml --output s3://bucket/run",
            "output = 's3://bucket/run': is an address, and a run writes to a folder. Name a",
        ),
        ("train small.toml --set train.precision=fp32", "Did you mean [precision]?"),
        ("train small.toml --set train.build=a:b", "is not a key of [train]. Known: acc"),
        (
            "train small.toml --set train.batch",
            "--set = 'train.batch': has no =. Write --set train.steps=20.",
        ),
        (
            "simulate small.toml",
            "Run weft calibrate first, or name hardware, as in --cluster h100x8",
        ),
        ("train small.toml --set train.batch=0", "train.batch = 0: must be greater than 0"),
        (
            "train small.toml --layout dp2x",
            "layout.axes = 'dp2x': 'dp2x' is not an axis with a size",
        ),
        (
            "train small.toml --set train.offload_activations=true",
            "train.offload_activations = True: the run's device is the CPU",
        ),
        (
            "train small.toml --layout dp2 --set train.fsdp_prefetch=2",
            "train.fsdp_prefetch = 2: has no effect with layout dp2, which gathers no weights",
        ),
        (
            "train small.toml --set train.backend=mpi",
            "train.backend = 'mpi': ",
        ),
        (
            "train small.toml --set train.fsdp_prefetch=0",
            "train.fsdp_prefetch = 0: must be greater",
        ),
        ("train small.toml --layout dp2.qq2", "layout = 'dp2.qq2': there is no axis 'qq'"),
        ("train small.toml --layout fsdp2+zero4", "has no option 'zero4'. Did you mean \"zero"),
        ("train small.toml --layout dp3", "train.batch = 8: does not divide over 3 data ranks"),
        ("train small.toml --layout tp3", "heads"),
        (
            "train small.toml --set precision.compute=bf16 --set precision.float8=rowwise",
            "precision.float8 = 'rowwise': a CPU has no float8. Leave it out; weft verify",
        ),
        (
            "train small.toml --set precision.float8=rowwise",
            "precision.float8 = 'rowwise': float8 goes with bf16",
        ),
        (
            "verify small.toml --set precision.float8=rowwise",
            "precision.float8 = 'rowwise': float8 goes with bf16",
        ),
        (
            "train small.toml --layout dp2 --nproc 4",
            "--nproc = 4: layout dp2 has 2 ranks, and there are 4. Use 2",
        ),
        (
            "train small.toml --set train.loss=weft.losses:none",
            "train.loss = 'weft.losses:none': weft.losses has no none",
        ),
        (
            "train small.toml --set train.loss=torch.nn:CrossEntropyLoss",
            "train.loss = 'torch.nn:CrossEntropyLoss': is a class, not a loss. Name a function of"
            " (output, batch) that returns (sum, weight), such as weft.losses:classification",
        ),
        (
            "train small.toml --set train.loss=torch.nn.functional:cross_entropy",
            "train.loss = 'torch.nn.functional:cross_entropy': does not take (output, batch)",
        ),
        (
            "verify small.toml --set train.loss=weft.losses:cross_entropy",
            "train.loss = 'weft.losses:cross_entropy': does not take (output, batch)",
        ),
        (
            "train small.toml --set model.dims=3",
            'model.dims = 3: is not a known argument of weft.models:decoder. Did you mean "dim"?',
        ),
        (
            "train small.toml --set data.group_by_lenght=4",
            "data.group_by_lenght = 4: is not a known argument of weft.data:stdlib."
            ' Did you mean "group_by_length"?',
        ),
        ("train small.toml --set data.seq_len=60000", "samples, fewer than one batch"),
        (
            "train small.toml --set optimizer.name=lionn",
            "optimizer.name = 'lionn': is not a known optimizer. Did you mean \"lion\"?",
        ),
        (
            "train small.toml --layout dp2.tp2 --set sync.name=parameter_server --set"
            " sync.staleness=1 --set optimizer.name=muon --set optimizer.adamw=[]",
            "optimizer.name = 'MuonWithAdamW': it needs whole tensors, and under",
        ),
        (
            "train small.toml --set optimizer.name=muon",
            "optimizer.adamw = None: Muon must not update embeddings and heads",
        ),
        (
            "train small.toml --set optimizer.name=sparseadam",
            "optimizer.name = 'sparseadam': it takes sparse gradients alone",
        ),
        (
            'train small.toml --set optimizer.no_decay=["*nrom*"]',
            "optimizer.no_decay = '*nrom*': matches no parameter",
        ),
        (
            'train small.toml --set optimizer.groups={"blocks.*"={lrr=1e-4}}',
            "optimizer.groups.blocks.*.lrr = 0.0001: is not a known setting of a group of adamw",
        ),
        (
            'train small.toml --set optimizer.groups={"block.*"={lr=1e-4}}',
            "optimizer.groups = 'block.*': matches no parameter",
        ),
        (
            "train small.toml --set optimizer.name=rprop --set optimizer.decay_min_dims=2",
            "optimizer.decay_min_dims = 2: rprop has no weight decay. Leave it out.",
        ),
        (
            "train small.toml --set optimizer.lr=-1.0",
            "optimizer.lr = -1.0: adamw refuses: Invalid learning rate: -1.0",
        ),
        (
            "train small.toml --set optimizer.betas=[0.9]",
            "optimizer.betas = (0.9,): is not a list of 2 values. Write as in [0.9, 0.999].",
        ),
        ("verify small.toml --set precision.reduce=bf16", "precision.reduce = 'bf16'"),
        ("train small.toml --output small.toml/x", "output = 'small.toml/x': cannot be written to"),
        ("train small.toml --resume", "no complete checkpoint is here"),
        ("train torn.toml --layout tp2", "tensor parallelism finds no"),
        (
            "verify small.toml --layout dp3 --layout dp5",
            "train.batch = 8: does not divide over 5 data ranks",
        ),
        (
            "verify small.toml --set trian.steps=3",
            "trian = {'steps': 3}: is not a key of a run file. Did you mean \"train\"?",
        ),
        ("verify small.toml --world 257", "tp257 is refused"),
        (
            "train tokens.toml --set data.at=0",
            "batch['input_ids'] = 35: tokens has 32 rows, for tokens from 0 to 31. Give the model"
            " a vocabulary of at least 36, or correct the data.",
        ),
        ("verify tokens.toml --layout tp2 --set data.at=0", "['input_ids'] = 35: tokens has 32"),
        (
            "train tokens.toml --set data.seq_len=20",
            "the model looks up position 19 in places, which has 16 rows. Give the data a shorter",
        ),
        (
            "train small.toml --set data.seq_len=32",
            "data = 'a sample': the model refuses it: 32 tokens are more than seq_len = 16. Give",
        ),
        (
            "train tokens.toml --set train.loss=mine_of_refusals_test:mean",
            "loss = 'mean': returns one tensor of shape [], not (sum, weight). Return (sum",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_process_starts(
    args: str, says: str, folder: Path
) -> None:
    result = weft_(*args.split())
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    if "--output" not in args:
        assert not (folder / "runs").exists()


@pytest.mark.usefixtures("no_process")
def test_missing_data_is_refused(folder: Path) -> None:
    (folder / "words.toml").write_text(
        TINY.replace('build = "weft.data:stdlib"\n', 'text = ["no/*.txt"]\n').replace(
            "max_bytes = 100000", ""
        )
    )
    result = weft_("train", "words.toml")
    assert result.exit_code == 2
    assert "text = 'no/*.txt': no file matches" in result.stderr


@pytest.mark.usefixtures("no_process")
def test_launched_processes_must_be_as_many_as_the_layout_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    result = weft_("train", "small.toml", "--layout", "dp2")
    assert result.exit_code == 2
    assert "WORLD_SIZE = 4: layout dp2 has 2 ranks" in result.stderr
    monkeypatch.setenv("RANK", "3")  # only one of them says so
    result = weft_("train", "small.toml", "--layout", "dp2")
    assert (result.exit_code, result.stderr) == (2, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'RUN.toml'"),
        (["train", "small.toml", "--nproc"], "Option '--nproc' requires an argument"),
        (["train", "small.toml", "--nproc", "two"], "Invalid value for '--nproc': "),
        (["train", "small.toml", "--set", "train.steps", "3"], "Got unexpected extra argument"),
        (["checkpoint", "shw"], "No such command 'shw'. Did you mean 'show'?"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(words: list[str], says: str) -> None:
    result = weft_(*words)
    assert result.exit_code == 2 and result.stderr.startswith(f"weft: {says}")
    assert result.stderr.endswith(" --help)\n") and result.stderr.count("\n") == 1


def test_a_command_without_words_shows_its_help() -> None:
    for words in ([], ["checkpoint"]):
        result = weft_(*words)
        assert result.exit_code == 2 and "Usage: " in result.output + result.stderr


def test_a_fault_of_the_users_own_code_is_named_with_its_line() -> None:
    line = MINE.splitlines().index('    raise AttributeError("a fault of the model itself")') + 1
    result = weft_("train", "torn.toml", "--set", "model.build=mine_of_refusals_test:broken")
    assert result.exit_code == 2
    [said] = result.stderr.splitlines()
    assert f"a fault of the model itself (mine_of_refusals_test.py, line {line}, in broken)" in said


# ---- what runs -----------------------------------------------------------------------------------


def test_a_run_trains_and_a_second_one_does_not_overwrite_it(folder: Path) -> None:
    args = (
        "train",
        "small.toml",
        "--layout",
        "dp2",
        "--set",
        "checkpoint.every=1",
        "--output",
        "out",
    )
    result = weft_(*args)
    assert result.exit_code == 0, result.output
    assert 'axes = "dp2"' in (folder / "out" / "run.toml").read_text()
    again = weft_(*args)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    longer = weft_(*args, "--resume", "--set", "train.steps=3")
    assert longer.exit_code == 0, longer.output
    steps = [
        json.loads(line)["step"]
        for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) == 3


@pytest.mark.parametrize("layout", ["dp1", "vp2"])
@pytest.mark.parametrize(("odd", "cannot"), [(35, "Give the model"), (-3, "Correct the data")])
def test_a_token_that_the_model_does_not_know_is_refused_where_it_comes(
    layout: str, odd: int, cannot: str
) -> None:
    settings = ["--set", "data.at=40", "--set", f"data.odd={odd}"]
    result = weft_("train", "tokens.toml", "--layout", layout, *settings)
    assert result.exit_code == 2, result.output
    says = f"batch['input_ids'] = {odd}: tokens has 32 rows, for tokens from 0 to 31. {cannot}"
    assert says in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("what", "says"), [("raise", "ValueError: the row is torn"), ("kill", "killed by SIGKILL")]
)
def test_a_rank_that_dies_ends_the_run(what: str, says: str) -> None:
    start = time.monotonic()
    result = weft_("train", "torn.toml", "--layout", "dp2", "--set", f"data.what={what}")
    assert time.monotonic() - start < 15
    assert result.exit_code == 1, result.output
    assert "weft: rank 1 died:" in result.stderr
    assert result.stderr.count(says) == 1


def test_verify_says_whether_all_agree() -> None:
    result = weft_("verify", "small.toml", "--layout", "dp2", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] is True
    assert [layout["layout"] for layout in report["layouts"]] == ["dp2"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts that `weft verify` is asked for; it runs none and says that one differs."""
    import weft.verification
    from weft.verification import VerifyReport

    found: list[str] = []

    class Failed(VerifyReport):
        passed = False

        def verdict(self) -> str:
            return "block 3 differs"

    def verify_layouts(run: object, layouts: list[str], *_: object) -> Failed:
        found.extend(layouts)
        return Failed((), 1)

    monkeypatch.setattr(weft.verification, "verify_layouts", verify_layouts, raising=False)
    return found


def test_verify_tries_every_layout_of_four_ranks(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nothing is planned: that takes a minute."""
    reason = ConfigError("layout", "tp4", "two heads", "use tp2")
    monkeypatch.setattr("weft.cli.verify._refused_layouts", lambda *_: {"tp4": reason})
    result = weft_("verify", "small.toml", "--world", "4")
    assert result.exit_code == 1
    assert "block 3 differs" in result.stdout
    some = "dp4 fsdp4 fsdp4+zero1 dp2.fsdp2+zero2 dp2.tp2+sequence fsdp2.tp2"
    assert set(some.split()) <= set(asked)
    assert len(asked) == len(set(asked)) and not {"tp2", "tp4"} & set(asked)
    assert "left out tp4" in result.stderr


def test_verify_takes_every_layout_of_two_ranks(asked: list[str]) -> None:
    settings = ("--set", "train.clip=1.0", "--set", "pipeline.cut=time")
    result = weft_("verify", "small.toml", "--world", "2", *settings)
    assert result.exit_code == 1 and "block 3 differs" in result.stdout
    assert {"dp2", "fsdp2+zero1", "tp2+sequence"} <= set(asked)
    assert "pp2+zb-h1" in asked  # stages of equal time are measured by the ranks
    assert "pp2+pipedream" not in asked  # which cannot clip, and leaves the others be
    assert "tp4" not in asked


@pytest.mark.parametrize("precision", ["bf16", "float8"])
def test_settings_that_need_the_precision_of_verify_are_checked_with_it(
    asked: list[str], precision: str
) -> None:
    settings = ["--set", "precision.reduce=bf16", "--set", "precision.float8=rowwise"]
    result = weft_("verify", "small.toml", "--precision", precision, "--layout", "dp2", *settings)
    assert result.exit_code == 1 and "block 3 differs" in result.stdout, result.output
    assert asked == ["dp2"]


# ---- the command itself --------------------------------------------------------------------------


def command(*args: str, cwd: Path) -> subprocess.Popen[str]:
    source = str(Path(weft.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    heed = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # where tests run in the background it is ignored
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd,
        env=env,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=heed,
    )


def test_ctrl_c_ends_the_run(folder: Path) -> None:
    process = command(
        "-m", "weft", "train", "torn.toml", "--layout", "dp2", "--set", "data.what=wait", cwd=folder
    )
    deadline = time.monotonic() + 120
    while not (folder / "waiting").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stderr.strip().endswith("weft: interrupted")
    assert "Traceback" not in stderr


def test_help_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom weft.cli.app import main\nsys.argv = ['weft', '--help']\ntry:"
        " main()\nexcept SystemExit: pass\n"
    )
    process = command(
        "-c", code + "assert 'torch' not in sys.modules, 'torch was imported'", cwd=folder
    )
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "verify" in stdout


def test_the_old_name_of_an_option_names_the_new_one() -> None:
    result = weft_("plan", "small.toml", "--wide")
    assert result.exit_code == 2
    assert "is now called --exhaustive" in result.stderr


# ---- run files of others -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "verify", "plan", "simulate"])
@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("model.build", "touched:model", "model.build"),
        ("model.build", "weft.train.build:os.system", "model.build"),
        ("data.build", "touched:rows", "data.build"),
        ("train.loss", "touched:loss", "train.loss"),
        ("optimizer.build", "touched:Optimizer", "optimizer.build"),
        ("pipeline.schedule", "touched:schedule", "pipeline.schedule"),
    ],
)
def test_a_run_file_of_others_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, key: str, value: str, field: str
) -> None:
    """Nor is a module beside it imported."""
    for name in (NO_CODE, "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")  # and is put back
    monkeypatch.chdir(tmp_path)
    (tmp_path / "touched.py").write_text("open('touched', 'w').close()")
    (tmp_path / "run.toml").write_text(TINY)
    more = ["--cluster", "h100x2"] if command in ("plan", "simulate") else []
    layout = ["--layout", "pp2" if field == "pipeline.schedule" else "dp2"]
    given = ["--set", f"{key}={value}", *layout, *more]
    result = CliRunner().invoke(app, [command, "run.toml", "--no-code", *given])
    said = " ".join(result.output.split())
    assert result.exit_code == 2, said
    assert f"{field} = '{value}': is code from outside weft, which --no-code" in said
    assert not (tmp_path / "touched").exists() and str(tmp_path) not in sys.path


def test_a_run_folder_of_others_is_exported_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NO_CODE, "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")
    (tmp_path / "touched.py").write_text("open('touched', 'w').close()")
    adapted = 'adapter = { r = 2, target_modules = ["up"] }\nbuild = "touched:model"'
    (tmp_path / "run.toml").write_text(re.sub(r"build = .*decoder.*", adapted, TINY))
    piece = whole_shard("w", torch.zeros(2))
    save_checkpoint(tmp_path / "checkpoints", 1, [piece], {}, {}, Retention(1))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["checkpoint", "export", ".", "--to", "out", "--no-code"])
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and "is code from outside weft, which --no-code" in said, said
    assert not (tmp_path / "touched").exists()


def test_a_run_file_of_weft_alone_needs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NO_CODE, "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")
    (tmp_path / "run.toml").write_text(TINY)
    given = [str(tmp_path / "run.toml"), "--no-code", "--cluster", "h100x1"]
    result = CliRunner().invoke(app, ["simulate", *given])
    assert result.exit_code == 0, result.output
