"""Distillation: a small decoder learns what a larger one says of each next byte.

    python examples/distill.py --layout fsdp2  # two processes on this machine

First the teacher is trained for a few steps on Python's standard library; any module that returns
logits may stand there. Then the student learns from the teacher's distribution, softened by a
temperature (Hinton et al. 2015, arXiv:1503.02531), and from the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.data import Loader, Text, collate, stdlib
from weft.losses import next_token
from weft.models import decoder

TEMPERATURE, SOFT = 2.0, 0.9  # SOFT: how much of the loss is the teacher's
SEQ_LEN = 64


class WithTeacher(nn.Module):
    """A student, and the frozen teacher beside it."""

    def __init__(self, student: nn.Module, teacher: nn.Module):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False).eval()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of both, [b, s, vocabulary]."""
        with torch.no_grad():
            said = self.teacher(input_ids)
        return self.student(input_ids), said


@weft.losses.positionwise
def distillation(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over tokens, and how many there are."""
    student, teacher = output
    log_ours = (student / TEMPERATURE).log_softmax(-1)
    log_theirs = (teacher / TEMPERATURE).log_softmax(-1)
    divergence = F.kl_div(log_ours, log_theirs, reduction="sum", log_target=True)
    hard, tokens = next_token(student, batch)
    return SOFT * TEMPERATURE**2 * divergence + (1 - SOFT) * hard, tokens


def make_teacher() -> nn.Module:
    torch.manual_seed(0)
    return decoder(dim=128, layers=2, heads=4, seq_len=SEQ_LEN)


def make_student() -> nn.Module:
    torch.manual_seed(1)
    return decoder(dim=48, layers=1, heads=4, seq_len=SEQ_LEN)


def text() -> Text:
    return stdlib(seq_len=SEQ_LEN)


def fit(engine: weft.Engine, options: argparse.Namespace, steps: int, what: str) -> list[float]:
    """Take steps; the losses."""
    part = {"data_rank": engine.data_rank, "data_size": engine.data_size}
    losses = []
    for batch in islice(Loader(text(), options.batch, seed=0, **part), steps):
        losses.append(float(engine.step(batch).loss))
        if dist.get_rank() == 0 and engine.steps_done % 20 == 0:
            print(f"{what}, step {engine.steps_done}: loss {losses[-1]:.3f}", flush=True)
    return losses


def teach(options: argparse.Namespace) -> None:
    """Each rank's part in training the teacher."""
    model = make_teacher()
    sample = collate([text()[0], text()[1]])
    plan = weft.plan(model, options.layout, batch=options.batch, loss=next_token, sample=sample)
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    engine = weft.Engine(model, plan, optimizer=adamw, loss=next_token)
    fit(engine, options, options.teacher_steps, "teacher")
    weft.checkpoint.save(engine, f"{options.output}/teacher")
    engine.close()


def trained_teacher(options: argparse.Namespace) -> nn.Module:
    """Of that checkpoint, in this one process."""
    model = make_teacher()
    plan = weft.plan(model, "dp1", batch=1, loss=next_token)
    engine = weft.Engine(
        model, plan, optimizer=torch.optim.AdamW, loss=next_token, device="cpu"
    )  # so that the next ranks can be forked
    weft.checkpoint.load(engine, f"{options.output}/teacher")
    return model


def distill(teacher: nn.Module, options: argparse.Namespace) -> list[float]:
    """Each rank's part in training the student; the losses."""
    model = WithTeacher(make_student(), teacher)
    sample = collate([text()[0], text()[1]])
    asked = {"batch": options.batch, "loss": distillation, "parts": options.parts}
    plan = weft.plan(model, options.layout, sample=sample, **asked)
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    engine = weft.Engine(model, plan, optimizer=adamw, loss=distillation)
    losses = fit(engine, options, options.steps, "student")
    weft.checkpoint.save(engine, f"{options.output}/student")
    engine.close()
    return losses


def parts(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="fsdp2", help='as in "dp2", "tp2"')
    parser.add_argument(
        "--parts", type=parts, default={}, help="as in 'teacher=fsdp student=whole'"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--teacher-steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--output", default="runs/distill")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    weft.launch(teach, options, layout=options.layout)
    weft.launch(distill, trained_teacher(options), options, layout=options.layout)
