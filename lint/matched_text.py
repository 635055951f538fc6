"""No code matches on English that other code of ours writes.

A reworded message must not switch an alert off. Events carry a kind and fields (``observe/events.py``), and code matches on those.
A *matcher* is a literal in ``startswith``, ``in``, ``partition`` and the like, or a regular expression. It is an offense if it has
two words or more and matches a text that another line of the package writes. A word inside of one that is matched on an attribute
that carries a message (``.text``, ``.what``) is an offense too.

A line that ends in ``# matched text: REASON`` is exempt, or the one below such a comment: the text is of another program, or of
people, or the only form in which a format carries the fact.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lint.findings import Finding

_TEXT_METHODS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split")
_PATTERN_FUNCTIONS = ("compile", "search", "match", "fullmatch", "findall", "finditer")
_MESSAGE_ATTRIBUTES = ("text", "what", "why", "reason", "message", "evidence")
_WORDS = re.compile(r"[A-Za-z]{2,}[:,;]? [A-Za-z]{2,}")
_WORD = re.compile(r"[A-Za-z]{3,}")
_EXEMPTION = re.compile(r"# matched text: \w+")
_SENTENCE_WORDS = 3
_FILLED = "7"
"""Stands for what an f-string inserts."""


@dataclass(frozen=True)
class Matcher:
    """A literal that a text is compared with."""

    path: str
    line: int
    literal: str
    is_pattern: bool
    on_message: bool
    """True if the text is an attribute that carries a message."""
    last_line: int


def check_matched_text(sources: Mapping[str, str]) -> list[Finding]:
    """Find matchers on text that the package itself writes. ``sources`` maps paths to source text."""
    matchers: list[Matcher] = []
    written: dict[str, tuple[str, int]] = {}
    for path, source in sources.items():
        tree = ast.parse(source)
        exempt = _exempt_lines(source)
        own = [matcher for matcher in _matchers(path, tree) if exempt.isdisjoint(_lines_of(matcher))]
        matchers += own
        skipped = {id(node) for node in _skipped(tree)}
        for text, line in _texts(tree, skipped):
            written.setdefault(text, (path, line))
    corpus = "\n".join(written)
    return [
        Finding(matcher.path, matcher.line, "matched-text", matcher.literal[:60])
        for matcher in matchers
        if _is_offense(matcher, corpus)
    ]


def _exempt_lines(source: str) -> set[int]:
    """Return the lines that end in the reason of an exemption, and those below a comment that has one."""
    reasons = (
        (number, line) for number, line in enumerate(source.splitlines(), 1) if _EXEMPTION.search(line)
    )
    return {number + line.lstrip().startswith("#") for number, line in reasons}


def _lines_of(matcher: Matcher) -> range:
    return range(matcher.line, matcher.last_line + 1)


def _is_offense(matcher: Matcher, corpus: str) -> bool:
    if matcher.on_message and _WORD.search(matcher.literal):
        return True
    if not _WORDS.search(matcher.literal):
        return False
    if not matcher.is_pattern:
        return matcher.literal in corpus
    try:
        # A pattern that matches every text is no offense.
        pattern = re.compile(matcher.literal, re.MULTILINE)
    except re.error:
        return False
    return any(_WORDS.search(match[0]) for match in pattern.finditer(corpus))


def _matchers(path: str, tree: ast.Module) -> Iterator[Matcher]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=subject, attr=method), args=[searched, *_]) if (
                method in _TEXT_METHODS
            ):
                is_pattern, of_message = False, _carries_message(subject)
            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=function), args=[searched, *_]) if (
                function in _PATTERN_FUNCTIONS
            ):
                is_pattern, of_message = True, False
            case ast.Compare(left=searched, ops=[ast.In() | ast.NotIn()], comparators=[subject]) if (
                not isinstance(subject, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.Constant)
            ):
                is_pattern, of_message = False, _carries_message(subject)
            case _:
                continue
        for literal in _literals(searched):
            yield Matcher(path, node.lineno, literal, is_pattern, of_message, node.end_lineno or node.lineno)


def _carries_message(subject: ast.expr) -> bool:
    match subject:
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" | "casefold")):
            return _carries_message(inner)
        case ast.Attribute(attr=attribute):
            return attribute in _MESSAGE_ATTRIBUTES
        case _:
            return False


def _literals(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=parts):
            for part in parts:
                yield from _literals(part)
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def _skipped(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the literals that are no text for people: docstrings, and the matchers themselves."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring
            case ast.Call(func=ast.Attribute(attr=method), args=args) if method in (
                *_TEXT_METHODS,
                *_PATTERN_FUNCTIONS,
            ):
                for argument in args:
                    yield from ast.walk(argument)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
                yield from ast.walk(left)


def _texts(tree: ast.Module, skipped: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the texts of three words or more that a module writes, with their lines."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in skipped or id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in ast.walk(node))
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else _FILLED for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) >= _SENTENCE_WORDS:
            yield text, node.lineno
