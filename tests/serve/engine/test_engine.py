"""The engine's tokens and log-probabilities are the trainer's, to the bit, whatever shares a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec
from phalanx.train.step.loss import log_probabilities
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import (
    Ended,
    EngineOutput,
    GenerationRequestError,
    PromptScored,
    Request,
    Sampling,
    ServeError,
    Token,
)
from phalanx_serve.traffic.scheduler import page_names

pytestmark = pytest.mark.usefixtures("portable_kernels")
SEQUENCE = 192
DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, qk_norm=True)
MLA = MlaSpec(query_rank=0, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16)
KINDS = {
    "dense": DENSE,
    "badly cut widths": replace(DENSE, dim=54, head_dim=18, ffn_dim=77, vocab_size=173, qk_norm=False),
    "latent": replace(DENSE, kv_heads=0, head_dim=0, qk_norm=False, mla=MLA),
    "absorbed": replace(
        DENSE, kv_heads=0, head_dim=0, qk_norm=False, mla=replace(MLA, value_head_dim=20, absorbed=True)
    ),
    "mixture": replace(DENSE, moe=MoeSpec(experts=8, per_token=2, ffn_dim=32)),
    "wide mixture": replace(DENSE, dim=128, moe=MoeSpec(experts=4, per_token=2, ffn_dim=136, shared=1)),
    "window": replace(DENSE, attention_pattern=("window", "full"), window=40),
    "sinks": replace(DENSE, sinks=True, attention_pattern=("window", "full"), window=7),
    "capped scores": replace(DENSE, score_cap=3.0, attention_pattern=("window", "full"), window=40),
    "tied and capped": replace(DENSE, tie_embeddings=True, logit_cap=5.0, attention_bias=True),
    "gated shared experts": replace(
        DENSE, moe=MoeSpec(experts=8, per_token=2, ffn_dim=32, shared=1, shared_gate=True)
    ),
}


def built(kind: str, dtype: torch.dtype = torch.float32) -> Transformer:
    model: Transformer = initialized(resolve(replace(KINDS[kind], init_std=0.3)))
    return model.to(dtype).requires_grad_(False).eval()


def engine(model: Transformer, **options: object) -> Engine:
    given_options = {"pages": 24, "weights_id": "w", **options}
    return Engine(model, model.spec, **given_options)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 160, (length,), generator=generator).tolist())


def asked(number: int, text: Sequence[int], tokens: int = 9) -> Request:
    return Request(
        f"r{number}",
        tuple(text),
        tokens,
        Sampling(seed=number),
        top_logprobs=2,
        prompt_logprobs=number % 2 == 0,
    )


def run(
    served: Engine,
    requests: Sequence[Request],
    arrivals: Sequence[int] = (),
    before: Mapping[int, Callable[[], None]] | None = None,
) -> dict[str, list[EngineOutput]]:
    """All that is told of requests that arrive before the steps of these numbers; ``before`` has what else is done before a step."""
    told: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    waiting = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    turn = 0
    while waiting or served.busy or turn <= max(before or (), default=0):
        while waiting and waiting[0][0] <= turn:
            served.submit(waiting.pop(0)[1])
        if before and turn in before:
            before[turn]()
        for one in served.step():
            told[one.request].append(one)
        turn += 1
        assert turn < 5_000
    return told


def logprobs_of(told: Sequence[EngineOutput]) -> list[float]:
    """The log-probabilities of a text's tokens."""
    return [one.logprob for one in told if isinstance(one, Token)]


@torch.no_grad()
def trained(model: Transformer, text: Sequence[int]) -> torch.Tensor:
    """Log-probabilities by the trainer: the text begins a training sequence, in a micro-batch of two."""
    batch = torch.zeros(2, SEQUENCE, dtype=torch.int64)
    batch[0, : len(text)] = torch.tensor(text)
    found: list[torch.Tensor] = []

    def readout(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found.append(log_probabilities(hidden.flatten(0, 1), weight, model.spec.logit_cap)[1])
        return hidden

    model(batch, readout)
    return found[0]


def differing(model: Transformer, requests: Sequence[Request], told: dict[str, list[EngineOutput]]) -> int:
    """Log-probabilities that are not the trainer's."""
    count = 0
    for request in requests:
        tokens = [one for one in told[request.id] if isinstance(one, Token)]
        assert len(tokens) == request.max_tokens
        assert isinstance(told[request.id][-1], Ended)
        text = [*request.prompt, *(token.id for token in tokens)]
        expected, start = trained(model, text), len(request.prompt)
        for token in tokens:
            row = expected[start + token.index - 1]
            count += token.logprob != float(row[token.id])
            count += any(value != float(row[other]) for other, value in token.top)
        for scored in told[request.id]:
            if isinstance(scored, PromptScored):
                pairs = enumerate(scored.logprobs)
                count += sum(value != float(expected[at, request.prompt[at + 1]]) for at, value in pairs)
                assert len(scored.top) == len(scored.logprobs) * (request.top_logprobs > 0)
                likely = [expected[at].sort(descending=True, stable=True) for at in range(len(scored.top))]
                count += sum(
                    top != tuple(zip(row.indices.tolist(), row.values.tolist(), strict=True))[: len(top)]
                    for top, row in zip(scored.top, likely, strict=True)
                )
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_the_trainers_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    model = built(kind, dtype)
    requests = [asked(number, prompt(number, 7 + 31 * number)) for number in range(5)]
    told = run(engine(model, rows=33), requests, [0, 0, 1, 3, 9])
    assert differing(model, requests, told) == 0


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["dense", "latent", "mixture"]),
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(1, 90),
    st.integers(3, 12),
    st.booleans(),
)
def test_arrivals_pieces_preemption_and_prefixes_change_no_bit(
    kind: str, courses: list[tuple[int, int]], rows: int, pages: int, prefix_cache: bool
) -> None:
    model = built(kind)
    shared = prompt(99, 150)
    requests = [asked(number, shared[:length]) for number, (length, _) in enumerate(courses)]
    served = engine(model, rows=rows, pages=pages, prefix_cache=prefix_cache)
    told = run(served, requests, [arrival for _, arrival in courses])
    assert differing(model, requests, told) == 0
    assert served.statistics().pages_used == 0


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["dense", "latent", "mixture"]),
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 9)), min_size=2, max_size=4),
    st.integers(20, 90),
    st.integers(4, 12),
    st.integers(1, 16),
    st.sampled_from(["recompute", "mixed"]),
)
def test_each_token_names_the_weights_that_made_it_and_has_their_bits(
    kind: str,
    courses: list[tuple[int, int]],
    rows: int,
    pages: int,
    swap_at: int,
    kept: Literal["recompute", "mixed"],
) -> None:
    old = built(kind)
    new = built(kind)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.25)
    shared = prompt(99, 150)
    requests = [asked(number, shared[:length]) for number, (length, _) in enumerate(courses)]
    served = engine(old, rows=rows, pages=pages, weights_id="old")
    told = run(
        served,
        requests,
        [arrival for _, arrival in courses],
        before={swap_at: lambda: served.swap(served.prepare(new), "new", pages=kept)},
    )
    of = {"old": old, "new": new}
    for request in requests:
        tokens = [one for one in told[request.id] if isinstance(one, Token)]
        text = [*request.prompt, *(token.id for token in tokens)]
        expected = {name: trained(model, text) for name, model in of.items()}
        begun = [token.weights for token in tokens]
        assert begun == sorted(begun, key=["old", "old+new", "new"].index)
        assert kept == "mixed" or "old+new" not in begun
        for token in tokens:
            if token.weights in of:
                assert token.logprob == float(
                    expected[token.weights][len(request.prompt) + token.index - 1][token.id]
                )
        for scored in told[request.id]:
            if isinstance(scored, PromptScored):
                row = expected[begun[0]]
                asked_for = [float(row[at, request.prompt[at + 1]]) for at in range(len(request.prompt) - 1)]
                assert list(scored.logprobs) == asked_for
    after = run(served, [asked(9, shared[:140])])["r9"]
    assert {one.weights for one in after if isinstance(one, Token)} == {"new"}
    assert differing(new, [asked(9, shared[:140])], {"r9": after}) == 0


def test_a_text_that_longrope_has_read_anew_names_the_weights_that_did() -> None:
    stretched = RopeScalingSpec(
        kind="longrope",
        factor=4.0,
        original_max_seq_len=12,
        short_factors=(1.0,) * 8,
        long_factors=(2.0,) * 8,
    )
    model = initialized(resolve(replace(DENSE, rope_scaling=stretched))).requires_grad_(False).eval()
    served = engine(model, numerics="fast", weights_id="old")
    told = run(
        served,
        [asked(1, prompt(1, 8))],
        before={2: lambda: served.swap(served.prepare(model), "new", pages="mixed")},
    )
    named = [one.weights for one in told["r1"] if isinstance(one, Token)]
    # The token behind the twelfth is the first whose text has other factors.
    assert named == ["old"] * 2 + ["old+new"] * 3 + ["new"] * 4


def test_weights_of_another_model_are_not_swapped_in() -> None:
    with pytest.raises(ServeError, match="the weights are of another model"):
        engine(built("dense"), numerics="fast").prepare(built("latent"))


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads that a test sets is its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["badly cut widths", "absorbed", "wide mixture"])
def test_the_number_of_threads_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    model = built(kind, dtype)
    requests = [asked(number, prompt(number, 7 + 31 * number)) for number in range(5)]
    told = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        told.append(run(engine(model), requests))
    assert told[1:] == told[:1] * 2


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_with_keys_and_values_of_8_bits_a_request_has_the_bits_that_it_has_alone(
    kind: str, kept: str
) -> None:
    wide = {
        "dense": replace(DENSE, head_dim=32),
        "latent": replace(KINDS["latent"], mla=replace(MLA, rope_head_dim=32)),
    }
    model = initialized(resolve(replace(wide[kind], init_std=0.3))).requires_grad_(False).eval()
    requests = [asked(number, prompt(number % 2, 7 + 31 * number)) for number in range(5)]
    together = run(engine(model, kept=kept, rows=33), requests, [0, 0, 1, 3, 9])
    for request in requests:
        alone = run(engine(model, kept=kept), [request])[request.id]
        assert together[request.id][:-1] == alone[:-1]


def test_decoding_with_fast_numerics_expands_no_latent_of_the_text_and_tells_the_same_numbers() -> None:
    model = built("latent")
    requests = [asked(number, prompt(number, 40 + 31 * number)) for number in range(3)]
    exact = run(engine(model), requests)
    rows: list[int] = []
    for block in model.blocks.values():
        block.attention.kv_up.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _module, given: rows.append(given[0].shape[1])
        )
    served = engine(model, numerics="fast", prefix_cache=False)
    fast: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    for request in requests:
        served.submit(request)
    while served.busy:
        decoding = served.statistics().running == 3
        rows.clear()
        for one in served.step():
            fast[one.request].append(one)
        assert not (decoding and rows), "a decoding step has expanded latents"
    for request in requests:
        pairs = zip(logprobs_of(exact[request.id]), logprobs_of(fast[request.id]), strict=True)
        assert all(abs(one - other) < 1e-4 for one, other in pairs)


def test_a_prefix_that_is_held_is_not_computed_again_and_changes_no_bit() -> None:
    model = built("dense")
    first, second = (
        asked(1, prompt(5, 140)),
        structs.replace(asked(3, prompt(5, 140)), sampling=Sampling(seed=1)),
    )
    served = engine(model)
    before, after = run(served, [first])["r1"], run(served, [second])["r3"]
    assert served.statistics().cached_tokens == 128
    assert isinstance(after[-1], Ended)
    assert after[-1].cached_tokens == 128
    assert [structs.replace(one, request="") for one in before[:-1]] == [
        structs.replace(one, request="") for one in after[:-1]
    ]


def test_a_request_that_goes_on_elsewhere_gets_the_same_tokens() -> None:
    model = built("dense")
    whole = [one for one in run(engine(model), [asked(1, prompt(5, 70))])["r1"] if isinstance(one, Token)]
    moved = structs.replace(asked(1, prompt(5, 70)), generated=tuple(token.id for token in whole[:4]))
    assert [one for one in run(engine(model), [moved])["r1"] if isinstance(one, Token)] == whole[4:]


def test_pages_read_from_one_engine_serve_another() -> None:
    model = built("latent")
    here, there = engine(model), engine(model)
    before = run(here, [asked(1, prompt(5, 140))])["r1"]
    last = here.root
    for name in page_names(prompt(5, 140), here.root):
        assert there.write_page(name, here.read_page(name), last)
        last = name
    assert run(there, [asked(1, prompt(5, 140))])["r1"][:-1] == before[:-1]
    assert there.statistics().cached_tokens == 128
    with pytest.raises(ValueError, match="bytes, and 5 came"):
        there.write_page(b"other", b"short")


def test_a_cancelled_request_frees_its_pages_in_the_next_step() -> None:
    served = engine(built("dense"))
    served.submit(asked(1, prompt(5, 140)))
    served.step()
    assert served.statistics().pages_used > 0
    served.cancel("r1")
    assert any(isinstance(one, Ended) and one.outcome == "cancelled" for one in served.step())
    assert (served.statistics().pages_used, served.busy) == (0, False)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("a", (), 4), "prompt is empty"),
        (Request("a", (160,), 4), "token id 160 is outside the model's vocabulary of 160"),
        (Request("a", (1,) * 1540, 4), "1540 tokens and 4 new ones do not fit into a context of 1536"),
        (Request("a", (1,), 0), "max_tokens = 0"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused(request_: Request, said: str) -> None:
    with pytest.raises(GenerationRequestError, match=said):
        engine(built("dense")).submit(request_)


def test_more_keys_and_values_than_the_machine_s_memory_are_refused() -> None:
    with pytest.raises(ServeError, match="exceed this machine's memory"):
        Engine(built("dense"), resolve(KINDS["dense"]), memory_bytes=1 << 50, weights_id="")


def test_logits_that_are_not_finite_end_their_request_and_no_other() -> None:
    model = built("dense")
    assert model.embedding is not None
    model.embedding.weight[7] = torch.nan
    others = [token for token in prompt(1, 40) if token != 7]
    told = run(
        engine(model), [Request("bad", (3, 7), 4, Sampling(temperature=0)), Request("good", tuple(others), 1)]
    )
    (end,) = told["bad"]
    assert isinstance(end, Ended)
    assert end.outcome == "error"
    assert "'bad' are not finite" in end.text
    assert isinstance(told["good"][0], Token)
