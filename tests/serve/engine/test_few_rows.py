"""With fast numerics one call a layer takes few rows through the models that the kernel knows, and their modules take all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.initialized import initialized
from phalanx.hardware.kernels.rows.product import row_kernel
from phalanx.model.layers.linear import Linear
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx.serve.engine.engine import Engine
from phalanx.serve.engine.fast_products import fast_products, use_fast_products
from phalanx.serve.engine.few_rows import few_rows
from phalanx.serve.engine.model_runner import ModelRunner
from phalanx.serve.kv_cache.layer_cache import Rule, Span
from phalanx.serve.kv_cache.memory import TextKV
from phalanx.traffic.requests import PromptScored, Request, Sampling
from serve.engine.test_engine import prompt, run, trained

DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, init_std=0.3)
KINDS = {
    "grouped": DENSE,
    "norms of heads": replace(DENSE, qk_norm=True),
    "biases": replace(DENSE, attention_bias=True, ffn_bias=True),
    "wide": replace(DENSE, dim=200, ffn_dim=536, heads=2, kv_heads=1, head_dim=72),
    "window": replace(DENSE, attention_pattern=("window", "full"), window=40),
    "sinks": replace(DENSE, sinks=True),
}
OTHERS = {
    "latent": replace(DENSE, kv_heads=0, head_dim=0, mla=MlaSpec(0, 32, 16, 8, 16)),
    "mixture": replace(DENSE, moe=MoeSpec(experts=4, per_token=2, ffn_dim=32)),
    "gelu": replace(DENSE, ffn="gelu"),
    "norms after": replace(DENSE, norm_placement="after"),
}
pytestmark = pytest.mark.skipif(
    (kernel := row_kernel()) is None or not kernel.fuses, reason="no C compiler, or no fused multiply-add"
)


def built(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    return initialized(resolve(spec)).to(dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_have_the_numbers_of_the_modules(kind: str) -> None:
    model = built(KINDS[kind])
    assert few_rows(model) is not None
    engine = Engine(model, model.spec, numerics="fast", rows=20, pages=4, weights_id="w")
    text = prompt(1, 90)
    request = Request("r", text, 1, Sampling(temperature=0), prompt_logprobs=True)
    (scored,) = [output for output in run(engine, [request])["r"] if isinstance(output, PromptScored)]
    rows = trained(model, text)[: len(text) - 1]
    expected = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=0, atol=2e-4)


@pytest.mark.skipif(
    kernel is None or fast_products(Linear(8, 8).to(torch.bfloat16)) is None,
    reason="PyTorch has a library for bf16 here",
)
def test_few_bf16_rows_are_near_those_of_many() -> None:
    model = built(DENSE, torch.bfloat16)
    runner, tokens = ModelRunner(model, Rule(exact=False)), torch.arange(50) % 160

    def states(count: int) -> torch.Tensor:
        kv = TextKV(model.spec, torch.bfloat16)
        kv.grow(count)
        return runner.compute(tokens[:count], [Span(kv, 0, count)], 0, []).states

    few = states(5)
    assert torch.equal(states(5), few)
    torch.testing.assert_close(few, states(50)[:5], rtol=0.05, atol=0.05)


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
        expected = (x.float() @ linear.weight.float().t() + linear.bias.float()).bfloat16()
        torch.testing.assert_close(linear(x), expected)
        assert linear.to("meta")(torch.empty(3, 80, dtype=torch.bfloat16, device="meta")).shape == (3, 40)
    assert use_fast_products(Linear(80, 40)) is None
