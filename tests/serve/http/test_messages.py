"""Requests read from JSON and stop strings: for any input."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.http.protocol import (
    Chat,
    Completion,
    RefusedError,
    prompts_of,
    read_body,
    stops_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*Completion.__struct_fields__, *Chat.__struct_fields__, "tools", "best_of", "suffix"})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from([Completion, Chat]))
def test_any_object_is_read_or_refused(fields: dict[str, Any], kind: type[Any]) -> None:
    refused: RefusedError | None = None
    try:
        asked = read_body(kind, json.dumps(fields).encode())
        stops_of(asked)
        if isinstance(asked, Completion):
            prompts_of(asked)
    except RefusedError as error:
        refused = error
    assert refused is None or (400 <= refused.status < 500 and str(refused))


@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(RefusedError):
        read_body(Completion, body)


@pytest.mark.parametrize(
    "name",
    ["tools", "logit_bias", "presence_penalty", "best_of", "suffix", "response_format", "audio", "n", "stop"],
)
def test_null_asks_for_nothing_and_is_taken(name: str) -> None:
    read_body(Completion, msgspec.json.encode({"model": "m", "prompt": "a", name: None}))


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model": "m", "messages": [], "seed": 1, "seed": 2}', "seed"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
    ],
)
def test_a_key_that_stands_there_twice_is_refused_by_its_name(body: bytes, key: str) -> None:
    with pytest.raises(RefusedError, match=f"key '{key}' is there twice") as refused:
        read_body(Chat, body)
    assert (refused.value.status, refused.value.param) == (400, key)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"prompt": "a\\ud800"', "prompt"),
        ('"prompt": "a", "stop": ["b", "\\udfff"]', "stop"),
        ('"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]', "messages"),
        ('"\\ud800": 1', "\ufffd"),
    ],
)
def test_half_of_a_pair_of_surrogates_is_refused_by_its_field(fields: str, param: str) -> None:
    body = f'{{"model": "m", {fields}}}'.encode()
    with pytest.raises(RefusedError, match="half of a pair of surrogates") as refused:
        read_body(Completion, body)
    assert (refused.value.status, refused.value.param) == (400, param)
