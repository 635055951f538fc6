"""PyTorch's operations that a computation rounds with, and those among them whose bits are not stated."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.hardware.portable.library import KERNELS, kernel_names

EXACT = """
    add sub rsub mul div neg reciprocal abs sign round floor ceil clamp clamp_min clamp_max maximum minimum amax amin max min
    where masked_fill eq ne lt le gt ge isfinite isnan isinf relu threshold_backward frexp ldexp fill zero bernoulli
    uniform nan_to_num bucketize aminmax argmax
"""
"""Operations whose result IEEE 754 states, or that select."""
MOVES = """
    empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones zeros ones full zeros_like ones_like full_like new_full
    to_copy copy clone detach alias view unsafe_view reshape_alias as_strided as_strided_scatter expand transpose t permute unsqueeze squeeze slice select
    slice_backward select_backward unfold unbind split split_with_sizes chunk cat stack index index_select gather scatter masked_select
    topk sort argsort nonzero arange lift_fresh local_scalar_dense scalar_tensor item constant_pad_nd pad repeat flip roll tril triu embedding
    set resize is_same_size equal view_as
"""
"""Operations that compute nothing with the numbers they move."""
ADDS_IN_ORDER = (
    "embedding_dense_backward index_add index_put index_put_impl scatter_add segment_reduce cumsum"
)
"""Operations that add one number after the other, in the order of their indices."""
COMPOSED = """
    mean logsumexp safe_softmax grouped_mm foreach_add foreach_sub foreach_mul foreach_div foreach_sqrt
"""
"""Operations that PyTorch computes with others, which have kernels of ours."""
DRAWS = "normal randn"
"""Random numbers that do not reach the weights: modules fill themselves with them before they get their own, and peaks are measured with them."""
LEFT_TO_PYTORCH = frozenset(f"{EXACT} {MOVES} {ADDS_IN_ORDER} {COMPOSED} {DRAWS}".split())


class Recorder(TorchDispatchMode):
    """Keeps the names of the operations on floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if func.namespace == "aten" and any(tensor.is_floating_point() for tensor in tensors):
            self.names.add(str(func).removeprefix("aten.").removesuffix(".default"))
            # A factor makes of an addition a multiplication and an addition, which some processors round once.
            if (kwargs or {}).get("alpha", 1) != 1 and str(func).startswith(
                ("aten.add.", "aten.add_.", "aten.sub", "aten._foreach")
            ):
                self.names.add(f"{func} with a factor")
        return result


def not_stated(names: set[str]) -> list[str]:
    """Return those that are neither portable kernels nor left to PyTorch."""
    ours = {*KERNELS, *kernel_names()}
    return sorted(name for name in names - ours if name.split(".")[0].strip("_") not in LEFT_TO_PYTORCH)
