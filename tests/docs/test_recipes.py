"""The examples in Python run as they stand, in small, and compute what plain torch computes."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import weft
from weft.core import DataError
from weft.data import Loader, named_samples

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """examples/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def options(module: ModuleType, *arguments: str) -> Namespace:
    return module.parse(arguments)


# ---- mnist ---------------------------------------------------------------------------------------

EPOCHS = 3


def plain_accuracy(mnist: ModuleType, samples: int, batch: int) -> float:
    """As PyTorch's own example trains: a DataLoader of tuples, a mean loss, no weft but its order
    of samples."""
    torch.manual_seed(0)
    model, data, test = mnist.Net(), mnist.Digits(samples), mnist.Digits(samples, "test")
    for dropout in (model.dropout1, model.dropout2):
        dropout.p = 0.0
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    order = Loader(named_samples(data, ("image", "label")), batch, 0)
    for step in range(EPOCHS * order.steps_per_epoch):
        images, labels = stacked([data[i] for i in order.indices(step)])
        optimizer.zero_grad()
        torch.nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()
        if (step + 1) % order.steps_per_epoch == 0:
            schedule.step()
    images, labels = stacked([test[i] for i in range(samples)])
    return float((model.eval()(images).argmax(1) == labels).double().mean())


def stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_mnist_learns_as_plain_torch_does(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = load("mnist")
    net = mnist.Net

    def without_dropout() -> Any:  # whose masks are weft's own
        made = net()
        made.dropout1.p = made.dropout2.p = 0.0
        return made

    monkeypatch.setattr(mnist, "Net", without_dropout)
    small = options(
        mnist, "--layout", layout, "--samples", "240", "--batch", "16", "--epochs", f"{EPOCHS}"
    )
    found = weft.launch(mnist.train, small, layout=layout)
    monkeypatch.setattr(mnist, "Net", net)
    expected = plain_accuracy(mnist, 240, 16)
    assert expected > 0.4 and abs(found - expected) <= 4 / 240


def test_samples_that_are_tuples_get_names() -> None:
    mnist = load("mnist")
    data = named_samples(mnist.Digits(4), ("image", "label"))
    assert {key: tuple(value.shape) for key, value in data[1].items()} == {
        "image": (1, 28, 28),
        "label": (),
    }
    with pytest.raises(DataError, match="a tuple of 2 items"):
        named_samples(mnist.Digits(4), ("image",))


# ---- dpo -----------------------------------------------------------------------------------------


def small_pairs(dpo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Namespace:
    """The recipe in float64, with pairs from a file, some of them cut and some padded."""
    file, read = tmp_path / "pairs.jsonl", dpo.read
    file.write_text("\n".join(map(json.dumps, dpo.lines_of_code(24))), encoding="utf-8")

    def in_float64(options: Namespace) -> Any:
        policy, data = read(options)
        return policy.double(), data

    monkeypatch.setattr(dpo, "read", in_float64)
    small = ["--steps", "3", "--batch", "4", "--seq-len", "60", "--output", str(tmp_path)]
    return options(dpo, "--pairs", str(file), *small)


def plain_dpo(policy: Any, pairs: list[dict[str, str]], small: Namespace) -> list[float]:
    """The definition (Rafailov et al. 2023, equation 7), answer by answer and without padding."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=small.lr)

    def log_ratio(prompt: str, answer: str) -> Tensor:
        start = list(prompt.encode())[-(small.seq_len // 2) :]
        ids = torch.tensor([[*start, *answer.encode()][: small.seq_len + 1]])
        found = []
        for model in (policy, reference):
            logs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
            taken = logs.gather(-1, ids[:, 1:, None])[0, :, 0]
            found.append(taken[len(start) - 1 :].sum())
        return found[0] - found[1]

    losses, order = [], Loader(pairs, small.batch, 0)  # type: ignore[arg-type]
    for step in range(small.steps):
        each = []
        for pair in (pairs[i] for i in order.indices(step)):
            better, worse = (log_ratio(pair["prompt"], pair[x]) for x in ("chosen", "rejected"))
            each.append(-(0.1 * (better - worse)).sigmoid().log())
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_dpo_is_that_of_the_paper(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dpo = load("dpo")
    small = small_pairs(dpo, monkeypatch, tmp_path)
    small.layout = layout
    found = weft.launch(dpo.train, small, layout=layout)
    policy, data = dpo.read(small)
    expected = plain_dpo(policy, data.pairs, small)
    assert expected[0] == pytest.approx(math.log(2)) and expected[-1] != expected[0]
    assert found == pytest.approx(expected, rel=1e-9)
    dpo.export(small)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, weight in saved.state_dict().items():
        assert torch.allclose(weight, policy.state_dict()[name].to(weight.dtype), atol=1e-6), name


# ---- distillation --------------------------------------------------------------------------------


def plain_distillation(distill: ModuleType, small: Namespace) -> tuple[list[float], Any]:
    """Softened distributions and their divergence, written out; the losses and the student."""
    student, teacher, data = distill.make_student(), distill.make_teacher(), distill.text()
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses, order = [], Loader(data, small.batch, 0)
    for step in range(small.steps):
        samples = [data[i] for i in order.indices(step)]
        ids, labels = (torch.stack([s[key] for s in samples]) for key in ("input_ids", "labels"))
        logits = student(ids)
        with torch.no_grad():
            theirs = (teacher(ids) / 2.0).softmax(-1)
        ours = (logits / 2.0).softmax(-1)
        soft = 4.0 * (theirs * (theirs.log() - ours.log())).sum(-1).mean()
        hard = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
        loss = 0.9 * soft + 0.1 * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, student


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2", "cp2", "parts"])
def test_distillation_equals_plain_torch(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distill = load("distill")
    for make in (distill.make_teacher, distill.make_student):  # in float64
        monkeypatch.setattr(distill, make.__name__, lambda make=make: make().double())
    small = options(distill, "--steps", "3", "--batch", "4", "--output", str(tmp_path))
    small.layout = layout
    if layout == "parts":
        small.layout, small.parts = "fsdp2", distill.parts("teacher=fsdp student=whole")
    found = weft.launch(distill.distill, distill.make_teacher(), small, layout=small.layout)
    expected, student = plain_distillation(distill, small)
    assert expected[-1] < expected[0] and found == pytest.approx(expected, rel=1e-9)

    one = distill.WithTeacher(distill.make_student(), distill.make_teacher())
    plan = weft.plan(one, "dp1", batch=1, loss=distill.distillation)
    loss = distill.distillation
    engine = weft.Engine(one, plan, optimizer=torch.optim.AdamW, loss=loss)
    weft.checkpoint.load(engine, tmp_path / "student")
    for name, weight in student.state_dict().items():
        assert torch.allclose(one.student.state_dict()[name], weight, atol=1e-8), name


def test_a_trained_teacher_comes_back(tmp_path: Path) -> None:
    distill = load("distill")
    few = ["--teacher-steps", "2", "--batch", "4", "--layout", "fsdp2"]
    small = options(distill, *few, "--output", str(tmp_path))
    weft.launch(distill.teach, small, layout="fsdp2")
    begun, trained = distill.make_teacher(), distill.trained_teacher(small)
    moved = (a - b for a, b in zip(begun.parameters(), trained.parameters()))
    assert all(float(difference.detach().abs().max()) > 1e-4 for difference in moved)


# ---- gan -----------------------------------------------------------------------------------------


class Float64:
    """A dataset with its real numbers in float64."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {k: x.double() if x.is_floating_point() else x for k, x in self.data[index].items()}


def plain_gan(gan: ModuleType, small: Namespace) -> tuple[list[tuple[float, float]], Any, Any]:
    """One loop, two optimizers, `detach`, no copies."""
    generator, judge = gan.make_nets()
    adam = partial(torch.optim.Adam, lr=small.lr, betas=(0.5, 0.999))
    of_judge, of_generator = adam(judge.parameters()), adam(generator.parameters())
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    whole = Loader(gan.shapes(size=small.samples, image=gan.SIDE, noise=0.05), small.batch, seed=0)
    losses, yes, no = [], torch.ones(small.batch, 1).double(), torch.zeros(small.batch, 1).double()
    for step in range(small.steps):
        drawn = generator(gan.draw_noise(2 * step, small.batch)).detach()
        judged = bce(judge(next(whole)["image"]), yes) + bce(judge(drawn), no)
        of_judge.zero_grad()
        judged.backward()
        of_judge.step()
        fooled = bce(judge(generator(gan.draw_noise(2 * step + 1, small.batch))), yes)
        of_generator.zero_grad()
        fooled.backward()
        of_generator.step()
        losses.append((judged.item(), fooled.item()))
    return losses, generator, judge


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
def test_two_engines_take_turns_as_one_loop_does(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gan = load("gan")
    shapes, nets, noise = gan.shapes, gan.make_nets, gan.draw_noise
    monkeypatch.setattr(gan, "shapes", lambda **how: Float64(shapes(**how)))
    monkeypatch.setattr(gan, "make_nets", lambda: tuple(net.double() for net in nets()))
    monkeypatch.setattr(gan, "draw_noise", lambda *which: noise(*which).double())
    few = ["--steps", "5", "--batch", "8", "--samples", "40", "--output", str(tmp_path)]
    small = options(gan, "--layout", layout, *few)
    found = weft.launch(gan.train, small, layout=layout)
    expected, generator, judge = plain_gan(gan, small)
    assert [x for pair in found for x in pair] == pytest.approx(
        [x for pair in expected for x in pair], rel=1e-9
    )
    turns = (
        ("generator", gan.GeneratorTurn, gan.generator_loss, generator),
        ("discriminator", gan.DiscriminatorTurn, gan.discriminator_loss, judge),
    )
    for name, turn, loss, net in turns:
        model = turn(*gan.make_nets())
        plan = weft.plan(model, "dp1", batch=1, loss=loss)
        engine = weft.Engine(model, plan, optimizer=torch.optim.Adam, loss=loss)
        weft.checkpoint.load(engine, tmp_path / name)
        for ours, theirs in zip(model.get_submodule(name).parameters(), net.parameters()):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# ---- clip ----------------------------------------------------------------------------------------


def plain_clip(clip: ModuleType, small: Namespace) -> list[float]:
    """The definition: each picture against all texts, and each text against all pictures."""
    model, data = clip.make_model(), clip.Captions(small.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, order = [], Loader(data, small.batch, 0)
    for step in range(small.steps):
        samples = [data[i] for i in order.indices(step)]
        image, words = (torch.stack([s[key] for s in samples]) for key in ("image", "words"))
        pictures, texts = model.image_encoder(image), model.text_encoder(words)
        pictures = pictures / pictures.norm(dim=1, keepdim=True)
        texts = texts / texts.norm(dim=1, keepdim=True)
        logits = model.logit_scale.exp() * pictures @ texts.T
        both = logits.log_softmax(0).diagonal() + logits.log_softmax(1).diagonal()
        loss = -both.mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("layout", "accumulate"), [("dp2", 1), ("dp2", 2), ("fsdp2", 1), ("tp2", 1), ("pp2+gpipe", 2)]
)
def test_clip_compares_the_whole_batch(
    layout: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = load("clip")
    captions, make = clip.Captions, clip.make_model
    monkeypatch.setattr(clip, "Captions", lambda *which: Float64(captions(*which)))
    monkeypatch.setattr(clip, "make_model", lambda: make().double())
    few = ["--steps", "4", "--batch", "8", "--samples", "32", "--accumulate", str(accumulate)]
    losses, held_out = weft.launch(
        clip.train, options(clip, "--layout", layout, *few), layout=layout
    )
    assert losses == pytest.approx(plain_clip(clip, options(clip, *few)), rel=1e-9)
    assert math.isfinite(held_out)
