"""The text stream: whatever the tokens, the text is that of decoding them at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from phalanx_serve.http.detokenizer import IncrementalDetokenizer

BYTES = BytesTokenizer()
BPE = train_bpe(["the naïve 日本語 👩‍🚀 日本 日本 é é é 🚀🚀🚀 " * 3], vocab_size=320)
KINDS = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
EMOJI = list("👩‍🚀".encode())


KNOWN: dict[str, dict[int, str]] = {"bytes": {}, "bpe": {}}
"""What earlier streams of a tokenizer have learned."""


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    streams = [
        IncrementalDetokenizer(tokenizer),
        IncrementalDetokenizer(tokenizer, token_texts=KNOWN[tokenizer.kind]),
    ]
    alone, among_others = ([*(stream.feed(token) for token in ids), stream.flush()] for stream in streams)
    assert alone == among_others
    return alone


@KINDS
@given(text=st.text())
def test_text_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@KINDS
@given(data=st.data())
def test_any_ids_give_the_text_that_decoding_them_at_once_gives(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


# Bytes that lead, continue, overlong and surrogate forms: where decoders differ if they do.
@given(
    st.lists(
        st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xA9, 0xE0, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0xF4, 0xFF, 256])
    )
)
@example([0xF0, 0x9F, 256, 0x98, 0x80])
@example([0xEF, 0xBF, 0xBD, 0xEF, 0xBF, 0xBD])
def test_ill_formed_bytes_give_the_text_that_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


def test_a_character_appears_with_its_last_byte_and_not_before() -> None:
    assert pieces(BYTES, EMOJI) == ["", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", ""]


def test_ascii_appears_at_once() -> None:
    assert pieces(BYTES, list(b"abc")) == ["a", "b", "c", ""]


def test_a_character_that_is_never_finished_is_replaced_at_the_end() -> None:
    assert pieces(BYTES, EMOJI[:3]) == ["", "", "", "\ufffd"]


def test_nonsense_is_not_held_back_for_ever() -> None:
    shown = pieces(BYTES, [0x80] * 100)[:-1]
    assert "".join(shown) == "\ufffd" * 99


def test_special_tokens_give_no_text() -> None:
    assert pieces(BYTES, [97, BYTES.end_of_document, 98]) == ["a", "", "b", ""]


def test_a_flushed_stream_begins_anew() -> None:
    stream = IncrementalDetokenizer(BYTES)
    stream.feed(EMOJI[0])
    assert stream.flush() == "\ufffd"
    assert stream.feed(97) == "a"


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 257 is outside the vocabulary of 257"):
        IncrementalDetokenizer(BYTES).feed(257)
