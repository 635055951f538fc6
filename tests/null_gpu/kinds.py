"""Small runs of every kind of layer, format, memory mode, optimizer and sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.setting import run_of
from null_gpu.steps import CUDA
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec, RunSpec, TrainSpec

BASE = ModelSpec(layers=2, dim=512, heads=4, kv_heads=2, ffn_dim=1024, vocab_size=1000)
TRAIN = TrainSpec(steps=100, batch_size=8, slots=4, micro_batch_size=1, seq_len=256)
MIXTURE = MoeSpec(experts=4, per_token=2, ffn_dim=256)
LATENT = MlaSpec(query_rank=128, kv_rank=128, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
DENSE = run_of(BASE, TRAIN, CUDA)
DOCUMENTS = {"document_mask": True, "end_of_document": 0}
WINDOWS = {"attention_pattern": ("window", "full"), "window": 64}

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "norm of queries and keys": {"qk_norm": True},
    "norm of all queries": {"qk_norm": True, "qk_norm_width": "all"},
    "mixture": {"moe": replace(MIXTURE, aux_loss=0.01, z_loss=0.001, shared=1)},
    "mixture with groups": {
        "moe": replace(
            MIXTURE, score="sigmoid", groups=2, groups_per_token=1, balance_bias=True, first_dense=1
        )
    },
    "mixture with biases": {
        "moe": replace(MIXTURE, router_bias=True, shared=1, shared_gate=True),
        "ffn_bias": True,
        "ffn": "swiglu-clamped",
    },
    "latent attention": {"kv_heads": 0, "mla": LATENT},
    "absorbed latent attention": {"kv_heads": 0, "mla": replace(LATENT, absorbed=True)},
    "predictions ahead": {"mtp_depth": 2},
    "windows": WINDOWS,
    "no position": {"attention_pattern": ("full", "no-position")},
    "sinks": {"sinks": True},
    "sinks and windows": {"sinks": True, **WINDOWS},
    "cap on scores": {"score_cap": 30.0},
    "cap on logits": {"logit_cap": 30.0},
    "GELU and biases": {"ffn": "gelu", "attention_bias": True, "ffn_bias": True},
    "GEGLU": {"ffn": "geglu"},
    "tied embeddings": {"tie_embeddings": True},
    "Gemma's norms": {"norm_placement": "both", "norm_offset": True, "scale_embeddings": True},
    "YaRN": {"rope_scaling": RopeScalingSpec(kind="yarn")},
    "partial rotation": {"rope_fraction": 0.5},
    "lanes": {"lanes": 2},
    "tiles": {"context_tiles": 2},
    "lanes and tiles": {"lanes": 2, "context_tiles": 2},
    "wide heads": {"head_dim": 320, "heads": 2, "kv_heads": 2},
    "odd heads": {"head_dim": 100},
}
"""Changes of ``BASE``."""

TRAINING: dict[str, dict[str, Any]] = {
    "document mask": DOCUMENTS,
    "targets within documents": {"targets_within_documents": True, **DOCUMENTS},
    "integer sums": {"reduction": "integer"},
    "fast sums": {"reduction": "fast"},
    "one micro-batch": {"micro_batch_size": 0},
    "loss in chunks": {"loss_chunk": 100},
    "three sequences a slot": {"batch_size": 12},
}
"""Changes of ``TRAIN``."""

SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("optimizer", {"name": name}) for name in ("adafactor", "muon", "shampoo", "soap")},
    **{f"moments in {state}": ("optimizer", {"state": state}) for state in ("bf16", "int8")},
    **{f"recompute {mode}": ("memory", {"recompute": mode}) for mode in ("full", "selective")},
    **{f"activations in {place}": ("memory", {"offload_activations": place}) for place in ("host", "file")},
    **{f"moments in {place}": ("memory", {"offload_optimizer": place}) for place in ("host", "file")},
    **{name: ("precision", {"matmul": name}) for name in ("fp8-tensorwise", "fp8-rowwise", "mxfp8")},
    "fp32": ("precision", {"compute": "fp32"}),
    "independent rows": ("precision", {"rows": "independent"}),
    "ZeRO-3": ("parallel", {"sharding": "zero3"}),
    "unsharded": ("parallel", {"sharding": "none"}),
}
"""Changes of one section of the run ``DENSE``."""


def changed(spec: RunSpec, section: str, **fields: Any) -> RunSpec:
    """Return ``spec`` with some fields of a section replaced."""
    return replace(spec, **{section: replace(getattr(spec, section), **fields)})


def with_model(spec: RunSpec, **fields: Any) -> RunSpec:
    """Return ``spec`` with the model ``BASE``, changed."""
    return replace(spec, model=resolve(replace(BASE, **fields)))


def all_kinds(folder: Path) -> dict[str, RunSpec]:
    """Return every kind by name. Kinds that offload to files do so in ``folder``."""
    fp32 = changed(DENSE, "precision", compute="fp32")
    independent = changed(DENSE, "precision", rows="independent")
    masked = changed(DENSE, "train", **DOCUMENTS)
    rowwise = changed(DENSE, "precision", matmul="fp8-rowwise")
    exchanged = changed(with_model(DENSE, moe=MIXTURE), "parallel", expert=2)
    kinds = {
        **{name: with_model(DENSE, **fields) for name, fields in MODELS.items()},
        **{name: changed(DENSE, "train", **fields) for name, fields in TRAINING.items()},
        **{name: changed(DENSE, section, **fields) for name, (section, fields) in SECTIONS.items()},
        "document mask, windows and sinks": with_model(masked, sinks=True, **WINDOWS),
        "document mask and tiles": with_model(masked, context_tiles=2),
        "fp32 and sinks": with_model(fp32, sinks=True),
        "fp32 mixture": with_model(fp32, moe=MIXTURE),
        "fp32 integer sums": changed(fp32, "train", reduction="integer"),
        "mixture of independent rows": with_model(independent, moe=MIXTURE),
        "fp8 mixture": with_model(rowwise, moe=MIXTURE),
        "experts on two ranks": exchanged,
        "experts on two ranks, ZeRO-3": changed(exchanged, "parallel", sharding="zero3"),
        "experts on two ranks, recompute full": changed(exchanged, "memory", recompute="full"),
        "experts on two ranks, fp8": changed(exchanged, "precision", matmul="fp8-rowwise"),
        "experts on two ranks, integer sums": changed(exchanged, "train", reduction="integer"),
        "experts on two ranks, sums by slot": changed(exchanged, "train", expert_sums="slot"),
        "experts on two tensor ranks": changed(exchanged, "parallel", tensor=2),
    }
    return {
        name: changed(spec, "memory", offload_path=str(folder / "offloaded"))
        if "file" in (spec.memory.offload_activations, spec.memory.offload_optimizer)
        else spec
        for name, spec in kinds.items()
    }


NAMES = tuple(all_kinds(Path()))
