"""Model runner: computes the rows of a step through the layers of one process, and samples behind the last layer.

One process may have all layers. If a model is divided into stages (``phalanx_serve.stages``), each process has a runner with the keys
and values of its own layers. A row passes the same products in the same order wherever the next layer is, so exact bits are the same. The
sampler output of a row is a few numbers, so that a distribution over the vocabulary is never sent.

A few rows pass through all layers by one kernel (``phalanx.hardware.portable.layer_step``), if it knows the layers: grouped-query attention before
a SwiGLU, both normalized before, in fp32 or bf16, as in Llama and Qwen3. Attention itself is the cache's part. Any other model goes through its
modules.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.local.device import brought, on_gpu
from phalanx.hardware.portable import layer_step
from phalanx.hardware.portable.library import is_available, operations
from phalanx.model.facts.shape import longest_short
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.model.layers.dense import Affine, FeedForward, Linear, RMSNorm
from phalanx.model.transformer import Block, Transformer
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.run.spec import ModelSpec
from phalanx.train.step.loss import log_probabilities
from phalanx_serve.engine.sampler import SamplerOutput, SamplingRequest, sample_rows
from phalanx_serve.kv_cache.layer_cache import LayerKVCache, Rule, SpanAttention
from phalanx_serve.kv_cache.memory import PageBox, PageBytes, RowSpan
from phalanx_serve.traffic.events import GenerationRequestError, Request, ServeError

# Models that an engine can serve, and requests that it can compute.


def require_supported(model: Transformer, *, drafts: int = 0) -> None:
    """Raise ServeError, with reason and remedy, for a model that cannot be served.

    Attention must not be divided over ranks or tiles, and ``drafts`` at most the tokens predicted ahead.
    """
    if drafts > len(model.mtp):
        raise ServeError(
            f"{drafts} tokens cannot be drafted in a step: the model predicts {len(model.mtp)} ahead (model.mtp_depth)"
        )
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "the model's layers"
        core = block.attention.core
        if not isinstance(core, CausalCore):
            raise ServeError(
                f"layer {layer} divides attention over ranks or tiles, which the engine does not: build the model whole"
            )


def require_computable(request: Request, vocab: int, context: int) -> None:
    """Raise GenerationRequestError, which names the field, for a request that cannot be computed.

    That is an empty prompt, an id outside the ``vocab`` ids, no token left to generate, or more tokens than
    ``context``.
    """
    if not request.prompt:
        raise GenerationRequestError("the prompt is empty: begin with the end-of-document token", "prompt")
    for field_name, tokens in (("prompt", request.prompt), ("told", request.generated)):
        for token in tokens:
            if not 0 <= token < vocab:
                raise GenerationRequestError(
                    f"token id {token} is outside the model's vocabulary of {vocab}: encode with the run's own tokenizer",
                    field_name,
                )
    if request.max_tokens <= len(request.generated):
        raise GenerationRequestError(
            f"max_tokens = {request.max_tokens}, and {len(request.generated)} are generated already: ask for at least one more",
            "max_tokens",
        )
    length = len(request.prompt) + request.max_tokens
    if length > context:
        raise GenerationRequestError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones do not fit into a context of {context}: "
            "shorten the prompt, or ask for fewer tokens",
            "prompt" if len(request.prompt) >= context else "max_tokens",
        )


# Products of bf16 on a CPU without bf16 instructions, where PyTorch would read the matrix once for each row.


class FastProducts:
    """``torch.nn.functional.linear``, with the portable kernel for bf16."""

    def __init__(self) -> None:
        self._product = operations().mm

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x`` ``(..., inputs)`` times the transpose of ``matrix`` ``(outputs, inputs)``, plus ``bias``:
        ``(..., outputs)``.

        Uses the portable kernel if ``matrix`` is bf16 and ``x`` is on a CPU. Computes as PyTorch does for all else,
        for an empty ``x``, and wherever gradients are enabled.
        """
        outputs, inputs = matrix.shape
        # A model may have been moved since it got these products.
        on_cpu = matrix.dtype == torch.bfloat16 and x.device.type == "cpu"
        if not on_cpu or not x.numel() or torch.is_grad_enabled():
            return F.linear(x, matrix, bias)
        product: Tensor = self._product(x.reshape(-1, inputs), matrix.t())  # (n, outputs)
        return (product if bias is None else product + bias).view(*x.shape[:-1], outputs)  # (..., outputs)


def fast_products(model: nn.Module) -> FastProducts | None:
    """Return products that are faster than PyTorch's for ``model``; None unless it is bf16 on a CPU without oneDNN's bf16."""
    weight = next(model.parameters())
    library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if (
        weight.dtype != torch.bfloat16
        or weight.device.type != "cpu"
        or (library and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    ):
        return None
    return _products()


def use_fast_products(model: nn.Module) -> FastProducts | None:
    """Give ``fast_products`` to the linear layers of ``model`` that have no other product yet, except those of
    multi-token prediction.

    Returns the products, or None if there are none.
    """
    products = fast_products(model)
    if products is None:
        return None
    for name, part in model.named_modules():
        if isinstance(part, Linear) and part.affine is None and not name.startswith("mtp."):
            part.affine = products
    return products


@functools.cache
def _products() -> FastProducts | None:
    """Return the one object of fast products, so that layers with it can be recognized; None if it is not available."""
    # One object, so that layers with these products can be recognized.
    return FastProducts() if is_available() else None


# Attention of several texts at once, on a GPU.


_log = logging.getLogger(__name__)
Batching = Callable[[Sequence[RowSpan]], SpanAttention]
"""Function from the spans of a step to their attention."""


@functools.cache
def batched_attention(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Batching | None:
    """Return the attention of several texts at once for models of ``spec`` on ``device``; None if texts are attended one by one.

    The programs are compiled and compared with attention text by text. If that fails, it is logged as a warning. Cached.
    """
    if not on_gpu(device) or importlib.util.find_spec("triton") is None:
        return None
    try:
        from phalanx_serve.kv_cache import decode_attention

        differing = decode_attention.differences(spec, dtype, device)
    except Exception as error:  # any failure of a compiler means that the kernel is missing
        reason = f"{type(error).__name__}: {error}"
    else:
        if not differing:
            return decode_attention.DecodeAttention
        reason = f"other results than PyTorch's: {' and '.join(differing)}"
    _log.warning(
        "on %s, attention is launched for each text and layer, so that many texts wait for the host: the Triton programs for all texts fail (%s); "
        "install a Triton that fits this PyTorch, and a C compiler",
        device,
        reason,
    )
    return None


# The kernel for a few rows.


_FORMATS = (torch.float32, torch.bfloat16)
_TURNS = 1024
"""Least number of positions whose rotation is cached."""
MOST_TURNS = 8192
"""Most positions whose rotation is cached, since each takes four times the bytes of a head. Later positions are
computed in each step.
"""
_Table = tuple[Tensor, Tensor]
"""Cosines and sines ``(rows, rotated)``."""


class FewRows:
    """Layers of a model, computed by one kernel call per layer."""

    def __init__(self, model: Transformer, layers: list[layer_step.LayerWeights]) -> None:
        """Prepare the kernel for ``layers``, the weights of the blocks of ``model``."""
        self.model = model
        self._attentions = [(int(layer), _attention(block)) for layer, block in model.blocks.items()]
        self.kernel = layer_step.LayerKernel(layers, layer_step.MOST_ROWS)
        self._turns: tuple[_Table, _Table] = ((torch.empty(0, 0),) * 2,) * 2
        self._scale = self._plain_scale()

    def _tables(self, positions: list[int], length: int) -> tuple[_Table, _Table]:
        """Return the (cos, sin) tables of positions, for full and for windowed attention.

        Tables up to ``MOST_TURNS`` are kept and grow as needed; later positions, and models whose rotation depends on
        length, are computed.
        """
        model, at = self.model, torch.tensor(positions)
        if longest_short(model.spec) or max(positions) >= MOST_TURNS:
            return model.tables(at, self.kernel.dtype, length)
        if max(positions) >= len(self._turns[0][0]):
            positions_to_keep = torch.arange(min(max(_TURNS, 2 * max(positions)), MOST_TURNS))
            self._turns = model.tables(positions_to_keep, self.kernel.dtype, 0)
        full, windowed = ((cos[at], sin[at]) for cos, sin in self._turns)  # (rows, rotated)
        return full, windowed

    def _plain_scale(self) -> float | None:
        """Return the factor of the attention scores if the kernel computes attention.

        Return None if a layer has windows, sinks or caps, which it lacks; then PyTorch's attention runs text by text.
        """
        spec, (_, some) = self.model.spec, self._attentions[0]
        cores = [attention.core for _, attention in self._attentions]
        if not all(
            isinstance(core, CausalCore) and not core.window and not core.score.cap for core in cores
        ) or any(attention.sinks is not None for _, attention in self._attentions):
            return None
        return 1 / math.sqrt(spec.score_width or some.head_dim)

    def __call__(self, x: Tensor, spans: Sequence[RowSpan], rule: Rule, length: int) -> Tensor:
        """Compute tokens ``(rows,)`` or states ``(rows, dim)`` through all layers, and return states ``(rows, dim)``.

        Rows are in the order of ``spans``, which get the new keys and values. The final norm is not applied, and
        ``x`` stays unchanged. ``length`` is that of ``Transformer.forward``.
        """
        model = self.model
        positions = [position for span in spans for position in range(span.begin, span.end)]
        rows = None
        if self._scale is not None and rule.kept is None:
            rows = layer_step.CachedRows(positions, self._scale)
        masks: dict[tuple[int, ...], Tensor] = {}
        states = (x if model.embedding is None else model.embedded(x)).float()  # (rows, dim)
        if states is x:
            states = x.clone()
        tables = self._tables(positions, length)
        full, windowed = ((cos.float().contiguous(), sin.float().contiguous()) for cos, sin in tables)
        mixed: Tensor | layer_step.CachedRows | None = None
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
                heads = cache.mix(attention.core, query, key, value, attention.sinks)  # (1, h, rows, v)
                mixed = heads[0].transpose(0, 1).reshape(len(states), -1)  # (rows, h v)
        self.kernel.step(len(self._attentions) - 1, states, mixed, *full)
        return states.to(self.kernel.dtype)


def few_rows(model: Transformer) -> FewRows | None:
    """Return the kernel path of a model.

    Return None if the kernel is unavailable or does not support a layer, weights differ in format, or the model has
    hooks.
    """
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


def _weights(block: nn.Module, model: Transformer) -> layer_step.LayerWeights | None:
    """Return a block's weights for the kernel.

    Returns None unless it is a block of attention and SwiGLU with plain norms before both, no norms after them, no
    hooks, and linear layers that are ``_plain``.
    """
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
        and all(norm is not None and _plain_norm(norm) for norm in norms)
        and after == (None, None)
        and all(norm is None or (attention.normalizes_heads and _plain_norm(norm)) for norm in kept)
        and all(map(_plain, linears))
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
    )
    if not usual:
        return None
    query, key, value, output, gate, up, down = (
        layer_step.LinearWeights(linear.weight, linear.bias) for linear in linears
    )
    assert block.attention_norm is not None
    assert block.ffn_norm is not None
    return layer_step.LayerWeights(
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
    """Return True for a linear layer that the kernel computes: on a CPU, in a known format, contiguous, with no other
    product than ``FastProducts``.
    """
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
    """Return True for a norm that the kernel computes: without an offset, in fp32 or bf16."""
    return not norm.offset and norm.weight.dtype in _FORMATS


# The runner.


_MOST_BESIDE_LIBRARY = 2
"""Rows up to which the few-rows kernel is faster than a library with bf16 instructions."""


@dataclass(frozen=True)
class FarSpan:
    """A ``RowSpan`` as it is sent to other processes, with the number of its text."""

    piece: int
    begin: int
    end: int


class FarLayers(Protocol):
    """Layers of a model that run in other processes.

    Calls on keys and values apply to the texts and pages of those layers, in the order of the calls.
    """

    kv_spec: ModelSpec
    """Architecture of the process that has the most keys and values."""
    shares: int
    """Number of processes that each local layer is divided among."""
    max_in_flight: int
    """Most steps in flight at a time, each with other texts."""
    own: PageBox
    """This process's part of a page."""
    boxes: Sequence[PageBox]
    """Each other process's part of a page."""

    def hold(self, pages: int) -> None:
        """Allocate ``pages`` in each process, before any other call."""
        ...

    def attach(self, model: Transformer, *, exact: bool) -> Affine | None:
        """Connect the layers of this process with the others. Return the product of the output projection, or None
        for the runner's own.
        """
        ...

    def step(
        self, tokens: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> AbstractContextManager[Tensor]:
        """Return a context with the input of the layers of this process: tokens ``(rows,)`` or states ``(rows, dim)``."""
        ...

    def compute(
        self, states: Tensor, spans: Sequence[FarSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> Future[SamplerOutput]:
        """Compute rows ``(rows, dim)`` through the layers behind those of this process.

        The future raises PartLostError if a process no longer answers.
        """
        ...

    def drop(self, piece: int) -> None: ...

    def copy_in(self, piece: int, number: int, place: int) -> None: ...

    def copy_out(self, piece: int, number: int, place: int) -> None: ...

    def read(self, place: int) -> list[bytes]:
        """Return each other process's part of a page."""
        ...

    def write(self, place: int, parts: Sequence[PageBytes]) -> None:
        """Store each other process's part of a page."""
        ...


@dataclass(frozen=True)
class RunnerOutput:
    """Result of a step's rows behind the layers of a runner."""

    states: Tensor
    """``(rows, dim)``: after the last norm, or for the next stage."""
    sampler_output: SamplerOutput | None
    """None if the model has further stages."""


class ModelRunner:
    """Layers of a model. With exact numerics, PyTorch's operations are the portable kernels."""

    def __init__(self, model: Transformer, rule: Rule, projection: Affine | None = None) -> None:
        """Choose the kernels of ``model``: faster products with fast numerics, and one kernel per layer for few rows
        if it supports them.

        ``projection`` is the product of the output projection; None takes that of the other layers, or PyTorch's.
        """
        products = None if rule.exact else use_fast_products(model)
        self._model, self._rule, self._projection = model, rule, projection or products
        self._few = few_rows(model)
        weight = next(model.parameters())
        self._batching = batched_attention(model.spec, weight.dtype, weight.device)
        has_library = weight.dtype == torch.bfloat16 and products is None
        self._most_few = layer_step.MOST_ROWS if rule.exact or not has_library else _MOST_BESIDE_LIBRARY

    @torch.no_grad()
    def compute(
        self, x: Tensor, spans: Sequence[RowSpan], length: int, requests: Sequence[SamplingRequest]
    ) -> RunnerOutput:
        """Compute tokens ``(rows,)`` or states ``(rows, dim)``, in the order of ``spans``, through the layers.

        Writes keys and values into ``spans``. Few rows take the kernel path where the model has one. Samples
        ``requests`` only if the last layer is here; the sampler output is None if it is not, and empty without
        requests. ``length`` is that of ``Transformer``.
        """
        count, model = len(x), self._model
        positions = [p for span in spans for p in range(span.begin, span.end)]
        masks: dict[tuple[int, ...], Tensor] = {}
        batched = None if self._batching is None else self._batching(spans)
        cache = [LayerKVCache(layer, spans, self._rule, masks, batched) for layer in range(model.spec.layers)]
        distributions: list[tuple[Tensor, Tensor]] = []

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            """Append the log-probabilities of the requested rows to ``distributions``; return ``hidden`` unchanged."""
            if requests:
                rows = torch.tensor([request.row for request in requests])
                states = hidden[0].index_select(0, brought(rows, hidden.device))  # (requests, dim)
                distributions.append(
                    log_probabilities(states, weight, model.spec.logit_cap, self._projection)
                )
            return hidden

        if self._few is not None and count <= self._most_few:
            states = self._few(x, spans, self._rule, length)
            if model.norm is not None:
                states = model.norm(states)
                readout(states[None], model.projection())
        else:
            at = brought(torch.tensor(positions), x.device)
            states = model(x[None], readout, positions=at, length=length, cache=cache)[0]  # (rows, dim)
        if model.norm is None:
            return RunnerOutput(states, None)
        return RunnerOutput(states, sample_rows(requests, *distributions[0]) if distributions else [])
