"""Texts that the rules keep, change and drop."""

from __future__ import annotations

import random

import pytest

from phalanx.data.steps.step import (
    C4,
    Characters,
    Document,
    Dropped,
    GopherQuality,
    GopherRepetition,
    Length,
    Mask,
    Step,
    through_steps,
)

PROSE = " ".join(
    f"The {a} that we have seen in the {b} is of a kind with the {c}, and nobody has found it to be any other."
    for a, b, c in (("river", "north", "lake"), ("stone", "garden", "wall"), ("letter", "drawer", "book"))
)


def after(step: Step, text: str) -> str:
    """The text after the step, or the reason why it was dropped."""
    result = step(Document("name", text))
    return f"dropped: {result.reason}" if isinstance(result, Dropped) else result.text


@pytest.mark.parametrize("step", [Length(), Characters(), GopherQuality(), Mask()])
def test_plain_prose_passes_unchanged(step: Step) -> None:
    assert after(step, PROSE) == PROSE


def test_documents_are_kept_by_characters_and_words_at_both_ends() -> None:
    step = Length(min_characters=5, max_characters=20, min_words=2, max_words=4)
    assert after(step, "a bc") == "dropped: too short"
    assert after(step, "abcde") == "dropped: too short"
    assert after(step, "ab cd") == "ab cd"
    assert after(step, "a b c d e") == "dropped: too long"
    assert after(step, "abcdefghij abcdefghij") == "dropped: too long"


def test_documents_of_other_characters_are_dropped() -> None:
    step = Characters(allowed="[a-z]", least_share=0.75)
    assert after(step, "abc1") == "abc1"
    assert after(step, "ab12") == "dropped: characters"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("too few words", "number of words"),
        ("a b " * 40, "mean length of words"),
        (PROSE.replace(" ", "# "), "symbols"),
        ("\n".join(f"- another sentence {line} about something else" for line in "abcdefghij"), "bullets"),
        ("\n".join(f"{word} " + PROSE[:40] + " ..." for word in "abcdefgh"), "ellipses"),
        (" ".join(["12345"] * 60), "words without letters"),
        (" ".join(["wherever"] * 60), "stop words"),
    ],
)
def test_what_is_no_prose_is_dropped_for_its_reason(text: str, reason: str) -> None:
    assert after(GopherQuality(), text) == f"dropped: gopher: {reason}"


def test_repetition_is_found_in_lines_paragraphs_and_ngrams() -> None:
    draw = random.Random(0)
    words = [f"w{number}" for number in range(5_000)]
    varied = " ".join(draw.choices(words, k=400))
    step = GopherRepetition()
    assert after(step, varied) == varied
    assert after(step, "one line\n" * 10) == "dropped: gopher: repeated lines"
    assert after(step, "\n\n".join([varied, varied])) == "dropped: gopher: repeated lines"
    assert after(step, varied[:600] + " buy now" * 30) == "dropped: gopher: frequent 2-gram"
    ten = " ".join(words[1000:1012])
    between = [" ".join(draw.choices(words, k=25)) for _ in range(8)]
    assert after(step, f" {ten} ".join(between)) == "dropped: gopher: repeated 5-grams"


def test_c4_keeps_the_lines_that_are_sentences() -> None:
    lines = [f"This is sentence number {number}." for number in range(6)]
    assert after(
        C4(), "\n".join(["Menu", *lines, "Enable javascript to see this page.", "More..."])
    ) == "\n".join(lines)
    assert after(C4(), lines[0]) == "dropped: c4: sentences"
    assert after(C4(), "\n".join(lines) + "{") == "dropped: c4: braces"
    assert after(C4(), "\n".join(lines) + " Lorem ipsum dolor.") == "dropped: c4: lorem ipsum"


def test_addresses_of_people_and_of_machines_are_masked_and_versions_are_not() -> None:
    text = "Write to jane.doe+x@mail.example.co.uk from 8.8.8.8 or 10.0.0.1, release 1.2.3.4.5 of 999.1.1.1"
    masked = "Write to email@example.com from 192.0.2.1 or 10.0.0.1, release 1.2.3.4.5 of 999.1.1.1"
    assert after(Mask(), text) == masked
    assert after(Mask(email="", ip=""), text) == text


def test_steps_follow_each_other_until_one_drops() -> None:
    document = Document("name", "mail me@example.org")
    assert through_steps(document, [Mask(), Length(max_characters=25)]).text == "mail email@example.com"  # type: ignore[union-attr]
    assert through_steps(document, [Mask(), Length(max_characters=20), C4()]) == Dropped("too long")
