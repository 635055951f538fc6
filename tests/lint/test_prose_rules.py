"""The language rules for pages, each on a few lines of Markdown."""

from __future__ import annotations

import pytest

from lint.prose_rules import check_page, sentences

LONG = " ".join(["Long", *["word"] * 35]) + "."


def rules(text: str) -> dict[str, int]:
    """The line of each finding by its rule."""
    return {finding.rule: finding.line for finding in check_page("page.md", text)[0]}


def lengths(text: str) -> list[int]:
    """The number of words of each sentence."""
    return [len(sentence.split()) for _, sentence in sentences(text)]


def test_a_sentence_of_more_than_35_words_is_an_offense_on_its_line() -> None:
    short = "One is short.\n"
    assert rules(f"# Title\n\n{short}{LONG}\n")["long-sentence"] == 4
    assert "long-sentence" not in rules(f"{short}{LONG.replace('word ', '', 1)}")


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG}\n```",
        f"    {LONG}",
        f"| head |\n|---|\n| {LONG} |",
        f"# {LONG}",
        f"`{LONG}`",
        f"![{LONG}](x.png)",
    ],
    ids=["fence", "indented", "table", "heading", "inline code", "image"],
)
def test_code_tables_headings_and_images_are_not_prose(text: str) -> None:
    assert rules(text) == {}


def test_the_target_of_a_link_adds_no_words() -> None:
    text = f"See [the page]({'a-b' * 50}.md#part-one-of-three)."
    assert check_page("page.md", text)[1].words == 3


def test_each_item_of_a_list_ends_its_sentence() -> None:
    items = "\n".join("- " + " ".join(["word"] * 18) for _ in range(3))
    assert check_page("page.md", items)[1].units == 3


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It resumes. Then it ends.", [2, 3]),
        ("Use a store, e.g. S3. It works.", [5, 2]),
        ("Version 0.1.0 of run.toml is read.", [6]),
        ("See Fig. 3 and J. Dean et al. 2012 there.", [10]),
        ("(It resumes.) `code` follows.", [2, 2]),
        ("Does it? Yes! Good.", [2, 1, 1]),
    ],
)
def test_a_sentence_ends_at_a_stop_before_a_capital_but_not_at_an_abbreviation(
    text: str, count: list[int]
) -> None:
    assert lengths(text) == count


def test_a_mean_above_20_words_is_an_offense_that_counts_the_surplus() -> None:
    text = " ".join(f"First {'word ' * 20}ends." for _ in range(2))
    (finding,) = check_page("page.md", text)[0]
    assert (finding.rule, finding.count) == ("mean-sentence", 4)


def test_a_paragraph_of_more_than_110_words_is_an_offense() -> None:
    ten = "Nine words and one more are in this sentence. "
    assert "long-paragraph" in rules(ten * 13)
    assert rules(ten * 6 + "\n\n" + ten * 6) == {}


@pytest.mark.parametrize("date", ["2026-11-26", "26 November", "November 26", "November 2026"])
@pytest.mark.parametrize("place", ["On {} it ran.", "| {} |\n|---|", "# The run of {}"])
def test_a_date_is_an_offense_in_prose_tables_and_headings(date: str, place: str) -> None:
    assert rules(place.format(date)) == {"date": 1}


def test_a_date_in_code_is_no_offense() -> None:
    assert rules("Pass `2026-11-26`.\n\n```\n2026-11-26 step 3\n```\n") == {}
