"""No test depends on when its file was collected: in a suite of half an hour, that is half an hour before the test runs."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
CLOCKS = ("time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "datetime.now", ".metadata")
"""What reads a clock; metadata of a connection holds the time at which it is made."""


def read_on_import(tree: ast.AST) -> list[int]:
    """Lines on which a clock is read by the import of a file: outside functions, in decorators and in defaults of arguments."""
    found = []
    if isinstance(tree, ast.Call) and f".{ast.unparse(tree.func)}".endswith(
        tuple(f".{one.lstrip('.')}" for one in CLOCKS)
    ):
        found.append(tree.lineno)
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        defaults = [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]
        decorators = [] if isinstance(tree, ast.Lambda) else tree.decorator_list
        inner = [*defaults, *decorators]
    else:
        inner = list(ast.iter_child_nodes(tree))
    return found + [line for node in inner for line in read_on_import(node)]


def test_no_test_reads_a_clock_when_its_file_is_collected() -> None:
    texts = {path: path.read_text() for path in HERE.rglob("*.py")}
    words = [one.rpartition(".")[2] + "(" for one in CLOCKS]
    suspects = {path: text for path, text in texts.items() if any(word in text for word in words)}
    found = {
        str(path): lines for path, text in suspects.items() if (lines := read_on_import(ast.parse(text)))
    }
    assert found == {}


def test_clocks_are_found_where_an_import_reads_them_and_nowhere_else() -> None:
    for line in (
        "NOW = time.time()",
        "def f(x=C.metadata()): ...",
        "@mark(datetime.now(UTC))\ndef f(): ...",
        "class A:\n    t = time.monotonic()",
    ):
        assert read_on_import(ast.parse(line)), line
    for line in ("def f():\n    return time.time()", "later = lambda: time.time()", "clock = time.time"):
        assert not read_on_import(ast.parse(line)), line
