"""Typed ways to use what PyTorch leaves without types: ``torch.autograd.Function``, ``torch.compiler.disable``, dispatch modes."""

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
        """PyTorch's ``TorchDispatchMode``, which sees every tensor operation that is called under it."""

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
    """The ``ctx`` of a ``Function``. One that keeps more than tensors there has a protocol of its own, derived from this."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors given to ``save_for_backward``."""

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of ``forward``, True if its gradient is wanted."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for the backward pass."""


def apply_function(function: type[Function], *args: object) -> Tensor:
    """``function.apply(*args)`` of a function with one result; it can be differentiated."""
    apply: Callable[..., Tensor] = function.apply
    return apply(*args)


def apply_function_of_many(function: type[Function], *args: object) -> tuple[Tensor, ...]:
    """``function.apply(*args)`` of a function with several results; each can be differentiated."""
    apply: Callable[..., tuple[Tensor, ...]] = function.apply
    return apply(*args)


def uncompiled(
    function: Callable[_Parameters, _Result], *, recursive: bool = True
) -> Callable[_Parameters, _Result]:
    """``function``, which is Python, marked to be left out by ``torch.compile``; with ``recursive`` so is what it calls.

    As ``torch.compiler.disable`` says it, but without importing the compiler, which takes a process that compiles nothing more than a
    second, and without a wrapper. Where the compiler meets a call of the function, it ends its graph for the attribute
    (``check_inlineable`` of torch/_dynamo/symbolic_convert.py). When the function then runs, PyTorch's C++ finds beside its code what to do
    with its frame and with those below (torch/csrc/dynamo/eval_frame_cpp.cpp), as for ``torch._dynamo.skip``.
    """
    marked = cast(FunctionType, function)
    below = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    vars(marked).update(_torchdynamo_disable=True, _torchdynamo_disable_recursive=recursive)
    return function
