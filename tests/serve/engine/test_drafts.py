"""Drafts by the model's predictions ahead change no token and no log-probability, and good ones spare steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from model.initialized import initialized
from phalanx.model.transformer import PredictionAhead, Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx_serve.engine.drafts import Drafter, DraftInput, DraftState
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.sampler import draw
from phalanx_serve.served.of_run import OpenedEngine, open_engine
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Sampling, ServeError, Token
from serve.engine.test_engine import KINDS, prompt, run
from serve.packed_runs import DENSE, make_run

DEPTHS = 3


def built(kind: str, dtype: torch.dtype = torch.float32, *, of_one_cycle: bool = False) -> Transformer:
    """A model with three predictions ahead; ``of_one_cycle`` is one whose next token, and all those ahead, only depend on the last."""
    model = initialized(resolve(replace(KINDS[kind], init_std=0.3, mtp_depth=DEPTHS)))
    if of_one_cycle:
        say_the_next_number(model)
    return model.to(dtype).eval()


def say_the_next_number(model: Transformer) -> None:
    """Gives the weights by which ``t + 1`` follows ``t`` (modulo 64), and each depth goes on from the token that it is given."""
    assert model.embedding is not None
    assert model.head is not None
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            parameter.zero_()  # blocks leave the vectors as they are
    one_hot = torch.eye(64)
    model.embedding.weight.zero_()
    model.embedding.weight[:64] = one_hot
    model.head.weight.fill_(0.0)
    model.head.weight[:64] = one_hot.roll(1, 0)
    for module in model.mtp:
        assert isinstance(module, PredictionAhead)
        module.projection.weight.zero_()
        module.projection.weight[:, :64] = one_hot


def requests_of(courses: list[tuple[int, float, int]]) -> list[Request]:
    shared = prompt(99, 150)
    return [
        Request(
            f"r{number}",
            shared[:length],
            tokens,
            Sampling(temperature=temperature, seed=number, top_k=40 * (number % 2)),
            frozenset(range(0, 160, 23)) if number % 3 == 2 else frozenset(),
            top_logprobs=2,
            prompt_logprobs=number % 2 == 0,
        )
        for number, (length, temperature, tokens) in enumerate(courses)
    ]


def ids(told: dict[str, list[EngineOutput]]) -> dict[str, list[int]]:
    return {name: [one.id for one in every if isinstance(one, Token)] for name, every in told.items()}


def logprobs(told: dict[str, list[EngineOutput]]) -> list[float]:
    return [one.logprob for every in told.values() for one in every if isinstance(one, Token)]


def texts(told: dict[str, list[EngineOutput]]) -> dict[str, list[EngineOutput]]:
    """What clients see: where a text's tokens lie is told in the same order, and in which step is not."""
    return {
        name: [structs.replace(one, cached_tokens=0) if isinstance(one, Ended) else one for one in every]
        for name, every in told.items()
    }


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["dense", "latent", "mixture", "window"]),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 150), st.sampled_from([0.0, 0.7, 1.3]), st.integers(1, 14)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(1, 60),
    st.integers(3, 12),
    st.integers(1, DEPTHS),
    st.booleans(),
    st.sampled_from(["exact", "exact", "fast"]),
)
def test_no_token_and_no_log_probability_depends_on_drafts(
    kind: str,
    good: bool,
    courses: list[tuple[int, float, int]],
    arrivals: list[int],
    rows: int,
    pages: int,
    drafts: int,
    prefix_cache: bool,
    numerics: Literal["exact", "fast"],
) -> None:
    """With exact numerics to the bit; with fast ones, log-probabilities up to roundings, as whatever else shares a step."""
    model = built(kind, of_one_cycle=good and kind == "dense")
    requests = requests_of(courses)

    def served(drafts: int) -> dict[str, list[EngineOutput]]:
        engine = Engine(
            model,
            model.spec,
            rows=rows,
            pages=pages,
            prefix_cache=prefix_cache,
            drafts=drafts,
            numerics=numerics,
            weights_id="w",
        )
        told = run(engine, requests, arrivals[: len(requests)])
        assert engine.statistics().pages_used == 0
        assert engine.statistics().accepted <= engine.statistics().drafted
        return texts(told)

    found, expected = served(drafts), served(0)
    if numerics == "exact":
        assert found == expected
    else:
        assert ids(found) == ids(expected)
        pairs = zip(logprobs(found), logprobs(expected), strict=True)
        assert all(abs(one - other) < 1e-4 for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_guesses_right_takes_a_step_for_each_row_of_guesses(
    dtype: torch.dtype, temperature: float
) -> None:
    model = built("dense", dtype, of_one_cycle=True)
    asked = [Request(f"r{n}", (n, n + 1, n + 2), 41, Sampling(temperature, seed=n)) for n in range(3)]

    def steps(drafts: int) -> tuple[int, int, list[list[int]]]:
        engine = Engine(model, model.spec, pages=24, numerics="fast", drafts=drafts, weights_id="w")
        for request in asked:
            engine.submit(request)
        count = 0
        ids: dict[str, list[int]] = {request.id: [] for request in asked}
        while engine.busy:
            count += 1
            for one in engine.step():
                if isinstance(one, Token):
                    ids[one.request].append(one.id)
        return count, engine.statistics().accepted, list(ids.values())

    without, none, expected = steps(0)
    with_drafts, accepted, found = steps(DEPTHS)
    assert found == expected
    assert (without, none) == (41, 0)
    if temperature == 0:
        assert expected[1] == [(4 + n) % 64 for n in range(41)]
        # A token by the prompt, then one and three guesses in each step.
        assert (with_drafts, accepted) == (1 + 40 // 4, 3 * 30)


def read_last(
    logits: list[torch.Tensor], place: int, hidden: torch.Tensor, weight: torch.Tensor, _depth: int
) -> torch.Tensor:
    logits.append(hidden[0, place] @ weight.T)
    return torch.zeros(())


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["dense", "latent", "window"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 2**20),
)
@torch.no_grad()
def test_guesses_are_those_of_the_trained_predictions_over_the_whole_text(
    kind: str, pieces: list[int], seed: int
) -> None:
    """However the text was cut, the depths read what training had them read, with guesses where tokens are not known yet."""
    model = built(kind)
    length = sum(pieces) + 1
    text, sampling = list(prompt(seed, length)), Sampling(temperature=0.8, seed=seed)
    states = [model(torch.tensor([text]), lambda hidden, _: hidden)[0]]
    drafter, begin = Drafter(model, DEPTHS), 0
    ahead: DraftState | None = None
    found: tuple[int, ...] = ()
    for number, size in enumerate(pieces):
        known = text if number == len(pieces) - 1 or number % 2 else text[: begin + size + 1]
        progress = DraftInput(known, states[0][begin : begin + size], begin + size, DEPTHS, sampling, ahead)
        ((ahead, found),) = drafter.guess([progress], 0)
        begin += size

    guesses: list[int] = []
    for depth in range(1, DEPTHS + 1):
        whole = torch.tensor([[*text, *guesses]])
        logits: list[torch.Tensor] = []

        model(whole, lambda *_: torch.zeros(()), ahead=partial(read_last, logits, length - 2))
        guesses.append(draw(logits[depth - 1], sampling, length + depth - 1))
    assert list(found) == guesses


def test_a_run_is_the_same_served_weights_with_and_without_drafts(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", replace(DENSE, mtp_depth=1))

    def opened(drafts: int | None) -> OpenedEngine:
        return open_engine(ServedRun(str(run_dir), None, "float32", 64, 1 << 22, 64, "fast", drafts))

    with_drafts, without = opened(None), opened(0)
    assert with_drafts.identity == without.identity
    assert (with_drafts.spec.mtp_depth, without.spec.mtp_depth) == (1, 0)
    with_drafts.engine.submit(Request("r", (1, 2, 3), 12))
    while with_drafts.engine.busy:
        with_drafts.engine.step()
    assert with_drafts.engine.drafts()[0] > 0
    with pytest.raises(ServeError, match="--drafts 2: the run's model predicts 1 tokens ahead"):
        opened(2)


def test_more_drafts_than_the_model_predicts_are_refused() -> None:
    model = built("dense")
    with pytest.raises(ServeError, match="the model predicts 3 ahead"):
        Engine(model, model.spec, pages=4, numerics="fast", drafts=4, weights_id="w")
