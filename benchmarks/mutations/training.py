"""Short runs of `weft train`, as `weft verify --deep` makes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

from weft.core import load_run
from weft.verification import training_check
from weft.verification.training_check import TrainingDefinition, define_training, verify_training
from weft.verification.verify_run import deep_case

training_check.STEPS, training_check.MORE_STEPS = 8, 20  # 20 and 8 for users
DECODER = """
[model]
build = "weft.models:decoder"
vocab = {vocab}
dim = 8
layers = 2
heads = 2
hidden = 16
seq_len = 6
dropout = 0.1
[data]
build = "{data}"
{arguments}
[train]
batch = 4
accumulate = 2
steps = 400
seed = 3
"""
PADDED = DECODER.format(
    vocab=31, data="tests.verification.test_training_proof:Padded", arguments=""
)
TEXT = DECODER.format(
    vocab=256, data="weft.data:stdlib", arguments='seq_len = 6\nmax_bytes = 4000\nfiles = ["a*.py"]'
)
ADAMW = """
[optimizer]
name = "adamw"
lr = 1e-2
"""
RUNS = {
    "clips": PADDED
    + 'clip = 1.0\nwarmup = 100\ndecay = "cosine"\nmin_lr_ratio = 0.1\neval_every = 50\n'
    + "eval_batches = 3"
    + ADAMW,
    "skips": PADDED + "clip = 1.0\nskip = 5.0" + ADAMW,
    "rolls back": PADDED + "rollback = 3.0" + ADAMW + "[checkpoint]\nevery = 100\n",
    "routes": PADDED.replace("dropout = 0.1", "experts = 4\nbalance = 0.1\ncapacity = 0.75")
    + 'eval_every = 50\neval_batches = 2\neval_metrics = ["tests.train.test_eval_metrics:surprise"]'
    + ADAMW,
    "serves": PADDED
    + 'clip = 1.0\nwarmup = 100\ndecay = "cosine"\neval_every = 50\neval_batches = 2'
    + ADAMW
    + '[sync]\nname = "parameter_server"\nservers = 2\nstaleness = 2\n',
    "reads text": TEXT + 'decay = "linear"' + ADAMW + "decay_min_dims = 2\n",
    "sees images": """
[model]
build = "weft.models:convnet"
channels = 4
classes = 4
[data]
build = "weft.data:shapes"
size = 40
image = 8
[train]
batch = 4
steps = 400
loss = "weft.losses:classification"
eval_every = 100
eval_batches = 2
seed = 3
[optimizer]
name = "muon"
lr = 1e-2
adamw = ["head.weight"]
""",
}
TRAINED = (
    ("clips", "dp2"),
    ("clips", "fsdp2"),
    ("clips", "pp2"),
    ("skips", "dp2"),
    ("rolls back", "dp2"),
    ("routes", "dp2"),
    ("routes", "ep2"),
    ("serves", "dp2"),
    ("reads text", "dp2"),
    ("sees images", "dp2"),
)


def deep_says(name: str, layout: str) -> tuple[str, tuple[float, ...]]:
    """What `weft verify --deep` finds wrong, "" if nothing; and numbers of its definition."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(RUNS[name])
        run = load_run(path)
    with mock.patch.object(training_check, "define_training") as define:
        noted: list[list[TrainingDefinition]] = []
        define.side_effect = lambda *given: noted.append(define_training(*given)) or noted[-1]
        (result,) = verify_training(*deep_case(run), [layout], lambda result: None)
    wrong = [f"{proof.what}: {proof.shown}" for proof in result.proofs if not proof.equal]
    return "; ".join(wrong), _numbers(noted[0])


def _numbers(defined: list[TrainingDefinition]) -> tuple[float, ...]:
    found: list[float] = []
    for each in defined:
        lines = each.trajectory.lines
        found += [value for step in sorted(lines) for _, value in sorted(lines[step].items())]
        validations = sorted(each.trajectory.validations.items())
        found += [value for _, line in validations for _, value in sorted(line.items())]
        found += [float(t.double().square().sum()) for t in each.trajectory.final.values()]
    return tuple(found)
