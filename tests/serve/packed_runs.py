"""Run directories of small models, and packs of them."""

from __future__ import annotations

from pathlib import Path

import tomli_w
import torch

from checkpoint.saved_models import save_models
from phalanx.checkpoint.pack.layout import PackFormat
from phalanx.checkpoint.pack.writer import pack
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

DENSE = resolve(ModelSpec(layers=5, dim=64, heads=4, kv_heads=2, ffn_dim=176, vocab_size=64, qk_norm=True))
LATENT = MlaSpec(kv_rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=16)
MIXTURE = resolve(
    ModelSpec(
        layers=5,
        dim=64,
        heads=4,
        vocab_size=64,
        mla=LATENT,
        moe=MoeSpec(
            experts=16, per_token=2, ffn_dim=40, shared=1, first_dense=1, score="sigmoid", balance_bias=True
        ),
    )
)
MODELS = {"dense": DENSE, "mixture": MIXTURE}


def random_model(spec: ModelSpec, seed: int = 0) -> Transformer:
    """The module of a spec with random weights, which take no time to draw."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(spec).requires_grad_(False)
    for name, value in model.state_dict().items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


def make_run(run_dir: Path, spec: ModelSpec, steps: tuple[int, ...] = (1,), seq_len: int = 0) -> Path:
    """A run directory with these steps."""
    run_dir.mkdir()
    train = {"train": {"seq_len": seq_len}} if seq_len else {}
    (run_dir / "run.toml").write_text(tomli_w.dumps({"model": to_table(spec), **train}))
    save_models(run_dir / "checkpoints", {step: random_model(spec, step) for step in steps})
    return run_dir


def make_pack(folder: Path, spec: ModelSpec, form: PackFormat) -> Path:
    """A pack of a new run in ``folder``."""
    return pack(make_run(folder / f"run-{form}", spec), None, folder / f"{form}.pack", form)[0]
