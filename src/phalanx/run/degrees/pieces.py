"""Rules that lanes and context tiles share: how many pieces there can be, and where experts may lie beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

_REGISTER_BYTES = 64
"""The longest vector register of a processor, AVX-512's: what is left over at the end of a loop over such is computed by other instructions."""

Pieces = Literal["lanes", "context_tiles"]
"""The field of ``model`` that says how many pieces there are."""


def count_problems(spec: RunSpec, pieces: Pieces) -> list[Problem]:
    """Returns what is wrong with the number of a run's ``pieces``, over which sums are made in a binary tree."""
    count, noun = getattr(spec.model, pieces), pieces.removeprefix("context_")
    if not count & (count - 1):
        return []
    return [
        Problem(
            f"model.{pieces}",
            f"{count} {noun} cannot be the leaves of a binary tree",
            f"take a power of two: {1 << (count.bit_length() - 1)} or {1 << count.bit_length()}",
        )
    ]


def _rounding_problems(spec: RunSpec, pieces: Pieces) -> Iterator[Problem]:
    """Yields what would let an activation's bits depend on a rank's rows: what is computed at the end of a loop, by other instructions.

    Portable kernels compute an element alike wherever it is.
    """
    assert spec.model.moe is not None, "asked of mixtures"
    numerics = spec.runtime.numerics
    if numerics == "portable" or (numerics == "auto" and spec.runtime.device == "cpu"):
        return
    width = spec.model.moe.ffn_dim or spec.model.ffn_dim
    register = _REGISTER_BYTES // (4 if spec.precision.compute in ("auto", "fp32") else 2)
    if width % register:
        yield Problem(
            "model.moe.ffn_dim",
            f"{width} elements do not fill a processor's registers, so an activation's rounding would depend on how many experts a rank has",
            f"it must be a multiple of {register}; or model.{pieces} = 0",
            (f"model.{pieces}", "model.ffn_dim", "precision.compute"),
        )
    if spec.runtime.threads > 1 and spec.runtime.device == "cpu":
        yield Problem(
            "runtime.threads",
            f"{spec.runtime.threads} threads divide the rows of a rank's experts anywhere, so an activation's rounding would depend on how many it has",
            f"set it to 1, and take more ranks; or model.{pieces} = 0",
            (f"model.{pieces}",),
        )


def expert_problems(spec: RunSpec, pieces: Pieces) -> Iterator[Problem]:
    """Yields what is impossible about where experts lie, if the run's ``pieces`` make the degrees of ranks that share a slot the fleet's."""
    parallel, train = spec.parallel, spec.train
    degree = parallel.tensor * parallel.context
    axes = [axis for axis in ("tensor", "context") if getattr(parallel, axis) > 1]
    fields = (*(f"parallel.{axis}" for axis in axes), f"model.{pieces}")
    if spec.model.moe is None:
        return
    yield from _rounding_problems(spec, pieces)
    if parallel.expert % degree:
        yield Problem(
            "parallel.expert",
            f"with model.{pieces} all of a slot's tokens come to an expert together, and {degree} ranks share a slot",
            f"take a multiple of {degree}, or model.{pieces} = 0",
            fields,
        )
        return
    # The degree is the fleet's, so slots that are computed together must be added as if they were not.
    together, sequences = parallel.expert > degree, train.batch_size // train.slots
    several = sequences > (train.micro_batch_size or sequences)
    if together and train.reduction == "integer":
        yield Problem(
            "parallel.expert",
            "slots whose tokens meet at an expert are rounded to integers together, so the bits would depend on it",
            f'set it to {degree}, or train.reduction = "reproducible"',
            (*fields, "train.reduction"),
        )
    elif together and several and train.expert_sums != "slot":
        yield Problem(
            "train.expert_sums",
            "experts' gradients of several slots' micro-batches are added across slots first, so the bits would depend on parallel.expert",
            f'set it to "slot", or parallel.expert = {degree}',
            ("parallel.expert", *fields),
        )
