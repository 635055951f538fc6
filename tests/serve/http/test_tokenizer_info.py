"""The tokenizer over HTTP, as lm-evaluation-harness calls it (``tokenizer_backend=remote``): its description, ids and texts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from parity.llama3_folder import CHAT_TEMPLATE, save_tokenizer
from phalanx.data.chat.template import read_chat_template
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, tokenizer_from_file
from phalanx_serve.http.app import Gateway, application
from phalanx_serve.prompt import ModelText
from serve.http.ports import Immediate


@pytest.fixture
def served(tmp_path: Path) -> ModelText:
    """A tokenizer that puts a token before each text, with a chat template."""
    save_tokenizer(tmp_path)
    tokenizer = tokenizer_from_file(tmp_path)
    return ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size, read_chat_template(tmp_path))


def calls(text: ModelText, *requests: tuple[str, dict[str, Any] | None]) -> list[Any]:
    """The answers to requests for paths, with a body or without one."""

    async def in_order() -> list[Any]:
        transport = httpx.ASGITransport(application(Gateway(text, Immediate())))
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://run", headers=headers) as client:
            answers = [
                await (client.get(path) if body is None else client.post(path, json=body))
                for path, body in requests
            ]
            return [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(in_order())


def test_the_tokenizer_is_described_in_vllms_form(served: ModelText) -> None:
    assert calls(served, ("/tokenizer_info", None)) == [
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": None,
            "chat_template": CHAT_TEMPLATE,
        }
    ]


def test_the_name_of_an_end_or_begin_token_has_its_id(served: ModelText) -> None:
    (info,) = calls(served, ("/tokenizer_info", None))
    names = [info["bos_token"], info["eos_token"]]
    ids = calls(served, *(("/tokenize", {"prompt": name, "add_special_tokens": False}) for name in names))
    tokenizer = served.tokenizer
    assert [answer["tokens"] for answer in ids] == [
        [*tokenizer.document_start],
        [tokenizer.end_of_document],
    ]


def test_the_name_of_a_special_token_within_a_text_is_text(served: ModelText) -> None:
    text = "the cat<|eot_id|>"
    ((answer),) = calls(served, ("/tokenize", {"prompt": text, "add_special_tokens": False}))
    assert answer["tokens"] == served.tokenizer.encode(text)
    assert calls(served, ("/detokenize", {"tokens": answer["tokens"]})) == [{"prompt": text}]


def test_a_tokenizer_of_bytes_has_an_end_and_no_beginning() -> None:
    tokenizer: Tokenizer = BytesTokenizer()
    text = ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size)
    (info,) = calls(text, ("/tokenizer_info", None))
    assert (info["bos_token"], info["chat_template"]) == (None, None)
    ask = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert calls(text, ("/tokenize", ask))[0]["tokens"] == [tokenizer.end_of_document]
