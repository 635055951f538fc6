"""Language rules for README.md and the manual: length of sentences and paragraphs, and dates.

Code blocks, tables, headings, images and link targets are not prose. Inline code counts as one word. Dates are
searched for in tables and headings too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

from lint.findings import Finding, Words

MAX_SENTENCE = 35
MEAN_SENTENCE = 20
MAX_PARAGRAPH = 110
_MONTH = "(January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = re.compile(rf"\b\d{{4}}-\d\d-\d\d\b|\b\d{{1,2}}\.? {_MONTH}\b|\b{_MONTH} \d{{1,4}}\b")
_ABBREVIATION = re.compile(r"(^|[\s(])(e\.g|i\.e|cf|vs|etc|al|Fig|Sec|No|Eq|approx|resp|[A-Z])\.$")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9`])")
_CODE = "`code`"


def check_page(path: str, text: str) -> tuple[list[Finding], Words]:
    """Apply the rules for one Markdown page.

    Returns the findings and the page's number of words and of sentences.
    """
    findings, total = [], Words()
    for is_prose, line, block in _blocks(text):
        findings += [
            Finding(path, line + block.count("\n", 0, date.start()), "date", date.group())
            for date in DATE.finditer(block)
        ]
        if not is_prose:
            continue
        lengths = []
        for start, sentence in sentences(block):
            lengths.append(_length(sentence))
            if lengths[-1] > MAX_SENTENCE:
                opening = f"{lengths[-1]} words: {' '.join(sentence.split()[:8])} ..."
                findings.append(Finding(path, line + block.count("\n", 0, start), "long-sentence", opening))
        if sum(lengths) > MAX_PARAGRAPH:
            findings.append(Finding(path, line, "long-paragraph", f"{sum(lengths)} words"))
        total += Words(sum(lengths), len(lengths))
    surplus = total.words - MEAN_SENTENCE * total.units
    if surplus > 0:
        mean = (
            f"mean of {total.words / total.units:.1f} words: {surplus} words above {MEAN_SENTENCE} a sentence"
        )
        findings.append(Finding(path, 1, "mean-sentence", mean, surplus))
    return findings, total


def sentences(block: str) -> Iterator[tuple[int, str]]:
    """Split a paragraph; yield each sentence with the index of its first character."""
    start = 0
    for end in _SENTENCE_END.finditer(block):
        if not _ABBREVIATION.search(block[start : end.start() + 1]):
            yield start, block[start : end.end()]
            start = end.end()
    if _length(block[start:]):
        yield start, block[start:]


def _blocks(text: str) -> Iterator[tuple[bool, int, str]]:
    """Yield each block of text without markup: whether it is a paragraph, its first line, and the text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    line = 1
    opening = ""
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield opening == "paragraph_open", line, _plain(token)
        opening = token.type


def _plain(inline: Token) -> str:
    """Return the visible text, with inline code replaced by one word and line breaks kept."""
    fixed = {"code_inline": _CODE, "softbreak": "\n", "hardbreak": "\n"}
    children = inline.children or []
    return "".join(child.content if child.type == "text" else fixed.get(child.type, "") for child in children)


def _length(sentence: str) -> int:
    """Count the words; a number and inline code are one word each, a lone sign is none."""
    return sum(any(character.isalnum() for character in word) for word in sentence.split())
