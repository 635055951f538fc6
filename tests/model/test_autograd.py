"""Functions that are marked for it are left out by the compiler, as ``torch.compiler.disable`` does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from phalanx.model.autograd import uncompiled


def facts_of_compiled(leave_out: Callable[..., Any], *, recursive: bool) -> dict[str, object]:
    """The result and the graphs of a compiled function that calls one that is left out."""
    compiling: list[bool] = []

    def below(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x.cos() * 2

    def left_out(x: Tensor, *, by: float) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return below(x) + (by if float(x.detach()[0]) > 0 else -by)

    left_out = leave_out(left_out, recursive=recursive)

    def inner(x: Tensor) -> Tensor:
        return left_out(x.sin() * 2, by=3.0).tanh()

    def outer(x: Tensor) -> Tensor:
        return inner(x.exp()) + 1

    torch.compiler.reset()
    counters.clear()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(outer, backend=graphs)
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    results = [compiled(x), compiled(x)]
    torch.autograd.backward(torch.stack(results).sum())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(outer, backend="eager", fullgraph=True)(x)
    assert x.grad is not None
    return {
        "bits": [*(result.tolist() for result in results), x.grad.tolist()],
        "graphs": graphs.frame_count,
        "operations": graphs.op_count,
        "breaks": sum(counters["graph_break"].values()),
        "compiling": compiling,
    }


@pytest.mark.parametrize("recursive", [True, False])
def test_graphs_break_as_at_a_function_that_pytorch_disables(recursive: bool) -> None:
    ours = facts_of_compiled(uncompiled, recursive=recursive)
    assert ours == facts_of_compiled(torch.compiler.disable, recursive=recursive)
    assert ours["compiling"] == [False, not recursive] * 2
