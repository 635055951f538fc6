"""Small random mixtures of experts, and models with joined tensors, in ``transformers`` and here, and how they are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    Qwen3MoeConfig,
)

from checkpoint.shards import shards_of
from parity.hf_models import JOINED, MIXTURES, QWEN3_MOE, SMALL, YARN, hf_model
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.interop.huggingface.convert import export_hf
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec

CONFIGS: dict[str, Any] = {
    **MIXTURES,
    **JOINED,
    "mixtral, wide heads": MixtralConfig(**SMALL, num_local_experts=4, head_dim=24),
    "qwen3 moe, biases, stretched rotary": Qwen3MoeConfig(
        **QWEN3_MOE, attention_bias=True, rope_parameters=YARN
    ),
    "qwen3 moe, first layers dense": Qwen3MoeConfig(
        **{**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0, 1]}
    ),
}


def ours_of(spec: ModelSpec) -> Transformer:
    """A random model of ours: weights, gains and the routers' biases."""
    generator = torch.Generator().manual_seed(2)
    model = Transformer(spec).requires_grad_(False)
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def saved(root: Path, model: Transformer) -> DiskTier:
    """The model's whole state as a checkpoint of step 7."""
    tier = DiskTier(root)
    saver = AsyncSaver(tier, rank=0, world_size=1)
    saver.save(
        7, shards_of({f"model/{name}": value for name, value in model.state_dict().items()}), {"step": 7}
    )
    saver.close()
    return tier


def imported_model(run: Path, spec: ModelSpec) -> Transformer:
    model = Transformer(spec).requires_grad_(False)
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    restore(DiskTier(run / "checkpoints"), 0, shards_of(state))
    return model


def exported(model: Transformer, folder: Path) -> Path:
    export_hf(saved(folder / "run", model), 7, model.spec, folder / "hf", "float32")
    return folder / "hf"


def saved_by_transformers(config: Any, folder: Path) -> Path:
    hf_model(config).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
