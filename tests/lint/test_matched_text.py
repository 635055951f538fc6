"""Code that matches on English which other code of the package writes is an offense."""

from __future__ import annotations

import pytest

from lint.matched_text import check_matched_text

WRITER = 'def tell(slot):\n    log(f"not finite are loss of slot {slot} and more")\n'


def offenses(reader: str) -> list[tuple[str, str]]:
    sources = {"src/phalanx/writer.py": WRITER, "src/phalanx/reader.py": reader}
    return [(finding.path, finding.text) for finding in check_matched_text(sources)]


@pytest.mark.parametrize(
    ("reader", "literal"),
    [
        ('import re\nSLOT = re.compile(r"loss of slot (\\d+)")', r"loss of slot (\d+)"),
        ('def f(said):\n    return said.startswith("not finite are")', "not finite are"),
        ('def f(said):\n    return "of slot" in said', "of slot"),
        ('def f(event):\n    return event.text.startswith("finite")', "finite"),
        ('def f(event):\n    return "slot" in event.what.lower()', "slot"),
    ],
)
def test_matching_on_a_text_of_the_package_is_an_offense(reader: str, literal: str) -> None:
    assert offenses(reader) == [("src/phalanx/reader.py", literal)]


@pytest.mark.parametrize(
    "reader",
    [
        'import re\nCARD = re.compile(r"model name: (.*)")',  # nobody of us writes it
        'def f(line):\n    return line.startswith("slot")',  # a word of a format
        'def f(name):\n    return name in ("loss of slot", "not finite")',  # a table, not a text
        'def f():\n    """Return the loss of slot 7."""',
    ],
)
def test_matching_on_foreign_text_and_on_words_of_a_format_is_none(reader: str) -> None:
    assert offenses(reader) == []


@pytest.mark.parametrize(
    ("reader", "is_offense"),
    [
        ('def f(said):\n    return "of slot" in said  # matched text: a library prints it', False),
        ('import re\n# matched text: a library prints it\nSLOT = re.compile(\n    r"loss of slot"\n)', False),
        ('def f(said):\n    a = 1  # matched text: a library prints it\n    return "of slot" in said', True),
        ('def f(said):\n    return "of slot" in said  # matched text:', True),
    ],
)
def test_a_reason_beside_a_matcher_exempts_it_alone(reader: str, is_offense: bool) -> None:
    assert bool(offenses(reader)) == is_offense
