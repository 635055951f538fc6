"""A few rows through a model's layers by the kernel of ``phalanx.hardware.portable.layer_step``, where all layers are of the kind that it knows.

That is grouped-query attention before a SwiGLU, both normalized before, in fp32 or bf16: Llama's layer and Qwen3's. Attention itself is the cache's affair as ever. A model
of any other kind goes through its modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.hardware.portable.layer_step import (
    MOST_ROWS,
    CachedRows,
    LayerKernel,
    LayerWeights,
    LinearWeights,
)
from phalanx.hardware.portable.library import is_available
from phalanx.model.block import Block
from phalanx.model.facts.stretching import longest_short
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.model.layers.feed_forward import FeedForward
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.serve.engine.fast_products import FastProducts
from phalanx.serve.kv_cache.layer_cache import LayerKVCache, Rule, Span

_FORMATS = (torch.float32, torch.bfloat16)
_TURNS = 1024
"""Positions at least whose rotation is kept."""
MOST_TURNS = 8192
"""Positions at most, since it takes four times the bytes of a head for each: those behind are computed for each step."""
_Table = tuple[Tensor, Tensor]
"""Cosines and sines ``(rows, rotated)``."""


class FewRows:
    """The layers of a model whose rows one call a layer takes further."""

    def __init__(self, model: Transformer, layers: list[LayerWeights]) -> None:
        self.model = model
        self._attentions = [(int(layer), _attention(block)) for layer, block in model.blocks.items()]
        self.kernel = LayerKernel(layers, MOST_ROWS)
        self._turns: tuple[_Table, _Table] = ((torch.empty(0, 0),) * 2,) * 2
        self._scale = self._plain_scale()

    def _tables(self, positions: list[int], length: int) -> tuple[_Table, _Table]:
        model, at = self.model, torch.tensor(positions)
        if longest_short(model.spec) or max(positions) >= MOST_TURNS:
            return model.tables(at, self.kernel.dtype, length)
        if max(positions) >= len(self._turns[0][0]):
            whole = torch.arange(min(max(_TURNS, 2 * max(positions)), MOST_TURNS))
            self._turns = model.tables(whole, self.kernel.dtype, 0)
        full, windowed = ((cos[at], sin[at]) for cos, sin in self._turns)
        return full, windowed

    def _plain_scale(self) -> float | None:
        """Return the factor of scores; None if layers have what the kernel's attention does not know (windows, sinks, caps), so that PyTorch's attends text for text."""
        spec, (_, some) = self.model.spec, self._attentions[0]
        cores = [attention.core for _, attention in self._attentions]
        if not all(
            isinstance(core, CausalCore) and not core.window and not core.score.cap for core in cores
        ) or any(attention.sinks is not None for _, attention in self._attentions):
            return None
        scale: float = (spec.score_width or some.head_dim) ** -0.5
        return scale

    def __call__(self, x: Tensor, spans: Sequence[Span], rule: Rule, length: int) -> Tensor:
        """Tokens ``(rows,)`` or states ``(rows, dim)``, those of ``spans`` in turn, to the states after the layers; ``length`` as ``Transformer.forward`` takes it."""
        model = self.model
        positions = [position for span in spans for position in range(span.begin, span.end)]
        rows = None
        if self._scale is not None and rule.kept is None:
            rows = CachedRows(positions, self._scale)
        masks: dict[tuple[int, ...], Tensor] = {}
        states = (x if model.embedding is None else model.embedded(x)).float()
        if states is x:
            states = x.clone()
        tables = self._tables(positions, length)
        full, windowed = ((cos.float().contiguous(), sin.float().contiguous()) for cos, sin in tables)
        mixed: Tensor | CachedRows | None = None
        for number, (layer, attention) in enumerate(self._attentions):
            table = windowed if window_of(model.spec, layer) else full
            self.kernel.step(number - 1, states, mixed, *table)
            if rows is not None:
                texts = [(span.kv.layers[layer], span.end - span.begin) for span in spans]
                rows.point([(keys, values, count) for (keys, values), count in texts])
                mixed = rows
            else:
                query, key, value = self.kernel.projected(len(states))
                cache = LayerKVCache(layer, spans, rule, masks)
                heads = cache.mix(attention.core, query, key, value, attention.sinks)
                mixed = heads[0].transpose(0, 1).reshape(len(states), -1)
        self.kernel.step(len(self._attentions) - 1, states, mixed, *full)
        return states.to(self.kernel.dtype)


def few_rows(model: Transformer) -> FewRows | None:
    """Return the kernel's way through a model; None if it has none, or a layer that is of another kind."""
    if not model.blocks or model._forward_hooks or model._forward_pre_hooks:
        return None
    layers = [_weights(block, model) for block in model.blocks.values()]
    fitting = [layer for layer in layers if layer is not None]
    formats = {weight.dtype for layer in fitting for weight in layer.tensors()}
    if model.embedding is not None:  # which the first layer reads
        formats.add(model.embedding.weight.dtype)
    fits = len(fitting) == len(layers) and len(formats) == 1
    return FewRows(model, fitting) if fits and is_available() else None


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
        and all(map(_plain, linears))
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
    )
    if not usual:
        return None
    query, key, value, output, gate, up, down = (
        LinearWeights(linear.weight, linear.bias) for linear in linears
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
    # Other processes may have a part of the product, and a library may compute bf16 rows faster.
    own = linear.affine is None or isinstance(linear.affine, FastProducts)
    return (
        own
        and linear.product is None
        and weight.dtype in _FORMATS
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def _plain_norm(norm: RMSNorm) -> bool:
    return not norm.offset and norm.weight.dtype in _FORMATS
