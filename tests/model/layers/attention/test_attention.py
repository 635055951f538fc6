"""Attention against its formula: documents, latent attention's parts, and what may be replaced from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.growing_cache import empty_cache
from model.initialized import initialized
from phalanx.model.facts.shape import softmax_temperature
from phalanx.model.layers.attention.attend import Score, capped_attend, capped_attend_backward
from phalanx.model.layers.attention.attention import Attention, CausalCore, Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.attention.rotary import rotate, rotation
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, RopeScalingSpec

GROUPED = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=40, init_std=0.3)
MLA = MlaSpec(query_rank=20, kv_rank=12, nope_head_dim=6, rope_head_dim=8, value_head_dim=10)
LATENT = ModelSpec(layers=2, dim=32, heads=4, vocab_size=40, init_std=0.3, mla=MLA)
ABSORBED = replace(LATENT, mla=replace(MLA, absorbed=True))
each_kind = pytest.mark.parametrize(
    "spec", [GROUPED, LATENT, ABSORBED], ids=["grouped", "latent", "absorbed"]
)


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(40, (batch, seq), generator=torch.Generator().manual_seed(seq))


def by_formula(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("key_heads", "width"), [(4, 8), (2, 8), (4, 6)])
def test_the_core_is_softmax_attention_on_what_came_before(
    scale: float | None, key_heads: int, width: int
) -> None:
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, key_heads, 9, 8)
    value = torch.randn(2, key_heads, 9, width)
    expected = by_formula(query, key, value, torch.ones(9, 9).tril().bool(), scale or 8**-0.5)
    torch.testing.assert_close(CausalCore(scale)(query, key, value, None), expected)


def test_the_core_keeps_to_the_document() -> None:
    query, key, value = torch.randn(3, 2, 4, 9, 8).unbind()
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 1]])
    seen = torch.ones(9, 9).tril().bool() & (documents[:, None, :, None] == documents[:, None, None, :])
    expected = by_formula(query, key, value, seen, 8**-0.5)
    torch.testing.assert_close(CausalCore()(query, key, value, Documents.numbered(documents)), expected)


@pytest.mark.parametrize("window", [1, 4, 5, 9, 20, 23, 30])
@pytest.mark.parametrize(("new", "masked"), [(23, False), (23, True), (6, False), (1, False)])
def test_a_window_hides_what_lies_further_back(window: int, new: int, masked: bool) -> None:
    query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 6)
    documents = (torch.arange(23) // 9).expand(2, -1) if masked else None
    distance = torch.arange(23 - new, 23)[:, None] - torch.arange(23)[None, :]
    seen = (distance >= 0) & (distance < window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    expected = by_formula(query, key, value, seen, 8**-0.5)
    numbered_documents = Documents.numbered(documents) if documents is not None else None
    torch.testing.assert_close(CausalCore(window=window)(query, key, value, numbered_documents), expected)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(("window", "masked"), [(0, False), (5, False), (0, True), (5, True)])
def test_caps_and_sinks_are_the_formulas_with_their_gradients(
    cap: float, sunk: bool, window: int, masked: bool
) -> None:
    leaves = [torch.randn(2, heads, 23, 8) for heads in (4, 2, 2)] + [torch.randn(4)]
    documents = (torch.arange(23) // 9).expand(2, -1) if masked else None
    core, upstream = CausalCore(0.5, window, cap), torch.randn(2, 4, 23, 8)
    numbered_documents = Documents.numbered(documents) if documents is not None else None

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return core(query, key, value, numbered_documents, sinks if sunk else None)

    def by_formula(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        distance = torch.arange(23)[:, None] - torch.arange(23)[None, :]
        seen = (distance >= 0) & (distance < (window or 23))
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * 0.5
        scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(~seen, -torch.inf)
        sink = (sinks if sunk else torch.full_like(sinks, -torch.inf))[None, :, None, None]
        shares = torch.cat((scores, sink.expand(2, -1, 23, -1)), dim=3).softmax(3)
        return shares[..., :-1] @ value

    results = []
    for attention in (ours, by_formula):
        arguments = [leaf.clone().requires_grad_() for leaf in leaves]
        out = attention(*arguments)
        results.append((out, *torch.autograd.grad(out, arguments[: 3 + sunk], upstream)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_capped_rows_are_the_same_in_pieces() -> None:
    query, key, value, upstream = torch.randn(4, 1, 2, 40, 8).unbind()
    score = Score(cap=1.0)
    results = []
    for rows in (40, 16):
        out, lse = capped_attend(query, key, value, score, causal=True, bias=None, rows=rows)
        gradients = capped_attend_backward(
            upstream, query, key, value, out, lse, score, causal=True, bias=None, rows=rows
        )
        results.append((out, lse, *gradients))
    torch.testing.assert_close(results[1], results[0])


@each_kind
def test_documents_in_one_sequence_are_as_if_alone_at_their_positions(spec: ModelSpec) -> None:
    model, text = initialized(spec), tokens(1, 20)
    documents = Documents.numbered(torch.tensor([[0] * 7 + [3] * 12 + [4]]))
    parts = [
        model(text[:, start:stop], positions=torch.arange(start, stop))
        for start, stop in ((0, 7), (7, 19), (19, 20))
    ]
    torch.testing.assert_close(
        model(text, documents=documents), torch.cat(parts, dim=1), rtol=1e-4, atol=1e-5
    )


@each_kind
def test_one_document_is_no_mask(spec: ModelSpec) -> None:
    model, text = initialized(spec), tokens(2, 11)
    torch.testing.assert_close(model(text, documents=Documents.numbered(torch.zeros_like(text))), model(text))


@each_kind
def test_positions_may_begin_anywhere(spec: ModelSpec) -> None:
    model, text = initialized(spec), tokens(1, 11)
    torch.testing.assert_close(
        model(text, positions=torch.arange(100, 111)), model(text), rtol=1e-3, atol=1e-4
    )


@each_kind
def test_a_module_with_the_rows_of_half_the_heads_gives_its_half_of_the_sum(spec: ModelSpec) -> None:
    model = initialized(spec)
    spec = model.spec
    attention = model.get_submodule("blocks.0.attention")
    x, tables = torch.randn(2, 7, 32), rotation(spec, torch.arange(7))
    full_result = attention(x, *tables)
    rows = {"query", "key", "value"} if spec.mla is None else {"query_up", "kv_up"}
    total = torch.zeros_like(full_result)
    for half in range(2):
        part = Attention(spec, 0) if spec.mla is None else MlaAttention(spec, 0)
        part.load_state_dict(attention.state_dict())
        for name, linear in part.named_children():
            if name in rows:
                linear.weight = torch.nn.Parameter(linear.weight.chunk(2, 0)[half])
            elif name == "output":
                linear.weight = torch.nn.Parameter(linear.weight.chunk(2, 1)[half])
        total += part(x, *tables)
    torch.testing.assert_close(total, full_result, rtol=1e-4, atol=1e-5)


def test_the_core_can_be_replaced() -> None:
    model, text = initialized(LATENT), tokens(1, 5)
    seen: list[tuple[int, ...]] = []

    def core(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        seen.extend(tuple(x.shape) for x in (query, key, value))
        return CausalCore()(query, key, value, documents)

    expected = model(text)
    model.get_submodule("blocks.0.attention").core = core  # type: ignore[assignment]
    assert torch.equal(model(text), expected)
    assert seen == [(1, 4, 5, 14), (1, 4, 5, 14), (1, 4, 5, 10)]


@pytest.mark.parametrize("query_rank", [0, 20])
def test_latent_attention_is_the_papers_equations_head_by_head(query_rank: int) -> None:
    spec = resolve(ModelSpec(**{**vars(LATENT), "mla": MlaSpec(**{**vars(MLA), "query_rank": query_rank})}))
    assert spec.mla is not None
    attention = initialized(spec).get_submodule("blocks.1.attention")
    assert isinstance(attention, MlaAttention)
    x, (cos, sin) = torch.randn(1, 6, 32), rotation(spec, torch.arange(6))
    latent, shared = (x[0] @ attention.kv_down.weight.t()).split((12, 8), dim=1)
    latent = attention.kv_latent_norm(latent)
    source = attention.query_latent_norm(attention.query_down(x[0])) if query_rank else x[0]
    query_rows = (attention.query_up if query_rank else attention.query).weight.view(4, 14, -1)
    heads = []
    for head, rows in enumerate(attention.kv_up.weight.view(4, 16, 12)):
        key = torch.cat((latent @ rows[:6].t(), rotate(shared, cos, sin)), dim=1)
        query = source @ query_rows[head].t()
        query = torch.cat((query[:, :6], rotate(query[:, 6:], cos, sin)), dim=1)
        scores = (query @ key.t() / 14**0.5).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
        heads.append(scores.softmax(1) @ (latent @ rows[6:].t()))
    expected = torch.cat(heads, dim=1) @ attention.output.weight.t()
    torch.testing.assert_close(attention(x, cos, sin)[0], expected, rtol=1e-4, atol=1e-5)


def test_yarns_temperature_sharpens_latent_attention_and_no_other() -> None:
    yarn = RopeScalingSpec(kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert softmax_temperature(yarn) == pytest.approx((0.1 * 3.6888794541139363 + 1) ** 2)
    attention = MlaAttention(resolve(ModelSpec(**{**vars(LATENT), "rope_scaling": yarn})), 0)
    assert isinstance(attention.core, CausalCore)
    assert attention.core.score.scale == pytest.approx(14**-0.5 * softmax_temperature(yarn))
    grouped = Attention(resolve(ModelSpec(**{**vars(GROUPED), "rope_scaling": yarn})), 0)
    assert isinstance(grouped.core, CausalCore)
    assert grouped.core.score.scale is None


def test_a_cache_and_documents_do_not_go_together() -> None:
    model, text = initialized(GROUPED), tokens(1, 5)
    cache = empty_cache(model.spec.layers)
    with pytest.raises(ValueError, match="give either a cache or documents"):
        model(text, documents=Documents.numbered(text), cache=cache)
