"""What torch must keep doing for weft._torch.autograd."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from weft._torch.autograd import (
    REENTRANT,
    Recomputation,
    forwards_of_functions,
    in_backward,
    input_metadata,
    recomputation,
    rerun_by,
    run_backward,
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def test_a_hook_runs_in_a_backward_and_nothing_else_does() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(in_backward()))
    y = (3 * x).sum()
    assert not in_backward()
    y.backward()
    assert seen == [True] and not in_backward()


class Quadruple(Double):
    """Inherits its forward."""


class Separate(torch.autograd.Function):
    """Its forward has no ctx."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        running.append(forwards_of_functions().get(sys._getframe().f_code))
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


running: list[str | None] = []


def test_a_frame_tells_which_autograd_function_runs() -> None:
    known = forwards_of_functions()
    assert known[Double.forward.__code__] == "Double"  # not what inherits it
    Separate.apply(torch.ones(2, requires_grad=True))
    assert running == ["Separate"]
    assert test_a_frame_tells_which_autograd_function_runs.__code__ not in known


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_knows_what_will_run_it_again(reentrant: bool) -> None:
    found: list[str] = []

    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(rerun_by())
            return 2 * x

    net, leaf = Net(), torch.ones(2, requires_grad=True)
    net(torch.ones(2))
    checkpoint(net, leaf, use_reentrant=reentrant)
    with saved_tensors_hooks(id, id):
        net(leaf)
    Reversible.apply(leaf, net)
    Reversible.apply(leaf, net.forward)  # code of the function's own
    with torch.no_grad():
        net(leaf)
    kind = REENTRANT if reentrant else "torch.utils.checkpoint"
    assert found == ["", kind, "", "Reversible", "", ""]


def test_a_function_knows_which_call_of_checkpoint_computes_it_again() -> None:
    found: list[Recomputation | None] = []

    def outer(x: Tensor) -> Tensor:
        found.append(recomputation())
        return x * x

    x = torch.ones(2, requires_grad=True)
    outer(x)
    one, two = (checkpoint(outer, x, use_reentrant=False) for _ in range(2))
    for output in (two, one):
        torch.autograd.grad(output.sum(), x, retain_graph=True)
    torch.autograd.grad(one.sum(), x)
    with saved_tensors_hooks(id, id):
        outer(x)
    assert found[0] is None and found[-1] is None
    first, second, of_second, of_first, once_more = found[1:-1]
    assert first is not None and second is not None and first.call is not second.call
    assert first.backward is None and second.backward is None
    assert of_first is not None and of_second is not None and once_more is not None
    assert of_first.call is first.call is once_more.call and of_second.call is second.call
    assert len({of_first.backward, of_second.backward, once_more.backward, None}) == 4


def test_a_backward_gives_gradients_or_adds_them_to_leaves() -> None:
    x = torch.ones(2, requires_grad=True)
    y = 3 * x
    edge, grad = get_gradient_edge(y), torch.tensor([1.0, 2.0])
    (found,) = run_backward([edge], [grad], [x], retain_graph=True)
    assert found is not None and found.tolist() == [3.0, 6.0] and x.grad is None
    run_backward([edge], [grad])
    assert x.grad is not None and x.grad.tolist() == [3.0, 6.0]


def test_a_node_knows_the_gradients_that_it_takes() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    node = Double.apply(x).grad_fn
    (meta,) = input_metadata(node)
    assert (tuple(meta.shape), meta.dtype) == ((2, 3), torch.float32)
