"""Every operation of PyTorch that a step rounds with has bits that are stated: those of a portable kernel, or of IEEE 754."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layouts import DENSE, LATENT, MIXTURE, steps_on_this_rank, tiny
from phalanx.hardware.portable.library import KERNELS, kernel_names
from phalanx.hardware.portable.operations import unfit_processor
from phalanx.run.spec import ModelSpec, OptimizerSpec, ParallelSpec, PrecisionSpec, RunSpec
from ranks import Ranks
from tiny_runs import tiny_run, train_on_this_rank
from train.pieces import model_in, run_in_pieces

pytestmark = pytest.mark.skipif(bool(unfit_processor()), reason="portable numerics needs AVX2, or 64-bit Arm")
EXACT = """
    add sub rsub mul div neg reciprocal abs sign round floor ceil clamp clamp_min clamp_max maximum minimum amax amin max min
    where masked_fill eq ne lt le gt ge isfinite isnan isinf relu threshold_backward frexp ldexp fill zero bernoulli
    uniform nan_to_num bucketize aminmax
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
RUNS: dict[str, RunSpec] = {
    "dense": tiny(DENSE, ParallelSpec()),
    "gelu": tiny(dataclasses.replace(DENSE, ffn="gelu"), ParallelSpec()),
    "a mixture": tiny(MIXTURE, ParallelSpec()),
    "latent attention": tiny(dataclasses.replace(MIXTURE, mla=LATENT), ParallelSpec()),
    **{
        f"{name}, operands in {matmul}": dataclasses.replace(
            tiny(model, ParallelSpec()),
            precision=PrecisionSpec(matmul=matmul),  # type: ignore[arg-type]
        )
        for name, model, matmul in (("dense", DENSE, "fp8-tensorwise"), ("a mixture", MIXTURE, "mxfp8"))
    },
    "lanes": run_in_pieces(model_in("lanes", "mixture")),
    "tiles": run_in_pieces(model_in("tiles", "shared key heads")),
    "tiles of absorbed latent attention": run_in_pieces(model_in("tiles", "absorbed")),
    "several tokens ahead, in bf16": run_in_pieces(model_in("whole", "ahead"), compute="bf16"),
    **{
        f"{name} with {state} moments": dataclasses.replace(
            tiny(ModelSpec(layers=1, dim=32, heads=4, kv_heads=2, ffn_dim=64, vocab_size=61), ParallelSpec()),
            optimizer=OptimizerSpec(name=name, state=state, lr=1e-2, clip_norm=0.5),  # type: ignore[arg-type]
        )
        for name, state in (("adamw", "bf16"), ("adamw", "int8"), ("adafactor", "fp32"), ("muon", "fp32"))
    },
}


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


def names_of_steps(spec: RunSpec) -> set[str]:
    with Recorder() as recorder:
        steps_on_this_rank(spec)
    return recorder.names


def names_of_run(spec: RunSpec) -> set[str]:
    with Recorder() as recorder:
        train_on_this_rank(spec)
    return recorder.names


def not_stated(names: set[str]) -> list[str]:
    """Return those that are neither portable kernels nor left to PyTorch."""
    ours = {*KERNELS, *kernel_names()}
    return sorted(name for name in names - ours if name.split(".")[0].strip("_") not in LEFT_TO_PYTORCH)


@pytest.mark.parametrize("run", RUNS)
def test_a_step_of_training_rounds_with_stated_operations_alone(run: str, ranks: Ranks) -> None:
    (names,) = ranks.run(1, names_of_steps, RUNS[run])
    assert " ".join(not_stated(names)) == ""


def test_so_does_a_run_that_evaluates_and_saves(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    (names,) = ranks.run(1, names_of_run, tiny_run(dataset, tmp_path))
    assert " ".join(not_stated(names)) == ""


def test_an_operation_that_nobody_stated_is_found() -> None:
    with Recorder() as recorder:
        x = torch.ones(3)
        torch.add(x.atan(), x, alpha=2)
        x.exp()
    assert not_stated(recorder.names) == ["atan", "aten.add.Tensor with a factor"]
