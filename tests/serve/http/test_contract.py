"""What clients of OpenAI's interface rely on, by OpenAI's own client; the first half holds for a server of any make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from phalanx.serve.sample import continued

PROMPT = "the cat sat on"
MESSAGES: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the cat"}]


def test_a_completion_has_text_usage_and_a_reason(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=7, seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_chat_has_an_answer(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=5, seed=1, tools=[], n=1
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 5


def test_the_same_seed_gives_the_same_text(client: OpenAI, model: str) -> None:
    def ask() -> str:
        return client.completions.create(model=model, prompt=PROMPT, max_tokens=12, seed=5).choices[0].text

    assert ask() == ask()


@pytest.mark.parametrize("stop", [None, "e", ["at", "zz"]])
def test_a_stream_of_a_completion_is_the_whole_answer_in_pieces(
    client: OpenAI, model: str, stop: str | list[str] | None
) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "prompt": [PROMPT, "a dog"],
        "n": 2,
        "max_tokens": 20,
        "seed": 3,
        "stop": stop,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    texts, reasons, usage = [""] * 4, [""] * 4, None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert stop is None or all(one not in text for one in stop for text in texts if len(one) > 1)
    assert usage == whole.usage


def test_a_stream_of_a_chat_is_the_whole_answer_in_pieces(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 9,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    text, logprobs, reason = "", [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        logprobs += choice.logprobs.content if choice.logprobs else []
        reason = choice.finish_reason or reason
    assert (text, reason) == (whole.message.content, whole.finish_reason)
    assert whole.logprobs is not None
    assert logprobs == whole.logprobs.content


def test_each_event_tells_the_usage_so_far_on_request_as_guidellm_counts_tokens(
    client: OpenAI, model: str
) -> None:
    chunks = list(
        client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 8


def test_logprobs_fall_and_hold_the_token_that_was_likeliest(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own == pytest.approx(max(top.values()))
        assert own <= 0


def test_text_offsets_of_an_echoed_prompt_point_at_its_tokens(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="the cat", max_tokens=3, seed=1, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith("the cat")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "no-such-model"}, 404),
        ({"max_tokens": 100000}, 400),
        ({"temperature": -1}, 400),
        ({"prompt": [10**9]}, 400),
    ],
)
def test_a_wrong_request_has_openais_error(
    client: OpenAI, model: str, changes: dict[str, Any], status: int
) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(**({"model": model, "prompt": PROMPT} | changes))
    assert error.value.status_code == status
    assert error.value.body["message"]  # type: ignore[index]


# From here on: what is ours.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 2),
        ("presence_penalty", 0.5),
        ("logit_bias", {"1": 2}),
        ("no_such_field", None),
    ],
)
def test_a_field_that_is_not_done_is_refused_by_name(
    client: OpenAI, model: str, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt=PROMPT, extra_body={field: value})
    assert error.value.param == field


def test_a_text_is_that_of_phalanx_generate(client: OpenAI, model: str, chat_run: Path) -> None:
    expected = "".join(continued(chat_run, PROMPT, tokens=20, temperature=0.7, top_k=20, top_p=0.9, seed=11))
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=20,
        temperature=0.7,
        top_p=0.9,
        seed=11,
        extra_body={"top_k": 20},
    )
    assert answer.choices[0].text == expected


def test_choices_are_those_of_separate_requests(client: OpenAI, model: str) -> None:
    def ask(n: int, first: int) -> list[str]:
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=10, seed=2, n=n, extra_body={"choice": first}
        )
        return [choice.text for choice in answer.choices]

    together = ask(3, 0)
    assert together == [text for choice in range(3) for text in ask(1, choice)]
    assert len(set(together)) == 3


def test_the_id_tells_the_seed_that_repeats_a_request_without_one(client: OpenAI, model: str) -> None:
    first = client.completions.create(model=model, prompt=PROMPT, max_tokens=8)
    seed = int(first.id.split("-")[1], 16)
    again = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, seed=seed)
    assert (again.id, again.choices[0].text) == (first.id, first.choices[0].text)


def test_ids_and_prompt_logprobs_are_told_on_request(client: OpenAI, model: str) -> None:
    asked = client.completions.create(
        model=model,
        prompt=[5, 6, 7],  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True, "prompt_logprobs": True, "ignore_eos": True},
    )
    choice: Any = asked.choices[0]
    assert choice.prompt_token_ids == [5, 6, 7]
    assert len(choice.token_ids) == 4
    assert choice.prompt_logprobs[0] is None
    assert len(choice.prompt_logprobs) == 3
