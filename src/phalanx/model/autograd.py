"""A typed way to call ``torch.autograd.Function``, whose ``apply`` PyTorch leaves without types."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.autograd import Function


def apply_function(function: type[Function], *args: object) -> Tensor:
    """``function.apply(*args)`` of a function with one result; it can be differentiated."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def apply_function_of_many(function: type[Function], *args: object) -> tuple[Tensor, ...]:
    """``function.apply(*args)`` of a function with several results; each can be differentiated."""
    return cast(tuple[Tensor, ...], function.apply(*args))  # type: ignore[no-untyped-call]
