"""Modules that a forward calls only where data say so, read off its source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.nn.conditional_calls import chosen_modules


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.aid, self.checkpointing = nn.Linear(4, 4), False


class IfAny(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            rows = x[:, i] > 0
            if rows.any():
                x = x.index_add(0, rows.nonzero()[:, 0], part(x[rows]))
        return x


class Continue(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.parts)):
            rows = (x[:, i] > 0).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            part = self.parts[i]
            x = x.index_add(0, rows, part(x[rows]))
        return x


class OverChosen(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i in x.argmax(1).unique():
            x = self.parts[i](x)
        return x


class ByIndex(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.parts[int(x.sum() > 0)](x)


class OneModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.aid(x) if x.sum() > 0 else x


class Always(Base):
    """Conditions that are the same on every rank."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        for part in self.parts:
            x = torch.relu(part(x)) if self.checkpointing and self.training else part(x)
        if twice and len(self.parts) > 1:
            x = self.aid(x)
        return x


@pytest.mark.parametrize(
    "kind, chosen",
    [
        (IfAny, ("parts",)),
        (Continue, ("parts",)),
        (OverChosen, ("parts",)),
        (ByIndex, ("parts",)),
        (OneModule, ("aid",)),
        (Always, ()),
    ],
)
def test_what_data_choose(kind: type[Base], chosen: tuple[str, ...]) -> None:
    assert chosen_modules(kind()) == chosen


def test_a_list_of_experts_is_chosen_from() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    assert chosen_modules(model) == ("experts.0",)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        count = 2
        self.experts, self.count = nn.ModuleList(nn.Linear(4, 4) for i in range(count)), count


class Soft(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x[:, i]) for i, expert in enumerate(self.experts)], 1)


class SoftByNumber(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(self.count):
            out = out + x[:, i : i + 1] * self.experts[i](x)
        return out


class Hit(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hit = x.argmax(1)
        for i in hit:
            x = self.experts[i](x)
        return x


class Some(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return sum(e(x) for i, e in enumerate(self.experts) if x[:, i].any())  # type: ignore[return-value]


class NoRows(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(self.count):
            (rows,) = torch.where(x.argmax(1) == i)
            if rows.shape[0] == 0:
                continue
            out.index_add_(0, rows, self.experts[i](x[rows]))
        return out


class Counted(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        counts, out = torch.bincount(x.argmax(1), minlength=2).tolist(), []
        for expert, part, count in zip(self.experts, x.split(counts), counts, strict=True):
            if count:
                out.append(expert(part))
        return torch.cat(out)


class Helped(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return sum(self.one(i, x[x.argmax(1) == i]) for i in range(self.count))  # type: ignore[return-value]

    def one(self, i: int, x: Tensor) -> Tensor:
        return self.experts[i](x) if x.shape[0] else x


class Given(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            hit = x.any()
            x = self.run(expert, x) if hit else x
        return x

    def run(self, expert: nn.Module, x: Tensor) -> Tensor:
        return expert(x)


class OtherLoop(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            x = x + i
        for i in x.argmax(1):
            x = self.experts[i](x)
        return x


class Enough(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
            if x.norm() < 1:
                return x
        return x


class Settled(Mixture):
    """Conditions that data do not change."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        if self.count == 0:
            return x
        for i in range(len(self.experts)):
            expert = self.experts[i]
            x = expert(x) if self.training else x + expert(x)
        return x


@pytest.mark.parametrize(
    "kind, all_called",
    [
        (Soft, True),
        (SoftByNumber, True),
        (Settled, True),
        (Hit, False),
        (Some, False),
        (NoRows, False),
        (Counted, False),
        (Helped, False),
        (Given, False),
        (OtherLoop, False),
        (Enough, False),
    ],
)
def test_experts_may_all_be_called(kind: type[Mixture], all_called: bool) -> None:
    assert (chosen_modules(kind()) == ()) is all_called
