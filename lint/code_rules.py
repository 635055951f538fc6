"""Language rules for Python source: names, docstrings, comments and class names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping

from lint.findings import Finding, Words

VAGUE_NAMES = re.compile(
    r"_*(found|one|held|told|asked|said|heard|known|wanted|given|whole|why|what|which|gone|begun)"
)
"""Names that do not state what the value is; leading underscores are ignored."""
RELATIVE_STARTS = ("What", "That", "Those", "Who", "Whoever", "Whether", "Of")
SPEECH_VERBS = re.compile(
    r"\b(tell|tells|told|say|says|said|ask|asks|asked|hear|hears|heard)\b", re.IGNORECASE
)
_TEST_NAME = re.compile(r"test_\w+")
_CODE_SPAN = re.compile(r"``[^`]*``|`[^`]*`")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")


def check_source(path: str, source: str) -> tuple[list[Finding], Words]:
    """Apply the rules for one file, except the one for duplicate classes.

    Returns the findings, and the docstrings' numbers of words and of speech verbs.
    """
    findings, total = [], Words()
    for node in ast.walk(ast.parse(source)):
        findings += [
            Finding(path, line, "vague-name", name)
            for name, line in _bindings(node)
            if VAGUE_NAMES.fullmatch(name)
        ]
        findings += [
            Finding(path, line, "test-name", name)
            for name, line in _tests(node)
            if SPEECH_VERBS.search(name.replace("_", " "))
        ]
        for docstring in _docstrings(node):
            text = str(docstring.value)
            flaws, words = _check_text(path, docstring.lineno, text, "docstring-start")
            findings += flaws
            total += words
    for line, text in _comments(source):
        findings += _check_text(path, line, text, "comment-start")[0]
    return findings, total


def _check_text(path: str, line: int, text: str, start_rule: str) -> tuple[list[Finding], Words]:
    """Apply the rules for prose to a docstring or comment that begins in ``line``. Inline code counts as no word.

    Returns the findings, and the numbers of words and of speech verbs.
    """
    prose = _CODE_SPAN.sub("", text)
    first = _WORD.search(text)
    findings = []
    if first and first.group().capitalize() in RELATIVE_STARTS:
        findings.append(Finding(path, line, start_rule, text.strip().split("\n")[0][:60]))
    verbs = list(SPEECH_VERBS.finditer(prose))
    findings += [
        Finding(path, line + prose.count("\n", 0, verb.start()), "speech-verb", verb.group())
        for verb in verbs
    ]
    return findings, Words(len(_WORD.findall(prose)), len(verbs))


def check_classes(sources: Mapping[str, str]) -> list[Finding]:
    """Find public classes at module level whose name exists in two or more of the files.

    `sources` maps paths to source text. All of `phalanx` counts as one package: a name is searched for in all of it.
    """
    homes: dict[str, dict[str, int]] = {}
    for path, source in sources.items():
        for match in re.finditer(r"^class ([A-Za-z]\w*)", source, re.MULTILINE):
            homes.setdefault(match.group(1), {})[path] = source.count("\n", 0, match.start()) + 1
    return [
        Finding(path, line, "duplicate-class", f"{name}, also in {', '.join(sorted(lines.keys() - {path}))}")
        for name, lines in homes.items()
        if len(lines) > 1
        for path, line in lines.items()
    ]


def _bindings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of variables, parameters and attributes that a node binds, with their lines."""
    match node:
        case (
            ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name)
        ):
            yield name, node.lineno
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name, node.lineno
        case ast.FunctionDef(name=name, decorator_list=decorators):
            if any("property" in ast.unparse(decorator) for decorator in decorators):
                yield name, node.lineno


def _tests(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name of a test, and its line."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _TEST_NAME.fullmatch(name):
            yield name, node.lineno


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstring of a definition, and the bare strings below the attributes of a module or class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        statements = node.body[:1]
    elif isinstance(node, ast.Module | ast.ClassDef):
        statements = node.body
    else:
        return
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield constant


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module without their signs, each with the number of its first line. Lines that
    have only a comment, one below the other in one column, are one comment.
    """
    begin, column, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, at = token.start
        continues = (row, at) == (begin + len(lines), column) and not token.line[:at].strip()
        if lines and not continues:
            yield begin, "\n".join(lines)
            lines = []
        if not lines:
            begin, column = row, at
        lines.append(token.string.lstrip("#"))
    if lines:
        yield begin, "\n".join(lines)
