"""Runs that must have one hash on every layout: how two are compared, and flaws that would part them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from layouts import Outcome, Whole, steps_on_this_rank
from phalanx.run.spec import RunSpec

ROUNDING = 2e-6
"""Error of loss and gradients beside a run that is not cut into pieces, relative to the largest element of each, in fp32."""

Flaw = tuple[str, str, Any]
"""A module, a function or method in it, and what takes its place."""


def same(found: Whole, reference: Whole) -> bool:
    """True if two runs have the same losses, gradient norms and weights, bit for bit."""
    return (found.losses, found.norms, found.weights_sha256) == (
        reference.losses,
        reference.norms,
        reference.weights_sha256,
    )


def flawed_step(spec: RunSpec, flaw: Flaw) -> Outcome:
    """One step on this rank of a trainer with a flaw."""
    path, name, replacement = flaw
    owner: Any = importlib.import_module(path)
    *inside, attribute = name.split(".")
    for part in inside:
        owner = getattr(owner, part)
    kept = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        return steps_on_this_rank(spec, 1)
    finally:
        setattr(owner, attribute, kept)


def one_after_the_other(summands: Iterable[Tensor], *_: Any) -> Tensor:
    """A sum over the first dimension that is not made in a tree."""
    return functools.reduce(torch.add, list(summands))


def at_once(self: Any, x: Tensor) -> Tensor:
    """``InPieces`` that computes all pieces together."""
    from phalanx.parallel.tensor.lanes.shares import in_place_of

    with in_place_of(self._owners, [parameter.now()[0] for parameter in self._parameters]):
        result: Tensor = self._forward(x)
    return result


def by_sequence(self: Any, x: Tensor) -> Tensor:
    """``RoutedInPieces`` whose tokens lie by sequence, not by piece."""
    tokens = x.flatten(0, 1)
    mixed: Tensor = self._moe.exchange(tokens, self._moe.router(tokens), self._moe.experts)
    return mixed.view_as(x)


def scores_at_once(self: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``ScoresInPieces`` that computes all pieces together."""
    scores, logits = at_once(self._both, tokens).chunk(2, dim=1)
    return scores, logits
