"""Tokens in responses: their own bytes, their places in the text, and those of an echoed prompt."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizers.other_formats import read_model, to_tokenizer_json
from phalanx.data.tokenizers.published import FallbackTokenizer
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from phalanx_serve.http.detokenizer import TextDelta
from phalanx_serve.http.response import ResponseFormat
from phalanx_serve.traffic.events import PromptScored, Token


def with_byte_fallback() -> FallbackTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat"] * 50),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        vocab_size=290,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    serialized, end = to_tokenizer_json(read_model(model.getvalue()), add_bos=True)
    assert end is not None
    return FallbackTokenizer(serialized, end)


TOKENIZERS: list[Tokenizer] = [
    BytesTokenizer(),
    train_bpe(["naïve 日本語 the cat"], vocab_size=270),
    with_byte_fallback(),
]


def format_of(tokenizer: Tokenizer, *, chat: bool) -> ResponseFormat:
    return ResponseFormat("id", 7, "model", "weights", "numerics", "trainer", chat, tokenizer, 1, False)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda one: type(one).__name__)
@given(text=st.text(max_size=20) | st.just("naïve 日本語 😀 x"))
def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    tokens = [Token("", n, token, -1.0, ((token, -1.0),)) for n, token in enumerate(ids)]
    choice = format_of(tokenizer, chat=True).full_choice(0, TextDelta(text, tokens, finish="length"))
    entries = choice["logprobs"]["content"] if tokens else []
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled == (b" " * bool(text) * tokenizer.prefix_bytes) + text.encode()
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda one: type(one).__name__)
@given(prompt=st.text(min_size=1, max_size=10), more=st.text(max_size=10))
def test_an_offset_is_the_place_of_the_character_in_which_a_token_begins(
    tokenizer: Tokenizer, prompt: str, more: str
) -> None:
    response = format_of(tokenizer, chat=False)
    ids = [*tokenizer.document_start, *tokenizer.encode(prompt)]
    new = [] if tokenizer.prefix_bytes else tokenizer.encode(more)
    scored = PromptScored("", (-1.0,) * (len(ids) - 1))
    before = response.prompt_fields(0, prompt, ids, scored, with_logprobs=False)
    after = response.full_choice(0, TextDelta(more, [Token("", n, i) for n, i in enumerate(new)]))
    offsets = before["logprobs"]["text_offset"] + (after["logprobs"] or {"text_offset": []})["text_offset"]
    assert len(offsets) == len(ids) + len(new)
    for place, offset in enumerate(offsets):
        decoded = tokenizer.decode([*ids, *new][:place]).rstrip("\ufffd")
        assert offset == len(decoded) or "\ufffd" in prompt + more


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    tokens = [Token("", n, byte, -1.0, ((byte, -1.0), (0xFF, -2.0))) for n, byte in enumerate("é".encode())]
    for chat in (False, True):
        choice: dict[str, Any] = format_of(BytesTokenizer(), chat=chat).full_choice(0, TextDelta("é", tokens))
        logprobs = choice["logprobs"]
        words = [entry["token"] for entry in logprobs["content"]] if chat else logprobs["tokens"]
        assert words == ["bytes:\\xc3", "bytes:\\xa9"]


def test_an_echoed_token_has_the_likeliest_tokens_of_its_place() -> None:
    scored = PromptScored("", (-1.0, -2.0), (((98, -1.0),), ((100, -0.5),)))
    fields = format_of(BytesTokenizer(), chat=False).prompt_fields(
        0, "abc", list(b"abc"), scored, with_logprobs=False
    )
    assert fields["logprobs"]["top_logprobs"] == [None, {"b": -1.0}, {"d": -0.5}]
    assert fields["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
