"""A few rows through the layers by one kernel have the bits of the model's modules, and a kernel with other bits is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from exact_or_refused import skip_modules
from model.initialized import initialized
from phalanx.hardware.kernels.rows.attention import RowPlace, attended
from phalanx.hardware.kernels.rows.layer import Affinity, LayerWeights
from phalanx.hardware.kernels.rows.product import BF16_CHAINS, row_kernel
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx.serve.engine import few_rows as ways
from phalanx.serve.engine.few_rows import MOST_TURNS, FewRows, few_rows
from phalanx.serve.engine.model_runner import ModelRunner, few_rows_of
from phalanx.serve.kv_cache.layer_cache import Rule, Span
from phalanx.serve.kv_cache.memory import TextKV
from phalanx.serve.numerics.exact import exact_numerics
from phalanx.serve.numerics.layers import ANY_CHAINS, Attended, TriedAttention, attention_chains
from phalanx.serve.numerics.products import fast_products, use_fast_products

DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, init_std=0.3)
KINDS = {
    "grouped": DENSE,
    "norms of heads": replace(DENSE, qk_norm=True),
    "biases": replace(DENSE, attention_bias=True, ffn_bias=True),
    "wide": replace(DENSE, dim=200, ffn_dim=536, heads=2, kv_heads=1, head_dim=72),
}
OTHERS = {
    "latent": replace(DENSE, kv_heads=0, head_dim=0, mla=MlaSpec(0, 32, 16, 8, 16)),
    "mixture": replace(DENSE, moe=MoeSpec(experts=4, per_token=2, ffn_dim=32)),
    "gelu": replace(DENSE, ffn="gelu"),
    "norms after": replace(DENSE, norm_placement="after"),
}

FORMATS = [torch.float32]
if fast_products(Linear(8, 8).to(torch.bfloat16)) is not None:
    # Elsewhere PyTorch has a library for bf16, whose order of additions the kernel does not have.
    FORMATS.append(torch.bfloat16)
# PyTorch's attention in bf16 had other sums before.
ATTENDED = [one for one in FORMATS if one == torch.float32 or torch.__version__ >= "2.13"]

pytestmark = pytest.mark.skipif(
    (kernel := row_kernel()) is None or not kernel.fuses, reason="no C compiler, or no fused multiply-add"
)


def built(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    model: Transformer = initialized(resolve(spec)).to(dtype).requires_grad_(False).eval()
    return model


def exact_way(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> FewRows | None:
    model = built(spec, dtype)
    return few_rows_of(model, Rule(True, 192), exact_numerics(model, model.spec, 192))


def fast_way(dtype: torch.dtype) -> FewRows:
    model = built(DENSE, dtype)
    use_fast_products(model)
    way = few_rows(model, lambda linear: linear.weight.shape[1])
    assert way is not None
    return way


def test_no_more_rotations_are_kept_than_of_some_thousand_positions() -> None:
    # 128k positions of a head of 128 would be half a gigabyte, for numbers that a step computes in no time.
    model = built(DENSE)
    way = few_rows(model, lambda _: 1)
    assert way is not None
    for position in (3, 5000, MOST_TURNS - 1, MOST_TURNS, 131_071):
        full, _ = way._tables([position, 2], 0)
        expected, _ = model.tables(torch.tensor([position, 2]), torch.float32, 0)
        assert all(map(torch.equal, full, expected))
    assert len(way._turns[0][0]) == MOST_TURNS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_few_rows_have_the_bits_of_the_modules_and_attend_by_the_kernel(
    kind: str, dtype: torch.dtype
) -> None:
    way = skip_modules(exact_way(KINDS[kind], dtype))
    if dtype in ATTENDED:
        skip_modules(way.attention)
    else:
        assert way.attention is None


@pytest.mark.parametrize("kind", ["grouped", "norms of heads"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("begins", [(0,), (511, 3, 640), (1100, 20)])
def test_texts_of_any_length_have_the_bits_of_the_modules(
    kind: str, dtype: torch.dtype, begins: tuple[int, ...]
) -> None:
    model = built(KINDS[kind], dtype)
    rule = Rule(True, 704)
    runner = ModelRunner(model, rule, exact_numerics(model, model.spec, 704))
    generator = torch.Generator().manual_seed(len(begins))
    counts = range(1, len(begins) + 1)
    kept = [torch.randn(2, 2, 2, begin, 16, generator=generator).to(dtype) for begin in begins]
    tokens = torch.randint(0, 160, (sum(counts),), generator=generator)

    def states() -> torch.Tensor:
        spans = []
        for begin, count, held in zip(begins, counts, kept, strict=True):
            piece = TextKV(model.spec, dtype)
            piece.grow(begin + count)
            for layer, parts in piece.layers.items():
                for tensor, rows in zip(parts, held[layer], strict=True):
                    tensor[:, :begin] = rows
            spans.append(Span(piece, begin, begin + count))
        return runner.compute(tokens, spans, 0, []).states

    by_the_kernel = states()
    skip_modules(runner.few)
    runner.few = None
    assert torch.equal(states(), by_the_kernel)


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_kind_go_through_their_modules(kind: str) -> None:
    assert few_rows(built(OTHERS[kind]), lambda linear: linear.weight.shape[1]) is None
    assert few_rows(built(DENSE, torch.float64), lambda linear: linear.weight.shape[1]) is None


def test_layers_of_several_formats_go_through_their_modules() -> None:
    model = built(DENSE, torch.bfloat16)
    model.get_submodule("blocks.1.ffn_norm").float()
    assert few_rows(model, lambda linear: linear.weight.shape[1]) is None


@pytest.mark.skipif(torch.bfloat16 not in FORMATS, reason="PyTorch has a library for bf16 here")
def test_fast_numerics_take_few_bf16_rows_in_one_call_a_layer_again_with_the_same_bits() -> None:
    model = built(DENSE, torch.bfloat16)
    runner, tokens = ModelRunner(model, Rule(False, 0), None), torch.arange(5)

    def states() -> torch.Tensor:
        piece = TextKV(model.spec, torch.bfloat16)
        piece.grow(5)
        return runner.compute(tokens, [Span(piece, 0, 5)], 0, []).states

    by_the_kernel = states()
    assert runner.few is not None
    assert torch.equal(states(), by_the_kernel)
    runner.few = None
    torch.testing.assert_close(by_the_kernel, states(), rtol=0.05, atol=0.05)


def test_an_embedding_of_another_format_goes_through_modules_which_refuse_it() -> None:
    model = built(DENSE)
    assert model.embedding is not None
    model.embedding.bfloat16()
    assert few_rows(model, lambda linear: linear.weight.shape[1]) is None


def test_kernels_have_memory_of_fp32_whatever_a_process_makes_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernel is not None
    made, right = [], torch.empty

    def noted(*size: int, **given: object) -> torch.Tensor:
        if 0 not in size:
            made.append(right(*size, **given).dtype)  # type: ignore[call-overload]
        return right(*size, **{**given, "dtype": torch.float32})  # type: ignore[call-overload, no-any-return]

    model, rows = built(DENSE), torch.ones(8, 64, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", noted)
            way = few_rows(model, lambda _: 1)
            assert way is not None
            attention = way.attends(ANY_CHAINS)
            assert attention is not None
            attention.begin([RowPlace(3, 8)])
            kernel(rows, rows, None, BF16_CHAINS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(made) == {torch.float32}


@pytest.mark.parametrize("watched", ["", "blocks.1", "blocks.0.ffn.up"])
def test_layers_that_somebody_watches_go_through_their_modules(watched: str) -> None:
    model = built(DENSE)
    model.get_submodule(watched).register_forward_hook(lambda *_: None)
    assert few_rows(model, lambda linear: linear.weight.shape[1]) is None


@pytest.mark.parametrize("kind", ["window", "sinks"])
def test_windows_and_sinks_are_left_to_pytorchs_attention(kind: str) -> None:
    window = {"attention_pattern": ("window", "full"), "window": 40}
    way = skip_modules(exact_way(replace(DENSE, **(window if kind == "window" else {"sinks": True}))))
    assert way.attention is None


def test_other_bits_between_the_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ways._weights

    def with_another_eps(*given: object) -> LayerWeights | None:
        found = right(*given)  # type: ignore[arg-type]
        return None if found is None else replace(found, eps=found.eps * 1.01)

    monkeypatch.setattr(ways, "_weights", with_another_eps)
    assert exact_way(DENSE) is None


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["grouped", "wide"])
def test_another_order_of_a_norms_sum_is_noticed(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bf16 one of some ten thousand numbers tells. Where the modules compute few rows, there is nothing to notice.
    def summed_otherwise(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        mean = x.double().square().mean(-1, keepdim=True).float()
        return (x.float() * (mean + norm.eps).rsqrt() * norm.weight.float()).to(x.dtype)

    model = built(KINDS[kind], dtype)
    exact = exact_numerics(model, model.spec, 192)
    monkeypatch.setattr(RMSNorm, "forward", summed_otherwise)
    assert few_rows_of(model, Rule(True, 192), exact) is None


@pytest.mark.skipif(torch.bfloat16 not in FORMATS, reason="PyTorch has a library for bf16 here")
def test_another_silu_of_a_single_bf16_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, model = F.silu, built(DENSE, torch.bfloat16)
    exact = exact_numerics(model, model.spec, 192)

    def otherwise(x: torch.Tensor) -> torch.Tensor:
        return right(x).where(x != 61.5, 61.75)

    monkeypatch.setattr(F, "silu", otherwise)
    assert few_rows_of(model, Rule(True, 192), exact) is None


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ways._weights

    def with_another_block(*given: object) -> LayerWeights | None:
        found = right(*given)  # type: ignore[arg-type]
        return found and replace(found, down=Affinity(found.down.matrix, found.down.bias, 8))

    monkeypatch.setattr(ways, "_weights", with_another_block)
    assert exact_way(DENSE) is None


@pytest.mark.parametrize("dtype", ATTENDED, ids=str)
def test_the_chains_of_attention_are_found_and_no_others_hold(dtype: torch.dtype) -> None:
    way = fast_way(dtype)
    found = skip_modules(attention_chains(way, 704))
    assert attention_chains(way, 700) is None, "four keys are left over"
    halves = dtype == torch.bfloat16
    kind = TriedAttention(2, 16, 0.25, dtype)
    case, places = Attended(kind, 704, cancels=halves), (511, 703) if halves else range(0, 704, 5)
    assert case.holds(found, places)
    for wrong in (replace(found, score=8), replace(found, whole=16), replace(found, last=16)):
        assert not case.holds(wrong, places)
    # In bf16 that shows in one of a million results, and is what fp32's chains say.
    assert halves or not case.holds(replace(found, fuses_sum=not found.fuses_sum), places)


@pytest.mark.parametrize("dtype", ATTENDED, ids=str)
def test_the_last_part_of_a_sequence_longer_than_is_tried_has_its_chain(dtype: torch.dtype) -> None:
    sequence = 4096 + 392
    found = skip_modules(attention_chains(fast_way(dtype), sequence))
    assert Attended(TriedAttention(2, 16, 0.25, dtype), sequence).holds(found, (4096, sequence - 1))


@pytest.mark.parametrize("low", [slice(0, 704), slice(0, 512), slice(512, 704)], ids=str)
@pytest.mark.parametrize("dtype", ATTENDED, ids=str)
def test_scores_below_all_numbers_have_pytorchs_attention(low: slice, dtype: torch.dtype) -> None:
    way = fast_way(dtype)
    assert kernel is not None
    chains = skip_modules(attention_chains(way, 704))
    attention = way.attends(chains)
    assert attention is not None
    query, keys = torch.full((4, 704, 16), 3e38, dtype=dtype), torch.zeros(2, 704, 16, dtype=dtype)
    keys[:, low] = -3e38
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = CausalCore(attention.scale)(query[None], keys[None], values[None])[0].transpose(0, 1)
    places = range(0, 704, 7)
    rows = [RowPlace(place, 704) for place in places]
    found = attended(kernel, attention, query[:, places].transpose(0, 1), keys, values, rows)
    assert expected.isfinite().all()
    assert torch.equal(found, expected[places])
