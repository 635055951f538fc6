"""Events of a stream: the short way of writing them gives what the long way gives."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx_serve.http.detokenizer import TextDelta
from phalanx_serve.http.response import ResponseFormat, sse_event


@given(
    texts=st.lists(st.text(), max_size=4),
    model=st.text(),
    chat=st.booleans(),
    index=st.integers(0, 127),
    more=st.sampled_from([{}, {"usage": None}]),
)
def test_an_event_that_tells_text_alone_has_the_fields_of_any_other(
    texts: list[str], model: str, chat: bool, index: int, more: dict[str, None]
) -> None:
    response_format = ResponseFormat(
        "cmpl-1-2", 7, model, "weights", "numerics", "trainer", chat, BytesTokenizer(), -1, False
    )
    for text in texts:
        whole = sse_event(
            response_format.envelope([response_format.chunk(index, TextDelta(text), first=False)], chunk=True)
            | more
        )
        short = response_format.text_event(index, text, more)
        assert short.startswith(b"data: ")
        assert short.endswith(b"\n\n")
        assert short.count(b"\n") == 2
        sent = json.loads(short[6:])
        expected = json.loads(whole[6:])
        if chat:
            expected["choices"][0]["delta"].setdefault("content", "")
        assert sent == expected
