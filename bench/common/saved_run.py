"""The directory of a run with random weights, as benches of serving open it."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.model.transformer import Transformer
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec


def save_run(run: Path, spec: ModelSpec, seq_len: int = 1024, std: float = 0.02) -> None:
    """Write a run directory whose checkpoint holds random weights with standard deviation ``std``, saved as training saves."""
    model = Transformer(spec).requires_grad_(False)
    for name, value in model.state_dict().items():
        value.normal_(1.0 if "norm" in name else 0.0, std)
    run.mkdir()
    (run / "run.toml").write_text(tomli_w.dumps({"model": to_table(spec), "train": {"seq_len": seq_len}}))
    saver = AsyncSaver(DiskTier(run / "checkpoints"), rank=0, world_size=1)
    shards = [
        Shard(full_box(f"model/{name}", "float32", tuple(value.shape)), value)
        for name, value in model.state_dict().items()
    ]
    saver.save(1, shards, {})
    saver.close()


def save_run_of_bytes(run: Path, spec: ModelSpec, seq_len: int, std: float = 0.02) -> None:
    """Write the same with a tokenizer of bytes, so that texts can be sent to its server."""
    save_run(run, spec, seq_len, std)
    (run / "tokenizer").mkdir()
    BytesTokenizer().save(run / "tokenizer")
