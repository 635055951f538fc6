"""Bytes that a rank of a serving worker holds: weights by format and division, pages of keys and values, rows, buffers.

A worker is ``data`` groups of ``tensor`` ranks in each of ``pipeline`` stages. Attention is divided over a group's heads, and
requests over the groups; experts lie over all ``data`` x ``tensor`` ranks of a stage, whole. A token's pages take
``2 L Hkv D b`` bytes with grouped attention and ``L (r + rope) b`` with latent attention (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.hardware.cluster import Cluster
from phalanx.model.facts.shape import numbered_parameters
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec

FORMAT_BYTES = {"bf16": 2.0, "fp8": 1.0}
"""Bytes of a weight in products; embedding, output projection, routers, gates and norms stay in 16 bits."""
PAGE_BYTES = 2
BUFFERS = 2.5e9
"""Context, communicators, and the exchange's buffers (aiconfigurator's system files: 0.34 to 0.41 GiB of NCCL, 3.5 GiB in all)."""
USABLE = 0.94
"""Share of the memory that is left after fragments (``plan``'s stacks for training have 4 to 6 % too)."""


@dataclass(frozen=True)
class Division:
    """How a worker's ranks divide the model."""

    tensor: int = 1
    data: int = 1
    """Groups of tensor ranks with requests of their own, which share the experts."""
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Accelerators of a worker."""
        return self.tensor * self.data * self.pipeline

    def __str__(self) -> str:
        sizes = (("tp", self.tensor), ("dp", self.data), ("pp", self.pipeline))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"


def experts_held(experts: int, division: Division) -> int:
    """Experts of a rank; where ranks do not divide them, further copies of busy ones fill the places, as DeepSeek's redundant ones do."""
    return math.ceil(experts / min(experts, division.data * division.tensor))


def token_bytes(model: ModelSpec) -> int:
    """Bytes of a token's pages over all layers, undivided."""
    heads, first, second = attention_kind(model).cache_row(model)
    return model.layers * heads * (first + second) * PAGE_BYTES


def rank_token_bytes(model: ModelSpec, division: Division) -> float:
    """Bytes of a token's pages on each rank of its group: key heads are divided, latents are not."""
    heads = attention_kind(model).cache_row(model)[0]
    return token_bytes(model) / min(division.tensor, heads) / division.pipeline


def weight_bytes(model: ModelSpec, division: Division, format: str) -> float:  # noqa: A002
    """Bytes of weights on the fullest rank: a stage's layers, and of the ends the larger."""
    blocks, ends = 0.0, {"embedding": 0.0, "end": 0.0, "ahead": 0.0}
    for part, number in numbered_parameters(model):
        narrow = part.kind in ("matrix", "output") and part.section == "block"
        size = part.numel * (FORMAT_BYTES[format] if narrow else 2.0)
        if part.stacked:
            size *= experts_held(part.shape[0], division) / part.shape[0]
        else:
            size /= part.parts_over(division.tensor)
        if part.section == "block":
            blocks += number * size
        else:
            ends[part.section] += size
    last = ends["end"] + ends["ahead"]
    if division.pipeline == 1:
        return blocks + ends["embedding"] + last
    return blocks * math.ceil(model.layers / division.pipeline) / model.layers + max(ends["embedding"], last)


def step_bytes(model: ModelSpec, division: Division, rows: int) -> float:
    """Bytes of activations while ``rows`` of a group are computed: the widest layer, copies for experts, and scores."""
    copies = model.moe.per_token if model.moe else 0
    inner = max(model.ffn_dim, 0) / division.tensor
    layer = rows * 2 * (6 * model.dim + 3 * inner + 3 * copies * model.dim / division.tensor)
    scores = min(rows, 512) * model.vocab_size / division.tensor * 6
    return layer + scores


def page_room(model: ModelSpec, cluster: Cluster, division: Division, format: str, rows: int) -> float:  # noqa: A002
    """Bytes of a rank that are left for pages; negative if the rest does not fit."""
    memory = cluster.accelerator.memory_bytes.value * USABLE
    return memory - BUFFERS - weight_bytes(model, division, format) - step_bytes(model, division, rows)


def requests_held(
    model: ModelSpec,
    cluster: Cluster,
    division: Division,
    format: str,  # noqa: A002
    rows: int,
    tokens: float,
) -> int:
    """Requests of ``tokens`` each that a worker holds at once, over its groups and the stages' turns."""
    room = page_room(model, cluster, division, format, rows)
    each = rank_token_bytes(model, division) * (math.ceil(tokens / 64) * 64)
    return division.data * max(0, int(room // each)) if each else 0
