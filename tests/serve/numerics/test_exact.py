"""Exact numerics rely on nothing that was not tried: what fails is refused by its name, and the id tells what was tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.initialized import initialized
from phalanx.hardware.portable import operations
from phalanx.model.layers.attention.absorbed import LatentExpansion, latents_as_keys
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.feed_forward import gated
from phalanx.model.layers.linear import Linear
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.rules.portable import ENVIRONMENT
from phalanx.run.spec import MlaSpec, ModelSpec
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.kv_cache.layer_cache import TOGETHER, LayerKVCache, Rule, Span
from phalanx.serve.kv_cache.memory import TextKV
from phalanx.serve.numerics import attention, exact, facts, head_products, widths
from phalanx.serve.numerics.attention import dependent_attention
from phalanx.serve.numerics.exact import exact_numerics
from phalanx.serve.numerics.facts import Facts, facts_path, machine, recalled
from phalanx.serve.numerics.head_products import HeadShape
from phalanx.serve.numerics.identity import numerics_id
from phalanx.serve.numerics.products import Shape
from phalanx.serve.numerics.widths import width_facts
from phalanx.serve.weights.budget import Computing, head_probe_bytes

DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160)
KINDS = {
    "grouped": DENSE,
    "latent": replace(DENSE, kv_heads=0, head_dim=0, mla=MlaSpec(0, 32, 16, 8, 16)),
    "absorbed": replace(DENSE, kv_heads=0, head_dim=0, mla=MlaSpec(0, 32, 16, 8, 16, absorbed=True)),
    "window": replace(DENSE, attention_pattern=("window", "full"), window=40),
    "sinks": replace(DENSE, sinks=True),
}


def built(kind: str = "grouped", dtype: torch.dtype = torch.float32) -> Transformer:
    model: Transformer = initialized(resolve(KINDS[kind])).to(dtype).requires_grad_(False).eval()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence", [0, 192])
def test_the_engines_attention_holds_or_is_refused(kind: str, dtype: torch.dtype, sequence: int) -> None:
    model = built(kind, dtype)
    problems = list(dependent_attention(model, sequence))
    exact_numerics(model, model.spec, sequence)
    assert problems == [], "and nothing is refused"


def test_as_many_heads_are_tried_together_as_a_share_of_a_layer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[int] = set()
    mix = LayerKVCache.mix

    def noted(self: LayerKVCache, *given: Tensor) -> Tensor:
        _, query, *_ = given
        tried.add(query.shape[1])
        # What a kernel takes apart by heads needs no more of them, which would take as much memory as a model's step.
        assert (query.shape[1] - 1) * query.shape[2] < TOGETHER
        return mix(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerKVCache, "mix", noted)
    model = built("absorbed")
    for block in model.blocks.values():
        attended = block.attention
        assert isinstance(attended, MlaAttention)
        attended.kv_up.weight = torch.nn.Parameter(attended.kv_up.weight.chunk(2)[0], requires_grad=False)
    attention._first_difference.cache_clear()
    problems = list(dependent_attention(model, 640))
    attention._first_difference.cache_clear()
    if problems:
        pytest.skip(f"the first difference ends the probe: {problems}")
    assert max(tried) == 2


def test_a_step_keeps_no_mask_of_every_head() -> None:
    # Of all its texts, they would take more than their latents.
    model, masks = built("absorbed"), dict[tuple[int, ...], Tensor]()
    piece = TextKV(model.spec, torch.float32)
    piece.grow(64)
    rows = LayerKVCache(0, [Span(piece, 40, 43)], Rule(True, 64), masks)
    latent, shared = torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 8)
    mixed = rows.mix(CausalCore(1.0), torch.zeros(1, 4, 3, 40), latent, shared, None, latents_as_keys)
    assert mixed.shape == (1, 4, 3, 40)
    assert sum(mask.numel() for mask in masks.values()) == 3 * 64


def test_fast_numerics_make_no_mask_of_every_head_for_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    attended = LatentExpansion.absorbed

    def noted(self: LatentExpansion, *given: Tensor) -> Tensor:
        sizes.append(len(given[3]))
        return attended(self, *given)

    monkeypatch.setattr(LatentExpansion, "absorbed", noted)
    mla = MlaSpec(kv_rank=512, nope_head_dim=64, rope_head_dim=8, value_head_dim=64)
    form = LatentExpansion(Linear(512, 16 * 128, bias=False).requires_grad_(False), mla, 1.0)
    model = resolve(replace(DENSE, heads=16, kv_heads=0, head_dim=0, mla=mla))
    piece = TextKV(model, torch.float32)
    piece.grow(512)
    for begin in (464, 511):
        rows = LayerKVCache(0, [Span(piece, begin, 512)], Rule(False, 0), {})
        count = 512 - begin
        rows.mix(
            CausalCore(1.0),
            torch.zeros(1, 16, count, 72),
            torch.zeros(1, 1, count, 512),
            torch.zeros(1, 1, count, 8),
            None,
            form,
        )
    assert sizes == [48, 16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_trying_the_products_of_heads_takes_is_reckoned_with(dtype: str) -> None:
    spec = built("absorbed").spec
    assert spec.mla is not None
    tried = list(head_products._products(HeadShape.of(spec.heads, spec.mla, getattr(torch, dtype)), 1024))
    at_once = [tensor.nbytes for rows, matrices in tried for tensor in (rows, matrices, rows @ matrices)]
    assert sum(at_once) < head_probe_bytes(spec, dtype) < 4 * sum(at_once)
    assert head_probe_bytes(built("latent").spec, dtype) == 0


def test_a_pass_with_fast_numerics_has_room_for_either_form() -> None:
    expanded, absorbed = (built(kind).spec for kind in ("latent", "absorbed"))
    exact, fast = (Computing(32, 4, 512, any_form) for any_form in (False, True))
    most = exact.nbytes(absorbed, "float32")
    assert exact.nbytes(expanded, "float32") < most
    assert fast.nbytes(expanded, "float32") == fast.nbytes(absorbed, "float32") == most


@pytest.mark.parametrize("kind", ["grouped", "latent", "absorbed"])
def test_attention_without_its_paddings_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention._first_difference.cache_clear()
    monkeypatch.setattr(attention, "Rule", lambda exact, sequence: Rule(False, sequence))  # noqa: ARG005
    found = list(dependent_attention(built(kind), 600))
    attention._first_difference.cache_clear()
    assert any(
        "attention of layer 0 in torch.float32 over sequences of 600 (queries" in problem for problem in found
    )


def test_what_holds_is_tried_in_a_few_places_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = built()
    exact_numerics(model, model.spec, 96)
    monkeypatch.setattr(facts, "facts_path", lambda: tmp_path / "facts.json")

    def found() -> tuple[list[str], dict[str, Facts | None]]:
        for kept in (attention._first_difference, widths._norm, widths._activation, widths._softmax):
            kept.cache_clear()
        return list(dependent_attention(model, 96)), dict(width_facts(model.spec, torch.float32))

    before = found()
    with monkeypatch.context() as patched:
        patched.setattr(attention, "_tried", lambda _: pytest.fail("attention was searched again"))
        patched.setattr(widths, "_search", lambda *_: pytest.fail("a width was searched again"))
        assert found() == before == ([], before[1])
        # What is kept does not hide what no longer holds.
        mix = LayerKVCache.mix
        patched.setattr(LayerKVCache, "mix", lambda *given: mix(*given) + (given[2].shape[2] == 1))
        with pytest.raises(pytest.fail.Exception, match="attention was searched again"):
            found()
    attention._first_difference.cache_clear()


def test_attention_that_depends_on_its_place_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    attention._first_difference.cache_clear()
    mix = LayerKVCache.mix

    def wrong(self: LayerKVCache, *given: Tensor) -> Tensor:
        mixed = mix(self, *given)  # type: ignore[arg-type]
        return mixed + (mixed.shape[2] == 1)

    monkeypatch.setattr(LayerKVCache, "mix", wrong)
    # Nothing else is refused before, on any processor.
    monkeypatch.setattr(exact, "product_facts", lambda _: Facts(1, 1))
    monkeypatch.setattr(exact, "width_facts", lambda *_: [])
    with pytest.raises(EngineError, match=r"attention of layer 0 .*queries 0 to 0.*--numerics fast"):
        exact_numerics(built(), built().spec, 96)
    attention._first_difference.cache_clear()


def test_a_product_or_a_width_without_any_number_of_rows_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built()
    with monkeypatch.context() as patched:
        patched.setattr(exact, "product_facts", lambda shape: None if shape.outputs == 32 else Facts(1, 1))
        with pytest.raises(
            EngineError, match=r"attention.key.weight: .*64 inputs and 32 outputs.*--numerics fast"
        ):
            exact_numerics(model, model.spec, 96)
    monkeypatch.setattr(exact, "product_facts", lambda _: Facts(1, 1))
    monkeypatch.setattr(exact, "width_facts", lambda *_: [("the activation of width 9", None)])
    with pytest.raises(EngineError, match="the activation of width 9: on this machine"):
        exact_numerics(model, model.spec, 96)


def test_a_product_that_is_never_computed_keeps_no_model_from_being_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The matrix that would expand latents, which heads multiply with one by one.
    model = built("absorbed")
    tried: list[int] = []

    def noted(shape: Shape) -> Facts:
        tried.append(shape.inputs)
        return Facts(1, 1)

    monkeypatch.setattr(exact, "product_facts", noted)
    exact_numerics(model, model.spec, 96)
    assert model.spec.mla is not None
    assert model.spec.mla.kv_rank not in tried


def test_a_width_that_leaves_elements_over_keeps_its_bits_in_the_numbers_of_rows_that_are_found() -> None:
    # ``silu`` and one sigmoid for each row: PyTorch may compute what is behind whole vectors by other code.
    spec = resolve(replace(DENSE, ffn_dim=33))
    x = torch.randn(700, 33, generator=torch.Generator().manual_seed(3)).mul_(4)
    gate = torch.randn(1, 33, generator=torch.Generator().manual_seed(4))

    def activated(rows: Tensor) -> Tensor:
        return gated(spec, rows, rows.flip(1))

    def gates(rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, gate).sigmoid()

    for rule, compute in (
        (widths._activation(spec, 33, torch.float32), activated),
        (widths._shared_gate(33, torch.float32), gates),
    ):
        for number in (1, 5, 13, 37, 61, 119, 203) if rule is not None else ():
            rows = x[: number + rule.padding(number)]
            assert torch.equal(compute(rows)[:number], compute(x)[:number]), number


def test_the_id_tells_what_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = numerics_id("exact", torch.float32, 512)
    assert numerics_id("exact", torch.float32, 512) == one
    others = {
        numerics_id("fast", torch.float32, 512),
        numerics_id("exact", torch.bfloat16, 512),
        numerics_id("exact", torch.float32, 256),
        numerics_id("exact", torch.float32, 512, tensor=2),
    }
    monkeypatch.setenv("OMP_PLACES", "cores")
    others.add(numerics_id("exact", torch.float32, 512))
    assert len(others) == 5
    assert one not in others


def test_the_id_and_the_facts_of_portable_kernels_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():  # they may be set for other reasons
        monkeypatch.setenv(name, value)
    native = numerics_id("exact", torch.float32, 512), facts_path()
    monkeypatch.setattr(operations, "_registered", [object()])
    portable = numerics_id("exact", torch.float32, 512), facts_path()
    assert portable[0] != native[0]
    assert portable[1] != native[1]


def test_facts_are_those_of_the_kernel_of_few_rows_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it no block is found, and with another one the block says nothing.
    one, name = facts_path(), numerics_id("exact", torch.float32, 512)
    monkeypatch.setattr(facts, "row_kernel", lambda: None)
    assert facts_path() != one
    assert numerics_id("exact", torch.float32, 512) == name


def test_without_a_home_for_a_cache_facts_are_found_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    found = Facts(4, 4)
    assert recalled("a product", lambda: found, lambda _: True) == found


def test_how_threads_wait_is_no_part_of_how_a_server_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert machine() == before
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert machine() != before
