"""Words where there are spaces between them, and where there are none."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.dedup import band_rows, signature, similar_pairs
from phalanx.data.errors import PreparationError
from phalanx.data.formats.document import Document
from phalanx.data.steps.choose import Decontaminate, digest_of_file
from phalanx.data.steps.step import (
    C4,
    Dropped,
    GopherQuality,
    GopherRepetition,
    Length,
    is_spaceless,
    words_of,
)

SCRIPTS = {
    "Chinese": (0x4E00, 0x9FA0),
    "Japanese": (0x3041, 0x3094),
    "Thai": (0x0E01, 0x0E2E),
    "Lao": (0x0E94, 0x0EA0),
    "Khmer": (0x1780, 0x17A3),
    "Burmese": (0x1000, 0x102A),
}
SPACED = st.text(st.characters(max_codepoint=0x2FF) | st.sampled_from(" \n.,한글дрά"))


def letters(script: str, count: int, seed: int) -> str:
    """Random text of a script, without a space."""
    first, end = SCRIPTS[script]
    draw = random.Random(seed)
    return "".join(chr(draw.randrange(first, end)) for _ in range(count))


@given(SPACED, st.integers(1, 15))
def test_text_with_spaces_has_the_words_and_ngrams_that_its_spaces_make(text: str, n: int) -> None:
    words, there = words_of(text), text.split()
    assert not is_spaceless(text)
    assert (list(words.units), words.count) == (there, len(there))
    assert list(words.ngrams(n)) == [tuple(there[i : i + n]) for i in range(len(there) - n + 1)]
    assert list(words_of(text, re.compile(r"\w+")).units) == re.findall(r"\w+", text)


@given(st.text(st.sampled_from("中文かなไทย ខab.")), st.integers(1, 6))
def test_every_ngram_has_so_many_words_and_no_shorter_one_has(text: str, n: int) -> None:
    words = words_of(text)
    assert "".join(words.units) == "".join(text.split())
    ends = words.ends or range(len(words.units) + 1)
    for start, stop in words.spans(n):
        assert ends[stop] - ends[start] >= n
        assert stop == start or ends[stop - 1] - ends[start] < n


@pytest.mark.parametrize("script", SCRIPTS)
def test_near_duplicates_without_spaces_are_found_and_others_are_not(script: str) -> None:
    text = letters(script, 400, 1)
    changed = text[:100] + letters(script, 2, 2) + text[102:300] + letters(script, 1, 3) + text[301:]
    other = letters(script, 400, 4)
    rows = [
        band_rows(signature(variant, 112, 5), place, 14, 8)
        for place, variant in enumerate((text, changed, other))
    ]
    entries = np.concatenate(rows)
    pairs = similar_pairs(entries, entries["ordinal"].astype(np.uint64), 112, 0.65)
    assert pairs.tolist() == [[0, 1]]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_passage_of_an_evaluation_is_found_in_text_without_spaces_and_a_short_phrase_is_not(
    script: str, tmp_path: Path
) -> None:
    passage = letters(script, 200, 5)
    file = tmp_path / "evaluation.txt"
    file.write_text(f"{passage[:100]}，{passage[100:]}。")
    step = Decontaminate((str(file),), sha256=(digest_of_file(file),))
    before, after = letters(script, 60, 6), letters(script, 60, 7)
    assert isinstance(step(Document("a", before + passage[20:180] + after)), Dropped)
    assert not isinstance(step(Document("b", before + passage[20:32] + after)), Dropped)


def test_an_evaluation_without_a_text_of_enough_words_is_refused_with_the_field(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.txt"
    file.write_text("What is the capital of France?")
    against, digests = (str(file),), (digest_of_file(file),)
    document = Document("a", "What is the capital of France? Paris.")
    with pytest.raises(PreparationError, match=r"no text has 13 words.*lower step\.ngram"):
        Decontaminate(against, sha256=digests)(document)
    assert isinstance(Decontaminate(against, ngram=5, sha256=digests)(document), Dropped)


def test_rules_count_the_words_of_text_without_spaces() -> None:
    sentences = "".join(letters("Chinese", 30, seed) + "。\n" for seed in range(20))
    for step in (Length(min_words=200, max_words=400), GopherQuality(stop_words=0), GopherRepetition(), C4()):
        document = step(Document("a", sentences))
        assert not isinstance(document, Dropped), document
    again = sentences.replace("\n", "") * 2
    assert isinstance(GopherRepetition()(Document("a", again)), Dropped)
    assert isinstance(GopherQuality(stop_words=0)(Document("a", letters("Chinese", 60, 1))), Dropped)
