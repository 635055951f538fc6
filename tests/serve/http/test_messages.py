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
