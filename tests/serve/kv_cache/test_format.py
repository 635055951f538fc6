"""Keys and values of eight bits: what is kept is what is read, its error is bounded, and only those who ask for it get it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.kv_cache.memory import KVFormatName, PageMemory, TextKV, kv_format
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.traffic.scheduler import PAGE, page_names
from serve.engine.test_engine import DENSE, asked, built, engine, logprobs_of, prompt, run

WIDE = replace(DENSE, heads=2, kv_heads=1, head_dim=32)
LATENT = replace(
    DENSE,
    kv_heads=0,
    head_dim=0,
    qk_norm=False,
    mla=MlaSpec(query_rank=0, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
)
MODELS: dict[str, Transformer] = {
    name: initialized(resolve(replace(spec, init_std=0.3))).requires_grad_(False).eval()
    for name, spec in (("grouped", WIDE), ("latent", LATENT))
}
Narrow = Literal["int8", "fp8"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(-30, 30),
    st.integers(0, 2**20),
)
def test_what_is_rounded_once_is_kept_exactly(
    form: Narrow, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    kept = kv_format(form, resolve(replace(WIDE, head_dim=64)), dtype)
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(2, 7, 64, generator=generator) ** 3 * 2.0**exponent).to(dtype)
    once = kept.rounded(0, rows)
    assert torch.equal(kept.unpacked(0, kept.packed(0, once)), once)
    largest = rows.float().view(2, 7, 2, 32).abs().amax(-1, keepdim=True)
    error = (once.float() - rows.float()).view(2, 7, 2, 32).abs()
    # Half a step of whole numbers whose largest is between 64 and 127; fp8 has three bits behind the leading one.
    assert bool((error <= largest * (1 / 127 if form == "int8" else 1 / 16) * 1.01).all())


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_does_not_become_one_that_is(form: Narrow, broken: float) -> None:
    kept = kv_format(form, resolve(replace(WIDE, head_dim=64)), torch.float32)
    rows = torch.ones(2, 3, 64)
    rows[1, 2, 5] = broken
    found = kept.rounded(1, rows)
    assert not found[1, 2, :32].isfinite().any()
    found[1, 2, :32] = 1
    assert torch.equal(found, torch.ones(2, 3, 64))


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("kind", MODELS)
def test_held_and_foreign_pages_read_as_if_they_were_computed_here(kind: str, form: Narrow) -> None:
    model = MODELS[kind]

    def narrow() -> Engine:
        return engine(model, numerics="fast", kept=form)

    requests = [asked(1, prompt(5, 140))]
    here, there = narrow(), narrow()
    own = logprobs_of(run(here, requests)["r1"])
    held = logprobs_of(run(here, requests)["r1"])
    last = here.root
    for name in page_names(prompt(5, 140), here.root):
        page = here.read_page(name)
        assert len(page) == here.page_bytes
        assert there.write_page(name, page, last)
        last = name
    pulled = logprobs_of(run(there, requests)["r1"])
    assert there.statistics().cached_tokens == 128
    assert held == pytest.approx(own, abs=1e-4)
    assert pulled == pytest.approx(own, abs=1e-4)
    whole = engine(model, numerics="fast")
    assert logprobs_of(run(whole, requests)["r1"]) != pytest.approx(own, abs=1e-6)
    assert here.page_bytes < whole.page_bytes / (3 if kind == "grouped" else 2)
    assert here.numerics_id.startswith(f"fast-{form}-")
    assert here.root != whole.root


@pytest.mark.parametrize("form", ["compute", "int8", "fp8"])
@pytest.mark.parametrize("kind", MODELS)
def test_pages_copied_in_together_are_those_copied_one_by_one(kind: str, form: KVFormatName) -> None:
    spec = MODELS[kind].spec
    kept = kv_format(form, spec, torch.float32)
    memory = PageMemory(spec.layers, 6, kept)
    written, together, one_by_one = (TextKV(spec, torch.float32) for _ in range(3))
    for kv in (written, together, one_by_one):
        kv.grow(3 * PAGE)
    generator = torch.Generator().manual_seed(0)
    for tensors in written.layers.values():
        for tensor in tensors:
            tensor.normal_(generator=generator)
    places = [4, 0, 3]
    for number, place in enumerate(places):
        memory.copy_out(written, number, place)
        memory.copy_in(one_by_one, number, place)
    memory.copy_in_together(together, places)
    for layer, tensors in together.layers.items():
        assert all(map(torch.equal, tensors, one_by_one.layers[layer]))
        assert all(tensor.any() for tensor in tensors)


def test_narrow_keys_and_values_are_refused_where_widths_have_no_blocks() -> None:
    with pytest.raises(ServeError, match="head_dim = 16 is no multiple of that"):
        engine(built("dense"), numerics="fast", kept="fp8")
