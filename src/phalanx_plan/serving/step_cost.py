"""Bytes and seconds of a serving worker's step: memory of a rank, and each operation's time, with weights in memory or streamed.

A rank holds weights by format and division, pages of keys and values, rows and buffers.
A worker is ``data`` groups of ``tensor`` ranks in each of ``pipeline`` stages. Attention is divided over a group's heads, and
requests over the groups. Each expert is on one of all ``data`` x ``tensor`` ranks of a stage. A token's pages take
``2 L Hkv D b`` bytes with grouped attention and ``L (r + rope) b`` with latent attention (DeepSeek-V2, arXiv 2405.04434).

The operations are those of training's forward (``phalanx.run.kinds``), with a step's few rows. Products read their weights
once; of experts, only those with rows in the step. Attention of decode reads the pages of all requests; latent attention is
computed absorbed, on the latents themselves (``2 H (2 r + rope)`` FLOP for each token in the cache and layer). With ``overlap`` two
halves of the batch alternate, one exchanging while the other computes.

Let ``r_l`` and ``c_l`` be the seconds to read and to compute layer l, with k buffers. Reading layer l begins when layer l - 1
has been read and layer l - k computed. Computing it begins when it has been read and layer l - 1 computed. For equal layers a pass
takes the larger of both sums, so tokens a second are at most ``B / max(W / BW, t_compute(B))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from phalanx.hardware.cluster import Cluster
from phalanx.hardware.profile import Profile, profile_of
from phalanx.model.facts.shape import numbered_parameters
from phalanx.run.kinds import block
from phalanx.run.kinds import operations as op
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.spec import ModelSpec
from phalanx_plan.step_cost import hardware_times

# Bytes.


FORMAT_BYTES = {"bf16": 2.0, "fp8": 1.0}
"""Bytes of a weight in products; embedding, output projection, routers, gates and norms stay in 16 bits."""
PAGE_BYTES = 2
BUFFERS = 2.5e9
"""Context, communicators, and the exchange's buffers (aiconfigurator's system files: 0.34 to 0.41 GiB of NCCL, 3.5 GiB in all)."""
USABLE = 0.94
"""Share of the memory that is usable despite fragmentation (``plan``'s stacks for training lose 4 to 6 % too)."""


@dataclass(frozen=True)
class Division:
    """Division of the model over a worker's ranks."""

    tensor: int = 1
    data: int = 1
    """Groups of tensor ranks with requests of their own; they share the experts."""
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Accelerators of a worker."""
        return self.tensor * self.data * self.pipeline

    def __str__(self) -> str:
        sizes = (("tp", self.tensor), ("dp", self.data), ("pp", self.pipeline))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"


def experts_held(experts: int, division: Division) -> int:
    """Experts of a rank. If ranks do not divide them, copies of busy experts fill the gaps, like DeepSeek's redundant experts."""
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
    """Bytes of weights on the fullest rank: a stage's layers, and of the ends the larger, or both without a pipeline.

    Only matrices of blocks have ``format``; all other weights, embedding and head among them, take two bytes.
    """
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
    """Upper bound of a rank's activation bytes while a group computes ``rows``: the widest layer, copies for experts, and scores."""
    copies = model.moe.per_token if model.moe else 0
    inner = max(model.ffn_dim, 0) / division.tensor
    layer = rows * 2 * (6 * model.dim + 3 * inner + 3 * copies * model.dim / division.tensor)
    scores = min(rows, 512) * model.vocab_size / division.tensor * 6
    return layer + scores


def page_room(model: ModelSpec, cluster: Cluster, division: Division, format: str, rows: int) -> float:  # noqa: A002
    """Bytes of a rank that remain for pages; negative if the weights and buffers do not fit."""
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
    """Requests of ``tokens`` each that a worker holds at once, over its groups; tokens are rounded up to pages of 64.

    0 if one does not fit.
    """
    room = page_room(model, cluster, division, format, rows)
    each = rank_token_bytes(model, division) * (math.ceil(tokens / 64) * 64)
    return division.data * max(0, int(room // each)) if each else 0


# Weights that are read for each pass, from host memory or disk: the bound in closed form.


def tokens_per_s(rows: float, streamed_bytes: float, bytes_per_s: float) -> float:
    """Upper bound of tokens a second of ``rows`` requests."""
    return rows / (streamed_bytes / bytes_per_s)


def touched_experts(experts: float, per_token: float, rows: float) -> float:
    """Mean number of ``experts`` that at least one of ``rows`` tokens chooses, if each chooses ``per_token`` uniformly."""
    touched: float = experts * (1 - (1 - per_token / experts) ** rows)
    return touched


def streamed_bytes(model: ModelSpec, bytes_per_weight: float, rows: float) -> float:
    """Bytes of blocks that a pass of ``rows`` reads: all blocks, but only the expected share of experts that get rows."""
    total = 0.0
    for part, number in numbered_parameters(model):
        if part.section == "block":
            met = 1.0
            if part.stacked:
                met = touched_experts(part.shape[0], part.per_token, rows) / part.shape[0]
            total += number * part.numel * met * bytes_per_weight
    return total


# Seconds.


_EXCHANGING_UNITS = 24
"""Multiprocessors that DeepEP's kernels for many rows use (github.com/deepseek-ai/DeepEP, README: 24); those for few rows use none."""
PARTS = ("products", "attention", "pointwise", "exchange")


@dataclass(frozen=True)
class ServingStep:
    """One step of a worker, each group with ``rows`` rows."""

    model: ModelSpec
    cluster: Cluster
    division: Division
    format: str
    rows: float
    """Rows of a group of tensor ranks."""
    attended_tokens: float
    """Tokens that a row attends to."""
    prefill: bool = False
    queries: float = 1.0
    """Rows of a request that read its pages together: one, and its drafts."""

    @cached_property
    def profile(self) -> Profile:
        """The accelerator's constants; fp8 has a scale for each block of 128, as in DeepSeek-V3, if that was measured."""
        profile = profile_of(self.cluster.accelerator)
        blocks = profile.constants.matmul.get("fp8_block")
        if self.format != "fp8" or blocks is None:
            return profile
        matmul = {**profile.constants.matmul, "fp8": blocks}
        return replace(profile, constants=replace(profile.constants, matmul=matmul))


def step_s(step: ServingStep, overlap: bool = False) -> float:
    """Seconds from the begin of a step to its tokens, through all stages of a pipeline.

    ``overlap`` splits the rows into two halves, of which one computes while the other exchanges; a prefill's exchange
    takes some units.
    """
    if not overlap:
        return sum(step_parts(step).values())
    half = step_parts(replace(step, rows=step.rows / 2))
    exchanging = half["exchange"]
    computing = sum(half.values()) - exchanging
    units = step.cluster.accelerator.multiprocessors
    if step.prefill and units > 2 * _EXCHANGING_UNITS:
        # While an exchange runs, the other multiprocessors compute.
        computing += min(computing, exchanging) * _EXCHANGING_UNITS / units
    return 2 * max(computing, exchanging)


def step_parts(step: ServingStep) -> dict[str, float]:
    """Seconds of a step's layers, output and pipeline hops by ``PARTS``, nothing overlapped."""
    part_seconds = dict.fromkeys(PARTS, 0.0)
    mixed = [is_mixture(step.model, layer) for layer in range(step.model.layers)]
    for kind in sorted(set(mixed)):
        for part, seconds in _priced(step, _operations(step.model, kind)).items():
            part_seconds[part] += mixed.count(kind) * seconds
    # Only a prompt's last row needs scores.
    last = replace(step, rows=max(1.0, step.rows / step.attended_tokens)) if step.prefill else step
    products = [each for each in block.head_operations(step.model) if isinstance(each, op.MatrixProduct)]
    for part, seconds in _priced(last, products).items():
        part_seconds[part] += seconds
    stages = step.division.pipeline
    if stages > 1:
        stride = step.division.tensor * step.division.data
        carried = step.rows * step.model.dim * 2 / step.division.tensor
        hop = hardware_times.point_to_point_s(step.cluster, stride, carried, stages)
        part_seconds["exchange"] += (stages - 1) * float(hop)
    return part_seconds


@lru_cache(maxsize=16)
def _operations(model: ModelSpec, mixed: bool) -> tuple[op.Operation, ...]:
    return block.operations(model, mixed=mixed)


def _priced(
    step: ServingStep, operations: tuple[op.Operation, ...] | list[op.MatrixProduct]
) -> dict[str, float]:
    """Return the seconds of operations on a rank, by ``PARTS``; kinds that are not listed here cost 0."""
    part_seconds = dict.fromkeys(PARTS, 0.0)
    for operation in operations:
        match operation:
            case op.MatrixProduct():
                part_seconds["products"] += _product_s(step, operation)
            case op.AttentionCore():
                part_seconds["attention"] += _attention_s(step, operation)
            case op.LayerExchange():
                part_seconds["exchange"] += _exchange_s(step, operation)
            case op.Norm():
                part_seconds["pointwise"] += _moved_s(step, 2 * operation.width)
            case op.Rotation():
                part_seconds["pointwise"] += _moved_s(step, 2 * operation.width / step.division.tensor)
            case op.Activation():
                width = (2 + operation.gated) * operation.width
                routed = operation.rows == "routed"
                share = _copies(step) / step.division.tensor if routed else 1 / step.division.tensor
                part_seconds["pointwise"] += _moved_s(step, width * share)
            case op.Permutation():
                part_seconds["pointwise"] += _moved_s(
                    step, 2 * operation.width * operation.copies / step.division.tensor
                )
            case _:  # residuals are added by the norms' kernels, and nothing is kept for backward
                pass
    return part_seconds


def _copies(step: ServingStep) -> int:
    """Return the experts of each token; 0 for a dense model."""
    return step.model.moe.per_token if step.model.moe else 0


def _moved_s(step: ServingStep, elements: float) -> float:
    """Return the seconds to move 2-byte ``elements`` of each row, bound by memory."""
    return float(hardware_times.memory_bound_s(step.profile, 2 * step.rows * elements))


def _product_s(step: ServingStep, product: op.MatrixProduct) -> float:
    """Seconds of a product, and in fp8 also of its input's cast before it, unless the product stays wide."""
    seconds = _multiplied_s(step, product)
    if step.format != "fp8" or product.wide:
        return seconds
    copies = _copies(step) / step.division.tensor if product.experts else 1.0
    inner = product.inner / (step.division.tensor if product.inner_over == "tensor" else 1)
    # It is read in 16 bits and written in eight.
    return seconds + float(hardware_times.memory_bound_s(step.profile, 3 * step.rows * copies * inner))


def _multiplied_s(step: ServingStep, product: op.MatrixProduct) -> float:
    """Return the seconds of a matrix product; of experts, on the rank's share of those that any row reaches.

    Wide products of an fp8 model are in bf16.
    """
    division = step.division
    format_ = "bf16" if product.wide and step.format == "fp8" else step.format
    if product.experts:
        ranks = division.data * division.tensor
        touched = touched_experts(product.experts, _copies(step), step.rows * division.data)
        local = max(touched / product.experts * experts_held(product.experts, division), 1e-9)
        routed = step.rows * division.data * _copies(step) / min(ranks, product.experts)
        return float(
            hardware_times.grouped_matmul_s(
                step.profile, format_, local, routed / local, product.columns, product.inner
            )
        )
    heads = min(division.tensor, attention_kind(step.model).key_heads(step.model))
    own = product.columns - product.key_columns
    columns = own / (division.tensor if product.columns_over == "tensor" else 1) + product.key_columns / heads
    inner = product.inner / (division.tensor if product.inner_over == "tensor" else 1)
    return float(hardware_times.matmul_s(step.profile, format_, step.rows, columns, inner))


def _attention_s(step: ServingStep, core: op.AttentionCore) -> float:
    """Return the seconds of attention: in prefill its FLOP, in decode the slower of reading the cache and computing."""
    keys = core.keys(max(1, round(step.attended_tokens)))
    heads = core.heads / step.division.tensor
    if step.prefill:  # causal: half of the square
        flops = step.rows * keys * heads * core.widths
        return float(
            hardware_times.attention_s(
                step.profile, "bf16", flops, False, widths=core.widths, latent=core.latent, tokens=keys
            )
        )
    kept, first, second = attention_kind(step.model).cache_row(step.model)
    widths = 2 * first + second if core.latent else core.widths
    pages = step.rows / step.queries * keys * kept / min(step.division.tensor, kept) * (first + second)
    reading = float(hardware_times.memory_bound_s(step.profile, PAGE_BYTES * pages))
    rate = hardware_times.sustained_flops(step.profile, "bf16") * step.profile.constants.attention.forward
    return max(reading, 2 * step.rows * keys * heads * widths / rate)


def _exchange_s(step: ServingStep, exchange: op.LayerExchange) -> float:
    """Return the seconds of a layer's tensor all-reduce, or of dispatching or combining experts; other kinds are 0 in serving."""
    division, model = step.division, step.model
    if exchange.kind == "scatter" and division.tensor > 1:  # beside the next gather: an all-reduce
        carried = step.rows * exchange.width * 2
        return float(hardware_times.all_reduce_s(step.cluster, division.tensor, 1, carried))
    if exchange.kind in ("dispatch", "combine") and model.moe is not None:
        ranks = division.data * division.tensor
        width = exchange.width * (1 if exchange.kind == "dispatch" and step.format == "fp8" else 2)
        limit = model.moe.groups_per_token if model.moe.groups > 1 else np.inf
        return float(
            hardware_times.dispatch_s(
                step.cluster, ranks, 1, step.rows / division.tensor, width, model.moe.per_token, limit
            )
        )
    return 0.0
