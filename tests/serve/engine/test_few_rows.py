"""One call a layer takes few rows through the models that the kernel knows, and their modules take all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.initialized import initialized
from phalanx.model.layers.dense import Linear
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.model_runner import ModelRunner, few_rows, use_fast_products
from phalanx_serve.kv_cache.layer_cache import Rule
from phalanx_serve.kv_cache.memory import RowSpan, TextKV
from phalanx_serve.traffic.events import PromptScored, Request, Sampling
from serve.engine.test_engine import prompt, run, trained

DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, init_std=0.3)
KINDS = {
    "grouped": DENSE,
    "norms of heads": replace(DENSE, qk_norm=True),
    "biases": replace(DENSE, attention_bias=True, ffn_bias=True),
    "wide": replace(DENSE, dim=300, ffn_dim=536, heads=2, kv_heads=1, head_dim=72),
    "partly rotated": replace(DENSE, rope_fraction=0.5),
    "window": replace(DENSE, attention_pattern=("window", "full"), window=40),
    "sinks": replace(DENSE, sinks=True),
}
OTHERS = {
    "latent": replace(DENSE, kv_heads=0, head_dim=0, mla=MlaSpec(0, 32, 16, 8, 16)),
    "mixture": replace(DENSE, moe=MoeSpec(experts=4, per_token=2, ffn_dim=32)),
    "gelu": replace(DENSE, ffn="gelu"),
    "norms after": replace(DENSE, norm_placement="after"),
}
pytestmark = pytest.mark.usefixtures("portable_kernels")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def built(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    return initialized(resolve(spec)).to(dtype).requires_grad_(False).eval()


def states(model: Transformer, texts: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """The states of all tokens of ``texts``, of which steps take ``rows`` tokens each."""
    runner = ModelRunner(model, Rule(exact=True))
    caches = [TextKV(model.spec, model.projection().dtype) for _ in texts]
    collected: list[list[torch.Tensor]] = [[] for _ in texts]
    for begin in range(0, max(map(len, texts)), rows):
        here = [i for i, text in enumerate(texts) if begin < len(text)]
        spans = []
        for i in here:
            end = min(begin + rows, len(texts[i]))
            caches[i].grow(end)
            spans.append(RowSpan(caches[i], begin, end))
        tokens = torch.cat([texts[i][span.begin : span.end] for i, span in zip(here, spans, strict=True)])
        parts = runner.compute(tokens, spans, 0, []).states.split([span.end - span.begin for span in spans])
        for i, part in zip(here, parts, strict=True):
            collected[i].append(part)
    return [torch.cat(parts) for parts in collected]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_have_the_bits_of_the_modules(kind: str, dtype: str, threads: int) -> None:
    few, modules = built(KINDS[kind], DTYPES[dtype]), built(KINDS[kind], DTYPES[dtype])
    assert few_rows(few) is not None
    modules.register_forward_hook(lambda *_: None)  # which has all rows go through the modules
    texts = [torch.tensor(prompt(seed, length)) for seed, length in enumerate((90, 41, 3))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = states(modules, texts, 90)
        for rows in (1, 2, 5, 16):
            assert all(map(torch.equal, states(few, texts, rows), expected))
    finally:
        torch.set_num_threads(before)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 80),
    st.booleans(),
    st.integers(1, 48),
)
def test_layers_of_any_width_have_the_bits_of_the_modules(
    kv_heads: int, group: int, half_width: int, inner: int, is_bf16: bool, rows: int
) -> None:
    spec = replace(
        DENSE,
        dim=5 * kv_heads,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2 * half_width,
        ffn_dim=inner,
    )
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    few, modules = built(spec, dtype), built(spec, dtype)
    modules.register_forward_hook(lambda *_: None)
    text = [torch.tensor(prompt(rows, 49))]
    assert torch.equal(states(few, text, rows)[0], states(modules, text, 49)[0])


def test_fast_numerics_take_the_same_way() -> None:
    model = built(DENSE)
    engine = Engine(model, model.spec, numerics="fast", rows=20, pages=4, weights_id="w")
    text = prompt(1, 90)
    request = Request("r", text, 1, Sampling(temperature=0), prompt_logprobs=True)
    (scored,) = [output for output in run(engine, [request])["r"] if isinstance(output, PromptScored)]
    rows = trained(model, text)[: len(text) - 1]
    expected = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_another_kind_go_through_their_modules(kind: str) -> None:
    assert few_rows(built(OTHERS[kind])) is None
    assert few_rows(built(DENSE, torch.float64)) is None


def test_layers_of_several_formats_go_through_their_modules() -> None:
    model = built(DENSE)
    model.get_submodule("blocks.1.ffn_norm").bfloat16()
    assert few_rows(model) is None


def test_an_embedding_of_another_format_goes_through_modules_which_refuse_it() -> None:
    model = built(DENSE)
    assert model.embedding is not None
    model.embedding.bfloat16()
    assert few_rows(model) is None


@pytest.mark.parametrize("watched", ["", "blocks.1", "blocks.0.ffn.up"])
def test_layers_that_somebody_watches_go_through_their_modules(watched: str) -> None:
    model = built(DENSE)
    model.get_submodule(watched).register_forward_hook(lambda *_: None)
    assert few_rows(model) is None


def test_bf16_is_multiplied_by_the_kernel_where_pytorch_has_no_library_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = Linear(80, 40).to(torch.bfloat16).requires_grad_(False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    products = use_fast_products(linear)
    assert products is not None
    assert linear.affine is products
    x = torch.randn(70, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = (x.float() @ linear.weight.float().t()).bfloat16() + linear.bias
        torch.testing.assert_close(linear(x), expected)
        assert linear.to("meta")(torch.empty(3, 80, dtype=torch.bfloat16, device="meta")).shape == (3, 40)
    assert use_fast_products(Linear(80, 40)) is None
