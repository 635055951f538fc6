"""Parts of a model: pipeline stages, or a share of each layer with the bits of one process; and the weights that a part reads.

A share of each layer has heads, inner elements, experts and tokens of the vocabulary. Tensor parallelism in training (arXiv 1909.08053)
divides the last matrix of a layer by its inputs and adds up the ranks' partial sums, so another degree is another order of additions.

Here every matrix is divided by its *outputs* alone. A row of the result is a sum over all inputs in one process, as with the full matrix.
Inner results (of heads, activations, experts) are gathered from all processes before the next matrix reads them. That sends more than a
sum of results would, by the ratio of the inner width to the model's, and rounds nothing. So any number of processes gives the bits of one with
exact numerics, whose products have the same bits with a part of a matrix's rows.

| divided | by | gathered |
|---|---|---|
| queries, keys, values, sinks, expansion of latents | heads | heads' results, before the output matrix |
| gate and up of a feed-forward layer | inner elements | activations, before the down matrix |
| experts | experts, undivided | rows of all experts, before they are added |
| output and down matrices | elements of the hidden state | their results |
| the output projection | tokens | scores, in the first process alone |

Norms, routers and latents of attention are not divided, nor is the embedding, which is in the first process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.checkpoint.committed.digest import TensorDigest, tensor_digest
from phalanx.checkpoint.committed.restore import Rows, dtype_name
from phalanx.checkpoint.format.manifest import encode_index
from phalanx.checkpoint.interop.huggingface.stored_folder import FolderTier, weights_tier
from phalanx.model.facts.shape import balance, parameters
from phalanx.model.layers.attention.attention import Attention
from phalanx.model.layers.dense import Affine, FeedForward, Linear
from phalanx.model.layers.expert_groups import groups_of_one_slot
from phalanx.model.layers.moe import Experts, MoE, Routing, combine, copies_by_expert, order_by_expert
from phalanx.model.transformer import Block, OutputProjection, Transformer
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.kinds import grouped_attention
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.feed_forward import dense_width
from phalanx.run.spec import ModelSpec
from phalanx.train.score import restored_model
from phalanx_serve.engine.model_runner import fast_products
from phalanx_serve.traffic.events import ServeError


@dataclass(frozen=True)
class Share:
    """One of ``of`` equal shares, by number."""

    number: int
    of: int

    def rows(self, count: int) -> range:
        """Return the contiguous range of ``count`` rows that belong to this share."""
        return range(count * self.number // self.of, count * (self.number + 1) // self.of)


class Assembly(Protocol):
    """Exchange of partial results between the shares. All processes call it in the same order."""

    def gather(self, piece: Tensor, dim: int = -1) -> Tensor:
        """Return the pieces of all shares, concatenated along ``dim``."""
        ...

    def scores(self, piece: Tensor) -> Tensor:
        """Gather along the last dimension in the first process; the others get back their piece."""
        ...


def require_shares(spec: ModelSpec, shares: int) -> None:
    """Raise ServeError if heads, inner elements or experts do not divide by ``shares``, or queries are normalized
    over all heads.

    The message has the numbers that are possible.
    """
    if spec.qk_norm and spec.qk_norm_width != "head":
        raise ServeError(
            f"--tensor {shares}: the model normalizes queries and keys over all heads (model.qk_norm_width), which cannot be shared: serve it "
            "without --tensor, or with --pipeline"
        )
    parts = dict(_shared_counts(spec))
    wrong = [f"{count} {name}" for name, count in parts.items() if count % shares]
    if wrong:
        possible = [
            n for n in range(2, min(parts.values()) + 1) if not any(count % n for count in parts.values())
        ]
        instead = (
            f"--tensor {' or '.join(map(str, possible))}"
            if possible
            else "--pipeline, which divides by layers"
        )
        raise ServeError(
            f"--tensor {shares}: the model's {' and '.join(wrong)} cannot be dealt out equally to {shares} processes: give {instead}"
        )


def _shared_counts(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield (name, count) of all that must divide by the number of shares."""
    yield "heads", spec.heads
    if keeps_heads(spec):
        yield "key heads (model.kv_heads)", spec.kv_heads
    if width := dense_width(spec):
        yield "inner elements (model.ffn_dim)", width
    if spec.moe is not None:
        yield "experts (model.moe.experts)", spec.moe.experts
        if spec.moe.shared:
            yield "inner elements of shared experts", spec.moe.shared * spec.moe.ffn_dim


def keeps_heads(spec: ModelSpec) -> bool:
    """Return True if keys and values are cached per head and can be shared. Latents belong to all heads."""
    return attention_kind(spec) is grouped_attention


def held_share(spec: ModelSpec, shares: int) -> ModelSpec:
    """Return the architecture of one share's KV cache: that of its heads, or latents, which every process keeps."""
    if not keeps_heads(spec):
        return spec
    return replace(spec, heads=spec.heads // shares, kv_heads=spec.kv_heads // shares)


def cut(model: Transformer, share: Share) -> dict[str, Rows]:
    """Reduce a weightless full model to one share, in place.

    Return, by name, the row range of each reduced tensor in the full one. Shares but the first lose the embedding if
    there is a separate head, and keep only their rows of a tied one.
    """
    rows_by_name: dict[str, Rows] = {}
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "the model's layers"
        for name, module, own in _divided(block):
            rows_by_name[f"blocks.{layer}.{name}"] = _take_rows(module, own, share)
    # A tied embedding is the projection of the other processes, and the first one's own.
    if model.head is not None:
        rows_by_name["head.weight"] = _take_rows(model.head, "weight", share)
        if share.number:
            model.embedding = None
    elif share.number:
        assert model.embedding is not None, "it is the projection"
        rows_by_name["embedding.weight"] = _take_rows(model.embedding, "weight", share)
    return rows_by_name


def _divided(block: Block) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the tensors of a layer that shares divide by rows: name in the layer, module, and name in the module."""
    attention = block.attention
    undivided = {*attention.BY_TOKENS, "query_norm", "key_norm"}
    parts: list[tuple[str, nn.Module]] = [
        (f"attention.{name}", part) for name, part in attention.named_children() if name not in undivided
    ]
    if isinstance(attention, Attention) and attention.sinks is not None:
        yield "attention.sinks", attention, "sinks"
    if isinstance(block.ffn, MoE):
        parts.append(("ffn.experts", block.ffn.experts))
        if block.ffn.shared is not None:
            parts += [(f"ffn.shared.{name}", part) for name, part in block.ffn.shared.named_children()]
    else:
        parts += [(f"ffn.{name}", part) for name, part in block.ffn.named_children()]
    for name, part in parts:
        for own, _ in part.named_parameters(recurse=False):
            yield f"{name}.{own}", part, own


def _take_rows(module: nn.Module, name: str, share: Share) -> Rows:
    """Replace a tensor of ``module`` with a copy of the share's rows; return their range in the full one."""
    tensor: Tensor = getattr(module, name)
    rows = share.rows(tensor.shape[0])
    setattr(module, name, nn.Parameter(tensor[rows.start : rows.stop].clone(), requires_grad=False))
    return Rows(rows.start, tensor.shape[0])


def settle_projection(model: Transformer, share: Share) -> None:
    """Give a model with tied embeddings its own output projection: the share's rows.

    Shares but the first then have no embedding. Does nothing with a separate head.
    """
    if model.head is not None:
        return
    assert model.embedding is not None, "it is the projection"
    matrix = model.embedding.weight.detach()
    if not share.number:
        rows = share.rows(len(matrix))
        matrix = matrix[rows.start : rows.stop]
    else:
        model.embedding = None
    model.head = projection_by(matrix)


def projection_by(matrix: torch.Tensor) -> OutputProjection:
    """Return an output projection with ``matrix`` ``(vocabulary, dim)``, without a copy."""
    with torch.device("meta"):
        head = OutputProjection(matrix.shape[1], matrix.shape[0], bias=False)
    head.weight = nn.Parameter(matrix.detach(), requires_grad=False)
    return head


def assemble(model: Transformer, share: Share, assembly: Assembly, *, exact: bool) -> Affine:
    """Connect the layers of a share with the other shares, in place, and return the product of the output projection:
    all scores in the first process, its own part in the others.

    The last matrices of attention and feed-forward gather their inputs and results, experts their rows. ``exact``
    numerics are those of PyTorch's operations; others take faster products where there are some.
    """
    fast = None if exact else fast_products(model)
    through: Affine = fast or F.linear
    for block in model.blocks.values():
        assert isinstance(block, Block), "the model's layers"
        ends: list[nn.Module] = [block.attention.output]
        if isinstance(block.ffn, MoE):
            block.ffn.exchange = SharedExperts(block.ffn.router.moe.experts, share, assembly)
            ends += [block.ffn.shared.down] if block.ffn.shared is not None else []
        else:
            assert isinstance(block.ffn, FeedForward), "the model's layers"
            ends.append(block.ffn.down)
        for end in ends:
            assert isinstance(end, Linear), "the model's matrices"
            end.affine = _Assembled(assembly, through if end.affine is None else end.affine)
    return lambda x, matrix, bias: assembly.scores(through(x, matrix, bias))


class _Assembled:
    """Column-parallel product with a gathered result: ``(..., local inputs)`` to ``(..., all outputs)``."""

    def __init__(self, assembly: Assembly, product: Affine) -> None:
        self._assembly, self._product = assembly, product

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Gather ``x`` ``(..., local inputs)``, multiply it by this share's rows of ``matrix``, and gather the results."""
        return self._assembly.gather(self._product(self._assembly.gather(x), matrix, bias))


class SharedExperts:
    """Expert-parallel exchange: all processes have all tokens, compute the rows of their own experts, and gather
    the rows of the others.
    """

    def __init__(self, count: int, share: Share, assembly: Assembly) -> None:
        """Keep the total number of experts, ``count``, and the means to exchange their rows."""
        self._count, self._share, self._assembly = count, share, assembly

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Compute ``tokens`` ``(n, d)`` through their experts, and return ``(n, d)``.

        This share computes its own experts' rows, and gathers those of the others.
        """
        order = order_by_expert(routing.experts, self._count)
        own = self._share.rows(self._count)
        ends = order.counts.cumsum(0).tolist()
        begin, end = (ends[place - 1] if place else 0 for place in (own.start, own.stop))
        rows = copies_by_expert(tokens, order)[begin:end]  # (own copies, d)
        own_rows = experts(rows, groups_of_one_slot(order.counts[own.start : own.stop]))
        return combine(self._assembly.gather(own_rows, 0), order, routing.weights)


# Weights of a part: only what it needs is read.


def divided(spec: ModelSpec, stages: int) -> list[range]:
    """Return the layers of each of ``stages`` processes, so that the largest part has the fewest weights.

    Embedding and head count to the first and last layer. Raises ServeError for more processes than layers.
    """
    if stages > spec.layers:
        raise ServeError(
            f"--pipeline {stages}: the model has {spec.layers} layers, so at most so many processes can have a part of it"
        )
    sizes = [0] * spec.layers
    for parameter in parameters(spec):
        first, last = parameter.section == "embedding", parameter.section == "end"
        layer = 0 if first else spec.layers - 1 if last else parameter.layer
        sizes[layer] += math.prod(parameter.shape)
        if first and spec.tie_embeddings and stages > 1:
            sizes[-1] += math.prod(parameter.shape)
    boundaries = [0, *accumulate(balance(sizes, stages))]
    return [range(begin, end) for begin, end in pairwise(boundaries)]


def restored_part(
    run_dir: Path, step: int, layers: range, dtype: torch.dtype
) -> tuple[Transformer, ModelSpec, dict[str, TensorDigest]]:
    """Load these layers with the weights of ``step``. Return the model, the full model's spec, and the digest of each tensor.

    The last layers include the norm and the output projection, by a copy of tied embeddings. Digests are of the tensors in ``dtype``
    (routers' biases in fp32), under their names in the full model. Raises the errors of ``restored_model``, and ServeError if the model has
    fewer layers.
    """
    model, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=partial(_cut, layers=layers))
    assert isinstance(model, Transformer), "others are refused where they are cut"
    digests = tensor_digests(model)
    if layers.stop == spec.layers and layers.start > 0 and model.embedding is not None:
        # A tied embedding in the last part is its output projection only, since that part receives no tokens.
        model.head, model.embedding = projection_by(model.embedding.weight), None
    return model, spec, digests


def checkpoint_name(run_dir: Path, step: int) -> str:
    """Return 16 digits that identify a step's checkpoint: two copies with the same name have the same weights.

    The name of a published model is that of its files on this machine.
    """
    tier = weights_tier(RunDirectory(run_dir))
    named = tier.version() if isinstance(tier, FolderTier) else encode_index(tier.index(step))
    return hashlib.sha256(named).hexdigest()[:16]


def _cut(model: Transformer, layers: range) -> dict[str, Rows]:
    """Keep only ``layers``, and the ends of the model that they need. Raises ServeError if the model has fewer layers."""
    if layers.stop > model.spec.layers:
        raise ServeError(
            f"layer {layers.stop - 1} is requested, and the model of this run has {model.spec.layers} layers: give every stage the same run"
        )
    first, last = layers.start == 0, layers.stop == model.spec.layers
    # A tied output projection is the embedding, which the last part then reads too.
    model.keep(layers, first=first or (last and model.head is None), last=last)
    return {}


def restored_share(
    run_dir: Path, step: int, share: Share, dtype: torch.dtype
) -> tuple[Transformer, ModelSpec, dict[str, TensorDigest]]:
    """Load a share of each layer with the weights of ``step``.

    Return the model, the full model's spec, and digests of some full tensors.

    The first share includes the embedding. Every share reads and hashes a part of the full tensors first, so that
    together they have hashed all. Raises the errors of ``restored_model``.
    """
    # A share lacks the full tensors to hash, so each process first reads some of them only for that.
    names: list[str] = []

    def to_hash(model: Transformer) -> dict[str, Rows]:
        """Collect the names of every ``share.of``-th tensor, to be hashed here; remove all other tensors from the model."""
        names.extend(sorted(model.state_dict())[share.number :: share.of])
        # All other tensors are removed; the model cannot compute any more.
        for prefix, module in list(model.named_modules()):
            for own in [
                *dict(module.named_parameters(recurse=False)),
                *dict(module.named_buffers(recurse=False)),
            ]:
                if (f"{prefix}.{own}" if prefix else own) not in names:
                    setattr(module, own, None)
        return {}

    hashed, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=to_hash)
    digests = tensor_digests(hashed)
    del hashed
    model, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=partial(cut, share=share))
    assert isinstance(model, Transformer), "others are refused where they are cut"
    settle_projection(model, share)
    return model, spec, digests


def tensor_digests(model: nn.Module) -> dict[str, TensorDigest]:
    """Return the digest of every tensor as it is computed with, by name, without those of multi-token prediction."""
    return {
        # Drafts do not affect the bits of a text.
        name: tensor_digest(dtype_name(tensor.dtype), tuple(tensor.shape), [bytes_of(tensor)])
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is there and contiguous."""
    data: memoryview = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data
    return data
