"""Rules that lanes and context tiles share: how many pieces there can be, and where experts may lie beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

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


def expert_problems(spec: RunSpec, pieces: Pieces) -> Iterator[Problem]:
    """Yields what is impossible about where experts lie, if the run's ``pieces`` make the degrees of ranks that share a slot the fleet's."""
    parallel, train = spec.parallel, spec.train
    degree = parallel.tensor * parallel.context
    axes = [axis for axis in ("tensor", "context") if getattr(parallel, axis) > 1]
    fields = (*(f"parallel.{axis}" for axis in axes), f"model.{pieces}")
    if spec.model.moe is None:
        return
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
