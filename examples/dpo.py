"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of a causal model.

    python examples/dpo.py --layout fsdp2  # two processes on this machine
    python examples/dpo.py --model DIR --pairs FILE  # a Hugging Face model, and pairs of yours

The trained policy is then in runs/dpo/policy, as `from_pretrained` takes it.

FILE has a line of JSON for each pair: {"prompt": ..., "chosen": ..., "rejected": ...}. Without it,
pairs are made of Python's standard library: the line that follows is chosen, another rejected.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import weft
from weft.data import Loader, collate, stdlib

BETA = 0.1


class WithReference(nn.Module):
    """A policy, and the frozen model that it began as."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = policy
        self.reference = copy.deepcopy(policy).requires_grad_(False).eval()

    def forward(
        self, chosen: Tensor, chosen_labels: Tensor, rejected: Tensor, rejected_labels: Tensor
    ) -> dict[str, Tensor]:
        """The log probability of each answer under each model, [b]."""
        found = {
            "chosen": log_prob(self.policy, chosen, chosen_labels),
            "rejected": log_prob(self.policy, rejected, rejected_labels),
        }
        with torch.no_grad():
            found["reference_chosen"] = log_prob(self.reference, chosen, chosen_labels)
            found["reference_rejected"] = log_prob(self.reference, rejected, rejected_labels)
        return found


def log_prob(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum over the answer's tokens, whose labels [b, s] are not -100; labels are shifted."""
    logits = model(input_ids=tokens, use_cache=False).logits
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return -each.sum(dim=1)


def dpo(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Equation 7 of the paper, summed over pairs, and how many there are."""
    chosen = output["chosen"] - output["reference_chosen"]
    rejected = output["rejected"] - output["reference_rejected"]
    return -F.logsigmoid(BETA * (chosen - rejected)).sum(), len(chosen)


class Pairs:
    """Pairs as weft's samples: tokens and labels of both answers, cut or padded to `seq_len`."""

    def __init__(
        self, pairs: Sequence[dict[str, str]], encode: Callable[[str], list[int]], seq_len: int
    ):
        self.pairs, self.encode, self.seq_len = pairs, encode, seq_len

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair, sample = self.pairs[index], {}
        prompt = self.encode(pair["prompt"])[-(self.seq_len // 2) :]  # so that an answer fits
        for answer in ("chosen", "rejected"):
            tokens = [*prompt, *self.encode(pair[answer])][: self.seq_len + 1]
            labels = [-100] * len(prompt) + tokens[len(prompt) :]
            # padding comes after all that counts, so that causal attention does not see it
            pad = self.seq_len + 1 - len(tokens)
            sample[answer] = torch.tensor(tokens + [0] * pad)[:-1]
            sample[f"{answer}_labels"] = torch.tensor(labels + [-100] * pad)[1:]
        return sample


def lines_of_code(count: int) -> list[dict[str, str]]:
    """Pairs out of Python's standard library."""
    data = stdlib(seq_len=64 * count)
    lines = [x for x in data.decode(data[0]["input_ids"].tolist()).split("\n") if x.strip()]
    pairs = zip(lines, lines[1:], lines[7:], strict=False)
    return [{"prompt": a + "\n", "chosen": b, "rejected": c} for a, b, c in pairs][:count]


def read(options: argparse.Namespace) -> tuple[nn.Module, Pairs]:
    """The policy and the pairs."""
    torch.manual_seed(0)
    if options.model:
        policy: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        encode = partial(
            transformers.AutoTokenizer.from_pretrained(options.model).encode,
            add_special_tokens=False,
        )
    else:  # a small model of bytes
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=256, **shape, **heads)
        policy, encode = transformers.LlamaForCausalLM(config), lambda text: list(text.encode())
    if options.pairs:
        text = Path(options.pairs).read_text(encoding="utf-8")
        pairs = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        pairs = lines_of_code(256)
    return policy, Pairs(pairs, encode, options.seq_len)


def train(options: argparse.Namespace) -> list[float]:
    """What each rank does; the losses."""
    policy, data = read(options)
    model = WithReference(policy)
    sample = collate([data[0], data[1]])
    plan = weft.plan(model, options.layout, batch=options.batch, loss=dpo, sample=sample)
    adamw = partial(torch.optim.AdamW, lr=options.lr)
    engine = weft.Engine(model, plan, optimizer=adamw, loss=dpo, sample=collate([data[0]]))
    loader = Loader(data, options.batch, 0, data_rank=engine.data_rank, data_size=engine.data_size)
    losses = []
    for batch in islice(loader, options.steps):
        losses.append(float(engine.step(batch).loss))
        if dist.get_rank() == 0 and engine.steps_done % 5 == 0:
            print(f"step {engine.steps_done}: loss {losses[-1]:.4f}", flush=True)
    weft.checkpoint.save(engine, options.output)
    engine.close()
    return losses


def export(options: argparse.Namespace) -> None:
    """The policy of the checkpoint, in one process, as a model directory of Hugging Face."""
    policy, _ = read(options)
    model = WithReference(policy)
    plan = weft.plan(model, "dp1", batch=1, loss=dpo)
    engine = weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=dpo)
    weft.checkpoint.load(engine, options.output)
    model.policy.save_pretrained(Path(options.output, "policy"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="fsdp2", help='as in "dp2", "tp2"')
    parser.add_argument("--model", help="a model directory of Hugging Face")
    parser.add_argument("--pairs", help="a file of JSON lines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--output", default="runs/dpo")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    weft.launch(train, options, layout=options.layout)
    export(options)
