"""A rank's part of a slot comes to its GPU without keeping the host."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from layouts import DENSE, tiny
from phalanx.parallel.mesh import Mesh
from phalanx.run.spec import ParallelSpec
from phalanx.train.step.slot import Losses

GPU = torch.device("cuda", 1)


def test_all_that_goes_to_a_gpu_goes_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[Tensor] = []
    sent: list[Tensor] = []

    def lock(self: Tensor) -> Tensor:
        locked.append(self.clone())
        return locked[-1]

    def go(self: Tensor, to: Any, *_: Any, **__: Any) -> Tensor:
        assert to == GPU
        sent.append(self)
        return self

    monkeypatch.setattr(Tensor, "pin_memory", lock)
    monkeypatch.setattr(Tensor, "to", go)
    spec = tiny(dataclasses.replace(DENSE, mtp_depth=1), ParallelSpec())
    train = dataclasses.replace(
        spec.train, document_mask=True, targets_within_documents=True, end_of_document=3
    )
    mesh = cast(Mesh, SimpleNamespace(layout=SimpleNamespace(context=1), device=GPU))
    samples = torch.arange(2 * 33).view(2, 33) % 7
    batch = Losses(dataclasses.replace(spec, train=train), mesh, None, None).cut(samples, samples[:, 1:])
    assert batch.documents is not None
    parts = (batch.tokens, batch.targets, batch.positions, batch.documents.ids)
    ahead = [part for each in batch.further for part in (each.tokens, each.targets)]
    assert len(sent) == len(parts) + len(ahead) == 6
    assert all(any(part is tensor for tensor in locked) for part in sent)
    assert all(any(part is tensor for tensor in sent) for part in (*parts, *ahead))
