"""No test replaces a constant of a module: a limit that a test has to change is a parameter of what it limits.

A patched constant couples the test to a private name, and hides the limit from a reader of the class or function that has it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
EXCEPTIONS = {"hardware/test_kernels.py": 2}
"""Patches that are left, by file. Only smaller numbers and fewer files are allowed."""
CONSTANT = re.compile(r"(?:.*\.)?_?[A-Z][A-Z0-9_]*")


def patched_constants(tree: ast.AST) -> list[int]:
    """Return the lines on which a constant is replaced: by ``setattr``, by ``patch``, or by an assignment to an attribute."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in (
                "setattr",
                "object",
                "patch",
            ):
                texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
                patched = any(isinstance(text, str) and CONSTANT.fullmatch(text) for text in texts)
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                patched = CONSTANT.fullmatch(name) is not None
            case _:
                patched = False
        if patched:
            lines.append(node.lineno)
    return sorted(lines)


def test_no_test_replaces_a_constant_and_the_exceptions_are_no_more_than_are_needed() -> None:
    trees = {str(path.relative_to(HERE)): ast.parse(path.read_text()) for path in HERE.rglob("*.py")}
    lines = {path: patches for path, tree in trees.items() if (patches := patched_constants(tree))}
    assert {path: len(patches) for path, patches in lines.items()} == EXCEPTIONS, lines


def test_constants_are_recognized_however_they_are_replaced() -> None:
    for line in (
        'monkeypatch.setattr(server, "_PAUSE_S", 0.1)',
        'monkeypatch.setattr("phalanx.store.hedge._UNKNOWN_S", 0.1)',
        'setattr(server, "PAUSE_S", 0.1)',
        'patch.object(blocks, "BLOCK", 1)',
        'mock.patch("phalanx.watch.logs.blocks.BLOCK", 1)',
        "limit, matrices.BATCH_ELEMENTS = matrices.BATCH_ELEMENTS, 50",
        "checksum._ROWS_AT_ONCE = {}",
    ):
        assert patched_constants(ast.parse(line)) == [1], line
    for line in (
        'monkeypatch.setattr(os, "getuid", lambda: 0)',
        'monkeypatch.setattr("phalanx.watch.metrics.lookout.reasons", None)',
        'monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")',
        "model.head = None",
        "limit = matrices.BATCH_ELEMENTS",
    ):
        assert not patched_constants(ast.parse(line)), line
