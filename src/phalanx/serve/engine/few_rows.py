"""A few rows through a model's layers by the kernel of ``phalanx.hardware.kernels.rows.layer``, where all layers are of the kind that it knows.

That is grouped-query attention before a SwiGLU, both normalized before, in fp32 or bf16: Llama's layer and Qwen3's. Attention itself is the cache's affair as ever. A model
of any other kind goes through its modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.hardware.kernels.rows.attention import PART, Chains, RowAttention, RowPlace, RowTable
from phalanx.hardware.kernels.rows.layer import Affinity, LayerSteps, LayerWeights
from phalanx.hardware.kernels.rows.product import MOST_ROWS, row_kernel
from phalanx.model.block import Block
from phalanx.model.facts.stretching import longest_short
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.model.layers.feed_forward import FeedForward
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.serve.engine.fast_products import row_block
from phalanx.serve.kv_cache.layer_cache import LayerKVCache, Rule, Span

_LANES = 8
_FORMATS = (torch.float32, torch.bfloat16)
_TURNS = 1024
"""Positions at least whose rotation is kept."""
MOST_TURNS = 8192
"""Positions at most, since it takes four times the bytes of a head for each: those behind are computed for each step."""
_Table = tuple[Tensor, Tensor]
"""Cosines and sines ``(rows, rotated)``."""
_CHAINS = Chains(PART, PART, PART, fuses_sum=False)
"""The order of additions of attention, which is nobody's concern with fast numerics."""


class FewRows:
    """The layers of a model whose rows one call a layer takes further."""

    def __init__(self, model: Transformer, layers: list[LayerWeights]) -> None:
        kernel = row_kernel()
        assert kernel is not None, "asked before the layers were looked at"
        self.model = model
        self._attentions = [(int(layer), _attention(block)) for layer, block in model.blocks.items()]
        self.steps = LayerSteps(kernel, layers, MOST_ROWS)
        self._turns: tuple[_Table, _Table] = ((torch.empty(0, 0),) * 2,) * 2
        self._attention = self._row_attention()

    def _tables(self, positions: list[int], length: int) -> tuple[_Table, _Table]:
        model, at = self.model, torch.tensor(positions)
        if longest_short(model.spec) or max(positions) >= MOST_TURNS:
            return model.tables(at, self.steps.dtype, length)
        if max(positions) >= len(self._turns[0][0]):
            whole = torch.arange(min(max(_TURNS, 2 * max(positions)), MOST_TURNS))
            self._turns = model.tables(whole, self.steps.dtype, 0)
        full, windowed = ((cos[at], sin[at]) for cos, sin in self._turns)
        return full, windowed

    def _row_attention(self) -> RowAttention | None:
        """Return the kernel's attention; None if layers have what it does not know (windows, sinks, caps), so that PyTorch's attends text for text."""
        spec, (_, some) = self.model.spec, self._attentions[0]
        cores = [attention.core for _, attention in self._attentions]
        if (
            not all(isinstance(core, CausalCore) and not core.window and not core.score.cap for core in cores)
            or any(attention.sinks is not None for _, attention in self._attentions)
            or some.head_dim % _LANES
        ):
            return None
        scale = spec.score_width**-0.5 if spec.score_width else some.head_dim**-0.5
        kept = len(some.key.weight) // some.head_dim
        heads = len(some.query.weight) // some.head_dim
        return RowAttention(heads, kept, some.head_dim, scale, _CHAINS, self.steps.threads)

    def __call__(self, x: Tensor, spans: Sequence[Span], rule: Rule, length: int) -> Tensor:
        """Tokens ``(rows,)`` or states ``(rows, dim)``, those of ``spans`` in turn, to the states after the layers; ``length`` as ``Transformer.forward`` takes it."""
        model = self.model
        places = [RowPlace(position, span.end) for span in spans for position in range(span.begin, span.end)]
        rows = self._attention.begin(places) if self._attention and rule.kept is None else None
        masks: dict[tuple[int, ...], Tensor] = {}
        states = x.clone() if model.embedding is None else model.embedded(x)
        full, windowed = self._tables([place.position for place in places], length)
        mixed: Tensor | RowTable | None = None
        for number, (layer, attention) in enumerate(self._attentions):
            table = windowed if window_of(model.spec, layer) else full
            self.steps.go(number - 1, states, mixed, *table)
            if rows is not None:
                texts = [(span.kv.layers[layer], span.end - span.begin) for span in spans]
                rows.point([(keys, values, count) for (keys, values), count in texts])
                mixed = rows
            else:
                query, key, value = self.steps.projected(len(states))
                cache = LayerKVCache(layer, spans, rule, masks)
                found = cache.mix(attention.core, query, key, value, attention.sinks)
                mixed = found[0].transpose(0, 1).reshape(len(states), -1)
        self.steps.go(len(self._attentions) - 1, states, mixed, *full)
        return states


def few_rows(model: Transformer) -> FewRows | None:
    """The kernel's way through a model; ``None`` if it has none, or a layer that is of another kind."""
    kernel = row_kernel()
    watched = model._forward_hooks or model._forward_pre_hooks
    if kernel is None or not kernel.fuses or not model.blocks or watched:
        return None
    layers = [_weights(block, model) for block in model.blocks.values()]
    fitting = [layer for layer in layers if layer is not None]
    formats = {one.dtype for layer in fitting for one in layer.tensors()}
    if model.embedding is not None:  # which the first layer reads
        formats.add(model.embedding.weight.dtype)
    return FewRows(model, fitting) if len(fitting) == len(layers) and len(formats) == 1 else None


def _attention(block: nn.Module) -> Attention:
    assert isinstance(block, Block)
    assert isinstance(block.attention, Attention)
    return block.attention


def _weights(block: nn.Module, model: Transformer) -> LayerWeights | None:
    if not isinstance(block, Block):
        return None
    attention, ffn = block.attention, block.ffn
    norms = (block.attention_norm, block.ffn_norm)
    if not isinstance(attention, Attention) or not isinstance(ffn, FeedForward) or ffn.gate is None:
        return None
    kept = (attention.query_norm, attention.key_norm)
    after = (block.attention_post_norm, block.ffn_post_norm)
    linears = (attention.query, attention.key, attention.value, attention.output, ffn.gate, ffn.up, ffn.down)
    usual = (
        ffn.spec.ffn == "swiglu"
        and all(one is not None and _plain_norm(one) for one in norms)
        and after == (None, None)
        and all(one is None or (attention.normalizes_heads and _plain_norm(one)) for one in kept)
        and all(_plain(one) and not one.weight.shape[0] % _LANES for one in linears)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
    )
    if not usual or not all(map(row_block, linears)):
        return None
    query, key, value, output, gate, up, down = (
        Affinity(one.weight, one.bias, row_block(one)) for one in linears
    )
    assert block.attention_norm is not None
    assert block.ffn_norm is not None
    return LayerWeights(
        query=query,
        key=key,
        value=value,
        output=output,
        gate=gate,
        up=up,
        down=down,
        attention_norm=block.attention_norm.weight,
        ffn_norm=block.ffn_norm.weight,
        query_norm=None if kept[0] is None else kept[0].weight,
        key_norm=None if kept[1] is None else kept[1].weight,
        width=attention.head_dim,
        rotated=attention_kind(model.spec).rotated_width(model.spec) if attention.rotated else 0,
        eps=block.attention_norm.eps,
    )


def _plain(linear: Linear) -> bool:
    weight, bias = linear.weight, linear.bias
    return (
        linear.product is None
        and weight.dtype in _FORMATS
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def _plain_norm(norm: RMSNorm) -> bool:
    return not norm.offset and norm.weight.dtype in _FORMATS and not len(norm.weight) % _LANES
