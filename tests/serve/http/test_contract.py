"""What clients of OpenAI's interface rely on, by OpenAI's own client; the first half holds for a server of any make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from parity.llama3_folder import byte_level_bpe
from phalanx_serve.generate import continued

PROMPT = "the cat sat on"
VOCAB = byte_level_bpe().get_vocab_size()
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
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=1, n=3, best_of=3).choices
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


def test_echoed_tokens_have_alternatives_as_lm_evaluation_harness_reads_them(
    client: OpenAI, model: str
) -> None:
    # The request of its local-completions: ids of context and continuation, one token that it drops.
    answer = client.completions.create(
        model=model,
        prompt=[5, 6, 7, 8, 9],  # type: ignore[arg-type]
        max_tokens=1,
        temperature=0,
        logprobs=1,
        echo=True,
        seed=1234,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    assert all(own <= max(top.values()) for own, top in pairs)
    assert len(logprobs.top_logprobs) == 6


def test_an_echo_without_new_tokens_scores_the_prompt_alone(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": [PROMPT, "a dog"], "logprobs": 2, "echo": True}
    alone = client.completions.create(**asked, max_tokens=0)
    with_one = client.completions.create(**asked, max_tokens=1, seed=1)
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    for choice, other, text in zip(alone.choices, with_one.choices, (PROMPT, "a dog"), strict=True):
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert choice.logprobs is not None
        assert other.logprobs is not None
        assert choice.logprobs.token_logprobs == other.logprobs.token_logprobs[:-1]  # type: ignore[index]
        assert choice.logprobs.top_logprobs == other.logprobs.top_logprobs[:-1]  # type: ignore[index]
    streamed = list(client.completions.create(**asked, max_tokens=0, stream=True))
    assert "".join(c.text for chunk in streamed for c in chunk.choices if c.index == 0) == PROMPT
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=0)
    assert error.value.param == "max_tokens"


def test_ids_of_texts_and_conversations_are_told_and_turned_back(base_url: str, model: str) -> None:
    root = base_url.removesuffix("/v1")

    def post(path: str, **fields: object) -> dict[str, Any]:
        answer = httpx.post(f"{root}/{path}", json={"model": model, **fields}, timeout=100)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    whole = post("tokenize", prompt=PROMPT)
    bare = post("tokenize", prompt=PROMPT, add_special_tokens=False)
    assert whole["tokens"][1:] == bare["tokens"]
    assert (whole["count"], whole["max_model_len"]) == (len(whole["tokens"]), 128)
    assert post("detokenize", tokens=whole["tokens"])["prompt"] == PROMPT
    chat = post("tokenize", messages=MESSAGES)
    client = OpenAI(base_url=base_url, api_key="none")
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].prompt_token_ids == chat["tokens"]  # type: ignore[attr-defined]


def test_an_answer_that_was_begun_is_continued(client: OpenAI, model: str) -> None:
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "and the"}]
    answer = client.chat.completions.create(
        model=model,
        messages=begun,
        max_tokens=2,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    ended = client.chat.completions.create(
        model=model, messages=begun, max_tokens=2, extra_body={"return_token_ids": True}
    )
    ids, whole = (one.choices[0].prompt_token_ids for one in (answer, ended))  # type: ignore[attr-defined]
    assert whole[: len(ids)] == ids
    assert len(whole) > len(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"skip_special_tokens": True, "stop_token_ids": [], "min_tokens": 0, "add_special_tokens": False},
        {"include_stop_str_in_output": False, "spaces_between_special_tokens": True, "length_penalty": 1.0},
    ],
)
def test_fields_that_change_no_text_are_taken(client: OpenAI, model: str, fields: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert answer.choices[0].finish_reason


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages"),
    ],
)
def test_what_a_chat_asks_for_in_vain_is_refused_by_name(
    client: OpenAI, model: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert error.value.param == param


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(client: OpenAI, model: str) -> None:
    # The model embeds five more: at this temperature all are about as likely.
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=100,
        temperature=100,
        seed=1,
        logprobs=20,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice: Any = answer.choices[0]
    assert max(choice.token_ids) < VOCAB
    assert not any(word.startswith("<2") for top in choice.logprobs.top_logprobs for word in top)
