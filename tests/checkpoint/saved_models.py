"""Models as checkpoints, saved as training saves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint.shards import shards_of
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec


def save_models(root: Path, steps: Mapping[int, Transformer | Chain]) -> DiskTier:
    """Checkpoints of these steps: weights, and a tensor that readers of weights ignore."""
    tier = DiskTier(root)
    saver = AsyncSaver(tier, rank=0, world_size=1)
    for step, model in steps.items():
        tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
        tensors |= {"optimizer/exp_avg/norm.weight": torch.ones(model.spec.dim)}
        saver.save(step, shards_of(tensors), {"step": step})
    saver.close()
    assert {outcome.status for outcome in saver.poll()} <= {"committed"}
    return tier


def restored(tier: DiskTier, step: int, spec: ModelSpec) -> Transformer:
    """The model with the weights of a step."""
    model = Transformer(spec)
    restore(tier, step, shards_of({f"model/{name}": value for name, value in model.named_parameters()}))
    return model
