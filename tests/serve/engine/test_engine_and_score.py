"""What the engine tells of tokens is what a score of the finished text says, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.initialized import initialized
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, PrecisionSpec, RunSpec, TrainSpec
from phalanx.train.score import Scorer
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import EngineOutput, PromptScored, Request, Sampling, Token

SEQUENCE = 128
DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, qk_norm=True)
KINDS = {
    "dense": DENSE,
    "badly cut widths": replace(
        DENSE, dim=54, head_dim=18, ffn_dim=77, qk_norm=False, attention_pattern=("window", "full"), window=40
    ),
    "latent mixture": replace(
        DENSE,
        kv_heads=0,
        head_dim=0,
        qk_norm=False,
        mla=MlaSpec(query_rank=0, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
        moe=MoeSpec(experts=8, per_token=2, ffn_dim=32, shared=1),
    ),
    "absorbed latent": replace(
        DENSE,
        kv_heads=0,
        head_dim=0,
        qk_norm=False,
        mla=MlaSpec(query_rank=24, kv_rank=32, nope_head_dim=16, rope_head_dim=8, absorbed=True),
    ),
}


def told_by(served: Engine, requests: list[Request], arrivals: list[int]) -> dict[str, list[EngineOutput]]:
    """All that is told of the requests, each submitted before the step of its arrival."""
    told: dict[str, list[EngineOutput]] = {request.id: [] for request in requests}
    waiting = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    turn = 0
    while waiting or served.busy:
        while waiting and waiting[0][0] <= turn:
            served.submit(waiting.pop(0)[1])
        for one in served.step():
            told[one.request].append(one)
        turn += 1
        assert turn < 5_000
    return told


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(1, 90),
    st.integers(4, 16),
    st.integers(0, 2**31),
)
def test_tokens_are_told_with_the_bits_of_their_score(
    kind: str,
    dtype: torch.dtype,
    courses: list[tuple[int, int]],
    rows: int,
    pages: int,
    seed: int,
) -> None:
    spec = RunSpec(
        model=resolve(replace(KINDS[kind], init_std=0.3)),
        train=TrainSpec(seq_len=SEQUENCE, batch_size=8, slots=2),
        precision=PrecisionSpec(compute="bf16" if dtype == torch.bfloat16 else "fp32"),
    )
    model = initialized(spec.model).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    requests = [
        Request(
            f"r{number}",
            tuple(torch.randint(0, 160, (length,), generator=generator).tolist()),
            9,
            Sampling(seed=seed + number),
            top_logprobs=0,
            prompt_logprobs=number % 2 == 0,
        )
        for number, (length, _) in enumerate(courses)
    ]
    served = Engine(model, spec.model, rows=rows, pages=pages, weights_id="w")
    told = told_by(served, requests, [arrival for _, arrival in courses])

    tokens = {name: [one for one in every if isinstance(one, Token)] for name, every in told.items()}
    texts = [[*request.prompt, *(token.id for token in tokens[request.id])] for request in requests]
    for request, scores in zip(requests, Scorer(spec, model).score(texts), strict=True):
        start = len(request.prompt) - 1
        assert [token.logprob for token in tokens[request.id]] == scores[start:].tolist()
        for one in told[request.id]:
            if isinstance(one, PromptScored):
                assert list(one.logprobs) == scores[:start].tolist()
