"""Typed access to untyped parts of PyTorch: ``torch.autograd.Function``, ``torch.compiler.disable``, dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import Function

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    class DispatchMode:
        """PyTorch's ``TorchDispatchMode``, which intercepts every tensor operation called under it."""

        def __init__(self) -> None: ...
        def __enter__(self) -> Self: ...
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
        ) -> None: ...
else:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "FunctionContext",
    "apply_function",
    "apply_function_of_many",
    "uncompiled",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class FunctionContext(Protocol):
    """The ``ctx`` of a ``Function``. A function that stores more than tensors there derives its own protocol from this one."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors passed to ``save_for_backward``."""

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of ``forward``, True if its gradient is needed."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward pass."""


def apply_function(function: type[Function], *args: object) -> Tensor:
    """Return ``function.apply(*args)`` of a differentiable function with one result."""
    apply: Callable[..., Tensor] = function.apply
    return apply(*args)


def apply_function_of_many(function: type[Function], *args: object) -> tuple[Tensor, ...]:
    """Return ``function.apply(*args)`` of a differentiable function with several results."""
    apply: Callable[..., tuple[Tensor, ...]] = function.apply
    return apply(*args)


def uncompiled(
    function: Callable[_Parameters, _Result], *, recursive: bool = True
) -> Callable[_Parameters, _Result]:
    """Mark a Python function to be skipped by ``torch.compile``; with ``recursive``, also the functions that it calls.

    Same as ``torch.compiler.disable``, but without a wrapper and without importing the compiler, which takes more than a second. At a
    call of the function, the compiler ends its graph because of the attribute (``check_inlineable`` of
    torch/_dynamo/symbolic_convert.py). When the function runs, PyTorch's C++ finds in its code object that it must skip its frame and
    those below (torch/csrc/dynamo/eval_frame_cpp.cpp), as for ``torch._dynamo.skip``.
    """
    marked = cast(FunctionType, function)
    below = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    vars(marked).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=recursive)
    return function
