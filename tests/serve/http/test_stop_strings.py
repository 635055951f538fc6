"""Stop strings over the borders of pieces and tokens: what a search in the whole text finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx_serve.http.detokenizer import IncrementalDetokenizer, StopStrings

# Two letters and an emoji, so that strings begin within each other and characters span bytes.
texts = st.text(alphabet="ab\U0001f600", max_size=30)
stops = st.lists(st.text(alphabet="ab\U0001f600", min_size=1, max_size=5), max_size=4)


def searched(text: str, strings: list[str]) -> tuple[str, bool]:
    places = [text.find(stop) for stop in strings if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def passed(pieces: list[str], strings: list[str]) -> tuple[str, bool]:
    stop, out = StopStrings(strings), ""
    for piece in pieces:
        out += stop.feed(piece)[0]
    out += stop.flush()
    return out, stop.stopped


@given(st.lists(texts, max_size=12), stops)
@settings(max_examples=500)
def test_any_pieces_give_what_a_search_in_the_whole_text_gives(pieces: list[str], strings: list[str]) -> None:
    assert passed(pieces, strings) == searched("".join(pieces), strings)


@given(texts, stops)
def test_what_was_told_is_never_part_of_a_stop_string(text: str, strings: list[str]) -> None:
    stop, told, whole = StopStrings(strings), "", searched(text, strings)[0]
    for character in text:
        told += stop.feed(character)[0]
        assert whole.startswith(told)


@given(texts, stops)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, strings: list[str]) -> None:
    stop, told = StopStrings(strings), ""
    for end, character in enumerate(text, 1):
        certain, stopped = stop.feed(character)
        told += certain
        held = text[len(told) : end]
        assert stopped or not held or any(other.startswith(held) for other in strings)


def test_a_stop_string_that_is_found_ends_the_text_at_once() -> None:
    stop = StopStrings(["\n\n", "END"])
    assert [stop.feed(piece) for piece in ("one\n", "two E", "ND three", "four")] == [
        ("one", False),
        ("\ntwo ", False),
        ("", True),
        ("", True),
    ]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@given(texts, stops)
def test_tokens_that_end_within_characters_give_the_same(text: str, strings: list[str]) -> None:
    tokenizer = BytesTokenizer()
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.feed(token) for token in tokenizer.encode(text)]
    assert passed([*pieces, stream.flush()], strings) == searched(text, strings)
