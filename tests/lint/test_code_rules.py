"""The language rules for source code, each on a few lines."""

from __future__ import annotations

import pytest

from lint.code_rules import check_classes, check_source


def rules(source: str) -> list[tuple[str, int, str]]:
    """The rule, line and text of each finding."""
    findings, _ = check_source("module.py", source)
    return [(finding.rule, finding.line, finding.text) for finding in findings]


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "found: int = 1",
        "for found in range(3): pass",
        "rows = [found for found in range(3)]",
        "if (found := 1): pass",
        "with open('x') as found: pass",
        "def f(found): pass",
        "def f(*, found=1): pass",
        "lambda found: 0",
        "self.found = 1",
        "self._found = 1",
        "class A:\n found: int",
        "class A:\n @property\n def found(self): return 1",
        "try: pass\nexcept OSError as found: pass",
        "match x:\n case [found]: pass",
    ],
)
def test_a_vague_name_is_an_offense_wherever_it_is_bound(source: str) -> None:
    assert [rule for rule, _, _ in rules(source)] == ["vague-name"]


@pytest.mark.parametrize(
    "source", ["print(found)", "f(found=1)", "x.found()", "found_path = 1", "def found(): pass"]
)
def test_a_use_of_a_name_and_a_longer_name_are_no_offense(source: str) -> None:
    assert rules(source) == []


@pytest.mark.parametrize("start", ["What", "That", "Those", "Who", "Whoever", "Whether", "Of"])
def test_a_docstring_may_not_start_with_a_relative_word(start: str) -> None:
    source = f'def f():\n    """{start} is returned."""\n'
    assert rules(source) == [("docstring-start", 2, f"{start} is returned.")]


def test_a_docstring_below_an_attribute_is_checked() -> None:
    assert [rule for rule, _, _ in rules('class A:\n    x: int\n    """What is kept."""')] == [
        "docstring-start"
    ]


def test_a_docstring_that_starts_with_a_noun_is_no_offense() -> None:
    assert rules('"""Offset of a block."""') == []


def test_a_speech_verb_in_a_docstring_is_reported_with_its_line() -> None:
    assert rules('"""Send a heartbeat.\n\nThe leader tells the ranks.\n"""') == [("speech-verb", 3, "tells")]


def test_a_speech_verb_in_inline_code_or_in_a_plain_string_is_no_offense() -> None:
    assert rules('"""Call ``log.tell`` once."""\ntext = "the leader says so"') == []


@pytest.mark.parametrize("start", ["What", "That", "Those", "Who", "Whoever", "Whether", "Of"])
def test_a_comment_may_not_start_with_a_relative_word(start: str) -> None:
    assert rules(f"x = 1\n# {start} is kept.\ny = 2") == [("comment-start", 2, f"{start} is kept.")]


def test_a_comment_beside_code_may_not_start_with_a_relative_word_in_lower_case() -> None:
    assert rules("x = 1  # what is kept") == [("comment-start", 1, "what is kept")]


def test_lines_of_comments_below_each_other_are_one_comment() -> None:
    assert rules("# The state of a run, and the step\n#\n# Whether it is kept.") == []


def test_a_comment_below_code_is_none_with_the_comment_beside_it() -> None:
    assert rules("x = 1  # one\n# Of two") == [("comment-start", 2, "Of two")]


def test_a_speech_verb_in_a_comment_is_reported_with_its_line() -> None:
    source = "if x:\n    # Send a heartbeat:\n    # the leader tells the ranks.\n    y = 1  # says so"
    assert rules(source) == [("speech-verb", 3, "tells"), ("speech-verb", 4, "says")]


def test_a_speech_verb_in_inline_code_of_a_comment_or_behind_a_sign_in_a_string_is_no_offense() -> None:
    assert rules('# Call ``log.tell`` once.\ntext = "# the leader says so"') == []


def test_the_totals_are_the_words_of_docstrings_and_their_speech_verbs() -> None:
    _, total = check_source("module.py", '"""Return what it says."""\nx = 1  # no docstring, says it')
    assert (total.words, total.units) == (4, 1)


def test_a_public_class_name_in_two_files_is_an_offense_of_both() -> None:
    sources = {"a/x.py": "class Piece:\n    pass", "b/y.py": "import z\n\nclass Piece(z.Base): pass"}
    assert [(finding.path, finding.line) for finding in check_classes(sources)] == [
        ("a/x.py", 1),
        ("b/y.py", 3),
    ]


def test_private_classes_and_classes_inside_others_may_share_a_name() -> None:
    text = "class _Piece:\n    class Inner: pass"
    assert check_classes({"x.py": text, "y.py": text}) == []
