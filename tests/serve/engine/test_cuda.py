"""The engine on a GPU. Runs where there is one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from model.initialized import initialized
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.engine import Engine
from phalanx_serve.kv_cache.memory import RowSpan, TextKV
from phalanx_serve.numerics import computing_on
from phalanx_serve.traffic.events import (
    DeviceMemoryError,
    EngineOutput,
    PromptScored,
    Request,
    Sampling,
    ServeError,
    Token,
)
from phalanx_serve.traffic.scheduler import page_names
from serve.engine.test_engine import KINDS, prompt, run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
OPTIONS = (
    Sampling(temperature=0),
    Sampling(seed=3),
    Sampling(seed=5, top_k=20, top_p=0.9),
    Sampling(temperature=0),
)


def built(kind: str, depths: int = 0) -> Transformer:
    spec = replace(KINDS[kind], init_std=0.3, mtp_depth=depths)
    return initialized(resolve(spec)).requires_grad_(False).eval()


def engine(model: Transformer, **options: object) -> Engine:
    given = {"numerics": "fast", "pages": 40, "rows": 64, "weights_id": "w", **options}
    return Engine(model, model.spec, **given)  # type: ignore[arg-type]


def texts(count: int = 6) -> list[Request]:
    return [
        Request(
            f"r{i}", prompt(i, 50 + 20 * i), 12, OPTIONS[i % 4], top_logprobs=2, prompt_logprobs=i % 2 == 0
        )
        for i in range(count)
    ]


def tokens(told: list[EngineOutput]) -> list[Token]:
    return [one for one in told if isinstance(one, Token)]


def require_alike(found: list[EngineOutput], expected: list[EngineOutput], tolerance: float) -> None:
    """The same tokens with log-probabilities within ``tolerance`` nats, up to a first choice between two that are as near to each other."""
    scored = [[one for one in told if isinstance(one, PromptScored)] for told in (found, expected)]
    for mine, theirs in zip(*scored, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)
    for one, other in zip(tokens(found), tokens(expected), strict=True):
        if one.id != other.id:
            top = dict(other.top)
            assert one.id in top, "another token that was not among the likeliest"
            assert abs(top[one.id] - other.logprob) < 2 * tolerance
            return
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_text_that_the_cpu_gives(kind: str) -> None:
    model = built(kind)
    asked = [structs.replace(one, sampling=OPTIONS[0]) for one in texts()]
    expected = run(engine(model), asked)
    found = run(engine(copy.deepcopy(model).to(GPU)), asked)
    for request in asked:
        require_alike(found[request.id], expected[request.id], 2e-3)


def test_a_token_is_drawn_by_the_same_numbers_on_a_gpu() -> None:
    from phalanx_serve.engine.sampler import draw_rows

    scores = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 3
    options = [replace(OPTIONS[row % 4], seed=row) for row in range(64)]
    assert draw_rows(scores.to(GPU), options, range(64)) == draw_rows(scores, options, range(64))


def test_texts_that_give_their_pages_up_go_on_as_if_they_had_not() -> None:
    model = built("dense").to(GPU)
    few = engine(model, pages=7)
    found, expected = run(few, texts()), run(engine(model), texts())
    assert few.statistics().preempted > 0
    for request in texts():
        require_alike(found[request.id], expected[request.id], 2e-3)


def test_drafts_change_no_text_on_a_gpu() -> None:
    model = built("dense", depths=2).to(GPU)
    found, expected = run(engine(model, drafts=2), texts()), run(engine(model), texts())
    for request in texts():
        require_alike(found[request.id], expected[request.id], 2e-3)


@pytest.mark.parametrize("kept", ["compute", "int8", "fp8"])
def test_pages_go_to_another_engine_by_way_of_the_host(kept: str) -> None:
    model = initialized(resolve(replace(KINDS["dense"], head_dim=32))).requires_grad_(False).eval().to(GPU)
    first, second = engine(model, kept=kept), engine(model, kept=kept)
    asked = [Request("r", prompt(1, 200), 5, OPTIONS[0])]
    expected = run(first, asked)["r"]
    names, before = page_names(asked[0].prompt, first.root), b""
    for name in names[:3]:
        assert second.write_page(name, first.read_page(name), before)
        assert second.read_page(name) == first.read_page(name)
        before = name
    found = run(second, asked)["r"]
    assert second.statistics().cached_tokens >= 128
    require_alike(found, expected, 2e-3)


def test_an_engine_that_has_answered_holds_no_more_memory_than_before() -> None:
    served = engine(built("dense").to(GPU))
    run(served, texts())
    torch.cuda.synchronize(GPU)
    before = torch.cuda.memory_allocated(GPU)
    for _ in range(3):
        run(served, texts())
    torch.cuda.synchronize(GPU)
    assert torch.cuda.memory_allocated(GPU) == before


def test_what_does_not_fit_is_refused_with_what_would_help() -> None:
    no_memory = pytest.raises(
        DeviceMemoryError, match=r"cuda:0 has no memory for a whole terabyte .*--memory"
    )
    with no_memory, computing_on(GPU, "a whole terabyte"):
        torch.empty(1 << 40, dtype=torch.uint8, device=GPU)
    with pytest.raises(ServeError, match=r"--numerics fast"):
        engine(built("dense").to(GPU), numerics="exact")


def test_the_id_of_numerics_names_the_gpu() -> None:
    model = built("dense")
    assert engine(model).numerics_id != engine(copy.deepcopy(model).to(GPU)).numerics_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("sinks", "cap"), [(False, 0.0), (True, 30.0)])
def test_attention_of_all_texts_agrees_with_pytorch_s(
    dtype: torch.dtype, width: int, sinks: bool, cap: float
) -> None:
    pytest.importorskip("triton")
    from phalanx_serve.kv_cache.decode_attention import differences

    spec = ModelSpec(
        layers=1, dim=512, heads=8, kv_heads=2, head_dim=width, vocab_size=64, sinks=sinks, score_cap=cap
    )
    assert differences(resolve(spec), dtype, GPU) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_bits_alone_that_it_has_among_others(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from phalanx_serve.kv_cache.decode_attention import DecodeAttention

    spec = resolve(ModelSpec(layers=1, dim=512, heads=8, kv_heads=2, head_dim=128, vocab_size=64))
    generator = torch.Generator(GPU).manual_seed(0)
    spans = []
    for length in (1, 70, 600, 3000):
        kv = TextKV(spec, dtype, device=GPU)
        kv.grow(length)
        for tensor in kv.layers[0]:
            tensor.normal_(generator=generator)
        spans.append(RowSpan(kv, length - 1, length))
    query = torch.randn(1, 8, len(spans), 128, generator=generator, device=GPU).to(dtype)
    together = DecodeAttention(spans).attend(0, CausalCore(), query, None)
    for row, span in enumerate(spans):
        alone = DecodeAttention([span]).attend(0, CausalCore(), query[:, :, row : row + 1], None)
        assert torch.equal(alone, together[:, :, row : row + 1])
